//! A run as a program describes it, and how its workers come together and part.
//!
//! Where a launcher or the user has named servers (`UNISONO_SERVERS`), a worker talks to those only, so
//! that it can be started again at any time. Otherwise the workers form the group of their [`Job`]: to
//! agree, or only to find each other's servers or peers at the beginning, and to part at the end.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use unisono_cluster::worker::Worker as Identity;
use unisono_collective::shards::Shards;
use unisono_collective::{Group, Reduction, Transport};
use unisono_insight::relaxed::{RelaxedFolder, UpdateLog};
use unisono_insight::{Outcome, RunInfo};
use unisono_net::Token;
use unisono_optimizer::OptimizerSpec;
use unisono_relaxed::hogwild::{self, Thread};
use unisono_relaxed::server::{
    self, ASK_EVERY, ClientOptions, Run, Server, fetch_weights, reports,
};
use unisono_relaxed::spec::Level;
use unisono_relaxed::staleness::StalenessPolicy;
use unisono_sync::strategy::Weights;
use unisono_sync::{Parameter, Settings};

use super::joining::{agree, gossip, serve};
use super::{
    Agreeing, Collector, Consistency, Guarantee, Hogwild, SharedModel, Stepped, Worker,
    WorkerError, weights_hash,
};
use crate::job::Job;
use crate::recording::relaxed::{record, run_info};
use crate::recording::steps::StepRecorder;

/// How long a worker looks for a server that is not there: long enough for a restart.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A run. Equal for all its workers.
#[derive(Clone, Debug)]
pub struct Training {
    /// How the workers are kept together.
    pub consistency: Consistency,
    /// What makes weights of gradients. Its learning rate is that of a step of all workers, at every
    /// level.
    pub optimizer: OptimizerSpec,
    /// Steps that every worker makes; where workers do not wait for each other, on average.
    pub steps: u64,
    /// Shards of a step's batch, buckets and codec. The strategy is that of the consistency level.
    pub settings: Settings,
    /// Samples of a shard, for the report.
    pub samples: u64,
    /// What becomes of gradients of old weights, where weights live on servers.
    pub stale: StalenessPolicy,
    /// Where weights live, at levels with servers.
    pub servers: Servers,
    /// Threads, with `hogwild`. At other levels the launcher decides.
    pub threads: usize,
    /// What chance depends on.
    pub seed: u64,
    /// The folder in which the run is recorded, if it is. All workers must reach it where servers or
    /// replicas record their own updates.
    pub run_dir: Option<PathBuf>,
    /// What is trained, for the report.
    pub name: String,
}

/// Where weights live, at levels with servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Servers {
    /// On those that a launcher has started or the user has named (`UNISONO_SERVERS`); without any, in
    /// the process of worker 0.
    #[default]
    Found,
    /// At these addresses, HOST:PORT, in order.
    At(Vec<String>),
    /// In the processes of the first so many workers.
    Inside(usize),
}

/// A place in a run that a worker can take.
pub struct Seat<'a> {
    training: &'a Training,
    kind: Kind<'a>,
}

enum Kind<'a> {
    Process,
    Thread(Thread<'a>, &'a SharedModel),
}

/// What a run came to, as one worker knows it.
#[derive(Clone, Debug)]
pub struct Totals {
    /// This worker.
    pub worker: usize,
    /// How many there were.
    pub workers: usize,
    /// The level, and with it what was promised.
    pub consistency: Consistency,
    /// Steps that this worker has made.
    pub steps: u64,
    /// The loss of its last.
    pub loss: f32,
    /// Seconds since it joined.
    pub seconds: f64,
    /// Bytes that it has sent.
    pub sent: u64,
    /// The hash of the final weights.
    pub weights_hash: String,
    /// Where the report is, if this worker has written one: worker 0 does.
    pub report: Option<PathBuf>,
}

impl Totals {
    /// What the level promised.
    pub fn guarantee(&self) -> Guarantee {
        self.consistency.guarantee()
    }
}

