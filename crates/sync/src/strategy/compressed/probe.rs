//! How fast this machine encodes and decodes, at this moment.
//!
//! A *trial* does to a sample of the model what an exchange would do to all of it, but for sending:
//! encodes it with its residual, decodes it, pays. Each part is timed by itself and counts as often as
//! an exchange does it: for every shard of this worker, for every shard of all, for its share, or once.
//! All ranks try at the same time, so that they are as much in each other's way as they will be.

use std::ops::Range;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use unisono_codec::{Codec, Gathered, Mean, Memory, Passage, Spans, Summed, Task, Wire};

use super::spans::pieces;
use super::summed::Narrow;
use super::timed;
use super::volume::World;
use crate::synchronizer::Parameter;
use unisono_codec::is_encoded_twice;

/// Elements of a sample, at most: 8 MiB, about a bucket. More: the choice takes longer. Fewer: the
/// sample stays in the caches, which a model does not.
const SAMPLE: usize = 2 << 20;

/// Trials that count; the median does.
const TRIALS: usize = 5;

/// For how long there are further trials.
const LIMIT: Duration = Duration::from_millis(200);

/// A part of a model, with numbers that look like gradients.
pub struct Sample {
    values: Vec<f32>,
    pieces: Vec<Piece>,
}

/// A parameter of the sample; of a large one, its first rows.
struct Piece {
    parameter: usize,
    shape: Vec<usize>,
    span: Range<usize>,
}

impl Sample {
    /// Of those parameters that are `wanted`, the largest, for most elements are theirs.
    pub fn new(parameters: &[Parameter], wanted: impl Fn(usize) -> bool) -> Sample {
        let mut order: Vec<usize> = (0..parameters.len()).filter(|p| wanted(*p)).collect();
        order.sort_by_key(|p| std::cmp::Reverse(parameters[*p].elements()));
        let (mut pieces, mut end): (Vec<Piece>, usize) = (Vec::new(), 0);
        for parameter in order {
            let mut shape = parameters[parameter].shape.clone();
            let (left, all) = (SAMPLE - end, parameters[parameter].elements());
            if let Some(rows) = shape.first_mut().filter(|_| all > left) {
                let row = all / *rows;
                *rows = left / row;
            }
            let elements: usize = shape.iter().product();
            if elements == 0 || elements > left {
                break;
            }
            pieces.push(Piece { parameter, shape, span: end..end + elements });
            end += elements;
        }
        Sample { values: noise(end), pieces }
    }

    /// Seconds that a worker takes for an element of the model, with a codec.
    pub fn seconds_per_element(&self, codec: &dyn Codec, feeds_back: bool, world: World) -> f64 {
        if self.values.is_empty() {
            return 0.0;
        }
        let mut trials: Vec<Trial> = self.pieces.iter().map(|p| Trial::new(codec, p)).collect();
        let mut once = || -> Duration {
            let gradient = |piece: &Piece| &self.values[piece.span.clone()];
            let pieces = trials.iter_mut().zip(&self.pieces);
            pieces.map(|(trial, piece)| trial.run(gradient(piece), feeds_back, world)).sum()
        };
        // The first one pays for new memory.
        once();
        let start = Instant::now();
        let mut times = Vec::with_capacity(TRIALS);
        while times.is_empty() || (times.len() < TRIALS && start.elapsed() < LIMIT) {
            times.push(once());
        }
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() / self.values.len() as f64
    }
}

/// One parameter's way through a codec, with all memory it needs.
struct Trial<'a> {
    codec: &'a dyn Codec,
    task: Task<'a>,
    memory: Memory,
    common: Vec<f32>,
    leaf: Vec<f32>,
    means: Vec<Vec<f32>>,
    narrow: (Vec<f16>, Vec<bf16>),
    bytes: Vec<u8>,
    mean: Vec<f32>,
}

/// How long the parts of a trial took.
#[derive(Default)]
struct Parts {
    /// For a shard of this worker.
    own: Duration,
    /// For a shard of any worker.
    any: Duration,
    /// For the mean.
    mean: Duration,
}

