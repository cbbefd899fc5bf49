//! What a worker computes: one trait, one file per kind of work.

mod learn;
mod replay;

use std::collections::HashMap;

use unisono::Group;
use unisono::cluster::checkpoint::{Loaded, Snapshot};
use unisono::elastic::ElasticJob;
use unisono::sync::{StepOutcome, Synchronizer};
use unisono::worker::Regrouped;

use super::args::{ComputationSpec, RunPlan};
pub use learn::{Learner, Learning};
use replay::Replayer;

/// One worker's part of the run.
pub trait Computation {
    /// Computes the next of this worker's shards in this step, counted from 0; `false` if all are
    /// computed. The computation is made to take `slowness` times as long.
    fn shard(&mut self, step: u64, slowness: f64) -> anyhow::Result<bool>;

    /// Applies the mean gradient of all workers.
    fn finish(&mut self) -> anyhow::Result<StepOutcome>;

    /// Steps taken by this run and those it continues.
    fn steps(&self) -> u64;

    /// What keeps it in step with the others.
    fn synchronizer(&self) -> &Synchronizer;

    /// How good the model is on held-out data, if that is known.
    fn judge(&self) -> anyhow::Result<Option<Judgement>>;

    /// The hash of the weights.
    fn weights_hash(&self) -> String;

    /// Fails on all ranks if the replicas differ. All ranks must call it.
    fn check(&self, group: &Group) -> anyhow::Result<()>;

    /// Calls `write` with the whole state, at rank 0. All ranks must call it.
    fn save(
        &self,
        group: &Group,
        write: &mut dyn FnMut(Snapshot<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()>;

    /// Goes on from a checkpoint, which only rank 0 has. All ranks must call it.
    fn restore(&mut self, group: &Group, checkpoint: Option<&Loaded>) -> anyhow::Result<()>;

    /// Enters the next epoch of a job; a worker that joins is level with the members then, if it can be.
    fn enter(&mut self, job: &mut ElasticJob) -> anyhow::Result<Option<Group>>;

    /// From now on hands the state to workers that join, beside the training.
    fn hand_over(&mut self, job: &ElasticJob);

    /// Goes on in another group, with the state of those that have the most. All ranks must call it.
    fn regroup(&mut self, group: &Group) -> anyhow::Result<Regrouped>;

    /// The whole state, in the memory of rank 0; `None` elsewhere. All ranks must call it.
    fn keep(&self, group: &Group) -> anyhow::Result<Option<Kept>>;

    /// Goes on from what rank 0 has kept, and no other has. All ranks must call it.
    fn restore_kept(&mut self, group: &Group, kept: Option<&Kept>) -> anyhow::Result<()>;

    /// Begins the run, with the weights of rank 0. All ranks must call it.
    fn begin_anew(&mut self, group: &Group) -> anyhow::Result<()>;

    /// Ends training: makes the weights of all workers equal. All ranks must call it.
    fn settle(&mut self) -> anyhow::Result<()>;
}

/// A state that was kept in memory.
pub struct Kept {
    steps: u64,
    values: HashMap<String, Vec<f32>>,
}

/// How good a model is.
#[derive(Clone, Copy, Debug)]
pub struct Judgement {
    /// The share of right answers.
    pub accuracy: f64,
    /// The mean loss.
    pub loss: f64,
}

/// Makes this worker's part of the run.
pub fn build(plan: &RunPlan, group: &Group) -> anyhow::Result<Box<dyn Computation>> {
    Ok(match &plan.computation {
        ComputationSpec::Learn { .. } => Box::new(Learner::agreeing(plan, group)?),
        ComputationSpec::Replay { spec, compute_ms } => {
            Box::new(Replayer::new(plan, spec, *compute_ms, group)?)
        }
    })
}

/// Makes the part of a worker that is not in a group yet.
pub fn waiting(plan: &RunPlan) -> anyhow::Result<Box<dyn Computation>> {
    Ok(Box::new(Learner::waiting(plan)?))
}

/// Sleeps as long as it takes to make a computation of this length `slowness` times as long.
pub fn slow_down(computed: std::time::Duration, slowness: f64) {
    if slowness > 1.0 {
        std::thread::sleep(computed.mul_f64(slowness - 1.0));
    }
}
