//! The mean of all ranks' gradients, which are encoded, exchanged and decoded where they are.
//!
//! An [`Exchange`] is the device's side of the host's compressed strategy, for ranks of which each has one shard: its means
//! have the same bits, and so has what it remembers. A gradient goes one of these ways:
//!
//! - `plain`: in one exact all-reduce, together with what is measured of others;
//! - `summed`: its encoding is summed by an all-reduce, in one round or two;
//! - `spans`: every rank averages a part of the elements, and encodes the mean again;
//! - `gathered`: every rank gets all encodings.
//!
//! A [`SumExchange`] is the device's side of the host's way without codecs, for ranks of which each has added up any number
//! of shards.
//!
//! Everything is submitted to one stream. The host waits where ranks wait for each other, and for what only the device
//! knows: how long a sparse encoding is, and whether one was damaged.

mod calls;
mod gathered;
mod plain;
mod scratch;
mod spans;
mod summed;
mod sums;

use std::sync::Arc;

use unisono_codec::{BadEncoding, Codec, CodecSpec, Passage, Task, elements, is_encoded_twice};
use unisono_collective::shards::share;
use unisono_collective::{Dtype, Error, Rank, Reduction};

use crate::codec::{CodecError, Codecs, DeviceCodec, DeviceScale};
use crate::context::Context;
use crate::error::CudaError;
use crate::fold::{FoldError, Folds};
use crate::group::DeviceGroup;
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use calls::Calls;
use scratch::Scratch;

pub use sums::SumExchange;

/// Why gradients were not exchanged. The replicas are at no step.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The group failed: a rank was lost, or the ranks disagree.
    #[error(transparent)]
    Group(#[from] Error),
    /// A codec has no kernels, or the driver refused.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The driver refused a sum.
    #[error(transparent)]
    Fold(#[from] FoldError),
    /// A shard's encoding is none that a codec writes.
    #[error("the encoded gradient of shard {shard} is damaged: {source}")]
    Encoding {
        /// The shard.
        shard: usize,
        /// What is wrong with it.
        source: BadEncoding,
    },
    /// The same, of a mean.
    #[error("the encoded mean of rank {rank} is damaged: {source}")]
    EncodingOfMean {
        /// The rank that encoded it.
        rank: Rank,
        /// What is wrong with it.
        source: BadEncoding,
    },
}

impl From<CudaError> for ExchangeError {
    fn from(error: CudaError) -> ExchangeError {
        ExchangeError::Codec(error.into())
    }
}

/// A parameter whose gradients are exchanged.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchanged {
    /// Its shape.
    pub shape: Vec<usize>,
    /// How it is encoded, if it is.
    pub codec: Option<Encoded>,
}

/// How the gradients of a parameter are encoded.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// The codec.
    pub spec: CodecSpec,
    /// Whether what an encoding leaves out is added to the next gradient.
    pub feeds_back: bool,
    /// Whether gradients are encoded in units of their usual size.
    pub relative: bool,
}

/// What is remembered of a parameter from step to step, in the host's form; empty where there is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Remembered {
    /// What the encodings of this rank's gradients have left out.
    pub residual: Vec<f32>,
    /// What the encodings of means have left out, of this rank's part of the elements.
    pub mean: Vec<f32>,
    /// What all ranks remember alike.
    pub common: Vec<f32>,
    /// What is [known](unisono_codec::scale::Scale::known) of the usual size.
    pub scale: Vec<f32>,
}

/// A gradient of this rank on the device, in whose place comes the mean of all ranks.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGradient {
    /// The number of its parameter.
    pub parameter: usize,
    /// Where it is.
    pub pointer: DevicePtr,
}

/// Exchanges the gradients of the ranks of a group, of which each has one device and one shard.
pub struct Exchange {
    calls: Calls,
    folds: Folds,
    held: Vec<Held>,
    passages: Vec<Shared>,
    /// Steps at the beginning in which nothing is encoded.
    warm_up: u64,
    seed: u64,
    scratch: Scratch,
}

/// What belongs to one parameter.
struct Held {
    shape: Vec<usize>,
    elements: usize,
    /// Which of the codecs it has.
    codec: Option<usize>,
    /// Its own kernels' memory, of codecs whose encodings are no runs of blocks.
    own: Option<DeviceCodec>,
    residual: Option<DeviceMemory>,
    mean: Option<DeviceMemory>,
    scale: Option<DeviceScale>,
}

/// A codec that some parameters have.
struct Shared {
    encoded: Encoded,
    host: Arc<dyn Codec>,
    /// For runs of blocks, of any parameter.
    blocks: Option<DeviceCodec>,
}

