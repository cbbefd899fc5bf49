//! Records steps that all workers make together: collects what they measured, on one clock, at rank 0.
//!
//! Every worker keeps the times of its steps as seconds since it started recording, and knows by how
//! much that start is off from the common clock, rank 0's, which it finds out by asking what time it is. Now and
//! then the records travel to rank 0, between two steps, and from there into the folder of the run.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use unisono_collective::{Group, Reduction, Transport};
use unisono_insight::advice::{Advice, Prediction};
use unisono_insight::clock::{Offset, Sample};
use unisono_insight::folder::{FolderError, Run, RunFolder};
use unisono_insight::{BucketSpan, Outcome, RankStep, RunInfo, Scaling, StepRecord};
use unisono_sync::shards::Shards;
use unisono_sync::strategy::StrategySpec;
use unisono_sync::{Parameter, Settings, StepOutcome, StepTimes, Synchronizer, advice as sync};

use super::{RecordError, create};

/// Questions to rank 0. More: a better chance that one is answered undisturbed.
const QUESTIONS: usize = 20;

/// Steps between two journeys of the records. More: more memory, and more is lost with a run that is
/// killed. Fewer: more interruptions.
const INTERVAL: usize = 50;

/// Records of steps that are remembered when they cannot be written, for the figures at the end. More
/// make those of a long run right; fewer keep its memory for the model.
const REMEMBERED: usize = 10_000;

const ASK: u32 = 1;
const ANSWER: u32 = 2;

/// Records the steps of one worker, and at rank 0 those of all.
pub struct StepRecorder {
    start: Instant,
    /// By how much the common clock, that of the first rank 0, is ahead of this rank's; `None` in a process
    /// that has yet to ask.
    offset: Option<Offset>,
    sent: u64,
    samples: u64,
    kept: Vec<Kept>,
    /// At rank 0.
    folder: Option<RunFolder>,
    /// The last step that is in the folder, as far as this rank knows.
    handed_in: u64,
    /// Records of the newest steps, since one could not be written.
    unwritten: Option<VecDeque<StepRecord>>,
}

/// What one worker knows of one step.
#[derive(Serialize, Deserialize)]
struct Kept {
    step: u64,
    /// Absent if it is no number, for which JSON has no word.
    loss: Option<f64>,
    sent: u64,
    agreed: bool,
    encoded: Option<bool>,
    times: RankStep,
}

/// What became of the records.
pub struct Recorded {
    /// The run, summed up.
    pub run: Run,
    /// Whether every step is in its folder.
    pub is_complete: bool,
    /// Whether the report could be written.
    pub written: Result<(), FolderError>,
}

impl StepRecorder {
    /// Sets the clocks, and makes the folder of the run at rank 0: the one that is named, or the first in
    /// `runs` that does not exist. Hosts and clock error of the run are filled in. `samples` is how many
    /// a step has. All ranks must call it.
    pub fn begin(
        group: &Group,
        dir: Option<&Path>,
        info: RunInfo,
        samples: u64,
    ) -> Result<StepRecorder, RecordError> {
        let mut recorder = StepRecorder::waiting(samples);
        let error = recorder.set_clock(group)?;
        // How far any rank's clock may be off.
        let mut errors = [error];
        group.all_reduce(&mut errors, Reduction::Max)?;
        let hosts = host_names(group)?;
        if group.rank() == 0 {
            let info = RunInfo { hosts, clock_error: errors[0], ..info };
            recorder.folder = Some(create(dir, &info.name, |dir| RunFolder::create(dir, &info))?);
        }
        Ok(recorder)
    }

    /// That of a worker which is yet to be in a group.
    pub fn waiting(samples: u64) -> StepRecorder {
        StepRecorder {
            start: Instant::now(),
            offset: None,
            sent: 0,
            samples,
            kept: Vec::new(),
            folder: None,
            handed_in: 0,
            unwritten: None,
        }
    }

