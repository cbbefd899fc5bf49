//! Calls on the memory of a device, in the order of its streams.
//!
//! A call that is waited for at once runs in the order of the caller's stream. One that is started must not
//! keep that stream waiting, and must see no more than what was submitted to it before. So it runs in the
//! order of a *side stream*, which waits for where the caller's stream is now, and which no other call uses
//! until the engine has submitted this one. Then an event is recorded on the side stream, and a stream that
//! is to see the result waits for it. From its start until that event has happened the call is a *flight*,
//! which keeps the memory alive: the allocator of PyTorch knows nothing of our streams.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use unisono_collective::engine::{MakeEngine, Memory};
use unisono_collective::{BadSetting, Error, InvalidCall, Request};
use unisono_cuda::{Capture, Context, CudaError, DeviceOptions, Driver, Event, EventKind, Stream};

/// What every rank says before the group of a device forms.
pub const GREETING: &[u8; 16] = b"unisono device 1";

/// Side streams of a group. More: more of the driver's resources. Fewer: of calls that are started before the
/// first of them is taken up, more share a stream, and the first then waits for where the program was at the last.
const SIDES: usize = 32;

/// The engine for the memory of a device, by its number in this process, as the environment asks for it.
pub fn engine(number: u32) -> Result<Arc<MakeEngine>, BadSetting> {
    let options = DeviceOptions::from_env()?;
    Ok(unisono_cuda::engine(move || Driver::load()?.device(number), options))
}

/// The device of a group.
pub struct Device {
    number: u32,
    context: Context,
    pool: Arc<Pool>,
    /// In the order in which they were started.
    flights: Mutex<VecDeque<Arc<Flight>>>,
}

/// Side streams, and events that no flight uses.
#[derive(Default)]
struct Pool {
    sides: Mutex<Vec<Arc<Stream>>>,
    events: Mutex<Vec<Event>>,
}

impl Pool {
    /// A side stream that no other flight has; one that several share, if as many are under way.
    fn side(&self, context: &Context) -> Result<Arc<Stream>, CudaError> {
        let mut sides = self.sides.lock().expect("no panic while locked");
        if let Some(side) = sides.iter().min_by_key(|side| Arc::strong_count(side))
            && (Arc::strong_count(side) == 1 || sides.len() >= SIDES)
        {
            return Ok(side.clone());
        }
        let side = Arc::new(Stream::new(context, 0)?);
        sides.push(side.clone());
        Ok(side)
    }

    fn event(&self, context: &Context) -> Result<Event, CudaError> {
        let event = self.events.lock().expect("no panic while locked").pop();
        event.map_or_else(|| Event::new(context, EventKind::Ordering), Ok)
    }
}

/// A call that was started, until a device has done it.
pub struct Flight {
    context: Context,
    pool: Arc<Pool>,
    /// The caller's stream when it was started.
    started_on: usize,
    /// Until the engine has submitted the call.
    side: Mutex<Option<Arc<Stream>>>,
    /// Where the caller's stream was at the start; once the engine has submitted the call, its end.
    event: Option<Event>,
    keep: Mutex<Option<Py<PyAny>>>,
}

impl Device {
    /// A device that the driver of this process has.
    pub fn new(number: u32) -> Result<Device, CudaError> {
        let context = Context::new(&Driver::load()?.device(number)?)?;
        Ok(Device { number, context, pool: Arc::default(), flights: Mutex::default() })
    }

