//! Windows inside the hosts, messages between them.
//!
//! For several hosts with several ranks each, the ranks of a host sharing a GPU or reaching each other's. A call runs the
//! [hierarchical](Algorithm::Hierarchical) schedule of the host's engine: a [window](crate::window) on each host, where ranks
//! fold what they have into the canonical subtree of their host, rounds in which *counterparts*, the ranks of one place on
//! each host, exchange and finish what the hosts have folded, and a window on each host again, where results spread. So a
//! byte crosses the network once for each host that needs it, not for each rank.
//!
//! **The flat engine.** The engine has another one inside, [NCCL](crate::nccl) or [bounce](crate::bounce), which reaches all
//! ranks alike. It runs what the hierarchy has no schedule for, and what costs less there: a small call, which would wait for
//! two windows. Prices are those of the windows and of the messages, both measured when the group forms.
//!
//! **Between the hosts** messages go through the flat engine's NCCL. Where that does not reach all ranks, since some share a
//! GPU, a communicator of the counterparts alone may: each has one rank of a host. Without NCCL they go
//! through pinned memory and the host's own links (`mirror.rs`).
//!
//! **Which placements.** The device folds in the canonical order only. The hosts' subtrees must be all that is left of the
//! canonical tree, as they are if each host has a power of two of neighbouring ranks; where they are not, the group
//! [has no hierarchy](suits).
//!
//! **Memory.** Partial results lie in the scratch memory of the messages; a segment of a call uses all of it, from its first
//! phase to its last, before the next begins. Windows have staging memory, as those of one host have.
//!
//! **Order, agreement, failure** are those of the parts. All work of windows is on one stream, which the messages wait for;
//! a phase of messages is over on the device when it ends on the host. So nothing on the device waits for another rank but
//! NCCL's kernels, which are aborted with the group. Ranks of a host compare their calls in the window. Before NCCL's messages,
//! which carry no call, all meet on their hosts; the host's links carry it.

mod mirror;
mod opening;
mod price;

use std::collections::BTreeMap;
use std::sync::Arc;

use unisono_collective::cost::Prediction;
use unisono_collective::engine::{Buffers, CallPlan, Engine, GroupState, HostEngine, Memory};
use unisono_collective::schedule::{self, Phase, Problem, Rounds, Schedule, Topology};
use unisono_collective::{
    Algorithm, Call, Checked, Dtype, Error, Explanation, InvalidCall, Op, Request,
};

use crate::bounce::Bounce;
use crate::nccl::{self, NcclCosts, NcclEngine};
use crate::order::{Order, failed};
use crate::window::{self, Passage, Way};
use mirror::{Mirror, Places};

pub(crate) use opening::{Chances, prepare};

/// Columns begin at multiples of so many bytes.
const LINE: usize = 64;

/// Elements of a column at most: they travel as 32 bits.
const LONGEST: usize = 1 << 30;

/// Plans remembered. A training run has a few dozen different calls.
const REMEMBERED: usize = 4096;

/// What a plan depends on: operation, elements, their type, the code of the reduction, and the algorithm that is forced.
type Key = (Op, usize, Dtype, u8, Option<Algorithm>);

/// Whether ranks of this placement can have a hierarchy: some share a host and some do not, and the device can fold what
/// the hosts exchange.
pub(crate) fn suits(topology: &Topology) -> bool {
    if topology.is_one_host() || topology.is_all_apart() {
        return false;
    }
    // Rank 0 is the first of its host, and folds a part like the others that do.
    let problem = Problem { op: Op::AllReduce, rank: 0, world: topology.world() };
    let schedule = schedule::build(Algorithm::Hierarchical, &problem, topology);
    schedule.is_some_and(|schedule| {
        schedule.phases.iter().all(|phase| match phase {
            Phase::Rounds(rounds) => {
                let mut folds = rounds.rounds.iter().flat_map(|round| &round.folds);
                // As many inputs as ranks: the hosts have folded nothing.
                folds.all(|fold| fold.tree.is_canonical() && fold.inputs.len() < problem.world)
            }
            Phase::Window(window) => window.folds.iter().all(|fold| fold.tree.is_canonical()),
        })
    })
}

/// Runs calls on the memory of one device, in windows of the hosts and between them or by a flat engine, and gives those on
/// host memory to the host's.
pub(crate) struct Hierarchy {
    window: window::Parts,
    between: Between,
    flat: Flat,
    schedules: BTreeMap<Op, Arc<Levels>>,
    /// Elements of a column of calls that go through the levels; `None` of those that are the flat engine's.
    plans: BTreeMap<Key, Option<usize>>,
}

/// The engine that reaches all ranks alike.
enum Flat {
    Nccl(Box<NcclEngine>),
    Bounce(Box<Bounce>),
}

/// How counterparts reach each other.
enum Between {
    /// Through the flat engine's NCCL.
    Flat(NcclCosts),
    /// Through an NCCL of their own.
    Nccl(Box<nccl::Lane>, NcclCosts),
    /// Through the hosts.
    Host(Mirror),
}

