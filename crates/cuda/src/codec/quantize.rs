//! int8, int4 and qsgd: blocks of codes, each with its scale (`kernels/quantize.cu`).

use unisono_codec::{Key, Rounding};

use super::code::{Codecs, Family, THREADS};
use super::raw::{Into, Owed};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Elements that a block of threads encodes.
const TILE: usize = THREADS * 16;

/// How blocks are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantizer {
    Int8(Rounding),
    Int4(Rounding),
    /// With so many bits.
    Qsgd(u32),
}

#[repr(C)]
struct Encode {
    owed: Owed,
    encoding: DevicePtr,
    elements: u64,
    counted: DevicePtr,
    first: u64,
    key: u64,
    dithers: u32,
    bits: u32,
}

#[repr(C)]
struct Decode {
    encoding: DevicePtr,
    into: Into,
    elements: u64,
    counted: DevicePtr,
    fault: DevicePtr,
    bits: u64,
}

impl Quantizer {
    fn name(self) -> &'static str {
        match self {
            Quantizer::Int8(_) => "int8",
            Quantizer::Int4(_) => "int4",
            Quantizer::Qsgd(_) => "qsgd",
        }
    }

    fn dithers(self) -> bool {
        match self {
            Quantizer::Int8(rounding) | Quantizer::Int4(rounding) => {
                rounding == Rounding::Stochastic
            }
            Quantizer::Qsgd(_) => true,
        }
    }

    fn bits(self) -> u32 {
        match self {
            Quantizer::Int8(_) | Quantizer::Int4(_) => 0,
            Quantizer::Qsgd(bits) => bits,
        }
    }

    /// Encodes a run of blocks of what is owed, of which the first element is the parameter's number `first`.
    ///
    /// # Safety
    /// As for [`DeviceCodec::encode_span`](super::DeviceCodec::encode_span). With `counted`, that is a number
    /// of elements in device memory, at most `elements`.
    #[expect(clippy::too_many_arguments, reason = "one flat call, as its kernel")]
    pub(super) unsafe fn encode(
        self,
        codecs: &Codecs,
        stream: &Stream,
        key: Key,
        first: usize,
        owed: Owed,
        elements: usize,
        counted: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CudaError> {
        let call = Encode {
            owed,
            encoding,
            elements: elements as u64,
            counted: counted.unwrap_or_default(),
            first: first as u64,
            key: key.bits(),
            dithers: u32::from(self.dithers()),
            bits: self.bits(),
        };
        let name = ["quantize_encode_", self.name(), owed.suffix()].concat();
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::Quantize, &name, elements.div_ceil(TILE), call) }
    }

    /// Decodes a run of blocks.
    ///
    /// # Safety
    /// As for [`DeviceCodec::decode_span`](super::DeviceCodec::decode_span); `counted` as above, and `fault`
    /// is a word of eight bytes.
    #[expect(clippy::too_many_arguments, reason = "one flat call, as its kernel")]
    pub(super) unsafe fn decode(
        self,
        codecs: &Codecs,
        stream: &Stream,
        encoding: DevicePtr,
        elements: usize,
        counted: Option<DevicePtr>,
        into: Into,
        fault: DevicePtr,
    ) -> Result<(), CudaError> {
        let call = Decode {
            encoding,
            into,
            elements: elements as u64,
            counted: counted.unwrap_or_default(),
            fault,
            bits: u64::from(self.bits()),
        };
        let name = ["quantize_decode_", self.name()].concat();
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::Quantize, &name, elements.div_ceil(TILE), call) }
    }
}
