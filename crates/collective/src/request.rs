//! What a call asks of a group.
//!
//! Every operation is described here once, from the memory that it borrows; it then either runs
//! (`group/ops.rs`) or is submitted (`group/submit.rs`). Before that, the group checks that the memory
//! is what the operation needs. Lengths are computed so that they cannot wrap: a sum or a product that
//! no buffer can have is as wrong as any other that the buffer does not have.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::buffers::Buffers;
use crate::call::Call;
use crate::dtype::{Dtype, Element, Reduction, Unit};
use crate::engine::{Memory, Plan};
use crate::error::{Error, InvalidCall};
use crate::schedule::{Algorithm, Layout, Op, Schedule, Topology};

/// A collective call, with the memory that it borrows until it has ended.
#[derive(Debug)]
pub struct Request<'a> {
    op: Op,
    barrier: bool,
    dtype: Dtype,
    reduction: Reduction,
    /// Elements of the whole buffer (all-reduce, broadcast, reduce) or of one block (the rest).
    count: usize,
    memory: Memory,
    input: Part,
    output: Part,
    unequal: Option<Unequal>,
    algorithm: Option<Algorithm>,
    unit: Unit,
    place: Option<Arc<str>>,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: a request is a borrow of plain numbers, or its maker has promised as much.
unsafe impl Send for Request<'_> {}

/// The input or the output of a call.
#[derive(Debug)]
struct Part {
    what: &'static str,
    address: *mut u8,
    /// Elements, unless its owner vouches for them.
    length: Option<usize>,
    /// Where the blocks start, in elements from the address, if they do not follow each other.
    starts: Option<Vec<usize>>,
}

