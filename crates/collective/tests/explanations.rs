//! What errors say to a user that looks for a mistake: whose call, from which line, in the caller's words.

mod common;

use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::{Kind, on_all};
use unisono_collective::{Algorithm, Error, Group, Loss, Options, Rank, Reduction, Request, Unit};

/// An all-reduce of four floats that says where it was made.
fn all_reduce(group: &Group, place: &str) -> Result<(), Error> {
    let mut buffer = [1f32; 4];
    let request = Request::all_reduce(&mut buffer, Reduction::Sum);
    group.run(request.with_place(Some(place.into()))).map(drop)
}

/// A broadcast of four floats, as bytes, that says where it was made.
fn broadcast(group: &Group, place: &str) -> Result<(), Error> {
    let mut buffer = [1u8; 16];
    let unit = Unit::named("float32").unwrap();
    let request = Request::broadcast(&mut buffer, 0).with_unit(unit);
    group.run(request.with_place(Some(place.into()))).map(drop)
}

#[test]
fn every_rank_is_told_both_lines_whichever_differs() {
    for kind in [Kind::Local, Kind::LocalHosts, Kind::Shm, Kind::Tcp] {
        for world in [2, 3] {
            for odd in 0..world {
                let groups = kind.start(world, &Options::default());
                let errors = on_all(&groups, |group| {
                    let rank = group.rank();
                    let first = if rank == odd {
                        broadcast(group, &format!("odd.py:{rank}"))
                    } else {
                        all_reduce(group, &format!("even.py:{rank}"))
                    };
                    // The root of a broadcast does not wait, and learns of it in its next call.
                    first.and_then(|()| group.barrier()).unwrap_err()
                });
                for (rank, error) in errors.iter().enumerate() {
                    let what = format!("{kind:?}, world {world}, odd {odd}, rank {rank}: {error}");
                    let text = error.to_string();
                    let Error::Mismatch { rank: one, peer: other, .. } = *error else {
                        panic!("{what}")
                    };
                    let odd = Rank(odd);
                    assert!(one == odd || other == odd, "{what}");
                    let even = if one == odd { other } else { one };
                    let own = format!(
                        "rank {odd} called broadcast #1 of 4 float32 with root 0 at odd.py:{odd}"
                    );
                    assert!(text.contains(&own), "{what}");
                    let theirs = format!("rank {even} called all_reduce #1 of 4 f32 by sum");
                    // A rank that did not wait may have come to its barrier.
                    let later = format!("rank {even} called barrier #2");
                    assert!(
                        text.contains(&format!("{theirs} at even.py:{even}"))
                            || text.contains(&later),
                        "{what}"
                    );
                }
            }
        }
    }
}

/// A rank whose program does not even look at its call tells its line all the same.
#[test]
fn a_rank_that_does_not_wait_tells_its_line() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let groups = kind.start(2, &Options::default());
        let (input, mut output) = ([1f32; 2], [0f32; 4]);
        let request = Request::all_gather(&input, &mut output);
        let request = request.with_place(Some("started.py:7".into()));
        // SAFETY: the buffers outlive the call.
        let started = unsafe { groups[1].submit(request) }.unwrap();
        let error = all_reduce(&groups[0], "waited.py:3").unwrap_err().to_string();
        assert!(error.contains("all_gather #1 of 2 f32 per rank at started.py:7"), "{error}");
        assert!(error.contains("waited.py:3"), "{error}");
        assert_eq!(started.wait().unwrap_err().to_string(), error);
    }
}

#[test]
fn calls_that_differ_in_what_their_texts_hide_show_it() {
    let groups = Kind::Tcp.start(2, &Options::default());
    let errors = on_all(&groups, |group| {
        let mut buffer = [1f32; 4];
        let algorithm = if group.rank() == 0 { Algorithm::Tree } else { Algorithm::Pairwise };
        let request = Request::all_reduce(&mut buffer, Reduction::Sum);
        group.run(request.with_algorithm(algorithm)).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("algorithm tree") && text.contains("algorithm pairwise"), "{text}");
    }
}

