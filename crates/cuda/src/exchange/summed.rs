//! Encodings that are summed while encoded: an all-reduce of fewer elements, or of narrower ones.
//!
//! Narrow elements are scaled down before, by a power of two, so that no sum overflows unless an element does. Both ways
//! are folds, which have the host's bits: to divide by a power of two is to multiply by its inverse, and to multiply by
//! one is to add up as many equal numbers, of which every sum is exact.

use unisono_codec::{Summed, Wire};
use unisono_collective::{Dtype, Reduction};

use super::scratch::Use;
use super::{DeviceGradient, Exchange, ExchangeError};
use crate::codec::DeviceCodec;
use crate::library::DevicePtr;
use crate::stream::Stream;

impl Exchange {
    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn exchange_summed(
        &mut self,
        summed: &dyn Summed,
        codec: usize,
        step: u64,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let rounds = summed.rounds();
        let lengths: Vec<usize> = (0..rounds)
            .map(|round| gradients.iter().map(|of| self.own(of).round_elements(round)).sum())
            .collect();
        let all = self.scratch.of(Use::Means, lengths.iter().sum::<usize>() * 4)?;
        let mut means = Vec::with_capacity(rounds);
        // SAFETY: the caller's promise; the scratch memory has room for all rounds.
        unsafe {
            for of in gradients {
                if let Some(owed) = self.owed(codec, of.parameter) {
                    self.own(of).absorb(stream, of.pointer, owed)?;
                }
            }
            let mut start = all;
            for (round, length) in lengths.iter().enumerate() {
                let (mut at, mut before) = (start, means.last().copied());
                for of in gradients {
                    let values = self.owed(codec, of.parameter).unwrap_or(of.pointer);
                    let own = self.own(of);
                    own.encode_round(stream, &self.task(of.parameter, step), values, before, at)?;
                    at = at.offset(own.round_elements(round) * 4);
                    before = before.map(|before| before.offset(own.round_elements(round - 1) * 4));
                }
                self.mean_of_round(summed.wire(), gradients, start, *length, stream)?;
                let mut at = start;
                for of in gradients.iter().filter(|_| round + 1 < rounds) {
                    self.own(of).settle(stream, at)?;
                    at = at.offset(self.own(of).round_elements(round) * 4);
                }
                means.push(start);
                start = start.offset(length * 4);
            }
            for of in gradients {
                let (owed, task) = (self.owed(codec, of.parameter), self.task(of.parameter, step));
                self.own(of).decode_rounds(stream, &task, &means, owed, of.pointer)?;
                for (round, at) in means.iter_mut().enumerate() {
                    *at = at.offset(self.own(of).round_elements(round) * 4);
                }
            }
        }
        Ok(())
    }

    /// Replaces elements by their mean over all ranks, which travel by a type.
    ///
    /// # Safety
    /// They are valid until it is done, and nothing else touches them meanwhile.
    unsafe fn mean_of_round(
        &mut self,
        wire: Wire,
        gradients: &[DeviceGradient],
        at: DevicePtr,
        count: usize,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let dtype = match wire {
            // SAFETY: the caller's promise.
            Wire::F32 => unsafe {
                self.calls.all_reduce(at, count, Dtype::F32, stream)?;
                return self.divide(at, at, count, stream);
            },
            Wire::Fp16 => Dtype::F16,
            Wire::Bf16 => Dtype::Bf16,
        };
        if count == 0 {
            return Ok(());
        }
        let scale = self.world().next_power_of_two();
        let down = u32::try_from(scale).ok();
        let narrow = self.scratch.of(Use::Outgoing, count * 2)?;
        let caster = gradients[0];
        // SAFETY: the caller's promise; the scratch memory has room for all.
        unsafe {
            let sum = Reduction::Sum;
            self.folds.fold(stream, Dtype::F32, sum, down, &[at], at, None, count)?;
            self.own(&caster).cast_round(stream, wire, false, count, at, narrow)?;
            self.calls.all_reduce(narrow, count, dtype, stream)?;
            self.own(&caster).cast_round(stream, wire, true, count, narrow, at)?;
            self.average(&vec![at; scale], at, count, stream)
        }
    }

    /// The codec of a parameter that has one of its own.
    pub(super) fn own(&self, of: &DeviceGradient) -> &DeviceCodec {
        self.held[of.parameter].own.as_ref().expect("a codec that is not by blocks")
    }
}
