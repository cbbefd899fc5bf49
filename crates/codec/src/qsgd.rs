//! QSGD: stochastic quantization to any number of bits from 2 to 8.
//!
//! Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding"
//! (2017). A bucket of 512 elements is divided by a norm, and each element becomes one of `s` levels
//! of its magnitude, by chance the next lower or the next higher, so that it is right on average.
//! With its sign that makes 2·s + 1 codes, which `b` bits hold for s = 2ᵇ⁻¹ − 1.
//!
//! The paper proves its bounds for the Euclidean norm and computes with the largest magnitude in its
//! experiments; this does too. The largest magnitude is never larger than the Euclidean norm, mostly
//! many times smaller, and so are the distances between levels and with them the variance. What is
//! given up is sparsity: with the Euclidean norm most levels are zero, which only pays with a
//! variable-length code, and those are slower than the links they would save.
//!
//! The levels themselves are in the module `block`. The codes are packed as bit planes: plane `p`
//! has bit `p` of all codes, and bit `k` of its byte `j` is of the element that is `j` into the `k`-th
//! eighth of the block. So packing shifts and merges whole vectors, whatever the number of bits.

use crate::Rounding;
use crate::block::{Quantizer, quantized};

/// Gradients in stochastic levels, of a choice of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qsgd {
    bits: u32,
}

impl Qsgd {
    /// Bits of an element unless chosen otherwise: 7.9 times less bytes than f32.
    pub const BITS: u32 = 4;

    /// With so many bits for each element.
    ///
    /// # Panics
    /// Unless there are 2 to 8.
    pub fn new(bits: u32) -> Qsgd {
        assert!((2..=8).contains(&bits), "QSGD has 2 to 8 bits, not {bits}");
        Qsgd { bits }
    }
}

impl Default for Qsgd {
    fn default() -> Qsgd {
        Qsgd::new(Qsgd::BITS)
    }
}

quantized!(Qsgd);

impl Quantizer for Qsgd {
    const NAME: &'static str = "qsgd";
    /// The paper's bucket. Longer ones are noisier, with outliers in more of them; shorter ones are
    /// larger: with 64 elements of 2 bits the scales would be 11 % of the bytes.
    const BLOCK: usize = 512;

    fn rounding(self) -> Rounding {
        Rounding::Stochastic
    }

    #[inline(always)]
    fn levels(self) -> u8 {
        (1 << (self.bits - 1)) - 1
    }

    #[inline(always)]
    fn packed(self, elements: usize) -> usize {
        elements.div_ceil(8) * self.bits as usize
    }

    #[inline(always)]
    fn pack(self, elements: usize, codes: &mut [u8], into: &mut [u8]) {
        let eighth = elements.div_ceil(8);
        for plane in into.chunks_exact_mut(eighth) {
            plane.fill(0);
            for (k, codes) in codes[..8 * eighth].chunks_exact_mut(eighth).enumerate() {
                for (byte, code) in plane.iter_mut().zip(codes) {
                    *byte |= (*code & 1) << k;
                    *code >>= 1;
                }
            }
        }
    }

    #[inline(always)]
    fn unpack(self, elements: usize, bytes: &[u8], codes: &mut [u8]) {
        let eighth = elements.div_ceil(8);
        let codes = &mut codes[..8 * eighth];
        codes.fill(0);
        for plane in bytes.chunks_exact(eighth).rev() {
            for (k, codes) in codes.chunks_exact_mut(eighth).enumerate() {
                for (byte, code) in plane.iter().zip(codes) {
                    *code = (*code << 1) | ((byte >> k) & 1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::tests::{assert_near, assert_right_on_average, there_and_back};
    use crate::{Codec, Key, Spans};
    use proptest::prelude::*;

    #[test]
    fn is_as_small_as_its_bits() {
        let elements = 1 << 20;
        for bits in 2..=8 {
            let ratio = (elements * 4) as f64 / Qsgd::new(bits).bytes(elements) as f64;
            assert!(ratio >= 32.0 / f64::from(bits) * 0.98, "{bits}: {ratio}");
        }
        assert_eq!(Qsgd::default(), Qsgd::new(Qsgd::BITS));
    }

    #[test]
    #[should_panic(expected = "2 to 8 bits, not 9")]
    fn has_no_more_than_8_bits() {
        Qsgd::new(9);
    }

    #[test]
    fn is_right_on_average() {
        for bits in [2, 4, 7, 8] {
            assert!(!Qsgd::new(bits).is_biased());
            assert_right_on_average(&Qsgd::new(bits));
        }
    }

    #[test]
    fn keeps_every_level_in_its_place() {
        for bits in 2..=8 {
            let qsgd = Qsgd::new(bits);
            let levels = i32::from(qsgd.levels());
            for length in [1, 8, 9, 100, 512, 513, 1000] {
                // Levels are a bf16 apart, and the first of every block is the peak.
                let level = |i: usize| match i % Qsgd::BLOCK {
                    0 => levels,
                    i => (i as i32 * 37) % (levels + 1) * if i % 3 == 0 { -1 } else { 1 },
                };
                let values: Vec<f32> = (0..length).map(|i| level(i) as f32 * 0.25).collect();
                assert_eq!(there_and_back(&qsgd, Key::new(2), &values), values, "{bits} {length}");
            }
        }
    }

    proptest! {
        #[test]
        fn errs_by_at_most_one_level(
            values in prop::collection::vec(-1.0f32..1.0, 0..1200),
            exponent in -90..126i32, seed: u64, bits in 2..=8u32
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2.0f32.powi(exponent)).collect();
            let levels = (1 << (bits - 1)) - 1;
            assert_near(&Qsgd::new(bits), levels, 1.0001, Key::new(seed), &values);
        }
    }
}
