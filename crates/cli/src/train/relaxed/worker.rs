//! A worker whose weights live on servers.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, anyhow, ensure};
use signal_hook::consts::{SIGINT, SIGTERM};
use unisono::relaxed::server::wire::Measured;
use unisono::relaxed::server::{
    Client, ClientOptions, Files, Run, ServerError, Shard, ShardOptions, Transport, look, reports,
};
use unisono::relaxed::spec::Level;
use unisono::sync::optimizer::Optimizer;
use unisono::sync::shards::Shards;

use super::super::args::{Plan, RelaxedPlan, ServersChoice, TrainArgs};
use super::super::progress::Reporter;
use super::student::{Computed, Student};
use super::{described, gossip, run_dir, weights};
use crate::serve;

/// How long a worker looks for servers that are not there: long enough for a restart.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often somebody who waits for the end looks.
const GLANCE: Duration = Duration::from_millis(50);

/// Where a worker is in its job.
pub struct Place {
    pub rank: usize,
    pub workers: usize,
    /// Larger for a later start of this worker.
    pub life: u64,
    pub stop: Arc<AtomicBool>,
}

/// Works until the run is over.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }
    let number = |name: &str| -> anyhow::Result<usize> {
        let text = std::env::var(name).with_context(|| format!("{name} is not set"))?;
        text.parse().with_context(|| format!("{name}={text} is no number"))
    };
    let began = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let place = Place {
        rank: number("RANK")?,
        workers: number("WORLD_SIZE")?,
        // Unlike a count of restarts, it also grows when the whole run is started again.
        life: began.as_millis() as u64,
        stop,
    };
    let plan = args.plan(place.workers)?;
    let relaxed = plan.relaxed.clone().context("a relaxed run")?;
    if relaxed.level == Level::Gossip {
        return gossip::run(args, &plan, &place);
    }
    let inside = relaxed.servers == ServersChoice::Inside;
    let shard = if inside { Some(serve_inside(&plan, &relaxed, &place)?) } else { None };
    let own = Shards::new(plan.shards, place.workers)?.of(place.rank, place.workers);
    let mut student = Student::new(&plan, own, relaxed.level.is_lockstep())?;
    let timeout = args.options()?.timeout;
    let run = described(&plan, &relaxed, student.parameters(), place.workers, timeout);
    let options = options(args, &relaxed, &place)?;
    let client = Client::join(&run, options.clone(), &|parameter| student.read(parameter))?;
    let ended = Watch::over(&client, &place.stop);
    let mut work = Work { plan: &plan, level: relaxed.level, place: &place, client };
    let mut reporter = (place.rank == 0)
        .then(|| Reporter::new(plan.steps, plan.batch / place.workers, args.as_worker));
    let outcome = work.train(&mut student, &run, &mut reporter);
    drop(ended);
    match outcome {
        // Told to, and nothing is lost but what was being computed.
        Err(error) if place.stop.load(Ordering::Relaxed) && is_stop(&error) => {}
        other => other?,
    }
    work.client.leave();
    if inside && !place.stop.load(Ordering::Relaxed) {
        wait_for_all(&plan, &run, &options, &place)?;
    }
    drop(shard);
    if let Some(reporter) = reporter {
        reporter.finish();
    }
    Ok(ExitCode::SUCCESS)
}

/// One worker's part of a run.
struct Work<'a> {
    plan: &'a Plan,
    level: Level,
    place: &'a Place,
    client: Client,
}

impl Work<'_> {
    fn train(
        &mut self,
        student: &mut Student,
        run: &Run,
        reporter: &mut Option<Reporter>,
    ) -> anyhow::Result<()> {
        match self.level {
            Level::Downpour { push, fetch } => {
                let lengths: Vec<usize> =
                    student.parameters().iter().map(|p| p.elements()).collect();
                let local = run.optimizer.build(&lengths)?;
                self.pour(student, local, push, fetch, reporter)
            }
            _ => self.push_and_pull(student, reporter),
        }
    }

    /// Pushes every gradient, and computes each from weights that were just pulled.
    fn push_and_pull(
        &mut self,
        student: &mut Student,
        reporter: &mut Option<Reporter>,
    ) -> anyhow::Result<()> {
        pull(&mut self.client, student)?;
        while !self.client.is_finished() {
            let start = Instant::now();
            let clock = self.client.clock();
            let computed = student.compute(clock, self.slowness())?;
            self.expect_number(&computed, clock)?;
            let mut failed = Ok(());
            let taking: &Student = student;
            self.client.push_pull(&student.gradients(), measured(&computed), &mut |p, at, w| {
                if failed.is_ok() {
                    failed = taking.write(p, at, w);
                }
            })?;
            failed?;
            self.tell(reporter, clock + 1, &computed, start);
        }
        Ok(())
    }

    /// Downpour: steps by itself, and now and then pushes what it has gathered, and fetches.
    fn pour(
        &mut self,
        student: &mut Student,
        mut local: Box<dyn Optimizer>,
        push: u32,
        fetch: u32,
        reporter: &mut Option<Reporter>,
    ) -> anyhow::Result<()> {
        pull(&mut self.client, student)?;
        let (push, fetch) = (u64::from(push), u64::from(fetch));
        let parameters = student.parameters().len();
        let mut gathered: Vec<Vec<f32>> =
            student.parameters().iter().map(|p| vec![0.0; p.elements()]).collect();
        let mut sum = Computed { loss: 0.0, samples: 0, seconds: 0.0 };
        let mut step = self.client.clock() * push;
        while !self.client.is_finished() {
            let start = Instant::now();
            let computed = student.compute(step, self.slowness())?;
            self.expect_number(&computed, step)?;
            step += 1;
            for (parameter, gathered) in gathered.iter_mut().enumerate() {
                let gradient = student.gradient(parameter);
                gathered.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g / push as f32);
                student.change(parameter, |own| local.update(parameter, step, own, gradient))?;
            }
            sum.loss += computed.loss / push as f32;
            sum.samples += computed.samples;
            sum.seconds += computed.seconds;
            if step.is_multiple_of(push) {
                let gradients: Vec<_> =
                    (0..parameters).map(|p| (p, vec![gathered[p].as_slice()])).collect();
                self.client.push(&gradients, measured(&sum))?;
                gathered.iter_mut().for_each(|gathered| gathered.fill(0.0));
                sum = Computed { loss: 0.0, samples: 0, seconds: 0.0 };
            }
            if step.is_multiple_of(fetch) {
                pull(&mut self.client, student)?;
            }
            self.tell(reporter, step, &computed, start);
        }
        Ok(())
    }

    fn slowness(&self) -> f64 {
        self.plan.slow.filter(|(rank, _)| *rank == self.place.rank).map_or(1.0, |(_, slow)| slow)
    }

    fn expect_number(&self, computed: &Computed, step: u64) -> anyhow::Result<()> {
        ensure!(
            computed.loss.is_finite(),
            "the loss is no longer a number since step {step}; lower --learning-rate"
        );
        Ok(())
    }

    fn tell(&self, to: &mut Option<Reporter>, step: u64, computed: &Computed, start: Instant) {
        if let Some(reporter) = to {
            let seconds = start.elapsed().as_secs_f64();
            let blocked = (seconds - computed.seconds).max(0.0);
            reporter.took(step.min(self.plan.steps), computed.loss, seconds, blocked);
        }
    }
}

