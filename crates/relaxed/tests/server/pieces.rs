//! Parts of the weights: who gets which, and their versions.

use unisono_relaxed::server::wire::{Measured, Reply, Request};
use unisono_relaxed::server::{Client, Run};

use crate::lab::{Lab, TRANSPORTS, call, descent, setup, within};

fn run() -> Run {
    Run::new(vec![vec![40, 3], vec![7], vec![2, 2]], descent(0.5), "async".parse().unwrap())
}

fn initial(parameter: usize) -> Vec<f32> {
    let lengths = [120, 7, 4];
    (0..lengths[parameter]).map(|i| (parameter * 1000 + i) as f32).collect()
}

#[test]
fn weights_arrive_as_they_were_set_up_wherever_they_lie() {
    for transport in TRANSPORTS {
        for servers in 1..=4 {
            within("a pull", move || {
                let (lab, run) = (Lab::start(servers, transport), run());
                let mut client = Client::join(&run, lab.options(0), &initial).unwrap();
                let mut weights: Vec<Vec<f32>> =
                    (0..3).map(|p| vec![f32::NAN; initial(p).len()]).collect();
                client
                    .pull(None, &mut |p, start, values| {
                        weights[p][start..start + values.len()].copy_from_slice(values);
                    })
                    .unwrap();
                assert_eq!(weights, (0..3).map(initial).collect::<Vec<_>>());
                assert_eq!(weights, lab.weights(&run));
                // A second worker's weights are not asked for.
                let none = |_| panic!("the run is set up");
                Client::join(&run, lab.options(1), &none).unwrap();
            });
        }
    }
}

#[test]
fn a_partial_pull_has_nothing_else() {
    for transport in TRANSPORTS {
        within("a partial pull", move || {
            let (lab, run) = (Lab::start(3, transport), run());
            let mut client = Client::join(&run, lab.options(0), &initial).unwrap();
            for wanted in [vec![0], vec![2], vec![1, 2], vec![]] {
                let mut elements = [0; 3];
                let take = &mut |p: usize, start: usize, values: &[f32]| {
                    assert_eq!(values, &initial(p)[start..start + values.len()]);
                    elements[p] += values.len();
                };
                client.pull(Some(&wanted), take).unwrap();
                let expected = |p: usize| if wanted.contains(&p) { initial(p).len() } else { 0 };
                assert_eq!(elements, [0, 1, 2].map(expected));
            }
        });
    }
}

#[test]
fn every_piece_has_its_own_version() {
    within("versions", || {
        let (lab, run) = (Lab::start(1, TRANSPORTS[0]), run());
        let mut client = Client::join(&run, lab.options(0), &initial).unwrap();
        let ones = [vec![1.0; 120], vec![1.0; 7], vec![1.0; 4]];
        for parameters in [&[1][..], &[1, 2], &[], &[2, 1]] {
            let gradients: Vec<_> = parameters.iter().map(|p| (*p, vec![&ones[*p][..]])).collect();
            assert!(client.push(&gradients, Measured::default()).unwrap().applied);
        }
        let mut observer = lab.stranger(0, u32::MAX, 0);
        let asks = Request::Weights { run: setup(&run, 1).fingerprint() };
        let reply = call(&mut observer, &asks, &[]);
        assert_eq!(reply, Some(Reply::Weights { versions: vec![(0, 0), (1, 3), (2, 2)] }));
        let weights = lab.weights(&run);
        let moved = |p: usize, by: f32| initial(p).iter().map(|w| w - by).collect::<Vec<f32>>();
        assert_eq!(weights, [moved(0, 0.0), moved(1, 1.5), moved(2, 1.0)]);
    });
}

/// No read sees half an update of a piece, while four workers push to it and pull from it.
#[test]
fn reads_never_see_half_an_update() {
    for transport in TRANSPORTS {
        within("half an update", move || {
            let lab = Lab::start(1, transport);
            let mut run = Run::new(vec![vec![30_000]; 2], descent(1.0), "async".parse().unwrap());
            (run.workers, run.shards) = (4, 4);
            std::thread::scope(|scope| {
                for worker in 0..4 {
                    let (lab, run) = (&lab, &run);
                    scope.spawn(move || {
                        let zeros = |_| vec![0.0; 30_000];
                        let mut client = Client::join(run, lab.options(worker), &zeros).unwrap();
                        let ones = vec![1.0; 30_000];
                        let gradients = [(0, vec![&ones[..]]), (1, vec![&ones[..]])];
                        for _ in 0..100 {
                            let take = &mut |_: usize, _: usize, weights: &[f32]| {
                                assert!(weights.iter().all(|weight| *weight == weights[0]));
                            };
                            client.push_pull(&gradients, Measured::default(), take).unwrap();
                        }
                    });
                }
            });
            assert_eq!(lab.weights(&run), vec![vec![-400.0; 30_000]; 2]);
        });
    }
}
