//! Whole steps of a made-up model with every codec: the weights are the same for any number of
//! workers, a run goes on from a saved state with any number of workers, and residuals pay what an
//! encoding leaves out.

use std::collections::HashMap;

use unisono_codec::{CodecSpec, Rule};
use unisono_collective::{Group, Options, Transport};
use unisono_sync::bucket::BucketSizes;
use unisono_sync::strategy::Compression;
use unisono_sync::{Parameter, Settings, Synchronizer};

const SHARDS: usize = 4;
const STEPS: u64 = 9;

/// One of every kind, and some chains.
const CODECS: [&str; 18] = [
    "fp16",
    "bf16",
    "int8",
    "int8:stochastic",
    "int4",
    "int4:stochastic",
    "qsgd:3",
    "sign",
    "topk:5%",
    "topk:5%,exact",
    "topk:5%+int8",
    "randk:10%",
    "randk:10%+bf16",
    "dgc:2%,momentum=0.9",
    "dgc:2%,ramp=5+fp16",
    "powersgd:2",
    "powersgd:1+fp16",
    "powersgd:4",
];

/// Never has a gradient.
const UNUSED: usize = 3;
/// Has one in every other step.
const RARE: usize = 4;

fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 6] = [&[40, 70], &[70], &[16, 8, 3, 3], &[64, 64], &[50, 30], &[9, 999]];
    let parameter =
        |(i, shape): (usize, &&[usize])| Parameter { name: format!("p{i}"), shape: shape.to_vec() };
    shapes.iter().enumerate().map(parameter).collect()
}

fn compression(codec: &str) -> Compression {
    Compression { seed: 7, ..Compression::new(codec.parse().unwrap()) }
}

/// A number that looks random, in −1..1.
fn noise(seed: u64) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// The gradient of a parameter in one shard of a step: it depends on the weights, so that any
/// difference grows.
fn gradient(step: u64, shard: usize, parameter: usize, weights: &[f32]) -> Option<Vec<f32>> {
    if parameter == UNUSED || (parameter == RARE && !step.is_multiple_of(2)) {
        return None;
    }
    let seed = ((step * 100 + shard as u64) * 10 + parameter as u64) * 20_000;
    let target = |i: usize| noise(parameter as u64 * 77_777 + i as u64);
    let element = |(i, w): (usize, &f32)| (w - target(i)) + 0.5 * noise(seed + i as u64);
    Some(weights.iter().enumerate().map(element).collect())
}

/// What a run saves.
type Saved = HashMap<String, Vec<f32>>;

/// One worker's part of a run.
struct Run<'a> {
    compression: &'a Compression,
    buckets: BucketSizes,
    from: Option<(u64, &'a Saved)>,
    until: u64,
}

/// The weights after a run, by rank, and what rank 0 saved.
fn train(workers: usize, transport: Transport, run: &Run) -> (Vec<Vec<Vec<f32>>>, Saved) {
    let mut options = Options::default();
    options.transport = transport;
    let groups = Group::local(workers, &options).unwrap();
    let all: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            groups.iter().map(|group| scope.spawn(move || worker(group, run))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let mut saved = Saved::new();
    let mut weights = Vec::new();
    for (rank, state) in all {
        weights.push(rank);
        saved.extend(state);
    }
    (weights, saved)
}

fn worker(group: &Group, run: &Run) -> (Vec<Vec<f32>>, Saved) {
    let mut settings = Settings::new(SHARDS);
    settings.buckets = Some(run.buckets);
    settings.compression = Some(run.compression.clone());
    let parameters = parameters();
    let synchronizer = Synchronizer::new(Some(group), parameters.clone(), settings).unwrap();
    let mut weights: Vec<Vec<f32>> = parameters.iter().map(|p| vec![0.1; p.elements()]).collect();
    let mut first = 0;
    if let Some((step, saved)) = run.from {
        first = step;
        for (weights, parameter) in weights.iter_mut().zip(&parameters) {
            weights.copy_from_slice(&saved[&format!("weights.{}", parameter.name)]);
        }
        let find = |name: &str| match group.rank() {
            0 => saved.get(name).cloned(),
            _ => None,
        };
        synchronizer.restore(group, &find).unwrap();
        synchronizer.go_on_from(step);
    }
    for step in first..run.until {
        for _ in synchronizer.shards() {
            let shard = synchronizer.begin_shard();
            synchronizer.begin_backward(1.0);
            for parameter in (0..parameters.len()).rev() {
                if let Some(gradient) = gradient(step, shard, parameter, &weights[parameter]) {
                    synchronizer.gradient(parameter, &gradient);
                }
            }
            synchronizer.end_shard();
        }
        let outcome = synchronizer.finish(|parameter, mean| {
            weights[parameter].iter_mut().zip(mean).for_each(|(w, g)| *w -= 0.1 * g);
        });
        assert_eq!(outcome.unwrap().loss, 1.0);
    }
    let mut saved = Saved::new();
    synchronizer
        .save(group, &mut |name, _, values| {
            assert!(saved.insert(name, values.to_vec()).is_none(), "a name is saved once");
        })
        .unwrap();
    for (weights, parameter) in weights.iter().zip(&parameters) {
        saved.insert(format!("weights.{}", parameter.name), weights.clone());
    }
    (weights, saved)
}

fn bits(weights: &[Vec<f32>]) -> Vec<Vec<u32>> {
    weights.iter().map(|values| values.iter().map(|x| x.to_bits()).collect()).collect()
}

const SMALL: BucketSizes = BucketSizes { first: 4000, others: 20_000 };

fn run(compression: &Compression) -> Run<'_> {
    Run { compression, buckets: SMALL, from: None, until: STEPS }
}

