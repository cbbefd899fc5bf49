//! One worker of a training run.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};

use unisono::candle::ReplicaError;
use unisono::elastic::Session;
use unisono::insight::Scaling;
use unisono::recording::RecordError;
use unisono::recording::steps::StepRecorder;
use unisono::sync::SyncError;
use unisono::{Error, FormError, Group, Job, JoinError, Options};

use super::args::{RunPlan, TrainArgs};
use super::checkpoint::resume;
use super::computation;
use super::part::{Part, present};
use super::rank_zero::RankZero;
use super::stop_flag;
use crate::exit::Wrong;
use crate::output;

/// Steps that one worker alone is measured for, after as many that do not count.
const SCALING_STEPS: u64 = 10;

/// Joins the job and trains.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let job = Job::join_with(args.options()?).context("joining the job")?;
    let mut session = Session::fixed(job);
    // Only now: before workers have met there is nothing to finish, and a signal may end them at once.
    let stop = stop_flag()?;
    let group = present(&session)?;
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
    let recorder = match (recorder, dir) {
        (Err(RecordError::Folder(error)), Some(_)) => {
            Err(error).context("--run-dir").wrong_call()?
        }
        (Err(RecordError::Folder(error)), None) => {
            let to_do = "making a folder for the report; choose one by --run-dir";
            Err(error).context(to_do).wrong_call()?
        }
        (recorder, _) => recorder?,
    };
    let mut part = Part::new(&plan, computation, rank_zero, recorder, stop);
    part.train(&mut session)?;
    let told = part.sum_up(scaling, args.json).and_then(|text| match text {
        Some(text) => Ok(output::text_out(&text)?),
        None => Ok(()),
    });
    // The others stay until rank 0 has written all, and do not lose it if its reader has gone.
    let group = present(&session)?;
    group.barrier()?;
    told?;
    part.expect_finite_loss(group)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a worker failed only because another one was gone.
pub fn is_consequence(error: &anyhow::Error) -> bool {
    matches!(
        sync_error(error),
        Some(SyncError::Group(
            Error::PeerLost { .. } | Error::Aborted { .. } | Error::EpochEnded { .. }
        ))
    ) || matches!(error.downcast_ref(), Some(JoinError::Rendezvous(_) | JoinError::Form(_)))
}

/// Why workers could not be kept in step, if that is behind an error.
pub fn sync_error(error: &anyhow::Error) -> Option<SyncError> {
    let of_group = match error.downcast_ref() {
        Some(RecordError::Group(group)) => Some(group),
        _ => error.downcast_ref::<Error>(),
    };
    let of_form = error.downcast_ref::<FormError>();
    let of_replica = error.downcast_ref().and_then(ReplicaError::sync);
    let direct = error.downcast_ref::<SyncError>();
    of_group
        .map(|error| SyncError::Group(error.clone()))
        .or_else(|| of_form.map(|error| SyncError::Form(error.clone())))
        .or_else(|| of_replica.or(direct).cloned())
}

/// Fails on all ranks if one was started with other settings than rank 0.
pub fn expect_equal_plans(plan: &RunPlan, group: &Group) -> anyhow::Result<()> {
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
