//! What memory does that the ranks of a host share.
//!
//! Two things limit an operation: every rank passes once over memory of its own, which may be larger than any cache; and what
//! comes from other ranks, it reads from lines that another core has just written. Neither can be saved, and the slower of
//! the two is the limit.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use memmap2::MmapRaw;
use rustix::fs::FallocateFlags;
use rustix::thread::{CpuSet, sched_getaffinity};
use rustix::time::{ClockId, clock_gettime};
use unisono::{Group, Reduction};

use super::BUDGET;
use crate::bench::workload::Operation;

/// Bytes that one core writes and another reads, at most. More: they fall out of the caches. Fewer: the clock counts.
const PART: usize = 256 << 10;

/// Bytes that are passed over between two looks at the clock. More: fewer of them fit into the time. Fewer: the
/// looks count.
const SHORT: usize = 1 << 20;

/// What one rank must do at least in an operation, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    /// Of its own buffers, what it reads.
    read: usize,
    /// Of its own buffers, what it writes.
    written: usize,
    /// What it reads of what others have written.
    taken: usize,
}

impl Share {
    /// Of an operation on a buffer of so many bytes, whose root, if it has one, is rank 0.
    fn of(operation: Operation, rank: usize, world: usize, bytes: usize) -> Share {
        let (block, is_root) = (bytes / world, rank == 0);
        let others = bytes - block;
        let (read, written, taken) = match operation {
            Operation::AllReduce => (bytes, bytes, 2 * others),
            Operation::ReduceScatter => (bytes, block, others),
            // A block of the result may be there already.
            Operation::AllGather => (block, others, others),
            Operation::AllToAll => (bytes, others, others),
            Operation::Broadcast if is_root => (bytes, 0, 0),
            Operation::Broadcast => (0, bytes, bytes),
            // One rank after the other adds its own: the first has none before it.
            Operation::Reduce if is_root => (bytes, bytes, bytes),
            Operation::Reduce => (bytes, 0, if rank + 1 == world { 0 } else { bytes }),
            Operation::Gather if is_root => (block, bytes, others),
            Operation::Gather => (block, 0, 0),
            Operation::Scatter if is_root => (bytes, block, 0),
            Operation::Scatter => (0, block, block),
            Operation::Barrier => (0, 0, 0),
        };
        Share { read, written, taken }
    }
}

/// Cores on which any of the ranks may run.
fn cores(group: &Group) -> anyhow::Result<usize> {
    let own = sched_getaffinity(None).context("asking for the cores of a rank")?;
    let mut any: Vec<u8> = (0..CpuSet::MAX_CPU).map(|core| u8::from(own.is_set(core))).collect();
    group.all_reduce(&mut any, Reduction::Max)?;
    Ok(any.into_iter().map(usize::from).sum())
}

/// Seconds that all ranks need at least, of which this one needs so many while it has a core: as many as the slowest, and where
/// there are more ranks than cores, what these take in turns.
///
/// To time them from the first to the last would not do for short work: how long they take to begin counts more than it.
fn together(group: &Group, cores: usize, alone: f64) -> anyhow::Result<f64> {
    let mut all = vec![0.0; group.size()];
    group.all_gather(&[alone], &mut all)?;
    let longest = all.iter().copied().fold(0.0, f64::max);
    Ok(longest.max(all.iter().sum::<f64>() / cores as f64))
}

/// Seconds of a core that work takes at least which is done so many times between two looks at the clock.
///
/// The clock is that of the thread: where there are more ranks than cores, long work lasts for several turns, and those of the
/// other ranks are counted [elsewhere](together).
fn least(in_row: usize, mut work: impl FnMut()) -> f64 {
    let thread_seconds = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let (started, mut best) = (Instant::now(), f64::INFINITY);
    while started.elapsed() < BUDGET {
        let start = thread_seconds();
        (0..in_row).for_each(|_| work());
        best = best.min((thread_seconds() - start) / in_row as f64);
    }
    best
}

/// Seconds in which this rank does what must be done with memory of its own, while all others do it.
fn own_pass(operation: Operation, group: &Group, bytes: usize) -> anyhow::Result<f64> {
    let share = Share::of(operation, group.rank(), group.size(), bytes);
    let [read, written] = [share.read, share.written].map(|bytes| bytes.div_ceil(8));
    // An all-reduce writes where it has read.
    let is_in_place = operation == Operation::AllReduce;
    let mut from = vec![1u64; read];
    let mut into = vec![1u64; if is_in_place { 0 } else { written }];
    let both = read.min(into.len());
    let pass = || {
        if is_in_place {
            from.iter_mut().for_each(|word| *word = word.wrapping_add(1));
        } else {
            into[..both].copy_from_slice(&from[..both]);
            into[both..].fill(2);
            std::hint::black_box(from[both..].iter().fold(0, |all, word| all ^ word));
        }
        std::hint::black_box((&mut from, &mut into));
    };
    // Short passes are made in a row: a look at the clock would cost more than they do.
    let in_row = (SHORT / bytes.max(1)).clamp(1, 1000);
    group.barrier()?;
    let best = least(in_row, pass);
    group.barrier()?;
    Ok(best)
}

