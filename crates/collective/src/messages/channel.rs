//! A connection for messages from one rank to another: frames in and out, transfers under way.

use std::collections::VecDeque;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use socket2::Socket;
use unisono_net::{Connection, Receiver};

use super::Transfer;
use super::frame::{self, Frame, MAX_DATA};
use super::mailbox::Announced;
use crate::error::Error;
use crate::fabric::{Network, Opening};
use crate::state::GroupState;

/// Room in the queues of a channel before they grow. More: more idle memory. Less: the first burst
/// of messages allocates.
const ROOM: usize = 16;

/// The connection by which one rank sends messages to another, and what is under way on it.
pub struct Channel {
    /// The other rank.
    pub rank: usize,
    /// Whether this rank sends.
    pub is_outgoing: bool,
    line: Line,
    /// Whether the socket may have something to read, or room.
    pub ready: bool,
    output: VecDeque<Output>,
    input: Input,
    /// Sends in order of submission.
    sends: VecDeque<Sending>,
    next_id: u32,
    /// Receives whose message is cleared to come.
    cleared: Vec<Receiving>,
}

enum Line {
    Opening(Opening),
    Open(Connection),
    Closed,
}

/// What happened on a channel.
pub enum Event {
    /// Its connection closed, or could not be opened.
    Closed,
    /// The other rank broke the rules.
    BrokeRules(&'static str),
    /// It has a message.
    Announced(Announced),
}

struct Output {
    head: [u8; frame::SIZE],
    /// A part of the first cleared send follows the head.
    data: usize,
    sent: usize,
}

struct Sending {
    transfer: Transfer,
    idle: Idle,
    id: u32,
    cleared: bool,
    /// Whether a data frame has been queued; an empty message has one too.
    started: bool,
    /// Bytes handed to frames.
    framed: usize,
    /// Bytes handed to the kernel.
    sent: usize,
}

struct Receiving {
    transfer: Transfer,
    idle: Idle,
    id: u32,
    received: usize,
}

/// For how long a transfer has not moved, and whether the log says so.
pub struct Idle {
    since: Instant,
    reported: bool,
}

impl Idle {
    pub fn new() -> Idle {
        Idle { since: Instant::now(), reported: false }
    }

    /// Says in the log, once, that the transfer has not moved for too long.
    pub fn report(
        &mut self,
        what: &str,
        transfer: &Transfer,
        state: &GroupState,
        missing: impl FnOnce() -> Vec<usize>,
    ) {
        let Transfer { length, tag, .. } = transfer;
        let what = format_args!("{what} of {length} bytes with tag {tag}");
        self.reported |= !self.reported && state.report_stall(self.since, &what, missing);
    }
}

/// What is being read.
enum Input {
    Head { bytes: [u8; frame::SIZE], filled: usize },
    Data { id: u32, left: usize },
}

const EMPTY: Input = Input::Head { bytes: [0; frame::SIZE], filled: 0 };

impl Channel {
    /// A channel that this rank opens.
    pub fn outgoing(opening: Opening, rank: usize) -> Channel {
        Channel::new(Line::Opening(opening), rank, true)
    }

    /// A channel that another rank has opened; its connection does not block.
    pub fn incoming(connection: Connection, rank: usize) -> Channel {
        Channel::new(Line::Open(connection), rank, false)
    }

    fn new(line: Line, rank: usize, is_outgoing: bool) -> Channel {
        Channel {
            rank,
            is_outgoing,
            line,
            ready: true,
            output: VecDeque::with_capacity(ROOM),
            input: EMPTY,
            sends: VecDeque::with_capacity(ROOM),
            next_id: 0,
            cleared: Vec::with_capacity(ROOM),
        }
    }

    /// The socket, if the connection is open.
    pub fn socket(&self) -> Option<&Socket> {
        match &self.line {
            Line::Open(connection) => Some(connection.socket()),
            Line::Opening(_) | Line::Closed => None,
        }
    }

    /// The connection, while it is being opened.
    pub fn opening(&self) -> Option<&Opening> {
        match &self.line {
            Line::Opening(opening) => Some(opening),
            Line::Open(_) | Line::Closed => None,
        }
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.line, Line::Closed)
    }

