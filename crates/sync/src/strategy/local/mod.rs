//! Local steps: workers that agree only now and then.
//!
//! Every worker trains by itself, on its own shards and with its own *inner* optimizer. From time to
//! time ([`Schedule`]) the workers synchronize. Each holds two sets of weights: its *own*, and the
//! *agreed* ones, which are the same everywhere. The difference `agreed − own` is how far the
//! worker has come, and points like a gradient: against the direction to go. This
//! *pseudo-gradient* travels like a gradient: as it is, or in fewer bytes.
//! An *outer* optimizer applies the mean of all workers to the agreed weights, from which all workers
//! go on. With gradient descent of rate 1 that is the mean of the weights (`local:H`); with
//! Nesterov momentum the outer steps gain speed where successive rounds agree (`diloco:H`).
//!
//! With *streams*, parameters are split into groups that synchronize at different steps: as many
//! bytes, but never all at once. With a *delay*, the workers go on while a group travels. When its
//! mean is applied, the progress that a worker has made meanwhile is kept:
//!
//! ```text
//! own ← agreed + (own − own at submission)
//! ```
//!
//! What is promised: the agreed weights have the same bits on all workers at all times, whatever
//! the transport, and a run that is resumed goes on with the bits it would have had. What is not:
//! unlike with the synchronous strategy, the result depends on the number of workers, for each
//! makes steps of its own.

mod schedule;
mod state;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_collective::{AbortHandle, Group};

pub use schedule::{Due, Schedule};

use super::{
    Alone, Compression, Find, Gradients, LocalStepsSpec, Queue, Save, Strategy, Votes, Weights,
    mean,
};
use crate::bucket::{Layout, SCALARS};
use crate::error::SyncError;
use crate::shards::Shards;
use crate::slot::Slot;
use crate::synchronizer::Parameter;
use crate::times::BucketTimes;
use unisono_optimizer::Optimizer;

/// What was agreed after a step, and what that took.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// What the workers agreed on, if something was applied after this step. The same on all ranks.
    pub agreed: Option<Agreed>,
    /// When the buckets that were applied were under way.
    pub buckets: Vec<BucketTimes>,
    /// Time in which this rank did nothing but wait for them.
    pub blocked: Duration,
}

/// What the workers agreed on besides the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreed {
    /// The mean over the workers of the loss in the step of submission.
    pub loss: f32,
    /// What any of them had voted for by then.
    pub votes: Votes,
}

/// Synchronizes the weights of workers that train by themselves.
pub struct LocalSteps {
    /// What the pseudo-gradients travel by.
    travel: Queue,
    /// As it was at first: later the strategy may be exchanging something when it is asked.
    encodes_from: Option<u64>,
    workers: usize,
    names: Vec<String>,
    schedule: Schedule,
    /// One bucket for each group of parameters.
    layout: Arc<Layout>,
    outer: Box<dyn Optimizer>,
    /// The agreed weights of every parameter.
    agreed: Vec<Vec<f32>>,
    /// This worker's weights when they were submitted last. Only needed with a delay.
    submitted: Vec<Vec<f32>>,
    flights: Vec<Flight>,
    /// What this worker has voted for since its last submission.
    votes: Votes,
}

/// Where the bucket of a group is.
enum Flight {
    /// Here, with nothing of interest in its memory.
    Idle(Vec<Slot>),
    /// With the strategy.
    UnderWay,
    /// Back, but not yet applied. There are no times if it travelled before the run was resumed.
    Back(Vec<Slot>, Option<BucketTimes>),
}

/// The numbers that travel with a submission.
const LOSS: usize = 0;
const STOP: usize = 1;
const REGROUP: usize = 3;

