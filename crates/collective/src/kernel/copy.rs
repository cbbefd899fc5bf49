//! Copying.

/// Copies `bytes` bytes; does nothing if source and destination are the same.
///
/// # Safety
/// Both pointers are valid for `bytes` bytes, which are the same or do not overlap, and no other thread
/// writes the source or touches the destination meanwhile.
#[inline]
pub unsafe fn copy(from: *const u8, into: *mut u8, bytes: usize) {
    if !std::ptr::eq(from, into) {
        // SAFETY: the caller's promise, less the case of equal pointers.
        unsafe { into.copy_from_nonoverlapping(from, bytes) };
    }
}
