//! The streams of a rank, and what is submitted to them.
//!
//! A call whose data stays on the device has one stream, *main*. Through the host there are two more: what
//! goes *down* to the host and what comes *up* from it use the bus at once, each its own direction, beside the kernels of
//! main. Events order what must be ordered.

use std::cell::{Cell, RefCell};

use unisono_collective::Error;

use super::BUFFERS;
use super::hosting::SLOTS;
use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::fold::{FoldError, Folds};
use crate::order::failed;
use crate::stream::Stream;

/// Ticks that may wait for the device at a time: a segment has two, and the next one is submitted while
/// the first is under way. More: events that are never used. Fewer: a rank waits before it submits.
pub const TICKS: usize = 8;

/// One of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    Main,
    Down,
    Up,
}

/// Some of the streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Set(u8);

impl Line {
    pub const ALL: [Line; 3] = [Line::Main, Line::Down, Line::Up];

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl Set {
    pub fn has(self, line: Line) -> bool {
        self.0 & line.bit() != 0
    }

    #[must_use]
    pub fn with(self, line: Line) -> Set {
        Set(self.0 | line.bit())
    }

    #[must_use]
    pub fn without(self, line: Line) -> Set {
        Set(self.0 & !line.bit())
    }

    pub fn lines(self) -> impl Iterator<Item = Line> {
        Line::ALL.into_iter().filter(move |line| self.has(*line))
    }
}

/// The streams of a rank.
pub struct Lines {
    main: Stream,
    /// Down and up; of a rank that has no staging on the host there are none.
    others: Option<[Stream; 2]>,
    pub marks: Marks,
    /// To which something was submitted since the last tick.
    touched: Cell<Set>,
    /// To which something was submitted in this call, or the last one, that is not known to be done.
    used: Cell<Set>,
}

/// Points in the order of the streams.
pub struct Marks {
    /// Happen with the ticks that wait for the device; the number of a tick says which, and the line.
    pub ticks: [[Event; 3]; TICKS],
    /// A segment is staged, by its buffer.
    pub staged: [Event; BUFFERS],
    /// The processor's result is on the device, by its buffer.
    pub returned: [Event; BUFFERS],
    /// What others staged is on the device, by its slot.
    pub fetched: [Event; SLOTS],
    /// It is folded.
    pub folded: [Event; SLOTS],
    /// The slot can be used again.
    pub free: [Event; SLOTS],
    /// Where lines are when a call ends.
    joined: [Event; 3],
}

impl Lines {
    /// The streams of a rank, three if it stages on the host.
    pub fn new(context: &Context, through_host: bool) -> Result<Lines, CudaError> {
        let (_, urgent) = context.priorities()?;
        let stream = || Stream::new(context, urgent);
        let others = through_host.then(|| Ok([stream()?, stream()?])).transpose()?;
        let marks = Marks::new(context)?;
        Ok(Lines {
            main: stream()?,
            others,
            marks,
            touched: Cell::default(),
            used: Cell::default(),
        })
    }

    pub fn context(&self) -> &Context {
        self.main.context()
    }

    pub fn stream(&self, line: Line) -> &Stream {
        match (line, &self.others) {
            (Line::Down, Some([down, _])) => down,
            (Line::Up, Some([_, up])) => up,
            _ => &self.main,
        }
    }

    /// A call begins.
    pub fn begin(&self) {
        self.used.set(Set::default());
    }

    /// What was submitted to the line in this call is known to be done.
    pub fn is_done(&self, line: Line) {
        self.used.set(self.used.get().without(line));
    }

    /// The stream that has come to the end of the call when it comes to where it is now.
    pub fn join(&self) -> Result<&Stream, CudaError> {
        let used = self.used.get();
        let last = [Line::Main, Line::Up, Line::Down].into_iter().find(|line| used.has(*line));
        let last = last.unwrap_or(Line::Main);
        let end = self.stream(last);
        for line in used.without(last).lines() {
            let joined = &self.marks.joined[line as usize];
            self.stream(line).record(joined)?;
            end.wait(joined)?;
        }
        Ok(end)
    }

