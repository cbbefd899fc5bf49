//! What a call asks of the engine: checked before anything is sent.
//!
//! Every operation is described here once, from the caller's buffers; it then either runs
//! (`ops.rs`) or is submitted (`submit.rs`). Lengths are computed so that they cannot wrap: a sum or
//! a product that no buffer can have is as wrong as any other that the buffer does not have.

use crate::dtype::{Dtype, Element, Reduction, Unit};
use crate::error::{Error, InvalidCall};
use crate::schedule::Op;

use super::{Group, Request, Separate, Unequal};

impl Group {
    pub(super) fn all_reduce_request<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Request {
        Request::all_reduce(buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len(), reduction)
    }

    pub(super) fn all_reduce_into_request<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<Request, Error> {
        expect_length("the output", output.len(), input.len())?;
        Ok(Request::all_reduce(input.as_ptr(), output.as_mut_ptr(), input.len(), reduction))
    }

    pub(super) fn reduce_scatter_request<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<Request, Error> {
        expect_length("the input", input.len(), self.blocks_of(output.len()))?;
        let (op, count) = (Op::ReduceScatter, output.len());
        let request = Request::new(op, input.as_ptr(), output.as_mut_ptr(), count);
        Ok(Request { reduction, ..request })
    }

    pub(super) fn reduce_scatter_in_place_request<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<Request, Error> {
        let count = self.block_of(buffer.len())?;
        let own = buffer[self.rank() * count..].as_mut_ptr();
        let request = Request::new(Op::ReduceScatter, buffer.as_ptr(), own, count);
        Ok(Request { reduction, ..request })
    }

    pub(super) fn all_gather_request<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
    ) -> Result<Request, Error> {
        expect_length("the output", output.len(), self.blocks_of(input.len()))?;
        Ok(Request::new(Op::AllGather, input.as_ptr(), output.as_mut_ptr(), input.len()))
    }

    pub(super) fn all_gather_in_place_request<T: Element>(
        &self,
        buffer: &mut [T],
    ) -> Result<Request, Error> {
        let count = self.block_of(buffer.len())?;
        let own = buffer[self.rank() * count..].as_ptr();
        Ok(Request::new(Op::AllGather, own, buffer.as_mut_ptr(), count))
    }

    pub(super) fn all_gather_unequal_request<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<Request, Error> {
        expect_length("the list of counts", counts.len(), self.size())?;
        expect_length("the input", input.len(), counts[self.rank()])?;
        let offsets = offsets("the output", output.len(), counts)?;
        let longest = counts.iter().copied().max();
        let request = Request::new(Op::AllGather, input.as_ptr(), output.as_mut_ptr(), input.len());
        let shape = shape(counts);
        let unequal = Some(Unequal { input: Vec::new(), output: offsets, longest, shape });
        Ok(Request { unequal, ..request })
    }

    pub(super) fn broadcast_request<T: Element>(&self, buffer: &mut [T], root: usize) -> Request {
        let op = Op::Broadcast { root };
        Request::new(op, buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len())
    }

    pub(super) fn reduce_request<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        reduction: Reduction,
        root: usize,
    ) -> Result<Request, Error> {
        let output = self.output_at_root(output, root, input.len())?;
        let request = Request::new(Op::Reduce { root }, input.as_ptr(), output, input.len());
        Ok(Request { reduction, ..request })
    }

    pub(super) fn reduce_in_place_request<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Request {
        let op = Op::Reduce { root };
        let request = Request::new(op, buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len());
        Request { reduction, ..request }
    }

    pub(super) fn gather_request<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        root: usize,
    ) -> Result<Request, Error> {
        let output = self.output_at_root(output, root, self.blocks_of(input.len()))?;
        Ok(Request::new(Op::Gather { root }, input.as_ptr(), output, input.len()))
    }

    pub(super) fn scatter_request<T: Element>(
        &self,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<Request, Error> {
        let mut address = std::ptr::null();
        if self.rank() == root {
            let input = input.unwrap_or_default();
            expect_length("the input", input.len(), self.blocks_of(output.len()))?;
            address = input.as_ptr();
        }
        Ok(Request::new(Op::Scatter { root }, address, output.as_mut_ptr(), output.len()))
    }

    pub(super) fn all_to_all_request<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
    ) -> Result<Request, Error> {
        expect_length("the output", output.len(), input.len())?;
        let count = self.block_of(input.len())?;
        Ok(Request::new(Op::AllToAll, input.as_ptr(), output.as_mut_ptr(), count))
    }

    pub(super) fn all_to_all_in_place_request<T: Element>(
        &self,
        buffer: &mut [T],
    ) -> Result<Request, Error> {
        let count = self.block_of(buffer.len())?;
        Ok(Request::new(Op::AllToAll, buffer.as_ptr(), buffer.as_mut_ptr(), count))
    }

    pub(super) fn all_to_all_unequal_request<T: Element>(
        &self,
        input: &[T],
        sent: &[usize],
        output: &mut [T],
        received: &[usize],
    ) -> Result<Request, Error> {
        expect_length("the list of sent counts", sent.len(), self.size())?;
        expect_length("the list of received counts", received.len(), self.size())?;
        let from = offsets("the input", input.len(), sent)?;
        let into = offsets("the output", output.len(), received)?;
        let unequal = Some(Unequal { input: from, output: into, longest: None, shape: 0 });
        let request = Request::new(Op::AllToAll, input.as_ptr(), output.as_mut_ptr(), 0);
        Ok(Request { unequal, ..request })
    }

    /// What is wrong with a request by itself.
    pub(super) fn check(&self, request: &Request) -> Result<(), Error> {
        let Request { op, dtype, reduction, count, .. } = *request;
        if let Some(root) = op.root()
            && root >= self.size()
        {
            return Err(InvalidCall::NoSuchRank { rank: root, world: self.size() }.into());
        }
        if !reduction.supports(dtype) {
            return Err(InvalidCall::UnsupportedReduction { reduction, dtype }.into());
        }
        let Separate { input, output } = &request.separate;
        for starts in input.iter().chain(output) {
            expect_length("the list of blocks", starts.len(), self.size())?;
        }
        // No memory is larger than this.
        let blocks = if op.has_blocks() { self.size() } else { 1 };
        let most = isize::MAX as usize / dtype.size() / blocks;
        if count > most {
            let (what, actual, expected) = ("the buffer", count, most);
            return Err(InvalidCall::Length { what, actual, expected }.into());
        }
        Ok(())
    }

    pub(super) fn check_peer(&self, rank: usize) -> Result<(), Error> {
        if rank >= self.size() {
            return Err(InvalidCall::NoSuchRank { rank, world: self.size() }.into());
        }
        if rank == self.rank() {
            return Err(InvalidCall::ToSelf { rank }.into());
        }
        Ok(())
    }

    /// The length of a buffer with one block of `count` elements per rank; more than any buffer
    /// has if there is no such length.
    fn blocks_of(&self, count: usize) -> usize {
        count.saturating_mul(self.size())
    }

    /// The length of a block of a buffer with one block per rank.
    fn block_of(&self, length: usize) -> Result<usize, Error> {
        let count = length / self.size();
        expect_length("the buffer", length, count * self.size())?;
        Ok(count)
    }

    /// The output of an operation that only the root has one of.
    fn output_at_root<T>(
        &self,
        output: Option<&mut [T]>,
        root: usize,
        expected: usize,
    ) -> Result<*mut T, Error> {
        if self.rank() != root {
            return Ok(std::ptr::null_mut());
        }
        let output = output.unwrap_or_default();
        expect_length("the output", output.len(), expected)?;
        Ok(output.as_mut_ptr())
    }
}

