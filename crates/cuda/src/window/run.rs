//! A call in progress: what a schedule means on the device, and when a clock ticks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::time::Duration;

use unisono_collective::engine::clock::{Interrupted, Pipeline, Steps, Words};
use unisono_collective::engine::{Buffers, ClockView, Clocks, GroupState, HostEngine};
use unisono_collective::schedule::{Area, Phase, Schedule, Source, Window};
use unisono_collective::{Call, Error, Reduction};

use super::BUFFERS;
use super::engine::failed;
use super::opening::Shared;
use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::fold::{FoldError, Folds};
use crate::library::DevicePtr;
use crate::stream::Stream;

/// Ticks that may wait for the device at a time: a segment has two, and the next one is submitted while
/// the first is under way. More: events that are never used. Fewer: a rank waits before it submits.
const TICKS: usize = 8;

/// How long a rank that has waited for a while sleeps while the device is at work for it. Longer: it is late to
/// tell the others. Shorter: it keeps a core busy.
const NAP: Duration = Duration::from_micros(50);

/// How long it sleeps while the device is not: until another rank's tick, or a failure, wakes it.
const SLEEP: Duration = Duration::from_millis(20);

/// Turns in which a rank that waits for the device alone looks again at once. More: a busier core. Fewer: it
/// sleeps when the work would be done in a moment.
const EAGER: u32 = 2000;

/// The stream of a rank, with the staging memory of all.
pub struct Lane {
    pub stream: Stream,
    folds: Folds,
    /// Happen with the ticks that wait for the device; the number of a tick says which.
    ticks: [Event; TICKS],
    shared: Shared,
    /// Bytes of a staging buffer.
    buffer: usize,
    /// `None` for a rank that is alone.
    clocks: Option<Clocks>,
    pipeline: Pipeline,
    rank: usize,
    world: usize,
    /// Inputs of the fold under way; kept to allocate nothing per call.
    inputs: Vec<DevicePtr>,
    waiting: VecDeque<u32>,
}

impl Lane {
    /// The events of a lane.
    pub fn events(context: &Context) -> Result<[Event; TICKS], CudaError> {
        let events = (0..TICKS).map(|_| Event::new(context, EventKind::Ordering));
        let events: Vec<Event> = events.collect::<Result<_, CudaError>>()?;
        Ok(events.try_into().expect("as many as were made"))
    }

    pub fn new(
        stream: Stream,
        folds: Folds,
        ticks: [Event; TICKS],
        shared: Shared,
        buffer: usize,
        host: &HostEngine,
    ) -> Lane {
        let (rank, world) = (host.rank(), host.topology().world());
        assert!(BUFFERS * buffer <= shared.bytes());
        Lane {
            stream,
            folds,
            ticks,
            shared,
            buffer,
            clocks: host.clocks(),
            pipeline: Pipeline::new(world, BUFFERS),
            rank,
            world,
            inputs: Vec::with_capacity(world),
            waiting: VecDeque::with_capacity(TICKS),
        }
    }

    pub fn context(&self) -> &Context {
        self.stream.context()
    }

    /// Submits a call, as far as that is possible without waiting for the device at its end.
    ///
    /// # Safety
    /// The buffers are device memory, valid for the call's layouts, and nothing else uses them until the
    /// stream has come to where it is when this returns.
    pub unsafe fn run(
        &mut self,
        call: &Call,
        schedule: &Schedule,
        buffers: &Buffers<'_>,
        segments: usize,
        state: &GroupState,
    ) -> Result<(), Error> {
        let window = match &schedule.phases[..] {
            [Phase::Window(window)] => window,
            _ => {
                let device = Submitting::new(&self.stream, &self.folds);
                // SAFETY: passed on from the caller.
                unsafe { copy_alone(&device, schedule, buffers, segments) };
                return device.outcome();
            }
        };
        let cell_bytes = buffers.column_bytes().next_multiple_of(64);
        assert!(window.cells as usize * cell_bytes <= self.buffer, "cells fit a staging buffer");
        let clocks = self.clocks.as_mut().expect("several ranks have clocks");
        clocks.enter(call);
        self.waiting.clear();
        let device = Submitting::new(&self.stream, &self.folds);
        let words = DeviceWords {
            view: clocks.view(call, state),
            device: &device,
            ticks: &self.ticks,
            waiting: RefCell::new(std::mem::take(&mut self.waiting)),
        };
        let mut steps = DeviceSteps {
            device: &device,
            view: &words.view,
            addresses: &self.shared.addresses,
            rank: self.rank,
            buffer_bytes: self.buffer,
            cell_bytes,
            window,
            buffers,
            call,
            divisor: (call.reduction == Reduction::Mean).then_some(self.world as u32),
            inputs: &mut self.inputs,
            disagreement: None,
            staged: 0,
        };
        let ran = self.pipeline.run(&words, segments, window.publishes, &mut steps);
        let (disagreement, staged) = (steps.disagreement.take(), steps.staged);
        let ran = ran.and_then(|()| words.flush(state));
        state.meter().count_shared(staged);
        self.waiting = words.waiting.into_inner();
        match (device.outcome(), disagreement, ran) {
            (Err(failure), ..) => Err(failure),
            (_, Some(mismatch), _) => Err(mismatch),
            (_, _, Err(Interrupted)) => Err(state.error(Some(*call))),
            (Ok(()), None, Ok(())) => Ok(()),
        }
    }

