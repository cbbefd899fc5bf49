//! What a relaxed run came to: how much was done, how stale it was, who waited.
//!
//! Everything is computed from the [`UpdateRecord`]s. Every server meets every push, so server 0
//! stands for all of them, and the others only matter to the [`ledger`]. Where workers average without
//! a server, each keeps records of its own, and all of them together are the run.
//!
//! A rate is the sum of what each worker managed between its first push and its last. A fast worker
//! that is done early thus does not make those look slow that still work, while the time a worker was
//! dead before it came back counts against it.

pub mod advice;
pub mod folder;
pub mod ledger;
mod summary;

use std::borrow::{Borrow, Cow};
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::record::RunInfo;
use crate::updates::{Move, UpdateRecord};
pub use advice::LevelAdvice;
pub use folder::{RelaxedFolder, SavedRun, UpdateLog};
pub use ledger::{Ledger, LedgerError};
pub use summary::RelaxedSummary;

/// Pushes whose losses are averaged into one point of the curve. Fewer leave the noise of single
/// batches in it; more delay it, and with it [`RelaxedRun::seconds_until`].
pub const SMOOTHING: usize = 32;

/// A relaxed run, analysed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RelaxedRun {
    /// What was run.
    pub info: RunInfo,
    /// How `ssp:auto` moved the bound; empty at other levels.
    pub moves: Vec<Move>,
    /// By number, those that pushed.
    pub workers: Vec<WorkerStats>,
    /// From the beginning of the first gradient to the arrival of the last.
    pub seconds: f64,
    /// Changes of the weights.
    pub updates: u64,
    /// Pushes that arrived: gradients, or at `downpour` means of several.
    pub pushes: u64,
    /// Those of them that were too stale to be applied.
    pub dropped: u64,
    /// Changes of the weights per second.
    pub updates_per_s: f64,
    /// Pushes per second, dropped ones included.
    pub pushes_per_s: f64,
    /// Samples per second in gradients that were applied.
    pub samples_per_s: f64,
    /// Share of the workers' time spent waiting for servers and, through them, for others.
    pub blocked_share: f64,
    /// Mean staleness in clocks; 0 without a push, and none where the records do not say.
    pub mean_staleness: Option<f64>,
    /// The furthest that a worker ran ahead of the slowest.
    pub max_lead: u64,
    /// How many pushes were how stale, in clocks, rounded; empty where the records do not say.
    pub staleness: Vec<(u64, u64)>,
    /// How many pushes were read how far ahead of the slowest worker.
    pub leads: Vec<(u64, u64)>,
    /// The mean loss of the last [`SMOOTHING`] pushes, at the time of each push.
    pub losses: Vec<(f64, f64)>,
    /// Why it ended early, if a loss was no number any more.
    pub diverged: Option<Diverged>,
    logs: Vec<Vec<UpdateRecord>>,
}

/// A loss that was no number any more. Its gradient was not pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diverged {
    /// Who found it.
    pub worker: u32,
    /// Steps that worker had finished.
    pub step: u64,
}

/// What one worker came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Its number.
    pub worker: u32,
    /// Its pushes.
    pub pushes: u64,
    /// Those of them that were dropped.
    pub dropped: u64,
    /// Pushes per second, between its first and its last.
    pub pushes_per_s: f64,
    /// From the beginning of its first gradient to the arrival of its last.
    pub seconds: f64,
    /// Share of that spent computing.
    pub computing_share: f64,
    /// Share of that spent waiting for servers and, through them, for others.
    pub blocked_share: f64,
    /// Seconds of computing a gradient, mean.
    pub mean_compute: f64,
    /// Seconds of computing a gradient, median.
    pub median_compute: f64,
    /// In clocks; none where the records do not say.
    pub mean_staleness: Option<f64>,
    /// In clocks; none where the records do not say.
    pub max_staleness: Option<f64>,
    /// The furthest that it ran ahead of the slowest.
    pub max_lead: u64,
    /// How many times it was started.
    pub lives: u64,
}

impl RelaxedRun {
    /// Analyses what each server, or without servers each worker, wrote down.
    pub fn of(info: RunInfo, logs: Vec<Vec<UpdateRecord>>, moves: Vec<Move>) -> RelaxedRun {
        let mut run = RelaxedRun { info, moves, logs, ..RelaxedRun::default() };
        run.analyse();
        run
    }

