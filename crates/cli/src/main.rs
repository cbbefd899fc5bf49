//! The program `unisono`: train models, launch ranks, report, measure collectives.

mod bench;
mod report;
mod run;
mod serve;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Keeps the replicas of a model in step while many workers train it.
#[derive(Parser)]
#[command(name = "unisono", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model on several workers.
    Train(Box<train::TrainArgs>),
    /// Say where the time of a training run went.
    Report(report::ReportArgs),
    /// Start a program on several ranks.
    Run(run::RunArgs),
    /// Serve the weights of workers that do not wait for each other.
    Serve(serve::ServeArgs),
    /// Measure this machine and its network.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

fn main() -> ExitCode {
    let level = env_logger::Env::default().filter_or("UNISONO_LOG", "warn");
    env_logger::Builder::from_env(level).init();
    let outcome = match Cli::parse().command {
        Command::Train(args) => train::run(*args),
        Command::Report(args) => report::run(args),
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Bench(command) => bench::run(command),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("unisono: {}", one_line(&error));
        ExitCode::FAILURE
    })
}

/// An error and its causes, without those that the text before already has.
fn one_line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(|cause| cause.to_string().replace('\n', " ")) {
        if !text.contains(&cause) {
            text += if text.is_empty() { "" } else { ": " };
            text += &cause;
        }
    }
    text
}
