//! The operations of a group that wait for their end.
//!
//! Every collective comes in place or out of place. `submit.rs` has the same operations without
//! the waiting. [`Group::run`] and [`Group::submit`] are what they all stand on, for callers that
//! manage memory themselves.

use crate::dtype::{Element, Reduction};
use crate::engine::Explanation;
use crate::error::{Error, InvalidCall};
use crate::messages::Transfer;
use crate::registered::Registered;
use crate::request::{Checked, Request};
use crate::work::Work;

use super::Group;

impl Group {
    /// A buffer of so many elements, at first 0, that the other ranks of the host can read. All ranks call this,
    /// in order with their other calls, and with the same number.
    ///
    /// A broadcast or an all-gather in place, and an all-reduce or a reduce-scatter of 2 MiB or more, on such a buffer or
    /// the same part of it on all ranks reads the other ranks' buffers where they are, instead of copies: the bits are
    /// the same, and large ones take less time. Where not all ranks share a host, it is like any other memory.
    ///
    /// # Errors
    ///
    /// [`Error::System`] on all ranks if one of them has too little memory; the group goes on.
    pub fn allocate<T: Element>(&self, count: usize) -> Result<Registered<T>, Error> {
        let most = isize::MAX as usize / size_of::<T>();
        if count > most {
            let what = "the memory that all ranks allocate";
            return Err(InvalidCall::Length { what, actual: count, expected: most }.into());
        }
        let allocation = self.inner.queue.allocate((count * size_of::<T>()).max(1))?;
        Ok(Registered::new(allocation, count))
    }

