//! Which workers are in the job: decisions without I/O, and without a clock of its own.
//!
//! The coordinator knows every worker process that is connected to it. A worker is *starting* until it says
//! that it is *ready* to be in an epoch, and *in* the epoch once one has begun with it. An epoch lasts as long
//! as all its members are in it. The first that leaves it, because its group has failed, because all members
//! have agreed to let others in, or because its process has ended, ends it for all. The next epoch begins when
//! no member of the last one can act in it any more: each is ready again, or its process has ended. A member
//! that does neither is asked whether it lives, and if it does not answer, killed; that it was killed is not
//! enough, its end must have been seen.
//!
//! So two things hold. At any time one epoch at most has members that could complete a step. And a worker that
//! was declared lost, but wakes up, finds no member of its epoch that would complete anything with it.
//!
//! An answer may wait in a queue or a socket while the coordinator handles something else, or is stopped. That is
//! why workers are declared lost by [`Membership::tick`] only, which is called when no input waits, and why time
//! by which the coordinator was late itself does not count against them.
//!
//! Over several machines two more things happen. A whole machine may [vanish](Input::Vanished), so that the ends
//! of its workers cannot be seen. An epoch completes a step only with all its members, so one member that has
//! left it is enough to know that it is over: the next epoch needs such a member, or waits for as long as it
//! would for workers. And another coordinator may [take over](Membership::resume), which knows the present
//! epoch, and is told by each machine where its workers [stand](Input::Returned).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A worker process: the number that the launcher gave it, and how often that number was started before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// From 0.
    pub number: u32,
    /// From 0.
    pub life: u32,
}

/// What is fixed for a job.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The workers that the first epoch waits for.
    pub workers: usize,
    /// With fewer members no epoch begins.
    pub least: usize,
    /// The most members of an epoch; more workers wait as spares.
    pub most: usize,
    /// After how long a worker that does not answer counts as lost.
    pub timeout: Duration,
    /// How long to wait for workers while there are fewer than the least, or, before the first epoch, fewer
    /// than all.
    pub patience: Duration,
}

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A worker has connected.
    Connected(WorkerId),
    /// A worker wants to be in the next epoch.
    Ready {
        /// Which.
        worker: WorkerId,
        /// The epoch that it has left; 0 if it was in none.
        after: u64,
        /// Members of that epoch, by rank, that it lost because they were silent.
        silent: Vec<usize>,
    },
    /// A worker has answered that it lives.
    Answered(WorkerId),
    /// All members of an epoch have completed a step in it, or are about to.
    Stepped {
        /// Which epoch.
        epoch: u64,
    },
    /// A worker has handed in the result of the run.
    Finished {
        /// Which.
        worker: WorkerId,
        /// In which epoch.
        epoch: u64,
    },
    /// The connection of a worker has closed.
    Closed(WorkerId),
    /// The process of a worker has ended.
    Ended(WorkerId),
    /// The machine of these workers cannot be reached any more. They may [return](Input::Returned) before the next
    /// epoch begins; after that they are too late.
    Vanished(Vec<WorkerId>),
    /// A worker is to leave the job, at the end of a step if it is in an epoch.
    Leaving(WorkerId),
    /// A worker that another coordinator has known.
    Returned {
        /// Which.
        worker: WorkerId,
        /// Where it stands.
        stands: Stands,
    },
}

/// Where a worker stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stands {
    /// It builds its model.
    Starting,
    /// It waits for an epoch; the fields are those of [`Input::Ready`].
    Ready {
        /// The epoch that it has left.
        after: u64,
        /// Members that were silent.
        silent: Vec<usize>,
    },
    /// It is in this epoch.
    In(u64),
}

/// What is to be done now, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Tell the members that their epoch begins.
    Begin {
        /// Its number.
        epoch: u64,
        /// Its members, by rank.
        members: Vec<WorkerId>,
    },
    /// Ask the members of the present epoch to agree on leaving it at the end of a step: another worker is
    /// ready.
    AskToRegroup,
    /// Ask a worker whether it lives.
    Probe(WorkerId),
    /// Kill the process of a worker.
    Kill(WorkerId),
    /// Let a worker go that was to leave.
    Release(WorkerId),
    /// All workers are to leave, so that there is none to leave the run to: end them as the workers of a job
    /// that is told to stop.
    Disband,
    /// The run is complete: let all workers go.
    Finish,
    /// There are too few workers, for too long.
    GiveUp {
        /// How many there are.
        ready: usize,
    },
}

