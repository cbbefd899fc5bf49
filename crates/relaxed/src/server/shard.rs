//! A server shard: accepts workers, and gives each a thread.
//!
//! What is said on a connection is handled by the thread of that connection, one request after the
//! other; the [job](super::job) orders what happens. A worker is gone when its connection ends. One that
//! falls silent is taken for gone by a thread that looks at the clock.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use unisono_collective::acceptor::Acceptor;
use unisono_collective::handshake::{Introduction, Purpose, Token};

use super::job::{Files, Job, JobError, Unserved};
use super::journal::Journal;
use super::link::{Link, MOST_BULK, bytes, numbers};
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
    _acceptor: Acceptor,
    ticker: Option<JoinHandle<()>>,
}

struct Shared {
    options: ShardOptions,
    job: OnceLock<Job>,
    /// Held while a run is set up; the journal that waits for one.
    setting_up: Mutex<Option<Journal>>,
    /// Every connection, to end it.
    connections: Mutex<Vec<(Arc<Socket>, JoinHandle<()>)>>,
    /// Connections so far.
    accepted: AtomicU64,
    stop: AtomicBool,
    /// Why the shard cannot go on.
    failure: Mutex<Option<JobError>>,
    woken: Condvar,
}

/// How often silent workers are looked for, in a timeout.
const LOOKS: u32 = 4;

