//! All-reduce among hosts of several regions: as little as possible crosses between the regions.
//!
//! A *region* is a set of hosts whose links to each other are several times as fast as those to other hosts. In every region
//! the first few hosts are *gateways*, as many as the smallest region has hosts. The leaders of the hosts, and what the hosts
//! do in their windows, are those of the [hierarchy](super::hierarchical): leader `l` talks to leaders `l` only. A leader's
//! blocks are divided among the gateways: gateway `p` of every region has *share* `p`, and is the *counterpart* of the
//! gateways `p` of the other regions.
//!
//! 1. Every host folds its partials in its window. A host that is the only rank of its host has them already.
//! 2. The hosts of a region send each gateway their partials of its share. The gateway folds them into the partials of the
//!    region: the largest nodes of the canonical tree whose ranks are all in it.
//! 3. Counterparts exchange partials of regions. Between two regions that have one partial each, both get all of the other's
//!    and finish the tree, so that only one message's time passes between regions. Otherwise the share is divided
//!    among the regions: each finishes its part, for which the others send it their partials, and sends them the result.
//! 4. Gateways send the finished blocks to the other hosts of their region, which spread them in their windows.
//!
//! Between regions travels what a hierarchy of regions would send, whatever the number of hosts. That is least where the
//! ranks of a region are neighbours; where their numbers alternate every rank is a partial, and nothing is gained.
//!
//! Where no two ranks share a host there are no windows, and several segments are in flight.

use std::ops::Range;

use super::hierarchical::{Hierarchy, Partial, largest_nodes};
use super::{
    Area, Blocks, Fold, Op, Phase, Problem, Recv, Round, Rounds, Schedule, Send, Topology,
};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem, topology: &Topology) -> Option<Schedule> {
    if problem.op != Op::AllReduce {
        return None;
    }
    let plan = Regional::new(problem, topology);
    let mut rounds = vec![plan.reduce_in_region(), plan.exchange()];
    if plan.parts > 1 {
        rounds.push(plan.return_results());
    }
    rounds.push(plan.spread_in_region());
    let (parts, cells) = (plan.hosts.total, plan.cells());
    if topology.is_all_apart() {
        return Some(Schedule::of_rounds(rounds, parts as usize, cells));
    }
    let phases = vec![
        Phase::Window(plan.hosts.reduce_on_host()),
        Phase::Rounds(Rounds { rounds }),
        Phase::Window(plan.hosts.spread_on_host(|_| true)),
    ];
    Some(Schedule { phases, parts, cells: cells as u32, staging: parts })
}

/// One rank's view.
struct Regional<'a> {
    /// Of the hosts, with one list of blocks for each gateway.
    hosts: Hierarchy<'a>,
    region: usize,
    /// The place of this host in its region.
    place: usize,
    /// The number of gateways in every region.
    gateways: usize,
    /// Into how many blocks a share is cut: one for each region, or one for all.
    parts: usize,
    /// The largest nodes of the canonical tree whose ranks are in one region, in order.
    nodes: Vec<RegionNode>,
}

/// A canonical subtree whose ranks are all in one region.
struct RegionNode {
    region: usize,
    leaves: Range<usize>,
    /// Its number among those of its region.
    number: usize,
}

