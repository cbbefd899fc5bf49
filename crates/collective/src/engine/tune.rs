//! Measures, when a group forms, what the cost model needs to know.
//!
//! Pairs of ranks exchange a few messages over each class of link, the ranks of a host wait for
//! each other a few times, and every rank copies and folds a little memory by itself. The ranks
//! then average what they found, so that all of them choose alike. It takes a few milliseconds. Between hosts, which may
//! need several [streams], it takes some 40 ms at 1 Gbit/s; and where there are [several regions](super::survey) a few dozen times as long as a message between them.

use std::sync::Arc;
use std::time::Instant;

use super::HostEngine;
use super::streams::{self, try_streams};
use crate::buffers::Buffers;
use crate::call::Call;
use crate::cost::{Costs, FEW_RANKS, LinkCost, WindowCost};
use crate::dtype::{Dtype, Reduction, Unit};
use crate::error::Error;
use crate::kernel;
use crate::link::Run;
use crate::request::Request;
use crate::schedule::{
    Algorithm, Area, Collect, Layout, Op, Recv, Round, Rounds, Send, Source, Stage, Topology,
    Window, WindowFold,
};
use crate::tree::Tree;

/// Repetitions of what takes microseconds. Ranks do not arrive together, so single times say
/// little: a batch is timed as a whole.
const SHORT: usize = 12;

/// Batches; the quickest counts, since whatever else the machine does can only add to it.
const BATCHES: usize = 8;

/// Ranks from which on there are fewer of both: what all of them do together takes longer the more
/// they are, above all if they share cores. Larger: large groups form later. Smaller: they are
/// measured less well.
const MANY: usize = 16;

/// Messages that the measurement of empty messages between all ranks may send. More: a better
/// measurement. Fewer: large groups form sooner; each of a thousand ranks sends a thousand.
const MESSAGES: usize = 200_000;

/// How many times slower than typical shared memory, or the effort for a message, may seem before it is not believed.
const UNLIKELY: f64 = 4.0;

/// Bytes of a column in the measurement of a window, and columns.
const WINDOW_COLUMN: usize = 64 << 10;
const WINDOW_SEGMENTS: usize = 8;

/// Repetitions of what takes longer.
const LONG: usize = 1;

/// Bytes of the first, careful measurement of a link's rate: five milliseconds at 100 Mbit/s.
const PROBE: usize = 64 << 10;

/// Bytes of the second one, if the first was quick enough.
const LARGE_PROBE: usize = streams::BYTES;

/// Exchanges over a link between regions that are timed as one, and how often. The first is even: two ranks that begin at
/// different times take turns in finding the other's message there already. Larger: worlds with regions form later. Smaller:
/// links that lose packets, and those whose rate TCP has not found out yet, are measured less well.
const TURNS: usize = 2;
const WIDE_BATCHES: usize = 6;

/// Seconds the first measurement may take for the second to follow.
const QUICK: f64 = 2e-3;

/// What one rank found, to be averaged: sums and numbers of findings.
#[derive(Default)]
struct Findings {
    sums: [f64; Finding::COUNT],
    numbers: [f64; Finding::COUNT],
}

#[derive(Clone, Copy)]
enum Finding {
    Wait,
    NearLatency,
    NearProbe,
    FarLatency,
    FarProbe,
    NearLarge,
    FarLarge,
    WideLatency,
    WideProbe,
    All,
    WindowCopy,
    WindowFold,
    Copy,
    Fold,
    Crowd,
    Threads,
    OneStream,
    FewStreams,
    MostStreams,
}

impl Finding {
    const COUNT: usize = 19;

    /// What was found of each number of streams that is tried.
    const STREAMS: [Finding; streams::TRIED.len()] =
        [Finding::OneStream, Finding::FewStreams, Finding::MostStreams];
}

impl Findings {
    fn add(&mut self, finding: Finding, seconds: Option<f64>) {
        if let Some(seconds) = seconds {
            self.sums[finding as usize] += seconds;
            self.numbers[finding as usize] += 1.0;
        }
    }

    fn set(&mut self, finding: Finding, seconds: f64) {
        (self.sums[finding as usize], self.numbers[finding as usize]) = (seconds, 1.0);
    }

