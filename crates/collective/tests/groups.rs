//! Sub-groups: by color and key, by list, of each other, and when an epoch ends.

mod common;

use std::time::{Duration, Instant};

use common::{Kind, Sample, Waits, on_all, reference};
use unisono_collective::cost::Costs;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{
    Epoch, Error, FormError, Group, InvalidCall, Loss, Options, Rank, Reduction, Transport,
};

const KINDS: [Kind; 4] = [Kind::Local, Kind::LocalHosts, Kind::Shm, Kind::Tcp];

fn worlds(world: usize) -> impl Iterator<Item = Vec<Group>> {
    KINDS.into_iter().map(move |kind| kind.start(world, &Options::default()))
}

/// The ranks that the members of `group` have in the world, in the order of the group.
fn members(group: &Group, world_rank: usize) -> Vec<i64> {
    let mut all = vec![-1; group.size()];
    group.all_gather(&[world_rank as i64], &mut all).unwrap();
    all
}

#[test]
fn a_split_joins_equal_colors_in_the_order_of_keys() {
    for groups in worlds(6) {
        on_all(&groups, |world| {
            let me = world.rank();
            let color = (me % 2) as u32;
            let same: Vec<i64> = (0..6).filter(|r| r % 2 == i64::from(color)).collect();
            let reversed: Vec<i64> = same.iter().rev().copied().collect();

            let group = world.split(Some(color), -(me as i64)).unwrap().unwrap();
            assert_eq!(members(&group, me), reversed);
            // Equal keys keep the order of the parent.
            let group = world.split(Some(color), 7).unwrap().unwrap();
            assert_eq!(members(&group, me), same);
            assert_eq!(group.rank(), me / 2);
            let extreme = if me < 2 { i64::MAX } else { i64::MIN };
            let group = world.split(Some(u32::MAX - color), extreme).unwrap().unwrap();
            assert_eq!(members(&group, me), [&same[1..], &same[..1]].concat());
        });
    }
}

#[test]
fn a_rank_without_a_color_joins_no_group() {
    for groups in worlds(4) {
        on_all(&groups, |world| {
            let me = world.rank();
            let group = world.split((me != 2).then_some(9), 0).unwrap();
            assert_eq!(group.is_none(), me == 2);
            if let Some(group) = group {
                assert_eq!(members(&group, me), [0, 1, 3]);
            }
            assert!(world.split(None, 0).unwrap().is_none());
            // A rank that sat out still agrees with the others on the next split.
            let group = world.split(Some(0), 0).unwrap().unwrap();
            assert_eq!(members(&group, me), [0, 1, 2, 3]);
        });
    }
}

#[test]
fn a_list_keeps_its_order_and_concerns_only_its_members() {
    for groups in worlds(5) {
        on_all(&groups, |world| {
            let me = world.rank();
            let list = [4, 0, 2];
            if list.contains(&me) {
                for _ in 0..3 {
                    let group = world.subgroup(&list).unwrap();
                    assert_eq!(members(&group, me), [4, 0, 2]);
                    assert_eq!(group.size(), 3);
                }
            }
            // The same members in another order are another group.
            if [0, 2].contains(&me) {
                let (forth, back) =
                    (world.subgroup(&[0, 2]).unwrap(), world.subgroup(&[2, 0]).unwrap());
                assert_eq!(members(&forth, me), [0, 2]);
                assert_eq!(members(&back, me), [2, 0]);
            }
            let alone = world.subgroup(&[me]).unwrap();
            assert_eq!(members(&alone, me), [me as i64]);
            assert_eq!(members(world, me), [0, 1, 2, 3, 4]);
        });
    }
}

#[test]
fn the_order_of_a_list_is_the_order_of_its_reductions() {
    for groups in worlds(5) {
        let inputs: Vec<Vec<f32>> = (0..5).map(|rank| f32::samples(3001, rank)).collect();
        on_all(&groups, |world| {
            let list = [3, 1, 4, 0, 2];
            let group = world.subgroup(&list).unwrap();
            let mut buffer = inputs[world.rank()].clone();
            group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
            let ordered: Vec<Vec<f32>> = list.iter().map(|&rank| inputs[rank].clone()).collect();
            f32::assert_same(&buffer, &reference(&ordered, Reduction::Sum), "a reordered group");
        });
    }
}

