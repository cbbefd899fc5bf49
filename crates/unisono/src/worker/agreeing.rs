//! A worker that agrees with the others in every step, or every so many.

use std::sync::Arc;

use unisono_collective::{Error, Group};
use unisono_optimizer::{Optimizer, OptimizerSpec};
use unisono_sync::strategy::{Weights, spread};
use unisono_sync::{Parameter, Settings, StepOutcome, SyncError, Synchronizer, divergence};

use super::WorkerError;

/// Makes the weights of so many parameters those of rank 0. All ranks must call it.
pub(super) fn broadcast(
    group: &Group,
    weights: &mut dyn Weights,
    parameters: usize,
) -> Result<(), Error> {
    for parameter in 0..parameters {
        let mut outcome = Ok(());
        weights.change(parameter, &mut |own| outcome = group.broadcast(own, 0));
        outcome?;
    }
    Ok(())
}

/// Keeps the weights of a worker in step with those of a group.
pub struct Agreeing {
    synchronizer: Arc<Synchronizer>,
    optimizer: Box<dyn Optimizer>,
    steps: u64,
}

/// Takes what a checkpoint must hold: its name, shape and values.
pub type Keep<'a> = dyn FnMut(String, &[usize], &[f32]) + 'a;

/// Finds what a checkpoint holds by its name.
pub type Find<'a> = dyn Fn(&str) -> Option<Vec<f32>> + 'a;

impl Agreeing {
    /// Makes the weights equal on all ranks of a group, to those of rank 0. All ranks call this with the
    /// same parameters, settings and optimizer.
    pub fn new(
        group: &Group,
        parameters: Vec<Parameter>,
        settings: Settings,
        optimizer: &OptimizerSpec,
        weights: &mut dyn Weights,
    ) -> Result<Agreeing, WorkerError> {
        let lengths: Vec<usize> = parameters.iter().map(Parameter::elements).collect();
        let optimizer = optimizer.build(&lengths)?;
        let synchronizer = Arc::new(Synchronizer::new(Some(group), parameters, settings)?);
        let mut agreeing = Agreeing { synchronizer, optimizer, steps: 0 };
        agreeing.broadcast(group, weights)?;
        agreeing.synchronizer.begin(weights);
        Ok(agreeing)
    }

    /// What takes the gradients.
    pub fn synchronizer(&self) -> &Arc<Synchronizer> {
        &self.synchronizer
    }

    /// Steps taken since the run began, by whatever process.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Makes weights, optimizer state and number of steps equal on all ranks, to those of rank 0.
    /// All ranks must call it.
    pub fn broadcast(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
    ) -> Result<(), WorkerError> {
        let mut steps = [self.steps as i64];
        group.broadcast(&mut steps, 0)?;
        self.steps = steps[0] as u64;
        broadcast(group, weights, self.parameters().len())?;
        for parameter in 0..self.parameters().len() {
            let mut states: Vec<Vec<f32>> =
                self.optimizer.state(parameter).into_iter().map(<[f32]>::to_vec).collect();
            for state in &mut states {
                group.broadcast(state, 0)?;
            }
            self.restore_state(parameter, &states)?;
        }
        Ok(())
    }

    /// Updates the weights by the mean gradient of all shards of all workers. A step that fails does not
    /// count.
    pub fn step(&mut self, weights: &mut dyn Weights) -> Result<StepOutcome, WorkerError> {
        let (optimizer, step) = (&mut self.optimizer, self.steps + 1);
        let mut outcome = self.synchronizer.finish(|parameter, gradient| {
            weights.change(parameter, &mut |weights| {
                optimizer.update(parameter, step, weights, gradient);
            });
        })?;
        self.steps = step;
        self.synchronizer.agree(weights, &mut outcome)?;
        Ok(outcome)
    }

    /// Ends training: makes the weights of workers with local steps equal. Those of others are. All
    /// ranks must call it.
    pub fn settle(&mut self, weights: &mut dyn Weights) -> Result<(), WorkerError> {
        Ok(self.synchronizer.settle(weights)?)
    }

    /// Fails on all ranks if the replicas are not equal: these weights, or with local steps those that
    /// were agreed on, and whatever `others` are given by name and hash. All ranks must call it.
    pub fn check(
        &self,
        group: &Group,
        weights: &dyn Weights,
        others: Vec<(String, blake3::Hash)>,
    ) -> Result<(), WorkerError> {
        let mut all = others;
        for (number, parameter) in self.parameters().iter().enumerate() {
            let mut hash = None;
            if !self.synchronizer.agreed(number, |agreed| hash = Some(divergence::hash(agreed))) {
                weights.read(number, &mut |own| hash = Some(divergence::hash(own)));
            }
            all.push((parameter.name.clone(), hash.expect("one of the two was read")));
        }
        let (names, hashes): (Vec<String>, Vec<blake3::Hash>) = all.into_iter().unzip();
        Ok(divergence::check(group, self.steps, &names, &hashes)?)
    }

