//! How many bytes a rank has handed to others, and how long it has added up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that the collective calls of a rank have handed to others since the group formed, counted
/// where they leave: headers included, messages and heartbeats not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Written to sockets.
    pub sockets: u64,
    /// Written to shared memory, or read by others where they were.
    pub shared: u64,
}

impl Traffic {
    /// Both.
    pub fn total(self) -> u64 {
        self.sockets + self.shared
    }
}

/// A [`Traffic`] that is being counted.
#[derive(Default)]
pub struct Meter {
    sockets: AtomicU64,
    shared: AtomicU64,
    /// Whether folds are timed.
    timing: AtomicBool,
    folding: AtomicU64,
}

impl Meter {
    /// Bytes were written to sockets.
    pub fn count_sockets(&self, bytes: usize) {
        self.sockets.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes were written to shared memory.
    pub fn count_shared(&self, bytes: usize) {
        self.shared.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Runs a fold, and times it if that is wanted.
    pub fn fold<R>(&self, fold: impl FnOnce() -> R) -> R {
        if !self.timing.load(Ordering::Relaxed) {
            return fold();
        }
        let start = Instant::now();
        let result = fold();
        self.folding.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    pub(crate) fn time_folds(&self) {
        self.timing.store(true, Ordering::Relaxed);
    }

    pub(crate) fn folding(&self) -> Duration {
        Duration::from_nanos(self.folding.load(Ordering::Relaxed))
    }

    pub(crate) fn read(&self) -> Traffic {
        Traffic {
            sockets: self.sockets.load(Ordering::Relaxed),
            shared: self.shared.load(Ordering::Relaxed),
        }
    }
}
