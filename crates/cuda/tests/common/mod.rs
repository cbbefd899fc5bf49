//! Folds of every kind, for any machine that runs the kernels, against the host's.
//!
//! A case lays out its buffers in one arena, so that the machine gets all of memory and gives it back:
//! whatever it wrote beside the output is found.

use std::fmt::Debug;

use unisono_collective::tree::Tree;
use unisono_collective::{Dtype, Reduction, kernel};

/// Runs a fold on a copy of the arena.
pub trait Machine {
    /// Folds the inputs, which begin at these bytes of the arena, into the outputs.
    fn fold(&mut self, case: &Case, arena: &mut Arena, inputs: &[usize], outputs: Outputs);
}

/// At which bytes of the arena results go.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    pub into: usize,
    pub also: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub dtype: Dtype,
    pub reduction: Reduction,
    pub divisor: Option<u32>,
    pub inputs: usize,
    pub count: usize,
    pub layout: Layout,
    /// The input that is the output as well; then there is a second output.
    pub in_place: Option<usize>,
}

/// Where buffers begin, relative to multiples of 16.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    Aligned,
    /// All one element further.
    Shifted,
    /// Each elsewhere.
    Mixed,
}

/// Memory that begins at a multiple of 16.
#[derive(Clone)]
pub struct Arena(Vec<u128>);

impl Arena {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: plain bytes, as many as the vector has.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), size_of_val(&*self.0)) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = size_of_val(&*self.0);
        // SAFETY: plain bytes, as many as the vector has.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), bytes) }
    }
}

/// Every reduction of a type, with the divisors of its means.
pub fn reductions(dtype: Dtype, inputs: usize) -> Vec<(Reduction, Option<u32>)> {
    let defined = Reduction::ALL.into_iter().filter(|reduction| reduction.supports(dtype));
    let mut all: Vec<_> = defined.map(|reduction| (reduction, None)).collect();
    let divisors = [1, 2, 3, inputs as u32, 100_000, u32::MAX];
    all.extend(divisors.map(|divisor| (Reduction::Mean, Some(divisor))));
    all
}

/// Every reduction of a type in every layout, over inputs and counts that are even and odd.
pub fn check_type(
    machine: &mut impl Machine,
    dtype: Dtype,
    inputs: impl IntoIterator<Item = usize>,
    counts: &[usize],
) {
    for inputs in inputs {
        for (reduction, divisor) in reductions(dtype, inputs) {
            for &count in counts {
                for layout in [Layout::Aligned, Layout::Shifted, Layout::Mixed] {
                    let case =
                        Case { dtype, reduction, divisor, inputs, count, layout, in_place: None };
                    check(machine, &case);
                    let last = Some(inputs - 1);
                    check(machine, &Case { in_place: last, ..case });
                }
            }
        }
    }
}

/// Sums and products of every pattern of a 16-bit float with many others.
pub fn check_patterns(machine: &mut impl Machine, dtype: Dtype) {
    let floats = [Reduction::Sum, Reduction::Product, Reduction::Min, Reduction::Max];
    for seed in 0..40 {
        let other = element(dtype, 1, seed) as u16;
        let mut arena = Arena(vec![0; 3 * (2 << 16) / 16]);
        for (pattern, bytes) in arena.bytes_mut()[..2 << 16].chunks_exact_mut(2).enumerate() {
            bytes.copy_from_slice(&(pattern as u16).to_le_bytes());
        }
        for bytes in arena.bytes_mut()[2 << 16..4 << 16].chunks_exact_mut(2) {
            bytes.copy_from_slice(&other.to_le_bytes());
        }
        for reduction in floats {
            let case = Case {
                dtype,
                reduction,
                divisor: None,
                inputs: 2,
                count: 1 << 16,
                layout: Layout::Aligned,
                in_place: None,
            };
            compare(machine, &case, &arena, &[0, 2 << 16], Outputs { into: 4 << 16, also: None });
        }
    }
}

/// Lays out a case, and compares what the machine makes of it with the host.
pub fn check(machine: &mut impl Machine, case: &Case) {
    let size = case.dtype.size();
    // A vector before and after each buffer that nobody may touch.
    let room = (case.count * size).next_multiple_of(16) + 48;
    let start = |buffer: usize| {
        let shift = match case.layout {
            Layout::Aligned => 0,
            Layout::Shifted => size,
            Layout::Mixed => (buffer * size) % 16,
        };
        buffer * room + 16 + shift
    };
    let mut arena = Arena(vec![0; (case.inputs + 1) * room / 16]);
    for buffer in 0..=case.inputs {
        let from = start(buffer) % size;
        let bytes = &mut arena.bytes_mut()[buffer * room + from..(buffer + 1) * room];
        for (i, place) in bytes.chunks_exact_mut(size).enumerate() {
            place.copy_from_slice(&element(case.dtype, buffer, i).to_le_bytes()[..size]);
        }
    }
    let inputs: Vec<usize> = (0..case.inputs).map(start).collect();
    let last = start(case.inputs);
    let outputs = match case.in_place {
        Some(input) => Outputs { into: start(input), also: Some(last) },
        None => Outputs { into: last, also: None },
    };
    compare(machine, case, &arena, &inputs, outputs);
}

