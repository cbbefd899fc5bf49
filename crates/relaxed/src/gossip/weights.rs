//! The replica of one worker: training, exchanges and fetches all reach for it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

use super::error::GossipError;
use super::merge;
use super::wire::Shape;

/// The weights, under one lock for each parameter: no thread sees half a change of a parameter, and
/// training waits for an exchange no longer than one parameter takes to add.
pub struct Weights {
    parameters: Vec<Mutex<Vec<f32>>>,
    lengths: Vec<usize>,
}

impl Weights {
    pub fn new(initial: Vec<Vec<f32>>) -> Weights {
        let lengths = initial.iter().map(Vec::len).collect();
        Weights { parameters: initial.into_iter().map(Mutex::new).collect(), lengths }
    }

    /// Weights of all parameters together.
    pub fn elements(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// What two workers must have in common to exchange weights.
    pub fn shape(&self) -> Shape {
        let lengths: Vec<u8> =
            self.lengths.iter().flat_map(|&length| (length as u64).to_le_bytes()).collect();
        Shape { model: xxh3_64(&lengths), elements: self.elements() as u64 }
    }

    pub fn read(&self, parameter: usize, into: &mut [f32]) -> Result<(), GossipError> {
        self.check(parameter, into.len())?;
        into.copy_from_slice(&lock(&self.parameters[parameter]));
        Ok(())
    }

    /// Whether a change of `length` weights fits a parameter.
    pub fn check(&self, parameter: usize, length: usize) -> Result<(), GossipError> {
        match self.lengths.get(parameter) {
            None => Err(GossipError::NoParameter { parameter, parameters: self.lengths.len() }),
            Some(&expected) if expected != length => {
                Err(GossipError::Length { parameter, expected, given: length })
            }
            Some(_) => Ok(()),
        }
    }

    pub fn parameters(&self) -> usize {
        self.lengths.len()
    }

    /// Lets `change` work on the parameters, one after the other.
    pub fn update(&self, mut change: impl FnMut(usize, &mut [f32])) {
        for (index, parameter) in self.parameters.iter().enumerate() {
            change(index, &mut lock(parameter));
        }
    }

    /// Copies all weights into `into`, which holds as many.
    pub fn snapshot(&self, into: &mut [f32]) {
        self.each(into, |own, copy| copy.copy_from_slice(own));
    }

    /// Takes over the weights of another worker.
    pub fn replace(&self, with: &mut [f32]) {
        self.each(with, |own, new| own.copy_from_slice(new));
    }

    /// [`merge::meet`] for all parameters.
    pub fn meet(&self, theirs: &mut [f32]) -> f64 {
        let mut squares = 0.0;
        self.each(theirs, |own, theirs| squares += merge::meet(own, theirs));
        squares
    }

    /// [`merge::follow`] for all parameters.
    pub fn follow(&self, half: &mut [f32]) {
        self.each(half, |own, half| merge::follow(own, half));
    }

    fn each(&self, mut flat: &mut [f32], mut visit: impl FnMut(&mut [f32], &mut [f32])) {
        for (parameter, &length) in self.parameters.iter().zip(&self.lengths) {
            let (here, rest) = flat.split_at_mut(length);
            visit(&mut lock(parameter), here);
            flat = rest;
        }
    }
}

/// Nothing panics under these locks but a caller's own change of its weights, which is its to mend.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
