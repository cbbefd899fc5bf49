//! Something with threads of its own, until it is closed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use unisono_collective::AbortHandle;

use crate::error::Site;
use crate::group::{FAREWELL, leave};

/// Holds what only the process that made it can use, and only until it is closed.
pub struct Lease<T: Send + Sync + 'static> {
    held: Mutex<Option<Arc<T>>>,
    /// What ends the calls that it waits for, if it waits for any.
    ends: Option<AbortHandle>,
    rank: usize,
    /// Who made it. A child of `fork` has its memory but not its threads.
    process: u32,
}

impl<T: Send + Sync + 'static> Lease<T> {
    /// For a rank; closing it ends, if it takes too long, the calls that it waits for.
    pub fn new(held: T, ends: Option<AbortHandle>, rank: usize) -> Lease<T> {
        let held = Mutex::new(Some(Arc::new(held)));
        Lease { held, ends, rank, process: std::process::id() }
    }

    /// What it holds, if this process can use it.
    pub fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<T>> {
        if self.is_forked() {
            let text = "it was made before this process was forked, and cannot be used here";
            return Err(site.unusable(py, text));
        }
        let held = self.held.lock().expect("no panic while locked").clone();
        held.ok_or_else(|| site.unusable(py, "it was closed; make another"))
    }

    /// Drops what it holds, without the interpreter's lock. If that takes longer than `limit`, ends the
    /// calls that it waits for, on all ranks.
    pub fn close(&self, py: Python<'_>, limit: Duration) {
        if self.is_forked() {
            return;
        }
        if let Some(held) = self.take() {
            py.detach(|| leave(held, self.ends.as_ref(), limit, self.rank));
        }
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn take(&self) -> Option<Arc<T>> {
        self.held.lock().expect("no panic while locked").take()
    }
}

impl<T: Send + Sync + 'static> Drop for Lease<T> {
    fn drop(&mut self) {
        let Some(held) = self.take() else { return };
        if self.is_forked() {
            // Dropping would wait for threads that are not here.
            std::mem::forget(held);
            return;
        }
        Python::attach(|py| py.detach(|| leave(held, self.ends.as_ref(), FAREWELL, self.rank)));
    }
}
