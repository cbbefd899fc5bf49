//! Why a group failed, as the other ranks are told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::{self, Call};
use crate::error::{CircleWait, Error, Loss};
use crate::waits::{LISTED, NAMED, PLACE};

/// Bytes of a text that explains a failure.
const MAX_TEXT: usize = 2000;

/// An [`Error`] as it travels. It means the same to every rank, whichever it comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// A rank is gone.
    Lost {
        /// Which.
        peer: u32,
        /// For how long it was silent, if it did not close its connections.
        silent_ms: Option<u64>,
    },
    /// A rank left while others needed it.
    Left {
        /// Which.
        peer: u32,
    },
    /// A rank left because of an error of its own.
    Failed {
        /// Which.
        peer: u32,
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
        rank: u32,
        /// Its call.
        #[serde(with = "call::wire")]
        call: Call,
        /// The other.
        peer: u32,
        /// Its call.
        #[serde(with = "call::wire")]
        peer_call: Call,
    },
    /// A message and its receive have different lengths.
    Length {
        /// Sender.
        from: u32,
        /// Receiver.
        to: u32,
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
        peer: u32,
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
    pub fn of(error: &Error, rank: usize) -> Reason {
        match error {
            Error::PeerLost { peer, loss, .. } => {
                let peer = *peer as u32;
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
            Error::Mismatch { rank, call, peer, peer_call, .. } => Reason::Mismatch {
                rank: *rank as u32,
                call: *call,
                peer: *peer as u32,
                peer_call: *peer_call,
            },
            Error::LengthMismatch { from, to, tag, sent, expected } => Reason::Length {
                from: *from as u32,
                to: *to as u32,
                tag: *tag,
                sent: *sent,
                expected: *expected,
            },
            Error::Aborted { peer, reason } => {
                Reason::Aborted { peer: *peer as u32, reason: reason.clone() }
            }
            Error::TimedOut { .. } | Error::InvalidCall(_) | Error::System { .. } => {
                Reason::Aborted { peer: rank as u32, reason: error.to_string() }
            }
        }
        .shortened()
    }

    /// Whether all ranks in it are of a group of `world`.
    pub fn is_of(&self, world: usize) -> bool {
        let is_rank = |rank: u32| (rank as usize) < world;
        match self {
            Reason::Lost { peer, .. }
            | Reason::Left { peer }
            | Reason::Failed { peer, .. }
            | Reason::Aborted { peer, .. } => is_rank(*peer),
            Reason::Mismatch { rank, peer, .. } => is_rank(*rank) && is_rank(*peer),
            Reason::Length { from, to, .. } => is_rank(*from) && is_rank(*to),
            Reason::Deadlock { waits } => waits.iter().flatten().next().is_some(),
            Reason::EpochEnded { .. } => true,
        }
    }

    /// As long as correct ranks make it.
    pub fn shortened(self) -> Reason {
        match self {
            Reason::Failed { peer, reason } => Reason::Failed { peer, reason: cut(reason) },
            Reason::Aborted { peer, reason } => Reason::Aborted { peer, reason: cut(reason) },
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
        let lost = |peer: u32, loss| Error::PeerLost { peer: peer as usize, loss, during: None };
        match reason {
            Reason::Lost { peer, silent_ms: None } => lost(peer, Loss::Closed),
            Reason::Lost { peer, silent_ms: Some(ms) } => {
                lost(peer, Loss::Silent(Duration::from_millis(ms)))
            }
            Reason::Left { peer } => lost(peer, Loss::Left),
            Reason::Failed { peer, reason } => lost(peer, Loss::Failed(reason)),
            Reason::EpochEnded { epoch } => Error::EpochEnded { epoch },
            Reason::Mismatch { rank, call, peer, peer_call } => {
                Error::mismatch(rank as usize, call, peer as usize, peer_call)
            }
            Reason::Length { from, to, tag, sent, expected } => {
                Error::LengthMismatch { from: from as usize, to: to as usize, tag, sent, expected }
            }
            Reason::Aborted { peer, reason } => Error::Aborted { peer: peer as usize, reason },
            Reason::Deadlock { waits } => {
                Error::Deadlock { waits: waits.into_iter().flatten().collect() }
            }
        }
    }
}

/// As much of a text as fits, whatever its characters.
fn cut(text: String) -> String {
    if text.len() <= MAX_TEXT {
        return text;
    }
    let end = (0..=MAX_TEXT).rev().find(|at| text.is_char_boundary(*at));
    text[..end.unwrap_or(0)].into()
}

/// A wait as short as correct ranks make it.
fn shortened_wait(mut wait: CircleWait) -> CircleWait {
    wait.members.truncate(LISTED);
    wait.place = wait.place.map(|place| crate::waits::shortened(&place, PLACE));
    wait
}
