// What the device brings in instructions.cuh, on the host.

#ifndef UNISONO_HOST
#define UNISONO_HOST

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define UNISONO_INSTRUCTIONS

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static thread_local struct {
    u32 x;
} blockIdx, threadIdx, gridDim;

template <class To, class From> To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

static float __uint_as_float(u32 bits) { return bits_of<float>(bits); }
static u32 __float_as_uint(float value) { return bits_of<u32>(value); }
static double __longlong_as_double(u64 bits) { return bits_of<double>(bits); }
static u64 __double_as_longlong(double value) { return bits_of<u64>(value); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static double __dsqrt_rn(double a) { return std::sqrt(a); }
static float __double2float_rn(double value) { return static_cast<float>(value); }
static float __uint2float_rn(u32 value) { return static_cast<float>(value); }
static float __int2float_rn(int value) { return static_cast<float>(value); }
static double __uint2double_rn(u32 value) { return value; }
static double __int2double_rn(int value) { return value; }
static int __float2int_rz(float value) { return static_cast<int>(value); }
static int __double2int_rz(double value) { return static_cast<int>(value); }

// A device faults where an address is not aligned for what is read at once; so does this.
static void must_be_aligned(const void *address, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(address) % bytes)
        __builtin_trap();
}

template <class Word, int N> void load(Word (&words)[N], const char *address) {
    must_be_aligned(address, sizeof words);
    std::memcpy(words, address, sizeof words);
}

template <class Word, int N> void store(char *address, const Word (&words)[N]) {
    must_be_aligned(address, sizeof words);
    std::memcpy(address, words, sizeof words);
}

static float f16_to_f32(u32 bits) {
    const u32 magnitude = bits & 0x7fff;
    const float subnormal = static_cast<float>(magnitude) * bits_of<float>(0x33800000u);
    const u32 normal = (magnitude << 13) + 0x38000000;
    const u32 special = (magnitude << 13) | 0x7f800000;
    const u32 found =
        magnitude < 0x400 ? bits_of<u32>(subnormal) : magnitude < 0x7c00 ? normal : special;
    return bits_of<float>(found | (bits & 0x8000) << 16);
}

// Counts in units of the last place of the result, where rounding is that of f32 to an integer.
static u32 f16_of(float value) {
    const u32 bits = bits_of<u32>(value), magnitude = bits & 0x7fffffff;
    const u32 sign = (bits >> 16) & 0x8000;
    if (magnitude > 0x7f800000)
        return 0x7fff;
    if (magnitude >= 0x47800000)
        return sign | 0x7c00;
    const u32 exponent = magnitude >> 23;
    const u32 unit = (exponent < 113 ? 113 : exponent) - 10;
    const float places = bits_of<float>(magnitude) * bits_of<float>((254 - unit) << 23);
    const float round = 8388608.0f;
    const u32 count = static_cast<u32>((places + round) - round);
    return sign | (exponent < 113 ? count : ((exponent - 113) << 10) + count);
}

static u32 f16_pair(float low, float high) { return f16_of(low) | f16_of(high) << 16; }
static u32 f16_sum(u32 left, u32 right) {
    return f16_pair(f16_to_f32(left & 0xffff) + f16_to_f32(right & 0xffff),
                    f16_to_f32(left >> 16) + f16_to_f32(right >> 16));
}
static u32 f16_product(u32 left, u32 right) {
    return f16_pair(f16_to_f32(left & 0xffff) * f16_to_f32(right & 0xffff),
                    f16_to_f32(left >> 16) * f16_to_f32(right >> 16));
}

static u32 bf16_round(float value) {
    const u32 bits = bits_of<u32>(value);
    return value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fff;
}
static u32 bf16_of(float low, float high) { return bf16_round(low) | bf16_round(high) << 16; }

#endif
