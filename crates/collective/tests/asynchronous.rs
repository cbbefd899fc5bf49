//! Operations that are submitted, and messages with tags.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

use common::{Kind, on_all};
use unisono_collective::{Error, Group, InvalidCall, Loss, Options, Reduction, Work};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(20);

const KINDS: [Kind; 3] = [Kind::Local, Kind::Shm, Kind::Tcp];

fn worlds(world: usize) -> impl Iterator<Item = Vec<Group>> {
    KINDS.into_iter().map(move |kind| kind.start(world, &Options::default()))
}

/// The outcome of an operation that must not hang.
fn outcome(work: &Work) -> Result<(), Error> {
    work.wait_until(Instant::now() + PATIENCE).expect("the operation ends in time")
}

fn send(group: &Group, buffer: &[u8], to: usize, tag: u32) -> Result<Work, Error> {
    // SAFETY: every caller keeps the buffer until the work is done; a send only reads it.
    unsafe { group.submit_send(buffer.as_ptr().cast_mut(), buffer.len(), to, tag) }
}

fn receive(group: &Group, buffer: &mut [u8], from: usize, tag: u32) -> Result<Work, Error> {
    // SAFETY: every caller keeps the buffer until the work is done.
    unsafe { group.submit_receive(buffer.as_mut_ptr(), buffer.len(), from, tag) }
}

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
                    matches!(lost, Error::PeerLost { peer: 1, loss: Loss::Left, .. }),
                    "{lost}"
                );
                assert!(pending.wait().is_err());
            }
            assert!(stays.barrier().is_err());
        });
    }
}

#[test]
fn tags_are_matched_in_any_order() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let peer = 1 - group.rank();
            let sent: Vec<Vec<u8>> =
                (0..50u8).map(|tag| vec![tag; 10 + usize::from(tag)]).collect();
            let sends: Vec<Work> =
                (0..50).map(|tag| send(group, &sent[tag], peer, tag as u32).unwrap()).collect();
            for tag in (0..50usize).rev() {
                let mut buffer = vec![255; 10 + tag];
                let work = receive(group, &mut buffer, peer, tag as u32).unwrap();
                assert_eq!(outcome(&work), Ok(()));
                assert_eq!(buffer, sent[tag]);
            }
            for work in &sends {
                assert_eq!(outcome(work), Ok(()));
            }
        });
    }
}

#[test]
fn messages_of_one_tag_keep_their_order() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let messages: Vec<[u8; 4]> = (0..500u32).map(u32::to_le_bytes).collect();
            if group.rank() == 0 {
                let sends: Vec<Work> =
                    messages.iter().map(|m| send(group, m, 1, 9).unwrap()).collect();
                sends.iter().for_each(|work| assert_eq!(outcome(work), Ok(())));
            } else {
                let mut buffers = vec![[0; 4]; messages.len()];
                let receives: Vec<Work> =
                    buffers.iter_mut().map(|b| receive(group, b, 0, 9).unwrap()).collect();
                receives.iter().for_each(|work| assert_eq!(outcome(work), Ok(())));
                assert_eq!(buffers, messages);
            }
        });
    }
}

#[test]
fn sends_that_cross_do_not_wait_for_each_other() {
    for groups in worlds(3) {
        on_all(&groups, |group| {
            // Blocking sends, larger than any socket buffer, to everybody at once.
            let data = vec![group.rank() as u8; 8 << 20];
            let peers = || (0..3).filter(|&p| p != group.rank());
            let sends: Vec<Work> = peers().map(|p| send(group, &data, p, 1).unwrap()).collect();
            for peer in peers() {
                let mut buffer = vec![255; data.len()];
                assert_eq!(outcome(&receive(group, &mut buffer, peer, 1).unwrap()), Ok(()));
                assert!(buffer.iter().all(|&x| x == peer as u8));
            }
            sends.iter().for_each(|work| assert_eq!(outcome(work), Ok(())));
        });
    }
}

