//! Time, the network and the faults: the loop over all events.
//!
//! An event happens at a tick and may lead to others at later ones; of two at the same tick the one
//! that was planned first comes first. There is no other source of order, so a run is a function of its
//! [`Scenario`]. For some time faults happen. Then the network *heals*, every process that is not dead for
//! good comes back, and has to finish a number of steps before too many events have passed.

mod faults;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hasher};

use unisono_relaxed::{Clock, Life};

use crate::message::{Ask, Reply, Request, Sender};
use crate::process::{Act, Process};
use crate::random::Random;
use crate::scenario::{Network, Scenario};
use crate::server::{Scene, Server};
use crate::tally::Tally;
use crate::witness::Violation;

/// Steps that every process has to finish after the faults.
const STEPS: u64 = 4;
/// Events that may pass until then: ten times what the longest run needs.
const PATIENCE: u64 = 15_000;
/// After how long a request is sent again.
const RETRY: u64 = 60;
/// How often a worker says that it lives.
const HEARTBEAT: u64 = 25;
/// Events that are shown with a failure; of a history that is repeated, all are.
const SHOWN: usize = 60;

/// Runs a scenario to its end.
pub fn run(scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    World::new(scenario, false).run()
}

/// As [`run`], with a fingerprint of everything that happened.
pub fn run_recorded(scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    World::new(scenario, true).run()
}

pub struct Outcome {
    pub tally: Tally,
    /// Of all events and their order, if that was wanted.
    pub fingerprint: Option<u64>,
    /// By server: for which round each commit was, and whose pushes it contains.
    pub commits: Vec<Vec<(Clock, Vec<u32>)>>,
}

pub struct Failure {
    pub scenario: Scenario,
    pub violation: Violation,
    last_events: Vec<(u64, Event)>,
}

/// What happens. A broken connection is noticed by the worker, as `Lost`, and by the server, as `Closed`.
#[derive(Clone, Copy, Debug)]
enum Event {
    Request { server: usize, request: Request },
    Reply { process: usize, server: usize, reply: Reply },
    Retry { process: usize, server: usize, id: u64 },
    Computed { process: usize },
    Heartbeat { process: usize },
    Lost { process: usize, server: usize, connection: u64 },
    Closed { server: usize, from: Sender, connection: u64 },
    Sweep { server: usize },
    Snapshot { server: usize },
    Start { worker: usize },
    Restart { server: usize },
    Fault,
    Heal,
}

struct World {
    scenario: Scenario,
    random: Random,
    now: u64,
    queue: BinaryHeap<Reverse<Planned>>,
    planned: u64,
    healed: bool,
    servers: Vec<Server>,
    /// All that ever were.
    processes: Vec<Process>,
    conditions: Vec<Condition>,
    workers: Vec<Worker>,
    tally: Tally,
    last_events: VecDeque<(u64, Event)>,
    shown: usize,
    history: Option<DefaultHasher>,
}

/// How the world treats a process.
struct Condition {
    /// It does nothing until then.
    paused_until: u64,
    /// By server: connections up to this one are broken.
    broken: Vec<u64>,
    /// By server: when the last message arrives, there and back; streams keep the order.
    arrivals: Vec<[u64; 2]>,
}

/// One that starts again with every life.
struct Worker {
    lives: Life,
    process: Option<usize>,
    is_dead: bool,
    is_slow: bool,
}

impl World {
    fn new(scenario: Scenario, recorded: bool) -> World {
        let mut random = Random::new(scenario.seed);
        let worker = |_| Worker {
            lives: Life::default(),
            process: None,
            is_dead: false,
            is_slow: random.chance(250),
        };
        let workers = (0..scenario.workers).map(worker).collect();
        World {
            scenario,
            random,
            now: 0,
            queue: BinaryHeap::new(),
            planned: 0,
            healed: false,
            servers: (0..scenario.servers).map(|index| Server::new(index, scenario)).collect(),
            processes: Vec::new(),
            conditions: Vec::new(),
            workers,
            tally: Tally::default(),
            last_events: VecDeque::new(),
            shown: std::env::var_os("UNISONO_TEST_SEED").map_or(SHOWN, |_| usize::MAX),
            history: recorded.then(DefaultHasher::new),
        }
    }

    fn run(mut self) -> Result<Outcome, Box<Failure>> {
        match self.events() {
            Ok(()) => Ok(Outcome {
                tally: self.tally,
                fingerprint: self.history.map(|hasher| hasher.finish()),
                commits: self.servers.into_iter().map(|server| server.witness.commits).collect(),
            }),
            Err(violation) => Err(Box::new(Failure {
                scenario: self.scenario,
                violation,
                last_events: self.last_events.into(),
            })),
        }
    }

