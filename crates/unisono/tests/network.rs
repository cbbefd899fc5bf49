//! Ranks on several hosts: the same bits, the same errors.

mod common;

use std::time::Duration;

use common::machine::now;
use common::protocol::{Call, Command, Failed, Failure, How, Reply, Settings};
use common::{LONG, World, serve_if_rank};
use rustix::process::Signal;
use unisono::{Dtype, Reduction, Transport};
use unisono_netlab::{Host, Link, Rate, lab_or_skip};

/// A rank in a process of its own; see [`common`].
#[test]
fn as_rank() {
    serve_if_rank();
}

const GIGABIT: Rate = Rate::gbit(1);

const SUM: Call = Call::AllReduce { dtype: Dtype::I64, count: 1000, reduction: Reduction::Sum };

fn assert_progress(world: &mut World, settings: &Settings) {
    world.form(settings);
    for reply in world.all(&Command::Call(SUM)) {
        assert_eq!(reply, Reply::Done);
    }
}

fn assert_churning(world: &mut World) {
    for reply in world.all(&Command::Churn { seed: 3 }) {
        assert_eq!(reply, Reply::Churning);
    }
}

#[test]
fn a_host_that_is_cut_off_is_lost() {
    let Some(lab) = lab_or_skip(3, Link::new(GIGABIT)) else { return };
    let mut world = World::in_lab(&lab, 1, Host::address);
    let mut settings = Settings::new(Transport::Auto);
    settings.timeout = Duration::from_secs(1);
    world.form(&settings);
    assert_churning(&mut world);
    lab.host(2).cut().unwrap();
    let cut = now();
    for (rank, handle) in world.ranks.iter().enumerate() {
        let Failed { failure, at, .. } = handle.failed();
        println!("rank {rank} gave up {:?} after the cut", at.saturating_sub(cut));
        let Failure::Lost { peer, how: How::Silent, .. } = failure else {
            panic!("rank {rank} says {failure:?}");
        };
        // From behind the cut, it is the others who fell silent.
        assert!((peer == 2) != (rank == 2), "rank {rank} blames rank {peer}");
        assert!(at.saturating_sub(cut) < Duration::from_secs(5));
    }
    for rank in &mut world.ranks {
        rank.residue(&Command::Leave);
    }
    lab.host(2).heal().unwrap();
    // With the usual timeout: on a busy machine, the first packet after a cut may take a second.
    assert_progress(&mut world, &Settings::new(Transport::Auto));
    world.end();
}

#[test]
fn a_host_that_dies_is_lost() {
    let Some(lab) = lab_or_skip(2, Link::new(GIGABIT)) else { return };
    let mut world = World::in_lab(&lab, 2, Host::address);
    let settings = Settings::new(Transport::Auto);
    world.form(&settings);
    assert_churning(&mut world);
    let killed = now();
    assert_eq!(lab.host(1).kill().unwrap(), 2);
    world.ranks.truncate(2);
    for (rank, handle) in world.ranks.iter().enumerate() {
        let Failed { failure, at, .. } = handle.failed();
        println!("rank {rank} knew {:?} after the kill", at.saturating_sub(killed));
        let Failure::Lost { peer: 2 | 3, how: How::Closed, .. } = failure else {
            panic!("rank {rank} says {failure:?}");
        };
        assert!(at.saturating_sub(killed) < Duration::from_secs(2));
    }
    for rank in &mut world.ranks {
        rank.residue(&Command::Leave);
    }
    assert_progress(&mut world, &settings);
    world.end();
}

/// As with ranks of one host, but here nothing but the connection can tell.
#[test]
fn a_killed_rank_of_another_host_is_lost_at_once_though_its_forked_child_lives() {
    let Some(lab) = lab_or_skip(2, Link::new(GIGABIT)) else { return };
    let mut world = World::in_lab(&lab, 2, Host::address);
    let mut settings = Settings::new(Transport::Auto);
    settings.timeout = 100 * LONG;
    world.form(&settings);
    let child = world.ranks[3].fork();
    assert_churning(&mut world);
    world.ranks[3].signal(Signal::KILL);
    world.ranks[3].wait();
    world.ranks.truncate(3);
    for (rank, handle) in world.ranks.iter().enumerate() {
        let Failed { failure, .. } = handle.failed();
        let Failure::Lost { peer: 3, how: How::Closed, .. } = failure else {
            panic!("rank {rank} says {failure:?}");
        };
    }
    assert!(child.is_running(), "the child held nothing open");
    for rank in &mut world.ranks {
        rank.residue(&Command::Leave);
    }
    assert_progress(&mut world, &settings);
    drop(child);
    world.end();
}

/// What every rank of a world computes from the same inputs, for several types and counts.
fn digests(world: &mut World) -> Vec<Reply> {
    world.form(&Settings::new(Transport::Auto));
    let mut digests = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for count in [1, 3, 1021, 400_009] {
            let replies = world.all(&Command::Digest { dtype, count });
            assert!(matches!(replies[0], Reply::Digest(_)), "{replies:?}");
            assert!(replies.iter().all(|reply| *reply == replies[0]), "{replies:?}");
            digests.push(replies[0].clone());
        }
    }
    digests
}

#[test]
fn hosts_do_not_change_the_bits() {
    let Some(lab) = lab_or_skip(2, Link::new(GIGABIT)) else { return };
    let mut together = World::processes(4);
    let expected = digests(&mut together);
    together.end();
    for address in [Host::address, Host::address_v6] {
        let mut apart = World::in_lab(&lab, 2, address);
        assert_eq!(digests(&mut apart), expected);
        apart.end();
    }
}
