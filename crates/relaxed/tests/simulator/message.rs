//! What workers and servers say to each other.

use unisono_relaxed::server::core::{Joined, PushId, Refusal};
use unisono_relaxed::{Clock, Life};

/// One life of a worker: it has its place in the list of all processes there ever were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    pub process: usize,
    pub worker: u32,
    pub life: Life,
}

/// From a worker to a server.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub from: Sender,
    /// Counts the connections of this process to this server.
    pub connection: u64,
    /// Counts the requests of this process to this server.
    pub id: u64,
    pub ask: Ask,
}

#[derive(Clone, Copy, Debug)]
pub enum Ask {
    Join,
    Enter(Clock),
    Read(Clock),
    Push(PushId),
    /// Nothing: the worker lives.
    Alive,
    Leave,
}

/// From a server to a worker, to the request of this number.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    pub connection: u64,
    pub id: u64,
    pub answer: Answer,
}

#[derive(Clone, Copy, Debug)]
pub enum Answer {
    Joined(Joined),
    Entered,
    /// The weights after so many updates.
    Weights {
        version: u64,
    },
    Settled,
    Late {
        clock: Clock,
    },
    Refused(Refusal),
}

impl Request {
    pub fn reply(&self, answer: Answer) -> Reply {
        Reply { connection: self.connection, id: self.id, answer }
    }
}
