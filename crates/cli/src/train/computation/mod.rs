//! What a worker computes: one trait, one file per kind of work.

mod learn;
mod replay;

use unisono::Group;
use unisono::candle::ReplicaError;
use unisono::cluster::checkpoint::{Loaded, Snapshot};
use unisono::elastic::Trainee;
use unisono::sync::{StepOutcome, Synchronizer};

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

    /// What workers that come and go take from one group to the next; fails if it has nothing of that kind.
    fn trainee(&mut self) -> anyhow::Result<&mut dyn Trainee<Error = ReplicaError>>;

    /// Ends training: makes the weights of all workers equal. All ranks must call it.
    fn settle(&mut self) -> anyhow::Result<()>;
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