    /// Waits until the device has done all that was submitted. It needs no other rank for that.
    pub fn settle(&self) -> Result<(), CudaError> {
        let mut turn = 0;
        while !self.stream.query()? {
            pause(turn);
            turn += 1;
        }
        Ok(())
    }

    /// Closes the memory of the others. For when the stream has settled.
    pub fn close(&mut self) {
        self.shared.opened.clear();
        if let Some(clocks) = &self.clocks {
            clocks.close();
        }
    }

    /// Whether no rank has this one's memory open.
    pub fn all_closed(&self) -> bool {
        self.clocks.as_ref().is_none_or(Clocks::all_closed)
    }
}

/// Copies the blocks of a rank that is alone: its input is its output.
///
/// # Safety
/// As of [`Lane::run`].
unsafe fn copy_alone(
    device: &Submitting<'_>,
    schedule: &Schedule,
    buffers: &Buffers<'_>,
    segments: usize,
) {
    let mut copies = Copies::new(device);
    for segment in 0..segments {
        let (from, count) = buffers.block(Area::Input, segment, 0, 0);
        let (into, _) = buffers.block(Area::Output, segment, 0, 0);
        assert_eq!(schedule.parts, 1, "a rank that is alone has one block");
        // SAFETY: passed on from the caller.
        unsafe { copies.add(from, into, count * buffers.dtype.size()) };
    }
    // SAFETY: passed on from the caller.
    unsafe { copies.submit() };
}

/// What is submitted to a stream, until something fails.
struct Submitting<'a> {
    stream: &'a Stream,
    folds: &'a Folds,
    failure: RefCell<Option<FoldError>>,
    has_failed: Cell<bool>,
}

impl<'a> Submitting<'a> {
    fn new(stream: &'a Stream, folds: &'a Folds) -> Submitting<'a> {
        let (failure, has_failed) = Default::default();
        Submitting { stream, folds, failure, has_failed }
    }

    /// What this gives; `None`, and nothing is done, after a failure.
    fn attempt<T, E: Into<FoldError>>(&self, action: impl FnOnce() -> Result<T, E>) -> Option<T> {
        if self.has_failed.get() {
            return None;
        }
        match action() {
            Ok(value) => Some(value),
            Err(error) => {
                self.has_failed.set(true);
                *self.failure.borrow_mut() = Some(error.into());
                None
            }
        }
    }

    fn outcome(&self) -> Result<(), Error> {
        self.failure.borrow_mut().take().map_or(Ok(()), |failure| Err(failed(failure)))
    }
}

/// The clocks of the ranks, of which this one's ticks when the device has come so far.
struct DeviceWords<'a> {
    view: ClockView<'a>,
    device: &'a Submitting<'a>,
    ticks: &'a [Event; TICKS],
    /// Values of this rank's clock whose events have not happened.
    waiting: RefCell<VecDeque<u32>>,
}

