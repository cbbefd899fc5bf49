// Threads that work together: what they say to each other, and atomic words. As instructions.cuh, this is
// all that a machine without a device has to bring of its own (tests/without_device/block.h).

#ifndef UNISONO_WARP
#define UNISONO_WARP

#include "instructions.cuh"

// A kernel, which takes one value that describes the call.
#define KERNEL(name, Call, threads) \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Call call)

// One of which so many blocks fit on a multiprocessor at a time.
#define KERNEL_OF(name, Call, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Call call)

// Memory that all threads of a block share.
#define SHARED __shared__

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffff;

__device__ inline void wait_for_block() { __syncthreads(); }
__device__ inline void wait_for_warp() { __syncwarp(); }

// What the lane whose number differs in these bits has.
__device__ inline u32 from_across(u32 value, u32 bits) { return __shfl_xor_sync(ALL_LANES, value, bits); }
// What the lane that many further on has; of the last lanes, their own.
__device__ inline u32 from_above(u32 value, u32 lanes) { return __shfl_down_sync(ALL_LANES, value, lanes); }
// What the lane that many before has; of the first lanes, their own.
__device__ inline u32 from_below(u32 value, u32 lanes) { return __shfl_up_sync(ALL_LANES, value, lanes); }
// What one lane has.
__device__ inline u32 from_lane(u32 value, u32 lane) { return __shfl_sync(ALL_LANES, value, lane); }
// A bit for each lane, 1 where the predicate holds.
__device__ inline u32 votes(bool predicate) { return __ballot_sync(ALL_LANES, predicate); }

__device__ inline u32 count_bits(u32 bits) { return __popc(bits); }
// The number of the lowest bit that is set; 32 if there is none.
__device__ inline u32 lowest_bit(u32 bits) { return bits ? __ffs(bits) - 1 : 32; }
__device__ inline u32 leading_zeros(u32 bits) { return __clz(bits); }
// The upper half of a product.
__device__ inline u64 upper_product(u64 a, u64 b) { return __umul64hi(a, b); }

__device__ inline void atomic_min(u64 *at, u64 value) { atomicMin(at, value); }
__device__ inline u32 atomic_add(u32 *at, u32 value) { return atomicAdd(at, value); }
// A word that another block has written.
__device__ inline u32 fresh(const u32 *at) { return __ldcg(at); }
// What was written before is seen by other blocks before what is written after.
__device__ inline void order_writes() { __threadfence(); }
__device__ inline void atomic_or(u32 *at, u32 value) { atomicOr(at, value); }

// A word of four of the eight bytes of two words, by the digits of `which`, the lowest first.
__device__ inline u32 pick_bytes(u32 low, u32 high, u32 which) { return __byte_perm(low, high, which); }

__device__ inline void load(u32 (&words)[2], const char *address) {
    const uint2 read = __ldcs(reinterpret_cast<const uint2 *>(address));
    words[0] = read.x;
    words[1] = read.y;
}

__device__ inline void store(char *address, const u32 (&words)[2]) {
    *reinterpret_cast<uint2 *>(address) = make_uint2(words[0], words[1]);
}

#endif
