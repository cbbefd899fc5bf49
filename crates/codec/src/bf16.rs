//! bf16: the upper half of an f32, rounded. Half the bytes, 8 bits of precision, the range of f32.
//!
//! Sums of encodings are sums of bf16, rounded after every addition, so this rides the all-reduce
//! that is there. Nothing underflows or overflows that did not before, which makes it the safer of
//! the two 16-bit floats; [`fp16`](crate::fp16) has three bits more where the range is known.

use crate::Wire;
use crate::cast::{self, Format, Mean};
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Gradients in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bf16;

/// Rounds `values` to the nearest bf16, ties to even; what is too large becomes infinity.
///
/// # Panics
/// If the lengths differ.
pub fn encode(values: &[f32], into: &mut [bf16]) {
    encode_scaled(values, 1.0, into);
}

/// As [`encode`], each value times a factor.
///
/// # Panics
/// If the lengths differ.
pub fn encode_scaled(values: &[f32], factor: f32, into: &mut [bf16]) {
    cast::narrow::<Bf16>(values, factor, into.reinterpret_cast_mut());
}

/// The values of bf16 numbers.
///
/// # Panics
/// If the lengths differ.
pub fn decode(values: &[bf16], into: &mut [f32]) {
    decode_mean(values, Mean::NONE, into);
}

/// The means of which bf16 numbers are the sums.
///
/// # Panics
/// If the lengths differ.
pub fn decode_mean(sums: &[bf16], mean: Mean, into: &mut [f32]) {
    cast::widen::<Bf16>(sums.reinterpret_cast(), mean, into);
}

impl Format for Bf16 {
    const NAME: &'static str = "bf16";
    const WIRE: Wire = Wire::Bf16;

    #[inline(always)]
    fn narrow(value: f32) -> u16 {
        let bits = value.to_bits();
        // Carries into the exponent, up to infinity, are as they should be.
        let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // But the payload of a NaN must not be rounded away.
        let nan = (bits >> 16) | 0x0040;
        (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { nearest }) as u16
    }

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rounds_around_every_number() {
        for bits in 0..0x7f80u16 {
            let here = Bf16::widen(bits);
            let half = f32::from_bits(here.to_bits() + 0x8000);
            let even = bits + (bits & 1);
            for (value, expected) in
                [(here, bits), (half.next_down(), bits), (half, even), (half.next_up(), bits + 1)]
            {
                assert_eq!(Bf16::narrow(value), expected, "{value:e}");
                assert_eq!(Bf16::narrow(-value), 0x8000 | expected, "-{value:e}");
            }
        }
    }

    #[test]
    fn loses_no_nan_and_no_infinity() {
        assert_eq!(Bf16::narrow(f32::INFINITY), 0x7f80);
        assert_eq!(Bf16::narrow(f32::NEG_INFINITY), 0xff80);
        assert_eq!(Bf16::narrow(f32::MAX), 0x7f80);
        for bits in [0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff] {
            assert!(Bf16::widen(Bf16::narrow(f32::from_bits(bits))).is_nan(), "{bits:#x}");
        }
    }

    proptest! {
        #[test]
        fn casts_slices(bits in prop::collection::vec(any::<u32>(), 0..600)) {
            let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            let mut encoded = vec![bf16::ZERO; values.len()];
            encode(&values, &mut encoded);
            for (value, encoded) in values.iter().zip(&encoded) {
                prop_assert_eq!(encoded.to_bits(), bf16::from_f32(*value).to_bits());
            }
            let mut decoded = vec![0.0; values.len()];
            decode(&encoded, &mut decoded);
            for (encoded, decoded) in encoded.iter().zip(&decoded) {
                prop_assert_eq!(decoded.to_bits(), u32::from(encoded.to_bits()) << 16);
            }
        }
    }
}