/// A worker that its peers lost because it was silent has this long to answer. They have waited for the timeout
/// already. Longer: the others wait longer for the next epoch. Shorter: a worker that was only slow is killed.
const LAST_CHANCE: Duration = Duration::from_millis(150);

/// By how much the coordinator may be late before it takes itself to have been paused, so that nothing can be
/// said of workers which have not answered meanwhile. Longer: answers that arrived in a pause are overlooked; it
/// must be well below [`LAST_CHANCE`]. Shorter: on a busy machine stopped workers are asked again and again.
const PAUSED: Duration = Duration::from_millis(50);

/// Into so many parts a wait is divided, so that a pause of the coordinator within it is noticed.
const PARTS: u32 = 3;

/// The workers of a job, and the epoch they are in.
#[derive(Clone, Debug)]
pub struct Membership {
    settings: Settings,
    /// Those that have connected and whose processes have not ended.
    workers: BTreeMap<WorkerId, Worker>,
    /// By number, the last life that has ended.
    ended: BTreeMap<u32, u32>,
    /// The last epoch that has begun; 0 before the first.
    epoch: u64,
    /// Its members, by rank.
    members: Vec<WorkerId>,
    /// Those of them that have vanished: they may be alive, and in it.
    unseen: BTreeSet<WorkerId>,
    has_asked: bool,
    has_disbanded: bool,
    /// Whether a step is known to be complete in this epoch: all its members have the state of the run then.
    has_stepped: bool,
    /// The members of the last epoch in which one was.
    holders: Vec<WorkerId>,
    /// Since when the next epoch has been waiting for more workers.
    short_since: Option<Duration>,
    state: State,
    /// Until when nothing is due.
    idle_until: Option<Duration>,
    decisions: Vec<Decision>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Finished,
    GivenUp,
}

#[derive(Clone, Debug)]
struct Worker {
    phase: Phase,
    /// When it was asked whether it lives, if it has not answered.
    asked: Option<Duration>,
    /// When it last answered.
    heard: Duration,
    /// Whether other members lost it because it was silent.
    is_suspect: bool,
    /// Whether it is to leave the job.
    is_leaving: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Starting,
    Ready,
    /// In the present epoch.
    In,
    /// Cut off: its process has yet to end.
    Ending,
}

impl Membership {
    /// Of a job whose workers are yet to connect.
    pub fn new(settings: Settings, now: Duration) -> Membership {
        let mut membership = Membership {
            settings,
            workers: BTreeMap::new(),
            ended: BTreeMap::new(),
            epoch: 0,
            members: Vec::new(),
            unseen: BTreeSet::new(),
            has_asked: false,
            has_disbanded: false,
            has_stepped: false,
            holders: Vec::new(),
            short_since: Some(now),
            state: State::Running,
            idle_until: None,
            decisions: Vec::new(),
        };
        membership.idle_until = membership.next_deadline(now);
        membership
    }

    /// Of a job that another coordinator has led to this epoch. Its members have the timeout to
    /// [return](Input::Returned).
    pub fn resume(
        settings: Settings,
        epoch: u64,
        members: Vec<WorkerId>,
        now: Duration,
    ) -> Membership {
        let mut membership = Membership::new(settings, now);
        let awaited = |id: &WorkerId| {
            let worker = Worker { phase: Phase::In, asked: Some(now), ..Worker::new(now) };
            (*id, worker)
        };
        membership.workers = members.iter().map(awaited).collect();
        (membership.epoch, membership.members) = (epoch, members);
        membership.short_since = (!membership.is_whole()).then_some(now);
        membership.idle_until = membership.next_deadline(now);
        membership
    }

    /// From now on no epoch begins with more members.
    pub fn limit(&mut self, most: usize) {
        self.settings.most = self.settings.most.min(most).max(1);
    }

    /// The present epoch; 0 before the first.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The members of the present epoch, by rank.
    pub fn members(&self) -> &[WorkerId] {
        &self.members
    }

