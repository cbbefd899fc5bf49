//! A point in the order of a stream.

use crate::context::Context;
use crate::error::CudaError;
use crate::library::{RawEvent, RawHandle};
use crate::stream::ready;

/// Happens when the work before it in a stream is done. Streams, of this and of other processes, and
/// threads can wait for it.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: RawEvent,
}

/// What an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EventKind {
    /// To measure time. A thread that waits for it spins.
    Timing = 0,
    /// To order work, the cheapest. A thread that waits for it sleeps.
    Ordering = 1 | 2,
    /// As `Ordering`, between processes.
    Interprocess = 1 | 2 | 4,
}

/// An event as other processes of the host know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventHandle(pub [u8; 64]);

impl Event {
    /// An event that has happened already: it was never recorded.
    pub fn new(context: &Context, kind: EventKind) -> Result<Event, CudaError> {
        let mut raw = RawEvent::NULL;
        // SAFETY: the context is current.
        unsafe { context.enter()?.call.event_create(&mut raw, kind as u32)? };
        Ok(Event { context: context.clone(), raw })
    }

    /// An event of another process, in which it was made [`EventKind::Interprocess`].
    pub fn open(context: &Context, handle: EventHandle) -> Result<Event, CudaError> {
        let mut raw = RawEvent::NULL;
        // SAFETY: the driver checks the handle.
        unsafe { context.enter()?.call.event_open(&mut raw, RawHandle(handle.0))? };
        Ok(Event { context: context.clone(), raw })
    }

    /// What another process needs to open it.
    pub fn handle(&self) -> Result<EventHandle, CudaError> {
        let mut handle = RawHandle([0; 64]);
        // SAFETY: the event is alive.
        unsafe { self.context.enter()?.call.event_handle(&mut handle, self.raw)? };
        Ok(EventHandle(handle.0))
    }

    /// Whether it has happened.
    pub fn query(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        ready(unsafe { self.context.enter()?.call.event_query(self.raw) })
    }

    /// Waits until it has happened.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { self.context.enter()?.call.event_synchronize(self.raw) }
    }

    /// Seconds from an earlier event to this one. Both are for timing and have happened.
    pub fn seconds_since(&self, start: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        let entered = self.context.enter()?;
        // SAFETY: both events are alive.
        unsafe { entered.call.event_elapsed(&mut milliseconds, start.raw, self.raw)? };
        Ok(f64::from(milliseconds) / 1e3)
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made or opened here, and this is its last use. The driver keeps what still waits for it.
        self.context.last(|call| unsafe { call.event_destroy(self.raw) });
    }
}
