//! Recursive halving and doubling.
//!
//! In every step of the *halving* a rank pairs with the one at distance 1, 2, 4, …; the pair
//! splits the blocks that both still work on, each sends the half that the other keeps, and adds
//! what it receives. Because neighbours combine first, lower ranks on the left, the partial sums
//! are nodes of the canonical tree. The *doubling* runs the steps backwards to give every rank
//! all finished blocks. Bytes are the least possible, in `2 log₂ n` rounds of one message each.
//!
//! A world that is no power of two is cut into [teams](super::teams), whose sizes are powers of two.
//! Every team halves on its own, then the smallest passes its
//! sums to the next larger one, which adds them and passes them on, up to the largest; the
//! results come back the same way. A member of a smaller team keeps more blocks and exchanges
//! them with several members of the larger one, namely those with the same low bits.

use std::ops::Range;

use super::teams::{Timeline, is_upper, steps, teams};
use super::{Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block, blocks};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Option<Schedule> {
    let Problem { op, rank, world } = *problem;
    match op {
        Op::AllReduce => Some(all_reduce(rank, world)),
        Op::ReduceScatter if world.is_power_of_two() => Some(reduce_scatter(rank, world)),
        Op::AllGather if world.is_power_of_two() => Some(all_gather(rank, world)),
        _ => None,
    }
}

fn all_reduce(rank: usize, world: usize) -> Schedule {
    let teams = teams(world);
    let parts = teams[0].len();
    let number = teams.iter().position(|t| t.contains(&rank)).expect("teams cover the world");
    let team = &teams[number];
    let (smaller, larger) = (teams.get(number + 1), number.checked_sub(1).map(|n| &teams[n]));
    let mut work = Halving::new(rank, team, parts);
    let mut rounds = Timeline::default();

    for step in 0..steps(team) {
        let last = step + 1 == steps(team) && teams.len() == 1;
        work.halve(step, last.then_some(Area::Output), last, rounds.at(step));
    }
    if let Some(smaller) = smaller {
        work.add_from(smaller, larger.is_none(), rounds.at(steps(team)));
    }
    if let Some(larger) = larger {
        // The larger team is ready for them after its own steps, which are more.
        work.pass_to(larger, rounds.at(steps(larger)));
    }

    // The largest team has the results after its steps and, if there is another team, one more
    // round; they reach the next team in one round each.
    let finished = steps(&teams[0]) + usize::from(teams.len() > 1);
    let ready = finished + number;
    if let Some(larger) = larger {
        for (peer, range) in work.counterparts(larger) {
            let into = Area::Output;
            rounds.at(ready - 1).recvs.push(Recv { from: peer, blocks: blocks(range), into });
        }
    }
    if let Some(smaller) = smaller {
        let to = smaller.start + work.index % smaller.len();
        let from = Area::Output;
        rounds.at(ready).sends.push(Send { to, blocks: blocks(work.range.clone()), from });
    }
    let mut range = work.range.clone();
    for step in (0..steps(team)).rev() {
        let round = rounds.at(ready + steps(team) - 1 - step);
        range = double(work.partner(step), range, is_upper(work.index, step), round);
    }

    let last = (0..teams.len()).map(|number| finished + number + steps(&teams[number])).max();
    Schedule::of_rounds(rounds.padded(last.unwrap_or(0)), parts, parts)
}

/// Halving leaves block `reversed(rank)` with a rank, since it keeps neighbouring blocks
/// together; one more round brings every block home.
fn reduce_scatter(rank: usize, world: usize) -> Schedule {
    let team = 0..world;
    let mut work = Halving::new(rank, &team, world);
    let mut rounds = Timeline::default();
    let swap = reversed(rank, steps(&team));
    for step in 0..steps(&team) {
        let last = step + 1 == steps(&team);
        let home = last && swap == rank;
        work.halve(step, home.then_some(Area::Output), last, rounds.at(step));
    }
    if swap != rank {
        let round = rounds.at(steps(&team));
        round.sends.push(Send { to: swap, blocks: block(swap), from: work.held });
        round.recvs.push(Recv { from: swap, blocks: block(rank), into: Area::Output });
    }
    Schedule::of_rounds(rounds.padded(steps(&team) + 1), 1, world - 1)
}

/// Doubling alone, from distance 1 on, so that a rank always has a range of blocks.
fn all_gather(rank: usize, world: usize) -> Schedule {
    let team = 0..world;
    let mut rounds = Timeline::default();
    let mut range = rank..rank + 1;
    for step in 0..steps(&team) {
        range = double(rank ^ (1 << step), range, is_upper(rank, step), rounds.at(step));
    }
    rounds.at(0).sends[0].from = Area::Input;
    rounds.at(0).folds.push(Fold::copy(block(rank), Area::Input, Area::Output));
    Schedule::of_rounds(rounds.padded(steps(&team)), 1, 0)
}

