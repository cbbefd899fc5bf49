//! Gradients in units of their usual size.
//!
//! The elements of a gradient differ in size by orders of magnitude: rare words have small ones, some
//! layers large ones. To a codec that gives every element of a block the same error, the small ones
//! drown, and an adaptive optimizer, which divides every element by its usual size, makes the noise
//! that is left of them as large as the others. So a gradient is divided by the usual size of its
//! elements before it is encoded, and multiplied after it is decoded. Residuals are kept in these
//! units.
//!
//! The usual size of the element in row `i` and column `j` of a matrix is taken to be
//! `√(rows[i] · columns[j] / all)`, by the mean squares of that row, that column, and all elements.
//! These are so few that they can travel as they are, now and then, and be averaged exactly.
//! Measured on the gradients before they are encoded, they do not depend on what the codec makes
//! of them.

use multiversion::multiversion;
use std::ops::Range;

/// Steps between two measurements. More: slower to notice a change. Fewer: more to send.
const INTERVAL: u64 = 16;

/// How much of the earlier measurements each new one leaves. More: less noise. Less: sooner forgotten.
const FADES: f32 = 0.8;

/// The smallest mean square of a row or column, as a share of that of all elements. Those that have
/// hardly had a gradient yet would otherwise be worth more than all others.
const LEAST: f32 = 1e-4;

/// How large the elements of a parameter's gradient usually are.
#[derive(Clone, Debug)]
pub struct Scale {
    rows: usize,
    columns: usize,
    /// The running mean squares of the rows, then of the columns; empty before the first measurement.
    squares: Vec<f32>,
    /// What the elements of each row, and of each column, are divided by.
    units: Vec<f32>,
    /// The interval of the next measurement, at the earliest.
    next: u64,
}

impl Scale {
    /// Nothing is known yet of a parameter of this shape.
    pub fn new(shape: &[usize]) -> Scale {
        let rows = shape.first().copied().unwrap_or(1).max(1);
        let columns = shape.iter().skip(1).product::<usize>();
        let squares = Vec::new();
        Scale { rows, columns, squares, units: vec![1.0; rows + columns], next: 0 }
    }

    /// Whether the size is to be measured in a step.
    pub fn is_due(&self, step: u64) -> bool {
        step / INTERVAL >= self.next
    }

