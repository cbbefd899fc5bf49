//! Algorithms as data.
//!
//! An algorithm is a pure function from a [`Problem`] to the [`Schedule`] of one rank. The
//! executor runs schedules, the tests interpret them in memory, the cost model prices them.
//!
//! **Blocks, columns, segments.** The buffers of a call are cut into *blocks*: the parts that
//! belong to different ranks (of a gathered or scattered buffer), or equal parts that an
//! algorithm chose (of an all-reduce). Every block is cut into *columns* of equal length, and
//! column `s` of all blocks together is *segment* `s`. A schedule says what to do with one
//! segment; it is the same for all of them, and several are in flight at once. What a segment
//! needs besides the user's buffers are *cells*: pieces of scratch memory of one column each.
//!
//! **Two kinds of phase.** [`Rounds`] move messages between pairs of ranks over links.
//! [`Window`] moves data through memory that all ranks of one host can read. A schedule is a
//! list of phases, so that a hierarchical algorithm is a window phase inside each host, rounds
//! between hosts, and a window phase again.

mod agreement;
mod algorithm;
mod direct;
mod double_tree;
mod halving_doubling;
mod hierarchical;
mod layout;
mod pairwise;
mod recursive_doubling;
mod regional;
mod ring;
mod teams;
mod topology;
mod tree;
mod window;

use std::ops::Range;

use crate::tree::Tree;

pub use algorithm::{Algorithm, UnknownAlgorithm, able, build, candidates};
pub use layout::Layout;
pub use topology::Topology;

/// An operation of a group, with what its schedule depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// Every rank gets the reduction of all inputs.
    AllReduce,
    /// Rank `r` gets block `r` of the reduction. Input: `world` blocks, output: one.
    ReduceScatter,
    /// Every rank gets the blocks of all. Input: one block, output: `world`.
    AllGather,
    /// Every rank gets the root's buffer.
    Broadcast {
        /// Who has the data.
        root: usize,
    },
    /// The root gets the reduction of all inputs.
    Reduce {
        /// Who gets the result.
        root: usize,
    },
    /// The root gets the blocks of all ranks.
    Gather {
        /// Who gets the blocks.
        root: usize,
    },
    /// Rank `r` gets block `r` of the root's buffer.
    Scatter {
        /// Who has the blocks.
        root: usize,
    },
    /// Rank `r` gets block `r` of every rank's buffer.
    AllToAll,
}

/// Everything a schedule may depend on. Equal on all ranks of the group but for `rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// The operation.
    pub op: Op,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
}

/// A range of blocks.
pub type Blocks = Range<u32>;

/// Where in memory a range of blocks lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    /// The caller's input buffer.
    Input,
    /// The caller's output buffer; the same memory as the input of a call in place.
    Output,
    /// Scratch, starting at this cell, one cell per block. What a cell holds is as long as the
    /// block is in this segment.
    Scratch(u32),
}

/// A message to another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    /// To which rank.
    pub to: usize,
    /// Which blocks.
    pub blocks: Blocks,
    /// Where they are.
    pub from: Area,
}

/// A message from another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recv {
    /// From which rank.
    pub from: usize,
    /// Which blocks.
    pub blocks: Blocks,
    /// Where to put them.
    pub into: Area,
}

/// Local work: combine inputs, block by block, in the order of the tree. With one input it is a
/// copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fold {
    /// The inputs of the tree. All hold the same blocks.
    pub inputs: Vec<Area>,
    /// The order in which to combine them.
    pub tree: Tree,
    /// Which blocks.
    pub blocks: Blocks,
    /// Where the result goes; may be one of the inputs.
    pub into: Area,
    /// Whether this is the root of the reduction, where a mean is divided.
    pub root: bool,
}

impl Fold {
    /// A local copy.
    pub fn copy(blocks: Blocks, from: Area, into: Area) -> Fold {
        Fold { inputs: vec![from], tree: Tree::canonical(1), blocks, into, root: false }
    }
}

/// What happens at the same time in one segment: all sends and receives, then, when all
/// receives have arrived, the folds in order. The next round starts after that; sends may still
/// be under way, so no later step may write what a send reads unless the arrival of a message
/// proves that the send has been received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Messages to others. Several to one peer arrive in this order.
    pub sends: Vec<Send>,
    /// Messages from others. The first from a peer is the first that the peer sends to this
    /// rank in this round, and so on.
    pub recvs: Vec<Recv>,
    /// Local work after the receives.
    pub folds: Vec<Fold>,
}

/// Messages between pairs of ranks.
///
/// Rounds are numbered globally: what one rank sends in round `k`, the other receives in its
/// round `k`. A rank with nothing to do in a round has an empty one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    /// The rounds of one segment.
    pub rounds: Vec<Round>,
}

/// Put blocks where the other ranks of the window can read them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Which blocks.
    pub blocks: Blocks,
    /// Where they are.
    pub from: Area,
    /// The first cell of this rank's staging buffer; one cell per block.
    pub cell: u32,
}

