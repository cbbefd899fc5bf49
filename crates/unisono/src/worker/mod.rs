//! One worker of a run, at whatever consistency level.
//!
//! What all levels have in common is a loop. A worker is given the number of the step to compute, and the
//! weights to compute it from; computes the gradients of its shards of that step; and hands them over:
//!
//! ```
//! use unisono::prelude::*;
//! use unisono::worker::{Training, train};
//!
//! // y = 2x, one weight. The level is the only thing that a program has to change.
//! let training = Training::new("ssp:3".parse()?, "sgd".parse()?, 4, 50);
//! let totals = train(&training, |seat| {
//!     let mut weights = vec![vec![0.0f32]];
//!     let mut worker = seat.join(vec![Parameter::flat("slope", 1)], &mut weights)?;
//!     while let Some(step) = worker.begin_step(&mut weights)? {
//!         while let Some(shard) = worker.next_shard() {
//!             let x = (step as usize + shard) as f32 % 3.0;
//!             let error = weights[0][0] * x - 2.0 * x;
//!             worker.backward(error * error, [(0, &[2.0 * error * x][..])]);
//!         }
//!         worker.step(&mut weights)?;
//!     }
//!     worker.finish(&mut weights)
//! })?;
//! assert!(totals[0].steps >= 50);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What differs is what a level [promises](Guarantee): whether the workers compute with equal weights, how
//! far they may drift apart, what a lost worker costs, and how an interrupted run goes on.
//!
//! Workers are processes, of which each calls [`train`]'s body once. With `hogwild` they are threads of
//! one process: there the body is called once on every thread, and is otherwise the same.

mod agreeing;
mod collector;
mod consistency;
mod gossiping;
// Of this crate, only replicas of candle models hand over their state.
#[cfg_attr(not(feature = "candle"), allow(dead_code))]
mod handing;
mod hogwild;
mod joining;
mod served;
mod training;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use unisono_collective::{Error, Group};
use unisono_insight::folder::FolderError;
use unisono_insight::relaxed::{Diverged, RelaxedFolder};
use unisono_optimizer::{BadOptimizer, OptimizerSpec, WrongState};
use unisono_relaxed::gossip::GossipError;
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{Pushed, ServerError};
use unisono_sync::accumulate::Values;
use unisono_sync::strategy::Weights;
use unisono_sync::{Parameter, Settings, StepOutcome, SyncError, Synchronizer, divergence};

use crate::job::JoinError;

#[cfg(feature = "candle")]
pub(crate) use handing::Joining;

pub use agreeing::{Agreeing, Find, Keep, Regrouped};
pub use collector::{Collected, Collector};
pub use consistency::{BadConsistency, Consistency, EqualWeights, Guarantee, Resumes};
pub use gossiping::{GossipLog, Gossiping};
pub use hogwild::{Hogwild, SharedModel};
pub use served::Served;
pub use training::{PATIENCE, Seat, Servers, Totals, Training, train};

/// One worker of a run. After an error it is of no more use: its weights are those of no step, and
/// further calls may panic. A worker that agrees with others may [go on](Worker::regroup) in another group.
pub struct Worker<'a> {
    level: Level<'a>,
    parameters: Vec<Parameter>,
    rank: usize,
    /// The step under way, from 0.
    step: u64,
    shards_begun: usize,
    /// Where it took a seat.
    part: Option<training::Part<'a>>,
}

enum Level<'a> {
    Agreeing(Agreeing),
    Relaxed(Arc<Collector>, Box<dyn Relaxed + 'a>),
}

/// A level at which workers do not agree step by step.
pub trait Relaxed: Send {
    /// Puts the weights for the next step in place; its number, from 0, or `None` if the run is over.
    fn begin_step(&mut self, weights: &mut dyn Weights) -> Result<Option<u64>, WorkerError>;

    /// Does with the gradients of a step what the level does with them.
    fn end_step(
        &mut self,
        collected: &Collected,
        weights: &mut dyn Weights,
    ) -> Result<Stepped, WorkerError>;

    /// Bytes sent so far; where servers count what they send as well, that included.
    fn sent(&self) -> u64;

    /// Whether all steps are made.
    fn is_finished(&self) -> bool;

    /// How often this worker has averaged with another, where workers do so by themselves.
    fn exchanges(&self) -> Option<u64> {
        None
    }

    /// Leaves the run, so that no other worker waits for this one. The weights become those that this
    /// worker had last.
    fn leave(self: Box<Self>, weights: &mut dyn Weights) -> Result<(), WorkerError>;
}

