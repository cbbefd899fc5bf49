//! `--strategy`: whether workers agree, and when.

use std::fmt;
use std::str::FromStr;

use unisono::relaxed::spec::Level;
use unisono::sync::strategy::StrategySpec;

/// How the workers of a run are kept together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strategy {
    /// They agree in every step, or every so many.
    Agreeing(StrategySpec),
    /// They do not wait for each other, or not for long.
    Relaxed(Level),
}

impl Strategy {
    /// What a strategy of agreeing workers is; the usual one for others.
    pub fn agreeing(&self) -> StrategySpec {
        match self {
            Strategy::Agreeing(spec) => *spec,
            Strategy::Relaxed(_) => StrategySpec::AllReduce,
        }
    }

    /// The level of workers that do not agree.
    pub fn level(&self) -> Option<Level> {
        match self {
            Strategy::Agreeing(_) => None,
            Strategy::Relaxed(level) => Some(*level),
        }
    }
}

impl FromStr for Strategy {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Strategy> {
        let name = text.split(':').next().unwrap_or_default();
        let known = ["bsp", "ssp", "async", "downpour", "hogwild", "gossip"];
        if known.contains(&name) {
            return Ok(Strategy::Relaxed(text.parse()?));
        }
        if ["all-reduce", "local", "diloco"].contains(&name) {
            return Ok(Strategy::Agreeing(text.parse()?));
        }
        anyhow::bail!(
            "{text:?} is no strategy; write all-reduce, local:H, local:H..MAX, \
             diloco:H[,streams=P][,delay=T][,rate=R][,momentum=M], {}",
            Level::USAGE
        )
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strategy::Agreeing(spec) => spec.fmt(f),
            Strategy::Relaxed(level) => level.fmt(f),
        }
    }
}
