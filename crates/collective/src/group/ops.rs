//! The operations of a group that wait for their end.
//!
//! Every collective comes in place or out of place. `submit.rs` has the same operations without
//! the waiting. [`Group::run`] and [`Group::submit`] are what they all stand on, for callers that
//! manage memory themselves.

use crate::dtype::{Element, Reduction};
use crate::error::{Error, InvalidCall};
use crate::side::Transfer;
use crate::work::Work;

use super::{Explanation, Group, Request};

impl Group {
    /// Replaces every rank's buffer by the reduction of all.
    pub fn all_reduce<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let request = self.all_reduce_request(buffer, reduction);
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
        let request = self.all_reduce_into_request(input, output, reduction)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Rank `r` gets block `r` of the reduction of all inputs, which have one block per rank.
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let request = self.reduce_scatter_request(input, output, reduction)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::reduce_scatter`]; the result replaces this rank's block of the buffer, the
    /// other blocks hold unspecified data afterwards.
    pub fn reduce_scatter_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let request = self.reduce_scatter_in_place_request(buffer, reduction)?;
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Everybody gets everybody's input, in rank order.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let request = self.all_gather_request(input, output)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::all_gather`]; this rank's block of the buffer is the input.
    pub fn all_gather_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<(), Error> {
        let request = self.all_gather_in_place_request(buffer)?;
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
        let request = self.all_gather_unequal_request(input, output, counts)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Everybody gets the root's buffer.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<(), Error> {
        let request = self.broadcast_request(buffer, root);
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
        let request = self.reduce_request(input, output, reduction, root)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::reduce`]; the result replaces the root's buffer.
    pub fn reduce_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Error> {
        let request = self.reduce_in_place_request(buffer, reduction, root);
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// The root gets everybody's input, in rank order; the others pass no output.
    pub fn gather<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        root: usize,
    ) -> Result<(), Error> {
        let request = self.gather_request(input, output, root)?;
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
        let request = self.scatter_request(input, output, root)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// Rank `r` gets block `r` of everybody's input, in rank order.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let request = self.all_to_all_request(input, output)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
    }

    /// As [`Group::all_to_all`]; the received blocks replace the sent ones.
    pub fn all_to_all_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<(), Error> {
        let request = self.all_to_all_in_place_request(buffer)?;
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
        let request = self.all_to_all_unequal_request(input, sent, output, received)?;
        // SAFETY: the buffers are borrowed for as long as the call lasts.
        unsafe { self.run(request) }
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

    /// Receives a buffer of whoever sends one first with the same tag; who did.
    pub fn receive_any<T: Element>(&self, buffer: &mut [T], tag: u32) -> Result<usize, Error> {
        let (address, length) = (buffer.as_mut_ptr().cast(), size_of_val(buffer));
        // SAFETY: the buffer is borrowed for as long as the call lasts.
        let work = unsafe { self.submit_receive_any(address, length, tag) }?;
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
        self.check_peer(to)?;
        let mut side = self.inner.side.lock().expect("no panic while locked");
        let work = side.work();
        side.send(to, Transfer { tag, address, length, work: work.clone() });
        Ok(work)
    }

    /// Starts to receive `length` bytes; [`Group::submit_receive_owned`] is the safe way.
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
        side.receive(Some(from), Transfer { tag, address, length, work: work.clone() });
        Ok(work)
    }

    /// Starts to receive `length` bytes of whoever sends them first with this tag; the work's
    /// [`Work::source`] says who did. [`Group::submit_receive_any_owned`] is the safe way.
    ///
    /// # Safety
    /// The memory stays valid, and nobody else uses it, until the work is done.
    pub unsafe fn submit_receive_any(
        &self,
        address: *mut u8,
        length: usize,
        tag: u32,
    ) -> Result<Work, Error> {
        if self.size() == 1 {
            return Err(InvalidCall::ToSelf { rank: self.rank() }.into());
        }
        let mut side = self.inner.side.lock().expect("no panic while locked");
        let work = side.work();
        side.receive(None, Transfer { tag, address, length, work: work.clone() });
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
}