impl Training {
    /// The defaults, for a run with so many shards and steps.
    pub fn new(
        consistency: Consistency,
        optimizer: OptimizerSpec,
        shards: usize,
        steps: u64,
    ) -> Training {
        Training {
            settings: Settings { strategy: consistency.agreeing(), ..Settings::new(shards) },
            consistency,
            optimizer,
            steps,
            samples: 1,
            stale: StalenessPolicy::Keep,
            servers: Servers::Found,
            threads: 2,
            seed: 0,
            run_dir: None,
            name: "model".to_owned(),
        }
    }

    /// What servers are told of the run.
    pub fn run(
        &self,
        parameters: &[Parameter],
        level: Level,
        workers: usize,
        timeout: Duration,
    ) -> Run {
        let shapes = parameters.iter().map(|parameter| parameter.shape.clone()).collect();
        let (workers, steps) = (workers as u32, Some(self.steps));
        let mut run = Run::of_steps(shapes, &self.optimizer, level, workers, steps);
        if let Some(compression) = &self.settings.compression {
            let codec = |p: &Parameter| compression.rules.codec(&p.name, &p.shape).cloned();
            run.codecs = parameters.iter().map(codec).collect();
        }
        run.stale = self.stale;
        run.shards = self.settings.shards as u32;
        run.seed = self.seed;
        run.timeout = timeout;
        run
    }

    /// How a worker reaches the servers.
    pub fn client_options(
        &self,
        servers: Vec<String>,
        token: Token,
        worker: u32,
        transport: Transport,
    ) -> ClientOptions {
        let compression = self.settings.compression.as_ref();
        ClientOptions {
            servers,
            token,
            worker,
            life: None,
            patience: PATIENCE,
            transport: match transport {
                Transport::Tcp => server::Transport::Tcp,
                _ => server::Transport::Auto,
            },
            warm_up: compression.map_or(0, |compression| compression.warm_up),
            error_feedback: compression.is_none_or(|compression| compression.error_feedback),
        }
    }

    /// What sums the gradients of a worker's shards, where workers do not agree step by step.
    pub fn collector(
        &self,
        parameters: &[Parameter],
        rank: usize,
        workers: usize,
    ) -> Result<Collector, WorkerError> {
        let shards = self.settings.shards;
        let own = Shards::new(shards, workers).map_err(unisono_sync::SyncError::from)?;
        let lockstep = self.consistency.level().is_some_and(|level| level.is_lockstep());
        Ok(Collector::new(parameters, shards, own.of(rank, workers), lockstep, self.samples))
    }

    pub(super) fn relaxed_info(
        &self,
        level: Level,
        servers: &str,
        workers: usize,
        tcp: bool,
    ) -> RunInfo {
        let optimizer = level.optimizer(&self.optimizer, workers as u32);
        let mut info = run_info(level, &optimizer, self.stale, servers, workers, tcp);
        info.name.clone_from(&self.name);
        info.model.clone_from(&self.name);
        info.shards = self.settings.shards;
        info.settings.insert("steps".to_owned(), (self.steps as i64).into());
        info
    }
}

