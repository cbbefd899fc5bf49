//! int4: half a byte for each element, and a scale for each block of 128.
//!
//! A block's scale is its largest magnitude over 7, and an element is a multiple of it from −7 to 7.
//! How that is done is in the module `block`. The codes of a block are packed by halves: a byte
//! holds an element of the first half in its lower bits and the one as far into the second half in
//! its upper bits, so that packing shifts whole vectors and moves nothing within them.
//!
//! Most elements of a gradient are much smaller than the largest, and rounded to the nearest of so
//! few levels many become zero each time: this is biased, and needs its residual more than
//! [`int8`](crate::int8). Rounded stochastically it needs none, but is much noisier.

use crate::Rounding;
use crate::block::{Quantizer, quantized};

/// Gradients in blocks of 4-bit integers: 7.76 times less bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Int4 {
    rounding: Rounding,
}

impl Int4 {
    /// With this rounding.
    pub fn new(rounding: Rounding) -> Int4 {
        Int4 { rounding }
    }
}

quantized!(Int4);

impl Quantizer for Int4 {
    const NAME: &'static str = "int4";
    /// Longer blocks are coarser, with outliers in more of them; shorter ones are larger: with 64
    /// elements the scales would be 6 % of the bytes.
    const BLOCK: usize = 128;

    fn rounding(self) -> Rounding {
        self.rounding
    }

    #[inline(always)]
    fn levels(self) -> u8 {
        7
    }

    #[inline(always)]
    fn packed(self, elements: usize) -> usize {
        elements.div_ceil(2)
    }

    #[inline(always)]
    fn pack(self, elements: usize, codes: &mut [u8], into: &mut [u8]) {
        let half = self.packed(elements);
        let (lower, upper) = codes[..2 * half].split_at(half);
        for ((byte, lower), upper) in into.iter_mut().zip(lower).zip(upper) {
            *byte = lower | (upper << 4);
        }
    }

    #[inline(always)]
    fn unpack(self, elements: usize, bytes: &[u8], codes: &mut [u8]) {
        let half = self.packed(elements);
        let (lower, upper) = codes[..2 * half].split_at_mut(half);
        for ((byte, lower), upper) in bytes.iter().zip(lower).zip(upper) {
            *lower = byte & 0x0f;
            *upper = byte >> 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::tests::{assert_near, assert_right_on_average};
    use crate::{Codec, Key, Spans};
    use proptest::prelude::*;

    #[test]
    fn is_as_small_as_promised() {
        let elements = 1 << 20;
        let ratio = (elements * 4) as f64 / Int4::default().bytes(elements) as f64;
        assert!(ratio >= 7.7, "{ratio}");
        assert!(Int4::default().suits(&[3, 3]) && !Int4::default().suits(&[0]));
    }

    #[test]
    fn only_the_nearest_is_biased() {
        assert!(Int4::new(Rounding::Nearest).is_biased());
        assert!(!Int4::new(Rounding::Stochastic).is_biased());
        assert_right_on_average(&Int4::new(Rounding::Stochastic));
    }

    #[test]
    #[should_panic(expected = "has an error of")]
    fn the_nearest_is_not_right_on_average() {
        assert_right_on_average(&Int4::new(Rounding::Nearest));
    }

    proptest! {
        #[test]
        fn errs_by_half_a_level_or_a_whole_one(
            values in prop::collection::vec(-1.0f32..1.0, 0..800), exponent in -90..126i32, seed: u64
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2.0f32.powi(exponent)).collect();
            let key = Key::new(seed);
            assert_near(&Int4::new(Rounding::Nearest), 7, 0.5001, key, &values);
            assert_near(&Int4::new(Rounding::Stochastic), 7, 1.0001, key, &values);
        }
    }
}
