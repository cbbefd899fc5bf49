//! Workers that come late, come back, fall silent or are gone.

use std::time::{Duration, Instant};

use unisono_relaxed::server::core::{PushId, Refusal};
use unisono_relaxed::server::wire::{Part, Reply, Request};
use unisono_relaxed::server::{Client, ClientOptions, Files, ServerError, Transport, link};
use unisono_relaxed::{Clock, Life};

use crate::forked;
use crate::lab::{Counter, Lab, TRANSPORTS, call, counting, recorded, within};

/// The timeout is an hour here: only the end of the connection frees the others.
#[test]
fn a_closed_connection_frees_the_others_at_once() {
    for transport in TRANSPORTS {
        for level in ["bsp", "ssp:0"] {
            within(level, move || {
                let (lab, run) = (Lab::start(2, transport), counting(level, 3));
                let join = |worker| Counter::join(&lab, &run, worker);
                let (a, b, gone) = (join(0), join(1), join(2));
                let go = |mut worker: Counter| {
                    std::thread::spawn(move || {
                        worker.client.pull(None, &mut |_, _, _| {}).unwrap();
                        for _ in 0..3 {
                            assert!(worker.push().unwrap().applied);
                            worker.client.pull(None, &mut |_, _, _| {}).unwrap();
                        }
                    })
                };
                let (a, b) = (go(a), go(b));
                // They have pushed, or wait to: in lock-step nothing is applied without the third.
                if level == "ssp:0" {
                    lab.wait_for(&run, "both have pushed", |report| report.ledger.applied == 2);
                }
                assert_eq!(lab.reports(&run)[0].present, 3);
                // The handle of another thread does not keep it alive.
                let stopper = gone.client.stopper();
                drop(gone);
                a.join().unwrap();
                b.join().unwrap();
                drop(stopper);
                lab.wait_for(&run, "no worker is left", |report| report.present == 0);
                assert_eq!(lab.reports(&run)[1].ledger.applied, 6);
            });
        }
    }
}

/// A child that was forked from a worker, or from a server, would keep the connection of a process
/// that is killed, and the others waiting for it.
#[test]
fn forked_children_hold_no_connection() {
    for transport in TRANSPORTS {
        within("forked", move || {
            let (lab, run) = (Lab::start(2, transport), counting("async", 1));
            let mut worker = Counter::join(&lab, &run, 0);
            worker.push_pull().unwrap();
            let (mine, of_child) = forked::connections();
            assert!(mine >= 4, "a connection of two ends to each server, not {mine}");
            assert_eq!(of_child, 0);
            worker.push_pull().unwrap();
        });
    }
}

/// A worker that says nothing, while its connection stays open.
#[test]
fn a_silent_worker_is_taken_for_gone() {
    for level in ["bsp", "ssp:0"] {
        within(level, move || {
            let lab = Lab::start(1, Transport::Tcp);
            let mut run = counting(level, 2);
            run.timeout = Duration::from_millis(400);
            let mut alive = Counter::join(&lab, &run, 0);
            let mut silent = lab.quiet(&run, 1, 0);
            alive.client.pull(None, &mut |_, _, _| {}).unwrap();
            for _ in 0..3 {
                assert!(alive.push().unwrap().applied);
                alive.client.pull(None, &mut |_, _, _| {}).unwrap();
            }
            assert_eq!(lab.reports(&run)[0].present, 1);
            let pull = Request::Pull { clock: Clock::START, bound: None, pieces: None };
            let reply = call(&mut silent, &pull, &[]);
            assert_eq!(reply, Some(Reply::Refused(Refusal::NotPresent)));
        });
    }
}

/// One that waits for the server, or computes, for many timeouts is not silent.
#[test]
fn who_waits_is_not_silent() {
    for transport in TRANSPORTS {
        within("a long wait", move || {
            let lab = Lab::start(1, transport);
            let mut run = counting("ssp:0", 2);
            run.timeout = Duration::from_millis(600);
            let (mut waits, mut computes) =
                (Counter::join(&lab, &run, 0), Counter::join(&lab, &run, 1));
            let waiting = std::thread::spawn(move || {
                waits.push_pull().unwrap();
                waits.seen
            });
            let start = Instant::now();
            while start.elapsed() < 3 * run.timeout {
                assert_eq!(lab.reports(&run)[0].present, 2);
            }
            computes.push().unwrap();
            assert_eq!(waiting.join().unwrap(), [1, 1]);
        });
    }
}

#[test]
fn a_late_joiner_enters_at_the_slowest_clock() {
    for transport in TRANSPORTS {
        for servers in [1, 2] {
            within("a late joiner", move || {
                let (lab, run) = (Lab::start(servers, transport), counting("ssp:3", 3));
                let (mut fast, mut slow) =
                    (Counter::join(&lab, &run, 0), Counter::join(&lab, &run, 1));
                for _ in 0..5 {
                    slow.push().unwrap();
                    fast.push().unwrap();
                }
                fast.push().unwrap();
                let mut late = Counter::join(&lab, &run, 2);
                assert_eq!(late.client.clock(), Clock(5));
                late.pull().unwrap();
                assert_eq!(late.seen, [6, 5, 0]);
                late.push_pull().unwrap();
                assert_eq!((late.client.clock().0, late.seen), (6, vec![6, 5, 1]));
            });
        }
    }
}

