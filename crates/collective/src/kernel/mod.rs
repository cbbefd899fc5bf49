//! Reduction kernels: how the elements of several buffers become one.
//!
//! A [`fold`] reads every input once and writes the result once, whatever the number of inputs.
//! Three layers make that so:
//!
//! * A *format* (`float`, `half`, `integer`) says how a word of memory becomes values, and an
//!   *operation* combines two such values and rounds the result to the storage type.
//! * A *fused* loop (`fused`) evaluates the canonical tree over up to eight operands in
//!   registers. It is compiled once for every instruction set, chosen at run time.
//! * The *evaluator* (`evaluate`) covers any [`Tree`] with fused groups. A tree that is one group
//!   runs straight through; a larger one runs block by block, with the values of inner groups
//!   kept in the first-level cache.
//!
//! Every node of the tree is rounded to the storage type, so the bits of a result depend on the
//! tree alone: not on the grouping, the block size or the instruction set. Only *which* NaN a
//! NaN is remains unspecified.

mod copy;
mod evaluate;
mod float;
mod fused;
mod half;
mod integer;
#[cfg(test)]
mod tests;

pub use copy::copy;

use crate::dtype::{Dtype, Reduction};
use crate::tree::Tree;
use evaluate::{Kernel, Outputs, evaluate};
use fused::{And, Divide, Fused, Keep, Max, Min, Or, Product, Sum, Target, Xor, eight, four};
use half::{Bf16, Bf16Bits, F16, F16Avx2, F16Avx512, F16Bits};
use std::ptr;

/// Combines `inputs` element by element in the order of `tree` and writes the result to `into`
/// and, if given, also to `also`.
///
/// `divide` divides the root once, for a mean: floats in f32 (f64 for f64) before the last
/// rounding to the storage type, integers toward zero. [`Reduction::Mean`] without it is a sum.
///
/// # Panics
/// If the number of inputs is not the tree's, the reduction is not defined for the type,
/// `divide` is zero or given with anything but a sum or a mean, or the tree is so irregular that
/// it keeps more than 64 inner values alive at once (impossible below 128 inputs, and for
/// canonical trees of any size).
///
/// # Safety
/// Every pointer is valid for `count` elements and aligned for the type. `into` and `also` may
/// each be exactly equal to any input or to each other, but overlap nothing partially. No other thread
/// writes the inputs or touches the outputs meanwhile.
#[expect(clippy::too_many_arguments, reason = "one flat call on the hot path")]
pub unsafe fn fold(
    dtype: Dtype,
    reduction: Reduction,
    tree: &Tree,
    inputs: &[*const u8],
    into: *mut u8,
    also: Option<*mut u8>,
    count: usize,
    divide: Option<u32>,
) {
    assert_eq!(inputs.len(), tree.inputs(), "the tree is over another number of inputs");
    assert!(reduction.supports(dtype), "{reduction} is not defined for {dtype}");
    let sums = matches!(reduction, Reduction::Sum | Reduction::Mean);
    assert!(divide != Some(0) && (sums || divide.is_none()), "{reduction} divided by {divide:?}");
    let kernel = select(Target::best(), dtype, reduction, divide);
    let out = Outputs { into, also: also.unwrap_or(ptr::null_mut()) };
    // SAFETY: the caller's promise; `count` elements are this many bytes, and the CPU has its
    // best target.
    unsafe { evaluate(&kernel, tree, inputs, out, count * dtype.size()) };
}

/// The loops for a fold on `target`.
fn select(target: Target, dtype: Dtype, reduction: Reduction, divide: Option<u32>) -> Kernel {
    let body = match reduction {
        Reduction::Sum | Reduction::Mean => sum(target, dtype),
        Reduction::Product => product(target, dtype),
        Reduction::Min => min(target, dtype),
        Reduction::Max => max(target, dtype),
        Reduction::And => bitwise::<And>(target, dtype),
        Reduction::Or => bitwise::<Or>(target, dtype),
        Reduction::Xor => bitwise::<Xor>(target, dtype),
    };
    // Dividing by one changes no value.
    match divide.filter(|&n| n > 1) {
        Some(n) => Kernel { body, root: mean(target, dtype), divisor: Some(n) },
        None => Kernel { body, root: body, divisor: None },
    }
}

