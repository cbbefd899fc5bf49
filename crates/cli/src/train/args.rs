//! What `unisono train` takes, and what it means.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use unisono::codec::{BadCodec, CodecSpec, Rule, Rules};
use unisono::relaxed::spec::Level;
use unisono::relaxed::stale::Stale;
use unisono::sync::Settings;
use unisono::sync::bucket::BucketSizes;
use unisono::sync::local::StrategySpec;
use unisono::sync::optimizer::{LearningRate, OptimizerSpec};
use unisono::sync::shards::Shards;
use unisono::sync::strategy::Compression;
use unisono::{Algorithm, Options, Transport};
use unisono_workload::data::DataSpec;
use unisono_workload::model::ModelSpec;

use super::strategy::Strategy;
use crate::bench::sizes;

/// Shards of a run that does not say how many. Every number of workers up to this one can share
/// them, and powers of two share them evenly.
const SHARDS: usize = 8;

/// The weight decay of AdamW for the perceptron, which learns small data by heart without. Chosen by
/// the mean over eight seeds.
const MLP_DECAY: f64 = 0.3;

/// Samples per step of a run that does not say how many.
const BATCH: usize = 64;

/// The most samples or shards of a step: far beyond any use, and far from what could overflow.
const MOST: usize = 1 << 24;

/// The largest size of a layer: two such layers make a matrix of 1 GiB.
const WIDEST: usize = 1 << 14;

/// The most threads of a worker.
const MOST_THREADS: usize = 256;

/// The most milliseconds that a worker replays for a shard: an hour.
const MOST_MS: f64 = 3_600_000.0;

/// The most that a worker can be slowed down.
const MOST_SLOWNESS: f64 = 1000.0;

/// Steps that are not encoded if nobody says how many. Not a share of all, which a run that is resumed
/// may have more of.
const WARM_UP: u64 = 300;

/// How often processes of a relaxed run are started again if nobody says how often. More would hide
/// that something is wrong; fewer give up after one bad day of a machine.
const RESTARTS: u32 = 3;

/// The most servers that a run starts on one machine.
const MOST_SERVERS: usize = 256;

/// Milliseconds that a worker replays for a shard if nothing else is known.
const REPLAY_MS: f64 = 50.0;

/// What `unisono train` takes.
#[derive(Args, Clone)]
#[command(after_help = "\
The weights depend on the model, the data, --seed, --batch, --shards, --steps, --threads, the optimizer,
the strategy and the codec, and on nothing else: not on the transport, the algorithm or the buckets, and
not on the number of workers, unless it decides about the shards (see --shards), workers step by
themselves (--strategy local or diloco), or the codec is chosen by measurements (--codec auto).
--strategy bsp gives the weights of all-reduce; strategies whose workers do not wait for each other give
others every time.

Under `unisono run`, torchrun, mpirun or srun every process is a worker, and --workers is not needed:
  unisono run -n 4 --nnodes 2 --node-rank 0 --rendezvous node-a:29400 -- unisono train")]
pub struct TrainArgs {
    /// The model: mlp, conv, transformer; or replay:resnet50, replay:bert-large, replay:gpt2 or
    /// replay:FILE, which load the network like the real model without computing anything.
    #[arg(long, default_value = "mlp")]
    model: String,
    /// The data: digits, fashion-mnist:DIR or text:FILE; by default digits.
    #[arg(long)]
    data: Option<String>,
    /// Sizes of the hidden layers of mlp (a list) and conv (one).
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    hidden: Vec<usize>,
    /// Channels of each convolution of conv.
    #[arg(long, value_delimiter = ',', value_name = "CHANNELS")]
    channels: Vec<usize>,
    /// Blocks of the transformer.
    #[arg(long)]
    layers: Option<usize>,
    /// Values per token of the transformer.
    #[arg(long)]
    width: Option<usize>,
    /// Attention heads of the transformer.
    #[arg(long)]
    heads: Option<usize>,
    /// Tokens the transformer looks at.
    #[arg(long)]
    context: Option<usize>,
    /// Milliseconds that a replayed model computes for one shard; by default what its file says,
    /// or 50.
    #[arg(long, value_name = "MS")]
    compute_ms: Option<f64>,

