//! Mutual proof of the job's token, before a connection is believed.
//!
//! The process that opens a connection (the *initiator*) and the one that accepted it (the *responder*) both
//! hold the [`Token`] of their job. Four messages of fixed size pass between them:
//!
//! ```text
//! initiator                                                       responder
//!   hello     { magic, version, job, nonce, introduction }  ──────────►
//!             ◄──────────  challenge { magic, version, status, nonce, proof "responder" }
//!   answer    { proof "initiator" }                         ──────────►
//!             ◄──────────  verdict   { magic, version, status }
//! ```
//!
//! A proof is BLAKE3 keyed with the token over the prover's role, both nonces and the whole hello.
//! The role keeps a proof from being reflected to its maker, the nonces keep it from being
//! replayed, and the hello keeps the [`Introduction`] from being changed on the way. The job id in
//! the hello is derived one-way from the token: it only lets a peer of another job be told apart
//! from a peer that lies.
//!
//! The proofs establish which process opened the connection. In a job that does not encrypt, what follows on it is
//! neither encrypted nor authenticated: the token keeps strangers and mistakes out, not an attacker that can
//! rewrite packets on the job's network. In one that does ([`Token::encrypts`]), answer and verdict of a
//! TCP connection also carry the two messages of a Noise handshake, whose prologue is the
//! hello and the responder's nonce, and all that follows is encrypted with its keys. Both sides say in
//! the hello, which the proofs cover, whether they encrypt, and neither gives way: a job can be
//! kept from connecting, but not be made to talk in the clear.
//!
//! The first twelve bytes of hello, challenge and verdict (magic, version, status) keep their
//! meaning in every version, so that peers of different versions can tell each other so.
//!
//! [`Initiator`] and [`Responder`] are state machines: bytes in, bytes and decisions out. They own
//! no socket, no clock and no source of randomness, accept bytes in pieces of any size, allocate
//! nothing, and never take a byte past the end of the handshake. The [dialer](crate::dial) runs
//! initiators, the [`acceptor`](crate::acceptor) responders.

mod initiator;
mod responder;
mod wire;

pub use initiator::{Initiated, Initiator};
pub use responder::{Reply, Responder, Step};
pub use wire::VERSION;
pub(crate) use wire::{Hello, JobId};

use std::fmt;
use std::io;

use crate::cipher::NOISE_LEN;
use crate::token::Token;

/// A number used once: 32 fresh random bytes chosen by one side of one handshake.
pub type Nonce = [u8; 32];

/// A fresh nonce from the operating system.
pub fn random_nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::from)?;
    Ok(nonce)
}

/// Which process opens a connection, to which other, and what for. The handshake's proofs cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Introduction {
    /// What the connection will carry.
    pub purpose: Purpose,
    /// The epoch the initiator is in.
    pub epoch: u64,
    /// The group the connection belongs to.
    pub group: u64,
    /// The initiator, as those of this purpose number each other.
    pub from: u32,
    /// Whom the initiator believes to have reached.
    pub to: u32,
    /// Which of several parallel connections between the two this is.
    pub channel: u32,
}

impl Introduction {
    /// One for connections that need no more than this: the rest is 0.
    pub const fn new(purpose: Purpose, from: u32, to: u32) -> Introduction {
        Introduction { purpose, epoch: 0, group: 0, from, to, channel: 0 }
    }
}

/// What a connection will carry once it is accepted: a tag that the crate which speaks on it defines.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Purpose([u8; 4]);

impl Purpose {
    /// The purpose of this name, which no other crate of the job may use.
    pub const fn new(name: [u8; 4]) -> Purpose {
        Purpose(name)
    }
}

impl fmt::Debug for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// Whether a job encrypts, as both sides of a connection must say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// It does not.
    Off = 0,
    /// It does, though not this connection, which stays on its host.
    Local = 1,
    /// It does, this connection too.
    On = 2,
}

impl Encryption {
    /// That of a connection between hosts, or within one.
    pub fn of(token: &Token, is_local: bool) -> Encryption {
        match (token.encrypts(), is_local) {
            (false, _) => Encryption::Off,
            (true, true) => Encryption::Local,
            (true, false) => Encryption::On,
        }
    }

    /// Bytes of the Noise handshake in an answer and a verdict.
    fn noise_len(self) -> usize {
        if self == Encryption::On { NOISE_LEN } else { 0 }
    }
}

/// Why a responder turned a connection away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The first bytes are not Unisono's: a port scanner, or a client of something else.
    #[error("does not speak Unisono's protocol")]
    NotUnisono,
    /// Another version of the protocol.
    #[error("speaks version {theirs} of the protocol, not {VERSION}")]
    Version {
        /// The version the initiator speaks.
        theirs: u16,
    },
    /// A peer of another job, or of this job with another token.
    #[error("belongs to another job")]
    OtherJob,
    /// A hello of the right version with impossible contents.
    #[error("sent a malformed hello")]
    Malformed,
    /// The proof does not fit: the initiator does not hold the token.
    #[error("failed to prove the job's token")]
    BadProof,
    /// The connection is for something that this port does not serve.
    #[error("asks for {theirs:?}, which this port does not serve")]
    OtherPurpose {
        /// The purpose the initiator named.
        theirs: Purpose,
    },
    /// One side encrypts and the other does not.
    #[error("{}", disagreement(.theirs))]
    Encryption {
        /// Whether the initiator does.
        theirs: bool,
    },
}

