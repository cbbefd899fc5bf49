//! Runs calls: chooses the algorithm, cuts the buffers, drives the phases.

use std::collections::HashMap;
use std::sync::Arc;

use crate::buffers::Buffers;
use crate::call::Call;
use crate::cost::{Contest, Costs, Cut, Prediction};
use crate::dtype::{Dtype, Reduction, Unit};
use crate::error::{Error, InvalidCall};
use crate::fabric::staging_buffer;
use crate::link::{Links, Run};
use crate::options::Options;
use crate::schedule::{self, Algorithm, Layout, Op, Phase, Problem, Schedule, Topology};
use crate::state::GroupState;
use crate::window::WindowMemory;

/// Segments in flight over links. More: more overlap of sending, receiving and folding, until the
/// socket buffers hold them all anyway. Fewer: less scratch memory.
const DEPTH: usize = 4;

/// Bytes of a segment at most: lengths of messages travel in 32 bits.
const LARGEST_SEGMENT: usize = 1 << 30;

/// Decisions remembered. A training run has a few dozen different calls.
const REMEMBERED: usize = 4096;

/// A collective call, in memory that outlives it.
#[derive(Clone, Debug)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Whether it is a barrier.
    pub barrier: bool,
    /// The element type.
    pub dtype: Dtype,
    /// The reduction; `Sum` where nothing is reduced.
    pub reduction: Reduction,
    /// The input; null where this rank has none.
    pub input: *const u8,
    /// The output; null where this rank has none; equal to the input for a call in place.
    pub output: *mut u8,
    /// Elements of the whole buffer (all-reduce, broadcast, reduce) or of one block (the rest).
    pub count: usize,
    /// Blocks of different lengths.
    pub unequal: Option<Unequal>,
    /// Blocks of equal lengths that do not follow each other.
    pub separate: Separate,
    /// Use this algorithm for this call.
    pub algorithm: Option<Algorithm>,
    /// What the caller counts in, for messages; equal on all ranks.
    pub unit: Unit,
    /// From which line of the program the call comes, for messages.
    pub place: Option<Arc<str>>,
}

// SAFETY: whoever submits a request keeps its memory valid, and away from other threads, until
// its work is done.
unsafe impl Send for Request {}

/// Where blocks of different lengths start; one entry more than blocks.
#[derive(Clone, Debug)]
pub struct Unequal {
    /// Of the input, if it has several blocks.
    pub input: Vec<usize>,
    /// Of the output.
    pub output: Vec<usize>,
    /// The longest block of any rank. `None` for an all-to-all whose ranks know their own blocks
    /// only: it begins with an exchange of the lengths.
    pub longest: Option<usize>,
    /// A hash of the lengths that all ranks must agree on; 0 if there is nothing to compare.
    pub shape: u64,
}

/// Where blocks that lie apart start, in elements from the address of their buffer, one entry per
/// rank; `None` where they follow each other. For the side of a call that has one block per rank.
#[derive(Clone, Debug, Default)]
pub struct Separate {
    /// Of the input.
    pub input: Option<Vec<usize>>,
    /// Of the output.
    pub output: Option<Vec<usize>>,
}

/// What the engine decided about calls of one kind and size.
#[derive(Clone, Copy, Debug)]
struct Decision {
    algorithm: Algorithm,
    /// Elements of a column.
    column: usize,
}

/// Runs the calls of one rank of a group.
pub struct Engine {
    pub(super) rank: usize,
    pub(super) topology: Topology,
    options: Options,
    pub(super) links: Links,
    pub(super) window: Option<WindowMemory>,
    costs: Costs,
    pub(super) state: Arc<GroupState>,
    /// The place of the next call in the order of the group.
    pub(super) seq: u32,
    contests: HashMap<(Op, bool), Contest>,
    schedules: HashMap<(Op, Algorithm), Arc<Schedule>>,
    decisions: HashMap<(Op, Dtype, usize, Option<Algorithm>), Decision>,
}

/// What is known about a call before it runs: its algorithm and predicted times.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Every candidate with its predicted time, best first.
    pub candidates: Vec<Prediction>,
    /// What could do the call, and gives the bits that were promised, but is not considered unless
    /// it is forced; best first.
    pub others: Vec<Prediction>,
    /// The one that runs.
    pub chosen: Algorithm,
}

impl Engine {
    pub fn new(
        rank: usize,
        topology: Topology,
        options: Options,
        links: Links,
        window: Option<WindowMemory>,
        costs: Costs,
        state: Arc<GroupState>,
    ) -> Engine {
        Engine {
            rank,
            topology,
            options,
            links,
            window,
            costs,
            state,
            seq: Call::MEASURING,
            contests: HashMap::new(),
            schedules: HashMap::new(),
            decisions: HashMap::new(),
        }
    }

