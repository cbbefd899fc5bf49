//! The leaves of the canonical tree, shared out among workers.
//!
//! There are as many shards as the run was given, which has nothing to do with the number of workers.
//! What is computed of each shard is a leaf of the canonical tree; every worker computes a contiguous
//! range of them. What a worker can sum by itself are the subtrees inside its range: one if the range
//! is a node of the tree, several if it is not.

use std::ops::Range;

use crate::tree::{self, Tree};

/// The shards of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    count: usize,
}

/// Fewer shards than workers, so that some would have nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{shards} {} cannot be shared by {workers} workers; use at least {workers} shards or at most \
     {shards} {}",
    if *shards == 1 { "shard" } else { "shards" },
    if *shards == 1 { "worker" } else { "workers" }
)]
pub struct TooFewShards {
    /// Shards of the run.
    pub shards: usize,
    /// Workers of the run.
    pub workers: usize,
}

impl Shards {
    /// As many shards; at least one per worker.
    pub fn new(count: usize, workers: usize) -> Result<Shards, TooFewShards> {
        if count < workers.max(1) {
            return Err(TooFewShards { shards: count, workers });
        }
        Ok(Shards { count })
    }

    /// How many.
    pub fn count(self) -> usize {
        self.count
    }

    /// Those of one worker. Every worker has as many, or one more if the division leaves a rest.
    pub fn of(self, worker: usize, workers: usize) -> Range<usize> {
        let (each, rest) = (self.count / workers, self.count % workers);
        let start = worker * each + worker.min(rest);
        start..start + each + usize::from(worker < rest)
    }

    /// The subtrees that each worker sums by itself.
    pub fn subtrees(self, workers: usize) -> Vec<Vec<Range<usize>>> {
        let of = |worker| tree::maximal_subtrees(self.count, self.of(worker, workers));
        (0..workers).map(of).collect()
    }

    /// How the subtrees of all workers, in order, make the sum of all shards.
    pub fn tree(self, workers: usize) -> Tree {
        let covers: Vec<_> = self.subtrees(workers).into_iter().flatten().collect();
        Tree::over(0..self.count, &covers).expect("the workers' ranges cover all shards once")
    }

    /// Whether an all-reduce over the workers makes that sum: each holds one subtree, and these combine like the ranks
    /// of a group do.
    pub fn is_all_reduce(self, workers: usize) -> bool {
        let singles = self.subtrees(workers).iter().all(|subtrees| subtrees.len() == 1);
        singles && self.tree(workers).nodes() == Tree::canonical(workers).nodes()
    }
}

/// What one of the workers has of so many elements: whole blocks. Workers take turns in being first, so that the first
/// blocks of many small runs of elements, of which each has another `turn`, do not all meet at one.
pub fn share(
    block: usize,
    turn: usize,
    elements: usize,
    worker: usize,
    workers: usize,
) -> Range<usize> {
    let place = (worker + turn) % workers;
    let blocks = elements.div_ceil(block);
    let edge = |place: usize| (blocks * place / workers * block).min(elements);
    edge(place)..edge(place + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_elements_in_whole_blocks() {
        let block = 2048;
        for elements in [0, 1, block, block + 1, 10 * block - 1, 17 * block] {
            for workers in 1..6 {
                for turn in 0..3 {
                    let of = |worker| share(block, turn, elements, worker, workers);
                    let mut all: Vec<_> = (0..workers).map(of).collect();
                    all.sort_by_key(|share| (share.start, share.end));
                    let mut end = 0;
                    for share in all {
                        assert_eq!(share.start, end);
                        assert!(share.start % block == 0 || share.is_empty());
                        end = share.end;
                    }
                    assert_eq!(end, elements);
                }
            }
        }
    }

    #[test]
    fn ranges_cover_all_shards_evenly() {
        for count in 1..40 {
            for workers in 1..=count {
                let shards = Shards::new(count, workers).unwrap();
                let mut next = 0;
                for worker in 0..workers {
                    let range = shards.of(worker, workers);
                    assert_eq!(range.start, next);
                    assert!((count / workers..=count.div_ceil(workers)).contains(&range.len()));
                    next = range.end;
                }
                assert_eq!(next, count);
                let inputs = shards.subtrees(workers).iter().map(Vec::len).sum::<usize>();
                assert_eq!(shards.tree(workers).inputs(), inputs);
            }
        }
    }

    #[test]
    fn a_power_of_two_of_workers_has_one_subtree_each() {
        let shards = Shards::new(8, 4).unwrap();
        assert!(shards.subtrees(4).iter().all(|subtrees| subtrees.len() == 1));
        assert_eq!(shards.tree(4).nodes(), Tree::canonical(4).nodes());
        let lengths: Vec<Vec<usize>> = shards
            .subtrees(3)
            .iter()
            .map(|subtrees| subtrees.iter().map(Range::len).collect())
            .collect();
        assert_eq!(lengths, [vec![2, 1], vec![1, 2], vec![2]]);
    }

    #[test]
    fn aligned_workers_all_reduce() {
        let is = |shards, workers| Shards::new(shards, workers).unwrap().is_all_reduce(workers);
        assert!(is(8, 1) && is(8, 2) && is(8, 4) && is(8, 8) && is(5, 5) && is(6, 3));
        assert!(!is(8, 3) && !is(8, 5) && !is(5, 2));
    }

    #[test]
    fn every_worker_needs_a_shard() {
        assert_eq!(Shards::new(3, 4), Err(TooFewShards { shards: 3, workers: 4 }));
        assert!(Shards::new(0, 0).is_err());
    }
}
