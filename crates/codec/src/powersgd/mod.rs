//! Low-rank approximation: the gradient as the product of two thin matrices (Vogels, Karimireddy and
//! Jaggi, *PowerSGD*, 2019).
//!
//! A parameter of shape `[d0, d1, …]` is a matrix `M` of `d0` rows and `d1 · …` columns. One step of
//! the power method finds about the best approximation of a given rank:
//!
//! 1. All workers remember the same matrix `Q` of as many columns as the rank. Round 0 sums
//!    `P = M · Q`.
//! 2. The mean `P` is settled: its columns are orthonormalized.
//! 3. Round 1 sums `Q = Mᵀ · P`, the coordinates of `M` in the space of the columns of `P`.
//! 4. The gradient is decoded as `P · Qᵀ`, and `Q` is remembered. Gradients change slowly, so the
//!    iteration goes on from step to step, and what it misses stays in the residual.
//!
//! Both encodings are linear in `M`, so the mean of the encodings is the encoding of the mean.
//!
//! The columns of `Q` are remembered with length 1. That changes no decoded value, for settling
//! forgets the length of a column, but it keeps `P` as large as the gradient: else it would grow like
//! its square, and leave the range of f16 or even f32. A column of `Q` without a direction, because
//! the gradient was zero, of smaller rank, or not finite, starts over from random numbers.

mod basis;
mod matrix;

use std::ops::RangeInclusive;

use crate::{Codec, Passage, Summed, Task, Wire};
use matrix::Form;

/// Encodes a matrix as two thin ones, with a fixed number of columns: the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerSgd {
    rank: usize,
    wire: Wire,
}

impl PowerSgd {
    /// The usual rank. A larger one keeps more of a gradient, in proportionally more bytes.
    pub const RANK: usize = 4;

    /// The ranks there are. With more, encodings of most parameters are no smaller than the gradient.
    pub const RANKS: RangeInclusive<usize> = 1..=32;

    /// A codec of a rank, of which the encodings travel as `wire`.
    ///
    /// # Panics
    ///
    /// If the rank is not one of [`PowerSgd::RANKS`].
    pub fn new(rank: usize, wire: Wire) -> PowerSgd {
        assert!(Self::RANKS.contains(&rank), "rank {rank} is not in {:?}", Self::RANKS);
        PowerSgd { rank, wire }
    }

    /// The matrix that a parameter is. None has a rank larger than its sides.
    fn form(&self, shape: &[usize]) -> Form {
        let (rows, columns) = match shape {
            [] => (1, 1),
            [rows, others @ ..] => (*rows, crate::elements(others)),
        };
        Form { rows, columns, rank: self.rank.min(rows).min(columns) }
    }

    /// The part of a column's length at or below which it is not to be told from rounding.
    pub fn noise(&self) -> f64 {
        match self.wire {
            Wire::F32 => 1e-6,
            Wire::Fp16 => 1.0 / 2048.0,
            Wire::Bf16 => 1.0 / 256.0,
        }
    }
}

impl Codec for PowerSgd {
    fn is_biased(&self) -> bool {
        true
    }

    /// Whether it is a matrix, and less than half as many numbers stand for it.
    fn suits(&self, shape: &[usize]) -> bool {
        let Form { rows, columns, .. } = self.form(shape);
        shape.len() >= 2 && 2 * self.rank * (rows + columns) < rows * columns
    }

    fn encoded_bytes(&self, shape: &[usize]) -> usize {
        (self.encoded(shape, 0) + self.encoded(shape, 1)) * self.wire.bytes()
    }

    fn passage(&self) -> Passage<'_> {
        Passage::Summed(self)
    }
}

impl Summed for PowerSgd {
    fn wire(&self) -> Wire {
        self.wire
    }

    fn rounds(&self) -> usize {
        2
    }

    fn encoded(&self, shape: &[usize], round: usize) -> usize {
        let Form { rows, columns, rank } = self.form(shape);
        rank * if round == 0 { rows } else { columns }
    }

    fn start(&self, task: &Task) -> Vec<f32> {
        let Form { columns, rank, .. } = self.form(task.shape);
        let mut remembered = vec![0.0; columns * rank];
        for (which, column) in remembered.chunks_exact_mut(columns.max(1)).enumerate() {
            start_column(task, which, column);
        }
        remembered
    }

    fn encode(&self, round: usize, task: &Task, values: &[f32], given: &[f32], into: &mut [f32]) {
        let form = self.form(task.shape);
        match round {
            0 => matrix::times(form, values, given, into),
            _ => matrix::transposed_times(form, values, given, into),
        }
    }

    fn settle(&self, _round: usize, task: &Task, mean: &mut [f32]) {
        basis::orthonormalize(mean, self.form(task.shape).rows, self.noise());
    }

    fn decode(&self, task: &Task, means: &[&[f32]], remembered: &mut Vec<f32>, into: &mut [f32]) {
        let form = self.form(task.shape);
        let (left, right) = (means[0], means[1]);
        matrix::expand(form, left, right, into);

        remembered.clear();
        remembered.extend_from_slice(right);
        for (which, column) in remembered.chunks_exact_mut(form.columns.max(1)).enumerate() {
            if !basis::normalize(column) {
                start_column(task, which, column);
            }
        }
    }

    fn pay(&self, _task: &Task, residual: &mut [f32], decoded: &[f32]) {
        residual.iter_mut().zip(decoded).for_each(|(owed, paid)| *owed -= paid);
    }
}

/// Fills a column of `Q` with numbers that are almost normally distributed, of which all directions
/// are about equally likely, and gives it the length 1.
fn start_column(task: &Task, which: usize, column: &mut [f32]) {
    let key = task.shared_key().with(which as u64);
    for (place, value) in column.iter_mut().enumerate() {
        let bits = key.at(place as u64);
        let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xffff).sum();
        // The sum of four numbers of 16 bits, twice, less its mean; and odd, so that none is zero.
        *value = 2.0 * sum as f32 - (4 * 0xffff + 1) as f32;
    }
    basis::normalize(column);
}

#[cfg(test)]
mod tests;
