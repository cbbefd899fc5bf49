//! fp16 and bf16: each element by itself (`kernels/cast.cu`).

use super::code::{Codecs, Family, THREADS};
use super::raw::{Into, Owed};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Elements that a block of threads casts as vectors: 8 of 4 for each thread.
const TILE: usize = THREADS * 8 * 4;

/// A 16-bit float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    Fp16,
    Bf16,
}

#[repr(C)]
struct Encode {
    owed: Owed,
    encoding: DevicePtr,
    elements: u64,
    aligned: u64,
    counted: DevicePtr,
}

#[repr(C)]
struct Decode {
    encoding: DevicePtr,
    into: Into,
    elements: u64,
    aligned: u64,
    counted: DevicePtr,
}

impl Float {
    /// Casts what is owed.
    ///
    /// # Safety
    /// As for [`DeviceCodec::encode_span`](super::DeviceCodec::encode_span). With `counted`, that is a number
    /// of elements in device memory, at most `elements`.
    pub(super) unsafe fn encode(
        self,
        codecs: &Codecs,
        stream: &Stream,
        owed: Owed,
        elements: usize,
        counted: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CudaError> {
        let aligned = owed.is_aligned() && encoding.0.is_multiple_of(8);
        let name = match self {
            Float::Fp16 => "cast_encode_fp16",
            Float::Bf16 => "cast_encode_bf16",
        };
        let call = Encode {
            owed,
            encoding,
            elements: elements as u64,
            aligned: u64::from(aligned),
            counted: counted.unwrap_or_default(),
        };
        let name = [name, owed.suffix()].concat();
        let blocks = blocks(elements, aligned);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::Cast, &name, blocks, call) }
    }

    /// Undoes it.
    ///
    /// # Safety
    /// As for [`DeviceCodec::decode_span`](super::DeviceCodec::decode_span); `counted` as above.
    pub(super) unsafe fn decode(
        self,
        codecs: &Codecs,
        stream: &Stream,
        encoding: DevicePtr,
        elements: usize,
        counted: Option<DevicePtr>,
        into: Into,
    ) -> Result<(), CudaError> {
        let aligned = into.is_aligned() && encoding.0.is_multiple_of(8);
        let name = match self {
            Float::Fp16 => "cast_decode_fp16",
            Float::Bf16 => "cast_decode_bf16",
        };
        let call = Decode {
            encoding,
            into,
            elements: elements as u64,
            aligned: u64::from(aligned),
            counted: counted.unwrap_or_default(),
        };
        let blocks = blocks(elements, aligned);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::Cast, name, blocks, call) }
    }
}

/// Elements that are in no vector have a thread each.
fn blocks(elements: usize, aligned: bool) -> usize {
    elements.div_ceil(if aligned { TILE } else { THREADS })
}
