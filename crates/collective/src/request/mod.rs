//! What a call asks of a group.
//!
//! Every operation is described here once, from the memory that it borrows; it then either runs
//! (`group/ops.rs`) or is submitted (`group/submit.rs`). Before that, the group checks that the memory
//! is what the operation needs ([`checked`]).

mod checked;

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::call::Call;
use crate::dtype::{Dtype, Element, Reduction, Unit};
use crate::engine::{CallPlan, Memory};
use crate::error::Error;
use crate::schedule::{Algorithm, Op};
pub use checked::Checked;
use checked::{Part, Unequal};

/// A collective call, with the memory that it borrows until it has ended.
#[derive(Debug)]
pub struct Request<'a> {
    op: Op,
    barrier: bool,
    dtype: Dtype,
    reduction: Reduction,
    /// Elements of the whole buffer (all-reduce, broadcast, reduce) or of one block (the rest).
    count: usize,
    /// Whether the count is that of all blocks, and the memory in place that of all, until the group
    /// says how many there are.
    is_whole: bool,
    /// Whether input and output are one buffer, for messages.
    in_place: bool,
    memory: Memory,
    stream: Option<*mut c_void>,
    input: Part,
    output: Part,
    unequal: Option<Box<Unequal>>,
    algorithm: Option<Algorithm>,
    unit: Unit,
    place: Option<Arc<str>>,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: a request is a borrow of plain numbers, or its maker has promised as much.
unsafe impl Send for Request<'_> {}

/// Where the input or output of a call is that its maker vouches for.
#[derive(Clone, Debug)]
pub enum Address {
    /// In one piece.
    Together(*mut u8),
    /// A block for each rank, anywhere: their distances are multiples of an element.
    Apart(Vec<*mut u8>),
}

impl<T> From<*const T> for Address {
    fn from(address: *const T) -> Address {
        Address::Together(address.cast_mut().cast())
    }
}

impl<T> From<*mut T> for Address {
    fn from(address: *mut T) -> Address {
        Address::Together(address.cast())
    }
}

impl<'a> Request<'a> {
    /// Replaces every rank's buffer by the reduction of all.
    pub fn all_reduce<T: Element>(buffer: &'a mut [T], reduction: Reduction) -> Request<'a> {
        Request::in_place(Op::AllReduce, buffer.len(), buffer).with_reduction(reduction)
    }

    /// The reduction of all inputs.
    pub fn all_reduce_into<T: Element>(
        input: &'a [T],
        output: &'a mut [T],
        reduction: Reduction,
    ) -> Request<'a> {
        Request::new(Op::AllReduce, input, output, input.len()).with_reduction(reduction)
    }

