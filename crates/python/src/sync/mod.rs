//! Replicas that are kept in step: `unisono-sync`, for Python.
//!
//! [`Synchronizer`] takes the gradients of every step, [`DeviceExchange`] and [`DeviceSums`] those that stay on a device,
//! [`LocalSteps`] the weights of workers that agree now and then. All have threads and connections of their own, which they give up when they
//! are closed.
//!
//! The library counts on callers that keep to the order of a step, and panics where one does not.
//! Python is not such a caller: what would panic, or wait for ever, is refused here.

mod buffers;
mod device_exchange;
mod device_sums;
mod device_tasks;
mod local;
mod member;
mod record;
mod saved;
mod settings;
mod synchronizer;

pub use device_exchange::DeviceExchange;
pub use device_sums::DeviceSums;
pub use local::LocalSteps;
pub use synchronizer::{Sums, Synchronizer};

use pyo3::prelude::*;
use unisono_collective::Rank;
use unisono_sync::shards::Shards;

use crate::error::{Operation, Site};

/// The shards of a worker: the first, and the one after the last.
#[pyfunction]
pub fn shards_of(
    py: Python<'_>,
    shards: usize,
    worker: usize,
    workers: usize,
) -> PyResult<(usize, usize)> {
    let site = Site { rank: Rank(worker), operation: Operation::Collective("sharding") };
    if worker >= workers {
        return Err(site.invalid(py, "a worker's number is below the number of workers"));
    }
    let all = Shards::new(shards, workers).map_err(|e| site.invalid(py, &e.to_string()))?;
    let own = all.of(worker, workers);
    Ok((own.start, own.end))
}
