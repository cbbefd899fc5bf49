//! Checkpoints: the state of a run on disk, from which it can go on.
//!
//! A [`Snapshot`] is a set of named tensors and some strings; what they mean is the caller's
//! business. [`Checkpoints`] is a folder of snapshots, one file per step, of which the newest few
//! are kept. A file is in the safetensors format, which any of its readers opens, and carries a
//! checksum over all of its bytes (`format.rs`).
//!
//! Whatever happens to the process, the machine or the disk during [`Checkpoints::save`], the
//! earlier checkpoints remain as they were: the new one is written to a temporary file, forced to
//! the disk and only then given its name, and older ones are removed only after the folder is on
//! the disk too. [`Checkpoints::latest`] does not trust names: it reads the newest file whose
//! checksum is right, and says which newer ones it refused and why.

mod error;
mod format;
mod lock;
mod snapshot;
mod temporary;

pub use error::{CheckpointError, Refusal};
pub use safetensors::Dtype;
pub use snapshot::{Loaded, Snapshot, Tensor};

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use error::Attempt;
use lock::FolderLock;
use temporary::Temporary;

/// How the name of a checkpoint begins; its step follows.
const PREFIX: &str = "step-";
/// How it ends.
const SUFFIX: &str = ".safetensors";

/// The steps of all checkpoints in a folder, good or not, in ascending order; without opening it, while a run
/// may have.
///
/// # Errors
///
/// If the folder cannot be read.
pub fn steps_in(folder: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).reading(folder)? {
        let entry = entry.reading(folder)?;
        steps.extend(entry.file_name().to_str().and_then(step_of));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// A folder of checkpoints.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    /// Steps whose files turned out to be no good; they do not count as kept.
    refused: BTreeSet<u64>,
    _lock: FolderLock,
}

impl Checkpoints {
    /// The fewest checkpoints that may be kept: with the newest alone, a file that turns out to be
    /// damaged would leave nothing to go back to.
    pub const LEAST_KEPT: usize = 2;

    /// Opens a folder, which is made if it does not exist, for checkpoints of which the newest
    /// `keep` are kept. Also removes what killed writers have left in it. The folder is this one's
    /// alone until it is dropped, or its process ends.
    ///
    /// # Errors
    ///
    /// If `keep` is too small, if another run has opened the folder, or if no file can be written to it:
    /// better now than when the first steps have been computed.
    pub fn open(folder: impl Into<PathBuf>, keep: usize) -> Result<Checkpoints, CheckpointError> {
        let folder = folder.into();
        if keep < Checkpoints::LEAST_KEPT {
            return Err(CheckpointError::KeepsTooFew { keep });
        }
        unisono_net::folder::make(&folder).attempt("make", &folder)?;
        let lock = FolderLock::take(&folder)?;
        drop(Temporary::create(&folder, "probe")?);
        temporary::remove_leftovers(&folder)?;
        Ok(Checkpoints { folder, keep, refused: BTreeSet::new(), _lock: lock })
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The steps of all checkpoints, good or not, in ascending order.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        steps_in(&self.folder)
    }

    /// Where the checkpoint of a step is, or would be.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:09}{SUFFIX}"))
    }

    /// Writes the checkpoint of a step, in place of one of the same step, and removes those that
    /// are older than the `keep` newest up to this step. Later ones, which a run has that went
    /// back to an earlier step, stay.
    ///
    /// When this returns, the checkpoint is on the disk.
    ///
    /// # Errors
    ///
    /// If it cannot be written. The earlier ones are then unharmed.
    pub fn save(&mut self, step: u64, snapshot: &Snapshot) -> Result<PathBuf, CheckpointError> {
        let encoded = format::encode(step, snapshot)?;
        temporary::remove_leftovers(&self.folder)?;
        let path = self.path(step);
        let mut file = Temporary::create(&self.folder, &format!("{PREFIX}{step:09}"))?;
        encoded.write(file.file()).attempt("write", &path)?;
        file.persist(&path)?;
        self.refused.remove(&step);
        self.prune(step);
        Ok(path)
    }

    /// The newest checkpoint that is good, and the newer ones that are not; `None` if the folder
    /// has no checkpoints at all. Every refused file is also named in the log.
    ///
    /// # Errors
    ///
    /// If there are checkpoints, but none is good; or if the folder cannot be read.
    pub fn latest(&mut self) -> Result<Option<Latest>, CheckpointError> {
        let mut refused = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            let path = self.path(step);
            match load(&path) {
                Ok(checkpoint) => return Ok(Some(Latest { checkpoint, refused })),
                Err(reason) => {
                    log::warn!("refused the checkpoint {}: {reason}", path.display());
                    self.refused.insert(step);
                    refused.push(Refusal { path, reason });
                }
            }
        }
        if refused.is_empty() {
            return Ok(None);
        }
        Err(CheckpointError::NoneGood { folder: self.folder.clone(), refused })
    }

    /// Removes what is older than the `keep` newest up to `step`. One that cannot be removed takes
    /// up space, but the new one is safe; so that is no error of its writer.
    fn prune(&self, step: u64) {
        let steps = self.steps().unwrap_or_else(|error| {
            log::warn!("old checkpoints stay: {error}");
            Vec::new()
        });
        let mut kept = 0;
        for step in steps.into_iter().rev().skip_while(|&other| other > step) {
            if kept < self.keep {
                kept += usize::from(!self.refused.contains(&step));
                continue;
            }
            let path = self.path(step);
            if let Err(error) = fs::remove_file(&path) {
                log::warn!("the old checkpoint {} stays: {error}", path.display());
            }
        }
    }
}

/// What [`Checkpoints::latest`] found.
#[derive(Debug)]
pub struct Latest {
    /// The newest good checkpoint.
    pub checkpoint: Loaded,
    /// The newer ones, newest first, and why they are not good.
    pub refused: Vec<Refusal>,
}

/// Reads one checkpoint and verifies its checksum.
///
/// # Errors
///
/// If it cannot be read, is damaged, or was not written by Unisono.
pub fn load(path: &Path) -> Result<Loaded, CheckpointError> {
    // Opening a pipe would wait for its writer.
    let about = fs::metadata(path).reading(path)?;
    if !about.is_file() {
        let reason = "it is not a regular file".to_owned();
        return Err(CheckpointError::Damaged { path: path.to_owned(), reason });
    }
    let mut file = File::open(path).reading(path)?;
    format::decode(path, &mut file, about.len())
}

/// The step in the name of a checkpoint. Only names that [`Checkpoints::path`] makes count, so
/// that a step has one file.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let step = digits.parse().ok()?;
    (digits == format!("{step:09}")).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_one_name() {
        assert_eq!(step_of("step-000000200.safetensors"), Some(200));
        assert_eq!(step_of("step-12345678901.safetensors"), Some(12_345_678_901));
        for name in [
            "step-200.safetensors",
            "step-0000000200.safetensors",
            "step-+00000200.safetensors",
            "step-99999999999999999999.safetensors",
            "step-000000200.safetensors.bak",
            "step-.safetensors",
            "other-000000200.safetensors",
        ] {
            assert_eq!(step_of(name), None, "{name}");
        }
    }
}