#[test]
fn messages_may_be_empty_or_large() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let peer = 1 - group.rank();
            let empty = send(group, &[], peer, 3).unwrap();
            assert_eq!(outcome(&receive(group, &mut [], peer, 3).unwrap()), Ok(()));
            assert_eq!(outcome(&empty), Ok(()));
            if group.rank() == 0 {
                let data: Vec<i32> = (0..16 << 20).collect();
                group.send(&data, 1, 4).unwrap();
            } else {
                let mut data = vec![0i32; 16 << 20];
                group.receive(&mut data, 0, 4).unwrap();
                assert!(data.iter().enumerate().all(|(i, &x)| x == i as i32));
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn small_messages_pass_while_a_large_one_waits() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            if group.rank() == 0 {
                let large = vec![7; 4 << 20];
                // Nobody receives it before the small ones are through.
                let waiting = send(group, &large, 1, 0).unwrap();
                for i in 0..100 {
                    group.send(&[i], 1, 1).unwrap();
                }
                assert!(!waiting.is_done());
                group.send(&[0u8; 1], 1, 2).unwrap();
                assert_eq!(outcome(&waiting), Ok(()));
            } else {
                for i in 0..100 {
                    let mut buffer = [0];
                    group.receive(&mut buffer, 0, 1).unwrap();
                    assert_eq!(buffer, [i]);
                }
                group.receive(&mut [0u8; 1], 0, 2).unwrap();
                let mut large = vec![0u8; 4 << 20];
                group.receive(&mut large, 0, 0).unwrap();
                assert!(large.iter().all(|&x| x == 7));
            }
        });
    }
}

#[test]
fn messages_and_collectives_run_side_by_side() {
    for groups in worlds(3) {
        on_all(&groups, |group| {
            let (next, previous) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
            let data = vec![group.rank() as u8; 2 << 20];
            let mut buffer = vec![255; data.len()];
            let sending = send(group, &data, next, 0).unwrap();
            let receiving = receive(group, &mut buffer, previous, 0).unwrap();
            for _ in 0..20 {
                let mut numbers = vec![1i32; 10_000];
                group.all_reduce(&mut numbers, Reduction::Sum).unwrap();
                assert_eq!(numbers, vec![3; 10_000]);
            }
            assert_eq!(outcome(&sending), Ok(()));
            assert_eq!(outcome(&receiving), Ok(()));
            assert!(buffer.iter().all(|&x| x == previous as u8));
            group.barrier().unwrap();
        });
    }
}

#[test]
fn wrong_peers_are_refused_and_the_group_goes_on() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let me = group.rank();
            let to_self = Err(Error::InvalidCall(InvalidCall::ToSelf { rank: me }));
            assert_eq!(group.send(&[1u8], me, 0), to_self);
            assert_eq!(group.receive(&mut [1u8], me, 0), to_self);
            let nobody = Err(Error::InvalidCall(InvalidCall::NoSuchRank { rank: 2, world: 2 }));
            assert_eq!(group.send(&[1u8], 2, 0), nobody);
            assert_eq!(group.receive(&mut [1u8], 2, 0), nobody);
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_receive_of_another_length_fails_on_both_sides() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            let (sent, mut buffer) = ([1u8; 10], [0u8; 12]);
            let work = if group.rank() == 0 {
                send(group, &sent, 1, 5).unwrap()
            } else {
                receive(group, &mut buffer, 0, 5).unwrap()
            };
            let expected = Error::LengthMismatch { from: 0, to: 1, tag: 5, sent: 10, expected: 12 };
            assert_eq!(outcome(&work), Err(expected));
        });
    }
}

#[test]
fn a_message_whose_sender_left_is_not_waited_for() {
    for groups in worlds(2) {
        let mut groups = groups.into_iter();
        let (leaves, stays) = (groups.next().unwrap(), groups.next().unwrap());
        let data = [1; 10];
        let sending = send(&leaves, &data, 1, 5).unwrap();
        // The announcement arrives before whatever is sent later.
        std::thread::scope(|scope| {
            scope.spawn(|| leaves.send(&[2u8], 1, 6).unwrap());
            stays.receive(&mut [0u8], 0, 6).unwrap();
        });
        drop(leaves);
        let left = |outcome| matches!(outcome, Err(Error::PeerLost { peer, loss: Loss::Left, .. }) if peer < 2);
        assert!(left(outcome(&sending)));
        let mut buffer = [0; 10];
        assert!(left(outcome(&receive(&stays, &mut buffer, 0, 5).unwrap())));
        assert!(left(outcome(&send(&stays, &data, 0, 5).unwrap())));
    }
}

