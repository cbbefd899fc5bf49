//! Block-scaled quantization: what [`int8`](crate::int8), [`int4`](crate::int4) and
//! [`qsgd`](crate::qsgd) share.
//!
//! A [`Quantizer`] has a number of *levels* on either side of zero. A block's *peak* is its largest
//! magnitude, and its *scale* the distance between two levels, so that the last one is at the peak.
//! A value becomes the nearest level. Its *code* is that level, counted from the lowest; of all
//! codes of so many bits only the last, all ones, is not used. A block is encoded as its scale and
//! its packed codes.
//!
//! The scale is a bf16, rounded up. Two bytes less for it buy blocks half as long for the same
//! ratio, which are worth more than the bits it loses. It is NaN if any value of the block is
//! infinite or NaN, and so is then everything decoded from it.
//!
//! To round stochastically, a *dither* is added before rounding to the nearest level. It is evenly
//! distributed over the distance between two levels, so that the mean over all dithers is the value
//! itself. It is a hash of the key, of the block's place in the parameter and of the element's in
//! the block.
//!
//! The same loops are compiled for several instruction sets. Nothing in them is fused, and nothing
//! is summed, so all of them write the same bytes.

use crate::stream::{DecodeTile, ask_ahead, decode_tiles};
use crate::{BadEncoding, Key, Rounding};
use multiversion::multiversion;
use std::ops::Range;

/// How a block is quantized and packed.
pub trait Quantizer: Copy {
    /// The codec, in errors.
    const NAME: &'static str;
    /// Elements of a block: a multiple of 8, at most [`LARGEST`].
    const BLOCK: usize;

    /// How a value between two levels is rounded.
    fn rounding(self) -> Rounding;

    /// Levels on either side of zero.
    fn levels(self) -> u8;

    /// Bytes of the packed codes of a block of as many elements.
    fn packed(self, elements: usize) -> usize;

    /// Packs the codes of a block of as many elements. `codes` is as long as a full block, with
    /// zeros after the elements, and what is left in it does not matter.
    fn pack(self, elements: usize, codes: &mut [u8], into: &mut [u8]);

    /// Undoes [`Quantizer::pack`], whatever the bytes.
    fn unpack(self, elements: usize, bytes: &[u8], codes: &mut [u8]);
}

/// Makes a codec of a [`Quantizer`]. A blanket implementation would collide with that of casts.
macro_rules! quantized {
    ($quantizer:ty) => {
        impl $crate::Codec for $quantizer {
            /// Rounded to the nearest, equal gradients have equal errors.
            fn is_biased(&self) -> bool {
                self.rounding() == $crate::Rounding::Nearest
            }

            fn encoded_bytes(&self, shape: &[usize]) -> usize {
                $crate::block::bytes(*self, $crate::elements(shape))
            }

            fn passage(&self) -> $crate::Passage<'_> {
                $crate::Passage::Spans(self)
            }
        }

        impl $crate::Spans for $quantizer {
            fn block(&self) -> usize {
                <$quantizer>::BLOCK
            }

            fn bytes(&self, elements: usize) -> usize {
                $crate::block::bytes(*self, elements)
            }

            fn encode(&self, key: $crate::Key, first: usize, values: &[f32], into: &mut [u8]) {
                let dither = $crate::block::dither(*self, key);
                $crate::block::encode(*self, dither, first, values, into);
            }

            fn encode_owed(
                &self,
                key: $crate::Key,
                first: usize,
                owed: &mut [f32],
                into: &mut [u8],
            ) {
                let dither = $crate::block::dither(*self, key);
                $crate::block::encode_owed(*self, dither, first, None, owed, into);
            }

            fn encode_fed(
                &self,
                key: $crate::Key,
                first: usize,
                fed: &[f32],
                owed: &mut [f32],
                into: &mut [u8],
            ) {
                let dither = $crate::block::dither(*self, key);
                $crate::block::encode_owed(*self, dither, first, Some(fed), owed, into);
            }

            fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), $crate::BadEncoding> {
                $crate::block::decode(*self, bytes, into)
            }

            fn check(&self, bytes: &[u8], elements: usize) -> Result<(), $crate::BadEncoding> {
                $crate::block::check(*self, bytes, elements)
            }

            fn decode_add(
                &self,
                bytes: &[u8],
                into: &mut [f32],
            ) -> Result<(), $crate::BadEncoding> {
                $crate::block::decode_add(*self, bytes, into)
            }
        }
    };
}
pub(crate) use quantized;

