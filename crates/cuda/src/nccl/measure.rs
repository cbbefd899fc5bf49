//! How long messages take between the ranks of a group.
//!
//! What lies between two GPUs, NVLink, PCIe, a network or sockets, is NCCL's to know. So the ranks try it when the
//! group forms: an all-gather of a few bytes, which also makes the connections of all pairs, and one of more; and the
//! same by NCCL's own all-gather.

use std::time::Instant;

use unisono_collective::engine::HostEngine;
use unisono_collective::schedule::{self, Phase, Problem, Topology};
use unisono_collective::{
    Algorithm, Call, Dtype, Error, FormError, InvalidCall, Op, Reduction, Request, Unit,
};

use super::cost::NcclCosts;
use super::run::Lane;
use crate::memory::DeviceMemory;
use crate::order::failed;

/// Calls that are timed; their median counts. More: groups form later. Fewer: one that was disturbed may count.
const CALLS: usize = 5;

/// Bytes of each rank in small calls. In large ones, bytes that a rank receives of all others, and at least of each.
/// Of the large ones, more: groups form later. Fewer: what is measured is how long it takes to begin.
const SMALL: usize = 256;
const LARGE: usize = 16 << 20;
const LEAST: usize = 1 << 20;

/// The costs of messages between a rank and those that the lane knows by the numbers of `peers`, of which it is one itself
/// unless there are none. All ranks of the group agree on them.
pub fn costs(
    host: &mut HostEngine,
    lane: &mut Lane,
    peers: &[usize],
) -> Result<NcclCosts, FormError> {
    let typical = NcclCosts::default();
    let mut found = if peers.len() > 1 { times(host, lane, peers)? } else { [0.0; 3] };
    host.run_unnumbered(Request::all_reduce(&mut found, Reduction::Max))?;
    let [group, byte, gathered] = found;
    let [byte, gathered] = [byte, gathered].map(|byte| byte.max(typical.byte / 10.0));
    Ok(NcclCosts { group, byte, gathered, ..typical })
}

/// What a group of messages takes, and a byte of one, and of an all-gather of NCCL's own.
fn times(host: &HostEngine, lane: &mut Lane, peers: &[usize]) -> Result<[f64; 3], FormError> {
    let others = peers.len() - 1;
    let large = (LARGE / others).max(LEAST);
    let memory = DeviceMemory::new(lane.context(), large * peers.len()).map_err(failed)?;
    // The first call makes connections, and loads what it needs.
    all_gather(host, lane, peers, &memory, SMALL, false)?;
    all_gather(host, lane, peers, &memory, SMALL, true)?;
    let mut median = |bytes, by_nccl| {
        let mut times = [0.0; CALLS];
        for time in &mut times {
            let start = Instant::now();
            all_gather(host, lane, peers, &memory, bytes, by_nccl)?;
            *time = start.elapsed().as_secs_f64();
        }
        times.sort_by(f64::total_cmp);
        Ok::<f64, FormError>(times[CALLS / 2])
    };
    let group = median(SMALL, false)?;
    let (sent, gathered) = (median(large, false)?, median(large, true)?);
    let byte = |time: f64| (time - group) / (others * large) as f64;
    Ok([group, byte(sent), byte(gathered)])
}

/// Runs an all-gather of so many bytes of each of these ranks, in place, as if they were a group of their own: by
/// messages, or by NCCL's own if they are all that its communicator has.
fn all_gather(
    host: &HostEngine,
    lane: &mut Lane,
    peers: &[usize],
    memory: &DeviceMemory,
    bytes: usize,
    by_nccl: bool,
) -> Result<(), Error> {
    let world = peers.len();
    let rank = peers.iter().position(|peer| *peer == lane.place());
    let rank = rank.expect("a rank is one of its peers");
    let topology = &Topology::all_apart(world);
    let (op, algorithm) = (Op::AllGather, Algorithm::Pairwise);
    let problem = Problem { op, rank, world };
    let mut schedule = schedule::build(algorithm, &problem, topology)
        .ok_or(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() })?;
    let output = memory.pointer();
    let input = output.offset(rank * bytes);
    // SAFETY: the memory has room for the blocks of all ranks, and nothing else uses it.
    let request =
        unsafe { Request::raw(op, Dtype::U8, bytes, input.0 as *const u8, output.0 as *mut u8)? };
    let request = request.check(rank, topology)?;
    let call = Call {
        seq: Call::MEASURING,
        op,
        barrier: false,
        dtype: Dtype::U8,
        unit: Unit::OWN,
        reduction: Reduction::Sum,
        count: bytes as u64,
        shape: 0,
        algorithm,
        column: bytes as u32,
    };
    let (buffers, segments) = request.cut(&schedule, bytes, 1);
    let [Phase::Rounds(rounds)] = &mut schedule.phases[..] else {
        unreachable!("algorithms without windows have rounds alone");
    };
    rounds.rename(|rank| peers[rank]);
    // SAFETY: the memory is the device's, and the call is over when this returns.
    unsafe { lane.run(&call, &rounds.rounds, buffers, 0..segments, by_nccl, host.state()) }
}
