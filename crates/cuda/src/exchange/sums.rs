//! The mean over shards of which every rank has added up some, as they are.
//!
//! What a rank has are the sums of its maximal subtrees. Where every rank has one and these combine like the ranks of a
//! group do (8 shards on 1, 2, 4 or 8 ranks), an all-reduce adds them up. Otherwise (8 shards on 3 ranks) every rank gets
//! one block of every sum of all ranks, folds them in the order of the tree, and all gather the blocks: the device's side
//! of the host's `combine`, with the same bits.
//!
//! A fold on the device is that of a canonical tree over its inputs, which the tree over the sums of all ranks need not
//! be. It is cut into folds that are. From the leaves up, a node is a list of values that a canonical tree makes one;
//! lists of two children are joined as long as they are one of such a tree, which splits at the largest power of two
//! below its length, and else folded before. So 8 shards on 3 ranks, `(a + (b + c)) + (d + e)`, are two folds: of `b` and
//! `c`, and of that with the others.

use unisono_collective::shards::Shards;
use unisono_collective::tree::{Node, Tree};
use unisono_collective::{Dtype, Reduction};

use super::ExchangeError;
use super::calls::Calls;
use super::scratch::{Scratch, Use};
use crate::context::Context;
use crate::fold::Folds;
use crate::group::DeviceGroup;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Elements of a vector of the folds: blocks of as many begin alike.
const VECTOR: usize = 4;

/// Makes the mean over shards of what the ranks of a group have added up, each on its device.
pub struct SumExchange {
    calls: Calls,
    folds: Folds,
    divisor: u32,
    way: Way,
    scratch: Scratch,
}

enum Way {
    /// The sums of the ranks are those of an all-reduce.
    AllReduce,
    /// They are exchanged by blocks.
    Blocks {
        /// How many sums every rank has.
        held: Vec<usize>,
        /// Folds of sums of all ranks, in the order of the shards, of which each leaves its result in place of its
        /// first input, and the last is the whole.
        folds: Vec<Vec<usize>>,
    },
}

impl SumExchange {
    /// Over the ranks of a group, which serves nothing else from now on, on a device that it has an engine for. All
    /// ranks give the same number of shards.
    ///
    /// # Panics
    /// If there are more shards than a `u32` can count.
    pub fn new(
        group: DeviceGroup,
        context: &Context,
        shards: Shards,
    ) -> Result<SumExchange, ExchangeError> {
        let world = group.group().size();
        let folds = Folds::load(context)?;
        folds.prepare(Dtype::F32)?;
        let way = match shards.is_all_reduce(world) {
            true => Way::AllReduce,
            false => Way::Blocks {
                held: shards.subtrees(world).iter().map(Vec::len).collect(),
                folds: canonical_folds(&shards.tree(world)),
            },
        };
        Ok(SumExchange {
            calls: Calls::new(group),
            folds,
            divisor: u32::try_from(shards.count()).expect("fewer than 2^32 shards"),
            way,
            scratch: Scratch::new(context),
        })
    }

    /// What the lengths that are exchanged must be a multiple of.
    pub fn alignment(&self) -> usize {
        match self.way {
            Way::AllReduce => 1,
            Way::Blocks { .. } => self.calls.world() * VECTOR,
        }
    }

    /// Submits to a stream: replaces the first of this rank's sums by the sum over all shards, of which the first
    /// `divided` elements are divided by their number. A rank gives the sums of its maximal subtrees, in order; all
    /// have one length, the same on all ranks. The others may have any content afterwards.
    ///
    /// What was submitted is to be waited for even if this fails.
    ///
    /// # Safety
    /// Every sum is valid for `length` f32 on the device of the group until the stream has come that far; none overlaps
    /// another, and nothing else touches them meanwhile. The stream is one of this device's context.
    ///
    /// # Panics
    /// If the length is no multiple of [`SumExchange::alignment`] or less than `divided`, or this rank has not as many
    /// sums.
    pub unsafe fn exchange(
        &mut self,
        sums: &[DevicePtr],
        length: usize,
        divided: usize,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        assert!(divided <= length && length.is_multiple_of(self.alignment()), "a length that fits");
        let (me, world) = (self.calls.rank(), self.calls.world());
        let Way::Blocks { held, folds } = &self.way else {
            let [sum] = *sums else { panic!("every rank has one sum") };
            // SAFETY: the caller's promise.
            unsafe {
                if world > 1 {
                    self.calls.all_reduce(sum, length, Dtype::F32, stream)?;
                }
                return fold(&self.folds, stream, &[sum], sum, divided, Some(self.divisor));
            }
        };
        assert_eq!(sums.len(), held[me], "the sums of this rank's subtrees");
        let (block, all) = (length / world, held.iter().sum::<usize>());
        let incoming = self.scratch.of(Use::Incoming, all * block * 4)?;
        // SAFETY: the caller's promise; the scratch memory has room for a block of every sum that is exchanged.
        unsafe {
            let outgoing = match sums {
                // Its blocks lie as they are sent.
                [sum] => *sum,
                _ => {
                    let outgoing = self.scratch.of(Use::Outgoing, sums.len() * length * 4)?;
                    let blocks =
                        (0..world).flat_map(|rank| sums.iter().map(move |sum| (rank, sum)));
                    for (place, (rank, sum)) in blocks.enumerate() {
                        let into = outgoing.offset(place * block * 4);
                        stream.copy_on_device(into, sum.offset(rank * block * 4), block * 4)?;
                    }
                    outgoing
                }
            };
            let sent = vec![held[me] * block * 4; world];
            let received: Vec<usize> = held.iter().map(|held| held * block * 4).collect();
            let longest = received.iter().copied().max().unwrap_or(0);
            self.calls.all_to_all(outgoing, &sent, incoming, &received, longest, stream)?;

            let (last, before) = folds.split_last().expect("a tree is folded at least once");
            let input = |sum: &usize| incoming.offset(sum * block * 4);
            for inputs in before {
                let inputs: Vec<DevicePtr> = inputs.iter().map(input).collect();
                fold(&self.folds, stream, &inputs, inputs[0], block, None)?;
            }
            let own = sums[0].offset(me * block * 4);
            let quotients = divided.saturating_sub(me * block).min(block);
            let inputs: Vec<DevicePtr> = last.iter().map(input).collect();
            fold(&self.folds, stream, &inputs, own, quotients, Some(self.divisor))?;
            let behind = |at: &DevicePtr| at.offset(quotients * 4);
            let inputs: Vec<DevicePtr> = inputs.iter().map(behind).collect();
            fold(&self.folds, stream, &inputs, behind(&own), block - quotients, None)?;
            self.calls.all_gather_in_place(sums[0], block, stream)
        }
    }

