//! The steps of a schedule, submitted to the device.
//!
//! Where the staging is on the device, a segment is staged, folded and collected in the order of one
//! stream. Where it is on the host, it is staged by the stream down and collected by the one up, and in between
//!
//! - *copied*: up fetches what others staged into a slot on the device, a kernel folds it there, and down
//!   publishes the result;
//! - *mapped*: a kernel reads what others staged, and publishes the result, over the bus;
//! - *folded*: the processor folds what all staged, this rank too, and up brings the result.
//!
//! Nothing is written to the caller's memory before what is staged of it has left it, for input and output may be one.

use std::ops::Range;

use unisono_collective::engine::clock::{Interrupted, Steps};
use unisono_collective::engine::{Buffers, GroupState};
use unisono_collective::schedule::{Area, Fold, Source, Window, WindowFold};
use unisono_collective::{Call, Error, kernel};

use super::hosting::SLOTS;
use super::lines::{Line, Submitting};
use super::way::Way;
use super::words::DeviceWords;
use crate::library::DevicePtr;

/// The staging memory of a call.
pub struct Staging<'a> {
    /// Every rank's, for the device.
    pub addresses: &'a [DevicePtr],
    /// Every rank's, for the processor; none on the device.
    pub pointers: &'a [*mut u8],
    /// Bytes of a buffer.
    pub buffer: usize,
    /// The slots on the device for what is fetched from the host.
    pub fetched: DevicePtr,
}

/// A call in progress.
pub struct DeviceSteps<'a> {
    pub device: &'a Submitting<'a>,
    pub words: &'a DeviceWords<'a>,
    pub state: &'a GroupState,
    pub staging: Staging<'a>,
    pub way: Way,
    pub rank: usize,
    pub cell_bytes: usize,
    pub window: &'a Window,
    pub buffers: &'a Buffers<'a>,
    /// Those of the call that go through the window now.
    pub segments: Range<usize>,
    pub call: &'a Call,
    pub divisor: Option<u32>,
    pub by_kernel: bool,
    pub inputs: &'a mut Vec<DevicePtr>,
    pub pointers: &'a mut Vec<*const u8>,
    /// That another rank makes another call.
    pub disagreement: Option<Error>,
    /// A wait for the device was ended.
    pub interrupted: bool,
    /// Bytes written for others to read.
    pub staged: usize,
}

