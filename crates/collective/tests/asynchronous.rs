//! Operations that are submitted.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

use common::{Kind, PATIENCE, on_all, outcome, worlds};
use unisono_collective::{Error, Group, Loss, Options, Rank, Reduction, Request, Work};

#[test]
fn submissions_end_in_the_order_they_were_made() {
    const SUBMISSIONS: usize = 60;
    for groups in worlds(3) {
        on_all(&groups, |group| {
            let (ended, ends) = mpsc::channel();
            let pending: Vec<_> = (0..SUBMISSIONS)
                .map(|i| {
                    // Large ones first would end last, if they could.
                    let count = if i % 3 == 0 { 100_000 } else { i };
                    let pending =
                        group.submit_all_reduce(vec![i as f32; count], Reduction::Sum).unwrap();
                    let ended = ended.clone();
                    pending.work().on_completion(move |outcome| {
                        assert_eq!(*outcome, Ok(()));
                        ended.send(i).unwrap();
                    });
                    pending
                })
                .collect();
            let order: Vec<usize> = (0..SUBMISSIONS)
                .map(|_| ends.recv_timeout(PATIENCE).expect("every submission ends"))
                .collect();
            assert_eq!(order, (0..SUBMISSIONS).collect::<Vec<_>>());
            for (i, pending) in pending.into_iter().enumerate() {
                let buffer = pending.wait().unwrap();
                assert!(buffer.iter().all(|&x| x == 3.0 * i as f32));
            }
        });
    }
}

#[test]
fn a_wait_with_a_deadline_gives_up_and_the_operation_goes_on() {
    for groups in worlds(2) {
        let gate = Barrier::new(2);
        on_all(&groups, |group| {
            if group.rank() == 1 {
                gate.wait();
            }
            let pending = group.submit_all_reduce(vec![1i32; 1000], Reduction::Sum).unwrap();
            if group.rank() == 0 {
                // The other rank has not come: nothing can have ended.
                assert_eq!(pending.work().wait_until(Instant::now()), None);
                let soon = Instant::now() + Duration::from_millis(20);
                assert_eq!(pending.work().wait_until(soon), None);
                assert!(Instant::now() >= soon);
                assert!(!pending.work().is_done());
                gate.wait();
            }
            assert_eq!(outcome(pending.work()), Ok(()));
            assert!(pending.work().is_done());
            assert_eq!(pending.work().wait_until(Instant::now()), Some(Ok(())));
            assert_eq!(pending.wait().unwrap(), vec![2; 1000]);
        });
    }
}

/// Whoever runs it, the waiter or the progress thread, every call ends once and in order.
#[test]
fn who_waits_for_the_next_call_may_run_it() {
    const CALLS: usize = 300;
    for groups in worlds(2) {
        let ran_here: usize = on_all(&groups, |group| {
            let mut ran_here = 0;
            for call in 0..CALLS {
                let first = group.submit_all_reduce(vec![call as i32; 9], Reduction::Sum).unwrap();
                let second = group.submit_all_reduce(vec![1i32; 3], Reduction::Sum).unwrap();
                // The second is not the next one, unless the first has ended.
                let was_over = first.work().is_done();
                if second.work().run_if_next() {
                    assert!(was_over || first.work().is_done());
                }
                if first.work().run_if_next() {
                    assert!(first.work().is_done());
                    ran_here += 1;
                }
                assert!(!second.work().is_done() || first.work().is_done());
                assert_eq!(first.wait().unwrap(), vec![2 * call as i32; 9]);
                assert_eq!(second.wait().unwrap(), vec![2; 3]);
            }
            ran_here
        })
        .into_iter()
        .sum();
        assert!(ran_here > 0, "the progress thread was quicker each of {CALLS} times");
    }
}

/// A rank leaves after its calls, also after one that the progress thread does not run.
#[test]
fn a_group_that_is_dropped_ends_the_call_that_a_waiter_runs() {
    for groups in (0..4).flat_map(|_| worlds(2)) {
        let has_come = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut groups = groups.into_iter();
            let (drops, comes_late) = (groups.next().unwrap(), groups.next().unwrap());
            let (has_come, (hand_over, take_over)) = (&has_come, std::sync::mpsc::channel());
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(150));
                has_come.store(true, Ordering::SeqCst);
                let mut buffer = [1i32; 9];
                comes_late.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                assert_eq!(buffer, [2; 9]);
            });
            scope.spawn(move || {
                let group = take_over.recv().unwrap();
                // For one of the two to begin with the call.
                std::thread::sleep(Duration::from_millis(20));
                drop(group);
                assert!(has_come.load(Ordering::SeqCst), "the rank has left during a call");
            });
            let pending = drops.submit_all_reduce(vec![1i32; 9], Reduction::Sum).unwrap();
            hand_over.send(drops).unwrap();
            pending.work().run_if_next();
            assert_eq!(pending.wait().unwrap(), vec![2; 9]);
        });
    }
}

