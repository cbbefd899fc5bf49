//! Evaluates any tree with the fused loops.
//!
//! The instructions of the tree run on a stack of *groups*. A group is a list of operands whose
//! canonical tree is still to be evaluated; an operand is an input or a *partial*, the value of
//! an earlier group. Combining two groups usually computes nothing: if the list of both is again
//! canonical and short enough for a fused loop, the two simply become one group. Otherwise each
//! is evaluated into a partial and the two partials become a group. What is left at the end is
//! one group, and its loop writes the result.
//!
//! So a tree that is a single group needs no partial and runs through all bytes at once. Any
//! other tree runs block by block: all groups on one block, then all on the next, so that
//! partials are written and read in the first-level cache. 64 inputs are eight groups of eight
//! and one group of eight partials; memory is still read and written once.

use super::copy::copy;
use super::fused::{Fused, MAX_OPERANDS, STRIDE};
use crate::tree::{Node, Tree};
use std::mem::MaybeUninit;
use std::ptr;

/// The loops that evaluate a tree, by number of operands from one up.
pub struct Kernel {
    /// For partials.
    pub body: &'static [Fused],
    /// For the result.
    pub root: &'static [Fused],
    /// What the loops for the result divide by.
    pub divisor: Option<u32>,
}

/// Bytes of a block. Smaller, and walking the tree for every block shows; larger, and partials
/// fall out of the first-level cache.
const BLOCK: usize = 2048;

/// Partials that can be alive at once. A canonical tree of 2¹⁶ inputs, the most that [`Node`] can
/// name, needs 58, and as a partial covers at least two inputs no tree of 128 inputs needs more.
const PARTIALS: usize = 64;

/// Operands that can wait on the stack, by the same count: of the largest canonical tree, 72.
const OPERANDS: usize = 128;

/// Groups that can wait on the stack: one for every level of a tree over `usize` leaves, and the
/// current one.
const GROUPS: usize = usize::BITS as usize + 1;

/// Where a result goes.
#[derive(Clone, Copy)]
pub struct Outputs {
    /// Always.
    pub into: *mut u8,
    /// Unless null.
    pub also: *mut u8,
}

/// Evaluates `tree` on the first `bytes` bytes of `inputs`.
///
/// # Safety
/// As for [`super::fold`], and the kernel's loops may run on this CPU.
pub unsafe fn evaluate(
    kernel: &Kernel,
    tree: &Tree,
    inputs: &[*const u8],
    out: Outputs,
    bytes: usize,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match (inputs, kernel.divisor) {
            (&[input], None) => {
                if !out.also.is_null() {
                    copy(input, out.also, bytes);
                }
                copy(input, out.into, bytes);
            }
            // The most frequent call, and the one whose latency counts: no need for a stack.
            _ if tree.is_canonical() && inputs.len() <= kernel.root.len() => {
                let divisor = kernel.divisor.unwrap_or(1);
                apply(kernel.root, inputs, out.into, out.also, bytes, divisor);
            }
            _ => {
                // A canonical tree that got here is more than one group.
                if tree.is_canonical() || !pass(kernel, tree, inputs, 0, out, bytes, None) {
                    blocks(kernel, tree, inputs, out, bytes);
                }
            }
        }
    }
}

/// Evaluates a tree of more than one group.
///
/// # Safety
/// As for [`evaluate`].
unsafe fn blocks(kernel: &Kernel, tree: &Tree, inputs: &[*const u8], out: Outputs, bytes: usize) {
    // A partial covers at least two inputs. A large stack frame costs a touch of each of its
    // pages, which small messages of few ranks would notice.
    const FEW: usize = 8;
    // SAFETY: the caller's promise.
    unsafe {
        if inputs.len() <= 2 * FEW {
            blockwise::<FEW>(kernel, tree, inputs, out, bytes);
        } else {
            blockwise::<PARTIALS>(kernel, tree, inputs, out, bytes);
        }
    }
}

