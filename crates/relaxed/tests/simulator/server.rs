//! A server: the [`Core`] under test, with a disk, weights that remember what they are made of, and
//! those who wait. It stands for the threads and sockets of the real one, and has the faults that the
//! checks must find ([`Sabotage`]).

use std::collections::BTreeMap;
use std::time::Duration;

use unisono_relaxed::server::core::{Core, Entry, PushId, Pushed, Refusal, Rules, Saved};

use crate::message::{Answer, Ask, Reply, Request, Sender};
use crate::process::Process;
use crate::scenario::{Sabotage, Scenario};
use crate::tally::Tally;
use crate::witness::{Violation, Witness, require};

pub struct Server {
    index: usize,
    scenario: Scenario,
    core: Core,
    weights: Weights,
    disk: Disk,
    /// What is acknowledged and written only with the next sweep, if the server is sabotaged.
    unwritten: Vec<(Entry, Vec<PushId>)>,
    pub is_up: bool,
    /// Until when it waits for all workers to come before any goes on.
    gathers_until: Option<u64>,
    /// By process.
    reads: BTreeMap<usize, Request>,
    pushes: BTreeMap<usize, Request>,
    /// The newest read of each process: an older one that arrives late is not answered.
    newest_read: BTreeMap<usize, u64>,
    /// The connection by which each worker has joined last.
    connections: BTreeMap<u32, (Sender, u64)>,
    pub witness: Witness,
}

/// What the weights are made of.
#[derive(Clone, Default)]
pub struct Weights {
    pub applied: Vec<PushId>,
    pub dropped: Vec<PushId>,
}

#[derive(Default)]
struct Disk {
    saved: Saved,
    weights: Weights,
    entries: Vec<(Entry, Vec<PushId>)>,
}

/// What a server sees of the world while it acts.
pub struct Scene<'a> {
    pub now: u64,
    pub processes: &'a [Process],
    pub replies: &'a mut Vec<(usize, Reply)>,
    pub tally: &'a mut Tally,
}

impl Server {
    pub fn new(index: usize, scenario: Scenario) -> Server {
        Server {
            index,
            scenario,
            core: Core::new(rules(&scenario)),
            weights: Weights::default(),
            disk: Disk::default(),
            unwritten: Vec::new(),
            is_up: true,
            gathers_until: scenario.patience,
            reads: BTreeMap::new(),
            pushes: BTreeMap::new(),
            newest_read: BTreeMap::new(),
            connections: BTreeMap::new(),
            witness: Witness::new(scenario.is_lockstep(), scenario.stale),
        }
    }

    pub fn receive(&mut self, request: Request, scene: &mut Scene) -> Result<(), Violation> {
        let from = request.from;
        self.core.hear(from.worker, from.life, Duration::from_millis(scene.now));
        match request.ask {
            Ask::Join => self.join(request, scene),
            Ask::Enter(clock) => match self.core.enter(from.worker, from.life, clock) {
                Ok(()) => {
                    self.witness.entered(from, clock, self.core.round());
                    scene.replies.push((from.process, request.reply(Answer::Entered)));
                }
                Err(refusal) => {
                    scene.replies.push((from.process, request.reply(Answer::Refused(refusal))));
                }
            },
            Ask::Read(_) => {
                let newest = self.newest_read.entry(from.process).or_insert(0);
                if request.id > *newest {
                    *newest = request.id;
                    self.reads.insert(from.process, request);
                }
            }
            Ask::Push(push) => self.push(request, push, scene)?,
            Ask::Alive => {}
            Ask::Leave => self.leave(from),
        }
        self.changed(scene)
    }

    /// A connection was closed, which matters only if it is the worker's last one.
    pub fn lose(
        &mut self,
        from: Sender,
        connection: u64,
        scene: &mut Scene,
    ) -> Result<(), Violation> {
        let is_current = self.connections.get(&from.worker) == Some(&(from, connection));
        if is_current && self.scenario.sabotage != Sabotage::OverlookLeaving {
            self.leave(from);
            self.changed(scene)?;
        }
        Ok(())
    }

    /// Looks for those who have fallen silent, and no longer waits for those who did not come.
    pub fn sweep(&mut self, scene: &mut Scene) -> Result<(), Violation> {
        self.disk.entries.append(&mut self.unwritten);
        if self.scenario.sabotage != Sabotage::OverlookLeaving {
            for worker in self.core.expire(Duration::from_millis(scene.now)) {
                scene.tally.expired += 1;
                self.witness.left(worker, None);
            }
        }
        self.changed(scene)
    }

    pub fn snapshot(&mut self) {
        self.unwritten.clear();
        self.disk.saved = self.core.save();
        self.disk.weights = self.weights.clone();
        self.disk.entries.clear();
    }

    pub fn crash(&mut self) {
        self.is_up = false;
        self.unwritten.clear();
        self.reads.clear();
        self.pushes.clear();
        self.newest_read.clear();
        self.connections.clear();
        self.witness.crashed();
    }

    pub fn restart(&mut self, now: u64, tally: &mut Tally) -> Result<(), Violation> {
        if self.scenario.sabotage == Sabotage::ForgetDisk {
            self.disk = Disk::default();
        }
        self.is_up = true;
        self.gathers_until = self.scenario.patience.map(|patience| now + patience);
        self.core = Core::restore(rules(&self.scenario), &self.disk.saved);
        self.weights = self.disk.weights.clone();
        for (entry, contents) in &self.disk.entries {
            tally.repeated += 1;
            let repeated = self.core.repeat(entry);
            require!(repeated.is_ok(), "{repeated:?} after {} updates", self.core.updates());
            self.weights.take(entry, contents);
        }
        self.witness.restored(&self.weights)?;
        self.witness.compare(&self.core, &self.weights)
    }