/// The halving of one rank.
struct Halving {
    /// The first rank of the team.
    first: usize,
    /// The size of the team.
    team: usize,
    /// The rank's index in the team.
    index: usize,
    /// The blocks this rank still works on.
    range: Range<usize>,
    /// Where its partial sums of them are.
    held: Area,
    /// Scratch cells in use. None is used twice: what was sent from it may still be under way.
    cells: u32,
}

impl Halving {
    fn new(rank: usize, team: &Range<usize>, parts: usize) -> Halving {
        let (first, index) = (team.start, rank - team.start);
        Halving { first, team: team.len(), index, range: 0..parts, held: Area::Input, cells: 0 }
    }

    fn partner(&self, step: usize) -> usize {
        self.first + (self.index ^ (1 << step))
    }

    /// One step with the partner. The sums go where they arrived, unless told otherwise.
    fn halve(&mut self, step: usize, into: Option<Area>, root: bool, round: &mut Round) {
        let (keep, give) = halves(&self.range, self.index, step);
        let peer = self.partner(step);
        let from = self.place_of(&give);
        round.sends.push(Send { to: peer, blocks: blocks(give), from });
        let arrival = Area::Scratch(self.cells);
        self.cells += keep.len() as u32;
        round.recvs.push(Recv { from: peer, blocks: blocks(keep.clone()), into: arrival });
        let own = self.place_of(&keep);
        let inputs =
            if is_upper(self.index, step) { vec![arrival, own] } else { vec![own, arrival] };
        let into = into.unwrap_or(arrival);
        round.folds.push(sum(inputs, &keep, into, root));
        (self.range, self.held) = (keep, into);
    }

    /// Add the sums of the next smaller team, whose ranks are all higher.
    fn add_from(&mut self, smaller: &Range<usize>, last: bool, round: &mut Round) {
        let from = smaller.start + self.index % smaller.len();
        let arrival = Area::Scratch(self.cells);
        self.cells += self.range.len() as u32;
        round.recvs.push(Recv { from, blocks: blocks(self.range.clone()), into: arrival });
        let into = if last { Area::Output } else { arrival };
        round.folds.push(sum(vec![self.held, arrival], &self.range, into, last));
        self.held = into;
    }

    /// Send the sums to the next larger team.
    fn pass_to(&self, larger: &Range<usize>, round: &mut Round) {
        for (to, range) in self.counterparts(larger) {
            let from = self.place_of(&range);
            round.sends.push(Send { to, blocks: blocks(range), from });
        }
    }

    /// The members of the next larger team that keep parts of this rank's blocks, and which.
    fn counterparts(&self, larger: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        (self.index..larger.len())
            .step_by(self.team)
            .map(|index| {
                // The first steps of the larger team lead to this rank's blocks.
                let own_steps = self.team.ilog2() as usize;
                let range = (own_steps..steps(larger))
                    .fold(self.range.clone(), |range, step| halves(&range, index, step).0);
                (larger.start + index, range)
            })
            .collect()
    }

    /// Where the partial sums of some of the blocks are.
    fn place_of(&self, part: &Range<usize>) -> Area {
        self.held.skip((part.start - self.range.start) as u32)
    }
}

/// Exchange `range` with a peer that has the neighbouring range of the same length: the lower
/// one if this rank is the upper of the pair. Returns both ranges as one.
fn double(peer: usize, range: Range<usize>, upper: bool, round: &mut Round) -> Range<usize> {
    let len = range.len();
    let other = if upper { range.start - len..range.start } else { range.end..range.end + len };
    let place = Area::Output;
    round.sends.push(Send { to: peer, blocks: blocks(range.clone()), from: place });
    round.recvs.push(Recv { from: peer, blocks: blocks(other.clone()), into: place });
    range.start.min(other.start)..range.end.max(other.end)
}

fn sum(inputs: Vec<Area>, range: &Range<usize>, into: Area, root: bool) -> Fold {
    Fold { inputs, tree: Tree::pair(), blocks: blocks(range.clone()), into, root }
}

/// Which half of the blocks the member `index` of a team keeps in a step, and which it gives.
fn halves(range: &Range<usize>, index: usize, step: usize) -> (Range<usize>, Range<usize>) {
    let mid = range.start + range.len() / 2;
    let (lower, upper) = (range.start..mid, mid..range.end);
    if is_upper(index, step) { (upper, lower) } else { (lower, upper) }
}

/// The lowest `bits` bits of `index` in reverse order.
fn reversed(index: usize, bits: usize) -> usize {
    (0..bits).fold(0, |out, bit| out << 1 | (index >> bit & 1))
}
