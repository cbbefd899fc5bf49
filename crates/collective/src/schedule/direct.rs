//! Direct exchange, for little data.
//!
//! A rank that needs an input gets all of it, in one round, and reduces everything itself. That is
//! the least latency there is, at the price of `n−1` times the buffer in bytes.

use super::{
    Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block, peers_after, peers_before,
};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Option<Schedule> {
    let Problem { op, rank, world } = *problem;
    let (rounds, cells) = match op {
        Op::AllReduce => (all_reduce(rank, world), world),
        Op::Reduce { root } => (vec![reduce(rank, world, root)], world - 1),
        Op::Broadcast { root } => (vec![broadcast(rank, world, root)], 0),
        _ => return None,
    };
    Some(Schedule::of_rounds(rounds, 1, cells))
}

/// The result of a call in place overwrites the input, and nothing proves that the sends have
/// been received by then: they read a copy.
fn all_reduce(rank: usize, world: usize) -> Vec<Round> {
    let copy = Fold::copy(block(0), Area::Input, Area::Scratch(rank as u32));
    let sends = peers_after(rank, world)
        .map(|to| Send { to, blocks: block(0), from: Area::Scratch(rank as u32) })
        .collect();
    let recvs = peers_before(rank, world)
        .map(|from| Recv { from, blocks: block(0), into: Area::Scratch(from as u32) })
        .collect();
    let inputs = (0..world as u32).map(Area::Scratch).collect();
    vec![
        Round { folds: vec![copy], ..Round::default() },
        Round { sends, recvs, folds: vec![reduction(inputs)] },
    ]
}

fn reduce(rank: usize, world: usize, root: usize) -> Round {
    if rank != root {
        let send = Send { to: root, blocks: block(0), from: Area::Input };
        return Round { sends: vec![send], ..Round::default() };
    }
    let place = |peer: usize| match peer {
        peer if peer == root => Area::Input,
        peer if peer < root => Area::Scratch(peer as u32),
        peer => Area::Scratch(peer as u32 - 1),
    };
    let recvs = peers_before(rank, world)
        .map(|from| Recv { from, blocks: block(0), into: place(from) })
        .collect();
    let folds = vec![reduction((0..world).map(place).collect())];
    Round { recvs, folds, ..Round::default() }
}

fn broadcast(rank: usize, world: usize, root: usize) -> Round {
    if rank != root {
        let recv = Recv { from: root, blocks: block(0), into: Area::Output };
        return Round { recvs: vec![recv], ..Round::default() };
    }
    let sends = peers_after(rank, world)
        .map(|to| Send { to, blocks: block(0), from: Area::Input })
        .collect();
    let folds = vec![Fold::copy(block(0), Area::Input, Area::Output)];
    Round { sends, folds, ..Round::default() }
}

/// All inputs, in rank order, to the output.
fn reduction(inputs: Vec<Area>) -> Fold {
    let tree = Tree::canonical(inputs.len());
    Fold { inputs, tree, blocks: block(0), into: Area::Output, root: true }
}
