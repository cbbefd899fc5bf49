//! Sums a contiguous range of leaves in canonical order, one leaf after the other.
//!
//! The partial sums form a stack of slots. A leaf that completes a pair with the top of the stack
//! is added to it at once; otherwise it becomes the new top. Then, while the two topmost slots are
//! the two children of one node of the tree, they are merged. At the end the stack holds the
//! maximal subtrees of the range, in order. A range of `k` leaves needs about `log2 k` slots.

use std::ops::{DerefMut, Range};

use unisono_collective::tree;

/// What happens to one leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The slot it goes into.
    pub slot: usize,
    /// Whether it is added to what is there, or replaces it.
    pub add: bool,
    /// How many slots are merged afterwards: `slot` into the one below it, and so on downwards.
    pub merges: usize,
}

/// What happens to every leaf of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accumulation {
    leaves: Vec<Leaf>,
    slots: usize,
    sums: usize,
}

impl Accumulation {
    /// For the leaves `range` of a canonical tree over `total`.
    pub fn new(total: usize, range: Range<usize>) -> Accumulation {
        let mut stack: Vec<Range<usize>> = Vec::new();
        let (mut leaves, mut slots) = (Vec::with_capacity(range.len()), 0);
        for leaf in range {
            stack.push(leaf..leaf + 1);
            let mut merges = 0;
            while let [.., left, right] = &stack[..]
                && is_node(total, left.start..right.end)
            {
                let node = left.start..right.end;
                stack.truncate(stack.len() - 2);
                stack.push(node);
                merges += 1;
            }
            let top = stack.len() - 1;
            leaves.push(match merges {
                0 => Leaf { slot: top, add: false, merges: 0 },
                _ => Leaf { slot: top + merges - 1, add: true, merges: merges - 1 },
            });
            slots = slots.max(top + merges.max(1));
        }
        Accumulation { leaves, slots, sums: stack.len() }
    }

    /// For as many leaves that are not summed at all: each gets a slot of its own.
    pub fn apart(count: usize) -> Accumulation {
        let leaves = (0..count).map(|slot| Leaf { slot, add: false, merges: 0 }).collect();
        Accumulation { leaves, slots: count, sums: count }
    }

    /// What happens to the `i`-th leaf of the range.
    pub fn leaf(&self, i: usize) -> Leaf {
        self.leaves[i]
    }

    /// Leaves of the range.
    pub fn leaves(&self) -> usize {
        self.leaves.len()
    }

    /// Slots in use at any time.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Slots that hold the subtrees at the end, from the lowest.
    pub fn sums(&self) -> usize {
        self.sums
    }

    /// Adds `values`, the `i`-th leaf, to a span of the slots.
    pub fn add<S: DerefMut<Target = [f32]>>(
        &self,
        i: usize,
        slots: &mut [S],
        span: Range<usize>,
        values: &impl Values,
    ) {
        let Leaf { slot, add, merges } = self.leaf(i);
        let into = &mut slots[slot][span.clone()];
        match add {
            false => values.store(into),
            true => values.add(into),
        }
        for right in (slot + 1 - merges..=slot).rev() {
            let (lower, upper) = slots.split_at_mut(right);
            add_to(&mut lower[right - 1][span.clone()], &upper[0][span.clone()]);
        }
    }
}

/// The values of a leaf, in whatever form they are at hand. They go straight to where they are
/// summed.
pub trait Values {
    /// Puts them there.
    fn store(&self, into: &mut [f32]);

    /// Adds every one to what is there.
    fn add(&self, into: &mut [f32]);
}

/// Values that lie in order.
impl Values for &[f32] {
    fn store(&self, into: &mut [f32]) {
        into.copy_from_slice(self);
    }

    fn add(&self, into: &mut [f32]) {
        add_to(into, self);
    }
}

/// One value everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Constant(pub f32);

impl Values for Constant {
    fn store(&self, into: &mut [f32]) {
        into.fill(self.0);
    }

    fn add(&self, into: &mut [f32]) {
        // Adding zero has an effect: it turns −0 into +0, whichever worker holds the other leaves.
        into.iter_mut().for_each(|x| *x += self.0);
    }
}

fn add_to(left: &mut [f32], right: &[f32]) {
    left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
}

/// Whether the canonical tree over `total` leaves has a node over exactly these.
fn is_node(total: usize, leaves: Range<usize>) -> bool {
    let mut node = 0..total;
    while node != leaves {
        if node.len() < 2 {
            return false;
        }
        let mid = tree::split(node.clone());
        node = if leaves.end <= mid {
            node.start..mid
        } else if leaves.start >= mid {
            mid..node.end
        } else {
            return false;
        };
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono_collective::tree::maximal_subtrees;

    /// A node of the tree as text, so that any other order shows.
    fn reference(node: Range<usize>) -> String {
        if node.len() == 1 {
            return node.start.to_string();
        }
        let mid = tree::split(node.clone());
        format!("({}+{})", reference(node.start..mid), reference(mid..node.end))
    }

    #[test]
    fn every_range_sums_to_its_maximal_subtrees() {
        for total in 1..=20 {
            for start in 0..total {
                for end in start + 1..=total {
                    let plan = Accumulation::new(total, start..end);
                    let mut slots = vec![String::new(); plan.slots()];
                    for (i, leaf) in (start..end).enumerate() {
                        let Leaf { slot, add, merges } = plan.leaf(i);
                        slots[slot] = match add {
                            true => format!("({}+{leaf})", slots[slot]),
                            false => leaf.to_string(),
                        };
                        for right in (slot + 1 - merges..=slot).rev() {
                            slots[right - 1] = format!("({}+{})", slots[right - 1], slots[right]);
                        }
                    }
                    let expected: Vec<_> =
                        maximal_subtrees(total, start..end).into_iter().map(reference).collect();
                    assert_eq!(slots[..plan.sums()], expected, "{start}..{end} of {total}");
                }
            }
        }
    }

    #[test]
    fn few_slots_are_needed() {
        assert_eq!(Accumulation::new(8, 0..8).slots(), 3);
        assert_eq!(Accumulation::new(8, 4..8).slots(), 2);
        assert_eq!(Accumulation::new(8, 3..4).slots(), 1);
    }

    #[test]
    fn numbers_are_added_in_that_order() {
        let values = [1e8f32, 1.0, -1e8, 1.0, 0.5, 3.0, -0.0];
        let plan = Accumulation::new(values.len(), 0..values.len());
        let mut slots = vec![vec![0.0f32; 3]; plan.slots()];
        for (i, value) in values.iter().enumerate() {
            plan.add(i, &mut slots, 1..3, &[*value, 1.0].as_slice());
        }
        let [a, b, c, d, e, f, g] = values;
        assert_eq!(slots[0], [0.0, ((a + b) + (c + d)) + ((e + f) + g), 7.0]);
    }
}
