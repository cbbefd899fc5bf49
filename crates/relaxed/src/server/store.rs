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
//! What a block needs of a gradient is made (`source`) when the block is updated, so that the update is one pass over
//! memory. And since blocks know nothing of each other, several threads may make one version, each some of its
//! blocks; no bit depends on which. The thread that made the last one publishes the version.
//!
//! Readers share the blocks of a version instead of copying them. While a reader has a version, or
//! waits for one, an update leaves it as it is, and writes the next one into other memory. If no reader
//! does, the update withdraws the version and writes into the same memory; a reader that comes then waits
//! for the end of that update. So a read never sees half an update, and no reader, however slow its network,
//! holds an update up. Memory of a version that no reader has any more is written again.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once};

use unisono_optimizer::{Optimizer, OptimizerSpec, WrongState};

use super::source::{Room, Source};
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

/// What becomes the next version of a piece.
pub struct Change<'a> {
    /// Which piece.
    pub piece: usize,
    /// The version that it will be.
    pub version: u64,
    /// A gradient of the whole piece.
    pub source: Source<'a>,
    /// What the gradient is corrected for, if that is not done yet.
    pub by: Option<Compensation>,
}

/// A version of a piece that several threads make.
struct Making<'a> {
    change: &'a Change<'a>,
    begun: Once,
    /// Empty again when it is published: what overlaps must find no block in two places, or it would copy it.
    made: Vec<Mutex<Option<Memory>>>,
    /// Blocks that are not made yet.
    left: AtomicUsize,
}

/// Blocks that a thread takes at a time of a version that several make. More: less for helpers that come late. Fewer:
/// memory is read in shorter runs, which the CPU sees coming later.
const TAKEN: usize = 2;

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

    /// Makes versions of pieces, each from the one before, which it follows block by block.
    pub fn apply(&self, factor: f64, changes: &[Change<'_>]) {
        let mut room = Room::default();
        for change in changes {
            let piece = &self.pieces[change.piece];
            piece.withdraw(change.version - 1);
            let blocks = (0..self.blocks(change))
                .map(|block| self.make_block(factor, change, block, &mut room));
            let weights = Weights { blocks: blocks.collect() };
            piece.publish(change.version, weights);
        }
    }

    /// As [`Store::apply`], by several threads: `share` lets any number of them call what it is given.
    ///
    /// A thread that has taken a block may have to wait for the version before. It does not wait in vain: blocks are taken in
    /// the order of the changes, and versions are given out in one order for all pieces, so that of all threads that
    /// have taken a block those of the earliest push wait for none.
    pub fn apply_shared(
        &self,
        factor: f64,
        changes: &[Change<'_>],
        share: impl FnOnce(&(dyn Fn() + Sync)),
    ) {
        let mut ends = Vec::with_capacity(changes.len());
        let mut all = 0;
        let mut makings = Vec::with_capacity(changes.len());
        for change in changes {
            let blocks = self.blocks(change);
            all += blocks;
            ends.push(all);
            let made = (0..blocks).map(|_| Mutex::default()).collect();
            makings.push(Making {
                change,
                begun: Once::new(),
                made,
                left: AtomicUsize::new(blocks),
            });
            if blocks == 0 {
                self.apply(factor, std::slice::from_ref(change));
            }
        }
        let next = AtomicUsize::new(0);
        share(&|| {
            let mut room = Room::default();
            loop {
                let first = next.fetch_add(TAKEN, Ordering::Relaxed);
                if first >= all {
                    return;
                }
                for number in first..all.min(first + TAKEN) {
                    let change = ends.partition_point(|end| *end <= number);
                    let making = &makings[change];
                    let block = number - (ends[change] - making.made.len());
                    self.make(factor, making, block, &mut room);
                }
            }
        });
    }

    /// Makes a block of a version that several threads make, and publishes the version if it was the last.
    fn make(&self, factor: f64, making: &Making<'_>, block: usize, room: &mut Room) {
        let Making { change, begun, made, left } = making;
        let piece = &self.pieces[change.piece];
        begun.call_once(|| piece.withdraw(change.version - 1));
        let memory = self.make_block(factor, change, block, room);
        let lock = |block: usize| made[block].lock().unwrap_or_else(|_| give_up());
        let before = lock(block).replace(memory);
        debug_assert!(before.is_none(), "a block is taken once");
        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let all = (0..made.len()).map(|block| lock(block).take().expect("none is left"));
            piece.publish(change.version, Weights { blocks: all.collect() });
        }
    }

    fn make_block(
        &self,
        factor: f64,
        change: &Change<'_>,
        number: usize,
        room: &mut Room,
    ) -> Memory {
        let start = number * self.block;
        let span = start..(start + self.block).min(change.source.len());
        let block = &self.pieces[change.piece].blocks[number];
        block.apply(factor, change, (number, span), room, &self.is_abandoned)
    }

    fn blocks(&self, change: &Change<'_>) -> usize {
        let blocks = self.pieces[change.piece].blocks.len();
        let needed = change.source.len().div_ceil(self.block);
        debug_assert_eq!(blocks, needed, "a gradient of the whole piece");
        blocks
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

/// What a block needs of a gradient.
enum Ready<'a> {
    AsItIs(&'a [f32]),
    ToCorrect(&'a mut [f32], &'a Compensation),
}

impl Block {
    /// Makes a version from the one before, which it waits for. The block has a number and a span in its piece.
    fn apply(
        &self,
        factor: f64,
        change: &Change<'_>,
        (number, span): (usize, Range<usize>),
        room: &mut Room,
        is_abandoned: &AtomicBool,
    ) -> Memory {
        let Change { version, source, by, .. } = change;
        let version = *version;
        // While the version before may still be made.
        let gradient = match by {
            None => Ready::AsItIs(source.part(span, room)),
            Some(by) => Ready::ToCorrect(source.copy(span, room), by),
        };
        let mut state = self.lock();
        while state.version < version - 1 {
            state.waiting += 1;
            state = wait(&self.changed, state, is_abandoned);
            state.waiting -= 1;
        }
        debug_assert_eq!(state.version, version - 1, "one update becomes one version");
        let gradient = match gradient {
            Ready::AsItIs(gradient) => gradient,
            Ready::ToCorrect(gradient, by) => {
                let then = &by.then.blocks[number];
                staleness::compensate(by.lambda, gradient, &state.weights, then);
                gradient
            }
        };
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
impl Store {
    /// Makes a version of a piece.
    fn apply_one(&self, piece: usize, version: u64, factor: f64, gradient: &[f32]) {
        self.apply(factor, &[Change { piece, version, source: gradient.into(), by: None }]);
    }
}

#[cfg(test)]
mod tests;
