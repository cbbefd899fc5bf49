//! Which rank waits for which, across the groups of an epoch.
//!
//! Ranks that make calls of two groups in opposite orders wait for each other for ever, and no group
//! sees more than that a rank has not arrived. So a thread that has waited in a call for a while
//! *states* it: in which call of which group it waits, which ranks have not arrived there, and which
//! groups it *holds*, that is, whose next call is its to make, because it made the last one or formed
//! the group. Statements travel over all groups that the thread holds. A *circle* is a list of
//! statements in which each rank waits for the next one, which holds the group of that call and has not
//! made the call, and the last waits for the first.
//!
//! A circle is a deadlock, however old its statements are and however slow other ranks are. Suppose that one
//! of its threads went on after its statement. Then the next rank made the call that this one waited
//! for. When that rank made its statement it had not, and the thread that was to make it waited; so
//! that thread had gone on before this one. The same holds of it and its successor, all around the
//! circle: each went on before the one before it, and so before itself. Hence none went on. The one
//! assumption is that calls of a group are not handed over from a thread that waits to another.

use serde::{Deserialize, Serialize};

use crate::call::{self, Call};
use crate::error::CircleWait;
use crate::excerpt::ending;
use unisono_net::rank::Rank;

/// Groups that a statement lists at most, those of the latest calls first. More: longer messages.
/// Fewer: a thread that has used more groups since is not found waiting.
const HELD: usize = 64;

/// Ranks of a group that errors list.
pub const LISTED: usize = 8;

/// Statements kept of each rank: threads that wait at once. More: a peer can fill more memory.
const THREADS: usize = 8;

/// Ranks of a circle that its error names at most: it must fit an abort.
pub const NAMED: usize = 6;

/// Bytes of a place that other ranks are told.
pub const PLACE: usize = 200;

/// A thread of a rank waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// Whose thread.
    pub rank: Rank,
    /// Which of its threads.
    pub thread: u64,
    /// Larger than in all earlier statements of the thread.
    pub order: u64,
    /// The group in which it waits.
    pub group: u64,
    /// The first few ranks of that group.
    pub members: Vec<Rank>,
    /// The call in which it waits.
    #[serde(with = "call::wire")]
    pub call: Call,
    /// From which line of the program.
    pub place: Option<String>,
    /// The ranks that have not arrived there, all of which it needs.
    pub missing: Vec<Rank>,
    /// The groups whose next call is the thread's to make, and the number of that call.
    pub holds: Vec<(u64, u32)>,
}

impl Statement {
    /// Cuts what is too long for a message.
    pub fn shortened(mut self) -> Statement {
        self.members.truncate(LISTED);
        self.holds.truncate(HELD);
        self.missing.truncate(HELD);
        self.place = self.place.map(|place| ending(&place, PLACE));
        self
    }

    /// Whether this thread waits for that one.
    fn waits_for(&self, other: &Statement) -> bool {
        self.missing.contains(&other.rank)
            && other.holds.iter().any(|(group, next)| {
                // Numbers wrap around.
                *group == self.group && self.call.number().wrapping_sub(*next) < u32::MAX / 2
            })
    }
}

/// The last statement of every thread of every rank.
#[derive(Default)]
pub struct Waits {
    statements: Vec<Statement>,
}

impl Waits {
    /// Takes a statement, in place of an earlier one of its thread. If it closes a circle, the ranks
    /// that wait for each other, from the lowest rank on, and the groups in which they do.
    pub fn state(&mut self, statement: Statement) -> Option<(Vec<CircleWait>, Vec<u64>)> {
        let (rank, thread) = (statement.rank, statement.thread);
        // Statements that travel through different groups may overtake each other.
        let is_outdated = |old: &Statement| {
            (old.rank, old.thread) == (rank, thread) && old.order > statement.order
        };
        if self.statements.iter().any(is_outdated) {
            return None;
        }
        self.statements.retain(|old| (old.rank, old.thread) != (rank, thread));
        while self.statements.iter().filter(|old| old.rank == rank).count() >= THREADS {
            let oldest = self.statements.iter().position(|old| old.rank == rank);
            self.statements.remove(oldest.expect("counted above"));
        }
        self.statements.push(statement);
        let circle = self.circle_to(self.statements.len() - 1)?;
        let groups = circle.iter().map(|wait| wait.group).collect();
        let first = (0..circle.len()).min_by_key(|i| circle[*i].rank).expect("not empty");
        let from_first = circle.iter().cycle().skip(first).take(circle.len().min(NAMED));
        let named = from_first.map(|wait| CircleWait {
            rank: wait.rank,
            call: wait.call,
            group: wait.group,
            members: wait.members.clone(),
            place: wait.place.clone(),
        });
        Some((named.collect(), groups))
    }

