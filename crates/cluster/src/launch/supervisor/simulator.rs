//! Jobs of one to three nodes, in which processes end as chance has it, and people, pipes and
//! connections interfere. A seed is a job; every seed must end, with no process left behind, all
//! restarts counted, and the outcome that follows from what happened first.

use std::collections::BTreeMap;
use std::io;
use std::ops::AddAssign;

use super::*;

const SEEDS: u64 = 20_000;

#[test]
fn every_job_ends_as_its_first_failure_says_and_leaves_no_process() {
    let mut tally = Tally::default();
    for seed in 0..SEEDS {
        World::new(seed).run(&mut tally);
    }
    // What never happened was not tried.
    let Tally { restarts, unstarted, cut, kills, killers, at_ends, outcomes } = &tally;
    for count in [restarts, unstarted, cut, kills, killers, at_ends] {
        assert!(*count > 100, "{tally:?}");
    }
    for outcome in ["Success", "Failed", "Interrupted", "NodeLost", "ServerFailed", "OutputLost"] {
        assert!(outcomes.get(outcome).is_some_and(|count| *count > 100), "{outcome}: {tally:?}");
    }
}

/// What happened in all jobs together.
#[derive(Debug, Default)]
struct Tally {
    /// Members that were started again, and those that could not be.
    restarts: u32,
    unstarted: u32,
    /// Pauses that a verdict cut short.
    cut: u32,
    /// Jobs whose members had to be killed.
    kills: u32,
    /// Outcomes that name a member that a signal killed, though another had exited before it.
    killers: u32,
    at_ends: u32,
    outcomes: BTreeMap<&'static str, u32>,
}

struct World {
    seed: u64,
    random: Random,
    now: Duration,
    /// What is going to happen, in order.
    ahead: BTreeMap<(Duration, u64), Happening>,
    next: u64,
    nodes: Vec<Node>,
    /// When the last message on its way from one node to another arrives.
    arrivals: BTreeMap<(u32, u32), Duration>,
    cut_links: Vec<u32>,
    /// Whether anything happens beside the ends of processes.
    is_disturbed: bool,
}

enum Happening {
    Event {
        node: usize,
        event: Event,
    },
    /// A process ends by itself, if it has not ended before.
    End {
        node: usize,
        member: Member,
        life: u32,
        ending: Ending,
    },
}

/// One launcher, and the processes it has.
struct Node {
    supervisor: Supervisor,
    processes: Vec<Process>,
    witness: Witness,
    outcome: Option<Outcome>,
}

struct Process {
    member: Member,
    life: u32,
    runs: bool,
    obeys: bool,
    last: Option<Ending>,
}

