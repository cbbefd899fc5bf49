//! A run whose workers may come and go.
//!
//! The process that the user starts *leads*: it starts the workers, and starts them again when they die, and is
//! told the result by rank 0. A worker builds its model first, and then takes part in one epoch after the
//! other, as a [`Session`] decides.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use unisono::cluster::launch::{Completion, Elastic, Launch, Outcome, Restarts};
use unisono::cluster::membership::History;
use unisono::elastic::{ElasticJob, GIVES_UP, Saved, Session, Source};
use unisono::insight::folder::FolderError;
use unisono::net::crash;
use unisono::recording::steps::StepRecorder;
use unisono::sync::shards::Shards;

use super::args::{RunPlan, TrainArgs};
use super::computation;
use super::part::{Part, Until, present};
use super::progress::{Display, Failure};
use super::rank_zero::RankZero;
use super::relaxed::without_run_dir;
use super::worker::{expect_equal_plans, sync_error};
use super::{GRACE, advice};
use crate::exit::{self, Wrong};
use crate::membership_log::Recorder;
use crate::output;

/// How long a run waits for workers before it ends. Longer: a user learns later that none will come. Shorter: a
/// machine that starts them slowly is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// What rank 0 hands in.
#[derive(Serialize, Deserialize)]
struct Said {
    /// What there is to say of the run; with `--json`, one object.
    text: String,
    /// Why the run came to nothing, if it did.
    failure: Option<String>,
    interrupted: bool,
}

/// Starts the workers, and stays until the run is over.
pub fn lead(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let plan = args.plan(args.workers())?;
    let elastic = plan.elastic.context("an elastic run")?;
    let claim = Claim::take(&plan)?;
    let dir = claim.dir.clone();
    if dir.join("run.toml").exists() && !plan.resume {
        return Err(FolderError::Occupied { path: dir }.into());
    }
    let recorder = Recorder::start(dir.clone())?;
    let display = Display::new();
    let mut command = vec![std::env::current_exe()?.into_os_string()];
    command.extend(without_run_dir(args.arguments.iter().cloned()));
    command.extend(["--as-worker".into(), "--run-dir".into(), dir.into_os_string()]);
    let options = args.options()?;
    let launch = Launch {
        encrypt: options.encrypt,
        grace: GRACE,
        stdout: display.stdout(),
        stderr: display.stderr(),
        vars: output::width_for_workers(),
        quiet: output::is_quiet(),
        restarts: Restarts { limit: elastic.restarts },
        elastic: Some(Elastic {
            least: elastic.least,
            most: plan.shards as u32,
            timeout: options.timeout,
            patience: PATIENCE,
        }),
        observer: Some(recorder.observer()),
        ..Launch::new(command, u32::try_from(args.workers()).wrong_call()?)
    };
    let ended = launch.run_elastic();
    let heard = display.close();
    let (outcome, Completion { result, history }) = ended?;
    let said: Option<Said> = result.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let is_complete = matches!(outcome, Outcome::Success | Outcome::Interrupted { .. });
    recorder.close(how_it_ended(&outcome, said.as_ref().filter(|_| is_complete)));
    if let Some(said) = said.filter(|_| is_complete) {
        output::text_out(&with_history(said.text, &history, args.json))?;
        return Ok(match said.failure {
            Some(failure) => {
                say!("unisono: {failure}");
                ExitCode::FAILURE
            }
            None => ExitCode::SUCCESS,
        });
    }
    match (&outcome, heard.failure) {
        (Outcome::OutputLost { .. }, _) => {}
        (Outcome::Interrupted { .. }, _) => say!("unisono: {outcome}"),
        (Outcome::NoProgress { .. }, _) => {
            say!("unisono: {outcome}{}", suspects(&history, &plan));
        }
        (_, Some(failure)) => say!("unisono: {}", failure.reason),
        _ => say!("unisono: {outcome}; {}", advice(args)),
    }
    let code = match outcome.exit_code() {
        0 | GIVES_UP => 1,
        code => code,
    };
    Ok(ExitCode::from(code))
}

/// The shards that all workers had which were lost: one of them may be too much for any worker.
fn suspects(history: &History, plan: &RunPlan) -> String {
    if let Some(shard) = history.poison() {
        return format!("; each of them was computing shard {shard}: look at its data");
    }
    let Ok(shards) = Shards::new(plan.shards, 1) else { return String::new() };
    let is_common = |shard: &usize| {
        history.lost_since.iter().all(|lost| shards.of(lost.rank, lost.world).contains(shard))
    };
    let common: Vec<String> = (0..plan.shards).filter(is_common).map(|s| s.to_string()).collect();
    match &common[..] {
        [] => "; no shard was with all of them, so look at what killed them".to_owned(),
        [shard] => format!("; each of them had shard {shard}: look at its data"),
        several => format!(
            "; each of them had one of the shards {}: look at their data",
            several.join(", ")
        ),
    }
}

