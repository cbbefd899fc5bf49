//! What a step's time was spent on.
//!
//! A rank's step is four instants in order: `begin`, `computed`, `reduced`, `end`. Up to `computed`
//! it computes (or prepares data); from `computed` to `reduced` it can only wait. Part of that wait is
//! not the network's doing: until the *last* rank has computed, no communication could have finished,
//! so the wait up to the last rank's `computed` is charged to that **straggler**, and only the rest of
//! it is **exposed** communication. What is neither compute nor waiting is the **rest**: data,
//! bookkeeping, optimizer. The four add up to the step by construction.
//!
//! **Communication** is the time in which at least one bucket was being transferred or reduced. A rank
//! that is early also counts the wait for its peers in there, so a step's communication is that of the
//! rank with the least. What was not exposed was **hidden**; **hideable** is the smaller of it and the
//! backward pass.
//!
//! Part of the communication is **coding**, if there is a codec: encoding and decoding, on the rank
//! whose communication it is.
//!
//! A run is summed up by its **typical step**: the mean over the middle half of its steps, ordered by
//! duration, after warm-up, its codec's included. Like a median it ignores outliers; unlike medians of the parts, its parts
//! add up. With local steps there are two kinds of steps, and those in which ranks agree, few and long,
//! would be ignored like outliers. So each kind has its own middle half, and both are weighed by how
//! many steps are of that kind: what is done every twentieth step counts as a twentieth. Where ranks do
//! not agree, no rank waits, and so none is last.
//!
//! Records come from other processes and from files, so nothing about them is taken for granted. An
//! instant that is no number, or absurdly large, is taken to be the instant before it; one that lies
//! before its predecessor likewise; a `begin` that is no number is the earliest of the others. A
//! length is cut to the interval it lies in. Thus every part is finite and not negative, and they add
//! up to `end - begin` of the repaired step, which for a record in order is the step as measured.

use serde::Serialize;

use crate::record::{RankStep, RunInfo, StepRecord};

/// Steps at the start of a run that are not representative: connections warm up, memory is touched for
/// the first time, bucket sizes are being tuned. Fewer would let them into the figures of short runs;
/// more would leave those without data.
const WARM_UP_AT_MOST: usize = 20;

/// Warm-up is at most one step in this many, so that a short run keeps most of its data.
const WARM_UP_ONE_IN: usize = 5;

/// Steps with a codec that make those before it warm-up. With fewer, one hiccup would decide the
/// figures; with more, those of short runs would be of a mixture.
const ENOUGH_ENCODED: usize = 5;

/// A rank is a straggler if it was last in at least this share of the steps. Of two equal ranks one is
/// last in more than half by chance; a lower share would name it. A higher one would miss a rank
/// that is slow most of the time.
pub const STRAGGLER_LAST_SHARE: f64 = 0.6;

/// ... and if the others waited for it for at least this share of a typical step. Less is not worth
/// the user's time, and within the noise of a busy machine; more would hide what is easily fixed. What
/// is within the error of the clocks never counts.
pub const STRAGGLER_COST_SHARE: f64 = 0.05;

/// No clock of a run counts this many seconds: 3000 years. What is beyond was not measured.
const ABSURD: f64 = 1e11;

/// A stretch of time, by what it was spent on. Seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Parts {
    /// Forward and backward.
    pub compute: f64,
    /// Waiting for the last rank to finish computing.
    pub straggler: f64,
    /// Waiting for communication.
    pub exposed: f64,
    /// Data, bookkeeping and optimizer.
    pub rest: f64,
}

impl Parts {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.compute + self.straggler + self.exposed + self.rest
    }

    /// The share of a part in the whole; zero of nothing.
    pub fn share(&self, part: f64) -> f64 {
        let total = self.total();
        if total > 0.0 { part / total } else { 0.0 }
    }

    /// The mean, zero of nothing.
    pub fn mean<'a>(all: impl IntoIterator<Item = &'a Parts>) -> Parts {
        Parts::weighted(all.into_iter().map(|parts| (1.0, parts)))
    }

    /// The mean by weights, zero of nothing.
    fn weighted<'a>(all: impl IntoIterator<Item = (f64, &'a Parts)>) -> Parts {
        let mut sum = Parts::default();
        let mut weights = 0.0;
        for (weight, parts) in all {
            sum.compute += weight * parts.compute;
            sum.straggler += weight * parts.straggler;
            sum.exposed += weight * parts.exposed;
            sum.rest += weight * parts.rest;
            weights += weight;
        }
        if weights == 0.0 {
            return sum;
        }
        Parts {
            compute: sum.compute / weights,
            straggler: sum.straggler / weights,
            exposed: sum.exposed / weights,
            rest: sum.rest / weights,
        }
    }
}

