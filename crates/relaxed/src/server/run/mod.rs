//! What a server does with what it is told: carries out what the [core](super::core) decides.
//!
//! One lock orders everything that matters: under it the core decides, every piece's next version is
//! given out, and what was decided is written down. The arithmetic comes after, without the lock: the
//! [store](super::store) lets every piece see its updates in the order of their versions. A read takes
//! the versions that were given out when it was admitted, and waits for these, so that it contains
//! everything that was settled before.
//!
//! What cannot be written down ends the run here. Until the server is started again, nothing more is
//! said to any worker: the core may know of a push that the journal does not.
//!
//! Only the connection by which a worker joined last counts. What still arrives on an older one is
//! refused.
//!
//! A server that starts *gathers* the workers. In lock-step the first update waits until all have come,
//! for it is one of all. One that goes on after a crash waits for the workers that were there, though
//! not longer than for a silent one that takes its time to try again: else the first to reconnect would
//! take the others for gone, and read, or push alone, without them. So does one that wakes up after it
//! was stopped: its workers may have given their connections up meanwhile, and of each it hears that by
//! the end of the old connection or by the new one, whichever comes first.

mod checked;
mod disk;
mod round;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use super::client::LONGEST_PAUSE;
use super::core::{self, Age, Core, Joined, PushId, Refusal};
use super::crew::Crew;
use super::journal::{Journal, JournalError};
use super::link::Bulk;
use super::lives::Lives;
use super::source::Source;
use super::store::{Change, Compensation, Store, Weights};
use super::wire::{Measured, Part, Reply, Report, Setup};
use crate::adaptive_bound::{AdaptiveBound, Limits};
use crate::events::Recorder;
use crate::spec::Level;
use crate::staleness::StalenessPolicy;
use crate::{Cause, Clock, Life};
use checked::{CheckedSetup, Gradient};
pub(super) use checked::{MOST_WORKERS, SLACK, total_bytes};
pub use disk::Files;
pub(super) use disk::Waiting;
use round::Contribution;
use turns::Turns;

/// How often a thread that serves a worker and waits checks whether that worker is still there. Longer: a dead
/// worker is noticed later, if it dies while it waits. Shorter: more system calls.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// Elements of a push for each thread that updates pieces, at the least. Fewer: waking a thread takes longer than it
/// saves.
const MANY: usize = 1 << 18;

/// Threads that make one update, at most. More: some would wait for memory, where those of other updates could
/// compute.
const MOST_THREADS: usize = 4;

/// No worker gets so far, and one that says so cannot make clocks overflow.
const LAST_CLOCK: Clock = Clock(1 << 62);