/// Whether the run is complete, and how it ended.
fn how_it_ended(outcome: &Outcome, said: Option<&Said>) -> (bool, String) {
    match said {
        Some(Said { failure: Some(failure), .. }) => (false, failure.clone()),
        Some(Said { interrupted: true, .. }) => (false, "stopped before its last step".into()),
        Some(_) => (true, "finished".into()),
        None => (false, outcome.to_string()),
    }
}

/// Adds what happened to the workers.
fn with_history(text: String, history: &History, json: bool) -> String {
    let recoveries = &history.recoveries;
    let (middle, longest) = history.recovery_ms().unzip();
    let redone = recoveries.iter().filter(|recovery| recovery.first.redone).count();
    let History { epochs, workers_lost, workers_joined, .. } = history;
    if json && let Ok(mut object) = serde_json::from_str::<serde_json::Value>(&text) {
        object["epochs"] = json!(epochs);
        object["recoveries"] = json!(recoveries.len());
        object["recovery_ms_p50"] = json!(middle);
        object["recovery_ms_max"] = json!(longest);
        object["steps_redone"] = json!(redone);
        object["workers_lost"] = json!(workers_lost);
        object["workers_joined"] = json!(workers_joined);
        return format!("{object}\n");
    }
    if *epochs < 2 {
        return text;
    }
    let took = match middle {
        Some(middle) => format!(", each in {middle:.0} ms (median)"),
        None => String::new(),
    };
    format!(
        "{text}workers: {workers_lost} lost, {workers_joined} joined; went on {} times{took}\n",
        recoveries.len(),
    )
}

/// The folder of a run, which no other run can have meanwhile.
struct Claim {
    dir: PathBuf,
    /// The folder, locked. Absent where none can be made: rank 0 will say why.
    _lock: Option<File>,
}