    /// Goes on in another group, after so many steps of the run, with the records that its ranks have kept.
    /// Rank 0 goes on with the folder `dir`, if another rank had it before. All ranks must call it.
    pub fn regroup(
        &mut self,
        group: &Group,
        dir: &Path,
        steps: u64,
    ) -> Result<Result<(), FolderError>, RecordError> {
        self.set_clock(group)?;
        self.kept.retain(|kept| kept.step <= steps);
        if group.rank() == 0 && (self.folder.is_none() || self.handed_in > steps) {
            let (folder, last) = RunFolder::reopen(dir, steps)?;
            (self.folder, self.handed_in) = (Some(folder), last);
        } else if group.rank() != 0 {
            self.folder = None;
        }
        self.hand_in(group)
    }

    /// Finds out how far the common clock is ahead, where that is not known. Returns how wrong that may be.
    /// All ranks must call it.
    fn set_clock(&mut self, group: &Group) -> Result<f64, RecordError> {
        let mut are_known = vec![0; group.size()];
        group.all_gather(&[u8::from(self.offset.is_some())], &mut are_known)?;
        // If none knows it, it is that of rank 0.
        if !are_known.contains(&1) && group.rank() == 0 {
            self.offset = Some(Offset { seconds: 0.0, error: 0.0 });
        }
        let knows = are_known.iter().position(|known| *known == 1).unwrap_or(0);
        let asks = |rank: &usize| are_known[*rank] == 0 && *rank != knows;
        for rank in (0..group.size()).filter(asks) {
            if group.rank() == knows {
                let ahead = self.offset.map_or(0.0, |offset| offset.seconds);
                answer(group, rank, || self.start.elapsed().as_secs_f64() + ahead)?;
            } else if group.rank() == rank {
                self.offset = Some(ask(group, knows, self.start)?);
            }
        }
        Ok(self.offset.map_or(0.0, |offset| offset.error))
    }

    /// Notes a step. `sent` is what this rank had sent after it.
    pub fn note(&mut self, step: u64, outcome: &StepOutcome, sent: u64) {
        let times = self.on_common_clock(&outcome.times);
        let since = sent.saturating_sub(self.sent);
        self.sent = sent;
        let loss = Some(f64::from(outcome.loss)).filter(|loss| loss.is_finite());
        let StepOutcome { agreed, encoded, .. } = *outcome;
        self.kept.push(Kept { step, loss, sent: since, agreed, encoded, times });
    }

    /// Whether it is time to [hand in](StepRecorder::hand_in) the records; the same on all ranks.
    pub fn is_due(&self) -> bool {
        self.kept.len() >= INTERVAL
    }

    /// Hands in what was noted since the last time: rank 0 gets it all, and writes it down. A disk that
    /// is full costs the report and not the run; the error comes once. All ranks must call it, at the
    /// same step.
    pub fn hand_in(&mut self, group: &Group) -> Result<Result<(), FolderError>, RecordError> {
        let mut written = Ok(());
        let gathered = self.gather(group)?;
        self.kept.clear();
        for step in gathered {
            // A rank that handed it in may have been lost, and the others tell it again.
            if step.step <= self.handed_in {
                continue;
            }
            self.handed_in = step.step;
            let folder = self.folder.as_mut().expect("rank 0 has one, and others get no records");
            if self.unwritten.is_none()
                && let Err(error) = folder.append(&step)
            {
                written = Err(error);
                self.unwritten = Some(VecDeque::new());
            }
            if let Some(unwritten) = &mut self.unwritten {
                unwritten.push_back(step);
                if unwritten.len() > REMEMBERED {
                    unwritten.pop_front();
                }
            }
        }
        Ok(written)
    }

