//! An order of work on a device.

use std::ffi::{c_int, c_void};

use crate::context::Context;
use crate::error::CudaError;
use crate::event::Event;
use crate::library::{DEVICE_MEMORY, DevicePtr, HOST_MEMORY, NOT_READY, Place, RawStream, Rows};

/// Work on a device that runs in the order in which it was submitted.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: RawStream,
    owned: bool,
}

/// Whether a stream runs what it is given, or records it for a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// It runs it.
    None,
    /// It records it.
    Active,
    /// It was recording, and something that cannot be recorded was submitted.
    Invalidated,
}

/// Copies from pinned memory of fewer bytes than this go as rows. The driver sends what is shorter than 32 KiB along with its
/// commands, by the engine that computes: beside a process that computes, it waits for a turn (418 µs where a copy of
/// rows takes 12). Larger: nothing is lost. Smaller: copies in between wait.
const SHORT: usize = 64 << 10;

/// `CU_STREAM_NON_BLOCKING`: no waiting for the default stream of the process.
const NON_BLOCKING: u32 = 1;

impl Stream {
    /// A stream of its own, which does not wait for the default stream. Of its priorities, smaller
    /// numbers are more urgent ([`Context::priorities`]); others are moved into that range.
    pub fn new(context: &Context, priority: i32) -> Result<Stream, CudaError> {
        let mut raw = RawStream::NULL;
        // SAFETY: the context is current.
        unsafe { context.enter()?.call.stream_create(&mut raw, NON_BLOCKING, priority)? };
        Ok(Stream { context: context.clone(), raw, owned: true })
    }

    /// A stream of somebody else, such as PyTorch; null is the default stream.
    ///
    /// # Safety
    /// It is a `CUstream` of this context that outlives the result.
    pub unsafe fn borrowed(context: &Context, stream: *mut c_void) -> Stream {
        Stream { context: context.clone(), raw: RawStream(stream), owned: false }
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The driver's name of it, a `CUstream`.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw.0
    }

    /// Whether all that was submitted is done.
    pub fn query(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream is alive.
        ready(unsafe { self.context.enter()?.call.stream_query(self.raw) })
    }

    /// Waits until all that was submitted is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { self.context.enter()?.call.stream_synchronize(self.raw) }
    }

    /// What is submitted from now on waits for the event as it was last recorded; the caller does not.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: stream and event are alive.
        unsafe { self.context.enter()?.call.stream_wait(self.raw, event.raw(), 0) }
    }

    /// The event happens when all that was submitted until now is done.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: stream and event are alive.
        unsafe { self.context.enter()?.call.event_record(event.raw(), self.raw) }
    }

    /// Whether it records for a graph.
    pub fn capture(&self) -> Result<Capture, CudaError> {
        let mut status: c_int = 0;
        // SAFETY: the stream is alive.
        unsafe { self.context.enter()?.call.stream_capturing(self.raw, &mut status)? };
        Ok(match status {
            0 => Capture::None,
            1 => Capture::Active,
            _ => Capture::Invalidated,
        })
    }

    /// Copies from host memory. From memory that is not pinned the call may wait for the copy.
    ///
    /// # Safety
    /// Both are valid for that many bytes until the copy is done, and nothing else writes them.
    pub unsafe fn copy_to_device(
        &self,
        into: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.copy_to_device(into, from.cast(), bytes, self.raw) }
    }

    /// Copies from pinned host memory by an engine that only copies, so that no turn of those that compute is waited for.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_device`]; the host memory is pinned or registered.
    pub unsafe fn copy_from_pinned(
        &self,
        into: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if !(2..SHORT).contains(&bytes) {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_to_device(into, from, bytes) };
        }
        let entered = self.context.enter()?;
        let width = bytes / 2;
        // Two rows; of an odd number of bytes the last two are copied once more.
        let last = bytes - 2;
        let copies = [(0, width), (last, 1)];
        for &(at, width) in &copies[..1 + bytes % 2] {
            let place = |memory, host, device| Place {
                x: 0,
                y: 0,
                memory,
                host,
                device,
                array: std::ptr::null_mut(),
                pitch: width,
            };
            let rows = Rows {
                from: place(HOST_MEMORY, from.wrapping_add(at).cast(), DevicePtr::default()),
                into: place(DEVICE_MEMORY, std::ptr::null(), into.offset(at)),
                width,
                height: 2,
            };
            // SAFETY: the rows lie within the caller's bytes.
            unsafe { entered.call.copy_rows(&rows, self.raw)? };
        }
        Ok(())
    }

    /// Copies into host memory. Into memory that is not pinned the call may wait for the copy.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_device`].
    pub unsafe fn copy_to_host(
        &self,
        into: *mut u8,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.copy_to_host(into.cast(), from, bytes, self.raw) }
    }

    /// Copies within the device.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_device`].
    pub unsafe fn copy_on_device(
        &self,
        into: DevicePtr,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.copy_on_device(into, from, bytes, self.raw) }
    }

    /// Copies between any two addresses that the driver knows: of devices, pinned or registered host
    /// memory, memory of other processes.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_device`].
    pub unsafe fn copy(
        &self,
        into: DevicePtr,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.copy(into, from, bytes, self.raw) }
    }

    /// Copies between two devices, whether or not they can reach each other's memory.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_device`]; each address is one of its context.
    pub unsafe fn copy_to_peer(
        &self,
        into: (&Context, DevicePtr),
        from: (&Context, DevicePtr),
        bytes: usize,
    ) -> Result<(), CudaError> {
        let (into_context, from_context) = (into.0.raw(), from.0.raw());
        let entered = self.context.enter()?;
        // SAFETY: the caller's promise.
        unsafe {
            entered.call.copy_to_peer(into.1, into_context, from.1, from_context, bytes, self.raw)
        }
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// The address is valid for that many bytes until it is done, and nothing else touches them.
    pub unsafe fn fill(&self, into: DevicePtr, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.fill_bytes(into, byte, bytes, self.raw) }
    }

    /// Sets words of four bytes.
    ///
    /// # Safety
    /// As for [`Stream::fill`], for `count` aligned words.
    pub unsafe fn fill_words(
        &self,
        into: DevicePtr,
        word: u32,
        count: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.fill_words(into, word, count, self.raw) }
    }

    /// Memory that what is submitted after this may use, until [`Stream::free`].
    pub fn allocate(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        let mut pointer = DevicePtr::default();
        // SAFETY: the stream is alive.
        unsafe {
            self.context.enter()?.call.memory_allocate_async(&mut pointer, bytes, self.raw)?;
        }
        Ok(pointer)
    }

    /// Frees memory of [`Stream::allocate`] when all that was submitted until now is done.
    ///
    /// # Safety
    /// It is such memory, and nothing that is submitted after this uses it.
    pub unsafe fn free(&self, pointer: DevicePtr) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.context.enter()?.call.memory_free_async(pointer, self.raw) }
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made here, and this is its last use. What was submitted runs to its end.
            self.context.last(|call| unsafe { call.stream_destroy(self.raw) });
        }
    }
}

/// What a query says: done, not yet, or what went wrong.
pub(crate) fn ready(answer: Result<(), CudaError>) -> Result<bool, CudaError> {
    match answer {
        Ok(()) => Ok(true),
        Err(CudaError::Call { code: NOT_READY, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
