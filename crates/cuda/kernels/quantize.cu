// int8, int4 and qsgd: blocks of codes, each with its scale. The encoding, and the arithmetic, are those of
// the host (crates/codec/src/block.rs): a block's scale follows from its largest magnitude, and its codes from
// the scale and, to round by chance, from a hash of the key and the place.
//
// A thread has 16 elements of a block in registers: four groups of four, a quarter of the block apart. So 16
// threads have a block of int8, 8 one of int4 and 32 one of qsgd; all that one warp reads at once is
// contiguous. The largest magnitude is found among them by exchange, and the elements are read once. As the
// quarters of a block meet in one thread, so do the halves of a block that int4 packs into one byte; of the
// eighths that qsgd packs, each thread has every second, and another thread the others.
//
// The bytes of a block are no multiple of 16, but those of the 4096 elements that a thread block encodes are:
// they are collected in shared memory, and copied from there. The last block, which may be shorter, is encoded
// by one warp, element by element.

#include "codec.cuh"

// Elements that a block of threads encodes.
constexpr u32 TILE = THREADS * 16;

struct Encode {
    Owed owed;
    char *encoding;
    u64 elements;
    // The number of elements, where only the device knows it; else null.
    const u64 *counted;
    // The place of the first element in its parameter.
    u64 first;
    u64 key;
    u32 dithers;
    // Bits of a code of qsgd.
    u32 bits;
};

struct Decode {
    const char *encoding;
    Into into;
    u64 elements;
    const u64 *counted;
    u64 *fault;
    u64 bits;
};

// Bytes of a scale, and the one NaN that is ever one.
constexpr u32 SCALE = 2;
constexpr u32 NOT_A_NUMBER = 0x7fc00000;

// Bytes of one code each.
struct Int8 {
    static constexpr u32 BLOCK = 256;
    static constexpr u32 PARTS = 1;
    static __device__ u32 levels(u32) { return 127; }
    static __device__ u32 packed(u32 elements, u32) { return elements; }

    // `into` is where the codes of the block begin, at a multiple of two bytes in shared memory.
    static __device__ void pack(const u32 (&codes)[4], u16 *into, u32 lane, u32) {
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter) {
            u16 *at = into + quarter * 32 + lane * 2;
            at[0] = static_cast<u16>(codes[quarter]);
            at[1] = static_cast<u16>(codes[quarter] >> 16);
        }
    }
    static __device__ void unpack(u32 (&codes)[4], const u16 *from, u32 lane, u32) {
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter) {
            const u16 *at = from + quarter * 32 + lane * 2;
            codes[quarter] = at[0] | static_cast<u32>(at[1]) << 16;
        }
    }
    static __device__ void pack_few(const u32 (&codes)[1], u8 *into, u32 at, u32, u32) {
        into[at] = static_cast<u8>(codes[0]);
    }
    static __device__ void unpack_few(u32 (&codes)[1], const u8 *from, u32 at, u32, u32) { codes[0] = from[at]; }
};

// A byte has an element of the first half of a block in its lower bits, and the one as far into the second
// half in its upper ones.
struct Int4 {
    static constexpr u32 BLOCK = 128;
    static constexpr u32 PARTS = 2;
    static __device__ u32 levels(u32) { return 7; }
    static __device__ u32 packed(u32 elements, u32) { return (elements + 1) / 2; }

    static __device__ void pack(const u32 (&codes)[4], u16 *into, u32 lane, u32) {
#pragma unroll
        for (u32 quarter = 0; quarter < 2; ++quarter) {
            const u32 bytes = codes[quarter] | codes[quarter + 2] << 4;
            u16 *at = into + quarter * 16 + lane * 2;
            at[0] = static_cast<u16>(bytes);
            at[1] = static_cast<u16>(bytes >> 16);
        }
    }
    static __device__ void unpack(u32 (&codes)[4], const u16 *from, u32 lane, u32) {
#pragma unroll
        for (u32 quarter = 0; quarter < 2; ++quarter) {
            const u16 *at = from + quarter * 16 + lane * 2;
            const u32 bytes = at[0] | static_cast<u32>(at[1]) << 16;
            codes[quarter] = bytes & 0x0f0f0f0f;
            codes[quarter + 2] = bytes >> 4 & 0x0f0f0f0f;
        }
    }
    static __device__ void pack_few(const u32 (&codes)[2], u8 *into, u32 at, u32, u32) {
        into[at] = static_cast<u8>(codes[0] | codes[1] << 4);
    }
    static __device__ void unpack_few(u32 (&codes)[2], const u8 *from, u32 at, u32, u32) {
        codes[0] = from[at] & 0x0f;
        codes[1] = from[at] >> 4;
    }
};

