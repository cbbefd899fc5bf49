//! How the workers of a run come together, level by level.

use std::net::SocketAddr;
use std::time::SystemTime;

use socket2::{Domain, Socket, Type};
use unisono_cluster::worker::Worker as Identity;
use unisono_collective::{Group, Options, Transport};
use unisono_insight::relaxed::{RelaxedFolder, UpdateLog};
use unisono_net::Token;
use unisono_relaxed::Life;
use unisono_relaxed::gossip::{Gossip, GossipConfig};
use unisono_relaxed::server::{
    Client, Files, Server, ServerOptions, has_begun, wait_for_worker_zero,
};
use unisono_relaxed::spec::Level;
use unisono_sync::strategy::{StrategySpec, Weights};
use unisono_sync::{Parameter, Settings};

use super::agreeing::broadcast;
use super::training::{Ending, Servers, Training};
use super::{GossipLog, Gossiping, Served, Worker, WorkerError};
use crate::job::{Job, JoinError};
use crate::recording::relaxed::ServerRecorder;
use crate::recording::steps::{StepRecorder, run_info};

/// Joins those who agree.
pub(super) fn agree<'a>(
    training: &Training,
    strategy: StrategySpec,
    job: Job,
    parameters: Vec<Parameter>,
    weights: &mut dyn Weights,
) -> Result<(Worker<'a>, usize, Ending), WorkerError> {
    let settings = Settings { strategy, ..training.settings.clone() };
    let (group, optimizer) = (job.world(), &training.optimizer);
    let worker = Worker::agreeing(group, parameters, settings.clone(), optimizer, weights)?;
    let mut recorder = None;
    if let (Some(dir), Some(agreeing)) = (&training.run_dir, worker.as_agreeing()) {
        let mut info = run_info(group, agreeing.synchronizer(), &settings);
        info.name.clone_from(&training.name);
        info.model.clone_from(&training.name);
        info.settings.insert("optimizer".to_owned(), optimizer.to_string().into());
        info.settings.insert("steps".to_owned(), (training.steps as i64).into());
        info.settings.insert("overlap".to_owned(), settings.overlap.into());
        let samples = training.samples * settings.shards as u64;
        recorder = Some(Box::new(StepRecorder::begin(group, Some(dir), info, samples)?));
        agreeing.synchronizer().begin_step();
    }
    let workers = group.size();
    Ok((worker, workers, Ending::Agreed { job, recorder }))
}

/// Joins those who average with changing partners.
pub(super) fn gossip<'a>(
    training: &Training,
    job: Job,
    parameters: Vec<Parameter>,
    weights: &mut dyn Weights,
) -> Result<(Worker<'a>, usize, Ending), WorkerError> {
    let group = job.world();
    let (rank, workers) = (group.rank(), group.size());
    let listener = listener(&job)?;
    let addresses = spread_addresses(group, Some(address(&listener)?))?;
    let token = spread_token(group)?;
    broadcast(group, weights, parameters.len())?;
    let initial = weights.to_vecs(parameters.len());
    let lengths: Vec<usize> = parameters.iter().map(Parameter::elements).collect();
    let optimizer = training.optimizer.build(&lengths)?;
    let began = SystemTime::now();
    if let Some(dir) = training.run_dir.as_ref().filter(|_| rank == 0) {
        RelaxedFolder::create(dir, &training.relaxed_info(Level::Gossip, "", workers, true))?;
    }
    let config = GossipConfig {
        rank: rank as u32,
        life: Life(1),
        addresses: addresses.into_iter().flatten().collect(),
        listener,
        token,
        timeout: group.options().timeout,
        seed: training.seed,
        is_cut: None,
    };
    let gossip = Gossip::start(config, initial)?;
    gossip.begin_anew();
    // No worker steps before all have started, so that all begin with the same weights.
    group.barrier()?;
    let log = match &training.run_dir {
        Some(dir) => {
            let log = UpdateLog::create(RelaxedFolder::updates(dir, rank))?;
            Some(GossipLog::new(log, 0, began, rank as u32, 1, workers as u32))
        }
        None => None,
    };
    let collector = training.collector(&parameters, rank, workers)?;
    let level = Gossiping::new(gossip, optimizer, parameters.len(), 0, training.steps, log);
    Ok((Worker::relaxed(rank, parameters, collector, level), workers, Ending::Gossiped { job }))
}

