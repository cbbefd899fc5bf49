//! The bytes of one socket: whole messages out, checked messages in.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use socket2::Socket;
use unisono_net::{Connection, Receiver, Sender};
use zerocopy::{FromBytes, IntoBytes};

use super::order;
use crate::buffers::Buffers;
use crate::call::MessageHeader;
use crate::schedule::Area;

/// Bytes read ahead while looking for a header. Larger: more of a payload is copied twice.
/// Smaller: small messages need a second system call.
const LOOK_AHEAD: usize = 8192;

/// Pieces of memory handed to the kernel at once.
const PIECES: usize = 16;

/// Bytes of a message, header included, that are copied together before they are sent. Larger: the copy takes longer than
/// the kernel needs for several pieces. Smaller: the kernel has to look at every piece, which for 1 KiB over loopback
/// takes 0.15 to 0.3 of 6 µs.
const SHORT_MESSAGE: usize = 2048;

/// Bytes that one thread sends on a stream before it says so. Larger: what was received meanwhile waits. Smaller:
/// threads meet more often.
const PUMPED: usize = 256 << 10;

/// One socket of a link. Its two halves have nothing in common, so that two threads can move bytes at the same
/// time.
pub struct Stream {
    pub peer: usize,
    /// Messages that the running call wants from this stream now.
    pub expected: u32,
    pub outbound: Outbound,
    pub inbound: Inbound,
}

/// The half that sends.
pub struct Outbound {
    sender: Sender,
    output: VecDeque<Outgoing>,
    /// Where a short message is put together.
    short: Box<[u8; SHORT_MESSAGE]>,
    /// What [`Outbound::pump`] did.
    pumped: Pumped,
}

/// The half that receives.
pub struct Inbound {
    receiver: Receiver,
    input: Input,
    /// The message being received.
    body: Option<Incoming>,
    /// A header whose round has not started, or that was received and not looked at.
    parked: Option<MessageHeader>,
    /// The last message of the running call that was accepted: its round's place in the order of all,
    /// and which of the round's it is.
    last: Option<(order::Turn, u32)>,
    /// Whether [`Inbound::pump`] has received something.
    pumped: Result<bool, Errno>,
}

/// What was sent.
struct Pumped {
    bytes: Result<usize, Errno>,
    /// The segments of the messages that are sent.
    done: Vec<usize>,
}

/// Part of a message in the memory of a call.
#[derive(Clone, Debug)]
pub struct Part {
    pub segment: usize,
    pub place: Area,
    pub blocks: Range<u32>,
    /// Which bytes of the blocks, taken one after the other.
    pub bytes: Range<usize>,
}

struct Outgoing {
    header: MessageHeader,
    part: Part,
    /// Bytes sent, header included.
    sent: usize,
}

struct Incoming {
    part: Part,
    received: usize,
}

impl Incoming {
    fn is_complete(&self) -> bool {
        self.received == self.part.bytes.len()
    }
}

/// Bytes read ahead.
struct Input {
    bytes: Box<[u8; LOOK_AHEAD]>,
    filled: Range<usize>,
}

/// What became of an attempt to receive.
pub enum Received {
    /// Nothing to read, or the round of what is next has not started.
    Nothing,
    /// Some bytes moved.
    Some,
    /// A header; [`Inbound::accept`] or [`Inbound::park`] it.
    Header(MessageHeader),
    /// The message that was accepted is complete.
    Message {
        /// Its segment.
        segment: usize,
    },
}

impl Stream {
    pub fn new(connection: Connection, peer: usize) -> Stream {
        let Connection { sender, receiver } = connection;
        let input = Input { bytes: Box::new([0; LOOK_AHEAD]), filled: 0..0 };
        let pumped = Pumped { bytes: Ok(0), done: Vec::with_capacity(32) };
        let (output, short) = (VecDeque::with_capacity(32), Box::new([0; SHORT_MESSAGE]));
        let outbound = Outbound { sender, output, short, pumped };
        let (body, parked, last, pumped) = (None, None, None, Ok(false));
        let inbound = Inbound { receiver, input, body, parked, last, pumped };
        Stream { peer, expected: 0, outbound, inbound }
    }

    /// The socket, shared with the monitor and with what shuts it down when the group fails.
    pub fn socket(&self) -> &Arc<Socket> {
        self.outbound.sender.socket()
    }

    /// A call begins.
    pub fn begin(&mut self) {
        self.inbound.last = None;
    }
}

impl Outbound {
    /// Queues a message. The memory it names must stay as it is until it is sent.
    pub fn enqueue(&mut self, header: MessageHeader, part: Part) {
        self.output.push_back(Outgoing { header, part, sent: 0 });
    }

    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Sends what the socket takes, but not for long; what became of it is kept.
    ///
    /// # Safety
    /// As for [`Outbound::send`].
    pub unsafe fn pump(&mut self, buffers: &Buffers<'_>) {
        let mut bytes = 0;
        self.pumped.bytes = loop {
            if self.output.is_empty() || bytes >= PUMPED {
                break Ok(bytes);
            }
            // SAFETY: passed on from the caller.
            match unsafe { self.send(buffers) } {
                Ok((sent, done)) => {
                    self.pumped.done.extend(done);
                    bytes += sent;
                    if sent == 0 && done.is_none() {
                        break Ok(bytes);
                    }
                }
                Err(error) => break Err(error),
            }
        };
    }

