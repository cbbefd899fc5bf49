//! The canonical order of a reduction.
//!
//! The sum over leaves `0..n` is the tree `sum(lo, hi) = sum(lo, mid) + sum(mid, hi)` with
//! `mid = lo +` the largest power of two smaller than `hi − lo`. Every algorithm that promises
//! canonical bits evaluates exactly this tree, whichever rank holds which part of it. A [`Tree`] is the
//! part of it that one rank evaluates at once: its inputs are values that already cover some
//! leaves, and it says in which order to combine them.

use std::ops::Range;

/// The point at which the canonical tree over `leaves` splits.
///
/// # Panics
/// If there are fewer than two leaves.
pub fn split(leaves: Range<usize>) -> usize {
    let n = leaves.len();
    assert!(n >= 2, "a tree over {n} leaves does not split");
    let half = n.next_power_of_two() / 2;
    leaves.start + half
}

/// The canonical subtrees of `0..world` that cover `leaves` with as few nodes as possible, in
/// order.
pub fn maximal_subtrees(world: usize, leaves: Range<usize>) -> Vec<Range<usize>> {
    fn visit(node: Range<usize>, leaves: &Range<usize>, out: &mut Vec<Range<usize>>) {
        if node.start >= leaves.end || node.end <= leaves.start {
            return;
        }
        if leaves.start <= node.start && node.end <= leaves.end {
            out.push(node);
            return;
        }
        let mid = split(node.clone());
        visit(node.start..mid, leaves, out);
        visit(mid..node.end, leaves, out);
    }
    let mut out = Vec::new();
    visit(0..world, &leaves, &mut out);
    out
}

/// One instruction of a [`Tree`], for a stack machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// Push input `i`.
    Input(u16),
    /// Pop right, pop left, push left ⊕ right.
    Combine,
}

/// An order in which to combine a list of inputs into one value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tree {
    nodes: Vec<Node>,
    inputs: usize,
    /// Whether this has the shape of the canonical tree over as many leaves as inputs.
    canonical: bool,
}

impl Tree {
    /// The canonical tree over `n` single leaves.
    pub fn canonical(n: usize) -> Tree {
        let covers: Vec<_> = (0..n).map(|i| i..i + 1).collect();
        Tree::over(0..n, &covers).expect("single leaves cover their range")
    }

    /// The part of the canonical tree over `leaves` that remains when input `i` already holds
    /// the value of the subtree `covers[i]`. `None` if the covers are not such subtrees, in any
    /// order, each leaf covered once.
    pub fn over(leaves: Range<usize>, covers: &[Range<usize>]) -> Option<Tree> {
        fn visit(node: Range<usize>, covers: &[Range<usize>], nodes: &mut Vec<Node>) -> Option<()> {
            if let Some(i) = covers.iter().position(|c| *c == node) {
                nodes.push(Node::Input(i as u16));
                return Some(());
            }
            if node.len() < 2 {
                return None;
            }
            let mid = split(node.clone());
            visit(node.start..mid, covers, nodes)?;
            visit(mid..node.end, covers, nodes)?;
            nodes.push(Node::Combine);
            Some(())
        }
        let mut nodes = Vec::with_capacity(2 * covers.len());
        visit(leaves, covers, &mut nodes)?;
        let used = nodes.iter().filter(|n| matches!(n, Node::Input(_))).count();
        if used != covers.len() {
            return None;
        }
        let first = covers.first().map_or(0, |c| c.start);
        let singles = covers.iter().enumerate().all(|(i, c)| *c == (first + i..first + i + 1));
        let canonical = singles || nodes == Tree::canonical(covers.len()).nodes;
        Some(Tree { nodes, inputs: covers.len(), canonical })
    }

    /// The tree that combines input 0 and input 1, in this order.
    pub fn pair() -> Tree {
        Tree::canonical(2)
    }

    /// The instructions, for a stack machine that starts empty and ends with one value.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Whether this combines its inputs as the canonical tree combines as many single leaves, in order.
    pub fn is_canonical(&self) -> bool {
        self.canonical
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_at_the_largest_smaller_power_of_two() {
        let splits: Vec<_> = (2..=9).map(|n| split(0..n)).collect();
        assert_eq!(splits, [1, 2, 2, 4, 4, 4, 4, 8]);
    }

    #[test]
    fn uneven_ranges_decompose_into_maximal_subtrees() {
        assert_eq!(maximal_subtrees(6, 0..3), [0..2, 2..3]);
        assert_eq!(maximal_subtrees(6, 3..6), [3..4, 4..6]);
        assert_eq!(maximal_subtrees(8, 4..8).len(), 1);
        assert_eq!(maximal_subtrees(5, 0..5).len(), 1);
    }

    #[test]
    fn subtrees_of_equal_size_combine_like_leaves() {
        let is_canonical =
            |world, covers: &[_]| Tree::over(0..world, covers).unwrap().is_canonical();
        assert!(is_canonical(4, &[0..2, 2..4]) && is_canonical(6, &[0..2, 2..4, 4..6]));
        assert!(is_canonical(3, &[0..2, 2..3]) && is_canonical(2, &[0..1, 1..2]));
        assert!(!is_canonical(4, &[0..2, 2..3, 3..4]));
        assert!(!is_canonical(4, &[2..4, 0..2]));
    }

    #[test]
    fn covers_must_be_subtrees() {
        assert!(Tree::over(0..4, &[0..2, 2..4]).is_some());
        assert!(Tree::over(0..4, &[2..4, 0..2]).is_some());
        assert!(Tree::over(0..4, &[0..1, 1..3, 3..4]).is_none());
        assert!(Tree::over(0..4, &[0..2, 2..4, 0..1]).is_none());
        assert!(Tree::over(0..2, std::slice::from_ref(&(0..1))).is_none());
    }
}