/// Receives of anybody's message get every message once, and learn whose it is.
#[test]
fn a_receive_of_anybody_learns_who_sent() {
    for groups in worlds(3) {
        on_all(&groups, |group| {
            let me = group.rank();
            if me > 0 {
                group.send(&[me as i32; 5], 0, 4).unwrap();
                group.send(&[10 * me as i32; 2], 0, 6).unwrap();
                return;
            }
            let mut senders: Vec<usize> = (1..3)
                .map(|_| {
                    let mut buffer = [0i32; 5];
                    let sender = group.receive_any(&mut buffer, 4).unwrap();
                    assert_eq!(buffer, [sender as i32; 5]);
                    sender
                })
                .collect();
            senders.sort_unstable();
            assert_eq!(senders, [1, 2]);
            // A named receive is not disturbed by one of anybody that comes later.
            let mut named = [0i32; 2];
            group.receive(&mut named, 2, 6).unwrap();
            let other = group.submit_receive_any_owned(vec![0i32; 2], 6).unwrap();
            let work = other.work().clone();
            assert_eq!((named, other.wait().unwrap()), ([20, 20], vec![10, 10]));
            assert_eq!(work.source(), Some(1));
        });
    }
}

/// The older of two receives that fit gets the message, whether it names the sender or not.
#[test]
fn receives_of_anybody_and_of_a_rank_keep_their_order() {
    for groups in worlds(2) {
        on_all(&groups, |group| {
            if group.rank() == 1 {
                group.barrier().unwrap();
                for i in 0..3u8 {
                    group.send(&[i], 0, 1).unwrap();
                }
                return;
            }
            let (mut first, mut third) = ([9u8], [9u8]);
            let first_work = receive(group, &mut first, 1, 1).unwrap();
            let second = group.submit_receive_any_owned(vec![9u8], 1).unwrap();
            let third_work = receive(group, &mut third, 1, 1).unwrap();
            group.barrier().unwrap();
            assert_eq!((outcome(&first_work), outcome(&third_work)), (Ok(()), Ok(())));
            assert_eq!((first, second.wait().unwrap(), third), ([0], vec![1], [2]));
        });
    }
}

/// It waits while somebody is left who may send, and no longer.
#[test]
fn a_receive_of_anybody_ends_when_everybody_has_left() {
    for groups in worlds(3) {
        let mut groups = groups.into_iter();
        let (stays, second, third) =
            (groups.next().unwrap(), groups.next().unwrap(), groups.next().unwrap());
        let waiting = stays.submit_receive_any_owned(vec![0u8; 3], 0).unwrap();
        let late = stays.submit_receive_any_owned(vec![0u8; 3], 1).unwrap();
        drop(second);
        third.send(&[7u8; 3], 0, 0).unwrap();
        let work = waiting.work().clone();
        assert_eq!(waiting.wait().unwrap(), [7; 3]);
        assert_eq!(work.source(), Some(2));
        drop(third);
        let left = |outcome| matches!(outcome, Err(Error::PeerLost { loss: Loss::Left, .. }));
        assert!(left(late.wait().map(drop)));
        assert!(left(stays.receive_any(&mut [0u8], 0).map(drop)));
    }
    let alone = Group::local(1, &Options::default()).unwrap().remove(0);
    let to_self = Error::InvalidCall(InvalidCall::ToSelf { rank: 0 });
    assert_eq!(alone.receive_any(&mut [0u8], 0), Err(to_self));
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
                group.submit_all_to_all_unequal(input, &lengths, output, &lengths).unwrap()
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
            let pending =
                group.submit_all_to_all_unequal(vec![0; 6], &sent, output, &received).unwrap();
            let wrong = Error::LengthMismatch { from: 2, to: 1, tag: 0, sent: 8, expected: 20 };
            assert_eq!(pending.wait().map(drop), Err(wrong));
            group.barrier().unwrap();
        });
    }
}

