//! Encodings that are summed while encoded: an all-reduce of fewer elements.
//!
//! In every round, each leaf of every parameter is encoded into one vector per shard, these are
//! rounded to the type in which they travel, and the canonical tree over the shards adds them up,
//! rounding at every node: the same bits whichever worker holds which shards.

use half::{bf16, f16};
use unisono_codec::{Summed, Wire};
use unisono_collective::{Element, Error};

use super::{Compressed, task, timed};
use crate::combine::{Combiner, alignment, fold_leaves};
use crate::error::SyncError;
use crate::shards::Shards;
use crate::strategy::Gradients;

/// Memory that is kept from call to call.
#[derive(Default)]
pub struct SummedBuffers {
    /// Encodings, by shard.
    leaves: Vec<Vec<f32>>,
    fp16: Vec<Vec<f16>>,
    bf16: Vec<Vec<bf16>>,
    /// The means of all rounds.
    means: Vec<Vec<f32>>,
}

impl Compressed {
    pub(super) fn exchange_summed(
        &mut self,
        summed: &dyn Summed,
        feeds_back: bool,
        parameters: &[usize],
        gradients: &mut Gradients,
    ) -> Result<(), SyncError> {
        let mut buffers = std::mem::take(&mut self.buffers.summed);
        let layout = gradients.layout.clone();
        let step = gradients.step;
        let shape = |parameter: usize| &self.parameters[parameter].shape;
        let mut coding = self.coding;
        if feeds_back {
            timed(&mut coding, || {
                for &parameter in parameters {
                    let state = &mut self.states[parameter];
                    for (memory, slot) in state.shards.iter_mut().zip(&gradients.slots) {
                        let gradient = &slot[layout.span(parameter)];
                        let owed = memory.residual.iter_mut();
                        owed.zip(gradient).for_each(|(owed, g)| *owed += g);
                    }
                }
            });
        }
        let rounds = summed.rounds();
        buffers.means.resize(rounds, Vec::new());
        let leaves = &mut buffers.leaves;
        leaves.resize(gradients.filled, Vec::new());
        for round in 0..rounds {
            let encoded = |p: usize| summed.encoded(shape(p), round);
            let length: usize = parameters.iter().map(|p| encoded(*p)).sum();
            let padded = length.next_multiple_of(alignment(self.shards, self.workers()));
            timed(&mut coding, || {
                for (i, leaf) in leaves.iter_mut().enumerate() {
                    leaf.resize(padded, 0.0);
                    leaf[length..].fill(0.0);
                    let (mut at, mut before) = (0, 0);
                    for &parameter in parameters {
                        let values = match feeds_back {
                            true => &self.states[parameter].shards[i].residual[..],
                            false => &gradients.slots[i][layout.span(parameter)],
                        };
                        let into = &mut leaf[at..at + encoded(parameter)];
                        at += into.len();
                        if summed.is_identity() {
                            into.copy_from_slice(values);
                            continue;
                        }
                        let task = self.task(parameter, step);
                        let given = match round {
                            0 => &self.states[parameter].common[..],
                            _ => {
                                let from = before;
                                before += summed.encoded(task.shape, round - 1);
                                &buffers.means[round - 1][from..before]
                            }
                        };
                        summed.encode(round, &task, values, given, into);
                    }
                }
            });
            let world = World { combiner: &mut self.combiner, shards: self.shards };
            match summed.wire() {
                Wire::F32 => world.sum(leaves)?,
                Wire::Fp16 => world.sum_narrow(leaves, &mut buffers.fp16)?,
                Wire::Bf16 => world.sum_narrow(leaves, &mut buffers.bf16)?,
            }
            timed(&mut coding, || {
                let shards = gradients.shards as f32;
                let mean = &mut buffers.means[round];
                mean.clear();
                mean.extend(leaves[0][..length].iter().map(|sum| sum / shards));
                let mut rest = &mut mean[..];
                for &parameter in parameters.iter().filter(|_| round + 1 < rounds) {
                    let (own, after) = rest.split_at_mut(encoded(parameter));
                    summed.settle(round, &self.task(parameter, step), own);
                    rest = after;
                }
            });
        }
        timed(&mut coding, || {
            let mut at = vec![0; rounds];
            for &parameter in parameters {
                let mut means: Vec<&[f32]> = Vec::with_capacity(rounds);
                for (round, at) in at.iter_mut().enumerate() {
                    let length = summed.encoded(shape(parameter), round);
                    means.push(&buffers.means[round][*at..*at + length]);
                    *at += length;
                }
                let into = &mut gradients.slots[0][layout.span(parameter)];
                if summed.is_identity() {
                    into.copy_from_slice(means[0]);
                    continue;
                }
                let task = task(&self.parameters, &self.compression, parameter, step);
                let state = &mut self.states[parameter];
                summed.decode(&task, &means, &mut state.common, into);
                if feeds_back {
                    for memory in &mut state.shards {
                        summed.pay(&task, &mut memory.residual, into);
                    }
                }
            }
        });
        self.coding = coding;
        self.buffers.summed = buffers;
        Ok(())
    }
}

/// Those who sum.
struct World<'a> {
    combiner: &'a mut Combiner,
    shards: Shards,
}

impl World<'_> {
    /// Replaces the first leaf by the sum over all shards.
    fn sum<T: Element>(self, leaves: &mut [Vec<T>]) -> Result<(), Error> {
        let group = self.combiner.group();
        let own = self.shards.of(group.rank(), group.size());
        let subtrees = fold_leaves(self.shards, own, leaves);
        self.combiner.sum(&mut leaves[..subtrees])
    }

    /// As [`World::sum`], in a narrower type. Leaves are scaled down, so that no sum overflows unless a
    /// leaf does: by a power of two, which costs no bits.
    fn sum_narrow<T: Narrow>(
        self,
        leaves: &mut [Vec<f32>],
        narrow: &mut Vec<Vec<T>>,
    ) -> Result<(), Error> {
        let scale = 1.0 / self.shards.count().next_power_of_two() as f32;
        narrow.resize(leaves.len(), Vec::new());
        for (leaf, narrow) in leaves.iter_mut().zip(narrow.iter_mut()) {
            leaf.iter_mut().for_each(|x| *x *= scale);
            narrow.resize(leaf.len(), T::ZERO);
            T::narrow(leaf, narrow);
        }
        self.sum(narrow)?;
        T::widen(&narrow[0], &mut leaves[0]);
        leaves[0].iter_mut().for_each(|x| *x /= scale);
        Ok(())
    }
}

/// A type that f32 can be rounded to.
pub(super) trait Narrow: Element {
    const ZERO: Self;
    fn narrow(from: &[f32], into: &mut [Self]);
    fn widen(from: &[Self], into: &mut [f32]);
}

impl Narrow for f16 {
    const ZERO: f16 = f16::ZERO;

    fn narrow(from: &[f32], into: &mut [f16]) {
        unisono_codec::fp16::encode(from, into);
    }

    fn widen(from: &[f16], into: &mut [f32]) {
        unisono_codec::fp16::decode(from, into);
    }
}

impl Narrow for bf16 {
    const ZERO: bf16 = bf16::ZERO;

    fn narrow(from: &[f32], into: &mut [bf16]) {
        unisono_codec::bf16::encode(from, into);
    }

    fn widen(from: &[bf16], into: &mut [f32]) {
        unisono_codec::bf16::decode(from, into);
    }
}
