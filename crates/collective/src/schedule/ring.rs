//! Ring.
//!
//! Every rank sends only to the next one. Block `b` starts at rank `b + 1`, travels around the
//! ring while every rank it meets adds its own input, and is complete when it arrives at rank
//! `b`. An all-reduce sends the complete blocks around once more. Bytes are the least possible
//! and every link is used evenly, but the latency grows with the world, and every block is
//! summed in a different rotation of the rank order: repeatable, not canonical.

use super::{Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Option<Schedule> {
    let Problem { op, rank, world } = *problem;
    let ring = Ring { rank, world };
    let schedule = match op {
        Op::AllReduce => {
            // The output holds the partial sums: one scratch cell for what arrives is enough.
            let reduce = ring.reduce(|_| Area::Output, |_| Area::Scratch(0));
            let rounds = reduce.into_iter().chain(ring.pass_on(Area::Output)).collect();
            Schedule::of_rounds(rounds, world, 1)
        }
        Op::ReduceScatter => {
            // Partial sums are added where they arrived, each in a cell of its own, because it
            // may still be on its way to the next rank when another one arrives.
            let cell = |round: usize| Area::Scratch(round as u32);
            let last = world - 2;
            let sum = |round| if round == last { Area::Output } else { cell(round) };
            Schedule::of_rounds(ring.reduce(sum, cell), 1, world - 1)
        }
        Op::AllGather => {
            let mut rounds = ring.pass_on(Area::Input);
            rounds[0].folds.push(Fold::copy(block(rank), Area::Input, Area::Output));
            Schedule::of_rounds(rounds, 1, 0)
        }
        _ => return None,
    };
    Some(schedule)
}

#[derive(Clone, Copy)]
struct Ring {
    rank: usize,
    world: usize,
}

impl Ring {
    fn next(self) -> usize {
        (self.rank + 1) % self.world
    }

    fn previous(self) -> usize {
        self.behind(1)
    }

    /// The rank, or the block, `distance` places back on the ring.
    fn behind(self, distance: usize) -> usize {
        (self.rank + self.world - distance % self.world) % self.world
    }

    /// Send every block around once, adding the input; in round `k` a block arrives in
    /// `arrival(k)`, and its sum with the input goes to `sum(k)`.
    fn reduce(self, sum: impl Fn(usize) -> Area, arrival: impl Fn(usize) -> Area) -> Vec<Round> {
        let round = |k: usize| {
            let from = if k == 0 { Area::Input } else { sum(k - 1) };
            let arriving = block(self.behind(k + 2));
            Round {
                sends: vec![Send { to: self.next(), blocks: block(self.behind(k + 1)), from }],
                recvs: vec![Recv {
                    from: self.previous(),
                    blocks: arriving.clone(),
                    into: arrival(k),
                }],
                folds: vec![Fold {
                    inputs: vec![arrival(k), Area::Input],
                    tree: Tree::pair(),
                    blocks: arriving,
                    into: sum(k),
                    root: k == self.world - 2,
                }],
            }
        };
        (0..self.world - 1).map(round).collect()
    }

    /// Send block `rank`, which is at `own`, around once; the others arrive in the output.
    fn pass_on(self, own: Area) -> Vec<Round> {
        let round = |k: usize| {
            let from = if k == 0 { own } else { Area::Output };
            Round {
                sends: vec![Send { to: self.next(), blocks: block(self.behind(k)), from }],
                recvs: vec![Recv {
                    from: self.previous(),
                    blocks: block(self.behind(k + 1)),
                    into: Area::Output,
                }],
                folds: Vec::new(),
            }
        };
        (0..self.world - 1).map(round).collect()
    }
}
