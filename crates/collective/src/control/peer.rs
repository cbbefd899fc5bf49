//! A control connection: frames in and out.

use std::collections::VecDeque;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use unisono_net::Connection;

use super::frame::{self, Frame};

/// Room for output before it grows: a heartbeat, or a few facts.
const ROOM: usize = 256;

/// The control connection to one rank.
pub struct Peer {
    pub rank: usize,
    pub last_heard: Instant,
    /// Whether the socket may have something to read, or room.
    pub ready: bool,
    /// Whether the rank took the connection when the group formed: then it says there that it leaves.
    pub is_neighbour: bool,
    connection: Connection,
    presence: Presence,
    output: VecDeque<u8>,
    input: Input,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    /// Has left; its connection may close.
    Leaving,
    Gone,
}

/// What a rank did.
pub enum Event {
    /// Its connection closed, and it had not said that it leaves.
    Closed,
    /// It sent news.
    News(Vec<u8>),
    /// It sent what no rank sends.
    BrokeRules,
}

/// What is being read.
enum Input {
    Head { bytes: [u8; frame::SIZE], filled: usize },
    News { bytes: Vec<u8>, filled: usize },
}

const EMPTY: Input = Input::Head { bytes: [0; frame::SIZE], filled: 0 };

impl Peer {
    /// Takes over a connection, which does not block.
    pub fn new(connection: Connection, rank: usize, is_neighbour: bool) -> Peer {
        Peer {
            rank,
            last_heard: Instant::now(),
            ready: true,
            is_neighbour,
            connection,
            presence: Presence::Here,
            output: VecDeque::with_capacity(ROOM),
            input: EMPTY,
        }
    }

    pub fn socket(&self) -> &socket2::Socket {
        self.connection.socket()
    }

    /// Whether the connection is open.
    pub fn is_present(&self) -> bool {
        self.presence != Presence::Gone
    }

    /// Whether it owes signs of life.
    pub fn is_here(&self) -> bool {
        self.presence == Presence::Here
    }

    /// The rank has left: its connection may close.
    pub fn let_go(&mut self) {
        if self.presence == Presence::Here {
            self.presence = Presence::Leaving;
        }
    }

    pub fn has_output(&self) -> bool {
        !self.output.is_empty() || !self.connection.sender.is_flushed()
    }

    /// Queues a frame with what follows it.
    pub fn queue(&mut self, frame: Frame, body: &[u8]) {
        if self.presence != Presence::Gone {
            self.output.extend(frame.encode());
            self.output.extend(body);
        }
    }

    /// Sends and receives what the socket allows; what happened, or `None` when it is idle.
    pub fn progress(&mut self) -> Option<Event> {
        if self.presence == Presence::Gone {
            return None;
        }
        // A rank that hung up may have said why: what can still be read comes first.
        let broken = self.write().is_err();
        loop {
            match self.read() {
                Ok(Some(event)) => return Some(event),
                Ok(None) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !broken => return None,
                Err(_) => return self.closed(),
            }
        }
    }

    fn closed(&mut self) -> Option<Event> {
        let was = std::mem::replace(&mut self.presence, Presence::Gone);
        self.output.clear();
        (was == Presence::Here).then_some(Event::Closed)
    }

    fn write(&mut self) -> Result<(), Errno> {
        loop {
            match self.connection.sender.flush(SendFlags::DONTWAIT) {
                Ok(()) if self.output.is_empty() => return Ok(()),
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
            match self.connection.sender.send(self.output.as_slices().0, SendFlags::DONTWAIT) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn read(&mut self) -> Result<Option<Event>, Errno> {
        let (into, filled) = match &mut self.input {
            Input::Head { bytes, filled } => (&mut bytes[..], filled),
            Input::News { bytes, filled } => (&mut bytes[..], filled),
        };
        if *filled < into.len() {
            match self.connection.receiver.receive(&mut into[*filled..], RecvFlags::DONTWAIT)? {
                0 => return Err(Errno::CONNRESET),
                received => *filled += received,
            }
            self.last_heard = Instant::now();
        }
        if *filled < into.len() {
            return Ok(None);
        }
        match std::mem::replace(&mut self.input, EMPTY) {
            Input::News { bytes, .. } => Ok(Some(Event::News(bytes))),
            Input::Head { bytes, .. } => match Frame::decode(&bytes) {
                Ok(Frame::Heartbeat) => Ok(None),
                Ok(Frame::News { length }) => {
                    self.input = Input::News { bytes: vec![0; length], filled: 0 };
                    Ok(None)
                }
                Err(_) => {
                    self.presence = Presence::Gone;
                    Ok(Some(Event::BrokeRules))
                }
            },
        }
    }
}
