use std::borrow::Cow;
use std::sync::Barrier;

use super::*;
use crate::server::crew::Crew;
use crate::server::link::Bulk;
use crate::server::link::tests::in_common_memory;
use crate::server::mean::Mean;
use unisono_codec::sender::{Origin, Scratch, Sender, decode};
use unisono_codec::{Blockwise, CodecSpec};
use unisono_collective::tree::Tree;
use unisono_optimizer::LearningRate;

/// Of a few elements per block, so that a piece has several.
fn store(optimizer: &str, weights: Vec<Vec<f32>>) -> Store {
    let spec = optimizer.parse::<OptimizerSpec>().unwrap();
    Store::with_blocks(&spec.with_learning_rate(LearningRate::Constant(1.0)), weights, 4)
}

#[test]
fn a_reader_keeps_its_version() {
    let store = store("sgd", vec![vec![0.0; 6]]);
    let (version, before) = store.read(0, 0);
    store.apply_one(0, 1, 1.0, &[1.0; 6]);
    store.apply_one(0, 2, 0.5, &[1.0; 6]);
    assert_eq!((version, before.to_vec()), (0, vec![0.0; 6]));
    let (version, after) = store.read(0, 2);
    assert_eq!((version, after.to_vec()), (2, vec![-1.5; 6]));
    assert_eq!(after.blocks().map(<[f32]>::len).collect::<Vec<_>>(), [4, 2]);
}

#[test]
fn memory_is_written_again_when_no_reader_has_it() {
    let store = store("sgd", vec![vec![0.0; 6]]);
    let places =
        |weights: &Weights| -> Vec<*const f32> { weights.blocks().map(<[f32]>::as_ptr).collect() };
    let first = places(&store.read(0, 0).1);
    store.apply_one(0, 1, 1.0, &[1.0; 6]);
    let kept = store.read(0, 1).1;
    assert_eq!(places(&kept), first, "no reader had it");

    store.apply_one(0, 2, 1.0, &[1.0; 6]);
    let other = places(&store.read(0, 2).1);
    store.apply_one(0, 3, 1.0, &[1.0; 6]);
    assert_eq!(places(&store.read(0, 3).1), other, "no reader had that");
    assert_eq!(kept.to_vec(), [-1.0; 6]);
    drop(kept);
    let also_kept = store.read(0, 3).1;
    store.apply_one(0, 4, 1.0, &[1.0; 6]);
    assert_eq!(places(&store.read(0, 4).1), first, "no reader has it any more");
    assert_eq!(also_kept.to_vec(), [-3.0; 6]);
    assert_eq!(store.read(0, 4).1.to_vec(), [-4.0; 6]);
}

/// A push that is shared is not over, and the next one already makes the pieces that this has made.
#[test]
fn overlapping_pushes_leave_no_second_copy() {
    let store = store("sgd", vec![vec![0.0; 6], vec![0.0; 9], vec![0.0; 3]]);
    let ones = [1.0; 9];
    let push = |version| {
        let change = |piece| {
            let length = store.read(piece, version - 1).1.to_vec().len();
            Change { piece, version, source: ones[..length].into(), by: None }
        };
        [0, 1, 2].map(change)
    };
    store.apply_shared(1.0, &push(1), |first| {
        first();
        store.apply_shared(1.0, &push(2), |second| {
            second();
            store.apply(1.0, &push(3));
        });
    });
    for (piece, pieces) in store.pieces.iter().enumerate() {
        assert!(store.read(piece, 3).1.blocks().flatten().all(|weight| *weight == -3.0));
        let older: Vec<usize> =
            pieces.blocks.iter().map(|block| block.lock().older.len()).collect();
        assert_eq!(older, vec![0; pieces.blocks.len()], "piece {piece}");
    }
}

#[test]
fn updates_wait_for_their_turn_and_readers_for_their_version() {
    let store = store("sgd", vec![vec![0.0; 10], vec![0.0; 2]]);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| store.read(0, 40).0);
        for half in [1u64, 0] {
            let store = &store;
            scope.spawn(move || {
                for version in (1..=40).filter(|version| version % 2 == half) {
                    store.apply_one(0, version, 1.0, &[version as f32; 10]);
                }
            });
        }
        assert_eq!(reader.join().unwrap(), 40);
    });
    assert_eq!(store.read(0, 40).1.to_vec(), [-820.0; 10]);
    assert_eq!(store.read(1, 0).0, 0);
}