/// Members may try a different number of times: one that came too early, or too late, joins the others
/// when all come.
#[test]
fn a_sub_group_forms_after_attempts_that_failed() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let mut options = Options::default();
        options.timeout = Duration::from_secs(2);
        let groups = kind.start(3, &options);
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        let list = [2, 0];
        for early in [0, 2] {
            // Rank 0 waits for the other to connect, and rank 2 for an answer.
            match groups[early].subgroup(&list).err() {
                Some(FormError::Missing { missing, .. }) => {
                    assert_eq!(missing, [Rank(2 - early)]);
                }
                other => panic!("{other:?}"),
            }
            for _ in 0..2 {
                std::thread::scope(|scope| {
                    for rank in list {
                        let world = &groups[rank];
                        scope.spawn(move || {
                            let group = world.subgroup(&list).unwrap();
                            assert_eq!(members(&group, rank), [2, 0]);
                        });
                    }
                });
            }
        }
        // Threads that were joined may not have closed everything yet.
        let deadline = Instant::now() + Duration::from_secs(20);
        while open() > before {
            assert!(Instant::now() < deadline, "{} descriptors instead of {before}", open());
            std::thread::sleep(Duration::from_millis(1));
        }
        on_all(&groups, |world| world.barrier().unwrap());
    }
}

/// No rank is named as missing for having waited for one that is.
#[test]
fn only_ranks_that_are_missing_are_named() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let mut options = Options::default();
        options.timeout = Duration::from_secs(4);
        let groups = kind.start(6, &options);
        on_all(&groups, |world| {
            if [2, 4].contains(&world.rank()) {
                return;
            }
            match world.subgroup(&[0, 1, 2, 3, 4, 5]).err() {
                // What it saw itself: rank 4 alone, if rank 2 was to connect to it.
                Some(FormError::Missing { missing, .. }) => {
                    assert!(missing.iter().all(|rank| [2, 4].contains(&rank.0)), "{missing:?}");
                    assert!(missing.contains(&Rank(4)));
                }
                // What it was told by a rank that gave up.
                Some(FormError::Peer { peer: Rank(0 | 1 | 3), reason }) => {
                    assert!(reason.contains("[2, 4]") || reason.contains("[4]"), "{reason}");
                }
                other => panic!("rank {}: {other:?}", world.rank()),
            }
        });
    }
}

#[test]
fn wrong_lists_are_refused_and_the_group_goes_on() {
    for groups in worlds(3) {
        on_all(&groups, |world| {
            let me = world.rank();
            let refusal = |list: &[usize]| match world.subgroup(list) {
                Err(FormError::InvalidCall(refusal)) => refusal,
                Err(other) => panic!("{list:?}: {other}"),
                Ok(_) => panic!("{list:?} formed a group"),
            };
            assert_eq!(refusal(&[me, me]), InvalidCall::Members);
            assert_eq!(refusal(&[(me + 1) % 3]), InvalidCall::Members);
            assert_eq!(refusal(&[]), InvalidCall::Members);
            assert_eq!(refusal(&[me, 3]), InvalidCall::NoSuchRank { rank: 3, world: 3 });
            world.barrier().unwrap();
        });
    }
}

#[test]
fn overlapping_groups_work_at_once_from_several_threads() {
    for groups in worlds(4) {
        on_all(&groups, |world| {
            let me = world.rank();
            // Pairs of neighbours around the circle, in an order without a cycle of waits.
            let (next, previous) = ((me + 1) % 4, (me + 3) % 4);
            let pair = |a: usize, b: usize| world.subgroup(&[a, b]).unwrap();
            let (first, second) = if me % 2 == 0 {
                (pair(me, next), pair(previous, me))
            } else {
                (pair(previous, me), pair(me, next))
            };
            let work = |group: &Group, seed: i64| {
                for i in 0..50 {
                    let mut numbers = vec![seed + i; 1 + 40 * i as usize];
                    group.all_reduce(&mut numbers, Reduction::Sum).unwrap();
                    let sum = group.size() as i64 * (seed + i);
                    assert!(numbers.iter().all(|&n| n == sum));
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| work(&first, 1000));
                scope.spawn(|| work(&second, 1000));
                work(world, 1_000_000);
            });
        });
    }
}

