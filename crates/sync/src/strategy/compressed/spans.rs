//! Encodings of blocks: decode, average and encode again, each worker a span.
//!
//! Every parameter's blocks are shared out among the workers. All send each worker the encodings of
//! its share, one per shard. It decodes them, adds them up in the order of the canonical tree, divides,
//! and encodes the mean, for which it keeps a residual of its own. All gather the encoded means, and
//! decode them. Each worker sends and receives as many bytes as an all-reduce of the encodings would,
//! had they been summable.

use std::ops::Range;

use unisono_codec::Spans;

use super::{Compressed, timed};
use crate::accumulate::Accumulation;
use crate::combine::all_to_all;
use crate::error::SyncError;
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

        let mut outgoing = std::mem::take(&mut self.scratch.outgoing);
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
                        if feeds_back {
                            let state = &mut self.states[parameter].shards[i];
                            let owed = &mut state.residual[span.clone()];
                            for at in pieces(spans, span.len()) {
                                let owed = &mut owed[at.clone()];
                                owed.iter_mut()
                                    .zip(&gradient[at.clone()])
                                    .for_each(|(owed, g)| *owed += g);
                                let into = &mut into[spans.bytes(at.start)..spans.bytes(at.end)];
                                spans.encode_owed(key, span.start + at.start, owed, into);
                            }
                        } else {
                            spans.encode(key, span.start, gradient, into);
                        }
                    }
                }
            }
        });
        let mut incoming = std::mem::take(&mut self.scratch.incoming);
        incoming.resize(received.iter().sum(), 0);
        let group = self.combiner.group();
        all_to_all(group, &outgoing, &sent, &mut incoming, &received, longest)?;
        self.scratch.outgoing = outgoing;

        let mut mine = std::mem::take(&mut self.scratch.mine);
        mine.resize(bytes[me], 0);
        timed(&mut coding, || -> Result<(), SyncError> {
            let shards = self.shards.count();
            let sum = Accumulation::new(shards, 0..shards);
            let (mut slots, mut leaf) = (Vec::new(), Vec::new());
            let mut first = 0;
            for &parameter in parameters {
                let span = share(parameter, me);
                let key = self.task(parameter, step).key(shards);
                for at in pieces(spans, span.len()) {
                    let encoded = first + spans.bytes(at.start)..first + spans.bytes(at.end);
                    leaf.resize(at.len(), 0.0);
                    slots.resize(sum.slots(), Vec::new());
                    slots.iter_mut().for_each(|slot: &mut Vec<f32>| slot.resize(at.len(), 0.0));
                    for (shard, bytes) in incoming.chunks_exact(bytes[me]).enumerate() {
                        let decoded = spans.decode(&bytes[encoded.clone()], &mut leaf);
                        decoded.map_err(|source| SyncError::Encoding { shard, source })?;
                        sum.add(shard, &mut slots, 0..at.len(), &leaf.as_slice());
                    }
                    let mean = &mut slots[0];
                    mean.iter_mut().for_each(|x| *x /= shards as f32);
                    let (into, place) = (&mut mine[encoded], span.start + at.start);
                    if feeds_back {
                        let owed = &mut self.states[parameter].mean[at];
                        owed.iter_mut().zip(&*mean).for_each(|(owed, mean)| *owed += mean);
                        spans.encode_owed(key, place, owed, into);
                    } else {
                        spans.encode(key, place, mean, into);
                    }
                }
                first += spans.bytes(span.len());
            }
            Ok(())
        })?;
        self.scratch.incoming = incoming;

        let mut all = std::mem::take(&mut self.scratch.all);
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
                    decoded.map_err(|source| SyncError::EncodingOfMean { rank, source })?;
                }
            }
            Ok(())
        })?;
        self.scratch.all = all;
        self.scratch.mine = mine;
        self.coding = coding;
        Ok(())
    }
}

/// The elements of a parameter that a rank averages: whole blocks. Ranks take turns in being first,
/// so that small parameters do not all meet at one.
pub fn share(
    spans: &dyn Spans,
    parameter: usize,
    elements: usize,
    rank: usize,
    workers: usize,
) -> Range<usize> {
    let (block, turn) = (spans.block(), (rank + parameter) % workers);
    let blocks = elements.div_ceil(block);
    let edge = |turn: usize| (blocks * turn / workers * block).min(elements);
    edge(turn)..edge(turn + 1)
}

/// Cuts a run of blocks into pieces of whole blocks.
pub(super) fn pieces(spans: &dyn Spans, elements: usize) -> impl Iterator<Item = Range<usize>> {
    let piece = AT_ONCE.next_multiple_of(spans.block());
    (0..elements).step_by(piece).map(move |start| start..(start + piece).min(elements))
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono_codec::sign::Sign;

    #[test]
    fn shares_cover_a_parameter_in_whole_blocks() {
        let block = Sign.block();
        for elements in [0, 1, block, block + 1, 10 * block - 1, 17 * block] {
            for workers in 1..6 {
                for parameter in 0..3 {
                    let of = |rank| share(&Sign, parameter, elements, rank, workers);
                    let mut all: Vec<_> = (0..workers).map(of).collect();
                    all.sort_by_key(|span| (span.start, span.end));
                    let mut end = 0;
                    for span in all {
                        assert_eq!(span.start, end);
                        assert!(span.start % block == 0 || span.is_empty());
                        end = span.end;
                    }
                    assert_eq!(end, elements);
                }
            }
        }
    }
}
