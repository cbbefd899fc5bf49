//! Training whose workers do not wait for each other, or not for long.
//!
//! The process that the user starts *leads*: it makes the folder of the run, starts servers and workers,
//! and starts those again that die. The servers record every push in the folder. When the workers are
//! done, the leader fetches the weights, judges the model, and writes the report. With `hogwild` the
//! workers are threads of the leader. Workers that another launcher has started have no leader; then rank 0
//! makes the folder and writes the report.

mod folder;
mod gossip;
mod hogwild;
mod inside;
mod lead;
mod weights;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono::candle::{ModelWeights, ReplicaError};
use unisono::optimizer::OptimizerSpec;
use unisono::relaxed::server::Run;
use unisono::relaxed::spec::Level;
use unisono::sync::Parameter;
use unisono::sync::shards::Shards;
use unisono::sync::strategy::Weights;
use unisono::worker::{Collector, WorkerError};

use super::args::{RelaxedPlan, RunPlan, TrainArgs};
use super::computation::{Learner, Learning};
use super::is_launched;
use super::progress::{Failure, Reporter};
use crate::exit;
use folder::Folder;

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
    plan: &RunPlan,
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
fn optimizer(plan: &RunPlan, level: Level, workers: usize) -> OptimizerSpec {
    level.optimizer(&plan.optimizer, workers as u32)
}

/// Trains until the run is over, or this process is told to stop.
fn train(
    learner: &mut Learner<'_>,
    plan: &RunPlan,
    rank: usize,
    stop: &AtomicBool,
    reporter: &mut Option<Reporter>,
) -> anyhow::Result<()> {
    let slowness = plan.slow.filter(|(slow, _)| *slow == rank).map_or(1.0, |(_, factor)| factor);
    while !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        let Some(step) = learner.replica.next_step()? else { break };
        while learner.compute(step, slowness)? {}
        let stepped = learner.replica.step()?;
        if let Some(reporter) = reporter {
            let (seconds, blocked) = (start.elapsed().as_secs_f64(), stepped.blocked.as_secs_f64());
            // A worker may have more steps than its share; the run is over when all are made.
            let most = plan.steps - u64::from(!learner.replica.worker().is_finished());
            reporter.took(stepped.step.min(most), stepped.loss, seconds, blocked);
        }
    }
    Ok(())
}

/// Says of a loss that was no number any more, if that is why a worker ends, what to do about it, and
/// leaves word for the report. A worker that has no folder of its own may share that of the leader.
fn explain(error: anyhow::Error, plan: &RunPlan, folder: Option<&Folder>) -> anyhow::Error {
    let Some(ReplicaError::Worker(cause @ WorkerError::NotANumber { worker, step })) =
        error.downcast_ref()
    else {
        return error;
    };
    cause.note_in(folder.map(Folder::path).or(plan.run_dir.as_deref()));
    // The error is told whether or not the report can be written.
    if let Some(Err(error)) = folder.map(Folder::leave) {
        log::warn!("no report: {}", crate::one_line(&error));
    }
    anyhow::anyhow!(
        "the loss is no longer a number since step {step} of worker {worker}; lower --learning-rate"
    )
}

/// Gives a model its weights.
fn put(weights: &mut ModelWeights, values: &[Vec<f32>]) {
    for (parameter, values) in values.iter().enumerate() {
        weights.change(parameter, &mut |own| own.copy_from_slice(values));
    }
}

/// What sums the gradients of a worker's shards.
fn collector(
    plan: &RunPlan,
    learning: &Learning,
    rank: usize,
    workers: usize,
) -> anyhow::Result<Collector> {
    let own = Shards::new(plan.shards, workers)?.of(rank, workers);
    let lockstep = plan.relaxed.as_ref().is_some_and(|relaxed| relaxed.level.is_lockstep());
    let parameters = learning.weights().parameters();
    Ok(Collector::new(&parameters, plan.shards, own, lockstep, learning.samples()))
}

/// The folder of the run, which the leader made.
fn run_dir(plan: &RunPlan) -> anyhow::Result<PathBuf> {
    plan.run_dir
        .clone()
        .ok_or_else(|| anyhow::anyhow!("--run-dir: a worker needs the leader's folder"))
}
