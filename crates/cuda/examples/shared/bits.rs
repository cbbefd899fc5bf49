//! Every operation and type of a group, on the device and on the host.

use std::error::Error;
use std::time::{Duration, Instant};

use unisono_collective::{Dtype, Op, Reduction, Request};
use unisono_cuda::{DeviceGroup, DeviceMemory, Stream};

use crate::ranks::patterns;

/// Runs every operation on the device and on the host, of so many bytes at most and for so long; what was compared. It is an
/// error if bits differ.
pub fn check_everything(
    group: &DeviceGroup,
    stream: &Stream,
    most: usize,
    limit: Duration,
) -> Result<String, Box<dyn Error>> {
    let world = group.group().size();
    let root = world - 1;
    let operations = [
        Op::AllReduce,
        Op::ReduceScatter,
        Op::AllGather,
        Op::Broadcast { root },
        Op::Reduce { root },
        Op::Gather { root },
        Op::Scatter { root },
        Op::AllToAll,
    ];
    let largest = (most / 16).min(300_001);
    let bytes = largest * world * 8;
    let memory = || DeviceMemory::new(stream.context(), bytes);
    let (input, output) = (memory()?, memory()?);
    let (begun, mut checked) = (Instant::now(), 0);
    let mut left_out = String::new();
    for dtype in Dtype::ALL {
        for op in operations {
            let reductions: &[Reduction] = match op.reduces() {
                true => &[Reduction::Sum, Reduction::Mean, Reduction::Max],
                false => &[Reduction::Sum],
            };
            for &reduction in reductions {
                for count in [1, 1000, largest] {
                    check(group, stream, (op, dtype, reduction), count, &input, &output)?;
                    checked += 1;
                }
            }
        }
        let mut late = [i32::from(begun.elapsed() > limit)];
        group.group().all_reduce(&mut late, Reduction::Max)?;
        if late[0] > 0 {
            left_out = format!("; only types up to {dtype} were compared, for lack of time");
            break;
        }
    }
    Ok(format!("{checked} calls have the bits of the host{left_out}"))
}

/// Compares the results of one call on the device and on the host.
fn check(
    group: &DeviceGroup,
    stream: &Stream,
    (op, dtype, reduction): (Op, Dtype, Reduction),
    count: usize,
    input: &DeviceMemory,
    output: &DeviceMemory,
) -> Result<(), Box<dyn Error>> {
    let (rank, world) = (group.group().rank(), group.group().size());
    let each = count * dtype.size();
    let all = each * world;
    let is_root = op.root() == Some(rank);
    let (reads, writes) = match op {
        Op::AllReduce | Op::Broadcast { .. } => (each, each),
        Op::Reduce { .. } => (each, if is_root { each } else { 0 }),
        Op::ReduceScatter => (all, each),
        Op::AllGather => (each, all),
        Op::Gather { .. } => (each, if is_root { all } else { 0 }),
        Op::Scatter { .. } => (all, each),
        Op::AllToAll => (all, all),
    };
    let from = patterns(rank, dtype, reads);
    let mut expected = vec![0u64; writes.div_ceil(8) + 1];
    let mut found = expected.clone();
    let (at, into) = (input.pointer(), output.pointer());
    // SAFETY: all have as many bytes, and the last copy is waited for.
    unsafe {
        let host = Request::raw(op, dtype, count, from.as_ptr(), expected.as_mut_ptr())?;
        group.group().run(host.with_reduction(reduction))?;
        stream.copy_to_device(at, from.as_ptr().cast(), reads)?;
        stream.fill(into, 0x55, writes.max(1))?;
        let request = group.request(op, dtype, count, at, into, Some(stream))?;
        group.group().run(request.with_reduction(reduction))?;
        stream.copy_to_host(found.as_mut_ptr().cast(), into, writes)?;
    }
    stream.synchronize()?;
    if found == expected {
        return Ok(());
    }
    Err(format!("{op:?} of {count} {dtype} by {reduction} differs on rank {rank}").into())
}
