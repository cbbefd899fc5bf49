//! Connects the [core](super::core) with what machines report of their workers, and keeps the history of the
//! job. No I/O: what is to be done is returned, for the owner to do.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::core::{Decision, Input, Membership, Settings, Stands, WorkerId};
use super::events::{Happened, Observer, Occurrence, Sign};
use super::{About, Seen, ToWorker};

/// Epochs in a row that may end before a step is complete. More: a run that kills each of its workers, as one
/// with a shard that none of them can compute, ends later. Fewer: workers that are killed one after the other by
/// accident end the run.
const FRUITLESS: u32 = 30;

/// Epochs in a row that may end before a step is complete until members are asked to say which shard they compute.
/// More: a shard that kills its workers is named by fewer losses. Fewer: messages for workers that were lost by
/// accident.
const CAREFUL: u32 = 3;

/// What a machine reports of one of its workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Report {
    Connected,
    /// It wants to be in the next epoch.
    Ready {
        after: u64,
        silent: Vec<usize>,
        about: About,
    },
    Alive,
    Stepped(FirstStep),
    /// It begins to compute this shard, or has computed all.
    Computing(Option<usize>),
    /// It wants to know where the members are.
    Look,
    /// It has handed in the result of the run.
    Finished {
        epoch: u64,
    },
    Closed,
    Ended,
    Leaving,
    /// Another coordinator has known it.
    Returned {
        stands: Stands,
        about: About,
        finished: Option<u64>,
    },
}

/// What the owner of the coordinator has to do.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Act {
    Tell(WorkerId, ToWorker),
    Kill(WorkerId, Sign),
    /// Make this last, and then say that it is [committed](Coordinator::committed).
    Commit(Change),
    /// Make sure that a change could be made to last now, and then say that this is
    /// [confirmed](Coordinator::confirmed): members that leave an epoch for another one that cannot begin would
    /// stand still.
    Confirm {
        epoch: u64,
    },
    /// All machines are to leave.
    Disband,
    /// The run is complete, with the result that rank 0 of this epoch has handed in: let all workers go.
    Complete {
        epoch: u64,
    },
    GiveUp {
        ready: usize,
    },
    NoProgress {
        epochs: u32,
    },
}

/// What must hold for all coordinators to come before it has an effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// An epoch begins.
    Begin {
        epoch: u64,
        members: Vec<WorkerId>,
        /// Where each member is reached: one that has ended until this is committed is known no more.
        addresses: Vec<Vec<u8>>,
    },
    /// The run is complete.
    Finish { epoch: u64 },
}

/// The first step of an epoch, as its rank 0 saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstStep {
    /// The epoch.
    pub epoch: u64,
    /// The step.
    pub step: u64,
    /// Seconds that it took to compute.
    pub compute: f64,
    /// Whether it had been begun in the epoch before.
    pub redone: bool,
    /// Workers that were given the state of another.
    pub behind: u64,
    /// Whether no worker had any state, so that the run went back to its last checkpoint, or its beginning.
    pub from_checkpoint: bool,
}

/// How a run went on after a loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// Seconds from the loss, as the coordinator saw it, until the first step was complete, without the
    /// computation of that step.
    pub seconds: f64,
    /// What was complete then.
    pub first: FirstStep,
}

/// What has happened to a job's membership.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Epochs that have begun.
    pub epochs: u64,
    /// Members that were lost.
    pub workers_lost: u64,
    /// Workers that became members of a later epoch than the first.
    pub workers_joined: u64,
    /// How the run went on each time.
    pub recoveries: Vec<Recovery>,
    /// The members that were lost since a step was last complete.
    pub lost_since: Vec<LostMember>,
}

/// A member that was lost before its epoch had completed a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostMember {
    /// Its rank.
    pub rank: usize,
    /// The members of the epoch.
    pub world: usize,
    /// The shard that it had said to compute, if it was asked to say so.
    pub shard: Option<usize>,
}

