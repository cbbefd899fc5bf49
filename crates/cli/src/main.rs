//! The program `unisono`: train models, launch ranks, report, measure collectives.

#[macro_use]
mod output;
#[macro_use]
mod exit;
mod bench;
mod completions;
mod config;
mod etcd;
mod membership_log;
mod report;
mod run;
mod serve;
mod status;
mod train;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use unisono::cluster::place::{Launcher, Place};
use unisono::cluster::variables;

use exit::Wrong;

/// Trains models on many workers, keeps their replicas in step, and says where the time went.
#[derive(Parser)]
#[command(
    name = "unisono",
    version,
    arg_required_else_help = true,
    after_help = "\
To begin with:
  unisono train                           a small model on two workers, and a report of it
  unisono train --strategy ssp:3          the same, with workers that do not wait for each other
  unisono report runs/mlp-1               where the time of that run went, and what would help
  unisono run -n 4 -- python train.py     your own program on four ranks
  unisono bench collective                what this machine can do

Exit codes: 0, all went well; 1, what was asked for failed; 2, the call is wrong, and nothing was \
started; 126 or 127, the program that `run` is to start cannot be started or does not exist; 128 + n, \
signal n ended it (130 after Ctrl-C, 141 if the reader of its output has gone, as in `… | head -1`). \
`run` exits with the code of the rank that failed.

UNISONO_LOG=info or debug says more of what is going on. `unisono COMMAND --help` says what a command \
takes."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model on several workers, of this machine or many.
    Train(Box<train::TrainArgs>),
    /// Say where the time of a training run went, and what would make it faster.
    Report(report::ReportArgs),
    /// Say how an elastic run is doing: its epoch, step, workers and recoveries.
    Status(status::StatusArgs),
    /// Start a program of your own on several ranks, and watch over them.
    Run(run::RunArgs),
    /// Serve the weights of workers that do not wait for each other.
    Serve(serve::ServeArgs),
    /// Measure this machine and its network.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Print a script that completes the commands and flags of this program in a shell.
    Completions(completions::CompletionsArgs),
}

/// What of a filter of log messages is neither a level nor about a crate of this program: taken for
/// the name of another crate it would silence all messages.
fn unknown_level(filter: &str) -> Option<&str> {
    let directives = filter.split('/').next().unwrap_or_default();
    directives.split(',').map(str::trim).find(|directive| {
        let is_level = directive.parse::<log::LevelFilter>().is_ok();
        !directive.is_empty()
            && !is_level
            && !directive.contains('=')
            && !directive.starts_with("unisono")
    })
}

fn main() -> ExitCode {
    let said = std::env::var("UNISONO_LOG").unwrap_or_default();
    let unknown = unknown_level(&said);
    let filter = if said.is_empty() || unknown.is_some() { "warn" } else { &said };
    env_logger::Builder::new().parse_filters(filter).init();
    if let Some(unknown) = unknown {
        log::warn!(
            "UNISONO_LOG={said}: \"{unknown}\" is no level; the levels are error, warn, info, debug and \
             trace"
        );
    }
    // A launcher has said it for its ranks.
    if Place::from_env().is_ok_and(|place| place.launcher == Launcher::None) {
        variables::complaints().iter().for_each(|complaint| log::warn!("{complaint}"));
    }
    start().unwrap_or_else(|error| exit::with(&error))
}

fn start() -> anyhow::Result<ExitCode> {
    let call = config::Call::new(command(), std::env::args_os().collect()).wrong_call()?;
    let matches = command().try_get_matches_from(&call.arguments);
    let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| {
        let _ = error.print();
        if let (Some(file), true) = (&call.file, error.use_stderr()) {
            say!("What {} sets counts as if it had been typed.", file.display());
        }
        std::process::exit(error.exit_code())
    });
    match cli.command {
        Command::Train(mut args) => {
            args.arguments = call.arguments.into_iter().skip(1).collect();
            train::run(*args)
        }
        Command::Report(args) => report::run(args),
        Command::Status(args) => status::run(args),
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Bench(command) => bench::run(command),
        Command::Completions(args) => completions::run(args),
    }
}

/// What the program takes.
fn command() -> clap::Command {
    let command = Cli::command().mut_subcommands(with_negative_numbers);
    let command = ["train", "run", "serve"]
        .into_iter()
        .fold(command, |command, name| command.mut_subcommand(name, config::accepting));
    // Help is as wide as the terminal that shows it, and not wrapped where there is none.
    match std::io::stdout().is_terminal() {
        true => command,
        false => command.term_width(0),
    }
}

/// A number below zero is a value, perhaps a wrong one, and no flag.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| match arg.get_action().takes_values() {
        true if arg.get_long().is_some() => arg.allow_negative_numbers(true),
        _ => arg,
    });
    command.mut_subcommands(with_negative_numbers)
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_well_made() {
        super::command().debug_assert();
    }
}
