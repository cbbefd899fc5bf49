//! What a server shard keeps on disk, so that `kill -9` loses nothing it has acknowledged.
//!
//! A shard has a *folder* of its own. Every update is appended to a *journal* there before it is
//! acknowledged; now and then the whole state is written as a *snapshot*, and a new journal begins:
//!
//! ```text
//!  snapshot-3      the state before the first record of journal-3
//!  journal-3       the updates since then
//!  journal-4       there only if snapshot-4 is being written, or could not be
//!  lock            held by the process that serves from this folder
//! ```
//!
//! The state is the newest snapshot and, after it, the records of every journal from its number on.
//! That rule makes each step of taking a snapshot harmless:
//!
//! 1. Journal N+1 is made, and gets all further updates. The chain is longer by an empty journal.
//! 2. The state is written under another name, forced to the disk, and named snapshot N+1. It equals
//!    snapshot N with journal N applied, so from now on these are of no use.
//! 3. What has a smaller number is removed, now or by whoever opens the folder next.
//!
//! A process that dies while it appends leaves half a record at the end of the last journal. It was
//! never acknowledged, and is cut off. A record that is wrong anywhere else is no accident of dying;
//! then the folder is not opened, for what comes after would meet weights that it was not made for.
//!
//! Appending copies an update into the memory of the operating system, from where it reaches the disk
//! some seconds later. That survives the death of the process, not of the machine; [`Options::sync`]
//! waits for the disk with every update.

mod record;

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub use record::Record;
use record::{Found, Kind, Reader, Writer};

/// How a journal is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether every update waits until it is on the disk.
    pub sync: bool,
    /// How long to wait for a process that still holds the folder. Whoever restarts a server may be
    /// faster than the end of the killed one; a longer wait tells later that it was started twice.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { sync: false, patience: Duration::from_secs(3) }
    }
}

/// The folder of one server shard, open for writing. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Journal {
    folder: PathBuf,
    options: Options,
    /// The number of the journal that is written, and that journal.
    number: u64,
    writer: Writer,
    /// Bytes in journals before it that no snapshot holds.
    before: u64,
    _lock: File,
}

/// What a folder holds.
#[derive(Debug)]
pub struct Recovered {
    /// The newest snapshot, if there is one.
    pub snapshot: Option<Record>,
    /// The updates after it, in the order in which they were appended.
    pub entries: Entries,
    /// Bytes of an unfinished record that were cut off the end.
    pub cut: u64,
}

