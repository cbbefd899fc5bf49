//! What a schedule costs, and which one costs least.
//!
//! A price is computed from a schedule's data alone, with nothing but measured constants. A round
//! takes the latency of its slowest link, a fixed effort per message, the larger of what is sent
//! and what is received at the link's rate, and the time of its folds; ranks of one host share
//! the way to other hosts, and those of a region the way to other regions, so what they send there
//! adds up. A window takes a wait or two, and the time to copy and to fold. A round is as slow as its slowest rank, and later segments flow
//! behind the first: they cost what the busiest rank does for each, or, if too few are in flight
//! to hide the latency, their share of it.
//!
//! Every rank must come to the same choice. So the price of a call is not that of the rank that
//! asks, but that of a few *witnesses*, the same on all ranks, among which are the busiest.

use serde::{Deserialize, Serialize};

use crate::schedule::{
    Algorithm, Blocks, Fold, Op, Phase, Problem, Round, Schedule, Source, Topology, Window, build,
};

/// Bytes of a step from which on a rank's threads share its messages out.
const SHARED: f64 = 512.0 * 1024.0;

/// What another thread adds to the rate of the first: with four ranks and 16 MiB two threads were 1.2 to 1.7 times as fast as one.
const GAIN: f64 = 0.5;

/// Seconds a byte from which on the link is what takes them, and no longer the one thread that sends and receives: 20 Gbit/s.
/// Smaller: how several threads share out messages counts for less than it does. Larger: where it does not help, more
/// messages seem to cost nothing.
const SLOW: f64 = 4e-10;

/// Ranks of a group at most whose links have several streams: the sockets of all pairs add up.
pub(crate) const FEW_RANKS: usize = 16;

/// Streams at most that a rank is believed to have measured.
const MOST_STREAMS: usize = 64;

/// Measured constants, in seconds. Equal on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Shared memory.
    pub window: WindowCost,
    /// A link between ranks of one host.
    pub near: LinkCost,
    /// A link between hosts of a region; the rate is that of a host, whose ranks share it.
    pub far: LinkCost,
    /// A link between regions; the rate is that of a region, whose hosts share it.
    pub wide: LinkCost,
    /// Folding a byte of input from private memory.
    pub fold: f64,
    /// Ranks per core, at least 1: above, they take turns.
    pub crowd: f64,
    /// Threads that a rank has for one call, on average of the ranks, half of the time with a program that rests.
    pub threads: f64,
    /// Streams that the way between two hosts of a region needs for its rate, however many threads use them; 1 as well if
    /// that was not tried.
    pub streams: usize,
    /// Hosts of which it was found out which are in one region; 0 if it was not.
    pub surveyed: usize,
}

/// What a link costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkCost {
    /// From the start of an empty message until the receiver goes on.
    pub latency: f64,
    /// What each further message of a round costs its sender or receiver.
    pub message: f64,
    /// A byte at full rate.
    pub byte: f64,
}

/// What a window costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowCost {
    /// Until all ranks of the host have noticed that all have arrived.
    pub wait: f64,
    /// Copying a byte into or out of staging.
    pub copy: f64,
    /// Folding a byte of input from staging.
    pub fold: f64,
}

impl Default for Costs {
    /// What is typical of a server of today on a 10 Gbit/s network: enough to make a sensible
    /// first choice, for the measurement itself for instance.
    fn default() -> Costs {
        Costs {
            window: WindowCost { wait: 0.4e-6, copy: 0.12e-9, fold: 0.08e-9 },
            near: LinkCost { latency: 10e-6, message: 3e-6, byte: 0.35e-9 },
            far: LinkCost { latency: 30e-6, message: 4e-6, byte: 0.9e-9 },
            wide: LinkCost { latency: 20e-3, message: 4e-6, byte: 9e-9 },
            fold: 0.06e-9,
            crowd: 1.0,
            threads: 1.0,
            streams: 1,
            surveyed: 0,
        }
    }
}

impl Costs {
    pub(crate) const NUMBERS: usize = 17;

    /// Whether it was found out that this many hosts are all in one region.
    pub(crate) fn rule_out_regions(&self, hosts: usize) -> bool {
        !self.know_regions() && self.surveyed >= hosts
    }

