//! Encodings for one receiver, such as a parameter server, which become no mean of many.
//!
//! A [`Sender`] encodes the gradients of one parameter, step by step, and remembers what each encoding
//! left out. A receiver remembers nothing: what it [decodes](decode) follows from the [`Task`] and the
//! bytes. So it may decode what any number of senders sent in any order, and an encoding that is lost
//! or sent twice is the business of the client that carries it.
//!
//! What the bytes are depends on the codec's [`Passage`]:
//!
//! * Blocks and gathered encodings are bytes already.
//! * Encodings that are summed elsewhere are their own mean here. All rounds follow each other at the
//!   sender, each narrowed to the type in which it travels before the next is made from it; the
//!   encoding is the rounds one after the other, little-endian. The receiver settles them as the sender did.
//!
//! A sender knows what the receiver will see, for it can decode its own encoding. The difference is the
//! residual, including what the narrower type rounded away.

use std::sync::Arc;

use crate::bf16::Bf16;
use crate::fp16::Fp16;
use crate::{BadEncoding, Codec, Key, Memory, Passage, Spans, Summed, Task, Wire, elements};

/// What errors call the writer of rounds.
const SUMMED: &str = "a codec that sums";

/// Whose gradients a [`Sender`] encodes: what does not change from step to step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The shape of the parameter.
    pub shape: Vec<usize>,
    /// The parameter's number in its model.
    pub parameter: usize,
    /// The seed of the run.
    pub seed: u64,
    /// Who sends. Workers with different numbers round differently, so that their errors cancel out.
    pub worker: usize,
    /// How many gradients the receiver takes the mean of: 1 if it applies every one by itself.
    pub mean_of: usize,
}

impl Origin {
    /// What is encoded in a step. The receiver needs an equal one to decode.
    pub fn task(&self, step: u64) -> Task<'_> {
        let Origin { shape, parameter, seed, .. } = self;
        Task { shape, parameter: *parameter, step, seed: *seed }
    }
}

/// Encodes the gradients of one parameter for one receiver.
#[derive(Clone, Debug)]
pub struct Sender {
    codec: Arc<dyn Codec>,
    origin: Origin,
    feeds_back: bool,
    memory: Memory,
    /// What a codec with several rounds goes on from.
    remembered: Vec<f32>,
}

impl Sender {
    /// Before the first step. Without `error_feedback`, what encodings leave out is lost.
    pub fn new(codec: Arc<dyn Codec>, origin: Origin, error_feedback: bool) -> Sender {
        let feeds_back = error_feedback && codec.is_biased();
        let zeros = |wanted: bool| vec![0.0; if wanted { elements(&origin.shape) } else { 0 }];
        let (mut has_residual, mut has_velocity) = (feeds_back, false);
        let mut remembered = Vec::new();
        match codec.passage() {
            Passage::Summed(summed) => remembered = summed.start(&origin.task(0)),
            Passage::Spans(_) => {}
            Passage::Gathered(gathered) => {
                // It encodes from its residual, even if that is forgotten before every step.
                has_residual = true;
                has_velocity = gathered.has_velocity();
            }
        }
        let memory = Memory { residual: zeros(has_residual), velocity: zeros(has_velocity) };
        Sender { codec, origin, feeds_back, memory, remembered }
    }

    /// What encodings have left out so far and later ones will carry; empty if that is not remembered.
    pub fn owed(&self) -> &[f32] {
        if self.feeds_back { &self.memory.residual } else { &[] }
    }

    /// Appends the encoding of a step's gradient, and of what is owed, to `into`.
    ///
    /// # Panics
    /// If the gradient does not have the parameter's length.
    pub fn encode(
        &mut self,
        step: u64,
        gradient: &[f32],
        scratch: &mut Scratch,
        into: &mut Vec<u8>,
    ) {
        let Sender { codec, origin, feeds_back, memory, remembered } = self;
        let task = origin.task(step);
        assert_eq!(gradient.len(), task.elements(), "a gradient for every element");
        let values = match (codec.passage(), *feeds_back) {
            (Passage::Gathered(_), _) | (_, false) => gradient,
            (_, true) => {
                memory.residual.iter_mut().zip(gradient).for_each(|(owed, g)| *owed += g);
                &memory.residual[..]
            }
        };
        match codec.passage() {
            Passage::Summed(summed) if summed.is_identity() => write(summed.wire(), values, into),
            Passage::Summed(summed) => {
                let Scratch { rounds, decoded, .. } = scratch;
                rounds.resize(summed, task.shape);
                rounds.encode(summed, &task, values, remembered, |round| {
                    let start = into.len();
                    write(summed.wire(), round, into);
                    let read = read(summed.wire(), &into[start..], round);
                    read.expect("what was just written has its length");
                });
                // Only decoding says what is owed, and what the next step goes on from.
                if *feeds_back || !remembered.is_empty() {
                    decoded.resize(task.elements(), 0.0);
                    rounds.decode(summed, &task, remembered, decoded);
                }
                if *feeds_back {
                    let paid = memory.residual.iter_mut().zip(&*decoded);
                    paid.for_each(|(owed, sent)| *owed -= sent);
                }
            }
            Passage::Spans(spans) => {
                let (key, start) = (task.key(origin.worker), into.len());
                into.resize(start + spans.bytes(gradient.len()), 0);
                match feeds_back {
                    true => spans.encode_owed(key, 0, &mut memory.residual, &mut into[start..]),
                    false => spans.encode(key, 0, gradient, &mut into[start..]),
                }
            }
            Passage::Gathered(gathered) => {
                if !*feeds_back {
                    memory.residual.fill(0.0);
                }
                gathered.absorb(&task, origin.mean_of, gradient, memory);
                gathered.encode(&task, origin.worker, memory, into);
            }
        }
    }
}

