//! A server shard: accepts workers, and gives each a thread.
//!
//! What is said on a connection is handled by the thread of that connection, one request after the
//! other; the [job](super::job) orders what happens. A worker is gone when its connection ends. One that
//! falls silent is taken for gone by a thread that looks at the clock.

use std::io;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket};
use unisono_net::frame::SIGN_OF_LIFE;
use unisono_net::keepalive::is_over;
use unisono_net::{
    Acceptor, Admission, Connection as NetConnection, Introduction, Target, Token, new_socket,
};

use super::job::{Caller, Files, Job, JobError, MOST_WORKERS, Unserved, total_bytes};
use super::journal::Journal;
use super::link::{Link, Pulse, bytes, numbers};
use super::lives::Lives;
use super::store::{Abandoned, Weights};
use super::wire::{Part, Reply, Request, SERVER, Setup};

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
    /// Why the shard cannot go on, until somebody asks.
    failure: Mutex<Option<JobError>>,
    has_failed: AtomicBool,
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
    pulse: Pulse,
    thread: JoinHandle<()>,
}

/// How often silent workers are looked for, and all are told that this shard lives, in a timeout.
const LOOKS: u32 = 4;

/// The timeout until workers have said how long it is: no longer than any that they wait by.
const FIRST_TIMEOUT: Duration = Duration::from_millis(200);

