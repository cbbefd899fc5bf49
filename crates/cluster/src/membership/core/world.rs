//! A job as the core sees it: worker processes that train, their connections to the coordinator, the launcher
//! that starts and kills them, and a witness that checks whatever happens.
//!
//! A world does one small thing at a time and knows neither chance nor time: [the simulator](super::simulator)
//! draws what happens next, [the search](super::search) tries everything.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::time::Duration;

use super::{Decision, Input, Membership, Phase, Settings, WorkerId};

/// The global batch has so many shards: the sum over all of them does not depend on their division.
const SHARDS: u64 = 12;

/// What a job is to do.
#[derive(Clone, Debug)]
pub struct Job {
    pub settings: Settings,
    pub steps: u64,
    pub buckets: usize,
    /// Rank 0 writes a checkpoint every so many steps.
    pub every: u64,
    pub sabotage: Option<Sabotage>,
    /// Whether messages are quick enough that a worker which is not stopped answers in time.
    pub is_fair: bool,
}

/// What is done wrong, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The next epoch does not wait for members of the old one.
    WaitForNone,
    /// The next epoch waits for the answer of a member that was silent, but does not kill it.
    SpareTheSilent,
    /// The next epoch begins when a member was told to die, and not when it has.
    KillWithoutWaiting,
    /// That an old life is ready counts for the new one.
    MixLives,
    /// A process that sent something before its end counts as alive after it.
    ForgetEnds,
    /// A bucket is complete before all parts are in.
    CommitEarly,
    /// The lowest rank that has state hands it on, whatever its steps.
    OldDonor,
    /// A receiver that was interrupted says that it has state.
    HalfReceived,
    /// The end of the run is believed to a member of an old epoch.
    OldFinish,
    /// Members leave when they are asked to, without a vote.
    NoVote,
    /// Answers are not heard.
    OverlookAnswers,
    /// A pause of the coordinator counts as silence of the workers.
    CountPauses,
    /// A pause of the coordinator counts as waiting for workers.
    GiveUpAfterPauses,
}

/// Weights after so many steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub steps: u64,
    pub weights: u64,
}

/// What went wrong.
pub type Checked = Result<(), String>;

#[derive(Clone)]
pub struct World {
    pub job: Job,
    pub now: Duration,
    pub core: Membership,
    /// Those of whose end, or of whose messages, the coordinator has yet to hear, and the living.
    pub processes: Vec<Process>,
    /// By epoch.
    groups: BTreeMap<u64, Group>,
    last_begun: u64,
    checkpoint: Option<State>,
    result: Option<State>,
    pub is_finished: bool,
    pub tally: Tally,
    /// The states of an undisturbed run.
    references: Rc<[State]>,
}

/// What has happened, counted so that a test can require it.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub counts: BTreeMap<&'static str, u64>,
    pub is_off: bool,
}

#[derive(Clone, Debug)]
pub struct Process {
    pub id: WorkerId,
    pub is_alive: bool,
    pub is_stopped: bool,
    /// The coordinator has ordered its death.
    pub is_doomed: bool,
    /// The coordinator has yet to be told of its end.
    pub is_unreaped: bool,
    /// Whether it was stopped at any time since it was last asked whether it lives.
    was_hindered: bool,
    pub at: At,
    epoch: u64,
    rank: usize,
    state: Option<State>,
    is_asked: bool,
    pub to_coordinator: VecDeque<Up>,
    pub from_coordinator: VecDeque<Down>,
}

/// Where a worker is in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum At {
    Building,
    /// Has said that it is ready.
    Waiting,
    Forming,
    /// Tells the others how many steps it has made.
    Sharing {
        is_in: bool,
    },
    /// Hands its state to others.
    Giving,
    /// Is handed the state of the donor.
    Receiving {
        has_begun: bool,
    },
    /// Loads the checkpoint, since no member has state.
    Loading,
    /// From here on a member needs nothing of what was told when the group formed.
    Bucket {
        bucket: usize,
        is_in: bool,
        /// Whether bucket 0 of this step carried a vote to regroup.
        regroup: bool,
    },
    /// Writes the checkpoint.
    Saving {
        regroup: bool,
    },
    Barrier {
        is_in: bool,
    },
    /// Writes the result.
    Handing,
    /// Has said that the run is complete.
    Over,
    Gone,
}

