//! Lets proven peers in, and keeps all others out without being held up by them.
//!
//! One thread owns the listening sockets of a process and every connection whose handshake is not
//! finished. All of them are non-blocking and watched by one epoll instance, so a connection that
//! sends nothing, or a byte a second, costs a slot and nothing else. There is a fixed number of
//! slots: a stranger that fills them pushes out the oldest connection that has not said a proper
//! hello, which is the first thing that an honest peer does. Only if all have, the oldest goes;
//! peers that were pushed out knock again. A slot has a fixed size and a deadline. Nothing a
//! stranger sends reaches further than [`Responder::feed`].
//!
//! Refusals are logged with address and reason, up to a few in a minute; the rest is counted.

mod refusals;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use socket2::{Domain, SockAddr, Socket};

use self::refusals::{Peer, Reason, RefusalLog};
use crate::connection::Connection;
use crate::fork;
use crate::handshake::{Encryption, Introduction, Purpose, Responder, Step, random_nonce};
use crate::keepalive::{SILENCE, keep_alive};
use crate::pace::send_unpaced_within_machine;
use crate::signal::Signal;
use crate::timed::timespec;
use crate::token::Token;

/// Accepts connections and performs their handshakes on a thread of its own, until dropped.
pub struct Acceptor {
    stop: Signal,
    thread: Option<JoinHandle<()>>,
}

/// What an [`Acceptor`] grants to connections that have proven nothing yet.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Handshakes under way at once. More let more honest peers connect at the same instant
    /// during a flood; each costs one descriptor and a few hundred bytes.
    pub half_done: usize,
    /// How long one handshake may take. Longer forgives slower networks; shorter frees the slots
    /// of silent strangers sooner.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { half_done: 64, patience: Duration::from_secs(5) }
    }
}

/// Who is let in, and what for.
#[derive(Clone, Debug)]
pub struct Admission {
    token: Token,
    purposes: &'static [Purpose],
    limits: Limits,
}

impl Admission {
    /// Processes that prove `token`, for these purposes.
    pub fn new(token: Token, purposes: &'static [Purpose]) -> Admission {
        Admission { token, purposes, limits: Limits::default() }
    }

    /// The same, with other limits for connections that have proven nothing yet.
    pub fn with_limits(self, limits: Limits) -> Admission {
        let limits = Limits { half_done: limits.half_done.max(1), ..limits };
        Admission { limits, ..self }
    }
}

impl Acceptor {
    /// Accepts on `listeners` (TCP or Unix), which must be listening already, and passes each
    /// connection that is [admitted](Admission) to `on_connection`, blocking, with Nagle's algorithm
    /// off and keepalive probes on.
    ///
    /// `on_connection` runs on the acceptor's thread: while it runs, no other connection is let in.
    pub fn start(
        listeners: Vec<Socket>,
        admission: Admission,
        on_connection: impl FnMut(Connection, Introduction) + Send + 'static,
    ) -> io::Result<Acceptor> {
        let stop = Signal::new()?;
        let door = Door::new(listeners, admission, stop.clone(), on_connection)?;
        let thread =
            std::thread::Builder::new().name("unisono-accept".into()).spawn(move || door.run())?;
        Ok(Acceptor { stop, thread: Some(thread) })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the acceptor's thread panicked");
        }
    }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").finish_non_exhaustive()
    }
}

/// The key of the stop signal among the events; listeners follow, then connections.
const STOP: u64 = 0;

/// How long to leave connections in the kernel's queue when the process can accept no more:
/// shorter burns a core, longer delays honest peers once there is room again.
const OUT_OF_RESOURCES_PAUSE: Duration = Duration::from_millis(100);

/// The state of the acceptor's thread.
struct Door<F> {
    admission: Admission,
    epoll: OwnedFd,
    stop: Signal,
    listeners: Vec<Socket>,
    /// Oldest first.
    half_done: Vec<HalfDone>,
    next_key: u64,
    refusals: RefusalLog,
    on_connection: F,
}

