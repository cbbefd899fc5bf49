//! Lists the layers of a built-in model and works out how long each computes.
//!
//! Time goes by multiply-adds: a parameter that is applied at so many positions of a sample (pixels
//! that a convolution puts out, tokens that a linear layer sees) costs one per value and position.
//! A backward pass computes two gradients with the same work each, so it takes twice the forward.

use super::{Layer, Parameter, Replay};

/// The layers so far. Until the end, their `forward` is in multiply-adds.
pub(super) struct Layers {
    layers: Vec<Layer>,
}

impl Layers {
    pub(super) fn new() -> Self {
        Self { layers: Vec::new() }
    }

    /// A module `name` with parameters `name.…`, each applied at so many positions.
    pub(super) fn module(&mut self, name: &str, positions: usize, parameters: &[(&str, &[usize])]) {
        let parameters: Vec<Parameter> = parameters
            .iter()
            .map(|(suffix, shape)| Parameter {
                name: format!("{name}.{suffix}"),
                shape: shape.to_vec(),
            })
            .collect();
        let elements: usize = parameters.iter().map(Parameter::elements).sum();
        self.push(name, parameters, (elements * positions) as f64);
    }

    /// A step that computes with no parameters of its own.
    pub(super) fn compute(&mut self, name: &str, multiply_adds: usize) {
        self.push(name, Vec::new(), multiply_adds as f64);
    }

    pub(super) fn finish(mut self, name: &str) -> Replay {
        let total: f64 = self.layers.iter().map(|layer| layer.forward).sum();
        for layer in &mut self.layers {
            layer.forward /= 3.0 * total;
            layer.backward = 2.0 * layer.forward;
        }
        Replay { name: name.into(), layers: self.layers, compute: None }
    }

    fn push(&mut self, name: &str, parameters: Vec<Parameter>, multiply_adds: f64) {
        let name = name.into();
        self.layers.push(Layer { name, parameters, forward: multiply_adds, backward: 0.0 });
    }
}
