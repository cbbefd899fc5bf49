//! How long one encoded exchange takes, end to end: ranks that are threads of this process make one mean of a bucket with
//! one gradient each, through shared memory and over TCP. Prints, for every codec, the median and the fastest exchange,
//! how much of it was coding, and a digest of all that came out: means and residuals of several steps, which must not
//! depend on how the exchange is carried out.
//!
//! ```sh
//! cargo run --release -p unisono-sync --example encoded_exchange -- --codecs fp16,int8 --mib 64 --ranks 2 --rounds 15
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_codec::CodecSpec;
use unisono_collective::{Group, Options, Transport};
use unisono_sync::Parameter;
use unisono_sync::bucket::{BucketSizes, Layout};
use unisono_sync::shards::Shards;
use unisono_sync::slot::Arena;
use unisono_sync::strategy::{AllReduce, Compressed, Compression, Gradients, Strategy};

/// Rows of the parameter.
const ROWS: usize = 1024;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let given: HashMap<&str, &str> = words
        .chunks(2)
        .map(|pair| (pair[0].as_str(), pair.get(1).map_or("", String::as_str)))
        .collect();
    let number = |name: &str, usual: usize| {
        given.get(name).map_or(usual, |text| text.parse().expect("a number"))
    };
    let (mib, ranks, rounds) = (number("--mib", 64), number("--ranks", 2), number("--rounds", 15));
    let codecs = given.get("--codecs").unwrap_or(&"none,fp16,bf16,int8,sign");
    let transports = given.get("--transports").unwrap_or(&"shm,tcp");
    println!(
        "{:<10} {:<18} {:>10} {:>10} {:>10}  digest",
        "transport", "codec", "median ms", "least ms", "coding ms"
    );
    for transport in transports.split(',') {
        let mut options = Options::default();
        options.transport = match transport {
            "tcp" => Transport::Tcp,
            _ => Transport::Shm,
        };
        for codec in codecs.split(',') {
            let spec = (codec != "none").then(|| codec.parse().expect("a codec"));
            let groups = Group::local(ranks, &options).expect("a group of threads");
            let found: Vec<Found> = std::thread::scope(|scope| {
                let spec = &spec;
                let start =
                    |group| scope.spawn(move || exchange(group, spec.as_ref(), mib << 20, rounds));
                let ranks: Vec<_> = groups.into_iter().map(start).collect();
                ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
            });
            // An exchange ends when its last rank has the mean.
            let mut times: Vec<Duration> = (0..rounds)
                .map(|round| found.iter().map(|rank| rank.times[round]).max().expect("a rank"))
                .collect();
            times.sort();
            let coding = found.iter().map(|rank| rank.coding).max().expect("a rank");
            assert!(found.iter().all(|rank| rank.mean == found[0].mean), "one mean on all ranks");
            let digests = found.iter().flat_map(|rank| rank.digest.to_le_bytes());
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            println!(
                "{transport:<10} {codec:<18} {:>10.2} {:>10.2} {:>10.2}  {:016x}",
                ms(times[rounds / 2]),
                ms(times[0]),
                ms(coding) / rounds as f64,
                fnv(digests)
            );
        }
    }
}

/// What a rank has to say.
struct Found {
    times: Vec<Duration>,
    coding: Duration,
    /// Of the last mean.
    mean: u64,
    /// Of everything.
    digest: u64,
}

fn exchange(group: Group, spec: Option<&CodecSpec>, bytes: usize, rounds: usize) -> Found {
    let (rank, workers) = (group.rank(), group.size());
    let shape = vec![ROWS, bytes / 4 / ROWS];
    let parameters = [Parameter { name: "weights".to_owned(), shape }];
    let shards = Shards::new(workers, workers).expect("a shard for every worker");
    let meeting = group.subgroup(&(0..workers).collect::<Vec<_>>()).expect("a group to meet in");
    let mut arena = Arena::new(&group, bytes / 4 + 1024).expect("memory of the group");
    let elements = parameters[0].elements();
    let layout = Arc::new(Layout::new(&[elements], BucketSizes::default(), workers));
    let mut slot = arena.cut(layout.buckets()[0].len);
    let compression = spec.map(|spec| Compression { seed: 7, ..Compression::new(spec.clone()) });
    let mut strategy = Either::new(group, shards, &parameters, compression);
    let (mut times, mut coding, mut digest, mut mean) = (Vec::new(), Duration::ZERO, 0, 0);
    let fresh: Vec<f32> = (0..elements).map(|i| noise((i * workers + rank) as u64)).collect();
    // The first two make room.
    for step in 0..rounds as u64 + 2 {
        slot[..elements].copy_from_slice(&fresh);
        slot[layout.count(0)] = 1.0;
        let mut gradients = Gradients::new(0, layout.clone(), step, vec![slot], 1, workers);
        meeting.barrier().expect("all ranks are there");
        let start = Instant::now();
        strategy.exchange(&mut gradients);
        if step >= 2 {
            times.push(start.elapsed());
            coding += gradients.coding;
        }
        slot = gradients.slots.remove(0);
        if step < 3 || step == rounds as u64 + 1 {
            mean = fnv_words(&slot[..elements], 0);
            digest = fnv_words(&strategy.residual(), mean.rotate_left(step as u32) ^ digest);
        }
    }
    meeting.barrier().expect("all ranks are there");
    Found { times, coding, mean, digest }
}

/// With a codec or without.
enum Either {
    Plain(AllReduce),
    Encoded(Box<Compressed>),
}

impl Either {
    fn new(
        group: Group,
        shards: Shards,
        parameters: &[Parameter],
        compression: Option<Compression>,
    ) -> Either {
        match compression {
            None => Either::Plain(AllReduce::new(group, shards)),
            Some(compression) => {
                Either::Encoded(Box::new(Compressed::new(group, shards, parameters, compression)))
            }
        }
    }

    fn exchange(&mut self, gradients: &mut Gradients) {
        match self {
            Either::Plain(strategy) => strategy.exchange(gradients),
            Either::Encoded(strategy) => strategy.exchange(gradients),
        }
        .expect("an exchange");
    }

    fn residual(&self) -> Vec<f32> {
        match self {
            Either::Plain(_) => Vec::new(),
            Either::Encoded(strategy) => strategy.remembered(0).residual,
        }
    }
}

/// A number that looks random, of a size that differs from column to column.
fn noise(seed: u64) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0) * (1 + seed % 7) as f32 * 0.01
}

fn fnv_words(values: &[f32], start: u64) -> u64 {
    let step =
        |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
    values.iter().fold(start ^ 0xcbf2_9ce4_8422_2325, step)
}

fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}
