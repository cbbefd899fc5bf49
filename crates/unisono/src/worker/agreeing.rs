//! A worker that agrees with the others in every step, or every so many.

use std::sync::Arc;

use unisono_collective::{Error, Group};
use unisono_optimizer::{Optimizer, OptimizerSpec};
use unisono_sync::strategy::{Weights, spread};
use unisono_sync::{Parameter, Settings, StepOutcome, SyncError, Synchronizer, divergence};

use super::WorkerError;
use super::handing::Handing;

/// Makes the weights of so many parameters those of rank 0. All ranks must call it.
pub(super) fn broadcast(
    group: &Group,
    weights: &mut dyn Weights,
    parameters: usize,
) -> Result<(), Error> {
    Transfer::new(group, 0, false).weights(weights, parameters)
}

/// Keeps the weights of a worker in step with those of a group.
pub struct Agreeing {
    synchronizer: Arc<Synchronizer>,
    pub(super) spec: OptimizerSpec,
    pub(super) optimizer: Box<dyn Optimizer>,
    steps: u64,
    /// Whether weights and optimizer state are those after so many steps. Else they are those of no
    /// step.
    has_state: bool,
    /// Where workers that join get the state from.
    pub(super) handing: Option<Handing>,
    /// Where workers that agree now and then go back to in another group.
    round: Option<Round>,
}

/// What a worker had when all had agreed last.
struct Round {
    steps: u64,
    weights: Vec<Vec<f32>>,
    optimizer: Vec<Vec<f32>>,
    shared: Vec<Vec<f32>>,
}

