//! A worker's side of the parameter server.
//!
//! A [`Client`] has a session with every shard. What it asks of one, it asks of all before it waits for
//! the first reply, so that the shards work at the same time. Shards keep their own clocks, and the
//! worker's is that of the furthest.
//!
//! A connection that is lost, because the shard was killed or the network was cut, is opened again,
//! for as long as the client's patience lasts. The worker then joins again, and sends again what was
//! under way and had not arrived ([`Outbox`]): whoever calls notices nothing but the time it took.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, TcpKeepalive, Type};
use unisono_codec::CodecSpec;
use unisono_codec::parcel::{Origin, Scratch, Sender};
use unisono_collective::handshake::{HandshakeError, Introduction, Purpose, Token, initiate};
use unisono_sync::optimizer::OptimizerSpec;
use unisono_sync::shards::Shards;

use super::core::{Age, Refusal};
use super::layout::{self, Piece};
use super::link::{Link, bytes, numbers};
use super::outbox::Outbox;
use super::shard::unix_address;
use super::wire::{self, Measured, Part, Reply, Report, Request, Setup};
use crate::spec::Level;
use crate::stale::Stale;

/// The worker number of somebody who only looks.
const NOBODY: u32 = u32::MAX;

/// How often a worker says that it lives, in a timeout.
const BEATS: u32 = 4;

/// Pauses between attempts to reach a shard: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What a run is. Equal for all workers.
#[derive(Clone, Debug)]
pub struct Run {
    /// The shapes of all parameters.
    pub shapes: Vec<Vec<usize>>,
    /// What makes weights of gradients.
    pub optimizer: OptimizerSpec,
    /// How far workers may drift apart.
    pub level: Level,
    /// What becomes of stale gradients.
    pub stale: Stale,
    /// After how many pushes the run is over; in lock-step, after how many rounds.
    pub total: u64,
    /// How many workers there are.
    pub workers: u32,
    /// Shards of the global batch. Of use in lock-step.
    pub shards: u32,
    /// What the gradient of each parameter is encoded by, if it is.
    pub codecs: Vec<Option<CodecSpec>>,
    /// The seed of the run.
    pub seed: u64,
    /// How long a worker may be silent.
    pub timeout: Duration,
}

impl Run {
    /// A run without codecs.
    pub fn new(shapes: Vec<Vec<usize>>, optimizer: OptimizerSpec, level: Level) -> Run {
        Run {
            codecs: vec![None; shapes.len()],
            shapes,
            optimizer,
            level,
            stale: Stale::Keep,
            total: u64::MAX,
            workers: 1,
            shards: 1,
            seed: 0,
            timeout: Duration::from_secs(10),
        }
    }

    /// What every shard is told.
    fn setups(&self, servers: usize) -> Vec<Setup> {
        let setup = |pieces: Vec<Piece>| Setup {
            codecs: pieces.iter().map(|piece| self.codec(piece)).collect(),
            pieces,
            optimizer: self.optimizer,
            level: self.level.to_string(),
            stale: self.stale.to_string(),
            total: self.total,
            workers: self.workers,
            shards: self.shards,
            seed: self.seed,
            timeout_ms: self.timeout.as_millis() as u64,
        };
        layout::spread(&self.shapes, servers).into_iter().map(setup).collect()
    }

    fn codec(&self, piece: &Piece) -> Option<String> {
        let codec = self.codecs.get(piece.parameter)?.as_ref()?;
        codec.build().suits(&piece.shape).then(|| codec.to_string())
    }
}

/// How bulk data travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// In common memory where worker and shard are on one host, else over TCP.
    #[default]
    Auto,
    /// Over TCP.
    Tcp,
}

