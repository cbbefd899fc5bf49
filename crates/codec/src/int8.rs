//! int8: a byte for each element, and a scale for each block of 256.
//!
//! A block's scale is its largest magnitude over 127, and an element is a multiple of it from −127
//! to 127. A bucket of mixed parameters does not matter, as only the neighbours of an outlier are
//! encoded coarsely for it. How that is done, and what the encoding of a block looks like, is in the
//! module `block`.
//!
//! Rounded to the nearest, the error is at most half a scale, but it is the same whenever the
//! gradient is: a small element beside a large one is always zero. So that is biased, and the
//! residual is to be remembered. Rounded stochastically, the error is up to a whole scale, but zero
//! on average.

use crate::Rounding;
use crate::block::{Quantizer, quantized};

/// Gradients in blocks of 8-bit integers: 3.97 times less bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Int8 {
    rounding: Rounding,
}

impl Int8 {
    /// With this rounding.
    pub fn new(rounding: Rounding) -> Int8 {
        Int8 { rounding }
    }
}

quantized!(Int8);

impl Quantizer for Int8 {
    const NAME: &'static str = "int8";
    /// Longer blocks are coarser, with outliers in more of them; shorter ones are larger: with 128
    /// elements the scales would be 1.5 % of the bytes.
    const BLOCK: usize = 256;
    const IS_PLAIN: bool = true;

    fn rounding(self) -> Rounding {
        self.rounding
    }

    #[inline(always)]
    fn levels(self) -> u8 {
        127
    }

    #[inline(always)]
    fn packed(self, elements: usize) -> usize {
        elements
    }

    #[inline(always)]
    fn pack(self, elements: usize, codes: &mut [u8], into: &mut [u8]) {
        into.copy_from_slice(&codes[..elements]);
    }

    #[inline(always)]
    fn unpack(self, elements: usize, bytes: &[u8], codes: &mut [u8]) {
        codes[..elements].copy_from_slice(bytes);
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
        let ratio = (elements * 4) as f64 / Int8::default().bytes(elements) as f64;
        assert!(ratio >= 3.95, "{ratio}");
        assert!(Int8::default().suits(&[3, 3]) && !Int8::default().suits(&[0]));
    }

    #[test]
    fn only_the_nearest_is_biased() {
        assert!(Int8::new(Rounding::Nearest).is_biased());
        assert!(!Int8::new(Rounding::Stochastic).is_biased());
        assert_right_on_average(&Int8::new(Rounding::Stochastic));
    }

    #[test]
    #[should_panic(expected = "has an error of")]
    fn the_nearest_is_not_right_on_average() {
        assert_right_on_average(&Int8::new(Rounding::Nearest));
    }

    proptest! {
        #[test]
        fn errs_by_half_a_level_or_a_whole_one(
            values in prop::collection::vec(-1.0f32..1.0, 0..800), exponent in -90..126i32, seed: u64
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2.0f32.powi(exponent)).collect();
            let key = Key::new(seed);
            assert_near(&Int8::new(Rounding::Nearest), 127, 0.5001, key, &values);
            assert_near(&Int8::new(Rounding::Stochastic), 127, 1.0001, key, &values);
        }
    }
}