    /// Rows and columns of the matrix that a parameter is taken for.
    pub fn form(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// What the elements of each row, and then of each column, are divided by: an element by the product of both.
    pub fn units(&self) -> &[f32] {
        &self.units
    }

    /// Numbers of a measurement.
    #[expect(clippy::len_without_is_empty, reason = "a parameter has a row at least")]
    pub fn len(&self) -> usize {
        self.rows + self.columns
    }

    /// What is known, to be saved: a measurement, zeros if there is none, and when the next is due.
    pub fn known(&self) -> Vec<f32> {
        let mut known = self.squares.clone();
        known.resize(self.len(), 0.0);
        known.push(self.next as f32);
        known
    }

    /// Numbers of what is known.
    pub fn known_len(&self) -> usize {
        self.len() + 1
    }

    /// Goes on with what was known.
    ///
    /// # Panics
    /// If it has another length.
    pub fn restore(&mut self, known: &[f32]) {
        assert_eq!(known.len(), self.known_len(), "what is known of a parameter of this shape");
        let (squares, next) = known.split_at(self.len());
        self.next = next[0] as u64;
        self.squares.clear();
        if self.next > 0 {
            self.squares.extend_from_slice(squares);
        }
        self.find_units();
    }

    /// Appends the mean squares of a gradient's rows and columns.
    pub fn measure(&self, gradient: &[f32], into: &mut Vec<f32>) {
        let rows = into.len();
        into.resize(rows + self.len(), 0.0);
        let (rows, columns) = into[rows..].split_at_mut(self.rows);
        for (row, square) in gradient.chunks_exact(self.columns.max(1)).zip(rows) {
            let mut lanes = [0f32; 16];
            let ((values, rest), (sums, last)) =
                (row.as_chunks::<16>(), columns.as_chunks_mut::<16>());
            for (values, sums) in values.iter().zip(sums) {
                for i in 0..16 {
                    let square = values[i] * values[i];
                    lanes[i] += square;
                    sums[i] += square;
                }
            }
            for (i, (value, sum)) in rest.iter().zip(last).enumerate() {
                lanes[i] += value * value;
                *sum += value * value;
            }
            *square = lanes.iter().sum::<f32>() / self.columns as f32;
        }
        columns.iter_mut().for_each(|square| *square /= self.rows as f32);
    }

    /// Takes note of a step's measurement, the mean over all shards.
    pub fn note(&mut self, step: u64, measured: &[f32]) {
        self.next = step / INTERVAL + 1;
        if self.squares.is_empty() {
            self.squares.extend_from_slice(measured);
        } else {
            for (square, measured) in self.squares.iter_mut().zip(measured) {
                *square = FADES * *square + (1.0 - FADES) * measured;
            }
        }
        self.find_units();
    }

    fn find_units(&mut self) {
        self.units.fill(1.0);
        if self.squares.is_empty() {
            return;
        }
        let (rows, columns) = self.squares.split_at(self.rows);
        let all = rows.iter().sum::<f32>() / self.rows as f32;
        // Without any gradient so far, there is nothing to be relative to; and what is no number
        // must not spread.
        if !(all > f32::MIN_POSITIVE && all.is_finite()) {
            return;
        }
        let least = (all * LEAST).max(f32::MIN_POSITIVE);
        let (row_units, column_units) = self.units.split_at_mut(self.rows);
        for (unit, square) in row_units.iter_mut().zip(rows) {
            *unit = square.max(least).sqrt();
        }
        for (unit, square) in column_units.iter_mut().zip(columns) {
            *unit = (square.max(least) / all).sqrt();
        }
    }

    /// Divides a gradient by the usual.
    pub fn divide(&self, gradient: &mut [f32]) {
        self.divide_from(0, gradient);
    }

    /// As [`Scale::divide`], for a part of the elements that begins with the number `first`.
    pub fn divide_from(&self, first: usize, part: &mut [f32]) {
        let (rows, columns) = self.units.split_at(self.rows);
        divide(rows, columns, first, part);
    }

    /// As [`Scale::divide_from`], and writes what comes out elsewhere.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn divide_into(&self, first: usize, part: &[f32], into: &mut [f32]) {
        let (rows, columns) = self.units.split_at(self.rows);
        divide_into(rows, columns, first, part, into);
    }

    /// Multiplies by the usual what was divided by it.
    pub fn multiply(&self, gradient: &mut [f32]) {
        self.multiply_from(0, gradient);
    }

    /// As [`Scale::multiply`], for a part of the elements that begins with the number `first`.
    pub fn multiply_from(&self, first: usize, part: &mut [f32]) {
        let (rows, columns) = self.units.split_at(self.rows);
        multiply(rows, columns, first, part);
    }
}