    /// Workers to start on this machine.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Parts of the global batch: the unit of reproducibility; by default 8, or one per worker for a
    /// replayed model and with a codec, which encodes each by itself.
    #[arg(long)]
    shards: Option<usize>,
    /// Samples per step, over all workers; by default 64, or a few more for a replayed model whose
    /// shards do not divide them.
    #[arg(long)]
    batch: Option<usize>,
    /// Steps to train for, over all runs that are resumed.
    #[arg(long, default_value_t = 1000)]
    steps: u64,
    /// Micro-batches that every worker computes per step, at least; it communicates with the last.
    /// Every shard is one, so this asks for as many shards per worker.
    #[arg(long, default_value_t = 1, value_name = "N")]
    accumulate: usize,
    /// sgd, momentum, adagrad or adamw; by default adamw; adagrad with --strategy downpour, and sgd
    /// with hogwild, which can do no other.
    #[arg(long)]
    optimizer: Option<OptimizerSpec>,
    /// The learning rate; by default one that suits the optimizer.
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,
    /// How the learning rate goes on.
    #[arg(long, value_enum, default_value = "constant")]
    schedule: Schedule,
    /// The weight decay; by default one that suits the optimizer.
    #[arg(long)]
    weight_decay: Option<f64>,
    /// Decides about initial weights and the order of samples.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads that each worker computes with. Another number may give other bits.
    #[arg(long, default_value_t = 1)]
    threads: usize,

    /// How the workers exchange data: auto, shm or tcp.
    #[arg(long, default_value = "auto")]
    transport: Transport,
    /// Use this algorithm instead of the cheapest.
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// The size of buckets, such as 4MiB; by default it is tuned while training.
    #[arg(long, value_name = "SIZE")]
    bucket: Option<String>,
    /// Communicate after the backward pass instead of during it.
    #[arg(long)]
    no_overlap: bool,
    /// When the workers agree: all-reduce (in every step), local:H or local:H..MAX (average the weights
    /// every H steps, a period that may grow), diloco:H[,streams=P][,delay=T][,rate=R][,momentum=M]
    /// (every H steps, with an outer optimizer); or not at all, with weights on servers: bsp (in
    /// lock-step), ssp:S (at most S steps ahead of the slowest), ssp:auto (S adapts), async (without
    /// limit), downpour:PUSH,FETCH (replicas that push and fetch now and then), with shared weights:
    /// hogwild (threads, without a lock), or without servers: gossip (average with changing partners).
    #[arg(long, default_value = "all-reduce")]
    strategy: Strategy,
    /// Where weights live with --strategy bsp, ssp, async and downpour: a number of servers to start (by
    /// default 1), inside (a part of them in every worker), or HOST:PORT,... of `unisono serve`.
    #[arg(long, value_name = "SERVERS")]
    servers: Option<ServersChoice>,
    /// What becomes of gradients of old weights: keep, scale (the learning rate by their age), drop:T
    /// (those of more than T steps), compensate[:LAMBDA] (for how the weights have changed).
    #[arg(long, default_value = "keep")]
    stale: Stale,
    /// Where servers write what must not be lost; by default in the folder of the run, until it ends
    /// well. A run that is started again with it goes on.
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// How often workers and servers of such a run that die are started again, in all; by default 3.
    #[arg(long, value_name = "N")]
    restarts: Option<u32>,
    /// Send fewer bytes: fp16, bf16, int8, int4, qsgd, sign, topk, randk, dgc, powersgd, each with
    /// settings such as topk:1%+int8; auto, which measures and decides; or none.
    #[arg(long, default_value = "none")]
    codec: CodecChoice,
    /// Use another codec for parameters whose names fit a pattern: PATTERN=CODEC, such as embed*=none.
    /// The first that fits decides.
    #[arg(long, value_name = "PATTERN=CODEC")]
    codec_rule: Vec<Rule>,
    /// Steps at the beginning in which nothing is encoded; by default 300 for codecs that leave most out
    /// (sign, topk, randk, dgc, powersgd), and none for others.
    #[arg(long, value_name = "STEPS")]
    codec_warmup: Option<u64>,
    /// Whether gradients are encoded in units of their usual size, so that small elements do not drown;
    /// by default they are for int8, int4, qsgd and sign.
    #[arg(long, value_name = "BOOL")]
    codec_relative: Option<bool>,
    /// Forget what an encoding leaves out, instead of sending it later. To see what that does.
    #[arg(long)]
    no_error_feedback: bool,
    /// Compare the weights of all workers every so many steps; 0 never.
    #[arg(long, default_value_t = 100, value_name = "STEPS")]
    check_every: u64,

