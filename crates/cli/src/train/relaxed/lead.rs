//! Leads a run: starts servers and workers, and sums up what they did.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use unisono::cluster::launch::{Launch, Outcome as Ended, Restarts, Servers};
use unisono::collective::handshake::Token;
use unisono::insight::folder::FolderError;
use unisono::insight::relaxed::{RelaxedFolder, SavedRun};
use unisono::insight::{Outcome, RunInfo};
use unisono::relaxed::server::{ClientOptions, Run, ServerError, Transport, look};
use unisono::relaxed::spec::Level;

use super::super::args::{Plan, RelaxedPlan, ServersChoice, TrainArgs};
use super::super::progress::Display;
use super::student::Student;
use super::{described, optimizer, weights};

/// How long workers may take to end when they are told to.
const GRACE: Duration = Duration::from_secs(10);

/// How long the leader looks for a server that is being started again.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts everything, and stays until it is over.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let workers = args.workers();
    let plan = args.plan(workers)?;
    let relaxed = plan.relaxed.clone().context("a relaxed run")?;
    let student = Student::new(&plan, 0..1, false)?;
    plan.optimizer.build(&[])?;
    let timeout = args.options()?.timeout;
    let run = described(&plan, &relaxed, student.parameters(), workers, timeout);
    let folder = make_folder(&plan, describe(&plan, &relaxed, workers, args))?;
    let dir = folder.path().to_owned();
    let journal = relaxed.journal.clone().unwrap_or_else(|| dir.join("journal"));

    let token = match &relaxed.servers {
        ServersChoice::At(_) => crate::serve::token()?,
        _ => Token::random()?,
    };
    let display = Display::new();
    let program = std::env::current_exe()?.into_os_string();
    let mut command = vec![program.clone()];
    command.extend(without_run_dir(std::env::args_os().skip(1)));
    command.extend(["--as-worker".into(), "--run-dir".into(), dir.clone().into_os_string()]);
    let servers = match relaxed.servers {
        ServersChoice::Started(count) if relaxed.level.has_servers() => {
            let command = |server| serve_command(&program, &journal, &dir, server);
            Some(Servers::bind((0..count).map(command).collect())?)
        }
        _ => None,
    };
    let inside = relaxed.servers == ServersChoice::Inside && relaxed.level.has_servers();
    let launch = Launch {
        grace: GRACE,
        stdout: display.stdout(),
        stderr: display.stderr(),
        token: Some(token.clone()),
        servers: servers.clone(),
        listeners_for_ranks: inside || relaxed.level == Level::Gossip,
        restarts: Restarts { limit: relaxed.restarts },
        ..Launch::new(command, u32::try_from(workers)?)
    };
    let restarted = launch.restarted.clone();
    let fetch = Fetch {
        run,
        options: ClientOptions {
            servers: match (&relaxed.servers, &servers) {
                (ServersChoice::At(addresses), _) => addresses.clone(),
                (_, Some(servers)) => servers.addresses().iter().map(ToString::to_string).collect(),
                _ => Vec::new(),
            },
            token,
            worker: 0,
            life: 0,
            patience: PATIENCE,
            transport: Transport::Auto,
            warm_up: 0,
            error_feedback: true,
        },
    };
    let outcome = launch.run_with(move || fetch.weights());
    let heard = display.close();
    let (outcome, fetched) = outcome?;
    match (&outcome, heard.failure) {
        (Ended::Success, _) => {}
        (_, Some(failure)) => eprintln!("unisono: {}", failure.reason),
        (Ended::Interrupted { .. }, None) => match &relaxed.journal {
            Some(_) => eprintln!("unisono: stopped; the same command goes on from the journal"),
            None => eprintln!("unisono: stopped; with --journal, the run could go on"),
        },
        (other, None) => eprintln!("unisono: {other}"),
    }
    if outcome != Ended::Success {
        return Ok(ExitCode::from(outcome.exit_code()));
    }
    let lengths: Vec<usize> = student.parameters().iter().map(|p| p.elements()).collect();
    let (weights, exchanges) = match relaxed.level {
        Level::Gossip => gossiped(&dir, workers, &lengths)?,
        _ if inside => (weights::take(&weights::path(&dir, 0), &lengths)?, None),
        _ => (fetched.context("the servers ended too early")??, None),
    };
    for (parameter, weights) in weights.iter().enumerate() {
        student.write(parameter, 0, weights)?;
    }
    if relaxed.journal.is_none() {
        // It has done its duty.
        let _ = std::fs::remove_dir_all(&journal);
    }
    finish(&student, folder, exchanges, &restarted, args.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Fetches the weights when the workers are done.
struct Fetch {
    run: Run,
    options: ClientOptions,
}

impl Fetch {
    fn weights(&self) -> Result<Vec<Vec<f32>>, ServerError> {
        if self.options.servers.is_empty() {
            Ok(Vec::new())
        } else {
            look(&self.run, &self.options)
        }
    }
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

/// Judges the model, writes the report, and says how it went.
pub fn finish(
    student: &Student,
    folder: RelaxedFolder,
    exchanges: Option<u64>,
    restarted: &AtomicU32,
    json: bool,
) -> anyhow::Result<()> {
    let judgement = student.judge()?;
    let outcome = Outcome {
        accuracy: Some(judgement.accuracy),
        held_out_loss: Some(judgement.loss),
        weights_hash: student.weights_hash(),
    };
    let saved: SavedRun = folder.finish(outcome, exchanges)?;
    let summary = saved.summary.as_ref().context("a finished run has a summary")?;
    let mut out = std::io::stdout().lock();
    if json {
        let mut object = serde_json::to_value(summary)?;
        object["processes_restarted"] = json!(restarted.load(Ordering::Relaxed));
        object["report"] = json!(saved.report_path());
        return writeln!(out, "{object}").context("writing the result");
    }
    write!(out, "loss {:.4}, ", summary.final_loss)?;
    write!(out, "held-out accuracy {:.1} %, ", judgement.accuracy * 100.0)?;
    writeln!(out, "weights {}", summary.weights_hash)?;
    writeln!(out, "{}", saved.report().terminal(100))?;
    writeln!(out, "report: {}", saved.report_path().display())?;
    Ok(())
}

/// The folder of the run: the one that was named, or the first in `runs` that does not exist.
pub fn make_folder(plan: &Plan, info: RunInfo) -> anyhow::Result<RelaxedFolder> {
    if let Some(dir) = &plan.run_dir {
        return RelaxedFolder::create(dir, &info).context("--run-dir");
    }
    for number in 1.. {
        match RelaxedFolder::create(format!("runs/{}-{number}", info.name), &info) {
            Err(FolderError::Occupied { .. }) => {}
            made => return made.context("making a folder for the report; choose one by --run-dir"),
        }
    }
    unreachable!("there are more numbers than folders")
}

/// The run, for its report.
pub fn describe(plan: &Plan, relaxed: &RelaxedPlan, workers: usize, args: &TrainArgs) -> RunInfo {
    let (model, data) = plan.names();
    let name = model.split([' ', ':', '/']).next().unwrap_or("run").to_owned();
    let mut settings = toml::Table::new();
    let mut set = |key: &str, value: toml::Value| settings.insert(key.to_owned(), value);
    let number = |n: u64| i64::try_from(n).map_or_else(|_| n.to_string().into(), toml::Value::from);
    set("version", env!("CARGO_PKG_VERSION").into());
    for (key, value) in plan.identity() {
        set(key, value.into());
    }
    set("steps", number(plan.steps));
    set("optimizer", optimizer(plan, relaxed.level, workers).to_string().into());
    set("stale", relaxed.stale.to_string().into());
    let servers = match &relaxed.servers {
        ServersChoice::Started(count) => count.to_string(),
        ServersChoice::Inside => "inside".to_owned(),
        ServersChoice::At(addresses) => addresses.join(","),
    };
    set("servers", servers.into());
    if let Some((rank, factor)) = plan.slow {
        set("slow", format!("{rank}:{factor}").into());
    }
    let transport = match (relaxed.level, args.transport()) {
        (Level::Hogwild, _) => "shared weights",
        (Level::Gossip, _) | (_, unisono::Transport::Tcp) => "tcp",
        _ => "shm where possible",
    };
    RunInfo {
        name,
        model,
        data,
        strategy: relaxed.level.to_string(),
        transport: transport.to_owned(),
        algorithm: if relaxed.level.has_servers() { "server" } else { "none" }.to_owned(),
        codec: plan.codec_name(),
        workers,
        shards: plan.shards,
        hosts: vec![String::new(); workers],
        settings,
        ..RunInfo::default()
    }
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
fn without_run_dir(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
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
