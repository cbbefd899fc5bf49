//! One connection between a worker and a server: messages, and bulk data beside them.
//!
//! Over TCP the parts of bulk data follow their message, and are read straight to where they are used.
//! Between processes of one host, bulk data lies in memory that both have mapped, one half for each
//! direction, and the message on a Unix socket says that it is there. Either way a part begins at a multiple
//! of eight bytes, the gap filled up.
//!
//! The two sides take turns: a side that has sent bulk data leaves its half alone until the other has
//! replied to it. Neither relies on that, for nothing enforces it: every byte that lies in common memory is read
//! once, into this side's own, and only that is used. What is checked, written down or kept is copied as a whole, so that
//! it is what is applied. A gradient that is only applied stays [where it is](Place) until then.
//!
//! A server that puts many weights into common memory says so step by step: after the message one byte on
//! the socket for every step. So the worker takes what is there while the server writes what follows.
//!
//! Out of turn, a server says now and then that it lives: a [`Heartbeat`] does, between messages.

mod shared;

use std::io::{self, IoSlice, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};
use serde::{Serialize, de::DeserializeOwned};
use socket2::{Domain, Socket};
use unisono_net::frame::{self, SIGN_OF_LIFE};
use unisono_net::keepalive::is_over;
use unisono_net::memory::{self, receive_with, send_with};
use unisono_net::{Connection, Receiver, Sender};
use zerocopy::{FromBytes, IntoBytes};

pub use shared::{Bulk, Place};
use shared::{MOST_STEPS, Memory, STEP, step};

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

/// What says on the socket that another step is there.
const STEP_DONE: u8 = 1;

/// The most parts that are handed to the system at once; it takes no more than 1024.
const MOST_PARTS: usize = 256;

/// By how many bytes the memory for bulk data grows before they are there. More: a peer that announces much
/// and sends nothing costs that. Fewer: more often, the first time.
const GROWTH: usize = 1 << 24;

/// The most bytes of bulk data in one direction that a server maps or reads for a worker: beyond any
/// model, far from what could overflow.
pub const MOST_BULK: u64 = 1 << 40;

/// One side of a connection.
pub struct Link {
    receiver: Receiver,
    /// Locked while something is sent, so that nothing gets in between.
    sender: Arc<Mutex<Sender>>,
    memory: Option<Memory>,
    framed: Vec<u8>,
    scratch: Vec<u8>,
    /// What was read of the other side's bulk data last. Of `f32`, so that it is aligned.
    bulk: Vec<f32>,
    /// Bytes of the server's bulk data that are announced, in common memory.
    announced: usize,
    sent: u64,
    received: u64,
    /// How long the other side may be silent, if that is known.
    silence: Option<Silence>,
}

/// Says that this side of a connection lives.
pub struct Heartbeat {
    socket: Arc<Socket>,
    sender: Arc<Mutex<Sender>>,
}

impl Link {
    /// Bulk data follows messages.
    pub fn over(connection: impl Into<Connection>) -> Link {
        let Connection { sender, receiver } = connection.into();
        Link {
            receiver,
            sender: Arc::new(Mutex::new(sender)),
            memory: None,
            framed: Vec::new(),
            scratch: Vec::new(),
            bulk: Vec::new(),
            announced: 0,
            sent: 0,
            received: 0,
            silence: None,
        }
    }

    /// Offers memory for so many bytes of bulk data in each direction to the other side of a Unix
    /// socket.
    pub fn offer(connection: impl Into<Connection>, bytes: usize) -> io::Result<Link> {
        let link = Link::over(connection);
        let half = bytes.next_multiple_of(4096).max(4096);
        let sealed = memory::Memory::create(2 * half)?;
        send_with(link.socket(), &(half as u64).to_le_bytes(), sealed.file())?;
        Ok(Link { memory: Some(Memory { sealed, half, own: 0 }), ..link })
    }

