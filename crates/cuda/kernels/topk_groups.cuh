// Where groups of packed indices begin, which only the group before tells: from its first bit on, 128 gaps have to
// be read to know where the next one begins. What is done instead:
//
// The bits are cut into *stretches*, and a block of threads has one, with a *window* of bits that reaches beyond
// it. It asks of every bit near its beginning: if a group began here, where would the following ones? Such a
// *trail* ends where the stretch does, and nearly all end at once: what would be the width of a group is none
// that is likely. Of those that are left over, one is the true one, and as a rule others lead into it.
//
// To follow a trail, 128 gaps are skipped at a time. For each likely width a warp has gone through the whole
// window gap by gap, and set a bit where each begins, its *nodes*; wherever else one begins with the same
// width, after a few gaps one is at a node: then the rest is counting nodes.
//
// The block that is done last goes from stretch to stretch. Where a trail begins at the bit at which the last
// one ended, it is taken; what it says is so, however it was found. Which trail goes on with which is found for
// many stretches at once, so that a step of the walk is one word of shared memory. Elsewhere the walk goes gap
// by gap, in a window of its own: through a group of unlikely width, the last one, and whatever no encoder wrote.
//
// Blocks without a stretch write zeros meanwhile, where the values will go: the walk is short beside that.

#ifndef UNISONO_TOPK_GROUPS
#define UNISONO_TOPK_GROUPS

#include "topk.cuh"

// Bits of a stretch, of its window, and of the part of it in which trails begin: groups are longer only where one
// element of a hundred million is sent. A longer stretch leaves fewer trails, and takes longer to follow.
constexpr u32 STRETCH = 12288, WINDOW = 16384, ENTRIES = WINDOW - STRETCH;
constexpr u32 WORDS = WINDOW / 64;
// Likely widths: none at all, which whole rows have, and those around that of the mean gap, some of them below.
constexpr u32 WIDTHS = 9, WIDTHS_BELOW = 4;
// Groups of likely widths after which a trail may have another one. With fewer, more wrong trails are followed; with
// more, fewer right ones where some elements are much more often sent than others.
constexpr u32 LIKELY = 3;
// Trails that are kept of a stretch, and groups of a trail: one has 133 bits at least. Random gaps leave two to
// twenty trails, rarely more; each that has no room may be the true one, and then its groups are read one after
// the other.
constexpr u32 TRAILS = 24, MOST_GROUPS = STRETCH / (WIDTH_BITS + GROUP) + 1;
constexpr u32 STARTS = (MOST_GROUPS + 1) / 2 * 2;

// Groups that follow each other, at least one, if one begins at `entry`; bits are counted from the beginning of
// the stretch.
struct Trail {
    u16 entry;
    u16 groups;
    // Where the next one begins.
    u32 end;
};
// What `entry` is where there is no trail.
constexpr u32 NO_ENTRY = 0xffff;

// First the trails that there are.
struct Stretch {
    Trail trails[TRAILS];
    u16 starts[TRAILS][STARTS];
};
static_assert(sizeof(Stretch) == TRAILS * (8 + 188), "as the launcher has it");

struct Groups {
    State *state;
    const char *encoding;
    u64 length;
    u64 elements;
    // How many elements there is room for.
    u64 most;
    u64 *starts;
    Stretch *stretches;
    // How many of those there are, and blocks to find them.
    u64 blocks;
    ValueBytes value_bytes;
    // Where to write zeros, unless it is null.
    Into into;
};

// What can be wrong with bytes.
constexpr u32 FINE = 0, WRONG_LENGTH = 1, WRONG_COUNT = 2, WRONG_INDEX = 3, WRONG_PADDING = 4;

// The first of several stays, until it was asked for.
__device__ inline void say_damage(State &state, u32 damage, u64 found) {
    if (damage && !state.damage) {
        state.damage = damage;
        state.found = found;
    }
}

__device__ inline u32 zeros_of(u64 bits) {
    return static_cast<u32>(bits) ? lowest_bit(static_cast<u32>(bits)) : 32 + lowest_bit(static_cast<u32>(bits >> 32));
}

__device__ inline u32 count_bits_of(u64 bits) {
    return count_bits(static_cast<u32>(bits)) + count_bits(static_cast<u32>(bits >> 32));
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

    // The high part of a gap that begins at `at`, which is moved behind the one that ends it. With no one left,
    // all bits.
    __device__ u64 take_high(u64 &at) const {
        u64 high = 0, seen = peek(at);
        while (!static_cast<u32>(seen)) {
            if (at >= 8 * count)
                return ~u64(0);
            high += 32;
            at += 32;
            seen = peek(at);
        }
        const u32 zeros = lowest_bit(static_cast<u32>(seen));
        at += zeros + 1;
        return high + zeros;
    }
};

