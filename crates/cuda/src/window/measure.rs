//! How long rounds take between the ranks of a group, and how fast their bus is.
//!
//! The ranks try it when the group forms, with all-gathers of a few bytes: once, twice in a row, and in segments.
//! They need no kernel, which would have to be compiled first.

use std::time::Instant;

use unisono_collective::engine::HostEngine;
use unisono_collective::schedule::{self, Problem, Topology};
use unisono_collective::{
    Algorithm, Call, Dtype, Error, FormError, InvalidCall, Op, Reduction, Request, Unit,
};

use super::cost::{DeviceCosts, Rounds};
use super::opening;
use super::run::{Lane, Passage};
use super::way::Way;
use crate::device::Attribute;
use crate::error::CudaError;
use crate::memory::DeviceMemory;
use crate::order::failed;

/// Calls that are timed; their median counts. More: groups form later. Fewer: one that was disturbed may count.
const CALLS: usize = 11;

/// Elements of a segment of each, and segments of the longer one.
const COUNT: usize = 64;
const SEGMENTS: usize = 4;

/// Bytes that the bus is tried with, at most. More: groups form later. Fewer: the rate is that of small copies.
const BUS_TRIAL: usize = 8 << 20;

/// Of the rate that memory has by its clock, what copies reach.
const ATTAINABLE: f64 = 0.85;

/// The costs of a group, equal on all its ranks, of which these share a window.
pub fn costs(
    host: &mut HostEngine,
    lane: &mut Lane,
    members: &[usize],
) -> Result<DeviceCosts, FormError> {
    let usual = DeviceCosts::default();
    let context = lane.context().clone();
    // As during a call.
    let _entered = context.enter().map_err(failed)?;
    let mut measured = [0.0; 11];
    let (through_device, through_host) =
        (lane.buffer(Way::Device).is_some(), lane.buffer(Way::Copied).is_some());
    // A rank that is alone goes by what the others find.
    if through_device && members.len() > 1 {
        rounds(host, lane, members, Way::Device, true)?.put(&mut measured[..3]);
    }
    if through_host {
        rounds(host, lane, members, Way::Copied, false)?.put(&mut measured[3..6]);
        rounds(host, lane, members, Way::Folded, true)?.put(&mut measured[6..9]);
        host.run_unnumbered(Request::barrier())?;
        measured[9] = lane.try_bus(BUS_TRIAL).map_err(failed)?;
    }
    measured[10] = memory_byte(lane).map_err(failed)?.unwrap_or(usual.byte);
    host.run_unnumbered(Request::all_reduce(&mut measured, Reduction::Max))?;
    let or = |there, measured, usual| if there { measured } else { usual };
    Ok(DeviceCosts {
        device: or(through_device, Rounds::from(&measured[..3]), usual.device),
        host: or(through_host, Rounds::from(&measured[3..6]), usual.host),
        folded: or(through_host, Rounds::from(&measured[6..9]), usual.folded),
        bus: if through_host { measured[9] } else { usual.bus },
        byte: measured[10],
        ..usual
    })
}

impl Rounds {
    fn put(self, into: &mut [f64]) {
        into.copy_from_slice(&[self.first, self.second, self.segment]);
    }
}

impl From<&[f64]> for Rounds {
    fn from(from: &[f64]) -> Rounds {
        Rounds { first: from[0], second: from[1], segment: from[2] }
    }
}

/// A byte of device memory, if the device says how fast it is.
fn memory_byte(lane: &Lane) -> Result<Option<f64>, CudaError> {
    let device = lane.context().device();
    let clock = f64::from(device.attribute(Attribute::MemoryClock)?) * 1e3;
    let width = f64::from(device.attribute(Attribute::MemoryBusWidth)?) / 8.0;
    let rate = 2.0 * clock * width * ATTAINABLE;
    // Some devices do not tell, and some that share the host's memory tell something else.
    Ok((rate > 1e10).then_some(1.0 / rate))
}

/// Times calls that go one way; in place, no more than the ranks' staging is moved.
fn rounds(
    host: &mut HostEngine,
    lane: &mut Lane,
    members: &[usize],
    way: Way,
    in_place: bool,
) -> Result<Rounds, FormError> {
    // As if they were a group of their own.
    let (rank, world) = (opening::place(host, members), members.len());
    let topology = &Topology::one_host(world);
    let count = COUNT * SEGMENTS;
    let memory = DeviceMemory::new(lane.context(), count * (world + 1)).map_err(failed)?;
    let output = memory.pointer().offset(count);
    let input = if in_place { output.offset(rank * count) } else { memory.pointer() };
    let (op, algorithm) = (Op::AllGather, Algorithm::Window);
    let problem = Problem { op, rank, world };
    let schedule = schedule::build(algorithm, &problem, topology)
        .ok_or(Error::from(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() }))?;
    let mut median = |calls: usize, segments: usize| -> Result<f64, FormError> {
        let column = count / segments;
        let call = Call {
            seq: Call::MEASURING,
            op,
            barrier: false,
            dtype: Dtype::U8,
            unit: Unit::OWN,
            reduction: Reduction::Sum,
            count: count as u64,
            shape: 0,
            algorithm,
            column: column as u32,
        };
        let (from, into) = (input.0 as *const u8, output.0 as *mut u8);
        // SAFETY: the memory has room for one block and for those of all ranks, and nothing else uses it.
        let request = unsafe { Request::raw(op, Dtype::U8, count, from, into)? };
        let request = request.check(rank, topology)?;
        let (buffers, segments) = request.cut(&schedule, column, 1);
        let mut times = Vec::with_capacity(CALLS);
        for _ in 0..CALLS {
            let start = Instant::now();
            let mut outcome = Ok(());
            for _ in 0..calls {
                let passage = Passage { way, begin: None };
                // SAFETY: the memory is the device's, and outlives the call, which is waited for. What
                // a second call reads and writes, the first has read and written alike.
                outcome = outcome.and(unsafe {
                    lane.run(&call, &schedule, &buffers, segments, passage, host.state())
                });
            }
            lane.settle().map_err(failed)?;
            outcome?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[CALLS / 2])
    };
    let (first, twice, long) = (median(1, 1)?, median(2, 1)?, median(1, SEGMENTS)?);
    let second = (twice - first).max(first / 8.0);
    let segment = ((long - first) / (SEGMENTS - 1) as f64).max(first / 64.0);
    Ok(Rounds { first, second, segment })
}