/// What came of a step.
#[derive(Clone, Debug)]
pub struct Stepped {
    /// The step that has ended, from 1.
    pub step: u64,
    /// The mean loss: over all shards where the workers have agreed on it, else over this worker's.
    pub loss: f32,
    /// Time in which this worker did nothing but wait.
    pub blocked: Duration,
    /// Where workers agree: on what, and when things happened.
    pub outcome: Option<StepOutcome>,
    /// Where there are servers: what became of the push, if there was one.
    pub pushed: Option<Pushed>,
}

impl Stepped {
    fn by_itself(step: u64, measured: Measured, blocked: Duration) -> Stepped {
        Stepped { step, loss: measured.loss, blocked, outcome: None, pushed: None }
    }
}

/// Where a model hands over its gradients, as backward produces them.
#[derive(Clone)]
pub enum GradientSink {
    /// To be summed with those of the other workers.
    Synchronizer(Arc<Synchronizer>),
    /// To be summed by themselves.
    Collector(Arc<Collector>),
}

impl GradientSink {
    /// Takes a parameter's gradient in the shard under way. `false` if there is no shard under way:
    /// then the gradient is not for us.
    pub fn gradient_from(&self, parameter: usize, gradient: &impl Values) -> bool {
        match self {
            GradientSink::Synchronizer(to) => to.gradient_from(parameter, gradient),
            GradientSink::Collector(to) => to.gradient_from(parameter, gradient),
        }
    }

    /// The forward pass of the shard is done, with this loss; gradients come next.
    pub fn begin_backward(&self, loss: f32) {
        match self {
            GradientSink::Synchronizer(to) => to.begin_backward(loss),
            GradientSink::Collector(to) => to.begin_backward(loss),
        }
    }

    /// Ends the shard under way. Parameters that got no gradient have none in it.
    pub fn end_shard(&self) {
        match self {
            GradientSink::Synchronizer(to) => to.end_shard(),
            GradientSink::Collector(to) => to.end_shard(),
        }
    }

    fn begin_shard(&self) -> usize {
        match self {
            GradientSink::Synchronizer(to) => to.begin_shard(),
            GradientSink::Collector(to) => to.begin_shard(),
        }
    }
}