    /// Bytes that this rank has sent to others so far, as [`Exchange::sent`](super::Exchange::sent) counts them.
    pub fn sent(&self) -> u64 {
        self.calls.sent()
    }

    /// The group.
    pub fn group(&self) -> &DeviceGroup {
        self.calls.group()
    }
}

/// Adds up f32 in the order of the canonical tree, and divides the sum.
///
/// # Safety
/// As for [`Folds::fold`].
unsafe fn fold(
    folds: &Folds,
    stream: &Stream,
    inputs: &[DevicePtr],
    into: DevicePtr,
    count: usize,
    divisor: Option<u32>,
) -> Result<(), ExchangeError> {
    if count > 0 {
        // SAFETY: the caller's promise.
        unsafe {
            folds.fold(stream, Dtype::F32, Reduction::Sum, divisor, inputs, into, None, count)?;
        }
    }
    Ok(())
}

/// Folds in the order of canonical trees that together make a tree. Each leaves its result in place of its first input.
fn canonical_folds(tree: &Tree) -> Vec<Vec<usize>> {
    let mut folds = Vec::new();
    let mut stack: Vec<Vec<usize>> = Vec::new();
    for node in tree.nodes() {
        let &Node::Input(input) = node else {
            let mut right = stack.pop().expect("two values are combined");
            let mut left = stack.pop().expect("two values are combined");
            let mut fold = |values: &mut Vec<usize>| {
                let first = values[0];
                folds.push(std::mem::replace(values, vec![first]));
            };
            if !left.len().is_power_of_two() {
                fold(&mut left);
            }
            if right.len() > left.len() {
                fold(&mut right);
            }
            left.append(&mut right);
            stack.push(left);
            continue;
        };
        stack.push(vec![usize::from(input)]);
    }
    folds.extend(stack.pop());
    folds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree as text, so that any other order shows.
    fn text(tree: &Tree, inputs: &[String]) -> String {
        let mut stack = Vec::new();
        for node in tree.nodes() {
            match node {
                Node::Input(input) => stack.push(inputs[usize::from(*input)].clone()),
                Node::Combine => {
                    let (right, left) = (stack.pop().unwrap(), stack.pop().unwrap());
                    stack.push(format!("({left}+{right})"));
                }
            }
        }
        stack.pop().unwrap()
    }

    #[test]
    fn every_tree_is_cut_into_canonical_ones() {
        for shards in 1..=40 {
            for world in 1..=shards {
                let tree = Shards::new(shards, world).unwrap().tree(world);
                let mut values: Vec<String> = (0..tree.inputs()).map(|i| i.to_string()).collect();
                let expected = text(&tree, &values);
                let folds = canonical_folds(&tree);
                for inputs in &folds {
                    let of: Vec<String> = inputs.iter().map(|i| values[*i].clone()).collect();
                    values[inputs[0]] = text(&Tree::canonical(of.len()), &of);
                }
                let last = folds.last().unwrap()[0];
                assert_eq!(values[last], expected, "{shards} shards, {world} ranks");
            }
        }
    }

    #[test]
    fn folds_are_few() {
        let folds =
            |shards, world| canonical_folds(&Shards::new(shards, world).unwrap().tree(world));
        assert_eq!(folds(8, 3), [vec![1, 2], vec![0, 1, 3, 4]]);
        assert_eq!(folds(8, 8), [vec![0, 1, 2, 3, 4, 5, 6, 7]]);
    }
}
