//! Which workers are in a job whose workers may come and go: a sequence of *epochs*.
//!
//! Every epoch has a number and members, and a group of its own, whose connections and memory belong to it
//! alone: they prove a token that follows from the job's and from the number of the epoch. A coordinator, which
//! is a part of a launcher, begins one epoch after the other, as its [core](core::Membership) decides. Workers
//! are [connected](Client) to the launcher of their machine all the time, and say nothing as long as nothing
//! changes: steps are made by the members among themselves.
//!
//! ```text
//! worker ──► launcher   Look   Ready   Stepped   Alive   Finished(result)
//! launcher ──► worker   Seen   Begin(epoch)   AskToRegroup   Over(epoch)   Probe   Finish
//! ```
//!
//! What must outlast a coordinator, the present epoch, has one of two [homes](Home): the only launcher of a job
//! on one machine ([`Embedded`]), or etcd ([`machines`]).

mod agent;
mod client;
mod coordinator;
pub mod core;
mod embedded;
mod events;
pub mod machines;
#[cfg(test)]
mod model;

pub use client::{Client, MembershipError, Next, View};
pub use coordinator::{FirstStep, History, LostMember, Recovery};
pub use core::{Membership, Settings, WorkerId};
pub use embedded::Embedded;
pub use events::{Happened, Observer, Occurrence, Sign};

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use unisono_net::{Introduction, Purpose, Token};

/// Where the membership of a job lives, as the launcher of one of its machines sees it.
pub trait Home {
    /// Where the workers of this machine find it.
    fn address(&self) -> SocketAddr;

    /// What has happened so far.
    fn history(&self) -> History;

    /// When time alone changes something: see [`Home::tick`].
    fn deadline(&self) -> Option<Duration>;

    /// Something was brought.
    fn heard(&mut self, now: Duration, heard: Heard) -> Vec<Order>;

    /// The process of a worker of this machine has ended.
    fn ended(&mut self, now: Duration, worker: WorkerId) -> Vec<Order>;

    /// Time has passed, and nothing waits to be handled.
    fn tick(&mut self, now: Duration) -> Vec<Order>;

    /// The result that a worker of this machine has handed in, if the run could not be completed with it.
    fn pending_result(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// The job is to stop: tells its workers, and lets those go that wait for an epoch and are in none that might
    /// follow, now and from now on.
    fn release(&mut self, now: Duration);

    /// This machine is to leave the job, and the others go on; `None` if there are no others. Where all of them
    /// leave, [`Order::Disband`] follows.
    fn leave(&mut self, now: Duration) -> Option<Vec<Order>>;
}

/// What connections bring. The owner of a [`Home`] hands it [on](Home::heard).
pub struct Heard(Brought);

enum Brought {
    Worker(agent::FromWorker),
    Link(machines::FromLink),
    Store(machines::Answer),
}

/// What a launcher has to do.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Order {
    /// Kill the process of a worker, for this reason.
    Kill(WorkerId, Sign),
    /// The run is complete: no worker is needed any more. With the result, if a worker of this machine has
    /// handed it in.
    Finished(Option<Vec<u8>>),
    /// This machine was to leave, and there are no others that would go on: the job is to stop.
    Disband,
    /// The record of the job was deleted, and another job has begun under its name.
    Superseded,
    /// There were too few workers for too long.
    GiveUp {
        /// How many there are.
        ready: usize,
    },
    /// So many epochs in a row have ended before a step was complete: another would as well.
    NoProgress {
        /// How many.
        epochs: u32,
    },
}

/// The variable that tells a worker where the launcher of its machine listens.
pub const VARIABLE: &str = "UNISONO_MEMBERSHIP";

/// Connections of workers to their coordinator.
const MEMBERSHIP: Purpose = Purpose::new(*b"memb");

/// The largest address of a worker.
const MAX_ADDRESS: usize = 4096;

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum ToCoordinator {
    /// It wants to be in the next epoch.
    Ready {
        /// The epoch that it has left; 0 if it was in none.
        after: u64,
        /// Members of that epoch, by rank, that it lost because they were silent.
        silent: Vec<u32>,
        about: About,
    },
    /// It has been asked whether it lives.
    Alive,
    /// The first step of an epoch is complete.
    Stepped(FirstStep),
    /// The result of the run.
    Finished { epoch: u64, result: Vec<u8> },
    /// It is in no epoch yet, and asks where the members of the present one are.
    Look,
    /// It begins to compute this shard, or has computed all.
    Computing(Option<u64>),
}

/// What a worker that is ready says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct About {
    /// Where the other members of the next epoch can reach it.
    address: Vec<u8>,
    /// Its process.
    pid: u32,
    /// Into how many shards it cuts a batch, if it does: more members would have nothing to compute.
    shards: Option<u32>,
}

/// What the coordinator says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum ToWorker {
    Begin {
        epoch: u64,
        members: Vec<WorkerId>,
        addresses: Vec<Vec<u8>>,
        /// Whether members are to say which shard they compute.
        is_careful: bool,
    },
    AskToRegroup {
        epoch: u64,
    },
    /// A member has left the epoch, or is lost: whatever this worker does in it is in vain.
    Over {
        epoch: u64,
    },
    Probe,
    /// The job is to stop: all members agree to, at the end of a step.
    Stop,
    Finish,
    /// The answer to a look.
    Seen(Seen),
}

/// What a worker sees that is in no epoch, and not ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seen {
    /// Where the members of the present epoch can be reached, by rank.
    Members(Vec<Vec<u8>>),
    /// Members are on their way to the next epoch, which begins without this worker.
    Regrouping,
    /// No epoch is under way that has room for one more.
    Nothing,
}

/// How a worker introduces itself.
fn introduction(worker: WorkerId) -> Introduction {
    Introduction {
        group: u64::from(worker.life),
        ..Introduction::new(MEMBERSHIP, worker.number, 0)
    }
}

/// The worker that introduced itself so.
fn introduced(introduction: Introduction) -> Option<WorkerId> {
    let life = u32::try_from(introduction.group).ok()?;
    Some(WorkerId { number: introduction.from, life })
}

/// The token of an epoch: what comes from another epoch does not prove it.
fn epoch_token(job: &Token, epoch: u64) -> Token {
    let name = format!("unisono membership v1: epoch {epoch}");
    let secret = *blake3::keyed_hash(job.as_bytes(), name.as_bytes()).as_bytes();
    Token::from_bytes(secret).with_encryption(job.encrypts())
}