    /// Whether all that was submitted is done.
    pub fn are_idle(&self) -> Result<bool, CudaError> {
        for line in Line::ALL {
            if (line == Line::Main || self.others.is_some()) && !self.stream(line).query()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Marks {
    fn new(context: &Context) -> Result<Marks, CudaError> {
        fn several<const N: usize>(context: &Context) -> Result<[Event; N], CudaError> {
            let events = (0..N).map(|_| Event::new(context, EventKind::Ordering));
            let events: Vec<Event> = events.collect::<Result<_, CudaError>>()?;
            Ok(events.try_into().expect("as many as were made"))
        }
        let ticks: Vec<[Event; 3]> =
            (0..TICKS).map(|_| several(context)).collect::<Result<_, CudaError>>()?;
        Ok(Marks {
            ticks: ticks.try_into().expect("as many as were made"),
            staged: several(context)?,
            returned: several(context)?,
            fetched: several(context)?,
            folded: several(context)?,
            free: several(context)?,
            joined: several(context)?,
        })
    }
}

/// What is submitted to the streams, until something fails.
pub struct Submitting<'a> {
    pub lines: &'a Lines,
    pub folds: &'a Folds,
    /// Whether down and up are streams of their own in this call.
    split: bool,
    /// What every line waits for before the first thing that is submitted to it.
    begin: Option<&'a Event>,
    begun: Cell<Set>,
    failure: RefCell<Option<FoldError>>,
    has_failed: Cell<bool>,
}

impl<'a> Submitting<'a> {
    pub fn new(
        lines: &'a Lines,
        folds: &'a Folds,
        split: bool,
        begin: Option<&'a Event>,
    ) -> Submitting<'a> {
        let (begun, failure, has_failed) = Default::default();
        Submitting { lines, folds, split, begin, begun, failure, has_failed }
    }

    /// The line that takes the part of this one in the call.
    pub fn line(&self, line: Line) -> Line {
        if self.split { line } else { Line::Main }
    }

    /// Submits to a line; `None`, and nothing is done, after a failure.
    pub fn submit<T, E: Into<FoldError>>(
        &self,
        line: Line,
        action: impl FnOnce(&Stream) -> Result<T, E>,
    ) -> Option<T> {
        let line = self.line(line);
        let stream = self.lines.stream(line);
        if !self.begun.get().has(line) {
            self.begun.set(self.begun.get().with(line));
            if let Some(begin) = self.begin {
                self.attempt(|| stream.wait(begin))?;
            }
        }
        self.lines.touched.set(self.lines.touched.get().with(line));
        self.lines.used.set(self.lines.used.get().with(line));
        self.attempt(|| action(stream))
    }

    /// The event happens when what was submitted to a line is done.
    pub fn mark(&self, line: Line, event: &Event) {
        self.submit(line, |stream| stream.record(event));
    }

    /// What is submitted to a line from now on waits for an event of another line.
    pub fn follow(&self, line: Line, other: Line, event: &Event) {
        if self.line(line) != self.line(other) {
            self.submit(line, |stream| stream.wait(event));
        }
    }

    /// Records the events of a tick: on which lines it waits.
    pub fn tick(&self, events: &[Event; 3]) -> Set {
        let touched = self.lines.touched.take();
        for line in touched.lines() {
            self.attempt(|| self.lines.stream(line).record(&events[line as usize]));
        }
        touched
    }

    /// What this gives; `None`, and nothing is done, after a failure.
    pub fn attempt<T, E: Into<FoldError>>(
        &self,
        action: impl FnOnce() -> Result<T, E>,
    ) -> Option<T> {
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

    pub fn has_failed(&self) -> bool {
        self.has_failed.get()
    }

    pub fn outcome(&self) -> Result<(), Error> {
        self.failure.borrow_mut().take().map_or(Ok(()), |failure| Err(failed(failure)))
    }
}