    fn mean(&self, finding: Finding) -> Option<f64> {
        let (sum, number) = (self.sums[finding as usize], self.numbers[finding as usize]);
        (number > 0.0).then(|| sum / number)
    }

    /// Adds up what all ranks found.
    fn share(&mut self, engine: &mut HostEngine) -> Result<(), Error> {
        let mut all = [self.sums, self.numbers].concat();
        let request = Request::all_reduce(&mut all, Reduction::Sum);
        engine.run_unnumbered(request.with_algorithm(Algorithm::Tree))?;
        self.sums.copy_from_slice(&all[..Finding::COUNT]);
        self.numbers.copy_from_slice(&all[Finding::COUNT..]);
        Ok(())
    }
}

/// How often what takes microseconds is measured. Equal on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Effort {
    batches: usize,
    /// Repetitions in a batch.
    short: usize,
}

impl Effort {
    fn of(world: usize) -> Effort {
        let fewer = |number: usize| (number * MANY / world).clamp(2, number);
        Effort { batches: fewer(BATCHES), short: fewer(SHORT) }
    }

    /// For exchanges between all ranks, whose number of messages grows with the square of theirs.
    fn for_all(world: usize) -> Effort {
        let Effort { batches, short } = Effort::of(world);
        let rounds = (MESSAGES / (world * world)).max(1);
        let batches = batches.min(rounds);
        Effort { batches, short: short.min(rounds / batches) }
    }
}

/// Measures the group and tells the engine. Hosts that `are_one` machine have no links that one stream could not fill.
/// Between regions several would not help, and ranks that share cores could not tell.
pub fn measure(engine: &mut HostEngine, crowd: f64, are_one: bool) -> Result<(), Error> {
    let topology = engine.topology.clone();
    let [near, far, wide] =
        [Class::Near, Class::Far, Class::Wide].map(|class| partner(&topology, engine.rank, class));
    let short = Effort::of(topology.world()).short;
    let mut own = Findings::default();
    own.add(Finding::Crowd, Some(crowd));
    own.add(Finding::Threads, Some(engine.helpers.mean_threads()));
    own.add(Finding::Wait, wait(engine)?);
    own.add(Finding::WindowCopy, through_window(engine, false)?);
    own.add(Finding::WindowFold, through_window(engine, true)?);
    own.add(Finding::NearLatency, exchange(engine, near, 0, short)?);
    own.add(Finding::NearProbe, exchange(engine, near, PROBE, LONG)?);
    own.add(Finding::FarLatency, exchange(engine, far, 0, short)?);
    // Ranks of one host share its way to other hosts: only one of them measures its rate.
    let first = |rank| topology.members(topology.host(rank))[0] == rank;
    let far_rate = far.filter(|_| first(engine.rank));
    own.add(Finding::FarProbe, exchange(engine, far_rate, PROBE, LONG)?);
    // All pairs of hosts at once, so that the rate is that of the whole way between their regions.
    if let Some(peer) = wide.filter(|_| first(engine.rank)) {
        let times = WIDE_BATCHES;
        let latency = exchange_with(engine, &[peer], 0, TURNS, times)?;
        own.add(Finding::WideLatency, Some(latency));
        own.add(Finding::WideProbe, Some(exchange_with(engine, &[peer], PROBE, TURNS, times)?));
    }
    own.add(Finding::All, all_to_all(engine)?);
    own.add(Finding::Copy, Some(copy()));
    own.add(Finding::Fold, Some(fold()));
    let mut findings = own;
    findings.share(engine)?;

    let mut large = Findings::default();
    let quick = |finding| findings.mean(finding).is_some_and(|seconds| seconds < QUICK);
    if quick(Finding::NearProbe) {
        large.add(Finding::NearLarge, exchange(engine, near, LARGE_PROBE, LONG)?);
    }
    if quick(Finding::FarProbe) {
        large.add(Finding::FarLarge, exchange(engine, far_rate, LARGE_PROBE, LONG)?);
    }
    large.share(engine)?;
    let is_quick = large.mean(Finding::FarLarge).is_some_and(|seconds| seconds < streams::SLOWEST);
    let mut streams = 1;
    let is_alone = crowd_of(&findings) <= 1.0;
    if is_quick && is_alone && !are_one && topology.regions() == 1 {
        let seconds;
        (streams, seconds) = needed_streams(engine, far_rate)?;
        if streams > 1 {
            // What the link carries is what they carry together.
            large.set(Finding::FarLarge, seconds);
        }
    }
    let surveyed = engine.surveyed;
    engine.set_costs(Costs { streams, surveyed, ..costs(&findings, &large, &topology) });
    // The others were opened in vain.
    engine.links.close_lanes();
    log::debug!("measured costs: {:?}", engine.costs());
    Ok(())
}