/// Why a folder cannot be opened or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process serves from it.
    #[error("another server uses {}: stop it, or name another folder", folder.display())]
    InUse {
        /// The folder.
        folder: PathBuf,
    },
    /// It is the folder of something else, and nothing in it was touched.
    #[error("{} is no part of a server's journal: name an empty folder", path.display())]
    Foreign {
        /// Something in it.
        path: PathBuf,
    },
    /// A file is damaged where no crash does it. The updates from there on cannot be trusted.
    #[error("{} is damaged at byte {offset}: restore the folder, or remove it and start again", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Where the record that is wrong begins.
        offset: u64,
    },
    /// A file is not there, and with it are updates that were acknowledged.
    #[error("{} is missing: restore the folder, or remove it and start again", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// An earlier write failed and could not be undone, so nothing can follow it. Open the folder again.
    #[error("an unfinished record is at the end of {}: open the folder again", file.display())]
    Unfinished {
        /// The file.
        file: PathBuf,
    },
    /// The system refused. What was written before is unharmed.
    #[error("cannot {attempt} {}: {source}", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl Journal {
    /// Opens a folder, or makes a new one, and reads what is in it.
    pub fn open(
        folder: impl Into<PathBuf>,
        options: Options,
    ) -> Result<(Journal, Recovered), JournalError> {
        let folder = folder.into();
        fs::create_dir_all(&folder).attempt("make", &folder)?;
        // Before anything is written, and again when nobody else can change it.
        Listing::read(&folder)?;
        let lock = lock(&folder, options.patience)?;
        let listing = Listing::read(&folder)?;
        listing.unfinished.iter().try_for_each(|path| remove(path))?;

        let newest = listing.snapshots.last().copied();
        let snapshot = newest.map(|number| read_snapshot(&folder, number)).transpose()?;
        let chain = listing.chain(&folder)?;
        let (first, last) = (*chain.start(), *chain.end());
        let mut readers = chain
            .map(|number| open_journal(&folder, number, number == last))
            .collect::<Result<Vec<Reader>, JournalError>>()?;
        let cut = readers.last_mut().map_or(Ok(0), Reader::cut)?;
        listing.older(&folder, first).iter().try_for_each(|path| remove(path))?;

        let writer = Writer::append(Kind::Journal.path(&folder, last), last)?;
        let all: u64 = readers.iter().map(Reader::bytes).sum();
        let before = all - writer.bytes();
        let journal = Journal { folder, options, number: last, writer, before, _lock: lock };
        readers.reverse();
        Ok((journal, Recovered { snapshot, entries: Entries { readers }, cut }))
    }

    /// Appends one update: a header that only the caller understands, and numbers. When this returns,
    /// it survives the death of this process, and may be acknowledged. An error leaves it out.
    pub fn append(&mut self, header: &[u8], payloads: &[&[f32]]) -> Result<(), JournalError> {
        self.writer.write(header, payloads, self.options.sync)
    }

    /// Bytes of the updates that are not in a snapshot: what would have to be read again after a crash,
    /// and what tells the caller to take the next one.
    pub fn len_bytes(&self) -> u64 {
        self.before + self.writer.bytes()
    }

    /// Replaces all updates so far by the state that they led to, and forces it to the disk. An error
    /// leaves the folder as good as it was, and later updates can be appended.
    pub fn snapshot<'a>(
        &mut self,
        header: &[u8],
        vectors: impl IntoIterator<Item = &'a [f32]>,
    ) -> Result<(), JournalError> {
        self.snapshot_watched(header, vectors, |_| {})
    }

    /// Calls `watch` after every stage at which a crash would leave something else behind.
    fn snapshot_watched<'a>(
        &mut self,
        header: &[u8],
        vectors: impl IntoIterator<Item = &'a [f32]>,
        mut watch: impl FnMut(&'static str),
    ) -> Result<(), JournalError> {
        self.writer.check()?;
        let number = self.number + 1;
        let writer =
            Writer::create(Kind::Journal, Kind::Journal.path(&self.folder, number), number)?;
        sync_folder(&self.folder)?;
        self.before = self.len_bytes();
        (self.number, self.writer) = (number, writer);
        watch("a journal more");

        let path = Kind::Snapshot.path(&self.folder, number);
        let unfinished = path.with_extension(UNFINISHED);
        let written = Writer::create(Kind::Snapshot, unfinished.clone(), number)
            .and_then(|mut file| {
                watch("an empty snapshot");
                file.write_streamed(header, vectors)
            })
            .and_then(|()| {
                watch("a snapshot without its name");
                fs::rename(&unfinished, &path).attempt("name", &path)
            });
        if let Err(error) = written {
            // It is in nobody's way, and removed when the folder is next opened.
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        watch("a snapshot");
        sync_folder(&self.folder)?;
        self.before = 0;
        let listing = Listing::read(&self.folder)?;
        for path in listing.older(&self.folder, number) {
            remove(&path)?;
            watch("a file less");
        }
        Ok(())
    }
}

/// The updates since the newest snapshot, from the first on. They are read as they are asked for.
#[derive(Debug)]
pub struct Entries {
    /// The last is the next.
    readers: Vec<Reader>,
}

impl Iterator for Entries {
    type Item = Result<Record, JournalError>;

    fn next(&mut self) -> Option<Result<Record, JournalError>> {
        let mut record = Record::default();
        loop {
            match self.readers.last_mut()?.next(&mut record) {
                Ok(Found::Record) => return Some(Ok(record)),
                Ok(Found::End) => drop(self.readers.pop()),
                Ok(Found::Damage { .. }) => {
                    let reader = self.readers.pop()?;
                    self.readers.clear();
                    return Some(Err(reader.damaged()));
                }
                Err(error) => {
                    self.readers.clear();
                    return Some(Err(error));
                }
            }
        }
    }
}

/// The extension of a snapshot that is being written.
const UNFINISHED: &str = "unfinished";
/// The name of the file that is locked.
const LOCK: &str = "lock";

/// The files of a folder.
#[derive(Debug, Default)]
struct Listing {
    snapshots: BTreeSet<u64>,
    journals: BTreeSet<u64>,
    unfinished: Vec<PathBuf>,
}

