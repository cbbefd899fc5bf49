//! What the device window takes, between processes that share one GPU, and what its survivors see of a kill.
//!
//!     cargo run --release -p unisono-cuda --example device_window -- [variants] [host | bounce] [2 | 4] [small | kills N]
//!
//! It starts its ranks itself, two and four, or as many as it is told. `variants` prints a table of the median times of an all-reduce: for each
//! engine and way, algorithm, size of buffers and kind of copies, and for each size, each result compared with the CPU's.
//! Without it, what follows is done with the engine that is named, or with the one that is chosen. For each size: the median and the 99th percentile of an all-reduce
//! on a stream, from a barrier until the slowest rank's stream has come to its end; the time of one of many
//! calls in a row; and beside them the least that the bytes of the algorithm would take at the rate of the driver's
//! copy, measured in the same run. Every result is compared bit by bit with the canonical tree on the CPU, and so is
//! every type. Then for other sizes of the staging buffers; and at last one of four ranks is killed in the
//! middle of calls, five times. It ends by itself within 90 seconds. With a running MPS, processes
//! use the GPU at once; without, they take turns. `kills N` does nothing but kill a rank, N times. `small` leaves out what is larger than 64 KiB, to try the program itself
//! with a driver that has no device.

use std::error::Error as AnyError;
use std::time::{Duration, Instant};

use unisono_collective::engine::Memory;
use unisono_collective::fabric::Connector;
use unisono_collective::tree::Tree;
use unisono_collective::{Algorithm, Dtype, Epoch, Group, Op, Options, Reduction, Request, kernel};
use unisono_cuda::{
    BounceOptions, Context, DeviceEngine, DeviceGroup, DeviceMemory, DeviceOptions, Driver, Stream,
    Way, WindowOptions, engine,
};

#[path = "../tests/common/processes.rs"]
mod processes;
#[path = "shared/ranks.rs"]
mod ranks;
use processes::{Place, Ranks, place, say};
use ranks::{call_until_lost, patterns};

type Outcome<T> = Result<T, Box<dyn AnyError>>;

const SIZES: [usize; 6] = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];

/// Sizes of staging buffers to compare.
const BUFFERS: [usize; 5] = [2 << 20, 4 << 20, 8 << 20, 32 << 20, 64 << 20];

/// All ends after this, or, where there is nothing but kills, after the second.
const LIMIT: Duration = Duration::from_secs(88);
const LIMIT_OF_KILLS: Duration = Duration::from_secs(140);
/// A rank ends after this, whatever it does.
const RANK_LIMIT: Duration = Duration::from_secs(40);
/// Time spent on the calls of one size, and calls of one size.
const EFFORT: Duration = Duration::from_millis(300);
const MOST_CALLS: usize = 400;

/// The same in a table.
const TABLE_SIZES: [usize; 5] = [1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20];
const TABLE_EFFORT: Duration = Duration::from_millis(60);

const SCENARIO: &str = "DEVICE_TEST_SCENARIO";
const ENGINE: &str = "DEVICE_TEST_ENGINE";
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
            "measure" => measure(place, measure_all),
            "variants" => measure(place, compare_variants),
            _ => be_killed(place),
        };
    }
    let started = Instant::now();
    let kills = only_kills()?;
    let limit = if kills.is_some() { LIMIT_OF_KILLS } else { LIMIT };
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("it takes too long");
        std::process::exit(3);
    });
    let pipe = std::env::var("CUDA_MPS_PIPE_DIRECTORY").unwrap_or("/tmp/nvidia-mps".into());
    let mps = std::path::Path::new(&pipe).join("control").exists();
    println!("MPS control at {pipe}: {}", if mps { "there" } else { "not there" });
    let mut failures = 0;
    let compares = std::env::args().any(|argument| argument == "variants");
    // The number behind `kills` is one of faults.
    let asked: Option<usize> = match kills {
        Some(_) => None,
        None => std::env::args().find_map(|argument| argument.parse().ok()),
    };
    let worlds = if kills.is_some() { &[][..] } else { &[2, 4] };
    for world in worlds.iter().filter(|world| asked.is_none_or(|asked| asked == **world)) {
        let scenario = if compares { "variants" } else { "measure" };
        failures += usize::from(report("measuring", show_measurement(*world, scenario)));
    }
    if compares {
        println!("{failures} failures, {:.0} s", started.elapsed().as_secs_f64());
        return if failures == 0 { Ok(()) } else { Err("something failed".into()) };
    }
    for round in 0..kills.unwrap_or(5) {
        if started.elapsed() > limit - Duration::from_secs(12) {
            println!("kill {round}: left out for lack of time");
            continue;
        }
        failures += usize::from(report("killing", show_kill(round)));
    }
    println!("{failures} failures, {:.0} s", started.elapsed().as_secs_f64());
    if failures == 0 { Ok(()) } else { Err("something failed".into()) }
}

