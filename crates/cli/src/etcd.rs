//! Jobs of several machines, which meet by etcd.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde::{Serialize, Serializer};
use serde_json::json;
use unisono::Options;
use unisono::cluster::etcd::{Endpoints, EtcdError, Settings};
use unisono::cluster::launch::{ShareError, SharedJob, record_in_etcd};
use unisono::cluster::membership::machines::{Kept, Machine, Record, Status};
use unisono::cluster::membership::{FirstStep, Recovery, WorkerId};
use unisono::insight::units::{counted, duration};

use crate::exit::Wrong;
use crate::output;
use crate::status::{RECOVERIES, Worker, shards_of, workers};

/// How long etcd may take to answer at first. Longer: a wrong URL is told later. Shorter: an etcd that is about to
/// start, or elects a leader, is given up.
const PATIENCE: Duration = Duration::from_secs(15);

/// After so many seconds without a word of any launcher a job is said to be silent. Longer: a job whose launchers are
/// gone looks well. Shorter: one whose clocks differ does not.
const SILENT: u64 = 60;

/// The job of this name in the etcd at these URLs.
pub fn share(urls: &str, job: &str, options: &Options) -> anyhow::Result<SharedJob> {
    let (endpoints, settings) = place(urls)?;
    SharedJob::in_etcd(&endpoints, &settings, job, options.agreed(), PATIENCE).or_else(told)
}

fn place(urls: &str) -> anyhow::Result<(Endpoints, Settings)> {
    let endpoints = urls.parse().context("--etcd").wrong_call()?;
    Ok((endpoints, Settings::from_env().wrong_call()?))
}

fn told<T>(error: ShareError) -> anyhow::Result<T> {
    match error {
        ShareError::Name { .. } | ShareError::Interface(_) => Err(error).wrong_call(),
        ShareError::Etcd(EtcdError::BadSetting { .. }) => Err(error).wrong_call(),
        error => Err(error.into()),
    }
}

