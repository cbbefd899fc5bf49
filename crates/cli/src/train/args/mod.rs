//! What `unisono train` takes, and what it means.

mod choices;
mod codec;
mod elastic;
mod model;
mod plan;
mod relaxed;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args;
use unisono::codec::Rule;
use unisono::insight::units::counted;
use unisono::optimizer::OptimizerSpec;
use unisono::relaxed::staleness::StalenessPolicy;
use unisono::sync::bucket::BucketSizes;
use unisono::sync::shards::Shards;
use unisono::{Algorithm, Options, Transport};

use crate::bench::sizes;
use crate::exit::Wrong;
use choices::Schedule;
pub use choices::{CodecChoice, ServersChoice};
use plan::Given;
pub use plan::{ComputationSpec, ElasticPlan, RelaxedPlan, RunPlan, number};
use unisono::worker::Consistency;

/// Shards of a run that does not say how many. Every number of workers up to this one can share
/// them, and powers of two share them evenly.
const SHARDS: usize = 8;

/// Samples per step of a run that does not say how many.
const BATCH: usize = 64;

/// The most samples or shards of a step: far beyond any use, and far from what could overflow.
const MOST: usize = 1 << 24;

/// The most threads of a worker.
const MOST_THREADS: usize = 256;

/// The most that a worker can be slowed down.
const MOST_SLOWNESS: f64 = 1000.0;

/// What `unisono train` takes.
#[derive(Args, Clone)]
#[command(after_help = "\
The weights depend on the model, the data, --seed, --batch, --shards, --steps, --threads, the optimizer, \
the strategy and the codec, and on nothing else: not on the transport, the algorithm or the buckets, and \
not on the number of workers, unless it decides about the shards (see --shards), workers step by \
themselves (--strategy local or diloco), or the codec is chosen by measurements (--codec auto). \
--strategy bsp gives the weights of all-reduce; strategies whose workers do not wait for each other give \
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
    /// Samples per step, over all workers; by default 64, or a few more if that is no multiple of the
    /// shards.
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
    /// The learning rate; by default one that suits the optimizer. With --resume, it may be another
    /// than before, from there on.
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,
    /// How the learning rate goes on.
    #[arg(long, value_enum, default_value = "constant")]
    schedule: Schedule,
    /// The weight decay; by default one that suits the optimizer and the model.
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
    /// (every H steps, with an outer optimizer); or, with weights on servers: bsp (in
    /// lock-step), ssp:S (at most S steps ahead of the slowest), ssp:auto (S adapts), async (without
    /// limit), downpour[:PUSH,FETCH] (replicas that push and fetch every so many steps, by default 5),
    /// with shared weights:
    /// hogwild (threads, without a lock), or without servers: gossip (average with changing partners).
    #[arg(long, default_value = "all-reduce")]
    strategy: Consistency,
    /// Where weights live with --strategy bsp, ssp, async and downpour: a number of servers to start (by
    /// default 1), inside (a part of them in every worker), or HOST:PORT,... of `unisono serve`.
    #[arg(long, value_name = "SERVERS")]
    servers: Option<ServersChoice>,
    /// What becomes of gradients of old weights: keep, scale (the learning rate by their age), drop:T
    /// (those of more than T steps), compensate[:LAMBDA] (for how the weights have changed).
    #[arg(long, default_value = "keep")]
    stale: StalenessPolicy,
    /// Where servers write what must not be lost; by default in the folder of the run, until it ends
    /// well. A run that is started again with it goes on.
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// Go on when workers are lost, and let them in again when they are back, with the weights of an
    /// undisturbed run.
    #[arg(long)]
    elastic: bool,
    /// With --elastic: with fewer workers the run waits for more.
    #[arg(long, default_value_t = 1, value_name = "M", requires = "elastic")]
    min_workers: u32,
    /// How often workers and servers that die are started again, in all: with servers or gossip by
    /// default 3, with --elastic 100.
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
    /// Say nothing but warnings, errors and the result.
    #[arg(long, short)]
    pub quiet: bool,
    /// Check everything that can be checked, print what would be done, and do not do it.
    #[arg(long)]
    pub dry_run: bool,
    /// The arguments of this process, those of its configuration file among them.
    #[arg(skip)]
    pub arguments: Vec<OsString>,
    /// This process is one of the workers, and its parent draws.
    #[arg(long, hide = true)]
    pub as_worker: bool,
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

    /// The settings of the group of workers.
    pub fn options(&self) -> anyhow::Result<Options> {
        self.find_options().wrong_call()
    }

    /// What these mean for as many workers.
    pub fn plan(&self, workers: usize) -> anyhow::Result<RunPlan> {
        self.make_plan(workers).wrong_call()
    }

    fn find_options(&self) -> anyhow::Result<Options> {
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

    fn make_plan(&self, workers: usize) -> anyhow::Result<RunPlan> {
        ensure!(workers > 0, "--workers 0: no worker would train; use at least 1");
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
        let computation = self.computation()?;
        // More workers than shards wait as spares.
        let started = workers;
        let workers = match self.shards {
            Some(shards) if self.elastic => workers.min(shards / self.accumulate).max(1),
            _ => workers,
        };
        // Too many for any batch, if they are too many to count.
        let needed = workers.saturating_mul(self.accumulate);
        // Every shard's gradient is encoded by itself: more of them are more to send.
        let encodes = self.encodes() && self.agrees_always();
        let usual = match computation {
            ComputationSpec::Learn { .. } if !encodes => SHARDS.max(needed),
            _ => needed,
        };
        let count = self.shards.unwrap_or(usual);
        let shards = Shards::new(count, workers).context("--shards")?;
        ensure!(
            shards.count() >= needed,
            "--accumulate {} on {} needs {needed} shards, and there {} {count}; raise --shards or \
             lower --accumulate",
            self.accumulate,
            counted(workers, "worker"),
            if count == 1 { "is" } else { "are" },
        );
        ensure!(count <= MOST, "--shards {count}: use at most {MOST}");
        let usual = BATCH.next_multiple_of(count);
        let batch = self.batch.unwrap_or(usual);
        // A replayed model has no samples to speak of.
        let learns = matches!(computation, ComputationSpec::Learn { .. });
        let instead_of_batch = (learns && self.batch.is_none() && usual != BATCH).then_some(BATCH);
        ensure!(batch <= MOST, "--batch {batch}: use at most {MOST}");
        ensure!(
            batch > 0 && batch.is_multiple_of(count),
            "--batch {batch} cannot be cut into {count} shards; use a multiple of {count}"
        );
        let mut optimizer = self.optimizer(&computation);
        let codec = self.codec(&mut optimizer)?;
        let compression = self.compression(&codec);
        Ok(RunPlan {
            shards: count,
            batch,
            steps: self.steps,
            optimizer,
            strategy: self.strategy.agreeing(),
            relaxed: self.relaxed()?,
            elastic: self.elastic(compression.clone())?,
            compression,
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
            given: Given {
                workers: started,
                learning_rate: self.learning_rate.is_some(),
                shards: self.shards.is_some(),
                instead_of_batch,
            },
            computation,
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
