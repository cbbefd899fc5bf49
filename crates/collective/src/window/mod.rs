//! Collectives through memory that all ranks of a host can read.
//!
//! A rank copies into its staging buffer only what others will reduce, reduces its own part
//! straight from its private input, and publishes the result in the hole its own part left in
//! the staging buffer. Where the buffers of the call are in [registered](crate::registered) memory, the same schedule
//! runs without copies: what it has staged and published are then the buffers themselves. [`clock`] says which rank may touch what when, [`region`] is the memory, [`clocks`]
//! are those in it, and this file joins them to a [`Window`](crate::schedule::Window) schedule.

pub mod clock;
pub mod clocks;
pub mod region;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::buffers::Buffers;
use crate::call::Call;
use crate::dtype::{Dtype, Reduction};
use crate::error::Error;
use crate::helpers::{Helpers, Room, Share};
use crate::kernel;
use crate::patience::Patience;
use crate::registered::Lent;
use crate::schedule::{self, Area, Blocks, Source, WindowFold};
use crate::state::GroupState;
use crate::traffic::Meter;
use clock::{Interrupted, Pipeline, Steps};
use clocks::{ClockView, Clocks};
use region::Region;

/// This rank's view of a window.
pub struct WindowMemory {
    clocks: Clocks,
    pipeline: Pipeline,
    /// Inputs of the fold under way; kept to allocate nothing per call.
    inputs: Room,
}

// SAFETY: the raw pointers in `inputs` are scratch of a call in progress; regions are shared
// memory whose accesses the clock protocol orders.
unsafe impl Send for WindowMemory {}

impl WindowMemory {
    /// Joins the regions of the members of one host.
    pub fn new(
        regions: Vec<Region>,
        buffers: usize,
        members: Vec<usize>,
        me: usize,
        patience: Patience,
    ) -> WindowMemory {
        let pipeline = Pipeline::new(regions.len(), buffers);
        let inputs = Vec::with_capacity(members.len());
        let clocks = Clocks::new(regions, members, me, patience);
        WindowMemory { clocks, pipeline, inputs }
    }

    /// Clocks of the same ranks for an engine whose data is elsewhere.
    pub fn clocks_for_engine(&self) -> Clocks {
        self.clocks.for_engine()
    }

    /// Bytes a segment can have in each rank's staging buffer.
    pub fn capacity(&self) -> usize {
        self.clocks.regions[self.clocks.me].buffer_size()
    }

    /// Runs `segments` of a schedule; in place, if the buffers are lent to the other ranks.
    ///
    /// # Safety
    /// The buffers are valid for the call's layouts and no other thread uses them meanwhile.
    #[allow(clippy::too_many_arguments, reason = "they are what a call is")]
    pub unsafe fn run(
        &mut self,
        call: &Call,
        schedule: &schedule::Window,
        buffers: &Buffers<'_>,
        segments: std::ops::Range<usize>,
        divisor: u32,
        lent: Option<&Lent>,
        state: &GroupState,
        helpers: &mut Helpers,
    ) -> Result<(), Error> {
        let cell_bytes = buffers.column_bytes().next_multiple_of(64);
        assert!(schedule.cells as usize * cell_bytes <= self.capacity());
        self.clocks.enter(call);
        let words = self.clocks.view(call, state);
        let work = Work {
            clocks: &self.clocks,
            call,
            schedule,
            buffers,
            first: segments.start,
            cell_bytes,
            divisor: (call.reduction == Reduction::Mean).then_some(divisor),
            lent,
        };
        let mut run = Run {
            work,
            words: &words,
            inputs: &mut self.inputs,
            helpers,
            disagreement: None,
            shared: 0,
            meter: state.meter(),
        };
        let (count, publishes) = (segments.len(), schedule.publishes);
        let outcome = match lent {
            None => self.pipeline.run(&words, count, publishes, &mut run),
            Some(_) => {
                let outcome = self.pipeline.run_in_place(&words, count, publishes, &mut run);
                // Before the caller has its buffer back, which others may be reading.
                outcome.inspect_err(|Interrupted| self.clocks.leave())
            }
        };
        state.meter().count_shared(run.shared);
        match (outcome, run.disagreement) {
            (Ok(()), _) => Ok(()),
            (Err(Interrupted), Some(other)) => Err(state.mismatch([(state.rank(), *call), other])),
            (Err(Interrupted), None) => Err(state.error(Some(*call))),
        }
    }
}

/// One call in progress.
struct Run<'a> {
    work: Work<'a>,
    words: &'a ClockView<'a>,
    inputs: &'a mut Room,
    helpers: &'a mut Helpers,
    /// Another rank's call, if it is not this one.
    disagreement: Option<(usize, Call)>,
    /// Bytes written for others to read, or lent to them.
    shared: usize,
    meter: &'a Meter,
}

