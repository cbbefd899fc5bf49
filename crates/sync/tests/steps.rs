//! Whole steps of a made-up model: the weights are the same for any number of workers, whatever the
//! buckets, the order in which gradients come, and which of them are missing.

use unisono_collective::{Group, Options, Rank, Transport};
use unisono_optimizer::OptimizerSpec;
use unisono_sync::accumulate::Leaf;
use unisono_sync::bucket::BucketSizes;
use unisono_sync::{Parameter, Settings, StepOutcome, SyncError, Synchronizer};

const SHARDS: usize = 8;
const STEPS: usize = 12;
const LENGTHS: [usize; 7] = [300, 1, 17, 1000, 0, 64, 5];
/// Of a model whose buckets workers read of each other in place.
const LARGE: [usize; 7] = [300_000, 1, 17, 400_001, 0, 64, 5];

/// Never has a gradient.
const UNUSED: usize = 5;
/// Has one in a single shard of every other step.
const RARE: usize = 2;

/// What one run is made of, besides the model.
#[derive(Clone, Debug)]
struct Variant {
    lengths: [usize; 7],
    workers: usize,
    transport: Transport,
    buckets: Option<BucketSizes>,
    overlap: bool,
    withhold: bool,
    /// Whether workers sum their gradients themselves.
    outside: bool,
}

impl Variant {
    fn new(workers: usize) -> Variant {
        let first = Some(BucketSizes { first: 40, others: 400 });
        let transport = Transport::Auto;
        Variant {
            lengths: LENGTHS,
            workers,
            transport,
            buckets: first,
            overlap: true,
            withhold: false,
            outside: false,
        }
    }
}

fn parameters(lengths: &[usize]) -> Vec<Parameter> {
    let parameter = |(i, len): (usize, &usize)| Parameter::flat(format!("p{i}"), *len);
    lengths.iter().enumerate().map(parameter).collect()
}

