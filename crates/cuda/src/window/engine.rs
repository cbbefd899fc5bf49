//! The engine of the window: plans calls and puts them into the order of the caller's stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_collective::cost::Prediction;
use unisono_collective::engine::{CallPlan, Engine, GroupState, HostEngine, Memory};
use unisono_collective::schedule::{self, Phase, Problem, Schedule};
use unisono_collective::{
    Algorithm, Call, Checked, Error, Explanation, FormError, InvalidCall, Op, Rank, Request,
};

use super::cost::DeviceCosts;
use super::lines::Lines;
use super::run::{Lane, Passage};
use super::way::Way;
use super::{BUFFERS, WindowOptions, hosting, measure, opening};
use crate::agreement::{self, Reason};
use crate::context::Context;
use crate::error::CudaError;
use crate::fold::Folds;
use crate::order::{Order, failed};
use crate::stream::Stream;

/// How long a rank that leaves waits for the others to close its memory. The driver keeps memory that
/// another process has open, but does not promise to. Longer: a rank whose peers keep the group leaves later.
const LINGER: Duration = Duration::from_millis(500);

/// The same when the group has failed: a rank that died closes nothing.
const LINGER_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// The algorithms that go through memory that all ranks reach.
const ALGORITHMS: [Algorithm; 2] = [Algorithm::Window, Algorithm::WindowDirect];

/// Plans remembered. A training run has a few dozen different calls.
const REMEMBERED: usize = 4096;

/// Runs calls on the memory of one device, and gives those on host memory to the host's engine.
pub struct DeviceWindow {
    /// Dropped before the host's engine.
    parts: Parts,
    host: HostEngine,
    schedules: BTreeMap<(Op, Algorithm), Arc<Schedule>>,
    plans: BTreeMap<Key, Planned>,
}

/// What a plan depends on: operation, elements, bytes of one, and the algorithm that is forced.
type Key = (Op, usize, usize, Option<Algorithm>);

/// How a call is going to run.
#[derive(Clone, Copy)]
struct Planned {
    plan: CallPlan,
    way: Way,
}

/// What a window is made of beside the host's engine.
pub struct Parts {
    pub lane: Lane,
    pub order: Order,
    pub costs: DeviceCosts,
    pub device: u32,
    /// The ways that calls may go.
    ways: Vec<Way>,
    state: Arc<GroupState>,
}

/// Where the ranks of a window stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On their devices, and on the host what is better there.
    Device,
    /// On the host only.
    Host,
    /// On their devices, where ranks of several hosts have a window on each host.
    EachHost,
}

/// Shares staging memory with the other ranks. All have it, or all get the reason of one that has not.
pub fn prepare(
    host: &mut HostEngine,
    context: &Context,
    place: Place,
    options: &WindowOptions,
) -> Result<Parts, FormError> {
    let topology = host.topology().clone();
    let members = topology.members(topology.host(host.rank()));
    if !topology.is_one_host() && place != Place::EachHost {
        let apart = |rank: &usize| !topology.together(0, *rank);
        let rank = (0..topology.world()).find(apart).unwrap_or(0);
        let reason = "it is on another host, or its transport is tcp".to_owned();
        return Err(FormError::Device { rank: Rank(rank), reason });
    }
    // A cell for every rank, and one more for each result, has at least a line.
    let least = 64 * (2 * topology.world() + 1);
    let round_up = |buffer: usize| buffer.max(least).next_multiple_of(4096);
    let through_host = topology.world() > 1
        && place != Place::EachHost
        && (place == Place::Host || options.way.is_none_or(Way::is_through_host));
    let prepared = (|| {
        let made =
            (Lines::new(context, through_host)?, Folds::load(context)?, Order::new(context)?);
        Ok::<_, Reason>(made)
    })();
    let (prepared, said) = match prepared {
        Ok(prepared) => (
            Some(prepared),
            Ok((context.device().total_memory().unwrap_or(0) as u64).to_le_bytes()),
        ),
        Err(reason) => (None, Err(reason)),
    };
    let memory = agreement::tell(host, said)?.map_err(FormError::from)?;
    let memory = memory.into_iter().map(u64::from_le_bytes).min().unwrap_or(0);
    let (lines, folds, order) = prepared.expect("all ranks are prepared");

    let shared = match place {
        Place::Host => None,
        Place::Device | Place::EachHost => {
            let most = (0..topology.hosts()).map(|host| topology.members(host).len()).max();
            let usual = || WindowOptions::usual_buffer(memory, most.unwrap_or(1));
            let buffer = round_up(options.buffer.unwrap_or_else(usual));
            let shared = opening::share(host, context, BUFFERS * buffer, members)?;
            Some((shared.map_err(FormError::from)?, buffer))
        }
    };
    let staged = match through_host {
        false => None,
        true => match hosting::share(host, context, round_up(options.host_buffer))? {
            Ok(staged) => Some(staged),
            Err(refused) if place == Place::Host => return Err(refused.into()),
            Err(refused) => {
                log::info!(
                    "device {}: nothing is staged on the host, for rank {} cannot: {}",
                    context.device().number(),
                    refused.rank,
                    refused.reason
                );
                None
            }
        },
    };
    let mut ways = Vec::new();
    if shared.is_some() || topology.world() == 1 {
        ways.push(Way::Device);
    }
    if staged.is_some() {
        ways.extend([Way::Copied, Way::Folded]);
    }
    if let Some(way) = options.way {
        let there = if way == Way::Device { shared.is_some() } else { staged.is_some() };
        if there {
            ways = vec![way];
        }
    }
    let mut lane = Lane::new(lines, folds, shared, staged, options.copies_by_kernel, members, host);
    let costs = match options.costs {
        Some(costs) => costs,
        None if topology.world() == 1 => DeviceCosts::default(),
        None => measure::costs(host, &mut lane, members)?,
    };
    log::debug!("device {}: {costs:?}", context.device().number());
    let device = context.device().number();
    Ok(Parts { lane, order, costs, device, ways, state: host.state().clone() })
}

