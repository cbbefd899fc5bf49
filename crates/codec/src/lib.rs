//! Turns gradients into fewer bytes and back.
//!
//! A [`Codec`] encodes the gradient of one parameter in one shard. How the encodings of all shards
//! become one mean depends on what they are, and a codec says so by its [`Passage`]:
//!
//! * [`Summed`]: encodings are vectors, and the sum of the encodings is the encoding of the sum.
//!   They ride an all-reduce ([`fp16`], [`bf16`], [`randk`], [`powersgd`]).
//! * [`Spans`]: every block of elements is encoded by itself. Each worker decodes one span of all
//!   shards, averages, and encodes the mean again ([`int8`], [`int4`], [`qsgd`], [`sign`]).
//! * [`Gathered`]: an encoding is of no use to a worker that does not have all of it. All workers get
//!   all encodings ([`topk`], [`dgc`]).
//!
//! What an encoding leaves out stays in the [`Memory`] of its parameter and shard, the residual, and
//! is added to the next gradient. Whatever is random follows from a [`Task`], so that the same
//! gradients give the same bytes, on every worker.
//!
//! Some codecs get gradients in units of their usual size ([`scale`]).
//!
//! A [`Sender`] encodes for one receiver instead, such as a parameter server ([`sender`]).
//!
//! A [`CodecSpec`] is a codec's description: what the command line names and reports print.

pub mod bf16;
mod block;
mod blockwise;
mod cast;
pub mod dgc;
pub mod fp16;
pub mod int4;
pub mod int8;
mod pack;
pub mod powersgd;
pub mod qsgd;
pub mod randk;
mod random;
mod round_trip;
pub mod rules;
pub mod scale;
pub mod sender;
pub mod sign;
mod sparse;
pub mod spec;
pub mod stream;
pub mod topk;

use std::fmt;

pub use blockwise::Blockwise;
pub use cast::{Mean, divide_all};
pub use random::Key;
pub use round_trip::RoundTrip;
pub use rules::{Rule, Rules, UnusedRule};
pub use sender::Sender;
pub use spec::{BadCodec, CodecSpec};

/// A way to encode gradients.
pub trait Codec: fmt::Debug + Send + Sync {
    /// Whether what is decoded differs from the gradient on average, so that the difference must be
    /// remembered and sent later.
    fn is_biased(&self) -> bool;

    /// Whether a parameter of this shape can be encoded, and is smaller for it.
    fn suits(&self, shape: &[usize]) -> bool {
        self.encoded_bytes(shape) < elements(shape) * 4
    }

    /// Bytes of the encoding of one shard's gradient; about as many, where that depends on the
    /// gradient.
    fn encoded_bytes(&self, shape: &[usize]) -> usize;

    /// How the encodings of all shards become one mean.
    fn passage(&self) -> Passage<'_>;
}

/// How the encodings of all shards become one mean.
#[derive(Clone, Copy, Debug)]
pub enum Passage<'a> {
    /// By an all-reduce of the encodings.
    Summed(&'a dyn Summed),
    /// By decoding, averaging and encoding again, each worker a span.
    Spans(&'a dyn Spans),
    /// By giving all encodings to all workers.
    Gathered(&'a dyn Gathered),
}

/// What is encoded: everything that randomness may depend on, and that is not in the gradient.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// The shape of the parameter.
    pub shape: &'a [usize],
    /// The parameter's number in its model.
    pub parameter: usize,
    /// The step, counted from 0.
    pub step: u64,
    /// The seed of the run.
    pub seed: u64,
}

impl Task<'_> {
    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        elements(self.shape)
    }

    /// What all shards have in common.
    pub fn shared_key(&self) -> Key {
        Key::new(self.seed).with(self.step).with(self.parameter as u64)
    }

    /// What only one shard has.
    pub fn key(&self, shard: usize) -> Key {
        self.shared_key().with(1 + shard as u64)
    }
}

/// What is remembered of one parameter in one shard, from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// What earlier encodings left out: as long as the parameter.
    pub residual: Vec<f32>,
    /// The momentum of codecs that have one of their own; else empty.
    pub velocity: Vec<f32>,
}

/// The type in which summed encodings travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Wire {
    /// As they are.
    F32,
    /// Rounded to f16.
    Fp16,
    /// Rounded to bf16.
    Bf16,
}

impl Wire {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Wire::F32 => 4,
            Wire::Fp16 | Wire::Bf16 => 2,
        }
    }
}

/// How a quantizer chooses between the two nearest codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Rounding {
    /// The nearer one: the smallest error, but biased, so that residuals are kept.
    #[default]
    Nearest,
    /// Either, by chance, so that the mean over many is right: no residuals are needed.
    Stochastic,
}

/// Encodings that can be summed while encoded.
///
/// There may be several rounds, of which each but the first needs the mean of the one before. All
/// workers do the same with the same means, so what follows from them is equal everywhere.
pub trait Summed: fmt::Debug + Send + Sync {
    /// The type in which they travel.
    fn wire(&self) -> Wire;

    /// Whether an encoding is what is encoded, so that it need not be copied.
    fn is_identity(&self) -> bool {
        false
    }

    /// How many exchanges it takes.
    fn rounds(&self) -> usize {
        1
    }

    /// Elements of the encoding in one round.
    fn encoded(&self, shape: &[usize], round: usize) -> usize;

    /// What all workers remember alike of a parameter, before the first step. Only uses the task's
    /// [shared key](Task::shared_key).
    fn start(&self, task: &Task) -> Vec<f32> {
        let _ = task;
        Vec::new()
    }

