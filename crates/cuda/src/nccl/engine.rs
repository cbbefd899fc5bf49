//! The engine over NCCL: plans calls and puts them into the order of the caller's stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use unisono_collective::cost::Prediction;
use unisono_collective::engine::{CallPlan, Engine, HostEngine, Memory};
use unisono_collective::schedule::{self, Layout, Phase, Problem, Schedule};
use unisono_collective::{
    Algorithm, Call, Checked, Dtype, Error, Explanation, FormError, InvalidCall, Op, Request,
};

use super::communicator::own_reduction;
use super::cost::NcclCosts;
use super::run::{Lane, STRIDE};
use super::{NcclOptions, measure, opening};
use crate::device::Device;
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::order::{Order, failed};

/// The algorithms that are priced. The others of [`ABLE`] have as many bytes and more groups.
const CANDIDATES: [Algorithm; 2] = [Algorithm::Pairwise, Algorithm::Direct];

/// The algorithms of canonical rounds, which can be forced.
const ABLE: [Algorithm; 4] =
    [Algorithm::Pairwise, Algorithm::Direct, Algorithm::Tree, Algorithm::HalvingDoubling];

/// What NCCL's own all-reduce is called: it is that, or another that is as little canonical.
const OWN: Algorithm = Algorithm::Ring;

/// Segments begin at multiples of so many bytes, as kernels and wires like it.
const LINE: usize = 256;

/// Elements of a column at most: they travel as 32 bits.
const LONGEST: usize = 1 << 30;

/// Plans remembered. A training run has a few dozen different calls.
const REMEMBERED: usize = 4096;

/// What a plan depends on: the operation, its elements, their type, whether NCCL has the reduction, and the
/// algorithm that is forced.
type Key = (Op, usize, Dtype, bool, Option<Algorithm>);

/// Runs calls on the memory of one device through NCCL, and gives those on host memory to the host's engine.
pub struct NcclEngine {
    /// Dropped before the host's engine.
    lane: Lane,
    host: HostEngine,
    costs: NcclCosts,
    device: u32,
    order: Order,
    schedules: BTreeMap<(Op, Algorithm), Arc<Schedule>>,
    plans: BTreeMap<Key, CallPlan>,
}

/// What the engine is made of beside the host's.
pub(crate) struct Connected {
    pub lane: Lane,
    order: Order,
    pub costs: NcclCosts,
}

/// Connects the ranks of a group through NCCL. All are, or all get the reason of one that is not.
pub(crate) fn connect(
    host: &mut HostEngine,
    device: &dyn Fn() -> Result<Device, CudaError>,
    options: &NcclOptions,
) -> Result<Connected, FormError> {
    let all: Vec<usize> = (0..host.topology().world()).collect();
    connect_with(host, device, options, &all)
}

/// The same, of each rank with the `members` of its communicator only, if it has one.
pub(crate) fn connect_with(
    host: &mut HostEngine,
    device: &dyn Fn() -> Result<Device, CudaError>,
    options: &NcclOptions,
    members: &[usize],
) -> Result<Connected, FormError> {
    let world = host.topology().world();
    let library = options.library.as_ref().map(|path| path.as_os_str());
    // A cell for every rank and segment in flight has at least a line.
    let rounds = 2 * world.next_power_of_two().trailing_zeros() as usize + 2;
    let scratch = options.scratch.max(STRIDE * rounds * world * LINE);
    let (mut lane, order) = opening::open(host, device, library, scratch, members)?;
    let numbers: Vec<usize> = (0..members.len()).collect();
    let costs = price(host, &mut lane, options, &numbers)?;
    Ok(Connected { lane, order, costs })
}

/// What messages cost between ranks of these numbers in the lane, of which this is one unless there are none.
pub(crate) fn price(
    host: &mut HostEngine,
    lane: &mut Lane,
    options: &NcclOptions,
    peers: &[usize],
) -> Result<NcclCosts, FormError> {
    match options.costs {
        Some(costs) => Ok(costs),
        None if host.topology().world() == 1 => Ok(NcclCosts::default()),
        None => {
            let context = lane.context().clone();
            let _entered = context.enter().map_err(failed)?;
            measure::costs(host, lane, peers)
        }
    }
}

