//! Worker processes: they train in groups that span machines.

use std::collections::{BTreeMap, VecDeque};

use super::hosts::Brought;
use super::world::{Event, MS, Sabotage, Time, World};
use crate::membership::coordinator::Report;

use crate::membership::core::WorkerId;
use crate::membership::model::{Checked, State, check, part, update};
use crate::membership::{About, FirstStep, ToWorker};

pub struct Process {
    pub id: WorkerId,
    pub host: usize,
    pub is_alive: bool,
    pub is_stopped: bool,
    /// When it ended.
    pub ended: Time,
    /// Its death was ordered.
    pub is_doomed: bool,
    /// It was let go.
    pub is_released: bool,
    /// Ended well: it is not started again.
    pub is_done: bool,
    /// The launcher has its connection.
    is_linked: bool,
    pub at: At,
    pub epoch: u64,
    pub rank: usize,
    pub state: Option<State>,
    /// Steps that it completed in an epoch after another had begun.
    pub late_steps: u64,
    /// Whether it has completed a step in its epoch.
    has_stepped: bool,
    /// The newest epoch that it was asked to leave, and the newest that is over.
    asked: u64,
    over: u64,
    next: Option<Next>,
    last_up: Time,
    down: VecDeque<ToWorker>,
    last_down: Time,
    held: usize,
    acts: bool,
    fails: bool,
    silence: Option<Vec<usize>>,
}

#[derive(Clone, Debug)]
enum Next {
    Epoch(u64, Vec<WorkerId>),
    Over,
}

/// What a worker says to its launcher.
#[derive(Clone, Debug)]
pub enum Up {
    Connected,
    Ready { after: u64, silent: Vec<usize> },
    Alive,
    Stepped { epoch: u64 },
    Finished { epoch: u64 },
    Closed,
}

/// Where a worker is in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum At {
    Building,
    Waiting,
    Forming,
    Sharing { is_in: bool },
    Giving,
    Receiving { has_begun: bool },
    Loading,
    Bucket { bucket: usize, is_in: bool, regroup: bool },
    Saving { regroup: bool },
    Barrier { is_in: bool },
    Handing,
    Over,
    Gone,
}

/// The members of an epoch, and what they have told each other.
pub struct Group {
    pub members: Vec<WorkerId>,
    /// By rank.
    pub processes: Vec<usize>,
    has_arrived: Vec<bool>,
    left: Vec<Option<Leave>>,
    steps: Vec<Option<Option<u64>>>,
    given: Option<State>,
    parts: BTreeMap<(u64, usize), Parts>,
}

/// By rank, a sum of gradients and a vote.
type Parts = Vec<Option<(u64, bool)>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    Orderly,
    Failed,
}

impl Process {
    pub fn is_in_group(&self) -> bool {
        self.is_alive && !matches!(self.at, At::Building | At::Waiting | At::Gone)
    }

    /// Whether it will be in a group as soon as it listens.
    pub fn is_told(&self) -> bool {
        let is_begin = |message: &ToWorker| matches!(message, ToWorker::Begin { .. });
        matches!(self.next, Some(Next::Epoch(..))) || self.down.iter().any(is_begin)
    }

    fn can_fail_at(&self) -> bool {
        self.is_in_group() && !self.is_stopped && self.at < At::Handing
    }
}

impl Group {
    pub fn new(members: Vec<WorkerId>, processes: Vec<usize>) -> Group {
        let count = members.len();
        Group {
            members,
            processes,
            has_arrived: vec![false; count],
            left: vec![None; count],
            steps: vec![None; count],
            given: None,
            parts: BTreeMap::new(),
        }
    }
}

impl World {
    pub fn index(&self, id: WorkerId) -> Option<usize> {
        self.processes.iter().rposition(|process| process.id == id)
    }

    /// The processes of a machine that live.
    pub fn of_host(&self, host: usize) -> Vec<usize> {
        let is_of = |index: &usize| self.processes[*index].host == host;
        self.living.iter().copied().filter(is_of).collect()
    }

    pub fn start(&mut self, host: usize, id: WorkerId) {
        let machine = &self.hosts[host];
        if !machine.is_alive || machine.is_over {
            return;
        }
        if machine.is_stopped {
            return self.plan(self.now + 100 * MS, Event::Start(host, id));
        }
        self.processes.push(Process {
            id,
            host,
            is_alive: true,
            is_stopped: false,
            ended: 0,
            is_doomed: false,
            is_released: false,
            is_done: false,
            is_linked: false,
            at: At::Building,
            epoch: 0,
            rank: 0,
            state: None,
            late_steps: 0,
            has_stepped: false,
            asked: 0,
            over: 0,
            next: None,
            last_up: 0,
            down: VecDeque::new(),
            last_down: 0,
            held: 0,
            acts: false,
            fails: false,
            silence: None,
        });
        let index = self.processes.len() - 1;
        self.living.push(index);
        self.say(index, Up::Connected);
    }

