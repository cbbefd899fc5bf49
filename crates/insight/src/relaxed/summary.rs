//! A relaxed run in one object.

use serde::{Deserialize, Serialize};

use super::{LevelAdvice, RelaxedRun, WorkerStats};
use crate::record::{Outcome, number};

/// The run in one JSON object: `summary.json`, and what `--json` prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelaxedSummary {
    /// The level, such as `ssp:3`.
    pub strategy: String,
    /// What was done with stale gradients.
    pub stale: String,
    /// Number of workers.
    pub workers: usize,
    /// Number of servers; 0 where there are none.
    pub servers: usize,
    /// See [`RelaxedRun::updates`].
    pub updates: u64,
    /// See [`RelaxedRun::pushes`].
    pub pushes: u64,
    /// See [`RelaxedRun::dropped`].
    pub dropped: u64,
    /// See [`RelaxedRun::updates_per_s`].
    pub updates_per_s: f64,
    /// See [`RelaxedRun::pushes_per_s`].
    pub pushes_per_s: f64,
    /// See [`RelaxedRun::samples_per_s`].
    pub samples_per_s: f64,
    /// See [`RelaxedRun::blocked_share`].
    pub blocked_share: f64,
    /// See [`RelaxedRun::staleness`]: `[clocks, pushes]`.
    pub staleness: Vec<(u64, u64)>,
    /// In clocks; none where the records do not say.
    pub mean_staleness: Option<f64>,
    /// See [`RelaxedRun::max_lead`].
    pub max_lead: u64,
    /// See [`RelaxedRun::bound`].
    pub bound: Option<u64>,
    /// Times that a worker was started again.
    pub restarts: u64,
    /// Worker by worker.
    pub by_worker: Vec<WorkerStats>,
    /// See [`RelaxedRun::final_loss`].
    #[serde(deserialize_with = "number")]
    pub final_loss: f64,
    /// See [`Outcome::accuracy`].
    pub accuracy: Option<f64>,
    /// See [`Outcome::held_out_loss`].
    pub held_out_loss: Option<f64>,
    /// See [`Outcome::weights_hash`].
    pub weights_hash: String,
    /// See [`RelaxedRun::seconds`].
    pub seconds: f64,
    /// Whether every push is accounted for exactly once; if not, the first that is not. `not recorded`
    /// where no push is known, because servers elsewhere kept no records here.
    pub ledger: String,
    /// The level that would suit these workers; absent where there is too little to tell.
    pub advised: Option<String>,
    /// The advice in words.
    pub advice: Option<String>,
    /// How often two workers averaged; only where they do so by themselves.
    pub exchanges: Option<u64>,
}

impl RelaxedSummary {
    /// Sums up a run.
    pub fn new(run: &RelaxedRun, outcome: Outcome, exchanges: Option<u64>) -> RelaxedSummary {
        let advice: Option<LevelAdvice> = run.advice();
        RelaxedSummary {
            strategy: run.info.strategy.clone(),
            stale: run.stale().to_owned(),
            workers: run.info.workers,
            servers: run.servers(),
            updates: run.updates,
            pushes: run.pushes,
            dropped: run.dropped,
            updates_per_s: run.updates_per_s,
            pushes_per_s: run.pushes_per_s,
            samples_per_s: run.samples_per_s,
            blocked_share: run.blocked_share,
            staleness: run.staleness.clone(),
            mean_staleness: run.mean_staleness,
            max_lead: run.max_lead,
            bound: run.bound(),
            restarts: run.restarts(),
            by_worker: run.workers.clone(),
            final_loss: run.final_loss(),
            accuracy: outcome.accuracy,
            held_out_loss: outcome.held_out_loss,
            weights_hash: outcome.weights_hash,
            seconds: run.seconds,
            ledger: match run.ledger() {
                _ if run.pushes == 0 => NOT_RECORDED.to_owned(),
                Ok(_) => BALANCED.to_owned(),
                Err(error) => error.to_string(),
            },
            advised: advice.as_ref().map(|advice| advice.level.clone()),
            advice: advice.map(|advice| advice.text),
            exchanges,
        }
    }

    /// Whether every push is accounted for exactly once.
    pub fn is_balanced(&self) -> bool {
        self.ledger == BALANCED
    }

    /// Whether the run's pushes are known.
    pub fn is_recorded(&self) -> bool {
        self.ledger != NOT_RECORDED
    }
}

/// What the ledger says when nothing is wrong.
const BALANCED: &str = "balanced";

/// What it says when there is none.
const NOT_RECORDED: &str = "not recorded";
