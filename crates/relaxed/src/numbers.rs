//! Numbers of workers that must not be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Steps that a worker has finished.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Clock(pub u64);

impl Clock {
    /// Before the first step.
    pub const START: Clock = Clock(0);

    /// After one more step.
    pub fn next(self) -> Clock {
        Clock(self.0 + 1)
    }

    /// Steps from another clock to this one; 0 if the other is further.
    pub fn lead_over(self, other: Clock) -> u64 {
        self.0.saturating_sub(other.0)
    }

    /// Steps between two clocks, whichever is further.
    pub fn distance(self, other: Clock) -> u64 {
        self.0.abs_diff(other.0)
    }
}

/// The number of a worker's life. A later start of the same worker has a larger one, so that a worker that
/// was started again is told from its former self.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Life(pub u64);

impl Life {
    /// The number of the life after this one.
    pub fn next(self) -> Life {
        Life(self.0.saturating_add(1))
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