    fn say(&mut self, index: usize, up: Up) {
        let at = self.now + self.random.below(self.message);
        let Process { id, host, last_up, .. } = &mut self.processes[index];
        *last_up = at.max(*last_up);
        let (at, host, id) = (*last_up, *host, *id);
        self.plan(at, Event::Deliver(host, Brought::Worker(id, up)));
    }

    /// What the agent of a machine makes of what a worker said.
    pub fn report_of(&mut self, worker: WorkerId, up: Up) -> Option<Report> {
        let index = self.index(worker)?;
        let process = &mut self.processes[index];
        if !process.is_linked && !matches!(up, Up::Connected | Up::Closed) {
            return None;
        }
        Some(match up {
            Up::Connected => {
                process.is_linked = true;
                Report::Connected
            }
            Up::Ready { after, silent } => {
                let about = About { address: address(worker), ..About::default() };
                Report::Ready { after, silent, about }
            }
            Up::Alive => Report::Alive,
            Up::Stepped { epoch } => Report::Stepped(FirstStep {
                epoch,
                step: 0,
                compute: 0.0,
                redone: false,
                behind: 0,
                from_checkpoint: false,
            }),
            Up::Finished { epoch } => Report::Finished { epoch },
            Up::Closed => {
                process.is_linked = false;
                Report::Closed
            }
        })
    }

    /// A process ends, by whatever cause.
    pub fn end_worker(&mut self, index: usize, is_lost: bool) {
        let process = &mut self.processes[index];
        if !process.is_alive {
            return;
        }
        let (id, host) = (process.id, process.host);
        (process.is_alive, process.is_stopped, process.at) = (false, false, At::Gone);
        process.ended = self.now;
        process.down.clear();
        self.living.retain(|other| *other != index);
        if is_lost {
            return;
        }
        for group in self.groups.values_mut() {
            if let Some(rank) = group.members.iter().position(|member| *member == id) {
                group.left[rank].get_or_insert(Leave::Failed);
            }
        }
        self.say(index, Up::Closed);
        let at = self.now + self.random.below(self.message.min(5 * MS));
        self.plan(at, Event::Deliver(host, Brought::Ended(id)));
        if !self.processes[index].is_done {
            let at = at + self.random.below(self.restart);
            self.plan(at, Event::Start(host, WorkerId { life: id.life + 1, ..id }));
        }
    }

    pub fn stop_worker(&mut self, index: usize, length: Time) {
        let process = &mut self.processes[index];
        if process.is_alive && !process.is_stopped {
            process.is_stopped = true;
            self.tally.count("workers stopped");
            self.plan(self.now + length, Event::Resume(index));
        }
    }

    pub fn resume_worker(&mut self, index: usize) {
        let process = &mut self.processes[index];
        if process.is_alive && std::mem::take(&mut process.is_stopped) {
            for _ in 0..std::mem::take(&mut process.held) {
                self.plan(self.now, Event::Listen(index));
            }
        }
    }

    /// The launcher kills a worker.
    pub fn doom(&mut self, worker: WorkerId, is_now: bool) {
        let Some(index) = self.index(worker) else { return };
        if self.processes[index].is_alive {
            self.processes[index].is_doomed = true;
            if is_now {
                self.tally.count("workers killed by order");
                let at = self.now + self.random.below(self.kill);
                self.plan(at, Event::Die(index));
            }
        }
    }

    pub fn tell_all(&mut self, host: usize, message: &ToWorker) -> Checked {
        for index in self.of_host(host) {
            let id = self.processes[index].id;
            self.tell_worker(id, message.clone())?;
        }
        Ok(())
    }

    /// The launcher of a machine says something to one of its workers.
    pub fn tell_worker(&mut self, worker: WorkerId, message: ToWorker) -> Checked {
        let Some(index) = self.index(worker) else { return Ok(()) };
        if !self.processes[index].is_alive || !self.processes[index].is_linked {
            return Ok(());
        }
        match &message {
            ToWorker::Begin { epoch, members, addresses, .. } => {
                self.check_begin(*epoch, members)?;
                let known: Vec<Vec<u8>> = members.iter().map(|member| address(*member)).collect();
                check(*addresses == known, || {
                    format!("epoch {epoch} begins with {members:?} at {addresses:?}")
                })?;
            }
            ToWorker::Finish => self.check_release(index)?,
            _ => {}
        }
        let at = self.now + self.random.below(self.message);
        let process = &mut self.processes[index];
        process.last_down = at.max(process.last_down);
        process.down.push_back(message);
        let at = process.last_down;
        self.plan(at, Event::Listen(index));
        Ok(())
    }

