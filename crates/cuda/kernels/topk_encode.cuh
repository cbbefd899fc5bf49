// Which elements are taken, and how their indices are packed.

#ifndef UNISONO_TOPK_ENCODE
#define UNISONO_TOPK_ENCODE

#include "topk.cuh"

// Tiles that are put in order by one block.
constexpr u32 SPAN = 16;

// What the plan says, and what is read.
struct Plan {
    State *state;
    u64 elements;
    // How many are wanted, and how many of a sample's cut are few enough and many enough; 0 without a sample.
    u64 wanted;
    u64 fewest, most;
    // Elements at the sample's cut or above, in the order of tiles within these, but of tiles in any; how many
    // there is room for; and of each tile, its first and how many it has.
    u32 *indices;
    char *values;
    u64 room;
    u32 *tiles;
    // How many each span of tiles has.
    u32 *spans;
};

// What is sent: all that is staged; of that, as many as wanted; or of all elements.
enum class Among { Staged, Candidates, Elements };

__device__ inline Among among(const Plan &plan) {
    const u64 staged = plan.state->staged;
    if (plan.most && staged <= plan.most && (staged >= plan.fewest || !plan.state->magnitude))
        return Among::Staged;
    return plan.most && staged >= plan.wanted && staged <= plan.room ? Among::Candidates : Among::Elements;
}

struct Begin {
    Plan plan;
    Owed owed;
    Strata strata;
    u32 *sample;
    // How many of the sample are above its cut.
    u64 rank;
    // Words that have to be zero.
    u32 *packed;
    u64 packed_words;
    u32 *sums;
    u64 sums_words;
};

struct Mark {
    Plan plan;
    Owed owed;
};

struct Count {
    Plan plan;
    Owed owed;
    u32 shift, width;
};

struct Tally {
    Plan plan;
    Owed owed;
    // Elements above the exact cut, and ties: of each tile, the latter in the upper half, and of each span.
    u32 *tiles;
    u32 *spans;
};

struct Order {
    Tally tally;
    u32 *indices;
    u32 *values;
    // Whether what is sent leaves nothing.
    u64 takes;
};

struct Widths {
    const State *state;
    const u32 *indices;
    u16 *directory;
    // Bits of the groups of each block.
    u32 *blocks;
};

struct Pack {
    State *state;
    const u32 *indices;
    const u16 *directory;
    const u32 *blocks;
    u32 *packed;
    ValueBytes value_bytes;
};

