//! Workers that do not wait for each other, or not for long.
//!
//! A [`Level`](spec::Level) says how far workers may drift apart. At most levels the weights live on
//! any number of parameter [`server`]s; workers push gradients and pull weights, and the servers hold
//! back a worker that is too far ahead. [`hogwild`] has threads of one process update shared
//! weights without a lock, and with [`gossip`] workers average with changing partners, without a
//! server.
//!
//! What became old while it was computed can be scaled, dropped or corrected ([`staleness`]), and the bound
//! on how old it may be can [adapt](adaptive_bound). A run tells its caller of every gradient
//! ([`events`]), to be recorded.

pub mod adaptive_bound;
pub mod downpour;
pub mod events;
pub mod gossip;
pub mod hogwild;
mod numbers;
pub mod server;
pub mod spec;
pub mod staleness;

pub use numbers::{Clock, Life};

/// The cause of an error, of any type.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;
