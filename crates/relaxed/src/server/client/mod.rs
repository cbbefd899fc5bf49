//! A worker's side of the parameter server.
//!
//! A [`Client`] has a [session] with every server. What it asks of one, it asks of all before it waits
//! for the first reply, so that the servers work at the same time.
//!
//! The worker has one clock, the same at all servers. They may differ about it for a while: a server that
//! the worker joins again may tell it that the others are further. It then goes on there, with the next
//! step, everywhere ([`Client::meet`]). A push that is under way keeps the clock that it was computed
//! for, and the worker comes back to the server at that clock, so that no worker's read passes over it.
//!
//! A connection that is lost, because the server was killed or the network was cut, is opened again,
//! for as long as the client's patience lasts. The worker then joins again, and sends again what was
//! under way and had not arrived ([`Outbox`](super::outbox::Outbox)): the caller notices nothing but the
//! time it took.

mod begin;
mod dial;
mod options;
mod queries;
mod session;
mod sockets;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use unisono_codec::sender::Scratch;

use super::core::{Age, Refusal};
use super::wire::{Measured, Setup};
use crate::{Cause, Clock};
pub use begin::{ASK_EVERY, has_begun, is_over, wait_for_worker_zero};
pub use options::{ClientOptions, Run, ServerError, Transport};
pub use queries::{fetch_weights, reports, reports_so_far};
use session::{Fault, Session, Trouble};
use sockets::ClientSockets;
pub use sockets::Stopper;

/// How often a worker says that it lives, in a timeout.
const BEATS: u32 = 4;

/// Pauses between attempts to reach a server: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How long a server may be out of reach before that is told; one that is silent has been for long.
/// Shorter: every restart is told twice, by its launcher as well. Longer: people wonder.
const TELL_AFTER: Duration = Duration::from_secs(3);

/// How long a worker that leaves waits until a server has heard it.
const FAREWELL: Duration = Duration::from_secs(5);

/// What became of a push, over all servers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pushed {
    /// Whether it is part of the weights on every server. If a connection was lost after a push had
    /// arrived and before the reply, it is taken to be.
    pub applied: bool,
    /// How old its weights were, on the first server.
    pub age: Age,
    /// Whether the run is over.
    pub finished: bool,
}

/// A gradient to be pushed: vectors of one parameter, each of all its elements. More than one only in
/// lock-step, where they are the sums of the worker's subtrees.
pub type Gradient<'a> = (usize, Vec<&'a [f32]>);

/// Takes weights: the parameter, where they begin in it, the weights.
pub type Take<'a> = dyn FnMut(usize, usize, &[f32]) + 'a;

/// Writes weights to their place.
pub type Fill<'a> = dyn FnMut(&mut [f32]) + 'a;

/// Calls what it is given with the place of some weights, to be written: the parameter, the first of them, how many.
pub type Lend<'a> = dyn FnMut(usize, usize, usize, &mut dyn FnMut(&mut [f32])) + 'a;

/// What becomes of weights that arrive.
pub enum Weights<'a, 'b> {
    /// They are taken from where they were received.
    Take(&'a mut Take<'b>),
    /// They are received where they belong.
    Lend(&'a mut Lend<'b>),
}

/// Gives the initial weights of a parameter.
type Initial<'a> = Option<&'a dyn Fn(usize) -> Vec<f32>>;

/// A worker's connection to the servers of its run. After an error it is of no more use.
pub struct Client {
    options: ClientOptions,
    sessions: Vec<Session>,
    clock: Clock,
    /// The furthest clock that a server has named.
    told: Clock,
    bound: Option<u64>,
    finished: bool,
    sockets: Arc<ClientSockets>,
    beating: Option<JoinHandle<()>>,
    scratch: Scratch,
    meter: Meter,
}

