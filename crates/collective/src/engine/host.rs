//! The engine of host memory: chooses the algorithm, cuts the buffers, drives the phases over shared
//! memory and sockets.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::buffers::Buffers;
use crate::call::Call;
use crate::cost::{Contest, Costs, Cut, Prediction};
use crate::dtype::Dtype;
use crate::error::{Error, InvalidCall};
use crate::fabric::{available_memory, staging_buffer};
use crate::helpers::Helpers;
use crate::link::{Links, Run};
use crate::options::Options;
use crate::registered::{Allocation, Allocations, Lent};
use crate::request::{Checked, Request};
use crate::schedule::{self, Algorithm, Op, Phase, Problem, Rounds, Schedule, Topology};
use crate::state::GroupState;
use crate::window::WindowMemory;
use crate::window::clocks::Clocks;

use super::{CallPlan, Engine, Explanation, Memory, SharedMemory, survey, tune};

/// Segments in flight over links. More: more overlap of sending, receiving and folding, until the
/// socket buffers hold them all anyway. Fewer: less scratch memory.
const DEPTH: usize = 4;

/// Bytes of a segment at most: lengths of messages travel in 32 bits.
const LARGEST_SEGMENT: usize = 1 << 30;

/// The algorithm that reads registered memory in place.
const IN_PLACE: Algorithm = Algorithm::Window;

/// Bytes from which on what ranks add up is read in place, if no algorithm is named. Memory that fits the cache of a core is
/// there, changed, when another core wants to read it and then to write it: on an Intel Xeon whose second-level cache has 2 MiB,
/// 1 MiB took 1.6 times as long in place as through staging, 2 MiB 0.88 times. Larger: copies that are not needed.
/// Smaller: calls of a few hundred KiB take longer.
const LONG_IN_PLACE: usize = 2 << 20;

/// Bytes of an all-reduce from which on algorithms that only [save rounds](saves_only_rounds) do not compete, if it has more
/// segments than are in flight. Larger: they are chosen on a busy machine where they take longer; without a limit on the
/// links, half as long again at 4 MiB. Smaller: they are missed where they are quicker; over 1 Gbit/s, 1 MiB took 10 ms by direct
/// and 12 ms by pairwise exchange.
const LONG: usize = 2 << 20;

/// Seconds from which on a latency between hosts is believed when it is asked which algorithms are for [`LONG`] calls. Larger:
/// over long links, rounds are not saved where that would be quicker. Smaller: a busy machine, where a message waits for
/// a processor, is taken for a long link.
const FAR: f64 = 5e-3;

/// Plans remembered. A training run has a few dozen different calls.
const REMEMBERED: usize = 4096;

/// Runs calls on host memory, between ranks of one host and of several.
pub struct HostEngine {
    pub(super) rank: usize,
    pub(super) topology: Topology,
    options: Options,
    pub(crate) links: Links,
    pub(super) window: Option<WindowMemory>,
    pub(super) helpers: Helpers,
    costs: Costs,
    /// Hosts of which it was found out which are in one region; 0 if it was not.
    pub(super) surveyed: usize,
    pub(super) state: Arc<GroupState>,
    contests: BTreeMap<(Op, bool, bool), Contest>,
    // Sorted, since comparing a few small keys is quicker than hashing one.
    schedules: BTreeMap<(Op, Algorithm), Arc<Schedule>>,
    plans: BTreeMap<(usize, Op, Dtype, Option<Algorithm>, bool), CallPlan>,
    allocations: Allocations,
}

impl HostEngine {
    /// What explanations call it.
    pub const NAME: &'static str = "host";

    #[expect(clippy::too_many_arguments, reason = "they are what an engine is made of")]
    pub(crate) fn new(
        rank: usize,
        topology: Topology,
        options: Options,
        links: Links,
        window: Option<WindowMemory>,
        helpers: Helpers,
        costs: Costs,
        state: Arc<GroupState>,
    ) -> HostEngine {
        let mut engine = HostEngine {
            rank,
            topology,
            options,
            links,
            window,
            helpers,
            costs,
            surveyed: 0,
            state,
            contests: BTreeMap::new(),
            schedules: BTreeMap::new(),
            plans: BTreeMap::new(),
            allocations: Allocations::default(),
        };
        engine.set_costs(costs);
        engine
    }