/// What a launcher saw, as far as the outcome must follow from it.
#[derive(Default)]
struct Witness {
    /// Members that failed and are not started again.
    failures: Vec<(Duration, Member, Ending)>,
    /// The first thing that went wrong beside these.
    other: Option<(Duration, Outcome)>,
    /// Whether output was lost when all else had ended well.
    lost: Option<Outcome>,
    finished: Vec<u32>,
    /// Members that wait for their next life.
    pausing: Vec<Member>,
    spent: u32,
    told_to_end: bool,
    failed: bool,
    at_end: (bool, bool),
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random(seed);
        let nodes = [1, 1, 2, 3][random.below(4) as usize];
        let servers = if nodes == 1 { random.below(3) as u32 } else { 0 };
        let grace = [0, 100, 5_000, u64::MAX][random.below(4) as usize];
        let restarts = Restarts { limit: random.below(5) as u32 };
        let mut first_rank = 0;
        let mut world = World {
            seed,
            now: Duration::ZERO,
            ahead: BTreeMap::new(),
            next: 0,
            nodes: Vec::new(),
            arrivals: BTreeMap::new(),
            cut_links: Vec::new(),
            is_disturbed: false,
            random,
        };
        for node in 0..nodes {
            let ranks = 1 + world.random.below(4) as u32;
            let settings = Settings {
                least: None,
                node,
                nodes,
                first_rank,
                ranks,
                servers,
                grace: if grace == u64::MAX { Duration::MAX } else { ms(grace) },
                restarts,
                at_end: node == 0 && world.random.one_in(2),
            };
            first_rank += ranks;
            let supervisor = Supervisor::new(settings);
            let members: Vec<Member> = supervisor.slots.iter().map(|slot| slot.member).collect();
            let process = |member| Process { member, life: 0, runs: true, obeys: true, last: None };
            let processes = members.iter().copied().map(process).collect();
            let witness = Witness::default();
            world.nodes.push(Node { supervisor, processes, witness, outcome: None });
            members.into_iter().for_each(|member| world.live(node as usize, member, grace));
        }
        world.disturb();
        world
    }

    /// Decides how a life goes that has just begun.
    fn live(&mut self, node: usize, member: Member, grace: u64) {
        // One that does not obey needs a deadline.
        let obeys = grace == u64::MAX || !self.random.one_in(4);
        let process = self.process(node, member);
        process.obeys = obeys;
        let life = process.life;
        if matches!(member, Member::Server(_)) && !self.random.one_in(4) {
            return;
        }
        let ending = match self.random.below(20) {
            0..14 => Ending::Code(0),
            14 | 15 => Ending::Code(1),
            16 => Ending::Code(2),
            17 | 18 => Ending::Signal(9),
            _ => Ending::Signal(11),
        };
        // Some end within moments of each other.
        let spread = [30, 1_500, 3_000][self.random.below(3) as usize];
        let at = self.now + ms(self.random.below(spread));
        self.plan(at, Happening::End { node, member, life, ending });
    }

    fn disturb(&mut self) {
        let nodes = self.nodes.len() as u64;
        while self.random.one_in(3) {
            let node = self.random.below(nodes) as usize;
            let at = ms(self.random.below(3_000));
            let event = match self.random.below(6) {
                0 | 1 => Event::Signal(SIGINT),
                2 => Event::Signal(SIGTERM),
                3 => Event::OutputLost(io::ErrorKind::BrokenPipe.into()),
                4 => Event::OutputLost(io::ErrorKind::StorageFull.into()),
                _ if node > 0 => {
                    self.cut_links.push(node as u32);
                    self.plan(at, event(0, Event::Closed { node: node as u32 }));
                    Event::Closed { node: 0 }
                }
                _ => Event::GuardEnded(0),
            };
            self.is_disturbed = true;
            self.plan(at, Happening::Event { node, event });
        }
    }

    fn run(mut self, tally: &mut Tally) {
        let mut steps = 0;
        while self.nodes.iter().any(|node| node.outcome.is_none()) {
            steps += 1;
            assert!(steps < 10_000, "seed {} never ends", self.seed);
            let deadlines = self.nodes.iter().enumerate().filter_map(|(index, node)| {
                let at = node.supervisor.deadline().filter(|_| node.outcome.is_none());
                Some((at?.max(self.now), index))
            });
            let deadline = deadlines.min();
            let event = self.ahead.first_key_value().map(|((at, _), _)| *at);
            let (node, decisions) = match (deadline, event) {
                (Some((at, node)), event) if event.is_none_or(|event| at < event) => {
                    self.now = at;
                    (node, self.nodes[node].supervisor.tick(at))
                }
                (_, Some(_)) => match self.happen() {
                    Some(happened) => happened,
                    None => continue,
                },
                _ => panic!("seed {}: nothing is left to happen", self.seed),
            };
            self.carry_out(node, decisions, tally);
            self.end(node, tally);
        }
        if !self.is_disturbed {
            let success = |node: &Node| node.outcome == Some(Outcome::Success);
            let first = success(&self.nodes[0]);
            assert!(self.nodes.iter().all(|node| success(node) == first), "seed {}", self.seed);
        }
    }

    /// Lets the next thing happen: where, and what was decided.
    fn happen(&mut self) -> Option<(usize, Vec<Decision>)> {
        let ((at, _), happening) = self.ahead.pop_first().expect("there is one");
        self.now = at;
        let (node, event) = match happening {
            Happening::Event { node, event } => (node, event),
            Happening::End { node, member, life, ending } => {
                let process = self.process(node, member);
                if !process.runs || process.life != life {
                    return None;
                }
                (process.runs, process.last) = (false, Some(ending));
                (node, Event::Ended { member, ending })
            }
        };
        let of = &mut self.nodes[node];
        if of.outcome.is_some() {
            return None;
        }
        of.witness.see(at, &event);
        let failed = match event {
            Event::Ended { member, ending } if !ending.is_success() => Some((member, ending)),
            _ => None,
        };
        let decisions = of.supervisor.handle(at, event);
        let restarts = |decision: &Decision| matches!(decision, Decision::Clear { .. });
        if let Some((member, ending)) = failed
            && !of.witness.told_to_end
            && !decisions.iter().any(restarts)
        {
            of.witness.failures.push((at, member, ending));
        }
        Some((node, decisions))
    }

    fn carry_out(&mut self, node: usize, decisions: Vec<Decision>, tally: &mut Tally) {
        let seed = self.seed;
        for decision in decisions {
            match decision {
                Decision::Clear { member, restart, limit, .. } => {
                    let witness = &mut self.nodes[node].witness;
                    witness.spent += 1;
                    assert_eq!(witness.spent, restart, "seed {seed}");
                    assert!(restart <= limit, "seed {seed}");
                    witness.pausing.push(member);
                }
                Decision::Start { member, life } => self.start(node, member, life, tally),
                Decision::Gone { .. } | Decision::LeaveOut { .. } => {}
                Decision::Tell(message) => self.tell(node, &message),
                Decision::BeginAtEnd => {
                    tally.at_ends += 1;
                    assert!(!self.nodes[node].witness.at_end.0, "seed {seed}: begun twice");
                    self.nodes[node].witness.at_end.0 = true;
                    let at = self.now + ms(self.random.below(500));
                    self.plan(at, event(node, Event::AtEndDone));
                }
                Decision::Hear { member, ending } => {
                    let stderr = vec![format!("{member:?}")];
                    let event = Event::LastWords { member, ending, stderr };
                    let decisions = self.nodes[node].supervisor.handle(self.now, event);
                    self.carry_out(node, decisions, tally);
                }
                Decision::Fail(outcome) => {
                    let witness = &mut self.nodes[node].witness;
                    assert!(!witness.failed && !witness.told_to_end, "seed {seed}: failed twice");
                    witness.failed = true;
                    self.tell(node, &Message::Over(outcome));
                }
                Decision::TellToEnd { .. } => {
                    let witness = &mut self.nodes[node].witness;
                    assert!(!witness.told_to_end, "seed {seed}: told twice");
                    witness.told_to_end = true;
                    tally.cut += witness.pausing.drain(..).count() as u32;
                    self.end_processes(node);
                }
                Decision::Kill => {
                    assert!(self.nodes[node].witness.told_to_end, "seed {seed}: not told before");
                    tally.kills += 1;
                    for index in 0..self.nodes[node].processes.len() {
                        let Process { member, life, .. } = self.nodes[node].processes[index];
                        let ending = Ending::Signal(9);
                        self.plan(self.now, Happening::End { node, member, life, ending });
                    }
                }
            }
        }
    }

    fn start(&mut self, node: usize, member: Member, life: u32, tally: &mut Tally) {
        let seed = self.seed;
        let Node { processes, witness, supervisor, .. } = &mut self.nodes[node];
        let Settings { servers, grace, .. } = supervisor.settings;
        assert!(!witness.told_to_end, "seed {seed}: started in a job that ends");
        let pause = witness.pausing.iter().position(|pausing| *pausing == member);
        witness.pausing.remove(pause.unwrap_or_else(|| panic!("seed {seed}: no restart is due")));
        let process = &mut processes[member.index(servers)];
        assert!(!process.runs && life == process.life + 1, "seed {seed}: {member:?}, life {life}");
        process.life = life;
        if self.random.one_in(10) {
            tally.unstarted += 1;
            let ending = Ending::Code(126);
            process.last = Some(ending);
            self.plan(self.now, event(node, Event::Ended { member, ending }));
            return;
        }
        tally.restarts += 1;
        process.runs = true;
        self.live(node, member, if grace == Duration::MAX { u64::MAX } else { 0 });
    }

    /// Those that obey end soon, one way or another.
    fn end_processes(&mut self, node: usize) {
        for index in 0..self.nodes[node].processes.len() {
            let Process { member, life, obeys, .. } = self.nodes[node].processes[index];
            if obeys {
                let ending = match self.random.below(3) {
                    0 => Ending::Code(0),
                    1 => Ending::Code(1),
                    _ => Ending::Signal(15),
                };
                let at = self.now + ms(self.random.below(200));
                self.plan(at, Happening::End { node, member, life, ending });
            }
        }
    }

    /// A message arrives after all that were sent before it.
    fn tell(&mut self, from: usize, message: &Message) {
        for to in self.others(from) {
            let event = Event::Heard { node: from as u32, message: message.clone() };
            self.send(from, to, event);
        }
    }

    fn send(&mut self, from: usize, to: usize, event: Event) {
        let at = self.now + ms(self.random.below(20));
        let last = self.arrivals.entry((from as u32, to as u32)).or_default();
        *last = at.max(*last);
        let at = *last;
        self.plan(at, Happening::Event { node: to, event });
    }

    fn others(&self, node: usize) -> Vec<usize> {
        let others = if node == 0 { (1..self.nodes.len()).collect() } else { vec![0] };
        let far = |other: &usize| (*other).max(node) as u32;
        others.into_iter().filter(|other| !self.cut_links.contains(&far(other))).collect()
    }

    /// Judges a node whose job is over.
    fn end(&mut self, node: usize, tally: &mut Tally) {
        let (seed, of) = (self.seed, &mut self.nodes[node]);
        let Some(outcome) = of.supervisor.outcome().filter(|_| of.outcome.is_none()) else {
            return;
        };
        let outcome = outcome.clone();
        assert!(of.processes.iter().all(|process| !process.runs), "seed {seed}: left behind");
        // A server may wait for its next life when all ranks have ended well; it has had its last.
        let is_server = |member: Member| matches!(member, Member::Server(_));
        let is_success = of.witness.failures.is_empty() && !of.witness.failed;
        for pausing in of.witness.pausing.drain(..) {
            assert!(is_success && is_server(pausing), "seed {seed}: waits for its next life");
            tally.cut += 1;
        }
        let alone = of.processes.len() == 1;
        let expected = of.witness.expected(&of.supervisor, alone, tally);
        assert!(expected.contains(&outcome), "seed {seed}: {outcome:?} and not {expected:?}");
        if outcome == Outcome::Success {
            let ended_well = |process: &Process| {
                matches!(process.member, Member::Server(_)) || process.last == Some(Ending::Code(0))
            };
            assert!(of.processes.iter().all(ended_well), "seed {seed}: not all ended well");
            let Settings { at_end, .. } = of.supervisor.settings;
            assert_eq!(of.witness.at_end, (at_end, at_end), "seed {seed}: at the end");
            self.tell(node, &Message::Over(Outcome::Success));
        }
        tally.outcomes.entry(kind(&outcome)).or_default().add_assign(1);
        self.nodes[node].outcome = Some(outcome);
        for to in self.others(node) {
            self.send(node, to, Event::Closed { node: node as u32 });
        }
    }

    fn plan(&mut self, at: Duration, happening: Happening) {
        // What happens at the same time happens in any order.
        self.next += 1;
        let order = self.random.below(1 << 20) << 32 | self.next;
        let order = if is_message(&happening) { self.next } else { order };
        self.ahead.insert((at, order), happening);
    }

    fn process(&mut self, node: usize, member: Member) -> &mut Process {
        let Node { processes, supervisor, .. } = &mut self.nodes[node];
        &mut processes[member.index(supervisor.settings.servers)]
    }
}