    /// Where checkpoints are written and looked for.
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints; there is one at the end in any case.
    #[arg(long, default_value_t = 100, value_name = "STEPS", requires = "checkpoint_dir")]
    checkpoint_every: u64,
    /// Go on from the newest good checkpoint, if there is one.
    #[arg(long, requires = "checkpoint_dir")]
    resume: bool,

    /// The folder for the report; by default a new one in runs.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Also measure one worker alone, to say how well the run scales.
    #[arg(long)]
    measure_scaling: bool,
    /// Slow one worker down, to see what a straggler does: RANK:FACTOR.
    #[arg(long, value_name = "RANK:FACTOR")]
    slow: Option<String>,
    /// Print one JSON object at the end.
    #[arg(long)]
    pub json: bool,
    /// This process is one of the workers, and its parent draws.
    #[arg(long, hide = true)]
    pub as_worker: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Schedule {
    /// The same rate in every step.
    Constant,
    /// A warm-up over the first tenth, then half a cosine down to a tenth.
    Cosine,
}

/// Where the weights of a relaxed run live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServersChoice {
    /// In so many processes of their own.
    Started(usize),
    /// In the workers.
    Inside,
    /// In processes that run already.
    At(Vec<String>),
}

impl FromStr for ServersChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<ServersChoice, String> {
        if text == "inside" {
            return Ok(ServersChoice::Inside);
        }
        if let Ok(count) = text.parse() {
            return match count {
                1..=MOST_SERVERS => Ok(ServersChoice::Started(count)),
                _ => Err(format!("use 1 to {MOST_SERVERS}, or inside")),
            };
        }
        let addresses: Vec<String> = text.split(',').map(str::to_owned).collect();
        match addresses.iter().all(|address| address.contains(':')) {
            true => Ok(ServersChoice::At(addresses)),
            false => Err("give a number, inside, or HOST:PORT,HOST:PORT".to_owned()),
        }
    }
}

/// What makes a run relaxed.
#[derive(Clone, Debug)]
pub struct RelaxedPlan {
    pub level: Level,
    pub stale: Stale,
    pub servers: ServersChoice,
    pub journal: Option<PathBuf>,
    pub restarts: u32,
}

/// What gradients are encoded by.
#[derive(Clone, Debug, PartialEq)]
pub enum CodecChoice {
    /// Nothing.
    None,
    /// What is found to be fastest.
    Auto,
    /// This one.
    Fixed(CodecSpec),
}

impl FromStr for CodecChoice {
    type Err = BadCodec;

    fn from_str(text: &str) -> Result<CodecChoice, BadCodec> {
        Ok(match text {
            "none" => CodecChoice::None,
            "auto" => CodecChoice::Auto,
            other => CodecChoice::Fixed(other.parse()?),
        })
    }
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecChoice::None => f.write_str("none"),
            CodecChoice::Auto => f.write_str("auto"),
            CodecChoice::Fixed(codec) => codec.fmt(f),
        }
    }
}

/// What there is to compute.
#[derive(Clone, Debug)]
pub enum Work {
    /// A model that learns.
    Learn { model: ModelSpec, data: DataSpec },
    /// A model that is replayed.
    Replay { spec: String, compute_ms: Option<f64> },
}

/// A run, with everything decided but the number of workers.
#[derive(Clone)]
pub struct Plan {
    pub work: Work,
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
}