impl DeviceWindow {
    /// The engine of what was prepared.
    pub fn new(host: HostEngine, parts: Parts) -> DeviceWindow {
        let (schedules, plans) = Default::default();
        DeviceWindow { parts, host, schedules, plans }
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

    /// Elements of a column, and segments: of nothing that differs between ranks.
    fn cut(
        &self,
        request: &Request<'_>,
        schedule: &Schedule,
        cells: usize,
        way: Way,
    ) -> (usize, usize) {
        let size = request.dtype().size();
        let line = 64 / size;
        let parts = if request.op().has_blocks() { 1 } else { schedule.parts as usize };
        let longest = request.extent().div_ceil(parts);
        let buffer = self.parts.lane.buffer(way).unwrap_or(usize::MAX / 2);
        let most = (buffer / cells / 64 * line).max(line);
        let column = most.min(longest.next_multiple_of(line)).max(line);
        (column, longest.div_ceil(column).max(1))
    }

    /// Every algorithm and way that can do a call, best first, with their columns. The root's part, or rank 0's, is
    /// priced by all ranks alike.
    fn candidates(&self, request: &Request<'_>, forced: Option<Algorithm>) -> Vec<Candidate> {
        let (op, topology) = (request.op(), self.host.topology());
        let problem = |rank| Problem { op, rank, world: topology.world() };
        let mut candidates = Vec::new();
        for algorithm in ALGORITHMS {
            if forced.is_some_and(|forced| forced != algorithm) {
                continue;
            }
            // A root takes other cells than the ranks that are none; the most count for all.
            let root = op.root().unwrap_or(0);
            let schedules: Option<Vec<Schedule>> = [root, (root + 1) % topology.world()]
                .into_iter()
                .map(|rank| schedule::build(algorithm, &problem(rank), topology))
                .collect();
            let Some(schedules) = schedules else { continue };
            let priced = &schedules[0];
            for &way in &self.parts.ways {
                let cells = |schedule: &Schedule| match &schedule.phases[..] {
                    [Phase::Window(window)] => way.cells(window),
                    _ => 1,
                };
                let cells = schedules.iter().map(cells).max().unwrap_or(1);
                let (column, segments) = self.cut(request, priced, cells, way);
                let seconds = match &priced.phases[..] {
                    [Phase::Window(window)] => {
                        let bytes = column.min(request.extent().max(1)) * request.dtype().size();
                        self.parts.costs.predict(way, window, problem(0).world, bytes, segments)
                    }
                    // Alone.
                    _ => self.parts.costs.device.first,
                };
                candidates.push(Candidate { algorithm, way, column, seconds });
            }
        }
        candidates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        candidates
    }

    /// The algorithm that is forced for a call. One that is forced for all calls may be none of these.
    fn forced(&self, request: &Request<'_>) -> Option<Algorithm> {
        let able = |algorithm: &Algorithm| ALGORITHMS.contains(algorithm);
        request.algorithm().or(self.host.options().algorithm.filter(able))
    }

    fn planned(&mut self, request: &Request<'_>) -> Result<Planned, Error> {
        let forced = self.forced(request);
        let key = (request.op(), request.extent(), request.dtype().size(), forced);
        if let Some(planned) = self.plans.get(&key) {
            return Ok(*planned);
        }
        if let Some(algorithm) = forced.filter(|forced| !ALGORITHMS.contains(forced)) {
            let op = request.name();
            return Err(InvalidCall::UnsupportedAlgorithm { algorithm, op }.into());
        }
        let topology = self.host.topology();
        let forced = forced.filter(|forced| forced.supports(request.op(), topology));
        let candidates = self.candidates(request, forced);
        let best = candidates.first().expect("the window does everything");
        let plan = CallPlan {
            algorithm: best.algorithm,
            column: best.column,
            canonical: true,
            registered: 0,
        };
        let planned = Planned { plan, way: best.way };
        if self.plans.len() >= REMEMBERED {
            self.plans.clear();
        }
        self.plans.insert(key, planned);
        Ok(planned)
    }
}

/// A way to run a call.
struct Candidate {
    algorithm: Algorithm,
    way: Way,
    column: usize,
    seconds: f64,
}

impl Engine for DeviceWindow {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host, Memory::Device(self.parts.device)]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        if request.memory() == Memory::Host {
            return self.host.plan(request);
        }
        Order::check(self.parts.lane.context(), request)?;
        Ok(self.planned(request)?.plan)
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        if request.memory() == Memory::Host {
            return self.host.explain(request);
        }
        Order::check(self.parts.lane.context(), request)?;
        let Planned { plan, way } = self.planned(request)?;
        let mut candidates: Vec<Prediction> = Vec::new();
        for Candidate { algorithm, seconds, .. } in self.candidates(request, None) {
            if candidates.iter().all(|listed| listed.algorithm != algorithm) {
                candidates.push(Prediction { algorithm, seconds });
            }
        }
        let engine = match (self.parts.lane.buffer(Way::Device), way) {
            (_, Way::Device) => "window",
            (Some(_), Way::Folded) => "window, folded on the host",
            (Some(_), _) => "window, through the host",
            (None, Way::Folded) => "host, folded there",
            (None, _) => "host",
        };
        Ok(Explanation { engine, candidates, others: Vec::new(), chosen: plan.algorithm })
    }

    fn host(&mut self) -> &mut HostEngine {
        &mut self.host
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.memory() == Memory::Host {
            return self.host.run(call, request);
        }
        let way = self.planned(request)?.way;
        let schedule = self.schedule(request.op(), call.algorithm)?;
        let (buffers, segments) = request.cut(&schedule, call.column as usize, 1);
        let Parts { lane, order, .. } = &mut self.parts;
        let context = lane.context().clone();
        let _entered = context.enter().map_err(failed)?;
        let caller = Order::caller(&context, request);
        let begin = order.mark(caller.as_ref()).map_err(failed)?;
        let passage = Passage { way, begin };
        // SAFETY: the request was checked, and its memory stays until the caller's stream has come to the
        // end of the call, or until this returns.
        let outcome =
            unsafe { lane.run(call, &schedule, &buffers, segments, passage, self.host.state()) };
        // Also after an error: what was submitted may still use the caller's memory.
        outcome.and(self.parts.end(caller.as_ref()))
    }
}

impl Parts {
    /// Puts the end of a call into the order of the caller's stream, or waits for it, if there is none.
    pub fn end(&self, caller: Option<&Stream>) -> Result<(), Error> {
        let ended = self.lane.lines.join().and_then(|end| self.order.end(caller, end));
        match ended {
            Ok(true) => Ok(()),
            Ok(false) => self.lane.settle().map_err(failed),
            Err(error) => Err(failed(error)),
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        let Parts { lane, device, .. } = self;
        match lane.settle() {
            // Memory and clocks are the parent's, which goes on.
            Err(CudaError::Forked { .. }) => return,
            Err(error) => log::debug!("device {device}: {error}"),
            Ok(()) => {}
        }
        lane.close();
        let over = self.state.is_over();
        let deadline = Instant::now() + if over { LINGER_AFTER_FAILURE } else { LINGER };
        while !lane.all_closed() {
            if Instant::now() > deadline {
                log::debug!("device {device}: not all ranks have closed the staging memory");
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
