//! `unisono bench collective`: starts its own ranks, times an operation, checks what it timed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use unisono::collective::cost::Prediction;
use unisono::collective::schedule::Topology;
use unisono::{Algorithm, Dtype, Group, Job, Options, Reduction, Transport};

use super::device::{self, DeviceKind, EngineArgs, Gpu, Roofline, Sharing, Way};
use super::limit::{Flow, Neighbours, Ring};
use super::workload::{self, Operation, Workload, verify_step};
use super::{expect_memory, sizes};
use crate::exit::Wrong;
use unisono::insight::units::counted;

/// How long to try an operation to see how often it can be repeated.
const TRIAL: Duration = Duration::from_millis(20);

/// Options of `unisono bench collective`.
#[derive(Args, Clone)]
pub struct CollectiveArgs {
    /// The operation.
    #[arg(long, value_enum, default_value = "all-reduce")]
    op: Operation,
    /// How many ranks to start on this machine; as many as cores by default.
    #[arg(long)]
    ranks: Option<usize>,
    /// How the ranks exchange data: auto, shm or tcp.
    #[arg(long, default_value = "auto")]
    transport: Transport,
    /// The element type: f32, f64, f16, bf16, i8, u8, i32 or i64.
    #[arg(long, default_value = "f32")]
    dtype: Dtype,
    /// Sizes of the whole buffer: a list of sizes and ranges, FROM..TO or FROM..TO:FACTOR.
    #[arg(long, default_value = "1KiB..64MiB")]
    sizes: String,
    /// By how much the sizes of a range grow that does not say so itself.
    #[arg(long, default_value_t = 4)]
    factor: usize,
    /// Use this algorithm instead of the cheapest: ring, tree, double-tree, halving-doubling,
    /// recursive-doubling, pairwise, direct, window, window-direct, hierarchical or regional.
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// Use memory that the ranks of a host read of each other in place, as `Group::allocate` makes it: for
    /// all-gather and broadcast, and from 2 MiB on for all-reduce and reduce-scatter.
    #[arg(long)]
    registered: bool,
    /// Print every algorithm that could do it with its predicted time, and the measured time of the
    /// chosen one.
    #[arg(long)]
    explain: bool,
    /// Seconds to spend on each size.
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Print one JSON object per size instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: EngineArgs,
    /// This process is one of the ranks.
    #[arg(long, hide = true)]
    as_rank: bool,
}

/// One line of the report.
#[derive(Serialize)]
struct Row {
    op: &'static str,
    ranks: usize,
    transport: &'static str,
    algorithm: &'static str,
    dtype: &'static str,
    bytes: usize,
    median_us: f64,
    p99_us: f64,
    algbw_gbs: f64,
    busbw_gbs: f64,
    /// None where nothing must be moved, or what must be is not known. One below the bus bandwidth was measured while
    /// something else disturbed it, and limits nothing.
    limit_gbs: Option<f64>,
    verified: bool,
    /// Where the memory is, if not on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'static str>,
    /// Whether ranks read each other's memory in place.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    registered: bool,
}

