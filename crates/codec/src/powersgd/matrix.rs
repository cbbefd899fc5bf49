//! The three products of a large matrix and thin ones, at the speed of memory.
//!
//! The large matrix lies row by row, the thin ones column by column. A product passes over the large
//! one once: by *bands* of a few rows, and over a band by *tiles* of columns, which stay in the
//! nearest cache while all columns of the thin matrix meet them.
//!
//! The order of all additions follows from the form of the matrices alone, never from the width of
//! registers. Sums along a row run in lanes, and sums down a column by bands; both are [folded](fold)
//! by halves. All inner loops go elementwise over arrays, with a few terms each, for that is what
//! compilers turn into vector instructions of any width.

use std::array;
use std::ops::Range;

use multiversion::multiversion;

/// Rows that meet a column of the thin matrix at once. Fewer would load the thin matrix more often;
/// more would be more streams from memory than processors foresee.
const BAND: usize = 4;

/// Columns of a tile. In a larger one, a band would leave the nearest cache; in a smaller one, lanes
/// would be folded more often.
const TILE: usize = 1024;

/// Partial sums of a row. Fewer would let additions wait for each other in wide registers; more take
/// longer to fold.
const LANES: usize = 64;

/// Products that a lane takes at once. Fewer would load and store it more often; more leave more of
/// short rows to the slower loop over their rest.
const DEPTH: usize = 4;

/// The sizes of a large matrix, and how many columns the thin ones have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub rows: usize,
    pub columns: usize,
    pub rank: usize,
}

impl Form {
    /// The rows by bands, of which the last may be smaller.
    fn bands(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.rows).step_by(BAND).map(move |top| top..self.rows.min(top + BAND))
    }

    /// The columns by tiles, of which the last may be smaller.
    fn tiles(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.columns).step_by(TILE).map(move |left| left..self.columns.min(left + TILE))
    }
}

/// `left = matrix · right`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn times(form: Form, matrix: &[f32], right: &[f32], left: &mut [f32]) {
    times_body(form, matrix, right, left);
}

/// `right = matrixᵀ · left`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn transposed_times(form: Form, matrix: &[f32], left: &[f32], right: &mut [f32]) {
    transposed_times_body(form, matrix, left, right);
}

/// `matrix = left · rightᵀ`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn expand(form: Form, left: &[f32], right: &[f32], matrix: &mut [f32]) {
    expand_body(form, left, right, matrix);
}

#[inline(always)]
fn times_body(form: Form, matrix: &[f32], right: &[f32], left: &mut [f32]) {
    left.fill(0.0);
    for band in form.bands() {
        if band.len() == BAND {
            times_rows::<BAND>(form, band.start, matrix, right, left);
        } else {
            for row in band {
                times_rows::<1>(form, row, matrix, right, left);
            }
        }
    }
}

#[inline(always)]
fn times_rows<const H: usize>(
    form: Form,
    top: usize,
    matrix: &[f32],
    right: &[f32],
    left: &mut [f32],
) {
    for tile in form.tiles() {
        let rows = lines::<H>(matrix, form.columns, top, &tile);
        for k in 0..form.rank {
            let [column] = lines(right, form.columns, k, &tile);
            let into = &mut left[k * form.rows + top..][..H];
            for (sum, part) in into.iter_mut().zip(dots(rows, column)) {
                *sum += part;
            }
        }
    }
}

/// The products of some rows with one column.
#[expect(clippy::needless_range_loop, reason = "a lane is a place in several arrays")]
#[inline(always)]
fn dots<const H: usize>(rows: [&[f32]; H], column: &[f32]) -> [f32; H] {
    const BLOCK: usize = DEPTH * LANES;
    let (column, column_rest) = column.as_chunks::<BLOCK>();
    let blocks = rows.map(|row| row.as_chunks::<BLOCK>().0);
    let mut sums = [[0.0; LANES]; H];
    for (b, column) in column.iter().enumerate() {
        let block: [&[f32; BLOCK]; H] = array::from_fn(|h| &blocks[h][b]);
        for lane in 0..LANES {
            for h in 0..H {
                sums[h][lane] += fold::<DEPTH>(array::from_fn(|d| {
                    let place = d * LANES + lane;
                    block[h][place] * column[place]
                }));
            }
        }
    }
    for (sums, row) in sums.iter_mut().zip(rows) {
        let row_rest = &row[column.len() * BLOCK..];
        for (row, column) in row_rest.chunks(LANES).zip(column_rest.chunks(LANES)) {
            for ((sum, a), b) in sums.iter_mut().zip(row).zip(column) {
                *sum += a * b;
            }
        }
    }
    sums.map(fold)
}

#[inline(always)]
fn transposed_times_body(form: Form, matrix: &[f32], left: &[f32], right: &mut [f32]) {
    right.fill(0.0);
    for band in form.bands() {
        if band.len() == BAND {
            transposed_times_rows::<BAND>(form, band.start, matrix, left, right);
        } else {
            for row in band {
                transposed_times_rows::<1>(form, row, matrix, left, right);
            }
        }
    }
}

#[inline(always)]
fn transposed_times_rows<const H: usize>(
    form: Form,
    top: usize,
    matrix: &[f32],
    left: &[f32],
    right: &mut [f32],
) {
    for tile in form.tiles() {
        let rows = lines::<H>(matrix, form.columns, top, &tile);
        for k in 0..form.rank {
            let factors: [f32; H] = array::from_fn(|h| left[k * form.rows + top + h]);
            let sums = &mut right[k * form.columns..][tile.clone()];
            for (j, sum) in sums.iter_mut().enumerate() {
                *sum += fold::<H>(array::from_fn(|h| rows[h][j] * factors[h]));
            }
        }
    }
}