impl Client {
    /// Joins a run at all its servers. The first worker brings the initial weights of a parameter, which
    /// must be equal everywhere.
    pub fn join(
        run: &Run,
        options: ClientOptions,
        initial: &dyn Fn(usize) -> Vec<f32>,
    ) -> Result<Client, ServerError> {
        Client::join_stoppable(run, options, initial, |_| ())
    }

    /// As [`Client::join`]. `begins` gets something that ends this wait, and every later one.
    pub fn join_stoppable(
        run: &Run,
        options: ClientOptions,
        initial: &dyn Fn(usize) -> Vec<f32>,
        begins: impl FnOnce(Stopper),
    ) -> Result<Client, ServerError> {
        let setups = run.setups(options.servers.len().max(1));
        let sockets =
            ClientSockets::new(setups.len()).map_err(|error| options.unreachable(0, error))?;
        let sockets = Arc::new(sockets);
        begins(Stopper(sockets.clone()));
        let life = options.life.map_or_else(|| queries::life(run, &options, &sockets), Ok)?;
        let options = ClientOptions { life: Some(life), ..options };
        let session = |(number, setup): (usize, Setup)| Session::new(number, setup, &options);
        let no_thread = |error: io::Error| {
            let what = "there is no thread to say that this worker lives";
            options.unreachable(0, format!("{what}: {error}"))
        };
        let beating = ClientSockets::beat(&sockets, run.timeout / BEATS).map_err(no_thread)?;
        let mut client = Client {
            sessions: setups.into_iter().enumerate().map(session).collect(),
            clock: Clock::START,
            told: Clock::START,
            bound: run.level.bound(),
            finished: false,
            beating: Some(beating),
            scratch: Scratch::default(),
            meter: Meter::new(),
            sockets,
            options,
        };
        client.meet(Some(initial))?;
        Ok(client)
    }

    /// Steps that this worker has finished. Data of the next step follows from it: it stays the same
    /// from a pull to the push of what was computed from it.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Whether the run is over.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Whether bulk data lies in common memory on the way to every server.
    pub fn is_shared(&self) -> bool {
        self.sessions.iter().all(Session::is_shared)
    }

    /// Bytes sent and received so far, wherever they lay.
    pub fn traffic(&self) -> u64 {
        self.sessions.iter().map(Session::traffic).sum()
    }

