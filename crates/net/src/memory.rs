//! Memory that processes of one host share, and descriptors that travel over Unix sockets.
//!
//! Shared memory is *sealed*: its file can neither shrink nor grow, so that no access can fail once it is
//! mapped. Another process that has it mapped may write to it at any time, so it is never lent as a slice: its
//! bytes are [copied](Memory::read), or accessed as atomics through [`Memory::as_ptr`]. Memory that
//! [others can only read](Memory::create_readable) is different for its maker, who alone writes to it.

mod mapping;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(not(target_arch = "x86_64"))]
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use socket2::Socket;

use mapping::{Access, Mapping};

/// Sealed memory, mapped into this process.
pub struct Memory {
    map: Mapping,
    /// The file of memory that this process made. A mapping needs none, and descriptors are few.
    file: Option<OwnedFd>,
}

impl Memory {
    /// Makes memory of so many bytes. They are reserved now, so that a lack of memory is an error here
    /// and not a signal later.
    pub fn create(bytes: usize) -> io::Result<Memory> {
        Memory::sealed(bytes, SealFlags::empty())
    }

    /// As [`Memory::create`], for this process alone to write: others can map it for reading only.
    pub fn create_readable(bytes: usize) -> io::Result<Memory> {
        Memory::sealed(bytes, SealFlags::FUTURE_WRITE)
    }

    fn sealed(bytes: usize, more: SealFlags) -> io::Result<Memory> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("unisono", flags)?;
        let whole = mapping::whole_pages(bytes) as u64;
        rustix::fs::ftruncate(&file, whole)?;
        // The mapping that is made before a seal against writing can be written to.
        let map = Mapping::new(file.as_fd(), bytes, Access::ReadWrite)?;
        // Before the file has all its pages: those that it has are copied.
        map.collapse(file.as_fd());
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, whole)?;
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | more;
        rustix::fs::fcntl_add_seals(&file, all)?;
        Ok(Memory { map, file: Some(file) })
    }

    /// Maps so many bytes of memory that another process made; for reading only, if its maker wants it so.
    ///
    /// # Errors
    ///
    /// If the file is shorter, or may still be cut: then an access would end this process with SIGBUS.
    pub fn open(file: impl AsFd, bytes: usize) -> io::Result<Memory> {
        let file = file.as_fd();
        let access = match seals_of(file, bytes)?.intersects(READ_ONLY) {
            true => Access::Read,
            false => Access::ReadWrite,
        };
        Ok(Memory { map: Mapping::new(file, bytes, access)?, file: None })
    }

    /// As [`Memory::open`], for a caller that writes to the memory as well.
    ///
    /// # Errors
    ///
    /// As there; and if the memory can only be read, where writing would end this process with SIGSEGV.
    pub fn open_writable(file: impl AsFd, bytes: usize) -> io::Result<Memory> {
        let file = file.as_fd();
        if seals_of(file, bytes)?.intersects(READ_ONLY) {
            return Err(refused("the other process's memory can only be read"));
        }
        Ok(Memory { map: Mapping::new(file, bytes, Access::ReadWrite)?, file: None })
    }

    /// The file of memory that this process made, to hand it to others.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Bytes that are mapped.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Where it is mapped, aligned to pages.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_ptr()
    }

    /// Writes bytes at a place.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.map.len()));
        // SAFETY: they fit, as checked above. No reference to the mapping exists in this process, and
        // nothing here depends on what another process does to it.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(at), bytes.len());
        }
    }

    /// Copies bytes from a place, reading each once, so that what is checked is what is used.
    ///
    /// # Panics
    ///
    /// If they reach beyond the end, or if place or length are no multiples of eight.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at.checked_add(into.len()).is_some_and(|end| end <= self.map.len()));
        assert!(at.is_multiple_of(8) && into.len().is_multiple_of(8));
        // SAFETY: within the mapping, which can be read and is sealed against shrinking, and aligned, as
        // checked above.
        unsafe { copy(self.as_ptr().add(at), into) };
    }
}

/// Seals with which a file cannot be mapped for writing.
const READ_ONLY: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);

/// The seals of a file of memory that has so many bytes and keeps them.
fn seals_of(file: BorrowedFd<'_>, bytes: usize) -> io::Result<SealFlags> {
    let seals = rustix::fs::fcntl_get_seals(file)?;
    let length = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    if !seals.contains(SealFlags::SHRINK) || length < bytes as u64 {
        return Err(refused("the other process's memory is too small or not sealed"));
    }
    Ok(seals)
}