    /// Records which codec was chosen, and why.
    pub fn advise(&mut self, step: u64, advice: &sync::Advice) -> Result<(), FolderError> {
        let Some(folder) = &mut self.folder else { return Ok(()) };
        let prediction = |row: &sync::Prediction| Prediction {
            codec: row.codec.clone(),
            seconds: row.seconds,
            coding_seconds: row.coding_seconds,
            wire_bytes: row.wire_bytes,
        };
        let sync::Cost { steps, bytes, seconds } = advice.cost;
        folder.advise(&Advice {
            step,
            rows: advice.rows.iter().map(prediction).collect(),
            chosen: advice.chosen.as_ref().map_or("none".to_owned(), ToString::to_string),
            measured_dense_seconds: advice.measured_dense_seconds,
            reason: advice.reason.clone(),
            observed_steps: steps,
            deciding_bytes: bytes,
            deciding_seconds: seconds,
        })
    }

    /// Sums the run up and writes its report, at rank 0; `None` elsewhere.
    pub fn finish(self, outcome: Outcome, scaling: Option<Scaling>) -> Option<Recorded> {
        let is_complete = self.unwritten.is_none();
        let rest = self.unwritten.unwrap_or_default().into();
        let (run, written) = self.folder?.finish_with(rest, outcome, scaling);
        Some(Recorded { run, is_complete, written })
    }

    /// The records of all workers, step by step, at rank 0.
    fn gather(&self, group: &Group) -> Result<Vec<StepRecord>, RecordError> {
        let bytes = serde_json::to_vec(&self.kept)?;
        let mut lengths = vec![0; group.size()];
        group.all_gather(&[bytes.len() as i64], &mut lengths)?;
        let longest = lengths.iter().max().copied().unwrap_or(0) as usize;
        let mut padded = bytes;
        padded.resize(longest, b' ');
        if group.rank() != 0 {
            group.gather(&padded, None, 0)?;
            return Ok(Vec::new());
        }
        let mut all = vec![0; longest * group.size()];
        group.gather(&padded, Some(&mut all), 0)?;
        // In a group whose members have changed, a rank may lack steps that others have.
        let mut steps: BTreeMap<u64, Vec<Kept>> = BTreeMap::new();
        for bytes in all.chunks(longest.max(1)) {
            let kept: Vec<Kept> = serde_json::from_slice(bytes)?;
            kept.into_iter().for_each(|kept| steps.entry(kept.step).or_default().push(kept));
        }
        let mut records = Vec::with_capacity(steps.len());
        for all in steps.into_values() {
            let Some(first) = all.first() else { break };
            // The same everywhere, or each worker's own.
            let losses = all.iter().map(|kept| kept.loss.unwrap_or(f64::NAN));
            let loss = match first.agreed {
                true => first.loss.unwrap_or(f64::NAN),
                false => losses.sum::<f64>() / all.len() as f64,
            };
            records.push(StepRecord {
                step: first.step,
                loss,
                agreed: first.agreed,
                encoded: first.encoded,
                samples: self.samples,
                wire_bytes: all.iter().map(|kept| kept.sent).sum(),
                ranks: all.into_iter().map(|kept| kept.times).collect(),
            });
        }
        Ok(records)
    }

    fn on_common_clock(&self, times: &StepTimes) -> RankStep {
        let at = |instant: Instant| {
            let here = instant.saturating_duration_since(self.start).as_secs_f64();
            here + self.offset.map_or(0.0, |offset| offset.seconds)
        };
        let computed = at(times.computed);
        RankStep {
            begin: at(times.begin),
            computed,
            // Updates run between the waits for two buckets. What counts is how long was waited.
            reduced: computed + times.blocked.as_secs_f64(),
            end: at(times.end),
            compute: times.compute.as_secs_f64(),
            backward: times.backward.as_secs_f64(),
            device: None,
            buckets: times
                .buckets
                .iter()
                .map(|bucket| BucketSpan {
                    bytes: bucket.bytes as u64,
                    ready: at(bucket.submitted),
                    started: at(bucket.started),
                    ended: at(bucket.ended),
                    folding: bucket.folding.as_secs_f64(),
                    coding: bucket.coding.as_secs_f64(),
                })
                .collect(),
        }
    }
}

