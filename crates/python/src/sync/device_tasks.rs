//! The exchanges of a step on a device, one after the other, while the program goes on.
//!
//! Each is a task of a group that serves nothing else, on whose thread it waits for the other ranks. On the device they
//! are in the order of one stream of our own, which waits for where the caller's streams were when it handed something
//! over; at the end of the step, the caller's stream waits for ours.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use unisono_collective::{AbortHandle, Error, Group as EngineGroup, Work};
use unisono_cuda::exchange::ExchangeError;
use unisono_cuda::{Context, CudaError, Event, EventKind, Stream};
use unisono_sync::{BucketTimes, SyncError};

use crate::device;
use crate::error::Site;

/// What is under way on a device.
pub struct DeviceTasks<T> {
    group: Arc<EngineGroup>,
    context: Context,
    ours: Arc<Stream>,
    pending: Mutex<VecDeque<Work>>,
    outcomes: (Sender<Outcome<T>>, Mutex<Receiver<Outcome<T>>>),
}

/// What came of a task, and when that was.
type Outcome<T> = Result<(T, BucketTimes), SyncError>;

impl<T> DeviceTasks<T> {
    /// None, over a group that serves nothing else from now on.
    pub fn new(group: Arc<EngineGroup>, context: Context) -> Result<DeviceTasks<T>, CudaError> {
        let ours = Arc::new(Stream::new(&context, 0)?);
        let (to, from) = channel();
        let (pending, outcomes) = (Mutex::default(), (to, Mutex::new(from)));
        Ok(DeviceTasks { group, context, ours, pending, outcomes })
    }

    /// The stream on which the tasks are ordered.
    pub fn stream(&self) -> &Stream {
        &self.ours
    }

    /// What ends them.
    pub fn abort_handle(&self) -> AbortHandle {
        self.group.abort_handle()
    }

    /// Where a stream of the caller's is now.
    ///
    /// # Safety
    /// It is a stream of the device.
    pub unsafe fn reached(&self, stream: usize) -> Result<Event, CudaError> {
        let reached = Event::new(&self.context, EventKind::Ordering)?;
        // SAFETY: the caller's promise.
        unsafe { Stream::borrowed(&self.context, stream as *mut c_void) }.record(&reached)?;
        Ok(reached)
    }

    /// Waits for all tasks, and lets the caller's stream wait for what they have submitted.
    ///
    /// # Safety
    /// It is a stream of the device.
    pub unsafe fn collect(&self, stream: usize) -> Result<(Vec<T>, Vec<BucketTimes>), SyncError> {
        let works: Vec<Work> = self.pending().drain(..).collect();
        let (mut all, mut times, mut failed) = (Vec::new(), Vec::new(), None);
        for work in works {
            // An exchange that fails has an outcome of its own, and one that panics has none.
            let _ = work.wait();
            let from = self.outcomes.1.lock().expect("no panic while locked");
            match from.try_recv().expect("every task is answered") {
                Ok((of_task, of_times)) => {
                    all.push(of_task);
                    times.push(of_times);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            // The program may free the memory of its gradients now.
            let _ = self.ours.synchronize();
            return Err(error);
        }
        let there = || {
            let means = Event::new(&self.context, EventKind::Ordering)?;
            self.ours.record(&means)?;
            // SAFETY: the caller's promise.
            unsafe { Stream::borrowed(&self.context, stream as *mut c_void) }.wait(&means)
        };
        there().map_err(on_device)?;
        Ok((all, times))
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.pending.lock().expect("no panic while locked")
    }
}

impl<T: Send + 'static> DeviceTasks<T> {
    /// Lets `exchange` submit to our stream, which is behind what the caller's streams have reached. So many bytes
    /// travel.
    pub fn submit(
        &self,
        reached: Vec<Event>,
        bytes: usize,
        exchange: impl FnOnce(&Stream) -> Result<T, ExchangeError> + Send + 'static,
    ) {
        let (ours, to) = (self.ours.clone(), self.outcomes.0.clone());
        let (ends, submitted) = (self.group.abort_handle(), Instant::now());
        let work = self.group.submit_task(move || {
            let started = Instant::now();
            let ordered = reached.iter().try_for_each(|event| ours.wait(event));
            let exchanged = ordered.map_err(ExchangeError::from).and_then(|()| exchange(&ours));
            let outcome = exchanged.map_err(sync_error).map(|of_task| {
                let (ended, none) = (Instant::now(), Duration::ZERO);
                let times =
                    BucketTimes { bytes, submitted, started, ended, folding: none, coding: none };
                (of_task, times)
            });
            if let Err(error) = &outcome {
                // The others would wait for this rank.
                ends.abort(&error.to_string());
            }
            to.send(outcome).expect("the receiver waits for its tasks");
        });
        self.pending().push_back(work);
    }
}

impl<T> Drop for DeviceTasks<T> {
    /// The other ranks count on what was submitted, and its memory may be freed after this.
    fn drop(&mut self) {
        self.pending().drain(..).for_each(|work| drop(work.wait()));
        let _ = self.ours.synchronize();
    }
}

/// How far a step on a device has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No step is under way.
    Between,
    /// Buckets come.
    Backward,
    /// A step failed: the replicas are at none.
    Failed,
}

/// The phase that a replica is in.
pub struct Phases(Mutex<Phase>);

impl Default for Phases {
    fn default() -> Phases {
        Phases(Mutex::new(Phase::Between))
    }
}

impl Phases {
    /// Goes on to another phase from the only one in which that is due.
    pub fn turn(&self, py: Python<'_>, site: Site, from: Phase, to: Phase) -> PyResult<()> {
        let mut phase = self.0.lock().expect("no panic while locked");
        if *phase == from {
            *phase = to;
            return Ok(());
        }
        let text = match *phase {
            Phase::Failed => {
                "an earlier step failed, and the replicas are at none; start again from the last checkpoint"
            }
            Phase::Backward => {
                "the step before was not finished; a backward pass that raised leaves its step unfinished, and \
                 there is no going on from it"
            }
            Phase::Between => "it is due after a step has begun",
        };
        Err(site.invalid(py, text))
    }
}

pub fn on_device(error: CudaError) -> SyncError {
    SyncError::Group(device::failed(error))
}

/// As the host's strategy says it.
pub fn sync_error(error: ExchangeError) -> SyncError {
    match error {
        ExchangeError::Group(error) => SyncError::Group(error),
        ExchangeError::Encoding { shard, source } => SyncError::Encoding { shard, source },
        ExchangeError::EncodingOfMean { rank, source } => {
            SyncError::EncodingOfMean { rank, source }
        }
        other => SyncError::Group(Error::System {
            what: "a call on a device",
            reason: other.to_string(),
        }),
    }
}