    pub fn listen(&mut self, index: usize) -> Checked {
        let process = &mut self.processes[index];
        if !process.is_alive {
            return Ok(());
        }
        if process.is_stopped {
            process.held += 1;
            return Ok(());
        }
        match process.down.pop_front().expect("it was told") {
            ToWorker::Begin { epoch, members, .. } => {
                let (id, is_ready) = (process.id, process.at == At::Waiting);
                let is_new = process.next.is_none() && process.epoch < epoch;
                check(is_ready && is_new, || {
                    format!("epoch {epoch} begins with {id:?}, which is not ready")
                })?;
                process.next = Some(Next::Epoch(epoch, members));
                self.check_entry(index, epoch)?;
            }
            ToWorker::AskToRegroup { epoch } => process.asked = epoch.max(process.asked),
            ToWorker::Over { epoch } => process.over = epoch.max(process.over),
            ToWorker::Probe => self.say(index, Up::Alive),
            ToWorker::Finish => process.next = Some(Next::Over),
            // Workers of the simulator do not look for the state before they are ready.
            ToWorker::Seen(_) | ToWorker::Stop => {}
        }
        Ok(())
    }

    /// Whether the training thread of a worker can go on.
    fn can_act(&self, index: usize) -> bool {
        let process = &self.processes[index];
        if process.is_stopped {
            return false;
        }
        match process.at {
            At::Building => return true,
            At::Waiting => return process.next.is_some(),
            At::Over => return matches!(process.next, Some(Next::Over)),
            _ => {}
        }
        let Some(group) = self.groups.get(&process.epoch) else { return false };
        let hears_all = || {
            let host = |other: usize| self.processes[other].host;
            group.processes.iter().all(|other| !self.are_cut(process.host, host(*other)))
        };
        let is_complete = |at: (u64, usize)| {
            let is_in = |parts: &Parts| parts.iter().all(Option::is_some);
            group.parts.get(&at).is_some_and(is_in) && hears_all()
        };
        match process.at {
            At::Giving | At::Loading | At::Saving { .. } | At::Handing => true,
            At::Forming => group.has_arrived.iter().all(|arrived| *arrived) && hears_all(),
            At::Sharing { is_in } => {
                !is_in || (group.steps.iter().all(Option::is_some) && hears_all())
            }
            At::Receiving { has_begun } => !has_begun || (group.given.is_some() && hears_all()),
            At::Bucket { is_in: false, .. } | At::Barrier { is_in: false } => true,
            At::Bucket { bucket, .. } => {
                is_complete((process.state.expect("it has state").steps, bucket))
            }
            At::Barrier { .. } => is_complete((self.steps, 0)),
            At::Building | At::Waiting | At::Over | At::Gone => false,
        }
    }

