//! Weights that many threads read and change at once.
//!
//! Every weight is the bits of an f32 in an atomic word, and every access to it is `Relaxed`. That is
//! enough for what is promised:
//!
//! - *No update is lost.* All changes of one word have one order that all threads agree on, at any
//!   memory ordering, and a compare-exchange that succeeds replaces the last value in that order. So
//!   each subtraction starts from the result of the one before.
//! - *A value read is a value that was there*, never half of one and half of another: a word is read
//!   whole. A thread that reads it again finds the same or a later one.
//! - *After the threads are joined*, a read finds everything: joining is what orders it.
//!
//! Stronger orderings would serve to publish other memory along with a weight, and there is none.
//! What is *not* promised, and would not follow from them either: that two elements are of the same
//! moment, that updates arrive in the same order at different elements, or that a sum has the same
//! last bits in the next run.
//!
//! The comparison is of bits, not of numbers. So it ends for weights that became NaN, which equal
//! nothing, and sees the difference between the two zeros.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use super::atomic::Word;

/// The f32 weights of a model, shared by the threads of a process.
///
/// Parameters are named by their number, in the order they were given. The wrong number of elements,
/// a parameter or an index that does not exist is a mistake in the program, and panics.
#[derive(Debug)]
pub struct SharedWeights {
    parameters: Vec<Box<[AtomicU32]>>,
}

impl SharedWeights {
    /// Shares weights that start with these values.
    pub fn new<P: AsRef<[f32]>>(parameters: impl IntoIterator<Item = P>) -> SharedWeights {
        let share = |values: P| -> Box<[AtomicU32]> {
            values.as_ref().iter().map(|value| AtomicU32::new(value.to_bits())).collect()
        };
        SharedWeights { parameters: parameters.into_iter().map(share).collect() }
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.parameters.len()
    }

    /// Number of elements of a parameter.
    pub fn elements(&self, parameter: usize) -> usize {
        self.parameters[parameter].len()
    }

    /// Reads a parameter. Each element is a value it had during this call; together they may never
    /// have been the parameter, if others changed it meanwhile.
    pub fn read(&self, parameter: usize, into: &mut [f32]) {
        let words = &self.parameters[parameter];
        assert_eq!(words.len(), into.len(), "elements of parameter {parameter}, and to read");
        for (word, value) in words.iter().zip(into) {
            *value = f32::from_bits(word.load(Relaxed));
        }
    }

    /// Reads some elements of a parameter, each as [`SharedWeights::read`] does.
    pub fn read_sparse(&self, parameter: usize, indices: &[u32], into: &mut [f32]) {
        let words = &self.parameters[parameter];
        assert_eq!(indices.len(), into.len(), "indices, and values to read");
        for (index, value) in indices.iter().zip(into) {
            *value = f32::from_bits(words[*index as usize].load(Relaxed));
        }
    }

    /// Subtracts `rate` times a gradient from a parameter. Elements whose change is zero are left
    /// alone, and cost no exclusive access.
    pub fn update(&self, parameter: usize, gradient: &[f32], rate: f32) {
        update(&self.parameters[parameter], gradient, rate);
    }

    /// Subtracts `rate` times a gradient that is zero but for the `values` at the `indices`. An index
    /// may occur more than once.
    pub fn update_sparse(&self, parameter: usize, indices: &[u32], values: &[f32], rate: f32) {
        update_sparse(&self.parameters[parameter], indices, values, rate);
    }

    /// The weights, now that no thread shares them.
    pub fn into_parameters(self) -> Vec<Vec<f32>> {
        let own = |words: Box<[AtomicU32]>| -> Vec<f32> {
            words.into_iter().map(|word| f32::from_bits(word.into_inner())).collect()
        };
        self.parameters.into_iter().map(own).collect()
    }
}

pub(super) fn update(words: &[impl Word], gradient: &[f32], rate: f32) {
    assert_eq!(words.len(), gradient.len(), "elements of the parameter, and of the gradient");
    for (word, slope) in words.iter().zip(gradient) {
        subtract(word, rate * slope);
    }
}

pub(super) fn update_sparse(words: &[impl Word], indices: &[u32], values: &[f32], rate: f32) {
    assert_eq!(indices.len(), values.len(), "indices, and values of the gradient");
    for (index, slope) in indices.iter().zip(values) {
        subtract(&words[*index as usize], rate * slope);
    }
}

