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
// one ended, it is taken; what it says is so, however it was found. Elsewhere the walk goes gap by gap: through a
// group of unlikely width, the last one, and whatever no encoder wrote.
//
// Blocks without a stretch write zeros meanwhile, where the values will go: the walk is short beside that.

#ifndef UNISONO_TOPK_GROUPS
#define UNISONO_TOPK_GROUPS

#include "topk.cuh"

// Bits of a stretch, of its window, and of the part of it in which trails begin: groups are longer only where one
// element of a hundred million is sent. A longer stretch leaves fewer trails, and takes longer to follow.
constexpr u32 STRETCH = 12288, WINDOW = 16384, ENTRIES = WINDOW - STRETCH;
constexpr u32 WORDS = WINDOW / 64;
// Likely widths, one for each warp, and how many of them are below that of the mean gap.
constexpr u32 WIDTHS = THREADS / WARP, WIDTHS_BELOW = 4;
// Groups of likely widths after which a trail may have another one. With fewer, more wrong trails are followed; with
// more, fewer right ones where some elements are much more often sent than others.
constexpr u32 LIKELY = 3;
// Trails that are kept of a stretch, and groups of a trail: one has 133 bits at least.
constexpr u32 TRAILS = 4, MOST_GROUPS = STRETCH / (WIDTH_BITS + GROUP) + 1;

// Groups that follow each other, if one begins at `entry`; bits are counted from the beginning of the stretch.
struct Trail {
    u16 entry;
    u16 groups;
    // Where the next one begins.
    u32 end;
    u16 starts[(MOST_GROUPS + 1) / 2 * 2];
};

struct Stretch {
    u32 trails;
    u32 unused;
    Trail trail[TRAILS];
};
static_assert(sizeof(Stretch) == 8 + TRAILS * (8 + 188), "as the launcher has it");

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
    // By width, the nodes, and how many there are before each word.
    u64 (*nodes)[WORDS];
    u16 (*before)[WORDS];
    u32 least;

    __device__ u32 width_at(u32 place) const {
        const u64 word = words[place / 64] >> (place % 64), next = place % 64 ? words[place / 64 + 1] : 0;
        return static_cast<u32>(word | next << (63 - place % 64) << 1) & 31;
    }

    __device__ bool is_likely(u32 width) const { return width - least < WIDTHS; }

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
                place = after_gap(place, least + slot);
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
        const u32 slot = width - least;
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
__device__ inline bool follow(Trail &trail, const Window &window, const Header &header, u64 base, u32 entry) {
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
        trail.starts[groups++] = static_cast<u16>(place);
        place = next;
    }
    trail.entry = static_cast<u16>(entry);
    trail.groups = static_cast<u16>(groups);
    trail.end = place;
    return true;
}

// What a block needs to find trails.
struct Search {
    u64 words[WORDS + 1];
    u64 nodes[WIDTHS][WORDS];
    u16 before[WIDTHS][WORDS];
    u16 entries[ENTRIES];
    u32 count, kept;
};

// Finds the trails of a stretch.
__device__ inline void find_trails(Search &search, const Groups &call, const Header &header) {
    u64 *words = search.words;
    u16 *entries = search.entries;
    u32 &count = search.count, &kept = search.kept;
    const u64 base = blockIdx.x * u64(STRETCH);
    Stretch &stretch = call.stretches[blockIdx.x];
    const u32 mean = header.mean_width(call.elements);
    const Window window = {words, search.nodes, search.before, mean > WIDTHS_BELOW ? mean - WIDTHS_BELOW : 0};
    // The first group begins with the first bit. Elsewhere, twice the bits of a usual group have two or three.
    const u32 usual = 2 * GROUP * (mean + 2), most = usual < ENTRIES ? usual : ENTRIES;
    static_assert(WORDS == THREADS, "a word for each thread");
    const u64 at = base + threadIdx.x * 64;
    words[threadIdx.x] = (header.bits.peek(at + 32) << 32) | static_cast<u32>(header.bits.peek(at));
    if (threadIdx.x == 0) {
        words[WORDS] = 0;
        count = 0;
        kept = 0;
    }
    wait_for_block();
    window.set_nodes(threadIdx.x / WARP);
    for (u32 entry = threadIdx.x; entry < (base ? most : 1); entry += THREADS)
        if (!base || (base + entry < 8 * header.bits.count && window.is_likely(window.width_at(entry))))
            entries[atomic_add(&count, 1)] = static_cast<u16>(entry);
    wait_for_block();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        Trail trail;
        if (!follow(trail, window, header, base, entries[i]))
            continue;
        const u32 place = atomic_add(&kept, 1);
        if (place >= TRAILS)
            continue;
        Trail &into = stretch.trail[place];
        into.entry = trail.entry;
        into.groups = trail.groups;
        into.end = trail.end;
        for (u32 group = 0; group < trail.groups; ++group)
            into.starts[group] = trail.starts[group];
    }
    wait_for_block();
    if (threadIdx.x == 0)
        stretch.trails = kept < TRAILS ? kept : TRAILS;
}

// What the walk has to know of as many stretches as there are threads, and what it found: which trail was
// taken, the number of its first group, and how many were.
struct Walked {
    u32 entries[THREADS][TRAILS];
    u32 ends[THREADS][TRAILS];
    u32 taken[THREADS];
    u32 groups[THREADS];
    u64 first[THREADS];
};