// What an encoding says of itself.
struct Header {
    u32 damage;
    u32 count;
    // What is wrong, if something is.
    u64 found;
    // Bytes of the values, and of the indices.
    u64 values;
    Bits bits;

    __device__ explicit Header(const Groups &call) : damage(FINE), count(0), found(0), values(0) {
        if (call.length >= 4)
            count = word_at(call.encoding);
        values = call.value_bytes.of(count);
        const u64 least = 4 + values + (count + 7) / 8;
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
        bits = {reinterpret_cast<const u8 *>(call.encoding) + 4, damage ? 0 : call.length - 4 - values};
    }

    // The width of the mean gap.
    __device__ u32 mean_width(u64 elements) const {
        return 31 - leading_zeros(static_cast<u32>(count ? elements / count : 0) | 1);
    }
};

// A window of bits. Places are counted from its first one; what is not in sight is at `WINDOW` or beyond.
struct Window {
    // With a word of zeros behind them.
    u64 *words;
    // By slots for likely widths, the nodes, and how many there are before each word.
    u64 (*nodes)[WORDS];
    u16 (*before)[WORDS];
    // The width of the second slot.
    u32 least;

    __device__ u32 width_of(u32 slot) const { return slot ? least + slot - 1 : 0; }

    // `WIDTHS` or more of a width that is not likely.
    __device__ u32 slot_of(u32 width) const { return !width ? 0 : width >= least ? width - least + 1 : WIDTHS; }

    __device__ u32 width_at(u32 place) const {
        const u64 word = words[place / 64] >> (place % 64), next = place % 64 ? words[place / 64 + 1] : 0;
        return static_cast<u32>(word | next << (63 - place % 64) << 1) & 31;
    }

    __device__ bool is_likely(u32 width) const { return slot_of(width) < WIDTHS; }

    // Where the gap after the one at a place begins.
    __device__ u32 after_gap(u32 place, u32 width) const {
        u32 number = place / 64;
        u64 word = words[number] >> (place % 64);
        if (word)
            return place + zeros_of(word) + 1 + width;
        while (++number < WORDS)
            if ((word = words[number]))
                return number * 64 + zeros_of(word) + 1 + width;
        return 2 * WINDOW;
    }

    // Sets the nodes of a part of the window from `place` on, until it comes to one that is there: from there on
    // nothing changes. Where the first gap after the part begins; `same` if that did not change.
    __device__ u32 set_nodes(u32 slot, u32 part, u32 place, u32 same) const {
        constexpr u32 PART = WORDS / WARP;
        for (u32 number = part * PART; number < (part + 1) * PART; ++number) {
            const u64 old = nodes[slot][number];
            u64 fresh = 0;
            while (place < (number + 1) * 64) {
                const u64 bit = u64(1) << (place % 64);
                if (old & bit) {
                    nodes[slot][number] = fresh | (old & ~(bit - 1));
                    return same;
                }
                fresh |= bit;
                place = after_gap(place, width_of(slot));
            }
            nodes[slot][number] = fresh;
        }
        return place;
    }

    // Sets the nodes of a width, by a warp: each lane in a part of its own, first as if a gap began with it, and
    // then from where the part before says.
    __device__ void set_nodes(u32 slot) const {
        constexpr u32 PART = WORDS / WARP;
        const u32 lane = threadIdx.x % WARP;
        for (u32 i = 0; i < PART; ++i)
            nodes[slot][lane * PART + i] = 0;
        u32 from = lane * PART * 64, end = set_nodes(slot, lane, from, 0);
        for (;;) {
            const u32 below = from_below(end, 1);
            const bool moved = lane > 0 && below != from;
            if (!votes(moved))
                break;
            if (moved)
                end = set_nodes(slot, lane, from = below, end);
        }
        u32 count = 0;
        for (u32 i = 0; i < PART; ++i)
            count += count_bits_of(nodes[slot][lane * PART + i]);
        u32 sum = count;
#pragma unroll
        for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
            const u32 lower = from_below(sum, lanes);
            sum += lane >= lanes ? lower : 0;
        }
        sum -= count;
        for (u32 i = 0; i < PART; ++i) {
            before[slot][lane * PART + i] = static_cast<u16>(sum);
            sum += count_bits_of(nodes[slot][lane * PART + i]);
        }
    }

    // Where the gap that many after the one at a place begins.
    __device__ u32 after_gaps(u32 width, u32 place, u32 gaps) const {
        const u32 slot = slot_of(width);
        for (; gaps && place < WINDOW; --gaps, place = after_gap(place, width)) {
            if (slot >= WIDTHS)
                continue;
            const u64 word = nodes[slot][place / 64], bit = u64(1) << (place % 64);
            if (!(word & bit))
                continue;
            u32 rank = before[slot][place / 64] + count_bits_of(word & (bit - 1)) + gaps;
            // The last word with no more nodes before it.
            u32 number = place / 64;
#pragma unroll
            for (u32 step = WORDS / 2; step > 0; step /= 2)
                if (number + step < WORDS && before[slot][number + step] <= rank)
                    number += step;
            u64 left = nodes[slot][number];
            for (rank -= before[slot][number]; rank && left; --rank)
                left &= left - 1;
            return left ? number * 64 + zeros_of(left) : WINDOW;
        }
        return place;
    }
};

