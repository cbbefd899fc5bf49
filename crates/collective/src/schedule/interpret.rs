//! Schedules in memory.
//!
//! The interpreter runs the schedules of all ranks of a call in one thread, the way the executor
//! would at its worst: several segments are in flight, a seed decides who gets on and whose
//! message arrives next, and a send reads its memory only when it arrives. It finds what a lucky
//! run of the executor hides:
//!
//! - **Deadlocks, lengths, garbage**: nobody can get on, a message is not as long as expected,
//!   something is read that was never written.
//! - **Races**: memory is written although nothing proves that a send from it has been received.
//!   Every rank keeps a vector clock of the steps it knows others to have finished, carried by
//!   messages, so a race is found whether or not it does harm under this seed.
//! - **Unsynchronized windows**: staging is written twice, or read before the wait that makes it
//!   safe.
//!
//! Values are whatever an [`Arithmetic`] computes with: floats, or [`Symbols`] that remember how
//! they came about, which proves that every input was reduced once and in which order.

mod buffers;
mod values;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::{Blocks, Collect, Fold, Op, Phase, Place, Recv, Round, Schedule, Source, Stage};
use super::{Topology, Window, WindowFold};
use crate::tree::{Node, Tree};

use buffers::Memory;
pub use buffers::Sizes;
pub use values::{Arithmetic, Expression, Floats, Symbol, Symbols};

/// One collective call of all ranks.
#[derive(Clone, Debug)]
pub struct Call {
    /// The operation.
    pub op: Op,
    /// How long the buffers are.
    pub sizes: Sizes,
    /// Elements of a column; at least one.
    pub column: usize,
    /// Whether input and output share memory, where both exist.
    pub in_place: bool,
    /// How many segments of a schedule of one phase are in flight; at least one.
    pub in_flight: usize,
    /// Decides the order of events.
    pub seed: u64,
}

/// Why schedules are wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// What must be equal on all ranks (parts, cells, phases, rounds) is not.
    #[error("the schedule of rank {rank} does not fit that of rank 0")]
    Uneven {
        /// The rank.
        rank: usize,
    },
    /// Nobody can get on.
    #[error("deadlock: ranks {waiting:?} wait")]
    Deadlock {
        /// The ranks that have not finished.
        waiting: Vec<usize>,
    },
    /// A rank uses a buffer, a block or a cell that it does not have.
    #[error("rank {rank} has no block {block} in {place:?}")]
    NoSuchPlace {
        /// The rank.
        rank: usize,
        /// Where it looks.
        place: Place,
        /// For what.
        block: u32,
    },
    /// Data are not as long as their receiver expects.
    #[error("rank {to} expects {expected} elements from rank {from}, which has {found}")]
    Length {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// What the receiver expects.
        expected: usize,
        /// What there is.
        found: usize,
    },
    /// Something is read that was never written.
    #[error("rank {rank} reads what was never written")]
    Garbage {
        /// The rank.
        rank: usize,
    },
    /// Memory is written that a send may still read.
    #[error("rank {rank} writes what it may still be sending to rank {to}")]
    Race {
        /// The writer.
        rank: usize,
        /// Whose message it is.
        to: usize,
    },
    /// Two messages of a round arrive in the same place.
    #[error("rank {rank} receives twice in the same place")]
    Overlap {
        /// The rank.
        rank: usize,
    },
    /// A staging cell is written twice, or is not there, or is read too early.
    #[error("rank {rank} uses cell {cell} of rank {owner} out of order")]
    Staging {
        /// The rank.
        rank: usize,
        /// Whose cell.
        owner: usize,
        /// Which.
        cell: u32,
    },
}

