//! What can go wrong, typed by what the caller can do next.

use std::time::Duration;

use crate::call::Call;
use unisono_net::rank::{Listed, Rank};

/// How a peer was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// Its connection closed or was reset: the process died or its host went down.
    Closed,
    /// It sent no heartbeat for the configured timeout: stopped, hung, or cut off.
    Silent(Duration),
    /// It left the group in an orderly way before this operation: its program ended, or dropped
    /// its group.
    Left,
    /// It left the group because of an error of its own, which this text names.
    Failed(String),
}

/// Why an operation of a group failed.
///
/// After any of these but [`Error::InvalidCall`] the group is unusable: every pending and later
/// operation fails with the same error on every rank, and the output buffers of the operations
/// that failed hold unspecified data. Inputs of out-of-place operations are never written.
///
/// A [`Rank`] in it, and the root of a call in it, are numbered as the job does, also if the group is a
/// sub-group. Only [`InvalidCall`] repeats the number that the caller used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer is gone. Start the job again, from its last checkpoint if it has one.
    #[error(
        "{}; see what rank {peer} printed, and restart the job, from its last checkpoint if it has one",
        lost_text(*.peer, .loss, .during)
    )]
    PeerLost {
        /// The lost rank.
        peer: Rank,
        /// How it was lost.
        loss: Loss,
        /// What this rank was doing.
        during: Option<Call>,
    },
    /// The epoch of this group has ended, and all its groups with it. Start the job again, or use
    /// a group of another epoch if the program made one.
    #[error("epoch {epoch} has ended, and all its groups with it; restart the job to go on")]
    EpochEnded {
        /// The epoch that ended.
        epoch: u64,
    },
    /// Ranks called different operations. Fix the program.
    #[error(
        "{}; make both ranks issue the same call in the same order",
        mismatch_text([(*.rank, .call), (*.peer, .peer_call)], .places)
    )]
    Mismatch {
        /// One rank.
        rank: Rank,
        /// What it called.
        call: Call,
        /// The other rank.
        peer: Rank,
        /// What that one called.
        peer_call: Call,
        /// From which lines of their programs, in the order of the ranks above, where their callers say
        /// so ([`crate::Request::with_place`]).
        places: Box<[Option<String>; 2]>,
    },
    /// Ranks wait for each other in calls of different groups, because they make them in different
    /// orders. All groups in which they wait have ended. Fix the program.
    #[error(
        "{}; make all ranks issue the calls of these groups in the same order",
        circle_text(.waits)
    )]
    Deadlock {
        /// Each waits for the next one, and the last for the first.
        waits: Vec<CircleWait>,
    },
    /// The lengths of a matching send and receive differ. Fix the program.
    #[error(
        "rank {from} sent {sent} bytes with tag {tag} to rank {to}, which expected {expected}; make the buffers equal"
    )]
    LengthMismatch {
        /// Sender.
        from: Rank,
        /// Receiver.
        to: Rank,
        /// The tag of both.
        tag: u32,
        /// Bytes sent.
        sent: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// The call is wrong by itself. Nothing was sent, the group stays usable. Fix the call.
    #[error("invalid call: {0}")]
    InvalidCall(InvalidCall),
    /// Another rank failed and took the group down.
    #[error("rank {peer} gave up: {reason}")]
    Aborted {
        /// Which.
        peer: Rank,
        /// What it said.
        reason: String,
    },
    /// A call of this rank took longer than it was allowed to. Find out what the ranks that have not
    /// arrived do instead. The other ranks see [`Error::Aborted`].
    #[error(
        "{} did not end within its timeout of {after:?}{}; find out what the other ranks do instead, or allow for more time",
        during.map_or_else(|| "a call".into(), |call| call.to_string()), missing_text(.missing)
    )]
    TimedOut {
        /// How long it was allowed to take.
        after: Duration,
        /// What this rank was doing.
        during: Option<Call>,
        /// The ranks that have not arrived there, as far as is known.
        missing: Vec<Rank>,
    },
    /// A rank sent what no rank of this version sends.
    #[error("rank {peer} sent {what}; run the same version of Unisono on all ranks")]
    BadMessage {
        /// Which.
        peer: Rank,
        /// What it sent.
        what: &'static str,
    },
    /// The operating system refused something that the group cannot do without.
    #[error("{what} failed: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system answered.
        reason: String,
    },
}

