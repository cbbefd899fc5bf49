//! Hierarchy: shared memory inside the hosts, links between them.
//!
//! On every host the first few ranks are *leaders*, as many as the smallest host has. All
//! blocks are divided among the leaders, and leader `l` of one host talks to leader `l` of the
//! others only, so that all links between hosts are used at once. A leader's blocks are divided
//! again among the hosts: its *share* for host `g` is reduced there.
//!
//! A reduction has three phases. First, every host reduces through its window, as far as the
//! canonical tree allows: each leader folds its blocks into *partials*, the largest canonical
//! subtrees whose ranks are all on this host. (One partial if a host's ranks are an aligned
//! range, a few if they are a range, one per rank in the worst of placements: correct, though
//! then nothing is gained.) Second, the leaders send each other the partials of their shares,
//! combine the rest of the canonical tree and, in an all-reduce, send the results to each other.
//! Third, the results spread through the window of each host.
//!
//! A broadcast goes through the root's window to its leaders, is scattered to and exchanged
//! between the leaders of the other hosts, and spreads through their windows. An all-gather
//! gathers in the window, exchanges between leaders, and spreads.

use std::ops::Range;

use super::{
    Area, Blocks, Collect, Fold, Op, Phase, Problem, Recv, Round, Rounds, Schedule, Send, Source,
    Stage, Topology, Window, WindowFold, agreement, block,
};
use crate::tree::{Tree, split};

pub(super) fn build(problem: &Problem, topology: &Topology) -> Option<Schedule> {
    let plan = Hierarchy::new(problem, topology)?;
    let Problem { op, rank, .. } = *problem;
    let everywhere = |_| true;
    let (before, rounds, after) = match op {
        Op::AllReduce => {
            let rounds = vec![plan.exchange(|_| Area::Output), plan.spread(everywhere)];
            (plan.reduce_on_host(), rounds, plan.spread_on_host(|_| true))
        }
        Op::ReduceScatter => {
            let exchange = plan.exchange(|b| plan.output_if(b as usize == rank, b));
            (plan.reduce_on_host(), vec![exchange], plan.hand_to_owners())
        }
        Op::Reduce { root } => {
            let exchange = plan.exchange(|b| plan.output_if(rank == root, b));
            (plan.reduce_on_host(), vec![exchange, plan.gather(root)], plan.hand_to_root(root))
        }
        Op::AllGather => {
            let remote = |block: u32| !topology.together(block as usize, rank);
            (plan.gather_on_host(), vec![plan.spread(everywhere)], plan.spread_on_host(remote))
        }
        Op::Broadcast { root } => {
            let elsewhere = |host| host != topology.host(root);
            let rounds = vec![plan.scatter(root), plan.spread(elsewhere)];
            let after = match elsewhere(plan.host) {
                true => plan.spread_on_host(|_| true),
                false => plan.wait_on_host(),
            };
            (plan.broadcast_on_host(root), rounds, after)
        }
        Op::Gather { .. } | Op::Scatter { .. } | Op::AllToAll => return None,
    };
    let mut rounds = rounds;
    if op.root().is_some() {
        plan.agree(&mut rounds);
    }
    let phases =
        vec![Phase::Window(before), Phase::Rounds(Rounds { rounds }), Phase::Window(after)];
    Some(Schedule { phases, parts: plan.parts, cells: plan.cells(), staging: plan.total })
}

/// One rank's view of the hierarchy.
pub(super) struct Hierarchy<'a> {
    pub(super) topology: &'a Topology,
    rank: usize,
    pub(super) host: usize,
    /// The ranks of this host.
    members: &'a [usize],
    /// The number of leaders on every host.
    leaders: usize,
    /// Which leader this rank is, if it is one.
    pub(super) leader: Option<usize>,
    /// `shares[l][g]`: the blocks that the leaders `l` handle for host `g`, ascending.
    shares: Vec<Vec<Vec<u32>>>,
    /// The partials of all hosts, in the order of their leaves.
    pub(super) partials: Vec<Partial>,
    /// All blocks.
    pub(super) total: u32,
    parts: u32,
}

/// A canonical subtree whose ranks are all on one host.
pub(super) struct Partial {
    pub(super) host: usize,
    pub(super) leaves: Range<usize>,
    /// Its number among those of this rank's host, or among those of all other hosts.
    number: usize,
}