/// Decodes what a [`Sender`] has encoded. Never reads or writes out of bounds, whatever the bytes; after an error, `into`
/// holds unspecified values.
///
/// # Panics
/// If `into` does not have the parameter's length.
pub fn decode(
    codec: &dyn Codec,
    task: &Task,
    bytes: &[u8],
    into: &mut [f32],
    scratch: &mut Scratch,
) -> Result<(), BadEncoding> {
    assert_eq!(into.len(), task.elements(), "a value for every element");
    match codec.passage() {
        Passage::Summed(summed) if summed.is_identity() => read(summed.wire(), bytes, into),
        Passage::Summed(summed) => {
            let Scratch { rounds, forgotten, .. } = scratch;
            rounds.resize(summed, task.shape);
            rounds.read(summed, task, bytes)?;
            rounds.decode(summed, task, forgotten, into);
            Ok(())
        }
        Passage::Spans(spans) => spans.decode(bytes, into),
        Passage::Gathered(gathered) => {
            into.fill(0.0);
            gathered.decode(bytes, into)
        }
    }
}

/// Memory that is kept from call to call, of any parameters and codecs; its content is not.
#[derive(Debug, Default)]
pub struct Scratch {
    rounds: Rounds,
    decoded: Vec<f32>,
    /// What a sender would have remembered.
    forgotten: Vec<f32>,
}

/// The encodings of all rounds of a codec that sums, with no other worker to sum with.
#[derive(Debug, Default)]
pub(crate) struct Rounds(Vec<Vec<f32>>);

impl Rounds {
    /// Makes room for a parameter.
    pub(crate) fn resize(&mut self, summed: &dyn Summed, shape: &[usize]) {
        self.0.resize(summed.rounds(), Vec::new());
        for (round, encoding) in self.0.iter_mut().enumerate() {
            encoding.resize(summed.encoded(shape, round), 0.0);
        }
    }

    /// Encodes round by round. `carry` gets each as it is sent, and leaves what arrives.
    pub(crate) fn encode(
        &mut self,
        summed: &dyn Summed,
        task: &Task,
        values: &[f32],
        remembered: &[f32],
        mut carry: impl FnMut(&mut [f32]),
    ) {
        for round in 0..self.0.len() {
            let (before, now) = self.0.split_at_mut(round);
            let given = before.last().map_or(remembered, Vec::as_slice);
            summed.encode(round, task, values, given, &mut now[0]);
            carry(&mut now[0]);
            if round + 1 < summed.rounds() {
                summed.settle(round, task, &mut now[0]);
            }
        }
    }

    /// Takes all rounds from an encoding.
    fn read(&mut self, summed: &dyn Summed, task: &Task, bytes: &[u8]) -> Result<(), BadEncoding> {
        let wire = summed.wire();
        let expected = self.elements() * wire.bytes();
        if bytes.len() != expected {
            return Err(BadEncoding::Length { codec: SUMMED, expected, found: bytes.len() });
        }
        let (mut rest, last) = (bytes, self.0.len().saturating_sub(1));
        for (round, encoding) in self.0.iter_mut().enumerate() {
            let (own, after) = rest.split_at(encoding.len() * wire.bytes());
            rest = after;
            read(wire, own, encoding)?;
            if round < last {
                summed.settle(round, task, encoding);
            }
        }
        Ok(())
    }

    /// Decodes what was encoded or read.
    pub(crate) fn decode(
        &self,
        summed: &dyn Summed,
        task: &Task,
        remembered: &mut Vec<f32>,
        into: &mut [f32],
    ) {
        let means: Vec<&[f32]> = self.0.iter().map(Vec::as_slice).collect();
        summed.decode(task, &means, remembered, into);
    }

    /// Elements of all rounds together.
    pub(crate) fn elements(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }
}

/// Appends values in the type in which they travel.
fn write(wire: Wire, values: &[f32], into: &mut Vec<u8>) {
    let start = into.len();
    into.resize(start + values.len() * wire.bytes(), 0);
    let into = &mut into[start..];
    // Casts know no chance.
    let key = Key::new(0);
    match wire {
        Wire::F32 => {
            for (bytes, value) in into.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = value.to_le_bytes();
            }
        }
        Wire::Fp16 => Spans::encode(&Fp16, key, 0, values, into),
        Wire::Bf16 => Spans::encode(&Bf16, key, 0, values, into),
    }
}

/// Reads as many values as there is room for, from as many bytes as they take.
fn read(wire: Wire, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
    match wire {
        Wire::F32 => {
            let expected = into.len() * wire.bytes();
            if bytes.len() != expected {
                return Err(BadEncoding::Length { codec: SUMMED, expected, found: bytes.len() });
            }
            for (value, bytes) in into.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*bytes);
            }
            Ok(())
        }
        Wire::Fp16 => Spans::decode(&Fp16, bytes, into),
        Wire::Bf16 => Spans::decode(&Bf16, bytes, into),
    }
}

#[cfg(test)]
mod tests;