    fn analyse(&mut self) {
        let records = self.records().into_owned();
        let by_worker = by_worker(&records);
        self.updates = self.views().iter().map(|view| distinct_updates(view)).sum();
        self.pushes = records.len() as u64;
        self.dropped = records.iter().filter(|record| !record.is_applied()).count() as u64;
        self.seconds = span(&records);
        let knows_staleness = self.knows_staleness();
        let worker = |records: &Vec<&UpdateRecord>| WorkerStats::of(records, knows_staleness);
        self.workers = by_worker.values().map(worker).collect();
        // An empty sum is -0.
        self.pushes_per_s =
            0.0 + self.workers.iter().map(|worker| worker.pushes_per_s).sum::<f64>();
        self.updates_per_s = self.pushes_per_s * share(self.updates as f64, self.pushes as f64);
        self.samples_per_s = by_worker
            .values()
            .map(|records| {
                let applied = records.iter().filter(|record| record.is_applied());
                share(applied.map(|record| record.samples as f64).sum(), span(records))
            })
            .sum();
        let time: f64 = self.workers.iter().map(|worker| worker.seconds).sum();
        let blocked = self.workers.iter().map(|worker| worker.blocked_share * worker.seconds);
        self.blocked_share = share(blocked.sum(), time);
        if knows_staleness {
            let staleness = || records.iter().map(UpdateRecord::staleness);
            self.mean_staleness = Some(mean(staleness()));
            self.staleness = histogram(staleness().map(|staleness| staleness.round() as u64));
        }
        self.max_lead = records.iter().map(|record| record.lead).max().unwrap_or(0);
        self.leads = histogram(records.iter().map(|record| record.lead));
        self.losses = smoothed(&records);
    }

    /// When the smoothed loss first was at most `loss`, in seconds since the run began.
    pub fn seconds_until(&self, loss: f64) -> Option<f64> {
        // The first few points are means of fewer pushes, and one lucky batch would be one.
        let settled = SMOOTHING.min(self.losses.len()).saturating_sub(1);
        let mut points = self.losses.iter().skip(settled);
        points.find(|(_, smoothed)| *smoothed <= loss).map(|(time, _)| *time)
    }

    /// The last smoothed loss; NaN without a push.
    pub fn final_loss(&self) -> f64 {
        self.losses.last().map_or(f64::NAN, |(_, loss)| *loss)
    }

    /// Whether every push is accounted for exactly once, and in how many parts.
    pub fn ledger(&self) -> Result<Ledger, LedgerError> {
        if self.is_gossip() {
            Ledger::of_workers(&self.logs)
        } else {
            Ledger::of_servers(&self.logs)
        }
    }

    /// Which level suits these workers; none where there was only one, or too little to tell.
    pub fn advice(&self) -> Option<LevelAdvice> {
        if self.is_hogwild() {
            // Its threads share a memory; what servers would cost was not measured.
            return None;
        }
        let records = self.records();
        let paces: Vec<advice::Pace> = by_worker(&records)
            .into_iter()
            .map(|(worker, records)| advice::Pace::of(worker, &records, self.gradients_per_push()))
            .collect();
        LevelAdvice::of(&paces)
    }

    /// How far a worker could be ahead of the slowest: at `bsp` not at all, at `ssp:S` by S, at
    /// `ssp:auto` by the largest bound there was. None where there is no bound.
    pub fn bound(&self) -> Option<u64> {
        match self.info.strategy.as_str() {
            "bsp" => Some(0),
            "ssp:auto" => self.moves.iter().map(|change| change.from.max(change.to)).max(),
            strategy => strategy.strip_prefix("ssp:").and_then(|bound| bound.parse().ok()),
        }
    }

    /// Gradients of which one push is the mean: 1, but at `downpour`.
    pub fn gradients_per_push(&self) -> u64 {
        let downpour = self.info.strategy.strip_prefix("downpour:");
        let push = downpour.and_then(|settings| settings.split(',').next()?.parse().ok());
        push.unwrap_or(1)
    }

    /// Gradients per second, dropped ones included.
    pub fn gradients_per_s(&self) -> f64 {
        self.pushes_per_s * self.gradients_per_push() as f64
    }

    /// What was done with stale gradients.
    pub fn stale(&self) -> &str {
        self.info.settings.get("stale").and_then(|stale| stale.as_str()).unwrap_or("keep")
    }

    /// Servers; 0 where there are none.
    pub fn servers(&self) -> usize {
        if self.has_servers() { self.logs.len() } else { 0 }
    }

    /// Times that a worker was started again.
    pub fn restarts(&self) -> u64 {
        self.workers.iter().map(|worker| worker.lives.saturating_sub(1)).sum()
    }

    /// Bytes that all workers sent and received.
    pub fn bytes(&self) -> u64 {
        self.logs.iter().flatten().map(|record| record.bytes).sum()
    }

    /// Whether there are common weights, that can be newer than those of a gradient.
    fn knows_staleness(&self) -> bool {
        !self.is_gossip()
    }

    fn is_gossip(&self) -> bool {
        self.info.strategy.starts_with("gossip")
    }

