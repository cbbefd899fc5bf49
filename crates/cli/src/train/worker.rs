//! One worker of a training run.

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context, bail};

use unisono::candle::ReplicaError;
use unisono::insight::Scaling;
use unisono::recording::RecordError;
use unisono::recording::steps::StepRecorder;
use unisono::sync::SyncError;
use unisono::worker::WorkerError;
use unisono::{Error, Group, Job, JoinError, Options, Reduction};

use super::args::{RunPlan, TrainArgs};
use super::checkpoint::{resume, save};
use super::computation;
use super::rank_zero::RankZero;
use super::stop_flag;
use crate::exit::Wrong;

/// Steps that one worker alone is measured for, after as many that do not count.
const SCALING_STEPS: u64 = 10;

/// Joins the job and trains.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let job = Job::join_with(args.options()?).context("joining the job")?;
    // Only now: before workers have met there is nothing to finish, and a signal may end them at once.
    let stop = stop_flag()?;
    let group = job.world();
    let plan = args.plan(group.size())?;
    expect_equal_plans(&plan, group)?;
    if group.rank() == 0 && !args.as_worker {
        plan.notices().iter().for_each(|notice| remark!("unisono: {notice}"));
    }
    let scaling = match plan.measure_scaling {
        true => measure_alone(&plan, group)?,
        false => None,
    };
    let mut computation = computation::build(&plan, group)?;
    let mut rank_zero = match group.rank() {
        0 => Some(RankZero::open(&plan, args)?),
        _ => None,
    };
    let found = match &mut rank_zero {
        Some(RankZero { saver: Some(saver), .. }) => saver.find(&plan)?,
        _ => None,
    };
    resume(&mut *computation, found.as_ref().map(|found| &found.checkpoint), group)?;
    if let (Some(RankZero { saver: Some(saver), .. }), Some(found)) = (&mut rank_zero, &found) {
        remark!("unisono: going on from {}", found.checkpoint.path().display());
        let step = found.checkpoint.step();
        if let Some(rate) = &found.other_rate {
            remark!(
                "unisono: learning rate {} instead of {rate} from step {} on",
                plan.optimizer.learning_rate(),
                step + 1
            );
        }
        saver.resumed(step);
    }
    drop(found);
    let info = rank_zero.as_ref().map(|rank_zero| rank_zero.describe(&plan, group, &*computation));
    let dir = plan.run_dir.as_deref();
    let recorder = StepRecorder::begin(group, dir, info.unwrap_or_default(), plan.batch as u64);
    let mut recorder = match (recorder, dir) {
        (Err(RecordError::Folder(error)), Some(_)) => {
            Err(error).context("--run-dir").wrong_call()?
        }
        (Err(RecordError::Folder(error)), None) => {
            let to_do = "making a folder for the report; choose one by --run-dir";
            Err(error).context(to_do).wrong_call()?
        }
        (recorder, _) => recorder?,
    };
    let slowness = plan.slowness(group.rank());

    let (mut interrupted, mut diverged) = (false, false);
    // The step since which this worker's loss, as far as it knows it, is no number.
    let mut lost_since = None;
    computation.synchronizer().begin_step();
    while computation.steps() < plan.steps && !interrupted && !diverged {
        let step = computation.steps();
        if stop.load(Ordering::Relaxed) {
            computation.synchronizer().vote_to_stop();
        }
        while computation.shard(step, slowness)? {}
        let outcome = computation.finish()?;
        // The same on all ranks, as the loss is if they have agreed on it.
        interrupted = outcome.agreed && outcome.stop;
        diverged = outcome.agreed && !outcome.loss.is_finite();
        lost_since = match outcome.loss.is_finite() {
            true => None,
            false => lost_since.or(Some(computation.steps())),
        };
        recorder.note(computation.steps(), &outcome, computation.synchronizer().sent());
        if let (Some(rank_zero), Some(advice)) = (&rank_zero, &outcome.advice) {
            rank_zero.advise(advice);
            if let Err(error) = recorder.advise(computation.steps(), advice) {
                say!(
                    "unisono: warning: {error}; the report will not say why this codec was chosen"
                );
            }
        }
        if let Some(rank_zero) = &mut rank_zero {
            rank_zero.reporter.step(computation.steps(), &outcome);
        }
        let mut over = computation.steps() == plan.steps || interrupted || diverged;
        let due = |every: u64| every > 0 && computation.steps().is_multiple_of(every);
        // Decided alike on all ranks, for they must all take part in what follows.
        let checks = plan.check_every > 0 && (due(plan.check_every) || over);
        let saves = plan.checkpoint_dir.is_some() && (due(plan.checkpoint_every) || over);
        let hands_in = recorder.is_due() || over;
        if !outcome.agreed && (checks || saves || hands_in) {
            // A worker that steps by itself cannot tell the others before they talk anyway.
            diverged = earliest(lost_since, group)?.is_some();
            over |= diverged;
        }
        // A checkpoint of a run that is lost would only push out a good one.
        let (saves, hands_in) = (saves && !diverged, hands_in || over);
        if checks {
            computation.check(group)?;
        }
        if saves {
            let saver = rank_zero.as_mut().and_then(|rank_zero| rank_zero.saver.as_mut());
            save(&plan, &*computation, saver, group)?;
        }
        if hands_in && let Err(error) = recorder.hand_in(group)? {
            say!("unisono: warning: {error}; the run goes on, and its report will be incomplete");
        }
        if checks || saves || hands_in {
            // That was no part of the next step.
            group.barrier()?;
            computation.synchronizer().begin_step();
        }
    }
    computation.settle()?;
    let told = match rank_zero {
        Some(rank_zero) => {
            rank_zero.end(&plan, &*computation, recorder, scaling, interrupted, args.json)
        }
        None => Ok(()),
    };
    // The others stay until rank 0 has written all, and do not lose it if its reader has gone.
    group.barrier()?;
    told?;
    if diverged {
        let step = earliest(lost_since, group)?.unwrap_or(computation.steps());
        let rate = plan.optimizer.learning_rate();
        let advice = match plan.checkpoint_dir {
            Some(_) => "go on from the last checkpoint by --resume with a lower --learning-rate",
            None => "start again with a lower --learning-rate",
        };
        bail!("the loss is no longer a number since step {step}; {advice} (it was {rate})");
    }
    Ok(ExitCode::SUCCESS)
}

