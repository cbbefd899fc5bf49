//! A folder is written to by one process at a time.
//!
//! The process holds a lock on the file `lock`, which ends with it. The text of the file is for those
//! who come later:
//!
//! ```text
//!  0             10            47
//!  ┌─────────────┬─────────────┬──┐
//!  │ process,    │ boot,       │\n│
//!  │ ten digits  │ 1 + 36      │  │
//!  └─────────────┴─────────────┴──┘
//! ```
//!
//! The *process* is who holds the lock. The *boot* is the time between two starts of the machine in which
//! the folder was last made good: as long as that goes on, all that was written is there. After it, what
//! was not forced to the disk may be there in part. The system names every boot by a random number.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::{Attempt, JournalError};

/// The name of the file that is locked.
pub(super) const LOCK: &str = "lock";

/// Digits of a process.
const PROCESS: usize = 10;

/// A folder that no other process can lock.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Locks a folder, which is made if it does not exist. A process that holds it is waited for as
    /// long as `patience`.
    pub fn take(folder: &Path, patience: Duration) -> Result<Lock, JournalError> {
        unisono_net::folder::make(folder).attempt("make", folder)?;
        let path = folder.join(LOCK);
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let lock = Lock { file: options.open(&path).attempt("open", &path)?, path };
        let begun = Instant::now();
        loop {
            match lock.file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => {
                    thread::sleep(Duration::from_millis(10));
                }
                Err(TryLockError::WouldBlock) => {
                    let process = lock.text().get(..PROCESS).and_then(|text| text.parse().ok());
                    return Err(JournalError::InUse { folder: folder.to_owned(), process });
                }
                Err(TryLockError::Error(error)) => return Err(error).attempt("lock", &lock.path),
            }
        }
        let process = format!("{:0PROCESS$}", std::process::id());
        lock.file.write_all_at(process.as_bytes(), 0).attempt("write", &lock.path)?;
        Ok(lock)
    }

    /// Whether the machine may have been down since the folder was last [made good](Lock::made_good).
    pub(super) fn may_lack_writes(&self) -> bool {
        let text = self.text();
        let before = text.get(PROCESS..).map(str::trim);
        // A boot that is not known may be another.
        boot().is_none_or(|boot| before != Some(&boot))
    }

    /// Notes that the folder lacks nothing in this boot.
    pub(super) fn made_good(&self) -> Result<(), JournalError> {
        let text = format!(" {}\n", boot().unwrap_or_default());
        self.file.write_all_at(text.as_bytes(), PROCESS as u64).attempt("write", &self.path)
    }

    fn text(&self) -> String {
        let mut text = [0; 64];
        let length = self.file.read_at(&mut text, 0).unwrap_or(0);
        String::from_utf8_lossy(&text[..length]).into_owned()
    }
}

/// The present boot of the machine, if the system tells.
fn boot() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned()).filter(|boot| !boot.is_empty())
}
