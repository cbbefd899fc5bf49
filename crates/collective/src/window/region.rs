//! The memory of a window: one region per rank, written by its owner, read by all.
//!
//! ```text
//! 0      clock line: clock u32, pad, fingerprints of the last calls
//! 64     sleepers u32
//! 128    the last calls in full, for error messages
//! 4096   staging buffers
//! ```

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use unisono_net::memory::Memory;
use zerocopy::{FromBytes, IntoBytes};

use crate::call::{Call, WireCall};
use crate::error::FormError;

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
}

#[repr(C)]
struct Header {
    clock: ClockLine,
    sleep: SleepLine,
    calls: [[AtomicU64; size_of::<WireCall>() / 8]; CALLS],
}

const _: () = assert!(size_of::<Header>() <= HEADER);
const _: () = assert!(size_of::<WireCall>().is_multiple_of(8));

/// One rank's part of a window, mapped into this process.
pub struct Region {
    memory: Memory,
    /// Bytes of one staging buffer.
    buffer: usize,
    buffers: usize,
}

impl Region {
    /// Makes a region of this rank's own.
    pub fn create(buffers: usize, buffer: usize) -> Result<Region, FormError> {
        Region::of(buffers, buffer, Memory::create)
    }

    /// Maps the region of another rank, received from it.
    pub fn open(file: BorrowedFd<'_>, buffers: usize, buffer: usize) -> Result<Region, FormError> {
        Region::of(buffers, buffer, |bytes| Memory::open(file, bytes))
    }

    fn of(
        buffers: usize,
        buffer: usize,
        map: impl FnOnce(usize) -> std::io::Result<Memory>,
    ) -> Result<Region, FormError> {
        let bytes = HEADER + buffers * buffer;
        let failed = |e: std::io::Error| FormError::Staging { bytes, reason: e.to_string() };
        Ok(Region { memory: map(bytes).map_err(failed)?, buffer, buffers })
    }

    /// The file behind a region of this rank's own, to hand to other ranks.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file()
    }

    /// A second mapping of a region of this rank's own.
    pub fn duplicate(&self) -> Result<Region, FormError> {
        let file = self.file().expect("only whoever made a region duplicates it");
        Region::open(file, self.buffers, self.buffer)
    }

    /// The start of a staging buffer.
    pub fn buffer(&self, index: usize) -> *mut u8 {
        assert!(index < self.buffers);
        // SAFETY: the map is HEADER + buffers × buffer bytes long and index is smaller than
        // buffers.
        unsafe { self.memory.as_ptr().add(HEADER + index * self.buffer) }
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

    /// Records the owner's call number `slot` on this window; published by its next tick.
    pub(super) fn record(&self, slot: usize, call: &Call, fingerprint: u64) {
        let slot = slot % CALLS;
        let wire = WireCall::from(*call);
        for (word, bytes) in self.header().calls[slot].iter().zip(wire.as_bytes().chunks_exact(8)) {
            let value = u64::from_ne_bytes(bytes.try_into().expect("chunks of eight"));
            word.store(value, Ordering::Relaxed);
        }
        self.header().clock.fingerprints[slot].store(fingerprint, Ordering::Relaxed);
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
        // SAFETY: the map starts page-aligned and is at least HEADER bytes long; the header
        // consists of atomics only, for which any bytes are valid and shared access is sound.
        unsafe { &*self.memory.as_ptr().cast::<Header>() }
    }
}
