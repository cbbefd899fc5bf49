//! Machines: the launcher of each, which is the real one, and what comes to it and from it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::store::{Answer, Request};
use super::workers::Up;
use super::world::{Event, MS, Sabotage, Time, World};
use crate::membership::ToWorker;
use crate::membership::coordinator::Report;
use crate::membership::core::{Stands, WorkerId};
use crate::membership::machines::launcher::{Command, Input, Launcher, Message, Role};
use crate::membership::machines::record::Machine;
use crate::membership::model::{Checked, check};

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
    pub woke: Option<Time>,
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

    pub fn number(&self, host: usize) -> u32 {
        self.hosts[host].me.as_ref().map_or(u32::MAX, |me| me.number)
    }

    pub fn are_cut(&self, one: usize, other: usize) -> bool {
        let pair = (one.min(other), one.max(other));
        self.cuts.get(&pair).is_some_and(|until| *until > self.now)
    }

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
            Brought::Ended(worker) => Input::Worker(worker, Report::Ended),
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

    pub fn carry_out(&mut self, host: usize, commands: Vec<Command>) -> Checked {
        let second = self.now / (1_000 * MS);
        let counted = &mut self.hosts[host].commands;
        *counted = match counted.0 == second {
            true => (second, counted.1 + commands.len() as u32),
            false => (second, commands.len() as u32),
        };
        check(counted.1 < SPINNING, || "a launcher spins".into())?;
        self.note_role(host);
        for command in &commands {
            if let Command::Kill(worker, _) | Command::ToMachine(_, Message::Kill(worker, _)) =
                command
            {
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
                Command::Kill(worker, _) => self.doom(worker, true),
                Command::Complete { .. } => {
                    let is_complete =
                        self.store.record.as_ref().is_some_and(|(record, _)| record.is_complete);
                    check(is_complete, || "complete before the record says so".into())?;
                    self.hosts[host].is_over = true;
                    self.tell_all(host, &ToWorker::Finish)?;
                    self.plan(self.now + 1_000 * MS, Event::Clear(host));
                }
                Command::Disband => {
                    self.tally.count("machines disbanded");
                    self.end_host(host, false);
                }
                Command::Superseded => return Err("takes its own job for another".into()),
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
