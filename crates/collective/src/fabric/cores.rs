//! Which cores the ranks of a host may use, and whether they suffice.

use serde::{Deserialize, Serialize};

/// Cores that a process is bound to, as a set of numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreSet(Vec<u64>);

impl CoreSet {
    /// The cores of this process.
    pub fn current() -> CoreSet {
        let Ok(cpus) = rustix::thread::sched_getaffinity(None) else { return CoreSet::default() };
        let mut words = Vec::new();
        for core in (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| cpus.is_set(core)) {
            words.resize(core / 64 + 1, 0);
            words[core / 64] |= 1 << (core % 64);
        }
        CoreSet(words)
    }

    /// The number of cores.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    fn union(mut self, other: &CoreSet) -> CoreSet {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine |= theirs);
        self
    }
}

/// Cores that this process may use, quotas included.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The cores that ranks with these bindings have together, of which this rank has `own`.
pub fn shared_cores<'a>(own: &CoreSet, all: impl Iterator<Item = &'a CoreSet>) -> usize {
    let together = all.fold(CoreSet::default(), CoreSet::union).count();
    // A quota below this rank's own cores limits all ranks of the host alike.
    let available = available_cores();
    if available < own.count() { together.min(available) } else { together }
}

/// How ranks share the cores of a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// Ranks per core, at least 1: above, they take turns.
    pub crowd: f64,
    /// Cores that each rank has to itself, rounded down.
    pub each: usize,
}

impl Cores {
    /// Of so many ranks that have so many cores together.
    pub fn of(ranks: usize, cores: usize) -> Cores {
        Cores { crowd: crowd(ranks, cores), each: cores / ranks.max(1) }
    }
}

/// Ranks per core, at least 1.
fn crowd(ranks: usize, cores: usize) -> f64 {
    (ranks as f64 / cores.max(1) as f64).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_bound_to_different_cores_have_them_all() {
        let sets = [CoreSet(vec![1]), CoreSet(vec![2]), CoreSet(vec![2, 1])];
        assert_eq!(shared_cores(&sets[0], sets.iter()), 3);
        assert_eq!(crowd(3, 3), 1.0);
        assert_eq!(crowd(4, 2), 2.0);
        assert_eq!(crowd(2, 16), 1.0);
        assert_eq!(Cores::of(3, 16).each, 5);
        assert_eq!(Cores::of(3, 2).each, 0);
    }

    #[test]
    fn this_process_has_a_core() {
        assert!(CoreSet::current().count() >= 1);
    }
}
