//! Training whose workers do not wait for each other, or not for long.
//!
//! The process that the user starts *leads*: it makes the folder of the run, starts servers and workers,
//! and starts those again that die. The servers record every push in the folder. When the workers are
//! done, the leader fetches the weights, judges the model, and writes the report. With `hogwild` the
//! workers are threads of the leader. Workers that somebody else has started have no leader; then rank 0
//! makes the folder and writes the report.

mod gossip;
mod hogwild;
mod home;
mod inside;
mod lead;
pub mod student;
mod weights;
mod worker;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use unisono::insight::relaxed::{Diverged, RelaxedFolder};
use unisono::optimizer::OptimizerSpec;
use unisono::relaxed::server::Run;
use unisono::relaxed::spec::Level;
use unisono::sync::Parameter;

use super::args::{Plan, RelaxedPlan, TrainArgs};
use super::is_launched;
use super::progress::Failure;
use crate::exit;
use home::Home;
use student::Computed;

/// Leads a run, or is one of its workers.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    if args.level() == Some(Level::Hogwild) {
        return hogwild::run(args);
    }
    if !args.as_worker && !is_launched() {
        return lead::run(args);
    }
    match worker::run(args) {
        Err(error) if args.as_worker => {
            Failure { reason: crate::one_line(&error), consequence: false }.tell();
            Ok(ExitCode::from(exit::code(&error)))
        }
        outcome => outcome,
    }
}

/// The run, as servers are told.
fn described(
    plan: &Plan,
    relaxed: &RelaxedPlan,
    parameters: &[Parameter],
    workers: usize,
    timeout: Duration,
) -> Run {
    let shapes = parameters.iter().map(|parameter| parameter.shape.clone()).collect();
    let (workers, steps) = (workers as u32, Some(plan.steps));
    let mut run = Run::of_steps(shapes, &plan.optimizer, relaxed.level, workers, steps);
    if let Some(compression) = &plan.compression {
        let codec = |p: &Parameter| compression.rules.codec(&p.name, &p.shape).cloned();
        run.codecs = parameters.iter().map(codec).collect();
    }
    run.stale = relaxed.stale;
    run.shards = plan.shards as u32;
    run.seed = plan.seed;
    run.timeout = timeout;
    run
}

/// The optimizer of the weights that workers share.
fn optimizer(plan: &Plan, level: Level, workers: usize) -> OptimizerSpec {
    level.optimizer(&plan.optimizer, workers as u32)
}

/// A loss that was no number any more.
#[derive(Debug)]
struct NoNumber(Diverged);

impl std::error::Error for NoNumber {}

impl fmt::Display for NoNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diverged { worker, step } = self.0;
        write!(
            f,
            "the loss is no longer a number since step {step} of worker {worker}; lower --learning-rate"
        )
    }
}

/// Fails if the loss of a step is no number any more: its gradient would spoil the weights of all.
fn expect_number(computed: &Computed, worker: usize, step: u64) -> anyhow::Result<()> {
    ensure!(computed.loss.is_finite(), NoNumber(Diverged { worker: worker as u32, step }));
    Ok(())
}

/// Leaves word for the report of a loss that was no number any more, if that is why a worker ends. A
/// worker that has no folder of its own may share that of the leader.
fn note_divergence(plan: &Plan, home: Option<&Home>, error: &anyhow::Error) {
    let Some(NoNumber(diverged)) = error.downcast_ref() else { return };
    let dir = home.map(Home::path).or(plan.run_dir.as_deref());
    let Some(dir) = dir.filter(|dir| RelaxedFolder::is_relaxed(dir)) else { return };
    // The error is told whether or not the report can be written.
    let written = RelaxedFolder::diverge(dir, diverged).map_err(anyhow::Error::from);
    let written = written.and_then(|()| home.map_or(Ok(()), |home| home.leave().map(drop)));
    if let Err(error) = written {
        log::warn!("no report: {error:#}");
    }
}

/// The folder of the run, which the leader made.
fn run_dir(plan: &Plan) -> anyhow::Result<PathBuf> {
    plan.run_dir
        .clone()
        .ok_or_else(|| anyhow::anyhow!("--run-dir: a worker needs the leader's folder"))
}
