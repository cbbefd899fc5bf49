//! Which sample stands where in a run.
//!
//! A run reads one endless stream of samples. The stream is a chain of passes over the data, and
//! every pass is a permutation of it that follows from the seed and the number of the pass. So
//! position `p` names the same sample for every worker, in whatever order they ask: a worker that
//! reads every eighth batch, one that resumes in the middle, or one that reads everything.

use crate::random::Random;

const PURPOSE: &str = "unisono sample order";

/// The endless stream of sample indices of one seed.
///
/// The permutation of the pass asked for last is kept, so a stream read forwards costs one shuffle
/// per pass.
#[derive(Debug, Clone)]
pub struct SampleOrder {
    seed: u64,
    len: usize,
    pass: u64,
    permutation: Vec<usize>,
}

impl SampleOrder {
    /// The stream over samples `0..len`.
    ///
    /// # Panics
    ///
    /// If `len` is 0: there is no sample to name.
    pub fn new(seed: u64, len: usize) -> Self {
        assert!(len > 0, "an order needs at least one sample");
        Self { seed, len, pass: 0, permutation: permutation(seed, 0, len) }
    }

    /// The sample at `position` of the stream.
    pub fn sample(&mut self, position: u64) -> usize {
        let pass = position / self.len as u64;
        if pass != self.pass {
            self.permutation = permutation(self.seed, pass, self.len);
            self.pass = pass;
        }
        self.permutation[(position % self.len as u64) as usize]
    }
}

/// Fisher–Yates.
fn permutation(seed: u64, pass: u64, len: usize) -> Vec<usize> {
    let mut random = Random::new(PURPOSE, seed, &pass.to_le_bytes());
    let mut samples: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        samples.swap(last, random.below(last + 1));
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(seed: u64, number: u64, len: usize) -> Vec<usize> {
        let mut order = SampleOrder::new(seed, len);
        (0..len as u64).map(|i| order.sample(number * len as u64 + i)).collect()
    }

    #[test]
    fn every_pass_shows_every_sample_once() {
        for len in [1, 2, 3, 100] {
            for number in [0, 1, 7] {
                let mut seen = pass(5, number, len);
                seen.sort();
                assert_eq!(seen, (0..len).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn passes_and_seeds_differ() {
        assert_ne!(pass(5, 0, 100), pass(5, 1, 100));
        assert_ne!(pass(5, 0, 100), pass(6, 0, 100));
        assert_ne!(pass(5, 0, 100), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn the_way_of_asking_does_not_matter() {
        let forwards: Vec<usize> = (0..5).flat_map(|number| pass(9, number, 13)).collect();
        let mut order = SampleOrder::new(9, 13);
        for position in (0..65).rev().chain((0..65).step_by(7)).chain([64, 0, 64]) {
            assert_eq!(order.sample(position), forwards[position as usize]);
        }
    }

    /// A resumed run must go on with the samples that the interrupted one would have seen.
    #[test]
    fn samples_never_change() {
        assert_eq!(pass(42, 3, 8), [0, 2, 5, 1, 4, 6, 7, 3]);
    }
}
