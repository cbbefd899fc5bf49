//! One worker's part of a run: the loop over its steps, in one group.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use unisono::elastic::Session;
use unisono::insight::Scaling;
use unisono::net::crash;
use unisono::recording::steps::StepRecorder;
use unisono::{Group, Reduction};

use super::args::RunPlan;
use super::checkpoint::save;
use super::computation::Computation;
use super::rank_zero::RankZero;

/// One worker's part of a run.
pub struct Part<'a> {
    pub plan: &'a RunPlan,
    pub computation: Box<dyn Computation>,
    /// At rank 0.
    pub rank_zero: Option<RankZero>,
    pub recorder: StepRecorder,
    /// Whether this process was told to stop.
    pub stop: Arc<AtomicBool>,
    interrupted: bool,
    diverged: bool,
    /// The step since which this worker's loss, as far as it knows it, is no number.
    lost_since: Option<u64>,
}

/// Why a worker has left the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The run is over.
    Over,
    /// All workers of the group have agreed to let others in.
    Regroup,
}

impl<'a> Part<'a> {
    pub fn new(
        plan: &'a RunPlan,
        computation: Box<dyn Computation>,
        rank_zero: Option<RankZero>,
        recorder: StepRecorder,
        stop: Arc<AtomicBool>,
    ) -> Part<'a> {
        let (interrupted, diverged, lost_since) = (false, false, None);
        Part { plan, computation, rank_zero, recorder, stop, interrupted, diverged, lost_since }
    }

    /// Trains in the present group until the run is over, or until all workers agree to leave the group.
    pub fn train(&mut self, session: &mut Session) -> anyhow::Result<Until> {
        let Part { plan, computation, rank_zero, recorder, .. } = self;
        let slowness = plan.slowness(present(session)?.rank());
        computation.synchronizer().begin_step();
        while computation.steps() < plan.steps && !self.interrupted && !self.diverged {
            let step = computation.steps();
            if self.stop.load(Ordering::Relaxed) {
                computation.synchronizer().vote_to_stop();
            }
            session.vote(computation.synchronizer());
            crash::point("step");
            let mut own = computation.synchronizer().shards();
            session.note_shard(own.next())?;
            while computation.shard(step, slowness)? {
                session.note_shard(own.next())?;
                crash::point("shard");
                // What is computed for a group that has failed is in vain.
                if let Some(error) = present(session)?.failure() {
                    bail!(error);
                }
            }
            crash::point("computed");
            let outcome = computation.finish()?;
            crash::point("applied");
            // The same on all ranks, as the loss is if they have agreed on it.
            self.interrupted = outcome.agreed && outcome.stop;
            self.diverged = outcome.agreed && !outcome.loss.is_finite();
            self.lost_since = match outcome.loss.is_finite() {
                true => None,
                false => self.lost_since.or(Some(computation.steps())),
            };
            recorder.note(computation.steps(), &outcome, computation.synchronizer().sent());
            if let (Some(rank_zero), Some(advice)) = (&rank_zero, &outcome.advice) {
                rank_zero.advise(advice);
                if let Err(error) = recorder.advise(computation.steps(), advice) {
                    say!(
                        "unisono: warning: {error}; the report will not say why this codec was chosen"
                    );
                }
            }
            if let Some(rank_zero) = rank_zero {
                rank_zero.reporter.step(computation.steps(), &outcome);
            }
            session.stepped(computation.steps(), &outcome)?;
            let group = present(session)?;
            let mut over = computation.steps() == plan.steps || self.interrupted || self.diverged;
            let due = |every: u64| every > 0 && computation.steps().is_multiple_of(every);
            // Decided alike on all ranks, for they must all take part in what follows.
            let checks = plan.check_every > 0 && (due(plan.check_every) || over);
            let saves = plan.checkpoint_dir.is_some() && (due(plan.checkpoint_every) || over);
            let hands_in = recorder.is_due() || over;
            if !outcome.agreed && (checks || saves || hands_in) {
                // A worker that steps by itself cannot tell the others before they talk anyway.
                self.diverged = earliest(self.lost_since, group)?.is_some();
                over |= self.diverged;
            }
            // A checkpoint of a run that is lost would only push out a good one.
            let (saves, hands_in) = (saves && !self.diverged, hands_in || over);
            if checks {
                computation.check(group)?;
            }
            if saves {
                let saver = rank_zero.as_mut().and_then(|rank_zero| rank_zero.saver.as_mut());
                save(plan, &**computation, saver, group)?;
                crash::point("saved");
            }
            if hands_in && let Err(error) = recorder.hand_in(group)? {
                say!(
                    "unisono: warning: {error}; the run goes on, and its report will be incomplete"
                );
            }
            if checks || saves || hands_in {
                // That was no part of the next step.
                group.barrier()?;
                computation.synchronizer().begin_step();
            }
            if session.is_leaving() && !over {
                return Ok(Until::Regroup);
            }
        }
        computation.settle()?;
        Ok(Until::Over)
    }

    /// Sums the run up, at rank 0: what it has to say of it.
    pub fn sum_up(
        &mut self,
        scaling: Option<Scaling>,
        json: bool,
    ) -> anyhow::Result<Option<String>> {
        let Some(rank_zero) = self.rank_zero.take() else { return Ok(None) };
        let recorder = std::mem::replace(&mut self.recorder, StepRecorder::waiting(0));
        let Part { plan, computation, interrupted, .. } = self;
        rank_zero.end(plan, &**computation, recorder, scaling, *interrupted, json).map(Some)
    }

    /// Whether the run was told to stop.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Fails if the loss is no longer a number. All ranks must call it.
    pub fn expect_finite_loss(&self, group: &Group) -> anyhow::Result<()> {
        if !self.diverged {
            return Ok(());
        }
        let step = earliest(self.lost_since, group)?.unwrap_or(self.computation.steps());
        let rate = self.plan.optimizer.learning_rate();
        let advice = match self.plan.checkpoint_dir {
            Some(_) => "go on from the last checkpoint by --resume with a lower --learning-rate",
            None => "start again with a lower --learning-rate",
        };
        bail!("the loss is no longer a number since step {step}; {advice} (it was {rate})");
    }
}

/// The group that a worker trains in.
pub fn present(session: &Session) -> anyhow::Result<&Group> {
    session.group().context("this worker is in no group")
}

/// The earliest step that any rank names. All ranks must call it.
fn earliest(step: Option<u64>, group: &Group) -> anyhow::Result<Option<u64>> {
    let mut first = [step.map_or(i64::MAX, |step| step as i64)];
    group.all_reduce(&mut first, Reduction::Min)?;
    Ok((first[0] < i64::MAX).then_some(first[0] as u64))
}
