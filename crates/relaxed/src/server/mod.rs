//! The parameter server: weights that workers push gradients to, and pull from.
//!
//! The parameters are cut into pieces and spread over *servers* ([`layout`]). A server is a [`core`],
//! which decides, and around it `run`, which carries out what is decided, and a [`Server`] of threads and
//! sockets, which stay thin. Its weights and optimizer state lie in a [`store`]; what it
//! acknowledged is in its [`journal`]. A worker talks to all servers through a [`Client`].

mod client;
pub mod core;
mod crew;
pub mod journal;
pub mod layout;
pub mod link;
pub mod lives;
mod mean;
pub mod outbox;
mod run;
mod serve;
mod silence;
mod source;
pub mod store;
pub mod wire;

pub use client::{
    ASK_EVERY, Client, ClientOptions, Fill, Gradient, Pushed, Run, ServerError, Stopper, Take,
    Transport, fetch_weights, has_begun, is_over, reports, reports_so_far, wait_for_worker_zero,
};
pub use run::{Files, ServeError};
pub use serve::{Server, ServerOptions, StartError, unix_target};
