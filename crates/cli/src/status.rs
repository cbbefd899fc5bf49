//! `unisono status`: how an elastic run is doing.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use unisono::cluster::checkpoint::steps_in;
use unisono::collective::shards::Shards;
use unisono::insight::RunInfo;
use unisono::insight::folder::glance;
use unisono::insight::membership::{self, Launcher, Life, Recovery, State, Timeline};
use unisono::insight::units::{counted, duration};

use crate::exit::Wrong;
use crate::membership_log::{boot, host, process_start};
use crate::output;

/// What `unisono status` takes.
#[derive(Args)]
pub struct StatusArgs {
    /// The folder of a run of `unisono train --elastic`, which may be under way.
    #[arg(required_unless_present = "etcd")]
    dir: Option<PathBuf>,
    /// Of a job of several machines instead: where etcd is, with --job.
    #[arg(long, value_name = "URL[,URL…]", requires = "job", conflicts_with = "dir")]
    etcd: Option<String>,
    /// The name of that job.
    #[arg(long, value_name = "NAME", requires = "etcd")]
    job: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Past recoveries shown; JSON has all.
pub const RECOVERIES: usize = 8;

/// Workers shown; JSON has all.
const WORKERS: usize = 32;

/// Prints how the run is doing.
pub fn run(args: StatusArgs) -> anyhow::Result<ExitCode> {
    if let (Some(urls), Some(job)) = (&args.etcd, &args.job) {
        return crate::etcd::status(urls, job, args.json);
    }
    let dir = args.dir.context("the folder of a run").wrong_call()?;
    let (info, last) = glance(&dir)?;
    let Some(timeline) = Timeline::of(&membership::read(&dir)?) else {
        let dir = dir.display();
        refuse!(
            "{dir} has no record of workers that come and go: the run was not started with --elastic, or has \
             only just begun; `unisono report {dir}` shows what there is"
        );
    };
    let status = Status::of(&dir, &info, last.map(|step| step.step), &timeline);
    match args.json {
        true => result_line!("{}", serde_json::to_string(&status)?)?,
        false => output::text_out(&status.text())?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Status<'a> {
    name: &'a str,
    /// Whether the run goes on.
    state: RunState,
    /// How it ended, in words, if that is known.
    outcome: Option<String>,
    /// What to do, if there is something to do.
    advice: Option<String>,
    launcher: Option<&'a Launcher>,
    /// Seconds from its start until the last event.
    seconds: f64,
    epoch: u64,
    epochs: usize,
    /// The last step that is recorded, and the last of all.
    step: Option<u64>,
    steps: Option<u64>,
    members: Vec<Worker<'a>>,
    spares: Vec<Worker<'a>>,
    starting: Vec<Worker<'a>>,
    workers_lost: u64,
    workers_joined: u64,
    recoveries: usize,
    recovery_ms_p50: Option<f64>,
    recovery_ms_max: Option<f64>,
    steps_redone: usize,
    past_recoveries: &'a [Recovery],
}

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum RunState {
    Running,
    Finished,
    /// It ended before it was complete.
    Stopped,
    /// Its launcher has gone without a word.
    Killed,
    /// Its launcher is on another host.
    Elsewhere,
}

/// A worker, as it is shown.
#[derive(Serialize)]
pub struct Worker<'a> {
    pub rank: Option<usize>,
    pub worker: u32,
    pub life: u32,
    pub pid: Option<u32>,
    pub host: &'a str,
    pub state: String,
    /// The first that it computes, and the first that it does not.
    pub shards: Option<(usize, usize)>,
}

impl Status<'_> {
    fn of<'a>(
        dir: &Path,
        info: &'a RunInfo,
        step: Option<u64>,
        timeline: &'a Timeline,
    ) -> Status<'a> {
        let state = RunState::of(timeline);
        let is_over = !matches!(state, RunState::Running | RunState::Elsewhere);
        let host = timeline.launcher.as_ref().map_or("", |launcher| &launcher.host);
        let latest = timeline.workers();
        let worker = |life: &Life, rank: Option<usize>| Worker {
            rank,
            worker: life.worker.number,
            life: life.worker.life,
            pid: life.pid,
            host,
            state: described(life, is_over),
            shards: rank.and_then(|rank| shards_of(info.shards, rank, timeline.members.len())),
        };
        let find = |(rank, id): (usize, &membership::WorkerId)| {
            let life = timeline.lives.iter().rev().find(|life| life.worker == *id)?;
            let mut member = worker(life, Some(rank));
            if member.state == State::Spare.name() {
                // For the others, or for more of them.
                member.state = "waiting".into();
            }
            Some(member)
        };
        let others = |state: State| {
            let is_one = |life: &&&Life| {
                life.state() == state && !is_over && !timeline.members.contains(&life.worker)
            };
            latest.values().filter(is_one).map(|life| worker(life, None)).collect()
        };
        let seconds = timeline.recovery_seconds();
        let (outcome, advice) = state.explained(dir, info, timeline);
        Status {
            name: &info.name,
            state,
            outcome,
            advice,
            launcher: timeline.launcher.as_ref(),
            seconds: timeline.end,
            epoch: timeline.epochs.last().map_or(0, |epoch| epoch.number),
            epochs: timeline.epochs.len(),
            step,
            steps: info.settings.get("steps").and_then(|n| n.as_integer()?.try_into().ok()),
            members: timeline.members.iter().enumerate().filter_map(find).collect(),
            spares: others(State::Spare),
            starting: others(State::Starting),
            workers_lost: timeline.workers_lost,
            workers_joined: timeline.workers_joined,
            recoveries: timeline.recoveries.len(),
            recovery_ms_p50: seconds.map(|(middle, _)| middle * 1e3),
            recovery_ms_max: seconds.map(|(_, longest)| longest * 1e3),
            steps_redone: timeline.steps_redone(),
            past_recoveries: &timeline.recoveries,
        }
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let headline = match (self.state, &self.outcome) {
            (RunState::Running, _) => "running".to_owned(),
            (_, Some(outcome)) => outcome.clone(),
            (_, None) => "not running".to_owned(),
        };
        let step = match (self.step, self.steps) {
            (Some(step), Some(steps)) => format!("step {step} of {steps}"),
            (Some(step), None) => format!("step {step}"),
            (None, _) => "no step yet".to_owned(),
        };
        let _ = writeln!(out, "{}: {headline}", self.name);
        let _ = writeln!(out, "epoch {}, {step}", self.epoch);
        if let Some(advice) = &self.advice {
            let _ = writeln!(out, "{advice}");
        }
        workers(&mut out, "members", &self.members);
        workers(&mut out, "spares", &self.spares);
        workers(&mut out, "starting", &self.starting);
        let lost = counted(self.workers_lost as usize, "worker");
        let _ = writeln!(out, "\n{lost} lost, {} joined", self.workers_joined);
        if let (Some(middle), Some(longest)) = (self.recovery_ms_p50, self.recovery_ms_max) {
            let (middle, longest) = (duration(middle / 1e3), duration(longest / 1e3));
            let many = if self.recoveries == 1 { "recovery" } else { "recoveries" };
            let redone = counted(self.steps_redone, "step");
            let _ = writeln!(
                out,
                "{} {many}, median {middle}, longest {longest}; {redone} computed again",
                self.recoveries
            );
        }
        let skipped = self.past_recoveries.len().saturating_sub(RECOVERIES);
        if skipped > 0 {
            let _ = writeln!(out, "the last {RECOVERIES}:");
        }
        for Recovery { at, seconds, first, members, .. } in &self.past_recoveries[skipped..] {
            let redone = if first.redone { ", computed again" } else { "" };
            let back = went_back(first.from_checkpoint, first.step);
            let _ = writeln!(
                out,
                "  at {:>8}: in {:>8}, epoch {} with {}, step {}{redone}{back}",
                duration(*at),
                duration(*seconds),
                first.epoch,
                counted(*members, "member"),
                first.step
            );
        }
        out
    }
}

