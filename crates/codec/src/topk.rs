//! The elements of largest magnitude.
//!
//! Of `n` elements the `k` largest by magnitude are sent, and the others stay in the residual until
//! they have grown large enough. The encoding is that of a few elements of many:
//!
//! ```text
//!  0       4                 4 + p
//!  ┌───────┬─────────────────┬──────────────────────────────┐
//!  │ count │ indices         │ values                       │
//!  │ u32   │ packed: p bytes │ count × f32, or what another │
//!  │       │                 │ codec makes of them          │
//!  └───────┴─────────────────┴──────────────────────────────┘
//! ```
//!
//! The bits of a float without its sign are its *magnitude*: as an integer, ordered like the
//! absolute values, with infinity above all numbers and NaN above infinity, so that these are sent
//! first.
//!
//! What is sent is everything above some magnitude, and the first few of exactly that magnitude: a
//! *cut*. The cut that takes exactly `k` is found digit by digit, in three passes that count how
//! many elements have which digit. Those can be spared: the cut of a sample is about that of the
//! whole, so that one pass leaves few *candidates* above it, and whatever is left to do is done
//! with these. Where they turn out to be far too few or too many, all elements are counted after
//! all.
//!
//! Zeros are never sent; they would change nothing.

use crate::randk::{Strata, assert_rate, share};
use crate::sparse::Sparse;
use crate::{BadEncoding, Codec, Gathered, Key, Memory, Passage, Spans, Task, elements};
use multiversion::multiversion;
use std::sync::Arc;

/// Sends the elements of largest magnitude, and remembers the others.
#[derive(Clone, Debug)]
pub struct TopK {
    rate: f64,
    selection: Selection,
    sparse: Sparse,
}

impl TopK {
    /// Sends a part `rate` of the elements, one at least. Their values travel as they are, or as
    /// another codec encodes them; then what that leaves out stays in the residual.
    ///
    /// # Panics
    ///
    /// If the rate is not above 0 and at most 1.
    pub fn new(rate: f64, selection: Selection, values: Option<Arc<dyn Spans>>) -> TopK {
        assert_rate(rate);
        TopK { rate, selection, sparse: Sparse::new("topk", values) }
    }
}

impl Codec for TopK {
    fn is_biased(&self) -> bool {
        true
    }

    fn suits(&self, shape: &[usize]) -> bool {
        has_indices(shape) && self.encoded_bytes(shape) < elements(shape) * 4
    }

    fn encoded_bytes(&self, shape: &[usize]) -> usize {
        let elements = elements(shape);
        self.sparse.encoded_bytes(elements, share(self.rate, elements))
    }

    fn passage(&self) -> Passage<'_> {
        Passage::Gathered(self)
    }
}

impl Gathered for TopK {
    fn encode(&self, task: &Task, shard: usize, memory: &mut Memory, into: &mut Vec<u8>) {
        let key = task.key(shard);
        let indices = self.selection.largest(&memory.residual, self.rate, key);
        self.sparse.encode(key, &indices, &mut memory.residual, into);
    }

    fn decode(&self, bytes: &[u8], into: &mut [f32]) -> Result<(), BadEncoding> {
        self.sparse.decode(bytes, into)
    }
}

/// How the largest elements are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Selection {
    /// Exactly as many as asked for; of equal ones the first.
    Exact,
    /// About as many as asked for, between 3/4 and 1.3 times as many: what is above the magnitude
    /// above which a sample of the elements has that part of its own. Faster.
    #[default]
    Sampled,
}

impl Selection {
    /// How a part `rate` of so many elements is selected.
    pub fn plan(self, rate: f64, elements: usize) -> Plan {
        let wanted = share(rate, elements);
        let (fewest, aim, most) = match self {
            // Even a sample that is off by a fifth leaves as many candidates as are wanted.
            Selection::Exact => (wanted, wanted + wanted / 4, wanted),
            Selection::Sampled => ((wanted * 3).div_ceil(4), wanted, wanted + wanted * 3 / 10),
        };
        let size = (elements as f64 * SAMPLED_ABOVE as f64 / aim as f64) as usize;
        let sample = (wanted > 0 && size <= elements / ELEMENTS_PER_SAMPLE).then_some(size);
        Plan { wanted, fewest, most, sample }
    }

