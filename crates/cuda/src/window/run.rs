//! A call in progress: the streams of a rank, the staging of all, and the clocks between them.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Instant;

use unisono_collective::engine::clock::{Interrupted, Pipeline};
use unisono_collective::engine::{Buffers, Clocks, GroupState, HostEngine};
use unisono_collective::schedule::{Area, Phase, Schedule, Window};
use unisono_collective::{Call, Error, Reduction};

use super::BUFFERS;
use super::hosting::HostStaging;
use super::lines::{Line, Lines, Submitting};
use super::opening::{self, Shared};
use super::steps::{Copies, DeviceSteps, Staging};
use super::way::Way;
use super::words::{DeviceWords, Waiting, pause};
use crate::context::Context;
use crate::error::CudaError;
use crate::event::Event;
use crate::fold::Folds;
use crate::library::DevicePtr;

/// A rank's streams, with the staging memory of all members of its window.
pub struct Lane {
    pub lines: Lines,
    folds: Folds,
    /// On the device, with the bytes of a buffer.
    device: Option<(Shared, usize)>,
    host: Option<HostStaging>,
    by_kernel: bool,
    /// `None` for a rank that is alone.
    clocks: Option<Clocks>,
    pipeline: Pipeline,
    /// This rank's number among the members of the window, as schedules name it here.
    rank: usize,
    /// The ranks of the group, by which a mean is divided.
    world: usize,
    /// Inputs of the fold under way; kept to allocate nothing per call.
    inputs: Vec<DevicePtr>,
    pointers: Vec<*const u8>,
    waiting: Waiting,
}

// SAFETY: `pointers` is scratch of a call in progress.
unsafe impl Send for Lane {}

/// How a call runs: which way its data goes, and after what.
#[derive(Clone, Copy)]
pub struct Passage<'a> {
    pub way: Way,
    /// What must have happened before the device begins.
    pub begin: Option<&'a Event>,
}

impl Lane {
    pub fn new(
        lines: Lines,
        folds: Folds,
        device: Option<(Shared, usize)>,
        staged: Option<HostStaging>,
        by_kernel: bool,
        members: &[usize],
        host: &HostEngine,
    ) -> Lane {
        let (rank, world) = (opening::place(host, members), host.topology().world());
        assert!(device.as_ref().is_none_or(|(shared, buffer)| BUFFERS * buffer <= shared.bytes()));
        let waiting = Waiting::with_capacity(super::lines::TICKS);
        Lane {
            lines,
            folds,
            device,
            host: staged,
            by_kernel,
            clocks: host.clocks(),
            pipeline: Pipeline::new(members.len(), BUFFERS),
            rank,
            world,
            inputs: Vec::with_capacity(members.len()),
            pointers: Vec::with_capacity(members.len()),
            waiting,
        }
    }

    pub fn context(&self) -> &Context {
        self.lines.context()
    }

    /// Bytes of a staging buffer of this way; `None` if calls cannot go it.
    pub fn buffer(&self, way: Way) -> Option<usize> {
        match way {
            Way::Device => self.device.as_ref().map(|(_, buffer)| *buffer),
            _ => self.host.as_ref().map(|host| host.buffer),
        }
    }

    /// Submits a call, as far as that is possible without waiting for the device at its end.
    ///
    /// # Safety
    /// The buffers are device memory, valid for the call's layouts, and nothing else uses them until the
    /// [joined](Lines::join) stream has come to where it is when this returns.
    pub unsafe fn run(
        &mut self,
        call: &Call,
        schedule: &Schedule,
        buffers: &Buffers<'_>,
        segments: usize,
        passage: Passage<'_>,
        state: &GroupState,
    ) -> Result<(), Error> {
        self.lines.begin();
        match &schedule.phases[..] {
            [Phase::Window(window)] => {
                // SAFETY: passed on from the caller.
                unsafe { self.run_window(call, window, buffers, 0..segments, passage, state) }
            }
            _ => {
                let split = passage.way.is_through_host();
                let device = Submitting::new(&self.lines, &self.folds, split, passage.begin);
                // SAFETY: passed on from the caller.
                unsafe { copy_alone(&device, schedule, buffers, segments) };
                device.outcome()
            }
        }
    }

