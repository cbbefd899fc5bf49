//! Which ranks share processors, how many there are, and how busy.

use std::time::Duration;

use rustix::thread::CpuSet;
use rustix::time::{ClockId, clock_gettime};
use unisono_collective::{Error, Group};

use crate::advice::Processors;

/// Words of a set of cores.
const CORE_WORDS: usize = CpuSet::MAX_CPU / 64;

/// The processors of the machine whose ranks have the fewest, if this process keeps so many busy.
pub fn processors(group: &Group, busy: f64) -> Result<Processors, Error> {
    // Who shares processors is not who shares a host: containers of one machine do.
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let process = format!("{} of {}", std::process::id(), space.display());
    let available = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut own = vec![hash(&boot), hash(process.as_bytes()), available as i64];
    own.extend(cores());
    let (mut all, mut busy_of) = (vec![0; own.len() * group.size()], vec![0.0; group.size()]);
    group.all_gather(&own, &mut all)?;
    group.all_gather(&[busy], &mut busy_of)?;
    let facts: Vec<&[i64]> = all.chunks_exact(own.len()).collect();

    let machine = |first: usize| {
        let here = || (0..facts.len()).filter(|rank| facts[*rank][0] == facts[first][0]);
        let core = |rank: usize, word: usize| facts[rank][3 + word];
        let union = |word| here().fold(0, |cores, rank| cores | core(rank, word)).count_ones();
        let together: u32 = (0..CORE_WORDS).map(union).sum();
        let bound: u32 = (0..CORE_WORDS).map(|word| core(first, word).count_ones()).sum();
        // A quota below a rank's cores limits all ranks of the machine alike.
        let (quota, together) = (facts[first][2] as u32, together.max(1));
        let cores = if quota < bound { together.min(quota) } else { together };
        // Ranks that are threads of one process counted the same processor time.
        let is_first = |rank: &usize| !here().any(|r| r < *rank && facts[r][1] == facts[*rank][1]);
        let busy: f64 = here().filter(is_first).map(|rank| busy_of[rank]).sum();
        let cores = f64::from(cores);
        Processors { cores, busy: busy.min(cores), coders: here().count() as f64 }
    };
    let machines = (0..facts.len()).map(machine);
    let slowest = machines.min_by(|a, b| a.speed().total_cmp(&b.speed()));
    Ok(slowest.expect("a group has a rank"))
}

/// The cores this process may use, as a set; all bits of one word if that is not known.
fn cores() -> [i64; CORE_WORDS] {
    let mut words = [0; CORE_WORDS];
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => {
            for core in (0..CORE_WORDS * 64).filter(|core| set.is_set(*core)) {
                words[core / 64] |= 1 << (core % 64);
            }
        }
        Err(_) => words[0] = -1,
    }
    words
}

/// Processor time of this process.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
}

fn hash(bytes: &[u8]) -> i64 {
    let hash = blake3::hash(bytes);
    i64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono_collective::Options;

    #[test]
    fn threads_of_one_process_share_its_processors_and_count_its_time_once() {
        let groups = Group::local(3, &Options::default()).unwrap();
        let found: Vec<Processors> = std::thread::scope(|scope| {
            let start = |group| scope.spawn(move || processors(group, 0.5).unwrap());
            let ranks: Vec<_> = groups.iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(found.iter().all(|processors| *processors == found[0]));
        assert_eq!((found[0].busy, found[0].coders), (0.5, 3.0));
        assert!(found[0].cores >= 1.0);
    }

    #[test]
    fn processor_time_passes() {
        let before = cpu_time();
        while cpu_time() == before {
            std::hint::spin_loop();
        }
        assert!(cpu_time() > before);
    }
}
