//! One connection between a worker and a shard: texts, and bulk data beside them.
//!
//! Over TCP the parts of bulk data follow their text, and are read straight to where they are used.
//! Between processes of one host, bulk data lies in memory that both have mapped, one half for each
//! direction, and the text on a Unix socket says that it is there. Either way a part begins at a multiple
//! of eight bytes, the gap filled up.
//!
//! The two sides take turns: whoever has sent bulk data leaves its half alone until the other has
//! replied to it. Nobody relies on that, for nothing enforces it: what lies in common memory is copied
//! once, and only the copy is used, so that what is checked, written down and applied is the same.
//!
//! Out of turn, a shard says now and then that it lives: a [`Pulse`] does, between messages.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
#[cfg(not(target_arch = "x86_64"))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Serialize, de::DeserializeOwned};
use socket2::{Domain, Socket};
use unisono_collective::fork;
use zerocopy::{FromBytes, IntoBytes};

use super::silence::{Listener, Silence, has_waited};
use super::wire;

/// What parts of bulk data begin at a multiple of.
const ALIGNMENT: usize = 8;

/// Bytes that are read at a time where they are copied elsewhere. More: they are no longer in the cache
/// when they are copied. Fewer: more system calls.
const CHUNK: usize = 256 << 10;

/// The same in common memory, where no system call is saved: what was copied is then still in the first
/// cache. Fewer: starting to copy shows.
const SHARED_CHUNK: usize = 16 << 10;

/// The most parts that are handed to the system at once; it takes no more than 1024.
const MOST_PARTS: usize = 256;

/// By how many bytes the memory for bulk data grows before they are there. More: whoever announces much
/// and sends nothing costs that. Fewer: more often, the first time.
const GROWTH: usize = 1 << 24;

/// The most bytes of bulk data in one direction that a shard maps or reads for a worker: beyond any
/// model, far from what could overflow.
pub const MOST_BULK: u64 = 1 << 40;

/// One side of a connection.
pub struct Link {
    socket: Socket,
    memory: Option<Memory>,
    text: Vec<u8>,
    scratch: Vec<u8>,
    /// What was read of the other side's bulk data last. Of `f32`, so that it is aligned.
    bulk: Vec<f32>,
    sent: u64,
    received: u64,
    /// How long the other side may be silent, if that is known.
    silence: Option<Silence>,
    /// Locked while something is sent, so that nothing gets in between.
    speaking: Arc<Mutex<()>>,
}

/// Says that this side of a connection lives.
pub struct Pulse {
    socket: Socket,
    speaking: Arc<Mutex<()>>,
}

/// Memory that both sides have mapped.
struct Memory {
    map: MmapRaw,
    half: usize,
    /// Which half this side writes to.
    own: usize,
}

impl Link {
    /// Bulk data follows texts.
    pub fn over(socket: Socket) -> Link {
        let (text, scratch, bulk) = (Vec::new(), Vec::new(), Vec::new());
        let speaking = Arc::default();
        Link {
            socket,
            memory: None,
            text,
            scratch,
            bulk,
            sent: 0,
            received: 0,
            silence: None,
            speaking,
        }
    }