impl History {
    /// The median and the longest time of the recoveries, in milliseconds.
    pub fn recovery_ms(&self) -> Option<(f64, f64)> {
        let mut times: Vec<f64> = self.recoveries.iter().map(|it| it.seconds * 1e3).collect();
        times.sort_by(f64::total_cmp);
        Some((*times.get(times.len() / 2)?, *times.last()?))
    }

    /// The shard that most members were computing when they were lost, again and again: of those that had said
    /// which.
    pub fn poison(&self) -> Option<usize> {
        let shards: Vec<usize> = self.lost_since.iter().filter_map(|lost| lost.shard).collect();
        let count = |shard: &usize| shards.iter().filter(|other| *other == shard).count();
        let most = shards.iter().copied().max_by_key(count)?;
        (shards.len() > 1 && 2 * count(&most) > shards.len()).then_some(most)
    }
}

/// The coordinator of a job.
pub(super) struct Coordinator {
    membership: Membership,
    /// What workers have said of themselves.
    about: HashMap<WorkerId, About>,
    history: History,
    /// Is told what happens.
    observer: Option<Observer>,
    /// The most members of an epoch.
    most: usize,
    /// Of the newest epoch that workers were told of.
    members: Vec<WorkerId>,
    /// Those of them of whose loss the observer was told.
    lost: Vec<WorkerId>,
    /// Workers that were let go: their ends are no losses.
    released: HashSet<WorkerId>,
    /// Whether one of them is lost, and whether the others have been told so.
    is_broken: bool,
    told_over: bool,
    /// The first step of the newest epoch that has completed one.
    first_step: Option<FirstStep>,
    /// The shard that each member computes, as far as it was asked to say so.
    computing: HashMap<WorkerId, usize>,
    /// Whether a step is complete in this epoch, and how many before it have ended without.
    has_stepped: bool,
    fruitless: u32,
    /// Whether the job is to end.
    is_ending: bool,
    /// Whether the run is complete.
    is_complete: bool,
    /// When the first of them was lost since a step was last complete.
    lost_at: Option<Duration>,
    /// What has been decided, and is not committed.
    changes: VecDeque<Change>,
    /// What is to be done.
    acts: Vec<Act>,
}

impl Coordinator {
    /// Of a job whose workers are yet to connect.
    pub fn new(settings: Settings, now: Duration) -> Coordinator {
        let most = settings.most;
        Coordinator::of(Membership::new(settings, now), most)
    }

    /// Of a job that another coordinator has led to this epoch.
    pub fn resume(
        settings: Settings,
        epoch: u64,
        members: Vec<WorkerId>,
        now: Duration,
    ) -> Coordinator {
        let most = settings.most;
        let history = History { epochs: epoch, ..History::default() };
        let membership = Membership::resume(settings, epoch, members.clone(), now);
        // What came of the epoch until now is not known.
        let has_stepped = true;
        Coordinator { history, members, has_stepped, ..Coordinator::of(membership, most) }
    }

    fn of(membership: Membership, most: usize) -> Coordinator {
        Coordinator {
            most,
            membership,
            about: HashMap::new(),
            history: History::default(),
            observer: None,
            members: Vec::new(),
            lost: Vec::new(),
            released: HashSet::new(),
            is_broken: false,
            told_over: false,
            first_step: None,
            computing: HashMap::new(),
            has_stepped: false,
            fruitless: 0,
            is_ending: false,
            is_complete: false,
            lost_at: None,
            changes: VecDeque::new(),
            acts: Vec::new(),
        }
    }

    /// From now on tells `observer` what happens.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// What has happened so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The processes of workers, as far as they have said so.
    pub fn processes(&self) -> BTreeMap<WorkerId, u32> {
        self.about.iter().map(|(worker, about)| (*worker, about.pid)).collect()
    }

    /// Into how many shards a batch is cut, if the workers have said so.
    pub fn shards(&self) -> Option<u32> {
        self.about.values().find_map(|about| about.shards)
    }

    /// Workers that wait for an epoch.
    pub fn spares(&self) -> Vec<WorkerId> {
        self.membership.spares().collect()
    }