impl NcclEngine {
    /// What explanations call it.
    pub const NAME: &'static str = "nccl";

    /// Connects the ranks of a group through NCCL.
    pub fn open(
        mut host: HostEngine,
        device: &dyn Fn() -> Result<Device, CudaError>,
        options: NcclOptions,
    ) -> Result<NcclEngine, FormError> {
        let connected = connect(&mut host, device, &options)?;
        Ok(NcclEngine::new(host, connected))
    }

    /// The engine of ranks that are connected.
    pub(crate) fn new(host: HostEngine, Connected { lane, order, costs }: Connected) -> NcclEngine {
        let device = lane.context().device().number();
        let (schedules, plans) = Default::default();
        NcclEngine { lane, host, costs, device, order, schedules, plans }
    }

    /// Its way to the other ranks.
    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// The same, to be used.
    pub(crate) fn lane_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }

    fn schedule(&mut self, op: Op, algorithm: Algorithm) -> Result<Arc<Schedule>, Error> {
        if let Some(schedule) = self.schedules.get(&(op, algorithm)) {
            return Ok(schedule.clone());
        }
        let topology = self.host.topology();
        let problem = Problem { op, rank: self.host.rank(), world: topology.world() };
        let schedule = schedule::build(algorithm, &problem, topology)
            .ok_or(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() })?;
        let schedule = Arc::new(schedule);
        self.schedules.insert((op, algorithm), schedule.clone());
        Ok(schedule)
    }

    /// Segments in flight that need scratch cells of their own.
    fn in_flight(schedule: &Schedule) -> usize {
        STRIDE * rounds(schedule).len().max(1)
    }

    /// Elements of a column: of nothing that differs between ranks. Segments are as few as the scratch memory allows, and
    /// equal.
    fn column(&self, request: &Request<'_>, schedule: &Schedule) -> usize {
        let size = request.dtype().size();
        let line = LINE / size;
        let parts = if request.op().has_blocks() { 1 } else { schedule.parts as usize };
        let longest = request.extent().div_ceil(parts);
        // What needs no scratch memory is cut as if it did where several rounds follow each other.
        let cells = match (schedule.cells as usize, rounds(schedule).len()) {
            (0, 0 | 1) => return longest.clamp(1, LONGEST),
            (0, _) => parts,
            (cells, _) => cells,
        };
        // A call that fits as a whole is one segment: NCCL has its own pipeline inside of a message, and each group
        // of messages costs the ranks a meeting.
        let whole = longest.next_multiple_of(line);
        if cells * whole * size <= self.lane.scratch() && whole <= LONGEST {
            return whole.max(line);
        }
        let bytes = self.lane.scratch() / NcclEngine::in_flight(schedule) / cells;
        let most = (bytes / LINE * line).clamp(line, LONGEST);
        let segments = longest.div_ceil(most).max(1);
        longest.div_ceil(segments).next_multiple_of(line).clamp(line, most)
    }

    /// The algorithms that can do a call, best first. The root's part, or rank 0's, is priced by all ranks alike.
    fn predictions(&self, request: &Request<'_>) -> Vec<Prediction> {
        let (op, topology) = (request.op(), self.host.topology());
        let world = topology.world();
        let problem = Problem { op, rank: op.root().unwrap_or(0), world };
        let price = |algorithm: Algorithm| {
            let schedule = schedule::build(algorithm, &problem, topology)?;
            let column = self.column(request, &schedule);
            let layout = if op.has_blocks() {
                Layout::equal(request.extent(), world, column)
            } else {
                Layout::tiled(request.extent(), schedule.parts as usize, column)
            };
            let seconds = self.costs.predict(
                rounds(&schedule),
                &layout,
                request.dtype().size(),
                self.gathers(op),
            );
            Some(Prediction { algorithm, seconds })
        };
        let mut predictions: Vec<_> = CANDIDATES.into_iter().filter_map(price).collect();
        if self.prefers_own(request) {
            let bytes = request.extent() * request.dtype().size();
            let seconds = self.costs.predict_own(bytes, world);
            predictions.push(Prediction { algorithm: OWN, seconds });
        }
        predictions.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        predictions
    }

    /// Whether NCCL's own all-gather takes part in such calls. Their results lie in one piece on all ranks.
    fn gathers(&self, op: Op) -> bool {
        op == Op::AllReduce && self.costs.gathered < self.costs.byte
    }

    /// Whether NCCL can do a call by itself, with bits of its own.
    fn has_own(&self, request: &Request<'_>) -> bool {
        request.op() == Op::AllReduce
            && self.host.topology().world() > 1
            && own_reduction(request.dtype(), request.reduction()).is_some()
    }

    /// Whether it is to, if no algorithm is forced.
    fn prefers_own(&self, request: &Request<'_>) -> bool {
        !self.host.options().canonical && self.has_own(request)
    }

    fn choose(&self, request: &Request<'_>) -> Result<Algorithm, Error> {
        let topology = self.host.topology();
        let able = |algorithm: &Algorithm| match *algorithm {
            OWN => self.has_own(request),
            other => ABLE.contains(&other) && other.supports(request.op(), topology),
        };
        if let Some(algorithm) = request.algorithm() {
            let op = request.name();
            let refused = || InvalidCall::UnsupportedAlgorithm { algorithm, op }.into();
            return Some(algorithm).filter(able).ok_or_else(refused);
        }
        // An algorithm that is forced for all calls, and cannot do this one, leaves the choice to the model.
        Ok(match self.host.options().algorithm.filter(able) {
            Some(algorithm) => algorithm,
            None if self.prefers_own(request) => OWN,
            None => self.predictions(request).first().expect("pairwise does everything").algorithm,
        })
    }
}

