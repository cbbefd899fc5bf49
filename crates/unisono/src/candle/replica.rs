//! A model that is kept in step with those of the other workers.

use std::sync::Arc;

use candle_core::Tensor;
use unisono_collective::{Error, Group};
use unisono_optimizer::{BadOptimizer, Optimizer, OptimizerSpec, WrongState};
use unisono_sync::strategy::{Weights, spread};
use unisono_sync::{Parameter, Settings, StepOutcome, SyncError, Synchronizer, divergence};

use super::parameters::{Entry, Parameters};

/// One worker's copy of the model, with its optimizer.
///
/// After an error, the user's own in the middle of a shard included, the replica is of no more use:
/// its weights are those of no step, and further calls may panic. Make a new one.
pub struct Replica {
    entries: Vec<Entry>,
    /// Which of the entries are trained.
    trained: Vec<usize>,
    synchronizer: Arc<Synchronizer>,
    optimizer: Box<dyn Optimizer>,
    steps: u64,
    shards_begun: usize,
}

/// Why a replica could not be made, or a step not be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The replicas could not be kept in step.
    #[error(transparent)]
    Sync(#[from] SyncError),
    /// candle could not compute.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The optimizer's settings make no sense.
    #[error(transparent)]
    Optimizer(#[from] BadOptimizer),
    /// The state belongs to another model or optimizer.
    #[error(transparent)]
    State(#[from] WrongState),
    /// The saved state lacks something, or has it in another size: it is another model's.
    #[error("the saved state has no {name} of the right size: it is of another model")]
    Missing {
        /// What is missing.
        name: String,
    },
    /// These parameters already belong to a replica. Build another model for another replica.
    #[error("these parameters already belong to a replica")]
    Taken,
}

impl From<Error> for ReplicaError {
    fn from(error: Error) -> ReplicaError {
        ReplicaError::Sync(error.into())
    }
}

impl Replica {
    /// Makes the parameters of a model equal on all ranks of a group, to those of rank 0, and keeps
    /// them so. All ranks call this with the same model, settings and optimizer.
    pub fn new(
        group: &Group,
        parameters: &Parameters,
        settings: Settings,
        optimizer: OptimizerSpec,
    ) -> Result<Replica, ReplicaError> {
        let entries = parameters.entries();
        let trained: Vec<usize> = (0..entries.len()).filter(|i| !entries[*i].frozen).collect();
        let parameter = |&i: &usize| {
            let entry: &Entry = &entries[i];
            Parameter { name: entry.name.clone(), shape: entry.live.dims().to_vec() }
        };
        let list: Vec<Parameter> = trained.iter().map(parameter).collect();
        let lengths: Vec<usize> = list.iter().map(Parameter::elements).collect();
        let optimizer = optimizer.build(&lengths)?;
        let synchronizer = Arc::new(Synchronizer::new(Some(group), list, settings)?);
        let mut replica =
            Replica { entries, trained, synchronizer, optimizer, steps: 0, shards_begun: 0 };
        replica.broadcast(group)?;
        replica.synchronizer.begin(&replica.weights());
        if parameters.sink().synchronizer.set(replica.synchronizer.clone()).is_err() {
            return Err(ReplicaError::Taken);
        }
        Ok(replica)
    }

    /// Makes weights, optimizer state and number of steps equal on all ranks, to those of rank 0.
    /// All ranks must call it.
    pub fn broadcast(&mut self, group: &Group) -> Result<(), ReplicaError> {
        let mut steps = [self.steps as i64];
        group.broadcast(&mut steps, 0)?;
        self.steps = steps[0] as u64;
        for entry in &self.entries {
            let mut outcome = Ok(());
            entry.change(|weights| outcome = group.broadcast(weights, 0))?;
            outcome?;
        }
        for parameter in 0..self.trained.len() {
            let mut states: Vec<Vec<f32>> =
                self.optimizer.state(parameter).into_iter().map(<[f32]>::to_vec).collect();
            for state in &mut states {
                group.broadcast(state, 0)?;
            }
            let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
            self.optimizer.restore(parameter, &states)?;
        }
        Ok(())
    }

    /// The next shard of the present step whose loss this worker should compute. `None` when it has
    /// computed all of its shards: it is time for [`Replica::step`].
    pub fn next_shard(&mut self) -> Option<usize> {
        if self.shards_begun == self.synchronizer.shards().len() {
            return None;
        }
        self.shards_begun += 1;
        Some(self.synchronizer.begin_shard())
    }

    /// Computes the gradients of the shard's loss, which must be its mean over the samples. With the
    /// last shard, gradients travel while the others are still being computed.
    pub fn backward(&mut self, loss: &Tensor) -> Result<f32, ReplicaError> {
        let value = loss.to_scalar::<f32>()?;
        self.synchronizer.begin_backward(value);
        loss.backward()?;
        self.synchronizer.end_shard();
        Ok(value)
    }

    /// Updates the weights by the mean gradient of all shards of all workers.
    pub fn step(&mut self) -> Result<StepOutcome, ReplicaError> {
        self.shards_begun = 0;
        self.steps += 1;
        let (entries, optimizer, step) = (&self.entries, &mut self.optimizer, self.steps);
        let mut failure = Ok(());
        let mut outcome = self.synchronizer.finish(|parameter, gradient| {
            let changed = entries[self.trained[parameter]]
                .change(|weights| optimizer.update(parameter, step, weights, gradient));
            if failure.is_ok() {
                failure = changed;
            }
        })?;
        failure?;
        let synchronizer = self.synchronizer.clone();
        synchronizer.agree(&mut self.weights(), &mut outcome)?;
        Ok(outcome)
    }

    /// Ends training: makes the weights of workers with [local steps](unisono_sync::strategy::LocalSteps) equal.
    /// Those of other strategies are. All ranks must call it.
    pub fn settle(&mut self) -> Result<(), ReplicaError> {
        let synchronizer = self.synchronizer.clone();
        Ok(synchronizer.settle(&mut self.weights())?)
    }

    /// Steps taken since the run began, by whatever process.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What keeps this replica in step.
    pub fn synchronizer(&self) -> &Synchronizer {
        &self.synchronizer
    }

    /// The hash of all weights: equal on all workers, and for any number of workers.
    pub fn weights_hash(&self) -> blake3::Hash {
        hash(&self.entries)
    }

    /// Fails on all ranks if the replicas are not equal. All ranks must call it. Of workers with
    /// [local steps](unisono_sync::strategy::LocalSteps), what they have agreed on is compared.
    pub fn check(&self, group: &Group) -> Result<(), ReplicaError> {
        let mut hashes: Vec<_> =
            self.entries.iter().map(|entry| entry.read(divergence::hash)).collect();
        for (parameter, &i) in self.trained.iter().enumerate() {
            self.synchronizer.agreed(parameter, |weights| hashes[i] = divergence::hash(weights));
        }
        let names: Vec<String> = self.entries.iter().map(|entry| entry.name.clone()).collect();
        Ok(divergence::check(group, self.steps, &names, &hashes)?)
    }

    /// Calls `each` at rank 0 with everything a checkpoint must hold: the names, shapes and values of
    /// the parameters, as `weights.NAME`, of the optimizer's state, as `optimizer.STATE.NAME`, and of
    /// whatever else must be remembered. All ranks must call it.
    pub fn save(
        &self,
        group: &Group,
        mut each: impl FnMut(String, &[usize], &[f32]),
    ) -> Result<(), ReplicaError> {
        if group.rank() == 0 {
            for (i, entry) in self.entries.iter().enumerate() {
                let name = format!("weights.{}", entry.name);
                let trained = self.trained.iter().position(|trained| *trained == i);
                let agreed = trained.is_some_and(|parameter| {
                    let save = |values: &[f32]| each(name.clone(), entry.live.dims(), values);
                    self.synchronizer.agreed(parameter, save)
                });
                if !agreed {
                    entry.read(|values| each(name, entry.live.dims(), values));
                }
            }
            self.each_state(|name, dims, values| each(format!("optimizer.{name}"), dims, values));
        }
        if self.synchronizer.has_local_steps() {
            self.save_workers(group, &mut each)?;
        }
        self.synchronizer.save(group, &mut |name, parameter, values| {
            let dims = self.entries[self.trained[parameter]].live.dims();
            let flat = [values.len()];
            let is_whole = values.len() == dims.iter().product::<usize>();
            each(name, if is_whole { dims } else { &flat }, values);
        })?;
        Ok(())
    }

    /// Continues where another replica was after `steps`, from what it [saved](Replica::save):
    /// `find` returns the values of a name. Only rank 0 needs to know the steps and to find anything.
    /// All ranks must call it. After an error the replica is unusable.
    pub fn restore(
        &mut self,
        group: &Group,
        steps: u64,
        find: impl Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<(), ReplicaError> {
        if group.rank() == 0 {
            let missing = |name: String| ReplicaError::Missing { name };
            for entry in &self.entries {
                let name = format!("weights.{}", entry.name);
                match find(&name) {
                    Some(values) if values.len() == entry.live.elem_count() => {
                        entry.change(|weights| weights.copy_from_slice(&values))?;
                    }
                    _ => return Err(missing(name)),
                }
            }
            self.restore_states(|name| {
                let name = format!("optimizer.{name}");
                find(&name).ok_or_else(|| missing(name))
            })?;
            self.steps = steps;
        }
        self.broadcast(group)?;
        self.synchronizer.begin(&self.weights());
        self.synchronizer.restore(group, &find)?;
        if self.synchronizer.has_local_steps() {
            self.restore_workers(group, &find)?;
        }
        self.synchronizer.go_on_from(self.steps);
        Ok(())
    }

    /// Calls `each` with the optimizer's state: `STATE.NAME`, shape and values.
    fn each_state(&self, mut each: impl FnMut(String, &[usize], &[f32])) {
        for (parameter, &i) in self.trained.iter().enumerate() {
            let entry = &self.entries[i];
            let states = self.optimizer.state(parameter);
            for (state, values) in self.optimizer.state_names().iter().zip(states) {
                each(format!("{state}.{}", entry.name), entry.live.dims(), values);
            }
        }
    }

    /// Puts back what [`Replica::each_state`] named.
    fn restore_states(
        &mut self,
        mut find: impl FnMut(String) -> Result<Vec<f32>, ReplicaError>,
    ) -> Result<(), ReplicaError> {
        for (parameter, &i) in self.trained.iter().enumerate() {
            let mut states = Vec::new();
            for state in self.optimizer.state_names() {
                states.push(find(format!("{state}.{}", self.entries[i].name))?);
            }
            let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
            self.optimizer.restore(parameter, &states)?;
        }
        Ok(())
    }

    /// Saves what every worker with local steps has for itself, as `worker.RANK.…`.
    fn save_workers(
        &self,
        group: &Group,
        each: &mut impl FnMut(String, &[usize], &[f32]),
    ) -> Result<(), ReplicaError> {
        let mut own: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for &i in &self.trained {
            let entry = &self.entries[i];
            let name = format!("weights.{}", entry.name);
            own.push((name, entry.live.dims().to_vec(), entry.read(<[f32]>::to_vec)));
        }
        self.each_state(|name, dims, values| {
            own.push((format!("optimizer.{name}"), dims.to_vec(), values.to_vec()));
        });
        for (name, dims, values) in own {
            for worker in 0..group.size() {
                let mut theirs = values.clone();
                group.broadcast(&mut theirs, worker)?;
                if group.rank() == 0 {
                    each(format!("worker.{worker}.{name}"), &dims, &theirs);
                }
            }
        }
        Ok(())
    }

    /// Puts back what [`Replica::save_workers`] saved. If there were fewer workers, some begin where
    /// the same one was.
    fn restore_workers(
        &mut self,
        group: &Group,
        find: &dyn Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<(), ReplicaError> {
        let Some(first) = self.trained.first() else { return Ok(()) };
        let name = &self.entries[*first].name;
        let is_saved = |worker: &usize| find(&format!("worker.{worker}.weights.{name}")).is_some();
        let mut saved = [match group.rank() {
            0 => (0..).take_while(is_saved).count() as i64,
            _ => 0,
        }];
        group.broadcast(&mut saved, 0)?;
        let saved = saved[0] as usize;
        if saved == 0 {
            let name = format!("worker.0.weights.{name}");
            return Err(SyncError::MissingState { name }.into());
        }
        for worker in 0..saved {
            let ours = worker == group.rank() % saved;
            let of = |name: &str, length: usize| {
                spread(group, &format!("worker.{worker}.{name}"), length, find)
            };
            for &i in &self.trained {
                let entry = &self.entries[i];
                let length = entry.live.elem_count();
                let values = of(&format!("weights.{}", entry.name), length)?;
                if ours {
                    entry.change(|weights| weights.copy_from_slice(&values))?;
                }
            }
            for (parameter, &i) in self.trained.iter().enumerate() {
                let entry = &self.entries[i];
                let mut states = Vec::new();
                for state in self.optimizer.state_names() {
                    let length = entry.live.elem_count();
                    states.push(of(&format!("optimizer.{state}.{}", entry.name), length)?);
                }
                let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
                if ours {
                    self.optimizer.restore(parameter, &states)?;
                }
            }
        }
        Ok(())
    }

    fn weights(&self) -> Trained<'_> {
        Trained { entries: &self.entries, trained: &self.trained }
    }
}

/// The weights that are trained, by the number of their parameter.
struct Trained<'a> {
    entries: &'a [Entry],
    trained: &'a [usize],
}

impl Weights for Trained<'_> {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        self.entries[self.trained[parameter]].read(|weights| with(weights));
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        let entry = &self.entries[self.trained[parameter]];
        entry.change(|weights| with(weights)).expect("parameters are f32 and lie in order");
    }
}

/// The hash of the values of all parameters.
pub(super) fn hash(entries: &[Entry]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for entry in entries {
        entry.read(|values| {
            hasher.update(divergence::hash_all([(&*entry.name, values)]).as_bytes())
        });
    }
    hasher.finalize()
}
