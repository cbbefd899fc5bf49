//! What ranks measured, and what a run says about itself.
//!
//! Times are seconds on the run's common clock. Numbers that came out as NaN or infinite (the loss of
//! a run that diverged) are `null` in JSON, which has no word for them, and NaN when read back.

use serde::{Deserialize, Deserializer, Serialize};

use crate::breakdown::{RunBreakdown, Traffic};

/// The life of one bucket on one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BucketSpan {
    /// Its size.
    pub bytes: u64,
    /// Its last gradient was ready, and it was submitted.
    #[serde(deserialize_with = "number")]
    pub ready: f64,
    /// Its transfer and reduction began. It queued from `ready` until now.
    #[serde(deserialize_with = "number")]
    pub started: f64,
    /// It was reduced and back.
    #[serde(deserialize_with = "number")]
    pub ended: f64,
    /// Seconds since `started` that went into adding up. The others went into moving data and waiting
    /// for other ranks.
    #[serde(default)]
    pub folding: f64,
    /// Seconds since `started` that went into encoding and decoding; none without a codec.
    #[serde(default)]
    pub coding: f64,
}

/// One step of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankStep {
    /// The step began: the previous one ended.
    #[serde(deserialize_with = "number")]
    pub begin: f64,
    /// The backward pass ended: from here this rank only waits for communication.
    #[serde(deserialize_with = "number")]
    pub computed: f64,
    /// The last bucket had arrived.
    #[serde(deserialize_with = "number")]
    pub reduced: f64,
    /// The weights were updated.
    #[serde(deserialize_with = "number")]
    pub end: f64,
    /// Seconds between `begin` and `computed` spent in forward and backward passes. The others went
    /// to data and bookkeeping.
    #[serde(deserialize_with = "number")]
    pub compute: f64,
    /// Seconds of `compute` that were the backward pass of the last micro-batch: what communication
    /// can hide behind.
    #[serde(deserialize_with = "number")]
    pub backward: f64,
    /// The buckets, in order of submission.
    pub buckets: Vec<BucketSpan>,
    /// What its device did, if it computes on one that was watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceTimes>,
}

/// How a device spent a step, in seconds. What it computed, what was exposed and what it was idle add up to the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceTimes {
    /// Kernels ran that are no communication.
    pub compute: f64,
    /// Kernels of communication ran, or gradients and means were copied from it or to it.
    pub communication: f64,
    /// It communicated or copied, and computed nothing.
    pub exposed: f64,
    /// Anything was copied between it and the host's memory.
    pub copies: f64,
    /// It did nothing.
    pub idle: f64,
}

/// One step of all ranks: one line of `steps.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Its number in the run.
    pub step: u64,
    /// The mean loss over the global batch.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Samples in the global batch.
    pub samples: u64,
    /// Bytes sent by all ranks together.
    pub wire_bytes: u64,
    /// By rank.
    pub ranks: Vec<RankStep>,
    /// Whether the replicas were made equal in this step. With local steps they are only now and
    /// then, and in the other steps no rank waits for another.
    #[serde(default = "always")]
    pub agreed: bool,
    /// Whether a codec was in force: not in its warm-up, nor before one was chosen. Absent where that
    /// is not known, and without a codec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoded: Option<bool>,
}

/// What was run, and how: `run.toml`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// What the user calls this run.
    pub name: String,
    /// The model that was trained.
    pub model: String,
    /// What it was trained on.
    pub data: String,
    /// How replicas were kept in step.
    pub strategy: String,
    /// What carried the bytes.
    pub transport: String,
    /// How they were reduced.
    pub algorithm: String,
    /// What gradients were compressed with: "int8", or "auto" where the run chose by itself. Empty or
    /// "none" if they were not.
    #[serde(default)]
    pub codec: String,
    /// Bytes that all ranks together would have sent in a step if every step were an all-reduce
    /// without a codec; 0 if that is not known.
    #[serde(default)]
    pub dense_bytes_per_step: u64,
    /// Number of ranks.
    pub workers: usize,
    /// Number of shards of the global batch.
    pub shards: usize,
    /// The host of each rank.
    pub hosts: Vec<String>,
    /// No rank's times are further than this from the common clock, in seconds. A straggler is only
    /// named when it is later than that.
    #[serde(default)]
    pub clock_error: f64,
    /// Whether its workers did not agree step by step, so that pushes were recorded instead of steps.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relaxed: bool,
    /// Whether its workers could come and go, so that steps differ in their number of ranks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub elastic: bool,
    /// Every setting of the run, as it took effect, defaults included. `overlap = false`, `optimizer`,
    /// `checkpoint_dir` and `framework` are understood by the verdict; all others are only shown.
    #[serde(default)]
    pub settings: toml::Table,
}

