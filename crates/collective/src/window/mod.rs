//! Collectives through memory that all ranks of a host can read.
//!
//! A rank copies into its staging buffer only what others will reduce, reduces its own part
//! straight from its private input, and publishes the result in the hole its own part left in
//! the staging buffer. [`clock`] says which rank may touch what when, [`region`] is the memory, and
//! this file joins the two to a [`Window`](crate::schedule::Window) schedule.

pub mod clock;
pub mod region;

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::buffers::Buffers;
use crate::call::Call;
use crate::dtype::{Dtype, Reduction};
use crate::error::Error;
use crate::kernel;
use crate::schedule::{self, Source};
use crate::state::GroupState;
use crate::traffic::Meter;
use clock::{Interrupted, Pipeline, Steps, Words, reached};
use region::Region;

/// How long a sleeper sleeps before it looks again whether the group still stands. A failure of the group
/// wakes it; this is for one that falls between the look and the sleep, and for a wake-up call that was missed
/// because its caller died. Shorter costs wake-ups of a waiting rank, longer delays the news.
const NAP: Duration = Duration::from_millis(20);

/// How long a wait yields at most. Longer: on a busy machine, a failure of the group is noticed
/// later. Shorter: a wait that would be over soon ends in a sleep.
const YIELDING: Duration = Duration::from_millis(5);

/// This rank's view of a window.
pub struct WindowMemory {
    /// One region per member, in the order of `members`.
    regions: Vec<Region>,
    /// Group ranks of the members, ascending.
    members: Vec<usize>,
    /// This rank's index among the members.
    me: usize,
    pipeline: Pipeline,
    patience: Patience,
    /// Runs so far: the slot in which ranks record what they called.
    runs: usize,
    /// Inputs of the fold under way; kept to allocate nothing per call.
    inputs: Vec<*const u8>,
}

// SAFETY: the raw pointers in `inputs` are scratch of a call in progress; regions are shared
// memory whose accesses the clock protocol orders.
unsafe impl Send for WindowMemory {}

/// How to wait for a clock before sleeping.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Busy turns, each a pause instruction or a few.
    pub spins: u32,
    /// Turns after that which give the core to another thread.
    pub yields: u32,
}

impl Patience {
    /// Spinning pays only if every rank of the host has a core of its own, and even then not for
    /// long: the scheduler may have put two ranks on one core, where the one that spins keeps the
    /// other from arriving. Yielding costs little with a core to oneself and lets the other rank
    /// run at once without.
    pub fn for_crowd(crowd: f64) -> Patience {
        if crowd <= 1.0 {
            Patience { spins: 300, yields: 2000 }
        } else {
            Patience { spins: 0, yields: 40 }
        }
    }

    /// The same for sockets, where an attempt is a system call and worth many busy turns.
    pub fn for_links(&self) -> Patience {
        Patience { spins: self.spins / 4, yields: self.yields.min(40) }
    }
}

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
        WindowMemory { regions, members, me, pipeline, patience, runs: 0, inputs }
    }

    /// Bytes a segment can have in each rank's staging buffer.
    pub fn capacity(&self) -> usize {
        self.regions[self.me].buffer_size()
    }

    /// Runs `segments` of a schedule, starting with `first`.
    ///
    /// # Safety
    /// The buffers are valid for the call's layouts and no other thread uses them meanwhile.
    pub unsafe fn run(
        &mut self,
        call: &Call,
        schedule: &schedule::Window,
        buffers: &Buffers<'_>,
        segments: std::ops::Range<usize>,
        divisor: u32,
        state: &GroupState,
    ) -> Result<(), Error> {
        let cell_bytes = buffers.column_bytes().next_multiple_of(64);
        assert!(schedule.cells as usize * cell_bytes <= self.capacity());
        let fingerprint = call.fingerprint();
        let words = View {
            regions: &self.regions,
            members: &self.members,
            me: self.me,
            patience: self.patience,
            state,
            call,
            yielding: Cell::new(Instant::now()),
        };
        let mut run = Run {
            regions: &self.regions,
            members: &self.members,
            me: self.me,
            inputs: &mut self.inputs,
            call,
            fingerprint,
            slot: self.runs,
            schedule,
            buffers,
            first: segments.start,
            cell_bytes,
            divisor: (call.reduction == Reduction::Mean).then_some(divisor),
            disagreement: None,
            shared: 0,
            meter: state.meter(),
        };
        self.regions[self.me].record(self.runs, call, fingerprint);
        self.runs += 1;
        let outcome = self.pipeline.run(&words, segments.len(), schedule.publishes, &mut run);
        state.meter().count_shared(run.shared);
        match (outcome, run.disagreement) {
            (Ok(()), _) => Ok(()),
            (Err(Interrupted), Some(other)) => Err(state.mismatch([(state.rank(), *call), other])),
            (Err(Interrupted), None) => Err(state.error(Some(*call))),
        }
    }
}

