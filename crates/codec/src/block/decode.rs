//! Decodes and checks runs of blocks.

use super::{LARGEST, NAN, Quantizer, SCALE, bytes, dequantize, largest_scale, stride};
use crate::BadEncoding;
use crate::stream::{DecodeTile, decode_tiles};
use multiversion::multiversion;

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
pub(super) fn decode_blocks<Q: Quantizer>(
    quantizer: Q,
    bytes: &[u8],
    into: &mut [f32],
) -> Result<(), BadEncoding> {
    expect_length(quantizer, bytes, into.len())?;
    decode_tiles(Decoder(quantizer), bytes, into)
}

#[inline(always)]
pub(super) fn decode_add_blocks<Q: Quantizer>(
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
    let mut aside = [0; LARGEST];
    for (bytes, start) in bytes.chunks(stride(quantizer)).zip((0..elements).step_by(Q::BLOCK)) {
        read(quantizer, Q::BLOCK.min(elements - start), bytes, &mut aside)?;
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
    let mut aside = [0; LARGEST];
    for (bytes, block) in bytes.chunks(stride(quantizer)).zip(into.chunks_mut(Q::BLOCK)) {
        // The same either way, but the first is compiled for a known length.
        if block.len() == Q::BLOCK {
            decode_block::<Q, ADD>(quantizer, bytes, &mut aside, &mut block[..Q::BLOCK])?;
        } else {
            decode_block::<Q, ADD>(quantizer, bytes, &mut aside, block)?;
        }
    }
    Ok(())
}

#[inline(always)]
fn decode_block<Q: Quantizer, const ADD: bool>(
    quantizer: Q,
    bytes: &[u8],
    aside: &mut [u8; LARGEST],
    block: &mut [f32],
) -> Result<(), BadEncoding> {
    let (scale, codes) = read(quantizer, block.len(), bytes, aside)?;
    for (value, code) in block.iter_mut().zip(codes) {
        let decoded = dequantize(quantizer.levels(), scale, *code);
        *value = if ADD { *value + decoded } else { decoded };
    }
    Ok(())
}

/// The scale and the codes of a block of as many elements. There is room `aside` for codes that are packed.
#[inline(always)]
fn read<'a, Q: Quantizer>(
    quantizer: Q,
    elements: usize,
    bytes: &'a [u8],
    aside: &'a mut [u8; LARGEST],
) -> Result<(f32, &'a [u8]), BadEncoding> {
    let bad = |field, found| BadEncoding::Field { codec: Q::NAME, field, found };
    let (head, packed) = bytes.split_at(SCALE);
    let scale = u32::from(u16::from_le_bytes([head[0], head[1]])) << 16;
    if scale > largest_scale(quantizer.levels()) && scale != NAN {
        return Err(bad("scale", u64::from(scale >> 16)));
    }
    let codes = if Q::IS_PLAIN {
        &packed[..elements]
    } else {
        quantizer.unpack(elements, packed, &mut aside[..Q::BLOCK]);
        &aside[..elements]
    };
    let highest = codes.iter().fold(0, |highest, code| highest.max(*code));
    if highest > 2 * quantizer.levels() {
        return Err(bad("code", u64::from(highest)));
    }
    Ok((f32::from_bits(scale), codes))
}
