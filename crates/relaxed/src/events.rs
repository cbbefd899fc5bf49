//! What a run tells of itself, to be recorded.
//!
//! There are no common steps to tell of: every gradient goes its own way, and each is one [`Update`], told
//! where it met the weights. A server tells its [`Recorder`]; the threads of
//! [hogwild](crate::hogwild) tell the caller of the run.

use crate::Cause;
pub use crate::adaptive_bound::Move;
use crate::server::core::{Age, PushId};
use crate::server::wire::Measured;

/// One push, and what became of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// Seconds since the run began.
    pub time: f64,
    /// The number of the update of the weights that it is part of, from 1. Pushes that were committed
    /// together share it. 0 if the push was dropped.
    pub update: u64,
    /// Which push.
    pub push: PushId,
    /// How old its weights were.
    pub age: Age,
    /// What the worker measured.
    pub measured: Measured,
}

/// Where a run that goes on after a crash is, by its journal.
#[derive(Clone, Debug)]
pub struct Resumed<'a> {
    /// Updates of the weights. Whatever was recorded beyond them never happened.
    pub updates: u64,
    /// The pushes since the last snapshot. A crash may have left some out of the records, the last ones.
    pub journaled: &'a [Update],
    /// The bound on staleness with which it begins anew, if that adapts.
    pub bound: Option<u64>,
    /// Seconds since the run began.
    pub time: f64,
}

/// Records what happens at one server.
///
/// The server calls it under the lock that orders all its pushes, after it has written the same into its
/// journal and before it acknowledges it. An error ends the run at this server: what cannot be recorded is
/// not acknowledged.
pub trait Recorder: Send {
    /// Fails if another run is recorded here. The server asks before it makes anything of the run durable.
    fn expect_none(&self) -> Result<(), Cause>;

    /// A run begins, with this bound on staleness, if that adapts. Its first snapshot is in the journal.
    fn begin(&mut self, bound: Option<u64>) -> Result<(), Cause>;

    /// A run goes on after a crash.
    fn resume(&mut self, resumed: Resumed<'_>) -> Result<(), Cause>;

    /// Pushes were settled, all at once.
    fn updates(&mut self, updates: &[Update]) -> Result<(), Cause>;

    /// The bound on staleness has moved.
    fn moved(&mut self, change: &Move) -> Result<(), Cause>;
}
