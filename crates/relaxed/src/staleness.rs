//! What becomes of gradients of old weights. While a worker computes a gradient, others move the
//! weights on; its *staleness* is by how many clocks they did. It is the right direction at weights
//! that are no longer there, and a long step along it overshoots: descent with gradients that are s
//! updates old is stable only at learning rates of about 1/s of what fresh ones allow.
//!
//! - *Keep* applies it as it is. Best while gradients are fresh, or the learning rate is far from its
//!   limit.
//! - *Scale* divides the learning rate by the staleness, so that nearly every rate is stable that was
//!   so for fresh gradients. The price is that a slow worker's data counts for less.
//! - *Drop* leaves out what is older than a limit. The work is lost, but nothing else waits for it.
//! - *Compensate* corrects the gradient for the way that the weights have gone since. To first order a
//!   gradient changes by the Hessian times that way; the diagonal of the Hessian is estimated by the
//!   square of the gradient itself, which it equals on average at the optimum of a likelihood:
//!
//!   ```text
//!   gradient ← gradient + lambda · gradient² · (weights now − weights then)
//!   ```
//!
//!   The server must remember the weights that each worker has read. *Lambda* trades the error of the
//!   estimate for that of the delay; see [`StalenessPolicy::LAMBDA`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::spec::name_and_rest;

/// What becomes of a gradient of old weights.
///
/// Its text ([`fmt::Display`]) contains every setting exactly and parses to the same policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StalenessPolicy {
    /// `keep`: it is applied as it is.
    #[default]
    Keep,
    /// `scale`: the learning rate is divided by its staleness.
    Scale,
    /// `drop:T`: it is left out if it is more than so many clocks old.
    Drop(u64),
    /// `compensate[:LAMBDA]`: it is corrected for the way that the weights have gone since.
    Compensate(f32),
}

impl StalenessPolicy {
    /// The policies, as they are written.
    pub const USAGE: &str = "keep, scale, drop:T or compensate[:LAMBDA]";

    /// The lambda of `compensate`, if not given: that of Zheng et al., "Asynchronous Stochastic
    /// Gradient Descent with Delay Compensation" (2017), for a constant lambda and batches of usual
    /// size. The square of a batch's mean gradient is mostly noise that is squared as well, so what is
    /// true on average needs a small share to be safe for each. A larger one corrects more and becomes
    /// unstable itself where gradients are large; at zero this is `keep`. Gradients of single samples
    /// bear up to 1.
    pub const LAMBDA: f32 = 0.04;

    /// Fails if a setting is out of its range. One that was parsed is not; one that came from another
    /// process may be.
    pub fn check(&self) -> Result<(), BadStalenessPolicy> {
        match self {
            StalenessPolicy::Compensate(lambda) if !lambda.is_finite() || *lambda <= 0.0 => {
                Err(BadStalenessPolicy { text: self.to_string(), flaw: BAD_LAMBDA })
            }
            _ => Ok(()),
        }
    }

    /// What the learning rate is multiplied by for a gradient of this staleness in clocks, at most 1; `None`
    /// if the gradient is left out.
    pub fn factor(&self, staleness: f64) -> Option<f64> {
        match *self {
            StalenessPolicy::Keep | StalenessPolicy::Compensate(_) => Some(1.0),
            StalenessPolicy::Scale => Some(1.0 / staleness.max(1.0)),
            StalenessPolicy::Drop(limit) => (staleness <= limit as f64).then_some(1.0),
        }
    }
}

/// Corrects a gradient that was computed at the weights `then` for use at the weights `now`.
///
/// Elementwise and never fused, so that a server that replays its journal gets the same bits.
///
/// # Panics
///
/// If the lengths differ.
pub fn compensate(lambda: f32, gradient: &mut [f32], now: &[f32], then: &[f32]) {
    assert_eq!(gradient.len(), now.len(), "length of the weights now");
    assert_eq!(gradient.len(), then.len(), "length of the weights then");
    for ((g, now), then) in gradient.iter_mut().zip(now).zip(then) {
        // In this order weights that did not move make the term zero. The square of a large
        // gradient, taken first, would overflow, and infinity times zero is not a number.
        *g += lambda * (now - then) * *g * *g;
    }
}

const BAD_LAMBDA: &str = "LAMBDA is a number above 0";

impl FromStr for StalenessPolicy {
    type Err = BadStalenessPolicy;

    fn from_str(text: &str) -> Result<StalenessPolicy, BadStalenessPolicy> {
        let bad = |flaw| BadStalenessPolicy { text: text.to_owned(), flaw };
        match name_and_rest(text) {
            ("keep", None) => Ok(StalenessPolicy::Keep),
            ("scale", None) => Ok(StalenessPolicy::Scale),
            ("drop", Some(limit)) => limit
                .parse()
                .map(StalenessPolicy::Drop)
                .map_err(|_| bad("T is a number of clocks, from 0")),
            ("drop", None) => Err(bad("the limit T is missing")),
            ("compensate", None) => Ok(StalenessPolicy::Compensate(StalenessPolicy::LAMBDA)),
            ("compensate", Some(lambda)) => {
                let stale =
                    StalenessPolicy::Compensate(lambda.parse().map_err(|_| bad(BAD_LAMBDA))?);
                stale.check().map(|()| stale)
            }
            ("keep" | "scale", Some(_)) => Err(bad("it has no settings")),
            _ => Err(bad("there is none of that name")),
        }
    }
}