/// How many kills were asked for, if nothing else was.
fn only_kills() -> Outcome<Option<usize>> {
    let mut arguments = std::env::args().skip_while(|argument| argument != "kills");
    match arguments.next() {
        None => Ok(None),
        Some(_) => Ok(Some(arguments.next().ok_or("kills: how many?")?.parse()?)),
    }
}

/// Prints what went wrong; whether something did.
fn report(what: &str, outcome: Outcome<()>) -> bool {
    outcome.inspect_err(|error| println!("FAILED: {what}: {error}")).is_err()
}

fn start(world: usize, scenario: &str) -> Outcome<Ranks> {
    let is_small = std::env::args().any(|argument| argument == "small");
    let most: usize = if is_small { 64 << 10 } else { SIZES[SIZES.len() - 1] };
    let named = std::env::args().find(|argument| argument.parse::<DeviceEngine>().is_ok());
    Ranks::start(world, |_, command| {
        command.env(SCENARIO, scenario).env(MOST_BYTES, most.to_string());
        command.envs(named.iter().map(|engine| (ENGINE, engine)));
    })
}

fn show_measurement(world: usize, scenario: &str) -> Outcome<()> {
    println!("\n{world} processes, one device");
    start(world, scenario)?.print_until(LAST, RANK_LIMIT)
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
    // In the middle of some call, at another moment each time.
    std::thread::sleep(Duration::from_millis(37 * (round as u64 % 7 + 1) + round as u64));
    let killed = Instant::now();
    ranks.processes[victim].kill()?;
    let mut heard = Vec::new();
    for _ in 1..WORLD {
        let (rank, line) = ranks.next(Duration::from_secs(20))?;
        heard.push(format!(
            "rank {rank} after {:.1} ms: {line}",
            killed.elapsed().as_secs_f64() * 1e3
        ));
    }
    println!("\nkill {round} of rank {victim}:\n  {}", heard.join("\n  "));
    let mut sound = 0;
    for _ in 1..WORLD {
        let (rank, line) = ranks.next(Duration::from_secs(20))?;
        println!("  rank {rank} after {:.1} ms: {line}", killed.elapsed().as_secs_f64() * 1e3);
        sound += usize::from(line.starts_with("the device works"));
    }
    let expected = format!("lost rank {victim}");
    if sound != WORLD - 1 || heard.iter().any(|line| !line.contains(&expected)) {
        return Err("not every survivor was told, or can still use the device".into());
    }
    Ok(())
}

/// A rank with a device.
struct Rank {
    connector: std::sync::Arc<dyn Connector>,
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

    /// Those of the sizes that are to be measured.
    fn among(&self, sizes: &[usize]) -> Vec<usize> {
        sizes.iter().copied().filter(|size| *size <= self.most).collect()
    }

    /// All ranks form a group, with the engine that was named.
    fn form(&mut self, window: WindowOptions) -> Outcome<DeviceGroup> {
        let engine = std::env::var(ENGINE).ok().map(|engine| engine.parse()).transpose()?;
        self.form_with(DeviceOptions { engine, window, ..DeviceOptions::default() })
    }

