//! When what happens, drawn from a seed.

use std::collections::BTreeMap;
use std::time::Duration;

use super::hosts::{Brought, Host, Link, Store};
use super::witness::Begun;
use super::workers::{Group, Process};
use crate::membership::core::{Settings, WorkerId};
use crate::membership::machines::launcher::Launcher;
use crate::membership::machines::record::{Machine, Record};
use crate::membership::model::{Checked, Random, State, Tally, check, mix, reference};

/// In microseconds.
pub type Time = u64;

pub const MS: Time = 1_000;
const PATIENCE: Time = 30_000 * MS;
/// So long after the last fault the run must have ended.
const BOUND: Time = 2 * PATIENCE + 30_000 * MS;

/// What is done wrong, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// Workers are told of an epoch before the record says so.
    BeginEarly,
    /// Launchers say that the run is complete before the record does.
    CompleteEarly,
    /// A launcher makes itself the leader without comparing.
    TakeOverBlindly,
    /// A launcher whose write found another record goes on as if it had succeeded.
    IgnoreConflicts,
    /// Workers that return are taken to be ready, whatever they say.
    BelieveReturned,
    /// Members of machines that cannot be reached count as ended.
    ForgetUnseen,
    /// Workers that are to leave are let go though only they have the state of the run.
    ReleaseAtOnce,
    /// What an earlier leader says is heard.
    HearOldLinks,
}

pub enum Event {
    Apply(usize),
    Enroll(usize, Box<(Machine, Record)>, u64),
    Request(usize),
    Deliver(usize, Brought),
    Dial(usize),
    Up(usize),
    Down(usize),
    Wake(usize),
    Clear(usize),
    Start(usize, WorkerId),
    Listen(usize),
    Act(usize),
    Fail(usize),
    Silence(usize, u64),
    Die(usize),
    Resume(usize),
    Fault(Fault),
    /// No more faults.
    Calm,
    Heal,
}

/// Which machine.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    Leader,
    Any(u64),
    Host(usize),
}

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    KillLauncher(Target),
    LoseMachine(Target),
    StopLauncher(Target, Time),
    /// With all its workers.
    Suspend(Target, Time),
    KillWorker(u64),
    StopWorker(u64, Time),
    /// Two machines lose each other, for so long.
    Cut(Target, u64, Time),
    /// A machine loses all others, and maybe the store.
    Isolate(Target, bool, Time),
    StoreAway(Time),
    StoreCut(Target, Time),
    Flaky(Time),
    Blip(Target),
    Join(u32),
    Leave(Target),
    LeaveAll,
    LoseAll,
}

/// A fault that waits for a launcher to come to a point.
struct Trap {
    point: &'static str,
    after: u64,
    delay: Time,
    fault: Fault,
}

pub struct World {
    pub random: Random,
    pub now: Time,
    ahead: BTreeMap<(Time, u64), Event>,
    next: u64,
    pub settings: Settings,
    pub steps: u64,
    pub buckets: usize,
    pub every: u64,
    pub references: Vec<State>,
    pub hosts: Vec<Host>,
    pub links: Vec<Link>,
    pub store: Store,
    /// Pairs of machines that cannot reach each other until then.
    pub cuts: BTreeMap<(usize, usize), Time>,
    pub processes: Vec<Process>,
    pub living: Vec<usize>,
    pub groups: BTreeMap<u64, Group>,
    pub begun: BTreeMap<u64, Begun>,
    pub results: BTreeMap<u64, State>,
    pub checkpoint: Option<State>,
    traps: Vec<Trap>,
    healed: Time,
    pub timeout: Time,
    /// Bounds of delays.
    pub message: Time,
    pub answer: Time,
    pub step: Time,
    pub kill: Time,
    pub notice: Time,
    pub restart: Time,
    pub build: Time,
    late: Time,
    pub sabotage: Option<Sabotage>,
    pub wrong: Option<String>,
    pub tally: Tally,
    /// Whether all that happens is printed.
    pub is_told: bool,
}