impl RunInfo {
    /// The host of a rank, if it is known.
    pub fn host(&self, rank: usize) -> Option<&str> {
        self.hosts.get(rank).map(String::as_str).filter(|host| !host.is_empty())
    }

    /// Whether the ranks are known to be on more than one host.
    pub fn spans_hosts(&self) -> bool {
        self.hosts.iter().any(|host| *host != self.hosts[0])
    }

    /// What ran the model, such as "torch 2.15.0", if it was not this program: what would help is said
    /// in its words.
    pub fn framework(&self) -> Option<&str> {
        self.settings.get("framework").and_then(toml::Value::as_str)
    }

    /// The learning rates that the run had before it was resumed with another: "0.1 until step 300".
    pub fn earlier_rates(&self) -> Option<&str> {
        self.settings.get("earlier_learning_rates").and_then(toml::Value::as_str)
    }

    /// What gradients were compressed with, if with anything.
    pub fn codec(&self) -> Option<&str> {
        Some(self.codec.as_str()).filter(|codec| !codec.is_empty() && *codec != NO_CODEC)
    }

    /// How many times less than without codec and local steps was sent, if that is known: below 1
    /// it was more.
    pub fn wire_ratio(&self, sent: &Traffic) -> Option<f64> {
        let per_step = sent.per_step().filter(|bytes| *bytes > 0.0)?;
        (self.dense_bytes_per_step > 0).then(|| self.dense_bytes_per_step as f64 / per_step)
    }

    /// One line for a headline: "mlp on digits, all-reduce (auto) with codec int8 over shm, 4
    /// workers, 8 shards".
    pub fn subtitle(&self) -> String {
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let codec = self.codec().map(|codec| format!(" with codec {codec}")).unwrap_or_default();
        format!(
            "{} on {}, {} ({}){codec} over {}, {} worker{}, {} shard{}",
            self.model,
            self.data,
            self.strategy,
            self.algorithm,
            self.transport,
            self.workers,
            plural(self.workers),
            self.shards,
            plural(self.shards),
        )
    }
}

/// What one worker manages alone, measured in the same job: the base of the scaling efficiency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// Its [`Summary::samples_per_s`].
    pub one_worker_samples_per_s: f64,
}

impl Scaling {
    /// Throughput over `workers` times that of one worker: 1 is ideal. `None` where nothing was scaled:
    /// for one worker, or if the base is not a positive number.
    pub fn efficiency(&self, samples_per_s: f64, workers: usize) -> Option<f64> {
        let ideal = self.one_worker_samples_per_s * workers as f64;
        (workers > 1 && ideal > 0.0 && ideal.is_finite()).then(|| samples_per_s / ideal)
    }
}

/// What the training itself came to. Insight cannot know it from the records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// On held-out data, 0 to 1, where the model has one.
    pub accuracy: Option<f64>,
    /// The mean loss on held-out data, where the model has one.
    pub held_out_loss: Option<f64>,
    /// Of the final weights.
    pub weights_hash: String,
}

