// sign: a bit for each element, and the mean magnitude of each block of 2048.
//
// The host sums the magnitudes of a full block in 64 lanes, one row of 64 elements after the other, and folds
// the lanes by halves; and a row's signs are one bit of each of 64 words. So one warp has a block: each of its
// threads two neighbouring lanes, with all 32 rows of them in registers. Lanes and words are sums of a thread's
// own, and the fold is one exchange after the other.

#include "codec.cuh"

constexpr u32 ROWS = 32, WORDS = 64, BLOCK = ROWS * WORDS;
constexpr u32 SCALE = 4, STRIDE = SCALE + WORDS * 4;
constexpr u32 NOT_A_NUMBER = 0x7fc00000, LARGEST = 0x7f7fffff;

struct Encode {
    Owed owed;
    char *encoding;
    u64 elements;
};

struct Decode {
    const char *encoding;
    Into into;
    u64 elements;
    u64 *fault;
};

__device__ inline float plus(float left, float right) { return __fadd_rn(left, right); }

// The share of an element in the mean of a full block.
__device__ inline float share(float value) { return __fmul_rn(__uint_as_float(magnitude(value)), 1.0f / BLOCK); }

// The scale of a block, of which this thread summed two neighbouring lanes.
__device__ inline float fold(float even, float odd, u32 elements) {
#pragma unroll
    for (u32 threads = WARP / 2; threads > 0; threads /= 2) {
        even = plus(even, __uint_as_float(from_above(__float_as_uint(even), threads)));
        odd = plus(odd, __uint_as_float(from_above(__float_as_uint(odd), threads)));
    }
    const float sum = __uint_as_float(from_lane(__float_as_uint(plus(even, odd)), 0));
    if (magnitude(sum) >= 0x7f800000)
        return __uint_as_float(NOT_A_NUMBER);
    const float mean = __fmul_rn(sum, __fdiv_rn(float(BLOCK), __uint2float_rn(elements)));
    return mean < __uint_as_float(LARGEST) ? mean : __uint_as_float(LARGEST);
}

__device__ inline float with_sign_of(float scale, float value) {
    return __uint_as_float((__float_as_uint(scale) & 0x7fffffff) | (__float_as_uint(value) & 0x80000000));
}

// Reads two lanes of all rows.
__device__ inline void read_lanes(float (&values)[ROWS][2], const char *from, u64 first, bool aligned) {
    if (aligned) {
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) {
            u32 words[2];
            load(words, from + (first + row * WORDS) * 4);
            values[row][0] = __uint_as_float(words[0]);
            values[row][1] = __uint_as_float(words[1]);
        }
    } else {
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) {
            values[row][0] = f32_at(from, first + row * WORDS);
            values[row][1] = f32_at(from, first + row * WORDS + 1);
        }
    }
}

template <bool FEEDBACK> __device__ void encode_block(const Encode &call, u64 block, u32 lane) {
    const u64 first = block * BLOCK + 2 * lane;
    const bool aligned = call.owed.aligned;
    float values[ROWS][2];
    read_lanes(values, FEEDBACK ? call.owed.residual : call.owed.gradient, first, aligned);
    if (FEEDBACK && call.owed.gradient) {
        float gradient[ROWS][2];
        read_lanes(gradient, call.owed.gradient, first, aligned);
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) {
            values[row][0] = plus(values[row][0], gradient[row][0]);
            values[row][1] = plus(values[row][1], gradient[row][1]);
        }
    }
    float even = 0.0f, odd = 0.0f;
    u32 words[2] = {};
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
        even = plus(even, share(values[row][0]));
        odd = plus(odd, share(values[row][1]));
        words[0] |= __float_as_uint(values[row][0]) >> 31 << row;
        words[1] |= __float_as_uint(values[row][1]) >> 31 << row;
    }
    const float scale = fold(even, odd, BLOCK);
    char *into = call.encoding + block * STRIDE;
    if (lane == 0)
        put_word(into, __float_as_uint(scale));
    put_word(into + SCALE + 8 * lane, words[0]);
    put_word(into + SCALE + 8 * lane + 4, words[1]);
    if (FEEDBACK) {
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) {
            u32 left[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                left[i] = __float_as_uint(__fsub_rn(values[row][i], with_sign_of(scale, values[row][i])));
            char *at = call.owed.residual + (first + row * WORDS) * 4;
            if (aligned) {
                store(at, left);
            } else {
                put_f32(at, 0, __uint_as_float(left[0]));
                put_f32(at, 1, __uint_as_float(left[1]));
            }
        }
    }
}

