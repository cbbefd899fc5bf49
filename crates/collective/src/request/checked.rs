//! Whether the memory of a call is what it needs, and how it is cut.
//!
//! Lengths are computed so that they cannot wrap: a sum or a product that no buffer can have is as wrong
//! as any other that the buffer does not have.

use std::marker::PhantomData;

use super::{Address, Request};
use crate::buffers::Buffers;
use crate::call::Call;
use crate::dtype::{Dtype, Element};
use crate::engine::Memory;
use crate::error::{Error, InvalidCall};
use crate::schedule::{Layout, Op, Schedule, Topology};

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
    /// The memory stays valid, and no other code uses it, until the call has ended.
    pub(crate) unsafe fn outlive(self) -> Checked<'static> {
        let Checked { request, rank, world } = self;
        Checked { request: Request { borrowed: PhantomData, ..request }, rank, world }
    }
}

/// The input or the output of a call.
#[derive(Debug)]
pub(super) struct Part {
    pub address: *mut u8,
    /// Elements, unless its owner vouches for them.
    pub length: Option<usize>,
    /// Where the blocks start, in elements from the address, if they do not follow each other.
    pub starts: Option<Box<[usize]>>,
}

/// Where blocks of different lengths start; one entry more than blocks.
#[derive(Debug)]
pub(super) struct Unequal {
    /// Of the input, if it has several blocks.
    pub input: Option<Vec<usize>>,
    pub output: Vec<usize>,
    /// The longest block of any rank. `None` for an all-to-all whose ranks know their own blocks
    /// only: it begins with an exchange of the lengths.
    pub longest: Option<usize>,
    /// A hash of the lengths that all ranks must agree on; 0 if there is nothing to compare.
    pub shape: u64,
}

impl<'a> Request<'a> {
    /// The addresses of the buffer of which a rank, one of so many, would read parts where other ranks have them: if
    /// all ranks have it alike, as they do for a call in place.
    pub(crate) fn buffer(&self, rank: usize, world: usize) -> Option<std::ops::Range<usize>> {
        let (from, into) = (self.input.address.addr(), self.output.address.addr());
        let block = self.count.saturating_mul(self.dtype.size());
        let (start, blocks) = match self.op {
            Op::AllReduce | Op::Broadcast { .. } if from == into => (from, 1),
            Op::ReduceScatter => (from, world),
            Op::AllGather if from == into.wrapping_add(rank * block) => (into, world),
            _ => return None,
        };
        let is_plain = self.memory == Memory::Host && self.unequal.is_none();
        let is_together = self.input.starts.is_none() && self.output.starts.is_none();
        let end = start.saturating_add(block.saturating_mul(blocks));
        (is_plain && is_together).then_some(start..end)
    }

    /// Finds the blocks of a rank, one of so many.
    pub(crate) fn divide(&mut self, rank: usize, world: usize) {
        if std::mem::take(&mut self.is_whole) {
            self.count /= world;
            match self.op {
                Op::ReduceScatter => self.output = self.output.block(rank, self.count, self.dtype),
                Op::AllGather => self.input = self.input.block(rank, self.count, self.dtype),
                _ => {}
            }
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
        self.check_then(rank, topology, Ok)
    }

    /// As [`Request::check`], but hands the request on instead of returning it: that moves it once in
    /// memory, where each function that returns it moves it again, which small calls notice.
    #[inline]
    pub(crate) fn check_then<R>(
        self,
        rank: usize,
        topology: &Topology,
        then: impl FnOnce(Checked<'a>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let world = topology.world();
        let mut checked = Checked { request: self, rank, world };
        checked.request.divide(rank, world);
        checked.check_kind(topology)?;
        checked.check_memory(rank, world)?;
        then(checked)
    }

    fn check_memory(&self, rank: usize, world: usize) -> Result<(), Error> {
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
            let what = if self.in_place { "the buffer" } else { "the output" };
            self.output.expect(what, output, world)?;
        }
        if reads {
            let what = if self.in_place { "the buffer" } else { "the input" };
            self.input.expect(what, input, world)?;
        }
        Ok(())
    }
}

impl Part {
    pub fn of<T: Element>(buffer: &mut [T]) -> Part {
        let (address, length) = (buffer.as_mut_ptr().cast(), Some(buffer.len()));
        Part { address, length, starts: None }
    }

    /// Blocks that lie apart are all ahead of the lowest.
    pub fn at(address: Address, dtype: Dtype) -> Result<Part, Error> {
        let blocks = match address {
            Address::Together(address) => return Ok(Part { address, length: None, starts: None }),
            Address::Apart(blocks) => blocks,
        };
        let address = blocks.iter().copied().min().unwrap_or(std::ptr::null_mut());
        let start = |block: &*mut u8| {
            let distance = block.addr() - address.addr();
            distance.is_multiple_of(dtype.size()).then_some(distance / dtype.size())
        };
        let starts: Option<Box<[usize]>> = blocks.iter().map(start).collect();
        let starts = Some(starts.ok_or(InvalidCall::Distance { dtype })?);
        Ok(Part { address, length: None, starts })
    }

    /// The block of a rank.
    fn block(&self, rank: usize, count: usize, dtype: Dtype) -> Part {
        let address = self.address.wrapping_add(rank * count * dtype.size());
        Part { address, length: Some(count), starts: None }
    }

    /// How blocks of `count` elements lie, if not as in `equal`.
    fn layout<'s>(&'s self, equal: Layout<'s>, count: usize) -> Layout<'s> {
        let column = equal.column();
        self.starts.as_ref().map_or(equal, |starts| Layout::separate(starts, count, column))
    }

    fn expect(&self, what: &'static str, length: usize, world: usize) -> Result<(), Error> {
        if let Some(starts) = &self.starts {
            expect_length("the list of blocks", starts.len(), world)?;
        }
        match self.length {
            Some(actual) => expect_length(what, actual, length),
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
        if let Some(longest) = self.longest {
            let own = input.windows(2).chain(output.windows(2)).map(|ends| ends[1] - ends[0]);
            expect_at_least("the longest block", longest, own.max().unwrap_or(0))?;
        }
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

fn expect_at_least(what: &'static str, count: usize, least: usize) -> Result<(), Error> {
    expect_length(what, count, count.max(least))
}
