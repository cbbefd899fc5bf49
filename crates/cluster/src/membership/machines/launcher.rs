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

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::record::{Machine, Record};
use crate::membership::coordinator::{Act, Change, Coordinator, History, Report};
use crate::membership::core::{Settings, Stands, WorkerId, excused};
use crate::membership::{FirstStep, Sign, ToWorker};

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
    /// The leader could not be reached: nothing listens there, or else nothing answers.
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
    is_leaving: bool,
    is_over: bool,
    history: History,
    idle_until: Option<Duration>,
    commands: Vec<Command>,
}

/// A worker of this machine.
struct Local {
    stands: Stands,
    address: Vec<u8>,
    finished: Option<u64>,
}

enum Role {
    Seeking(Seeking),
    Following { heard: Duration },
    Leading(Box<Leading>),
}

struct Seeking {
    /// Since when the leader could not be reached.
    since: Duration,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The record is being read, or written to take the leader's place.
    Asking,
    /// The connection is being opened.
    Linking,
    Pausing {
        until: Duration,
    },
}

struct Leading {
    coordinator: Coordinator,
    followers: BTreeMap<u32, Follower>,
    /// What is being written.
    change: Option<Change>,
    /// When to look whether another leads.
    look_at: Duration,
}

struct Follower {
    machine: Machine,
    workers: BTreeSet<WorkerId>,
    /// When it was last asked whether it lives. It is asked now and then whatever it says meanwhile: so it hears
    /// that its leader lives.
    probed: Duration,
    /// The same, and how long it has to answer, until it says anything.
    asked: Option<(Duration, Duration)>,
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
        let seeking = Seeking { since: now, stage: Stage::Pausing { until: now } };
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
            is_leaving: false,
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

