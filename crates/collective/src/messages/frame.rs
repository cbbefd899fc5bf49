//! What travels on a connection for messages.
//!
//! ```text
//! 0   kind u8, 3 zero bytes
//! 4   tag u32        (announce)
//! 8   id u32         (number of the message on this connection)
//! 12  length u64     (announce: of the message; data: of what follows)
//! ```

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a message that follow one data frame. Larger: an announcement waits longer behind a message.
/// Smaller: more system calls.
pub const MAX_DATA: usize = 1 << 20;

/// A frame on a connection for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
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
    length: U64,
}

/// Bytes of an encoded frame.
pub const SIZE: usize = size_of::<WireFrame>();

impl Frame {
    /// The bytes of the frame.
    pub fn encode(self) -> [u8; SIZE] {
        let mut wire = WireFrame::new_zeroed();
        match self {
            Frame::Announce { tag, id, length } => {
                wire.kind = 1;
                wire.tag = tag.into();
                wire.id = id.into();
                wire.length = length.into();
            }
            Frame::Clear { id } => {
                wire.kind = 2;
                wire.id = id.into();
            }
            Frame::Data { id, length } => {
                wire.kind = 3;
                wire.id = id.into();
                wire.length = (length as u64).into();
            }
        }
        zerocopy::transmute!(wire)
    }

    /// Reads a frame; the length of what follows is within its limit.
    pub fn decode(bytes: &[u8; SIZE]) -> Result<Frame, MalformedFrame> {
        let wire = WireFrame::read_from_bytes(bytes).map_err(|_| MalformedFrame)?;
        let (tag, id, length) = (wire.tag.get(), wire.id.get(), wire.length.get());
        Ok(match wire.kind {
            1 => Frame::Announce { tag, id, length },
            2 => Frame::Clear { id },
            3 if length <= MAX_DATA as u64 => Frame::Data { id, length: length as usize },
            _ => return Err(MalformedFrame),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let frames = [
            Frame::Announce { tag: 1, id: 2, length: 1 << 40 },
            Frame::Clear { id: 9 },
            Frame::Data { id: 9, length: MAX_DATA },
        ];
        for frame in frames {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn excessive_lengths_are_refused() {
        let data = Frame::Data { id: 0, length: MAX_DATA + 1 }.encode();
        assert_eq!(Frame::decode(&data), Err(MalformedFrame));
    }
}
