//! f16 and bf16: combined in f32, rounded to nearest even after every node.
//!
//! Sums and products work on f32 values that are exactly representable in 16 bits; rounding one
//! back to such a value is part of the operation, so that a group of any size stays in registers.
//! bf16 needs integer instructions only and takes two elements at once, the even and the odd half
//! of a 32-bit word, because shifts and masks are cheaper than shuffles. (The AVX-512 conversion
//! to bf16 flushes subnormals and is of no use here.) f16 uses the conversion instructions of
//! x86 where they exist, and otherwise the same conversion without branches.
//!
//! Minimum and maximum only choose, so they work on the bits.

use super::fused::{Divide, Finish, Format, Max, Min, Operation, Product, Sum};

/// Two bf16 in a 32-bit word. Which of them comes first in memory does not matter.
pub struct Bf16;

impl Bf16 {
    /// The nearest bf16, ties to even, of a result computed from bf16 values. A NaN needs no care:
    /// its payload is that of an operand or the default one, so its lower half is zero and rounding
    /// does not carry into the upper.
    #[inline(always)]
    fn round(value: f32) -> f32 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        f32::from_bits(rounded & 0xffff_0000)
    }
}

impl Format for Bf16 {
    type Word = u32;
    type Wide = [f32; 2];
    const LANES: usize = 32;

    #[inline(always)]
    fn widen(word: u32) -> [f32; 2] {
        [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
    }

    #[inline(always)]
    fn narrow(wide: [f32; 2]) -> u32 {
        (wide[0].to_bits() >> 16) | wide[1].to_bits()
    }
}

impl Operation<Bf16> for Sum {
    #[inline(always)]
    fn combine(left: [f32; 2], right: [f32; 2]) -> [f32; 2] {
        [Bf16::round(left[0] + right[0]), Bf16::round(left[1] + right[1])]
    }
}

impl Operation<Bf16> for Product {
    #[inline(always)]
    fn combine(left: [f32; 2], right: [f32; 2]) -> [f32; 2] {
        [Bf16::round(left[0] * right[0]), Bf16::round(left[1] * right[1])]
    }
}

impl Finish<Bf16> for Divide {
    #[inline(always)]
    fn finish(root: [f32; 2], divisor: u32) -> [f32; 2] {
        [Bf16::round(root[0] / divisor as f32), Bf16::round(root[1] / divisor as f32)]
    }
}

/// f16 without conversion instructions.
pub struct F16;

impl F16 {
    /// The nearest f16, ties to even.
    #[inline(always)]
    fn round(value: f32) -> f32 {
        Self::widen(Self::narrow(value))
    }
}

impl Format for F16 {
    type Word = u16;
    type Wide = f32;
    const LANES: usize = 64;

