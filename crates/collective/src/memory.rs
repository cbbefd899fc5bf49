//! Memory that a group keeps between calls.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

/// Scratch memory that grows to what the largest schedule needs and no further; its contents
/// mean nothing between calls.
#[derive(Default)]
pub struct ScratchMemory {
    start: Option<std::ptr::NonNull<u8>>,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for ScratchMemory {}

const ALIGN: usize = 4096;

impl ScratchMemory {
    /// At least `bytes` bytes.
    pub fn reserve(&mut self, bytes: usize) -> *mut u8 {
        if bytes > self.bytes {
            self.release();
            let layout =
                Layout::from_size_align(bytes, ALIGN).expect("scratch is far below isize::MAX");
            // SAFETY: `bytes` is larger than the old size, so it is not zero.
            let start = unsafe { alloc(layout) };
            self.start = std::ptr::NonNull::new(start);
            if self.start.is_none() {
                handle_alloc_error(layout);
            }
            self.bytes = bytes;
        }
        self.start.map_or(std::ptr::null_mut(), |p| p.as_ptr())
    }

    fn release(&mut self) {
        if let Some(start) = self.start.take() {
            let layout = Layout::from_size_align(self.bytes, ALIGN).expect("was allocated with it");
            // SAFETY: allocated with this layout in `reserve`.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
    }
}

impl Drop for ScratchMemory {
    fn drop(&mut self) {
        self.release();
    }
}