/// One step of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankBreakdown {
    /// The step's time.
    pub parts: Parts,
    /// How much later than the first rank this one had computed.
    pub lateness: f64,
    /// Any bucket in transfer or reduction, waits for peers included.
    pub comm: f64,
    /// Encoding and decoding during that.
    pub coding: f64,
    /// The backward pass that communication could hide behind.
    pub backward: f64,
}

/// One step of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct StepBreakdown {
    /// Its number in the run.
    pub step: u64,
    /// By rank.
    pub ranks: Vec<RankBreakdown>,
    /// The mean over the ranks.
    pub parts: Parts,
    /// The rank that had computed last, the lowest of several; none if there is but one rank, or if
    /// they did not agree.
    pub last: Option<usize>,
    /// Communication: that of the rank with the least, for it waited least for others.
    pub comm: f64,
    /// Encoding and decoding of that rank: a part of `comm`.
    pub coding: f64,
    /// The mean backward pass.
    pub backward: f64,
}

impl StepBreakdown {
    /// Breaks down one step.
    pub fn of(record: &StepRecord) -> StepBreakdown {
        let repaired: Vec<Repaired> = record.ranks.iter().map(Repaired::of).collect();
        let computed = || repaired.iter().map(|rank| rank.computed);
        let latest = computed().fold(f64::NEG_INFINITY, f64::max);
        let earliest = computed().fold(f64::INFINITY, f64::min);
        let communication: Vec<(f64, f64)> =
            repaired.iter().zip(&record.ranks).map(|(rank, m)| rank.communication(m)).collect();
        let least = communication.iter().copied().filter(|(comm, _)| *comm > 0.0);
        let (comm, coding) = least.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 0.0));
        let ranks: Vec<RankBreakdown> = repaired
            .iter()
            .zip(communication)
            .map(|(rank, (own, coding))| RankBreakdown {
                parts: rank.parts(latest, comm),
                lateness: rank.computed - earliest,
                comm: own,
                coding,
                backward: rank.backward,
            })
            .collect();
        StepBreakdown {
            step: record.step,
            parts: Parts::mean(ranks.iter().map(|rank| &rank.parts)),
            last: computed()
                .position(|at| at == latest)
                .filter(|_| record.agreed && ranks.len() > 1),
            comm,
            coding,
            backward: mean(ranks.iter().map(|rank| rank.backward)),
            ranks,
        }
    }

    /// How long the step took, mean over the ranks.
    pub fn duration(&self) -> f64 {
        self.parts.total()
    }

    /// Communication the step did not wait for.
    pub fn hidden(&self) -> f64 {
        (self.comm - self.parts.exposed).max(0.0)
    }

    /// The share of the communication the step did not wait for; none without communication.
    pub fn overlap(&self) -> Option<f64> {
        overlap(self.comm, self.parts.exposed)
    }

    /// How long the others waited for the last rank, mean over them.
    fn cost_of_last(&self) -> f64 {
        // The last rank itself waits for no other.
        let others = self.ranks.len().saturating_sub(1).max(1);
        self.ranks.iter().map(|rank| rank.parts.straggler).sum::<f64>() / others as f64
    }
}

/// One rank over the run: its typical step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankStats {
    /// Where its time went.
    pub parts: Parts,
    /// How much later than the first rank it had computed.
    pub lateness: f64,
    /// In this share of the steps in which ranks agreed it was the last.
    pub last_share: f64,
}

/// A rank that holds up the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Straggler {
    /// Which.
    pub rank: usize,
    /// In this share of the steps in which ranks agreed it was the last.
    pub last_share: f64,
    /// Seconds of a typical step that each of the others waits for it, mean over them.
    pub cost: f64,
    /// Its compute time over the median of the others'. Near 1, it is late for another reason: its
    /// data, or work beside the training.
    pub slowdown: f64,
}