/// Streams that links between hosts need, as all ranks find together, and the seconds that an exchange then takes.
fn needed_streams(engine: &mut HostEngine, partner: Option<usize>) -> Result<(usize, f64), Error> {
    // The user has said how many, or there would be too many.
    if engine.options().streams.is_some() || engine.topology.world() > FEW_RANKS {
        return Ok((1, f64::INFINITY));
    }
    let mut findings = Findings::default();
    if let Some(partner) = partner {
        let seconds = try_streams(engine, partner)?;
        for (finding, seconds) in Finding::STREAMS.into_iter().zip(seconds) {
            findings.add(finding, Some(seconds));
        }
    }
    findings.share(engine)?;
    let seconds = Finding::STREAMS.map(|tried| findings.mean(tried).unwrap_or(f64::INFINITY));
    log::debug!("seconds over {:?} streams: {seconds:?}", streams::TRIED);
    let needed = streams::needed(&seconds);
    Ok((streams::TRIED[needed], seconds[needed]))
}

/// Ranks per core.
fn crowd_of(findings: &Findings) -> f64 {
    findings.mean(Finding::Crowd).unwrap_or(1.0)
}

/// Takes over the costs that rank 0 knows of an earlier group: in one message, so that all ranks choose
/// alike. `false` if it has none that will do.
pub fn agree(engine: &mut HostEngine, known: Option<Costs>, crowd: f64) -> Result<bool, Error> {
    let known = known.filter(|costs| costs.cover(&engine.topology, engine.surveyed > 0));
    // Rank 0 says for all of them how crowded the hosts are now, and how many threads a rank has.
    let mut message = match known {
        Some(costs) => {
            let threads = engine.helpers.mean_threads();
            let surveyed = engine.surveyed;
            Costs { threads, surveyed, ..costs.in_crowd(crowd) }.to_numbers()
        }
        None => [f64::NAN; Costs::NUMBERS],
    };
    let request = Request::broadcast(&mut message, 0).with_algorithm(Algorithm::Tree);
    engine.run_unnumbered(request)?;
    if message.iter().any(|number| !number.is_finite()) {
        return Ok(false);
    }
    engine.set_costs(Costs::from_numbers(message));
    log::debug!("costs of an earlier group: {:?}", engine.costs());
    Ok(true)
}