impl<'a> Regional<'a> {
    fn new(problem: &Problem, topology: &'a Topology) -> Regional<'a> {
        let mut leaves = Vec::new();
        largest_nodes(0..problem.world, &|a, b| topology.share_region(a, b), &mut leaves);
        let mut counts = vec![0; topology.regions()];
        let node = |leaves: Range<usize>| {
            let region = topology.region(topology.host(leaves.start));
            let number = counts[region];
            counts[region] += 1;
            RegionNode { region, leaves, number }
        };
        let nodes: Vec<RegionNode> = leaves.into_iter().map(node).collect();
        // Finishing everything in both regions sends no more than finishing half in each, if there is one partial of each.
        let at_once = topology.regions() == 2 && nodes.len() == 2;
        let parts = if at_once { 1 } else { topology.regions() };
        let (gateways, leaders) = (topology.smallest_region(), topology.smallest_host());
        let mut next = 0..;
        let mut share = |_| next.by_ref().take(parts).collect::<Vec<u32>>();
        let shares = (0..leaders).map(|_| (0..gateways).map(&mut share).collect()).collect();
        let hosts = Hierarchy::with_shares(problem, topology, shares);
        let region = topology.region(hosts.host);
        let place = topology.hosts_of(region).iter().position(|host| *host == hosts.host);
        let place = place.expect("a host is in its own region");
        Regional { hosts, region, place, gateways, parts, nodes }
    }

    /// The blocks of leaders `l` that gateways `p` handle.
    fn share(&self, l: usize, p: usize) -> Blocks {
        let start = (l * self.gateways + p) * self.parts;
        start as u32..(start + self.parts) as u32
    }

    /// Those of them that region `r` finishes.
    fn part(&self, l: usize, p: usize, r: usize) -> Blocks {
        let share = self.share(l, p);
        match self.parts {
            1 => share,
            _ => share.start + r as u32..share.start + r as u32 + 1,
        }
    }

    /// Leader `l` of the host in this place of a region.
    fn rank_at(&self, l: usize, region: usize, place: usize) -> usize {
        self.hosts.leader_of(l, self.hosts.topology.hosts_of(region)[place])
    }

    /// Which leader, and which gateway, this rank is.
    fn gateway(&self) -> Option<(usize, usize)> {
        let l = self.hosts.leader?;
        (self.place < self.gateways).then_some((l, self.place))
    }

    /// The other places among `count`, in an order that differs from place to place.
    fn other_places(&self, count: usize) -> impl Iterator<Item = usize> {
        let place = self.place;
        (1..=count).map(move |distance| (place + distance) % count).filter(move |p| *p != place)
    }

    /// The number of hosts in this region.
    fn neighbours(&self) -> usize {
        self.hosts.topology.hosts_of(self.region).len()
    }

    fn other_regions(&self) -> impl Iterator<Item = usize> {
        let (region, regions) = (self.region, self.hosts.topology.regions());
        (1..regions).map(move |distance| (region + distance) % regions)
    }

    fn nodes_of(&self, region: usize) -> impl Iterator<Item = &RegionNode> {
        self.nodes.iter().filter(move |node| node.region == region)
    }

    /// The partials of the hosts that make up a node, in order.
    fn partials_in(&self, node: &RegionNode) -> impl Iterator<Item = &Partial> {
        let leaves = node.leaves.clone();
        self.hosts.partials.iter().filter(move |p| leaves.contains(&p.leaves.start))
    }
}

/// Scratch: the partials of the own host as in a [`Hierarchy`], if it folds any, for each block of the leader; then, for each
/// block of the gateway's share, the partials of the other hosts of the region and the nodes of the region; then, for each
/// block that this region finishes, the nodes of the other regions.
impl Regional<'_> {
    /// Cells of the own host's partials on a host.
    fn own_cells(&self, host: usize) -> usize {
        match self.hosts.topology.members(host).len() {
            1 => 0,
            _ => self.hosts.partials_of(host) * self.gateways * self.parts,
        }
    }

    /// Where a partial of a host of this region is, from the first block of the share on.
    fn place_of_partial(&self, l: usize, p: usize, partial: &Partial) -> Area {
        let host = self.hosts.host;
        if partial.host == host {
            return self.hosts.place(l, partial, self.share(l, p).start);
        }
        let topology = self.hosts.topology;
        let others = self.hosts.partials.iter();
        let others =
            others.filter(|other| other.host != host && topology.region(other.host) == self.region);
        let number = others.take_while(|other| other.leaves.start < partial.leaves.start).count();
        Area::Scratch((self.own_cells(host) + number * self.parts) as u32)
    }

    /// Partials of the hosts of a region, but for those of one host.
    fn arriving(&self, region: usize, but: usize) -> usize {
        let topology = self.hosts.topology;
        let others = self.hosts.partials.iter();
        others.filter(|p| p.host != but && topology.region(p.host) == region).count()
    }

    /// Where a node of this region is, from the first block of the share on; the fold that puts it there, if one does. What
    /// is sent to other regions must not lie in the input, over which the result may be written.
    fn place_of_node(&self, l: usize, p: usize, node: &RegionNode) -> (Area, Option<Fold>) {
        let partials: Vec<&Partial> = self.partials_in(node).collect();
        let inputs: Vec<Area> =
            partials.iter().map(|partial| self.place_of_partial(l, p, partial)).collect();
        if let [place @ Area::Scratch(_)] = inputs[..] {
            return (place, None);
        }
        let host = self.hosts.host;
        let before = self.own_cells(host) + self.arriving(self.region, host) * self.parts;
        let into = Area::Scratch((before + node.number * self.parts) as u32);
        let covers: Vec<_> = partials.iter().map(|partial| partial.leaves.clone()).collect();
        let tree = Tree::over(node.leaves.clone(), &covers)
            .expect("partials of hosts are canonical subtrees that cover the node once");
        (into, Some(Fold { inputs, tree, blocks: self.share(l, p), into, root: false }))
    }

