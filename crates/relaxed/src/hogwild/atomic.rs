//! What the loops of this module need of an atomic number, so that tests can run the same loops on
//! numbers whose every access is explored, or that break a promise.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A word that holds the bits of a weight.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;

    fn compare_exchange_weak(
        &self,
        current: u32,
        new: u32,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u32, u32>;
}

/// A number that only grows.
pub(super) trait Tally {
    fn load(&self, order: Ordering) -> u64;

    fn fetch_add(&self, more: u64, order: Ordering) -> u64;
}

impl Word for AtomicU32 {
    #[inline(always)]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline(always)]
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
    #[inline(always)]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline(always)]
    fn fetch_add(&self, more: u64, order: Ordering) -> u64 {
        self.fetch_add(more, order)
    }
}
