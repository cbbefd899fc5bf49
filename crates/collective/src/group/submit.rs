//! The operations of a group that are submitted.
//!
//! Each is named after the operation that waits, and takes over the buffers that one borrows. They
//! belong to the [`Pending`] until the operation has ended, and come back from its `wait` in the
//! order in which they were given. Operations end in the order in which they were submitted; what is
//! wrong with a call by itself is said at once, and then nothing was submitted.

use crate::dtype::{Element, Reduction};
use crate::error::Error;
use crate::work::{Pending, Work};

use crate::request::Request;

use super::Group;

/// An operation under way with its buffers, or what is wrong with the call.
type Submitted<B> = Result<Pending<B>, Error>;

impl Group {
    /// Starts an all-reduce of a buffer.
    pub fn submit_all_reduce<T: Element>(
        &self,
        buffer: Vec<T>,
        reduction: Reduction,
    ) -> Submitted<Vec<T>> {
        self.submit_with(buffer, |buffer| Request::all_reduce(buffer, reduction))
    }

    /// Starts [`Group::all_reduce_into`]: input and output.
    pub fn submit_all_reduce_into<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        reduction: Reduction,
    ) -> Submitted<(Vec<T>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::all_reduce_into(input, output, reduction)
        })
    }

    /// Starts [`Group::reduce_scatter`]: input and output.
    pub fn submit_reduce_scatter<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        reduction: Reduction,
    ) -> Submitted<(Vec<T>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::reduce_scatter(input, output, reduction)
        })
    }

    /// Starts [`Group::reduce_scatter_in_place`].
    pub fn submit_reduce_scatter_in_place<T: Element>(
        &self,
        buffer: Vec<T>,
        reduction: Reduction,
    ) -> Submitted<Vec<T>> {
        self.submit_with(buffer, |buffer| {
            Request::reduce_scatter_in_place(buffer, reduction, self.me())
        })
    }

    /// Starts [`Group::all_gather`]: input and output.
    pub fn submit_all_gather<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
    ) -> Submitted<(Vec<T>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| Request::all_gather(input, output))
    }

    /// Starts [`Group::all_gather_in_place`].
    pub fn submit_all_gather_in_place<T: Element>(&self, buffer: Vec<T>) -> Submitted<Vec<T>> {
        self.submit_with(buffer, |buffer| Request::all_gather_in_place(buffer, self.me()))
    }

    /// Starts [`Group::all_gather_unequal`]: input and output.
    pub fn submit_all_gather_unequal<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        counts: &[usize],
    ) -> Submitted<(Vec<T>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::all_gather_unequal(input, output, counts)
        })
    }

    /// Starts [`Group::broadcast`].
    pub fn submit_broadcast<T: Element>(&self, buffer: Vec<T>, root: usize) -> Submitted<Vec<T>> {
        self.submit_with(buffer, |buffer| Request::broadcast(buffer, root))
    }

    /// Starts [`Group::reduce`]: input, and output at the root.
    pub fn submit_reduce<T: Element>(
        &self,
        input: Vec<T>,
        output: Option<Vec<T>>,
        reduction: Reduction,
        root: usize,
    ) -> Submitted<(Vec<T>, Option<Vec<T>>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::reduce(input, output.as_deref_mut(), reduction, root)
        })
    }

    /// Starts [`Group::reduce_in_place`].
    pub fn submit_reduce_in_place<T: Element>(
        &self,
        buffer: Vec<T>,
        reduction: Reduction,
        root: usize,
    ) -> Submitted<Vec<T>> {
        self.submit_with(buffer, |buffer| Request::reduce_in_place(buffer, reduction, root))
    }

    /// Starts [`Group::gather`]: input, and output at the root.
    pub fn submit_gather<T: Element>(
        &self,
        input: Vec<T>,
        output: Option<Vec<T>>,
        root: usize,
    ) -> Submitted<(Vec<T>, Option<Vec<T>>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::gather(input, output.as_deref_mut(), root)
        })
    }

    /// Starts [`Group::scatter`]: input at the root, and output.
    pub fn submit_scatter<T: Element>(
        &self,
        input: Option<Vec<T>>,
        output: Vec<T>,
        root: usize,
    ) -> Submitted<(Option<Vec<T>>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::scatter(input.as_deref(), output, root)
        })
    }

    /// Starts [`Group::all_to_all`]: input and output.
    pub fn submit_all_to_all<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
    ) -> Submitted<(Vec<T>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::all_to_all(input, output, self.size())
        })
    }

    /// Starts [`Group::all_to_all_in_place`].
    pub fn submit_all_to_all_in_place<T: Element>(&self, buffer: Vec<T>) -> Submitted<Vec<T>> {
        self.submit_with(buffer, |buffer| Request::all_to_all_in_place(buffer, self.size()))
    }

    /// Starts [`Group::all_to_all_unequal`]: input and output. The ranks compare the lengths as the
    /// first part of the operation.
    pub fn submit_all_to_all_unequal<T: Element>(
        &self,
        input: Vec<T>,
        sent: &[usize],
        output: Vec<T>,
        received: &[usize],
    ) -> Submitted<(Vec<T>, Vec<T>)> {
        self.submit_with((input, output), |(input, output)| {
            Request::all_to_all_unequal(input, sent, output, received, None)
        })
    }

    /// Starts [`Group::barrier`]: done when all ranks have come here.
    pub fn submit_barrier(&self) -> Result<Work, Error> {
        // SAFETY: no memory is involved.
        unsafe { self.submit(Request::barrier()) }
    }

    /// Starts [`Group::send`].
    pub fn submit_send_owned<T: Element>(
        &self,
        mut buffer: Vec<T>,
        to: usize,
        tag: u32,
    ) -> Submitted<Vec<T>> {
        let (address, length) = (buffer.as_mut_ptr().cast(), size_of_val(&buffer[..]));
        // SAFETY: the vector's memory lives in the handle until the work is done.
        let work = unsafe { self.submit_send(address, length, to, tag) }?;
        Ok(Pending::new(work, buffer))
    }

    /// Starts [`Group::receive`], or without a rank [`Group::receive_any`], of a message as long as the
    /// buffer.
    pub fn submit_receive_owned<T: Element>(
        &self,
        mut buffer: Vec<T>,
        from: impl Into<Option<usize>>,
        tag: u32,
    ) -> Submitted<Vec<T>> {
        let (address, length) = (buffer.as_mut_ptr().cast(), size_of_val(&buffer[..]));
        // SAFETY: the vector's memory lives in the handle until the work is done.
        let work = unsafe { self.submit_receive(address, length, from, tag) }?;
        Ok(Pending::new(work, buffer))
    }

    /// Submits a request on the memory of `buffers`: vectors, whose memory stays where it is when
    /// they move.
    fn submit_with<B>(
        &self,
        mut buffers: B,
        request: impl FnOnce(&mut B) -> Request<'_>,
    ) -> Submitted<B> {
        // SAFETY: the memory lives in the handle until the call is done, and even a handle that is
        // forgotten never frees it.
        let work = unsafe { self.submit(request(&mut buffers)) }?;
        Ok(Pending::new(work, buffers))
    }
}