#[test]
fn no_reader_sees_half_an_update() {
    const WRITERS: u64 = 3;
    let store = store("sgd", vec![vec![0.0; 1001]]);
    std::thread::scope(|scope| {
        let write = |writer: u64| {
            for version in (1..=600).filter(|version| version % WRITERS == writer) {
                store.apply_one(0, version, 1.0, &[1.0; 1001]);
            }
        };
        let spawn = |writer| scope.spawn(move || write(writer));
        let writers: Vec<_> = (0..WRITERS).map(spawn).collect();
        while !writers.iter().all(|writer| writer.is_finished()) {
            let (version, weights) = store.read(0, 0);
            assert!(weights.blocks().flatten().all(|weight| *weight == -(version as f32)));
        }
    });
    assert_eq!(store.read(0, 600).1.to_vec(), [-600.0; 1001]);
}

#[test]
fn blocks_change_no_bit() {
    let values = |seed: u32| -> Vec<f32> {
        (0..23u32).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 7.0 - 5.0).collect()
    };
    for optimizer in OptimizerSpec::NAMES {
        let spec = optimizer.parse::<OptimizerSpec>().unwrap();
        let mut whole = spec.build(&[23]).unwrap();
        let mut expected = values(0);
        let store = Store::with_blocks(&spec, vec![values(0)], 4);
        let resumed = Store::with_blocks(&spec, vec![vec![0.0; 23]], 4);
        for version in 1..=9u64 {
            let gradient = values(version as u32);
            whole.update_scaled(0, version, 0.5, &mut expected, &gradient);
            let by = if version > 5 { &resumed } else { &store };
            by.apply_one(0, version, 0.5, &gradient);
            if version == 5 {
                store.inspect(0, |version, weights, optimizer| {
                    resumed.restore(0, version, weights, optimizer).unwrap();
                });
            }
        }
        assert_eq!(resumed.read(0, 9).1.to_vec(), expected, "{optimizer}");
        let state = |_, _: &[f32], all: &[&[f32]]| all.iter().map(|v| v.to_vec()).collect();
        let state: Vec<Vec<f32>> = resumed.inspect(0, state);
        assert_eq!(state, whole.state(0), "{optimizer}");
    }
}