impl Error {
    /// Ranks called different operations; where, they have not told yet.
    pub(crate) fn mismatch(rank: Rank, call: Call, peer: Rank, peer_call: Call) -> Error {
        Error::Mismatch { rank, call, peer, peer_call, places: Box::default() }
    }

    /// Whether the call itself was right: a job that is started again may succeed with it.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::PeerLost { .. } | Error::EpochEnded { .. })
    }
}

/// One rank of those that wait for each other.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CircleWait {
    /// The rank.
    pub rank: Rank,
    /// The call in which it waits.
    #[serde(with = "crate::call::wire")]
    pub call: Call,
    /// The number of the group of that call.
    pub group: u64,
    /// Its ranks; the first few.
    pub members: Vec<Rank>,
    /// From which line of its program.
    pub place: Option<String>,
}

/// What is wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidCall {
    /// A rank that is not in the group, which numbers its own from 0.
    #[error("rank {rank} is not in a group of {world}")]
    NoSuchRank {
        /// The rank named.
        rank: usize,
        /// The size of the group.
        world: usize,
    },
    /// A send to or receive from the rank itself.
    #[error("rank {rank} cannot exchange messages with itself; copy instead")]
    ToSelf {
        /// The rank.
        rank: usize,
    },
    /// A bitwise reduction of floats.
    #[error("{reduction} is not defined for {dtype}; use an integer type")]
    UnsupportedReduction {
        /// The reduction.
        reduction: crate::Reduction,
        /// The type.
        dtype: crate::Dtype,
    },
    /// Buffers whose lengths do not fit together. Where counts add up to more than any number, the
    /// largest stands for it.
    #[error("{what} has {actual} elements, expected {expected}")]
    Length {
        /// Which buffer or list.
        what: &'static str,
        /// Its length.
        actual: usize,
        /// What it should be.
        expected: usize,
    },
    /// The forced algorithm cannot do this operation.
    #[error("algorithm {algorithm} cannot do {op} in this group; choose another or none")]
    UnsupportedAlgorithm {
        /// The algorithm that was asked for.
        algorithm: crate::schedule::Algorithm,
        /// The operation.
        op: &'static str,
    },
    /// Blocks that lie apart, but not by whole elements.
    #[error("the distance between blocks is no multiple of the size of {dtype}")]
    Distance {
        /// The type.
        dtype: crate::Dtype,
    },
    /// Memory that the group's engine does not reach.
    #[error("the group does not reach the memory of the call: {memory:?}; copy it to the host")]
    Memory {
        /// Where it is.
        memory: crate::engine::Memory,
    },
    /// A stream that records for a graph. What ranks say to each other on the host cannot be recorded.
    #[error("the stream of the call records for a graph; make the call outside of the recording")]
    Recording,
    /// Canonical bits were promised, and the group's engine would not give them.
    #[error(
        "the engine of this group would not add floats in the canonical order in {op}; set UNISONO_CANONICAL=false, or name an algorithm"
    )]
    NotCanonical {
        /// The operation.
        op: &'static str,
    },
    /// A member list with a repeated or missing rank.
    #[error("the member list of a sub-group must name each rank once and include the caller")]
    Members,
}

impl From<InvalidCall> for Error {
    fn from(e: InvalidCall) -> Error {
        Error::InvalidCall(e)
    }
}

