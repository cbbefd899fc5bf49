// From packed indices and values to elements in their places.

#ifndef UNISONO_TOPK_DECODE
#define UNISONO_TOPK_DECODE

#include "topk.cuh"

// Entries of the directory that a block adds up, groups that a block unpacks, and zeros that it writes at most.
constexpr u32 ENTRIES = 1024, UNPACKED = 32, ZEROS = 16 * THREADS * 4;
static_assert(ENTRIES % UNPACKED == 0, "groups that are unpacked by one block have entries of one block");
// Elements that a block puts in their places, and groups that these are.
constexpr u32 SCATTERED = 1024, SCATTERED_GROUPS = SCATTERED / GROUP;
static_assert(UNPACKED % SCATTERED_GROUPS == 0, "a block's groups were unpacked by one");

struct Indices {
    State *state;
    const char *encoding;
    u64 length;
    u64 elements;
    // How many elements there is room for.
    u64 most;
    ValueBytes value_bytes;
    // Bits of the groups whose entries a block has added up, and how many blocks do so; all others write zeros.
    u32 *parts;
    u64 blocks;
    Into into;
    u32 *indices;
    // How far each group goes, and those that are unpacked by a block.
    u32 *sums;
    u64 *runs;
};

struct Values {
    const State *state;
    const char *encoding;
    u64 length;
    ValueBytes value_bytes;
    char *into;
};

struct Scatter {
    State *state;
    const u32 *indices;
    const u32 *sums;
    const u64 *runs;
    // The f32; or what ends with them, and how many bytes it has.
    const char *values;
    u64 length;
    u64 elements;
    Into into;
    // What a codec of values found; null without one.
    const u64 *fault;
};

// What can be wrong with bytes; of several, the lowest is told.
constexpr u64 WRONG_LENGTH = 1, WRONG_COUNT = 2, WRONG_ENTRY = 3, WRONG_PADDING = 4, WRONG_INDEX = 5;

__device__ inline void say_damage(State &state, u64 damage, u64 found) {
    constexpr u64 LARGEST = (u64(1) << DAMAGE_SHIFT) - 1;
    atomic_min(&state.damage, damage << DAMAGE_SHIFT | (found < LARGEST ? found : LARGEST));
}

// Bits of the packed indices, which begin at any byte; beyond their end there are zeros.
struct Bits {
    const u8 *bytes;
    u64 count;

    // A word of those that memory has, of which the first begins up to three bytes before the bits.
    __device__ u32 word(u64 number) const {
        const u64 skew = reinterpret_cast<u64>(bytes) % 4, first = number * 4;
        if (first >= skew && first + 4 <= count + skew)
            return *reinterpret_cast<const u32 *>(bytes - skew + first);
        u32 word = 0;
        for (u32 i = 0; i < 4; ++i)
            word |= first + i >= skew && first + i - skew < count ? u32(bytes[first + i - skew]) << (8 * i) : 0;
        return word;
    }

    // 33 bits at least.
    __device__ u64 peek(u64 at) const {
        const u64 from = at + reinterpret_cast<u64>(bytes) % 4 * 8;
        return (u64(word(from / 32 + 1)) << 32 | word(from / 32)) >> (from % 32);
    }
};

// What the directory says of a group.
struct Group {
    u32 entry;
    u32 size;
    u32 width;
    u32 highs;

    __device__ bool is_one() const { return highs <= MOST_HIGHS * size; }
    // Bits of the high parts, and of all.
    __device__ u32 high_bits() const { return size + highs; }
    __device__ u32 bits() const { return high_bits() + size * width; }
};

// What an encoding says of itself.
struct Header {
    u64 damage;
    // What is wrong, if something is.
    u64 found;
    u32 count;
    u32 groups;
    // Bytes of the values.
    u64 values;
    const u8 *directory;
    Bits bits;

    __device__ explicit Header(const Indices &call) : damage(0), found(0), count(0) {
        if (call.length >= 4)
            count = word_at(call.encoding);
        groups = count / GROUP + (count % GROUP ? 1 : 0);
        values = call.value_bytes.of(count);
        const u64 entries = u64(groups) * ENTRY_BYTES, least = 4 + entries + values + (u64(count) + 7) / 8;
        if (call.length < 4) {
            damage = WRONG_LENGTH;
            found = 4;
        } else if (count > call.elements || count > call.most) {
            damage = WRONG_COUNT;
            found = count;
        } else if (call.length < least) {
            damage = WRONG_LENGTH;
            found = least;
        }
        if (damage)
            count = groups = 0;
        directory = reinterpret_cast<const u8 *>(call.encoding) + 4;
        bits = {directory + entries, damage ? 0 : call.length - 4 - entries - values};
    }

