//! A worker process, and what it and the coordinator say to each other.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use super::super::WorkerId;
use crate::membership::model::State;

#[derive(Clone, Debug)]
pub struct Process {
    pub id: WorkerId,
    pub is_alive: bool,
    pub is_stopped: bool,
    /// The coordinator has ordered its death.
    pub is_doomed: bool,
    /// The coordinator has yet to be told of its end.
    pub is_unreaped: bool,
    /// Whether it was stopped at any time since it was last asked whether it lives.
    pub was_hindered: bool,
    pub at: At,
    pub epoch: u64,
    pub rank: usize,
    pub state: Option<State>,
    pub is_asked: bool,
    pub to_coordinator: VecDeque<Up>,
    pub from_coordinator: VecDeque<Down>,
}

impl Process {
    pub fn is_in_group(&self) -> bool {
        self.is_alive && !matches!(self.at, At::Building | At::Waiting | At::Gone)
    }

    /// Whether it will be in a group as soon as it listens.
    pub fn is_told(&self) -> bool {
        let is_begin = |message: &Down| matches!(message, Down::Begin { .. });
        self.from_coordinator.iter().any(is_begin)
    }

    pub fn fingerprint(&self, ago: impl Fn(u64) -> u64, hasher: &mut impl Hasher) {
        let Process { id, is_alive, is_stopped, is_doomed, is_unreaped, at, state, .. } = self;
        (id, is_alive, is_stopped, is_doomed, is_unreaped, at).hash(hasher);
        if *is_alive {
            (state, self.is_asked).hash(hasher);
        }
        if self.is_in_group() {
            (ago(self.epoch), self.rank).hash(hasher);
        }
        for message in &self.to_coordinator {
            match message {
                Up::Ready { after: 0, silent } => (0, 0, silent).hash(hasher),
                Up::Ready { after, silent } => (1, ago(*after), silent).hash(hasher),
                Up::Finished { epoch } => (2, ago(*epoch)).hash(hasher),
                other => (3, other).hash(hasher),
            }
        }
        for message in &self.from_coordinator {
            match message {
                Down::Begin { epoch, members } => (4, ago(*epoch), members).hash(hasher),
                other => (5, other).hash(hasher),
            }
        }
        6.hash(hasher);
    }
}

/// Where a worker is in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum At {
    Building,
    /// Has said that it is ready.
    Waiting,
    Forming,
    /// Tells the others how many steps it has made.
    Sharing {
        is_in: bool,
    },
    /// Hands its state to others.
    Giving,
    /// Is handed the state of the donor.
    Receiving {
        has_begun: bool,
    },
    /// Loads the checkpoint, since no member has state.
    Loading,
    /// From here on a member needs nothing of what was told when the group formed.
    Bucket {
        bucket: usize,
        is_in: bool,
        /// Whether bucket 0 of this step carried a vote to regroup.
        regroup: bool,
    },
    /// Writes the checkpoint.
    Saving {
        regroup: bool,
    },
    Barrier {
        is_in: bool,
    },
    /// Writes the result.
    Handing,
    /// Has said that the run is complete.
    Over,
    Gone,
}

/// To the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Up {
    Connected,
    Ready { after: u64, silent: Vec<usize> },
    Answered,
    Stepped { epoch: u64 },
    Finished { epoch: u64 },
    Closed,
}

/// From the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Down {
    Begin { epoch: u64, members: Vec<WorkerId> },
    AskToRegroup,
    Probe,
    Finish,
}
