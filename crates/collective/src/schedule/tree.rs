//! Binomial tree.
//!
//! Every node of the canonical tree over the ranks has a *holder*, one of its ranks: the root of
//! the operation if the node contains it, else the node's first rank. A node's holder also holds
//! one of its children; the other child's holder is the *giver*. A reduction walks up the tree:
//! the giver sends the value of its child, the holder combines both. A broadcast walks down. So
//! the reduction is canonical and ends at the root, whichever rank that is, after `⌈log₂ n⌉`
//! rounds; the nodes of one level of the tree are one round.
//!
//! Gather and scatter walk the same tree with the blocks of a node's ranks.

use std::ops::Range;

use super::{Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block, blocks};
use crate::tree::{Tree, split};

pub(super) fn build(problem: &Problem) -> Option<Schedule> {
    let Problem { op, rank, world } = *problem;
    let path = |root| Path::new(rank, world, root);
    let schedule = match op {
        Op::AllReduce => {
            let path = path(0);
            let mut rounds = path.reduce();
            rounds.extend(path.broadcast(Area::Output));
            Schedule::of_rounds(rounds, 1, 2)
        }
        Op::Reduce { root } => Schedule::of_rounds(path(root).reduce(), 1, 2),
        Op::Broadcast { root } => {
            let own = if rank == root { Area::Input } else { Area::Output };
            let mut rounds = path(root).broadcast(own);
            if rank == root {
                rounds[0].folds.push(Fold::copy(block(0), Area::Input, Area::Output));
            }
            Schedule::of_rounds(rounds, 1, 0)
        }
        Op::Gather { root } => Schedule::of_rounds(path(root).gather(), 1, split(0..world)),
        Op::Scatter { root } => Schedule::of_rounds(path(root).scatter(), 1, split(0..world)),
        _ => return None,
    };
    Some(schedule)
}

/// The nodes of the tree in which a rank takes part, from the leaves up.
struct Path {
    rank: usize,
    root: usize,
    /// The levels of the whole tree.
    levels: usize,
    meetings: Vec<Meeting>,
}

/// What a rank does at a node of the tree.
struct Meeting {
    /// Nodes of one level meet in the same round.
    level: usize,
    /// The other of the node's two ranks.
    peer: usize,
    /// Whether this rank is the giver.
    gives: bool,
    /// The giver's child.
    given: Range<usize>,
    /// Whether that is the right child.
    given_right: bool,
    /// Whether the node is the whole tree.
    last: bool,
}

impl Path {
    fn new(rank: usize, world: usize, root: usize) -> Path {
        let holder = |node: &Range<usize>| if node.contains(&root) { root } else { node.start };
        let mut meetings = Vec::new();
        let mut node = 0..world;
        while node.len() > 1 {
            let mid = split(node.clone());
            let (left, right) = (node.start..mid, mid..node.end);
            let given_right = !right.contains(&root);
            let given = if given_right { right.clone() } else { left.clone() };
            let (keeper, giver) = (holder(&node), holder(&given));
            if rank == keeper || rank == giver {
                meetings.push(Meeting {
                    level: ceil_log2(node.len()) - 1,
                    peer: if rank == giver { keeper } else { giver },
                    gives: rank == giver,
                    given,
                    given_right,
                    last: node.len() == world,
                });
            }
            node = if left.contains(&rank) { left } else { right };
        }
        meetings.reverse();
        Path { rank, root, levels: ceil_log2(world), meetings }
    }

    /// Up the tree; the result ends in the root's output.
    fn reduce(&self) -> Vec<Round> {
        let mut rounds = vec![Round::default(); self.levels];
        let (sum, arrival) = (Area::Scratch(0), Area::Scratch(1));
        let mut held = Area::Input;
        for meeting in &self.meetings {
            let round = &mut rounds[meeting.level];
            if meeting.gives {
                round.sends.push(Send { to: meeting.peer, blocks: block(0), from: held });
                continue;
            }
            let into = if meeting.last { Area::Output } else { sum };
            round.recvs.push(Recv { from: meeting.peer, blocks: block(0), into: arrival });
            round.folds.push(Fold {
                inputs: if meeting.given_right { vec![held, arrival] } else { vec![arrival, held] },
                tree: Tree::pair(),
                blocks: block(0),
                into,
                root: meeting.last,
            });
            held = into;
        }
        rounds
    }

    /// Down the tree, from `own` at every rank that has it.
    fn broadcast(&self, own: Area) -> Vec<Round> {
        let mut rounds = vec![Round::default(); self.levels];
        for meeting in self.meetings.iter().rev() {
            let round = &mut rounds[self.levels - 1 - meeting.level];
            if meeting.gives {
                let into = Area::Output;
                round.recvs.push(Recv { from: meeting.peer, blocks: block(0), into });
            } else {
                round.sends.push(Send { to: meeting.peer, blocks: block(0), from: own });
            }
        }
        rounds
    }

    /// Up the tree, a node's blocks at a time.
    fn gather(&self) -> Vec<Round> {
        let mut rounds = vec![Round::default(); self.levels];
        for meeting in &self.meetings {
            let round = &mut rounds[meeting.level];
            let range = blocks(meeting.given.clone());
            if meeting.gives {
                let from =
                    if meeting.given.len() == 1 { Area::Input } else { self.aside(&meeting.given) };
                round.sends.push(Send { to: meeting.peer, blocks: range, from });
            } else {
                let into =
                    if self.rank == self.root { Area::Output } else { self.aside(&meeting.given) };
                round.recvs.push(Recv { from: meeting.peer, blocks: range, into });
            }
        }
        if self.rank == self.root {
            rounds[0].folds.push(Fold::copy(block(self.rank), Area::Input, Area::Output));
        } else if self.meetings.len() > 1 {
            rounds[0].folds.push(Fold::copy(block(self.rank), Area::Input, Area::Scratch(0)));
        }
        rounds
    }

    /// Down the tree, a node's blocks at a time.
    fn scatter(&self) -> Vec<Round> {
        let mut rounds = vec![Round::default(); self.levels];
        for meeting in self.meetings.iter().rev() {
            let round = &mut rounds[self.levels - 1 - meeting.level];
            let range = blocks(meeting.given.clone());
            if !meeting.gives {
                let from =
                    if self.rank == self.root { Area::Input } else { self.aside(&meeting.given) };
                round.sends.push(Send { to: meeting.peer, blocks: range, from });
            } else if meeting.given.len() == 1 {
                round.recvs.push(Recv { from: meeting.peer, blocks: range, into: Area::Output });
            } else {
                let into = self.aside(&meeting.given);
                round.recvs.push(Recv { from: meeting.peer, blocks: range, into });
                round.folds.push(Fold::copy(block(self.rank), Area::Scratch(0), Area::Output));
            }
        }
        if self.rank == self.root {
            rounds[0].folds.push(Fold::copy(block(self.rank), Area::Input, Area::Output));
        }
        rounds
    }

    /// Where a rank that is not the root keeps the blocks of a node it holds or got: such a rank
    /// is the first of its nodes, so its own block is in cell 0.
    fn aside(&self, node: &Range<usize>) -> Area {
        Area::Scratch((node.start - self.rank) as u32)
    }
}

fn ceil_log2(n: usize) -> usize {
    n.next_power_of_two().trailing_zeros() as usize
}
