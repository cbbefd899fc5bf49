// What encoder and decoder of topk share: the format's numbers, what kernels of a call leave for each other, and
// sums over a block.

#ifndef UNISONO_TOPK
#define UNISONO_TOPK

#include "strata.cuh"

constexpr u32 TILE = 4096, GROUP = 128;
// The directory has for each group its width and, above these bits, the sum of its high parts, which are no more
// than this for each gap.
constexpr u32 ENTRY_BYTES = 2, WIDTH_BITS = 5, MOST_HIGHS = 2;
// Digits of a magnitude: of 11, 10 and 10 bits.
constexpr u32 DIGITS = 2048;

constexpr u32 DAMAGE_SHIFT = 56;

// What the kernels of a call leave for each other.
struct State {
    // What is known of the exact cut: its upper digits, in the end all, and how many elements with these are
    // taken. That is how many `ties` are, which have this very magnitude; of zeros, none.
    u32 digits;
    u32 rank;
    // The cut of the sample.
    u32 magnitude;
    // Elements at this cut or above.
    u32 staged;
    u64 ties;
    // Elements that are taken, bits of their packed indices, and bytes of the encoding.
    u64 count;
    u64 bits;
    u64 length;
    // Blocks that are done.
    u32 done;
    u32 unused;
    // What is wrong with bytes, above the value that is; all bits if nothing is.
    u64 damage;
    u32 histogram[DIGITS];
};

// In how many bytes values are encoded: in blocks, each with a scale; or without, in blocks of one.
struct ValueBytes {
    u32 block;
    u32 scale;
    // Bits of an element.
    u32 bits;
    u32 unused;

    __device__ u64 of(u64 count) const {
        const u64 rest = count % block;
        return count / block * (scale + block * bits / 8) + (rest ? scale + (rest * bits + 7) / 8 : 0);
    }
};

// Sums over all threads of a block, up to and without each thread's own; and the sum of all.
template <class Number> struct Sums {
    Number before, all;
};

__device__ inline u32 number_from_below(u32 value, u32 lanes) { return from_below(value, lanes); }
__device__ inline u64 number_from_below(u64 value, u32 lanes) {
    const u64 low = from_below(static_cast<u32>(value), lanes);
    return low | static_cast<u64>(from_below(static_cast<u32>(value >> 32), lanes)) << 32;
}

template <class Number> __device__ Sums<Number> sums_of(Number value) {
    constexpr u32 WARPS = THREADS / WARP;
    SHARED Number warps[WARPS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Number sum = value;
#pragma unroll
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
        const Number below = number_from_below(sum, lanes);
        sum += lane >= lanes ? below : 0;
    }
    if (lane == WARP - 1)
        warps[warp] = sum;
    wait_for_block();
    Number before = sum - value, all = 0;
    for (u32 i = 0; i < WARPS; ++i) {
        before += i < warp ? warps[i] : 0;
        all += warps[i];
    }
    wait_for_block();
    return {before, all};
}

// Whether this block is the last one that is done, and sees what the others have written.
__device__ inline bool is_last(State &state, u32 blocks) {
    SHARED bool last;
    order_writes();
    wait_for_block();
    if (threadIdx.x == 0) {
        last = atomic_add(&state.done, 1) == blocks - 1;
        if (last)
            state.done = 0;
    }
    wait_for_block();
    order_writes();
    return last;
}

#endif
