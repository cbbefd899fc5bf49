//! What rank 0 keeps of a run: its folder, its checkpoints, and what people see of it.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::json;
use unisono::insight::folder::{FolderError, RunFolder};
use unisono::insight::{Outcome, RunInfo, Scaling};
use unisono::{Group, Job, Transport};

use super::args::{Plan, TrainArgs};
use super::checkpoint::Saver;
use super::progress::Reporter;
use super::trainee::Trainee;

/// What rank 0 has to look after besides.
pub struct Home {
    folder: Option<RunFolder>,
    run_dir: Option<PathBuf>,
    pub saver: Option<Saver>,
    pub reporter: Reporter,
}

impl Home {
    pub fn open(plan: &Plan, args: &TrainArgs) -> anyhow::Result<Home> {
        Ok(Home {
            folder: None,
            run_dir: plan.run_dir.clone(),
            saver: Saver::open(plan)?,
            reporter: Reporter::new(plan.steps, plan.batch, args.as_worker),
        })
    }

    /// Makes the folder of the run.
    pub fn begin(
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

    pub fn folder(&mut self) -> &mut RunFolder {
        self.folder.as_mut().expect("made before the first step")
    }

    /// Sums the run up and says how it went.
    pub fn end(
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
pub fn host_names(group: &Group) -> anyhow::Result<Vec<String>> {
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
