//! Groups that end on purpose: aborted, out of time, interrupted.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Kind, Waits, on_all};
use unisono_collective::{Call, Error, Group, Options, Rank, Reduction};

const KINDS: [Kind; 3] = [Kind::Local, Kind::Shm, Kind::Tcp];

/// After this long, what has not happened never will.
const HUNG: Duration = Duration::from_secs(30);

#[test]
fn an_aborted_group_says_who_gave_up_and_others_go_on() {
    for kind in KINDS {
        let groups = kind.start(3, &Options::default());
        let others = on_all(&groups, |world| world.split(Some(0), 0).unwrap().unwrap());
        let aborted =
            Error::Aborted { peer: Rank(1), reason: "the loss is not a number: ∞".into() };
        let waits = [0, 2].map(|rank: usize| Waits::of(&groups[rank]));
        std::thread::scope(|scope| {
            // Rank 1 does not come: the others wait, for a call, and for messages.
            let waiting: Vec<_> = [0, 2]
                .map(|rank| {
                    let group = &groups[rank];
                    scope.spawn(move || {
                        let received = group.submit_receive_owned(vec![0u8; 4], None, 9).unwrap();
                        let reduced = group.all_reduce(&mut [1f32; 10], Reduction::Sum);
                        (reduced, received.wait().map(drop))
                    })
                })
                .into();
            waits.iter().for_each(Waits::begin);
            groups[1].abort("the loss is not a number: ∞");
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), (Err(aborted.clone()), Err(aborted.clone())));
            }
        });
        on_all(&groups, |group| {
            assert_eq!(group.barrier(), Err(aborted.clone()));
            assert_eq!(group.receive_any(&mut [0u8], 0), Err(aborted.clone()));
            group.abort("too late to matter");
            assert_eq!(group.failure(), Some(aborted.clone()));
            assert!(!group.epoch().has_ended());
        });
        on_all(&others, |other| other.barrier().unwrap());
    }
}

#[test]
fn a_long_reason_arrives_as_far_as_it_fits() {
    let groups = Kind::Tcp.start(2, &Options::default());
    groups[0].abort(&"∞".repeat(5000));
    match wait_for_end(&groups[1]) {
        Error::Aborted { peer: Rank(0), reason } => {
            assert!(reason.chars().count() >= 200 && reason.chars().all(|c| c == '∞'), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_timeout_names_the_ranks_that_have_not_arrived() {
    let after = Duration::from_millis(300);
    for kind in KINDS {
        let groups = kind.start(3, &Options::default());
        let others = on_all(&groups, |world| world.split(Some(0), 0).unwrap().unwrap());
        let waits = [0, 1].map(|rank: usize| Waits::of(&groups[rank]));
        std::thread::scope(|scope| {
            let waiting: Vec<_> = groups[..2]
                .iter()
                .map(|group| scope.spawn(|| group.all_reduce(&mut [1f32; 10], Reduction::Sum)))
                .collect();
            waits.iter().for_each(Waits::begin);
            groups[0].abort_handle().expire(after);
            let mut outcomes = waiting.into_iter().map(|rank| rank.join().unwrap());
            match outcomes.next().unwrap() {
                Err(Error::TimedOut {
                    after: limit,
                    during: Some(Call { count: 10, .. }),
                    missing,
                }) => {
                    assert_eq!(limit, after);
                    assert!(missing.contains(&Rank(2)), "{missing:?}");
                }
                other => panic!("{other:?}"),
            }
            match outcomes.next().unwrap() {
                Err(Error::Aborted { peer: Rank(0), reason }) => {
                    assert!(reason.contains("timeout of 300ms"), "{reason}");
                    assert!(reason.contains("have not arrived") || reason.contains("rank 2 has"));
                }
                other => panic!("{other:?}"),
            }
        });
        on_all(&others, |other| other.barrier().unwrap());
    }
}

#[test]
fn no_rank_is_missing_once_a_wait_is_over() {
    for kind in KINDS {
        let groups = kind.start(2, &Options::default());
        let waits = Waits::of(&groups[0]);
        on_all(&groups, |group| {
            // The other has noted by then for whom it waits.
            if group.rank() == 1 {
                waits.begin();
            }
            group.barrier().unwrap();
        });
        groups[0].abort_handle().expire(Duration::ZERO);
        let expected = Error::TimedOut { after: Duration::ZERO, during: None, missing: vec![] };
        assert_eq!(groups[0].failure(), Some(expected));
    }
}

/// A call asks on the thread that waits, for as long as it waits, and stops when it is told to.
#[test]
fn a_waiting_call_can_be_interrupted() {
    for kind in KINDS {
        for behind in [false, true] {
            let groups = kind.start(2, &Options::default());
            let asked = Arc::new(AtomicUsize::new(0));
            let on_own_thread = Arc::new(AtomicBool::new(false));
            let (count, own, caller) =
                (asked.clone(), on_own_thread.clone(), std::thread::current().id());
            groups[0].stop_waiting_if(move || {
                // The progress thread asks as well, for the call before, and is told to go on.
                if std::thread::current().id() != caller {
                    return false;
                }
                own.store(true, Ordering::SeqCst);
                count.fetch_add(1, Ordering::SeqCst) == 2
            });
            let before =
                behind.then(|| groups[0].submit_all_reduce(vec![1u8], Reduction::Sum).unwrap());
            let outcome = groups[0].all_reduce(&mut [1f32; 10], Reduction::Sum);
            assert!(matches!(&outcome, Err(Error::Aborted { peer: Rank(0), .. })), "{outcome:?}");
            assert!(on_own_thread.load(Ordering::SeqCst));
            assert_eq!(asked.load(Ordering::SeqCst), 3);
            if let Some(before) = before {
                assert_eq!(before.wait().map(drop), outcome);
            }
            let told = wait_for_end(&groups[1]);
            assert!(
                matches!(&told, Error::Aborted { peer: Rank(0), reason } if reason.contains("interrupted"))
            );
        }
    }
}

fn wait_for_end(group: &Group) -> Error {
    let deadline = Instant::now() + HUNG;
    loop {
        if let Some(failure) = group.failure() {
            return failure;
        }
        assert!(Instant::now() < deadline, "rank {} was not told", group.rank());
        std::thread::sleep(Duration::from_millis(1));
    }
}
