//! A server: accepts workers, and gives each a thread.
//!
//! What is said on a connection is handled by the thread of that connection, one request after the
//! other; the [run](super::run) orders what happens. A worker is gone when its connection ends. One that
//! falls silent is taken for gone by a thread that watches the clock.

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

use super::link::{Bulk, Heartbeat, Link, bytes, numbers};
use super::run::{
    Caller, Files, MOST_WORKERS, ServeError, ServedRun, Unserved, Waiting, total_bytes,
};
use super::store::{Abandoned, Weights};
use super::wire::{Part, Reply, Request, SERVER, Setup};
use crate::Life;
use crate::events::Recorder;

/// How a server is started.
pub struct ServerOptions {
    /// The token of the job.
    pub token: Token,
    /// Where it writes.
    pub files: Files,
    /// What records the run.
    pub recorder: Option<Box<dyn Recorder>>,
}

/// A server, until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<Acceptor>,
    ticker: Option<JoinHandle<()>>,
}

struct Shared {
    files: Files,
    served: OnceLock<ServedRun>,
    /// Held while a run is set up; what waits for one.
    setting_up: Mutex<Waiting>,
    connections: Mutex<Vec<Connection>>,
    /// Connections so far.
    accepted: AtomicU64,
    stop: AtomicBool,
    /// Why the server cannot go on, until the owner of the server asks.
    failure: Mutex<Option<ServeError>>,
    has_failed: AtomicBool,
    woken: Condvar,
}

/// A connection and its thread, to end them.
struct Connection {
    caller: Caller,
    heartbeat: Heartbeat,
    thread: JoinHandle<()>,
}

/// How often silent workers are looked for, and all are told that this server lives, in a timeout.
const CHECKS: u32 = 4;

/// The timeout until workers have said how long it is: no longer than any that they wait by.
const FIRST_TIMEOUT: Duration = Duration::from_millis(200);

/// The shortest and the longest timeout by which a server checks. Shorter: checking takes a core. Longer: a
/// server takes long to notice that it should check more often.
pub(super) const SHORTEST_TIMEOUT: Duration = Duration::from_millis(40);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(60);

impl Server {
    /// Serves workers that prove the token on a listening TCP socket, and on a Unix socket that processes
    /// of this host find by the same address. Goes on with what the journal holds, if it holds
    /// anything.
    pub fn start(listener: Socket, options: ServerOptions) -> Result<Server, StartError> {
        let ServerOptions { token, files, recorder } = options;
        let (served, waiting) = ServedRun::recover(&files, recorder)?;
        if let Some(Ok(report)) = served.as_ref().map(ServedRun::report) {
            log::info!("goes on after {} updates", report.updates);
        }
        let address = listener.local_addr()?;
        let mut listeners = vec![listener];
        match unix_listener(&token, &address) {
            Ok(unix) => listeners.push(unix),
            Err(error) => log::warn!("no shared memory, for want of a Unix socket: {error}"),
        }
        let shared = Arc::new(Shared {
            served: served.map_or_else(OnceLock::new, OnceLock::from),
            setting_up: Mutex::new(waiting),
            connections: Mutex::new(Vec::new()),
            accepted: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            has_failed: AtomicBool::new(false),
            woken: Condvar::new(),
            files,
        });
        let serving = shared.clone();
        let on_connection = move |connection, introduction| {
            serving.guard(|| Shared::welcome(&serving, connection, introduction));
        };
        let admission = Admission::new(token, &[SERVER]);
        let acceptor = Acceptor::start(listeners, admission, on_connection)?;
        let ticking = shared.clone();
        let ticker = std::thread::Builder::new()
            .name("unisono-ticker".into())
            .spawn(move || ticking.guard(|| ticking.tick()))?;
        Ok(Server { shared, acceptor: Some(acceptor), ticker: Some(ticker) })
    }

