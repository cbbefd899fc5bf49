//! NCCL as an engine between processes that share one GPU: its bits, its time beside NCCL's own, and what survivors
//! of a kill see.
//!
//!     cargo run --release -p unisono-cuda --example nccl_engine [-- kill | small]
//!
//! It starts its ranks itself: two, three and four. Each has an `NCCL_HOSTID` of its own, without which NCCL refuses
//! several ranks on one GPU; they then talk over sockets. Every operation on every type is compared bit by bit with the
//! engine of the host. Then all-reduces of three sizes take turns: ours, and `ncclAllReduce` on a communicator of
//! its own that blocks, as PyTorch's does, of the same library. For each, the median and the 99th percentile from a
//! barrier until the slowest rank's stream has come to its end, and the ratio of the medians.
//!
//! With `kill` one of four ranks is killed in the middle of calls, five times. `small` leaves out what is larger than
//! 64 KiB, to try the program itself without a device. Each ends by itself within a minute.

use std::error::Error as AnyError;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libloading::Library;
use unisono_collective::fabric::Connector;
use unisono_collective::{Dtype, Epoch, Group, Op, Options, Reduction};
use unisono_cuda::nccl::version;
use unisono_cuda::{
    Context, DeviceGroup, DeviceMemory, DevicePtr, Driver, NcclOptions, Stream, nccl_engine,
};

#[path = "shared/bits.rs"]
mod bits;
#[path = "../tests/common/processes.rs"]
mod processes;
#[path = "shared/ranks.rs"]
mod ranks;
use bits::check_everything;
use processes::{Place, Ranks, place, say};
use ranks::{call_until_lost, patterns};

type Outcome<T> = Result<T, Box<dyn AnyError>>;

const SIZES: [usize; 4] = [1 << 10, 64 << 10, 1 << 20, 64 << 20];

/// What counts as large: there, ours is to take at most 1.15 times as long as NCCL's.
const LARGE: usize = 64 << 20;
const TARGET: f64 = 1.15;

/// Sizes of scratch memory to compare.
const SCRATCHES: [usize; 2] = [8 << 20, 32 << 20];

/// All ends after this.
const LIMIT: Duration = Duration::from_secs(58);
/// A rank ends after this, whatever it does.
const RANK_LIMIT: Duration = Duration::from_secs(40);
/// Time spent on comparing bits, and on the calls of one size.
const CHECKING: Duration = Duration::from_secs(8);
const EFFORT: Duration = Duration::from_millis(600);
const MOST_CALLS: usize = 200;

const SCENARIO: &str = "DEVICE_TEST_SCENARIO";
const MOST_BYTES: &str = "DEVICE_TEST_MOST_BYTES";
const LAST: &str = "done";

fn main() -> Outcome<()> {
    if let Some(place) = place()? {
        std::thread::spawn(|| {
            std::thread::sleep(RANK_LIMIT);
            eprintln!("a rank takes too long");
            std::process::exit(4);
        });
        return match std::env::var(SCENARIO)?.as_str() {
            "measure" => measure(place),
            _ => be_killed(place),
        };
    }
    let started = Instant::now();
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        eprintln!("FAIL: it takes too long");
        std::process::exit(3);
    });
    match version(&NcclOptions::default()) {
        Ok((version, library)) => println!("NCCL {version} of {library}"),
        Err(error) => println!("FAIL: {error}"),
    }
    let pipe = std::env::var("CUDA_MPS_PIPE_DIRECTORY").unwrap_or("/tmp/nvidia-mps".into());
    let mps = std::path::Path::new(&pipe).join("control").exists();
    println!("MPS control at {pipe}: {}", if mps { "there" } else { "not there" });
    let kills = std::env::args().any(|argument| argument == "kill");
    let mut failures = 0;
    for round in 0..if kills { 5 } else { 3 } {
        let late = started.elapsed() > LIMIT - Duration::from_secs(12);
        let (what, outcome) = match (kills, late) {
            (_, true) => ("in time", Err("no time is left".into())),
            (true, _) => ("killing", show_kill(round)),
            (false, _) => ("measuring", show_measurement(2 + round)),
        };
        match outcome {
            Ok(()) => println!("PASS: {what}, round {round}"),
            Err(error) => {
                failures += 1;
                println!("FAIL: {what}, round {round}: {error}");
            }
        }
    }
    println!("{failures} failures, {:.0} s", started.elapsed().as_secs_f64());
    if failures == 0 { Ok(()) } else { Err("something failed".into()) }
}

fn start(world: usize, scenario: &str) -> Outcome<Ranks> {
    let is_small = std::env::args().any(|argument| argument == "small");
    let most: usize = if is_small { 64 << 10 } else { SIZES[SIZES.len() - 1] };
    Ranks::start(world, |rank, command| {
        command.env(SCENARIO, scenario).env(MOST_BYTES, most.to_string());
        command.env("NCCL_HOSTID", format!("unisono-{rank}"));
        // As `unisono run` sets it.
        command.env("NCCL_P2P_NET_CHUNKSIZE", "524288");
    })
}

