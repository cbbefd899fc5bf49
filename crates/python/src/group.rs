//! A group of ranks.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use unisono_collective::{AbortHandle, Error, Rank};

use crate::deadline::{self, Deadlines};
use crate::dispatch::Dispatcher;
use crate::error::{Operation, Site};
use crate::request::{Call, Origin};
use crate::signals;
use crate::work::Work;

/// How long closing a group waits for callbacks, and for operations whose group was ended. They end
/// at once unless something is wrong. Longer: then a program ends later. Shorter: on a busy
/// machine, a callback is cut off.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// How long leaving a group waits where nobody said. Longer: a call that the others never make
/// keeps this rank for longer. Shorter: calls that were started and not waited for fail if the
/// others are late.
pub const FAREWELL: Duration = Duration::from_secs(10);

/// A group of ranks.
#[pyclass(frozen)]
pub struct Group {
    /// This rank, as the group numbers it.
    #[pyo3(get)]
    rank: usize,
    /// Ranks in the group.
    #[pyo3(get)]
    size: usize,
    members: Vec<Rank>,
    /// Until it was closed.
    group: Arc<Mutex<Option<Arc<unisono_collective::Group>>>>,
    deadlines: Arc<Deadlines>,
    dispatcher: Arc<Dispatcher>,
    /// Who made the group. A child of `fork` has its memory but not its threads.
    process: u32,
}

impl Group {
    /// Makes a group of the engine one of Python's.
    pub fn new(group: unisono_collective::Group) -> Group {
        group.stop_waiting_if(signals::interrupt);
        Group {
            rank: group.rank(),
            size: group.size(),
            members: group.members().to_vec(),
            deadlines: Deadlines::new(group.abort_handle()),
            group: Arc::new(Mutex::new(Some(Arc::new(group)))),
            dispatcher: Arc::default(),
            process: std::process::id(),
        }
    }

    /// This rank, as the group numbers it.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What watches over the timeouts of its calls.
    pub fn deadlines(&self) -> &Arc<Deadlines> {
        &self.deadlines
    }

    /// A rank of the group, as errors name it.
    pub fn job_rank(&self, rank: usize) -> Rank {
        self.members.get(rank).copied().unwrap_or(Rank(rank))
    }