/// The run in one JSON object: `summary.json`, and what `--json` prints.
///
/// Times are those of a typical step (see [`RunBreakdown`]), mean over the ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Steps recorded, warm-up included.
    pub steps: u64,
    /// Loss of the last step.
    #[serde(deserialize_with = "number")]
    pub final_loss: f64,
    /// See [`RunBreakdown::diverged`].
    #[serde(default)]
    pub diverged_at: Option<u64>,
    /// See [`Outcome::accuracy`].
    pub accuracy: Option<f64>,
    /// See [`Outcome::held_out_loss`].
    #[serde(default)]
    pub held_out_loss: Option<f64>,
    /// See [`Outcome::weights_hash`].
    pub weights_hash: String,
    /// Samples per second of typical steps.
    pub samples_per_s: f64,
    /// A typical step. `compute_ms + exposed_ms + straggler_ms + rest_ms`.
    pub step_ms: f64,
    /// 99 % of the steps were no longer than this.
    pub step_p99_ms: f64,
    /// Forward and backward.
    pub compute_ms: f64,
    /// The last backward pass alone.
    pub backward_ms: f64,
    /// Any bucket in transfer or reduction, hidden or not.
    pub comm_ms: f64,
    /// Communication the step waited for.
    pub exposed_ms: f64,
    /// Waiting for the last rank to finish computing.
    pub straggler_ms: f64,
    /// Data, bookkeeping and optimizer.
    pub rest_ms: f64,
    /// Share of the communication that was not exposed; absent without communication.
    pub overlap: Option<f64>,
    /// Share of what could have hidden behind the backward pass that did; absent where nothing could.
    pub hidden_of_hideable: Option<f64>,
    /// The rank the others wait for, if there is one.
    pub straggler_rank: Option<usize>,
    /// Sent by all ranks together in all steps, warm-up included.
    #[serde(default)]
    pub wire_bytes: u64,
    /// Their mean over all steps.
    pub wire_bytes_per_step: f64,
    /// See [`RunInfo::codec`]; "none" without one.
    #[serde(default = "no_codec")]
    pub codec: String,
    /// See [`RunInfo::wire_ratio`]; over all steps.
    pub wire_ratio: Option<f64>,
    /// Steps in which the codec was in force; absent without a codec.
    #[serde(default)]
    pub codec_steps: Option<u64>,
    /// Sent per step in those.
    #[serde(default)]
    pub codec_wire_bytes_per_step: Option<f64>,
    /// The ratio of those.
    #[serde(default)]
    pub codec_wire_ratio: Option<f64>,
    /// Steps before: its warm-up, or those that a choice was made from.
    #[serde(default)]
    pub codec_warmup_steps: Option<u64>,
    /// Sent per step in those.
    #[serde(default)]
    pub codec_warmup_wire_bytes_per_step: Option<f64>,
    /// Number of ranks.
    pub workers: usize,
    /// Number of shards.
    pub shards: usize,
    /// Measured only on request.
    pub one_worker_samples_per_s: Option<f64>,
    /// See [`Scaling::efficiency`].
    pub scaling_efficiency: Option<f64>,
}

impl Summary {
    /// Sums up a run.
    pub fn new(
        info: &RunInfo,
        run: &RunBreakdown,
        outcome: Outcome,
        scaling: Option<Scaling>,
    ) -> Summary {
        let ms = |seconds: f64| seconds * 1e3;
        Summary {
            steps: run.recorded as u64,
            final_loss: run.final_loss.unwrap_or(f64::NAN),
            diverged_at: run.diverged,
            accuracy: outcome.accuracy,
            held_out_loss: outcome.held_out_loss,
            weights_hash: outcome.weights_hash,
            samples_per_s: run.samples_per_s,
            step_ms: ms(run.parts.total()),
            step_p99_ms: ms(run.p99),
            compute_ms: ms(run.parts.compute),
            backward_ms: ms(run.backward),
            comm_ms: ms(run.comm),
            exposed_ms: ms(run.parts.exposed),
            straggler_ms: ms(run.parts.straggler),
            rest_ms: ms(run.parts.rest),
            overlap: run.overlap(),
            hidden_of_hideable: run.hidden_of_hideable(),
            straggler_rank: run.straggler.as_ref().map(|straggler| straggler.rank),
            wire_bytes: run.sent.bytes,
            wire_bytes_per_step: run.sent.per_step().unwrap_or(0.0),
            codec: info.codec().unwrap_or(NO_CODEC).to_owned(),
            wire_ratio: info.wire_ratio(&run.sent),
            codec_steps: run.by_codec.map(|by| by.encoded.steps),
            codec_wire_bytes_per_step: run.by_codec.and_then(|by| by.encoded.per_step()),
            codec_wire_ratio: run.by_codec.and_then(|by| info.wire_ratio(&by.encoded)),
            codec_warmup_steps: run.by_codec.map(|by| by.plain.steps),
            codec_warmup_wire_bytes_per_step: run.by_codec.and_then(|by| by.plain.per_step()),
            workers: info.workers,
            shards: info.shards,
            one_worker_samples_per_s: scaling.map(|s| s.one_worker_samples_per_s),
            scaling_efficiency: scaling.and_then(|s| s.efficiency(run.samples_per_s, info.workers)),
        }
    }

