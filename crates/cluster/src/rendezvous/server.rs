//! The host's side of the rendezvous: a [`Roster`] behind sockets.
//!
//! One thread owns all connections. They arrive proven, from an acceptor, with the rank in their
//! introduction. A connection is a *newcomer* until it asks to join, then a *member*, and *leaves*
//! with the one reply it gets: the roster, a refusal, or the reason why there is no roster.

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use unisono_net::frame::{FrameReader, encode};
use unisono_net::{Admission, Connection, Introduction, Limits, Signal, Token, timespec};

use super::compact::Compact;
use super::roster::{Abort, Roster};
use super::{MAX_BLOB, RENDEZVOUS, Reply, Request};

/// Hosts one rendezvous until dropped.
pub struct Server {
    world: u32,
    commands: Option<Sender<Command>>,
    wake: Signal,
    delivered: Arc<Delivered>,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Admit(Connection, Introduction),
    Gone(u32),
    Abort(Abort),
}

impl Server {
    /// Hosts a rendezvous of `world` ranks. `token` is handed out to all of them, in the clear:
    /// `None` where they were given it before.
    pub fn start(world: u32, token: Option<Token>) -> io::Result<Server> {
        let wake = Signal::new()?;
        let delivered = Arc::new(Delivered::default());
        let (commands, receiver) = channel();
        let host = Host {
            world,
            token,
            roster: Roster::new(world),
            guests: Vec::new(),
            commands: receiver,
            wake: wake.clone(),
            delivered: delivered.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("unisono-rendezvous".into())
            .spawn(move || host.run())?;
        Ok(Server { world, commands: Some(commands), wake, delivered, thread: Some(thread) })
    }

    /// Whom an acceptor lets in to this server: ranks that hold `token`.
    pub fn admission(&self, token: &Token) -> Admission {
        // All ranks of a job may dial at the same moment.
        let default = Limits::default();
        let half_done = (self.world as usize).clamp(default.half_done, 1024);
        let limits = Limits { half_done, ..default };
        Admission::new(token.clone(), &[RENDEZVOUS]).with_limits(limits)
    }

    /// What an acceptor does with a proven connection: hand it to this server.
    pub fn doorkeeper(&self) -> impl FnMut(Connection, Introduction) + Send + 'static {
        let (commands, wake) = (self.commands.clone(), self.wake.clone());
        move |connection, introduction| {
            if let Some(commands) = &commands {
                let _ = commands.send(Command::Admit(connection, introduction));
                wake.raise();
            }
        }
    }

    /// The process of `rank` has ended; see [`Roster::gone`].
    pub fn gone(&self, rank: u32) {
        self.command(Command::Gone(rank));
    }

    /// Calls the rendezvous off, unless it is over.
    pub fn abort(&self, reason: impl Into<String>) {
        let mut reason = reason.into();
        // Replies are bounded by the size of a roster.
        reason.truncate((0..=1024).rev().find(|&at| reason.is_char_boundary(at)).unwrap_or(0));
        self.command(Command::Abort(Abort::Host { reason }));
    }

    /// Waits until every rank has its roster, or until `deadline`; says whether they do.
    pub fn wait_delivered(&self, deadline: Instant) -> bool {
        self.delivered.wait(deadline)
    }