// Follows a trail; whether it is one.
__device__ inline bool follow(Trail &trail, u16 (&starts)[STARTS], const Window &window, const Header &header,
                              u64 base, u32 entry) {
    const u64 bytes = header.bits.count;
    u32 place = entry, groups = 0, likely = base ? 0 : MOST_GROUPS * LIKELY;
    while (place < STRETCH && (base + place + 7) / 8 != bytes) {
        const u32 width = window.width_at(place);
        if (window.is_likely(width))
            ++likely;
        else if (likely >= LIKELY)
            likely -= LIKELY;
        else
            return false;
        const u32 next = window.after_gaps(width, place + WIDTH_BITS, GROUP);
        if (next >= WINDOW) {
            // The last group, which may be shorter, is left to the walk, if it ends with the indices.
            const u32 rest = (header.count - 1) % GROUP + 1;
            const u32 end = window.after_gaps(width, place + WIDTH_BITS, rest);
            if ((base + end + 7) / 8 != bytes)
                return false;
            break;
        }
        starts[groups++] = static_cast<u16>(place);
        place = next;
    }
    trail.entry = static_cast<u16>(entry);
    trail.groups = static_cast<u16>(groups);
    trail.end = place;
    return groups > 0;
}

// The words of a window that begins with a bit, by all threads of a block.
__device__ inline void load_words(u64 (&words)[WORDS + 1], const Bits &bits, u64 base) {
    static_assert(WORDS == THREADS, "a word for each thread");
    const u64 at = base + threadIdx.x * 64;
    words[threadIdx.x] = (bits.peek(at + 32) << 32) | static_cast<u32>(bits.peek(at));
    if (threadIdx.x == 0)
        words[WORDS] = 0;
}

// What a block needs to find trails.
struct Search {
    u64 words[WORDS + 1];
    u64 nodes[WIDTHS][WORDS];
    u16 before[WIDTHS][WORDS];
    u16 entries[ENTRIES];
    u32 count, kept;
};

// Says that a stretch has only so many trails.
__device__ inline void leave_out(Stretch &stretch, u32 trails) {
    if (threadIdx.x < TRAILS && threadIdx.x >= trails)
        stretch.trails[threadIdx.x] = {NO_ENTRY, 0, 0};
}

// Finds the trails of a stretch.
__device__ inline void find_trails(Search &search, const Groups &call, const Header &header) {
    u16 *entries = search.entries;
    u32 &count = search.count, &kept = search.kept;
    const u64 base = blockIdx.x * u64(STRETCH);
    Stretch &stretch = call.stretches[blockIdx.x];
    const u32 mean = header.mean_width(call.elements);
    const Window window = {search.words, search.nodes, search.before, mean > WIDTHS_BELOW ? mean - WIDTHS_BELOW : 1};
    // The first group begins with the first bit. Elsewhere, twice the bits of a usual group have two or three.
    const u32 usual = 2 * GROUP * (mean + 2), most = usual < ENTRIES ? usual : ENTRIES;
    load_words(search.words, header.bits, base);
    if (threadIdx.x == 0) {
        count = 0;
        kept = 0;
    }
    wait_for_block();
    // Small widths have most nodes: the warps that have those have only these.
    constexpr u32 WARPS = THREADS / WARP;
    static_assert(WIDTHS >= WARPS && WIDTHS <= 2 * WARPS, "one or two for each warp");
    const u32 warp = threadIdx.x / WARP;
    window.set_nodes(warp);
    if (2 * WARPS - 1 - warp < WIDTHS)
        window.set_nodes(2 * WARPS - 1 - warp);
    for (u32 entry = threadIdx.x; entry < (base ? most : 1); entry += THREADS)
        if (!base || (base + entry < 8 * header.bits.count && window.is_likely(window.width_at(entry))))
            entries[atomic_add(&count, 1)] = static_cast<u16>(entry);
    wait_for_block();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        Trail trail;
        u16 starts[STARTS];
        if (!follow(trail, starts, window, header, base, entries[i]))
            continue;
        const u32 place = atomic_add(&kept, 1);
        if (place >= TRAILS)
            continue;
        stretch.trails[place] = trail;
        for (u32 group = 0; group < trail.groups; ++group)
            stretch.starts[place][group] = starts[group];
    }
    wait_for_block();
    leave_out(stretch, kept);
}

#endif