    /// Its number in this process.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// A call that is waited for, in the order of a stream of the caller's.
    ///
    /// # Safety
    /// The memory of the request is this device's, and `stream` is a stream of it.
    pub unsafe fn ordered<'a>(
        &self,
        request: Request<'a>,
        stream: usize,
    ) -> Result<Request<'a>, Error> {
        // SAFETY: passed on from the caller.
        unsafe {
            self.refuse_recording(stream)?;
            let request = request.in_memory(Memory::Device(self.number));
            Ok(request.on_stream(stream as *mut c_void))
        }
    }

    /// A call that is started, with what keeps its memory, and its flight; it is to be
    /// [noted](Device::note) once the call was submitted.
    ///
    /// # Safety
    /// As of [`Device::ordered`].
    pub unsafe fn start<'a>(
        &self,
        request: Request<'a>,
        stream: usize,
        keep: Py<PyAny>,
    ) -> Result<(Request<'a>, Arc<Flight>), Error> {
        // First: to ask for events would spoil the recording.
        // SAFETY: passed on from the caller.
        unsafe { self.refuse_recording(stream)? };
        self.forget_landed();
        // SAFETY: passed on from the caller.
        let flight = unsafe { self.take_off(stream, keep) }.map_err(failed)?;
        let side = flight.lock_side().as_ref().map(|side| side.as_raw()).expect("not landed yet");
        // SAFETY: the memory is the device's, by the caller's promise; the side stream is the flight's until
        // the call has ended.
        let request = unsafe { request.in_memory(Memory::Device(self.number)).on_stream(side) };
        Ok((request, flight))
    }

    /// Keeps the memory of a flight until the device has done the call.
    pub fn note(&self, flight: &Arc<Flight>) {
        self.flights.lock().expect("no panic while locked").push_back(flight.clone());
    }

    /// Lets go of the memory of all flights: the group has left, and its engine works no more.
    pub fn forget_all(&self) {
        self.flights.lock().expect("no panic while locked").clear();
    }

    fn forget_landed(&self) {
        let mut flights = self.flights.lock().expect("no panic while locked");
        while flights.front().is_some_and(|flight| flight.has_landed()) {
            flights.pop_front();
        }
    }

    /// # Safety
    /// As of [`Device::ordered`].
    unsafe fn take_off(&self, stream: usize, keep: Py<PyAny>) -> Result<Arc<Flight>, CudaError> {
        let (side, event) = (self.pool.side(&self.context)?, self.pool.event(&self.context)?);
        // SAFETY: passed on from the caller.
        let caller = unsafe { Stream::borrowed(&self.context, stream as *mut c_void) };
        caller.record(&event)?;
        side.wait(&event)?;
        Ok(Arc::new(Flight {
            context: self.context.clone(),
            pool: self.pool.clone(),
            started_on: stream,
            side: Mutex::new(Some(side)),
            event: Some(event),
            keep: Mutex::new(Some(keep)),
        }))
    }

    /// Refuses a stream that records for a graph, before the call has a number that other ranks count on.
    ///
    /// # Safety
    /// As of [`Device::ordered`].
    unsafe fn refuse_recording(&self, stream: usize) -> Result<(), Error> {
        // SAFETY: passed on from the caller.
        let stream = unsafe { Stream::borrowed(&self.context, stream as *mut c_void) };
        match stream.capture().map_err(failed)? {
            Capture::None => Ok(()),
            Capture::Active | Capture::Invalidated => Err(InvalidCall::Recording.into()),
        }
    }
}

impl Flight {
    /// The engine has submitted the call, or given it up: notes its end on the device. To be called when the
    /// call has ended on the host; does nothing the second time.
    pub fn submitted(&self) -> Result<(), CudaError> {
        let mut side = self.lock_side();
        // Under the lock: a thread that finds no side stream finds the event recorded.
        side.take().map_or(Ok(()), |side| side.record(self.event()))
    }

    /// Lets a stream wait for the end of the call, which has ended on the host.
    ///
    /// # Safety
    /// It is a stream of the device.
    pub unsafe fn precede(&self, stream: usize) -> Result<(), CudaError> {
        self.submitted()?;
        // SAFETY: passed on from the caller.
        let caller = unsafe { Stream::borrowed(&self.context, stream as *mut c_void) };
        caller.wait(self.event())?;
        // Memory that the caller frees now is used again by that stream, in its order.
        if stream == self.started_on {
            self.let_go();
        }
        Ok(())
    }

    /// Whether the device has done the call. An error of the device shows where the next call is made.
    pub fn has_landed(&self) -> bool {
        self.lock_side().is_none() && self.event().query().unwrap_or(true)
    }

    fn let_go(&self) {
        drop(self.keep.lock().expect("no panic while locked").take());
    }

    fn event(&self) -> &Event {
        self.event.as_ref().expect("there until it is dropped")
    }

    fn lock_side(&self) -> MutexGuard<'_, Option<Arc<Stream>>> {
        self.side.lock().expect("no panic while locked")
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.pool.events.lock().expect("no panic while locked").extend(self.event.take());
    }
}

/// The driver refused what orders a call.
pub fn failed(error: CudaError) -> Error {
    Error::System { what: "a call on a device", reason: error.to_string() }
}