impl World {
    pub fn new(seed: u64, sabotage: Option<Sabotage>) -> World {
        let mut random = Random::new(seed);
        let machines = random.between(1, 4);
        let hosts: Vec<Host> =
            (0..machines).map(|_| Host::new(random.between(1, 3) as u32)).collect();
        let workers: u64 = hosts.iter().map(|host| u64::from(host.workers)).sum();
        let most = if random.one_in(2) { 16 } else { random.between(1, workers) };
        let least = if random.one_in(2) { 1 } else { random.between(1, workers.min(most)) };
        let timeout = [400, 1_000, 2_000][random.below(3) as usize] * MS;
        let settings = Settings {
            workers: random.between(least, workers) as usize,
            least: least as usize,
            most: most as usize,
            timeout: Duration::from_micros(timeout),
            patience: Duration::from_micros(PATIENCE),
        };
        let (steps, buckets) = (random.between(3, 8), random.between(1, 2) as usize);
        let references = (0..=steps).map(|steps| reference(steps, buckets)).collect();
        let pick = |random: &mut Random, of: [Time; 4]| of[random.below(4) as usize];
        let mut world = World {
            now: 0,
            ahead: BTreeMap::new(),
            next: 0,
            settings,
            steps,
            buckets,
            every: random.between(1, 6),
            references,
            hosts,
            links: Vec::new(),
            store: Store::default(),
            cuts: BTreeMap::new(),
            processes: Vec::new(),
            living: Vec::new(),
            groups: BTreeMap::new(),
            begun: BTreeMap::new(),
            results: BTreeMap::new(),
            checkpoint: None,
            traps: Vec::new(),
            healed: 0,
            timeout,
            message: pick(&mut random, [100, MS, 5 * MS, 20 * MS]),
            answer: pick(&mut random, [100, 2 * MS, 10 * MS, 100 * MS]),
            step: pick(&mut random, [MS, 10 * MS, 40 * MS, 120 * MS]),
            kill: pick(&mut random, [100, MS, 20 * MS, 100 * MS]),
            notice: pick(&mut random, [100, MS, 20 * MS, 100 * MS]),
            restart: pick(&mut random, [100, 10 * MS, 100 * MS, 300 * MS]),
            build: pick(&mut random, [100, 2 * MS, 10 * MS, 100 * MS]),
            late: pick(&mut random, [0, 0, 30 * MS, 80 * MS]),
            sabotage,
            wrong: None,
            tally: Tally::default(),
            is_told: std::env::var_os("UNISONO_TEST_SEED").is_some(),
            random,
        };
        world.plan_history();
        world
    }

    fn plan_history(&mut self) {
        let steps = self.steps * self.buckets as u64;
        let window = steps * (self.step + self.message) * 2 + 300 * MS;
        for host in 0..self.hosts.len() {
            let limit = if self.random.one_in(4) { window } else { 50 * MS };
            let at = self.random.below(limit);
            self.plan(at, Event::Apply(host));
        }
        if self.random.one_in(16) {
            self.tally.count("undisturbed");
        } else {
            for _ in 0..self.random.below(5) {
                let at = self.random.below(window);
                let fault = self.draw_fault(None);
                self.plan(at, Event::Fault(fault));
            }
            for _ in 0..self.random.below(4) {
                let point = ["write", "answer", "takeover"][self.random.below(3) as usize];
                let after = self.random.below(4);
                let delay = if self.random.one_in(2) { 0 } else { self.random.below(20 * MS) };
                // Its host is the one that comes to that point.
                let fault = self.draw_fault(Some(Target::Host(usize::MAX)));
                self.traps.push(Trap { point, after, delay, fault });
            }
        }
        self.healed = window + 16_000 * MS;
        self.plan(window + 5_000 * MS, Event::Calm);
        self.plan(self.healed, Event::Heal);
    }