/// What a group and its settings say about a run, for its report. The rest is up to the caller.
pub fn run_info(group: &Group, synchronizer: &Synchronizer, settings: &Settings) -> RunInfo {
    let (topology, options, workers) = (group.topology(), group.options(), group.size());
    let transport = match options.transport {
        _ if workers == 1 => "none",
        Transport::Tcp => "tcp",
        _ if topology.is_one_host() => "shm",
        _ if topology.is_all_apart() => "tcp",
        _ => "shm and tcp",
    };
    RunInfo {
        strategy: match settings.strategy {
            StrategySpec::AllReduce => synchronizer.strategy(),
            local => local.to_string(),
        },
        dense_bytes_per_step: dense_bytes(synchronizer, settings.shards, workers),
        transport: transport.to_owned(),
        algorithm: options.algorithm.map_or("auto", |a| a.name()).to_owned(),
        workers,
        shards: settings.shards,
        ..RunInfo::default()
    }
}

/// What all workers together would send in a step of an all-reduce without a codec.
fn dense_bytes(synchronizer: &Synchronizer, shards: usize, workers: usize) -> u64 {
    let elements = synchronizer.parameters().iter().map(Parameter::elements);
    let shards = Shards::new(shards, workers).expect("the synchronizer was made for as many");
    let subtrees: usize = shards.subtrees(workers).iter().map(Vec::len).sum();
    // Of every subtree, all but the part that its worker sums, and of the sum all but that part.
    let parts = (subtrees + workers) * (workers - 1) / workers;
    (elements.sum::<usize>() * 4 * parts) as u64
}

/// Answers the questions of a rank what time it is. Ranks ask one after the other, so that no question waits for
/// that of another rank.
fn answer(group: &Group, rank: usize, now: impl Fn() -> f64) -> Result<(), RecordError> {
    for _ in 0..QUESTIONS {
        group.receive(&mut [0u8], rank, ASK)?;
        group.send(&[now()], rank, ANSWER)?;
    }
    Ok(())
}

/// By how much the clock of another rank is ahead of that which began at `start`.
fn ask(group: &Group, of: usize, start: Instant) -> Result<Offset, RecordError> {
    let now = || start.elapsed().as_secs_f64();
    let mut samples = Vec::with_capacity(QUESTIONS);
    for _ in 0..QUESTIONS {
        let sent = now();
        group.send(&[0u8], of, ASK)?;
        let mut remote = [0f64];
        group.receive(&mut remote, of, ANSWER)?;
        samples.push(Sample { sent, remote: remote[0], received: now() });
    }
    Ok(Offset::from_samples(&samples).expect("there are samples"))
}

/// The name of every rank's host. All ranks must call it. Hosts of one name, as containers are apt to
/// have, are told apart by a number.
fn host_names(group: &Group) -> Result<Vec<String>, RecordError> {
    const LONGEST: usize = 64;
    let uname = rustix::system::uname();
    let name = uname.nodename().to_bytes();
    let length = name.len().min(LONGEST);
    // A name, then what makes a host one: the running kernel and its network.
    let mut own = [0u8; LONGEST + 8];
    own[..length].copy_from_slice(&name[..length]);
    let kernel = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&kernel).update(network.as_os_str().as_encoded_bytes());
    own[LONGEST..].copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    let mut all = vec![0; own.len() * group.size()];
    group.all_gather(&own, &mut all)?;

    let hosts: Vec<&[u8]> = all.chunks(own.len()).collect();
    let label = |host: &&[u8]| {
        let name = String::from_utf8_lossy(&host[..LONGEST]);
        let name = name.trim_end_matches('\0');
        let mut namesakes: Vec<&[u8]> = Vec::new();
        for other in hosts.iter().filter(|other| other[..LONGEST] == host[..LONGEST]) {
            if !namesakes.contains(other) {
                namesakes.push(other);
            }
        }
        match namesakes.iter().position(|other| other == host) {
            Some(number) if namesakes.len() > 1 => format!("{name} {number}"),
            _ => name.to_owned(),
        }
    };
    Ok(hosts.iter().map(label).collect())
}