    /// The ascending indices of a part `rate` of the elements, of those with the largest
    /// magnitudes. They are fewer only if all others are zero. The key only chooses the sample.
    pub(crate) fn largest(self, values: &[f32], rate: f64, key: Key) -> Vec<u32> {
        let Plan { wanted: k, fewest, most, sample } = self.plan(rate, values.len());
        if k == 0 {
            return Vec::new();
        }
        let Some(size) = sample else {
            return exactly(values, k);
        };
        let cut = sampled_cut(values, size, key);
        let limit = (MOST_CANDIDATES * k).min(values.len());
        let mut candidates = Vec::with_capacity(limit + LANES);
        collect(values, cut, limit, &mut candidates);
        match candidates.len() {
            count if count > limit => exactly(values, k),
            count if count > most => {
                let among: Vec<f32> = candidates.iter().map(|&i| values[i as usize]).collect();
                exactly(&among, k).into_iter().map(|i| candidates[i as usize]).collect()
            }
            count if count >= fewest || cut == Cut::ZEROS => candidates,
            _ => exactly(values, k),
        }
    }
}

/// How elements are selected: what implementations on other machines need to select the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Elements that should be taken.
    pub wanted: usize,
    /// With fewer than this above the cut of the sample, unless all others are zero, or with more than
    /// `most`, the cut that takes exactly as many as wanted is used instead.
    pub fewest: usize,
    /// See above.
    pub most: usize,
    /// Elements of the sample, one from each of as many [strata](crate::randk::Strata), of which the cut
    /// takes [`SAMPLED_ABOVE`]; without one, the cut is exact.
    pub sample: Option<usize>,
}

/// Whether a parameter's elements can be named by the indices of the encoding.
pub(crate) fn has_indices(shape: &[usize]) -> bool {
    elements(shape) as u64 <= 1 << 32
}

/// Elements of the sample that should be above the cut. How many elements of the whole are then
/// above it is right to about one part in the square root of this. More make the sample larger;
/// fewer make what is sent vary, and all elements be counted more often.
pub const SAMPLED_ABOVE: usize = 256;

/// Elements for each one in the sample, at the least. More leave samples to large parameters only;
/// with fewer, the sample costs as much as it saves.
const ELEMENTS_PER_SAMPLE: usize = 8;

/// Elements collected for each one sent, at the most. More is more memory; fewer discards more
/// samples.
const MOST_CANDIDATES: usize = 4;

/// Elements that are compared at once.
const LANES: usize = 16;

/// What is taken: elements above a magnitude, and the first few of exactly this magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    magnitude: u32,
    ties: usize,
}

impl Cut {
    /// Takes everything but zeros.
    const ZEROS: Cut = Cut { magnitude: 0, ties: 0 };

    /// Takes the `k` largest of these values; `k` is at least 1, and at most their number.
    fn new(values: &[f32], k: usize) -> Cut {
        debug_assert!((1..=values.len()).contains(&k));
        let (mut digits, mut rank) = (0, k);
        for (shift, width) in [(20, 11), (10, 10), (0, 10)] {
            let counts = count_digits(values, digits, shift, width);
            let mut digit = (1 << width) - 1;
            // The counts sum up to at least `rank`, so this ends at 0 or before.
            while counts[digit] < rank {
                rank -= counts[digit];
                digit -= 1;
            }
            digits = digits << width | digit as u32;
        }
        if digits == 0 { Cut::ZEROS } else { Cut { magnitude: digits, ties: rank } }
    }
}

/// The ascending indices of the `k` largest values.
fn exactly(values: &[f32], k: usize) -> Vec<u32> {
    let mut indices = Vec::with_capacity(k);
    collect(values, Cut::new(values, k), usize::MAX, &mut indices);
    indices
}

/// The cut that takes [`SAMPLED_ABOVE`] of a sample of the values, with all of its ties.
fn sampled_cut(values: &[f32], size: usize, key: Key) -> Cut {
    let sample: Vec<f32> =
        Strata::new(key, values.len(), size).map(|index| values[index]).collect();
    let cut = Cut::new(&sample, SAMPLED_ABOVE.min(size));
    if cut == Cut::ZEROS { cut } else { Cut { ties: usize::MAX, ..cut } }
}