struct Finish {
    const State *state;
    const u16 *directory;
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

// A histogram that all blocks have added to, as it was; and then there are zeros again.
__device__ inline void take_histogram(u32 *histogram, State &state, u32 digits) {
    for (u32 i = threadIdx.x; i < digits; i += THREADS) {
        histogram[i] = fresh(&state.histogram[i]);
        state.histogram[i] = 0;
    }
    wait_for_block();
}

__device__ inline void add_histogram(State &state, const u32 *histogram, u32 digits) {
    wait_for_block();
    for (u32 i = threadIdx.x; i < digits; i += THREADS)
        if (histogram[i])
            atomic_add(&state.histogram[i], histogram[i]);
}

// Gathers a sample, and counts its highest digits. The block that is done last finds the sample's cut: it goes
// over the sample once more, and keeps those of the digit that was found.
KERNEL(topk_begin, Begin, THREADS) {
    // Elements that a thread asks for before it looks at the first: one block alone has to keep memory busy.
    constexpr u32 BATCH = 16, KEPT = 4096;
    SHARED u32 histogram[DIGITS];
    SHARED u32 kept[KEPT];
    SHARED u32 count;
    State &state = *call.plan.state;
    const u64 number = blockIdx.x * u64(THREADS) + threadIdx.x, all = gridDim.x * u64(THREADS);
    for (u64 i = number; i < call.packed_words; i += all)
        call.packed[i] = 0;
    for (u64 i = number; i < call.sums_words; i += all)
        call.sums[i] = 0;
    for (u32 i = threadIdx.x; i < DIGITS; i += THREADS)
        histogram[i] = 0;
    wait_for_block();
    const u64 size = call.strata.count;
    if (number < size) {
        const u32 own = magnitude(owed_at(call.owed, call.strata.at(number)));
        call.sample[number] = own;
        atomic_add(&histogram[own >> 20], 1);
    }
    if (size)
        add_histogram(state, histogram, DIGITS);
    if (!is_last(state, gridDim.x))
        return;
    u32 cut = 0;
    if (size) {
        take_histogram(histogram, state, DIGITS);
        Digit found = find_digit(histogram, DIGITS, static_cast<u32>(call.rank));
        cut = found.digit;
        for (u32 round = 1; round < 3; ++round) {
            const u32 shift = 20 - 10 * round;
            const bool again = round == 2 && count <= KEPT;
            const u32 left = again ? count : 0;
            wait_for_block();
            for (u32 i = threadIdx.x; i < 1024; i += THREADS)
                histogram[i] = 0;
            if (threadIdx.x == 0 && round == 1)
                count = 0;
            wait_for_block();
            if (again) {
                for (u32 i = threadIdx.x; i < left; i += THREADS)
                    if (kept[i] >> shift >> 10 == cut)
                        atomic_add(&histogram[kept[i] >> shift & 1023], 1);
            } else {
                for (u64 first = threadIdx.x; first < size; first += THREADS * BATCH) {
                    u32 sizes[BATCH];
#pragma unroll
                    for (u32 i = 0; i < BATCH; ++i)
                        sizes[i] = first + i * THREADS < size ? fresh(call.sample + first + i * THREADS) : ~0u;
#pragma unroll
                    for (u32 i = 0; i < BATCH; ++i)
                        // What is not there has a bit that no magnitude has.
                        if (sizes[i] >> shift >> 10 == cut) {
                            atomic_add(&histogram[sizes[i] >> shift & 1023], 1);
                            const u32 place = round == 1 ? atomic_add(&count, 1) : KEPT;
                            if (place < KEPT)
                                kept[place] = sizes[i];
                        }
                }
            }
            wait_for_block();
            found = find_digit(histogram, 1024, found.rank);
            cut = cut << 10 | found.digit;
        }
    }
    if (threadIdx.x == 0) {
        state.digits = 0;
        state.rank = 0;
        state.magnitude = cut;
        state.staged = 0;
        state.ties = 0;
        state.count = 0;
    }
}

// A digit of the exact cut. The last block that has counted finds it.
KERNEL(topk_count, Count, THREADS) {
    const Among which = among(call.plan);
    if (which == Among::Staged)
        return;
    State &state = *call.plan.state;
    SHARED u32 histogram[DIGITS];
    const u32 digits = 1u << call.width, mask = digits - 1, higher = state.digits;
    for (u32 i = threadIdx.x; i < digits; i += THREADS)
        histogram[i] = 0;
    wait_for_block();
    const bool all = which == Among::Elements;
    const Owed owed = all ? call.owed : Owed{call.plan.values, nullptr, 1, 0};
    const u64 elements = all ? call.plan.elements : state.staged, fours = elements / 4;
    for (u64 i = blockIdx.x * u64(THREADS) + threadIdx.x; i < fours; i += gridDim.x * u64(THREADS)) {
        float values[1][4];
        if (owed.residual)
            read_owed<true>(values, owed, i * 4, 0);
        else
            read_owed<false>(values, owed, i * 4, 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 size = magnitude(values[0][j]);
            if (size >> call.shift >> call.width == higher)
                atomic_add(&histogram[size >> call.shift & mask], 1);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < elements % 4) {
        const u32 size = magnitude(owed_at(owed, fours * 4 + threadIdx.x));
        if (size >> call.shift >> call.width == higher)
            atomic_add(&histogram[size >> call.shift & mask], 1);
    }
    add_histogram(state, histogram, digits);
    if (!is_last(state, gridDim.x))
        return;
    take_histogram(histogram, state, digits);
    // The first digit is the highest.
    const u32 rank = call.width == 11 ? static_cast<u32>(call.plan.wanted) : state.rank;
    const Digit found = find_digit(histogram, digits, rank);
    if (threadIdx.x == 0) {
        state.digits = higher << call.width | found.digit;
        state.rank = found.rank;
        if (call.shift == 0)
            state.ties = state.digits ? found.rank : 0;
    }
}

// Four times four elements of a tile, which are zero beyond the last; where both gradient and residual are there,
// their sum is the new residual.
template <bool FEEDBACK>
__device__ void read_tile(float (&values)[4][4], const Owed &owed, u64 elements, u64 tile) {
    const u64 first = tile * TILE + threadIdx.x * 4;
    const bool whole = (tile + 1) * TILE <= elements, writes = FEEDBACK && owed.gradient;
    if (whole) {
        read_owed<FEEDBACK>(values, owed, first, TILE / 4);
        if (writes)
            write_fours(values, owed.residual, first, TILE / 4, owed.aligned);
        return;
    }
#pragma unroll
    for (u32 part = 0; part < 4; ++part)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u64 element = first + part * (TILE / 4) + i;
            values[part][i] = element < elements ? owed_at(owed, element) : 0.0f;
            if (writes && element < elements)
                put_f32(owed.residual, element, values[part][i]);
        }
}

// A block has a tile. What is at the sample's cut or above it stages, wherever there is room.
template <bool FEEDBACK> __device__ void mark(const Mark &call) {
    SHARED u32 base;
    const Plan &plan = call.plan;
    const u32 least = plan.state->magnitude ? plan.state->magnitude : 1;
    const u64 tile = blockIdx.x;
    float values[4][4];
    read_tile<FEEDBACK>(values, call.owed, plan.elements, tile);
    // How many there are in each of the four parts, in 16 bits each.
    u64 counts = 0;
#pragma unroll
    for (u32 part = 0; part < 4; ++part) {
        u32 count = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            count += magnitude(values[part][i]) >= least ? 1 : 0;
        counts |= u64(count) << (16 * part);
    }
    const Sums<u64> sums = sums_of(counts);
    if (threadIdx.x == 0) {
        u32 all = 0;
        for (u32 part = 0; part < 4; ++part)
            all += static_cast<u32>(sums.all >> (16 * part)) & 0xffff;
        base = all ? atomic_add(&plan.state->staged, all) : 0;
        plan.tiles[2 * tile] = base;
        plan.tiles[2 * tile + 1] = all;
        if (all)
            atomic_add(&plan.spans[tile / SPAN], all);
    }
    wait_for_block();
    u64 start = base;
#pragma unroll
    for (u32 part = 0; part < 4; ++part) {
        u64 place = start + (sums.before >> (16 * part) & 0xffff);
        start += sums.all >> (16 * part) & 0xffff;
        if (counts >> (16 * part) & 0xffff) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (magnitude(values[part][i]) >= least) {
                    if (place < plan.room) {
                        plan.indices[place] = static_cast<u32>(tile * TILE + part * (TILE / 4) + threadIdx.x * 4 + i);
                        put_f32(plan.values, place, values[part][i]);
                    }
                    ++place;
                }
        }
    }
}