#[test]
fn a_callback_after_the_end_runs_at_once_on_the_callers_thread() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let pending = group.submit_all_reduce(vec![1i32; 10], Reduction::Sum).unwrap();
            assert_eq!(outcome(pending.work()), Ok(()));
            for _ in 0..2 {
                let (told, tell) = mpsc::channel();
                pending.work().on_completion(move |outcome| {
                    told.send((outcome.clone(), std::thread::current().id())).unwrap();
                });
                assert_eq!(tell.try_recv(), Ok((Ok(()), std::thread::current().id())));
            }
        });
    }
}

#[test]
fn a_group_that_waits_for_a_late_rank_does_not_hold_up_another() {
    for groups in worlds(3) {
        let gate = Barrier::new(3);
        on_all(&groups, |group| {
            let first = group.split(Some(0), 0).unwrap().unwrap();
            let second = group.split(Some(0), 0).unwrap().unwrap();
            let late = group.rank() == 2;
            let submit = || first.submit_all_reduce(vec![1i32; 5000], Reduction::Sum).unwrap();
            let pending = (!late).then(submit);
            for round in 0..20 {
                let mut numbers = vec![round as i64; 100];
                second.all_reduce(&mut numbers, Reduction::Sum).unwrap();
                assert_eq!(numbers, vec![3 * round as i64; 100]);
            }
            if let Some(pending) = &pending {
                assert!(!pending.work().is_done(), "rank 2 has not come");
            }
            gate.wait();
            let pending = pending.unwrap_or_else(submit);
            assert_eq!(outcome(pending.work()), Ok(()));
            assert_eq!(pending.wait().unwrap(), vec![3; 5000]);
        });
    }
}

#[test]
fn a_blocking_call_waits_for_its_turn() {
    for groups in worlds(3) {
        on_all(&groups, |group| {
            for round in 0..10 {
                let pending: Vec<_> = (0..5)
                    .map(|_| group.submit_all_reduce(vec![1f32; 200_000], Reduction::Sum).unwrap())
                    .collect();
                let mut buffer = [round];
                group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                assert_eq!(buffer, [3 * round]);
                assert!(pending.iter().all(|p| p.work().is_done()), "an earlier call goes on");
                // Whatever was pending may be waited for in any order.
                for pending in pending.into_iter().rev() {
                    assert_eq!(pending.wait().unwrap()[199_999], 3.0);
                }
            }
        });
    }
}

/// Several threads of a rank may call, as long as the ranks agree on the order.
#[test]
fn a_call_that_returns_has_come_after_all_earlier_ones() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            for _ in 0..200 {
                let pending = group.submit_all_reduce(vec![1i32; 64], Reduction::Sum).unwrap();
                group.barrier().unwrap();
                assert!(pending.work().is_done());
            }
        });
    }
}

#[test]
fn dropping_a_pending_operation_waits_for_its_end() {
    for groups in worlds(2) {
        let arrived = AtomicBool::new(false);
        on_all(&groups, |group| {
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(30));
                arrived.store(true, Ordering::SeqCst);
            }
            drop(group.submit_all_reduce(vec![1u8; 100_000], Reduction::Max).unwrap());
            assert!(arrived.load(Ordering::SeqCst), "the buffer was given up while in use");
            group.barrier().unwrap();
        });
    }
}

#[test]
fn every_handle_of_a_failed_group_says_so() {
    for groups in worlds(2) {
        std::thread::scope(|scope| {
            let mut groups = groups.into_iter();
            let (stays, leaves) = (groups.next().unwrap(), groups.next().unwrap());
            let pending: Vec<_> = (0..5)
                .map(|_| stays.submit_all_reduce(vec![1i32; 1000], Reduction::Sum).unwrap())
                .collect();
            scope.spawn(move || drop(leaves));
            for pending in pending {
                let lost = outcome(pending.work()).unwrap_err();
                assert!(
                    matches!(lost, Error::PeerLost { peer: Rank(1), loss: Loss::Left, .. }),
                    "{lost}"
                );
                assert!(pending.wait().is_err());
            }
            assert!(stays.barrier().is_err());
        });
    }
}

