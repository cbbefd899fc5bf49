//! The accepting side of the handshake.

use zerocopy::IntoBytes;

use super::wire::{
    ACCEPTED, ANSWER_LEN, Answer, CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Inbox, MAGIC,
    PREFIX_LEN, Prefix, VERSION, VerdictMessage,
};
use super::{Encryption, Introduction, Nonce, Purpose, Refusal};
use crate::cipher::{Keys, NOISE_LEN, Noise};
use crate::token::{Role, Token};

/// One handshake, seen from the side that accepted the connection.
pub struct Responder {
    token: Token,
    purposes: &'static [Purpose],
    nonce: Nonce,
    encryption: Encryption,
    keys: Option<Keys>,
    state: State,
    inbox: Inbox<HELLO_LEN>,
}

enum State {
    AwaitHello,
    AwaitAnswer { hello: Hello, theirs: Encryption },
    Over,
}

/// What the owner of the connection does after feeding a [`Responder`].
pub enum Step {
    /// Wait for more bytes.
    More,
    /// Send these bytes, then feed what comes next.
    Send(Reply),
    /// Send the verdict; the connection is the initiator's.
    Accepted {
        /// Who is at the other end, now proven.
        introduction: Introduction,
        /// Tells the initiator so.
        verdict: Reply,
    },
    /// Send the reply, as far as that needs no waiting, and close.
    Refused {
        /// Why.
        refusal: Refusal,
        /// Tells the initiator why; empty towards a peer that does not speak the protocol.
        reply: Reply,
    },
}

/// Bytes to send, held inline.
#[derive(Debug)]
pub struct Reply {
    bytes: [u8; REPLY_LEN],
    len: usize,
}

/// The longest is an answer with a message of Noise.
const REPLY_LEN: usize = ANSWER_LEN + NOISE_LEN;

impl Responder {
    /// A responder of the job that holds `token`, which accepts connections between hosts for these
    /// purposes. The nonce must be fresh.
    pub fn new(token: &Token, purposes: &'static [Purpose], nonce: Nonce) -> Responder {
        Responder::with(token, purposes, nonce, Encryption::of(token, false))
    }

    /// As [`Responder::new`], encrypted or not as it says.
    pub fn with(
        token: &Token,
        purposes: &'static [Purpose],
        nonce: Nonce,
        encryption: Encryption,
    ) -> Responder {
        let (token, keys, state, inbox) = (token.clone(), None, State::AwaitHello, Inbox::new());
        Responder { token, purposes, nonce, encryption, keys, state, inbox }
    }

    /// The keys by which all that follows is encrypted, if it is, once the initiator was accepted.
    pub(crate) fn take_keys(&mut self) -> Option<Keys> {
        self.keys.take()
    }

    /// How many bytes the next message still lacks: read no more than this from the connection,
    /// since what follows the handshake is not for it. 0 once it is over.
    pub fn wanted(&self) -> usize {
        match self.state {
            State::AwaitHello => HELLO_LEN - self.inbox.len(),
            State::AwaitAnswer { theirs, .. } => ANSWER_LEN + theirs.noise_len() - self.inbox.len(),
            State::Over => 0,
        }
    }

    /// Takes bytes of the initiator, at most to the end of the current message; returns how many
    /// it took, and what to do now.
    pub fn feed(&mut self, bytes: &[u8]) -> (usize, Step) {
        match self.state {
            State::AwaitHello => {
                let taken = self.inbox.fill(bytes, HELLO_LEN);
                (taken, self.on_hello_bytes())
            }
            State::AwaitAnswer { hello, theirs } => {
                let whole = ANSWER_LEN + theirs.noise_len();
                let taken = self.inbox.fill(bytes, whole);
                let step = match self.inbox.message::<Answer>() {
                    Some(answer) if self.inbox.len() == whole => {
                        self.on_answer(&answer, &hello, theirs)
                    }
                    _ => Step::More,
                };
                (taken, step)
            }
            State::Over => (0, Step::More),
        }
    }