/// What to dither with, if at all.
pub fn dither<Q: Quantizer>(quantizer: Q, key: Key) -> Option<Key> {
    (quantizer.rounding() == Rounding::Stochastic).then_some(key)
}

/// Elements of the largest possible block. Its codes are on the stack, and should stay in the
/// first-level cache beside its values.
pub const LARGEST: usize = 512;

/// Bytes of the encoding of as many elements.
pub fn bytes<Q: Quantizer>(quantizer: Q, elements: usize) -> usize {
    let rest = match elements % Q::BLOCK {
        0 => 0,
        rest => SCALE + quantizer.packed(rest),
    };
    elements / Q::BLOCK * (SCALE + quantizer.packed(Q::BLOCK)) + rest
}

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

/// Decodes a run of blocks.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn decode<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    decode_blocks(quantizer, bytes, into)
}

/// Fails if a run of blocks cannot be decoded: a scale or a code is none.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn check<Q: Quantizer>(quantizer: Q, bytes: &[u8], elements: usize) -> Result<(), BadEncoding> {
    check_blocks(quantizer, bytes, elements)
}

/// As [`decode`], and adds what is decoded to what is there.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub fn decode_add<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    decode_add_blocks(quantizer, bytes, into)
}

#[inline(always)]
fn encode_blocks<Q: Quantizer>(
    quantizer: Q,
    dither: Option<Key>,
    first: usize,
    values: &[f32],
    into: &mut [u8],
) {
    assert_eq!(into.len(), bytes(quantizer, values.len()), "room for the encoding");
    let mut codes = [0; LARGEST];
    let codes = &mut codes[..Q::BLOCK];
    let starts = (0..values.len()).step_by(Q::BLOCK);
    for (start, into) in starts.zip(into.chunks_mut(stride(quantizer))) {
        let span = start..(start + Q::BLOCK).min(values.len());
        let mut peak = Peak::default();
        peak.note_all(values, span.clone());
        let scale = scale(quantizer.levels(), peak.whole());
        let seed = dither.map(|key| key.at((first + start) as u64));
        let block = &values[span];
        // The same either way, but the first is compiled for a known length.
        if block.len() == Q::BLOCK {
            encode_block(quantizer, seed, scale, &block[..Q::BLOCK], codes, into);
        } else {
            encode_block(quantizer, seed, scale, block, codes, into);
        }
    }
}

#[inline(always)]
fn encode_owed_blocks<Q: Quantizer>(
    quantizer: Q,
    dither: Option<Key>,
    first: usize,
    fed: Option<&[f32]>,
    owed: &mut [f32],
    into: &mut [u8],
) {
    assert_eq!(into.len(), bytes(quantizer, owed.len()), "room for the encoding");
    assert!(fed.is_none_or(|fed| fed.len() == owed.len()), "something fed for every element");
    let mut codes = [0; LARGEST];
    let codes = &mut codes[..Q::BLOCK];
    let starts = (0..owed.len()).step_by(Q::BLOCK);
    for (start, into) in starts.zip(into.chunks_mut(stride(quantizer))) {
        let span = start..(start + Q::BLOCK).min(owed.len());
        let mut peak = Peak::default();
        match fed {
            None => peak.note_all(owed, span.clone()),
            Some(fed) => peak.note_fed(fed, owed, span.clone()),
        }
        let scale = scale(quantizer.levels(), peak.whole());
        let seed = dither.map(|key| key.at((first + start) as u64));
        let block = &mut owed[span];
        if block.len() == Q::BLOCK {
            encode_owed_block(quantizer, seed, scale, &mut block[..Q::BLOCK], codes, into);
        } else {
            encode_owed_block(quantizer, seed, scale, block, codes, into);
        }
    }
}

#[inline(always)]
fn decode_blocks<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    expect_length(quantizer, bytes, into.len())?;
    decode_tiles(Decoder(quantizer), bytes, into)
}

#[inline(always)]
fn decode_add_blocks<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    expect_length(quantizer, bytes, into.len())?;
    decode_each::<Q, true>(quantizer, bytes, into)
}

