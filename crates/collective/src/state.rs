//! What the threads of a group share: whether it still stands, and if not, why.

mod stall;

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::error::{Error, Loss};
use crate::helpers::Rest;
use crate::history::History;
use crate::places::{self, Places};
use crate::traffic::Meter;
use crate::waits::{Statement, Waits};
use crate::work::Work;
pub use stall::StallWatch;
use unisono_net::rank::{Listed, Rank};

/// How long a broken link waits for the monitor to say whose fault it is. A process that dies
/// closes its control connections as well, so that this only runs out where nothing but the link broke.
/// Longer: that is noticed later. Shorter: on a busy machine, a bystander may be blamed.
const VERDICT: Duration = Duration::from_millis(500);

/// Ranks for which that is enough. More of them share the cores of a host, and news take more steps.
const QUICK_WORLD: usize = 64;

/// How often a waiting call asks whether to go on. Longer: it answers later. Shorter: more idle work.
pub const ASK_EVERY: Duration = Duration::from_millis(100);

/// A membership of the job. Groups belong to one; when it ends they stop working.
pub struct Epoch {
    number: u64,
    ended: AtomicBool,
    groups: Mutex<Vec<Weak<GroupState>>>,
    /// Which ranks wait for which.
    waits: Mutex<Waits>,
}

impl Epoch {
    /// A new epoch.
    pub fn new(number: u64) -> Arc<Epoch> {
        let (groups, waits) = Default::default();
        Arc::new(Epoch { number, ended: AtomicBool::new(false), groups, waits })
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Ends the epoch: every pending and later operation of its groups fails with
    /// [`Error::EpochEnded`].
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let groups = std::mem::take(&mut *self.groups.lock().expect("no panic while locked"));
        for group in groups.iter().filter_map(Weak::upgrade) {
            group.fail(Error::EpochEnded { epoch: self.number });
        }
    }

    /// Its groups that still stand.
    fn standing(&self) -> Vec<Arc<GroupState>> {
        let groups = self.groups.lock().expect("no panic while locked");
        groups.iter().filter_map(Weak::upgrade).filter(|group| !group.is_over()).collect()
    }

    /// A thread of this rank, or of another, says that it waits. If that closes a circle, the groups
    /// in which its ranks wait have failed.
    fn hear(&self, statement: Statement) {
        let closed = self.waits.lock().expect("no panic while locked").state(statement);
        let Some((waits, groups)) = closed else { return };
        for group in self.standing().iter().filter(|group| groups.contains(&group.id)) {
            group.fail(Error::Deadlock { waits: waits.clone() });
        }
    }

    /// Registers a group to be ended with the epoch.
    pub(crate) fn enter(self: &Arc<Self>, group: &Arc<GroupState>) {
        let registered = group.epoch.set(Arc::downgrade(self));
        debug_assert!(registered.is_ok(), "a group belongs to one epoch");
        {
            let mut groups = self.groups.lock().expect("no panic while locked");
            groups.retain(|g| g.strong_count() > 0);
            groups.push(Arc::downgrade(group));
        }
        if self.has_ended() {
            group.fail(Error::EpochEnded { epoch: self.number });
        }
    }
}

/// Says whether a call that waits should give up.
pub type Stop = Box<dyn Fn() -> bool + Send + Sync>;

/// Wakes an engine whose group has failed.
type Waker = Box<dyn FnOnce() + Send>;

/// A call that waits, and the ranks that have not arrived.
#[derive(Default)]
struct Wait {
    call: Option<Call>,
    missing: Vec<usize>,
}

/// What no call has as its number.
const PRESENT: u64 = u64::MAX;

thread_local! {
    /// The number of this thread among all that ever used a group.
    static THREAD: u64 = {
        static THREADS: AtomicU64 = AtomicU64::new(1);
        THREADS.fetch_add(1, Ordering::Relaxed)
    };
}

/// A number larger than all before it.
fn next_order() -> u64 {
    static ORDER: AtomicU64 = AtomicU64::new(1);
    ORDER.fetch_add(1, Ordering::Relaxed)
}

fn this_thread() -> u64 {
    THREAD.with(|thread| *thread)
}

/// Which threads use a group.
struct Users {
    /// The thread that made the last call, or formed the group: the next call is its to make.
    caller: AtomicU64,
    /// The number of the last call, also of one that waits in line.
    made: AtomicU32,
    /// The thread that runs the calls that were submitted.
    progress: AtomicU64,
    /// Threads that wait for calls that were submitted, and the calls.
    waiting: Mutex<Vec<(u64, Work)>>,
}