    /// Offers memory for so many bytes of bulk data in each direction to the other side of a Unix
    /// socket.
    pub fn offer(socket: Socket, bytes: usize) -> io::Result<Link> {
        let half = bytes.next_multiple_of(4096).max(4096);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("unisono-server", flags)?;
        // Reserved now, so that a lack of memory is an error here and not a signal later.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 2 * half as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let memory = Memory::map(&file, half, 0)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        debug_assert!(fits, "there is room for one descriptor");
        let size = (half as u64).to_le_bytes();
        let slices = [IoSlice::new(&size)];
        // A fresh connection has room for so little.
        rustix::net::sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL)?;
        Ok(Link { memory: Some(memory), ..Link::over(socket) })
    }

    /// Takes the memory that the other side of a Unix socket [offers](Link::offer). Over TCP there is
    /// none.
    pub fn take_offer(&mut self) -> io::Result<()> {
        let socket = &self.socket;
        if socket.domain()? != Domain::UNIX {
            return Ok(());
        }
        let mut size = [0; 8];
        let (mut filled, mut file) = (0, None);
        while filled < size.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut size[filled..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let message = match rustix::net::recvmsg(socket, &mut slices, &mut control, flags) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            if message.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            filled += message.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    file = descriptors.last();
                }
            }
        }
        let file: OwnedFd = file.ok_or_else(|| wire::invalid("no memory was offered".into()))?;
        let half = u64::from_le_bytes(size);
        let length = rustix::fs::fstat(&file)?.st_size;
        // Of a sealed file no byte can disappear while it is mapped.
        let sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        let is_aligned = half.is_multiple_of(ALIGNMENT as u64);
        if !sealed
            || !is_aligned
            || half > MOST_BULK
            || u64::try_from(length).ok() != half.checked_mul(2)
        {
            return Err(wire::invalid("the memory that was offered cannot be used".into()));
        }
        self.memory = Some(Memory::map(&file, half as usize, 1)?);
        Ok(())
    }

    /// Whether bulk data lies in common memory.
    pub fn is_shared(&self) -> bool {
        self.memory.is_some()
    }

    /// The socket, to shut it down from elsewhere.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// From now on, whoever says nothing for so long is taken for gone, and so is whoever takes nothing.
    pub fn limit_silence(&mut self, limit: Duration) -> io::Result<()> {
        let silence = Silence::new(limit);
        self.socket.set_read_timeout(Some(silence.slice()))?;
        self.socket.set_write_timeout(Some(silence.slice()))?;
        self.silence = Some(silence);
        Ok(())
    }

    /// The silence of the other side, for whoever waits elsewhere.
    pub(super) fn silence(&mut self) -> Option<&mut Silence> {
        self.silence.as_mut()
    }

    /// Says between messages that this side lives.
    pub fn pulse(&self) -> io::Result<Pulse> {
        Ok(Pulse { socket: fork::duplicate(&self.socket)?, speaking: self.speaking.clone() })
    }

    /// Bytes sent and received so far, wherever they lay.
    pub fn traffic(&self) -> u64 {
        self.sent + self.received
    }

    /// Sends a message and its bulk data.
    pub fn send(&mut self, message: &impl Serialize, parts: &[&[u8]]) -> io::Result<()> {
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        wire::write(message, &mut text);
        let sent = self.send_text(&text, parts);
        self.sent += (text.len() + parts.iter().map(|part| part.len()).sum::<usize>()) as u64;
        self.text = text;
        sent
    }

    fn send_text(&mut self, text: &[u8], parts: &[&[u8]]) -> io::Result<()> {
        let speaking = self.speaking.clone();
        let _speaking = speaking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &mut self.memory {
            memory.write(parts)?;
            return self.write_all(&mut [IoSlice::new(text)]);
        }
        const GAP: [u8; ALIGNMENT] = [0; ALIGNMENT];
        let mut slices = Vec::with_capacity(1 + 2 * parts.len());
        slices.push(IoSlice::new(text));
        for part in parts {
            slices.push(IoSlice::new(part));
            let gap = aligned(part.len()) - part.len();
            if gap > 0 {
                slices.push(IoSlice::new(&GAP[..gap]));
            }
        }
        slices.chunks_mut(MOST_PARTS).try_for_each(|slices| self.write_all(slices))
    }

    fn write_all(&mut self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        // Counted from here: whoever takes bytes may be read from later.
        let mut silence = self.silence.as_ref().map(Silence::fresh);
        while !slices.is_empty() {
            let start = Instant::now();
            match self.socket.send_vectored_with_flags(slices, SendFlags::NOSIGNAL.bits() as i32) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    IoSlice::advance_slices(&mut slices, sent);
                    silence.iter_mut().for_each(Silence::heard);
                }
                Err(error) => match &mut silence {
                    Some(silence) if has_waited(&error) => {
                        let waited = silence.waited(start.elapsed());
                        // Half a message may be sent: nothing can follow it.
                        waited.inspect_err(|_| drop(self.socket.shutdown(Shutdown::Both)))?;
                    }
                    None if error.kind() == io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Receives a message; `None` if the other side has ended the connection.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut from = Listener { socket: &self.socket, silence: self.silence.as_mut() };
        let message = wire::read(&mut from, &mut self.scratch)?;
        self.received += 4 + self.scratch.len() as u64;
        Ok(message)
    }

    /// The bulk data of the message that was received last: parts of these lengths, in memory that is
    /// this side's alone.
    pub fn bulk(&mut self, lengths: impl Iterator<Item = usize>) -> io::Result<Vec<&[u8]>> {
        let lengths: Vec<usize> = lengths.collect();
        let total = total(&lengths)?;
        self.received += total as u64;
        let bytes = match &self.memory {
            Some(memory) => memory.read(&mut self.bulk, 0, total)?,
            None => {
                let from = Listener { socket: &self.socket, silence: self.silence.as_mut() };
                read(from, &mut self.bulk, total)?
            }
        };
        let mut start = 0;
        let part = |length: usize| {
            let part = &bytes[start..start + length];
            start += aligned(length);
            part
        };
        Ok(lengths.into_iter().map(part).collect())
    }

    /// As [`Link::bulk`], for data that is copied elsewhere: calls `take` with the number of a part,
    /// where in it some bytes lie, and these, as soon as they are there.
    pub fn bulk_as_it_comes(
        &mut self,
        lengths: &[usize],
        mut take: impl FnMut(usize, usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.received += total(lengths)? as u64;
        let chunk = if self.is_shared() { SHARED_CHUNK } else { CHUNK };
        let mut at = 0;
        for (part, &length) in lengths.iter().enumerate() {
            for start in (0..length).step_by(chunk) {
                let here = chunk.min(length - start);
                let bytes = match &self.memory {
                    Some(memory) => memory.read(&mut self.bulk, at, aligned(here))?,
                    None => {
                        let silence = self.silence.as_mut();
                        let from = Listener { socket: &self.socket, silence };
                        read(from, &mut self.bulk, aligned(here))?
                    }
                };
                take(part, start, &bytes[..here])?;
                at += aligned(here);
            }
        }
        Ok(())
    }

    /// Whether the other side has ended the connection, or its process.
    pub fn is_over(&self) -> bool {
        is_over(&self.socket)
    }

    /// Whether there is something to receive, or never will be. Takes what only says that the other side
    /// lives, and never waits.
    pub fn has_message(&mut self) -> bool {
        let mut start = [0; wire::SIGN_OF_LIFE.len()];
        loop {
            let peeked = rustix::net::recv(&self.socket, &mut start, RecvFlags::PEEK | NOW);
            match peeked {
                Ok((read, _)) if read == start.len() && start == wire::SIGN_OF_LIFE => {
                    // It is there, as was just seen.
                    let _ = rustix::net::recv(&self.socket, &mut start, NOW);
                    self.silence.iter_mut().for_each(Silence::heard);
                }
                // Not even a length: the rest is on its way, unless it never will be.
                Ok((1..wire::LENGTH, _)) => return self.is_over(),
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// Waits until there is something to receive, though not for longer than this.
    pub fn await_message(&mut self, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        while !self.has_message() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let mut watched = [PollFd::new(&self.socket, PollFlags::IN)];
            let left = Timespec::try_from(left).ok();
            let _ = rustix::event::poll(&mut watched, left.as_ref());
        }
        true
    }
}

/// Without waiting.
const NOW: RecvFlags = RecvFlags::DONTWAIT;

impl Pulse {
    /// Says it, unless something else is just being said, which says it too, or the other side has so
    /// much to read that this would have to wait.
    pub fn beat(&self) {
        let Ok(_speaking) = self.speaking.try_lock() else { return };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.socket, &wire::SIGN_OF_LIFE, flags) {
            Ok(sent) if sent < wire::SIGN_OF_LIFE.len() => {
                // Half of it is said: nothing can follow.
                let _ = self.socket.shutdown(Shutdown::Both);
            }
            // A lost connection is noticed by whoever waits on it.
            Ok(_) | Err(_) => {}
        }
    }

    /// The socket, to shut it down from elsewhere.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }
}

/// The bytes of parts of these lengths.
fn total(lengths: &[usize]) -> io::Result<usize> {
    let add = |sum: usize, part: &usize| sum.checked_add(part.checked_next_multiple_of(ALIGNMENT)?);
    let total = lengths.iter().try_fold(0, add).filter(|total| *total as u64 <= MOST_BULK);
    total.ok_or_else(|| wire::invalid("more bulk data than can be".into()))
}

/// Reads so many bytes. The buffer grows with what arrives, not with what was announced, and is not
/// cleared in between.
fn read(mut from: impl Read, into: &mut Vec<f32>, bytes: usize) -> io::Result<&[u8]> {
    let mut filled = 0;
    while filled < bytes {
        let room = into.len() * size_of::<f32>();
        let end = if room > filled { room.min(bytes) } else { bytes.min(filled + GROWTH) };
        if end > room {
            into.resize(end.div_ceil(size_of::<f32>()), 0.0);
        }
        from.read_exact(&mut into.as_mut_slice().as_mut_bytes()[filled..end])?;
        filled = end;
    }
    Ok(&into.as_slice().as_bytes()[..bytes])
}

/// Whether the other side of a socket has ended the connection, or its process.
pub fn is_over(socket: &Socket) -> bool {
    let mut poll = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let over = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    rustix::event::poll(&mut poll, Some(&now)).is_ok() && poll[0].revents().intersects(over)
}

impl Memory {
    fn map(file: &OwnedFd, half: usize, own: usize) -> io::Result<Memory> {
        Ok(Memory { map: MmapOptions::new().len(2 * half).map_raw(file)?, half, own })
    }

    /// Puts parts into the half of this side.
    fn write(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let total: usize = parts.iter().map(|part| aligned(part.len())).sum();
        if total > self.half {
            return Err(wire::invalid("bulk data that does not fit".into()));
        }
        let mut start = self.own * self.half;
        for part in parts {
            // SAFETY: it fits into the half, as checked above. Nobody in this process has a reference to
            // the mapping, and of what the other process does to it nothing here depends.
            unsafe {
                let into = self.map.as_mut_ptr().add(start);
                std::ptr::copy_nonoverlapping(part.as_ptr(), into, part.len());
            }
            start += aligned(part.len());
        }
        Ok(())
    }

    /// Copies so many bytes of the other side's half, from `at` on; both are multiples of eight.
    fn read<'a>(&self, into: &'a mut Vec<f32>, at: usize, bytes: usize) -> io::Result<&'a [u8]> {
        if at.checked_add(bytes).is_none_or(|end| end > self.half) {
            return Err(wire::invalid("bulk data that cannot have fitted".into()));
        }
        let numbers = bytes / size_of::<f32>();
        if into.len() < numbers {
            into.resize(numbers, 0.0);
        }
        let start = (1 - self.own) * self.half + at;
        let into = &mut into.as_mut_slice().as_mut_bytes()[..bytes];
        // SAFETY: within the mapping, which can be read and written and is sealed against shrinking, and
        // aligned, as halves and `at` are.
        unsafe { copy(self.map.as_mut_ptr().add(start), into) };
        Ok(into)
    }
}

