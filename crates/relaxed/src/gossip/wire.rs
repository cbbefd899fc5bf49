//! Messages between two workers.
//!
//! After the handshake both sides greet: first who dialed, then who answered. From then on the dialing
//! side asks and the other one replies, one message at a time. A message is a header of fixed size;
//! an offer, a move and weights are followed by one `f32` for each weight of the model, parameter by
//! parameter, as they lie in memory. How many that are is settled by the greeting, before anything is
//! read: a header that says otherwise ends the connection.

use std::io::{self, Read, Write};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Clock, Life};

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Who speaks, and about which model. `joining`: its weights do not count yet.
    Greeting { joining: bool },
    /// The weights of the active side.
    Offer,
    /// The way the passive side went.
    Moved,
    /// The passive side did not move, or has nothing to give.
    Declined(Reason),
    /// Asks for the weights of a worker that is under way.
    Fetch,
    /// Its weights.
    Weights,
}

/// Why an offer or a fetch was declined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// An offer to the one who offers is under way, and goes first.
    Crossed,
    /// The exchange was heard of before.
    Repeated,
    /// The offered weights are not all finite.
    NotFinite,
    /// The worker is joining, or has finished no step: its weights are not worth having.
    NotUnderWay,
}

/// What two workers must have in common to exchange weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// A hash of the lengths of all parameters, in order.
    pub model: u64,
    /// Their sum.
    pub elements: u64,
}

/// A header, understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub kind: Kind,
    /// The sender's life.
    pub life: Life,
    /// The exchange it belongs to; 0 if to none.
    pub number: u64,
    /// Steps the sender has finished.
    pub clock: Clock,
    pub shape: Shape,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    kind: U32,
    detail: U32,
    life: U64,
    number: U64,
    clock: U64,
    model: U64,
    elements: U64,
}

/// The size of a header.
pub const HEADER_LEN: usize = size_of::<Header>();

impl Message {
    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let (kind, detail) = self.kind.codes();
        zerocopy::transmute!(Header {
            kind: kind.into(),
            detail: detail.into(),
            life: self.life.0.into(),
            number: self.number.into(),
            clock: self.clock.0.into(),
            model: self.shape.model.into(),
            elements: self.shape.elements.into(),
        })
    }

    /// What the bytes of a header say, if anything.
    pub fn from_bytes(bytes: [u8; HEADER_LEN]) -> Option<Message> {
        let header: Header = zerocopy::transmute!(bytes);
        Some(Message {
            kind: Kind::from_codes(header.kind.get(), header.detail.get())?,
            life: Life(header.life.get()),
            number: header.number.get(),
            clock: Clock(header.clock.get()),
            shape: Shape { model: header.model.get(), elements: header.elements.get() },
        })
    }

    /// Sends the header, and `payload` behind it.
    pub fn send(self, stream: &mut impl Write, payload: &[f32]) -> io::Result<()> {
        stream.write_all(&self.to_bytes())?;
        stream.write_all(payload.as_bytes())
    }

    /// Receives a header.
    pub fn receive(stream: &mut impl Read) -> io::Result<Message> {
        let mut bytes = [0; HEADER_LEN];
        stream.read_exact(&mut bytes)?;
        Message::from_bytes(bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

impl Kind {
    const ALL: [Kind; 10] = [
        Kind::Greeting { joining: false },
        Kind::Greeting { joining: true },
        Kind::Offer,
        Kind::Moved,
        Kind::Declined(Reason::Crossed),
        Kind::Declined(Reason::Repeated),
        Kind::Declined(Reason::NotFinite),
        Kind::Declined(Reason::NotUnderWay),
        Kind::Fetch,
        Kind::Weights,
    ];

    fn codes(self) -> (u32, u32) {
        match self {
            Kind::Greeting { joining } => (1, joining.into()),
            Kind::Offer => (2, 0),
            Kind::Moved => (3, 0),
            Kind::Declined(Reason::Crossed) => (4, 1),
            Kind::Declined(Reason::Repeated) => (4, 2),
            Kind::Declined(Reason::NotFinite) => (4, 3),
            Kind::Declined(Reason::NotUnderWay) => (4, 4),
            Kind::Fetch => (5, 0),
            Kind::Weights => (6, 0),
        }
    }

    fn from_codes(kind: u32, detail: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|candidate| candidate.codes() == (kind, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_wire() {
        let shape = Shape { model: u64::MAX - 1, elements: 5 };
        for kind in Kind::ALL {
            let message = Message { kind, life: Life(1 << 40), number: 2, clock: Clock(3), shape };
            let mut bytes = Vec::new();
            message.send(&mut bytes, &[1.0, 2.0]).unwrap();
            assert_eq!(bytes.len(), HEADER_LEN + 8);
            let mut rest = &bytes[..];
            assert_eq!(Message::receive(&mut rest).unwrap(), message);
            assert_eq!(rest, [1.0f32, 2.0].as_bytes());
        }
        assert_eq!(HEADER_LEN, 48);
    }

    #[test]
    fn nonsense_is_refused() {
        let mut bytes = [0; HEADER_LEN];
        assert_eq!(Message::from_bytes(bytes), None);
        bytes[0] = 7;
        assert_eq!(Message::from_bytes(bytes), None);
        (bytes[0], bytes[4]) = (2, 1);
        assert_eq!(Message::from_bytes(bytes), None);
        bytes[4] = 0;
        assert!(Message::from_bytes(bytes).is_some());
    }
}
