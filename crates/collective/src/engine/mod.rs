//! What runs the calls of a group.
//!
//! A [`Group`](crate::Group) is a queue of calls over an engine. The queue says when a call runs; the
//! group checks calls, numbers them, and ends on all ranks when one fails. The engine knows memory and
//! wires: which algorithm a call takes, what that costs, and how its schedule is run. It runs
//! schedules; it does not invent reductions.
//!
//! [`HostEngine`] is the one of host memory, over shared memory and sockets. Others are made from it
//! when a group forms ([`Group::with_engine`](crate::Group::with_engine)): they may hand it the calls
//! that it does best, and use it to agree on what they need among the ranks.

mod host;
mod streams;
mod survey;
mod tune;

use crate::call::Call;
use crate::cost::Prediction;
use crate::error::{Error, FormError};
use crate::request::{Checked, Request};
use crate::schedule::Algorithm;

pub use crate::buffers::Buffers;
pub use crate::state::{GroupState, StallWatch};
pub use crate::traffic::Meter;
pub use crate::window::clock;
pub use crate::window::clocks::{ClockView, Clocks};
pub use host::HostEngine;
pub use unisono_net::memory::Memory as SharedMemory;

/// Runs the calls of one rank of a group, one after the other.
pub trait Engine: Send {
    /// The memory it reaches. A call on other memory is refused before it is queued.
    fn reaches(&self) -> Vec<Memory>;

    /// How it is going to run a call. Where canonical bits were promised, and no algorithm is forced,
    /// the plan of a reduction of floats must be canonical: the group refuses one that says it is not.
    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error>;

    /// What a call of this kind and size would do, and what it would cost.
    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error>;

    /// The engine of host memory that it was made from.
    fn host(&mut self) -> &mut HostEngine;

    /// Runs a call as it was planned, to its end. An error ends the group, on all ranks.
    ///
    /// What a request on [a stream](Request::on_stream) leaves to the device may still be under way.
    ///
    /// Soon after the group has ended for another reason, this returns an error as well. While it
    /// waits it looks at [`GroupState::is_over`], or sleeps where what it registered with
    /// [`GroupState::on_failure`] wakes it.
    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error>;
}

/// Makes the engine of a rank, from that of host memory, when a group or a part of it forms. All ranks
/// make the same.
pub type MakeEngine = dyn Fn(HostEngine) -> Result<Box<dyn Engine>, FormError> + Send + Sync;

/// Where the memory of a call is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Memory {
    /// The process's own.
    #[default]
    Host,
    /// A device's, by its number in this process.
    Device(u32),
}

/// How an engine is going to run a call. Equal on all ranks, which compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Elements of a column.
    pub column: usize,
    /// Whether a reduction evaluates the canonical tree.
    pub canonical: bool,
    /// For ranks that read each other's buffers in place: a hash of where in [registered](crate::Registered) memory
    /// they are. Else 0.
    pub registered: u64,
}

/// What is known about a call before it runs: its algorithm and predicted times.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The engine that runs it, and where its data goes if it has a choice.
    pub engine: &'static str,
    /// Every candidate with its predicted time, best first.
    pub candidates: Vec<Prediction>,
    /// What could do the call, and gives the bits that were promised, but is not considered unless
    /// it is forced; best first.
    pub others: Vec<Prediction>,
    /// The one that runs.
    pub chosen: Algorithm,
}
