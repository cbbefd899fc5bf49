//! Leading: the coordinator of the job, the machines that follow, and what is written before it has an effect.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Command, LAST_CHANCE, LOOK, Launcher, Message, Role};
use crate::membership::Sign;
use crate::membership::coordinator::{Act, Change, Coordinator, Report};
use crate::membership::core::WorkerId;
use crate::membership::machines::record::{Machine, Record};

pub(super) struct Leading {
    pub(super) coordinator: Coordinator,
    pub(super) followers: BTreeMap<u32, Follower>,
    /// What is being written.
    pub(super) change: Option<Change>,
    /// The epoch whose members are to be asked to leave it, once the record can be read: so it can be written,
    /// and the next epoch can begin.
    pub(super) confirming: Option<u64>,
    /// When to look whether another leads.
    pub(super) look_at: Duration,
}

pub(super) struct Follower {
    pub(super) machine: Machine,
    pub(super) workers: BTreeSet<WorkerId>,
    /// When it was last asked whether it lives. It is asked now and then whatever it says meanwhile: so it hears
    /// that its leader lives.
    pub(super) probed: Duration,
    /// The same, and how long it has to answer, until it says anything.
    pub(super) asked: Option<(Duration, Duration)>,
}

impl Leading {
    pub(super) fn machine_of(&self, worker: WorkerId) -> Option<u32> {
        let mut followers = self.followers.iter();
        followers.find(|(_, follower)| follower.machine.has(worker)).map(|(number, _)| *number)
    }
}

impl Launcher {
    /// Takes up the job as the record has it.
    pub(super) fn lead(&mut self, now: Duration) {
        log::debug!("machine {}: leads from epoch {}", self.me.number, self.record.epoch);
        let Record { epoch, members, .. } = self.record.clone();
        let settings = self.settings.clone();
        let coordinator = match epoch {
            0 => Coordinator::new(settings, now),
            _ => Coordinator::resume(settings, epoch, members.clone(), now),
        };
        let (followers, look_at) = (BTreeMap::new(), now + LOOK);
        let leading = Leading { coordinator, followers, change: None, confirming: None, look_at };
        self.role = Role::Leading(Box::new(leading));
        if let Some(former) = self.former.take() {
            // It could not be reached: the others do not wait for its workers.
            let lost = members.into_iter().filter(|id| former.has(*id)).collect();
            self.lose_workers(now, lost);
        }
        self.settle(now, self.me.clone(), self.standing());
        if self.leaving.is_some() {
            self.on_leave(now);
        }
    }

    /// Tells the coordinator where the workers of a machine stand.
    pub(super) fn settle(
        &mut self,
        now: Duration,
        machine: Machine,
        workers: Vec<(WorkerId, Report)>,
    ) {
        let mut acts = Vec::new();
        let Role::Leading(leading) = &mut self.role else { return };
        let named: BTreeSet<WorkerId> = workers.iter().map(|(worker, _)| *worker).collect();
        // Those that have ended come last: workers that leave must not be let go before their successors are known.
        for (worker, report) in workers {
            acts.extend(leading.coordinator.report(now, worker, report));
        }
        let members = self.record.members.iter();
        for ended in members.filter(|id| machine.has(**id) && !named.contains(id)) {
            acts.extend(leading.coordinator.report(now, *ended, Report::Ended));
        }
        self.carry_out(now, acts);
    }

    pub(super) fn on_machine(&mut self, now: Duration, number: u32, message: Message) {
        let Role::Leading(leading) = &mut self.role else {
            self.commands.push(Command::ToMachine(number, Message::NotLeading));
            return;
        };
        match message {
            Message::Register { machine, mut workers } => {
                if machine.number != number || leading.followers.contains_key(&number) {
                    return self.commands.push(Command::Close(number));
                }
                workers.retain(|(worker, report)| {
                    machine.has(*worker) && matches!(report, Report::Returned { .. })
                });
                let follower = Follower {
                    machine: machine.clone(),
                    workers: workers.iter().map(|(worker, _)| *worker).collect(),
                    probed: now,
                    asked: None,
                };
                leading.followers.insert(number, follower);
                self.settle(now, machine, workers);
            }
            Message::Report(worker, report) => {
                let Some(follower) = leading.followers.get_mut(&number) else { return };
                follower.asked = None;
                let is_allowed = !matches!(report, Report::Returned { .. });
                if !follower.machine.has(worker) || !is_allowed {
                    return;
                }
                match report {
                    Report::Ended => drop(follower.workers.remove(&worker)),
                    _ => drop(follower.workers.insert(worker)),
                }
                let acts = leading.coordinator.report(now, worker, report);
                self.carry_out(now, acts);
            }
            Message::Alive => {
                if let Some(follower) = leading.followers.get_mut(&number) {
                    follower.asked = None;
                }
            }
            // No follower says that.
            _ => self.lose_machine(now, number),
        }
    }

