//! Saves a run, and goes on with it.

use anyhow::{Context, bail, ensure};
use unisono::Group;
use unisono::cluster::checkpoint::{Checkpoints, Loaded, Snapshot};

use super::args::RunPlan;
use super::computation::Computation;

/// Checkpoints that are kept.
const KEPT: usize = 3;

/// The name of the metadata that has the learning rates of before.
const EARLIER_RATES: &str = "earlier_learning_rates";

/// The checkpoints of a run, at rank 0.
pub struct Saver {
    checkpoints: Checkpoints,
    saved: Option<u64>,
    /// The learning rates that the run had before, and until when: "0.1 until step 300".
    pub earlier_rates: Option<String>,
}

/// A checkpoint to go on from.
pub struct Found {
    pub checkpoint: Loaded,
    /// The learning rate that it was written with, if the run goes on with another.
    pub other_rate: Option<String>,
}

impl Saver {
    /// The folder that the plan names, if it does.
    pub fn open(plan: &RunPlan) -> anyhow::Result<Option<Saver>> {
        let Some(folder) = &plan.checkpoint_dir else { return Ok(None) };
        let checkpoints = Checkpoints::open(folder, KEPT).context("--checkpoint-dir")?;
        // Those of another run would push out ours, or be taken for ours.
        ensure!(
            plan.resume || checkpoints.steps()?.is_empty(),
            "--checkpoint-dir: {} already holds checkpoints; add --resume to go on from them, or \
             choose another folder",
            folder.display()
        );
        Ok(Some(Saver { checkpoints, saved: None, earlier_rates: None }))
    }

    /// The checkpoint to go on from, if the plan asks for it and there is one; an error if it is
    /// one of another run.
    pub fn find(&mut self, plan: &RunPlan) -> anyhow::Result<Option<Found>> {
        if !plan.resume {
            return Ok(None);
        }
        let Some(latest) = self.checkpoints.latest().context("--resume")? else { return Ok(None) };
        let checkpoint = latest.checkpoint;
        let (mut differences, mut remedies) = (Vec::new(), Vec::new());
        let mut other_rate = None;
        for (key, ours) in plan.identity() {
            let theirs: String = checkpoint.value(key)?;
            if theirs == ours {
                continue;
            }
            let rate = plan.optimizer.rate_in(&theirs).filter(|_| key == "optimizer");
            match rate {
                // The user said so.
                Some(rate) if plan.given.learning_rate => other_rate = Some(rate.to_owned()),
                _ => {
                    remedies.extend(remedy(key, &theirs, rate, plan));
                    let reason = match key {
                        "shards" if !plan.given.shards && plan.compression.is_some() => {
                            " (with a codec, one per worker unless --shards is set)"
                        }
                        _ => "",
                    };
                    differences.push(format!("{key} {theirs}, not {ours}{reason}"));
                }
            }
        }
        if !differences.is_empty() {
            let remedy = match remedies.len() == differences.len() {
                true => format!("add {}", remedies.join(" ")),
                false => "use the settings of that run".to_owned(),
            };
            bail!(
                "--resume: {} is of a run with {}; {remedy}, or use another --checkpoint-dir",
                checkpoint.path().display(),
                differences.join("; ")
            );
        }
        if checkpoint.step() > plan.steps {
            bail!(
                "--resume: {} is at step {} already; raise --steps",
                checkpoint.path().display(),
                checkpoint.step()
            );
        }
        let before = checkpoint.metadata().get(EARLIER_RATES).cloned();
        let until =
            other_rate.as_ref().map(|rate| format!("{rate} until step {}", checkpoint.step()));
        let all: Vec<String> = before.into_iter().chain(until).collect();
        self.earlier_rates = (!all.is_empty()).then(|| all.join(", "));
        Ok(Some(Found { checkpoint, other_rate }))
    }

    /// Writes a checkpoint.
    fn write(
        &mut self,
        plan: &RunPlan,
        step: u64,
        mut snapshot: Snapshot<'_>,
    ) -> anyhow::Result<()> {
        for (key, value) in plan.identity() {
            snapshot.set(key, value);
        }
        if let Some(rates) = &self.earlier_rates {
            snapshot.set(EARLIER_RATES, rates);
        }
        snapshot.set("position", step * plan.batch as u64);
        self.checkpoints.save(step, &snapshot).context("writing a checkpoint")?;
        self.saved = Some(step);
        Ok(())
    }

    /// Takes the step that was resumed from as saved.
    pub fn resumed(&mut self, step: u64) {
        self.saved = Some(step);
    }
}

/// The flag that makes a setting what it was in the run that wrote a checkpoint, if there is one.
fn remedy(key: &str, theirs: &str, rate: Option<&str>, plan: &RunPlan) -> Option<String> {
    match key {
        // There is one shard per worker at least.
        "shards" if theirs.parse().is_ok_and(|shards: usize| shards < plan.given.workers) => {
            Some(format!("--shards {theirs} --workers {theirs}"))
        }
        "seed" | "batch" | "shards" | "threads" => Some(format!("--{key} {theirs}")),
        "optimizer" => {
            let rate = rate.filter(|_| !plan.given.learning_rate)?;
            // A schedule follows from its height.
            Some(format!("--learning-rate {}", height(rate)))
        }
        _ => None,
    }
}

/// The height of a learning rate: "0.5" of "cosine(0.5 to 0.05, ...)".
fn height(rate: &str) -> &str {
    let rate = rate.strip_prefix("cosine(").unwrap_or(rate);
    rate.split(' ').next().unwrap_or(rate)
}

/// Writes a checkpoint at rank 0, which has the saver, unless this step has one. All ranks must call
/// it.
pub fn save(
    plan: &RunPlan,
    computation: &dyn Computation,
    mut saver: Option<&mut Saver>,
    group: &Group,
) -> anyhow::Result<()> {
    let step = computation.steps();
    let mut is_saved = [u8::from(saver.as_ref().is_some_and(|saver| saver.saved == Some(step)))];
    group.broadcast(&mut is_saved, 0)?;
    if is_saved[0] == 1 {
        return Ok(());
    }
    computation.save(group, &mut |snapshot| match &mut saver {
        Some(saver) => saver.write(plan, step, snapshot),
        None => Ok(()),
    })
}

/// Brings all workers to the checkpoint that rank 0 found, if it did. All ranks must call it.
pub fn resume(
    computation: &mut dyn Computation,
    checkpoint: Option<&Loaded>,
    group: &Group,
) -> anyhow::Result<()> {
    let mut found = [u8::from(checkpoint.is_some())];
    group.broadcast(&mut found, 0)?;
    if found[0] == 0 {
        return Ok(());
    }
    let path = || checkpoint.map_or("--resume".to_owned(), |c| c.path().display().to_string());
    computation.restore(group, checkpoint).with_context(path)
}