/// To the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Up {
    Connected,
    Ready { after: u64, silent: Vec<usize> },
    Answered,
    Finished { epoch: u64 },
    Closed,
}

/// From the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Down {
    Begin { epoch: u64, members: Vec<WorkerId> },
    AskToRegroup,
    Probe,
    Finish,
}

/// The members of an epoch, and what they have told each other.
#[derive(Clone, Debug, Hash)]
struct Group {
    members: Vec<WorkerId>,
    has_arrived: Vec<bool>,
    left: Vec<Option<Leave>>,
    /// A member was disturbed, so that the group may fail.
    is_faulty: bool,
    /// After how many steps the first member was asked to let others in.
    asked_at: Option<u64>,
    steps: Vec<Option<Option<u64>>>,
    given: Option<State>,
    /// By step and bucket.
    parts: BTreeMap<(u64, usize), Parts>,
}

/// By rank, a sum of gradients and a vote.
type Parts = Vec<Option<(u64, bool)>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Leave {
    Orderly,
    Failed,
}

impl Process {
    fn is_in_group(&self) -> bool {
        self.is_alive && !matches!(self.at, At::Building | At::Waiting | At::Gone)
    }

    /// Whether it will be in a group as soon as it listens.
    fn is_told(&self) -> bool {
        let is_begin = |message: &Down| matches!(message, Down::Begin { .. });
        self.from_coordinator.iter().any(is_begin)
    }

    fn fingerprint(&self, ago: impl Fn(u64) -> u64, hasher: &mut impl Hasher) {
        let Process { id, is_alive, is_stopped, is_doomed, is_unreaped, at, state, .. } = self;
        (id, is_alive, is_stopped, is_doomed, is_unreaped, at).hash(hasher);
        if *is_alive {
            (state, self.is_asked).hash(hasher);
        }
        if self.is_in_group() {
            (ago(self.epoch), self.rank).hash(hasher);
        }
        for message in &self.to_coordinator {
            match message {
                Up::Ready { after: 0, silent } => (0, 0, silent).hash(hasher),
                Up::Ready { after, silent } => (1, ago(*after), silent).hash(hasher),
                Up::Finished { epoch } => (2, ago(*epoch)).hash(hasher),
                other => (3, other).hash(hasher),
            }
        }
        for message in &self.from_coordinator {
            match message {
                Down::Begin { epoch, members } => (4, ago(*epoch), members).hash(hasher),
                other => (5, other).hash(hasher),
            }
        }
        6.hash(hasher);
    }
}

impl World {
    pub fn new(job: Job) -> World {
        let core = Membership::new(job.settings.clone(), Duration::ZERO);
        let references = (0..=job.steps).map(|steps| reference(steps, job.buckets)).collect();
        World {
            references,
            job,
            now: Duration::ZERO,
            core,
            processes: Vec::new(),
            groups: BTreeMap::new(),
            last_begun: 0,
            checkpoint: None,
            result: None,
            is_finished: false,
            tally: Tally::default(),
        }
    }

    pub fn index(&self, id: WorkerId) -> Option<usize> {
        self.processes.iter().position(|process| process.id == id)
    }

    /// The launcher starts a worker.
    pub fn start(&mut self, id: WorkerId) {
        self.processes.push(Process {
            id,
            is_alive: true,
            is_stopped: false,
            is_doomed: false,
            is_unreaped: false,
            was_hindered: false,
            at: At::Building,
            epoch: 0,
            rank: 0,
            state: None,
            is_asked: false,
            to_coordinator: VecDeque::from([Up::Connected]),
            from_coordinator: VecDeque::new(),
        });
    }

    /// A process ends, by whatever cause. What it has sent may still arrive.
    pub fn end(&mut self, index: usize) {
        let process = &mut self.processes[index];
        let (id, at) = (process.id, process.at);
        (process.is_alive, process.is_stopped, process.is_unreaped) = (false, false, true);
        process.at = At::Gone;
        process.from_coordinator.clear();
        process.to_coordinator.push_back(Up::Closed);
        for group in self.groups.values_mut() {
            if let Some(rank) = group.members.iter().position(|member| *member == id) {
                group.left[rank].get_or_insert(Leave::Failed);
                group.is_faulty = true;
            }
        }
        self.tally.count(match at {
            At::Building => "end while building",
            At::Waiting => "end while waiting",
            At::Forming => "end while forming",
            At::Sharing { .. } => "end while sharing",
            At::Giving => "end while giving",
            At::Receiving { .. } => "end while receiving",
            At::Loading => "end while loading",
            At::Bucket { .. } => "end in a bucket",
            At::Saving { .. } => "end while saving",
            At::Barrier { .. } => "end in the barrier",
            At::Handing => "end while handing in",
            At::Over => "end after the end",
            At::Gone => "end of the gone",
        });
    }

