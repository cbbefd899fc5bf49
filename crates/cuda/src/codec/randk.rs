//! randk: some elements, drawn at random (`kernels/randk.cu`).

use unisono_codec::randk::{self, share};
use unisono_codec::{Key, Task, Wire, elements};

use super::Placement;
use super::code::{Codecs, Family, THREADS};
use super::raw::{Into, Owed};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Elements of a block of threads that adds gradients to residuals: 4 vectors for each thread.
const TILE: usize = THREADS * 4 * 4;

/// A share of the elements, and how they travel.
#[derive(Clone, Copy, Debug)]
pub(super) struct RandK {
    pub(super) rate: f64,
    pub(super) wire: Wire,
}

/// `Strata` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Strata {
    key: u64,
    elements: u64,
    count: u64,
    start: u64,
    length: u64,
    longer: u64,
}

impl Strata {
    pub(super) fn new(key: Key, elements: usize, count: usize) -> Strata {
        let (start, length, longer) = randk::Strata::new(key, elements, count).layout();
        Strata {
            key: key.bits(),
            elements: elements as u64,
            count: count as u64,
            start: start as u64,
            length: length as u64,
            longer: longer as u64,
        }
    }
}

#[repr(C)]
struct Absorb {
    owed: Owed,
    elements: u64,
}

#[repr(C)]
struct Encode {
    owed: Owed,
    strata: Strata,
    encoding: DevicePtr,
    wire: u64,
}

#[repr(C)]
struct Decode {
    encoding: DevicePtr,
    strata: Strata,
    into: Into,
    wire: u64,
}

impl RandK {
    fn strata(self, task: &Task<'_>) -> Strata {
        let elements = elements(task.shape);
        Strata::new(task.shared_key(), elements, share(self.rate, elements))
    }

    fn wire(self) -> u64 {
        match self.wire {
            Wire::F32 => 0,
            Wire::Fp16 => 1,
            Wire::Bf16 => 2,
        }
    }

    /// # Safety
    /// As for [`DeviceCodec::encode`](super::DeviceCodec::encode).
    pub(super) unsafe fn encode(
        self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        gradient: DevicePtr,
        residual: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CudaError> {
        let strata = self.strata(task);
        let owed = match residual {
            None => Owed::new(Some(gradient), None),
            Some(residual) => {
                // SAFETY: the caller's promise.
                unsafe { absorb(codecs, stream, gradient, residual, task.elements())? };
                Owed::new(None, Some(residual))
            }
        };
        let call = Encode { owed, strata, encoding, wire: self.wire() };
        let blocks = (strata.count as usize).div_ceil(THREADS);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::RandK, "randk_encode", blocks, call) }
    }

    /// # Safety
    /// As for [`DeviceCodec::decode`](super::DeviceCodec::decode).
    pub(super) unsafe fn decode(
        self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        encoding: DevicePtr,
        into: DevicePtr,
        placement: Placement,
    ) -> Result<(), CudaError> {
        let strata = self.strata(task);
        let call = Decode { encoding, strata, into: Into::new(into, placement), wire: self.wire() };
        let blocks = (strata.count as usize).div_ceil(THREADS);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe {
            if placement == Placement::Overwrite && task.elements() > 0 {
                stream.fill_words(into, 0, task.elements())?;
            }
            codecs.launch(stream, Family::RandK, "randk_decode", blocks, call)
        }
    }
}

impl RandK {
    /// Reads the chosen elements of all values, as f32, whatever they travel as.
    ///
    /// # Safety
    /// As for [`DeviceCodec::encode_round`](super::DeviceCodec::encode_round).
    pub(super) unsafe fn gather(
        self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        values: DevicePtr,
        into: DevicePtr,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            RandK { wire: Wire::F32, ..self }.encode(codecs, stream, task, values, None, into)
        }
    }

    /// Writes f32 to the chosen elements; the others stay as they are.
    ///
    /// # Safety
    /// As for [`DeviceCodec::decode_rounds`](super::DeviceCodec::decode_rounds).
    pub(super) unsafe fn scatter(
        self,
        codecs: &Codecs,
        stream: &Stream,
        task: &Task<'_>,
        values: DevicePtr,
        into: DevicePtr,
    ) -> Result<(), CudaError> {
        let strata = self.strata(task);
        let into = Into::new(into, Placement::Overwrite);
        let wire = RandK { wire: Wire::F32, ..self }.wire();
        let call = Decode { encoding: values, strata, into, wire };
        let blocks = (strata.count as usize).div_ceil(THREADS);
        // SAFETY: the kernel takes such a call; the rest is the caller's promise.
        unsafe { codecs.launch(stream, Family::RandK, "randk_decode", blocks, call) }
    }

    /// How many elements are chosen.
    pub(super) fn chosen(self, elements: usize) -> usize {
        share(self.rate, elements)
    }
}

/// Adds a gradient to its residual.
///
/// # Safety
/// Both are valid for so many f32 until it is done, and nothing else touches the residual.
pub(super) unsafe fn absorb(
    codecs: &Codecs,
    stream: &Stream,
    gradient: DevicePtr,
    residual: DevicePtr,
    elements: usize,
) -> Result<(), CudaError> {
    let owed = Owed::new(Some(gradient), Some(residual));
    let blocks = elements.div_ceil(if owed.is_aligned() { TILE } else { THREADS });
    let call = Absorb { owed, elements: elements as u64 };
    // SAFETY: the kernel takes such a call; the rest is the caller's promise.
    unsafe { codecs.launch(stream, Family::RandK, "randk_absorb", blocks, call) }
}
