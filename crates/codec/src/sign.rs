//! sign: one bit for each element, and the mean magnitude for each block of 2048.
//!
//! What is decoded is the block's mean magnitude, its *scale*, with each element's own sign. Of all
//! vectors with these signs and one magnitude that is the nearest, and it points in the gradient's
//! direction; but it is far from the gradient, so the residual is needed. With it this converges
//! (Karimireddy et al., "Error Feedback Fixes SignSGD", 2019), without it often not.
//!
//! The scale of a block is NaN if any of its elements is infinite or NaN, and then so is all that is
//! decoded.
//!
//! Signs are packed in columns: a full block is 32 rows of 64 elements, and a row's signs are one
//! bit of each of 64 words. So packing shifts and merges whole vectors. The words follow the scale,
//! little-endian. A shorter block has as many words as it takes, and its last rows may be missing.
//!
//! Sums of floats depend on their order, so the mean is taken in a fixed number of lanes, which are
//! folded in halves, whatever the vectors of the CPU.

use crate::stream::{DecodeTile, ask_ahead, decode_tiles};
use crate::{BadEncoding, Codec, Key, Passage, Spans, elements};
use multiversion::multiversion;

/// Gradients as signs, with a scale for each block: 31.5 times less bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sign;

impl Codec for Sign {
    fn is_biased(&self) -> bool {
        true
    }

    fn encoded_bytes(&self, shape: &[usize]) -> usize {
        self.bytes(elements(shape))
    }

    fn passage(&self) -> Passage<'_> {
        Passage::Spans(self)
    }
}

impl Spans for Sign {
    fn block(&self) -> usize {
        BLOCK
    }

    fn bytes(&self, elements: usize) -> usize {
        let rest = match elements % BLOCK {
            0 => 0,
            rest => SCALE + words(rest) * 4,
        };
        elements / BLOCK * STRIDE + rest
    }

    fn encode(&self, _: Key, _: usize, values: &[f32], into: &mut [u8]) {
        assert_eq!(into.len(), self.bytes(values.len()), "room for the encoding");
        encode(values, into);
    }

    fn encode_owed(&self, _: Key, _: usize, owed: &mut [f32], into: &mut [u8]) {
        assert_eq!(into.len(), self.bytes(owed.len()), "room for the encoding");
        encode_owed(None, owed, into);
    }

    fn encode_fed(&self, _: Key, _: usize, fed: &[f32], owed: &mut [f32], into: &mut [u8]) {
        assert_eq!(into.len(), self.bytes(owed.len()), "room for the encoding");
        assert_eq!(fed.len(), owed.len(), "something fed for every element");
        encode_owed(Some(fed), owed, into);
    }

    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        self.expect_length(bytes, into.len())?;
        decode(bytes, into)
    }

    /// All signs are signs, but not every number is a scale.
    fn check(&self, bytes: &[u8], elements: usize) -> Result<(), BadEncoding> {
        self.expect_length(bytes, elements)?;
        bytes.chunks(STRIDE).try_for_each(|block| read_scale(block).map(drop))
    }

    fn decode_add(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        self.expect_length(bytes, into.len())?;
        decode_add(bytes, into)
    }
}

impl Sign {
    fn expect_length(&self, bytes: &[u8], elements: usize) -> Result<(), BadEncoding> {
        match (self.bytes(elements), bytes.len()) {
            (expected, found) if expected == found => Ok(()),
            (expected, found) => Err(BadEncoding::Length { codec: "sign", expected, found }),
        }
    }
}

/// Elements of a block. Larger ones no longer fit the first-level cache, and parts of a parameter
/// with different magnitudes would share a scale; of smaller ones the scales would be more than 2 %
/// of the bytes.
const BLOCK: usize = ROWS * WORDS;
/// Signs in a word.
const ROWS: usize = u32::BITS as usize;
/// Words of a full block.
const WORDS: usize = 64;
/// Bytes of a scale.
const SCALE: usize = 4;
/// Bytes of a full block.
const STRIDE: usize = SCALE + WORDS * 4;
/// The one NaN that is ever a scale.
const NAN: u32 = 0x7fc0_0000;