/// An input of a [`WindowFold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// This rank's own memory.
    Own(Area),
    /// A cell of another rank's staging buffer.
    Staged {
        /// Whose.
        rank: usize,
        /// The first cell; one cell per block.
        cell: u32,
    },
}

/// Combine what several ranks staged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowFold {
    /// The inputs of the tree.
    pub inputs: Vec<Source>,
    /// The order in which to combine them.
    pub tree: Tree,
    /// Which blocks.
    pub blocks: Blocks,
    /// Where the result goes in this rank's memory.
    pub into: Area,
    /// Also put the result into this rank's staging buffer, from this cell on.
    pub publish: Option<u32>,
    /// Whether this is the root of the reduction, where a mean is divided.
    pub root: bool,
}

/// Copy what another rank staged or published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collect {
    /// Whose staging buffer.
    pub rank: usize,
    /// The first cell there; one cell per block.
    pub cell: u32,
    /// Which blocks.
    pub blocks: Blocks,
    /// Where they go in this rank's memory.
    pub into: Area,
}

/// Data through memory that all members can read: stage, then fold what others staged, then
/// collect what others staged or published.
///
/// All members wait for each other between staging and folding (or collecting, if none
/// folds), and again between folding and collecting if one publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Private memory to staging.
    pub stages: Vec<Stage>,
    /// Local copies that involve no other rank, after the staging.
    pub copies: Vec<Fold>,
    /// Staging to private memory, reducing.
    pub folds: Vec<WindowFold>,
    /// Staging to private memory.
    pub collects: Vec<Collect>,
    /// Whether any member publishes a fold: then collecting waits for folding. Equal on all
    /// members.
    pub publishes: bool,
    /// The staging cells a segment needs. Equal on all members. Without any there is nothing to
    /// share, and no rank waits.
    pub cells: u32,
}

/// One phase of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Over links.
    Rounds(Rounds),
    /// Through shared memory, among the ranks of this host.
    Window(Window),
}

/// What one rank does for one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The phases. A schedule of one phase has several segments in flight; with more phases,
    /// every segment goes through all of them before the next one starts.
    pub phases: Vec<Phase>,
    /// Into how many blocks a buffer without blocks of its own (all-reduce, broadcast, reduce)
    /// is cut.
    pub parts: u32,
    /// The scratch cells a segment in flight needs; they keep their contents from one phase to
    /// the next. Equal on all ranks. They are free for another segment when the last send of
    /// this one has left.
    pub cells: u32,
    /// The staging cells of its largest window on any host. Equal on all ranks.
    pub staging: u32,
}

impl Op {
    /// Whether elements of several ranks become one.
    pub fn reduces(self) -> bool {
        matches!(self, Op::AllReduce | Op::ReduceScatter | Op::Reduce { .. })
    }

    /// Whether the buffers have one block per rank, instead of being cut into parts by the
    /// schedule.
    pub fn has_blocks(self) -> bool {
        !matches!(self, Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. })
    }
}

impl Area {
    /// The place of the blocks that follow the first `blocks` of a range at this place.
    pub fn skip(self, blocks: u32) -> Area {
        match self {
            Area::Scratch(cell) => Area::Scratch(cell + blocks),
            buffer => buffer,
        }
    }
}

impl Rounds {
    /// The same among ranks of other numbers.
    pub fn rename(&mut self, name: impl Fn(usize) -> usize) {
        for round in &mut self.rounds {
            round.sends.iter_mut().for_each(|send| send.to = name(send.to));
            round.recvs.iter_mut().for_each(|recv| recv.from = name(recv.from));
        }
    }
}

impl Window {
    /// The same among ranks of other numbers.
    pub fn rename(&mut self, name: impl Fn(usize) -> usize) {
        for input in self.folds.iter_mut().flat_map(|fold| &mut fold.inputs) {
            if let Source::Staged { rank, .. } = input {
                *rank = name(*rank);
            }
        }
        self.collects.iter_mut().for_each(|collect| collect.rank = name(collect.rank));
    }
}

impl Schedule {
    /// A schedule of rounds alone.
    fn of_rounds(rounds: Vec<Round>, parts: usize, cells: usize) -> Schedule {
        let phases = vec![Phase::Rounds(Rounds { rounds })];
        Schedule { phases, parts: parts as u32, cells: cells as u32, staging: 0 }
    }
}

/// One block.
fn block(index: usize) -> Blocks {
    index as u32..index as u32 + 1
}

/// A range of blocks.
fn blocks(range: Range<usize>) -> Blocks {
    range.start as u32..range.end as u32
}

/// Every rank but `rank`, those above it first: when all ranks send in this order, no two of
/// them start with the same receiver.
fn peers_after(rank: usize, world: usize) -> impl Iterator<Item = usize> {
    (1..world).map(move |distance| (rank + distance) % world)
}

/// Every rank but `rank`, in the order in which their messages arrive when every rank sends to
/// [`peers_after`].
fn peers_before(rank: usize, world: usize) -> impl Iterator<Item = usize> {
    (1..world).map(move |distance| (rank + world - distance) % world)
}
