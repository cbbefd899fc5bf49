// What an element is, and how two become one: the same bits as the kernels of crates/collective.
//
// A *format* is a type of elements as this code sees them: packed into *words*, of four bytes or, for
// elements of eight, of eight. It combines two words lane by lane and rounds every result to the
// element's type. Packed words are exact, for each node of the tree is rounded, and half as many
// registers as unpacked floats.
//
// Every operation on floats is one that the compiler may not fuse with another (__fadd_rn and its
// kin), and none flushes subnormals. Which NaN a NaN is, is not specified.

#ifndef UNISONO_ELEMENT
#define UNISONO_ELEMENT

#include "instructions.cuh"

struct Sum {};
struct Product {};
struct Min {};
struct Max {};
struct And {};
struct Or {};
struct Xor {};

// The smaller of two floats by their bits. Neither smaller means equal or NaN: the bitwise or of two
// equal numbers is that number, of two zeros -0 if either is, and of a NaN with anything a NaN.
template <class Value, class Word>
__device__ Word least(Value left, Value right, Word left_bits, Word right_bits) {
    return left < right ? left_bits : right < left ? right_bits : left_bits | right_bits;
}

struct F32 {
    typedef u32 Word;
    typedef u32 Element;
    static constexpr u32 SIGN = 0x80000000;

    static __device__ u32 combine(Sum, u32 left, u32 right) {
        return __float_as_uint(__fadd_rn(__uint_as_float(left), __uint_as_float(right)));
    }
    static __device__ u32 combine(Product, u32 left, u32 right) {
        return __float_as_uint(__fmul_rn(__uint_as_float(left), __uint_as_float(right)));
    }
    static __device__ u32 combine(Min, u32 left, u32 right) {
        return least(__uint_as_float(left), __uint_as_float(right), left, right);
    }
    static __device__ u32 combine(Max, u32 left, u32 right) {
        return combine(Min(), left ^ SIGN, right ^ SIGN) ^ SIGN;
    }
    static __device__ u32 divide(u32 root, u32 divisor) {
        return __float_as_uint(__fdiv_rn(__uint_as_float(root), __uint2float_rn(divisor)));
    }
};

struct F64 {
    typedef u64 Word;
    typedef u64 Element;
    static constexpr u64 SIGN = 0x8000000000000000;

    static __device__ double value(u64 bits) { return __longlong_as_double(bits); }
    static __device__ u64 bits(double value) { return __double_as_longlong(value); }

    static __device__ u64 combine(Sum, u64 left, u64 right) {
        return bits(__dadd_rn(value(left), value(right)));
    }
    static __device__ u64 combine(Product, u64 left, u64 right) {
        return bits(__dmul_rn(value(left), value(right)));
    }
    static __device__ u64 combine(Min, u64 left, u64 right) {
        return least(value(left), value(right), left, right);
    }
    static __device__ u64 combine(Max, u64 left, u64 right) {
        return combine(Min(), left ^ SIGN, right ^ SIGN) ^ SIGN;
    }
    static __device__ u64 divide(u64 root, u32 divisor) {
        return bits(__ddiv_rn(value(root), __uint2double_rn(divisor)));
    }
};

// Two 16-bit floats in a word, which are combined in f32. `Lanes` converts.
template <class Lanes> struct Halves {
    typedef u32 Word;
    typedef u16 Element;
    static constexpr u32 SIGNS = 0x80008000;

    static __device__ u32 combine(Min, u32 left, u32 right) {
        const u32 low = least(Lanes::low(left), Lanes::low(right), left, right);
        const u32 high = least(Lanes::high(left), Lanes::high(right), left, right);
        return (low & 0xffff) | (high & 0xffff0000);
    }
    static __device__ u32 combine(Max, u32 left, u32 right) {
        return combine(Min(), left ^ SIGNS, right ^ SIGNS) ^ SIGNS;
    }
    static __device__ u32 divide(u32 root, u32 divisor) {
        const float by = __uint2float_rn(divisor);
        return Lanes::pack(__fdiv_rn(Lanes::low(root), by), __fdiv_rn(Lanes::high(root), by));
    }
};

struct F16Lanes {
    static __device__ float low(u32 word) { return f16_to_f32(word & 0xffff); }
    static __device__ float high(u32 word) { return f16_to_f32(word >> 16); }
    static __device__ u32 pack(float low, float high) { return f16_of(low) | f16_of(high) << 16; }
};

struct F16 : Halves<F16Lanes> {
    using Halves<F16Lanes>::combine;

    static __device__ u32 combine(Sum, u32 left, u32 right) { return f16_sum(left, right); }
    static __device__ u32 combine(Product, u32 left, u32 right) { return f16_product(left, right); }
};

