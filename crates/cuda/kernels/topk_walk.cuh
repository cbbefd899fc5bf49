// From trails to groups: the walk from stretch to stretch, and the kernel that finds all groups.

#ifndef UNISONO_TOPK_WALK
#define UNISONO_TOPK_WALK

#include "topk_groups.cuh"

// Stretches that the walk knows at a time.
constexpr u32 CHUNK = 128;
static_assert(THREADS % CHUNK == 0, "as many threads for each stretch");

// What goes on with none, and a stretch none of whose trails was taken.
constexpr u32 NONE = 0xff;
static_assert(TRAILS < NONE && MOST_GROUPS < 256 && WINDOW <= 1 << 16, "a step is one word");

struct Walked {
    // The first stretch of a chunk.
    u64 first;
    // Where its trails begin; and in one word where each ends, above that its groups, and above that the trail
    // of the next stretch that goes on with it.
    u16 entries[CHUNK][TRAILS];
    u32 steps[CHUNK][TRAILS];
    // Which trail was taken, and the number of its first group.
    u32 taken[CHUNK];
    u32 groups[CHUNK];
    // A window in which to go gap by gap.
    u64 words[WORDS + 1];
    // Where one thread's walk came to.
    u64 at;
    u32 group;
};

// The trails of a chunk. Other blocks have written them, before the last of them was done.
__device__ inline void load_trails(Walked &walked, const Groups &call, u64 first) {
    constexpr u32 EACH = CHUNK * TRAILS / THREADS;
#pragma unroll 4
    for (u32 i = 0; i < EACH; ++i) {
        const u32 number = i * THREADS + threadIdx.x, own = number / TRAILS, trail = number % TRAILS;
        const bool there = first + own < call.blocks;
        const u32 *words = reinterpret_cast<const u32 *>(&call.stretches[there ? first + own : 0].trails[trail]);
        // The entry, and above it the groups.
        const u32 word = there ? fresh(words) : NO_ENTRY;
        walked.entries[own][trail] = static_cast<u16>(word);
        walked.steps[own][trail] = (there ? fresh(words + 1) : 0) | word >> 16 << 16;
    }
    if (threadIdx.x < CHUNK)
        walked.taken[threadIdx.x] = NONE;
    if (threadIdx.x == 0)
        walked.first = first;
    wait_for_block();
    for (u32 i = 0; i < EACH; ++i) {
        const u32 number = i * THREADS + threadIdx.x, own = number / TRAILS, trail = number % TRAILS;
        const u32 end = walked.steps[own][trail] & 0xffff;
        u32 next = NONE;
        if (walked.entries[own][trail] != NO_ENTRY && end >= STRETCH && own + 1 < CHUNK)
            for (u32 other = 0; other < TRAILS && walked.entries[own + 1][other] != NO_ENTRY; ++other)
                if (walked.entries[own + 1][other] == end - STRETCH)
                    next = other;
        walked.steps[own][trail] |= next << 24;
    }
    wait_for_block();
}

// Where the groups of the trails that were taken begin.
__device__ inline void write_starts(const Walked &walked, const Groups &call) {
    constexpr u32 EACH = THREADS / CHUNK;
    const u32 own = threadIdx.x / EACH, taken = walked.taken[own];
    if (taken == NONE)
        return;
    const u32 groups = walked.steps[own][taken] >> 16 & 0xff;
    const u32 *pairs = reinterpret_cast<const u32 *>(call.stretches[walked.first + own].starts[taken]);
    u64 *starts = call.starts + walked.groups[own];
    const u64 base = (walked.first + own) * STRETCH;
#pragma unroll 4
    for (u32 i = threadIdx.x % EACH * 2; i < groups; i += 2 * EACH) {
        const u32 pair = fresh(pairs + i / 2);
        starts[i] = base + (pair & 0xffff);
        if (i + 1 < groups)
            starts[i + 1] = base + (pair >> 16);
    }
}