/// A rank that gives up in the middle of a message must still be understood: what follows the
/// part of a message that was cut off is the reason.
#[test]
fn the_end_of_an_epoch_in_the_middle_of_a_message_reaches_the_receiver() {
    let mut failed = 0;
    for round in 0..6u64 {
        let groups = Kind::Tcp.start(2, &Options::default());
        let data = vec![7; 48 << 20];
        let mut buffer = vec![0; data.len()];
        let sending = send(&groups[0], &data, 1, 0).unwrap();
        let receiving = receive(&groups[1], &mut buffer, 0, 0).unwrap();
        std::thread::sleep(Duration::from_millis(round));
        groups[0].epoch().end();
        let sent = outcome(&sending);
        // The sender is still there and its connections are open.
        match outcome(&receiving) {
            Ok(()) => assert!(buffer.iter().all(|&x| x == 7)),
            Err(error) => {
                assert_eq!(error, Error::EpochEnded { epoch: 0 });
                assert_eq!(sent, Err(Error::EpochEnded { epoch: 0 }));
                failed += 1;
            }
        }
    }
    assert!(failed > 0, "no epoch ended in the middle of a message");
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
            let everybody: Vec<i64> = (0..WORLD).flat_map(block).collect();
            let exchanged: Vec<i64> =
                (0..WORLD).flat_map(|from| (3 * me..3 * me + 3).map(own(from))).collect();
            let (root, nothing) = (2, vec![0; 3 * WORLD]);
            let at_root = |buffer: Vec<i64>| (me == root).then_some(buffer);
            let mut framed = vec![0; 3 * WORLD];
            framed[3 * me..3 * me + 3].copy_from_slice(&block(me));

            let all_reduce = group.submit_all_reduce(block(me), Reduction::Sum).unwrap();
            let into = group.submit_all_reduce_into(block(me), vec![0; 3], Reduction::Sum).unwrap();
            let scattered =
                group.submit_reduce_scatter(whole(me), vec![0; 3], Reduction::Sum).unwrap();
            let in_place = group.submit_reduce_scatter_in_place(whole(me), Reduction::Sum).unwrap();
            let gathered = group.submit_all_gather(block(me), nothing.clone()).unwrap();
            let gathered_in_place = group.submit_all_gather_in_place(framed).unwrap();
            let counts: Vec<usize> = (0..WORLD).collect();
            let unequal = block(me)[..me.min(3)].to_vec();
            let unequal = group.submit_all_gather_unequal(unequal, vec![0; 6], &counts).unwrap();
            let broadcast = group.submit_broadcast(block(me), root).unwrap();
            let reduced =
                group.submit_reduce(block(me), at_root(vec![0; 3]), Reduction::Sum, root).unwrap();
            let reduced_in_place =
                group.submit_reduce_in_place(block(me), Reduction::Sum, root).unwrap();
            let to_root = group.submit_gather(block(me), at_root(nothing.clone()), root).unwrap();
            let from_root = group.submit_scatter(at_root(whole(me)), vec![0; 3], root).unwrap();
            let all_to_all = group.submit_all_to_all(whole(me), nothing.clone()).unwrap();
            let replaced = group.submit_all_to_all_in_place(whole(me)).unwrap();
            // What r sends to s is r + s elements long.
            let lengths: Vec<usize> = (0..WORLD).map(|peer| me + peer).collect();
            let total = lengths.iter().sum();
            let ragged = group
                .submit_all_to_all_unequal(
                    vec![me as i64; total],
                    &lengths,
                    vec![9; total],
                    &lengths,
                )
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
            assert_eq!(gathered.wait().unwrap(), (block(me), everybody.clone()));
            assert_eq!(gathered_in_place.wait().unwrap(), everybody);
            let expected: Vec<i64> =
                (0..WORLD).flat_map(|r| block(r)[..r.min(3)].to_vec()).collect();
            assert_eq!(unequal.wait().unwrap().1, expected);
            assert_eq!(broadcast.wait().unwrap(), block(root));
            assert_eq!(reduced.wait().unwrap(), (block(me), at_root(sums.clone())));
            let kept = if me == root { sums } else { block(me) };
            assert_eq!(reduced_in_place.wait().unwrap(), kept);
            assert_eq!(to_root.wait().unwrap(), (block(me), at_root(everybody)));
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
        assert!(group.submit_all_gather(vec![1f32; 3], vec![0f32; 5]).is_err());
        assert!(group.submit_broadcast(vec![1f32; 3], 2).is_err());
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
fn a_callback_that_panics_harms_nobody_else() {
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

/// The callback runs on a thread that the group waits for when it ends.
#[test]
fn a_callback_may_drop_the_last_handle_of_its_group() {
    for by_message in [false, true] {
        for groups in worlds(2) {
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
                        let _ = wait.recv_timeout(PATIENCE);
                        drop(last);
                        told.send(()).unwrap();
                    });
                    // Both ranks have submitted when the first handle goes.
                    (group, dropped, pending)
                })
                .collect();
            for (group, dropped, pending) in handles {
                drop(group);
                dropped.send(()).unwrap();
                pending.iter().for_each(|pending| drop(outcome(pending.work())));
            }
            for _ in 0..2 {
                tell.recv_timeout(PATIENCE).expect("the callback comes back");
            }
        }
    }
}