/// A schedule, whose windows name ranks among those of the host and whose rounds as what carries them does.
struct Levels {
    schedule: Schedule,
    /// What passes the host, if messages do.
    places: Places,
}

impl Flat {
    fn engine(&mut self) -> &mut dyn Engine {
        match self {
            Flat::Nccl(engine) => &mut **engine,
            Flat::Bounce(engine) => &mut **engine,
        }
    }
}

impl Hierarchy {
    /// What explanations call it.
    pub const NAME: &'static str = "hierarchical";

    fn new(window: window::Parts, between: Between, flat: Flat) -> Hierarchy {
        let (schedules, plans) = Default::default();
        Hierarchy { window, between, flat, schedules, plans }
    }

    fn levels(&mut self, op: Op) -> Result<Arc<Levels>, Error> {
        if let Some(levels) = self.schedules.get(&op) {
            return Ok(levels.clone());
        }
        let host = self.flat.engine().host();
        let (rank, topology) = (host.rank(), host.topology());
        let (algorithm, problem) =
            (Algorithm::Hierarchical, Problem { op, rank, world: topology.world() });
        let mut schedule = schedule::build(algorithm, &problem, topology)
            .ok_or(InvalidCall::UnsupportedAlgorithm { algorithm, op: op.name() })?;
        let places = Places::of(&schedule, price::blocks(&schedule, op, problem.world));
        let here = topology.members(topology.host(rank));
        let place = |rank| here.iter().position(|member| *member == rank);
        for phase in &mut schedule.phases {
            match phase {
                Phase::Window(window) => {
                    window.rename(|rank| place(rank).expect("windows name ranks of one host"));
                }
                // Counterparts are numbered as their hosts are.
                Phase::Rounds(rounds) if matches!(self.between, Between::Nccl(..)) => {
                    rounds.rename(|rank| topology.host(rank));
                }
                Phase::Rounds(_) => {}
            }
        }
        let levels = Arc::new(Levels { schedule, places });
        self.schedules.insert(op, levels.clone());
        Ok(levels)
    }

    /// Elements of a column, if the call goes through the levels.
    fn planned(&mut self, request: &Request<'_>) -> Result<Option<usize>, Error> {
        let (op, dtype, forced) = (request.op(), request.dtype(), request.algorithm());
        let key = (op, request.extent(), dtype, request.reduction() as u8, forced);
        if let Some(planned) = self.plans.get(&key) {
            return Ok(*planned);
        }
        let host = self.flat.engine().host();
        let able = |algorithm: &Algorithm| algorithm.supports(op, host.topology());
        let forced = forced.or(host.options().algorithm.filter(able));
        let planned = match (self.price(request), forced) {
            (Some(priced), None) => {
                let flat = self.flat.engine().explain(request)?;
                let mut all = flat.candidates.iter().chain(&flat.others);
                let chosen = all.find(|prediction| prediction.algorithm == flat.chosen);
                let is_less = chosen.is_none_or(|chosen| priced.seconds < chosen.seconds);
                is_less.then_some(priced.column)
            }
            (Some(priced), Some(Algorithm::Hierarchical)) => Some(priced.column),
            _ => None,
        };
        if self.plans.len() >= REMEMBERED {
            self.plans.clear();
        }
        self.plans.insert(key, planned);
        Ok(planned)
    }