// Takes trails of a chunk one after the other, by one thread, as long as each begins where the last one ended.
__device__ inline void take_trails(Walked &walked, u64 at, u32 group, u32 whole) {
    u32 own = static_cast<u32>(at / STRETCH - walked.first), trail = NONE, end = 0;
    // Of each stretch one at most, until it is loaded again: there is one place to remember it.
    if (walked.taken[own] == NONE)
        for (u32 i = 0; i < TRAILS && walked.entries[own][i] != NO_ENTRY; ++i)
            if (walked.entries[own][i] == at % STRETCH)
                trail = i;
    walked.at = at;
    for (; trail != NONE; ++own) {
        const u32 step = walked.steps[own][trail], run = step >> 16 & 0xff;
        // With more groups than there are, bytes are damaged, or those of the last one look like more of them.
        if (run > whole - group)
            break;
        walked.taken[own] = trail;
        walked.groups[own] = group;
        group += run;
        end = step & 0xffff;
        walked.at = (walked.first + own) * STRETCH + end;
        trail = step >> 24;
    }
    walked.group = group;
}

// A group that is gone through gap by gap: where the next one begins, and what is wrong.
struct Passed {
    u64 at;
    u32 damage;
    u64 found;
};

__device__ inline Passed pass_group(Walked &walked, u64 &base, const Groups &call, const Header &header, u64 at,
                                    u32 size) {
    const Bits bits = header.bits;
    if (at < base || at - base > STRETCH) {
        wait_for_block();
        load_words(walked.words, bits, at);
        base = at;
        wait_for_block();
    }
    const Window window = {walked.words, nullptr, nullptr, 0};
    u32 place = static_cast<u32>(at - base), i = 0;
    const u32 width = window.width_at(place);
    place += WIDTH_BITS;
    // What is not in sight, and what is wrong, is left to the other loop.
    for (; i < size; ++i) {
        const u32 next = window.after_gap(place, width);
        if (next >= WINDOW || next - place - 1 - width > call.elements)
            break;
        place = next;
    }
    at = base + place;
    for (; i < size; ++i) {
        const u64 high = bits.take_high(at);
        if (high == ~u64(0))
            return {at, WRONG_LENGTH, 4 + bits.count + 1 + header.values};
        if (high > call.elements)
            return {at, WRONG_INDEX, high << width};
        at += width;
    }
    return {at, FINE, 0};
}

// Goes over all groups, by one block of threads, which all do the same.
__device__ inline void walk(Walked &walked, const Groups &call, const Header &header) {
    const u32 count = header.damage ? 0 : header.count, whole = count / GROUP, groups = whole + (count % GROUP ? 1 : 0);
    u32 damage = header.damage, group = 0;
    u64 found = header.found, at = 0, base = ~u64(0);
    bool loaded = false;
    while (group < groups && !damage) {
        const u64 stretch = at / STRETCH;
        if (stretch < call.blocks && at % STRETCH < ENTRIES) {
            // What the thread before left is read by all, here and below.
            wait_for_block();
            if (!loaded || stretch - walked.first >= CHUNK) {
                if (loaded)
                    write_starts(walked, call);
                wait_for_block();
                load_trails(walked, call, stretch);
                loaded = true;
            }
            if (threadIdx.x == 0)
                take_trails(walked, at, group, whole);
            wait_for_block();
            if (walked.group != group) {
                group = walked.group;
                at = walked.at;
                continue;
            }
        }
        if (threadIdx.x == 0)
            call.starts[group] = at;
        const Passed passed = pass_group(walked, base, call, header, at, group < whole ? GROUP : count % GROUP);
        ++group;
        at = passed.at;
        damage = passed.damage;
        found = passed.found;
    }
    wait_for_block();
    if (loaded)
        write_starts(walked, call);
    const Bits bits = header.bits;
    if (!damage && (at + 7) / 8 != bits.count) {
        damage = WRONG_LENGTH;
        found = 4 + (at + 7) / 8 + header.values;
    }
    if (!damage && static_cast<u32>(bits.peek(at))) {
        damage = WRONG_PADDING;
        found = bits.peek(at);
    }
    if (threadIdx.x == 0) {
        State &state = *call.state;
        state.count = damage ? 0 : header.count;
        state.bits = at;
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

// Registers for so many blocks at a time: all stretches are looked at together, where there are some hundreds.
KERNEL_OF(topk_groups, Groups, THREADS, 4) {
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
    else
        leave_out(call.stretches[blockIdx.x], 0);
    if (is_last(*call.state, static_cast<u32>(call.blocks)))
        walk(shared.walked, call, header);
}

#endif
