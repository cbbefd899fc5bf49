//! Leads a run: starts servers and workers, and sums up what they did.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use unisono::cluster::launch::{Ending, Launch, Outcome as Ended, Restarts, Servers};
use unisono::insight::relaxed::RelaxedFolder;
use unisono::net::Token;
use unisono::relaxed::server::{
    ClientOptions, Run, ServerError, Transport, fetch_weights, reports_so_far,
};
use unisono::relaxed::spec::Level;
use unisono::sync::strategy::Weights as _;

use super::super::args::{RelaxedPlan, ServersChoice, TrainArgs};
use super::super::computation::Learning;
use super::super::progress::Display;
use super::folder::{Folder, Found, advise_to_record, describe, tell_complete};
use super::weights;
use crate::exit::Wrong;
use crate::{output, serve};

/// How long workers may take to end when they are told to.
const GRACE: Duration = Duration::from_secs(10);

/// How long the leader looks for a server that is being started again.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long servers are looked for that should be there already. Longer: a mistake is told later.
/// Shorter: servers and workers cannot be started at the same time.
const FIRST_LOOK: Duration = Duration::from_secs(5);

/// Starts everything, and stays until it is over.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let workers = args.workers();
    let plan = args.plan(workers)?;
    let relaxed = plan.relaxed.clone().context("a relaxed run")?;
    let learning = Learning::load(&plan).wrong_call()?;
    let parameters = learning.weights().parameters();
    plan.optimizer.build(&[]).wrong_call()?;
    let timeout = args.options()?.timeout;
    let run = plan.training()?.run(&parameters, relaxed.level, workers, timeout);
    let token = match &relaxed.servers {
        ServersChoice::At(_) => serve::token()?,
        _ => Token::random()?.with_encryption(args.options()?.encrypt),
    };
    let mut visitor = visitor(token.clone());
    if let ServersChoice::At(addresses) = &relaxed.servers {
        visitor.servers.clone_from(addresses);
        expect_unfinished(&run, &visitor)?;
    }
    let info = describe(&plan, &relaxed, workers, args);
    // Before anything is read from it, which another leader may be about to change.
    let _lock = relaxed.journal.as_deref().map(serve::lock_journal).transpose()?;
    let found = relaxed.journal.as_deref().map(|journal| Folder::find(journal, &plan, &info));
    let folder = match found.transpose()? {
        Some(Found::Complete(saved)) => {
            return tell_complete(&saved, args.json).map(|()| ExitCode::SUCCESS);
        }
        Some(Found::Unfinished(folder)) => folder,
        Some(Found::Nothing) | None => Folder::make(&plan, &info)?,
    };
    let dir = folder.path().to_owned();
    let journal = journal(&relaxed, &dir);
    // That of the run's own folder may be named by others, too.
    let own = journal.as_deref().filter(|_| relaxed.journal.is_none());
    let _own_lock = own.map(serve::lock_journal).transpose()?;
    if let Some(journal) = &journal {
        let servers = match relaxed.servers {
            ServersChoice::Started(count) => count,
            _ => workers,
        };
        folder.expect_states(journal, servers)?;
        folder.remember_in(journal)?;
    }

    let display = Display::new();
    let program = std::env::current_exe()?.into_os_string();
    let mut command = vec![program.clone()];
    command.extend(without_run_dir(args.arguments.iter().cloned()));
    command.extend(["--as-worker".into(), "--run-dir".into(), dir.clone().into_os_string()]);
    let servers = match (&relaxed.servers, &journal) {
        (ServersChoice::Started(count), Some(journal)) => {
            let command = |server| serve_command(&program, journal, &dir, server);
            let servers = Servers::bind((0..*count).map(command).collect())?;
            visitor.servers = servers.addresses().iter().map(ToString::to_string).collect();
            Some(servers)
        }
        _ => None,
    };
    let inside = relaxed.servers == ServersChoice::Inside && relaxed.level.has_servers();
    let launch = Launch {
        grace: GRACE,
        stdout: display.stdout(),
        stderr: display.stderr(),
        encrypt: token.encrypts(),
        token: Some(token),
        servers,
        listeners_for_ranks: inside || relaxed.level == Level::Gossip,
        restarts: Restarts { limit: relaxed.restarts },
        vars: output::width_for_workers(),
        quiet: args.quiet,
        ..Launch::new(command, u32::try_from(workers).wrong_call()?)
    };
    let restarted = launch.restarted.clone();
    let fetches = relaxed.level.has_servers() && !inside;
    let asked = run.clone();
    let outcome = launch.run_with(move || fetches.then(|| fetch_weights(&asked, &visitor)));
    let heard = display.close();
    let (outcome, fetched) = outcome?;
    if outcome != Ended::Success {
        let failure = heard.failure.map(|failure| failure.reason);
        let again = match (&journal, &relaxed.journal) {
            (Some(_), Some(_)) => "the same command goes on".to_owned(),
            (Some(own), None) => {
                format!("the same command with --journal {} goes on", own.display())
            }
            (None, _) => "start again".to_owned(),
        };
        explain(&outcome, failure, folder, &again)?;
        return Ok(ExitCode::from(outcome.exit_code()));
    }
    let lengths: Vec<usize> = parameters.iter().map(|p| p.elements()).collect();
    let (weights, exchanges) = match relaxed.level {
        Level::Gossip => gossiped(&dir, workers, &lengths)?,
        _ if inside => (weights::take(&weights::path(&dir, 0), &lengths)?, None),
        _ => (fetched.flatten().context("the servers ended too early")??, None),
    };
    learning.weights().set_all(&weights);
    let finished =
        folder.finish(&learning, exchanges, restarted.load(Ordering::Relaxed), args.json);
    let pushes = match finished {
        // The reader of the result has gone, but the run is done.
        Err(error) if output::is_closed(&error) => Err(error),
        other => Ok(other?),
    };
    if let Ok(pushes) = pushes {
        advise_to_record(pushes, &run);
    }
    if let (Some(journal), None) = (journal, relaxed.journal) {
        // It has done its duty.
        let _ = std::fs::remove_dir_all(journal);
    }
    pushes.map(|_| ExitCode::SUCCESS)
}

