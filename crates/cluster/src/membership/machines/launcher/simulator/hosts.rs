//! Machines: the launcher of each, which is the real one, and what is around it: connections between launchers,
//! the record, and the processes that it starts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::workers::Up;
use super::world::{Event, MS, Sabotage, Time, World};
use crate::membership::ToWorker;
use crate::membership::coordinator::Report;
use crate::membership::core::{Stands, WorkerId};
use crate::membership::machines::launcher::{Command, Input, Launcher, Message, Role};
use crate::membership::machines::record::{Applicant, Machine, Record};
use crate::membership::model::{Checked, check};

/// How long a launcher tries to open a connection, and to have an answer of the store, and how long it pauses
/// before it asks the store again.
const DIALING: Time = 2_000 * MS;
const ANSWER: Time = 200 * MS;
const PAUSE: Time = 100 * MS;

/// More commands of one launcher in a second mean that it spins.
const SPINNING: u32 = 1_500;

pub struct Host {
    pub me: Option<Machine>,
    pub launcher: Option<Launcher>,
    pub workers: u32,
    pub is_alive: bool,
    pub is_stopped: bool,
    /// The whole machine is lost: what was connected with it hears nothing more.
    pub is_lost: bool,
    pub is_leaving: bool,
    pub is_over: bool,
    /// When it went on after a stop.
    woke: Option<Time>,
    was_leading: bool,
    pub backlog: VecDeque<Brought>,
    pub followers: BTreeMap<u32, usize>,
    /// The newest attempt to reach a leader, and whether it has succeeded.
    pub attempt: Option<usize>,
    pub is_linked: bool,
    pub request: Option<Request>,
    /// Until then it cannot reach the store.
    pub no_store_until: Time,
    /// In this second, so many commands.
    commands: (Time, u32),
}

#[derive(Clone, Debug)]
pub enum Request {
    Read,
    Write(Box<Record>, u64),
}

#[derive(Clone, Debug)]
pub enum Answer {
    Read(Box<Record>, u64),
    Written(u64),
}

/// What comes to a launcher.
#[derive(Clone, Debug)]
pub enum Brought {
    Arrived(usize),
    Said(usize, Message),
    Closed(usize),
    Linked(usize),
    Unreachable(usize, bool),
    LeaderSaid(usize, Message),
    LeaderClosed(usize),
    Store(Answer),
    Worker(WorkerId, Up),
    Ended(WorkerId),
    Leave,
}

/// A connection from one launcher to another, or an attempt.
pub struct Link {
    pub from: usize,
    pub to: usize,
    pub is_open: bool,
    pub up: VecDeque<Option<Message>>,
    pub down: VecDeque<Option<Message>>,
    pub last_up: Time,
    pub last_down: Time,
    pub closed_up: bool,
    pub closed_down: bool,
}

/// The one key.
#[derive(Default)]
pub struct Store {
    pub record: Option<(Record, u64)>,
    pub away_until: Time,
    /// Until then answers get lost, now and then.
    pub flaky_until: Time,
}

impl Host {
    pub fn new(workers: u32) -> Host {
        Host {
            me: None,
            launcher: None,
            workers,
            is_alive: true,
            is_stopped: false,
            is_lost: false,
            is_leaving: false,
            is_over: false,
            woke: None,
            was_leading: false,
            backlog: VecDeque::new(),
            followers: BTreeMap::new(),
            attempt: None,
            is_linked: false,
            request: None,
            no_store_until: 0,
            commands: (0, 0),
        }
    }

    pub fn is_leading(&self) -> bool {
        matches!(self.launcher.as_ref().map(|launcher| &launcher.role), Some(Role::Leading(_)))
    }

    pub fn has(&self, worker: WorkerId) -> bool {
        self.me.as_ref().is_some_and(|me| me.has(worker))
    }

    /// Machines that this launcher has registered.
    fn registered(&self) -> Vec<u32> {
        match self.launcher.as_ref().map(|launcher| &launcher.role) {
            Some(Role::Leading(leading)) => leading.followers.keys().copied().collect(),
            _ => Vec::new(),
        }
    }
}

