//! Every fold against a reference that evaluates the tree one node and one element at a time.

use super::evaluate::{Outputs, evaluate};
use super::fused::{Format, Target};
use super::half::F16;
use super::{copy, select};
use crate::dtype::{Dtype, Reduction};
use crate::tree::{Node, Tree};
use half::{bf16, f16};
use std::ptr;

const REDUCTIONS: [Reduction; 7] = [
    Reduction::Sum,
    Reduction::Product,
    Reduction::Min,
    Reduction::Max,
    Reduction::And,
    Reduction::Or,
    Reduction::Xor,
];

/// The element types as the reference sees them: one value, its bytes and its arithmetic.
trait Scalar: Copy + PartialEq + std::fmt::Debug {
    const DTYPE: Dtype;
    fn from_bits(bits: u64) -> Self;
    /// The value's bits, with every NaN the same.
    fn bits(self) -> u64;
    fn combine(reduction: Reduction, left: Self, right: Self) -> Self;
    fn divide(self, n: u32) -> Self;
}

macro_rules! integers {
    ($($t:ty => $d:ident),*) => {$(
        impl Scalar for $t {
            const DTYPE: Dtype = Dtype::$d;
            fn from_bits(bits: u64) -> $t {
                bits as $t
            }
            fn bits(self) -> u64 {
                self as u64
            }
            fn combine(reduction: Reduction, left: $t, right: $t) -> $t {
                match reduction {
                    Reduction::Sum | Reduction::Mean => left.wrapping_add(right),
                    Reduction::Product => left.wrapping_mul(right),
                    Reduction::Min => left.min(right),
                    Reduction::Max => left.max(right),
                    Reduction::And => left & right,
                    Reduction::Or => left | right,
                    Reduction::Xor => left ^ right,
                }
            }
            fn divide(self, n: u32) -> $t {
                (i128::from(self) / i128::from(n)) as $t
            }
        }
    )*};
}
integers!(i8 => I8, u8 => U8, i32 => I32, i64 => I64);

/// `$wide` is the type to compute in.
macro_rules! floats {
    ($($t:ty => $d:ident, $bits:ty, $wide:ty, $widen:expr, $round:expr;)*) => {$(
        impl Scalar for $t {
            const DTYPE: Dtype = Dtype::$d;
            fn from_bits(bits: u64) -> $t {
                <$t>::from_bits(bits as $bits)
            }
            fn bits(self) -> u64 {
                if self.is_nan() { u64::MAX } else { u64::from(self.to_bits()) }
            }
            fn combine(reduction: Reduction, left: $t, right: $t) -> $t {
                let (l, r): ($wide, $wide) = ($widen(left), $widen(right));
                match reduction {
                    Reduction::Sum | Reduction::Mean => $round(l + r),
                    Reduction::Product => $round(l * r),
                    _ if l.is_nan() => left,
                    _ if r.is_nan() => right,
                    Reduction::Min if l.total_cmp(&r).is_le() => left,
                    Reduction::Min => right,
                    Reduction::Max if l.total_cmp(&r).is_ge() => left,
                    Reduction::Max => right,
                    _ => unreachable!("{reduction} of floats"),
                }
            }
            fn divide(self, n: u32) -> $t {
                let wide: $wide = $widen(self);
                $round(wide / n as $wide)
            }
        }
    )*};
}
floats! {
    f32 => F32, u32, f32, |x: f32| x, |x: f32| x;
    f64 => F64, u64, f64, |x: f64| x, |x: f64| x;
    f16 => F16, u16, f32, f16::to_f32, f16::from_f32;
    bf16 => Bf16, u16, f32, bf16::to_f32, bf16::from_f32;
}