    /// Replaces every rank's buffer by the reduction of all.
    pub fn all_reduce<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.run(Request::all_reduce(buffer, reduction)).map(drop)
    }

    /// The reduction of all inputs; the input stays as it is, whatever happens.
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.run(Request::all_reduce_into(input, output, reduction)).map(drop)
    }

    /// Rank `r` gets block `r` of the reduction of all inputs, which have one block per rank.
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.run(Request::reduce_scatter(input, output, reduction)).map(drop)
    }

    /// As [`Group::reduce_scatter`]; the result replaces this rank's block of the buffer, the
    /// other blocks hold unspecified data afterwards.
    pub fn reduce_scatter_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.run(Request::reduce_scatter_in_place(buffer, reduction)).map(drop)
    }

    /// Every rank gets the inputs of all, in rank order.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::all_gather(input, output)).map(drop)
    }

    /// As [`Group::all_gather`]; this rank's block of the buffer is the input.
    pub fn all_gather_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<(), Error> {
        self.run(Request::all_gather_in_place(buffer)).map(drop)
    }

    /// As [`Group::all_gather`] with inputs of different lengths: `counts[r]` elements of rank
    /// `r`.
    pub fn all_gather_unequal<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Error> {
        self.run(Request::all_gather_unequal(input, output, counts)).map(drop)
    }

    /// Every rank gets the root's buffer.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::broadcast(buffer, root)).map(drop)
    }

    /// The root gets the reduction of all inputs; the others pass no output.
    pub fn reduce<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::reduce(input, output, reduction, root)).map(drop)
    }

    /// As [`Group::reduce`]; the result replaces the root's buffer.
    pub fn reduce_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::reduce_in_place(buffer, reduction, root)).map(drop)
    }

    /// The root gets the inputs of all ranks, in rank order; the others pass no output.
    pub fn gather<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::gather(input, output, root)).map(drop)
    }

    /// Rank `r` gets block `r` of the root's input; the others pass no input.
    pub fn scatter<T: Element>(
        &self,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::scatter(input, output, root)).map(drop)
    }

    /// Rank `r` gets block `r` of every rank's input, in rank order.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::all_to_all(input, output)).map(drop)
    }

    /// As [`Group::all_to_all`]; the received blocks replace the sent ones.
    pub fn all_to_all_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<(), Error> {
        self.run(Request::all_to_all_in_place(buffer)).map(drop)
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
        self.run(Request::all_to_all_unequal(input, sent, output, received, None)).map(drop)
    }

    /// Waits until all ranks have come here.
    pub fn barrier(&self) -> Result<(), Error> {
        self.run(Request::barrier()).map(drop)
    }

    /// Sends a buffer to another rank, which receives it with the same tag. Returns when the
    /// buffer may be used again.
    pub fn send<T: Element>(&self, buffer: &[T], to: usize, tag: u32) -> Result<(), Error> {
        let address = buffer.as_ptr().cast_mut().cast();
        // SAFETY: the buffer is borrowed until the wait is over, and only read.
        unsafe { self.submit_send(address, size_of_val(buffer), to, tag) }?.wait()
    }

    /// Receives a buffer that another rank sends with the same tag.
    pub fn receive<T: Element>(
        &self,
        buffer: &mut [T],
        from: usize,
        tag: u32,
    ) -> Result<(), Error> {
        self.receive_from(buffer, Some(from), tag).map(drop)
    }

    /// Receives a buffer of the rank that sends one first with the same tag; which it was.
    pub fn receive_any<T: Element>(&self, buffer: &mut [T], tag: u32) -> Result<usize, Error> {
        self.receive_from(buffer, None, tag)
    }

    fn receive_from<T: Element>(
        &self,
        buffer: &mut [T],
        from: Option<usize>,
        tag: u32,
    ) -> Result<usize, Error> {
        let (address, length) = (buffer.as_mut_ptr().cast(), size_of_val(buffer));
        // SAFETY: the buffer is borrowed until the wait is over.
        let work = unsafe { self.submit_receive(address, length, from, tag) }?;
        work.wait()?;
        Ok(work.source().expect("a receive that ended well has a source"))
    }

    /// Starts to send `length` bytes; [`Group::submit_send_owned`] is the safe way.
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
        self.check_peer(Some(to))?;
        let mut control = self.inner.control.lock().expect("no panic while locked");
        let work = control.work();
        control.send(to, Transfer { tag, address, length, work: work.clone() });
        Ok(work)
    }

    /// Starts to receive `length` bytes of a rank, or of the one that sends them first with this tag:
    /// [`Work::source`] says which it was. [`Group::submit_receive_owned`] is the safe way.
    ///
    /// # Safety
    /// The memory stays valid, and is not used otherwise, until the work is done.
    pub unsafe fn submit_receive(
        &self,
        address: *mut u8,
        length: usize,
        from: impl Into<Option<usize>>,
        tag: u32,
    ) -> Result<Work, Error> {
        let from = from.into();
        self.check_peer(from)?;
        let mut control = self.inner.control.lock().expect("no panic while locked");
        let work = control.work();
        control.receive(from, Transfer { tag, address, length, work: work.clone() });
        Ok(work)
    }

    /// Runs a collective call and waits for it, on the caller's thread if the group is idle; its
    /// number in the group, from 1.
    pub fn run(&self, request: Request<'_>) -> Result<u32, Error> {
        self.check_then(request, |request| self.inner.queue.run(request))
    }

    /// Starts a collective call. Calls of a group end in the order in which they were started.
    ///
    /// # Safety
    /// The request's memory stays valid, and is not used otherwise, until the work is done, also if what
    /// lent it is gone by then.
    pub unsafe fn submit(&self, request: Request<'_>) -> Result<Work, Error> {
        // SAFETY: passed on from the caller.
        let submit = |request: Checked<'_>| self.inner.queue.submit(unsafe { request.outlive() });
        self.check_then(request, |request| Ok(submit(request)))
    }

    /// Runs `task` on the thread that makes progress with calls, after those that were started
    /// before. Calls of this group that the task makes do not wait in line; they must not be
    /// submitted and waited for. Between the start of a task and its end, other threads make no calls
    /// in this group, or ranks may see different orders.
    pub fn submit_task(&self, task: impl FnOnce() + Send + 'static) -> Work {
        self.inner.queue.submit_task(Box::new(task))
    }

    /// What a call of this kind and size would do, and what it would cost.
    pub fn explain(&self, mut request: Request<'_>) -> Result<Explanation, Error> {
        request.divide(self.rank(), self.size());
        request.check_kind(&self.inner.topology)?;
        self.inner.queue.with_calls(|calls| calls.explain(&request))
    }

    #[inline]
    fn check_then<'a, R>(
        &self,
        request: Request<'a>,
        then: impl FnOnce(Checked<'a>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let memory = request.memory();
        if !self.inner.reach.contains(&memory) {
            return Err(InvalidCall::Memory { memory }.into());
        }
        request.check_then(self.rank(), &self.inner.topology, then)
    }

    /// Refuses a message from or to a rank that there is not, or that is this one.
    fn check_peer(&self, peer: Option<usize>) -> Result<(), Error> {
        let (me, world) = (self.rank(), self.size());
        match peer {
            Some(rank) if rank >= world => Err(InvalidCall::NoSuchRank { rank, world }.into()),
            None if world == 1 => Err(InvalidCall::ToSelf { rank: me }.into()),
            Some(rank) if rank == me => Err(InvalidCall::ToSelf { rank }.into()),
            _ => Ok(()),
        }
    }
}
