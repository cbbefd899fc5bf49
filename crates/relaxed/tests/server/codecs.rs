//! Gradients that arrive encoded: the weights move by what was decoded.

use unisono_codec::sender::{Origin, Scratch, Sender, decode};
use unisono_codec::{CodecSpec, Task};
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{Client, Run, layout};

use crate::lab::{Lab, TRANSPORTS, descent, within, zeros};

const CODECS: [&str; 6] = ["int8", "topk:0.1", "powersgd:2", "sign", "fp16", "dgc"];

const SHAPE: [usize; 2] = [64, 48];

fn gradient(step: u64) -> Vec<f32> {
    let at = |i: u64| ((i * 7919 + step * 104_729) % 1009) as f32 / 504.5 - 1.0;
    (0..64 * 48).map(at).collect()
}

fn run(codec: &CodecSpec) -> Run {
    let mut run = Run::new(vec![SHAPE.to_vec()], descent(1.0), "async".parse().unwrap());
    run.codecs = vec![Some(codec.clone())];
    run.seed = 11;
    run
}

/// Does by hand what the client and the servers do with a piece.
struct Reference {
    sender: Sender,
    origin: Origin,
    span: std::ops::Range<usize>,
}

impl Reference {
    fn all(run: &Run, servers: usize, error_feedback: bool) -> Vec<Reference> {
        let spread = layout::spread(&run.shapes, servers).into_iter();
        let pieces = spread.flat_map(|pieces| pieces.into_iter().enumerate());
        let reference = |(number, piece): (usize, layout::Piece)| {
            let origin = Origin {
                shape: piece.shape.clone(),
                parameter: number,
                seed: run.seed,
                worker: 0,
                mean_of: 1,
            };
            let codec = run.codecs[0].as_ref().unwrap().build();
            assert!(codec.suits(&piece.shape), "nothing would be encoded");
            let sender = Sender::new(codec, origin.clone(), error_feedback);
            Reference { sender, origin, span: piece.span() }
        };
        pieces.map(reference).collect()
    }

    fn apply(&mut self, codec: &CodecSpec, step: u64, gradient: &[f32], weights: &mut [f32]) {
        let Reference { sender, origin, span } = self;
        let (mut bytes, mut scratch) = (Vec::new(), Scratch::default());
        sender.encode(step, &gradient[span.clone()], &mut scratch, &mut bytes);
        let mut decoded = vec![0.0; span.len()];
        let Origin { shape, parameter, seed, .. } = &*origin;
        let task = Task { shape, parameter: *parameter, step, seed: *seed };
        decode(&*codec.build(), &task, &bytes, &mut decoded, &mut scratch).unwrap();
        weights[span.clone()].iter_mut().zip(&decoded).for_each(|(w, g)| *w -= g);
    }
}

#[test]
fn weights_move_by_what_is_decoded() {
    for transport in TRANSPORTS {
        for codec in CODECS {
            for (servers, error_feedback) in [(1, true), (2, true), (2, false)] {
                within(codec, move || {
                    let codec: CodecSpec = codec.parse().unwrap();
                    let (lab, run) = (Lab::start(servers, transport), run(&codec));
                    let options = unisono_relaxed::server::ClientOptions {
                        error_feedback,
                        warm_up: 1,
                        ..lab.options(0)
                    };
                    let mut client = Client::join(&run, options, &|p| zeros(&run, p)).unwrap();
                    let mut references = Reference::all(&run, servers, error_feedback);
                    let mut expected = zeros(&run, 0);
                    for step in 0..5 {
                        let gradient = gradient(step);
                        let pushes = [(0, vec![&gradient[..]])];
                        assert!(client.push(&pushes, Measured::default()).unwrap().applied);
                        if step == 0 {
                            // Before it warms up, it sends gradients as they are.
                            expected.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= g);
                        } else {
                            for reference in &mut references {
                                reference.apply(&codec, step, &gradient, &mut expected);
                            }
                        }
                        assert_eq!(lab.weights(&run), [expected.clone()], "{codec} at step {step}");
                    }
                });
            }
        }
    }
}

#[test]
fn encodings_are_smaller() {
    within("traffic", || {
        let mut bytes = Vec::new();
        for codec in ["int8", "topk:0.01"] {
            let codec: CodecSpec = codec.parse().unwrap();
            let dir = tempfile::tempdir().unwrap();
            let mut lab = Lab::idle(1, TRANSPORTS[0]);
            let run = run(&codec);
            lab.record(dir.path(), &run);
            lab.serve(Default::default());
            let mut client = Client::join(&run, lab.options(0), &|p| zeros(&run, p)).unwrap();
            let gradient = gradient(0);
            let mut push = || {
                client.push(&[(0, vec![&gradient[..]])], Measured::default()).unwrap();
                crate::lab::recorded(dir.path()).bytes()
            };
            // The first says what it took to join, the second what the first took.
            let (first, second) = (push(), push());
            bytes.push(second - first);
        }
        let dense = 64 * 48 * 4;
        assert!(bytes[0] < dense / 3 && bytes[1] < dense / 20, "{bytes:?} of {dense}");
    });
}
