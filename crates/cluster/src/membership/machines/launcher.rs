//! One launcher among those of several machines: decisions without I/O, and without a clock of its own.
//!
//! One launcher *leads*: it coordinates the job. The others *follow*: they are connected to it, and report what
//! becomes of their workers. A launcher that has lost the leader, or never had one, *seeks*: it reads the
//! [record](Record), connects to the leader that it names, and if that leader is out of reach makes itself the
//! leader, by compare-and-set. Only one can succeed. What the leader decides takes effect after a compare-and-set
//! as well. So a leader that the others have given up, and that does not know it yet, decides nothing any more.
//!
//! A leader and its followers notice each other's end by the closed connection, and silence by questions that
//! remain without an answer for the timeout. Losing the leader disturbs no epoch: steps are made by the workers
//! among themselves. As long as etcd cannot be reached, nothing changes, and steps go on.

mod leading;
mod seeking;
#[cfg(test)]
mod simulator;
mod status;
#[cfg(test)]
mod tests;
mod workers;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::leading::Leading;
use self::seeking::{Seeking, Stage};
use self::workers::Local;
use super::record::{Machine, Record};
use crate::membership::coordinator::{History, Report};
use crate::membership::core::{Settings, Stands, WorkerId, excused};
use crate::membership::{Sign, ToWorker};

pub use self::status::Status;

/// What launchers say to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// To the leader, first: where all workers of a machine stand. Those that it does not name have ended.
    Register { machine: Machine, workers: Vec<(WorkerId, Report)> },
    /// To the leader: what became of a worker.
    Report(WorkerId, Report),
    /// To the leader: the answer to a question.
    Alive,
    /// From the leader: do you live?
    Probe,
    /// From a launcher that does not lead: look for the leader.
    NotLeading,
    /// From the leader, for a worker.
    Tell(WorkerId, ToWorker),
    /// From the leader: kill this worker, for this reason.
    Kill(WorkerId, Sign),
    /// From the leader: all machines are to leave, so that there is none to leave the run to.
    Disband,
    /// From the leader: the run is complete.
    Complete { epoch: u64 },
    /// From the leader: there were too few workers for too long.
    GiveUp { ready: usize },
    /// From the leader: so many epochs in a row have ended before a step was complete.
    NoProgress { epochs: u32 },
}

/// Something that has happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// To a worker of this machine.
    Worker(WorkerId, Report),
    /// The record was read, or a write found another one than expected.
    Read(Record, u64),
    /// The record was written; its revision.
    Written(u64),
    /// The connection to the leader is open.
    Linked,
    /// The leader could not be reached: it does not listen there any more, or else nothing answers.
    Unreachable { is_gone: bool },
    /// The leader said something.
    FromLeader(Message),
    /// The connection to the leader has closed.
    LeaderClosed,
    /// Another launcher said something.
    FromMachine(u32, Message),
    /// The connection of another launcher has closed.
    MachineClosed(u32),
    /// This machine is to leave the job.
    Leave,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Read the record: until it succeeds.
    Read,
    /// Replace the record that has this revision: until it succeeds, or finds another one.
    Write(Box<Record>, u64),
    /// Connect to the leader.
    Link(Machine),
    /// Close the connection to the leader, or give up opening it.
    Unlink,
    ToLeader(Message),
    ToMachine(u32, Message),
    /// Close the connection of another launcher.
    Close(u32),
    ToWorker(WorkerId, ToWorker),
    Kill(WorkerId, Sign),
    /// This machine was to leave, and there are no others that would go on.
    Disband,
    /// Another job has begun under the name of this one.
    Superseded,
    /// The run is complete, with the result that rank 0 of this epoch handed in: let all workers go.
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

/// How often the leader looks whether another has taken its place. More often: more requests to etcd. Less
/// often: a leader that was cut off from the others leads none of them for longer.
const LOOK: Duration = Duration::from_secs(1);

