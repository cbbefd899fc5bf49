//! `unisono bench server`: how fast workers push gradients to a server and pull weights. Here are the options
//! and what is printed. The server and the workers are processes of their own, as in a run ([`part`]), and take turns
//! ([`turns`]) with the [`loopback`], the limit, which moves as many bytes and has no server. A [`worker`] pushes and
//! pulls, and the [`model`] knows what must come of that.

mod loopback;
mod model;
mod part;
mod turns;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use unisono::insight::units::counted;
use unisono_codec::{CodecSpec, Rounding};

use self::model::Model;
use self::part::be_part;
use self::turns::{Bench, Samples};
use super::{expect_memory, expect_seconds, median, print, sizes};
use crate::exit::Wrong;

/// Options of `unisono bench server`.
#[derive(Args, Clone)]
pub struct ServerArgs {
    /// How many workers push and pull at the same time.
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// The size of a tensor, in f32.
    #[arg(long, default_value = "4MiB")]
    size: String,
    /// How many tensors the model has.
    #[arg(long, default_value_t = 1)]
    tensors: usize,
    /// How gradients and weights travel, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["tcp", "shm"])]
    transport: Vec<Way>,
    /// Encode what is pushed by this codec: fp16, bf16, int8, int4 or sign.
    #[arg(long)]
    codec: Option<CodecSpec>,
    /// Let the servers keep journals in this folder, which must be new or empty.
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// Seconds to spend on each transport.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Print one JSON object per transport instead of a table.
    #[arg(long)]
    json: bool,
    /// This process is one of the parts, and is told on its input which.
    #[arg(long, hide = true)]
    as_part: bool,
}

/// Measures, or is one of the parts.
pub fn run(args: ServerArgs) -> anyhow::Result<ExitCode> {
    if args.as_part {
        return be_part();
    }
    let model = args.model()?;
    if let Some(journal) = &args.journal {
        let used = std::fs::read_dir(journal).is_ok_and(|mut files| files.next().is_some());
        ensure!(
            !used,
            "--journal {}: the folder is not empty, and the servers would go on with what it holds; name \
             a new one",
            journal.display()
        );
    }
    let mut bench = Bench::start(&args, model.clone())?;
    let measured = bench.measure(args.seconds)?;
    bench.verify()?;
    report(&args, &model, &measured)
}

impl ServerArgs {
    /// The options, checked.
    fn model(&self) -> anyhow::Result<Model> {
        let bytes = sizes::parse(&self.size).context("--size").wrong_call()?;
        demand!(
            bytes > 0 && bytes.is_multiple_of(4),
            "--size {}: tensors are of f32; use a multiple of 4 bytes",
            self.size
        );
        demand!((1..=1024).contains(&self.workers), "--workers {}: use 1 to 1024", self.workers);
        demand!((1..=4096).contains(&self.tensors), "--tensors {}: use 1 to 4096", self.tensors);
        expect_seconds(self.seconds)?;
        let codec = self.codec.clone();
        if let Some(codec) = &codec {
            let is_steady = match codec {
                CodecSpec::Fp16 | CodecSpec::Bf16 | CodecSpec::Sign => true,
                CodecSpec::Int8(rounding) | CodecSpec::Int4(rounding) => {
                    *rounding == Rounding::Nearest
                }
                _ => false,
            };
            demand!(is_steady, "--codec {codec}: use fp16, bf16, int8, int4 or sign");
            let suits = codec.build().suits(&[bytes / 4]);
            demand!(suits, "--codec {codec}: makes tensors of {} no smaller", self.size);
        }
        let (elements, tensors, workers) = (bytes / 4, self.tensors, self.workers);
        let model = Model { elements, tensors, workers, codec };
        // Of every worker: gradient, weights, common memory, and what it and the others have received;
        // on the servers, versions of the weights for as many readers.
        let copies = 10 * self.workers as usize + 6;
        let needed = model.bytes().saturating_mul(copies);
        let bytes = sizes::format(model.bytes());
        let who = format!("--size: {} workers with {bytes} need", self.workers);
        expect_memory(&who, needed, "a smaller size or fewer workers")?;
        Ok(model)
    }
}

