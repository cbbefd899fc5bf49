//! Encodings that a receiver decodes block by block, as it uses what they hold.
//!
//! A parameter server updates weights in blocks that a cache holds. If it decodes just what one block needs,
//! what was decoded never leaves that cache, where a whole decoded gradient goes to memory and comes back. And
//! several threads can decode one encoding, each some of its elements.
//!
//! An update cannot be taken back in the middle. So all bytes are checked first, and decoding what was checked
//! does not fail.

use std::ops::Range;

use crate::bf16::Bf16;
use crate::fp16::Fp16;
use crate::{BadEncoding, Codec, Passage, Spans, Wire};

/// An encoding that was checked, and of which any run of blocks can be decoded alone.
#[derive(Clone, Copy, Debug)]
pub struct Blockwise<'a> {
    spans: &'a dyn Spans,
    bytes: &'a [u8],
    elements: usize,
}

impl<'a> Blockwise<'a> {
    /// The encoding of so many elements for one receiver, as a [`Sender`](crate::Sender) writes it; `None` if the codec's
    /// encodings can only be decoded as a whole.
    ///
    /// # Errors
    ///
    /// If the whole could not be [decoded](crate::sender::decode).
    pub fn new(
        codec: &'a dyn Codec,
        bytes: &'a [u8],
        elements: usize,
    ) -> Result<Option<Blockwise<'a>>, BadEncoding> {
        let spans: &dyn Spans = match codec.passage() {
            Passage::Spans(spans) => spans,
            Passage::Summed(summed) if summed.is_identity() => match summed.wire() {
                Wire::Fp16 => &Fp16,
                Wire::Bf16 => &Bf16,
                Wire::F32 => return Ok(None),
            },
            Passage::Summed(_) | Passage::Gathered(_) => return Ok(None),
        };
        spans.check(bytes, elements)?;
        Ok(Some(Blockwise { spans, bytes, elements }))
    }

    /// Elements of the whole.
    #[allow(clippy::len_without_is_empty, reason = "what is empty is decoded like any other")]
    pub fn len(&self) -> usize {
        self.elements
    }

    /// What the elements of a span must begin at a multiple of.
    pub fn block(&self) -> usize {
        self.spans.block()
    }

    /// Decodes some elements.
    ///
    /// # Panics
    ///
    /// If they are not a run of whole [blocks](Blockwise::block), of which the last of all may be shorter, or
    /// if `into` has another length.
    pub fn decode(&self, span: Range<usize>, into: &mut [f32]) {
        let block = self.spans.block();
        assert!(span.start.is_multiple_of(block) && span.end <= self.elements, "from a block on");
        assert!(span.end.is_multiple_of(block) || span.end == self.elements, "whole blocks");
        assert_eq!(into.len(), span.len(), "a value for every element");
        let start = self.spans.bytes(span.start);
        let bytes = &self.bytes[start..start + self.spans.bytes(span.len())];
        self.spans.decode(bytes, into).expect("all bytes were checked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sender::{Origin, Scratch, Sender, decode};
    use crate::{CodecSpec, Key};

    /// All that can be decoded in blocks, and some that cannot.
    const CODECS: [&str; 12] = [
        "fp16",
        "bf16",
        "int8",
        "int8:stochastic",
        "int4",
        "int4:stochastic",
        "qsgd:4",
        "qsgd:7",
        "sign",
        "topk:0.1",
        "randk:0.1",
        "powersgd:2",
    ];

    fn encoding(codec: &str, elements: usize) -> (CodecSpec, Vec<u8>, Vec<f32>) {
        let spec: CodecSpec = codec.parse().unwrap();
        let (codec, mut scratch) = (spec.build(), Scratch::default());
        let shape = if elements.is_multiple_of(7) { vec![elements / 7, 7] } else { vec![elements] };
        let origin = Origin { shape, parameter: 2, seed: 5, worker: 1, mean_of: 1 };
        let key = Key::new(elements as u64);
        let value = |i: u64| (key.at(i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let gradient: Vec<f32> = (0..elements as u64).map(value).collect();
        let mut bytes = Vec::new();
        Sender::new(codec.clone(), origin.clone(), false).encode(
            3,
            &gradient,
            &mut scratch,
            &mut bytes,
        );
        let mut whole = vec![0.0; elements];
        decode(&*codec, &origin.task(3), &bytes, &mut whole, &mut scratch).unwrap();
        (spec, bytes, whole)
    }

    #[test]
    fn runs_of_blocks_are_decoded_like_the_whole() {
        for codec in CODECS {
            for elements in [1, 7, 511, 2048, 2049, 5 * 2048 + 7, 20_001] {
                if codec.starts_with("powersgd") && elements % 7 != 0 {
                    continue;
                }
                let (spec, bytes, whole) = encoding(codec, elements);
                let codec = spec.build();
                let blockwise = Blockwise::new(&*codec, &bytes, elements).unwrap();
                let is_whole = ["topk", "randk", "powersgd"];
                let is_whole = is_whole.iter().any(|name| spec.to_string().starts_with(name));
                assert_eq!(blockwise.is_none(), is_whole, "{spec}");
                let Some(blockwise) = blockwise else { continue };
                assert_eq!(blockwise.len(), elements);
                for step in [blockwise.block(), 2048, 3 * 2048, 1 << 14] {
                    // Backwards: no run needs one before it.
                    for start in (0..elements).step_by(step).rev() {
                        let span = start..(start + step).min(elements);
                        let mut part = vec![9.0; span.len()];
                        blockwise.decode(span.clone(), &mut part);
                        let bits =
                            |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                        assert_eq!(
                            bits(&part),
                            bits(&whole[span]),
                            "{spec} {elements} {step} {start}"
                        );
                    }
                }
            }
        }
    }

    /// Whatever a stranger sends: what the check lets pass is decoded, and what it refuses could not be, for the same reason.
    #[test]
    fn the_check_refuses_exactly_what_cannot_be_decoded() {
        for codec in CODECS {
            let elements = 2 * 2048 + 77;
            let (spec, bytes, _) = encoding(codec, elements);
            let codec = spec.build();
            let Ok(Some(_)) = Blockwise::new(&*codec, &bytes, elements) else { continue };
            let (mut refused, mut random) = (0, Key::new(1));
            for turn in 0..400usize {
                random = random.with(turn as u64);
                let mut hostile = bytes.clone();
                match turn % 4 {
                    0 => hostile.truncate(random.at(0) as usize % bytes.len()),
                    1 => hostile.extend_from_slice(&bytes[..1 + random.at(0) as usize % 9]),
                    // The end of a parameter is decoded last.
                    2 => *hostile.last_mut().unwrap() = 0xff,
                    _ => {
                        let at = random.at(0) as usize % (bytes.len() - 8);
                        hostile[at..at + 8].fill(0xff);
                    }
                }
                let decoded = match codec.passage() {
                    Passage::Spans(spans) => spans.decode(&hostile, &mut vec![0.0; elements]),
                    _ => Fp16.decode(&hostile, &mut vec![0.0; elements]),
                };
                let checked = Blockwise::new(&*codec, &hostile, elements);
                let is_cast = matches!(codec.passage(), Passage::Summed(_));
                match (&checked, &decoded) {
                    (Err(checked), Err(decoded)) if !is_cast => assert_eq!(checked, decoded),
                    _ => assert_eq!(checked.is_err(), decoded.is_err(), "{spec}"),
                }
                if let Ok(Some(blockwise)) = checked {
                    blockwise.decode(0..elements, &mut vec![0.0; elements]);
                }
                refused += usize::from(decoded.is_err());
            }
            assert!(refused > 100, "{spec}: {refused}");
        }
    }
}