/// The update loop. It repeats only if another thread changed the word in between: then that one
/// got on, so that the threads together always do. (Some processors also let the weak exchange fail
/// for no reason, and are asked again.)
#[inline(always)]
fn subtract(word: &impl Word, change: f32) {
    if change == 0.0 {
        return;
    }
    let mut seen = word.load(Relaxed);
    loop {
        let changed = (f32::from_bits(seen) - change).to_bits();
        match word.compare_exchange_weak(seen, changed, Relaxed, Relaxed) {
            Ok(_) => return,
            Err(now) => seen = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::iter;
    use std::sync::Barrier;
    use std::sync::atomic::Ordering;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// A word whose exchange fails some times without a reason, as it may.
    struct Reluctant {
        bits: Cell<u32>,
        refusals: Cell<u32>,
        exchanges: Cell<u32>,
    }

    impl Word for Reluctant {
        fn load(&self, _: Ordering) -> u32 {
            self.bits.get()
        }

        fn compare_exchange_weak(
            &self,
            current: u32,
            new: u32,
            _: Ordering,
            _: Ordering,
        ) -> Result<u32, u32> {
            self.exchanges.set(self.exchanges.get() + 1);
            if self.refusals.get() > 0 {
                self.refusals.set(self.refusals.get() - 1);
                return Err(self.bits.get());
            }
            assert_eq!(current, self.bits.get());
            self.bits.set(new);
            Ok(current)
        }
    }

    #[test]
    fn an_exchange_that_fails_for_no_reason_is_repeated_and_none_is_made_for_zero() {
        let word = |value: f32, refusals| Reluctant {
            bits: Cell::new(value.to_bits()),
            refusals: Cell::new(refusals),
            exchanges: Cell::new(0),
        };
        let words = [word(1.0, 3), word(2.0, 0), word(f32::NAN, 1), word(-0.0, 0)];
        update(&words, &[4.0, -0.0, 1.0, 0.0], 0.5);
        let values = words.each_ref().map(|word| f32::from_bits(word.bits.get()));
        assert_eq!(values[..2], [-1.0, 2.0]);
        assert!(values[2].is_nan());
        assert_eq!(values[3].to_bits(), (-0.0f32).to_bits());
        assert_eq!(words.map(|word| word.exchanges.get()), [4, 0, 2, 0]);
    }

    #[test]
    fn parameters_are_read_as_they_were_written() {
        let weights = SharedWeights::new([vec![1.0, 2.0, 3.0], vec![], vec![4.0]]);
        assert_eq!(weights.parameters(), 3);
        assert_eq!([0, 1, 2].map(|parameter| weights.elements(parameter)), [3, 0, 1]);
        weights.update(0, &[1.0, 0.0, -2.0], 0.5);
        weights.update_sparse(2, &[0, 0], &[1.0, 2.0], 1.0);
        let mut values = [0.0; 3];
        weights.read(0, &mut values);
        assert_eq!(values, [0.5, 2.0, 4.0]);
        weights.read_sparse(0, &[2, 0, 2], &mut values);
        assert_eq!(values, [4.0, 0.5, 4.0]);
        assert_eq!(weights.into_parameters(), [vec![0.5, 2.0, 4.0], vec![], vec![1.0]]);
    }

    #[test]
    #[should_panic(expected = "elements of the parameter, and of the gradient")]
    fn a_gradient_of_another_length_is_refused() {
        SharedWeights::new([[1.0, 2.0]]).update(0, &[1.0], 1.0);
    }

    const RATE: f32 = 0.25;

    /// How often each thread makes its updates: enough for threads to meet, and not so many that sums
    /// leave the range in which f32 holds all multiples of the rate.
    const REPEATS: usize = 200;

    /// A gradient of small integers, of which every sum is exact in every order.
    #[derive(Clone, Debug)]
    enum Gradient {
        Dense(Vec<f32>),
        Sparse(Vec<u32>, Vec<f32>),
    }

    impl Gradient {
        fn update(&self, weights: &SharedWeights) {
            match self {
                Gradient::Dense(values) => weights.update(0, values, RATE),
                Gradient::Sparse(indices, values) => {
                    weights.update_sparse(0, indices, values, RATE);
                }
            }
        }

        fn update_alone(&self, weights: &mut [f32]) {
            let indices: Vec<u32> = match self {
                Gradient::Dense(values) => (0..values.len() as u32).collect(),
                Gradient::Sparse(indices, _) => indices.clone(),
            };
            let (Gradient::Dense(values) | Gradient::Sparse(_, values)) = self;
            for (index, value) in indices.iter().zip(values) {
                weights[*index as usize] -= RATE * value;
            }
        }
    }

    fn gradients(elements: usize) -> impl Strategy<Value = Gradient> {
        let slope = || (-8i8..=8).prop_map(f32::from);
        let sparse = prop::collection::vec((0..elements as u32, slope()), 0..20);
        prop_oneof![
            prop::collection::vec(slope(), elements).prop_map(Gradient::Dense),
            sparse.prop_map(|pairs| {
                let (indices, values) = pairs.into_iter().unzip();
                Gradient::Sparse(indices, values)
            }),
        ]
    }

    /// A number of elements, and the gradients of every thread.
    fn programs() -> impl Strategy<Value = (usize, Vec<Vec<Gradient>>)> {
        (1usize..6).prop_flat_map(|elements| {
            let per_thread = prop::collection::vec(gradients(elements), 0..30);
            (Just(elements), prop::collection::vec(per_thread, 1..5))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn threads_together_make_the_sequential_sum((elements, per_thread) in programs()) {
            let weights = SharedWeights::new([vec![1.0; elements]]);
            let ready = Barrier::new(per_thread.len());
            thread::scope(|scope| {
                for gradients in &per_thread {
                    let (weights, ready) = (&weights, &ready);
                    scope.spawn(move || {
                        ready.wait();
                        for gradient in iter::repeat_n(gradients, REPEATS).flatten() {
                            gradient.update(weights);
                        }
                    });
                }
            });
            let mut expected = vec![1.0; elements];
            for gradient in iter::repeat_n(&per_thread, REPEATS).flatten().flatten() {
                gradient.update_alone(&mut expected);
            }
            prop_assert_eq!(weights.into_parameters(), [expected]);
        }
    }
}