impl World {
    pub fn time(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    pub fn are_cut(&self, one: usize, other: usize) -> bool {
        let pair = (one.min(other), one.max(other));
        self.cuts.get(&pair).is_some_and(|until| *until > self.now)
    }

    fn has_store(&self, host: usize) -> bool {
        self.now >= self.store.away_until.max(self.hosts[host].no_store_until)
    }

    // Joining.

    /// A launcher on a new machine reads the record, and will write itself into it.
    pub fn apply_to_join(&mut self, host: usize) {
        if !self.hosts[host].is_alive {
            return;
        }
        if !self.has_store(host) {
            return self.plan(self.now + PAUSE, Event::Apply(host));
        }
        let revision = self.store.record.as_ref().map_or(0, |(_, revision)| *revision);
        let found = self.store.record.as_ref().map(|(record, _)| record.clone());
        let settings = &self.settings;
        let applicant = Applicant {
            workers: self.hosts[host].workers,
            address: ([10, 0, (host >> 8) as u8, host as u8], 4_000).into(),
            host: format!("host {host}"),
            least: settings.least as u32,
            most: settings.most as u32,
            token: Some("t".into()),
        };
        match Record::join(found, applicant) {
            // The job is over.
            Err(_) => self.hosts[host].is_alive = false,
            Ok((me, record)) => {
                let at = self.now + self.random.below(self.answer);
                self.plan(at, Event::Enroll(host, Box::new((me, record)), revision));
            }
        }
    }

    pub fn enroll(&mut self, host: usize, me: Machine, record: Record, revision: u64) -> Checked {
        if !self.hosts[host].is_alive {
            return Ok(());
        }
        if !self.has_store(host) {
            self.plan(self.now + PAUSE, Event::Apply(host));
            return Ok(());
        }
        let written = self.replace(host, revision, &record)?;
        if self.loses_answer() {
            // It asks once more, or gives up and begins anew.
            let event = match self.random.one_in(2) {
                true => Event::Enroll(host, Box::new((me, record)), revision),
                false => Event::Apply(host),
            };
            self.plan(self.now + PAUSE, event);
            return Ok(());
        }
        let Some(revision) = written else {
            self.plan(self.now, Event::Apply(host));
            return Ok(());
        };
        self.tally.count("machines that join");
        let is_late = self.has_begun();
        self.tally.count(if is_late { "machines that join later" } else { "first machines" });
        let settings = self.settings.clone();
        let (launcher, commands) =
            Launcher::new(settings, me.clone(), record, revision, self.time());
        self.hosts[host].launcher = Some(launcher);
        for local in 0..me.workers {
            let at = self.now + self.random.below(20 * MS);
            self.plan(at, Event::Start(host, WorkerId { number: me.first + local, life: 0 }));
        }
        self.hosts[host].me = Some(me);
        self.carry_out(host, commands)
    }

    // The store.

    fn loses_answer(&mut self) -> bool {
        let loses = self.now < self.store.flaky_until && self.random.one_in(3);
        if loses {
            self.tally.count("lost answers of the store");
        }
        loses
    }

    /// Compare-and-set; the new revision, if it was done.
    fn replace(
        &mut self,
        host: usize,
        revision: u64,
        record: &Record,
    ) -> Result<Option<u64>, String> {
        let present = self.store.record.as_ref().map_or(0, |(_, revision)| *revision);
        let is_takeover = self
            .store
            .record
            .as_ref()
            .is_some_and(|(old, _)| old.leader != record.leader && old.epoch == record.epoch);
        let is_forced = is_takeover && self.sabotage == Some(Sabotage::TakeOverBlindly);
        if present != revision && !is_forced {
            // What this launcher has written before, though the answer was lost, counts as done.
            let is_kept = self.store.record.as_ref().is_some_and(|(kept, _)| kept == record);
            return Ok((is_kept && present > revision).then_some(present));
        }
        self.check_record(host, record)?;
        self.store.record = Some((record.clone(), present + 1));
        if is_takeover {
            self.tally.count("takeovers");
            self.spring("takeover", host);
        }
        Ok(Some(present + 1))
    }

    fn ask_store(&mut self, host: usize, request: Request) -> Checked {
        check(self.hosts[host].request.is_none(), || "two requests at once".into())?;
        if let Request::Write(record, _) = &request {
            if self.now < self.store.away_until {
                self.tally.count("changes while the store is away");
            }
            self.check_decision(host, record)?;
            let is_early = match self.sabotage {
                Some(Sabotage::BeginEarly) => !record.is_complete,
                Some(Sabotage::CompleteEarly) => record.is_complete,
                _ => false,
            };
            if is_early {
                let answer =
                    Answer::Written(self.store.record.as_ref().map_or(1, |(_, at)| at + 1));
                self.plan(self.now, Event::Deliver(host, Brought::Store(answer)));
            }
            self.spring("write", host);
        }
        self.hosts[host].request = Some(request);
        let at = self.now + self.random.below(self.answer);
        self.plan(at, Event::Request(host));
        Ok(())
    }

    pub fn serve(&mut self, host: usize) -> Checked {
        let Some(request) = self.hosts[host].request.clone() else { return Ok(()) };
        if self.hosts[host].is_lost || (!self.hosts[host].is_alive && self.random.one_in(2)) {
            return Ok(());
        }
        if !self.has_store(host) {
            let at = self.now + ANSWER + PAUSE;
            self.plan(at, Event::Request(host));
            return Ok(());
        }
        let answer = match request {
            Request::Read => None,
            Request::Write(record, revision) => self.replace(host, revision, &record)?,
        };
        let is_write = matches!(self.hosts[host].request, Some(Request::Write(..)));
        if self.loses_answer() {
            let at = self.now + ANSWER + PAUSE;
            self.plan(at, Event::Request(host));
            return Ok(());
        }
        let (record, revision) = self.store.record.clone().expect("there is a record");
        let launcher = self.hosts[host].launcher.as_ref();
        let is_overtaken = launcher.is_some_and(|launcher| launcher.record.leader != record.leader);
        if is_write && answer.is_none() && is_overtaken {
            let is_leading = self.hosts[host].is_leading();
            self.tally.count(match is_leading {
                true => "writes of a deposed leader",
                false => "takeovers by two",
            });
        }
        let answer = match answer {
            Some(revision) => Answer::Written(revision),
            None if is_write && self.sabotage == Some(Sabotage::IgnoreConflicts) => {
                Answer::Written(revision)
            }
            None => Answer::Read(Box::new(record), revision),
        };
        self.spring("answer", host);
        let at = self.now + self.random.below(self.answer);
        self.plan(at, Event::Deliver(host, Brought::Store(answer)));
        Ok(())
    }

    fn number(&self, host: usize) -> u32 {
        self.hosts[host].me.as_ref().map_or(u32::MAX, |me| me.number)
    }

    // Links.

    fn open(&mut self, host: usize, leader: &Machine) {
        self.unlink(host);
        let std::net::IpAddr::V4(ip) = leader.address.ip() else { unreachable!("they are V4") };
        let [_, _, high, low] = ip.octets();
        let to = usize::from(high) << 8 | usize::from(low);
        self.links.push(Link {
            from: host,
            to,
            is_open: false,
            up: VecDeque::new(),
            down: VecDeque::new(),
            last_up: 0,
            last_down: 0,
            closed_up: false,
            closed_down: false,
        });
        let link = self.links.len() - 1;
        self.hosts[host].attempt = Some(link);
        let at = self.now + self.random.below(self.message);
        self.plan(at, Event::Dial(link));
    }

    pub fn dial(&mut self, link: usize) {
        let Link { from, to, .. } = self.links[link];
        let target = &self.hosts[to];
        let at = self.now + self.random.below(self.message);
        if target.is_lost || (target.is_alive && target.is_stopped) || self.are_cut(from, to) {
            let at = self.now + DIALING;
            return self.plan(at, Event::Deliver(from, Brought::Unreachable(link, false)));
        }
        if !target.is_alive {
            return self.plan(at, Event::Deliver(from, Brought::Unreachable(link, true)));
        }
        let open = &mut self.links[link];
        open.is_open = true;
        (open.last_up, open.last_down) = (at, at);
        self.plan(at, Event::Deliver(to, Brought::Arrived(link)));
        self.plan(at, Event::Deliver(from, Brought::Linked(link)));
    }

    fn send_up(&mut self, link: usize, message: Option<Message>) {
        let delay = self.random.below(self.message);
        let Link { closed_up, last_up, up, .. } = &mut self.links[link];
        if !*closed_up {
            *closed_up = message.is_none();
            up.push_back(message);
            *last_up = (*last_up).max(self.now + delay);
            let at = *last_up;
            self.plan(at, Event::Up(link));
        }
    }

    fn send_down(&mut self, link: usize, message: Option<Message>) {
        let delay = self.random.below(self.message);
        let Link { closed_down, last_down, down, .. } = &mut self.links[link];
        if !*closed_down {
            *closed_down = message.is_none();
            down.push_back(message);
            *last_down = (*last_down).max(self.now + delay);
            let at = *last_down;
            self.plan(at, Event::Down(link));
        }
    }

    /// The next message of a link arrives, or waits until the network is there again.
    pub fn arrive(&mut self, link: usize, is_up: bool) {
        let Link { from, to, .. } = self.links[link];
        if self.are_cut(from, to) {
            let until = self.cuts[&(from.min(to), from.max(to))];
            let open = &mut self.links[link];
            let last = if is_up { &mut open.last_up } else { &mut open.last_down };
            *last = (*last).max(until);
            let event = if is_up { Event::Up(link) } else { Event::Down(link) };
            return self.plan(until, event);
        }
        let open = &mut self.links[link];
        let brought = match is_up {
            true => match open.up.pop_front().expect("it was sent") {
                Some(message) => Brought::Said(link, message),
                None => Brought::Closed(link),
            },
            false => match open.down.pop_front().expect("it was sent") {
                Some(message) => Brought::LeaderSaid(link, message),
                None => Brought::LeaderClosed(link),
            },
        };
        self.plan(self.now, Event::Deliver(if is_up { to } else { from }, brought));
    }

    /// The follower's end closes.
    fn unlink(&mut self, host: usize) {
        self.hosts[host].is_linked = false;
        if let Some(link) = self.hosts[host].attempt.take()
            && self.links[link].is_open
        {
            self.links[link].closed_down = true;
            self.send_up(link, None);
        }
    }

    /// The leader's end closes.
    fn close(&mut self, host: usize, number: u32) {
        if let Some(link) = self.hosts[host].followers.remove(&number) {
            self.links[link].closed_up = true;
            self.send_down(link, None);
        }
    }

    /// The network closes the connection of a machine with its leader.
    pub fn blip(&mut self, host: usize) {
        let link = self.hosts[host].attempt.filter(|_| self.hosts[host].is_linked);
        if let Some(link) = link {
            self.tally.count("blips");
            self.send_up(link, None);
            self.send_down(link, None);
        }
    }

    // Launchers.

    pub fn deliver(&mut self, host: usize, brought: Brought) -> Checked {
        if !self.hosts[host].is_alive {
            return Ok(());
        }
        if self.hosts[host].is_stopped {
            self.hosts[host].backlog.push_back(brought);
            return Ok(());
        }
        self.heed(host, brought)
    }

    fn heed(&mut self, host: usize, brought: Brought) -> Checked {
        let number_of = |world: &World, link: usize| world.number(world.links[link].from);
        let is_of = |world: &World, link: usize| {
            world.hosts[host].followers.get(&number_of(world, link)) == Some(&link)
        };
        let is_stale = self.sabotage == Some(Sabotage::HearOldLinks);
        let is_leader = |world: &World, link| world.hosts[host].attempt == Some(link) || is_stale;
        let input = match brought {
            Brought::Arrived(link) => {
                let number = number_of(self, link);
                if self.hosts[host].followers.contains_key(&number) {
                    self.handle(host, Input::MachineClosed(number))?;
                }
                if self.hosts[host].followers.contains_key(&number) {
                    self.close(host, number);
                }
                self.hosts[host].followers.insert(number, link);
                return Ok(());
            }
            Brought::Said(link, message) if is_of(self, link) => {
                Input::FromMachine(number_of(self, link), message)
            }
            Brought::Closed(link) if is_of(self, link) => {
                Input::MachineClosed(number_of(self, link))
            }
            Brought::Linked(link) => {
                if self.hosts[host].attempt != Some(link) {
                    self.send_up(link, None);
                    return Ok(());
                }
                self.hosts[host].is_linked = true;
                Input::Linked
            }
            Brought::Unreachable(link, is_gone) if is_leader(self, link) => {
                Input::Unreachable { is_gone }
            }
            Brought::LeaderSaid(link, message) if is_leader(self, link) => {
                Input::FromLeader(message)
            }
            Brought::LeaderClosed(link) if is_leader(self, link) => Input::LeaderClosed,
            Brought::Store(Answer::Read(record, revision)) => {
                self.hosts[host].request = None;
                Input::Read(*record, revision)
            }
            Brought::Store(Answer::Written(revision)) => {
                if self.hosts[host].request.take().is_none() {
                    // It was told before, by a sabotaged store.
                    return Ok(());
                }
                Input::Written(revision)
            }
            Brought::Worker(worker, up) => match self.report_of(worker, up) {
                Some(report) => Input::Worker(worker, report),
                None => return Ok(()),
            },
            Brought::Ended(worker) => {
                self.unlink_worker(worker);
                Input::Worker(worker, Report::Ended)
            }
            Brought::Leave => {
                if !self.hosts[host].launcher.as_ref().is_some_and(Launcher::has_others) {
                    return Ok(());
                }
                self.count_leave(host);
                self.hosts[host].is_leaving = true;
                Input::Leave
            }
            // Of a connection that was given up.
            _ => return Ok(()),
        };
        self.handle(host, input)
    }

    fn count_leave(&mut self, host: usize) {
        let is_leader = self.hosts[host].is_leading();
        self.tally.count(if is_leader { "leaders that leave" } else { "followers that leave" });
        let members = self.members();
        let stays = |world: &World, other: usize| {
            other != host && world.hosts[other].is_alive && !world.hosts[other].is_leaving
        };
        let of_members = |other: usize| members.iter().any(|member| self.hosts[other].has(*member));
        let staying: Vec<usize> =
            (0..self.hosts.len()).filter(|other| stays(self, *other)).collect();
        if of_members(host) && !staying.is_empty() && !staying.into_iter().any(of_members) {
            self.tally.count("all members leave");
        }
    }

    fn handle(&mut self, host: usize, mut input: Input) -> Checked {
        self.corrupt(host, &mut input);
        let now = self.time();
        let Some(launcher) = self.hosts[host].launcher.as_mut() else { return Ok(()) };
        let commands = launcher.handle(now, input);
        self.carry_out(host, commands)
    }

    pub fn tick_host(&mut self, host: usize) -> Checked {
        let now = self.time();
        self.corrupt(host, &mut Input::LeaderClosed);
        let launcher = self.hosts[host].launcher.as_mut().expect("it has a deadline");
        let commands = launcher.tick(now);
        self.carry_out(host, commands)
    }

    fn corrupt(&mut self, host: usize, input: &mut Input) {
        let Some(launcher) = self.hosts[host].launcher.as_mut() else { return };
        match (self.sabotage, &mut launcher.role) {
            (Some(Sabotage::ForgetUnseen), Role::Leading(leading)) => {
                leading.coordinator.forget_unseen();
            }
            (Some(Sabotage::BelieveReturned), Role::Leading(_)) => {
                if let Input::FromMachine(_, Message::Register { workers, .. }) = input {
                    for (_, report) in workers {
                        if let Report::Returned { stands, .. } = report {
                            *stands = Stands::Ready { after: 0, silent: Vec::new() };
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn carry_out(&mut self, host: usize, commands: Vec<Command>) -> Checked {
        let second = self.now / (1_000 * MS);
        let counted = &mut self.hosts[host].commands;
        *counted = match counted.0 == second {
            true => (second, counted.1 + commands.len() as u32),
            false => (second, commands.len() as u32),
        };
        check(counted.1 < SPINNING, || "a launcher spins".into())?;
        self.note_role(host);
        for command in &commands {
            if let Command::Kill(worker) | Command::ToMachine(_, Message::Kill(worker)) = command {
                self.doom(*worker, false);
            }
        }
        for command in commands {
            if self.is_told {
                println!("{:>12} µs host {host}: {command:?}", self.now);
            }
            match command {
                Command::Read => self.ask_store(host, Request::Read)?,
                Command::Write(record, revision) => {
                    self.ask_store(host, Request::Write(record, revision))?;
                }
                Command::Link(leader) => self.open(host, &leader),
                Command::Unlink => self.unlink(host),
                Command::ToLeader(message) => {
                    if let Some(link) = self.hosts[host].attempt
                        && self.hosts[host].is_linked
                    {
                        self.send_up(link, Some(message));
                    }
                }
                Command::ToMachine(number, message) => {
                    self.note_told(host, &message)?;
                    if let Some(link) = self.hosts[host].followers.get(&number) {
                        self.send_down(*link, Some(message));
                    }
                }
                Command::Close(number) => self.close(host, number),
                Command::ToWorker(worker, message) => {
                    if self.hosts[host].is_leading() {
                        self.note_told(host, &Message::Tell(worker, message.clone()))?;
                    }
                    self.tell_worker(worker, message)?;
                }
                Command::Kill(worker) => self.doom(worker, true),
                Command::Complete { .. } => {
                    let is_complete =
                        self.store.record.as_ref().is_some_and(|(record, _)| record.is_complete);
                    check(is_complete, || "complete before the record says so".into())?;
                    self.hosts[host].is_over = true;
                    self.tell_all(host, &ToWorker::Finish)?;
                    self.plan(self.now + 1_000 * MS, Event::Clear(host));
                }
                Command::GiveUp { ready } => return Err(format!("gives up with {ready} ready")),
                Command::NoProgress { epochs } => {
                    return Err(format!("no progress in {epochs} epochs"));
                }
            }
        }
        Ok(())
    }

    /// Counts that a leader finds out that another has taken its place.
    fn note_role(&mut self, host: usize) {
        let is_leading = self.hosts[host].is_leading();
        let was_leading = std::mem::replace(&mut self.hosts[host].was_leading, is_leading);
        if was_leading && !is_leading && !self.hosts[host].is_over {
            self.tally.count("deposed leaders");
            let woke = self.hosts[host].woke;
            if woke.is_some_and(|woke| self.now < woke + 2_000 * MS) {
                self.tally.count("leaders that wake up deposed");
            }
        }
    }

    pub fn stop_host(&mut self, host: usize, length: Time) {
        if self.hosts[host].is_alive && !self.hosts[host].is_stopped {
            let is_leading = self.hosts[host].is_leading();
            self.tally.count(if is_leading { "leaders stopped" } else { "followers stopped" });
            self.hosts[host].is_stopped = true;
            self.plan(self.now + length, Event::Wake(host));
        }
    }

    pub fn wake(&mut self, host: usize) -> Checked {
        if !self.hosts[host].is_alive || !std::mem::take(&mut self.hosts[host].is_stopped) {
            return Ok(());
        }
        self.hosts[host].woke = Some(self.now);
        let now = self.time();
        let deadline = self.hosts[host].launcher.as_ref().and_then(Launcher::deadline);
        if deadline.is_some_and(|at| at <= now) && self.random.one_in(2) {
            self.tick_host(host)?;
        }
        while let Some(brought) = self.hosts[host].backlog.pop_front() {
            self.deliver(host, brought)?;
        }
        Ok(())
    }

    /// The launcher of a machine ends: killed, or because it is done.
    pub fn end_host(&mut self, host: usize, is_lost: bool) {
        if !self.hosts[host].is_alive {
            return;
        }
        (self.hosts[host].is_alive, self.hosts[host].is_lost) = (false, is_lost);
        self.hosts[host].launcher = None;
        for index in self.of_host(host) {
            match is_lost {
                true => self.end_worker(index, true),
                false => {
                    let at = self.now + self.random.below(self.kill);
                    self.plan(at, Event::Die(index));
                }
            }
        }
        if !is_lost {
            self.unlink(host);
            let followers: Vec<u32> = self.hosts[host].followers.keys().copied().collect();
            followers.into_iter().for_each(|number| self.close(host, number));
        }
    }

    /// Whether the leader has registered the machine and nothing is between them.
    pub fn is_registered(&self, leader: usize, host: usize) -> bool {
        let host_is_well = self.hosts[host].is_alive && !self.hosts[host].is_stopped;
        let is_known = self.hosts[leader].registered().contains(&self.number(host));
        host == leader || (host_is_well && is_known && !self.are_cut(leader, host))
    }
}