impl RunState {
    fn of(timeline: &Timeline) -> RunState {
        match (&timeline.over, &timeline.launcher) {
            (Some((true, _)), _) => RunState::Finished,
            (Some((false, _)), _) => RunState::Stopped,
            (None, Some(launcher)) if launcher.host != host() => RunState::Elsewhere,
            (None, Some(launcher)) if is_alive(launcher) => RunState::Running,
            (None, _) => RunState::Killed,
        }
    }

    /// How the run ended, and what to do now.
    fn explained(
        self,
        dir: &Path,
        info: &RunInfo,
        timeline: &Timeline,
    ) -> (Option<String>, Option<String>) {
        let told = timeline.over.as_ref().map(|(_, outcome)| outcome.clone());
        let launcher = timeline.launcher.clone().unwrap_or_default();
        let Launcher { pid, host, .. } = &launcher;
        match self {
            RunState::Running => (None, None),
            RunState::Finished => {
                (told, Some(format!("`unisono report {}` says more", dir.display())))
            }
            RunState::Stopped => (told, Some(remedy(info, &launcher))),
            RunState::Killed => {
                let what = format!("its launcher (process {pid} on {host}) is gone");
                (Some(what), Some(remedy(info, &launcher)))
            }
            RunState::Elsewhere => {
                let what = format!("its launcher is process {pid} on {host}");
                (Some(what), Some(format!("ask on {host} whether it still runs")))
            }
        }
    }
}

