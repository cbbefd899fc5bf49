//! The flags of runs whose workers do not wait for each other.

use anyhow::ensure;
use unisono::relaxed::spec::Level;
use unisono::relaxed::staleness::StalenessPolicy;
use unisono::sync::strategy::StrategySpec;

use super::{RelaxedPlan, ServersChoice, TrainArgs};
use unisono::worker::Consistency;

/// How often processes of a relaxed run are started again unless the user says how often. More would hide
/// that something is wrong; fewer give up after one bad day of a machine.
const RESTARTS: u32 = 3;

impl TrainArgs {
    /// The level of a run whose workers do not agree.
    pub fn level(&self) -> Option<Level> {
        self.strategy.level()
    }

    /// Whether workers agree on the gradient of every step.
    pub(super) fn agrees_always(&self) -> bool {
        self.strategy == Consistency::Agreeing(StrategySpec::AllReduce)
    }

    /// What makes the run relaxed, if it is; and refuses what makes no sense then, or only then.
    pub(super) fn relaxed(&self) -> anyhow::Result<Option<RelaxedPlan>> {
        let Some(level) = self.strategy.level() else {
            self.refuse_relaxed(&["servers", "stale", "journal"])?;
            ensure!(
                self.elastic || self.restarts.is_none() || !self.agrees_always(),
                "--restarts means nothing to --strategy {} without --elastic; add that, leave it out, or use a \
                 strategy with servers, such as ssp:3",
                self.strategy
            );
            if !self.elastic {
                self.refuse_relaxed(&["restarts"])?;
            }
            return Ok(None);
        };
        ensure!(
            !self.model.starts_with("replay:"),
            "--strategy {level} moves weights, and a replayed model has none; use --strategy \
             all-reduce"
        );
        ensure!(
            self.checkpoint_dir.is_none(),
            "--checkpoint-dir: with --strategy {level} the servers write a journal instead; give \
             --journal DIR to keep it"
        );
        ensure!(
            !self.measure_scaling,
            "--measure-scaling compares runs that agree in every step; leave it out"
        );
        ensure!(
            self.codec_relative.is_none(),
            "--codec-relative is for gradients that are averaged; with --strategy {level} leave it out"
        );
        match level {
            Level::Hogwild => {
                self.refuse_relaxed(&["servers", "stale", "journal", "codec", "restarts"])?;
            }
            Level::Gossip => {
                self.refuse_relaxed(&["servers", "stale", "journal", "codec"])?;
            }
            _ => {}
        }
        ensure!(
            level != Level::Bsp || self.stale == StalenessPolicy::Keep,
            "--stale {}: with --strategy bsp no gradient is stale; leave it out",
            self.stale
        );
        let servers = self.servers.clone().unwrap_or(ServersChoice::Started(1));
        ensure!(
            self.journal.is_none() || !matches!(servers, ServersChoice::At(_)),
            "--journal: servers that run already write their own; give it to `unisono serve` instead"
        );
        Ok(Some(RelaxedPlan {
            level,
            stale: self.stale,
            servers,
            journal: self.journal.clone(),
            restarts: self.restarts.unwrap_or(RESTARTS),
        }))
    }

    /// Refuses those of the flags of relaxed runs that were given, for the strategy has no use for them.
    pub(super) fn refuse_relaxed(&self, unused: &[&str]) -> anyhow::Result<()> {
        let given = [
            ("servers", self.servers.is_some()),
            ("stale", self.stale != StalenessPolicy::Keep),
            ("journal", self.journal.is_some()),
            ("restarts", self.restarts.is_some()),
            ("codec", self.encodes()),
        ];
        for (flag, given) in given {
            ensure!(
                !(given && unused.contains(&flag)),
                "--{flag} means nothing to --strategy {}; leave it out, or use a strategy with \
                 servers, such as ssp:3",
                self.strategy
            );
        }
        Ok(())
    }
}
