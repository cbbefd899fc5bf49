//! A worker whose weights live on servers.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use unisono::candle::{ModelWeights, ReplicaError};
use unisono::cluster::worker::Worker as Identity;
use unisono::relaxed::server::{
    ASK_EVERY, Client, ClientOptions, Run, ServerError, Stopper, fetch_weights, has_begun, is_over,
};
use unisono::relaxed::spec::Level;
use unisono::sync::strategy::Weights as _;
use unisono::worker::{Served, Worker, WorkerError};

use super::super::args::{RelaxedPlan, ServersChoice, TrainArgs};
use super::super::computation::{Learner, Learning};
use super::super::progress::Reporter;
use super::super::stop_flag;
use super::folder::{Folder, advise_to_record, describe};
use super::inside::Inside;
use super::{explain, gossip, train};
use crate::serve;

/// Where a worker is in its job.
pub struct WorkerPlace {
    pub rank: usize,
    pub workers: usize,
    /// How often this launcher has started it, from 1. Servers, which may outlast a launcher, count by
    /// themselves.
    pub starts: u64,
    pub stop: Arc<AtomicBool>,
}

impl WorkerPlace {
    fn find() -> anyhow::Result<WorkerPlace> {
        let stop = stop_flag()?;
        let Identity { rank, world, starts, .. } = Identity::from_env()?;
        Ok(WorkerPlace { rank: rank as usize, workers: world as usize, starts, stop })
    }

    pub fn is_told_to_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Works until the run is over. Where there is no leader, rank 0 sums it up.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let place = WorkerPlace::find()?;
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
    let learning = Learning::load(&plan)?;
    let mut weights = learning.weights();
    let parameters = weights.parameters();
    let timeout = args.options()?.timeout;
    let training = plan.training()?;
    let run = training.run(&parameters, relaxed.level, place.workers, timeout);
    let servers = servers(&relaxed)?;
    let options =
        training.client_options(servers, serve::token()?, place.rank as u32, args.transport());
    let mut goes_on = place.starts > 1;
    if !args.as_worker || matches!(relaxed.servers, ServersChoice::At(_)) {
        goes_on |= has_begun(&run, &options)?;
    }
    let folder = match args.as_worker || place.rank > 0 {
        true => None,
        false => {
            let info = describe(&plan, &relaxed, place.workers, args);
            Some(Folder::make_or_go_on(&plan, &info, goes_on)?)
        }
    };
    let inside = inside.map(Arc::new);
    let mut watch = None;
    let initial = weights.to_vecs(parameters.len());
    let joined =
        Client::join_stoppable(&run, options.clone(), &|p| initial[p].clone(), |stopper| {
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
    let level = Served::new(client, &run, &plan.optimizer)?;
    let collector = training.collector(&parameters, place.rank, place.workers)?;
    let mut learner =
        Learner::of(learning, Worker::relaxed(place.rank, parameters, collector, level))?;
    let mut reporter = (place.rank == 0)
        .then(|| Reporter::new(plan.steps, plan.batch / place.workers, args.as_worker));
    let outcome = train(&mut learner, &plan, place.rank, &place.stop, &mut reporter);
    drop(watch);
    check(inside.as_deref())?;
    match outcome.map_err(|error| explain(error, &plan, folder.as_ref())) {
        // Nothing is lost but what was being computed.
        Err(error) if place.is_told_to_stop() && is_stop(&error) => {}
        other => other?,
    }
    let learning = learner.finish()?;
    if let Some(inside) = inside {
        inside.wait_for_all(&run, &options, &place)?;
    }
    if let Some(folder) = folder {
        sum_up(args, folder, &learning, &mut weights, &run, &options, &place)?;
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
    folder: Folder,
    learning: &Learning,
    weights: &mut ModelWeights,
    run: &Run,
    options: &ClientOptions,
    place: &WorkerPlace,
) -> anyhow::Result<()> {
    while !is_over(run, options)? {
        if place.is_told_to_stop() {
            let report = folder.leave()?;
            say!("unisono: stopped; report: {}", report.display());
            return Ok(());
        }
        std::thread::sleep(ASK_EVERY);
    }
    weights.set_all(&fetch_weights(run, options)?);
    let pushes = folder.finish(learning, None, 0, args.json)?;
    advise_to_record(pushes, run);
    Ok(())
}

fn is_stop(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(ReplicaError::Worker(WorkerError::Server(ServerError::Stopped)))
    )
}

/// The addresses of the servers.
fn servers(relaxed: &RelaxedPlan) -> anyhow::Result<Vec<String>> {
    match &relaxed.servers {
        ServersChoice::At(addresses) => Ok(addresses.clone()),
        ServersChoice::Inside => Ok(peers()?.iter().map(ToString::to_string).collect()),
        ServersChoice::Started(_) => Identity::from_env()?.servers.context(
            "there are no servers: start workers by `unisono run --servers S`, or name servers \
             by --servers HOST:PORT",
        ),
    }
}

/// Where peers listen.
pub fn peers() -> anyhow::Result<Vec<SocketAddr>> {
    Identity::from_env()?.peers.with_context(|| need_leader("--strategy gossip"))
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
