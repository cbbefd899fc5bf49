//! A worker that averages with changing partners.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::Context;
use unisono::insight::relaxed::RelaxedFolder;
use unisono::insight::relaxed::folder::Log;
use unisono::insight::updates::UpdateRecord;
use unisono::relaxed::gossip::{Gossip, GossipConfig};
use unisono::sync::shards::Shards;

use super::super::args::{Plan, TrainArgs};
use super::super::progress::Reporter;
use super::student::Student;
use super::worker::{Place, need_leader, peers};
use super::{expect_number, note_divergence, run_dir, weights};
use crate::serve;

/// Trains its replica, and exchanges after every step.
pub fn run(args: &TrainArgs, plan: &Plan, place: &Place) -> anyhow::Result<ExitCode> {
    let listener = serve::inherited()?.with_context(|| need_leader("--strategy gossip"))?;
    let dir = run_dir(plan)?;
    let own = Shards::new(plan.shards, place.workers)?.of(place.rank, place.workers);
    let mut student = Student::new(plan, own, false)?;
    let lengths: Vec<usize> = student.parameters().iter().map(|p| p.elements()).collect();
    let mut optimizer = plan.optimizer.build(&lengths)?;
    let config = GossipConfig {
        rank: place.rank as u32,
        life: place.starts,
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
    let mut log = Log::reopen_keeping(path, |record: &UpdateRecord| {
        updates = updates.max(record.update);
        true
    })?;
    // One that has done nothing yet has all its steps before it, however late it starts and however far
    // the others are: they are the steps that were asked for.
    let is_new = updates == 0;
    let initial = match left_behind(&dir, place) {
        Some(left) if is_new => weights::read(&left, &lengths)?,
        _ => student.read_all(),
    };
    let gossip = Gossip::start(config, initial)?;
    if !is_new
        && gossip.joined().is_none()
        && let Some(left) = left_behind(&dir, place)
    {
        // Killed on the last stretch, and nobody is there any more: the end is where they left it.
        return weights::copy(&left, &weights::path(&dir, place.rank)).map(|()| ExitCode::SUCCESS);
    }
    let mut step = 0;
    if is_new {
        gossip.begin_anew();
    } else {
        step = gossip.joined().map_or(0, |joined| joined.clock);
    }
    let mut reporter = (place.rank == 0)
        .then(|| Reporter::new(plan.steps, plan.batch / place.workers, args.as_worker));
    let slowness = plan.slow.filter(|(rank, _)| *rank == place.rank).map_or(1.0, |(_, s)| s);
    let mut buffers: Vec<Vec<f32>> = lengths.iter().map(|length| vec![0.0; *length]).collect();
    let (mut push, mut bytes) = (0, 0);
    while step < plan.steps && !place.is_told_to_stop() {
        let start = Instant::now();
        for (parameter, buffer) in buffers.iter_mut().enumerate() {
            gossip.weights(parameter, buffer)?;
            student.write(parameter, 0, buffer)?;
        }
        let computed = student.compute(step, slowness)?;
        if let Err(error) = expect_number(&computed, place.rank, step) {
            note_divergence(plan, None, &error);
            return Err(error);
        }
        step += 1;
        gossip.step_with(|parameter, weights| {
            optimizer.update(parameter, step, weights, student.gradient(parameter));
        });
        gossip.exchange()?;
        let stats = gossip.stats();
        (push, updates) = (push + 1, updates + 1);
        let seconds = start.elapsed().as_secs_f64();
        let blocked = (seconds - computed.seconds).max(0.0);
        log.append(&UpdateRecord {
            time: SystemTime::now().duration_since(began).unwrap_or_default().as_secs_f64(),
            update: updates,
            worker: place.rank as u32,
            life: place.starts,
            push,
            clock: step - 1,
            lead: stats.lead(),
            delay: 0,
            present: place.workers as u32,
            loss: computed.loss,
            samples: computed.samples,
            compute: computed.seconds,
            blocked,
            bytes: stats.bytes() - bytes,
        })?;
        bytes = stats.bytes();
        if let Some(reporter) = &mut reporter {
            reporter.took(step, computed.loss, seconds, blocked);
        }
    }
    gossip.settle();
    let done = gossip.stats().done();
    std::fs::write(exchanges(&dir, place.rank), done.to_string()).context("counting exchanges")?;
    weights::write(&weights::path(&dir, place.rank), &gossip.leave())?;
    if let Some(reporter) = reporter {
        reporter.finish();
    }
    Ok(ExitCode::SUCCESS)
}

/// Where a worker says how often it has averaged.
pub fn exchanges(dir: &Path, worker: usize) -> PathBuf {
    dir.join(format!("exchanges-{worker}"))
}

/// The weights of somebody who is done, this worker itself first.
fn left_behind(dir: &Path, place: &Place) -> Option<PathBuf> {
    let mut ranks = std::iter::once(place.rank).chain(0..place.workers);
    ranks.find_map(|rank| Some(weights::path(dir, rank)).filter(|path| path.exists()))
}

/// When the run began: when its folder was made.
fn began(dir: &Path) -> anyhow::Result<SystemTime> {
    let made = std::fs::metadata(dir.join("run.toml")).and_then(|file| file.modified());
    made.with_context(|| format!("{} is not the folder of this run", dir.display()))
}
