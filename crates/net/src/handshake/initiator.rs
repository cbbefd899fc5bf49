//! The opening side of the handshake.

use zerocopy::IntoBytes;

use super::wire::{
    ACCEPTED, CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Inbox, MAGIC, PREFIX_LEN, Prefix,
    VERDICT_LEN, VERSION, VerdictMessage,
};
use super::{Encryption, HandshakeError, Introduction, Nonce, Reply};
use crate::cipher::{Keys, Noise};
use crate::token::{Role, Token};

/// One handshake, seen from the side that opened the connection.
pub struct Initiator {
    token: Token,
    hello: Hello,
    encryption: Encryption,
    noise: Option<Noise>,
    keys: Option<Keys>,
    state: State,
    inbox: Inbox<CHALLENGE_LEN>,
}

enum State {
    AwaitChallenge,
    AwaitVerdict,
    Over,
}

/// What the owner of the connection does after feeding an [`Initiator`].
#[derive(Debug)]
pub enum Initiated {
    /// Wait for more bytes.
    More,
    /// Send this answer, then feed what comes next.
    Send(Reply),
    /// The responder is proven and has accepted.
    Done,
}

impl Initiator {
    /// An initiator of the job that holds `token`, between hosts. The nonce must be fresh.
    pub fn new(token: &Token, introduction: &Introduction, nonce: Nonce) -> Initiator {
        Initiator::with(token, introduction, nonce, Encryption::of(token, false))
    }

    /// As [`Initiator::new`], encrypted or not as it says.
    pub fn with(
        token: &Token,
        introduction: &Introduction,
        nonce: Nonce,
        encryption: Encryption,
    ) -> Initiator {
        Initiator {
            token: token.clone(),
            hello: Hello::new(token, introduction, nonce, encryption),
            encryption,
            noise: None,
            keys: None,
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
        let Some(whole) = self.whole() else { return 0 };
        let here = self.inbox.len();
        if here < PREFIX_LEN { PREFIX_LEN - here } else { whole - here }
    }

    /// Takes bytes of the responder, at most to the end of the current message; returns how many
    /// it took, and what to do now. After an error the handshake is over.
    pub fn feed(&mut self, bytes: &[u8]) -> (usize, Result<Initiated, HandshakeError>) {
        let Some(whole) = self.whole() else { return (0, Ok(Initiated::More)) };
        let taken = self.inbox.fill(bytes, whole);
        let step = self.step();
        if step.is_err() {
            self.state = State::Over;
        }
        (taken, step)
    }

    /// The keys by which all that follows is encrypted, if it is, once the handshake is done.
    pub(crate) fn take_keys(&mut self) -> Option<Keys> {
        self.keys.take()
    }

    /// Bytes of the message that is awaited.
    fn whole(&self) -> Option<usize> {
        match self.state {
            State::AwaitChallenge => Some(CHALLENGE_LEN),
            State::AwaitVerdict => Some(VERDICT_LEN + self.encryption.noise_len()),
            State::Over => None,
        }
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
                const { assert!(size_of::<VerdictMessage>() == PREFIX_LEN) };
                if Some(self.inbox.len()) < self.whole() {
                    return Ok(Initiated::More);
                }
                if let Some(mut noise) = self.noise.take() {
                    let proven = noise.read(self.inbox.after(VERDICT_LEN));
                    let keys = proven.then(|| noise.finish()).flatten();
                    self.keys = Some(keys.ok_or(HandshakeError::BadProof)?);
                }
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
        let mut answer = Reply::of(answer.as_bytes());
        if self.encryption == Encryption::On {
            let context = [self.hello.as_bytes(), &challenge.nonce];
            let mut noise =
                Noise::new(&self.token, true, &context).ok_or(HandshakeError::Malformed)?;
            answer.push(&noise.write().ok_or(HandshakeError::Malformed)?);
            self.noise = Some(noise);
        }
        Ok(Initiated::Send(answer))
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
        7 => Err(HandshakeError::Encryption { theirs: false }),
        8 => Err(HandshakeError::Encryption { theirs: true }),
        _ => Err(HandshakeError::Malformed),
    }
}