// Bit planes: bit k of byte j of plane p is bit p of the element that is j into the k-th eighth.
struct Qsgd {
    static constexpr u32 BLOCK = 512;
    static constexpr u32 PARTS = 8;
    static __device__ u32 levels(u32 bits) { return (1u << (bits - 1)) - 1; }
    static __device__ u32 packed(u32 elements, u32 bits) { return (elements + 7) / 8 * bits; }

    static __device__ void pack(const u32 (&codes)[4], u16 *into, u32 lane, u32 bits) {
        const u32 odd = lane / 16;
        for (u32 plane = 0; plane < bits; ++plane) {
            u32 bytes = 0;
#pragma unroll
            for (u32 quarter = 0; quarter < 4; ++quarter)
                bytes |= (codes[quarter] >> plane & 0x01010101) << (2 * quarter + odd);
            bytes |= from_across(bytes, 16);
            if (plane % 2 == odd) {
                u16 *at = into + plane * 32 + lane % 16 * 2;
                at[0] = static_cast<u16>(bytes);
                at[1] = static_cast<u16>(bytes >> 16);
            }
        }
    }
    static __device__ void unpack(u32 (&codes)[4], const u16 *from, u32 lane, u32 bits) {
        const u32 odd = lane / 16;
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter)
            codes[quarter] = 0;
        for (u32 plane = 0; plane < bits; ++plane) {
            const u16 *at = from + plane * 32 + lane % 16 * 2;
            const u32 bytes = at[0] | static_cast<u32>(at[1]) << 16;
#pragma unroll
            for (u32 quarter = 0; quarter < 4; ++quarter)
                codes[quarter] |= (bytes >> (2 * quarter + odd) & 0x01010101) << plane;
        }
    }
    static __device__ void pack_few(const u32 (&codes)[8], u8 *into, u32 at, u32 eighth, u32 bits) {
        for (u32 plane = 0; plane < bits; ++plane) {
            u32 byte = 0;
#pragma unroll
            for (u32 k = 0; k < 8; ++k)
                byte |= (codes[k] >> plane & 1) << k;
            into[plane * eighth + at] = static_cast<u8>(byte);
        }
    }
    static __device__ void unpack_few(u32 (&codes)[8], const u8 *from, u32 at, u32 eighth, u32 bits) {
#pragma unroll
        for (u32 k = 0; k < 8; ++k)
            codes[k] = 0;
        for (u32 plane = 0; plane < bits; ++plane)
#pragma unroll
            for (u32 k = 0; k < 8; ++k)
                codes[k] |= (from[plane * eighth + at] >> k & 1) << plane;
    }
};

template <class Q> __device__ u32 stride(u32 bits) { return SCALE + Q::packed(Q::BLOCK, bits); }

// The bits of the largest scale whose last level is finite.
__device__ inline u32 largest_scale(u32 levels) {
    return __float_as_uint(__fdiv_rn(__uint_as_float(0x7f7fffff), __uint2float_rn(levels))) & 0xffff0000;
}

// The distance between two levels, for a block with this largest magnitude: a bf16 that was rounded up; zero
// if the magnitude is below 2^-100, NaN if it is not finite.
__device__ inline float scale_of(u32 levels, u32 peak) {
    if (peak >= 0x7f800000)
        return __uint_as_float(NOT_A_NUMBER);
    if (peak < 0x0d800000)
        return 0.0f;
    const float distance = __fdiv_rn(__uint_as_float(peak), __uint2float_rn(levels));
    const u32 up = (__float_as_uint(distance) + 0xffff) & 0xffff0000, most = largest_scale(levels);
    return __uint_as_float(up < most ? up : most);
}

// A block's scale, its inverse, and what its dithers follow from.
struct Block {
    float scale;
    float inverse;
    float levels;
    bool dithers;
    u32 seed_low, seed_high;

    __device__ Block(const Encode &call, u32 levels_, u32 peak, u64 first) {
        levels = __uint2float_rn(levels_);
        scale = scale_of(levels_, peak);
        inverse = scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
        dithers = call.dithers;
        const u64 seed = dithers ? random_at(call.key, call.first + first) : 0;
        seed_low = static_cast<u32>(seed);
        seed_high = static_cast<u32>(seed >> 32);
    }

    // A number from -1/2 to 1/2 for an element.
    __device__ float dither(u32 place) const {
        u32 x = place * 0x9e3779b9 ^ seed_low;
        x = (x ^ (x >> 16)) * 0x7feb352d ^ seed_high;
        x = (x ^ (x >> 15)) * 0x846ca68b;
        x ^= x >> 16;
        return __fmul_rn(__int2float_rn(static_cast<int>(x)), 0x1p-32f);
    }