fn refused(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Copies memory that another process may write to meanwhile, reading each byte once. What is copied is
/// then anything, but it is one thing.
///
/// # Safety
/// `from` is valid for reads of the length of `into`, which is a multiple of eight, and aligned
/// to eight bytes.
unsafe fn copy(from: *mut u8, into: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise. To the compiler these are reads of foreign memory, of which it assumes
    // nothing; the direction flag is clear, as it always is between instructions of Rust.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") into.len() => _,
            inout("rdi") into.as_mut_ptr() => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for (word, into) in into.chunks_exact_mut(8).enumerate() {
        // SAFETY: the caller's promise; loads of this size need no memory that can be written.
        let word = unsafe { AtomicU64::from_ptr(from.cast::<u64>().add(word)) };
        into.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
}

/// Sends bytes over a Unix socket, and a descriptor with them. A fresh connection has room for a few
/// hundred bytes; without, this is an error.
pub fn send_with(
    socket: &Socket,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors;
    if let Some(descriptor) = descriptor {
        descriptors = [descriptor];
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        debug_assert!(fits, "there is room for one descriptor");
    }
    let slices = [IoSlice::new(bytes)];
    let sent = rustix::net::sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(rustix::io::Errno::AGAIN) }
}

/// Receives some bytes, and a descriptor if one comes with them.
pub fn receive_with(
    socket: &Socket,
    into: &mut [u8],
    descriptor: &mut Option<OwnedFd>,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(into)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(socket, &mut slices, &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            *descriptor = descriptors.last();
        }
    }
    Ok(message.bytes)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use socket2::{Domain, Type};

    #[test]
    fn memory_is_shared_over_a_socket() {
        let (here, there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let mut mine = Memory::create(8192).unwrap();
        mine.write(4096, b"written before");
        send_with(&here, b"take it", mine.file()).unwrap();
        let (mut bytes, mut file) = ([0; 7], None);
        assert_eq!(receive_with(&there, &mut bytes, &mut file), Ok(7));
        assert_eq!(&bytes, b"take it");
        let theirs = Memory::open(file.unwrap(), 8192).unwrap();
        let mut read = [0; 16];
        theirs.read(4096, &mut read);
        assert_eq!(&read[..14], b"written before");
        assert!(theirs.file().is_none());
    }

    /// Around the size from which on memory may have huge pages.
    #[test]
    fn memory_of_any_size_is_shared_to_its_last_byte() {
        const HUGE: usize = 2 << 20;
        for bytes in [4096, HUGE - 8, HUGE, HUGE + 8, 3 * HUGE - 4096] {
            let mut mine = Memory::create(bytes).unwrap();
            let theirs = Memory::open(mine.file().unwrap(), bytes).unwrap();
            assert_eq!((mine.len(), theirs.len()), (bytes, bytes));
            let mut last = [1; 8];
            theirs.read(bytes - 8, &mut last);
            assert_eq!(last, [0; 8], "{bytes}");
            mine.write(bytes - 8, b"the last");
            theirs.read(bytes - 8, &mut last);
            assert_eq!(&last, b"the last");
        }
    }

    #[test]
    fn memory_that_others_can_only_read_is_as_large() {
        let mut mine = Memory::create_readable(5 << 20).unwrap();
        let theirs = Memory::open(mine.file().unwrap(), 5 << 20).unwrap();
        mine.write(4 << 20, b"it is here");
        let mut read = [0; 16];
        theirs.read(4 << 20, &mut read);
        assert_eq!(&read[..10], b"it is here");
    }

    #[test]
    fn memory_that_can_only_be_read_is_refused_for_writing() {
        for bytes in [4096, 5 << 20] {
            let mine = Memory::create_readable(bytes).unwrap();
            let error = Memory::open_writable(mine.file().unwrap(), bytes).map(drop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            let mine = Memory::create(bytes).unwrap();
            let mut theirs = Memory::open_writable(mine.file().unwrap(), bytes).unwrap();
            theirs.write(0, b"from elsewhere..");
            let mut read = [0; 16];
            mine.read(0, &mut read);
            assert_eq!(&read, b"from elsewhere..");
        }
        // Sealed against every mapping that can be written, as no memory of ours is.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("t", flags).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
        assert!(Memory::open_writable(&file, 4096).is_err());
        // Before Linux 6.7 they could not be mapped at all.
        match Memory::open(&file, 4096) {
            Ok(memory) => assert_eq!(memory.len(), 4096),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied),
        }
    }

    /// Whatever the other process has opened its file for: what could not be mapped costs no addresses.
    #[test]
    fn descriptors_that_allow_too_little_are_refused() {
        use rustix::fs::{Mode, OFlags};
        for bytes in [4096, 5 << 20] {
            let mine = Memory::create(bytes).unwrap();
            let path = format!("/proc/self/fd/{}", mine.file().unwrap().as_raw_fd());
            let reopened = |flags| rustix::fs::open(&path, flags, Mode::empty()).unwrap();
            for flags in [OFlags::RDONLY, OFlags::WRONLY] {
                let opened = Memory::open(reopened(flags), bytes);
                for opened in [opened, Memory::open_writable(reopened(flags), bytes)] {
                    let error = opened.map(drop).unwrap_err();
                    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
                }
            }
            let mine = Memory::create_readable(bytes).unwrap();
            let path = format!("/proc/self/fd/{}", mine.file().unwrap().as_raw_fd());
            let read_only = rustix::fs::open(&path, OFlags::RDONLY, Mode::empty()).unwrap();
            assert_eq!(Memory::open(read_only, bytes).unwrap().len(), bytes);
        }
    }

    /// What a kernel gives that has just given one.
    #[test]
    fn large_memory_has_huge_pages_where_there_are_any() {
        let has_any = || mapping::tests::kernel_gives_huge_pages();
        if !has_any() {
            return println!("SKIPPED: this kernel gives no huge pages");
        }
        let memory = Memory::create(4 << 20).unwrap();
        let given = mapping::tests::kib_in_huge_pages(memory.as_ptr());
        // Another process may have taken the last of them.
        assert!(given >= 2048 || !has_any(), "{given} KiB");
    }

    #[test]
    fn memory_that_could_shrink_or_is_short_is_refused() {
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        assert!(Memory::open(&file, 8192).is_err());
        let short = Memory::create(4096).unwrap();
        assert!(Memory::open(short.file().unwrap(), 8192).is_err());
        assert!(Memory::open(short.file().unwrap(), 4096).is_ok());
    }
}