    /// The place of the next call in the order of the group.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// The group has formed: from now on calls are its user's.
    pub fn start_counting(&mut self) {
        self.seq = Call::FIRST;
    }

    fn is_measuring(&self) -> bool {
        self.seq == Call::MEASURING
    }

    /// The measured costs.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Replaces the costs by which algorithms are chosen; equal on all ranks.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
        self.decisions.clear();
    }

    /// Runs a call to its end.
    ///
    /// # Safety
    /// The request's memory is valid for its layouts, and nobody else uses it meanwhile.
    pub unsafe fn execute(&mut self, request: &Request) -> Result<(), Error> {
        if let Some(unequal) = &request.unequal
            && unequal.longest.is_none()
        {
            let longest = Some(self.agree_on_lengths(request, unequal)?);
            let unequal = Some(Unequal { longest, ..unequal.clone() });
            // SAFETY: passed on from the caller.
            return unsafe { self.execute(&Request { unequal, ..request.clone() }) };
        }
        // SAFETY: passed on from the caller.
        unsafe { self.perform(request, self.seq | 1) }
    }

    /// Runs a call, or its exchange of lengths, at its place in the order of the group.
    unsafe fn perform(&mut self, request: &Request, seq: u32) -> Result<(), Error> {
        let Decision { algorithm, column } = self.decide(request)?;
        let call = Call {
            seq,
            op: request.op,
            barrier: request.barrier,
            dtype: request.dtype,
            unit: request.unit,
            reduction: request.reduction,
            count: request.extent() as u64,
            shape: request.unequal.as_ref().map_or(0, |unequal| unequal.shape),
            algorithm,
            column: column as u32,
        };
        if self.state.is_over() {
            return Err(self.state.settled_error(Some(call)));
        }
        if !self.is_measuring() {
            self.state.places().note(call.number(), request.place.as_ref());
            self.state.history().record(&call);
            if !call.is_exchange_of_lengths() {
                self.count();
            }
        }
        // SAFETY: passed on from the caller.
        let outcome = unsafe { self.run(request, &call) };
        // Whoever notices takes the group down; the monitor tells the others. If somebody else was
        // first, that is the error of all calls.
        outcome.map_err(|error| {
            self.state.fail(error);
            self.state.settled_error(Some(call))
        })
    }

    fn count(&mut self) {
        self.seq = self.seq.wrapping_add(2).max(Call::FIRST);
    }

    /// Compares what every rank means to send with what its peers expect; the longest block. All
    /// ranks compare the same numbers, so that all of them refuse or none.
    fn agree_on_lengths(&mut self, request: &Request, unequal: &Unequal) -> Result<usize, Error> {
        let size = request.dtype.size();
        let world = self.topology.world();
        let lengths = |offsets: &[usize]| -> Vec<u64> {
            offsets.windows(2).map(|ends| (ends[1] - ends[0]) as u64).collect()
        };
        let own = [lengths(&unequal.input), lengths(&unequal.output)].concat();
        let mut all = vec![0u64; own.len() * world];
        let (input, output) = (own.as_ptr().cast::<i64>(), all.as_mut_ptr().cast::<i64>());
        let exchange = Request::new(Op::AllGather, input, output, own.len());
        let exchange = Request { place: request.place.clone(), ..exchange };
        // SAFETY: both vectors outlive the call, and the second has room for all ranks' lengths.
        unsafe { self.perform(&exchange, self.seq) }?;
        let count = |rank: usize, entry: usize| all[rank * 2 * world + entry];
        for (from, to) in (0..world).flat_map(|from| (0..world).map(move |to| (from, to))) {
            let (sent, expected) = (count(from, to), count(to, world + from));
            if sent != expected {
                let bytes = |count: u64| count.saturating_mul(size as u64);
                let (sent, expected) = (bytes(sent), bytes(expected));
                // The call that does not take place keeps its number.
                self.count();
                return Err(Error::LengthMismatch { from, to, tag: 0, sent, expected });
            }
        }
        Ok(all.into_iter().max().unwrap_or(0) as usize)
    }

    /// What a call of this kind and size would do.
    pub fn explain(&mut self, request: &Request) -> Result<Explanation, Error> {
        let chosen = self.decide(request)?.algorithm;
        let candidates = self.predictions(request);
        let canonical = self.must_be_canonical(request);
        let mut others = schedule::able(request.op, &self.topology, canonical);
        // A forced algorithm may be any.
        if !others.contains(&chosen) {
            others.push(chosen);
        }
        others.retain(|a| candidates.iter().all(|candidate| candidate.algorithm != *a));
        let contest = Contest::new(request.op, &self.topology, &others);
        let others = contest.predict(&self.costs, |a, s| self.cut(request, s, a));
        Ok(Explanation { candidates, others, chosen })
    }

    unsafe fn run(&mut self, request: &Request, call: &Call) -> Result<(), Error> {
        let schedule = self.schedule(request.op, call.algorithm)?;
        let world = self.topology.world();
        let column = call.column as usize;
        let (input_layout, output_layout, shape) =
            layouts(request, self.rank, world, &schedule, column);
        let longest = request.unequal.as_ref().and_then(|unequal| unequal.longest);
        let segments =
            longest.map_or_else(|| shape.segments(), |longest| longest.div_ceil(column).max(1));
        let cells = schedule.cells as usize;
        let depth = if schedule.phases.len() > 1 { 1 } else { segments.min(DEPTH) };
        let cell_bytes = (column * request.dtype.size()).next_multiple_of(64);
        let scratch = self.links.scratch.reserve(depth * cells * cell_bytes);
        let buffers = Buffers {
            input: request.input,
            input_layout,
            output: request.output,
            output_layout,
            shape,
            scratch,
            cells,
            depth,
            dtype: request.dtype,
        };
        if let [phase] = &schedule.phases[..] {
            // SAFETY: passed on from the caller.
            return unsafe { self.run_phase(phase, call, &buffers, 0..segments) };
        }
        for segment in 0..segments {
            for phase in &schedule.phases {
                // SAFETY: passed on from the caller.
                unsafe { self.run_phase(phase, call, &buffers, segment..segment + 1) }?;
            }
        }
        Ok(())
    }

    unsafe fn run_phase(
        &mut self,
        phase: &Phase,
        call: &Call,
        buffers: &Buffers<'_>,
        segments: std::ops::Range<usize>,
    ) -> Result<(), Error> {
        let divisor = self.topology.world() as u32;
        match phase {
            Phase::Rounds(schedule) => {
                let (rank, state) = (self.rank, &*self.state);
                let run = Run { call, schedule, buffers, segments, divisor, rank, state };
                // SAFETY: passed on from the caller.
                unsafe { self.links.run(&run) }
            }
            Phase::Window(schedule) => match &mut self.window {
                // Nothing is shared, so nobody waits.
                _ if schedule.cells == 0 => {
                    let room = self.links.room();
                    // SAFETY: passed on from the caller.
                    unsafe {
                        crate::window::run_alone(call, schedule, buffers, segments, divisor, room)
                    };
                    Ok(())
                }
                // SAFETY: passed on from the caller.
                Some(window) => unsafe {
                    window.run(call, schedule, buffers, segments, divisor, &self.state)
                },
                None => unreachable!("schedules share memory only where ranks share a host"),
            },
        }
    }

    fn must_be_canonical(&self, request: &Request) -> bool {
        self.options.canonical && request.dtype.is_float()
    }

    fn decide(&mut self, request: &Request) -> Result<Decision, Error> {
        let forced = request.algorithm.or(self.options.algorithm);
        let key = (request.op, request.dtype, request.extent(), forced);
        if let Some(decision) = self.decisions.get(&key) {
            return Ok(*decision);
        }
        let algorithm = match forced {
            // A forced algorithm that cannot do this operation at all leaves the choice to the
            // model, unless it was forced for this very call.
            Some(a) if a.supports(request.op, &self.topology) => a,
            Some(algorithm) if request.algorithm.is_some() => {
                let op = request.name();
                return Err(InvalidCall::UnsupportedAlgorithm { algorithm, op }.into());
            }
            _ => self.predictions(request).first().expect("pairwise does everything").algorithm,
        };
        let schedule = self.schedule(request.op, algorithm)?;
        let column = self.column(request, &schedule, algorithm);
        let decision = Decision { algorithm, column };
        if self.decisions.len() >= REMEMBERED {
            self.decisions.clear();
        }
        self.decisions.insert(key, decision);
        Ok(decision)
    }

    /// All candidates, best first.
    fn predictions(&mut self, request: &Request) -> Vec<Prediction> {
        let canonical = self.must_be_canonical(request);
        let key = (request.op, canonical);
        let contest = self.contests.remove(&key).unwrap_or_else(|| {
            let algorithms = schedule::candidates(request.op, &self.topology, canonical);
            Contest::new(request.op, &self.topology, &algorithms)
        });
        let predictions = contest.predict(&self.costs, |a, s| self.cut(request, s, a));
        self.contests.insert(key, contest);
        predictions
    }

    /// How a call is cut for a schedule.
    fn cut(&self, request: &Request, schedule: &Schedule, algorithm: Algorithm) -> Cut {
        let column = self.column(request, schedule, algorithm);
        let (blocks, longest) = self.blocks(request, schedule);
        let segments = if self.is_tiled(request) {
            request.count.div_ceil(column * blocks).max(1)
        } else {
            longest.div_ceil(column).max(1)
        };
        let bytes = column.min(longest) * request.dtype.size();
        Cut { column: bytes, segments, in_flight: DEPTH }
    }

    fn schedule(&mut self, op: Op, algorithm: Algorithm) -> Result<Arc<Schedule>, Error> {
        if let Some(schedule) = self.schedules.get(&(op, algorithm)) {
            return Ok(schedule.clone());
        }
        let problem = Problem { op, rank: self.rank, world: self.topology.world() };
        let schedule = schedule::build(algorithm, &problem, &self.topology)
            .ok_or(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() })?;
        let schedule = Arc::new(schedule);
        self.schedules.insert((op, algorithm), schedule.clone());
        Ok(schedule)
    }

    /// Whether the buffer has no blocks of its own.
    fn is_tiled(&self, request: &Request) -> bool {
        matches!(request.op, Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. })
    }

    /// The number of blocks, and the elements of the longest.
    fn blocks(&self, request: &Request, schedule: &Schedule) -> (usize, usize) {
        if self.is_tiled(request) {
            let parts = schedule.parts as usize;
            return (parts, request.count.div_ceil(parts));
        }
        (self.topology.world(), request.extent())
    }

    /// Elements of a column: the same on all ranks, so it depends on nothing that differs.
    fn column(&self, request: &Request, schedule: &Schedule, algorithm: Algorithm) -> usize {
        let line = 64 / request.dtype.size();
        let (blocks, longest) = self.blocks(request, schedule);
        let segment = self.options.segment.unwrap_or_else(|| self.segment(algorithm));
        let segment = segment.min(LARGEST_SEGMENT);
        let pieces = match algorithm {
            // Everybody's whole segment arrives at once.
            Algorithm::Direct => self.topology.world(),
            _ => blocks,
        };
        let mut bytes = segment / pieces.max(1);
        if schedule.staging > 0 {
            bytes = bytes.min(staging_buffer(&self.options) / schedule.staging as usize);
        }
        let column = (bytes / 64 * line).max(line);
        column.min(longest.next_multiple_of(line)).max(line)
    }

    /// Bytes of a segment, over all its blocks. Larger: the staging buffers, and what was staged
    /// and is still to be collected, fall out of the cache. Smaller: more waiting.
    fn segment(&self, algorithm: Algorithm) -> usize {
        match algorithm {
            Algorithm::Window if self.costs.crowd <= 1.0 => 512 << 10,
            Algorithm::Window | Algorithm::WindowDirect => 256 << 10,
            Algorithm::Hierarchical => 1 << 20,
            _ => 512 << 10,
        }
    }
}