/// What one rank sends after it has submitted may be what another waits for before it submits.
#[test]
fn an_unequal_all_to_all_is_submitted_without_waiting() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let me = group.rank();
            // From rank r to rank s, r + s + 1 elements.
            let lengths = [me + 1, me + 2];
            let submit = || {
                let total = lengths.iter().sum();
                let (input, output) = (vec![me as i32; total], vec![9; total]);
                let pending = group.submit_owned((input, output), |(input, output)| {
                    Request::all_to_all_unequal(input, &lengths, output, &lengths, None)
                });
                pending.unwrap()
            };
            let pending = if me == 0 {
                let pending = submit();
                group.send(&[1u8], 1, 0).unwrap();
                pending
            } else {
                group.receive(&mut [0u8], 0, 0).unwrap();
                submit()
            };
            let expected = [vec![0; me + 1], vec![1; me + 2]].concat();
            assert_eq!(pending.wait().unwrap().1, expected);
        });
    }
}

#[test]
fn ranks_that_disagree_about_lengths_are_all_told() {
    for groups in worlds(3) {
        on_all(&groups, |group| {
            let me = group.rank();
            let (sent, mut received) = ([2; 3], [2; 3]);
            if me == 1 {
                received[2] = 5;
            }
            let output = vec![0i32; received.iter().sum()];
            let pending = group.submit_owned((vec![0; 6], output), |(input, output)| {
                Request::all_to_all_unequal(input, &sent, output, &received, None)
            });
            let pending = pending.unwrap();
            let wrong =
                Error::LengthMismatch { from: Rank(2), to: Rank(1), tag: 0, sent: 8, expected: 20 };
            assert_eq!(pending.wait().map(drop), Err(wrong));
            group.barrier().unwrap();
        });
    }
}