/// Turns findings into costs; what could not be measured keeps a typical value.
fn costs(findings: &Findings, large: &Findings, topology: &Topology) -> Costs {
    let typical = Costs::default();
    // Ranks that share a core work one after the other.
    let crowd = crowd_of(findings);
    let fold = findings.mean(Finding::Fold).unwrap_or(typical.fold) * crowd;
    let host = (0..topology.hosts()).map(|h| topology.members(h).len()).max().unwrap_or(1);
    let window = window_cost(findings, fold, crowd, host as f64);
    // On a busy machine an empty message may take as long as a full one. A byte is not free for
    // that: it is copied into a socket and out of it.
    let copies = 2.0 * findings.mean(Finding::Copy).unwrap_or(Costs::default().window.copy);
    let link = |latency, probe, large_probe, typical: LinkCost| {
        let Some(latency) = findings.mean(latency) else { return typical };
        let rate = |seconds: f64, bytes: usize| ((seconds - latency) / bytes as f64).max(copies);
        let byte = match (large.mean(large_probe), findings.mean(probe)) {
            (Some(seconds), _) => rate(seconds, LARGE_PROBE),
            (None, Some(seconds)) => rate(seconds, PROBE),
            (None, None) => typical.byte,
        };
        let peers = together(topology) as f64 - 1.0;
        let message = match findings.mean(Finding::All) {
            // The first exchange is the latency, every further one an effort.
            Some(all) if peers > 1.0 => (all - latency).max(0.0) / (2.0 * (peers - 1.0)),
            _ => latency / 4.0,
        };
        // Ranks that had no core meanwhile seem to take long for a message. Large calls would then go by an algorithm of
        // few messages and many bytes: between three hosts by a tree, at half the rate of the links.
        let message = message.min(UNLIKELY * crowd * typical.message);
        // A rank that exchanges empty messages with one other sends one and receives one. With many at once it also waits
        // for those that begin later, which is no effort. Ranks that share a core do need as long: they take turns.
        let message = if crowd <= 1.0 { message.min(latency / 2.0) } else { message };
        LinkCost { latency: (latency - 2.0 * message).max(latency / 4.0), message, byte }
    };
    let near = link(Finding::NearLatency, Finding::NearProbe, Finding::NearLarge, typical.near);
    let far = link(Finding::FarLatency, Finding::FarProbe, Finding::FarLarge, typical.far);
    let wide = findings.mean(Finding::WideLatency).map_or(typical.wide, |latency| {
        let pairs = topology.smallest_region() as f64;
        let byte = findings.mean(Finding::WideProbe).map_or(typical.wide.byte, |seconds| {
            ((seconds - latency) / (pairs * PROBE as f64)).max(copies / pairs)
        });
        // The effort of a message is that of its sender and receiver, however far apart they are.
        LinkCost { latency, message: far.message, byte }
    });
    Costs {
        window,
        near,
        far,
        wide,
        fold,
        crowd,
        threads: findings.mean(Finding::Threads).unwrap_or(typical.threads),
        streams: 1,
        surveyed: 0,
    }
}

/// Staging and collecting a byte both move it between cores; folding one from staging does, too.
fn window_cost(findings: &Findings, fold: f64, crowd: f64, ranks: f64) -> WindowCost {
    let typical = Costs::default().window;
    let Some(copied) = findings.mean(Finding::WindowCopy) else {
        let copy = findings.mean(Finding::Copy).unwrap_or(typical.copy) * crowd;
        return WindowCost { copy, ..typical };
    };
    // Jobs often start on a machine that is busy starting them. What was measured then is better
    // than a guess, but only within reason.
    let copy = (copied / 2.0).min(UNLIKELY * crowd * typical.copy);
    let folded = findings.mean(Finding::WindowFold).unwrap_or(copied);
    let wait = findings.mean(Finding::Wait).unwrap_or(typical.wait);
    WindowCost {
        wait: wait.min(UNLIKELY * ranks * crowd * typical.wait),
        copy,
        // A segment was staged, and folded with one from private memory.
        fold: (folded - copy - fold).clamp(copy / 2.0, 2.0 * copy),
    }
}

/// A class of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Inside a host.
    Near,
    /// Between hosts of a region.
    Far,
    /// Between regions.
    Wide,
}

/// With which rank another measures a class of links; partners name each other.
fn partner(topology: &Topology, rank: usize, class: Class) -> Option<usize> {
    let host = topology.host(rank);
    let place = topology.members(host).iter().position(|&m| m == rank)?;
    let region = topology.region(host);
    let host_place = topology.hosts_of(region).iter().position(|&h| h == host)?;
    let other = match class {
        Class::Near => return topology.members(host).get(place ^ 1).copied(),
        Class::Far => *topology.hosts_of(region).get(host_place ^ 1)?,
        // As many pairs of hosts between any two regions.
        Class::Wide if host_place >= topology.smallest_region() => return None,
        Class::Wide if region ^ 1 >= topology.regions() => return None,
        Class::Wide => topology.hosts_of(region ^ 1)[host_place],
    };
    topology.members(other).get(place).copied()
}

/// How many ranks at a time send an empty message to each other: ranks of one region, as many as each has.
fn together(topology: &Topology) -> usize {
    let ranks = |region| -> usize {
        topology.hosts_of(region).iter().map(|host| topology.members(*host).len()).sum()
    };
    (0..topology.regions()).map(ranks).min().unwrap_or(1).min(MANY)
}

