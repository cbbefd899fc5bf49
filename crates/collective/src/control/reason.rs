//! Why a group failed, as the other ranks are told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::{self, Call};
use crate::error::{CircleWait, Error, Loss};
use crate::excerpt::{beginning, ending};
use crate::waits::{LISTED, NAMED, PLACE};
use unisono_net::rank::Rank;

/// Bytes of a text that explains a failure.
const MAX_TEXT: usize = 2000;

/// An [`Error`] as it travels. It means the same to every rank, whichever it comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// A rank is gone.
    Lost {
        /// Which.
        peer: Rank,
        /// For how long it was silent, if it did not close its connections.
        silent_ms: Option<u64>,
    },
    /// A rank left while others needed it.
    Left {
        /// Which.
        peer: Rank,
    },
    /// A rank left because of an error of its own.
    Failed {
        /// Which.
        peer: Rank,
        /// The error.
        reason: String,
    },
    /// The epoch has ended.
    EpochEnded {
        /// Which.
        epoch: u64,
    },
    /// Two ranks called different things.
    Mismatch {
        /// The one.
        rank: Rank,
        /// Its call.
        #[serde(with = "call::wire")]
        call: Call,
        /// The other.
        peer: Rank,
        /// Its call.
        #[serde(with = "call::wire")]
        peer_call: Call,
    },
    /// A message and its receive have different lengths.
    Length {
        /// Sender.
        from: Rank,
        /// Receiver.
        to: Rank,
        /// The tag of both.
        tag: u32,
        /// Bytes sent.
        sent: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// A rank gave up.
    Aborted {
        /// Which.
        peer: Rank,
        /// Why.
        reason: String,
    },
    /// Ranks wait for each other.
    Deadlock {
        /// Each for the next.
        waits: Box<[Option<CircleWait>; NAMED]>,
    },
}

impl Reason {
    /// Why the group failed, as `rank` tells it.
    pub fn of(error: &Error, rank: Rank) -> Reason {
        match error {
            Error::PeerLost { peer, loss, .. } => {
                let peer = *peer;
                match loss {
                    Loss::Left => Reason::Left { peer },
                    Loss::Failed(reason) => Reason::Failed { peer, reason: reason.clone() },
                    Loss::Closed => Reason::Lost { peer, silent_ms: None },
                    Loss::Silent(after) => {
                        Reason::Lost { peer, silent_ms: Some(after.as_millis() as u64) }
                    }
                }
            }
            Error::Deadlock { waits } => {
                let waits = Box::new(std::array::from_fn(|i| waits.get(i).cloned()));
                Reason::Deadlock { waits }
            }
            Error::EpochEnded { epoch } => Reason::EpochEnded { epoch: *epoch },
            Error::Mismatch { rank, call, peer, peer_call, .. } => {
                Reason::Mismatch { rank: *rank, call: *call, peer: *peer, peer_call: *peer_call }
            }
            Error::LengthMismatch { from, to, tag, sent, expected } => {
                Reason::Length { from: *from, to: *to, tag: *tag, sent: *sent, expected: *expected }
            }
            Error::Aborted { peer, reason } => {
                Reason::Aborted { peer: *peer, reason: reason.clone() }
            }
            Error::TimedOut { .. }
            | Error::InvalidCall(_)
            | Error::BadMessage { .. }
            | Error::System { .. } => Reason::Aborted { peer: rank, reason: error.to_string() },
        }
        .shortened()
    }

    /// Whether all ranks in it are of a group with these members.
    pub fn is_of(&self, members: &[Rank]) -> bool {
        let is_rank = |rank: &Rank| members.contains(rank);
        match self {
            Reason::Lost { peer, .. }
            | Reason::Left { peer }
            | Reason::Failed { peer, .. }
            | Reason::Aborted { peer, .. } => is_rank(peer),
            Reason::Mismatch { rank, peer, .. } => is_rank(rank) && is_rank(peer),
            Reason::Length { from, to, .. } => is_rank(from) && is_rank(to),
            Reason::Deadlock { waits } => waits.iter().flatten().next().is_some(),
            Reason::EpochEnded { .. } => true,
        }
    }

    /// As long as correct ranks make it.
    pub fn shortened(self) -> Reason {
        match self {
            Reason::Failed { peer, reason } => {
                Reason::Failed { peer, reason: beginning(&reason, MAX_TEXT) }
            }
            Reason::Aborted { peer, reason } => {
                Reason::Aborted { peer, reason: beginning(&reason, MAX_TEXT) }
            }
            Reason::Deadlock { waits } => {
                Reason::Deadlock { waits: Box::new(waits.map(|wait| wait.map(shortened_wait))) }
            }
            reason => reason,
        }
    }
}

/// The error that a rank gets that is told.
impl From<Reason> for Error {
    fn from(reason: Reason) -> Error {
        let lost = |peer, loss| Error::PeerLost { peer, loss, during: None };
        match reason {
            Reason::Lost { peer, silent_ms: None } => lost(peer, Loss::Closed),
            Reason::Lost { peer, silent_ms: Some(ms) } => {
                lost(peer, Loss::Silent(Duration::from_millis(ms)))
            }
            Reason::Left { peer } => lost(peer, Loss::Left),
            Reason::Failed { peer, reason } => lost(peer, Loss::Failed(reason)),
            Reason::EpochEnded { epoch } => Error::EpochEnded { epoch },
            Reason::Mismatch { rank, call, peer, peer_call } => {
                Error::mismatch(rank, call, peer, peer_call)
            }
            Reason::Length { from, to, tag, sent, expected } => {
                Error::LengthMismatch { from, to, tag, sent, expected }
            }
            Reason::Aborted { peer, reason } => Error::Aborted { peer, reason },
            Reason::Deadlock { waits } => {
                Error::Deadlock { waits: waits.into_iter().flatten().collect() }
            }
        }
    }
}

/// A wait as short as correct ranks make it.
fn shortened_wait(mut wait: CircleWait) -> CircleWait {
    wait.members.truncate(LISTED);
    wait.place = wait.place.map(|place| ending(&place, PLACE));
    wait
}
