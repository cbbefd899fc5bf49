//! `unisono train`: train a model on several workers, and say where the time went.

mod args;
mod checkpoint;
mod computation;
mod dry_run;
mod elastic;
mod part;
mod progress;
mod rank_zero;
mod relaxed;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use unisono::cluster::launch::{Ending, Launch, Outcome};
use unisono::cluster::place::{Launcher, Place};
use unisono::{Group, Options};

use crate::exit::{self, Wrong};
use crate::output;
use args::RunPlan;
pub use args::TrainArgs;
use progress::{Display, Failure};

/// How long workers may take to finish their step and write a checkpoint when told to stop.
const GRACE: Duration = Duration::from_secs(60);

/// Starts the workers, or is one of them.
pub fn run(args: TrainArgs) -> anyhow::Result<ExitCode> {
    if args.quiet {
        output::be_quiet();
    }
    if args.dry_run {
        return dry_run::run(&args);
    }
    if args.level().is_some() {
        fix_threads(args.threads());
        if !args.as_worker && !is_launched() {
            announce(&args)?;
        }
        return relaxed::run(&args);
    }
    if args.as_worker || std::env::var_os("RANK").is_some() || is_launched() {
        fix_threads(args.threads());
        return match run_worker(&args) {
            Err(error) if args.as_worker => {
                let consequence = worker::is_consequence(&error);
                Failure { reason: crate::one_line(&error), consequence }.tell();
                Ok(ExitCode::from(exit::code(&error)))
            }
            outcome => outcome,
        };
    }
    rehearse(&args)?;
    announce(&args)?;
    if args.is_elastic() {
        return elastic::lead(&args);
    }
    let display = Display::new();
    let mut command = vec![std::env::current_exe()?.into_os_string()];
    command.extend(args.arguments.iter().cloned());
    command.push("--as-worker".into());
    let launch = Launch {
        encrypt: args.options()?.encrypt,
        grace: GRACE,
        stdout: display.stdout(),
        stderr: display.stderr(),
        vars: output::width_for_workers(),
        ..Launch::new(command, u32::try_from(args.workers()).wrong_call()?)
    };
    let outcome = launch.run();
    let heard = display.close();
    let outcome = outcome?;
    match (&outcome, heard.failure) {
        // A reader that closed the pipe knows, and of a full disk the launcher has told.
        (Outcome::OutputLost { .. }, _) => {}
        // The workers did what they were told to: nothing went wrong.
        (Outcome::Interrupted { .. }, None) if heard.finished => return Ok(ExitCode::SUCCESS),
        // Workers that were told to end before they had met lost each other, as they should.
        (Outcome::Interrupted { .. }, Some(failure)) if failure.consequence => {}
        // A worker that was killed could not say why the others gave up.
        (Outcome::Failed(first), Some(failure))
            if failure.consequence && matches!(first.ending, Ending::Signal(_)) =>
        {
            say!("unisono: {outcome}; {}", advice(&args));
        }
        (_, Some(failure)) => say!("unisono: {}", failure.reason),
        (Outcome::Failed(_), None) => say!("unisono: {outcome}; {}", advice(&args)),
        _ => {}
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

/// Is one of the workers.
fn run_worker(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    match args.is_elastic() {
        true => elastic::work(args),
        false => worker::run(args),
    }
}

/// What to do about a worker that is gone.
fn advice(args: &TrainArgs) -> &'static str {
    match args.saves() {
        true => "add --resume to go on from the last checkpoint",
        false => "start again; with --checkpoint-dir, less would be lost",
    }
}

/// Does what every worker will do before it computes, so that a mistake costs one line.
fn rehearse(args: &TrainArgs) -> anyhow::Result<()> {
    // What is worth a warning, the workers will say again.
    let level = log::max_level();
    log::set_max_level(log::LevelFilter::Off);
    let outcome = args.plan(args.workers()).and_then(|plan| try_out(args, &plan).wrong_call());
    log::set_max_level(level);
    outcome
}

fn try_out(args: &TrainArgs, plan: &RunPlan) -> anyhow::Result<()> {
    args.options()?;
    let alone = Group::local(1, &Options::default())?.remove(0);
    let mut computation = computation::build(plan, &alone)?;
    if let Some(mut saver) = checkpoint::Saver::open(plan)? {
        let found = saver.find(plan)?.map(|found| found.checkpoint);
        checkpoint::resume(&mut *computation, found.as_ref(), &alone)?;
    }
    Ok(())
}

/// Says what the user might not expect of the run.
fn announce(args: &TrainArgs) -> anyhow::Result<()> {
    for notice in args.plan(args.workers())?.notices() {
        remark!("unisono: {notice}");
    }
    Ok(())
}

/// Whether a launcher other than ours started this process.
fn is_launched() -> bool {
    // Of variables that make no sense, the worker will tell the user.
    !Place::from_env().is_ok_and(|place| place.launcher == Launcher::None)
}

/// Whether this process was told to stop, by SIGINT or SIGTERM, from now on.
fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }
    Ok(stop)
}

/// Computes with as many threads. Their number may decide about the last bits of a sum.
fn fix_threads(threads: usize) {
    // SAFETY: called first thing, before this process has a second thread.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", threads.to_string()) };
}
