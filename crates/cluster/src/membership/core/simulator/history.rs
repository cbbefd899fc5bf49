//! When what happens, drawn from a seed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::super::world::{At, Checked, Job, Process, Sabotage, World, check, mix};
use super::super::{Settings, WorkerId};
use crate::membership::model::Random;

/// In microseconds.
type Time = u64;

const MS: Time = 1_000;
/// Within this time after the last fault the run must end.
const BOUND: Time = 20_000 * MS;

/// One job, and what happens to it.
pub struct History {
    random: Random,
    world: World,
    now: Time,
    ahead: BinaryHeap<Reverse<(Time, u64, Event)>>,
    next: u64,
    plans: Vec<Plan>,
    traps: Vec<Trap>,
    /// The coordinator is paused until then.
    paused_until: Option<Time>,
    backlog: VecDeque<Event>,
    /// When the last fault may happen.
    healed: Time,
    /// Bounds of delays.
    message: Time,
    step: Time,
    kill: Time,
    notice: Time,
    restart: Time,
    build: Time,
    /// By how much the coordinator notices a deadline late.
    late: Time,
    /// After so many probes the coordinator is paused.
    pauses_at_probe: Option<u64>,
    is_rude: bool,
    slow: Option<u32>,
    timeout: Time,
    is_disturbed: bool,
    /// Whether all events are printed: a seed is repeated.
    is_told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Start(WorkerId),
    Hear(WorkerId),
    Listen(WorkerId),
    Act(WorkerId),
    Fail(WorkerId),
    Silence(WorkerId),
    Die(WorkerId),
    Reap(WorkerId),
    Resume(WorkerId),
    /// A worker that leaves and is not started again.
    Leave(u32),
    /// A worker that is to leave in an orderly way, and comes back after a while.
    Depart(u32),
    Fault(Fault, u32),
    Several(u32),
    Suspicion(u32, u32),
    Pause(Time),
    Unpause,
    Heal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    /// For so long.
    Stop(Time),
}

/// A fault that waits for a worker to come to a point in its program.
struct Trap {
    point: u8,
    after: u32,
    delay: Time,
    fault: Fault,
}

/// What is going to happen to a process.
struct Plan {
    id: WorkerId,
    hears: usize,
    last_heard: Time,
    listens: usize,
    last_listened: Time,
    acts: bool,
    fails: bool,
    silence: bool,
    dies: bool,
    reaps: bool,
    stopped: Time,
    point: u8,
    leaves: bool,
    held_until: Time,
}

impl History {
    pub fn new(seed: u64, sabotage: Option<Sabotage>) -> History {
        let mut random = Random::new(seed);
        let workers = random.between(1, 6);
        let extra = if random.one_in(3) { random.between(1, 2) } else { 0 };
        let most = random.between(1, workers + extra);
        let least = random.between(1, workers.min(most));
        let timeout = [400, 1_000, 2_000][random.below(3) as usize] * MS;
        let settings = Settings {
            workers: workers as usize,
            least: least as usize,
            most: most as usize,
            timeout: Duration::from_micros(timeout),
            patience: Duration::from_secs(120),
        };
        let job = Job {
            settings,
            steps: random.between(3, 12),
            buckets: random.between(1, 3) as usize,
            every: random.between(1, 6),
            sabotage,
            is_fair: true,
        };
        let pick = |random: &mut Random, of: [Time; 4]| of[random.below(4) as usize];
        let mut history = History {
            world: World::new(job),
            now: 0,
            ahead: BinaryHeap::new(),
            next: 0,
            plans: Vec::new(),
            traps: Vec::new(),
            paused_until: None,
            backlog: VecDeque::new(),
            healed: 0,
            message: pick(&mut random, [100, MS, 5 * MS, 20 * MS]),
            step: pick(&mut random, [100, MS, 10 * MS, 30 * MS]),
            kill: pick(&mut random, [100, MS, 20 * MS, 100 * MS]),
            restart: pick(&mut random, [100, 10 * MS, 100 * MS, 300 * MS]),
            late: pick(&mut random, [0, 0, 30 * MS, 80 * MS]),
            build: pick(&mut random, [100, 2 * MS, 10 * MS, 100 * MS]),
            notice: pick(&mut random, [100, MS, 20 * MS, 100 * MS]),
            pauses_at_probe: None,
            is_rude: random.one_in(8),
            slow: None,
            timeout,
            is_disturbed: false,
            is_told: std::env::var_os("UNISONO_TEST_SEED").is_some(),
            random,
        };
        history.plan_history(workers as u32, extra as u32);
        history.plan_departures(seed, workers as u32 + extra as u32);
        history
    }