__device__ inline void load_trails(Walked &walked, const Groups &call, u64 first) {
    const u32 me = threadIdx.x;
    walked.groups[me] = 0;
    const Stretch *stretch = call.stretches + first + me;
    const u32 trails = first + me < call.blocks ? fresh(&stretch->trails) : 0;
#pragma unroll
    for (u32 i = 0; i < TRAILS; ++i) {
        // The entry, and above it the groups; a stretch has no bit of this number.
        const u32 *trail = reinterpret_cast<const u32 *>(&stretch->trail[i]);
        walked.entries[me][i] = i < trails ? fresh(trail) : 0xffff;
        walked.ends[me][i] = i < trails ? fresh(trail + 1) : 0;
    }
}

// Where the groups of the trails that were taken begin.
__device__ inline void write_starts(const Walked &walked, const Groups &call, u64 first) {
    const u32 me = threadIdx.x, groups = walked.groups[me];
    if (!groups)
        return;
    const Trail &trail = call.stretches[first + me].trail[walked.taken[me]];
    const u32 *pairs = reinterpret_cast<const u32 *>(trail.starts);
    u64 *starts = call.starts + walked.first[me];
    const u64 base = (first + me) * STRETCH;
#pragma unroll 4
    for (u32 i = 0; i < groups; i += 2) {
        const u32 pair = fresh(pairs + i / 2);
        starts[i] = base + (pair & 0xffff);
        if (i + 1 < groups)
            starts[i + 1] = base + (pair >> 16);
    }
}

// Goes over all groups, by one block of threads, which all do the same.
__device__ inline void walk(Walked &walked, const Groups &call, const Header &header) {
    const u32 me = threadIdx.x;
    const Bits bits = header.bits;
    const u64 groups = header.damage ? 0 : (u64(header.count) + GROUP - 1) / GROUP, whole = header.count / GROUP;
    u32 damage = header.damage;
    u64 found = header.found, loaded = ~u64(0), used = ~u64(0);
    // The next group, and where it begins: in a stretch, at a bit.
    u64 group = 0, stretch = 0;
    u32 place = 0;
    while (group < groups) {
        if (stretch < call.blocks && place < ENTRIES && stretch != used) {
            const u32 own = static_cast<u32>(stretch % THREADS);
            if (stretch - own != loaded) {
                wait_for_block();
                if (loaded != ~u64(0))
                    write_starts(walked, call, loaded);
                loaded = stretch - own;
                load_trails(walked, call, loaded);
                wait_for_block();
            }
            u32 taken = TRAILS, trail = 0, end = 0;
#pragma unroll
            for (u32 i = 0; i < TRAILS; ++i)
                if ((walked.entries[own][i] & 0xffff) == place) {
                    taken = i;
                    trail = walked.entries[own][i];
                    end = walked.ends[own][i];
                }
            // With more groups than there are, bytes are damaged, or those of the last one look like more of them.
            const u32 run = trail >> 16;
            if (taken < TRAILS && run && group + run <= whole) {
                used = stretch;
                if (me == 0) {
                    walked.taken[own] = taken;
                    walked.groups[own] = run;
                    walked.first[own] = group;
                }
                group += run;
                place = end;
                while (place >= STRETCH) {
                    place -= STRETCH;
                    ++stretch;
                }
                continue;
            }
        }
        // Gap by gap.
        u64 at = stretch * STRETCH + place;
        if (me == 0)
            call.starts[group] = at;
        const u32 width = static_cast<u32>(bits.peek(at)) & 31;
        at += WIDTH_BITS;
        const u64 size = group < whole ? GROUP : header.count % GROUP;
        for (u64 i = 0; i < size; ++i) {
            const u64 high = bits.take_high(at);
            if (high > call.elements) {
                damage = high == ~u64(0) ? WRONG_LENGTH : WRONG_INDEX;
                found = high == ~u64(0) ? 4 + bits.count + 1 + header.values : high << width;
                break;
            }
            at += width;
        }
        ++group;
        if (damage)
            break;
        stretch = at / STRETCH;
        place = static_cast<u32>(at % STRETCH);
    }
    wait_for_block();
    if (loaded != ~u64(0))
        write_starts(walked, call, loaded);
    const u64 end = stretch * STRETCH + place;
    if (!damage && (end + 7) / 8 != bits.count) {
        damage = WRONG_LENGTH;
        found = 4 + (end + 7) / 8 + header.values;
    }
    if (!damage && static_cast<u32>(bits.peek(end))) {
        damage = WRONG_PADDING;
        found = bits.peek(end);
    }
    if (me == 0) {
        State &state = *call.state;
        state.count = damage ? 0 : header.count;
        state.bits = end;
        say_damage(state, damage, found);
    }
}

// Zeros that a block writes at most.
constexpr u32 ZEROS = 16 * THREADS * 4;

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

KERNEL(topk_groups, Groups, THREADS) {
    if (blockIdx.x >= call.blocks) {
        write_zeros(call.into, call.elements, blockIdx.x - call.blocks);
        return;
    }
    // The less a block takes, the more of them write zeros.
    SHARED union {
        Search search;
        Walked walked;
    } shared;
    const Header header(call);
    if (blockIdx.x * u64(STRETCH) < 8 * header.bits.count)
        find_trails(shared.search, call, header);
    else if (threadIdx.x == 0)
        call.stretches[blockIdx.x].trails = 0;
    if (is_last(*call.state, static_cast<u32>(call.blocks)))
        walk(shared.walked, call, header);
}

#endif
