//! One run at a time writes to a folder of checkpoints.
//!
//! Two would prune each other's checkpoints, and each would find those of the other on a resume. So
//! the process that opens a folder locks a file in it, and writes its own number into the file. The system
//! ends the lock with its process, however that ends: a file that a killed process has left locks nothing.
//!
//! On one machine this always holds. From machine to machine it holds as far as the locks of the file
//! system do: NFS, CephFS and GPFS carry them, and Lustre if it is mounted with `flock`. Where there
//! are none, a warning says so and the run goes on.

use std::fs::{self, File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::error::Attempt;
use super::temporary::is_in_place;

/// The file that is locked.
const NAME: &str = ".unisono-lock";

/// The longest description of a holder that is believed.
const LONGEST: u64 = 300;

/// The right to write to a folder; given back when dropped.
#[derive(Debug)]
pub(super) struct FolderLock {
    /// Absent where the file system has no locks.
    held: Option<(File, PathBuf)>,
}

impl FolderLock {
    /// Takes the folder, or says who has it.
    pub(super) fn take(folder: &Path) -> Result<FolderLock, CheckpointError> {
        let path = folder.join(NAME);
        loop {
            // Not emptied: it may say who holds it. Open for writing, as locks on NFS want it.
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = options.open(&path).attempt("make a file in", folder)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let holder = holder(&mut file);
                    return Err(CheckpointError::InUse { folder: folder.to_owned(), holder });
                }
                Err(TryLockError::Error(error)) => {
                    log::warn!(
                        "the file system of {} has no locks ({error}): make sure that no other run \
                         writes there",
                        folder.display()
                    );
                    return Ok(FolderLock { held: None });
                }
            }
            // Its last holder may have removed it between the two calls.
            if is_in_place(&file, &path) {
                introduce(&mut file);
                return Ok(FolderLock { held: Some((file, path)) });
            }
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if let Some((file, path)) = &self.held {
            // While it is locked, so that no other process's file is removed. One that stays does no harm.
            let _ = fs::remove_file(path);
            // Closing it would leave the lock to forks of this process.
            let _ = file.unlock();
        }
    }
}

/// Writes into the file who holds it. On a full disk it stays empty: the lock is what counts.
fn introduce(file: &mut File) {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let text = format!("process {} on {host}\n", std::process::id());
    let _ = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
}

/// Who holds the file, as far as it says.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let _ = file.take(LONGEST).read_to_string(&mut text);
    match text.lines().next() {
        Some(line) if !line.is_empty() => line.to_owned(),
        _ => "another process".to_owned(),
    }
}
