//! Encodings that are summed while encoded: an all-reduce of fewer elements.
//!
//! In every round, each leaf of every parameter is encoded into one vector per shard, these are
//! rounded to the type in which they travel, and the canonical tree over the shards adds them up,
//! rounding at every node: the same bits whichever worker holds which shards.
//!
//! Where an encoding is nothing but the gradient in a narrower type, one pass over it scales and rounds it, straight into
//! memory that the workers of a host read in place, and one pass makes the mean of the sum.

use std::ops::DerefMut;

use half::{bf16, f16};
use unisono_codec::{Mean, Summed, Wire};
use unisono_collective::{Element, Error};

use super::{Compressed, task, timed};
use crate::combine::{Combiner, alignment, fold_leaves};
use crate::error::SyncError;
use crate::shards::Shards;
use crate::slot::Slot;
use crate::strategy::Gradients;

/// Memory that is kept from call to call.
#[derive(Default)]
pub struct SummedBuffers {
    /// Encodings, by shard.
    leaves: Vec<Vec<f32>>,
    fp16: Vec<Slot<f16>>,
    bf16: Vec<Slot<bf16>>,
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
        if summed.is_identity() && !feeds_back && summed.wire() != Wire::F32 {
            let outcome = match summed.wire() {
                Wire::Bf16 => self.exchange_cast(&mut buffers.bf16, parameters, gradients),
                _ => self.exchange_cast(&mut buffers.fp16, parameters, gradients),
            };
            self.buffers.summed = buffers;
            return outcome;
        }
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

impl Compressed {
    /// Sums gradients in a narrower type, which is all that their encoding is.
    fn exchange_cast<T: Narrow>(
        &mut self,
        leaves: &mut Vec<Slot<T>>,
        parameters: &[usize],
        gradients: &mut Gradients,
    ) -> Result<(), SyncError> {
        let layout = gradients.layout.clone();
        let length: usize = parameters.iter().map(|p| layout.span(*p).len()).sum();
        let padded = length.next_multiple_of(alignment(self.shards, self.workers()));
        leaves.resize_with(gradients.filled, Slot::default);
        // The first leaf is what travels.
        for (i, leaf) in leaves.iter_mut().enumerate() {
            match i {
                0 => leaf.make_room(self.combiner.group(), padded)?,
                _ if leaf.len() < padded => *leaf = Slot::Own(vec![T::ZERO; padded]),
                _ => {}
            }
        }
        let world = World { combiner: &mut self.combiner, shards: self.shards };
        let factor = world.factor();
        let mut coding = self.coding;
        timed(&mut coding, || {
            for (leaf, slot) in leaves.iter_mut().zip(&gradients.slots) {
                let mut rest = &mut leaf[..];
                for &parameter in parameters {
                    let values = &slot[layout.span(parameter)];
                    let (into, after) = rest.split_at_mut(values.len());
                    rest = after;
                    T::narrow(values, 1.0 / factor, into);
                }
                rest[..padded - length].fill(T::ZERO);
            }
        });
        let mut whole: Vec<&mut [T]> = leaves.iter_mut().map(|leaf| &mut leaf[..padded]).collect();
        world.sum(&mut whole)?;
        let sum = &whole[0];
        timed(&mut coding, || {
            let mean = Mean::new(factor, gradients.shards);
            let mut rest = &sum[..length];
            for &parameter in parameters {
                let into = &mut gradients.slots[0][layout.span(parameter)];
                let (sums, after) = rest.split_at(into.len());
                rest = after;
                T::widen(sums, mean, into);
            }
        });
        self.coding = coding;
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
    fn sum<T: Element, S: DerefMut<Target = [T]>>(self, leaves: &mut [S]) -> Result<(), Error> {
        let group = self.combiner.group();
        let own = self.shards.of(group.rank(), group.size());
        let subtrees = fold_leaves(self.shards, own, leaves);
        self.combiner.sum(&mut leaves[..subtrees])
    }

    /// What leaves in a narrower type are divided by, so that no sum overflows unless a leaf does: a power of two, which
    /// costs no bits.
    fn factor(&self) -> f32 {
        self.shards.count().next_power_of_two() as f32
    }

    /// As [`World::sum`], in a narrower type.
    fn sum_narrow<T: Narrow>(
        self,
        leaves: &mut [Vec<f32>],
        narrow: &mut Vec<Slot<T>>,
    ) -> Result<(), Error> {
        let factor = self.factor();
        narrow.resize_with(leaves.len(), Slot::default);
        for (leaf, narrow) in leaves.iter_mut().zip(narrow.iter_mut()) {
            if narrow.len() < leaf.len() {
                *narrow = Slot::Own(vec![T::ZERO; leaf.len()]);
            }
            T::narrow(leaf, 1.0 / factor, &mut narrow[..leaf.len()]);
        }
        let mut whole: Vec<&mut [T]> = narrow
            .iter_mut()
            .zip(&*leaves)
            .map(|(narrow, leaf)| &mut narrow[..leaf.len()])
            .collect();
        self.sum(&mut whole)?;
        T::widen(whole[0], Mean::new(factor, 1), &mut leaves[0]);
        Ok(())
    }
}

/// A type that f32 can be rounded to.
pub(super) trait Narrow: Element + Default {
    const ZERO: Self;
    /// Rounds every value times a factor.
    fn narrow(from: &[f32], factor: f32, into: &mut [Self]);
    /// Makes means of sums.
    fn widen(sums: &[Self], mean: Mean, into: &mut [f32]);
}

impl Narrow for f16 {
    const ZERO: f16 = f16::ZERO;

    fn narrow(from: &[f32], factor: f32, into: &mut [f16]) {
        unisono_codec::fp16::encode_scaled(from, factor, into);
    }

    fn widen(sums: &[f16], mean: Mean, into: &mut [f32]) {
        unisono_codec::fp16::decode_mean(sums, mean, into);
    }
}

impl Narrow for bf16 {
    const ZERO: bf16 = bf16::ZERO;

    fn narrow(from: &[f32], factor: f32, into: &mut [bf16]) {
        unisono_codec::bf16::encode_scaled(from, factor, into);
    }

    fn widen(sums: &[bf16], mean: Mean, into: &mut [f32]) {
        unisono_codec::bf16::decode_mean(sums, mean, into);
    }
}
