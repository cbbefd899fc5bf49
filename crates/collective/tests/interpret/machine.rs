//! Ranks that take turns: tasks, messages, private memory.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::buffers::Memory;
use super::shared::SharedWindow;
use super::{Arithmetic, Call, Fault};
use unisono_collective::schedule::{Area, Blocks, Fold, Phase, Recv, Round, Schedule, Topology};
use unisono_collective::tree::{Node, Tree};

/// All ranks of a call.
pub(super) struct Machine<'a, A: Arithmetic> {
    pub(super) topology: &'a Topology,
    pub(super) schedules: &'a [Schedule],
    arithmetic: &'a mut A,
    pub(super) ranks: Vec<Rank<A::Value>>,
    segments: usize,
    in_flight: usize,
    mail: HashMap<Address, VecDeque<Message>>,
    /// By host, phase and segment.
    pub(super) windows: HashMap<(usize, usize, usize), SharedWindow<A::Value>>,
    random: Random,
}

pub(super) struct Rank<V> {
    pub(super) memory: Memory<V>,
    /// Segment `s` runs in slot `s % in_flight`.
    slots: Vec<Option<Task>>,
    /// The next segment to start.
    next: usize,
}

/// A segment of a rank in flight.
pub(super) struct Task {
    pub(super) segment: usize,
    pub(super) phase: usize,
    pub(super) at: At,
    /// For every rank, how many of its steps are known to be over.
    pub(super) clock: Clock,
    sends: Vec<Sent>,
}

/// What a task does next.
pub(super) enum At {
    /// Start a round.
    Round(usize),
    /// Receive the messages that are missing, then fold.
    Receive { round: usize, missing: Vec<usize>, entered: Clock, arrived: Vec<Range<usize>> },
    /// Stage.
    Stage,
    /// Wait for all ranks to stage, then fold.
    Fold,
    /// Wait for all ranks to fold if one publishes, then collect.
    Collect,
    /// Wait until all sends have arrived.
    Drain,
}

pub(super) type Clock = Vec<u32>;

/// What a send reads, until it is known to have arrived.
pub(super) struct Sent {
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

impl<'a, A: Arithmetic> Machine<'a, A> {
    pub(super) fn new(
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
        Machine {
            topology,
            schedules,
            arithmetic,
            ranks,
            segments,
            in_flight,
            mail,
            windows,
            random,
        }
    }

    /// Lets ranks get on, some of them much slower than others, until all have finished.
    pub(super) fn run(mut self) -> Result<Vec<Vec<Option<A::Value>>>, Fault> {
        let world = self.ranks.len();
        let reluctance: Vec<u64> = (0..world).map(|_| [1, 1, 2, 8][self.random.below(4)]).collect();
        let mut turns: Vec<(usize, usize)> =
            (0..world).flat_map(|rank| (0..self.in_flight).map(move |slot| (rank, slot))).collect();
        let mut patience = true;
        loop {
            self.random.shuffle(&mut turns);
            let mut progress = false;
            for &(rank, slot) in &turns {
                if !patience || self.random.next().is_multiple_of(reluctance[rank]) {
                    progress |= self.step(rank, slot)?;
                }
            }
            let finished = |rank: &Rank<A::Value>| {
                rank.next == self.segments && rank.slots.iter().all(Option::is_none)
            };
            if self.ranks.iter().all(finished) {
                let output = |rank: &Rank<A::Value>| rank.memory.output().to_vec();
                return Ok(self.ranks.iter().map(output).collect());
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

    pub(super) fn next_phase(&self, rank: usize, task: &mut Task) {
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

    pub(super) fn fold(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        fold: &Fold,
    ) -> Result<(), Fault> {
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

    pub(super) fn spans(
        &self,
        rank: usize,
        slot: usize,
        task: &Task,
        place: Area,
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
    pub(super) fn write(
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

    pub(super) fn combine(
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

pub(super) fn join(clock: &mut Clock, other: &Clock) {
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
