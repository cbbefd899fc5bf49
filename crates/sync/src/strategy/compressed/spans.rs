//! Encodings of blocks: decode, average and encode again, each worker a span.
//!
//! Every parameter's blocks are shared out among the workers. All send each worker the encodings of
//! its share, one per shard. It decodes them, adds them up in the order of the canonical tree, divides,
//! and encodes the mean, for which it keeps a residual of its own. All gather the encoded means, and
//! decode them. Each worker sends and receives as many bytes as an all-reduce of the encodings would,
//! had they been summable.
//!
//! All of it passes over memory once each way. What lies between is done a piece at a time, in the first cache: units of
//! usual size, residual and encoding on the way out; decoding, sum, mean and units on the way back.
//!
//! Between two shards nothing is gained by encoding the mean: each worker gets the other's encoding
//! as it is, for as many bytes and without a second loss.

use std::cell::Cell;
use std::ops::Range;

use unisono_codec::scale::Scale;
use unisono_codec::stream::{ask_ahead, bypass, bypasses, fence};
use unisono_codec::{BadEncoding, Key, Spans, divide_all, is_encoded_twice};

use super::memory::State;
use super::{Compressed, timed};
use crate::accumulate::{Accumulation, Values};
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
                        let State { shards, scale, .. } = &mut self.states[parameter];
                        let (residual, scale) = (&mut shards[i].residual, scale.as_ref());
                        let owed = feeds_back.then(|| &mut residual[span.clone()]);
                        encode(spans, key, span.start, gradient, scale, owed, into);
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
                        spans.encode_fed(key, place, mean, owed, into);
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
                    let into = &mut gradients.slots[0][layout.span(parameter)][span.clone()];
                    let scale = self.states[parameter].scale.as_ref();
                    let decoded = decode(spans, bytes, span.start, scale, into);
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
        let (layout, step, me) =
            (gradients.layout.clone(), gradients.step, self.combiner.group().rank());
        let bytes = |parameter: usize| spans.bytes(self.parameters[parameter].elements());
        let lengths: Vec<usize> = parameters.iter().map(|p| bytes(*p)).collect();
        let one: usize = lengths.iter().sum();
        let (mut coding, shards) = (self.coding, self.shards.count());
        let mine = one * self.own.len();
        // Each of one or two workers has as many of one or two shards.
        debug_assert_eq!(mine * self.workers(), one * shards);
        self.buffers.whole.make_room(self.combiner.group(), one * shards)?;
        let mut all = std::mem::take(&mut self.buffers.whole);
        timed(&mut coding, || {
            let mut rest = &mut all[me * mine..][..mine];
            for (i, shard) in self.own.clone().enumerate() {
                for (&parameter, length) in parameters.iter().zip(&lengths) {
                    let (into, after) = rest.split_at_mut(*length);
                    rest = after;
                    let gradient = &gradients.slots[i][layout.span(parameter)];
                    let key = self.task(parameter, step).key(shard);
                    let State { shards, scale, .. } = &mut self.states[parameter];
                    let owed = feeds_back.then_some(&mut shards[i].residual[..]);
                    encode(spans, key, 0, gradient, scale.as_ref(), owed, into);
                }
            }
        });
        let gathered = self.combiner.group().all_gather_in_place(&mut all[..one * shards]);
        let averaged = gathered.map_err(SyncError::from).and_then(|()| {
            timed(&mut coding, || {
                let mut average = Average::new(shards);
                let mut first = 0;
                for (&parameter, length) in parameters.iter().zip(&lengths) {
                    let scale = self.states[parameter].scale.as_ref();
                    let into = &mut gradients.slots[0][layout.span(parameter)];
                    let is_long = bypasses(into);
                    for at in pieces(spans, into.len()) {
                        let encoded = first + spans.bytes(at.start)..first + spans.bytes(at.end);
                        ask_ahead(&all, encoded.clone());
                        let shards = all[..one * shards].chunks_exact(one);
                        let mean =
                            average.of(spans, shards.map(|all| &all[encoded.clone()]), at.len())?;
                        finish(mean, at.start, scale, is_long, &mut into[at]);
                    }
                    if is_long {
                        fence();
                    }
                    first += length;
                }
                Ok(())
            })
        });
        self.buffers.whole = all;
        self.coding = coding;
        averaged
    }
}

