//! Waits that Ctrl-C ends.
//!
//! Python notices signals on its main thread, and only while that runs Python. So what waits is done
//! by a thread of its own, while the caller's looks for signals now and then.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{Builder, scope};

use pyo3::prelude::*;

use crate::signals::CHECK_EVERY;

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
            receive(&outcome).inspect_err(|_| stop())
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
        // After Ctrl-C no thread receives the outcome, and it is dropped here.
        let waiting = move || drop(done.send(wait()));
        Builder::new().name("unisono-wait".into()).spawn(waiting)?;
        receive(&outcome)
    })
}

/// Waits for the outcome, and lets Python handle signals meanwhile.
fn receive<T>(outcome: &Receiver<T>) -> PyResult<T> {
    loop {
        match outcome.recv_timeout(CHECK_EVERY) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => Python::attach(|py| py.check_signals())?,
            Err(RecvTimeoutError::Disconnected) => panic!("a wait ended without an outcome"),
        }
    }
}