/// Whether a group still stands. Shared by callers, the progress thread and the monitor.
pub struct GroupState {
    rank: usize,
    /// The group's number in its epoch.
    id: u64,
    /// Its ranks, in the order of the group.
    members: Vec<Rank>,
    over: AtomicBool,
    failure: Mutex<Option<Error>>,
    /// For each peer, the number of the first call it takes no part in; [`PRESENT`] until it leaves.
    left: Vec<AtomicU64>,
    /// What wakes the engine, which may wait for other ranks.
    wakers: Mutex<Vec<Waker>>,
    /// Wakes the monitor, which tells the other ranks.
    monitor: OnceLock<Weak<OwnedFd>>,
    /// The epoch it belongs to.
    epoch: OnceLock<Weak<Epoch>>,
    /// After how long a waiting rank says for which ranks it waits.
    stall_after: Duration,
    /// What this rank called lately.
    history: History,
    /// A call of this rank that waits and that the others should hear of.
    stuck: Mutex<Option<Call>>,
    /// For which ranks a call of this rank waits, if it has for a while.
    wait: Mutex<Wait>,
    /// Whether a call that waits should give up.
    stop: OnceLock<Stop>,
    /// What this rank has handed to others.
    meter: Meter,
    /// Whether the program of this rank rests.
    rest: Arc<Rest>,
    /// Whether a link broke, so that the control connections should be tried at once.
    suspicion: AtomicBool,
    /// Where calls were made.
    places: Places,
    users: Users,
    /// What threads of this rank state, for the other ranks.
    statements: Mutex<Vec<Statement>>,
    /// For which ranks this one waits, and in which call, for the other ranks.
    awaits: Mutex<Vec<(usize, u32)>>,
    /// The number of the last call in which another rank waits for this one; 0 if there was none.
    awaited: AtomicU32,
    /// Why this rank leaves, if not because it is done.
    parting: OnceLock<String>,
    /// Why others left, where they said so.
    partings: Mutex<Vec<(usize, String)>>,
}

impl GroupState {
    /// The state of rank `rank` in a new group with this number and these ranks.
    pub(crate) fn new(
        rank: usize,
        id: u64,
        members: Vec<Rank>,
        stall_after: Duration,
    ) -> Arc<GroupState> {
        let world = members.len();
        Arc::new(GroupState {
            rank,
            id,
            members,
            over: AtomicBool::new(false),
            failure: Mutex::new(None),
            left: (0..world).map(|_| AtomicU64::new(PRESENT)).collect(),
            wakers: Mutex::default(),
            monitor: OnceLock::new(),
            epoch: OnceLock::new(),
            stall_after,
            history: History::new(),
            stuck: Mutex::new(None),
            wait: Mutex::default(),
            stop: OnceLock::new(),
            meter: Meter::default(),
            rest: Arc::default(),
            suspicion: AtomicBool::new(false),
            places: Places::default(),
            users: Users {
                caller: AtomicU64::new(this_thread()),
                made: AtomicU32::new(0),
                progress: AtomicU64::new(0),
                waiting: Mutex::default(),
            },
            statements: Mutex::default(),
            awaits: Mutex::default(),
            awaited: AtomicU32::new(0),
            parting: OnceLock::new(),
            partings: Mutex::default(),
        })
    }

    /// Whether the program of this rank rests.
    pub(crate) fn rest(&self) -> &Arc<Rest> {
        &self.rest
    }

    /// Counts what this rank hands to others.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Calls `wake` when the group fails, on any thread, so that a call that waits returns; at once if
    /// it has failed. It may be kept for longer than there is a group.
    pub fn on_failure(&self, wake: impl FnOnce() + Send + 'static) {
        self.wakers.lock().expect("no panic while locked").push(Box::new(wake));
        if self.is_over() {
            self.wake_engine();
        }
    }

    /// Registers the eventfd on which the monitor sleeps.
    pub(crate) fn wake_on_failure(&self, monitor: &Arc<OwnedFd>) {
        let registered = self.monitor.set(Arc::downgrade(monitor));
        debug_assert!(registered.is_ok(), "a group has one monitor");
    }

    /// Whether the group has failed.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Whether `call` cannot complete: the group failed, or `peer` left before it.
    pub fn is_over_for(&self, peer: usize, call: &Call) -> bool {
        if self.has_left(peer, call.seq) {
            self.lose(peer, self.parting_of(peer));
        }
        self.is_over()
    }

