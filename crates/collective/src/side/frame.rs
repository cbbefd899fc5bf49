//! What travels on the side channel.
//!
//! ```text
//! 0   kind u8, 3 zero bytes
//! 4   tag u32        (announce)
//! 8   id u32         (announce, clear, data: number of the message, per direction)
//! 12  seq u32        (goodbye: first call the sender takes no part in; place: number of the call)
//! 16  length u64     (announce: of the message; others: of what follows)
//! ```

use serde::{Deserialize, Serialize};
use std::time::Duration;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::call::{Call, WireCall};
use crate::error::{CircleWait, Error, Loss};
use crate::waits::{LISTED, NAMED, PLACE};

/// The largest explanation that travels with an abort.
pub const MAX_REASON: usize = 2048;

/// The largest text that travels with a goodbye or a place.
pub const MAX_TEXT: usize = 512;

/// The largest statement of a rank that waits.
pub const MAX_STATEMENT: usize = 2048;

/// Bytes of a message that follow one data frame. Larger: news wait longer behind a message.
/// Smaller: more system calls.
pub const MAX_DATA: usize = 1 << 20;

/// A frame of the side channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The sender is alive.
    Heartbeat,
    /// The sender leaves; it takes no part in call `seq` and later ones. Why follows, if it is not
    /// because it is done.
    Goodbye {
        /// The first call without the sender.
        seq: u32,
        /// Bytes of the reason.
        length: usize,
    },
    /// The group has failed; the reason follows.
    Abort {
        /// Bytes of the reason.
        length: usize,
    },
    /// A message is ready to be sent.
    Announce {
        /// Its tag.
        tag: u32,
        /// Its number.
        id: u32,
        /// Its length in bytes.
        length: u64,
    },
    /// The receiver is ready for a message.
    Clear {
        /// Its number.
        id: u32,
    },
    /// The sender waits in a call, which follows.
    Stuck,
    /// Where in its program the sender made a call follows, if it knows.
    Place {
        /// The number of the call.
        number: u32,
        /// Bytes of the place.
        length: usize,
    },
    /// A statement of the sender follows: a thread of it waits.
    Waits {
        /// Bytes of the statement.
        length: usize,
    },
    /// Part of a message follows.
    Data {
        /// Its number.
        id: u32,
        /// Bytes of this part.
        length: usize,
    },
}

/// Bytes that are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed frame")]
pub struct MalformedFrame;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireFrame {
    kind: u8,
    zero: [u8; 3],
    tag: U32,
    id: U32,
    seq: U32,
    length: U64,
}

/// Bytes of an encoded frame.
pub const SIZE: usize = size_of::<WireFrame>();

impl Frame {
    /// The bytes of the frame.
    pub fn encode(self) -> [u8; SIZE] {
        let mut wire = WireFrame::new_zeroed();
        match self {
            Frame::Heartbeat => wire.kind = 1,
            Frame::Goodbye { seq, length } => {
                wire.kind = 2;
                wire.seq = seq.into();
                wire.length = (length as u64).into();
            }
            Frame::Abort { length } => {
                wire.kind = 3;
                wire.length = (length as u64).into();
            }
            Frame::Announce { tag, id, length } => {
                wire.kind = 4;
                wire.tag = tag.into();
                wire.id = id.into();
                wire.length = length.into();
            }
            Frame::Clear { id } => {
                wire.kind = 5;
                wire.id = id.into();
            }
            Frame::Data { id, length } => {
                wire.kind = 6;
                wire.id = id.into();
                wire.length = (length as u64).into();
            }
            Frame::Stuck => wire.kind = 7,
            Frame::Place { number, length } => {
                wire.kind = 8;
                wire.seq = number.into();
                wire.length = (length as u64).into();
            }
            Frame::Waits { length } => {
                wire.kind = 9;
                wire.length = (length as u64).into();
            }
        }
        zerocopy::transmute!(wire)
    }

    /// Reads a frame; lengths of what follows are within their limits.
    pub fn decode(bytes: &[u8; SIZE]) -> Result<Frame, MalformedFrame> {
        let wire = WireFrame::read_from_bytes(bytes).map_err(|_| MalformedFrame)?;
        let bounded = |max: usize| match usize::try_from(wire.length.get()) {
            Ok(length) if length <= max => Ok(length),
            _ => Err(MalformedFrame),
        };
        let (tag, id) = (wire.tag.get(), wire.id.get());
        Ok(match wire.kind {
            1 => Frame::Heartbeat,
            2 => Frame::Goodbye { seq: wire.seq.get(), length: bounded(MAX_TEXT)? },
            3 => Frame::Abort { length: bounded(MAX_REASON)? },
            4 => Frame::Announce { tag, id, length: wire.length.get() },
            5 => Frame::Clear { id },
            6 => Frame::Data { id, length: bounded(MAX_DATA)? },
            7 => Frame::Stuck,
            8 => Frame::Place { number: wire.seq.get(), length: bounded(MAX_TEXT)? },
            9 => Frame::Waits { length: bounded(MAX_STATEMENT)? },
            _ => return Err(MalformedFrame),
        })
    }
}

/// An [`Error`] as it travels to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
enum Reason {
    Lost {
        peer: u32,
        silent_ms: Option<u64>,
    },
    Left {
        peer: u32,
    },
    EpochEnded {
        epoch: u64,
    },
    Mismatch {
        rank: u32,
        call: [u8; size_of::<WireCall>()],
        peer: u32,
        peer_call: [u8; size_of::<WireCall>()],
    },
    Length {
        from: u32,
        to: u32,
        tag: u32,
        sent: u64,
        expected: u64,
    },
    Other(String),
    Failed {
        peer: u32,
        reason: String,
    },
    Deadlock {
        waits: Box<[Option<CircleWait>; NAMED]>,
    },
}

