//! Schedules in memory.
//!
//! The interpreter runs the schedules of all ranks of a call in one thread, the way the executor
//! would at its worst: several segments are in flight, a seed decides who gets on and whose
//! message arrives next, and a send reads its memory only when it arrives. It finds what a lucky
//! run of the executor hides:
//!
//! - **Deadlocks, lengths, garbage**: no rank can get on, a message is not as long as expected,
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
mod machine;
mod shared;
mod values;

use unisono_collective::schedule::{Area, Op, Phase, Schedule, Topology};

use machine::Machine;

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
    /// No rank can get on.
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
        place: Area,
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
/// are the outputs, with `None` for elements that no rank wrote, empty where a rank has none.
pub fn interpret<A: Arithmetic>(
    call: &Call,
    topology: &Topology,
    schedules: &[Schedule],
    arithmetic: &mut A,
    input: impl FnMut(usize, usize) -> A::Value,
) -> Result<Vec<Vec<Option<A::Value>>>, Fault> {
    check_even(topology, schedules)?;
    Machine::new(call, topology, schedules, arithmetic, input).run()
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
            && schedule.staging == schedules[0].staging
            && windows(schedule).iter().flatten().all(|(cells, _)| *cells <= schedule.staging)
            && rounds(schedule) == rounds(&schedules[0])
            && windows(schedule) == windows(neighbour);
        if !even {
            return Err(Fault::Uneven { rank });
        }
    }
    Ok(())
}
