//! The description of a consistency level, as on the command line.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::bound::Limits;

/// How far the workers of a run may drift apart.
///
/// Its text ([`fmt::Display`]) parses to the same level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Level {
    /// `bsp`: not at all. Every update is the mean of one gradient of every worker.
    Bsp,
    /// `ssp:S`: whoever is more than so many clocks ahead of the slowest waits.
    Ssp(u64),
    /// `ssp:auto`: as `ssp`, with a bound that adapts.
    SspAuto,
    /// `async`: without limit.
    Async,
    /// `downpour:PUSH,FETCH`: replicas that step by themselves, push what they have gathered every so
    /// many steps, and fetch the weights every so many.
    Downpour {
        /// Steps from one push to the next.
        push: u32,
        /// Steps from one fetch to the next.
        fetch: u32,
    },
    /// `hogwild`: threads of one process that update shared weights without a lock.
    Hogwild,
    /// `gossip`: replicas that average with changing partners, without a server.
    Gossip,
}

impl Level {
    /// The levels, as they are written.
    pub const USAGE: &str = "bsp, ssp:S, ssp:auto, async, downpour:PUSH,FETCH, hogwild or gossip";

    /// Fails if a setting is out of its range. One that was parsed is not; one that came from another
    /// process may be.
    pub fn check(&self) -> Result<(), BadLevel> {
        let flaw = match self {
            Level::Ssp(bound) if *bound > MOST => BAD_BOUND,
            Level::Downpour { push: 0, .. } | Level::Downpour { fetch: 0, .. } => BAD_PERIODS,
            _ => return Ok(()),
        };
        Err(BadLevel { text: self.to_string(), flaw })
    }

    /// Whether the weights live on servers.
    pub fn has_servers(&self) -> bool {
        !matches!(self, Level::Hogwild | Level::Gossip)
    }

    /// Whether every update is one of all workers.
    pub fn is_lockstep(&self) -> bool {
        matches!(self, Level::Bsp)
    }

    /// By how many clocks a worker may be ahead of the slowest when it reads; at first, if that adapts.
    pub fn bound(&self) -> Option<u64> {
        match self {
            Level::Bsp => Some(0),
            Level::Ssp(bound) => Some(*bound),
            Level::SspAuto => Some(Limits::default().least),
            Level::Async | Level::Downpour { .. } | Level::Hogwild | Level::Gossip => None,
        }
    }
}

impl FromStr for Level {
    type Err = BadLevel;

    fn from_str(text: &str) -> Result<Level, BadLevel> {
        let bad = |flaw| BadLevel { text: text.to_owned(), flaw };
        let level = match name_and_rest(text) {
            ("bsp", None) => Level::Bsp,
            ("async", None) => Level::Async,
            ("hogwild", None) => Level::Hogwild,
            ("gossip", None) => Level::Gossip,
            ("ssp", Some("auto")) => Level::SspAuto,
            ("ssp", Some(bound)) => Level::Ssp(bound.parse().map_err(|_| bad(BAD_BOUND))?),
            ("ssp", None) => return Err(bad("the bound S is missing")),
            ("downpour", Some(periods)) => {
                let (push, fetch) = periods.split_once(',').ok_or_else(|| bad(BAD_PERIODS))?;
                let steps = |text: &str| text.parse().map_err(|_| bad(BAD_PERIODS));
                Level::Downpour { push: steps(push)?, fetch: steps(fetch)? }
            }
            ("downpour", None) => return Err(bad("the periods are missing")),
            ("bsp" | "async" | "hogwild" | "gossip", Some(_)) => {
                return Err(bad("it has no settings"));
            }
            _ => return Err(bad("there is none of that name")),
        };
        level.check().map(|()| level)
    }
}

const BAD_BOUND: &str = "S is a number of clocks, from 0 to 1000000, or auto";
const BAD_PERIODS: &str = "give two numbers of steps, from 1";

/// The largest bound: as good as none.
const MOST: u64 = 1_000_000;

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Level::Bsp => f.write_str("bsp"),
            Level::Ssp(bound) => write!(f, "ssp:{bound}"),
            Level::SspAuto => f.write_str("ssp:auto"),
            Level::Async => f.write_str("async"),
            Level::Downpour { push, fetch } => write!(f, "downpour:{push},{fetch}"),
            Level::Hogwild => f.write_str("hogwild"),
            Level::Gossip => f.write_str("gossip"),
        }
    }
}

/// A text that describes no level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no consistency level: {flaw}; write {}, such as ssp:3", Level::USAGE)]
pub struct BadLevel {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub flaw: &'static str,
}

/// Splits `name:rest`.
pub(crate) fn name_and_rest(text: &str) -> (&str, Option<&str>) {
    match text.split_once(':') {
        Some((name, rest)) => (name, Some(rest)),
        None => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_parse_to_themselves() {
        for text in
            ["bsp", "ssp:0", "ssp:3", "ssp:auto", "async", "downpour:2,5", "hogwild", "gossip"]
        {
            assert_eq!(text.parse::<Level>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, flaw) in [
            ("ssp", "missing"),
            ("ssp:-1", "number of clocks"),
            ("ssp:x", "number of clocks"),
            ("bsp:1", "no settings"),
            ("downpour", "missing"),
            ("downpour:1", "two numbers"),
            ("downpour:0,1", "two numbers"),
            ("eventual", "none of that name"),
        ] {
            let error = text.parse::<Level>().unwrap_err().to_string();
            assert!(error.contains(flaw) && error.contains("downpour:PUSH,FETCH"), "{error}");
        }
    }
}