impl Shard {
    /// Serves whoever proves the token on a listening TCP socket, and on a Unix socket that processes
    /// of this host find by the same address. Goes on with what the journal holds, if it holds
    /// anything.
    pub fn start(listener: Socket, options: ShardOptions) -> Result<Shard, ShardError> {
        let (job, journal) = Job::recover(&options.files)?;
        if let Some(job) = &job {
            let report = job.report();
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
            setting_up: Mutex::new(journal),
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
        Ok(Shard { shared, _acceptor: acceptor, ticker: Some(ticker) })
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
        self.shared.stop.store(true, Ordering::Release);
        self.shared.woken.notify_all();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
        let connections = &self.shared.connections;
        let connections = std::mem::take(&mut *connections.lock().expect("no panic while locked"));
        for (socket, thread) in connections {
            let _ = socket.shutdown(std::net::Shutdown::Both);
            let _ = thread.join();
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

impl Shared {
    fn welcome(shared: &Arc<Shared>, socket: Socket, introduction: Introduction) {
        if introduction.purpose != Purpose::Server
            || introduction.to as usize != shared.options.files.number
        {
            log::warn!("refused a connection meant for server {}", introduction.to);
            return;
        }
        let handle = match socket.try_clone() {
            Ok(handle) => Arc::new(handle),
            Err(error) => return log::warn!("a connection was lost: {error}"),
        };
        let serving = shared.clone();
        let connection = shared.accepted.fetch_add(1, Ordering::Relaxed);
        let worker = Worker { number: introduction.from, life: introduction.epoch, connection };
        let serve = move || {
            if let Err(error) = serving.serve(socket, worker) {
                log::debug!("worker {}: {error}", worker.number);
            }
            if let Some(job) = serving.job.get()
                && let Err(Unserved::Failed(error)) = job.leave(worker.number, worker.life, worker.connection)
            {
                serving.fail(error);
            }
        };
        let thread = std::thread::Builder::new().name("unisono-worker".into()).spawn(serve);
        let mut connections = shared.connections.lock().expect("no panic while locked");
        connections.retain(|(_, thread)| !thread.is_finished());
        match thread {
            Ok(thread) => connections.push((handle, thread)),
            Err(error) => log::error!("no thread for a worker: {error}"),
        }
    }

    /// Serves one connection until it ends.
    fn serve(&self, socket: Socket, worker: Worker) -> io::Result<()> {
        let mut link = match socket.domain()? == Domain::UNIX {
            true => Link::accept(socket)?,
            false => Link::over(socket),
        };
        while let Some(request) = link.receive::<Request>()? {
            if self.stop.load(Ordering::Acquire) {
                return Ok(());
            }
            let reply = match request {
                Request::Beat => {
                    if let Some(job) = self.job.get() {
                        job.hear(worker.number, worker.life);
                    }
                    continue;
                }
                Request::SetUp(setup) => self.set_up(&mut link, *setup)?,
                Request::Leave => {
                    link.send(&Reply::Done, &[])?;
                    return Ok(());
                }
                request => match self.job.get() {
                    None => Ok(Reply::Unknown),
                    Some(job) => match Self::handle(job, &mut link, worker, request)? {
                        Some(reply) => reply,
                        None => continue,
                    },
                },
            };
            let reply = match reply {
                Ok(reply) => reply,
                Err(Unserved::Refused(refusal)) => Reply::Refused(refusal),
                Err(Unserved::Invalid(what)) => Reply::Invalid(what),
                Err(Unserved::Gone) => return Ok(()),
                Err(Unserved::Failed(error)) => {
                    self.fail(error);
                    return Ok(());
                }
            };
            link.send(&reply, &[])?;
        }
        Ok(())
    }

    /// Handles a request that needs a run. `None` if the reply is sent already.
    fn handle(
        job: &Job,
        link: &mut Link,
        worker: Worker,
        request: Request,
    ) -> io::Result<Option<Result<Reply, Unserved>>> {
        let Worker { number, life, connection } = worker;
        Ok(Some(match request {
            Request::Join { run } if run != *job.fingerprint() => Ok(Reply::OtherRun),
            Request::Join { .. } => job.join(number, life, connection),
            Request::Enter { clock } => job.enter(number, life, clock),
            Request::Push { push, measured, parts } => {
                if (push.worker, push.life) != (number, life) {
                    return Err(super::wire::invalid("a push in somebody else's name".into()));
                }
                // Of a message that is wrong, nobody knows where it ends.
                let known = |part: &Part| {
                    job.expected_bytes(part).map(|bytes| bytes as usize).map_err(super::wire::invalid)
                };
                let lengths = parts.iter().map(known).collect::<io::Result<Vec<usize>>>()?;
                let gone = Gone::of(link)?;
                let bulk = link.bulk(lengths.into_iter())?;
                let parts: Vec<(Part, &[u8])> = parts.into_iter().zip(bulk).collect();
                job.push(push, measured, &parts, || gone.is_over())
            }
            Request::Pull { clock, bound, pieces } => {
                let over = || link.is_over();
                match job.pull((number, life), clock, bound, pieces.as_deref(), over) {
                    Ok(weights) => return Self::send_weights(link, &weights).map(|()| None),
                    Err(unserved) => Err(unserved),
                }
            }
            Request::Look => return Self::send_weights(link, &job.look()).map(|()| None),
            Request::Report => Ok(Reply::Report(job.report())),
            Request::Beat | Request::Leave | Request::SetUp(_) => {
                Err(Unserved::Invalid("handled before".into()))
            }
        }))
    }

    fn send_weights(
        link: &mut Link,
        weights: &[(u32, u64, super::store::Weights)],
    ) -> io::Result<()> {
        let versions = weights.iter().map(|(piece, version, _)| (*piece, *version)).collect();
        let parts: Vec<&[u8]> = weights.iter().map(|(_, _, weights)| bytes(weights)).collect();
        link.send(&Reply::Weights { versions }, &parts)
    }

    /// Sets the shard up, unless somebody has. The weights follow in any case.
    fn set_up(&self, link: &mut Link, setup: Setup) -> io::Result<Result<Reply, Unserved>> {
        let lengths: Vec<usize> = setup.pieces.iter().map(|piece| piece.checked_bytes()).collect();
        if lengths.iter().any(|bytes| *bytes as u64 > MOST_BULK) {
            return Err(super::wire::invalid("a piece that is too large".into()));
        }
        let fingerprint = setup.fingerprint();
        let bulk = link.bulk(lengths.into_iter())?;
        let mut journal = self.setting_up.lock().expect("no panic while locked");
        if let Some(job) = self.job.get() {
            let same = *job.fingerprint() == fingerprint;
            return Ok(Ok(if same { Reply::Done } else { Reply::OtherRun }));
        }
        let weights = bulk.into_iter().map(|part| Ok(numbers(part)?.to_vec()));
        let weights = weights.collect::<io::Result<Vec<Vec<f32>>>>()?;
        Ok(match Job::new(setup, weights, &self.options.files, journal.take()) {
            Ok(job) => {
                let fresh = self.job.set(job).is_ok();
                debug_assert!(fresh, "set under the lock");
                Ok(Reply::Done)
            }
            Err(error @ JobError::Setup(_)) => Err(Unserved::Invalid(error.to_string())),
            Err(error) => Err(Unserved::Failed(error)),
        })
    }

    fn tick(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.job.get().map_or(1000, |job| job.setup().timeout_ms);
            let pause = Duration::from_millis(timeout.clamp(40, 60_000)) / LOOKS;
            let guard = self.failure.lock().expect("no panic while locked");
            let stopped = |_: &mut Option<JobError>| !self.stop.load(Ordering::Acquire);
            drop(self.woken.wait_timeout_while(guard, pause, stopped).expect("no panic"));
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
}

#[derive(Clone, Copy)]
struct Worker {
    number: u32,
    life: u64,
    connection: u64,
}

/// Tells whether a connection is over while its link is borrowed.
struct Gone(Socket);

impl Gone {
    fn of(link: &Link) -> io::Result<Gone> {
        link.socket().try_clone().map(Gone)
    }

    fn is_over(&self) -> bool {
        super::link::is_over(&self.0)
    }
}

/// The name by which processes of this host find the shard that listens at an address.
pub(super) fn unix_address(address: &SockAddr) -> io::Result<SockAddr> {
    let port = address.as_socket().map(|address| address.port()).unwrap_or(0);
    SockAddr::unix(Path::new(&format!("\0unisono-server-{port}")))
}

fn unix_listener(address: &SockAddr) -> io::Result<Socket> {
    let unix = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    unix.bind(&unix_address(address)?)?;
    unix.listen(128)?;
    Ok(unix)
}