impl TrainArgs {
    /// Workers to start here.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Threads each worker computes with.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// How data is to be exchanged.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Whether what encodings leave out is sent later.
    pub fn error_feedback(&self) -> bool {
        !self.no_error_feedback
    }

    /// Steps in which nothing is encoded.
    pub fn warm_up(&self) -> u64 {
        self.codec_warmup.unwrap_or(self.usual_warm_up(&self.codec))
    }

    /// The settings of the group of workers.
    pub fn options(&self) -> anyhow::Result<Options> {
        let mut options = Options::from_env()?;
        if self.transport != Transport::Auto {
            options.transport = self.transport;
        }
        options.algorithm = self.algorithm.or(options.algorithm);
        if let Some(algorithm) = options.algorithm {
            let by = if self.algorithm.is_some() { "--algorithm " } else { "UNISONO_ALGORITHM=" };
            ensure!(
                algorithm.is_canonical(),
                "{by}{algorithm} gives bits that depend on the number of workers, which training \
                 must not; choose another, or none"
            );
        }
        ensure!(
            options.canonical,
            "UNISONO_CANONICAL=false allows bits that depend on the number of workers, which \
             training must not; unset it"
        );
        Ok(options)
    }

    /// Whether checkpoints are written.
    pub fn saves(&self) -> bool {
        self.checkpoint_dir.is_some()
    }

    /// What these mean for as many workers.
    pub fn plan(&self, workers: usize) -> anyhow::Result<Plan> {
        ensure!(workers > 0, "--workers 0: nobody would train; use at least 1");
        ensure!(
            (1..=MOST).contains(&self.accumulate),
            "--accumulate {}: use 1 to {MOST}",
            self.accumulate
        );
        ensure!(
            (1..=MOST_THREADS).contains(&self.threads),
            "--threads {}: use 1 to {MOST_THREADS}",
            self.threads
        );
        let work = self.work()?;
        // Too many for any batch, if they are too many to count.
        let needed = workers.saturating_mul(self.accumulate);
        // Every shard's gradient is encoded by itself: more of them are more to send.
        let encodes = self.encodes() && self.agrees_always();
        let usual = match work {
            Work::Learn { .. } if !encodes => SHARDS.max(needed),
            _ => needed,
        };
        let count = self.shards.unwrap_or(usual);
        let shards = Shards::new(count, workers).context("--shards")?;
        ensure!(
            shards.count() >= needed,
            "--accumulate {} on {workers} workers needs {needed} shards, and there are {count}; \
             raise --shards or lower --accumulate",
            self.accumulate,
        );
        ensure!(count <= MOST, "--shards {count}: use at most {MOST}");
        let batch = self.batch.unwrap_or(BATCH.next_multiple_of(count));
        ensure!(batch <= MOST, "--batch {batch}: use at most {MOST}");
        ensure!(
            batch > 0 && batch.is_multiple_of(count),
            "--batch {batch} cannot be cut into {count} shards; use a multiple of {count}"
        );
        let mut optimizer = self.optimizer(&work);
        let codec = self.codec(&mut optimizer)?;
        Ok(Plan {
            shards: count,
            batch,
            steps: self.steps,
            optimizer,
            strategy: self.strategy.agreeing(),
            relaxed: self.relaxed()?,
            compression: self.compression(&codec),
            codec,
            seed: self.seed,
            threads: self.threads,
            buckets: self.buckets()?,
            overlap: !self.no_overlap,
            check_every: self.check_every,
            checkpoint_dir: self.checkpoint_dir.clone(),
            checkpoint_every: self.checkpoint_every,
            resume: self.resume,
            run_dir: self.run_dir.clone(),
            measure_scaling: self.measure_scaling,
            slow: self.slow(workers)?,
            accumulate: self.accumulate,
            work,
        })
    }

