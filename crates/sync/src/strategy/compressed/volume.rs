//! What the exchange of a bucket takes: calls, bytes, sums and coding, before anything is sent.

use std::sync::Arc;

use unisono_codec::{Codec, CodecSpec, Passage, Rules};

use super::spans::is_encoded_twice;
use crate::advice::Volume;
use crate::bucket::{Bucket, Layout};
use crate::shards::Shards;
use crate::synchronizer::Parameter;

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
    ) -> Vec<Volume> {
        let volume = |bucket| self.volume(bucket, parameters, assignment);
        layout.buckets().iter().map(volume).collect()
    }

    /// Shards of the worker that has most.
    pub fn most_shards(&self) -> usize {
        self.shards.count().div_ceil(self.workers)
    }

    fn volume(&self, bucket: &Bucket, parameters: &[Parameter], assigned: &Assignment) -> Volume {
        let elements = |parameter: &usize| parameters[*parameter].elements();
        let plain = bucket.parameters.iter().filter(|p| assigned.of[**p].is_none());
        let carried = bucket.len - bucket.gradients;
        let mut volume = self.summed(plain.map(elements).sum::<usize>() + carried, 4);
        for (i, (_, codec, seconds)) in assigned.codecs.iter().enumerate() {
            let of = || bucket.parameters.iter().filter(|p| assigned.of[**p] == Some(i));
            if of().next().is_none() {
                continue;
            }
            let shapes = || of().map(|p| &parameters[*p].shape[..]);
            let bytes: usize = shapes().map(|shape| codec.encoded_bytes(shape)).sum();
            match codec.passage() {
                Passage::Summed(summed) => {
                    for round in 0..summed.rounds() {
                        let encoded = shapes().map(|shape| summed.encoded(shape, round)).sum();
                        volume = add(volume, self.summed(encoded, summed.wire().bytes()));
                    }
                }
                Passage::Spans(_) => volume = add(volume, self.spans(bytes)),
                Passage::Gathered(_) => {
                    volume = add(volume, self.gathered(bytes + 4 * of().count()));
                }
            }
            volume.coding += seconds * of().map(elements).sum::<usize>() as f64;
        }
        volume
    }

    /// The exact sum of vectors: an all-reduce; or, where workers hold several subtrees, an
    /// all-to-all of all of them and an all-gather.
    fn summed(&self, elements: usize, width: usize) -> Volume {
        let held = self.shards.subtrees(self.workers);
        let most = held.iter().map(Vec::len).max().unwrap_or(1);
        let bytes = (elements * width) as f64 * self.others();
        Volume {
            calls: if most == 1 { 1.0 } else { 2.0 },
            bytes: bytes * (most + 1) as f64,
            all_bytes: bytes * (held.iter().map(Vec::len).sum::<usize>() + self.workers) as f64,
            folded: elements as f64,
            coding: 0.0,
        }
    }

    /// Encodings of as many bytes per shard, of which everybody gets a share, and its mean.
    fn spans(&self, bytes: usize) -> Volume {
        if !is_encoded_twice(self.shards.count()) {
            return Volume { calls: 1.0, ..self.gathered(bytes) };
        }
        let bytes = bytes as f64 * self.others();
        Volume {
            calls: 2.0,
            bytes: bytes * (self.most_shards() + 1) as f64,
            all_bytes: bytes * (self.shards.count() + self.workers) as f64,
            ..Volume::default()
        }
    }

    /// Encodings of as many bytes per shard, after their lengths, to everybody.
    fn gathered(&self, bytes: usize) -> Volume {
        let bytes = bytes as f64 * (self.workers - 1) as f64;
        Volume {
            calls: 2.0,
            bytes: bytes * self.most_shards() as f64,
            all_bytes: bytes * self.shards.count() as f64,
            ..Volume::default()
        }
    }

    /// Which part of something that is shared out evenly belongs to others.
    fn others(&self) -> f64 {
        (self.workers - 1) as f64 / self.workers as f64
    }
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