    /// Runs the segments of a call, each through all levels.
    ///
    /// # Safety
    /// The buffers are device memory, valid for the call's layouts, and nothing else uses them until the joined stream of
    /// the windows has come to where it is when this returns.
    unsafe fn run_levels(
        &mut self,
        call: &Call,
        levels: &Levels,
        buffers: &Buffers<'_>,
        segments: usize,
        state: &GroupState,
    ) -> Result<(), Error> {
        for segment in 0..segments {
            for phase in &levels.schedule.phases {
                let here = segment..segment + 1;
                // SAFETY: passed on from the caller. All that windows do, and the copies to and from the host, is in the
                // order of one stream; messages of NCCL wait for that, and have ended on the device when this returns.
                unsafe {
                    match phase {
                        Phase::Window(window) => {
                            let passage = Passage { way: Way::Device, begin: None };
                            let lane = &mut self.window.lane;
                            lane.run_window(call, window, buffers, here, passage, state)?;
                        }
                        Phase::Rounds(rounds) => {
                            self.run_between(call, rounds, levels, buffers, segment, state)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs the rounds of a segment.
    ///
    /// # Safety
    /// As of [`Hierarchy::run_levels`].
    unsafe fn run_between(
        &mut self,
        call: &Call,
        rounds: &Rounds,
        levels: &Levels,
        buffers: &Buffers<'_>,
        segment: usize,
        state: &GroupState,
    ) -> Result<(), Error> {
        let stream = self.window.lane.lines.join().map_err(failed)?;
        let lane = match (&mut self.between, &mut self.flat) {
            (Between::Host(mirror), flat) => {
                let host = flat.engine().host();
                // SAFETY: passed on from the caller.
                return unsafe {
                    mirror.run(host, call, rounds, &levels.places, buffers, segment, stream)
                };
            }
            (Between::Nccl(lane, _), _) => lane,
            (Between::Flat(_), Flat::Nccl(engine)) => engine.lane_mut(),
            (Between::Flat(_), Flat::Bounce(_)) => unreachable!("it has no NCCL"),
        };
        self.window.order.end(Some(&lane.moving), stream).map_err(failed)?;
        // SAFETY: passed on from the caller.
        unsafe { lane.run(call, &rounds.rounds, *buffers, segment..segment + 1, false, state) }
    }
}

impl Engine for Hierarchy {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host, Memory::Device(self.window.device)]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        if request.memory() == Memory::Host {
            return self.flat.engine().plan(request);
        }
        Order::check(self.window.lane.context(), request)?;
        match self.planned(request)? {
            Some(column) => {
                let algorithm = Algorithm::Hierarchical;
                Ok(CallPlan { algorithm, column, canonical: true, registered: 0 })
            }
            None => self.flat.engine().plan(request),
        }
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        if request.memory() == Memory::Host {
            return self.flat.engine().explain(request);
        }
        let chosen = self.plan(request)?.algorithm;
        let planned = self.planned(request)?;
        let engine = match (planned, &self.between, &self.flat) {
            (Some(_), Between::Host(_), _) => "hierarchical, through the hosts between them",
            (Some(_), ..) => "hierarchical, nccl between hosts",
            (None, _, Flat::Nccl(_)) => "hierarchical, flat by nccl",
            (None, _, Flat::Bounce(_)) => "hierarchical, flat by bounce",
        };
        let priced = self.price(request);
        // One that is forced, and that the flat engine does not have, is no question to it.
        let flat = match (request.algorithm(), &self.flat) {
            (Some(Algorithm::Hierarchical), Flat::Nccl(_)) => None,
            _ => Some(self.flat.engine().explain(request)?),
        };
        let (mut candidates, mut others) =
            flat.map_or_else(Default::default, |flat| (flat.candidates, flat.others));
        // The host's engine has a hierarchy as well. The one that runs is priced, or the better one.
        if planned.is_some() {
            candidates.retain(|candidate| candidate.algorithm != Algorithm::Hierarchical);
        }
        candidates.extend(priced.map(|priced| Prediction {
            algorithm: Algorithm::Hierarchical,
            seconds: priced.seconds,
        }));
        candidates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut seen = Vec::new();
        candidates.retain(|candidate| {
            let is_first = !seen.contains(&candidate.algorithm);
            seen.push(candidate.algorithm);
            is_first
        });
        others.retain(|other| !seen.contains(&other.algorithm));
        Ok(Explanation { engine, candidates, others, chosen })
    }

    fn host(&mut self) -> &mut HostEngine {
        self.flat.engine().host()
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.memory() == Memory::Host || self.planned(request)?.is_none() {
            return self.flat.engine().run(call, request);
        }
        let levels = self.levels(request.op())?;
        if !matches!(self.between, Between::Host(_)) {
            self.host().meet(call)?;
        }
        let state = self.host().state().clone();
        let context = self.window.lane.context().clone();
        let _entered = context.enter().map_err(failed)?;
        let caller = Order::caller(&context, request);
        let (mut buffers, segments) = request.cut(&levels.schedule, call.column as usize, 1);
        buffers.scratch = self.scratch().0.0 as *mut u8;
        let stream = self.window.lane.lines.join().map_err(failed)?;
        self.window.order.begin(caller.as_ref(), stream).map_err(failed)?;
        // SAFETY: the request was checked, and its memory stays until the caller's stream has come to the end of the call,
        // or until this returns.
        let outcome = unsafe { self.run_levels(call, &levels, &buffers, segments, &state) };
        // Also after an error: what was submitted may still use the caller's memory.
        outcome.and(self.window.end(caller.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_neighbours_have_a_hierarchy() {
        let suits = |hosts: &[u32]| super::suits(&Topology::new(hosts));
        assert!(suits(&[0, 0, 1, 1]) && suits(&[0, 0, 0, 0, 1, 1, 1, 1]));
        assert!(suits(&[0, 0, 1, 1, 2, 2]) && suits(&[0, 0, 1]));
        // There is nothing to fold on a host, or between hosts.
        assert!(!suits(&[0]) && !suits(&[0, 0, 0]) && !suits(&[0, 1, 2]));
        // Ranks 2 and 3 are a subtree, and on different hosts.
        assert!(!suits(&[0, 0, 0, 1]) && !suits(&[0, 0, 0, 1, 1, 1]));
        // No two neighbours share a host.
        assert!(!suits(&[0, 1, 0, 1]));
    }
}