    fn work(&self) -> anyhow::Result<Work> {
        if let Some(spec) = self.model.strip_prefix("replay:") {
            self.refuse_sizes(&["hidden", "channels", "layers", "width", "heads", "context"])?;
            if let Some(ms) = self.compute_ms {
                ensure!(
                    (0.0..=MOST_MS).contains(&ms),
                    "--compute-ms {ms}: give a time of 0 to {MOST_MS}"
                );
            }
            ensure!(self.data.is_none(), "--data: a replayed model looks at none; leave it out");
            let no_checkpoint = "--checkpoint-dir: a replayed model has no weights; leave it out";
            ensure!(self.checkpoint_dir.is_none(), no_checkpoint);
            return Ok(Work::Replay { spec: spec.to_owned(), compute_ms: self.compute_ms });
        }
        let one = [self.layers, self.width, self.heads, self.context].into_iter().flatten();
        if let Some(size) = one
            .chain(self.hidden.iter().copied())
            .chain(self.channels.iter().copied())
            .find(|size| *size > WIDEST)
        {
            bail!("a layer of size {size} is too large; use at most {WIDEST}");
        }
        let mut model = match self.model.as_str() {
            "mlp" => ModelSpec::mlp(),
            "conv" => ModelSpec::conv(),
            "transformer" => ModelSpec::transformer(),
            other => bail!(
                "--model {other}: choose mlp, conv, transformer, or replay: with resnet50, \
                 bert-large, gpt2 or a file"
            ),
        };
        self.refuse_sizes(&["compute-ms"])?;
        self.resize(&mut model)?;
        let data = match (&self.data, &model) {
            (Some(data), _) => data.parse().context("--data")?,
            (None, ModelSpec::Transformer { .. }) => {
                bail!("--model transformer needs a text: add --data text:FILE")
            }
            (None, _) => DataSpec::Digits,
        };
        Ok(Work::Learn { model, data })
    }

    /// Refuses those of the flags for sizes that were given, for the model has no use for them.
    fn refuse_sizes(&self, unused: &[&str]) -> anyhow::Result<()> {
        let given = [
            ("hidden", !self.hidden.is_empty()),
            ("channels", !self.channels.is_empty()),
            ("layers", self.layers.is_some()),
            ("width", self.width.is_some()),
            ("heads", self.heads.is_some()),
            ("context", self.context.is_some()),
            ("compute-ms", self.compute_ms.is_some()),
        ];
        for (flag, given) in given {
            ensure!(
                !(given && unused.contains(&flag)),
                "--{flag} means nothing to --model {}; leave it out",
                self.model
            );
        }
        Ok(())
    }

    /// Applies the flags for sizes, and refuses those of other models.
    fn resize(&self, model: &mut ModelSpec) -> anyhow::Result<()> {
        let set = |into: &mut usize, size: Option<usize>| *into = size.unwrap_or(*into);
        match model {
            ModelSpec::Mlp { hidden } => {
                self.refuse_sizes(&["channels", "layers", "width", "heads", "context"])?;
                if !self.hidden.is_empty() {
                    hidden.clone_from(&self.hidden);
                }
            }
            ModelSpec::Conv { channels, hidden } => {
                self.refuse_sizes(&["layers", "width", "heads", "context"])?;
                ensure!(
                    self.hidden.len() <= 1,
                    "--hidden: conv has one hidden layer; give one size"
                );
                set(hidden, self.hidden.first().copied());
                if !self.channels.is_empty() {
                    channels.clone_from(&self.channels);
                }
            }
            ModelSpec::Transformer { layers, width, heads, context } => {
                self.refuse_sizes(&["hidden", "channels"])?;
                set(layers, self.layers);
                set(width, self.width);
                set(heads, self.heads);
                set(context, self.context);
            }
        }
        Ok(())
    }

    fn optimizer(&self, work: &Work) -> OptimizerSpec {
        let usual = match self.strategy.level() {
            Some(Level::Downpour { .. }) => "adagrad",
            Some(Level::Hogwild) => "sgd",
            _ => "adamw",
        };
        let mut spec = self.optimizer.unwrap_or_else(|| usual.parse().expect("it exists"));
        let peak = self.learning_rate.unwrap_or(spec.learning_rate().peak());
        let rate = match self.schedule {
            Schedule::Constant => LearningRate::Constant(peak),
            Schedule::Cosine => LearningRate::Cosine {
                peak,
                floor: peak / 10.0,
                warm_up: self.steps / 10,
                steps: self.steps,
            },
        };
        spec = spec.with_learning_rate(rate);
        let usual = match (work, spec) {
            (Work::Learn { model: ModelSpec::Mlp { .. }, .. }, OptimizerSpec::AdamW { .. }) => {
                Some(MLP_DECAY)
            }
            _ => None,
        };
        self.weight_decay.or(usual).map_or(spec, |decay| spec.with_weight_decay(decay))
    }