    /// The measured costs.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Replaces the costs by which algorithms are chosen; equal on all ranks.
    pub(super) fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
        self.plans.clear();
        let streams = self.options.streams.unwrap_or_else(|| costs.streams(&self.topology));
        self.links.set_lanes(streams);
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Which ranks share a host.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The settings of the group.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The state of the group: whether it has failed, and who has left.
    pub fn state(&self) -> &Arc<GroupState> {
        &self.state
    }

    /// Clocks that the ranks of this host see, for an engine that is made from this one; `None` for a rank that
    /// shares memory with no other. There is one such clock for each of them.
    pub fn clocks(&self) -> Option<Clocks> {
        self.window.as_ref().map(WindowMemory::clocks_for_engine)
    }

    /// Makes memory of so many bytes for ranks of this host to [take](HostEngine::take_memory), until this rank
    /// [withdraws](HostEngine::withdraw_memory) it or offers other memory. They do so after they have heard of it.
    /// Bytes of sealed memory are reserved when it is made; where there are too few, the reason says so.
    pub fn offer_memory(&self, bytes: usize) -> Result<Arc<SharedMemory>, String> {
        self.offer(bytes, SharedMemory::create)
    }

    /// As [`HostEngine::offer_memory`], of memory that others can only read.
    pub(crate) fn offer_readable(&self, bytes: usize) -> Result<Arc<SharedMemory>, String> {
        self.offer(bytes, SharedMemory::create_readable)
    }

    fn offer(
        &self,
        bytes: usize,
        create: impl FnOnce(usize) -> std::io::Result<SharedMemory>,
    ) -> Result<Arc<SharedMemory>, String> {
        if let Some(available) = available_memory()
            && bytes as u64 > available
        {
            return Err(format!("{bytes} bytes of shared memory; only {available} are available"));
        }
        let memory = Arc::new(create(bytes).map_err(|error| error.to_string())?);
        if let Some(network) = self.links.network() {
            network.offer(Some(&memory));
        }
        Ok(memory)
    }

    /// Maps so many bytes of what another rank of this host offers.
    pub fn take_memory(&self, from: usize, bytes: usize) -> Result<Arc<SharedMemory>, String> {
        let network = self.links.network().ok_or("the rank has no connections")?;
        network.take(from, bytes, &|| self.state.is_over())
    }

    /// Hands out nothing any more. Who has taken it keeps it.
    pub fn withdraw_memory(&self) {
        if let Some(network) = self.links.network() {
            network.offer(None);
        }
    }

    /// From now on, calls on this memory are made in place. All ranks add the same.
    pub(crate) fn register(&mut self, allocation: &Arc<Allocation>) {
        self.allocations.add(allocation);
    }

    /// The registered memory of a call that may be made in place, if it is in some.
    fn lent_to_plan(&self, request: &Request<'_>) -> Option<Lent> {
        let is_forced = request.algorithm().or(self.options.algorithm).is_some();
        // As many on all ranks, whatever the lengths of their own blocks.
        let elements = match self.is_tiled(request) {
            true => request.count(),
            false => self.topology.world() * request.extent(),
        };
        let is_long = elements * request.dtype().size() >= LONG_IN_PLACE;
        let pays = is_forced || !request.op().reduces() || is_long;
        if pays { self.lent(request) } else { None }
    }

    /// The registered memory of a call, if it is in some.
    fn lent(&self, request: &Request<'_>) -> Option<Lent> {
        let buffer = request.buffer(self.rank, self.topology.world())?;
        self.allocations.find(buffer)
    }

    /// Runs a call that all ranks make while the group forms: it has no number.
    pub fn run_unnumbered(&mut self, request: Request<'_>) -> Result<(), Error> {
        let request = request.check(self.rank, &self.topology)?;
        let call = request.call(Call::MEASURING, self.plan(&request)?);
        if self.state.is_over() {
            return Err(self.state.settled_error(Some(call)));
        }
        self.run(&call, &request).map_err(|error| self.state.fail_in(&call, error))
    }

