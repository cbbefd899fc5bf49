//! Waits that Ctrl-C ends.
//!
//! Python notices signals on its main thread, and only while that runs Python. So what waits is done
//! by a thread of its own, while the caller's looks for signals now and then.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{Builder, scope};
use std::time::Duration;

use pyo3::prelude::*;

/// How often a wait looks for Ctrl-C. Longer: it answers later. Shorter: more of nothing.
const LOOK: Duration = Duration::from_millis(100);

/// Runs `wait`, which may borrow, without the interpreter's lock. After Ctrl-C, `stop` must make it
/// end soon.
pub fn borrowing<T: Send>(
    py: Python<'_>,
    stop: impl FnOnce() + Send,
    wait: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    py.detach(|| {
        scope(|scope| {
            let (done, outcome) = mpsc::channel();
            let waiting = move || drop(done.send(wait()));
            Builder::new().name("unisono-wait".into()).spawn_scoped(scope, waiting)?;
            // The end of the scope waits for the thread, which uses what it borrowed until then.
            look(&outcome).inspect_err(|_| stop())
        })
    })
}

/// Runs `wait` without the interpreter's lock. After Ctrl-C it is left alone, to end when it can.
pub fn owning<T: Send + 'static>(
    py: Python<'_>,
    wait: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    py.detach(|| {
        let (done, outcome) = mpsc::channel();
        // If nobody wants the outcome any more, it is dropped here.
        let waiting = move || drop(done.send(wait()));
        Builder::new().name("unisono-wait".into()).spawn(waiting)?;
        look(&outcome)
    })
}

fn look<T>(outcome: &Receiver<T>) -> PyResult<T> {
    loop {
        match outcome.recv_timeout(LOOK) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => Python::attach(|py| py.check_signals())?,
            Err(RecvTimeoutError::Disconnected) => panic!("a wait ended without an outcome"),
        }
    }
}
