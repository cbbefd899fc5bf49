//! What rank 0 keeps of a run: its folder, its checkpoints, and what people see of it.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::Context;
use serde_json::json;
use unisono::insight::advice::{Advice, Prediction};
use unisono::insight::folder::{FolderError, RunFolder};
use unisono::insight::{Outcome, RunInfo, Scaling, StepRecord, units};
use unisono::sync::shards::Shards;
use unisono::sync::strategy::StrategySpec;
use unisono::sync::{Parameter, advice as sync};
use unisono::{Group, Job, Transport};

use super::args::{Plan, TrainArgs, Work};
use super::checkpoint::Saver;
use super::progress::Reporter;
use super::trainee::Trainee;
use crate::exit::Wrong;
use crate::output;

/// Records of steps that are remembered when they cannot be written, for the figures at the end. More
/// make those of a long run right; fewer keep its memory for the model.
const REMEMBERED: usize = 10_000;

/// What rank 0 has to look after besides.
pub struct Home {
    folder: Option<RunFolder>,
    /// Records of the newest steps, since one could not be written.
    unwritten: Option<VecDeque<StepRecord>>,
    run_dir: Option<PathBuf>,
    pub saver: Option<Saver>,
    pub reporter: Reporter,
}

impl Home {
    pub fn open(plan: &Plan, args: &TrainArgs) -> anyhow::Result<Home> {
        Ok(Home {
            folder: None,
            unwritten: None,
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
        let mut info = RunInfo { hosts, clock_error, ..describe(plan, job, trainee) };
        if let Some(rates) = self.saver.as_ref().and_then(|saver| saver.earlier_rates.clone()) {
            info.settings.insert("earlier_learning_rates".to_owned(), rates.into());
        }
        let folder = match &self.run_dir {
            Some(dir) => RunFolder::create(dir, &info).context("--run-dir").wrong_call()?,
            None => create_in_runs(&info)?,
        };
        self.folder = Some(folder);
        Ok(())
    }

    /// Records steps. A disk that is full costs the report and not the run.
    pub fn record(&mut self, steps: Vec<StepRecord>) {
        let folder = self.folder.as_mut().expect("made before the first step");
        for step in steps {
            if self.unwritten.is_none()
                && let Err(error) = folder.append(&step)
            {
                say!(
                    "unisono: warning: {error}; the run goes on, and its report will be incomplete"
                );
                self.unwritten = Some(VecDeque::new());
            }
            if let Some(unwritten) = &mut self.unwritten {
                unwritten.push_back(step);
                if unwritten.len() > REMEMBERED {
                    unwritten.pop_front();
                }
            }
        }
    }

    /// Records which codec was chosen, and why.
    pub fn advise(&mut self, step: u64, advice: &sync::Advice) {
        let prediction = |row: &sync::Prediction| Prediction {
            codec: row.codec.clone(),
            seconds: row.seconds,
            coding_seconds: row.coding_seconds,
            wire_bytes: row.wire_bytes,
        };
        let chosen = advice.chosen.as_ref().map_or("none".to_owned(), ToString::to_string);
        let sync::Cost { steps, bytes, seconds } = advice.cost;
        remark!(
            "unisono: codec {chosen}: {} (to decide, {} were sent in {}, after {steps} steps without \
             a codec)",
            advice.reason,
            units::bytes(bytes as f64),
            units::duration(seconds),
        );
        let advice = Advice {
            step,
            rows: advice.rows.iter().map(prediction).collect(),
            chosen,
            measured_dense_seconds: advice.measured_dense_seconds,
            reason: advice.reason.clone(),
            observed_steps: steps,
            deciding_bytes: bytes,
            deciding_seconds: seconds,
        };
        let folder = self.folder.as_mut().expect("made before the first step");
        if let Err(error) = folder.advise(&advice) {
            say!("unisono: warning: {error}; the report will not say why this codec was chosen");
        }
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
        let judgement = trainee.judge()?;
        let outcome = Outcome {
            accuracy: judgement.map(|judgement| judgement.accuracy),
            held_out_loss: judgement.map(|judgement| judgement.loss),
            weights_hash: trainee.weights_hash(),
        };
        let folder = self.folder.take().expect("made before the first step");
        let unwritten = self.unwritten.take();
        let is_complete = unwritten.is_none();
        let rest = unwritten.unwrap_or_default().into();
        let (run, written) = folder.finish_with(rest, outcome, scaling);
        let is_written = written.is_ok();
        if let Err(error) = written {
            say!("unisono: warning: {error}; there is no report of this run");
        }
        let summary = run.summary.as_ref().context("a finished run has a summary")?;
        self.reporter.finish();
        if json {
            let mut object = serde_json::to_value(summary)?;
            object["step"] = json!(trainee.steps());
            object["interrupted"] = json!(interrupted);
            object["batch"] = json!(plan.batch);
            object["earlier_learning_rates"] = json!(run.info.earlier_rates());
            object["report"] = json!(is_written.then(|| run.report_path()));
            return Ok(result_line!("{object}")?);
        }
        let mut out = String::new();
        if interrupted {
            let resume = match plan.checkpoint_dir {
                Some(_) => "; add --resume to go on from here",
                None => "; without --checkpoint-dir it cannot be continued",
            };
            writeln!(out, "stopped after step {} of {}{resume}", trainee.steps(), plan.steps)?;
        }
        if summary.steps == 0 {
            writeln!(
                out,
                "nothing left to do: the run was complete after step {}",
                trainee.steps()
            )?;
        } else if summary.final_loss.is_finite() {
            write!(out, "loss {:.4}, ", summary.final_loss)?;
        }
        // Of weights that are no numbers, what they answer is chance.
        if let (Some(accuracy), None) = (summary.accuracy, summary.diverged_at) {
            write!(out, "held-out accuracy {:.1} %, ", accuracy * 100.0)?;
        }
        writeln!(out, "weights {}", summary.weights_hash)?;
        if !output::is_quiet() {
            writeln!(out, "{}", run.report().terminal(output::columns()))?;
        }
        match (is_written, is_complete) {
            (true, true) => writeln!(out, "report: {}", run.report_path().display())?,
            (true, false) => {
                writeln!(out, "report (incomplete): {}", run.report_path().display())?;
            }
            (false, _) => writeln!(out, "report: none; see the warning")?,
        }
        Ok(output::text_out(&out)?)
    }
}

/// Makes the first folder in `runs` that does not exist.
fn create_in_runs(info: &RunInfo) -> anyhow::Result<RunFolder> {
    for number in 1.. {
        match RunFolder::create(format!("runs/{}-{number}", info.name), info) {
            Err(FolderError::Occupied { .. }) => {}
            made => {
                let made = made.context("making a folder for the report; choose one by --run-dir");
                return made.wrong_call();
            }
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
    // What TOML cannot count, it can spell.
    let number = |n: u64| i64::try_from(n).map_or_else(|_| n.to_string().into(), toml::Value::from);
    set("version", env!("CARGO_PKG_VERSION").into());
    set("model", model.clone().into());
    set("data", data.clone().into());
    set("seed", number(plan.seed));
    set("batch", number(plan.batch as u64));
    if let Some(usual) = plan.given.instead_of_batch {
        set("batch_instead_of", number(usual as u64));
    }
    set("shards", number(plan.shards as u64));
    set("threads", number(plan.threads as u64));
    set("optimizer", plan.optimizer.to_string().into());
    set("steps", number(plan.steps));
    set("accumulate", number(plan.accumulate as u64));
    set("overlap", plan.overlap.into());
    set("strategy", plan.strategy_name().into());
    set("codec", plan.describe_codec().into());
    set("bucket", plan.buckets.map_or("tuned".into(), |sizes| number(sizes.others as u64)));
    set("check_every", number(plan.check_every));
    if let Work::Replay { compute_ms: Some(ms), .. } = plan.work {
        set("compute_ms", ms.into());
    }
    set("measure_scaling", plan.measure_scaling.into());
    if let Some(dir) = &plan.checkpoint_dir {
        set("checkpoint_dir", dir.display().to_string().into());
        set("checkpoint_every", number(plan.checkpoint_every));
        set("resume", plan.resume.into());
    }
    set("resumed_at", number(trainee.steps()));
    let options = group.options();
    set("requested_transport", options.transport.name().into());
    set("timeout_s", options.timeout.as_secs_f64().into());
    set("streams", number(options.streams as u64));
    set("segment", options.segment.map_or("chosen".into(), |bytes| number(bytes as u64)));
    set("staging", number(options.staging as u64));
    if let Some((rank, factor)) = plan.slow {
        set("slow", format!("{rank}:{factor}").into());
    }
    RunInfo {
        name,
        model,
        data,
        strategy: match plan.strategy {
            StrategySpec::AllReduce => trainee.synchronizer().strategy(),
            local => local.to_string(),
        },
        codec: plan.codec_name(),
        dense_bytes_per_step: dense_bytes(plan, trainee, group.size()),
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

/// What all workers together would send in a step of an all-reduce without a codec.
fn dense_bytes(plan: &Plan, trainee: &dyn Trainee, workers: usize) -> u64 {
    let elements = trainee.synchronizer().parameters().iter().map(Parameter::elements);
    let shards = Shards::new(plan.shards, workers).expect("the plan was made for as many workers");
    let subtrees: usize = shards.subtrees(workers).iter().map(Vec::len).sum();
    // Of every subtree, all but the part that its worker sums, and of the sum all but that part.
    let parts = (subtrees + workers) * (workers - 1) / workers;
    (elements.sum::<usize>() * 4 * parts) as u64
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
