//! A server shard: accepts workers, and gives each a thread.
//!
//! What is said on a connection is handled by the thread of that connection, one request after the
//! other; the [job](super::job) orders what happens. A worker is gone when its connection ends. One that
//! falls silent is taken for gone by a thread that looks at the clock.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};
use unisono_collective::acceptor::Acceptor;
use unisono_collective::handshake::{Introduction, Purpose, Token};

use super::job::{Caller, Files, Job, JobError, MOST_WORKERS, Unserved, total_bytes};
use super::journal::Journal;
use super::link::{Link, bytes, numbers};
use super::lives::Lives;
use super::store::Weights;
use super::wire::{Part, Reply, Request, Setup};

/// How a shard is served.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// The token of the job.
    pub token: Token,
    /// Where it writes.
    pub files: Files,
}

/// A server shard, until it is dropped.
pub struct Shard {
    shared: Arc<Shared>,
    acceptor: Option<Acceptor>,
    ticker: Option<JoinHandle<()>>,
}

struct Shared {
    options: ShardOptions,
    job: OnceLock<Job>,
    /// Held while a run is set up; what waits for one.
    setting_up: Mutex<Waiting>,
    connections: Mutex<Vec<Connection>>,
    /// Connections so far.
    accepted: AtomicU64,
    stop: AtomicBool,
    /// Why the shard cannot go on.
    failure: Mutex<Option<JobError>>,
    woken: Condvar,
}

/// What a shard has before it knows of a run.
#[derive(Default)]
struct Waiting {
    journal: Option<Journal>,
    lives: Lives,
}

/// A connection and its thread, to end them.
struct Connection {
    caller: Caller,
    socket: Socket,
    thread: JoinHandle<()>,
}

/// How often silent workers are looked for, in a timeout.
const LOOKS: u32 = 4;

impl Shard {
    /// Serves whoever proves the token on a listening TCP socket, and on a Unix socket that processes
    /// of this host find by the same address. Goes on with what the journal holds, if it holds
    /// anything.
    pub fn start(listener: Socket, options: ShardOptions) -> Result<Shard, ShardError> {
        let (job, journal) = Job::recover(&options.files)?;
        if let Some(Ok(report)) = job.as_ref().map(Job::report) {
            log::info!("goes on after {} updates", report.updates);
        }
        let address = listener.local_addr()?;
        let mut listeners = vec![listener];
        match unix_listener(&address) {
            Ok(unix) => listeners.push(unix),
            Err(error) => log::warn!("no shared memory, for want of a Unix socket: {error}"),
        }
        let shared = Arc::new(Shared {
            job: job.map_or_else(OnceLock::new, OnceLock::from),
            setting_up: Mutex::new(Waiting { journal, ..Waiting::default() }),
            connections: Mutex::new(Vec::new()),
            accepted: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            woken: Condvar::new(),
            options: options.clone(),
        });
        let serving = shared.clone();
        let on_connection =
            move |socket, introduction| Shared::welcome(&serving, socket, introduction);
        let acceptor = Acceptor::start(listeners, options.token, on_connection)?;
        let ticking = shared.clone();
        let ticker = std::thread::Builder::new()
            .name("unisono-ticker".into())
            .spawn(move || ticking.tick())?;
        Ok(Shard { shared, acceptor: Some(acceptor), ticker: Some(ticker) })
    }

