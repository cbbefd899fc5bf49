//! A group of ranks.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use unisono_collective::{Error, Rank, Request};

use crate::allocated::Allocated;
use crate::closable::{Closable, PATIENCE};
use crate::deadline::{self, Deadlines};
use crate::device::{self, Device, Flight, GREETING};
use crate::dispatch::Dispatcher;
use crate::error::{Operation, Site};
use crate::request::{Call, Origin};
use crate::signals;
use crate::work::Work;

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
    group: Closable<unisono_collective::Group>,
    deadlines: Arc<Deadlines>,
    dispatcher: Arc<Dispatcher>,
    /// Why a call failed that may have left the group as it was, such as the receipt of a message.
    failure: Mutex<Option<Error>>,
    /// Where the memory of its collective calls is, if not on the host.
    device: Option<Device>,
}

impl Group {
    /// Makes a group of the engine one of Python's.
    pub fn new(group: unisono_collective::Group) -> Group {
        Group::on(group, None)
    }

    fn on(group: unisono_collective::Group, device: Option<Device>) -> Group {
        group.stop_waiting_if(signals::interrupt);
        let (rank, size, ends) = (group.rank(), group.size(), group.abort_handle());
        Group {
            rank,
            size,
            members: group.members().to_vec(),
            group: Closable::new(group, Some(ends.clone()), rank),
            deadlines: Deadlines::new(ends),
            dispatcher: Arc::default(),
            failure: Mutex::default(),
            device,
        }
    }

    /// This rank, as the group numbers it.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Why it has failed, or a call of it that is noted, if either has; not known once it is closed.
    pub fn failure(&self) -> Option<Error> {
        let noted = self.failure.lock().expect("no panic while locked").clone();
        noted.or_else(|| self.group.read(unisono_collective::Group::failure).flatten())
    }

