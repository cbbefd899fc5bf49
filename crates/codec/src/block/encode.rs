//! Encodes runs of blocks.
//!
//! Several blocks have their turn [at once](AT_ONCE): first the peaks of all of them are found, then their scales, and then the
//! elements, which are still in the first-level cache, become codes.

use super::{
    FLOOR, LARGEST, NAN, Quantizer, SCALE, bytes, dither_at, largest_scale, nearest, stride, value,
};
use crate::Key;
use crate::stream::{ask_ahead, bypass, bypasses, fence};
use multiversion::multiversion;
use std::ops::Range;

/// Blocks that have their turn at once. From its peak to the inverse of its scale, a block is a chain of operations that
/// wait for each other: with fewer blocks, a core does little else meanwhile. With more, reading the elements from memory
/// and making codes of them overlap less.
const AT_ONCE: usize = 4;

/// Elements that are taken in at once: some lines.
const ROW: usize = 64;

/// Encodes a run of blocks from element `first` on, stochastically if there is a key to `dither`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn encode<Q: Quantizer>(
    quantizer: Q,
    dither: Option<Key>,
    first: usize,
    values: &[f32],
    into: &mut [u8],
) {
    encode_blocks(quantizer, dither, first, values, into);
}

/// As [`encode`], of `owed` and what is `fed` to it first, and takes from `owed` what will be decoded.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn encode_owed<Q: Quantizer>(
    quantizer: Q,
    dither: Option<Key>,
    first: usize,
    fed: Option<&[f32]>,
    owed: &mut [f32],
    into: &mut [u8],
) {
    encode_owed_blocks(quantizer, dither, first, fed, owed, into);
}

#[inline(always)]
pub(super) fn encode_blocks<Q: Quantizer>(
    quantizer: Q,
    dither: Option<Key>,
    first: usize,
    values: &[f32],
    into: &mut [u8],
) {
    in_groups(quantizer, values.len(), into, Values { values, dither, first });
}

#[inline(always)]
pub(super) fn encode_owed_blocks<Q: Quantizer>(
    quantizer: Q,
    dither: Option<Key>,
    first: usize,
    fed: Option<&[f32]>,
    owed: &mut [f32],
    into: &mut [u8],
) {
    assert!(fed.is_none_or(|fed| fed.len() == owed.len()), "something fed for every element");
    in_groups(quantizer, owed.len(), into, Owed { fed, owed, dither, first });
}

/// What encodes group by group. Without closures: those are compiled once for all instruction sets, unless they happen to
/// be inlined.
trait EncodeGroup {
    /// The largest magnitude of a block. To be `#[inline(always)]`, as all here.
    fn peak(&mut self, block: Range<usize>) -> f32;

    /// Makes codes of the elements of a block of `Q`, or of the shorter last one.
    fn encode<Q: Quantizer>(
        &mut self,
        quantizer: Q,
        block: Range<usize>,
        scale: Scale,
        codes: &mut [u8],
    );
}

/// Encodes group by group. A long encoding goes [past the caches](bypass).
#[inline(always)]
fn in_groups<Q: Quantizer>(
    quantizer: Q,
    elements: usize,
    into: &mut [u8],
    mut codec: impl EncodeGroup,
) {
    assert_eq!(into.len(), bytes(quantizer, elements), "room for the encoding");
    let is_long = bypasses(into);
    let mut buffer = [0; AT_ONCE * (SCALE + LARGEST)];
    let mut aside = [0; LARGEST];
    let starts = (0..elements).step_by(AT_ONCE * Q::BLOCK);
    for (start, into) in starts.zip(into.chunks_mut(AT_ONCE * stride(quantizer))) {
        let group = start..(start + AT_ONCE * Q::BLOCK).min(elements);
        let buffer = &mut buffer[..into.len()];
        let encoding = if is_long { &mut *buffer } else { &mut *into };
        let mut peaks = [0.0; AT_ONCE];
        for (peak, start) in peaks.iter_mut().zip(group.clone().step_by(Q::BLOCK)) {
            *peak = codec.peak(start..(start + Q::BLOCK).min(elements));
        }
        let scales = Scales::new(quantizer, peaks);
        let starts = group.step_by(Q::BLOCK).zip(encoding.chunks_mut(stride(quantizer)));
        for (i, (start, into)) in starts.enumerate() {
            let block = start..(start + Q::BLOCK).min(elements);
            let scale = scales.at(i);
            let (head, packed) = into.split_at_mut(SCALE);
            head.copy_from_slice(&((scale.scale.to_bits() >> 16) as u16).to_le_bytes());
            let codes = if Q::IS_PLAIN { &mut *packed } else { &mut aside[..block.len()] };
            // The same either way, but the first is compiled for a known length.
            if block.len() == Q::BLOCK {
                codec.encode(quantizer, start..start + Q::BLOCK, scale, &mut codes[..Q::BLOCK]);
            } else {
                codec.encode(quantizer, block.clone(), scale, codes);
            }
            if !Q::IS_PLAIN {
                aside[block.len()..Q::BLOCK].fill(0);
                quantizer.pack(block.len(), &mut aside[..Q::BLOCK], packed);
            }
        }
        if is_long {
            bypass(buffer, into);
        }
    }
    if is_long {
        fence();
    }
}

/// Values without a residual.
struct Values<'a> {
    values: &'a [f32],
    dither: Option<Key>,
    first: usize,
}

