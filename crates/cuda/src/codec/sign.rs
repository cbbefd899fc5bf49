//! sign: a bit for each element, and a scale for each block (`kernels/sign.cu`).

use super::code::{Codecs, Family, THREADS};
use super::raw::{Into, Owed};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Elements that a block of threads encodes: a block of 2048 for each warp.
const TILE: usize = THREADS / 32 * 2048;

#[repr(C)]
struct Encode {
    owed: Owed,
    encoding: DevicePtr,
    elements: u64,
}

#[repr(C)]
struct Decode {
    encoding: DevicePtr,
    into: Into,
    elements: u64,
    fault: DevicePtr,
}

/// Encodes a run of blocks of what is owed.
///
/// # Safety
/// As for [`DeviceCodec::encode_span`](super::DeviceCodec::encode_span).
pub(super) unsafe fn encode(
    codecs: &Codecs,
    stream: &Stream,
    owed: Owed,
    elements: usize,
    encoding: DevicePtr,
) -> Result<(), CudaError> {
    let call = Encode { owed, encoding, elements: elements as u64 };
    let name = ["sign_encode", owed.suffix()].concat();
    // SAFETY: the kernel takes such a call; the rest is the caller's promise.
    unsafe { codecs.launch(stream, Family::Sign, &name, elements.div_ceil(TILE), call) }
}

/// Decodes a run of blocks.
///
/// # Safety
/// As for [`DeviceCodec::decode_span`](super::DeviceCodec::decode_span); `fault` is a word of eight bytes.
pub(super) unsafe fn decode(
    codecs: &Codecs,
    stream: &Stream,
    encoding: DevicePtr,
    elements: usize,
    into: Into,
    fault: DevicePtr,
) -> Result<(), CudaError> {
    let call = Decode { encoding, into, elements: elements as u64, fault };
    // SAFETY: the kernel takes such a call; the rest is the caller's promise.
    unsafe { codecs.launch(stream, Family::Sign, "sign_decode", elements.div_ceil(TILE), call) }
}