    /// The level of a run whose workers do not agree.
    pub fn level(&self) -> Option<Level> {
        self.strategy.level()
    }

    /// Whether workers agree on the gradient of every step.
    fn agrees_always(&self) -> bool {
        self.strategy == Strategy::Agreeing(StrategySpec::AllReduce)
    }

    /// What makes the run relaxed, if it is; and refuses what makes no sense then, or only then.
    fn relaxed(&self) -> anyhow::Result<Option<RelaxedPlan>> {
        let Some(level) = self.strategy.level() else {
            self.refuse_relaxed(&["servers", "stale", "journal", "restarts"])?;
            return Ok(None);
        };
        ensure!(
            !self.model.starts_with("replay:"),
            "--strategy {level} moves weights, and a replayed model has none; use --strategy \
             all-reduce"
        );
        ensure!(
            self.checkpoint_dir.is_none(),
            "--checkpoint-dir: with --strategy {level} the servers write a journal instead; give \
             --journal DIR to keep it"
        );
        ensure!(
            !self.measure_scaling,
            "--measure-scaling compares runs that agree in every step; leave it out"
        );
        ensure!(
            self.codec_relative.is_none(),
            "--codec-relative is for gradients that are averaged; with --strategy {level} leave it out"
        );
        match level {
            Level::Hogwild => {
                self.refuse_relaxed(&["servers", "stale", "journal", "codec", "restarts"])?;
            }
            Level::Gossip => {
                self.refuse_relaxed(&["servers", "stale", "journal", "codec"])?;
            }
            _ => {}
        }
        ensure!(
            level != Level::Bsp || self.stale == Stale::Keep,
            "--stale {}: with --strategy bsp no gradient is stale; leave it out",
            self.stale
        );
        let servers = self.servers.clone().unwrap_or(ServersChoice::Started(1));
        ensure!(
            self.journal.is_none() || !matches!(servers, ServersChoice::At(_)),
            "--journal: servers that run already write their own; give it to `unisono serve` instead"
        );
        Ok(Some(RelaxedPlan {
            level,
            stale: self.stale,
            servers,
            journal: self.journal.clone(),
            restarts: self.restarts.unwrap_or(RESTARTS),
        }))
    }

    /// Refuses those of the flags of relaxed runs that were given, for the strategy has no use for them.
    fn refuse_relaxed(&self, unused: &[&str]) -> anyhow::Result<()> {
        let given = [
            ("servers", self.servers.is_some()),
            ("stale", self.stale != Stale::Keep),
            ("journal", self.journal.is_some()),
            ("restarts", self.restarts.is_some()),
            ("codec", self.encodes()),
        ];
        for (flag, given) in given {
            ensure!(
                !(given && unused.contains(&flag)),
                "--{flag} means nothing to --strategy {}; leave it out, or use a strategy with \
                 servers, such as ssp:3",
                self.strategy
            );
        }
        Ok(())
    }

    /// Whether anything may be encoded.
    fn encodes(&self) -> bool {
        self.codec != CodecChoice::None || !self.codec_rule.is_empty()
    }

