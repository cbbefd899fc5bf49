//! Workers that do not wait for each other, or not for long.
//!
//! A [`Level`](spec::Level) says how far workers may drift apart. At most levels the weights live on a
//! parameter [`server`], split over any number of shards; workers push gradients and pull weights, and
//! the server holds back whoever is too far ahead. [`hogwild`] has threads of one process update shared
//! weights without a lock, and with [`gossip`] workers average with changing partners, without a
//! server.
//!
//! What became old while it was computed can be scaled, dropped or corrected ([`stale`]), and the bound
//! on how old it may be can [adapt](bound). A run tells of every gradient ([`events`]), for others to
//! record.

pub mod bound;
pub mod downpour;
pub mod events;
pub mod gossip;
pub mod hogwild;
pub mod server;
pub mod spec;
pub mod stale;

/// What is behind an error, of any kind.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;
