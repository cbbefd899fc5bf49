//! How long a round takes between the ranks of a group.
//!
//! It depends on what no rank can see: processes that use a device through MPS use it at once, others take
//! turns, which takes many times as long. So the ranks try it when the group forms, with an all-gather of a few
//! bytes, which takes a round and one more submission that is waited for.

use std::time::Instant;

use unisono_collective::engine::HostEngine;
use unisono_collective::schedule::{self, Problem};
use unisono_collective::{
    Algorithm, Call, Dtype, Error, FormError, InvalidCall, Op, Reduction, Request, Unit,
};

use super::engine::failed;
use super::run::Lane;
use crate::memory::DeviceMemory;

/// Calls that are timed; their median counts. More: groups form later. Fewer: one that was disturbed may count.
const CALLS: usize = 15;

/// Elements of each.
const COUNT: usize = 64;

/// The seconds of a round, which all ranks of the group agree on.
pub fn round(host: &mut HostEngine, lane: &mut Lane) -> Result<f64, FormError> {
    let (rank, world) = (host.rank(), host.topology().world());
    let (op, algorithm) = (Op::AllGather, Algorithm::Window);
    let problem = Problem { op, rank, world };
    let schedule = schedule::build(algorithm, &problem, host.topology())
        .ok_or(Error::from(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() }))?;
    let memory = DeviceMemory::new(lane.context(), COUNT * (world + 1)).map_err(failed)?;
    let (input, output) = (memory.pointer(), memory.pointer().offset(COUNT));
    // SAFETY: the memory has room for one block and for those of all ranks, and nothing else uses it.
    let request =
        unsafe { Request::raw(op, Dtype::U8, COUNT, input.0 as *const u8, output.0 as *mut u8)? };
    let request = request.check(rank, host.topology())?;
    let call = Call {
        seq: Call::MEASURING,
        op,
        barrier: false,
        dtype: Dtype::U8,
        unit: Unit::OWN,
        reduction: Reduction::Sum,
        count: COUNT as u64,
        shape: 0,
        algorithm,
        column: COUNT as u32,
    };
    let (buffers, segments) = request.cut(&schedule, COUNT, 1);
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let start = Instant::now();
        // SAFETY: the memory is the device's, and outlives the call, which is waited for.
        let outcome = unsafe { lane.run(&call, &schedule, &buffers, segments, host.state()) };
        lane.settle().map_err(failed)?;
        outcome?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let mut slowest = [times[CALLS / 2] / 2.0];
    host.run_unnumbered(Request::all_reduce(&mut slowest, Reduction::Max))?;
    Ok(slowest[0])
}