/// A connection that has proven nothing yet.
struct HalfDone {
    key: u64,
    socket: Socket,
    peer: Peer,
    responder: Responder,
    /// Whether it has said a proper hello.
    challenged: bool,
    deadline: Instant,
}

/// What became of a half-done handshake after its socket was readable.
enum Fate {
    Waiting,
    Accepted(Introduction),
    Dropped(Reason),
}

impl<F: FnMut(Connection, Introduction)> Door<F> {
    fn new(
        listeners: Vec<Socket>,
        admission: Admission,
        stop: Signal,
        on_connection: F,
    ) -> io::Result<Door<F>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&epoll, &stop, STOP)?;
        let mut next_key = STOP + 1;
        for listener in &listeners {
            listener.set_nonblocking(true)?;
            fork::make_private(listener);
            watch(&epoll, listener, next_key)?;
            next_key += 1;
        }
        Ok(Door {
            half_done: Vec::with_capacity(admission.limits.half_done),
            admission,
            epoll,
            stop,
            listeners,
            next_key,
            refusals: RefusalLog::default(),
            on_connection,
        })
    }

    fn run(mut self) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 32];
        loop {
            let timeout = self
                .half_done
                .first()
                .map(|oldest| timespec(oldest.deadline.saturating_duration_since(Instant::now())));
            let ready = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Ok(ready) => ready,
                Err(Errno::INTR) => continue,
                Err(error) => {
                    log::error!("no more connections are accepted: epoll failed: {error}");
                    return;
                }
            };
            for event in &events[..ready] {
                match { event.data }.u64() {
                    STOP => return,
                    key if key <= self.listeners.len() as u64 => {
                        self.accept_all(key as usize - 1);
                    }
                    key => self.advance(key),
                }
            }
            self.drop_the_late();
        }
    }

    /// Accepts what waits at a listener.
    fn accept_all(&mut self, listener: usize) {
        // As many as there are slots, so that the handshakes under way get their turn.
        for _ in 0..self.admission.limits.half_done {
            let no_fork = fork::hold_off();
            let accepted = self.listeners[listener].accept();
            if let Ok((socket, _)) = &accepted {
                no_fork.make_private(socket);
            }
            drop(no_fork);
            match accepted {
                Ok((socket, address)) => self.admit(socket, &address),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => return,
                    // The connection died in the queue; the next may be alive.
                    Some(Errno::CONNABORTED | Errno::INTR | Errno::PROTO) => continue,
                    _ => {
                        log::warn!("cannot accept a connection: {error}");
                        self.pause();
                        return;
                    }
                },
            }
        }
    }

    fn admit(&mut self, socket: Socket, address: &SockAddr) {
        let peer = Peer::of(&socket, address);
        self.make_room();
        let key = self.next_key;
        self.next_key += 1;
        let prepared = || -> io::Result<Responder> {
            socket.set_nonblocking(true)?;
            if address.domain() != Domain::UNIX {
                socket.set_tcp_nodelay(true)?;
                send_unpaced_within_machine(&socket);
                keep_alive(&socket, SILENCE)?;
            }
            watch(&self.epoll, &socket, key)?;
            let Admission { token, purposes, .. } = &self.admission;
            let encryption = Encryption::of(token, address.domain() == Domain::UNIX);
            Ok(Responder::with(token, purposes, random_nonce()?, encryption))
        };
        match prepared() {
            Ok(responder) => {
                let deadline = Instant::now() + self.admission.limits.patience;
                let challenged = false;
                let half_done = HalfDone { key, socket, peer, responder, challenged, deadline };
                self.half_done.push(half_done);
            }
            Err(error) => self.refusals.note(&peer, &Reason::Failed(error), Instant::now()),
        }
    }

    /// Frees a slot if all are taken.
    fn make_room(&mut self) {
        while self.half_done.len() == self.admission.limits.half_done {
            let candidate = self.half_done.iter().position(|half_done| !half_done.challenged);
            let index = candidate.unwrap_or(0);
            let (key, challenged) = (self.half_done[index].key, self.half_done[index].challenged);
            // In a rush of connections, its hello may be here without having had its turn.
            self.advance(key);
            let displaced =
                |half_done: &HalfDone| half_done.key == key && half_done.challenged == challenged;
            if let Some(index) = self.half_done.iter().position(displaced) {
                let displaced = self.half_done.remove(index);
                self.refusals.note(&displaced.peer, &Reason::Displaced, Instant::now());
            }
        }
    }

    /// Continues the handshake with this key, unless it ended earlier in the same batch of events.
    fn advance(&mut self, key: u64) {
        let Some(index) = self.half_done.iter().position(|half_done| half_done.key == key) else {
            return;
        };
        match self.half_done[index].advance() {
            Fate::Waiting => {}
            Fate::Accepted(introduction) => {
                let mut done = self.half_done.remove(index);
                match self.release(&done.socket) {
                    Ok(()) => {
                        let keys = done.responder.take_keys();
                        (self.on_connection)(Connection::new(done.socket, keys), introduction);
                    }
                    Err(error) => {
                        self.refusals.note(&done.peer, &Reason::Failed(error), Instant::now());
                    }
                }
            }
            Fate::Dropped(reason) => {
                let dropped = self.half_done.remove(index);
                self.refusals.note(&dropped.peer, &reason, Instant::now());
            }
        }
    }

    /// Makes the socket an ordinary blocking one that is not watched here.
    fn release(&self, socket: &Socket) -> io::Result<()> {
        epoll::delete(&self.epoll, socket)?;
        socket.set_nonblocking(false)
    }

    fn drop_the_late(&mut self) {
        let now = Instant::now();
        while self.half_done.first().is_some_and(|oldest| oldest.deadline <= now) {
            let late = self.half_done.remove(0);
            self.refusals.note(&late.peer, &Reason::TooSlow, now);
        }
        self.refusals.summarize(now);
    }

    fn pause(&self) {
        let mut fds = [PollFd::new(&self.stop, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&timespec(OUT_OF_RESOURCES_PAUSE)));
    }
}