    pub fn stop(&mut self, index: usize) {
        let process = &mut self.processes[index];
        (process.is_stopped, process.was_hindered) = (true, true);
        let id = process.id;
        for group in self.groups.values_mut() {
            group.is_faulty |= group.members.contains(&id);
        }
        self.tally.count("stops");
    }

    pub fn resume(&mut self, index: usize) {
        self.processes[index].is_stopped = false;
    }

    /// The launcher tells the coordinator of a process's end.
    pub fn reap(&mut self, index: usize) -> Checked {
        self.processes[index].is_unreaped = false;
        let id = self.processes[index].id;
        if !self.processes[index].to_coordinator.is_empty() {
            self.tally.count("messages after the end");
        }
        self.forget(index);
        self.tell(Input::Ended(id))
    }

    /// The coordinator hears the next message of a worker.
    pub fn hear(&mut self, index: usize) -> Checked {
        let process = &mut self.processes[index];
        let worker = process.id;
        let message = process.to_coordinator.pop_front().expect("there is one");
        self.forget(index);
        self.tell(match message {
            Up::Connected => Input::Connected(worker),
            Up::Ready { after, silent } => Input::Ready { worker, after, silent },
            Up::Answered => Input::Answered(worker),
            Up::Finished { epoch } => Input::Finished { worker, epoch },
            Up::Closed => Input::Closed(worker),
        })
    }

    fn forget(&mut self, index: usize) {
        let process = &self.processes[index];
        if !process.is_alive && !process.is_unreaped && process.to_coordinator.is_empty() {
            self.processes.remove(index);
        }
    }

    fn tell(&mut self, mut input: Input) -> Checked {
        self.corrupt(&mut input);
        let is_rank_0 = |id: WorkerId, epoch| {
            epoch == self.core.epoch && self.core.members.first() == Some(&id)
        };
        let may_finish = match input {
            Input::Finished { worker, epoch } => is_rank_0(worker, epoch),
            _ => false,
        };
        if self.is_sabotaged(Sabotage::OldFinish)
            && let Input::Finished { worker, epoch } = &mut input
        {
            // As if neither was looked at.
            *epoch = self.core.epoch;
            *worker = *self.core.members.first().expect("an epoch has begun");
        }
        let decisions = self.core.handle(self.now, input);
        self.carry_out(decisions, may_finish)
    }

    pub fn tick(&mut self) -> Checked {
        self.corrupt(&mut Input::Closed(WorkerId { number: u32::MAX, life: 0 }));
        let decisions = self.core.tick(self.now);
        self.carry_out(decisions, false)
    }

    fn is_sabotaged(&self, sabotage: Sabotage) -> bool {
        self.job.sabotage == Some(sabotage)
    }

    /// Does to the core, or to what it is told, what a sabotaged core would do by itself.
    fn corrupt(&mut self, input: &mut Input) {
        let Some(sabotage) = self.job.sabotage else { return };
        let core = &mut self.core;
        match sabotage {
            Sabotage::WaitForNone if core.epoch > 0 && !core.is_whole() => {
                core.workers.retain(|_, worker| !matches!(worker.phase, Phase::In | Phase::Ending));
            }
            Sabotage::KillWithoutWaiting => {
                core.workers.retain(|_, worker| worker.phase != Phase::Ending);
            }
            Sabotage::MixLives => {
                let life = |id: WorkerId| {
                    let mut known = core.workers.keys().filter(|known| known.number == id.number);
                    known.next_back().map_or(id, |known| *known)
                };
                if let Input::Ready { worker, .. } = input {
                    *worker = life(*worker);
                }
            }
            Sabotage::ForgetEnds => core.ended.clear(),
            Sabotage::OverlookAnswers => {
                if let Input::Answered(id) = input {
                    id.number = u32::MAX;
                }
            }
            Sabotage::CountPauses => core.idle_until = None,
            Sabotage::GiveUpAfterPauses if core.is_too_late(self.now) => core.idle_until = None,
            _ => {}
        }
    }

