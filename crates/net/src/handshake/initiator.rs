//! The opening side of the handshake.

use zerocopy::IntoBytes;

use super::wire::{
    ACCEPTED, ANSWER_LEN, CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Inbox, MAGIC, PREFIX_LEN,
    Prefix, VERDICT_LEN, VERSION, Verdict,
};
use super::{HandshakeError, Introduction, Nonce};
use crate::token::{Role, Token};

/// One handshake, seen from the side that opened the connection.
pub struct Initiator {
    token: Token,
    hello: Hello,
    state: State,
    inbox: Inbox<CHALLENGE_LEN>,
}

enum State {
    AwaitChallenge,
    AwaitVerdict,
    Over,
}

/// What the owner of the connection does after feeding an [`Initiator`].
#[derive(Debug, PartialEq, Eq)]
pub enum Initiated {
    /// Wait for more bytes.
    More,
    /// Send this answer, then feed what comes next.
    Send([u8; ANSWER_LEN]),
    /// The responder is proven and has accepted.
    Done,
}

impl Initiator {
    /// An initiator of the job that holds `token`. The nonce must be fresh.
    pub fn new(token: &Token, introduction: &Introduction, nonce: Nonce) -> Initiator {
        Initiator {
            token: token.clone(),
            hello: Hello::new(token, introduction, nonce),
            state: State::AwaitChallenge,
            inbox: Inbox::new(),
        }
    }

    /// The bytes to send first.
    pub fn hello(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes.copy_from_slice(self.hello.as_bytes());
        bytes
    }

    /// How many bytes to read at most; see [`Responder::wanted`](super::Responder::wanted).
    ///
    /// Every message is wanted in two pieces, because a refusal ends after the first.
    pub fn wanted(&self) -> usize {
        let whole = match self.state {
            State::AwaitChallenge => CHALLENGE_LEN,
            State::AwaitVerdict => VERDICT_LEN,
            State::Over => return 0,
        };
        let here = self.inbox.len();
        if here < PREFIX_LEN { PREFIX_LEN - here } else { whole - here }
    }

    /// Takes bytes of the responder, at most to the end of the current message; returns how many
    /// it took, and what to do now. After an error the handshake is over.
    pub fn feed(&mut self, bytes: &[u8]) -> (usize, Result<Initiated, HandshakeError>) {
        let whole = match self.state {
            State::AwaitChallenge => CHALLENGE_LEN,
            State::AwaitVerdict => VERDICT_LEN,
            State::Over => return (0, Ok(Initiated::More)),
        };
        let taken = self.inbox.fill(bytes, whole);
        let step = self.step();
        if step.is_err() {
            self.state = State::Over;
        }
        (taken, step)
    }

    fn step(&mut self) -> Result<Initiated, HandshakeError> {
        let Some(prefix) = self.inbox.message::<Prefix>() else {
            return match self.inbox.message::<[u8; 8]>() {
                Some(magic) if magic != MAGIC => Err(HandshakeError::NotUnisono),
                _ => Ok(Initiated::More),
            };
        };
        check(&prefix)?;
        match self.state {
            State::AwaitChallenge => match self.inbox.message::<Challenge>() {
                Some(challenge) => self.on_challenge(&challenge),
                None => Ok(Initiated::More),
            },
            State::AwaitVerdict => {
                const { assert!(size_of::<Verdict>() == PREFIX_LEN) };
                self.state = State::Over;
                Ok(Initiated::Done)
            }
            State::Over => Ok(Initiated::More),
        }
    }

    fn on_challenge(&mut self, challenge: &Challenge) -> Result<Initiated, HandshakeError> {
        let expected = self.token.proof(Role::Responder, &self.hello, &challenge.nonce);
        if expected != challenge.proof {
            return Err(HandshakeError::BadProof);
        }
        self.inbox.clear();
        self.state = State::AwaitVerdict;
        let answer = self.token.proof(Role::Initiator, &self.hello, &challenge.nonce);
        Ok(Initiated::Send(*answer.as_bytes()))
    }
}

fn check(prefix: &Prefix) -> Result<(), HandshakeError> {
    if prefix.magic != MAGIC {
        return Err(HandshakeError::NotUnisono);
    }
    if prefix.version != VERSION {
        return Err(HandshakeError::Version { theirs: prefix.version.get() });
    }
    // As [`Refusal::code`](super::Refusal) numbers them.
    match prefix.status.get() {
        ACCEPTED => Ok(()),
        3 => Err(HandshakeError::OtherJob),
        5 => Err(HandshakeError::ProofRejected),
        6 => Err(HandshakeError::OtherPurpose),
        _ => Err(HandshakeError::Malformed),
    }
}
