//! The learning rate as a function of the step. *Constant* is what it says. *Cosine* rises
//! linearly from nothing to its peak during the *warm-up*, while an optimizer's state has seen too
//! few gradients to be trusted with long steps, and then falls along half a cosine wave to its
//! floor, which it reaches in the last step and keeps from then on.
//!
//! The cosine is a series of our own. That of the system's mathematics library may differ in its
//! last bit between machines, and one bit of the learning rate is enough to part two replicas.

use std::f64::consts::PI;
use std::fmt;

/// A learning rate that may change over the run.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum LearningRate {
    /// The same in every step.
    Constant(f64),
    /// A linear warm-up, then half a cosine wave down to a floor.
    Cosine {
        /// The rate at the end of the warm-up.
        peak: f64,
        /// The rate of the last step and beyond.
        floor: f64,
        /// How many steps the warm-up takes; may be 0.
        warm_up: u64,
        /// The last step of the run.
        steps: u64,
    },
}

impl LearningRate {
    /// The rate of a step; steps count from 1.
    pub fn at(&self, step: u64) -> f64 {
        match *self {
            LearningRate::Constant(rate) => rate,
            LearningRate::Cosine { peak, warm_up, .. } if step < warm_up => {
                peak * (step as f64 / warm_up as f64)
            }
            LearningRate::Cosine { floor, steps, .. } if step >= steps => floor,
            LearningRate::Cosine { peak, floor, warm_up, steps } => {
                let progress = (step - warm_up) as f64 / (steps - warm_up) as f64;
                floor + (peak - floor) * (0.5 + 0.5 * cos_pi(progress))
            }
        }
    }

    /// The largest rate of the run.
    pub fn peak(&self) -> f64 {
        match *self {
            LearningRate::Constant(rate) => rate,
            LearningRate::Cosine { peak, .. } => peak,
        }
    }

    /// Why this makes no sense, if it does not.
    pub(crate) fn flaw(&self) -> Option<&'static str> {
        let usable = |rate: f64| rate.is_finite() && rate >= 0.0;
        match *self {
            LearningRate::Constant(rate) if !usable(rate) => {
                Some("the learning rate must be a number of at least 0")
            }
            LearningRate::Cosine { peak, floor, .. }
                if !usable(peak) || !(0.0..=peak).contains(&floor) =>
            {
                Some("the learning rate and its floor must be numbers with 0 ≤ floor ≤ rate")
            }
            LearningRate::Cosine { warm_up, steps, .. } if warm_up > steps => {
                Some("the warm-up of the learning rate must not be longer than the run")
            }
            _ => None,
        }
    }
}

impl fmt::Display for LearningRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LearningRate::Constant(rate) => write!(f, "{rate}"),
            LearningRate::Cosine { peak, floor, warm_up, steps } => {
                write!(f, "cosine({peak} to {floor}, warm-up {warm_up} of {steps} steps)")
            }
        }
    }
}

/// The cosine of `π · turns`, for `0 ≤ turns ≤ 1`.
fn cos_pi(turns: f64) -> f64 {
    // The second quarter mirrors the first, on which eleven terms of the Taylor series leave an
    // error below (π/2)²² / 22! < 2e-17.
    const TERMS: u32 = 11;
    let (quarter, sign) = if turns <= 0.5 { (turns, 1.0) } else { (1.0 - turns, -1.0) };
    let square = (PI * quarter) * (PI * quarter);
    // Horner: 1 − x²/(1·2) · (1 − x²/(3·4) · (1 − …))
    let mut series = 1.0;
    for term in (1..TERMS).rev() {
        series = 1.0 - square / f64::from((2 * term - 1) * (2 * term)) * series;
    }
    sign * series
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSINE: LearningRate =
        LearningRate::Cosine { peak: 0.5, floor: 0.1, warm_up: 10, steps: 50 };

    #[test]
    fn a_constant_rate_is_constant() {
        for step in [1, 2, 1_000_000, u64::MAX] {
            assert_eq!(LearningRate::Constant(0.3).at(step), 0.3);
        }
    }

    #[test]
    fn the_cosine_goes_through_its_landmarks() {
        assert_eq!(COSINE.at(1), 0.05);
        assert_eq!(COSINE.at(5), 0.25);
        assert_eq!(COSINE.at(10), 0.5);
        assert!((COSINE.at(30) - 0.3).abs() < 1e-15);
        for step in [50, 51, u64::MAX] {
            assert_eq!(COSINE.at(step), 0.1);
        }
        for step in 1..60 {
            let (now, next) = (COSINE.at(step), COSINE.at(step + 1));
            assert!(if step < 10 { now < next } else { now >= next }, "step {step}");
        }
    }

    #[test]
    fn a_run_without_warm_up_begins_near_its_peak() {
        let rate = LearningRate::Cosine { peak: 1.0, floor: 0.0, warm_up: 0, steps: 4 };
        let rates: Vec<f64> = (1..=4).map(|step| rate.at(step)).collect();
        let root = 0.5f64.sqrt();
        for (rate, expected) in rates.iter().zip([0.5 + root / 2.0, 0.5, 0.5 - root / 2.0, 0.0]) {
            assert!((rate - expected).abs() < 1e-15, "{rates:?}");
        }
    }

    #[test]
    fn a_run_that_only_warms_up_has_no_division_by_zero() {
        let rate = LearningRate::Cosine { peak: 1.0, floor: 0.25, warm_up: 4, steps: 4 };
        assert_eq!(
            (1..=5).map(|step| rate.at(step)).collect::<Vec<_>>(),
            [0.25, 0.5, 0.75, 0.25, 0.25]
        );
    }

    #[test]
    fn the_series_is_the_cosine() {
        for index in 0..=10_000 {
            let turns = f64::from(index) / 10_000.0;
            let error = cos_pi(turns) - (PI * turns).cos();
            assert!(error.abs() < 4e-16, "{turns}: {error:e}");
        }
        assert_eq!((cos_pi(0.0), cos_pi(1.0)), (1.0, -1.0));
    }
}
