//! The weights of a candle model, wherever they come from.

use unisono_collective::Group;
use unisono_sync::strategy::Weights;
use unisono_sync::{Parameter, divergence};

use super::parameters::{Entry, Parameters};
use super::replica::ReplicaError;

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

    /// Makes those that are not trained equal on all ranks, to those of rank 0. All ranks must call it.
    pub(super) fn broadcast_frozen(&self, group: &Group) -> Result<(), ReplicaError> {
        for entry in self.frozen() {
            let mut outcome = Ok(());
            entry.change(|weights| outcome = group.broadcast(weights, 0))?;
            outcome?;
        }
        Ok(())
    }

    /// Those that are not trained, by numbers of their own.
    pub(super) fn as_frozen(&self) -> FrozenWeights {
        FrozenWeights(self.frozen().cloned().collect())
    }

    /// Those that are not trained.
    pub(super) fn frozen(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.frozen)
    }
}

/// The weights of a model that are not trained.
pub(super) struct FrozenWeights(Vec<Entry>);

impl FrozenWeights {
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl Weights for FrozenWeights {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        self.0[parameter].read(|weights| with(weights));
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        let changed = self.0[parameter].change(|weights| with(weights));
        changed.expect("parameters are f32 and lie in order");
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