    /// Workers that are ready, and to stay, and not in the present epoch.
    pub fn spares(&self) -> impl Iterator<Item = WorkerId> {
        let is_spare =
            |(_, worker): &(&WorkerId, &Worker)| worker.phase == Phase::Ready && !worker.is_leaving;
        self.workers.iter().filter(is_spare).map(|(id, _)| *id)
    }

    /// Whether all members of the present epoch are in it.
    pub fn is_whole(&self) -> bool {
        self.epoch > 0 && self.members.iter().all(|id| self.is_in(*id))
    }

    /// Whether the next epoch begins soon, and needs no worker that is not ready yet: members of the present one live,
    /// which not all are in it any more.
    pub fn is_regrouping(&self) -> bool {
        let living = self.members.iter().filter_map(|id| self.workers.get(id));
        let stay = |worker: &&Worker| !worker.is_leaving && worker.phase != Phase::Ending;
        let staying = living.filter(stay).count();
        let spares = self.spares().filter(|id| !self.members.contains(id)).count();
        let is_running = self.state == State::Running && !self.is_whole();
        is_running && staying > 0 && staying + spares >= self.settings.least
    }

    /// When time alone changes something: see [`Membership::tick`].
    pub fn deadline(&self) -> Option<Duration> {
        self.idle_until
    }

