//! Gossip: workers average with changing partners, without a server.
//!
//! Every worker trains a replica of its own. After its steps it asks for an *exchange*: in the
//! background, while training goes on, the worker (the *active* side) sends its weights `a` to a
//! partner. The partner (the *passive* side), whose weights are `p` when they arrive, at once moves
//! halfway towards them and replies with the way it went, `h = (a − p)/2`; the active side takes `h`
//! off whatever its weights are by then. One side gained what the other gave up, so the sum over all
//! workers is what it was, and with it the mean; only the distance between the two has shrunk. No
//! worker ever waits for another, and no lock is held while a message is on its way, so there is no
//! deadlock to avoid, however the exchanges of many workers interlock.
//!
//! **Crossing.** If two workers offer their weights to each other at the same time, both exchanges
//! together would swap the replicas instead of averaging them, and two workers in step would swap for
//! ever. Each sees the other's offer arrive while its own is under way: the offer of the lower rank
//! is carried out, the other one declined.
//!
//! **What is promised.** Replicas are eventually consistent: between steps of training their distance
//! contracts, as long as the workers that can reach each other choose each other now and then, and
//! every worker offers to every partner that answers once in a cycle. No single worker is needed: a partner that
//! cannot be reached is left alone for a while (*backoff*) and another one is chosen. So both sides of
//! a cut go on, each towards a mean of its own, and mix again once it heals. In CAP's terms this is
//! availability without consistency.
//!
//! **What a failure costs.** An exchange is carried out once or not at all on each side: it has a
//! number, a passive side takes the numbers of a partner's life only in ascending order, and an active
//! side that saw no reply within the timeout gives the number up for good. If the reply (or the active
//! side) is lost after the passive side moved, that half stays: the mean over `n` workers shifts by
//! `h/n`, at most half the distance of the two replicas over `n`, and nothing else changes; the next
//! exchanges spread it evenly. A half of a message changes nothing. Weights that are not finite are
//! never taken over, so a replica that diverged spoils no other.
//!
//! **Joining.** A worker that starts, for the first time or again, asks all others whether training is
//! under way, and takes over the weights and the clock of the one that is furthest. If none is, it
//! starts from its own initial weights.
//!
//! The logic is in `core` (partners, numbers, backoff: no I/O, no clock) and `merge` (the
//! arithmetic); [`Gossip`] adds threads and sockets.

mod active;
mod connect;
mod core;
mod error;
mod join;
mod merge;
mod node;
mod passive;
#[cfg(test)]
mod simulation;
mod stats;
mod weights;
mod wire;

pub use error::GossipError;
pub use node::{Cut, Gossip, GossipConfig, Joined};
pub use stats::{GossipStats, PartnerStats};
