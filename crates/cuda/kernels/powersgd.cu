// powersgd: the products of a large matrix with thin ones, and thin matrices with orthonormal columns.
//
// The large matrix lies row by row, the thin ones column by column. All sums have the host's order
// (crates/codec/src/powersgd), which follows from the form of the matrices alone:
//
// * A sum along a row runs by tiles of 1024 columns, in 64 lanes which are folded by halves. A warp has a row,
//   and each of its threads two lanes, 32 apart.
// * A sum down a column runs by bands of four rows, one after the other. All threads of a block multiply and sum
//   within bands, many at once, and leave that in shared memory; from there some add band to band.
// * The products of thin columns run in 16 lanes, in f64, one row after the other: 16 threads sum what the others
//   have multiplied. However fast memory is, this takes as long as that many additions in f64, each of which
//   waits for the one before.

#include "codec.cuh"

constexpr u32 COLUMNS = 1024, LANES = 64, DEPTH = 4, BAND = 4;

struct Form {
    u64 rows;
    u64 columns;
    u64 rank;
};

// left = matrix * right
struct Times {
    Form form;
    const float *matrix;
    const float *right;
    float *left;
};

// right = matrix^T * left
struct TransposedTimes {
    Form form;
    const float *matrix;
    const float *left;
    float *right;
};

// The product left * right^T: written, added, or taken from what is there.
struct Expand {
    Form form;
    const float *left;
    const float *right;
    float *matrix;
    u64 how;
};

// How; else it is taken from what is there.
constexpr u64 WRITES = 0, ADDS = 1;

// Columns that become orthonormal; one of which no more than `noise` remains becomes zero.
struct Settle {
    float *matrix;
    u64 rows;
    u64 columns;
    double noise;
};

// Columns that get the length 1, or start over from random numbers.
struct Normalize {
    const float *from;
    float *into;
    u64 rows;
    u64 key;
};

__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }

// The sum of values by halves.
template <int N> __device__ float fold(const float (&values)[N]) {
    if constexpr (N == 1) {
        return values[0];
    } else {
        float half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i)
            half[i] = plus(values[i], values[i + N / 2]);
        return fold(half);
    }
}

KERNEL(powersgd_times, Times, THREADS) {
    constexpr u32 BLOCK = DEPTH * LANES, BLOCKS = COLUMNS / BLOCK;
    const u64 row = (blockIdx.x * u64(THREADS) + threadIdx.x) / WARP;
    const u32 lane = threadIdx.x % WARP;
    const Form &form = call.form;
    if (row >= form.rows)
        return;
    for (u64 tile = 0; tile < form.columns; tile += COLUMNS) {
        const u32 width = static_cast<u32>(form.columns - tile < COLUMNS ? form.columns - tile : COLUMNS);
        const float *line = call.matrix + row * form.columns + tile;
        // Whole blocks, and the chunks of 64 that follow them.
        float values[BLOCKS][DEPTH][2];
#pragma unroll
        for (u32 block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d)
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 place = block * BLOCK + d * LANES + i * WARP + lane;
                    values[block][d][i] = place < width ? line[place] : 0.0f;
                }
        for (u64 k = 0; k < form.rank; ++k) {
            const float *column = call.right + k * form.columns + tile;
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 block = 0; block < BLOCKS; ++block) {
                const bool whole = (block + 1) * BLOCK <= width;
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    float products[DEPTH];
#pragma unroll
                    for (u32 d = 0; d < DEPTH; ++d) {
                        const u32 place = block * BLOCK + d * LANES + i * WARP + lane;
                        products[d] = place < width ? times(values[block][d][i], column[place]) : 0.0f;
                    }
                    if (whole) {
                        sums[i] = plus(sums[i], fold(products));
                    } else {
#pragma unroll
                        for (u32 d = 0; d < DEPTH; ++d)
                            if (block * BLOCK + d * LANES + i * WARP + lane < width)
                                sums[i] = plus(sums[i], products[d]);
                    }
                }
            }
            float sum = plus(sums[0], sums[1]);
#pragma unroll
            for (u32 lanes = WARP / 2; lanes > 0; lanes /= 2)
                sum = plus(sum, __uint_as_float(from_above(__float_as_uint(sum), lanes)));
            if (lane == 0) {
                float *into = call.left + k * form.rows + row;
                *into = plus(tile == 0 ? 0.0f : *into, sum);
            }
        }
    }
}

// Columns of the thin matrix that a block sums for, of as many columns of the large one as a warp has lanes; and
// bands at a time: more would be more shared memory, fewer more waiting.
constexpr u32 RANKS = 4, BANDS = 32;