impl DeviceSteps<'_> {
    fn offset(&self, buffer: usize, cell: u32) -> usize {
        buffer * self.staging.buffer + cell as usize * self.cell_bytes
    }

    fn cell(&self, rank: usize, buffer: usize, cell: u32) -> DevicePtr {
        self.staging.addresses[rank].offset(self.offset(buffer, cell))
    }

    /// The same for a copy, which knows memory of the host by its address there.
    fn cell_to_copy(&self, rank: usize, buffer: usize, cell: u32) -> *mut u8 {
        match self.staging.pointers.get(rank) {
            Some(pointer) => pointer.wrapping_add(self.offset(buffer, cell)),
            None => self.cell(rank, buffer, cell).0 as *mut u8,
        }
    }

    fn size(&self) -> usize {
        self.call.dtype.size()
    }

    fn copies(&self, line: Line) -> Copies<'_> {
        Copies::new(self.device, line, self.by_kernel)
    }

    /// What a line writes to the caller's memory of a segment waits until the segment is staged.
    fn after_staging(&self, line: Line, buffer: usize) {
        if !self.window.stages.is_empty() {
            self.device.follow(line, Line::Down, &self.device.lines.marks.staged[buffer]);
        }
    }

    /// Where the processor finds this rank's input of a fold, and whether others find it there as well.
    fn is_staged(&self, fold: &WindowFold, cell: u32) -> bool {
        let starts = fold.blocks.start;
        self.window.stages.iter().any(|stage| {
            stage.blocks.contains(&starts) && stage.cell + (starts - stage.blocks.start) == cell
        })
    }

    /// The cell in which all ranks stage what a fold combines.
    fn common_cell(&self, fold: &WindowFold) -> u32 {
        let cells = fold.inputs.iter().find_map(|input| match *input {
            Source::Staged { cell, .. } => Some(cell),
            Source::Own(_) => None,
        });
        cells.expect("a fold of several ranks combines what another one staged")
    }

    /// Folds by a kernel that reaches all cells.
    fn fold_by_kernel(&mut self, segment: usize, buffer: usize) {
        for fold in &self.window.folds {
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
                    _ => (address(into), publish),
                };
                if publish.is_some() {
                    self.staged += count * self.size();
                }
                self.launch(fold, &inputs, output, also, count);
                *self.inputs = inputs;
            }
        }
    }

    /// Fetches what others staged, and folds it on the device.
    fn fold_copied(&mut self, segment: usize, buffer: usize) {
        let (slot, marks) = (buffer % SLOTS, &self.device.lines.marks);
        self.device.follow(Line::Up, Line::Main, &marks.free[slot]);
        let room = self.staging.fetched.offset(slot * self.staging.buffer);
        let mut fetched = 0;
        let mut slot_is_read_down = false;
        for fold in &self.window.folds {
            for (i, block) in fold.blocks.clone().enumerate() {
                let i = i as u32;
                let (into, count) = self.buffers.block(fold.into, segment, block, i);
                let bytes = count * self.size();
                let first = room.offset(fetched * self.cell_bytes);
                let mut inputs = std::mem::take(self.inputs);
                inputs.clear();
                let mut copies = self.copies(Line::Up);
                for input in &fold.inputs {
                    inputs.push(match *input {
                        Source::Own(place) => {
                            address(self.buffers.block(place, segment, block, i).0)
                        }
                        Source::Staged { rank, cell } => {
                            let into = room.offset(fetched * self.cell_bytes);
                            fetched += 1;
                            let from = self.cell_to_copy(rank, buffer, cell + i);
                            // SAFETY: the cell is complete, since the pipeline waited for its owner's
                            // tick; the slot has room for it, and its last fold is done.
                            unsafe { copies.add(from, into.0 as *mut u8, bytes) };
                            into
                        }
                    });
                }
                // SAFETY: as above.
                unsafe { copies.submit() };
                self.device.mark(Line::Up, &marks.fetched[slot]);
                self.device.follow(Line::Main, Line::Up, &marks.fetched[slot]);
                let is_scratch = matches!(fold.into, Area::Scratch(_));
                let output = if is_scratch { first } else { address(into) };
                self.launch(fold, &inputs, output, None, count);
                *self.inputs = inputs;
                if let Some(cell) = fold.publish {
                    self.device.mark(Line::Main, &marks.folded[slot]);
                    self.device.follow(Line::Down, Line::Main, &marks.folded[slot]);
                    let into = self.cell_to_copy(self.rank, buffer, cell + i);
                    let mut copies = self.copies(Line::Down);
                    // SAFETY: the result is complete then; no rank reads the cell before the next tick.
                    unsafe {
                        copies.add(output.0 as *mut u8, into, bytes);
                        copies.submit();
                    }
                    self.staged += bytes;
                    slot_is_read_down |= is_scratch;
                }
            }
        }
        if fetched > 0 {
            let last = if slot_is_read_down { Line::Down } else { Line::Main };
            self.device.mark(last, &marks.free[slot]);
        }
    }

    /// Folds on the processor what all have staged.
    fn fold_on_host(&mut self, segment: usize, buffer: usize) {
        let marks = &self.device.lines.marks;
        let is_done =
            |event: &crate::event::Event| self.device.attempt(|| event.query()) == Some(true);
        let waited = self
            .words
            .wait_until(self.state, || is_done(&marks.staged[buffer]))
            .and_then(|()| self.words.wait_until(self.state, || is_done(&marks.returned[buffer])));
        if waited.is_err() {
            self.interrupted = true;
            return;
        }
        if segment + 1 == self.segments.end {
            self.device.lines.is_done(Line::Down);
        }
        let mut results = self.window.cells;
        for fold in &self.window.folds {
            let common = self.common_cell(fold);
            let is_shared = self.is_staged(fold, common);
            for (i, block) in fold.blocks.clone().enumerate() {
                let i = i as u32;
                let (into, count) = self.buffers.block(fold.into, segment, block, i);
                let mut inputs = std::mem::take(self.pointers);
                inputs.clear();
                inputs.extend(fold.inputs.iter().map(|input| match *input {
                    Source::Own(_) => self.cell_to_copy(self.rank, buffer, common + i).cast_const(),
                    Source::Staged { rank, cell } => {
                        self.cell_to_copy(rank, buffer, cell + i).cast_const()
                    }
                }));
                // What others read stays as it is; in a cell that only this rank reads, or that it
                // publishes, the result replaces the input.
                let cell = if is_shared { results + i } else { common + i };
                assert!(fold.publish.is_none_or(|publish| !is_shared && publish == common));
                let result = self.cell_to_copy(self.rank, buffer, cell);
                let divisor = if fold.root { self.divisor } else { None };
                if count > 0 {
                    // SAFETY: inputs are staged cells, complete since the pipeline waited for their
                    // owners' ticks, and this rank's own, whose event has happened; the result is a cell of
                    // this rank that no other reads before the next tick, and that its device has
                    // finished reading.
                    unsafe {
                        kernel::fold(
                            self.call.dtype,
                            self.call.reduction,
                            &fold.tree,
                            &inputs,
                            result,
                            None,
                            count,
                            divisor,
                        );
                    }
                }
                *self.pointers = inputs;
                let bytes = count * self.size();
                if fold.publish.is_some() {
                    self.staged += bytes;
                }
                if !matches!(fold.into, Area::Scratch(_)) {
                    let mut copies = self.copies(Line::Up);
                    // SAFETY: the result stays until the event below has happened.
                    unsafe {
                        copies.add(result, into, bytes);
                        copies.submit();
                    }
                }
            }
            results += fold.blocks.len() as u32;
        }
        if !self.window.folds.is_empty() {
            self.device.mark(Line::Up, &marks.returned[buffer]);
        }
    }

    fn launch(
        &self,
        fold: &WindowFold,
        inputs: &[DevicePtr],
        output: DevicePtr,
        also: Option<DevicePtr>,
        count: usize,
    ) {
        let divisor = if fold.root { self.divisor } else { None };
        let (dtype, reduction) = (self.call.dtype, self.call.reduction);
        let folds = self.device.folds;
        // SAFETY: inputs are staged cells, complete since the pipeline waited for their owners'
        // ticks, or copies of them, and the caller's memory; the outputs are this rank's own, and no
        // rank reads its cell before the next tick.
        self.device.submit(Line::Main, |stream| unsafe {
            folds.fold(stream, dtype, reduction, divisor, inputs, output, also, count)
        });
    }
}