/// How many values have which digit: which `width` bits of their magnitude from bit `shift` on.
/// Only those count whose higher bits are `higher`.
fn count_digits(values: &[f32], higher: u32, shift: u32, width: u32) -> Vec<usize> {
    // Neighbours are often alike. Counters of their own spare them the wait for each other.
    let mut counts = vec![[0; 4]; 1 << width];
    let mask = (1 << width) - 1;
    let mut count = |value: f32, own: usize| {
        let magnitude = magnitude(value);
        if magnitude >> shift >> width == higher {
            counts[(magnitude >> shift) as usize & mask][own] += 1;
        }
    };
    let (fours, rest) = values.as_chunks::<4>();
    for four in fours {
        four.iter().enumerate().for_each(|(own, &value)| count(value, own));
    }
    rest.iter().for_each(|&value| count(value, 0));
    counts.into_iter().map(|own| own.into_iter().sum()).collect()
}

/// Appends the ascending indices of what the cut takes; stops soon after more than `limit`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2",
    "aarch64+neon"
))]
fn collect(values: &[f32], cut: Cut, limit: usize, into: &mut Vec<u32>) {
    let least = cut.magnitude + u32::from(cut.ties == 0);
    let mut ties = cut.ties;
    let mut takes = |value: f32| {
        let tie = usize::from(magnitude(value) == cut.magnitude);
        let takes = tie <= ties;
        ties = ties.saturating_sub(tie);
        takes
    };
    let (chunks, rest) = values.as_chunks::<LANES>();
    for (number, chunk) in chunks.iter().enumerate() {
        let mut above = 0u32;
        for (lane, &value) in chunk.iter().enumerate() {
            above |= u32::from(magnitude(value) >= least) << lane;
        }
        // Most chunks have nothing to take.
        if above == 0 {
            continue;
        }
        while above != 0 {
            let lane = above.trailing_zeros() as usize;
            if takes(chunk[lane]) {
                into.push((number * LANES + lane) as u32);
            }
            above &= above - 1;
        }
        if into.len() > limit {
            return;
        }
    }
    for (index, &value) in rest.iter().enumerate() {
        if magnitude(value) >= least && takes(value) {
            into.push((chunks.len() * LANES + index) as u32);
        }
    }
}

