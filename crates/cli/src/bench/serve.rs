//! `unisono bench serve`: one rank of a comparison with other systems, driven through named
//! pipes so that idle systems do not disturb the one being measured.
//!
//! Commands, one per line in `DIR/NAME.RANK`: `run OP BYTES ITERATIONS WARMUP`, `quit`. Answers
//! in `DIR/NAME.out`, one line per rank: the microseconds per operation of every sample, as JSON.
//! `bench/README.md` describes the rules that all systems follow.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use unisono::{Dtype, Group, Options, Transport};

use super::device::{EngineArgs, Gpu};
use super::workload::{self, Operation, verify_step};

/// A sample is as many operations as fill this time, in microseconds, at most
/// [`LARGEST_BATCH`].
const SAMPLE_US: f64 = 20.0;
const LARGEST_BATCH: usize = 16;

/// Options of `unisono bench serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// Where the pipes are.
    #[arg(long)]
    fifo_dir: PathBuf,
    /// The name the pipes start with.
    #[arg(long)]
    name: String,
    /// How the ranks exchange data.
    #[arg(long, default_value = "auto")]
    transport: Transport,
    #[command(flatten)]
    device: EngineArgs,
}

/// Serves until told to quit.
pub fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let mut options = Options::from_env()?;
    options.transport = args.transport;
    let (job, gpu) = args.device.join(options)?;
    let group = job.world();
    let commands = args.fifo_dir.join(format!("{}.{}", args.name, group.rank()));
    let answers = args.fifo_dir.join(format!("{}.out", args.name));
    let commands = BufReader::new(File::open(&commands).with_context(|| format!("{commands:?}"))?);
    let mut answers =
        OpenOptions::new().write(true).open(&answers).with_context(|| format!("{answers:?}"))?;
    for line in commands.lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words[..] {
            ["quit"] => break,
            ["run", op, bytes, iterations, warmup] => {
                let op = Operation::from_str(op, true).map_err(anyhow::Error::msg)?;
                let (bytes, iterations) = (bytes.parse()?, iterations.parse()?);
                match measure(group, gpu.as_ref(), op, bytes, iterations, warmup.parse()?) {
                    Ok(samples) => serde_json::to_string(&samples)? + "\n",
                    Err(error) => format!("error rank {}: {error:#}\n", group.rank()),
                }
            }
            _ => bail!("cannot understand {line:?}"),
        };
        // One write, so that the lines of several ranks do not mix.
        answers.write_all(answer.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(
    group: &Group,
    gpu: Option<&Rc<Gpu>>,
    operation: Operation,
    bytes: usize,
    iterations: usize,
    warmup: usize,
) -> anyhow::Result<Vec<f64>> {
    ensure!(iterations > 0, "nothing to measure");
    let memory = gpu.map_or(workload::Kind::Plain, workload::Kind::Device);
    let mut workload = workload::make(operation, Dtype::F32, bytes, group, None, memory)?;
    verify_step(workload.as_mut(), group)?;
    let stretch = workload.endurance();
    // The fastest, since a preemption would make all operations look long.
    let mut fastest = f64::INFINITY;
    for i in 0..warmup {
        if i % stretch == 0 {
            workload.fill()?;
        }
        let start = Instant::now();
        workload.step(group)?;
        fastest = fastest.min(start.elapsed().as_secs_f64() * 1e6);
    }
    let mut batch = 1;
    while batch < LARGEST_BATCH && batch as f64 * fastest < SAMPLE_US {
        batch *= 2;
    }
    let mut samples: Vec<f64> = Vec::with_capacity(iterations);
    let mut done = 0;
    while done < iterations {
        workload.fill()?;
        group.barrier()?;
        workload.step(group)?;
        let mut repeats = 1;
        while repeats < stretch && done < iterations {
            let todo = batch.min(stretch - repeats).min(iterations - done);
            let start = Instant::now();
            for _ in 0..todo {
                workload.step(group)?;
            }
            let each = start.elapsed().as_secs_f64() * 1e6 / todo as f64;
            // Nanoseconds are more than the clock can tell.
            samples.push((each * 1e3).round() / 1e3);
            repeats += todo;
            done += todo;
        }
    }
    verify_step(workload.as_mut(), group)?;
    Ok(samples)
}