    fn plan_history(&mut self, workers: u32, extra: u32) {
        let job = &self.world.job;
        let window = job.steps * job.buckets as u64 * (self.step + self.message) + 100 * MS;
        for number in 0..workers {
            let at = self.random.below(50 * MS);
            self.plan(at, Event::Start(WorkerId { number, life: 0 }));
        }
        for number in workers..workers + extra {
            let at = self.random.below(window);
            self.world.tally.count("joins");
            self.plan(at, Event::Start(WorkerId { number, life: 0 }));
            if self.random.one_in(2) {
                let at = at + self.random.below(window);
                self.plan(at, Event::Leave(number));
            }
        }
        self.is_disturbed = !self.random.one_in(16);
        let all = u64::from(workers + extra);
        let mut last = 0;
        if !self.is_disturbed {
            self.world.tally.count("undisturbed");
            self.is_rude = false;
        } else {
            let faults = self.random.below(5);
            for _ in 0..faults {
                let at = self.random.below(window);
                let number = self.random.below(all) as u32;
                let event = match self.random.below(10) {
                    0..4 => Event::Fault(Fault::Kill, number),
                    4..7 => Event::Fault(self.stop(), number),
                    7 => Event::Several(number),
                    8 => Event::Suspicion(number, self.random.below(all) as u32),
                    _ => Event::Pause(self.pause_length()),
                };
                if let Event::Pause(length) = event {
                    last += length;
                }
                self.plan(at, event);
            }
            for _ in 0..self.random.below(5) {
                let point = 1 + self.random.below(POINTS) as u8;
                let limit = if self.random.one_in(2) { 2 } else { 12 };
                let after = self.random.below(limit) as u32;
                let delay = if self.random.one_in(2) { 0 } else { self.random.below(10 * MS) };
                let fault = if self.random.one_in(3) { self.stop() } else { Fault::Kill };
                self.traps.push(Trap { point, after, delay, fault });
            }
            if self.random.one_in(4) {
                self.pauses_at_probe = Some(self.random.between(1, 4));
            }
            if self.random.one_in(8) {
                self.slow = Some(self.random.below(all) as u32);
            }
        }
        self.healed = window + 10_000 * MS + last;
        self.plan(self.healed, Event::Heal);
    }

    /// Some workers, or all, are to leave.
    fn plan_departures(&mut self, seed: u64, all: u32) {
        let mut random = Random::new(!seed);
        if !self.is_disturbed || !random.one_in(4) {
            return;
        }
        let window = self.healed - 10_000 * MS;
        let (first, is_common) = (random.below(u64::from(all)) as u32, random.one_in(3));
        let count = if is_common { all } else { random.between(1, u64::from(all)) as u32 };
        for number in first..first + count {
            let at = random.below(window);
            self.plan(at, Event::Depart(number % all));
        }
    }

    fn stop(&mut self) -> Fault {
        Fault::Stop(match self.random.below(4) {
            0 => 5_000 * MS,
            1 => self.random.between(1, 200 * MS),
            2 => self.random.between(1, self.timeout),
            _ => self.random.between(self.timeout, 2 * self.timeout),
        })
    }