/// Runs the schedules of all ranks. `input` gives the elements of every rank's input; the result
/// are the outputs, with `None` for elements that nobody wrote, empty where a rank has none.
pub fn interpret<A: Arithmetic>(
    call: &Call,
    topology: &Topology,
    schedules: &[Schedule],
    arithmetic: &mut A,
    input: impl FnMut(usize, usize) -> A::Value,
) -> Result<Vec<Vec<Option<A::Value>>>, Fault> {
    check_even(topology, schedules)?;
    let mut machine = Machine::new(call, topology, schedules, arithmetic, input);
    machine.run()?;
    Ok(machine.ranks.iter().map(|rank| rank.memory.output().to_vec()).collect())
}

fn check_even(topology: &Topology, schedules: &[Schedule]) -> Result<(), Fault> {
    assert_eq!(schedules.len(), topology.world(), "one schedule per rank");
    let rounds = |schedule: &Schedule| -> Vec<Option<usize>> {
        let count = |phase: &Phase| match phase {
            Phase::Rounds(rounds) => Some(rounds.rounds.len()),
            Phase::Window(_) => None,
        };
        schedule.phases.iter().map(count).collect()
    };
    let windows = |schedule: &Schedule| -> Vec<Option<(u32, bool)>> {
        let shared = |phase: &Phase| match phase {
            Phase::Rounds(_) => None,
            Phase::Window(window) => Some((window.cells, window.publishes)),
        };
        schedule.phases.iter().map(shared).collect()
    };
    for (rank, schedule) in schedules.iter().enumerate() {
        let neighbour = &schedules[topology.members(topology.host(rank))[0]];
        let even = schedule.parts == schedules[0].parts
            && schedule.cells == schedules[0].cells
            && rounds(schedule) == rounds(&schedules[0])
            && windows(schedule) == windows(neighbour);
        if !even {
            return Err(Fault::Uneven { rank });
        }
    }
    Ok(())
}

struct Machine<'a, A: Arithmetic> {
    topology: &'a Topology,
    schedules: &'a [Schedule],
    arithmetic: &'a mut A,
    ranks: Vec<Rank<A::Value>>,
    segments: usize,
    in_flight: usize,
    mail: HashMap<Address, VecDeque<Message>>,
    windows: HashMap<(usize, usize, usize), SharedWindow<A::Value>>,
    random: Random,
}

struct Rank<V> {
    memory: Memory<V>,
    /// Segment `s` runs in slot `s % in_flight`.
    slots: Vec<Option<Task>>,
    /// The next segment to start.
    next: usize,
}

/// A segment of a rank in flight.
struct Task {
    segment: usize,
    phase: usize,
    at: At,
    /// For every rank, how many of its steps are known to be over.
    clock: Clock,
    sends: Vec<Sent>,
}

/// What a task does next.
enum At {
    /// Start a round.
    Round(usize),
    /// Receive the messages that are missing, then fold.
    Receive { round: usize, missing: Vec<usize>, entered: Clock, arrived: Vec<Range<usize>> },
    /// Stage.
    Stage,
    /// Wait for everybody to stage, then fold.
    Fold,
    /// Wait for everybody to fold if somebody publishes, then collect.
    Collect,
    /// Wait until all sends have arrived.
    Drain,
}

type Clock = Vec<u32>;

/// What a send reads, until it is known to have arrived.
struct Sent {
    to: usize,
    spans: Vec<Range<usize>>,
    /// The receiver's step by whose end it has arrived.
    arrived: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Address {
    segment: usize,
    phase: usize,
    round: usize,
    from: usize,
    to: usize,
}

struct Message {
    /// Index into the sender's list.
    sent: usize,
    /// What the sender knew.
    clock: Clock,
}

struct SharedWindow<V> {
    staged: usize,
    folded: usize,
    clock: Clock,
    cells: HashMap<(usize, u32), Cell<V>>,
}

struct Cell<V> {
    values: Vec<V>,
    published: bool,
}

impl<'a, A: Arithmetic> Machine<'a, A> {
    fn new(
        call: &Call,
        topology: &'a Topology,
        schedules: &'a [Schedule],
        arithmetic: &'a mut A,
        mut input: impl FnMut(usize, usize) -> A::Value,
    ) -> Machine<'a, A> {
        // With several phases a segment goes through all of them before the next one starts.
        let in_flight = if schedules[0].phases.len() > 1 { 1 } else { call.in_flight };
        let rank = |rank: usize| {
            let schedule = &schedules[rank];
            let memory = Memory::new(call, rank, schedules.len(), schedule, in_flight, |index| {
                input(rank, index)
            });
            Rank { memory, slots: (0..in_flight).map(|_| None).collect(), next: 0 }
        };
        let ranks: Vec<_> = (0..schedules.len()).map(rank).collect();
        let segments = ranks.iter().map(|rank| rank.memory.segments()).max().unwrap_or(0);
        let (mail, windows) = (HashMap::new(), HashMap::new());
        let random = Random(call.seed);
        Machine { topology, schedules, arithmetic, ranks, segments, in_flight, mail, windows, random }
    }