/// Memory in which every rank writes a part that another one reads.
pub struct Neighbours {
    memory: MmapRaw,
    cores: usize,
}

impl Neighbours {
    /// All ranks, which share a host, map the same memory.
    pub fn map(group: &Group) -> anyhow::Result<Neighbours> {
        let mut owner = [i64::from(std::process::id())];
        group.broadcast(&mut owner, 0)?;
        let folder = Path::new("/dev/shm");
        let folder = if folder.is_dir() { folder.to_owned() } else { std::env::temp_dir() };
        let path = folder.join(format!("unisono-limit-{}", owner[0]));
        let made =
            if group.rank() == 0 { Some(Temporary::create(path.clone(), group)?) } else { None };
        group.barrier()?;
        let file = OpenOptions::new().read(true).write(true).open(&path);
        // Nobody needs the name any more when all have opened it.
        group.barrier()?;
        drop(made);
        let memory = MmapRaw::map_raw(&file.context("opening the limit's memory")?)?;
        Ok(Neighbours { memory, cores: cores(group)? })
    }

    /// Seconds that the machine needs at least for an operation on a buffer of this size.
    pub fn seconds(
        &mut self,
        operation: Operation,
        group: &Group,
        bytes: usize,
    ) -> anyhow::Result<f64> {
        let own = together(group, self.cores, own_pass(operation, group, bytes)?)?;
        Ok(own.max(self.between_cores(operation, group, bytes)?))
    }

    /// Seconds in which all ranks read what others have just written. Of a round the slowest rank counts: the others may have shared a
    /// core with the one they read from.
    fn between_cores(
        &mut self,
        operation: Operation,
        group: &Group,
        bytes: usize,
    ) -> anyhow::Result<f64> {
        let taken = Share::of(operation, group.rank(), group.size(), bytes).taken;
        let part = bytes.clamp(64, PART) / 64 * 64;
        let place = |rank: usize| self.memory.as_mut_ptr().wrapping_add(rank % group.size() * PART);
        let (own, next) = (place(group.rank()), place(group.rank() + 1));
        let mut private = vec![1u8; part];
        let (started, mut best) = (Instant::now(), f64::INFINITY);
        loop {
            // SAFETY: the part of this rank, which nobody else writes, and nobody reads between these barriers.
            unsafe { std::ptr::copy_nonoverlapping(private.as_ptr(), own, part) };
            group.barrier()?;
            let mut seconds = 0.0;
            if taken > 0 {
                let start = Instant::now();
                // SAFETY: the part of the next rank, which does not write before it has the seconds of all.
                unsafe { std::ptr::copy_nonoverlapping(next, private.as_mut_ptr(), part) };
                std::hint::black_box(&mut private);
                seconds = start.elapsed().as_secs_f64() * taken as f64 / part as f64;
            }
            best = best.min(together(group, self.cores, seconds)?);
            // All stop together.
            let mut is_over = [u8::from(started.elapsed() > BUDGET)];
            group.all_reduce(&mut is_over, Reduction::Max)?;
            if is_over[0] == 1 {
                return Ok(best);
            }
        }
    }
}

/// A file that goes with its owner.
struct Temporary(PathBuf);

impl Temporary {
    fn create(path: PathBuf, group: &Group) -> anyhow::Result<Temporary> {
        let file = File::create_new(&path).context("making the limit's memory")?;
        let named = Temporary(path);
        // Reserved now: a write without memory for it would end this process with SIGBUS.
        let bytes = (group.size() * PART) as u64;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .context("reserving the limit's memory")?;
        Ok(named)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            log::warn!("{} is left: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// A thread that sleeps has no core, just as one whose core others have.
    #[test]
    fn the_turns_of_others_are_not_counted() {
        let turn = BUDGET / 4;
        assert!(least(1, || std::thread::sleep(turn)) < turn.as_secs_f64() / 2.0);
        let mut words = vec![1u64; 1 << 12];
        let work = || words.iter_mut().for_each(|word| *word = std::hint::black_box(*word) + 1);
        assert!(least(10, work) > 0.0);
    }

    /// However an operation is done, ranks must take so much from each other.
    #[test]
    fn ranks_take_what_they_do_not_have() {
        use Operation::{Barrier, Broadcast, Gather, Reduce, Scatter};
        for world in 2..6 {
            let bytes = 100 * world;
            for &operation in Operation::value_variants() {
                let shares = (0..world).map(|rank| Share::of(operation, rank, world, bytes));
                let taken: Vec<usize> = shares.map(|share| share.taken).collect();
                let all: usize = taken.iter().sum();
                match operation {
                    Broadcast | Reduce => assert_eq!(all, (world - 1) * bytes, "{operation:?}"),
                    Gather | Scatter => assert_eq!(all, (world - 1) * 100, "{operation:?}"),
                    Barrier => assert_eq!(all, 0),
                    _ => {
                        let each = operation.bus_factor(world) * bytes as f64;
                        assert!(taken.iter().all(|&taken| taken == each.round() as usize));
                    }
                }
            }
        }
    }
}
