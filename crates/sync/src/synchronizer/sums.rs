//! Gradients that the worker sums itself, in memory that this process cannot add up.
//!
//! A worker whose gradients are on a device would send every shard's to the host, where most of them are only added
//! to the one before. Such a worker [sums outside](Synchronizer::sum_outside): it follows the
//! [accumulation](Synchronizer::accumulation) of the step on the device, leaf by leaf, and hands over what remains,
//! the sums of its maximal subtrees. A sum is handed over in [parts](Synchronizer::sum_part), as its memory comes in,
//! and is then [ended](Synchronizer::end_sum). The sums of a parameter come in order, and the last of them, which has
//! the last shard in it, lets the parameter's bucket go. Where a strategy wants the leaves apart, each is a sum.
//!
//! The bits are those of [`Synchronizer::gradient`] if the worker adds as IEEE 754 says.

use super::{Constant, Synchronizer, Values};
use crate::accumulate::Accumulation;

impl Synchronizer {
    /// From the next step on, the worker hands over sums instead of gradients. Called between steps.
    pub fn sum_outside(&self) {
        let mut guard = self.lock();
        guard.outside = true;
        self.lay_out(&mut guard);
        guard.start_over();
    }

    /// How the shards of this worker are summed in the step under way, or in the next.
    pub fn accumulation(&self) -> Accumulation {
        self.lock().accumulation.clone()
    }

    /// Takes a part of a sum of a parameter, from its element `at` on.
    ///
    /// # Panics
    /// If the worker does not sum outside, or the parameter or the sum has no such part.
    pub fn sum_part(&self, parameter: usize, sum: usize, at: usize, part: &[f32]) {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.outside && sum < step.accumulation.sums(), "a sum of the accumulation");
        let (bucket, span) = (step.layout.bucket_of(parameter), step.layout.span(parameter));
        assert!(at + part.len() <= span.len(), "a part of the parameter");
        let begin = span.start + at;
        step.buckets[bucket].slots[sum][begin..begin + part.len()].copy_from_slice(part);
    }

    /// All parts of a sum have been taken; in so many of its shards the parameter had a gradient. Of none, the sum is
    /// zero and needs no parts.
    ///
    /// # Panics
    /// If the worker does not sum outside, or the sum of the last shard comes before that has begun.
    pub fn end_sum(&self, parameter: usize, sum: usize, shards: usize) {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.outside && sum < step.accumulation.sums(), "a sum of the accumulation");
        let (bucket, at) = (step.layout.bucket_of(parameter), step.layout.count(parameter));
        let slot = &mut step.buckets[bucket].slots[sum];
        if shards == 0 {
            Constant(0.0).store(&mut slot[step.layout.span(parameter)]);
        }
        slot[at] = shards as f32;
        if sum + 1 == step.accumulation.sums() {
            assert!(step.open && step.begun == step.own.len(), "the last shard has begun");
            self.release(step, bucket);
        }
    }
}