/// A run: its typical step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunBreakdown {
    /// Steps recorded.
    pub recorded: usize,
    /// Steps at the start that the figures leave out.
    pub warm_up: usize,
    /// Steps recorded in which ranks agreed: all, but with local steps.
    pub agreed: usize,
    /// Where the time of a typical step goes, mean over the ranks.
    pub parts: Parts,
    /// 99 % of the steps took no longer than this.
    pub p99: f64,
    /// Communication, see [`StepBreakdown::comm`].
    pub comm: f64,
    /// Encoding and decoding, a part of `comm`.
    pub coding: f64,
    /// The backward pass of the last micro-batch.
    pub backward: f64,
    /// Communication the step did not wait for.
    pub hidden: f64,
    /// Communication that could hide behind the backward pass.
    pub hideable: f64,
    /// Buckets of a step in which ranks agree.
    pub buckets: usize,
    /// By rank.
    pub ranks: Vec<RankStats>,
    /// The rank that was last in most steps, if that matters.
    pub straggler: Option<Straggler>,
    /// Throughput.
    pub samples_per_s: f64,
    /// Sent in all steps recorded. Bytes are counted, not measured: no step is an outlier.
    pub sent: Traffic,
    /// The same by whether a codec was in force; absent if that is known of no step.
    pub by_codec: Option<ByCodec>,
    /// The loss of the last step recorded.
    pub final_loss: Option<f64>,
    /// The first of the steps up to the last whose losses are no numbers; none if the last one is, or
    /// where a [framework](RunInfo::framework) may just not have said it.
    pub diverged: Option<u64>,
}

/// What all ranks together sent in some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// How many steps.
    pub steps: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Traffic {
    /// What these steps sent.
    pub fn of<'a>(steps: impl IntoIterator<Item = &'a StepRecord>) -> Traffic {
        steps.into_iter().fold(Traffic::default(), |sum, step| Traffic {
            steps: sum.steps + 1,
            bytes: sum.bytes.saturating_add(step.wire_bytes),
        })
    }

    /// The mean of a step; none of none.
    pub fn per_step(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.bytes as f64 / self.steps as f64)
    }
}

/// What was sent before a codec was in force, and since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByCodec {
    /// In the codec's warm-up, or before one was chosen.
    pub plain: Traffic,
    /// While it was in force.
    pub encoded: Traffic,
}

impl ByCodec {
    fn of(records: &[StepRecord]) -> Option<ByCodec> {
        let with = |encoded| {
            Traffic::of(records.iter().filter(move |record| record.encoded == Some(encoded)))
        };
        let by = ByCodec { plain: with(false), encoded: with(true) };
        (by != ByCodec::default()).then_some(by)
    }
}

impl RunBreakdown {
    /// Breaks down a run.
    pub fn of(info: &RunInfo, records: &[StepRecord]) -> RunBreakdown {
        let warm_up =
            WARM_UP_AT_MOST.min(records.len() / WARM_UP_ONE_IN).max(before_codec(records));
        let measured = &records[warm_up..];
        let mut steps: Vec<(StepBreakdown, &StepRecord)> =
            measured.iter().map(|record| (StepBreakdown::of(record), record)).collect();
        steps.sort_by(|a, b| a.0.duration().total_cmp(&b.0.duration()));
        let agreed = || records.iter().filter(|record| record.agreed);
        let typical = typical(&steps, agreed().count() as f64 / records.len().max(1) as f64);

        let over_typical = |f: &dyn Fn(&StepBreakdown) -> f64| {
            weighted_mean(typical.iter().map(|t| (t.weight, f(t.step))))
        };
        let parts = Parts::weighted(typical.iter().map(|t| (t.weight, &t.step.parts)));
        let ranks = rank_stats(&steps, &typical);
        let threshold = (STRAGGLER_COST_SHARE * parts.total()).max(info.clock_error);
        let samples = weighted_mean(typical.iter().map(|t| (t.weight, t.record.samples as f64)));
        RunBreakdown {
            recorded: records.len(),
            warm_up,
            agreed: agreed().count(),
            p99: percentile(&steps, 0.99),
            comm: over_typical(&|step| step.comm),
            coding: over_typical(&|step| step.coding),
            backward: over_typical(&|step| step.backward),
            hidden: over_typical(&StepBreakdown::hidden),
            hideable: over_typical(&|step| step.comm.min(step.backward)),
            straggler: straggler(&typical, &ranks, threshold),
            buckets: agreed()
                .next_back()
                .and_then(|r| r.ranks.first())
                .map_or(0, |r| r.buckets.len()),
            ranks,
            samples_per_s: if parts.total() > 0.0 { samples / parts.total() } else { 0.0 },
            sent: Traffic::of(records),
            by_codec: ByCodec::of(records).filter(|_| info.codec().is_some()),
            final_loss: records.last().map(|record| record.loss),
            diverged: diverged(records).filter(|_| info.framework().is_none()),
            parts,
        }
    }