#[test]
fn any_number_of_workers_gives_the_bits_of_one() {
    for codec in CODECS {
        let compression = compression(codec);
        let (alone, saved) = train(1, Transport::Auto, &run(&compression));
        assert!(alone[0].iter().flatten().all(|w| w.is_finite()));
        for (workers, transport) in [(2, Transport::Shm), (3, Transport::Tcp), (4, Transport::Shm)]
        {
            let (weights, theirs) = train(workers, transport, &run(&compression));
            for (rank, weights) in weights.iter().enumerate() {
                assert!(
                    bits(weights) == bits(&alone[0]),
                    "{codec}, {workers} workers, rank {rank}"
                );
            }
            assert_eq!(saved.len(), theirs.len());
            for (name, values) in &saved {
                let same =
                    values.iter().map(|x| x.to_bits()).eq(theirs[name].iter().map(|x| x.to_bits()));
                assert!(same, "{codec}: {name}");
            }
        }
    }
}

#[test]
fn buckets_and_warm_up_change_what_they_should() {
    for codec in ["int8", "topk:5%", "powersgd:2"] {
        let compression = compression(codec);
        let small = train(2, Transport::Shm, &run(&compression)).0;
        let one = BucketSizes { first: 1 << 20, others: 1 << 20 };
        let large = train(2, Transport::Shm, &Run { buckets: one, ..run(&compression) }).0;
        assert!(bits(&small[0]) == bits(&large[0]), "{codec}: buckets change no bit");

        // Longer than the run: nothing is encoded, and the bits are those of an exact mean.
        let mut never = compression.clone();
        never.warm_up = STEPS;
        let mut none = compression.clone();
        none.rules.codec = None;
        let never = train(2, Transport::Shm, &run(&never)).0;
        let none = train(2, Transport::Shm, &run(&none)).0;
        assert!(bits(&never[0]) == bits(&none[0]), "{codec}: a warm-up is exact");
        assert!(bits(&never[0]) != bits(&small[0]), "{codec} does encode");
    }
}

#[test]
fn a_run_goes_on_with_other_workers() {
    for codec in CODECS {
        let compression = compression(codec);
        let whole = train(2, Transport::Shm, &run(&compression)).0;
        let half = Run { until: 4, ..run(&compression) };
        let (_, saved) = train(3, Transport::Shm, &half);
        let rest = Run { from: Some((4, &saved)), ..run(&compression) };
        for workers in [1, 4] {
            let (weights, _) = train(workers, Transport::Shm, &rest);
            assert!(bits(&weights[0]) == bits(&whole[0]), "{codec}, {workers} workers");
        }
    }
}

/// The mean distance of the weights from where the gradients vanish.
fn distance(weights: &[Vec<f32>]) -> f64 {
    let mut sum = (0.0, 0);
    for (parameter, weights) in weights.iter().enumerate().filter(|(p, _)| *p != UNUSED) {
        for (i, weight) in weights.iter().enumerate() {
            let target = noise(parameter as u64 * 77_777 + i as u64);
            sum = (sum.0 + f64::from((weight - target).abs()), sum.1 + 1);
        }
    }
    sum.0 / f64::from(sum.1)
}