    /// Waits until `stop` says so, or the shard cannot go on.
    pub fn serve_until(&self, stop: impl Fn() -> bool) -> Result<(), JobError> {
        const PAUSE: Duration = Duration::from_millis(20);
        let mut failure = self.shared.failure.lock().expect("no panic while locked");
        loop {
            if let Some(error) = failure.take() {
                return Err(error);
            }
            if stop() {
                return Ok(());
            }
            failure = self.shared.woken.wait_timeout(failure, PAUSE).expect("no panic").0;
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        // Nobody comes in any more, so that all who are in can be sent away.
        drop(self.acceptor.take());
        self.shared.stop.store(true, Ordering::Release);
        // Whoever is about to wait has seen the stop, or holds the lock and is woken.
        drop(self.shared.failure.lock());
        self.shared.woken.notify_all();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
        let connections = std::mem::take(&mut *self.shared.connections());
        for connection in &connections {
            let _ = connection.socket.shutdown(std::net::Shutdown::Both);
        }
        for connection in connections {
            let _ = connection.thread.join();
        }
    }
}

/// Why a shard cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// What it should go on with.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The system.
    #[error("cannot listen: {0}")]
    Io(#[from] io::Error),
}

/// What becomes of a request.
enum Served {
    /// This is the reply.
    Reply(Reply),
    /// The reply is sent, or none is wanted.
    Done,
    /// This is the reply, and the connection ends with it: nobody knows where the request does.
    Last(Reply),
}

impl Shared {
    fn welcome(shared: &Arc<Shared>, socket: Socket, introduction: Introduction) {
        if introduction.purpose != Purpose::Server {
            log::warn!("refused a connection that is not meant for a server");
            return;
        }
        let is_meant = introduction.to as usize == shared.options.files.number;
        let handle = match socket.try_clone() {
            Ok(handle) => handle,
            Err(error) => return log::warn!("a connection was lost: {error}"),
        };
        let caller = Caller {
            worker: introduction.from,
            life: introduction.epoch,
            connection: shared.accepted.fetch_add(1, Ordering::Relaxed),
        };
        let serving = shared.clone();
        let serve = move || {
            let served = match is_meant {
                true => serving.serve(&socket, caller),
                false => serving.turn_away(&socket, introduction.to),
            };
            if let Err(error) = served {
                log::debug!("worker {}: {error}", caller.worker);
            }
            serving.leave(caller);
            // Another handle of the socket is kept, to end it from elsewhere.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        };
        let thread = std::thread::Builder::new().name("unisono-worker".into()).spawn(serve);
        let mut connections = shared.connections();
        connections.retain(|connection| !connection.thread.is_finished());
        match thread {
            Ok(thread) => connections.push(Connection { caller, socket: handle, thread }),
            Err(error) => log::error!("no thread for a worker: {error}"),
        }
    }

    /// Says to somebody who takes this server for another which one it is.
    fn turn_away(&self, socket: &Socket, meant: u32) -> io::Result<()> {
        log::warn!("somebody takes this server for server {meant}");
        let mut link = link(socket)?;
        let number = self.options.files.number as u32;
        match link.receive::<Request>()? {
            Some(_) => link.send(&Reply::OtherServer { number }, &[]),
            None => Ok(()),
        }
    }

    /// Serves one connection until it ends.
    fn serve(&self, socket: &Socket, caller: Caller) -> io::Result<()> {
        let mut link = link(socket)?;
        while let Some(request) = link.receive::<Request>()? {
            if self.stop.load(Ordering::Acquire) {
                return Ok(());
            }
            let served = match self.handle(&mut link, caller, request)? {
                Ok(served) => served,
                Err(Unserved::Refused(refusal)) => Served::Reply(Reply::Refused(refusal)),
                Err(Unserved::Invalid(what)) => Served::Reply(Reply::Invalid(what)),
                Err(Unserved::Gone) => return Ok(()),
                Err(Unserved::Failed(error)) => {
                    self.fail(error);
                    return Ok(());
                }
            };
            match served {
                Served::Reply(reply) => link.send(&reply, &[])?,
                Served::Done => {}
                Served::Last(reply) => return link.send(&reply, &[]),
            }
        }
        Ok(())
    }

    fn handle(
        &self,
        link: &mut Link,
        caller: Caller,
        request: Request,
    ) -> io::Result<Result<Served, Unserved>> {
        let Some(job) = self.job.get() else {
            return Ok(match request {
                Request::SetUp(setup) => self.set_up(link, *setup)?,
                Request::Beat => Ok(Served::Done),
                Request::Leave => Ok(Served::Last(Reply::Done)),
                Request::Life { worker } => self.first_life(worker),
                // Its gradients follow, and there is nothing to tell how many.
                Request::Push { .. } => Ok(Served::Last(Reply::Unknown)),
                _ => Ok(Served::Reply(Reply::Unknown)),
            });
        };
        Ok(match request {
            Request::SetUp(setup) => self.set_up(link, *setup)?,
            Request::Join { run } if run != *job.fingerprint() => {
                Ok(Served::Reply(Reply::OtherRun))
            }
            Request::Join { .. } => job.join(caller).map(|reply| {
                self.end_older(caller);
                Served::Reply(reply)
            }),
            Request::Enter { clock } => job.enter(caller, clock).map(Served::Reply),
            Request::Push { push, measured, parts } => {
                let lengths = match job.lengths(caller.worker, &parts) {
                    Ok(lengths) => lengths,
                    Err(what) => return Ok(Ok(Served::Last(Reply::Invalid(what)))),
                };
                let socket = link.socket().try_clone()?;
                let bulk = link.bulk(lengths.into_iter())?;
                let parts: Vec<(Part, &[u8])> = parts.into_iter().zip(bulk).collect();
                let is_over = || super::link::is_over(&socket);
                job.push(caller, push, measured, &parts, is_over).map(Served::Reply)
            }
            Request::Pull { clock, bound, pieces } => {
                let is_over = || link.is_over();
                match job.pull(caller, clock, bound, pieces.as_deref(), is_over) {
                    Ok(weights) => Ok(send_weights(link, &weights)?),
                    Err(unserved) => Err(unserved),
                }
            }
            Request::Beat => {
                job.hear(caller);
                Ok(Served::Done)
            }
            Request::Leave => job.leave(caller).map(|()| Served::Last(Reply::Done)),
            Request::Look { run } if run != *job.fingerprint() => {
                Ok(Served::Reply(Reply::OtherRun))
            }
            Request::Look { .. } => match job.look() {
                Ok(weights) => Ok(send_weights(link, &weights)?),
                Err(unserved) => Err(unserved),
            },
            Request::Life { worker } => {
                job.next_life(worker).map(|life| Served::Reply(Reply::Life { life }))
            }
            Request::Report => job.report().map(|report| Served::Reply(Reply::Report(report))),
        })
    }

    /// Numbers a life of a worker before there is a run.
    fn first_life(&self, worker: u32) -> Result<Served, Unserved> {
        if worker >= MOST_WORKERS {
            return Err(Unserved::Invalid(format!("worker {worker}")));
        }
        let mut waiting = self.setting_up.lock().expect("no panic while locked");
        let life = match self.job.get() {
            Some(job) => job.next_life(worker)?,
            None => waiting.lives.next(worker, 0),
        };
        Ok(Served::Reply(Reply::Life { life }))
    }

    /// Sets the shard up, unless somebody has. The weights follow in any case.
    fn set_up(&self, link: &mut Link, setup: Setup) -> io::Result<Result<Served, Unserved>> {
        if total_bytes(&setup.pieces).is_none() {
            return Ok(Ok(Served::Last(Reply::Invalid("pieces that are too large".into()))));
        }
        let checked = Job::check(&setup);
        let fingerprint = setup.fingerprint();
        let bulk = link.bulk(setup.pieces.iter().map(|piece| 4 * piece.len()))?;
        if let Err(error) = checked {
            return Ok(Err(Unserved::Invalid(error.to_string())));
        }
        let mut waiting = self.setting_up.lock().expect("no panic while locked");
        if let Some(job) = self.job.get() {
            let same = *job.fingerprint() == fingerprint;
            return Ok(Ok(Served::Reply(if same { Reply::Done } else { Reply::OtherRun })));
        }
        let weights = bulk.into_iter().map(|part| Ok(numbers(part)?.to_vec()));
        let weights = weights.collect::<io::Result<Vec<Vec<f32>>>>()?;
        let Waiting { journal, lives } = std::mem::take(&mut *waiting);
        Ok(match Job::new(setup, weights, lives, &self.options.files, journal) {
            Ok(job) => {
                let fresh = self.job.set(job).is_ok();
                debug_assert!(fresh, "set under the lock");
                Ok(Served::Reply(Reply::Done))
            }
            Err(error) => Err(Unserved::Failed(error)),
        })
    }

    /// Ends the older connections of a worker: it has given them up, though the network may not say so.
    fn end_older(&self, caller: Caller) {
        for older in &*self.connections() {
            let Caller { worker, connection, .. } = older.caller;
            if worker == caller.worker && connection < caller.connection {
                let _ = older.socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn leave(&self, caller: Caller) {
        if let Some(job) = self.job.get()
            && let Err(Unserved::Failed(error)) = job.leave(caller)
        {
            self.fail(error);
        }
    }

    fn tick(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.job.get().map_or(1000, |job| job.setup().timeout_ms);
            let pause = Duration::from_millis(timeout.clamp(40, 60_000)) / LOOKS;
            let guard = self.failure.lock().expect("no panic while locked");
            let goes_on = |_: &mut Option<JobError>| !self.stop.load(Ordering::Acquire);
            let start = Instant::now();
            drop(self.woken.wait_timeout_while(guard, pause, goes_on).expect("no panic"));
            if start.elapsed() > 2 * pause {
                // This process was stopped, or had no turn: nobody could be heard meanwhile.
                continue;
            }
            if let Some(job) = self.job.get()
                && let Err(Unserved::Failed(error)) = job.expire()
            {
                self.fail(error);
            }
        }
    }

    fn fail(&self, error: JobError) {
        log::error!("this server cannot go on: {error}");
        self.failure.lock().expect("no panic while locked").get_or_insert(error);
        self.woken.notify_all();
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections.lock().expect("no panic while locked")
    }
}

fn link(socket: &Socket) -> io::Result<Link> {
    let socket = socket.try_clone()?;
    match socket.domain()? == Domain::UNIX {
        true => Link::accept(socket),
        false => Ok(Link::over(socket)),
    }
}

fn send_weights(link: &mut Link, weights: &[(u32, u64, Weights)]) -> io::Result<Served> {
    let versions = weights.iter().map(|(piece, version, _)| (*piece, *version)).collect();
    let blocks = weights.iter().flat_map(|(_, _, weights)| weights.blocks());
    let parts: Vec<&[u8]> = blocks.map(bytes).collect();
    link.send(&Reply::Weights { versions }, &parts)?;
    Ok(Served::Done)
}

/// The name by which processes of this host find the shard that listens at an address.
pub(super) fn unix_address(address: &SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(Path::new(&format!("\0unisono-server-{address}")))
}

fn unix_listener(address: &SockAddr) -> io::Result<Socket> {
    let unknown = || io::Error::new(io::ErrorKind::Unsupported, "not an address of IP");
    let unix = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    unix.bind(&unix_address(&address.as_socket().ok_or_else(unknown)?)?)?;
    unix.listen(128)?;
    Ok(unix)
}
