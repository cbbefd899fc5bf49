//! What workers and shards say to each other.

use unisono_relaxed::server::core::{Joined, PushId, Refusal};

/// One life of a worker: it has its place in the list of all processes there ever were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    pub process: usize,
    pub worker: u32,
    pub life: u64,
}

/// From a worker to a shard.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub from: Sender,
    /// Counts the connections of this process to this shard.
    pub connection: u64,
    /// Counts the requests of this process to this shard.
    pub id: u64,
    pub ask: Ask,
}

#[derive(Clone, Copy, Debug)]
pub enum Ask {
    Join,
    Enter(u64),
    Read(u64),
    Push(PushId),
    /// Nothing: the worker lives.
    Alive,
    Leave,
}

/// From a shard to a worker, to the request of this number.
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
        clock: u64,
    },
    Refused(Refusal),
}

impl Request {
    pub fn reply(&self, answer: Answer) -> Reply {
        Reply { connection: self.connection, id: self.id, answer }
    }
}
