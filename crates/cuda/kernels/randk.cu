// randk: some elements, drawn at random, which are the same everywhere for the same key.
//
// Which elements they are follows from the key alone, so every thread draws its own. With a residual, all of
// the gradient is added to it first, and what was encoded of a drawn element is taken from it.

#include "half.cuh"
#include "strata.cuh"

// How values travel; else as bf16.
constexpr u64 WIRE_F32 = 0, WIRE_FP16 = 1;

struct Absorb {
    Owed owed;
    u64 elements;
};

struct Encode {
    Owed owed;
    Strata strata;
    char *encoding;
    u64 wire;
};

struct Decode {
    const char *encoding;
    Strata strata;
    Into into;
    u64 wire;
};

constexpr int DEPTH = 4;

// residual += gradient
KERNEL(randk_absorb, Absorb, THREADS) {
    const u64 vectors = call.owed.aligned ? call.elements / 4 : 0;
    const u64 first = blockIdx.x * u64(THREADS * DEPTH) + threadIdx.x;
    u32 residual[DEPTH][4], gradient[DEPTH][4];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (first + d * THREADS < vectors) {
            load(residual[d], call.owed.residual + (first + d * THREADS) * 16);
            load(gradient[d], call.owed.gradient + (first + d * THREADS) * 16);
        }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (first + d * THREADS < vectors) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                residual[d][i] = __float_as_uint(
                    __fadd_rn(__uint_as_float(residual[d][i]), __uint_as_float(gradient[d][i])));
            store(call.owed.residual + (first + d * THREADS) * 16, residual[d]);
        }
    const u64 rest = vectors * 4;
    for (u64 i = rest + blockIdx.x * u64(THREADS) + threadIdx.x; i < call.elements; i += gridDim.x * u64(THREADS))
        put_f32(call.owed.residual, i, owed_at(call.owed, i));
}

KERNEL(randk_encode, Encode, THREADS) {
    const u64 number = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (number >= call.strata.count)
        return;
    const u64 element = call.strata.at(number);
    const float value = owed_at(call.owed, element);
    float sent = value;
    if (call.wire == WIRE_F32) {
        put_word(call.encoding + 4 * number, __float_as_uint(value));
    } else {
        const u32 bits = call.wire == WIRE_FP16 ? Fp16::narrow(value) : Bf16::narrow(value);
        put_half(call.encoding, number, bits);
        sent = call.wire == WIRE_FP16 ? Fp16::widen(bits) : Bf16::widen(bits);
    }
    if (call.owed.residual)
        put_f32(call.owed.residual, element, __fsub_rn(value, sent));
}

KERNEL(randk_decode, Decode, THREADS) {
    const u64 number = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (number >= call.strata.count)
        return;
    float value;
    if (call.wire == WIRE_F32) {
        value = __uint_as_float(word_at(call.encoding + 4 * number));
    } else {
        const u32 bits = half_at(call.encoding, number);
        value = call.wire == WIRE_FP16 ? Fp16::widen(bits) : Bf16::widen(bits);
    }
    put_decoded(value, call.into, call.strata.at(number));
}