    fn events(&mut self) -> Result<(), Violation> {
        for worker in 0..self.workers.len() {
            let delay = self.random.between(0, 30);
            self.plan(delay, Event::Start { worker });
        }
        for server in 0..self.servers.len() {
            self.plan(self.sweep_after(), Event::Sweep { server });
        }
        if self.scenario.faults > 0 {
            self.plan(1, Event::Fault);
            for server in 0..self.servers.len() {
                self.plan(50, Event::Snapshot { server });
            }
        }
        self.plan(self.scenario.faults, Event::Heal);
        let mut since_healed = 0;
        while !self.is_finished() {
            let Reverse(planned) = self.queue.pop().expect("servers are swept for ever");
            self.now = planned.time;
            self.note(planned.event);
            self.happen(planned.event)?;
            self.tally.events += 1;
            since_healed += u64::from(self.healed);
            if since_healed > PATIENCE {
                return Err(self.describe_standstill());
            }
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Request { server, request } => {
                if request.connection > self.conditions[request.from.process].broken[server]
                    && self.servers[server].is_up
                {
                    self.at_server(server, |server, scene| server.receive(request, scene))?;
                } else {
                    self.tally.lost += 1;
                }
            }
            Event::Reply { process, server, reply } => {
                if reply.connection > self.conditions[process].broken[server] {
                    self.at_process(process, event, |process, acts| {
                        process.receive(server, reply, acts);
                    })?;
                } else {
                    self.tally.lost += 1;
                }
            }
            Event::Retry { process, server, id } => {
                self.at_process(process, event, |process, acts| process.retry(server, id, acts))?;
            }
            Event::Computed { process } => {
                self.at_process(process, event, |process, acts| process.computed(acts))?;
            }
            Event::Heartbeat { process } => self.heartbeat(process),
            Event::Lost { process, server, connection } => {
                self.at_process(process, event, |process, acts| {
                    process.reconnect(server, connection, acts);
                })?;
            }
            Event::Closed { server, from, connection } => {
                self.at_server(server, |server, scene| server.lose(from, connection, scene))?;
            }
            Event::Sweep { server } => {
                self.plan(self.sweep_after(), event);
                if self.servers[server].is_up {
                    self.at_server(server, Server::sweep)?;
                }
            }
            Event::Snapshot { server } => {
                if self.servers[server].is_up {
                    self.servers[server].snapshot();
                    self.tally.snapshots += 1;
                }
                let pause = self.random.between(10, 150);
                self.plan(pause, event);
            }
            Event::Start { worker } => self.start(worker)?,
            Event::Restart { server } => self.servers[server].restart(self.now, &mut self.tally)?,
            Event::Fault => self.fault(),
            Event::Heal => self.heal(),
        }
        Ok(())
    }

    /// Something happens at a server, which answers.
    fn at_server(
        &mut self,
        index: usize,
        act: impl FnOnce(&mut Server, &mut Scene) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let mut replies = Vec::new();
        let mut scene = Scene {
            now: self.now,
            processes: &self.processes,
            replies: &mut replies,
            tally: &mut self.tally,
        };
        act(&mut self.servers[index], &mut scene)?;
        for (process, reply) in replies {
            let event = Event::Reply { process, server: index, reply };
            self.transmit(process, index, Direction::Back, event);
        }
        Ok(())
    }

    /// Something happens at a process, now or when it wakes up.
    fn at_process(
        &mut self,
        index: usize,
        event: Event,
        act: impl FnOnce(&mut Process, &mut Vec<Act>),
    ) -> Result<(), Violation> {
        if self.processes[index].is_over() {
            return Ok(());
        }
        let paused_until = self.conditions[index].paused_until;
        if paused_until > self.now {
            self.plan(paused_until - self.now, event);
            return Ok(());
        }
        let mut acts = Vec::new();
        act(&mut self.processes[index], &mut acts);
        for act in acts {
            self.perform(index, act)?;
        }
        Ok(())
    }

    fn perform(&mut self, process: usize, act: Act) -> Result<(), Violation> {
        match act {
            Act::Send { server, request } => {
                self.send(server, request);
                self.plan(RETRY, Event::Retry { process, server, id: request.id });
            }
            Act::Compute => {
                let is_slow = self.workers[self.processes[process].me.worker as usize].is_slow;
                let (least, most) = if is_slow { (40, 80) } else { (5, 15) };
                let duration = self.random.between(least, most);
                self.plan(duration, Event::Computed { process });
            }
            Act::Acknowledged { server, push, by_joining } => {
                self.tally.known_by_joining += u64::from(by_joining);
                self.servers[server].witness.acknowledge(&push)?;
            }
            Act::Gap { server, expected } => {
                let me = self.processes[process].me;
                return Err(format!(
                    "server {server} asks {me:?} for push {expected}, long settled"
                ));
            }
            Act::Superseded => self.tally.superseded += 1,
            Act::Done => {
                for server in 0..self.servers.len() {
                    let request = self.processes[process].request(server, Ask::Leave);
                    self.send(server, request);
                }
            }
        }
        Ok(())
    }

