//! Where a gradient is until it is used.
//!
//! An update needs a gradient block by block, each once. What is made of the bytes of a push only then, for one block, is
//! still in the cache when the weights of the block are updated; a whole gradient would go to memory and come back.
//! So an encoding is decoded there, what a worker put into common memory is copied there, and the mean of a round is
//! made there.
//!
//! Where a gradient is written down, or kept until its round is complete, it is made whole first.

use std::borrow::Cow;
use std::ops::Range;

use unisono_codec::Blockwise;

use super::link::Place;
use super::mean::Mean;

/// A gradient of a piece, or in lock-step several vectors of it.
pub enum Source<'a> {
    /// As it is.
    Values(Cow<'a, [f32]>),
    /// An encoding, which can be decoded: that was checked.
    Encoded(Blockwise<'a>),
    /// Memory to which the worker can still write. Every number is read once.
    There(Place<'a>),
    /// The mean of a round.
    Mean(Mean<'a>),
}

/// Memory for a block of a gradient that is made when it is used.
#[derive(Default)]
pub struct Room(Vec<f32>);

impl Source<'_> {
    /// How many numbers there are.
    pub fn len(&self) -> usize {
        match self {
            Source::Values(values) => values.len(),
            Source::Encoded(encoding) => encoding.len(),
            Source::There(place) => place.len(),
            Source::Mean(mean) => mean.len(),
        }
    }

    /// Some of the numbers: where they are, or made in the room. A span begins and ends at a multiple of a
    /// [block](Blockwise::block), or at the end of all.
    pub fn part<'b>(&'b self, span: Range<usize>, room: &'b mut Room) -> &'b [f32] {
        match self {
            Source::Values(values) => &values[span],
            _ => self.copy(span, room),
        }
    }

    /// As [`Source::part`], always in the room.
    pub fn copy<'b>(&self, span: Range<usize>, room: &'b mut Room) -> &'b mut [f32] {
        let length = span.len();
        // Common memory is read in pairs of numbers.
        if room.0.len() < length.next_multiple_of(2) {
            room.0.resize(length.next_multiple_of(2), 0.0);
        }
        match self {
            Source::Values(values) => room.0[..length].copy_from_slice(&values[span]),
            Source::Encoded(encoding) => encoding.decode(span, &mut room.0[..length]),
            Source::Mean(mean) => mean.make(span, &mut room.0[..length]),
            Source::There(place) => {
                place.read(span.start, &mut room.0[..length.next_multiple_of(2)]);
            }
        }
        &mut room.0[..length]
    }

    /// The numbers, if they are there as a whole.
    pub fn values(&self) -> Option<&[f32]> {
        match self {
            Source::Values(values) => Some(values),
            Source::Encoded(_) | Source::There(_) | Source::Mean(_) => None,
        }
    }
}

impl<'a> From<&'a [f32]> for Source<'a> {
    fn from(values: &'a [f32]) -> Source<'a> {
        Source::Values(Cow::Borrowed(values))
    }
}

impl From<Vec<f32>> for Source<'_> {
    fn from(values: Vec<f32>) -> Self {
        Source::Values(Cow::Owned(values))
    }
}