    fn is_hogwild(&self) -> bool {
        self.info.strategy.starts_with("hogwild")
    }

    fn has_servers(&self) -> bool {
        !self.is_gossip() && !self.is_hogwild()
    }

    /// The files whose records are those of the run, each of which counts its updates by itself.
    fn views(&self) -> &[Vec<UpdateRecord>] {
        if self.is_gossip() { &self.logs } else { &self.logs[..self.logs.len().min(1)] }
    }

    /// Every push once, in order of time.
    fn records(&self) -> Cow<'_, [UpdateRecord]> {
        let in_order = |records: &[UpdateRecord]| records.is_sorted_by(|a, b| a.time <= b.time);
        match self.views() {
            [] => Cow::Borrowed(&[]),
            [one] if in_order(one) => Cow::Borrowed(one),
            several => {
                let mut records = several.concat();
                records.sort_by(|a, b| a.time.total_cmp(&b.time));
                Cow::Owned(records)
            }
        }
    }
}

impl WorkerStats {
    /// Sums up the pushes of one worker.
    fn of(records: &[&UpdateRecord], knows_staleness: bool) -> WorkerStats {
        let seconds = span(records);
        let computes: Vec<f64> = records.iter().map(|record| known(record.compute)).collect();
        let blocked: f64 = records.iter().map(|record| known(record.blocked)).sum();
        let lives: BTreeSet<u64> = records.iter().map(|record| record.life).collect();
        let staleness = || records.iter().map(|record| record.staleness());
        WorkerStats {
            worker: records.first().map_or(0, |record| record.worker),
            pushes: records.len() as u64,
            dropped: records.iter().filter(|record| !record.is_applied()).count() as u64,
            pushes_per_s: share(records.len() as f64, seconds),
            seconds,
            computing_share: share(computes.iter().sum(), seconds),
            blocked_share: share(blocked, seconds),
            mean_compute: mean(computes.iter().copied()),
            median_compute: median(computes).unwrap_or(0.0),
            mean_staleness: knows_staleness.then(|| mean(staleness())),
            max_staleness: knows_staleness.then(|| staleness().fold(0.0, f64::max)),
            max_lead: records.iter().map(|record| record.lead).max().unwrap_or(0),
            lives: lives.len() as u64,
        }
    }
}

fn by_worker(records: &[UpdateRecord]) -> BTreeMap<u32, Vec<&UpdateRecord>> {
    let mut workers: BTreeMap<u32, Vec<&UpdateRecord>> = BTreeMap::new();
    for record in records {
        workers.entry(record.worker).or_default().push(record);
    }
    workers
}

fn distinct_updates(records: &[UpdateRecord]) -> u64 {
    let updates = records.iter().filter(|record| record.is_applied()).map(|record| record.update);
    updates.collect::<BTreeSet<u64>>().len() as u64
}

/// Seconds from the beginning of the first gradient to the arrival of the last. At least what was
/// spent on the longest of them, so that one push has a rate.
fn span<R: Borrow<UpdateRecord>>(records: &[R]) -> f64 {
    let times = || records.iter().map(Borrow::borrow).filter(|record| record.time.is_finite());
    let spent = |record: &UpdateRecord| known(record.compute) + known(record.blocked);
    let begin = times().map(|record| (record.time - spent(record)).max(0.0));
    let begin = begin.fold(f64::INFINITY, f64::min);
    let end = times().map(|record| record.time).fold(f64::NEG_INFINITY, f64::max);
    if end > begin { end - begin } else { times().map(spent).fold(0.0, f64::max) }
}

/// How often each value occurs, in order of the values.
fn histogram(values: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
    let mut counts = BTreeMap::new();
    for value in values {
        *counts.entry(value).or_insert(0) += 1;
    }
    counts.into_iter().collect()
}

/// At each push, the mean over the last [`SMOOTHING`] of them. One that is not a number makes all
/// means that hold it none.
fn smoothed(records: &[UpdateRecord]) -> Vec<(f64, f64)> {
    let losses: Vec<f64> = records.iter().map(|record| f64::from(record.loss)).collect();
    let point = |(at, record): (usize, &UpdateRecord)| {
        let window = &losses[(at + 1).saturating_sub(SMOOTHING)..=at];
        (record.time, mean(window.iter().copied()))
    };
    records.iter().enumerate().map(point).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
    share(sum, f64::from(n))
}

/// The middle one, or the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (below, above) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values[below] + values[above]) / 2.0)
}

/// A part of a whole; 0 of nothing.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// A time that was not measured took none.
fn known(seconds: f64) -> f64 {
    if seconds.is_finite() { seconds.max(0.0) } else { 0.0 }
}

#[cfg(test)]
pub(crate) mod tests;