// Registers for so many blocks at a time: while some wait for their places, others read.
KERNEL_OF(topk_mark, Mark, THREADS, 5) { mark<false>(call); }
KERNEL_OF(topk_mark_owed, Mark, THREADS, 4) { mark<true>(call); }

// Counts by tiles what is above the exact cut, and ties.
KERNEL(topk_tally, Tally, THREADS) {
    const Plan &plan = call.plan;
    const Among which = among(plan);
    if (which == Among::Staged)
        return;
    const u32 cut = plan.state->digits;
    const u64 tiles = (plan.elements + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u32 counts = 0;
        const auto count = [&](float value) {
            const u32 size = magnitude(value);
            counts += size > cut ? 1 : size == cut && cut ? 0x10000 : 0;
        };
        if (which == Among::Elements) {
            float values[4][4];
            if (call.owed.residual)
                read_tile<true>(values, call.owed, plan.elements, tile);
            else
                read_tile<false>(values, call.owed, plan.elements, tile);
#pragma unroll
            for (u32 part = 0; part < 4; ++part)
#pragma unroll
                for (u32 i = 0; i < 4; ++i)
                    count(values[part][i]);
        } else {
            const u64 base = plan.tiles[2 * tile];
            for (u32 i = threadIdx.x; i < plan.tiles[2 * tile + 1]; i += THREADS)
                count(f32_at(plan.values, base + i));
        }
        const u32 all = sums_of(counts).all;
        if (threadIdx.x == 0) {
            call.tiles[tile] = all;
            atomic_add(&call.spans[2 * (tile / SPAN)], all & 0xffff);
            atomic_add(&call.spans[2 * (tile / SPAN) + 1], all >> 16);
        }
    }
}

