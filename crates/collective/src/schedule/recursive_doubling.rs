//! Recursive doubling, for little data.
//!
//! In every step a rank pairs with the one at distance 1, 2, 4, …; the two exchange all that they
//! have added so far, and both add it. Because neighbours combine first, lower ranks on the left,
//! the partial sums are nodes of the canonical tree, and after `log₂ n` rounds of one message each
//! every rank has the whole sum. That is the least latency where a message costs more than its
//! bytes, at the price of `log₂ n` times the buffer in bytes.
//!
//! In a world that is no power of two, every [team](super::teams) doubles on its own, then the
//! smallest passes its sum to the next larger one, which adds it and passes it on, up to the
//! largest. Its members have the result, and each sends it to one rank of the others at most.

use super::teams::{Timeline, is_upper, steps, teams};
use super::{Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Option<Schedule> {
    let Problem { op: Op::AllReduce, rank, world } = *problem else { return None };
    let teams = teams(world);
    let number = teams.iter().position(|t| t.contains(&rank)).expect("teams cover the world");
    let team = &teams[number];
    let (smaller, larger) = (teams.get(number + 1), number.checked_sub(1).map(|n| &teams[n]));
    let index = rank - team.start;
    let mut rounds = Timeline::default();

    // The result of a call in place overwrites the input, and nothing proves that the first message
    // has been received by then: it is a copy.
    let mut sum = Sum { held: Area::Scratch(0), cells: 1 };
    rounds.at(0).folds.push(Fold::copy(block(0), Area::Input, sum.held));

    for step in 0..steps(team) {
        let peer = team.start + (index ^ (1 << step));
        let round = rounds.at(1 + step);
        round.sends.push(Send { to: peer, blocks: block(0), from: sum.held });
        let last = step + 1 == steps(team) && teams.len() == 1;
        sum.add(round, peer, !is_upper(index, step), last);
    }
    if let Some(smaller) = smaller {
        // Its ranks are higher, so its sum comes after this team's own.
        let from = smaller.start + index % smaller.len();
        sum.add(rounds.at(1 + steps(team)), from, true, larger.is_none());
    }
    if let Some(larger) = larger {
        // The larger team is ready for it after its own steps, which are more.
        let round = rounds.at(1 + steps(larger));
        for to in (larger.start + index..larger.end).step_by(team.len()) {
            round.sends.push(Send { to, blocks: block(0), from: sum.held });
        }
    }

    // The largest team has the result; the others together are fewer than its members.
    let mut finished = 1 + steps(&teams[0]);
    if teams.len() > 1 {
        finished += 2;
        let outside = teams[0].len();
        let round = rounds.at(finished - 1);
        if rank >= outside {
            let from = rank - outside;
            round.recvs.push(Recv { from, blocks: block(0), into: Area::Output });
        } else if rank + outside < world {
            let to = rank + outside;
            round.sends.push(Send { to, blocks: block(0), from: Area::Output });
        }
    }
    let cells = 2 + steps(&teams[0]);
    Some(Schedule::of_rounds(rounds.padded(finished), 1, cells))
}

/// What a rank has added so far.
struct Sum {
    held: Area,
    /// Scratch cells in use. None is used twice: what was sent from it may still be under way.
    cells: u32,
}

impl Sum {
    /// Adds what comes from a peer, whose leaves follow this rank's or come before them.
    fn add(&mut self, round: &mut Round, from: usize, follows: bool, last: bool) {
        let arrival = Area::Scratch(self.cells);
        self.cells += 1;
        round.recvs.push(Recv { from, blocks: block(0), into: arrival });
        let inputs = if follows { vec![self.held, arrival] } else { vec![arrival, self.held] };
        let into = if last { Area::Output } else { arrival };
        round.folds.push(Fold { inputs, tree: Tree::pair(), blocks: block(0), into, root: last });
        self.held = into;
    }
}
