//! A run whose workers may come and go.
//!
//! The process that the user starts *leads*: it starts the workers, and starts them again when they die, and is
//! told the result by rank 0. A worker builds its model first, and then takes part in one epoch after the
//! other. In each it learns how far the others are, gets the state of another worker if it is behind, and goes
//! on. If no worker has any state left, they go on from the last checkpoint, or begin anew.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::json;
use unisono::Group;
use unisono::cluster::launch::{Completion, Elastic, Launch, Outcome, Restarts};
use unisono::cluster::membership::{FirstStep, History};
use unisono::elastic::ElasticJob;
use unisono::insight::folder::FolderError;
use unisono::net::crash;
use unisono::recording::steps::StepRecorder;
use unisono::sync::SyncError;
use unisono::sync::shards::Shards;
use unisono::worker::Regrouped;

use super::args::{RunPlan, TrainArgs};
use super::checkpoint::resume;
use super::computation::{self, Kept};
use super::part::{Part, Until};
use super::progress::{Display, Failure};
use super::rank_zero::RankZero;
use super::relaxed::without_run_dir;
use super::worker::{expect_equal_plans, form_error, group_error, sync_error};
use super::{GRACE, advice, stop_flag};
use crate::exit::{self, Wrong};
use crate::membership_log::Recorder;
use crate::output;

