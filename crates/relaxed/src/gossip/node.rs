//! A worker of a gossip: its replica, its threads and its sockets.

use std::fmt;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::Socket;
use unisono_net::{Acceptor, Admission, Token};
use zerocopy::IntoBytes;

use super::connect::{Connection, GOSSIP, Sockets};
use super::core::Core;
use super::error::GossipError;
use super::stats::GossipStats;
use super::weights::{Weights, lock};
use super::wire::{HEADER_LEN, Kind, Message, Shape};
use super::{active, join, passive};
use crate::{Clock, Life};

/// Says of a worker that it cannot be reached: a cut, for tests and experiments.
pub type Cut = Arc<dyn Fn(u32) -> bool + Send + Sync>;

/// Who a worker is and whom it talks to.
pub struct GossipConfig {
    /// This worker.
    pub rank: u32,
    /// Larger for a later start of the same worker.
    pub life: Life,
    /// Where each worker listens, by rank, this one included.
    pub addresses: Vec<SocketAddr>,
    /// This worker's own listening socket.
    pub listener: Socket,
    /// The secret of the job.
    pub token: Token,
    /// How long an exchange may take, from the first byte to the last, before it is given up; also the
    /// longest rest between two attempts to reach a partner.
    pub timeout: Duration,
    /// What the order of partners follows from.
    pub seed: u64,
    /// Workers to treat as out of reach.
    pub is_cut: Option<Cut>,
}

/// One worker's replica, which averages with those of others in the background.
///
/// The training loop reads weights, computes, adds its change and asks for an exchange:
///
/// ```no_run
/// # use unisono_relaxed::gossip::{Gossip, GossipError};
/// # fn train(gossip: &Gossip, change: impl Fn(&[f32]) -> Vec<f32>) -> Result<(), GossipError> {
/// let mut weights = vec![0.0; 1000];
/// for _ in 0..100 {
///     gossip.weights(0, &mut weights)?;
///     gossip.step(&[change(&weights)])?;
///     gossip.exchange()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// None of these calls waits for another worker. Dropping it, or [leaving](Gossip::leave), closes its
/// connections and gives up an exchange under way.
///
/// It holds the weights once for training and once for its own exchanges, and once more for each
/// partner whose offer arrives at the same time.
pub struct Gossip {
    shared: Arc<Shared>,
    joined: Option<Joined>,
    acceptor: Option<Acceptor>,
    active: Option<JoinHandle<()>>,
}

/// From whom a worker took over its first weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The worker that was furthest.
    pub from: u32,
    /// The steps it had finished: this worker's clock starts there.
    pub clock: Clock,
}

impl Gossip {
    /// Starts a worker whose parameters have these weights, unless others are under way already: then
    /// it takes over the weights of one of them. Others that are not there yet are found later.
    pub fn start(config: GossipConfig, initial: Vec<Vec<f32>>) -> Result<Gossip, GossipError> {
        let rank = config.rank;
        let failed = |cause| GossipError::Start { rank, cause };
        let (shared, listener) = Shared::new(config, Weights::new(initial))?;
        let shared = Arc::new(shared);
        let host = Arc::clone(&shared);
        let admission = Admission::new(shared.token.clone(), &[GOSSIP]);
        let acceptor = Acceptor::start(vec![listener], admission, move |connection, who| {
            passive::admit(&host, connection, who);
        });
        let mut gossip = Gossip { shared, joined: None, acceptor: None, active: None };
        gossip.acceptor = Some(acceptor.map_err(failed)?);
        gossip.joined = join::join(&gossip.shared)?;
        let clock = gossip.joined.map_or(Clock::START, |joined| joined.clock);
        gossip.shared.clock.store(clock.0, Ordering::Release);
        gossip.shared.joining.store(false, Ordering::Release);
        let node = Arc::clone(&gossip.shared);
        let thread = std::thread::Builder::new().name("unisono-exchange".into());
        gossip.active = Some(thread.spawn(move || active::run(&node)).map_err(failed)?);
        Ok(gossip)
    }

    /// From which worker this one took over its first weights; `None`: from none, they are its own.
    pub fn joined(&self) -> Option<Joined> {
        self.joined
    }

    /// Counts this worker's steps from 0, wherever it took its weights over from: for one that starts late
    /// and has all its steps before it. To be called before the first.
    pub fn begin_anew(&self) {
        self.shared.clock.store(0, Ordering::Release);
    }