/// What goes on with a run that has ended early.
fn remedy(info: &RunInfo, launcher: &Launcher) -> String {
    let folder = info.settings.get("checkpoint_dir").and_then(|folder| folder.as_str());
    let Some(folder) = folder else {
        return "start it again; with --checkpoint-dir, less would be lost".into();
    };
    let path = Path::new(&launcher.folder).join(folder);
    match steps_in(&path).ok().and_then(|steps| steps.last().copied()) {
        Some(step) => format!(
            "start the same command with --resume to go on after step {step} \
             (checkpoints in {})",
            path.display()
        ),
        None => format!("start it again: there is no checkpoint in {} yet", path.display()),
    }
}

/// Whether the process that was the launcher still runs.
fn is_alive(launcher: &Launcher) -> bool {
    launcher.boot == boot() && process_start(launcher.pid) == Some(launcher.started)
}

/// What a worker does, in a word, or how it ended.
fn described(life: &Life, is_over: bool) -> String {
    match (&life.ended, life.state()) {
        (Some(ended), _) => ended.clone(),
        (None, _) if is_over => State::Gone.name().into(),
        (None, _) if life.sign.is_some() => "lost".into(),
        (None, state) => state.name().into(),
    }
}

/// From where a run went on in which no worker had the state any more, in words.
pub fn went_back(is_back: bool, first_step: u64) -> &'static str {
    match (is_back, first_step) {
        (false, _) => "",
        (true, 0 | 1) => ", from the beginning",
        (true, _) => ", from a checkpoint",
    }
}

/// The first shard that a rank computes, and the first that it does not.
pub fn shards_of(shards: usize, rank: usize, world: usize) -> Option<(usize, usize)> {
    let range = Shards::new(shards, world).ok()?.of(rank, world);
    Some((range.start, range.end))
}

/// A table of workers.
pub fn workers(out: &mut String, title: &str, workers: &[Worker<'_>]) {
    if workers.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}:");
    let _ = writeln!(
        out,
        "  {:>4}  {:>6}  {:>4}  {:>8}  {:<16}{:<12}state",
        "rank", "worker", "life", "pid", "host", "shards"
    );
    for worker in workers.iter().take(WORKERS) {
        let text = |number: Option<u64>| number.map_or("-".to_owned(), |n| n.to_string());
        let shards = match worker.shards {
            Some((start, end)) if end == start + 1 => start.to_string(),
            Some((start, end)) => format!("{start} to {}", end - 1),
            None => "-".into(),
        };
        let host: String = worker.host.chars().take(15).collect();
        let _ = writeln!(
            out,
            "  {:>4}  {:>6}  {:>4}  {:>8}  {host:<16}{shards:<12}{}",
            text(worker.rank.map(|rank| rank as u64)),
            worker.worker,
            worker.life,
            text(worker.pid.map(u64::from)),
            worker.state
        );
    }
    if workers.len() > WORKERS {
        let _ = writeln!(out, "  and {} more; --json has all", workers.len() - WORKERS);
    }
}
