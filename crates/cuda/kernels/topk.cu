// topk: the elements of largest magnitude, as the host finds and packs them.
//
// A *magnitude* is the bits of a float without its sign. What is taken is everything above some magnitude, and
// the first few of exactly that magnitude: a *cut*. The host's rules (crates/codec/src/topk.rs) say which:
//
// 1. `topk_sample` gathers a sample of the elements, and `topk_select` finds the cut that takes 256 of them.
// 2. `topk_mark` goes over all elements once: it adds the gradient to the residual, writes a bit for each
//    element, 1 if it is at the cut or above, and counts these by *tiles* of 4096 elements.
// 3. `topk_decide` adds up the tiles. If neither too few nor too many are marked, they are what is sent. If
//    not, or without a sample, the cut that takes exactly as many as wanted is found digit by digit
//    (`topk_count` three times), and all is marked and added up again. No call waits for this decision: the
//    kernels of the exact cut are always submitted, and end at once where they are not needed.
// 4. `topk_emit` turns bits into indices and values, in order; only there do ties have to be told apart.
// 5. Gaps between indices are packed in groups of 128, each with the width that makes it shortest
//    (`topk_widths`); where each group begins is the sum of the lengths before it (`topk_lengths`), and then
//    all are written at once (`topk_pack`). `topk_finish` puts count, indices and values together.
//
// To decode, one block of threads finds where groups begin (`topk_groups`), which only the group before tells:
// for each place of a window of bits at once, where the next gap would begin if one began there, and by
// doubling where the 128th after it would. Then groups are unpacked each by a thread of its own
// (`topk_unpack`), added up (`topk_bases`), and the values go to their places (`topk_scatter`).

#include "strata.cuh"

constexpr u32 TILE = 4096, GROUP = 128, WIDTH_BITS = 5;
// Digits of a magnitude: of 11, 10 and 10 bits.
constexpr u32 DIGITS = 2048;

// What the kernels of a call leave for each other.
struct State {
    // What is known of the exact cut: its upper digits, and how many elements with these are taken.
    u32 digits;
    u32 rank;
    // The cut; `exact` if it is the one that takes exactly as many as wanted, of which then `ties` are taken
    // of the elements of this very magnitude. Otherwise all are taken, but zeros never.
    u32 magnitude;
    u32 exact;
    u64 ties;
    // Elements that are taken, bits of their packed indices, and bytes of the encoding.
    u64 count;
    u64 bits;
    u64 length;
    // Blocks that have counted.
    u32 done;
    // What is wrong with bytes, and the value that is.
    u32 damage;
    u64 found;
    u32 histogram[DIGITS];
};

// What the lowest magnitude that is taken is.
__device__ inline u32 least_of(const State &state) { return state.magnitude ? state.magnitude : 1; }

// In how many bytes values are encoded: in blocks, each with a scale; or without, in blocks of one.
struct ValueBytes {
    u32 block;
    u32 scale;
    // Bits of an element.
    u32 bits;
    u32 unused;

    __device__ u64 of(u64 count) const {
        const u64 rest = count % block;
        return count / block * (scale + block * bits / 8) + (rest ? scale + (rest * bits + 7) / 8 : 0);
    }
};

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

// Sums over all threads of a block, up to and without each thread's own; and the sum of all.
template <class Number> struct Sums {
    Number before, all;
};

__device__ inline u32 number_from_below(u32 value, u32 lanes) { return from_below(value, lanes); }
__device__ inline u64 number_from_below(u64 value, u32 lanes) {
    const u64 low = from_below(static_cast<u32>(value), lanes);
    return low | static_cast<u64>(from_below(static_cast<u32>(value >> 32), lanes)) << 32;
}

template <class Number> __device__ Sums<Number> sums_of(Number value) {
    constexpr u32 WARPS = THREADS / WARP;
    SHARED Number warps[WARPS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Number sum = value;
#pragma unroll
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
        const Number below = number_from_below(sum, lanes);
        sum += lane >= lanes ? below : 0;
    }
    if (lane == WARP - 1)
        warps[warp] = sum;
    wait_for_block();
    Number before = sum - value, all = 0;
    for (u32 i = 0; i < WARPS; ++i) {
        before += i < warp ? warps[i] : 0;
        all += warps[i];
    }
    wait_for_block();
    return {before, all};
}

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

// What can be wrong with bytes.
constexpr u32 FINE = 0, WRONG_LENGTH = 1, WRONG_COUNT = 2, WRONG_INDEX = 3, WRONG_PADDING = 4;

