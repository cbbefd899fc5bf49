//! Codecs on the device: the bytes of the host's [codecs](unisono_codec).
//!
//! A [`DeviceCodec`] encodes the gradients of one parameter, or of one bucket, where they are, so that only the
//! encoding leaves the device. What an encoding leaves out is taken from the residual by the same kernel that
//! encodes: a gradient and its residual are read once, and the residual is written once.
//!
//! An encoding has the bytes of a [`Sender`](unisono_codec::Sender) on the host, and either decodes what the
//! other encoded. Only which NaN a NaN is, is not specified: where a sum of gradient and residual is NaN, its
//! bits may differ, and with them its sign in an encoding of `sign` or its value in one of `topk`.
//!
//! Every sum has the host's order, nothing is fused or flushed to zero. What the kernels do, and why it is as
//! fast as memory, is in their sources (`kernels/cast.cu` and others), one for each file here.

mod cast;
mod code;
mod powersgd;
mod quantize;
mod randk;
mod raw;
mod rounds;
mod scale;
mod sign;
mod topk;

use std::sync::Arc;

use unisono_codec::{BadEncoding, Codec, CodecSpec, Key, Task, elements};

use crate::device::Capability;
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use cast::Float;
use powersgd::LowRank;
use quantize::Quantizer;
use randk::RandK;
use raw::{Into, Owed, expect_f32};
use topk::TopK;

pub use code::Codecs;
pub use scale::{DeviceScale, Run};

/// Why something was not encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// There are no kernels for this codec. Nothing was submitted.
    #[error("{codec} has no kernels for devices; encode on the host")]
    NotOnDevice {
        /// The codec.
        codec: String,
    },
    /// The codec does not encode by spans. Nothing was submitted.
    #[error("an encoding of {codec} is of no use in parts")]
    NoSpans {
        /// The codec.
        codec: String,
    },
    /// An address is none that an f32 can have. Nothing was submitted.
    #[error("f32 at the address {address:#x}, which is no multiple of 4 bytes")]
    Misaligned {
        /// The address.
        address: u64,
    },
    /// The device is older than the kernels.
    #[error("a CUDA device of compute capability {capability}; codecs need {oldest} or newer")]
    TooOld {
        /// What it is.
        capability: Capability,
        /// What it would have to be.
        oldest: Capability,
    },
    /// What was decoded was written by no encoder; what it was decoded into holds unspecified values.
    #[error(transparent)]
    Encoding(#[from] BadEncoding),
    /// The driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// What becomes of decoded values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// They replace what is there.
    Overwrite,
    /// They are added to what is there. Elements that a sparse encoding does not hold are not touched.
    Add,
}

/// A codec for one parameter on one device.
///
/// It has memory of its own on the device, which every call uses: what is submitted to several streams, the caller
/// keeps in order.
#[derive(Debug)]
pub struct DeviceCodec {
    codecs: Codecs,
    host: Arc<dyn Codec>,
    name: String,
    shape: Vec<usize>,
    elements: usize,
    method: Method,
    /// What a decoder found: all ones for nothing.
    fault: DeviceMemory,
}

#[derive(Debug)]
enum Method {
    Cast(Float),
    Quantize(Quantizer),
    Sign,
    TopK(Box<TopK>),
    RandK(RandK),
    PowerSgd(Box<LowRank>),
}

impl DeviceCodec {
    /// A codec for parameters of a shape; for a bucket without one, its length.
    ///
    /// # Panics
    /// If a setting of the codec is [out of its range](CodecSpec::check).
    pub fn new(
        codecs: &Codecs,
        spec: &CodecSpec,
        shape: &[usize],
    ) -> Result<DeviceCodec, CodecError> {
        let method = match spec {
            CodecSpec::Fp16 => Method::Cast(Float::Fp16),
            CodecSpec::Bf16 => Method::Cast(Float::Bf16),
            CodecSpec::Int8(rounding) => Method::Quantize(Quantizer::Int8(*rounding)),
            CodecSpec::Int4(rounding) => Method::Quantize(Quantizer::Int4(*rounding)),
            CodecSpec::Qsgd(bits) => Method::Quantize(Quantizer::Qsgd(*bits)),
            CodecSpec::Sign => Method::Sign,
            CodecSpec::TopK(rate, selection, values) => {
                let elements = elements(shape);
                // Counts of elements are 32 bits wide.
                if elements > u32::MAX as usize {
                    return Err(CodecError::NotOnDevice { codec: spec.to_string() });
                }
                Method::TopK(Box::new(TopK::new(codecs, *rate, *selection, *values, elements)?))
            }
            CodecSpec::RandK(rate, wire) => Method::RandK(RandK { rate: *rate, wire: *wire }),
            CodecSpec::PowerSgd(rank, wire) => {
                Method::PowerSgd(Box::new(LowRank::new(codecs, *rank, *wire, shape)?))
            }
            _ => return Err(CodecError::NotOnDevice { codec: spec.to_string() }),
        };
        let fault = DeviceMemory::new(codecs.context(), FAULT)?;
        let stream = Stream::new(codecs.context(), 0)?;
        // SAFETY: the memory has as many bytes, and is nobody else's yet.
        unsafe { stream.fill(fault.pointer(), 0xff, FAULT)? };
        stream.synchronize()?;
        Ok(DeviceCodec {
            codecs: codecs.clone(),
            host: spec.build(),
            name: spec.to_string(),
            shape: shape.to_vec(),
            elements: elements(shape),
            method,
            fault,
        })
    }

