//! Gradient descent with a rate per weight that its own gradients wear down. The *sum* of the squares
//! of all gradients of a weight so far is kept, and its steps are in units of the root of it. A weight
//! whose gradients are rare or small keeps long steps; one that moves in every step soon takes short
//! ones. *Weight decay* adds a share of the weights to the gradient first:
//!
//! ```text
//! slope   ← gradient + decay · weights
//! sum     ← sum + slope²
//! weights ← weights − rate · slope / (√sum + epsilon)
//! ```
//!
//! The sum never fades, so steps grow shorter with every update, without a schedule and whichever worker
//! the gradient came from. That makes it forgiving to gradients of old weights, and many workers that
//! do not wait for each other are what it is mostly used for.

use crate::{LearningRate, Optimizer, check_lengths, zeros};

/// Gradient descent in units of the root of the summed squares.
#[derive(Clone, Debug)]
pub struct Adagrad {
    learning_rate: LearningRate,
    epsilon: f32,
    decay: f32,
    sum: Vec<Vec<f32>>,
}

impl Adagrad {
    /// The name on the command line.
    pub const NAME: &str = "adagrad";

    /// For parameters of these lengths, with sums of zero.
    pub fn new(
        learning_rate: LearningRate,
        epsilon: f64,
        weight_decay: f64,
        lengths: &[usize],
    ) -> Adagrad {
        Adagrad {
            learning_rate,
            epsilon: epsilon as f32,
            decay: weight_decay as f32,
            sum: zeros(lengths),
        }
    }
}

impl Optimizer for Adagrad {
    fn name(&self) -> &'static str {
        Adagrad::NAME
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn update_scaled(
        &mut self,
        parameter: usize,
        step: u64,
        factor: f64,
        weights: &mut [f32],
        gradient: &[f32],
    ) {
        let sum = &mut self.sum[parameter];
        check_lengths(parameter, sum.len(), weights, gradient);
        let rate = (self.learning_rate.at(step) * factor) as f32;
        let (epsilon, decay) = (self.epsilon, self.decay);
        for ((w, &g), s) in weights.iter_mut().zip(gradient).zip(sum) {
            let slope = g + decay * *w;
            *s += slope * slope;
            *w -= rate * slope / (s.sqrt() + epsilon);
        }
    }

    fn state(&self, parameter: usize) -> Vec<&[f32]> {
        vec![&self.sum[parameter]]
    }

    fn state_mut(&mut self, parameter: usize) -> Vec<&mut [f32]> {
        vec![&mut self.sum[parameter]]
    }
}
