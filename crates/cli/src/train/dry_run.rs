//! `--dry-run`: all that a run does before its first step, and what it would do then.

use std::fmt::Write;
use std::process::ExitCode;

use unisono::cluster::place::{Launcher, Place};
use unisono::insight::units::counted;
use unisono::relaxed::spec::Level;
use unisono::sync::Parameter;
use unisono::{Group, Options};

use super::args::{RunPlan, ServersChoice, TrainArgs};
use super::computation::{self, Learning};
use super::try_out;
use crate::bench::sizes;
use crate::exit::Wrong;
use crate::output;

/// Checks the call, and says what it asks for. Under a launcher only rank 0 says it.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let place = Place::from_env().wrong_call()?;
    let (workers, launcher) = match place.launcher {
        Launcher::None => (args.workers(), None),
        launcher => (place.world as usize, Some(launcher)),
    };
    let plan = args.plan(workers)?;
    let parameters = match plan.relaxed {
        Some(_) => {
            let learning = Learning::load(&plan).wrong_call()?;
            plan.optimizer.build(&[]).wrong_call()?;
            args.options()?;
            elements(&learning.weights().parameters())
        }
        None => {
            try_out(args, &plan).wrong_call()?;
            let alone = Group::local(1, &Options::default())?.remove(0);
            elements(computation::build(&plan, &alone)?.synchronizer().parameters())
        }
    };
    if place.rank == 0 {
        let placement = launcher.map_or("this machine".to_owned(), |by| format!("as {by} says"));
        output::text_out(&describe(args, &plan, workers, parameters, &placement)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn elements(parameters: &[Parameter]) -> usize {
    parameters.iter().map(Parameter::elements).sum()
}

/// What would be done, line by line.
fn describe(
    args: &TrainArgs,
    plan: &RunPlan,
    workers: usize,
    parameters: usize,
    placement: &str,
) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut line = |name: &str, value: String| writeln!(out, "{name:<14}{value}");
    let (model, data) = plan.names();
    line("model", model)?;
    line("data", data)?;
    line("parameters", format!("{parameters}, {} in f32", sizes::about(4 * parameters)))?;
    line(
        "workers",
        format!("{workers}, {}, with {} each", placement, counted(plan.threads, "thread")),
    )?;
    line("steps", plan.steps.to_string())?;
    line(
        "batch",
        format!("{} in {}", counted(plan.batch, "sample"), counted(plan.shards, "shard")),
    )?;
    line("optimizer", plan.optimizer.to_string())?;
    line("strategy", plan.strategy_name())?;
    line("codec", plan.describe_codec())?;
    line("transport", args.transport().name().to_owned())?;
    if let Some(relaxed) = &plan.relaxed {
        if relaxed.level.has_servers() {
            line("servers", servers(&relaxed.servers))?;
        }
        if !matches!(relaxed.level, Level::Hogwild) {
            line("restarts", format!("{} in all", relaxed.restarts))?;
        }
        if let Some(journal) = &relaxed.journal {
            line("journal", journal.display().to_string())?;
        }
    }
    if let Some(folder) = &plan.checkpoint_dir {
        let begin = if plan.resume { ", resumed from the newest" } else { "" };
        let every = format!("every {}{begin}", counted(plan.checkpoint_every as usize, "step"));
        line("checkpoints", format!("{}, {every}", folder.display()))?;
    }
    let folder = match &plan.run_dir {
        Some(folder) => folder.display().to_string(),
        None => "a new folder in runs".to_owned(),
    };
    line("report", folder)?;
    Ok(out)
}

fn servers(choice: &ServersChoice) -> String {
    match choice {
        ServersChoice::Started(count) => format!("{count}, started with the workers"),
        ServersChoice::Inside => "inside the workers".to_owned(),
        ServersChoice::At(addresses) => addresses.join(", "),
    }
}