/// What a call does with memory. Several threads may do so at the same time, each with another share.
struct Work<'a> {
    clocks: &'a Clocks,
    call: &'a Call,
    schedule: &'a schedule::Window,
    buffers: &'a Buffers<'a>,
    first: usize,
    cell_bytes: usize,
    divisor: Option<u32>,
    /// The buffers of the other ranks, if they are read in place.
    lent: Option<&'a Lent>,
}

impl Work<'_> {
    fn cell(&self, rank: usize, buffer: usize, cell: u32) -> *mut u8 {
        // SAFETY: `run` has checked that all cells of the schedule fit a staging buffer.
        unsafe { self.clocks.regions[rank].buffer(buffer).add(cell as usize * self.cell_bytes) }
    }

    fn index_of(&self, rank: usize) -> usize {
        let place = self.clocks.members.iter().position(|&member| member == rank);
        place.expect("schedules name only members")
    }

    fn dtype(&self) -> Dtype {
        self.call.dtype
    }

    /// The bytes of a range of blocks at a place in a segment.
    fn bytes(&self, place: Area, segment: usize, blocks: &Blocks) -> usize {
        let count = |(i, block)| self.buffers.block(place, segment, block, i as u32).1;
        blocks.clone().enumerate().map(count).sum::<usize>() * self.dtype().size()
    }

    /// Copies a share of a block.
    ///
    /// # Safety
    /// As for [`kernel::copy`], of `count` elements.
    unsafe fn copy(&self, share: Share, from: *const u8, into: *mut u8, count: usize) {
        let size = self.dtype().size();
        let share = share.of(count, size);
        let (at, bytes) = (share.start * size, share.len() * size);
        // SAFETY: the caller's promise; a share lies inside its block, or is empty.
        unsafe { kernel::copy(from.wrapping_add(at), into.wrapping_add(at), bytes) };
    }

    /// Stages a share of a segment; how many bytes.
    fn stage(&self, segment: usize, buffer: usize, share: Share) -> usize {
        let mut shared = 0;
        for stage in &self.schedule.stages {
            for (i, block) in stage.blocks.clone().enumerate() {
                let (from, count) = self.buffers.block(stage.from, segment, block, i as u32);
                shared += share.of(count, self.dtype().size()).len() * self.dtype().size();
                // Others read it where it is.
                if self.lent.is_some() {
                    continue;
                }
                let into = self.cell(self.clocks.me, buffer, stage.cell + i as u32);
                // SAFETY: the block lies in the caller's buffers; the cell is ours to write,
                // since the pipeline waited for its readers.
                unsafe { self.copy(share, from, into, count) };
            }
        }
        shared
    }

    /// Carries out a share of a fold of a segment; how many bytes it publishes.
    fn fold(
        &self,
        fold: &WindowFold,
        (segment, buffer): (usize, usize),
        share: Share,
        inputs: &mut Room,
    ) -> usize {
        let size = self.dtype().size();
        let mut shared = 0;
        for (i, block) in fold.blocks.clone().enumerate() {
            let (into, count) = self.buffers.block(fold.into, segment, block, i as u32);
            let share = share.of(count, size);
            if share.is_empty() {
                continue;
            }
            let at = share.start * size;
            inputs.clear();
            inputs.extend(fold.inputs.iter().map(|input| {
                let start = match *input {
                    Source::Own(place) => {
                        self.buffers.block(place, segment, block, i as u32).0.cast_const()
                    }
                    Source::Staged { rank, cell } => match self.lent {
                        Some(lent) => {
                            let own = self.buffers.block(Area::Input, segment, block, i as u32).0;
                            lent.of_rank(rank, own)
                        }
                        None => {
                            self.cell(self.index_of(rank), buffer, cell + i as u32).cast_const()
                        }
                    },
                };
                start.wrapping_add(at)
            }));
            let publish = fold.publish.filter(|_| self.lent.is_none());
            let also = publish
                .map(|cell| self.cell(self.clocks.me, buffer, cell + i as u32).wrapping_add(at));
            if fold.publish.is_some() {
                shared += share.len() * size;
            }
            let divide = if fold.root { self.divisor } else { None };
            // SAFETY: inputs are staged cells or lent buffers, complete since the pipeline waited for
            // their owners' ticks, and this rank's own memory; `into` and `also` are this rank's
            // own, and no rank reads them before the next tick. Of all of them, this is a share that no
            // other thread has.
            unsafe {
                kernel::fold(
                    self.dtype(),
                    self.call.reduction,
                    &fold.tree,
                    inputs,
                    into.wrapping_add(at),
                    also,
                    share.len(),
                    divide,
                );
            }
        }
        shared
    }

    /// Collects a share of a segment.
    fn collect(&self, segment: usize, buffer: usize, share: Share) {
        for collect in &self.schedule.collects {
            let rank = self.index_of(collect.rank);
            for (i, block) in collect.blocks.clone().enumerate() {
                let (into, count) = self.buffers.block(collect.into, segment, block, i as u32);
                let from = match self.lent {
                    Some(lent) => lent.of_rank(collect.rank, into),
                    None => self.cell(rank, buffer, collect.cell + i as u32).cast_const(),
                };
                // SAFETY: the cell or the lent block is complete, since the pipeline waited for its owner's
                // tick; a lent block is in another mapping than `into`.
                unsafe { self.copy(share, from, into, count) };
            }
        }
    }
}