    fn carry_out(&mut self, decisions: Vec<Decision>, may_finish: bool) -> Checked {
        let core = &self.core;
        let has_room = core.is_whole() && core.members.len() < self.job.settings.most;
        let is_due = has_room && !self.is_finished && core.spares().next().is_some();
        check(!is_due || core.has_asked || may_finish, || "a spare is forgotten".into())?;
        for decision in decisions {
            match decision {
                Decision::Begin { epoch, members } => self.begin(epoch, members)?,
                Decision::AskToRegroup => {
                    self.tally.count("asked to regroup");
                    for id in self.core.members.clone() {
                        self.send(id, Down::AskToRegroup);
                    }
                }
                Decision::Probe(id) => {
                    self.tally.count("probes");
                    if let Some(index) = self.index(id) {
                        let process = &mut self.processes[index];
                        process.was_hindered = process.is_stopped;
                    }
                    self.send(id, Down::Probe);
                }
                Decision::Kill(id) => self.kill(id)?,
                Decision::Finish => {
                    check(!self.is_finished, || "the result is handed in twice".into())?;
                    check(may_finish, || "the result of an old epoch counts".into())?;
                    let result = self.result.ok_or("there is no result")?;
                    check(result == self.reference(self.job.steps), || "a wrong result".into())?;
                    self.is_finished = true;
                    self.processes
                        .iter_mut()
                        .filter(|process| process.is_alive)
                        .for_each(|process| process.from_coordinator.push_back(Down::Finish));
                }
                Decision::GiveUp { ready } => {
                    return Err(format!("gives up with {ready} ready"));
                }
            }
        }
        Ok(())
    }

    fn kill(&mut self, id: WorkerId) -> Checked {
        let Some(index) = self.index(id) else { return Ok(()) };
        let (is_fair, sabotage) = (self.job.is_fair, self.job.sabotage);
        let process = &mut self.processes[index];
        if !process.is_alive {
            return Ok(());
        }
        self.tally.count("kills of the silent");
        let is_hindered = process.is_stopped || process.was_hindered;
        check(!is_fair || is_hindered, || format!("{id:?} is killed, though it answers"))?;
        if sabotage == Some(Sabotage::SpareTheSilent) {
            self.core.workers.remove(&id);
        } else {
            process.is_doomed = true;
        }
        Ok(())
    }