impl<'a> Trial<'a> {
    fn new(codec: &'a dyn Codec, piece: &'a Piece) -> Trial<'a> {
        let task = Task { shape: &piece.shape, parameter: piece.parameter, step: 0, seed: 0 };
        let elements = task.elements();
        let (mut common, mut bytes) = (Vec::new(), Vec::new());
        let mut memory = Memory { residual: vec![0.0; elements], velocity: Vec::new() };
        match codec.passage() {
            Passage::Summed(summed) => common = summed.start(&task),
            Passage::Spans(spans) => bytes = vec![0; spans.bytes(elements)],
            Passage::Gathered(gathered) if gathered.has_velocity() => {
                memory.velocity = vec![0.0; elements];
            }
            Passage::Gathered(_) => {}
        }
        let (leaf, means, narrow) = Default::default();
        let mean = vec![0.0; elements];
        Trial { codec, task, memory, common, leaf, means, narrow, bytes, mean }
    }

    /// What the exchange of this parameter would take a worker.
    fn run(&mut self, gradient: &[f32], feeds_back: bool, world: World) -> Duration {
        let (shards, own) = (world.shards.count() as f64, world.most_shards() as f64);
        let workers = world.workers as f64;
        let seconds = match self.codec.passage() {
            Passage::Summed(summed) => {
                let parts = self.summed(summed, feeds_back, gradient);
                own * parts.own.as_secs_f64() + parts.mean.as_secs_f64()
            }
            Passage::Spans(spans) => {
                let parts = self.spans(spans, feeds_back, gradient);
                if is_encoded_twice(world.shards.count()) {
                    // A worker averages a share, and encodes that as it does a gradient.
                    (own + 1.0 / workers) * parts.own.as_secs_f64()
                        + shards / workers * parts.any.as_secs_f64()
                        + parts.mean.as_secs_f64()
                } else {
                    own * parts.own.as_secs_f64() + shards * parts.any.as_secs_f64()
                }
            }
            Passage::Gathered(gathered) => {
                let parts = self.gathered(gathered, gradient);
                own * parts.own.as_secs_f64()
                    + shards * parts.any.as_secs_f64()
                    + parts.mean.as_secs_f64()
            }
        };
        Duration::from_secs_f64(seconds)
    }

    fn summed(&mut self, summed: &dyn Summed, feeds_back: bool, gradient: &[f32]) -> Parts {
        let mut parts = Parts::default();
        let (leaf, mean) = (&mut self.leaf, &mut self.mean);
        match summed.wire() {
            Wire::Fp16 if summed.is_identity() => {
                through(gradient, &mut self.narrow.0, mean, &mut parts);
                return parts;
            }
            Wire::Bf16 if summed.is_identity() => {
                through(gradient, &mut self.narrow.1, mean, &mut parts);
                return parts;
            }
            _ => {}
        }
        let residual = &mut self.memory.residual;
        if feeds_back {
            timed(&mut parts.own, || add(residual, gradient));
        }
        let rounds = summed.rounds();
        self.means.resize(rounds, Vec::new());
        for round in 0..rounds {
            let values = if feeds_back { &residual[..] } else { gradient };
            let (before, now) = self.means.split_at_mut(round);
            let given = before.last().unwrap_or(&self.common);
            timed(&mut parts.own, || {
                leaf.resize(summed.encoded(self.task.shape, round), 0.0);
                summed.encode(round, &self.task, values, given, leaf);
            });
            // As it comes back.
            let mut sum = vec![0.0; leaf.len()];
            match summed.wire() {
                // It is folded where it is.
                Wire::F32 => {
                    timed(&mut parts.own, || leaf.iter_mut().for_each(|x| *x += *x));
                    std::mem::swap(&mut sum, leaf);
                }
                Wire::Fp16 => through(leaf, &mut self.narrow.0, &mut sum, &mut parts),
                Wire::Bf16 => through(leaf, &mut self.narrow.1, &mut sum, &mut parts),
            }
            timed(&mut parts.mean, || {
                now[0].clear();
                now[0].extend(sum.iter().map(|sum| sum / 2.0));
                if round + 1 < rounds {
                    summed.settle(round, &self.task, &mut now[0]);
                }
            });
        }
        let means: Vec<&[f32]> = self.means.iter().map(Vec::as_slice).collect();
        timed(&mut parts.mean, || summed.decode(&self.task, &means, &mut self.common, mean));
        if feeds_back {
            timed(&mut parts.own, || summed.pay(&self.task, residual, mean));
        }
        parts
    }

    fn spans(&mut self, spans: &dyn Spans, feeds_back: bool, gradient: &[f32]) -> Parts {
        let mut parts = Parts::default();
        let (key, elements) = (self.task.key(0), self.task.elements());
        let encoded = |at: &Range<usize>| spans.bytes(at.start)..spans.bytes(at.end);
        timed(&mut parts.own, || match feeds_back {
            true => {
                spans.encode_fed(key, 0, gradient, &mut self.memory.residual, &mut self.bytes);
            }
            false => spans.encode(key, 0, gradient, &mut self.bytes),
        });
        let decodes = "what was encoded can be decoded";
        timed(&mut parts.any, || {
            for at in pieces(spans, elements) {
                spans.decode_add(&self.bytes[encoded(&at)], &mut self.mean[at]).expect(decodes);
            }
        });
        timed(&mut parts.mean, || spans.decode(&self.bytes, &mut self.mean).expect(decodes));
        parts
    }

    fn gathered(&mut self, gathered: &dyn Gathered, gradient: &[f32]) -> Parts {
        let mut parts = Parts::default();
        timed(&mut parts.own, || {
            gathered.absorb(&self.task, 1, gradient, &mut self.memory);
            self.bytes.clear();
            gathered.encode(&self.task, 0, &mut self.memory, &mut self.bytes);
        });
        timed(&mut parts.mean, || self.mean.fill(0.0));
        timed(&mut parts.any, || {
            let decoded = gathered.decode(&self.bytes, &mut self.mean);
            decoded.expect("what was encoded can be decoded");
        });
        timed(&mut parts.mean, || self.mean.iter_mut().for_each(|x| *x /= 2.0));
        parts
    }
}

/// Rounds a leaf to a narrower type, as it would travel, and back.
fn through<T: Narrow>(leaf: &[f32], narrow: &mut Vec<T>, back: &mut [f32], parts: &mut Parts) {
    timed(&mut parts.own, || {
        narrow.resize(leaf.len(), T::ZERO);
        T::narrow(leaf, 0.5, narrow);
    });
    timed(&mut parts.mean, || T::widen(narrow, Mean::new(2.0, 1), back));
}

fn add(into: &mut [f32], values: &[f32]) {
    into.iter_mut().zip(values).for_each(|(into, value)| *into += value);
}

/// Numbers of which most are small and some are not, as in gradients.
fn noise(elements: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        // Xorshift: any generator would do.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..elements).map(|_| uniform() * uniform() * uniform() * 0.1).collect()
}