impl LocalSteps {
    /// For a worker of a group that trains a model with these parameters; without a group, for the only
    /// one. There are no more streams than parameters.
    pub fn new(
        group: Option<&Group>,
        parameters: &[Parameter],
        plan: LocalStepsSpec,
        compression: Option<Compression>,
    ) -> Result<LocalSteps, SyncError> {
        let workers = group.map_or(1, Group::size);
        // Every worker is a shard.
        let shards = Shards::new(workers, workers)?;
        let travel = mean(group, shards, true, parameters, compression)?;
        let encodes_from = travel.strategy().encodes_from();
        let lengths: Vec<usize> = parameters.iter().map(Parameter::elements).collect();
        let zeros = || lengths.iter().map(|length| vec![0.0; *length]).collect();
        let schedule = plan.schedule.of_at_most(parameters.len());
        let layout = Layout::of_groups(&lengths, &split(&lengths, schedule.groups()));
        let memory = layout.buckets().iter().map(|bucket| vec![vec![0.0; bucket.len].into()]);
        Ok(LocalSteps {
            travel,
            encodes_from,
            workers,
            names: parameters.iter().map(|parameter| parameter.name.clone()).collect(),
            schedule,
            flights: memory.map(Flight::Idle).collect(),
            layout: Arc::new(layout),
            outer: plan.outer.build(&lengths).expect("a plan's settings were checked"),
            agreed: zeros(),
            submitted: if schedule.delay() > 0 { zeros() } else { Vec::new() },
            votes: Votes::default(),
        })
    }

    /// The worker has finished a step, the first of which is 1: does what is due after it. The loss
    /// is heard if something is submitted, and so are votes, or else at the next submission.
    ///
    /// # Panics
    /// If steps are left out.
    pub fn step(
        &mut self,
        step: u64,
        weights: &mut dyn Weights,
        loss: f32,
        votes: Votes,
    ) -> Result<Round, SyncError> {
        self.votes |= votes;
        let due = self.schedule.after(step);
        let mut outcome = Round::default();
        if let Some(group) = due.submit {
            self.submit(group, step - 1, weights, loss, false);
        }
        if let Some(group) = due.apply {
            self.apply(group, step, weights, &mut outcome)?;
        }
        Ok(outcome)
    }

    /// When the workers synchronize.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Lets the pseudo-gradient of a group go, in full if it must be exact.
    fn submit(&mut self, group: usize, step: u64, weights: &dyn Weights, loss: f32, exact: bool) {
        let flight = std::mem::replace(&mut self.flights[group], Flight::UnderWay);
        let Flight::Idle(mut slots) = flight else {
            panic!("steps come one after the other: group {group} is not yet applied");
        };
        let bucket = &self.layout.buckets()[group];
        for &parameter in &bucket.parameters {
            let agreed = &self.agreed[parameter];
            let pseudo_gradient = &mut slots[0][self.layout.span(parameter)];
            let mut submitted = self.submitted.get_mut(parameter);
            weights.read(parameter, &mut |own| {
                assert_eq!(own.len(), agreed.len(), "elements of parameter {parameter}");
                for ((difference, agreed), own) in pseudo_gradient.iter_mut().zip(agreed).zip(own) {
                    *difference = agreed - own;
                }
                if let Some(submitted) = &mut submitted {
                    submitted.copy_from_slice(own);
                }
            });
            slots[0][self.layout.count(parameter)] = 1.0;
        }
        let mut numbers = [0.0; SCALARS];
        numbers[LOSS] = loss;
        let Votes { stop, regroup } = std::mem::take(&mut self.votes);
        (numbers[STOP], numbers[REGROUP]) = (stop.into(), regroup.into());
        slots[0][bucket.scalars.clone()].copy_from_slice(&numbers);
        let layout = self.layout.clone();
        let mut gradients = Gradients::new(group, layout, step, slots, 1, self.workers);
        gradients.exact = exact;
        self.travel.submit(gradients);
    }

