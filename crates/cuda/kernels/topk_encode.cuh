#ifndef UNISONO_TOPK_ENCODE
#define UNISONO_TOPK_ENCODE

#include "topk.cuh"

// What the lowest magnitude that is taken is.
__device__ inline u32 least_of(const State &state) { return state.magnitude ? state.magnitude : 1; }

struct Sample {
    Owed owed;
    Strata strata;
    float *into;
};

struct Select {
    const float *values;
    u64 elements;
    u64 rank;
    State *state;
};

struct Count {
    Owed owed;
    u64 elements;
    State *state;
    u32 shift, width;
    u64 rank;
};

struct Mark {
    Owed owed;
    u64 elements;
    State *state;
    u32 *marks;
    u32 *tiles;
    // Whether this is the second time, for the exact cut.
    u64 again;
};

struct Decide {
    State *state;
    u32 *tiles;
    // For each tile, how many elements are taken before it, and how many ties there are before it.
    u32 *before;
    u64 count;
    u64 fewest, most;
    u64 again;
};

struct Emit {
    Owed owed;
    u64 elements;
    const State *state;
    const u32 *marks;
    const u32 *before;
    u32 *indices;
    u32 *values;
    // Whether what is sent leaves nothing.
    u64 takes;
};

struct Widths {
    const State *state;
    const u32 *indices;
    u32 *widths;
    u32 *lengths;
};

struct Lengths {
    State *state;
    const u32 *lengths;
    u64 *starts;
    ValueBytes value_bytes;
};

struct Pack {
    const State *state;
    const u32 *indices;
    const u32 *widths;
    const u64 *starts;
    u32 *packed;
};

struct Finish {
    const State *state;
    const char *packed;
    const char *values;
    char *encoding;
};

struct Return {
    const State *state;
    const u32 *indices;
    const float *values;
    char *residual;
};

KERNEL(topk_sample, Sample, THREADS) {
    const u64 number = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (number < call.strata.count)
        call.into[number] = owed_at(call.owed, call.strata.at(number));
}

// The digit of which, with all larger ones, there are at least `rank`: by all threads of a block, which have a
// histogram in any memory. What is left of the rank within it.
struct Digit {
    u32 digit, rank;
};

__device__ inline Digit find_digit(const u32 *histogram, u32 digits, u32 rank) {
    SHARED Digit found;
    const u32 own = (digits + THREADS - 1) / THREADS;
    // From the largest digit on.
    u32 sum = 0;
    for (u32 i = threadIdx.x * own; i < (threadIdx.x + 1) * own && i < digits; ++i)
        sum += histogram[digits - 1 - i];
    const u32 before = sums_of(sum).before;
    if (before < rank && rank - before <= sum) {
        u32 left = rank - before, i = threadIdx.x * own;
        while (histogram[digits - 1 - i] < left)
            left -= histogram[digits - 1 - i++];
        found = {digits - 1 - i, left};
    }
    wait_for_block();
    const Digit result = found;
    wait_for_block();
    return result;
}

// The cut of a sample, by one block of threads.
KERNEL(topk_select, Select, THREADS) {
    // Elements that a thread asks for before it counts the first: one block alone has to keep memory busy.
    constexpr u32 BATCH = 16;
    SHARED u32 histogram[DIGITS];
    u32 digits = 0, rank = static_cast<u32>(call.rank);
    for (u32 round = 0; round < 3; ++round) {
        const u32 width = round == 0 ? 11 : 10, shift = 20 - 10 * round;
        for (u32 i = threadIdx.x; i < DIGITS; i += THREADS)
            histogram[i] = 0;
        wait_for_block();
        for (u64 first = threadIdx.x; first < call.elements; first += THREADS * BATCH) {
            float values[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                values[i] = first + i * THREADS < call.elements ? call.values[first + i * THREADS] : 0.0f;
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i) {
                const u32 size = magnitude(values[i]);
                if (first + i * THREADS < call.elements && size >> shift >> width == digits)
                    atomic_add(&histogram[size >> shift & ((1u << width) - 1)], 1);
            }
        }
        wait_for_block();
        const Digit found = find_digit(histogram, 1u << width, rank);
        digits = digits << width | found.digit;
        rank = found.rank;
    }
    if (threadIdx.x == 0) {
        call.state->magnitude = digits;
        call.state->exact = 0;
    }
}