fn pull(client: &mut Client, student: &Student) -> anyhow::Result<()> {
    let mut failed = Ok(());
    client.pull(None, &mut |parameter, start, weights| {
        if failed.is_ok() {
            failed = student.write(parameter, start, weights);
        }
    })?;
    failed
}

fn measured(computed: &Computed) -> Measured {
    Measured {
        loss: computed.loss,
        samples: computed.samples,
        compute: computed.seconds,
        ..Measured::default()
    }
}

fn is_stop(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ServerError::Stopped))
}

/// How this worker reaches the servers.
pub fn options(
    args: &TrainArgs,
    relaxed: &RelaxedPlan,
    place: &Place,
) -> anyhow::Result<ClientOptions> {
    let from = |name: &str| -> anyhow::Result<Vec<String>> {
        let text = std::env::var(name).with_context(|| format!("{name} is not set"))?;
        Ok(text.split(',').map(str::to_owned).collect())
    };
    let servers = match &relaxed.servers {
        ServersChoice::At(addresses) => addresses.clone(),
        ServersChoice::Inside => from("UNISONO_PEERS")?,
        ServersChoice::Started(_) => from("UNISONO_SERVERS").map_err(|_| {
            anyhow!(
                "there are no servers: start workers by `unisono run --servers S`, or name them by \
                     --servers HOST:PORT"
            )
        })?,
    };
    Ok(ClientOptions {
        servers,
        token: serve::token()?,
        worker: place.rank as u32,
        life: place.life,
        patience: PATIENCE,
        transport: match args.transport() {
            unisono::Transport::Tcp => Transport::Tcp,
            _ => Transport::Auto,
        },
        warm_up: args.warm_up(),
        error_feedback: args.error_feedback(),
    })
}

/// Starts the shard that lives in this worker.
fn serve_inside(plan: &Plan, relaxed: &RelaxedPlan, place: &Place) -> anyhow::Result<Shard> {
    let listener = serve::inherited()?.context("UNISONO_LISTEN_FD is not set")?;
    let run_dir = run_dir(plan)?;
    let journal = relaxed.journal.clone().unwrap_or_else(|| run_dir.join("journal"));
    let files = Files {
        number: place.rank,
        journal: Some(journal.join(place.rank.to_string())),
        run: Some(run_dir),
        ..Files::default()
    };
    Ok(Shard::start(listener, ShardOptions { token: serve::token()?, files })?)
}

/// Stays until everybody is done, since others need the shard in this worker; rank 0 then leaves the
/// weights for the leader.
fn wait_for_all(
    plan: &Plan,
    run: &Run,
    options: &ClientOptions,
    place: &Place,
) -> anyhow::Result<()> {
    let path = weights::path(&run_dir(plan)?, 0);
    while !place.stop.load(Ordering::Relaxed) && !path.exists() {
        if place.rank == 0 {
            let over = reports(run, options)?.iter().all(|r| r.finished && r.present == 0);
            if over {
                return weights::write(&path, &look(run, options)?);
            }
        }
        std::thread::sleep(GLANCE);
    }
    Ok(())
}

/// Where peers listen.
pub fn peers() -> anyhow::Result<Vec<SocketAddr>> {
    let text = std::env::var("UNISONO_PEERS").context("UNISONO_PEERS is not set")?;
    let parse = |text: &str| text.parse().with_context(|| format!("UNISONO_PEERS: {text}"));
    text.split(',').map(parse).collect()
}

/// Ends the waits of a client when this process is told to stop.
struct Watch {
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    fn over(client: &Client, stop: &Arc<AtomicBool>) -> Watch {
        let over = Arc::new(AtomicBool::new(false));
        let (stopper, stop, ended) = (client.stopper(), stop.clone(), over.clone());
        let watch = move || {
            while !ended.load(Ordering::Relaxed) {
                if stop.load(Ordering::Relaxed) {
                    return stopper.stop();
                }
                std::thread::sleep(GLANCE);
            }
        };
        let thread = std::thread::Builder::new().name("unisono-watch".into()).spawn(watch).ok();
        Watch { over, thread }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
