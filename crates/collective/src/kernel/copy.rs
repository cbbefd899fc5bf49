//! Copies, by where their ends are.
//!
//! [`copy`] is the platform's own, which nothing beats while both ends are in a cache. Only the
//! caller knows when they are not:
//!
//! * A source in main memory arrives faster if it is asked for a page ahead, because the CPU's own
//!   prefetchers stop at every page: [`copy_from_memory`].
//! * A destination in main memory is first read by an ordinary store, line by line, only to be
//!   overwritten. [`copy_to_memory`] streams past the caches instead: twice as fast, and a loss
//!   if the destination was in a cache or is read soon.

use super::fused::{AHEAD, LINE, prefetch};

/// Copies `bytes` bytes; does nothing if source and destination are the same.
///
/// # Safety
/// Both pointers are valid for `bytes` bytes, which are the same or do not overlap, and nobody
/// writes the source or touches the destination meanwhile.
#[inline]
pub unsafe fn copy(from: *const u8, into: *mut u8, bytes: usize) {
    if !std::ptr::eq(from, into) {
        // SAFETY: the caller's promise, less the case of equal pointers.
        unsafe { into.copy_from_nonoverlapping(from, bytes) };
    }
}

/// [`copy`] from a source that is in no cache.
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_from_memory(from: *const u8, into: *mut u8, bytes: usize) {
    /// Smaller, and calls of the copy show; larger, and memory idles while a piece is copied.
    const PIECE: usize = 2048;
    for at in (0..bytes).step_by(PIECE) {
        for line in (0..PIECE).step_by(LINE) {
            prefetch(from.wrapping_add(at + AHEAD + line));
        }
        // SAFETY: a piece of the `bytes` bytes of both ends.
        unsafe { copy(from.add(at), into.add(at), PIECE.min(bytes - at)) };
    }
}

/// [`copy`] to a destination that is in no cache and will not be read soon.
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_to_memory(from: *const u8, into: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { stream(from, into, bytes) };
    settle();
}

/// Copies with stores that bypass the caches, whole lines of the destination at a time, if there
/// are such stores. Other threads may see them in any order until [`settle`].
///
/// # Safety
/// As for [`copy`].
pub unsafe fn stream(from: *const u8, into: *mut u8, bytes: usize) {
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        copy(from, into, bytes);
    }
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let head = into.align_offset(LINE).min(bytes);
        let rest = head + (bytes - head) / LINE * LINE;
        // SAFETY: head, lines and rest are parts of the `bytes` bytes of both ends, and a line of
        // the destination is aligned. Source and destination may be the same.
        unsafe {
            copy(from, into, head);
            for at in (head..rest).step_by(LINE) {
                let source = from.add(at).cast::<__m128i>();
                let line = into.add(at).cast::<__m128i>();
                let values = [0, 1, 2, 3].map(|i| _mm_loadu_si128(source.add(i)));
                for (i, value) in values.into_iter().enumerate() {
                    _mm_stream_si128(line.add(i), value);
                }
            }
            copy(from.add(rest), into.add(rest), bytes - rest);
        }
    }
}

/// Orders the stores of [`stream`] before all later ones of this thread, as others are.
pub fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every CPU of the architecture has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