/// The words of a window in real shared memory.
struct View<'a> {
    regions: &'a [Region],
    members: &'a [usize],
    me: usize,
    patience: Patience,
    state: &'a GroupState,
    call: &'a Call,
    /// When the wait under way began to yield.
    yielding: Cell<Instant>,
}

impl Words for View<'_> {
    fn ranks(&self) -> usize {
        self.regions.len()
    }

    fn me(&self) -> usize {
        self.me
    }

    fn clock(&self, rank: usize) -> u32 {
        self.regions[rank].clock().load(Ordering::SeqCst)
    }

    fn set_clock(&self, value: u32) {
        self.regions[self.me].clock().store(value, Ordering::SeqCst);
    }

    fn sleepers(&self) -> u32 {
        self.regions[self.me].sleepers().load(Ordering::SeqCst)
    }

    fn announce_sleep(&self, rank: usize, sleeping: bool) {
        let sleepers = self.regions[rank].sleepers();
        if sleeping {
            sleepers.fetch_add(1, Ordering::SeqCst);
        } else {
            sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn sleep(&self, rank: usize, seen: u32, target: u32) -> Result<(), Interrupted> {
        let mut watch = self.state.watch(self.call);
        let nap = rustix::time::Timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as i64 };
        loop {
            let clock = self.regions[rank].clock();
            // Every outcome (woken, value changed, interrupted, timed out) leads to the same
            // question: what does the clock show now?
            let _ = futex::wait(clock, futex::Flags::empty(), seen, Some(&nap));
            if clock.load(Ordering::SeqCst) != seen {
                return Ok(());
            }
            if self.state.is_over_for(self.members[rank], self.call) {
                return Err(Interrupted);
            }
            watch.tick(|| {
                let late = |&r: &usize| r != self.me && !reached(self.clock(r), target);
                (0..self.regions.len()).filter(late).map(|r| self.members[r]).collect()
            });
        }
    }

    fn wake(&self) {
        self.regions[self.me].wake();
    }

    fn spin(&self, turn: u32) -> bool {
        if turn < self.patience.spins {
            std::hint::spin_loop();
            true
        } else if turn < self.patience.spins + self.patience.yields {
            let turn = turn - self.patience.spins;
            if turn == 0 {
                self.yielding.set(Instant::now());
            }
            // On a busy machine every turn may cost a time slice of another process: go to sleep,
            // where the group's failure is noticed.
            let busy = turn % 16 == 15 && self.yielding.get().elapsed() > YIELDING;
            if busy || self.state.is_over() {
                return false;
            }
            std::thread::yield_now();
            true
        } else {
            false
        }
    }
}

/// One call in progress.
struct Run<'a> {
    regions: &'a [Region],
    members: &'a [usize],
    me: usize,
    inputs: &'a mut Vec<*const u8>,
    call: &'a Call,
    fingerprint: u64,
    slot: usize,
    schedule: &'a schedule::Window,
    buffers: &'a Buffers<'a>,
    first: usize,
    cell_bytes: usize,
    divisor: Option<u32>,
    /// Another rank's call, if it is not this one.
    disagreement: Option<(usize, Call)>,
    /// Bytes written for others to read.
    shared: usize,
    meter: &'a Meter,
}