    /// Calls `each` at rank 0 with everything a checkpoint must hold: the names, shapes and values of
    /// the parameters, as `weights.NAME`, of the optimizer's state, as `optimizer.STATE.NAME`, and of
    /// whatever else must be remembered. All ranks must call it.
    pub fn save(
        &self,
        group: &Group,
        weights: &dyn Weights,
        each: &mut Keep<'_>,
    ) -> Result<(), WorkerError> {
        if group.rank() == 0 {
            for (number, parameter) in self.parameters().iter().enumerate() {
                let name = format!("weights.{}", parameter.name);
                let mut save = |values: &[f32]| each(name.clone(), &parameter.shape, values);
                if !self.synchronizer.agreed(number, &mut save) {
                    weights.read(number, &mut save);
                }
            }
            self.each_state(&mut |name, shape, values| {
                each(format!("optimizer.{name}"), shape, values);
            });
        }
        if self.synchronizer.has_local_steps() {
            self.save_workers(group, weights, each)?;
        }
        self.synchronizer.save(group, &mut |name, parameter, values| {
            let shape = &self.parameters()[parameter].shape;
            let flat = [values.len()];
            let is_whole = values.len() == shape.iter().product::<usize>();
            each(name, if is_whole { shape } else { &flat }, values);
        })?;
        Ok(())
    }

    /// Continues where a worker was after `steps`, from what it [saved](Agreeing::save). Only rank 0
    /// needs to know the steps and to find anything. All ranks must call it. After an error the worker
    /// is unusable.
    pub fn restore(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
        steps: u64,
        find: &Find<'_>,
    ) -> Result<(), WorkerError> {
        if group.rank() == 0 {
            let missing = |name: String| WorkerError::Missing { name };
            for (number, parameter) in self.parameters().iter().enumerate() {
                let name = format!("weights.{}", parameter.name);
                let values = find(&name).filter(|values| values.len() == parameter.elements());
                let values = values.ok_or_else(|| missing(name))?;
                weights.set(number, &values);
            }
            for number in 0..self.parameters().len() {
                let mut states = Vec::new();
                for state in self.optimizer.state_names() {
                    let name = format!("optimizer.{state}.{}", self.parameters()[number].name);
                    states.push(find(&name).ok_or_else(|| missing(name))?);
                }
                self.restore_state(number, &states)?;
            }
            self.steps = steps;
        }
        self.broadcast(group, weights)?;
        self.synchronizer.begin(weights);
        self.synchronizer.restore(group, find)?;
        if self.synchronizer.has_local_steps() {
            self.restore_workers(group, weights, find)?;
        }
        self.synchronizer.go_on_from(self.steps);
        Ok(())
    }

    fn parameters(&self) -> &[Parameter] {
        self.synchronizer.parameters()
    }

    fn restore_state(&mut self, parameter: usize, states: &[Vec<f32>]) -> Result<(), WorkerError> {
        let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
        Ok(self.optimizer.restore(parameter, &states)?)
    }

    /// Calls `each` with the optimizer's state: `STATE.NAME`, shape and values.
    fn each_state(&self, each: &mut Keep<'_>) {
        for (number, parameter) in self.parameters().iter().enumerate() {
            let states = self.optimizer.state(number);
            for (state, values) in self.optimizer.state_names().iter().zip(states) {
                each(format!("{state}.{}", parameter.name), &parameter.shape, values);
            }
        }
    }

    /// Saves what every worker with local steps has for itself, as `worker.RANK.…`.
    fn save_workers(
        &self,
        group: &Group,
        weights: &dyn Weights,
        each: &mut Keep<'_>,
    ) -> Result<(), WorkerError> {
        let mut own: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for (number, Parameter { name, shape }) in self.parameters().iter().enumerate() {
            weights.read(number, &mut |values| {
                own.push((format!("weights.{name}"), shape.clone(), values.to_vec()));
            });
        }
        self.each_state(&mut |name, shape, values| {
            own.push((format!("optimizer.{name}"), shape.to_vec(), values.to_vec()));
        });
        for (name, shape, values) in own {
            for worker in 0..group.size() {
                let mut theirs = values.clone();
                group.broadcast(&mut theirs, worker)?;
                if group.rank() == 0 {
                    each(format!("worker.{worker}.{name}"), &shape, &theirs);
                }
            }
        }
        Ok(())
    }

    /// Puts back what [`Agreeing::save_workers`] saved. If there were fewer workers, some begin where
    /// the same one was.
    fn restore_workers(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
        find: &Find<'_>,
    ) -> Result<(), WorkerError> {
        let Some(Parameter { name, .. }) = self.parameters().first() else { return Ok(()) };
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
            for (number, parameter) in self.parameters().iter().enumerate() {
                let values = of(&format!("weights.{}", parameter.name), parameter.elements())?;
                if ours {
                    weights.set(number, &values);
                }
            }
            for number in 0..self.parameters().len() {
                let mut states = Vec::new();
                for state in self.optimizer.state_names() {
                    let parameter = &self.parameters()[number];
                    let name = format!("optimizer.{state}.{}", parameter.name);
                    states.push(of(&name, parameter.elements())?);
                }
                if ours {
                    self.restore_state(number, &states)?;
                }
            }
        }
        Ok(())
    }
}