/// Why a group could not form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// Some ranks did not arrive in time. Check that they were started and can be reached.
    #[error(
        "{} did not connect within {after:?}; check that they run and that their addresses can be reached", Listed(.missing)
    )]
    Missing {
        /// Which did not come.
        missing: Vec<Rank>,
        /// How long this rank waited.
        after: Duration,
    },
    /// A peer could not form its side of the group.
    #[error("{}; see what rank {peer} printed", unformed_text(*.peer, .reason))]
    Peer {
        /// Which.
        peer: Rank,
        /// What it said; empty if it just vanished.
        reason: String,
    },
    /// Staging memory could not be had. Lower `staging` or free memory.
    #[error(
        "cannot reserve {bytes} bytes of staging memory: {reason}; lower UNISONO_STAGING or free memory"
    )]
    Staging {
        /// How much was asked for.
        bytes: usize,
        /// What the system answered.
        reason: String,
    },
    /// Ranks were started with different settings.
    #[error(
        "rank {peer} runs with other settings than this rank (transport, algorithm, canonical, timeout, stall report, streams, segment, staging, encryption); make them equal"
    )]
    Settings {
        /// Which differs.
        peer: Rank,
    },
    /// One rank encrypts its connections and the other does not.
    #[error(
        "{}; set UNISONO_ENCRYPT for all ranks or for none",
        if *.theirs {
            format!("rank {peer} encrypts its connections and this rank does not")
        } else {
            format!("this rank encrypts its connections and rank {peer} does not")
        }
    )]
    Encryption {
        /// Which differs.
        peer: Rank,
        /// Whether it encrypts.
        theirs: bool,
    },
    /// The transport cannot join these ranks.
    #[error("transport {transport} cannot join ranks of different hosts; use auto or tcp")]
    Transport {
        /// The transport that was asked for.
        transport: crate::options::Transport,
    },
    /// A rank has no device, or the engine of device memory that was asked for does not open there. Give each rank a
    /// device, or leave the choice of the engine to the ranks.
    #[error("rank {rank} cannot take part in calls on device memory: {reason}")]
    Device {
        /// The first rank that cannot.
        rank: Rank,
        /// What it found.
        reason: String,
    },
    /// The epoch of the parent has ended.
    #[error("epoch {epoch} has ended; no group can form in it")]
    EpochEnded {
        /// The epoch that ended.
        epoch: u64,
    },
    /// The parent group failed before the sub-group was formed. What to do next is what that says.
    #[error("no group can be made of a group that has ended: {0}")]
    Parent(Box<Error>),
    /// The list of members is wrong. The parent group stays usable. Fix the call.
    #[error("invalid call: {0}")]
    InvalidCall(InvalidCall),
    /// The operating system refused something.
    #[error("{what} failed: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system answered.
        reason: String,
    },
}

impl From<Error> for FormError {
    fn from(e: Error) -> FormError {
        FormError::Parent(Box::new(e))
    }
}

impl From<InvalidCall> for FormError {
    fn from(e: InvalidCall) -> FormError {
        FormError::InvalidCall(e)
    }
}

fn lost_text(peer: Rank, loss: &Loss, during: &Option<Call>) -> String {
    let when = |word: &str| during.map(|call| format!(" {word} {call}")).unwrap_or_default();
    match loss {
        Loss::Closed => {
            format!("rank {peer} died or was cut off (its connection closed){}", when("during"))
        }
        Loss::Silent(after) => {
            let seconds = after.as_secs_f64();
            format!("rank {peer} has been silent for {seconds:.1} s{}", when("during"))
        }
        Loss::Left => {
            let when = when("before");
            format!("rank {peer} left the group{when} (its program ended, or closed the group)")
        }
        Loss::Failed(reason) => {
            format!("rank {peer} failed and left the group{}: {reason}", when("before"))
        }
    }
}

fn mismatch_text(made: [(Rank, &Call); 2], places: &[Option<String>; 2]) -> String {
    let [(_, one), (_, other)] = made;
    let hidden = (one.to_string() == other.to_string()).then(|| one.hidden_difference(other));
    let mut said = [0, 1].map(|i| {
        let (rank, call) = made[i];
        let more = hidden.as_ref().map_or("", |hidden| &hidden[i]);
        (rank, format!("rank {rank} called {call}{more}{}", place_text(&places[i])))
    });
    said.sort();
    said.map(|(_, text)| text).join("; ")
}

fn circle_text(waits: &[CircleWait]) -> String {
    let said = waits.iter().enumerate().map(|(i, wait)| {
        let CircleWait { rank, call, members, place, .. } = wait;
        let next = waits[(i + 1) % waits.len()].rank;
        let place = place_text(place);
        format!(
            "rank {rank} waits in {call} of the group of {}{place} for rank {next}",
            Listed(members)
        )
    });
    let said: Vec<String> = said.collect();
    format!("ranks wait for each other: {}", said.join("; "))
}

fn place_text(place: &Option<String>) -> String {
    place.as_ref().map(|place| format!(" at {place}")).unwrap_or_default()
}

fn unformed_text(peer: Rank, reason: &str) -> String {
    if reason.is_empty() {
        return format!("rank {peer} died or was cut off while the group formed");
    }
    format!("rank {peer} could not form the group: {reason}")
}

fn missing_text(missing: &[Rank]) -> String {
    match missing {
        [] => String::new(),
        [rank] => format!(": rank {rank} has not arrived"),
        ranks => format!(": {} have not arrived", Listed(ranks)),
    }
}