impl Run<'_> {
    fn cell(&self, rank: usize, buffer: usize, cell: u32) -> *mut u8 {
        // SAFETY: `run` has checked that all cells of the schedule fit a staging buffer.
        unsafe { self.regions[rank].buffer(buffer).add(cell as usize * self.cell_bytes) }
    }

    fn index_of(&self, rank: usize) -> usize {
        self.members.iter().position(|&m| m == rank).expect("schedules name only members")
    }

    fn dtype(&self) -> Dtype {
        self.call.dtype
    }

    /// Folds everything of a segment that is this rank's to fold.
    fn fold_all(&mut self, segment: usize, buffer: usize) {
        let segment = self.first + segment;
        for copy in &self.schedule.copies {
            // SAFETY: both places lie in the caller's buffers.
            unsafe { self.buffers.fold(copy, segment, self.call, None, self.inputs) };
        }
        for fold in &self.schedule.folds {
            for (i, block) in fold.blocks.clone().enumerate() {
                let (into, count) = self.buffers.block(fold.into, segment, block, i as u32);
                if count == 0 {
                    continue;
                }
                let mut inputs = std::mem::take(self.inputs);
                inputs.clear();
                inputs.extend(fold.inputs.iter().map(|input| match *input {
                    Source::Own(place) => {
                        self.buffers.block(place, segment, block, i as u32).0.cast_const()
                    }
                    Source::Staged { rank, cell } => {
                        self.cell(self.index_of(rank), buffer, cell + i as u32).cast_const()
                    }
                }));
                let also = fold.publish.map(|cell| self.cell(self.me, buffer, cell + i as u32));
                if also.is_some() {
                    self.shared += count * self.dtype().size();
                }
                let divide = if fold.root { self.divisor } else { None };
                // SAFETY: inputs are staged cells, complete since the pipeline waited for their
                // owners' ticks, and this rank's own memory; `into` and `also` are this rank's
                // own, and no rank reads `also` before the next tick.
                unsafe {
                    kernel::fold(
                        self.dtype(),
                        self.call.reduction,
                        &fold.tree,
                        &inputs,
                        into,
                        also,
                        count,
                        divide,
                    );
                }
                *self.inputs = inputs;
            }
        }
    }
}

impl Steps for Run<'_> {
    fn stage(&mut self, segment: usize, buffer: usize) {
        let segment = self.first + segment;
        for stage in &self.schedule.stages {
            for (i, block) in stage.blocks.clone().enumerate() {
                let (from, count) = self.buffers.block(stage.from, segment, block, i as u32);
                let into = self.cell(self.me, buffer, stage.cell + i as u32);
                // SAFETY: the block lies in the caller's buffers; the cell is ours to write,
                // since the pipeline waited for its readers.
                unsafe { kernel::copy(from, into, count * self.dtype().size()) };
                self.shared += count * self.dtype().size();
            }
        }
    }

    fn fold(&mut self, segment: usize, buffer: usize) {
        let meter = self.meter;
        meter.fold(|| self.fold_all(segment, buffer));
    }

    fn collect(&mut self, segment: usize, buffer: usize) {
        let segment = self.first + segment;
        for collect in &self.schedule.collects {
            let rank = self.index_of(collect.rank);
            for (i, block) in collect.blocks.clone().enumerate() {
                let (into, count) = self.buffers.block(collect.into, segment, block, i as u32);
                let from = self.cell(rank, buffer, collect.cell + i as u32);
                // SAFETY: the cell is complete, since the pipeline waited for its owner's tick.
                unsafe { kernel::copy(from, into, count * self.dtype().size()) };
            }
        }
    }

    fn entered(&mut self) -> Result<(), Interrupted> {
        for (rank, region) in self.regions.iter().enumerate() {
            if region.fingerprint(self.slot) != self.fingerprint {
                let peer_call = region.call(self.slot).unwrap_or(*self.call);
                self.disagreement = Some((self.members[rank], peer_call));
                return Err(Interrupted);
            }
        }
        Ok(())
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
    room: &mut Vec<*const u8>,
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