    fn begin(&mut self, epoch: u64, members: Vec<WorkerId>) -> Checked {
        let Settings { least, most, .. } = self.job.settings;
        let count = members.len();
        check(count >= least.max(1), || format!("epoch {epoch} of {count} begins, least {least}"))?;
        check(count <= most, || format!("epoch {epoch} of {count} begins, most {most}"))?;
        let mut numbers: Vec<u32> = members.iter().map(|id| id.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        check(numbers.len() == count, || format!("epoch {epoch} has a member twice"))?;
        let last = std::mem::replace(&mut self.last_begun, epoch);
        check(epoch == last + 1, || format!("epoch {epoch} begins after {last}"))?;
        let in_old =
            self.processes.iter().find(|process| process.is_in_group() || process.is_told());
        if let Some(Process { id, .. }) = in_old {
            return Err(format!("epoch {epoch} begins while {id:?} is in {last}"));
        }
        self.groups.clear();
        let left = members.iter().map(|id| {
            let is_there = self.index(*id).is_some_and(|index| self.processes[index].is_alive);
            (!is_there).then_some(Leave::Failed)
        });
        let left: Vec<Option<Leave>> = left.collect();
        let is_stopped =
            |id: &WorkerId| self.index(*id).is_some_and(|index| self.processes[index].is_stopped);
        let is_faulty = left.iter().any(Option::is_some) || members.iter().any(is_stopped);
        let group = Group {
            has_arrived: vec![false; count],
            left,
            is_faulty,
            asked_at: None,
            steps: vec![None; count],
            given: None,
            parts: BTreeMap::new(),
            members: members.clone(),
        };
        self.groups.insert(epoch, group);
        self.tally.count("epochs");
        for id in members.clone() {
            self.send(id, Down::Begin { epoch, members: members.clone() });
        }
        Ok(())
    }

    fn send(&mut self, id: WorkerId, message: Down) {
        if let Some(index) = self.index(id)
            && self.processes[index].is_alive
        {
            self.processes[index].from_coordinator.push_back(message);
        }
    }

    /// Whether the next message can be delivered: the client thread of a worker listens at all times.
    pub fn can_listen(&self, index: usize) -> bool {
        let process = &self.processes[index];
        process.is_alive && !process.is_stopped && !process.from_coordinator.is_empty()
    }

    pub fn listen(&mut self, index: usize) -> Checked {
        let process = &mut self.processes[index];
        let id = process.id;
        match process.from_coordinator.pop_front().expect("there is one") {
            Down::Begin { epoch, members } => {
                let is_ready = process.at == At::Waiting;
                check(is_ready, || {
                    format!("epoch {epoch} begins with {id:?}, which is not ready")
                })?;
                process.at = At::Forming;
                process.is_asked = false;
                process.epoch = epoch;
                process.rank = members.iter().position(|member| *member == id).expect("it is in");
                let rank = process.rank;
                if let Some(group) = self.groups.get_mut(&epoch) {
                    group.has_arrived[rank] = true;
                }
            }
            Down::AskToRegroup => {
                process.is_asked = true;
                let (epoch, steps) = (process.epoch, process.state.map(|state| state.steps));
                if let (Some(steps), At::Bucket { .. }) = (steps, process.at)
                    && self.job.is_fair
                {
                    self.group(epoch).asked_at.get_or_insert(steps);
                }
            }
            Down::Probe => process.to_coordinator.push_back(Up::Answered),
            Down::Finish => {
                // It closes its connection and exits.
                process.at = At::Gone;
                self.end(index);
            }
        }
        Ok(())
    }

    /// Whether the training thread of a worker can go on.
    pub fn can_act(&self, index: usize) -> bool {
        let process = &self.processes[index];
        if !process.is_alive || process.is_stopped {
            return false;
        }
        let Some(group) = self.groups.get(&process.epoch) else {
            return process.at == At::Building;
        };
        match process.at {
            At::Building | At::Giving | At::Loading | At::Saving { .. } | At::Handing => true,
            At::Waiting | At::Over | At::Gone => false,
            At::Forming => group.has_arrived.iter().all(|arrived| *arrived),
            At::Sharing { is_in } => !is_in || group.steps.iter().all(Option::is_some),
            At::Receiving { has_begun } => !has_begun || group.given.is_some(),
            At::Bucket { is_in: false, .. } | At::Barrier { is_in: false } => true,
            At::Bucket { bucket, .. } => {
                self.is_complete(group, (process.state.expect("it has state").steps, bucket))
            }
            At::Barrier { .. } => self.is_complete(group, (self.job.steps, 0)),
        }
    }

    fn is_complete(&self, group: &Group, at: (u64, usize)) -> bool {
        let is_in = |part: &&Option<(u64, bool)>| part.is_some();
        group.parts.get(&at).is_some_and(|parts| {
            let missing = parts.len() - parts.iter().filter(is_in).count();
            missing <= usize::from(self.is_sabotaged(Sabotage::CommitEarly))
        })
    }

    /// The training thread of a worker goes on.
    pub fn act(&mut self, index: usize) -> Checked {
        let Process { at, epoch, rank, .. } = self.processes[index];
        match at {
            At::Building => self.say_ready(index, 0, Vec::new()),
            At::Forming => self.processes[index].at = At::Sharing { is_in: false },
            At::Sharing { is_in: false } => {
                let steps = self.processes[index].state.map(|state| state.steps);
                self.group(epoch).steps[rank] = Some(steps);
                self.processes[index].at = At::Sharing { is_in: true };
            }
            At::Sharing { is_in: true } => {
                self.settle_state(index)?;
                self.tidy(epoch);
            }
            At::Giving => {
                self.tally.count("states given");
                self.group(epoch).given = self.processes[index].state;
                self.next_step(index, false);
            }
            At::Receiving { has_begun: false } => {
                let most = self.group(epoch).steps.iter().flatten().flatten().max().copied();
                let half = most.map(|steps| State { steps, weights: 1 });
                self.processes[index].state =
                    half.filter(|_| self.is_sabotaged(Sabotage::HalfReceived));
                self.processes[index].at = At::Receiving { has_begun: true };
            }
            At::Receiving { has_begun: true } => {
                self.processes[index].state = self.group(epoch).given;
                self.next_step(index, false);
                self.tidy(epoch);
            }
            At::Loading => {
                self.tally.count("checkpoints loaded");
                let state = self.checkpoint.unwrap_or(self.reference(0));
                self.processes[index].state = Some(state);
                self.next_step(index, false);
            }
            At::Bucket { bucket, is_in: false, regroup } => {
                let Process { state, is_asked, .. } = self.processes[index];
                let state = state.expect("it has state");
                let part = (self.part(epoch, rank, state, bucket), is_asked && bucket == 0);
                self.contribute(epoch, rank, (state.steps, bucket), part);
                self.processes[index].at = At::Bucket { bucket, is_in: true, regroup };
            }
            At::Bucket { bucket, is_in: true, regroup } => {
                self.check_newest(epoch, "completes a bucket")?;
                let steps = self.processes[index].state.expect("it has state").steps;
                let parts = &self.group(epoch).parts[&(steps, bucket)];
                let regroup = regroup || parts.iter().flatten().any(|(_, vote)| *vote);
                if bucket + 1 < self.job.buckets {
                    let bucket = bucket + 1;
                    self.processes[index].at = At::Bucket { bucket, is_in: false, regroup };
                } else {
                    self.apply(index)?;
                    let steps = steps + 1;
                    if rank == 0 && steps.is_multiple_of(self.job.every) {
                        self.processes[index].at = At::Saving { regroup };
                    } else {
                        self.next_step(index, regroup);
                    }
                }
            }
            At::Saving { regroup } => {
                self.check_newest(epoch, "writes a checkpoint")?;
                self.checkpoint = self.processes[index].state;
                self.next_step(index, regroup);
            }
            At::Barrier { is_in: false } => {
                self.contribute(epoch, rank, (self.job.steps, 0), (0, false));
                self.processes[index].at = At::Barrier { is_in: true };
            }
            At::Barrier { is_in: true } if rank == 0 => self.processes[index].at = At::Handing,
            At::Barrier { is_in: true } => {
                self.group(epoch).left[rank] = Some(Leave::Orderly);
                self.say_ready(index, epoch, Vec::new());
            }
            At::Handing => {
                self.check_newest(epoch, "writes the result")?;
                self.result = self.processes[index].state;
                self.processes[index].at = At::Over;
                self.processes[index].to_coordinator.push_back(Up::Finished { epoch });
            }
            At::Waiting | At::Over | At::Gone => unreachable!("it waits"),
        }
        Ok(())
    }

    fn say_ready(&mut self, index: usize, after: u64, silent: Vec<usize>) {
        let process = &mut self.processes[index];
        process.at = At::Waiting;
        process.to_coordinator.push_back(Up::Ready { after, silent });
    }

    fn group(&mut self, epoch: u64) -> &mut Group {
        self.groups.get_mut(&epoch).expect("a member is in it")
    }

    /// All know how many steps each has made: what does this rank do?
    fn settle_state(&mut self, index: usize) -> Checked {
        let Process { id, epoch, rank, .. } = self.processes[index];
        let takes_any = self.is_sabotaged(Sabotage::OldDonor);
        let steps = self.group(epoch).steps.iter().map(|steps| steps.flatten());
        let steps: Vec<Option<u64>> = steps.collect();
        let most = match takes_any {
            true => steps.iter().flatten().next().copied(),
            false => steps.iter().flatten().max().copied(),
        };
        let donor = steps.iter().position(|steps| steps.is_some() && *steps == most);
        self.processes[index].at = match donor {
            None => At::Loading,
            Some(_) if steps.iter().all(|steps| *steps == most) => {
                self.next_step(index, false);
                return Ok(());
            }
            Some(donor) if donor == rank => At::Giving,
            Some(_) if steps[rank] == most => {
                self.next_step(index, false);
                return Ok(());
            }
            Some(_) => At::Receiving { has_begun: false },
        };
        check(steps[rank] <= most, || format!("{id:?} is handed an older state"))
    }

    /// Forgets what all members have read.
    fn tidy(&mut self, epoch: u64) {
        let members = self.processes.iter().filter(|process| process.epoch == epoch);
        let count = members.clone().filter(|process| process.at > At::Loading).count();
        let group = self.group(epoch);
        if count == group.members.len() {
            group.steps.fill(None);
            group.given = None;
        }
    }

    fn next_step(&mut self, index: usize, regroup: bool) {
        let leaves_alone = self.is_sabotaged(Sabotage::NoVote) && self.processes[index].is_asked;
        let Process { epoch, rank, state, .. } = self.processes[index];
        let steps = state.expect("it has state").steps;
        if steps >= self.job.steps {
            self.processes[index].at = At::Barrier { is_in: false };
        } else if regroup || leaves_alone {
            self.tally.count("leaves to regroup");
            self.group(epoch).left[rank] = Some(Leave::Orderly);
            self.say_ready(index, epoch, Vec::new());
        } else {
            self.processes[index].at = At::Bucket { bucket: 0, is_in: false, regroup: false };
        }
    }

    fn part(&self, epoch: u64, rank: usize, state: State, bucket: usize) -> u64 {
        let (rank, world) = (rank as u64, self.groups[&epoch].members.len() as u64);
        let mine = rank * SHARDS / world..(rank + 1) * SHARDS / world;
        mine.map(|shard| gradient(state, bucket, shard)).fold(0, u64::wrapping_add)
    }

    fn contribute(&mut self, epoch: u64, rank: usize, at: (u64, usize), part: (u64, bool)) {
        let group = self.group(epoch);
        // A rank contributes to a step after it has completed the last one, and then all have contributed to
        // that: nothing of the one before is read any more.
        group.parts.retain(|(step, _), _| step + 1 >= at.0);
        let world = group.members.len();
        group.parts.entry(at).or_insert_with(|| vec![None; world])[rank] = Some(part);
    }

    fn apply(&mut self, index: usize) -> Checked {
        let Process { id, epoch, state, .. } = self.processes[index];
        let state = state.expect("it has state");
        let sum = |bucket| {
            let parts = &self.groups[&epoch].parts[&(state.steps, bucket)];
            parts.iter().flatten().map(|(part, _)| *part).fold(0, u64::wrapping_add)
        };
        let weights = update(state.weights, (0..self.job.buckets).map(sum));
        let new = State { steps: state.steps + 1, weights };
        let is_right = new == self.reference(new.steps);
        check(is_right, || format!("wrong weights of {id:?} after {} steps", new.steps))?;
        self.processes[index].state = Some(new);
        let asked_at = self.groups[&epoch].asked_at.unwrap_or(new.steps);
        check(new.steps <= asked_at + 2, || "a spare is not let in".into())
    }

    fn check_newest(&self, epoch: u64, what: &str) -> Checked {
        let newest = self.core.epoch();
        check(epoch == newest, || format!("a member of epoch {epoch} {what} in epoch {newest}"))
    }

    /// The weights of an undisturbed run.
    fn reference(&self, steps: u64) -> State {
        self.references[steps as usize]
    }

    /// Whether a worker can find that its group has failed.
    pub fn can_fail(&self, index: usize) -> bool {
        let process = &self.processes[index];
        if !process.is_in_group() || process.is_stopped || process.at >= At::Handing {
            return false;
        }
        let left = &self.groups[&process.epoch].left;
        let has_failed = left.contains(&Some(Leave::Failed));
        has_failed || (left.contains(&Some(Leave::Orderly)) && !self.can_act(index))
    }

    /// Ranks other than its own that a worker cannot hear because they are stopped.
    pub fn stopped_peers(&self, index: usize) -> Vec<(usize, WorkerId)> {
        let process = &self.processes[index];
        if !process.is_in_group() || process.is_stopped || process.at >= At::Handing {
            return Vec::new();
        }
        let is_stopped = |(rank, id): &(usize, &WorkerId)| {
            let peer = self.index(**id);
            *rank != process.rank && peer.is_some_and(|peer| self.processes[peer].is_stopped)
        };
        let group = &self.groups[&process.epoch];
        let members = group.members.iter().enumerate().filter(is_stopped);
        let members = members.filter(|(rank, _)| group.left[*rank].is_none());
        members.map(|(rank, id)| (rank, *id)).collect()
    }

    /// A worker finds that its group has failed.
    pub fn fail(&mut self, index: usize, silent: Vec<usize>) -> Checked {
        let Process { id, epoch, rank, .. } = self.processes[index];
        let group = self.group(epoch);
        check(group.is_faulty, || format!("the group of {id:?} fails without a fault"))?;
        group.left[rank] = Some(Leave::Failed);
        self.tally.count(if silent.is_empty() { "failures" } else { "failures by silence" });
        self.say_ready(index, epoch, silent);
        Ok(())
    }

    /// The worker and a peer at random that it takes to be silent, though it is not.
    pub fn suspect_wrongly(&mut self, index: usize, peer: usize) -> Checked {
        let Process { epoch, rank, .. } = self.processes[index];
        if !self.processes[index].is_in_group() || self.processes[index].at >= At::Handing {
            return Ok(());
        }
        let group = self.group(epoch);
        let peer = peer % group.members.len();
        if peer == rank {
            return Ok(());
        }
        group.is_faulty = true;
        self.tally.count("wrong suspicions");
        self.fail(index, vec![peer])
    }

    /// That peers which left in an orderly way look like lost ones.
    pub fn fail_rudely(&mut self, index: usize) -> Checked {
        let process = &self.processes[index];
        let can = process.is_in_group() && !process.is_stopped && process.at < At::Handing;
        if !can || !self.groups[&process.epoch].left.contains(&Some(Leave::Orderly)) {
            return Ok(());
        }
        let epoch = process.epoch;
        self.group(epoch).is_faulty = true;
        self.tally.count("orderly ends taken for losses");
        self.fail(index, Vec::new())
    }

    /// Whether the run has ended, and all processes but those that are stopped.
    pub fn is_over(&self) -> bool {
        self.is_finished
            && self.processes.iter().all(|process| !process.is_alive || process.is_stopped)
    }

    /// Whether the next thing that a worker does is seen by no other process, and makes no difference to what it
    /// says if its group fails.
    pub fn acts_unseen(&self, index: usize) -> bool {
        let last = self.job.buckets - 1;
        let is_unseen = match self.processes[index].at {
            At::Forming | At::Sharing { is_in: true } | At::Loading => true,
            At::Bucket { bucket, is_in: true, .. } => bucket < last,
            _ => false,
        };
        is_unseen && self.can_act(index)
    }

    /// All that matters for what can happen from here, times as they are from now.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        // How many epochs there were before makes no difference.
        let ago = |epoch: u64| self.core.epoch - epoch;
        for process in &self.processes {
            process.fingerprint(ago, hasher);
        }
        self.groups.values().for_each(|group| group.hash(hasher));
        (self.checkpoint, self.result, self.is_finished).hash(hasher);
        let core = &self.core;
        let since = |time: Option<Duration>| time.map(|time| self.now.saturating_sub(time));
        (&core.ended, core.epoch > 0, &core.members, core.has_asked).hash(hasher);
        since(core.short_since).hash(hasher);
        let timeout = self.job.settings.timeout;
        for (id, worker) in &core.workers {
            (id, worker.phase as u8).hash(hasher);
            if worker.must_answer() {
                let heard = since(Some(worker.heard)).min(Some(timeout));
                (since(worker.asked), heard, worker.is_suspect).hash(hasher);
            }
        }
    }
}