impl<'a> Worker<'a> {
    /// A worker that agrees with those of a group. Makes the weights equal on all ranks, to those of rank
    /// 0. All ranks call this with the same parameters, settings and optimizer.
    pub fn agreeing(
        group: &Group,
        parameters: Vec<Parameter>,
        settings: Settings,
        optimizer: &OptimizerSpec,
        weights: &mut dyn Weights,
    ) -> Result<Worker<'a>, WorkerError> {
        let (rank, named) = (group.rank(), parameters.clone());
        let agreeing = Agreeing::new(group, parameters, settings, optimizer, weights)?;
        let level = Level::Agreeing(agreeing);
        Ok(Worker { level, parameters: named, rank, step: 0, shards_begun: 0, part: None })
    }

    /// A worker that is going to agree with those of a group, and is in none yet. [`Worker::regroup`] brings
    /// it into one and gives it the weights.
    pub fn waiting(
        parameters: Vec<Parameter>,
        settings: Settings,
        optimizer: &OptimizerSpec,
    ) -> Result<Worker<'a>, WorkerError> {
        let level = Level::Agreeing(Agreeing::waiting(parameters.clone(), settings, optimizer)?);
        Ok(Worker { level, parameters, rank: 0, step: 0, shards_begun: 0, part: None })
    }

    /// Goes on in another group, all of whose ranks call this: see [`Agreeing::regroup`].
    pub fn regroup(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
    ) -> Result<Regrouped, WorkerError> {
        self.regroup_with(group, weights, (&mut Vec::new(), 0))
    }

    /// As [`Worker::regroup`], with so many parameters that are not trained.
    pub(crate) fn regroup_with(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
        frozen: (&mut dyn Weights, usize),
    ) -> Result<Regrouped, WorkerError> {
        let agreeing = self.as_agreeing_mut().ok_or(WorkerError::NotAgreeing)?;
        let regrouped = agreeing.regroup_with(group, weights, frozen);
        (self.rank, self.shards_begun) = (group.rank(), 0);
        regrouped
    }

    /// A worker that does not: its gradients are summed by the collector.
    pub fn relaxed(
        rank: usize,
        parameters: Vec<Parameter>,
        collector: Collector,
        level: impl Relaxed + 'a,
    ) -> Worker<'a> {
        let level = Level::Relaxed(Arc::new(collector), Box::new(level));
        Worker { level, parameters, rank, step: 0, shards_begun: 0, part: None }
    }

    /// Puts the weights for the next step in place; its number, from 0, or `None` if the run is over.
    /// Where workers agree, the weights are in place; without a [`Seat`] it is up to the caller when to end.
    pub fn begin_step(&mut self, weights: &mut dyn Weights) -> Result<Option<u64>, WorkerError> {
        let step = match &mut self.level {
            Level::Agreeing(agreeing) => {
                let step = agreeing.steps();
                Some(step)
                    .filter(|step| !self.part.as_ref().is_some_and(|part| part.is_over(*step)))
            }
            Level::Relaxed(_, level) => level.begin_step(weights)?,
        };
        self.step = step.unwrap_or(self.step);
        Ok(step)
    }

    /// The shards of every step whose gradients this worker computes.
    pub fn shards(&self) -> Range<usize> {
        match &self.level {
            Level::Agreeing(agreeing) => agreeing.synchronizer().shards(),
            Level::Relaxed(collector, _) => collector.shards(),
        }
    }

    /// The next shard of the present step whose gradients this worker should compute. `None` when it has
    /// computed all of its shards: it is time for [`Worker::step`].
    pub fn next_shard(&mut self) -> Option<usize> {
        if self.shards_begun == self.shards().len() {
            return None;
        }
        self.shards_begun += 1;
        Some(self.gradients().begin_shard())
    }

    /// Where a model hands over the gradients of a shard as backward produces them, so that they travel
    /// while it goes on.
    pub fn gradients(&self) -> GradientSink {
        match &self.level {
            Level::Agreeing(of) => GradientSink::Synchronizer(of.synchronizer().clone()),
            Level::Relaxed(collector, _) => GradientSink::Collector(collector.clone()),
        }
    }

    /// Hands over the loss of a shard, its mean over the samples, and the gradients of the parameters
    /// that have one.
    pub fn backward<'g>(
        &mut self,
        loss: f32,
        gradients: impl IntoIterator<Item = (usize, &'g [f32])>,
    ) {
        let sink = self.gradients();
        sink.begin_backward(loss);
        for (parameter, gradient) in gradients {
            let elements = self.parameters[parameter].elements();
            assert_eq!(gradient.len(), elements, "the length of a gradient");
            sink.gradient_from(parameter, &gradient);
        }
        sink.end_shard();
    }

    /// Ends the step: does with its gradients what the level does with them, and updates the weights.
    pub fn step(&mut self, weights: &mut dyn Weights) -> Result<Stepped, WorkerError> {
        let stepped = self.end_step(weights);
        let (sent, mut part) = (self.sent(), self.part.take());
        if let Some(part) = &mut part {
            match &stepped {
                Ok(stepped) => part.note(stepped, sent, self.as_agreeing())?,
                Err(error) => part.note_error(error),
            }
        }
        self.part = part;
        stepped
    }

    fn end_step(&mut self, weights: &mut dyn Weights) -> Result<Stepped, WorkerError> {
        self.shards_begun = 0;
        match &mut self.level {
            Level::Agreeing(agreeing) => {
                let outcome = agreeing.step(weights)?;
                let (step, loss, blocked) = (agreeing.steps(), outcome.loss, outcome.times.blocked);
                Ok(Stepped { step, loss, blocked, outcome: Some(outcome), pushed: None })
            }
            Level::Relaxed(collector, level) => {
                let collected = collector.finish();
                if !collected.measured().loss.is_finite() {
                    // Its gradient would spoil the weights of all.
                    return Err(WorkerError::NotANumber { worker: self.rank, step: self.step });
                }
                level.end_step(&collected, weights)
            }
        }
    }

    /// The part of a worker that agrees with others.
    pub fn as_agreeing(&self) -> Option<&Agreeing> {
        match &self.level {
            Level::Agreeing(agreeing) => Some(agreeing),
            Level::Relaxed(..) => None,
        }
    }

    /// As above.
    pub fn as_agreeing_mut(&mut self) -> Option<&mut Agreeing> {
        match &mut self.level {
            Level::Agreeing(agreeing) => Some(agreeing),
            Level::Relaxed(..) => None,
        }
    }

    /// Whether all steps are made, where that is not up to the caller.
    pub fn is_finished(&self) -> bool {
        match &self.level {
            Level::Agreeing(_) => false,
            Level::Relaxed(_, level) => level.is_finished(),
        }
    }

    /// How often this worker has averaged with another, where workers do so by themselves.
    pub fn exchanges(&self) -> Option<u64> {
        match &self.level {
            Level::Agreeing(_) => None,
            Level::Relaxed(_, level) => level.exchanges(),
        }
    }

    /// Bytes this worker has sent so far; where servers count what they send as well, that included.
    pub fn sent(&self) -> u64 {
        match &self.level {
            Level::Agreeing(agreeing) => agreeing.synchronizer().sent(),
            Level::Relaxed(_, level) => level.sent(),
        }
    }

    /// Leaves the run. The weights become equal where workers agree, else those this worker had last.
    pub fn leave(self, weights: &mut dyn Weights) -> Result<(), WorkerError> {
        match self.level {
            Level::Agreeing(mut agreeing) => agreeing.settle(weights),
            Level::Relaxed(_, level) => level.leave(weights),
        }
    }

    /// This worker among all of them.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

