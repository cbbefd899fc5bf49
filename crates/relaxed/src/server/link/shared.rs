//! Bulk data in memory that a worker and a server have mapped.

use std::io;

use unisono_net::memory;
use zerocopy::IntoBytes;

use super::aligned;
use crate::server::wire;

/// Bytes of a step in which a server announces bulk data in common memory, at the least. More: the worker begins later.
/// Fewer: it may be woken more often.
pub const STEP: usize = 512 << 10;

/// Steps of a message's bulk data, at the most: the socket holds as many announcements, so that a server does not wait
/// for a worker that does not take them.
pub const MOST_STEPS: usize = 64;

/// A part of bulk data.
#[derive(Clone, Copy)]
pub enum Bulk<'a> {
    /// In memory that is this side's alone.
    Own(&'a [u8]),
    /// Where the other side has put it.
    There(Place<'a>),
}

/// Numbers in common memory, which the other side may change at any time.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub(super) memory: &'a Memory,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

impl Place<'_> {
    /// How many numbers there are.
    #[allow(clippy::len_without_is_empty, reason = "what is empty is read like any other")]
    pub fn len(&self) -> usize {
        self.bytes / size_of::<f32>()
    }

    /// Copies numbers from the first one that is named on, reading each once. After the last of an odd number
    /// there is one more, which means nothing.
    ///
    /// # Panics
    ///
    /// If there are no such numbers, or if these or the first one's number are not even.
    pub fn read(&self, first: usize, into: &mut [f32]) {
        let (start, bytes) = (first * size_of::<f32>(), size_of_val(into));
        assert!(start + bytes <= aligned(self.bytes), "numbers of this place");
        self.memory.copy(self.at + start, into.as_mut_bytes());
    }
}

/// Memory that both sides have mapped.
pub struct Memory {
    pub sealed: memory::Memory,
    /// Bytes of a half.
    pub half: usize,
    /// Which half this side writes to: a worker the first, a server the second.
    pub own: usize,
}

impl Memory {
    /// Puts parts into the half of this side, and announces them: once, or if this is a server's, after every
    /// [`step`].
    pub fn write(
        &mut self,
        parts: &[&[u8]],
        mut announce: impl FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let total: usize = parts.iter().map(|part| aligned(part.len())).sum();
        if total > self.half {
            return Err(wire::invalid("bulk data that does not fit".into()));
        }
        let step = if self.own == 0 { usize::MAX } else { step(total) };
        let (mut at, mut left) = (0, step);
        for part in parts {
            let mut part = *part;
            while !part.is_empty() {
                let (now, rest) = part.split_at(part.len().min(left));
                self.sealed.write(self.own * self.half + at, now);
                at += aligned(now.len());
                left -= aligned(now.len());
                part = rest;
                // The last is announced below.
                if left == 0 && at < total {
                    announce()?;
                    left = step;
                }
            }
        }
        announce()
    }

    /// Where the other side's half begins.
    pub fn others(&self) -> usize {
        (1 - self.own) * self.half
    }

    /// Refuses bytes beyond the other side's half.
    pub fn expect(&self, at: usize, bytes: usize) -> io::Result<()> {
        match at.checked_add(bytes).is_some_and(|end| end <= self.half) {
            true => Ok(()),
            false => Err(wire::invalid("bulk data that cannot have fitted".into())),
        }
    }

    /// Copies bytes from a place of the memory, reading each once; place and length are multiples of eight.
    pub fn copy(&self, at: usize, into: &mut [u8]) {
        self.sealed.read(at, into);
    }
}

/// Bytes of a step of so much bulk data: a multiple of [`ALIGNMENT`](super::ALIGNMENT).
pub fn step(total: usize) -> usize {
    aligned(total.div_ceil(MOST_STEPS)).max(STEP)
}