/// Every operation, submitted at once, gives what it gives when it is waited for.
#[test]
fn every_operation_can_be_submitted() {
    const WORLD: usize = 4;
    for kind in Kind::ALL {
        let groups = kind.start(WORLD, &Options::default());
        on_all(&groups, |group| {
            let me = group.rank();
            let own = |from: usize| move |i: usize| (100 * from + i) as i64;
            let block = |from: usize| (0..3).map(own(from)).collect::<Vec<_>>();
            let whole = |from: usize| (0..3 * WORLD).map(own(from)).collect::<Vec<_>>();
            let sum = |index: usize| (0..WORLD).map(|rank| own(rank)(index)).sum::<i64>();
            let sums: Vec<i64> = (0..3).map(sum).collect();
            let own_sums: Vec<i64> = (3 * me..3 * me + 3).map(sum).collect();
            let gathered_blocks: Vec<i64> = (0..WORLD).flat_map(block).collect();
            let exchanged: Vec<i64> =
                (0..WORLD).flat_map(|from| (3 * me..3 * me + 3).map(own(from))).collect();
            let (root, nothing) = (2, vec![0; 3 * WORLD]);
            let at_root = |buffer: Vec<i64>| (me == root).then_some(buffer);
            let mut framed = vec![0; 3 * WORLD];
            framed[3 * me..3 * me + 3].copy_from_slice(&block(me));

            let all_reduce = group.submit_all_reduce(block(me), Reduction::Sum).unwrap();
            let into = group
                .submit_owned((block(me), vec![0; 3]), |(input, output)| {
                    Request::all_reduce_into(input, output, Reduction::Sum)
                })
                .unwrap();
            let scattered = group
                .submit_owned((whole(me), vec![0; 3]), |(input, output)| {
                    Request::reduce_scatter(input, output, Reduction::Sum)
                })
                .unwrap();
            let in_place = group
                .submit_owned(whole(me), |buffer| {
                    Request::reduce_scatter_in_place(buffer, Reduction::Sum)
                })
                .unwrap();
            let gathered = group
                .submit_owned((block(me), nothing.clone()), |(input, output)| {
                    Request::all_gather(input, output)
                })
                .unwrap();
            let gathered_in_place =
                group.submit_owned(framed, |buffer| Request::all_gather_in_place(buffer)).unwrap();
            let counts: Vec<usize> = (0..WORLD).collect();
            let unequal = block(me)[..me.min(3)].to_vec();
            let unequal = group
                .submit_owned((unequal, vec![0; 6]), |(input, output)| {
                    Request::all_gather_unequal(input, output, &counts)
                })
                .unwrap();
            let broadcast =
                group.submit_owned(block(me), |buffer| Request::broadcast(buffer, root)).unwrap();
            let reduced = group
                .submit_owned((block(me), at_root(vec![0; 3])), |(input, output)| {
                    Request::reduce(input, output.as_deref_mut(), Reduction::Sum, root)
                })
                .unwrap();
            let reduced_in_place = group
                .submit_owned(block(me), |buffer| {
                    Request::reduce_in_place(buffer, Reduction::Sum, root)
                })
                .unwrap();
            let to_root = group
                .submit_owned((block(me), at_root(nothing.clone())), |(input, output)| {
                    Request::gather(input, output.as_deref_mut(), root)
                })
                .unwrap();
            let from_root = group
                .submit_owned((at_root(whole(me)), vec![0; 3]), |(input, output)| {
                    Request::scatter(input.as_deref(), output, root)
                })
                .unwrap();
            let all_to_all = group
                .submit_owned((whole(me), nothing.clone()), |(input, output)| {
                    Request::all_to_all(input, output)
                })
                .unwrap();
            let replaced = group
                .submit_owned(whole(me), |buffer| Request::all_to_all_in_place(buffer))
                .unwrap();
            // What r sends to s is r + s elements long.
            let lengths: Vec<usize> = (0..WORLD).map(|peer| me + peer).collect();
            let total = lengths.iter().sum();
            let ragged = group
                .submit_owned((vec![me as i64; total], vec![9; total]), |(input, output)| {
                    Request::all_to_all_unequal(input, &lengths, output, &lengths, None)
                })
                .unwrap();
            let barrier = group.submit_barrier().unwrap();
            let (next, previous) = ((me + 1) % WORLD, (me + WORLD - 1) % WORLD);
            let received = group.submit_receive_owned(vec![0; 3], previous, 7).unwrap();
            let sent = group.submit_send_owned(block(me), next, 7).unwrap();

            assert_eq!(outcome(&barrier), Ok(()));
            assert_eq!(all_reduce.wait().unwrap(), sums);
            assert_eq!(into.wait().unwrap(), (block(me), sums.clone()));
            assert_eq!(scattered.wait().unwrap(), (whole(me), own_sums.clone()));
            assert_eq!(in_place.wait().unwrap()[3 * me..3 * me + 3], own_sums);
            assert_eq!(gathered.wait().unwrap(), (block(me), gathered_blocks.clone()));
            assert_eq!(gathered_in_place.wait().unwrap(), gathered_blocks);
            let expected: Vec<i64> =
                (0..WORLD).flat_map(|r| block(r)[..r.min(3)].to_vec()).collect();
            assert_eq!(unequal.wait().unwrap().1, expected);
            assert_eq!(broadcast.wait().unwrap(), block(root));
            assert_eq!(reduced.wait().unwrap(), (block(me), at_root(sums.clone())));
            let kept = if me == root { sums } else { block(me) };
            assert_eq!(reduced_in_place.wait().unwrap(), kept);
            assert_eq!(to_root.wait().unwrap(), (block(me), at_root(gathered_blocks)));
            let part: Vec<i64> = (3 * me..3 * me + 3).map(own(root)).collect();
            assert_eq!(from_root.wait().unwrap(), (at_root(whole(me)), part));
            assert_eq!(all_to_all.wait().unwrap(), (whole(me), exchanged.clone()));
            assert_eq!(replaced.wait().unwrap(), exchanged);
            let expected: Vec<i64> = (0..WORLD).flat_map(|r| vec![r as i64; me + r]).collect();
            assert_eq!(ragged.wait().unwrap().1, expected);
            assert_eq!(received.wait().unwrap(), block(previous));
            assert_eq!(sent.wait().unwrap(), block(me));
        });
    }
}

#[test]
fn a_submission_that_makes_no_sense_is_not_made() {
    let groups = Kind::Local.start(2, &Options::default());
    on_all(&groups, |group| {
        assert!(
            group
                .submit_owned(
                    (vec![1f32; 3], vec![0f32; 5]),
                    |(input, output)| Request::all_gather(input, output)
                )
                .is_err()
        );
        assert!(group.submit_owned(vec![1f32; 3], |buffer| Request::broadcast(buffer, 2)).is_err());
        assert!(group.submit_send_owned(vec![1f32; 3], group.rank(), 0).is_err());
        group.barrier().unwrap();
    });
}

/// Asks for a callback that panics: on the thread that ends the operation, or, if it has ended, here.
fn break_on_completion(work: &Work) {
    let ask = || work.on_completion(|_| panic!("a broken callback, on purpose"));
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask));
}

