//! Some elements, chosen at random, the same in all shards.
//!
//! All shards choose by the same key, so that their encodings are plain vectors of the chosen
//! values, without indices, and can be summed. What was not chosen stays in the residual and is
//! sent when its turn comes.
//!
//! A gradient travels as it is. To scale it by `n / k` would make its mean right without residuals,
//! but its variance `n / k` times as large; together with residuals it would pay every debt many
//! times over, and diverge. As it is, all of every gradient is sent exactly once, some of it late.
//!
//! The elements are cut into `k` *strata* of neighbours, whose lengths differ by one at most, and
//! one element is drawn from each. So they are spread evenly, and nothing needs to be sorted or
//! stored. The first stratum begins at a random element, and the last one wraps around: if it
//! always began at the first, elements of the shorter strata would be drawn more often than others.

use crate::{Codec, Key, Passage, Summed, Task, Wire, elements};

/// Sends some elements, chosen at random, and remembers the others.
#[derive(Clone, Debug)]
pub struct RandK {
    rate: f64,
    wire: Wire,
}

impl RandK {
    /// Sends a part `rate` of the elements in each step, of the given type. What a type narrower
    /// than f32 rounds away is not remembered.
    ///
    /// # Panics
    ///
    /// If the rate is not above 0 and at most 1.
    pub fn new(rate: f64, wire: Wire) -> RandK {
        assert_rate(rate);
        RandK { rate, wire }
    }

    fn strata(&self, task: &Task) -> Strata {
        let elements = task.elements();
        Strata::new(task.shared_key(), elements, share(self.rate, elements))
    }
}

impl Codec for RandK {
    fn is_biased(&self) -> bool {
        true
    }

    fn encoded_bytes(&self, shape: &[usize]) -> usize {
        share(self.rate, elements(shape)) * self.wire.bytes()
    }

    fn passage(&self) -> Passage<'_> {
        Passage::Summed(self)
    }
}

impl Summed for RandK {
    fn wire(&self) -> Wire {
        self.wire
    }

    fn encoded(&self, shape: &[usize], _round: usize) -> usize {
        share(self.rate, elements(shape))
    }

    fn encode(&self, _round: usize, task: &Task, values: &[f32], _given: &[f32], into: &mut [f32]) {
        for (code, index) in into.iter_mut().zip(self.strata(task)) {
            *code = values[index];
        }
    }

    fn decode(&self, task: &Task, means: &[&[f32]], _remembered: &mut Vec<f32>, into: &mut [f32]) {
        into.fill(0.0);
        for (mean, index) in means[0].iter().zip(self.strata(task)) {
            into[index] = *mean;
        }
    }

    fn pay(&self, task: &Task, residual: &mut [f32], _decoded: &[f32]) {
        for index in self.strata(task) {
            residual[index] = 0.0;
        }
    }
}

/// How many of so many elements are sent at a rate: one at least.
pub fn share(rate: f64, elements: usize) -> usize {
    ((rate * elements as f64).round() as usize).max(1).min(elements)
}

/// Rates come from specifications, which were checked when they were read.
pub(crate) fn assert_rate(rate: f64) {
    assert!(rate > 0.0 && rate <= 1.0, "a rate is above 0 and at most 1, not {rate}");
}

/// One random element of each stratum, all different; every element has the same chance.
#[derive(Clone, Debug)]
pub struct Strata {
    key: Key,
    elements: usize,
    /// How many strata there are, and how many of them, the first ones, are longer by one.
    count: usize,
    longer: usize,
    length: usize,
    /// The next stratum, and its first element, counted on beyond the last of all.
    number: usize,
    start: usize,
}

impl Strata {
    /// `count` of `elements`, at most all.
    pub fn new(key: Key, elements: usize, count: usize) -> Strata {
        debug_assert!(count <= elements);
        let start = below(key.at(count as u64), elements);
        let (length, longer) = match count {
            0 => (0, 0),
            _ => (elements / count, elements % count),
        };
        Strata { key, elements, count, longer, length, number: 0, start }
    }