    fn heartbeat(&mut self, process: usize) {
        if self.processes[process].is_over() {
            return;
        }
        self.plan(HEARTBEAT, Event::Heartbeat { process });
        if self.conditions[process].paused_until <= self.now {
            for server in 0..self.servers.len() {
                let request = self.processes[process].request(server, Ask::Alive);
                self.send(server, request);
            }
        }
    }

    fn send(&mut self, server: usize, request: Request) {
        let event = Event::Request { server, request };
        self.transmit(request.from.process, server, Direction::There, event);
    }

    /// Lets a message arrive: later, out of order, twice, or not at all.
    fn transmit(&mut self, process: usize, server: usize, direction: Direction, event: Event) {
        let is_late = !self.healed && self.random.chance(30);
        let delay = if is_late { self.random.between(8, 120) } else { self.random.between(1, 8) };
        if self.scenario.network == Network::Streams {
            let last = &mut self.conditions[process].arrivals[server][direction as usize];
            *last = (self.now + delay).max(*last);
            let delay = *last - self.now;
            self.plan(delay, event);
        } else if !self.healed && self.random.chance(50) {
            self.tally.lost += 1;
        } else {
            self.plan(delay, event);
            if !self.healed && self.random.chance(100) {
                self.tally.doubled += 1;
                let delay = self.random.between(1, 120);
                self.plan(delay, event);
            }
        }
    }

    fn start(&mut self, worker: usize) -> Result<(), Violation> {
        let servers = self.servers.len();
        let process = self.processes.len();
        let slot = &mut self.workers[worker];
        slot.lives = slot.lives.next();
        slot.process = Some(process);
        let me = Sender { process, worker: worker as u32, life: slot.lives };
        let mut new = Process::new(me, servers, self.scenario.sabotage);
        new.goal = self.healed.then_some(STEPS);
        self.processes.push(new);
        self.conditions.push(Condition {
            paused_until: 0,
            broken: vec![0; servers],
            arrivals: vec![[0; 2]; servers],
        });
        self.plan(HEARTBEAT, Event::Heartbeat { process });
        self.at_process(process, Event::Start { worker }, Process::go_on)
    }

    /// Whether every process that can has done all steps.
    fn is_finished(&self) -> bool {
        self.healed
            && self.workers.iter().all(|worker| worker.is_dead || worker.process.is_some())
            && self.processes.iter().all(Process::is_over)
    }

    fn plan(&mut self, delay: u64, event: Event) {
        self.planned += 1;
        let planned = Planned { time: self.now + delay, order: self.planned, event };
        self.queue.push(Reverse(planned));
    }

    fn sweep_after(&self) -> u64 {
        Scenario::TIMEOUT / 4
    }

    fn note(&mut self, event: Event) {
        if self.last_events.len() == self.shown {
            self.last_events.pop_front();
        }
        self.last_events.push_back((self.now, event));
        if let Some(history) = &mut self.history {
            history.write(format!("{} {event:?}", self.now).as_bytes());
        }
    }

    fn describe_standstill(&self) -> Violation {
        let mut text = format!("no end {PATIENCE} events after the last fault");
        for process in self.processes.iter().filter(|process| !process.is_over()) {
            let Process { me, steps, goal, stage, .. } = process;
            let clock = process.clock();
            text += &format!("\n  {me:?} at clock {clock}, {steps} steps of {goal:?}, {stage:?}");
        }
        text
    }
}

#[derive(Clone, Copy)]
enum Direction {
    There = 0,
    Back = 1,
}

/// Ordered by time, then by when it was planned.
struct Planned {
    time: u64,
    order: u64,
    event: Event,
}

impl Ord for Planned {
    fn cmp(&self, other: &Planned) -> std::cmp::Ordering {
        (self.time, self.order).cmp(&(other.time, other.order))
    }
}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Planned) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Planned {
    fn eq(&self, other: &Planned) -> bool {
        self.order == other.order
    }
}

impl Eq for Planned {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.violation)?;
        writeln!(f, "repeat with UNISONO_TEST_SEED={}: {:?}", self.scenario.seed, self.scenario)?;
        writeln!(f, "the last events:")?;
        for (time, event) in &self.last_events {
            writeln!(f, "{time:6} {event:?}")?;
        }
        Ok(())
    }
}
