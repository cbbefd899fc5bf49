//! How a call through the levels is cut, and what it costs.
//!
//! A segment goes through its phases one after the other, and the next one follows: the price is the sum of all. Each phase
//! takes what it takes the slowest of a few *witnesses*, the same on all ranks.

use unisono_collective::cost::{self, Cut};
use unisono_collective::schedule::{self, Layout, Phase, Problem, Rounds, Schedule, Topology};
use unisono_collective::{Algorithm, Op, Request};

use super::mirror::{Mirror, Places};
use super::{Between, Flat, Hierarchy, LINE, LONGEST};
use crate::library::DevicePtr;
use crate::window::Way;

/// How a call is cut, and what it takes.
#[derive(Clone, Copy, Debug)]
pub struct Priced {
    /// Elements of a column.
    pub column: usize,
    pub seconds: f64,
}

/// Blocks of a segment.
pub fn blocks(schedule: &Schedule, op: Op, world: usize) -> usize {
    if op.has_blocks() { world } else { schedule.parts as usize }
}

impl Hierarchy {
    /// The scratch memory, and its bytes.
    pub(super) fn scratch(&self) -> (DevicePtr, usize) {
        let lane = match (&self.between, &self.flat) {
            (Between::Host(mirror), _) => {
                return (mirror.scratch().pointer(), mirror.scratch().bytes());
            }
            (Between::Nccl(lane, _), _) => lane,
            (Between::Flat(_), Flat::Nccl(engine)) => engine.lane(),
            (Between::Flat(_), Flat::Bounce(_)) => unreachable!("it has no NCCL"),
        };
        (lane.scratch_pointer(), lane.scratch())
    }

    /// What a call takes, if there is a schedule for it: of nothing that differs between ranks.
    pub(super) fn price(&mut self, request: &Request<'_>) -> Option<Priced> {
        let (op, size) = (request.op(), request.dtype().size());
        let topology = self.flat.engine().host().topology().clone();
        let plans: Vec<(usize, Schedule)> = witnesses(op, &topology)
            .into_iter()
            .map(|rank| {
                let problem = Problem { op, rank, world: topology.world() };
                Some((rank, schedule::build(Algorithm::Hierarchical, &problem, &topology)?))
            })
            .collect::<Option<_>>()?;
        let (_, first) = plans.first()?;
        let parts = if op.has_blocks() { 1 } else { first.parts as usize };
        let longest = request.extent().div_ceil(parts);
        let column = self.column(longest, size, first, blocks(first, op, topology.world()));
        let (segments, bytes) = (longest.div_ceil(column).max(1), column.min(longest) * size);
        let mut seconds = 0.0;
        for phase in 0..first.phases.len() {
            let mut slowest: f64 = 0.0;
            for (rank, schedule) in &plans {
                let ranks = topology.members(topology.host(*rank)).len();
                slowest = slowest.max(match &schedule.phases[phase] {
                    Phase::Window(window) if window.cells == 0 => 0.0,
                    Phase::Window(window) => {
                        self.window.costs.predict(Way::Device, window, ranks, bytes, 1)
                    }
                    Phase::Rounds(rounds) => {
                        let blocks = blocks(schedule, op, topology.world());
                        self.price_between(rounds, schedule, &plans, blocks, bytes, size)
                    }
                });
            }
            seconds += slowest * segments as f64;
        }
        Some(Priced { column, seconds })
    }

    /// The time of a witness's rounds of a segment.
    fn price_between(
        &mut self,
        rounds: &Rounds,
        schedule: &Schedule,
        plans: &[(usize, Schedule)],
        blocks: usize,
        bytes: usize,
        size: usize,
    ) -> f64 {
        let count = bytes / size;
        match &self.between {
            Between::Flat(costs) | Between::Nccl(_, costs) => {
                let layout = Layout::equal(count, blocks, count.max(1));
                costs.predict(&rounds.rounds, &layout, size, false)
            }
            Between::Host(_) => {
                let (piece, pieces) = Mirror::pieces(count, size, blocks);
                let cut = Cut { column: piece * size, segments: pieces, in_flight: pieces };
                let rounds = |schedule: &Schedule| {
                    let is_rounds = |phase: &&Phase| matches!(phase, Phase::Rounds(_));
                    let phases = schedule.phases.iter().filter(is_rounds).cloned().collect();
                    Schedule { phases, ..*schedule }
                };
                let plans: Vec<_> = plans.iter().map(|(rank, it)| (*rank, rounds(it))).collect();
                let host = self.flat.engine().host();
                let links = cost::predict(&plans, host.topology(), host.costs(), cut);
                let places = Places::of(schedule, blocks);
                let copied = (places.down.len() + places.up.len()) * bytes;
                links + copied as f64 * self.window.costs.bus
            }
        }
    }

    /// Elements of a column: segments are as few as memory allows, and equal.
    fn column(&self, longest: usize, size: usize, schedule: &Schedule, blocks: usize) -> usize {
        let (line, cells) = (LINE / size, schedule.cells as usize);
        let staging = self.window.lane.buffer(Way::Device).unwrap_or(usize::MAX);
        let room = match &self.between {
            Between::Host(mirror) => mirror.column(Mirror::cells(blocks, cells)),
            _ => self.scratch().1 / cells.max(1),
        };
        let bytes = room.min(staging / (schedule.staging as usize).max(1));
        let most = (bytes / LINE * line).clamp(line, LONGEST);
        let segments = longest.div_ceil(most).max(1);
        longest.div_ceil(segments).next_multiple_of(line).clamp(line, most)
    }
}

/// Ranks among which are the busiest: the root, or rank 0, those that share its way to other hosts, and the first of
/// another host.
fn witnesses(op: Op, topology: &Topology) -> Vec<usize> {
    let root = op.root().unwrap_or(0);
    let home = topology.host(root);
    let other = (home + 1) % topology.hosts();
    let mut ranks = topology.members(home).to_vec();
    ranks.extend(topology.members(other).first());
    ranks
}