    /// Ends the group because a peer is lost.
    pub(crate) fn lose(&self, peer: usize, loss: Loss) {
        self.fail(self.lost(peer, loss));
    }

    /// The error of a call that needs a peer which is lost.
    pub(crate) fn lost(&self, peer: usize, loss: Loss) -> Error {
        Error::PeerLost { peer: self.members[peer], loss, during: None }
    }

    /// The error of two ranks that made different calls.
    pub(crate) fn mismatch(&self, made: [(usize, Call); 2]) -> Error {
        let [(rank, call), (peer, peer_call)] =
            made.map(|(rank, call)| (self.members[rank], self.named(call)));
        Error::mismatch(rank, call, peer, peer_call)
    }

    /// The error of a peer that sent what no rank sends.
    pub(crate) fn bad_message(&self, peer: usize, what: &'static str) -> Error {
        Error::BadMessage { peer: self.members[peer], what }
    }

    /// The error of a send and its receive whose lengths in bytes differ.
    pub(crate) fn length_mismatch(
        &self,
        (from, to): (usize, usize),
        tag: u32,
        sent: u64,
        expected: u64,
    ) -> Error {
        let (from, to) = (self.members[from], self.members[to]);
        Error::LengthMismatch { from, to, tag, sent, expected }
    }

    /// The error of a call that has not ended after so long.
    pub(crate) fn timed_out(&self, after: Duration) -> Error {
        let (during, missing) = self.waits_for();
        let missing = missing.into_iter().map(|rank| self.members[rank]).collect();
        Error::TimedOut { after, during: during.map(|call| self.named(call)), missing }
    }

    /// A call as users read of it: its root as the job numbers it.
    fn named(&self, mut call: Call) -> Call {
        if let Some(rank) = call.op.root().and_then(|root| self.members.get(root)) {
            call.op = call.op.with_root(rank.0);
        }
        call
    }

    /// Ends the group, unless it has failed before; whether this was the first failure. A circle of ranks
    /// that wait for each other ends all groups in which they wait.
    pub(crate) fn fail(&self, error: Error) -> bool {
        // Before any thread is woken: one that is told of one group may use another next, in which its
        // peers wait in another call.
        let mut others = self.others_in_circle(&error);
        others.retain(|group| group.note_failure(error.clone()));
        let is_first = self.note_failure(error);
        others.iter().for_each(|group| group.wake());
        if is_first {
            self.wake();
        }
        is_first
    }

    /// The other groups that a failure ends.
    fn others_in_circle(&self, error: &Error) -> Vec<Arc<GroupState>> {
        let Error::Deadlock { waits } = error else { return Vec::new() };
        let Some(epoch) = self.epoch.get().and_then(Weak::upgrade) else { return Vec::new() };
        let mut groups = epoch.standing();
        groups.retain(|group| {
            !std::ptr::eq(&raw const **group, self)
                && waits.iter().any(|wait| wait.group == group.id)
        });
        groups
    }

    fn note_failure(&self, error: Error) -> bool {
        let mut failure = self.failure.lock().expect("no panic while locked");
        if failure.is_some() {
            return false;
        }
        *failure = Some(error);
        self.over.store(true, Ordering::SeqCst);
        true
    }

    /// Wakes the threads that wait in a group that has failed.
    fn wake(&self) {
        self.wake_monitor();
        self.wake_engine();
    }

    fn wake_engine(&self) {
        let wakers = std::mem::take(&mut *self.wakers.lock().expect("no panic while locked"));
        wakers.into_iter().for_each(|wake| wake());
    }

    /// A call failed: the group has failed, for this reason or for an earlier one.
    pub(crate) fn fail_in(&self, call: &Call, error: Error) -> Error {
        // The first failure takes the group down; the monitor tells the other ranks.
        self.fail(error);
        self.settled_error(Some(*call))
    }

    /// Ends the group because this rank gives up.
    pub(crate) fn abort(&self, reason: &str) {
        self.fail(Error::Aborted { peer: self.job_rank(), reason: reason.into() });
    }

    /// Another rank said that the epoch has ended: so have all groups of this rank, also those
    /// that the other rank is not in.
    pub(crate) fn end_epoch(&self) {
        if let Some(epoch) = self.epoch.get().and_then(Weak::upgrade) {
            epoch.end();
        }
    }

