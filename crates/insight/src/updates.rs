//! What the servers of a relaxed run write down.
//!
//! In a relaxed run there are no common steps to record: every gradient goes its own way. So each is
//! one [`UpdateRecord`], written where it met the weights. A server shard keeps one of every push it
//! received, applied or dropped; with no server, the workers keep their own.
//!
//! A loss that came out as NaN or infinite is `null` in JSON, and NaN when read back.

use serde::{Deserialize, Deserializer, Serialize};

use crate::record::number;

/// One push of one worker, as a server shard met it: one line of `updates-K.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UpdateRecord {
    /// Seconds since the run began, at the server.
    #[serde(deserialize_with = "number")]
    pub time: f64,
    /// The number of the update it went into at this shard, from 1. Pushes that were committed
    /// together share it. 0 if the push was dropped.
    pub update: u64,
    /// Who pushed.
    pub worker: u32,
    /// Which life of that worker: larger for a later start.
    pub life: u64,
    /// Its number among the pushes of that life, from 1.
    pub push: u64,
    /// Steps the worker had finished.
    pub clock: u64,
    /// How far its clock was ahead of the slowest present worker's when it read the weights.
    pub lead: u64,
    /// Updates applied between its reading of the weights and the arrival of its gradient.
    pub delay: u64,
    /// Workers present when it arrived.
    pub present: u32,
    /// The loss the gradient was computed at.
    #[serde(deserialize_with = "loss")]
    pub loss: f32,
    /// Samples the gradient was computed from.
    pub samples: u64,
    /// Seconds of computing it.
    #[serde(deserialize_with = "number")]
    pub compute: f64,
    /// Seconds the worker waited for the server: before, to be admitted, and after, to push and pull.
    #[serde(deserialize_with = "number")]
    pub blocked: f64,
    /// Bytes the worker sent and received for this push and the pull after it.
    pub bytes: u64,
}

impl UpdateRecord {
    /// How old the weights of the gradient were, in clocks: one clock is an update of every present
    /// worker.
    pub fn staleness(&self) -> f64 {
        self.delay as f64 / f64::from(self.present.max(1))
    }

    /// Whether the weights saw it.
    pub fn is_applied(&self) -> bool {
        self.update > 0
    }
}

/// A change of the bound on staleness by `ssp:auto`: one line of `moves.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// Seconds since the run began.
    #[serde(deserialize_with = "number")]
    pub time: f64,
    /// The bound before.
    pub from: u64,
    /// The bound from now on.
    pub to: u64,
    /// Why.
    pub reason: String,
}

/// A loss, or NaN where JSON has `null`.
fn loss<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
    Ok(Option::<f32>::deserialize(from)?.unwrap_or(f32::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> UpdateRecord {
        UpdateRecord {
            time: 1.5,
            update: 7,
            worker: 2,
            life: 1,
            push: 3,
            clock: 4,
            lead: 1,
            delay: 6,
            present: 4,
            loss: 0.1,
            samples: 16,
            compute: 0.25,
            blocked: 0.05,
            bytes: 4096,
        }
    }

    #[test]
    fn a_record_survives_json() {
        let text = serde_json::to_string(&record()).unwrap();
        assert_eq!(serde_json::from_str::<UpdateRecord>(&text).unwrap(), record());
        assert_eq!(record().staleness(), 1.5);
        assert!(!text.contains('\n'));
    }

    #[test]
    fn a_diverged_loss_survives_json_and_a_missing_one_is_an_error() {
        let diverged = UpdateRecord { loss: f32::INFINITY, ..record() };
        let text = serde_json::to_string(&diverged).unwrap();
        let read: UpdateRecord = serde_json::from_str(&text).unwrap();
        assert!(read.loss.is_nan());
        assert!(serde_json::from_str::<UpdateRecord>(&text.replace("loss", "lost")).is_err());
    }

    #[test]
    fn staleness_needs_no_one_present() {
        let alone = UpdateRecord { present: 0, delay: 3, ..record() };
        assert_eq!(alone.staleness(), 3.0);
    }
}