    #[inline(always)]
    fn widen(word: u16) -> f32 {
        let sign = u32::from(word & 0x8000) << 16;
        let magnitude = u32::from(word & 0x7fff);
        // A subnormal counts units of 2⁻²⁴; the others differ from f32 in the exponent's bias.
        let subnormal = (magnitude as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
        let normal = (magnitude << 13) + 0x3800_0000;
        let special = (magnitude << 13) | 0x7f80_0000;
        let finite = if magnitude < 0x0400 { subnormal } else { normal };
        f32::from_bits(sign | if magnitude < 0x7c00 { finite } else { special })
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        let sign = (wide.to_bits() >> 16) & 0x8000;
        let magnitude = wide.to_bits() & 0x7fff_ffff;
        // 0.5 has the unit 2⁻²⁴ of f16's subnormals: adding it rounds to them.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let nearest = magnitude.wrapping_add(0x0fff + ((magnitude >> 13) & 1));
        let normal = (nearest.wrapping_sub(0x3800_0000) >> 13).min(0x7c00);
        let number = if magnitude < 0x3880_0000 { subnormal } else { normal };
        (sign | if magnitude > 0x7f80_0000 { 0x7e00 } else { number }) as u16
    }
}

impl Operation<F16> for Sum {
    #[inline(always)]
    fn combine(left: f32, right: f32) -> f32 {
        F16::round(left + right)
    }
}

impl Operation<F16> for Product {
    #[inline(always)]
    fn combine(left: f32, right: f32) -> f32 {
        F16::round(left * right)
    }
}

impl Finish<F16> for Divide {
    #[inline(always)]
    fn finish(root: f32, divisor: u32) -> f32 {
        F16::round(root / divisor as f32)
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub use F16 as F16Avx2;
#[cfg(not(target_arch = "x86_64"))]
pub use F16 as F16Avx512;
#[cfg(target_arch = "x86_64")]
pub use x86::{F16Avx2, F16Avx512};

/// f16 with the conversion instructions of x86: a word is a vector. The compiler does not find
/// these instructions by itself, so the vector arithmetic around them is spelled out too.
///
/// The functions are safe to call only inside the loops compiled for their target, and nothing
/// else can call them: the formats reach no further than the tables of those loops.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Divide, Finish, Format, Operation, Product, Sum};
    use std::arch::x86_64::*;

    macro_rules! f16 {
        (
            $(#[$doc:meta])* $name:ident, $word:ty, $wide:ty, $lanes:literal,
            $widen:ident, $narrow:ident, $add:ident, $mul:ident, $div:ident, $splat:ident
        ) => {
            $(#[$doc])*
            pub struct $name;

            impl $name {
                #[inline(always)]
                fn round(wide: $wide) -> $wide {
                    Self::widen(Self::narrow(wide))
                }
            }

            impl Format for $name {
                type Word = $word;
                type Wide = $wide;
                const LANES: usize = $lanes;

                #[inline(always)]
                fn widen(word: $word) -> $wide {
                    // SAFETY: called on the target only (see the module).
                    unsafe { $widen(word) }
                }

                #[inline(always)]
                fn narrow(wide: $wide) -> $word {
                    // SAFETY: called on the target only (see the module).
                    unsafe { $narrow::<_MM_FROUND_TO_NEAREST_INT>(wide) }
                }
            }

            impl Operation<$name> for Sum {
                #[inline(always)]
                fn combine(left: $wide, right: $wide) -> $wide {
                    // SAFETY: called on the target only (see the module).
                    $name::round(unsafe { $add(left, right) })
                }
            }

            impl Operation<$name> for Product {
                #[inline(always)]
                fn combine(left: $wide, right: $wide) -> $wide {
                    // SAFETY: called on the target only (see the module).
                    $name::round(unsafe { $mul(left, right) })
                }
            }

            impl Finish<$name> for Divide {
                #[inline(always)]
                fn finish(root: $wide, divisor: u32) -> $wide {
                    // SAFETY: called on the target only (see the module).
                    $name::round(unsafe { $div(root, $splat(divisor as f32)) })
                }
            }
        };
    }

    f16! {
        /// Eight f16, for AVX2 and F16C.
        F16Avx2, __m128i, __m256, 8,
        _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_set1_ps
    }
    f16! {
        /// Sixteen f16, for AVX-512.
        F16Avx512, __m256i, __m512, 4,
        _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_set1_ps
    }
}

/// A 16-bit float by its bits, for operations that only compare. `INFINITY` is the pattern of
/// +∞, above which magnitudes are NaN.
pub struct Bits<const INFINITY: u16>;

/// f16 by its bits.
pub type F16Bits = Bits<0x7c00>;
/// bf16 by its bits.
pub type Bf16Bits = Bits<0x7f80>;

impl<const INFINITY: u16> Bits<INFINITY> {
    /// Orders the patterns as their values: sign and magnitude become two's complement, with −0
    /// just below +0. Its own inverse.
    #[inline(always)]
    fn order(bits: u16) -> i16 {
        let bits = bits as i16;
        bits ^ ((bits >> 15) & 0x7fff)
    }

    /// `chosen`, or a NaN if one of the operands is. In this order −∞ is the complement of +∞, and
    /// NaNs are beyond both.
    #[inline(always)]
    fn unless_nan(left: i16, right: i16, chosen: i16) -> i16 {
        let infinity = INFINITY as i16;
        let nan = |key: i16| (key > infinity) | (key < !infinity);
        if nan(left) | nan(right) { i16::MAX } else { chosen }
    }
}

impl<const INFINITY: u16> Format for Bits<INFINITY> {
    type Word = u16;
    type Wide = i16;
    const LANES: usize = 128;

    #[inline(always)]
    fn widen(word: u16) -> i16 {
        Self::order(word)
    }

    #[inline(always)]
    fn narrow(wide: i16) -> u16 {
        Self::order(wide as u16) as u16
    }
}

impl<const INFINITY: u16> Operation<Bits<INFINITY>> for Min {
    #[inline(always)]
    fn combine(left: i16, right: i16) -> i16 {
        Bits::<INFINITY>::unless_nan(left, right, left.min(right))
    }
}

impl<const INFINITY: u16> Operation<Bits<INFINITY>> for Max {
    #[inline(always)]
    fn combine(left: i16, right: i16) -> i16 {
        Bits::<INFINITY>::unless_nan(left, right, left.max(right))
    }
}
