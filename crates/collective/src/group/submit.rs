//! Operations that are submitted with the memory they work on.
//!
//! The buffers belong to the [`Pending`] until the operation has ended, and come back from its `wait`.
//! Operations end in the order in which they were submitted; what is wrong with a call by itself is
//! said at once, and then nothing was submitted.

use crate::dtype::{Element, Reduction};
use crate::error::Error;
use crate::registered::Registered;
use crate::request::Request;
use crate::work::{Pending, Work};

use super::Group;

/// Buffers whose memory stays where it is when they move: vectors.
///
/// # Safety
/// All memory that can be borrowed of it as elements does so, and lives as long as it.
pub unsafe trait Owned: Send + 'static {}

// SAFETY: the elements of a vector are not in it.
unsafe impl<T: Element> Owned for Vec<T> {}

// SAFETY: the elements are in a mapping of their own.
unsafe impl<T: Element + Send + 'static> Owned for Registered<T> {}

// SAFETY: all that can be borrowed as elements is of the vector.
unsafe impl<B: Owned> Owned for Option<B> {}

// SAFETY: all that can be borrowed as elements is of either.
unsafe impl<A: Owned, B: Owned> Owned for (A, B) {}

impl Group {
    /// Starts a call on buffers; `request` says which.
    ///
    /// ```
    /// # use unisono_collective::{Group, Options, Request};
    /// # let group = &Group::local(1, &Options::default()).unwrap()[0];
    /// let buffers = (vec![1f32; 3], vec![0f32; 3 * group.size()]);
    /// let pending = group.submit_owned(buffers, |(own, all)| Request::all_gather(own, all))?;
    /// let (own, all) = pending.wait()?;
    /// # Ok::<(), unisono_collective::Error>(())
    /// ```
    pub fn submit_owned<B: Owned>(
        &self,
        mut buffers: B,
        request: impl for<'b> FnOnce(&'b mut B) -> Request<'b>,
    ) -> Result<Pending<B>, Error> {
        // SAFETY: the memory lives in the handle until the call is done, and even a handle that is
        // forgotten never frees it.
        let work = unsafe { self.submit(request(&mut buffers)) }?;
        Ok(Pending::new(work, buffers))
    }

    /// Starts [`Group::all_reduce`].
    pub fn submit_all_reduce<T: Element>(
        &self,
        buffer: Vec<T>,
        reduction: Reduction,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.submit_owned(buffer, |buffer| Request::all_reduce(buffer, reduction))
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
    ) -> Result<Pending<Vec<T>>, Error> {
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
    ) -> Result<Pending<Vec<T>>, Error> {
        let (address, length) = (buffer.as_mut_ptr().cast(), size_of_val(&buffer[..]));
        // SAFETY: the vector's memory lives in the handle until the work is done.
        let work = unsafe { self.submit_receive(address, length, from, tag) }?;
        Ok(Pending::new(work, buffer))
    }
}