/// How a worker reaches the servers.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Where they are, HOST:PORT, in order.
    pub servers: Vec<String>,
    /// The token of the job.
    pub token: Token,
    /// The number of this worker.
    pub worker: u32,
    /// Which of its lives this is: later ones have larger numbers.
    pub life: u64,
    /// How long to try to reach a server that is not there.
    pub patience: Duration,
    /// How bulk data travels.
    pub transport: Transport,
    /// Steps in which nothing is encoded.
    pub warm_up: u64,
    /// Whether what encodings leave out is sent later.
    pub error_feedback: bool,
}

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// A server could not be reached for longer than the client's patience.
    #[error("server {server} at {address} cannot be reached: {last}")]
    Unreachable {
        /// Which.
        server: usize,
        /// Where it was looked for.
        address: String,
        /// What the last attempt ran into.
        last: String,
    },
    /// Whoever listens there belongs to another job.
    #[error("whoever listens at {address} does not serve this job: {cause}")]
    Handshake {
        /// Where.
        address: String,
        /// Why.
        cause: HandshakeError,
    },
    /// It serves another run: other parameters, level or settings.
    #[error("server {server} serves a run with other settings; start it anew, or with another journal")]
    OtherRun {
        /// Which.
        server: usize,
    },
    /// It was restarted without its journal, and has forgotten the weights.
    #[error("server {server} has lost its state; start servers with a journal to survive a restart")]
    Forgotten {
        /// Which.
        server: usize,
    },
    /// A later start of this worker has taken its place.
    #[error("a later start of worker {worker} has taken its place")]
    Superseded {
        /// The worker.
        worker: u32,
    },
    /// Somebody asked for the end.
    #[error("stopped")]
    Stopped,
    /// The two do not understand each other.
    #[error("server {server} and this worker disagree: {what}")]
    Protocol {
        /// Which.
        server: usize,
        /// In what.
        what: String,
    },
}

/// What became of a push, over all shards.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pushed {
    /// Whether it is part of the weights on every shard.
    pub applied: bool,
    /// How old its weights were, on the first shard.
    pub age: Age,
    /// Whether the run is over.
    pub finished: bool,
}

/// A gradient to be pushed: vectors of one parameter. More than one only in lock-step, where they are
/// the sums of the worker's subtrees.
pub type Gradient<'a> = (usize, Vec<&'a [f32]>);

/// Takes weights: the parameter, where they begin in it, the weights.
pub type Take<'a> = dyn FnMut(usize, usize, &[f32]) + 'a;

/// A worker's connection to the servers of its run.
pub struct Client {
    options: ClientOptions,
    lockstep: bool,
    sessions: Vec<Session>,
    bound: Option<u64>,
    finished: bool,
    shared: Arc<Shared>,
    beating: Option<JoinHandle<()>>,
    scratch: Scratch,
    /// What to measure until the next push.
    since: Instant,
    held: Duration,
    blocked: Duration,
    traffic: u64,
}

/// What the threads of a client share.
struct Shared {
    /// The sockets, each locked while something is sent.
    voices: Vec<Mutex<Option<Socket>>>,
    stopped: AtomicBool,
    sleep: (Mutex<bool>, Condvar),
}

