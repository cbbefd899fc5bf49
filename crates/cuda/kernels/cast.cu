// fp16 and bf16: every element is rounded by itself, to nearest, ties to even.

#include "codec.cuh"
#include "half.cuh"

// Vectors of four elements that a thread has under way. With fewer, memory waits for threads; with more,
// registers run out.
constexpr int DEPTH = 8;
constexpr u64 TILE = THREADS * DEPTH;

struct Encode {
    Owed owed;
    char *encoding;
    u64 elements;
    // Whether all of it can be read and written in vectors.
    u64 aligned;
    // The number of elements, where only the device knows it; else null.
    const u64 *counted;
};

struct Decode {
    const char *encoding;
    Into into;
    u64 elements;
    u64 aligned;
    const u64 *counted;
};

// Runs `vectors` with the first vector of this thread and how many it has, then `single` with the elements
// that are in none.
template <class Vectors, class Single>
__device__ void sweep(u64 elements, bool aligned, Vectors whole, Single single) {
    const u64 vectors = aligned ? elements / 4 : 0;
    const u64 tile = blockIdx.x * TILE;
    if (tile < vectors)
        whole(tile + threadIdx.x, vectors);
    for (u64 i = vectors * 4 + blockIdx.x * u64(THREADS) + threadIdx.x; i < elements; i += gridDim.x * u64(THREADS))
        single(i);
}

template <class Format, bool FEEDBACK> __device__ void encode(const Encode &call) {
    const Owed &owed = call.owed;
    const u64 elements = call.counted ? *call.counted : call.elements;
    sweep(
        elements, call.aligned,
        [&](u64 first, u64 vectors) {
            u32 gradient[DEPTH][4], residual[DEPTH][4];
            if (FEEDBACK) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d)
                    if (first + d * THREADS < vectors)
                        load(residual[d], owed.residual + (first + d * THREADS) * 16);
            }
            if (!FEEDBACK || owed.gradient) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d)
                    if (first + d * THREADS < vectors)
                        load(gradient[d], owed.gradient + (first + d * THREADS) * 16);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (first + d * THREADS >= vectors)
                    break;
                u32 halves[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float value;
                    if (FEEDBACK) {
                        value = __uint_as_float(residual[d][i]);
                        if (owed.gradient)
                            value = __fadd_rn(value, __uint_as_float(gradient[d][i]));
                    } else {
                        value = __uint_as_float(gradient[d][i]);
                    }
                    halves[i] = Format::narrow(value);
                    if (FEEDBACK)
                        residual[d][i] = __float_as_uint(__fsub_rn(value, Format::widen(halves[i])));
                }
                const u32 packed[2] = {halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
                store(call.encoding + (first + d * THREADS) * 8, packed);
                if (FEEDBACK)
                    store(owed.residual + (first + d * THREADS) * 16, residual[d]);
            }
        },
        [&](u64 i) {
            const float value = owed_at(owed, i);
            const u32 bits = Format::narrow(value);
            put_half(call.encoding, i, bits);
            if (FEEDBACK)
                put_f32(owed.residual, i, __fsub_rn(value, Format::widen(bits)));
        });
}

template <class Format> __device__ void decode(const Decode &call) {
    const u64 elements = call.counted ? *call.counted : call.elements;
    sweep(
        elements, call.aligned,
        [&](u64 first, u64 vectors) {
            u32 packed[DEPTH][2], there[DEPTH][4];
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (first + d * THREADS < vectors)
                    load(packed[d], call.encoding + (first + d * THREADS) * 8);
            if (call.into.adds) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d)
                    if (first + d * THREADS < vectors)
                        load(there[d], call.into.values + (first + d * THREADS) * 16);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (first + d * THREADS >= vectors)
                    break;
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float value = Format::widen(packed[d][i / 2] >> (16 * (i % 2)) & 0xffff);
                    if (call.into.adds)
                        value = __fadd_rn(__uint_as_float(there[d][i]), value);
                    words[i] = __float_as_uint(value);
                }
                store(call.into.values + (first + d * THREADS) * 16, words);
            }
        },
        [&](u64 i) { put_decoded(Format::widen(half_at(call.encoding, i)), call.into, i); });
}

KERNEL(cast_encode_fp16, Encode, THREADS) { encode<Fp16, false>(call); }
KERNEL(cast_encode_fp16_owed, Encode, THREADS) { encode<Fp16, true>(call); }
KERNEL(cast_decode_fp16, Decode, THREADS) { decode<Fp16>(call); }
KERNEL(cast_encode_bf16, Encode, THREADS) { encode<Bf16, false>(call); }
KERNEL(cast_encode_bf16_owed, Encode, THREADS) { encode<Bf16, true>(call); }
KERNEL(cast_decode_bf16, Decode, THREADS) { decode<Bf16>(call); }