// The first of several stays, until it was asked for.
__device__ inline void say_damage(State &state, u32 damage, u64 found) {
    if (damage && !state.damage) {
        state.damage = damage;
        state.found = found;
    }
}

struct Groups {
    State *state;
    const char *encoding;
    u64 length;
    u64 elements;
    // How many elements there is room for.
    u64 most;
    u64 *starts;
    ValueBytes value_bytes;
};

struct Unpack {
    State *state;
    const char *encoding;
    const u64 *starts;
    u64 elements;
    u32 *indices;
    u32 *sums;
};

struct Bases {
    State *state;
    const u32 *sums;
    u32 *bases;
    u64 elements;
};

struct Values {
    const State *state;
    const char *encoding;
    u64 length;
    ValueBytes value_bytes;
    char *into;
};

struct Scatter {
    const State *state;
    const u32 *indices;
    const u32 *bases;
    const float *values;
    char *into;
    // What a codec of values found; null without one.
    const u64 *fault;
};

// Bits of the packed indices; beyond their end there are zeros.
struct Bits {
    const u8 *bytes;
    u64 count;

    __device__ u64 peek(u64 at) const {
        u64 word = 0;
        for (u64 i = 0; i < 8; ++i)
            word |= at / 8 + i < count ? static_cast<u64>(bytes[at / 8 + i]) << (8 * i) : 0;
        return word >> (at % 8);
    }
};

__device__ inline u32 zeros_of(u64 bits) {
    return static_cast<u32>(bits) ? lowest_bit(static_cast<u32>(bits)) : 32 + lowest_bit(static_cast<u32>(bits >> 32));
}

// Where groups begin. A window of bits is looked at at once: `places` says for each where the next gap would
// begin, if a gap of this width began there; doubled seven times, where the 128th after it would.
KERNEL(topk_groups, Groups, THREADS) {
    constexpr u32 WINDOW = 4096, ROUNDS = 7;
    static_assert(1 << ROUNDS == GROUP, "doubled as often");
    SHARED u32 window[WINDOW / 32 + 1];
    SHARED u16 places[2][WINDOW];
    State &state = *call.state;
    const u32 me = threadIdx.x;
    const u32 count = call.length < 4 ? 0 : word_at(call.encoding);
    const u64 values = call.value_bytes.of(count);
    u32 damage = FINE;
    u64 found = 0;
    if (call.length < 4) {
        damage = WRONG_LENGTH;
        found = 4;
    } else if (count > call.elements || count > call.most) {
        damage = WRONG_COUNT;
        found = count;
    } else if (call.length < 4 + values + (count + 7) / 8) {
        damage = WRONG_LENGTH;
        found = 4 + values + (count + 7) / 8;
    }
    const u64 bytes = damage ? 0 : call.length - 4 - values;
    const Bits bits = {reinterpret_cast<const u8 *>(call.encoding) + 4, bytes};
    const u64 groups = damage ? 0 : (count + GROUP - 1) / GROUP;
    u64 at = 0, base = 0, end = 0;
    u32 width = ~0u;
    for (u64 group = 0; group < groups; ++group) {
        if (me == 0)
            call.starts[group] = at;
        const u32 own = static_cast<u32>(bits.peek(at)) & 31;
        const u64 start = at + WIDTH_BITS;
        if (own != width || start >= end) {
            width = own;
            base = start;
            end = start + WINDOW / 2;
            wait_for_block();
            for (u32 i = me; i <= WINDOW / 32; i += THREADS)
                window[i] = static_cast<u32>(bits.peek(base + 32 * i));
            wait_for_block();
            for (u32 i = me; i < WINDOW; i += THREADS) {
                const u64 two = static_cast<u64>(window[i / 32 + 1]) << 32 | window[i / 32];
                // Where no one is in sight, the gap is too long to look for its end here.
                const u32 ahead = static_cast<u32>(two >> (i % 32)), next = i + lowest_bit(ahead) + 1 + width;
                places[0][i] = static_cast<u16>(ahead && next < WINDOW ? next : 0xffff);
            }
            wait_for_block();
            for (u32 round = 0; round < ROUNDS; ++round) {
                const u16 *near = places[round % 2];
                for (u32 i = me; i < WINDOW; i += THREADS)
                    places[1 - round % 2][i] = near[i] < WINDOW ? near[near[i]] : 0xffff;
                wait_for_block();
            }
        }
        const u32 jump = places[ROUNDS % 2][start - base];
        if (group + 1 < groups && jump < WINDOW) {
            at = base + jump;
            continue;
        }
        // A long group, or the last one, which may be shorter: gap by gap.
        at = start;
        const u64 size = group + 1 < groups ? GROUP : count - group * GROUP;
        for (u64 i = 0; i < size && !damage; ++i) {
            u64 high = 0;
            u64 word = bits.peek(at);
            while (!word && at < 8 * bytes) {
                // What is peeked has at least 57 bits.
                high += 56;
                at += 56;
                word = bits.peek(at);
            }
            if (!word || high > call.elements) {
                damage = !word ? WRONG_LENGTH : WRONG_INDEX;
                found = !word ? bytes + 1 : high;
                break;
            }
            at += zeros_of(word) + 1 + width;
        }
        if (damage)
            break;
    }
    if (!damage && (at + 7) / 8 != bytes) {
        damage = WRONG_LENGTH;
        found = 4 + (at + 7) / 8 + values;
    }
    if (!damage && bits.peek(at)) {
        damage = WRONG_PADDING;
        found = bits.peek(at);
    }
    if (me == 0) {
        state.count = damage ? 0 : count;
        state.bits = at;
        say_damage(state, damage, found);
    }
}