fn compare(
    machine: &mut impl Machine,
    case: &Case,
    arena: &Arena,
    inputs: &[usize],
    outputs: Outputs,
) {
    let mut expected = arena.clone();
    let base = expected.bytes_mut().as_mut_ptr();
    let tree = Tree::canonical(inputs.len());
    // SAFETY: all buffers are in the arena, aligned for the type, and apart or exactly equal.
    unsafe {
        let pointers: Vec<*const u8> = inputs.iter().map(|&at| base.add(at).cast_const()).collect();
        let (into, also) = (base.add(outputs.into), outputs.also.map(|at| base.add(at)));
        let Case { dtype, reduction, divisor, count, .. } = *case;
        kernel::fold(dtype, reduction, &tree, &pointers, into, also, count, divisor);
    }
    let mut found = arena.clone();
    machine.fold(case, &mut found, inputs, outputs);

    let size = case.dtype.size();
    let mut untouched = 0;
    let mut places: Vec<usize> = [outputs.into].into_iter().chain(outputs.also).collect();
    places.sort_unstable();
    for place in places {
        let value = |arena: &Arena, i: usize| {
            let mut bytes = [0; 8];
            bytes[..size].copy_from_slice(&arena.bytes()[place + i * size..][..size]);
            u64::from_le_bytes(bytes)
        };
        for i in 0..case.count {
            let (found, expected) = (value(&found, i), value(&expected, i));
            assert!(
                same(case.dtype, found, expected),
                "element {i} is {found:#x}, not {expected:#x}, in {case:?}"
            );
        }
        assert_equal(&found.bytes()[untouched..place], &arena.bytes()[untouched..place], case);
        untouched = place + case.count * size;
    }
    assert_equal(&found.bytes()[untouched..], &arena.bytes()[untouched..], case);
}

fn assert_equal(found: &[u8], expected: &[u8], case: &impl Debug) {
    assert!(found == expected, "memory beside the outputs has changed in {case:?}");
}

/// The bits of +∞, above which magnitudes are NaN.
fn infinity(dtype: Dtype) -> Option<u64> {
    match dtype {
        Dtype::F32 => Some(0x7f80_0000),
        Dtype::F64 => Some(0x7ff0_0000_0000_0000),
        Dtype::F16 => Some(0x7c00),
        Dtype::Bf16 => Some(0x7f80),
        _ => None,
    }
}

/// Whether two elements are the same; which NaN a NaN is, is not specified.
pub fn same(dtype: Dtype, found: u64, expected: u64) -> bool {
    found == expected || is_nan(dtype, found) && is_nan(dtype, expected)
}

fn is_nan(dtype: Dtype, bits: u64) -> bool {
    let magnitude = bits & (u64::MAX >> (65 - 8 * dtype.size()));
    infinity(dtype).is_some_and(|infinity| magnitude > infinity)
}

/// The bits of element `i` of a buffer. A quarter of the places has any bit pattern, and those where the
/// rules are special: zeros, subnormals, infinities, the largest numbers, NaNs. The others have numbers
/// around one in all buffers, which round and cancel, because among many arbitrary floats there is always
/// a NaN that hides everything else.
pub fn element(dtype: Dtype, buffer: usize, i: usize) -> u64 {
    let bits = noise((buffer as u64) << 32 | i as u64);
    let mask = u64::MAX >> (64 - 8 * dtype.size());
    let Some(infinity) = infinity(dtype) else { return bits & mask };
    let unit = infinity & infinity.wrapping_neg();
    let one = (infinity / unit / 2) * unit;
    let sign = (bits >> 63) << (8 * dtype.size() - 1);
    let special =
        [0, 1, unit - 1, unit, infinity, infinity - 1, infinity | 1, infinity | (unit / 2), one];
    match (noise(i as u64) % 4, bits % 4) {
        (0, 0) => sign | special[(bits >> 8) as usize % special.len()],
        // Subnormals among themselves, whose sums are exact and whose means are not.
        (0, 1) => sign | ((bits >> 8) % unit),
        (0, _) => (bits >> 4) & mask,
        _ => sign | (one - 2 * unit + (bits >> 8) % (4 * unit)),
    }
}

/// Pseudo-random bits: splitmix64 of a position.
fn noise(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
