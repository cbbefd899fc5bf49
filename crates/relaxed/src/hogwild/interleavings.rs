//! The loops of this module under every interleaving, and every value that the memory model lets a
//! relaxed read see, as `loom` explores them. Each program is also run with one promise broken, to
//! show that the exploration notices.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::thread;

use super::atomic::{Tally, Word};
use super::clocks::{Padded, sum, tick};
use super::weights::{update, update_sparse};

/// What a program ends with, in all its executions.
fn outcomes<T: Debug + Ord + Send + 'static>(
    program: impl Fn() -> T + Send + Sync + 'static,
) -> BTreeSet<T> {
    let seen = std::sync::Arc::new(Mutex::new((BTreeSet::new(), 0)));
    let collected = std::sync::Arc::clone(&seen);
    loom::model(move || {
        let outcome = program();
        let mut seen = seen.lock().unwrap();
        seen.0.insert(outcome);
        seen.1 += 1;
    });
    let mut collected = collected.lock().unwrap();
    assert!(collected.1 > 1, "there was one execution: nothing was explored");
    std::mem::take(&mut collected.0)
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn compare_exchange_weak(
        &self,
        current: u32,
        new: u32,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u32, u32> {
        self.compare_exchange_weak(current, new, success, failure)
    }
}

impl Tally for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn fetch_add(&self, more: u64, order: Ordering) -> u64 {
        self.fetch_add(more, order)
    }
}

/// A word that is read and then written, whatever happened in between.
struct Overwritten(AtomicU32);

impl Word for Overwritten {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn compare_exchange_weak(
        &self,
        current: u32,
        new: u32,
        success: Ordering,
        _: Ordering,
    ) -> Result<u32, u32> {
        self.0.store(new, success);
        Ok(current)
    }
}

/// A number that orders nothing but itself.
struct Unordered(AtomicU64);

impl Tally for Unordered {
    fn load(&self, _: Ordering) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn fetch_add(&self, more: u64, _: Ordering) -> u64 {
        self.0.fetch_add(more, Ordering::Relaxed)
    }
}

/// One thread updates both elements, the other the first one once and the second one twice.
fn overlapping_updates<W: Word + Send + Sync + 'static>(
    word: impl Fn(u32) -> W + Send + Sync + 'static,
) -> BTreeSet<[i32; 2]> {
    outcomes(move || {
        let words = Arc::new([10.0f32, 20.0].map(|value| word(value.to_bits())));
        let other = {
            let words = Arc::clone(&words);
            thread::spawn(move || update(&*words, &[1.0, 2.0], 0.5))
        };
        update_sparse(&*words, &[1, 0, 1], &[4.0, 8.0, 16.0], 0.5);
        other.join().unwrap();
        words.each_ref().map(|word| (f32::from_bits(word.load(Ordering::Relaxed)) * 2.0) as i32)
    })
}

#[test]
fn no_interleaving_loses_an_update() {
    assert_eq!(overlapping_updates(AtomicU32::new), BTreeSet::from([[20 - 9, 40 - 22]]));
}

#[test]
fn a_plain_store_would_lose_one() {
    let outcomes = overlapping_updates(|bits| Overwritten(AtomicU32::new(bits)));
    assert!(outcomes.contains(&[20 - 9, 40 - 22]), "{outcomes:?}");
    for lost in [[20 - 8, 40 - 22], [20 - 1, 40 - 22], [20 - 9, 40 - 20], [20 - 9, 40 - 2]] {
        assert!(outcomes.contains(&lost), "{lost:?} is none of {outcomes:?}");
    }
}

/// One thread updates and counts; the other takes the sum, and then reads. Returns the sum it took,
/// and whether it saw the update.
fn counted_update<T: Tally + Send + Sync + 'static>(
    tally: impl Fn(u64) -> T + Send + Sync + 'static,
) -> BTreeSet<(u64, bool)> {
    outcomes(move || {
        let shared = Arc::new(([AtomicU32::new(0)], [Padded(tally(0)), Padded(tally(0))]));
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                update(&shared.0, &[1.0], 1.0);
                tick(&shared.1[1]);
            })
        };
        let counted = sum(&shared.1);
        let seen = shared.0[0].load(Ordering::Relaxed) != 0;
        other.join().unwrap();
        (counted, seen)
    })
}

#[test]
fn what_is_counted_is_seen() {
    let expected = BTreeSet::from([(0, false), (0, true), (1, true)]);
    assert_eq!(counted_update(AtomicU64::new), expected);
}

#[test]
fn a_relaxed_count_would_promise_too_much() {
    assert!(counted_update(|start| Unordered(AtomicU64::new(start))).contains(&(1, false)));
}