/// [`blocks`] with at most `N` partials alive. Not inlined, to keep them out of the frame of the
/// trees that need none.
///
/// # Safety
/// As for [`evaluate`].
#[inline(never)]
unsafe fn blockwise<const N: usize>(
    kernel: &Kernel,
    tree: &Tree,
    inputs: &[*const u8],
    out: Outputs,
    bytes: usize,
) {
    let mut memory = MaybeUninit::<Blocks<N>>::uninit();
    let mut partials = Partials::new(&mut memory);
    for at in (0..bytes).step_by(BLOCK) {
        let len = BLOCK.min(bytes - at);
        // SAFETY: the caller's promise; `at + len <= bytes`, and `memory` outlives the pass.
        let done = unsafe { pass(kernel, tree, inputs, at, out, len, Some(&mut partials)) };
        debug_assert!(done, "a pass with partials always ends");
    }
}

/// Evaluates `len` bytes from `at` on. Without partials, returns false and has written nothing
/// if the tree needs one.
///
/// # Safety
/// As for [`evaluate`], with `at + len` for `bytes`. With partials, `len` is at most
/// [`BLOCK`].
unsafe fn pass(
    kernel: &Kernel,
    tree: &Tree,
    inputs: &[*const u8],
    at: usize,
    out: Outputs,
    len: usize,
    mut partials: Option<&mut Partials>,
) -> bool {
    let mut stack = Stack::new();
    for node in tree.nodes() {
        match *node {
            // SAFETY: every input is valid for `at + len` bytes.
            Node::Input(i) => stack.push(unsafe { inputs[usize::from(i)].add(at) }),
            Node::Combine => {
                if stack.join(kernel.body.len()) {
                    continue;
                }
                let Some(partials) = partials.as_deref_mut() else { return false };
                stack.combine(|group| {
                    let partial = partials.replace(group);
                    // SAFETY: operands are valid for `len <= BLOCK` bytes, as inputs or as
                    // partials; so is the new partial, which may be one of them.
                    unsafe { apply(kernel.body, group, partial, ptr::null_mut(), len, 1) };
                    partial
                });
            }
        }
    }
    let root = stack.group();
    let divisor = kernel.divisor.unwrap_or(1);
    // SAFETY: operands are valid for `len` bytes and outputs for `at + len`. All inputs of these
    // bytes have been read into partials or are read by the last loop before it overwrites them.
    unsafe {
        let into = out.into.add(at);
        let also = if out.also.is_null() { out.also } else { out.also.add(at) };
        apply(kernel.root, root, into, also, len, divisor);
    }
    partials.into_iter().for_each(|p| p.release_all(root));
    true
}

/// Runs the loop for as many operands as there are. The bytes that are no full stride are
/// processed in padded copies: the loops then need no second, slower body for their last lanes.
///
/// # Safety
/// Operands and outputs are valid for `len` bytes and equal or disjoint, and the loops may run on
/// this CPU.
unsafe fn apply(
    loops: &[Fused],
    operands: &[*const u8],
    into: *mut u8,
    also: *mut u8,
    len: usize,
    divisor: u32,
) {
    let fused = loops[operands.len() - 1];
    let strides = len - len % STRIDE;
    let rest = len % STRIDE;
    // SAFETY: the caller's promise; `strides + rest == len`, and a pad holds a full stride.
    unsafe {
        if strides > 0 {
            fused(operands.as_ptr(), into, also, strides, divisor);
        }
        if rest > 0 {
            let mut pads = [const { MaybeUninit::<[u8; STRIDE]>::uninit() }; MAX_OPERANDS];
            let mut padded = [ptr::null(); MAX_OPERANDS];
            for ((pad, padded), operand) in pads.iter_mut().zip(&mut padded).zip(operands) {
                let pad = pad.write([0; STRIDE]);
                pad.as_mut_ptr().copy_from_nonoverlapping(operand.add(strides), rest);
                *padded = pad.as_ptr();
            }
            let mut result = [0; STRIDE];
            fused(padded.as_ptr(), result.as_mut_ptr(), ptr::null_mut(), STRIDE, divisor);
            into.add(strides).copy_from_nonoverlapping(result.as_ptr(), rest);
            if !also.is_null() {
                also.add(strides).copy_from_nonoverlapping(result.as_ptr(), rest);
            }
        }
    }
}