#[test]
fn groups_of_groups_work_beside_their_parents() {
    for groups in worlds(8) {
        on_all(&groups, |world| {
            let me = world.rank();
            let half = world.split(Some(me as u32 / 4), me as i64).unwrap().unwrap();
            let quarter = half.split(Some(half.rank() as u32 % 2), 0).unwrap().unwrap();
            let base = me / 4 * 4 + me % 2;
            assert_eq!(members(&quarter, me), [base as i64, base as i64 + 2]);
            let twins = quarter.subgroup(&[1, 0]).unwrap();
            assert_eq!(members(&twins, me), [base as i64 + 2, base as i64]);
            let sum = |group: &Group| {
                let mut one = [1i32];
                group.all_reduce(&mut one, Reduction::Sum).unwrap();
                one[0]
            };
            assert_eq!([sum(&twins), sum(world), sum(&quarter), sum(&half)], [2, 8, 2, 4]);
        });
    }
}

#[test]
fn a_group_knows_which_of_its_members_share_a_host() {
    let groups = Group::local_on_hosts(&[0, 1, 0, 1, 2], &Options::default()).unwrap();
    on_all(&groups, |world| {
        let group = world.split(Some(0), -(world.rank() as i64)).unwrap().unwrap();
        let topology = group.topology();
        assert_eq!(topology.hosts(), 3);
        // Ranks 4, 3, 2, 1, 0 of the world.
        assert!(topology.together(1, 3) && topology.together(2, 4));
        assert!(!topology.together(0, 1) && !topology.together(1, 2));
    });
}

#[test]
fn groups_outlive_their_parents() {
    for kind in KINDS {
        let groups = kind.start(3, &Options::default());
        let children = on_all(&groups, |world| world.split(Some(0), 0).unwrap().unwrap());
        drop(groups);
        let grandchildren = on_all(&children, |group| group.subgroup(&[2, 1, 0]).unwrap());
        on_all(&children, |group| group.barrier().unwrap());
        drop(children);
        on_all(&grandchildren, |group| group.barrier().unwrap());
    }
}

#[test]
fn parents_outlive_their_groups() {
    for groups in worlds(3) {
        on_all(&groups, |world| {
            for _ in 0..5 {
                let group = world.split(Some(0), 0).unwrap().unwrap();
                group.barrier().unwrap();
                drop(group);
                world.barrier().unwrap();
            }
        });
    }
}

#[test]
fn who_leaves_is_missed_only_by_later_calls() {
    for mut groups in worlds(3) {
        on_all(&groups, |group| group.barrier().unwrap());
        drop(groups.pop());
        for error in on_all(&groups, |group| group.barrier().unwrap_err()) {
            assert!(
                matches!(error, Error::PeerLost { peer: Rank(2), loss: Loss::Left, .. }),
                "{error:?}"
            );
        }
    }
}

/// Calls that a leaving rank has completed complete on the others, too.
#[test]
fn leaving_right_after_a_call_does_not_take_it_away() {
    for kind in KINDS {
        for round in 0..20 {
            let groups = kind.start(3, &Options::default());
            std::thread::scope(|scope| {
                for group in groups {
                    scope.spawn(move || {
                        let mut buffer = vec![1i32; 1 + round * 1000];
                        group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                        assert!(buffer.iter().all(|&x| x == 3));
                    });
                }
            });
        }
    }
}

