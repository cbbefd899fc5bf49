//! Checks whatever happens.

use super::workers::{At, Group, Process};
use super::world::World;
use crate::membership::ToWorker;
use crate::membership::core::WorkerId;
use crate::membership::machines::launcher::{Message, Role};
use crate::membership::machines::record::Record;
use crate::membership::model::{Checked, check};

/// An epoch that the record has had.
pub struct Begun {
    pub at: u64,
    /// Which launcher has told workers that it begins.
    teller: Option<usize>,
    /// Members that had left it when the next one began; `None` before that, and if the next one began because
    /// no member was seen for too long.
    leavers: Option<Vec<WorkerId>>,
}

impl World {
    fn record(&self) -> Option<&Record> {
        self.store.record.as_ref().map(|(record, _)| record)
    }

    pub fn epoch(&self) -> u64 {
        self.record().map_or(0, |record| record.epoch)
    }

    pub fn has_begun(&self) -> bool {
        self.epoch() > 0
    }

    pub fn is_complete(&self) -> bool {
        self.record().is_some_and(|record| record.is_complete)
    }

    pub fn members(&self) -> Vec<WorkerId> {
        self.record().map_or_else(Vec::new, |record| record.members.clone())
    }

    pub fn leader(&self) -> Option<usize> {
        let number = self.record()?.leader.number;
        let is_it = |host: &super::hosts::Host| {
            host.is_alive && host.me.as_ref().is_some_and(|me| me.number == number)
        };
        self.hosts.iter().position(is_it)
    }

    /// The record is about to be this.
    pub fn check_record(&mut self, host: usize, record: &Record) -> Checked {
        let (epoch, is_complete) = (self.epoch(), self.is_complete());
        check(!is_complete, || "the record changes after the end".into())?;
        if record.epoch == epoch {
            let is_same = record.members == self.members();
            check(is_same, || format!("epoch {epoch} has two lists of members"))?;
            if record.is_complete {
                let result = self.results.get(&epoch).ok_or("there is no result")?;
                let is_right = *result == self.references[self.steps as usize];
                check(is_right, || "a wrong result".into())?;
                let is_led = self.leader() == Some(host) || !self.hosts[host].is_alive;
                check(is_led, || "a result by a launcher that does not lead".into())?;
                self.tally.count("runs complete");
            }
            return Ok(());
        }
        let next = record.epoch;
        check(next == epoch + 1, || format!("epoch {next} begins after {epoch}"))?;
        self.check_members(record)?;
        self.end_epoch(epoch, &record.members)?;
        let index = |id: &WorkerId| self.index(*id).ok_or("a member was never started");
        let processes: Vec<usize> = record.members.iter().map(index).collect::<Result<_, _>>()?;
        self.groups.insert(next, Group::new(record.members.clone(), processes));
        self.begun.insert(next, Begun { at: self.now, teller: None, leavers: None });
        self.tally.count("epochs");
        Ok(())
    }

