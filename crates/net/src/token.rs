//! The secret that makes processes one job.

use std::fmt;
use std::io;
use std::str::FromStr;

use zerocopy::IntoBytes;

use crate::handshake::{Hello, JobId, Nonce, random_nonce};

/// The secret of a job. Whoever holds it may join.
///
/// It is passed in environment variables as 64 hexadecimal digits and never printed otherwise:
/// its `Debug` is redacted, and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; 32]);

impl Token {
    /// A new secret from the operating system.
    pub fn random() -> io::Result<Token> {
        random_nonce().map(Token)
    }

    /// The token of a job that has no secret: anyone who knows the job's name can derive it.
    ///
    /// It keeps jobs apart that share machines, and nothing more.
    pub fn public(job_name: &str) -> Token {
        Token(blake3::derive_key(
            "unisono handshake v1: public token of a job name",
            job_name.as_bytes(),
        ))
    }

    /// The token made of these bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Token {
        Token(bytes)
    }

    /// The secret itself, to hand it on to a rank.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The secret as 64 hexadecimal digits, to hand it on in an environment variable.
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// A name for the job that does not give the token away.
    pub(crate) fn job_id(&self) -> JobId {
        let key = blake3::derive_key("unisono handshake v1: job id of a token", &self.0);
        let mut id = [0; 16];
        id.copy_from_slice(&key[..16]);
        id
    }

    /// What `role` must present to prove that it holds the token.
    ///
    /// `blake3::Hash` compares in constant time.
    pub(crate) fn proof(&self, role: Role, hello: &Hello, responder: &Nonce) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
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
        Ok(Token(*hash.as_bytes()))
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