    /// Something happened.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Decision> {
        self.excuse_silence_of_own(now);
        match input {
            Input::Connected(id) => self.on_connected(now, id),
            Input::Ready { worker, after, silent } => self.on_ready(now, worker, after, &silent),
            Input::Answered(id) => self.on_answered(now, id),
            Input::Stepped { epoch } => self.on_stepped(epoch),
            Input::Finished { worker, epoch } => self.on_finished(worker, epoch),
            Input::Closed(id) => self.cut_off(id),
            Input::Ended(id) => self.on_ended(id),
            Input::Vanished(ids) => ids.into_iter().for_each(|id| self.on_vanished(id)),
            Input::Leaving(id) => self.on_leaving(id),
            Input::Returned { worker, stands } => self.on_returned(now, worker, stands),
        }
        self.advance(now)
    }

    /// Time has passed, and no input waits to be handled.
    pub fn tick(&mut self, now: Duration) -> Vec<Decision> {
        self.excuse_silence_of_own(now);
        if self.state == State::Running {
            self.declare_lost(now);
            self.give_up_in_time(now);
        }
        self.advance(now)
    }

    /// Does what must not be done, to see that it is found.
    #[cfg(test)]
    pub(super) fn forget_unseen(&mut self) {
        self.unseen.clear();
    }

    fn on_connected(&mut self, now: Duration, id: WorkerId) {
        let has_ended = self.ended.get(&id.number).is_some_and(|life| *life >= id.life);
        let lives = self.workers.keys().filter(|other| other.number == id.number);
        let (older, others): (Vec<WorkerId>, Vec<_>) =
            lives.partition(|other| other.life < id.life);
        // What a process sent may arrive after its end, or after its next life is here. And of two processes
        // that claim to be the same life, neither can be believed.
        if has_ended || !others.is_empty() {
            return self.decisions.push(Decision::Kill(id));
        }
        older.into_iter().for_each(|older| self.cut_off(older));
        self.workers.insert(id, Worker::new(now));
    }

    fn on_ready(&mut self, now: Duration, id: WorkerId, after: u64, silent: &[usize]) {
        let (epoch, members) = (self.epoch, self.members.clone());
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let expected = match worker.phase {
            Phase::Starting => 0,
            Phase::In => epoch,
            Phase::Ready | Phase::Ending => return,
        };
        if after != expected {
            return self.cut_off(id);
        }
        worker.phase = Phase::Ready;
        (worker.heard, worker.asked) = (now, None);
        for suspect in silent.iter().filter_map(|rank| members.get(*rank)) {
            if let Some(suspect) = self.workers.get_mut(suspect) {
                suspect.is_suspect = true;
            }
        }
    }

    fn on_answered(&mut self, now: Duration, id: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&id) {
            (worker.heard, worker.asked, worker.is_suspect) = (now, None, false);
        }
    }

    fn on_stepped(&mut self, epoch: u64) {
        if epoch == self.epoch {
            self.has_stepped = true;
            self.holders.clone_from(&self.members);
        }
    }

    fn on_finished(&mut self, id: WorkerId, epoch: u64) {
        // It may have ended since. All members had made all steps, and no other epoch has begun.
        let counts = epoch == self.epoch && self.members.first() == Some(&id);
        if counts && self.state == State::Running {
            self.state = State::Finished;
            self.decisions.push(Decision::Finish);
        }
    }

    fn on_vanished(&mut self, id: WorkerId) {
        let has_ended = self.ended.get(&id.number).is_some_and(|life| *life >= id.life);
        let is_known = self.workers.remove(&id).is_some();
        if self.members.contains(&id) && (is_known || !has_ended) {
            self.unseen.insert(id);
        }
    }

    fn on_leaving(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        worker.is_leaving = true;
        let is_member = self.members.contains(&id);
        if matches!(worker.phase, Phase::Starting | Phase::Ready) && !is_member {
            self.release(id);
        }
        let mut left = self.workers.values().filter(|worker| worker.phase != Phase::Ending);
        let is_last = self.epoch > 0 && left.clone().next().is_some() && left.all(|w| w.is_leaving);
        if is_last && !std::mem::replace(&mut self.has_disbanded, true) {
            self.decisions.push(Decision::Disband);
        }
    }

    fn on_returned(&mut self, now: Duration, id: WorkerId, stands: Stands) {
        // One that has not heard of the present epoch may be about to.
        let has_heard = match stands {
            Stands::In(epoch) | Stands::Ready { after: epoch, .. } => epoch == self.epoch,
            Stands::Starting => false,
        };
        if has_heard && self.unseen.remove(&id) {
            // It is where it would be if it had never vanished.
            self.workers.insert(id, Worker { phase: Phase::In, ..Worker::new(now) });
        }
        let phase = self.workers.get(&id).map(|worker| worker.phase);
        match (phase, stands) {
            (Some(Phase::In), Stands::In(epoch)) if epoch == self.epoch => {
                self.on_answered(now, id);
            }
            // Whether it has heard that the epoch begins or not: without it no step was completed.
            (Some(Phase::In), Stands::Ready { silent, .. }) => {
                self.on_ready(now, id, self.epoch, &silent);
            }
            (None, Stands::Starting) => self.on_connected(now, id),
            (None, Stands::Ready { after: 0, silent }) if !self.unseen.contains(&id) => {
                self.on_connected(now, id);
                self.on_ready(now, id, 0, &silent);
            }
            // The others have gone on without it.
            _ => {
                self.cut_off(id);
                if phase.is_none() {
                    self.decisions.push(Decision::Kill(id));
                }
            }
        }
    }

    fn on_ended(&mut self, id: WorkerId) {
        self.workers.remove(&id);
        self.unseen.remove(&id);
        let last = self.ended.entry(id.number).or_insert(id.life);
        *last = id.life.max(*last);
    }

    /// A worker that cannot be reached any more, or makes no sense, must not act: its process ends.
    fn cut_off(&mut self, id: WorkerId) {
        let is_over = self.state != State::Running;
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if worker.phase != Phase::Ending {
            worker.phase = Phase::Ending;
            // After the end, workers leave by themselves.
            if !is_over {
                self.decisions.push(Decision::Kill(id));
            }
        }
    }

    /// If this process has been paused, what it has not heard may be on its way.
    fn excuse_silence_of_own(&mut self, now: Duration) {
        let late = self.idle_until.map_or(Duration::ZERO, |until| now.saturating_sub(until));
        if late <= PAUSED {
            return;
        }
        let Settings { timeout, patience, .. } = self.settings;
        for (id, worker) in &mut self.workers {
            let limit = worker.limit(timeout);
            match &mut worker.asked {
                Some(asked) => {
                    *asked = excused(*asked, limit, late, now);
                    self.decisions.push(Decision::Probe(*id));
                }
                None => worker.heard = now,
            }
        }
        self.short_since = self.short_since.map(|since| excused(since, patience, late, now));
    }

    /// Whatever follows from the state.
    fn advance(&mut self, now: Duration) -> Vec<Decision> {
        if self.state == State::Running {
            if self.is_whole() {
                self.short_since = None;
                self.let_others_in();
            } else if !self.workers.values().any(|worker| worker.phase == Phase::In) {
                self.short_since.get_or_insert(now);
                self.begin_epoch(now);
            }
            self.ask_workers(now);
        }
        self.idle_until = self.next_deadline(now);
        std::mem::take(&mut self.decisions)
    }

    fn let_others_in(&mut self) {
        let has_room = self.members.len() < self.settings.most;
        let is_wanted = has_room && self.spares().next().is_some();
        // Those that leave stay until there is another to leave the run to.
        let leaving = self.members.iter().filter(|id| self.is_leaving(**id)).count();
        let has_successors = leaving < self.members.len() || self.spares().next().is_some();
        let is_left = leaving > 0 && has_successors;
        if (is_wanted || is_left) && !self.has_asked {
            self.has_asked = true;
            self.decisions.push(Decision::AskToRegroup);
        }
    }

    /// Begins the next epoch with all that are ready, those of the last epoch first, if they are enough and
    /// the processes of all other members of the last epoch have ended.
    fn begin_epoch(&mut self, now: Duration) {
        if self.waits_for_members() {
            return;
        }
        self.release_leaving();
        let ready = self.workers.iter().filter(|(_, worker)| worker.phase == Phase::Ready);
        let ready: Vec<WorkerId> = ready.map(|(id, _)| *id).collect();
        let is_over = self.unseen.is_empty() || self.members.iter().any(|id| ready.contains(id));
        if ready.len() < self.enough(now) || !(is_over || self.is_too_late(now)) {
            return;
        }
        let old = self.members.iter().filter(|id| ready.contains(id));
        let new = ready.iter().filter(|id| !self.members.contains(id));
        // Where workers that leave are the only ones with the state, one of them hands it over, and those that stay
        // come before the rest: there may not be room for all.
        let (leaving, staying): (Vec<WorkerId>, Vec<_>) =
            old.chain(new).copied().partition(|id| self.is_leaving(*id));
        let holder = leaving.iter().find(|id| self.holders.contains(id)).or(leaving.first());
        let others = leaving.iter().filter(|id| Some(*id) != holder);
        let members = holder.into_iter().chain(&staying).chain(others);
        let members: Vec<WorkerId> = members.take(self.settings.most).copied().collect();
        for id in &members {
            let worker = self.workers.get_mut(id).expect("it is ready");
            worker.phase = Phase::In;
            (worker.asked, worker.heard, worker.is_suspect) = (None, now, false);
        }
        self.epoch += 1;
        self.members.clone_from(&members);
        self.unseen.clear();
        (self.has_asked, self.has_stepped, self.short_since) = (false, false, None);
        self.decisions.push(Decision::Begin { epoch: self.epoch, members });
    }

    /// Lets workers go that are to leave, unless they may be the only ones of several that have the state of the
    /// run: those hand it over in one more epoch, if two can be in one. A member of an epoch that ended before its
    /// first step may not have been handed anything.
    fn release_leaving(&mut self) {
        let is_staying = |worker: &Worker| !worker.is_leaving && worker.phase != Phase::Ending;
        let mut staying = self.workers.iter().filter(|(_, w)| is_staying(w)).peekable();
        let has_successors = staying.peek().is_some() && self.settings.most > 1;
        let has_state = |id: &WorkerId| self.has_stepped && self.members.contains(id);
        if has_successors && self.epoch > 0 && !staying.any(|(id, _)| has_state(id)) {
            return;
        }
        let leaving = self.workers.iter().filter(|(_, worker)| worker.is_leaving);
        let leaving: Vec<WorkerId> = leaving.map(|(id, _)| *id).collect();
        leaving.into_iter().for_each(|id| self.release(id));
    }

    fn release(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if worker.phase != Phase::Ending {
            worker.phase = Phase::Ending;
            self.decisions.push(Decision::Release(id));
        }
    }

    /// How many workers the next epoch needs.
    fn enough(&self, now: Duration) -> usize {
        let Settings { workers, least, .. } = self.settings;
        let is_first = self.epoch == 0 && !self.is_too_late(now);
        least.max(if is_first { workers } else { 1 })
    }

    /// Whether members of the last epoch are neither ready for the next nor seen to have ended.
    fn waits_for_members(&self) -> bool {
        let mut members = self.members.iter().filter_map(|id| self.workers.get(id));
        members.any(|worker| worker.phase != Phase::Ready)
    }

    fn is_too_late(&self, now: Duration) -> bool {
        self.short_since.is_some_and(|since| now >= since.saturating_add(self.settings.patience))
    }

    fn give_up_in_time(&mut self, now: Duration) {
        let ready = self.spares().count();
        // A later epoch with enough workers has begun already, unless a process that was killed does not end, or
        // no member of the last one can be seen.
        let is_new = self.epoch == 0 || !(self.unseen.is_empty() || self.waits_for_members());
        let can_begin = ready >= self.enough(now) && is_new;
        if self.is_too_late(now) && !can_begin {
            self.state = State::GivenUp;
            self.decisions.push(Decision::GiveUp { ready });
        }
    }

    /// Asks workers whether they live: at once if a member says that it has lost them, else now and then. Those
    /// that wait for an epoch are asked as well: with a stopped one, it could not begin.
    fn ask_workers(&mut self, now: Duration) {
        let pause = self.pause();
        for (id, worker) in &mut self.workers {
            let is_due = worker.is_suspect || now >= worker.heard + pause;
            if worker.must_answer() && worker.asked.is_none() && is_due {
                worker.asked = Some(now);
                self.decisions.push(Decision::Probe(*id));
            }
        }
    }

    fn declare_lost(&mut self, now: Duration) {
        let timeout = self.settings.timeout;
        let is_late = |worker: &Worker| {
            worker.asked.is_some_and(|asked| now >= asked + worker.limit(timeout))
        };
        let is_lost = |worker: &Worker| worker.must_answer() && is_late(worker);
        let lost = self.workers.iter().filter(|(_, worker)| is_lost(worker)).map(|(id, _)| *id);
        lost.collect::<Vec<_>>().into_iter().for_each(|id| self.cut_off(id));
    }

    fn next_deadline(&self, now: Duration) -> Option<Duration> {
        if self.state != State::Running {
            return None;
        }
        let (pause, timeout) = (self.pause(), self.settings.timeout);
        let asked = self.workers.values().filter(|worker| worker.must_answer());
        let due = asked.map(|worker| match (worker.asked, worker.limit(timeout)) {
            (Some(asked), limit) => (asked + limit).min(now + limit / PARTS),
            (None, _) => worker.heard + pause,
        });
        let patience = self.settings.patience;
        let in_part = |since: Duration| {
            since.saturating_add(patience).min(now.saturating_add(patience / PARTS))
        };
        due.chain(self.short_since.map(in_part)).min()
    }

    /// How long after its last answer a worker is asked whether it lives. In an epoch that is whole its peers
    /// watch over a member, if it has any.
    fn pause(&self) -> Duration {
        let timeout = self.settings.timeout;
        if self.is_whole() { timeout } else { timeout / 4 }
    }

    fn is_leaving(&self, id: WorkerId) -> bool {
        self.workers.get(&id).is_some_and(|worker| worker.is_leaving)
    }

    fn is_in(&self, id: WorkerId) -> bool {
        self.workers.get(&id).is_some_and(|worker| worker.phase == Phase::In)
    }
}

/// From when on a wait counts that may last as long as the limit, after the waiting process was late by so much:
/// that time does not count, and a part of the wait is left. No more, so that a process that is late again and
/// again does not wait for ever.
pub(in crate::membership) fn excused(
    since: Duration,
    limit: Duration,
    late: Duration,
    now: Duration,
) -> Duration {
    let left = late.min(limit / PARTS);
    since.saturating_add(late).max(now.saturating_add(left).saturating_sub(limit))
}

impl Worker {
    fn new(now: Duration) -> Worker {
        let (phase, asked) = (Phase::Starting, None);
        Worker { phase, asked, heard: now, is_suspect: false, is_leaving: false }
    }

    /// A worker answers from when it has connected, whatever else it does.
    fn must_answer(&self) -> bool {
        self.phase != Phase::Ending
    }

    /// How long it may take to answer.
    fn limit(&self, timeout: Duration) -> Duration {
        if self.is_suspect { LAST_CHANCE.min(timeout) } else { timeout }
    }
}

#[cfg(test)]
mod search;
#[cfg(test)]
mod simulator;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
