//! Encodings of blocks: decode, average and encode again, each rank a part; between two ranks, each gets the other's
//! encoding as it is.

use std::ops::Range;

use unisono_codec::{Passage, Spans, is_encoded_twice};
use unisono_collective::shards::share;

use super::scratch::Use;
use super::{DeviceGradient, Exchange, ExchangeError};
use crate::codec::{CodecError, DeviceCodec, Placement};
use crate::library::DevicePtr;
use crate::stream::Stream;

impl Exchange {
    /// # Safety
    /// As for [`Exchange::exchange`].
    pub(super) unsafe fn exchange_spans(
        &mut self,
        spans: &dyn Spans,
        codec: usize,
        step: u64,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        // SAFETY: the caller's promise.
        unsafe {
            match is_encoded_twice(self.world()) {
                true => self.exchange_parts(spans, codec, step, gradients, stream),
                false => self.exchange_whole(spans, codec, step, gradients, stream),
            }
        }
    }

    /// # Safety
    /// As for [`Exchange::exchange`].
    unsafe fn exchange_parts(
        &mut self,
        spans: &dyn Spans,
        codec: usize,
        step: u64,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let (me, world) = (self.rank(), self.world());
        let parts: Vec<Vec<Range<usize>>> = (0..world)
            .map(|rank| gradients.iter().map(|of| self.part(spans, of, rank)).collect())
            .collect();
        let bytes_of = |parts: &Vec<Range<usize>>| -> usize {
            parts.iter().map(|part| spans.bytes(part.len())).sum()
        };
        let bytes: Vec<usize> = parts.iter().map(bytes_of).collect();
        let elements: usize = parts[me].iter().map(Range::len).sum();
        let longest = bytes.iter().copied().max().unwrap_or(0);
        let outgoing = self.scratch.of(Use::Outgoing, bytes.iter().sum())?;
        let incoming = self.scratch.of(Use::Incoming, bytes[me] * world)?;
        let decoded = self.scratch.of(Use::Decoded, elements * 4 * world)?;
        // SAFETY: the caller's promise; the scratch memory has room for what is there.
        unsafe {
            let mut at = outgoing;
            for parts in &parts {
                for (of, part) in gradients.iter().zip(parts) {
                    let owed = self.owed(codec, of.parameter);
                    let (from, first) = (of.pointer.offset(part.start * 4), part.start);
                    let owed = owed.map(|owed| owed.offset(part.start * 4));
                    let key = self.task(of.parameter, step).key(me);
                    let blocks = self.blocks(codec);
                    blocks.encode_span(stream, key, first, part.len(), from, owed, at)?;
                    at = at.offset(spans.bytes(part.len()));
                }
            }
            self.calls.all_to_all(
                outgoing,
                &bytes,
                incoming,
                &vec![bytes[me]; world],
                longest,
                stream,
            )?;

            // The encodings of each shard lie together, and so does what they are decoded to.
            let each = |shard: usize| {
                (incoming.offset(shard * bytes[me]), decoded.offset(shard * elements * 4))
            };
            let decode = |this: &Exchange, shard: usize| -> Result<(), CodecError> {
                let (mut from, mut into) = each(shard);
                for part in &parts[me] {
                    let blocks = this.blocks(codec);
                    blocks.decode_span(stream, from, part.len(), into, Placement::Overwrite)?;
                    from = from.offset(spans.bytes(part.len()));
                    into = into.offset(part.len() * 4);
                }
                Ok(())
            };
            (0..world).try_for_each(|shard| decode(self, shard))?;
            let all: Vec<DevicePtr> = (0..world).map(|shard| each(shard).1).collect();
            let mine = self.scratch.of(Use::Means, bytes.iter().sum::<usize>() + bytes[me])?;
            let (means, mut at) = (mine.offset(bytes[me]), mine);
            self.check(codec, stream, |this, shard| decode(this, shard))?;
            self.average(&all, decoded, elements, stream)?;
            let mut from = decoded;
            for (of, part) in gradients.iter().zip(&parts[me]) {
                let owed = self.held[of.parameter].mean.as_ref().map(|mean| mean.pointer());
                let key = self.task(of.parameter, step).key(world);
                let (blocks, first) = (self.blocks(codec), part.start);
                blocks.encode_span(stream, key, first, part.len(), from, owed, at)?;
                at = at.offset(spans.bytes(part.len()));
                from = from.offset(part.len() * 4);
            }
            self.calls.all_gather_unequal(mine, means, &bytes, stream)?;

            let starts: Vec<usize> = bytes
                .iter()
                .scan(0, |end, bytes| Some(std::mem::replace(end, *end + bytes)))
                .collect();
            let decode = |this: &Exchange, rank: usize| -> Result<(), CodecError> {
                let mut from = means.offset(starts[rank]);
                for (of, part) in gradients.iter().zip(&parts[rank]) {
                    let (blocks, into) = (this.blocks(codec), of.pointer.offset(part.start * 4));
                    blocks.decode_span(stream, from, part.len(), into, Placement::Overwrite)?;
                    from = from.offset(spans.bytes(part.len()));
                }
                Ok(())
            };
            (0..world).try_for_each(|rank| decode(self, rank))?;
            let checked = self.check(codec, stream, |this, rank| decode(this, rank));
            checked.map_err(|error| match error {
                ExchangeError::Encoding { shard, source } => {
                    let rank = self.group().group().members()[shard];
                    ExchangeError::EncodingOfMean { rank, source }
                }
                other => other,
            })
        }
    }