    /// Waits until all ranks make this call, and compares what they call; nothing moves. For an engine
    /// whose own wires carry no headers: a rank that does not come, or comes with another call, is named here.
    pub fn meet(&mut self, call: &Call) -> Result<(), Error> {
        let barrier = Request::barrier().check(self.rank, &self.topology)?;
        let plan = self.plan(&barrier)?;
        let schedule = self.schedule(barrier.op(), plan.algorithm)?;
        let (mut buffers, segments) = barrier.cut(&schedule, plan.column, DEPTH);
        buffers.scratch = self.links.scratch.reserve(buffers.scratch_bytes());
        self.helpers.engage(0);
        self.links.begin(0);
        for phase in &schedule.phases {
            // SAFETY: buffers of no elements.
            unsafe { self.run_phase(phase, call, &buffers, 0..segments, None) }?;
        }
        Ok(())
    }

    /// Runs the rounds of a call whose other phases are an engine's that is made from this one. Messages carry the
    /// call, so that ranks which exchange some find out whether they make the same one.
    ///
    /// # Safety
    /// The buffers, and their scratch, are host memory, valid for their layouts and so many segments; no other thread uses
    /// them meanwhile.
    pub unsafe fn run_rounds(
        &mut self,
        call: &Call,
        schedule: &Rounds,
        buffers: &Buffers<'_>,
        segments: usize,
    ) -> Result<(), Error> {
        let (divisor, rank, state) = (self.topology.world() as u32, self.rank, &*self.state);
        let segments = 0..segments;
        let run = Run { call, schedule, buffers, segments, divisor, rank, state };
        let bytes = buffers.shape.segments() * buffers.column_bytes();
        self.helpers.engage(bytes);
        self.links.begin(bytes);
        // SAFETY: passed on from the caller.
        unsafe { self.links.run(&run, &mut self.helpers) }
    }

    /// Finds out which hosts are in one region, from the name that this rank gives its own or by measuring, unless rank
    /// 0 knows of an earlier group of as many hosts that had one, or all hosts `are_one` machine.
    pub(crate) fn find_regions(
        &mut self,
        name: Option<&str>,
        known: Option<&Costs>,
        are_one: bool,
    ) -> Result<(), Error> {
        let survey = survey::regions(self, name, known, are_one)?;
        self.topology = self.topology.clone().in_regions(&survey.regions);
        self.surveyed = if survey.is_known { survey.regions.len() } else { 0 };
        // What was planned before did not know of them.
        self.contests.clear();
        self.schedules.clear();
        self.plans.clear();
        Ok(())
    }

    /// Measures the group, from which on calls are priced by its own costs.
    pub(crate) fn measure(&mut self, crowd: f64, are_one: bool) -> Result<(), Error> {
        tune::measure(self, crowd, are_one)
    }

    /// Goes by the costs that rank 0 knows of an earlier group, if those will do; whether they did.
    pub(crate) fn agree_on_costs(
        &mut self,
        known: Option<Costs>,
        crowd: f64,
    ) -> Result<bool, Error> {
        tune::agree(self, known, crowd)
    }