#[test]
fn a_callback_that_panics_harms_no_other_operation() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let pending = group.submit_all_reduce(vec![1i32; 300_000], Reduction::Sum).unwrap();
            let (told, tell) = mpsc::channel();
            break_on_completion(pending.work());
            pending.work().on_completion(move |outcome| told.send(outcome.clone()).unwrap());
            assert_eq!(pending.wait().unwrap()[0], 2);
            assert_eq!(tell.recv_timeout(PATIENCE), Ok(Ok(())));
            // The same thread ends this one.
            let pending = group.submit_all_reduce(vec![1i32; 10], Reduction::Sum).unwrap();
            assert_eq!(outcome(pending.work()), Ok(()));
            let peer = 1 - group.rank();
            let receiving = group.submit_receive_owned(vec![0u8], peer, 1).unwrap();
            break_on_completion(receiving.work());
            group.send(&[1u8], peer, 1).unwrap();
            assert_eq!(outcome(receiving.work()), Ok(()));
            let receiving = group.submit_receive_owned(vec![0u8], peer, 2).unwrap();
            group.send(&[2u8], peer, 2).unwrap();
            assert_eq!(outcome(receiving.work()), Ok(()));
        });
    }
}

/// The thread that waits for the call, and runs its callback, does not wait for the next call of the group as well.
#[test]
fn a_callback_that_drops_the_last_handle_does_not_hold_up_who_waits() {
    for _ in 0..10 {
        for groups in worlds(2) {
            let [first, second] = <[Group; 2]>::try_from(groups).ok().expect("two ranks");
            let (told, tell) = mpsc::channel();
            let other = std::thread::spawn(move || {
                second.all_reduce(&mut [1i32; 4], Reduction::Sum).unwrap();
                tell.recv_timeout(PATIENCE).expect("the wait for the first call comes back");
                second.all_reduce(&mut [1i32; 4], Reduction::Sum).unwrap();
            });
            let pending = first.submit_all_reduce(vec![1i32; 4], Reduction::Sum).unwrap();
            let next = first.submit_all_reduce(vec![1i32; 4], Reduction::Sum).unwrap();
            pending.work().on_completion(move |_| drop(first));
            assert_eq!(pending.wait().unwrap(), [2; 4]);
            told.send(()).unwrap();
            assert_eq!(next.wait().unwrap(), [2; 4]);
            other.join().unwrap();
        }
    }
}

/// The callback runs on a thread that the group waits for when it ends.
#[test]
fn a_callback_may_drop_the_last_handle_of_its_group() {
    for by_message in [false, true] {
        for transport in 0..worlds(2).count() {
            // What is complete before its callback is set calls it at once, on this thread, which still has a handle.
            let come = (0..50)
                .any(|_| callbacks_drop_handles(worlds(2).nth(transport).unwrap(), by_message));
            assert!(come, "no call was under way when its callback was set");
        }
    }
}

/// Lets callbacks of two ranks drop the last handles of their groups; whether both were called on another thread.
fn callbacks_drop_handles(groups: Vec<Group>, by_message: bool) -> bool {
    let own = std::thread::current().id();
    let (told, tell) = mpsc::channel();
    let handles: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let group = std::sync::Arc::new(group);
            let peer = 1 - group.rank();
            let data = vec![1u8; 1 << 20];
            let (work, pending) = if by_message {
                let sending = group.submit_send_owned(data.clone(), peer, 0).unwrap();
                let receiving = group.submit_receive_owned(data, peer, 0).unwrap();
                (receiving.work().clone(), vec![sending, receiving])
            } else {
                let pending = group.submit_all_reduce(data, Reduction::Max).unwrap();
                (pending.work().clone(), vec![pending])
            };
            let (last, told) = (group.clone(), told.clone());
            let (dropped, wait) = mpsc::channel::<()>();
            work.on_completion(move |_| {
                let is_other = std::thread::current().id() != own;
                if is_other {
                    wait.recv_timeout(PATIENCE).expect("the other handle is dropped");
                }
                drop(last);
                told.send(is_other).unwrap();
            });
            // Both ranks have submitted when the first handle goes.
            (group, dropped, pending)
        })
        .collect();
    let drop_handle = |(group, dropped, pending): (_, mpsc::Sender<()>, Vec<_>)| {
        drop(group);
        // Nobody waits for it if the callback came on this thread.
        let _ = dropped.send(());
        pending
    };
    // A rank whose callback waits may have bytes left to send to the other.
    let pending: Vec<_> = handles.into_iter().flat_map(drop_handle).collect();
    pending.iter().for_each(|pending| drop(outcome(pending.work())));
    let come = || tell.recv_timeout(PATIENCE).expect("the callback comes back");
    let [one, other] = [come(), come()];
    one && other
}
