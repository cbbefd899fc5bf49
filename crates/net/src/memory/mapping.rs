//! Where a file of memory is mapped, so that large ones can have huge pages.
//!
//! Two processes that stream through each other's memory touch a page of 4 KiB for less time than the processor
//! takes to find it, above all on a virtual machine. A huge page has 2 MiB. The kernel gives files in memory none
//! unless an administrator says so (`shmem_enabled`), but builds them for a program that asks for one at a time,
//! `MADV_COLLAPSE`, since Linux 6.1. A mapping can use them where it starts at a multiple of their size.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;

use rustix::fs::{FallocateFlags, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes of a huge page on x86-64, and on arm64 with small pages of 4 KiB. Elsewhere the kernel refuses them.
const HUGE: usize = 2 << 20;

/// Bytes of the smallest page anywhere.
const PAGE: u64 = 4096;

/// What may be done to memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    ReadWrite,
}

/// The bytes that a file has, and that are mapped, for so many: whole huge pages, if there is one at all. What is too
/// much is never used.
pub fn whole_pages(bytes: usize) -> usize {
    if bytes < HUGE { bytes } else { bytes.next_multiple_of(HUGE) }
}

/// A file of memory, mapped from its start, shared with all who map it.
pub struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is the address of memory that is mapped until it is dropped; who may access it when is the business of
// those who do.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps so many bytes.
    pub fn new(file: BorrowedFd<'_>, bytes: usize, access: Access) -> io::Result<Mapping> {
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        expect_opened_for(file, access)?;
        if bytes < HUGE {
            // SAFETY: the kernel chooses addresses that nothing uses.
            let start = unsafe {
                rustix::mm::mmap(null_mut(), bytes, protection, MapFlags::SHARED, file, 0)?
            };
            return Ok(Mapping { start: start.cast(), bytes });
        }
        let mapped = whole_pages(bytes);
        // A huge page more is what aligning takes at most.
        let start = reserve_aligned(mapped)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: these addresses have just been reserved, and nothing uses them yet. They stay reserved if this fails:
        // kernels before 6.12 may have unmapped them by then, and another thread may have got them since.
        unsafe { rustix::mm::mmap(start.cast(), mapped, protection, flags, file, 0)? };
        Ok(Mapping { start, bytes })
    }

    /// Gives it and its file huge pages, as far as there are any: memory works without.
    pub fn collapse(&self, file: BorrowedFd<'_>) {
        for at in (0..whole_pages(self.bytes) / HUGE).map(|page| page * HUGE) {
            // The kernel builds none where there is no page yet.
            let begun = rustix::fs::fallocate(file, FallocateFlags::empty(), at as u64, PAGE);
            let start = self.start.wrapping_add(at).cast::<c_void>();
            // SAFETY: the addresses are this mapping's, whose bytes stay as they are.
            let collapse = || unsafe { libc::madvise(start, HUGE, libc::MADV_COLLAPSE) };
            if begun.is_err() || collapse() != 0 {
                return;
            }
        }
    }

    /// Where it starts, aligned to pages.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Bytes that are mapped.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.start, whole_pages(self.bytes));
    }
}

/// Fails unless the file was opened for such access. The kernel would say so too, but only after addresses were reserved
/// that [`Mapping::new`] cannot give back then.
fn expect_opened_for(file: BorrowedFd<'_>, access: Access) -> io::Result<()> {
    let opened = rustix::fs::fcntl_getfl(file)? & OFlags::ACCMODE;
    if opened == OFlags::RDWR || (access == Access::Read && opened == OFlags::RDONLY) {
        return Ok(());
    }
    let why = "the other process's memory was not opened for that";
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// Reserves as many addresses from a multiple of [`HUGE`] on.
fn reserve_aligned(bytes: usize) -> io::Result<*mut u8> {
    let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    // A huge page more is what aligning takes at most.
    let reserved = bytes + HUGE;
    // SAFETY: the kernel chooses addresses that nothing uses.
    let first =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), reserved, none, flags)? }.cast::<u8>();
    let before = first.align_offset(HUGE);
    let start = first.wrapping_add(before);
    unmap(first, before);
    unmap(start.wrapping_add(bytes), reserved - before - bytes);
    Ok(start)
}

/// Gives back addresses that nothing refers to any more.
fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: they are reserved or mapped here, by the caller alone, who uses them no more.
        let unmapped = unsafe { rustix::mm::munmap(start.cast(), bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
pub mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::MemfdFlags;

    use super::*;

    /// What the kernel says of the mapping that begins here: KiB in huge pages.
    pub fn kib_in_huge_pages(start: *mut u8) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of = maps.split_once(&format!("\n{:x}-", start.addr())).expect("it is mapped").1;
        let line = of.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
        let number = line.and_then(|line| line.trim().strip_suffix("kB"));
        number.expect("every mapping has this line").trim().parse().unwrap()
    }

    fn file_of(bytes: usize) -> OwnedFd {
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, whole_pages(bytes) as u64).unwrap();
        file
    }

    /// Whether it has just given one, of memory all of which was there.
    pub fn kernel_gives_huge_pages() -> bool {
        let file = file_of(HUGE);
        let mapping = Mapping::new(file.as_fd(), HUGE, Access::ReadWrite).unwrap();
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, HUGE as u64).unwrap();
        // SAFETY: the mapping is this function's.
        unsafe { libc::madvise(mapping.as_ptr().cast(), HUGE, libc::MADV_COLLAPSE) == 0 }
    }

    #[test]
    fn large_mappings_begin_where_huge_pages_do() {
        let bytes = 2 * HUGE + 4096;
        let file = file_of(bytes);
        let mapping = Mapping::new(file.as_fd(), bytes, Access::ReadWrite).unwrap();
        assert_eq!((mapping.as_ptr().addr() % HUGE, mapping.len()), (0, bytes));
        mapping.collapse(file.as_fd());
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_size as usize, 3 * HUGE);
    }
}