#[test]
fn in_lockstep_a_later_life_takes_part_in_the_next_round() {
    for transport in TRANSPORTS {
        within("a later life", move || {
            let (lab, run) = (Lab::start(2, transport), counting("bsp", 2));
            let (mut stays, goes) = (lab.client(&run, 0), lab.client(&run, 1));
            let ones = [1.0; 2];
            let gradients = [(0, vec![&ones[..]])];
            drop(goes);
            for _ in 0..3 {
                assert!(stays.push(&gradients, Default::default()).unwrap().applied);
            }
            let again = ClientOptions { life: Some(Life(2)), ..lab.options(1) };
            let mut back = lab.try_client(&run, again).unwrap();
            assert_eq!(back.clock(), Clock(3));
            std::thread::scope(|scope| {
                for client in [&mut stays, &mut back] {
                    scope.spawn(|| client.push(&gradients, Default::default()).unwrap());
                }
            });
            assert_eq!((stays.clock(), back.clock()), (Clock(4), Clock(4)));
            let report = &lab.reports(&run)[0];
            assert_eq!((report.updates, report.ledger.applied), (4, 5));
            assert_eq!(lab.weights(&run), [[-4.0, -4.0]]);
        });
    }
}

/// A push that comes when its round is over is dropped, and accounted for.
#[test]
fn in_lockstep_a_push_that_comes_too_late_is_dropped() {
    within("a late push", || {
        let dir = tempfile::tempdir().unwrap();
        let run = counting("bsp", 2);
        let mut lab = Lab::idle(1, Transport::Tcp);
        lab.record(dir.path(), &run);
        lab.serve(Files::default());
        let mut stays = lab.client(&run, 0);
        let ones = [1.0f32; 2];
        let gradients = [(0, vec![&ones[..]])];
        let cut_off = lab.quiet(&run, 1, 0);
        drop(cut_off);
        assert!(stays.push(&gradients, Default::default()).unwrap().applied);
        let mut back = lab.quiet(&run, 1, 0);
        let push = |number, clock| Request::Push {
            push: PushId { worker: 1, life: Life(1), number, clock: Clock(clock) },
            measured: Default::default(),
            parts: vec![Part { piece: 0, vectors: 1, bytes: 8, encoded: false }],
        };
        let bytes = link::bytes(&ones);
        // Once more, as if the reply had been lost.
        for applied in [false, true] {
            let reply = call(&mut back, &push(1, 0), &[bytes]);
            let Some(Reply::Pushed { applied: said, clock: Clock(1), .. }) = reply else {
                panic!("{reply:?}")
            };
            assert_eq!(said, applied);
        }
        back.send(&push(2, 1), &[bytes]).unwrap();
        assert!(stays.push(&gradients, Default::default()).unwrap().applied);
        let reply = back.receive::<Reply>().unwrap();
        assert!(
            matches!(reply, Some(Reply::Pushed { applied: true, clock: Clock(2), .. })),
            "{reply:?}"
        );
        assert_eq!(lab.weights(&run), [[-2.0, -2.0]]);
        let ledger = recorded(dir.path()).ledger().unwrap();
        assert_eq!((ledger.pushes, ledger.applied, ledger.dropped), (4, 3, 1));
    });
}

#[test]
fn an_older_life_is_refused() {
    for transport in TRANSPORTS {
        within("lives", move || {
            let (lab, run) = (Lab::start(2, transport), counting("async", 1));
            let join = |life| {
                lab.try_client(&run, ClientOptions { life: Some(Life(life)), ..lab.options(0) })
            };
            let is_superseded = |error| matches!(error, ServerError::Superseded { worker: 0 });
            let mut old = Counter::new(join(5).unwrap(), &run, 0);
            old.push_pull().unwrap();
            let mut new = Counter::new(join(6).unwrap(), &run, 0);
            assert!(is_superseded(old.push_pull().unwrap_err()));
            assert!(is_superseded(old.pull().unwrap_err()));
            assert!(is_superseded(join(4).map(drop).unwrap_err()));
            drop(old);
            new.push_pull().unwrap();
            assert_eq!((new.seen, new.client.clock().0), (vec![2], 2));
        });
    }
}

/// The connection before is still open, as after a cut of the network: it is ended, and its end does
/// not end the worker.
#[test]
fn a_new_connection_takes_the_place_of_the_old() {
    within("two connections", || {
        let (lab, run) = (Lab::start(1, Transport::Tcp), counting("async", 2));
        let other = Counter::join(&lab, &run, 1);
        let mut old = lab.quiet(&run, 0, 0);
        let mut new = lab.quiet(&run, 0, 0);
        let ended = old.receive::<Reply>();
        assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
        drop(old);
        // The server notices at any time from now on.
        for _ in 0..50 {
            let pull = Request::Pull { clock: Clock::START, bound: None, pieces: None };
            let reply = call(&mut new, &pull, &[]);
            assert!(matches!(reply, Some(Reply::Weights { .. })), "{reply:?}");
            new.bulk([8].into_iter()).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(lab.reports(&run)[0].present, 2);
        drop(other);
        lab.wait_for(&run, "one is there", |report| report.present == 1);
        // A client that comes by a third connection does not notice the second.
        let mut third = Counter::join(&lab, &run, 0);
        third.push_pull().unwrap();
        drop(new);
        third.push_pull().unwrap();
        assert_eq!(third.seen, [2, 0]);
    });
}

#[test]
fn who_leaves_is_gone_when_it_has_left() {
    for transport in TRANSPORTS {
        within("leaving", move || {
            let (lab, run) = (Lab::start(2, transport), counting("async", 1));
            for life in 1..10 {
                let options = ClientOptions { life: Some(Life(life)), ..lab.options(0) };
                let client: Client = lab.try_client(&run, options).unwrap();
                assert!(lab.reports(&run).iter().all(|report| report.present == 1));
                client.leave();
                assert!(lab.reports(&run).iter().all(|report| report.present == 0));
            }
        });
    }
}
