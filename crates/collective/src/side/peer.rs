//! The side channel to one peer: frames in and out, transfers under way.

use std::collections::VecDeque;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use socket2::Socket;
use unisono_net::{Connection, Receiver};

use super::Transfer;
use super::frame::{self, Frame, MAX_DATA};
use super::mailbox::Announced;
use crate::call::{Call, WireCall};
use crate::error::Error;
use crate::state::GroupState;
use crate::waits::Statement;

/// Room in the queues of a peer before they grow. More: more idle memory. Less: the first burst
/// of messages allocates.
const ROOM: usize = 16;

/// The connection to one peer and what is under way on it.
pub struct Peer {
    pub rank: usize,
    /// This rank.
    me: usize,
    connection: Connection,
    pub last_heard: Instant,
    /// Whether the socket may have something to read, or room.
    pub ready: bool,
    /// A call in which it waits and which this rank has not made yet.
    pub stuck: Option<Call>,
    presence: Presence,
    output: VecDeque<Output>,
    input: Input,
    /// Sends in order of submission.
    sends: VecDeque<Sending>,
    next_id: u32,
    /// Receives whose message is cleared to come.
    cleared: Vec<Receiving>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    /// Said goodbye; its connection may close.
    Leaving,
    Gone,
}

/// What a peer did.
pub enum Event {
    /// Its connection closed without a goodbye.
    Lost,
    /// It says that the group failed.
    Aborted(Error),
    /// It broke the rules, or a transfer does not fit.
    Failed(Error),
    /// It waits in a call.
    Stuck(Call),
    /// It has a message.
    Announced(Announced),
    /// It said goodbye.
    Left {
        /// The first call without it.
        seq: u32,
        /// Why, where it was not done.
        reason: Option<String>,
    },
    /// It tells where it made a call.
    Place {
        /// The number of the call.
        number: u32,
        /// The place, if it knows.
        place: Option<String>,
    },
    /// It says that a thread of it waits.
    Waits(Statement),
}

struct Output {
    head: [u8; frame::SIZE],
    body: Vec<u8>,
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
    Body { of: Frame, bytes: Vec<u8>, filled: usize },
    Stuck { bytes: [u8; size_of::<WireCall>()], filled: usize },
    Data { id: u32, left: usize },
}

const EMPTY: Input = Input::Head { bytes: [0; frame::SIZE], filled: 0 };

impl Peer {
    pub fn new(connection: Connection, rank: usize, me: usize) -> Peer {
        Peer {
            rank,
            me,
            connection,
            last_heard: Instant::now(),
            ready: true,
            stuck: None,
            presence: Presence::Here,
            output: VecDeque::with_capacity(ROOM),
            input: EMPTY,
            sends: VecDeque::with_capacity(ROOM),
            next_id: 0,
            cleared: Vec::with_capacity(ROOM),
        }
    }

    pub fn socket(&self) -> &Socket {
        self.connection.socket()
    }

    pub fn is_present(&self) -> bool {
        self.presence != Presence::Gone
    }

    /// Whether it may still send something.
    pub fn is_here(&self) -> bool {
        self.presence == Presence::Here
    }

    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Queues a frame with what follows it.
    pub fn queue(&mut self, frame: Frame, body: Vec<u8>) {
        self.output.push_back(Output { head: frame.encode(), body, data: 0, sent: 0 });
    }