/// Words of a block of as many elements.
#[inline(always)]
fn words(elements: usize) -> usize {
    elements.div_ceil(ROWS)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn encode(values: &[f32], into: &mut [u8]) {
    encode_blocks(values, into);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn encode_owed(fed: Option<&[f32]>, owed: &mut [f32], into: &mut [u8]) {
    encode_owed_blocks(fed, owed, into);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn decode(bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
    decode_blocks(bytes, into)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn decode_add(bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
    decode_add_blocks(bytes, into)
}

#[inline(always)]
fn encode_blocks(values: &[f32], into: &mut [u8]) {
    let (blocks, last) = values.as_chunks::<BLOCK>();
    let (encodings, into_last) = into.split_at_mut(blocks.len() * STRIDE);
    for (number, (block, into)) in blocks.iter().zip(encodings.chunks_mut(STRIDE)).enumerate() {
        let mut found = Found::default();
        for (row, value) in block.as_chunks::<WORDS>().0.iter().enumerate() {
            let start = number * BLOCK + row * WORDS;
            ask_ahead(values, start..start + WORDS);
            found.note(value);
        }
        found.write(into);
    }
    if !last.is_empty() {
        encode_last(last, into_last);
    }
}

#[inline(always)]
fn encode_owed_blocks(fed: Option<&[f32]>, owed: &mut [f32], into: &mut [u8]) {
    let whole = owed.len() / BLOCK;
    let (encodings, into_last) = into.split_at_mut(whole * STRIDE);
    for (number, into) in encodings.chunks_mut(STRIDE).enumerate() {
        let mut found = Found::default();
        for start in (number * BLOCK..(number + 1) * BLOCK).step_by(WORDS) {
            let span = start..start + WORDS;
            ask_ahead(owed, span.clone());
            if let Some(fed) = fed {
                ask_ahead(fed, span.clone());
                let fed = &fed[span.clone()];
                owed[span.clone()].iter_mut().zip(fed).for_each(|(owed, fed)| *owed += fed);
            }
            found.note(owed[span].as_chunks().0.first().expect("a row is as long as this"));
        }
        let scale = found.write(into);
        pay(scale, &mut owed[number * BLOCK..(number + 1) * BLOCK]);
    }
    let last = &mut owed[whole * BLOCK..];
    if !last.is_empty() {
        if let Some(fed) = fed {
            let fed = &fed[whole * BLOCK..];
            last.iter_mut().zip(fed).for_each(|(owed, fed)| *owed += fed);
        }
        pay(encode_last(last, into_last), last);
    }
}

/// Takes from a block what will be decoded.
#[inline(always)]
fn pay(scale: f32, block: &mut [f32]) {
    block.iter_mut().for_each(|owed| *owed -= scale.copysign(*owed));
}

#[inline(always)]
fn decode_blocks(bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
    decode_tiles(Decoder, bytes, into)
}

#[inline(always)]
fn decode_add_blocks(bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
    decode_each::<true>(bytes, into)
}

struct Decoder;

impl DecodeTile for Decoder {
    const ELEMENTS: usize = BLOCK;

    #[inline(always)]
    fn bytes(&self, elements: usize) -> usize {
        Sign.bytes(elements)
    }

    #[inline(always)]
    fn decode(&mut self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        decode_each::<false>(bytes, into)
    }
}

/// Decodes every block, and adds it to what is there or puts it in its place.
#[inline(always)]
fn decode_each<const ADD: bool>(bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
    for (bytes, block) in bytes.chunks(STRIDE).zip(into.chunks_mut(BLOCK)) {
        let (scale, packed) = read_scale(bytes)?;
        let mut signs = [0u32; WORDS];
        for (word, bytes) in signs.iter_mut().zip(packed) {
            *word = u32::from_le_bytes(*bytes);
        }
        // The same either way, but the first is compiled for a known length.
        if block.len() == BLOCK {
            for into in block.as_chunks_mut::<WORDS>().0 {
                decode_row::<ADD>(scale, &mut signs, into);
            }
        } else {
            for into in block.chunks_mut(packed.len()) {
                decode_row::<ADD>(scale, &mut signs, into);
            }
        }
    }
    Ok(())
}

/// The scale of a block, and the words of its signs.
#[inline(always)]
fn read_scale(block: &[u8]) -> Result<(u32, &[[u8; 4]]), BadEncoding> {
    let ([head, packed @ ..], _) = block.as_chunks::<SCALE>() else {
        unreachable!("the length was checked, and every block has a scale");
    };
    let scale = u32::from_le_bytes(*head);
    if scale > f32::MAX.to_bits() && scale != NAN {
        let found = u64::from(scale);
        return Err(BadEncoding::Field { codec: "sign", field: "scale", found });
    }
    Ok((scale, packed))
}

/// Decodes a row by the lowest bits of the signs, and takes these away.
#[inline(always)]
fn decode_row<const ADD: bool>(scale: u32, signs: &mut [u32; WORDS], into: &mut [f32]) {
    for (value, word) in into.iter_mut().zip(signs) {
        let decoded = f32::from_bits(scale | (*word << 31));
        *word >>= 1;
        *value = if ADD { *value + decoded } else { decoded };
    }
}

/// What is known of a full block after some of its rows.
struct Found {
    lanes: [f32; LANES],
    /// The signs of the last row so far are the highest bits.
    signs: [u32; WORDS],
}

impl Default for Found {
    #[inline(always)]
    fn default() -> Found {
        Found { lanes: [0.0; LANES], signs: [0; WORDS] }
    }
}

impl Found {
    /// Takes the next row.
    #[inline(always)]
    fn note(&mut self, row: &[f32; WORDS]) {
        for ((lane, word), value) in self.lanes.iter_mut().zip(&mut self.signs).zip(row) {
            *lane += value.abs() * SHARE;
            *word = (*word >> 1) | (value.to_bits() & (1 << 31));
        }
    }

    /// Writes the encoding, after all rows, and returns the scale.
    #[inline(always)]
    fn write(self, into: &mut [u8]) -> f32 {
        let scale = mean(self.lanes, BLOCK);
        write(scale, &self.signs, into);
        scale
    }
}

/// Encodes the last block, which is not full, and returns its scale.
#[inline(always)]
fn encode_last(block: &[f32], into: &mut [u8]) -> f32 {
    let scale = mean_magnitude(block);
    let mut signs = [0u32; WORDS];
    let signs = &mut signs[..words(block.len())];
    for (row, values) in block.chunks(signs.len()).enumerate() {
        for (word, value) in signs.iter_mut().zip(values) {
            *word |= (value.to_bits() >> 31) << row;
        }
    }
    write(scale, signs, into);
    scale
}

#[inline(always)]
fn write(scale: f32, signs: &[u32], into: &mut [u8]) {
    let (head, packed) = into.split_at_mut(SCALE);
    head.copy_from_slice(&scale.to_bits().to_le_bytes());
    for (bytes, word) in packed.as_chunks_mut().0.iter_mut().zip(signs) {
        *bytes = word.to_le_bytes();
    }
}

/// Every element is divided first: the sum of a block of large ones would overflow. Rounding
/// is monotonic, and the sum of a full block of the largest number is exact: it never does.
const SHARE: f32 = 1.0 / BLOCK as f32;

/// Lanes in which magnitudes are summed: one for each element of a row.
const LANES: usize = WORDS;

/// The mean of the magnitudes, NaN if any is not finite.
#[inline(always)]
fn mean_magnitude(block: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for row in block.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane += value.abs() * SHARE;
        }
    }
    mean(lanes, block.len())
}

/// The mean of as many magnitudes, given their sums in lanes.
#[inline(always)]
fn mean(mut lanes: [f32; LANES], elements: usize) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        let (lower, upper) = lanes.split_at_mut(half);
        lower.iter_mut().zip(upper).for_each(|(lower, upper)| *lower += *upper);
        half /= 2;
    }
    if lanes[0].is_finite() {
        (lanes[0] * (BLOCK as f32 / elements as f32)).min(f32::MAX)
    } else {
        f32::from_bits(NAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn there_and_back(values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; Sign.bytes(values.len())];
        Sign.encode(Key::new(0), 0, values, &mut bytes);
        let mut decoded = vec![0.0; values.len()];
        Sign.decode(&bytes, &mut decoded).expect("bytes from the encoder");
        decoded
    }

    #[test]
    fn is_as_small_as_promised() {
        let elements = 1 << 20;
        let ratio = (elements * 4) as f64 / Sign.bytes(elements) as f64;
        assert!(ratio >= 31.0, "{ratio}");
        assert!(Sign.is_biased());
    }

    #[test]
    fn the_largest_numbers_have_a_finite_mean() {
        for length in [1, 3, 63, 2047, 2048, 4100] {
            let decoded = there_and_back(&vec![-f32::MAX; length]);
            assert!(decoded.iter().all(|&v| v < -0.999 * f32::MAX && v.is_finite()), "{length}");
        }
    }

    #[test]
    fn scales_that_no_encoder_writes_are_refused() {
        for scale in [-1.0f32, -0.0, f32::INFINITY, f32::from_bits(0x7fc0_0001), -f32::NAN] {
            let mut bytes = vec![0; Sign.bytes(5)];
            bytes[..SCALE].copy_from_slice(&scale.to_le_bytes());
            let error = Sign.decode(&bytes, &mut [0.0; 5]).unwrap_err();
            assert!(matches!(error, BadEncoding::Field { field: "scale", .. }), "{error}");
        }
    }

    proptest! {
        #[test]
        fn decodes_the_mean_magnitude_with_each_sign(
            values in prop::collection::vec(-1.0f32..1.0, 0..5000), exponent in -90..126i32
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2.0f32.powi(exponent)).collect();
            let decoded = there_and_back(&values);
            for (values, decoded) in values.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                let sum: f64 = values.iter().map(|v| f64::from(v.abs())).sum();
                let mean = sum / values.len() as f64;
                for (value, decoded) in values.iter().zip(decoded) {
                    prop_assert!((f64::from(decoded.abs()) - mean).abs() <= mean * 1e-5);
                    prop_assert_eq!(value.is_sign_negative(), decoded.is_sign_negative());
                }
            }
        }

        #[test]
        fn all_instruction_sets_do_the_same(
            values in prop::collection::vec(-1.0f32..1.0, 1..=3 * BLOCK)
        ) {
            let mut bytes = vec![0; Sign.bytes(values.len())];
            let mut bytes_anywhere = bytes.clone();
            encode(&values, &mut bytes);
            encode_blocks(&values, &mut bytes_anywhere);
            prop_assert_eq!(&bytes, &bytes_anywhere);

            let (mut owed, mut owed_anywhere) = (values.clone(), values.clone());
            encode_owed(Some(&values), &mut owed, &mut bytes);
            encode_owed_blocks(Some(&values), &mut owed_anywhere, &mut bytes_anywhere);
            prop_assert_eq!((&owed, &bytes), (&owed_anywhere, &bytes_anywhere));

            let (mut decoded, mut decoded_anywhere) = (values.clone(), values);
            decode(&bytes, &mut decoded).unwrap();
            decode_blocks(&bytes, &mut decoded_anywhere).unwrap();
            prop_assert_eq!(&decoded, &decoded_anywhere);
            decode_add(&bytes, &mut decoded).unwrap();
            decode_add_blocks(&bytes, &mut decoded_anywhere).unwrap();
            prop_assert_eq!(decoded, decoded_anywhere);
        }

        /// Full blocks are packed as a block of any length is.
        #[test]
        fn full_blocks_are_like_others(values in prop::collection::vec(-1.0f32..1.0, BLOCK)) {
            let mut bytes = vec![0; Sign.bytes(BLOCK)];
            let mut as_last = bytes.clone();
            encode(&values, &mut bytes);
            encode_last(&values, &mut as_last);
            prop_assert_eq!(bytes, as_last);
        }
    }
}
