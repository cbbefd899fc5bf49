//! When what happens, drawn from a seed.

use std::collections::BTreeMap;
use std::time::Duration;

use super::faults::{Fault, Target, Trap};
use super::hosts::{Brought, Host};
use super::links::Link;
use super::store::Store;
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
    pub traps: Vec<Trap>,
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
}