impl Listing {
    fn read(folder: &Path) -> Result<Listing, JournalError> {
        let mut listing = Listing::default();
        for entry in fs::read_dir(folder).attempt("read", folder)? {
            let path = entry.attempt("read", folder)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let number = |kind: Kind, name: &str| {
                let number = name.strip_prefix(kind.name())?.strip_prefix('-')?.parse().ok()?;
                // Not 007, which would be the name of another file.
                (kind.path(folder, number) == folder.join(name)).then_some(number)
            };
            if let Some(number) = number(Kind::Snapshot, name) {
                listing.snapshots.insert(number);
            } else if let Some(number) = number(Kind::Journal, name) {
                listing.journals.insert(number);
            } else if let Some((stem, UNFINISHED)) = name.split_once('.')
                && number(Kind::Snapshot, stem).is_some()
            {
                listing.unfinished.push(path);
            } else if name != LOCK {
                return Err(JournalError::Foreign { path });
            }
        }
        Ok(listing)
    }

    /// The numbers of the journals that follow the newest snapshot. In a new folder it is the first, and
    /// still to be made.
    fn chain(&self, folder: &Path) -> Result<RangeInclusive<u64>, JournalError> {
        let first = self.snapshots.last().copied().unwrap_or(0);
        let last = self.journals.last().copied().unwrap_or(first).max(first);
        let is_new = self.snapshots.is_empty() && self.journals.is_empty();
        let missing = (first..=last).find(|number| !self.journals.contains(number));
        match missing {
            Some(number) if !is_new => {
                Err(JournalError::Missing { file: Kind::Journal.path(folder, number) })
            }
            _ => Ok(first..=last),
        }
    }

    /// What the snapshot of this number has made useless.
    fn older(&self, folder: &Path, number: u64) -> Vec<PathBuf> {
        let of = |kind: Kind, numbers: &BTreeSet<u64>| -> Vec<PathBuf> {
            numbers.range(..number).map(|number| kind.path(folder, *number)).collect()
        };
        [of(Kind::Journal, &self.journals), of(Kind::Snapshot, &self.snapshots)].concat()
    }
}

/// Opens a journal whose records are all as they were written; but of the last one, what a crash left
/// unfinished may follow.
fn open_journal(folder: &Path, number: u64, is_last: bool) -> Result<Reader, JournalError> {
    let path = Kind::Journal.path(folder, number);
    // Shorter than its preamble, it was not even made when the process died.
    let is_made = fs::metadata(&path).is_ok_and(|file| file.len() >= record::PREAMBLE);
    if is_last && !is_made {
        Writer::create(Kind::Journal, path.clone(), number)?;
    }
    let mut reader = Reader::open(Kind::Journal, path, number)?;
    let is_whole = reader.check()?;
    if is_whole || is_last { Ok(reader) } else { Err(reader.damaged()) }
}

fn read_snapshot(folder: &Path, number: u64) -> Result<Record, JournalError> {
    let path = Kind::Snapshot.path(folder, number);
    let mut reader = Reader::open(Kind::Snapshot, path, number)?;
    let mut snapshot = Record::default();
    let whole = matches!(reader.next(&mut snapshot)?, Found::Record) && reader.is_at_end();
    if whole { Ok(snapshot) } else { Err(reader.damaged()) }
}

fn lock(folder: &Path, patience: Duration) -> Result<File, JournalError> {
    let path = folder.join(LOCK);
    let mut options = File::options();
    let file =
        options.write(true).create(true).truncate(false).open(&path).attempt("open", &path)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < patience => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(JournalError::InUse { folder: folder.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(error).attempt("lock", &path),
        }
    }
}

fn remove(path: &Path) -> Result<(), JournalError> {
    fs::remove_file(path).attempt("remove", path)
}

/// Forces the names of its files to the disk.
fn sync_folder(folder: &Path) -> Result<(), JournalError> {
    File::open(folder).and_then(|folder| folder.sync_all()).attempt("write", folder)
}

/// Names what failed.
trait Attempt<T> {
    fn attempt(self, attempt: &'static str, path: &Path) -> Result<T, JournalError>;
}

impl<T> Attempt<T> for io::Result<T> {
    fn attempt(self, attempt: &'static str, path: &Path) -> Result<T, JournalError> {
        self.map_err(|source| JournalError::Io { attempt, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
