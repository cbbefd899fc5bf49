//! An operation under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono_collective::Error;

use crate::closable::PATIENCE;
use crate::deadline::{self, Deadlines};
use crate::dispatch::Dispatcher;
use crate::error::{Operation, Site};
use crate::signals;

/// An operation that was started.
#[pyclass(frozen)]
pub struct Work {
    pub work: unisono_collective::Work,
    pub dispatcher: Arc<Dispatcher>,
    pub deadlines: Arc<Deadlines>,
    pub site: Site,
}

impl Work {
    /// Ends the group because the operation takes too long; what became of the operation.
    fn time_out(&self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        let (group, operation) = (self.deadlines.group(), self.site.operation);
        let outcome = py.detach(|| {
            match operation {
                Operation::Collective(_) => group.expire(limit),
                Operation::Send { .. } | Operation::Receive { .. } => {
                    group.abort(&format!("{operation} did not end within {limit:?}"));
                }
            }
            self.work.wait_until(Instant::now() + PATIENCE)
        });
        match outcome {
            Some(Ok(())) => Ok(()),
            // Ended by the lines above.
            Some(Err(Error::Aborted { peer, .. })) if peer == self.site.rank => {
                Err(self.site.unanswered(py, limit))
            }
            Some(Err(error)) => Err(self.site.failed(py, &error)),
            None => Err(self.site.unanswered(py, limit)),
        }
    }
}

#[pymethods]
impl Work {
    /// Waits until the operation has ended, and raises its error. If that takes longer than
    /// `seconds`, ends the group and raises `TimedOut`.
    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let limit = deadline::limit(seconds);
        let end = Instant::now() + limit;
        let _waits = self.work.waits_here();
        loop {
            let until = end.min(Instant::now() + signals::CHECK_EVERY);
            match py.detach(|| self.work.wait_until(until)) {
                Some(outcome) => return outcome.map_err(|error| self.site.failed(py, &error)),
                None if Instant::now() >= end => return self.time_out(py, limit),
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
        self.work.wait().err().map(|error| self.site.failed(py, &error))
    }

    /// Calls `callback` when the operation has ended, on another thread.
    fn then(&self, callback: Py<PyAny>) {
        let dispatcher = self.dispatcher.clone();
        self.work.on_completion(move |_| dispatcher.call(callback));
    }

    /// Ends the group if the operation has not ended within `seconds` from now.
    fn end_within(&self, seconds: f64) {
        let noted = self.deadlines.note(deadline::limit(seconds));
        self.work.on_completion(move |_| drop(noted));
    }

    /// Whose message this is, if it is one that was received.
    fn source(&self) -> Option<usize> {
        self.work.source()
    }
}