    /// Lets ranks get on, some of them much slower than others, until all have finished.
    fn run(&mut self) -> Result<(), Fault> {
        let world = self.ranks.len();
        let reluctance: Vec<u64> = (0..world).map(|_| [1, 1, 2, 8][self.random.below(4)]).collect();
        let mut turns: Vec<(usize, usize)> =
            (0..world).flat_map(|rank| (0..self.in_flight).map(move |slot| (rank, slot))).collect();
        let mut patience = true;
        loop {
            self.random.shuffle(&mut turns);
            let mut progress = false;
            for &(rank, slot) in &turns {
                if !patience || self.random.next() % reluctance[rank] == 0 {
                    progress |= self.step(rank, slot)?;
                }
            }
            let finished = |rank: &Rank<A::Value>| {
                rank.next == self.segments && rank.slots.iter().all(Option::is_none)
            };
            if self.ranks.iter().all(finished) {
                return Ok(());
            }
            if !progress && !patience {
                let waiting = (0..world).filter(|rank| !finished(&self.ranks[*rank])).collect();
                return Err(Fault::Deadlock { waiting });
            }
            patience = progress;
        }
    }

    /// Lets a segment in flight do one thing. Returns whether it could.
    fn step(&mut self, rank: usize, slot: usize) -> Result<bool, Fault> {
        let Some(mut task) = self.ranks[rank].slots[slot].take() else {
            let Rank { slots, next, .. } = &mut self.ranks[rank];
            if *next == self.segments || *next % self.in_flight != slot {
                return Ok(false);
            }
            let clock = vec![0; self.schedules.len()];
            let at = entry(&self.schedules[rank], 0);
            slots[slot] = Some(Task { segment: *next, phase: 0, at, clock, sends: Vec::new() });
            *next += 1;
            return Ok(true);
        };
        let progress = self.advance(rank, slot, &mut task)?;
        let over = matches!(task.at, At::Drain) && task.sends.iter().all(|s| s.arrived.is_some());
        if !over {
            self.ranks[rank].slots[slot] = Some(task);
        }
        Ok(progress || over)
    }

