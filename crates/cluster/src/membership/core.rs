//! Which workers are in the job: decisions without I/O, and without a clock of its own.
//!
//! The coordinator knows every worker process that is connected to it. A worker is *starting* until it says
//! that it is *ready* to be in an epoch, and *in* the epoch once one has begun with it. An epoch lasts as long
//! as all its members are in it. The first that leaves it, because its group has failed, because all members
//! have agreed to let others in, or because its process has ended, ends it for all. The next epoch begins when
//! no member of the last one can act in it any more: each is ready again, or its process has ended. A member
//! that does neither is asked whether it lives, and if it does not answer, killed.
//!
//! So two things hold. At any time one epoch at most has members that could complete a step. And a worker that
//! was declared lost, but wakes up, finds no member of its epoch that would complete anything with it.

use std::collections::BTreeMap;
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
/// said of workers which have not answered meanwhile.
const PAUSED: Duration = Duration::from_millis(500);

/// The workers of a job, and the epoch they are in.
#[derive(Clone, Debug)]
pub struct Membership {
    settings: Settings,
    /// By number.
    workers: BTreeMap<u32, Worker>,
    /// The last epoch that has begun; 0 before the first.
    epoch: u64,
    /// Its members, by rank.
    members: Vec<WorkerId>,
    has_asked: bool,
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
    life: u32,
    phase: Phase,
    /// When it was asked whether it lives, if it has not answered.
    asked: Option<Duration>,
    /// When it last answered.
    heard: Duration,
    /// Whether other members lost it because it was silent.
    is_suspect: bool,
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
        Membership {
            settings,
            workers: BTreeMap::new(),
            epoch: 0,
            members: Vec::new(),
            has_asked: false,
            short_since: Some(now),
            state: State::Running,
            idle_until: None,
            decisions: Vec::new(),
        }
    }

    /// The present epoch; 0 before the first.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The members of the present epoch, by rank.
    pub fn members(&self) -> &[WorkerId] {
        &self.members
    }

    /// Workers that are ready and not in the present epoch.
    pub fn spares(&self) -> impl Iterator<Item = WorkerId> {
        let spare = |(number, worker): (&u32, &Worker)| {
            (worker.phase == Phase::Ready)
                .then_some(WorkerId { number: *number, life: worker.life })
        };
        self.workers.iter().filter_map(spare)
    }

    /// Whether all members of the present epoch are in it.
    pub fn is_whole(&self) -> bool {
        self.epoch > 0 && self.members.iter().all(|id| self.is_in(*id))
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
            Input::Finished { worker, epoch } => self.on_finished(worker, epoch),
            Input::Closed(id) => self.cut_off(id),
            Input::Ended(id) => {
                if self.worker(id).is_some() {
                    self.workers.remove(&id.number);
                }
            }
        }
        self.advance(now)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Decision> {
        self.excuse_silence_of_own(now);
        self.advance(now)
    }

    fn on_connected(&mut self, now: Duration, id: WorkerId) {
        match self.workers.get(&id.number) {
            // Two processes that claim one place: that of before, or that of another, goes.
            Some(old) if old.life >= id.life => self.decisions.push(Decision::Kill(id)),
            old => {
                if let Some(old) = old {
                    let life = old.life;
                    self.decisions.push(Decision::Kill(WorkerId { life, ..id }));
                }
                self.workers.insert(id.number, Worker::new(id.life, now));
            }
        }
    }

    fn on_ready(&mut self, now: Duration, id: WorkerId, after: u64, silent: &[usize]) {
        let (epoch, members) = (self.epoch, self.members.clone());
        let Some(worker) = self.worker(id) else { return };
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
            if let Some(suspect) = self.worker(*suspect).filter(|worker| worker.phase == Phase::In)
            {
                suspect.is_suspect = true;
            }
        }
    }

    fn on_answered(&mut self, now: Duration, id: WorkerId) {
        if let Some(worker) = self.worker(id) {
            (worker.heard, worker.asked, worker.is_suspect) = (now, None, false);
        }
    }

    fn on_finished(&mut self, id: WorkerId, epoch: u64) {
        let counts = epoch == self.epoch && self.members.first() == Some(&id) && self.is_in(id);
        if counts && self.state == State::Running {
            self.state = State::Finished;
            self.decisions.push(Decision::Finish);
        }
    }

    /// A worker that cannot be reached any more, or makes no sense, must not act: its process ends.
    fn cut_off(&mut self, id: WorkerId) {
        let is_over = self.state != State::Running;
        let Some(worker) = self.worker(id) else { return };
        if worker.phase != Phase::Ending {
            worker.phase = Phase::Ending;
            // After the end, workers leave by themselves.
            if !is_over {
                self.decisions.push(Decision::Kill(id));
            }
        }
    }

    /// If this process has been paused, the answers that it has not heard may be on their way.
    fn excuse_silence_of_own(&mut self, now: Duration) {
        if self.idle_until.is_some_and(|until| now > until + PAUSED) {
            for worker in self.workers.values_mut() {
                (worker.asked, worker.heard) = (None, now);
            }
        }
    }

    /// Whatever follows from the state.
    fn advance(&mut self, now: Duration) -> Vec<Decision> {
        if self.state == State::Running {
            if self.is_whole() {
                self.short_since = None;
                self.let_others_in();
            } else if !self.workers.values().any(|worker| worker.phase == Phase::In) {
                self.begin_epoch(now);
            }
            self.look_after_members(now);
        }
        self.idle_until = self.next_deadline();
        std::mem::take(&mut self.decisions)
    }

    fn let_others_in(&mut self) {
        let has_room = self.members.len() < self.settings.most;
        if has_room && !self.has_asked && self.spares().next().is_some() {
            self.has_asked = true;
            self.decisions.push(Decision::AskToRegroup);
        }
    }

    /// Begins the next epoch with all that are ready, those of the last epoch first, if they are enough.
    fn begin_epoch(&mut self, now: Duration) {
        let ready: Vec<WorkerId> = self.spares().collect();
        let since = *self.short_since.get_or_insert(now);
        let is_patient = now < since + self.settings.patience;
        let enough = match self.epoch {
            0 if is_patient => self.settings.workers.max(self.settings.least),
            _ => self.settings.least,
        };
        if ready.len() < enough.max(1) {
            if !is_patient {
                self.state = State::GivenUp;
                self.decisions.push(Decision::GiveUp { ready: ready.len() });
            }
            return;
        }
        let old = self.members.iter().filter(|id| ready.contains(id));
        let new = ready.iter().filter(|id| !self.members.contains(id));
        let members: Vec<WorkerId> = old.chain(new).take(self.settings.most).copied().collect();
        for id in &members {
            let worker = self.worker(*id).expect("it is ready");
            worker.phase = Phase::In;
            (worker.asked, worker.heard, worker.is_suspect) = (None, now, false);
        }
        self.epoch += 1;
        self.members.clone_from(&members);
        (self.has_asked, self.short_since) = (false, None);
        self.decisions.push(Decision::Begin { epoch: self.epoch, members });
        // Those that found no room are spares, and may be more than before.
        self.let_others_in();
    }

    /// Asks members whether they live: at once if the others have left the epoch, else now and then. Kills
    /// those that do not answer.
    fn look_after_members(&mut self, now: Duration) {
        let is_whole = self.is_whole();
        let timeout = self.settings.timeout;
        let (mut probes, mut lost) = (Vec::new(), Vec::new());
        for (number, worker) in self.workers.iter_mut() {
            let id = WorkerId { number: *number, life: worker.life };
            if worker.phase != Phase::In {
                continue;
            }
            match worker.asked {
                Some(asked) if now >= asked + worker.limit(timeout) => lost.push(id),
                Some(_) => {}
                None if worker.is_suspect || now >= worker.heard + pause(timeout, is_whole) => {
                    worker.asked = Some(now);
                    probes.push(Decision::Probe(id));
                }
                None => {}
            }
        }
        self.decisions.extend(probes);
        lost.into_iter().for_each(|id| self.cut_off(id));
    }

    fn next_deadline(&self) -> Option<Duration> {
        if self.state != State::Running {
            return None;
        }
        let (is_whole, timeout) = (self.is_whole(), self.settings.timeout);
        let members = self.workers.values().filter(|worker| worker.phase == Phase::In);
        let due = members.map(|worker| match worker.asked {
            Some(asked) => asked + worker.limit(timeout),
            None => worker.heard + pause(timeout, is_whole),
        });
        due.chain(self.short_since.map(|since| since + self.settings.patience)).min()
    }

    fn is_in(&self, id: WorkerId) -> bool {
        let worker = self.workers.get(&id.number);
        worker.is_some_and(|worker| worker.life == id.life && worker.phase == Phase::In)
    }

    fn worker(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&id.number).filter(|worker| worker.life == id.life)
    }
}

impl Worker {
    fn new(life: u32, now: Duration) -> Worker {
        Worker { life, phase: Phase::Starting, asked: None, heard: now, is_suspect: false }
    }

    /// How long it may take to answer.
    fn limit(&self, timeout: Duration) -> Duration {
        if self.is_suspect { LAST_CHANCE.min(timeout) } else { timeout }
    }
}

/// How long after its last answer a member is asked whether it lives. In an epoch that is whole its peers watch
/// over it, if it has any.
fn pause(timeout: Duration, is_whole: bool) -> Duration {
    if is_whole { timeout } else { timeout / 4 }
}
