//! Calls in the order of the caller's stream.
//!
//! An engine works on a stream of its own. A call on the caller's stream begins, on the device, when that
//! stream has come to where it was when the engine took up the call, and the caller's stream goes on when the
//! engine's has come to the end of the call. A call without a stream ends when the device has done it.

use unisono_collective::{Error, InvalidCall, Request};

use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::fold::FoldError;
use crate::stream::{Capture, Stream};

/// Two points in the order of streams: where a call begins, and where it ends.
pub struct Order {
    /// Where the caller's stream is when a call begins.
    begin: Event,
    /// Where the engine's stream is when a call ends.
    end: Event,
}

impl Order {
    pub fn new(context: &Context) -> Result<Order, CudaError> {
        let event = || Event::new(context, EventKind::Ordering);
        Ok(Order { begin: event()?, end: event()? })
    }

    /// Whether a call may be made on its stream: one that records for a graph is refused, for the host takes
    /// part in every call.
    pub fn check(context: &Context, request: &Request<'_>) -> Result<(), Error> {
        let Some(stream) = Order::caller(context, request) else { return Ok(()) };
        match stream.capture().map_err(failed)? {
            Capture::None => Ok(()),
            Capture::Active | Capture::Invalidated => Err(InvalidCall::Recording.into()),
        }
    }

    /// The stream of a call.
    pub fn caller(context: &Context, request: &Request<'_>) -> Option<Stream> {
        // SAFETY: the maker of the request has promised that it is a stream of the device.
        request.stream().map(|raw| unsafe { Stream::borrowed(context, raw) })
    }

    /// Where the caller's stream is now, for streams of the engine to wait for.
    pub fn mark(&self, caller: Option<&Stream>) -> Result<Option<&Event>, CudaError> {
        let Some(caller) = caller else { return Ok(None) };
        caller.record(&self.begin)?;
        Ok(Some(&self.begin))
    }

    /// Lets the engine's stream wait for where the caller's is now.
    pub fn begin(&self, caller: Option<&Stream>, engine: &Stream) -> Result<(), CudaError> {
        let Some(caller) = caller else { return Ok(()) };
        caller.record(&self.begin)?;
        engine.wait(&self.begin)
    }

    /// Lets the caller's stream wait for where the engine's is now; whether there is one to wait.
    pub fn end(&self, caller: Option<&Stream>, engine: &Stream) -> Result<bool, CudaError> {
        let Some(caller) = caller else { return Ok(false) };
        engine.record(&self.end)?;
        caller.wait(&self.end)?;
        Ok(true)
    }
}

/// The driver refused something in the middle of a call.
pub fn failed(error: impl Into<FoldError>) -> Error {
    Error::System { what: "a call on a device", reason: error.into().to_string() }
}