struct Bf16Lanes {
    static __device__ float low(u32 word) { return __uint_as_float(word << 16); }
    static __device__ float high(u32 word) { return __uint_as_float(word & 0xffff0000); }
    static __device__ u32 pack(float low, float high) { return bf16_of(low, high); }
};

struct Bf16 : Halves<Bf16Lanes> {
    typedef Bf16Lanes Lanes;
    using Halves<Bf16Lanes>::combine;

    static __device__ u32 combine(Sum, u32 left, u32 right) {
        return Lanes::pack(__fadd_rn(Lanes::low(left), Lanes::low(right)),
                           __fadd_rn(Lanes::high(left), Lanes::high(right)));
    }
    static __device__ u32 combine(Product, u32 left, u32 right) {
        return Lanes::pack(__fmul_rn(Lanes::low(left), Lanes::low(right)),
                           __fmul_rn(Lanes::high(left), Lanes::high(right)));
    }
};

// Bits have no type, and sums and products wrap.
template <class Unsigned> struct Bitwise {
    static __device__ Unsigned combine(And, Unsigned left, Unsigned right) { return left & right; }
    static __device__ Unsigned combine(Or, Unsigned left, Unsigned right) { return left | right; }
    static __device__ Unsigned combine(Xor, Unsigned left, Unsigned right) { return left ^ right; }
};

template <class Signed, class Unsigned> struct Integer : Bitwise<Unsigned> {
    typedef Unsigned Word;
    typedef Unsigned Element;
    using Bitwise<Unsigned>::combine;

    static __device__ Word combine(Sum, Word left, Word right) { return left + right; }
    static __device__ Word combine(Product, Word left, Word right) { return left * right; }
    static __device__ Word combine(Min, Word left, Word right) {
        return static_cast<Signed>(left) < static_cast<Signed>(right) ? left : right;
    }
    static __device__ Word combine(Max, Word left, Word right) {
        return static_cast<Signed>(left) < static_cast<Signed>(right) ? right : left;
    }
};

struct I64 : Integer<long long, u64> {
    static __device__ u64 divide(u64 root, u32 divisor) {
        return static_cast<long long>(root) / static_cast<long long>(divisor);
    }
};

// Divides in f64, which is quicker than a division of wide integers. Its quotient truncates to the
// right integer: one that is an integer is exact, and any other is at least 1 / divisor away from the
// next integer, farther than rounding can move it. The same holds of bytes in f32: a divisor that f32
// rounds is larger than any byte, and so is what it is rounded to.
struct I32 : Integer<int, u32> {
    static __device__ u32 divide(u32 root, u32 divisor) {
        const double value = __int2double_rn(static_cast<int>(root));
        return __double2int_rz(__ddiv_rn(value, __uint2double_rn(divisor)));
    }
};

// Four bytes in a word.
template <class Byte> struct Bytes : Bitwise<u32> {
    typedef u32 Word;
    typedef u8 Element;
    using Bitwise<u32>::combine;

    // The upper bit of each byte is added apart, so that no byte carries into the next.
    static __device__ u32 combine(Sum, u32 left, u32 right) {
        return ((left & 0x7f7f7f7f) + (right & 0x7f7f7f7f)) ^ ((left ^ right) & 0x80808080);
    }
    static __device__ u32 combine(Product, u32 left, u32 right) {
        return each(left, right, [](Byte a, Byte b) { return static_cast<u8>(a * b); });
    }
    static __device__ u32 combine(Min, u32 left, u32 right) {
        return each(left, right, [](Byte a, Byte b) { return static_cast<u8>(a < b ? a : b); });
    }
    static __device__ u32 combine(Max, u32 left, u32 right) {
        return each(left, right, [](Byte a, Byte b) { return static_cast<u8>(a < b ? b : a); });
    }
    static __device__ u32 divide(u32 root, u32 divisor) {
        const float by = __uint2float_rn(divisor);
        return each(root, root, [by](Byte a, Byte) {
            return static_cast<u8>(__float2int_rz(__fdiv_rn(__int2float_rn(a), by)));
        });
    }

  private:
    template <class Operation>
    static __device__ u32 each(u32 left, u32 right, Operation operation) {
        u32 word = 0;
#pragma unroll
        for (int shift = 0; shift < 32; shift += 8) {
            const u32 byte = operation(static_cast<Byte>(left >> shift), static_cast<Byte>(right >> shift));
            word |= byte << shift;
        }
        return word;
    }
};

typedef Bytes<signed char> I8;
typedef Bytes<u8> U8;

#endif