/// The runs of so many elements from `first` on that lie in one row: where they are among these, their row, and their
/// columns.
#[inline(always)]
fn runs(
    columns: usize,
    first: usize,
    count: usize,
) -> impl Iterator<Item = (Range<usize>, usize, Range<usize>)> {
    let (mut at, mut row, mut column) = (0, first / columns.max(1), first % columns.max(1));
    std::iter::from_fn(move || {
        let length = (columns - column).min(count - at);
        let run = (length > 0).then(|| (at..at + length, row, column..column + length));
        (at, row, column) = (at + length, row + 1, 0);
        run
    })
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn divide(rows: &[f32], columns: &[f32], first: usize, part: &mut [f32]) {
    for (run, row, at) in runs(columns.len(), first, part.len()) {
        let unit = rows[row];
        for (value, column) in part[run].iter_mut().zip(&columns[at]) {
            *value /= unit * column;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn divide_into(rows: &[f32], columns: &[f32], first: usize, part: &[f32], into: &mut [f32]) {
    assert_eq!(part.len(), into.len(), "an element for every element");
    for (run, row, at) in runs(columns.len(), first, part.len()) {
        let unit = rows[row];
        let values = into[run.clone()].iter_mut().zip(&part[run]);
        for ((into, value), column) in values.zip(&columns[at]) {
            *into = value / (unit * column);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn multiply(rows: &[f32], columns: &[f32], first: usize, part: &mut [f32]) {
    for (run, row, at) in runs(columns.len(), first, part.len()) {
        let unit = rows[row];
        for (value, column) in part[run].iter_mut().zip(&columns[at]) {
            *value *= unit * column;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gradient whose elements have sizes of rank one.
    fn gradient(rows: usize, columns: usize) -> Vec<f32> {
        let size = |i: usize, j: usize| 10f32.powi(i as i32 % 3) * 2f32.powi(j as i32 % 5);
        let sign = |i: usize, j: usize| if (i * 7 + j * 3).is_multiple_of(2) { 1.0 } else { -1.0 };
        (0..rows * columns)
            .map(|e| size(e / columns, e % columns) * sign(e / columns, e % columns))
            .collect()
    }

    fn measured(scale: &Scale, gradient: &[f32]) -> Vec<f32> {
        let mut into = Vec::new();
        scale.measure(gradient, &mut into);
        into
    }

    #[test]
    fn elements_become_alike_and_come_back() {
        for (rows, columns) in [(1, 1), (3, 5), (6, 40), (9, 100)] {
            let mut scale = Scale::new(&[rows, columns]);
            let original = gradient(rows, columns);
            let mut values = original.clone();
            scale.divide(&mut values);
            assert_eq!(values, original, "nothing is known at first");
            scale.note(0, &measured(&scale, &original));
            scale.divide(&mut values);
            for value in &values {
                assert!((value.abs() - 1.0).abs() < 1e-4, "{rows}×{columns}: {value}");
            }
            let mut divided = original.clone();
            let (left, right) = divided.split_at_mut(rows * columns / 4);
            let (from, and_from) = original.split_at(left.len());
            scale.divide_into(0, from, left);
            scale.divide_into(left.len(), and_from, right);
            assert_eq!(divided, values, "parts are divided alike");
            let mut parts = values.clone();
            let (left, right) = parts.split_at_mut(rows * columns / 3);
            scale.multiply_from(0, left);
            scale.multiply_from(left.len(), right);
            scale.multiply(&mut values);
            assert_eq!(parts, values, "parts are multiplied alike");
            for (back, value) in values.iter().zip(&original) {
                assert!((back - value).abs() <= value.abs() * 1e-6);
            }
        }
    }

    #[test]
    fn what_is_restored_is_what_was() {
        let mut scale = Scale::new(&[8, 2, 3]);
        scale.note(40, &measured(&scale, &gradient(8, 6)));
        assert!(!scale.is_due(47) && scale.is_due(48));
        let mut other = Scale::new(&[8, 2, 3]);
        other.restore(&scale.known());
        assert_eq!((&other.units, other.next), (&scale.units, scale.next));
        let mut fresh = Scale::new(&[8, 2, 3]);
        fresh.restore(&Scale::new(&[8, 2, 3]).known());
        fresh.note(40, &measured(&scale, &gradient(8, 6)));
        assert_eq!(fresh.units, scale.units, "nothing known is restored as nothing known");
    }

    #[test]
    fn zeros_and_what_is_no_number_change_nothing() {
        for value in [0.0, f32::NAN, f32::INFINITY] {
            let mut scale = Scale::new(&[2, 3]);
            scale.note(0, &measured(&scale, &[value; 6]));
            let mut gradient = [1.0; 6];
            scale.divide(&mut gradient);
            assert_eq!(gradient, [1.0; 6]);
        }
    }
}
