//! Every change that a journal makes to its folder, so that a test can write down what was changed and
//! what was forced to the disk, and derive from that all that a power failure may leave.

use std::fs::{self, File};
use std::io::{self, IoSlice, Write};
use std::path::Path;

/// Makes an empty file, in place of what had its name.
pub(super) fn create(path: &Path) -> io::Result<File> {
    let file = File::create(path)?;
    note(|| Change::Create(name(path)));
    Ok(file)
}

/// Writes where the file is, which is `at`; how many bytes.
pub(super) fn write(
    mut file: &File,
    path: &Path,
    at: u64,
    parts: &[IoSlice<'_>],
) -> io::Result<usize> {
    let written = file.write_vectored(parts)?;
    note(|| {
        let all = parts.iter().flat_map(|part| part.iter().copied());
        Change::Write(name(path), at, all.take(written).collect())
    });
    Ok(written)
}

/// Cuts a file to a length.
pub(super) fn cut(file: &File, path: &Path, length: u64) -> io::Result<()> {
    file.set_len(length)?;
    note(|| Change::Cut(name(path), length));
    Ok(())
}

/// Forces the contents of a file to the disk, with its length.
pub(super) fn sync(file: &File, path: &Path) -> io::Result<()> {
    file.sync_data()?;
    note(|| Change::Sync(name(path)));
    Ok(())
}

/// Gives a file another name in its folder.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    note(|| Change::Rename(name(from), name(to)));
    Ok(())
}

/// Removes a file.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    note(|| Change::Remove(name(path)));
    Ok(())
}

/// Forces the names of the files in a folder to the disk.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()?;
    note(|| Change::SyncFolder);
    Ok(())
}

/// Writes where a file is, from `at` on.
pub(super) struct Stream<'a> {
    pub(super) file: &'a File,
    pub(super) path: &'a Path,
    pub(super) at: u64,
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = write(self.file, self.path, self.at, &[IoSlice::new(bytes)])?;
        self.at += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What was done, to the file of which name.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    Create(String),
    Write(String, u64, Vec<u8>),
    Cut(String, u64),
    Sync(String),
    Rename(String, String),
    Remove(String),
    SyncFolder,
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(not(test))]
fn note(_: impl FnOnce() -> Change) {}

#[cfg(test)]
thread_local! {
    static NOTES: std::cell::RefCell<Option<Vec<Change>>> = const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
fn note(change: impl FnOnce() -> Change) {
    NOTES.with_borrow_mut(|notes| {
        if let Some(notes) = notes {
            notes.push(change());
        }
    });
}

/// The changes that this thread has made since it last asked. It notes them from the first time on.
#[cfg(test)]
pub(super) fn notes() -> Vec<Change> {
    NOTES.with_borrow_mut(|notes| std::mem::take(notes.get_or_insert_default()))
}
