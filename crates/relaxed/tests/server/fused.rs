//! Gradients that are decoded, copied and corrected block by block, as the weights are updated: the weights are those of a
//! server with a journal, which makes gradients whole first and writes them down.

use unisono_codec::sender::{Origin, Scratch, Sender};
use unisono_codec::{Codec, CodecSpec};
use unisono_optimizer::OptimizerSpec;
use unisono_relaxed::server::core::PushId;
use unisono_relaxed::server::wire::{Measured, Part, Reply, Request, Setup};
use unisono_relaxed::server::{Client, Files, Run, Transport};
use unisono_relaxed::{Clock, Life};

use crate::lab::{Lab, TRANSPORTS, call, descent, within, zeros};

/// So many that several threads share an update where there are cores, and that the last block is short and odd.
const LARGE: usize = (1 << 19) + 16_384 + 77;

/// Of the pieces of which one cannot be decoded.
const SHAPES: [usize; 2] = [40_001, 50_003];

fn gradient(step: u64, elements: usize) -> Vec<f32> {
    let at = |i: u64| ((i * 7919 + step * 104_729) % 1009) as f32 / 504.5 - 1.0;
    (0..elements as u64).map(at).collect()
}

fn run(optimizer: OptimizerSpec, codec: Option<&str>, stale: &str) -> Run {
    let mut run =
        Run::new(vec![vec![LARGE], vec![1], vec![33, 3]], optimizer, "async".parse().unwrap());
    let codec = codec.map(|codec| codec.parse::<CodecSpec>().unwrap());
    let suits = |codec: &CodecSpec, shape: &[usize]| codec.build().suits(shape);
    run.codecs = run.shapes.iter().map(|shape| codec.clone().filter(|c| suits(c, shape))).collect();
    run.stale = stale.parse().unwrap();
    (run.workers, run.shards, run.seed) = (2, 2, 3);
    run
}

fn push(client: &mut Client, run: &Run, step: u64, pulls: bool) {
    let gradients: Vec<Vec<f32>> =
        run.shapes.iter().map(|shape| gradient(step, shape.iter().product())).collect();
    let gradients: Vec<_> = gradients.iter().enumerate().map(|(p, g)| (p, vec![&g[..]])).collect();
    let pushed = match pulls {
        false => client.push(&gradients, Measured::default()),
        true => client.push_pull(&gradients, Measured::default(), &mut |_, _, _| {}),
    };
    assert!(pushed.unwrap().applied);
}

/// What two workers make of the weights, of which one reads less often, and pushes what is old.
fn weights(run: &Run, transport: Transport, files: Files) -> Vec<Vec<u32>> {
    let mut lab = Lab::idle(1, transport);
    lab.serve(files.clone());
    let initial = |parameter: usize| gradient(99, zeros(run, parameter).len());
    let join = |worker| Client::join(run, lab.options(worker), &initial).unwrap();
    let (mut stays, mut leaves) = (join(0), join(1));
    for client in [&mut stays, &mut leaves] {
        client.pull(None, &mut |_, _, _| {}).unwrap();
    }
    for step in 0..4 {
        push(&mut stays, run, step, true);
        if step % 2 == 1 {
            push(&mut leaves, run, 100 + step, step == 1);
        }
    }
    // From here on even two cores are enough for threads to share updates.
    leaves.leave();
    for step in 4..6 {
        push(&mut stays, run, step, true);
    }
    let bits = |weights: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
        weights.iter().map(|w| w.iter().map(|w| w.to_bits()).collect()).collect()
    };
    let weights = bits(lab.weights(run));
    if files.journal.is_some() {
        drop(stays);
        lab.servers[0] = None;
        lab.serve(files);
        assert!(bits(lab.weights(run)) == weights, "the journal has other weights");
    }
    weights
}

#[test]
fn weights_are_those_of_a_server_that_makes_gradients_whole() {
    let cases = [
        (None, "keep"),
        (None, "compensate:0.5"),
        (Some("int8"), "scale"),
        (Some("int8:stochastic"), "compensate:0.5"),
        (Some("int4"), "keep"),
        (Some("qsgd:4"), "scale"),
        (Some("sign"), "compensate:0.5"),
        (Some("fp16"), "keep"),
        (Some("bf16"), "compensate:0.5"),
        (Some("topk:0.01"), "compensate:0.5"),
        (Some("randk:0.01"), "keep"),
    ];
    for (number, (codec, stale)) in cases.into_iter().enumerate() {
        within("pushes", move || {
            let name = OptimizerSpec::NAMES[number % OptimizerSpec::NAMES.len()];
            let run = run(name.parse().unwrap(), codec, stale);
            let dir = tempfile::tempdir().unwrap();
            let journal = Some(dir.path().join("journal"));
            let whole = weights(&run, TRANSPORTS[0], Files { journal, ..Files::default() });
            for transport in TRANSPORTS {
                let fused = weights(&run, transport, Files::default());
                assert!(fused == whole, "{name} {codec:?} {stale} {transport:?}");
            }
        });
    }
}