    fn draw_fault(&mut self, target: Option<Target>) -> Fault {
        let length = match self.random.below(4) {
            0 => 5_000 * MS,
            1 => self.random.between(1, 200 * MS),
            2 => self.random.between(1, self.timeout),
            _ => self.random.between(self.timeout, 3 * self.timeout),
        };
        let other = self.random.below(64);
        let target = target.unwrap_or(match self.random.one_in(2) {
            true => Target::Leader,
            false => Target::Any(self.random.below(64)),
        });
        match self.random.below(if matches!(target, Target::Host(_)) { 14 } else { 26 }) {
            0 | 1 => Fault::KillLauncher(target),
            2 => Fault::LoseMachine(target),
            3 | 4 => Fault::StopLauncher(target, length),
            5 => Fault::Suspend(target, length),
            6 => Fault::Cut(target, other, length),
            7 => Fault::Isolate(target, false, length),
            8 => Fault::Isolate(target, true, length),
            9 => Fault::StoreAway(length),
            10 => Fault::StoreCut(target, length),
            11 => Fault::Flaky(length),
            12 => Fault::Blip(target),
            13 => Fault::Leave(target),
            14..17 => Fault::KillWorker(other),
            17 | 18 => Fault::StopWorker(other, length),
            19 | 20 => Fault::Join(self.random.between(1, 3) as u32),
            21 => Fault::LeaveAll,
            22 => Fault::LoseAll,
            23 => Fault::Blip(Target::Any(other)),
            24 => Fault::Leave(Target::Leader),
            _ => Fault::Cut(Target::Any(other), other / 8, length),
        }
    }

    /// What differs if anything went another way.
    pub fn fingerprint(&self) -> (u64, u64, u64) {
        (self.now, self.next, self.random.state())
    }

    pub fn run(&mut self) -> Checked {
        if self.is_told {
            println!("{:?}", self.settings);
        }
        let mut events = 0;
        while !self.is_over() {
            events += 1;
            check(events < 300_000, || "too many events".into())?;
            let event = self.ahead.keys().next().map(|(at, _)| *at);
            let due = (0..self.hosts.len()).filter_map(|host| Some((self.due(host)?, host))).min();
            match (due, event) {
                (Some((at, host)), event) if event.is_none_or(|event| at < event) => {
                    self.now = at.max(self.now);
                    if self.is_told {
                        println!("{:>12} µs tick of host {host}", self.now);
                    }
                    self.tick_host(host)?;
                    let deadline = self.hosts[host].launcher.as_ref().and_then(Launcher::deadline);
                    let is_later = deadline.is_none_or(|at| at > self.time());
                    check(is_later, || "a deadline stays where it is".into())?;
                }
                (_, Some(_)) => {
                    let ((at, _), event) = self.ahead.pop_first().expect("there is one");
                    self.now = at;
                    self.happen(event)?;
                }
                _ => return Err("nothing is left to happen".into()),
            }
            if let Some(wrong) = self.wrong.take() {
                return Err(wrong);
            }
            check(self.now < self.healed + BOUND, || "no end after the faults are over".into())?;
            self.go_on();
        }
        Ok(())
    }

    /// When the launcher of a machine notices its deadline.
    fn due(&self, host: usize) -> Option<Time> {
        let host = &self.hosts[host];
        let launcher = host.launcher.as_ref().filter(|_| host.is_alive && !host.is_stopped)?;
        let at = launcher.deadline()?.as_nanos().div_ceil(1_000) as Time;
        Some((at + mix(at) % (self.late + 1)).max(self.now))
    }

    fn is_over(&self) -> bool {
        self.is_complete() && self.living.is_empty() && !self.hosts.iter().any(|host| host.is_alive)
    }

    pub fn plan(&mut self, at: Time, event: Event) {
        self.next += 1;
        self.ahead.insert((at, self.next), event);
    }