// An element that is taken.
__device__ inline void take(const Order &call, u64 place, u32 element, float value) {
    call.indices[place] = element;
    call.values[place] = __float_as_uint(value);
    char *residual = call.tally.owed.residual;
    if (call.takes && residual)
        put_f32(residual, element, 0.0f);
}

// What is staged, in order, by spans.
__device__ inline void order_staged(const Order &call) {
    SHARED u32 bases[SPAN], before[SPAN];
    const Plan &plan = call.tally.plan;
    const u64 tiles = (plan.elements + TILE - 1) / TILE, first = blockIdx.x * u64(SPAN), own = first + threadIdx.x;
    u32 sum = 0;
    for (u64 i = threadIdx.x; i < blockIdx.x; i += THREADS)
        sum += plan.spans[i];
    const u32 start = sums_of(sum).all;
    const bool there = threadIdx.x < SPAN && own < tiles;
    const Sums<u32> sums = sums_of(there ? plan.tiles[2 * own + 1] : 0);
    if (threadIdx.x < SPAN) {
        bases[threadIdx.x] = there ? plan.tiles[2 * own] : 0;
        before[threadIdx.x] = sums.before;
    }
    wait_for_block();
#pragma unroll 4
    for (u32 i = threadIdx.x; i < sums.all; i += THREADS) {
        u32 tile = 0;
#pragma unroll
        for (u32 step = SPAN / 2; step > 0; step /= 2)
            tile += before[tile + step] <= i ? step : 0;
        const u64 from = u64(bases[tile]) + i - before[tile];
        take(call, u64(start) + i, plan.indices[from], f32_at(plan.values, from));
    }
    if (threadIdx.x == 0 && first + SPAN >= tiles)
        plan.state->count = u64(start) + sums.all;
}

// What the exact cut takes, in order, by spans: of ties the first ones.
__device__ inline void order_exact(const Order &call, Among which) {
    const Plan &plan = call.tally.plan;
    State &state = *plan.state;
    const u32 cut = state.digits;
    const u64 ties = state.ties, tiles = (plan.elements + TILE - 1) / TILE;
    const char *from = call.tally.owed.residual ? call.tally.owed.residual : call.tally.owed.gradient;
    u32 sum = 0, tied_sum = 0;
    for (u64 i = threadIdx.x; i < blockIdx.x; i += THREADS) {
        sum += call.tally.spans[2 * i];
        tied_sum += call.tally.spans[2 * i + 1];
    }
    // Of those before: above the cut, and ties.
    u64 above = sums_of(sum).all, tied = sums_of(tied_sum).all;
    for (u64 tile = blockIdx.x * u64(SPAN); tile < (blockIdx.x + 1) * u64(SPAN) && tile < tiles; ++tile) {
        const bool all = which == Among::Elements;
        const u64 first = all ? tile * TILE : plan.tiles[2 * tile], left = plan.elements - tile * TILE;
        const u32 size = all ? static_cast<u32>(left < TILE ? left : TILE) : plan.tiles[2 * tile + 1];
        const char *values = all ? from : plan.values;
        // A thread has neighbours.
        const u32 each = (size + THREADS - 1) / THREADS, begin = threadIdx.x * each;
        const u32 end = begin + each < size ? begin + each : size;
        u32 counts = 0;
#pragma unroll 4
        for (u32 i = begin; i < end; ++i) {
            const u32 own = magnitude(f32_at(values, first + i));
            counts += own > cut ? 1 : own == cut && cut ? 0x10000 : 0;
        }
        const u32 before = sums_of(counts).before;
        u64 own_above = above + (before & 0xffff), own_tied = tied + (before >> 16);
        if (counts)
            for (u32 i = begin; i < end; ++i) {
                const float value = f32_at(values, first + i);
                const u32 own = magnitude(value);
                const bool tie = own == cut && cut;
                if (own > cut || (tie && own_tied < ties)) {
                    const u32 element = all ? static_cast<u32>(first + i) : plan.indices[first + i];
                    take(call, own_above + (own_tied < ties ? own_tied : ties), element, value);
                }
                own_above += own > cut ? 1 : 0;
                own_tied += tie ? 1 : 0;
            }
        above += call.tally.tiles[tile] & 0xffff;
        tied += call.tally.tiles[tile] >> 16;
    }
    if (threadIdx.x == 0 && (blockIdx.x + 1) * u64(SPAN) >= tiles)
        state.count = above + (tied < ties ? tied : ties);
}