impl<'a> Hierarchy<'a> {
    fn new(problem: &Problem, topology: &'a Topology) -> Option<Hierarchy<'a>> {
        let (hosts, leaders) = (topology.hosts(), topology.smallest_host());
        let shares = match problem.op {
            Op::AllReduce | Op::Reduce { .. } => one_block_shares(leaders, hosts, None),
            Op::Broadcast { root } => {
                // The root's host has everything already.
                one_block_shares(leaders, hosts, Some(topology.host(root)))
            }
            Op::ReduceScatter | Op::AllGather => owner_shares(leaders, topology),
            Op::Gather { .. } | Op::Scatter { .. } | Op::AllToAll => return None,
        };
        Some(Hierarchy::with_shares(problem, topology, shares))
    }

    /// A hierarchy in which the leaders divide the blocks as `shares` says. Each list of blocks is handled for a host, or for
    /// whatever else a schedule between the windows has in that place.
    pub(super) fn with_shares(
        problem: &Problem,
        topology: &'a Topology,
        shares: Vec<Vec<Vec<u32>>>,
    ) -> Hierarchy<'a> {
        let Problem { op, rank, world } = *problem;
        let leaders = shares.len();
        let parts = shares.iter().flatten().flatten().count().max(1);
        let host = topology.host(rank);
        let members = topology.members(host);
        let mut partials = Vec::new();
        if op.reduces() {
            find_partials(topology, 0..world, &mut partials);
            let mut counts = [0; 2];
            for partial in &mut partials {
                let count = &mut counts[usize::from(partial.host == host)];
                partial.number = *count;
                *count += 1;
            }
        }
        Hierarchy {
            topology,
            rank,
            host,
            members,
            leaders,
            leader: members.iter().take(leaders).position(|member| *member == rank),
            shares,
            partials,
            total: if op.has_blocks() { world } else { parts } as u32,
            parts: if op.has_blocks() { 1 } else { parts as u32 },
        }
    }

    /// The rank of leader `l` on host `g`; they are [counterparts](Topology::counterparts).
    pub(super) fn leader_of(&self, l: usize, g: usize) -> usize {
        self.topology.members(g)[l]
    }

    /// The other hosts, in an order that differs from host to host.
    fn other_hosts(&self) -> impl Iterator<Item = usize> {
        let (host, hosts) = (self.host, self.topology.hosts());
        (1..hosts).map(move |distance| (host + distance) % hosts)
    }

    /// All blocks of leaders `l`, for whichever host, ascending.
    pub(super) fn blocks_of(&self, l: usize) -> Vec<u32> {
        let mut blocks = self.shares[l].concat();
        blocks.sort_unstable();
        blocks
    }

    /// The number of partials of a host.
    pub(super) fn partials_of(&self, host: usize) -> usize {
        self.partials.iter().filter(|partial| partial.host == host).count()
    }
}

/// Scratch of leader `l`: one cell for every partial of its host, for each of its blocks; one
/// for the result of each of its blocks; one for every partial that arrives, for each block of
/// its share.
impl Hierarchy<'_> {
    /// Where a partial is. What is only this rank's input need not be copied.
    pub(super) fn place(&self, l: usize, partial: &Partial, block: u32) -> Area {
        let blocks = self.blocks_of(l);
        let cell = if partial.leaves == (self.rank..self.rank + 1) {
            return Area::Input;
        } else if partial.host == self.host {
            partial.number * blocks.len() + position(&blocks, block)
        } else {
            let share = &self.shares[l][self.host];
            let before = (self.partials_of(self.host) + 1) * blocks.len();
            before + partial.number * share.len() + position(share, block)
        };
        Area::Scratch(cell as u32)
    }

    /// Where a leader puts the result of a block: the output if it needs it itself, else scratch.
    fn output_if(&self, own: bool, block: u32) -> Area {
        match self.leader {
            Some(l) if !own => {
                let blocks = self.blocks_of(l);
                let before = self.partials_of(self.host) * blocks.len();
                Area::Scratch((before + position(&blocks, block)) as u32)
            }
            _ => Area::Output,
        }
    }

    /// The cells of the leader that needs most.
    fn cells(&self) -> u32 {
        if self.partials.is_empty() {
            return 0;
        }
        let needed = |l: usize, g: usize| {
            let own = self.partials_of(g);
            let arriving = (self.partials.len() - own) * self.shares[l][g].len();
            (own + 1) * self.shares[l].iter().map(Vec::len).sum::<usize>() + arriving
        };
        let hosts = self.topology.hosts();
        let all = (0..self.leaders).flat_map(|l| (0..hosts).map(move |g| needed(l, g)));
        all.max().unwrap_or(0) as u32
    }
}