#[inline(always)]
fn check_blocks<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    elements: usize,
) -> Result<(), BadEncoding> {
    expect_length(quantizer, bytes, elements)?;
    let mut codes = [0; LARGEST];
    let codes = &mut codes[..Q::BLOCK];
    for (bytes, start) in bytes.chunks(stride(quantizer)).zip((0..elements).step_by(Q::BLOCK)) {
        read(quantizer, Q::BLOCK.min(elements - start), bytes, codes)?;
    }
    Ok(())
}

fn expect_length<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    elements: usize,
) -> Result<(), BadEncoding> {
    match (self::bytes(quantizer, elements), bytes.len()) {
        (expected, found) if expected == found => Ok(()),
        (expected, found) => Err(BadEncoding::Length { codec: Q::NAME, expected, found }),
    }
}

struct Decoder<Q>(Q);

impl<Q: Quantizer> DecodeTile for Decoder<Q> {
    /// A multiple of every block.
    const ELEMENTS: usize = LARGEST;

    #[inline(always)]
    fn bytes(&self, elements: usize) -> usize {
        bytes(self.0, elements)
    }

    #[inline(always)]
    fn decode(&mut self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        decode_each::<Q, false>(self.0, bytes, into)
    }
}

/// Decodes every block, and adds it to what is there or puts it in its place.
#[inline(always)]
fn decode_each<Q: Quantizer, const ADD: bool>(
    quantizer: Q,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    let mut codes = [0; LARGEST];
    let codes = &mut codes[..Q::BLOCK];
    for (bytes, block) in bytes.chunks(stride(quantizer)).zip(into.chunks_mut(Q::BLOCK)) {
        if block.len() == Q::BLOCK {
            decode_block::<Q, ADD>(quantizer, bytes, codes, &mut block[..Q::BLOCK])?;
        } else {
            decode_block::<Q, ADD>(quantizer, bytes, codes, block)?;
        }
    }
    Ok(())
}

#[inline(always)]
fn decode_block<Q: Quantizer, const ADD: bool>(
    quantizer: Q,
    bytes: &[u8],
    codes: &mut [u8],
    block: &mut [f32],
) -> Result<(), BadEncoding> {
    let scale = read(quantizer, block.len(), bytes, codes)?;
    for (value, code) in block.iter_mut().zip(&*codes) {
        let decoded = dequantize(quantizer.levels(), scale, *code);
        *value = if ADD { *value + decoded } else { decoded };
    }
    Ok(())
}

/// Elements that are taken in at once: some lines.
const ROW: usize = 64;

#[inline(always)]
fn encode_block<Q: Quantizer>(
    quantizer: Q,
    seed: Option<u64>,
    scale: f32,
    block: &[f32],
    codes: &mut [u8],
    into: &mut [u8],
) {
    let levels = quantizer.levels();
    let behind = block.len();
    codes[behind..].fill(0);
    // Not every CPU makes the same NaN of the same operation, so none comes near a code.
    if scale > 0.0 {
        let inverse = 1.0 / scale;
        match seed {
            None => {
                for (value, code) in block.iter().zip(&mut *codes) {
                    *code = nearest(levels, value * inverse) as u8;
                }
            }
            Some(seed) => {
                for ((value, code), place) in block.iter().zip(&mut *codes).zip(0..) {
                    *code = nearest(levels, value * inverse + dither_at(seed, place)) as u8;
                }
            }
        }
    } else {
        codes[..behind].fill(levels);
    }
    write(quantizer, scale, block.len(), codes, into);
}

#[inline(always)]
fn encode_owed_block<Q: Quantizer>(
    quantizer: Q,
    seed: Option<u64>,
    scale: f32,
    block: &mut [f32],
    codes: &mut [u8],
    into: &mut [u8],
) {
    let levels = quantizer.levels();
    let behind = block.len();
    codes[behind..].fill(0);
    if scale > 0.0 {
        let inverse = 1.0 / scale;
        match seed {
            None => {
                for (owed, code) in block.iter_mut().zip(&mut *codes) {
                    let nearest = nearest(levels, *owed * inverse);
                    *code = nearest as u8;
                    *owed -= value(levels, scale, nearest);
                }
            }
            Some(seed) => {
                for ((owed, code), place) in block.iter_mut().zip(&mut *codes).zip(0..) {
                    let nearest = nearest(levels, *owed * inverse + dither_at(seed, place));
                    *code = nearest as u8;
                    *owed -= value(levels, scale, nearest);
                }
            }
        }
    } else {
        codes[..behind].fill(levels);
        // Nothing is taken, or all of it is no number.
        block.iter_mut().for_each(|owed| *owed -= 0.0 * scale);
    }
    write(quantizer, scale, block.len(), codes, into);
}