    /// What [`Outbound::pump`] has sent since this was asked last: the bytes, and the segments of the messages.
    pub fn pumped(&mut self) -> Result<(usize, std::vec::Drain<'_, usize>), Errno> {
        let bytes = std::mem::replace(&mut self.pumped.bytes, Ok(0))?;
        Ok((bytes, self.pumped.done.drain(..)))
    }

    /// Sends what the socket takes of the first message: how many bytes, and `Some(segment)` if
    /// that completed it.
    ///
    /// # Safety
    /// The buffers are those of the call whose messages are queued.
    pub unsafe fn send(&mut self, buffers: &Buffers<'_>) -> Result<(usize, Option<usize>), Errno> {
        let Some(message) = self.output.front_mut() else { return Ok((0, None)) };
        let total = MessageHeader::SIZE + message.part.bytes.len();
        let header = message.header.as_bytes();
        let sent = if message.sent == 0 && total <= SHORT_MESSAGE {
            let mut used = header.len();
            self.short[..used].copy_from_slice(header);
            for (address, len) in message.part.pieces(buffers, 0) {
                // SAFETY: pieces lie in the call's buffers, which outlive the call and are not
                // written while a message that names them is queued. Together with the header they are `total` bytes.
                unsafe {
                    self.short[used..][..len].as_mut_ptr().copy_from_nonoverlapping(address, len)
                };
                used += len;
            }
            self.sender.send(&self.short[..used], SendFlags::empty())
        } else {
            let mut slices = [IoSlice::new(&[]); PIECES];
            let mut used = 0;
            if message.sent < header.len() {
                slices[0] = IoSlice::new(&header[message.sent..]);
                used = 1;
            }
            let skip = message.sent.saturating_sub(header.len());
            for (address, len) in message.part.pieces(buffers, skip).take(PIECES - used) {
                // SAFETY: as above.
                slices[used] = IoSlice::new(unsafe { std::slice::from_raw_parts(address, len) });
                used += 1;
            }
            self.sender.send_vectored(&slices[..used], SendFlags::empty())
        };
        match sent {
            Ok(sent) => {
                message.sent += sent;
                // What is encrypted may be on its way when the last byte was taken.
                let done = message.sent == total && self.sender.is_flushed();
                let done = done.then_some(message.part.segment);
                if done.is_some() {
                    self.output.pop_front();
                }
                Ok((sent, done))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok((0, None)),
            Err(e) => Err(e),
        }
    }
}

impl Inbound {
    /// Whether a message may come after those that were accepted. Every rank sends in one order, so
    /// that a message which does not come later has come twice, or is none of this call's.
    pub fn is_next(&self, round: order::Turn, index: u32) -> bool {
        self.last.is_none_or(|last| last < (round, index))
    }

    /// Whether the next message has arrived before its round has started.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Receives what is there of the accepted message, or the next header, which is parked; what became of
    /// it is kept.
    ///
    /// # Safety
    /// As for [`Inbound::receive`].
    pub unsafe fn pump(&mut self, buffers: &Buffers<'_>) {
        let mut moved = false;
        self.pumped = loop {
            if self.parked.is_some() || self.body.as_ref().is_some_and(Incoming::is_complete) {
                break Ok(moved);
            }
            let received = match &self.body {
                // SAFETY: passed on from the caller.
                Some(_) => unsafe { self.receive_body(buffers) },
                None => self.receive_header(),
            };
            match received {
                Ok(Received::Nothing) => break Ok(moved),
                Ok(Received::Header(header)) => self.parked = Some(header),
                Ok(Received::Some | Received::Message { .. }) => {}
                Err(error) => break Err(error),
            }
            moved = true;
        };
    }

    /// Whether [`Inbound::pump`] has received something since this was asked last.
    pub fn pumped(&mut self) -> Result<bool, Errno> {
        std::mem::replace(&mut self.pumped, Ok(false))
    }

    /// What is there without receiving: the message that was accepted, if it is complete, or a header.
    pub fn ready(&mut self) -> Received {
        if let Some(header) = self.parked.take() {
            return Received::Header(header);
        }
        match self.body.take_if(|body| body.is_complete()) {
            Some(body) => Received::Message { segment: body.part.segment },
            None => Received::Nothing,
        }
    }

    /// Receives what is there: part of the accepted message, or the next header.
    ///
    /// # Safety
    /// The buffers are those of the call whose message was accepted.
    pub unsafe fn receive(&mut self, buffers: &Buffers<'_>) -> Result<Received, Errno> {
        if let Some(header) = self.parked.take() {
            return Ok(Received::Header(header));
        }
        if self.body.is_none() {
            return self.receive_header();
        }
        // SAFETY: passed on from the caller.
        let received = unsafe { self.receive_body(buffers) }?;
        if let Received::Message { .. } = received {
            self.body = None;
        }
        Ok(received)
    }