    /// The shortest circle through a statement: breadth first, over which waits for which.
    fn circle_to(&self, start: usize) -> Option<Vec<&Statement>> {
        let all = &self.statements;
        let mut reached_from = vec![None; all.len()];
        let mut frontier = vec![start];
        while !frontier.is_empty() {
            let mut next = Vec::new();
            for &at in &frontier {
                for to in (0..all.len()).filter(|to| all[at].waits_for(&all[*to])) {
                    if to == start {
                        let back = |at: &usize| reached_from[*at];
                        let mut path: Vec<_> = std::iter::successors(Some(at), back).collect();
                        path.reverse();
                        return Some(path.into_iter().map(|i| &all[i]).collect());
                    }
                    if reached_from[to].is_none() {
                        reached_from[to] = Some(at);
                        next.push(to);
                    }
                }
            }
            frontier = next;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Unit;
    use crate::{Algorithm, Dtype, Op, Reduction};

    fn call(number: u32) -> Call {
        Call {
            seq: 2 * number + 1,
            op: Op::AllReduce,
            barrier: false,
            dtype: Dtype::F32,
            unit: Unit::OWN,
            reduction: Reduction::Sum,
            count: 4,
            shape: 0,
            algorithm: Algorithm::Direct,
            column: 64,
        }
    }

    /// Rank `rank` waits in call `number` of `group` for `missing`, and is to make these calls next.
    fn waits(
        rank: usize,
        (group, number): (u64, u32),
        missing: &[usize],
        holds: &[(u64, u32)],
    ) -> Statement {
        Statement {
            rank: Rank(rank),
            thread: 7,
            order: 1,
            group,
            members: Rank::all(3),
            call: call(number),
            place: Some(format!("train.py:{rank}")),
            missing: missing.iter().copied().map(Rank).collect(),
            holds: holds.to_vec(),
        }
    }

    /// The ranks of the circle that these statements close, in whichever order they arrive.
    fn circle(statements: &[Statement]) -> Option<Vec<usize>> {
        let mut found = Vec::new();
        for shift in 0..statements.len() {
            let mut known = Waits::default();
            let mut order = statements.to_vec();
            order.rotate_left(shift);
            let closed = order.into_iter().filter_map(|s| known.state(s)).last();
            found.push(closed.map(|(waits, _)| waits.iter().map(|w| w.rank.0).collect()));
        }
        assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "the order matters: {found:?}");
        found.remove(0)
    }

    #[test]
    fn opposite_orders_of_two_groups_are_a_circle() {
        let zero = waits(0, (10, 3), &[1], &[(10, 4), (20, 5)]);
        let one = waits(1, (20, 5), &[0], &[(10, 3), (20, 6)]);
        assert_eq!(circle(&[zero.clone(), one.clone()]), Some(vec![0, 1]));
        let mut known = Waits::default();
        assert_eq!(known.state(one), None);
        let (named, groups) = known.state(zero).unwrap();
        assert_eq!((named[0].rank, named[0].call, named[1].call), (Rank(0), call(3), call(5)));
        assert_eq!(named[1].place.as_deref(), Some("train.py:1"));
        assert_eq!(groups.len(), 2);
    }

    #[test]
    fn three_ranks_in_three_groups_are_a_circle() {
        let all = [(1, 1), (2, 1), (3, 1)];
        let ring = [
            waits(0, (1, 1), &[1], &all),
            waits(1, (2, 1), &[2], &all),
            waits(2, (3, 1), &[0], &all),
        ];
        assert_eq!(circle(&ring), Some(vec![0, 1, 2]));
        assert_eq!(circle(&ring[..2]), None, "rank 2 may be merely slow");
    }

    #[test]
    fn a_rank_that_has_made_the_call_is_only_late() {
        // Rank 1 has submitted the call that rank 0 waits for, and waits elsewhere.
        let zero = waits(0, (10, 3), &[1], &[(10, 4), (20, 5)]);
        let one = waits(1, (20, 5), &[0], &[(10, 4), (20, 6)]);
        assert_eq!(circle(&[zero, one]), None);
    }

    #[test]
    fn a_rank_that_need_not_come_is_no_reason() {
        // Rank 0 waits for rank 2 alone, which is somewhere else.
        let zero = waits(0, (10, 3), &[2], &[(10, 4), (20, 5)]);
        let one = waits(1, (20, 5), &[0], &[(10, 3), (20, 6)]);
        assert_eq!(circle(&[zero, one]), None);
    }

    #[test]
    fn another_thread_that_makes_the_calls_is_none_that_waits() {
        // The thread of rank 1 that waits in group 20 does not make the calls of group 10.
        let zero = waits(0, (10, 3), &[1], &[(10, 4), (20, 5)]);
        let one = waits(1, (20, 5), &[0], &[(20, 6)]);
        assert_eq!(circle(&[zero, one]), None);
    }

    #[test]
    fn all_ranks_waiting_for_one_are_no_circle() {
        let all = [(10, 3), (20, 1)];
        let zero = waits(0, (10, 3), &[2], &all);
        let one = waits(1, (10, 3), &[2], &all);
        assert_eq!(circle(&[zero, one]), None);
    }

    /// Ranks that make the calls of several groups in one order, at whatever pace, are never said to
    /// wait for each other; if two calls of one rank are swapped and all come to a stop, they are.
    #[test]
    fn replayed_programs_are_judged_right() {
        let mut seed = 1u64;
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % n
        };
        let mut deadlocks = 0;
        for _ in 0..3000 {
            let world = 2 + below(3);
            let groups: Vec<Vec<usize>> = (0..3)
                .map(|_| (0..world).filter(|_| below(4) > 0).collect::<Vec<_>>())
                .filter(|members| members.len() > 1)
                .collect();
            if groups.is_empty() {
                continue;
            }
            let order: Vec<usize> = (0..6).map(|_| below(groups.len())).collect();
            let mut programs: Vec<Vec<usize>> = (0..world)
                .map(|r| order.iter().copied().filter(|g| groups[*g].contains(&r)).collect())
                .collect();
            let (victim, swaps) = (below(world), below(2) == 0);
            if swaps && programs[victim].len() > 1 {
                let at = below(programs[victim].len() - 1);
                programs[victim].swap(at, at + 1);
            }
            // What every rank has entered, and completed.
            let (mut entered, mut done) = (vec![0; world], vec![0; world]);
            let count = |rank: usize, group: usize, calls: usize| {
                programs[rank][..calls].iter().filter(|g| **g == group).count() as u32
            };
            let mut known = Waits::default();
            let mut found = false;
            loop {
                let goes_on = |rank: usize| {
                    if entered[rank] == done[rank] {
                        return entered[rank] < programs[rank].len();
                    }
                    let group = programs[rank][done[rank]];
                    let number = count(rank, group, entered[rank]);
                    groups[group].iter().all(|m| count(*m, group, entered[*m]) >= number)
                };
                let says = |rank: usize| {
                    let group = programs[rank][done[rank]];
                    let number = count(rank, group, entered[rank]);
                    let late = |m: &&usize| count(**m, group, entered[**m]) < number;
                    let missing: Vec<usize> = groups[group].iter().filter(late).copied().collect();
                    let held = (0..groups.len()).filter(|g| groups[*g].contains(&rank));
                    let next = |g: usize| (g as u64, count(rank, g, entered[rank]) + 1);
                    waits(
                        rank,
                        (group as u64, number),
                        &missing,
                        &held.map(next).collect::<Vec<_>>(),
                    )
                };
                let able: Vec<usize> = (0..world).filter(|rank| goes_on(*rank)).collect();
                // A rank that waits says so now and then; one that could go on may still be slow.
                let speaks = below(world);
                for rank in 0..world {
                    let waits = entered[rank] > done[rank];
                    if waits && (able.is_empty() || rank == speaks) {
                        found |= known.state(says(rank)).is_some();
                    }
                }
                assert!(swaps || !found, "a false alarm");
                if able.is_empty() {
                    let stuck = (0..world).any(|r| done[r] < programs[r].len());
                    assert!(stuck || !found, "a false alarm");
                    // Who waits for one that has made all its calls is in no circle.
                    let starved = (0..world).any(|r| done[r] == programs[r].len());
                    assert!(found || !stuck || starved, "a deadlock was not found");
                    deadlocks += usize::from(found);
                    break;
                }
                let rank = able[below(able.len())];
                if entered[rank] == done[rank] {
                    entered[rank] += 1;
                } else {
                    done[rank] += 1;
                }
            }
        }
        assert!(deadlocks > 50, "only {deadlocks} deadlocks");
    }
}
