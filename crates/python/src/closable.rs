//! What has threads or connections of its own, until it is closed.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pyo3::prelude::*;
use unisono_collective::AbortHandle;

use crate::error::Site;

/// How long closing waits for callbacks, and for operations whose group was ended. They end at once
/// unless something is wrong. Longer: then a program ends later. Shorter: on a busy machine, a
/// callback is cut off.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// How long dropping waits for calls under way, where the program did not close what it drops.
/// Longer: a call that the other ranks never make keeps this rank for longer. Shorter: calls that
/// were started and not waited for fail if the other ranks are late.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// Holds what only the process that made it can use, and only until it is closed.
pub struct Closable<T: Send + Sync + 'static> {
    held: Arc<Mutex<Option<Arc<T>>>>,
    /// What ends the calls that it waits for, if it waits for any.
    ends: Mutex<Option<AbortHandle>>,
    rank: usize,
    /// The process that made it. A child of `fork` has its memory but not its threads.
    process: u32,
}

impl<T: Send + Sync + 'static> Closable<T> {
    /// For a rank; closing it ends, if it takes too long, the calls that it waits for.
    pub fn new(held: T, ends: Option<AbortHandle>, rank: usize) -> Closable<T> {
        let held = Arc::new(Mutex::new(Some(Arc::new(held))));
        Closable { held, ends: Mutex::new(ends), rank, process: std::process::id() }
    }

    /// From now on it waits for other calls, which this ends.
    pub fn waits_for(&self, ends: Option<AbortHandle>) {
        *self.ends.lock().expect("no panic while locked") = ends;
    }

    /// What it holds, if this process can use it; `what` names it in an error.
    pub fn open(&self, py: Python<'_>, site: Site, what: &str) -> PyResult<Arc<T>> {
        if self.is_forked() {
            let text = format!(
                "{what} was made before this process was forked, and cannot be used here; start \
                 workers by spawn, or let them make their own"
            );
            return Err(site.unusable(py, &text));
        }
        let held = self.lock().clone();
        held.ok_or_else(|| site.unusable(py, &format!("{what} was closed; make another")))
    }

    /// Reads something of what it holds, unless it was closed. Locked meanwhile: this thread must not
    /// be the one that drops it last.
    pub fn read<R>(&self, read: impl FnOnce(&T) -> R) -> Option<R> {
        self.lock().as_deref().map(read)
    }

    /// Drops what it holds, without the interpreter's lock; whether it held something that this
    /// process can use. If that takes longer than `limit`, ends the calls that it waits for, on all
    /// ranks.
    pub fn close(&self, py: Python<'_>, limit: Duration) -> bool {
        if self.is_forked() {
            return false;
        }
        let Some(held) = self.lock().take() else { return false };
        let ends = self.ends.lock().expect("no panic while locked").clone();
        py.detach(|| leave(held, ends.as_ref(), limit, self.rank));
        true
    }

    /// As `close`, for what the program did not close.
    pub fn close_dropped(&self) -> bool {
        if self.is_forked() {
            // Dropping would wait for threads that are not here, and the lock may be held by one of
            // them. One reference more, and what is held is never dropped.
            std::mem::forget(self.held.clone());
            return false;
        }
        // The interpreter drops its objects while it is locked, and callbacks need it.
        Python::attach(|py| self.close(py, DROP_LIMIT))
    }

    /// Whether this process is a child of the one that made it.
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<T>>> {
        self.held.lock().expect("no panic while locked")
    }
}

impl<T: Send + Sync + 'static> Drop for Closable<T> {
    fn drop(&mut self) {
        self.close_dropped();
    }
}

/// Drops a group, or what has one, on another thread, so that waiting for its calls can be ended.
fn leave(held: impl Send + 'static, ends: Option<&AbortHandle>, limit: Duration, rank: usize) {
    let (gone, wait) = mpsc::channel::<()>();
    let leaving = move || {
        drop(held);
        drop(gone);
    };
    // If there is no thread to be had, the closure, and what it holds, is dropped here.
    if let Err(error) = std::thread::Builder::new().name("unisono-leave".into()).spawn(leaving) {
        log::warn!("rank {rank} left its group without a limit of time: {error}");
    }
    if wait.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
        log::error!("rank {rank} leaves while calls wait for others");
        if let Some(ends) = ends {
            ends.abort("it left while a call that it had started waited for others");
        }
        let _ = wait.recv_timeout(PATIENCE);
    }
}
