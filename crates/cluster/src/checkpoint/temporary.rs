//! Files that appear in a folder complete or not at all.
//!
//! A *temporary* file is written under a hidden name, forced to the disk, and renamed. Its writer
//! holds a lock on it, which ends with the process, however that ends. So a process that gets the lock
//! of a temporary file knows that its writer is gone and removes it as a *leftover*, without having
//! to guess from ages or process numbers, and without harm to another process that writes to the
//! same folder.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::error::Attempt;

/// How the names of temporary files end; they begin with a dot.
const SUFFIX: &str = ".unisono-tmp";

/// A file that is being written; removed when dropped.
pub(super) struct Temporary {
    file: File,
    folder: PathBuf,
    path: PathBuf,
}

impl Temporary {
    /// A new empty file in `folder`, locked.
    pub(super) fn create(folder: &Path, name: &str) -> Result<Temporary, CheckpointError> {
        loop {
            let random =
                getrandom::u64().map_err(io::Error::other).attempt("make a file in", folder)?;
            let path = folder.join(format!(".{name}-{random:016x}{SUFFIX}"));
            let file = match File::create_new(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.attempt("make a file in", folder)?,
            };
            let temporary = Temporary { file, folder: folder.to_owned(), path };
            if temporary.lock() {
                return Ok(temporary);
            }
        }
    }

    /// Where to write.
    pub(super) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name, in place of what had it before. When this returns, both are on the
    /// disk.
    pub(super) fn persist(self, path: &Path) -> Result<(), CheckpointError> {
        self.file.sync_all().attempt("write", path)?;
        fs::rename(&self.path, path).attempt("name", path)?;
        let folder = File::open(&self.folder).reading(&self.folder)?;
        folder.sync_all().attempt("write", &self.folder)
        // Dropping `self` finds nothing to remove under the temporary name.
    }

    /// Locks the file and says whether it still is in the folder: between its creation and the
    /// lock, another process may have taken it for a leftover.
    ///
    /// Where the file system has no locks, leftovers cannot be told from the files of another
    /// process; that one's next rename then fails, and with it its save.
    fn lock(&self) -> bool {
        if self.file.lock().is_err() {
            return true;
        }
        is_in_place(&self.file, &self.path)
    }
}

/// Whether `path` still names this file.
pub(super) fn is_in_place(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(theirs)) => (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino()),
        _ => false,
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // A failure can no longer be reported; the next writer tries again.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the temporary files of writers that are gone.
pub(super) fn remove_leftovers(folder: &Path) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(folder).reading(folder)? {
        let entry = entry.reading(folder)?;
        let is_temporary = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with('.') && name.ends_with(SUFFIX));
        // What cannot be opened or removed stays: it does no harm.
        if is_temporary
            && let Ok(file) = File::options().write(true).open(entry.path())
            && !matches!(file.try_lock(), Err(TryLockError::WouldBlock))
            && fs::remove_file(entry.path()).is_ok()
        {
            log::info!("removed {}, left by a killed writer", entry.path().display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut temporary = Temporary::create(folder.path(), "a").unwrap();
        temporary.file().write_all(b"abc").unwrap();
        assert_eq!(names(folder.path()).len(), 1);
        drop(temporary);
        assert_eq!(names(folder.path()), Vec::<String>::new());
    }

    #[test]
    fn a_persisted_file_replaces_the_one_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "old").unwrap();
        let mut temporary = Temporary::create(folder.path(), "a").unwrap();
        temporary.file().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        temporary.persist(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn only_what_no_process_writes_and_we_named_is_a_leftover() {
        let folder = tempfile::tempdir().unwrap();
        let alive = Temporary::create(folder.path(), "alive").unwrap();
        fs::write(folder.path().join(".dead-0123.unisono-tmp"), "half").unwrap();
        for other in [".hidden", "mine.unisono-tmp", ".tmpAbCdEf"] {
            fs::write(folder.path().join(other), "").unwrap();
        }
        remove_leftovers(folder.path()).unwrap();
        let left = names(folder.path());
        assert_eq!(left.len(), 4, "{left:?}");
        assert!(alive.path.exists() && !left.iter().any(|name| name.contains("dead")), "{left:?}");
    }
}