// A digit of the exact cut. The last block that has counted finds it.
KERNEL(topk_count, Count, THREADS) {
    State &state = *call.state;
    if (!state.exact)
        return;
    SHARED u32 histogram[DIGITS];
    SHARED bool last;
    const u32 digits = 1u << call.width, mask = digits - 1, higher = state.digits;
    for (u32 i = threadIdx.x; i < digits; i += THREADS)
        histogram[i] = 0;
    wait_for_block();
    const u64 fours = call.elements / 4;
    for (u64 i = blockIdx.x * u64(THREADS) + threadIdx.x; i < fours; i += gridDim.x * u64(THREADS)) {
        float values[1][4];
        if (call.owed.residual)
            read_owed<true>(values, call.owed, i * 4, 0);
        else
            read_owed<false>(values, call.owed, i * 4, 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 size = magnitude(values[0][j]);
            if (size >> call.shift >> call.width == higher)
                atomic_add(&histogram[size >> call.shift & mask], 1);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < call.elements % 4) {
        const u32 size = magnitude(owed_at(call.owed, fours * 4 + threadIdx.x));
        if (size >> call.shift >> call.width == higher)
            atomic_add(&histogram[size >> call.shift & mask], 1);
    }
    wait_for_block();
    for (u32 i = threadIdx.x; i < digits; i += THREADS)
        if (histogram[i])
            atomic_add(&state.histogram[i], histogram[i]);
    order_writes();
    wait_for_block();
    if (threadIdx.x == 0)
        last = atomic_add(&state.done, 1) == gridDim.x - 1;
    wait_for_block();
    if (!last)
        return;
    order_writes();
    // Only atomic operations are sure to see what other blocks have added.
    for (u32 i = threadIdx.x; i < digits; i += THREADS) {
        histogram[i] = atomic_add(&state.histogram[i], 0);
        state.histogram[i] = 0;
    }
    wait_for_block();
    const u32 rank = call.rank ? static_cast<u32>(call.rank) : state.rank;
    const Digit found = find_digit(histogram, digits, rank);
    if (threadIdx.x == 0) {
        state.digits = higher << call.width | found.digit;
        state.rank = found.rank;
        state.done = 0;
        if (call.shift == 0) {
            state.magnitude = state.digits;
            state.ties = state.digits ? found.rank : 0;
        }
    }
}

KERNEL(topk_mark, Mark, THREADS) {
    const State &state = *call.state;
    if (call.again && !state.exact)
        return;
    const u32 least = least_of(state), cut = state.magnitude, lane = threadIdx.x % WARP;
    const u64 tiles = (call.elements + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u64 first = tile * TILE + threadIdx.x * 4;
        float values[4][4];
        const bool whole = (tile + 1) * TILE <= call.elements;
        if (whole) {
            if (call.owed.residual)
                read_owed<true>(values, call.owed, first, TILE / 4);
            else
                read_owed<false>(values, call.owed, first, TILE / 4);
        } else {
#pragma unroll
            for (u32 part = 0; part < 4; ++part)
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u64 element = first + part * (TILE / 4) + i;
                    values[part][i] = element < call.elements ? owed_at(call.owed, element) : 0.0f;
                }
        }
        if (call.owed.residual && call.owed.gradient) {
            if (whole) {
                write_fours(values, call.owed.residual, first, TILE / 4, call.owed.aligned);
            } else {
#pragma unroll
                for (u32 part = 0; part < 4; ++part)
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const u64 element = first + part * (TILE / 4) + i;
                        if (element < call.elements)
                            put_f32(call.owed.residual, element, values[part][i]);
                    }
            }
        }
        // Marked elements in the lower half, ties in the upper.
        u32 counts = 0;
#pragma unroll
        for (u32 part = 0; part < 4; ++part) {
            u32 bits = 0;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 size = magnitude(values[part][i]);
                bits |= (size >= least ? 1u : 0u) << i;
                counts += size >= least && size == cut ? 0x10000 : 0;
            }
            counts += count_bits(bits);
            // The bits of eight neighbouring threads are a word.
            bits <<= 4 * (lane % 8);
#pragma unroll
            for (u32 across = 1; across < 8; across *= 2)
                bits |= from_across(bits, across);
            if (lane % 8 == 0)
                call.marks[tile * (TILE / 32) + part * (TILE / 128) + threadIdx.x / 8] = bits;
        }
        const u32 all = sums_of(counts).all;
        if (threadIdx.x == 0)
            call.tiles[tile] = all;
    }
}

