//! How many updates each thread has made.
//!
//! One counter for all would be a cache line that every update of every thread must own: with many
//! threads and small updates, the one thing they all wait for. So each thread counts its own updates,
//! in a cache line of its own, and a thread that wants the sum adds up. To count costs an access to a line
//! that is already there; to add up costs a miss per thread, and another for each of them at its next
//! count. A training step can afford that twice; loops of updates that take less than a microsecond
//! should add up only now and then.
//!
//! A thread counts an update after it has made it, with `Release`, and sums are read with `Acquire`.
//! So an update that is in a sum is in everything that is read afterwards: a thread that takes the
//! sum, reads the weights, computes, and takes the sum again finds in the difference every finished
//! update that its reading can have missed. Those that its reading saw although they were not counted
//! yet are in the difference too: the delay is never less than it was, and more by at most what was
//! under way.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::atomic::Tally;
use crate::Clock;

/// The updates of every thread: its clock. All together, they are the version of the weights.
#[derive(Debug)]
pub struct Clocks {
    clocks: Box<[Padded<AtomicU64>]>,
}

impl Clocks {
    /// Clocks of so many threads, at 0.
    pub fn new(threads: usize) -> Clocks {
        Clocks { clocks: (0..threads).map(|_| Padded(AtomicU64::new(0))).collect() }
    }

    /// Counts an update that `thread` has made.
    #[inline]
    pub fn tick(&self, thread: usize) {
        tick(&self.clocks[thread]);
    }

    /// The updates of one thread.
    pub fn of(&self, thread: usize) -> Clock {
        Clock(self.clocks[thread].0.load(Acquire))
    }

    /// The updates of all threads.
    pub fn total(&self) -> u64 {
        sum(&self.clocks)
    }

    /// The updates of all threads but one. For that one they never become fewer.
    pub fn of_others(&self, thread: usize) -> u64 {
        let (before, after) = self.clocks.split_at(thread);
        sum(before) + sum(&after[1..])
    }

    /// The updates of the thread that has made the fewest.
    pub fn slowest(&self) -> Clock {
        Clock(self.clocks.iter().map(|clock| clock.0.load(Acquire)).min().unwrap_or(0))
    }
}

/// Keeps a number to its own cache lines: two, for processors fetch them in pairs. Smaller, and
/// neighbours slow each other down; larger, and there is nothing to gain.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Padded<T>(pub(super) T);

#[inline]
pub(super) fn tick(clock: &Padded<impl Tally>) {
    clock.0.fetch_add(1, Release);
}

pub(super) fn sum(clocks: &[Padded<impl Tally>]) -> u64 {
    clocks.iter().map(|clock| clock.0.load(Acquire)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_counted_apart() {
        let clocks = Clocks::new(3);
        for thread in [0, 2, 2, 1, 2] {
            clocks.tick(thread);
        }
        assert_eq!([0, 1, 2].map(|thread| clocks.of(thread).0), [1, 1, 3]);
        assert_eq!([0, 1, 2].map(|thread| clocks.of_others(thread)), [4, 4, 2]);
        assert_eq!((clocks.total(), clocks.slowest()), (5, Clock(1)));
        assert_eq!(size_of_val(&*clocks.clocks), 3 * 128);
    }

    #[test]
    fn one_thread_has_no_others() {
        let clocks = Clocks::new(1);
        clocks.tick(0);
        assert_eq!((clocks.of_others(0), clocks.slowest()), (0, Clock(1)));
    }
}