/// Where blocks of different lengths start; one entry more than blocks.
#[derive(Debug)]
struct Unequal {
    /// Of the input, if it has several blocks.
    input: Option<Vec<usize>>,
    output: Vec<usize>,
    /// The longest block of any rank. `None` for an all-to-all whose ranks know their own blocks
    /// only: it begins with an exchange of the lengths.
    longest: Option<usize>,
    /// A hash of the lengths that all ranks must agree on; 0 if there is nothing to compare.
    shape: u64,
}

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

    /// Everybody gets everybody's input, in rank order.
    pub fn all_gather<T: Element>(input: &'a [T], output: &'a mut [T]) -> Request<'a> {
        Request::new(Op::AllGather, input, output, input.len())
    }

    /// As [`Request::all_gather`], `counts[r]` elements of rank `r`.
    pub fn all_gather_unequal<T: Element>(
        input: &'a [T],
        output: &'a mut [T],
        counts: &[usize],
    ) -> Request<'a> {
        let (longest, shape) = (counts.iter().copied().max(), shape(counts));
        let unequal = Unequal { input: None, output: offsets(counts), longest, shape };
        Request { unequal: Some(unequal), ..Request::all_gather(input, output) }
    }

    /// Everybody gets the root's buffer.
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

    /// The root gets everybody's input, in rank order; the others need no output.
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

    /// Rank `r` gets block `r` of everybody's input, in rank order; there are `world` blocks.
    pub fn all_to_all<T: Element>(
        input: &'a [T],
        output: &'a mut [T],
        world: usize,
    ) -> Request<'a> {
        Request::new(Op::AllToAll, input, output, input.len() / world)
    }

    /// As [`Request::all_to_all`]; the received blocks replace the sent ones.
    pub fn all_to_all_in_place<T: Element>(buffer: &'a mut [T], world: usize) -> Request<'a> {
        Request::in_place(Op::AllToAll, buffer.len() / world, buffer)
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
        Request { unequal: Some(unequal), ..Request::new(Op::AllToAll, input, output, 0) }
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

    /// A call on memory that nobody lends. See [`Request::sized`] for what `count` means; a rank
    /// that has no input or no output gives a null pointer, and equal pointers, or those of its
    /// own block and the whole, for a call in place.
    ///
    /// # Safety
    /// Until the call has ended, the memory is valid for what the operation reads of the input and
    /// writes of the output, and nobody else uses it.
    pub unsafe fn raw(
        op: Op,
        dtype: Dtype,
        count: usize,
        input: impl Into<Address>,
        output: impl Into<Address>,
    ) -> Result<Request<'a>, Error> {
        let input = Part::at("the input", input.into(), dtype)?;
        let output = Part::at("the output", output.into(), dtype)?;
        Ok(Request::assembled(op, dtype, count, input, output))
    }

    /// [`Request::all_to_all_unequal`] of bytes that nobody lends.
    ///
    /// # Safety
    /// As of [`Request::raw`].
    pub unsafe fn raw_all_to_all_unequal(
        input: *const u8,
        sent: &[usize],
        output: *mut u8,
        received: &[usize],
    ) -> Result<Request<'a>, Error> {
        // SAFETY: passed on from the caller.
        let request = unsafe { Request::raw(Op::AllToAll, Dtype::U8, 0, input, output) }?;
        let unequal = Request::all_to_all_unequal::<u8>(&[], sent, &mut [], received, None).unequal;
        Ok(Request { unequal, ..request })
    }

    /// As [`Request::reduce_scatter`]; the result replaces the block of this rank of the group.
    pub(crate) fn reduce_scatter_in_place<T: Element>(
        buffer: &'a mut [T],
        reduction: Reduction,
        (rank, world): (usize, usize),
    ) -> Request<'a> {
        let count = buffer.len() / world;
        let request = Request::in_place(Op::ReduceScatter, count, buffer);
        let output = request.output.block::<T>(rank, count);
        Request { output, ..request }.with_reduction(reduction)
    }

    /// As [`Request::all_gather`]; the input is the block of this rank of the group.
    pub(crate) fn all_gather_in_place<T: Element>(
        buffer: &'a mut [T],
        (rank, world): (usize, usize),
    ) -> Request<'a> {
        let count = buffer.len() / world;
        let request = Request::in_place(Op::AllGather, count, buffer);
        Request { input: request.input.block::<T>(rank, count), ..request }
    }

    /// Reduces in this way; a sum unless this says otherwise.
    #[must_use]
    pub fn with_reduction(self, reduction: Reduction) -> Request<'a> {
        Request { reduction, ..self }
    }

    /// Uses this algorithm, if one is given.
    #[must_use]
    pub fn with_algorithm(self, algorithm: impl Into<Option<Algorithm>>) -> Request<'a> {
        Request { algorithm: algorithm.into(), ..self }
    }

    /// Says what the caller counts in, for messages; equal on all ranks.
    #[must_use]
    pub fn with_unit(self, unit: Unit) -> Request<'a> {
        Request { unit, ..self }
    }

    /// Says from which line of the program the call comes, for messages.
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

    /// Elements that decide about the algorithm: of the buffer, or of the longest block. Equal on all
    /// ranks.
    pub fn extent(&self) -> usize {
        self.unequal.as_ref().and_then(|u| u.longest).unwrap_or(self.count)
    }

    /// What the caller called it.
    pub fn name(&self) -> &'static str {
        if self.barrier { "barrier" } else { self.op.name() }
    }

    pub(crate) fn place(&self) -> Option<&Arc<str>> {
        self.place.as_ref()
    }

    /// The call as all ranks must make it.
    pub(crate) fn call(&self, seq: u32, plan: Plan) -> Call {
        Call {
            seq,
            op: self.op,
            barrier: self.barrier,
            dtype: self.dtype,
            unit: self.unit,
            reduction: self.reduction,
            count: self.extent() as u64,
            shape: self.unequal.as_ref().map_or(0, |unequal| unequal.shape),
            algorithm: plan.algorithm,
            column: plan.column as u32,
        }
    }

    /// What is wrong with the call by itself, whatever its memory.
    pub(crate) fn check_kind(&self, topology: &Topology) -> Result<(), Error> {
        let Request { op, dtype, reduction, count, .. } = *self;
        let world = topology.world();
        if let Some(rank) = op.root().filter(|root| *root >= world) {
            return Err(InvalidCall::NoSuchRank { rank, world }.into());
        }
        if !reduction.supports(dtype) {
            return Err(InvalidCall::UnsupportedReduction { reduction, dtype }.into());
        }
        if let Some(algorithm) = self.algorithm
            && !algorithm.supports(op, topology)
        {
            return Err(InvalidCall::UnsupportedAlgorithm { algorithm, op: self.name() }.into());
        }
        // No memory is larger than this.
        let blocks = if op.has_blocks() { world } else { 1 };
        expect_at_most(count, isize::MAX as usize / dtype.size() / blocks)
    }

    /// The request, if its memory is what a rank of these needs for the call.
    pub fn check(self, rank: usize, topology: &Topology) -> Result<Checked<'a>, Error> {
        self.check_kind(topology)?;
        let world = topology.world();
        let blocks = self.count.saturating_mul(world);
        let (input, output) = match (self.op, &self.unequal) {
            (Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. }, _) => {
                (self.count, self.count)
            }
            (Op::ReduceScatter | Op::Scatter { .. }, _) => (blocks, self.count),
            (Op::AllToAll, None) => (blocks, blocks),
            (Op::AllGather | Op::Gather { .. }, None) => (self.count, blocks),
            (_, Some(unequal)) => unequal.expected(rank, world)?,
        };
        let (reads, writes) = match self.op {
            Op::Scatter { root } => (rank == root, true),
            Op::Reduce { root } | Op::Gather { root } => (true, rank == root),
            _ => (true, true),
        };
        if writes {
            self.output.expect(output, world)?;
        }
        if reads {
            self.input.expect(input, world)?;
        }
        Ok(Checked { request: self, rank, world })
    }

    fn new<T: Element>(op: Op, input: &'a [T], output: &'a mut [T], count: usize) -> Request<'a> {
        let address = input.as_ptr().cast_mut().cast();
        let (what, length, starts) = ("the input", Some(input.len()), None);
        let input = Part { what, address, length, starts };
        let output = Part { what: "the output", ..Part::of(output) };
        Request::assembled(op, T::DTYPE, count, input, output)
    }

    fn in_place<T: Element>(op: Op, count: usize, buffer: &'a mut [T]) -> Request<'a> {
        let whole = Part::of(buffer);
        Request::assembled(op, T::DTYPE, count, Part { starts: None, ..whole }, whole)
    }

    fn assembled(op: Op, dtype: Dtype, count: usize, input: Part, output: Part) -> Request<'a> {
        Request {
            op,
            barrier: false,
            dtype,
            reduction: Reduction::Sum,
            count,
            memory: Memory::Host,
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

/// A request whose memory was found to be what one rank of its group needs: safe to run.
#[derive(Debug)]
pub struct Checked<'a> {
    request: Request<'a>,
    rank: usize,
    world: usize,
}

impl<'a> std::ops::Deref for Checked<'a> {
    type Target = Request<'a>;

    fn deref(&self) -> &Request<'a> {
        &self.request
    }
}

