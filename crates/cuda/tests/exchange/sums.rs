//! Means over shards whose sums stay on devices: the bits of the host's strategy, on every rank.

use unisono_collective::{Group, Options};
use unisono_cuda::exchange::{ExchangeError, SumExchange};
use unisono_cuda::{Context, DeviceGroup, DeviceMemory, DeviceOptions, Driver, Stream};
use unisono_sync::accumulate::Accumulation;
use unisono_sync::shards::Shards;
use unisono_sync::{Parameter, Settings, Synchronizer};

use super::{fake, noise, on_ranks};

/// Elements that are divided, and behind them those that are not.
const DIVIDED: usize = 1003;
const COUNTS: usize = 7;

/// What a shard has: numbers whose sum depends on the order, zeros of both signs, infinities, and what is no number.
fn leaf(shard: usize) -> Vec<f32> {
    let value = |i: usize| {
        let number = noise((shard * 10_000 + i) as u64);
        match i % 10 {
            0 => -0.0,
            1 if shard.is_multiple_of(2) => 0.0,
            1 => -0.0,
            2 if number > 0.6 => f32::INFINITY,
            3 if number > 0.8 => f32::NAN,
            4 => number * f32::MIN_POSITIVE,
            5 => number * f32::MAX,
            _ => number * 3f32.powi((shard * 7 + i) as i32 % 20 - 10),
        }
    };
    (0..DIVIDED).map(value).chain((0..COUNTS).map(|i| (i + shard) as f32)).collect()
}

/// The sums of a rank's subtrees, each of a length that is a multiple of the alignment.
fn sums_of(shards: Shards, rank: usize, world: usize, alignment: usize) -> Vec<Vec<f32>> {
    let range = shards.of(rank, world);
    let plan = Accumulation::new(shards.count(), range.clone());
    let length = (DIVIDED + COUNTS).next_multiple_of(alignment);
    let mut slots = vec![vec![0.0; length]; plan.slots()];
    for (i, shard) in range.enumerate() {
        let values = leaf(shard);
        plan.add(i, &mut slots, 0..values.len(), &values.as_slice());
    }
    slots.truncate(plan.sums());
    slots
}

/// What the host's strategy makes of the same, for every rank; small integers are added up exactly in any order.
fn on_host(shards: Shards, world: usize) -> Vec<Vec<f32>> {
    let groups = Group::local(world, &Options::default()).unwrap();
    let counts =
        (DIVIDED..DIVIDED + COUNTS).map(|i| (0..shards.count()).map(|of| leaf(of)[i]).sum());
    let counts: &Vec<f32> = &counts.collect();
    std::thread::scope(|scope| {
        let rank = |group: Group| {
            move || {
                let listed = vec![Parameter::flat("p", DIVIDED)];
                let settings = Settings::new(shards.count());
                let host = Synchronizer::new(Some(&group), listed, settings).unwrap();
                for shard in host.shards() {
                    host.begin_shard();
                    host.begin_backward(0.0);
                    host.gradient(0, &leaf(shard)[..DIVIDED]);
                    host.end_shard();
                }
                let mut mean = Vec::new();
                host.finish(|_, of| mean.extend_from_slice(of)).unwrap();
                mean.extend_from_slice(counts);
                mean
            }
        };
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank on its device.
struct Worker {
    exchange: SumExchange,
    stream: Stream,
    context: Context,
    shards: Shards,
}

impl Worker {
    fn new(group: Group, shards: Shards) -> Worker {
        Worker::on(DeviceGroup::new(group, 0), shards)
    }

    fn on(group: DeviceGroup, shards: Shards) -> Worker {
        let driver = Driver::load_from(fake::library().as_os_str()).unwrap();
        let context = Context::new(&driver.device(0).unwrap()).unwrap();
        let exchange = SumExchange::new(group, &context, shards).unwrap();
        let stream = Stream::new(&context, 0).unwrap();
        Worker { exchange, stream, context, shards }
    }

    fn mean(&mut self) -> Result<Vec<f32>, ExchangeError> {
        let group = self.exchange.group().group();
        let (rank, world) = (group.rank(), group.size());
        let sums = sums_of(self.shards, rank, world, self.exchange.alignment());
        let length = sums[0].len();
        let memory: Vec<DeviceMemory> =
            sums.iter().map(|_| DeviceMemory::new(&self.context, length * 4).unwrap()).collect();
        let pointers: Vec<_> = memory.iter().map(DeviceMemory::pointer).collect();
        let mut mean = vec![0f32; DIVIDED + COUNTS];
        // SAFETY: the memory has as many elements, and what is submitted is waited for before any of it ends.
        let exchanged = unsafe {
            for (into, from) in pointers.iter().zip(&sums) {
                self.stream.copy_to_device(*into, from.as_ptr().cast(), length * 4).unwrap();
            }
            let exchanged = self.exchange.exchange(&pointers, length, DIVIDED, &self.stream);
            let bytes = mean.len() * 4;
            self.stream.copy_to_host(mean.as_mut_ptr().cast(), pointers[0], bytes).unwrap();
            self.stream.synchronize().unwrap();
            exchanged
        };
        exchanged.map(|()| mean)
    }
}

/// What ranks make of it, twice in the same memory, as in steps; against the host.
fn compare(found: &[[Vec<f32>; 2]], shards: Shards, world: usize) {
    let expected = on_host(shards, world);
    assert_eq!(found.len(), expected.len());
    for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let what = format!("{} shards, rank {rank} of {world}", shards.count());
        found.iter().for_each(|found| assert_same(found, expected, &what));
    }
}

/// To the bit; which NaN a NaN is, is not specified.
fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        assert!(same, "{what}, element {i}: {found} and not {expected}");
    }
}