/// The shortest and the longest timeout by which a shard looks. Shorter: looking takes a core. Longer: a
/// shard takes long to notice that it should look more often.
pub(super) const SHORTEST_TIMEOUT: Duration = Duration::from_millis(40);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(60);

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
        match unix_listener(&options.token, &address) {
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
            has_failed: AtomicBool::new(false),
            woken: Condvar::new(),
            options: options.clone(),
        });
        let serving = shared.clone();
        let on_connection = move |connection, introduction| {
            serving.guard(|| Shared::welcome(&serving, connection, introduction));
        };
        let admission = Admission::new(options.token, &[SERVER]);
        let acceptor = Acceptor::start(listeners, admission, on_connection)?;
        let ticking = shared.clone();
        let ticker = std::thread::Builder::new()
            .name("unisono-ticker".into())
            .spawn(move || ticking.guard(|| ticking.tick()))?;
        Ok(Shard { shared, acceptor: Some(acceptor), ticker: Some(ticker) })
    }

    /// Whether the shard cannot go on. Whoever was connected is not any more, and nobody is let in.
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed.load(Ordering::Acquire)
    }

    /// Why the shard cannot go on, once.
    pub fn failure(&self) -> Option<JobError> {
        self.shared.failure().take()
    }

    /// Waits until `stop` says so, or the shard cannot go on.
    pub fn serve_until(&self, stop: impl Fn() -> bool) -> Result<(), JobError> {
        const PAUSE: Duration = Duration::from_millis(20);
        let mut failure = self.shared.failure();
        loop {
            if let Some(error) = failure.take() {
                return Err(error);
            }
            if stop() {
                return Ok(());
            }
            let waited = self.shared.woken.wait_timeout(failure, PAUSE);
            failure = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        // Nobody comes in any more, so that all who are in can be sent away.
        drop(self.acceptor.take());
        self.shared.stop.store(true, Ordering::Release);
        // Whoever is about to wait has seen the stop, or holds the lock and is woken.
        drop(self.shared.failure());
        self.shared.woken.notify_all();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
        let connections = std::mem::take(&mut *self.shared.connections());
        for connection in &connections {
            let _ = connection.pulse.socket().shutdown(std::net::Shutdown::Both);
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
    fn welcome(shared: &Arc<Shared>, connection: NetConnection, introduction: Introduction) {
        let is_meant = introduction.to as usize == shared.options.files.number;
        let caller = Caller {
            worker: introduction.from,
            life: introduction.epoch,
            connection: shared.accepted.fetch_add(1, Ordering::Relaxed),
        };
        let mut link = Link::over(connection);
        let pulse = link.pulse();
        let serving = shared.clone();
        let serve = move || {
            serving.guard(|| {
                let served = match is_meant {
                    true => serving.serve(&mut link, caller),
                    false => serving.turn_away(&mut link, introduction.to),
                };
                if let Err(error) = served {
                    log::debug!("worker {}: {error}", caller.worker);
                }
                serving.lose(caller);
            });
            // Another handle of the socket is kept, to end it from elsewhere.
            let _ = link.socket().shutdown(std::net::Shutdown::Both);
        };
        // Held until its entry is there, so that a failure finds it.
        let mut connections = shared.connections();
        if shared.has_failed.load(Ordering::Acquire) {
            return;
        }
        connections.retain(|connection| !connection.thread.is_finished());
        match std::thread::Builder::new().name("unisono-worker".into()).spawn(serve) {
            Ok(thread) => connections.push(Connection { caller, pulse, thread }),
            // Its connection ends. It comes again, when there may be room.
            Err(error) => {
                log::error!("worker {} is turned away, no thread for it: {error}", caller.worker);
            }
        }
    }

    /// Says to somebody who takes this server for another which one it is.
    fn turn_away(&self, link: &mut Link, meant: u32) -> io::Result<()> {
        log::warn!("a worker takes this server for server {meant}");
        link.take_offer()?;
        let number = self.options.files.number as u32;
        match link.receive::<Request>()? {
            Some(_) => link.send(&Reply::OtherServer { number }, &[]),
            None => Ok(()),
        }
    }

    /// Serves one connection until it ends.
    fn serve(&self, link: &mut Link, caller: Caller) -> io::Result<()> {
        link.take_offer()?;
        while let Some(request) = link.receive::<Request>()? {
            if self.stop.load(Ordering::Acquire) {
                return Ok(());
            }
            let served = match self.handle(link, caller, request)? {
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

    /// Does something on a thread of this shard. A panic ends the shard: what it left half done, others
    /// would wait for.
    fn guard(&self, work: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work))
            // Else it is a consequence.
            && !panic.is::<Abandoned>()
        {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            self.fail(JobError::Panicked(text.unwrap_or("without a word").to_owned()));
        }
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
                let socket = link.socket().clone();
                let bulk = link.bulk(lengths.into_iter())?;
                let parts: Vec<(Part, &[u8])> = parts.into_iter().zip(bulk).collect();
                let is_over = || is_over(&socket);
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
                let _ = older.pulse.socket().shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn lose(&self, caller: Caller) {
        if let Some(job) = self.job.get()
            && let Err(Unserved::Failed(error)) = job.lose(caller)
        {
            self.fail(error);
        }
    }

    fn tick(&self) {
        let mut since = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.job.get().map_or(FIRST_TIMEOUT, |job| job.timeout());
            let timeout = timeout.clamp(SHORTEST_TIMEOUT, LONGEST_TIMEOUT);
            let pause = timeout / LOOKS;
            let guard = self.failure();
            let goes_on = |_: &mut Option<JobError>| !self.stop.load(Ordering::Acquire);
            let start = Instant::now();
            let waited = self.woken.wait_timeout_while(guard, pause, goes_on);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            for connection in &*self.connections() {
                connection.pulse.beat(&SIGN_OF_LIFE);
            }
            let Some(job) = self.job.get() else {
                since = Instant::now();
                continue;
            };
            job.tick();
            if start.elapsed() > 2 * pause {
                // This process was stopped, or had no turn: nobody could be heard meanwhile.
                since = Instant::now();
                continue;
            }
            match job.expire() {
                Ok(true) => since = Instant::now(),
                Ok(false) if since.elapsed() > timeout => {
                    log::warn!(
                        "this server has been busy with one thing for {timeout:?}, and all wait: its \
                         disk may be too slow"
                    );
                    since = Instant::now();
                }
                Err(Unserved::Failed(error)) => self.fail(error),
                Ok(false) | Err(_) => {}
            }
        }
    }

    /// Ends the service: nobody is told anything any more, nor left waiting.
    fn fail(&self, error: JobError) {
        let mut failure = self.failure();
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            log::error!("this server cannot go on: {error}");
            *failure = Some(error);
        }
        drop(failure);
        self.woken.notify_all();
        if let Some(job) = self.job.get() {
            job.abandon();
        }
        for connection in &*self.connections() {
            let _ = connection.pulse.socket().shutdown(std::net::Shutdown::Both);
        }
    }

    fn failure(&self) -> MutexGuard<'_, Option<JobError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn send_weights(link: &mut Link, weights: &[(u32, u64, Weights)]) -> io::Result<Served> {
    let versions = weights.iter().map(|(piece, version, _)| (*piece, *version)).collect();
    let blocks = weights.iter().flat_map(|(_, _, weights)| weights.blocks());
    let parts: Vec<&[u8]> = blocks.map(bytes).collect();
    link.send(&Reply::Weights { versions }, &parts)?;
    Ok(Served::Done)
}

/// The name by which processes of this host find the shard that listens at an address. Who does not know
/// the job's token cannot know it beforehand, and thus cannot be there first.
pub fn unix_target(token: &Token, address: &SocketAddr) -> Target {
    let secret = format!("{} {address}", token.to_hex());
    let key = blake3::derive_key("unisono server: name of the Unix socket", secret.as_bytes());
    let name = blake3::Hash::from_bytes(key).to_hex();
    Target::Unix(format!("unisono-server-{}", &name[..32]))
}

fn unix_listener(token: &Token, address: &SockAddr) -> io::Result<Socket> {
    let unknown = || io::Error::new(io::ErrorKind::Unsupported, "not an address of IP");
    let target = unix_target(token, &address.as_socket().ok_or_else(unknown)?);
    let unix = new_socket(Domain::UNIX)?;
    unix.bind(&target.address()?)?;
    unix.listen(128)?;
    Ok(unix)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::server::{Client, ClientOptions, Run, ServerError, Transport};

    const TOKEN: Token = Token::from_bytes([7; 32]);

    fn shard_and_run() -> (Shard, Run, ClientOptions) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let options = ClientOptions {
            servers: vec![listener.local_addr().unwrap().to_string()],
            token: TOKEN,
            worker: 0,
            life: Some(1),
            patience: Duration::from_millis(500),
            transport: Transport::Auto,
            warm_up: 0,
            error_feedback: false,
        };
        let shard = ShardOptions { token: TOKEN, files: Files::default() };
        let shard = Shard::start(listener.into(), shard).unwrap();
        let mut run = Run::new(vec![vec![2]], "sgd".parse().unwrap(), "ssp:0".parse().unwrap());
        (run.workers, run.shards) = (2, 2);
        (shard, run, options)
    }

    /// A worker waits for another, by a lock that a third leaves poisoned.
    #[test]
    fn a_panic_ends_the_shard_and_every_wait() {
        let (shard, run, options) = shard_and_run();
        let other = ClientOptions { worker: 1, ..options.clone() };
        let _idle = Client::join(&run, other, &|_| vec![0.0; 2]).unwrap();
        let mut waits = Client::join(&run, options, &|_| vec![0.0; 2]).unwrap();
        let (gradient, mut seen) = ([1.0f32; 2], 0);
        let waiting = std::thread::spawn(move || {
            let take: &mut super::super::client::Take<'_> = &mut |_, _, _| seen += 1;
            waits.push_pull(&[(0, vec![&gradient[..]])], Default::default(), take)
        });
        let job = shard.shared.job.get().unwrap();
        while job.report().unwrap().updates == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        shard.shared.guard(|| job.panic_while_locked());
        let error = shard.serve_until(|| false).unwrap_err();
        assert!(matches!(&error, JobError::Panicked(what) if what == "on purpose"), "{error}");
        assert!(error.to_string().contains("panicked"), "{error}");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, ServerError::Unreachable { server: 0, .. }), "{error}");
        // Nor does its end wait for anybody.
        drop(shard);
    }

    /// What was to be made by the thread that panicked is waited for by another.
    #[test]
    fn a_panic_ends_waits_for_weights_that_never_come() {
        let (shard, run, options) = shard_and_run();
        let _worker = Client::join(&run, options, &|_| vec![0.0; 2]).unwrap();
        let shared = shard.shared.clone();
        let waiting = std::thread::spawn(move || {
            shared.guard(|| shared.job.get().unwrap().wait_for_a_version_that_never_comes());
        });
        shard.shared.guard(|| panic!("{} purpose", "on"));
        waiting.join().unwrap();
        let error = shard.serve_until(|| false).unwrap_err();
        assert!(matches!(&error, JobError::Panicked(what) if what == "on purpose"), "{error}");
    }
}