    /// Reads the weights of a parameter.
    pub fn weights(&self, parameter: usize, into: &mut [f32]) -> Result<(), GossipError> {
        self.shared.weights.read(parameter, into)
    }

    /// Ends a step of training: adds its change to every parameter. Returns the clock.
    pub fn step<C: AsRef<[f32]>>(&self, changes: &[C]) -> Result<Clock, GossipError> {
        let weights = &self.shared.weights;
        if changes.len() != weights.parameters() {
            let (parameters, given) = (weights.parameters(), changes.len());
            return Err(GossipError::Changes { parameters, given });
        }
        for (parameter, change) in changes.iter().enumerate() {
            weights.check(parameter, change.as_ref().len())?;
        }
        Ok(self.step_with(|parameter, weights| {
            for (weight, change) in weights.iter_mut().zip(changes[parameter].as_ref()) {
                *weight += change;
            }
        }))
    }

    /// Ends a step of training by letting `change` work on the weights of every parameter, as they are
    /// now: an optimizer can be applied in place. Returns the clock.
    pub fn step_with(&self, change: impl FnMut(usize, &mut [f32])) -> Clock {
        self.shared.weights.update(change);
        Clock(self.shared.clock.fetch_add(1, Ordering::AcqRel)).next()
    }

    /// Asks for an exchange with the next partner, which happens in the background. Says whether it was
    /// taken up: it is not while the last one is under way.
    ///
    /// Fails if a worker was found that trains another model.
    pub fn exchange(&self) -> Result<bool, GossipError> {
        let node = &self.shared;
        let mut desk = lock(&node.desk);
        if let Some((partner, theirs)) = desk.fault {
            return Err(node.wrong_model(partner, theirs));
        }
        if desk.requested {
            drop(desk);
            node.core().skip();
            return Ok(false);
        }
        desk.requested = true;
        node.bell.notify_all();
        Ok(true)
    }

    /// Waits until no exchange of this worker's own is under way; at most about the timeout.
    pub fn settle(&self) {
        let desk = lock(&self.shared.desk);
        let busy = |desk: &mut Desk| desk.requested && !desk.closed;
        let _desk = self.shared.bell.wait_while(desk, busy).unwrap_or_else(PoisonError::into_inner);
    }

    /// What happened so far.
    pub fn stats(&self) -> GossipStats {
        self.shared.core().stats(self.shared.clock())
    }

    /// Ends this worker's part: an exchange under way is given up, all connections are closed, and
    /// the last weights are returned.
    pub fn leave(mut self) -> Vec<Vec<f32>> {
        self.close();
        let mut weights = Vec::with_capacity(self.shared.weights.parameters());
        self.shared.weights.update(|_, parameter| weights.push(parameter.to_vec()));
        weights
    }

    fn close(&mut self) {
        lock(&self.shared.desk).closed = true;
        self.shared.bell.notify_all();
        self.shared.sockets.close();
        // The two that start threads, before the threads.
        let active = self.active.take();
        drop(self.acceptor.take());
        let others = || std::mem::take(&mut *lock(&self.shared.threads));
        for thread in active.into_iter().chain(std::iter::once_with(others).flatten()) {
            if thread.join().is_err() {
                log::error!("worker {}: a thread of the gossip panicked", self.shared.rank);
            }
        }
    }
}

impl Drop for Gossip {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Gossip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { rank, life, .. } = &*self.shared;
        f.debug_struct("Gossip").field("rank", rank).field("life", life).finish_non_exhaustive()
    }
}

/// What the threads of a worker share.
pub(super) struct Shared {
    pub rank: u32,
    pub life: Life,
    pub addresses: Vec<SocketAddr>,
    pub token: Token,
    pub timeout: Duration,
    pub shape: Shape,
    pub weights: Weights,
    pub sockets: Sockets,
    is_cut: Option<Cut>,
    clock: AtomicU64,
    joining: AtomicBool,
    began: Instant,
    core: Mutex<Core>,
    /// Memory for offers that arrive, each as large as the model.
    buffers: Mutex<Vec<Vec<f32>>>,
    /// Connections this worker dialed and does not use at the moment, by rank.
    idle: Mutex<Vec<Option<Connection>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    desk: Mutex<Desk>,
    bell: Condvar,
}

/// What passes between the training loop and the active side.
#[derive(Default)]
struct Desk {
    /// An exchange is asked for or under way.
    requested: bool,
    closed: bool,
    /// A worker with another model, and its shape.
    fault: Option<(u32, Shape)>,
}