    /// The measurement of one worker alone, if there was one.
    pub fn scaling(&self) -> Option<Scaling> {
        self.one_worker_samples_per_s
            .map(|one_worker_samples_per_s| Scaling { one_worker_samples_per_s })
    }
}

/// What stands where a codec would.
const NO_CODEC: &str = "none";

fn no_codec() -> String {
    NO_CODEC.into()
}

fn always() -> bool {
    true
}

/// A number, or NaN where JSON has `null`.
pub(crate) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diverged_loss_survives_json() {
        let record = StepRecord {
            step: 7,
            loss: f64::INFINITY,
            samples: 64,
            wire_bytes: 10,
            ranks: Vec::new(),
            agreed: true,
            encoded: None,
        };
        let read: StepRecord =
            serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        assert!(read.loss.is_nan());
        assert_eq!(read.step, 7);
    }

    #[test]
    fn records_from_before_codecs_can_be_read() {
        let step = r#"{"step":7,"loss":1.0,"samples":64,"wire_bytes":10,"ranks":[{"begin":0.0,
            "computed":1.0,"reduced":2.0,"end":3.0,"compute":1.0,"backward":0.5,
            "buckets":[{"bytes":4,"ready":0.5,"started":0.5,"ended":1.0}]}]}"#;
        let step: StepRecord = serde_json::from_str(step).unwrap();
        assert!(step.agreed);
        assert_eq!(step.encoded, None);
        assert_eq!(step.ranks[0].buckets[0].coding, 0.0);
        let info = "name='a'\nmodel=''\ndata=''\nstrategy=''\ntransport=''\nalgorithm=''\n\
                    workers=1\nshards=1\nhosts=[]";
        let info: RunInfo = toml::from_str(info).unwrap();
        assert_eq!((info.codec(), info.dense_bytes_per_step), (None, 0));
        assert_eq!(info.wire_ratio(&Traffic { steps: 1, bytes: 10 }), None);
    }

    #[test]
    fn a_codec_is_part_of_the_headline_unless_there_is_none() {
        let with = |codec: &str| RunInfo { codec: codec.into(), ..RunInfo::default() };
        assert!(with("int8").subtitle().contains(" with codec int8 over "));
        assert_eq!(with("none").subtitle(), with("").subtitle());
        assert!(!with("none").subtitle().contains("codec"));
    }

    #[test]
    fn the_wire_ratio_compares_with_what_would_have_been_sent() {
        let info = RunInfo { dense_bytes_per_step: 400, ..RunInfo::default() };
        assert_eq!(info.wire_ratio(&Traffic { steps: 3, bytes: 300 }), Some(4.0));
        assert_eq!(info.wire_ratio(&Traffic { steps: 3, bytes: 0 }), None);
        assert_eq!(info.wire_ratio(&Traffic::default()), None);
    }

    #[test]
    fn a_missing_number_is_not_a_diverged_one() {
        let without_loss = r#"{"step":7,"samples":64,"wire_bytes":10,"ranks":[]}"#;
        assert!(serde_json::from_str::<StepRecord>(without_loss).is_err());
    }

    #[test]
    fn efficiency_compares_with_as_many_lone_workers() {
        let scaling = Scaling { one_worker_samples_per_s: 100.0 };
        assert_eq!(scaling.efficiency(300.0, 4), Some(0.75));
        assert_eq!(scaling.efficiency(300.0, 1), None);
        assert_eq!(Scaling { one_worker_samples_per_s: 0.0 }.efficiency(300.0, 4), None);
    }
}
