//! Cores for ranks: every rank of a node gets an equal share of the launcher's.

use rustix::thread::{CpuSet, sched_getaffinity};

/// The cores of local rank `local` of `ranks`; `None` if there are fewer cores than ranks, or the
/// system does not tell.
pub(super) fn share(local: u32, ranks: u32) -> Option<CpuSet> {
    let all = sched_getaffinity(None).ok()?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).collect();
    let (local, ranks) = (local as usize, ranks as usize);
    if cores.len() < ranks {
        return None;
    }
    let mut own = CpuSet::new();
    for &core in &cores[local * cores.len() / ranks..(local + 1) * cores.len() / ranks] {
        own.set(core);
    }
    Some(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_complete() {
        let all = sched_getaffinity(None).expect("the system tells");
        let ranks = all.count();
        let shares: Vec<CpuSet> = (0..ranks).map(|r| share(r, ranks).expect("enough")).collect();
        assert!(shares.iter().all(|s| s.count() == 1));
        for core in (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)) {
            assert_eq!(shares.iter().filter(|s| s.is_set(core)).count(), 1);
        }
        assert!(share(0, ranks + 1).is_none());
    }
}