impl Exchange {
    /// Over the ranks of a group, which serves nothing else from now on, on a device that it has an engine for. All
    /// ranks give the same parameters and settings. Before anything is submitted this fails with
    /// [`CodecError::NotOnDevice`] if a codec has no kernels.
    pub fn new(
        group: DeviceGroup,
        context: &Context,
        parameters: &[Exchanged],
        warm_up: u64,
        seed: u64,
    ) -> Result<Exchange, ExchangeError> {
        let (codecs, folds) = (Codecs::load(context)?, Folds::load(context)?);
        let stream = Stream::new(context, 0)?;
        let mut exchange = Exchange {
            calls: Calls::new(group),
            folds,
            held: Vec::with_capacity(parameters.len()),
            passages: Vec::new(),
            warm_up,
            seed,
            scratch: Scratch::new(context),
        };
        for (number, parameter) in parameters.iter().enumerate() {
            let held = exchange.hold(&codecs, &stream, number, parameter)?;
            exchange.held.push(held);
        }
        stream.synchronize()?;
        Ok(exchange)
    }

    fn hold(
        &mut self,
        codecs: &Codecs,
        stream: &Stream,
        number: usize,
        parameter: &Exchanged,
    ) -> Result<Held, ExchangeError> {
        let shape = parameter.shape.clone();
        let elements = elements(&shape);
        let (residual, mean, scale, own, codec) = (None, None, None, None, None);
        let mut held = Held { elements, codec, own, residual, mean, scale, shape };
        let Some(encoded) = &parameter.codec else { return Ok(held) };
        let known = self.passages.iter().position(|shared| shared.encoded == *encoded);
        let codec = match known {
            Some(known) => known,
            None => {
                let host = encoded.spec.build();
                let blocks = match host.passage() {
                    Passage::Spans(_) => Some(DeviceCodec::new(codecs, &encoded.spec, &[0])?),
                    Passage::Summed(_) | Passage::Gathered(_) => None,
                };
                self.passages.push(Shared { encoded: encoded.clone(), host, blocks });
                self.passages.len() - 1
            }
        };
        held.codec = Some(codec);
        let zeros = |count: usize| zeros(codecs.context(), stream, count);
        match self.passages[codec].host.passage() {
            Passage::Spans(spans) => {
                if encoded.feeds_back && is_encoded_twice(self.world()) {
                    let own = share(spans.block(), number, elements, self.rank(), self.world());
                    held.mean = Some(zeros(own.len())?);
                }
            }
            Passage::Summed(summed) => {
                let mut own = DeviceCodec::new(codecs, &encoded.spec, &held.shape)?;
                let first =
                    Task { shape: &held.shape, parameter: number, step: 0, seed: self.seed };
                own.remember(stream, &summed.start(&first))?;
                held.own = Some(own);
            }
            Passage::Gathered(_) => {
                held.own = Some(DeviceCodec::new(codecs, &encoded.spec, &held.shape)?);
            }
        }
        // A sparse encoding is one of the residual, even if that is forgotten before every step.
        if encoded.feeds_back || self.is_gathered(codec) {
            held.residual = Some(zeros(elements)?);
        }
        if encoded.relative {
            held.scale = Some(DeviceScale::new(codecs, stream, &held.shape)?);
        }
        Ok(held)
    }

