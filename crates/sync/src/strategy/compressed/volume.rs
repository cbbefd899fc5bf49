//! What the exchange of a bucket takes: calls, bytes, sums and coding, before anything is sent.

use std::sync::Arc;

use unisono_codec::{Codec, CodecSpec, Passage, Rules, Wire};
use unisono_collective::{Dtype, Error, Op};

use super::calls::{Calls, Sent};
use crate::advice::Volume;
use crate::bucket::{Bucket, Layout};
use crate::shards::Shards;
use crate::synchronizer::Parameter;
use unisono_codec::is_encoded_twice;

/// The codecs that rules give to the parameters of a model.
pub struct Assignment {
    /// Every codec in use, and the seconds it takes per element.
    pub codecs: Vec<(CodecSpec, Arc<dyn Codec>, f64)>,
    /// Which of them each parameter has.
    pub of: Vec<Option<usize>>,
}

impl Assignment {
    /// By the rules. `seconds` is what a codec takes per element.
    pub fn new(
        rules: &Rules,
        parameters: &[Parameter],
        seconds: impl Fn(&CodecSpec) -> f64,
    ) -> Assignment {
        let mut codecs: Vec<(CodecSpec, Arc<dyn Codec>, f64)> = Vec::new();
        let of = parameters.iter().map(|parameter| {
            let spec = rules.codec(&parameter.name, &parameter.shape)?;
            let known = codecs.iter().position(|(known, ..)| known == spec);
            Some(known.unwrap_or_else(|| {
                codecs.push((spec.clone(), spec.build(), seconds(spec)));
                codecs.len() - 1
            }))
        });
        let of = of.collect();
        Assignment { codecs, of }
    }
}

/// Those who exchange.
#[derive(Clone, Copy, Debug)]
pub struct World {
    pub shards: Shards,
    pub workers: usize,
}

impl World {
    /// What each bucket of a layout takes.
    pub fn volumes(
        &self,
        layout: &Layout,
        parameters: &[Parameter],
        assignment: &Assignment,
        calls: &Calls<'_>,
    ) -> Result<Vec<Volume>, Error> {
        let volume = |bucket| self.volume(bucket, parameters, assignment, calls);
        layout.buckets().iter().map(volume).collect()
    }

    /// Shards of the worker that has most.
    pub fn most_shards(&self) -> usize {
        self.shards.count().div_ceil(self.workers)
    }

    fn volume(
        &self,
        bucket: &Bucket,
        parameters: &[Parameter],
        assigned: &Assignment,
        calls: &Calls<'_>,
    ) -> Result<Volume, Error> {
        let elements = |parameter: &usize| parameters[*parameter].elements();
        let plain = bucket.parameters.iter().filter(|p| assigned.of[**p].is_none());
        let carried = bucket.len - bucket.gradients;
        let plain = plain.map(elements).sum::<usize>() + carried;
        let mut volume = self.summed(plain, Dtype::F32, calls)?;
        for (i, (_, codec, seconds)) in assigned.codecs.iter().enumerate() {
            let of = || bucket.parameters.iter().filter(|p| assigned.of[**p] == Some(i));
            if of().next().is_none() {
                continue;
            }
            let shapes = || of().map(|p| &parameters[*p].shape[..]);
            let bytes: usize = shapes().map(|shape| codec.encoded_bytes(shape)).sum();
            match codec.passage() {
                Passage::Summed(summed) => {
                    // Both narrow types are chosen for alike.
                    let dtype = if summed.wire() == Wire::F32 { Dtype::F32 } else { Dtype::F16 };
                    for round in 0..summed.rounds() {
                        let encoded = shapes().map(|shape| summed.encoded(shape, round)).sum();
                        volume = add(volume, self.summed(encoded, dtype, calls)?);
                    }
                }
                Passage::Spans(_) => volume = add(volume, self.spans(bytes, calls)?),
                Passage::Gathered(_) => {
                    volume = add(volume, self.gathered(bytes + 4 * of().count(), true, calls)?);
                }
            }
            volume.coding += seconds * of().map(elements).sum::<usize>() as f64;
        }
        Ok(volume)
    }

