//! What a test tells its ranks to do, and what they answer: one JSON object per line.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use unisono::collective::fabric::Address;
use unisono::{Dtype, Error, FormError, Loss, Options, Reduction, Transport};

/// An order for a rank. Each has one answer, but for [`Command::Churn`], which has two.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Listen on this address; answered by [`Reply::Bound`].
    Bind { ip: IpAddr },
    /// Form a group.
    Form(Formation),
    /// Call random collectives until one fails; answered by [`Reply::Churning`] after the first
    /// and by [`Reply::Failed`] at the end.
    Churn { seed: u64 },
    /// Make one call.
    Call(Call),
    /// Call barriers until one fails: a rank may not need the others for its part of a call that
    /// they get wrong.
    Settle,
    /// All-reduce the same input as in every other run; answered by [`Reply::Digest`].
    Digest { dtype: Dtype, count: usize },
    /// Time all-reduces of f32; answered by [`Reply::Timed`].
    Time { bytes: usize, repeats: usize },
    /// End the epoch.
    EndEpoch,
    /// Split the group.
    Split,
    /// Make a sub-group of the world, and use it from now on.
    Subgroup { members: Vec<usize> },
    /// Drop the group; answered by [`Reply::Residue`].
    Leave,
    /// Panic with the group in hand.
    Panic,
    /// Fork a child that lives on by itself, as a loader of data does; answered by
    /// [`Reply::Forked`].
    Fork,
    /// Say what the process holds; answered by [`Reply::Residue`].
    Inspect,
}

/// A group that is to form, as one rank sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Formation {
    pub rank: usize,
    pub world: usize,
    pub epoch: u64,
    /// The job's token, in hexadecimal.
    pub token: String,
    /// Where the ranks are; empty for ranks that are threads.
    pub roster: Vec<Address>,
    pub settings: Settings,
}

/// The options that tests vary.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    pub transport: String,
    pub timeout: Duration,
    pub stall_after: Duration,
    pub staging: usize,
    /// The algorithm, by name; otherwise the group chooses by what it measures.
    pub algorithm: Option<String>,
    /// Connections for long messages, unless the group chooses.
    pub streams: Option<usize>,
}

impl Settings {
    pub fn new(transport: Transport) -> Settings {
        let Options { timeout, stall_after, staging, .. } = Options::default();
        let (transport, algorithm, streams) = (transport.name().into(), None, None);
        Settings { transport, timeout, stall_after, staging, algorithm, streams }
    }

    pub fn options(&self) -> Options {
        let mut options = Options::default();
        options.transport = self.transport.parse().expect("made from a transport");
        options.timeout = self.timeout;
        options.stall_after = self.stall_after;
        options.staging = self.staging;
        let parse = |name: &String| name.parse().expect("made from an algorithm");
        options.algorithm = self.algorithm.as_ref().map(parse);
        options.streams = self.streams;
        options
    }
}

/// One call of one rank. Buffers hold the rank's number plus one; where that leads to a known
/// result, it is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    AllReduce { dtype: Dtype, count: usize, reduction: Reduction },
    AllGather { count: usize },
    Broadcast { count: usize, root: usize },
    Reduce { count: usize, root: usize },
    Barrier,
    Send { to: usize, tag: u32, count: usize },
    Receive { from: usize, tag: u32, count: usize },
}

/// What a rank answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Bound(Address),
    /// What was asked for has been done.
    Done,
    Churning,
    Failed(Failed),
    Digest(u64),
    /// Seconds of each repetition, in order.
    Timed(Timed),
    Residue(Residue),
    /// The child's process number.
    Forked(u32),
}

/// What all-reduces took, and as much data that only passes from every rank to the next, in turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Seconds of each all-reduce.
    pub all_reduce: Vec<f64>,
    /// Seconds of each passing on of what an all-reduce must send at least.
    pub passing_on: Vec<f64>,
    /// Bytes that this rank sent for all all-reduces.
    pub sent: u64,
}

/// An operation ended in an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failed {
    pub failure: Failure,
    /// When, on the clock that all processes of the machine share.
    pub at: Duration,
    /// Calls that went well before.
    pub calls: u64,
}

/// What of a group would show in the process that formed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Residue {
    /// Mappings of staging memory.
    pub mappings: usize,
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
}

/// An error as it crosses the pipe: the same cases and fields, calls as text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Failure {
    Lost {
        peer: usize,
        how: How,
        during: Option<String>,
    },
    EpochEnded {
        epoch: u64,
    },
    Mismatch {
        rank: usize,
        call: String,
        peer: usize,
        peer_call: String,
    },
    Length {
        from: usize,
        to: usize,
        tag: u32,
        sent: u64,
        expected: u64,
    },
    Staging {
        bytes: usize,
    },
    /// The peer could not form the group.
    Peer {
        peer: usize,
        reason: String,
    },
    Other(String),
}

/// How a peer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    Closed,
    Silent,
    Left,
    Failed,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error {
            Error::PeerLost { peer, loss, during } => {
                let how = match loss {
                    Loss::Closed => How::Closed,
                    Loss::Silent(_) => How::Silent,
                    Loss::Left => How::Left,
                    Loss::Failed(_) => How::Failed,
                    other => return Failure::Other(format!("{other:?}")),
                };
                Failure::Lost { peer: peer.0, how, during: during.map(|call| call.to_string()) }
            }
            Error::EpochEnded { epoch } => Failure::EpochEnded { epoch },
            Error::Mismatch { rank, call, peer, peer_call, .. } => Failure::Mismatch {
                rank: rank.0,
                call: call.to_string(),
                peer: peer.0,
                peer_call: peer_call.to_string(),
            },
            Error::LengthMismatch { from, to, tag, sent, expected } => {
                Failure::Length { from: from.0, to: to.0, tag, sent, expected }
            }
            other => Failure::Other(format!("{other:?}")),
        }
    }
}

impl From<FormError> for Failure {
    fn from(error: FormError) -> Failure {
        match error {
            FormError::Staging { bytes, .. } => Failure::Staging { bytes },
            FormError::Peer { peer, reason } => Failure::Peer { peer: peer.0, reason },
            FormError::EpochEnded { epoch } => Failure::EpochEnded { epoch },
            FormError::Parent(error) => (*error).into(),
            other => Failure::Other(format!("{other:?}")),
        }
    }
}