    /// Applies the mean pseudo-gradient of a group, if it is in flight. One that was due may have
    /// been settled before.
    fn apply(
        &mut self,
        group: usize,
        step: u64,
        weights: &mut dyn Weights,
        outcome: &mut Round,
    ) -> Result<(), SyncError> {
        if matches!(self.flights[group], Flight::Idle(_)) {
            return Ok(());
        }
        let mean = self.collect(group, outcome)?;
        let bucket = &self.layout.buckets()[group];
        for &parameter in &bucket.parameters {
            let agreed = &mut self.agreed[parameter];
            self.outer.update(parameter, step, agreed, &mean[0][self.layout.span(parameter)]);
            let submitted = self.submitted.get(parameter);
            weights.change(parameter, &mut |own| match submitted {
                None => own.copy_from_slice(agreed),
                Some(submitted) => go_on(own, agreed, submitted),
            });
        }
        let numbers = &mean[0][bucket.scalars.clone()];
        let mut votes = outcome.agreed.map_or(Votes::default(), |agreed| agreed.votes);
        votes |= Votes { stop: numbers[STOP] > 0.0, regroup: numbers[REGROUP] > 0.0 };
        outcome.agreed = Some(Agreed { loss: numbers[LOSS] / self.workers as f32, votes });
        self.flights[group] = Flight::Idle(mean);
        Ok(())
    }

    /// Waits for the mean of a group, which is in flight.
    fn collect(&mut self, group: usize, outcome: &mut Round) -> Result<Vec<Slot>, SyncError> {
        let asked = Instant::now();
        self.wait_for(group)?;
        outcome.blocked += asked.elapsed();
        match std::mem::replace(&mut self.flights[group], Flight::UnderWay) {
            Flight::Back(slots, times) => {
                outcome.buckets.extend(times);
                Ok(slots)
            }
            Flight::Idle(_) | Flight::UnderWay => unreachable!("it was waited for"),
        }
    }

    /// Waits until a group is back, if it is under way. Those that were submitted before come back
    /// before.
    fn wait_for(&mut self, group: usize) -> Result<(), SyncError> {
        while matches!(self.flights[group], Flight::UnderWay) {
            let gradients = self.travel.collect()?;
            let times = BucketTimes::of(&gradients);
            self.flights[gradients.bucket] = Flight::Back(gradients.slots, Some(times));
        }
        Ok(())
    }
}

impl Strategy for LocalSteps {
    fn name(&self) -> String {
        self.travel.strategy().name()
    }

    fn encodes_from(&self) -> Option<u64> {
        self.encodes_from
    }

    /// By itself, a worker steps by the mean of its own shards.
    fn exchange(&mut self, gradients: &mut Gradients) -> Result<(), SyncError> {
        Alone.exchange(gradients)
    }

    fn sent(&self) -> u64 {
        self.travel.sent()
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        self.travel.abort_handle()
    }

    fn is_local(&self) -> bool {
        true
    }

    fn begin(&mut self, weights: &dyn Weights) {
        for (parameter, agreed) in self.agreed.iter_mut().enumerate() {
            weights.read(parameter, &mut |own| agreed.copy_from_slice(own));
        }
    }

    fn agree(
        &mut self,
        step: u64,
        weights: &mut dyn Weights,
        loss: f32,
        votes: Votes,
    ) -> Result<Option<Round>, SyncError> {
        self.step(step, weights, loss, votes).map(Some)
    }

    /// What is under way is applied. Then the agreed weights become the mean of the workers'. That is
    /// plain averaging: an outer optimizer's momentum would carry the weights as far as after a whole
    /// period. No codec is used: no later step would make up for what it leaves out. What was synchronized
    /// after this very step is left alone.
    fn settle(&mut self, step: u64, weights: &mut dyn Weights) -> Result<Round, SyncError> {
        let mut outcome = Round::default();
        for group in 0..self.flights.len() {
            self.apply(group, step, weights, &mut outcome)?;
        }
        let due = self.schedule.after(step);
        // Submitted and applied at once, hence equal everywhere.
        let is_equal = |group| due.submit == Some(group) && due.apply == Some(group);
        let rest: Vec<usize> = (0..self.flights.len()).filter(|group| !is_equal(*group)).collect();
        for group in &rest {
            self.submit(*group, step, weights, 0.0, true);
        }
        for group in rest {
            let mean = self.collect(group, &mut outcome)?;
            for &parameter in &self.layout.buckets()[group].parameters {
                let agreed = &mut self.agreed[parameter];
                let mean = &mean[0][self.layout.span(parameter)];
                agreed.iter_mut().zip(mean).for_each(|(agreed, mean)| *agreed -= mean);
                weights.set(parameter, agreed);
            }
            self.flights[group] = Flight::Idle(mean);
        }
        Ok(outcome)
    }

