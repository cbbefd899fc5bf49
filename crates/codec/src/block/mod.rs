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

mod decode;
mod encode;
#[cfg(test)]
pub mod tests;

use crate::{Key, Rounding};

pub use decode::{check, decode, decode_add};
pub use encode::{encode, encode_owed};

/// How a block is quantized and packed.
pub trait Quantizer: Copy {
    /// The codec, in errors.
    const NAME: &'static str;
    /// Elements of a block: a multiple of 8, at most [`LARGEST`].
    const BLOCK: usize;
    /// Whether codes travel as they are, a byte each, so that they need not be packed and unpacked.
    const IS_PLAIN: bool = false;

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

/// Bytes of a scale.
const SCALE: usize = 2;

/// Bytes of a full block.
#[inline(always)]
fn stride<Q: Quantizer>(quantizer: Q) -> usize {
    SCALE + quantizer.packed(Q::BLOCK)
}

/// Blocks with a smaller peak become zeros: the inverse of their scale could be infinite. No
/// optimizer can tell 10⁻³⁰ from zero.
const FLOOR: f32 = 1.0 / (1u128 << 100) as f32;

/// The one NaN that is ever a scale.
const NAN: u32 = 0x7fc0_0000;

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