    /// Encodes `values`, the gradient of one shard and its residual, for a round: linear in them.
    /// `given` is what [`Summed::settle`] made of the mean of the round before; in the first round,
    /// what is remembered. Only uses the task's [shared key](Task::shared_key).
    fn encode(&self, round: usize, task: &Task, values: &[f32], given: &[f32], into: &mut [f32]);

    /// Prepares the mean of a round that is not the last for the next one, in place.
    fn settle(&self, round: usize, task: &Task, mean: &mut [f32]) {
        let _ = (round, task, mean);
    }

    /// Decodes the mean gradient from the means of all rounds, and renews what is remembered.
    fn decode(&self, task: &Task, means: &[&[f32]], remembered: &mut Vec<f32>, into: &mut [f32]);

    /// Takes from one shard's residual, which holds what was encoded, what `decoded`, the mean that
    /// came out, has paid of it.
    fn pay(&self, task: &Task, residual: &mut [f32], decoded: &[f32]);
}

/// Encodings in which every block stands for itself.
///
/// A parameter's elements are cut into blocks of [`Spans::block`], the last of which may be shorter.
/// Any run of blocks can be encoded and decoded alone, with the same bytes.
pub trait Spans: fmt::Debug + Send + Sync {
    /// Elements of a block.
    fn block(&self) -> usize;

    /// Bytes of the encoding of as many elements, from the beginning of a block.
    fn bytes(&self, elements: usize) -> usize;

    /// Encodes a run of blocks, of which the first element is the parameter's number `first`.
    /// `into` has the right length.
    fn encode(&self, key: Key, first: usize, values: &[f32], into: &mut [u8]);

    /// As [`Spans::encode`], and leaves in `owed` what was not encoded: `owed` less what will be
    /// decoded.
    fn encode_owed(&self, key: Key, first: usize, owed: &mut [f32], into: &mut [u8]);

    /// As [`Spans::encode_owed`], and adds what is `fed` to what is `owed` first: in one pass, if it matters.
    fn encode_fed(&self, key: Key, first: usize, fed: &[f32], owed: &mut [f32], into: &mut [u8]) {
        owed.iter_mut().zip(fed).for_each(|(owed, fed)| *owed += fed);
        self.encode_owed(key, first, owed, into);
    }

    /// Decodes a run of blocks. Never reads or writes out of bounds, whatever the bytes.
    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding>;

    /// Fails if these bytes cannot be decoded to so many elements, and as [`Spans::decode`] would. If it does not fail, no
    /// run of the blocks does.
    fn check(&self, bytes: &[u8], elements: usize) -> Result<(), BadEncoding> {
        self.decode(bytes, &mut vec![0.0; elements])
    }

    /// As [`Spans::decode`], and adds what is decoded to what is there: in one pass, if it matters. After an error, `into`
    /// holds unspecified values.
    fn decode_add(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        let mut decoded = vec![0.0; into.len()];
        self.decode(bytes, &mut decoded)?;
        into.iter_mut().zip(decoded).for_each(|(into, decoded)| *into += decoded);
        Ok(())
    }
}

/// Whether the mean of so many shards' [`Spans`] is encoded again. Between two nothing is gained by that: each worker
/// gets the other's encoding as it is, for as many bytes and without a second loss.
pub fn is_encoded_twice(shards: usize) -> bool {
    shards > 2
}

/// Encodings that are only of use as a whole.
pub trait Gathered: fmt::Debug + Send + Sync {
    /// Whether [`Memory::velocity`] is in use.
    fn has_velocity(&self) -> bool {
        false
    }

    /// Takes one shard's gradient into its memory. `shards` is how many there are.
    fn absorb(&self, task: &Task, shards: usize, gradient: &[f32], memory: &mut Memory) {
        let _ = (task, shards);
        memory.residual.iter_mut().zip(gradient).for_each(|(owed, g)| *owed += g);
    }

    /// Encodes from the residual, appends the encoding to `into`, and takes what will be decoded
    /// from the residual.
    fn encode(&self, task: &Task, shard: usize, memory: &mut Memory, into: &mut Vec<u8>);

    /// Adds what one encoding holds to `into`, which has the parameter's length. Never reads or
    /// writes out of bounds, whatever the bytes.
    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding>;
}

/// Bytes that no encoder wrote. The sender runs other code, or the data was damaged on the way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadEncoding {
    /// It ends too early, or goes on after its end.
    #[error("an encoding of {codec} has {found} bytes instead of {expected}")]
    Length {
        /// Who should have written it.
        codec: &'static str,
        /// Bytes that it should have.
        expected: usize,
        /// Bytes that it has.
        found: usize,
    },
    /// It claims more elements than the parameter has.
    #[error("an encoding of {codec} holds {found} of {elements} elements")]
    Count {
        /// Who should have written it.
        codec: &'static str,
        /// Elements that it claims to hold.
        found: usize,
        /// Elements of the parameter.
        elements: usize,
    },
    /// It names an element that the parameter does not have, or one twice.
    #[error("an encoding of {codec} names element {index} of {elements}")]
    Index {
        /// Who should have written it.
        codec: &'static str,
        /// The element.
        index: u64,
        /// Elements of the parameter.
        elements: usize,
    },
    /// A field has a value that none can have.
    #[error("an encoding of {codec} has {found} as its {field}")]
    Field {
        /// Who should have written it.
        codec: &'static str,
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u64,
    },
}

/// Elements of a shape.
pub fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}
