//! The flags of runs whose workers may come and go.

use anyhow::ensure;
use unisono::insight::units::counted;
use unisono::sync::strategy::StrategySpec;
use unisono::worker::Consistency;

use super::{ElasticPlan, TrainArgs};

/// How often workers are started again unless the user says how often. More would hide that something is
/// wrong; fewer end a long run on a machine that is short of memory now and then.
const RESTARTS: u32 = 100;

impl TrainArgs {
    /// Whether workers may come and go.
    pub fn is_elastic(&self) -> bool {
        self.elastic
    }

    /// Whether workers agree now and then, on all weights at once.
    fn has_rounds(&self) -> bool {
        match self.strategy {
            Consistency::Agreeing(StrategySpec::Local(_)) => true,
            Consistency::Agreeing(StrategySpec::Diloco(diloco)) => {
                diloco.streams() == 1 && diloco.delay() == 0
            }
            _ => false,
        }
    }

    /// What makes the run elastic, if it is; and refuses what makes no sense then.
    pub(super) fn elastic(&self) -> anyhow::Result<Option<ElasticPlan>> {
        if !self.elastic {
            return Ok(None);
        }
        ensure!(
            self.agrees_always() || self.has_rounds(),
            "--elastic is for workers that agree in every step, or on all weights at once; leave it out, or use \
             --strategy all-reduce, local or diloco without streams and delay instead of {}",
            self.strategy
        );
        ensure!(
            self.agrees_always() || !self.encodes(),
            "--codec: leave it out with --elastic --strategy {}",
            self.strategy
        );
        ensure!(
            !self.model.starts_with("replay:"),
            "--elastic: a replayed model has no weights to keep; leave it out"
        );
        ensure!(!self.measure_scaling, "--measure-scaling: leave it out with --elastic");
        let (least, workers) = (self.min_workers as usize, self.workers);
        ensure!(
            (1..=workers).contains(&least),
            "--min-workers {least}: use 1 to {workers}, as there are {}",
            counted(workers, "worker")
        );
        let restarts = self.restarts.unwrap_or(RESTARTS);
        Ok(Some(ElasticPlan { least: self.min_workers, restarts }))
    }
}
