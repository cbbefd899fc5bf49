//! The memory of one interpreted rank.

use std::ops::Range;

use super::Call;
use unisono_collective::schedule::{Area, Layout, Op, Schedule};

/// How long the buffers of a call are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All-reduce, broadcast, reduce: the elements of the one buffer.
    Whole(usize),
    /// Reduce-scatter, all-gather, gather, scatter: the elements of every rank's block.
    Blocks(Vec<usize>),
    /// All-to-all: what every rank (first index) sends to every rank.
    Matrix(Vec<Vec<usize>>),
}

/// The caller's buffers and the scratch of all segments in flight, as one array.
pub(super) struct Memory<V> {
    values: Vec<Option<V>>,
    input: Option<Buffer>,
    output: Option<Buffer>,
    /// Knows the lengths of the blocks that pass through scratch.
    shape: Cut,
    parts: usize,
    column: usize,
    /// Where scratch begins.
    scratch: usize,
    /// Scratch cells of a segment in flight.
    cells: usize,
}

struct Buffer {
    start: usize,
    cut: Cut,
}

/// How a buffer is cut into blocks.
#[derive(Clone)]
enum Cut {
    Parts(usize),
    Blocks { offsets: Vec<usize> },
    One { block: usize, count: usize },
}

impl<V: Copy> Memory<V> {
    pub(super) fn new(
        call: &Call,
        rank: usize,
        world: usize,
        schedule: &Schedule,
        in_flight: usize,
        input: impl FnMut(usize) -> V,
    ) -> Memory<V> {
        let (parts, cells) = (schedule.parts as usize, schedule.cells as usize);
        let (input_cut, output_cut, shape) = cuts(call, rank, world);
        let (input_len, output_len) =
            (input_cut.as_ref().map_or(0, Cut::len), output_cut.as_ref().map_or(0, Cut::len));
        // In place, a buffer of one block is where that block is in the other buffer.
        let offset = |small: &Option<Cut>| match (small, &shape) {
            (Some(Cut::One { block, .. }), Cut::Blocks { offsets }) => offsets[*block],
            _ => 0,
        };
        let (input_start, output_start, scratch) = match call.in_place {
            true => (
                offset(&input_cut),
                offset(&output_cut),
                shape.len().max(input_len).max(output_len),
            ),
            false => (0, input_len, input_len + output_len),
        };
        let mut values = vec![None; scratch + in_flight * cells * call.column];
        let elements = &mut values[input_start..input_start + input_len];
        elements.iter_mut().zip((0..).map(input)).for_each(|(to, from)| *to = Some(from));
        Memory {
            values,
            input: input_cut.map(|cut| Buffer { start: input_start, cut }),
            output: output_cut.map(|cut| Buffer { start: output_start, cut }),
            shape,
            parts,
            column: call.column,
            scratch,
            cells,
        }
    }

    pub(super) fn segments(&self) -> usize {
        let buffers = [&self.input, &self.output];
        let cuts = buffers.into_iter().flatten().map(|b| &b.cut).chain([&self.shape]);
        cuts.map(|cut| cut.layout(self.parts, self.column).segments()).max().unwrap_or(1)
    }

    /// Where a block of a segment is; `None` if there is no such place.
    pub(super) fn span(
        &self,
        slot: usize,
        segment: usize,
        place: Area,
        block: u32,
    ) -> Option<Range<usize>> {
        let block = block as usize;
        let buffer = match place {
            Area::Input => self.input.as_ref()?,
            Area::Output => self.output.as_ref()?,
            Area::Scratch(cell) => {
                let cell = cell as usize;
                if cell >= self.cells || !self.shape.has(block, self.parts) {
                    return None;
                }
                let len = self.shape.layout(self.parts, self.column).span(segment, block).len();
                let start = self.scratch + (slot * self.cells + cell) * self.column;
                return Some(start..start + len);
            }
        };
        if !buffer.cut.has(block, self.parts) {
            return None;
        }
        let span = buffer.cut.layout(self.parts, self.column).span(segment, block);
        Some(buffer.start + span.start..buffer.start + span.end)
    }

    /// The elements of some spans; `None` if one was never written.
    pub(super) fn read(&self, spans: &[Range<usize>]) -> Option<Vec<V>> {
        spans.iter().flat_map(|span| &self.values[span.clone()]).copied().collect()
    }

    pub(super) fn write(&mut self, spans: &[Range<usize>], values: Vec<V>) {
        let mut values = values.into_iter();
        for span in spans {
            self.values[span.clone()].iter_mut().zip(&mut values).for_each(|(to, v)| *to = Some(v));
        }
    }

    pub(super) fn output(&self) -> &[Option<V>] {
        let Some(Buffer { start, cut }) = &self.output else { return &[] };
        &self.values[*start..start + cut.len()]
    }
}

impl Cut {
    fn len(&self) -> usize {
        match self {
            Cut::Parts(count) | Cut::One { count, .. } => *count,
            Cut::Blocks { offsets } => *offsets.last().expect("offsets begin with 0"),
        }
    }

    fn has(&self, index: usize, parts: usize) -> bool {
        match self {
            Cut::Parts(_) => index < parts,
            Cut::Blocks { offsets } => index + 1 < offsets.len(),
            Cut::One { block, .. } => index == *block,
        }
    }

    fn layout(&self, parts: usize, column: usize) -> Layout<'_> {
        match self {
            Cut::Parts(count) => Layout::tiled(*count, parts, column),
            Cut::Blocks { offsets } => Layout::unequal(offsets, column),
            Cut::One { block, count } => Layout::single(*block, *count, column),
        }
    }
}

/// The input and the output of a rank, where it has them, and all blocks.
fn cuts(call: &Call, rank: usize, world: usize) -> (Option<Cut>, Option<Cut>, Cut) {
    match &call.sizes {
        Sizes::Whole(count) => {
            let whole = Cut::Parts(*count);
            let (input, output) = match call.op {
                Op::Broadcast { root } => (rank == root, true),
                Op::Reduce { root } => (true, rank == root),
                _ => (true, true),
            };
            (input.then(|| whole.clone()), output.then(|| whole.clone()), whole)
        }
        Sizes::Blocks(counts) => {
            assert_eq!(counts.len(), world, "one block per rank");
            let all = Cut::Blocks { offsets: offsets(counts.iter().copied()) };
            let one = Cut::One { block: rank, count: counts[rank] };
            let (input, output) = match call.op {
                Op::ReduceScatter => (Some(all.clone()), Some(one)),
                Op::Gather { root } if rank != root => (Some(one), None),
                Op::Scatter { root } if rank != root => (None, Some(one)),
                Op::Scatter { .. } => (Some(all.clone()), Some(one)),
                _ => (Some(one), Some(all.clone())),
            };
            (input, output, all)
        }
        Sizes::Matrix(counts) => {
            let input = Cut::Blocks { offsets: offsets(counts[rank].iter().copied()) };
            let output = Cut::Blocks { offsets: offsets(counts.iter().map(|row| row[rank])) };
            (Some(input.clone()), Some(output), input)
        }
    }
}

fn offsets(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut end = 0;
    let ends = counts.map(|count| {
        end += count;
        end
    });
    std::iter::once(0).chain(ends).collect()
}