/// Where the servers of a run write their journals, if it starts them.
pub fn journal(relaxed: &RelaxedPlan, dir: &Path) -> Option<PathBuf> {
    match relaxed.servers {
        ServersChoice::Started(_) | ServersChoice::Inside if relaxed.level.has_servers() => {
            Some(relaxed.journal.clone().unwrap_or_else(|| dir.join("journal")))
        }
        _ => None,
    }
}

/// Fails if servers that run already are not there, serve another run, or are done with this one.
fn expect_unfinished(run: &Run, options: &ClientOptions) -> anyhow::Result<()> {
    let options = ClientOptions { patience: FIRST_LOOK, ..options.clone() };
    let reports = match reports_so_far(run, &options) {
        Ok(reports) => reports,
        Err(error @ ServerError::Unreachable { .. }) => {
            bail!("--servers: {error}; start `unisono serve --listen HOST:PORT` there first")
        }
        Err(error) => return Err(error).context("--servers"),
    };
    ensure!(
        !reports.iter().flatten().any(|report| report.finished),
        "--servers {}: they hold a run that is complete; start them again for another, with another \
         journal or none",
        options.servers.join(",")
    );
    Ok(())
}

/// How the leader, which is no worker, reaches the servers.
pub fn visitor(token: Token) -> ClientOptions {
    ClientOptions {
        servers: Vec::new(),
        token,
        worker: 0,
        life: None,
        patience: PATIENCE,
        transport: Transport::Auto,
        warm_up: 0,
        error_feedback: true,
    }
}

/// Says why a run did not end well, and how it can go on: `again`.
fn explain(
    outcome: &Ended,
    failure: Option<String>,
    folder: Folder,
    again: &str,
) -> anyhow::Result<()> {
    let was_killed = match outcome {
        Ended::Failed(failed) => matches!(failed.ending, Ending::Signal(_)),
        Ended::ServerFailed(failed) => matches!(failed.ending, Ending::Signal(_)),
        _ => false,
    };
    match (outcome, failure) {
        // The reader that closed the pipe knows.
        (Ended::OutputLost { closed: true, .. }, _) => {}
        (Ended::Interrupted { .. }, _) => {
            let report = folder.leave()?;
            // That it was stopped, the launcher has said.
            say!("unisono: {again}; report so far: {}", report.display());
        }
        _ if was_killed => {
            say!("unisono: {outcome}, and no restart of --restarts is left; {again}");
        }
        (_, Some(failure)) => match diverged(&folder) {
            Some(report) => say!("unisono: {failure}; report: {}", report.display()),
            None => say!("unisono: {failure}"),
        },
        (Ended::ServerFailed(failed), None) => {
            let last = failed.stderr.last().map(|line| line.trim_start_matches("unisono: "));
            say!("unisono: server {}: {}", failed.server, last.unwrap_or("failed"));
        }
        (other, None) => say!("unisono: {other}; {again}"),
    }
    Ok(())
}

/// The report of a run that ended because a loss was no number any more; none if that is not why, or if
/// it cannot be written, which is less to be told than that.
fn diverged(folder: &Folder) -> Option<PathBuf> {
    let saved = RelaxedFolder::open(folder.path()).ok()?;
    saved.run.diverged?;
    folder.leave().ok()
}

/// The mean of what the workers have left, and how often two averaged.
fn gossiped(
    dir: &Path,
    workers: usize,
    lengths: &[usize],
) -> anyhow::Result<(Vec<Vec<f32>>, Option<u64>)> {
    let mut mean: Vec<Vec<f32>> = lengths.iter().map(|length| vec![0.0; *length]).collect();
    for worker in 0..workers {
        let own = weights::take(&weights::path(dir, worker), lengths)?;
        for (mean, own) in mean.iter_mut().flatten().zip(own.iter().flatten()) {
            *mean += own / workers as f32;
        }
    }
    let count = |worker| {
        let path = super::gossip::exchanges(dir, worker);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let _ = std::fs::remove_file(path);
        text.trim().parse::<u64>().unwrap_or(0)
    };
    Ok((mean, Some((0..workers).map(count).sum())))
}

/// The command line of a server.
fn serve_command(program: &OsString, journal: &Path, dir: &Path, server: usize) -> Vec<OsString> {
    let journal: PathBuf = journal.join(server.to_string());
    vec![
        program.clone(),
        "serve".into(),
        "--journal".into(),
        journal.into(),
        "--run-dir".into(),
        dir.into(),
    ]
}

/// The arguments of this process without its folder, which the workers are told anew.
pub fn without_run_dir(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut skip = false;
    for arg in args {
        let text = arg.to_string_lossy().into_owned();
        if !std::mem::take(&mut skip) {
            skip = text == "--run-dir";
            if !skip && !text.starts_with("--run-dir=") {
                kept.push(arg);
            }
        }
    }
    kept
}