/// Pseudo-random bits: splitmix64 of a position.
fn noise(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Element `i` of a buffer. A quarter of the positions has any bit pattern and those where the
/// rules are special, in all buffers; the rest has numbers around one in all buffers, because
/// among many arbitrary floats there is always a NaN that hides everything else.
fn element<T: Scalar>(buffer: usize, i: usize) -> T {
    let bits = noise((buffer as u64) << 32 | i as u64);
    let (one, infinity): (u64, u64) = match T::DTYPE {
        Dtype::F32 => (0x3f80_0000, 0x7f80_0000),
        Dtype::F64 => (0x3ff0_0000_0000_0000, 0x7ff0_0000_0000_0000),
        Dtype::F16 => (0x3c00, 0x7c00),
        Dtype::Bf16 => (0x3f80, 0x7f80),
        _ => return T::from_bits(bits),
    };
    let sign = (bits >> 63) << (8 * T::DTYPE.size() - 1);
    let special = [0, 1, infinity, infinity - 1, infinity | 1, infinity | (infinity >> 1), one];
    T::from_bits(match (noise(i as u64) % 4, bits % 4) {
        (0, 0) => sign | special[(bits >> 8) as usize % special.len()],
        (0, _) => bits >> 4,
        // From a quarter to four, so that sums round and cancel.
        _ => {
            let unit = infinity & infinity.wrapping_neg();
            sign | (one - 2 * unit + (bits >> 8) % (4 * unit))
        }
    })
}

fn reference<T: Scalar>(
    reduction: Reduction,
    tree: &Tree,
    values: impl Fn(usize) -> T,
    divide: Option<u32>,
) -> T {
    let mut stack = Vec::new();
    for node in tree.nodes() {
        match node {
            Node::Input(i) => stack.push(values(usize::from(*i))),
            Node::Combine => {
                let right = stack.pop().expect("a right operand");
                let left = stack.pop().expect("a left operand");
                stack.push(T::combine(reduction, left, right));
            }
        }
    }
    let [root] = stack[..] else { panic!("a tree leaves one value") };
    divide.map_or(root, |n| root.divide(n))
}

/// Every instruction set that this CPU has.
fn targets() -> Vec<Target> {
    #[cfg(target_arch = "x86_64")]
    let all = [Target::Baseline, Target::Avx2, Target::Avx512];
    #[cfg(not(target_arch = "x86_64"))]
    let all = [Target::Baseline];
    let best = all.iter().position(|&t| t == Target::best()).expect("the best is one of all");
    all[..=best].to_vec()
}

/// Where a result goes: a buffer of its own, or one of the inputs.
#[derive(Clone, Copy, Debug)]
enum Destination {
    Fresh,
    Input(usize),
}

#[derive(Clone, Debug)]
struct Case<'a> {
    reduction: Reduction,
    tree: &'a Tree,
    count: usize,
    divide: Option<u32>,
    into: Destination,
    also: Option<Destination>,
}

/// Folds on every target and compares the outputs, the inputs that must not change, and the
/// elements around the outputs with what they should be.
fn check<T: Scalar>(case: &Case) {
    const MARGIN: usize = 3;
    let Case { reduction, tree, count, divide, into, also } = *case;
    let n = tree.inputs();
    let value = element::<T>;
    let expected: Vec<u64> = (0..count)
        .map(|i| reference(reduction, tree, |b| value(b, MARGIN + i), divide).bits())
        .collect();
    for target in targets() {
        // Inputs, then a buffer each for `into` and `also`, at offsets aligned for the type only.
        let mut buffers: Vec<Vec<T>> =
            (0..n + 2).map(|b| (0..count + 2 * MARGIN).map(|i| value(b, i)).collect()).collect();
        let starts: Vec<*mut u8> = buffers
            .iter_mut()
            // SAFETY: the margin is within the buffer.
            .map(|b| unsafe { b.as_mut_ptr().add(MARGIN) }.cast())
            .collect();
        let inputs: Vec<*const u8> = starts[..n].iter().map(|p| p.cast_const()).collect();
        let index = |place, fresh| if let Destination::Input(i) = place { i } else { fresh };
        let into = index(into, n);
        let also = also.map(|place| index(place, n + 1));
        let kernel = select(target, T::DTYPE, reduction, divide);
        // SAFETY: every buffer has `count` elements after its margin, outputs are buffers of
        // their own or exactly inputs, and the CPU has the target.
        unsafe {
            let also = also.map_or(ptr::null_mut(), |b| starts[b]);
            let out = Outputs { into: starts[into], also };
            evaluate(&kernel, tree, &inputs, out, count * T::DTYPE.size());
        }
        for (b, buffer) in buffers.iter().enumerate() {
            for (i, found) in buffer.iter().enumerate() {
                let inside = (MARGIN..MARGIN + count).contains(&i);
                let output = inside && (b == into || Some(b) == also);
                let wanted = if output { expected[i - MARGIN] } else { value(b, i).bits() };
                assert_eq!(
                    found.bits(),
                    wanted,
                    "buffer {b}, element {i} on {target:?} of {:?} in {case:?}",
                    T::DTYPE
                );
            }
        }
    }
}