impl Claim {
    /// Takes the folder that is named, or the first `runs/NAME-N` that does not exist.
    fn take(plan: &RunPlan) -> anyhow::Result<Claim> {
        let dir = match &plan.run_dir {
            Some(dir) => dir.clone(),
            None => {
                let _ = fs::create_dir_all("runs");
                let numbered = |n: u32| PathBuf::from(format!("runs/{}-{n}", plan.short_name()));
                let is_new = |dir: &PathBuf| match fs::create_dir(dir) {
                    Ok(()) => true,
                    Err(error) => error.kind() != ErrorKind::AlreadyExists,
                };
                (1..).map(numbered).find(is_new).expect("numbers do not end")
            }
        };
        let _ = fs::create_dir_all(&dir);
        let lock = File::open(&dir).ok();
        match lock.as_ref().map(File::try_lock) {
            Some(Err(TryLockError::WouldBlock)) => Err(FolderError::Occupied { path: dir }.into()),
            _ => Ok(Claim { dir, _lock: lock }),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Of a run that came to nothing, nothing stays.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Is one of the workers.
pub fn work(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    match take_part(args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if exit::code(&error) == exit::WRONG_CALL => Err(error),
        Err(error) => {
            Failure { reason: crate::one_line(&error), consequence: false }.tell();
            Ok(ExitCode::from(GIVES_UP))
        }
    }
}

fn take_part(args: &TrainArgs) -> anyhow::Result<()> {
    let plan = args.plan(args.workers())?;
    let dir = plan.run_dir.clone().context(
        "--elastic: `unisono train --elastic` starts its own workers; run it without `unisono run`",
    );
    let dir = dir.wrong_call()?;
    let job = ElasticJob::join(args.options()?)?;
    let mut job = job.context(
        "--elastic: no launcher coordinates this worker; leave it out under another launcher",
    )?;
    job.set_shards(plan.shards);
    let stop = stop_with_launcher(&job)?;
    let mut session = Session::new(job);
    let computation = computation::waiting(&plan)?;
    let recorder = StepRecorder::waiting(plan.batch as u64);
    let mut part = Part::new(&plan, computation, None, recorder, stop);
    while session.enter(part.computation.trainee()?)? {
        match epoch(args, &mut session, &dir, &mut part) {
            Ok(Some(said)) => return Ok(session.finish(serde_json::to_vec(&said)?)?),
            Ok(None) => {}
            Err(error) => {
                let steps = part.computation.steps();
                let cause = sync_error(&error);
                if !cause.is_some_and(|cause| session.failed(&cause, steps)) {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// How long a worker that gets a signal waits for word of its launcher. Longer: one that is told to end alone does so
/// later. Shorter: one that gets its signal before the launcher ends before it has saved anything.
const WORD: Duration = Duration::from_secs(1);

/// Becomes true when the launcher says that the run is to stop. A signal that comes to this worker alone ends it as it
/// would end any other program, and the others go on. Batch systems send theirs to all processes of a job, also to
/// the launcher.
fn stop_with_launcher(job: &ElasticJob) -> anyhow::Result<Arc<AtomicBool>> {
    let stop = job.stopping();
    let told = stop.clone();
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("listening for signals")?;
    let wait = move || {
        for signal in signals.forever() {
            let deadline = Instant::now() + WORD;
            while !told.load(Ordering::Relaxed) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            if !told.load(Ordering::Relaxed) {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        }
    };
    std::thread::Builder::new().name("unisono-signals".into()).spawn(wait)?;
    Ok(stop)
}

/// Takes part in an epoch; what there is to say at its end, if this is rank 0 and the run is over.
fn epoch(
    args: &TrainArgs,
    session: &mut Session,
    dir: &Path,
    part: &mut Part<'_>,
) -> anyhow::Result<Option<Said>> {
    expect_equal_plans(part.plan, present(session)?)?;
    go_on(args, session, part)?;
    record(session, dir, part)?;
    crash::point("recording");
    if part.train(session)? == Until::Regroup {
        session.leave(part.computation.trainee()?)?;
        return Ok(None);
    }
    // From here on all have all steps: if rank 0 is lost now, another can say as much.
    crash::point("trained");
    let group = present(session)?;
    group.barrier()?;
    crash::point("finished");
    let failure = part.expect_finite_loss(group).err();
    if failure.as_ref().is_some_and(|error| sync_error(error).is_some()) {
        return Err(failure.expect("it is there"));
    }
    let interrupted = part.is_interrupted();
    let text = part.sum_up(None, args.json)?;
    if text.is_none() {
        session.stand_by();
    }
    let failure = failure.map(|error| crate::one_line(&error));
    Ok(text.map(|text| Said { text, failure, interrupted }))
}

/// Goes on in the present group, and says so where that is not where the run was before.
fn go_on(args: &TrainArgs, session: &mut Session, part: &mut Part<'_>) -> anyhow::Result<()> {
    let Part { plan, computation, rank_zero, .. } = part;
    let is_first = present(session)?.rank() == 0;
    let is_later = session.epoch() > 1;
    // What an earlier rank 0 has saved belongs to this run.
    let plan = RunPlan { resume: plan.resume || is_later, ..(*plan).clone() };
    if is_first && rank_zero.is_none() {
        *rank_zero = Some(RankZero::open(&plan, args)?);
    }
    let mut saver = rank_zero.as_mut().and_then(|rank_zero| rank_zero.saver.as_mut());
    let mut found = None;
    let source = session.go_on(computation.trainee()?, || {
        let Some(saver) = &mut saver else { return Ok(None) };
        let checkpoint = saver.find(&plan)?.map(|found| found.checkpoint);
        found = checkpoint.as_ref().map(|it| (it.path().display().to_string(), it.step()));
        Ok::<_, anyhow::Error>(checkpoint.map(|checkpoint| Box::new(checkpoint) as Box<dyn Saved>))
    });
    let source = match &found {
        Some((path, _)) => source.with_context(|| path.clone())?,
        None => source?,
    };
    match (source, found, saver) {
        (Source::Checkpoint, Some((path, step)), Some(saver)) => {
            remark!("unisono: going on from {path}");
            saver.resumed(step);
        }
        (Source::Beginning, ..) if is_first && is_later => {
            remark!("unisono: all workers were lost; beginning anew");
        }
        _ => {}
    }
    Ok(())
}

/// Records the run from now on: in the folder that an earlier rank 0 has made, or in a new one.
fn record(session: &Session, dir: &Path, part: &mut Part<'_>) -> anyhow::Result<()> {
    let (group, steps) = (present(session)?, part.computation.steps());
    let mut exists = [u8::from(dir.join("run.toml").exists())];
    group.broadcast(&mut exists, 0)?;
    if exists[0] == 1 {
        if let Err(error) = part.recorder.regroup(group, dir, steps)? {
            say!("unisono: warning: {error}; the run goes on, and its report will be incomplete");
        }
        return Ok(());
    }
    let Part { plan, computation, rank_zero, .. } = part;
    let mut info = rank_zero
        .as_ref()
        .map(|rank_zero| rank_zero.describe(plan, group, &**computation))
        .unwrap_or_default();
    info.elastic = true;
    info.workers = plan.given.workers;
    part.recorder = StepRecorder::begin(group, Some(dir), info, plan.batch as u64)?;
    Ok(())
}
