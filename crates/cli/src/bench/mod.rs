//! `unisono bench`.

mod codec;
mod collective;
mod hogwild;
mod limit;
mod serve;
mod server;
pub mod sizes;
mod step;
mod workload;

use std::process::ExitCode;

use clap::Subcommand;

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