/// What happened when workers went on in another group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regrouped {
    /// The steps after which all of them go on.
    pub steps: u64,
    /// The rank whose state the others had or got; `None` if no rank has all of it: then restore a checkpoint,
    /// or begin anew.
    pub donor: Option<usize>,
    /// Ranks that got it.
    pub behind: usize,
    /// Bytes of the state that each of them got.
    pub bytes: u64,
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
        let mut agreeing = Agreeing::made(Some(group), parameters, settings, optimizer)?;
        agreeing.broadcast(group, weights)?;
        agreeing.synchronizer.begin(weights);
        Ok(agreeing)
    }

    /// A worker that is in no group yet, and has no weights of the run: [`Agreeing::regroup`] gives it both.
    pub fn waiting(
        parameters: Vec<Parameter>,
        settings: Settings,
        optimizer: &OptimizerSpec,
    ) -> Result<Agreeing, WorkerError> {
        Agreeing::made(None, parameters, settings, optimizer)
    }

    fn made(
        group: Option<&Group>,
        parameters: Vec<Parameter>,
        settings: Settings,
        spec: &OptimizerSpec,
    ) -> Result<Agreeing, WorkerError> {
        let optimizer = spec.build(&lengths(&parameters))?;
        let synchronizer = Arc::new(Synchronizer::new(group, parameters, settings)?);
        let (spec, steps, has_state, handing, round) = (*spec, 0, false, None, None);
        Ok(Agreeing { synchronizer, spec, optimizer, steps, has_state, handing, round })
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
        self.lose_state();
        let mut steps = [self.steps as i64];
        group.broadcast(&mut steps, 0)?;
        self.steps = steps[0] as u64;
        let mut transfer = Transfer::new(group, 0, false);
        transfer.weights(weights, self.parameters().len())?;
        self.transfer_optimizer(&mut transfer)?;
        self.has_state = true;
        Ok(())
    }

    /// Begins the run anew, with the weights of rank 0. All ranks must call it.
    pub fn begin_anew(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
    ) -> Result<(), WorkerError> {
        self.optimizer = self.spec.build(&lengths(self.parameters()))?;
        self.steps = 0;
        self.broadcast(group, weights)?;
        self.synchronizer.go_on_from(0);
        self.synchronizer.begin(weights);
        self.keep_round(weights);
        Ok(())
    }

    /// Goes on in another group, all of whose ranks call this, those that [wait](Agreeing::waiting) too.
    /// If some are behind, they get weights, optimizer state and number of steps of the lowest rank of
    /// those with the most steps. The step under way, if there is one, is dropped and to be computed again.
    ///
    /// If what the strategy remembers from step to step was lost with the group before, no rank has all of its
    /// state, whatever its weights are: there is no [donor](Regrouped::donor).
    ///
    /// After an error this can be called again, with the next group: a worker that was about to get the
    /// state of another has none then.
    pub fn regroup(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
    ) -> Result<Regrouped, WorkerError> {
        self.regroup_with(group, weights, (&mut Vec::new(), 0))
    }

    /// As [`Agreeing::regroup`], with so many parameters that are not trained.
    pub(crate) fn regroup_with(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
        (frozen, number): (&mut dyn Weights, usize),
    ) -> Result<Regrouped, WorkerError> {
        let none = Regrouped { steps: 0, donor: None, behind: group.size(), bytes: 0 };
        let is_kept = self.go_back(weights);
        match self.synchronizer.regroup_from(Some(group), is_kept) {
            Err(SyncError::StateLost { .. }) => {
                self.lose_state();
                self.round = None;
                return Ok(none);
            }
            regrouped => regrouped?,
        }
        let own = if self.has_state { self.steps as i64 } else { -1 };
        let mut all = vec![0; group.size()];
        group.all_gather(&[own], &mut all)?;
        let all: Vec<Option<u64>> = all.into_iter().map(|steps| steps.try_into().ok()).collect();
        let Some(donor) = donor(&all) else { return Ok(none) };
        let behind = all.iter().filter(|steps| **steps != all[donor]).count();
        let mut transfer = Transfer::new(group, donor, all[group.rank()] == all[donor]);
        let mut shared = match &self.round {
            Some(round) => round.shared.clone(),
            None => self.shared(),
        };
        if behind > 0 {
            if !transfer.holds {
                self.lose_state();
            }
            transfer.weights(weights, self.parameters().len())?;
            transfer.weights(frozen, number)?;
            self.transfer_optimizer(&mut transfer)?;
            shared.iter_mut().try_for_each(|values| transfer.values(values))?;
        }
        self.set_shared(&shared);
        self.steps = all[donor].expect("a donor has state");
        self.has_state = true;
        self.synchronizer.go_on_from(self.steps);
        self.synchronizer.begin(weights);
        self.keep_round(weights);
        Ok(Regrouped { steps: self.steps, donor: Some(donor), behind, bytes: transfer.bytes })
    }

    /// Whether the weights and the optimizer's state are those after so many [steps](Agreeing::steps). Else
    /// they are those of no step: this worker waits for its first group, or has failed in the middle of an
    /// update or of a transfer.
    pub fn has_state(&self) -> bool {
        self.has_state
    }

    /// The workers have agreed: from here they go on in another group, if this one fails.
    fn keep_round(&mut self, weights: &dyn Weights) {
        if !self.synchronizer.has_rounds() {
            return;
        }
        let count = self.parameters().len();
        let states = (0..count).flat_map(|parameter| self.optimizer.state(parameter));
        let optimizer = states.map(<[f32]>::to_vec).collect();
        let (steps, weights, shared) = (self.steps, weights.to_vecs(count), self.shared());
        self.round = Some(Round { steps, weights, optimizer, shared });
    }

    /// Goes back to where the workers have agreed last; whether they agree now and then.
    fn go_back(&mut self, weights: &mut dyn Weights) -> bool {
        let Some(round) = &self.round else { return false };
        weights.set_all(&round.weights);
        let mut saved = round.optimizer.iter();
        for parameter in 0..self.synchronizer.parameters().len() {
            for (state, saved) in self.optimizer.state_mut(parameter).into_iter().zip(&mut saved) {
                state.copy_from_slice(saved);
            }
        }
        (self.steps, self.has_state) = (round.steps, true);
        true
    }

    /// A copy of what the workers share besides the weights: while ranks wait for each other, the synchronizer must
    /// not be locked.
    fn shared(&self) -> Vec<Vec<f32>> {
        let mut shared = Vec::new();
        self.synchronizer.each_shared(&mut |values| shared.push(values.to_vec()));
        shared
    }

    fn set_shared(&self, shared: &[Vec<f32>]) {
        let mut shared = shared.iter();
        self.synchronizer.each_shared(&mut |values| {
            values
                .copy_from_slice(shared.next().expect("a strategy shares as much in every group"));
        });
    }

    /// The weights and the optimizer's state are about to become those of no step.
    pub(super) fn lose_state(&mut self) {
        self.has_state = false;
        if let Some(Handing { donor, .. }) = &self.handing {
            donor.break_off();
        }
    }

    /// The weights and the optimizer's state are those after so many steps of another worker.
    pub(super) fn has_made(&mut self, steps: u64) {
        (self.steps, self.has_state) = (steps, true);
    }

    /// Updates the weights by the mean gradient of all shards of all workers. A step that fails does not
    /// count.
    pub fn step(&mut self, weights: &mut dyn Weights) -> Result<StepOutcome, WorkerError> {
        let mut means = self.offer_state(weights).then(Vec::new);
        let (optimizer, step) = (&mut self.optimizer, self.steps + 1);
        let mut updated = false;
        let finished = self.synchronizer.finish(|parameter, gradient| {
            updated = true;
            if let Some(means) = &mut means {
                means.push((parameter, gradient.to_vec()));
            }
            weights.change(parameter, &mut |weights| {
                optimizer.update(parameter, step, weights, gradient);
            });
        });
        // Whatever fails after the first update leaves weights of no step.
        let had_state = self.has_state;
        self.has_state &= !updated;
        let mut outcome = finished?;
        self.steps = step;
        if let (Some(Handing { donor, .. }), Some(means)) = (&self.handing, means) {
            donor.give_means(step, means);
        }
        self.synchronizer.agree(weights, &mut outcome)?;
        self.has_state = had_state;
        if outcome.agreed {
            self.keep_round(weights);
        }
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
    /// is unusable, unless it is [regrouped](Agreeing::regroup).
    pub fn restore(
        &mut self,
        group: &Group,
        weights: &mut dyn Weights,
        steps: u64,
        find: &Find<'_>,
    ) -> Result<(), WorkerError> {
        self.lose_state();
        self.round = None;
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
        // Until all the rest is restored.
        self.has_state = false;
        self.synchronizer.begin(weights);
        self.synchronizer.restore(group, find)?;
        if self.synchronizer.has_local_steps() {
            self.restore_workers(group, weights, find)?;
        }
        self.synchronizer.go_on_from(self.steps);
        self.has_state = true;
        Ok(())
    }

    pub(super) fn parameters(&self) -> &[Parameter] {
        self.synchronizer.parameters()
    }

    fn transfer_optimizer(&mut self, transfer: &mut Transfer<'_>) -> Result<(), Error> {
        for parameter in 0..self.synchronizer.parameters().len() {
            for state in self.optimizer.state_mut(parameter) {
                transfer.values(state)?;
            }
        }
        Ok(())
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

fn lengths(parameters: &[Parameter]) -> Vec<usize> {
    parameters.iter().map(Parameter::elements).collect()
}

/// The rank that hands its state to those that are behind, or have none: the lowest of those with the most
/// steps.
fn donor(steps: &[Option<u64>]) -> Option<usize> {
    let most = steps.iter().flatten().max()?;
    steps.iter().position(|steps| steps.as_ref() == Some(most))
}

/// The state of one rank on its way to the others.
struct Transfer<'a> {
    group: &'a Group,
    donor: usize,
    /// Whether this rank has it already. Then nothing is written over it, so that it is still there if the
    /// transfer fails.
    holds: bool,
    scratch: Vec<f32>,
    bytes: u64,
}

impl Transfer<'_> {
    fn new(group: &Group, donor: usize, holds: bool) -> Transfer<'_> {
        Transfer { group, donor, holds, scratch: Vec::new(), bytes: 0 }
    }

    fn weights(&mut self, weights: &mut dyn Weights, parameters: usize) -> Result<(), Error> {
        for parameter in 0..parameters {
            let mut outcome = Ok(());
            match self.is_spectator() {
                true => weights.read(parameter, &mut |own| outcome = self.skip(own.len())),
                false => weights.change(parameter, &mut |own| outcome = self.pass(own)),
            }
            outcome?;
        }
        Ok(())
    }

    fn values(&mut self, own: &mut [f32]) -> Result<(), Error> {
        if self.is_spectator() { self.skip(own.len()) } else { self.pass(own) }
    }

    fn is_spectator(&self) -> bool {
        self.holds && self.group.rank() != self.donor
    }

    /// Sends or receives.
    fn pass(&mut self, values: &mut [f32]) -> Result<(), Error> {
        self.bytes += size_of_val(values) as u64;
        self.group.broadcast(values, self.donor)
    }

    /// Takes part in a broadcast of so many elements without a use for them.
    fn skip(&mut self, length: usize) -> Result<(), Error> {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(length.max(scratch.len()), 0.0);
        let outcome = self.pass(&mut scratch[..length]);
        self.scratch = scratch;
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::donor;

    #[test]
    fn the_lowest_rank_with_the_most_steps_hands_over() {
        assert_eq!(donor(&[]), None);
        assert_eq!(donor(&[None, None]), None);
        assert_eq!(donor(&[Some(0)]), Some(0));
        assert_eq!(donor(&[None, Some(0), Some(0)]), Some(1));
        assert_eq!(donor(&[Some(4), None, Some(5), Some(5)]), Some(2));
        assert_eq!(donor(&[Some(u64::MAX), Some(0)]), Some(0));
    }
}