/// Starts the ranks, or is one of them.
pub fn run(args: CollectiveArgs) -> anyhow::Result<ExitCode> {
    let sizes = args.sizes()?;
    demand!(
        !args.device.device.is_wanted() || args.op != Operation::Barrier,
        "--op barrier: it moves no memory of a device; leave --device out"
    );
    demand!(
        !args.registered || args.op.can_be_in_place(),
        "--op {}: only all-reduce, reduce-scatter, all-gather and broadcast read registered memory in place; leave --registered out",
        args.op.name()
    );
    demand!(
        !args.registered || !args.device.device.is_wanted(),
        "--registered: it is for memory of the host; leave --device out"
    );
    args.device.device.kind()?;
    // Under a launcher this process is a rank already.
    if args.as_rank || std::env::var_os("RANK").is_some() {
        return be_rank(&args);
    }
    let ranks = args.ranks.unwrap_or_else(|| {
        std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
    });
    check_memory(args.op, &sizes, ranks)?;
    let mut command = vec![std::env::current_exe()?.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    command.push("--as-rank".into());
    crate::run::launch_here(ranks, command)
}

impl CollectiveArgs {
    fn sizes(&self) -> anyhow::Result<Vec<usize>> {
        sizes::parse_buffers(&self.sizes, self.factor, self.dtype.size())
            .context("--sizes")
            .wrong_call()
    }
}

/// Refuses buffers for which this machine has no memory: the system would kill a process.
fn check_memory(op: Operation, sizes: &[usize], ranks: usize) -> anyhow::Result<()> {
    sizes.iter().try_for_each(|&bytes| {
        let needed = bytes.saturating_mul(op.buffers()).saturating_mul(ranks);
        let who = format!("--sizes: {ranks} ranks with buffers of {} need", sizes::format(bytes));
        expect_memory(&who, needed, "smaller sizes or fewer ranks")
    })
}

fn be_rank(args: &CollectiveArgs) -> anyhow::Result<ExitCode> {
    let mut options = Options::from_env()?;
    if args.transport != Transport::Auto {
        options.transport = args.transport;
    }
    let (job, gpu) = args.device.join(options)?;
    let group = job.world();
    let mut report = Report::new(args, &job, gpu.clone())?;
    let sizes = args.sizes()?;
    check_memory(args.op, &sizes, job.place().local_world as usize)?;
    for bytes in sizes {
        let memory = match &gpu {
            Some(gpu) => workload::Kind::Device(gpu),
            None if args.registered => workload::Kind::Registered,
            None => workload::Kind::Plain,
        };
        let mut workload =
            workload::make(args.op, args.dtype, bytes, group, args.algorithm, memory)?;
        let samples = measure(workload.as_mut(), group, args)?;
        report.add(workload.as_mut(), group, samples)?;
    }
    group.barrier()?;
    Ok(ExitCode::SUCCESS)
}

/// Times an operation: microseconds of every repetition, sorted.
fn measure(
    workload: &mut dyn Workload,
    group: &Group,
    args: &CollectiveArgs,
) -> anyhow::Result<Vec<f64>> {
    verify_step(workload, group)?;
    let endurance = workload.endurance();
    // How many repetitions fit the time, agreed by all ranks.
    let start = Instant::now();
    let mut trial = 0;
    loop {
        workload.step(group)?;
        trial += 1;
        let mut go_on = [i32::from(trial < 3 || start.elapsed() < TRIAL)];
        group.broadcast(&mut go_on, 0)?;
        if go_on[0] == 0 {
            break;
        }
    }
    let mut each = [start.elapsed().as_secs_f64() / f64::from(trial)];
    group.all_reduce(&mut each, Reduction::Max)?;
    let repetitions = ((args.seconds / each[0]) as usize).clamp(10, 100_000);
    let mut samples = Vec::with_capacity(repetitions);
    while samples.len() < repetitions {
        workload.fill()?;
        group.barrier()?;
        for _ in 0..endurance.min(repetitions - samples.len()) {
            let start = Instant::now();
            workload.step(group)?;
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    verify_step(workload, group)?;
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

/// Prints what rank 0 measured.
struct Report<'a> {
    args: &'a CollectiveArgs,
    transport: &'static str,
    /// The address this rank uses among the ranks.
    ip: std::net::IpAddr,
    /// The ranks' devices, if the calls are on their memory.
    devices: Option<Devices>,
    /// Plain connections, which say what TCP could do at best; made when first needed.
    ring: Option<Ring>,
    /// Memory of all ranks, which says what that could do at best; made when first needed.
    neighbours: Option<Neighbours>,
    started: bool,
}

/// The devices of the ranks, and what they could do at best.
struct Devices {
    kind: DeviceKind,
    gpu: Rc<Gpu>,
    sharing: Sharing,
    /// Of what calls have had to pass so far.
    rooflines: BTreeMap<Way, Roofline>,
    /// The engine that was explained last.
    explained: Option<&'static str>,
}

impl Devices {
    /// The bus bandwidth that the machine allows calls of this engine; all ranks at once.
    fn limit(
        &mut self,
        operation: Operation,
        engine: &str,
        group: &Group,
        ip: std::net::IpAddr,
    ) -> anyhow::Result<f64> {
        let way = device::way(engine, group, self.sharing);
        let roofline = match self.rooflines.entry(way) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => {
                *unknown.insert(Roofline::measure(group, &self.gpu, self.sharing, way, ip)?)
            }
        };
        Ok(roofline.bus(operation))
    }
}

impl<'a> Report<'a> {
    fn new(
        args: &'a CollectiveArgs,
        job: &Job,
        gpu: Option<Rc<Gpu>>,
    ) -> anyhow::Result<Report<'a>> {
        let group = job.world();
        let devices = match (args.device.device.kind()?, gpu) {
            (Some(kind), Some(gpu)) => {
                let sharing = Sharing::of(group, &gpu)?;
                let rooflines = BTreeMap::new();
                Some(Devices { kind, gpu, sharing, rooflines, explained: None })
            }
            _ => None,
        };
        let topology = group.topology();
        let transport = match group.options().transport {
            Transport::Tcp => "tcp",
            _ if topology.is_one_host() => "shm",
            _ if topology.is_all_apart() => "tcp",
            _ => "shm+tcp",
        };
        Ok(Report {
            args,
            transport,
            ip: job.ip(),
            devices,
            ring: None,
            neighbours: None,
            started: false,
        })
    }

    fn add(
        &mut self,
        workload: &mut dyn Workload,
        group: &Group,
        samples: Vec<f64>,
    ) -> anyhow::Result<()> {
        let args = self.args;
        let world = group.size();
        let explanation = group.explain(workload.request())?;
        let limit = match &mut self.devices {
            // What lies between the ranks' devices is a matter of the engine.
            Some(devices) => {
                self.transport = explanation.engine;
                Some(devices.limit(args.op, explanation.engine, group, self.ip)?)
            }
            None => self
                .least_seconds(group, workload.bytes())?
                .map(|seconds| args.op.bus_factor(world) * workload.bytes() as f64 / seconds),
        };
        if group.rank() != 0 {
            return Ok(());
        }
        let median_us = samples[samples.len() / 2];
        let p99_us = samples[(samples.len() * 99 / 100).min(samples.len() - 1)];
        let algbw_gbs = workload.bytes() as f64 / median_us / 1e3;
        let row = Row {
            op: args.op.name(),
            ranks: world,
            transport: self.transport,
            algorithm: explanation.chosen.name(),
            dtype: args.dtype.name(),
            bytes: workload.bytes(),
            median_us,
            p99_us,
            algbw_gbs,
            busbw_gbs: algbw_gbs * args.op.bus_factor(world),
            limit_gbs: limit.filter(|limit| limit.is_finite()).map(|limit| limit / 1e9),
            // A wrong result ends the measurement with an error.
            verified: true,
            device: self.devices.as_ref().map(|devices| devices.kind.name()),
            registered: args.registered,
        };
        self.print(&row, &explanation)
    }

    /// Seconds that the operation takes this machine at least, where that is known; all ranks at once.
    fn least_seconds(&mut self, group: &Group, bytes: usize) -> anyhow::Result<Option<f64>> {
        let (op, world) = (self.args.op, group.size());
        if world == 1 || op == Operation::Barrier {
            return Ok(None);
        }
        if self.transport == "shm" {
            let neighbours = match &mut self.neighbours {
                Some(neighbours) => neighbours,
                unknown => unknown.insert(Neighbours::map(group)?),
            };
            return neighbours.seconds(op, group, bytes).map(Some);
        }
        let Some(flow) = flow(op, group.topology(), bytes) else { return Ok(None) };
        let ring = match &mut self.ring {
            Some(ring) => ring,
            unknown => unknown.insert(Ring::connect(group, self.ip)?),
        };
        ring.seconds(group, flow).map(Some)
    }

    fn print(&mut self, row: &Row, explanation: &unisono::Explanation) -> anyhow::Result<()> {
        self.explain_engine(explanation.engine)?;
        if self.args.json {
            result_line!("{}", serde_json::to_string(row)?)?;
        } else {
            if !self.started {
                result_line!(
                    "{} of {}{} over {}, {}; every result verified",
                    row.op,
                    row.dtype,
                    if row.registered { " in registered memory" } else { "" },
                    row.transport,
                    match &self.devices {
                        Some(devices) => devices.sharing.told(&devices.gpu.name()?),
                        None => counted(row.ranks, "rank"),
                    }
                )?;
                result_line!(
                    "{:>10}  {:<16} {:>11} {:>11} {:>9} {:>9} {:>9}",
                    "size",
                    "algorithm",
                    "median µs",
                    "p99 µs",
                    "alg GB/s",
                    "bus GB/s",
                    "limit"
                )?;
            }
            result_line!(
                "{:>10}  {:<16} {:>11.2} {:>11.2} {:>9.3} {:>9.3} {:>9}",
                sizes::format(row.bytes),
                row.algorithm,
                row.median_us,
                row.p99_us,
                row.algbw_gbs,
                row.busbw_gbs,
                // What was beaten was measured while something else disturbed it, and limits nothing.
                row.limit_gbs
                    .filter(|&limit| limit >= row.busbw_gbs)
                    .map_or_else(|| "—".into(), |limit| format!("{limit:.3}"))
            )?;
        }
        self.started = true;
        if self.args.explain {
            let candidates = explanation.candidates.iter().map(|prediction| (prediction, true));
            let others = explanation.others.iter().map(|prediction| (prediction, false));
            for (Prediction { algorithm, seconds }, considered) in candidates.chain(others) {
                let measured = if *algorithm == explanation.chosen {
                    format!("   measured {:>11.2} µs  ← chosen", row.median_us)
                } else if considered {
                    String::new()
                } else {
                    "   not considered".into()
                };
                let line = format!(
                    "{:>12}{algorithm:<16} predicted {:>11.2} µs{measured}",
                    "",
                    seconds * 1e6
                );
                self.explain(&line)?;
            }
        }
        Ok(())
    }

    /// Says which engine runs calls on the devices, and why, where it is another than before.
    fn explain_engine(&mut self, engine: &'static str) -> anyhow::Result<()> {
        let Some(devices) = self.devices.as_mut().filter(|_| self.args.explain) else {
            return Ok(());
        };
        if devices.explained.replace(engine) == Some(engine) {
            return Ok(());
        }
        let why = self.args.device.reason(engine, devices.sharing);
        self.explain(&format!("engine: {engine}, for {why}"))
    }

    /// Prints an explanation where it does not disturb the results.
    fn explain(&self, line: &str) -> anyhow::Result<()> {
        if self.args.json {
            say!("{line}");
        } else {
            result_line!("{line}")?;
        }
        Ok(())
    }
}

/// What every rank must pass on over a link of its own, where that is known.
fn flow(operation: Operation, topology: &Topology, bytes: usize) -> Option<Flow> {
    match operation {
        // Ranks of one host need not each send to other hosts what one of them can send for all.
        _ if !topology.is_all_apart() => None,
        Operation::Broadcast | Operation::Reduce => Some(Flow::Along(bytes)),
        // One rank has many neighbours, which a ring has not.
        Operation::Gather | Operation::Scatter => None,
        _ => {
            let factor = operation.bus_factor(topology.world());
            Some(Flow::Around((factor * bytes as f64) as usize))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_ring_limits_ranks_that_share_hosts() {
        let all_reduce = |hosts: &[u32]| flow(Operation::AllReduce, &Topology::new(hosts), 4000);
        assert!(matches!(all_reduce(&[0, 1, 2, 3]), Some(Flow::Around(6000))));
        assert!(all_reduce(&[0, 0, 1, 1]).is_none());
        assert!(all_reduce(&[0, 1, 1]).is_none());
        let apart = Topology::all_apart(4);
        assert!(matches!(flow(Operation::Reduce, &apart, 4000), Some(Flow::Along(4000))));
        assert!(flow(Operation::Scatter, &apart, 4000).is_none());
    }

    #[test]
    fn buffers_beyond_all_memory_are_refused() {
        assert!(check_memory(Operation::AllReduce, &[1 << 10], 2).is_ok());
        let error = check_memory(Operation::AllToAll, &[1 << 10, 1 << 50], 2).unwrap_err();
        assert!(error.to_string().contains("1048576 GiB"), "{error}");
        assert!(check_memory(Operation::AllReduce, &[usize::MAX], 2).is_err());
    }
}