KERNEL(powersgd_transposed_times, TransposedTimes, THREADS) {
    constexpr u32 WARPS = THREADS / WARP, EACH = BANDS / WARPS, ROWS = BANDS * BAND, LEFTS = RANKS * ROWS / THREADS;
    static_assert(RANKS <= WARPS, "a warp for each column");
    // Each turn uses the other one, while the last one is still added up.
    SHARED float folded[2][BANDS][RANKS][WARP];
    SHARED float left[RANKS][ROWS];
    const Form &form = call.form;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 across = (form.columns + WARP - 1) / WARP, first = blockIdx.x / across * RANKS;
    const u64 column = blockIdx.x % across * WARP + lane, bands = form.rows / BAND;
    float values[EACH][BAND], lefts[LEFTS];
    // What the next turn needs is asked for before this one's is looked at.
    const auto ask = [&](u64 top) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
#pragma unroll
            for (u32 h = 0; h < BAND; ++h) {
                const u64 band = top + i * WARPS + warp;
                const bool there = band < bands && column < form.columns;
                values[i][h] = there ? call.matrix[(band * BAND + h) * form.columns + column] : 0.0f;
            }
#pragma unroll
        for (u32 i = 0; i < LEFTS; ++i) {
            const u32 place = i * THREADS + threadIdx.x;
            const u64 k = first + place / ROWS, row = top * BAND + place % ROWS;
            lefts[i] = k < form.rank && row < form.rows ? call.left[k * form.rows + row] : 0.0f;
        }
    };
    float sum = 0.0f;
    ask(0);
    u32 turn = 0;
    for (u64 top = 0; top < bands; top += BANDS, turn = 1 - turn) {
#pragma unroll
        for (u32 i = 0; i < LEFTS; ++i) {
            const u32 place = i * THREADS + threadIdx.x;
            left[place / ROWS][place % ROWS] = lefts[i];
        }
        wait_for_block();
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
#pragma unroll
            for (u32 k = 0; k < RANKS; ++k) {
                const u32 band = i * WARPS + warp;
                float products[BAND];
#pragma unroll
                for (u32 h = 0; h < BAND; ++h)
                    products[h] = times(values[i][h], left[k][band * BAND + h]);
                folded[turn][band][k][lane] = fold(products);
            }
        ask(top + BANDS);
        wait_for_block();
        if (warp < RANKS) {
            const u32 count = static_cast<u32>(bands - top < BANDS ? bands - top : BANDS);
            if (count == BANDS) {
#pragma unroll
                for (u32 band = 0; band < BANDS; ++band)
                    sum = plus(sum, folded[turn][band][warp][lane]);
            } else {
                for (u32 band = 0; band < count; ++band)
                    sum = plus(sum, folded[turn][band][warp][lane]);
            }
        }
    }
    const u64 k = first + warp;
    if (warp >= RANKS || k >= form.rank || column >= form.columns)
        return;
    for (u64 row = bands * BAND; row < form.rows; ++row)
        sum = plus(sum, times(call.matrix[row * form.columns + column], call.left[k * form.rows + row]));
    call.right[k * form.columns + column] = sum;
}

// Adds the products of G columns from the k-th to the sums of some rows; the first are not added to anything.
constexpr u32 EXPANDED = 4;

template <int G>
__device__ void add_outer(float (&sums)[EXPANDED], const Expand &call, u64 top, u64 column, u64 k) {
    const Form &form = call.form;
    float right[G];
#pragma unroll
    for (int g = 0; g < G; ++g)
        right[g] = call.right[(k + g) * form.columns + column];
#pragma unroll
    for (u32 h = 0; h < EXPANDED; ++h) {
        if (top + h >= form.rows)
            break;
        float products[G];
#pragma unroll
        for (int g = 0; g < G; ++g)
            products[g] = times(call.left[(k + g) * form.rows + top + h], right[g]);
        sums[h] = k == 0 ? fold(products) : plus(sums[h], fold(products));
    }
}

// A thread has a column of a few rows.
KERNEL(powersgd_expand, Expand, THREADS) {
    const Form &form = call.form;
    const u64 across = (form.columns + THREADS - 1) / THREADS;
    const u64 column = blockIdx.x % across * THREADS + threadIdx.x, top = blockIdx.x / across * EXPANDED;
    if (column >= form.columns)
        return;
    float sums[EXPANDED] = {};
    u64 k = 0;
    while (k < form.rank) {
        const u64 left = form.rank - k;
        if (left >= 8) {
            add_outer<8>(sums, call, top, column, k);
            k += 8;
        } else if (left >= 4) {
            add_outer<4>(sums, call, top, column, k);
            k += 4;
        } else if (left >= 2) {
            add_outer<2>(sums, call, top, column, k);
            k += 2;
        } else {
            add_outer<1>(sums, call, top, column, k);
            k += 1;
        }
    }
#pragma unroll
    for (u32 h = 0; h < EXPANDED; ++h)
        if (top + h < form.rows) {
            float *into = call.matrix + (top + h) * form.columns + column;
            *into = call.how == WRITES ? sums[h] : call.how == ADDS ? plus(*into, sums[h]) : __fsub_rn(*into, sums[h]);
        }
}