/// Seconds until all ranks of the host have noticed that all have arrived.
fn wait(engine: &mut HostEngine) -> Result<Option<f64>, Error> {
    let schedule = Window { cells: 1, ..Window::default() };
    let call = call(0);
    let buffers = buffers(std::ptr::null_mut(), 0, 1);
    let Some(window) = &mut engine.window else { return Ok(None) };
    let (state, helpers) = (&engine.state, &mut engine.helpers);
    let Effort { batches, short } = Effort::of(engine.topology.world());
    quickest_of(batches, || {
        for _ in 0..short {
            // SAFETY: nothing is staged or folded.
            unsafe { window.run(&call, &schedule, &buffers, 0..1, 1, None, state, helpers) }?;
        }
        Ok(short)
    })
    .map(Some)
}

/// Seconds per byte to stage it and to collect it, or fold it with one of this rank's own, from
/// the next rank of the host, while all ranks do so.
fn through_window(engine: &mut HostEngine, fold: bool) -> Result<Option<f64>, Error> {
    let here = engine.topology.members(engine.topology.host(engine.rank));
    let place = here.iter().position(|&m| m == engine.rank).expect("a rank is on its own host");
    let next = here[(place + 1) % here.len()];
    let mut schedule = Window { cells: 1, ..Window::default() };
    schedule.stages.push(Stage { blocks: 0..1, from: Area::Input, cell: 0 });
    if fold {
        schedule.folds.push(WindowFold {
            inputs: vec![Source::Own(Area::Input), Source::Staged { rank: next, cell: 0 }],
            tree: Tree::pair(),
            blocks: 0..1,
            into: Area::Output,
            publish: None,
            root: false,
        });
    } else {
        let collect = Collect { rank: next, cell: 0, blocks: 0..1, into: Area::Output };
        schedule.collects.push(collect);
    }
    let column = WINDOW_COLUMN.min(engine.window.as_ref().map_or(usize::MAX, |w| w.capacity()));
    let bytes = column * WINDOW_SEGMENTS;
    let mut memory = vec![0u8; 2 * bytes];
    let call = call(bytes);
    let buffers = buffers(memory.as_mut_ptr(), bytes, column);
    let Some(window) = &mut engine.window else { return Ok(None) };
    let (state, helpers) = (&engine.state, &mut engine.helpers);
    quickest_of(Effort::of(engine.topology.world()).batches, || {
        // SAFETY: the buffers are the two halves of `memory`.
        unsafe {
            window.run(&call, &schedule, &buffers, 0..WINDOW_SEGMENTS, 1, None, state, helpers)
        }?;
        Ok(bytes)
    })
    .map(Some)
}

/// Seconds that a rank and its partner take to exchange messages of `bytes`.
fn exchange(
    engine: &mut HostEngine,
    partner: Option<usize>,
    bytes: usize,
    repetitions: usize,
) -> Result<Option<f64>, Error> {
    let Some(partner) = partner else { return Ok(None) };
    let batches = Effort::of(engine.topology.world()).batches;
    exchange_with(engine, &[partner], bytes, repetitions, batches).map(Some)
}

/// Seconds that a rank and others take to exchange messages of `bytes`; they name each other. So many times in one batch;
/// the quickest of the batches counts.
pub fn exchange_with(
    engine: &mut HostEngine,
    peers: &[usize],
    bytes: usize,
    repetitions: usize,
    batches: usize,
) -> Result<f64, Error> {
    let sends = peers.iter().map(|&to| Send { to, blocks: 0..1, from: Area::Input }).collect();
    let recvs = peers.iter().map(|&from| Recv { from, blocks: 0..1, into: Area::Output }).collect();
    let schedule = Rounds { rounds: vec![Round { sends, recvs, folds: Vec::new() }] };
    let mut memory = vec![0u8; 2 * bytes];
    let call = call(bytes);
    let buffers = buffers(memory.as_mut_ptr(), bytes, bytes);
    let (rank, state) = (engine.rank, Arc::clone(&engine.state));
    let run = Run {
        call: &call,
        schedule: &schedule,
        buffers: &buffers,
        segments: 0..1,
        divisor: 1,
        rank,
        state: &state,
    };
    quickest_of(batches, || {
        for _ in 0..repetitions {
            // SAFETY: the buffers are the two halves of `memory`.
            unsafe { engine.links.run(&run, &mut engine.helpers) }?;
        }
        Ok(repetitions)
    })
}

