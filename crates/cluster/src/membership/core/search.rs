//! Every order of events in small jobs: a search through all states that three workers, their coordinator and
//! the launcher can come to together, with faults at every point.
//!
//! Nothing that [the witness](super::world) forbids may happen in any of them, and from each every way to go on
//! without further faults must lead to the end of the run. Time passes when nothing else can happen; earlier only as a fault. What a
//! worker does unseen by all others is not interleaved with what they do.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use super::world::{Job, Process, Sabotage, World, mix};
use super::{Settings, WorkerId};

#[test]
fn one_fault_of_any_kind_from_the_start() {
    Search::of(Bounds { faults: 1, ..Bounds::default() }).run();
}

#[test]
fn two_kills_or_joins() {
    Search::of(Bounds { has_begun: true, stops: false, hurries: false, ..Bounds::default() }).run();
}

#[test]
fn two_kills_or_stops() {
    Search::of(Bounds { joiners: 0, resumes: false, ..two_stops() }).run();
}

#[test]
fn a_worker_that_all_wait_for_is_started_again() {
    Search::of(Bounds { faults: 1, ..restarts() }).run();
}

#[test]
#[ignore = "soak: some minutes, and some gigabytes of memory; its last result is in docs/measurements/elastic.md"]
fn two_faults_with_stops_that_may_end_at_any_time() {
    Search::of(two_stops()).run();
}

#[test]
#[ignore = "soak: some minutes, and some gigabytes of memory; its last result is in docs/measurements/elastic.md"]
fn two_workers_that_all_wait_for_are_started_again() {
    Search::of(restarts()).run();
}

fn two_stops() -> Bounds {
    Bounds { has_begun: true, hurries: false, ..Bounds::default() }
}

fn restarts() -> Bounds {
    let bounds = Bounds { joiners: 0, least: 3, stops: false, hurries: false, ..Bounds::default() };
    Bounds { restarts: true, has_begun: true, ..bounds }
}

#[test]
fn what_is_done_wrong_is_found() {
    let kills = Bounds { stops: false, ..two_stops() };
    let stops = Bounds { kills: false, faults: 1, ..two_stops() };
    for (sabotage, bounds, expected) in [
        (Sabotage::WaitForNone, kills, "begins while"),
        (Sabotage::SpareTheSilent, stops, "begins while"),
        (Sabotage::KillWithoutWaiting, stops, "begins while"),
        (Sabotage::CommitEarly, kills, "wrong weights"),
        (Sabotage::OldDonor, kills, "is handed an older state"),
        (Sabotage::HalfReceived, kills, "wrong weights"),
        (Sabotage::OldFinish, kills, "the result of an old epoch counts"),
        (Sabotage::NoVote, kills, "fails without a fault"),
    ] {
        let mut search = Search::of(Bounds { sabotage: Some(sabotage), ..bounds });
        let (wrong, path) = search.explore().expect_err("it is done wrong");
        println!(
            "{sabotage:?}: {wrong} after {} events, {} states",
            path.len(),
            search.known.len()
        );
        assert!(wrong.contains(expected), "{sabotage:?}: {wrong}");
    }
}

/// What can happen at most.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    workers: u32,
    /// Workers that may join.
    joiners: u32,
    least: usize,
    steps: u64,
    buckets: usize,
    faults: u32,
    kills: bool,
    stops: bool,
    /// Whether stopped workers may be continued at any time.
    resumes: bool,
    /// Whether time may pass, as a fault, although something else can happen.
    hurries: bool,
    /// Whether workers that have died are started again.
    restarts: bool,
    /// Whether the first epoch has begun without faults.
    has_begun: bool,
    sabotage: Option<Sabotage>,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            workers: 3,
            joiners: 1,
            least: 1,
            steps: 2,
            buckets: 2,
            faults: 2,
            kills: true,
            stops: true,
            resumes: true,
            hurries: true,
            restarts: false,
            has_begun: false,
            sabotage: None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Hear(usize),
    Listen(usize),
    Act(usize),
    Fail(usize),
    Silence(usize),
    Die(usize),
    Reap(usize),
    Restart(WorkerId),
    Tick,
    // Faults.
    Kill(usize),
    Stop(usize),
    Join(u32),
    Hurry,
    /// The end of a stop: no fault, and nothing to rely on.
    Resume(usize),
}

#[derive(Clone)]
struct Node {
    world: World,
    faults: u32,
    /// The next life of every number.
    lives: Vec<u32>,
}