// The product of two columns, for all threads of a block. The first warp sums what the others have multiplied, and
// these multiply on meanwhile.
__device__ inline double dot(const float *a, const float *b, u64 rows) {
    constexpr u32 PARTS = 16, STAGED = 2048, OTHERS = THREADS - WARP;
    SHARED double products[2][STAGED];
    SHARED double parts[PARTS];
    const auto multiply = [&](u64 first, u32 turn, u32 from, u32 step) {
#pragma unroll 10
        for (u32 i = from; i < STAGED; i += step)
            if (first + i < rows)
                products[turn][i] = __dmul_rn(double(a[first + i]), double(b[first + i]));
    };
    multiply(0, 0, threadIdx.x, THREADS);
    wait_for_block();
    double sum = 0.0;
    u32 turn = 0;
    for (u64 first = 0; first < rows; first += STAGED, turn = 1 - turn) {
        if (threadIdx.x >= WARP) {
            multiply(first + STAGED, 1 - turn, threadIdx.x - WARP, OTHERS);
        } else if (threadIdx.x < PARTS) {
            const double *staged = products[turn] + threadIdx.x;
            if (rows - first >= STAGED) {
#pragma unroll 32
                for (u32 i = 0; i < STAGED; i += PARTS)
                    sum = __dadd_rn(sum, staged[i]);
            } else {
                for (u32 i = 0; threadIdx.x + i < rows - first; i += PARTS)
                    sum = __dadd_rn(sum, staged[i]);
            }
        }
        wait_for_block();
    }
    if (threadIdx.x < PARTS)
        parts[threadIdx.x] = sum;
    wait_for_block();
    sum = 0.0;
    for (u32 i = 0; i < PARTS; ++i)
        sum = __dadd_rn(sum, parts[i]);
    wait_for_block();
    return sum;
}

// Changes every element of a column, which may depend on the one of another. A thread asks for several before it
// waits for the first: one block alone has to keep memory busy.
template <class Change> __device__ void change(float *column, const float *other, u64 rows, Change to) {
    constexpr u32 BATCH = 8;
    for (u64 first = threadIdx.x; first < rows; first += THREADS * BATCH) {
        float own[BATCH], others[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            const u64 row = first + i * THREADS;
            own[i] = row < rows ? column[row] : 0.0f;
            others[i] = row < rows ? other[row] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (first + i * THREADS < rows)
                column[first + i * THREADS] = __double2float_rn(to(double(own[i]), double(others[i])));
    }
    wait_for_block();
}

__device__ inline void divide(float *column, u64 rows, double by) {
    change(column, column, rows, [&](double own, double) { return __ddiv_rn(own, by); });
}

// The modified Gram-Schmidt process, in one block of threads.
KERNEL(powersgd_settle, Settle, THREADS) {
    for (u64 own = 0; own < call.columns; ++own) {
        float *column = call.matrix + own * call.rows;
        const double whole = __dsqrt_rn(dot(column, column, call.rows));
        if (whole == 0.0)
            continue;
        divide(column, call.rows, whole);
        for (int pass = 0; pass < 2; ++pass)
            for (u64 other = 0; other < own; ++other) {
                const float *earlier = call.matrix + other * call.rows;
                const double share = dot(earlier, column, call.rows);
                change(column, earlier, call.rows, [&](double own, double theirs) {
                    return __dsub_rn(own, __dmul_rn(share, theirs));
                });
            }
        const double remainder = __dsqrt_rn(dot(column, column, call.rows));
        if (remainder <= call.noise) {
            for (u64 i = threadIdx.x; i < call.rows; i += THREADS)
                column[i] = 0.0f;
            wait_for_block();
        } else {
            divide(column, call.rows, remainder);
        }
    }
}

// A block of threads for each column.
KERNEL(powersgd_normalize, Normalize, THREADS) {
    const float *from = call.from + blockIdx.x * call.rows;
    float *into = call.into + blockIdx.x * call.rows;
    const double length = __dsqrt_rn(dot(from, from, call.rows));
    const u64 infinity = 0x7ff0000000000000;
    const bool can = length > 0.0 && static_cast<u64>(__double_as_longlong(length)) < infinity;
    // Four numbers of 16 bits, twice their sum less its mean; and odd, so that none is zero.
    const u64 key = mix(call.key ^ mix(blockIdx.x + 0x9e3779b97f4a7c15));
    for (u64 i = threadIdx.x; i < call.rows; i += THREADS) {
        if (can) {
            into[i] = from[i];
        } else {
            const u64 bits = random_at(key, i);
            const u32 sum = static_cast<u32>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
            into[i] = __fsub_rn(times(2.0f, __uint2float_rn(sum)), 262141.0f);
        }
    }
    wait_for_block();
    const double own = can ? length : __dsqrt_rn(dot(into, into, call.rows));
    if (own > 0.0)
        divide(into, call.rows, own);
}
