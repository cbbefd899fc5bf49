//! An operation under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono_collective::Error;

use crate::closable::PATIENCE;
use crate::deadline::{self, Deadlines};
use crate::device::{Flight, failed};
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
    /// Of a call on a device.
    pub flight: Option<Arc<Flight>>,
}

impl Work {
    /// Lets a stream of the device wait for a call that has ended on the host.
    fn lead(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        let (Some(flight), Some(stream)) = (&self.flight, stream) else { return Ok(()) };
        // SAFETY: the caller says that it is a stream of the device.
        let led = unsafe { flight.precede(stream) };
        led.map_err(|error| self.site.failed(py, &failed(error)))
    }

    /// Runs a call of host memory that has not begun on this thread, which would only wait for it. From then on it is a
    /// blocking call, also if a signal interrupts it.
    fn run_if_next(&self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        if self.flight.is_some() || self.work.is_done() || self.deadlines.is_forked() {
            return Ok(());
        }
        let (_, interruption) = py.detach(|| {
            let _noted = self.deadlines.note(limit);
            let _rests = self.work.program_rests();
            signals::during(|| self.work.run_if_next())
        });
        interruption.map_or(Ok(()), Err)
    }

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
    /// `seconds`, ends the group and raises `TimedOut`. A call on a device may have ended on the host only:
    /// from then on `stream` waits for its end.
    #[pyo3(signature = (seconds, stream=None))]
    fn wait(&self, py: Python<'_>, seconds: f64, stream: Option<usize>) -> PyResult<()> {
        let limit = deadline::limit(seconds);
        let end = Instant::now() + limit;
        self.run_if_next(py, limit)?;
        let _waits = self.work.waits_here();
        // In DDP this is the thread of `backward`, when it is over.
        let _rests = self.work.program_rests();
        loop {
            let until = end.min(Instant::now() + signals::CHECK_EVERY);
            match py.detach(|| self.work.wait_until(until)) {
                Some(Ok(())) => return self.lead(py, stream),
                Some(Err(error)) => return Err(self.site.failed(py, &error)),
                None if Instant::now() >= end => {
                    return self.time_out(py, limit).and_then(|()| self.lead(py, stream));
                }
                None => py.check_signals()?,
            }
        }
    }

    /// Whether the operation has ended, well or not; a call on a device, on the host.
    fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// Whether the operation has ended, on the device too if it is a call on one.
    fn has_landed(&self) -> bool {
        self.work.is_done()
            && self.flight.as_ref().is_none_or(|flight| {
                // An error of the device shows where a stream is to wait for the end.
                let _ = flight.submitted();
                flight.has_landed()
            })
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