/// Between hosts: what a leader does, nothing for the others.
impl Hierarchy<'_> {
    /// Send the other leaders the partials of their shares; reduce the own share.
    fn exchange(&self, into: impl Fn(u32) -> Area) -> Round {
        let mut round = Round::default();
        let Some(l) = self.leader else { return round };
        let share = &self.shares[l][self.host];
        for g in self.other_hosts() {
            let peer = self.leader_of(l, g);
            for partial in self.partials.iter().filter(|partial| partial.host == self.host) {
                round.sends.extend(runs(&self.shares[l][g]).map(|blocks| {
                    let from = self.place(l, partial, blocks.start);
                    Send { to: peer, blocks, from }
                }));
            }
            for partial in self.partials.iter().filter(|partial| partial.host == g) {
                round.recvs.extend(runs(share).map(|blocks| {
                    let into = self.place(l, partial, blocks.start);
                    Recv { from: peer, blocks, into }
                }));
            }
        }
        let covers: Vec<_> = self.partials.iter().map(|partial| partial.leaves.clone()).collect();
        let tree = Tree::over(0..self.topology.world(), &covers)
            .expect("partials are canonical subtrees that cover every rank once");
        round.folds.extend(share.iter().map(|&b| Fold {
            inputs: self.partials.iter().map(|partial| self.place(l, partial, b)).collect(),
            tree: tree.clone(),
            blocks: b..b + 1,
            into: into(b),
            root: true,
        }));
        round
    }

    /// Leaders of hosts that take part send each other the finished blocks of their share.
    fn spread(&self, takes_part: impl Fn(usize) -> bool) -> Round {
        let mut round = Round::default();
        let Some(l) = self.leader.filter(|_| takes_part(self.host)) else { return round };
        for g in self.other_hosts().filter(|g| takes_part(*g)) {
            round.send_all(self.leader_of(l, g), &self.shares[l][self.host], |_| Area::Output);
            round.recv_all(self.leader_of(l, g), &self.shares[l][g], |_| Area::Output);
        }
        round
    }

    /// Leaders send the results of their share to the root's host.
    fn gather(&self, root: usize) -> Round {
        let mut round = Round::default();
        let Some(l) = self.leader else { return round };
        let home = self.topology.host(root);
        let place = |b| self.output_if(self.rank == root, b);
        if self.host != home {
            round.send_all(self.leader_of(l, home), &self.shares[l][self.host], place);
            return round;
        }
        for g in self.other_hosts() {
            round.recv_all(self.leader_of(l, g), &self.shares[l][g], place);
        }
        round
    }

    /// The leaders `l` of all hosts make sure that they mean the same root.
    fn agree(&self, rounds: &mut Vec<Round>) {
        let hosts = 0..self.topology.hosts();
        match self.leader {
            Some(l) => {
                let leaders: Vec<usize> = hosts.map(|g| self.leader_of(l, g)).collect();
                agreement::weave(rounds, &leaders, self.host);
            }
            // As many rounds as the leaders have.
            None => {
                agreement::extend(rounds, hosts.len());
            }
        }
    }

    /// Leaders of the root's host send the others their share.
    fn scatter(&self, root: usize) -> Round {
        let mut round = Round::default();
        let Some(l) = self.leader else { return round };
        let home = self.topology.host(root);
        if self.host != home {
            let share = &self.shares[l][self.host];
            round.recv_all(self.leader_of(l, home), share, |_| Area::Output);
            return round;
        }
        let from = if self.rank == root { Area::Input } else { Area::Output };
        for g in self.other_hosts() {
            round.send_all(self.leader_of(l, g), &self.shares[l][g], |_| from);
        }
        round
    }
}