    /// Receives what is there of the accepted message, which stays accepted when it is complete.
    ///
    /// # Safety
    /// As for [`Inbound::receive`].
    unsafe fn receive_body(&mut self, buffers: &Buffers<'_>) -> Result<Received, Errno> {
        let Some(body) = &mut self.body else { return Ok(Received::Nothing) };
        let left = body.part.bytes.len() - body.received;
        if left > 0 && self.input.filled.is_empty() {
            let mut slices = [const { MaybeUninit::<IoSliceMut<'_>>::uninit() }; PIECES];
            let mut used = 0;
            for (address, len) in body.part.pieces(buffers, body.received).take(PIECES) {
                // SAFETY: pieces lie in the call's buffers, and until the message is complete
                // nothing else touches where it goes.
                slices[used].write(IoSliceMut::new(unsafe {
                    std::slice::from_raw_parts_mut(address, len)
                }));
                used += 1;
            }
            // SAFETY: the first `used` entries were written just above.
            let slices = unsafe {
                std::slice::from_raw_parts_mut(slices.as_mut_ptr().cast::<IoSliceMut<'_>>(), used)
            };
            match self.receiver.receive_vectored(slices) {
                Ok(0) => return Err(Errno::CONNRESET),
                Ok(n) => body.received += n,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
                Err(e) => return Err(e),
            }
        } else {
            for (address, len) in body.part.pieces(buffers, body.received) {
                let ahead = &self.input.bytes[self.input.filled.clone()];
                let n = len.min(ahead.len());
                // SAFETY: as above; `ahead` is memory of this stream.
                unsafe { std::ptr::copy_nonoverlapping(ahead.as_ptr(), address, n) };
                self.input.filled.start += n;
                body.received += n;
                if n < len {
                    break;
                }
            }
        }
        if !body.is_complete() {
            return Ok(Received::Some);
        }
        Ok(Received::Message { segment: body.part.segment })
    }

    /// Says where the message of the header just received goes, and when it comes in the order of
    /// all.
    pub fn accept(&mut self, part: Part, round: order::Turn, index: u32) {
        self.last = Some((round, index));
        self.body = Some(Incoming { part, received: 0 });
    }

    /// Keeps a header until the round of its message starts.
    pub fn park(&mut self, header: MessageHeader) {
        self.parked = Some(header);
    }

    fn receive_header(&mut self) -> Result<Received, Errno> {
        let input = &mut self.input;
        if input.filled.len() < MessageHeader::SIZE {
            input.bytes.copy_within(input.filled.clone(), 0);
            input.filled = 0..input.filled.len();
            let into = &mut input.bytes[input.filled.end..];
            match self.receiver.receive(into, RecvFlags::empty()) {
                Ok(0) => return Err(Errno::CONNRESET),
                Ok(n) => input.filled.end += n,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
                Err(e) => return Err(e),
            }
            if input.filled.len() < MessageHeader::SIZE {
                return Ok(Received::Some);
            }
        }
        let bytes = &input.bytes[input.filled.clone()];
        let (header, _) =
            MessageHeader::read_from_prefix(bytes).expect("enough bytes, checked above");
        input.filled.start += MessageHeader::SIZE;
        Ok(Received::Header(header))
    }
}

impl Part {
    /// The bytes of all blocks of a place in a segment.
    pub fn total(buffers: &Buffers<'_>, place: Area, segment: usize, blocks: &Range<u32>) -> usize {
        let count = |(i, block)| buffers.block(place, segment, block, i as u32).1;
        blocks.clone().enumerate().map(count).sum::<usize>() * buffers.dtype.size()
    }

    /// The memory of this part but for its first `skip` bytes, adjacent pieces joined.
    fn pieces<'a>(
        &'a self,
        buffers: &'a Buffers<'a>,
        skip: usize,
    ) -> impl Iterator<Item = (*mut u8, usize)> + 'a {
        let wanted = self.bytes.start + skip..self.bytes.end;
        let size = buffers.dtype.size();
        let mut at = 0;
        let mut blocks = self.blocks.clone().enumerate().peekable();
        std::iter::from_fn(move || {
            let mut joined: Option<(*mut u8, usize)> = None;
            while let Some(&(i, block)) = blocks.peek() {
                let (address, count) = buffers.block(self.place, self.segment, block, i as u32);
                let here = at..at + count * size;
                let from = here.start.max(wanted.start);
                let to = here.end.min(wanted.end);
                if from < to {
                    let piece = (address.wrapping_add(from - here.start), to - from);
                    match &mut joined {
                        None => joined = Some(piece),
                        Some((start, len)) if start.wrapping_add(*len) == piece.0 => {
                            *len += piece.1
                        }
                        Some(_) => return joined,
                    }
                }
                at = here.end;
                blocks.next();
            }
            joined
        })
    }
}
