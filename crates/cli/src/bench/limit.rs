//! What the machine could do at best, measured in the same run.

mod links;

use std::time::{Duration, Instant};

use unisono::{Group, Reduction};

use super::workload::Operation;
pub use links::{Ring, link_rate};

/// Time spent on one measurement of a limit.
const BUDGET: Duration = Duration::from_millis(60);

/// Bytes that are passed over between two looks at the clock. More: fewer of them fit into the time. Fewer: the
/// looks count.
const SHORT: usize = 256 << 10;

/// The bus bandwidth, in bytes per second, of an operation on a buffer of this size that passes once over memory,
/// as each must: all ranks read what goes in and write what comes out, at the same time, in memory of their own. What
/// it costs to get bytes from another core is not in it.
pub fn memory_bus(operation: Operation, group: &Group, bytes: usize) -> anyhow::Result<f64> {
    if operation == Operation::Barrier {
        return Ok(f64::INFINITY);
    }
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
    slowest(group, operation.bus_factor(group.size()) * bytes as f64 / best)
}

fn slowest(group: &Group, rate: f64) -> anyhow::Result<f64> {
    let mut rates = [rate];
    group.all_reduce(&mut rates, Reduction::Min)?;
    Ok(rates[0])
}