    /// The codec. One with momentum takes it over from the optimizer.
    fn codec(&self, optimizer: &mut OptimizerSpec) -> anyhow::Result<CodecChoice> {
        ensure!(
            self.codec != CodecChoice::Auto || self.agrees_always(),
            "--codec auto predicts runs that synchronize in every step, and --strategy {} does not; \
             name a codec such as int8, or leave it out",
            self.strategy
        );
        let mut codec = self.codec.clone();
        if let CodecChoice::Fixed(CodecSpec::Dgc(settings, _)) = &mut codec
            && self.agrees_always()
            && let OptimizerSpec::Momentum { learning_rate, momentum, nesterov, weight_decay } =
                *optimizer
        {
            ensure!(
                settings.momentum == 0.0,
                "--codec {} and --optimizer momentum have a momentum each; use --optimizer sgd, or \
                 leave it out of the codec",
                self.codec
            );
            settings.momentum = momentum;
            settings.nesterov = nesterov;
            *optimizer = OptimizerSpec::Sgd { learning_rate, weight_decay };
        }
        let has_momentum = |rule: &Rule| matches!(rule.codec(), Some(CodecSpec::Dgc(settings, _)) if settings.momentum > 0.0);
        if let Some(rule) = self.codec_rule.iter().find(|rule| has_momentum(rule)) {
            ensure!(
                !matches!(optimizer, OptimizerSpec::Momentum { .. }),
                "--codec-rule {rule} and --optimizer momentum have a momentum each; use --optimizer \
                 sgd, or leave it out of the rule"
            );
        }
        Ok(codec)
    }

    /// At the beginning gradients change fastest, and what is sent late is worth little.
    fn usual_warm_up(&self, codec: &CodecChoice) -> u64 {
        let is_harsh = |codec: &CodecSpec| {
            let harsh = ["sign", "topk", "randk", "dgc", "powersgd"];
            harsh.contains(&codec.name())
        };
        match codec {
            CodecChoice::Fixed(codec)
                if is_harsh(codec)
                    && !matches!(
                        self.strategy,
                        Strategy::Agreeing(StrategySpec::Local(_) | StrategySpec::Diloco(_))
                    ) =>
            {
                WARM_UP
            }
            _ => 0,
        }
    }

    fn compression(&self, codec: &CodecChoice) -> Option<Compression> {
        let fixed = match codec {
            CodecChoice::Fixed(codec) => Some(codec.clone()),
            _ => None,
        };
        self.encodes().then(|| Compression {
            rules: Rules { codec: fixed, exceptions: self.codec_rule.clone() },
            auto: *codec == CodecChoice::Auto,
            warm_up: self.codec_warmup.unwrap_or(self.usual_warm_up(codec)),
            error_feedback: !self.no_error_feedback,
            relative: self.codec_relative,
            seed: self.seed,
        })
    }

    fn buckets(&self) -> anyhow::Result<Option<BucketSizes>> {
        let Some(text) = &self.bucket else { return Ok(None) };
        let others = sizes::parse(text).context("--bucket")?;
        ensure!(others > 0, "--bucket 0: give a size such as 4MiB");
        Ok(Some(BucketSizes { first: others.min(BucketSizes::default().first), others }))
    }

    fn slow(&self, workers: usize) -> anyhow::Result<Option<(usize, f64)>> {
        let Some(text) = &self.slow else { return Ok(None) };
        let parsed = text.split_once(':').and_then(|(rank, factor)| {
            let (rank, factor): (usize, f64) = (rank.parse().ok()?, factor.parse().ok()?);
            (rank < workers && (1.0..=MOST_SLOWNESS).contains(&factor)).then_some((rank, factor))
        });
        match parsed {
            Some(slow) => Ok(Some(slow)),
            None => bail!(
                "--slow {text}: give a rank below {workers} and a factor of 1 to {MOST_SLOWNESS}, such as \
                 1:2"
            ),
        }
    }
}

impl Plan {
    /// How the replicas are kept in step.
    pub fn settings(&self) -> Settings {
        let mut settings = Settings::new(self.shards);
        settings.buckets = self.buckets;
        settings.overlap = self.overlap;
        settings.strategy = self.strategy;
        settings.compression = self.compression.clone();
        settings
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

    /// The model and the data, for people.
    pub fn names(&self) -> (String, String) {
        match &self.work {
            Work::Learn { model, data } => (model.to_string(), data.to_string()),
            Work::Replay { spec, .. } => (format!("replay:{spec}"), "nothing".to_owned()),
        }
    }

    /// Milliseconds that a worker replays for a shard.
    pub fn replay_ms(compute_ms: Option<f64>, of_file: Option<f64>) -> f64 {
        compute_ms.or(of_file).unwrap_or(REPLAY_MS)
    }
}