/// Calls `body` with the place of every worker of this process: one, or with `hogwild` one on every
/// thread. Returns what they came to.
pub fn train<E: From<WorkerError> + Send>(
    training: &Training,
    body: impl Fn(Seat<'_>) -> Result<Totals, E> + Sync,
) -> Result<Vec<Totals>, E> {
    if training.consistency.level() != Some(Level::Hogwild) {
        return Ok(vec![body(Seat { training, kind: Kind::Process })?]);
    }
    let (model, stop, threads) = (SharedModel::default(), AtomicBool::new(false), training.threads);
    let mut log = None;
    if let Some(dir) = &training.run_dir {
        let info = training.relaxed_info(Level::Hogwild, "", threads, false);
        RelaxedFolder::create(dir, &info).map_err(WorkerError::from)?;
        let path = RelaxedFolder::updates(dir, 0);
        log = Some(UpdateLog::create(path).map_err(WorkerError::from)?);
    }
    let mut unwritten = Ok(());
    let updates = Level::Hogwild.updates(training.steps, threads as u32);
    let (mut totals, _) = hogwild::run(
        threads,
        updates,
        &stop,
        Instant::now(),
        |thread| body(Seat { training, kind: Kind::Thread(thread, &model) }),
        |update| {
            if let Some(log) = log.as_mut().filter(|_| unwritten.is_ok()) {
                unwritten = log.append(&record(&update));
            }
        },
    )?;
    unwritten.map_err(WorkerError::from)?;
    if let (Some(dir), Some(first)) = (&training.run_dir, totals.first_mut()) {
        let hash = first.weights_hash.clone();
        first.report = Some(sum_up(dir.clone(), hash, None).map_err(E::from)?);
    }
    Ok(totals)
}

impl<'a> Seat<'a> {
    /// Takes the place, with parameters whose weights are given: the run begins with those of worker 0.
    pub fn join(
        self,
        parameters: Vec<Parameter>,
        weights: &mut dyn Weights,
    ) -> Result<Worker<'a>, WorkerError> {
        let Seat { training, kind } = self;
        let (mut worker, workers, ending) = match (kind, training.consistency) {
            (Kind::Thread(thread, model), _) => {
                let (rank, threads) = (thread.number(), training.threads);
                let collector = training.collector(&parameters, rank, threads)?;
                let optimizer = &training.optimizer;
                let count = parameters.len();
                let level = Hogwild::new(thread, model, threads, optimizer, count, weights)?;
                (Worker::relaxed(rank, parameters, collector, level), threads, Ending::Thread)
            }
            (Kind::Process, Consistency::Agreeing(spec)) => {
                agree(training, spec, Job::join()?, parameters, weights)?
            }
            (Kind::Process, Consistency::Relaxed(Level::Gossip)) => {
                gossip(training, Job::join()?, parameters, weights)?
            }
            (Kind::Process, Consistency::Relaxed(level)) => {
                serve(training, level, Identity::from_env()?, parameters, weights)?
            }
        };
        let (begun, steps, loss, is_over) = (Instant::now(), 0, f32::NAN, false);
        worker.part = Some(Part { training, ending, workers, begun, steps, loss, is_over });
        Ok(worker)
    }
}

/// The part that a worker has in a run which it also begins and ends.
pub(super) struct Part<'a> {
    training: &'a Training,
    ending: Ending,
    workers: usize,
    begun: Instant,
    steps: u64,
    loss: f32,
    /// Whether the workers have agreed to stop.
    is_over: bool,
}

/// What is left to do at the end of a run, by its kind.
pub(super) enum Ending {
    Thread,
    Agreed {
        job: Job,
        recorder: Option<Box<StepRecorder>>,
    },
    /// The server inside this worker serves until all have left.
    Served {
        job: Option<Job>,
        run: Box<Run>,
        options: ClientOptions,
        server: Option<Server>,
    },
    Gossiped {
        job: Job,
    },
}

impl Part<'_> {
    /// Whether workers that agree have made this step, counted from 0, or will not make it.
    pub(super) fn is_over(&self, step: u64) -> bool {
        self.is_over || step >= self.training.steps
    }

    /// Records a step where the servers do not.
    pub(super) fn note(
        &mut self,
        stepped: &Stepped,
        sent: u64,
        agreeing: Option<&Agreeing>,
    ) -> Result<(), WorkerError> {
        (self.steps, self.loss) = (self.steps + 1, stepped.loss);
        let (Ending::Agreed { job, recorder }, Some(outcome), Some(agreeing)) =
            (&mut self.ending, &stepped.outcome, agreeing)
        else {
            return Ok(());
        };
        // The same on all ranks, as the loss is if they have agreed on it.
        self.is_over = outcome.agreed && (outcome.stop || !outcome.loss.is_finite());
        let Some(recorder) = recorder else { return Ok(()) };
        recorder.note(stepped.step, outcome, sent);
        if let Some(advice) = &outcome.advice {
            recorder.advise(stepped.step, advice)?;
        }
        if recorder.is_due() {
            hand_in(recorder, job.world())?;
            // That was no part of the next step.
            job.world().barrier()?;
            agreeing.synchronizer().begin_step();
        }
        Ok(())
    }

    /// Leaves word of an error for the report.
    pub(super) fn note_error(&self, error: &WorkerError) {
        error.note_in(self.training.run_dir.as_deref());
    }
}