/// Copies memory that another process may write to meanwhile, reading each byte once. What is copied is
/// then anything, but it is one thing.
///
/// # Safety
/// `from` is valid for reads and writes of the length of `into`, which is a multiple of eight, and aligned
/// to eight bytes.
unsafe fn copy(from: *mut u8, into: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise. To the compiler these are reads by somebody else, of which it assumes
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
    for (word, into) in into.chunks_exact_mut(ALIGNMENT).enumerate() {
        // SAFETY: the caller's promise.
        let word = unsafe { AtomicU64::from_ptr(from.cast::<u64>().add(word)) };
        into.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
}

/// The numbers of a part.
pub fn numbers(part: &[u8]) -> io::Result<&[f32]> {
    <[f32]>::ref_from_bytes(part).map_err(|_| wire::invalid("bulk data that is no f32".into()))
}

/// The bytes of numbers. The format is little-endian, as every machine is that this runs on.
pub fn bytes(numbers: &[f32]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little")) };
    numbers.as_bytes()
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::Type;

    fn pairs() -> [(Link, Link); 2] {
        pairs_for(1 << 16)
    }

    /// Pairs of links of both kinds, for so many bytes of bulk data.
    fn pairs_for(bytes: usize) -> [(Link, Link); 2] {
        let pair = || Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let (a, b) = pair();
        let (c, d) = pair();
        let (offered, mut taken) = (Link::offer(c, bytes).unwrap(), Link::over(d));
        taken.take_offer().unwrap();
        [(Link::over(a), Link::over(b)), (offered, taken)]
    }

    #[test]
    fn bulk_data_arrives_beside_its_text() {
        for (mut worker, mut shard) in pairs() {
            let (odd, numbers_sent) = ([7u8; 13], [1.5f32, -2.0, 3.0]);
            for turn in 0..3u64 {
                worker.send(&turn, &[&odd, bytes(&numbers_sent)]).unwrap();
                assert_eq!(shard.receive::<u64>().unwrap(), Some(turn));
                let parts = shard.bulk([13, 12].into_iter()).unwrap();
                assert_eq!(parts[0], odd);
                assert_eq!(numbers(parts[1]).unwrap(), numbers_sent);
                shard.send(&turn, &[bytes(&numbers_sent[..1])]).unwrap();
                assert_eq!(worker.receive::<u64>().unwrap(), Some(turn));
                assert_eq!(numbers(worker.bulk([4].into_iter()).unwrap()[0]).unwrap(), [1.5]);
            }
            assert!(!shard.is_over());
            drop(worker);
            assert!(shard.is_over());
            assert_eq!(shard.receive::<u64>().unwrap(), None);
        }
    }

    #[test]
    fn bulk_data_can_be_taken_as_it_comes() {
        let large: Vec<f32> = (0..CHUNK / 4 + 5).map(|i| i as f32).collect();
        let parts = [&large[..], &[], &[1.0, 2.0, 3.0]];
        let lengths = parts.map(|part| 4 * part.len());
        for (mut worker, mut shard) in pairs_for(4 * large.len() + 64) {
            std::thread::scope(|scope| {
                scope.spawn(|| shard.send(&0u64, &parts.map(bytes)).unwrap());
                worker.receive::<u64>().unwrap();
                let mut taken = [const { Vec::new() }; 3];
                let take = |part: usize, start: usize, bytes: &[u8]| {
                    assert_eq!(start, 4 * taken[part].len());
                    taken[part].extend_from_slice(numbers(bytes)?);
                    Ok(())
                };
                worker.bulk_as_it_comes(&lengths, take).unwrap();
                assert_eq!(taken.each_ref().map(Vec::as_slice), parts);
            });
        }
    }

    /// Whoever writes to its half before it was replied to changes nothing that was read.
    #[test]
    fn what_was_read_stays_as_it_was_read() {
        for (mut worker, mut shard) in pairs() {
            worker.send(&0u64, &[bytes(&[1.0; 100])]).unwrap();
            shard.receive::<u64>().unwrap();
            let parts = shard.bulk([400].into_iter()).unwrap();
            worker.send(&1u64, &[bytes(&[2.0; 100])]).unwrap();
            assert_eq!(numbers(parts[0]).unwrap(), [1.0; 100]);
        }
    }

    #[test]
    fn more_than_fits_is_refused() {
        let [_, (mut worker, mut shard)] = pairs();
        assert!(worker.send(&0u64, &[&vec![0; 1 << 17]]).is_err());
        worker.send(&0u64, &[]).unwrap();
        shard.receive::<u64>().unwrap();
        assert!(shard.bulk([1 << 17].into_iter()).is_err());
        assert!(shard.bulk([usize::MAX, 1].into_iter()).is_err());
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let size = 4096u64.to_le_bytes();
        rustix::net::sendmsg(&a, &[IoSlice::new(&size)], &mut control, SendFlags::empty()).unwrap();
        assert!(Link::over(b).take_offer().is_err());
    }
}
