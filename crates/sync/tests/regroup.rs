//! Workers that go on in another group: after a step, in the middle of one, with more or fewer of them,
//! and what becomes of what a strategy remembers.

use std::collections::HashMap;
use std::sync::Barrier;
use std::time::Instant;

use unisono_collective::{Group, Options, Transport};
use unisono_sync::bucket::BucketSizes;
use unisono_sync::strategy::Compression;
use unisono_sync::{Parameter, Settings, SyncError, Synchronizer};

const SHARDS: usize = 8;
const STEPS: u64 = 6;

fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 4] = [&[40, 30], &[30], &[64, 32], &[7]];
    let named = shapes.iter().enumerate();
    named.map(|(i, s)| Parameter { name: format!("p{i}"), shape: s.to_vec() }).collect()
}

fn settings() -> Settings {
    let mut settings = Settings::new(SHARDS);
    // A bucket for every parameter.
    settings.buckets = Some(BucketSizes { first: 0, others: 0 });
    settings.withhold = true;
    settings
}

fn compressed(codec: &str) -> Settings {
    let compression = Compression { seed: 7, ..Compression::new(codec.parse().unwrap()) };
    Settings { compression: Some(compression), ..settings() }
}

fn noise(seed: u64) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// A worker with weights of its own, and plain descent.
#[derive(Clone)]
struct Model(Vec<Vec<f32>>);

impl Model {
    fn new() -> Model {
        Model(parameters().iter().map(|p| vec![0.1; p.elements()]).collect())
    }

    fn gradient(&self, step: u64, shard: usize, parameter: usize) -> Vec<f32> {
        let seed = ((step * 100 + shard as u64) * 10 + parameter as u64) * 20_000;
        let element = |(i, w): (usize, &f32)| w * 0.3 + noise(seed + i as u64);
        self.0[parameter].iter().enumerate().map(element).collect()
    }

    /// Hands over gradients of a step until all `given` of them are, counted over its shards; whether that
    /// was all.
    fn compute(&self, sync: &Synchronizer, step: u64, mut given: usize) -> bool {
        for _ in sync.shards() {
            let shard = sync.begin_shard();
            sync.begin_backward(noise(step + shard as u64));
            for parameter in (0..self.0.len()).rev() {
                if given == 0 {
                    return false;
                }
                given -= 1;
                assert!(sync.gradient(parameter, &self.gradient(step, shard, parameter)));
            }
            sync.end_shard();
        }
        true
    }

    fn finish(&mut self, sync: &Synchronizer) -> Result<(), SyncError> {
        sync.finish(|parameter, gradient| {
            let weights = self.0[parameter].iter_mut().zip(gradient);
            weights.for_each(|(weight, gradient)| *weight -= 0.1 * gradient);
        })
        .map(drop)
    }

    fn train(&mut self, sync: &Synchronizer, steps: std::ops::Range<u64>) {
        for step in steps {
            assert!(self.compute(sync, step, usize::MAX));
            self.finish(sync).unwrap();
        }
    }

    fn bits(&self) -> Vec<u32> {
        self.0.iter().flatten().map(|weight| weight.to_bits()).collect()
    }
}

/// What one worker makes of a whole run.
fn undisturbed(settings: Settings) -> Vec<u32> {
    let sync = Synchronizer::new(None, parameters(), settings).unwrap();
    let mut model = Model::new();
    model.train(&sync, 0..STEPS);
    model.bits()
}