    /// Whether a link between regions was measured.
    pub(crate) fn know_regions(&self) -> bool {
        self.wide != Costs::default().wide
    }

    /// Whether all that a group with this topology uses was measured, and not only assumed. If it was not `surveyed`, its
    /// hosts seem to be in one region, but may be those of two.
    pub(crate) fn cover(&self, topology: &Topology, surveyed: bool) -> bool {
        let typical = Costs::default();
        let shares_hosts = (0..topology.hosts()).any(|host| topology.members(host).len() > 1);
        let is_near = !shares_hosts || self.near != typical.near;
        let spans_hosts = (0..topology.regions()).any(|r| topology.hosts_of(r).len() > 1);
        let is_far = !spans_hosts || self.far != typical.far;
        let is_wide = topology.regions() == 1 || self.know_regions();
        let is_sure = surveyed || topology.hosts() == 1 || !self.know_regions();
        is_near && is_far && is_wide && is_sure
    }

    /// The same where so many ranks share a core: what they compute takes them as much longer.
    pub(crate) fn in_crowd(mut self, crowd: f64) -> Costs {
        let ratio = crowd / self.crowd;
        let WindowCost { wait, copy, fold } = &mut self.window;
        for cost in [wait, copy, fold, &mut self.fold] {
            *cost *= ratio;
        }
        Costs { crowd, ..self }
    }

    /// Bytes that are under way between two hosts if nothing holds them up. The rate is that of a good network: what the
    /// first small messages over a long link tell of its own is how slowly TCP begins.
    pub(crate) fn under_way(&self, topology: &Topology) -> usize {
        const RATE: f64 = 1.25e9;
        let round_trip = match (topology.hosts(), topology.regions()) {
            (1, _) => 0.0,
            (_, 1) => 2.0 * self.far.latency,
            _ => 2.0 * self.wide.latency,
        };
        (round_trip * RATE) as usize
    }

    /// Streams that a link should have for long messages: some where several threads of a rank can use them at once, and as
    /// many as its share of those that the way between two hosts needs. Between regions, not for the sake of distance: over a link of 40 ms that loses packets, 24 streams took
    /// longer for 4 MiB than one, since each has to find out the rate, and waits for what it has lost.
    pub(crate) fn streams(&self, topology: &Topology) -> usize {
        let for_threads = match topology.world() {
            _ if self.threads <= 1.0 => 1,
            // With two threads only while the program rests, what four would gain then is lost before.
            ..=8 if self.threads >= 2.0 => 4,
            _ => 2,
        };
        let largest = (0..topology.hosts()).map(|host| topology.members(host).len()).max();
        let needed = match topology.regions() {
            1 => self.streams.div_ceil(largest.unwrap_or(1).max(1)),
            _ => 1,
        };
        if topology.world() > FEW_RANKS { 1 } else { for_threads.max(needed) }
    }

    /// As they travel.
    pub(crate) fn to_numbers(self) -> [f64; Costs::NUMBERS] {
        let Costs { window, near, far, wide, fold, crowd, threads, streams, surveyed } = self;
        let [near, far, wide] =
            [near, far, wide].map(|link| [link.latency, link.message, link.byte]);
        let window = [window.wait, window.copy, window.fold];
        let [[a, b, c], [d, e, f], [g, h, i], [j, k, l]] = [window, near, far, wide];
        let [streams, surveyed] = [streams, surveyed].map(|number| number as f64);
        [a, b, c, d, e, f, g, h, i, j, k, l, fold, crowd, threads, streams, surveyed]
    }

    /// The reverse of [`Costs::to_numbers`].
    pub(crate) fn from_numbers(numbers: [f64; Costs::NUMBERS]) -> Costs {
        let [
            wait,
            copy,
            fold,
            d,
            e,
            f,
            g,
            h,
            i,
            j,
            k,
            l,
            own_fold,
            crowd,
            threads,
            streams,
            surveyed,
        ] = numbers;
        Costs {
            window: WindowCost { wait, copy, fold },
            near: LinkCost { latency: d, message: e, byte: f },
            far: LinkCost { latency: g, message: h, byte: i },
            wide: LinkCost { latency: j, message: k, byte: l },
            fold: own_fold,
            crowd,
            threads,
            streams: (streams as usize).clamp(1, MOST_STREAMS),
            surveyed: surveyed as usize,
        }
    }
}