/// What is said of another side that encrypts, or does not, unlike this one.
fn disagreement(theirs: &bool) -> &'static str {
    match theirs {
        true => {
            "it encrypts its connections, and this process does not: set UNISONO_ENCRYPT for all or none"
        }
        false => {
            "it does not encrypt its connections, and this process does: set UNISONO_ENCRYPT for all or none"
        }
    }
}

impl Refusal {
    /// The status that stands for this refusal on the wire; 0 means accepted.
    fn code(self) -> u16 {
        match self {
            Refusal::NotUnisono => 1,
            Refusal::Version { .. } => 2,
            Refusal::OtherJob => 3,
            Refusal::Malformed => 4,
            Refusal::BadProof => 5,
            Refusal::OtherPurpose { .. } => 6,
            // What the responder does, which the initiator does not.
            Refusal::Encryption { theirs: true } => 7,
            Refusal::Encryption { theirs: false } => 8,
        }
    }
}

/// Why a handshake failed, as the initiator sees it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The other side does not speak Unisono's protocol: probably the wrong port.
    #[error("the other side does not speak Unisono's protocol")]
    NotUnisono,
    /// The other side speaks another version: start all ranks with the same Unisono.
    #[error("the other side speaks version {theirs} of the protocol, this one {VERSION}")]
    Version {
        /// The version the responder speaks.
        theirs: u16,
    },
    /// The other side belongs to another job, or this job's ranks hold different tokens.
    #[error("the other side belongs to another job (or the tokens differ)")]
    OtherJob,
    /// The other side could not prove that it holds the token.
    #[error("the other side failed to prove the job's token")]
    BadProof,
    /// The other side did not accept this side's proof: the tokens differ.
    #[error("the other side did not accept the proof of the job's token")]
    ProofRejected,
    /// The other side does something else than what this connection is for: probably the wrong port.
    #[error(
        "the port serves something else than what this connection is for; is it the right one?"
    )]
    OtherPurpose,
    /// One side encrypts and the other does not: all of a job must agree.
    #[error("{}", disagreement(.theirs))]
    Encryption {
        /// Whether the responder does.
        theirs: bool,
    },
    /// The other side sent, or says it received, something no correct peer sends.
    #[error("a handshake message is malformed")]
    Malformed,
    /// The connection ended in the middle of the handshake.
    #[error("the connection closed during the handshake")]
    Truncated,
    /// The deadline passed; perhaps no process serves the connection.
    #[error("the handshake did not finish in time")]
    TimedOut,
    /// The socket failed.
    #[error("{0}")]
    Io(io::Error),
}

impl HandshakeError {
    /// Whether the same attempt, made again later, cannot succeed: the other side is there, and is not
    /// the one that this side looks for.
    pub fn is_final(&self) -> bool {
        use HandshakeError::*;
        !matches!(self, Truncated | TimedOut | Io(_))
    }
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> HandshakeError {
        use io::ErrorKind::*;
        match error.kind() {
            TimedOut => HandshakeError::TimedOut,
            ConnectionReset | BrokenPipe | ConnectionAborted | UnexpectedEof => {
                HandshakeError::Truncated
            }
            _ => HandshakeError::Io(error),
        }
    }
}

/// The purpose of connections that fuzzers make.
#[doc(hidden)]
pub const ANY: Purpose = Purpose::new(*b"fuzz");

/// Runs one whole handshake over `bytes`, read as what a stranger sends to a responder, and says
/// how many of them were taken. For fuzzers: it must return, whatever the bytes.
#[doc(hidden)]
pub fn fuzz_responder(token: &Token, nonce: Nonce, bytes: &[u8]) -> usize {
    let mut responder = Responder::new(token, &[ANY], nonce);
    let mut taken = 0;
    loop {
        let (consumed, step) = responder.feed(&bytes[taken..]);
        taken += consumed;
        match step {
            Step::Send(_) => continue,
            Step::More | Step::Accepted { .. } | Step::Refused { .. } => return taken,
        }
    }
}

/// Feeds `bytes` to an initiator as what a stranger answers. For fuzzers, like
/// [`fuzz_responder`].
#[doc(hidden)]
pub fn fuzz_initiator(token: &Token, nonce: Nonce, bytes: &[u8]) -> usize {
    let mut initiator = Initiator::new(token, &Introduction::new(ANY, 0, 1), nonce);
    let mut taken = 0;
    while let (consumed, Ok(Initiated::Send(_))) = initiator.feed(&bytes[taken..]) {
        taken += consumed;
    }
    taken
}

#[cfg(test)]
mod tests;