    fn command(&self, command: Command) {
        if let Some(commands) = &self.commands {
            let _ = commands.send(command);
            self.wake.raise();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.commands = None;
        self.delivered.stop();
        self.wake.raise();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the rendezvous thread panicked");
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// Whether all ranks have the roster, and whether the server is to stop.
#[derive(Default)]
struct Delivered {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Delivered {
    fn lock(&self) -> std::sync::MutexGuard<'_, (bool, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self) {
        self.lock().0 = true;
        self.changed.notify_all();
    }

    fn stop(&self) {
        self.lock().1 = true;
    }

    fn stopped(&self) -> bool {
        self.lock().1
    }

    fn wait(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let pending = |state: &mut (bool, bool)| !state.0;
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), left, pending)
            .unwrap_or_else(PoisonError::into_inner);
        state.0
    }
}

/// Connections that may have said nothing yet. Those who hold a public token can make many.
const MAX_NEWCOMERS: usize = 1024;

/// How long a newcomer may take to ask, and a leaving connection to take its reply. A server that
/// is dropped waits as long for ranks that hang with their reply unread.
const COURTESY: Duration = Duration::from_secs(3);

/// The state of the server's thread.
struct Host {
    world: u32,
    token: Option<Token>,
    roster: Roster,
    guests: Vec<Guest>,
    commands: Receiver<Command>,
    wake: Signal,
    delivered: Arc<Delivered>,
}

struct Guest {
    connection: Connection,
    rank: u32,
    inbox: FrameReader,
    /// Whether there may be something to read, or room.
    ready: bool,
    phase: Phase,
    /// When a newcomer or a leaving connection is closed, and a member's patience ends.
    deadline: Instant,
}

enum Phase {
    Newcomer,
    Member,
    Leaving { farewell: Arc<[u8]>, sent: usize },
    Closed,
}

impl Host {
    fn run(mut self) {
        loop {
            if let Err(error) = self.wait() {
                log::error!("the rendezvous ended: poll failed: {error}");
                return;
            }
            self.obey();
            // Few of many ranks have something to say at a time.
            for index in 0..self.guests.len() {
                if std::mem::replace(&mut self.guests[index].ready, false) {
                    self.serve(index);
                }
            }
            let now = Instant::now();
            self.expire(now);
            let stopping = self.delivered.stopped();
            if stopping {
                self.roster.abort(Abort::Host { reason: "its host gave up".into() });
            }
            self.conclude(stopping);
            self.guests.retain(|guest| !matches!(guest.phase, Phase::Closed));
            let leaving = |one: &Guest| matches!(one.phase, Phase::Leaving { .. });
            let all_told = !self.guests.iter().any(leaving);
            if all_told && self.roster.complete().is_some() {
                self.delivered.set();
            }
            if stopping && all_told {
                return;
            }
        }
    }

    /// Waits for a command, a readable connection, or the next deadline.
    fn wait(&mut self) -> io::Result<()> {
        let deadline = self.guests.iter().map(|guest| guest.deadline).min();
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        let timeout = deadline.map(|deadline| timespec(left(deadline)));
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        fds.extend(self.guests.iter().map(|guest| {
            let unsent = matches!(guest.phase, Phase::Leaving { .. }) && !guest.has_farewell();
            let out = if unsent { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(guest.connection.socket(), PollFlags::IN | out)
        }));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect();
        for (guest, ready) in self.guests.iter_mut().zip(ready) {
            guest.ready = ready;
        }
        Ok(())
    }

    fn obey(&mut self) {
        self.wake.clear();
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Admit(connection, introduction) => self.admit(connection, introduction),
                Command::Gone(rank) => self.roster.gone(rank),
                Command::Abort(abort) => self.roster.abort(abort),
            }
        }
    }

    fn admit(&mut self, connection: Connection, introduction: Introduction) {
        let newcomers = self.guests.len().saturating_sub(self.world as usize);
        if newcomers >= MAX_NEWCOMERS {
            log::warn!("turned away rank {} at the rendezvous: too many wait", introduction.from);
            return;
        }
        self.guests.push(Guest {
            connection,
            rank: introduction.from,
            inbox: FrameReader::default(),
            ready: true,
            phase: Phase::Newcomer,
            deadline: Instant::now() + COURTESY,
        });
    }

    fn serve(&mut self, index: usize) {
        loop {
            let guest = &mut self.guests[index];
            if let Phase::Leaving { .. } = guest.phase {
                guest.say_farewell();
            }
            if let Phase::Closed = guest.phase {
                return;
            }
            match guest.inbox.poll::<Request>(&mut guest.connection.receiver, MAX_BLOB + 64) {
                Ok(Some(request)) => self.hear(index, request),
                Ok(None) => return,
                Err(error) => {
                    match guest.phase {
                        Phase::Member => {
                            log::warn!("rank {} at the rendezvous: {error}", guest.rank);
                            self.roster.left(guest.rank);
                        }
                        Phase::Leaving { .. } if !guest.has_farewell() => {
                            log::warn!("rank {} left without its reply: {error}", guest.rank);
                        }
                        _ => {}
                    }
                    guest.phase = Phase::Closed;
                    return;
                }
            }
        }
    }