    fn happen(&mut self, event: Event) -> Checked {
        match event {
            Event::Apply(host) => self.apply_to_join(host),
            Event::Enroll(host, joined, revision) => {
                let (me, record) = *joined;
                self.enroll(host, me, record, revision)?;
            }
            Event::Request(host) => self.serve(host)?,
            Event::Deliver(host, brought) => {
                if self.is_told {
                    println!("{:>12} µs to host {host}: {brought:?}", self.now);
                }
                self.deliver(host, brought)?;
                self.retire(host);
            }
            Event::Dial(link) => self.dial(link),
            Event::Up(link) => self.arrive(link, true),
            Event::Down(link) => self.arrive(link, false),
            Event::Wake(host) => {
                self.wake(host)?;
                self.retire(host);
            }
            Event::Clear(host) => {
                let left = self.of_host(host);
                left.into_iter().for_each(|index| self.end_worker(index, false));
                self.retire(host);
            }
            Event::Start(host, id) => self.start(host, id),
            Event::Listen(index) => self.listen(index)?,
            Event::Act(index) => self.act(index)?,
            Event::Fail(index) => self.fail(index),
            Event::Silence(index, epoch) => self.on_silence(index, epoch),
            Event::Die(index) => self.end_worker(index, false),
            Event::Resume(index) => self.resume_worker(index),
            Event::Fault(fault) => self.strike(fault),
            Event::Calm => self.traps.clear(),
            Event::Heal => self.heal(),
        }
        Ok(())
    }

    /// The launcher of a machine ends when it is not needed any more.
    fn retire(&mut self, host: usize) {
        let Host { is_alive, is_over, is_leaving, .. } = self.hosts[host];
        if is_alive && (is_over || is_leaving) && self.of_host(host).is_empty() {
            let me = self.hosts[host].me.clone().expect("it has joined");
            let is_done = |number: u32| {
                let last = self.processes.iter().rfind(|process| process.id.number == number);
                last.is_some_and(|process| process.is_done)
            };
            if is_over || (me.first..me.first + me.workers).all(is_done) {
                self.end_host(host, false);
            }
        }
    }

    // Faults.

    /// A launcher has come to a point.
    pub fn spring(&mut self, point: &'static str, host: usize) {
        for index in (0..self.traps.len()).rev() {
            if self.traps[index].point != point {
                continue;
            }
            if self.traps[index].after > 0 {
                self.traps[index].after -= 1;
                continue;
            }
            let Trap { delay, mut fault, .. } = self.traps.swap_remove(index);
            match &mut fault {
                Fault::KillLauncher(target)
                | Fault::LoseMachine(target)
                | Fault::StopLauncher(target, _)
                | Fault::Suspend(target, _)
                | Fault::Cut(target, ..)
                | Fault::Isolate(target, ..)
                | Fault::StoreCut(target, _)
                | Fault::Blip(target)
                | Fault::Leave(target) => *target = Target::Host(host),
                _ => {}
            }
            self.plan(self.now + delay, Event::Fault(fault));
        }
    }