    /// Whether what is decoded differs from the gradient on average, so that a residual should be kept.
    pub fn is_biased(&self) -> bool {
        self.host.is_biased()
    }

    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Bytes that an encoding has at the most: the room that [`DeviceCodec::encode`] needs.
    pub fn most_bytes(&self) -> usize {
        match &self.method {
            Method::TopK(topk) => topk.most_bytes(),
            _ => self.host.encoded_bytes(&self.shape),
        }
    }

    /// Submits to a stream: encodes the gradient of a shard into `encoding`. With a residual, that is added to
    /// the gradient before, and is then what was not encoded of the sum.
    ///
    /// # Safety
    /// The gradient and the residual are valid for as many f32 as the parameter has, and the encoding for
    /// [`DeviceCodec::most_bytes`], on the device, until it is done; none overlaps another, and nothing else
    /// touches the last two or writes the first meanwhile. The stream is one of this device's context.
    ///
    /// # Panics
    /// If the task is of another shape.
    pub unsafe fn encode(
        &mut self,
        stream: &Stream,
        task: &Task<'_>,
        shard: usize,
        gradient: DevicePtr,
        residual: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CodecError> {
        assert_eq!(task.shape, self.shape, "the shape that the codec was made for");
        expect_f32(Some(gradient))?;
        expect_f32(residual)?;
        let (codecs, key) = (&self.codecs, task.key(shard));
        // SAFETY: the caller's promise; the span is the whole parameter.
        unsafe {
            match &mut self.method {
                Method::TopK(topk) => {
                    topk.encode(codecs, stream, key, gradient, residual, encoding)?;
                }
                Method::RandK(randk) => {
                    randk.encode(codecs, stream, task, gradient, residual, encoding)?;
                }
                Method::PowerSgd(low_rank) => {
                    low_rank.encode(codecs, stream, task, gradient, residual, encoding)?;
                }
                Method::Cast(_) | Method::Quantize(_) | Method::Sign => {
                    let whole = self.elements;
                    return self.encode_span(stream, key, 0, whole, gradient, residual, encoding);
                }
            }
        }
        Ok(())
    }

    /// Bytes of the encoding that was submitted last. Where that depends on the gradient, this waits until it
    /// is done.
    pub fn length(&self, stream: &Stream) -> Result<usize, CodecError> {
        match &self.method {
            Method::TopK(topk) => Ok(topk.length(stream)?),
            _ => Ok(self.most_bytes()),
        }
    }

    /// Submits to a stream: decodes an encoding of the whole parameter into `into`. Bytes of which only the
    /// device can tell that no encoder wrote them are reported by [`DeviceCodec::check`].
    ///
    /// # Safety
    /// The encoding is valid for `length` bytes and `into` for as many f32 as the parameter has, on the device,
    /// until it is done; they do not overlap, nothing else touches `into` meanwhile or writes the encoding.
    /// The stream is one of this device's context.
    ///
    /// # Panics
    /// If the task is of another shape.
    pub unsafe fn decode(
        &mut self,
        stream: &Stream,
        task: &Task<'_>,
        encoding: DevicePtr,
        length: usize,
        into: DevicePtr,
        placement: Placement,
    ) -> Result<(), CodecError> {
        assert_eq!(task.shape, self.shape, "the shape that the codec was made for");
        expect_f32(Some(into))?;
        let expected = self.most_bytes();
        let codec = self.static_name();
        let (codecs, fault) = (&self.codecs, self.fault.pointer());
        // SAFETY: the caller's promise, and the length is that of the whole parameter.
        unsafe {
            match &mut self.method {
                Method::TopK(topk) => {
                    topk.decode(codecs, stream, encoding, length, into, placement, fault)?;
                }
                _ if length != expected => {
                    return Err(BadEncoding::Length { codec, expected, found: length }.into());
                }
                Method::RandK(randk) => {
                    randk.decode(codecs, stream, task, encoding, into, placement)?;
                }
                Method::PowerSgd(low_rank) => {
                    low_rank.decode(codecs, stream, task, encoding, into, placement)?;
                }
                Method::Cast(_) | Method::Quantize(_) | Method::Sign => {
                    return self.decode_span(stream, encoding, self.elements, into, placement);
                }
            }
        }
        Ok(())
    }

    /// As [`DeviceCodec::encode`], for a run of `elements` of the parameter from its number `first` on, which
    /// begins with a [block](unisono_codec::Spans): the bytes that the whole encoding has there. Only codecs of
    /// which every block, or every element, stands for itself can do so.
    ///
    /// # Safety
    /// As for [`DeviceCodec::encode`], for these elements and the bytes of their encoding.
    #[expect(clippy::too_many_arguments, reason = "one flat call, as on the host")]
    pub unsafe fn encode_span(
        &self,
        stream: &Stream,
        key: Key,
        first: usize,
        elements: usize,
        gradient: DevicePtr,
        residual: Option<DevicePtr>,
        encoding: DevicePtr,
    ) -> Result<(), CodecError> {
        expect_f32(Some(gradient))?;
        expect_f32(residual)?;
        let (codecs, owed) = (&self.codecs, Owed::new(Some(gradient), residual));
        // SAFETY: the caller's promise.
        unsafe {
            match &self.method {
                Method::Cast(float) => {
                    float.encode(codecs, stream, owed, elements, None, encoding)?
                }
                Method::Quantize(quantizer) => {
                    quantizer.encode(codecs, stream, key, first, owed, elements, None, encoding)?;
                }
                Method::Sign => sign::encode(codecs, stream, owed, elements, encoding)?,
                _ => return Err(CodecError::NoSpans { codec: self.name.clone() }),
            }
        }
        Ok(())
    }

    /// As [`DeviceCodec::decode`], for a run of blocks: `encoding` has as many bytes as these have.
    ///
    /// # Safety
    /// As for [`DeviceCodec::decode`], for these elements and the bytes of their encoding.
    pub unsafe fn decode_span(
        &self,
        stream: &Stream,
        encoding: DevicePtr,
        elements: usize,
        into: DevicePtr,
        placement: Placement,
    ) -> Result<(), CodecError> {
        expect_f32(Some(into))?;
        let (codecs, fault) = (&self.codecs, self.fault.pointer());
        let into = Into::new(into, placement);
        // SAFETY: the caller's promise.
        unsafe {
            match &self.method {
                Method::Cast(float) => {
                    float.decode(codecs, stream, encoding, elements, None, into)?
                }
                Method::Quantize(quantizer) => {
                    quantizer.decode(codecs, stream, encoding, elements, None, into, fault)?;
                }
                Method::Sign => sign::decode(codecs, stream, encoding, elements, into, fault)?,
                _ => return Err(CodecError::NoSpans { codec: self.name.clone() }),
            }
        }
        Ok(())
    }

    /// Waits for what was submitted to the stream, and fails if anything that was decoded since the last check
    /// is an encoding that no encoder wrote.
    pub fn check(&self, stream: &Stream) -> Result<(), CodecError> {
        if let Method::TopK(topk) = &self.method
            && let Some(damage) = topk.damage(stream)?
        {
            return Err(damage.into());
        }
        let mut fault = u64::MAX;
        // SAFETY: the word is on the device, and what reads it is waited for before it is touched again.
        unsafe {
            stream.copy_to_host((&raw mut fault).cast(), self.fault.pointer(), FAULT)?;
            stream.synchronize()?;
            if fault == u64::MAX {
                return Ok(());
            }
            stream.fill(self.fault.pointer(), 0xff, FAULT)?;
        }
        let field = if fault >> 32 & 1 == 0 { "scale" } else { "code" };
        let (codec, found) = (self.static_name(), fault & 0xffff_ffff);
        Err(BadEncoding::Field { codec, field, found }.into())
    }

    fn static_name(&self) -> &'static str {
        match &self.method {
            Method::Cast(Float::Fp16) => "fp16",
            Method::Cast(Float::Bf16) => "bf16",
            Method::Quantize(Quantizer::Int8(_)) => "int8",
            Method::Quantize(Quantizer::Int4(_)) => "int4",
            Method::Quantize(Quantizer::Qsgd(_)) => "qsgd",
            Method::Sign => "sign",
            Method::TopK(topk) => topk.values_name(),
            // As the host calls all whose encodings are sums.
            Method::RandK(_) | Method::PowerSgd(_) => "a codec that sums",
        }
    }
}

/// Bytes of the word in which a decoder reports.
const FAULT: usize = 8;
