//! Who is held back, and what a read contains.

use std::sync::mpsc::channel;

use unisono_relaxed::Clock;

use crate::lab::{Counter, Lab, TRANSPORTS, counting, within};

/// A fast worker is never more than the bound ahead of what a slow one has pushed, and really gets as
/// far as the bound allows.
#[test]
fn ssp_holds_a_fast_worker_back() {
    for transport in TRANSPORTS {
        for (servers, bound) in [(1, 0), (1, 2), (2, 3)] {
            within("a bound", move || {
                let lab = Lab::start(servers, transport);
                let run = counting(&format!("ssp:{bound}"), 2);
                let mut fast = Counter::join(&lab, &run, 0);
                let mut slow = Counter::join(&lab, &run, 1);
                let (arrived, arrivals) = channel();
                let running = std::thread::spawn(move || {
                    fast.pull().unwrap();
                    let mut leads = Vec::new();
                    while fast.client.clock() < Clock(20) {
                        let clock = fast.client.clock().0;
                        assert_eq!(fast.seen[0], clock, "its own pushes");
                        leads.push(clock.saturating_sub(fast.seen[1]));
                        let _ = arrived.send(clock);
                        fast.push_pull().unwrap();
                    }
                    leads
                });
                slow.pull().unwrap();
                for step in 0..20 - bound {
                    // Only when the fast one has come as far as it may.
                    while arrivals.recv().unwrap() < step + bound {}
                    slow.push_pull().unwrap();
                }
                let leads = running.join().unwrap();
                assert_eq!(leads.iter().max(), Some(&bound), "{leads:?}");
                // What is ahead of the slow one at the end is in no worker's way.
                let ledger = lab.reports(&run)[0].ledger;
                assert_eq!(ledger.applied, 40 - bound);
            });
        }
    }
}

#[test]
fn async_holds_no_worker_back() {
    for transport in TRANSPORTS {
        within("async", move || {
            let lab = Lab::start(2, transport);
            let run = counting("async", 2);
            let (mut fast, mut slow) = (Counter::join(&lab, &run, 0), Counter::join(&lab, &run, 1));
            slow.pull().unwrap();
            for _ in 0..50 {
                fast.push_pull().unwrap();
            }
            let pushed = slow.push_pull().unwrap();
            assert_eq!((pushed.age.delay, pushed.age.present), (50, 2));
            assert_eq!(slow.seen, [50, 1]);
        });
    }
}

/// The lead is what the server enforces, whatever a worker asks for.
#[test]
fn a_worker_cannot_ask_for_a_larger_bound() {
    use unisono_relaxed::server::wire::Request;
    within("a bound", || {
        let lab = Lab::start(1, unisono_relaxed::server::Transport::Tcp);
        let run = counting("ssp:1", 2);
        let mut slow = Counter::join(&lab, &run, 0);
        let mut eager = lab.quiet(&run, 1, 2);
        eager.send(&Request::Pull { clock: Clock(2), bound: None, pieces: None }, &[]).unwrap();
        let reading = std::thread::spawn(move || {
            let reply = eager.receive::<unisono_relaxed::server::wire::Reply>().unwrap();
            let weights = eager.bulk([8].into_iter()).unwrap()[0].to_vec();
            (reply, weights)
        });
        slow.push().unwrap();
        let (reply, weights) = reading.join().unwrap();
        assert!(reply.is_some());
        assert_eq!(weights[..4], (-1.0f32).to_le_bytes(), "it read before the slow one had pushed");
    });
}

/// Both ends of the last push of a run say that it is over.
#[test]
fn a_run_ends_after_its_pushes() {
    within("the end", || {
        let lab = Lab::start(2, TRANSPORTS[1]);
        let mut run = counting("async", 2);
        run.total = 3;
        let (mut a, mut b) = (Counter::join(&lab, &run, 0), Counter::join(&lab, &run, 1));
        assert!(!a.push().unwrap().finished && !b.push_pull().unwrap().finished);
        assert!(a.push_pull().unwrap().finished && a.client.is_finished());
        assert!(b.push().unwrap().finished);
        let late = Counter::join(&lab, &run, 1);
        assert!(late.client.is_finished());
    });
}