    pub fn has_output(&self) -> bool {
        let unsent = match &self.line {
            Line::Open(connection) => !connection.sender.is_flushed(),
            Line::Opening(_) | Line::Closed => false,
        };
        unsent || !self.output.is_empty()
    }

    /// Queues a frame.
    fn queue(&mut self, frame: Frame) {
        self.output.push_back(Output { head: frame.encode(), data: 0, sent: 0 });
    }

    pub fn submit_send(&mut self, transfer: Transfer) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let length = transfer.length as u64;
        self.queue(Frame::Announce { tag: transfer.tag, id, length });
        self.sends.push_back(Sending {
            transfer,
            idle: Idle::new(),
            id,
            cleared: false,
            started: false,
            framed: 0,
            sent: 0,
        });
    }

    /// Ends all transfers under way with this error, and the channel with them: a message may be half sent.
    pub fn end(&mut self, error: &Error) {
        self.line = Line::Closed;
        // They name the memory of transfers.
        self.output.clear();
        let sends = self.sends.drain(..).map(|s| s.transfer);
        let cleared = self.cleared.drain(..).map(|r| r.transfer);
        for transfer in sends.chain(cleared) {
            transfer.work.complete(Err(error.clone()));
        }
    }

    /// Says in the log which transfers have not moved for too long.
    pub fn report_stalls(&mut self, state: &GroupState) {
        let sends = self.sends.iter_mut().map(|s| ("send", &s.transfer, &mut s.idle));
        let cleared = self.cleared.iter_mut().map(|r| ("receive", &r.transfer, &mut r.idle));
        for (what, transfer, idle) in sends.chain(cleared) {
            idle.report(what, transfer, state, || vec![self.rank]);
        }
    }

    /// Sends and receives what the socket allows; what happened, or `None` when it is idle.
    pub fn progress(&mut self, network: &dyn Network) -> Option<Event> {
        if let Line::Opening(opening) = &mut self.line {
            match network.advance(opening) {
                Ok(None) => return None,
                Ok(Some(connection)) if connection.socket().set_nonblocking(true).is_ok() => {
                    self.line = Line::Open(connection);
                }
                Ok(Some(_)) | Err(_) => return self.closed(),
            }
        }
        if self.is_closed() {
            return None;
        }
        // A rank that hung up may have sent something: what can still be read comes first.
        let broken = self.write().is_err();
        loop {
            match self.read() {
                Ok(Some(event)) => return Some(event),
                Ok(None) => {}
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => return self.closed(),
            }
        }
        // What was read may have cleared a send.
        if broken || self.write().is_err() {
            return self.closed();
        }
        None
    }

    fn closed(&mut self) -> Option<Event> {
        self.line = Line::Closed;
        Some(Event::Closed)
    }

    fn write(&mut self) -> Result<(), Errno> {
        loop {
            let Line::Open(connection) = &mut self.line else { return Ok(()) };
            match connection.sender.flush(SendFlags::empty()) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e),
            }
            if self.output.is_empty() && !self.frame_data() {
                return Ok(());
            }
            let Line::Open(connection) = &mut self.line else { return Ok(()) };
            let Some(output) = self.output.front_mut() else { return Ok(()) };
            let head = output.head.len();
            let sender = &mut connection.sender;
            let result = if output.sent < head {
                sender.send(&output.head[output.sent..], SendFlags::empty())
            } else if output.data > 0 {
                let sending = self.sends.front().expect("a data frame belongs to the first send");
                let from = sending.sent;
                let left = output.data - (output.sent - head);
                // SAFETY: `from + left` is within the transfer's memory, which its submitter
                // keeps valid until the work is done.
                let bytes =
                    unsafe { std::slice::from_raw_parts(sending.transfer.address.add(from), left) };
                sender.send(bytes, SendFlags::empty())
            } else {
                Ok(0)
            };
            let sent = match result {
                Ok(n) => n,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e),
            };
            if output.sent >= head && output.data > 0 {
                let sending = self.sends.front_mut().expect("as above");
                sending.sent += sent;
                sending.idle = Idle::new();
            }
            output.sent += sent;
            if output.sent == head + output.data {
                self.output.pop_front();
                self.finish_send();
            }
        }
    }

    /// Queues the next part of the first cleared send; whether there was one.
    fn frame_data(&mut self) -> bool {
        // Data frames always belong to the send at the front: bring the oldest cleared one
        // there. None is half-sent unless it is at the front already.
        if let Some(i) = self.sends.iter().position(|s| s.cleared)
            && i > 0
            && let Some(sending) = self.sends.remove(i)
        {
            self.sends.push_front(sending);
        }
        let Some(sending) = self.sends.front_mut().filter(|s| s.cleared) else { return false };
        let length = (sending.transfer.length - sending.framed).min(MAX_DATA);
        sending.started = true;
        sending.framed += length;
        let head = Frame::Data { id: sending.id, length }.encode();
        self.output.push_back(Output { head, data: length, sent: 0 });
        true
    }

    fn finish_send(&mut self) {
        let done = self.sends.front().is_some_and(|s| s.started && s.sent == s.transfer.length);
        if done && let Some(sending) = self.sends.pop_front() {
            sending.transfer.work.complete(Ok(()));
        }
    }

    fn read(&mut self) -> Result<Option<Event>, Errno> {
        let Line::Open(connection) = &mut self.line else { return Err(Errno::AGAIN) };
        match &mut self.input {
            Input::Head { bytes, filled } => {
                *filled += receive(&mut connection.receiver, &mut bytes[*filled..])?;
                if *filled < frame::SIZE {
                    return Ok(None);
                }
                let decoded = Frame::decode(bytes);
                self.input = EMPTY;
                Ok(match decoded {
                    Ok(frame) => self.act_on(frame),
                    Err(_) => Some(self.broke_rules("an unreadable frame")),
                })
            }
            Input::Data { id, left } => {
                let Some(receiving) = self.cleared.iter_mut().find(|r| r.id == *id) else {
                    return Ok(Some(self.broke_rules("data that was not asked for")));
                };
                if *left > 0 {
                    let room = receiving.transfer.length - receiving.received;
                    if *left > room {
                        return Ok(Some(self.broke_rules("more data than announced")));
                    }
                    // SAFETY: within the transfer's memory, which its submitter keeps valid and
                    // untouched until the work is done.
                    let into = unsafe {
                        std::slice::from_raw_parts_mut(
                            receiving.transfer.address.add(receiving.received),
                            *left,
                        )
                    };
                    let n = receive(&mut connection.receiver, into)?;
                    receiving.received += n;
                    receiving.idle = Idle::new();
                    *left -= n;
                }
                if *left == 0 {
                    let done = receiving.received == receiving.transfer.length;
                    let id = *id;
                    self.input = EMPTY;
                    if done {
                        let i = self.cleared.iter().position(|r| r.id == id).expect("found above");
                        self.cleared.swap_remove(i).transfer.work.complete_from(self.rank);
                    }
                }
                Ok(None)
            }
        }
    }

    fn act_on(&mut self, frame: Frame) -> Option<Event> {
        match frame {
            Frame::Announce { tag, id, length } if !self.is_outgoing => {
                Some(Event::Announced(Announced { from: self.rank, tag, id, length }))
            }
            Frame::Clear { id } => match self.sends.iter_mut().find(|s| s.id == id && !s.cleared) {
                Some(sending) => {
                    sending.cleared = true;
                    None
                }
                None => Some(self.broke_rules("a clearance for no message")),
            },
            Frame::Data { id, length } if !self.is_outgoing => {
                self.input = Input::Data { id, left: length };
                None
            }
            Frame::Announce { .. } | Frame::Data { .. } => {
                Some(self.broke_rules("a message where it receives"))
            }
        }
    }

    /// A send and a receive have met.
    pub fn clear(&mut self, transfer: Transfer, announced: Announced) {
        self.queue(Frame::Clear { id: announced.id });
        let idle = Idle::new();
        self.cleared.push(Receiving { transfer, idle, id: announced.id, received: 0 });
    }

    /// The other rank sent what no rank sends.
    pub fn broke_rules(&mut self, what: &'static str) -> Event {
        self.line = Line::Closed;
        Event::BrokeRules(what)
    }
}

fn receive(from: &mut Receiver, into: &mut [u8]) -> Result<usize, Errno> {
    match from.receive(into, RecvFlags::empty())? {
        0 => Err(Errno::CONNRESET),
        n => Ok(n),
    }
}
