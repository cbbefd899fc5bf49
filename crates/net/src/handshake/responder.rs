//! The accepting side of the handshake.

use zerocopy::IntoBytes;

use super::wire::{
    ACCEPTED, ANSWER_LEN, Answer, CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Inbox, MAGIC,
    PREFIX_LEN, Prefix, VERSION, Verdict,
};
use super::{Introduction, Nonce, Purpose, Refusal};
use crate::token::{Role, Token};

/// One handshake, seen from the side that accepted the connection.
pub struct Responder {
    token: Token,
    purposes: &'static [Purpose],
    nonce: Nonce,
    state: State,
    inbox: Inbox<HELLO_LEN>,
}

enum State {
    AwaitHello,
    AwaitAnswer { hello: Hello, introduction: Introduction },
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
        /// Tells the initiator why; empty towards whoever does not speak the protocol.
        reply: Reply,
    },
}

/// Bytes to send, held inline.
pub struct Reply {
    bytes: [u8; CHALLENGE_LEN],
    len: usize,
}

impl Responder {
    /// A responder of the job that holds `token`, who accepts connections for these purposes. The
    /// nonce must be fresh.
    pub fn new(token: &Token, purposes: &'static [Purpose], nonce: Nonce) -> Responder {
        let (state, inbox) = (State::AwaitHello, Inbox::new());
        Responder { token: token.clone(), purposes, nonce, state, inbox }
    }

    /// How many bytes the next message still lacks: read no more than this from the connection,
    /// since what follows the handshake belongs to somebody else. 0 once it is over.
    pub fn wanted(&self) -> usize {
        match self.state {
            State::AwaitHello => HELLO_LEN - self.inbox.len(),
            State::AwaitAnswer { .. } => ANSWER_LEN - self.inbox.len(),
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
            State::AwaitAnswer { hello, introduction } => {
                let taken = self.inbox.fill(bytes, ANSWER_LEN);
                let step = match self.inbox.message::<Answer>() {
                    Some(answer) => self.on_answer(&answer, &hello, introduction),
                    None => Step::More,
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
        if prefix.status != ACCEPTED {
            return self.refuse(Refusal::Malformed);
        }
        let introduction = hello.introduction();
        if !self.purposes.contains(&introduction.purpose) {
            return self.refuse(Refusal::OtherPurpose { theirs: introduction.purpose });
        }
        self.inbox.clear();
        self.state = State::AwaitAnswer { hello, introduction };
        let proof = self.token.proof(Role::Responder, &hello, &self.nonce);
        Step::Send(Reply::new(&Challenge {
            prefix: Prefix::new(ACCEPTED),
            nonce: self.nonce,
            proof: *proof.as_bytes(),
        }))
    }

    fn on_answer(&mut self, answer: &Answer, hello: &Hello, introduction: Introduction) -> Step {
        if self.token.proof(Role::Initiator, hello, &self.nonce) != answer.proof {
            return self.refuse(Refusal::BadProof);
        }
        self.state = State::Over;
        let verdict = Reply::new(&Verdict { prefix: Prefix::new(ACCEPTED) });
        Step::Accepted { introduction, verdict }
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
        let mut reply = Reply::empty();
        let bytes = message.as_bytes();
        reply.bytes[..bytes.len()].copy_from_slice(bytes);
        reply.len = bytes.len();
        reply
    }

    fn empty() -> Reply {
        Reply { bytes: [0; CHALLENGE_LEN], len: 0 }
    }
}

impl AsRef<[u8]> for Reply {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

const _: () = assert!(PREFIX_LEN <= CHALLENGE_LEN && ANSWER_LEN <= HELLO_LEN);