/// A state on the path that is being followed.
struct Visit {
    node: Option<Node>,
    number: u32,
    /// What is left to try.
    actions: Vec<Action>,
    /// What led to it.
    by: Option<Action>,
}

struct Search {
    bounds: Bounds,
    known: HashMap<u64, u32, BuildHasherDefault<Plain>>,
    /// From one state to another without a fault.
    edges: Vec<(u32, u32)>,
    ends: Vec<u32>,
    transitions: u64,
}

impl Search {
    fn of(bounds: Bounds) -> Search {
        let known = HashMap::default();
        Search { bounds, known, edges: Vec::new(), ends: Vec::new(), transitions: 0 }
    }

    fn run(mut self) {
        let began = std::time::Instant::now();
        if let Err((wrong, path)) = self.explore() {
            panic!("{wrong}, after {path:#?}");
        }
        let endless = self.endless();
        let (states, transitions) = (self.known.len(), self.transitions);
        println!(
            "{:?}: {states} states, {transitions} transitions, {:?}",
            self.bounds,
            began.elapsed()
        );
        assert_eq!(endless, 0, "states from which the run need not end");
    }

    /// Visits all states, depth first.
    fn explore(&mut self) -> Result<(), (String, Vec<Action>)> {
        let first = self.first();
        self.known.insert(first.fingerprint(), 0);
        let actions = first.actions(&self.bounds);
        let mut path = vec![Visit { node: Some(first), number: 0, actions, by: None }];
        while let Some(Visit { node, number, actions, .. }) = path.last_mut() {
            let Some(action) = actions.pop() else {
                path.pop();
                continue;
            };
            let from = *number;
            // What nothing is left to try from is not needed any more.
            let next = if actions.is_empty() { node.take() } else { node.clone() };
            let mut next = next.expect("something was left to try");
            self.transitions += 1;
            if let Err(wrong) = next.apply(action) {
                let taken = path.iter().filter_map(|visit| visit.by).chain([action]);
                return Err((wrong, taken.collect()));
            }
            let count = self.known.len() as u32;
            let to = *self.known.entry(next.fingerprint()).or_insert(count);
            if !action.is_fault() {
                self.edges.push((from, to));
            }
            if to == count {
                let actions = next.actions(&self.bounds);
                if next.world.is_over() {
                    self.ends.push(to);
                }
                path.push(Visit { node: Some(next), number: to, actions, by: Some(action) });
            }
        }
        Ok(())
    }

    fn first(&self) -> Node {
        let Bounds { workers, joiners, least, steps, buckets, sabotage, .. } = self.bounds;
        let settings = Settings {
            workers: workers as usize,
            least,
            most: (workers + joiners) as usize,
            timeout: Duration::from_millis(600),
            patience: Duration::from_secs(6),
        };
        let job = Job { settings, steps, buckets, every: 1, sabotage, is_fair: false };
        let mut world = World::new(job);
        world.tally.is_off = true;
        (0..workers).for_each(|number| world.start(WorkerId { number, life: 0 }));
        let lives = (0..workers + joiners).map(|number| u32::from(number < workers)).collect();
        let mut node = Node { world, faults: 0, lives };
        while self.bounds.has_begun && node.world.core.epoch() == 0 {
            let actions = node.actions(&Bounds { faults: 0, ..self.bounds });
            node.apply(actions[0]).expect("nothing is wrong yet");
        }
        node
    }

    /// From how many states a run without further faults may go on without end, or stand still.
    fn endless(&self) -> usize {
        let states = self.known.len();
        let mut starts = vec![0u32; states + 1];
        // How many ways lead on from a state that are not known to lead to an end.
        let mut open = vec![0u32; states];
        for (from, to) in &self.edges {
            starts[*to as usize + 1] += 1;
            open[*from as usize] += 1;
        }
        (0..states).for_each(|state| starts[state + 1] += starts[state]);
        let mut place = starts.clone();
        let mut before = vec![0u32; self.edges.len()];
        for (from, to) in &self.edges {
            before[place[*to as usize] as usize] = *from;
            place[*to as usize] += 1;
        }
        let (mut ahead, mut ending) = (self.ends.clone(), 0);
        while let Some(state) = ahead.pop() {
            ending += 1;
            let state = state as usize;
            for from in &before[starts[state] as usize..starts[state + 1] as usize] {
                open[*from as usize] -= 1;
                if open[*from as usize] == 0 {
                    ahead.push(*from);
                }
            }
        }
        states - ending
    }
}

