//! What the machine could do at best, measured in the same run.

mod links;
mod memory;

use std::time::Duration;

pub use links::{Flow, Ring, link_rate};
pub use memory::Neighbours;

/// Time spent on one measurement of a limit.
const BUDGET: Duration = Duration::from_millis(60);
