//! Which gradients travel together, and when.
//!
//! Backward produces gradients roughly from the last registered parameter to the first. So the
//! parameters are taken in reverse order of registration and cut into buckets: a small one first,
//! so that communication starts early, then larger ones, which use the links better. A parameter is
//! never split.
//!
//! Behind the gradients of its parameters, a bucket carries one number per parameter: how many
//! shards had a gradient for it. That is how all ranks agree on which parameters no shard used. The
//! first bucket also carries the numbers of the step. Where buckets travel at different steps, each
//! does.

use std::mem::take;
use std::ops::Range;

/// How large buckets are, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSizes {
    /// The first bucket. Larger: communication starts later. Smaller: it is mostly latency.
    pub first: usize,
    /// The others. Larger: the last one, which nothing can hide, is larger. Smaller: more of them,
    /// with more latency.
    pub others: usize,
}

impl Default for BucketSizes {
    fn default() -> BucketSizes {
        BucketSizes { first: 1 << 20, others: 8 << 20 }
    }
}

/// Numbers that travel with every step, behind the gradients and counts.
pub const SCALARS: usize = 4;

/// The buckets of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    buckets: Vec<Bucket>,
    /// The bucket of every parameter.
    bucket_of: Vec<usize>,
    /// Where every parameter is in its bucket.
    span: Vec<Range<usize>>,
    /// Where its count of shards is.
    count: Vec<usize>,
}

/// Parameters that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Which, in the order in which they lie in memory.
    pub parameters: Vec<usize>,
    /// Elements of its gradients.
    pub gradients: usize,
    /// Where the numbers of the step are; empty if it carries none.
    pub scalars: Range<usize>,
    /// Elements of all it carries.
    pub len: usize,
}

impl Layout {
    /// Buckets for parameters of these lengths, in order of registration. Every length is rounded
    /// up to a multiple of `align` elements.
    pub fn new(lengths: &[usize], sizes: BucketSizes, align: usize) -> Layout {
        let mut layout = Layout::empty(lengths.len());
        let mut parameters = Vec::new();
        let (mut gradients, mut scalars) = (0, SCALARS);
        for parameter in (0..lengths.len()).rev() {
            let limit = if layout.buckets.is_empty() { sizes.first } else { sizes.others };
            if !parameters.is_empty() && (gradients + lengths[parameter]) * 4 > limit {
                let (closed, carried) = (take(&mut parameters), take(&mut scalars));
                layout.close(closed, gradients, carried, align);
                gradients = 0;
            }
            parameters.push(parameter);
            layout.span[parameter] = gradients..gradients + lengths[parameter];
            gradients += lengths[parameter];
        }
        layout.close(parameters, gradients, scalars, align);
        layout
    }

    /// One bucket for each of these groups of parameters, which travel at different steps: each
    /// carries the numbers of its step.
    pub fn of_groups(lengths: &[usize], groups: &[Range<usize>]) -> Layout {
        let mut layout = Layout::empty(lengths.len());
        for group in groups {
            let mut gradients = 0;
            for parameter in group.clone() {
                layout.span[parameter] = gradients..gradients + lengths[parameter];
                gradients += lengths[parameter];
            }
            layout.close(group.clone().collect(), gradients, SCALARS, 1);
        }
        layout
    }

    /// The buckets, in the order in which they travel. There is always one.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The bucket of a parameter.
    pub fn bucket_of(&self, parameter: usize) -> usize {
        self.bucket_of[parameter]
    }

    /// Where a parameter's gradient is in its bucket.
    pub fn span(&self, parameter: usize) -> Range<usize> {
        self.span[parameter].clone()
    }

    /// Where the number of shards with a gradient for a parameter is in its bucket.
    pub fn count(&self, parameter: usize) -> usize {
        self.count[parameter]
    }

    /// Where the numbers of the step are in the first bucket.
    pub fn scalars(&self) -> Range<usize> {
        self.buckets[0].scalars.clone()
    }

    fn empty(parameters: usize) -> Layout {
        Layout {
            buckets: Vec::new(),
            bucket_of: vec![0; parameters],
            span: vec![0..0; parameters],
            count: vec![0; parameters],
        }
    }

    fn close(&mut self, parameters: Vec<usize>, gradients: usize, scalars: usize, align: usize) {
        for (i, &parameter) in parameters.iter().enumerate() {
            self.bucket_of[parameter] = self.buckets.len();
            self.count[parameter] = gradients + i;
        }
        let start = gradients + parameters.len();
        let scalars = start..start + scalars;
        let len = scalars.end.next_multiple_of(align);
        self.buckets.push(Bucket { parameters, gradients, scalars, len });
    }
}