/// The bits of a float without its sign.
#[inline(always)]
fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::tests::Halves;
    use proptest::prelude::*;

    const SELECTIONS: [Selection; 2] = [Selection::Exact, Selection::Sampled];

    fn task(shape: &[usize]) -> Task<'_> {
        Task { shape, parameter: 0, step: 9, seed: 1 }
    }

    fn uniform(seed: u64, elements: usize) -> impl Iterator<Item = f64> {
        let key = Key::new(seed);
        (0..elements as u64).map(move |i| (key.at(i) >> 11) as f64 / (1u64 << 53) as f64)
    }

    /// Values of very different kinds, 400,000 of each.
    fn kinds() -> Vec<(&'static str, Vec<f32>)> {
        let n = 400_000;
        let normal = uniform(1, n).zip(uniform(2, n)).map(|(u, v)| {
            ((-2.0 * (1.0 - u).ln()).sqrt() * (v * std::f64::consts::TAU).cos()) as f32
        });
        let heavy = uniform(3, n).map(|u| ((u - 0.5) * std::f64::consts::PI).tan().powi(3) as f32);
        let sparse = uniform(4, n).map(|u| if u < 0.001 { u as f32 } else { -0.0 });
        let clustered = (0..n).map(|i| if i / 1000 == 77 { i as f32 } else { 1e-20 });
        let ramp = (0..n).map(|i| i as f32);
        vec![
            ("normal", normal.collect()),
            ("heavy", heavy.collect()),
            ("constant", vec![-0.25; n]),
            ("zero", vec![0.0; n]),
            ("mostly zero", sparse.collect()),
            ("clustered", clustered.collect()),
            ("ramp", ramp.collect()),
            ("few levels", uniform(5, n).map(|u| (u * 4.0) as u32 as f32).collect()),
        ]
    }

    /// The `k` largest, without zeros, by sorting.
    fn sorted(values: &[f32], k: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(magnitude(values[i as usize])));
        order.truncate(k);
        order.retain(|&i| values[i as usize] != 0.0);
        order.sort();
        order
    }

    #[test]
    fn exact_is_what_sorting_gives() {
        for (kind, values) in kinds() {
            for rate in [0.001, 0.01, 0.25, 1.0] {
                let indices = Selection::Exact.largest(&values, rate, Key::new(0));
                assert!(indices == sorted(&values, share(rate, values.len())), "{kind} {rate}");
            }
        }
    }

    #[test]
    fn sampled_keeps_its_bounds_and_takes_the_largest() {
        for (kind, values) in kinds() {
            for (rate, key) in [(0.001, 1), (0.01, 2), (0.01, 3), (0.25, 4), (1.0, 5)] {
                let k = share(rate, values.len());
                let indices = Selection::Sampled.largest(&values, rate, Key::new(key));
                let nonzero = values.iter().filter(|&&x| x != 0.0).count();
                let bounds = (k * 3 / 4).min(nonzero)..=k * 13 / 10;
                assert!(bounds.contains(&indices.len()), "{kind} {rate}: {}", indices.len());
                assert_eq!(indices, sorted(&values, indices.len()), "{kind} {rate}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_comes_first() {
        let mut values: Vec<f32> = uniform(1, 300_000).map(|u| u as f32).collect();
        values[7] = f32::NAN;
        values[299_999] = f32::NEG_INFINITY;
        values[100_000] = f32::MAX;
        for selection in SELECTIONS {
            let indices = selection.largest(&values, 1e-5, Key::new(0));
            assert_eq!(indices, [7, 100_000, 299_999]);
            let mut memory = Memory { residual: values.clone(), velocity: Vec::new() };
            let codec = TopK::new(0.01, selection, None);
            let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; values.len()]);
            codec.encode(&task(&[values.len()]), 0, &mut memory, &mut bytes);
            codec.decode(&bytes, &mut decoded).unwrap();
            assert!(decoded[7].is_nan() && decoded[299_999] == f32::NEG_INFINITY);
        }
    }

    #[test]
    fn sizes_are_as_estimated() {
        let (_, values) = kinds().swap_remove(0);
        for (rate, values_codec) in [(0.01, None), (0.01, Some(Arc::new(Halves) as _)), (0.1, None)]
        {
            for (selection, off) in [(Selection::Exact, 0.01), (Selection::Sampled, 0.2)] {
                let codec = TopK::new(rate, selection, values_codec.clone());
                let mut memory = Memory { residual: values.clone(), velocity: Vec::new() };
                let mut bytes = Vec::new();
                codec.encode(&task(&[values.len()]), 0, &mut memory, &mut bytes);
                let expected = codec.encoded_bytes(&[values.len()]) as f64;
                let found = bytes.len() as f64;
                assert!((found / expected - 1.0).abs() < off, "{found} instead of {expected}");
            }
        }
        assert!(!TopK::new(1.0, Selection::Exact, None).suits(&[1000]));
        assert!(!TopK::new(0.01, Selection::Exact, None).suits(&[1]));
        assert!(TopK::new(0.01, Selection::Exact, None).suits(&[100]));
    }

    proptest! {
        #[test]
        fn nothing_is_lost(
            values in proptest::collection::vec(-60f32..60.0, 0..400),
            rate in 0.001..1f64,
            coded: bool,
            exact: bool,
        ) {
            let selection = SELECTIONS[usize::from(!exact)];
            let codec = TopK::new(rate, selection, coded.then(|| Arc::new(Halves) as _));
            let mut memory = Memory { residual: values.clone(), velocity: Vec::new() };
            let mut bytes = Vec::new();
            codec.encode(&task(&[values.len()]), 2, &mut memory, &mut bytes);
            let mut decoded = vec![0.0; values.len()];
            codec.decode(&bytes, &mut decoded).unwrap();
            for ((value, left), decoded) in values.iter().zip(&memory.residual).zip(&decoded) {
                prop_assert!((left + decoded - value).abs() <= value.abs() * f32::EPSILON);
                let most = if coded { 0.5 } else { 0.0 };
                prop_assert!(*decoded == 0.0 || left.abs() <= most);
            }
            let sent = decoded.iter().filter(|&&x| x != 0.0).count();
            prop_assert!(sent <= share(rate, values.len()) * 13 / 10);
        }

        #[test]
        fn any_bits_can_be_sorted(
            bits in proptest::collection::vec(any::<u32>(), 1..200),
            rate in 0.001..1f64,
        ) {
            let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let indices = Selection::Exact.largest(&values, rate, Key::new(0));
            prop_assert_eq!(indices, sorted(&values, share(rate, values.len())));
        }
    }
}
