//! The weights of a server, and how they change.
//!
//! Every piece has a version, the number of its updates. Which update becomes which version is decided
//! elsewhere, in one place; here an update waits for its turn, so that pieces may be updated by many
//! threads at a time and every piece still sees its updates in the order in which they were written
//! down.
//!
//! A piece is a row of *blocks*, small enough for a core's cache, and it is the blocks that updates wait
//! for: as soon as one update has left a block, the next one may enter it. So the updates of several
//! workers to one large piece go on at the same time, each some blocks behind the one before, and none
//! overtakes another. When an update is through, the blocks that it has written are the next version of
//! the piece, and can be read.
//!
//! Readers share the blocks of a version instead of copying them. While a reader has a version, or
//! waits for one, an update leaves it as it is, and writes the next one into other memory. If no reader
//! does, the update withdraws the version and writes into the same memory; a reader that comes then waits
//! for the end of that update. So a read never sees half an update, and no reader, however slow its network,
//! holds an update up. Memory of a version that no reader has any more is written again.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use unisono_optimizer::{Optimizer, OptimizerSpec, WrongState};

use crate::staleness;

/// Elements of a block. Larger: what was copied is no longer in the cache when it is updated, and
/// updates follow each other at a larger distance. Smaller: more locks to take.
const BLOCK: usize = 1 << 14;

/// The weights of one version of a piece.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    blocks: Arc<[Memory]>,
}

/// The weights of one version of a block.
type Memory = Arc<[f32]>;

impl Weights {
    /// The weights, in order, in parts that are each an even number of them but for the last.
    pub fn blocks(&self) -> impl Iterator<Item = &[f32]> {
        self.blocks.iter().map(|block| &**block)
    }

    /// The weights, copied.
    pub fn to_vec(&self) -> Vec<f32> {
        self.blocks().flatten().copied().collect()
    }
}

/// The pieces of a server.
pub struct Store {
    pieces: Vec<Piece>,
    block: usize,
    /// Whether some version will never come.
    is_abandoned: AtomicBool,
}

/// What a thread unwinds with that waits for a version that will never come: silently, for the thread that
/// was to make it has panicked aloud.
pub struct Abandoned;

struct Piece {
    blocks: Vec<Block>,
    newest: Mutex<Newest>,
    changed: Condvar,
}

/// The newest version of which all blocks are there.
struct Newest {
    version: u64,
    /// Not while they are written over.
    weights: Option<Weights>,
    /// Readers that wait.
    waiting: usize,
}