/// Inside a host. In all windows but that of an all-gather, block `b` is in cell `b`. A rank
/// that is alone on its host shares nothing.
impl Hierarchy<'_> {
    /// Every rank stages what others fold; leaders fold their blocks into this host's partials.
    pub(super) fn reduce_on_host(&self) -> Window {
        if self.members.len() == 1 {
            return Window::default();
        }
        let own = self.leader.map_or(Vec::new(), |l| self.blocks_of(l));
        let others: Vec<u32> = (0..self.total).filter(|b| own.binary_search(b).is_err()).collect();
        let mut window = self.stage(&others, |_| Area::Input);
        let Some(l) = self.leader else { return window };
        let shared = self.partials.iter().filter(|partial| {
            partial.host == self.host && partial.leaves != (self.rank..self.rank + 1)
        });
        for partial in shared {
            window.folds.extend(runs(&own).map(|blocks| {
                let source = |rank| match rank == self.rank {
                    true => Source::Own(Area::Input),
                    false => Source::Staged { rank, cell: blocks.start },
                };
                WindowFold {
                    inputs: partial.leaves.clone().map(source).collect(),
                    tree: Tree::canonical(partial.leaves.len()),
                    into: self.place(l, partial, blocks.start),
                    blocks,
                    publish: None,
                    root: false,
                }
            }));
        }
        window
    }

    /// Leaders stage the blocks that `wanted` names; every rank collects those of the others.
    pub(super) fn spread_on_host(&self, wanted: impl Fn(u32) -> bool) -> Window {
        if self.members.len() == 1 {
            return Window::default();
        }
        let blocks_of = |l| {
            let mut blocks = self.blocks_of(l);
            blocks.retain(|b| wanted(*b));
            blocks
        };
        let own = self.leader.map_or(Vec::new(), blocks_of);
        let mut window = self.stage(&own, |_| Area::Output);
        for l in (0..self.leaders).filter(|l| Some(*l) != self.leader) {
            window.collect_all(self.members[l], &blocks_of(l));
        }
        window
    }

    /// Leaders stage the results of their share; their owners collect them.
    fn hand_to_owners(&self) -> Window {
        if self.members.len() == 1 {
            return Window::default();
        }
        let own = self.rank as u32;
        let share = |l: usize| &self.shares[l][self.host];
        let mut others = self.leader.map_or(Vec::new(), |l| share(l).clone());
        others.retain(|b| *b != own);
        let mut window = self.stage(&others, |b| self.output_if(false, b));
        for l in (0..self.leaders).filter(|l| Some(*l) != self.leader && share(*l).contains(&own)) {
            window.collect_all(self.members[l], &[own]);
        }
        window
    }

    /// Leaders of the root's host stage the results of all their blocks; the root collects them.
    fn hand_to_root(&self, root: usize) -> Window {
        if self.members.len() == 1 || !self.members.contains(&root) {
            return self.wait_on_host();
        }
        if self.rank != root {
            let own = self.leader.map_or(Vec::new(), |l| self.blocks_of(l));
            return self.stage(&own, |b| self.output_if(false, b));
        }
        let mut window = self.stage(&[], |_| Area::Output);
        for l in (0..self.leaders).filter(|l| Some(*l) != self.leader) {
            window.collect_all(self.members[l], &self.blocks_of(l));
        }
        window
    }

    /// Nothing moves: all wait for the leaders, which know that the hosts agree on the root.
    fn wait_on_host(&self) -> Window {
        match self.members.len() {
            1 => Window::default(),
            _ => self.stage(&[], |_| Area::Output),
        }
    }

    fn gather_on_host(&self) -> Window {
        let own = block(self.rank);
        let copies = vec![Fold::copy(own.clone(), Area::Input, Area::Output)];
        if self.members.len() == 1 {
            return Window { copies, ..Window::default() };
        }
        let others = self.members.iter().filter(|member| **member != self.rank);
        let collect = |&rank| Collect { rank, cell: 0, blocks: block(rank), into: Area::Output };
        Window {
            stages: vec![Stage { blocks: own, from: Area::Input, cell: 0 }],
            copies,
            collects: others.map(collect).collect(),
            cells: 1,
            ..Window::default()
        }
    }

    fn broadcast_on_host(&self, root: usize) -> Window {
        let all: Vec<u32> = (0..self.total).collect();
        if self.rank == root {
            let copies = vec![Fold::copy(0..self.total, Area::Input, Area::Output)];
            if self.members.len() == 1 {
                return Window { copies, ..Window::default() };
            }
            return Window { copies, ..self.stage(&all, |_| Area::Input) };
        }
        if !self.members.contains(&root) {
            return Window::default();
        }
        let mut window = self.stage(&[], |_| Area::Input);
        window.collect_all(root, &all);
        window
    }

    /// A window in which this rank stages these blocks, each run of them from one place.
    fn stage(&self, list: &[u32], from: impl Fn(u32) -> Area) -> Window {
        let stage = |blocks: Blocks| Stage { cell: blocks.start, from: from(blocks.start), blocks };
        Window { stages: runs(list).map(stage).collect(), cells: self.total, ..Window::default() }
    }
}

