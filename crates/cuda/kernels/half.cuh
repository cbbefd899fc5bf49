// 16-bit floats with the host's rounding.
//
// A NaN becomes quiet and keeps the upper bits of its payload, as on the host. The instructions of the device
// would make all of them one.

#ifndef UNISONO_HALF
#define UNISONO_HALF

#include "instructions.cuh"

struct Fp16 {
    static __device__ u32 narrow(float value) {
        const u32 bits = __float_as_uint(value), size = bits & 0x7fffffff;
        return size > 0x7f800000 ? ((bits >> 16) & 0x8000) | 0x7e00 | ((size >> 13) & 0x03ff) : f16_of(value);
    }
    static __device__ float widen(u32 bits) {
        const u32 size = bits & 0x7fff;
        const u32 nan = (bits & 0x8000) << 16 | size << 13 | 0x7fc00000;
        return size > 0x7c00 ? __uint_as_float(nan) : f16_to_f32(bits);
    }
};

struct Bf16 {
    static __device__ u32 narrow(float value) {
        const u32 bits = __float_as_uint(value);
        const u32 nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x0040 : nearest;
    }
    static __device__ float widen(u32 bits) { return __uint_as_float(bits << 16); }
};

__device__ inline u16 half_at(const char *encoding, u64 element) {
    const u8 *bytes = reinterpret_cast<const u8 *>(encoding) + 2 * element;
    return bytes[0] | bytes[1] << 8;
}

__device__ inline void put_half(char *encoding, u64 element, u32 bits) {
    encoding[2 * element] = static_cast<char>(bits);
    encoding[2 * element + 1] = static_cast<char>(bits >> 8);
}

#endif
