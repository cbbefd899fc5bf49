//! The mean of a round's gradients of one piece, made when it is used.

use std::borrow::Cow;
use std::ops::Range;

use unisono_collective::tree::Tree;
use unisono_collective::{Dtype, Reduction, kernel};

/// A mean over the shards of a batch. Any of its elements can be made alone.
pub struct Mean<'a> {
    inputs: Vec<Option<&'a [f32]>>,
    tree: Cow<'a, Tree>,
    shards: usize,
    length: usize,
}

impl<'a> Mean<'a> {
    /// The sum of vectors of so many numbers, in the order of a tree, over the number of shards. Where there is no vector,
    /// there are zeros.
    ///
    /// # Panics
    ///
    /// If a vector has another length, or the tree another number of inputs.
    pub fn new(
        inputs: Vec<Option<&'a [f32]>>,
        tree: Cow<'a, Tree>,
        shards: usize,
        length: usize,
    ) -> Mean<'a> {
        assert!(
            inputs.iter().flatten().all(|input| input.len() == length),
            "numbers of all inputs"
        );
        assert_eq!(inputs.len(), tree.inputs(), "an input for every leaf");
        Mean { inputs, tree, shards, length }
    }

    /// How many numbers it has.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Makes some of the numbers.
    ///
    /// # Panics
    ///
    /// If `into` has another length than the span, or that goes beyond the end.
    pub fn make(&self, span: Range<usize>, into: &mut [f32]) {
        assert_eq!(into.len(), span.len(), "room for all");
        let is_missing = self.inputs.iter().any(Option::is_none);
        let zeros = vec![0.0f32; if is_missing { span.len() } else { 0 }];
        let input = |input: &Option<&[f32]>| match input {
            Some(input) => input[span.clone()].as_ptr().cast::<u8>(),
            None => zeros.as_ptr().cast::<u8>(),
        };
        let inputs: Vec<*const u8> = self.inputs.iter().map(input).collect();
        let (sum, count) = (into.as_mut_ptr().cast(), into.len());
        // SAFETY: every input has as many numbers as the span and lives until the end of this call; none is written to, for
        // all are borrowed. `into` is borrowed to be written and so none of them.
        unsafe {
            kernel::fold(Dtype::F32, Reduction::Sum, &self.tree, &inputs, sum, None, count, None);
        }
        into.iter_mut().for_each(|x| *x /= self.shards as f32);
    }

    /// All numbers.
    pub fn whole(&self) -> Vec<f32> {
        /// What stays in the cache until it is divided.
        const BLOCK: usize = 1 << 14;
        let mut whole = vec![0.0; self.length];
        for (number, block) in whole.chunks_mut(BLOCK).enumerate() {
            let start = number * BLOCK;
            self.make(start..start + block.len(), block);
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_is_that_of_the_whole() {
        let vector = |seed: usize| -> Vec<f32> {
            (0..40_001).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 77.0 - 6.0).collect()
        };
        let vectors: Vec<Vec<f32>> = (0..5).map(vector).collect();
        let mut inputs: Vec<_> = vectors.iter().map(|vector| Some(&vector[..])).collect();
        inputs[3] = None;
        let mean = Mean::new(inputs, Cow::Owned(Tree::canonical(5)), 7, 40_001);
        let whole = mean.whole();
        let expected = |i: usize| {
            let [a, b, c, d, e] =
                [0, 1, 2, 3, 4].map(|v: usize| if v == 3 { 0.0 } else { vectors[v][i] });
            (((a + b) + (c + d)) + e) / 7.0
        };
        assert!((0..40_001).all(|i| whole[i].to_bits() == expected(i).to_bits()));
        for span in [0..1, 3..10, 16_383..16_390, 39_999..40_001, 5..5, 0..40_001] {
            let mut part = vec![9.0; span.len()];
            mean.make(span.clone(), &mut part);
            assert_eq!(part, whole[span]);
        }
    }
}