impl Round {
    fn send_all(&mut self, to: usize, list: &[u32], from: impl Fn(u32) -> Area) {
        self.sends.extend(runs(list).map(|blocks| Send { to, from: from(blocks.start), blocks }));
    }

    fn recv_all(&mut self, from: usize, list: &[u32], into: impl Fn(u32) -> Area) {
        self.recvs.extend(runs(list).map(|blocks| Recv { from, into: into(blocks.start), blocks }));
    }
}

impl Window {
    fn collect_all(&mut self, rank: usize, list: &[u32]) {
        self.collects.extend(runs(list).map(|blocks| {
            let into = Area::Output;
            Collect { rank, cell: blocks.start, blocks, into }
        }));
    }
}

/// One block for every leader and host but the one left out; a leader's blocks are neighbours.
fn one_block_shares(leaders: usize, hosts: usize, left_out: Option<usize>) -> Vec<Vec<Vec<u32>>> {
    let mut next = 0..;
    let mut share = |g| match Some(g) == left_out {
        true => Vec::new(),
        false => next.by_ref().take(1).collect(),
    };
    (0..leaders).map(|_| (0..hosts).map(&mut share).collect()).collect()
}

/// Every rank owns a block; the leaders of its host divide them.
fn owner_shares(leaders: usize, topology: &Topology) -> Vec<Vec<Vec<u32>>> {
    let share = |l: usize, g: usize| {
        let members = topology.members(g);
        let cut = |l| l * members.len() / leaders;
        members[cut(l)..cut(l + 1)].iter().map(|rank| *rank as u32).collect()
    };
    let hosts = topology.hosts();
    (0..leaders).map(|l| (0..hosts).map(|g| share(l, g)).collect()).collect()
}

/// The largest nodes of the canonical tree whose ranks are all on one host.
fn find_partials(topology: &Topology, node: Range<usize>, out: &mut Vec<Partial>) {
    let mut nodes = Vec::new();
    largest_nodes(node, &|a, b| topology.together(a, b), &mut nodes);
    let partial = |leaves: Range<usize>| {
        let host = topology.host(leaves.start);
        Partial { host, leaves, number: 0 }
    };
    out.extend(nodes.into_iter().map(partial));
}

/// The largest nodes of the canonical tree under `node` whose ranks are all `together`, in the order of their leaves.
pub(super) fn largest_nodes(
    node: Range<usize>,
    together: &impl Fn(usize, usize) -> bool,
    out: &mut Vec<Range<usize>>,
) {
    if node.clone().all(|rank| together(rank, node.start)) {
        out.push(node);
        return;
    }
    let mid = split(node.clone());
    largest_nodes(node.start..mid, together, out);
    largest_nodes(mid..node.end, together, out);
}

/// Ascending blocks as ranges.
fn runs(blocks: &[u32]) -> impl Iterator<Item = Blocks> {
    blocks.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[0] + run.len() as u32)
}

/// The index of a block in an ascending list that has it.
fn position(blocks: &[u32], block: u32) -> usize {
    blocks.binary_search(&block).expect("a leader is asked only about its own blocks")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partials(hosts: &[u32]) -> Vec<Range<usize>> {
        let topology = Topology::new(hosts);
        let mut out = Vec::new();
        find_partials(&topology, 0..hosts.len(), &mut out);
        out.into_iter().map(|partial| partial.leaves).collect()
    }

    #[test]
    fn partials_are_as_large_as_the_placement_allows() {
        assert_eq!(partials(&[0, 0, 0, 0, 1, 1, 1, 1]), [0..4, 4..8]);
        assert_eq!(partials(&[0, 0, 0, 1, 1, 1]), [0..2, 2..3, 3..4, 4..6]);
        assert_eq!(partials(&[0, 1, 0, 1]), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(partials(&[5, 5, 6]), [0..2, 2..3]);
    }

    #[test]
    fn runs_are_maximal() {
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]).collect::<Vec<_>>(), [0..3, 5..6, 7..9]);
        assert_eq!(runs(&[]).count(), 0);
    }
}