// One block of threads. The marked elements of a tile in the lower half of its word, ties in the upper.
KERNEL(topk_decide, Decide, THREADS) {
    State &state = *call.state;
    if (call.again && !state.exact)
        return;
    const bool exact = call.again;
    const u64 own = (call.count + THREADS - 1) / THREADS, first = threadIdx.x * own;
    const u64 end = first + own < call.count ? first + own : call.count;
    const u32 *__restrict__ tiles = call.tiles;
    u32 *__restrict__ before = call.before;
    u32 marked = 0, tied = 0;
#pragma unroll 8
    for (u64 i = first; i < end; ++i) {
        marked += tiles[i] & 0xffff;
        tied += tiles[i] >> 16;
    }
    const Sums<u32> sums = sums_of(marked), ties = sums_of(tied);
    const u64 most = exact ? state.ties : ~u64(0);
    // What is taken before an element: all above the cut, and the first of the ties.
    u32 above = sums.before - ties.before, tied_before = ties.before;
#pragma unroll 8
    for (u64 i = first; i < end; ++i) {
        before[2 * i] = above + static_cast<u32>(tied_before < most ? tied_before : most);
        before[2 * i + 1] = tied_before;
        above += (tiles[i] & 0xffff) - (tiles[i] >> 16);
        tied_before += tiles[i] >> 16;
    }
    if (threadIdx.x == 0) {
        const u64 all = sums.all;
        if (exact) {
            state.count = all - ties.all + (ties.all < most ? ties.all : most);
        } else {
            state.count = all;
            state.exact = all > call.most || (all < call.fewest && state.magnitude);
        }
    }
}

KERNEL(topk_emit, Emit, THREADS) {
    const State &state = *call.state;
    const u32 cut = state.magnitude;
    const bool exact = state.exact;
    const u64 most = state.ties, tiles = (call.elements + TILE - 1) / TILE;
    const char *from = call.owed.residual ? call.owed.residual : call.owed.gradient;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 word = call.marks[tile * (TILE / 32) + threadIdx.x / 2];
        u32 bits = threadIdx.x % 2 ? word >> 16 : word & 0xffff;
        const u64 first = tile * TILE + threadIdx.x * 16;
        u32 ties = 0;
        if (exact)
            for (u32 left = bits; left; left &= left - 1) {
                const u32 bit = lowest_bit(left);
                ties |= (magnitude(f32_at(from, first + bit)) == cut ? 1u : 0u) << bit;
            }
        // Elements above the cut in the lower half, ties in the upper.
        const u32 sums = sums_of(count_bits(bits & ~ties) + (count_bits(ties) << 16)).before;
        u64 above = call.before[2 * tile], tied = call.before[2 * tile + 1];
        above -= tied < most || !exact ? tied : most;
        above += sums & 0xffff;
        tied += sums >> 16;
        for (; bits; bits &= bits - 1) {
            const u32 bit = lowest_bit(bits);
            const u64 element = first + bit;
            const bool tie = ties >> bit & 1;
            if (!tie || tied < most) {
                const u64 place = above + (exact ? (tied < most ? tied : most) : tied);
                call.indices[place] = static_cast<u32>(element);
                call.values[place] = __float_as_uint(f32_at(from, element));
                if (call.takes && call.owed.residual)
                    put_f32(call.owed.residual, element, 0.0f);
            }
            if (tie)
                ++tied;
            else
                ++above;
        }
    }
}

// The gaps of a lane, which has four of its group's; how many elements lie between an index and the one before.
__device__ inline u32 gap_at(const u32 *indices, u64 place) {
    return place ? indices[place] - indices[place - 1] - 1 : indices[0];
}

__device__ inline u32 sum_of_warp(u32 value) {
#pragma unroll
    for (u32 bits = WARP / 2; bits > 0; bits /= 2)
        value += from_across(value, bits);
    return value;
}

// The width with which a group is shortest, as the host looks for it: down from one bit more than the mean has.
KERNEL(topk_widths, Widths, THREADS) {
    const u64 count = call.state->count, groups = (count + GROUP - 1) / GROUP;
    const u32 lane = threadIdx.x % WARP, warps = THREADS / WARP;
    for (u64 group = blockIdx.x * u64(warps) + threadIdx.x / WARP; group < groups; group += gridDim.x * u64(warps)) {
        const u64 first = group * GROUP;
        const u32 size = static_cast<u32>(count - first < GROUP ? count - first : GROUP);
        u32 gaps[4], sum = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 place = lane * 4 + i;
            gaps[i] = place < size ? gap_at(call.indices, first + place) : 0;
            sum += gaps[i];
        }
        const u32 mean = sum_of_warp(sum) / size;
        const auto bits = [&](u32 width) {
            u32 high = 0;
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                high += gaps[i] >> width;
            return u64(sum_of_warp(high)) + u64(width + 1) * size;
        };
        u32 width = 32 - leading_zeros(mean);
        width = width < 31 ? width : 31;
        u64 length = bits(width);
        while (width > 0) {
            const u64 shorter = bits(width - 1);
            if (shorter > length)
                break;
            --width;
            length = shorter;
        }
        if (lane == 0) {
            call.widths[group] = width;
            call.lengths[group] = static_cast<u32>(length) + WIDTH_BITS;
        }
    }
}