/// How long a seeker pauses before it looks again. Longer: it finds the leader later. Shorter: more requests.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a machine may take to say anything after its peers were silent for the timeout. Longer: the others
/// wait longer for the next epoch. Shorter: a machine that was only slow is given up.
const LAST_CHANCE: Duration = Duration::from_millis(500);

/// By how much this launcher may be late before it takes itself to have been paused, so that others may have
/// spoken meanwhile.
const PAUSED: Duration = Duration::from_millis(50);

/// How many recoveries are published. More: larger requests to etcd. Fewer: people see less of what happened.
const RECOVERIES: usize = 100;

/// The launcher of one machine.
pub struct Launcher {
    settings: Settings,
    me: Machine,
    /// As last read or written, and its revision.
    record: Record,
    revision: u64,
    /// The leader whose place this launcher is about to take.
    former: Option<Machine>,
    workers: BTreeMap<WorkerId, Local>,
    /// By number, the last life of a worker of this machine that has ended.
    ended: BTreeMap<u32, u32>,
    role: Role,
    /// Whether a request to etcd is under way.
    is_asking: bool,
    /// Since when this machine is to leave the job.
    leaving: Option<Duration>,
    has_disbanded: bool,
    /// Whether workers of this machine that wait for an epoch are let go.
    is_releasing: bool,
    is_over: bool,
    history: History,
    idle_until: Option<Duration>,
    commands: Vec<Command>,
}

enum Role {
    Seeking(Seeking),
    Following { since: Duration, heard: Duration },
    Leading(Box<Leading>),
}

impl Launcher {
    /// One that has joined a job as `me`, by writing this record.
    pub fn new(
        settings: Settings,
        me: Machine,
        record: Record,
        revision: u64,
        now: Duration,
    ) -> (Launcher, Vec<Command>) {
        let seeking = Seeking { since: now, began: now, stage: Stage::Pausing { until: now } };
        let mut launcher = Launcher {
            settings,
            me,
            record: record.clone(),
            revision,
            former: None,
            workers: BTreeMap::new(),
            ended: BTreeMap::new(),
            role: Role::Seeking(seeking),
            is_asking: false,
            leaving: None,
            has_disbanded: false,
            is_releasing: false,
            is_over: false,
            history: History::default(),
            idle_until: None,
            commands: Vec::new(),
        };
        launcher.on_read(now, record, revision);
        let commands = launcher.take_commands(now);
        (launcher, commands)
    }

    /// What has happened to the job while this launcher has led it.
    pub fn history(&self) -> &History {
        match &self.role {
            Role::Leading(leading) => leading.coordinator.history(),
            _ => &self.history,
        }
    }

    /// Whether other machines may go on if this one leaves.
    pub fn has_others(&self) -> bool {
        match &self.role {
            Role::Leading(leading) => !leading.followers.is_empty(),
            Role::Following { .. } => true,
            Role::Seeking(_) => self.record.machines > 1,
        }
    }

    /// When time alone changes something: see [`Launcher::tick`].
    pub fn deadline(&self) -> Option<Duration> {
        self.idle_until
    }

