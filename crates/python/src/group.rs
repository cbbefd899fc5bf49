//! A group of ranks.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use unisono_collective::{Epoch, Error};

use crate::deadline::{self, Deadlines};
use crate::dispatch::Dispatcher;
use crate::error::{Operation, Site, not_formed};
use crate::request::Call;
use crate::work::Work;

/// How long closing a group waits for callbacks, and for operations whose epoch was ended. They end
/// at once unless something is wrong. Longer: then a program ends later. Shorter: on a busy
/// machine, a callback is cut off.
const PATIENCE: Duration = Duration::from_secs(2);

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
        Group {
            rank: group.rank(),
            size: group.size(),
            deadlines: Deadlines::new(group.epoch().clone()),
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

    fn site(&self, operation: Operation) -> Site {
        Site { rank: self.rank, operation }
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
    fn within<C>(&self, py: Python<'_>, seconds: f64, site: Site, call: C) -> PyResult<()>
    where
        C: FnOnce() -> Result<(), Error> + Send,
    {
        let limit = deadline::limit(seconds);
        let outcome = py.detach(|| {
            let _noted = self.deadlines.note(limit);
            call()
        });
        outcome.map_err(|error| match error {
            Error::EpochEnded { .. } if self.deadlines.have_passed() => site.timed_out(py, limit),
            error => site.failed(py, &error),
        })
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
    /// Runs a call and waits for it, at most `seconds`. The caller keeps its memory alive, and away
    /// from others, meanwhile.
    fn run(&self, py: Python<'_>, call: Call, seconds: f64) -> PyResult<()> {
        let site = self.site(Operation::Collective(call.name()));
        let request = call.request().map_err(|text| site.invalid(py, text))?;
        let group = self.open(py, site)?;
        self.within(py, seconds, site, move || {
            // SAFETY: the caller keeps the memory valid and to itself until this returns.
            unsafe { group.run(request) }
        })
    }

    /// Starts a call on memory that `keep` owns. Nobody else uses it until the call has ended.
    fn submit(&self, py: Python<'_>, call: Call, keep: Py<PyAny>) -> PyResult<Work> {
        let site = self.site(Operation::Collective(call.name()));
        let request = call.request().map_err(|text| site.invalid(py, text))?;
        let group = self.open(py, site)?;
        // SAFETY: `keep` owns the memory and is kept until the call has ended; the caller leaves it
        // alone until then.
        let work = unsafe { group.submit(request) };
        self.started(py, site, work, keep)
    }

    /// Exchanges blocks of these many bytes, and waits for it, at most `seconds`. The caller keeps
    /// the memory alive, and away from others, meanwhile.
    fn all_to_all_unequal(
        &self,
        py: Python<'_>,
        input: usize,
        sent: Vec<usize>,
        output: usize,
        received: Vec<usize>,
        seconds: f64,
    ) -> PyResult<()> {
        let site = self.site(Operation::Collective("all-to-all"));
        let group = self.open(py, site)?;
        let too_long = |_| site.invalid(py, "the blocks add up to more than there can be");
        let (from, to) = (total(&sent).map_err(too_long)?, total(&received).map_err(too_long)?);
        // SAFETY: the caller keeps the memory valid until this returns, and does not change it.
        let input: &[u8] = unsafe { slice(input, from) };
        // SAFETY: as above, and neither the input nor anybody else's memory overlaps it.
        let output: &mut [u8] = unsafe { slice_mut(output, to) };
        self.within(py, seconds, site, move || {
            group.all_to_all_unequal(input, &sent, output, &received)
        })
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
        let site = self.site(Operation::Send { to, tag });
        let group = self.open(py, site)?;
        // SAFETY: `keep` owns the memory and is kept until the work is done; the caller does not
        // change it until then.
        let work = unsafe { group.submit_send(address as *mut u8, length, to, tag) };
        self.started(py, site, work, keep)
    }

    /// Starts to receive `length` bytes, which `keep` owns and nobody uses until they are there.
    fn receive(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        from: usize,
        tag: u32,
        keep: Py<PyAny>,
    ) -> PyResult<Work> {
        let site = self.site(Operation::Receive { from, tag });
        let group = self.open(py, site)?;
        // SAFETY: `keep` owns the memory and is kept until the work is done; the caller leaves it
        // alone until then.
        let work = unsafe { group.submit_receive(address as *mut u8, length, from, tag) };
        self.started(py, site, work, keep)
    }

    /// The group of these ranks, in this order. Only they call it, all with the same list.
    fn subgroup(&self, py: Python<'_>, members: Vec<usize>) -> PyResult<Group> {
        let group = self.open(py, self.site(Operation::Collective("forming a sub-group")))?;
        let formed = py.detach(|| group.subgroup(&members));
        Ok(Group::new(formed.map_err(|error| not_formed(py, &error))?))
    }

    /// Ends all groups of the job, here and on the other ranks: whatever waits in them fails.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.open(py, self.site(Operation::Collective("abort")))?;
        py.detach(|| group.epoch().end());
        Ok(())
    }

    /// Leaves the group, after the calls that were started. If they do not end within `seconds`,
    /// ends all groups of the job. Does nothing if the group was closed before, or by a child of
    /// `fork`.
    fn close(&self, py: Python<'_>, seconds: f64) {
        if self.is_forked() {
            return;
        }
        if let Some(group) = self.take() {
            let epoch = group.epoch().clone();
            py.detach(|| leave(group, &epoch, deadline::limit(seconds), self.rank));
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
            let epoch = group.epoch().clone();
            leave(group, &epoch, FAREWELL, self.rank);
            self.dispatcher.close(PATIENCE);
        };
        // The interpreter drops its objects while it is locked, and callbacks need it.
        Python::attach(|py| py.detach(end));
    }
}

/// Drops a group, or what has one, on another thread, so that waiting for its calls can be ended.
pub fn leave(group: impl Send + 'static, epoch: &Epoch, limit: Duration, rank: usize) {
    let (gone, wait) = mpsc::channel::<()>();
    let farewell = move || {
        drop(group);
        drop(gone);
    };
    // If there is no thread to be had, the closure, and the group in it, is dropped here.
    if let Err(error) = std::thread::Builder::new().name("unisono-leave".into()).spawn(farewell) {
        log::warn!("rank {rank} left its group without a limit of time: {error}");
    }
    if wait.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
        log::error!("rank {rank} leaves while calls wait for others; the job's groups are ended");
        epoch.end();
        let _ = wait.recv_timeout(PATIENCE);
    }
}

/// The sum of lengths, or that there is none.
fn total(lengths: &[usize]) -> Result<usize, ()> {
    let sum = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
    sum.filter(|&sum| isize::try_from(sum).is_ok()).ok_or(())
}

/// Memory at an address that Python gave.
///
/// # Safety
/// `length` bytes are there, and nobody changes them, for as long as the result is used.
unsafe fn slice<'a>(address: usize, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: passed on from the caller; not null, since a tensor that holds something is there.
    unsafe { std::slice::from_raw_parts(address as *const u8, length) }
}

/// Memory to write to, at an address that Python gave.
///
/// # Safety
/// `length` bytes are there, and nobody else uses them, for as long as the result is used.
unsafe fn slice_mut<'a>(address: usize, length: usize) -> &'a mut [u8] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: passed on from the caller; not null, since a tensor that holds something is there.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) }
}