/// Bytes of a scale.
const SCALE: usize = 2;

/// Bytes of a full block.
#[inline(always)]
fn stride<Q: Quantizer>(quantizer: Q) -> usize {
    SCALE + quantizer.packed(Q::BLOCK)
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

/// Blocks with a smaller peak become zeros: the inverse of their scale could be infinite. No
/// optimizer can tell 10⁻³⁰ from zero.
const FLOOR: f32 = 1.0 / (1u128 << 100) as f32;

/// The one NaN that is ever a scale.
const NAN: u32 = 0x7fc0_0000;

/// The distance between two levels: a bf16, zero or NaN.
#[inline(always)]
fn scale(levels: u8, peak: f32) -> f32 {
    if !peak.is_finite() {
        f32::from_bits(NAN)
    } else if peak < FLOOR {
        0.0
    } else {
        let up = ((peak / f32::from(levels)).to_bits() + 0xffff) & 0xffff_0000;
        f32::from_bits(up.min(largest_scale(levels)))
    }
}

/// The bits of the largest scale whose last level is finite.
#[inline(always)]
fn largest_scale(levels: u8) -> u32 {
    (f32::MAX / f32::from(levels)).to_bits() & 0xffff_0000
}

/// The code of the level nearest to `value`, which is in units of the scale.
#[inline(always)]
fn nearest(levels: u8, value: f32) -> i32 {
    // 1.5·2²³: a float of this size has no bits for a fraction, so that adding it rounds to the
    // nearest integer, and the last bits of the sum are that integer.
    const ROUNDER: f32 = 12_582_912.0;
    let level = (value + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let levels = i32::from(levels);
    (level + levels).clamp(0, 2 * levels)
}

/// What a code stands for.
#[inline(always)]
fn dequantize(levels: u8, scale: f32, code: u8) -> f32 {
    value(levels, scale, i32::from(code))
}

/// As [`dequantize`], for a code in another type.
#[inline(always)]
fn value(levels: u8, scale: f32, code: i32) -> f32 {
    (code - i32::from(levels)) as f32 * scale
}

/// A number from −½ to ½ for one element of a block: a hash of its place and both halves of the
/// block's seed. It is of 32 bits because vectors of those multiply fast.
#[inline(always)]
fn dither_at(seed: u64, place: u32) -> f32 {
    let mut x = place.wrapping_mul(0x9e37_79b9) ^ seed as u32;
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d) ^ (seed >> 32) as u32;
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^= x >> 16;
    const UNIT: f32 = 1.0 / (1u64 << 32) as f32;
    x as i32 as f32 * UNIT
}

/// Writes the encoding of a block of as many elements.
#[inline(always)]
fn write<Q: Quantizer>(
    quantizer: Q,
    scale: f32,
    elements: usize,
    codes: &mut [u8],
    into: &mut [u8],
) {
    let (head, packed) = into.split_at_mut(SCALE);
    head.copy_from_slice(&((scale.to_bits() >> 16) as u16).to_le_bytes());
    quantizer.pack(elements, codes, packed);
}

/// Reads the codes of a block of as many elements, and returns its scale.
#[inline(always)]
fn read<Q: Quantizer>(
    quantizer: Q,
    elements: usize,
    bytes: &[u8],
    codes: &mut [u8],
) -> Result<f32, BadEncoding> {
    let bad = |field, found| BadEncoding::Field { codec: Q::NAME, field, found };
    let (head, packed) = bytes.split_at(SCALE);
    let scale = u32::from(u16::from_le_bytes([head[0], head[1]])) << 16;
    if scale > largest_scale(quantizer.levels()) && scale != NAN {
        return Err(bad("scale", u64::from(scale >> 16)));
    }
    quantizer.unpack(elements, packed, codes);
    let highest = codes[..elements].iter().fold(0, |highest, code| highest.max(*code));
    if highest > 2 * quantizer.levels() {
        return Err(bad("code", u64::from(highest)));
    }
    Ok(f32::from_bits(scale))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::Spans;
    use crate::int4::Int4;
    use crate::int8::Int8;
    use crate::qsgd::Qsgd;
    use proptest::prelude::*;

    /// What is decoded of what was encoded.
    pub fn there_and_back(codec: &dyn Spans, key: Key, values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; codec.bytes(values.len())];
        codec.encode(key, 0, values, &mut bytes);
        let mut decoded = vec![0.0; values.len()];
        codec.decode(&bytes, &mut decoded).expect("bytes from the encoder");
        decoded
    }

    /// Asserts that nothing is farther away than some times the distance between the levels of
    /// its block.
    pub fn assert_near(codec: &dyn Spans, levels: u32, distances: f32, key: Key, values: &[f32]) {
        let decoded = there_and_back(codec, key, values);
        let blocks = values.chunks(codec.block()).zip(decoded.chunks(codec.block()));
        for (values, decoded) in blocks {
            let peak = values.iter().fold(0.0f32, |peak, v| peak.max(v.abs()));
            // The scale is rounded up to 8 bits, and all else to 24.
            let bound = peak / levels as f32 * distances * (1.0 + 1.0 / 128.0) + FLOOR;
            for (value, decoded) in values.iter().zip(decoded) {
                assert!((value - decoded).abs() <= bound, "{value:e} became {decoded:e}");
            }
        }
    }

    /// Asserts that the mean of what is decoded is what was encoded.
    pub fn assert_right_on_average(codec: &dyn Spans) {
        const ROUNDS: u32 = 4000;
        let values: Vec<f32> = (-300..=300).map(|i| i as f32 / 300.0).collect();
        let mut sums = vec![0.0f64; values.len()];
        let mut squares = vec![0.0f64; values.len()];
        for round in 0..ROUNDS {
            let key = Key::new(1).with(u64::from(round));
            let decoded = there_and_back(codec, key, &values);
            for ((value, decoded), (sum, square)) in
                values.iter().zip(decoded).zip(sums.iter_mut().zip(&mut squares))
            {
                let error = f64::from(decoded - value);
                *sum += error;
                *square += error * error;
            }
        }
        let rounds = f64::from(ROUNDS);
        for ((value, sum), square) in values.iter().zip(&sums).zip(&squares) {
            // Of 600 means, none should be six standard deviations away.
            let deviation = (square / rounds / rounds).sqrt();
            let mean = sum / rounds;
            assert!(mean.abs() <= 6.0 * deviation + 1e-6, "{value} has an error of {mean}");
        }
        // Nor their mean: neighbours have dithers of their own.
        let all = sums.iter().sum::<f64>() / rounds / values.len() as f64;
        let deviation = squares.iter().sum::<f64>().sqrt() / rounds / values.len() as f64;
        assert!(all.abs() <= 6.0 * deviation, "the mean error is {all}, {deviation} expected");
    }

    /// Asserts that the loops for this CPU's instruction sets do what those for any CPU do.
    fn assert_alike<Q: Quantizer>(quantizer: Q, dither: Option<Key>, first: usize, values: &[f32]) {
        let mut bytes = vec![0; super::bytes(quantizer, values.len())];
        let mut bytes_anywhere = bytes.clone();
        encode(quantizer, dither, first, values, &mut bytes);
        encode_blocks(quantizer, dither, first, values, &mut bytes_anywhere);
        assert_eq!(bytes, bytes_anywhere);

        let (mut owed, mut owed_anywhere) = (values.to_vec(), values.to_vec());
        encode_owed(quantizer, dither, first, None, &mut owed, &mut bytes);
        encode_owed_blocks(quantizer, dither, first, None, &mut owed_anywhere, &mut bytes_anywhere);
        assert_eq!(bytes, bytes_anywhere);
        let finite = values.iter().all(|value| value.is_finite());
        assert!(owed == owed_anywhere || !finite);

        let (mut decoded, mut decoded_anywhere) = (owed.clone(), owed);
        decode(quantizer, &bytes, &mut decoded).unwrap();
        decode_blocks(quantizer, &bytes, &mut decoded_anywhere).unwrap();
        assert!(decoded == decoded_anywhere || !finite);
        decode_add(quantizer, &bytes, &mut decoded).unwrap();
        decode_add_blocks(quantizer, &bytes, &mut decoded_anywhere).unwrap();
        assert!(decoded == decoded_anywhere || !finite);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn all_instruction_sets_do_the_same(
            bits in prop::collection::vec(any::<u32>(), 0..1500), seed: u64, bits_of_qsgd in 2..=8u32
        ) {
            let key = Some(Key::new(seed));
            let wild: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            let tame: Vec<f32> = bits.iter().map(|&bits| bits as i32 as f32).collect();
            for values in [&wild, &tame] {
                assert_alike(Int8::default(), None, 0, values);
                assert_alike(Int8::default(), key, 512, values);
                assert_alike(Int4::default(), None, 0, values);
                assert_alike(Int4::default(), key, 512, values);
                assert_alike(Qsgd::new(bits_of_qsgd), key, 512, values);
            }
        }
    }

    #[test]
    fn scales_are_rounded_up_and_finite_to_the_last_level() {
        for levels in [1, 3, 7, 15, 31, 63, 127] {
            for peak in [FLOOR, 1e-20, 0.3, 1.0, 1e20, 1e38, f32::MAX] {
                let scale = scale(levels, peak);
                let last = scale * f32::from(levels);
                assert!(last.is_finite());
                assert_eq!(scale.to_bits() & 0xffff, 0, "a bf16");
                // Beyond the largest scale, the last level is the nearest to the peak.
                let short = if peak == f32::MAX { scale / 2.0 } else { 0.0 };
                assert!(last >= peak * 0.999_999 - short && last <= peak * 1.01, "{levels} {peak}");
            }
            assert_eq!(scale(levels, FLOOR / 2.0), 0.0);
            assert!(scale(levels, f32::INFINITY).is_nan() && scale(levels, f32::NAN).is_nan());
        }
    }

    #[test]
    fn dithers_are_even() {
        // Over places, blocks and bits alike: a chi-squared test in 64 cells.
        const COUNT: usize = 1 << 16;
        let of_place = |i: usize| dither_at(0x0123_4567_89ab_cdef, i as u32);
        let of_block = |i: usize| dither_at(Key::new(7).at(512 * i as u64), 3);
        for dithers in [&of_place as &dyn Fn(usize) -> f32, &of_block] {
            let mut cells = [0u32; 64];
            for dither in (0..COUNT).map(dithers) {
                assert!((-0.5..=0.5).contains(&dither));
                cells[(((dither + 0.5) * 64.0) as usize).min(63)] += 1;
            }
            let expected = COUNT as f64 / 64.0;
            let chi: f64 =
                cells.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
            // 63 degrees of freedom; more than 140 happens once in ten million times.
            assert!((20.0..140.0).contains(&chi), "{chi}: {cells:?}");
        }
    }

    #[test]
    fn what_no_encoder_writes_is_refused() {
        fn field(result: Result<(), BadEncoding>) -> &'static str {
            match result {
                Err(BadEncoding::Field { field, .. }) => field,
                other => panic!("{other:?}"),
            }
        }
        fn check<Q: Quantizer>(quantizer: Q) {
            let mut into = [0.0; 3];
            let mut good = vec![0; bytes(quantizer, 3)];
            encode(quantizer, None, 0, &[1.0, -2.0, 0.5], &mut good);
            assert_eq!(decode(quantizer, &good, &mut into), Ok(()));
            // Negative, infinite, another NaN, larger than any.
            let larger = (largest_scale(quantizer.levels()) >> 16) as u16 + 1;
            for scale in [0x8000, 0x7f80, 0x7fff, larger] {
                let mut bad = good.clone();
                bad[..SCALE].copy_from_slice(&scale.to_le_bytes());
                assert_eq!(field(decode(quantizer, &bad, &mut into)), "scale");
            }
            let mut bad = good;
            bad[SCALE..].fill(0xff);
            assert_eq!(field(decode(quantizer, &bad, &mut into)), "code");
        }
        check(Int8::default());
        check(Int4::default());
        (2..=8).for_each(|bits| check(Qsgd::new(bits)));
    }
}