    /// The first step of the newest epoch that has completed one.
    pub fn first_step(&self) -> Option<&FirstStep> {
        self.first_step.as_ref()
    }

    /// When time alone changes something: see [`Coordinator::tick`].
    pub fn deadline(&self) -> Option<Duration> {
        self.membership.deadline()
    }

    /// A machine reports something of a worker.
    pub fn report(&mut self, now: Duration, worker: WorkerId, report: Report) -> Vec<Act> {
        for input in self.inputs(now, worker, report) {
            let decisions = self.membership.handle(now, input);
            self.carry_out(now, decisions, Sign::CutOff);
        }
        self.release_spares();
        self.take_acts()
    }

    /// The machine of these workers cannot be reached any more.
    pub fn vanished(&mut self, now: Duration, workers: Vec<WorkerId>) -> Vec<Act> {
        workers.iter().for_each(|worker| self.count_lost(now, *worker, Sign::Silent));
        let decisions = self.membership.handle(now, Input::Vanished(workers));
        self.carry_out(now, decisions, Sign::CutOff);
        self.release_spares();
        self.take_acts()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Act> {
        let decisions = self.membership.tick(now);
        self.carry_out(now, decisions, Sign::Silent);
        self.take_acts()
    }

    /// What was to be made to last does.
    pub fn committed(&mut self, now: Duration, change: &Change) -> Vec<Act> {
        if self.changes.front() != Some(change) {
            return Vec::new();
        }
        match self.changes.pop_front().expect("it is there") {
            Change::Begin { epoch, members, addresses } => {
                self.begin(now, epoch, &members, addresses);
            }
            Change::Finish { epoch } => {
                self.is_complete = true;
                self.note(now, Occurrence::Finished);
                self.acts.push(Act::Complete { epoch });
            }
        }
        self.acts.extend(self.changes.front().cloned().map(Act::Commit));
        self.tell_over();
        self.take_acts()
    }

    /// A change could be made to last now: asks the members of an epoch to leave it at the end of a step.
    pub fn confirmed(&mut self, epoch: u64) -> Vec<Act> {
        if epoch == self.membership.epoch() {
            for worker in self.membership.members().to_vec() {
                self.tell(worker, ToWorker::AskToRegroup { epoch });
            }
        }
        self.take_acts()
    }

    /// The job is to stop: lets workers go that wait for an epoch, now and from now on; but not while members of the last
    /// one are on their way to the next. They have the state, and save it before they stop.
    pub fn release(&mut self) -> Vec<Act> {
        self.is_ending = true;
        self.release_spares();
        self.take_acts()
    }

    /// Does what must not be done, to see that it is found.
    #[cfg(test)]
    pub fn forget_unseen(&mut self) {
        self.membership.forget_unseen();
    }

    fn take_acts(&mut self) -> Vec<Act> {
        std::mem::take(&mut self.acts)
    }

    fn release_spares(&mut self) {
        if self.is_ending && !self.membership.is_regrouping() {
            let spares: Vec<WorkerId> = self.membership.spares().collect();
            spares.into_iter().for_each(|worker| self.tell(worker, ToWorker::Finish));
        }
    }

    /// What a report is to the core.
    fn inputs(&mut self, now: Duration, worker: WorkerId, report: Report) -> Vec<Input> {
        let input = match report {
            Report::Connected => {
                self.note(now, Occurrence::Connected(worker));
                Input::Connected(worker)
            }
            Report::Ready { after, silent, about } => {
                if self.is_complete {
                    // It has come too late to hear that it is not needed any more.
                    self.tell(worker, ToWorker::Finish);
                    return Vec::new();
                }
                self.note_about(worker, about);
                if !silent.is_empty() {
                    self.lost_at.get_or_insert(now);
                }
                self.note(now, Occurrence::Ready(worker));
                Input::Ready { worker, after, silent }
            }
            Report::Alive => Input::Answered(worker),
            Report::Stepped(first) => {
                let epoch = first.epoch;
                self.on_stepped(now, first);
                Input::Stepped { epoch }
            }
            Report::Finished { epoch } => Input::Finished { worker, epoch },
            Report::Closed => {
                self.note_lost(now, worker, Sign::CutOff);
                Input::Closed(worker)
            }
            Report::Ended => {
                self.count_lost(now, worker, Sign::Ended);
                Input::Ended(worker)
            }
            Report::Leaving => Input::Leaving(worker),
            Report::Returned { stands, about, finished } => {
                self.note_about(worker, about);
                if matches!(stands, Stands::Ready { .. }) && self.members.contains(&worker) {
                    // It has left the epoch, or has not heard of it.
                    self.is_broken = true;
                }
                if self.told_over && stands == Stands::In(self.history.epochs) {
                    // It could not be told with the others.
                    self.tell(worker, ToWorker::Over { epoch: self.history.epochs });
                }
                let finished = finished.map(|epoch| Input::Finished { worker, epoch });
                return [Input::Returned { worker, stands }].into_iter().chain(finished).collect();
            }
            Report::Computing(shard) => {
                match shard {
                    Some(shard) => drop(self.computing.insert(worker, shard)),
                    None => drop(self.computing.remove(&worker)),
                }
                // Its end may have been seen before its last words were read.
                let rank = self.members.iter().position(|member| *member == worker);
                let mut lost = self.history.lost_since.iter_mut().rev();
                if let Some(rank) = rank.filter(|_| self.lost.contains(&worker))
                    && let Some(lost) = lost.find(|lost| lost.rank == rank)
                {
                    lost.shard = shard;
                }
                return Vec::new();
            }
            Report::Look => {
                let seen = self.seen();
                self.tell(worker, seen);
                return Vec::new();
            }
        };
        vec![input]
    }

    fn note_about(&mut self, worker: WorkerId, about: About) {
        if let Some(shards) = about.shards {
            self.most = self.most.min(shards as usize);
            self.membership.limit(self.most);
        }
        self.about.insert(worker, about);
    }

    fn on_stepped(&mut self, now: Duration, first: FirstStep) {
        if first.epoch != self.history.epochs {
            return;
        }
        (self.has_stepped, self.fruitless) = (true, 0);
        self.history.lost_since.clear();
        self.first_step = Some(first.clone());
        let seconds_since = |lost| now.saturating_sub(lost).as_secs_f64();
        let recovery = self.lost_at.take();
        let recovery = recovery.map(|lost| (seconds_since(lost) - first.compute).max(0.0));
        self.note(now, Occurrence::Stepped { first: first.clone(), recovery });
        let recovery = recovery.map(|seconds| Recovery { seconds, first });
        self.history.recoveries.extend(recovery);
    }

    /// The present epoch, as a worker sees it that is not in it.
    fn seen(&self) -> ToWorker {
        let is_over = self.is_complete || self.is_ending;
        let known = self.members.iter().filter_map(|member| self.about.get(member));
        let addresses: Vec<Vec<u8>> = known.map(|about| about.address.clone()).collect();
        ToWorker::Seen(if !is_over && self.membership.is_regrouping() {
            Seen::Regrouping
        } else if is_over || !self.membership.is_whole() || self.members.len() >= self.most {
            Seen::Nothing
        } else if addresses.is_empty() {
            // A new coordinator has yet to hear from them.
            Seen::Regrouping
        } else {
            Seen::Members(addresses)
        })
    }

    /// Does what was decided; `sign` says why workers are to be killed, if any are.
    fn carry_out(&mut self, now: Duration, decisions: Vec<Decision>, sign: Sign) {
        for decision in decisions {
            match decision {
                Decision::Begin { epoch, members } => {
                    let address = |id| self.about.get(id).map(|about| about.address.clone());
                    let addresses = members.iter().map(|id| address(id).unwrap_or_default());
                    let addresses = addresses.collect();
                    self.commit(Change::Begin { epoch, members, addresses });
                }
                Decision::AskToRegroup => {
                    self.acts.push(Act::Confirm { epoch: self.membership.epoch() });
                }
                Decision::Disband => self.acts.push(Act::Disband),
                Decision::Probe(worker) => self.tell(worker, ToWorker::Probe),
                Decision::Release(worker) => {
                    self.released.insert(worker);
                    self.tell(worker, ToWorker::Finish);
                }
                Decision::Kill(worker) => {
                    self.tell_lost(now, worker, sign);
                    self.note(now, Occurrence::Killed { worker, sign });
                    self.acts.push(Act::Kill(worker, sign));
                }
                Decision::Finish => self.commit(Change::Finish { epoch: self.membership.epoch() }),
                Decision::GiveUp { ready } => {
                    self.note(now, Occurrence::GaveUp { ready });
                    self.acts.push(Act::GiveUp { ready });
                }
            }
        }
        self.tell_over();
    }

    fn commit(&mut self, change: Change) {
        if self.changes.is_empty() {
            self.acts.push(Act::Commit(change.clone()));
        }
        self.changes.push_back(change);
    }

    /// Tells the members of a broken epoch that it is over.
    fn tell_over(&mut self) {
        if self.is_broken && !self.told_over && !self.is_complete {
            self.told_over = true;
            let epoch = self.history.epochs;
            for worker in self.members.clone() {
                self.tell(worker, ToWorker::Over { epoch });
            }
        }
    }

    fn begin(&mut self, now: Duration, epoch: u64, members: &[WorkerId], addresses: Vec<Vec<u8>>) {
        log::debug!("epoch {epoch} begins with {members:?}");
        if epoch > 1 && !self.has_stepped {
            self.fruitless += 1;
        }
        if self.fruitless == FRUITLESS {
            self.acts.push(Act::NoProgress { epochs: FRUITLESS });
        }
        let is_new = |worker: &&WorkerId| !self.members.contains(worker);
        self.history.workers_joined += members.iter().filter(is_new).count() as u64;
        if self.history.epochs == 0 {
            self.history.workers_joined = 0;
        }
        self.history.epochs = epoch;
        self.members = members.to_vec();
        self.lost.clear();
        // A member may have been lost since this was decided.
        let is_broken = self.membership.epoch() != epoch || !self.membership.is_whole();
        (self.is_broken, self.told_over, self.has_stepped) = (is_broken, false, false);
        if is_broken {
            self.lost_at.get_or_insert(now);
        }
        self.note(now, Occurrence::Epoch { epoch, members: members.to_vec() });
        self.computing.clear();
        let is_careful = self.fruitless >= CAREFUL;
        let members_too = members.to_vec();
        let message = ToWorker::Begin { epoch, members: members_too, addresses, is_careful };
        members.iter().for_each(|worker| self.tell(*worker, message.clone()));
    }

    fn count_lost(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
        self.about.remove(&worker);
        let is_member = self.members.contains(&worker);
        if is_member && !self.is_complete && !self.released.contains(&worker) {
            self.history.workers_lost += 1;
        }
        self.note_lost(now, worker, sign);
    }

    fn note_lost(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
        let rank = self.members.iter().position(|member| *member == worker);
        if let Some(rank) = rank.filter(|_| !self.released.contains(&worker)) {
            let shard = self.computing.get(&worker).copied();
            let lost = LostMember { rank, world: self.members.len(), shard };
            // Its connection closes, and its process ends.
            let is_known = self.lost.contains(&worker);
            if !self.has_stepped && !is_known {
                self.history.lost_since.push(lost);
            }
            self.is_broken = true;
            self.lost_at.get_or_insert(now);
            self.tell_lost(now, worker, sign);
        }
    }

    /// Tells the observer of the loss of a member, once.
    fn tell_lost(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
        let is_new = self.members.contains(&worker) && !self.lost.contains(&worker);
        if is_new && !self.is_complete {
            self.lost.push(worker);
            self.note(now, Occurrence::Lost { worker, sign });
        }
    }

    /// Tells the observer, if there is one.
    fn note(&self, at: Duration, what: Occurrence) {
        if let Some(observer) = &self.observer {
            observer(Happened { at, what });
        }
    }

    fn tell(&mut self, worker: WorkerId, message: ToWorker) {
        self.acts.push(Act::Tell(worker, message));
    }
}