struct Block {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    version: u64,
    weights: Memory,
    /// Memory of older versions, some of which may still be read. As many as were ever read at the
    /// same time.
    older: Vec<Memory>,
    optimizer: Box<dyn Optimizer>,
    /// Updates that wait for their turn.
    waiting: usize,
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
        Store::with_blocks(optimizer, weights, BLOCK)
    }

    /// As [`Store::new`], with blocks of so many elements.
    fn with_blocks(optimizer: &OptimizerSpec, weights: Vec<Vec<f32>>, block: usize) -> Store {
        let pieces = weights.iter().map(|weights| Piece::new(optimizer, weights, block)).collect();
        Store { pieces, block, is_abandoned: AtomicBool::new(false) }
    }

    /// A thread has panicked, and a version will never come: every thread that waits for one, now or
    /// later, unwinds with [`Abandoned`].
    pub fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
        for piece in &self.pieces {
            // A thread that is about to wait has seen it, or is woken.
            drop(piece.newest.lock());
            piece.changed.notify_all();
            for block in &piece.blocks {
                drop(block.state.lock());
                block.changed.notify_all();
            }
        }
    }

    /// The weights of a piece, of this version or a later one; which one. Waits for the version.
    pub fn read(&self, piece: usize, at_least: u64) -> (u64, Weights) {
        self.pieces[piece].read(at_least, &self.is_abandoned)
    }

    /// Makes a version of a piece from the one before, which it follows block by block.
    pub fn apply(&self, piece: usize, version: u64, factor: f64, gradient: &[f32]) {
        let piece = &self.pieces[piece];
        let gradient = gradient.chunks(self.block);
        debug_assert_eq!(piece.blocks.len(), gradient.len(), "a gradient of the whole piece");
        piece.withdraw(version - 1);
        let blocks = piece.blocks.iter().zip(gradient);
        let blocks = blocks
            .map(|(block, gradient)| block.apply(version, factor, gradient, &self.is_abandoned));
        piece.publish(version, Weights { blocks: blocks.collect() });
    }

    /// Corrects the gradient of what will be this version.
    pub fn compensate(&self, piece: usize, version: u64, by: &Compensation, gradient: &mut [f32]) {
        let (_, now) = self.read(piece, version - 1);
        let weights = now.blocks().zip(by.then.blocks());
        for (gradient, (now, then)) in gradient.chunks_mut(self.block).zip(weights) {
            staleness::compensate(by.lambda, gradient, now, then);
        }
    }

    /// Calls `with` with weights, version and optimizer state of a piece. No thread may update
    /// it meanwhile.
    pub fn inspect<T>(&self, piece: usize, with: impl FnOnce(u64, &[f32], &[&[f32]]) -> T) -> T {
        let vectors = self.optimizer_vectors(piece);
        let (version, weights) = self.read(piece, 0);
        let mut optimizer = vec![Vec::new(); vectors];
        for block in &self.pieces[piece].blocks {
            let state = block.lock();
            debug_assert_eq!(state.version, version, "no thread updates it");
            for (all, part) in optimizer.iter_mut().zip(state.optimizer.state(0)) {
                all.extend_from_slice(part);
            }
        }
        let optimizer: Vec<&[f32]> = optimizer.iter().map(Vec::as_slice).collect();
        with(version, &weights.to_vec(), &optimizer)
    }

    /// Puts back what was [inspected](Store::inspect). No thread may update it meanwhile.
    pub fn restore(
        &self,
        piece: usize,
        version: u64,
        weights: &[f32],
        optimizer: &[&[f32]],
    ) -> Result<(), WrongState> {
        let piece = &self.pieces[piece];
        let mut blocks = Vec::with_capacity(piece.blocks.len());
        for (number, (block, weights)) in
            piece.blocks.iter().zip(weights.chunks(self.block)).enumerate()
        {
            let start = number * self.block;
            let end = start + weights.len();
            let parts = optimizer.iter().map(|vector| vector.get(start..end).unwrap_or_default());
            let parts: Vec<&[f32]> = parts.collect();
            let mut state = block.lock();
            state.optimizer.restore(0, &parts)?;
            state.version = version;
            state.weights = weights.into();
            blocks.push(state.weights.clone());
        }
        let mut newest = piece.lock();
        (newest.version, newest.weights) = (version, Some(Weights { blocks: blocks.into() }));
        Ok(())
    }

    /// How many vectors the optimizer keeps of every piece.
    pub fn optimizer_vectors(&self, piece: usize) -> usize {
        let first = self.pieces[piece].blocks.first();
        first.map_or(0, |block| block.lock().optimizer.state_names().len())
    }
}

impl Piece {
    fn new(optimizer: &OptimizerSpec, weights: &[f32], block: usize) -> Piece {
        let new = |weights: &[f32]| Block {
            state: Mutex::new(State {
                version: 0,
                optimizer: optimizer.build(&[weights.len()]).expect("settings were checked"),
                weights: weights.into(),
                older: Vec::new(),
                waiting: 0,
            }),
            changed: Condvar::new(),
        };
        let blocks: Vec<Block> = weights.chunks(block).map(new).collect();
        let weights = blocks.iter().map(|block| block.lock().weights.clone()).collect();
        let weights = Some(Weights { blocks: weights });
        let newest = Newest { version: 0, weights, waiting: 0 };
        Piece { blocks, newest: Mutex::new(newest), changed: Condvar::new() }
    }

    fn read(&self, at_least: u64, is_abandoned: &AtomicBool) -> (u64, Weights) {
        let mut newest = self.lock();
        loop {
            if newest.version >= at_least
                && let Some(weights) = &newest.weights
            {
                return (newest.version, weights.clone());
            }
            newest.waiting += 1;
            newest = wait(&self.changed, newest, is_abandoned);
            newest.waiting -= 1;
        }
    }

    /// Gives up a version, if it is the newest and no reader has it or waits, so that it can be
    /// written over.
    fn withdraw(&self, version: u64) {
        let mut newest = self.lock();
        if newest.version == version && newest.waiting == 0 {
            newest.weights.take_if(|weights| Arc::get_mut(&mut weights.blocks).is_some());
        }
    }

