//! The fused loops: the canonical tree over a few operands, in registers.
//!
//! A loop is generic in the [`Format`] of its operands, the [`Operation`], what happens
//! [`Finish`] at the root, and the number of operands. It works on chunks of [`Format::LANES`]
//! words: the compiler turns the loop over a chunk into vector code because its results go to a
//! local array that no pointer can alias, and then keeps that array in registers. Outputs are
//! stored only after a chunk has been read from every operand, which is what makes it right for
//! an output to be one of the operands.
//!
//! The loop body is inlined into one entry function per [`Target`], and [`eight`] and [`four`]
//! list the entries by number of operands.

use std::array;
use std::mem::MaybeUninit;

/// Evaluates the canonical tree over the pointers in `operands` and writes the root to `into`
/// and, unless null, to `also`. The number of operands is fixed by the function.
///
/// # Safety
/// Every pointer is valid for `bytes` bytes, a multiple of [`STRIDE`]; outputs are exactly equal
/// to an operand or to each other, or disjoint; the target's instructions exist on this CPU.
pub type Fused =
    unsafe fn(operands: *const *const u8, into: *mut u8, also: *mut u8, bytes: usize, divisor: u32);

/// Every fused loop handles multiples of this many bytes: the largest chunk of any format.
pub const STRIDE: usize = 512;

/// The largest number of operands of any fused loop.
pub const MAX_OPERANDS: usize = 8;

/// How far ahead operands are fetched into the second-level cache, in bytes. The prefetchers of
/// the CPU stop at the end of a page: looking a page ahead keeps memory busy across it, for up to a
/// third more from main memory. Much less comes too late, much more is evicted before it is used.
/// The reads past the end are of what the caller is likely to fold next, and cannot fault.
pub const AHEAD: usize = 4096;

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// How a word of memory becomes values that can be combined.
pub trait Format {
    /// What is loaded and stored as one.
    type Word: Copy;
    /// One or several values, wide enough to combine, each exactly representable in a word.
    type Wide: Copy;
    /// Words of a chunk. With fewer than 64 words of a plain number the compiler unrolls the
    /// loop before it vectorizes and the result is poor; with more than needed for that, values
    /// spill to the stack. A chunk must divide [`STRIDE`].
    const LANES: usize;

    /// The values in a word.
    fn widen(word: Self::Word) -> Self::Wide;
    /// The word that holds these values.
    fn narrow(wide: Self::Wide) -> Self::Word;
}

/// Combines two values and rounds the result to the format.
pub trait Operation<F: Format> {
    /// `left ⊕ right`.
    fn combine(left: F::Wide, right: F::Wide) -> F::Wide;
}

/// What is done to the value of the root.
pub trait Finish<F: Format> {
    /// The finished value, rounded to the format.
    fn finish(root: F::Wide, divisor: u32) -> F::Wide;
}

/// Addition; wraps for integers.
pub struct Sum;
/// Multiplication; wraps for integers.
pub struct Product;
/// The smaller of two; NaN if either is, and −0 < +0.
pub struct Min;
/// The larger of two; NaN if either is, and −0 < +0.
pub struct Max;
/// Bitwise and.
pub struct And;
/// Bitwise or.
pub struct Or;
/// Bitwise exclusive or.
pub struct Xor;

/// Leaves the root as it is.
pub struct Keep;
/// Divides the root by the divisor.
pub struct Divide;

impl<F: Format> Finish<F> for Keep {
    #[inline(always)]
    fn finish(root: F::Wide, _divisor: u32) -> F::Wide {
        root
    }
}

/// An instruction set that the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// What every CPU of the architecture has.
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Target {
    /// The fastest one on this CPU.
    pub fn best() -> Target {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            return if avx512 { Target::Avx512 } else { Target::Avx2 };
        }
        Target::Baseline
    }
}

/// The loops for one to eight operands, in this order, given the format on each target.
pub fn eight<B, V, W, O, E>(target: Target) -> &'static [Fused]
where
    B: Format,
    V: Format,
    W: Format,
    O: Operation<B> + Operation<V> + Operation<W>,
    E: Finish<B> + Finish<V> + Finish<W>,
{
    match target {
        Target::Baseline => const { &entries!(baseline::<B, O, E>, 1 2 3 4 5 6 7 8) },
        #[cfg(target_arch = "x86_64")]
        Target::Avx2 => const { &entries!(avx2::<V, O, E>, 1 2 3 4 5 6 7 8) },
        #[cfg(target_arch = "x86_64")]
        Target::Avx512 => const { &entries!(avx512::<W, O, E>, 1 2 3 4 5 6 7 8) },
    }
}

