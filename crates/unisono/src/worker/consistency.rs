//! The consistency levels, and what each promises.

use std::fmt;
use std::str::FromStr;

use unisono_relaxed::spec::{BadLevel, Level};
use unisono_sync::strategy::{BadStrategy, StrategySpec};

/// How the workers of a run are kept together: `--strategy` of `unisono train`.
///
/// Its text ([`fmt::Display`]) parses to the same level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Consistency {
    /// They agree in every step, or every so many: `all-reduce`, `local:H`, `diloco:H`.
    Agreeing(StrategySpec),
    /// They share weights, on servers, in memory or between partners, and wait for each other always
    /// (`bsp`), within a bound (`ssp:S`, `ssp:auto`) or never (`async`, `downpour`, `hogwild`, `gossip`).
    Relaxed(Level),
}

/// What a level promises while all goes well, and when something does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantee {
    /// When all workers compute with equal weights.
    pub equal_weights: EqualWeights,
    /// Whether the bits of the weights follow from code, data and seed alone, whatever the number of
    /// workers.
    pub reproducible: bool,
    /// By how many steps a worker may be ahead of the slowest; `None` without limit. Where that adapts,
    /// at first.
    pub lead: Option<u64>,
    /// Whether the run goes on when a worker is lost.
    pub survives_a_worker: bool,
    /// How a run that was interrupted goes on.
    pub resumes: Resumes,
}

/// When all workers compute with equal weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EqualWeights {
    /// In every step.
    Always,
    /// After some steps, and at the end.
    Periodically,
    /// At the end of the run.
    AtTheEnd,
}

/// How a run that was interrupted goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumes {
    /// From a checkpoint: [`Agreeing::save`](super::Agreeing::save).
    FromCheckpoint,
    /// From the servers, if they have a journal.
    FromServers,
    /// Not at all; but a worker that is started again takes over the weights of another.
    FromOthers,
    /// Not at all.
    Never,
}

impl Consistency {
    /// What it promises; `docs/guarantees.md` says it in full.
    pub fn guarantee(&self) -> Guarantee {
        use {EqualWeights::*, Resumes::*};
        let lead = match self {
            Consistency::Agreeing(StrategySpec::AllReduce) => Some(0),
            Consistency::Agreeing(_) => None,
            Consistency::Relaxed(level) => level.bound(),
        };
        let (equal_weights, reproducible, survives_a_worker, resumes) = match self {
            Consistency::Agreeing(StrategySpec::AllReduce) => (Always, true, false, FromCheckpoint),
            Consistency::Agreeing(_) => (Periodically, false, false, FromCheckpoint),
            Consistency::Relaxed(Level::Bsp) => (Always, true, true, FromServers),
            Consistency::Relaxed(Level::Hogwild) => (AtTheEnd, false, false, Never),
            Consistency::Relaxed(Level::Gossip) => (AtTheEnd, false, true, FromOthers),
            Consistency::Relaxed(_) => (AtTheEnd, false, true, FromServers),
        };
        Guarantee { equal_weights, reproducible, lead, survives_a_worker, resumes }
    }

    /// What a strategy of agreeing workers is; the usual one for others.
    pub fn agreeing(&self) -> StrategySpec {
        match self {
            Consistency::Agreeing(spec) => *spec,
            Consistency::Relaxed(_) => StrategySpec::AllReduce,
        }
    }

    /// The level of workers that do not agree.
    pub fn level(&self) -> Option<Level> {
        match self {
            Consistency::Agreeing(_) => None,
            Consistency::Relaxed(level) => Some(*level),
        }
    }
}

impl From<StrategySpec> for Consistency {
    fn from(spec: StrategySpec) -> Consistency {
        Consistency::Agreeing(spec)
    }
}

impl From<Level> for Consistency {
    fn from(level: Level) -> Consistency {
        Consistency::Relaxed(level)
    }
}

impl FromStr for Consistency {
    type Err = BadConsistency;

    fn from_str(text: &str) -> Result<Consistency, BadConsistency> {
        match text.split(':').next().unwrap_or_default() {
            "bsp" | "ssp" | "async" | "downpour" | "hogwild" | "gossip" => {
                Ok(Consistency::Relaxed(text.parse()?))
            }
            "all-reduce" | "local" | "diloco" => Ok(Consistency::Agreeing(text.parse()?)),
            _ => Err(BadConsistency::Unknown { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Consistency::Agreeing(spec) => spec.fmt(f),
            Consistency::Relaxed(level) => level.fmt(f),
        }
    }
}

/// A text that describes no consistency level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadConsistency {
    /// One of those that agree, with settings that make no sense.
    #[error(transparent)]
    Strategy(#[from] BadStrategy),
    /// One of those that do not, with settings that make no sense.
    #[error(transparent)]
    Level(#[from] BadLevel),
    /// There is none of that name.
    #[error(
        "{text:?} is no strategy; write all-reduce, local:H, local:H..MAX, \
         diloco:H[,streams=P][,delay=T][,rate=R][,momentum=M], {}",
        Level::USAGE
    )]
    Unknown {
        /// The text.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_parses_and_promises_something() {
        for (text, lead, reproducible) in [
            ("all-reduce", Some(0), true),
            ("local:4", None, false),
            ("diloco:8,streams=1,delay=0,rate=0.7,momentum=0.9", None, false),
            ("bsp", Some(0), true),
            ("ssp:3", Some(3), false),
            ("async", None, false),
            ("downpour:5,5", None, false),
            ("hogwild", None, false),
            ("gossip", None, false),
        ] {
            let level: Consistency = text.parse().unwrap();
            assert_eq!(level.to_string(), text);
            let guarantee = level.guarantee();
            assert_eq!((guarantee.lead, guarantee.reproducible), (lead, reproducible), "{text}");
        }
        let error = "eventual".parse::<Consistency>().unwrap_err().to_string();
        assert!(error.contains("all-reduce") && error.contains("gossip"), "{error}");
    }
}