fn show_measurement(world: usize) -> Outcome<()> {
    println!("\n{world} processes, one device");
    start(world, "measure")?.print_until(LAST, RANK_LIMIT)
}

fn show_kill(round: usize) -> Outcome<()> {
    const WORLD: usize = 4;
    let victim = round % WORLD;
    let mut ranks = start(WORLD, "be killed")?;
    for (rank, line) in ranks.hear(WORLD, RANK_LIMIT)? {
        if line != "under way" {
            return Err(format!("rank {rank}: {line}").into());
        }
    }
    std::thread::sleep(Duration::from_millis(37 * (round as u64 + 1)));
    let killed = Instant::now();
    ranks.processes[victim].kill()?;
    let expected = format!("lost rank {victim}");
    let (mut told, mut sound, mut slowest) = (0, 0, 0.0f64);
    println!("\nkill {round} of rank {victim}:");
    for _ in 0..2 * (WORLD - 1) {
        let (rank, line) = ranks.next(Duration::from_secs(20))?;
        let seconds = killed.elapsed().as_secs_f64();
        println!("  rank {rank} after {:.1} ms: {line}", seconds * 1e3);
        if line.contains(&expected) {
            told += 1;
            slowest = slowest.max(seconds);
        }
        sound += usize::from(line.starts_with("the device works"));
    }
    if told != WORLD - 1 || sound != WORLD - 1 {
        return Err("not every survivor was told, or can still use the device".into());
    }
    if slowest > 1.0 {
        return Err(format!("the last survivor was told after {slowest:.2} s").into());
    }
    Ok(())
}

/// A rank with a device.
struct Rank {
    connector: Arc<dyn Connector>,
    rank: usize,
    world: usize,
    context: Context,
    stream: Stream,
    groups: u64,
    /// Bytes of the largest call.
    most: usize,
}

impl Rank {
    fn new(place: Place) -> Outcome<Rank> {
        let context = Context::new(&Driver::load()?.device(0)?)?;
        let stream = Stream::new(&context, 0)?;
        let Place { connector, rank, world } = place;
        let most = std::env::var(MOST_BYTES)?.parse()?;
        Ok(Rank { connector, rank, world, context, stream, groups: 0, most })
    }

    /// All ranks form a group.
    fn form(&mut self, options: NcclOptions) -> Outcome<DeviceGroup> {
        let engine = nccl_engine(|| Driver::load()?.device(0), options);
        let epoch = Epoch::new(self.groups);
        self.groups += 1;
        let (connector, options) = (self.connector.clone(), Options::default());
        let group = Group::with_engine(connector, epoch, self.rank, self.world, options, engine)?;
        Ok(DeviceGroup::new(group, 0))
    }

    /// Rank 0 speaks for all.
    fn tell(&self, line: &str) -> Outcome<()> {
        if self.rank == 0 { say(line) } else { Ok(()) }
    }
}

fn measure(place: Place) -> Outcome<()> {
    let outcome = Rank::new(place).and_then(|mut rank| measure_all(&mut rank));
    match outcome {
        Ok(()) => say(LAST),
        Err(error) => say(&format!("error: {error}")).and(Err(error)),
    }
}

fn measure_all(rank: &mut Rank) -> Outcome<()> {
    let begun = Instant::now();
    let group = rank.form(NcclOptions::default())?;
    rank.tell(&format!("group formed in {:.0} ms", begun.elapsed().as_secs_f64() * 1e3))?;
    let checked = check_everything(&group, &rank.stream, rank.most, CHECKING)?;
    rank.tell(&checked)?;

    let (input, output) = (
        DeviceMemory::new(&rank.context, rank.most)?,
        DeviceMemory::new(&rank.context, rank.most)?,
    );
    let numbers = patterns(rank.rank, Dtype::F32, rank.most);
    // SAFETY: both have as many bytes, and the copy is waited for.
    unsafe { rank.stream.copy_to_device(input.pointer(), numbers.as_ptr().cast(), rank.most)? };
    rank.stream.synchronize()?;
    let baseline = Baseline::form(rank, &group)?;
    let sizes: Vec<usize> = SIZES.into_iter().filter(|size| *size <= rank.most).collect();
    let mut slow = Vec::new();
    for &size in &sizes {
        let (line, ratio) = one_size(rank, &group, &baseline, &input, &output, size)?;
        rank.tell(&line)?;
        if size >= LARGE && ratio > TARGET {
            slow.push(format!("{} MiB take {ratio:.2} times as long", size >> 20));
        }
    }
    drop(group);
    for scratch in SCRATCHES {
        let group = rank.form(NcclOptions { scratch, ..NcclOptions::default() })?;
        let size = sizes[sizes.len() - 1];
        let (line, _) = one_size(rank, &group, &baseline, &input, &output, size)?;
        rank.tell(&format!("scratch of {:3} MiB: {line}", scratch >> 20))?;
    }
    if slow.is_empty() { Ok(()) } else { Err(slow.join(", ").into()) }
}

