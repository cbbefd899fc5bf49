//! The weights of a shard, and how they change.
//!
//! Every piece has a version, the number of its updates. Which update becomes which version is decided
//! elsewhere, in one place; here an update waits for its turn, so that pieces may be updated by many
//! threads at a time and every piece still sees its updates in the order in which they were written
//! down.
//!
//! Readers share the weights of a version instead of copying them. While somebody reads, an update
//! writes the next version into other memory; if nobody does, into the same. So a read never sees
//! half an update, and no reader, however slow its network, holds an update up.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use unisono_sync::optimizer::{Optimizer, OptimizerSpec, WrongState};

use crate::stale;

/// The weights of one version of a piece.
pub type Weights = Arc<Vec<f32>>;

/// The pieces of a shard.
pub struct Store {
    pieces: Vec<Piece>,
}

struct Piece {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    version: u64,
    weights: Weights,
    /// Memory of an older version that nobody reads any more.
    spare: Option<Weights>,
    optimizer: Box<dyn Optimizer>,
}

/// Corrects a gradient for what has happened to the weights since they were read.
#[derive(Clone)]
pub struct Compensation {
    /// How strongly.
    pub lambda: f32,
    /// The weights that the gradient was computed from.
    pub then: Weights,
}

impl Store {
    /// With these weights, all of version 0.
    ///
    /// # Panics
    /// If the optimizer's settings were not checked.
    pub fn new(optimizer: &OptimizerSpec, weights: Vec<Vec<f32>>) -> Store {
        let piece = |weights: Vec<f32>| Piece {
            state: Mutex::new(State {
                version: 0,
                optimizer: optimizer.build(&[weights.len()]).expect("settings were checked"),
                weights: Arc::new(weights),
                spare: None,
            }),
            changed: Condvar::new(),
        };
        Store { pieces: weights.into_iter().map(piece).collect() }
    }

    /// How many pieces there are.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The weights of a piece, of this version or a later one; which one. Waits for the version.
    pub fn read(&self, piece: usize, at_least: u64) -> (u64, Weights) {
        let state = self.wait(piece, at_least);
        (state.version, state.weights.clone())
    }

    /// Makes a version of a piece from the one before, which it waits for.
    pub fn apply(&self, piece: usize, version: u64, factor: f64, gradient: &[f32]) {
        let mut state = self.wait(piece, version - 1);
        debug_assert_eq!(state.version, version - 1, "one update becomes one version");
        state.update(version, factor, gradient);
        drop(state);
        self.pieces[piece].changed.notify_all();
    }

    /// Corrects the gradient of what will be this version.
    pub fn compensate(&self, piece: usize, version: u64, by: &Compensation, gradient: &mut [f32]) {
        let state = self.wait(piece, version - 1);
        stale::compensate(by.lambda, gradient, &state.weights, &by.then);
    }

    /// Calls `with` with weights, version and optimizer state of a piece.
    pub fn inspect<T>(&self, piece: usize, with: impl FnOnce(u64, &[f32], &[&[f32]]) -> T) -> T {
        let state = self.lock(piece);
        with(state.version, &state.weights, &state.optimizer.state(0))
    }

    /// Puts back what was [inspected](Store::inspect).
    pub fn restore(
        &self,
        piece: usize,
        version: u64,
        weights: &[f32],
        optimizer: &[&[f32]],
    ) -> Result<(), WrongState> {
        let mut state = self.lock(piece);
        state.optimizer.restore(0, optimizer)?;
        state.version = version;
        state.weights = Arc::new(weights.to_vec());
        Ok(())
    }

    /// How many vectors the optimizer keeps of every piece.
    pub fn optimizer_vectors(&self, piece: usize) -> usize {
        self.lock(piece).optimizer.state_names().len()
    }

    fn wait(&self, piece: usize, version: u64) -> MutexGuard<'_, State> {
        let too_old = |state: &mut State| state.version < version;
        let changed = &self.pieces[piece].changed;
        changed.wait_while(self.lock(piece), too_old).expect("no panic while locked")
    }

    fn lock(&self, piece: usize) -> MutexGuard<'_, State> {
        self.pieces[piece].state.lock().expect("no panic while locked")
    }
}

impl State {
    fn update(&mut self, version: u64, factor: f64, gradient: &[f32]) {
        if Arc::get_mut(&mut self.weights).is_none() {
            // Somebody reads this version: the next one is written elsewhere.
            let spare = self.spare.take().filter(|spare| Arc::strong_count(spare) == 1);
            let mut next = match spare {
                Some(mut spare) => {
                    let memory = Arc::get_mut(&mut spare).expect("it is the only one");
                    memory.copy_from_slice(&self.weights);
                    spare
                }
                None => Arc::new(self.weights.to_vec()),
            };
            std::mem::swap(&mut self.weights, &mut next);
            self.spare = Some(next);
        }
        let weights = Arc::get_mut(&mut self.weights).expect("nobody else has it");
        self.optimizer.update_scaled(0, version, factor, weights, gradient);
        self.version = version;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(weights: Vec<Vec<f32>>) -> Store {
        let spec = "sgd".parse::<OptimizerSpec>().unwrap();
        let rate = unisono_sync::optimizer::LearningRate::Constant(1.0);
        Store::new(&spec.with_learning_rate(rate), weights)
    }

    #[test]
    fn a_reader_keeps_its_version() {
        let store = store(vec![vec![0.0; 4]]);
        let (version, before) = store.read(0, 0);
        store.apply(0, 1, 1.0, &[1.0; 4]);
        store.apply(0, 2, 0.5, &[1.0; 4]);
        assert_eq!((version, before.as_slice()), (0, &[0.0; 4][..]));
        assert_eq!(store.read(0, 2), (2, Arc::new(vec![-1.5; 4])));
    }

    #[test]
    fn updates_wait_for_their_turn_and_readers_for_their_version() {
        let store = store(vec![vec![0.0; 2], vec![0.0; 2]]);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| store.read(0, 40).0);
            for half in [1u64, 0] {
                let store = &store;
                scope.spawn(move || {
                    for version in (1..=40).filter(|version| version % 2 == half) {
                        store.apply(0, version, 1.0, &[version as f32; 2]);
                    }
                });
            }
            assert_eq!(reader.join().unwrap(), 40);
        });
        assert_eq!(store.read(0, 40).1.as_slice(), &[-820.0; 2]);
        assert_eq!(store.read(1, 0).0, 0);
    }

    #[test]
    fn no_reader_sees_half_an_update() {
        let store = store(vec![vec![0.0; 4096]]);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (1..=500).for_each(|version| store.apply(0, version, 1.0, &[1.0; 4096]))
            });
            while !writer.is_finished() {
                let (version, weights) = store.read(0, 0);
                assert!(weights.iter().all(|weight| *weight == -(version as f32)));
            }
        });
    }
}
