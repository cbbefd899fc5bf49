//! Double binary tree.
//!
//! In a binary tree half of the ranks are leaves, which send everything once and reduce nothing,
//! while the others carry the load. Two trees, each for one half of the data, in which the
//! leaves of one are the inner ranks of the other, use all ranks evenly: about the bytes of a
//! ring at the latency of a tree, if many segments are in flight. The shape of the trees leaves
//! no room for the canonical order: repeatable, not canonical.
//!
//! The first tree is the in-order tree over positions `1..=n`: the root of a range is its
//! position with the most trailing zeros, so that odd positions are leaves and even ones are
//! not. The second swaps odd and even: mirrored if `n` is even, shifted by one if it is odd (one
//! rank is then a leaf in both).
//!
//! All trees reduce upwards and broadcast downwards; a rank at depth `d` talks to its parent in
//! round `D − d` on the way up and in round `D + d − 1` on the way down, where `D` is the depth of
//! the deeper tree.

use super::{Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Option<Schedule> {
    let Problem { op: Op::AllReduce, rank, world } = *problem else { return None };
    let depth = BinaryTree::ALL.iter().map(|tree| tree.depth(world)).max().unwrap_or(0);
    let mut rounds = vec![Round::default(); 2 * depth];
    for (index, tree) in BinaryTree::ALL.iter().enumerate() {
        tree.all_reduce(index, tree.node(rank, world), depth, &mut rounds);
    }
    Some(Schedule::of_rounds(rounds, 2, 4))
}

#[derive(Clone, Copy)]
enum BinaryTree {
    First,
    Second,
}

/// A rank's place in a tree.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    parent: Option<usize>,
    left: Option<usize>,
    right: Option<usize>,
    depth: usize,
}

impl BinaryTree {
    const ALL: [BinaryTree; 2] = [BinaryTree::First, BinaryTree::Second];

    fn position(self, rank: usize, world: usize) -> usize {
        match self {
            BinaryTree::First => rank + 1,
            BinaryTree::Second if world.is_multiple_of(2) => world - rank,
            BinaryTree::Second => (rank + 1) % world + 1,
        }
    }

    fn rank(self, position: usize, world: usize) -> usize {
        match self {
            BinaryTree::First => position - 1,
            BinaryTree::Second if world.is_multiple_of(2) => world - position,
            BinaryTree::Second => (position + world - 2) % world,
        }
    }

    fn node(self, rank: usize, world: usize) -> Node {
        let own = self.position(rank, world);
        let (mut low, mut high) = (1, world);
        let mut parent = None;
        let mut depth = 0;
        loop {
            let top = roundest(low, high);
            if own == top {
                let child =
                    |low, high| (low <= high).then(|| self.rank(roundest(low, high), world));
                let (left, right) = (child(low, top - 1), child(top + 1, high));
                return Node { parent, left, right, depth };
            }
            parent = Some(self.rank(top, world));
            depth += 1;
            if own < top {
                high = top - 1;
            } else {
                low = top + 1;
            }
        }
    }

    fn depth(self, world: usize) -> usize {
        (0..world).map(|rank| self.node(rank, world).depth).max().unwrap_or(0)
    }

    /// Add what a rank does in tree `index`, which carries block `index`.
    fn all_reduce(self, index: usize, node: Node, depth: usize, rounds: &mut [Round]) {
        let blocks = block(index);
        let cell = |child: u32| Area::Scratch(2 * index as u32 + child);
        let mut inputs = Vec::new();
        let children = [(node.left, cell(0)), (node.right, cell(1))];
        for (child, cell) in children {
            if let Some(from) = child {
                // A child is one deeper than this rank.
                let round = &mut rounds[depth - node.depth - 1];
                round.recvs.push(Recv { from, blocks: blocks.clone(), into: cell });
                inputs.push(cell);
            }
        }
        let mut sum = Area::Input;
        if !inputs.is_empty() {
            // In order: left subtree, own, right subtree. Only a leaf has no left child.
            inputs.insert(1, Area::Input);
            sum = if node.parent.is_none() { Area::Output } else { cell(0) };
            rounds[depth - node.depth - 1].folds.push(Fold {
                tree: Tree::canonical(inputs.len()),
                inputs,
                blocks: blocks.clone(),
                into: sum,
                root: node.parent.is_none(),
            });
        }
        if let Some(parent) = node.parent {
            let up = &mut rounds[depth - node.depth];
            up.sends.push(Send { to: parent, blocks: blocks.clone(), from: sum });
            let down = &mut rounds[depth + node.depth - 1];
            down.recvs.push(Recv { from: parent, blocks: blocks.clone(), into: Area::Output });
        }
        for to in [node.left, node.right].into_iter().flatten() {
            let down = &mut rounds[depth + node.depth];
            down.sends.push(Send { to, blocks: blocks.clone(), from: Area::Output });
        }
    }
}

/// The number in `low..=high` with the most trailing zeros.
fn roundest(low: usize, high: usize) -> usize {
    // Clear the low bits of `high` for as long as the result stays in the range.
    let mut number = high;
    while number & (number - 1) >= low {
        number &= number - 1;
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rank_carries_both_trees() {
        for world in 2..100 {
            for rank in 0..world {
                let inner =
                    BinaryTree::ALL.iter().filter(|t| t.node(rank, world).left.is_some()).count();
                assert!(inner <= 1, "rank {rank} of {world}");
            }
        }
    }

    #[test]
    fn the_trees_are_shallow() {
        for world in 2..100_usize {
            for tree in BinaryTree::ALL {
                assert!(tree.depth(world) <= world.ilog2() as usize);
            }
        }
    }
}