    /// Where a node of another region arrives.
    fn place_of_arriving(&self, node: &RegionNode) -> Area {
        let host = self.hosts.host;
        let own = self.nodes_of(self.region).count();
        let before = self.own_cells(host) + (self.arriving(self.region, host) + own) * self.parts;
        let others = self.nodes.iter().filter(|other| other.region != self.region);
        let number = others.take_while(|other| other.leaves.start < node.leaves.start).count();
        Area::Scratch((before + number) as u32)
    }

    /// The cells of the host that needs most.
    fn cells(&self) -> usize {
        let topology = self.hosts.topology;
        let needed = |host: usize| {
            let region = topology.region(host);
            let own = self.nodes_of(region).count();
            let in_region = (self.arriving(region, host) + own) * self.parts;
            self.own_cells(host) + in_region + self.nodes.len() - own
        };
        (0..topology.hosts()).map(needed).max().unwrap_or(0)
    }
}

/// What a leader does, nothing for the other ranks.
impl Regional<'_> {
    /// Every host sends the gateways of its region their shares of its partials; each folds the nodes of the region.
    fn reduce_in_region(&self) -> Round {
        let mut round = Round::default();
        let Some(l) = self.hosts.leader else { return round };
        for p in self.other_places(self.gateways) {
            let (to, blocks) = (self.rank_at(l, self.region, p), self.share(l, p));
            let own = self.hosts.partials.iter().filter(|p| p.host == self.hosts.host);
            round.sends.extend(own.map(|partial| {
                let from = self.place_of_partial(l, p, partial);
                Send { to, blocks: blocks.clone(), from }
            }));
        }
        let Some((_, p)) = self.gateway() else { return round };
        for place in self.other_places(self.neighbours()) {
            let host = self.hosts.topology.hosts_of(self.region)[place];
            let from = self.hosts.leader_of(l, host);
            let theirs = self.hosts.partials.iter().filter(|partial| partial.host == host);
            round.recvs.extend(theirs.map(|partial| {
                let into = self.place_of_partial(l, p, partial);
                Recv { from, blocks: self.share(l, p), into }
            }));
        }
        round
            .folds
            .extend(self.nodes_of(self.region).filter_map(|node| self.place_of_node(l, p, node).1));
        round
    }

    /// Gateways send their counterparts the nodes of their region, each the part that those finish, and finish their own.
    fn exchange(&self) -> Round {
        let mut round = Round::default();
        let Some((l, p)) = self.gateway() else { return round };
        let own = self.part(l, p, self.region);
        let first = self.share(l, p).start;
        for region in self.other_regions() {
            let (peer, blocks) = (self.rank_at(l, region, p), self.part(l, p, region));
            round.sends.extend(self.nodes_of(self.region).map(|node| {
                let from = self.place_of_node(l, p, node).0.skip(blocks.start - first);
                Send { to: peer, blocks: blocks.clone(), from }
            }));
            round.recvs.extend(self.nodes_of(region).map(|node| {
                let into = self.place_of_arriving(node);
                Recv { from: peer, blocks: own.clone(), into }
            }));
        }
        let place = |node: &RegionNode| match node.region == self.region {
            true => self.place_of_node(l, p, node).0.skip(own.start - first),
            false => self.place_of_arriving(node),
        };
        let covers: Vec<_> = self.nodes.iter().map(|node| node.leaves.clone()).collect();
        let tree = Tree::over(0..self.hosts.topology.world(), &covers)
            .expect("nodes of regions are canonical subtrees that cover every rank once");
        let inputs = self.nodes.iter().map(place).collect();
        round.folds.push(Fold { inputs, tree, blocks: own, into: Area::Output, root: true });
        round
    }

    /// Gateways send their counterparts what they have finished.
    fn return_results(&self) -> Round {
        let mut round = Round::default();
        let Some((l, p)) = self.gateway() else { return round };
        for region in self.other_regions() {
            let peer = self.rank_at(l, region, p);
            let (own, theirs) = (self.part(l, p, self.region), self.part(l, p, region));
            round.sends.push(Send { to: peer, blocks: own, from: Area::Output });
            round.recvs.push(Recv { from: peer, blocks: theirs, into: Area::Output });
        }
        round
    }

    /// Gateways send their share to the other hosts of the region.
    fn spread_in_region(&self) -> Round {
        let mut round = Round::default();
        let Some(l) = self.hosts.leader else { return round };
        if let Some((_, p)) = self.gateway() {
            round.sends.extend(self.other_places(self.neighbours()).map(|place| {
                let to = self.rank_at(l, self.region, place);
                Send { to, blocks: self.share(l, p), from: Area::Output }
            }));
        }
        round.recvs.extend(self.other_places(self.gateways).map(|p| {
            let from = self.rank_at(l, self.region, p);
            Recv { from, blocks: self.share(l, p), into: Area::Output }
        }));
        round
    }
}