/// Encodes why a group failed, for the other ranks.
pub fn encode_reason(error: &Error) -> Vec<u8> {
    let wire = |call: Call| zerocopy::transmute!(WireCall::from(call));
    let reason = match error {
        Error::PeerLost { peer, loss: Loss::Left, .. } => Reason::Left { peer: *peer as u32 },
        Error::PeerLost { peer, loss: Loss::Failed(reason), .. } => {
            Reason::Failed { peer: *peer as u32, reason: shortened(reason) }
        }
        Error::PeerLost { peer, loss, .. } => Reason::Lost {
            peer: *peer as u32,
            silent_ms: match loss {
                Loss::Silent(after) => Some(after.as_millis() as u64),
                Loss::Closed | Loss::Left | Loss::Failed(_) => None,
            },
        },
        Error::Deadlock { waits } => {
            let waits = Box::new(std::array::from_fn(|i| waits.get(i).cloned()));
            Reason::Deadlock { waits }
        }
        Error::EpochEnded { epoch } => Reason::EpochEnded { epoch: *epoch },
        Error::Mismatch { rank, call, peer, peer_call, .. } => Reason::Mismatch {
            rank: *rank as u32,
            call: wire(*call),
            peer: *peer as u32,
            peer_call: wire(*peer_call),
        },
        Error::LengthMismatch { from, to, tag, sent, expected } => Reason::Length {
            from: *from as u32,
            to: *to as u32,
            tag: *tag,
            sent: *sent,
            expected: *expected,
        },
        // Only whoever gives up sends this, so that the receiver knows who did.
        Error::Aborted { reason, .. } => Reason::Other(shortened(reason)),
        Error::TimedOut { .. } | Error::InvalidCall(_) | Error::System { .. } => {
            Reason::Other(shortened(&error.to_string()))
        }
    };
    postcard::to_stdvec(&reason).expect("plain data always encodes")
}

/// As much of a text as fits into a reason, whatever its characters.
fn shortened(text: &str) -> String {
    text.chars().take((MAX_REASON - 16) / char::MAX.len_utf8()).collect()
}

/// A wait as short as correct peers make it, so that it may be passed on.
fn shortened_wait(mut wait: CircleWait) -> CircleWait {
    wait.members.truncate(LISTED);
    wait.place = wait.place.map(|place| crate::waits::shortened(&place, PLACE));
    wait
}

/// The error that `peer` reported.
pub fn decode_reason(peer: usize, bytes: &[u8]) -> Error {
    let call = |bytes: [u8; size_of::<WireCall>()]| {
        let wire: WireCall = zerocopy::transmute!(bytes);
        Call::try_from(wire).ok()
    };
    let unreadable =
        || Error::Aborted { peer, reason: "for a reason this rank cannot read".into() };
    match postcard::from_bytes::<Reason>(bytes) {
        Err(_) => unreadable(),
        Ok(Reason::Lost { peer, silent_ms }) => {
            let loss = silent_ms.map_or(Loss::Closed, |ms| Loss::Silent(Duration::from_millis(ms)));
            Error::PeerLost { peer: peer as usize, loss, during: None }
        }
        Ok(Reason::Left { peer }) => {
            Error::PeerLost { peer: peer as usize, loss: Loss::Left, during: None }
        }
        Ok(Reason::EpochEnded { epoch }) => Error::EpochEnded { epoch },
        Ok(Reason::Mismatch { rank, call: mine, peer: other, peer_call }) => {
            match (call(mine), call(peer_call)) {
                (Some(call), Some(peer_call)) => {
                    Error::mismatch(rank as usize, call, other as usize, peer_call)
                }
                _ => unreadable(),
            }
        }
        Ok(Reason::Length { from, to, tag, sent, expected }) => {
            Error::LengthMismatch { from: from as usize, to: to as usize, tag, sent, expected }
        }
        Ok(Reason::Other(reason)) => Error::Aborted { peer, reason },
        Ok(Reason::Failed { peer, reason }) => {
            Error::PeerLost { peer: peer as usize, loss: Loss::Failed(reason), during: None }
        }
        Ok(Reason::Deadlock { waits }) => {
            let waits: Vec<CircleWait> = waits.into_iter().flatten().map(shortened_wait).collect();
            if waits.is_empty() { unreadable() } else { Error::Deadlock { waits } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let frames = [
            Frame::Heartbeat,
            Frame::Goodbye { seq: 7, length: 0 },
            Frame::Goodbye { seq: 7, length: MAX_TEXT },
            Frame::Place { number: 9, length: MAX_TEXT },
            Frame::Waits { length: MAX_STATEMENT },
            Frame::Abort { length: 12 },
            Frame::Announce { tag: 1, id: 2, length: 1 << 40 },
            Frame::Clear { id: 9 },
            Frame::Data { id: 9, length: MAX_DATA },
            Frame::Stuck,
        ];
        for frame in frames {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn excessive_lengths_are_refused() {
        let abort = Frame::Abort { length: MAX_REASON + 1 }.encode();
        assert_eq!(Frame::decode(&abort), Err(MalformedFrame));
        let place = Frame::Place { number: 0, length: MAX_TEXT + 1 }.encode();
        assert_eq!(Frame::decode(&place), Err(MalformedFrame));
        let data = Frame::Data { id: 0, length: MAX_DATA + 1 }.encode();
        assert_eq!(Frame::decode(&data), Err(MalformedFrame));
    }
}