    fn advance(&mut self, rank: usize, slot: usize, task: &mut Task) -> Result<bool, Fault> {
        let schedules = self.schedules;
        match (schedules[rank].phases.get(task.phase), &task.at) {
            (Some(Phase::Rounds(rounds)), At::Round(number)) => match rounds.rounds.get(*number) {
                Some(round) => self.start_round(rank, slot, task, *number, round)?,
                None => self.next_phase(rank, task),
            },
            (Some(Phase::Rounds(rounds)), At::Receive { round, .. }) => {
                return self.receive(rank, slot, task, &rounds.rounds[*round]);
            }
            (Some(Phase::Window(window)), _) => return self.window(rank, slot, task, window),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn next_phase(&self, rank: usize, task: &mut Task) {
        task.phase += 1;
        task.at = entry(&self.schedules[rank], task.phase);
    }

    fn start_round(
        &mut self,
        rank: usize,
        slot: usize,
        task: &mut Task,
        number: usize,
        round: &Round,
    ) -> Result<(), Fault> {
        for send in &round.sends {
            let spans = self.spans(rank, slot, task, send.from, &send.blocks)?;
            let message = Message { sent: task.sends.len(), clock: task.clock.clone() };
            task.sends.push(Sent { to: send.to, spans, arrived: None });
            let Task { segment, phase, .. } = *task;
            let address = Address { segment, phase, round: number, from: rank, to: send.to };
            self.mail.entry(address).or_default().push_back(message);
        }
        let missing = (0..round.recvs.len()).collect();
        let entered = task.clock.clone();
        task.at = At::Receive { round: number, missing, entered, arrived: Vec::new() };
        Ok(())
    }

    fn receive(
        &mut self,
        rank: usize,
        slot: usize,
        task: &mut Task,
        round: &Round,
    ) -> Result<bool, Fault> {
        let At::Receive { round: number, missing, entered, arrived } = &mut task.at else {
            return Ok(false);
        };
        let number = *number;
        if missing.is_empty() {
            for fold in &round.folds {
                self.fold(rank, slot, task, fold)?;
            }
            task.clock[rank] += 1;
            task.at = At::Round(number + 1);
            return Ok(true);
        }
        let address = |recv: &Recv| Address {
            segment: task.segment,
            phase: task.phase,
            round: number,
            from: recv.from,
            to: rank,
        };
        // Messages of one peer arrive in order; those of different peers in any.
        let first = |at: usize| {
            let peer = round.recvs[missing[at]].from;
            missing[..at].iter().all(|earlier| round.recvs[*earlier].from != peer)
        };
        let ready: Vec<usize> = (0..missing.len())
            .filter(|at| first(*at))
            .filter(|at| {
                self.mail.get(&address(&round.recvs[missing[*at]])).is_some_and(|m| !m.is_empty())
            })
            .collect();
        if ready.is_empty() {
            return Ok(false);
        }
        let recv = &round.recvs[missing.remove(ready[self.random.below(ready.len())])];
        let address = address(recv);
        let queue = self.mail.get_mut(&address).expect("only those with mail are ready");
        let message = queue.pop_front().expect("only those with mail are ready");
        // It may have arrived any time since the round began: whatever else has arrived in this
        // round proves nothing.
        let mut clock = entered.clone();
        join(&mut clock, &message.clock);
        let mut before = std::mem::take(arrived);

        let Rank { memory, slots, .. } = &mut self.ranks[recv.from];
        let sender = slots[slot].as_mut().expect("a segment is in flight until all is received");
        let sent = &mut sender.sends[message.sent];
        sent.arrived = Some(task.clock[rank] + 1);
        let values = memory.read(&sent.spans).ok_or(Fault::Garbage { rank: recv.from })?;
        let spans = self.spans(rank, slot, task, recv.into, &recv.blocks)?;
        let expected = spans.iter().map(Range::len).sum();
        if values.len() != expected {
            let found = values.len();
            return Err(Fault::Length { from: recv.from, to: rank, expected, found });
        }
        if spans.iter().any(|span| before.iter().any(|other| overlap(span, other))) {
            return Err(Fault::Overlap { rank });
        }
        self.write(rank, task, &clock, &spans, values)?;
        join(&mut task.clock, &clock);
        before.extend(spans);
        if let At::Receive { arrived, .. } = &mut task.at {
            *arrived = before;
        }
        Ok(true)
    }

    fn fold(&mut self, rank: usize, slot: usize, task: &Task, fold: &Fold) -> Result<(), Fault> {
        let into = self.spans(rank, slot, task, fold.into, &fold.blocks)?;
        let mut inputs = Vec::with_capacity(fold.inputs.len());
        for place in &fold.inputs {
            let spans = self.spans(rank, slot, task, *place, &fold.blocks)?;
            if fold.inputs.len() == 1 && !fold.root && spans == into {
                return Ok(());
            }
            let values = self.ranks[rank].memory.read(&spans);
            inputs.push(values.ok_or(Fault::Garbage { rank })?);
        }
        let values = self.combine(&fold.tree, &inputs, fold.root);
        self.write(rank, task, &task.clock, &into, values)
    }

    fn window(
        &mut self,
        rank: usize,
        slot: usize,
        task: &mut Task,
        window: &Window,
    ) -> Result<bool, Fault> {
        let host = self.topology.host(rank);
        let members = self.topology.members(host).len();
        let key = (host, task.phase, task.segment);
        let waits = window.cells > 0;
        let shared = self.windows.entry(key).or_insert_with(|| SharedWindow {
            staged: 0,
            folded: 0,
            clock: vec![0; self.schedules.len()],
            cells: HashMap::new(),
        });
        match task.at {
            At::Stage => {
                for stage in &window.stages {
                    self.stage(rank, slot, task, window, stage)?;
                }
                for copy in &window.copies {
                    self.fold(rank, slot, task, copy)?;
                }
                task.clock[rank] += 1;
                let shared = self.windows.get_mut(&key).expect("just inserted");
                shared.staged += 1;
                join(&mut shared.clock, &task.clock);
                task.at = At::Fold;
            }
            At::Fold => {
                if waits && shared.staged < members {
                    return Ok(false);
                }
                if waits {
                    join(&mut task.clock, &shared.clock);
                }
                for fold in &window.folds {
                    self.window_fold(rank, slot, task, window, fold)?;
                }
                let shared = self.windows.get_mut(&key).expect("just inserted");
                shared.folded += 1;
                task.at = At::Collect;
            }
            At::Collect => {
                if waits && window.publishes && shared.folded < members {
                    return Ok(false);
                }
                for collect in &window.collects {
                    self.collect(rank, slot, task, window, collect)?;
                }
                task.clock[rank] += 1;
                self.next_phase(rank, task);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn stage(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        window: &Window,
        stage: &Stage,
    ) -> Result<(), Fault> {
        for (number, block) in stage.blocks.clone().enumerate() {
            let from = stage.from.skip(number as u32);
            let spans = self.spans(rank, slot, task, from, &(block..block + 1))?;
            let values = self.ranks[rank].memory.read(&spans).ok_or(Fault::Garbage { rank })?;
            let cell = stage.cell + number as u32;
            self.put(rank, task, window, cell, Cell { values, published: false })?;
        }
        Ok(())
    }

    fn window_fold(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        window: &Window,
        fold: &WindowFold,
    ) -> Result<(), Fault> {
        for (number, block) in fold.blocks.clone().enumerate() {
            let number = number as u32;
            let blocks = block..block + 1;
            let into = self.spans(rank, slot, task, fold.into.skip(number), &blocks)?;
            let expected = into.iter().map(Range::len).sum();
            let mut inputs = Vec::with_capacity(fold.inputs.len());
            for source in &fold.inputs {
                inputs.push(match *source {
                    Source::Own(place) => {
                        let spans = self.spans(rank, slot, task, place.skip(number), &blocks)?;
                        self.ranks[rank].memory.read(&spans).ok_or(Fault::Garbage { rank })?
                    }
                    Source::Staged { rank: owner, cell } => {
                        self.look(rank, task, owner, cell + number, false, expected)?
                    }
                });
            }
            let values = self.combine(&fold.tree, &inputs, fold.root);
            if let Some(cell) = fold.publish {
                let (cell, values) = (cell + number, values.clone());
                if !window.publishes {
                    return Err(Fault::Staging { rank, owner: rank, cell });
                }
                self.put(rank, task, window, cell, Cell { values, published: true })?;
            }
            self.write(rank, task, &task.clock, &into, values)?;
        }
        Ok(())
    }

    fn collect(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        window: &Window,
        collect: &Collect,
    ) -> Result<(), Fault> {
        for (number, block) in collect.blocks.clone().enumerate() {
            let number = number as u32;
            let into = collect.into.skip(number);
            let spans = self.spans(rank, slot, task, into, &(block..block + 1))?;
            let expected = spans.iter().map(Range::len).sum();
            let cell = collect.cell + number;
            let values = self.look(rank, task, collect.rank, cell, window.publishes, expected)?;
            self.write(rank, task, &task.clock, &spans, values)?;
        }
        Ok(())
    }

    /// Writes a staging cell, once.
    fn put(
        &mut self,
        rank: usize,
        task: &Task,
        window: &Window,
        cell: u32,
        content: Cell<A::Value>,
    ) -> Result<(), Fault> {
        let key = (self.topology.host(rank), task.phase, task.segment);
        let shared = self.windows.get_mut(&key).expect("a window exists from its first step on");
        let twice = shared.cells.insert((rank, cell), content).is_some();
        if twice || cell >= window.cells {
            return Err(Fault::Staging { rank, owner: rank, cell });
        }
        Ok(())
    }

    /// Reads a staging cell; one that was published only if that is `published_too`.
    fn look(
        &self,
        rank: usize,
        task: &Task,
        owner: usize,
        cell: u32,
        published_too: bool,
        expected: usize,
    ) -> Result<Vec<A::Value>, Fault> {
        let key = (self.topology.host(rank), task.phase, task.segment);
        let content = self.windows[&key].cells.get(&(owner, cell));
        match content.filter(|content| !content.published || published_too) {
            None => Err(Fault::Staging { rank, owner, cell }),
            Some(Cell { values, .. }) if values.len() != expected => {
                Err(Fault::Length { from: owner, to: rank, expected, found: values.len() })
            }
            Some(Cell { values, .. }) => Ok(values.clone()),
        }
    }

    fn spans(
        &self,
        rank: usize,
        slot: usize,
        task: &Task,
        place: Place,
        blocks: &Blocks,
    ) -> Result<Vec<Range<usize>>, Fault> {
        let memory = &self.ranks[rank].memory;
        let span = |(number, block): (usize, u32)| {
            let place = place.skip(number as u32);
            let span = memory.span(slot, task.segment, place, block);
            span.ok_or(Fault::NoSuchPlace { rank, place, block })
        };
        blocks.clone().enumerate().map(span).collect()
    }

    /// Writes private memory, knowing what `clock` says.
    fn write(
        &mut self,
        rank: usize,
        task: &Task,
        clock: &Clock,
        spans: &[Range<usize>],
        values: Vec<A::Value>,
    ) -> Result<(), Fault> {
        let Rank { memory, slots, .. } = &mut self.ranks[rank];
        let reads = |sent: &&Sent| {
            sent.spans.iter().any(|read| spans.iter().any(|write| overlap(read, write)))
        };
        let unproven = |sent: &&Sent| sent.arrived.is_none_or(|step| clock[sent.to] < step);
        // Another segment's messages prove nothing about this one's memory.
        let others = slots.iter().flatten().flat_map(|task| &task.sends);
        let race = task.sends.iter().filter(unproven).chain(others).find(reads);
        if let Some(sent) = race {
            return Err(Fault::Race { rank, to: sent.to });
        }
        memory.write(spans, values);
        Ok(())
    }

    fn combine(
        &mut self,
        tree: &Tree,
        inputs: &[Vec<A::Value>],
        root: bool,
    ) -> Vec<A::Value> {
        let mut stack = Vec::new();
        let mut element = |index: usize| {
            for node in tree.nodes() {
                let value = match node {
                    Node::Input(input) => inputs[*input as usize][index],
                    Node::Combine => {
                        let right = stack.pop().expect("a tree combines what it pushed");
                        let left = stack.pop().expect("a tree combines what it pushed");
                        self.arithmetic.combine(left, right)
                    }
                };
                stack.push(value);
            }
            let value = stack.pop().expect("a tree ends with one value");
            if root { self.arithmetic.root(value) } else { value }
        };
        (0..inputs[0].len()).map(&mut element).collect()
    }
}

fn entry(schedule: &Schedule, phase: usize) -> At {
    match schedule.phases.get(phase) {
        Some(Phase::Rounds(_)) => At::Round(0),
        Some(Phase::Window(_)) => At::Stage,
        None => At::Drain,
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
