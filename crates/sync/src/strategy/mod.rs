//! How the gradients of the workers become one.
//!
//! A strategy makes one mean of a bucket of gradients that is complete on this rank, one bucket after
//! the other, in the same order on every rank. [`AllReduce`] exchanges them as they are,
//! [`Compressed`] in fewer bytes; [`Alone`] is the strategy of a single worker. With [`LocalSteps`], a
//! worker updates its weights by the mean of its own gradients, and it is the weights that the workers
//! agree on, now and then. A [`Queue`] runs the exchanges while the backward pass goes on.

mod all_reduce;
mod alone;
mod compressed;
mod local;
mod queue;
mod spec;

use std::ops::BitOrAssign;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use all_reduce::AllReduce;
pub use alone::{Alone, NoGroup};
pub use compressed::{Compressed, Compression, Remembered, spread};
pub use local::{Agreed, Due, LocalSteps, Round, Schedule};
pub use queue::Queue;
pub use spec::{BadStrategy, Diloco, Local, LocalStepsSpec, StrategySpec};

use unisono_collective::{AbortHandle, Group, Options};

use crate::advice::Advice;
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::shards::Shards;
use crate::slot::Slot;
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

    /// The step from which on a codec is in force, if there is one: `u64::MAX` if it never is, or is
    /// not chosen yet.
    fn encodes_from(&self) -> Option<u64> {
        None
    }

    /// Replaces the first slot of a bucket by the mean over all shards of all ranks; with [local
    /// steps](Strategy::is_local), over those of this rank.
    fn exchange(&mut self, gradients: &mut Gradients) -> Result<(), SyncError>;

    /// The group over which buckets are exchanged, and nothing else; `None` if an exchange does not
    /// wait for other ranks, so that a thread of its own would only cost time.
    fn group(&self) -> Option<&Arc<Group>> {
        None
    }

    /// Bytes this rank has sent so far, on sockets or into shared memory.
    fn sent(&self) -> u64 {
        0
    }

    /// What ends its exchanges, for a caller that does not want to wait any longer; `None` if it does not
    /// wait for other ranks.
    fn abort_handle(&self) -> Option<AbortHandle> {
        self.group().map(|group| group.abort_handle())
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

    /// Whether every worker updates its own weights by its own gradients, so that weights differ
    /// between the steps in which the workers [agree](Strategy::agree).
    fn is_local(&self) -> bool {
        false
    }

    /// Takes the weights, which must be equal on all ranks, as those from which the workers set out.
    fn begin(&mut self, weights: &dyn Weights) {
        let _ = weights;
    }

    /// This worker has updated its weights in a step, the first of which is 1: lets the workers agree
    /// on them, if it is time, and on the loss and what any of them votes for. `None` where gradients are
    /// exchanged: then all of that is agreed already.
    fn agree(
        &mut self,
        step: u64,
        weights: &mut dyn Weights,
        loss: f32,
        votes: Votes,
    ) -> Result<Option<Round>, SyncError> {
        let _ = (step, weights, loss, votes);
        Ok(None)
    }

    /// Ends training after so many steps: makes the weights of all workers equal. All must call it.
    fn settle(&mut self, step: u64, weights: &mut dyn Weights) -> Result<Round, SyncError> {
        let _ = (step, weights);
        Ok(Round::default())
    }

    /// The weights of a parameter that all workers have agreed on last; `None` if all weights are
    /// agreed.
    fn agreed(&self, parameter: usize) -> Option<&[f32]> {
        let _ = parameter;
        None
    }

    /// Gives up on what is under way between steps.
    fn abandon(&mut self) {}

    /// Whether another group can go on without what this strategy remembers, before this step, counted
    /// from 0. By default a strategy remembers nothing.
    fn survives_regroup(&self, step: u64) -> bool {
        let _ = step;
        true
    }

    /// Whether the weights, and the [shared](Strategy::each_shared) vectors, as they are right after the workers have
    /// agreed, are all that a worker needs to go on from there in another group, besides the state of its
    /// optimizer. By default it has no use for that.
    fn has_rounds(&self) -> bool {
        false
    }

    /// Calls `each` with every vector, besides the weights, that is equal on all ranks after they have agreed, and
    /// that a rank needs to go on.
    fn each_shared(&mut self, each: &mut dyn FnMut(&mut [f32])) {
        let _ = each;
    }

    /// Calls `each` at rank 0 with every vector that must be remembered from step to step, by its
    /// name. All ranks must call it, between steps.
    fn save(&mut self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
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

/// What a worker votes for. One vote is enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Votes {
    /// To stop training.
    pub stop: bool,
    /// To leave the group, so that one of other members takes its place.
    pub regroup: bool,
}

impl BitOrAssign for Votes {
    fn bitor_assign(&mut self, other: Votes) {
        self.stop |= other.stop;
        self.regroup |= other.regroup;
    }
}

/// The weights of a worker, wherever they are.
pub trait Weights {
    /// Calls `with` once, with the weights of a parameter.
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32]));

    /// Calls `with` once, with the weights of a parameter, and takes over what it makes of them.
    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32]));

    /// Makes the weights of a parameter these.
    fn set(&mut self, parameter: usize, values: &[f32]) {
        self.change(parameter, &mut |own| own.copy_from_slice(values));
    }

    /// Makes the weights of all parameters these.
    fn set_all(&mut self, values: &[Vec<f32>]) {
        for (parameter, values) in values.iter().enumerate() {
            self.set(parameter, values);
        }
    }

    /// A copy of the weights of so many parameters.
    fn to_vecs(&self, parameters: usize) -> Vec<Vec<f32>> {
        let mut all = Vec::with_capacity(parameters);
        for parameter in 0..parameters {
            self.read(parameter, &mut |weights| all.push(weights.to_vec()));
        }
        all
    }
}

/// The vector of every parameter.
impl Weights for Vec<Vec<f32>> {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        with(&self[parameter]);
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        with(&mut self[parameter]);
    }
}

/// The strategy of these workers; without a group, of a single one.
pub fn build(
    spec: &StrategySpec,
    group: Option<&Group>,
    shards: Shards,
    parameters: &[Parameter],
    compression: Option<Compression>,
) -> Result<Queue, SyncError> {
    match spec.local_steps() {
        None => mean(group, shards, false, parameters, compression),
        Some(plan) => {
            let local = LocalSteps::new(group, parameters, plan, compression)?;
            Ok(Queue::new(Box::new(local)))
        }
    }
}

/// What makes one mean of what the workers have. The shards may be parts of a batch, or the workers
/// themselves.
fn mean(
    group: Option<&Group>,
    shards: Shards,
    are_workers: bool,
    parameters: &[Parameter],
    compression: Option<Compression>,
) -> Result<Queue, SyncError> {
    if let Some(Compression { rules, .. }) = &compression {
        rules.expect_fits(parameters.iter().map(|parameter| parameter.name.as_str()))?;
    }
    let workers = group.map_or(1, Group::size);
    if workers == 1 && compression.is_none() {
        return Ok(Queue::new(Box::new(Alone)));
    }
    let group = match group {
        Some(group) => group.subgroup(&(0..workers).collect::<Vec<_>>())?,
        None => Group::local(1, &Options::default())?.remove(0),
    };
    Ok(Queue::new(match compression {
        None => Box::new(AllReduce::new(group, shards)),
        Some(compression) => {
            let compressed = Compressed::new(group, shards, parameters, compression);
            Box::new(if are_workers { compressed.of_replicas() } else { compressed })
        }
    }))
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
    pub slots: Vec<Slot>,
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
        slots: Vec<Slot>,
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
