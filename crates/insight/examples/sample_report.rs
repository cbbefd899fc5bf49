//! Writes the folder of a made-up run, to look at its report without training anything.
//!
//!     cargo run -p unisono-insight --example sample_report -- DIR [STEPS [RANKS]]
//!
//! Four ranks on two hosts train over a network; rank 2 is slow.

use std::error::Error;

use unisono_insight::folder::RunFolder;
use unisono_insight::{BucketSpan, Outcome, RankStep, RunInfo, Scaling, StepRecord};

const SLOW: usize = 2;
const BUCKETS: usize = 6;
const BUCKET_BYTES: u64 = 4_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().ok_or("usage: sample_report DIR [STEPS [RANKS]]")?;
    let steps: u64 = arguments.next().map_or(Ok(600), |steps| steps.parse())?;
    let ranks: usize = arguments.next().map_or(Ok(4), |ranks| ranks.parse())?;

    let mut folder = RunFolder::create(dir, &info(ranks)?)?;
    let mut noise = Noise(7);
    let mut now = 0.0;
    for step in 0..steps {
        let record = measure(step, steps, ranks, now, &mut noise);
        now = record.ranks[0].end;
        folder.append(&record)?;
    }
    let outcome = Outcome { accuracy: Some(0.9789), weights_hash: "5f0c3a1be28d9647".into() };
    let scaling = Scaling { one_worker_samples_per_s: 2350.0 };
    let run = folder.finish(outcome, Some(scaling))?;
    print!("{}", run.report().terminal(100));
    Ok(())
}

fn info(ranks: usize) -> Result<RunInfo, toml::de::Error> {
    Ok(RunInfo {
        name: "sample".into(),
        model: "transformer".into(),
        data: "text:corpus.txt".into(),
        strategy: "all-reduce".into(),
        transport: "tcp".into(),
        algorithm: "auto".into(),
        workers: ranks,
        shards: 2 * ranks,
        hosts: (0..ranks).map(|rank| format!("node-{}", rank / 2)).collect(),
        clock_error: 40e-6,
        settings: toml::from_str(
            "seed = 42\naccumulate = 1\noverlap = true\nbatch = 256\nbucket-bytes = 4000000\n\
             [optimizer]\nname = 'adamw'\nlearning-rate = 3e-4\nweight-decay = 0.01",
        )?,
    })
}

fn measure(step: u64, steps: u64, ranks: usize, begin: f64, noise: &mut Noise) -> StepRecord {
    let warm_up = 1.0 + 2.5 * (-(step as f64) / 2.0).exp();
    let passes: Vec<f64> = (0..ranks)
        .map(|rank| {
            let slow = if rank == SLOW && step > steps / 10 { 1.45 } else { 1.0 };
            0.021 * slow * warm_up * (1.0 + 0.04 * noise.next())
        })
        .collect();
    let data = 0.0006;
    let latest = data + passes.iter().copied().fold(0.0, f64::max);
    let transfer = 0.0028 * (1.0 + 0.15 * noise.next().abs());
    let tail = transfer * 1.6;
    let end = begin + latest + tail + 0.0011;
    let rank = |compute: &f64| {
        let computed = begin + data + compute;
        let backward = compute * 0.64;
        let mut free = begin;
        let buckets = (0..BUCKETS).map(|bucket| {
            let ready = computed - backward * (1.0 - (bucket + 1) as f64 / BUCKETS as f64);
            let started = ready.max(free);
            let last = bucket + 1 == BUCKETS;
            let ended = if last { begin + latest + tail } else { started + transfer };
            free = ended;
            BucketSpan {
                bytes: BUCKET_BYTES,
                ready,
                started,
                ended,
                folding: (ended - started) / 4.0,
            }
        });
        RankStep {
            begin,
            computed,
            reduced: begin + latest + tail,
            end,
            compute: *compute,
            backward,
            buckets: buckets.collect(),
        }
    };
    let progress = step as f64 / 60.0;
    StepRecord {
        step,
        loss: 0.35 + 3.9 / (1.0 + progress) + 0.05 * noise.next(),
        samples: 256,
        wire_bytes: 2 * (ranks as u64 - 1) * BUCKETS as u64 * BUCKET_BYTES,
        ranks: passes.iter().map(rank).collect(),
    }
}

/// Numbers between -1 and 1 that look random and are the same in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}