/// Why a server cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// What was set up makes no sense.
    #[error("a run that cannot be served: {0}")]
    Setup(#[source] Cause),
    /// The journal.
    #[error("the journal: {0}")]
    Journal(#[from] JournalError),
    /// The journal is not one of a server, or of another version.
    #[error("the journal holds something else than a server's state: {0}; restore the folder")]
    Content(#[source] Cause),
    /// The records of the run.
    #[error("the records of the run: {0}")]
    Records(#[source] Cause),
    /// One of its threads has panicked.
    #[error("a thread of this server panicked, which is a bug: {0}")]
    Panicked(String),
}

/// Why a request was not carried out.
#[derive(Debug)]
pub enum Unserved {
    /// The core refused it.
    Refused(Refusal),
    /// It makes no sense.
    Invalid(String),
    /// The worker that asked is gone, or the server is about to be.
    Gone,
    /// The server cannot go on.
    Failed(ServeError),
}

impl From<Refusal> for Unserved {
    fn from(refusal: Refusal) -> Unserved {
        Unserved::Refused(refusal)
    }
}

/// What asks: a worker in one of its lives, by one of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The worker.
    pub worker: u32,
    /// Which of its lives.
    pub life: Life,
    /// The connection: later ones have larger numbers.
    pub connection: u64,
    /// Whether the worker is on this host, and computes on its cores.
    pub is_here: bool,
}

/// A run, at one server.
pub struct ServedRun {
    checked: CheckedSetup,
    store: Store,
    state: Mutex<State>,
    changed: Condvar,
    /// When the run began, in seconds of the epoch.
    began: f64,
    /// When this process took it up, and how many seconds after it began.
    awake: Instant,
    awake_at: f64,
    /// When the process had a turn, counted from when it took the run up.
    turns: Turns,
    snapshot_after: u64,
    /// Whether gradients are written down before they are applied.
    keeps_journal: bool,
    /// Threads that this process can run at once.
    cores: usize,
    crew: Crew,
}

struct State {
    core: Core,
    /// The lives that this server has given out.
    lives: Lives,
    /// The version of every piece that was given out last.
    versions: Vec<u64>,
    /// In lock-step: the gradients of the round.
    round: BTreeMap<u32, Contribution>,
    /// The connection of each worker: that by which it joined last.
    connections: BTreeMap<u32, u64>,
    /// The workers of these that are on this host.
    here: BTreeSet<u32>,
    /// Until when the workers are gathered.
    gathers_until: Option<Duration>,
    /// What each worker read last, to compensate.
    reads: BTreeMap<u32, Vec<Option<Weights>>>,
    adaptive: Option<AdaptiveBound>,
    journal: Option<Journal>,
    recorder: Option<Box<dyn Recorder>>,
    /// Whether something could not be written down.
    failed: bool,
}

impl ServedRun {
    /// Checks whether a run can be served.
    pub fn check(setup: &Setup) -> Result<(), ServeError> {
        CheckedSetup::new(setup.clone()).map(drop)
    }

    fn with(checked: CheckedSetup, weights: Vec<Vec<f32>>, files: &Files, began: f64) -> ServedRun {
        let bytes: u64 = weights.iter().map(|weights| 4 * weights.len() as u64).sum();
        let adapts = checked.setup.level == Level::SspAuto;
        let state = State {
            core: Core::new(checked.rules()),
            lives: Lives::default(),
            versions: vec![0; weights.len()],
            round: BTreeMap::new(),
            connections: BTreeMap::new(),
            here: BTreeSet::new(),
            gathers_until: checked.rounds.as_ref().map(|_| Duration::MAX),
            reads: BTreeMap::new(),
            adaptive: adapts.then(|| AdaptiveBound::new(Limits::default())),
            journal: None,
            recorder: None,
            failed: false,
        };
        ServedRun {
            store: Store::new(&checked.setup.optimizer, weights),
            turns: Turns::new(checked.timeout()),
            checked,
            state: Mutex::new(state),
            changed: Condvar::new(),
            began,
            awake: Instant::now(),
            awake_at: 0.0,
            snapshot_after: files.snapshot_after.unwrap_or((8 * bytes).max(64 << 20)),
            keeps_journal: files.journal.is_some(),
            // It reads files: not for every push.
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            crew: Crew::default(),
        }
    }

    /// What tells this run from others.
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.checked.fingerprint
    }

    /// The number of a new life of a worker, larger than those of all before.
    pub fn next_life(&self, worker: u32) -> Result<Life, Unserved> {
        self.checked.admits(worker).map_err(Unserved::Invalid)?;
        let mut state = self.lock()?;
        let known = state.core.life(worker);
        let life = state.lives.next(worker, known);
        self.write_down_life(&mut state, worker, life)?;
        Ok(life)
    }

    /// A worker comes or comes back, by this connection.
    pub fn join(&self, caller: Caller) -> Result<Reply, Unserved> {
        self.checked.admits(caller.worker).map_err(Unserved::Invalid)?;
        let mut state = self.lock()?;
        let newest = state.connections.get(&caller.worker).copied();
        if newest.is_some_and(|newest| newest > caller.connection) {
            return Err(state.stranger(caller));
        }
        let before = state.core.clock(caller.worker, caller.life);
        let mut joined: Joined = state.core.join(caller.worker, caller.life, self.now())?;
        if newest.is_some() {
            // That connection is lost, though its thread has not noticed yet.
            self.gather_if_slept(&mut state);
        }
        // Where no worker waits for it, or all do until all are back, it goes on where it was.
        let keeps_place =
            self.checked.setup.level.bound().is_none() || state.gathers_until.is_some();
        if self.checked.rounds.is_none() && keeps_place {
            joined.clock = before.unwrap_or(joined.clock);
        }
        state.connections.insert(caller.worker, caller.connection);
        match caller.is_here {
            true => state.here.insert(caller.worker),
            false => state.here.remove(&caller.worker),
        };
        // Until it enters, it holds no other back.
        self.settle_rounds(&mut state)?;
        let (bound, finished) = (self.bound(&state), state.core.is_finished());
        Ok(Reply::Joined { joined, bound, finished })
    }

    /// A worker begins.
    pub fn enter(&self, caller: Caller, clock: Clock) -> Result<Reply, Unserved> {
        if clock > LAST_CLOCK {
            return Err(Unserved::Invalid(format!("a worker at clock {clock}")));
        }
        let mut state = self.lock()?;
        state.expect_current(caller)?;
        state.core.enter(caller.worker, caller.life, clock)?;
        self.settle_rounds(&mut state)?;
        Ok(Reply::Done)
    }

    /// A worker says that it is done: no other waits for it.
    pub fn leave(&self, caller: Caller) -> Result<(), Unserved> {
        self.remove(&mut *self.lock()?, caller)
    }

    /// A connection has ended. If its worker has not come back by another one meanwhile, it is gone.
    pub fn lose(&self, caller: Caller) -> Result<(), Unserved> {
        let mut state = self.lock()?;
        if state.is_current(caller) {
            self.gather_if_slept(&mut state);
        }
        self.remove(&mut state, caller)
    }

    fn remove(&self, state: &mut State, caller: Caller) -> Result<(), Unserved> {
        if !state.is_current(caller) {
            return Ok(());
        }
        state.connections.remove(&caller.worker);
        state.here.remove(&caller.worker);
        state.core.leave(caller.worker, caller.life);
        state.reads.remove(&caller.worker);
        self.settle_rounds(state)
    }

    /// To be called where a connection is lost: if that is because this process slept, its worker is
    /// about to come back, and perhaps others.
    fn gather_if_slept(&self, state: &mut State) {
        if self.turns.has_slept(self.now()) && self.checked.setup.level.bound().is_some() {
            // Never shorter than it was: the first update waits for all.
            state.gathers_until = state.gathers_until.max(Some(self.now() + self.return_time()));
        }
    }

    /// How long workers are waited for that have lost their connections: as for silent ones, and for as
    /// long as they may pause before they try again.
    fn return_time(&self) -> Duration {
        self.timeout() + LONGEST_PAUSE
    }

    /// A worker lives.
    pub fn hear(&self, caller: Caller) {
        let now = self.now();
        if let Ok(mut state) = self.lock() {
            state.core.hear(caller.worker, caller.life, now);
        }
    }

    /// Takes silent workers for gone, and no longer waits for those that did not come; unless other
    /// threads are busy here: whether it could.
    pub fn expire(&self) -> Result<bool, Unserved> {
        let Some(mut state) = self.lock_soon()? else { return Ok(false) };
        let now = self.now();
        // No worker could be heard while this process slept. From then on all have a timeout.
        let has_slept = self.turns.has_slept(self.now());
        let silent = if has_slept { Vec::new() } else { state.core.expire(now) };
        for worker in silent {
            let timeout = self.checked.timeout();
            log::warn!("worker {worker} was silent for {timeout:?}: the others go on without it");
            state.reads.remove(&worker);
        }
        self.settle_rounds(&mut state)?;
        Ok(true)
    }

    /// The process has a turn. To be called several times in a timeout, whatever else happens here.
    pub fn tick(&self) {
        self.turns.take(self.now());
    }

    /// How long a worker may be silent.
    pub fn timeout(&self) -> Duration {
        self.checked.timeout()
    }

    /// A thread has panicked: no other may wait for what it leaves undone.
    pub fn abandon(&self) {
        self.store.abandon();
        self.changed.notify_all();
    }

    /// The weights for a worker at this clock, as soon as they are fresh enough. `asked` is by how much
    /// it may be ahead, where that adapts: servers must agree on it, and the worker asks them all.
    /// `is_over` says whether the worker is gone.
    pub fn pull(
        &self,
        caller: Caller,
        clock: Clock,
        asked: Option<u64>,
        pieces: Option<&[u32]>,
        is_over: impl Fn() -> bool,
    ) -> Result<Vec<(u32, u64, Weights)>, Unserved> {
        let wanted = self.wanted(pieces)?;
        let bound = match self.checked.setup.level {
            Level::SspAuto => Some(asked.unwrap_or(0).min(Limits::default().most)),
            _ => self.checked.setup.level.bound(),
        };
        let Caller { worker, life, .. } = caller;
        let mut state = self.lock()?;
        loop {
            state.expect_current(caller)?;
            let now = self.now();
            state.core.hear(worker, life, now);
            let is_held = bound.is_some() && self.is_gathering(&mut state);
            if !is_held && state.core.read(worker, life, clock, bound)? {
                break;
            }
            state = self.wait(state)?;
            if is_over() {
                return Err(Unserved::Gone);
            }
        }
        let versions: Vec<u64> = wanted.iter().map(|piece| state.versions[*piece]).collect();
        drop(state);
        let read = self.read(wanted.into_iter().zip(versions));
        if self.lambda().is_some() {
            let mut state = self.lock()?;
            let count = self.checked.pieces().len();
            let mine = state.reads.entry(worker).or_insert_with(|| vec![None; count]);
            for (piece, _, weights) in &read {
                mine[*piece as usize] = Some(weights.clone());
            }
        }
        Ok(read)
    }

    /// The weights as they are.
    pub fn weights(&self) -> Result<Vec<(u32, u64, Weights)>, Unserved> {
        let versions = self.lock()?.versions.clone();
        Ok(self.read(versions.into_iter().enumerate()))
    }

    /// The weights of pieces, each of this version or a later one.
    fn read(&self, pieces: impl Iterator<Item = (usize, u64)>) -> Vec<(u32, u64, Weights)> {
        let read = |(piece, version)| {
            let (version, weights) = self.store.read(piece, version);
            (piece as u32, version, weights)
        };
        pieces.map(read).collect()
    }

    /// How things are.
    pub fn report(&self) -> Result<Report, Unserved> {
        let state = self.lock()?;
        Ok(Report {
            updates: state.core.updates(),
            ledger: state.core.ledger(),
            present: state.core.present_members(),
            finished: state.core.is_finished(),
            seconds: self.seconds(),
        })
    }

    /// The lengths of the parts of a push, in bytes, if they can be those of this worker.
    pub fn lengths(&self, worker: u32, parts: &[Part]) -> Result<Vec<usize>, String> {
        self.checked.lengths(worker, parts)
    }

    /// Whether the gradient of a push is kept before it is applied: then it has to be in memory that is this process's
    /// alone.
    pub fn keeps_gradients(&self) -> bool {
        self.keeps_journal || self.checked.rounds.is_some()
    }

    /// A gradient has come, in parts of the right [lengths](ServedRun::lengths): what becomes of it. If it is
    /// [kept](ServedRun::keeps_gradients) or encoded, it is in this process's own memory. `is_over` says whether the
    /// worker is gone.
    pub fn push(
        &self,
        caller: Caller,
        push: PushId,
        measured: Measured,
        parts: &[(Part, Bulk<'_>)],
        is_over: impl Fn() -> bool,
    ) -> Result<Reply, Unserved> {
        if (push.worker, push.life) != (caller.worker, caller.life) {
            return Err(Unserved::Invalid("a push in the name of another worker or life".into()));
        }
        let gradients = self.checked.decode(push, parts, self.keeps_gradients());
        let gradients = gradients.map_err(Unserved::Invalid)?;
        match &self.checked.rounds {
            Some(_) => self.push_round(caller, push, measured, gradients, is_over),
            None => self.push_now(caller, push, measured, gradients),
        }
    }

    /// Settles a push by itself.
    fn push_now(
        &self,
        caller: Caller,
        push: PushId,
        measured: Measured,
        mut gradients: Vec<Gradient<'_>>,
    ) -> Result<Reply, Unserved> {
        let mut state = self.lock()?;
        state.expect_current(caller)?;
        let now = self.now();
        state.core.hear(push.worker, push.life, now);
        let entry = match state.core.push(push)? {
            core::Pushed::Settled(entry) => entry,
            _ => return Ok(self.pushed(&state, true, Age::default(), push.clock.next())),
        };
        let (age, applied, factor) = (entry.pushes[0].1, entry.update > 0, entry.factor);
        if !applied {
            gradients.clear();
        }
        let mut changes = Vec::with_capacity(gradients.len());
        for (piece, source) in gradients {
            state.versions[piece] += 1;
            let version = state.versions[piece];
            let read = state.reads.get(&push.worker).and_then(|pieces| pieces[piece].clone());
            let by = self.lambda().zip(read);
            let by = by.map(|(lambda, then)| Compensation { lambda, then });
            let mut change = Change { piece, version, source, by };
            // What is written down is what is applied, so it is corrected before. Else it is corrected block by block.
            if self.keeps_journal
                && let Source::Values(gradient) = &mut change.source
                && let Some(by) = change.by.take()
            {
                // Waits for the versions before, whose threads need no lock to make them.
                self.store.compensate(piece, version, &by, gradient.to_mut());
            }
            changes.push(change);
        }
        let reply = self.pushed(&state, applied, age, push.clock.next());
        self.write_down(&mut state, entry, vec![measured], &changes)?;
        // The worker whose push this is waits.
        let others = state.here.len() - usize::from(state.here.contains(&push.worker));
        drop(state);
        self.changed.notify_all();
        self.apply(factor, &changes, others);
        let mut state = self.lock()?;
        self.snapshot_if_due(&mut state)?;
        Ok(reply)
    }

    /// Updates pieces, by several threads if that is much and there are cores for them, beside that of this thread and those
    /// on which so many workers are `busy` meanwhile.
    fn apply(&self, factor: f64, changes: &[Change<'_>], busy: usize) {
        let elements: usize = changes.iter().map(|change| change.source.len()).sum();
        let idle = self.cores.saturating_sub(1 + busy);
        let helpers = (elements / MANY).clamp(1, MOST_THREADS).min(1 + idle) - 1;
        match helpers {
            0 => self.store.apply(factor, changes),
            _ => self.store.apply_shared(factor, changes, |work| {
                self.crew.share(helpers, idle, work);
            }),
        }
    }

    /// Whether workers are still waited for that have not come.
    fn is_gathering(&self, state: &mut State) -> bool {
        let Some(until) = state.gathers_until else { return false };
        if state.core.present_members() < self.checked.setup.workers {
            if self.now() < until {
                return true;
            }
            log::warn!("not all workers have come back: the others go on without them");
        }
        state.gathers_until = None;
        false
    }

    fn wanted(&self, pieces: Option<&[u32]>) -> Result<Vec<usize>, Unserved> {
        let count = self.checked.pieces().len();
        let Some(pieces) = pieces else { return Ok((0..count).collect()) };
        // Each at most once, so that no reply is larger than the weights.
        if !pieces.is_sorted_by(|a, b| a < b) {
            return Err(Unserved::Invalid("the pieces to be pulled are not in order".into()));
        }
        match pieces.last() {
            Some(last) if *last as usize >= count => {
                Err(Unserved::Invalid(format!("there is no piece {last}")))
            }
            _ => Ok(pieces.iter().map(|piece| *piece as usize).collect()),
        }
    }

    fn pushed(&self, state: &State, applied: bool, age: Age, clock: Clock) -> Reply {
        let (bound, finished) = (self.bound(state), state.core.is_finished());
        Reply::Pushed { applied, age, clock, bound, finished }
    }

    fn bound(&self, state: &State) -> Option<u64> {
        state.adaptive_bound().or(self.checked.setup.level.bound())
    }

    fn lambda(&self) -> Option<f32> {
        match self.checked.setup.stale {
            StalenessPolicy::Compensate(lambda) => Some(lambda),
            _ => None,
        }
    }

    fn now(&self) -> Duration {
        self.awake.elapsed()
    }

    /// Since the run began. The clock of the machine may be set while it goes on.
    fn seconds(&self) -> f64 {
        self.awake_at + self.awake.elapsed().as_secs_f64()
    }

    /// Waits for a change, though not for long.
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>, Unserved> {
        // A thread that has panicked while it was locked has said so.
        let waited = self.changed.wait_timeout(state, CHECK_EVERY).map_err(|_| Unserved::Gone)?;
        if waited.0.failed { Err(Unserved::Gone) } else { Ok(waited.0) }
    }

    fn lock(&self) -> Result<MutexGuard<'_, State>, Unserved> {
        let state = self.state.lock().map_err(|_| Unserved::Gone)?;
        if state.failed { Err(Unserved::Gone) } else { Ok(state) }
    }

    /// Locks it if that does not take long: another thread may be writing down everything.
    fn lock_soon(&self) -> Result<Option<MutexGuard<'_, State>>, Unserved> {
        const PAUSE: Duration = Duration::from_millis(1);
        // A small part of a timeout, so that ticks are not late.
        let deadline = Instant::now() + (self.timeout() / 16).min(100 * PAUSE);
        loop {
            match self.state.try_lock() {
                Ok(state) if state.failed => return Err(Unserved::Gone),
                Ok(state) => return Ok(Some(state)),
                Err(TryLockError::Poisoned(_)) => return Err(Unserved::Gone),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl State {
    /// The bound, if it adapts.
    fn adaptive_bound(&self) -> Option<u64> {
        self.adaptive.as_ref().map(AdaptiveBound::bound)
    }

    /// Whether this is the connection by which the worker joined last.
    fn is_current(&self, caller: Caller) -> bool {
        self.connections.get(&caller.worker) == Some(&caller.connection)
    }

    /// Refuses what comes by any other connection.
    fn expect_current(&self, caller: Caller) -> Result<(), Unserved> {
        match self.is_current(caller) {
            true => Ok(()),
            false => Err(self.stranger(caller)),
        }
    }

    fn stranger(&self, caller: Caller) -> Unserved {
        match self.core.is_superseded(caller.worker, caller.life) {
            true => Refusal::Superseded.into(),
            false => Refusal::NotPresent.into(),
        }
    }
}

#[cfg(test)]
impl ServedRun {
    /// What a defect of a server thread would do.
    pub fn panic_while_locked(&self) {
        let _state = self.state.lock();
        panic!("on purpose");
    }

    /// A wait that only the end of the server ends.
    pub fn wait_for_a_version_that_never_comes(&self) {
        self.store.read(0, u64::MAX);
    }
}
