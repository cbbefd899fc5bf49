//! What a run is about. All of it follows from the seed and the level.

use unisono_relaxed::staleness::StalenessPolicy;

use crate::random::Random;

#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub level: Level,
    pub stale: StalenessPolicy,
    pub workers: u64,
    pub servers: usize,
    /// How long the faults last; 0 for a run without any.
    pub faults: u64,
    /// From one to the next, on average.
    pub fault_every: u64,
    pub network: Network,
    /// For how long a server that starts waits for all workers to come.
    pub patience: Option<u64>,
    pub sabotage: Sabotage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Lockstep,
    Ssp(u64),
    Async,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// In order, and what is lost is lost with the connection.
    Streams,
    /// Every message is lost, doubled or late by itself.
    Datagrams,
}

/// What servers or workers do wrong, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    Nothing,
    /// Reads are admitted at any clock.
    NoBound,
    /// A restarted server begins anew.
    ForgetDisk,
    /// What is acknowledged is written later.
    AcknowledgeFirst,
    /// A push that comes again is taken for a new one.
    ForgetNumbers,
    /// A worker that is gone still holds the others back.
    OverlookLeaving,
    /// Workers keep a clock for every server, instead of going on at the furthest everywhere.
    ClocksApart,
    /// Workers that come back with a push under way enter at a later clock than that of the push.
    EnterAhead,
}

impl Scenario {
    /// How long a member may be silent. All times are in ticks; a message takes 1 to 8.
    pub const TIMEOUT: u64 = 100;

    /// With faults.
    pub fn new(level: Level, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x5CE2_A210);
        Scenario {
            seed,
            level,
            stale: if random.chance(500) {
                StalenessPolicy::Keep
            } else {
                StalenessPolicy::Drop(random.below(4))
            },
            workers: random.between(2, 6),
            servers: random.between(1, 3) as usize,
            faults: random.between(100, 1000),
            fault_every: [10, 40, 120][random.below(3) as usize],
            network: if random.chance(500) { Network::Streams } else { Network::Datagrams },
            patience: random.chance(500).then_some(Self::TIMEOUT),
            sabotage: Sabotage::Nothing,
        }
    }

    /// Without faults.
    pub fn undisturbed(level: Level, seed: u64) -> Scenario {
        Scenario {
            faults: 0,
            network: Network::Streams,
            patience: Some(Self::TIMEOUT),
            ..Scenario::new(level, seed)
        }
    }

    pub fn is_lockstep(&self) -> bool {
        self.level == Level::Lockstep
    }

    /// By how many clocks a reader may be ahead.
    pub fn bound(&self) -> Option<u64> {
        match self.level {
            Level::Lockstep => Some(0),
            Level::Ssp(bound) => Some(bound),
            Level::Async => None,
        }
    }
}
