//! The parameter server: weights that workers push gradients to, and pull from.
//!
//! The parameters are cut into pieces and spread over *shards* ([`layout`]). A shard is a [`core`],
//! which decides, and around it the [job](Job) that carries out what is decided, and a [`Shard`] of
//! threads and sockets, which stay thin. Its weights and optimizer state lie in a [`store`]; what it
//! acknowledged is in its [`journal`]. A worker talks to all shards through a [`Client`].

mod client;
pub mod core;
mod job;
pub mod journal;
pub mod layout;
pub mod link;
pub mod lives;
pub mod outbox;
mod shard;
mod silence;
pub mod store;
pub mod wire;

pub use client::{
    Client, ClientOptions, Gradient, Pushed, Run, ServerError, Stopper, Transport, glance, look,
    reports,
};
pub use job::{Files, Job, JobError};
pub use shard::{Shard, ShardError, ShardOptions, unix_target};
