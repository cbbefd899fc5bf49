//! Messages with tags.

mod common;

use std::time::Duration;

use common::{Kind, on_all, outcome, worlds};
use unisono_collective::{Error, Group, InvalidCall, Loss, Options, Rank, Reduction, Work};

fn send(group: &Group, buffer: &[u8], to: usize, tag: u32) -> Result<Work, Error> {
    // SAFETY: every caller keeps the buffer until the work is done; a send only reads it.
    unsafe { group.submit_send(buffer.as_ptr().cast_mut(), buffer.len(), to, tag) }
}

fn receive(group: &Group, buffer: &mut [u8], from: usize, tag: u32) -> Result<Work, Error> {
    // SAFETY: every caller keeps the buffer until the work is done.
    unsafe { group.submit_receive(buffer.as_mut_ptr(), buffer.len(), from, tag) }
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
            // Blocking sends, larger than any socket buffer, to all ranks at once.
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
                // No rank receives it before the small ones are through.
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
            let refused = Err(Error::InvalidCall(InvalidCall::NoSuchRank { rank: 2, world: 2 }));
            assert_eq!(group.send(&[1u8], 2, 0), refused);
            assert_eq!(group.receive(&mut [1u8], 2, 0), refused);
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
            let expected = Error::LengthMismatch {
                from: Rank(0),
                to: Rank(1),
                tag: 5,
                sent: 10,
                expected: 12,
            };
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
        let left = |outcome| matches!(outcome, Err(Error::PeerLost { peer, loss: Loss::Left, .. }) if peer.0 < 2);
        assert!(left(outcome(&sending)));
        let mut buffer = [0; 10];
        assert!(left(outcome(&receive(&stays, &mut buffer, 0, 5).unwrap())));
        assert!(left(outcome(&send(&stays, &data, 0, 5).unwrap())));
    }
}

/// Receives that name no sender get every message once, and learn whose it is.
#[test]
fn a_receive_that_names_no_sender_learns_which_rank_sent() {
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
            // A named receive is not disturbed by one that names no sender and comes later.
            let mut named = [0i32; 2];
            group.receive(&mut named, 2, 6).unwrap();
            let other = group.submit_receive_owned(vec![0i32; 2], None, 6).unwrap();
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
            let second = group.submit_receive_owned(vec![9u8], None, 1).unwrap();
            let third_work = receive(group, &mut third, 1, 1).unwrap();
            group.barrier().unwrap();
            assert_eq!((outcome(&first_work), outcome(&third_work)), (Ok(()), Ok(())));
            assert_eq!((first, second.wait().unwrap(), third), ([0], vec![1], [2]));
        });
    }
}

/// It waits while a rank is left that may send, and no longer.
#[test]
fn a_receive_that_names_no_sender_ends_when_all_others_have_left() {
    for groups in worlds(3) {
        let mut groups = groups.into_iter();
        let (stays, second, third) =
            (groups.next().unwrap(), groups.next().unwrap(), groups.next().unwrap());
        let waiting = stays.submit_receive_owned(vec![0u8; 3], None, 0).unwrap();
        let late = stays.submit_receive_owned(vec![0u8; 3], None, 1).unwrap();
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
