//! A run, with everything decided.

use std::path::PathBuf;

use anyhow::Context;
use unisono::codec::UnusedRule;
use unisono::optimizer::OptimizerSpec;
use unisono::relaxed::spec::Level;
use unisono::relaxed::staleness::StalenessPolicy;
use unisono::sync::Settings;
use unisono::sync::bucket::BucketSizes;
use unisono::sync::strategy::Compression;
use unisono::sync::strategy::StrategySpec;
use unisono::worker::{Consistency, Training};
use unisono_workload::data::DataSpec;
use unisono_workload::model::ModelSpec;

use super::{CodecChoice, ServersChoice};

/// Milliseconds that a worker replays for a shard if nothing else is known.
const REPLAY_MS: f64 = 50.0;

/// What there is to compute.
#[derive(Clone, Debug)]
pub enum ComputationSpec {
    /// A model that learns.
    Learn { model: ModelSpec, data: DataSpec },
    /// A model that is replayed.
    Replay { spec: String, compute_ms: Option<f64> },
}

/// A run, with everything decided but the number of workers.
#[derive(Clone)]
pub struct RunPlan {
    pub computation: ComputationSpec,
    pub shards: usize,
    pub batch: usize,
    pub steps: u64,
    pub optimizer: OptimizerSpec,
    pub seed: u64,
    pub threads: usize,
    pub buckets: Option<BucketSizes>,
    pub overlap: bool,
    pub strategy: StrategySpec,
    pub relaxed: Option<RelaxedPlan>,
    pub elastic: Option<ElasticPlan>,
    pub codec: CodecChoice,
    pub compression: Option<Compression>,
    pub check_every: u64,
    pub checkpoint_dir: Option<PathBuf>,
    pub checkpoint_every: u64,
    pub resume: bool,
    pub run_dir: Option<PathBuf>,
    pub measure_scaling: bool,
    pub slow: Option<(usize, f64)>,
    pub accumulate: usize,
    /// What it was made from, where that says more than what was made of it.
    pub given: Given,
}

/// What the plan was made from.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    pub workers: usize,
    /// Whether the user chose it.
    pub learning_rate: bool,
    /// As above.
    pub shards: bool,
    /// The usual size of a batch, if the shards made it another.
    pub instead_of_batch: Option<usize>,
}

/// What makes a run relaxed.
#[derive(Clone, Debug)]
pub struct RelaxedPlan {
    pub level: Level,
    pub stale: StalenessPolicy,
    pub servers: ServersChoice,
    pub journal: Option<PathBuf>,
    pub restarts: u32,
}

/// What makes a run elastic.
#[derive(Clone, Copy, Debug)]
pub struct ElasticPlan {
    /// With fewer workers the run waits.
    pub least: u32,
    pub restarts: u32,
}

impl RunPlan {
    /// How the replicas are kept in step.
    pub fn settings(&self) -> Settings {
        let mut settings = Settings::new(self.shards);
        settings.buckets = self.buckets;
        settings.overlap = self.overlap;
        settings.strategy = self.strategy;
        settings.compression = self.compression.clone();
        settings.withhold = self.elastic.is_some();
        settings
    }

    /// A relaxed run, as the library's workers know it.
    pub fn training(&self) -> anyhow::Result<Training> {
        let relaxed = self.relaxed.as_ref().context("a relaxed run")?;
        let consistency = Consistency::Relaxed(relaxed.level);
        Ok(Training {
            settings: self.settings(),
            samples: (self.batch / self.shards) as u64,
            stale: relaxed.stale,
            seed: self.seed,
            ..Training::new(consistency, self.optimizer, self.shards, self.steps)
        })
    }

    /// How many times as long as needed a worker is made to compute.
    pub fn slowness(&self, worker: usize) -> f64 {
        self.slow.filter(|(slow, _)| *slow == worker).map_or(1.0, |(_, factor)| factor)
    }

    /// What decides about the weights: two runs with equal identities have equal weights.
    pub fn identity(&self) -> Vec<(&'static str, String)> {
        let (model, data) = self.names();
        vec![
            ("model", model),
            ("data", data),
            ("seed", self.seed.to_string()),
            ("batch", self.batch.to_string()),
            ("shards", self.shards.to_string()),
            ("threads", self.threads.to_string()),
            ("optimizer", self.optimizer.to_string()),
            ("strategy", self.strategy_name()),
            ("codec", self.describe_codec()),
        ]
    }

    /// What the user should know before it begins.
    pub fn notices(&self) -> Vec<String> {
        let RunPlan { batch, shards, steps, .. } = self;
        let batch = self.given.instead_of_batch.map(|usual| {
            format!(
                "a step has {batch} samples instead of the usual {usual}, which {shards} shards cannot \
                 share evenly; set --batch to choose"
            )
        });
        let warm_up = self.compression.as_ref().map(|compression| compression.warm_up);
        let never = warm_up.filter(|warm_up| *warm_up >= self.steps).map(|warm_up| {
            format!(
                "nothing will be encoded: the codec begins after {warm_up} steps, and the run has \
                 {steps}; set --codec-warmup"
            )
        });
        batch.into_iter().chain(never).collect()
    }

    /// The strategy, whichever kind it is.
    pub fn strategy_name(&self) -> String {
        let relaxed = self.relaxed.as_ref().map(|relaxed| relaxed.level.to_string());
        relaxed.unwrap_or_else(|| self.strategy.to_string())
    }

    /// The codec, for people: rules too, if there is nothing else.
    pub fn codec_name(&self) -> String {
        match &self.compression {
            Some(compression) if self.codec == CodecChoice::None => {
                let rules: Vec<String> =
                    compression.rules.exceptions.iter().map(ToString::to_string).collect();
                rules.join(", ")
            }
            _ => self.codec.to_string(),
        }
    }

    /// The codec with all that belongs to it.
    pub fn describe_codec(&self) -> String {
        let mut text = self.codec.to_string();
        if let Some(compression) = &self.compression {
            for rule in &compression.rules.exceptions {
                text += &format!(", {rule}");
            }
            if compression.warm_up > 0 {
                text += &format!(", from step {}", compression.warm_up);
            }
            if let Some(relative) = compression.relative {
                text += if relative { ", relative" } else { ", not relative" };
            }
            if !compression.error_feedback {
                text += ", without residuals";
            }
        }
        text
    }

    /// Fails if a rule for codecs fits none of the parameters.
    pub fn expect_rules_fit<'a>(
        &self,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), UnusedRule> {
        self.compression.as_ref().map_or(Ok(()), |with| with.rules.expect_fits(names))
    }

    /// The model and the data, for people.
    pub fn names(&self) -> (String, String) {
        match &self.computation {
            ComputationSpec::Learn { model, data } => (model.to_string(), data.to_string()),
            ComputationSpec::Replay { spec, .. } => {
                (format!("replay:{spec}"), "nothing".to_owned())
            }
        }
    }

    /// The model in one word, for the name of a folder.
    pub fn short_name(&self) -> String {
        let (model, _) = self.names();
        model.split([' ', ':', '/']).next().unwrap_or("run").to_owned()
    }

    /// Milliseconds that a worker replays for a shard.
    pub fn replay_ms(compute_ms: Option<f64>, of_file: Option<f64>) -> f64 {
        compute_ms.or(of_file).unwrap_or(REPLAY_MS)
    }
}

/// A number for a table of settings. What TOML cannot count, it can spell.
pub fn number(n: u64) -> toml::Value {
    i64::try_from(n).map_or_else(|_| n.to_string().into(), toml::Value::from)
}