/// Averages the encodings of all shards, a piece at a time, in the order of the canonical tree.
struct Average {
    sum: Accumulation,
    slots: Vec<Vec<f32>>,
}

impl Average {
    fn new(shards: usize) -> Average {
        let sum = Accumulation::new(shards, 0..shards);
        Average { slots: vec![Vec::new(); sum.slots()], sum }
    }

    /// The mean of one piece, given each shard's encoding of it.
    fn of<'a>(
        &mut self,
        spans: &dyn Spans,
        shards: impl Iterator<Item = &'a [u8]>,
        elements: usize,
    ) -> Result<&mut [f32], SyncError> {
        self.slots.iter_mut().for_each(|slot| slot.resize(elements, 0.0));
        for (shard, bytes) in shards.enumerate() {
            let encoded = Encoded { spans, bytes, error: Cell::new(None) };
            self.sum.add(shard, &mut self.slots, 0..elements, &encoded);
            if let Some(source) = encoded.error.take() {
                return Err(SyncError::Encoding { shard, source });
            }
        }
        let mean = &mut self.slots[0];
        divide_all(mean, self.sum.leaves() as f32);
        Ok(mean)
    }
}

/// A leaf that is decoded where it is summed.
struct Encoded<'a> {
    spans: &'a dyn Spans,
    bytes: &'a [u8],
    /// Why it could not be.
    error: Cell<Option<BadEncoding>>,
}

impl Values for Encoded<'_> {
    fn store(&self, into: &mut [f32]) {
        self.error.set(self.spans.decode(self.bytes, into).err());
    }

    fn add(&self, into: &mut [f32]) {
        self.error.set(self.spans.decode_add(self.bytes, into).err());
    }
}

/// Puts a piece in its place, in units of 1: its first element is the parameter's number `first`.
fn finish(piece: &mut [f32], first: usize, scale: Option<&Scale>, is_long: bool, into: &mut [f32]) {
    if let Some(scale) = scale {
        scale.multiply_from(first, piece);
    }
    match is_long {
        true => bypass(piece, into),
        false => into.copy_from_slice(piece),
    }
}

/// Decodes a run of blocks, of which the first element is the parameter's number `first`.
fn decode(
    spans: &dyn Spans,
    bytes: &[u8],
    first: usize,
    scale: Option<&Scale>,
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    if scale.is_none() {
        return spans.decode(bytes, into);
    }
    let is_long = bypasses(into);
    let mut decoded = [0.0; AT_ONCE];
    for at in pieces(spans, into.len()) {
        let encoded = spans.bytes(at.start)..spans.bytes(at.end);
        ask_ahead(bytes, encoded.clone());
        let decoded = &mut decoded[..at.len()];
        spans.decode(&bytes[encoded], decoded)?;
        finish(decoded, first + at.start, scale, is_long, &mut into[at]);
    }
    if is_long {
        fence();
    }
    Ok(())
}

/// Encodes a run of blocks of one shard, with what is owed if it is remembered.
fn encode(
    spans: &dyn Spans,
    key: Key,
    first: usize,
    gradient: &[f32],
    scale: Option<&Scale>,
    mut owed: Option<&mut [f32]>,
    into: &mut [u8],
) {
    let Some(scale) = scale else {
        return match owed {
            Some(owed) => spans.encode_fed(key, first, gradient, owed, into),
            None => spans.encode(key, first, gradient, into),
        };
    };
    let mut scaled = [0.0; AT_ONCE];
    for at in pieces(spans, gradient.len()) {
        ask_ahead(gradient, at.clone());
        let (place, scaled) = (first + at.start, &mut scaled[..at.len()]);
        scale.divide_into(place, &gradient[at.clone()], scaled);
        let into = &mut into[spans.bytes(at.start)..spans.bytes(at.end)];
        match &mut owed {
            Some(owed) => {
                ask_ahead(owed, at.clone());
                spans.encode_fed(key, place, scaled, &mut owed[at], into);
            }
            None => spans.encode(key, place, scaled, into),
        }
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
    let piece = AT_ONCE / spans.block() * spans.block();
    assert!(piece > 0, "no block is longer than what is worked on at once");
    (0..elements).step_by(piece).map(move |start| start..(start + piece).min(elements))
}