    /// What the elements follow from, before the first is drawn: the element at which the first stratum
    /// begins, the length of a stratum, and how many of them, the first ones, are longer by one. From stratum
    /// `i` the `⌊r · l / 2⁶⁴⌋`-th element is drawn, where `r` is the key's number at `i` and `l` its length.
    pub fn layout(&self) -> (usize, usize, usize) {
        (self.start, self.length, self.longer)
    }
}

impl Iterator for Strata {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.number == self.count {
            return None;
        }
        let length = self.length + usize::from(self.number < self.longer);
        let index = self.start + below(self.key.at(self.number as u64), length);
        self.number += 1;
        self.start += length;
        Some(if index < self.elements { index } else { index - self.elements })
    }
}

/// A number below `limit`, from 64 random bits.
#[inline(always)]
fn below(bits: u64, limit: usize) -> usize {
    ((u128::from(bits) * limit as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn task(shape: &[usize], step: u64) -> Task<'_> {
        Task { shape, parameter: 3, step, seed: 5 }
    }

    #[test]
    fn every_element_has_the_same_chance() {
        // 10 elements in 4 strata, of 3, 3, 2 and 2.
        let mut drawn = [0; 10];
        for step in 0..50_000 {
            Strata::new(task(&[10], step).shared_key(), 10, 4).for_each(|index| drawn[index] += 1);
        }
        // 20,000 each; the standard deviation is less than 110.
        assert!(drawn.iter().all(|n| (19_500..20_500).contains(n)), "{drawn:?}");
    }

    #[test]
    fn sums_of_encodings_are_encodings_of_sums() {
        let codec = RandK::new(0.1, Wire::F32);
        let task = task(&[20, 5], 1);
        let a: Vec<f32> = (0..100).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..100).map(|i| (i * i) as f32).collect();
        let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let encode = |values: &[f32]| {
            let mut code = vec![0.0; codec.encoded(task.shape, 0)];
            codec.encode(0, &task, values, &[], &mut code);
            code
        };
        assert_eq!(encode(&a).len(), 10);
        let summed: Vec<f32> = encode(&a).iter().zip(encode(&b)).map(|(a, b)| a + b).collect();
        assert_eq!(summed, encode(&sum));
    }

    #[test]
    fn all_of_a_gradient_is_sent_exactly_once() {
        let codec = RandK::new(0.25, Wire::F32);
        let gradient: Vec<f32> = (1..=30).map(|i| i as f32).collect();
        let mut residual = gradient.clone();
        let mut total = vec![0.0; 30];
        let mut step = 0;
        while residual.iter().any(|&x| x != 0.0) {
            let task = task(&[30], step);
            let mut code = vec![0.0; codec.encoded(task.shape, 0)];
            let mut decoded = vec![f32::NAN; 30];
            codec.encode(0, &task, &residual, &[], &mut code);
            codec.decode(&task, &[&code], &mut Vec::new(), &mut decoded);
            codec.pay(&task, &mut residual, &decoded);
            total.iter_mut().zip(&decoded).for_each(|(total, x)| *total += x);
            let left: f32 = residual.iter().sum();
            assert_eq!(left + total.iter().sum::<f32>(), 465.0);
            step += 1;
            assert!(step < 200, "some element is never drawn");
        }
        assert_eq!(total, gradient);
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        let codec = RandK::new(1.0, Wire::F32);
        let task = task(&[2], 0);
        let (mut code, mut decoded) = ([0.0; 2], [0.0; 2]);
        codec.encode(0, &task, &[f32::NAN, f32::INFINITY], &[], &mut code);
        codec.decode(&task, &[&code], &mut Vec::new(), &mut decoded);
        assert!(decoded[0].is_nan() && decoded[1] == f32::INFINITY);
    }

    proptest! {
        #[test]
        fn strata_are_disjoint_and_even(elements in 0..500usize, rate in 0.001..1f64, seed: u64) {
            let count = share(rate, elements);
            let mut indices: Vec<usize> = Strata::new(Key::new(seed), elements, count).collect();
            indices.sort();
            prop_assert_eq!(indices.len(), count);
            prop_assert!(indices.is_sorted_by(|a, b| a < b));
            prop_assert!(indices.iter().all(|&index| index < elements));
            let gap = indices.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
            prop_assert!(gap <= 2 * elements.div_ceil(count.max(1)), "{indices:?}");
        }
    }
}