impl Steps for DeviceSteps<'_> {
    fn stage(&mut self, segment: usize, buffer: usize) {
        let segment = self.segments.start + segment;
        let mut staged = 0;
        // What the processor folded here last may be on its way up.
        self.device.follow(Line::Down, Line::Up, &self.device.lines.marks.returned[buffer]);
        let mut copies = self.copies(Line::Down);
        for stage in &self.window.stages {
            for (i, block) in stage.blocks.clone().enumerate() {
                let (from, count) = self.buffers.block(stage.from, segment, block, i as u32);
                let into = self.cell_to_copy(self.rank, buffer, stage.cell + i as u32);
                let bytes = count * self.size();
                staged += bytes;
                // SAFETY: the block lies in the caller's memory; the cell is ours to write, since the
                // pipeline waited for its readers.
                unsafe { copies.add(from, into, bytes) };
            }
        }
        if self.way == Way::Folded {
            for fold in &self.window.folds {
                let common = self.common_cell(fold);
                if self.is_staged(fold, common) {
                    continue;
                }
                for (i, block) in fold.blocks.clone().enumerate() {
                    let i = i as u32;
                    let own = fold.inputs.iter().find_map(|input| match *input {
                        Source::Own(place) => Some(place),
                        Source::Staged { .. } => None,
                    });
                    let Some(place) = own else { continue };
                    let (from, count) = self.buffers.block(place, segment, block, i);
                    let into = self.cell_to_copy(self.rank, buffer, common + i);
                    // SAFETY: as above.
                    unsafe { copies.add(from, into, count * self.size()) };
                }
            }
        }
        // SAFETY: as above.
        unsafe { copies.submit() };
        self.staged += staged;
        if self.device.line(Line::Down) != Line::Main {
            self.device.mark(Line::Down, &self.device.lines.marks.staged[buffer]);
        }
    }

    fn fold(&mut self, segment: usize, buffer: usize) {
        let segment = self.segments.start + segment;
        if !self.window.copies.is_empty() {
            self.after_staging(Line::Main, buffer);
        }
        let mut copies = self.copies(Line::Main);
        for copy in &self.window.copies {
            // SAFETY: both places lie in the caller's memory.
            unsafe { copies.add_fold(copy, self.buffers, segment) };
        }
        // SAFETY: as above.
        unsafe { copies.submit() };
        if self.window.folds.is_empty() {
            return;
        }
        let is_canonical = self.window.folds.iter().all(|fold| fold.tree.is_canonical());
        assert!(is_canonical, "the device folds in the canonical order");
        match self.way {
            Way::Folded => self.fold_on_host(segment, buffer),
            Way::Copied => {
                self.after_staging(Line::Main, buffer);
                self.fold_copied(segment, buffer);
            }
            Way::Device | Way::Mapped => {
                self.after_staging(Line::Main, buffer);
                self.fold_by_kernel(segment, buffer);
            }
        }
    }

    fn collect(&mut self, segment: usize, buffer: usize) {
        let segment = self.segments.start + segment;
        if self.window.collects.is_empty() {
            return;
        }
        self.after_staging(Line::Up, buffer);
        let mut copies = self.copies(Line::Up);
        for collect in &self.window.collects {
            for (i, block) in collect.blocks.clone().enumerate() {
                let (into, count) = self.buffers.block(collect.into, segment, block, i as u32);
                let from = self.cell_to_copy(collect.rank, buffer, collect.cell + i as u32);
                // SAFETY: the cell is complete, since the pipeline waited for its owner's tick.
                unsafe { copies.add(from, into, count * self.size()) };
            }
        }
        // SAFETY: as above.
        unsafe { copies.submit() };
    }

    fn entered(&mut self) -> Result<(), Interrupted> {
        self.words.view.agree().map_err(|mismatch| {
            self.disagreement = Some(mismatch);
            Interrupted
        })
    }
}

