//! Memory that is kept from call to call; its content is not.

use crate::context::Context;
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;

/// What memory is for. Each has its own.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    /// What travels as it is, and flags.
    Plain,
    /// Encodings of this rank.
    Outgoing,
    /// Encodings of others.
    Incoming,
    /// Encodings of means.
    Means,
    /// What was decoded, to be added up.
    Decoded,
}

/// Memory of a device that grows as it is needed.
pub(super) struct Scratch {
    context: Context,
    /// By use.
    memory: [Option<DeviceMemory>; 5],
}

impl Scratch {
    pub(super) fn new(context: &Context) -> Scratch {
        Scratch { context: context.clone(), memory: [const { None }; 5] }
    }

    /// So many bytes, with any content; the address is a multiple of 256. What was got for the same use before is
    /// gone: the driver waits until nothing uses it.
    pub(super) fn of(&mut self, purpose: Use, bytes: usize) -> Result<DevicePtr, CudaError> {
        let place = &mut self.memory[purpose as usize];
        if place.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            *place = None;
            *place = Some(DeviceMemory::new(&self.context, bytes)?);
        }
        Ok(place.as_ref().expect("allocated").pointer())
    }
}
