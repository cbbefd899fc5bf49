//! The memory of a window: one region per rank, written by its owner, read by all. The regions of a host
//! follow each other in one piece of memory.
//!
//! ```text
//! 0      clock line: clock u32, pad, fingerprints of the last calls
//! 64     sleepers u32, whether its owner has closed, whether it has left a call
//! 128    the last calls in full, for error messages
//! 2048   the same again, for an engine whose data is elsewhere
//! 4096   staging buffers
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::thread::futex;
use unisono_net::memory::Memory;
use zerocopy::FromBytes;

use crate::call::{Call, WireCall};

/// Bytes before the staging buffers.
const HEADER: usize = 4096;

/// Calls remembered. A rank can be ahead of another by at most as many calls as there are
/// staging buffers, since it waits for the other to release a buffer before it reuses it.
const CALLS: usize = 6;

/// The largest number of staging buffers that [`CALLS`] allows.
pub const MAX_BUFFERS: usize = CALLS - 1;

#[repr(C, align(64))]
struct ClockLine {
    clock: AtomicU32,
    fingerprints: [AtomicU64; CALLS],
}

#[repr(C, align(64))]
struct SleepLine {
    sleepers: AtomicU32,
    closed: AtomicU32,
    left: AtomicU32,
}

#[repr(C)]
struct Header {
    clock: ClockLine,
    sleep: SleepLine,
    calls: [[AtomicU64; size_of::<WireCall>() / 8]; CALLS],
}

/// Where the header of an engine is whose data is elsewhere.
const ENGINE: usize = HEADER / 2;

const _: () = assert!(size_of::<Header>() <= HEADER - ENGINE && size_of::<Header>() <= ENGINE);
const _: () = assert!(size_of::<WireCall>().is_multiple_of(8));

/// One rank's part of a window, mapped into this process.
pub struct Region {
    memory: Arc<Memory>,
    /// Where it starts in the memory.
    start: usize,
    /// Where its header starts in it.
    header: usize,
    /// Bytes of one staging buffer.
    buffer: usize,
    buffers: usize,
}

impl Region {
    /// Bytes of a region: a multiple of a page if a buffer is.
    pub fn bytes(buffers: usize, buffer: usize) -> usize {
        HEADER.saturating_add(buffers.saturating_mul(buffer))
    }

    /// Region `place` of the memory of a host.
    pub fn new(memory: Arc<Memory>, place: usize, buffers: usize, buffer: usize) -> Region {
        let bytes = Region::bytes(buffers, buffer);
        let start = place * bytes;
        assert!(bytes.is_multiple_of(HEADER) && start + bytes <= memory.len());
        Region { memory, start, header: 0, buffer, buffers }
    }

    /// The same with the clock of an engine whose data is elsewhere.
    pub fn for_engine(&self) -> Region {
        Region { memory: self.memory.clone(), header: ENGINE, ..*self }
    }

    /// Wakes the ranks that sleep on the clocks of these regions, if this process still has them.
    pub fn waker(regions: &[Region]) -> impl FnOnce() + Send + use<> {
        let memory = regions.first().map(|region| Arc::downgrade(&region.memory));
        let places: Vec<(usize, usize, usize)> =
            regions.iter().map(|region| (region.start, region.buffer, region.buffers)).collect();
        move || {
            let Some(memory) = memory.and_then(|memory| memory.upgrade()) else { return };
            for (start, buffer, buffers) in places {
                let region = Region { memory: memory.clone(), start, header: 0, buffer, buffers };
                region.wake();
                region.for_engine().wake();
            }
        }
    }

    /// Wakes the ranks that sleep on this region's clock.
    pub fn wake(&self) {
        // That no rank sleeps is no error.
        let _ = futex::wake(self.clock(), futex::Flags::empty(), i32::MAX as u32);
    }

    /// The start of a staging buffer.
    pub fn buffer(&self, index: usize) -> *mut u8 {
        assert!(index < self.buffers);
        // SAFETY: from its start, the memory has HEADER + buffers × buffer bytes, and index is smaller
        // than buffers.
        unsafe { self.memory.as_ptr().add(self.start + HEADER + index * self.buffer) }
    }

    /// Bytes of a staging buffer.
    pub fn buffer_size(&self) -> usize {
        self.buffer
    }

    pub(super) fn clock(&self) -> &AtomicU32 {
        &self.header().clock.clock
    }

    pub(super) fn sleepers(&self) -> &AtomicU32 {
        &self.header().sleep.sleepers
    }

    /// Not 0 once its owner has closed.
    pub(super) fn closed(&self) -> &AtomicU32 {
        &self.header().sleep.closed
    }

    /// Not 0 once its owner has left a call in which others may still read its buffer.
    pub(super) fn left(&self) -> &AtomicU32 {
        &self.header().sleep.left
    }

    /// Records the owner's call number `slot` on this window; published by its next tick.
    pub(super) fn record(&self, slot: usize, call: &Call) {
        let words: [u64; size_of::<WireCall>() / 8] = zerocopy::transmute!(WireCall::from(*call));
        for (word, value) in self.header().calls[slot % CALLS].iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// A tick of the owner's clock during its call number `slot`.
    ///
    /// The fingerprint is on the line of the clock, and both are written together: other ranks read that line all the
    /// time, and a line that is written twice with a pause between them has to be fetched twice.
    pub(super) fn tick(&self, slot: usize, fingerprint: u64, clock: u32) {
        let line = &self.header().clock;
        line.fingerprints[slot % CALLS].store(fingerprint, Ordering::Relaxed);
        line.clock.store(clock, Ordering::SeqCst);
    }

    /// The fingerprint of the owner's call number `slot` on this window.
    pub(super) fn fingerprint(&self, slot: usize) -> u64 {
        self.header().clock.fingerprints[slot % CALLS].load(Ordering::Relaxed)
    }

    /// The owner's call number `slot` on this window, if it can be read.
    pub(super) fn call(&self, slot: usize) -> Option<Call> {
        let mut bytes = [0; size_of::<WireCall>()];
        let words = &self.header().calls[slot % CALLS];
        for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Call::try_from(WireCall::read_from_bytes(&bytes).ok()?).ok()
    }

    fn header(&self) -> &Header {
        // SAFETY: the region starts page-aligned and is at least HEADER bytes long, half of which are
        // enough for a header; that consists of atomics only, for which any bytes are valid and shared
        // access is sound.
        unsafe { &*self.memory.as_ptr().add(self.start + self.header).cast::<Header>() }
    }
}
