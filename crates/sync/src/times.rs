//! When things happened in a step.

use std::time::{Duration, Instant};

use crate::strategy::Gradients;

/// When a bucket was ready, under way, and back.
#[derive(Clone, Copy, Debug)]
pub struct BucketTimes {
    /// Bytes of its buffer.
    pub bytes: usize,
    /// Its last gradient was ready, and it was its turn.
    pub submitted: Instant,
    /// The strategy took it up.
    pub started: Instant,
    /// The mean over all shards was there.
    pub ended: Instant,
    /// How much of the time in between was adding up.
    pub folding: Duration,
    /// How much of it was encoding and decoding; the rest was moving data and waiting.
    pub coding: Duration,
}

impl BucketTimes {
    /// Those of a bucket that came back.
    pub fn of(gradients: &Gradients) -> BucketTimes {
        BucketTimes {
            bytes: gradients.slots[0].len() * 4,
            submitted: gradients.submitted,
            started: gradients.started,
            ended: gradients.ended,
            folding: gradients.folding,
            coding: gradients.coding,
        }
    }
}

/// When the parts of a step happened, on this rank.
#[derive(Clone, Debug)]
pub struct StepTimes {
    /// The step began.
    pub begin: Instant,
    /// The last backward pass ended.
    pub computed: Instant,
    /// The weights were updated.
    pub end: Instant,
    /// Time spent in forward and backward passes.
    pub compute: Duration,
    /// Time of the last backward pass, which communication can hide behind.
    pub backward: Duration,
    /// Time after the last backward pass in which this rank did nothing but wait for buckets.
    pub blocked: Duration,
    /// Every bucket, in the order of travel.
    pub buckets: Vec<BucketTimes>,
}