impl Tally {
    pub fn count(&mut self, what: &'static str) {
        if self.is_off {
            return;
        }
        *self.counts.entry(what).or_default() += 1;
    }

    pub fn add(&mut self, other: &Tally) {
        for (what, count) in &other.counts {
            *self.counts.entry(what).or_default() += count;
        }
    }
}

fn reference(steps: u64, buckets: usize) -> State {
    let mut state = State { steps: 0, weights: 7 };
    while state.steps < steps {
        let sum = |bucket| {
            let all = (0..SHARDS).map(|shard| gradient(state, bucket, shard));
            all.fold(0, u64::wrapping_add)
        };
        let weights = update(state.weights, (0..buckets).map(sum));
        state = State { steps: state.steps + 1, weights };
    }
    state
}

fn gradient(state: State, bucket: usize, shard: u64) -> u64 {
    mix(mix(state.weights ^ mix(state.steps)) ^ mix(bucket as u64 * SHARDS + shard))
}

fn update(weights: u64, means: impl Iterator<Item = u64>) -> u64 {
    means.fold(weights, |weights, mean| mix(weights ^ mean))
}

/// The last part of SplitMix64.
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub fn check(is_right: bool, wrong: impl FnOnce() -> String) -> Checked {
    if is_right { Ok(()) } else { Err(wrong()) }
}