    /// All blocks of a version are there. An update that was faster at the very end may have been here
    /// before; then its version holds this one.
    fn publish(&self, version: u64, weights: Weights) {
        let mut newest = self.lock();
        if newest.version < version {
            (newest.version, newest.weights) = (version, Some(weights));
        }
        let waited_for = newest.waiting > 0;
        drop(newest);
        if waited_for {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Newest> {
        self.newest.lock().unwrap_or_else(|_| give_up())
    }
}

impl Block {
    /// Makes a version from the one before, which it waits for.
    fn apply(
        &self,
        version: u64,
        factor: f64,
        gradient: &[f32],
        is_abandoned: &AtomicBool,
    ) -> Memory {
        let mut state = self.lock();
        while state.version < version - 1 {
            state.waiting += 1;
            state = wait(&self.changed, state, is_abandoned);
            state.waiting -= 1;
        }
        debug_assert_eq!(state.version, version - 1, "one update becomes one version");
        state.update(version, factor, gradient);
        let (weights, waited_for) = (state.weights.clone(), state.waiting > 0);
        drop(state);
        // To wake where no thread waits would be a system call as well, for every block.
        if waited_for {
            self.changed.notify_all();
        }
        weights
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|_| give_up())
    }
}

/// Waits for a change, unless none will come.
fn wait<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    is_abandoned: &AtomicBool,
) -> MutexGuard<'a, T> {
    if is_abandoned.load(Ordering::Acquire) {
        drop(guard);
        give_up();
    }
    changed.wait(guard).unwrap_or_else(|_| give_up())
}

/// Ends a thread that can do nothing any more, because another has panicked.
fn give_up() -> ! {
    resume_unwind(Box::new(Abandoned))
}

impl State {
    fn update(&mut self, version: u64, factor: f64, gradient: &[f32]) {
        if Arc::get_mut(&mut self.weights).is_none() {
            let next = self.copy();
            self.older.push(std::mem::replace(&mut self.weights, next));
        }
        let weights = Arc::get_mut(&mut self.weights).expect("no reader has it");
        self.optimizer.update_scaled(0, version, factor, weights, gradient);
        self.version = version;
    }

