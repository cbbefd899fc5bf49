//! The flags of runs whose workers may come and go.

use anyhow::{bail, ensure};
use unisono::insight::units::counted;
use unisono::sync::strategy::Compression;
use unisono::sync::{NotElastic, Settings};
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

    /// What makes the run elastic, if it is; and refuses what makes no sense then.
    pub(super) fn elastic(
        &self,
        compression: Option<Compression>,
    ) -> anyhow::Result<Option<ElasticPlan>> {
        if !self.elastic {
            return Ok(None);
        }
        let suits = match self.strategy {
            Consistency::Agreeing(strategy) => {
                Settings { strategy, compression, ..Settings::new(1) }
                    .expect_elastic()
                    .map_err(Some)
            }
            Consistency::Relaxed(_) => Err(None),
        };
        match suits {
            Ok(()) => {}
            Err(Some(NotElastic::Encoded { strategy })) => {
                bail!("--codec: leave it out with --elastic --strategy {strategy}")
            }
            Err(_) => bail!(
                "--elastic is for workers that agree in every step, or on all weights at once; leave it out, or \
                 use --strategy all-reduce, local or diloco without streams and delay instead of {}",
                self.strategy
            ),
        }
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