/// Unlike the other products, this one must take several columns of the thin matrices at once, or it
/// would load and store the large matrix for each.
#[inline(always)]
fn expand_body(form: Form, left: &[f32], right: &[f32], matrix: &mut [f32]) {
    for band in form.bands() {
        for tile in form.tiles() {
            for row in band.clone() {
                let into = &mut matrix[row * form.columns..][tile.clone()];
                let mut k = 0;
                while k < form.rank {
                    k += match form.rank - k {
                        8.. => add_outer::<8>(form, row, k, &tile, left, right, into),
                        4.. => add_outer::<4>(form, row, k, &tile, left, right, into),
                        2.. => add_outer::<2>(form, row, k, &tile, left, right, into),
                        _ => add_outer::<1>(form, row, k, &tile, left, right, into),
                    };
                }
            }
        }
    }
}

/// Adds the products of `G` columns from the `k`-th; the first are not added to what was there.
#[inline(always)]
fn add_outer<const G: usize>(
    form: Form,
    row: usize,
    k: usize,
    tile: &Range<usize>,
    left: &[f32],
    right: &[f32],
    into: &mut [f32],
) -> usize {
    let columns = lines::<G>(right, form.columns, k, tile);
    let factors: [f32; G] = array::from_fn(|g| left[(k + g) * form.rows + row]);
    let sum = |j: usize| fold::<G>(array::from_fn(|g| factors[g] * columns[g][j]));
    if k == 0 {
        into.iter_mut().enumerate().for_each(|(j, value)| *value = sum(j));
    } else {
        into.iter_mut().enumerate().for_each(|(j, value)| *value += sum(j));
    }
    G
}

/// A tile of `N` rows of the large matrix, or of as many columns of a thin one.
#[inline(always)]
fn lines<'a, const N: usize>(
    matrix: &'a [f32],
    stride: usize,
    first: usize,
    tile: &Range<usize>,
) -> [&'a [f32]; N] {
    array::from_fn(|n| &matrix[(first + n) * stride..][tile.clone()])
}

/// The sum of as many values as a power of two: the second half is added to the first, until one
/// value is left.
#[inline(always)]
fn fold<const N: usize>(mut values: [f32; N]) -> f32 {
    const { assert!(N.is_power_of_two()) };
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            values[i] += values[i + half];
        }
        half /= 2;
    }
    values[0]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::powersgd::tests::noise;

    /// The three products, one after the other.
    #[inline(always)]
    fn products(form: Form, matrix: &[f32], right: &[f32]) -> [Vec<f32>; 3] {
        let mut left = vec![f32::NAN; form.rows * form.rank];
        times_body(form, matrix, right, &mut left);
        let mut new_right = vec![f32::NAN; form.columns * form.rank];
        transposed_times_body(form, matrix, &left, &mut new_right);
        let mut expanded = vec![f32::NAN; form.rows * form.columns];
        expand_body(form, &left, &new_right, &mut expanded);
        [left, new_right, expanded]
    }

    /// Checks `found[i, j] = Σ a(i, l) · b(l, j)`, the sum over `l < depth`, up to rounding.
    fn check(
        found: impl Fn(usize, usize) -> f32,
        (rows, depth, columns): (usize, usize, usize),
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
    ) {
        for i in 0..rows {
            for j in 0..columns {
                let terms = (0..depth).map(|l| f64::from(a(i, l)) * f64::from(b(l, j)));
                let (sum, size) =
                    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let error = (f64::from(found(i, j)) - sum).abs();
                assert!(error <= 2e-6 * size, "{error} at {i}, {j} of {rows} × {columns}");
            }
        }
    }

    fn form() -> impl Strategy<Value = Form> {
        let rows = 1..30usize;
        let columns = prop_oneof![1..100usize, 200..300usize, TILE - 2..2 * TILE + 100];
        (rows, columns, 1..=19usize).prop_map(|(rows, columns, rank)| Form { rows, columns, rank })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn products_are_right(form in form(), seed: u64) {
            let Form { rows, columns, rank } = form;
            let matrix = noise(seed, rows * columns);
            let right = noise(seed ^ 1, columns * rank);
            let [left, new_right, expanded] = products(form, &matrix, &right);
            let m = |i: usize, j: usize| matrix[i * columns + j];
            let p = |i: usize, k: usize| left[k * rows + i];
            let q = |k: usize, j: usize| new_right[k * columns + j];
            check(p, (rows, columns, rank), m, |j, k| right[k * columns + j]);
            check(|j, k| q(k, j), (columns, rows, rank), |j, i| m(i, j), p);
            check(|i, j| expanded[i * columns + j], (rows, rank, columns), p, q);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn instruction_sets_agree_to_the_bit() {
        #[target_feature(enable = "avx2")]
        fn avx2(form: Form, matrix: &[f32], right: &[f32]) -> [Vec<f32>; 3] {
            products(form, matrix, right)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(form: Form, matrix: &[f32], right: &[f32]) -> [Vec<f32>; 3] {
            products(form, matrix, right)
        }
        for rank in [1, 2, 3, 4, 8, 15] {
            let form = Form { rows: 43, columns: TILE + 333, rank };
            let matrix = noise(5, form.rows * form.columns);
            let right = noise(6, form.columns * rank);
            let baseline = products(form, &matrix, &right);
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the instruction set.
                assert!(baseline == unsafe { avx2(form, &matrix, &right) }, "rank {rank}");
            }
            if is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                // SAFETY: the processor has the instruction sets; that of all AVX-512 is part of them.
                assert!(baseline == unsafe { avx512(form, &matrix, &right) }, "rank {rank}");
            }
        }
    }
}
