//! The workers of this machine, and leaving with them.

use std::time::Duration;

use super::{Command, Launcher, Message, Role};
use crate::membership::coordinator::Report;
use crate::membership::core::{Stands, WorkerId};
use crate::membership::{About, Sign, ToWorker};

/// A worker of this machine.
pub(super) struct Local {
    pub(super) stands: Stands,
    pub(super) about: About,
    pub(super) finished: Option<u64>,
}

impl Launcher {
    pub(super) fn on_worker(&mut self, now: Duration, worker: WorkerId, report: Report) {
        let has_ended = self.ended.get(&worker.number).is_some_and(|life| *life >= worker.life);
        let counts_after_end = matches!(report, Report::Finished { .. } | Report::Computing(_));
        if has_ended && !counts_after_end {
            // What a process sent may arrive after its end, of which a leader to come will not hear.
            return;
        }
        match &report {
            Report::Connected => {
                let (stands, about, finished) = (Stands::Starting, About::default(), None);
                self.workers.insert(worker, Local { stands, about, finished });
            }
            Report::Ended => {
                self.workers.remove(&worker);
                self.ended.insert(worker.number, worker.life);
            }
            Report::Closed => {
                // One that was not let go, and cannot be told anything any more, must not act. The leader may be
                // lost before it can say so, and the next one takes a worker that is not named for ended.
                let is_known = self.workers.remove(&worker).is_some();
                self.commands.extend(is_known.then_some(Command::Kill(worker, Sign::CutOff)));
            }
            Report::Ready { .. } if self.is_releasing => {
                return self.tell_worker(worker, ToWorker::Finish);
            }
            Report::Ready { after, silent, about } => {
                if let Some(local) = self.workers.get_mut(&worker) {
                    local.stands = Stands::Ready { after: *after, silent: silent.clone() };
                    local.about.clone_from(about);
                }
            }
            Report::Finished { epoch } => {
                if let Some(local) = self.workers.get_mut(&worker) {
                    local.finished = Some(*epoch);
                }
            }
            _ => {}
        }
        let has_connected = report == Report::Connected;
        self.report(now, worker, report);
        if has_connected && self.leaving.is_some() {
            self.report(now, worker, Report::Leaving);
        }
    }

    /// Reports to the leader, which may be this launcher. A leader that is not there yet will be told where all
    /// workers stand.
    pub(super) fn report(&mut self, now: Duration, worker: WorkerId, report: Report) {
        match &mut self.role {
            Role::Leading(leading) => {
                let acts = leading.coordinator.report(now, worker, report);
                self.carry_out(now, acts);
            }
            Role::Following { .. } => {
                self.commands.push(Command::ToLeader(Message::Report(worker, report)));
            }
            Role::Seeking(_) => {}
        }
    }

    /// Where the workers of this machine stand.
    pub(super) fn standing(&self) -> Vec<(WorkerId, Report)> {
        let of = |(worker, local): (&WorkerId, &Local)| {
            let (stands, about) = (local.stands.clone(), local.about.clone());
            (*worker, Report::Returned { stands, about, finished: local.finished })
        };
        self.workers.iter().map(of).collect()
    }

    pub(super) fn tell_worker(&mut self, worker: WorkerId, message: ToWorker) {
        match (&message, self.workers.get_mut(&worker)) {
            (ToWorker::Begin { epoch, .. }, Some(local)) => local.stands = Stands::In(*epoch),
            // It is let go: no leader to come can count on it.
            (ToWorker::Finish, _) => drop(self.workers.remove(&worker)),
            _ => {}
        }
        self.commands.push(Command::ToWorker(worker, message));
    }

    pub(super) fn on_leave(&mut self, now: Duration) {
        self.leaving.get_or_insert(now);
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            self.report(now, worker, Report::Leaving);
        }
    }

    /// There is no machine to leave the run to: its workers are ended as those of a job that is told to stop.
    pub(super) fn disband(&mut self) {
        if self.leaving.is_some() && !std::mem::replace(&mut self.has_disbanded, true) {
            self.commands.push(Command::Disband);
        }
    }
}
