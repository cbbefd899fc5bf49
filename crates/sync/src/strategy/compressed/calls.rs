//! What the calls of a group send, by the algorithms that the group will choose for them.
//!
//! How many bytes a call sends is not a property of the call: few bytes travel fastest if every rank
//! sends them to every other, many if each is sent as seldom as possible, and where the border lies a
//! group decides by the costs it has measured. So the group is asked which algorithm it would choose,
//! and the algorithm's schedules of all ranks are added up: what they send over links, and what they
//! write to shared memory. Headers are left out.

use std::cell::RefCell;
use std::collections::HashMap;

use unisono_collective::schedule::{Phase, Problem, Schedule, build};
use unisono_collective::{Algorithm, Dtype, Error, Group, Op, Request};

/// What a call sends, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// The rank that sends most.
    pub busiest: f64,
    /// All ranks together.
    pub all: f64,
    /// Whether all of it goes over links.
    pub by_links: bool,
}

/// The calls of a group.
pub struct Calls<'a> {
    group: &'a Group,
    known: RefCell<HashMap<(Op, Algorithm), Columns>>,
}

/// What an algorithm sends, in blocks.
#[derive(Clone, Copy)]
struct Columns {
    busiest: u64,
    all: u64,
    /// Blocks that a buffer is cut into, where it has none of its own.
    parts: u32,
    by_links: bool,
}

impl<'a> Calls<'a> {
    /// Those of this group.
    pub fn new(group: &'a Group) -> Calls<'a> {
        Calls { group, known: RefCell::default() }
    }

    /// What a call sends. `count` is that of a [`Request`]: elements of the whole buffer, or of a
    /// block. The same on all ranks.
    pub fn sent(&self, op: Op, dtype: Dtype, count: usize) -> Result<Sent, Error> {
        let algorithm = self.group.explain(Request::sized(op, dtype, count))?.chosen;
        let columns = *self
            .known
            .borrow_mut()
            .entry((op, algorithm))
            .or_insert_with(|| columns(op, algorithm, self.group));
        let bytes = (count * dtype.size()) as f64;
        let block = if op.has_blocks() { bytes } else { bytes / f64::from(columns.parts) };
        Ok(Sent {
            busiest: columns.busiest as f64 * block,
            all: columns.all as f64 * block,
            by_links: columns.by_links,
        })
    }
}

fn columns(op: Op, algorithm: Algorithm, group: &Group) -> Columns {
    let (world, topology) = (group.size(), group.topology());
    let mut sums = Columns { busiest: 0, all: 0, parts: 1, by_links: true };
    for rank in 0..world {
        let schedule = build(algorithm, &Problem { op, rank, world }, topology)
            .expect("a group chooses among algorithms that can do the call");
        let sent = blocks_sent(&schedule);
        sums.busiest = sums.busiest.max(sent);
        sums.all += sent;
        sums.parts = schedule.parts.max(1);
        sums.by_links &= schedule.phases.iter().all(|phase| matches!(phase, Phase::Rounds(_)));
    }
    sums
}

fn blocks_sent(schedule: &Schedule) -> u64 {
    let of_phase = |phase: &Phase| -> u64 {
        match phase {
            Phase::Rounds(rounds) => {
                let sends = rounds.rounds.iter().flat_map(|round| &round.sends);
                sends.map(|send| send.blocks.len() as u64).sum()
            }
            Phase::Window(window) => {
                let staged = window.stages.iter().map(|stage| stage.blocks.len() as u64);
                let folds = window.folds.iter().filter(|fold| fold.publish.is_some());
                staged.chain(folds.map(|fold| fold.blocks.len() as u64)).sum()
            }
        }
    };
    schedule.phases.iter().map(of_phase).sum()
}