/// What a group measures when it forms is not the user's, and an exchange of lengths is no call of
/// its own.
#[test]
fn calls_are_counted_as_their_user_makes_them() {
    for kind in [Kind::Local, Kind::Tcp] {
        let mut groups = kind.start(3, &Options::default());
        on_all(&groups, |group| {
            let counts = [1, 1, 1];
            let mut output = [0f32; 3];
            group.all_to_all_unequal(&[1f32; 3], &counts, &mut output, &counts).unwrap();
            group.barrier().unwrap();
            let wrong = [1, 1, group.rank()];
            let input = vec![1f32; 2 + group.rank()];
            let refused = group.all_to_all_unequal(&input, &wrong, &mut output, &counts);
            assert!(matches!(refused, Err(Error::LengthMismatch { .. })), "{refused:?}");
        });
        drop(groups.pop());
        for error in on_all(&groups, |group| group.barrier().unwrap_err()) {
            assert!(error.to_string().contains("before barrier #4"), "{error}");
        }
    }
}

/// One rank exchanges the lengths of its blocks, the others do something else.
#[test]
fn an_exchange_of_lengths_that_others_do_not_make_is_named_after_its_call() {
    for kind in [Kind::Local, Kind::Tcp] {
        let groups = kind.start(2, &Options::default());
        let errors = on_all(&groups, |group| {
            if group.rank() == 0 {
                let counts = [1, 1];
                return group
                    .all_to_all_unequal(&[1f32; 2], &counts, &mut [0f32; 2], &counts)
                    .unwrap_err();
            }
            group.all_reduce(&mut [1f32; 100], Reduction::Max).unwrap_err()
        });
        for error in errors {
            let text = error.to_string();
            assert!(text.contains("rank 0 called all_to_all #1 with a length for each"), "{text}");
            assert!(text.contains("rank 1 called all_reduce #1 of 100 f32 by max"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_leaves_says_why() {
    for kind in [Kind::Local, Kind::Shm, Kind::Tcp] {
        let mut groups = kind.start(3, &Options::default());
        let failed = groups.pop().unwrap();
        failed.abort_handle().leave_because("ValueError: no such file\nand more");
        drop(failed);
        for error in on_all(&groups, |group| group.barrier().unwrap_err()) {
            let Error::PeerLost { peer: Rank(2), loss: Loss::Failed(reason), .. } = &error else {
                panic!("{kind:?}: {error:?}")
            };
            assert_eq!(reason, "ValueError: no such file");
            assert!(error.to_string().contains("see what rank 2 printed"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_panics_says_so() {
    let mut groups = Kind::Tcp.start(2, &Options::default());
    let group = groups.pop().unwrap();
    let panicked = std::thread::spawn(move || {
        let _group = group;
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    let error = groups[0].barrier().unwrap_err();
    assert!(
        matches!(&error, Error::PeerLost { loss: Loss::Failed(why), .. } if why.contains("panic"))
    );
}

/// Both ranks are in both groups and make their calls in opposite orders.
fn cross(groups: &[Group], started: bool) -> Vec<Error> {
    on_all(groups, |group| {
        let one = group.subgroup(&[0, 1]).unwrap();
        let another = group.subgroup(&[0, 1]).unwrap();
        if started {
            // Calls that were made before, and in the same order, change nothing.
            all_reduce(&one, "before").unwrap();
            all_reduce(&another, "before").unwrap();
        }
        let first = if group.rank() == 0 { &one } else { &another };
        let error = all_reduce(first, &format!("cross.py:{}", group.rank())).unwrap_err();
        // The other group has ended too, and the parent has not.
        let second = if group.rank() == 0 { &another } else { &one };
        assert!(matches!(second.barrier(), Err(Error::Deadlock { .. })));
        group.barrier().unwrap();
        error
    })
}

#[test]
fn opposite_orders_of_two_groups_are_told_to_both_ranks() {
    for kind in [Kind::Local, Kind::Shm, Kind::Tcp] {
        for started in [false, true] {
            let groups = kind.start(2, &Options::default());
            let errors = cross(&groups, started);
            assert_eq!(errors[0], errors[1], "{kind:?}");
            let Error::Deadlock { waits } = &errors[0] else { panic!("{kind:?}: {errors:?}") };
            let number = 1 + u32::from(started);
            for (rank, wait) in waits.iter().enumerate() {
                assert_eq!((wait.rank.0, wait.call.number()), (rank, number));
                assert_eq!(wait.members, [Rank(0), Rank(1)]);
                assert_eq!(wait.place.as_deref(), Some(&*format!("cross.py:{rank}")));
            }
        }
    }
}

/// Three ranks, each two of which share a group.
#[test]
fn three_ranks_that_wait_in_a_circle_are_told() {
    let groups = Kind::Tcp.start(3, &Options::default());
    let errors = on_all(&groups, |group| {
        let me = group.rank();
        let mut pairs = Vec::new();
        for pair in [[0, 1], [1, 2], [0, 2]] {
            let formed = pair.contains(&me).then(|| group.subgroup(&pair).unwrap());
            pairs.push(formed);
        }
        // Rank 0 waits for 1, 1 for 2, and 2 for 0.
        group.barrier().unwrap();
        pairs[me].as_ref().unwrap().barrier().unwrap_err()
    });
    for error in errors {
        let Error::Deadlock { waits } = &error else { panic!("{error:?}") };
        assert_eq!(waits.iter().map(|wait| wait.rank).collect::<Vec<_>>(), Rank::all(3));
    }
}

/// Calls that were submitted let their program go on, so that opposite orders are no mistake; and a
/// thread of its own may wait for ever without any other thread being stuck.
#[test]
fn ranks_that_are_merely_slow_are_left_alone() {
    for kind in [Kind::Shm, Kind::Tcp] {
        let groups = kind.start(2, &Options::default());
        let meeting = Arc::new(Barrier::new(2));
        // Long enough that every wait is told to the others, more than once.
        let slow = || std::thread::sleep(Duration::from_millis(700));
        on_all(&groups, |group| {
            let one = group.subgroup(&[0, 1]).unwrap();
            let another = group.subgroup(&[0, 1]).unwrap();
            let (first, second) =
                if group.rank() == 0 { (&one, &another) } else { (&another, &one) };
            // Submitted in opposite orders, with a pause in which both wait.
            let work = first.submit_barrier().unwrap();
            slow();
            second.barrier().unwrap();
            work.wait().unwrap();
            // Two threads, each with a group of its own; rank 0's second and rank 1's first are slow.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    another.barrier().unwrap();
                    if group.rank() == 0 {
                        slow();
                    }
                    another.barrier().unwrap();
                });
                if group.rank() == 1 {
                    slow();
                }
                one.barrier().unwrap();
            });
            meeting.wait();
            // In order, one far behind the other.
            if group.rank() == 1 {
                slow();
            }
            one.barrier().unwrap();
            another.barrier().unwrap();
        });
    }
}

/// A thread that waited for a call which has ended may be slow to go on.
#[test]
fn who_has_not_noticed_the_end_of_a_wait_does_not_wait_for_more() {
    let groups = Kind::Tcp.start(2, &Options::default());
    let meeting = Barrier::new(2);
    on_all(&groups, |group| {
        let one = group.subgroup(&[0, 1]).unwrap();
        let another = group.subgroup(&[0, 1]).unwrap();
        if group.rank() == 1 {
            meeting.wait();
            one.barrier().unwrap();
            another.barrier().unwrap();
            one.barrier().unwrap();
            return;
        }
        let first = one.submit_barrier().unwrap();
        let waits = first.waits_here();
        assert!(waits.is_some());
        meeting.wait();
        while !first.is_done() {
            std::thread::yield_now();
        }
        let second = one.submit_barrier().unwrap();
        std::thread::sleep(Duration::from_millis(700));
        drop(waits);
        another.barrier().unwrap();
        second.wait().unwrap();
    });
}
