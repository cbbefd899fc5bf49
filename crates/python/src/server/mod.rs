//! The parameter server: its workers, and servers on threads of a worker's process.
//!
//! Python finds the servers, and hands over the addresses of weights and gradients. What waits here
//! for a server does so on a thread of its own, so that the caller's can look for Ctrl-C.

mod client;
mod error;
mod in_process;
mod interrupt;
mod optimizer;
mod settings;

use std::borrow::Cow;

use pyo3::prelude::*;
use unisono_cluster::worker::Worker;

use crate::error::not_begun;
pub use client::ServerClient;
pub use in_process::InProcessServer;

/// A worker: its rank, how many there are, where servers are, and the token.
type WorkerInfo = (u32, u32, Option<Vec<String>>, Option<Cow<'static, [u8]>>);

/// Which worker this process is, by its environment.
#[pyfunction]
pub fn worker_from_env(py: Python<'_>) -> PyResult<WorkerInfo> {
    let worker = Worker::from_env().map_err(|error| not_begun(py, error.to_string()))?;
    let token = worker.token.map(|token| Cow::Owned(token.as_bytes().to_vec()));
    Ok((worker.rank, worker.world, worker.servers, token))
}