    /// Steps the figures rest on.
    pub fn measured(&self) -> usize {
        self.recorded - self.warm_up
    }

    /// Whether ranks agree only now and then.
    pub fn has_local_steps(&self) -> bool {
        self.agreed < self.recorded
    }

    /// The share of the communication that is encoding and decoding; none without any.
    pub fn coding_share(&self) -> Option<f64> {
        (self.coding > 0.0).then(|| self.coding / self.comm)
    }

    /// The share of the communication that steps did not wait for; none without communication.
    pub fn overlap(&self) -> Option<f64> {
        overlap(self.comm, self.parts.exposed)
    }

    /// The share of what could hide behind the backward pass that did; none where nothing could.
    pub fn hidden_of_hideable(&self) -> Option<f64> {
        (self.hideable > 0.0).then(|| (self.hidden / self.hideable).min(1.0))
    }
}

/// Steps at the start that were not encoded, if enough were afterwards. They are another kind of step,
/// and which of the two is in the middle by duration would be chance.
fn before_codec(records: &[StepRecord]) -> usize {
    let plain = records.iter().take_while(|record| record.encoded == Some(false)).count();
    let with = records[plain..].iter().take_while(|record| record.encoded == Some(true)).count();
    if with >= ENOUGH_ENCODED { plain } else { 0 }
}

/// Since which step the loss is no number, if it is none in the end.
fn diverged(records: &[StepRecord]) -> Option<u64> {
    let lost = records.iter().rev().take_while(|record| !record.loss.is_finite());
    lost.last().map(|record| record.step)
}

/// A rank's step with its instants in order and its lengths in bounds, relative to `begin`: the
/// differences of small numbers are exact where those of wall-clock times are not.
struct Repaired {
    begin: f64,
    computed: f64,
    to_computed: f64,
    to_reduced: f64,
    to_end: f64,
    compute: f64,
    backward: f64,
}

impl Repaired {
    fn of(rank: &RankStep) -> Repaired {
        let known = |instant: f64| (instant.abs() < ABSURD).then_some(instant);
        let begin = known(rank.begin).unwrap_or_else(|| {
            let others = [rank.computed, rank.reduced, rank.end].into_iter().filter_map(known);
            others.min_by(f64::total_cmp).unwrap_or(0.0)
        });
        let after = |earlier: f64, instant: f64| {
            known(instant).map_or(earlier, |instant| (instant - begin).max(earlier))
        };
        let to_computed = after(0.0, rank.computed);
        let to_reduced = after(to_computed, rank.reduced);
        let to_end = after(to_reduced, rank.end);
        let compute = length(rank.compute, to_computed);
        let backward = length(rank.backward, compute);
        let computed = begin + to_computed;
        Repaired { begin, computed, to_computed, to_reduced, to_end, compute, backward }
    }

    /// A rank cannot have waited for communication for longer than there was any. What it waited
    /// beyond that is the time until its threads got a processor again, and is part of the rest.
    fn parts(&self, latest_computed: f64, comm: f64) -> Parts {
        let waited = self.to_reduced - self.to_computed;
        let straggler = (latest_computed - self.computed).min(waited);
        let exposed = (waited - straggler).min(comm);
        let idle = waited - straggler - exposed;
        let before = self.to_computed - self.compute;
        let after = self.to_end - self.to_reduced;
        Parts { compute: self.compute, straggler, exposed, rest: before + idle + after }
    }