    // With no group at this place, one of no bits.
    __device__ Group group(u64 number) const {
        if (number >= groups)
            return {0, 0, 0, 0};
        const u32 entry = directory[2 * number] | u32(directory[2 * number + 1]) << 8;
        const u64 left = count - number * GROUP;
        return {entry, static_cast<u32>(left < GROUP ? left : GROUP), entry & ((1 << WIDTH_BITS) - 1), entry >> WIDTH_BITS};
    }
};

__device__ inline void write_zeros(const Into &into, u64 elements, u64 part) {
    const u64 first = part * ZEROS;
    if (into.aligned && first + ZEROS <= elements) {
        const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 i = 0; i < ZEROS / THREADS / 4; ++i)
            store(into.values + (first + (i * THREADS + threadIdx.x) * 4) * 4, zeros);
        return;
    }
    for (u64 i = first + threadIdx.x; i < first + ZEROS && i < elements; i += THREADS)
        put_f32(into.values, i, 0.0f);
}

// Whether the groups fill the bytes that are there; and how many elements there are, which is none if not.
__device__ inline void check_bits(const Indices &call, const Header &header) {
    u64 sum = 0;
    for (u64 i = threadIdx.x; i < call.blocks; i += THREADS)
        sum += fresh(call.parts + i);
    const u64 bits = sums_of(sum).all;
    if (threadIdx.x)
        return;
    State &state = *call.state;
    state.count = header.count;
    if (header.damage)
        say_damage(state, header.damage, header.found);
    else if ((bits + 7) / 8 != header.bits.count) {
        say_damage(state, WRONG_LENGTH, call.length - header.bits.count + (bits + 7) / 8);
        state.count = 0;
    } else if (bits % 8 && static_cast<u32>(header.bits.peek(bits))) {
        say_damage(state, WRONG_PADDING, header.bits.peek(bits));
        state.count = 0;
    }
}

// The first blocks add up how long groups are, the others write zeros where values will go.
KERNEL(topk_directory, Indices, THREADS) {
    if (blockIdx.x >= call.blocks) {
        write_zeros(call.into, call.elements, blockIdx.x - call.blocks);
        return;
    }
    const Header header(call);
    u32 bits = 0;
#pragma unroll
    for (u32 i = 0; i < ENTRIES / THREADS; ++i) {
        const Group group = header.group(blockIdx.x * u64(ENTRIES) + i * THREADS + threadIdx.x);
        if (!group.is_one())
            say_damage(*call.state, WRONG_ENTRY, group.entry);
        bits += group.bits();
    }
    const u32 all = sums_of(bits).all;
    if (threadIdx.x == 0)
        call.parts[blockIdx.x] = all;
    if (is_last(*call.state, static_cast<u32>(call.blocks)))
        check_bits(call, header);
}

// Unpacks a group, by a warp: places relative to the first that the group could name. How far it goes.
__device__ inline u32 unpack_group(const Indices &call, const Header &header, u64 number, u64 start, u16 (&ones)[GROUP]) {
    constexpr u32 EACH = GROUP / WARP, EACH_BITS = (MOST_HIGHS + 1) * GROUP / WARP;
    const Group group = header.group(number);
    const u32 lane = threadIdx.x % WARP, high_bits = group.high_bits();
    // Where the ones are that end high parts.
    const u32 first = lane * EACH_BITS, left = high_bits > first ? high_bits - first : 0;
    const u32 mask = (1u << (left < EACH_BITS ? left : EACH_BITS)) - 1;
    u32 bits = static_cast<u32>(header.bits.peek(start + first)) & mask;
    const u32 own = count_bits(bits);
    u32 before = own;
#pragma unroll
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
        const u32 below = from_below(before, lanes);
        before += lane >= lanes ? below : 0;
    }
    const u32 all = from_lane(before, WARP - 1);
    before -= own;
    for (; bits; bits &= bits - 1, ++before)
        if (before < GROUP)
            ones[before] = static_cast<u16>(first + lowest_bit(bits));
    wait_for_warp();
    if (!group.is_one() || all != group.size || ones[group.size - 1] != high_bits - 1) {
        if (lane == 0) {
            say_damage(*call.state, WRONG_ENTRY, group.entry);
            call.state->count = 0;
        }
        wait_for_warp();
        return 0;
    }
    // How far a low part goes, with those before it.
    u64 lows[EACH], sum = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 place = lane * EACH + i;
        const u64 low = header.bits.peek(start + high_bits + u64(place) * group.width) & ((u64(1) << group.width) - 1);
        sum += place < group.size ? low : 0;
        lows[i] = sum;
    }
    u64 below = sum;