impl EncodeGroup for Values<'_> {
    #[inline(always)]
    fn peak(&mut self, block: Range<usize>) -> f32 {
        let mut peak = Peak::default();
        peak.note_all(self.values, block);
        peak.whole()
    }

    #[inline(always)]
    fn encode<Q: Quantizer>(
        &mut self,
        quantizer: Q,
        block: Range<usize>,
        scale: Scale,
        codes: &mut [u8],
    ) {
        let (levels, Scale { scale, inverse }) = (quantizer.levels(), scale);
        let values = &self.values[block.clone()];
        // Not every CPU makes the same NaN of the same operation, so none comes near a code.
        if scale > 0.0 {
            match self.dither.map(|key| key.at((self.first + block.start) as u64)) {
                None => {
                    for (value, code) in values.iter().zip(codes) {
                        *code = nearest(levels, value * inverse) as u8;
                    }
                }
                Some(seed) => {
                    for ((value, code), place) in values.iter().zip(codes).zip(0..) {
                        *code = nearest(levels, value * inverse + dither_at(seed, place)) as u8;
                    }
                }
            }
        } else {
            codes.fill(levels);
        }
    }
}

/// What is owed, and what is fed to it first.
struct Owed<'a> {
    fed: Option<&'a [f32]>,
    owed: &'a mut [f32],
    dither: Option<Key>,
    first: usize,
}

impl EncodeGroup for Owed<'_> {
    #[inline(always)]
    fn peak(&mut self, block: Range<usize>) -> f32 {
        let mut peak = Peak::default();
        match self.fed {
            None => peak.note_all(self.owed, block),
            Some(fed) => peak.note_fed(fed, self.owed, block),
        }
        peak.whole()
    }

    #[inline(always)]
    fn encode<Q: Quantizer>(
        &mut self,
        quantizer: Q,
        block: Range<usize>,
        scale: Scale,
        codes: &mut [u8],
    ) {
        let (levels, Scale { scale, inverse }) = (quantizer.levels(), scale);
        let owed = &mut self.owed[block.clone()];
        if scale > 0.0 {
            match self.dither.map(|key| key.at((self.first + block.start) as u64)) {
                None => {
                    for (owed, code) in owed.iter_mut().zip(codes) {
                        let nearest = nearest(levels, *owed * inverse);
                        *code = nearest as u8;
                        *owed -= value(levels, scale, nearest);
                    }
                }
                Some(seed) => {
                    for ((owed, code), place) in owed.iter_mut().zip(codes).zip(0..) {
                        let nearest = nearest(levels, *owed * inverse + dither_at(seed, place));
                        *code = nearest as u8;
                        *owed -= value(levels, scale, nearest);
                    }
                }
            }
        } else {
            codes.fill(levels);
            // Nothing is taken, or all of it is no number.
            owed.iter_mut().for_each(|owed| *owed -= 0.0 * scale);
        }
    }
}

/// The distance between two levels, and its inverse.
#[derive(Clone, Copy)]
struct Scale {
    scale: f32,
    inverse: f32,
}

/// The scales of the blocks that have their turn.
struct Scales {
    scales: [f32; AT_ONCE],
    inverses: [f32; AT_ONCE],
}

impl Scales {
    #[inline(always)]
    fn new<Q: Quantizer>(quantizer: Q, peaks: [f32; AT_ONCE]) -> Scales {
        let scales = peaks.map(|peak| scale(quantizer.levels(), peak));
        Scales { scales, inverses: scales.map(|scale| 1.0 / scale) }
    }

    #[inline(always)]
    fn at(&self, block: usize) -> Scale {
        Scale { scale: self.scales[block], inverse: self.inverses[block] }
    }
}

/// The largest magnitude; a NaN counts more than infinity. The order of magnitudes is that of their
/// bits, and the maximum of integers is the same in whatever order a CPU takes it.
struct Peak([u32; ROW]);

impl Default for Peak {
    #[inline(always)]
    fn default() -> Peak {
        Peak([0; ROW])
    }
}

impl Peak {
    /// Takes the elements of a block.
    #[inline(always)]
    fn note_all(&mut self, all: &[f32], block: Range<usize>) {
        let (rows, rest) = all[block.clone()].as_chunks::<ROW>();
        for (row, start) in rows.iter().zip((block.start..).step_by(ROW)) {
            ask_ahead(all, start..start + ROW);
            self.note(row);
        }
        self.note(rest);
    }

    /// As [`Peak::note_all`], of what is owed and what is fed to it.
    #[inline(always)]
    fn note_fed(&mut self, fed: &[f32], owed: &mut [f32], block: Range<usize>) {
        let whole = block.start + block.len() / ROW * ROW;
        for start in (block.start..whole).step_by(ROW) {
            ask_ahead(owed, start..start + ROW);
            ask_ahead(fed, start..start + ROW);
            let owed = &mut owed[start..start + ROW];
            feed(owed, &fed[start..start + ROW]);
            self.note(owed);
        }
        feed(&mut owed[whole..block.end], &fed[whole..block.end]);
        self.note(&owed[whole..block.end]);
    }

    /// Takes a row, or a part of one.
    #[inline(always)]
    fn note(&mut self, row: &[f32]) {
        for (peak, value) in self.0.iter_mut().zip(row) {
            *peak = (*peak).max(value.to_bits() & 0x7fff_ffff);
        }
    }

    #[inline(always)]
    fn whole(self) -> f32 {
        f32::from_bits(self.0.into_iter().fold(0, u32::max))
    }
}

#[inline(always)]
fn feed(owed: &mut [f32], fed: &[f32]) {
    owed.iter_mut().zip(fed).for_each(|(owed, fed)| *owed += fed);
}

/// The distance between two levels: a bf16, zero or NaN.
#[inline(always)]
pub(super) fn scale(levels: u8, peak: f32) -> f32 {
    if !peak.is_finite() {
        f32::from_bits(NAN)
    } else if peak < FLOOR {
        0.0
    } else {
        let up = ((peak / f32::from(levels)).to_bits() + 0xffff) & 0xffff_0000;
        f32::from_bits(up.min(largest_scale(levels)))
    }
}
