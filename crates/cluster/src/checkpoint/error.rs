//! What can go wrong with checkpoints.

use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Fewer checkpoints were to be kept than [`super::Checkpoints::LEAST_KEPT`].
    #[error("keep at least 2 checkpoints instead of {keep}: the newest may turn out damaged")]
    KeepsTooFew {
        /// How many.
        keep: usize,
    },
    /// Another run, or another [`super::Checkpoints`] of this one, writes to the folder.
    #[error(
        "{} is in use by {holder}; wait for that run, end it, or name another folder",
        folder.display()
    )]
    InUse {
        /// The folder.
        folder: PathBuf,
        /// Who has it: its process and host, as far as known.
        holder: String,
    },
    /// The folder, or something above it, is a file.
    #[error(
        "{} cannot hold checkpoints: it, or a part of its path, is not a folder; name another",
        path.display()
    )]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// This user may not write there, or no user may.
    #[error("cannot {doing} {}: {source}; make it writable or name another folder", path.display())]
    Unwritable {
        /// What was attempted.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No room is left, or this user may not use it. The earlier checkpoints are unharmed.
    #[error(
        "no room to {doing} {}: {source}; free some space, raise the limit, or name another folder",
        path.display()
    )]
    Full {
        /// What was attempted.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder or file cannot be read.
    #[error("cannot read {}: {source}; check its path and permissions", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system failed in some other way. The earlier checkpoints are unharmed.
    #[error("cannot {doing} {}: {source}", path.display())]
    System {
        /// What was attempted.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The snapshot is no set of tensors; the calling program is to be fixed.
    #[error("not a valid snapshot: {flaw}")]
    BadSnapshot {
        /// What is wrong with it.
        flaw: String,
    },
    /// A file has changed since it was written, or was never complete.
    #[error("{} is damaged: {reason}; use another checkpoint", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How it shows.
        reason: String,
    },
    /// A good safetensors file, but not a checkpoint.
    #[error(
        "{} is a safetensors file, but no checkpoint of Unisono; name one that it wrote",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// A good checkpoint of a later version.
    #[error(
        "{} is a checkpoint in format {format}, which this version does not know; use a later one",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: String,
    },
    /// The checkpoint is good, but has no such entry of that type.
    #[error(
        "{} has no usable entry {key:?}; name a checkpoint that this program wrote",
        path.display()
    )]
    Entry {
        /// The file.
        path: PathBuf,
        /// The key of the metadata.
        key: String,
    },
    /// There are checkpoints, but none that can be used.
    #[error(
        "none of the checkpoints in {} ({}) can be used: {}; start anew in another folder",
        folder.display(),
        refused.len(),
        newest(refused)
    )]
    NoneGood {
        /// The folder.
        folder: PathBuf,
        /// Why not, newest first.
        refused: Vec<Refusal>,
    },
}

/// A file that [`super::Checkpoints::latest`] did not use.
#[derive(Debug)]
pub struct Refusal {
    /// The file.
    pub path: PathBuf,
    /// Why not.
    pub reason: CheckpointError,
}

/// Why the newest was refused; the log has the others.
fn newest(refused: &[Refusal]) -> String {
    refused.first().map(|newest| newest.reason.to_string()).unwrap_or_default()
}

/// Says what failed, where, and sorts it by what the user can do.
pub(super) trait Attempt<T> {
    /// For attempts to write.
    fn attempt(self, doing: &'static str, path: &Path) -> Result<T, CheckpointError>;
    /// For attempts to read.
    fn reading(self, path: &Path) -> Result<T, CheckpointError>;
}

impl<T> Attempt<T> for io::Result<T> {
    fn attempt(self, doing: &'static str, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|source| {
            use io::ErrorKind::*;
            let path = path.to_owned();
            match source.kind() {
                NotADirectory | AlreadyExists => CheckpointError::NotAFolder { path },
                PermissionDenied | ReadOnlyFilesystem => {
                    CheckpointError::Unwritable { doing, path, source }
                }
                StorageFull | QuotaExceeded | FileTooLarge => {
                    CheckpointError::Full { doing, path, source }
                }
                _ => CheckpointError::System { doing, path, source },
            }
        })
    }

    fn reading(self, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|source| CheckpointError::Unreadable { path: path.to_owned(), source })
    }
}