/// Times all-reduces of one size, ours and NCCL's own in turns; a line for rank 0 to print, and the ratio.
fn one_size(
    rank: &Rank,
    group: &DeviceGroup,
    baseline: &Baseline,
    input: &DeviceMemory,
    output: &DeviceMemory,
    size: usize,
) -> Outcome<(String, f64)> {
    let (from, into) = (input.pointer(), output.pointer());
    let request = || {
        // SAFETY: both have as many bytes, and all is in the order of one stream.
        unsafe {
            group.request(Op::AllReduce, Dtype::F32, size / 4, from, into, Some(&rank.stream))
        }
    };
    let explained = group.group().explain(request()?)?;
    let predicted = explained.candidates.iter().find(|it| it.algorithm == explained.chosen);
    let predicted = predicted.map_or(f64::NAN, |candidate| candidate.seconds);
    let timed = |own: bool| -> Outcome<f64> {
        group.group().barrier()?;
        let start = Instant::now();
        if own {
            baseline.all_reduce(from, into, size / 4, &rank.stream)?;
        } else {
            group.group().run(request()?)?;
        }
        rank.stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut warm = [0.0];
    for _ in 0..3 {
        warm[0] = timed(false)? + timed(true)?;
    }
    // All ranks make as many calls.
    group.group().all_reduce(&mut warm, Reduction::Max)?;
    let calls = ((EFFORT.as_secs_f64() / warm[0]) as usize).clamp(5, MOST_CALLS);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..calls {
        ours.push(timed(false)?);
        theirs.push(timed(true)?);
    }
    for times in [&mut ours, &mut theirs] {
        group.group().all_reduce(times, Reduction::Max)?;
        times.sort_by(f64::total_cmp);
    }
    let (median, last) = (calls / 2, (calls * 99).div_ceil(100) - 1);
    let ratio = ours[median] / theirs[median];
    let line = format!(
        "{:>6} KiB {:<9} median {:9.1} µs, p99 {:9.1} µs, predicted {:9.1} µs; ncclAllReduce {:9.1} µs, p99 {:9.1} µs; \
         ratio {ratio:.2}, {calls} calls",
        size >> 10,
        explained.chosen.name(),
        ours[median] * 1e6,
        ours[last] * 1e6,
        predicted * 1e6,
        theirs[median] * 1e6,
        theirs[last] * 1e6,
    );
    Ok((line, ratio))
}

/// NCCL without us: a communicator that blocks.
struct Baseline {
    library: Library,
    communicator: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

impl Baseline {
    fn form(rank: &Rank, group: &DeviceGroup) -> Outcome<Baseline> {
        type Id = unsafe extern "C" fn(*mut UniqueId) -> c_int;
        type Init = unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int;
        let (_, path) = version(&NcclOptions::default())?;
        let (mut id, mut communicator) = (UniqueId([0; 128]), std::ptr::null_mut());
        let _entered = rank.context.enter()?;
        // SAFETY: the functions have these parameters, and the library is loaded already.
        unsafe {
            let library = Library::new(path)?;
            if rank.rank == 0 {
                accepted("ncclGetUniqueId", library.get::<Id>("ncclGetUniqueId")?(&mut id))?;
            }
            group.group().broadcast(&mut id.0, 0)?;
            let (world, own) = (rank.world as c_int, rank.rank as c_int);
            let init = library.get::<Init>("ncclCommInitRank")?;
            accepted("ncclCommInitRank", init(&mut communicator, world, id, own))?;
            Ok(Baseline { library, communicator })
        }
    }

    fn all_reduce(
        &self,
        from: DevicePtr,
        into: DevicePtr,
        count: usize,
        stream: &Stream,
    ) -> Outcome<()> {
        type AllReduce = unsafe extern "C" fn(
            DevicePtr,
            DevicePtr,
            usize,
            c_int,
            c_int,
            *mut c_void,
            *mut c_void,
        ) -> c_int;
        const FLOAT: c_int = 7;
        const SUM: c_int = 0;
        let _entered = stream.context().enter()?;
        // SAFETY: the function has these parameters; the memory has as many elements, and is waited for.
        let status = unsafe {
            let all_reduce = self.library.get::<AllReduce>("ncclAllReduce")?;
            all_reduce(from, into, count, FLOAT, SUM, self.communicator, stream.as_raw())
        };
        accepted("ncclAllReduce", status)
    }
}

fn accepted(call: &str, status: c_int) -> Outcome<()> {
    if status == 0 { Ok(()) } else { Err(format!("{call} returned {status}").into()) }
}

/// A rank that makes calls until one of its peers is killed.
fn be_killed(place: Place) -> Outcome<()> {
    let mut rank = Rank::new(place)?;
    let bytes = rank.most.min(16 << 20);
    match rank.form(NcclOptions::default()) {
        Ok(group) => call_until_lost(group, &rank.stream, bytes, 5),
        Err(error) => say(&format!("error: {error}")),
    }
}
