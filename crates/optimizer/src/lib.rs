//! Optimizers over flat `f32` memory, without a framework.
//!
//! An [`Optimizer`] turns the agreed mean gradient of one parameter into new weights, one pass
//! over memory per parameter. An [`OptimizerSpec`] is its description: what the command line
//! names, the report prints and [`OptimizerSpec::build`] makes an optimizer of.
//!
//! Replicas stay equal only if equal inputs give equal bits on every machine. Therefore an update
//! is elementwise, so that its bits do not depend on how wide the machine's vectors are; it
//! multiplies and adds in two roundings, never fused; and whatever depends on the step alone is
//! computed in `f64` from the step number, by operations that IEEE 754 defines exactly. Nothing is
//! carried along from step to step but the state vectors, so a run that is resumed from them
//! continues with the bits it would have had.

mod adagrad;
mod adamw;
mod momentum;
mod schedule;
mod sgd;
mod spec;
#[cfg(test)]
mod tests;

pub use adagrad::Adagrad;
pub use adamw::AdamW;
pub use momentum::Momentum;
pub use schedule::LearningRate;
pub use sgd::Sgd;
pub use spec::{BadOptimizer, OptimizerSpec, UnknownOptimizer};

/// A rule that turns gradients into weights.
///
/// Parameters are numbered from 0 in the order of the lengths that the optimizer was built for. A
/// parameter that no worker has a gradient for in some step is not updated in it: neither its weights
/// nor its state change.
pub trait Optimizer: Send {
    /// The name on the command line.
    fn name(&self) -> &'static str;

    /// The names of the state vectors that every parameter has; a checkpoint stores them so.
    fn state_names(&self) -> &'static [&'static str];

    /// Updates one parameter. `step` counts from 1 and is that of the whole run, not of this
    /// process.
    ///
    /// # Panics
    ///
    /// If there is no such parameter, or if it has another length.
    fn update(&mut self, parameter: usize, step: u64, weights: &mut [f32], gradient: &[f32]) {
        self.update_scaled(parameter, step, 1.0, weights, gradient);
    }

    /// As [`Optimizer::update`], with the learning rate of this one update multiplied by `factor`,
    /// and with it what weight decay takes away. The state takes the gradient in as it is. A factor
    /// of 1 changes no bit.
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    fn update_scaled(
        &mut self,
        parameter: usize,
        step: u64,
        factor: f64,
        weights: &mut [f32],
        gradient: &[f32],
    );

    /// The state of one parameter, in the order of [`Optimizer::state_names`].
    ///
    /// # Panics
    ///
    /// If there is no such parameter.
    fn state(&self, parameter: usize) -> Vec<&[f32]>;

    /// As [`Optimizer::state`], to be written.
    ///
    /// # Panics
    ///
    /// If there is no such parameter.
    fn state_mut(&mut self, parameter: usize) -> Vec<&mut [f32]>;

    /// Puts back what [`Optimizer::state`] returned. Changes nothing if it returns an error.
    ///
    /// # Errors
    ///
    /// If `state` is not the state of this parameter under this optimizer.
    fn restore(&mut self, parameter: usize, state: &[&[f32]]) -> Result<(), WrongState> {
        let optimizer = self.name();
        let mut current = self.state_mut(parameter);
        let expected: Vec<usize> = current.iter().map(|vector| vector.len()).collect();
        let found: Vec<usize> = state.iter().map(|vector| vector.len()).collect();
        if expected != found {
            return Err(WrongState { optimizer, parameter, expected, found });
        }
        for (current, saved) in current.iter_mut().zip(state) {
            current.copy_from_slice(saved);
        }
        Ok(())
    }
}

/// The state to restore belongs to another model or another optimizer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the saved state of parameter {parameter} does not fit {optimizer}: it has vectors of lengths \
     {found:?} instead of {expected:?}; resume with the model and optimizer that wrote it"
)]
pub struct WrongState {
    /// The optimizer that was to take it over.
    pub optimizer: &'static str,
    /// The parameter.
    pub parameter: usize,
    /// The lengths of the vectors that the optimizer has.
    pub expected: Vec<usize>,
    /// The lengths of those that were to be restored.
    pub found: Vec<usize>,
}

/// One vector of zeros per parameter.
fn zeros(lengths: &[usize]) -> Vec<Vec<f32>> {
    lengths.iter().map(|&length| vec![0.0; length]).collect()
}

/// Refuses slices that are not the whole parameter: a shorter one would silently leave the rest
/// of its weights behind.
#[track_caller]
fn check_lengths(parameter: usize, length: usize, weights: &[f32], gradient: &[f32]) {
    assert_eq!(weights.len(), length, "length of the weights of parameter {parameter}");
    assert_eq!(gradient.len(), length, "length of the gradient of parameter {parameter}");
}
