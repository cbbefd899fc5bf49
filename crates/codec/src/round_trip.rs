//! Encodes and decodes on one machine, as if for one shard: what benchmarks time and tests check.

use crate::{BadEncoding, Codec, Memory, Passage, Task};

/// One parameter's way through a codec and back, with all memory it needs.
pub struct RoundTrip<'a> {
    codec: &'a dyn Codec,
    task: Task<'a>,
    memory: Memory,
    remembered: Vec<f32>,
    rounds: Vec<Vec<f32>>,
    bytes: Vec<u8>,
}

impl<'a> RoundTrip<'a> {
    /// For the parameter of a task.
    pub fn new(codec: &'a dyn Codec, task: Task<'a>) -> RoundTrip<'a> {
        let (mut remembered, mut rounds, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let mut memory = Memory::default();
        match codec.passage() {
            Passage::Summed(summed) => {
                remembered = summed.start(&task);
                let round = |round| vec![0.0; summed.encoded(task.shape, round)];
                rounds = (0..summed.rounds()).map(round).collect();
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
                for round in 0..summed.rounds() {
                    let (before, now) = self.rounds.split_at_mut(round);
                    let given = before.last().unwrap_or(&self.remembered);
                    summed.encode(round, &self.task, values, given, &mut now[0]);
                    if round + 1 < summed.rounds() {
                        summed.settle(round, &self.task, &mut now[0]);
                    }
                }
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

    /// Decodes what was encoded last.
    pub fn decode(&mut self, into: &mut [f32]) -> Result<(), BadEncoding> {
        match self.codec.passage() {
            Passage::Summed(summed) => {
                let means: Vec<&[f32]> = self.rounds.iter().map(Vec::as_slice).collect();
                summed.decode(&self.task, &means, &mut self.remembered, into);
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
            Passage::Summed(summed) => {
                self.rounds.iter().map(Vec::len).sum::<usize>() * summed.wire().bytes()
            }
            _ => self.bytes.len(),
        }
    }
}