impl Engine for NcclEngine {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host, Memory::Device(self.device)]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        if request.memory() == Memory::Host {
            return self.host.plan(request);
        }
        Order::check(self.lane.context(), request)?;
        let (op, has_own) = (request.op(), self.has_own(request));
        let key = (op, request.extent(), request.dtype(), has_own, request.algorithm());
        if let Some(plan) = self.plans.get(&key) {
            return Ok(*plan);
        }
        let algorithm = self.choose(request)?;
        let plan = if algorithm == OWN {
            CallPlan { algorithm, column: 1, canonical: false, registered: 0 }
        } else {
            let schedule = self.schedule(op, algorithm)?;
            CallPlan {
                algorithm,
                column: self.column(request, &schedule),
                canonical: true,
                registered: 0,
            }
        };
        if self.plans.len() >= REMEMBERED {
            self.plans.clear();
        }
        self.plans.insert(key, plan);
        Ok(plan)
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        if request.memory() == Memory::Host {
            return self.host.explain(request);
        }
        let chosen = self.plan(request)?.algorithm;
        let (engine, candidates) = (NcclEngine::NAME, self.predictions(request));
        Ok(Explanation { engine, candidates, others: Vec::new(), chosen })
    }

    fn host(&mut self) -> &mut HostEngine {
        &mut self.host
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.memory() == Memory::Host {
            return self.host.run(call, request);
        }
        if self.host.topology().world() > 1 {
            self.host.meet(call)?;
        }
        let context = self.lane.context().clone();
        let _entered = context.enter().map_err(failed)?;
        let caller = Order::caller(&context, request);
        self.order.begin(caller.as_ref(), &self.lane.moving).map_err(failed)?;
        if call.algorithm == OWN {
            let (from, into) =
                (DevicePtr(request.input() as u64), DevicePtr(request.output() as u64));
            // SAFETY: the request was checked, and its memory stays until this returns.
            return unsafe { self.lane.run_own(call, from, into, self.host.state()) };
        }
        let schedule = self.schedule(request.op(), call.algorithm)?;
        let in_flight = NcclEngine::in_flight(&schedule);
        let (buffers, segments) = request.cut(&schedule, call.column as usize, in_flight);
        let gathers = self.gathers(call.op);
        // SAFETY: as above.
        unsafe {
            let (lane, state) = (&mut self.lane, self.host.state());
            lane.run(call, rounds(&schedule), buffers, 0..segments, gathers, state)
        }
    }
}

/// The rounds of a schedule of rounds alone.
fn rounds(schedule: &Schedule) -> &[schedule::Round] {
    match &schedule.phases[..] {
        [Phase::Rounds(rounds)] => &rounds.rounds,
        _ => &[],
    }
}
