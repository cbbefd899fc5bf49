//! What simulated jobs compute, and what simulators of them share.

use std::collections::BTreeMap;

/// The global batch has so many shards: the sum over all of them does not depend on their division.
const SHARDS: u64 = 12;

/// Weights after so many steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub steps: u64,
    pub weights: u64,
}

/// The state of an undisturbed run.
pub fn reference(steps: u64, buckets: usize) -> State {
    let mut state = State { steps: 0, weights: 7 };
    while state.steps < steps {
        let sum = |bucket| part(state, bucket, 0, 1);
        let weights = update(state.weights, (0..buckets).map(sum));
        state = State { steps: state.steps + 1, weights };
    }
    state
}

/// The sum of the gradients of a rank's shards.
pub fn part(state: State, bucket: usize, rank: usize, world: usize) -> u64 {
    let (rank, world) = (rank as u64, world as u64);
    let mine = rank * SHARDS / world..(rank + 1) * SHARDS / world;
    mine.map(|shard| gradient(state, bucket, shard)).fold(0, u64::wrapping_add)
}

fn gradient(state: State, bucket: usize, shard: u64) -> u64 {
    mix(mix(state.weights ^ mix(state.steps)) ^ mix(bucket as u64 * SHARDS + shard))
}

pub fn update(weights: u64, means: impl Iterator<Item = u64>) -> u64 {
    means.fold(weights, |weights, mean| mix(weights ^ mean))
}

/// What went wrong.
pub type Checked = Result<(), String>;

/// What has happened, counted so that a test can require it.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub counts: BTreeMap<&'static str, u64>,
    pub is_off: bool,
}

impl Tally {
    pub fn count(&mut self, what: &'static str) {
        if self.is_off {
            return;
        }
        *self.counts.entry(what).or_default() += 1;
    }

    pub fn add(&mut self, other: &Tally) {
        for (what, count) in &other.counts {
            *self.counts.entry(what).or_default() += count;
        }
    }
}

/// The last part of SplitMix64.
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub fn check(is_right: bool, wrong: impl FnOnce() -> String) -> Checked {
    if is_right { Ok(()) } else { Err(wrong()) }
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(mix(seed))
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0) % limit
    }

    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    pub fn one_in(&mut self, limit: u64) -> bool {
        self.below(limit) == 0
    }

    /// What differs if anything was drawn otherwise.
    pub fn state(&self) -> u64 {
        self.0
    }
}