/// Runs a worker on each rank of the larger of two groups; a rank that is not in one gets `None`.
fn in_two_groups<R: Send>(
    before: usize,
    after: usize,
    transport: Transport,
    worker: impl Fn(Option<Group>, Option<Group>) -> R + Sync,
) -> Vec<R> {
    let mut options = Options::default();
    options.transport = transport;
    let mut first = Group::local(before, &options).unwrap().into_iter();
    let mut second = Group::local(after, &options).unwrap().into_iter();
    std::thread::scope(|scope| {
        let worker = &worker;
        let ranks: Vec<_> = (0..before.max(after))
            .map(|_| (first.next(), second.next()))
            .map(|(before, after)| scope.spawn(move || worker(before, after)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn workers_go_on_after_a_step_with_more_or_fewer() {
    let expected = undisturbed(settings());
    // Those that join have the weights of the others; how they got them is of no interest here.
    let mut at_three = Model::new();
    at_three.train(&Synchronizer::new(None, parameters(), settings()).unwrap(), 0..3);
    for transport in [Transport::Shm, Transport::Tcp] {
        for (before, after) in [(1, 1), (1, 3), (2, 4), (3, 2), (4, 1), (4, 3), (3, 3)] {
            let all = in_two_groups(before, after, transport, |first, second| {
                let sync = Synchronizer::new(first.as_ref(), parameters(), settings()).unwrap();
                let mut model = at_three.clone();
                match &first {
                    Some(_) => {
                        model = Model::new();
                        model.train(&sync, 0..3);
                    }
                    None => sync.go_on_from(3),
                }
                let (sent, second) = (sync.sent(), second?);
                sync.regroup(Some(&second)).unwrap();
                assert!(sync.sent() >= sent);
                model.train(&sync, 3..STEPS);
                Some(model.bits())
            });
            assert_eq!(all.iter().flatten().count(), after);
            assert!(all.iter().flatten().all(|bits| *bits == expected), "{before} to {after}");
        }
    }
}

#[test]
fn a_worker_may_go_on_alone_and_meet_others_again() {
    let expected = undisturbed(settings());
    let all = in_two_groups(2, 2, Transport::Auto, |first, second| {
        let sync = Synchronizer::new(first.as_ref(), parameters(), settings()).unwrap();
        let mut model = Model::new();
        model.train(&sync, 0..2);
        sync.regroup(None).unwrap();
        assert_eq!(sync.shards(), 0..SHARDS);
        model.train(&sync, 2..4);
        sync.regroup(second.as_ref()).unwrap();
        model.train(&sync, 4..STEPS);
        model.bits()
    });
    assert_eq!(all, [expected.clone(), expected]);
}

/// Every rank is at another point of a step when the group changes: the first at the given one, the
/// second before it has begun, the third at its end. No rank has failed, so the exchanges that the
/// first and the third have begun would wait for ever.
#[test]
fn a_step_is_dropped_wherever_a_worker_is_in_it() {
    let expected = undisturbed(settings());
    let gradients = parameters().len() * SHARDS.div_ceil(3);
    for transport in [Transport::Shm, Transport::Tcp] {
        for given in 0..=gradients {
            // A rank that gives up its step takes the one before from none that is still in it.
            let have_trained = Barrier::new(3);
            let all = in_two_groups(3, 3, transport, |first, second| {
                let (first, second) = (first.unwrap(), second.unwrap());
                let sync = Synchronizer::new(Some(&first), parameters(), settings()).unwrap();
                let mut model = Model::new();
                model.train(&sync, 0..3);
                have_trained.wait();
                match first.rank() {
                    0 => drop(model.compute(&sync, 3, given)),
                    1 => {}
                    _ => assert!(model.compute(&sync, 3, usize::MAX)),
                }
                let start = Instant::now();
                sync.regroup(Some(&second)).unwrap();
                let took = start.elapsed();
                model.train(&sync, 3..STEPS);
                (model.bits(), took)
            });
            for (bits, took) in all {
                assert!(bits == expected, "{transport} {given}");
                // No rank has waited for another until it was lost.
                assert!(took < Options::default().timeout, "{transport} {given}: {took:?}");
            }
        }
    }
}

#[test]
fn a_vote_to_stop_survives_the_step_it_was_cast_in() {
    let all = in_two_groups(2, 2, Transport::Auto, |first, second| {
        let (first, second) = (first.unwrap(), second.unwrap());
        let sync = Synchronizer::new(Some(&first), parameters(), settings()).unwrap();
        let model = Model::new();
        if first.rank() == 1 {
            sync.vote_to_stop();
            sync.vote_to_regroup();
        }
        model.compute(&sync, 0, usize::MAX);
        sync.regroup(Some(&second)).unwrap();
        model.compute(&sync, 0, usize::MAX);
        let outcome = sync.finish(|_, _| {}).unwrap();
        (outcome.stop, outcome.regroup)
    });
    assert_eq!(all, [(true, false); 2]);
}

#[test]
fn a_group_that_fails_while_workers_regroup_is_followed_by_the_next() {
    let expected = undisturbed(settings());
    let mut lost = Group::local(3, &Options::default()).unwrap();
    // The third rank is lost before it has said anything.
    drop(lost.pop());
    let have_trained = Barrier::new(2);
    let all = in_two_groups(2, 2, Transport::Auto, |first, second| {
        let sync = Synchronizer::new(first.as_ref(), parameters(), settings()).unwrap();
        let mut model = Model::new();
        model.train(&sync, 0..3);
        have_trained.wait();
        model.compute(&sync, 3, 5);
        let failing = &lost[first.as_ref().unwrap().rank()];
        match sync.regroup(Some(failing)) {
            Err(SyncError::Group(_) | SyncError::Form(_)) => {}
            other => panic!("{other:?}"),
        }
        // Between two groups no step is taken, and none does harm.
        assert!(model.compute(&sync, 3, usize::MAX));
        assert!(matches!(model.finish(&sync), Err(SyncError::NoGroup)));
        sync.regroup(second.as_ref()).unwrap();
        model.train(&sync, 3..STEPS);
        model.bits()
    });
    assert_eq!(all, [expected.clone(), expected]);
}

#[test]
fn another_model_is_refused_in_a_new_group_too() {
    let all = in_two_groups(2, 3, Transport::Auto, |first, second| {
        let mut parameters = parameters();
        if first.is_none() {
            parameters.pop();
        }
        let sync = Synchronizer::new(first.as_ref(), parameters, settings()).unwrap();
        matches!(sync.regroup(second.as_ref()), Err(SyncError::DifferentModels { .. }))
    });
    assert_eq!(all, [true; 3]);
}

/// What becomes of a codec when three workers go on as two after so many steps.
fn regrouped(settings: &Settings, after: u64) -> Vec<Result<Vec<u32>, SyncError>> {
    let all = in_two_groups(3, 2, Transport::Auto, |first, second| {
        let sync = Synchronizer::new(first.as_ref(), parameters(), settings.clone()).unwrap();
        let mut model = Model::new();
        model.train(&sync, 0..after);
        let second = second?;
        Some(sync.regroup(Some(&second)).map(|()| {
            model.train(&sync, after..STEPS);
            model.bits()
        }))
    });
    all.into_iter().flatten().collect()
}

#[test]
fn a_codec_survives_if_it_remembers_nothing() {
    let survives = |settings: &Settings, after: u64| {
        let expected = undisturbed(settings.clone());
        let outcomes = regrouped(settings, after);
        assert_eq!(outcomes.len(), 2);
        let survived = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        for outcome in outcomes {
            match outcome {
                Ok(bits) => assert!(bits == expected, "{settings:?} after {after}"),
                Err(SyncError::StateLost { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert!(survived == 0 || survived == 2, "all ranks decide alike");
        survived == 2
    };
    for codec in ["fp16", "int8", "int8:stochastic", "topk:5%", "randk:10%", "powersgd:2"] {
        assert!(survives(&compressed(codec), 0), "{codec}: before the first step");
        let mut warm = compressed(codec);
        warm.compression.as_mut().unwrap().warm_up = 3;
        assert!(survives(&warm, 3), "{codec}: before the first encoding");
        // Rounding to fp16 leaves nothing out that is worth a residual.
        assert_eq!(survives(&warm, 4), codec == "fp16", "{codec}: after the first encoding");
    }
    for (codec, expected) in
        [("fp16", true), ("int8", true), ("topk:5%", true), ("dgc:2%,momentum=0.9", false)]
    {
        let mut settings = compressed(codec);
        let compression = settings.compression.as_mut().unwrap();
        (compression.error_feedback, compression.relative) = (false, Some(false));
        assert_eq!(survives(&settings, 2), expected, "{codec} without residuals");
    }
}

#[test]
fn what_a_codec_has_lost_can_be_restored() {
    let settings = compressed("topk:5%");
    let expected = undisturbed(settings.clone());
    let saved = std::sync::Mutex::new(HashMap::new());
    let all = in_two_groups(3, 2, Transport::Auto, |first, second| {
        let sync = Synchronizer::new(first.as_ref(), parameters(), settings.clone()).unwrap();
        let mut model = Model::new();
        model.train(&sync, 0..2);
        let checkpoint = model.clone();
        let mut keep =
            |name, _, values: &[f32]| _ = saved.lock().unwrap().insert(name, values.to_vec());
        sync.save(first.as_ref().unwrap(), &mut keep).unwrap();
        model.train(&sync, 2..4);
        let second = second?;
        assert!(matches!(sync.regroup(Some(&second)), Err(SyncError::StateLost { .. })));
        let find = |name: &str| saved.lock().unwrap().get(name).cloned();
        sync.restore(&second, &find).unwrap();
        sync.go_on_from(2);
        let mut model = checkpoint;
        model.train(&sync, 2..STEPS);
        Some(model.bits())
    });
    assert_eq!(all, [Some(expected.clone()), Some(expected), None]);
}

#[test]
fn what_workers_with_local_steps_have_agreed_on_is_lost() {
    for spec in ["local:3", "diloco:2,delay=1"] {
        let settings = Settings { strategy: spec.parse().unwrap(), ..settings() };
        let all = in_two_groups(3, 2, Transport::Auto, |first, second| {
            let sync = Synchronizer::new(first.as_ref(), parameters(), settings.clone()).unwrap();
            let mut model = Model::new();
            sync.begin(&model.0);
            for step in 0..3 {
                model.compute(&sync, step, usize::MAX);
                let mut outcome = sync
                    .finish(|parameter, gradient| {
                        let weights = model.0[parameter].iter_mut().zip(gradient);
                        weights.for_each(|(weight, gradient)| *weight -= 0.1 * gradient);
                    })
                    .unwrap();
                // The third is lost while the others wait for it.
                if step < 2 || first.as_ref().unwrap().rank() < 2 {
                    let _ = sync.agree(&mut model.0, &mut outcome);
                }
            }
            let lost = second.map(|second| sync.regroup(Some(&second)));
            lost.is_none_or(|lost| matches!(lost, Err(SyncError::StateLost { .. })))
        });
        assert_eq!(all, [true; 3], "{spec}");
    }
}

/// A worker that gets the weights of another beside the training must know before its first step whether that is
/// all that it needs.
#[test]
fn a_worker_in_no_group_knows_whether_the_strategy_remembers_anything() {
    let with_topk = Settings {
        compression: compressed("topk:1%").compression.map(|it| Compression { warm_up: 9, ..it }),
        ..settings()
    };
    let local = Settings { strategy: "local:3".parse().unwrap(), ..settings() };
    for (settings, nothing) in [
        (settings(), true),
        (compressed("fp16"), true),
        (compressed("bf16"), true),
        (compressed("int8"), false),
        (with_topk, false),
        (local, false),
    ] {
        let sync = Synchronizer::new(None, parameters(), settings.clone()).unwrap();
        assert_eq!(sync.remembers_nothing(), nothing, "{settings:?}");
    }
}