#[test]
fn nothing_works_after_its_epoch_ended() {
    for kind in KINDS {
        let groups = kind.start(3, &Options::default());
        let children = on_all(&groups, |world| world.split(Some(0), 0).unwrap().unwrap());
        let ended = Error::EpochEnded { epoch: 0 };
        let waits = [1, 2].map(|rank: usize| Waits::of(&groups[rank]));
        std::thread::scope(|scope| {
            // Rank 0 does not come: the others wait until the epoch ends.
            let waiting: Vec<_> = groups[1..]
                .iter()
                .map(|group| scope.spawn(|| group.all_reduce(&mut [1f32; 10], Reduction::Sum)))
                .collect();
            waits.iter().for_each(Waits::begin);
            groups.iter().for_each(|group| group.epoch().end());
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), Err(ended.clone()));
            }
        });
        for group in groups.iter().chain(&children) {
            assert_eq!(group.failure(), Some(ended.clone()));
            assert_eq!(group.barrier(), Err(ended.clone()));
            assert_eq!(group.send(&[1u8], (group.rank() + 1) % 3, 0), Err(ended.clone()));
            let work = group.submit_all_reduce(vec![1f32; 10], Reduction::Sum).unwrap();
            assert_eq!(work.wait(), Err(ended.clone()));
            assert_eq!(group.split(Some(0), 0).err(), Some(FormError::from(ended.clone())));
            let list = [group.rank()];
            assert_eq!(group.subgroup(&list).err(), Some(FormError::from(ended.clone())));
            assert!(group.epoch().has_ended());
        }
    }
}

/// The end of an epoch on one rank ends the groups that rank is not in, too.
#[test]
fn the_end_of_an_epoch_reaches_every_group_of_every_rank() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let groups = kind.start(4, &Options::default());
        let halves = on_all(&groups, |world| {
            world.split(Some(world.rank() as u32 % 2), 0).unwrap().unwrap()
        });
        // Every rank has an epoch of its own, as processes do.
        groups[0].epoch().end();
        let ended = Error::EpochEnded { epoch: 0 };
        for (world, half) in groups.iter().zip(&halves) {
            let deadline = Instant::now() + Duration::from_secs(20);
            while half.failure().is_none() {
                assert!(Instant::now() < deadline, "rank {} was not told", world.rank());
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(half.barrier(), Err(ended.clone()));
            assert_eq!(world.barrier(), Err(ended.clone()));
            assert!(world.epoch().has_ended());
        }
    }
}

