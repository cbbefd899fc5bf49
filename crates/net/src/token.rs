//! The secret that makes processes one job.

use std::fmt;
use std::io;
use std::str::FromStr;

use zerocopy::IntoBytes;

use crate::handshake::{Hello, JobId, Nonce, random_nonce};

/// The secret of a job. A process that holds it may join.
///
/// It is passed in environment variables as 64 hexadecimal digits and never printed otherwise:
/// its `Debug` is redacted, and there is no `Display`.
///
/// It also says whether the job *encrypts*: then everything that travels over TCP between processes that hold
/// the token is encrypted with keys that follow from it. All must agree about that.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: [u8; 32],
    encrypts: bool,
}

impl Token {
    /// A new secret from the operating system.
    pub fn random() -> io::Result<Token> {
        random_nonce().map(Token::from_bytes)
    }

    /// The token of a job that has no secret: every process that knows the job's name can derive it.
    ///
    /// It keeps jobs apart that share machines, and nothing more.
    pub fn public(job_name: &str) -> Token {
        let context = "unisono handshake v1: public token of a job name";
        Token::from_bytes(blake3::derive_key(context, job_name.as_bytes()))
    }

    /// The token made of these bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Token {
        Token { secret: bytes, encrypts: false }
    }

    /// The same token of a job that encrypts, or does not.
    pub const fn with_encryption(self, encrypts: bool) -> Token {
        Token { encrypts, ..self }
    }

    /// Whether the job encrypts.
    pub const fn encrypts(&self) -> bool {
        self.encrypts
    }

    /// The secret itself, to hand it on to a rank.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.secret
    }

    /// The secret as 64 hexadecimal digits, to hand it on in an environment variable.
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.secret).to_hex().to_string()
    }

    /// A name for the job that does not give the token away.
    pub(crate) fn job_id(&self) -> JobId {
        let key = blake3::derive_key("unisono handshake v1: job id of a token", &self.secret);
        let mut id = [0; 16];
        id.copy_from_slice(&key[..16]);
        id
    }

    /// What the keys of encrypted connections follow from, beside what is fresh for each.
    pub(crate) fn noise_key(&self) -> [u8; 32] {
        blake3::derive_key("unisono handshake v2: key of a token for Noise", &self.secret)
    }

    /// What `role` must present to prove that it holds the token.
    ///
    /// `blake3::Hash` compares in constant time.
    pub(crate) fn proof(&self, role: Role, hello: &Hello, responder: &Nonce) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(role.label());
        hasher.update(&hello.nonce);
        hasher.update(responder);
        hasher.update(hello.as_bytes());
        hasher.finalize()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(redacted)")
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Token, TokenError> {
        let hash = blake3::Hash::from_hex(text.trim()).map_err(|_| TokenError)?;
        Ok(Token::from_bytes(*hash.as_bytes()))
    }
}

/// The text is not 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a token is 64 hexadecimal digits")]
pub struct TokenError;

/// Who makes a proof. Labels have equal length, so that what is hashed has one reading.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    Initiator,
    Responder,
}

impl Role {
    fn label(self) -> &'static [u8; 32] {
        match self {
            Role::Initiator => b"unisono handshake v1: initiator\0",
            Role::Responder => b"unisono handshake v1: responder\0",
        }
    }
}
