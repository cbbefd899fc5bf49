//! A device that this process uses.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::device::Device;
use crate::error::CudaError;
use crate::library::{PEER_ACCESS_ALREADY_ENABLED, RawContext, Symbols};

/// The primary context of a device: the one that the CUDA runtime, and so PyTorch, use as well. Its
/// memory and streams are theirs.
///
/// Calls make it current on the calling thread for as long as they take, and leave the thread as it
/// was. A clone is the same context, which lives as long as any of them, and what was made in it.
#[derive(Clone, Debug)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    device: Device,
    raw: RawContext,
}

impl Context {
    /// The primary context of a device. The first one in a process takes a fraction of a second and
    /// some hundred megabytes of device memory.
    pub fn new(device: &Device) -> Result<Context, CudaError> {
        let mut raw = RawContext::NULL;
        // SAFETY: the device exists.
        unsafe { device.driver().call()?.context_retain(&mut raw, device.raw())? };
        Ok(Context(Arc::new(Retained { device: device.clone(), raw })))
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Makes it current on this thread until the result is dropped. Every call does so by itself; a
    /// caller that makes many saves a little time.
    pub fn enter(&self) -> Result<Entered<'_>, CudaError> {
        let call = self.0.device.driver().call()?;
        let mut current = RawContext::NULL;
        // SAFETY: the context is alive as long as `self`.
        unsafe {
            call.context_current(&mut current)?;
            let pushed = current != self.0.raw;
            if pushed {
                call.context_push(self.0.raw)?;
            }
            Ok(Entered { call, pushed, thread: PhantomData })
        }
    }

    /// Waits until the device has done all that was asked of it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the context is current.
        unsafe { self.enter()?.call.context_synchronize() }
    }

    /// Bytes of device memory that are free, and in all.
    pub fn memory_info(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current.
        unsafe { self.enter()?.call.memory_info(&mut free, &mut total)? };
        Ok((free, total))
    }

    /// The priorities that streams can have: the least urgent, and the most urgent, whose number is the
    /// smaller.
    pub fn priorities(&self) -> Result<(i32, i32), CudaError> {
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        // SAFETY: the context is current.
        unsafe { self.enter()?.call.context_priorities(&mut least, &mut greatest)? };
        Ok((least, greatest))
    }

    /// Lets kernels here reach the memory of another device's context.
    pub fn enable_peer(&self, peer: &Context) -> Result<(), CudaError> {
        // SAFETY: both contexts are alive.
        match unsafe { self.enter()?.call.context_enable_peer(peer.0.raw, 0) } {
            Err(CudaError::Call { code: PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
            enabled => enabled,
        }
    }

    pub(crate) fn raw(&self) -> RawContext {
        self.0.raw
    }

    /// Runs what ends the life of something in this context. Its error is of no use to anybody: the
    /// driver may be gone already, because the process ends, or belong to the parent of a fork.
    pub(crate) fn last(&self, end: impl FnOnce(&Symbols) -> Result<(), CudaError>) {
        if let Err(error) = self.enter().and_then(|entered| end(entered.call)) {
            log::debug!("device {}: {error}", self.0.device.number());
        }
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        let released = self.device.driver().call().and_then(|call| {
            // SAFETY: retained when it was made, and everything made in it is gone.
            unsafe { call.context_release(self.device.raw()) }
        });
        if let Err(error) = released {
            log::debug!("device {}: {error}", self.device.number());
        }
    }
}

/// A context that is current on this thread.
pub struct Entered<'a> {
    pub(crate) call: &'a Symbols,
    pushed: bool,
    /// Which context is current is a matter of the thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = RawContext::NULL;
            // SAFETY: the context was pushed on this thread.
            if let Err(error) = unsafe { self.call.context_pop(&mut popped) } {
                log::debug!("{error}");
            }
        }
    }
}