    /// The exact sum of vectors: an all-reduce; or, where workers hold several subtrees, an
    /// all-to-all of all of them and an all-gather.
    fn summed(&self, elements: usize, dtype: Dtype, calls: &Calls<'_>) -> Result<Volume, Error> {
        let folded = elements as f64;
        let bytes = (elements * dtype.size()) as f64 * self.others();
        if self.shards.is_all_reduce(self.workers) {
            let sent = calls.sent(Op::AllReduce, dtype, elements)?;
            return Ok(Volume { folded, ..volume(1.0, 2.0 * bytes, sent) });
        }
        let held = self.shards.subtrees(self.workers);
        let most = held.iter().map(Vec::len).max().unwrap_or(1) as f64;
        let mean = held.iter().map(Vec::len).sum::<usize>() as f64 / self.workers as f64;
        let block = elements.div_ceil(self.workers);
        let exchanged = times(calls.sent(Op::AllToAll, dtype, block)?, most, mean);
        let sent = plus(exchanged, calls.sent(Op::AllGather, dtype, block)?);
        Ok(Volume { folded, ..volume(2.0, bytes * (most + 1.0), sent) })
    }

    /// Encodings of as many bytes per shard, of which every rank gets a share, and its mean.
    fn spans(&self, bytes: usize, calls: &Calls<'_>) -> Result<Volume, Error> {
        if !is_encoded_twice(self.shards.count()) {
            return self.gathered(bytes, false, calls);
        }
        let (most, mean) = (self.most_shards() as f64, self.mean_shards());
        let share = bytes.div_ceil(self.workers);
        let exchanged = times(calls.sent(Op::AllToAll, Dtype::U8, share)?, most, mean);
        let sent = plus(exchanged, calls.sent(Op::AllGather, Dtype::U8, share)?);
        Ok(volume(2.0, bytes as f64 * self.others() * (most + 1.0), sent))
    }

    /// Encodings of as many bytes per shard to all ranks, after their lengths if those are not known.
    fn gathered(
        &self,
        bytes: usize,
        after_lengths: bool,
        calls: &Calls<'_>,
    ) -> Result<Volume, Error> {
        let longest = bytes * self.most_shards();
        let sent = calls.sent(Op::AllGather, Dtype::U8, longest)?;
        let mut sent = times(sent, 1.0, self.mean_shards() / self.most_shards() as f64);
        let mut number = 1.0;
        if after_lengths {
            sent = plus(sent, calls.sent(Op::AllGather, Dtype::I64, 1)?);
            number = 2.0;
        }
        Ok(volume(number, (longest * (self.workers - 1)) as f64, sent))
    }

    fn mean_shards(&self) -> f64 {
        self.shards.count() as f64 / self.workers as f64
    }

    /// Which part of something that is shared out evenly belongs to others.
    fn others(&self) -> f64 {
        (self.workers - 1) as f64 / self.workers as f64
    }
}

/// As many calls, which send this. Through shared memory a byte is written once, however many ranks read
/// it, so that what takes time there is not what is written but what each rank `needs` of others.
fn volume(calls: f64, needs: f64, sent: Sent) -> Volume {
    let bytes = if sent.by_links { sent.busiest } else { needs };
    Volume { calls, bytes, all_bytes: sent.all, ..Volume::default() }
}

/// Where the busiest rank sends so many times as much, and all of them on average.
fn times(sent: Sent, busiest: f64, mean: f64) -> Sent {
    Sent { busiest: sent.busiest * busiest, all: sent.all * mean, ..sent }
}

fn plus(a: Sent, b: Sent) -> Sent {
    Sent { busiest: a.busiest + b.busiest, all: a.all + b.all, by_links: a.by_links && b.by_links }
}

fn add(a: Volume, b: Volume) -> Volume {
    Volume {
        calls: a.calls + b.calls,
        bytes: a.bytes + b.bytes,
        all_bytes: a.all_bytes + b.all_bytes,
        folded: a.folded + b.folded,
        coding: a.coding + b.coding,
    }
}