/// A number that looks random, in −1..1.
fn noise(seed: usize) -> f32 {
    let mut x = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// The gradient of a parameter in one shard of a step: it depends on the weights, so that any
/// difference grows.
fn gradient(step: usize, shard: usize, parameter: usize, weights: &[f32]) -> Option<Vec<f32>> {
    match parameter {
        UNUSED => return None,
        RARE if step.is_multiple_of(2) || shard != 6 => return None,
        _ => {}
    }
    let seed = ((step * 100 + shard) * 10 + parameter) * 5000;
    Some(weights.iter().enumerate().map(|(i, w)| w * 0.1 + noise(seed + i)).collect())
}

/// What came of a run on one rank.
struct Trained {
    weights: Vec<Vec<f32>>,
    losses: Vec<f32>,
    /// Which parameters were updated in each step.
    updates: Vec<Vec<usize>>,
}

fn train(variant: &Variant) -> Vec<Trained> {
    let mut options = Options::default();
    options.transport = variant.transport;
    let groups = Group::local(variant.workers, &options).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            groups.iter().map(|group| scope.spawn(move || worker(group, variant))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn worker(group: &Group, variant: &Variant) -> Trained {
    let mut settings = Settings::new(SHARDS);
    settings.buckets = variant.buckets;
    settings.overlap = variant.overlap;
    settings.withhold = variant.withhold;
    let sync = Synchronizer::new(Some(group), parameters(&variant.lengths), settings).unwrap();
    let momentum = "momentum".parse::<OptimizerSpec>().unwrap();
    let mut optimizer = momentum.build(&variant.lengths).unwrap();
    let mut weights: Vec<Vec<f32>> = variant
        .lengths
        .iter()
        .enumerate()
        .map(|(p, len)| (0..*len).map(|i| noise(p + i)).collect())
        .collect();
    let (mut losses, mut updates) = (Vec::new(), Vec::new());
    if variant.outside {
        sync.sum_outside();
    }
    for step in 0..STEPS {
        let mut stacks = vec![Stack::default(); LENGTHS.len()];
        for leaf in 0..sync.shards().len() {
            let shard = sync.begin_shard();
            sync.begin_backward(noise(step * SHARDS + shard));
            // Every rank has an order of its own in which gradients become ready.
            let mut order: Vec<usize> = (0..LENGTHS.len()).collect();
            order.sort_by_key(|p| noise(p + 31 * step + 1000 * group.rank()).to_bits());
            for parameter in order {
                let gradient = gradient(step, shard, parameter, &weights[parameter]);
                match (gradient, variant.outside) {
                    (Some(gradient), false) => assert!(sync.gradient(parameter, &gradient)),
                    (None, false) => {}
                    (gradient, true) => stacks[parameter].add(&sync, parameter, leaf, gradient),
                }
            }
            sync.end_shard();
        }
        let mut updated = Vec::new();
        let StepOutcome { loss, stop, .. } = sync
            .finish(|parameter, gradient| {
                updated.push(parameter);
                optimizer.update(parameter, step as u64 + 1, &mut weights[parameter], gradient);
            })
            .unwrap();
        assert!(!stop);
        losses.push(loss);
        updated.sort_unstable();
        updates.push(updated);
    }
    Trained { weights, losses, updates }
}

/// The sums of a parameter that a worker makes itself, and of how many shards with a gradient each is.
#[derive(Clone, Default)]
struct Stack(Vec<(Vec<f32>, usize)>);

impl Stack {
    /// Adds the gradient of a shard, and hands over the sums after the last.
    fn add(&mut self, sync: &Synchronizer, of: usize, leaf: usize, gradient: Option<Vec<f32>>) {
        let plan = sync.accumulation();
        let Leaf { slot, add, merges } = plan.leaf(leaf);
        let count = usize::from(gradient.is_some());
        let own = (gradient.unwrap_or_else(|| vec![0.0; sync.parameters()[of].elements()]), count);
        match add {
            true => self.merge(own),
            false => self.0.push(own),
        }
        for _ in 0..merges {
            let right = self.0.pop().unwrap();
            self.merge(right);
        }
        assert_eq!(self.0.len(), slot + 1 - merges);
        if leaf + 1 < plan.leaves() {
            return;
        }
        assert_eq!(self.0.len(), plan.sums());
        for (number, (sum, shards)) in self.0.iter().enumerate() {
            // What has no gradient has no parts.
            let parts = sum.chunks(7).enumerate().filter(|_| *shards > 0);
            parts.for_each(|(i, part)| sync.sum_part(of, number, 7 * i, part));
            sync.end_sum(of, number, *shards);
        }
    }

    fn merge(&mut self, (right, shards): (Vec<f32>, usize)) {
        let (left, count) = self.0.last_mut().unwrap();
        left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
        *count += shards;
    }
}

fn bits(weights: &[Vec<f32>]) -> Vec<Vec<u32>> {
    weights.iter().map(|w| w.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn weights_do_not_depend_on_how_they_are_synchronized() {
    let mut variants: Vec<Variant> = [1, 2, 3, 4, 5, 7, 8].map(Variant::new).to_vec();
    variants.extend(
        [1, 2, 3, 4, 5, 7, 8].map(|workers| Variant { outside: true, ..Variant::new(workers) }),
    );
    for workers in [1, 2, 3, 4] {
        let plain = Variant::new(workers);
        variants.push(Variant { overlap: false, ..plain.clone() });
        variants.push(Variant { withhold: true, ..plain.clone() });
        variants.push(Variant { overlap: false, withhold: true, ..plain.clone() });
        variants.push(Variant { transport: Transport::Tcp, ..plain.clone() });
        variants.push(Variant { buckets: None, ..plain.clone() });
        variants.push(Variant { buckets: Some(BucketSizes { first: 0, others: 0 }), ..plain });
    }
    expect_equal(&variants);
}

/// In registered memory, which is cut anew when the sizes of buckets change, and for workers whose sums are no
/// all-reduce.
#[test]
fn nor_do_those_of_a_model_whose_buckets_are_read_in_place() {
    let large = |workers, buckets| {
        let lengths = LARGE;
        Variant { lengths, buckets, withhold: true, ..Variant::new(workers) }
    };
    let sizes = Some(BucketSizes { first: 1 << 20, others: 1 << 21 });
    let variants: Vec<Variant> =
        [2, 3, 4].into_iter().flat_map(|n| [large(n, None), large(n, sizes)]).collect();
    expect_equal(&variants);
}

/// All of them have the weights of one worker.
fn expect_equal(variants: &[Variant]) {
    let alone = Variant { lengths: variants[0].lengths, ..Variant::new(1) };
    let expected = train(&alone).remove(0);
    for variant in variants {
        for (rank, trained) in train(variant).into_iter().enumerate() {
            let Trained { weights, losses, updates } = trained;
            assert_eq!(
                bits(&weights),
                bits(&expected.weights),
                "weights of rank {rank}, {variant:?}"
            );
            let same =
                losses.iter().map(|l| l.to_bits()).eq(expected.losses.iter().map(|l| l.to_bits()));
            assert!(same, "losses of rank {rank}, {variant:?}");
            assert_eq!(updates, expected.updates, "updates of rank {rank}, {variant:?}");
        }
    }
}

#[test]
fn parameters_without_a_gradient_anywhere_are_left_alone() {
    for workers in [1, 3] {
        for trained in train(&Variant::new(workers)) {
            for (step, updated) in trained.updates.iter().enumerate() {
                assert!(!updated.contains(&UNUSED));
                assert_eq!(updated.contains(&RARE), step % 2 == 1, "step {step}");
                assert!(updated.contains(&0));
            }
        }
    }
}

#[test]
fn one_vote_is_heard_by_all_after_its_step() {
    let groups = Group::local(3, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                let parameters = vec![Parameter::flat("w", 3)];
                let sync = Synchronizer::new(Some(group), parameters, Settings::new(3)).unwrap();
                for step in 0..4 {
                    if step == 2 && group.rank() == 1 {
                        sync.vote_to_stop();
                    }
                    if step == 1 && group.rank() == 2 {
                        sync.vote_to_regroup();
                    }
                    sync.begin_shard();
                    sync.begin_backward(1.0);
                    sync.gradient(0, &[1.0, 2.0, 3.0]);
                    sync.end_shard();
                    let outcome = sync.finish(|_, gradient| assert_eq!(gradient, [1.0, 2.0, 3.0]));
                    let StepOutcome { stop, regroup, .. } = outcome.unwrap();
                    assert_eq!((stop, regroup), (step == 2, step == 1));
                }
            });
        }
    });
}

#[test]
fn different_models_are_refused_on_all_ranks() {
    let groups = Group::local(3, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                let mut parameters = parameters(&LENGTHS);
                if group.rank() == 2 {
                    parameters.truncate(4);
                }
                match Synchronizer::new(Some(group), parameters, Settings::new(3)).map(|_| ()) {
                    Err(SyncError::DifferentModels { rank: Rank(2), parameter: 4, .. }) => {}
                    other => panic!("{other:?}"),
                }
            });
        }
    });
}

#[test]
fn gradients_outside_of_a_shard_are_not_taken() {
    let parameters = vec![Parameter::flat("w", 1)];
    let sync = Synchronizer::new(None, parameters, Settings::new(2)).unwrap();
    assert!(!sync.gradient(0, &[1.0]));
    for _ in sync.shards() {
        sync.begin_shard();
        sync.begin_backward(0.5);
        assert!(sync.gradient(0, &[3.0]));
        sync.end_shard();
    }
    let outcome = sync.finish(|_, gradient| assert_eq!(gradient, [3.0])).unwrap();
    assert_eq!(outcome.loss, 0.5);
    assert_eq!(outcome.times.buckets.len(), 1);
}