impl Checked<'_> {
    /// The input; of no use where the rank has none.
    pub fn input(&self) -> *const u8 {
        self.input.address
    }

    /// The output; of no use where the rank has none, equal to the input for a call in place.
    pub fn output(&self) -> *mut u8 {
        self.output.address
    }

    /// The memory of the call, cut for a schedule into columns of so many elements, and the number of
    /// segments. Up to `in_flight` of them can be in flight; the caller gives them their
    /// [scratch](Buffers::scratch).
    pub fn cut(
        &self,
        schedule: &Schedule,
        column: usize,
        in_flight: usize,
    ) -> (Buffers<'_>, usize) {
        let (input_layout, output_layout, shape) = self.layouts(schedule, column);
        let longest = self.unequal.as_ref().and_then(|unequal| unequal.longest);
        let segments =
            longest.map_or_else(|| shape.segments(), |longest| longest.div_ceil(column).max(1));
        let buffers = Buffers {
            input: self.input(),
            input_layout,
            output: self.output(),
            output_layout,
            shape,
            scratch: std::ptr::null_mut(),
            cells: schedule.cells as usize,
            depth: if schedule.phases.len() > 1 { 1 } else { segments.min(in_flight) },
            dtype: self.dtype,
        };
        (buffers, segments)
    }

    /// The layouts of the input, of the output, and of what passes through scratch.
    fn layouts(&self, schedule: &Schedule, column: usize) -> (Layout<'_>, Layout<'_>, Layout<'_>) {
        let (count, rank) = (self.count, self.rank);
        let single = |count| Layout::single(rank, count, column);
        let equal = Layout::equal(count, self.world, column);
        match (self.op, &self.unequal) {
            (Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. }, _) => {
                let tiled = Layout::tiled(count, schedule.parts as usize, column);
                (tiled, tiled, tiled)
            }
            (Op::ReduceScatter | Op::Scatter { .. }, _) => {
                (self.input.layout(equal, count), single(count), equal)
            }
            (Op::AllToAll, None) => {
                (self.input.layout(equal, count), self.output.layout(equal, count), equal)
            }
            (Op::AllGather | Op::Gather { .. }, None) => {
                (single(count), self.output.layout(equal, count), equal)
            }
            (_, Some(unequal)) => {
                let output = Layout::unequal(&unequal.output, column);
                match &unequal.input {
                    Some(input) => {
                        let input = Layout::unequal(input, column);
                        (input, output, input)
                    }
                    None => {
                        (single(unequal.output[rank + 1] - unequal.output[rank]), output, output)
                    }
                }
            }
        }
    }

    /// Whether this is the call, on host memory, of this rank of so many.
    pub(crate) fn is(&self, call: &Call, rank: usize, world: usize) -> bool {
        let Request { op, dtype, reduction, memory, .. } = self.request;
        (op, dtype, reduction) == (call.op, call.dtype, call.reduction)
            && (memory, self.rank, self.world) == (Memory::Host, rank, world)
    }

    /// Elements to and from each rank, if it takes an exchange of them to know the longest block.
    pub(crate) fn lengths_to_exchange(&self) -> Option<Vec<i64>> {
        let unequal = self.unequal.as_ref().filter(|unequal| unequal.longest.is_none())?;
        let ends = unequal.input.iter().chain([&unequal.output]);
        Some(ends.flat_map(|ends| ends.windows(2).map(|e| (e[1] - e[0]) as i64)).collect())
    }

    pub(crate) fn set_longest(&mut self, longest: usize) {
        if let Some(unequal) = &mut self.request.unequal {
            unequal.longest = Some(longest);
        }
    }

    /// Forgets for how long the memory is borrowed.
    ///
    /// # Safety
    /// The memory stays valid, and nobody else uses it, until the call has ended.
    pub(crate) unsafe fn outlive(self) -> Checked<'static> {
        let Checked { request, rank, world } = self;
        Checked { request: Request { borrowed: PhantomData, ..request }, rank, world }
    }
}

