//! Bytes between processes that trust each other.
//!
//! Every connection of a job is made here: the [`dial`]er connects and proves the job's [`Token`] in the
//! [`handshake`], the [`acceptor`] lets in processes that have proven it, and both hand out a
//! [`Connection`], which is encrypted in a job that [wants it](Token::with_encryption). What it is for, its
//! [`Purpose`], is a tag that the crates above define; nothing here knows them. Above the bytes there is
//! one kind of [`frame`] for control messages. Processes of one host also share [`memory`], whose descriptor
//! travels over a Unix socket. Within a machine, TCP sends without a [`pace`]. [`keepalive`] notices connections that carry nothing any more, [`fork`] keeps
//! forked children from holding them open, [`descriptors`] raises their limit for a large job, and
//! [`interface`] chooses the address to listen on. What a job writes down for its next start lies in a
//! [`folder`] that outlasts a power failure. [`rank`] numbers the processes of a job. Tests can
//! [crash] processes at named points.

pub mod acceptor;
mod cipher;
mod connection;
pub mod crash;
pub mod descriptors;
pub mod dial;
pub mod folder;
pub mod fork;
pub mod frame;
pub mod handshake;
pub mod interface;
pub mod keepalive;
pub mod memory;
pub mod pace;
pub mod rank;
mod signal;
mod timed;
mod token;

pub use acceptor::{Acceptor, Admission, Limits};
pub use connection::{Connection, Receiver, Sender};
pub use dial::{Dialer, Target, new_socket};
pub use handshake::{HandshakeError, Introduction, Purpose, Refusal};
pub use signal::Signal;
pub use timed::{TimedStream, timespec};
pub use token::{Token, TokenError};