/// Ends every wait of a client, from any thread.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// Whatever the client waits for, now and later, fails with [`ServerError::Stopped`].
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        for voice in &self.0.voices {
            if let Some(socket) = &*voice.lock().expect("no panic while locked") {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

/// A worker and one shard.
struct Session {
    number: usize,
    setup: Setup,
    fingerprint: [u8; 32],
    link: Option<Link>,
    outbox: Outbox,
    clock: u64,
    /// Encodes each piece, where it is encoded.
    senders: Vec<Option<Sender>>,
    /// Steps in which nothing is encoded.
    warm_up: u64,
    /// What is under way: the parts, and the encodings among them.
    parts: Vec<Part>,
    encoded: Vec<Vec<u8>>,
    /// Bytes moved over connections that are closed.
    moved: u64,
}

/// What went wrong with a request.
enum Fault {
    /// The connection; it can be opened again.
    Lost(io::Error),
    /// The worker must join again.
    Rejoin,
    /// There is nothing to be done.
    Fatal(ServerError),
}

impl Client {
    /// Joins a run at all its servers. The first worker brings the initial weights of a parameter, which
    /// must be equal everywhere.
    pub fn join(
        run: &Run,
        options: ClientOptions,
        initial: &dyn Fn(usize) -> Vec<f32>,
    ) -> Result<Client, ServerError> {
        let setups = run.setups(options.servers.len().max(1));
        let voices = setups.iter().map(|_| Mutex::new(None)).collect();
        let shared = Arc::new(Shared {
            voices,
            stopped: AtomicBool::new(false),
            sleep: (Mutex::new(false), Condvar::new()),
        });
        let session = |(number, setup): (usize, Setup)| Session::new(number, setup, &options);
        let mut client = Client {
            sessions: setups.into_iter().enumerate().map(session).collect(),
            lockstep: run.level.is_lockstep(),
            bound: run.level.bound(),
            finished: false,
            beating: None,
            scratch: Scratch::default(),
            since: Instant::now(),
            held: Duration::ZERO,
            blocked: Duration::ZERO,
            traffic: 0,
            shared,
            options,
        };
        for session in 0..client.sessions.len() {
            client.establish(session, Some(initial))?;
        }
        client.beating = Some(client.beat(run.timeout / BEATS));
        Ok(client)
    }

    /// Steps that this worker has finished, by the shard where it is furthest.
    pub fn clock(&self) -> u64 {
        self.sessions.iter().map(|session| session.clock).max().unwrap_or(0)
    }

    /// Whether the run is over.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Whether bulk data lies in common memory on the way to every shard.
    pub fn is_shared(&self) -> bool {
        let shared = |session: &Session| session.link.as_ref().is_some_and(Link::is_shared);
        self.sessions.iter().all(shared)
    }

    /// Something that ends every wait.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.shared.clone())
    }

    /// Pulls the weights of all parameters, or of some; waits until the worker may read.
    pub fn pull(&mut self, only: Option<&[usize]>, take: &mut Take<'_>) -> Result<(), ServerError> {
        let start = Instant::now();
        for session in 0..self.sessions.len() {
            // What fails now is found out when the reply is waited for.
            let _ = self.ask(session, only);
        }
        for session in 0..self.sessions.len() {
            self.take(session, only, take)?;
        }
        self.held += start.elapsed();
        self.blocked += start.elapsed();
        Ok(())
    }

    /// Pushes gradients, and waits until the servers have said what became of them. Of `measured`,
    /// times of waiting and bytes are filled in.
    pub fn push(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> Result<Pushed, ServerError> {
        let start = Instant::now();
        self.begin(gradients, measured)?;
        let pushed = self.settle(gradients, measured)?;
        self.blocked += start.elapsed();
        Ok(pushed)
    }

    /// Pushes gradients and pulls the weights for the next step, in one round trip.
    pub fn push_pull(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
        take: &mut Take<'_>,
    ) -> Result<Pushed, ServerError> {
        let start = Instant::now();
        self.begin(gradients, measured)?;
        let mut asked = Vec::with_capacity(self.sessions.len());
        for session in 0..self.sessions.len() {
            self.sessions[session].clock += 1;
            asked.push(self.ask(session, None).is_ok());
            self.sessions[session].clock -= 1;
        }
        let mut all = Pushed { applied: true, ..Pushed::default() };
        for session in 0..self.sessions.len() {
            let (pushed, undisturbed) = self.settle_one(session, gradients, measured)?;
            // After a reconnection the question must be asked again.
            if !undisturbed || !asked[session] {
                let _ = self.ask(session, None);
            }
            all.merge(session, pushed);
        }
        self.finished |= all.finished;
        let pushed = Instant::now();
        for session in 0..self.sessions.len() {
            self.take(session, None, take)?;
        }
        self.held += pushed.elapsed();
        self.blocked += start.elapsed();
        Ok(all)
    }

    /// Leaves the run, so that nobody waits for this worker.
    pub fn leave(mut self) {
        for session in &mut self.sessions {
            if let Some(link) = &mut session.link {
                // Whoever cannot be told sees the connection end.
                let _ = link.send(&Request::Leave, &[]).and_then(|()| link.receive::<Reply>());
            }
        }
    }

    /// Sends the push to every shard.
    fn begin(&mut self, gradients: &[Gradient<'_>], measured: Measured) -> Result<(), ServerError> {
        let measured = self.complete(measured);
        for session in &mut self.sessions {
            session.encode(gradients, &mut self.scratch);
            session.outbox.begin(session.clock);
        }
        for session in 0..self.sessions.len() {
            let _ = self.send_push(session, gradients, measured);
        }
        Ok(())
    }

    fn settle(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> Result<Pushed, ServerError> {
        let mut all = Pushed { applied: true, ..Pushed::default() };
        for session in 0..self.sessions.len() {
            let (pushed, _) = self.settle_one(session, gradients, measured)?;
            all.merge(session, pushed);
        }
        self.finished |= all.finished;
        Ok(all)
    }

    /// Waits until a shard has said what became of the push, and sends it again if it was lost. Also
    /// whether nothing went wrong on the way.
    fn settle_one(
        &mut self,
        session: usize,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> Result<(Pushed, bool), ServerError> {
        let mut undisturbed = true;
        loop {
            match self.sessions[session].receive_pushed() {
                Ok((pushed, bound)) => {
                    if session == 0 {
                        self.bound = bound;
                    }
                    return Ok((pushed, undisturbed));
                }
                Err(fault) => self.recover(session, fault)?,
            }
            undisturbed = false;
            if self.sessions[session].outbox.pending().is_none() {
                // It had arrived, and only the reply was lost.
                let applied = Pushed { applied: true, finished: self.finished, ..Pushed::default() };
                return Ok((applied, false));
            }
            let _ = self.send_push(session, gradients, measured);
        }
    }

    fn send_push(
        &mut self,
        session: usize,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> io::Result<()> {
        let _voice = self.shared.voices[session].lock().expect("no panic while locked");
        self.sessions[session].send_push(gradients, measured)
    }

    fn ask(&mut self, session: usize, only: Option<&[usize]>) -> io::Result<()> {
        let _voice = self.shared.voices[session].lock().expect("no panic while locked");
        self.sessions[session].send_pull(self.bound, only)
    }

    /// Receives the weights that were asked for, and asks again if something went wrong.
    fn take(
        &mut self,
        session: usize,
        only: Option<&[usize]>,
        take: &mut Take<'_>,
    ) -> Result<(), ServerError> {
        loop {
            match self.sessions[session].receive_weights(take) {
                Ok(()) => return Ok(()),
                Err(fault) => self.recover(session, fault)?,
            }
            let _ = self.ask(session, only);
        }
    }

    fn recover(&mut self, session: usize, fault: Fault) -> Result<(), ServerError> {
        if self.shared.stopped.load(Ordering::Acquire) {
            return Err(ServerError::Stopped);
        }
        match fault {
            Fault::Fatal(error) => return Err(error),
            Fault::Lost(error) => {
                log::info!("server {session}: {error}; trying again");
                self.sessions[session].close();
            }
            Fault::Rejoin => {}
        }
        self.establish(session, None)
    }

    /// Joins a shard, over a new connection if there is none.
    fn establish(
        &mut self,
        session: usize,
        initial: Option<&dyn Fn(usize) -> Vec<f32>>,
    ) -> Result<(), ServerError> {
        let deadline = Instant::now() + self.options.patience;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.try_to_establish(session, initial, deadline) {
                Ok(finished) => {
                    self.finished |= finished;
                    return Ok(());
                }
                Err(Fault::Fatal(error)) => return Err(error),
                Err(Fault::Rejoin) => {}
                Err(Fault::Lost(error)) => {
                    self.sessions[session].close();
                    if self.shared.stopped.load(Ordering::Acquire) {
                        return Err(ServerError::Stopped);
                    }
                    if Instant::now() + pause >= deadline {
                        let address = self.options.servers[session].clone();
                        let last = error.to_string();
                        return Err(ServerError::Unreachable { server: session, address, last });
                    }
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn try_to_establish(
        &mut self,
        session: usize,
        initial: Option<&dyn Fn(usize) -> Vec<f32>>,
        deadline: Instant,
    ) -> Result<bool, Fault> {
        if self.sessions[session].link.is_none() {
            let of = &self.sessions[session];
            let bytes = of.most_bulk(self.lockstep);
            let link = dial(&self.options, session, self.options.worker, bytes, deadline)?;
            let voice = link.socket().try_clone().map_err(Fault::Lost)?;
            *self.shared.voices[session].lock().expect("no panic while locked") = Some(voice);
            self.sessions[session].link = Some(link);
        }
        let _voice = self.shared.voices[session].lock().expect("no panic while locked");
        self.sessions[session].join(initial)
    }

    /// Says to all shards that this worker lives, from a thread of its own.
    fn beat(&self, pause: Duration) -> JoinHandle<()> {
        let shared = self.shared.clone();
        let beat = move || {
            let mut text = Vec::new();
            wire::write(&Request::Beat, &mut text);
            let (over, wake) = &shared.sleep;
            let mut over = over.lock().expect("no panic while locked");
            while !*over {
                over = wake.wait_timeout(over, pause).expect("no panic while locked").0;
                for voice in &shared.voices {
                    // A lost connection is the worker's own affair. One that is sent on is heard anyway.
                    if let Ok(socket) = voice.try_lock()
                        && let Some(socket) = &*socket
                    {
                        let _ = socket.send(&text);
                    }
                }
            }
        };
        std::thread::Builder::new().name("unisono-beat".into()).spawn(beat).expect("a thread")
    }

    /// Fills in what the client knows of a step.
    fn complete(&mut self, measured: Measured) -> Measured {
        let traffic: u64 = self.sessions.iter().map(Session::traffic).sum();
        let completed = Measured {
            held: self.held.as_secs_f64(),
            blocked: self.blocked.as_secs_f64(),
            wall: self.since.elapsed().as_secs_f64(),
            bytes: traffic - self.traffic,
            ..measured
        };
        self.traffic = traffic;
        self.since = Instant::now();
        (self.held, self.blocked) = (Duration::ZERO, Duration::ZERO);
        completed
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        *self.shared.sleep.0.lock().expect("no panic while locked") = true;
        self.shared.sleep.1.notify_all();
        if let Some(beating) = self.beating.take() {
            let _ = beating.join();
        }
    }
}

impl Pushed {
    fn merge(&mut self, session: usize, other: Pushed) {
        self.applied &= other.applied;
        self.finished |= other.finished;
        if session == 0 {
            self.age = other.age;
        }
    }
}

impl Session {
    fn new(number: usize, setup: Setup, options: &ClientOptions) -> Session {
        let sender = |(piece, codec): (usize, &Option<String>)| {
            let codec: CodecSpec = codec.as_ref()?.parse().expect("the text of a codec");
            let origin = Origin {
                shape: setup.pieces[piece].shape.clone(),
                parameter: piece,
                seed: setup.seed,
                worker: options.worker as usize,
                mean_of: 1,
            };
            Some(Sender::new(codec.build(), origin, options.error_feedback))
        };
        Session {
            number,
            fingerprint: setup.fingerprint(),
            senders: setup.codecs.iter().enumerate().map(sender).collect(),
            warm_up: options.warm_up,
            link: None,
            outbox: Outbox::new(options.worker, options.life),
            clock: 0,
            parts: Vec::new(),
            encoded: Vec::new(),
            moved: 0,
            setup,
        }
    }

    /// The most bulk data that travels at once.
    fn most_bulk(&self, lockstep: bool) -> usize {
        let vectors = if lockstep {
            let (shards, workers) = (self.setup.shards as usize, self.setup.workers as usize);
            let shards = Shards::new(shards, workers).ok();
            let subtrees = shards.map(|shards| shards.subtrees(workers));
            subtrees.and_then(|all| all.iter().map(Vec::len).max()).unwrap_or(1)
        } else {
            1
        };
        let piece = |piece: &Piece| (piece.len() * 4 + 128).next_multiple_of(8) * vectors;
        self.setup.pieces.iter().map(piece).sum()
    }

    /// Joins, and sets the shard up if it knows of no run and the weights are there. Whether the run is
    /// over.
    fn join(&mut self, initial: Option<&dyn Fn(usize) -> Vec<f32>>) -> Result<bool, Fault> {
        let run = self.fingerprint;
        loop {
            match self.call(&Request::Join { run }, &[])? {
                Reply::Joined { joined, bound: _, finished } => {
                    self.clock = self.clock.max(joined.clock);
                    self.outbox.rejoin(joined);
                    self.expect_done(&Request::Enter { clock: self.clock })?;
                    return Ok(finished);
                }
                Reply::Unknown => {
                    let number = self.number;
                    let forgotten = || Fault::Fatal(ServerError::Forgotten { server: number });
                    self.set_up(initial.ok_or_else(forgotten)?)?;
                }
                other => return Err(self.unexpected(other)),
            }
        }
    }

    fn set_up(&mut self, initial: &dyn Fn(usize) -> Vec<f32>) -> Result<(), Fault> {
        let mut weights: Vec<(usize, Vec<f32>)> = Vec::new();
        for piece in &self.setup.pieces {
            if weights.last().is_none_or(|(parameter, _)| *parameter != piece.parameter) {
                weights.push((piece.parameter, initial(piece.parameter)));
            }
        }
        let of = |parameter: usize| {
            let found = weights.iter().find(|(other, _)| *other == parameter);
            &found.expect("fetched above").1
        };
        let parts = self.setup.pieces.iter();
        let parts: Vec<&[u8]> =
            parts.map(|piece| bytes(&of(piece.parameter)[piece.span()])).collect();
        let request = Request::SetUp(Box::new(self.setup.clone()));
        match self.call(&request, &parts)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Encodes what is encoded. What is sent again later is the same.
    fn encode(&mut self, gradients: &[Gradient<'_>], scratch: &mut Scratch) {
        self.parts.clear();
        self.encoded.clear();
        for (number, piece) in self.setup.pieces.iter().enumerate() {
            let Some((_, vectors)) = gradients.iter().find(|(p, _)| *p == piece.parameter) else {
                continue;
            };
            let mut encoded = Vec::new();
            let mut part = Part {
                piece: number as u32,
                vectors: vectors.len() as u32,
                bytes: (4 * piece.len() * vectors.len()) as u64,
                encoded: false,
            };
            let encodes = self.clock >= self.warm_up;
            if let (Some(sender), [gradient], true) =
                (&mut self.senders[number], &vectors[..], encodes)
            {
                sender.encode(self.clock, &gradient[piece.span()], scratch, &mut encoded);
                part.bytes = encoded.len() as u64;
                part.encoded = true;
            }
            self.parts.push(part);
            self.encoded.push(encoded);
        }
    }

    fn send_push(&mut self, gradients: &[Gradient<'_>], measured: Measured) -> io::Result<()> {
        let Session { setup, parts, encoded, link, outbox, .. } = self;
        let push = outbox.pending().expect("a push is under way");
        let vectors = |part: &Part| {
            let piece = &setup.pieces[part.piece as usize];
            let of = gradients.iter().find(|(parameter, _)| *parameter == piece.parameter);
            let vectors = &of.expect("a part of a gradient").1;
            vectors.iter().map(|vector| &vector[piece.span()])
        };
        // Several vectors of a piece travel as one part.
        let joined: Vec<Vec<f32>> = parts
            .iter()
            .map(|part| match part.vectors {
                1 => Vec::new(),
                _ => vectors(part).flatten().copied().collect(),
            })
            .collect();
        let mut slices: Vec<&[u8]> = Vec::with_capacity(parts.len());
        for ((part, encoded), joined) in parts.iter().zip(&*encoded).zip(&joined) {
            slices.push(match (part.encoded, part.vectors) {
                (true, _) => encoded,
                (false, 1) => bytes(vectors(part).next().expect("there is one")),
                (false, _) => bytes(joined),
            });
        }
        let request = Request::Push { push, measured, parts: parts.clone() };
        link.as_mut().ok_or_else(not_connected)?.send(&request, &slices)
    }

    fn send_pull(&mut self, bound: Option<u64>, only: Option<&[usize]>) -> io::Result<()> {
        let pieces = only.map(|only| {
            let wanted = self.setup.pieces.iter().enumerate();
            let wanted = wanted.filter(|(_, piece)| only.contains(&piece.parameter));
            wanted.map(|(number, _)| number as u32).collect()
        });
        let request = Request::Pull { clock: self.clock, bound, pieces };
        self.link()?.send(&request, &[])
    }

    fn receive_pushed(&mut self) -> Result<(Pushed, Option<u64>), Fault> {
        match self.receive()? {
            Reply::Pushed { applied, age, clock, bound, finished } => {
                self.clock = self.clock.max(clock);
                self.outbox.settle();
                Ok((Pushed { applied, age, finished }, bound))
            }
            other => Err(self.unexpected(other)),
        }
    }

    fn receive_weights(&mut self, take: &mut Take<'_>) -> Result<(), Fault> {
        let versions = match self.receive()? {
            Reply::Weights { versions } => versions,
            Reply::Refused(Refusal::OtherClock { clock }) => {
                self.clock = clock;
                return Err(Fault::Rejoin);
            }
            other => return Err(self.unexpected(other)),
        };
        let pieces = &self.setup.pieces;
        let known = |(number, _): &(u32, u64)| pieces.get(*number as usize).ok_or(*number);
        let read: Result<Vec<&Piece>, u32> = versions.iter().map(known).collect();
        let server = self.number;
        let read = read.map_err(|number| {
            let what = format!("there is no piece {number}");
            Fault::Fatal(ServerError::Protocol { server, what })
        })?;
        let link = self.link.as_mut().ok_or_else(|| Fault::Lost(not_connected()))?;
        let parts = link.bulk(read.iter().map(|piece| 4 * piece.len())).map_err(Fault::Lost)?;
        for (piece, part) in read.iter().zip(parts) {
            take(piece.parameter, piece.start, numbers(part).map_err(Fault::Lost)?);
        }
        Ok(())
    }

    fn call(&mut self, request: &Request, parts: &[&[u8]]) -> Result<Reply, Fault> {
        self.link().and_then(|link| link.send(request, parts)).map_err(Fault::Lost)?;
        self.receive()
    }

    fn expect_done(&mut self, request: &Request) -> Result<(), Fault> {
        match self.call(request, &[])? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    fn receive(&mut self) -> Result<Reply, Fault> {
        let reply = self.link().and_then(Link::receive).map_err(Fault::Lost)?;
        reply.ok_or_else(|| Fault::Lost(io::ErrorKind::UnexpectedEof.into()))
    }

    /// What a reply means that was not hoped for.
    fn unexpected(&self, reply: Reply) -> Fault {
        let server = self.number;
        Fault::Fatal(match reply {
            Reply::Refused(Refusal::NotPresent) => return Fault::Rejoin,
            Reply::Refused(Refusal::Superseded) => {
                let worker = self.outbox.worker();
                ServerError::Superseded { worker }
            }
            Reply::Refused(refusal) => ServerError::Protocol { server, what: refusal.to_string() },
            Reply::OtherRun => ServerError::OtherRun { server },
            Reply::Unknown => ServerError::Forgotten { server },
            Reply::Invalid(what) => ServerError::Protocol { server, what },
            _ => ServerError::Protocol { server, what: "a reply to another question".into() },
        })
    }

    fn link(&mut self) -> io::Result<&mut Link> {
        self.link.as_mut().ok_or_else(not_connected)
    }

    fn close(&mut self) {
        self.moved = self.traffic();
        self.link = None;
    }

    fn traffic(&self) -> u64 {
        self.moved + self.link.as_ref().map_or(0, Link::traffic)
    }
}

/// The weights of all parameters as they are on the servers, for somebody who takes no part.
pub fn look(run: &Run, options: &ClientOptions) -> Result<Vec<Vec<f32>>, ServerError> {
    let mut weights: Vec<Vec<f32>> =
        run.shapes.iter().map(|shape| vec![0.0; shape.iter().product()]).collect();
    for (server, setup) in run.setups(options.servers.len().max(1)).into_iter().enumerate() {
        let mut session = Session::new(server, setup, options);
        visit(options, &mut session, |session| {
            session.link().and_then(|link| link.send(&Request::Look, &[])).map_err(Fault::Lost)?;
            session.receive_weights(&mut |parameter, start, values| {
                weights[parameter][start..start + values.len()].copy_from_slice(values);
            })
        })?;
    }
    Ok(weights)
}

/// How things are at every server.
pub fn reports(run: &Run, options: &ClientOptions) -> Result<Vec<Report>, ServerError> {
    let mut reports = Vec::new();
    for (server, setup) in run.setups(options.servers.len().max(1)).into_iter().enumerate() {
        let mut session = Session::new(server, setup, options);
        visit(options, &mut session, |session| match session.call(&Request::Report, &[])? {
            Reply::Report(report) => {
                reports.push(report);
                Ok(())
            }
            other => Err(session.unexpected(other)),
        })?;
    }
    Ok(reports)
}

/// Asks one server something, over a connection of its own, until it answers.
fn visit(
    options: &ClientOptions,
    session: &mut Session,
    mut ask: impl FnMut(&mut Session) -> Result<(), Fault>,
) -> Result<(), ServerError> {
    let deadline = Instant::now() + options.patience;
    let number = session.number;
    loop {
        let bytes = session.most_bulk(false);
        let asked = dial(options, number, NOBODY, bytes, deadline).and_then(|link| {
            session.link = Some(link);
            ask(session)
        });
        let last = match asked {
            Ok(()) => return Ok(()),
            Err(Fault::Fatal(error)) => return Err(error),
            Err(Fault::Lost(error)) => error.to_string(),
            Err(Fault::Rejoin) => "it takes nobody for somebody".to_owned(),
        };
        if Instant::now() + LONGEST_PAUSE >= deadline {
            let address = options.servers[number].clone();
            return Err(ServerError::Unreachable { server: number, address, last });
        }
        std::thread::sleep(LONGEST_PAUSE);
    }
}

/// Opens a connection to a server.
fn dial(
    options: &ClientOptions,
    server: usize,
    worker: u32,
    most_bulk: usize,
    deadline: Instant,
) -> Result<Link, Fault> {
    let text = options.servers.get(server).cloned().unwrap_or_default();
    let unknown = || io::Error::new(io::ErrorKind::NotFound, "no such address");
    let address = text.to_socket_addrs().and_then(|mut all| all.next().ok_or_else(unknown));
    let address = address.map_err(Fault::Lost)?;
    let introduction = Introduction {
        purpose: Purpose::Server,
        epoch: options.life,
        group: 0,
        from: worker,
        to: server as u32,
        channel: 0,
    };
    let prove = |socket: &Socket| {
        let deadline = deadline.min(Instant::now() + Duration::from_secs(5));
        initiate(socket, &options.token, &introduction, deadline).map_err(|cause| match cause {
            // Whoever was killed in the middle may be back soon.
            HandshakeError::Truncated | HandshakeError::TimedOut | HandshakeError::Io(_) => {
                Fault::Lost(io::Error::other(cause.to_string()))
            }
            cause => Fault::Fatal(ServerError::Handshake { address: text.clone(), cause }),
        })
    };
    if options.transport == Transport::Auto
        && is_here(&address)
        && let Ok(socket) = connect_unix(&address)
    {
        prove(&socket)?;
        return Link::offer(socket, most_bulk).map_err(Fault::Lost);
    }
    let socket = connect_tcp(&address, deadline).map_err(Fault::Lost)?;
    prove(&socket)?;
    Ok(Link::over(socket))
}

fn connect_tcp(address: &SocketAddr, deadline: Instant) -> io::Result<Socket> {
    const LEAST: Duration = Duration::from_millis(100);
    let left = deadline.saturating_duration_since(Instant::now()).max(LEAST);
    let socket = Socket::new(Domain::for_address(*address), Type::STREAM, None)?;
    socket.connect_timeout(&(*address).into(), left)?;
    socket.set_tcp_nodelay(true)?;
    // A server whose machine is gone never says so.
    let probe = TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(2))
        .with_retries(3);
    socket.set_tcp_keepalive(&probe)?;
    Ok(socket)
}

fn connect_unix(address: &SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.connect(&unix_address(&(*address).into())?)?;
    Ok(socket)
}

/// Whether an address is one of this host.
fn is_here(address: &SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

fn not_connected() -> io::Error {
    io::ErrorKind::NotConnected.into()
}
