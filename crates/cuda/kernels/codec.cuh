// What all codecs share: values that are read with what is owed on them, bytes at any address, keys, and
// how a decoder says that bytes are none of an encoder's.

#ifndef UNISONO_CODEC
#define UNISONO_CODEC

#include "warp.cuh"

// Threads of a block; the launcher has the same number.
constexpr u32 THREADS = 256;

// What is encoded: a gradient, a residual, or the sum of both, which then is the new residual. Either may be
// null, but not both.
struct Owed {
    const char *gradient;
    char *residual;
    // Whether both can be read 16 bytes at a time.
    u32 aligned;
    u32 unused;
};

// Where decoded values go.
struct Into {
    char *values;
    // Whether they are added to what is there.
    u32 adds;
    // Whether they can be written 16 bytes at a time.
    u32 aligned;
};

__device__ inline u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }

__device__ inline float f32_at(const char *values, u64 element) {
    return reinterpret_cast<const float *>(values)[element];
}

__device__ inline void put_f32(char *values, u64 element, float value) {
    reinterpret_cast<float *>(values)[element] = value;
}

// One element of what is encoded.
__device__ inline float owed_at(const Owed &owed, u64 element) {
    if (!owed.residual)
        return f32_at(owed.gradient, element);
    const float residual = f32_at(owed.residual, element);
    return owed.gradient ? __fadd_rn(residual, f32_at(owed.gradient, element)) : residual;
}

// Reads groups of four floats, each `apart` elements after the one before.
template <int GROUPS>
__device__ void read_fours(float (&values)[GROUPS][4], const char *from, u64 first, u64 apart, bool aligned) {
    if (aligned) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            u32 words[4];
            load(words, from + (first + group * apart) * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[group][i] = __uint_as_float(words[i]);
        }
    } else {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[group][i] = f32_at(from, first + group * apart + i);
    }
}

template <int GROUPS>
__device__ void write_fours(const float (&values)[GROUPS][4], char *into, u64 first, u64 apart, bool aligned) {
    if (aligned) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = __float_as_uint(values[group][i]);
            store(into + (first + group * apart) * 4, words);
        }
    } else {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                put_f32(into, first + group * apart + i, values[group][i]);
    }
}

// What is encoded, in groups of four. All that is read is asked for before anything waits for it.
template <bool FEEDBACK, int GROUPS>
__device__ void read_owed(float (&values)[GROUPS][4], const Owed &owed, u64 first, u64 apart) {
    if constexpr (FEEDBACK) {
        read_fours(values, owed.residual, first, apart, owed.aligned);
        if (owed.gradient) {
            float gradient[GROUPS][4];
            read_fours(gradient, owed.gradient, first, apart, owed.aligned);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    values[group][i] = __fadd_rn(values[group][i], gradient[group][i]);
        }
    } else {
        read_fours(values, owed.gradient, first, apart, owed.aligned);
    }
}

// Writes decoded groups of four, or adds them.
template <int GROUPS>
__device__ void write_decoded(float (&values)[GROUPS][4], const Into &into, u64 first, u64 apart) {
    if (into.adds) {
        float there[GROUPS][4];
        read_fours(there, into.values, first, apart, into.aligned);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[group][i] = __fadd_rn(there[group][i], values[group][i]);
    }
    write_fours(values, into.values, first, apart, into.aligned);
}

__device__ inline void put_decoded(float value, const Into &into, u64 element) {
    put_f32(into.values, element, into.adds ? __fadd_rn(f32_at(into.values, element), value) : value);
}

// Sixteen bytes that are read and written at once.
struct alignas(16) Sixteen {
    u32 words[4];
};

// Copies bytes between shared memory and an address by all threads of a block. Where the address is no
// multiple of 16, one by one.
__device__ inline void copy_out(char *into, const Sixteen *staged, u32 bytes) {
    const bool aligned = reinterpret_cast<u64>(into) % 16 == 0;
    const u32 whole = aligned ? bytes / 16 : 0;
    for (u32 i = threadIdx.x; i < whole; i += THREADS)
        store(into + i * 16, staged[i].words);
    const char *from = reinterpret_cast<const char *>(staged);
    for (u32 i = whole * 16 + threadIdx.x; i < bytes; i += THREADS)
        into[i] = from[i];
}

__device__ inline void copy_in(Sixteen *staged, const char *from, u32 bytes) {
    const bool aligned = reinterpret_cast<u64>(from) % 16 == 0;
    const u32 whole = aligned ? bytes / 16 : 0;
    for (u32 i = threadIdx.x; i < whole; i += THREADS)
        load(staged[i].words, from + i * 16);
    char *into = reinterpret_cast<char *>(staged);
    for (u32 i = whole * 16 + threadIdx.x; i < bytes; i += THREADS)
        into[i] = from[i];
}

// A word of a block's bytes, which may lie anywhere.
__device__ inline u32 word_at(const char *bytes) {
    if (reinterpret_cast<u64>(bytes) % 4 == 0)
        return *reinterpret_cast<const u32 *>(bytes);
    const u8 *each = reinterpret_cast<const u8 *>(bytes);
    return each[0] | each[1] << 8 | each[2] << 16 | static_cast<u32>(each[3]) << 24;
}

__device__ inline void put_word(char *bytes, u32 word) {
    if (reinterpret_cast<u64>(bytes) % 4 == 0) {
        *reinterpret_cast<u32 *>(bytes) = word;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            bytes[i] = static_cast<char>(word >> (8 * i));
    }
}

// The finalizer of SplitMix64, and the number at a place of a key's sequence.
__device__ inline u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

__device__ inline u64 random_at(u64 key, u64 place) { return mix(key + place * 0x9e3779b97f4a7c15); }

// Which field of an encoding has a value that no encoder writes. Of several, the first block's counts, and in
// a block the lower field's, as for a decoder that goes from block to block.
constexpr u64 BAD_SCALE = 0, BAD_CODE = 1;

__device__ inline void report(u64 *fault, u64 block, u64 field, u32 found) {
    atomic_min(fault, block << 33 | field << 32 | found);
}

// The largest of the lanes' values, of groups of lanes.
template <u32 LANES> __device__ u32 largest_of(u32 value) {
#pragma unroll
    for (u32 bits = LANES / 2; bits > 0; bits /= 2) {
        const u32 other = from_across(value, bits);
        value = value < other ? other : value;
    }
    return value;
}

#endif
