//! A job as the core sees it: worker processes that train, their connections to the coordinator, the launcher
//! that starts and kills them, and a witness that checks whatever happens.
//!
//! A world does one small thing at a time and knows neither chance nor time: [the simulator](super::simulator)
//! draws what happens next, [the search](super::search) tries everything.

mod process;
mod sabotage;
mod training;

use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::time::Duration;

use super::{Decision, Input, Membership, Settings, WorkerId};
pub use crate::membership::model::{Checked, Tally, check, mix};
use crate::membership::model::{State, reference};
pub use process::{At, Down, Process, Up};
pub use sabotage::Sabotage;
use training::{Group, Leave};

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
            Up::Stepped { epoch } => Input::Stepped { epoch },
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
                Decision::Release(id) => self.release(id)?,
                Decision::Disband => self.disband(),
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

    /// The launcher is told that a worker is to leave; whether the coordinator knows it.
    pub fn depart(&mut self, index: usize) -> Result<bool, String> {
        let id = self.processes[index].id;
        let is_known = self.core.workers.contains_key(&id);
        self.tell(Input::Leaving(id))?;
        Ok(is_known)
    }

    /// The state of the run must not leave with the last worker that has it, if others wait for it.
    fn release(&mut self, id: WorkerId) -> Checked {
        self.tally.count("workers released");
        // The coordinator may have yet to hear of the end of one.
        let stays = |process: &Process| {
            let worker = self.core.workers.get(&process.id);
            process.state.is_some() && worker.is_some_and(|worker| !worker.is_leaving)
        };
        let is_holder = self.index(id).is_some_and(|index| self.processes[index].state.is_some());
        // An epoch of one cannot hand it over.
        let is_lost = is_holder && self.job.settings.most > 1 && !self.processes.iter().any(stays);
        check(!is_lost || self.core.spares().next().is_none(), || {
            format!("the state of {id:?} is lost")
        })?;
        self.send(id, Down::Finish);
        Ok(())
    }

    /// All workers are to leave: their launchers end them.
    fn disband(&mut self) {
        self.tally.count("jobs disbanded");
        let leaving = |id| self.core.workers.get(&id).is_some_and(|worker| worker.is_leaving);
        for process in self.processes.iter_mut().filter(|process| process.is_alive) {
            process.is_doomed |= leaving(process.id);
        }
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
            has_stepped: false,
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

    fn group(&mut self, epoch: u64) -> &mut Group {
        self.groups.get_mut(&epoch).expect("a member is in it")
    }

    /// The weights of an undisturbed run.
    fn reference(&self, steps: u64) -> State {
        self.references[steps as usize]
    }

    /// Whether the run has ended, and all processes but those that are stopped.
    pub fn is_over(&self) -> bool {
        self.is_finished
            && self.processes.iter().all(|process| !process.is_alive || process.is_stopped)
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
        core.unseen.hash(hasher);
        since(core.short_since).hash(hasher);
        let timeout = self.job.settings.timeout;
        for (id, worker) in &core.workers {
            (id, worker.phase as u8).hash(hasher);
            if worker.must_answer() {
                let heard = since(Some(worker.heard)).min(Some(timeout));
                (since(worker.asked), heard, worker.is_suspect, worker.is_leaving).hash(hasher);
            }
        }
    }
}
