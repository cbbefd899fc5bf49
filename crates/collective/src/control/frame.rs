//! What travels on a control connection.
//!
//! ```text
//! 0   kind u8, 3 zero bytes
//! 4   length u32     (news: of the facts that follow)
//! ```

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::news::MAX_NEWS;

/// A frame on a control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The sender is alive.
    Heartbeat,
    /// Facts follow.
    News {
        /// Their bytes.
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
    length: U32,
}

/// Bytes of an encoded frame.
pub const SIZE: usize = size_of::<WireFrame>();

impl Frame {
    /// The bytes of the frame.
    pub fn encode(self) -> [u8; SIZE] {
        let mut wire = WireFrame::new_zeroed();
        match self {
            Frame::Heartbeat => wire.kind = 1,
            Frame::News { length } => {
                wire.kind = 2;
                wire.length = (length as u32).into();
            }
        }
        zerocopy::transmute!(wire)
    }

    /// Reads a frame; the length of what follows is within its limit.
    pub fn decode(bytes: &[u8; SIZE]) -> Result<Frame, MalformedFrame> {
        let wire = WireFrame::read_from_bytes(bytes).map_err(|_| MalformedFrame)?;
        match (wire.kind, wire.length.get() as usize) {
            (1, _) => Ok(Frame::Heartbeat),
            (2, length) if length <= MAX_NEWS => Ok(Frame::News { length }),
            _ => Err(MalformedFrame),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        for frame in [Frame::Heartbeat, Frame::News { length: MAX_NEWS }] {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
        let excessive = Frame::News { length: MAX_NEWS + 1 }.encode();
        assert_eq!(Frame::decode(&excessive), Err(MalformedFrame));
    }
}
