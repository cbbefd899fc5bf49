//! Stochastic gradient descent. The weights take a step against the gradient, as long as the
//! *learning rate* says. *Weight decay* adds a share of the weights to the gradient first, which
//! pulls them towards zero:
//!
//! ```text
//! weights ← weights − rate · (gradient + decay · weights)
//! ```
//!
//! There is no state.

use crate::{LearningRate, Optimizer, check_lengths};

/// Stochastic gradient descent.
#[derive(Clone, Debug)]
pub struct Sgd {
    learning_rate: LearningRate,
    decay: f32,
    lengths: Vec<usize>,
}

impl Sgd {
    /// The name on the command line.
    pub const NAME: &str = "sgd";

    /// For parameters of these lengths.
    pub fn new(learning_rate: LearningRate, weight_decay: f64, lengths: &[usize]) -> Sgd {
        Sgd { learning_rate, decay: weight_decay as f32, lengths: lengths.to_vec() }
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> &'static str {
        Sgd::NAME
    }

    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn update_scaled(
        &mut self,
        parameter: usize,
        step: u64,
        factor: f64,
        weights: &mut [f32],
        gradient: &[f32],
    ) {
        check_lengths(parameter, self.lengths[parameter], weights, gradient);
        let rate = (self.learning_rate.at(step) * factor) as f32;
        let decay = self.decay;
        for (w, &g) in weights.iter_mut().zip(gradient) {
            *w -= rate * (g + decay * *w);
        }
    }

    fn state(&self, parameter: usize) -> Vec<&[f32]> {
        assert!(parameter < self.lengths.len(), "no parameter {parameter}");
        Vec::new()
    }

    fn state_mut(&mut self, parameter: usize) -> Vec<&mut [f32]> {
        assert!(parameter < self.lengths.len(), "no parameter {parameter}");
        Vec::new()
    }
}