// The last block, of fewer elements, whose words are as many as it takes.
template <bool FEEDBACK> __device__ void encode_last(const Encode &call, u64 block, u32 elements, u32 lane) {
    const u64 first = block * BLOCK;
    float even = 0.0f, odd = 0.0f;
    for (u32 i = 2 * lane; i < elements; i += WORDS) {
        even = plus(even, share(owed_at(call.owed, first + i)));
        if (i + 1 < elements)
            odd = plus(odd, share(owed_at(call.owed, first + i + 1)));
    }
    const float scale = fold(even, odd, elements);
    char *into = call.encoding + block * STRIDE;
    if (lane == 0)
        put_word(into, __float_as_uint(scale));
    const u32 words = (elements + ROWS - 1) / ROWS;
    for (u32 at = lane; at < words; at += WARP) {
        u32 word = 0;
        for (u32 row = 0; row * words + at < elements; ++row) {
            const u64 element = first + row * words + at;
            const float value = owed_at(call.owed, element);
            word |= __float_as_uint(value) >> 31 << row;
            if (FEEDBACK)
                put_f32(call.owed.residual, element, __fsub_rn(value, with_sign_of(scale, value)));
        }
        put_word(into + SCALE + 4 * at, word);
    }
}

template <bool FEEDBACK> __device__ void encode(const Encode &call) {
    const u64 block = (blockIdx.x * u64(THREADS) + threadIdx.x) / WARP, whole = call.elements / BLOCK;
    const u32 lane = threadIdx.x % WARP, rest = static_cast<u32>(call.elements % BLOCK);
    if (block < whole)
        encode_block<FEEDBACK>(call, block, lane);
    else if (block == whole && rest)
        encode_last<FEEDBACK>(call, block, rest, lane);
}

__device__ inline u32 scale_from(const Decode &call, const char *from, u64 block, bool says) {
    const u32 scale = word_at(from);
    if (scale > LARGEST && scale != NOT_A_NUMBER && says)
        report(call.fault, block, BAD_SCALE, scale);
    return scale;
}

// Half of a warp writes a row: four words are four neighbouring elements of every row.
__device__ inline void decode_block(const Decode &call, u64 block, u32 lane) {
    const char *from = call.encoding + block * STRIDE;
    const u32 scale = scale_from(call, from, block, lane == 0);
    const u32 column = lane % 16 * 4, half = lane / 16;
    u32 words[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        words[i] = word_at(from + SCALE + 4 * (column + i)) >> half;
#pragma unroll
    for (u32 part = 0; part < 4; ++part) {
        float values[4][4];
#pragma unroll
        for (u32 pair = 0; pair < 4; ++pair)
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                values[pair][i] = __uint_as_float(scale | words[i] >> (2 * (4 * part + pair)) << 31);
        write_decoded(values, call.into, block * BLOCK + (8 * part + half) * WORDS + column, 2 * WORDS);
    }
}

__device__ inline void decode_last(const Decode &call, u64 block, u32 elements, u32 lane) {
    const char *from = call.encoding + block * STRIDE;
    const u32 scale = scale_from(call, from, block, lane == 0), words = (elements + ROWS - 1) / ROWS;
    for (u32 i = lane; i < elements; i += WARP) {
        const u32 word = word_at(from + SCALE + 4 * (i % words));
        put_decoded(__uint_as_float(scale | word >> (i / words) << 31), call.into, block * BLOCK + i);
    }
}

KERNEL(sign_encode, Encode, THREADS) { encode<false>(call); }
KERNEL(sign_encode_owed, Encode, THREADS) { encode<true>(call); }
KERNEL(sign_decode, Decode, THREADS) {
    const u64 block = (blockIdx.x * u64(THREADS) + threadIdx.x) / WARP, whole = call.elements / BLOCK;
    const u32 lane = threadIdx.x % WARP, rest = static_cast<u32>(call.elements % BLOCK);
    if (block < whole)
        decode_block(call, block, lane);
    else if (block == whole && rest)
        decode_last(call, block, rest, lane);
}
