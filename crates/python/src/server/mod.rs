//! The parameter server: the worker's side of it, and servers that live inside workers.
//!
//! Python finds the servers, and hands over the addresses of weights and gradients. What waits here
//! for a server does so on a thread of its own, so that the caller's can look for Ctrl-C.

mod client;
mod error;
mod interrupt;
mod memory;
mod optimizer;
mod replica;
mod settings;
mod shard;

pub use client::ServerClient;
pub use shard::ServerShard;