impl Run<'_> {
    /// Does `work` on everything, with the helpers if it is about many bytes; the sum of what it returns.
    fn share(
        &mut self,
        bytes: impl FnOnce(&Work<'_>) -> usize,
        work: impl Fn(&Work<'_>, Share, &mut Room) -> usize,
    ) -> usize {
        if !self.helpers.are_engaged() {
            return work(&self.work, Share::ALL, self.inputs);
        }
        let (all, sum) = (&self.work, AtomicUsize::new(0));
        let part = |share: Share, inputs: &mut Room| {
            sum.fetch_add(work(all, share, inputs), Ordering::Relaxed);
        };
        // SAFETY: what a thread does with its share touches no other.
        unsafe { self.helpers.share(bytes(all), self.inputs, &part) };
        sum.into_inner()
    }
}

impl Steps for Run<'_> {
    fn stage(&mut self, segment: usize, buffer: usize) {
        let segment = self.work.first + segment;
        let bytes = |work: &Work<'_>| match work.lent {
            Some(_) => 0,
            None => {
                let stages = work.schedule.stages.iter();
                stages.map(|stage| work.bytes(stage.from, segment, &stage.blocks)).sum()
            }
        };
        self.shared += self.share(bytes, |work, share, _| work.stage(segment, buffer, share));
    }

    fn fold(&mut self, segment: usize, buffer: usize) {
        if self.work.lent.is_some() {
            self.stage(segment, buffer);
        }
        let (meter, schedule, segment) =
            (self.meter, self.work.schedule, self.work.first + segment);
        // One after the other: a fold may read what the one before has written.
        self.shared += meter.fold(|| {
            for copy in &schedule.copies {
                let bytes = |work: &Work<'_>| work.bytes(copy.into, segment, &copy.blocks);
                self.share(bytes, |work, share, inputs| {
                    // SAFETY: both places lie in the caller's buffers.
                    unsafe {
                        work.buffers.fold_share(copy, segment, work.call, None, share, inputs)
                    };
                    0
                });
            }
            let fold = |fold: &WindowFold| {
                let bytes = |work: &Work<'_>| {
                    fold.inputs.len() * work.bytes(fold.into, segment, &fold.blocks)
                };
                self.share(bytes, |work, share, inputs| {
                    work.fold(fold, (segment, buffer), share, inputs)
                })
            };
            schedule.folds.iter().map(fold).sum::<usize>()
        });
    }

    fn collect(&mut self, segment: usize, buffer: usize) {
        let segment = self.work.first + segment;
        let bytes = |work: &Work<'_>| {
            let collects = work.schedule.collects.iter();
            collects.map(|collect| work.bytes(collect.into, segment, &collect.blocks)).sum()
        };
        self.share(bytes, |work, share, _| {
            work.collect(segment, buffer, share);
            0
        });
    }

    fn entered(&mut self) -> Result<(), Interrupted> {
        self.disagreement = self.words.disagreement();
        if self.disagreement.is_none() { Ok(()) } else { Err(Interrupted) }
    }

    fn read(&mut self) -> Result<(), Interrupted> {
        if self.work.clocks.any_left() { Err(Interrupted) } else { Ok(()) }
    }
}

/// Runs a schedule that shares nothing: its copies and folds involve this rank's memory only.
///
/// # Safety
/// The buffers are valid for the call's layouts and no other thread uses them meanwhile.
pub unsafe fn run_alone(
    call: &Call,
    schedule: &schedule::Window,
    buffers: &Buffers<'_>,
    segments: std::ops::Range<usize>,
    divisor: u32,
    room: &mut Room,
) {
    assert!(schedule.collects.is_empty(), "there is no other rank to collect from");
    let divisor = (call.reduction == Reduction::Mean).then_some(divisor);
    for segment in segments {
        for copy in &schedule.copies {
            // SAFETY: passed on from the caller.
            unsafe { buffers.fold(copy, segment, call, None, room) };
        }
        for fold in &schedule.folds {
            for (i, block) in fold.blocks.clone().enumerate() {
                let at = |place| buffers.block(place, segment, block, i as u32);
                let (into, count) = at(fold.into);
                if count == 0 {
                    continue;
                }
                room.clear();
                room.extend(fold.inputs.iter().map(|input| match *input {
                    Source::Own(place) => at(place).0.cast_const(),
                    Source::Staged { rank, .. } => {
                        panic!("nothing staged by rank {rank} can be read")
                    }
                }));
                let divide = if fold.root { divisor } else { None };
                let (dtype, reduction) = (call.dtype, call.reduction);
                // SAFETY: passed on from the caller.
                unsafe {
                    kernel::fold(dtype, reduction, &fold.tree, room, into, None, count, divide)
                };
            }
        }
    }
}
