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
pub use lead::without_run_dir;
mod weights;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use unisono::candle::ReplicaError;
use unisono::relaxed::spec::Level;
use unisono::worker::WorkerError;

use super::args::{RunPlan, TrainArgs};
use super::computation::Learner;
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

/// Trains until the run is over, or this process is told to stop.
fn train(
    learner: &mut Learner<'_>,
    plan: &RunPlan,
    rank: usize,
    stop: &AtomicBool,
    reporter: &mut Option<Reporter>,
) -> anyhow::Result<()> {
    let slowness = plan.slowness(rank);
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

/// The folder of the run, which the leader made.
fn run_dir(plan: &RunPlan) -> anyhow::Result<PathBuf> {
    plan.run_dir
        .clone()
        .ok_or_else(|| anyhow::anyhow!("--run-dir: a worker needs the leader's folder"))
}
