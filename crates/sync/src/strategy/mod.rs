//! How the gradients of the workers become one.
//!
//! A strategy takes buckets whose gradients are complete on this rank, in the same order on every
//! rank, and gives them back in that order, ready to be applied. In between it does whatever it
//! promises: [`AllReduce`] exchanges them while the backward pass goes on, [`Alone`] has nobody to
//! exchange them with.

mod all_reduce;
mod alone;

use std::time::{Duration, Instant};

pub use all_reduce::AllReduce;
pub use alone::Alone;

use crate::error::SyncError;

/// How the gradients of the workers become one.
pub trait Strategy: Send {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Takes a bucket that is complete on this rank. Returns at once.
    fn submit(&mut self, gradients: Gradients);

    /// Waits for the oldest bucket that was submitted and not yet collected.
    fn collect(&mut self) -> Result<Gradients, SyncError>;

    /// Bytes this rank has sent so far, on sockets or into shared memory.
    fn sent(&self) -> u64;
}

/// The content of a bucket, on its way through a strategy.
#[derive(Debug)]
pub struct Gradients {
    /// Which bucket.
    pub bucket: usize,
    /// What this rank has: one buffer for every subtree that it has summed. What comes back is the
    /// mean over all shards, in the first. The strategy leaves the others alone.
    pub slots: Vec<Vec<f32>>,
    /// How many of the slots hold subtrees.
    pub subtrees: usize,
    /// How many elements at the front are gradients. What follows are counts, which are summed.
    pub gradients: usize,
    /// Shards of the step, by which the sum is divided.
    pub shards: usize,
    /// When it was submitted.
    pub submitted: Instant,
    /// When the strategy took it up.
    pub started: Instant,
    /// When it was ready to be applied.
    pub ended: Instant,
    /// How much of the time in between was adding up.
    pub folding: Duration,
}

impl Gradients {
    /// Turns the sum into the mean: one division, at the root of the tree.
    fn divide(&mut self) {
        let shards = self.shards as f32;
        self.slots[0][..self.gradients].iter_mut().for_each(|x| *x /= shards);
    }
}