    pub fn submit_send(&mut self, transfer: Transfer, state: &GroupState) {
        if self.presence != Presence::Here || state.is_over() {
            return transfer.work.complete(Err(self.left(state)));
        }
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let length = transfer.length as u64;
        self.queue(Frame::Announce { tag: transfer.tag, id, length }, Vec::new());
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

    /// Ends all transfers under way with this error.
    pub fn fail_transfers(&mut self, error: &Error) {
        self.detach_data();
        let sends = self.sends.drain(..).map(|s| s.transfer);
        let cleared = self.cleared.drain(..).map(|r| r.transfer);
        for transfer in sends.chain(cleared) {
            transfer.work.complete(Err(error.clone()));
        }
    }

    /// Detaches the data frames under way from the memory of their transfer, which its owner may
    /// reuse once the transfer has ended. A frame that has not begun is dropped. One that has
    /// keeps a copy of its rest: the peer counts its bytes, and would take the next frame for
    /// data.
    fn detach_data(&mut self) {
        let Some(sending) = self.sends.front() else { return };
        self.output.retain(|o| o.data == 0 || o.sent > 0);
        for output in self.output.iter_mut().filter(|o| o.data > 0) {
            let done = output.sent.saturating_sub(frame::SIZE);
            let start = sending.sent - done;
            // SAFETY: the frame's part of the transfer's memory, which its submitter keeps valid
            // until the work is done.
            let bytes = unsafe {
                std::slice::from_raw_parts(sending.transfer.address.add(start), output.data)
            };
            output.body = bytes.to_vec();
            output.data = 0;
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
    pub fn progress(&mut self) -> Option<Event> {
        if self.presence == Presence::Gone {
            return None;
        }
        // A peer that hung up may have said why: what can still be read comes first.
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
        let was = std::mem::replace(&mut self.presence, Presence::Gone);
        self.output.clear();
        (was == Presence::Here).then_some(Event::Lost)
    }

    /// The error of a transfer with a rank that has left.
    pub fn left(&self, state: &GroupState) -> Error {
        Error::PeerLost { peer: self.rank, loss: state.parting_of(self.rank), during: None }
    }

    fn write(&mut self) -> Result<(), Errno> {
        loop {
            if self.output.is_empty() && !self.frame_data() {
                return Ok(());
            }
            let Some(output) = self.output.front_mut() else { return Ok(()) };
            let head = output.head.len();
            let sender = &mut self.connection.sender;
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
            } else if output.sent < head + output.body.len() {
                sender.send(&output.body[output.sent - head..], SendFlags::empty())
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
            if output.sent == head + output.body.len() + output.data {
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
        self.output.push_back(Output { head, body: Vec::new(), data: length, sent: 0 });
        true
    }

    fn finish_send(&mut self) {
        let done = self.sends.front().is_some_and(|s| s.started && s.sent == s.transfer.length);
        if done && let Some(sending) = self.sends.pop_front() {
            sending.transfer.work.complete(Ok(()));
        }
    }

    fn read(&mut self) -> Result<Option<Event>, Errno> {
        match &mut self.input {
            Input::Head { bytes, filled } => {
                *filled += receive(&mut self.connection.receiver, &mut bytes[*filled..])?;
                self.last_heard = Instant::now();
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
            Input::Body { of, bytes, filled } => {
                if *filled < bytes.len() {
                    *filled += receive(&mut self.connection.receiver, &mut bytes[*filled..])?;
                }
                if *filled < bytes.len() {
                    return Ok(None);
                }
                let (of, bytes) = (*of, std::mem::take(bytes));
                self.input = EMPTY;
                Ok(Some(self.act_on_body(of, &bytes)))
            }
            Input::Stuck { bytes, filled } => {
                *filled += receive(&mut self.connection.receiver, &mut bytes[*filled..])?;
                if *filled < bytes.len() {
                    return Ok(None);
                }
                let wire: WireCall = zerocopy::transmute!(*bytes);
                self.input = EMPTY;
                Ok(Some(match Call::try_from(wire) {
                    Ok(call) => Event::Stuck(call),
                    Err(_) => self.broke_rules("an unreadable call"),
                }))
            }
            Input::Data { id, left } => {
                let Some(receiving) = self.cleared.iter_mut().find(|r| r.id == *id) else {
                    return Ok(Some(self.broke_rules("data nobody asked for")));
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
                    let n = receive(&mut self.connection.receiver, into)?;
                    self.last_heard = Instant::now();
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
            Frame::Heartbeat => None,
            Frame::Stuck => {
                self.input = Input::Stuck { bytes: [0; size_of::<WireCall>()], filled: 0 };
                None
            }
            Frame::Goodbye { length, .. }
            | Frame::Abort { length }
            | Frame::Place { length, .. }
            | Frame::Waits { length } => {
                self.input = Input::Body { of: frame, bytes: vec![0; length], filled: 0 };
                None
            }
            Frame::Announce { tag, id, length } => {
                Some(Event::Announced(Announced { from: self.rank, tag, id, length }))
            }
            Frame::Clear { id } => match self.sends.iter_mut().find(|s| s.id == id && !s.cleared) {
                Some(sending) => {
                    sending.cleared = true;
                    None
                }
                None => Some(self.broke_rules("a clearance for no message")),
            },
            Frame::Data { id, length } => {
                self.input = Input::Data { id, left: length };
                None
            }
        }
    }

    /// What a frame and that which followed it mean.
    fn act_on_body(&mut self, frame: Frame, body: &[u8]) -> Event {
        let text = || (!body.is_empty()).then(|| String::from_utf8_lossy(body).into_owned());
        match frame {
            Frame::Goodbye { seq, .. } => {
                self.presence = Presence::Leaving;
                Event::Left { seq, reason: text() }
            }
            Frame::Place { number, .. } => Event::Place { number, place: text() },
            Frame::Waits { .. } => match postcard::from_bytes(body) {
                Ok(statement) => Event::Waits(statement),
                Err(_) => self.broke_rules("an unreadable statement"),
            },
            _ => Event::Aborted(frame::decode_reason(self.rank, body)),
        }
    }

    /// A send and a receive have met.
    pub fn clear(&mut self, transfer: Transfer, announced: Announced) -> Result<(), Error> {
        if announced.length != transfer.length as u64 {
            let error = Error::LengthMismatch {
                from: self.rank,
                to: self.me,
                tag: transfer.tag,
                sent: announced.length,
                expected: transfer.length as u64,
            };
            transfer.work.complete(Err(error.clone()));
            return Err(error);
        }
        self.queue(Frame::Clear { id: announced.id }, Vec::new());
        let idle = Idle::new();
        self.cleared.push(Receiving { transfer, idle, id: announced.id, received: 0 });
        Ok(())
    }

    pub fn broke_rules(&mut self, what: &str) -> Event {
        self.presence = Presence::Gone;
        Event::Failed(Error::System {
            what: "the side channel",
            reason: format!("rank {} sent {what}", self.rank),
        })
    }
}

fn receive(from: &mut Receiver, into: &mut [u8]) -> Result<usize, Errno> {
    match from.receive(into, RecvFlags::empty())? {
        0 => Err(Errno::CONNRESET),
        n => Ok(n),
    }
}
