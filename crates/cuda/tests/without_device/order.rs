//! The order in which the kernels merge, against the canonical tree.

use unisono_collective::tree::{Node, Tree, split};
use unisono_collective::{Dtype, Reduction, kernel};

use crate::common::{element, reductions, same};

/// Leaves that are read at a time.
const LEAVES: usize = 8;

/// The order of `tree` in `kernels/fold.cu`: eight leaves at a time, as a binary counter counts, then
/// what is left from right to left.
fn merge<T>(n: usize, leaf: impl Fn(usize) -> T, combine: impl Fn(T, T) -> T) -> T {
    let mut stack: Vec<T> = Vec::new();
    let complete = |first: usize, leaves: usize| -> T {
        let mut values: Vec<T> = (first..first + leaves).map(&leaf).collect();
        while values.len() > 1 {
            let mut pairs = values.into_iter();
            let mut next = Vec::new();
            while let (Some(left), Some(right)) = (pairs.next(), pairs.next()) {
                next.push(combine(left, right));
            }
            values = next;
        }
        values.pop().expect("one is left")
    };
    for group in 0..n / LEAVES {
        let mut subtree = complete(group * LEAVES, LEAVES);
        let mut counter = group;
        while counter & 1 == 1 {
            subtree = combine(stack.pop().expect("a subtree for each bit"), subtree);
            counter >>= 1;
        }
        stack.push(subtree);
    }
    let mut next = n / LEAVES * LEAVES;
    for leaves in [4, 2, 1].into_iter().filter(|leaves| (n % LEAVES) & leaves != 0) {
        stack.push(complete(next, leaves));
        next += leaves;
    }
    let root = stack.pop().expect("at least one leaf");
    stack.into_iter().rev().fold(root, |right, left| combine(left, right))
}

/// The instructions of the canonical tree, by its definition.
fn canonical(leaves: std::ops::Range<usize>, nodes: &mut Vec<Node>) {
    if leaves.len() == 1 {
        return nodes.push(Node::Input(leaves.start as u16));
    }
    let mid = split(leaves.clone());
    canonical(leaves.start..mid, nodes);
    canonical(mid..leaves.end, nodes);
    nodes.push(Node::Combine);
}

#[test]
fn the_counter_makes_the_canonical_tree() {
    for n in (1..=1100).chain([4095, 4096, 4097, 65535]) {
        let merged = merge(
            n,
            |i| vec![Node::Input(i as u16)],
            |mut left: Vec<Node>, right| {
                left.extend(right);
                left.push(Node::Combine);
                left
            },
        );
        let mut expected = Vec::new();
        canonical(0..n, &mut expected);
        assert!(merged == expected, "{n} leaves");
    }
    for n in [1, 7, 8, 9, 100, 1100] {
        let mut expected = Vec::new();
        canonical(0..n, &mut expected);
        assert_eq!(Tree::canonical(n).nodes(), expected, "{n} leaves");
    }
}

/// Combines two buffers, or finishes one, as the host does.
fn fold(
    dtype: Dtype,
    reduction: Reduction,
    tree: &Tree,
    inputs: &[&Vec<u64>],
    count: usize,
    divisor: Option<u32>,
) -> Vec<u64> {
    let mut into = vec![0_u64; count * dtype.size() / 8];
    let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
    // SAFETY: buffers of as many elements, aligned for any type, and all apart.
    unsafe {
        let into = into.as_mut_ptr().cast();
        kernel::fold(dtype, reduction, tree, &pointers, into, None, count, divisor);
    }
    into
}

/// The bits of every element of a buffer.
fn elements(dtype: Dtype, buffer: &[u64]) -> impl Iterator<Item = u64> {
    let bits = 8 * dtype.size();
    let of = move |word: u64| {
        (0..64 / bits).map(move |i| word >> (i * bits) & (u64::MAX >> (64 - bits)))
    };
    buffer.iter().copied().flat_map(of)
}

#[test]
fn merged_values_are_those_of_the_host_for_every_type() {
    const COUNT: usize = 64;
    for dtype in Dtype::ALL {
        let values = |buffer: usize| {
            let bytes: Vec<u8> = (0..COUNT)
                .flat_map(|i| element(dtype, buffer, i).to_le_bytes()[..dtype.size()].to_vec())
                .collect();
            let words = bytes.chunks_exact(8);
            words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect::<Vec<_>>()
        };
        for n in (1..=40).chain([63, 64, 65, 100, 481, 1024, 1100]) {
            let leaves: Vec<Vec<u64>> = (0..n).map(values).collect();
            let (pair, tree) = (Tree::pair(), Tree::canonical(n));
            for (reduction, divisor) in reductions(dtype, n) {
                let merged = merge(
                    n,
                    |i| leaves[i].clone(),
                    |left, right| fold(dtype, reduction, &pair, &[&left, &right], COUNT, None),
                );
                let finished =
                    fold(dtype, reduction, &Tree::canonical(1), &[&merged], COUNT, divisor);
                let all: Vec<&Vec<u64>> = leaves.iter().collect();
                let expected = fold(dtype, reduction, &tree, &all, COUNT, divisor);
                for (found, expected) in elements(dtype, &finished).zip(elements(dtype, &expected))
                {
                    assert!(
                        same(dtype, found, expected),
                        "{reduction} of {n} {dtype} by {divisor:?}"
                    );
                }
            }
        }
    }
}
