//! f16: half the bytes, 11 bits of precision, and a range of 6·10⁻⁸ to 65504.
//!
//! Sums of encodings are sums of f16, rounded after every addition, so this rides the all-reduce
//! that is there. Gradients are often smaller than its smallest number and then lost without a
//! trace; where that matters, [`bf16`](crate::bf16) has the range of f32.

use crate::Wire;
use crate::cast::{self, Format, Mean};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Gradients in f16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fp16;

/// Rounds `values` to the nearest f16, ties to even; what is too large becomes infinity.
///
/// # Panics
/// If the lengths differ.
pub fn encode(values: &[f32], into: &mut [f16]) {
    encode_scaled(values, 1.0, into);
}

/// As [`encode`], each value times a factor.
///
/// # Panics
/// If the lengths differ.
pub fn encode_scaled(values: &[f32], factor: f32, into: &mut [f16]) {
    let into = into.reinterpret_cast_mut();
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("f16c") {
        // SAFETY: this CPU has it, and AVX with it.
        return unsafe { f16c::narrow(values, factor, into) };
    }
    cast::narrow::<Fp16>(values, factor, into);
}

/// The values of f16 numbers.
///
/// # Panics
/// If the lengths differ.
pub fn decode(values: &[f16], into: &mut [f32]) {
    decode_mean(values, Mean::NONE, into);
}

/// The means of which f16 numbers are the sums.
///
/// # Panics
/// If the lengths differ.
pub fn decode_mean(sums: &[f16], mean: Mean, into: &mut [f32]) {
    let sums = sums.reinterpret_cast();
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("f16c") {
        // SAFETY: this CPU has it, and AVX with it.
        return unsafe { f16c::widen(sums, mean, into) };
    }
    cast::widen::<Fp16>(sums, mean, into);
}

impl Format for Fp16 {
    const NAME: &'static str = "fp16";
    const WIRE: Wire = Wire::Fp16;

    #[inline(always)]
    fn narrow(value: f32) -> u16 {
        let sign = (value.to_bits() >> 16) & 0x8000;
        let magnitude = value.to_bits() & 0x7fff_ffff;
        // 0.5 has the unit 2⁻²⁴ of f16's subnormals: adding it rounds to them.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        // The others differ in the exponent's bias; rounding may carry into the exponent.
        let nearest = magnitude.wrapping_add(0x0fff + ((magnitude >> 13) & 1));
        let normal = (nearest.wrapping_sub(0x3800_0000) >> 13).min(0x7c00);
        let number = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let nan = 0x7e00 | ((magnitude >> 13) & 0x03ff);
        (sign | if magnitude > 0x7f80_0000 { nan } else { number }) as u16
    }

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let sign = u32::from(bits & 0x8000) << 16;
        let magnitude = u32::from(bits & 0x7fff);
        // A subnormal counts units of 2⁻²⁴; the others differ from f32 in the exponent's bias.
        let subnormal = (magnitude as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
        let normal = (magnitude << 13) + 0x3800_0000;
        let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
        let special = (magnitude << 13) | 0x7f80_0000 | quiet;
        let finite = if magnitude < 0x0400 { subnormal } else { normal };
        f32::from_bits(sign | if magnitude < 0x7c00 { finite } else { special })
    }
}

/// The conversion instructions of x86, which the compiler does not find by itself. They do what
/// [`Fp16`] does, to the bit.
#[cfg(target_arch = "x86_64")]
mod f16c {
    use super::{Format, Fp16, Mean};
    use crate::stream::sweep;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx,f16c")]
    pub fn narrow(values: &[f32], factor: f32, into: &mut [u16]) {
        let factors = _mm256_set1_ps(factor);
        sweep(values, into, |values, into| {
            let (vectors, rest) = values.as_chunks::<8>();
            let (into_vectors, into_rest) = into.as_chunks_mut::<8>();
            for (vector, into) in vectors.iter().zip(into_vectors) {
                // SAFETY: eight f32 are a vector, and eight u16 half of one.
                unsafe {
                    let wide = _mm256_mul_ps(_mm256_loadu_ps(vector.as_ptr()), factors);
                    let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                    _mm_storeu_si128(into.as_mut_ptr().cast(), narrow);
                }
            }
            for (value, into) in rest.iter().zip(into_rest) {
                *into = Fp16::narrow(*value * factor);
            }
        });
    }

    #[target_feature(enable = "avx,f16c")]
    pub fn widen(values: &[u16], mean: Mean, into: &mut [f32]) {
        sweep(values, into, |values, into| {
            let (vectors, rest) = values.as_chunks::<8>();
            let (into_vectors, into_rest) = into.as_chunks_mut::<8>();
            for (vector, into) in vectors.iter().zip(into_vectors) {
                // SAFETY: eight u16 are half a vector, and eight f32 a whole one.
                unsafe {
                    let narrow = _mm_loadu_si128(vector.as_ptr().cast());
                    _mm256_storeu_ps(into.as_mut_ptr(), _mm256_cvtph_ps(narrow));
                }
            }
            for (bits, into) in rest.iter().zip(into_rest) {
                *into = Fp16::widen(*bits);
            }
            mean.make(into);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn widens_every_number_exactly() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32();
            assert_eq!(Fp16::widen(bits).to_bits(), expected.to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn rounds_around_every_number() {
        for bits in 0..0x7c00u16 {
            let here = f16::from_bits(bits).to_f32();
            // The next one; beyond the largest, where it would be.
            let next = if bits < 0x7bff { f16::from_bits(bits + 1).to_f32() } else { 65536.0 };
            let half = (here + next) / 2.0;
            let even = bits + (bits & 1);
            for (value, expected) in
                [(here, bits), (half.next_down(), bits), (half, even), (half.next_up(), bits + 1)]
            {
                assert_eq!(Fp16::narrow(value), expected, "{value:e}");
                assert_eq!(Fp16::narrow(-value), 0x8000 | expected, "-{value:e}");
            }
        }
    }

    #[test]
    fn loses_no_nan_and_overflows_to_infinity() {
        for value in [f32::INFINITY, f32::MAX, 1e38, 65520.0] {
            assert_eq!(Fp16::narrow(value), 0x7c00);
            assert_eq!(Fp16::narrow(-value), 0xfc00);
        }
        for bits in [0x7f80_0001, 0x7fc0_0000, 0xff80_0001, 0xffff_ffff] {
            assert!(Fp16::widen(Fp16::narrow(f32::from_bits(bits))).is_nan(), "{bits:#x}");
        }
    }

    proptest! {
        #[test]
        fn casts_slices(bits in prop::collection::vec(any::<u32>(), 0..600)) {
            let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            let mut encoded = vec![f16::ZERO; values.len()];
            encode(&values, &mut encoded);
            for (value, encoded) in values.iter().zip(&encoded) {
                prop_assert_eq!(encoded.to_bits(), f16::from_f32(*value).to_bits());
            }
            let mut decoded = vec![0.0; values.len()];
            decode(&encoded, &mut decoded);
            for (encoded, decoded) in encoded.iter().zip(&decoded) {
                prop_assert_eq!(decoded.to_bits(), encoded.to_f32().to_bits());
            }
        }
    }
}
