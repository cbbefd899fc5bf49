//! Adam with decoupled weight decay. Two fading means are kept per weight: the *first* moment, of
//! the gradient, and the *second*, of its square. The weights follow the first, each in units of
//! the root of its second, so that all move at a similar pace however large their gradients are.
//! Both means begin at zero and are too small in early steps by the known factor `1 − betaᵗ`; the
//! *bias correction* divides by it. Weight decay acts on the weights directly and not through the
//! gradient, whose scale the second moment would take out again:
//!
//! ```text
//! first   ← beta1 · first  + (1 − beta1) · gradient
//! second  ← beta2 · second + (1 − beta2) · gradient²
//! weights ← (1 − rate · decay) · weights
//!         − rate / (1 − beta1ᵗ) · first / (√second / √(1 − beta2ᵗ) + epsilon)
//! ```
//!
//! `t` is the step of the run. Everything that is the same for all weights is computed in `f64`
//! from `t` once per call and then rounded, which leaves one root and one division per weight.

use crate::{LearningRate, Optimizer, check_lengths, zeros};

/// Adam with decoupled weight decay.
#[derive(Clone, Debug)]
pub struct AdamW {
    learning_rate: LearningRate,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
    first: Vec<Vec<f32>>,
    second: Vec<Vec<f32>>,
}

impl AdamW {
    /// The name on the command line.
    pub const NAME: &str = "adamw";

    /// For parameters of these lengths, with moments of zero.
    pub fn new(
        learning_rate: LearningRate,
        (beta1, beta2): (f64, f64),
        epsilon: f64,
        weight_decay: f64,
        lengths: &[usize],
    ) -> AdamW {
        AdamW {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            weight_decay,
            first: zeros(lengths),
            second: zeros(lengths),
        }
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        AdamW::NAME
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["first", "second"]
    }

    fn update_scaled(
        &mut self,
        parameter: usize,
        step: u64,
        factor: f64,
        weights: &mut [f32],
        gradient: &[f32],
    ) {
        let (first, second) = (&mut self.first[parameter], &mut self.second[parameter]);
        check_lengths(parameter, first.len(), weights, gradient);

        let rate = self.learning_rate.at(step) * factor;
        let pace = (rate / (1.0 - power(self.beta1, step))) as f32;
        let scale = (1.0 / (1.0 - power(self.beta2, step)).sqrt()) as f32;
        let keep = (1.0 - rate * self.weight_decay) as f32;
        let (beta1, new1) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
        let (beta2, new2) = (self.beta2 as f32, (1.0 - self.beta2) as f32);
        let epsilon = self.epsilon as f32;

        for (((w, &g), m), v) in weights.iter_mut().zip(gradient).zip(first).zip(second) {
            *m = beta1 * *m + new1 * g;
            *v = beta2 * *v + new2 * (g * g);
            *w = keep * *w - pace * *m / (v.sqrt() * scale + epsilon);
        }
    }

    fn state(&self, parameter: usize) -> Vec<&[f32]> {
        vec![&self.first[parameter], &self.second[parameter]]
    }

    fn state_mut(&mut self, parameter: usize) -> Vec<&mut [f32]> {
        vec![&mut self.first[parameter], &mut self.second[parameter]]
    }
}

/// `base` to the power `exponent` by squaring. The precision of `f64::powi` is left open by the
/// language; this has the same bits everywhere.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut power = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            power *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    power
}

#[cfg(test)]
mod tests {
    use super::power;

    #[test]
    fn powers() {
        assert_eq!(power(0.9, 0), 1.0);
        assert_eq!(power(0.9, 1), 0.9);
        assert_eq!(power(0.5, 20), 2f64.powi(-20));
        assert_eq!(power(-3.0, 5), -243.0);
        assert_eq!(power(0.999, u64::MAX), 0.0);
        for exponent in [2, 7, 100, 12_345] {
            let expected = 0.999f64.powf(exponent as f64);
            assert!((power(0.999, exponent) / expected - 1.0).abs() < 1e-11, "{exponent}");
        }
    }
}