    /// Rank `r` gets block `r` of the reduction of all inputs.
    pub fn reduce_scatter<T: Element>(
        input: &'a [T],
        output: &'a mut [T],
        reduction: Reduction,
    ) -> Request<'a> {
        let count = output.len();
        Request::new(Op::ReduceScatter, input, output, count).with_reduction(reduction)
    }

    /// As [`Request::reduce_scatter`]; the result replaces this rank's block of the buffer.
    pub fn reduce_scatter_in_place<T: Element>(
        buffer: &'a mut [T],
        reduction: Reduction,
    ) -> Request<'a> {
        Request::of_blocks(Op::ReduceScatter, buffer).with_reduction(reduction)
    }

    /// Every rank gets the input of all ranks, in rank order.
    pub fn all_gather<T: Element>(input: &'a [T], output: &'a mut [T]) -> Request<'a> {
        Request::new(Op::AllGather, input, output, input.len())
    }

    /// As [`Request::all_gather`]; the input is this rank's block of the buffer.
    pub fn all_gather_in_place<T: Element>(buffer: &'a mut [T]) -> Request<'a> {
        Request::of_blocks(Op::AllGather, buffer)
    }

    /// As [`Request::all_gather`], `counts[r]` elements of rank `r`.
    pub fn all_gather_unequal<T: Element>(
        input: &'a [T],
        output: &'a mut [T],
        counts: &[usize],
    ) -> Request<'a> {
        let (longest, shape) = (counts.iter().copied().max(), Call::with_lengths(counts));
        let unequal = Unequal { input: None, output: offsets(counts), longest, shape };
        Request { unequal: Some(Box::new(unequal)), ..Request::all_gather(input, output) }
    }

    /// Every rank gets the root's buffer.
    pub fn broadcast<T: Element>(buffer: &'a mut [T], root: usize) -> Request<'a> {
        Request::in_place(Op::Broadcast { root }, buffer.len(), buffer)
    }

    /// The root gets the reduction of all inputs; the others need no output.
    pub fn reduce<T: Element>(
        input: &'a [T],
        output: Option<&'a mut [T]>,
        reduction: Reduction,
        root: usize,
    ) -> Request<'a> {
        let output = output.unwrap_or_default();
        Request::new(Op::Reduce { root }, input, output, input.len()).with_reduction(reduction)
    }

    /// As [`Request::reduce`]; the result replaces the root's buffer.
    pub fn reduce_in_place<T: Element>(
        buffer: &'a mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Request<'a> {
        Request::in_place(Op::Reduce { root }, buffer.len(), buffer).with_reduction(reduction)
    }

    /// The root gets the input of all ranks, in rank order; the others need no output.
    pub fn gather<T: Element>(
        input: &'a [T],
        output: Option<&'a mut [T]>,
        root: usize,
    ) -> Request<'a> {
        Request::new(Op::Gather { root }, input, output.unwrap_or_default(), input.len())
    }

    /// Rank `r` gets block `r` of the root's input; the others need none.
    pub fn scatter<T: Element>(
        input: Option<&'a [T]>,
        output: &'a mut [T],
        root: usize,
    ) -> Request<'a> {
        let count = output.len();
        Request::new(Op::Scatter { root }, input.unwrap_or_default(), output, count)
    }

    /// Rank `r` gets block `r` of every rank's input, in rank order.
    pub fn all_to_all<T: Element>(input: &'a [T], output: &'a mut [T]) -> Request<'a> {
        let whole = Request::new(Op::AllToAll, input, output, input.len());
        Request { is_whole: true, ..whole }
    }

    /// As [`Request::all_to_all`]; the received blocks replace the sent ones.
    pub fn all_to_all_in_place<T: Element>(buffer: &'a mut [T]) -> Request<'a> {
        Request::of_blocks(Op::AllToAll, buffer)
    }

    /// As [`Request::all_to_all`]: `sent[r]` elements go to rank `r`, `received[r]` come from it. If
    /// all ranks know the longest block of any of them, they need not ask each other.
    pub fn all_to_all_unequal<T: Element>(
        input: &'a [T],
        sent: &[usize],
        output: &'a mut [T],
        received: &[usize],
        longest: Option<usize>,
    ) -> Request<'a> {
        let (from, into) = (offsets(sent), offsets(received));
        let unequal = Unequal { input: Some(from), output: into, longest, shape: 0 };
        Request { unequal: Some(Box::new(unequal)), ..Request::new(Op::AllToAll, input, output, 0) }
    }

    /// A barrier: an all-reduce of nothing.
    pub fn barrier() -> Request<'a> {
        Request { barrier: true, ..Request::sized(Op::AllReduce, Dtype::U8, 0) }
    }

    /// A call of `count` elements without memory, to ask what it would cost. `count` is the whole
    /// buffer (all-reduce, broadcast, reduce) or one block (the rest).
    pub fn sized(op: Op, dtype: Dtype, count: usize) -> Request<'a> {
        Request::assembled(op, dtype, count, Part::of(&mut [0u8; 0]), Part::of(&mut [0u8; 0]))
    }

    /// A call on memory that no borrow protects. See [`Request::sized`] for what `count` means; a rank
    /// that has no input or no output gives a null pointer, and equal pointers, or those of its
    /// own block and the whole, for a call in place.
    ///
    /// # Safety
    /// Until the call has ended, the memory is valid for what the operation reads of the input and
    /// writes of the output, and no other code uses it.
    pub unsafe fn raw(
        op: Op,
        dtype: Dtype,
        count: usize,
        input: impl Into<Address>,
        output: impl Into<Address>,
    ) -> Result<Request<'a>, Error> {
        let (input, output) = (Part::at(input.into(), dtype)?, Part::at(output.into(), dtype)?);
        Ok(Request::assembled(op, dtype, count, input, output))
    }

    /// [`Request::all_to_all_unequal`] of bytes that no borrow protects.
    ///
    /// # Safety
    /// As of [`Request::raw`].
    pub unsafe fn raw_all_to_all_unequal(
        input: *const u8,
        sent: &[usize],
        output: *mut u8,
        received: &[usize],
        longest: Option<usize>,
    ) -> Result<Request<'a>, Error> {
        // SAFETY: passed on from the caller.
        let request = unsafe { Request::raw(Op::AllToAll, Dtype::U8, 0, input, output) }?;
        let sized = Request::all_to_all_unequal::<u8>(&[], sent, &mut [], received, longest);
        Ok(Request { unequal: sized.unequal, ..request })
    }

    /// [`Request::all_gather_unequal`] of bytes that no borrow protects, `own` of them this rank's.
    ///
    /// # Safety
    /// As of [`Request::raw`].
    pub unsafe fn raw_all_gather_unequal(
        input: *const u8,
        own: usize,
        output: *mut u8,
        counts: &[usize],
    ) -> Result<Request<'a>, Error> {
        // SAFETY: passed on from the caller.
        let request = unsafe { Request::raw(Op::AllGather, Dtype::U8, own, input, output) }?;
        let sized = Request::all_gather_unequal::<u8>(&[], &mut [], counts);
        Ok(Request { unequal: sized.unequal, ..request })
    }

    /// Reduces in this way; a sum unless this says otherwise.
    #[inline]
    #[must_use]
    pub fn with_reduction(self, reduction: Reduction) -> Request<'a> {
        Request { reduction, ..self }
    }

    /// Uses this algorithm, if one is given.
    #[inline]
    #[must_use]
    pub fn with_algorithm(self, algorithm: impl Into<Option<Algorithm>>) -> Request<'a> {
        Request { algorithm: algorithm.into(), ..self }
    }

    /// Says what the caller counts in, for messages; equal on all ranks.
    #[inline]
    #[must_use]
    pub fn with_unit(self, unit: Unit) -> Request<'a> {
        Request { unit, ..self }
    }

    /// Says from which line of the program the call comes, for messages.
    #[inline]
    #[must_use]
    pub fn with_place(self, place: Option<Arc<str>>) -> Request<'a> {
        Request { place, ..self }
    }

    /// Says where the memory of a [raw](Request::raw) call is; on the host unless this says otherwise.
    ///
    /// # Safety
    /// It is there.
    #[must_use]
    pub unsafe fn in_memory(self, memory: Memory) -> Request<'a> {
        Request { memory, ..self }
    }

    /// Puts a call on device memory into the order of a stream, by the name that the device's driver has
    /// for it: the call sees what was submitted before it, and what is submitted after the call has
    /// ended sees its result. Without a stream, the memory is ready when the call is made, and its
    /// result is there when the call has ended.
    ///
    /// # Safety
    /// It is such a name, and stays one until the call has ended. The memory stays valid until the stream has
    /// come to the end of the call.
    #[must_use]
    pub unsafe fn on_stream(self, stream: *mut c_void) -> Request<'a> {
        Request { stream: Some(stream), ..self }
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The reduction; `Sum` where nothing is reduced.
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// Elements of the whole buffer (all-reduce, broadcast, reduce) or of one block (the rest).
    pub fn count(&self) -> usize {
        self.count
    }

    /// The algorithm to be used for this call.
    pub fn algorithm(&self) -> Option<Algorithm> {
        self.algorithm
    }

    /// Where the memory is.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// In the order of which stream the call is to run.
    pub fn stream(&self) -> Option<*mut c_void> {
        self.stream
    }

    /// Elements that decide about the algorithm: of the buffer, or of the longest block. Equal on all
    /// ranks.
    pub fn extent(&self) -> usize {
        self.unequal.as_ref().and_then(|u| u.longest).unwrap_or(self.count)
    }

    /// Bytes of the [extent](Request::extent).
    pub(crate) fn bytes(&self) -> usize {
        self.extent() * self.dtype.size()
    }

    /// What the caller called it.
    pub fn name(&self) -> &'static str {
        if self.barrier { "barrier" } else { self.op.name() }
    }

    pub(crate) fn place(&self) -> Option<&Arc<str>> {
        self.place.as_ref()
    }

    /// The call as all ranks must make it.
    pub(crate) fn call(&self, seq: u32, plan: CallPlan) -> Call {
        Call {
            seq,
            op: self.op,
            barrier: self.barrier,
            dtype: self.dtype,
            unit: self.unit,
            reduction: self.reduction,
            count: self.extent() as u64,
            shape: self.unequal.as_ref().map_or(plan.registered, |unequal| unequal.shape),
            algorithm: plan.algorithm,
            column: plan.column as u32,
        }
    }

    fn new<T: Element>(op: Op, input: &'a [T], output: &'a mut [T], count: usize) -> Request<'a> {
        let (address, length) = (input.as_ptr().cast_mut().cast(), Some(input.len()));
        let input = Part { address, length, starts: None };
        Request::assembled(op, T::DTYPE, count, input, Part::of(output))
    }

    fn in_place<T: Element>(op: Op, count: usize, buffer: &'a mut [T]) -> Request<'a> {
        let output = Part::of(buffer);
        let input = Part { starts: None, ..output };
        Request { in_place: true, ..Request::assembled(op, T::DTYPE, count, input, output) }
    }

    fn of_blocks<T: Element>(op: Op, buffer: &'a mut [T]) -> Request<'a> {
        Request { is_whole: true, ..Request::in_place(op, buffer.len(), buffer) }
    }

    #[inline]
    fn assembled(op: Op, dtype: Dtype, count: usize, input: Part, output: Part) -> Request<'a> {
        Request {
            op,
            barrier: false,
            dtype,
            reduction: Reduction::Sum,
            count,
            is_whole: false,
            in_place: false,
            memory: Memory::Host,
            stream: None,
            input,
            output,
            unequal: None,
            algorithm: None,
            unit: Unit::OWN,
            place: None,
            borrowed: PhantomData,
        }
    }
}

/// Where blocks of these lengths start, one after the other, and where the last one ends. Counts whose
/// sum is no number at all end at the largest, which fits no buffer.
fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut end = 0usize;
    let ends = counts.iter().map(|count| {
        end = end.saturating_add(*count);
        end
    });
    std::iter::once(0).chain(ends).collect()
}
