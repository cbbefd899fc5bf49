//! Gradient descent with momentum, the heavy ball. The *velocity* of a weight is a sum of all
//! gradients so far in which each step fades the past by the factor *momentum*; the weights follow
//! the velocity. Directions in which gradients agree gain speed, those in which they alternate
//! cancel:
//!
//! ```text
//! slope    ← gradient + decay · weights
//! velocity ← momentum · velocity + slope
//! weights  ← weights − rate · velocity
//! ```
//!
//! *Nesterov's* variant looks one step of the velocity ahead: it follows
//! `slope + momentum · velocity` instead of `velocity`.

use crate::{LearningRate, Optimizer, check_lengths, zeros};

/// Gradient descent with momentum.
#[derive(Clone, Debug)]
pub struct Momentum {
    learning_rate: LearningRate,
    momentum: f32,
    nesterov: bool,
    decay: f32,
    velocity: Vec<Vec<f32>>,
}

impl Momentum {
    /// The name on the command line.
    pub const NAME: &str = "momentum";

    /// For parameters of these lengths, at rest.
    pub fn new(
        learning_rate: LearningRate,
        momentum: f64,
        nesterov: bool,
        weight_decay: f64,
        lengths: &[usize],
    ) -> Momentum {
        Momentum {
            learning_rate,
            momentum: momentum as f32,
            nesterov,
            decay: weight_decay as f32,
            velocity: zeros(lengths),
        }
    }
}

impl Optimizer for Momentum {
    fn name(&self) -> &'static str {
        Momentum::NAME
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["momentum"]
    }

    fn update_scaled(
        &mut self,
        parameter: usize,
        step: u64,
        factor: f64,
        weights: &mut [f32],
        gradient: &[f32],
    ) {
        let velocity = &mut self.velocity[parameter];
        check_lengths(parameter, velocity.len(), weights, gradient);
        let rate = (self.learning_rate.at(step) * factor) as f32;
        let (momentum, decay) = (self.momentum, self.decay);
        let elements = weights.iter_mut().zip(gradient).zip(velocity);
        if self.nesterov {
            for ((w, &g), v) in elements {
                let slope = g + decay * *w;
                *v = momentum * *v + slope;
                *w -= rate * (slope + momentum * *v);
            }
        } else {
            for ((w, &g), v) in elements {
                let slope = g + decay * *w;
                *v = momentum * *v + slope;
                *w -= rate * *v;
            }
        }
    }

    fn state(&self, parameter: usize) -> Vec<&[f32]> {
        vec![&self.velocity[parameter]]
    }

    fn state_mut(&mut self, parameter: usize) -> Vec<&mut [f32]> {
        vec![&mut self.velocity[parameter]]
    }
}