/// Seconds that ranks take to send an empty message to each other: all of them, or, where they are many,
/// so many at a time, so that none needs a link to each other one. Of several regions, ranks of the same.
fn all_to_all(engine: &mut HostEngine) -> Result<Option<f64>, Error> {
    let (rank, world) = (engine.rank, engine.topology.world());
    let Effort { batches, short } = Effort::of(world);
    if engine.topology.regions() > 1 {
        let count = together(&engine.topology);
        let ranks = (0..world).filter(|other| engine.topology.share_region(*other, rank));
        let ranks: Vec<usize> = ranks.take(count).collect();
        let Some(place) = ranks.iter().position(|other| *other == rank) else { return Ok(None) };
        let after = (1..count).map(|distance| ranks[(place + distance) % count]);
        let peers: Vec<usize> = after.collect();
        if peers.is_empty() {
            return Ok(None);
        }
        return exchange_with(engine, &peers, 0, short, batches).map(Some);
    }
    if world > MANY {
        let first = rank / MANY * MANY;
        if first + MANY > world {
            return Ok(None);
        }
        let after = (1..MANY).map(|distance| first + (rank - first + distance) % MANY);
        let peers: Vec<usize> = after.collect();
        return exchange_with(engine, &peers, 0, short, batches).map(Some);
    }
    let Effort { batches, short } = Effort::for_all(engine.topology.world());
    quickest_of(batches, || {
        for _ in 0..short {
            engine.run_unnumbered(Request::barrier().with_algorithm(Algorithm::Direct))?;
        }
        Ok(short)
    })
    .map(Some)
}

/// Seconds to copy a byte of cached memory.
fn copy() -> f64 {
    let from = vec![1u8; PROBE];
    let mut into = vec![0u8; PROBE];
    let time = || {
        let start = Instant::now();
        // SAFETY: two buffers of this length.
        unsafe { kernel::copy(from.as_ptr(), into.as_mut_ptr(), PROBE) };
        start.elapsed().as_secs_f64()
    };
    std::iter::repeat_with(time).take(SHORT).fold(f64::INFINITY, f64::min) / PROBE as f64
}

/// Seconds to fold a byte of cached input.
fn fold() -> f64 {
    let mut inputs = vec![1f32; PROBE / 2];
    let count = PROBE / 4;
    let tree = Tree::pair();
    let time = || {
        let start = inputs.as_mut_ptr();
        let places = [start.cast_const().cast(), start.wrapping_add(count).cast_const().cast()];
        let clock = Instant::now();
        // SAFETY: both halves of `inputs` have `count` elements; the result replaces the first.
        unsafe {
            kernel::fold(
                Dtype::F32,
                Reduction::Max,
                &tree,
                &places,
                start.cast(),
                None,
                count,
                None,
            );
        }
        clock.elapsed().as_secs_f64()
    };
    std::iter::repeat_with(time).take(SHORT).fold(f64::INFINITY, f64::min) / (2 * PROBE) as f64
}

/// A call of a measurement.
fn call(bytes: usize) -> Call {
    Call {
        seq: Call::MEASURING,
        op: Op::AllReduce,
        barrier: false,
        dtype: Dtype::U8,
        unit: Unit::OWN,
        reduction: Reduction::Max,
        count: bytes as u64,
        shape: 0,
        algorithm: Algorithm::Pairwise,
        column: bytes as u32,
    }
}

fn buffers<'a>(memory: *mut u8, bytes: usize, column: usize) -> Buffers<'a> {
    let layout = Layout::tiled(bytes, 1, column.max(1));
    Buffers {
        input: memory,
        input_layout: layout,
        output: memory.wrapping_add(bytes),
        output_layout: layout,
        shape: layout,
        scratch: std::ptr::null_mut(),
        cells: 0,
        depth: 1,
        dtype: Dtype::U8,
    }
}