/// Prints how a job is doing, as its record and its leader say.
pub fn status(urls: &str, job: &str, json: bool) -> anyhow::Result<ExitCode> {
    let (endpoints, settings) = place(urls)?;
    let store = record_in_etcd(&endpoints, &settings, job, PATIENCE).or_else(told)?;
    let Kept { record, is_unreadable, status, result } = store.look()?;
    anyhow::ensure!(!is_unreadable, "what etcd keeps of job {job} was not written by this Unisono");
    let record = record.with_context(|| format!("there is no job {job} in this etcd"))?;
    let shown = Shown::of(job, &record, status.as_ref(), result.as_deref());
    match json {
        true => result_line!("{}", serde_json::to_string(&shown)?)?,
        false => output::text_out(&shown.text())?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Shown<'a> {
    job: &'a str,
    /// `running`, `forming` before the first epoch, `finished`, or `silent` if no launcher says anything.
    state: &'static str,
    epoch: u64,
    /// The last step that the leader has heard of: the first of the newest epoch.
    step: Option<u64>,
    leader: serde_json::Value,
    machines: Vec<serde_json::Value>,
    members: Vec<Worker<'a>>,
    spares: Vec<Worker<'a>>,
    least: u32,
    most: u32,
    workers_lost: u64,
    workers_joined: u64,
    recoveries: u64,
    recovery_ms_p50: Option<f64>,
    recovery_ms_max: Option<f64>,
    #[serde(serialize_with = "in_words")]
    past_recoveries: Vec<Recovery>,
    /// Seconds since a launcher was last heard of, by the clocks of both machines.
    heard_s: Option<u64>,
    /// What rank 0 handed in, as text.
    result: Option<String>,
}

impl Shown<'_> {
    fn of<'a>(
        job: &'a str,
        record: &'a Record,
        status: Option<&'a Status>,
        result: Option<&[u8]>,
    ) -> Shown<'a> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let heard_s = status.map(|status| now.saturating_sub(status.at));
        let is_silent = heard_s.is_none_or(|seconds| seconds > SILENT);
        let machines =
            status.map_or(std::slice::from_ref(&record.leader), |status| &status.machines);
        let worker = |rank: Option<usize>, id: &WorkerId| {
            let machine = machines.iter().find(|machine| machine.has(*id));
            let process = status.and_then(|it| it.processes.iter().find(|(of, _)| of == id));
            let shards = status.and_then(|status| status.shards).zip(rank);
            let state = match (machine, rank) {
                (None, _) => "not connected",
                (_, Some(_)) => "member",
                (_, None) => "spare",
            };
            Worker {
                rank,
                worker: id.number,
                life: id.life,
                pid: process.map(|(_, pid)| *pid),
                host: machine.map_or("", |machine| &machine.host),
                state: state.into(),
                shards: shards.and_then(|(shards, rank)| {
                    shards_of(shards as usize, rank, record.members.len())
                }),
            }
        };
        let members = record.members.iter().enumerate();
        let history = status.map(|status| status.history.clone()).unwrap_or_default();
        let times = history.recovery_ms();
        Shown {
            job,
            state: match record {
                Record { is_complete: true, .. } => "finished",
                _ if is_silent => "silent",
                Record { epoch: 0, .. } => "forming",
                _ => "running",
            },
            epoch: record.epoch,
            step: status
                .and_then(|status| status.step.as_ref())
                .map(|FirstStep { step, .. }| *step),
            leader: described(&record.leader),
            machines: machines.iter().map(described).collect(),
            members: members.map(|(rank, id)| worker(Some(rank), id)).collect(),
            spares: status
                .map_or(&[][..], |status| &status.spares)
                .iter()
                .map(|id| worker(None, id))
                .collect(),
            least: record.least,
            most: record.most,
            workers_lost: history.workers_lost,
            workers_joined: history.workers_joined,
            recoveries: status.map_or(0, |status| status.recovered),
            recovery_ms_p50: times.map(|(middle, _)| middle),
            recovery_ms_max: times.map(|(_, longest)| longest),
            past_recoveries: history.recoveries,
            heard_s,
            result: result
                .filter(|_| record.is_complete)
                .map(|it| String::from_utf8_lossy(it).into()),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("job {}: {}, epoch {}", self.job, self.state, self.epoch);
        // Where an epoch began says nothing of a run that is over.
        if let Some(step) = self.step.filter(|_| self.state != "finished") {
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
        workers(&mut text, "members", &self.members);
        workers(&mut text, "spares", &self.spares);
        let Shown { workers_lost, workers_joined, recoveries, .. } = self;
        let _ = writeln!(
            text,
            "\nunder this coordinator: {workers_lost} lost, {workers_joined} joined, went on {recoveries} times"
        );
        let skipped = self.past_recoveries.len().saturating_sub(RECOVERIES);
        for Recovery { seconds, first } in &self.past_recoveries[skipped..] {
            let FirstStep { epoch, step, redone, from_checkpoint, .. } = first;
            let redone = if *redone { ", computed again" } else { "" };
            let back = crate::status::went_back(*from_checkpoint, *step);
            let _ = writeln!(
                text,
                "  in {:>8}: epoch {epoch}, step {step}{redone}{back}",
                duration(*seconds)
            );
        }
        if self.state == "silent" {
            let seconds =
                self.heard_s.map_or("a while".to_owned(), |seconds| format!("{seconds} s"));
            let _ = writeln!(
                text,
                "no launcher has been heard of for {seconds}; start them again to go on from the last checkpoint"
            );
        }
        if let Some(result) = &self.result {
            let _ = writeln!(text, "result:\n{}", result.trim_end());
        }
        text
    }
}

fn in_words<S: Serializer>(recoveries: &[Recovery], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(recoveries.iter().map(|Recovery { seconds, first }| {
        let FirstStep { epoch, step, redone, behind, from_checkpoint, .. } = first;
        json!({
            "epoch": epoch, "step": step, "ms": seconds * 1e3, "redone": redone, "behind": behind,
            "from_checkpoint": from_checkpoint,
        })
    }))
}

fn described(machine: &Machine) -> serde_json::Value {
    let Machine { number, first, workers, address, host } = machine;
    json!({ "machine": number, "host": host, "address": address, "first": first, "workers": workers })
}
