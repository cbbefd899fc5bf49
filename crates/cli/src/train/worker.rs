//! One worker of a training run.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use unisono::candle::ReplicaError;
use unisono::insight::folder::{FolderError, RunFolder};
use unisono::insight::{Outcome, RunInfo, Scaling};
use unisono::sync::SyncError;
use unisono::{Error, Group, Job, Options, Transport};

use super::args::{Plan, TrainArgs};
use super::checkpoint::{Saver, resume};
use super::progress::Reporter;
use super::recorder::Recorder;
use super::trainee::{self, Trainee};

/// Steps that one worker alone is measured for, after as many that do not count.
const SCALING_STEPS: u64 = 10;

/// Joins the job and trains.
pub fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let options = args.options()?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }
    let job = Job::join_with(options).context("joining the job")?;
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

    let mut interrupted = false;
    trainee.synchronizer().begin_step();
    while trainee.steps() < plan.steps && !interrupted {
        let step = trainee.steps();
        if stop.load(Ordering::Relaxed) {
            trainee.synchronizer().vote_to_stop();
        }
        while trainee.shard(step, slowness)? {}
        let outcome = trainee.finish()?;
        interrupted = outcome.stop;
        recorder.note(trainee.steps(), &outcome, trainee.synchronizer().sent());
        if let Some(home) = &mut home {
            home.reporter.step(trainee.steps(), &outcome);
        }
        let over = trainee.steps() == plan.steps || interrupted;
        let due = |every: u64| every > 0 && trainee.steps().is_multiple_of(every);
        // Decided alike on all ranks, for they must all take part in what follows.
        let checks = due(plan.check_every) || over;
        let saves = plan.checkpoint_dir.is_some() && (due(plan.checkpoint_every) || over);
        let hands_in = recorder.is_due() || over;
        if checks {
            trainee.check(group)?;
        }
        if let Some(Home { saver: Some(saver), .. }) = &mut home
            && saves
        {
            saver.save(&plan, &*trainee)?;
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
    if let Some(home) = home {
        home.end(&plan, &*trainee, scaling, interrupted, args.json)?;
    }
    // The others stay until rank 0 has written all.
    group.barrier()?;
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

/// What rank 0 has to look after besides.
struct Home {
    folder: Option<RunFolder>,
    run_dir: Option<PathBuf>,
    saver: Option<Saver>,
    reporter: Reporter,
}

impl Home {
    fn open(plan: &Plan, args: &TrainArgs) -> anyhow::Result<Home> {
        Ok(Home {
            folder: None,
            run_dir: plan.run_dir.clone(),
            saver: Saver::open(plan)?,
            reporter: Reporter::new(plan.steps, plan.batch, args.as_worker),
        })
    }

    /// Makes the folder of the run.
    fn begin(
        &mut self,
        plan: &Plan,
        job: &Job,
        trainee: &dyn Trainee,
        hosts: Vec<String>,
        clock_error: f64,
    ) -> anyhow::Result<()> {
        let info = RunInfo { hosts, clock_error, ..describe(plan, job, trainee) };
        let folder = match &self.run_dir {
            Some(dir) => RunFolder::create(dir, &info).context("--run-dir")?,
            None => create_in_runs(&info)?,
        };
        self.folder = Some(folder);
        Ok(())
    }

    fn folder(&mut self) -> &mut RunFolder {
        self.folder.as_mut().expect("made before the first step")
    }

    /// Sums the run up and says how it went.
    fn end(
        mut self,
        plan: &Plan,
        trainee: &dyn Trainee,
        scaling: Option<Scaling>,
        interrupted: bool,
        json: bool,
    ) -> anyhow::Result<()> {
        let outcome =
            Outcome { accuracy: trainee.accuracy()?, weights_hash: trainee.weights_hash() };
        let folder = self.folder.take().expect("made before the first step");
        let run = folder.finish(outcome, scaling)?;
        let summary = run.summary.as_ref().context("a finished run has a summary")?;
        self.reporter.finish();
        if json {
            let mut object = serde_json::to_value(summary)?;
            object["step"] = json!(trainee.steps());
            object["interrupted"] = json!(interrupted);
            object["report"] = json!(run.report_path());
            println!("{object}");
            return Ok(());
        }
        if interrupted {
            let resume = match plan.checkpoint_dir {
                Some(_) => "; add --resume to go on from here",
                None => "; without --checkpoint-dir it cannot be continued",
            };
            println!("stopped after step {} of {}{resume}", trainee.steps(), plan.steps);
        }
        print!("loss {:.4}", summary.final_loss);
        if let Some(accuracy) = summary.accuracy {
            print!(", held-out accuracy {:.1} %", accuracy * 100.0);
        }
        println!(", weights {}", summary.weights_hash);
        println!("{}", run.report().terminal(100));
        println!("report: {}", run.report_path().display());
        Ok(())
    }
}

/// Makes the first folder in `runs` that does not exist.
fn create_in_runs(info: &RunInfo) -> anyhow::Result<RunFolder> {
    for number in 1.. {
        match RunFolder::create(format!("runs/{}-{number}", info.name), info) {
            Err(FolderError::Occupied { .. }) => {}
            made => return made.context("making a folder for the report; choose one by --run-dir"),
        }
    }
    unreachable!("there are more numbers than folders")
}

/// The run, for its report.
fn describe(plan: &Plan, job: &Job, trainee: &dyn Trainee) -> RunInfo {
    let group = job.world();
    let topology = group.topology();
    let (model, data) = plan.names();
    let name = model.split([' ', ':', '/']).next().unwrap_or("run").to_owned();
    let mut settings = toml::Table::new();
    let mut set = |key: &str, value: toml::Value| settings.insert(key.to_owned(), value);
    for (key, value) in plan.identity() {
        set(key, value.into());
    }
    set("steps", (plan.steps as i64).into());
    set("accumulate", (plan.accumulate as i64).into());
    set("overlap", plan.overlap.into());
    set("bucket", plan.buckets.map_or("tuned".into(), |sizes| (sizes.others as i64).into()));
    set("check_every", (plan.check_every as i64).into());
    if let Some(dir) = &plan.checkpoint_dir {
        set("checkpoint_dir", dir.display().to_string().into());
        set("checkpoint_every", (plan.checkpoint_every as i64).into());
        set("resume", plan.resume.into());
    }
    set("resumed_at", (trainee.steps() as i64).into());
    set("timeout_s", group.options().timeout.as_secs_f64().into());
    set("streams", (group.options().streams as i64).into());
    if let Some((rank, factor)) = plan.slow {
        set("slow", format!("{rank}:{factor}").into());
    }
    RunInfo {
        name,
        model,
        data,
        strategy: trainee.synchronizer().strategy().to_owned(),
        transport: match group.options().transport {
            _ if group.size() == 1 => "none",
            Transport::Tcp => "tcp",
            _ if topology.is_one_host() => "shm",
            _ if topology.is_all_apart() => "tcp",
            _ => "shm and tcp",
        }
        .to_owned(),
        algorithm: group.options().algorithm.map_or("auto", |a| a.name()).to_owned(),
        workers: group.size(),
        shards: plan.shards,
        settings,
        ..RunInfo::default()
    }
}

/// The name of every rank's host. All ranks must call it. Hosts of one name, as containers are apt to
/// have, are told apart by a number.
fn host_names(group: &Group) -> anyhow::Result<Vec<String>> {
    const LONGEST: usize = 64;
    let uname = rustix::system::uname();
    let name = uname.nodename().to_bytes();
    let length = name.len().min(LONGEST);
    // A name, then what makes a host one: the running kernel and its network.
    let mut own = [0u8; LONGEST + 8];
    own[..length].copy_from_slice(&name[..length]);
    let kernel = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&kernel).update(network.as_os_str().as_encoded_bytes());
    own[LONGEST..].copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    let mut all = vec![0; own.len() * group.size()];
    group.all_gather(&own, &mut all)?;

    let hosts: Vec<&[u8]> = all.chunks(own.len()).collect();
    let label = |host: &&[u8]| {
        let name = String::from_utf8_lossy(&host[..LONGEST]);
        let name = name.trim_end_matches('\0');
        let mut namesakes: Vec<&[u8]> = Vec::new();
        for other in hosts.iter().filter(|other| other[..LONGEST] == host[..LONGEST]) {
            if !namesakes.contains(other) {
                namesakes.push(other);
            }
        }
        match namesakes.iter().position(|other| other == host) {
            Some(number) if namesakes.len() > 1 => format!("{name} {number}"),
            _ => name.to_owned(),
        }
    };
    Ok(hosts.iter().map(label).collect())
}

/// Fails on all ranks if one was started with other settings than rank 0.
fn expect_equal_plans(plan: &Plan, group: &Group) -> anyhow::Result<()> {
    let mut settings = plan.identity();
    settings.push(("steps", plan.steps.to_string()));
    settings.push(("check-every", plan.check_every.to_string()));
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
