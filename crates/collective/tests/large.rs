//! Groups of many ranks: what they cost, and that all of them hear what concerns them.

mod common;

use std::time::{Duration, Instant};

use common::{Kind, PATIENCE, on_all};
use unisono_collective::{Error, FormError, Group, Loss, Options, Rank, Reduction};

/// Sums that every rank can check by itself.
fn check_sums(group: &Group) {
    let (rank, world) = (group.rank() as i64, group.size() as i64);
    for count in [0, 1, 100, 5000] {
        let mut buffer = vec![rank; count];
        group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
        assert!(buffer.iter().all(|&sum| sum == world * (world - 1) / 2), "{count}");
    }
    let mut gathered = vec![-1; group.size()];
    group.all_gather(&[rank], &mut gathered).unwrap();
    assert!(gathered.into_iter().eq(0..world));
}

/// Open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn many_threads_form_a_group_and_reduce() {
    for world in [17, 64, 128] {
        let groups = Group::local(world, &Options::default()).unwrap();
        on_all(&groups, check_sums);
    }
}

#[test]
fn many_ranks_meet_over_sockets_and_reduce() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let groups = kind.start(40, &Options::default());
        on_all(&groups, check_sums);
        // Sub-groups of a few and of many, and of each other.
        on_all(&groups, |world| {
            let half = world.split(Some(world.rank() as u32 % 2), 0).unwrap().unwrap();
            check_sums(&half);
            let list: Vec<usize> = (0..half.size()).rev().collect();
            check_sums(&half.subgroup(&list).unwrap());
        });
    }
}

/// A rank needs descriptors for its neighbours and for those it exchanges data with, and not for all.
#[test]
fn descriptors_grow_slower_than_pairs() {
    let used = |world: usize| {
        let before = descriptors();
        let groups = Kind::Tcp.start(world, &Options::default());
        on_all(&groups, |group| {
            group.all_reduce(&mut [1f32; 1000], Reduction::Sum).unwrap();
        });
        (descriptors() - before) / world
    };
    let (few, many) = (used(8), used(80));
    assert!(many < 100, "{many} descriptors for each of 80 ranks");
    assert!(many < 5 * few, "{few} descriptors for each of 8 ranks, {many} for each of 80");
}

/// A rank fails, leaves or calls something else: all hear of it, and of nothing else.
#[test]
fn every_rank_hears_why_a_large_group_ends() {
    for kind in [Kind::Local, Kind::Tcp] {
        let world = 48;
        let ended = |groups: &[Group], is_it: &(dyn Fn(&Error) -> bool + Sync)| {
            on_all(groups, |group| {
                let deadline = Instant::now() + PATIENCE;
                let error = loop {
                    match group.failure() {
                        Some(error) => break error,
                        None => assert!(Instant::now() < deadline, "{} waits", group.rank()),
                    }
                    std::thread::sleep(Duration::from_millis(1));
                };
                assert!(is_it(&error), "rank {}: {error}", group.rank());
            });
        };
        let groups = kind.start(world, &Options::default());
        groups[world / 3].abort("no more");
        let aborted = |error: &Error| matches!(error, Error::Aborted { peer, reason } if *peer == Rank(16) && reason == "no more");
        ended(&groups, &aborted);

        let mut groups = kind.start(world, &Options::default());
        drop(groups.pop());
        let outcomes = on_all(&groups, |group| group.barrier().unwrap_err());
        let left = |error: &Error| {
            matches!(error, Error::PeerLost { peer: Rank(47), loss: Loss::Left, .. })
        };
        assert!(outcomes.iter().all(left), "{outcomes:?}");

        let groups = kind.start(world, &Options::default());
        let outcomes = on_all(&groups, |group| match group.rank() {
            31 => group.broadcast(&mut [0u8; 10], 31),
            _ => group.all_reduce(&mut [0f32; 10], Reduction::Sum),
        });
        for outcome in outcomes {
            let Err(Error::Mismatch { rank, peer, .. }) = outcome else { panic!("{outcome:?}") };
            assert!((rank == Rank(31)) != (peer == Rank(31)), "ranks {rank} and {peer}");
        }
    }
}

/// Messages travel between ranks that are not neighbours, while others leave.
#[test]
fn any_two_ranks_exchange_messages() {
    for kind in [Kind::Local, Kind::Tcp] {
        let groups = kind.start(24, &Options::default());
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let (rank, world) = (group.rank(), group.size());
                    for distance in [3, 7, 11] {
                        let to = (rank + distance) % world;
                        let from = (rank + world - distance) % world;
                        let work = group.submit_send_owned(vec![rank as i32; 10], to, 5).unwrap();
                        let mut buffer = [0i32; 10];
                        group.receive(&mut buffer, from, 5).unwrap();
                        assert_eq!(buffer, [from as i32; 10]);
                        work.wait().unwrap();
                    }
                });
            }
        });
    }
}

#[test]
fn those_that_never_came_to_a_large_group_are_named() {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(6);
    let groups = Kind::Tcp.start(30, &options);
    let all: Vec<usize> = (0..30).collect();
    let missing = [3, 9, 20];
    on_all(&groups, |world| {
        if missing.contains(&world.rank()) {
            return;
        }
        match world.subgroup(&all).err() {
            Some(FormError::Missing { missing: named, .. }) => assert_eq!(named, missing.map(Rank)),
            other => panic!("rank {}: {other:?}", world.rank()),
        }
    });
}
