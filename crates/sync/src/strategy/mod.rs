//! How the gradients of the workers become one.
//!
//! A strategy takes buckets whose gradients are complete on this rank, in the same order on every
//! rank, and gives them back in that order, ready to be applied. In between it does whatever it
//! promises: [`AllReduce`] exchanges them as they are, [`Compressed`] in fewer bytes, both
//! [in the background](Background) while the backward pass goes on; [`Alone`] has nobody to exchange
//! them with.

mod all_reduce;
mod alone;
mod background;
mod compressed;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use all_reduce::AllReduce;
pub use alone::Alone;
pub use background::{Background, Exchange};
pub use compressed::{Compressed, Compression, spread};

use unisono_collective::{AbortHandle, Group, Options};

use crate::advice::Advice;
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::shards::Shards;
use crate::synchronizer::Parameter;
use crate::times::StepTimes;

/// How the gradients of the workers become one.
pub trait Strategy: Send {
    /// Its name on the command line and in reports.
    fn name(&self) -> String;

    /// Whether, in this step, it wants the gradient of every shard by itself instead of their sums.
    fn wants_leaves(&self, step: u64) -> bool {
        let _ = step;
        false
    }

    /// Takes a bucket that is complete on this rank. Returns at once.
    fn submit(&mut self, gradients: Gradients);

    /// Waits for the oldest bucket that was submitted and not yet collected.
    fn collect(&mut self) -> Result<Gradients, SyncError>;

    /// Bytes this rank has sent so far, on sockets or into shared memory.
    fn sent(&self) -> u64;

    /// What ends its exchanges, for whoever does not want to wait any longer; `None` if it waits for
    /// nobody.
    fn abort_handle(&self) -> Option<AbortHandle> {
        None
    }

    /// Whether it has made up its mind how gradients travel. Until then the buckets should stay as
    /// they are.
    fn is_settled(&self) -> bool {
        true
    }

    /// Takes note of a step that has ended, and of its buckets. If that makes it change how gradients
    /// travel from the next step on, says so. All ranks must call it, between steps.
    fn observe(
        &mut self,
        step: u64,
        layout: &Arc<Layout>,
        times: &StepTimes,
    ) -> Result<Option<Arc<Advice>>, SyncError> {
        let _ = (step, layout, times);
        Ok(None)
    }

    /// Calls `each` at rank 0 with every vector that must be remembered from step to step, by its
    /// name. All ranks must call it, between steps.
    fn save(&self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        let _ = (group, each);
        Ok(())
    }

    /// Goes on from what was [saved](Strategy::save): `find` returns the vector of a name, at rank
    /// 0. All ranks must call it.
    fn restore(&mut self, group: &Group, find: &Find<'_>) -> Result<(), SyncError> {
        let _ = (group, find);
        Ok(())
    }
}

/// What makes one mean of the gradients of a group; without one, of a single worker. The shards may
/// be parts of a batch, or the workers themselves.
pub fn build(
    group: Option<&Group>,
    shards: Shards,
    are_workers: bool,
    parameters: &[Parameter],
    compression: Option<Compression>,
) -> Result<Box<dyn Strategy>, SyncError> {
    if let Some(Compression { rules, .. }) = &compression {
        rules.expect_fits(parameters.iter().map(|parameter| parameter.name.as_str()))?;
    }
    let workers = group.map_or(1, Group::size);
    if workers == 1 && compression.is_none() {
        return Ok(Box::new(Alone::default()));
    }
    let group = match group {
        Some(group) => group.subgroup(&(0..workers).collect::<Vec<_>>())?,
        None => Group::local(1, &Options::default())?.remove(0),
    };
    Ok(match compression {
        None => Box::new(Background::new(AllReduce::new(group, shards))),
        Some(compression) => {
            let compressed = Compressed::new(group, shards, parameters, compression);
            Box::new(Background::new(match are_workers {
                true => compressed.of_replicas(),
                false => compressed,
            }))
        }
    })
}

/// Takes a vector that is to be saved: its name, the parameter it belongs to, its values.
pub type Save<'a> = dyn FnMut(String, usize, &[f32]) + 'a;

/// Finds the vector that was saved by a name.
pub type Find<'a> = dyn Fn(&str) -> Option<Vec<f32>> + 'a;

/// The content of a bucket, on its way through a strategy.
#[derive(Debug)]
pub struct Gradients {
    /// Which bucket.
    pub bucket: usize,
    /// What lies where in it.
    pub layout: Arc<Layout>,
    /// The step, counted from 0.
    pub step: u64,
    /// Whether it must not be encoded, whatever the strategy.
    pub exact: bool,
    /// What this rank has: one buffer for every subtree that it has summed, or, if the strategy
    /// [wants them](Strategy::wants_leaves), for every shard. What comes back is the mean over all
    /// shards, in the first. The strategy leaves the others alone.
    pub slots: Vec<Vec<f32>>,
    /// How many of the slots are filled.
    pub filled: usize,
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
    /// How much of it was encoding and decoding.
    pub coding: Duration,
}

impl Gradients {
    /// A bucket that is submitted now.
    pub fn new(
        bucket: usize,
        layout: Arc<Layout>,
        step: u64,
        slots: Vec<Vec<f32>>,
        filled: usize,
        shards: usize,
    ) -> Gradients {
        let now = Instant::now();
        let (submitted, started, ended) = (now, now, now);
        let (folding, coding) = (Duration::ZERO, Duration::ZERO);
        Gradients {
            bucket,
            layout,
            step,
            exact: false,
            slots,
            filled,
            shards,
            submitted,
            started,
            ended,
            folding,
            coding,
        }
    }

    /// Turns the sum into the mean: one division, at the root of the tree. What lies behind the
    /// gradients are counts, which stay sums.
    fn divide(&mut self) {
        let (shards, gradients) =
            (self.shards as f32, self.layout.buckets()[self.bucket].gradients);
        self.slots[0][..gradients].iter_mut().for_each(|x| *x /= shards);
    }
}