    fn join(&mut self, request: Request, scene: &mut Scene) {
        let from = request.from;
        let now = Duration::from_millis(scene.now);
        let answer = match self.core.join(from.worker, from.life, now) {
            Ok(joined) => {
                self.connections.insert(from.worker, (from, request.connection));
                self.witness.joined(from);
                Answer::Joined(joined)
            }
            Err(refusal) => Answer::Refused(refusal),
        };
        scene.replies.push((from.process, request.reply(answer)));
    }

    fn leave(&mut self, from: Sender) {
        self.core.leave(from.worker, from.life);
        self.witness.left(from.worker, Some(from.life));
        self.reads.remove(&from.process);
        self.pushes.remove(&from.process);
    }

    fn push(&mut self, request: Request, push: PushId, scene: &mut Scene) -> Result<(), Violation> {
        let answer = match self.core.push(push) {
            Ok(Pushed::Settled(entry)) => {
                self.settle(entry, push, scene)?;
                Answer::Settled
            }
            Ok(Pushed::Collected) => {
                self.pushes.insert(request.from.process, request);
                return Ok(());
            }
            Ok(Pushed::Duplicate) => {
                self.witness.duplicate();
                scene.tally.duplicates += 1;
                if self.scenario.sabotage == Sabotage::ForgetNumbers {
                    self.apply_again(push, scene)?;
                }
                Answer::Settled
            }
            Ok(Pushed::Late { clock }) => {
                let entry = self.core.drop_late(push);
                self.settle(entry, push, scene)?;
                Answer::Late { clock }
            }
            Err(refusal) => Answer::Refused(refusal),
        };
        scene.replies.push((request.from.process, request.reply(answer)));
        Ok(())
    }

    /// Sabotage: takes a push that came again for a new one.
    fn apply_again(&mut self, push: PushId, scene: &mut Scene) -> Result<(), Violation> {
        let settled = |number| self.core.is_settled(push.worker, push.life, number);
        let number = (push.number..).find(|number| !settled(*number)).unwrap_or(push.number);
        match self.core.push(PushId { number, ..push }) {
            Ok(Pushed::Settled(entry)) => self.settle(entry, push, scene),
            _ => Ok(()),
        }
    }

    /// Something is different: the round may be over, and those who wait may go on.
    fn changed(&mut self, scene: &mut Scene) -> Result<(), Violation> {
        let has_come = |until| {
            scene.now >= until || u64::from(self.core.present_members()) >= self.scenario.workers
        };
        if self.gathers_until.is_some_and(has_come) {
            self.gathers_until = None;
        }
        if self.gathers_until.is_none() {
            while let Some(entry) = self.core.commit() {
                let contents: Vec<PushId> = entry.pushes.iter().map(|(push, _)| *push).collect();
                self.record(entry, contents, scene)?;
            }
            self.answer_pushes(scene);
            self.answer_reads(scene)?;
        }
        self.witness.compare(&self.core, &self.weights)
    }

    fn answer_pushes(&mut self, scene: &mut Scene) {
        self.pushes.retain(|process, request| {
            let Ask::Push(push) = request.ask else { return false };
            let answer = if self.core.is_settled(push.worker, push.life, push.number) {
                Answer::Settled
            } else if !self.core.is_present(push.worker, push.life) {
                Answer::Refused(Refusal::NotPresent)
            } else {
                return true;
            };
            scene.replies.push((*process, request.reply(answer)));
            false
        });
    }

    fn answer_reads(&mut self, scene: &mut Scene) -> Result<(), Violation> {
        let bound = self.scenario.bound();
        let asked = if self.scenario.sabotage == Sabotage::NoBound { None } else { bound };
        let waiting: Vec<Request> = self.reads.values().copied().collect();
        for request in waiting {
            let Ask::Read(clock) = request.ask else { continue };
            let from = request.from;
            let answer = match self.core.read(from.worker, from.life, clock, asked) {
                Ok(true) => {
                    let seen = (self.index, scene.processes);
                    self.witness.read(from, clock, bound, self.core.round(), seen)?;
                    scene.tally.reads += 1;
                    Answer::Weights { version: self.core.updates() }
                }
                Ok(false) => {
                    scene.tally.held += 1;
                    continue;
                }
                Err(refusal) => Answer::Refused(refusal),
            };
            self.reads.remove(&from.process);
            scene.replies.push((from.process, request.reply(answer)));
        }
        Ok(())
    }

    fn settle(&mut self, entry: Entry, push: PushId, scene: &mut Scene) -> Result<(), Violation> {
        require!(entry.pushes.len() == 1, "{push:?} was settled as {entry:?}");
        self.record(entry, vec![push], scene)
    }

    fn record(
        &mut self,
        entry: Entry,
        contents: Vec<PushId>,
        scene: &mut Scene,
    ) -> Result<(), Violation> {
        let round = self.core.round();
        self.witness.settle(&entry, &contents, round, scene.processes, self.index)?;
        scene.tally.settled += contents.len() as u64;
        scene.tally.dropped += u64::from(entry.update == 0);
        self.weights.take(&entry, &contents);
        match self.scenario.sabotage {
            Sabotage::AcknowledgeFirst => self.unwritten.push((entry, contents)),
            _ => self.disk.entries.push((entry, contents)),
        }
        Ok(())
    }
}

impl Weights {
    fn take(&mut self, entry: &Entry, contents: &[PushId]) {
        match entry.update {
            0 => self.dropped.extend(contents),
            _ => self.applied.extend(contents),
        }
    }
}

fn rules(scenario: &Scenario) -> Rules {
    Rules {
        lockstep: scenario.is_lockstep(),
        stale: scenario.stale,
        timeout: Duration::from_millis(Scenario::TIMEOUT),
        total: u64::MAX,
    }
}