    /// Runs segments of a phase.
    ///
    /// # Safety
    /// The buffers are valid for the call's layouts and no other thread uses them meanwhile.
    unsafe fn run_phase(
        &mut self,
        phase: &Phase,
        call: &Call,
        buffers: &Buffers<'_>,
        segments: std::ops::Range<usize>,
        lent: Option<&Lent>,
    ) -> Result<(), Error> {
        let divisor = self.topology.world() as u32;
        match phase {
            Phase::Rounds(schedule) => {
                let (rank, state) = (self.rank, &*self.state);
                let run = Run { call, schedule, buffers, segments, divisor, rank, state };
                // SAFETY: passed on from the caller.
                unsafe { self.links.run(&run, &mut self.helpers) }
            }
            Phase::Window(schedule) => match &mut self.window {
                // Nothing is shared, so no rank waits.
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
                    let (state, helpers) = (&self.state, &mut self.helpers);
                    window.run(call, schedule, buffers, segments, divisor, lent, state, helpers)
                },
                None => unreachable!("schedules share memory only where ranks share a host"),
            },
        }
    }

    fn must_be_canonical(&self, request: &Request<'_>) -> bool {
        self.options.canonical && request.dtype().is_float()
    }

    /// All candidates, best first, for a buffer in registered memory or in other.
    fn predictions(&mut self, request: &Request<'_>, registered: bool) -> Vec<Prediction> {
        let canonical = self.must_be_canonical(request);
        let key = (request.op(), canonical, registered);
        let contest = self.contests.remove(&key).unwrap_or_else(|| {
            let mut algorithms = schedule::candidates(request.op(), &self.topology, canonical);
            if registered && !algorithms.contains(&IN_PLACE) {
                algorithms.push(IN_PLACE);
            }
            let in_place = registered.then_some(IN_PLACE);
            Contest::new(request.op(), &self.topology, &algorithms, in_place)
        });
        let mut too_long = Vec::new();
        let mut predictions = contest.predict(&self.costs, |a, s| {
            let cut = self.cut(request, s, a);
            let bytes = request.count() * request.dtype().size();
            let is_near = self.costs.far.latency < FAR;
            let overlaps = cut.segments > DEPTH || is_near && bytes > DEPTH * self.segment(a, 0);
            if overlaps && bytes >= LONG && saves_only_rounds(request.op(), a) {
                too_long.push(a);
            }
            cut
        });
        let is_too_long = |prediction: &Prediction| too_long.contains(&prediction.algorithm);
        // A group of one rank has nothing else.
        if !predictions.iter().all(is_too_long) {
            predictions.retain(|prediction| !is_too_long(prediction));
        }
        self.contests.insert(key, contest);
        predictions
    }

    /// How a call is cut for a schedule.
    fn cut(&self, request: &Request<'_>, schedule: &Schedule, algorithm: Algorithm) -> Cut {
        let column = self.column(request, schedule, algorithm);
        let (blocks, longest) = self.blocks(request, schedule);
        let segments = if self.is_tiled(request) {
            request.count().div_ceil(column * blocks).max(1)
        } else {
            longest.div_ceil(column).max(1)
        };
        let bytes = column.min(longest) * request.dtype().size();
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
    fn is_tiled(&self, request: &Request<'_>) -> bool {
        matches!(request.op(), Op::AllReduce | Op::Broadcast { .. } | Op::Reduce { .. })
    }

    /// The number of blocks, and the elements of the longest.
    fn blocks(&self, request: &Request<'_>, schedule: &Schedule) -> (usize, usize) {
        if self.is_tiled(request) {
            let parts = schedule.parts as usize;
            return (parts, request.count().div_ceil(parts));
        }
        (self.topology.world(), request.extent())
    }

    /// Elements of a column: the same on all ranks, so it depends on nothing that differs.
    fn column(&self, request: &Request<'_>, schedule: &Schedule, algorithm: Algorithm) -> usize {
        let size = request.dtype().size();
        let line = 64 / size;
        let (blocks, longest) = self.blocks(request, schedule);
        let segment = self.options.segment.unwrap_or_else(|| {
            let bytes = blocks * longest * size;
            self.segment(algorithm, self.costs.under_way(&self.topology).min(bytes / DEPTH))
        });
        let segment = segment.min(LARGEST_SEGMENT);
        let pieces = match algorithm {
            // The whole segments of all ranks arrive at once.
            Algorithm::Direct => self.topology.world(),
            // So do the partial sums of all hosts of a region.
            Algorithm::Regional => blocks.max(schedule.cells as usize),
            _ => blocks,
        };
        let mut bytes = segment / pieces.max(1);
        if schedule.staging > 0 {
            bytes = bytes
                .min(staging_buffer(&self.options, &self.topology) / schedule.staging as usize);
        }
        let column = (bytes / 64 * line).max(line).min(longest.next_multiple_of(line)).max(line);
        if !self.is_tiled(request) {
            return column;
        }
        // No more segments, but all as long: the owners of the last blocks of a short one would have nothing to send, and
        // those of the first more than their part.
        let segments = request.count().div_ceil(column * blocks).max(1);
        request.count().div_ceil(segments * blocks).next_multiple_of(line).max(line)
    }

    /// Bytes of a segment, over all its blocks. Larger: the staging buffers, and what was staged
    /// and is still to be collected, fall out of the cache. Smaller: more waiting. Over links there are at least `far`, as
    /// many as can be under way between hosts.
    fn segment(&self, algorithm: Algorithm, far: usize) -> usize {
        match algorithm {
            Algorithm::Window if self.costs.crowd <= 1.0 => 1 << 20,
            Algorithm::Window | Algorithm::WindowDirect => 256 << 10,
            Algorithm::Hierarchical => 1 << 20,
            // Its segments go through the windows one after the other, and each waits for other regions.
            Algorithm::Regional if !self.topology.is_all_apart() => LARGEST_SEGMENT,
            _ if self.costs.crowd > 1.0 => far.max(512 << 10),
            // Messages that are as long with any number of ranks.
            _ => far.max((256 << 10) * self.topology.world().clamp(2, 8)),
        }
    }
}