impl Request {
    /// Elements that decide about the algorithm; equal on all ranks.
    fn extent(&self) -> usize {
        self.unequal.as_ref().and_then(|u| u.longest).unwrap_or(self.count)
    }

    /// What the caller called it.
    fn name(&self) -> &'static str {
        if self.barrier { "barrier" } else { self.op.name() }
    }
}

/// The layouts of the input, of the output, and of what passes through scratch.
fn layouts<'a>(
    request: &'a Request,
    rank: usize,
    world: usize,
    schedule: &Schedule,
    column: usize,
) -> (Layout<'a>, Layout<'a>, Layout<'a>) {
    let count = request.count;
    let single = |count| Layout::single(rank, count, column);
    let equal = Layout::equal(count, world, column);
    let blocks = |starts: &'a Option<Vec<usize>>| {
        starts.as_ref().map_or(equal, |starts| Layout::separate(starts, count, column))
    };
    let (inputs, outputs) = (blocks(&request.separate.input), blocks(&request.separate.output));
    match (request.op, &request.unequal) {
        (Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. }, _) => {
            let tiled = Layout::tiled(count, schedule.parts as usize, column);
            (tiled, tiled, tiled)
        }
        (Op::ReduceScatter | Op::Scatter { .. }, _) => (inputs, single(count), equal),
        (Op::AllGather, Some(unequal)) => {
            let output = Layout::unequal(&unequal.output, column);
            let own = unequal.output[rank + 1] - unequal.output[rank];
            (single(own), output, output)
        }
        (Op::AllGather | Op::Gather { .. }, _) => (single(count), outputs, equal),
        (Op::AllToAll, Some(unequal)) => {
            let input = Layout::unequal(&unequal.input, column);
            (input, Layout::unequal(&unequal.output, column), input)
        }
        (Op::AllToAll, None) => (inputs, outputs, equal),
    }
}
