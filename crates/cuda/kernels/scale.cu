// Gradients in units of their usual size: what their rows and columns measure, and the division and
// multiplication by it (crates/codec/src/scale.rs).
//
// A sum along a row runs in 16 lanes, which are added one after the other: 16 threads have a row. A sum down
// a column runs from the first row to the last: a thread has a column.

#include "codec.cuh"

constexpr u32 LANES = 16, ROWS = THREADS / LANES;

// The mean squares of a matrix's rows, or of its columns.
struct Measure {
    const float *matrix;
    float *into;
    u64 rows;
    u64 columns;
    // What each sum is divided by.
    float count;
    u32 unused;
};

// Elements of a matrix from the number `first` on, and the units of its rows and then of its columns.
struct Convert {
    float *values;
    const float *units;
    u64 rows;
    u64 columns;
    u64 first;
    u64 elements;
};

__device__ inline float square(float value) { return __fmul_rn(value, value); }

KERNEL(scale_measure_rows, Measure, THREADS) {
    SHARED float lanes[THREADS];
    const u64 row = blockIdx.x * u64(ROWS) + threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    float sum = 0.0f;
    if (row < call.rows) {
        const float *line = call.matrix + row * call.columns;
#pragma unroll 4
        for (u64 column = lane; column < call.columns; column += LANES)
            sum = __fadd_rn(sum, square(line[column]));
    }
    lanes[threadIdx.x] = sum;
    wait_for_block();
    if (lane != 0 || row >= call.rows)
        return;
    for (u32 other = 1; other < LANES; ++other)
        sum = __fadd_rn(sum, lanes[threadIdx.x + other]);
    call.into[row] = __fdiv_rn(sum, call.count);
}

KERNEL(scale_measure_columns, Measure, THREADS) {
    const u64 column = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (column >= call.columns)
        return;
    float sum = 0.0f;
#pragma unroll 8
    for (u64 row = 0; row < call.rows; ++row)
        sum = __fadd_rn(sum, square(call.matrix[row * call.columns + column]));
    call.into[column] = __fdiv_rn(sum, call.count);
}

// The unit of an element. Numbers of 32 bits divide several times as fast as those of 64.
__device__ inline float unit_of(const Convert &call, u64 element) {
    u64 row, column;
    if ((element | call.columns) >> 32) {
        row = element / call.columns;
        column = element % call.columns;
    } else {
        row = u32(element) / u32(call.columns);
        column = u32(element) % u32(call.columns);
    }
    return __fmul_rn(call.units[row], call.units[call.rows + column]);
}

KERNEL(scale_divide, Convert, THREADS) {
    const u64 i = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (i < call.elements)
        call.values[i] = __fdiv_rn(call.values[i], unit_of(call, call.first + i));
}

KERNEL(scale_multiply, Convert, THREADS) {
    const u64 i = blockIdx.x * u64(THREADS) + threadIdx.x;
    if (i < call.elements)
        call.values[i] = __fmul_rn(call.values[i], unit_of(call, call.first + i));
}
