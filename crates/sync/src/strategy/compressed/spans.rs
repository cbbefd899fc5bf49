//! Encodings of blocks: decode, average and encode again, each worker a span.
//!
//! Every parameter's blocks are shared out among the workers. All send each worker the encodings of
//! its share, one per shard. It decodes them, adds them up in the order of the canonical tree, divides,
//! and encodes the mean, for which it keeps a residual of its own. All gather the encoded means, and
//! decode them. Each worker sends and receives as many bytes as an all-reduce of the encodings would,
//! had they been summable.
//!
//! Between two shards nothing is gained by encoding the mean: each worker gets the other's encoding
//! as it is, for as many bytes and without a second loss.

use std::ops::Range;

use unisono_codec::{Key, Spans, is_encoded_twice};

use super::{Compressed, timed};
use crate::accumulate::Accumulation;
use crate::combine::all_to_all;
use crate::error::SyncError;
use crate::shards;
use crate::strategy::Gradients;

/// Elements that are worked on at once, about: few enough for the first cache, with all that belongs
/// to them.
const AT_ONCE: usize = 2048;

impl Compressed {
    pub(super) fn exchange_spans(
        &mut self,
        spans: &dyn Spans,
        feeds_back: bool,
        parameters: &[usize],
        gradients: &mut Gradients,
    ) -> Result<(), SyncError> {
        if !is_encoded_twice(self.shards.count()) {
            return self.exchange_whole(spans, feeds_back, parameters, gradients);
        }
        let (me, workers) = (self.combiner.group().rank(), self.workers());
        let (layout, step) = (gradients.layout.clone(), gradients.step);
        let elements: Vec<usize> = self.parameters.iter().map(|p| p.elements()).collect();
        let share = |parameter: usize, rank: usize| {
            share(spans, parameter, elements[parameter], rank, workers)
        };
        // Bytes of one shard's encoding of all that a rank works on.
        let bytes: Vec<usize> = (0..workers)
            .map(|rank| parameters.iter().map(|p| spans.bytes(share(*p, rank).len())).sum())
            .collect();
        let held: Vec<usize> = (0..workers).map(|r| self.shards.of(r, workers).len()).collect();
        let sent: Vec<usize> = bytes.iter().map(|bytes| bytes * self.own.len()).collect();
        let received: Vec<usize> = held.iter().map(|held| held * bytes[me]).collect();
        let (most, longest) = (held.iter().max(), bytes.iter().max());
        let longest = most.unwrap_or(&0) * longest.unwrap_or(&0);
        let mut coding = self.coding;

        let mut outgoing = std::mem::take(&mut self.buffers.outgoing);
        outgoing.resize(sent.iter().sum(), 0);
        timed(&mut coding, || {
            let mut rest = &mut outgoing[..];
            for rank in 0..workers {
                for (i, shard) in self.own.clone().enumerate() {
                    for &parameter in parameters {
                        let span = share(parameter, rank);
                        let (into, after) = rest.split_at_mut(spans.bytes(span.len()));
                        rest = after;
                        let gradient = &gradients.slots[i][layout.span(parameter)][span.clone()];
                        let key = self.task(parameter, step).key(shard);
                        let residual = &mut self.states[parameter].shards[i].residual;
                        let owed = feeds_back.then(|| &mut residual[span.clone()]);
                        encode(spans, key, span.start, gradient, owed, into);
                    }
                }
            }
        });
        let mut incoming = std::mem::take(&mut self.buffers.incoming);
        incoming.resize(received.iter().sum(), 0);
        let group = self.combiner.group();
        all_to_all(group, &outgoing, &sent, &mut incoming, &received, longest)?;
        self.buffers.outgoing = outgoing;

        let mut mine = std::mem::take(&mut self.buffers.mine);
        mine.resize(bytes[me], 0);
        timed(&mut coding, || -> Result<(), SyncError> {
            let mut average = Average::new(self.shards.count());
            let mut first = 0;
            for &parameter in parameters {
                let span = share(parameter, me);
                let key = self.task(parameter, step).key(self.shards.count());
                for at in pieces(spans, span.len()) {
                    let encoded = first + spans.bytes(at.start)..first + spans.bytes(at.end);
                    let shards = incoming.chunks_exact(bytes[me]).map(|all| &all[encoded.clone()]);
                    let mean = average.of(spans, shards, at.len())?;
                    let (into, place) = (&mut mine[encoded], span.start + at.start);
                    if feeds_back {
                        let owed = &mut self.states[parameter].mean[at];
                        owed.iter_mut().zip(mean).for_each(|(owed, mean)| *owed += mean);
                        spans.encode_owed(key, place, owed, into);
                    } else {
                        spans.encode(key, place, mean, into);
                    }
                }
                first += spans.bytes(span.len());
            }
            Ok(())
        })?;
        self.buffers.incoming = incoming;

        let mut all = std::mem::take(&mut self.buffers.all);
        all.resize(bytes.iter().sum(), 0);
        self.combiner.group().all_gather_unequal(&mine, &mut all, &bytes)?;
        timed(&mut coding, || -> Result<(), SyncError> {
            let mut rest = &all[..];
            for rank in 0..workers {
                for &parameter in parameters {
                    let span = share(parameter, rank);
                    let (bytes, after) = rest.split_at(spans.bytes(span.len()));
                    rest = after;
                    let into = &mut gradients.slots[0][layout.span(parameter)][span];
                    let decoded = spans.decode(bytes, into);
                    let rank = self.combiner.group().members()[rank];
                    decoded.map_err(|source| SyncError::EncodingOfMean { rank, source })?;
                }
            }
            Ok(())
        })?;
        self.buffers.all = all;
        self.buffers.mine = mine;
        self.coding = coding;
        Ok(())
    }
}