/// How a call is cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of a column.
    pub column: usize,
    /// The number of segments.
    pub segments: usize,
    /// How many of them are in flight; schedules of several phases have one, whatever this says.
    pub in_flight: usize,
}

/// What an algorithm would take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The time.
    pub seconds: f64,
}

/// The algorithms that compete for an operation, summed up so that pricing them for another size
/// is quick.
#[derive(Clone, Debug)]
pub struct Contest {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    algorithm: Algorithm,
    /// The schedule of rank 0.
    schedule: Schedule,
    load: Load,
}

impl Contest {
    /// Among `algorithms`, those that can do the operation; of which `in_place` reads the buffers of others where
    /// they are, if one does.
    pub fn new(
        op: Op,
        topology: &Topology,
        algorithms: &[Algorithm],
        in_place: Option<Algorithm>,
    ) -> Contest {
        let witnesses = witnesses(op, topology);
        let entry = |algorithm: &Algorithm| {
            let plan = |rank| {
                let problem = Problem { op, rank, world: topology.world() };
                Some((rank, build(*algorithm, &problem, topology)?))
            };
            let plans: Vec<(usize, Schedule)> =
                witnesses.iter().map(|rank| plan(*rank)).collect::<Option<_>>()?;
            let load = Load::new(&plans, topology, in_place == Some(*algorithm));
            let schedule = plans.into_iter().next().expect("rank 0 is a witness").1;
            Some(Entry { algorithm: *algorithm, schedule, load })
        };
        Contest { entries: algorithms.iter().filter_map(entry).collect() }
    }

    /// All of them, best first. `cut` says how a call would be cut for a schedule, of which it
    /// may use only what is equal on all ranks.
    pub fn predict(
        &self,
        costs: &Costs,
        mut cut: impl FnMut(Algorithm, &Schedule) -> Cut,
    ) -> Vec<Prediction> {
        let price = |entry: &Entry| Prediction {
            algorithm: entry.algorithm,
            seconds: entry.load.price(costs, cut(entry.algorithm, &entry.schedule)),
        };
        let mut predictions: Vec<_> = self.entries.iter().map(price).collect();
        predictions.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        predictions
    }
}

/// What a call takes, given the schedules of some ranks. Those of one host should be all there or
/// be typical of the rest.
pub fn predict(plans: &[(usize, Schedule)], topology: &Topology, costs: &Costs, cut: Cut) -> f64 {
    Load::new(plans, topology, false).price(costs, cut)
}

