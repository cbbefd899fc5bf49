//! The memory of one call: the caller's buffers and the scratch cells, cut by their layouts.

use crate::call::Call;
use crate::dtype::Dtype;
use crate::helpers::{Room, Share};
use crate::kernel;
use crate::schedule::{Area, Fold, Layout};

/// Where the places of a schedule are in memory.
#[derive(Clone, Copy)]
pub struct Buffers<'a> {
    /// The caller's input; may be null where the schedule does not use it.
    pub input: *const u8,
    /// How the input is cut.
    pub input_layout: Layout<'a>,
    /// The caller's output; equal to the input for a call in place.
    pub output: *mut u8,
    /// How the output is cut.
    pub output_layout: Layout<'a>,
    /// The layout that knows the lengths of the blocks that pass through scratch.
    pub shape: Layout<'a>,
    /// Scratch memory for `depth` segments in flight of `cells` cells each.
    pub scratch: *mut u8,
    /// Cells of a segment in flight.
    pub cells: usize,
    /// Segments in flight.
    pub depth: usize,
    /// The element type.
    pub dtype: Dtype,
}

impl Buffers<'_> {
    /// Bytes of a full column.
    pub fn column_bytes(&self) -> usize {
        self.shape.column() * self.dtype.size()
    }

    /// Bytes from one scratch cell to the next.
    pub fn cell_bytes(&self) -> usize {
        self.column_bytes().next_multiple_of(64)
    }

    /// Bytes of scratch for all segments in flight.
    pub fn scratch_bytes(&self) -> usize {
        self.depth * self.cells * self.cell_bytes()
    }

    /// The address and number of elements of block `block`, the `i`-th of those that start at
    /// `place`, in `segment`.
    pub fn block(&self, place: Area, segment: usize, block: u32, i: u32) -> (*mut u8, usize) {
        let size = self.dtype.size();
        match place {
            Area::Input => {
                let span = self.input_layout.span(segment, block as usize);
                (self.input.wrapping_add(span.start * size).cast_mut(), span.len())
            }
            Area::Output => {
                let span = self.output_layout.span(segment, block as usize);
                (self.output.wrapping_add(span.start * size), span.len())
            }
            Area::Scratch(cell) => {
                let slot = (segment % self.depth) * self.cells + (cell + i) as usize;
                let count = self.shape.span(segment, block as usize).len();
                (self.scratch.wrapping_add(slot * self.cell_bytes()), count)
            }
        }
    }

    /// Carries out a local fold. `inputs` is room for the list of inputs.
    ///
    /// # Safety
    /// The buffers are valid for their layouts and no other thread uses them meanwhile.
    pub unsafe fn fold(
        &self,
        fold: &Fold,
        segment: usize,
        call: &Call,
        divisor: Option<u32>,
        inputs: &mut Vec<*const u8>,
    ) {
        // SAFETY: passed on from the caller.
        unsafe { self.fold_share(fold, segment, call, divisor, Share::ALL, inputs) };
    }

    /// Carries out a share of a local fold.
    ///
    /// # Safety
    /// The buffers are valid for their layouts and no other thread uses this share of them meanwhile.
    pub(crate) unsafe fn fold_share(
        &self,
        fold: &Fold,
        segment: usize,
        call: &Call,
        divisor: Option<u32>,
        share: Share,
        inputs: &mut Room,
    ) {
        let size = self.dtype.size();
        for (i, block) in fold.blocks.clone().enumerate() {
            let (into, count) = self.block(fold.into, segment, block, i as u32);
            let share = share.of(count, size);
            if share.is_empty() {
                continue;
            }
            let at = share.start * size;
            inputs.clear();
            let address = |&place| {
                self.block(place, segment, block, i as u32).0.cast_const().wrapping_add(at)
            };
            inputs.extend(fold.inputs.iter().map(address));
            let divide = if fold.root { divisor } else { None };
            // SAFETY: all addresses are in blocks of `count` elements in valid buffers; a result
            // that overlaps an input is that input.
            unsafe {
                kernel::fold(
                    self.dtype,
                    call.reduction,
                    &fold.tree,
                    inputs,
                    into.wrapping_add(at),
                    None,
                    share.len(),
                    divide,
                );
            }
        }
    }
}
