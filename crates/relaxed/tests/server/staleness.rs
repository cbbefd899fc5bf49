//! What becomes of gradients of old weights.

use unisono_relaxed::Clock;
use unisono_relaxed::server::Run;
use unisono_relaxed::staleness;

use crate::lab::{Counter, Lab, TRANSPORTS, counting, counts, within};

fn run(stale: &str) -> Run {
    let mut run = counting("async", 2);
    run.stale = stale.parse().unwrap();
    run
}

/// Two workers read, the one pushes so often, and then the other pushes what it computed before.
fn be_late(lab: &Lab, run: &Run, updates: u64) -> (Counter, Counter) {
    let (mut late, mut busy) = (Counter::join(lab, run, 0), Counter::join(lab, run, 1));
    late.pull().unwrap();
    for _ in 0..updates {
        busy.push_pull().unwrap();
    }
    (late, busy)
}

#[test]
fn scale_divides_the_rate_by_the_staleness() {
    for transport in TRANSPORTS {
        within("scale", move || {
            let (lab, run) = (Lab::start(1, transport), run("scale"));
            let (mut late, mut busy) = be_late(&lab, &run, 8);
            assert!(late.push().unwrap().applied);
            // 8 updates by 2 workers are 4 clocks.
            assert_eq!(lab.weights(&run), [[-0.25, -8.0]]);
            busy.client.pull(None, &mut |_, _, _| {}).unwrap();
            busy.push().unwrap();
            assert_eq!(lab.weights(&run), [[-0.25, -9.0]]);
        });
    }
}

#[test]
fn drop_acknowledges_and_leaves_out() {
    for transport in TRANSPORTS {
        within("drop", move || {
            let (lab, run) = (Lab::start(2, transport), run("drop:1"));
            let (mut late, _busy) = be_late(&lab, &run, 3);
            let pushed = late.push_pull().unwrap();
            assert!(!pushed.applied);
            assert_eq!((pushed.age.delay, pushed.age.present), (3, 2));
            // It has finished a step all the same, and the next is fresh.
            assert_eq!(late.client.clock(), Clock(1));
            assert_eq!(late.seen, [0, 3]);
            assert!(late.push().unwrap().applied);
            assert_eq!(counts(&lab.weights(&run)), [1, 3]);
            for report in lab.reports(&run) {
                assert_eq!((report.ledger.applied, report.ledger.dropped), (4, 1));
                assert_eq!(report.updates, 4);
            }
        });
    }
}

#[test]
fn compensate_corrects_for_the_way_of_the_weights() {
    for transport in TRANSPORTS {
        within("compensate", move || {
            let (lab, run) = (Lab::start(1, transport), run("compensate:0.5"));
            let (mut late, mut busy) = be_late(&lab, &run, 2);
            let before = lab.weights(&run).remove(0);
            let gradient = [1.0f32, 3.0];
            let pushes = [(0, vec![&gradient[..]])];
            late.client.push(&pushes, Default::default()).unwrap();
            let mut corrected = gradient.to_vec();
            staleness::compensate(0.5, &mut corrected, &before, &[0.0; 2]);
            assert_ne!(corrected, gradient, "nothing to correct");
            let expected: Vec<f32> = before.iter().zip(&corrected).map(|(w, g)| w - g).collect();
            assert_eq!(lab.weights(&run)[0], expected);
            // Who has just read needs no correction.
            busy.client.pull(None, &mut |_, _, _| {}).unwrap();
            busy.client.push(&pushes, Default::default()).unwrap();
            assert_eq!(lab.weights(&run), [[expected[0] - 1.0, expected[1] - 3.0]]);
        });
    }
}

/// Corrections wait for the versions before them. Four workers at once must not wait for each other.
#[test]
fn corrections_of_many_do_not_block_each_other() {
    for transport in TRANSPORTS {
        within("compensate", move || {
            let lab = Lab::start(2, transport);
            let mut run = counting("async", 4);
            run.stale = "compensate:0.001".parse().unwrap();
            std::thread::scope(|scope| {
                for worker in 0..4 {
                    let (lab, run) = (&lab, &run);
                    scope.spawn(move || {
                        let mut client = lab.client(run, worker);
                        let gradient = [0.01; 4];
                        for _ in 0..100 {
                            let pushes = [(0, vec![&gradient[..]])];
                            let take = &mut |_: usize, _: usize, _: &[f32]| {};
                            client.push_pull(&pushes, Default::default(), take).unwrap();
                        }
                    });
                }
            });
            assert_eq!(lab.reports(&run)[0].ledger.applied, 400);
        });
    }
}
