//! Encodes and decodes on one machine, as if for one shard: what benchmarks time and tests check.

use crate::sender::Rounds;
use crate::{BadEncoding, Codec, Memory, Passage, Task};

/// One parameter's way through a codec and back, with all memory it needs.
///
/// Unlike a [`Sender`](crate::Sender) it does the codec's own work and nothing else: no residual is
/// added, nothing is cast to the type in which it travels, and nothing decoded to know what is owed.
pub struct RoundTrip<'a> {
    codec: &'a dyn Codec,
    task: Task<'a>,
    memory: Memory,
    remembered: Vec<f32>,
    rounds: Rounds,
    bytes: Vec<u8>,
}

impl<'a> RoundTrip<'a> {
    /// For the parameter of a task.
    pub fn new(codec: &'a dyn Codec, task: Task<'a>) -> RoundTrip<'a> {
        let (mut remembered, mut rounds, mut bytes) = (Vec::new(), Rounds::default(), Vec::new());
        let mut memory = Memory::default();
        match codec.passage() {
            Passage::Summed(summed) => {
                remembered = summed.start(&task);
                rounds.resize(summed, task.shape);
            }
            Passage::Spans(spans) => bytes = vec![0; spans.bytes(task.elements())],
            Passage::Gathered(gathered) => {
                if gathered.has_velocity() {
                    memory.velocity = vec![0.0; task.elements()];
                }
            }
        }
        RoundTrip { codec, task, memory, remembered, rounds, bytes }
    }

    /// Encodes, without a residual from earlier. `values` may be changed.
    pub fn encode(&mut self, values: &mut Vec<f32>) {
        match self.codec.passage() {
            Passage::Summed(summed) => {
                self.rounds.encode(summed, &self.task, values, &self.remembered, |_| {});
            }
            Passage::Spans(spans) => {
                spans.encode(self.task.key(0), 0, values, &mut self.bytes);
            }
            Passage::Gathered(gathered) => {
                std::mem::swap(&mut self.memory.residual, values);
                self.bytes.clear();
                gathered.encode(&self.task, 0, &mut self.memory, &mut self.bytes);
                std::mem::swap(&mut self.memory.residual, values);
            }
        }
    }

    /// Whether what its encodings leave out is remembered, so that [`RoundTrip::encode_fed`] is how it is used.
    pub fn is_fed(&self) -> bool {
        self.codec.is_biased() && matches!(self.codec.passage(), Passage::Spans(_))
    }

    /// Encodes what is owed and, added to it, `values`; what is left out is owed. Only for those that are
    /// [fed](RoundTrip::is_fed); others do nothing.
    pub fn encode_fed(&mut self, values: &[f32], owed: &mut [f32]) {
        if let Passage::Spans(spans) = self.codec.passage() {
            spans.encode_fed(self.task.key(0), 0, values, owed, &mut self.bytes);
        }
    }

    /// Decodes what was encoded last.
    pub fn decode(&mut self, into: &mut [f32]) -> Result<(), BadEncoding> {
        match self.codec.passage() {
            Passage::Summed(summed) => {
                self.rounds.decode(summed, &self.task, &mut self.remembered, into);
                Ok(())
            }
            Passage::Spans(spans) => spans.decode(&self.bytes, into),
            Passage::Gathered(gathered) => {
                into.fill(0.0);
                gathered.decode(&self.bytes, into)
            }
        }
    }

    /// Bytes of the encoding, as they would travel.
    pub fn bytes(&self) -> usize {
        match self.codec.passage() {
            Passage::Summed(summed) => self.rounds.elements() * summed.wire().bytes(),
            _ => self.bytes.len(),
        }
    }
}