    /// The length of the union of the buckets' transfers, within the step, and how much of it was
    /// encoding and decoding.
    fn communication(&self, measured: &RankStep) -> (f64, f64) {
        let within = |instant: f64| (instant - self.begin).clamp(0.0, self.to_end);
        let mut spans: Vec<(f64, f64)> = measured
            .buckets
            .iter()
            .map(|bucket| (within(bucket.started), within(bucket.ended)))
            .filter(|(started, ended)| started < ended)
            .collect();
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut covered_until = 0.0;
        let mut covered = 0.0;
        for (started, ended) in spans {
            covered += (ended - started.max(covered_until)).max(0.0);
            covered_until = ended.max(covered_until);
        }
        let coding = measured.buckets.iter().map(|bucket| length(bucket.coding, covered)).sum();
        (covered, length(coding, covered))
    }
}

/// A length within `0..=limit`; what is no number has none.
fn length(seconds: f64, limit: f64) -> f64 {
    if seconds.is_nan() { 0.0 } else { seconds.clamp(0.0, limit) }
}

fn overlap(comm: f64, exposed: f64) -> Option<f64> {
    (comm > 0.0).then(|| (1.0 - exposed / comm).max(0.0))
}

/// A step that a typical one is the mean of.
struct Typical<'a> {
    weight: f64,
    step: &'a StepBreakdown,
    record: &'a StepRecord,
}

/// Of steps sorted by duration, the middle half of each kind: where ranks agree, which they do in
/// this share of the run, and where not.
fn typical<'a>(sorted: &'a [(StepBreakdown, &StepRecord)], agreed_share: f64) -> Vec<Typical<'a>> {
    let mut typical = Vec::with_capacity(sorted.len() / 2 + 4);
    for (agreed, share) in [(true, agreed_share), (false, 1.0 - agreed_share)] {
        let kind: Vec<_> = sorted.iter().filter(|(_, record)| record.agreed == agreed).collect();
        let n = kind.len();
        let middle = &kind[n / 4..n - n / 4];
        let weight = share / middle.len() as f64;
        typical.extend(middle.iter().map(|(step, record)| Typical { weight, step, record }));
    }
    typical
}

fn rank_stats(steps: &[(StepBreakdown, &StepRecord)], typical: &[Typical]) -> Vec<RankStats> {
    let world = steps.iter().map(|(step, _)| step.ranks.len()).max().unwrap_or(0);
    let mut stats: Vec<RankStats> = (0..world)
        .map(|rank| {
            let own =
                || typical.iter().filter_map(move |t| Some((t.weight, t.step.ranks.get(rank)?)));
            RankStats {
                parts: Parts::weighted(own().map(|(weight, rank)| (weight, &rank.parts))),
                lateness: weighted_mean(own().map(|(weight, rank)| (weight, rank.lateness))),
                last_share: 0.0,
            }
        })
        .collect();
    let agreed = steps.iter().filter(|(_, record)| record.agreed).count() as f64;
    for last in steps.iter().filter_map(|(step, _)| step.last) {
        stats[last].last_share += 1.0 / agreed;
    }
    stats
}

fn straggler(typical: &[Typical], ranks: &[RankStats], threshold: f64) -> Option<Straggler> {
    let (rank, stats) =
        ranks.iter().enumerate().max_by(|a, b| a.1.last_share.total_cmp(&b.1.last_share))?;
    let cost = weighted_mean(typical.iter().map(|Typical { weight, step, .. }| {
        (*weight, if step.last == Some(rank) { step.cost_of_last() } else { 0.0 })
    }));
    if stats.last_share < STRAGGLER_LAST_SHARE || cost <= threshold {
        return None;
    }
    let mut others: Vec<f64> = ranks
        .iter()
        .enumerate()
        .filter(|(other, _)| *other != rank)
        .map(|(_, stats)| stats.parts.compute)
        .collect();
    others.sort_by(f64::total_cmp);
    let median = others.get(others.len() / 2).copied().unwrap_or(0.0);
    let slowdown = if median > 0.0 { stats.parts.compute / median } else { 1.0 };
    Some(Straggler { rank, last_share: stats.last_share, cost, slowdown })
}

/// The duration that a share of the steps, sorted by duration, does not exceed.
fn percentile(sorted: &[(StepBreakdown, &StepRecord)], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(index.saturating_sub(1)).map_or(0.0, |(step, _)| step.duration())
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    weighted_mean(values.map(|value| (1.0, value)))
}

fn weighted_mean(values: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (weights, sum) =
        values.fold((0.0, 0.0), |(weights, sum), (w, value)| (weights + w, sum + w * value));
    if weights == 0.0 { 0.0 } else { sum / weights }
}

#[cfg(test)]
mod tests;
