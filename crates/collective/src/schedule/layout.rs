//! Where the blocks of a buffer lie, segment by segment.

use std::ops::Range;

/// Maps (segment, block) to a range of elements of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout<'a> {
    blocks: Blocks<'a>,
    /// Elements of a block in one segment.
    column: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks<'a> {
    /// A buffer without blocks of its own: every segment is contiguous and cut into `parts`.
    Tiled { count: usize, parts: usize },
    /// `blocks` blocks of `each` elements, one after the other.
    Equal { each: usize, blocks: usize },
    /// Block `b` is `offsets[b]..offsets[b + 1]`.
    Unequal { offsets: &'a [usize] },
    /// Blocks of `each` elements that lie apart: block `b` starts at `starts[b]`.
    Separate { starts: &'a [usize], each: usize },
    /// The buffer holds only one of the blocks.
    Single { block: usize, count: usize },
}

impl<'a> Layout<'a> {
    /// A buffer of `count` elements whose segments are cut into `parts` columns.
    pub fn tiled(count: usize, parts: usize, column: usize) -> Layout<'a> {
        assert!(parts > 0 && column > 0);
        Layout { blocks: Blocks::Tiled { count, parts }, column }
    }

    /// A buffer of `blocks` blocks of `each` elements.
    pub fn equal(each: usize, blocks: usize, column: usize) -> Layout<'a> {
        assert!(column > 0);
        Layout { blocks: Blocks::Equal { each, blocks }, column }
    }

    /// A buffer whose block `b` is `offsets[b]..offsets[b + 1]`.
    pub fn unequal(offsets: &'a [usize], column: usize) -> Layout<'a> {
        assert!(column > 0 && !offsets.is_empty());
        Layout { blocks: Blocks::Unequal { offsets }, column }
    }

    /// Blocks of `each` elements that lie apart, block `b` starting at `starts[b]`.
    pub fn separate(starts: &'a [usize], each: usize, column: usize) -> Layout<'a> {
        assert!(column > 0);
        Layout { blocks: Blocks::Separate { starts, each }, column }
    }

    /// A buffer that holds only block `block`, of `count` elements.
    pub fn single(block: usize, count: usize, column: usize) -> Layout<'a> {
        assert!(column > 0);
        Layout { blocks: Blocks::Single { block, count }, column }
    }

    /// Elements of a block in one segment, at most.
    pub fn column(&self) -> usize {
        self.column
    }

    /// The number of segments that cover this buffer; at least one, so that ranks meet even
    /// when there is nothing to move.
    pub fn segments(&self) -> usize {
        let (longest, per_segment) = match self.blocks {
            Blocks::Tiled { count, parts } => (count, parts * self.column),
            Blocks::Equal { each, .. } | Blocks::Separate { each, .. } => (each, self.column),
            Blocks::Unequal { offsets } => {
                (offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0), self.column)
            }
            Blocks::Single { count, .. } => (count, self.column),
        };
        longest.div_ceil(per_segment).max(1)
    }

    /// The elements of `block` in `segment`; empty past the block's end.
    ///
    /// # Panics
    /// If the buffer has no such block.
    pub fn span(&self, segment: usize, block: usize) -> Range<usize> {
        let column = self.column;
        let (start, len) = match self.blocks {
            Blocks::Tiled { count, parts } => {
                assert!(block < parts, "block {block} of {parts}");
                let from = ((segment * parts + block) * column).min(count);
                return from..(from + column).min(count);
            }
            Blocks::Equal { each, blocks } => {
                assert!(block < blocks, "block {block} of {blocks}");
                (block * each, each)
            }
            Blocks::Unequal { offsets } => (offsets[block], offsets[block + 1] - offsets[block]),
            Blocks::Separate { starts, each } => (starts[block], each),
            Blocks::Single { block: only, count } => {
                assert!(block == only, "block {block} of a buffer that holds only block {only}");
                (0, count)
            }
        };
        let from = (segment * column).min(len);
        start + from..start + (from + column).min(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element lies in exactly one (segment, block).
    fn partitions(layout: Layout<'_>, blocks: usize, count: usize) {
        let mut seen = vec![0; count];
        for segment in 0..layout.segments() {
            for block in 0..blocks {
                layout.span(segment, block).for_each(|i| seen[i] += 1);
            }
        }
        assert!(seen.iter().all(|&n| n == 1), "{layout:?}: {seen:?}");
    }

    #[test]
    fn spans_partition_the_buffer() {
        for count in [0, 1, 2, 7, 8, 9, 100] {
            for column in [1, 2, 3, 64] {
                partitions(Layout::tiled(count, 3, column), 3, count);
                partitions(Layout::equal(count, 3, column), 3, 3 * count);
                partitions(Layout::unequal(&[0, 0, count, count + 5], column), 3, count + 5);
                let starts = [2 * count, 0, count];
                partitions(Layout::separate(&starts, count, column), 3, 3 * count);
            }
        }
    }

    #[test]
    fn an_empty_buffer_has_one_empty_segment() {
        let layout = Layout::tiled(0, 4, 16);
        assert_eq!(layout.segments(), 1);
        assert!(layout.span(0, 3).is_empty());
    }
}