impl DeviceWords<'_> {
    fn event(&self, value: u32) -> &Event {
        &self.ticks[value as usize % TICKS]
    }

    /// Publishes the ticks whose events have happened; whether none is left.
    fn publish(&self) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(&value) = waiting.front() {
            if self.device.attempt(|| self.event(value).query()) != Some(true) {
                return false;
            }
            waiting.pop_front();
            self.view.set_clock(value);
            if self.view.sleepers() > 0 {
                self.view.wake();
            }
        }
        true
    }

    /// Publishes all ticks. The others need them also after this rank's call.
    fn flush(&self, state: &GroupState) -> Result<(), Interrupted> {
        let mut turn = 0;
        while !self.publish() {
            if self.device.has_failed.get() || state.is_over() {
                return Err(Interrupted);
            }
            pause(turn);
            turn += 1;
        }
        Ok(())
    }
}

impl Words for DeviceWords<'_> {
    fn ranks(&self) -> usize {
        self.view.ranks()
    }

    fn me(&self) -> usize {
        self.view.me()
    }

    fn clock(&self, rank: usize) -> u32 {
        self.view.clock(rank)
    }

    /// The clock is to show this when the device has done what was submitted until now.
    fn set_clock(&self, value: u32) {
        let mut turn = 0;
        while self.waiting.borrow().len() == TICKS && !self.device.has_failed.get() {
            self.publish();
            pause(turn);
            turn += 1;
        }
        let event = self.event(value);
        if self.device.attempt(|| self.device.stream.record(event)).is_some() {
            self.waiting.borrow_mut().push_back(value);
        }
        self.publish();
    }

    /// Those who sleep are woken when the tick is published.
    fn sleepers(&self) -> u32 {
        0
    }

    fn announce_sleep(&self, rank: usize, sleeping: bool) {
        self.view.announce_sleep(rank, sleeping);
    }

    fn sleep(&self, rank: usize, seen: u32, target: u32) -> Result<(), Interrupted> {
        let mut watch = self.view.watch();
        loop {
            let is_idle = self.publish();
            if self.device.has_failed.get() {
                return Err(Interrupted);
            }
            let longest = if is_idle { SLEEP } else { NAP };
            if !self.view.rest(&mut watch, rank, (seen, target), longest)? {
                return Ok(());
            }
        }
    }

    fn wake(&self) {
        self.view.wake();
    }

    fn spin(&self, turn: u32) -> bool {
        self.publish();
        !self.device.has_failed.get() && self.view.spin(turn)
    }
}

/// The steps of a schedule, submitted to the device.
struct DeviceSteps<'a> {
    device: &'a Submitting<'a>,
    view: &'a ClockView<'a>,
    /// The staging memory of every rank.
    addresses: &'a [DevicePtr],
    rank: usize,
    buffer_bytes: usize,
    cell_bytes: usize,
    window: &'a Window,
    buffers: &'a Buffers<'a>,
    call: &'a Call,
    divisor: Option<u32>,
    inputs: &'a mut Vec<DevicePtr>,
    /// That another rank makes another call.
    disagreement: Option<Error>,
    /// Bytes written for others to read.
    staged: usize,
}

impl DeviceSteps<'_> {
    fn cell(&self, rank: usize, buffer: usize, cell: u32) -> DevicePtr {
        self.addresses[rank].offset(buffer * self.buffer_bytes + cell as usize * self.cell_bytes)
    }

    fn size(&self) -> usize {
        self.call.dtype.size()
    }
}