#[test]
fn a_gradient_is_compensated_by_what_has_changed_since() {
    let store = store("sgd", vec![vec![0.0; 6]]);
    let by = Compensation { lambda: 1.0, then: store.read(0, 0).1 };
    store.apply_one(0, 1, 1.0, &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
    let mut gradient = [1.0; 6];
    store.compensate(0, 2, &by, &mut gradient);
    assert_eq!(gradient, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn a_piece_may_be_empty() {
    let store = store("adamw", vec![Vec::new()]);
    store.apply_one(0, 1, 1.0, &[]);
    assert_eq!(store.read(0, 1), (1, Weights { blocks: [].into() }));
    store.inspect(0, |version, weights, _| assert_eq!((version, weights), (1, &[][..])));
}

/// Elements of a block of every codec, and no fewer.
const WHOLE: usize = 2048;

fn numbers(seed: u64, elements: usize) -> Vec<f32> {
    let at = |i: u64| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
    (0..elements as u64).map(at).collect()
}

/// An encoding of numbers, and what it is decoded to.
fn encoded(codec: &str, seed: u64, elements: usize) -> (Vec<u8>, Vec<f32>) {
    let codec = codec.parse::<CodecSpec>().unwrap().build();
    let origin = Origin { shape: vec![elements], parameter: 0, seed, worker: 0, mean_of: 1 };
    let (mut bytes, mut whole) = (Vec::new(), vec![0.0; elements]);
    let mut scratch = Scratch::default();
    let mut sender = Sender::new(codec.clone(), origin.clone(), false);
    sender.encode(1, &numbers(seed, elements), &mut scratch, &mut bytes);
    decode(&*codec, &origin.task(1), &bytes, &mut whole, &mut scratch).unwrap();
    (bytes, whole)
}

fn bits(store: &Store, piece: usize) -> Vec<u32> {
    store.inspect(piece, |_, weights, state| {
        let all = std::iter::once(weights).chain(state.iter().copied());
        all.flatten().map(|number| number.to_bits()).collect()
    })
}

/// A mean of three vectors where there should be four.
fn mean(vectors: &[Vec<f32>]) -> Mean<'_> {
    let [a, b, c] = vectors else { panic!("three vectors") };
    let inputs = vec![Some(&a[..]), None, Some(b), Some(c)];
    Mean::new(inputs, Cow::Owned(Tree::canonical(4)), 5, a.len())
}

/// Making a gradient, correcting it and updating block by block, by one thread or several, against one after the other.
#[test]
fn one_pass_has_the_bits_of_several() {
    const SOURCES: [&str; 11] = [
        "values",
        "common memory",
        "mean",
        "fp16",
        "bf16",
        "int8",
        "int8:stochastic",
        "int4",
        "qsgd:4",
        "qsgd:7",
        "sign",
    ];
    for optimizer in OptimizerSpec::NAMES {
        let spec = optimizer.parse::<OptimizerSpec>().unwrap();
        for source in SOURCES {
            let codec = source.parse::<CodecSpec>().ok().map(|codec| codec.build());
            for elements in [1, WHOLE, 3 * WHOLE + 1, 7 * WHOLE - 5] {
                for lambda in [None, Some(0.7)] {
                    let new = || Store::with_blocks(&spec, vec![numbers(9, elements)], WHOLE);
                    let expected = new();
                    let stores = [1, 2, 4].map(|threads| (threads, new()));
                    let compensation = |store: &Store| {
                        let then = store.read(0, 0).1;
                        lambda.map(|lambda| Compensation { lambda, then })
                    };
                    let read = compensation(&expected);
                    let reads = stores.each_ref().map(|(_, store)| compensation(store));
                    for version in 1..=3u64 {
                        let plain = numbers(version, elements);
                        let vectors = [1, 2, 3].map(|seed| numbers(10 * version + seed, elements));
                        let (encoding, mut whole) = match (source, &codec) {
                            (_, Some(_)) => encoded(source, version, elements),
                            ("mean", None) => (Vec::new(), mean(&vectors).whole()),
                            _ => (Vec::new(), plain.clone()),
                        };
                        let (_worker, mut server) = in_common_memory(&plain);
                        let there = server.bulk_or_places(&[(4 * elements, false)]).unwrap();
                        let [Bulk::There(place)] = there[..] else { panic!("it is copied") };
                        if let Some(by) = &read {
                            expected.compensate(0, version, by, &mut whole);
                        }
                        expected.apply_one(0, version, 0.5, &whole);
                        for ((threads, store), by) in stores.iter().zip(&reads) {
                            let source = match (source, &codec) {
                                (_, Some(codec)) => Source::Encoded(
                                    Blockwise::new(&**codec, &encoding, elements).unwrap().unwrap(),
                                ),
                                ("common memory", None) => Source::There(place),
                                ("mean", None) => Source::Mean(mean(&vectors)),
                                _ => Source::from(&plain[..]),
                            };
                            let change = Change { piece: 0, version, source, by: by.clone() };
                            // All at once, or the first would do it alone before the others begin.
                            let barrier = Barrier::new(*threads);
                            store.apply_shared(0.5, &[change], |work| {
                                let work = || {
                                    barrier.wait();
                                    work();
                                };
                                std::thread::scope(|scope| {
                                    (1..*threads).for_each(|_| drop(scope.spawn(work)));
                                    work();
                                });
                            });
                        }
                    }
                    for (threads, store) in &stores {
                        let what = format!("{optimizer} {source} {elements} {lambda:?} {threads}");
                        assert!(bits(store, 0) == bits(&expected, 0), "{what}");
                        assert_eq!(store.read(0, 3).0, 3, "{what}");
                    }
                }
            }
        }
    }
}

/// Several threads make each version, of which several are made at a time, and readers come in between.
#[test]
fn shared_updates_wait_for_their_turn() {
    const PIECES: [usize; 4] = [1001, 0, 3, 57];
    let store = store("sgd", PIECES.map(|length| vec![0.0; length]).to_vec());
    let (crew, next) = (Crew::default(), Mutex::new(0u64));
    std::thread::scope(|scope| {
        let write = || {
            loop {
                // As in a server: versions of all pieces are given out under one lock.
                let version = {
                    let mut next = next.lock().unwrap();
                    *next += 1;
                    *next
                };
                if version > 300 {
                    return;
                }
                let ones = PIECES.map(|length| vec![1.0; length]);
                let mut changes = Vec::new();
                for (piece, ones) in ones.iter().enumerate() {
                    changes.push(Change { piece, version, source: ones[..].into(), by: None });
                }
                store.apply_shared(1.0, &changes, |work| crew.share(version as usize % 4, 3, work));
            }
        };
        let writers: Vec<_> = (0..3).map(|_| scope.spawn(write)).collect();
        while !writers.iter().all(|writer| writer.is_finished()) {
            for piece in [0, 3] {
                let (version, weights) = store.read(piece, 0);
                assert!(weights.blocks().flatten().all(|weight| *weight == -(version as f32)));
            }
        }
    });
    for (piece, length) in PIECES.into_iter().enumerate() {
        assert_eq!(store.read(piece, 300).1.to_vec(), vec![-300.0; length]);
    }
}
