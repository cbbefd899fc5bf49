//! A run of any length and any number of ranks, reduced to as many points as a screen can show.
//!
//! Neighbouring steps share a bin, and in the heat map neighbouring ranks share a row. A bin shows the
//! mean of its steps. A row shows the largest value of its ranks: a single slow one among a thousand
//! must not vanish in a mean.

use std::ops::Range;

use serde::Serialize;

use crate::breakdown::{Parts, StepBreakdown};
use crate::record::StepRecord;

/// Points along a curve. More than a wide screen resolves would only make the page heavier.
const CURVE_BINS: usize = 240;

/// Columns of the heat map: cells of about ten pixels.
const HEAT_COLUMNS: usize = 96;

/// Rows of the heat map, which must fit on a screen.
const HEAT_ROWS: usize = 64;

/// What changes over the steps, one element per bin. Seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Curves {
    /// The first step in the bin.
    pub first: Vec<u64>,
    /// The last step in the bin.
    pub last: Vec<u64>,
    pub compute: Vec<f64>,
    pub straggler: Vec<f64>,
    pub exposed: Vec<f64>,
    pub rest: Vec<f64>,
    /// `NaN`, which is `null` in JSON, where the loss was no number.
    pub loss: Vec<f64>,
    /// `None` where nothing was communicated.
    pub overlap: Vec<Option<f64>>,
}

impl Curves {
    pub(super) fn of(steps: &[StepRecord]) -> Curves {
        let mut curves = Curves::default();
        for bin in bins(steps.len(), CURVE_BINS) {
            let steps = &steps[bin];
            let broken_down: Vec<StepBreakdown> = steps.iter().map(StepBreakdown::of).collect();
            let parts = Parts::mean(broken_down.iter().map(|step| &step.parts));
            let overlaps = broken_down.iter().filter_map(StepBreakdown::overlap);
            curves.first.push(steps[0].step);
            curves.last.push(steps[steps.len() - 1].step);
            curves.compute.push(rounded(parts.compute));
            curves.straggler.push(rounded(parts.straggler));
            curves.exposed.push(rounded(parts.exposed));
            curves.rest.push(rounded(parts.rest));
            curves.loss.push(rounded(mean(steps.iter().map(|step| step.loss)).unwrap_or(f64::NAN)));
            curves.overlap.push(mean(overlaps).map(rounded));
        }
        curves
    }
}

/// Rank by step. Seconds, by row and column.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct HeatMap {
    /// The first and the last rank of each row.
    pub rows: Vec<(usize, usize)>,
    /// The first and the last step of each column.
    pub columns: Vec<(u64, u64)>,
    pub compute: Vec<Vec<f64>>,
    pub lateness: Vec<Vec<f64>>,
}

impl HeatMap {
    pub(super) fn of(steps: &[StepRecord]) -> HeatMap {
        let world = steps.iter().map(|record| record.ranks.len()).max().unwrap_or(0);
        let rows = bins(world, HEAT_ROWS);
        let mut map = HeatMap {
            rows: rows.iter().map(|row| (row.start, row.end - 1)).collect(),
            compute: vec![Vec::new(); rows.len()],
            lateness: vec![Vec::new(); rows.len()],
            ..HeatMap::default()
        };
        for column in bins(steps.len(), HEAT_COLUMNS) {
            let steps = &steps[column];
            map.columns.push((steps[0].step, steps[steps.len() - 1].step));
            // Sums over the steps, by rank.
            let mut compute = vec![0.0; world];
            let mut lateness = vec![0.0; world];
            for record in steps {
                for (rank, step) in StepBreakdown::of(record).ranks.iter().enumerate() {
                    compute[rank] += step.parts.compute;
                    lateness[rank] += step.lateness;
                }
            }
            let largest = |sums: &[f64], row: &Range<usize>| {
                rounded(
                    sums[row.clone()].iter().fold(0.0, |a: f64, b| a.max(*b)) / steps.len() as f64,
                )
            };
            for (index, row) in rows.iter().enumerate() {
                map.compute[index].push(largest(&compute, row));
                map.lateness[index].push(largest(&lateness, row));
            }
        }
        map
    }
}

/// Cuts `0..n` into at most `at_most` ranges that are not empty and differ by one at most.
pub(super) fn bins(n: usize, at_most: usize) -> Vec<Range<usize>> {
    let count = n.min(at_most);
    (0..count).map(|bin| bin * n / count..(bin + 1) * n / count).collect()
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
    (n > 0).then(|| sum / n as f64)
}

/// Five significant digits: more than a screen shows, and a third of the bytes.
pub(super) fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::RankStep;

    fn steps(n: u64, world: usize, slow: usize) -> Vec<StepRecord> {
        (0..n)
            .map(|step| {
                let begin = step as f64;
                let rank = |rank| {
                    let compute = if rank == slow { 0.6 } else { 0.3 };
                    RankStep {
                        begin,
                        computed: begin + compute,
                        reduced: begin + 0.9,
                        end: begin + 1.0,
                        compute,
                        backward: 0.1,
                        device: None,
                        buckets: vec![],
                    }
                };
                let ranks = (0..world).map(rank).collect();
                StepRecord {
                    step,
                    loss: step as f64,
                    samples: 1,
                    wire_bytes: 1,
                    ranks,
                    agreed: true,
                    encoded: None,
                }
            })
            .collect()
    }

    #[test]
    fn long_runs_are_bounded_and_keep_their_means() {
        let curves = Curves::of(&steps(10_000, 1, 9));
        assert_eq!(curves.first.len(), CURVE_BINS);
        assert_eq!((curves.first[0], curves.last[CURVE_BINS - 1]), (0, 9999));
        assert!((curves.loss.iter().sum::<f64>() / CURVE_BINS as f64 - 4999.5).abs() < 1.0);
        assert!(curves.compute.iter().all(|compute| (compute - 0.3).abs() < 1e-6));
        assert!(curves.overlap.iter().all(Option::is_none));
    }

    #[test]
    fn one_slow_rank_among_a_thousand_stays_visible() {
        let map = HeatMap::of(&steps(20, 1000, 777));
        assert_eq!((map.rows.len(), map.columns.len()), (HEAT_ROWS, 20));
        let slow =
            map.rows.iter().position(|(first, last)| (*first..=*last).contains(&777)).unwrap();
        for (row, lateness) in map.lateness.iter().enumerate() {
            let expected = if row == slow { 0.3 } else { 0.0 };
            assert!(lateness.iter().all(|value| (value - expected).abs() < 1e-6), "row {row}");
        }
        assert!((map.compute[slow][0] - 0.6).abs() < 1e-6);
    }

    #[test]
    fn nothing_makes_no_bins() {
        assert_eq!(Curves::of(&[]), Curves::default());
        assert_eq!(HeatMap::of(&[]), HeatMap::default());
    }

    proptest! {
        #[test]
        fn bins_cover_everything_once_and_evenly(n in 0usize..5000, at_most in 1usize..300) {
            let bins = bins(n, at_most);
            prop_assert!(bins.len() <= at_most);
            let all: Vec<usize> = bins.iter().cloned().flatten().collect();
            prop_assert_eq!(all, (0..n).collect::<Vec<_>>());
            let lengths = bins.iter().map(ExactSizeIterator::len);
            let (least, most) = (lengths.clone().min(), lengths.max());
            prop_assert!(most.unwrap_or(0) - least.unwrap_or(0) <= 1 && least != Some(0));
        }
    }
}
