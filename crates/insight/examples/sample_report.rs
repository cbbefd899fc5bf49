//! Writes the folder of a made-up run, to look at its report without training anything.
//!
//!     cargo run -p unisono-insight --example sample_report -- DIR [STEPS [RANKS [EVERY]]]
//!
//! Four ranks on two hosts train over a network; rank 2 is slow. After a few steps they choose a codec.
//! They agree in every EVERY-th step, which is each one unless given.

use std::error::Error;

use unisono_insight::folder::RunFolder;
use unisono_insight::{
    Advice, BucketSpan, Outcome, Prediction, RankStep, RunInfo, Scaling, StepRecord,
};

const SLOW: usize = 2;
const BUCKETS: usize = 6;
const BUCKET_BYTES: u64 = 4_000_000;

/// The last step without a codec.
const DENSE_UNTIL: u64 = 19;
/// Seconds to transfer a bucket without a codec, and seconds to encode and decode it with one.
const TRANSFER: f64 = 0.0112;
const CODING: f64 = 0.0006;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().ok_or("usage: sample_report DIR [STEPS [RANKS [EVERY]]]")?;
    let steps: u64 = arguments.next().map_or(Ok(600), |steps| steps.parse())?;
    let ranks: usize = arguments.next().map_or(Ok(4), |ranks| ranks.parse())?;

    let every: u64 = arguments.next().map_or(Ok(1), |every| every.parse())?;

    let mut folder = RunFolder::create(dir, &info(ranks)?)?;
    let mut noise = Noise(7);
    let mut now = vec![0.0; ranks];
    for step in 0..steps {
        let mut record = measure(step, steps, &now, &mut noise);
        record.agreed = step % every == every - 1;
        if !record.agreed {
            be_local(&mut record);
        }
        now = record.ranks.iter().map(|rank| rank.end).collect();
        folder.append(&record)?;
        if step == DENSE_UNTIL {
            folder.advise(&advice(ranks))?;
        }
    }
    let outcome = Outcome {
        accuracy: Some(0.9789),
        held_out_loss: Some(0.0713),
        weights_hash: "5f0c3a1be28d9647".into(),
    };
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
        codec: "auto".into(),
        dense_bytes_per_step: dense_bytes(ranks),
        workers: ranks,
        shards: 2 * ranks,
        hosts: (0..ranks).map(|rank| format!("node-{}", rank / 2)).collect(),
        clock_error: 40e-6,
        relaxed: false,
        elastic: false,
        settings: toml::from_str(
            "seed = 42\naccumulate = 1\noverlap = true\nbatch = 256\nbucket-bytes = 4000000\n\
             [optimizer]\nname = 'adamw'\nlearning-rate = 3e-4\nweight-decay = 0.01",
        )?,
    })
}

fn dense_bytes(ranks: usize) -> u64 {
    2 * (ranks as u64 - 1) * BUCKETS as u64 * BUCKET_BYTES
}

fn advice(ranks: usize) -> Advice {
    let row = |codec: &str, seconds, coding_seconds, less| Prediction {
        codec: codec.into(),
        seconds,
        coding_seconds,
        wire_bytes: dense_bytes(ranks) / less,
    };
    Advice {
        step: DENSE_UNTIL,
        rows: vec![
            row("none", 0.0746, 0.0, 1),
            row("bf16", 0.0482, 0.0008, 2),
            row("int8", 0.0371, 0.0036, 4),
            row("topk:1%", 0.0414, 0.0213, 62),
            row("powersgd:2", 0.0398, 0.0187, 71),
        ],
        chosen: "int8".into(),
        measured_dense_seconds: 0.0746,
        reason: "int8 would save 50 % of a step over this link of 1.1 GB/s; stronger codecs take \
                 longer to encode than the rest of the transfer."
            .into(),
        observed_steps: DENSE_UNTIL,
        deciding_bytes: 2_400_000,
        deciding_seconds: 0.9,
    }
}

/// A step in which nothing is exchanged: all that came after computing comes right then.
fn be_local(record: &mut StepRecord) {
    record.wire_bytes = 0;
    for rank in &mut record.ranks {
        rank.buckets.clear();
        rank.end -= rank.reduced - rank.computed;
        rank.reduced = rank.computed;
    }
}

fn measure(step: u64, steps: u64, begins: &[f64], noise: &mut Noise) -> StepRecord {
    let warm_up = 1.0 + 2.5 * (-(step as f64) / 2.0).exp();
    let passes: Vec<f64> = (0..begins.len())
        .map(|rank| {
            let slow = if rank == SLOW && step > steps / 10 { 1.45 } else { 1.0 };
            0.021 * slow * warm_up * (1.0 + 0.04 * noise.next())
        })
        .collect();
    let data = 0.0006;
    let computed = begins.iter().zip(&passes).map(|(begin, pass)| begin + data + pass);
    let latest = computed.fold(0.0, f64::max);
    let (less, coding) = if step > DENSE_UNTIL { (4, CODING) } else { (1, 0.0) };
    let transfer = TRANSFER / less as f64 * (1.0 + 0.15 * noise.next().abs()) + coding;
    let tail = transfer * 1.6;
    let reduced = latest + tail;
    let rank = |(&begin, &compute): (&f64, &f64)| {
        let computed = begin + data + compute;
        let backward = compute * 0.64;
        let mut free = begin;
        let buckets = (0..BUCKETS).map(|bucket| {
            let ready = computed - backward * (1.0 - (bucket + 1) as f64 / BUCKETS as f64);
            let started = ready.max(free);
            let last = bucket + 1 == BUCKETS;
            let ended = if last { reduced } else { started + transfer };
            free = ended;
            BucketSpan {
                bytes: BUCKET_BYTES,
                ready,
                started,
                ended,
                folding: (ended - started) / 4.0,
                coding,
            }
        });
        RankStep {
            begin,
            computed,
            reduced,
            end: reduced + 0.0011,
            compute,
            backward,
            device: None,
            buckets: buckets.collect(),
        }
    };
    let progress = step as f64 / 60.0;
    StepRecord {
        step,
        loss: 0.35 + 3.9 / (1.0 + progress) + 0.05 * noise.next(),
        samples: 256,
        wire_bytes: dense_bytes(begins.len()) / less,
        ranks: begins.iter().zip(&passes).map(rank).collect(),
        agreed: true,
        encoded: Some(step > DENSE_UNTIL),
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