    fn pause_length(&mut self) -> Time {
        match self.random.below(8) {
            0 | 1 => self.random.between(MS, 100 * MS),
            2..5 => self.random.between(100 * MS, 1_000 * MS),
            5 | 6 => self.random.between(self.timeout, 3 * self.timeout),
            _ => self.random.between(20_000 * MS, 300_000 * MS),
        }
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    /// What differs if anything went another way.
    pub fn fingerprint(&self) -> (u64, u64, u64) {
        (self.now, self.next, self.random.state())
    }

    pub fn run(&mut self) -> Checked {
        self.go_on()?;
        let mut events = 0;
        while !self.is_over() {
            events += 1;
            check(events < 200_000, || "too many events".into())?;
            let event = self.ahead.peek().map(|Reverse((at, ..))| *at);
            let deadline = self.world.core.deadline().filter(|_| self.paused_until.is_none());
            let late = |at: Time| at + mix(at) % (self.late + 1);
            let deadline = deadline.map(|at| late(at.as_nanos().div_ceil(1_000) as Time));
            let deadline = deadline.map(|at| at.max(self.now));
            match (deadline, event) {
                (Some(at), event) if event.is_none_or(|event| at < event) => {
                    self.set_now(at);
                    self.tick()?;
                }
                (_, Some(_)) => {
                    let Reverse((at, _, event)) = self.ahead.pop().expect("there is one");
                    self.set_now(at);
                    self.happen(event)?;
                }
                _ => return Err("nothing is left to happen".into()),
            }
            check(self.now < self.healed + BOUND, || "no end after the faults are over".into())?;
            self.go_on()?;
        }
        self.check_epochs()
    }

    /// Every epoch beyond the first has a cause.
    fn check_epochs(&self) -> Checked {
        let count = |what| self.world.tally.counts.get(what).copied().unwrap_or(0);
        let starts = self.plans.len() as u64;
        let faults = count("stops")
            + count("departures")
            + count("wrong suspicions")
            + count("orderly ends taken for losses");
        let epochs = count("epochs");
        check(epochs <= 1 + 2 * (starts + faults), || format!("{epochs} epochs, {starts} starts"))
    }

    fn is_over(&self) -> bool {
        self.world.is_over()
    }

    fn set_now(&mut self, now: Time) {
        self.now = now;
        self.world.now = Duration::from_micros(now);
    }

    /// The moment after a worker was asked whether it lives is the worst for a pause.
    fn pause_at_probe(&mut self) {
        let probes = self.world.tally.counts.get("probes").copied().unwrap_or(0);
        if self.pauses_at_probe.is_some_and(|count| count <= probes) && self.now < self.healed {
            self.pauses_at_probe = None;
            let at = self.now + self.random.below(self.message);
            let length = self.random.between(10 * MS, self.timeout + 500 * MS);
            self.plan(at, Event::Pause(length));
        }
    }

    fn tick(&mut self) -> Checked {
        self.world.tick()?;
        let is_later = self.world.core.deadline().is_none_or(|at| at > self.world.now);
        check(is_later, || "a deadline stays where it is".into())
    }

    fn happen(&mut self, event: Event) -> Checked {
        if self.is_told {
            println!("{:>12} µs {event:?}", self.now);
        }
        let of_coordinator = matches!(event, Event::Hear(_) | Event::Reap(_) | Event::Start(_));
        if of_coordinator && self.paused_until.is_some() {
            self.world.tally.count("answers in a pause");
            self.backlog.push_back(event);
            return Ok(());
        }
        match event {
            Event::Start(id) => {
                if self.living(id.number).is_some() {
                    // It was to leave, and has yet to.
                    self.plan(self.now + 10 * MS, event);
                } else if !self.world.is_finished {
                    self.world.start(id);
                    self.plans.push(Plan::new(id));
                }
            }
            Event::Hear(id) => {
                let held_until = self.hold(id);
                if held_until > self.now {
                    self.plan(held_until, event);
                    return Ok(());
                }
                self.plan_of(id).hears -= 1;
                if let Some(index) = self.world.index(id) {
                    self.world.hear(index)?;
                }
            }
            Event::Reap(id) => {
                if let Some(index) = self.world.index(id) {
                    self.world.reap(index)?;
                    self.start_again(id);
                }
            }
            Event::Listen(id) => {
                self.plan_of(id).listens -= 1;
                if let Some(index) =
                    self.world.index(id).filter(|index| self.world.can_listen(*index))
                {
                    self.world.listen(index)?;
                }
            }
            Event::Act(id) => {
                self.plan_of(id).acts = false;
                if let Some(index) = self.world.index(id).filter(|index| self.world.can_act(*index))
                {
                    if self.is_rude && self.random.one_in(4) && self.now < self.healed {
                        self.world.fail_rudely(index)?;
                    }
                    if self.world.can_act(index) {
                        self.world.act(index)?;
                    }
                }
            }
            Event::Fail(id) => {
                self.plan_of(id).fails = false;
                if let Some(index) =
                    self.world.index(id).filter(|index| self.world.can_fail(*index))
                {
                    self.world.fail(index, Vec::new())?;
                }
            }
            Event::Silence(id) => self.on_silence(id)?,
            Event::Die(id) => {
                if let Some(index) = self.world.index(id)
                    && self.world.processes[index].is_alive
                {
                    self.world.end(index);
                }
            }
            Event::Resume(id) => self.on_resume(id),
            Event::Leave(number) => {
                if let Some(index) = self.living(number) {
                    self.world.tally.count("leaving workers");
                    let id = self.world.processes[index].id;
                    self.plan_of(id).leaves = true;
                    self.world.end(index);
                }
            }
            Event::Depart(number) => self.depart(number)?,
            Event::Fault(fault, number) => self.strike(fault, number),
            Event::Several(number) => {
                self.world.tally.count("several at once");
                for other in number..number + 3 {
                    self.strike(Fault::Kill, other % 6);
                }
            }
            Event::Suspicion(number, peer) => {
                if let Some(index) = self.living(number)
                    && !self.world.processes[index].is_stopped
                {
                    self.world.suspect_wrongly(index, peer as usize)?;
                }
            }
            Event::Pause(length) => {
                if self.paused_until.is_none() {
                    self.world.tally.count("coordinator pauses");
                    self.paused_until = Some(self.now + length);
                    self.plan(self.now + length, Event::Unpause);
                }
            }
            Event::Unpause => self.unpause()?,
            Event::Heal => {
                self.traps.clear();
                self.slow = None;
                for index in 0..self.world.processes.len() {
                    let id = self.world.processes[index].id;
                    self.on_resume(id);
                }
            }
        }
        Ok(())
    }

    /// Until when what a dead process has sent is on its way.
    fn hold(&mut self, id: WorkerId) -> Time {
        let is_alive =
            self.world.index(id).is_some_and(|index| self.world.processes[index].is_alive);
        let held = self.plan_of(id).held_until;
        if is_alive || held > 0 || !self.random.one_in(4) {
            return held;
        }
        let until = self.now + self.random.below(500 * MS);
        self.plan_of(id).held_until = until;
        until
    }

    /// The launcher starts a worker that has ended again.
    fn start_again(&mut self, id: WorkerId) {
        let leaves = self.plan_of(id).leaves;
        if !leaves && !self.world.is_finished {
            self.world.tally.count("restarts");
            let at = self.now + self.random.below(self.restart);
            self.plan(at, Event::Start(WorkerId { life: id.life + 1, ..id }));
        }
    }

    fn depart(&mut self, number: u32) -> Checked {
        let Some(index) = self.living(number) else { return Ok(()) };
        let id = self.world.processes[index].id;
        if self.paused_until.is_some() || !self.world.depart(index)? {
            self.plan(self.now + 10 * MS, Event::Depart(number));
            return Ok(());
        }
        self.world.tally.count("departures");
        self.plan_of(id).leaves = true;
        let at = self.now + 10_000 * MS;
        self.plan(at, Event::Start(WorkerId { life: id.life + 1, ..id }));
        Ok(())
    }

    fn on_silence(&mut self, id: WorkerId) -> Checked {
        let Some(index) = self.world.index(id) else { return Ok(()) };
        self.plan_of(id).silence = false;
        let peers = self.world.stopped_peers(index);
        let is_silent = |peer: WorkerId| {
            let plan = self.plans.iter().find(|plan| plan.id == peer).expect("it was started");
            plan.stopped + self.timeout <= self.now
        };
        let silent = peers.iter().filter(|(_, peer)| is_silent(*peer)).map(|(rank, _)| *rank);
        let silent: Vec<usize> = silent.collect();
        if silent.is_empty() { Ok(()) } else { self.world.fail(index, silent) }
    }

    fn on_resume(&mut self, id: WorkerId) {
        if let Some(index) = self.world.index(id)
            && self.world.processes[index].is_stopped
        {
            let is_late = self.plan_of(id).stopped + self.timeout <= self.now;
            self.world.tally.count(match is_late {
                true => "stops that end after the timeout",
                false => "stops that end before the timeout",
            });
            self.world.resume(index);
        }
    }

    fn strike(&mut self, fault: Fault, number: u32) {
        let Some(index) = self.living(number) else { return };
        match fault {
            Fault::Kill => self.world.end(index),
            Fault::Stop(length) => {
                if !self.world.processes[index].is_stopped {
                    self.world.stop(index);
                    let (id, now) = (self.world.processes[index].id, self.now);
                    self.plan_of(id).stopped = now;
                    self.plan(now + length, Event::Resume(id));
                }
            }
        }
    }

    /// The coordinator goes on after a pause, with whatever has come meanwhile; its clock may notice before its
    /// connections.
    fn unpause(&mut self) -> Checked {
        self.paused_until = None;
        let deadline = self.world.core.deadline();
        if deadline.is_some_and(|at| at <= self.world.now) && self.random.one_in(2) {
            self.tick()?;
        }
        while let Some(event) = self.backlog.pop_front() {
            self.happen(event)?;
        }
        Ok(())
    }

    fn living(&self, number: u32) -> Option<usize> {
        let is_it = |process: &Process| process.id.number == number && process.is_alive;
        self.world.processes.iter().position(is_it)
    }

    /// Plans what follows from the state of every process.
    fn go_on(&mut self) -> Checked {
        self.pause_at_probe();
        for index in 0..self.world.processes.len() {
            let process = &self.world.processes[index];
            let (id, at, is_stopped) = (process.id, process.at, process.is_stopped);
            let (hears, listens) = (process.to_coordinator.len(), process.from_coordinator.len());
            let (is_doomed, is_unreaped) = (process.is_doomed, process.is_unreaped);
            let is_alive = process.is_alive;
            let plan = self.plan_index(id);
            while self.plans[plan].hears < hears {
                let at = self.now + self.random.below(self.message);
                let at = at.max(self.plans[plan].last_heard);
                self.plans[plan].last_heard = at;
                self.plans[plan].hears += 1;
                self.plan(at, Event::Hear(id));
            }
            if is_unreaped && !self.plans[plan].reaps {
                self.plans[plan].reaps = true;
                let at = self.now + self.random.below(self.message.min(5 * MS));
                self.plan(at, Event::Reap(id));
            }
            if !is_alive {
                continue;
            }
            if is_doomed && !self.plans[plan].dies {
                self.plans[plan].dies = true;
                let at = self.now + self.random.below(self.kill);
                self.plan(at, Event::Die(id));
            }
            self.spring_traps(plan, id, at);
            if is_stopped {
                continue;
            }
            while self.plans[plan].listens < listens {
                let at = self.now + self.random.below(self.message);
                let at = at.max(self.plans[plan].last_listened);
                self.plans[plan].last_listened = at;
                self.plans[plan].listens += 1;
                self.plan(at, Event::Listen(id));
            }
            if !self.plans[plan].acts && self.world.can_act(index) {
                self.plans[plan].acts = true;
                let at = self.now + self.duration(id, at);
                self.plan(at, Event::Act(id));
            }
            if !self.plans[plan].fails && self.world.can_fail(index) {
                self.plans[plan].fails = true;
                let at = self.now + self.random.below(self.notice);
                self.plan(at, Event::Fail(id));
            }
            if !self.plans[plan].silence && at < At::Handing {
                let peers = self.world.stopped_peers(index);
                let stopped = |peer| self.plans[self.plan_index(peer)].stopped;
                if let Some(since) = peers.iter().map(|(_, peer)| stopped(*peer)).min() {
                    let at = self.now.max(since + self.timeout) + self.random.below(10 * MS);
                    self.plans[plan].silence = true;
                    self.plan(at, Event::Silence(id));
                }
            }
        }
        if self.world.processes.iter().any(|process| process.at == At::Waiting)
            && self.world.core.is_whole()
            && self.world.core.members().len() == self.world.job.settings.most
        {
            self.world.tally.count("spares");
        }
        Ok(())
    }

    fn duration(&mut self, id: WorkerId, at: At) -> Time {
        match at {
            At::Building => self.random.below(self.build),
            At::Bucket { is_in: false, .. }
                if self.slow == Some(id.number) && self.random.one_in(8) =>
            {
                self.world.tally.count("slow steps");
                self.random.below(4 * self.timeout)
            }
            At::Receiving { has_begun: true } => self.random.below(self.step * 3),
            _ => self.random.below(self.step),
        }
    }

    fn spring_traps(&mut self, plan: usize, id: WorkerId, at: At) {
        let point = point(at);
        if std::mem::replace(&mut self.plans[plan].point, point) == point {
            return;
        }
        for index in (0..self.traps.len()).rev() {
            if self.traps[index].point != point {
                continue;
            }
            if self.traps[index].after > 0 {
                self.traps[index].after -= 1;
                continue;
            }
            let trap = self.traps.swap_remove(index);
            self.plan(self.now + trap.delay, Event::Fault(trap.fault, id.number));
        }
    }

    fn plan(&mut self, at: Time, event: Event) {
        self.next += 1;
        self.ahead.push(Reverse((at, self.next, event)));
    }

    fn plan_index(&self, id: WorkerId) -> usize {
        self.plans.iter().rposition(|plan| plan.id == id).expect("it was started")
    }

    fn plan_of(&mut self, id: WorkerId) -> &mut Plan {
        let index = self.plan_index(id);
        &mut self.plans[index]
    }
}

impl Plan {
    fn new(id: WorkerId) -> Plan {
        Plan {
            id,
            hears: 0,
            last_heard: 0,
            listens: 0,
            last_listened: 0,
            acts: false,
            fails: false,
            silence: false,
            dies: false,
            reaps: false,
            stopped: 0,
            point: 0,
            leaves: false,
            held_until: 0,
        }
    }
}

const POINTS: u64 = 12;

/// The points in a worker's program at which a trap can wait, from 1.
fn point(at: At) -> u8 {
    match at {
        At::Building => 1,
        At::Waiting => 2,
        At::Forming => 3,
        At::Sharing { .. } => 4,
        At::Giving => 5,
        At::Receiving { .. } => 6,
        At::Loading => 7,
        At::Bucket { .. } => 8,
        At::Saving { .. } => 9,
        At::Barrier { .. } => 10,
        At::Handing => 11,
        At::Over => 12,
        At::Gone => 13,
    }
}