impl Worker<'_> {
    /// Ends a run whose [seat](Seat) was taken. The weights become the final ones, where all workers have
    /// made their steps; worker 0 writes the report.
    ///
    /// # Panics
    /// If the worker was made without a seat: then it only [leaves](Worker::leave).
    pub fn finish(mut self, weights: &mut dyn Weights) -> Result<Totals, WorkerError> {
        let part = self.part.take().expect("a worker that took a seat ends its run");
        let Part { training, ending, workers, .. } = part;
        let (parameters, rank) = (self.parameters.clone(), self.rank);
        let (sent, exchanges) = (self.sent(), self.exchanges());
        self.leave(weights)?;
        let hash = |weights: &dyn Weights| weights_hash(&parameters, weights).to_hex().to_string();
        let folder = training.run_dir.clone().filter(|_| rank == 0);
        let mut report = None;
        match ending {
            Ending::Thread => {}
            Ending::Agreed { job, recorder } => {
                if let Some(mut recorder) = recorder {
                    hand_in(&mut recorder, job.world())?;
                    let outcome = Outcome { weights_hash: hash(weights), ..Outcome::default() };
                    report = recorder.finish(outcome, None).and_then(|recorded| {
                        let lost = recorded.written.inspect_err(|error| {
                            log::warn!("{error}; there is no report of this run");
                        });
                        lost.is_ok().then(|| recorded.run.report_path())
                    });
                }
                // The others stay until rank 0 has written all.
                job.world().barrier()?;
            }
            Ending::Served { job, run, options, server } => {
                // A worker that was lost has left as well, as soon as the servers notice.
                while reports(&run, &options)?.iter().any(|report| report.present > 0) {
                    std::thread::sleep(ASK_EVERY);
                }
                weights.set_all(&fetch_weights(&run, &options)?);
                if let Some(job) = &job {
                    job.world().barrier()?;
                }
                drop(server);
                report = folder.map(|dir| sum_up(dir, hash(weights), None)).transpose()?;
            }
            Ending::Gossiped { job } => {
                let group = job.world();
                for parameter in 0..parameters.len() {
                    let mut done = Ok(());
                    weights.change(parameter, &mut |own| {
                        done = group.all_reduce(own, Reduction::Mean);
                    });
                    done?;
                }
                let mut all = [exchanges.unwrap_or(0) as i64];
                group.all_reduce(&mut all, Reduction::Sum)?;
                let all = Some(all[0] as u64);
                report = folder.map(|dir| sum_up(dir, hash(weights), all)).transpose()?;
                group.barrier()?;
            }
        }
        Ok(Totals {
            worker: rank,
            workers,
            consistency: training.consistency,
            steps: part.steps,
            loss: part.loss,
            seconds: part.begun.elapsed().as_secs_f64(),
            sent,
            weights_hash: hash(weights),
            report,
        })
    }
}

/// Hands records in. A folder that cannot be written to costs the report and not the run.
fn hand_in(recorder: &mut StepRecorder, group: &Group) -> Result<(), WorkerError> {
    if let Err(error) = recorder.hand_in(group)? {
        log::warn!("{error}; the run goes on, and its report will be incomplete");
    }
    Ok(())
}

/// Writes the report of a run whose updates are in its folder: where it is.
fn sum_up(dir: PathBuf, hash: String, exchanges: Option<u64>) -> Result<PathBuf, WorkerError> {
    let outcome = Outcome { weights_hash: hash, ..Outcome::default() };
    Ok(RelaxedFolder::at(dir).finish(outcome, exchanges)?.report_path())
}
