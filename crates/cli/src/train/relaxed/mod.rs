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
use unisono::relaxed::server::Run;
use unisono::relaxed::spec::Level;
use unisono::sync::Parameter;
use unisono::sync::optimizer::{LearningRate, OptimizerSpec};

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
    let mut run = Run::new(shapes, optimizer(plan, relaxed.level, workers), relaxed.level);
    if let Some(compression) = &plan.compression {
        let codec = |p: &Parameter| compression.rules.codec(&p.name, &p.shape).cloned();
        run.codecs = parameters.iter().map(codec).collect();
    }
    let pushes = plan.steps.saturating_mul(workers as u64);
    run.total = match relaxed.level {
        Level::Bsp => plan.steps,
        Level::Downpour { push, .. } => pushes.div_ceil(u64::from(push)),
        _ => pushes,
    };
    run.stale = relaxed.stale;
    run.workers = workers as u32;
    run.shards = plan.shards as u32;
    run.seed = plan.seed;
    run.timeout = timeout;
    run
}

/// The optimizer of the weights. Where every worker's gradient is an update by itself, there are as many
/// more of them, each as much shorter: so a learning rate means the same at every level.
fn optimizer(plan: &Plan, level: Level, workers: usize) -> OptimizerSpec {
    let updates = |steps: u64| steps.saturating_mul(workers as u64);
    let (share, updates): (_, &dyn Fn(u64) -> u64) = match level {
        Level::Ssp(_) | Level::SspAuto | Level::Async | Level::Hogwild => (workers, &updates),
        // Of all the steps of all workers, every so many become one.
        Level::Downpour { push, .. } => (1, &move |steps| updates(steps) / u64::from(push)),
        _ => (1, &|steps| steps),
    };
    let rate = match plan.optimizer.learning_rate() {
        LearningRate::Constant(rate) => LearningRate::Constant(rate / share as f64),
        LearningRate::Cosine { peak, floor, warm_up, steps } => LearningRate::Cosine {
            peak: peak / share as f64,
            floor: floor / share as f64,
            warm_up: updates(warm_up),
            steps: updates(steps),
        },
    };
    plan.optimizer.with_learning_rate(rate)
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
        log::warn!("no report: {}", crate::one_line(&error));
    }
}

/// The folder of the run, which the leader made.
fn run_dir(plan: &Plan) -> anyhow::Result<PathBuf> {
    plan.run_dir
        .clone()
        .ok_or_else(|| anyhow::anyhow!("--run-dir: a worker needs the leader's folder"))
}
