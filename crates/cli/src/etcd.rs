//! Jobs of several machines, which meet by etcd.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use serde_json::json;
use unisono::cluster::etcd::{Endpoints, Settings};
use unisono::cluster::launch::{ShareError, SharedJob, record_in_etcd};
use unisono::cluster::membership::machines::{Machine, Record, Status};
use unisono::cluster::membership::{FirstStep, Recovery, WorkerId};
use unisono::insight::units::counted;

use crate::exit::Wrong;
use crate::output;

/// How long etcd may take to answer at first. Longer: a wrong URL is told later. Shorter: an etcd that is about to
/// start, or elects a leader, is given up.
const PATIENCE: Duration = Duration::from_secs(15);

/// The job of this name in the etcd at these URLs.
pub fn share(urls: &str, job: &str) -> anyhow::Result<SharedJob> {
    let (endpoints, settings) = place(urls)?;
    SharedJob::in_etcd(&endpoints, &settings, job, PATIENCE).or_else(told)
}

fn place(urls: &str) -> anyhow::Result<(Endpoints, Settings)> {
    let endpoints = urls.parse().context("--etcd").wrong_call()?;
    Ok((endpoints, Settings::from_env().wrong_call()?))
}

fn told<T>(error: ShareError) -> anyhow::Result<T> {
    match error {
        ShareError::Etcd(_) => Err(error.into()),
        error => Err(error).wrong_call(),
    }
}

/// Prints how a job is doing, as its record and its leader say.
pub fn status(urls: &str, job: &str, json: bool) -> anyhow::Result<ExitCode> {
    let (endpoints, settings) = place(urls)?;
    let store = record_in_etcd(&endpoints, &settings, job, PATIENCE).or_else(told)?;
    let (record, status) = store.look()?;
    let Some(record) = record else {
        anyhow::bail!(
            "there is no job {job} in this etcd; `unisono run --elastic … --etcd {urls} --job {job}` starts it"
        );
    };
    let shown = Shown::of(job, &record, status.as_ref());
    match json {
        true => result_line!("{}", serde_json::to_string(&shown)?)?,
        false => output::text_out(&shown.text())?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Shown<'a> {
    job: &'a str,
    /// `running`, `forming` before the first epoch, or `finished`.
    state: &'static str,
    epoch: u64,
    /// The last step that the leader has heard of: the first of the newest epoch.
    step: Option<u64>,
    leader: serde_json::Value,
    machines: Vec<serde_json::Value>,
    members: Vec<Member>,
    spares: Vec<Member>,
    least: u32,
    most: u32,
    workers_lost: u64,
    workers_joined: u64,
    recoveries: usize,
    recovery_ms_p50: Option<f64>,
    recovery_ms_max: Option<f64>,
    past_recoveries: Vec<serde_json::Value>,
}

#[derive(Serialize)]
struct Member {
    rank: Option<usize>,
    worker: u32,
    life: u32,
    machine: Option<u32>,
    host: Option<String>,
}

impl Shown<'_> {
    fn of<'a>(job: &'a str, record: &Record, status: Option<&Status>) -> Shown<'a> {
        let machines =
            status.map_or(std::slice::from_ref(&record.leader), |status| &status.machines);
        let member = |rank: Option<usize>, worker: &WorkerId| {
            let machine = machines.iter().find(|machine| machine.has(*worker));
            Member {
                rank,
                worker: worker.number,
                life: worker.life,
                machine: machine.map(|machine| machine.number),
                host: machine.map(|machine| machine.host.clone()),
            }
        };
        let members = record.members.iter().enumerate();
        let history = status.map(|status| status.history.clone()).unwrap_or_default();
        let mut times: Vec<f64> = history.recoveries.iter().map(|r| r.seconds * 1e3).collect();
        times.sort_by(f64::total_cmp);
        Shown {
            job,
            state: match record {
                Record { is_complete: true, .. } => "finished",
                Record { epoch: 0, .. } => "forming",
                _ => "running",
            },
            epoch: record.epoch,
            step: status
                .and_then(|status| status.step.as_ref())
                .map(|FirstStep { step, .. }| *step),
            leader: described(&record.leader),
            machines: machines.iter().map(described).collect(),
            members: members.map(|(rank, worker)| member(Some(rank), worker)).collect(),
            spares: status
                .map_or(&[][..], |status| &status.spares)
                .iter()
                .map(|w| member(None, w))
                .collect(),
            least: record.least,
            most: record.most,
            workers_lost: history.workers_lost,
            workers_joined: history.workers_joined,
            recoveries: times.len(),
            recovery_ms_p50: times.get(times.len() / 2).copied(),
            recovery_ms_max: times.last().copied(),
            past_recoveries: history.recoveries.iter().map(recovery).collect(),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("job {}: {}, epoch {}", self.job, self.state, self.epoch);
        if let Some(step) = self.step {
            let _ = write!(text, ", step {step} or later");
        }
        let leader = &self.leader;
        let _ = write!(
            text,
            "\ncoordinated by machine {} ({})\n{}, of {} to {}\n",
            leader["machine"],
            leader["host"].as_str().unwrap_or_default(),
            counted(self.members.len(), "member"),
            self.least,
            self.most,
        );
        let workers = self.members.iter().chain(&self.spares);
        for Member { rank, worker, life, machine, host } in workers {
            let rank = rank.map_or("spare".to_owned(), |rank| format!("rank {rank}"));
            let number = machine.map_or("?".to_owned(), |number| number.to_string());
            let host = host.as_deref().unwrap_or("not connected");
            let _ = writeln!(
                text,
                "  {rank:<8} worker {worker}, life {life}, machine {number} ({host})"
            );
        }
        let Shown { workers_lost, workers_joined, recoveries, .. } = self;
        let _ = writeln!(
            text,
            "under this coordinator: {workers_lost} lost, {workers_joined} joined, went on {recoveries} times"
        );
        text
    }
}

fn recovery(of: &Recovery) -> serde_json::Value {
    let FirstStep { epoch, step, redone, behind, from_checkpoint, .. } = &of.first;
    json!({
        "epoch": epoch, "step": step, "ms": of.seconds * 1e3, "redone": redone, "behind": behind,
        "from_checkpoint": from_checkpoint,
    })
}

fn described(machine: &Machine) -> serde_json::Value {
    let Machine { number, first, workers, address, host } = machine;
    json!({ "machine": number, "host": host, "address": address, "first": first, "workers": workers })
}