/// The hash of weights, by which models with equal ones are known.
pub fn weights_hash(parameters: &[Parameter], weights: &dyn Weights) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for (number, Parameter { name, .. }) in parameters.iter().enumerate() {
        weights.read(number, &mut |values| {
            hasher.update(divergence::hash_all([(name.as_str(), values)]).as_bytes());
        });
    }
    hasher.finalize()
}

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The workers could not be kept in step.
    #[error(transparent)]
    Sync(#[from] SyncError),
    /// A server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The other replicas.
    #[error(transparent)]
    Gossip(#[from] GossipError),
    /// The folder of the run.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The optimizer's settings make no sense.
    #[error(transparent)]
    Optimizer(#[from] BadOptimizer),
    /// The state belongs to another model or optimizer.
    #[error(transparent)]
    State(#[from] WrongState),
    /// The saved state lacks something, or has it in another size: it is another model's.
    #[error("the saved state has no {name} of the right size: it is of another model")]
    Missing {
        /// What is missing.
        name: String,
    },
    /// Only plain gradient descent changes single weights without a lock.
    #[error(
        "hogwild updates single weights without a lock, which only plain gradient descent can; use sgd \
         without weight decay instead of {optimizer}"
    )]
    NotLockFree {
        /// The optimizer that was asked for.
        optimizer: &'static str,
    },
    /// The run has ended, or another thread of it has failed.
    #[error("the run has ended")]
    Ended,
    /// Checkpoints and groups that change are for workers that agree. At other levels the servers have
    /// journals.
    #[error(
        "there are checkpoints with all-reduce, local and diloco only; at other levels give the servers a journal"
    )]
    NotAgreeing,
    /// The process could not join its job.
    #[error(transparent)]
    Join(Box<JoinError>),
    /// The environment makes no sense. Fix how the process is started.
    #[error(transparent)]
    Environment(Box<unisono_cluster::worker::WorkerError>),
    /// The server inside this worker.
    #[error(transparent)]
    ServerInside(Box<unisono_relaxed::server::StartError>),
    /// The run could not be recorded.
    #[error(transparent)]
    Record(Box<crate::recording::RecordError>),
    /// The system has no random numbers, of which a token is made.
    #[error("the system has no random numbers for a token")]
    NoRandomness,
    /// No port could be opened.
    #[error("cannot listen on {ip}: {source}")]
    Listen {
        /// Where.
        ip: std::net::IpAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The loss is no number any more. Nothing of that step was pushed. Lower the learning rate.
    #[error(
        "the loss is no longer a number since step {step} of worker {worker}; lower the learning rate"
    )]
    NotANumber {
        /// Whose.
        worker: usize,
        /// In which step, from 0.
        step: u64,
    },
}

impl WorkerError {
    /// Leaves word of a loss that was no number any more in the folder of a relaxed run, for its report,
    /// if that is what went wrong. The error is told whether or not that can be written.
    pub fn note_in(&self, dir: Option<&Path>) {
        let (WorkerError::NotANumber { worker, step }, Some(dir)) = (self, dir) else { return };
        let diverged = Diverged { worker: *worker as u32, step: *step };
        if RelaxedFolder::is_relaxed(dir)
            && let Err(error) = RelaxedFolder::diverge(dir, &diverged)
        {
            log::warn!("no report: {error}");
        }
    }
}

impl From<Error> for WorkerError {
    fn from(error: Error) -> WorkerError {
        WorkerError::Sync(error.into())
    }
}

/// Errors of which few are made, and which are large.
macro_rules! boxed {
    ($($error:ty => $variant:ident,)*) => {
        $(impl From<$error> for WorkerError {
            fn from(error: $error) -> WorkerError {
                WorkerError::$variant(Box::new(error))
            }
        })*
    };
}

boxed! {
    JoinError => Join,
    unisono_cluster::worker::WorkerError => Environment,
    unisono_relaxed::server::StartError => ServerInside,
    crate::recording::RecordError => Record,
}
