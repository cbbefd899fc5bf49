//! What local steps remember, and how it is saved.
//!
//! A checkpoint may be taken after any step, also while pseudo-gradients are under way. Saving waits
//! for them and keeps the means, so that the run applies them at the step at which they are due, and
//! so does one that is resumed. The agreed weights (`agreed.PARAMETER`), the momentum of the outer
//! optimizer (`outer.PARAMETER`) and the means (`flight.PARAMETER`, with the numbers that travelled
//! with a group under the name of its first parameter, `numbers.PARAMETER`) are equal everywhere.
//! The weights that a worker had when it submitted a mean that is not yet applied are its own
//! (`submitted.WORKER.PARAMETER`); therefore such a run goes on with as many workers.
//!
//! The weights of the workers and the state of their inner optimizers are not ours to save.

use unisono_collective::Group;

use super::{Flight, LocalSteps, REGROUP};
use crate::error::SyncError;
use crate::strategy::{Find, Save};

/// The numbers of a group that are saved: not the votes for a change of members, for a run that is
/// resumed has others.
const SAVED: usize = REGROUP;

impl LocalSteps {
    /// As [`Strategy::save`](crate::strategy::Strategy::save).
    pub(super) fn save_state(
        &mut self,
        group: &Group,
        each: &mut Save<'_>,
    ) -> Result<(), SyncError> {
        for bucket in 0..self.flights.len() {
            self.wait_for(bucket)?;
        }
        self.travel.strategy().save(group, each)?;
        let is_first = group.rank() == 0;
        for (parameter, name) in self.names.iter().enumerate() {
            if is_first {
                each(format!("agreed.{name}"), parameter, &self.agreed[parameter]);
                for state in self.outer.state(parameter) {
                    each(format!("outer.{name}"), parameter, state);
                }
            }
        }
        for (flight, bucket) in self.flights.iter().zip(self.layout.buckets()) {
            let Flight::Back(mean, _) = flight else { continue };
            for (i, &parameter) in bucket.parameters.iter().enumerate() {
                let name = &self.names[parameter];
                if is_first && i == 0 {
                    let numbers = &mean[0][bucket.scalars.clone()][..SAVED];
                    each(format!("numbers.{name}"), parameter, numbers);
                }
                if is_first {
                    let mean = &mean[0][self.layout.span(parameter)];
                    each(format!("flight.{name}"), parameter, mean);
                }
                let own = &self.submitted[parameter];
                let mut all = vec![0.0; if is_first { own.len() * self.workers } else { 0 }];
                group.gather(own, is_first.then_some(&mut all[..]), 0)?;
                for worker in 0..if is_first { self.workers } else { 0 } {
                    let values = &all[worker * own.len()..][..own.len()];
                    each(submitted(worker, name), parameter, values);
                }
            }
        }
        Ok(())
    }

    /// As [`Strategy::restore`](crate::strategy::Strategy::restore), before the first step.
    pub(super) fn restore_state(
        &mut self,
        group: &Group,
        find: &Find<'_>,
    ) -> Result<(), SyncError> {
        self.travel.strategy().restore(group, find)?;
        for (parameter, name) in self.names.iter().enumerate() {
            require(group, find, &format!("agreed.{name}"), &mut self.agreed[parameter])?;
            let state = self.outer.state(parameter);
            let mut state: Vec<Vec<f32>> = state.into_iter().map(<[f32]>::to_vec).collect();
            for vector in &mut state {
                require(group, find, &format!("outer.{name}"), vector)?;
            }
            let state: Vec<&[f32]> = state.iter().map(Vec::as_slice).collect();
            self.outer.restore(parameter, &state).expect("it has the lengths it had");
        }
        if self.schedule.delay() == 0 {
            // Nothing is under way after a step.
            return Ok(());
        }
        for (flight, bucket) in self.flights.iter_mut().zip(self.layout.buckets()) {
            let mut mean = vec![0.0; bucket.len];
            let Some(&first) = bucket.parameters.first() else { continue };
            let name = format!("numbers.{}", self.names[first]);
            let numbers = &mut mean[bucket.scalars.clone()][..SAVED];
            if !spread(group, find, &name, numbers)? {
                *flight = Flight::Idle(vec![mean.into()]);
                continue;
            }
            for &parameter in &bucket.parameters {
                let name = &self.names[parameter];
                let mean = &mut mean[self.layout.span(parameter)];
                require(group, find, &format!("flight.{name}"), mean)?;
                let own = &mut self.submitted[parameter];
                deal(group, find, &|worker| submitted(worker, name), own)?;
            }
            *flight = Flight::Back(vec![mean.into()], None);
        }
        Ok(())
    }
}

/// The name of the weights of a parameter that a worker had when it submitted them.
fn submitted(worker: usize, parameter: &str) -> String {
    format!("submitted.{worker}.{parameter}")
}

/// Gives all ranks the vector that rank 0 finds by a name.
fn require(
    group: &Group,
    find: &Find<'_>,
    name: &str,
    values: &mut [f32],
) -> Result<(), SyncError> {
    match spread(group, find, name, values)? {
        true => Ok(()),
        false => Err(SyncError::MissingState { name: name.to_owned() }),
    }
}

/// As [`require`], if there is one, which all ranks are told.
fn spread(
    group: &Group,
    find: &Find<'_>,
    name: &str,
    values: &mut [f32],
) -> Result<bool, SyncError> {
    let found = if group.rank() == 0 { find(name) } else { None };
    let mut elements = [found.as_ref().map_or(-1, |found| found.len() as i64)];
    group.broadcast(&mut elements, 0)?;
    if elements[0] < 0 {
        return Ok(false);
    }
    if elements[0] != values.len() as i64 {
        return Err(SyncError::MissingState { name: name.to_owned() });
    }
    if let Some(found) = found {
        values.copy_from_slice(&found);
    }
    group.broadcast(values, 0)?;
    Ok(true)
}

/// Gives every rank the vector that rank 0 finds by the rank's name. If there were fewer workers, some
/// get that of another, where they begin as well.
fn deal(
    group: &Group,
    find: &Find<'_>,
    name: &dyn Fn(usize) -> String,
    values: &mut [f32],
) -> Result<(), SyncError> {
    let (is_first, length) = (group.rank() == 0, values.len());
    let mut all = Vec::new();
    if is_first {
        let found = |worker| find(&name(worker)).filter(|found| found.len() == length);
        let saved: Vec<Vec<f32>> = (0..group.size()).map_while(found).collect();
        all.extend(saved.iter().cycle().take(group.size()).flatten());
    }
    let mut is_found = [u8::from(!all.is_empty() || length == 0)];
    group.broadcast(&mut is_found, 0)?;
    if is_found[0] == 0 {
        return Err(SyncError::MissingState { name: name(0) });
    }
    Ok(group.scatter(is_first.then_some(&all[..]), values, 0)?)
}