    /// All ranks form a group.
    fn form_with(&mut self, options: DeviceOptions) -> Outcome<DeviceGroup> {
        let engine = engine(|| Driver::load()?.device(0), options);
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

fn measure(place: Place, all: impl Fn(&mut Rank) -> Outcome<()>) -> Outcome<()> {
    let outcome = Rank::new(place).and_then(|mut rank| all(&mut rank));
    match outcome {
        Ok(()) => say(LAST),
        Err(error) => say(&format!("error: {error}")).and(Err(error)),
    }
}

/// What ranks reduce, and what that gives.
struct Data {
    input: DeviceMemory,
    output: DeviceMemory,
    expected: Vec<f32>,
    found: Vec<f32>,
}

impl Data {
    fn new(rank: &Rank) -> Outcome<Data> {
        let largest = rank.most;
        let memory = || DeviceMemory::new(&rank.context, largest);
        let (input, output) = (memory()?, memory()?);
        let inputs: Vec<Vec<f32>> = (0..rank.world).map(|of| numbers(of, largest / 4)).collect();
        let (mut expected, found) = (vec![0f32; largest / 4], vec![0f32; largest / 4]);
        let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        let (tree, dtype, sum) = (Tree::canonical(rank.world), Dtype::F32, Reduction::Sum);
        let into = expected.as_mut_ptr().cast();
        // SAFETY: all have as many elements.
        unsafe { kernel::fold(dtype, sum, &tree, &pointers, into, None, largest / 4, None) };
        let own = inputs[rank.rank].as_ptr().cast();
        // SAFETY: both have as many bytes, and the copy is waited for.
        unsafe { rank.stream.copy_to_device(input.pointer(), own, largest)? };
        rank.stream.synchronize()?;
        Ok(Data { input, output, expected, found })
    }
}

/// Every engine and way, with what can be set about it.
fn variants() -> Vec<(String, DeviceOptions, Option<Algorithm>)> {
    let costs = Some(unisono_cuda::DeviceCosts::default());
    let window = WindowOptions { costs, ..WindowOptions::default() };
    let of = |engine, window| DeviceOptions { engine: Some(engine), window, ..Default::default() };
    let both = [Algorithm::Window, Algorithm::WindowDirect];
    let mut variants = vec![("chosen".to_owned(), DeviceOptions::default(), None)];
    for (buffer, copies_by_kernel) in [(64, false), (64, true), (32, false), (16, false)] {
        for algorithm in both {
            let by = if copies_by_kernel { " by kernels" } else { "" };
            let name = format!("window device {buffer} MiB {algorithm}{by}");
            let (buffer, way) = (Some(buffer << 20), Some(Way::Device));
            let window = WindowOptions { buffer, way, copies_by_kernel, ..window };
            variants.push((name, of(DeviceEngine::Window, window), Some(algorithm)));
        }
    }
    let ways = [(Way::Copied, &[2, 4, 8, 16][..]), (Way::Mapped, &[4, 16]), (Way::Folded, &[4])];
    for (way, buffers) in ways {
        for buffer in buffers {
            for algorithm in both {
                let name = format!("host {way} {buffer} MiB {algorithm}");
                let window = WindowOptions { host_buffer: buffer << 20, way: Some(way), ..window };
                variants.push((name, of(DeviceEngine::HostWindow, window), Some(algorithm)));
            }
        }
    }
    for chunk in [1, 4, 16] {
        let bounce = BounceOptions { chunk: chunk << 20 };
        let options = DeviceOptions { bounce, ..DeviceEngine::Bounce.into() };
        variants.push((format!("bounce {chunk} MiB"), options, None));
    }
    variants
}

/// A table of all variants.
fn compare_variants(rank: &mut Rank) -> Outcome<()> {
    rank.most = rank.most.min(TABLE_SIZES[TABLE_SIZES.len() - 1]);
    let mut data = Data::new(rank)?;
    let sizes = rank.among(&TABLE_SIZES);
    let head: String = sizes.iter().map(|size| format!("{:>10}", size >> 10)).collect();
    rank.tell(&format!("median µs of an all-reduce of so many KiB {:7} {head}   forms in ms", ""))?;
    for (name, options, algorithm) in variants() {
        let begun = Instant::now();
        let group = rank.form_with(options)?;
        let formed = begun.elapsed().as_secs_f64() * 1e3;
        let mut line = String::new();
        for &size in &sizes {
            let times = time(rank, &group, &data, size, algorithm, TABLE_EFFORT)?;
            let Data { output, expected, found, .. } = &mut data;
            verify(rank, output, &mut found[..size / 4], expected)
                .map_err(|error| format!("{name}, {size} bytes: {error}"))?;
            line += &format!("{:>10.1}", times[times.len() / 2] * 1e6);
        }
        rank.tell(&format!("{name:<45} {line} {formed:>10.0}"))?;
        if name == "chosen" {
            for &size in &sizes {
                let request = Request::sized(Op::AllReduce, Dtype::F32, size / 4);
                // SAFETY: a call that is only explained has no memory.
                let request = unsafe { request.in_memory(Memory::Device(0)) };
                let explained = group.group().explain(request)?;
                let predicted: Vec<String> = explained
                    .candidates
                    .iter()
                    .map(|it| format!("{} {:.1} µs", it.algorithm, it.seconds * 1e6))
                    .collect();
                let (chosen, engine) = (explained.chosen, explained.engine);
                let list = predicted.join(", ");
                rank.tell(&format!(
                    "  {:>8} KiB by {chosen}, {engine}; predicted {list}",
                    size >> 10
                ))?;
            }
        }
    }
    Ok(())
}

fn measure_all(rank: &mut Rank) -> Outcome<()> {
    let begun = Instant::now();
    let group = rank.form(WindowOptions::default())?;
    rank.tell(&format!("group formed in {:.0} ms", begun.elapsed().as_secs_f64() * 1e3))?;
    let mut data = Data::new(rank)?;
    group.group().barrier()?;
    let mut copy = [0.0];
    if rank.rank == 0 {
        copy[0] = copy_rate(rank, &data.output, &data.input)?;
    }
    group.group().all_reduce(&mut copy, Reduction::Max)?;
    rank.tell(&format!("copy of the driver, alone: {:.0} GB/s read and written", copy[0] / 1e9))?;

    for size in rank.among(&SIZES) {
        let line = one_size(rank, &group, &mut data, size, None, copy[0])?;
        rank.tell(&line)?;
    }
    every_type(rank, &group)?;
    let is_window = group.engine()? != DeviceEngine::Bounce.name();
    let forced = [Algorithm::Window, Algorithm::WindowDirect].into_iter().filter(|_| is_window);
    for algorithm in forced {
        for size in rank.among(&[64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]) {
            let line = one_size(rank, &group, &mut data, size, Some(algorithm), copy[0])?;
            rank.tell(&format!("forced {line}"))?;
        }
    }
    drop(group);
    for buffer in BUFFERS.into_iter().filter(|_| is_window) {
        let window = WindowOptions { buffer: Some(buffer), ..WindowOptions::default() };
        let group = rank.form(window)?;
        for size in rank.among(&[64 << 10, 64 << 20]) {
            let line = one_size(rank, &group, &mut data, size, None, copy[0])?;
            rank.tell(&format!("buffers of {:2} MiB: {line}", buffer >> 20))?;
        }
    }
    Ok(())
}

/// Sorted times of the all-reduce of one size, each of its slowest rank.
fn time(
    rank: &Rank,
    group: &DeviceGroup,
    data: &Data,
    size: usize,
    algorithm: Option<Algorithm>,
    effort: Duration,
) -> Outcome<Vec<f64>> {
    let once = || -> Outcome<f64> {
        group.group().barrier()?;
        let start = Instant::now();
        group.group().run(request(rank, group, data, size, algorithm)?)?;
        rank.stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut warm = [0.0];
    for _ in 0..5 {
        warm[0] = once()?;
    }
    // All ranks make as many calls.
    group.group().all_reduce(&mut warm, Reduction::Max)?;
    let calls = ((effort.as_secs_f64() / warm[0]) as usize).clamp(10, MOST_CALLS);
    let mut times = (0..calls).map(|_| once()).collect::<Outcome<Vec<f64>>>()?;
    group.group().all_reduce(&mut times, Reduction::Max)?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// The all-reduce of one size.
fn request(
    rank: &Rank,
    group: &DeviceGroup,
    data: &Data,
    size: usize,
    algorithm: Option<Algorithm>,
) -> Outcome<Request<'static>> {
    let (input, output, stream) = (data.input.pointer(), data.output.pointer(), Some(&rank.stream));
    // SAFETY: both have as many bytes, and all is in the order of one stream.
    let request =
        unsafe { group.request(Op::AllReduce, Dtype::F32, size / 4, input, output, stream) }?;
    Ok(request.with_algorithm(algorithm))
}

/// Times the all-reduce of one size and compares its result; a line for rank 0 to print.
fn one_size(
    rank: &Rank,
    group: &DeviceGroup,
    data: &mut Data,
    size: usize,
    algorithm: Option<Algorithm>,
    copy: f64,
) -> Outcome<String> {
    let explained = group.group().explain(request(rank, group, data, size, algorithm)?)?;
    let (chosen, engine) = (explained.chosen, explained.engine);
    let predicted = explained.candidates.iter().find(|candidate| candidate.algorithm == chosen);
    let predicted = predicted.map_or(f64::NAN, |candidate| candidate.seconds);
    let times = time(rank, group, data, size, algorithm, EFFORT)?;
    let calls = times.len();

    group.group().barrier()?;
    let start = Instant::now();
    for _ in 0..calls {
        group.group().run(request(rank, group, data, size, algorithm)?)?;
    }
    rank.stream.synchronize()?;
    let in_a_row = start.elapsed().as_secs_f64() / calls as f64;
    let Data { output, expected, found, .. } = data;
    verify(rank, output, &mut found[..size / 4], expected)?;

    let n = rank.world;
    let moved = match chosen {
        Algorithm::WindowDirect => n * (n + 3),
        _ => 5 * n - 2,
    };
    // Of what is staged on the device.
    let least = (moved * size) as f64 / copy;
    Ok(format!(
        "{:>8} KiB {:<13} median {:8.1} µs, p99 {:8.1} µs, in a row {:8.1} µs, predicted {:8.1} µs, its bytes {:7.1} µs, {calls} calls, {engine}",
        size >> 10,
        chosen.name(),
        times[calls / 2] * 1e6,
        times[(calls * 99).div_ceil(100) - 1] * 1e6,
        in_a_row * 1e6,
        predicted * 1e6,
        least * 1e6
    ))
}

/// Bytes read and written per second by a copy of the driver.
fn copy_rate(rank: &Rank, into: &DeviceMemory, from: &DeviceMemory) -> Outcome<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        let start = Instant::now();
        for _ in 0..4 {
            // SAFETY: both have as many bytes.
            unsafe { rank.stream.copy(into.pointer(), from.pointer(), rank.most)? };
        }
        rank.stream.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / 4.0);
    }
    Ok(2.0 * rank.most as f64 / best)
}