/// The earliest step that any rank names. All ranks must call it.
fn earliest(step: Option<u64>, group: &Group) -> anyhow::Result<Option<u64>> {
    let mut first = [step.map_or(i64::MAX, |step| step as i64)];
    group.all_reduce(&mut first, Reduction::Min)?;
    Ok((first[0] < i64::MAX).then_some(first[0] as u64))
}

/// Whether a worker failed only because another one was gone.
pub fn is_consequence(error: &anyhow::Error) -> bool {
    let sync = match error.downcast_ref() {
        Some(ReplicaError::Worker(WorkerError::Sync(sync))) => Some(sync),
        _ => error.downcast_ref(),
    };
    let group = match sync {
        Some(SyncError::Group(group)) => Some(group),
        _ => match error.downcast_ref() {
            Some(RecordError::Group(group)) => Some(group),
            _ => error.downcast_ref(),
        },
    };
    matches!(group, Some(Error::PeerLost { .. } | Error::Aborted { .. } | Error::EpochEnded { .. }))
        || matches!(error.downcast_ref(), Some(JoinError::Rendezvous(_) | JoinError::Form(_)))
}

/// Fails on all ranks if one was started with other settings than rank 0.
fn expect_equal_plans(plan: &RunPlan, group: &Group) -> anyhow::Result<()> {
    let mut settings = plan.identity();
    settings.push(("steps", plan.steps.to_string()));
    settings.push(("check-every", plan.check_every.to_string()));
    settings.push(("checkpoint-dir (one or none)", plan.checkpoint_dir.is_some().to_string()));
    settings.push(("checkpoint-every", plan.checkpoint_every.to_string()));
    settings.push(("measure-scaling", plan.measure_scaling.to_string()));
    settings.push(("bucket", format!("{:?}", plan.buckets)));
    settings.push(("no-overlap", (!plan.overlap).to_string()));
    let hash = |value: &str| {
        let hash = blake3::hash(value.as_bytes());
        i64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
    };
    let own: Vec<i64> = settings.iter().map(|(_, value)| hash(value)).collect();
    let mut all = vec![0; own.len() * group.size()];
    group.all_gather(&own, &mut all)?;
    for (rank, theirs) in all.chunks(own.len()).enumerate() {
        if let Some(i) = (0..own.len()).find(|i| theirs[*i] != all[*i]) {
            let (key, value) = &settings[i];
            bail!(
                "rank {rank} and rank 0 were started with different settings of {key} (here {value}); \
                 start all workers with the same"
            );
        }
    }
    Ok(())
}

/// How fast rank 0 is by itself, with all shards, while the others wait.
fn measure_alone(plan: &RunPlan, group: &Group) -> anyhow::Result<Option<Scaling>> {
    let mut scaling = None;
    if group.rank() == 0 {
        let alone = Group::local(1, &Options::default())?.remove(0);
        // Alone, it would send nothing, and not encode it either.
        let plan = &RunPlan { compression: None, strategy: Default::default(), ..plan.clone() };
        let mut computation = computation::build(plan, &alone)?;
        let mut start = Instant::now();
        for step in 0..2 * SCALING_STEPS {
            if step == SCALING_STEPS {
                start = Instant::now();
            }
            while computation.shard(step, 1.0)? {}
            computation.finish()?;
        }
        let samples = (SCALING_STEPS * plan.batch as u64) as f64;
        let one_worker_samples_per_s = samples / start.elapsed().as_secs_f64();
        scaling = Some(Scaling { one_worker_samples_per_s });
    }
    group.barrier()?;
    Ok(scaling)
}
