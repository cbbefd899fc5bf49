//! Columns of length 1, and at right angles to each other.
//!
//! Columns are f32, but sums run in f64, where the squares of all of them fit, and in lanes that are
//! folded in a fixed order, so that every instruction set gives the same bits.

use multiversion::multiversion;

/// Partial sums of a product. Fewer would let additions wait for each other in wide registers; more
/// take longer to fold.
const LANES: usize = 16;

/// Orthonormalizes the columns of a matrix from the first to the last, by the modified Gram-Schmidt
/// process.
///
/// Every column, at length 1, gives up its shares of those before it, twice: when little remains,
/// rounding errors of the first pass are a large part of it, and the second takes them away. A column
/// of which no more than `noise` remains was made of those before it but for rounding errors, and
/// becomes zero. One that has a number that is not finite becomes NaN, and so do those after it.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn orthonormalize(matrix: &mut [f32], rows: usize, noise: f64) {
    orthonormalize_body(matrix, rows, noise);
}

/// Gives a column the length 1. Says whether it could, for it cannot if the length is zero or not
/// finite.
pub(super) fn normalize(column: &mut [f32]) -> bool {
    let length = length(column);
    let can = length > 0.0 && length.is_finite();
    if can {
        divide(column, length);
    }
    can
}

#[inline(always)]
fn orthonormalize_body(matrix: &mut [f32], rows: usize, noise: f64) {
    for start in (0..matrix.len()).step_by(rows.max(1)) {
        let (before, rest) = matrix.split_at_mut(start);
        let column = &mut rest[..rows];
        let whole = length(column);
        if whole == 0.0 {
            continue;
        }
        divide(column, whole);
        for _pass in 0..2 {
            for earlier in before.chunks_exact(rows) {
                let share = dot(earlier, column);
                subtract(column, share, earlier);
            }
        }
        let remainder = length(column);
        if remainder <= noise {
            column.fill(0.0);
        } else {
            divide(column, remainder);
        }
    }
}

#[inline(always)]
fn length(column: &[f32]) -> f64 {
    dot(column, column).sqrt()
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += f64::from(*a) * f64::from(*b);
    }
    sums.iter().sum()
}

#[inline(always)]
fn subtract(column: &mut [f32], share: f64, of: &[f32]) {
    for (value, other) in column.iter_mut().zip(of) {
        *value = (f64::from(*value) - share * f64::from(*other)) as f32;
    }
}

#[inline(always)]
fn divide(column: &mut [f32], by: f64) {
    for value in column {
        *value = (f64::from(*value) / by) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::powersgd::tests::noise;

    #[test]
    fn columns_become_orthonormal_at_any_scale() {
        for rows in [4, 33, 1000] {
            for scale in [1.0, 1e-38, 1e36] {
                let mut matrix = noise(1, rows * 4);
                matrix.iter_mut().for_each(|x| *x *= scale);
                // Almost the sum of the first two, so that little remains.
                for row in 0..rows {
                    matrix[3 * rows + row] *= 1e-4;
                    matrix[3 * rows + row] += matrix[row] + matrix[rows + row];
                }
                orthonormalize(&mut matrix, rows, 1e-6);
                for (i, a) in matrix.chunks(rows).enumerate() {
                    for (j, b) in matrix.chunks(rows).enumerate() {
                        let expected = f64::from(i == j);
                        assert!((dot(a, b) - expected).abs() < 1e-6, "{i}, {j} of {rows}");
                    }
                }
            }
        }
    }

    #[test]
    fn columns_that_depend_on_others_become_zero() {
        let mut matrix = noise(2, 3 * 100);
        matrix.copy_within(..100, 100);
        matrix[100..200].iter_mut().for_each(|x| *x *= -3.1);
        orthonormalize(&mut matrix, 100, 1e-6);
        assert!(matrix[100..200].iter().all(|x| *x == 0.0));
        assert!((length(&matrix[..100]) - 1.0).abs() < 1e-6);
        assert!((length(&matrix[200..]) - 1.0).abs() < 1e-6);

        let mut zeros = [0.0; 100];
        orthonormalize(&mut zeros, 50, 1e-6);
        assert_eq!(zeros, [0.0; 100]);
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for column in 0..2 {
                let mut matrix = noise(3, 2 * 50);
                matrix[column * 50 + 7] = bad;
                orthonormalize(&mut matrix, 50, 1e-6);
                assert!(
                    matrix[column * 50..].iter().all(|x| x.is_nan()),
                    "{bad} in column {column}"
                );
            }
        }
    }

    #[test]
    fn only_columns_with_a_direction_are_normalized() {
        let mut column = [3e-30, 0.0, -4e-30];
        assert!(normalize(&mut column));
        assert_eq!(column, [0.6, 0.0, -0.8]);
        assert!(!normalize(&mut [0.0; 3]));
        assert!(!normalize(&mut [1.0, f32::INFINITY]));
        assert!(!normalize(&mut [1.0, f32::NAN]));
        assert!(!normalize(&mut []));
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn instruction_sets_agree_to_the_bit() {
        #[target_feature(enable = "avx2")]
        fn avx2(matrix: &mut [f32], rows: usize) {
            orthonormalize_body(matrix, rows, 1e-6);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(matrix: &mut [f32], rows: usize) {
            orthonormalize_body(matrix, rows, 1e-6);
        }
        let matrix = noise(4, 8 * 1003);
        let mut baseline = matrix.clone();
        orthonormalize_body(&mut baseline, 1003, 1e-6);
        if is_x86_feature_detected!("avx2") {
            let mut found = matrix.clone();
            // SAFETY: the processor has the instruction set.
            unsafe { avx2(&mut found, 1003) };
            assert!(baseline == found);
        }
        if is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            let mut found = matrix.clone();
            // SAFETY: the processor has the instruction sets; that of all AVX-512 is part of them.
            unsafe { avx512(&mut found, 1003) };
            assert!(baseline == found);
        }
    }
}