fn check_reductions<T: Scalar>(case: &Case) {
    for reduction in REDUCTIONS.into_iter().filter(|r| r.supports(T::DTYPE)) {
        check::<T>(&Case { reduction, ..case.clone() });
    }
    for divide in [1, 3, case.tree.inputs() as u32, 100_000, u32::MAX] {
        let divide = Some(divide);
        check::<T>(&Case { reduction: Reduction::Mean, divide, ..case.clone() });
    }
}

macro_rules! for_all_types {
    ($check:ident($($argument:expr),*)) => {{
        $check::<f32>($($argument),*);
        $check::<f64>($($argument),*);
        $check::<f16>($($argument),*);
        $check::<bf16>($($argument),*);
        $check::<i8>($($argument),*);
        $check::<u8>($($argument),*);
        $check::<i32>($($argument),*);
        $check::<i64>($($argument),*);
    }};
}

fn fresh(tree: &Tree, count: usize) -> Case<'_> {
    Case {
        reduction: Reduction::Sum,
        tree,
        count,
        divide: None,
        into: Destination::Fresh,
        also: Some(Destination::Fresh),
    }
}

#[test]
fn any_number_of_inputs() {
    for inputs in (1..=17).chain([33, 64]) {
        let tree = Tree::canonical(inputs);
        for count in [0, 1, 5, 64, 1000] {
            for_all_types!(check_reductions(&fresh(&tree, count)));
        }
    }
    let tree = Tree::canonical(1024);
    for_all_types!(check(&fresh(&tree, 1500)));
}

#[test]
fn any_count() {
    for inputs in [1, 2, 3, 8, 9] {
        let tree = Tree::canonical(inputs);
        for count in 0..=70 {
            for_all_types!(check_reductions(&fresh(&tree, count)));
        }
    }
    // Around the strides and blocks of one- to eight-byte elements.
    for inputs in [2, 5, 18] {
        let tree = Tree::canonical(inputs);
        for count in [127, 128, 129, 511, 512, 513, 1025, 2047, 4096, 4097, 8200] {
            for_all_types!(check(&fresh(&tree, count)));
        }
    }
}

#[test]
fn an_output_may_be_any_input() {
    for inputs in [1, 2, 3, 4, 7, 8, 9, 16, 17] {
        let tree = Tree::canonical(inputs);
        for input in 0..inputs {
            let place = Destination::Input(input);
            let other = Destination::Input((input + 1) % inputs);
            for (into, also) in [
                (place, None),
                (place, Some(Destination::Fresh)),
                (Destination::Fresh, Some(place)),
                (place, Some(other)),
                (place, Some(place)),
            ] {
                for count in [7, 1100] {
                    for_all_types!(check(&Case { into, also, ..fresh(&tree, count) }));
                }
            }
        }
    }
}

#[test]
fn copies_exactly_the_bytes() {
    let source: Vec<u8> = (0..10_000).map(|i| noise(i) as u8).collect();
    for bytes in (0..200).chain([1023, 2048, 2049, 9000]) {
        for (from, into) in [(0, 0), (1, 0), (0, 1), (63, 17)] {
            let mut found = vec![0xa5; source.len()];
            // SAFETY: the bytes are within both buffers.
            unsafe { copy(source.as_ptr().add(from), found.as_mut_ptr().add(into), bytes) };
            let mut expected = vec![0xa5; source.len()];
            expected[into..into + bytes].copy_from_slice(&source[from..from + bytes]);
            assert!(found == expected, "{bytes} bytes from {from} into {into}");
        }
    }
}

