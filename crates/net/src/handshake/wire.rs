//! The bytes of the handshake: little-endian, no padding, one layout on every machine.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Encryption, Introduction, Nonce, Purpose};
use crate::token::Token;

/// The version of the handshake and of everything that follows it on a connection.
pub const VERSION: u16 = 4;

/// The first bytes of a connection. The last two are no text, so that nothing typed or converted
/// between line endings passes for them.
pub(super) const MAGIC: [u8; 8] = *b"Unison\r\0";

/// Status of a challenge or verdict that refuses nothing.
pub(super) const ACCEPTED: u16 = 0;

/// Bytes of magic, version and status: what every version understands of every other.
pub(super) const PREFIX_LEN: usize = size_of::<Prefix>();
pub(super) const HELLO_LEN: usize = size_of::<Hello>();
pub(super) const CHALLENGE_LEN: usize = size_of::<Challenge>();
pub(super) const ANSWER_LEN: usize = size_of::<Answer>();
pub(super) const VERDICT_LEN: usize = size_of::<VerdictMessage>();

pub(crate) type JobId = [u8; 16];

/// How hello, challenge and verdict begin, in every version.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Prefix {
    pub magic: [u8; 8],
    pub version: U16,
    /// 0 in a hello.
    pub status: U16,
}

impl Prefix {
    pub fn new(status: u16) -> Prefix {
        Prefix { magic: MAGIC, version: VERSION.into(), status: status.into() }
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Hello {
    pub(super) prefix: Prefix,
    pub job: JobId,
    pub nonce: Nonce,
    purpose: [u8; 4],
    from: U32,
    to: U32,
    channel: U32,
    epoch: U64,
    group: U64,
    encryption: U32,
}

impl Hello {
    pub fn new(
        token: &Token,
        introduction: &Introduction,
        nonce: Nonce,
        encryption: Encryption,
    ) -> Hello {
        Hello {
            prefix: Prefix::new(ACCEPTED),
            job: token.job_id(),
            nonce,
            purpose: introduction.purpose.0,
            from: introduction.from.into(),
            to: introduction.to.into(),
            channel: introduction.channel.into(),
            epoch: introduction.epoch.into(),
            group: introduction.group.into(),
            encryption: (encryption as u32).into(),
        }
    }

    /// Whether the initiator encrypts, if it is one of the ways that this version knows.
    pub fn encryption(&self) -> Option<Encryption> {
        use Encryption::*;
        [Off, Local, On].into_iter().find(|known| self.encryption == *known as u32)
    }

    pub fn introduction(&self) -> Introduction {
        Introduction {
            purpose: Purpose(self.purpose),
            epoch: self.epoch.get(),
            group: self.group.get(),
            from: self.from.get(),
            to: self.to.get(),
            channel: self.channel.get(),
        }
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Challenge {
    pub prefix: Prefix,
    pub nonce: Nonce,
    pub proof: [u8; 32],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Answer {
    pub proof: [u8; 32],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct VerdictMessage {
    pub prefix: Prefix,
}

/// The bytes of one message as they arrive: `N` is the largest message a side receives.
pub(super) struct Inbox<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Inbox<N> {
    pub const fn new() -> Inbox<N> {
        Inbox { bytes: [0; N], len: 0 }
    }

    /// Takes bytes until `wanted` are here; says how many were taken.
    pub fn fill(&mut self, bytes: &[u8], wanted: usize) -> usize {
        let take = (wanted - self.len).min(bytes.len());
        self.bytes[self.len..self.len + take].copy_from_slice(&bytes[..take]);
        self.len += take;
        take
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// What is here after the first `skip` bytes.
    pub fn after(&self, skip: usize) -> &[u8] {
        &self.bytes[skip.min(self.len)..self.len]
    }

    /// The message of type `T` at the front, if all of it is here.
    pub fn message<T: FromBytes>(&self) -> Option<T> {
        T::read_from_prefix(&self.bytes[..self.len]).ok().map(|(message, _)| message)
    }

    pub fn clear(&mut self) {
        self.len = 0;
    }
}