/// Seconds per unit of the quickest of a few batches; `batch` says how many units it was.
fn quickest_of(
    batches: usize,
    mut batch: impl FnMut() -> Result<usize, Error>,
) -> Result<f64, Error> {
    let mut quickest = f64::INFINITY;
    for _ in 0..batches {
        let start = Instant::now();
        let units = batch()?;
        quickest = quickest.min(start.elapsed().as_secs_f64() / units as f64);
    }
    Ok(quickest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measuring_a_large_group_does_not_take_forever() {
        for world in 2..2000 {
            let all = Effort::for_all(world);
            assert!(all.batches >= 1 && all.short >= 1);
            let messages = all.batches * all.short * world * world;
            assert!(messages <= MESSAGES.max(world * world), "{world}: {messages}");
            let Effort { batches, short } = Effort::of(world);
            // As many arrivals as in a group of a few, and then a few for each rank.
            assert!(batches * short * world <= (BATCHES * SHORT * MANY).max(4 * world), "{world}");
        }
        // What is not large is measured with care.
        assert_eq!(Effort::for_all(16), Effort { batches: BATCHES, short: SHORT });
    }

    #[test]
    fn no_byte_is_free_on_a_busy_machine() {
        let mut findings = Findings::default();
        findings.add(Finding::Copy, Some(1e-10));
        // The ranks were kept from running while they sent empty messages, and not afterwards.
        findings.add(Finding::NearLatency, Some(5e-3));
        findings.add(Finding::NearProbe, Some(1e-4));
        let costs = costs(&findings, &Findings::default(), &Topology::all_apart(2));
        assert_eq!(costs.near.byte, 2e-10);
    }

    #[test]
    fn a_busy_machine_does_not_make_messages_dear() {
        let far = |latency: f64, all: f64, world: usize| {
            let mut findings = Findings::default();
            findings.add(Finding::FarLatency, Some(latency));
            findings.add(Finding::All, Some(all));
            costs(&findings, &Findings::default(), &Topology::all_apart(world)).far
        };
        let most = UNLIKELY * Costs::default().far.message;
        // Each of three ranks was kept from running while all exchanged messages.
        assert_eq!(far(1e-4, 9e-3, 3).message, most);
        assert_eq!(far(9e-3, 9e-3, 2).message, most);
        // A long way is no effort: what is not believed of the message is latency.
        assert_eq!(far(20e-3, 20e-3, 2).latency, 20e-3 - 2.0 * most);
        assert_eq!(far(40e-6, 40e-6, 2).message, 10e-6);
        // Others begin later; one that is there takes 4 µs, of which each rank sends and receives.
        assert_eq!(far(4e-6, 100e-6, 8).message, 2e-6);
    }

    #[test]
    fn partners_name_each_other_and_share_what_their_class_says() {
        let regions = Topology::new(&[0, 0, 1, 1, 2, 2, 3, 4]).in_regions(&[0, 0, 1, 1, 1]);
        let mut measured = [0; 3];
        for topology in [regions, Topology::new(&[0, 1, 0, 1, 2]), Topology::one_host(3)] {
            for rank in 0..topology.world() {
                for class in [Class::Near, Class::Far, Class::Wide] {
                    let Some(other) = partner(&topology, rank, class) else { continue };
                    assert_eq!(partner(&topology, other, class), Some(rank), "{class:?}");
                    assert_eq!(topology.together(rank, other), class == Class::Near);
                    assert_eq!(topology.share_region(rank, other), class != Class::Wide);
                    measured[class as usize] += 1;
                }
            }
        }
        assert!(measured.iter().all(|pairs| *pairs > 0), "{measured:?}");
    }

    #[test]
    fn the_rate_between_regions_is_that_of_all_their_hosts() {
        let mut findings = Findings::default();
        findings.add(Finding::FarLatency, Some(100e-6));
        findings.add(Finding::WideLatency, Some(20e-3));
        findings.add(Finding::WideProbe, Some(20e-3 + 2e-3));
        let topology = Topology::all_apart(4).in_regions(&[0, 0, 1, 1]);
        let costs = costs(&findings, &Findings::default(), &topology);
        let expected = 2e-3 / (2.0 * PROBE as f64);
        assert!((costs.wide.byte / expected - 1.0).abs() < 1e-9);
        assert_eq!((costs.wide.latency, costs.wide.message), (20e-3, costs.far.message));
    }
}