    /// Something that ends every wait.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.sockets.clone())
    }

    /// Pulls the weights of all parameters, or of some; waits until the worker may read. If a connection
    /// is lost meanwhile, some may be given more than once, the last time as they should be.
    pub fn pull(&mut self, only: Option<&[usize]>, take: &mut Take<'_>) -> Result<(), ServerError> {
        self.pull_by(only, Weights::Take(take))
    }

    /// As [`Client::pull`], for weights that have a place already: they are written there at once, and not copied once more.
    pub fn pull_into(
        &mut self,
        only: Option<&[usize]>,
        lend: &mut Lend<'_>,
    ) -> Result<(), ServerError> {
        self.pull_by(only, Weights::Lend(lend))
    }

    fn pull_by(
        &mut self,
        only: Option<&[usize]>,
        mut weights: Weights<'_, '_>,
    ) -> Result<(), ServerError> {
        let start = Instant::now();
        self.read(only, &mut weights)?;
        self.meter.held += start.elapsed();
        self.meter.blocked += start.elapsed();
        Ok(())
    }

    /// Pushes gradients, and waits until the servers have said what became of them. Of `measured`,
    /// times of waiting and bytes are filled in.
    ///
    /// # Panics
    /// If a vector is shorter than its parameter.
    pub fn push(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> Result<Pushed, ServerError> {
        let start = Instant::now();
        let measured = self.begin(gradients, measured)?;
        let pushed = self.settle(gradients, measured)?;
        self.meter.blocked += start.elapsed();
        Ok(pushed)
    }

    /// Pushes gradients and pulls the weights for the next step, in one round trip.
    ///
    /// # Panics
    /// If a vector is shorter than its parameter.
    pub fn push_pull(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
        take: &mut Take<'_>,
    ) -> Result<Pushed, ServerError> {
        self.push_pull_by(gradients, measured, Weights::Take(take))
    }

    /// As [`Client::push_pull`], for weights that have a place already.
    ///
    /// # Panics
    /// If a vector is shorter than its parameter.
    pub fn push_pull_into(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
        lend: &mut Lend<'_>,
    ) -> Result<Pushed, ServerError> {
        self.push_pull_by(gradients, measured, Weights::Lend(lend))
    }

    fn push_pull_by(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
        mut weights: Weights<'_, '_>,
    ) -> Result<Pushed, ServerError> {
        let start = Instant::now();
        let measured = self.begin(gradients, measured)?;
        for session in &mut self.sessions {
            // The clock after the push. If it becomes another, this is asked again.
            let _ = session.ask(self.clock.next(), self.bound, None);
        }
        let pushed = self.settle(gradients, measured)?;
        let settled = Instant::now();
        self.read(None, &mut weights)?;
        self.meter.held += settled.elapsed();
        self.meter.blocked += start.elapsed();
        Ok(pushed)
    }

    /// Leaves the run, so that no worker waits for this one.
    pub fn leave(mut self) {
        let patience = self.options.patience.min(FAREWELL);
        for session in &mut self.sessions {
            session.leave(patience);
        }
    }

    /// Sends the push to every server; what was measured.
    fn begin(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> Result<Measured, ServerError> {
        self.meet(None)?;
        if let Some(session) = self.sessions.iter().find(|s| s.outbox.pending().is_some()) {
            // Whether that one has arrived is not known, and its gradients are gone.
            let what = "a push before this one has failed; join again in a later life";
            return Err(ServerError::Protocol { server: session.number, what: what.into() });
        }
        let measured = self.meter.complete(measured);
        for session in &mut self.sessions {
            session.begin(self.clock, gradients, &mut self.scratch);
        }
        for session in &mut self.sessions {
            // What fails now is found out when the reply is waited for.
            let _ = session.send_push(gradients, measured);
        }
        Ok(measured)
    }

    /// Waits until every server has said what became of the push, and sends it again where it was lost.
    /// The step is then finished.
    fn settle(
        &mut self,
        gradients: &[Gradient<'_>],
        measured: Measured,
    ) -> Result<Pushed, ServerError> {
        let mut all = Pushed { applied: true, ..Pushed::default() };
        let is_pending = |session: &Session| session.outbox.pending().is_some();
        while let Some((session, ready)) = self.next_event(is_pending) {
            match ready.and_then(|()| self.sessions[session].receive_pushed()) {
                Ok(settled) => {
                    self.told = self.told.max(settled.clock);
                    self.finished |= settled.pushed.finished;
                    all.applied &= settled.pushed.applied;
                    if session == 0 {
                        self.bound = settled.bound;
                        all.age = settled.pushed.age;
                    }
                }
                Err(fault) => {
                    self.give_up(session, fault)?;
                    self.come_back(session)?;
                    if is_pending(&self.sessions[session]) {
                        let _ = self.sessions[session].send_push(gradients, measured);
                    }
                }
            }
        }
        self.clock = self.told.max(self.clock.next());
        all.finished = self.finished;
        Ok(all)
    }

    /// Joins a server again in the middle of a push: at its clock, or where it has arrived, after it.
    fn come_back(&mut self, session: usize) -> Result<(), ServerError> {
        loop {
            if !self.sessions[session].is_open() {
                self.open(session, None)?;
            }
            let pending = self.sessions[session].outbox.pending();
            match self.sessions[session].enter(pending.map_or(self.clock.next(), |push| push.clock))
            {
                Ok(()) => return Ok(()),
                Err(fault) => self.give_up(session, fault)?,
            }
        }
    }

    /// Takes the weights of every server at the worker's clock, and asks for those that were not
    /// asked for yet.
    fn read(
        &mut self,
        only: Option<&[usize]>,
        weights: &mut Weights<'_, '_>,
    ) -> Result<(), ServerError> {
        let mut taken = vec![None; self.sessions.len()];
        loop {
            self.meet(None)?;
            let clock = self.clock;
            let is_missing = |session: &Session| taken[session.number] != Some(clock);
            for session in self.sessions.iter_mut().filter(|session| is_missing(session)) {
                if session.asked.is_none() {
                    let _ = session.ask(clock, self.bound, only);
                }
            }
            let Some((session, ready)) = self.next_event(is_missing) else { return Ok(()) };
            match ready.and_then(|()| self.sessions[session].receive_weights(weights)) {
                Ok(()) => taken[session] = Some(clock),
                Err(fault) => self.mend(session, fault)?,
            }
        }
    }

    /// Waits until a server says something that is waited for, or is silent for too long, or the
    /// connection to any server is lost: which one, and what is wrong with it. `None` if nothing is waited
    /// for.
    ///
    /// All are watched, since a server that was restarted may wait for this worker, and another worker
    /// for that server, and this one for that worker.
    fn next_event(
        &mut self,
        is_waited_for: impl Fn(&Session) -> bool,
    ) -> Option<(usize, Result<(), Fault>)> {
        let waited_for: Vec<bool> = self.sessions.iter().map(is_waited_for).collect();
        let first = waited_for.iter().position(|waited_for| *waited_for)?;
        if self.sessions.len() == 1 {
            return Some((first, Ok(())));
        }
        loop {
            let slice = self.sessions[first].slice().and_then(|slice| slice.try_into().ok());
            let mut watched = Vec::with_capacity(self.sessions.len());
            for (session, waited_for) in self.sessions.iter().zip(&waited_for) {
                let Some(socket) = session.socket() else {
                    return Some((session.number, Err(Fault::ended())));
                };
                let flags = if *waited_for { PollFlags::IN } else { PollFlags::empty() };
                watched.push(PollFd::new(socket, flags | PollFlags::RDHUP));
            }
            let unread: Vec<bool> = self.sessions.iter().map(Session::has_unread).collect();
            let slice = if unread.contains(&true) { Some(Timespec::default()) } else { slice };
            let start = Instant::now();
            match poll(&mut watched, slice.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // If it cannot be told, the first will do, as long as it takes.
                Err(_) => return Some((first, Ok(()))),
            }
            let events = watched.iter().map(|fd| !fd.revents().is_empty()).zip(unread);
            let events: Vec<bool> = events.map(|(event, unread)| event || unread).collect();
            for (session, (has_event, waited_for)) in
                self.sessions.iter_mut().zip(events.into_iter().zip(&waited_for))
            {
                let heard = match (waited_for, has_event) {
                    (true, true) if session.has_message() => Some(Ok(())),
                    (true, true) | (false, false) => None,
                    (true, false) => session.waited(start.elapsed()).err().map(Err),
                    (false, true) => Some(Err(Fault::ended())),
                };
                if let Some(heard) = heard {
                    return Some((session.number, heard));
                }
            }
        }
    }

    /// Has all servers agree on the worker's clock: joins where it has not, and enters at the furthest
    /// clock where it is at another.
    fn meet(&mut self, initial: Initial<'_>) -> Result<(), ServerError> {
        loop {
            if self.sockets.is_stopped() {
                return Err(ServerError::Stopped);
            }
            for session in 0..self.sessions.len() {
                if !self.sessions[session].is_open() {
                    self.open(session, initial)?;
                }
            }
            self.clock = self.clock.max(self.told);
            let clock = self.clock;
            let differs = |session: &Session| {
                session.at != Some(clock) || session.asked.is_some_and(|asked| asked != clock)
            };
            let Some(session) = self.sessions.iter().position(differs) else { return Ok(()) };
            let done = match self.sessions[session].asked {
                None => self.sessions[session].enter(clock),
                // They may be long in coming. On a new connection nothing is under way.
                Some(_) => Err(Fault::Lost(io::Error::other("weights of another clock are due"))),
            };
            if let Err(fault) = done {
                self.mend(session, fault)?;
            }
        }
    }

    /// Joins a server over a new connection.
    fn open(&mut self, session: usize, initial: Initial<'_>) -> Result<(), ServerError> {
        loop {
            match self.try_to_open(session, initial) {
                Ok(()) => return Ok(()),
                Err(fault) => self.give_up(session, fault)?,
            }
        }
    }

    fn try_to_open(&mut self, session: usize, initial: Initial<'_>) -> Result<(), Fault> {
        let of = &mut self.sessions[session];
        let heartbeat = of.connect(&self.options, self.options.worker, self.sockets.abort())?;
        self.sockets.open(session, heartbeat).map_err(Fault::Fatal)?;
        let welcome = of.join(initial)?;
        // It is there. How long to wait for it counts from the next time that it is not.
        of.trouble.iter_mut().for_each(|trouble| trouble.since = Instant::now());
        self.told = self.told.max(welcome.clock);
        self.finished |= welcome.finished;
        if session == 0 {
            self.bound = welcome.bound;
        }
        Ok(())
    }

    /// Does what can be done about a fault while no push is under way. A worker that is somewhere else
    /// than it thought goes on there.
    fn mend(&mut self, session: usize, fault: Fault) -> Result<(), ServerError> {
        match fault {
            Fault::Rejoin(Refusal::OtherClock { clock }) => {
                self.told = self.told.max(clock);
                self.sessions[session].at = None;
                Ok(())
            }
            other => self.give_up(session, other),
        }
    }

    /// Gives a connection up, and waits a little before the next attempt; or gives up altogether.
    fn give_up(&mut self, session: usize, fault: Fault) -> Result<(), ServerError> {
        let is_silent =
            matches!(&fault, Fault::Lost(error) if error.kind() == io::ErrorKind::TimedOut);
        let last: Cause = match fault {
            _ if self.sockets.is_stopped() => return Err(ServerError::Stopped),
            Fault::Fatal(error) => return Err(error),
            Fault::Lost(error) => error.into(),
            Fault::Rejoin(refusal) => refusal.into(),
        };
        let of = &mut self.sessions[session];
        of.close();
        self.sockets.close(session);
        let address = self.options.servers.get(session).map_or("", String::as_str);
        let ClientOptions { worker, patience, .. } = self.options;
        log::info!("worker {worker}: server {session} at {address}: {last}; trying again");
        let trouble = of.trouble.get_or_insert_with(Trouble::begin);
        if trouble.since.elapsed() + trouble.pause > patience {
            let address = address.to_owned();
            return Err(ServerError::Unreachable { server: session, address, last });
        }
        if !trouble.is_told && (is_silent || trouble.since.elapsed() > TELL_AFTER) {
            trouble.is_told = true;
            log::warn!(
                "worker {worker} waits for server {session} at {address}, up to {patience:?}: {last}"
            );
        }
        let pause = trouble.pause;
        trouble.pause = (pause * 2).min(LONGEST_PAUSE);
        self.sockets.pause(pause);
        if self.sockets.is_stopped() { Err(ServerError::Stopped) } else { Ok(()) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.sockets.finish();
        if let Some(beating) = self.beating.take() {
            let _ = beating.join();
        }
    }
}

/// What a client measures from one push to the next.
struct Meter {
    since: Instant,
    held: Duration,
    blocked: Duration,
}

impl Meter {
    fn new() -> Meter {
        Meter { since: Instant::now(), held: Duration::ZERO, blocked: Duration::ZERO }
    }

    /// Fills in what is known of a step, and begins anew.
    fn complete(&mut self, measured: Measured) -> Measured {
        let completed = Measured {
            held: self.held.as_secs_f64(),
            blocked: self.blocked.as_secs_f64(),
            wall: self.since.elapsed().as_secs_f64(),
            ..measured
        };
        *self = Meter::new();
        completed
    }
}