/// Compares the result with the CPU's, and forgets it.
fn verify(rank: &Rank, output: &DeviceMemory, found: &mut [f32], expected: &[f32]) -> Outcome<()> {
    let bytes = size_of_val(found);
    // SAFETY: both have as many bytes, and the copy is waited for.
    unsafe {
        rank.stream.copy_to_host(found.as_mut_ptr().cast(), output.pointer(), bytes)?;
        rank.stream.fill(output.pointer(), 0x55, bytes)?;
    }
    rank.stream.synchronize()?;
    let wrong = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
    match wrong {
        Some(at) => Err(format!("element {at} is {}, not {}", found[at], expected[at]).into()),
        None => Ok(()),
    }
}

/// Sums, means and maxima of every type, in place and in many segments, against the CPU.
fn every_type(rank: &Rank, group: &DeviceGroup) -> Outcome<()> {
    let elements = (rank.most / 32 + 1).min(3_000_001);
    let mut checked = 0;
    for dtype in Dtype::ALL {
        let bytes = elements * dtype.size();
        let memory = DeviceMemory::new(&rank.context, bytes)?;
        let inputs: Vec<Vec<u64>> = (0..rank.world).map(|of| patterns(of, dtype, bytes)).collect();
        let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        for reduction in [Reduction::Sum, Reduction::Mean, Reduction::Max] {
            for count in [1, elements] {
                let mut expected = vec![0u64; bytes.div_ceil(8)];
                let tree = Tree::canonical(rank.world);
                let divisor = (reduction == Reduction::Mean).then_some(rank.world as u32);
                let into = expected.as_mut_ptr().cast();
                // SAFETY: all have as many elements.
                unsafe {
                    kernel::fold(dtype, reduction, &tree, &pointers, into, None, count, divisor)
                };
                let mut found = vec![0u64; bytes.div_ceil(8)];
                let (at, stream) = (memory.pointer(), &rank.stream);
                let used = count * dtype.size();
                // SAFETY: all have as many elements, and the last copy is waited for.
                unsafe {
                    stream.copy_to_device(at, pointers[rank.rank], used)?;
                    group.all_reduce(at, at, count, dtype, reduction, Some(stream))?;
                    stream.copy_to_host(found.as_mut_ptr().cast(), at, used)?;
                }
                stream.synchronize()?;
                if found != expected {
                    return Err(format!("{count} {dtype} by {reduction} differ").into());
                }
                checked += 1;
            }
        }
    }
    rank.tell(&format!("{checked} calls on every type have the bits of the CPU"))
}

/// Numbers around one whose sums round.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|i| {
            let bits = (i ^ (rank as u32) << 28).wrapping_mul(0x9e37_79b9) ^ i >> 7;
            let bits = bits.wrapping_mul(0x85eb_ca6b);
            f32::from_bits(0x3f00_0000 | bits & 0x80ff_ffff)
        })
        .collect()
}

/// A rank that makes calls until one of its peers is killed.
fn be_killed(place: Place) -> Outcome<()> {
    let mut rank = Rank::new(place)?;
    let bytes = rank.most.min(16 << 20);
    let group = rank.form(WindowOptions::default())?;
    call_until_lost(group, &rank.stream, bytes, 20)
}
