//! Runs Python callbacks when operations end.
//!
//! Not on the thread that ends them: it serves the whole group, and would wait for the interpreter's
//! lock. And not on one thread only: a callback may wait for another operation, whose callback then
//! needs a thread too (torch's PowerSGD hook does just that). So there is always one more thread
//! than callbacks that are running; threads that are not needed are kept for the next burst.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// The threads that run callbacks, and what they have to do.
#[derive(Default)]
pub struct Dispatcher {
    state: Mutex<State>,
    /// A callback came, or the end.
    arrival: Condvar,
    /// A thread has ended.
    departure: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Py<PyAny>>,
    /// Threads that have not ended.
    threads: usize,
    /// Those of them that wait for a callback.
    idle: usize,
    closed: bool,
}

impl Dispatcher {
    /// Calls `callback` soon, on a thread of its own.
    pub fn call(self: &Arc<Self>, callback: Py<PyAny>) {
        let mut state = self.lock();
        state.waiting.push_back(callback);
        if state.idle >= state.waiting.len() {
            self.arrival.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let own = self.clone();
        let name = "unisono-callbacks".into();
        if let Err(error) = std::thread::Builder::new().name(name).spawn(move || own.serve()) {
            // The callback waits for a thread that is there already to be free.
            log::error!("cannot start a thread for callbacks: {error}");
            self.lock().threads -= 1;
        }
    }

    /// Ends the threads once they have nothing left to do. Callbacks that come later are still
    /// called. To be called without the interpreter's lock, or the last callbacks cannot run.
    pub fn close(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        state.closed = true;
        self.arrival.notify_all();
        while state.threads > 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
            state = self.departure.wait_timeout(state, left).expect("no panic while locked").0;
        }
    }

    fn serve(&self) {
        while let Some(callback) = self.next() {
            // An interpreter that is about to end gives no thread its lock; then no Python code is
            // left that could wait for the callback.
            Python::try_attach(|py| {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
                drop(callback);
            });
        }
        self.lock().threads -= 1;
        self.departure.notify_all();
    }

    /// The next callback; none once there will be none.
    fn next(&self) -> Option<Py<PyAny>> {
        let mut state = self.lock();
        loop {
            if let Some(callback) = state.waiting.pop_front() {
                return Some(callback);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            state = self.arrival.wait(state).expect("no panic while locked");
            state.idle -= 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }
}