/// Joins a run whose weights live on servers.
pub(super) fn serve<'a>(
    training: &Training,
    level: Level,
    identity: Identity,
    parameters: Vec<Parameter>,
    weights: &mut dyn Weights,
) -> Result<(Worker<'a>, usize, Ending), WorkerError> {
    let (rank, workers) = (identity.rank as usize, identity.world as usize);
    let environment = Options::from_env().map_err(JoinError::from)?;
    let run = training.run(&parameters, level, workers, environment.timeout);
    let named = match &training.servers {
        Servers::At(addresses) => Some(addresses.clone()),
        Servers::Found => identity.servers.clone(),
        Servers::Inside(_) => None,
    };
    let inside = match (&training.servers, &named) {
        (_, Some(_)) => 0,
        (Servers::Inside(count), None) => (*count).clamp(1, workers),
        (_, None) => 1,
    };
    let tcp = environment.transport == Transport::Tcp;
    let make_folder = |servers: &str| match training.run_dir.as_ref().filter(|_| rank == 0) {
        Some(dir) => {
            let info = training.relaxed_info(level, servers, workers, tcp);
            RelaxedFolder::create(dir, &info).map(drop)
        }
        None => Ok(()),
    };
    let (mut job, mut server) = (None, None);
    let (servers, token) = match named {
        Some(servers) => (servers, identity.token()?.with_encryption(environment.encrypt)),
        None => {
            make_folder("inside")?;
            let joined = Job::join()?;
            let group = joined.world();
            let token = spread_token(group)?;
            let mut own = None;
            if rank < inside {
                let listener = listener(&joined)?;
                own = Some(address(&listener)?);
                let files = Files { number: rank, ..Files::default() };
                let recorder = training
                    .run_dir
                    .as_ref()
                    .map(|dir| Box::new(ServerRecorder::new(dir, rank)) as Box<_>);
                let options = ServerOptions { token: token.clone(), files, recorder };
                server = Some(Server::start(listener, options)?);
            }
            let addresses = spread_addresses(group, own)?.into_iter().flatten();
            let servers = addresses.map(|address| address.to_string()).collect();
            broadcast(group, weights, parameters.len())?;
            job = Some(joined);
            (servers, token)
        }
    };
    let initial = weights.to_vecs(parameters.len());
    let options = training.client_options(servers, token, rank as u32, environment.transport);
    if job.is_none() && rank == 0 {
        let dir = training.run_dir.as_ref();
        // A worker that is started again goes on in the folder that it made before.
        if !(has_begun(&run, &options)? && dir.is_some_and(|dir| RelaxedFolder::is_relaxed(dir))) {
            make_folder(&options.servers.join(","))?;
        }
    } else if job.is_none() {
        wait_for_worker_zero(&run, &options)?;
    }
    let client = Client::join(&run, options.clone(), &|parameter| initial[parameter].clone())?;
    if let Some(job) = &job {
        // A worker that takes the others for gone would end its server before they have come.
        job.world().barrier()?;
    }
    let collector = training.collector(&parameters, rank, workers)?;
    let level = Served::new(client, &run, &training.optimizer)?;
    let ending = Ending::Served { job, run: Box::new(run), options, server };
    Ok((Worker::relaxed(rank, parameters, collector, level), workers, ending))
}

/// A secret that the ranks of a group have in common.
fn spread_token(group: &Group) -> Result<Token, WorkerError> {
    let mut bytes = [0u8; 32];
    if group.rank() == 0 {
        bytes = *Token::random().map_err(|_| WorkerError::NoRandomness)?.as_bytes();
    }
    group.broadcast(&mut bytes, 0)?;
    Ok(Token::from_bytes(bytes).with_encryption(group.options().encrypt))
}

/// The address that each rank gives, if it gives one.
fn spread_addresses(
    group: &Group,
    own: Option<SocketAddr>,
) -> Result<Vec<Option<SocketAddr>>, WorkerError> {
    const LONGEST: usize = 64;
    let text = own.map(|address| address.to_string()).unwrap_or_default();
    let mut bytes = [b' '; LONGEST];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    let mut all = vec![0u8; LONGEST * group.size()];
    group.all_gather(&bytes, &mut all)?;
    let parse = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.trim().parse().ok();
    Ok(all.chunks(LONGEST).map(parse).collect())
}

/// Listens at a free port of this machine's address.
fn listener(job: &Job) -> Result<Socket, WorkerError> {
    let ip = job.ip();
    let bind = || {
        let address = SocketAddr::new(ip, 0);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.bind(&address.into())?;
        socket.listen(1024)?;
        Ok(socket)
    };
    bind().map_err(|source| WorkerError::Listen { ip, source })
}

fn address(listener: &Socket) -> Result<SocketAddr, WorkerError> {
    let address = listener.local_addr().ok().and_then(|address| address.as_socket());
    address.ok_or(WorkerError::Ended)
}
