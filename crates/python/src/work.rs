//! An operation under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono_collective::Error;

use crate::deadline::{self, Deadlines};
use crate::dispatch::Dispatcher;
use crate::error::{Operation, Site};

/// How often a wait looks for Ctrl-C. Longer: it answers later. Shorter: more of nothing.
const LOOK: Duration = Duration::from_millis(100);

/// An operation that was started.
#[pyclass(frozen)]
pub struct Work {
    pub work: unisono_collective::Work,
    pub dispatcher: Arc<Dispatcher>,
    pub deadlines: Arc<Deadlines>,
    pub site: Site,
}

impl Work {
    fn failed(&self, py: Python<'_>, error: &Error) -> PyErr {
        self.site.failed(py, error)
    }
}

#[pymethods]
impl Work {
    /// Waits until the operation has ended, and raises its error. If that takes longer than
    /// `seconds`, ends the job's groups and raises `TimedOut`.
    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let limit = deadline::limit(seconds);
        let end = Instant::now() + limit;
        loop {
            let until = end.min(Instant::now() + LOOK);
            match py.detach(|| self.work.wait_until(until)) {
                Some(outcome) => return outcome.map_err(|error| self.failed(py, &error)),
                None if Instant::now() >= end => {
                    py.detach(|| self.deadlines.pass());
                    return Err(self.site.timed_out(py, limit));
                }
                None => py.check_signals()?,
            }
        }
    }

    /// Whether the operation has ended, well or not.
    fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// What went wrong, if the operation has ended and something did.
    fn error(&self, py: Python<'_>) -> Option<PyErr> {
        if !self.work.is_done() {
            return None;
        }
        self.work.wait().err().map(|error| self.failed(py, &error))
    }

    /// Calls `callback` when the operation has ended, on another thread.
    fn then(&self, callback: Py<PyAny>) {
        let dispatcher = self.dispatcher.clone();
        self.work.on_completion(move |_| dispatcher.call(callback));
    }

    /// Whose message this is, if it is one that is received.
    fn source(&self) -> Option<usize> {
        match self.site.operation {
            Operation::Receive { from, .. } => Some(from),
            Operation::Send { .. } | Operation::Collective(_) => None,
        }
    }
}
