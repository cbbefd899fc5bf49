//! Folding inside the hosts first, on one GPU whose processes pretend to be on several hosts: bits, times beside the flat
//! engine, and what survivors of a kill see.
//!
//!     cargo run --release -p unisono-cuda --example hierarchy [-- HOSTSxRANKS | kill | small]
//!
//! It starts its ranks itself, two hosts of two unless told otherwise (`2x4`, `4x2`), three times: with an NCCL of all ranks,
//! for which each rank has an `NCCL_HOSTID` of its own; with one of the counterparts alone, which have the `NCCL_HOSTID` of their
//! host; and without NCCL, through the hosts. Each time, every operation on every type is compared bit by bit with
//! the engine of the host. Then all-reduces take turns: through the levels, and by the flat engine alone (`nccl`, or `bounce`
//! where NCCL does not take all ranks). For each size it prints the medians from a barrier until the slowest rank's stream has
//! come to the end, their ratio, what was predicted of the first, and what a group would choose that is asked for nothing.
//!
//! All goes over loopback, so that the network is as fast as the machine copies; between machines the flat engine loses more.
//!
//! With `kill` one of four ranks is killed in the middle of calls, twice for each of the three. `small` leaves out what is
//! larger than 64 KiB, to try the program itself without a device. It ends by itself within three minutes.

use std::error::Error as AnyError;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_collective::fabric::Connector;
use unisono_collective::{Algorithm, Dtype, Epoch, Group, Op, Options, Reduction};
use unisono_cuda::{
    Context, DeviceEngine, DeviceGroup, DeviceMemory, Driver, NCCL_VARIABLE, Stream, engine,
};

#[path = "shared/bits.rs"]
mod bits;
#[path = "../tests/common/processes.rs"]
mod processes;
#[path = "shared/ranks.rs"]
mod ranks;
use bits::check_everything;
use processes::{HOSTS, Place, Ranks, place, say};
use ranks::{call_until_lost, patterns};

type Outcome<T> = Result<T, Box<dyn AnyError>>;

const SIZES: [usize; 5] = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// All ends after this.
const LIMIT: Duration = Duration::from_secs(170);
/// A rank ends after this, whatever it does.
const RANK_LIMIT: Duration = Duration::from_secs(55);
/// Time spent on comparing bits, and on the calls of one size.
const CHECKING: Duration = Duration::from_secs(12);
const EFFORT: Duration = Duration::from_millis(1200);
const MOST_CALLS: usize = 200;

const SCENARIO: &str = "DEVICE_TEST_SCENARIO";
const MOST_BYTES: &str = "DEVICE_TEST_MOST_BYTES";
const BETWEEN: &str = "DEVICE_TEST_BETWEEN";
const LAST: &str = "done";

/// Who takes messages from host to host.
const BETWEENS: [&str; 3] = ["nccl", "counterparts", "hosts"];

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
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let kills = arguments.iter().any(|argument| argument == "kill");
    let shape = arguments.iter().find_map(|argument| {
        let (hosts, each) = argument.split_once('x')?;
        Some((hosts.parse().ok()?, each.parse().ok()?))
    });
    let shape = shape.unwrap_or((2, 2));
    let mut failures = 0;
    for round in 0..if kills { 6 } else { 3 } {
        let between = BETWEENS[round % 3];
        let outcome = match kills {
            true => show_kill(between, round),
            false => show_measurement(between, shape),
        };
        match outcome {
            Ok(()) => println!("PASS: {between}"),
            Err(error) => {
                failures += 1;
                println!("FAIL: {between}: {error}");
            }
        }
    }
    println!("{failures} failures, {:.0} s", started.elapsed().as_secs_f64());
    if failures == 0 { Ok(()) } else { Err("something failed".into()) }
}

fn start((hosts, each): (usize, usize), scenario: &str, between: &str) -> Outcome<Ranks> {
    let is_small = std::env::args().any(|argument| argument == "small");
    let most: usize = if is_small { 64 << 10 } else { SIZES[SIZES.len() - 1] };
    let list: Vec<String> = (0..hosts * each).map(|rank| (rank / each).to_string()).collect();
    Ranks::start(hosts * each, |rank, command| {
        command.env(SCENARIO, scenario).env(MOST_BYTES, most.to_string()).env(BETWEEN, between);
        command.env(HOSTS, list.join(","));
        let id = if between == "nccl" { rank } else { rank / each };
        command.env("NCCL_HOSTID", format!("unisono-{id}"));
        if between == "hosts" {
            command.env(NCCL_VARIABLE, "/nowhere/libnccl.so.2");
        }
    })
}

fn show_measurement(between: &str, shape: (usize, usize)) -> Outcome<()> {
    println!("\n{} hosts of {} ranks, one device, {between} between", shape.0, shape.1);
    start(shape, "measure", between)?.print_until(LAST, RANK_LIMIT)
}

fn show_kill(between: &str, round: usize) -> Outcome<()> {
    const WORLD: usize = 4;
    let victim = round % WORLD;
    let mut ranks = start((2, 2), "be killed", between)?;
    for (rank, line) in ranks.hear(WORLD, RANK_LIMIT)? {
        if line != "under way" {
            return Err(format!("rank {rank}: {line}").into());
        }
    }
    std::thread::sleep(Duration::from_millis(37 * (round as u64 + 1)));
    let killed = Instant::now();
    ranks.processes[victim].kill()?;
    let expected = format!("lost rank {victim}");
    let (mut told, mut sound) = (0, 0);
    println!("\nkill {round} of rank {victim}:");
    for _ in 0..2 * (WORLD - 1) {
        let (rank, line) = ranks.next(Duration::from_secs(20))?;
        println!("  rank {rank} after {:.1} ms: {line}", killed.elapsed().as_secs_f64() * 1e3);
        told += usize::from(line.contains(&expected));
        sound += usize::from(line.starts_with("the device works"));
    }
    if told != WORLD - 1 || sound != WORLD - 1 {
        return Err("not every survivor was told, or can still use the device".into());
    }
    Ok(())
}