    /// Submits to a stream: replaces gradients of this rank by the means of all ranks, in place. All ranks give the
    /// same parameters in the same order. With `used`, that is a number for each of them on the device, 0 if this
    /// rank has no gradient of it: of a parameter that has none anywhere nothing changes. Which of them had one.
    ///
    /// What was submitted is to be waited for even if this fails.
    ///
    /// # Safety
    /// Every gradient is valid for as many f32 as its parameter has, and `used` for as many f32 as there are
    /// gradients, on the device of the group, until the stream has come that far; none overlaps another, and nothing
    /// else touches them meanwhile. The stream is one of this device's context.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub unsafe fn exchange(
        &mut self,
        step: u64,
        gradients: &[DeviceGradient],
        used: Option<DevicePtr>,
        stream: &Stream,
    ) -> Result<Vec<bool>, ExchangeError> {
        let encodes = step >= self.warm_up;
        let are_used = match used {
            // SAFETY: the caller's promise.
            Some(used) => unsafe { self.find_used(gradients, used, stream)? },
            None => vec![true; gradients.len()],
        };
        let present = gradients.iter().zip(&are_used).filter(|(_, is_used)| **is_used);
        let present: Vec<DeviceGradient> = present.map(|(gradient, _)| *gradient).collect();
        let is_encoded = |of: &&DeviceGradient| encodes && self.held[of.parameter].codec.is_some();
        let (encoded, plain): (Vec<_>, Vec<_>) = present.iter().partition(is_encoded);
        // SAFETY: the caller's promise.
        unsafe { self.exchange_plain(step, &plain, &encoded, stream)? };
        for codec in 0..self.passages.len() {
            let own = |of: &&DeviceGradient| self.held[of.parameter].codec == Some(codec);
            let of_codec: Vec<DeviceGradient> = encoded.iter().filter(own).copied().collect();
            if of_codec.is_empty() {
                continue;
            }
            let task_step = step - self.warm_up;
            let host = self.passages[codec].host.clone();
            // SAFETY: the caller's promise.
            unsafe {
                self.divide_by_scale(&of_codec, stream)?;
                match host.passage() {
                    Passage::Summed(summed) => {
                        self.exchange_summed(summed, codec, task_step, &of_codec, stream)?;
                    }
                    Passage::Spans(spans) => {
                        self.exchange_spans(spans, codec, task_step, &of_codec, stream)?;
                    }
                    Passage::Gathered(_) => {
                        self.exchange_gathered(codec, task_step, &of_codec, stream)?;
                    }
                }
                self.multiply_by_scale(&of_codec, stream)?;
            }
        }
        Ok(are_used)
    }

    /// What is remembered of a parameter. Nothing is under way.
    pub fn remembered(
        &self,
        parameter: usize,
        stream: &Stream,
    ) -> Result<Remembered, ExchangeError> {
        let held = &self.held[parameter];
        let read = |memory: Option<&DeviceMemory>| -> Result<Vec<f32>, CudaError> {
            let Some(memory) = memory else { return Ok(Vec::new()) };
            let mut values = vec![0f32; memory.bytes() / 4];
            // SAFETY: the memory has as many elements, and what is copied is waited for.
            unsafe {
                let into = values.as_mut_ptr().cast();
                stream.copy_to_host(into, memory.pointer(), values.len() * 4)?;
            }
            stream.synchronize()?;
            Ok(values)
        };
        Ok(Remembered {
            residual: read(held.residual.as_ref())?,
            mean: read(held.mean.as_ref())?,
            common: read(held.own.as_ref().and_then(DeviceCodec::remembered))?,
            scale: held.scale.as_ref().map_or_else(Vec::new, |scale| scale.known().known()),
        })
    }

    /// Goes on with what was remembered of a parameter. Nothing is under way.
    ///
    /// # Panics
    /// If something has another length than it had.
    pub fn remember(
        &mut self,
        parameter: usize,
        remembered: &Remembered,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let held = &mut self.held[parameter];
        for (memory, values) in
            [(&held.residual, &remembered.residual), (&held.mean, &remembered.mean)]
        {
            let bytes = memory.as_ref().map_or(0, DeviceMemory::bytes);
            assert_eq!(bytes, values.len() * 4, "as much as was remembered");
            let Some(memory) = memory else { continue };
            // SAFETY: the memory has as many elements, and what is copied is waited for.
            unsafe { stream.copy_to_device(memory.pointer(), values.as_ptr().cast(), bytes)? };
            stream.synchronize()?;
        }
        if let Some(own) = &mut held.own {
            own.remember(stream, &remembered.common)?;
        }
        if let Some(scale) = &mut held.scale {
            scale.restore(stream, &remembered.scale)?;
        }
        Ok(())
    }

    /// Bytes that this rank has sent to others so far, as if each went over a wire of its own: of an all-reduce, twice
    /// what is not its own part.
    pub fn sent(&self) -> u64 {
        self.calls.sent()
    }

    /// The group.
    pub fn group(&self) -> &DeviceGroup {
        self.calls.group()
    }

    fn rank(&self) -> usize {
        self.calls.rank()
    }

    fn world(&self) -> usize {
        self.calls.world()
    }

    fn is_gathered(&self, codec: usize) -> bool {
        matches!(self.passages[codec].host.passage(), Passage::Gathered(_))
    }

    fn task(&self, parameter: usize, step: u64) -> Task<'_> {
        Task { shape: &self.held[parameter].shape, parameter, step, seed: self.seed }
    }

    /// The residual of a parameter, if one is kept from step to step.
    fn owed(&self, codec: usize, parameter: usize) -> Option<DevicePtr> {
        let feeds_back = self.passages[codec].encoded.feeds_back;
        self.held[parameter].residual.as_ref().filter(|_| feeds_back).map(DeviceMemory::pointer)
    }

    /// Divides f32 by the number of ranks, and writes them to another place or the same.
    ///
    /// # Safety
    /// Both are valid for so many elements until it is done, and nothing else touches the second or writes the first.
    unsafe fn divide(
        &self,
        from: DevicePtr,
        into: DevicePtr,
        count: usize,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        // SAFETY: the caller's promise.
        unsafe { self.average(&[from], into, count, stream) }
    }

    /// Adds up f32 in the order of the canonical tree, and divides the sum by the number of ranks.
    ///
    /// # Safety
    /// As for `divide`, for every input.
    unsafe fn average(
        &self,
        inputs: &[DevicePtr],
        into: DevicePtr,
        count: usize,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        if count == 0 {
            return Ok(());
        }
        let divisor = u32::try_from(self.world()).ok();
        // SAFETY: the caller's promise.
        unsafe {
            let sum = Reduction::Sum;
            self.folds.fold(stream, Dtype::F32, sum, divisor, inputs, into, None, count)?;
        }
        Ok(())
    }
}

fn zeros(context: &Context, stream: &Stream, count: usize) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::new(context, count * 4)?;
    if count > 0 {
        // SAFETY: the memory has as many elements, and is nobody else's yet.
        unsafe { stream.fill_words(memory.pointer(), 0, count)? };
    }
    Ok(memory)
}