    /// Whether the server cannot go on. Its workers are disconnected, and none is let in any more.
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed.load(Ordering::Acquire)
    }

    /// Why the server cannot go on, once.
    pub fn failure(&self) -> Option<ServeError> {
        self.shared.failure().take()
    }

    /// Waits until `stop` says so, or the server cannot go on.
    pub fn serve_until(&self, stop: impl Fn() -> bool) -> Result<(), ServeError> {
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

impl Drop for Server {
    fn drop(&mut self) {
        // No worker comes in any more, so that all connections can be ended.
        drop(self.acceptor.take());
        self.shared.stop.store(true, Ordering::Release);
        // A thread that is about to wait has seen the stop, or holds the lock and is woken.
        drop(self.shared.failure());
        self.shared.woken.notify_all();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
        let connections = std::mem::take(&mut *self.shared.connections());
        for connection in &connections {
            let _ = connection.heartbeat.socket().shutdown(std::net::Shutdown::Both);
        }
        for connection in connections {
            let _ = connection.thread.join();
        }
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// What it should go on with.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The system.
    #[error("cannot listen: {0}")]
    Io(#[from] io::Error),
}

/// What a request leads to.
enum Handled {
    /// This is the reply.
    Reply(Reply),
    /// The reply is sent, or none is wanted.
    Done,
    /// This is the reply, and the connection ends with it: it is unknown where the request does.
    Last(Reply),
}

impl Shared {
    fn welcome(shared: &Arc<Shared>, connection: NetConnection, introduction: Introduction) {
        let is_meant = introduction.to as usize == shared.files.number;
        let caller = Caller {
            worker: introduction.from,
            life: Life(introduction.epoch),
            connection: shared.accepted.fetch_add(1, Ordering::Relaxed),
            is_here: false,
        };
        let mut link = Link::over(connection);
        let caller = Caller { is_here: is_here(link.socket()), ..caller };
        let heartbeat = link.heartbeat();
        let serving = shared.clone();
        let serve = move || {
            serving.guard(|| {
                let ended = match is_meant {
                    true => serving.serve(&mut link, caller),
                    false => serving.turn_away(&mut link, introduction.to),
                };
                if let Err(error) = ended {
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
            Ok(thread) => connections.push(Connection { caller, heartbeat, thread }),
            // Its connection ends. It comes again, when there may be room.
            Err(error) => {
                log::error!("worker {} is turned away, no thread for it: {error}", caller.worker);
            }
        }
    }

    /// Says to a worker that takes this server for another which one it is.
    fn turn_away(&self, link: &mut Link, meant: u32) -> io::Result<()> {
        log::warn!("a worker takes this server for server {meant}");
        link.take_offer()?;
        let number = self.files.number as u32;
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
            let handled = match self.handle(link, caller, request)? {
                Ok(handled) => handled,
                Err(Unserved::Refused(refusal)) => Handled::Reply(Reply::Refused(refusal)),
                Err(Unserved::Invalid(what)) => Handled::Reply(Reply::Invalid(what)),
                Err(Unserved::Gone) => return Ok(()),
                Err(Unserved::Failed(error)) => {
                    self.fail(error);
                    return Ok(());
                }
            };
            match handled {
                Handled::Reply(reply) => link.send(&reply, &[])?,
                Handled::Done => {}
                Handled::Last(reply) => return link.send(&reply, &[]),
            }
        }
        Ok(())
    }

    /// Does something on a thread of this server. A panic ends the server: what it left half done, others
    /// would wait for.
    fn guard(&self, work: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work))
            // Else it is a consequence.
            && !panic.is::<Abandoned>()
        {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            self.fail(ServeError::Panicked(text.unwrap_or("without a word").to_owned()));
        }
    }

    fn handle(
        &self,
        link: &mut Link,
        caller: Caller,
        request: Request,
    ) -> io::Result<Result<Handled, Unserved>> {
        let Some(served) = self.served.get() else {
            return Ok(match request {
                Request::SetUp(setup) => self.set_up(link, *setup)?,
                Request::Beat => Ok(Handled::Done),
                Request::Leave => Ok(Handled::Last(Reply::Done)),
                Request::Life { worker } => self.first_life(worker),
                // Its gradients follow, and there is nothing to tell how many.
                Request::Push { .. } => Ok(Handled::Last(Reply::Unknown)),
                _ => Ok(Handled::Reply(Reply::Unknown)),
            });
        };
        Ok(match request {
            Request::SetUp(setup) => self.set_up(link, *setup)?,
            Request::Join { run } if run != *served.fingerprint() => {
                Ok(Handled::Reply(Reply::OtherRun))
            }
            Request::Join { .. } => served.join(caller).map(|reply| {
                self.end_older(caller);
                Handled::Reply(reply)
            }),
            Request::Enter { clock } => served.enter(caller, clock).map(Handled::Reply),
            Request::Push { push, measured, parts } => {
                let lengths = match served.lengths(caller.worker, &parts) {
                    Ok(lengths) => lengths,
                    Err(what) => return Ok(Ok(Handled::Last(Reply::Invalid(what)))),
                };
                let socket = link.socket().clone();
                let keeps = served.keeps_gradients();
                let wanted = |(length, part): (usize, &Part)| (length, keeps || part.encoded);
                let wanted: Vec<_> = lengths.into_iter().zip(&parts).map(wanted).collect();
                let bulk = link.bulk_or_places(&wanted)?;
                let parts: Vec<(Part, Bulk<'_>)> = parts.into_iter().zip(bulk).collect();
                let is_over = || is_over(&socket);
                served.push(caller, push, measured, &parts, is_over).map(Handled::Reply)
            }
            Request::Pull { clock, bound, pieces } => {
                let is_over = || link.is_over();
                match served.pull(caller, clock, bound, pieces.as_deref(), is_over) {
                    Ok(weights) => Ok(send_weights(link, &weights)?),
                    Err(unserved) => Err(unserved),
                }
            }
            Request::Beat => {
                served.hear(caller);
                Ok(Handled::Done)
            }
            Request::Leave => served.leave(caller).map(|()| Handled::Last(Reply::Done)),
            Request::Weights { run } if run != *served.fingerprint() => {
                Ok(Handled::Reply(Reply::OtherRun))
            }
            Request::Weights { .. } => match served.weights() {
                Ok(weights) => Ok(send_weights(link, &weights)?),
                Err(unserved) => Err(unserved),
            },
            Request::Life { worker } => {
                served.next_life(worker).map(|life| Handled::Reply(Reply::Life { life }))
            }
            Request::Report => served.report().map(|report| Handled::Reply(Reply::Report(report))),
        })
    }

    /// Numbers a life of a worker before there is a run.
    fn first_life(&self, worker: u32) -> Result<Handled, Unserved> {
        if worker >= MOST_WORKERS {
            return Err(Unserved::Invalid(format!("worker {worker}")));
        }
        let mut waiting = self.setting_up.lock().expect("no panic while locked");
        let life = match self.served.get() {
            Some(served) => served.next_life(worker)?,
            None => waiting.lives.next(worker, None),
        };
        Ok(Handled::Reply(Reply::Life { life }))
    }

    /// Sets the server up, unless another worker has. The weights follow in any case.
    fn set_up(&self, link: &mut Link, setup: Setup) -> io::Result<Result<Handled, Unserved>> {
        if total_bytes(&setup.pieces).is_none() {
            return Ok(Ok(Handled::Last(Reply::Invalid("pieces that are too large".into()))));
        }
        let checked = ServedRun::check(&setup);
        let fingerprint = setup.fingerprint();
        let bulk = link.bulk(setup.pieces.iter().map(|piece| 4 * piece.len()))?;
        if let Err(error) = checked {
            return Ok(Err(Unserved::Invalid(error.to_string())));
        }
        let mut waiting = self.setting_up.lock().expect("no panic while locked");
        if let Some(served) = self.served.get() {
            let same = *served.fingerprint() == fingerprint;
            return Ok(Ok(Handled::Reply(if same { Reply::Done } else { Reply::OtherRun })));
        }
        let weights = bulk.into_iter().map(|part| Ok(numbers(part)?.to_vec()));
        let weights = weights.collect::<io::Result<Vec<Vec<f32>>>>()?;
        let waiting = std::mem::take(&mut *waiting);
        Ok(match ServedRun::new(setup, weights, &self.files, waiting) {
            Ok(served) => {
                let fresh = self.served.set(served).is_ok();
                debug_assert!(fresh, "set under the lock");
                Ok(Handled::Reply(Reply::Done))
            }
            Err(error) => Err(Unserved::Failed(error)),
        })
    }

    /// Ends the older connections of a worker: it has given them up, though the network may not say so.
    fn end_older(&self, caller: Caller) {
        for older in &*self.connections() {
            let Caller { worker, connection, .. } = older.caller;
            if worker == caller.worker && connection < caller.connection {
                let _ = older.heartbeat.socket().shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn lose(&self, caller: Caller) {
        if let Some(served) = self.served.get()
            && let Err(Unserved::Failed(error)) = served.lose(caller)
        {
            self.fail(error);
        }
    }

    fn tick(&self) {
        let mut since = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.served.get().map_or(FIRST_TIMEOUT, |served| served.timeout());
            let timeout = timeout.clamp(SHORTEST_TIMEOUT, LONGEST_TIMEOUT);
            let pause = timeout / CHECKS;
            let guard = self.failure();
            let goes_on = |_: &mut Option<ServeError>| !self.stop.load(Ordering::Acquire);
            let start = Instant::now();
            let waited = self.woken.wait_timeout_while(guard, pause, goes_on);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            for connection in &*self.connections() {
                connection.heartbeat.beat(&SIGN_OF_LIFE);
            }
            let Some(served) = self.served.get() else {
                since = Instant::now();
                continue;
            };
            served.tick();
            if start.elapsed() > 2 * pause {
                // This process was stopped, or had no turn: no worker could be heard meanwhile.
                since = Instant::now();
                continue;
            }
            match served.expire() {
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

    /// Ends the service: no worker is told anything any more, nor left waiting.
    fn fail(&self, error: ServeError) {
        let mut failure = self.failure();
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            log::error!("this server cannot go on: {error}");
            *failure = Some(error);
        }
        drop(failure);
        self.woken.notify_all();
        if let Some(served) = self.served.get() {
            served.abandon();
        }
        for connection in &*self.connections() {
            let _ = connection.heartbeat.socket().shutdown(std::net::Shutdown::Both);
        }
    }

    fn failure(&self) -> MutexGuard<'_, Option<ServeError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the other side of a connection is on this host.
fn is_here(socket: &Socket) -> bool {
    let ip = |address: io::Result<SockAddr>| Some(address.ok()?.as_socket()?.ip());
    match socket.domain() {
        Ok(Domain::UNIX) => true,
        _ => ip(socket.peer_addr()).is_some_and(|peer| ip(socket.local_addr()) == Some(peer)),
    }
}

fn send_weights(link: &mut Link, weights: &[(u32, u64, Weights)]) -> io::Result<Handled> {
    let versions = weights.iter().map(|(piece, version, _)| (*piece, *version)).collect();
    let blocks = weights.iter().flat_map(|(_, _, weights)| weights.blocks());
    let parts: Vec<&[u8]> = blocks.map(bytes).collect();
    link.send(&Reply::Weights { versions }, &parts)?;
    Ok(Handled::Done)
}

/// The name by which processes of this host find the server that listens at an address. A process that does
/// not know the job's token cannot know it beforehand, and thus cannot be there first.
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

    fn server_and_run() -> (Server, Run, ClientOptions) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let options = ClientOptions {
            servers: vec![listener.local_addr().unwrap().to_string()],
            token: TOKEN,
            worker: 0,
            life: Some(Life(1)),
            patience: Duration::from_millis(500),
            transport: Transport::Auto,
            warm_up: 0,
            error_feedback: false,
        };
        let server = ServerOptions { token: TOKEN, files: Files::default(), recorder: None };
        let server = Server::start(listener.into(), server).unwrap();
        let mut run = Run::new(vec![vec![2]], "sgd".parse().unwrap(), "ssp:0".parse().unwrap());
        (run.workers, run.shards) = (2, 2);
        (server, run, options)
    }

    /// A worker waits for another, by a lock that a third leaves poisoned.
    #[test]
    fn a_panic_ends_the_server_and_every_wait() {
        let (server, run, options) = server_and_run();
        let other = ClientOptions { worker: 1, ..options.clone() };
        let _idle = Client::join(&run, other, &|_| vec![0.0; 2]).unwrap();
        let mut waits = Client::join(&run, options, &|_| vec![0.0; 2]).unwrap();
        let (gradient, mut seen) = ([1.0f32; 2], 0);
        let waiting = std::thread::spawn(move || {
            let take: &mut super::super::client::Take<'_> = &mut |_, _, _| seen += 1;
            waits.push_pull(&[(0, vec![&gradient[..]])], Default::default(), take)
        });
        let served = server.shared.served.get().unwrap();
        while served.report().unwrap().updates == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        server.shared.guard(|| served.panic_while_locked());
        let error = server.serve_until(|| false).unwrap_err();
        assert!(matches!(&error, ServeError::Panicked(what) if what == "on purpose"), "{error}");
        assert!(error.to_string().contains("panicked"), "{error}");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, ServerError::Unreachable { server: 0, .. }), "{error}");
        // Nor does its end wait for any worker.
        drop(server);
    }

    /// What was to be made by the thread that panicked is waited for by another.
    #[test]
    fn a_panic_ends_waits_for_weights_that_never_come() {
        let (server, run, options) = server_and_run();
        let _worker = Client::join(&run, options, &|_| vec![0.0; 2]).unwrap();
        let shared = server.shared.clone();
        let waiting = std::thread::spawn(move || {
            shared.guard(|| shared.served.get().unwrap().wait_for_a_version_that_never_comes());
        });
        server.shared.guard(|| panic!("{} purpose", "on"));
        waiting.join().unwrap();
        let error = server.serve_until(|| false).unwrap_err();
        assert!(matches!(&error, ServeError::Panicked(what) if what == "on purpose"), "{error}");
    }
}