    /// The weights, in memory that no reader has any more, or else in new memory.
    fn copy(&mut self) -> Memory {
        let unread = self.older.iter_mut().rposition(|memory| Arc::get_mut(memory).is_some());
        let Some(unread) = unread else { return self.weights.as_ref().into() };
        let mut memory = self.older.swap_remove(unread);
        Arc::get_mut(&mut memory).expect("no reader has it").copy_from_slice(&self.weights);
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono_optimizer::LearningRate;

    /// Of a few elements per block, so that a piece has several.
    fn store(optimizer: &str, weights: Vec<Vec<f32>>) -> Store {
        let spec = optimizer.parse::<OptimizerSpec>().unwrap();
        Store::with_blocks(&spec.with_learning_rate(LearningRate::Constant(1.0)), weights, 4)
    }

    #[test]
    fn a_reader_keeps_its_version() {
        let store = store("sgd", vec![vec![0.0; 6]]);
        let (version, before) = store.read(0, 0);
        store.apply(0, 1, 1.0, &[1.0; 6]);
        store.apply(0, 2, 0.5, &[1.0; 6]);
        assert_eq!((version, before.to_vec()), (0, vec![0.0; 6]));
        let (version, after) = store.read(0, 2);
        assert_eq!((version, after.to_vec()), (2, vec![-1.5; 6]));
        assert_eq!(after.blocks().map(<[f32]>::len).collect::<Vec<_>>(), [4, 2]);
    }

    #[test]
    fn memory_is_written_again_when_no_reader_has_it() {
        let store = store("sgd", vec![vec![0.0; 6]]);
        let places = |weights: &Weights| -> Vec<*const f32> {
            weights.blocks().map(<[f32]>::as_ptr).collect()
        };
        let first = places(&store.read(0, 0).1);
        store.apply(0, 1, 1.0, &[1.0; 6]);
        let kept = store.read(0, 1).1;
        assert_eq!(places(&kept), first, "no reader had it");

        store.apply(0, 2, 1.0, &[1.0; 6]);
        let other = places(&store.read(0, 2).1);
        store.apply(0, 3, 1.0, &[1.0; 6]);
        assert_eq!(places(&store.read(0, 3).1), other, "no reader had that");
        assert_eq!(kept.to_vec(), [-1.0; 6]);
        drop(kept);
        let also_kept = store.read(0, 3).1;
        store.apply(0, 4, 1.0, &[1.0; 6]);
        assert_eq!(places(&store.read(0, 4).1), first, "no reader has it any more");
        assert_eq!(also_kept.to_vec(), [-3.0; 6]);
        assert_eq!(store.read(0, 4).1.to_vec(), [-4.0; 6]);
    }

    #[test]
    fn updates_wait_for_their_turn_and_readers_for_their_version() {
        let store = store("sgd", vec![vec![0.0; 10], vec![0.0; 2]]);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| store.read(0, 40).0);
            for half in [1u64, 0] {
                let store = &store;
                scope.spawn(move || {
                    for version in (1..=40).filter(|version| version % 2 == half) {
                        store.apply(0, version, 1.0, &[version as f32; 10]);
                    }
                });
            }
            assert_eq!(reader.join().unwrap(), 40);
        });
        assert_eq!(store.read(0, 40).1.to_vec(), [-820.0; 10]);
        assert_eq!(store.read(1, 0).0, 0);
    }

    #[test]
    fn no_reader_sees_half_an_update() {
        const WRITERS: u64 = 3;
        let store = store("sgd", vec![vec![0.0; 1001]]);
        std::thread::scope(|scope| {
            let write = |writer: u64| {
                for version in (1..=600).filter(|version| version % WRITERS == writer) {
                    store.apply(0, version, 1.0, &[1.0; 1001]);
                }
            };
            let spawn = |writer| scope.spawn(move || write(writer));
            let writers: Vec<_> = (0..WRITERS).map(spawn).collect();
            while !writers.iter().all(|writer| writer.is_finished()) {
                let (version, weights) = store.read(0, 0);
                assert!(weights.blocks().flatten().all(|weight| *weight == -(version as f32)));
            }
        });
        assert_eq!(store.read(0, 600).1.to_vec(), [-600.0; 1001]);
    }

    #[test]
    fn blocks_change_no_bit() {
        let values = |seed: u32| -> Vec<f32> {
            (0..23u32).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 7.0 - 5.0).collect()
        };
        for optimizer in OptimizerSpec::NAMES {
            let spec = optimizer.parse::<OptimizerSpec>().unwrap();
            let mut whole = spec.build(&[23]).unwrap();
            let mut expected = values(0);
            let store = Store::with_blocks(&spec, vec![values(0)], 4);
            let resumed = Store::with_blocks(&spec, vec![vec![0.0; 23]], 4);
            for version in 1..=9u64 {
                let gradient = values(version as u32);
                whole.update_scaled(0, version, 0.5, &mut expected, &gradient);
                let by = if version > 5 { &resumed } else { &store };
                by.apply(0, version, 0.5, &gradient);
                if version == 5 {
                    store.inspect(0, |version, weights, optimizer| {
                        resumed.restore(0, version, weights, optimizer).unwrap();
                    });
                }
            }
            assert_eq!(resumed.read(0, 9).1.to_vec(), expected, "{optimizer}");
            let state = |_, _: &[f32], all: &[&[f32]]| all.iter().map(|v| v.to_vec()).collect();
            let state: Vec<Vec<f32>> = resumed.inspect(0, state);
            assert_eq!(state, whole.state(0), "{optimizer}");
        }
    }

    #[test]
    fn a_gradient_is_compensated_by_what_has_changed_since() {
        let store = store("sgd", vec![vec![0.0; 6]]);
        let by = Compensation { lambda: 1.0, then: store.read(0, 0).1 };
        store.apply(0, 1, 1.0, &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
        let mut gradient = [1.0; 6];
        store.compensate(0, 2, &by, &mut gradient);
        assert_eq!(gradient, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    }

    #[test]
    fn a_piece_may_be_empty() {
        let store = store("adamw", vec![Vec::new()]);
        store.apply(0, 1, 1.0, &[]);
        assert_eq!(store.read(0, 1), (1, Weights { blocks: [].into() }));
        store.inspect(0, |version, weights, _| assert_eq!((version, weights), (1, &[][..])));
    }
}
