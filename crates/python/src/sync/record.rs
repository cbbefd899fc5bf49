//! What is known of the steps so far. A thread may ask at any time: also in the middle of a call that
//! waits, and after the end.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use unisono_sync::BucketTimes;

/// A bucket that travelled: its bytes, and when that began and ended, in nanoseconds of the Unix
/// clock.
pub type BucketTransfer = (usize, u64, u64);

/// The record of a replica.
#[derive(Default)]
pub struct ReplicaRecord {
    steps: AtomicU64,
    /// As it was counted last.
    sent: AtomicU64,
    transfers: Mutex<Vec<BucketTransfer>>,
}

impl ReplicaRecord {
    /// Steps that have ended.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// So many steps have ended.
    pub fn set_steps(&self, steps: u64) {
        self.steps.store(steps, Ordering::Relaxed);
    }

    /// Bytes that had been sent when they were counted last.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Notes how many bytes have been sent; that many.
    pub fn note_sent(&self, sent: u64) -> u64 {
        self.sent.store(sent, Ordering::Relaxed);
        sent
    }

    /// The buckets of the last call that had some.
    pub fn transfers(&self) -> Vec<BucketTransfer> {
        self.transfers.lock().expect("no panic while locked").clone()
    }

    /// Notes the buckets of a call.
    pub fn note_transfers(&self, buckets: &[BucketTimes]) {
        let unix = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        let now = Instant::now();
        let at = |instant: Instant| unix.saturating_sub((now - instant).as_nanos() as u64);
        let seen = buckets.iter().map(|of| (of.bytes, at(of.started), at(of.ended)));
        let mut transfers = self.transfers.lock().expect("no panic while locked");
        transfers.clear();
        transfers.extend(seen);
    }
}