    /// Gives all encodings to all ranks, who average them by themselves.
    ///
    /// # Safety
    /// As for [`Exchange::exchange`].
    unsafe fn exchange_whole(
        &mut self,
        spans: &dyn Spans,
        codec: usize,
        step: u64,
        gradients: &[DeviceGradient],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let (me, world) = (self.rank(), self.world());
        let lengths: Vec<usize> =
            gradients.iter().map(|of| self.held[of.parameter].elements).collect();
        let one: usize = lengths.iter().map(|elements| spans.bytes(*elements)).sum();
        let elements: usize = lengths.iter().sum();
        let mine = self.scratch.of(Use::Outgoing, one)?;
        let all = self.scratch.of(Use::Incoming, one * world)?;
        let decoded = self.scratch.of(Use::Decoded, elements * 4 * world)?;
        // SAFETY: the caller's promise; the scratch memory has room for what is there.
        unsafe {
            let mut at = mine;
            for (of, elements) in gradients.iter().zip(&lengths) {
                let (key, owed) =
                    (self.task(of.parameter, step).key(me), self.owed(codec, of.parameter));
                let blocks = self.blocks(codec);
                blocks.encode_span(stream, key, 0, *elements, of.pointer, owed, at)?;
                at = at.offset(spans.bytes(*elements));
            }
            self.calls.all_gather_unequal(mine, all, &vec![one; world], stream)?;
            let decode = |this: &Exchange, shard: usize| -> Result<(), CodecError> {
                let mut from = all.offset(shard * one);
                let mut into = decoded.offset(shard * elements * 4);
                for elements in &lengths {
                    let blocks = this.blocks(codec);
                    blocks.decode_span(stream, from, *elements, into, Placement::Overwrite)?;
                    from = from.offset(spans.bytes(*elements));
                    into = into.offset(elements * 4);
                }
                Ok(())
            };
            (0..world).try_for_each(|shard| decode(self, shard))?;
            let mut first = 0;
            for (of, length) in gradients.iter().zip(&lengths) {
                let input = |shard: usize| decoded.offset((shard * elements + first) * 4);
                let inputs: Vec<DevicePtr> = (0..world).map(input).collect();
                self.average(&inputs, of.pointer, *length, stream)?;
                first += length;
            }
            self.check(codec, stream, |this, shard| decode(this, shard))
        }
    }

    /// Waits for what was decoded. If some of it was damaged, finds out whose, by decoding each shard's again.
    fn check(
        &self,
        codec: usize,
        stream: &Stream,
        decode: impl Fn(&Exchange, usize) -> Result<(), CodecError>,
    ) -> Result<(), ExchangeError> {
        let blocks = self.blocks(codec);
        let found = match blocks.check(stream) {
            Err(CodecError::Encoding(found)) => found,
            checked => return Ok(checked?),
        };
        for shard in 0..self.world() {
            decode(self, shard)?;
            if let Err(CodecError::Encoding(source)) = blocks.check(stream) {
                return Err(ExchangeError::Encoding { shard, source });
            }
        }
        Err(CodecError::Encoding(found).into())
    }

    /// The part of a parameter's elements that a rank averages.
    fn part(&self, spans: &dyn Spans, of: &DeviceGradient, rank: usize) -> Range<usize> {
        let elements = self.held[of.parameter].elements;
        share(spans.block(), of.parameter, elements, rank, self.world())
    }

    /// The part that this rank averages; none of a parameter whose means are not encoded.
    pub(super) fn mean_part(&self, parameter: usize) -> Range<usize> {
        let held = &self.held[parameter];
        match held.codec.map(|codec| self.passages[codec].host.passage()) {
            Some(Passage::Spans(spans)) => {
                share(spans.block(), parameter, held.elements, self.rank(), self.world())
            }
            _ => 0..0,
        }
    }

    fn blocks(&self, codec: usize) -> &DeviceCodec {
        self.passages[codec].blocks.as_ref().expect("a codec by blocks")
    }
}