impl HalfDone {
    fn advance(&mut self) -> Fate {
        loop {
            let mut buffer = [0; 128];
            let wanted = self.responder.wanted().min(buffer.len());
            let received =
                match rustix::net::recv(&self.socket, &mut buffer[..wanted], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return Fate::Dropped(Reason::Truncated),
                    Ok((received, _)) => received,
                    Err(Errno::AGAIN) => return Fate::Waiting,
                    Err(Errno::INTR) => continue,
                    Err(Errno::CONNRESET | Errno::PIPE) => {
                        return Fate::Dropped(Reason::Truncated);
                    }
                    Err(error) => return Fate::Dropped(Reason::Failed(error.into())),
                };
            let sent = match self.responder.feed(&buffer[..received]).1 {
                Step::More => continue,
                Step::Send(reply) => {
                    self.challenged = true;
                    self.send(reply.as_ref())
                }
                Step::Accepted { introduction, verdict } => match self.send(verdict.as_ref()) {
                    Ok(()) => return Fate::Accepted(introduction),
                    Err(error) => Err(error),
                },
                Step::Refused { refusal, reply } => {
                    let _ = self.send(reply.as_ref());
                    // Closing with unread bytes resets the connection, and a reset may overtake
                    // the reply: take what is there.
                    let mut rest = [0; 1024];
                    let _ = rustix::net::recv(&self.socket, &mut rest, RecvFlags::DONTWAIT);
                    return Fate::Dropped(Reason::Refused(refusal));
                }
            };
            if let Err(error) = sent {
                return Fate::Dropped(Reason::Failed(error));
            }
        }
    }

    /// Sends without waiting. The first hundred bytes of a connection always fit into its buffer,
    /// so a socket that does not take them whole is broken.
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        match rustix::net::send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

fn watch(epoll: &OwnedFd, source: impl std::os::fd::AsFd, key: u64) -> io::Result<()> {
    let data = epoll::EventData::new_u64(key);
    epoll::add(epoll, source, data, epoll::EventFlags::IN).map_err(io::Error::from)
}

#[cfg(test)]
mod tests;