    fn hear(&mut self, index: usize, request: Request) {
        let guest = &mut self.guests[index];
        let rank = guest.rank;
        match (&guest.phase, request) {
            (Phase::Newcomer, Request::Join { world, patience_ms }) => {
                match self.roster.join(rank, world) {
                    Ok(()) => {
                        guest.phase = Phase::Member;
                        // A century is as good as forever and does not overflow the clock.
                        let patience = Duration::from_millis(patience_ms.min(3_000_000_000_000));
                        guest.deadline = Instant::now() + patience;
                    }
                    Err(refusal) => {
                        log::warn!("the rendezvous refused a process: {refusal}");
                        guest.dismiss(&farewell(&Reply::Refused(refusal)));
                    }
                }
            }
            (Phase::Member, Request::Offer(blob)) if blob.len() <= MAX_BLOB => {
                self.roster.offer(rank, blob);
            }
            // Still on its way when the reply was decided.
            (Phase::Leaving { .. }, _) => {}
            (Phase::Member, _) => {
                guest.phase = Phase::Closed;
                self.roster.left(rank);
            }
            _ => guest.phase = Phase::Closed,
        }
    }

    fn expire(&mut self, now: Instant) {
        for index in 0..self.guests.len() {
            if self.guests[index].deadline > now {
                continue;
            }
            // This process may have been stopped: what a guest has asked meanwhile counts.
            self.serve(index);
            let guest = &mut self.guests[index];
            match guest.phase {
                _ if guest.deadline > now => {}
                Phase::Member => self.roster.expire(),
                _ => guest.phase = Phase::Closed,
            }
        }
    }

    /// Once the roster is decided, sends every member off with the decision. Newcomers, which will not be heard any more
    /// where this stops, are told that there is none.
    fn conclude(&mut self, stopping: bool) {
        let has_failed = self.roster.aborted().is_some();
        let is_told = |guest: &&mut Guest| match guest.phase {
            Phase::Member => true,
            Phase::Newcomer => stopping && has_failed,
            Phase::Leaving { .. } | Phase::Closed => false,
        };
        let mut members = self.guests.iter_mut().filter(is_told).peekable();
        if members.peek().is_none() {
            return;
        }
        let reply = if let Some(blobs) = self.roster.complete() {
            let blobs = Compact::new(&blobs);
            Reply::Gathered { token: self.token.as_ref().map(|token| *token.as_bytes()), blobs }
        } else if let Some(abort) = self.roster.aborted() {
            Reply::Aborted(abort.clone())
        } else {
            return;
        };
        let farewell = farewell(&reply);
        members.for_each(|member| member.dismiss(&farewell));
    }
}

impl Guest {
    fn dismiss(&mut self, farewell: &Arc<[u8]>) {
        self.phase = Phase::Leaving { farewell: farewell.clone(), sent: 0 };
        self.deadline = Instant::now() + COURTESY;
        self.say_farewell();
    }

    /// Sends as much of the reply as goes without waiting. The connection stays open until the
    /// other side closes it: closing first could take the reply along.
    fn say_farewell(&mut self) {
        let Phase::Leaving { farewell, sent } = &mut self.phase else { return };
        let sender = &mut self.connection.sender;
        while *sent < farewell.len() || !sender.is_flushed() {
            let now = SendFlags::DONTWAIT;
            let more = match *sent < farewell.len() {
                true => sender.send(&farewell[*sent..], now),
                false => sender.flush(now).map(|()| 0),
            };
            match more {
                Ok(more) => *sent += more,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    log::warn!("rank {} left without its reply: {error}", self.rank);
                    self.phase = Phase::Closed;
                    return;
                }
            }
        }
    }

    fn has_farewell(&self) -> bool {
        matches!(&self.phase, Phase::Leaving { farewell, sent }
            if *sent == farewell.len() && self.connection.sender.is_flushed())
    }
}

fn farewell(reply: &Reply) -> Arc<[u8]> {
    match encode(reply) {
        Ok(bytes) => bytes.into(),
        Err(error) => {
            // Only a roster of more than 4 GiB cannot be encoded; its ranks learn it by the close.
            log::error!("the rendezvous cannot send its reply: {error}");
            Arc::from([])
        }
    }
}