/// Whether an algorithm saves rounds, and nothing else: every rank receives whole buffers and adds them up, where others do
/// so with parts of them. Once a call has more segments than are in flight at a time, rounds of different segments
/// overlap and there is nothing left to save. Their prices do not tell them apart on a busy machine, where what a message
/// costs is measured too high: between two hosts, recursive doubling was chosen for 64 MiB and took 1.3
/// times as long as pairwise exchange.
fn saves_only_rounds(op: Op, algorithm: Algorithm) -> bool {
    op == Op::AllReduce && matches!(algorithm, Algorithm::Direct | Algorithm::RecursiveDoubling)
}

impl Engine for HostEngine {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        let forced = request.algorithm().or(self.options.algorithm);
        let lent = self.lent_to_plan(request);
        let is_registered = lent.is_some();
        let placed = |plan: &CallPlan| {
            let lent = lent.as_ref().filter(|_| plan.algorithm == IN_PLACE);
            CallPlan { registered: lent.map_or(0, Lent::shape), ..*plan }
        };
        let key = (request.extent(), request.op(), request.dtype(), forced, is_registered);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(placed(plan));
        }
        let algorithm = match forced {
            // An algorithm that is forced for all calls, and cannot do this operation at all, leaves
            // the choice to the model.
            Some(a) if a.supports(request.op(), &self.topology) => a,
            _ => {
                let predictions = self.predictions(request, is_registered);
                predictions.first().expect("pairwise does everything").algorithm
            }
        };
        let schedule = self.schedule(request.op(), algorithm)?;
        let column = self.column(request, &schedule, algorithm);
        let canonical = algorithm.is_canonical();
        let plan = CallPlan { algorithm, column, canonical, registered: 0 };
        if self.plans.len() >= REMEMBERED {
            self.plans.clear();
        }
        self.plans.insert(key, plan);
        Ok(placed(&plan))
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        let chosen = self.plan(request)?.algorithm;
        let candidates = self.predictions(request, self.lent_to_plan(request).is_some());
        let canonical = self.must_be_canonical(request);
        let mut others = schedule::able(request.op(), &self.topology, canonical);
        // A forced algorithm may be any.
        if !others.contains(&chosen) {
            others.push(chosen);
        }
        others.retain(|a| candidates.iter().all(|candidate| candidate.algorithm != *a));
        let contest = Contest::new(request.op(), &self.topology, &others, None);
        let others = contest.predict(&self.costs, |a, s| self.cut(request, s, a));
        Ok(Explanation { engine: HostEngine::NAME, candidates, others, chosen })
    }

    fn host(&mut self) -> &mut HostEngine {
        self
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        assert!(
            request.is(call, self.rank, self.topology.world()),
            "a call runs as it was checked"
        );
        let schedule = self.schedule(request.op(), call.algorithm)?;
        let (mut buffers, segments) = request.cut(&schedule, call.column as usize, DEPTH);
        buffers.scratch = self.links.scratch.reserve(buffers.scratch_bytes());
        let bytes = request.bytes();
        self.helpers.engage(bytes);
        self.links.begin(bytes);
        if let [phase] = &schedule.phases[..] {
            let lent = if call.is_in_registered() { self.lent(request) } else { None };
            // SAFETY: the request was checked, and borrows its memory for longer than this.
            return unsafe { self.run_phase(phase, call, &buffers, 0..segments, lent.as_ref()) };
        }
        for segment in 0..segments {
            for phase in &schedule.phases {
                // SAFETY: as above.
                unsafe { self.run_phase(phase, call, &buffers, segment..segment + 1, None) }?;
            }
        }
        Ok(())
    }
}
