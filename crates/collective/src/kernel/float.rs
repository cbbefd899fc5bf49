//! f32 and f64: a word is a value.

use super::fused::{Divide, Finish, Format, Max, Min, Operation, Product, Sum};

macro_rules! float {
    ($($t:ty),*) => {$(
        impl Format for $t {
            type Word = $t;
            type Wide = $t;
            const LANES: usize = 64;

            #[inline(always)]
            fn widen(word: $t) -> $t {
                word
            }

            #[inline(always)]
            fn narrow(wide: $t) -> $t {
                wide
            }
        }

        impl Operation<$t> for Sum {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                left + right
            }
        }

        impl Operation<$t> for Product {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                left * right
            }
        }

        impl Operation<$t> for Min {
            /// Neither smaller means equal or NaN. The bitwise or of two equal numbers is that
            /// number, of two zeros −0 if either is, and of a NaN with anything a NaN.
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                let neither = <$t>::from_bits(left.to_bits() | right.to_bits());
                if left < right {
                    left
                } else if right < left {
                    right
                } else {
                    neither
                }
            }
        }

        impl Operation<$t> for Max {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                -<Min as Operation<$t>>::combine(-left, -right)
            }
        }

        impl Finish<$t> for Divide {
            #[inline(always)]
            fn finish(root: $t, divisor: u32) -> $t {
                root / divisor as $t
            }
        }
    )*};
}
float!(f32, f64);