    /// The training thread of a worker goes on.
    pub fn act(&mut self, index: usize) -> Checked {
        self.processes[index].acts = false;
        if !self.processes[index].is_alive || !self.can_act(index) {
            return Ok(());
        }
        let Process { at, epoch, rank, .. } = self.processes[index];
        match at {
            At::Building => self.say_ready(index, 0, Vec::new()),
            At::Waiting | At::Over => self.enter(index),
            At::Forming => self.processes[index].at = At::Sharing { is_in: false },
            At::Sharing { is_in: false } => {
                let steps = self.processes[index].state.map(|state| state.steps);
                self.group(epoch).steps[rank] = Some(steps);
                self.processes[index].at = At::Sharing { is_in: true };
            }
            At::Sharing { is_in: true } => self.settle_state(index)?,
            At::Giving => {
                self.tally.count("states given");
                self.group(epoch).given = self.processes[index].state;
                self.next_step(index, false);
            }
            At::Receiving { has_begun: false } => {
                self.processes[index].state = None;
                self.processes[index].at = At::Receiving { has_begun: true };
            }
            At::Receiving { has_begun: true } => {
                self.processes[index].state = self.group(epoch).given;
                self.next_step(index, false);
            }
            At::Loading => {
                self.tally.count("checkpoints loaded");
                self.processes[index].state = Some(self.checkpoint.unwrap_or(self.references[0]));
                self.next_step(index, false);
            }
            At::Bucket { bucket, is_in: false, regroup } => {
                let Process { state, asked, .. } = self.processes[index];
                let state = state.expect("it has state");
                let world = self.group(epoch).members.len();
                let vote = asked >= epoch && bucket == 0;
                let part = (part(state, bucket, rank, world), vote);
                self.contribute(epoch, rank, (state.steps, bucket), part);
                self.processes[index].at = At::Bucket { bucket, is_in: true, regroup };
            }
            At::Bucket { bucket, is_in: true, regroup } => {
                let steps = self.processes[index].state.expect("it has state").steps;
                let parts = &self.group(epoch).parts[&(steps, bucket)];
                let regroup = regroup || parts.iter().flatten().any(|(_, vote)| *vote);
                if bucket + 1 < self.buckets {
                    let bucket = bucket + 1;
                    self.processes[index].at = At::Bucket { bucket, is_in: false, regroup };
                } else {
                    self.apply(index)?;
                    if !std::mem::replace(&mut self.processes[index].has_stepped, true) && rank == 0
                    {
                        self.say(index, Up::Stepped { epoch });
                    }
                    if rank == 0 && (steps + 1).is_multiple_of(self.every) {
                        self.processes[index].at = At::Saving { regroup };
                    } else {
                        self.next_step(index, regroup);
                    }
                }
            }
            At::Saving { regroup } => {
                // Checkpoints have the name of their step: a late one takes the place of no newer one.
                let state = self.processes[index].state;
                let steps = |state: Option<State>| state.map(|state| state.steps);
                if steps(state) > steps(self.checkpoint) {
                    self.checkpoint = state;
                }
                self.next_step(index, regroup);
            }
            At::Barrier { is_in: false } => {
                self.contribute(epoch, rank, (self.steps, 0), (0, false));
                self.processes[index].at = At::Barrier { is_in: true };
            }
            At::Barrier { is_in: true } if rank == 0 => self.processes[index].at = At::Handing,
            At::Barrier { is_in: true } => self.leave(index, Leave::Orderly, Vec::new()),
            At::Handing => {
                let state = self.processes[index].state.expect("it has state");
                self.results.insert(epoch, state);
                self.processes[index].at = At::Over;
                self.say(index, Up::Finished { epoch });
            }
            At::Gone => unreachable!("it cannot act"),
        }
        Ok(())
    }

    /// What a worker that waits is told.
    fn enter(&mut self, index: usize) {
        let process = &mut self.processes[index];
        match process.next.take().expect("it can act") {
            Next::Over => {
                process.is_done = true;
                self.end_worker(index, false);
            }
            Next::Epoch(epoch, members) => {
                let id = process.id;
                let rank = members.iter().position(|member| *member == id).expect("it is in");
                (process.at, process.epoch, process.rank) = (At::Forming, epoch, rank);
                (process.late_steps, process.has_stepped) = (0, false);
                self.group(epoch).has_arrived[rank] = true;
            }
        }
    }

    fn group(&mut self, epoch: u64) -> &mut Group {
        self.groups.get_mut(&epoch).expect("a member is in it")
    }

    fn leave(&mut self, index: usize, how: Leave, silent: Vec<usize>) {
        let Process { epoch, rank, .. } = self.processes[index];
        self.group(epoch).left[rank].get_or_insert(how);
        self.say_ready(index, epoch, silent);
    }

    fn say_ready(&mut self, index: usize, after: u64, silent: Vec<usize>) {
        self.processes[index].at = At::Waiting;
        let Process { id, host, .. } = self.processes[index];
        if self.sabotage == Some(Sabotage::ReleaseAtOnce) && self.hosts[host].is_leaving {
            let _ =
                self.tell_worker(id, ToWorker::Finish).map_err(|wrong| self.wrong = Some(wrong));
        }
        self.say(index, Up::Ready { after, silent });
    }

    /// All know how many steps each has made: what does this rank do?
    fn settle_state(&mut self, index: usize) -> Checked {
        let Process { id, epoch, rank, .. } = self.processes[index];
        let steps: Vec<Option<u64>> =
            self.group(epoch).steps.iter().map(|steps| steps.flatten()).collect();
        let most = steps.iter().flatten().max().copied();
        let donor = steps.iter().position(|steps| steps.is_some() && *steps == most);
        let is_behind = |steps: &Option<u64>| *steps != most;
        match donor {
            None => self.processes[index].at = At::Loading,
            Some(donor) if donor == rank && steps.iter().any(is_behind) => {
                self.processes[index].at = At::Giving;
            }
            Some(_) if steps[rank] == most => self.next_step(index, false),
            Some(_) => self.processes[index].at = At::Receiving { has_begun: false },
        }
        check(steps[rank] <= most, || format!("{id:?} is handed an older state"))
    }