    fn abandon(&mut self) {
        self.travel.abandon();
    }

    /// The agreed weights and the momentum of the outer optimizer have been with this group only. Before
    /// the first step they are nothing but the weights that the run begins with.
    fn survives_regroup(&self, step: u64) -> bool {
        step == 0
    }

    /// With streams or a delay, some of the weights are always under way.
    fn has_rounds(&self) -> bool {
        let is_whole = self.schedule.groups() == 1 && self.schedule.delay() == 0;
        is_whole && self.travel.strategy().survives_regroup(u64::MAX)
    }

    /// The momentum of the outer optimizer.
    fn each_shared(&mut self, each: &mut dyn FnMut(&mut [f32])) {
        for parameter in 0..self.agreed.len() {
            self.outer.state_mut(parameter).into_iter().for_each(&mut *each);
        }
    }

    fn agreed(&self, parameter: usize) -> Option<&[f32]> {
        Some(&self.agreed[parameter])
    }

    fn save(&mut self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        self.save_state(group, each)
    }

    fn restore(&mut self, group: &Group, find: &Find<'_>) -> Result<(), SyncError> {
        self.restore_state(group, find)
    }
}

/// From new agreed weights a worker goes on with the progress it made since the submission.
fn go_on(own: &mut [f32], agreed: &[f32], submitted: &[f32]) {
    assert_eq!(own.len(), agreed.len(), "elements of a parameter");
    for ((own, agreed), submitted) in own.iter_mut().zip(agreed).zip(submitted) {
        *own = agreed + (*own - submitted);
    }
}

/// Splits parameters of these lengths into groups of about equal size, in order. None is empty if
/// there are as many parameters as groups.
fn split(lengths: &[usize], groups: usize) -> Vec<Range<usize>> {
    let total: usize = lengths.iter().sum();
    let mut ranges = Vec::with_capacity(groups);
    let (mut start, mut elements) = (0, 0);
    for group in 1..=groups {
        // The others need a parameter each.
        let last = lengths.len().saturating_sub(groups - group);
        let first = (start + 1).min(last);
        let mut end = start;
        // Where the middle of the next parameter is beyond the border, the group ends before it.
        while end < first || end < last && elements + lengths[end] / 2 < total * group / groups {
            elements += lengths[end];
            end += 1;
        }
        ranges.push(start..end);
        start = end;
    }
    // Parameters without elements may be left.
    if let Some(range) = ranges.last_mut() {
        range.end = lengths.len();
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn groups_are_about_equal() {
        assert_eq!(split(&[5, 5, 5, 5], 2), [0..2, 2..4]);
        assert_eq!(split(&[1, 1, 1, 9], 2), [0..3, 3..4]);
        assert_eq!(split(&[9, 1, 1, 1], 3), [0..1, 1..2, 2..4]);
        assert_eq!(split(&[0, 0, 0], 2), [0..1, 1..3]);
        assert_eq!(split(&[], 1), vec![0..0; 1]);
    }

    proptest! {
        #[test]
        fn every_parameter_is_in_one_group(
            lengths in proptest::collection::vec(0usize..50, 1..30),
            groups in 1usize..30,
        ) {
            let groups = groups.min(lengths.len());
            let ranges = split(&lengths, groups);
            prop_assert_eq!(ranges.len(), groups);
            prop_assert!(ranges.iter().all(|range| !range.is_empty()));
            prop_assert!(ranges.into_iter().flatten().eq(0..lengths.len()));
        }

        #[test]
        fn a_group_is_at_most_a_parameter_too_large(
            lengths in proptest::collection::vec(1usize..50, 20..30),
            groups in 1usize..5,
        ) {
            let largest = lengths.iter().max().unwrap();
            let fair = lengths.iter().sum::<usize>() / groups;
            for range in split(&lengths, groups) {
                let elements: usize = lengths[range].iter().sum();
                prop_assert!(elements.abs_diff(fair) <= largest + 1, "{elements} of {fair}");
            }
        }
    }
}