#[test]
fn means_of_any_world_and_shards_have_the_bits_of_the_host() {
    for world in 1..=5 {
        for count in world..=9 {
            let shards = Shards::new(count, world).unwrap();
            let found = on_ranks(world, |group| {
                let mut worker = Worker::new(group, shards);
                [worker.mean().unwrap(), worker.mean().unwrap()]
            });
            compare(&found, shards, world);
        }
    }
}

#[test]
fn means_of_ranks_on_several_hosts_have_them_too() {
    // A window on some hosts, and on none.
    for (hosts, engine) in
        [(&[0, 0, 1][..], "hierarchical"), (&[0, 0, 1, 1], "hierarchical"), (&[0, 1, 2], "bounce")]
    {
        let mut options = DeviceOptions::from(fake::window(1 << 12, fake::ONE_ROUND));
        options.nccl.library = Some("/nowhere/libnccl.so.2".into());
        options.bounce.chunk = 1 << 10;
        for count in [4, 8, 9] {
            let (groups, world) = (fake::world_on(hosts, options.clone()), hosts.len());
            assert_eq!(groups[0].engine().unwrap(), engine, "{hosts:?}");
            let shards = Shards::new(count, world).unwrap();
            let found: Vec<_> = std::thread::scope(|scope| {
                let rank = |group: DeviceGroup| {
                    move || {
                        let mut worker = Worker::on(group, shards);
                        [worker.mean().unwrap(), worker.mean().unwrap()]
                    }
                };
                let ranks: Vec<_> =
                    groups.into_iter().map(|group| scope.spawn(rank(group))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            compare(&found, shards, world);
        }
    }
}

#[test]
fn what_is_sent_is_that_of_a_ring_times_the_sums_of_a_rank() {
    let sent = |world, count| {
        let shards = Shards::new(count, world).unwrap();
        on_ranks(world, |group| {
            let mut worker = Worker::new(group, shards);
            worker.mean().unwrap();
            worker.exchange.sent()
        })
    };
    assert_eq!(sent(1, 8), [0]);
    let bytes = 4 * (DIVIDED + COUNTS) as u64;
    assert_eq!(sent(2, 8), [bytes; 2]);
    // Ranks 0 and 1 have two sums, rank 2 has one.
    let block = bytes.next_multiple_of(3 * 16) / 3;
    assert_eq!(sent(3, 8), [6 * block, 6 * block, 4 * block]);
}

#[test]
fn a_rank_that_leaves_is_named() {
    let shards = Shards::new(8, 3).unwrap();
    let errors = on_ranks(3, |group| {
        let rank = group.rank();
        let mut worker = Worker::new(group, shards);
        worker.mean().unwrap();
        (rank != 1).then(|| (1..18).find_map(|_| worker.mean().err()).expect("rank 1 is gone"))
    });
    for error in errors.into_iter().flatten() {
        let ExchangeError::Group(error) = error else { panic!("{error:?}") };
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