    fn site(&self, operation: Operation) -> Site {
        Site { rank: self.job_rank(self.rank), operation }
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// The engine's group, if this process can use it.
    pub fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<unisono_collective::Group>> {
        if self.is_forked() {
            let text = "the group was made before this process was forked, and cannot be used \
                        here; start workers by spawn, or make a group of their own for them";
            return Err(site.unusable(py, text));
        }
        let group = self.group.lock().expect("no panic while locked").clone();
        group.ok_or_else(|| site.unusable(py, "the group was destroyed; make another"))
    }

    fn take(&self) -> Option<Arc<unisono_collective::Group>> {
        self.group.lock().expect("no panic while locked").take()
    }

    /// Waits for `call`, at most `seconds`, without the interpreter's lock.
    fn within<C>(&self, py: Python<'_>, seconds: f64, site: Site, call: C) -> PyResult<u32>
    where
        C: FnOnce() -> Result<u32, Error> + Send,
    {
        let limit = deadline::limit(seconds);
        let (outcome, interruption) = py.detach(|| {
            let _noted = self.deadlines.note(limit);
            signals::during(call)
        });
        match interruption {
            Some(raised) => Err(raised),
            None => outcome.map_err(|error| site.failed(py, &error)),
        }
    }

    fn started(
        &self,
        py: Python<'_>,
        site: Site,
        work: Result<unisono_collective::Work, Error>,
        keep: Py<PyAny>,
    ) -> PyResult<Work> {
        let work = work.map_err(|error| site.failed(py, &error))?;
        // The thread that ends calls has no lock on the interpreter: PyO3 frees the reference when
        // somebody has it next.
        work.on_completion(move |_| drop(keep));
        let (dispatcher, deadlines) = (self.dispatcher.clone(), self.deadlines.clone());
        Ok(Work { work, dispatcher, deadlines, site })
    }
}

#[pymethods]
impl Group {
    /// Runs a call and waits for it, at most `seconds`; its number. The caller keeps its memory alive,
    /// and away from others, meanwhile.
    fn run(&self, py: Python<'_>, call: &Call, origin: &Origin, seconds: f64) -> PyResult<u32> {
        let site = self.site(Operation::Collective(call.name()));
        // SAFETY: the caller keeps the memory valid and to itself until this returns.
        let request = unsafe { call.request(origin) }.map_err(|error| site.failed(py, &error))?;
        let group = self.open(py, site)?;
        self.within(py, seconds, site, move || group.run(request))
    }

    /// Starts a call on memory that `keep` owns. Nobody else uses it until the call has ended.
    fn submit(
        &self,
        py: Python<'_>,
        call: &Call,
        origin: &Origin,
        keep: Py<PyAny>,
    ) -> PyResult<Work> {
        let site = self.site(Operation::Collective(call.name()));
        let group = self.open(py, site)?;
        // SAFETY: `keep` owns the memory and is kept until the call has ended; the caller leaves it
        // alone until then.
        let work = unsafe { call.request(origin).and_then(|request| group.submit(request)) };
        self.started(py, site, work, keep)
    }

    /// Starts to send `length` bytes, which `keep` owns and nobody changes until they are sent.
    fn send(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        to: usize,
        tag: u32,
        keep: Py<PyAny>,
    ) -> PyResult<Work> {
        let site = self.site(Operation::Send { to: self.job_rank(to), tag });
        let group = self.open(py, site)?;
        // SAFETY: `keep` owns the memory and is kept until the work is done; the caller does not
        // change it until then.
        let work = unsafe { group.submit_send(address as *mut u8, length, to, tag) };
        self.started(py, site, work, keep)
    }

    /// Starts to receive `length` bytes of a rank, or of any, which `keep` owns and nobody uses until
    /// they are there.
    fn receive(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        from: Option<usize>,
        tag: u32,
        keep: Py<PyAny>,
    ) -> PyResult<Work> {
        let named = from.map(|from| self.job_rank(from));
        let site = self.site(Operation::Receive { from: named, tag });
        let group = self.open(py, site)?;
        // SAFETY: `keep` owns the memory and is kept until the work is done; the caller leaves it
        // alone until then.
        let work = unsafe { group.submit_receive(address as *mut u8, length, from, tag) };
        self.started(py, site, work, keep)
    }

    /// The group of these ranks, in this order. Only they call it, all with the same list.
    fn subgroup(&self, py: Python<'_>, members: Vec<usize>) -> PyResult<Group> {
        let site = self.site(Operation::Collective("new_group"));
        let group = self.open(py, site)?;
        let formed = py.detach(|| group.subgroup(&members));
        Ok(Group::new(formed.map_err(|error| site.not_formed(py, &error))?))
    }

    /// The number of the last call of this rank, also of one that waits in line; 0 before the first.
    fn calls(&self) -> u32 {
        let group = self.group.lock().expect("no panic while locked");
        group.as_ref().map_or(0, |group| group.calls())
    }

    /// Bytes that this rank's collective calls in this group have handed to others so far, by sockets
    /// and shared memory. None once the group is closed.
    fn sent_bytes(&self) -> Option<u64> {
        let group = self.group.lock().expect("no panic while locked");
        group.as_ref().map(|group| group.traffic().total())
    }

    /// Whether the group has ended, by a failure or because it was closed.
    fn has_ended(&self) -> bool {
        self.deadlines.group().has_ended()
            || self.group.lock().expect("no panic while locked").is_none()
    }

    /// Ends the group, here and on the other ranks: whatever waits in it fails and says why.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let group = self.open(py, self.site(Operation::Collective("abort")))?;
        py.detach(|| group.abort(reason));
        Ok(())
    }

    /// Leaves the group, after the calls that were started. If they do not end within `seconds`,
    /// ends the group for all. The others, if they still need this rank, are told `reason`, if there
    /// is one. Does nothing if the group was closed before, or by a child of `fork`.
    #[pyo3(signature = (seconds, reason=None))]
    fn close(&self, py: Python<'_>, seconds: f64, reason: Option<&str>) {
        if self.is_forked() {
            return;
        }
        if let Some(group) = self.take() {
            let ends = group.abort_handle();
            if let Some(reason) = reason {
                ends.leave_because(reason);
            }
            py.detach(|| leave(group, Some(&ends), deadline::limit(seconds), self.rank));
            self.deadlines.close();
            py.detach(|| self.dispatcher.close(PATIENCE));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.is_forked() {
            // Leaving would wait for threads that are not here, and tell the others that this rank
            // is gone. One reference more, and the group is never dropped.
            std::mem::forget(self.group.clone());
            return;
        }
        let Some(group) = self.take() else { return };
        let end = || {
            let ends = group.abort_handle();
            leave(group, Some(&ends), FAREWELL, self.rank);
            self.deadlines.close();
            self.dispatcher.close(PATIENCE);
        };
        // The interpreter drops its objects while it is locked, and callbacks need it.
        Python::attach(|py| py.detach(end));
    }
}

/// Drops a group, or what has one, on another thread, so that waiting for its calls can be ended.
pub fn leave(held: impl Send + 'static, ends: Option<&AbortHandle>, limit: Duration, rank: usize) {
    let (gone, wait) = mpsc::channel::<()>();
    let farewell = move || {
        drop(held);
        drop(gone);
    };
    // If there is no thread to be had, the closure, and what it holds, is dropped here.
    if let Err(error) = std::thread::Builder::new().name("unisono-leave".into()).spawn(farewell) {
        log::warn!("rank {rank} left its group without a limit of time: {error}");
    }
    if wait.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
        log::error!("rank {rank} leaves while calls wait for others");
        if let Some(ends) = ends {
            ends.abort("it left while a call that it had started waited for others");
        }
        let _ = wait.recv_timeout(PATIENCE);
    }
}