impl Compressed {
    /// Gives all encodings to all workers, who average them by themselves.
    fn exchange_whole(
        &mut self,
        spans: &dyn Spans,
        feeds_back: bool,
        parameters: &[usize],
        gradients: &mut Gradients,
    ) -> Result<(), SyncError> {
        let (layout, step, workers) = (gradients.layout.clone(), gradients.step, self.workers());
        let bytes = |parameter: usize| spans.bytes(self.parameters[parameter].elements());
        let lengths: Vec<usize> = parameters.iter().map(|p| bytes(*p)).collect();
        let one: usize = lengths.iter().sum();
        let (mut coding, mut mine) = (self.coding, std::mem::take(&mut self.buffers.mine));
        mine.resize(one * self.own.len(), 0);
        timed(&mut coding, || {
            let mut rest = &mut mine[..];
            for (i, shard) in self.own.clone().enumerate() {
                for (&parameter, length) in parameters.iter().zip(&lengths) {
                    let (into, after) = rest.split_at_mut(*length);
                    rest = after;
                    let gradient = &gradients.slots[i][layout.span(parameter)];
                    let key = self.task(parameter, step).key(shard);
                    let residual = &mut self.states[parameter].shards[i].residual;
                    let owed = feeds_back.then_some(&mut residual[..]);
                    encode(spans, key, 0, gradient, owed, into);
                }
            }
        });
        let shards = self.shards.count();
        let mut all = std::mem::take(&mut self.buffers.all);
        all.resize(one * shards, 0);
        let counts: Vec<usize> =
            (0..workers).map(|rank| self.shards.of(rank, workers).len() * one).collect();
        self.combiner.group().all_gather_unequal(&mine, &mut all, &counts)?;
        timed(&mut coding, || -> Result<(), SyncError> {
            let mut average = Average::new(shards);
            let mut first = 0;
            for (&parameter, length) in parameters.iter().zip(&lengths) {
                let into = &mut gradients.slots[0][layout.span(parameter)];
                for at in pieces(spans, into.len()) {
                    let encoded = first + spans.bytes(at.start)..first + spans.bytes(at.end);
                    let shards = all.chunks_exact(one).map(|all| &all[encoded.clone()]);
                    let mean = average.of(spans, shards, at.len())?;
                    into[at].copy_from_slice(mean);
                }
                first += length;
            }
            Ok(())
        })?;
        self.buffers.mine = mine;
        self.buffers.all = all;
        self.coding = coding;
        Ok(())
    }
}

/// Averages the encodings of all shards, a piece at a time, in the order of the canonical tree.
struct Average {
    sum: Accumulation,
    slots: Vec<Vec<f32>>,
    leaf: Vec<f32>,
}

impl Average {
    fn new(shards: usize) -> Average {
        let sum = Accumulation::new(shards, 0..shards);
        Average { slots: vec![Vec::new(); sum.slots()], leaf: Vec::new(), sum }
    }

    /// The mean of one piece, given each shard's encoding of it.
    fn of<'a>(
        &mut self,
        spans: &dyn Spans,
        shards: impl Iterator<Item = &'a [u8]>,
        elements: usize,
    ) -> Result<&[f32], SyncError> {
        self.leaf.resize(elements, 0.0);
        self.slots.iter_mut().for_each(|slot| slot.resize(elements, 0.0));
        for (shard, bytes) in shards.enumerate() {
            let decoded = spans.decode(bytes, &mut self.leaf);
            decoded.map_err(|source| SyncError::Encoding { shard, source })?;
            self.sum.add(shard, &mut self.slots, 0..elements, &self.leaf.as_slice());
        }
        let mean = &mut self.slots[0];
        mean.iter_mut().for_each(|x| *x /= self.sum.leaves() as f32);
        Ok(mean)
    }
}

/// Encodes a run of blocks of one shard, with what is owed if it is remembered.
fn encode(
    spans: &dyn Spans,
    key: Key,
    first: usize,
    gradient: &[f32],
    owed: Option<&mut [f32]>,
    into: &mut [u8],
) {
    let Some(owed) = owed else { return spans.encode(key, first, gradient, into) };
    for at in pieces(spans, gradient.len()) {
        let owed = &mut owed[at.clone()];
        owed.iter_mut().zip(&gradient[at.clone()]).for_each(|(owed, g)| *owed += g);
        let into = &mut into[spans.bytes(at.start)..spans.bytes(at.end)];
        spans.encode_owed(key, first + at.start, owed, into);
    }
}

/// The elements of a parameter that a rank averages.
pub fn share(
    spans: &dyn Spans,
    parameter: usize,
    elements: usize,
    rank: usize,
    workers: usize,
) -> Range<usize> {
    shards::share(spans.block(), parameter, elements, rank, workers)
}

/// Cuts a run of blocks into pieces of whole blocks.
pub(super) fn pieces(spans: &dyn Spans, elements: usize) -> impl Iterator<Item = Range<usize>> {
    let piece = AT_ONCE.next_multiple_of(spans.block());
    (0..elements).step_by(piece).map(move |start| start..(start + piece).min(elements))
}