/// Whose turn it is: buckets are submitted in one order on all ranks, whatever the order in which
/// they become ready.
#[derive(Clone, Debug)]
pub struct Turns {
    ready: Vec<bool>,
    next: usize,
}

impl Turns {
    /// None of as many buckets is ready.
    pub fn new(buckets: usize) -> Turns {
        Turns { ready: vec![false; buckets], next: 0 }
    }

    /// A bucket is ready; those that can be submitted now.
    pub fn ready(&mut self, bucket: usize) -> Range<usize> {
        self.ready[bucket] = true;
        let first = self.next;
        while self.ready.get(self.next) == Some(&true) {
            self.next += 1;
        }
        first..self.next
    }

    /// Starts over.
    pub fn reset(&mut self) {
        self.ready.fill(false);
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_bucket_is_small_and_the_order_reversed() {
        let sizes = BucketSizes { first: 40, others: 400 };
        let layout = Layout::new(&[60, 30, 5, 5, 1000, 4, 4], sizes, 1);
        let parameters: Vec<_> = layout.buckets().iter().map(|b| b.parameters.clone()).collect();
        assert_eq!(parameters, [vec![6, 5], vec![4], vec![3, 2, 1, 0]]);
        assert_eq!(layout.buckets()[0].len, 8 + 2 + SCALARS);
        assert_eq!(layout.scalars(), 10..10 + SCALARS);
        assert_eq!((layout.bucket_of(5), layout.span(5), layout.count(5)), (0, 4..8, 9));
    }

    #[test]
    fn groups_carry_the_numbers_of_their_steps() {
        let layout = Layout::of_groups(&[3, 5, 2, 0, 4], &[0..2, 2..2, 2..5]);
        let parameters: Vec<_> = layout.buckets().iter().map(|b| b.parameters.clone()).collect();
        assert_eq!(parameters, [vec![0, 1], vec![], vec![2, 3, 4]]);
        let scalars: Vec<_> = layout.buckets().iter().map(|b| b.scalars.clone()).collect();
        assert_eq!(scalars, [10, 0, 9].map(|start| start..start + SCALARS));
        assert!(layout.buckets().iter().all(|b| b.len == b.scalars.end));
        assert_eq!((layout.bucket_of(1), layout.span(1), layout.count(1)), (0, 3..8, 9));
        assert_eq!((layout.bucket_of(4), layout.span(4), layout.count(4)), (2, 2..6, 8));
    }

    #[test]
    fn a_model_without_parameters_has_a_bucket_for_the_step() {
        let layout = Layout::new(&[], BucketSizes::default(), 3);
        assert_eq!(layout.buckets().len(), 1);
        assert_eq!((layout.scalars(), layout.buckets()[0].len), (0..SCALARS, 6));
    }

    proptest! {
        #[test]
        fn everything_has_one_place(
            lengths in proptest::collection::vec(0usize..50, 0..40),
            first in 0usize..200,
            others in 0usize..400,
            align in 1usize..9,
        ) {
            let layout = Layout::new(&lengths, BucketSizes { first, others }, align);
            let mut taken: Vec<Vec<bool>> =
                layout.buckets().iter().map(|b| vec![false; b.len]).collect();
            let mut take = |bucket: usize, span: Range<usize>| {
                for i in span {
                    prop_assert!(!std::mem::replace(&mut taken[bucket][i], true));
                }
                Ok(())
            };
            for (parameter, &len) in lengths.iter().enumerate() {
                let (bucket, count) = (layout.bucket_of(parameter), layout.count(parameter));
                prop_assert_eq!(layout.span(parameter).len(), len);
                take(bucket, layout.span(parameter))?;
                take(bucket, count..count + 1)?;
            }
            take(0, layout.scalars())?;
            let order: Vec<_> =
                layout.buckets().iter().flat_map(|b| b.parameters.clone()).collect();
            prop_assert!(order.iter().rev().copied().eq(0..lengths.len()));
            for bucket in layout.buckets() {
                prop_assert_eq!(bucket.len % align, 0);
            }
        }

        #[test]
        fn buckets_take_turns_whatever_the_order_of_readiness(
            order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let mut turns = Turns::new(order.len());
            let mut submitted = Vec::new();
            for (i, &bucket) in order.iter().enumerate() {
                let now = turns.ready(bucket);
                prop_assert!(now.clone().all(|b| order[..=i].contains(&b)));
                submitted.extend(now);
            }
            prop_assert!(submitted.into_iter().eq(0..order.len()));
        }
    }
}