/// Copies of one line, of which neighbours become one: on the device by main, to the host down, and from it up.
pub struct Copies<'a> {
    device: &'a Submitting<'a>,
    line: Line,
    /// Whether copies on the device are made by a kernel of ours, not by what the driver has for it.
    by_kernel: bool,
    from: *mut u8,
    into: *mut u8,
    bytes: usize,
}

impl<'a> Copies<'a> {
    pub fn new(device: &'a Submitting<'a>, line: Line, by_kernel: bool) -> Copies<'a> {
        let none = std::ptr::null_mut();
        let line = device.line(line);
        Copies { device, line, by_kernel, from: none, into: none, bytes: 0 }
    }

    /// Copies that many bytes, with the next ones if these follow.
    ///
    /// # Safety
    /// The one that is on the host, if the line leads there, is registered memory; the rest is device memory; both are
    /// valid for that many bytes until the copy is done, apart or equal.
    pub unsafe fn add(&mut self, from: *mut u8, into: *mut u8, bytes: usize) {
        if bytes == 0 || from == into {
            return;
        }
        let follows = self.from.wrapping_add(self.bytes) == from
            && self.into.wrapping_add(self.bytes) == into;
        if !follows {
            // SAFETY: passed on from the caller.
            unsafe { self.submit() };
            (self.from, self.into) = (from, into);
        }
        self.bytes += bytes;
    }

    /// Makes the copy that a fold of one input is.
    ///
    /// # Safety
    /// As of [`Copies::add`], for its blocks.
    pub unsafe fn add_fold(&mut self, copy: &Fold, buffers: &Buffers<'_>, segment: usize) {
        for (i, block) in copy.blocks.clone().enumerate() {
            let (from, count) = buffers.block(copy.inputs[0], segment, block, i as u32);
            let (into, _) = buffers.block(copy.into, segment, block, i as u32);
            // SAFETY: passed on from the caller.
            unsafe { self.add(from, into, count * buffers.dtype.size()) };
        }
    }

    /// Submits what is left.
    ///
    /// # Safety
    /// As of [`Copies::add`].
    pub unsafe fn submit(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes == 0 {
            return;
        }
        let (from, into, device) = (self.from, self.into, self.device);
        // SAFETY: passed on from the caller.
        unsafe {
            match self.line {
                Line::Down => device
                    .submit(Line::Down, |stream| stream.copy_to_host(into, address(from), bytes)),
                Line::Up => device
                    .submit(Line::Up, |stream| stream.copy_from_pinned(address(into), from, bytes)),
                Line::Main if self.by_kernel => device.submit(Line::Main, |stream| {
                    use unisono_collective::{Dtype, Reduction};
                    let (dtype, sum) = (Dtype::U8, Reduction::Sum);
                    let (from, into) = ([address(from)], address(into));
                    device.folds.fold(stream, dtype, sum, None, &from, into, None, bytes)
                }),
                Line::Main => device
                    .submit(Line::Main, |stream| stream.copy(address(into), address(from), bytes)),
            };
        }
    }
}

/// An address of a request on device memory.
fn address(pointer: *mut u8) -> DevicePtr {
    DevicePtr(pointer as u64)
}