    // The level nearest to a value. A float of the size of the rounder has no bits for a fraction. The level is
    // exact, and no zero of it is negative. A block without a scale has no levels but zero.
    __device__ float level(float value, u32 place) const {
        constexpr float ROUNDER = 12582912.0f;
        float units = __fmul_rn(value, inverse);
        if (dithers)
            units = __fadd_rn(units, dither(place));
        const float nearest = __fsub_rn(__fadd_rn(units, ROUNDER), ROUNDER);
        const float within = nearest < -levels ? -levels : nearest > levels ? levels : nearest;
        return scale > 0.0f ? within : 0.0f;
    }

    // Levels are counted from the lowest. 2^23 and an integer less than that are a float whose last bits are
    // the integer.
    __device__ u32 code(float level) const {
        return __float_as_uint(__fadd_rn(__fadd_rn(level, levels), 8388608.0f)) & 0xff;
    }

    // What is owed of a value after this level of it was encoded.
    __device__ float left(float value, float level) const { return __fsub_rn(value, __fmul_rn(level, scale)); }
};

// Encodes the last block, of fewer elements: a warp does, in any number of rounds.
template <class Q, bool FEEDBACK>
__device__ void encode_last(const Encode &call, u64 block, u32 elements, u32 lane) {
    const u64 first = block * Q::BLOCK;
    u32 peak = 0;
    for (u32 i = lane; i < elements; i += WARP) {
        const u32 size = magnitude(owed_at(call.owed, first + i));
        peak = peak < size ? size : peak;
    }
    const Block of(call, Q::levels(call.bits), largest_of<WARP>(peak), first);
    u8 *into = reinterpret_cast<u8 *>(call.encoding) + block * stride<Q>(call.bits);
    if (lane < SCALE)
        into[lane] = static_cast<u8>(__float_as_uint(of.scale) >> (16 + 8 * lane));
    const u32 part = (elements + Q::PARTS - 1) / Q::PARTS;
    for (u32 at = lane; at < part; at += WARP) {
        u32 codes[Q::PARTS];
#pragma unroll
        for (u32 k = 0; k < Q::PARTS; ++k) {
            const u32 place = k * part + at;
            codes[k] = 0;
            if (place < elements) {
                const float value = owed_at(call.owed, first + place), level = of.level(value, place);
                codes[k] = of.code(level);
                if (FEEDBACK)
                    put_f32(call.owed.residual, first + place, of.left(value, level));
            }
        }
        Q::pack_few(codes, into + SCALE, at, part, call.bits);
    }
}

template <class Q, bool FEEDBACK> __device__ void encode(const Encode &call) {
    constexpr u32 LANES = Q::BLOCK / 16, BLOCKS = TILE / Q::BLOCK;
    // No code has more than a byte.
    SHARED Sixteen staged[(TILE + BLOCKS * SCALE) / 16];
    const u64 elements = call.counted ? *call.counted : call.elements;
    const u32 bytes = stride<Q>(call.bits), lane = threadIdx.x % LANES;
    const u32 own = threadIdx.x / LANES;
    const u64 whole = elements / Q::BLOCK, tile = blockIdx.x * u64(BLOCKS), block = tile + own;
    const bool there = block < whole;

    float values[4][4];
    u32 peak = 0;
    if (there) {
        read_owed<FEEDBACK>(values, call.owed, block * Q::BLOCK + lane * 4, Q::BLOCK / 4);
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 size = magnitude(values[quarter][i]);
                peak = peak < size ? size : peak;
            }
    }
    const Block of(call, Q::levels(call.bits), largest_of<LANES>(peak), block * Q::BLOCK);
    u32 codes[4] = {};
    if (there) {
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter) {
            u32 each[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float level = of.level(values[quarter][i], quarter * (Q::BLOCK / 4) + lane * 4 + i);
                each[i] = of.code(level);
                if (FEEDBACK)
                    values[quarter][i] = of.left(values[quarter][i], level);
            }
            codes[quarter] = pick_bytes(pick_bytes(each[0], each[1], 0x0040), pick_bytes(each[2], each[3], 0x0040), 0x5410);
        }
        if (FEEDBACK)
            write_fours(values, call.owed.residual, block * Q::BLOCK + lane * 4, Q::BLOCK / 4, call.owed.aligned);
    }
    u16 *into = reinterpret_cast<u16 *>(staged) + own * bytes / 2;
    if (lane == 0)
        *into = static_cast<u16>(__float_as_uint(of.scale) >> 16);
    Q::pack(codes, into + SCALE / 2, lane, call.bits);
    wait_for_block();
    if (tile < whole) {
        const u64 blocks = whole - tile < BLOCKS ? whole - tile : BLOCKS;
        copy_out(call.encoding + tile * bytes, staged, static_cast<u32>(blocks) * bytes);
    }
    const u32 rest = static_cast<u32>(elements % Q::BLOCK);
    if (rest && whole / BLOCKS == blockIdx.x && threadIdx.x / WARP == 0)
        encode_last<Q, FEEDBACK>(call, whole, rest, threadIdx.x);
}

