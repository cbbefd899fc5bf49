//! The weights of a candle model, wherever they come from.

use unisono_sync::strategy::Weights;
use unisono_sync::{Parameter, divergence};

use super::parameters::{Entry, Parameters};

/// The weights of the model that was built from [`Parameters`], by the numbers of those that are trained.
#[derive(Clone)]
pub struct ModelWeights {
    pub(super) entries: Vec<Entry>,
    /// Which of the entries are trained.
    trained: Vec<usize>,
}

impl ModelWeights {
    /// Those of the model that was built from these parameters.
    pub fn of(parameters: &Parameters) -> ModelWeights {
        let entries = parameters.entries();
        let trained = (0..entries.len()).filter(|i| !entries[*i].frozen).collect();
        ModelWeights { entries, trained }
    }

    /// The parameters that are trained, in the order of their numbers.
    pub fn parameters(&self) -> Vec<Parameter> {
        let parameter = |&i: &usize| {
            let entry = &self.entries[i];
            Parameter { name: entry.name.clone(), shape: entry.live.dims().to_vec() }
        };
        self.trained.iter().map(parameter).collect()
    }

    /// The hash of all weights, those that are not trained included: equal on all workers that have equal
    /// ones.
    pub fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for entry in &self.entries {
            entry.read(|values| {
                hasher.update(divergence::hash_all([(&*entry.name, values)]).as_bytes());
            });
        }
        hasher.finalize()
    }

    /// Those that are not trained.
    pub(super) fn frozen(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.frozen)
    }
}

impl Weights for ModelWeights {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        self.entries[self.trained[parameter]].read(|weights| with(weights));
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        let entry = &self.entries[self.trained[parameter]];
        entry.change(|weights| with(weights)).expect("parameters are f32 and lie in order");
    }
}
