//! Whether the program of a rank computes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Counts who says that the program rests, and lets helpers sleep until one does.
#[derive(Default)]
pub struct Rest {
    resting: AtomicU32,
    sleepers: AtomicU32,
    asleep: (Mutex<()>, Condvar),
}

impl Rest {
    /// The program rests until what this returns is dropped.
    pub fn begin(self: &Arc<Rest>) -> Resting {
        self.resting.fetch_add(1, Ordering::SeqCst);
        // A helper announces itself and then looks whether the program rests; one of the two sees the other.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
        Resting { rest: self.clone() }
    }

    /// Whether the program rests.
    pub fn is_on(&self) -> bool {
        self.resting.load(Ordering::SeqCst) > 0
    }

    /// Sleeps until the program rests, or `end` is set and the sleepers are woken.
    pub fn wait(&self, end: &AtomicBool) {
        let (lock, woken) = &self.asleep;
        let mut guard = lock.lock().expect("no panic while locked");
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.is_on() && !end.load(Ordering::SeqCst) {
            guard = woken.wait(guard).expect("no panic while locked");
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the sleepers.
    pub fn wake(&self) {
        let (lock, woken) = &self.asleep;
        // A sleeper that has looked is asleep when the lock is free.
        drop(lock.lock().expect("no panic while locked"));
        woken.notify_all();
    }
}

/// The program of a rank rests: the cores on which it computes are idle.
pub struct Resting {
    rest: Arc<Rest>,
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.rest.resting.fetch_sub(1, Ordering::SeqCst);
    }
}