#pragma unroll
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
        const u64 other = number_from_below(below, lanes);
        below += lane >= lanes ? other : 0;
    }
    below -= sum;
    u32 end = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 place = lane * EACH + i;
        if (place < group.size) {
            const u64 index = (u64(ones[place] - place) << group.width) + below + lows[i] + place;
            // Too far, and still no overflow: the sums say so.
            end = static_cast<u32>(index < call.elements ? index : call.elements);
            call.indices[number * GROUP + place] = end;
        }
    }
    end = from_lane(end, (group.size - 1) / EACH);
    wait_for_warp();
    return end + 1 ? end + 1 : end;
}

KERNEL(topk_unpack, Indices, THREADS) {
    constexpr u32 WARPS = THREADS / WARP;
    SHARED u64 starts[UNPACKED];
    SHARED u16 ones[WARPS][GROUP];
    const Header header(call);
    const u64 first = blockIdx.x * u64(UNPACKED), part = first / ENTRIES;
    if (first >= header.groups)
        return;
    // Bits of the groups before.
    u64 bits = 0;
    for (u64 i = threadIdx.x; i < part; i += THREADS)
        bits += call.parts[i];
    for (u64 i = part * ENTRIES + threadIdx.x; i < first; i += THREADS)
        bits += header.group(i).bits();
    const u64 start = sums_of(bits).all;
    const u64 before = sums_of(threadIdx.x < UNPACKED ? u64(header.group(first + threadIdx.x).bits()) : 0).before;
    if (threadIdx.x < UNPACKED)
        starts[threadIdx.x] = start + before;
    wait_for_block();
    u64 sum = 0;
    for (u32 i = threadIdx.x / WARP; i < UNPACKED && first + i < header.groups; i += WARPS) {
        const u32 end = unpack_group(call, header, first + i, starts[i], ones[threadIdx.x / WARP]);
        if (threadIdx.x % WARP == 0) {
            call.sums[first + i] = end;
            sum += end;
        }
    }
    const u64 all = sums_of(sum).all;
    if (threadIdx.x == 0)
        call.runs[blockIdx.x] = all;
}

// Brings the values to where a codec of values finds them.
KERNEL(topk_values, Values, THREADS) {
    const u64 bytes = call.value_bytes.of(call.state->count);
    const char *from = call.encoding + (call.length - bytes);
    for (u64 i = blockIdx.x * u64(THREADS) + threadIdx.x; i < bytes; i += gridDim.x * u64(THREADS))
        call.into[i] = from[i];
}

KERNEL(topk_scatter, Scatter, THREADS) {
    constexpr u32 EACH = SCATTERED / THREADS;
    const u64 count = call.fault && *call.fault != ~u64(0) ? 0 : call.state->count;
    const u64 first = blockIdx.x * u64(SCATTERED);
    if (first >= count)
        return;
    // Where a group's places begin: what those before have, by runs and, within the last of these, one by one.
    SHARED u64 bases[SCATTERED_GROUPS];
    const u64 group = first / GROUP, run = group / UNPACKED, groups = (count + GROUP - 1) / GROUP;
    u64 sum = 0;
    for (u64 i = threadIdx.x; i < run; i += THREADS)
        sum += call.runs[i];
    const u64 own = run * UNPACKED + threadIdx.x;
    if (own < group)
        sum += call.sums[own];
    u64 base = sums_of(sum).all;
    const u64 each = threadIdx.x < SCATTERED_GROUPS && group + threadIdx.x < groups ? call.sums[group + threadIdx.x] : 0;
    base += sums_of(each).before;
    if (threadIdx.x < SCATTERED_GROUPS)
        bases[threadIdx.x] = base;
    wait_for_block();
    const char *values = call.values + (call.length ? call.length - count * 4 : 0);
    u64 elements[EACH];
    float found[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 place = i * THREADS + threadIdx.x;
        const bool there = first + place < count;
        elements[i] = there ? bases[place / GROUP] + call.indices[first + place] : ~u64(0);
        found[i] = there ? __uint_as_float(word_at(values + (first + place) * 4)) : 0.0f;
        // Indices ascend: if the last one is in its place, all are.
        if (first + place == count - 1 && elements[i] >= call.elements)
            say_damage(*call.state, WRONG_INDEX, elements[i]);
    }
    if (call.into.adds) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
            if (elements[i] < call.elements)
                found[i] = __fadd_rn(f32_at(call.into.values, elements[i]), found[i]);
    }
#pragma unroll
    for (u32 i = 0; i < EACH; ++i)
        if (elements[i] < call.elements)
            // Added to a zero, if to nothing else: a negative one is then positive.
            put_f32(call.into.values, elements[i], call.into.adds ? found[i] : __fadd_rn(0.0f, found[i]));
}

#endif
