//! Finds the size of buckets by which steps are shortest.
//!
//! Hill climbing over powers of two: measure the size in use, then its neighbours in one direction
//! for as long as steps get shorter, and in the other direction if the first was no help. A size
//! must be better by more than the noise to be preferred. What is measured is the step time as all
//! ranks agreed on it, so that all decide the same.

use crate::bucket::BucketSizes;

/// Steps that one size is tried for. More: less noise. Fewer: a long run settles earlier.
const WINDOW: usize = 8;

/// The first steps of a window, which pay for new memory, and do not count.
const WARM_UP: usize = 2;

/// By how much of the time a size must be better to be preferred.
const MARGIN: f64 = 0.02;

/// The smallest size tried. Below it latency dominates on any network.
const SMALLEST: usize = 1 << 20;

/// Buckets to begin with, about. The last one to be ready can hide behind nothing, so that fewer hide
/// less; more have more latency.
const PIECES: usize = 16;

/// The search for a size.
#[derive(Clone, Debug)]
pub struct Tuner {
    /// Whether all gradients fit the first bucket.
    is_small: bool,
    /// All sizes that can be tried, ascending.
    sizes: Vec<usize>,
    best: usize,
    best_seconds: f64,
    trying: usize,
    direction: isize,
    /// Whether the other direction is still to be tried.
    may_turn: bool,
    settled: bool,
    window: Vec<f64>,
}

impl Tuner {
    /// For a model with this many bytes of gradients.
    pub fn new(bytes: usize) -> Tuner {
        let sizes: Vec<usize> = std::iter::successors(Some(SMALLEST), |size| Some(size * 2))
            .take_while(|size| *size <= bytes.max(SMALLEST))
            .collect();
        let best = sizes.iter().rposition(|size| *size <= bytes / PIECES).unwrap_or(0);
        let is_small = bytes <= BucketSizes::default().first;
        Tuner {
            is_small,
            settled: is_small || sizes.len() < 2,
            best,
            best_seconds: f64::INFINITY,
            trying: best,
            direction: 1,
            may_turn: true,
            window: Vec::with_capacity(WINDOW),
            sizes,
        }
    }

    /// The sizes to use now.
    pub fn sizes(&self) -> BucketSizes {
        let (others, default) = (self.sizes[self.trying], BucketSizes::default());
        if self.is_small {
            return BucketSizes { first: default.first, others };
        }
        // Until the first bucket is complete nothing travels, and where communication takes longer than backward nothing makes
        // up for that. So it is smaller than the others also where those are small.
        BucketSizes { first: default.first.min(others / 2), others }
    }

    /// Whether the search is over.
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    /// Takes note of a step's time; whether the sizes have changed.
    pub fn step(&mut self, seconds: f64) -> bool {
        if self.settled {
            return false;
        }
        self.window.push(seconds);
        if self.window.len() < WINDOW {
            return false;
        }
        let mut counted = self.window.split_off(WARM_UP);
        self.window.clear();
        counted.sort_by(f64::total_cmp);
        let before = self.trying;
        self.tried(counted[counted.len() / 2]);
        self.trying != before
    }

    /// The size in use takes this long.
    fn tried(&mut self, seconds: f64) {
        let first = self.best_seconds.is_infinite();
        if first || seconds < self.best_seconds * (1.0 - MARGIN) {
            if !first {
                // This is the way.
                self.may_turn = false;
            }
            self.best = self.trying;
            self.best_seconds = seconds;
        } else if self.may_turn {
            self.may_turn = false;
            self.direction = -self.direction;
        } else {
            self.settle();
            return;
        }
        match self.best.checked_add_signed(self.direction).filter(|i| *i < self.sizes.len()) {
            Some(next) => self.trying = next,
            None if self.may_turn => {
                self.may_turn = false;
                self.direction = -self.direction;
                match self.best.checked_add_signed(self.direction) {
                    Some(next) => self.trying = next,
                    None => self.settle(),
                }
            }
            None => self.settle(),
        }
    }

    fn settle(&mut self) {
        self.trying = self.best;
        self.settled = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the search where steps take `seconds` of the size; the sizes tried, in MiB.
    fn search(bytes: usize, seconds: impl Fn(usize) -> f64) -> (Vec<usize>, usize) {
        let mut tuner = Tuner::new(bytes);
        let mut tried = vec![tuner.sizes().others >> 20];
        for _ in 0..1000 {
            if tuner.step(seconds(tuner.sizes().others)) {
                tried.push(tuner.sizes().others >> 20);
            }
        }
        assert!(tuner.is_settled());
        (tried, tuner.sizes().others >> 20)
    }

    fn distance_from(best: usize) -> impl Fn(usize) -> f64 {
        move |size| 1.0 + ((size >> 20) as f64 / best as f64).log2().abs() / 10.0
    }

    #[test]
    fn it_climbs_to_the_best_size_on_either_side() {
        assert_eq!(search(128 << 20, distance_from(32)), (vec![8, 16, 32, 64, 32], 32));
        assert_eq!(search(128 << 20, distance_from(2)), (vec![8, 16, 4, 2, 1, 2], 2));
        assert_eq!(search(128 << 20, distance_from(8)), (vec![8, 16, 4, 8], 8));
        assert_eq!(search(8 << 20, distance_from(8)), (vec![1, 2, 4, 8], 8));
        assert_eq!(search(8 << 20, distance_from(1)), (vec![1, 2, 1], 1));
    }

    #[test]
    fn noise_does_not_move_it() {
        let steps = std::cell::Cell::new(0);
        let noisy = |_| {
            steps.set(steps.get() + 1);
            1.0 + 0.01 * f64::from(steps.get() % 3)
        };
        assert_eq!(search(128 << 20, noisy).1, 8);
    }

    #[test]
    fn communication_starts_early_also_with_small_buckets() {
        let sizes = |bytes| Tuner::new(bytes).sizes();
        assert_eq!(sizes(16 << 20), BucketSizes { first: 512 << 10, others: 1 << 20 });
        assert_eq!(sizes(128 << 20), BucketSizes { first: 1 << 20, others: 8 << 20 });
    }

    #[test]
    fn a_small_model_is_not_tuned() {
        assert!(Tuner::new(1000).is_settled());
        assert!(Tuner::new(1 << 20).is_settled());
        assert_eq!(Tuner::new(1 << 20).sizes().first, 1 << 20, "one bucket is enough");
        assert!(!Tuner::new(3 << 20).is_settled());
    }
}