KERNEL(topk_order, Order, THREADS) {
    const Among which = among(call.tally.plan);
    if (which == Among::Staged)
        order_staged(call);
    else
        order_exact(call, which);
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
    const u64 group = blockIdx.x * u64(warps) + threadIdx.x / WARP;
    u32 own = 0;
    if (group < groups) {
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
            own = static_cast<u32>(length);
            call.directory[group] = static_cast<u16>(width | (own - (width + 1) * size) << WIDTH_BITS);
        }
    }
    const u32 all = sums_of(own).all;
    if (threadIdx.x == 0)
        call.blocks[blockIdx.x] = all;
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

__device__ inline u32 width_of(u16 entry) { return entry & ((1 << WIDTH_BITS) - 1); }
__device__ inline u32 highs_of(u16 entry) { return entry >> WIDTH_BITS; }

KERNEL(topk_pack, Pack, THREADS) {
    State &state = *call.state;
    constexpr u32 WARPS = THREADS / WARP;
    const u64 count = state.count, groups = (count + GROUP - 1) / GROUP, blocks = (groups + WARPS - 1) / WARPS;
    const u32 lane = threadIdx.x % WARP;
    const u64 first_group = blockIdx.x * u64(WARPS), group = first_group + threadIdx.x / WARP;
    // Bits of the groups before this block, and the first block's of all.
    u64 bits = 0;
    for (u64 i = threadIdx.x; i < (blockIdx.x ? blockIdx.x : blocks); i += THREADS)
        bits += call.blocks[i];
    u64 start = sums_of(bits).all;
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            state.bits = start;
            state.length = 4 + groups * ENTRY_BYTES + (start + 7) / 8 + call.value_bytes.of(count);
        }
        start = 0;
    }
    // All groups before another one are whole.
    for (u64 i = first_group; i < group && i < groups; ++i)
        start += GROUP + u64(GROUP) * width_of(call.directory[i]) + highs_of(call.directory[i]);
    if (group < groups) {
        const u64 first = group * GROUP;
        const u32 size = static_cast<u32>(count - first < GROUP ? count - first : GROUP);
        const u32 width = width_of(call.directory[group]), highs = highs_of(call.directory[group]);
        u32 gaps[4], high = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 place = lane * 4 + i;
            gaps[i] = place < size ? gap_at(call.indices, first + place) : 0;
            high += gaps[i] >> width;
        }
        u32 before = high;
#pragma unroll
        for (u32 lanes = 1; lanes < WARP; lanes *= 2) {
            const u32 below = from_below(before, lanes);
            before += lane >= lanes ? below : 0;
        }
        before -= high;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 place = lane * 4 + i;
            before += gaps[i] >> width;
            if (place < size) {
                put_bits(call.packed, start + before + place, 1);
                put_bits(call.packed, start + size + highs + u64(place) * width, gaps[i] & ((u64(1) << width) - 1));
            }
        }
    }
}

KERNEL(topk_finish, Finish, THREADS) {
    const u64 count = call.state->count, groups = (count + GROUP - 1) / GROUP, packed = (call.state->bits + 7) / 8;
    const u64 first = blockIdx.x * u64(THREADS) + threadIdx.x, step = gridDim.x * u64(THREADS);
    if (first == 0)
        put_word(call.encoding, static_cast<u32>(count));
    char *into = call.encoding + 4;
    for (u64 i = first; i < groups; i += step) {
        into[2 * i] = static_cast<char>(call.directory[i]);
        into[2 * i + 1] = static_cast<char>(call.directory[i] >> 8);
    }
    into += groups * ENTRY_BYTES;
    for (u64 i = first; i < packed; i += step)
        into[i] = call.packed[i];
    into += packed;
    const u64 values = call.state->length - (into - call.encoding);
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