// Where each group begins; one block of threads.
KERNEL(topk_lengths, Lengths, THREADS) {
    State &state = *call.state;
    const u64 groups = (state.count + GROUP - 1) / GROUP, own = (groups + THREADS - 1) / THREADS;
    const u64 first = threadIdx.x * own, end = first + own < groups ? first + own : groups;
    const u32 *__restrict__ lengths = call.lengths;
    u64 *__restrict__ starts = call.starts;
    u64 sum = 0;
#pragma unroll 8
    for (u64 i = first; i < end; ++i)
        sum += lengths[i];
    const Sums<u64> sums = sums_of(sum);
    u64 start = sums.before;
#pragma unroll 8
    for (u64 i = first; i < end; ++i) {
        starts[i] = start;
        start += lengths[i];
    }
    if (threadIdx.x == 0) {
        state.bits = sums.all;
        state.length = 4 + (sums.all + 7) / 8 + call.value_bytes.of(state.count);
    }
}

// Sets the bits of a value in words that are zero.
__device__ inline void put_bits(u32 *words, u64 at, u64 value) {
    const u32 shift = at % 32;
    const u64 low = value << shift;
    u32 *word = words + at / 32;
    if (static_cast<u32>(low))
        atomic_or(word, static_cast<u32>(low));
    if (low >> 32)
        atomic_or(word + 1, static_cast<u32>(low >> 32));
}

KERNEL(topk_pack, Pack, THREADS) {
    const u64 count = call.state->count, groups = (count + GROUP - 1) / GROUP;
    const u32 lane = threadIdx.x % WARP, warps = THREADS / WARP;
    for (u64 group = blockIdx.x * u64(warps) + threadIdx.x / WARP; group < groups; group += gridDim.x * u64(warps)) {
        const u64 first = group * GROUP;
        const u32 size = static_cast<u32>(count - first < GROUP ? count - first : GROUP), width = call.widths[group];
        u32 gaps[4], length = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 place = lane * 4 + i;
            gaps[i] = place < size ? gap_at(call.indices, first + place) : 0;
            length += place < size ? (gaps[i] >> width) + 1 + width : 0;
        }
        u32 before = length;
#pragma unroll
        for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
            const u32 below = from_below(before, lanes);
            before += lane >= lanes ? below : 0;
        }
        u64 at = call.starts[group] + WIDTH_BITS + (before - length);
        if (lane == 0)
            put_bits(call.packed, call.starts[group], width);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (lane * 4 + i < size) {
                const u64 low = gaps[i] & ((u64(1) << width) - 1);
                at += gaps[i] >> width;
                put_bits(call.packed, at, low << 1 | 1);
                at += 1 + width;
            }
    }
}

KERNEL(topk_finish, Finish, THREADS) {
    const u64 packed = (call.state->bits + 7) / 8, values = call.state->length - 4 - packed;
    const u64 first = blockIdx.x * u64(THREADS) + threadIdx.x, step = gridDim.x * u64(THREADS);
    if (first == 0)
        put_word(call.encoding, static_cast<u32>(call.state->count));
    for (u64 i = first; i < packed; i += step)
        call.encoding[4 + i] = call.packed[i];
    char *into = call.encoding + 4 + packed;
    for (u64 i = first; i < values / 4; i += step)
        put_word(into + 4 * i, word_at(call.values + 4 * i));
    if (first < values % 4)
        into[values / 4 * 4 + first] = call.values[values / 4 * 4 + first];
}

// Puts what a codec of values left out where it came from.
KERNEL(topk_return, Return, THREADS) {
    const u64 count = call.state->count;
    for (u64 i = blockIdx.x * u64(THREADS) + threadIdx.x; i < count; i += gridDim.x * u64(THREADS))
        put_f32(call.residual, call.indices[i], call.values[i]);
}

#endif