impl Part {
    fn of<T: Element>(buffer: &mut [T]) -> Part {
        let (address, length) = (buffer.as_mut_ptr().cast(), Some(buffer.len()));
        Part { what: "the buffer", address, length, starts: None }
    }

    /// Blocks that lie apart are all ahead of the lowest.
    fn at(what: &'static str, address: Address, dtype: Dtype) -> Result<Part, Error> {
        let blocks = match address {
            Address::Together(address) => {
                return Ok(Part { what, address, length: None, starts: None });
            }
            Address::Apart(blocks) => blocks,
        };
        let address = blocks.iter().copied().min().unwrap_or(std::ptr::null_mut());
        let start = |block: &*mut u8| {
            let distance = block.addr() - address.addr();
            distance.is_multiple_of(dtype.size()).then_some(distance / dtype.size())
        };
        let starts: Option<Vec<usize>> = blocks.iter().map(start).collect();
        let starts = Some(starts.ok_or(InvalidCall::Distance { dtype })?);
        Ok(Part { what, address, length: None, starts })
    }

    /// The block of a rank.
    fn block<T: Element>(&self, rank: usize, count: usize) -> Part {
        let address = self.address.wrapping_add(rank * count * size_of::<T>());
        Part { what: self.what, address, length: Some(count), starts: None }
    }

    /// How blocks of `count` elements lie, if not as in `equal`.
    fn layout<'s>(&'s self, equal: Layout<'s>, count: usize) -> Layout<'s> {
        let column = equal.column();
        self.starts.as_ref().map_or(equal, |starts| Layout::separate(starts, count, column))
    }

    fn expect(&self, length: usize, world: usize) -> Result<(), Error> {
        if let Some(starts) = &self.starts {
            expect_length("the list of blocks", starts.len(), world)?;
        }
        match self.length {
            Some(actual) => expect_length(self.what, actual, length),
            None => expect_at_most(length, isize::MAX as usize),
        }
    }
}

impl Unequal {
    /// The lengths of input and output that fit the blocks.
    fn expected(&self, rank: usize, world: usize) -> Result<(usize, usize), Error> {
        let Unequal { input, output, .. } = self;
        let Some(input) = input else {
            expect_length("the list of counts", output.len() - 1, world)?;
            return Ok((output[rank + 1] - output[rank], output[world]));
        };
        expect_length("the list of sent counts", input.len() - 1, world)?;
        expect_length("the list of received counts", output.len() - 1, world)?;
        Ok((input[world], output[world]))
    }
}

fn expect_length(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected {
        return Ok(());
    }
    Err(InvalidCall::Length { what, actual, expected }.into())
}

fn expect_at_most(count: usize, most: usize) -> Result<(), Error> {
    expect_length("the buffer", count, count.min(most))
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

/// A hash of the lengths of blocks; never 0.
fn shape(counts: &[usize]) -> u64 {
    let mix = |hash: u64, &count: &usize| {
        (hash ^ count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    counts.iter().fold(counts.len() as u64, mix).max(1)
}