#[test]
fn residuals_make_biased_codecs_converge() {
    let long = |compression: &Compression| {
        let run = Run { until: 120, ..run(compression) };
        distance(&train(1, Transport::Auto, &run).0[0])
    };
    let mut dense = compression("fp16");
    dense.rules.codec = None;
    let dense = long(&dense);
    for codec in ["int4", "sign", "topk:5%", "randk:10%", "powersgd:2", "dgc:2%"] {
        let mut compression = compression(codec);
        let with = long(&compression);
        compression.error_feedback = false;
        let without = long(&compression);
        assert!(with < 4.0 * dense, "{codec}: {with} against {dense}");
        // The others get away without, on a task as simple as this.
        if !["int4", "sign"].contains(&codec) {
            assert!(without > 1.5 * with, "{codec}: {without} without residuals, {with} with");
        }
    }
}

#[test]
fn fewer_bytes_are_sent_and_exceptions_hold() {
    let sent = |rules: &[&str], codec: Option<&str>| {
        let groups = Group::local(2, &Options::default()).unwrap();
        let each = |group: &Group| {
            let mut compression = compression(codec.unwrap_or("fp16"));
            compression.rules.codec = codec.map(|codec| codec.parse::<CodecSpec>().unwrap());
            compression.rules.exceptions =
                rules.iter().map(|rule| rule.parse::<Rule>().unwrap()).collect();
            let mut settings = Settings::new(2);
            settings.compression = Some(compression);
            let big = Parameter { name: "big".into(), shape: vec![500, 1000] };
            let synchronizer = Synchronizer::new(Some(group), vec![big], settings).unwrap();
            let values: Vec<f32> = (0..500_000).map(noise).collect();
            let step = || {
                let before = synchronizer.sent();
                synchronizer.begin_shard();
                synchronizer.begin_backward(0.0);
                synchronizer.gradient(0, &values);
                synchronizer.end_shard();
                synchronizer.finish(|_, _| ()).unwrap();
                synchronizer.sent() - before
            };
            // The first also measures the usual size of the gradients, as one in sixteen does.
            (0..16).map(|_| step()).sum::<u64>() / 16
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.iter().map(|g| scope.spawn(move || each(g))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).sum::<u64>()
        })
    };
    let dense = sent(&[], None) as f64;
    assert!(dense >= 2.0 * 2_000_000.0);
    for (codec, ratio) in
        [("fp16", 1.95), ("int8", 3.9), ("int4", 7.5), ("sign", 30.0), ("topk:1%", 60.0)]
    {
        let encoded = sent(&[], Some(codec)) as f64;
        assert!(dense / encoded >= ratio, "{codec}: {:.1}", dense / encoded);
    }
    assert!(sent(&["b*=none"], Some("sign")) as f64 >= dense);
    assert!(dense / (sent(&["b*=int8"], None) as f64) >= 3.9);
}

/// A user who misspelt a name would go on in the belief that the parameter is sent as it is.
#[test]
fn a_rule_that_fits_no_parameter_is_refused() {
    let mut compression = compression("sign");
    compression.rules.exceptions = vec!["p1=none".parse().unwrap(), "q*=none".parse().unwrap()];
    for strategy in ["all-reduce", "local:4"] {
        let mut settings = Settings::new(SHARDS);
        settings.strategy = strategy.parse().unwrap();
        settings.compression = Some(compression.clone());
        let refused = Synchronizer::new(None, parameters(), settings).err().expect("refused");
        let words = "the codec rule q*=none fits no parameter; the parameters are p0, p1, p2";
        assert!(refused.to_string().starts_with(words), "{refused}");
    }
}

#[test]
fn a_step_says_whether_its_codec_was_in_force() {
    for strategy in ["all-reduce", "local:4"] {
        let mut settings = Settings::new(2);
        settings.strategy = strategy.parse().unwrap();
        settings.compression = Some(Compression { warm_up: 2, ..compression("sign") });
        let sync = Synchronizer::new(None, parameters(), settings).unwrap();
        let encoded = [(); 4].map(|()| {
            for _ in sync.shards() {
                sync.begin_shard();
                sync.begin_backward(0.0);
                sync.end_shard();
            }
            sync.finish(|_, _| ()).unwrap().encoded
        });
        assert_eq!(encoded, [Some(false), Some(false), Some(true), Some(true)], "{strategy}");
    }
}