/// Groups that come and go leave neither threads nor descriptors behind, also if a caller has kept a
/// handle.
#[test]
fn a_group_that_was_left_holds_nothing() {
    let entries = |of: &str| std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count();
    let held = || (entries("task"), entries("fd"));
    for kind in KINDS {
        let groups = kind.start(2, &Options::default());
        let before = held();
        let mut handles = Vec::new();
        for _ in 0..20 {
            let children = on_all(&groups, |world| world.subgroup(&[1, 0]).unwrap());
            on_all(&children, |group| group.barrier().unwrap());
            handles.extend(children.iter().map(Group::abort_handle));
        }
        // A thread that was joined is still listed until the kernel has buried it.
        let deadline = Instant::now() + Duration::from_secs(20);
        while held().0 > before.0 || held().1 > before.1 {
            assert!(Instant::now() < deadline, "{kind:?}: {:?} instead of {before:?}", held());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Nothing but its sockets costs a local world descriptors: two for every pair and direction.
#[test]
fn a_large_local_world_fits_the_usual_limit_of_descriptors() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let groups = Group::local(20, &Options::default()).unwrap();
    let used = open() - before;
    assert!(used <= 2 * 20 * 20 + 4 * 20, "{used}");
    on_all(&groups, |group| group.barrier().unwrap());
}

#[test]
fn no_group_forms_in_an_epoch_that_has_ended() {
    let epoch = Epoch::new(7);
    epoch.end();
    let group = Group::world(LocalHub::new(1), epoch, 0, 1, Options::default());
    assert_eq!(group.err(), Some(FormError::EpochEnded { epoch: 7 }));
}

#[test]
fn a_world_of_one_does_everything_by_itself() {
    for groups in worlds(1) {
        let group = &groups[0];
        let data = f32::samples(1000, 1);
        let same = |output: &[f32]| f32::assert_same(output, &data, "alone");

        let mut buffer = data.clone();
        for reduction in [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Product] {
            group.all_reduce(&mut buffer, reduction).unwrap();
            same(&buffer);
            group.reduce_scatter_in_place(&mut buffer, reduction).unwrap();
            same(&buffer);
        }
        group.broadcast(&mut buffer, 0).unwrap();
        group.all_gather_in_place(&mut buffer).unwrap();
        group.all_to_all_in_place(&mut buffer).unwrap();
        same(&buffer);
        type Run<'a> = &'a dyn Fn(&mut [f32]) -> Result<(), Error>;
        let outputs: [Run<'_>; 8] = [
            &|output| group.all_reduce_into(&data, output, Reduction::Sum),
            &|output| group.reduce_scatter(&data, output, Reduction::Sum),
            &|output| group.all_gather(&data, output),
            &|output| group.all_gather_unequal(&data, output, &[1000]),
            &|output| group.reduce(&data, Some(output), Reduction::Sum, 0),
            &|output| group.gather(&data, Some(output), 0),
            &|output| group.scatter(Some(&data), output, 0),
            &|output| group.all_to_all_unequal(&data, &[1000], output, &[1000]),
        ];
        for run in outputs {
            let mut output = vec![0.0; 1000];
            run(&mut output).unwrap();
            same(&output);
        }
        group.barrier().unwrap();
        let pending = group.submit_all_reduce(data.clone(), Reduction::Mean).unwrap();
        same(&pending.wait().unwrap());
        assert_eq!(members(&group.split(Some(3), 5).unwrap().unwrap(), 0), [0]);
        assert_eq!(members(&group.subgroup(&[0]).unwrap(), 0), [0]);
        assert!(group.split(None, 0).unwrap().is_none());
        assert_eq!(
            group.send(&[1u8], 0, 0),
            Err(Error::InvalidCall(InvalidCall::ToSelf { rank: 0 }))
        );
    }
}

/// Forms a world of threads in which every rank knows these costs of an earlier one.
fn world_again(known: &[Option<Costs>], transport: Transport) -> Vec<Group> {
    let (hub, epoch, world) = (LocalHub::new(known.len()), Epoch::new(1), known.len());
    let mut options = Options::default();
    options.transport = transport;
    std::thread::scope(|scope| {
        let form = |(rank, costs): (usize, &Option<Costs>)| {
            let (hub, epoch, options, costs) =
                (hub.clone(), epoch.clone(), options.clone(), *costs);
            scope.spawn(move || Group::world_again(hub, epoch, rank, world, options, costs))
        };
        let ranks: Vec<_> = known.iter().enumerate().map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

#[test]
fn a_world_that_forms_again_goes_by_the_costs_of_rank_0() {
    let known = Group::local(2, &Options::default()).unwrap()[0].costs();
    // Those of another rank do not count, even if it is a better guess.
    let other = Costs { fold: 1.0, ..known };
    let group = world_again(&[Some(known), None, Some(other)], Transport::Auto);
    for of in &group {
        assert_eq!(of.costs(), group[0].costs());
        assert_eq!(of.costs().near, known.near, "nothing was measured");
    }
    on_all(&group, |group| {
        let mut sum = [1i32];
        group.all_reduce(&mut sum, Reduction::Sum).unwrap();
        assert_eq!(sum, [3]);
    });
}

#[test]
fn costs_that_will_not_do_are_measured() {
    let known = Group::local(2, &Options::default()).unwrap()[0].costs();
    // Rank 0 is new; or was alone; or the others were on its host, and are not any more.
    let cases = [
        (None, Transport::Auto),
        (Some(Costs::default()), Transport::Auto),
        (Some(known), Transport::Tcp),
    ];
    for (first, transport) in cases {
        let group = world_again(&[first, Some(known)], transport);
        let costs = group[0].costs();
        assert_eq!(costs, group[1].costs());
        match transport {
            Transport::Tcp => assert_ne!(costs.far, known.far),
            _ => assert!(costs.near != known.near && costs.near != Costs::default().near),
        }
    }
}