    /// The connection to `peer` broke in the middle of `call`. Either the peer died, or it ended
    /// the group because of another rank, and then the monitor is about to learn why: the true
    /// cause is worth a short wait.
    pub fn lost_link(&self, peer: usize, call: &Call) -> Error {
        self.suspicion.store(true, Ordering::SeqCst);
        self.wake_monitor();
        let deadline = Instant::now() + self.patience();
        while !self.is_over() && !self.has_left(peer, call.seq) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let left = self.has_left(peer, call.seq);
        let loss = if left { self.parting_of(peer) } else { Loss::Closed };
        self.lose(peer, loss);
        self.error(Some(*call))
    }

    /// How long the monitor may take to learn why a connection broke.
    pub(crate) fn patience(&self) -> Duration {
        VERDICT * (1 + self.world() / QUICK_WORLD) as u32
    }

    /// The number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// Why the group failed, if it has or is about to.
    pub(crate) fn verdict(&self) -> Option<Error> {
        let deadline = Instant::now() + self.patience();
        while !self.is_over() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.is_over().then(|| self.settled_error(None))
    }

    /// As [`GroupState::error`], once the ranks that disagree have told where they made their calls.
    /// Not for the monitor, which hears of it.
    pub(crate) fn settled_error(&self, during: Option<Call>) -> Error {
        if let Error::Mismatch { rank, call, peer, peer_call, .. } = self.error(None) {
            let deadline = Instant::now() + places::PATIENCE;
            let callers = [(rank, call.number()), (peer, peer_call.number())];
            for caller in callers {
                self.places.wait_for(caller, deadline);
            }
        }
        self.error(during)
    }

    /// Why the group failed, as seen by `during`.
    pub fn error(&self, during: Option<Call>) -> Error {
        let failure = self.failure.lock().expect("no panic while locked").clone();
        match failure {
            Some(Error::PeerLost { peer, loss, .. }) => {
                Error::PeerLost { peer, loss, during: during.map(|call| self.named(call)) }
            }
            Some(Error::Mismatch { rank, call, peer, peer_call, .. }) => {
                let callers = [(rank, call.number()), (peer, peer_call.number())];
                let places = Box::new(callers.map(|caller| self.places.told(caller)));
                Error::Mismatch { rank, call, peer, peer_call, places }
            }
            Some(error) => error,
            None => Error::System { what: "waiting", reason: "interrupted for no reason".into() },
        }
    }

    /// Registers what says whether a call that waits should give up; the first counts.
    pub(crate) fn stop_waiting_if(&self, stop: Stop) {
        let _ = self.stop.set(stop);
    }

    /// To be called now and then by a thread that waits: ends the group if the wait should be given up. What is asked
    /// is the program's; a panic of it counts as yes, and goes no further, since the thread that waits may own the
    /// memory of a call that still waits in line.
    pub(crate) fn ask_to_stop(&self) {
        let asked = |stop: &Stop| catch_unwind(AssertUnwindSafe(stop)).unwrap_or(true);
        if !self.is_over() && self.stop.get().is_some_and(asked) {
            self.abort("interrupted while it waited for other ranks");
        }
    }

    /// The call that waits, and the ranks that have not arrived there.
    pub(crate) fn waits_for(&self) -> (Option<Call>, Vec<usize>) {
        let wait = self.wait.lock().expect("no panic while locked");
        (wait.call, wait.missing.clone())
    }

    /// Notes that a peer takes part only in calls before `seq`.
    pub(crate) fn note_left(&self, peer: usize, seq: u32) {
        self.left[peer].store(seq.into(), Ordering::SeqCst);
    }

    /// Whether a peer takes no part in call `seq`. Numbers begin again at 0 after the last: of two,
    /// the one from which it is less far to the other comes first.
    pub(crate) fn has_left(&self, peer: usize, seq: u32) -> bool {
        let left = self.left[peer].load(Ordering::SeqCst);
        left != PRESENT && seq.wrapping_sub(left as u32) as i32 >= 0
    }

    /// Whether a peer has left.
    pub(crate) fn has_gone(&self, peer: usize) -> bool {
        self.left[peer].load(Ordering::SeqCst) != PRESENT
    }

    /// Notes why a peer left.
    pub(crate) fn note_parting(&self, peer: usize, reason: String) {
        self.partings.lock().expect("no panic while locked").push((peer, reason));
    }