    pub(super) fn lose_machine(&mut self, now: Duration, number: u32) {
        self.commands.push(Command::Close(number));
        let Role::Leading(leading) = &mut self.role else { return };
        let Some(follower) = leading.followers.remove(&number) else { return };
        log::debug!("machine {}: lost machine {number}", self.me.number);
        let Follower { machine, mut workers, .. } = follower;
        workers.extend(self.record.members.iter().filter(|id| machine.has(**id)));
        self.lose_workers(now, workers.into_iter().collect());
    }

    pub(super) fn lose_workers(&mut self, now: Duration, workers: Vec<WorkerId>) {
        if let Role::Leading(leading) = &mut self.role {
            let acts = leading.coordinator.vanished(now, workers);
            self.carry_out(now, acts);
        }
    }

    pub(super) fn carry_out(&mut self, now: Duration, acts: Vec<Act>) {
        for act in acts {
            let Role::Leading(leading) = &mut self.role else { return };
            match act {
                Act::Tell(worker, message) if self.me.has(worker) => {
                    self.tell_worker(worker, message);
                }
                Act::Tell(worker, message) => {
                    if let Some(number) = leading.machine_of(worker) {
                        let message = Message::Tell(worker, message);
                        self.commands.push(Command::ToMachine(number, message));
                    }
                }
                Act::Kill(worker, sign) if self.me.has(worker) => {
                    self.commands.push(Command::Kill(worker, sign));
                }
                Act::Kill(worker, sign) => self.kill_elsewhere(now, worker, sign),
                Act::Commit(change) => {
                    leading.change = Some(change.clone());
                    self.write(&change);
                }
                Act::Confirm { epoch } => {
                    leading.confirming = Some(epoch);
                    self.ask(Command::Read);
                }
                Act::Disband => {
                    for number in leading.followers.keys() {
                        self.commands.push(Command::ToMachine(*number, Message::Disband));
                    }
                    self.disband();
                }
                Act::Complete { epoch } => return self.end(Command::Complete { epoch }),
                Act::GiveUp { ready } => return self.end(Command::GiveUp { ready }),
                Act::NoProgress { epochs } => return self.end(Command::NoProgress { epochs }),
            }
        }
    }

    /// etcd has answered: changes can be made.
    pub(super) fn confirm(&mut self, now: Duration) {
        let Role::Leading(leading) = &mut self.role else { return };
        if let Some(epoch) = leading.confirming.take() {
            let acts = leading.coordinator.confirmed(epoch);
            self.carry_out(now, acts);
        }
    }

    pub(super) fn kill_elsewhere(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
        let Role::Leading(leading) = &mut self.role else { return };
        let Some(number) = leading.machine_of(worker) else {
            // Its machine has not come back in time.
            return self.lose_workers(now, vec![worker]);
        };
        // If its machine is out of reach, there is nothing to wait for.
        let follower = leading.followers.get_mut(&number).expect("it is a follower's");
        follower.probed = now;
        follower.asked = Some((now, LAST_CHANCE.min(self.settings.timeout)));
        self.commands.push(Command::ToMachine(number, Message::Kill(worker, sign)));
        self.commands.push(Command::ToMachine(number, Message::Probe));
    }

    pub(super) fn watch_machines(&mut self, now: Duration) {
        let timeout = self.settings.timeout;
        let Role::Leading(leading) = &mut self.role else { return };
        let mut lost = Vec::new();
        for (number, follower) in &mut leading.followers {
            match follower.asked {
                Some((at, limit)) if now >= at + limit => lost.push(*number),
                None if now >= follower.probed + timeout / 4 => {
                    follower.probed = now;
                    follower.asked = Some((now, timeout));
                    self.commands.push(Command::ToMachine(*number, Message::Probe));
                }
                _ => {}
            }
        }
        lost.into_iter().for_each(|number| self.lose_machine(now, number));
    }
}

pub(super) fn apply(record: &mut Record, change: &Change) {
    match change {
        Change::Begin { epoch, members, .. } => {
            record.epoch = *epoch;
            record.members.clone_from(members);
        }
        Change::Finish { .. } => record.is_complete = true,
    }
}
