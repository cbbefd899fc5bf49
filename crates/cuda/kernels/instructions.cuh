// What has to be said in the words of the machine: 16-bit floats, and memory that is read once. All
// else is arithmetic that any compiler of C++ understands.

#ifndef UNISONO_INSTRUCTIONS
#define UNISONO_INSTRUCTIONS

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Reads 16 bytes that nobody reads again soon: they should not displace what others need.
__device__ inline void load(u32 (&words)[4], const char *address) {
    const uint4 read = __ldcs(reinterpret_cast<const uint4 *>(address));
    words[0] = read.x;
    words[1] = read.y;
    words[2] = read.z;
    words[3] = read.w;
}

__device__ inline void load(u64 (&words)[2], const char *address) {
    const ulonglong2 read = __ldcs(reinterpret_cast<const ulonglong2 *>(address));
    words[0] = read.x;
    words[1] = read.y;
}

__device__ inline void store(char *address, const u32 (&words)[4]) {
    *reinterpret_cast<uint4 *>(address) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline void store(char *address, const u64 (&words)[2]) {
    *reinterpret_cast<ulonglong2 *>(address) = make_ulonglong2(words[0], words[1]);
}

// The sums and products of two pairs of f16. They are those in f32, rounded to f16: f32 has 24 digits, two more
// than twice the 11 of f16, and then a result that is rounded twice is the one that is rounded once.
__device__ inline u32 f16_sum(u32 left, u32 right) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(left), "r"(right));
    return sum;
}

__device__ inline u32 f16_product(u32 left, u32 right) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(left), "r"(right));
    return product;
}

// The f16 in the lower half of a word.
__device__ inline float f16_to_f32(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
    return value;
}

// The nearest f16, ties to even.
__device__ inline u32 f16_of(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// The nearest bf16 of each, ties to even, as one word. Without the instruction, a NaN needs care:
// the machine's own has all bits set, and rounding it up would make it a zero.
__device__ inline u32 bf16_of(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    const auto round = [](float value) {
        const u32 bits = __float_as_uint(value);
        return value == value ? bits + 0x7fff + ((bits >> 16) & 1) : 0x7fff0000;
    };
    return __byte_perm(round(low), round(high), 0x7632);
#endif
}

#endif
