//! Reduction through shared memory.
//!
//! All ranks of a host can read each other's *staging* buffers. Every rank owns one block: it
//! stages all the others, waits until all ranks have, reduces its own block straight from its
//! private input and from the staging buffers of all others, and publishes the result in the
//! hole that it left when staging. When all have, each collects the blocks of the others.
//! So every byte is staged once, read once by the one rank that reduces it, and collected once,
//! and all ranks reduce at the same time, all inputs at once, in the canonical order.
//!
//! For little data the second wait costs more than it saves: in the *direct* variant every rank
//! stages everything and reduces everything for itself.

use super::{
    Area, Collect, Fold, Op, Phase, Problem, Schedule, Source, Stage, Window, WindowFold, block,
    blocks, peers_after,
};
use crate::tree::Tree;

pub(super) fn build(problem: &Problem) -> Schedule {
    let Problem { op, rank, world } = *problem;
    match op {
        Op::AllReduce => {
            let window = Window {
                folds: vec![fold_own_block(rank, world, Area::Output, Some(rank as u32))],
                collects: peers_after(rank, world).map(collect_block).collect(),
                publishes: true,
                ..stage_for_owners(rank, world)
            };
            schedule(window, world, 0)
        }
        Op::ReduceScatter => {
            let window = Window {
                folds: vec![fold_own_block(rank, world, Area::Output, None)],
                ..stage_for_owners(rank, world)
            };
            schedule(window, 1, 0)
        }
        Op::Reduce { root } => {
            let mut window = Window { publishes: true, ..stage_for_owners(rank, world) };
            if rank == root {
                window.folds.push(fold_own_block(rank, world, Area::Output, None));
                window.collects.extend(peers_after(rank, world).map(collect_block));
            } else {
                let publish = Some(rank as u32);
                window.folds.push(fold_own_block(rank, world, Area::Scratch(0), publish));
            }
            schedule(window, world, 1)
        }
        Op::AllGather => {
            let window = Window {
                stages: vec![Stage { blocks: block(rank), from: Area::Input, cell: 0 }],
                copies: vec![copy_own_block(rank)],
                collects: peers_after(rank, world).map(|rank| collect(rank, 0, rank)).collect(),
                cells: 1,
                ..Window::default()
            };
            schedule(window, 1, 0)
        }
        Op::Broadcast { root } => {
            let mut window = Window { cells: 1, ..Window::default() };
            if rank == root {
                window.stages.push(Stage { blocks: block(0), from: Area::Input, cell: 0 });
                window.copies.push(copy_own_block(0));
            } else {
                window.collects.push(collect(root, 0, 0));
            }
            schedule(window, 1, 0)
        }
        Op::Gather { root } => {
            let mut window = Window { cells: 1, ..Window::default() };
            if rank == root {
                window.copies.push(copy_own_block(rank));
                window.collects.extend(peers_after(rank, world).map(|peer| collect(peer, 0, peer)));
            } else {
                window.stages.push(Stage { blocks: block(rank), from: Area::Input, cell: 0 });
            }
            schedule(window, 1, 0)
        }
        Op::Scatter { root } => {
            let window = if rank == root {
                Window { copies: vec![copy_own_block(rank)], ..stage_for_owners(rank, world) }
            } else {
                let collects = vec![collect(root, rank, rank)];
                Window { collects, cells: world as u32, ..Window::default() }
            };
            schedule(window, 1, 0)
        }
        Op::AllToAll => {
            let window = Window {
                copies: vec![copy_own_block(rank)],
                collects: peers_after(rank, world).map(|peer| collect(peer, rank, peer)).collect(),
                ..stage_for_owners(rank, world)
            };
            schedule(window, 1, 0)
        }
    }
}

pub(super) fn build_direct(problem: &Problem) -> Option<Schedule> {
    let Problem { op, rank, world } = *problem;
    let (stages, folds) = match op {
        Op::AllReduce => (true, true),
        Op::Reduce { root } => (rank != root, rank == root),
        _ => return None,
    };
    let mut window = Window { cells: 1, ..Window::default() };
    if stages {
        window.stages.push(Stage { blocks: block(0), from: Area::Input, cell: 0 });
    }
    if folds {
        window.folds.push(WindowFold {
            inputs: inputs(rank, world, 0),
            tree: Tree::canonical(world),
            blocks: block(0),
            into: Area::Output,
            publish: None,
            root: true,
        });
    }
    Some(schedule(window, 1, 0))
}

/// Every rank owns the block of its number: stage all but the own one, block `b` in cell `b`.
fn stage_for_owners(rank: usize, world: usize) -> Window {
    let stages = [0..rank, rank + 1..world]
        .into_iter()
        .filter(|range| !range.is_empty())
        .map(|range| {
            let cell = range.start as u32;
            Stage { blocks: blocks(range), from: Area::Input, cell }
        })
        .collect();
    Window { stages, cells: world as u32, ..Window::default() }
}

fn fold_own_block(rank: usize, world: usize, into: Area, publish: Option<u32>) -> WindowFold {
    WindowFold {
        inputs: inputs(rank, world, rank as u32),
        tree: Tree::canonical(world),
        blocks: block(rank),
        into,
        publish,
        root: true,
    }
}

/// What all ranks put into, in rank order: `cell` of the staging buffers, or the own input.
fn inputs(own: usize, world: usize, cell: u32) -> Vec<Source> {
    let source = |rank| match rank == own {
        true => Source::Own(Area::Input),
        false => Source::Staged { rank, cell },
    };
    (0..world).map(source).collect()
}

/// The block that `owner` published.
fn collect_block(owner: usize) -> Collect {
    collect(owner, owner, owner)
}

fn collect(rank: usize, cell: usize, index: usize) -> Collect {
    Collect { rank, cell: cell as u32, blocks: block(index), into: Area::Output }
}

fn copy_own_block(index: usize) -> Fold {
    Fold::copy(block(index), Area::Input, Area::Output)
}

fn schedule(window: Window, parts: usize, cells: u32) -> Schedule {
    let staging = window.cells;
    Schedule { phases: vec![Phase::Window(window)], parts: parts as u32, cells, staging }
}
