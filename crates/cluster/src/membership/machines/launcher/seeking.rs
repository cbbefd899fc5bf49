//! Looking for the leader, or taking its place; following it; and the record, which says who that is.

use std::time::Duration;

use super::leading::apply;
use super::{Command, LOOK, Launcher, Message, PAUSE, Role};
use crate::membership::coordinator::Change;
use crate::membership::machines::record::{Machine, Record};

pub(super) struct Seeking {
    /// Since when the leader could not be reached.
    pub(super) since: Duration,
    /// Since when this launcher seeks.
    pub(super) began: Duration,
    pub(super) stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The record is being read, or written to take the leader's place.
    Asking,
    /// The connection is being opened.
    Linking,
    Pausing {
        until: Duration,
    },
}

impl Launcher {
    pub(super) fn seek(&mut self, now: Duration, since: Duration) {
        if let Role::Leading(leading) = &self.role {
            self.history = leading.coordinator.history().clone();
            for machine in leading.followers.keys() {
                self.commands.push(Command::Close(*machine));
            }
        }
        self.commands.push(Command::Unlink);
        self.role = Role::Seeking(Seeking { since, began: now, stage: Stage::Asking });
        self.ask(Command::Read);
    }

    pub(super) fn ask(&mut self, command: Command) {
        // Whatever the request under way brings will do.
        if !self.is_asking {
            self.is_asking = true;
            self.commands.push(command);
        }
    }

    pub(super) fn pause(&mut self, now: Duration) {
        if let Role::Seeking(seeking) = &mut self.role {
            seeking.stage = Stage::Pausing { until: now + PAUSE };
        }
    }

    pub(super) fn on_read(&mut self, now: Duration, record: Record, revision: u64) {
        log::debug!(
            "machine {}: machine {} leads, epoch {}",
            self.me.number,
            record.leader.number,
            record.epoch
        );
        if record.id != self.record.id {
            return self.end(Command::Superseded);
        }
        (self.record, self.revision) = (record, revision);
        if self.record.is_complete {
            return self.end(Command::Complete { epoch: self.record.epoch });
        }
        let is_mine = self.record.leader == self.me;
        match &mut self.role {
            Role::Leading(leading) if is_mine => {
                // Others have joined meanwhile.
                leading.look_at = now + LOOK;
                if let Some(change) = leading.change.clone() {
                    self.write(&change);
                }
                self.confirm(now);
            }
            Role::Leading(_) => {
                let Machine { number, host, .. } = &self.record.leader;
                log::warn!(
                    "machine {number} ({host}) coordinates the job now, in place of this one"
                );
                self.seek(now, now);
            }
            Role::Following { .. } => {}
            Role::Seeking(_) if is_mine => self.lead(now),
            // It has joined before, and the answer was lost: nothing else listens at its address.
            Role::Seeking(_) if self.record.leader.address == self.me.address => self.take_over(),
            Role::Seeking(seeking) => {
                seeking.stage = Stage::Linking;
                self.commands.push(Command::Link(self.record.leader.clone()));
            }
        }
    }

    pub(super) fn on_written(&mut self, now: Duration, revision: u64) {
        self.revision = revision;
        match &mut self.role {
            Role::Leading(leading) => {
                leading.look_at = now + LOOK;
                let Some(change) = leading.change.take() else { return };
                apply(&mut self.record, &change);
                let acts = leading.coordinator.committed(now, &change);
                self.carry_out(now, acts);
                self.confirm(now);
            }
            Role::Seeking(_) => {
                self.record.leader = self.me.clone();
                self.lead(now);
            }
            Role::Following { .. } => {}
        }
    }

    pub(super) fn write(&mut self, change: &Change) {
        let mut record = self.record.clone();
        apply(&mut record, change);
        let revision = self.revision;
        self.ask(Command::Write(Box::new(record), revision));
    }

    pub(super) fn on_linked(&mut self, now: Duration) {
        if let Role::Seeking(Seeking { stage: Stage::Linking, .. }) = self.role {
            let (machine, workers) = (self.me.clone(), self.standing());
            self.commands.push(Command::ToLeader(Message::Register { machine, workers }));
            self.role = Role::Following { since: now, heard: now };
            if self.leaving.is_some() {
                self.on_leave(now);
            }
        }
    }

    pub(super) fn on_unreachable(&mut self, now: Duration, is_gone: bool) {
        let Role::Seeking(Seeking { since, stage: Stage::Linking, .. }) = self.role else { return };
        if !is_gone && now < since + self.settings.timeout {
            return self.pause(now);
        }
        self.take_over();
    }

    /// Makes itself the leader, if the record has not changed.
    pub(super) fn take_over(&mut self) {
        let Machine { number, host, .. } = &self.record.leader;
        log::warn!("machine {number} ({host}), which coordinates the job, is out of reach");
        self.former = Some(self.record.leader.clone());
        let mut record = self.record.clone();
        record.leader = self.me.clone();
        if let Role::Seeking(seeking) = &mut self.role {
            seeking.stage = Stage::Asking;
        }
        self.ask(Command::Write(Box::new(record), self.revision));
    }

    pub(super) fn on_leader_closed(&mut self, now: Duration) {
        let Role::Following { since, .. } = self.role else { return };
        match now < since + PAUSE {
            // It may turn this launcher away again and again.
            true => self.seek_later(now),
            false => self.seek(now, now),
        }
    }

    /// Looks for the leader again after a pause.
    fn seek_later(&mut self, now: Duration) {
        self.commands.push(Command::Unlink);
        let stage = Stage::Pausing { until: now + PAUSE };
        self.role = Role::Seeking(Seeking { since: now, began: now, stage });
    }

    pub(super) fn on_leader(&mut self, now: Duration, message: Message) {
        let Role::Following { heard, .. } = &mut self.role else { return };
        *heard = now;
        match message {
            Message::Probe => self.commands.push(Command::ToLeader(Message::Alive)),
            Message::NotLeading => self.seek_later(now),
            Message::Tell(worker, message) => self.tell_worker(worker, message),
            Message::Kill(worker, sign) => self.commands.push(Command::Kill(worker, sign)),
            Message::Disband => self.disband(),
            Message::Complete { epoch } => self.end(Command::Complete { epoch }),
            Message::GiveUp { ready } => self.end(Command::GiveUp { ready }),
            Message::NoProgress { epochs } => self.end(Command::NoProgress { epochs }),
            // No leader says that.
            Message::Register { .. } | Message::Report(..) | Message::Alive => {}
        }
    }

    /// Tells the others how the job ends, and does the same here.
    pub(super) fn end(&mut self, command: Command) {
        self.is_over = true;
        if let Role::Leading(leading) = &self.role {
            self.history = leading.coordinator.history().clone();
            let message = match &command {
                Command::GiveUp { ready } => Message::GiveUp { ready: *ready },
                Command::NoProgress { epochs } => Message::NoProgress { epochs: *epochs },
                // They find the record of the other job by themselves.
                Command::Superseded => Message::NotLeading,
                _ => Message::Complete { epoch: self.record.epoch },
            };
            for machine in leading.followers.keys() {
                self.commands.push(Command::ToMachine(*machine, message.clone()));
            }
        }
        self.commands.push(command);
    }
}