// The scale of a block; says so if it is none.
template <class Q> __device__ float scale_from(const Decode &call, u32 bytes, u64 block, bool says) {
    const u32 scale = bytes << 16;
    if (scale > largest_scale(Q::levels(call.bits)) && scale != NOT_A_NUMBER && says)
        report(call.fault, block, BAD_SCALE, bytes);
    return __uint_as_float(scale);
}

template <class Q> __device__ void decode_last(const Decode &call, u64 block, u32 elements, u32 lane) {
    const u8 *from = reinterpret_cast<const u8 *>(call.encoding) + block * stride<Q>(call.bits);
    const float scale = scale_from<Q>(call, from[0] | from[1] << 8, block, lane == 0);
    const u32 levels = Q::levels(call.bits), part = (elements + Q::PARTS - 1) / Q::PARTS;
    for (u32 at = lane; at < part; at += WARP) {
        u32 codes[Q::PARTS];
        Q::unpack_few(codes, from + SCALE, at, part, call.bits);
#pragma unroll
        for (u32 k = 0; k < Q::PARTS; ++k) {
            const u32 place = k * part + at;
            if (place < elements) {
                if (codes[k] > 2 * levels)
                    report(call.fault, block, BAD_CODE, codes[k]);
                const int level = static_cast<int>(codes[k]) - static_cast<int>(levels);
                put_decoded(__fmul_rn(__int2float_rn(level), scale), call.into, block * Q::BLOCK + place);
            }
        }
    }
}

template <class Q> __device__ void decode(const Decode &call) {
    constexpr u32 LANES = Q::BLOCK / 16, BLOCKS = TILE / Q::BLOCK;
    SHARED Sixteen staged[(TILE + BLOCKS * SCALE) / 16];
    const u64 elements = call.counted ? *call.counted : call.elements;
    const u32 bytes = stride<Q>(call.bits), lane = threadIdx.x % LANES, own = threadIdx.x / LANES;
    const u64 whole = elements / Q::BLOCK, tile = blockIdx.x * u64(BLOCKS), block = tile + own;
    if (tile < whole) {
        const u64 blocks = whole - tile < BLOCKS ? whole - tile : BLOCKS;
        copy_in(staged, call.encoding + tile * bytes, static_cast<u32>(blocks) * bytes);
    }
    wait_for_block();
    if (block < whole) {
        const u16 *from = reinterpret_cast<const u16 *>(staged) + own * bytes / 2;
        const float scale = scale_from<Q>(call, *from, block, lane == 0);
        const u32 levels = Q::levels(call.bits);
        u32 codes[4], bad = 0;
        Q::unpack(codes, from + SCALE / 2, lane, call.bits);
        // 2^23 and a code are a float whose last bits are the code.
        const float lowest = __fadd_rn(8388608.0f, __uint2float_rn(levels));
        float values[4][4];
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 code = pick_bytes(codes[quarter], 0x4b000000, 0x7440 + i);
                bad = bad < code ? code : bad;
                values[quarter][i] = __fmul_rn(__fsub_rn(__uint_as_float(code), lowest), scale);
            }
        if (bad > 0x4b000000 + 2 * levels)
            report(call.fault, block, BAD_CODE, bad - 0x4b000000);
        write_decoded(values, call.into, block * Q::BLOCK + lane * 4, Q::BLOCK / 4);
    }
    const u32 rest = static_cast<u32>(elements % Q::BLOCK);
    if (rest && whole / BLOCKS == blockIdx.x && threadIdx.x / WARP == 0)
        decode_last<Q>(call, whole, rest, threadIdx.x);
}

#define QUANTIZER(name, Q) \
    KERNEL(quantize_encode_##name, Encode, THREADS) { encode<Q, false>(call); } \
    KERNEL(quantize_encode_##name##_owed, Encode, THREADS) { encode<Q, true>(call); } \
    KERNEL(quantize_decode_##name, Decode, THREADS) { decode<Q>(call); }

QUANTIZER(int8, Int8)
QUANTIZER(int4, Int4)
QUANTIZER(qsgd, Qsgd)