    /// Whether other machines would go on if this one left.
    pub fn has_others(&self) -> bool {
        match &self.role {
            Role::Leading(leading) => !leading.followers.is_empty(),
            Role::Following { .. } => true,
            Role::Seeking(_) => false,
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

    /// The job is to end here: lets workers go that wait for an epoch.
    pub fn release(&mut self, now: Duration) -> Vec<Command> {
        let is_waiting = |local: &Local| matches!(local.stands, Stands::Ready { .. });
        let waiting = self.workers.iter().filter(|(_, local)| is_waiting(local));
        let waiting: Vec<WorkerId> = waiting.map(|(id, _)| *id).collect();
        for id in waiting {
            self.commands.push(Command::ToWorker(id, ToWorker::Finish));
        }
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
            Input::LeaderClosed => {
                if matches!(self.role, Role::Following { .. }) {
                    self.seek(now);
                }
            }
            Input::FromMachine(machine, message) => self.on_machine(now, machine, message),
            Input::MachineClosed(machine) => self.lose_machine(now, machine),
            Input::Leave => self.on_leave(now),
        }
    }

    // Workers of this machine.

    fn on_worker(&mut self, now: Duration, worker: WorkerId, report: Report) {
        let has_ended = self.ended.get(&worker.number).is_some_and(|life| *life >= worker.life);
        if has_ended && !matches!(report, Report::Finished { .. }) {
            // What a process sent may arrive after its end, of which a leader to come will not hear.
            return;
        }
        match &report {
            Report::Connected => {
                let (stands, address, finished) = (Stands::Starting, Vec::new(), None);
                self.workers.insert(worker, Local { stands, address, finished });
            }
            Report::Ended => {
                self.workers.remove(&worker);
                self.ended.insert(worker.number, worker.life);
            }
            Report::Closed => {
                self.workers.remove(&worker);
                if matches!(self.role, Role::Seeking(_)) && !self.is_leaving {
                    // One that cannot be told anything any more must not act, and no leader can say so.
                    self.commands.push(Command::Kill(worker, Sign::CutOff));
                }
            }
            Report::Ready { after, silent, address } => {
                if let Some(local) = self.workers.get_mut(&worker) {
                    local.stands = Stands::Ready { after: *after, silent: silent.clone() };
                    local.address.clone_from(address);
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
        if has_connected && self.is_leaving {
            self.report(now, worker, Report::Leaving);
        }
    }

    /// Reports to the leader, which may be this launcher. A leader that is not there yet will be told where all
    /// workers stand.
    fn report(&mut self, now: Duration, worker: WorkerId, report: Report) {
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
    fn standing(&self) -> Vec<(WorkerId, Report)> {
        let of = |(worker, local): (&WorkerId, &Local)| {
            let (stands, address) = (local.stands.clone(), local.address.clone());
            (*worker, Report::Returned { stands, address, finished: local.finished })
        };
        self.workers.iter().map(of).collect()
    }

    fn tell_worker(&mut self, worker: WorkerId, message: ToWorker) {
        match (&message, self.workers.get_mut(&worker)) {
            (ToWorker::Begin { epoch, .. }, Some(local)) => local.stands = Stands::In(*epoch),
            // It is let go: no leader to come can count on it.
            (ToWorker::Finish, _) => drop(self.workers.remove(&worker)),
            _ => {}
        }
        self.commands.push(Command::ToWorker(worker, message));
    }

    fn on_leave(&mut self, now: Duration) {
        self.is_leaving = true;
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            self.report(now, worker, Report::Leaving);
        }
    }

    // Seeking, and the record.

    fn seek(&mut self, since: Duration) {
        if let Role::Leading(leading) = &self.role {
            self.history = leading.coordinator.history().clone();
            for machine in leading.followers.keys() {
                self.commands.push(Command::Close(*machine));
            }
        }
        self.commands.push(Command::Unlink);
        self.role = Role::Seeking(Seeking { since, stage: Stage::Asking });
        self.ask(Command::Read);
    }

    fn ask(&mut self, command: Command) {
        // Whatever the request under way brings will do.
        if !self.is_asking {
            self.is_asking = true;
            self.commands.push(command);
        }
    }

    fn pause(&mut self, now: Duration) {
        if let Role::Seeking(seeking) = &mut self.role {
            seeking.stage = Stage::Pausing { until: now + PAUSE };
        }
    }

    fn on_read(&mut self, now: Duration, record: Record, revision: u64) {
        log::debug!(
            "machine {}: machine {} leads, epoch {}",
            self.me.number,
            record.leader.number,
            record.epoch
        );
        (self.record, self.revision) = (record, revision);
        if self.record.is_complete {
            return self.on_complete(self.record.epoch);
        }
        let is_mine = self.record.leader.number == self.me.number;
        match &mut self.role {
            Role::Leading(leading) if is_mine => {
                // Others have joined meanwhile.
                leading.look_at = now + LOOK;
                if let Some(change) = leading.change.clone() {
                    self.write(&change);
                }
            }
            Role::Leading(_) => self.seek(now),
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

    fn on_written(&mut self, now: Duration, revision: u64) {
        self.revision = revision;
        match &mut self.role {
            Role::Leading(leading) => {
                leading.look_at = now + LOOK;
                let Some(change) = leading.change.take() else { return };
                apply(&mut self.record, &change);
                let acts = leading.coordinator.committed(now, &change);
                self.carry_out(now, acts);
            }
            Role::Seeking(_) => {
                self.record.leader = self.me.clone();
                self.lead(now);
            }
            Role::Following { .. } => {}
        }
    }

    fn write(&mut self, change: &Change) {
        let mut record = self.record.clone();
        apply(&mut record, change);
        let revision = self.revision;
        self.ask(Command::Write(Box::new(record), revision));
    }

    fn on_linked(&mut self, now: Duration) {
        if let Role::Seeking(Seeking { stage: Stage::Linking, .. }) = self.role {
            let (machine, workers) = (self.me.clone(), self.standing());
            self.commands.push(Command::ToLeader(Message::Register { machine, workers }));
            self.role = Role::Following { heard: now };
            if self.is_leaving {
                self.on_leave(now);
            }
        }
    }

    fn on_unreachable(&mut self, now: Duration, is_gone: bool) {
        let Role::Seeking(Seeking { since, stage: Stage::Linking }) = self.role else { return };
        if !is_gone && now < since + self.settings.timeout {
            return self.pause(now);
        }
        self.take_over();
    }

    /// Makes itself the leader, if the record has not changed.
    fn take_over(&mut self) {
        self.former = Some(self.record.leader.clone());
        let mut record = self.record.clone();
        record.leader = self.me.clone();
        if let Role::Seeking(seeking) = &mut self.role {
            seeking.stage = Stage::Asking;
        }
        self.ask(Command::Write(Box::new(record), self.revision));
    }

    // Following.

    fn on_leader(&mut self, now: Duration, message: Message) {
        let Role::Following { heard } = &mut self.role else { return };
        *heard = now;
        match message {
            Message::Probe => self.commands.push(Command::ToLeader(Message::Alive)),
            Message::NotLeading => {
                self.commands.push(Command::Unlink);
                let stage = Stage::Pausing { until: now + PAUSE };
                self.role = Role::Seeking(Seeking { since: now, stage });
            }
            Message::Tell(worker, message) => self.tell_worker(worker, message),
            Message::Kill(worker, sign) => self.commands.push(Command::Kill(worker, sign)),
            Message::Complete { epoch } => self.on_complete(epoch),
            Message::GiveUp { ready } => self.end(Command::GiveUp { ready }),
            Message::NoProgress { epochs } => self.end(Command::NoProgress { epochs }),
            // No leader says that.
            Message::Register { .. } | Message::Report(..) | Message::Alive => {}
        }
    }

    fn on_complete(&mut self, epoch: u64) {
        self.end(Command::Complete { epoch });
    }

    /// Tells the others how the job ends, and does the same here.
    fn end(&mut self, command: Command) {
        self.is_over = true;
        if let Role::Leading(leading) = &self.role {
            self.history = leading.coordinator.history().clone();
            let message = match &command {
                Command::GiveUp { ready } => Message::GiveUp { ready: *ready },
                Command::NoProgress { epochs } => Message::NoProgress { epochs: *epochs },
                _ => Message::Complete { epoch: self.record.epoch },
            };
            for machine in leading.followers.keys() {
                self.commands.push(Command::ToMachine(*machine, message.clone()));
            }
        }
        self.commands.push(command);
    }

    // Leading.

    /// Takes up the job as the record has it.
    fn lead(&mut self, now: Duration) {
        log::debug!("machine {}: leads from epoch {}", self.me.number, self.record.epoch);
        let Record { epoch, members, .. } = self.record.clone();
        let settings = self.settings.clone();
        let coordinator = match epoch {
            0 => Coordinator::new(settings, now),
            _ => Coordinator::resume(settings, epoch, members.clone(), now),
        };
        let (followers, look_at) = (BTreeMap::new(), now + LOOK);
        let leading = Leading { coordinator, followers, change: None, look_at };
        self.role = Role::Leading(Box::new(leading));
        if let Some(former) = self.former.take() {
            // It could not be reached: the others do not wait for its workers.
            let lost = members.into_iter().filter(|id| former.has(*id)).collect();
            self.lose_workers(now, lost);
        }
        self.settle(now, self.me.clone(), self.standing());
        if self.is_leaving {
            self.on_leave(now);
        }
    }

    /// Tells the coordinator where the workers of a machine stand.
    fn settle(&mut self, now: Duration, machine: Machine, workers: Vec<(WorkerId, Report)>) {
        let mut acts = Vec::new();
        let Role::Leading(leading) = &mut self.role else { return };
        let is_named = |id: &WorkerId| workers.iter().any(|(worker, _)| worker == id);
        let members = self.record.members.iter();
        for ended in members.filter(|id| machine.has(**id) && !is_named(id)) {
            acts.extend(leading.coordinator.report(now, *ended, Report::Ended));
        }
        for (worker, report) in workers {
            acts.extend(leading.coordinator.report(now, worker, report));
        }
        self.carry_out(now, acts);
    }

    fn on_machine(&mut self, now: Duration, number: u32, message: Message) {
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

    fn lose_machine(&mut self, now: Duration, number: u32) {
        let Role::Leading(leading) = &mut self.role else { return };
        self.commands.push(Command::Close(number));
        let Some(follower) = leading.followers.remove(&number) else { return };
        log::debug!("machine {}: lost machine {number}", self.me.number);
        let Follower { machine, mut workers, .. } = follower;
        workers.extend(self.record.members.iter().filter(|id| machine.has(**id)));
        self.lose_workers(now, workers.into_iter().collect());
    }

    fn lose_workers(&mut self, now: Duration, workers: Vec<WorkerId>) {
        if let Role::Leading(leading) = &mut self.role {
            let acts = leading.coordinator.vanished(now, workers);
            self.carry_out(now, acts);
        }
    }

    fn carry_out(&mut self, now: Duration, acts: Vec<Act>) {
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
                Act::Complete { epoch } => return self.on_complete(epoch),
                Act::GiveUp { ready } => return self.end(Command::GiveUp { ready }),
                Act::NoProgress { epochs } => return self.end(Command::NoProgress { epochs }),
            }
        }
    }

    fn kill_elsewhere(&mut self, now: Duration, worker: WorkerId, sign: Sign) {
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

    // Time.

    fn on_tick(&mut self, now: Duration) {
        let timeout = self.settings.timeout;
        match &mut self.role {
            Role::Seeking(Seeking { stage: Stage::Pausing { until }, .. }) => {
                if now >= *until {
                    let Role::Seeking(seeking) = &mut self.role else { return };
                    seeking.stage = Stage::Asking;
                    self.ask(Command::Read);
                }
            }
            Role::Seeking(_) => {}
            Role::Following { heard } => {
                if now >= *heard + timeout {
                    let since = *heard;
                    self.seek(since);
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

    fn watch_machines(&mut self, now: Duration) {
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

    /// If this process has been paused, what it has not heard may be on its way.
    fn excuse_silence_of_own(&mut self, now: Duration) {
        let late = self.idle_until.map_or(Duration::ZERO, |until| now.saturating_sub(until));
        if late <= PAUSED {
            return;
        }
        match &mut self.role {
            Role::Following { heard } => *heard = excused(*heard, self.settings.timeout, late, now),
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
            Role::Seeking(Seeking { stage: Stage::Pausing { until }, .. }) => Some(*until),
            Role::Seeking(_) => None,
            Role::Following { heard } => Some(*heard + timeout),
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

    /// What there is to tell people of a job that this launcher leads.
    pub fn status(&self) -> Option<Status> {
        let Role::Leading(leading) = &self.role else { return None };
        let machines = leading.followers.values().map(|follower| follower.machine.clone());
        let mut machines: Vec<Machine> = machines.chain([self.me.clone()]).collect();
        machines.sort_by_key(|machine| machine.number);
        let spares = leading.coordinator.spares().into_iter();
        Some(Status {
            epoch: self.record.epoch,
            members: self.record.members.clone(),
            leader: self.me.clone(),
            machines,
            spares: spares.filter(|id| !self.record.members.contains(id)).collect(),
            step: leading.coordinator.first_step().cloned(),
            history: leading.coordinator.history().clone(),
            is_complete: self.is_over,
            at: 0,
        })
    }
}

/// What the leader of a job publishes for people: not what the launchers go by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The present epoch.
    pub epoch: u64,
    /// Its members, by rank.
    pub members: Vec<WorkerId>,
    /// The machine whose launcher coordinates.
    pub leader: Machine,
    /// The machines that are connected.
    pub machines: Vec<Machine>,
    /// Workers that wait.
    pub spares: Vec<WorkerId>,
    /// The first step of the newest epoch that has completed one.
    pub step: Option<FirstStep>,
    /// What has happened under this leader.
    pub history: History,
    /// Whether the run is over.
    pub is_complete: bool,
    /// When it was published, in seconds since 1970 by the clock of that machine.
    pub at: u64,
}

impl Leading {
    fn machine_of(&self, worker: WorkerId) -> Option<u32> {
        let mut followers = self.followers.iter();
        followers.find(|(_, follower)| follower.machine.has(worker)).map(|(number, _)| *number)
    }
}

fn apply(record: &mut Record, change: &Change) {
    match change {
        Change::Begin { epoch, members } => {
            record.epoch = *epoch;
            record.members.clone_from(members);
        }
        Change::Finish { .. } => record.is_complete = true,
    }
}

#[cfg(test)]
mod simulator;