/// A rank with a device.
struct Rank {
    connector: Arc<dyn Connector>,
    rank: usize,
    world: usize,
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
        Ok(Rank { connector, rank, world, stream, groups: 0, most })
    }

    /// All ranks form a group with this engine, or with the best one, and with an algorithm for all calls that have it.
    fn form(
        &mut self,
        asked: Option<DeviceEngine>,
        algorithm: Option<Algorithm>,
    ) -> Outcome<DeviceGroup> {
        let options = unisono_cuda::DeviceOptions { engine: asked, ..Default::default() };
        let engine = engine(|| Driver::load()?.device(0), options);
        let epoch = Epoch::new(self.groups);
        self.groups += 1;
        let (connector, mut options) = (self.connector.clone(), Options::default());
        options.algorithm = algorithm;
        let group = Group::with_engine(connector, epoch, self.rank, self.world, options, engine)?;
        Ok(DeviceGroup::new(group, 0))
    }

    /// A group all of whose calls that can go through the levels.
    fn form_hierarchy(&mut self) -> Outcome<DeviceGroup> {
        self.form(Some(DeviceEngine::Hierarchical), Some(Algorithm::Hierarchical))
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
    let levels = rank.form_hierarchy()?;
    rank.tell(&format!("group formed in {:.0} ms", begun.elapsed().as_secs_f64() * 1e3))?;
    rank.tell(&check_everything(&levels, &rank.stream, rank.most, CHECKING)?)?;
    let flat = match std::env::var(BETWEEN)?.as_str() {
        "nccl" => DeviceEngine::Nccl,
        _ => DeviceEngine::Bounce,
    };
    let groups = [levels, rank.form(Some(flat), None)?, rank.form(None, None)?];
    let memory = || DeviceMemory::new(rank.stream.context(), rank.most);
    let (input, output) = (memory()?, memory()?);
    let numbers = patterns(rank.rank, Dtype::F32, rank.most);
    // SAFETY: both have as many bytes, and the copy is waited for.
    unsafe { rank.stream.copy_to_device(input.pointer(), numbers.as_ptr().cast(), rank.most)? };
    rank.stream.synchronize()?;
    for size in SIZES.into_iter().filter(|size| *size <= rank.most) {
        rank.tell(&one_size(rank, &groups, flat, &input, &output, size)?)?;
    }
    Ok(())
}

/// Times all-reduces of one size, of the first two groups in turns; a line for rank 0 to print.
fn one_size(
    rank: &Rank,
    groups: &[DeviceGroup; 3],
    flat: DeviceEngine,
    input: &DeviceMemory,
    output: &DeviceMemory,
    size: usize,
) -> Outcome<String> {
    let request = |group: &DeviceGroup| {
        let (from, into) = (input.pointer(), output.pointer());
        // SAFETY: both have as many bytes, and all is in the order of one stream.
        unsafe {
            group.request(Op::AllReduce, Dtype::F32, size / 4, from, into, Some(&rank.stream))
        }
    };
    let explain =
        |group: &DeviceGroup| Ok::<_, Box<dyn AnyError>>(group.group().explain(request(group)?)?);
    let explained = explain(&groups[0])?;
    let predicted = explained.candidates.iter().find(|it| it.algorithm == explained.chosen);
    let predicted = predicted.map_or(f64::NAN, |candidate| candidate.seconds);
    let timed = |group: &DeviceGroup| -> Outcome<f64> {
        groups[0].group().barrier()?;
        let start = Instant::now();
        group.group().run(request(group)?)?;
        rank.stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut warm = [0.0];
    for _ in 0..3 {
        warm[0] = timed(&groups[0])? + timed(&groups[1])?;
    }
    // All ranks make as many calls.
    groups[0].group().all_reduce(&mut warm, Reduction::Max)?;
    let calls = ((EFFORT.as_secs_f64() / warm[0]) as usize).clamp(5, MOST_CALLS);
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..calls {
        for (times, group) in times.iter_mut().zip(groups) {
            times.push(timed(group)?);
        }
    }
    for times in &mut times {
        groups[0].group().all_reduce(times, Reduction::Max)?;
        times.sort_by(f64::total_cmp);
    }
    let [ours, theirs] = times.map(|times| times[calls / 2]);
    Ok(format!(
        "{:>6} KiB {}: median {:9.1} µs, predicted {:9.1} µs; {flat} {:9.1} µs; ratio {:.2}, {calls} calls; \
         a group's own choice: {}",
        size >> 10,
        explained.engine,
        ours * 1e6,
        predicted * 1e6,
        theirs * 1e6,
        ours / theirs,
        explain(&groups[2])?.engine,
    ))
}

/// A rank that makes calls until one of its peers is killed.
fn be_killed(place: Place) -> Outcome<()> {
    let mut rank = Rank::new(place)?;
    let bytes = rank.most.min(16 << 20);
    match rank.form_hierarchy() {
        Ok(group) => call_until_lost(group, &rank.stream, bytes, 5),
        Err(error) => say(&format!("error: {error}")),
    }
}