/// How gradients and weights travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    /// Over TCP.
    Tcp,
    /// In shared memory.
    Shm,
    /// Over plain TCP, as many bytes in each direction, with no server: the limit.
    #[value(skip)]
    Loopback,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Tcp => "tcp",
            Way::Shm => "shm",
            Way::Loopback => "loopback",
        }
    }
}

fn report(
    args: &ServerArgs,
    model: &Model,
    measured: &[(Way, Samples)],
) -> anyhow::Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if !args.json {
        result_line!(
            "{} {} {} of {}{}, one server, {}; weights verified",
            counted(model.workers as usize, "worker"),
            if model.workers == 1 { "pushes and pulls" } else { "push and pull" },
            counted(model.tensors, "tensor"),
            sizes::format(4 * model.elements),
            model
                .codec
                .as_ref()
                .map_or(String::new(), |codec| format!(", pushes encoded by {codec}")),
            counted(cores, "core")
        )?;
        result_line!(
            "{:<9} {:>12} {:>11} {:>11} {:>11} {:>12} {:>8}",
            "transport",
            "push-pulls/s",
            "median µs",
            "p99 µs",
            "GB/s pulled",
            "of loopback",
            "of tcp"
        )?;
    }
    let rates =
        |wanted: Way| measured.iter().find(|(way, _)| *way == wanted).map(|(_, s)| &s.rates);
    let loopback = rates(Way::Loopback).context("the loopback is always measured")?;
    for (way, samples) in measured {
        let mut each = samples.each.clone();
        each.sort_by(f64::total_cmp);
        let push_pulls_per_second = median(samples.rates.iter().copied());
        let row = Row {
            transport: *way,
            workers: model.workers,
            cores,
            bytes: model.bytes(),
            pushed_bytes: model.pushed_bytes(),
            tensors: model.tensors,
            codec: model.codec.as_ref().map(CodecSpec::to_string),
            journal: args.journal.is_some() && *way != Way::Loopback,
            rounds: samples.rates.len(),
            push_pulls: each.len(),
            push_pulls_per_second,
            median_us: each[each.len() / 2],
            p99_us: each[(each.len() * 99 / 100).min(each.len() - 1)],
            gbs: push_pulls_per_second * model.bytes() as f64 / 1e9,
            of_loopback: ratio(&samples.rates, loopback),
            of_tcp: rates(Way::Tcp).map(|tcp| ratio(&samples.rates, tcp)),
            // A wrong result ends the measurement with an error.
            verified: true,
        };
        print(&row, args.json, || {
            let Row { median_us, p99_us, gbs, of_loopback, of_tcp, .. } = row;
            let of_tcp = of_tcp.map_or(String::new(), |ratio| format!("{ratio:.3}"));
            format!(
                "{:<9} {push_pulls_per_second:>12.1} {median_us:>11.1} {p99_us:>11.1} {gbs:>11.3} \
                 {of_loopback:>12.3} {of_tcp:>8}",
                way.name()
            )
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One line of the report.
#[derive(Serialize)]
struct Row {
    transport: Way,
    workers: u32,
    /// Threads that this machine can run at once.
    cores: usize,
    /// Bytes of a pull.
    bytes: usize,
    /// Bytes of a push: as many, or what the codec makes of them.
    pushed_bytes: usize,
    tensors: usize,
    codec: Option<String>,
    journal: bool,
    rounds: usize,
    push_pulls: usize,
    push_pulls_per_second: f64,
    median_us: f64,
    p99_us: f64,
    /// Of what is pulled. Without a codec, as much is pushed.
    gbs: f64,
    /// Relative to plain TCP.
    of_loopback: f64,
    /// Relative to the server over TCP, if that was measured.
    of_tcp: Option<f64>,
    verified: bool,
}

/// The median over the rounds of one rate relative to another.
fn ratio(rates: &[f64], others: &[f64]) -> f64 {
    median(rates.iter().zip(others).map(|(rate, other)| rate / other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compare_what_took_turns() {
        assert_eq!(ratio(&[1.0, 8.0, 3.0], &[2.0, 8.0, 4.0]), 0.75);
        assert!(median(std::iter::empty()).is_nan());
    }
}
