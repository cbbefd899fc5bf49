//! What rank 0 keeps of a run: its folder, its checkpoints, and what people see of it.

use std::fmt::Write;

use anyhow::Context;
use serde_json::json;
use unisono::Group;
use unisono::insight::{Outcome, RunInfo, Scaling, units};
use unisono::recording::steps::{Recorded, StepRecorder, run_info};
use unisono::sync::advice::{Advice, Cost};

use super::args::{ComputationSpec, RunPlan, TrainArgs, number};
use super::checkpoint::Saver;
use super::computation::Computation;
use super::progress::Reporter;
use crate::output;

/// What rank 0 has to look after besides.
pub struct RankZero {
    pub saver: Option<Saver>,
    pub reporter: Reporter,
}

impl RankZero {
    pub fn open(plan: &RunPlan, args: &TrainArgs) -> anyhow::Result<RankZero> {
        Ok(RankZero {
            saver: Saver::open(plan)?,
            reporter: Reporter::new(plan.steps, plan.batch, args.as_worker),
        })
    }

    /// The run, for its report.
    pub fn describe(
        &self,
        plan: &RunPlan,
        group: &Group,
        computation: &dyn Computation,
    ) -> RunInfo {
        let mut info = describe(plan, group, computation);
        if let Some(rates) = self.saver.as_ref().and_then(|saver| saver.earlier_rates.clone()) {
            info.settings.insert("earlier_learning_rates".to_owned(), rates.into());
        }
        info
    }

    /// Says which codec was chosen, and why.
    pub fn advise(&self, advice: &Advice) {
        let chosen = advice.chosen.as_ref().map_or("none".to_owned(), ToString::to_string);
        let Cost { steps, bytes, seconds } = advice.cost;
        remark!(
            "unisono: codec {chosen}: {} (to decide, {} were sent in {}, after {steps} steps without \
             a codec)",
            advice.reason,
            units::bytes(bytes as f64),
            units::duration(seconds),
        );
    }

    /// Sums the run up: what there is to say of it.
    pub fn end(
        self,
        plan: &RunPlan,
        computation: &dyn Computation,
        recorder: StepRecorder,
        scaling: Option<Scaling>,
        interrupted: bool,
        json: bool,
    ) -> anyhow::Result<String> {
        let judgement = computation.judge()?;
        let outcome = Outcome {
            accuracy: judgement.map(|judgement| judgement.accuracy),
            held_out_loss: judgement.map(|judgement| judgement.loss),
            weights_hash: computation.weights_hash(),
        };
        let recorded = recorder.finish(outcome, scaling).context("rank 0 records the run")?;
        let Recorded { run, is_complete, written } = recorded;
        let is_written = written.is_ok();
        if let Err(error) = written {
            say!("unisono: warning: {error}; there is no report of this run");
        }
        let summary = run.summary.as_ref().context("a finished run has a summary")?;
        self.reporter.finish();
        if json {
            let mut object = serde_json::to_value(summary)?;
            object["step"] = json!(computation.steps());
            object["interrupted"] = json!(interrupted);
            object["batch"] = json!(plan.batch);
            object["earlier_learning_rates"] = json!(run.info.earlier_rates());
            object["report"] = json!(is_written.then(|| run.report_path()));
            return Ok(format!("{object}\n"));
        }
        let mut out = String::new();
        if interrupted {
            let resume = match plan.checkpoint_dir {
                Some(_) => "; add --resume to go on from here",
                None => "; without --checkpoint-dir it cannot be continued",
            };
            writeln!(out, "stopped after step {} of {}{resume}", computation.steps(), plan.steps)?;
        }
        if summary.steps == 0 {
            writeln!(
                out,
                "nothing left to do: the run was complete after step {}",
                computation.steps()
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
        Ok(out)
    }
}

/// The run, for its report.
fn describe(plan: &RunPlan, group: &Group, computation: &dyn Computation) -> RunInfo {
    let (model, data) = plan.names();

    let mut settings = toml::Table::new();
    let mut set = |key: &str, value: toml::Value| settings.insert(key.to_owned(), value);

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
    if let ComputationSpec::Replay { compute_ms: Some(ms), .. } = plan.computation {
        set("compute_ms", ms.into());
    }
    set("measure_scaling", plan.measure_scaling.into());
    if let Some(dir) = &plan.checkpoint_dir {
        set("checkpoint_dir", dir.display().to_string().into());
        set("checkpoint_every", number(plan.checkpoint_every));
        set("resume", plan.resume.into());
    }
    set("resumed_at", number(computation.steps()));
    let options = group.options();
    set("requested_transport", options.transport.name().into());
    set("timeout_s", options.timeout.as_secs_f64().into());
    set("streams", options.streams.map_or("chosen".into(), |streams| number(streams as u64)));
    set("segment", options.segment.map_or("chosen".into(), |bytes| number(bytes as u64)));
    set("staging", number(options.staging as u64));
    if let Some((rank, factor)) = plan.slow {
        set("slow", format!("{rank}:{factor}").into());
    }
    let (name, codec) = (plan.short_name(), plan.codec_name());
    let info = run_info(group, computation.synchronizer(), &plan.settings());
    RunInfo { name, model, data, codec, settings, ..info }
}
