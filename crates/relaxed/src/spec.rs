//! The description of a consistency level, as on the command line.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use unisono_optimizer::{LearningRate, OptimizerSpec};

use crate::adaptive_bound::Limits;
use crate::downpour::Periods;

/// How far the workers of a run may drift apart.
///
/// Its text ([`fmt::Display`]) parses to the same level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Level {
    /// `bsp`: not at all. Every update is the mean of one gradient of every worker.
    Bsp,
    /// `ssp:S`: a worker that is more than so many clocks ahead of the slowest waits.
    Ssp(u64),
    /// `ssp:auto`: as `ssp`, with a bound that adapts.
    SspAuto,
    /// `async`: without limit.
    Async,
    /// `downpour`, `downpour:PUSH,FETCH`: replicas that step by themselves, push what they have gathered
    /// every so many steps, and fetch the weights every so many.
    Downpour(Periods),
    /// `hogwild`: threads of one process that update shared weights without a lock.
    Hogwild,
    /// `gossip`: replicas that average with changing partners, without a server.
    Gossip,
}

impl Level {
    /// The levels, as they are written.
    pub const USAGE: &str = "bsp, ssp:S, ssp:auto, async, downpour[:PUSH,FETCH], hogwild or gossip";

    /// Fails if a setting is out of its range. One that was parsed is not; one that came from another
    /// process may be.
    pub fn check(&self) -> Result<(), BadLevel> {
        let flaw = match self {
            Level::Ssp(bound) if *bound > MOST => BAD_BOUND,
            Level::Downpour(periods) if periods.push == 0 || periods.fetch == 0 => BAD_PERIODS,
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
            Level::Async | Level::Downpour(_) | Level::Hogwild | Level::Gossip => None,
        }
    }

    /// After how many updates of the weights so many steps of every worker are in them. A push is an
    /// update; in lock-step, a round of all workers is; where replicas average, each counts its own.
    pub fn updates(&self, steps: u64, workers: u32) -> u64 {
        let all = steps.saturating_mul(u64::from(workers));
        match self {
            Level::Bsp | Level::Gossip => steps,
            Level::Downpour(Periods { push, .. }) => all.div_ceil(u64::from(*push)),
            Level::Ssp(_) | Level::SspAuto | Level::Async | Level::Hogwild => all,
        }
    }

    /// The optimizer of the weights that workers share, from what a caller wrote for a step of all
    /// workers. Where every worker's gradient is an update by itself, there are as many more of them,
    /// each as much shorter: so a learning rate means the same at every level.
    pub fn optimizer(&self, spec: &OptimizerSpec, workers: u32) -> OptimizerSpec {
        let share = match self {
            Level::Ssp(_) | Level::SspAuto | Level::Async | Level::Hogwild => f64::from(workers),
            _ => 1.0,
        };
        spec.with_learning_rate(match spec.learning_rate() {
            LearningRate::Constant(rate) => LearningRate::Constant(rate / share),
            LearningRate::Cosine { peak, floor, warm_up, steps } => LearningRate::Cosine {
                peak: peak / share,
                floor: floor / share,
                warm_up: self.updates(warm_up, workers),
                steps: self.updates(steps, workers),
            },
        })
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
                Level::Downpour(Periods { push: steps(push)?, fetch: steps(fetch)? })
            }
            ("downpour", None) => Level::Downpour(Periods::default()),
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
            Level::Downpour(Periods { push, fetch }) => write!(f, "downpour:{push},{fetch}"),
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
    fn downpour_has_periods_if_none_are_given() {
        assert_eq!("downpour".parse::<Level>().unwrap().to_string(), "downpour:5,5");
    }

    #[test]
    fn a_learning_rate_means_the_same_at_every_level() {
        let rate = LearningRate::Cosine { peak: 0.8, floor: 0.4, warm_up: 10, steps: 101 };
        let spec = OptimizerSpec::Sgd { learning_rate: rate, weight_decay: 0.0 };
        for (level, peak, floor, warm_up, steps) in [
            ("bsp", 0.8, 0.4, 10, 101),
            ("gossip", 0.8, 0.4, 10, 101),
            ("ssp:3", 0.2, 0.1, 40, 404),
            ("hogwild", 0.2, 0.1, 40, 404),
            ("downpour:5,1", 0.8, 0.4, 8, 81),
        ] {
            let level: Level = level.parse().unwrap();
            let expected = LearningRate::Cosine { peak, floor, warm_up, steps };
            assert_eq!(level.optimizer(&spec, 4).learning_rate(), expected, "{level}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, flaw) in [
            ("ssp", "missing"),
            ("ssp:-1", "number of clocks"),
            ("ssp:x", "number of clocks"),
            ("bsp:1", "no settings"),
            ("downpour:1", "two numbers"),
            ("downpour:0,1", "two numbers"),
            ("eventual", "none of that name"),
        ] {
            let error = text.parse::<Level>().unwrap_err().to_string();
            assert!(error.contains(flaw) && error.contains("downpour[:PUSH,FETCH]"), "{error}");
        }
    }
}