/// How long a run waits for workers before it ends. Longer: a user learns later that none will come. Shorter: a
/// machine that starts them slowly is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// The exit code of a worker that gives up for a reason that another life would meet again.
const GIVES_UP: u8 = 64;

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
    let dir = run_dir(&plan);
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
    let mut times: Vec<f64> = recoveries.iter().map(|r| r.seconds * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let middle = times.get(times.len() / 2).copied();
    let redone = recoveries.iter().filter(|recovery| recovery.first.redone).count();
    let History { epochs, workers_lost, workers_joined, .. } = history;
    if json && let Ok(mut object) = serde_json::from_str::<serde_json::Value>(&text) {
        object["epochs"] = json!(epochs);
        object["recoveries"] = json!(recoveries.len());
        object["recovery_ms_p50"] = json!(middle);
        object["recovery_ms_max"] = json!(times.last());
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

/// The folder of the run: the one that is named, or the first `runs/NAME-N` that does not exist.
fn run_dir(plan: &RunPlan) -> PathBuf {
    let free = |number: u32| PathBuf::from(format!("runs/{}-{number}", plan.short_name()));
    let first = || (1..).map(free).find(|dir| !dir.exists()).expect("numbers do not end");
    plan.run_dir.clone().unwrap_or_else(first)
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
    let dir = plan.run_dir.clone().context("--run-dir: a worker needs the leader's folder")?;
    let job = ElasticJob::join(args.options()?)?;
    let mut job = job.context(
        "--elastic: no launcher coordinates this worker; leave it out under another launcher",
    )?;
    let stop = stop_flag()?;
    let computation = computation::waiting(&plan)?;
    let recorder = StepRecorder::waiting(plan.batch as u64);
    let mut part = Part::new(&plan, computation, None, recorder, stop);
    // The steps after which this worker was in the middle of another when its group failed.
    let mut failed_after = None;
    let mut kept = None;
    while let Some(group) = part.computation.enter(&mut job)? {
        match epoch(args, &job, &group, &dir, &mut part, failed_after.take(), &mut kept) {
            Ok(Some(said)) => {
                crash::point("summed-up");
                job.finish(serde_json::to_vec(&said)?)?;
                crash::point("handed-in");
                return Ok(());
            }
            Ok(None) => {}
            Err(error) => {
                if let Some(of_group) = group_error(&error) {
                    job.note_loss(of_group)?;
                } else if let Some(of_form) = form_error(&error) {
                    job.note_unformed(of_form)?;
                } else {
                    return Err(error);
                }
                failed_after = Some(part.computation.steps());
            }
        }
    }
    Ok(())
}

/// Takes part in an epoch; what there is to say at its end, if this is rank 0 and the run is over.
fn epoch(
    args: &TrainArgs,
    job: &ElasticJob,
    group: &Group,
    dir: &Path,
    part: &mut Part<'_>,
    before: Option<u64>,
    kept: &mut Option<Kept>,
) -> anyhow::Result<Option<Said>> {
    let plan = part.plan;
    expect_equal_plans(plan, group)?;
    crash::point("formed");
    let regrouped = regroup(group, part)?;
    crash::point("regrouped");
    if group.rank() == 0 && part.rank_zero.is_none() {
        // What an earlier rank 0 has saved belongs to this run.
        let plan = RunPlan { resume: plan.resume || job.epoch() > 1, ..plan.clone() };
        part.rank_zero = Some(RankZero::open(&plan, args)?);
    }
    let has_gone_back = match regrouped.donor {
        Some(_) => false,
        None => begin(job, group, part, kept.as_ref())?,
    };
    *kept = None;
    part.computation.hand_over(job);
    let steps = part.computation.steps();
    record(group, dir, part, steps)?;
    crash::point("recording");
    let mut is_first = group.rank() == 0;
    let stepped = |step: u64, outcome: &unisono::sync::StepOutcome| {
        if !std::mem::take(&mut is_first) {
            return Ok(());
        }
        Ok(job.stepped(FirstStep {
            epoch: job.epoch(),
            step,
            compute: outcome.times.compute.as_secs_f64(),
            redone: before.is_some_and(|before| before >= steps),
            behind: regrouped.behind as u64,
            from_checkpoint: has_gone_back,
        })?)
    };
    let computing = |shard| Ok(job.note_shard(shard)?);
    if part.train(group, || job.is_asked_to_regroup(), computing, stepped)? == Until::Regroup {
        // What a codec remembers is with the worker of each shard, and that changes.
        if plan.compression.is_some() {
            *kept = part.computation.keep(group)?;
            group.barrier()?;
        }
        return Ok(None);
    }
    // From here on all have all steps: if rank 0 is lost now, another can say as much.
    crash::point("trained");
    group.barrier()?;
    crash::point("finished");
    let failure = part.expect_finite_loss(group).err();
    if let Some(error) = &failure
        && group_error(error).is_some()
    {
        return Err(failure.expect("it is there"));
    }
    let interrupted = part.is_interrupted();
    let text = part.sum_up(None, args.json)?;
    let failure = failure.map(|error| crate::one_line(&error));
    Ok(text.map(|text| Said { text, failure, interrupted }))
}

/// Goes on in a group, with the state of those that have the most.
fn regroup(group: &Group, part: &mut Part<'_>) -> anyhow::Result<Regrouped> {
    match part.computation.regroup(group) {
        // What a codec remembers from step to step is gone, on all ranks: as if none had any state.
        Err(error) if is_state_lost(&error) => {
            Ok(Regrouped { steps: 0, donor: None, behind: group.size(), bytes: 0 })
        }
        regrouped => regrouped,
    }
}

/// Brings workers none of which has all of its state to what rank 0 has kept of it, or to the last checkpoint,
/// if there is one; whether the run has gone back.
fn begin(
    job: &ElasticJob,
    group: &Group,
    part: &mut Part<'_>,
    kept: Option<&Kept>,
) -> anyhow::Result<bool> {
    let mut is_kept = [u8::from(kept.is_some())];
    group.broadcast(&mut is_kept, 0)?;
    if is_kept[0] == 1 {
        part.computation.restore_kept(group, kept)?;
        return Ok(false);
    }
    let plan = RunPlan { resume: part.plan.resume || job.epoch() > 1, ..part.plan.clone() };
    let found = match &mut part.rank_zero {
        Some(RankZero { saver: Some(saver), .. }) => saver.find(&plan)?,
        _ => None,
    };
    let mut is_found = [u8::from(found.is_some())];
    group.broadcast(&mut is_found, 0)?;
    if is_found[0] == 1 {
        resume(&mut *part.computation, found.as_ref().map(|found| &found.checkpoint), group)?;
    } else {
        // The weights may be those of a worker that was lost while it handed them over.
        part.computation = computation::waiting(part.plan)?;
        part.computation.regroup(group)?;
        part.computation.begin_anew(group)?;
    }
    if let (Some(RankZero { saver: Some(saver), .. }), Some(found)) = (&mut part.rank_zero, &found)
    {
        remark!("unisono: going on from {}", found.checkpoint.path().display());
        saver.resumed(found.checkpoint.step());
    } else if group.rank() == 0 && job.epoch() > 1 {
        remark!("unisono: all workers were lost; beginning anew");
    }
    Ok(true)
}

fn is_state_lost(error: &anyhow::Error) -> bool {
    matches!(sync_error(error), Some(SyncError::StateLost { .. }))
}

/// Records the run from now on: in the folder that an earlier rank 0 has made, or in a new one.
fn record(group: &Group, dir: &Path, part: &mut Part<'_>, steps: u64) -> anyhow::Result<()> {
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
