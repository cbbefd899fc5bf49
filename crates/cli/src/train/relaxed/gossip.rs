//! A worker that averages with changing partners.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Context;
use unisono::insight::relaxed::RelaxedFolder;
use unisono::insight::relaxed::folder::Log;
use unisono::insight::updates::UpdateRecord;
use unisono::relaxed::Life;
use unisono::relaxed::gossip::{Gossip, GossipConfig};
use unisono::sync::strategy::Weights as _;
use unisono::worker::{GossipLog, Gossiping, Worker};

use super::super::args::{RunPlan, TrainArgs};
use super::super::computation::{Learner, Learning};
use super::super::progress::Reporter;
use super::worker::{WorkerPlace, need_leader, peers};
use super::{explain, run_dir, train, weights as files};
use crate::serve;

/// Trains its replica, and exchanges after every step.
pub fn run(args: &TrainArgs, plan: &RunPlan, place: &WorkerPlace) -> anyhow::Result<ExitCode> {
    let listener = serve::inherited()?.with_context(|| need_leader("--strategy gossip"))?;
    let dir = run_dir(plan)?;
    let learning = Learning::load(plan)?;
    let weights = learning.weights();
    let parameters = weights.parameters();
    let lengths: Vec<usize> = parameters.iter().map(|p| p.elements()).collect();
    let optimizer = plan.optimizer.build(&lengths)?;
    let config = GossipConfig {
        rank: place.rank as u32,
        life: Life(place.starts),
        addresses: peers()?,
        listener,
        token: serve::token()?,
        timeout: args.options()?.timeout,
        seed: plan.seed,
        is_cut: None,
    };
    let began = began(&dir)?;
    let mut updates = 0;
    let path = RelaxedFolder::updates(&dir, place.rank);
    let log = Log::reopen_keeping(path, |record: &UpdateRecord| {
        updates = updates.max(record.update);
        true
    })?;
    // One that has done nothing yet has all its steps before it, however late it starts and however far
    // the others are: they are the steps that were asked for.
    let is_new = updates == 0;
    let initial = match left_behind(&dir, place) {
        Some(left) if is_new => files::read(&left, &lengths)?,
        _ => weights.to_vecs(parameters.len()),
    };
    let gossip = Gossip::start(config, initial)?;
    if !is_new
        && gossip.joined().is_none()
        && let Some(left) = left_behind(&dir, place)
    {
        // Killed on the last stretch, and the others have left: the run ends with the weights of one of them.
        return files::copy(&left, &files::path(&dir, place.rank)).map(|()| ExitCode::SUCCESS);
    }
    let mut step = 0;
    if is_new {
        gossip.begin_anew();
    } else {
        step = gossip.joined().map_or(0, |joined| joined.clock.0);
    }
    let mut reporter = (place.rank == 0)
        .then(|| Reporter::new(plan.steps, plan.batch / place.workers, args.as_worker));
    let (rank, workers) = (place.rank as u32, place.workers as u32);
    let log = GossipLog::new(log, updates, began, rank, place.starts, workers);
    let count = parameters.len();
    let level = Gossiping::new(gossip, optimizer, count, step, plan.steps, Some(log));
    let collector = plan.training()?.collector(&parameters, place.rank, place.workers)?;
    let mut learner =
        Learner::of(learning, Worker::relaxed(place.rank, parameters, collector, level))?;
    train(&mut learner, plan, place.rank, &place.stop, &mut reporter)
        .map_err(|error| explain(error, plan, None))?;
    let done = learner.replica.worker().exchanges().unwrap_or(0);
    std::fs::write(exchanges(&dir, place.rank), done.to_string()).context("counting exchanges")?;
    let weights = learner.finish()?.weights();
    files::write(&files::path(&dir, place.rank), &weights.to_vecs(count))?;
    if let Some(reporter) = reporter {
        reporter.finish();
    }
    Ok(ExitCode::SUCCESS)
}

/// Where a worker says how often it has averaged.
pub fn exchanges(dir: &Path, worker: usize) -> PathBuf {
    dir.join(format!("exchanges-{worker}"))
}

/// The weights of a worker that is done, this worker itself first.
fn left_behind(dir: &Path, place: &WorkerPlace) -> Option<PathBuf> {
    let mut ranks = std::iter::once(place.rank).chain(0..place.workers);
    ranks.find_map(|rank| Some(files::path(dir, rank)).filter(|path| path.exists()))
}

/// When the run began: when its folder was made.
fn began(dir: &Path) -> anyhow::Result<SystemTime> {
    let made = std::fs::metadata(dir.join("run.toml")).and_then(|file| file.modified());
    made.with_context(|| format!("{} is not the folder of this run", dir.display()))
}
