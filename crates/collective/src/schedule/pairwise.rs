//! Pairwise exchange.
//!
//! Every rank owns one block. For a reduction it receives that block from every other rank, in one
//! round, and reduces all inputs at once: nothing but the canonical tree is ever evaluated,
//! whatever the world, and an all-reduce moves the least possible bytes, `2(n−1)/n` of the
//! buffer. The price is `n−1` messages a round.
//!
//! A broadcast is a scatter from the root, then an exchange among the others; a reduce is the
//! reduction of an all-reduce, then a gather.

use super::{
    Area, Fold, Op, Problem, Recv, Round, Schedule, Send, block, blocks, peers_after, peers_before,
};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Schedule {
    let Problem { op, rank, world } = *problem;
    match op {
        Op::AllReduce => {
            let rounds = vec![reduce_own_block(rank, world, Area::Output), spread(rank, world)];
            Schedule::of_rounds(rounds, world, world - 1)
        }
        Op::ReduceScatter => {
            Schedule::of_rounds(vec![reduce_own_block(rank, world, Area::Output)], 1, world - 1)
        }
        Op::AllGather => Schedule::of_rounds(vec![all_gather(rank, world)], 1, 0),
        Op::Broadcast { root } => Schedule::of_rounds(broadcast(rank, world, root), world - 1, 0),
        Op::Reduce { root } => {
            let result = if rank == root { Area::Output } else { Area::Scratch(0) };
            let rounds =
                vec![reduce_own_block(rank, world, result), gather(rank, world, root, result)];
            Schedule::of_rounds(rounds, world, world - 1)
        }
        Op::Gather { root } => {
            let mut round = gather(rank, world, root, Area::Input);
            if rank == root {
                round.folds.push(Fold::copy(block(rank), Area::Input, Area::Output));
            }
            Schedule::of_rounds(vec![round], 1, 0)
        }
        Op::Scatter { root } => Schedule::of_rounds(vec![scatter(rank, world, root)], 1, 0),
        Op::AllToAll => Schedule::of_rounds(all_to_all(rank, world), 1, world),
    }
}

/// Send every rank the input's block it owns; reduce the block `rank` owns into `into`.
fn reduce_own_block(rank: usize, world: usize, into: Area) -> Round {
    let place = |peer: usize| match peer {
        peer if peer == rank => Area::Input,
        peer if peer < rank => Area::Scratch(peer as u32),
        peer => Area::Scratch(peer as u32 - 1),
    };
    let sends = peers_after(rank, world)
        .map(|to| Send { to, blocks: block(to), from: Area::Input })
        .collect();
    let recvs = peers_before(rank, world)
        .map(|from| Recv { from, blocks: block(rank), into: place(from) })
        .collect();
    let fold = Fold {
        inputs: (0..world).map(place).collect(),
        tree: Tree::canonical(world),
        blocks: block(rank),
        into,
        root: true,
    };
    Round { sends, recvs, folds: vec![fold] }
}

/// Send every rank the output's block that `rank` owns.
fn spread(rank: usize, world: usize) -> Round {
    let sends = peers_after(rank, world)
        .map(|to| Send { to, blocks: block(rank), from: Area::Output })
        .collect();
    let recvs = peers_before(rank, world)
        .map(|from| Recv { from, blocks: block(from), into: Area::Output })
        .collect();
    Round { sends, recvs, folds: Vec::new() }
}

fn all_gather(rank: usize, world: usize) -> Round {
    let mut round = spread(rank, world);
    round.sends.iter_mut().for_each(|send| send.from = Area::Input);
    round.folds.push(Fold::copy(block(rank), Area::Input, Area::Output));
    round
}

/// Only the others own a block: the root, which has everything, sends every byte once.
fn broadcast(rank: usize, world: usize, root: usize) -> Vec<Round> {
    let owned_by = |rank: usize| block((rank + world - root - 1) % world);
    if rank == root {
        let sends = peers_after(root, world)
            .map(|to| Send { to, blocks: owned_by(to), from: Area::Input })
            .collect();
        let folds = vec![Fold::copy(blocks(0..world - 1), Area::Input, Area::Output)];
        return vec![Round { sends, folds, ..Round::default() }, Round::default()];
    }
    let own = Recv { from: root, blocks: owned_by(rank), into: Area::Output };
    let sends = peers_after(rank, world)
        .filter(|to| *to != root)
        .map(|to| Send { to, blocks: owned_by(rank), from: Area::Output })
        .collect();
    let recvs = peers_before(rank, world)
        .filter(|from| *from != root)
        .map(|from| Recv { from, blocks: owned_by(from), into: Area::Output })
        .collect();
    vec![Round { recvs: vec![own], ..Round::default() }, Round { sends, recvs, ..Round::default() }]
}

/// The block that every rank owns goes from `from` to the root.
fn gather(rank: usize, world: usize, root: usize, from: Area) -> Round {
    if rank != root {
        let send = Send { to: root, blocks: block(rank), from };
        return Round { sends: vec![send], ..Round::default() };
    }
    let recvs = peers_before(rank, world)
        .map(|from| Recv { from, blocks: block(from), into: Area::Output })
        .collect();
    Round { recvs, ..Round::default() }
}

fn scatter(rank: usize, world: usize, root: usize) -> Round {
    if rank != root {
        let recv = Recv { from: root, blocks: block(rank), into: Area::Output };
        return Round { recvs: vec![recv], ..Round::default() };
    }
    let sends = peers_after(rank, world)
        .map(|to| Send { to, blocks: block(to), from: Area::Input })
        .collect();
    let folds = vec![Fold::copy(block(rank), Area::Input, Area::Output)];
    Round { sends, folds, ..Round::default() }
}

/// A call in place receives into the memory it sends from, and nothing proves that a send has
/// been received: what is sent is put aside first.
fn all_to_all(rank: usize, world: usize) -> Vec<Round> {
    let aside = [0..rank, rank + 1..world]
        .into_iter()
        .filter(|range| !range.is_empty())
        .map(|range| {
            let cell = range.start as u32;
            Fold::copy(blocks(range), Area::Input, Area::Scratch(cell))
        })
        .chain([Fold::copy(block(rank), Area::Input, Area::Output)])
        .collect();
    let sends = peers_after(rank, world)
        .map(|to| Send { to, blocks: block(to), from: Area::Scratch(to as u32) })
        .collect();
    let recvs = peers_before(rank, world)
        .map(|from| Recv { from, blocks: block(from), into: Area::Output })
        .collect();
    vec![Round { folds: aside, ..Round::default() }, Round { sends, recvs, folds: Vec::new() }]
}