    /// How a peer that left was lost.
    pub(crate) fn parting_of(&self, peer: usize) -> Loss {
        let partings = self.partings.lock().expect("no panic while locked");
        let said = partings.iter().find(|(rank, _)| *rank == peer);
        said.map_or(Loss::Left, |(_, reason)| Loss::Failed(reason.clone()))
    }

    /// Notes why this rank is about to leave; the first reason counts.
    pub(crate) fn leave_because(&self, reason: &str) {
        let _ = self.parting.set(reason.into());
    }

    /// Why this rank leaves, if not because it is done.
    pub(crate) fn parting(&self) -> Option<&str> {
        self.parting.get().map(String::as_str)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This rank, as the job numbers it.
    pub fn job_rank(&self) -> Rank {
        self.members[self.rank]
    }

    /// Its ranks, in the order of the group.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Where calls were made.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// The number of the call that this thread makes now; for one thread at a time.
    pub(crate) fn number_call(&self) -> u32 {
        let number = Call::after(self.calls());
        self.users.caller.store(this_thread(), Ordering::Relaxed);
        self.users.made.store(number, Ordering::Relaxed);
        number
    }

    /// The number of the last call that was made, also of one that waits in line; 0 before the first.
    pub(crate) fn calls(&self) -> u32 {
        self.users.made.load(Ordering::Relaxed)
    }

    /// The calls that were made so far had numbers up to this.
    #[cfg(test)]
    pub fn skip_to(&self, number: u32) {
        self.users.made.store(number, Ordering::Relaxed);
    }

    /// Notes that this thread runs the calls that were submitted.
    pub(crate) fn note_progress(&self) {
        self.users.progress.store(this_thread(), Ordering::Relaxed);
    }

    /// Notes that this thread does nothing but wait for a call that was submitted.
    pub(crate) fn wait_here(self: &Arc<Self>, work: &Work) -> Waiting {
        let thread = this_thread();
        self.users.waiting.lock().expect("no panic while locked").push((thread, work.clone()));
        Waiting { state: self.clone(), thread }
    }

    /// The threads that do nothing before the call ends that this one runs: those that wait for it or for a later one,
    /// and this one, unless it is the progress thread. A call that has ended is no reason to wait, also while its
    /// thread has not got round to noticing.
    fn waiting_threads(&self) -> Vec<u64> {
        let this = this_thread();
        let is_progress = self.users.progress.load(Ordering::Relaxed) == this;
        let waiting = self.users.waiting.lock().expect("no panic while locked");
        let others = waiting.iter().filter(|(thread, work)| *thread != this && !work.is_done());
        let own = (!is_progress).then_some(this);
        own.into_iter().chain(others.map(|(thread, _)| *thread)).collect()
    }

    /// Whether another rank waits for this one, in any group of the epoch.
    fn is_awaited_anywhere(&self) -> bool {
        let Some(epoch) = self.epoch.get().and_then(Weak::upgrade) else { return false };
        let own = |group: &GroupState| group.job_rank() == self.job_rank();
        epoch.standing().iter().any(|group| own(group) && group.is_awaited())
    }

    /// Lets all ranks know that a thread waits in a call for `missing`.
    fn state_wait(&self, thread: u64, call: &Call, missing: &[usize]) {
        let Some(epoch) = self.epoch.get().and_then(Weak::upgrade) else { return };
        let mut groups = epoch.standing();
        groups.retain(|group| {
            let own = group.job_rank() == self.job_rank();
            own && (group.users.caller.load(Ordering::Relaxed) == thread || group.id == self.id)
        });
        let next = |group: &GroupState| Call::after(group.calls());
        let held = groups.iter().filter(|g| g.users.caller.load(Ordering::Relaxed) == thread);
        let statement = Statement {
            rank: self.job_rank(),
            thread,
            order: next_order(),
            group: self.id,
            members: self.members.clone(),
            call: self.named(*call),
            place: self.places.own(call.number()),
            missing: missing.iter().map(|rank| self.members[*rank]).collect(),
            holds: held.map(|group| (group.id, next(group))).collect(),
        };
        let statement = statement.shortened();
        for group in &groups {
            group.statements.lock().expect("no panic while locked").push(statement.clone());
            group.wake_monitor();
        }
        epoch.hear(statement);
    }

    /// What to tell the others about threads that wait.
    pub(crate) fn take_statements(&self) -> Vec<Statement> {
        std::mem::take(&mut *self.statements.lock().expect("no panic while locked"))
    }

    /// A rank of the group says that a thread of it waits.
    pub(crate) fn hear(&self, statement: Statement) {
        if self.members.contains(&statement.rank)
            && let Some(epoch) = self.epoch.get().and_then(Weak::upgrade)
        {
            epoch.hear(statement);
        }
    }

    /// Lets the monitor tell the others for which ranks a call of this one waits.
    fn await_ranks(&self, call: &Call, missing: &[usize]) {
        let awaited = missing.iter().map(|rank| (*rank, call.number()));
        self.awaits.lock().expect("no panic while locked").extend(awaited);
        self.wake_monitor();
    }

    /// What to tell the others about ranks for which this one waits.
    pub(crate) fn take_awaits(&self) -> Vec<(usize, u32)> {
        std::mem::take(&mut *self.awaits.lock().expect("no panic while locked"))
    }

    /// Another rank waits for this one in the call with this number.
    pub(crate) fn note_awaited(&self, number: u32) {
        self.awaited.store(number, Ordering::Relaxed);
    }

    /// Whether another rank waits for this one in a call that it has not made.
    fn is_awaited(&self) -> bool {
        let number = self.awaited.load(Ordering::Relaxed);
        // Numbers wrap around.
        number != 0 && number.wrapping_sub(Call::after(self.calls())) < u32::MAX / 2
    }

    /// Says in the log that `what` has waited since `since` for the ranks `missing`, if that is
    /// long enough; whether it was.
    pub(crate) fn report_stall(
        &self,
        since: Instant,
        what: &dyn std::fmt::Display,
        missing: impl FnOnce() -> Vec<usize>,
    ) -> bool {
        let waited = since.elapsed();
        if waited < self.stall_after {
            return false;
        }
        let (rank, waited) = (self.job_rank(), waited.as_secs_f64());
        let missing: Vec<Rank> = missing().into_iter().map(|rank| self.members[rank]).collect();
        let missing = Listed(&missing);
        log::warn!("rank {rank} has waited {waited:.1} s in {what} for {missing}");
        true
    }

    /// What this rank called lately.
    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    /// Lets the monitor tell the others that this rank waits in a call. What a group runs to measure
    /// itself is not in the history, has no number of its own, and does not concern the others.
    fn tell_stuck(&self, call: &Call) {
        if self.is_counted(call) {
            *self.stuck.lock().expect("no panic while locked") = Some(*call);
            self.wake_monitor();
        }
    }

    fn is_counted(&self, call: &Call) -> bool {
        self.history.call(call.seq).as_ref() == Some(call)
    }

    /// Whether a link broke since the last time this was asked.
    pub(crate) fn take_suspicion(&self) -> bool {
        self.suspicion.swap(false, Ordering::SeqCst)
    }

    /// The call to tell the others about, once.
    pub(crate) fn take_stuck(&self) -> Option<Call> {
        self.stuck.lock().expect("no panic while locked").take()
    }

    /// A peer says that it waits in a call: the group fails if this rank made another in its
    /// place. `false` if this rank has not come there yet.
    pub(crate) fn compare(&self, peer: usize, peer_call: &Call) -> bool {
        let Some(call) = self.history.counterpart(peer_call) else { return false };
        if call != *peer_call {
            self.fail(self.mismatch([(self.rank, call), (peer, *peer_call)]));
        }
        true
    }

    fn wake_monitor(&self) {
        if let Some(monitor) = self.monitor.get().and_then(Weak::upgrade) {
            // An eventfd only refuses a write that would overflow, and then it is readable.
            let _ = rustix::io::write(monitor, &1u64.to_ne_bytes());
        }
    }
}

/// A thread that does nothing but wait, until this is dropped.
pub struct Waiting {
    state: Arc<GroupState>,
    thread: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waiting = self.state.users.waiting.lock().expect("no panic while locked");
        if let Some(own) = waiting.iter().rposition(|(thread, _)| *thread == self.thread) {
            waiting.swap_remove(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_takes_part_in_every_call_until_it_leaves() {
        let state = GroupState::new(0, 0, Rank::all(2), Duration::MAX);
        let last = u32::MAX;
        assert!([0, 1, last - 1, last].iter().all(|&seq| !state.has_left(1, seq)));
        for first in [0, 1, 7, last - 1, last] {
            state.note_left(1, first);
            for calls in 0..10 {
                assert!(!state.has_left(1, first.wrapping_sub(1 + calls)), "{first} {calls}");
                assert!(state.has_left(1, first.wrapping_add(calls)), "{first} {calls}");
            }
        }
    }
}