/// One of the parts cannot be decoded, at its very end: nothing of the push is applied, not even what could be.
#[test]
fn a_push_that_cannot_be_decoded_leaves_the_weights() {
    for codec in ["int8", "sign", "qsgd:4", "fp16", "topk:0.01"] {
        for keeps_journal in [false, true] {
            within(codec, move || {
                let spec: CodecSpec = codec.parse().unwrap();
                let codec = spec.build();
                let dir = tempfile::tempdir().unwrap();
                let journal = keeps_journal.then(|| dir.path().join("journal"));
                let mut lab = Lab::idle(1, Transport::Tcp);
                lab.serve(Files { journal, ..Files::default() });
                let shapes = SHAPES.map(|length| vec![length]).to_vec();
                let mut run = Run::new(shapes, descent(1.0), "async".parse().unwrap());
                run.codecs = vec![Some(spec); 2];
                (run.workers, run.shards) = (2, 2);
                lab.client(&run, 0).leave();
                let codecs = run.codecs.clone();
                let setup = Setup { codecs, ..crate::lab::setup(&run, 1) };
                let mut link = lab.stranger(0, 1, 1);
                let reply = call(&mut link, &Request::Join { run: setup.fingerprint() }, &[]);
                assert!(matches!(reply, Some(Reply::Joined { .. })), "{reply:?}");
                let reply = call(&mut link, &Request::Enter { clock: Clock(0) }, &[]);
                assert_eq!(reply, Some(Reply::Done));
                let good: Vec<Vec<u8>> =
                    (0..2).map(|piece| encode(&codec, &setup.pieces[piece].shape, piece)).collect();
                let before = lab.weights(&run);
                for bad in 0..2 {
                    for damage in [damaged, cut] {
                        let mut bytes = good.clone();
                        damage(&mut bytes[bad], codec.as_ref());
                        let reply = call(&mut link, &request(&bytes), &slices(&bytes));
                        assert!(matches!(reply, Some(Reply::Invalid(_))), "{reply:?}");
                        assert_eq!(lab.weights(&run), before);
                    }
                }
                // It was not taken for settled.
                let reply = call(&mut link, &request(&good), &slices(&good));
                assert!(matches!(reply, Some(Reply::Pushed { applied: true, .. })), "{reply:?}");
                assert_ne!(lab.weights(&run), before);
            });
        }
    }
}

fn encode(codec: &std::sync::Arc<dyn Codec>, shape: &[usize], piece: usize) -> Vec<u8> {
    let origin = Origin { shape: shape.to_vec(), parameter: piece, seed: 0, worker: 1, mean_of: 1 };
    let mut bytes = Vec::new();
    let values = gradient(piece as u64, shape.iter().product());
    Sender::new(codec.clone(), origin, false).encode(
        0,
        &values,
        &mut Scratch::default(),
        &mut bytes,
    );
    bytes
}

/// The last block's scale, or where there is none the length, becomes one that no encoder writes.
fn damaged(bytes: &mut Vec<u8>, codec: &dyn Codec) {
    match codec.passage() {
        unisono_codec::Passage::Spans(spans) => {
            let elements = SHAPES.iter().find(|n| spans.bytes(**n) == bytes.len()).unwrap();
            let last = spans.bytes(elements / spans.block() * spans.block());
            bytes[last..last + 2].fill(0xff);
            let end = (last + 4).min(bytes.len());
            bytes[last + 2..end].fill(0xff);
        }
        unisono_codec::Passage::Summed(_) => drop(bytes.pop()),
        unisono_codec::Passage::Gathered(_) => bytes[..4].fill(0xff),
    }
}

fn cut(bytes: &mut Vec<u8>, _: &dyn Codec) {
    bytes.pop();
}

fn request(bytes: &[Vec<u8>]) -> Request {
    let part = |(piece, bytes): (usize, &Vec<u8>)| Part {
        piece: piece as u32,
        vectors: 1,
        bytes: bytes.len() as u64,
        encoded: true,
    };
    let push = PushId { worker: 1, life: Life(1), number: 1, clock: Clock(0) };
    let parts = bytes.iter().enumerate().map(part).collect();
    Request::Push { push, measured: Measured::default(), parts }
}

fn slices(bytes: &[Vec<u8>]) -> Vec<&[u8]> {
    bytes.iter().map(Vec::as_slice).collect()
}