/// The loops for one to four operands. Reductions other than sums are rare: larger groups would
/// buy them a few percent and cost twice the code.
pub fn four<B, V, W, O>(target: Target) -> &'static [Fused]
where
    B: Format,
    V: Format,
    W: Format,
    O: Operation<B> + Operation<V> + Operation<W>,
{
    match target {
        Target::Baseline => const { &entries!(baseline::<B, O, Keep>, 1 2 3 4) },
        #[cfg(target_arch = "x86_64")]
        Target::Avx2 => const { &entries!(avx2::<V, O, Keep>, 1 2 3 4) },
        #[cfg(target_arch = "x86_64")]
        Target::Avx512 => const { &entries!(avx512::<W, O, Keep>, 1 2 3 4) },
    }
}

macro_rules! entries {
    ($target:ident::<$f:ty, $o:ty, $e:ty>, $($n:literal)*) => {
        [$($target::<$f, $o, $e, $n> as Fused),*]
    };
}
use entries;

macro_rules! target {
    ($(#[$features:meta])* $name:ident) => {
        /// The loop compiled for this target.
        ///
        /// # Safety
        /// See [`Fused`].
        $(#[$features])*
        unsafe fn $name<F: Format, O: Operation<F>, E: Finish<F>, const N: usize>(
            operands: *const *const u8,
            into: *mut u8,
            also: *mut u8,
            bytes: usize,
            divisor: u32,
        ) {
            // SAFETY: the caller's promise is the one that the loop asks for.
            unsafe { run::<F, O, E, N>(operands, into, also, bytes, divisor) }
        }
    };
}
target!(baseline);
#[cfg(target_arch = "x86_64")]
target!(
    #[target_feature(enable = "avx2,f16c")]
    avx2
);
#[cfg(target_arch = "x86_64")]
target!(
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
    avx512
);

/// The loop itself.
///
/// # Safety
/// See [`Fused`].
#[inline(always)]
unsafe fn run<F: Format, O: Operation<F>, E: Finish<F>, const N: usize>(
    operands: *const *const u8,
    into: *mut u8,
    also: *mut u8,
    bytes: usize,
    divisor: u32,
) {
    const { assert!(STRIDE.is_multiple_of(F::LANES * size_of::<F::Word>())) };
    let chunk = F::LANES * size_of::<F::Word>();
    // SAFETY: the caller passes as many operands as the function is for.
    let operands: [*const u8; N] = unsafe { operands.cast::<[*const u8; N]>().read() };
    let mut at = 0;
    while at < bytes {
        for operand in operands {
            for line in (0..chunk).step_by(LINE) {
                prefetch(operand.wrapping_add(at + AHEAD + line));
            }
        }
        // `STRIDE` bytes hold any chunk; an array of `F::LANES` words cannot be named.
        let mut out = MaybeUninit::<[u8; STRIDE]>::uninit();
        let words = out.as_mut_ptr().cast::<F::Word>();
        for lane in 0..F::LANES {
            // SAFETY: `at + chunk <= bytes`, so the lane lies within every operand and, as a
            // chunk fits `STRIDE` bytes, within `out`. Nothing here needs to be aligned.
            unsafe {
                let values = array::from_fn(|n| {
                    F::widen(operands[n].add(at).cast::<F::Word>().add(lane).read_unaligned())
                });
                let root = E::finish(canonical::<F, O, N>(values), divisor);
                words.add(lane).write_unaligned(F::narrow(root));
            }
        }
        // SAFETY: the outputs are valid for `at + chunk <= bytes` bytes, and the loop above has
        // written the chunk.
        unsafe {
            into.add(at).copy_from_nonoverlapping(words.cast(), chunk);
            if !also.is_null() {
                also.add(at).copy_from_nonoverlapping(words.cast(), chunk);
            }
        }
        at += chunk;
    }
}

/// Asks for the cache line of an address that need not be valid.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which faults on no address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The canonical tree over `N` values, written out so that nothing of it is left at run time.
#[inline(always)]
fn canonical<F: Format, O: Operation<F>, const N: usize>(v: [F::Wide; N]) -> F::Wide {
    let pair = |i: usize| O::combine(v[i], v[i + 1]);
    let four = |i: usize| O::combine(pair(i), pair(i + 2));
    match N {
        1 => v[0],
        2 => pair(0),
        3 => O::combine(pair(0), v[2]),
        4 => four(0),
        5 => O::combine(four(0), v[4]),
        6 => O::combine(four(0), pair(4)),
        7 => O::combine(four(0), O::combine(pair(4), v[6])),
        8 => O::combine(four(0), four(4)),
        _ => unreachable!("no table lists such a loop"),
    }
}
