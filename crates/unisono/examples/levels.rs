//! Trains a small model at the consistency level that is named, on any number of workers:
//!
//!     unisono run -n 2 -- levels all-reduce
//!     unisono run -n 2 -- levels ssp:3 runs/ssp
//!     unisono run --servers 2 -n 4 -- levels async
//!     levels hogwild runs/hogwild
//!
//! and with a folder, leaves the report of the run there. The program is the same at every level.

use std::path::PathBuf;

use unisono::prelude::*;
use unisono::worker::{Seat, Totals, WorkerError};

/// Of a batch.
const SHARDS: usize = 4;
/// Of a shard.
const SAMPLES: usize = 8;
const INPUTS: usize = 16;
/// Of every worker.
pub const STEPS: u64 = 150;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let level = arguments.next().ok_or("levels LEVEL [FOLDER]")?;
    run(&level, arguments.next().map(Into::into))
}

/// Is one worker of a run; with hogwild, all.
pub fn run(level: &str, folder: Option<PathBuf>) -> Result<(), Box<dyn std::error::Error>> {
    let mut training = Training::new(level.parse()?, "sgd".parse()?, SHARDS, STEPS);
    training.samples = SAMPLES as u64;
    training.run_dir = folder;
    training.name = "linear regression".to_owned();
    for totals in train(&training, work)? {
        let Totals { worker, workers, steps, loss, weights_hash, report, .. } = &totals;
        println!("worker {worker} of {workers}: {steps} steps, loss {loss:.6}, {weights_hash}");
        if let Some(report) = report {
            println!("report: {}", report.display());
        }
    }
    Ok(())
}

/// What one worker does: fits a linear function to samples of another.
fn work(seat: Seat<'_>) -> Result<Totals, WorkerError> {
    let mut weights = vec![vec![0.0; INPUTS], vec![0.0]];
    let parameters = vec![Parameter::flat("slopes", INPUTS), Parameter::flat("offset", 1)];
    let mut worker = seat.join(parameters, &mut weights)?;
    while let Some(step) = worker.begin_step(&mut weights)? {
        while let Some(shard) = worker.next_shard() {
            let (loss, slopes, offset) = gradient(&weights, step, shard);
            worker.backward(loss, [(0, &slopes[..]), (1, &[offset])]);
        }
        worker.step(&mut weights)?;
    }
    worker.finish(&mut weights)
}

/// The mean squared error over the samples of a shard, and its gradient.
fn gradient(weights: &[Vec<f32>], step: u64, shard: usize) -> (f32, Vec<f32>, f32) {
    let (mut loss, mut slopes, mut offset) = (0.0, vec![0.0; INPUTS], 0.0);
    let first = (step as usize * SHARDS + shard) * SAMPLES;
    for sample in first..first + SAMPLES {
        let inputs: Vec<f32> = (0..INPUTS).map(|i| wave(sample * INPUTS + i)).collect();
        let line = |slopes: &dyn Fn(usize) -> f32, offset: f32| {
            inputs.iter().enumerate().map(|(i, x)| slopes(i) * x).sum::<f32>() + offset
        };
        let error = line(&|i| weights[0][i], weights[1][0]) - line(&|i| i as f32 * 0.1, 0.5);
        loss += error * error / SAMPLES as f32;
        let slope = 2.0 * error / SAMPLES as f32;
        slopes.iter_mut().zip(&inputs).for_each(|(sum, x)| *sum += slope * x);
        offset += slope;
    }
    (loss, slopes, offset)
}

/// A number that looks random, in −1..1.
fn wave(i: usize) -> f32 {
    let mixed = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (mixed ^ (mixed >> 15)).wrapping_mul(2_246_822_519) as f32 / (1u64 << 31) as f32 - 1.0
}