impl Witness {
    /// Takes note of an event before the supervisor hears of it.
    fn see(&mut self, at: Duration, event: &Event) {
        let wrong = match event {
            Event::Signal(signal) => Outcome::Interrupted { signal: *signal },
            Event::OutputLost(error) => {
                if self.told_to_end {
                    self.lost.get_or_insert(output_lost(error));
                }
                output_lost(error)
            }
            Event::Heard { message: Message::Over(outcome), .. } => outcome.clone(),
            Event::Heard { node, message: Message::Finished } => return self.finished.push(*node),
            Event::Closed { node } if !self.finished.contains(node) => {
                Outcome::NodeLost { node: *node }
            }
            Event::AtEndDone => return self.at_end.1 = true,
            _ => return,
        };
        if !self.told_to_end {
            self.other.get_or_insert((at, wrong));
        }
    }

    /// The outcomes that may follow: several only where things happened at the same time.
    fn expected(&self, supervisor: &Supervisor, alone: bool, tally: &mut Tally) -> Vec<Outcome> {
        let wait = |ending: &Ending| match ending {
            Ending::Signal(_) => Duration::ZERO,
            Ending::Code(_) if alone => Duration::ZERO,
            Ending::Code(_) => SETTLE,
        };
        let settled = self.failures.iter().map(|(at, _, ending)| *at + wait(ending)).min();
        let mut expected = Vec::new();
        if let Some((at, other)) = &self.other
            && settled.is_none_or(|settled| *at <= settled)
        {
            expected.push(other.clone());
        }
        if let Some(settled) = settled
            && self.other.as_ref().is_none_or(|(at, _)| *at >= settled)
        {
            let in_time = || self.failures.iter().filter(|(at, ..)| *at <= settled);
            let killed = in_time().find(|(.., ending)| matches!(ending, Ending::Signal(_)));
            let first = &self.failures[0];
            tally.killers += u32::from(killed.is_some_and(|killed| killed != first));
            let (_, member, ending) = *killed.unwrap_or(first);
            expected.push(supervisor.failed(member, ending, vec![format!("{member:?}")]));
        }
        if expected.is_empty() || expected.contains(&Outcome::Success) {
            expected = vec![self.lost.clone().unwrap_or(Outcome::Success)];
        }
        expected
    }
}

fn kind(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Success => "Success",
        Outcome::Failed(_) => "Failed",
        Outcome::Interrupted { .. } => "Interrupted",
        Outcome::NodeLost { .. } => "NodeLost",
        Outcome::ServerFailed(_) => "ServerFailed",
        Outcome::OutputLost { .. } => "OutputLost",
        Outcome::TooFewWorkers { .. } => "TooFewWorkers",
        Outcome::NoProgress { .. } => "NoProgress",
        Outcome::Superseded => "Superseded",
    }
}

fn event(node: usize, event: Event) -> Happening {
    Happening::Event { node, event }
}

/// Whether it came by a connection, which keeps the order.
fn is_message(happening: &Happening) -> bool {
    matches!(happening, Happening::Event { event: Event::Heard { .. } | Event::Closed { .. }, .. })
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }

    fn one_in(&mut self, limit: u64) -> bool {
        self.below(limit) == 0
    }
}