    /// Machines that take part.
    fn up(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|host| self.hosts[*host].launcher.is_some()).collect()
    }

    fn host_of(&self, target: Target) -> Option<usize> {
        let up = self.up();
        match target {
            Target::Leader => self.leader(),
            Target::Any(number) if !up.is_empty() => Some(up[number as usize % up.len()]),
            Target::Any(_) => None,
            Target::Host(host) => Some(host).filter(|host| up.contains(host)),
        }
    }

    fn strike(&mut self, fault: Fault) {
        if self.is_told {
            println!("{:>12} µs {fault:?}", self.now);
        }
        match fault {
            Fault::KillLauncher(target) => self.lose(target, false),
            Fault::LoseMachine(target) => self.lose(target, true),
            Fault::StopLauncher(target, length) => {
                if let Some(host) = self.host_of(target) {
                    self.stop_host(host, length);
                }
            }
            Fault::Suspend(target, length) => {
                if let Some(host) = self.host_of(target) {
                    self.stop_host(host, length);
                    let workers = self.of_host(host);
                    workers.into_iter().for_each(|index| self.stop_worker(index, length));
                }
            }
            Fault::KillWorker(number) => {
                if let Some(index) = self.worker(number) {
                    self.tally.count("workers killed");
                    self.end_worker(index, false);
                }
            }
            Fault::StopWorker(number, length) => {
                if let Some(index) = self.worker(number) {
                    self.stop_worker(index, length);
                }
            }
            Fault::Cut(target, other, length) => {
                if let (Some(one), Some(other)) =
                    (self.host_of(target), self.host_of(Target::Any(other)))
                    && one != other
                {
                    if self.up().len() > 2 {
                        self.tally.count("asymmetric partitions");
                    }
                    self.cut(one, other, length);
                }
            }
            Fault::Isolate(target, with_store, length) => {
                let Some(one) = self.host_of(target) else { return };
                if self.up().len() > 2 {
                    self.tally.count("minorities cut off");
                }
                (0..self.hosts.len()).for_each(|other| self.cut(one, other, length));
                if with_store {
                    self.hosts[one].no_store_until = self.now + length;
                }
            }
            Fault::StoreAway(length) => {
                self.tally.count("the store is away");
                self.store.away_until = self.now + length;
            }
            Fault::StoreCut(target, length) => {
                if let Some(host) = self.host_of(target) {
                    self.tally.count("machines without the store");
                    self.hosts[host].no_store_until = self.now + length;
                }
            }
            Fault::Flaky(length) => self.store.flaky_until = self.now + length,
            Fault::Blip(target) => {
                if let Some(host) = self.host_of(target) {
                    self.blip(host);
                }
            }
            Fault::Join(workers) => self.join(workers, 0),
            Fault::Leave(target) => {
                if let Some(host) = self.host_of(target) {
                    self.plan(self.now, Event::Deliver(host, Brought::Leave));
                }
            }
            Fault::LeaveAll => {
                let up = self.up();
                self.join(3, 0);
                for host in up {
                    let at = self.now + 50 * MS + self.random.below(500 * MS);
                    self.plan(at, Event::Deliver(host, Brought::Leave));
                }
            }
            Fault::LoseAll => {
                self.tally.count("all machines lost");
                for host in self.up() {
                    let is_lost = self.random.one_in(2);
                    self.end_host(host, is_lost);
                }
                for _ in 0..2 {
                    let delay = self.random.below(3_000 * MS);
                    self.join(3, delay);
                }
            }
        }
    }

    fn lose(&mut self, target: Target, is_lost: bool) {
        let Some(host) = self.host_of(target) else { return };
        let is_leading = self.hosts[host].is_leading();
        self.tally.count(if is_leading { "leaders killed" } else { "followers killed" });
        self.end_host(host, is_lost);
        if self.random.one_in(2) {
            let delay = self.random.below(2_000 * MS);
            self.join(self.hosts[host].workers, delay);
        }
    }

    fn cut(&mut self, one: usize, other: usize, length: Time) {
        if one != other {
            let until = self.cuts.entry((one.min(other), one.max(other))).or_default();
            *until = (*until).max(self.now + length);
        }
    }

    fn worker(&self, number: u64) -> Option<usize> {
        let count = self.living.len();
        (count > 0).then(|| self.living[number as usize % count])
    }

    fn join(&mut self, workers: u32, delay: Time) {
        self.hosts.push(Host::new(workers));
        self.plan(self.now + delay, Event::Apply(self.hosts.len() - 1));
    }

    /// All faults are over, and there are enough machines.
    fn heal(&mut self) {
        let stays = |host: &&Host| host.is_alive && !host.is_leaving;
        let mut workers: u32 = self.hosts.iter().filter(stays).map(|host| host.workers).sum();
        while workers < (self.settings.least as u32).max(1) {
            self.join(3, 0);
            workers += 3;
        }
    }
}