    fn check_members(&self, record: &Record) -> Checked {
        let (epoch, count) = (record.epoch, record.members.len());
        let (least, most) = (self.settings.least, self.settings.most);
        check(count >= least.max(1), || format!("epoch {epoch} of {count} begins, least {least}"))?;
        check(count <= most, || format!("epoch {epoch} of {count} begins, most {most}"))?;
        let mut numbers: Vec<u32> = record.members.iter().map(|id| id.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        check(numbers.len() == count, || format!("epoch {epoch} has a member twice"))
    }

    /// An epoch is over when a member has left it, or when none was seen for as long as it waits for workers.
    fn end_epoch(&mut self, epoch: u64, next: &[WorkerId]) -> Checked {
        let Some(group) = self.groups.get(&epoch) else { return Ok(()) };
        let has_left = |process: &Process| {
            // A worker of a leader that was stopped may yet hear that the epoch begins.
            let can_come_back = !next.contains(&process.id) && !process.is_released;
            let is_in = process.epoch == epoch && process.at != At::Waiting;
            !process.is_alive || !(is_in || process.is_told() || can_come_back)
        };
        let members = group.processes.iter().map(|index| &self.processes[*index]);
        let leavers: Vec<WorkerId> =
            members.filter(|process| has_left(process)).map(|process| process.id).collect();
        let is_of_old = next.iter().any(|id| group.members.contains(id));
        let patience = self.settings.patience.as_micros() as u64;
        let is_late = self.now >= self.begun[&epoch].at + patience;
        check(!leavers.is_empty() || is_late, || {
            format!("epoch {} begins, though all members may be in {epoch}", epoch + 1)
        })?;
        if !is_of_old && is_late {
            self.tally.count("begun again after the patience");
        }
        let begun = self.begun.get_mut(&epoch).expect("it has begun");
        begun.leavers = (!leavers.is_empty()).then_some(leavers);
        Ok(())
    }

    /// A launcher wants the record to be this.
    pub fn check_decision(&mut self, host: usize, record: &Record) -> Checked {
        if record.epoch != self.epoch() + 1 || self.leader() != Some(host) {
            return Ok(());
        }
        let has_state = |process: &&Process| process.state.is_some();
        let of = |id: &WorkerId| self.index(*id).map(|index| &self.processes[index]);
        if record.members.iter().filter_map(of).any(|process| has_state(&process)) {
            return Ok(());
        }
        let is_there = |process: &&Process| {
            let is_let_go = process.is_doomed || process.is_released || process.is_stopped;
            !is_let_go && self.is_registered(host, process.host)
        };
        // What a checkpoint has, or the beginning, can be had again.
        let saved = self.checkpoint.map_or(0, |state| state.steps);
        let has_more = |process: &Process| process.state.is_some_and(|it| it.steps > saved);
        let mut others = self.living.iter().map(|index| &self.processes[*index]);
        match others.find(|process| has_more(process) && is_there(process)) {
            Some(process) => Err(format!("the state of {:?} is lost", process.id)),
            None => Ok(()),
        }
    }

    /// A leader tells something.
    pub fn note_told(&mut self, host: usize, message: &Message) -> Checked {
        match message {
            Message::Tell(_, ToWorker::Begin { epoch, members, .. }) => {
                self.check_begin(*epoch, members)?;
                let begun = self.begun.get_mut(epoch).expect("it was checked");
                let teller = *begun.teller.get_or_insert(host);
                check(teller == host, || format!("two launchers begin epoch {epoch}"))
            }
            // What a leader says whose place another has taken may not arrive.
            Message::Tell(worker, ToWorker::Finish) if self.leader() == Some(host) => {
                self.index(*worker).map_or(Ok(()), |index| self.check_release(index))
            }
            _ => Ok(()),
        }
    }

    /// A launcher is about to tell workers that an epoch begins.
    pub fn check_begin(&self, epoch: u64, members: &[WorkerId]) -> Checked {
        let group = self.groups.get(&epoch);
        let is_committed = group.is_some_and(|group| group.members == members);
        check(is_committed, || format!("epoch {epoch} begins before the record says so"))
    }

    /// A worker learns that it is in an epoch.
    pub fn check_entry(&self, index: usize, epoch: u64) -> Checked {
        let id = self.processes[index].id;
        let leavers = self.begun[&epoch].leavers.iter().flatten();
        let has_left = leavers.into_iter().any(|leaver| *leaver == id);
        check(!has_left, || format!("{id:?} comes back to epoch {epoch}"))
    }

    /// A worker has completed a step.
    pub fn check_step(&mut self, index: usize) -> Checked {
        let process = &mut self.processes[index];
        let epoch = process.epoch;
        if self.begun[&epoch].leavers.is_some() {
            process.late_steps += 1;
            self.tally.count("steps of an old epoch");
        }
        // One that was behind by a step may complete the step that the others had begun.
        let is_over = self.processes[index].late_steps <= 2;
        check(is_over, || format!("epoch {epoch} goes on though it is over"))
    }

    /// A worker is let go.
    pub fn check_release(&mut self, index: usize) -> Checked {
        let was_released = std::mem::replace(&mut self.processes[index].is_released, true);
        let process = &self.processes[index];
        if was_released || self.is_complete() || process.state.is_none() {
            return Ok(());
        }
        self.tally.count("members released");
        // The leader may have yet to hear of the end of one, above all when it was stopped itself.
        let woke = self.leader().and_then(|leader| self.hosts[leader].woke);
        let has_state = |other: &Process| {
            let is_news =
                woke.is_some_and(|woke| other.ended <= woke && self.now < woke + self.timeout);
            let is_there = other.is_alive || is_news || self.now < other.ended + 3 * self.timeout;
            other.state.is_some() && is_there && !other.is_released
        };
        // An epoch of one cannot hand it over.
        let is_last = self.settings.most > 1 && !self.processes.iter().any(has_state);
        // A machine that the present leader does not know finds no heirs.
        let leader = self.leader().filter(|leader| self.is_registered(*leader, process.host));
        let launcher = leader.and_then(|leader| self.hosts[leader].launcher.as_ref());
        let has_heirs = match launcher.map(|launcher| &launcher.role) {
            Some(Role::Leading(leading)) => !leading.coordinator.spares().is_empty(),
            _ => false,
        };
        check(!(is_last && has_heirs), || format!("the state of {:?} is lost", process.id))
    }
}
