//! Which workers are in a job whose workers may come and go: a sequence of *epochs*.
//!
//! Every epoch has a number and members, and its own group, whose connections and memory belong to it alone:
//! they prove a token that follows from the job's and the epoch's number. The [coordinator](core::Membership),
//! which is a part of the launcher, decides when an epoch begins and with which workers. It is asked only when
//! something changes: steps are made by the members among themselves.

pub mod core;

pub use core::{Membership, WorkerId};
