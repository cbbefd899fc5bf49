//! Which codec was predicted to be best, and what came of it.
//!
//! A run that chooses its codec by itself takes a few steps without one, predicts from them how long a
//! step would take with each candidate, and goes on with the best, or with none. That is an
//! [`Advice`]: `advice.json` in the run's folder. What the steps since then took is the test of the
//! prediction: [`Measured`].

use serde::{Deserialize, Serialize};

use crate::breakdown::StepBreakdown;
use crate::record::{StepRecord, number};

/// With fewer steps since the decision, one hiccup would judge the prediction.
pub const ENOUGH_STEPS: usize = 5;

/// What a step would take with one codec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The codec; "none" for steps without one.
    pub codec: String,
    /// Seconds of a step.
    #[serde(deserialize_with = "number")]
    pub seconds: f64,
    /// Seconds of a step for encoding and decoding, hidden or not.
    #[serde(deserialize_with = "number")]
    pub coding_seconds: f64,
    /// Bytes that all ranks together send in a step.
    pub wire_bytes: u64,
}

/// A decision for a codec, and what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Advice {
    /// The last step before the decision. Those after it are its result.
    pub step: u64,
    /// What was considered.
    pub rows: Vec<Prediction>,
    /// The codec of the row that was chosen; "none" if no codec would pay.
    pub chosen: String,
    /// Seconds of a step without a codec, measured up to the decision.
    #[serde(deserialize_with = "number")]
    pub measured_dense_seconds: f64,
    /// Why, in a sentence.
    pub reason: String,
    /// Steps without a codec that it rests on; 0 if that is not known.
    #[serde(default)]
    pub observed_steps: u64,
    /// Bytes that all ranks together sent to decide, besides those steps.
    #[serde(default)]
    pub deciding_bytes: u64,
    /// Seconds that deciding took.
    #[serde(default)]
    pub deciding_seconds: f64,
}

impl Advice {
    /// The prediction that was chosen, if it is among the rows.
    pub fn prediction(&self) -> Option<&Prediction> {
        self.rows.iter().find(|row| row.codec == self.chosen)
    }

    /// What came of it; none while there are too few steps to tell.
    pub fn measured(&self, steps: &[StepRecord]) -> Option<Measured> {
        // Steps in which nothing is exchanged were not what was predicted.
        let since = steps.iter().filter(|record| record.step > self.step && record.agreed);
        let mut durations: Vec<f64> =
            since.map(|record| StepBreakdown::of(record).duration()).collect();
        if durations.len() < ENOUGH_STEPS {
            return None;
        }
        durations.sort_by(f64::total_cmp);
        let seconds = durations[durations.len() / 2];
        let predicted = self.prediction().map(|row| row.seconds).filter(|s| s.is_finite());
        let error = predicted.filter(|_| seconds > 0.0).map(|predicted| predicted / seconds - 1.0);
        Some(Measured { steps: durations.len(), seconds, error })
    }
}

/// What the steps since a decision came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// How many there are.
    pub steps: usize,
    /// The median of their durations.
    pub seconds: f64,
    /// By which part of the measured step the prediction was too long; below zero it was too short.
    pub error: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RankStep;

    fn advice(chosen: &str) -> Advice {
        let row = |codec: &str, seconds| Prediction {
            codec: codec.into(),
            seconds,
            coding_seconds: 0.0,
            wire_bytes: 1,
        };
        Advice {
            step: 9,
            rows: vec![row("none", 8.0), row("int8", 3.0), row("sign", f64::NAN)],
            chosen: chosen.into(),
            measured_dense_seconds: 8.0,
            reason: String::new(),
            observed_steps: 8,
            deciding_bytes: 100,
            deciding_seconds: 0.5,
        }
    }

    /// Dense steps of 8 s up to the decision, and then as long as given.
    fn steps(after: &[f64]) -> Vec<StepRecord> {
        let step = |(number, seconds): (usize, f64)| StepRecord {
            step: number as u64,
            loss: 1.0,
            samples: 1,
            wire_bytes: 1,
            ranks: vec![RankStep {
                begin: 0.0,
                computed: 1.0,
                reduced: 2.0,
                end: seconds,
                compute: 1.0,
                backward: 0.5,
                device: None,
                buckets: Vec::new(),
            }],
            agreed: true,
            encoded: None,
        };
        [8.0; 10].into_iter().chain(after.iter().copied()).enumerate().map(step).collect()
    }

    #[test]
    fn the_median_since_the_decision_judges_the_prediction() {
        let measured = advice("int8").measured(&steps(&[4.0, 4.0, 100.0, 4.0, 4.0])).unwrap();
        assert_eq!(measured, Measured { steps: 5, seconds: 4.0, error: Some(-0.25) });
        let measured = advice("none").measured(&steps(&[4.0; 6])).unwrap();
        assert_eq!(measured.error, Some(1.0));
    }

    #[test]
    fn a_few_steps_judge_nothing_and_neither_do_those_without_an_exchange() {
        assert_eq!(advice("int8").measured(&steps(&[4.0; 4])), None);
        assert_eq!(advice("int8").measured(&[]), None);
        let mut steps = steps(&[4.0, 2.0, 4.0, 2.0, 4.0, 2.0, 4.0, 2.0, 4.0]);
        steps.iter_mut().skip(11).step_by(2).for_each(|step| step.agreed = false);
        let measured = advice("int8").measured(&steps).unwrap();
        assert_eq!((measured.steps, measured.seconds), (5, 4.0));
    }

    #[test]
    fn what_was_not_predicted_has_no_error() {
        for chosen in ["topk", "sign"] {
            let measured = advice(chosen).measured(&steps(&[4.0; 5])).unwrap();
            assert_eq!((measured.seconds, measured.error), (4.0, None));
        }
    }

    #[test]
    fn predictions_that_are_no_numbers_survive_json() {
        let json = serde_json::to_string(&advice("sign")).unwrap();
        let read: Advice = serde_json::from_str(&json).unwrap();
        assert!(read.rows[2].seconds.is_nan());
        assert_eq!(read.rows[..2], advice("sign").rows[..2]);
    }
}
