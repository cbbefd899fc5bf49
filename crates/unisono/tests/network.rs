//! Ranks on several hosts: the same bits, the same errors, and the rate of the link.

mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::machine::now;
use common::protocol::{Call, Command, Failed, Failure, How, Reply, Settings};
use common::{World, serve_if_rank, this_program};
use unisono::{Dtype, Reduction, Transport};
use unisono_netlab::{Host, Lab, Link, Rate, lab_or_skip};

/// A rank in a process of its own; see [`common`].
#[test]
fn as_rank() {
    serve_if_rank();
}

const GIGABIT: Rate = Rate::gbit(1);

const SUM: Call = Call::AllReduce { dtype: Dtype::I64, count: 1000, reduction: Reduction::Sum };

/// `per_host` ranks on every host of a lab, neighbours together.
fn start(lab: &Lab, per_host: usize, address: fn(&Host) -> IpAddr) -> World {
    World::started(lab.hosts().len() * per_host, |rank| {
        let host = lab.host(rank / per_host);
        (this_program(|path| host.command(path)), address(host))
    })
}

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
    let mut world = start(&lab, 1, Host::address);
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
    assert_progress(&mut world, &settings);
    world.end();
}

#[test]
fn a_host_that_dies_is_lost() {
    let Some(lab) = lab_or_skip(2, Link::new(GIGABIT)) else { return };
    let mut world = start(&lab, 2, Host::address);
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
        let mut apart = start(&lab, 2, address);
        assert_eq!(digests(&mut apart), expected);
        apart.end();
    }
}

/// The share of the links' rate that an all-reduce uses: what must travel, over what could have.
fn share_of_rate(lab: &Lab, bytes: usize) -> f64 {
    let hosts = lab.hosts().len();
    let mut world = start(lab, 1, Host::address);
    world.form(&Settings::new(Transport::Auto));
    let mut slowest = vec![0f64; 8];
    for reply in world.all(&Command::Time { bytes, repeats: slowest.len() }) {
        let Reply::Timed(seconds) = reply else { panic!("{reply:?}") };
        slowest.iter_mut().zip(seconds).for_each(|(slowest, s)| *slowest = slowest.max(s));
    }
    world.end();
    // TCP takes the first few to find out the rate.
    let mut settled = slowest.split_off(3);
    settled.sort_by(f64::total_cmp);
    let must_travel = bytes as f64 * 2.0 * (hosts - 1) as f64 / hosts as f64;
    let limit = must_travel * 8.0 / GIGABIT.as_bits_per_second() as f64;
    limit / settled[settled.len() / 2]
}

#[test]
fn all_reduce_fills_the_links() {
    for hosts in [2, 3, 4] {
        let Some(lab) = lab_or_skip(hosts, Link::new(GIGABIT)) else { return };
        let share = share_of_rate(&lab, 16 << 20);
        println!("{hosts} hosts: {:.1} % of the links' rate", share * 100.0);
        // More would be a mistake in the measurement. A machine with other things to do makes
        // it less, which is no mistake.
        assert!((0.5..=1.0).contains(&share), "{hosts} hosts: {share}");
    }
}
