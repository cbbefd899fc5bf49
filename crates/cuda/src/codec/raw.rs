//! What kernels take, as `kernels/codec.cuh` has it.

use super::{CodecError, Placement};
use crate::library::DevicePtr;

/// What is encoded: a gradient, a residual, or their sum.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Owed {
    /// Null for none.
    gradient: DevicePtr,
    /// Null for none.
    residual: DevicePtr,
    aligned: u32,
    unused: u32,
}

impl Owed {
    pub(super) fn new(gradient: Option<DevicePtr>, residual: Option<DevicePtr>) -> Owed {
        let (gradient, residual) = (gradient.unwrap_or_default(), residual.unwrap_or_default());
        let aligned = u32::from(is_vector(gradient) && is_vector(residual));
        Owed { gradient, residual, aligned, unused: 0 }
    }

    pub(super) fn is_aligned(&self) -> bool {
        self.aligned != 0
    }

    /// What kernels with error feedback are called, after the name of those without.
    pub(super) fn suffix(&self) -> &'static str {
        if self.residual == DevicePtr::default() { "" } else { "_owed" }
    }
}

/// Where decoded values go.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Into {
    values: DevicePtr,
    adds: u32,
    aligned: u32,
}

impl Into {
    pub(super) fn new(values: DevicePtr, placement: Placement) -> Into {
        let adds = u32::from(placement == Placement::Add);
        Into { values, adds, aligned: u32::from(is_vector(values)) }
    }

    pub(super) fn is_aligned(&self) -> bool {
        self.aligned != 0
    }
}

/// Whether floats at an address can be read 16 bytes at a time.
fn is_vector(DevicePtr(address): DevicePtr) -> bool {
    address.is_multiple_of(16)
}

/// Refuses an address that no f32 can have.
pub(super) fn expect_f32(pointer: Option<DevicePtr>) -> Result<(), CodecError> {
    match pointer {
        Some(DevicePtr(address)) if !address.is_multiple_of(4) => {
            Err(CodecError::Misaligned { address })
        }
        _ => Ok(()),
    }
}
