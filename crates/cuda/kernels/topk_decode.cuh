// From groups of packed indices to elements in their places.

#ifndef UNISONO_TOPK_DECODE
#define UNISONO_TOPK_DECODE

#include "topk_walk.cuh"

// Groups that a block unpacks, each by one thread: fewer are spread over more of the device.
constexpr u32 UNPACKED = 32;
// Elements that a block puts in their places, and groups that these are.
constexpr u32 SCATTERED = 1024, SCATTERED_GROUPS = SCATTERED / GROUP;
static_assert(UNPACKED % SCATTERED_GROUPS == 0, "a block's groups were unpacked by one");

struct Unpack {
    const State *state;
    const char *encoding;
    const u64 *starts;
    u64 elements;
    u32 *indices;
    // How far each group goes, and those that are unpacked by a block.
    u32 *sums;
    u64 *blocks;
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
    const u64 *blocks;
    // The f32; or what ends with them, and how many bytes it has.
    const char *values;
    u64 length;
    u64 elements;
    Into into;
    // What a codec of values found; null without one.
    const u64 *fault;
};

// A thread has a group: places relative to the first that the group could name, and how far it goes.
KERNEL(topk_unpack, Unpack, THREADS) {
    const State &state = *call.state;
    const u64 count = state.count, group = blockIdx.x * u64(UNPACKED) + threadIdx.x / (THREADS / UNPACKED);
    u64 next = 0;
    if (threadIdx.x % (THREADS / UNPACKED) == 0 && group * GROUP < count) {
        const u64 size = count - group * GROUP < GROUP ? count - group * GROUP : GROUP;
        const Bits bits = {reinterpret_cast<const u8 *>(call.encoding) + 4, (state.bits + 7) / 8};
        u64 at = call.starts[group];
        const u32 width = static_cast<u32>(bits.peek(at)) & 31;
        at += WIDTH_BITS;
        for (u64 i = 0; i < size; ++i) {
            const u64 high = bits.take_high(at);
            const u64 low = bits.peek(at) & ((u64(1) << width) - 1);
            at += width;
            // Too far, and still no overflow: the sums say so.
            next = high > call.elements ? call.elements : next + (high << width | low);
            next = next < call.elements ? next : call.elements;
            call.indices[group * GROUP + i] = static_cast<u32>(next);
            ++next;
        }
        next = next < 0xffffffff ? next : 0xffffffff;
        call.sums[group] = static_cast<u32>(next);
    }
    const u64 all = sums_of(next).all;
    if (threadIdx.x == 0)
        call.blocks[blockIdx.x] = all;
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
    // Where a group's places begin: what those before have, by blocks and, within the last of these, one by one.
    SHARED u64 bases[SCATTERED_GROUPS];
    const u64 group = first / GROUP, block = group / UNPACKED, groups = (count + GROUP - 1) / GROUP;
    u64 sum = 0;
    for (u64 i = threadIdx.x; i < block; i += THREADS)
        sum += call.blocks[i];
    const u64 own = block * UNPACKED + threadIdx.x;
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
