//! A model whose weights are somebody else's business.

use candle_core::{Result, Tensor};
use unisono_sync::Parameter;
use unisono_sync::accumulate::Values;

use super::gradient::{Visitor, visit};
use super::parameters::{Entry, Parameters};
use super::replica;

/// A worker's copy of a model: gives gradients, takes weights. Where these come from, a parameter
/// server, shared memory or another worker, it does not know.
pub struct Standalone {
    entries: Vec<Entry>,
    trained: Vec<usize>,
}

impl Standalone {
    /// The copy that was built from these parameters.
    pub fn new(parameters: &Parameters) -> Standalone {
        let entries = parameters.entries();
        let trained = (0..entries.len()).filter(|i| !entries[*i].frozen).collect();
        Standalone { entries, trained }
    }

    /// The parameters that are trained, in the order of their numbers.
    pub fn parameters(&self) -> Vec<Parameter> {
        let parameter = |&i: &usize| {
            let entry = &self.entries[i];
            Parameter { name: entry.name.clone(), shape: entry.live.dims().to_vec() }
        };
        self.trained.iter().map(parameter).collect()
    }

    /// Computes the gradients of a loss, and calls `each` with every parameter that has one. Returns the
    /// loss.
    pub fn backward(&self, loss: &Tensor, mut each: impl FnMut(usize, &[f32])) -> Result<f32> {
        let value = loss.to_scalar::<f32>()?;
        let gradients = loss.backward()?;
        let mut values = Vec::new();
        for (parameter, &i) in self.trained.iter().enumerate() {
            let entry = &self.entries[i];
            if let Some(gradient) = gradients.get(entry.variable.as_tensor()) {
                values.resize(entry.live.elem_count(), 0.0);
                visit(gradient, Store(&mut values))?;
                each(parameter, &values);
            }
        }
        Ok(value)
    }

    /// Calls `then` with the weights of a parameter.
    pub fn read<R>(&self, parameter: usize, then: impl FnOnce(&[f32]) -> R) -> R {
        self.entries[self.trained[parameter]].read(then)
    }

    /// Changes the weights of a parameter.
    pub fn change(&self, parameter: usize, how: impl FnOnce(&mut [f32])) -> Result<()> {
        self.entries[self.trained[parameter]].change(how)
    }

    /// The hash of all weights, by which models with equal ones are known.
    pub fn weights_hash(&self) -> blake3::Hash {
        replica::hash(&self.entries)
    }
}

struct Store<'a>(&'a mut Vec<f32>);

impl Visitor for Store<'_> {
    type Output = ();

    fn visit(self, values: &impl Values) {
        values.store(self.0);
    }
}