    /// Submits some segments of a call's window, in which the members are numbered among themselves.
    ///
    /// # Safety
    /// As of [`Lane::run`]; what the window has in scratch cells is device memory too.
    pub unsafe fn run_window(
        &mut self,
        call: &Call,
        window: &Window,
        buffers: &Buffers<'_>,
        segments: Range<usize>,
        passage: Passage<'_>,
        state: &GroupState,
    ) -> Result<(), Error> {
        let Passage { way, begin } = passage;
        let split = way.is_through_host();
        let device = Submitting::new(&self.lines, &self.folds, split, begin);
        if window.cells == 0 {
            // SAFETY: passed on from the caller.
            unsafe { copy_own(&device, window, buffers, segments) };
            return device.outcome();
        }
        let cell_bytes = buffers.column_bytes().next_multiple_of(64);
        let staging = match (way, &self.device, &self.host) {
            (Way::Device, Some((shared, buffer)), _) => Staging {
                addresses: &shared.addresses,
                pointers: &[],
                buffer: *buffer,
                fetched: DevicePtr::default(),
            },
            (_, _, Some(host)) if split => Staging {
                addresses: &host.addresses,
                pointers: &host.pointers,
                buffer: host.buffer,
                fetched: host.fetched.pointer(),
            },
            _ => unreachable!("a call goes a way that is there"),
        };
        let cells = way.cells(window);
        assert!(cells * cell_bytes <= staging.buffer, "cells fit a staging buffer");
        let clocks = self.clocks.as_mut().expect("several ranks have clocks");
        clocks.enter(call);
        self.waiting.clear();
        let words = DeviceWords {
            view: clocks.view(call, state),
            device: &device,
            waiting: RefCell::new(std::mem::take(&mut self.waiting)),
        };
        let mut steps = DeviceSteps {
            device: &device,
            words: &words,
            state,
            staging,
            way,
            rank: self.rank,
            cell_bytes,
            window,
            buffers,
            segments: segments.clone(),
            call,
            divisor: (call.reduction == Reduction::Mean).then_some(self.world as u32),
            by_kernel: self.by_kernel,
            inputs: &mut self.inputs,
            pointers: &mut self.pointers,
            disagreement: None,
            interrupted: false,
            staged: 0,
        };
        let ran = self.pipeline.run(&words, segments.len(), window.publishes, &mut steps);
        let (disagreement, staged) = (steps.disagreement.take(), steps.staged);
        let ran = if steps.interrupted { Err(Interrupted) } else { ran };
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

    /// Seconds of a byte down the bus, tried with so many bytes at most.
    pub fn try_bus(&self, most: usize) -> Result<f64, CudaError> {
        let Some(host) = &self.host else { return Ok(0.0) };
        let (bytes, down) = (most.min(host.buffer), self.lines.stream(Line::Down));
        let (from, into) = (host.fetched.pointer(), host.pointers[self.rank]);
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            // SAFETY: both have as many bytes; no rank reads this rank's buffers while no call runs, and the
            // copy is waited for.
            unsafe { down.copy_to_host(into, from, bytes)? };
            self.settle()?;
            best = best.min(start.elapsed().as_secs_f64() / bytes as f64);
        }
        Ok(best)
    }

    /// Waits until the device has done all that was submitted. It needs no other rank for that.
    pub fn settle(&self) -> Result<(), CudaError> {
        let mut turn = 0;
        while !self.lines.are_idle()? {
            pause(turn);
            turn += 1;
        }
        Ok(())
    }

    /// Closes the memory of the others. For when the streams have settled.
    pub fn close(&mut self) {
        if let Some((shared, _)) = &mut self.device {
            shared.opened.clear();
        }
        if let Some(clocks) = &self.clocks {
            clocks.close();
        }
    }

    /// Whether no rank has this one's memory open.
    pub fn all_closed(&self) -> bool {
        self.clocks.as_ref().is_none_or(Clocks::all_closed)
    }
}

/// Makes the copies of a window in which nothing is shared, and no rank waits.
///
/// # Safety
/// As of [`Lane::run`].
unsafe fn copy_own(
    device: &Submitting<'_>,
    window: &Window,
    buffers: &Buffers<'_>,
    segments: Range<usize>,
) {
    assert!(window.folds.is_empty(), "there is nothing to fold where nothing is staged");
    let mut copies = Copies::new(device, Line::Main, false);
    for segment in segments {
        for copy in &window.copies {
            // SAFETY: passed on from the caller.
            unsafe { copies.add_fold(copy, buffers, segment) };
        }
    }
    // SAFETY: passed on from the caller.
    unsafe { copies.submit() };
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
    let mut copies = Copies::new(device, Line::Main, false);
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