/// Ranks among which are the busiest of any algorithm, rank 0 first: the root and its neighbour,
/// the first and the last, and all that share a way to other hosts, or to other regions, with the root or with
/// rank 0.
fn witnesses(op: Op, topology: &Topology) -> Vec<usize> {
    let world = topology.world();
    let root = op.root().unwrap_or(0);
    let mut ranks = vec![0, root, (root + 1) % world, world - 1];
    if !topology.is_one_host() {
        ranks.extend(topology.members(topology.host(0)));
        ranks.extend(topology.members(topology.host(root)));
    }
    if topology.regions() > 1 {
        let theirs = |rank| (0..world).filter(move |other| topology.share_region(rank, *other));
        ranks.extend(theirs(0).chain(theirs(root)));
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// What the witnesses do for one segment, step by step, in columns instead of bytes.
#[derive(Clone, Debug)]
struct Load {
    steps: Vec<Step>,
    /// Whether segments overlap.
    overlaps: bool,
    /// Whether each host has one rank: what crosses between hosts is then what one rank sends and receives.
    apart: bool,
}

/// A round or a window: what every witness does in it.
#[derive(Clone, Debug, Default)]
struct Step {
    efforts: Vec<Effort>,
    /// Columns that cross between hosts, for every host with a witness.
    hosts: Crossings,
    /// Those that cross between regions, for every region with a witness.
    regions: Crossings,
}

/// What the witnesses of one host, or of one region, exchange with others.
#[derive(Clone, Copy, Debug)]
struct Crossing {
    /// The number of the host or the region.
    of: usize,
    sent: f64,
    received: f64,
}

#[derive(Clone, Debug, Default)]
struct Crossings(Vec<Crossing>);

impl Crossings {
    fn add(&mut self, of: usize, sent: f64, received: f64) {
        match self.0.iter_mut().find(|crossing| crossing.of == of) {
            Some(crossing) => {
                crossing.sent += sent;
                crossing.received += received;
            }
            None => self.0.push(Crossing { of, sent, received }),
        }
    }

    /// Columns that pass where most do, in the direction in which more do.
    fn most(&self) -> f64 {
        self.0.iter().map(|crossing| crossing.sent.max(crossing.received)).fold(0.0, f64::max)
    }
}

/// What one rank does in one step.
#[derive(Clone, Copy, Debug, Default)]
struct Effort {
    near: Traffic,
    far: Traffic,
    wide: Traffic,
    /// Columns of input folded from private memory.
    folded: f64,
    waits: f64,
    /// Columns copied into or out of staging, or from buffer to buffer.
    copied: f64,
    /// Columns of input folded from staging.
    staged: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    messages: f64,
    sent: f64,
    received: f64,
}

impl Traffic {
    /// How much quicker so many bytes of a step move where a rank has several threads for them: they share out the messages
    /// among them. One message each way gains little.
    fn speedup(&self, costs: &Costs, bytes: f64) -> f64 {
        if bytes < SHARED {
            return 1.0;
        }
        let shared_by = costs.threads.min(self.messages / 2.0).max(1.0);
        1.0 + GAIN * (shared_by - 1.0)
    }
}

impl Load {
    fn new(plans: &[(usize, Schedule)], topology: &Topology, in_place: bool) -> Load {
        let mut steps: Vec<Step> = Vec::new();
        for (rank, schedule) in plans {
            let mut number = 0;
            let mut add = |effort: Effort| {
                if steps.len() == number {
                    steps.push(Step::default());
                }
                steps[number].add(topology, *rank, effort);
                number += 1;
            };
            for phase in &schedule.phases {
                match phase {
                    Phase::Rounds(rounds) => rounds
                        .rounds
                        .iter()
                        .for_each(|round| add(Effort::of_round(*rank, round, topology))),
                    Phase::Window(window) => add(Effort::of_window(window, in_place)),
                }
            }
        }
        let overlaps = plans.iter().all(|(_, schedule)| schedule.phases.len() <= 1);
        Load { steps, overlaps, apart: topology.is_all_apart() }
    }

    fn price(&self, costs: &Costs, cut: Cut) -> f64 {
        let column = cut.column as f64;
        let witnesses = self.steps.iter().map(|step| step.efforts.len()).max().unwrap_or(0);
        let mut busy = vec![0.0; witnesses];
        let (mut fill, mut crossing) = (0.0, 0.0);
        for step in &self.steps {
            // What leaves a region leaves a host as well; both happen at once.
            let far = step.hosts.most() * costs.far.byte / self.speedup(costs, step, column);
            let crosses = far.max(step.regions.most() * costs.wide.byte) * column;
            let mut slowest: f64 = 0.0;
            for (effort, busy) in step.efforts.iter().zip(&mut busy) {
                let work = effort.work(costs, column);
                *busy += work;
                slowest = slowest.max(work + effort.latency(costs));
            }
            fill += slowest + crosses;
            crossing += crosses;
        }
        let bottleneck = busy.into_iter().fold(0.0, f64::max) + crossing;
        let in_flight = if self.overlaps { cut.in_flight.max(1) } else { 1 };
        let next = bottleneck.max(fill / in_flight as f64);
        fill + cut.segments.saturating_sub(1) as f64 * next
    }

    /// How much quicker what crosses between hosts does so because ranks have several threads for it.
    fn speedup(&self, costs: &Costs, step: &Step, column: f64) -> f64 {
        if !self.apart || costs.far.byte > SLOW {
            return 1.0;
        }
        let of_rank = |effort: &Effort| {
            effort.far.speedup(costs, effort.far.sent.max(effort.far.received) * column)
        };
        let least = step.efforts.iter().map(of_rank).fold(f64::INFINITY, f64::min);
        if least.is_finite() { least } else { 1.0 }
    }
}

impl Step {
    fn add(&mut self, topology: &Topology, rank: usize, effort: Effort) {
        self.efforts.push(effort);
        let (far, wide, host) = (effort.far, effort.wide, topology.host(rank));
        self.hosts.add(host, far.sent + wide.sent, far.received + wide.received);
        self.regions.add(topology.region(host), wide.sent, wide.received);
    }
}

impl Effort {
    fn of_round(rank: usize, round: &Round, topology: &Topology) -> Effort {
        let mut effort = Effort::default();
        for send in &round.sends {
            let traffic = effort.traffic(topology, rank, send.to);
            traffic.messages += 1.0;
            traffic.sent += columns(&send.blocks);
        }
        for recv in &round.recvs {
            let traffic = effort.traffic(topology, rank, recv.from);
            traffic.messages += 1.0;
            traffic.received += columns(&recv.blocks);
        }
        round.folds.iter().for_each(|fold| effort.add_fold(fold));
        effort
    }

    /// In place, nothing is staged or published, but all ranks wait for each other's last read.
    fn of_window(window: &Window, in_place: bool) -> Effort {
        let mut effort = Effort::default();
        if window.cells > 0 {
            effort.waits = 1.0 + f64::from(u8::from(window.publishes) + u8::from(in_place));
        }
        let staged = window.stages.iter().filter(|_| !in_place);
        let staged = staged.map(|stage| columns(&stage.blocks));
        let collected = window.collects.iter().map(|collect| columns(&collect.blocks));
        effort.copied = staged.chain(collected).sum();
        window.copies.iter().for_each(|copy| effort.add_fold(copy));
        for fold in &window.folds {
            let blocks = columns(&fold.blocks);
            let staged = fold.inputs.iter().filter(|i| matches!(i, Source::Staged { .. })).count();
            effort.staged += staged as f64 * blocks;
            effort.folded += (fold.inputs.len() - staged) as f64 * blocks;
            if fold.publish.is_some() && !in_place {
                effort.copied += blocks;
            }
        }
        effort
    }

    fn add_fold(&mut self, fold: &Fold) {
        let inputs = fold.inputs.len() as f64 * columns(&fold.blocks);
        if fold.inputs.len() == 1 {
            self.copied += inputs;
        } else {
            self.folded += inputs;
        }
    }

    fn traffic(&mut self, topology: &Topology, rank: usize, peer: usize) -> &mut Traffic {
        match (topology.together(rank, peer), topology.share_region(rank, peer)) {
            (true, _) => &mut self.near,
            (_, true) => &mut self.far,
            _ => &mut self.wide,
        }
    }

    /// What keeps the rank busy, but for the way between hosts. Waiting for a window is busy work:
    /// every clock has to be fetched from its owner's core.
    fn work(&self, costs: &Costs, column: f64) -> f64 {
        let messages = self.near.messages * costs.near.message
            + self.far.messages * costs.far.message
            + self.wide.messages * costs.wide.message;
        let near = self.near.sent.max(self.near.received);
        let near = near * costs.near.byte / self.near.speedup(costs, near * column);
        let local = self.folded * costs.fold
            + self.copied * costs.window.copy
            + self.staged * costs.window.fold;
        messages + self.waits * costs.window.wait + (near + local) * column
    }

    /// What passes although the rank has nothing to do.
    fn latency(&self, costs: &Costs) -> f64 {
        let classes =
            [(&self.near, &costs.near), (&self.far, &costs.far), (&self.wide, &costs.wide)];
        let used = classes.iter().filter(|(traffic, _)| traffic.messages > 0.0);
        used.map(|(_, link)| link.latency).fold(0.0, f64::max)
    }
}

fn columns(blocks: &Blocks) -> f64 {
    blocks.len() as f64
}

#[cfg(test)]
mod tests;