impl Steps for DeviceSteps<'_> {
    fn stage(&mut self, segment: usize, buffer: usize) {
        let mut copies = Copies::new(self.device);
        for stage in &self.window.stages {
            for (i, block) in stage.blocks.clone().enumerate() {
                let (from, count) = self.buffers.block(stage.from, segment, block, i as u32);
                let into = self.cell(self.rank, buffer, stage.cell + i as u32);
                let bytes = count * self.size();
                self.staged += bytes;
                // SAFETY: the block lies in the caller's memory; the cell is ours to write, since the
                // pipeline waited for its readers.
                unsafe { copies.add(from, into.0 as *mut u8, bytes) };
            }
        }
        // SAFETY: as above.
        unsafe { copies.submit() };
    }

    fn fold(&mut self, segment: usize, buffer: usize) {
        let mut copies = Copies::new(self.device);
        for copy in &self.window.copies {
            for (i, block) in copy.blocks.clone().enumerate() {
                let (from, count) = self.buffers.block(copy.inputs[0], segment, block, i as u32);
                let (into, _) = self.buffers.block(copy.into, segment, block, i as u32);
                // SAFETY: both places lie in the caller's memory.
                unsafe { copies.add(from, into, count * self.size()) };
            }
        }
        // SAFETY: as above.
        unsafe { copies.submit() };
        for fold in &self.window.folds {
            assert!(fold.tree.is_canonical(), "the device folds in the canonical order");
            for (i, block) in fold.blocks.clone().enumerate() {
                let i = i as u32;
                let (into, count) = self.buffers.block(fold.into, segment, block, i);
                let mut inputs = std::mem::take(self.inputs);
                inputs.clear();
                inputs.extend(fold.inputs.iter().map(|input| match *input {
                    Source::Own(place) => address(self.buffers.block(place, segment, block, i).0),
                    Source::Staged { rank, cell } => self.cell(rank, buffer, cell + i),
                }));
                let publish = fold.publish.map(|cell| self.cell(self.rank, buffer, cell + i));
                let (output, also) = match (fold.into, publish) {
                    // Only the others want it.
                    (Area::Scratch(_), Some(publish)) => (publish, None),
                    (Area::Scratch(_), None) => unreachable!("a result that nobody wants"),
                    _ => (address(into), publish),
                };
                if publish.is_some() {
                    self.staged += count * self.size();
                }
                let divisor = if fold.root { self.divisor } else { None };
                let (dtype, reduction) = (self.call.dtype, self.call.reduction);
                let Submitting { stream, folds, .. } = *self.device;
                // SAFETY: inputs are staged cells, complete since the pipeline waited for their owners'
                // ticks, and the caller's memory; the outputs are this rank's own, and no rank reads
                // its cell before the next tick.
                self.device.attempt(|| unsafe {
                    folds.fold(stream, dtype, reduction, divisor, &inputs, output, also, count)
                });
                *self.inputs = inputs;
            }
        }
    }

    fn collect(&mut self, segment: usize, buffer: usize) {
        let mut copies = Copies::new(self.device);
        for collect in &self.window.collects {
            for (i, block) in collect.blocks.clone().enumerate() {
                let (into, count) = self.buffers.block(collect.into, segment, block, i as u32);
                let from = self.cell(collect.rank, buffer, collect.cell + i as u32);
                // SAFETY: the cell is complete, since the pipeline waited for its owner's tick.
                unsafe { copies.add(from.0 as *mut u8, into, count * self.size()) };
            }
        }
        // SAFETY: as above.
        unsafe { copies.submit() };
    }

    fn entered(&mut self) -> Result<(), Interrupted> {
        self.view.agree().map_err(|mismatch| {
            self.disagreement = Some(mismatch);
            Interrupted
        })
    }
}

/// Copies within the device, of which neighbours become one.
struct Copies<'a> {
    device: &'a Submitting<'a>,
    from: DevicePtr,
    into: DevicePtr,
    bytes: usize,
}

impl<'a> Copies<'a> {
    fn new(device: &'a Submitting<'a>) -> Copies<'a> {
        Copies { device, from: DevicePtr::default(), into: DevicePtr::default(), bytes: 0 }
    }

    /// Copies that many bytes, with the next ones if these follow.
    ///
    /// # Safety
    /// Both are device memory, valid for that many bytes until the copy is done, apart or equal.
    unsafe fn add(&mut self, from: *mut u8, into: *mut u8, bytes: usize) {
        let (from, into) = (address(from), address(into));
        if bytes == 0 || from == into {
            return;
        }
        if (from, into) != (self.from.offset(self.bytes), self.into.offset(self.bytes)) {
            // SAFETY: passed on from the caller.
            unsafe { self.submit() };
            (self.from, self.into) = (from, into);
        }
        self.bytes += bytes;
    }

    /// Submits what is left.
    ///
    /// # Safety
    /// As of [`Copies::add`].
    unsafe fn submit(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes > 0 {
            // SAFETY: passed on from the caller.
            self.device.attempt(|| unsafe { self.device.stream.copy(self.into, self.from, bytes) });
        }
    }
}

/// An address of a request on device memory.
fn address(pointer: *mut u8) -> DevicePtr {
    DevicePtr(pointer as u64)
}

/// A turn of a wait for the device alone.
fn pause(turn: u32) {
    if turn < EAGER {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}