// A thread has a group: places relative to the first that the group could name, and how far it goes.
KERNEL(topk_unpack, Unpack, THREADS) {
    State &state = *call.state;
    const u64 group = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (group * GROUP >= state.count)
        return;
    const u64 size = state.count - group * GROUP < GROUP ? state.count - group * GROUP : GROUP;
    const Bits bits = {reinterpret_cast<const u8 *>(call.encoding) + 4, (state.bits + 7) / 8};
    u64 at = call.starts[group], next = 0;
    const u32 width = static_cast<u32>(bits.peek(at)) & 31;
    at += WIDTH_BITS;
    for (u64 i = 0; i < size; ++i) {
        u64 high = 0, word = bits.peek(at);
        while (!word && at < state.bits) {
            high += 56;
            at += 56;
            word = bits.peek(at);
        }
        const u32 zeros = word ? zeros_of(word) : 0;
        high += zeros;
        at += zeros + 1;
        const u64 low = bits.peek(at) & ((u64(1) << width) - 1);
        at += width;
        next += high << width | low;
        // Too far, and still no overflow: the sums say so.
        next = next < call.elements ? next : call.elements;
        call.indices[group * GROUP + i] = static_cast<u32>(next);
        ++next;
    }
    call.sums[group] = static_cast<u32>(next < 0xffffffff ? next : 0xffffffff);
}

// The first place that each group could name: one block of threads.
KERNEL(topk_bases, Bases, THREADS) {
    State &state = *call.state;
    const u64 groups = (state.count + GROUP - 1) / GROUP, own = (groups + THREADS - 1) / THREADS;
    const u64 first = threadIdx.x * own, end = first + own < groups ? first + own : groups;
    const u32 *__restrict__ each = call.sums;
    u32 *__restrict__ bases = call.bases;
    u64 sum = 0;
#pragma unroll 8
    for (u64 i = first; i < end; ++i)
        sum += each[i];
    const Sums<u64> sums = sums_of(sum);
    u64 base = sums.before;
#pragma unroll 8
    for (u64 i = first; i < end; ++i) {
        bases[i] = static_cast<u32>(base < 0xffffffff ? base : 0xffffffff);
        base += each[i];
    }
    // Indices ascend: if the last one is in its place, all are.
    if (threadIdx.x == 0 && sums.all > call.elements) {
        state.count = 0;
        say_damage(state, WRONG_INDEX, sums.all - 1);
    }
}

// Brings the values to where words can be read, and where a codec of values finds them.
KERNEL(topk_values, Values, THREADS) {
    const u64 bytes = call.value_bytes.of(call.state->count);
    const char *from = call.encoding + (call.length - bytes);
    for (u64 i = blockIdx.x * u64(THREADS) + threadIdx.x; i < bytes; i += gridDim.x * u64(THREADS))
        call.into[i] = from[i];
}

KERNEL(topk_scatter, Scatter, THREADS) {
    const u64 count = call.fault && *call.fault != ~u64(0) ? 0 : call.state->count;
    for (u64 i = blockIdx.x * u64(THREADS) + threadIdx.x; i < count; i += gridDim.x * u64(THREADS)) {
        const u64 element = u64(call.bases[i / GROUP]) + call.indices[i];
        put_f32(call.into, element, __fadd_rn(f32_at(call.into, element), call.values[i]));
    }
}
