//! What the machine could do at best, measured in the same run.

mod links;
mod memory;

use std::time::Duration;

use unisono::{Group, Reduction};

pub use links::{Ring, link_rate};
pub use memory::Neighbours;

/// Time spent on one measurement of a limit.
const BUDGET: Duration = Duration::from_millis(60);

fn slowest(group: &Group, rate: f64) -> anyhow::Result<f64> {
    let mut rates = [rate];
    group.all_reduce(&mut rates, Reduction::Min)?;
    Ok(rates[0])
}