impl Shared {
    fn new(config: GossipConfig, weights: Weights) -> Result<(Shared, Socket), GossipError> {
        let GossipConfig { rank, life, addresses, listener, token, timeout, seed, is_cut } = config;
        let world = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        if rank >= world {
            return Err(GossipError::Place { rank, world });
        }
        let shared = Shared {
            rank,
            life,
            idle: Mutex::new(addresses.iter().map(|_| None).collect()),
            addresses,
            token,
            timeout,
            shape: weights.shape(),
            weights,
            sockets: Sockets::new().map_err(|cause| GossipError::Start { rank, cause })?,
            is_cut,
            clock: AtomicU64::new(0),
            joining: AtomicBool::new(true),
            began: Instant::now(),
            core: Mutex::new(Core::new(rank, world, seed, timeout)),
            buffers: Mutex::default(),
            threads: Mutex::default(),
            desk: Mutex::default(),
            bell: Condvar::new(),
        };
        Ok((shared, listener))
    }

    pub fn is_cut(&self, peer: u32) -> bool {
        self.is_cut.as_ref().is_some_and(|is_cut| is_cut(peer))
    }

    pub fn is_joining(&self) -> bool {
        self.joining.load(Ordering::Acquire)
    }

    pub fn clock(&self) -> Clock {
        Clock(self.clock.load(Ordering::Acquire))
    }

    /// The time the core goes by.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    pub fn message(&self, kind: Kind, number: u64) -> Message {
        Message { kind, life: self.life, number, clock: self.clock(), shape: self.shape }
    }

    pub fn greeting(&self) -> Message {
        self.message(Kind::Greeting { joining: self.is_joining() }, 0)
    }

    /// Receives as many weights as the model has, straight to where they are wanted.
    pub fn receive_payload(&self, stream: &mut impl Read, into: &mut [f32]) -> io::Result<()> {
        stream.read_exact(into.as_mut_bytes())
    }

    /// Counts a message to or from `peer` with so many weights.
    pub fn moved(&self, peer: u32, elements: usize) {
        self.core().moved(peer, (HEADER_LEN + size_of::<f32>() * elements) as u64);
    }

    /// Memory for one offer.
    pub fn take_buffer(&self) -> Vec<f32> {
        let kept = lock(&self.buffers).pop();
        kept.unwrap_or_else(|| vec![0.0; self.weights.elements()])
    }

    pub fn give_buffer(&self, buffer: Vec<f32>) {
        lock(&self.buffers).push(buffer);
    }

    /// Workers to knock at now.
    pub fn knock_at(&self) -> Vec<u32> {
        let now = self.now();
        let mut core = self.core();
        std::iter::from_fn(|| core.knock(now)).collect()
    }

    /// There is a connection to another worker.
    pub fn connected(&self, connection: Connection) {
        let partner = connection.partner;
        self.return_connection(connection);
        self.core().reached(partner);
    }

    /// Knocking at another worker was in vain.
    pub fn unanswered(&self, peer: u32) {
        self.core().unanswered(peer, self.now());
    }

    pub fn take_connection(&self, partner: u32) -> Option<Connection> {
        lock(&self.idle)[partner as usize].take()
    }

    pub fn return_connection(&self, connection: Connection) {
        let partner = connection.partner as usize;
        lock(&self.idle)[partner] = Some(connection);
    }

    /// The error for a worker with another model.
    pub fn wrong_model(&self, partner: u32, theirs: Shape) -> GossipError {
        let (elements, theirs) = (self.shape.elements, theirs.elements);
        GossipError::WrongModel { rank: self.rank, partner, elements, theirs }
    }

    /// Lets the training loop know of a worker with another model.
    pub fn fail(&self, partner: u32, theirs: Shape) {
        lock(&self.desk).fault = Some((partner, theirs));
    }

    /// Waits for the training loop to ask for an exchange; `false` once the worker leaves.
    pub fn await_request(&self) -> bool {
        let idle = |desk: &mut Desk| !desk.requested && !desk.closed;
        let desk = self.bell.wait_while(lock(&self.desk), idle);
        !desk.unwrap_or_else(PoisonError::into_inner).closed
    }

    /// What was asked for is done.
    pub fn request_served(&self) {
        lock(&self.desk).requested = false;
        self.bell.notify_all();
    }

    /// Starts a thread that ends by itself once the sockets are closed.
    pub fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work)?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }
}