impl Node {
    fn actions(&self, bounds: &Bounds) -> Vec<Action> {
        let world = &self.world;
        if world.is_over() {
            return Vec::new();
        }
        let processes = || world.processes.iter().enumerate();
        let mut actions = Vec::new();
        for (index, process) in processes() {
            let mut add = |can: bool, action: Action| {
                if can {
                    actions.push(action);
                }
            };
            add(!process.to_coordinator.is_empty(), Action::Hear(index));
            add(world.can_listen(index), Action::Listen(index));
            add(world.can_act(index), Action::Act(index));
            add(world.can_fail(index), Action::Fail(index));
            add(!world.stopped_peers(index).is_empty(), Action::Silence(index));
            add(process.is_alive && process.is_doomed, Action::Die(index));
            add(process.is_unreaped, Action::Reap(index));
        }
        if bounds.restarts && !world.is_finished {
            for (number, life) in self.lives.iter().enumerate().filter(|(_, life)| **life > 0) {
                let number = number as u32;
                let is_alive = |process: &Process| process.id.number == number && process.is_alive;
                if !world.processes.iter().any(is_alive) {
                    actions.push(Action::Restart(WorkerId { number, life: *life }));
                }
            }
        }
        let is_quiet = actions.is_empty();
        let has_deadline = world.core.deadline().is_some();
        if is_quiet && has_deadline {
            actions.push(Action::Tick);
        }
        if bounds.resumes {
            let stopped = processes().filter(|(_, process)| process.is_stopped);
            actions.extend(stopped.map(|(index, _)| Action::Resume(index)));
        }
        if self.faults < bounds.faults {
            for (index, process) in processes().filter(|(_, process)| process.is_alive) {
                if bounds.kills {
                    actions.push(Action::Kill(index));
                }
                if bounds.stops && !process.is_stopped {
                    actions.push(Action::Stop(index));
                }
            }
            let joiner = self.lives.iter().position(|life| *life == 0);
            if let Some(joiner) = joiner.filter(|_| !world.is_finished) {
                actions.push(Action::Join(joiner as u32));
            }
            if bounds.hurries && !is_quiet && has_deadline {
                actions.push(Action::Hurry);
            }
        }
        actions
    }

    fn apply(&mut self, action: Action) -> Result<(), String> {
        self.apply_one(action)?;
        let unseen =
            |world: &World| (0..world.processes.len()).find(|index| world.acts_unseen(*index));
        while let Some(index) = unseen(&self.world) {
            self.world.act(index)?;
        }
        Ok(())
    }

    fn apply_one(&mut self, action: Action) -> Result<(), String> {
        self.faults += u32::from(action.is_fault() && !matches!(action, Action::Resume(_)));
        let world = &mut self.world;
        match action {
            Action::Hear(index) => world.hear(index),
            Action::Listen(index) => world.listen(index),
            Action::Act(index) => world.act(index),
            Action::Fail(index) => world.fail(index, Vec::new()),
            Action::Silence(index) => {
                let silent = world.stopped_peers(index);
                world.fail(index, silent.into_iter().map(|(rank, _)| rank).collect())
            }
            Action::Die(index) | Action::Kill(index) => {
                world.end(index);
                Ok(())
            }
            Action::Reap(index) => world.reap(index),
            Action::Stop(index) => {
                world.stop(index);
                Ok(())
            }
            Action::Resume(index) => {
                world.resume(index);
                Ok(())
            }
            Action::Restart(WorkerId { number, .. }) | Action::Join(number) => {
                let life = self.lives[number as usize];
                self.lives[number as usize] += 1;
                world.start(WorkerId { number, life });
                Ok(())
            }
            Action::Tick | Action::Hurry => {
                world.now = world.core.deadline().expect("there is one").max(world.now);
                world.tick()
            }
        }
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = Mixer(u64::from(self.faults));
        self.world.fingerprint(&mut hasher);
        self.lives.iter().for_each(|life| hasher.write_u32(*life));
        hasher.finish()
    }
}

impl Action {
    fn is_fault(self) -> bool {
        use Action::*;
        matches!(self, Kill(_) | Stop(_) | Join(_) | Hurry | Resume(_))
    }
}

/// Quick, and spreads well enough for some ten million states.
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        mix(self.0)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0.rotate_left(5) ^ value);
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }
}

/// Of keys that are hashes already.
#[derive(Default)]
struct Plain(u64);

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}
