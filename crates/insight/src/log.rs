//! Files that grow by whole lines of JSON while a run goes on.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::folder::{FolderError, is_unfinished, not_a, replace, write_error};

/// Lines of one file, each in it as soon as it is appended.
#[derive(Debug)]
pub struct Log<T> {
    path: PathBuf,
    pub(crate) file: File,
    /// Length of the complete lines.
    complete: u64,
    lines: PhantomData<fn(&T)>,
}

impl<T: Serialize + DeserializeOwned> Log<T> {
    /// Begins a file. Refuses one that exists.
    pub fn create(path: impl Into<PathBuf>) -> Result<Log<T>, FolderError> {
        let path = path.into();
        let file = File::options().append(true).create_new(true).open(&path);
        let file = file.map_err(|source| write_error(&path, source))?;
        Ok(Log { path, file, complete: 0, lines: PhantomData })
    }

    /// Goes on with a file, or begins it, keeping the lines for which `keep` is true. A last line that
    /// was never finished is dropped.
    pub fn reopen_keeping(
        path: impl Into<PathBuf>,
        mut keep: impl FnMut(&T) -> bool,
    ) -> Result<Log<T>, FolderError> {
        let path = path.into();
        let mut kept = Vec::new();
        for_each_line(&path, "line of this log", |text, line| {
            if keep(&line) {
                kept.extend_from_slice(text);
            }
        })?;
        replace(&path, |to| to.write_all(&kept))?;
        let file = File::options().append(true).open(&path);
        let file = file.map_err(|source| write_error(&path, source))?;
        Ok(Log { path, file, complete: kept.len() as u64, lines: PhantomData })
    }

    /// Appends a line. After an error the file ends with the last complete one, and the next may be
    /// appended once there is room.
    pub fn append(&mut self, line: &T) -> Result<(), FolderError> {
        self.append_all(std::slice::from_ref(line))
    }

    /// Appends several lines in one write, all or none.
    pub fn append_all(&mut self, lines: &[T]) -> Result<(), FolderError> {
        let mut text = Vec::new();
        for line in lines {
            let written = serde_json::to_writer(&mut text, line);
            written.map_err(|error| write_error(&self.path, error.into()))?;
            text.push(b'\n');
        }
        if let Err(source) = self.file.write_all(&text) {
            // If this fails as well, readers still find one unfinished line at the end.
            let _ = self.file.set_len(self.complete);
            return Err(write_error(&self.path, source));
        }
        self.complete += text.len() as u64;
        Ok(())
    }
}

/// The complete lines of a file; none if it does not exist. `what` says what a line is, for errors.
pub(crate) fn read_lines<T: DeserializeOwned>(
    path: &Path,
    what: &str,
) -> Result<Vec<T>, FolderError> {
    let mut lines = Vec::new();
    for_each_line(path, what, |_, line| lines.push(line))?;
    Ok(lines)
}

/// The last complete line of a file; none if there is none, or no file. Reads as much of the end as that takes.
pub(crate) fn last_line<T: DeserializeOwned>(
    path: &Path,
    what: &str,
) -> Result<Option<T>, FolderError> {
    let read_error = |source| FolderError::Read { path: path.into(), source };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(read_error(source)),
    };
    let length = file.metadata().map_err(read_error)?.len();
    let mut tail = 1 << 16;
    loop {
        let start = length.saturating_sub(tail);
        file.seek(SeekFrom::Start(start)).map_err(read_error)?;
        let mut text = Vec::new();
        Read::by_ref(&mut file).take(length - start).read_to_end(&mut text).map_err(read_error)?;
        // Without the line that the writer is in the middle of.
        let end = text.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        let before = text[..end].iter().rposition(|byte| *byte == b'\n');
        let line = match before {
            Some(before) => &text[before + 1..end],
            None if start == 0 => &text[..end],
            None => {
                tail *= 8;
                continue;
            }
        };
        if line.is_empty() {
            return Ok(None);
        }
        return serde_json::from_slice(line).map(Some).map_err(|error| FolderError::Malformed {
            path: path.into(),
            line: 1 + text[..end].iter().filter(|byte| **byte == b'\n').count(),
            reason: not_a(line, what, &error),
        });
    }
}

/// Calls `take` with each complete line of a file, as it stands there and as it is understood.
fn for_each_line<T: DeserializeOwned>(
    path: &Path,
    what: &str,
    mut take: impl FnMut(&[u8], T),
) -> Result<(), FolderError> {
    let read_error = |source| FolderError::Read { path: path.into(), source };
    let mut file = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(read_error(source)),
    };
    let mut text = Vec::new();
    for number in 1.. {
        text.clear();
        file.read_until(b'\n', &mut text).map_err(read_error)?;
        if is_unfinished(&text) {
            // The end, or a line whose writer was killed. Even one that can be read is not complete,
            // for its end is missing, and what is appended would go on in it.
            break;
        }
        let line = serde_json::from_slice(&text).map_err(|error| FolderError::Malformed {
            path: path.into(),
            line: number,
            reason: not_a(&text, what, &error),
        })?;
        take(&text, line);
    }
    Ok(())
}
