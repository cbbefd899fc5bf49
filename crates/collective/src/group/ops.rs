//! The operations of a group.
//!
//! Every collective comes blocking, in place or out of place, and as a submission that owns its
//! buffer until it is done. [`Group::submit`] is what they all stand on, for callers that manage
//! memory themselves.

use crate::dtype::{Dtype, Element, Reduction};
use crate::error::{Error, InvalidCall};
use crate::schedule::Op;
use crate::side::Transfer;
use crate::work::{Pending, Work};

use super::{Explanation, Group, Request, Unequal};

impl Group {
    /// Replaces every rank's buffer by the reduction of all.
    pub fn all_reduce<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let request =
            Request::all_reduce(buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len(), reduction);
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// The reduction of all inputs; the input stays as it is, whatever happens.
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        expect_length("the output", output.len(), input.len())?;
        let request =
            Request::all_reduce(input.as_ptr(), output.as_mut_ptr(), input.len(), reduction);
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Starts an all-reduce of a buffer.
    pub fn submit_all_reduce<T: Element>(
        &self,
        mut buffer: Vec<T>,
        reduction: Reduction,
    ) -> Result<Pending<Vec<T>>, Error> {
        let request =
            Request::all_reduce(buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len(), reduction);
        // SAFETY: the vector's memory lives in the handle until the call is done.
        Ok(Pending::new(unsafe { self.submit(request) }?, buffer))
    }