fn sum(target: Target, dtype: Dtype) -> &'static [Fused] {
    match dtype {
        Dtype::F32 => eight::<f32, f32, f32, Sum, Keep>(target),
        Dtype::F64 => eight::<f64, f64, f64, Sum, Keep>(target),
        Dtype::F16 => eight::<F16, F16Avx2, F16Avx512, Sum, Keep>(target),
        Dtype::Bf16 => eight::<Bf16, Bf16, Bf16, Sum, Keep>(target),
        // Wrapping sums and products do not depend on the sign.
        Dtype::I8 | Dtype::U8 => eight::<u8, u8, u8, Sum, Keep>(target),
        Dtype::I32 => eight::<i32, i32, i32, Sum, Keep>(target),
        Dtype::I64 => eight::<i64, i64, i64, Sum, Keep>(target),
    }
}

fn mean(target: Target, dtype: Dtype) -> &'static [Fused] {
    match dtype {
        Dtype::F32 => eight::<f32, f32, f32, Sum, Divide>(target),
        Dtype::F64 => eight::<f64, f64, f64, Sum, Divide>(target),
        Dtype::F16 => eight::<F16, F16Avx2, F16Avx512, Sum, Divide>(target),
        Dtype::Bf16 => eight::<Bf16, Bf16, Bf16, Sum, Divide>(target),
        Dtype::I8 => eight::<i8, i8, i8, Sum, Divide>(target),
        Dtype::U8 => eight::<u8, u8, u8, Sum, Divide>(target),
        Dtype::I32 => eight::<i32, i32, i32, Sum, Divide>(target),
        Dtype::I64 => eight::<i64, i64, i64, Sum, Divide>(target),
    }
}

fn product(target: Target, dtype: Dtype) -> &'static [Fused] {
    match dtype {
        Dtype::F32 => four::<f32, f32, f32, Product>(target),
        Dtype::F64 => four::<f64, f64, f64, Product>(target),
        Dtype::F16 => four::<F16, F16Avx2, F16Avx512, Product>(target),
        Dtype::Bf16 => four::<Bf16, Bf16, Bf16, Product>(target),
        Dtype::I8 | Dtype::U8 => four::<u8, u8, u8, Product>(target),
        Dtype::I32 => four::<i32, i32, i32, Product>(target),
        Dtype::I64 => four::<i64, i64, i64, Product>(target),
    }
}

fn min(target: Target, dtype: Dtype) -> &'static [Fused] {
    match dtype {
        Dtype::F32 => four::<f32, f32, f32, Min>(target),
        Dtype::F64 => four::<f64, f64, f64, Min>(target),
        Dtype::F16 => four::<F16Bits, F16Bits, F16Bits, Min>(target),
        Dtype::Bf16 => four::<Bf16Bits, Bf16Bits, Bf16Bits, Min>(target),
        Dtype::I8 => four::<i8, i8, i8, Min>(target),
        Dtype::U8 => four::<u8, u8, u8, Min>(target),
        Dtype::I32 => four::<i32, i32, i32, Min>(target),
        Dtype::I64 => four::<i64, i64, i64, Min>(target),
    }
}

fn max(target: Target, dtype: Dtype) -> &'static [Fused] {
    match dtype {
        Dtype::F32 => four::<f32, f32, f32, Max>(target),
        Dtype::F64 => four::<f64, f64, f64, Max>(target),
        Dtype::F16 => four::<F16Bits, F16Bits, F16Bits, Max>(target),
        Dtype::Bf16 => four::<Bf16Bits, Bf16Bits, Bf16Bits, Max>(target),
        Dtype::I8 => four::<i8, i8, i8, Max>(target),
        Dtype::U8 => four::<u8, u8, u8, Max>(target),
        Dtype::I32 => four::<i32, i32, i32, Max>(target),
        Dtype::I64 => four::<i64, i64, i64, Max>(target),
    }
}

/// Bits have no type: one loop over bytes serves every integer.
fn bitwise<O: fused::Operation<u8>>(target: Target, dtype: Dtype) -> &'static [Fused] {
    debug_assert!(!dtype.is_float(), "bitwise reductions are for integers");
    four::<u8, u8, u8, O>(target)
}
