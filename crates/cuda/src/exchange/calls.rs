//! Calls of a group on the memory of its devices, in the order of a stream, and what they send.

use unisono_collective::engine::Memory;
use unisono_collective::{Dtype, Reduction, Request};

use super::ExchangeError;
use crate::group::DeviceGroup;
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Makes calls, and counts bytes.
pub(super) struct Calls {
    group: DeviceGroup,
    /// As if every byte went over a wire of its own: of an all-reduce, twice what is not the rank's own part.
    sent: u64,
}

impl Calls {
    pub(super) fn new(group: DeviceGroup) -> Calls {
        Calls { group, sent: 0 }
    }

    pub(super) fn group(&self) -> &DeviceGroup {
        &self.group
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    pub(super) fn rank(&self) -> usize {
        self.group.group().rank()
    }

    pub(super) fn world(&self) -> usize {
        self.group.group().size()
    }

    /// Sums elements over all ranks, in place.
    ///
    /// # Safety
    /// They are valid until the stream has come that far, and nothing else touches them meanwhile. The stream is one
    /// of the group's device.
    pub(super) unsafe fn all_reduce(
        &mut self,
        at: DevicePtr,
        count: usize,
        dtype: Dtype,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        if count == 0 {
            return Ok(());
        }
        let (bytes, world) = ((count * dtype.size()) as u64, self.world() as u64);
        self.sent += 2 * (bytes - bytes / world);
        // SAFETY: the caller's promise.
        unsafe { self.group.all_reduce(at, at, count, dtype, Reduction::Sum, Some(stream))? };
        Ok(())
    }

    /// An all-to-all of bytes; all ranks know the longest block.
    ///
    /// # Safety
    /// The memory is valid for what is sent and received until the stream has come that far, and nothing else touches
    /// it meanwhile. The stream is one of the group's device.
    pub(super) unsafe fn all_to_all(
        &mut self,
        from: DevicePtr,
        sent: &[usize],
        into: DevicePtr,
        received: &[usize],
        longest: usize,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let me = self.rank();
        let others = sent.iter().enumerate().filter(|(rank, _)| *rank != me);
        self.sent += others.map(|(_, bytes)| *bytes as u64).sum::<u64>();
        let (from, into) = (from.0 as *const u8, into.0 as *mut u8);
        // SAFETY: the caller's promise.
        unsafe {
            let request =
                Request::raw_all_to_all_unequal(from, sent, into, received, Some(longest))?;
            self.run(request, stream)
        }
    }

    /// An all-gather of bytes, of which each rank has as many as the counts say.
    ///
    /// # Safety
    /// As for `all_to_all`.
    pub(super) unsafe fn all_gather_unequal(
        &mut self,
        from: DevicePtr,
        into: DevicePtr,
        counts: &[usize],
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let own = counts[self.rank()];
        self.sent += (own * (self.world() - 1)) as u64;
        let (from, into) = (from.0 as *const u8, into.0 as *mut u8);
        // SAFETY: the caller's promise.
        unsafe { self.run(Request::raw_all_gather_unequal(from, own, into, counts)?, stream) }
    }

    /// An all-gather of f32 in place: every rank has its block where it belongs, and gets the others'.
    ///
    /// # Safety
    /// As for `all_to_all`, of as many blocks as there are ranks.
    pub(super) unsafe fn all_gather_in_place(
        &mut self,
        at: DevicePtr,
        block: usize,
        stream: &Stream,
    ) -> Result<(), ExchangeError> {
        let (me, world) = (self.rank(), self.world());
        self.sent += (block * 4 * (world - 1)) as u64;
        let own = at.offset(me * block * 4);
        // SAFETY: the caller's promise.
        unsafe { self.group.all_gather(own, at, block, Dtype::F32, Some(stream))? };
        Ok(())
    }

    /// # Safety
    /// The memory of the request is the device's, and the stream one of it.
    unsafe fn run(&self, request: Request<'_>, stream: &Stream) -> Result<(), ExchangeError> {
        let memory = Memory::Device(self.group.device());
        // SAFETY: the caller's promise.
        let request = unsafe { request.in_memory(memory).on_stream(stream.as_raw()) };
        self.group.group().run(request)?;
        Ok(())
    }
}