    /// Rank `r` gets block `r` of the reduction of all inputs, which have one block per rank.
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        expect_length("the input", input.len(), output.len() * self.size())?;
        let count = output.len();
        let request =
            Request::new::<T>(Op::ReduceScatter, input.as_ptr(), output.as_mut_ptr(), count);
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(Request { reduction, ..request }) }
    }

    /// As [`Group::reduce_scatter`]; the result replaces this rank's block of the buffer, the
    /// other blocks hold unspecified data afterwards.
    pub fn reduce_scatter_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let count = self.block_of(buffer.len())?;
        let own = buffer[self.rank() * count..].as_mut_ptr();
        let request = Request::new::<T>(Op::ReduceScatter, buffer.as_ptr(), own, count);
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(Request { reduction, ..request }) }
    }

    /// Everybody gets everybody's input, in rank order.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        expect_length("the output", output.len(), input.len() * self.size())?;
        let request =
            Request::new::<T>(Op::AllGather, input.as_ptr(), output.as_mut_ptr(), input.len());
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::all_gather`]; this rank's block of the buffer is the input.
    pub fn all_gather_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<(), Error> {
        let count = self.block_of(buffer.len())?;
        let own = buffer[self.rank() * count..].as_ptr();
        let request = Request::new::<T>(Op::AllGather, own, buffer.as_mut_ptr(), count);
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::all_gather`] with inputs of different lengths: `counts[r]` elements of rank
    /// `r`.
    pub fn all_gather_unequal<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Error> {
        expect_length("the list of counts", counts.len(), self.size())?;
        expect_length("the input", input.len(), counts[self.rank()])?;
        let offsets = offsets(counts);
        expect_length("the output", output.len(), offsets[counts.len()])?;
        let longest = counts.iter().copied().max().unwrap_or(0);
        let request =
            Request::new::<T>(Op::AllGather, input.as_ptr(), output.as_mut_ptr(), input.len());
        let shape = shape(counts);
        let unequal = Some(Unequal { input: Vec::new(), output: offsets, longest, shape });
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(Request { unequal, ..request }) }
    }

    /// Everybody gets the root's buffer.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<(), Error> {
        let op = Op::Broadcast { root };
        let request = Request::new::<T>(op, buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// The root gets the reduction of all inputs; the others pass no output.
    pub fn reduce<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Error> {
        let output = self.at_root(output, root, "the output", input.len())?;
        let request = Request::new::<T>(Op::Reduce { root }, input.as_ptr(), output, input.len());
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(Request { reduction, ..request }) }
    }

    /// As [`Group::reduce`]; the result replaces the root's buffer.
    pub fn reduce_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Error> {
        let op = Op::Reduce { root };
        let request = Request::new::<T>(op, buffer.as_ptr(), buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(Request { reduction, ..request }) }
    }

    /// The root gets everybody's input, in rank order; the others pass no output.
    pub fn gather<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        root: usize,
    ) -> Result<(), Error> {
        let output = self.at_root(output, root, "the output", input.len() * self.size())?;
        let request = Request::new::<T>(Op::Gather { root }, input.as_ptr(), output, input.len());
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Rank `r` gets block `r` of the root's input; the others pass no input.
    pub fn scatter<T: Element>(
        &self,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        let input = match input {
            Some(input) if self.rank() == root => {
                expect_length("the input", input.len(), output.len() * self.size())?;
                input.as_ptr()
            }
            None if self.rank() == root => {
                expect_length("the input", 0, output.len() * self.size())?;
                std::ptr::null()
            }
            _ => std::ptr::null(),
        };
        let request =
            Request::new::<T>(Op::Scatter { root }, input, output.as_mut_ptr(), output.len());
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Rank `r` gets block `r` of everybody's input, in rank order.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        expect_length("the output", output.len(), input.len())?;
        let count = self.block_of(input.len())?;
        let request = Request::new::<T>(Op::AllToAll, input.as_ptr(), output.as_mut_ptr(), count);
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::all_to_all`]; the received blocks replace the sent ones.
    pub fn all_to_all_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<(), Error> {
        let count = self.block_of(buffer.len())?;
        let request = Request::new::<T>(Op::AllToAll, buffer.as_ptr(), buffer.as_mut_ptr(), count);
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::all_to_all`] with blocks of different lengths: `sent[r]` elements go to rank
    /// `r`, `received[r]` come from it.
    pub fn all_to_all_unequal<T: Element>(
        &self,
        input: &[T],
        sent: &[usize],
        output: &mut [T],
        received: &[usize],
    ) -> Result<(), Error> {
        expect_length("the list of sent counts", sent.len(), self.size())?;
        expect_length("the list of received counts", received.len(), self.size())?;
        let (from, into) = (offsets(sent), offsets(received));
        expect_length("the input", input.len(), from[sent.len()])?;
        expect_length("the output", output.len(), into[received.len()])?;
        let longest = self.agree_on_lengths(sent, received, size_of::<T>())?;
        let unequal = Some(Unequal { input: from, output: into, longest, shape: 0 });
        let request = Request::new::<T>(Op::AllToAll, input.as_ptr(), output.as_mut_ptr(), 0);
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(Request { unequal, ..request }) }
    }

    /// Waits until all ranks have come here.
    pub fn barrier(&self) -> Result<(), Error> {
        // SAFETY: no memory is involved.
        unsafe { self.run(Request::barrier()) }
    }

    /// Sends a buffer to another rank, which receives it with the same tag. Returns when the
    /// buffer may be used again.
    pub fn send<T: Element>(&self, buffer: &[T], to: usize, tag: u32) -> Result<(), Error> {
        let address = buffer.as_ptr().cast_mut().cast();
        // SAFETY: the buffer is borrowed for as long as the call lasts; a send only reads it.
        unsafe { self.submit_send(address, size_of_val(buffer), to, tag) }?.wait()
    }

    /// Receives a buffer that another rank sends with the same tag.
    pub fn receive<T: Element>(
        &self,
        buffer: &mut [T],
        from: usize,
        tag: u32,
    ) -> Result<(), Error> {
        let (address, length) = (buffer.as_mut_ptr().cast(), size_of_val(buffer));
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.submit_receive(address, length, from, tag) }?.wait()
    }

    /// Starts to send `length` bytes.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until the work is done.
    pub unsafe fn submit_send(
        &self,
        address: *mut u8,
        length: usize,
        to: usize,
        tag: u32,
    ) -> Result<Work, Error> {
        self.check_peer(to)?;
        let mut side = self.inner.side.lock().expect("no panic while locked");
        let work = side.work();
        side.send(Transfer { peer: to, tag, address, length, work: work.clone() });
        Ok(work)
    }

    /// Starts to receive `length` bytes.
    ///
    /// # Safety
    /// The memory stays valid, and nobody else uses it, until the work is done.
    pub unsafe fn submit_receive(
        &self,
        address: *mut u8,
        length: usize,
        from: usize,
        tag: u32,
    ) -> Result<Work, Error> {
        self.check_peer(from)?;
        let mut side = self.inner.side.lock().expect("no panic while locked");
        let work = side.work();
        side.receive(Transfer { peer: from, tag, address, length, work: work.clone() });
        Ok(work)
    }

    /// Runs a collective call and waits for it; on the caller's thread if the group is idle.
    ///
    /// # Safety
    /// The request's memory is valid for the operation, and nobody else uses it meanwhile.
    pub unsafe fn run(&self, request: Request) -> Result<(), Error> {
        self.check(&request)?;
        // SAFETY: passed on from the caller.
        unsafe { self.inner.queue.run(request) }
    }

    /// Starts a collective call. Calls of a group end in the order in which they were started.
    ///
    /// # Safety
    /// The request's memory is valid for the operation, and nobody else uses it, until the work
    /// is done.
    pub unsafe fn submit(&self, request: Request) -> Result<Work, Error> {
        self.check(&request)?;
        // SAFETY: passed on from the caller.
        Ok(unsafe { self.inner.queue.submit(request) })
    }

    /// What a call of this kind and size would do, and what it would cost.
    pub fn explain(&self, request: &Request) -> Result<Explanation, Error> {
        self.check(request)?;
        self.inner.queue.with_engine(|engine| engine.explain(request))
    }

    /// Compares what every rank means to send with what its peers expect; the longest block.
    fn agree_on_lengths(
        &self,
        sent: &[usize],
        received: &[usize],
        size: usize,
    ) -> Result<usize, Error> {
        let world = self.size();
        let own: Vec<i64> = sent.iter().chain(received).map(|&count| count as i64).collect();
        let mut all = vec![0; own.len() * world];
        self.all_gather(&own, &mut all)?;
        let count = |rank: usize, entry: usize| all[rank * 2 * world + entry] as u64;
        for (from, to) in (0..world).flat_map(|from| (0..world).map(move |to| (from, to))) {
            let (sent, expected) = (count(from, to), count(to, world + from));
            if sent != expected {
                let (sent, expected) = (sent * size as u64, expected * size as u64);
                return Err(Error::LengthMismatch { from, to, tag: 0, sent, expected });
            }
        }
        Ok(all.into_iter().max().unwrap_or(0) as usize)
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        let Request { op, dtype, reduction, .. } = *request;
        if let Some(root) = op.root()
            && root >= self.size()
        {
            return Err(InvalidCall::NoSuchRank { rank: root, world: self.size() }.into());
        }
        if !reduction.supports(dtype) {
            return Err(InvalidCall::UnsupportedReduction { reduction, dtype }.into());
        }
        Ok(())
    }

    fn check_peer(&self, rank: usize) -> Result<(), Error> {
        if rank >= self.size() {
            return Err(InvalidCall::NoSuchRank { rank, world: self.size() }.into());
        }
        if rank == self.rank() {
            return Err(InvalidCall::ToSelf { rank }.into());
        }
        Ok(())
    }

    /// The length of a block of a buffer with one block per rank.
    fn block_of(&self, length: usize) -> Result<usize, Error> {
        let count = length / self.size();
        expect_length("the buffer", length, count * self.size())?;
        Ok(count)
    }

    /// The output of an operation that only the root has one of.
    fn at_root<T>(
        &self,
        output: Option<&mut [T]>,
        root: usize,
        what: &'static str,
        expected: usize,
    ) -> Result<*mut T, Error> {
        if self.rank() != root {
            return Ok(std::ptr::null_mut());
        }
        let (address, actual) =
            output.map_or((std::ptr::null_mut(), 0), |o| (o.as_mut_ptr(), o.len()));
        expect_length(what, actual, expected)?;
        Ok(address)
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
            algorithm: None,
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

/// Where blocks of these lengths start, and where the last one ends.
fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0; counts.len() + 1];
    for (i, count) in counts.iter().enumerate() {
        offsets[i + 1] = offsets[i] + count;
    }
    offsets
}

/// A hash of the lengths of blocks; never 0.
fn shape(counts: &[usize]) -> u64 {
    let mix = |hash: u64, &count: &usize| {
        (hash ^ count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    counts.iter().fold(counts.len() as u64, mix).max(1)
}
