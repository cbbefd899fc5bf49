//! Saves a run, and goes on with it.

use anyhow::{Context, bail, ensure};
use unisono::Group;
use unisono::cluster::checkpoint::{Checkpoints, Loaded, Snapshot};

use super::args::Plan;
use super::trainee::Trainee;

/// Checkpoints that are kept.
const KEPT: usize = 3;

/// The checkpoints of a run, at rank 0.
pub struct Saver {
    checkpoints: Checkpoints,
    saved: Option<u64>,
}

impl Saver {
    /// The folder that the plan names, if it does.
    pub fn open(plan: &Plan) -> anyhow::Result<Option<Saver>> {
        let Some(folder) = &plan.checkpoint_dir else { return Ok(None) };
        let checkpoints = Checkpoints::open(folder, KEPT).context("--checkpoint-dir")?;
        // Those of another run would push out ours, or be taken for ours.
        ensure!(
            plan.resume || checkpoints.steps()?.is_empty(),
            "--checkpoint-dir: {} already holds checkpoints; add --resume to go on from them, or \
             choose another folder",
            folder.display()
        );
        Ok(Some(Saver { checkpoints, saved: None }))
    }

    /// The checkpoint to go on from, if the plan asks for it and there is one; an error if it is
    /// one of another run.
    pub fn find(&mut self, plan: &Plan) -> anyhow::Result<Option<Loaded>> {
        if !plan.resume {
            return Ok(None);
        }
        let Some(latest) = self.checkpoints.latest().context("--resume")? else { return Ok(None) };
        let checkpoint = latest.checkpoint;
        for (key, ours) in plan.identity() {
            let theirs: String = checkpoint.value(key)?;
            if theirs != ours {
                bail!(
                    "--resume: {} is of a run with {key} {theirs}, not {ours}; use the settings of \
                     that run, or another --checkpoint-dir",
                    checkpoint.path().display()
                );
            }
        }
        if checkpoint.step() > plan.steps {
            bail!(
                "--resume: {} is at step {} already; raise --steps",
                checkpoint.path().display(),
                checkpoint.step()
            );
        }
        Ok(Some(checkpoint))
    }

    /// Writes a checkpoint.
    fn write(&mut self, plan: &Plan, step: u64, mut snapshot: Snapshot<'_>) -> anyhow::Result<()> {
        for (key, value) in plan.identity() {
            snapshot.set(key, value);
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

/// Writes a checkpoint at rank 0, which has the saver, unless this step has one. All ranks must call
/// it.
pub fn save(
    plan: &Plan,
    trainee: &dyn Trainee,
    mut saver: Option<&mut Saver>,
    group: &Group,
) -> anyhow::Result<()> {
    let step = trainee.steps();
    let mut is_saved = [u8::from(saver.as_ref().is_some_and(|saver| saver.saved == Some(step)))];
    group.broadcast(&mut is_saved, 0)?;
    if is_saved[0] == 1 {
        return Ok(());
    }
    trainee.save(group, &mut |snapshot| match &mut saver {
        Some(saver) => saver.write(plan, step, snapshot),
        None => Ok(()),
    })
}

/// Brings all workers to the checkpoint that rank 0 found, if it did. All ranks must call it.
pub fn resume(
    trainee: &mut dyn Trainee,
    checkpoint: Option<&Loaded>,
    group: &Group,
) -> anyhow::Result<()> {
    let mut found = [u8::from(checkpoint.is_some())];
    group.broadcast(&mut found, 0)?;
    if found[0] == 0 {
        return Ok(());
    }
    let path = || checkpoint.map_or("--resume".to_owned(), |c| c.path().display().to_string());
    trainee.restore(group, checkpoint).with_context(path)
}
