//! What a run tells, written into its folder.

pub mod relaxed;
pub mod steps;

use std::path::{Path, PathBuf};

use unisono_collective::Error;
use unisono_insight::folder::FolderError;

/// Why a run cannot be recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The records of the workers could not be collected.
    #[error(transparent)]
    Group(#[from] Error),
    /// The folder of the run.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The records of a worker cannot be read: it runs another version.
    #[error("the records of a worker cannot be read; does it run another version of Unisono? {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Makes the folder of a run: the one that is named, or the first `runs/NAME-N` that does not exist.
pub fn create<T>(
    dir: Option<&Path>,
    name: &str,
    create: impl Fn(PathBuf) -> Result<T, FolderError>,
) -> Result<T, FolderError> {
    if let Some(dir) = dir {
        return create(dir.to_owned());
    }
    for number in 1.. {
        match create(PathBuf::from(format!("runs/{name}-{number}"))) {
            Err(FolderError::Occupied { .. }) => {}
            made => return made,
        }
    }
    unreachable!("there are more numbers than folders")
}