#[test]
fn trees_of_subtrees_in_any_order() {
    let trees = [
        // A pair in the wrong order.
        Tree::over(0..2, &[1..2, 0..1]),
        // Right-leaning: what remains when the left parts are done already.
        Tree::over(0..32, &[0..16, 16..24, 24..28, 28..30, 30..31, 31..32]),
        // Left-leaning, with a hole in the middle of the order.
        Tree::over(0..13, &[8..12, 4..8, 12..13, 0..1, 1..2, 2..4]),
        // Groups that cannot join because the left one is not full.
        Tree::over(0..16, &[8..9, 9..10, 10..12, 12..16, 0..2, 2..4, 4..6, 6..7, 7..8]),
    ];
    for tree in trees {
        let tree = tree.expect("the covers are subtrees");
        for_all_types!(check_reductions(&fresh(&tree, 700)));
        let aliased = Case {
            into: Destination::Input(1),
            also: Some(Destination::Input(0)),
            ..fresh(&tree, 700)
        };
        for_all_types!(check_reductions(&aliased));
    }
}

#[test]
fn f16_without_instructions_converts_every_value() {
    for bits in 0..=u16::MAX {
        let value = f16::from_bits(bits);
        let wide = F16::widen(bits);
        assert_eq!(wide.is_nan(), value.is_nan(), "{bits:#06x}");
        if !value.is_nan() {
            assert_eq!(wide.to_bits(), value.to_f32().to_bits(), "{bits:#06x}");
            assert_eq!(F16::narrow(wide), bits, "{bits:#06x}");
        }
    }
    // Every f32 near a f16 or near the middle between two, and many that are neither.
    for high in 0..=u16::MAX {
        for low in (0..=u16::MAX).step_by(0x1000).flat_map(|l| [l.wrapping_sub(1), l, l | 1]) {
            let value = f32::from_bits(u32::from(high) << 16 | u32::from(low));
            let expected = f16::from_f32(value);
            let found = f16::from_bits(F16::narrow(value));
            assert_eq!(Scalar::bits(found), Scalar::bits(expected), "{value:e}");
        }
    }
}

/// Folds `x ⊕ y` for all 16-bit patterns `x` and a few `y`, so that each target converts and
/// rounds every pattern.
fn check_patterns<T: Scalar>() {
    let patterns: Vec<T> = (0..=u64::from(u16::MAX)).map(T::from_bits).collect();
    for seed in 0..40 {
        let other: T = element(1, seed);
        let others = vec![other; patterns.len()];
        for reduction in [Reduction::Sum, Reduction::Product, Reduction::Min, Reduction::Max] {
            for target in targets() {
                let mut found = vec![T::from_bits(0); patterns.len()];
                let inputs = [patterns.as_ptr().cast(), others.as_ptr().cast()];
                let kernel = select(target, T::DTYPE, reduction, None);
                let into = found.as_mut_ptr().cast();
                let out = Outputs { into, also: ptr::null_mut() };
                // SAFETY: three buffers of as many elements, and the CPU has the target.
                unsafe { evaluate(&kernel, &Tree::pair(), &inputs, out, 2 << 16) };
                for (x, found) in patterns.iter().zip(found) {
                    let expected = T::combine(reduction, *x, other);
                    assert_eq!(
                        found.bits(),
                        expected.bits(),
                        "{reduction} of {x:?}, {other:?} on {target:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn all_patterns_of_16_bits() {
    check_patterns::<f16>();
    check_patterns::<bf16>();
}

#[test]
#[should_panic(expected = "is not defined for")]
fn floats_have_no_bitwise_reductions() {
    let mut x = 0f32;
    let x = (&raw mut x).cast::<u8>();
    let inputs = [x.cast_const(); 2];
    // SAFETY: one element each, all the same.
    unsafe {
        super::fold(Dtype::F32, Reduction::Xor, &Tree::pair(), &inputs, x, None, 1, None);
    }
}

#[test]
fn fold_picks_a_target_and_divides() {
    let (a, b) = ([1f32, 2.0, -3.0], [4f32, 5.0, 6.0]);
    let mut mean = [0f32; 3];
    let mut also = [0f32; 3];
    let inputs = [a.as_ptr().cast(), b.as_ptr().cast()];
    let (into, other) = (mean.as_mut_ptr().cast(), also.as_mut_ptr().cast());
    // SAFETY: four buffers of three elements.
    unsafe {
        let (dtype, reduction) = (Dtype::F32, Reduction::Mean);
        super::fold(dtype, reduction, &Tree::pair(), &inputs, into, Some(other), 3, Some(2));
    }
    assert_eq!(mean, [2.5, 3.5, 1.5]);
    assert_eq!(also, mean);
}
