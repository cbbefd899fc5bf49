//! Collects what all workers measured, on one clock, at rank 0.
//!
//! Every worker keeps the times of its steps as seconds since it started recording, and knows by how
//! much that start is off from rank 0's, which it finds out by asking rank 0 what time it is. Now and
//! then the records travel to rank 0, between two steps.

use std::time::Instant;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use unisono::Group;
use unisono::insight::clock::{Offset, Sample};
use unisono::insight::{BucketSpan, RankStep, StepRecord};
use unisono::sync::{StepOutcome, StepTimes};

/// Questions to rank 0. More: a better chance that one is answered undisturbed.
const QUESTIONS: usize = 20;

/// Steps between two journeys of the records. More: more memory, and more is lost with a run that is
/// killed. Fewer: more interruptions.
const INTERVAL: usize = 50;

const ASK: u32 = 1;
const ANSWER: u32 = 2;

/// One worker's records.
pub struct Recorder {
    start: Instant,
    offset: Offset,
    /// How far any rank's clock may be off.
    pub clock_error: f64,
    sent: u64,
    samples: u64,
    kept: Vec<Kept>,
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

impl Recorder {
    /// Sets the clocks. All ranks must call it.
    pub fn new(group: &Group, samples: usize) -> anyhow::Result<Recorder> {
        let start = Instant::now();
        let offset = compare_clocks(group, start)?;
        let mut errors = [offset.error];
        group.all_reduce(&mut errors, unisono::Reduction::Max)?;
        let (samples, kept) = (samples as u64, Vec::new());
        Ok(Recorder { start, offset, clock_error: errors[0], sent: 0, samples, kept })
    }

    /// Notes a step. `sent` is what this rank had sent after it.
    pub fn note(&mut self, step: u64, outcome: &StepOutcome, sent: u64) {
        let times = self.on_common_clock(&outcome.times);
        let since = sent - self.sent;
        self.sent = sent;
        let loss = Some(f64::from(outcome.loss)).filter(|loss| loss.is_finite());
        let StepOutcome { agreed, encoded, .. } = *outcome;
        self.kept.push(Kept { step, loss, sent: since, agreed, encoded, times });
    }

    /// Whether it is time to [hand in](Recorder::hand_in) the records; the same on all ranks.
    pub fn is_due(&self) -> bool {
        self.kept.len() >= INTERVAL
    }

    /// Hands in what was noted since the last time: rank 0 gets it all. All ranks must call it, at
    /// the same step.
    pub fn hand_in(&mut self, group: &Group) -> anyhow::Result<Vec<StepRecord>> {
        let bytes = serde_json::to_vec(&self.kept).context("encoding the records")?;
        let steps = std::mem::take(&mut self.kept).len();
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
        let mut ranks = Vec::with_capacity(group.size());
        for bytes in all.chunks(longest.max(1)) {
            let kept: Vec<Kept> = serde_json::from_slice(bytes).context("decoding the records")?;
            ranks.push(kept.into_iter());
        }
        let mut records = Vec::with_capacity(steps);
        for _ in 0..steps {
            let all: Vec<Kept> = ranks.iter_mut().filter_map(Iterator::next).collect();
            let first = all.first().context("rank 0 has as many records as it noted")?;
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
            // The offset is rank 0's clock minus ours.
            here + self.offset.seconds
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

/// By how much rank 0's clock is ahead of this rank's. Ranks ask one after the other, so that nobody's
/// question waits for somebody else's.
fn compare_clocks(group: &Group, start: Instant) -> anyhow::Result<Offset> {
    let now = || start.elapsed().as_secs_f64();
    let mut own = Offset { seconds: 0.0, error: 0.0 };
    for rank in 1..group.size() {
        if group.rank() == 0 {
            for _ in 0..QUESTIONS {
                group.receive(&mut [0u8], rank, ASK)?;
                group.send(&[now()], rank, ANSWER)?;
            }
        } else if group.rank() == rank {
            let mut samples = Vec::with_capacity(QUESTIONS);
            for _ in 0..QUESTIONS {
                let sent = now();
                group.send(&[0u8], 0, ASK)?;
                let mut remote = [0f64];
                group.receive(&mut remote, 0, ANSWER)?;
                samples.push(Sample { sent, remote: remote[0], received: now() });
            }
            own = Offset::from_samples(&samples).context("comparing clocks with rank 0")?;
        }
    }
    Ok(own)
}