    /// Notes why a call has failed.
    pub fn note_failure(&self, error: Error) {
        *self.failure.lock().expect("no panic while locked") = Some(error);
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

    /// The engine's group, if this process can use it.
    pub fn open(&self, py: Python<'_>, site: Site) -> PyResult<Arc<unisono_collective::Group>> {
        self.group.open(py, site, "the group")
    }

    /// Ends the threads of a group that was closed.
    fn end_threads(&self) {
        self.deadlines.close();
        self.dispatcher.close(PATIENCE);
        if let Some(device) = &self.device {
            device.forget_all();
        }
    }

    /// Runs a call on the caller's thread, at most for `seconds`.
    fn run_here(
        &self,
        py: Python<'_>,
        site: Site,
        group: &unisono_collective::Group,
        request: Request<'_>,
        seconds: f64,
    ) -> PyResult<()> {
        let (outcome, interruption) = py.detach(|| {
            let _noted = self.deadlines.note(deadline::limit(seconds));
            let _rests = group.program_rests();
            signals::during(|| group.run(request))
        });
        match interruption {
            Some(raised) => Err(raised),
            None => outcome.map(drop).map_err(|error| site.failed(py, &error)),
        }
    }

    /// The device and the stream of a call: both, or neither.
    fn place(
        &self,
        py: Python<'_>,
        site: Site,
        stream: Option<usize>,
    ) -> PyResult<Option<(&Device, usize)>> {
        match (&self.device, stream) {
            (None, None) => Ok(None),
            (Some(device), Some(stream)) => Ok(Some((device, stream))),
            _ => Err(site.invalid(py, "a call on a device has a stream, and no other call has")),
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
        // a thread takes the lock next.
        work.on_completion(move |_| drop(keep));
        Ok(self.work(site, work, None))
    }

    fn work(
        &self,
        site: Site,
        work: unisono_collective::Work,
        flight: Option<Arc<Flight>>,
    ) -> Work {
        let (dispatcher, deadlines) = (self.dispatcher.clone(), self.deadlines.clone());
        Work { work, dispatcher, deadlines, site, flight }
    }
}

#[pymethods]
impl Group {
    /// Runs a call and waits for it, at most `seconds`. The caller keeps its memory alive, and away
    /// from others, meanwhile. On a device it runs in the order of a stream, and may have ended on the host
    /// only.
    #[pyo3(signature = (call, origin, seconds, stream=None))]
    fn run(
        &self,
        py: Python<'_>,
        call: &Call,
        origin: &Origin,
        seconds: f64,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let site = self.site(Operation::Collective(call.name()));
        let group = self.open(py, site)?;
        let place = self.place(py, site, stream)?;
        // SAFETY: the caller keeps the memory valid and to itself until this returns, and on a device, where
        // it is that device's, until the stream has come to the end of the call.
        let request = unsafe {
            call.request(origin).and_then(|request| match place {
                Some((device, stream)) => device.ordered(request, stream),
                None => Ok(request),
            })
        };
        let request = request.map_err(|error| site.failed(py, &error))?;
        self.run_here(py, site, &group, request, seconds)
    }

    /// Starts a call on memory that `keep` owns. The program leaves it alone until the call has ended. On a
    /// device it begins when a stream has come to where it is now.
    #[pyo3(signature = (call, origin, keep, stream=None))]
    fn submit(
        &self,
        py: Python<'_>,
        call: &Call,
        origin: &Origin,
        keep: Py<PyAny>,
        stream: Option<usize>,
    ) -> PyResult<Work> {
        let site = self.site(Operation::Collective(call.name()));
        let group = self.open(py, site)?;
        let Some((device, stream)) = self.place(py, site, stream)? else {
            // SAFETY: `keep` owns the memory and is kept until the call has ended; the caller leaves it
            // alone until then.
            let work = unsafe { call.request(origin).and_then(|request| group.submit(request)) };
            return self.started(py, site, work, keep);
        };
        let started = || {
            // SAFETY: the flight keeps `keep`, which owns memory of the device, until the device has done the
            // call; the caller leaves it alone until then.
            unsafe {
                let (request, flight) = device.start(call.request(origin)?, stream, keep)?;
                Ok((group.submit(request)?, flight))
            }
        };
        let (work, flight) = started().map_err(|error: Error| site.failed(py, &error))?;
        device.note(&flight);
        let own = flight.clone();
        work.on_completion(move |_| {
            if let Err(error) = own.submitted() {
                log::error!("the end of a call on a device was not noted: {error}");
            }
        });
        Ok(self.work(site, work, Some(flight)))
    }

    /// Starts to send `length` bytes, which `keep` owns and the program does not change until they
    /// are sent.
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

    /// Starts to receive `length` bytes of a rank, or of any, into memory that `keep` owns and the
    /// program leaves alone until they are there.
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

    /// Memory of so many bytes, at first 0, that the other ranks of the host read in place. All ranks call it, in the order
    /// of the other calls of this group.
    fn allocate(&self, py: Python<'_>, bytes: usize, seconds: f64) -> PyResult<Allocated> {
        let site = self.site(Operation::Collective("allocate"));
        let group = self.open(py, site)?;
        let (outcome, interruption) = py.detach(|| {
            let _noted = self.deadlines.note(deadline::limit(seconds));
            signals::during(|| group.allocate(bytes))
        });
        match interruption {
            Some(raised) => Err(raised),
            None => outcome.map(Allocated::new).map_err(|error| site.failed(py, &error)),
        }
    }

    /// The group of the same ranks for calls on the memory of a device of each. All ranks call it, in the
    /// order of the other calls of this group.
    fn on_device(
        &self,
        py: Python<'_>,
        number: u32,
        origin: &Origin,
        seconds: f64,
    ) -> PyResult<Group> {
        let site = self.site(Operation::Collective("the first call on a device"));
        let group = self.open(py, site)?;
        let engine =
            device::engine(number).map_err(|error| site.invalid(py, &error.to_string()))?;
        // A numbered call: a rank that makes another one in its place is found out, and named.
        let mut all = vec![0; GREETING.len() * self.size];
        let greeting = Request::all_gather(GREETING, &mut all).with_place(origin.line().cloned());
        self.run_here(py, site, &group, greeting, seconds)?;
        if let Some(rank) = all.chunks_exact(GREETING.len()).position(|said| said != GREETING) {
            let text = format!("rank {} makes another call", self.job_rank(rank));
            py.detach(|| group.abort(&text));
            return Err(site.invalid(py, &text));
        }
        let formed = py.detach(|| group.beside(engine));
        let formed = formed.map_err(|error| site.not_formed(py, &error))?;
        let device =
            Device::new(number).map_err(|error| site.failed(py, &device::failed(error)))?;
        Ok(Group::on(formed, Some(device)))
    }

    /// The number of the device whose memory its calls are on, if they are on one.
    #[getter]
    fn device(&self) -> Option<u32> {
        self.device.as_ref().map(Device::number)
    }

    /// The number of the last call of this rank, also of one that waits in line; 0 before the first.
    fn calls(&self) -> u32 {
        self.group.read(|group| group.calls()).unwrap_or(0)
    }

    /// Bytes that this rank's collective calls in this group have handed to others so far, by sockets
    /// and shared memory. None once the group is closed.
    fn sent_bytes(&self) -> Option<u64> {
        self.group.read(|group| group.traffic().total())
    }

    /// Whether the group has ended, by a failure or because it was closed.
    fn has_ended(&self) -> bool {
        self.deadlines.group().has_ended() || self.group.read(|_| ()).is_none()
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
        if self.group.is_forked() {
            return;
        }
        if let Some(reason) = reason {
            self.deadlines.group().leave_because(reason);
        }
        if self.group.close(py, deadline::limit(seconds)) {
            py.detach(|| self.end_threads());
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.group.close_dropped() {
            Python::attach(|py| py.detach(|| self.end_threads()));
        }
    }
}