impl fmt::Display for StalenessPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StalenessPolicy::Keep => f.write_str("keep"),
            StalenessPolicy::Scale => f.write_str("scale"),
            StalenessPolicy::Drop(limit) => write!(f, "drop:{limit}"),
            StalenessPolicy::Compensate(lambda) => write!(f, "compensate:{lambda}"),
        }
    }
}

/// A text that describes no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no policy for stale gradients: {flaw}; write {}, such as drop:8",
    StalenessPolicy::USAGE
)]
pub struct BadStalenessPolicy {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub flaw: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts_parse_to_themselves() {
        for text in ["keep", "scale", "drop:0", "drop:8", "compensate:0.04", "compensate:1"] {
            assert_eq!(text.parse::<StalenessPolicy>().unwrap().to_string(), text);
        }
        assert_eq!("compensate".parse(), Ok(StalenessPolicy::Compensate(0.04)));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, flaw) in [
            ("keep:1", "no settings"),
            ("scale:2", "no settings"),
            ("drop", "missing"),
            ("drop:", "number of clocks"),
            ("drop:-1", "number of clocks"),
            ("compensate:", "above 0"),
            ("compensate:0", "above 0"),
            ("compensate:-1", "above 0"),
            ("compensate:inf", "above 0"),
            ("compensate:nan", "above 0"),
            ("ignore", "none of that name"),
        ] {
            let error = text.parse::<StalenessPolicy>().unwrap_err().to_string();
            assert!(error.contains(flaw) && error.contains("keep, scale, drop:T"), "{error}");
        }
    }

    #[test]
    fn factors() {
        for staleness in [0.0, 0.75, 1.0, 4.0, 1e9] {
            assert_eq!(StalenessPolicy::Keep.factor(staleness), Some(1.0));
            assert_eq!(StalenessPolicy::Compensate(0.04).factor(staleness), Some(1.0));
        }
        assert_eq!(StalenessPolicy::Scale.factor(0.0), Some(1.0));
        assert_eq!(StalenessPolicy::Scale.factor(0.75), Some(1.0));
        assert_eq!(StalenessPolicy::Scale.factor(4.0), Some(0.25));
        assert_eq!(StalenessPolicy::Drop(3).factor(3.0), Some(1.0));
        assert_eq!(StalenessPolicy::Drop(3).factor(3.25), None);
        assert_eq!(StalenessPolicy::Drop(0).factor(0.0), Some(1.0));
        assert_eq!(StalenessPolicy::Drop(0).factor(0.25), None);
    }

    /// A run of descent in which every gradient is that of the weights `delay` updates ago.
    fn descend(
        policy: StalenessPolicy,
        rate: f64,
        delay: usize,
        steps: usize,
        start: Vec<f32>,
        mut gradient: impl FnMut(usize, &[f32]) -> Vec<f32>,
    ) -> Vec<Vec<f32>> {
        let mut weights = vec![start];
        for step in 0..steps {
            let now = weights[step].clone();
            let then = &weights[step.saturating_sub(delay)];
            let mut g = gradient(step, then);
            if let StalenessPolicy::Compensate(lambda) = policy {
                compensate(lambda, &mut g, &now, then);
            }
            let factor = policy.factor((step - step.saturating_sub(delay)) as f64);
            let rate = (rate * factor.unwrap_or(0.0)) as f32;
            weights.push(now.iter().zip(&g).map(|(w, g)| w - rate * g).collect());
        }
        weights
    }

    /// A parabola, w²/2, with delay 4: stable below a rate of 2·sin(π/18) ≈ 0.35, where fresh
    /// gradients are stable below 2.
    #[test]
    fn scaling_is_stable_where_keeping_diverges() {
        let run = |policy, rate| {
            let weights = descend(policy, rate, 4, 200, vec![1.0], |_, w| w.to_vec());
            weights.last().unwrap()[0].abs()
        };
        assert!(run(StalenessPolicy::Keep, 0.3) < 0.01, "stable below the edge");
        assert!(run(StalenessPolicy::Keep, 0.45) > 100.0, "diverges beyond it");
        assert!(run(StalenessPolicy::Scale, 0.45) < 1e-6);
        assert!(run(StalenessPolicy::Scale, 1.0) < 0.01);
        // What is dropped does no harm; here it is everything after the first few.
        assert!(run(StalenessPolicy::Drop(3), 0.45) < 1.0);
    }

    /// Numbers in 0..1 that look random and depend on the arguments alone.
    fn noise(a: usize, b: usize) -> f32 {
        let mut bits = ((a as u64) << 32 | b as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        for _ in 0..2 {
            bits = (bits ^ bits >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        }
        (bits >> 40) as f32 / (1 << 24) as f32
    }

    /// A logistic regression of eight weights, one sample per gradient, labels drawn from a model
    /// that the weights can reach: there the squared gradient is the curvature, on average. Returns
    /// by how much the expected loss exceeds the least, over the second half of a run.
    fn excess_loss(policy: StalenessPolicy, rate: f64, delay: usize) -> f64 {
        const STEPS: usize = 2000;
        const TEST: usize = 500;
        let truth = [1.0f32, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0];
        let input = |sample| [0, 1, 2, 3, 4, 5, 6, 7].map(|index| 3.4 * noise(sample, index) - 1.7);
        let score = |weights: &[f32], input: &[f32]| -> f32 {
            weights.iter().zip(input).map(|(w, x)| w * x).sum()
        };
        let chance = |score: f32| 1.0 / (1.0 + (-score).exp());

        let weights = descend(policy, rate, delay, STEPS, vec![0.0; 8], |step, weights| {
            let input = input(step);
            let label = f32::from(noise(step, 8) < chance(score(&truth, &input)));
            let error = chance(score(weights, &input)) - label;
            input.iter().map(|x| error * x).collect()
        });
        let loss = |weights: &[f32]| -> f64 {
            let of_sample = |sample| {
                let input = input(sample);
                let score_now = f64::from(score(weights, &input));
                score_now.exp().ln_1p() - f64::from(chance(score(&truth, &input))) * score_now
            };
            (STEPS..STEPS + TEST).map(of_sample).sum::<f64>() / TEST as f64
        };
        let late: Vec<f64> = weights[STEPS / 2..].iter().step_by(7).map(|w| loss(w)).collect();
        late.iter().sum::<f64>() / late.len() as f64 - loss(&truth)
    }

    #[test]
    fn compensation_is_nearly_as_good_as_fresh_gradients() {
        let (rate, delay) = (0.3, 16);
        let fresh = excess_loss(StalenessPolicy::Keep, rate, 0);
        let kept = excess_loss(StalenessPolicy::Keep, rate, delay);
        let compensated = excess_loss(StalenessPolicy::Compensate(1.0), rate, delay);
        let cautious =
            excess_loss(StalenessPolicy::Compensate(StalenessPolicy::LAMBDA), rate, delay);
        let scaled = excess_loss(StalenessPolicy::Scale, rate, delay);
        let all = format!("{fresh} {kept} {compensated} {cautious} {scaled}");
        assert!(kept > 1.5 * fresh, "the delay hurts: {all}");
        assert!(compensated < 0.6 * kept && compensated < 1.2 * fresh, "{all}");
        assert!(cautious < 0.98 * kept, "{all}");
        assert!(scaled < 0.5 * kept, "{all}");
    }

    proptest! {
        #[test]
        fn factors_are_sane(limit in any::<u64>(), staleness in any::<f64>(), lambda in any::<f32>()) {
            let policies = [
                StalenessPolicy::Keep,
                StalenessPolicy::Scale,
                StalenessPolicy::Drop(limit),
                StalenessPolicy::Compensate(lambda),
            ];
            for policy in policies {
                if let Some(factor) = policy.factor(staleness) {
                    prop_assert!((0.0..=1.0).contains(&factor), "{policy}: {factor}");
                } else {
                    prop_assert!(staleness > limit as f64 && policy == StalenessPolicy::Drop(limit));
                }
            }
        }

        #[test]
        fn compensation_follows_its_formula(
            lambda in 0.0f32..2.0,
            elements in prop::collection::vec((-10f32..10.0, -2f32..2.0, -2f32..2.0), 0..70),
        ) {
            let (mut gradient, mut now, mut then) = (Vec::new(), Vec::new(), Vec::new());
            for &(g, n, t) in &elements {
                gradient.push(g);
                now.push(n);
                then.push(t);
            }
            compensate(lambda, &mut gradient, &now, &then);
            for (result, &(g, n, t)) in gradient.iter().zip(&elements) {
                let [g, n, t, l] = [g, n, t, lambda].map(f64::from);
                let term = l * g * g * (n - t);
                let error = (f64::from(*result) - (g + term)).abs();
                prop_assert!(error <= 1e-5 * (1.0 + g.abs() + l * g * g * (n.abs() + t.abs())));
            }
        }

        #[test]
        fn weights_that_did_not_move_change_nothing(
            gradient in prop::collection::vec(-1e30f32..1e30, 1..40),
            weight in -1e3f32..1e3,
        ) {
            let weights = vec![weight; gradient.len()];
            let mut result = gradient.clone();
            compensate(1.0, &mut result, &weights, &weights);
            prop_assert_eq!(result, gradient);
        }
    }
}
