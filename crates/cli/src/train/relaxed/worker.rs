//! A worker whose weights live on servers.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use unisono::cluster::worker::Worker;
use unisono::relaxed::downpour::Downpour;
use unisono::relaxed::server::wire::Measured;
use unisono::relaxed::server::{
    ASK_EVERY, Client, ClientOptions, Run, ServerError, Stopper, Transport, has_begun, is_over,
    look,
};
use unisono::relaxed::spec::Level;
use unisono::sync::shards::Shards;

use super::super::args::{Plan, RelaxedPlan, ServersChoice, TrainArgs};
use super::super::progress::Reporter;
use super::home::{Home, advise_to_record, describe};
use super::inside::Inside;
use super::student::{Computed, Student};
use super::{described, expect_number, gossip, note_divergence};
use crate::serve;

/// How long a worker looks for servers that are not there: long enough for a restart.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a worker is in its job.
pub struct Place {
    pub rank: usize,
    pub workers: usize,
    /// How often this launcher has started it, from 1. Servers, which may outlast a launcher, count by
    /// themselves.
    pub starts: u64,
    pub stop: Arc<AtomicBool>,
}

impl Place {
    fn find() -> anyhow::Result<Place> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
        }
        let Worker { rank, world, starts, .. } = Worker::from_env()?;
        Ok(Place { rank: rank as usize, workers: world as usize, starts, stop })
    }

    pub fn is_told_to_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Works until the run is over. Where nobody leads, rank 0 sums it up.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let place = Place::find()?;
    let plan = args.plan(place.workers)?;
    let relaxed = plan.relaxed.clone().context("a relaxed run")?;
    if relaxed.level == Level::Gossip {
        return gossip::run(args, &plan, &place);
    }
    let inside = match relaxed.servers {
        ServersChoice::Inside => match Inside::start(&plan, &relaxed, &place)? {
            Some(inside) => Some(inside),
            None => return Ok(ExitCode::SUCCESS),
        },
        _ => None,
    };
    let own = Shards::new(plan.shards, place.workers)?.of(place.rank, place.workers);
    let mut student = Student::new(&plan, own, relaxed.level.is_lockstep())?;
    let timeout = args.options()?.timeout;
    let run = described(&plan, &relaxed, student.parameters(), place.workers, timeout);
    let options = options(args, &relaxed, &place)?;
    let mut goes_on = place.starts > 1;
    if !args.as_worker || matches!(relaxed.servers, ServersChoice::At(_)) {
        goes_on |= has_begun(&run, &options)?;
    }
    let home = match args.as_worker || place.rank > 0 {
        true => None,
        false => {
            let info = describe(&plan, &relaxed, place.workers, args);
            Some(Home::make_or_go_on(&plan, &info, goes_on)?)
        }
    };
    let inside = inside.map(Arc::new);
    let mut watch = None;
    let initial = |parameter| student.read(parameter);
    let joined = Client::join_stoppable(&run, options.clone(), &initial, |stopper| {
        watch = Some(Watch::over(stopper, &place.stop, inside.clone()));
    });
    let client = match joined {
        Ok(client) => client,
        Err(ServerError::Stopped) if place.is_told_to_stop() => return Ok(ExitCode::SUCCESS),
        Err(error) => {
            check(inside.as_deref())?;
            return Err(error.into());
        }
    };
    let mut work = Work { plan: &plan, level: relaxed.level, place: &place, client };
    let mut reporter = (place.rank == 0)
        .then(|| Reporter::new(plan.steps, plan.batch / place.workers, args.as_worker));
    let outcome = work.train(&mut student, &mut reporter);
    drop(watch);
    check(inside.as_deref())?;
    if let Err(error) = &outcome {
        note_divergence(&plan, home.as_ref(), error);
    }
    match outcome {
        // Nothing is lost but what was being computed.
        Err(error) if place.is_told_to_stop() && is_stop(&error) => {}
        other => other?,
    }
    work.client.leave();
    if let Some(inside) = inside {
        inside.wait_for_all(&run, &options, &place)?;
    }
    if let Some(home) = home {
        sum_up(args, home, &student, &run, &options, &place)?;
    }
    if let Some(reporter) = reporter {
        reporter.finish();
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails as the server in this worker has, if there is one that cannot go on. What became of the client
/// is a consequence.
fn check(inside: Option<&Inside>) -> anyhow::Result<()> {
    inside.map_or(Ok(()), Inside::check)
}

/// What to do about something that only the leader of a run provides.
pub fn need_leader(flag: &str) -> String {
    format!("{flag} needs sockets that only `unisono train --workers N` opens: start it by itself")
}

/// Waits until the others are done, and sums the run up.
fn sum_up(
    args: &TrainArgs,
    home: Home,
    student: &Student,
    run: &Run,
    options: &ClientOptions,
    place: &Place,
) -> anyhow::Result<()> {
    while !is_over(run, options)? {
        if place.is_told_to_stop() {
            let report = home.leave()?;
            say!("unisono: stopped; report: {}", report.display());
            return Ok(());
        }
        std::thread::sleep(ASK_EVERY);
    }
    for (parameter, weights) in look(run, options)?.iter().enumerate() {
        student.write(parameter, 0, weights)?;
    }
    let pushes = home.finish(student, None, 0, args.json)?;
    advise_to_record(pushes, run);
    Ok(())
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
        reporter: &mut Option<Reporter>,
    ) -> anyhow::Result<()> {
        match self.level {
            Level::Downpour(periods) => {
                let lengths: Vec<usize> =
                    student.parameters().iter().map(|p| p.elements()).collect();
                let clock = self.client.clock();
                let replica = Downpour::new(periods, &self.plan.optimizer, &lengths, clock)?;
                self.push_and_fetch(student, replica, reporter)
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
        if !self.client.is_finished() {
            pull(&mut self.client, student)?;
        }
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
    fn push_and_fetch(
        &mut self,
        student: &mut Student,
        mut replica: Downpour,
        reporter: &mut Option<Reporter>,
    ) -> anyhow::Result<()> {
        if !self.client.is_finished() {
            pull(&mut self.client, student)?;
        }
        while !self.client.is_finished() {
            let (start, step) = (Instant::now(), replica.steps());
            let computed = student.compute(step, self.slowness())?;
            self.expect_number(&computed, step)?;
            for parameter in 0..student.parameters().len() {
                let gradient = student.gradient(parameter);
                student.change(parameter, |own| replica.update(parameter, own, gradient))?;
            }
            replica.end_step(measured(&computed));
            if replica.push_is_due() {
                let (gradients, measured) = replica.gathered();
                self.client.push(&gradients, measured)?;
                replica.clear();
            }
            if replica.fetch_is_due() {
                pull(&mut self.client, student)?;
            }
            self.tell(reporter, step + 1, &computed, start);
        }
        Ok(())
    }

    fn slowness(&self) -> f64 {
        self.plan.slow.filter(|(rank, _)| *rank == self.place.rank).map_or(1.0, |(_, slow)| slow)
    }

    fn expect_number(&self, computed: &Computed, step: u64) -> anyhow::Result<()> {
        expect_number(computed, self.place.rank, step)
    }

    fn tell(&self, to: &mut Option<Reporter>, step: u64, computed: &Computed, start: Instant) {
        if let Some(reporter) = to {
            let seconds = start.elapsed().as_secs_f64();
            let blocked = (seconds - computed.seconds).max(0.0);
            // A worker may have more steps than its share; the run is over when all are made.
            let most = self.plan.steps - u64::from(!self.client.is_finished());
            reporter.took(step.min(most), computed.loss, seconds, blocked);
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
    let servers = match &relaxed.servers {
        ServersChoice::At(addresses) => addresses.clone(),
        ServersChoice::Inside => peers()?.iter().map(ToString::to_string).collect(),
        ServersChoice::Started(_) => Worker::from_env()?.servers.context(
            "there are no servers: start workers by `unisono run --servers S`, or name servers \
                 by --servers HOST:PORT",
        )?,
    };
    Ok(ClientOptions {
        servers,
        token: serve::token()?,
        worker: place.rank as u32,
        life: None,
        patience: PATIENCE,
        transport: match args.transport() {
            unisono::Transport::Tcp => Transport::Tcp,
            _ => Transport::Auto,
        },
        warm_up: args.warm_up(),
        error_feedback: args.error_feedback(),
    })
}

/// Where peers listen.
pub fn peers() -> anyhow::Result<Vec<SocketAddr>> {
    Worker::from_env()?.peers.with_context(|| need_leader("--strategy gossip"))
}

/// Ends the waits of a client when this process is told to stop, or the server in it cannot go on.
struct Watch {
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    fn over(stopper: Stopper, stop: &Arc<AtomicBool>, inside: Option<Arc<Inside>>) -> Watch {
        let over = Arc::new(AtomicBool::new(false));
        let (stop, ended) = (stop.clone(), over.clone());
        let watch = move || {
            while !ended.load(Ordering::Relaxed) {
                let has_failed = inside.as_ref().is_some_and(|inside| inside.has_failed());
                if has_failed || stop.load(Ordering::Relaxed) {
                    return stopper.stop();
                }
                std::thread::sleep(ASK_EVERY);
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
