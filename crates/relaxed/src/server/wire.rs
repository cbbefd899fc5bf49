//! What workers and servers say to each other.
//!
//! A message is one [frame](unisono_net::frame), which holds a [`Request`] or a [`Reply`]. After some of
//! them follows bulk data whose length the message says: pieces of gradients or weights, f32,
//! little-endian, one after the other. Between processes of one host, bulk data lies in memory that both
//! have mapped, and only messages travel. An empty frame is a heartbeat: servers send one now and then to
//! all workers that are connected.
//!
//! Nothing that is read is believed before it is checked: a message has a largest length, and bulk data
//! must have the length that the layout of the run gives it.

use std::io;

use serde::{Deserialize, Serialize};
use unisono_codec::CodecSpec;
use unisono_net::Purpose;
use unisono_optimizer::OptimizerSpec;

use super::core::{Age, Joined, Ledger, PushId, Refusal};
use super::layout::Piece;
use crate::spec::Level;
use crate::staleness::StalenessPolicy;
use crate::{Clock, Life};

/// Connections of workers to a parameter server.
pub const SERVER: Purpose = Purpose::new(*b"serv");

/// The most bytes of a message: room for some ten thousand pieces.
pub const LONGEST: usize = 1 << 20;

/// What a run is, for one server. Equal for all workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// The pieces that lie here.
    pub pieces: Vec<Piece>,
    /// What makes weights of gradients.
    pub optimizer: OptimizerSpec,
    /// The consistency level.
    pub level: Level,
    /// What becomes of stale gradients.
    pub stale: StalenessPolicy,
    /// After how many pushes the run is over; in lock-step, after how many rounds.
    pub total: u64,
    /// Workers of the run.
    pub workers: u32,
    /// Shards of the global batch, by which lock-step fixes the order of additions.
    pub shards: u32,
    /// What each piece is encoded by, if it is.
    pub codecs: Vec<Option<CodecSpec>>,
    /// The seed of the run.
    pub seed: u64,
    /// How long a worker may be silent, in milliseconds.
    pub timeout_ms: u64,
}

impl Setup {
    /// Tells setups apart.
    pub fn fingerprint(&self) -> [u8; 32] {
        *blake3::hash(&postcard::to_stdvec(self).expect("a setup can be encoded")).as_bytes()
    }
}

/// What a worker measured of the step it pushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The mean loss over its samples.
    pub loss: f32,
    /// How many these were.
    pub samples: u64,
    /// Seconds of computing.
    pub compute: f64,
    /// Seconds of waiting to be let read since the push before.
    pub held: f64,
    /// Seconds of waiting for anything since the push before, that included.
    pub blocked: f64,
    /// Seconds since the push before.
    pub wall: f64,
    /// Bytes sent and received since the push before.
    pub bytes: u64,
}

/// A piece of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Which piece.
    pub piece: u32,
    /// How many vectors there are: one, or in lock-step one for every subtree the worker has summed.
    pub vectors: u32,
    /// Bytes of all of them, or of the encoding.
    pub bytes: u64,
    /// Whether it is encoded by the codec of the piece.
    pub encoded: bool,
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// The connection's worker, in the life that the handshake named, wants to take part in the run with
    /// this [fingerprint](Setup::fingerprint).
    Join {
        /// The fingerprint of its setup.
        run: [u8; 32],
    },
    /// What the run is, for a server that does not know; the initial weights of all pieces follow.
    SetUp(Box<Setup>),
    /// Begins at this clock.
    Enter {
        /// The clock.
        clock: Clock,
    },
    /// A gradient; its parts follow.
    Push {
        /// Which push.
        push: PushId,
        /// What was measured.
        measured: Measured,
        /// What follows.
        parts: Vec<Part>,
    },
    /// Wants the weights, when they are fresh enough.
    Pull {
        /// The reader's clock.
        clock: Clock,
        /// By how much it may be ahead of the slowest.
        bound: Option<u64>,
        /// Which pieces; all, if it does not say.
        pieces: Option<Vec<u32>>,
    },
    /// A heartbeat. Not replied to.
    Beat,
    /// Is done.
    Leave,
    /// Wants the weights of the run with this fingerprint as they are, and takes no part.
    Weights {
        /// The fingerprint of its setup.
        run: [u8; 32],
    },
    /// Wants to know how things are.
    Report,
    /// Wants a number for a new [life](super::lives) of a worker. Asked of the first server.
    Life {
        /// The worker.
        worker: u32,
    },
}

/// What a server says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Come in.
    Joined {
        /// Where to begin.
        joined: Joined,
        /// By how much the worker may be ahead.
        bound: Option<u64>,
        /// Whether the run is over.
        finished: bool,
    },
    /// This server knows of no run yet: set it up.
    Unknown,
    /// This server serves another run.
    OtherRun,
    /// Done.
    Done,
    /// What became of a push.
    Pushed {
        /// Whether it is part of the weights; not if it came too late or was dropped.
        applied: bool,
        /// How old its weights were.
        age: Age,
        /// The worker's clock now.
        clock: Clock,
        /// By how much the worker may be ahead from now on.
        bound: Option<u64>,
        /// Whether the run is over.
        finished: bool,
    },
    /// The weights; they follow.
    Weights {
        /// The pieces, and their versions.
        versions: Vec<(u32, u64)>,
    },
    /// No.
    Refused(Refusal),
    /// The request makes no sense.
    Invalid(String),
    /// How things are.
    Report(Report),
    /// The number of a new life.
    Life {
        /// Larger than those of all before.
        life: Life,
    },
    /// This is another server than the one that was meant.
    OtherServer {
        /// Which it is.
        number: u32,
    },
}

/// How things are at a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Updates of the weights.
    pub updates: u64,
    /// What became of pushes.
    pub ledger: Ledger,
    /// Workers that take part now.
    pub present: u32,
    /// Whether the run is over.
    pub finished: bool,
    /// Seconds since the server was set up.
    pub seconds: f64,
}

/// An error about what the other side said.
pub fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use unisono_net::frame::{append, read};

    #[test]
    fn messages_survive_the_way() {
        let messages = [Request::Beat, Request::Enter { clock: Clock(7) }, Request::Leave];
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| append(message, &mut bytes).unwrap());
        let (mut from, mut scratch) = (&bytes[..], Vec::new());
        for message in messages {
            assert_eq!(read(&mut from, LONGEST, &mut scratch).unwrap(), Some(message));
        }
        assert_eq!(read::<Request>(&mut from, LONGEST, &mut scratch).unwrap(), None);
    }

    #[test]
    fn a_long_message_is_refused_before_it_is_read() {
        let length = (LONGEST as u32 + 1).to_le_bytes();
        let error = read::<Request>(&mut &length[..], LONGEST, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("allowed"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (mut from, mut scratch) = (&bytes[..], Vec::new());
            while let Ok(Some(_)) = read::<Request>(&mut from, LONGEST, &mut scratch) {}
            let _ = read::<Reply>(&mut &bytes[..], LONGEST, &mut scratch);
        }
    }
}