    /// Refuses as soon as the bytes so far allow it: a stranger may never send a whole hello.
    fn on_hello_bytes(&mut self) -> Step {
        let Some(prefix) = self.inbox.message::<Prefix>() else {
            let magic: Option<[u8; 8]> = self.inbox.message();
            return match magic {
                Some(magic) if magic != MAGIC => self.refuse(Refusal::NotUnisono),
                _ => Step::More,
            };
        };
        if prefix.magic != MAGIC {
            return self.refuse(Refusal::NotUnisono);
        }
        if prefix.version != VERSION {
            return self.refuse(Refusal::Version { theirs: prefix.version.get() });
        }
        let Some(hello) = self.inbox.message::<Hello>() else { return Step::More };
        if hello.job != self.token.job_id() {
            return self.refuse(Refusal::OtherJob);
        }
        let (ACCEPTED, Some(theirs)) = (prefix.status.get(), hello.encryption()) else {
            return self.refuse(Refusal::Malformed);
        };
        let purpose = hello.introduction().purpose;
        if !self.purposes.contains(&purpose) {
            return self.refuse(Refusal::OtherPurpose { theirs: purpose });
        }
        self.inbox.clear();
        self.state = State::AwaitAnswer { hello, theirs };
        let proof = self.token.proof(Role::Responder, &hello, &self.nonce);
        Step::Send(Reply::new(&Challenge {
            prefix: Prefix::new(ACCEPTED),
            nonce: self.nonce,
            proof: *proof.as_bytes(),
        }))
    }

    fn on_answer(&mut self, answer: &Answer, hello: &Hello, theirs: Encryption) -> Step {
        if self.token.proof(Role::Initiator, hello, &self.nonce) != answer.proof {
            return self.refuse(Refusal::BadProof);
        }
        if theirs != self.encryption {
            return self.refuse(Refusal::Encryption { theirs: theirs != Encryption::Off });
        }
        let mut verdict = Reply::new(&VerdictMessage { prefix: Prefix::new(ACCEPTED) });
        if self.encryption == Encryption::On {
            let Some((message, keys)) = self.agree_on_keys(hello) else {
                return self.refuse(Refusal::BadProof);
            };
            verdict.push(&message);
            self.keys = Some(keys);
        }
        self.state = State::Over;
        Step::Accepted { introduction: hello.introduction(), verdict }
    }

    /// Answers the message of Noise that came with the answer.
    fn agree_on_keys(&self, hello: &Hello) -> Option<([u8; NOISE_LEN], Keys)> {
        let mut noise = Noise::new(&self.token, false, &[hello.as_bytes(), &self.nonce])?;
        noise.read(self.inbox.after(ANSWER_LEN)).then_some(())?;
        Some((noise.write()?, noise.finish()?))
    }

    /// A refusal is a bare prefix: of a challenge and of a verdict alike, the initiator reads no
    /// further once the status refuses.
    fn refuse(&mut self, refusal: Refusal) -> Step {
        self.state = State::Over;
        let reply = match refusal {
            Refusal::NotUnisono => Reply::empty(),
            _ => Reply::new(&Prefix::new(refusal.code())),
        };
        Step::Refused { refusal, reply }
    }
}

impl Reply {
    fn new(message: &(impl IntoBytes + zerocopy::Immutable)) -> Reply {
        Reply::of(message.as_bytes())
    }

    pub(super) fn of(bytes: &[u8]) -> Reply {
        let mut reply = Reply::empty();
        reply.push(bytes);
        reply
    }

    fn empty() -> Reply {
        Reply { bytes: [0; REPLY_LEN], len: 0 }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
}

impl std::ops::Deref for Reply {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_ref()
    }
}

impl AsRef<[u8]> for Reply {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

const _: () = assert!(PREFIX_LEN <= CHALLENGE_LEN && CHALLENGE_LEN <= REPLY_LEN);
const _: () = assert!(REPLY_LEN <= HELLO_LEN && PREFIX_LEN + NOISE_LEN <= CHALLENGE_LEN);
