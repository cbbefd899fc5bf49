//! One worker of a training run.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use signal_hook::consts::{SIGINT, SIGTERM};
use unisono::candle::ReplicaError;
use unisono::insight::Scaling;
use unisono::sync::SyncError;
use unisono::{Error, Group, Job, Options};

use super::args::{Plan, TrainArgs};
use super::checkpoint::{resume, save};
use super::home::{Home, host_names};
use super::recorder::Recorder;
use super::trainee;

/// Steps that one worker alone is measured for, after as many that do not count.
const SCALING_STEPS: u64 = 10;

/// Joins the job and trains.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let options = args.options()?;
    let job = Job::join_with(options).context("joining the job")?;
    // Not before: who waits for others to come has nothing to finish, and a signal ends it at once.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }
    let group = job.world();
    let plan = args.plan(group.size())?;
    expect_equal_plans(&plan, group)?;
    let scaling = match plan.measure_scaling {
        true => measure_alone(&plan, group)?,
        false => None,
    };
    let mut trainee = trainee::build(&plan, group)?;
    let mut home = match group.rank() {
        0 => Some(Home::open(&plan, args)?),
        _ => None,
    };
    let checkpoint = match &mut home {
        Some(Home { saver: Some(saver), .. }) => saver.find(&plan)?,
        _ => None,
    };
    resume(&mut *trainee, checkpoint.as_ref(), group)?;
    if let (Some(Home { saver: Some(saver), .. }), Some(checkpoint)) = (&mut home, &checkpoint) {
        eprintln!("unisono: going on from {}", checkpoint.path().display());
        saver.resumed(checkpoint.step());
    }
    drop(checkpoint);
    let mut recorder = Recorder::new(group, plan.batch)?;
    let hosts = host_names(group)?;
    if let Some(home) = &mut home {
        home.begin(&plan, &job, &*trainee, hosts, recorder.clock_error)?;
    }
    let slowness = plan.slow.filter(|(rank, _)| *rank == group.rank()).map_or(1.0, |(_, s)| s);

    let (mut interrupted, mut diverged) = (false, false);
    trainee.synchronizer().begin_step();
    while trainee.steps() < plan.steps && !interrupted && !diverged {
        let step = trainee.steps();
        if stop.load(Ordering::Relaxed) {
            trainee.synchronizer().vote_to_stop();
        }
        while trainee.shard(step, slowness)? {}
        let outcome = trainee.finish()?;
        // The same on all ranks, as the loss is if they have agreed on it.
        interrupted = outcome.agreed && outcome.stop;
        diverged = outcome.agreed && !outcome.loss.is_finite();
        // A worker by itself cannot tell the others but by giving up.
        ensure!(
            outcome.agreed || outcome.loss.is_finite(),
            "the loss is no longer a number since step {}; lower --learning-rate, or resume from an \
             earlier checkpoint with other data",
            trainee.steps()
        );
        recorder.note(trainee.steps(), &outcome, trainee.synchronizer().sent());
        if let (Some(home), Some(advice)) = (&mut home, &outcome.advice) {
            home.advise(trainee.steps(), advice)?;
        }
        if let Some(home) = &mut home {
            home.reporter.step(trainee.steps(), &outcome);
        }
        let over = trainee.steps() == plan.steps || interrupted || diverged;
        let due = |every: u64| every > 0 && trainee.steps().is_multiple_of(every);
        // Decided alike on all ranks, for they must all take part in what follows.
        let checks = plan.check_every > 0 && (due(plan.check_every) || over);
        // A checkpoint of a run that is lost would only push out a good one.
        let saves =
            plan.checkpoint_dir.is_some() && !diverged && (due(plan.checkpoint_every) || over);
        let hands_in = recorder.is_due() || over;
        if checks {
            trainee.check(group)?;
        }
        if saves {
            let saver = home.as_mut().and_then(|home| home.saver.as_mut());
            save(&plan, &*trainee, saver, group)?;
        }
        if hands_in {
            let records = recorder.hand_in(group)?;
            if let Some(home) = &mut home {
                for record in &records {
                    home.folder().append(record)?;
                }
            }
        }
        if checks || saves || hands_in {
            // That was no part of the next step.
            group.barrier()?;
            trainee.synchronizer().begin_step();
        }
    }
    trainee.settle()?;
    if let Some(home) = home {
        home.end(&plan, &*trainee, scaling, interrupted, args.json)?;
    }
    // The others stay until rank 0 has written all.
    group.barrier()?;
    ensure!(
        !diverged,
        "the loss is no longer a number since step {}; lower --learning-rate, or resume from an \
         earlier checkpoint with other data",
        trainee.steps()
    );
    Ok(ExitCode::SUCCESS)
}

/// Whether a worker failed only because another one was gone.
pub fn is_consequence(error: &anyhow::Error) -> bool {
    let sync = match error.downcast_ref() {
        Some(ReplicaError::Sync(sync)) => Some(sync),
        _ => error.downcast_ref(),
    };
    let group = match sync {
        Some(SyncError::Group(group)) => Some(group),
        _ => error.downcast_ref(),
    };
    matches!(group, Some(Error::PeerLost { .. } | Error::Aborted { .. } | Error::EpochEnded { .. }))
}

/// Fails on all ranks if one was started with other settings than rank 0.
fn expect_equal_plans(plan: &Plan, group: &Group) -> anyhow::Result<()> {
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
fn measure_alone(plan: &Plan, group: &Group) -> anyhow::Result<Option<Scaling>> {
    let mut scaling = None;
    if group.rank() == 0 {
        let alone = Group::local(1, &Options::default())?.remove(0);
        // Alone, it would send nothing, and not encode it either.
        let plan = &Plan { compression: None, strategy: Default::default(), ..plan.clone() };
        let mut trainee = trainee::build(plan, &alone)?;
        let mut start = Instant::now();
        for step in 0..2 * SCALING_STEPS {
            if step == SCALING_STEPS {
                start = Instant::now();
            }
            while trainee.shard(step, 1.0)? {}
            trainee.finish()?;
        }
        let samples = (SCALING_STEPS * plan.batch as u64) as f64;
        let one_worker_samples_per_s = samples / start.elapsed().as_secs_f64();
        scaling = Some(Scaling { one_worker_samples_per_s });
    }
    group.barrier()?;
    Ok(scaling)
}