    /// Takes the memory that the other side of a Unix socket [offers](Link::offer). Over TCP there is
    /// none.
    pub fn take_offer(&mut self) -> io::Result<()> {
        let socket = self.receiver.socket();
        if socket.domain()? != Domain::UNIX {
            return Ok(());
        }
        let (mut size, mut filled, mut file) = ([0; 8], 0, None);
        while filled < size.len() {
            match receive_with(socket, &mut size[filled..], &mut file) {
                Err(rustix::io::Errno::INTR) => {}
                received => match received? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    received => filled += received,
                },
            }
        }
        let file: OwnedFd = file.ok_or_else(|| wire::invalid("no memory was offered".into()))?;
        let half = u64::from_le_bytes(size);
        if !half.is_multiple_of(ALIGNMENT as u64) || half > MOST_BULK {
            return Err(wire::invalid("the memory that was offered cannot be used".into()));
        }
        let half = half as usize;
        // This side writes to its half.
        let sealed = memory::Memory::open_writable(file, 2 * half)?;
        self.memory = Some(Memory { sealed, half, own: 1 });
        Ok(())
    }

    /// Whether bulk data lies in common memory.
    pub fn is_shared(&self) -> bool {
        self.memory.is_some()
    }

    /// The socket, to shut it down from elsewhere.
    pub fn socket(&self) -> &Arc<Socket> {
        self.receiver.socket()
    }

    /// From now on the other side is taken for gone if it says nothing for so long, or takes nothing.
    pub fn limit_silence(&mut self, limit: Duration) -> io::Result<()> {
        let silence = Silence::new(limit);
        self.socket().set_read_timeout(Some(silence.slice()))?;
        self.socket().set_write_timeout(Some(silence.slice()))?;
        self.silence = Some(silence);
        Ok(())
    }

    /// The silence of the other side, for a thread that waits elsewhere.
    pub(super) fn silence(&mut self) -> Option<&mut Silence> {
        self.silence.as_mut()
    }

    /// Says between messages that this side lives.
    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat { socket: self.socket().clone(), sender: self.sender.clone() }
    }

    /// Bytes sent and received so far, wherever they lay.
    pub fn traffic(&self) -> u64 {
        self.sent + self.received
    }

    /// Sends a message and its bulk data.
    pub fn send(&mut self, message: &impl Serialize, parts: &[&[u8]]) -> io::Result<()> {
        let mut framed = std::mem::take(&mut self.framed);
        framed.clear();
        let written = frame::append(message, &mut framed).map_err(io::Error::from);
        let sent = written.and_then(|()| self.send_frame(&framed, parts));
        self.sent += (framed.len() + parts.iter().map(|part| part.len()).sum::<usize>()) as u64;
        self.framed = framed;
        sent
    }

    fn send_frame(&mut self, frame: &[u8], parts: &[&[u8]]) -> io::Result<()> {
        let silence = self.silence.as_ref();
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &mut self.memory {
            let mut message = Some(frame);
            return memory.write(parts, || {
                let next = message.take().unwrap_or(&[STEP_DONE]);
                write_all(&mut sender, silence, &mut [IoSlice::new(next)])
            });
        }
        const GAP: [u8; ALIGNMENT] = [0; ALIGNMENT];
        let mut slices = Vec::with_capacity(1 + 2 * parts.len());
        slices.push(IoSlice::new(frame));
        for part in parts {
            slices.push(IoSlice::new(part));
            let gap = aligned(part.len()) - part.len();
            if gap > 0 {
                slices.push(IoSlice::new(&GAP[..gap]));
            }
        }
        let mut chunks = slices.chunks_mut(MOST_PARTS);
        chunks.try_for_each(|slices| write_all(&mut sender, silence, slices))
    }

    /// Receives a message; `None` if the other side has ended the connection.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut from = Listener { receiver: &mut self.receiver, silence: self.silence.as_mut() };
        let message = frame::read(&mut from, wire::LONGEST, &mut self.scratch)?;
        self.received += 4 + self.scratch.len() as u64;
        Ok(message)
    }

    /// The bulk data of the message that was received last: parts of these lengths, in memory that is
    /// this side's alone.
    pub fn bulk(&mut self, lengths: impl Iterator<Item = usize>) -> io::Result<Vec<&[u8]>> {
        let lengths: Vec<usize> = lengths.collect();
        let total = self.begin_bulk(&lengths)?;
        let bytes = self.read_bulk(0, total, total)?;
        let mut start = 0;
        let part = |length: usize| {
            let part = &bytes[start..start + length];
            start += aligned(length);
            part
        };
        Ok(lengths.into_iter().map(part).collect())
    }

    /// As [`Link::bulk`], where each part is copied to this side's own memory, or may stay where it is.
    pub fn bulk_or_places(&mut self, parts: &[(usize, bool)]) -> io::Result<Vec<Bulk<'_>>> {
        let lengths = || parts.iter().map(|(length, _)| *length);
        if !self.is_shared() {
            return Ok(self.bulk(lengths())?.into_iter().map(Bulk::Own).collect());
        }
        let total = self.begin_bulk(&lengths().collect::<Vec<usize>>())?;
        if self.is_announced() {
            self.await_steps(total, total)?;
        }
        let memory = self.memory.as_ref().expect("seen above");
        memory.expect(0, total)?;
        let copied = |(length, copied): &(usize, bool)| if *copied { aligned(*length) } else { 0 };
        let room: usize = parts.iter().map(copied).sum();
        grow(&mut self.bulk, room);
        let mut own = &mut self.bulk.as_mut_slice().as_mut_bytes()[..room];
        let (mut bulk, mut at) = (Vec::with_capacity(parts.len()), memory.others());
        for &(bytes, copied) in parts {
            bulk.push(match copied {
                true => {
                    let (into, rest) = own.split_at_mut(aligned(bytes));
                    own = rest;
                    memory.copy(at, into);
                    Bulk::Own(&into[..bytes])
                }
                false => Bulk::There(Place { memory, at, bytes }),
            });
            at += aligned(bytes);
        }
        Ok(bulk)
    }

    /// As [`Link::bulk`], for data that is copied elsewhere: calls `take` with the number of a part,
    /// where in it some bytes lie, and these, as soon as they are there.
    pub fn bulk_as_it_comes(
        &mut self,
        lengths: &[usize],
        mut take: impl FnMut(usize, usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let total = self.begin_bulk(lengths)?;
        let chunk = if self.is_shared() { SHARED_CHUNK } else { CHUNK };
        let mut at = 0;
        for (part, &length) in lengths.iter().enumerate() {
            for start in (0..length).step_by(chunk) {
                let here = chunk.min(length - start);
                let bytes = self.read_bulk(at, aligned(here), total)?;
                take(part, start, &bytes[..here])?;
                at += aligned(here);
            }
        }
        Ok(())
    }

    /// As [`Link::bulk`], for numbers that have a place already, which they are written to at once: calls `lend` with the
    /// number of a part, the first of some of its numbers, how many these are, and what it has to call with
    /// their place.
    pub fn bulk_to_place(
        &mut self,
        lengths: &[usize],
        mut lend: impl FnMut(usize, usize, usize, &mut dyn FnMut(&mut [f32])),
    ) -> io::Result<()> {
        let total = self.begin_bulk(lengths)?;
        let mut at = 0;
        for (part, &length) in lengths.iter().enumerate() {
            for start in (0..length).step_by(STEP) {
                let here = STEP.min(length - start);
                let mut filled = Err(wire::invalid("weights without a place".into()));
                let numbers = here / size_of::<f32>();
                lend(part, start / size_of::<f32>(), numbers, &mut |into| {
                    if into.len() == numbers {
                        filled = self.fill(at, total, into);
                    }
                });
                filled?;
                at += aligned(here);
            }
        }
        Ok(())
    }

    /// To be called once for the bulk data of every message, before any of it is read: how much there is, in parts of these
    /// lengths.
    fn begin_bulk(&mut self, lengths: &[usize]) -> io::Result<usize> {
        let total = total(lengths)?;
        self.received += total as u64;
        self.announced = 0;
        Ok(total)
    }

    /// Whether bulk data comes in steps that are announced: to a worker, in common memory.
    fn is_announced(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.own == 0)
    }

    /// Writes the next numbers of bulk data to their place; in common memory they lie at `at`, of so many bytes in `total`.
    fn fill(&mut self, at: usize, total: usize, into: &mut [f32]) -> io::Result<()> {
        let gap = aligned(size_of_val(into)) - size_of_val(into);
        if self.is_announced() {
            self.await_steps(at + size_of_val(into) + gap, total)?;
        }
        let Some(memory) = &self.memory else {
            let mut from =
                Listener { receiver: &mut self.receiver, silence: self.silence.as_mut() };
            from.read_exact(into.as_mut_bytes())?;
            return from.read_exact(&mut [0; ALIGNMENT][..gap]);
        };
        memory.expect(at, size_of_val(into) + gap)?;
        let at = memory.others() + at;
        let (pairs, rest) = into.as_chunks_mut::<2>();
        memory.copy(at, pairs.as_mut_bytes());
        if let [last] = rest {
            // The gap behind it is copied with it.
            let mut pair = [0.0; 2];
            memory.copy(at + size_of_val(pairs), pair.as_mut_bytes());
            *last = pair[0];
        }
        Ok(())
    }

    /// The next bytes of bulk data, of so many in `total`, copied once; in common memory they lie at `at`.
    fn read_bulk(&mut self, at: usize, bytes: usize, total: usize) -> io::Result<&[u8]> {
        if self.is_announced() {
            self.await_steps(at + bytes, total)?;
        }
        if let Some(memory) = &self.memory {
            memory.expect(at, bytes)?;
            grow(&mut self.bulk, bytes);
            let into = &mut self.bulk.as_mut_slice().as_mut_bytes()[..bytes];
            memory.copy(memory.others() + at, into);
            return Ok(into);
        }
        let from = Listener { receiver: &mut self.receiver, silence: self.silence.as_mut() };
        read(from, &mut self.bulk, bytes)
    }

    /// Waits until the server has announced the bulk data of its last message up to here, of so much in `total`. With the
    /// end of the bulk data, all announcements have been taken.
    fn await_steps(&mut self, end: usize, total: usize) -> io::Result<()> {
        // The message is the first.
        let step = step(total);
        self.announced = self.announced.max(step.min(total));
        let mut done = [0; MOST_STEPS];
        while self.announced < end {
            let missing = (total - self.announced).div_ceil(step).min(done.len());
            let mut from =
                Listener { receiver: &mut self.receiver, silence: self.silence.as_mut() };
            match from.read(&mut done[..missing]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(steps) if done[..steps].iter().any(|step| *step != STEP_DONE) => {
                    return Err(wire::invalid("something else than bulk data".into()));
                }
                Ok(steps) => self.announced = (self.announced + steps * step).min(total),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the other side has ended the connection, or its process.
    pub fn is_over(&self) -> bool {
        is_over(self.socket())
    }

    /// Whether there is something to receive, or never will be. Takes what only says that the other side
    /// lives, and never waits.
    pub fn has_message(&mut self) -> bool {
        let mut start = SIGN_OF_LIFE;
        loop {
            match self.receiver.peek(&mut start) {
                Ok(frame::HEADER) if start == SIGN_OF_LIFE => {
                    // It is there, as was just seen.
                    let _ = self.receiver.receive(&mut start, RecvFlags::DONTWAIT);
                    self.silence.iter_mut().for_each(Silence::heard);
                }
                // Not even a length: the rest is on its way, unless it never will be.
                Ok(1..frame::HEADER) => return self.is_over(),
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// Whether bytes are here that a poll of the socket does not see.
    pub fn has_unread(&self) -> bool {
        self.receiver.has_unread()
    }

    /// Waits until there is something to receive, though not for longer than this.
    pub fn await_message(&mut self, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        while !self.has_message() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let mut watched = [PollFd::new(self.socket(), PollFlags::IN)];
            let left = Timespec::try_from(left).ok();
            let _ = rustix::event::poll(&mut watched, left.as_ref());
        }
        true
    }
}

/// Sends all of it, to a peer that may be silent for so long.
fn write_all(
    sender: &mut Sender,
    silence: Option<&Silence>,
    mut slices: &mut [IoSlice<'_>],
) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    // Counted from here: a peer that takes bytes may be read from later.
    let mut silence = silence.map(Silence::fresh);
    while !slices.is_empty() || !sender.is_flushed() {
        let start = Instant::now();
        let sent = match slices.is_empty() {
            true => sender.flush(SendFlags::empty()).map(|()| 0),
            false => sender.send_vectored(slices, SendFlags::empty()),
        };
        match sent.map_err(io::Error::from) {
            Ok(0) if !slices.is_empty() => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => {
                IoSlice::advance_slices(&mut slices, sent);
                silence.iter_mut().for_each(Silence::heard);
            }
            Err(error) => match &mut silence {
                Some(silence) if has_waited(&error) => {
                    let waited = silence.waited(start.elapsed());
                    // Half a message may be sent: nothing can follow it.
                    waited.inspect_err(|_| drop(sender.socket().shutdown(Shutdown::Both)))?;
                }
                None if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
    }
    Ok(())
}

impl Heartbeat {
    /// Says it by these bytes, a message, unless something else is just being said, which says it too, or
    /// the other side has so much to read that this would have to wait.
    pub fn beat(&self, message: &[u8]) {
        let Ok(mut sender) = self.sender.try_lock() else { return };
        match sender.send(message, SendFlags::DONTWAIT) {
            Ok(sent) if sent < message.len() => {
                // Half of it is said: nothing can follow.
                let _ = self.socket.shutdown(Shutdown::Both);
            }
            // A lost connection is noticed by the thread that waits on it.
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

/// Makes room for so many bytes, a multiple of eight.
fn grow(bulk: &mut Vec<f32>, bytes: usize) {
    let numbers = bytes / size_of::<f32>();
    if bulk.len() < numbers {
        bulk.resize(numbers, 0.0);
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
pub(super) mod tests;
