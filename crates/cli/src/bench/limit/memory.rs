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
use unisono::Group;

use super::{BUDGET, slowest};
use crate::bench::workload::Operation;

/// Bytes that one core writes and another reads, at most. More: they fall out of the caches. Fewer: the clock counts.
const PART: usize = 256 << 10;

/// Bytes that are passed over between two looks at the clock. More: fewer of them fit into the time. Fewer: the
/// looks count.
const SHORT: usize = 256 << 10;

/// Bytes per second of what must be done at least with memory of one's own: all ranks read a buffer of this size and write
/// what comes out, at the same time.
fn own_pass(operation: Operation, group: &Group, bytes: usize) -> anyhow::Result<f64> {
    let words = (bytes / 8).max(1);
    let (mut from, mut into) = (vec![1u64; words], vec![1u64; words]);
    // What a rank writes; of a reduce-scatter it is a part of what it reads.
    let written = if operation == Operation::ReduceScatter { words / group.size() } else { words };
    let mut pass = || match operation {
        Operation::AllReduce | Operation::Reduce => {
            from.iter_mut().for_each(|word| *word = word.wrapping_add(1));
            std::hint::black_box(&mut from);
        }
        Operation::ReduceScatter => {
            let blocks = from.chunks_exact(written.max(1));
            blocks.for_each(|block| into.iter_mut().zip(block).for_each(|(sum, x)| *sum ^= x));
            std::hint::black_box(&mut into);
        }
        _ => {
            into.copy_from_slice(&from);
            std::hint::black_box(&mut into);
        }
    };
    // Short passes are made in a row: a look at the clock would cost more than they do.
    let in_row = (SHORT / bytes.max(1)).clamp(1, 1000);
    group.barrier()?;
    let (started, mut best) = (Instant::now(), f64::INFINITY);
    while started.elapsed() < BUDGET {
        let start = Instant::now();
        (0..in_row).for_each(|_| pass());
        best = best.min(start.elapsed().as_secs_f64() / in_row as f64);
    }
    group.barrier()?;
    slowest(group, bytes as f64 / best)
}

/// Memory in which every rank writes a part that another one reads.
pub struct Neighbours {
    memory: MmapRaw,
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
        Ok(Neighbours { memory })
    }

    /// The bus bandwidth, in bytes per second, that the machine allows an operation on a buffer of this size.
    pub fn bus(
        &mut self,
        operation: Operation,
        group: &Group,
        bytes: usize,
    ) -> anyhow::Result<f64> {
        if operation == Operation::Barrier || group.size() == 1 {
            return Ok(f64::INFINITY);
        }
        let factor = operation.bus_factor(group.size());
        let own = factor * own_pass(operation, group, bytes)?;
        Ok(own.min(self.between_cores(group, bytes)?))
    }

    /// Bytes per second that every rank reads of what the next one has just written, while all do so.
    fn between_cores(&mut self, group: &Group, bytes: usize) -> anyhow::Result<f64> {
        let part = bytes.clamp(64, PART) / 64 * 64;
        let place = |rank: usize| self.memory.as_mut_ptr().wrapping_add(rank % group.size() * PART);
        let (own, next) = (place(group.rank()), place(group.rank() + 1));
        let mut private = vec![1u8; part];
        let (started, mut best) = (Instant::now(), f64::INFINITY);
        loop {
            // SAFETY: the part of this rank, which nobody else writes, and nobody reads between these barriers.
            unsafe { std::ptr::copy_nonoverlapping(private.as_ptr(), own, part) };
            group.barrier()?;
            let start = Instant::now();
            // SAFETY: the part of the next rank, which does not write before the barrier.
            unsafe { std::ptr::copy_nonoverlapping(next, private.as_mut_ptr(), part) };
            std::hint::black_box(&mut private);
            best = best.min(start.elapsed().as_secs_f64());
            // All stop together.
            let mut is_over = [u8::from(started.elapsed() > BUDGET)];
            group.all_reduce(&mut is_over, unisono::Reduction::Max)?;
            if is_over[0] == 1 {
                return slowest(group, part as f64 / best);
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