impl Request {
    /// A call on buffers of `T`; see the fields for what `count` means.
    pub fn new<T: Element>(op: Op, input: *const T, output: *mut T, count: usize) -> Request {
        Request {
            op,
            barrier: false,
            dtype: T::DTYPE,
            reduction: Reduction::Sum,
            input: input.cast(),
            output: output.cast(),
            count,
            unequal: None,
            separate: Separate::default(),
            algorithm: None,
            unit: Unit::OWN,
            place: None,
        }
    }

    /// An all-reduce.
    pub fn all_reduce<T: Element>(
        input: *const T,
        output: *mut T,
        count: usize,
        reduction: Reduction,
    ) -> Request {
        Request { reduction, ..Request::new(Op::AllReduce, input, output, count) }
    }

    /// A barrier: an all-reduce of nothing.
    pub fn barrier() -> Request {
        let request = Request::new::<u8>(Op::AllReduce, std::ptr::null(), std::ptr::null_mut(), 0);
        Request { barrier: true, dtype: Dtype::U8, ..request }
    }
}

fn expect_length(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected {
        return Ok(());
    }
    Err(InvalidCall::Length { what, actual, expected }.into())
}

/// Where the blocks of a buffer of `length` elements start, and where the last one ends. Counts
/// whose sum is no number at all do not fit any buffer.
fn offsets(what: &'static str, length: usize, counts: &[usize]) -> Result<Vec<usize>, Error> {
    let mut offsets = Vec::with_capacity(counts.len() + 1);
    let mut end = 0usize;
    offsets.push(end);
    for count in counts {
        end = end.saturating_add(*count);
        offsets.push(end);
    }
    expect_length(what, length, end)?;
    Ok(offsets)
}

/// A hash of the lengths of blocks; never 0.
fn shape(counts: &[usize]) -> u64 {
    let mix = |hash: u64, &count: &usize| {
        (hash ^ count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    counts.iter().fold(counts.len() as u64, mix).max(1)
}
