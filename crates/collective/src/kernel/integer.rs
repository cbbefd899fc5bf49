//! Integers: a word is a value, sums and products wrap.

use super::fused::{And, Divide, Finish, Format, Max, Min, Operation, Or, Product, Sum, Xor};

macro_rules! operation {
    ($t:ty, $op:ident, |$left:ident, $right:ident| $result:expr) => {
        impl Operation<$t> for $op {
            #[inline(always)]
            fn combine($left: $t, $right: $t) -> $t {
                $result
            }
        }
    };
}

macro_rules! integer {
    ($($t:ty, $lanes:literal;)*) => {$(
        impl Format for $t {
            type Word = $t;
            type Wide = $t;
            const LANES: usize = $lanes;

            #[inline(always)]
            fn widen(word: $t) -> $t {
                word
            }

            #[inline(always)]
            fn narrow(wide: $t) -> $t {
                wide
            }
        }

        operation!($t, Sum, |left, right| left.wrapping_add(right));
        operation!($t, Product, |left, right| left.wrapping_mul(right));
        operation!($t, Min, |left, right| left.min(right));
        operation!($t, Max, |left, right| left.max(right));
    )*};
}
integer! {
    i8, 256;
    u8, 256;
    i32, 64;
    i64, 64;
}

operation!(u8, And, |left, right| left & right);
operation!(u8, Or, |left, right| left | right);
operation!(u8, Xor, |left, right| left ^ right);

/// Divides through floats, which vectorize; integer division does not. The float quotient
/// truncates to the right integer: a quotient that is an integer is exact, and any other is at
/// least `1 / divisor` away from the next integer, farther than rounding can move it.
macro_rules! divide_as {
    ($($t:ty => $float:ty),*) => {$(
        impl Finish<$t> for Divide {
            #[inline(always)]
            fn finish(root: $t, divisor: u32) -> $t {
                let quotient = root as $float / divisor as $float;
                // SAFETY: the divisor is at least one, so the quotient is between the root and
                // zero and its integer part is a value of the type.
                unsafe { quotient.to_int_unchecked() }
            }
        }
    )*};
}
// A divisor that f32 rounds is larger than any byte, and so is what it is rounded to.
divide_as!(i8 => f32, u8 => f32, i32 => f64);

impl Finish<i64> for Divide {
    #[inline(always)]
    fn finish(root: i64, divisor: u32) -> i64 {
        root / i64::from(divisor)
    }
}