/// The stack of groups: their operands, one after the other, and how many each has.
struct Stack {
    operands: [*const u8; OPERANDS],
    top: usize,
    groups: [u8; GROUPS],
    depth: usize,
}

impl Stack {
    fn new() -> Stack {
        Stack { operands: [ptr::null(); OPERANDS], top: 0, groups: [0; GROUPS], depth: 0 }
    }

    /// Pushes a group of one operand.
    fn push(&mut self, operand: *const u8) {
        self.operands[self.top] = operand;
        self.top += 1;
        self.groups[self.depth] = 1;
        self.depth += 1;
    }

    /// Makes one group of the upper two if it is canonical and has at most `limit` operands.
    fn join(&mut self, limit: usize) -> bool {
        let [.., left, right] = &mut self.groups[..self.depth] else {
            unreachable!("a tree combines two values that it has pushed");
        };
        let joined = *left + *right;
        let canonical = left.is_power_of_two() && right <= left;
        if canonical && usize::from(joined) <= limit {
            *left = joined;
            self.depth -= 1;
            return true;
        }
        false
    }

    /// Replaces the upper two groups by one of their values.
    fn combine(&mut self, mut evaluate: impl FnMut(&[*const u8]) -> *mut u8) {
        let mut value = |group: &[*const u8]| match *group {
            [operand] => operand,
            _ => evaluate(group).cast_const(),
        };
        let right = self.top - usize::from(self.groups[self.depth - 1]);
        let left = right - usize::from(self.groups[self.depth - 2]);
        let values = [value(&self.operands[left..right]), value(&self.operands[right..self.top])];
        self.operands[left..left + 2].copy_from_slice(&values);
        self.top = left + 2;
        self.depth -= 1;
        self.groups[self.depth - 1] = 2;
    }

    /// The operands of the last group.
    fn group(&self) -> &[*const u8] {
        debug_assert_eq!(self.depth, 1, "a tree leaves one value");
        &self.operands[..self.top]
    }
}

/// Memory of `N` partials.
#[repr(C, align(64))]
struct Blocks<const N: usize>([[u8; BLOCK]; N]);

/// Which partials are in use. The lowest free one is taken first, so that those which are warm in
/// the cache are used again.
struct Partials {
    base: *mut u8,
    bytes: usize,
    /// One bit each.
    free: u64,
}

impl Partials {
    fn new<const N: usize>(memory: &mut MaybeUninit<Blocks<N>>) -> Partials {
        const { assert!(0 < N && N <= u64::BITS as usize) };
        let free = u64::MAX >> (u64::BITS as usize - N);
        Partials { base: memory.as_mut_ptr().cast(), bytes: size_of::<Blocks<N>>(), free }
    }

    /// A partial of [`BLOCK`] bytes for the value of `group`, in place of those that it consumes.
    fn replace(&mut self, group: &[*const u8]) -> *mut u8 {
        self.release_all(group);
        assert!(self.free != 0, "the tree needs too many partials at once");
        let slot = self.free.trailing_zeros() as usize;
        self.free &= self.free - 1;
        self.base.wrapping_add(slot * BLOCK)
    }

    /// Gives back the operands that are partials.
    fn release_all(&mut self, group: &[*const u8]) {
        group.iter().for_each(|&operand| self.release(operand));
    }

    /// Gives back an operand if it is a partial.
    fn release(&mut self, operand: *const u8) {
        let offset = operand.addr().wrapping_sub(self.base.addr());
        if offset < self.bytes {
            self.free |= 1 << (offset / BLOCK);
        }
    }
}