    /// Something happened.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Command> {
        self.excuse_silence_of_own(now);
        if !self.is_over {
            self.on(now, input);
        }
        self.take_commands(now)
    }

    /// Time has passed, and no input waits to be handled.
    pub fn tick(&mut self, now: Duration) -> Vec<Command> {
        self.excuse_silence_of_own(now);
        if !self.is_over {
            self.on_tick(now);
        }
        self.take_commands(now)
    }

    /// The job is to end here: lets workers go that wait for an epoch, now and from now on.
    pub fn release(&mut self, now: Duration) -> Vec<Command> {
        self.is_releasing = true;
        let is_waiting = |local: &Local| matches!(local.stands, Stands::Ready { .. });
        let waiting = self.workers.iter().filter(|(_, local)| is_waiting(local));
        let waiting: Vec<WorkerId> = waiting.map(|(id, _)| *id).collect();
        waiting.into_iter().for_each(|id| self.tell_worker(id, ToWorker::Finish));
        self.take_commands(now)
    }

    fn on(&mut self, now: Duration, input: Input) {
        match input {
            Input::Worker(worker, report) => self.on_worker(now, worker, report),
            Input::Read(record, revision) => {
                self.is_asking = false;
                self.on_read(now, record, revision);
            }
            Input::Written(revision) => {
                self.is_asking = false;
                self.on_written(now, revision);
            }
            Input::Linked => self.on_linked(now),
            Input::Unreachable { is_gone } => self.on_unreachable(now, is_gone),
            Input::FromLeader(message) => self.on_leader(now, message),
            Input::LeaderClosed => self.on_leader_closed(now),
            Input::FromMachine(machine, message) => self.on_machine(now, machine, message),
            Input::MachineClosed(machine) => self.lose_machine(now, machine),
            Input::Leave => self.on_leave(now),
        }
    }

    fn on_tick(&mut self, now: Duration) {
        let timeout = self.settings.timeout;
        if self.seeks_in_vain_at().is_some_and(|at| now >= at) {
            self.disband();
        }
        match &mut self.role {
            Role::Seeking(Seeking { stage: Stage::Pausing { until }, .. }) => {
                if now >= *until {
                    let Role::Seeking(seeking) = &mut self.role else { return };
                    seeking.stage = Stage::Asking;
                    self.ask(Command::Read);
                }
            }
            Role::Seeking(_) => {}
            Role::Following { heard, .. } => {
                if now >= *heard + timeout {
                    let since = *heard;
                    self.seek(now, since);
                }
            }
            Role::Leading(leading) => {
                let acts = match leading.coordinator.deadline() {
                    Some(at) if now >= at => leading.coordinator.tick(now),
                    _ => Vec::new(),
                };
                self.carry_out(now, acts);
                self.watch_machines(now);
                if let Role::Leading(leading) = &self.role
                    && now >= leading.look_at
                {
                    self.ask(Command::Read);
                }
            }
        }
    }

    /// When a machine that is to leave, and finds no leader to tell so, gives up leaving in an orderly way.
    fn seeks_in_vain_at(&self) -> Option<Duration> {
        match (&self.role, self.leaving) {
            (Role::Seeking(seeking), Some(leaving)) if !self.has_disbanded => {
                Some(leaving.max(seeking.began) + self.settings.timeout)
            }
            _ => None,
        }
    }

    /// If this process has been paused, what it has not heard may be on its way.
    fn excuse_silence_of_own(&mut self, now: Duration) {
        let late = self.idle_until.map_or(Duration::ZERO, |until| now.saturating_sub(until));
        if late <= PAUSED {
            return;
        }
        match &mut self.role {
            Role::Following { heard, .. } => {
                *heard = excused(*heard, self.settings.timeout, late, now);
            }
            Role::Leading(leading) => {
                let asked = leading.followers.values_mut().filter_map(|it| it.asked.as_mut());
                asked.for_each(|(at, limit)| *at = excused(*at, *limit, late, now));
            }
            Role::Seeking(_) => {}
        }
    }

    fn take_commands(&mut self, now: Duration) -> Vec<Command> {
        self.idle_until = self.next_deadline(now);
        std::mem::take(&mut self.commands)
    }

    fn next_deadline(&self, now: Duration) -> Option<Duration> {
        if self.is_over {
            return None;
        }
        let timeout = self.settings.timeout;
        match &self.role {
            Role::Seeking(Seeking { stage, .. }) => {
                let until = match stage {
                    Stage::Pausing { until } => Some(*until),
                    Stage::Asking | Stage::Linking => None,
                };
                until.into_iter().chain(self.seeks_in_vain_at()).min()
            }
            Role::Following { heard, .. } => Some(*heard + timeout),
            Role::Leading(leading) => {
                let due = leading.followers.values().map(|follower| match follower.asked {
                    Some((at, limit)) => at + limit,
                    None => follower.probed + timeout / 4,
                });
                // A request that is under way ends the wait by itself.
                let look = (!self.is_asking).then_some(leading.look_at.max(now));
                due.chain(look).chain(leading.coordinator.deadline()).min()
            }
        }
    }
}
