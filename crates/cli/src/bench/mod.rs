//! `unisono bench`.

mod codec;
mod collective;
mod device;
mod hogwild;
mod limit;
mod serve;
mod server;
pub mod sizes;
mod step;
mod workload;

use std::process::ExitCode;

use clap::Subcommand;
use serde::Serialize;
use unisono::collective::fabric::available_memory;

/// What to measure.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// Time a collective operation over a range of sizes.
    Collective(collective::CollectiveArgs),
    /// Time the codecs on one core, beside a plain copy.
    Codec(codec::CodecArgs),
    /// Time lock-free updates of shared weights by threads.
    Hogwild(hogwild::HogwildArgs),
    /// Time pushes to a parameter server and pulls from it, beside plain TCP.
    Server(server::ServerArgs),
    /// Time a training step of one worker with and without synchronization.
    Step(step::StepArgs),
    /// Time operations as told through named pipes, beside other systems.
    #[command(hide = true)]
    Serve(serve::ServeArgs),
}

/// Fewer rounds have no median to speak of.
const FEWEST: usize = 5;

/// Refuses more time than a measurement can need.
fn expect_seconds(seconds: f64) -> anyhow::Result<()> {
    demand!((0.0..=3600.0).contains(&seconds), "--seconds {seconds}: use 0 to 3600");
    Ok(())
}

/// Refuses what this machine has no memory for: the system would kill a process. `who` needs it; `instead`
/// would help.
fn expect_memory(who: &str, needed: usize, instead: &str) -> anyhow::Result<()> {
    let available = available_memory().unwrap_or(u64::MAX);
    demand!(
        needed as u64 <= available,
        "{who} {} of memory, where {} are available; choose {instead}",
        sizes::about(needed),
        sizes::about(available as usize)
    );
    Ok(())
}

/// Prints a row of results: one JSON object, or its `text`.
fn print(row: &impl Serialize, json: bool, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let line = if json { serde_json::to_string(row)? } else { text() };
    Ok(result_line!("{line}")?)
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs a measurement.
pub fn run(command: BenchCommand) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Collective(args) => collective::run(args),
        BenchCommand::Codec(args) => codec::run(args),
        BenchCommand::Hogwild(args) => hogwild::run(args),
        BenchCommand::Server(args) => server::run(args),
        BenchCommand::Step(args) => step::run(args),
        BenchCommand::Serve(args) => serve::run(args),
    }
}