    fn next_step(&mut self, index: usize, regroup: bool) {
        let steps = self.processes[index].state.expect("it has state").steps;
        if steps >= self.steps {
            self.processes[index].at = At::Barrier { is_in: false };
        } else if regroup {
            self.tally.count("leaves to regroup");
            self.leave(index, Leave::Orderly, Vec::new());
        } else {
            self.processes[index].at = At::Bucket { bucket: 0, is_in: false, regroup: false };
        }
    }

    fn contribute(&mut self, epoch: u64, rank: usize, at: (u64, usize), part: (u64, bool)) {
        let group = self.group(epoch);
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
        let weights = update(state.weights, (0..self.buckets).map(sum));
        let new = State { steps: state.steps + 1, weights };
        let is_right = new == self.references[new.steps as usize];
        check(is_right, || format!("wrong weights of {id:?} after {} steps", new.steps))?;
        self.processes[index].state = Some(new);
        self.check_step(index)
    }

    /// Whether a worker can find that its group has failed.
    fn can_fail(&self, index: usize) -> bool {
        let process = &self.processes[index];
        if !process.can_fail_at() {
            return false;
        }
        let group = &self.groups[&process.epoch];
        let shows = |how: Leave| {
            let mut ranks = group.left.iter().zip(&group.processes);
            ranks.any(|(left, other)| {
                let is_cut = self.are_cut(process.host, self.processes[*other].host);
                *left == Some(how) && !is_cut && *other != index
            })
        };
        process.over >= process.epoch
            || shows(Leave::Failed)
            || (shows(Leave::Orderly) && !self.can_act(index))
    }

    /// Ranks that a worker cannot hear, or that have not come.
    fn silent(&self, index: usize) -> Vec<usize> {
        let process = &self.processes[index];
        if !process.can_fail_at() {
            return Vec::new();
        }
        let group = &self.groups[&process.epoch];
        let is_silent = |(rank, other): (usize, &usize)| {
            let peer = &self.processes[*other];
            let is_away = self.are_cut(process.host, peer.host)
                || peer.is_stopped
                || self.hosts[peer.host].is_lost
                || (process.at == At::Forming && !group.has_arrived[rank]);
            (*other != index && is_away).then_some(rank)
        };
        group.processes.iter().enumerate().filter_map(is_silent).collect()
    }

    pub fn fail(&mut self, index: usize) {
        self.processes[index].fails = false;
        if self.processes[index].is_alive && self.can_fail(index) {
            self.tally.count("failures");
            self.leave(index, Leave::Failed, Vec::new());
        }
    }

    pub fn on_silence(&mut self, index: usize, epoch: u64) {
        let noticed = self.processes[index].silence.take().unwrap_or_default();
        if !self.processes[index].is_alive || self.processes[index].epoch != epoch {
            return;
        }
        let now: Vec<usize> = self.silent(index);
        let silent: Vec<usize> = now.into_iter().filter(|rank| noticed.contains(rank)).collect();
        if !silent.is_empty() {
            self.tally.count("failures by silence");
            self.leave(index, Leave::Failed, silent);
        }
    }

    /// Plans what follows from the state of every process.
    pub fn go_on(&mut self) {
        for position in 0..self.living.len() {
            let index = self.living[position];
            if self.processes[index].is_stopped {
                continue;
            }
            if !self.processes[index].acts && self.can_act(index) {
                self.processes[index].acts = true;
                let at = self.processes[index].at;
                let limit = match at {
                    At::Building => self.build,
                    At::Waiting | At::Over => 1,
                    At::Receiving { has_begun: true } => self.step * 3,
                    _ => self.step,
                };
                let at = self.now + self.random.below(limit);
                self.plan(at, Event::Act(index));
            }
            if !self.processes[index].fails && self.can_fail(index) {
                self.processes[index].fails = true;
                let at = self.now + self.random.below(self.notice);
                self.plan(at, Event::Fail(index));
            }
            if self.processes[index].silence.is_none() {
                let silent = self.silent(index);
                if !silent.is_empty() {
                    self.processes[index].silence = Some(silent);
                    let at = self.now + self.timeout + self.random.below(10 * MS);
                    let epoch = self.processes[index].epoch;
                    self.plan(at, Event::Silence(index, epoch));
                }
            }
        }
    }
}

/// Where a worker says that others reach it.
fn address(worker: WorkerId) -> Vec<u8> {
    format!("{}.{}", worker.number, worker.life).into_bytes()
}
