//! What a server keeps on disk, so that `kill -9` loses nothing it has acknowledged.
//!
//! A server has a *folder* of its own. Every update is appended to a *journal* there before it is
//! acknowledged; now and then the whole state is written as a *snapshot*, and a new journal begins:
//!
//! ```text
//!  snapshot-3      the state before the first record of journal-3
//!  journal-3       the updates since then
//!  lock            held by the process that serves from this folder
//! ```
//!
//! The state is the newest snapshot and, after it, the records of the journal with its number. No other
//! journal has records that count, so that none can be passed over. A snapshot is taken while nothing is
//! appended, in steps of which each is forced to the disk before the next, and is harmless by itself:
//!
//! 1. The state is written under another name, which is not read.
//! 2. Journal N+1 is made, without a record. It is not read as long as there is no snapshot N+1.
//! 3. The state is named snapshot N+1. It equals snapshot N with journal N applied, so from now on these
//!    are of no use, and updates go to journal N+1.
//! 4. What has a smaller number is removed, now or when the folder is next opened.
//!
//! **What a crash leaves.** A process that dies while it appends leaves the beginning of a record at the
//! end of the journal. It was never acknowledged, and is cut off: it is *torn*. A record that is there
//! from its first byte to its last was written; if it is not as it was written, that is *damage*, and
//! the folder is not opened, for what comes after would meet weights that it was not made for.
//!
//! Appending copies an update into the memory of the operating system, from where it reaches the disk
//! some seconds later. That survives the death of the process, not of the machine; [`Options::sync`]
//! waits for the disk with every update, and a record says whether its journal did. When the machine has
//! gone down ([`Lock`] knows), a record that is not as it was written may never have reached the disk,
//! and is torn, too, unless one follows that was written when all before it was on the disk.

mod disk;
mod lock;
mod record;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lock::LOCK;
pub use lock::Lock;
pub use record::Record;
use record::{Found, Kind, Reader, Writer};

/// How a journal is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether every update waits until it is on the disk.
    pub sync: bool,
    /// How long to wait for a process that still holds the folder. A launcher that restarts a server
    /// may be faster than the end of the killed one; a longer wait tells later that it was started twice.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { sync: false, patience: Duration::from_secs(3) }
    }
}

/// The folder of one server, open for writing. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Journal {
    folder: PathBuf,
    options: Options,
    /// The number of the journal that is written, and that journal.
    number: u64,
    writer: Writer,
    _lock: Lock,
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

/// What can be done where updates are lost for good.
const REMEDY: &str = "restore the folder, or begin the run anew, with other folders for the journals of \
                      all servers and for its records";

/// Why a folder cannot be opened or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process uses it.
    #[error(
        "{} uses {}: wait until it ends, stop it, or name another folder",
        process.map_or("another process".to_owned(), |process| format!("process {process}")),
        folder.display()
    )]
    InUse {
        /// The folder.
        folder: PathBuf,
        /// The process, if that is known.
        process: Option<u32>,
    },
    /// It is the folder of something else, and nothing in it was touched.
    #[error("{} is no part of a server's journal: name an empty folder", path.display())]
    Foreign {
        /// Something in it.
        path: PathBuf,
    },
    /// Another version of this program wrote it.
    #[error("{} is of another version: use the program that wrote it, or name another folder", file.display())]
    OtherVersion {
        /// The file.
        file: PathBuf,
    },
    /// A file is damaged where no crash does it. The updates from there on cannot be trusted.
    #[error("{} is damaged at byte {offset}: {REMEDY}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Where the record that is wrong begins.
        offset: u64,
    },
    /// A file is not there, and with it are updates that were acknowledged.
    #[error("{} is missing: {REMEDY}", file.display())]
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
        // Before anything is written, and again when no other process can change it.
        if folder.exists() {
            Listing::read(&folder)?;
        }
        let lock = Lock::take(&folder, options.patience)?;
        let listing = Listing::read(&folder)?;
        listing.unfinished.iter().try_for_each(|path| remove(path))?;

        let number = listing.snapshots.last().copied().unwrap_or(0);
        let snapshot = listing.snapshots.last().map(|number| read_snapshot(&folder, *number));
        let snapshot = snapshot.transpose()?;
        listing.expect_nothing_after(&folder, number)?;
        if listing.is_new() || listing.is_barely_made(&folder)? {
            Writer::create(Kind::Journal, Kind::Journal.path(&folder, number), number)?.sync()?;
        }
        let mut reader = open_journal(&folder, number, lock.may_lack_writes())?;
        let cut = reader.cut()?;
        // What was cut off must not come back, nor what is here be lost, under what is written next.
        let mut writer = Writer::append(Kind::Journal.path(&folder, number), number)?;
        writer.sync()?;
        // The snapshot may have got its name just before the process died.
        sync_folder(&folder)?;
        listing.others(&folder, number).iter().try_for_each(|path| remove(path))?;
        lock.made_good()?;
        let journal = Journal { folder, options, number, writer, _lock: lock };
        Ok((journal, Recovered { snapshot, entries: Entries { reader: Some(reader) }, cut }))
    }

    /// Whether a folder holds the state of a run.
    pub fn has_state(folder: &Path) -> bool {
        Listing::read(folder).is_ok_and(|listing| !listing.snapshots.is_empty())
    }

    /// Appends one update: a header that only the caller understands, and numbers. When this returns,
    /// it survives the death of this process, and may be acknowledged. An error leaves it out.
    pub fn append(&mut self, header: &[u8], payloads: &[&[f32]]) -> Result<(), JournalError> {
        self.writer.write(header, payloads, self.options.sync)
    }

    /// Appends one update and waits until it is on the disk, whether others do or not.
    pub fn append_synced(&mut self, header: &[u8]) -> Result<(), JournalError> {
        self.writer.write(header, &[], true)
    }

    /// Bytes of the updates that are not in a snapshot: what would have to be read again after a crash,
    /// and what tells the caller to take the next one.
    pub fn len_bytes(&self) -> u64 {
        self.writer.bytes()
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
        let path = Kind::Snapshot.path(&self.folder, number);
        let unfinished = path.with_extension(UNFINISHED);
        let written: Result<Writer, JournalError> = (|| {
            let mut file = Writer::create(Kind::Snapshot, unfinished.clone(), number)?;
            watch("an empty snapshot");
            file.write_streamed(header, vectors)?;
            watch("a snapshot without its name");
            let journal = Kind::Journal.path(&self.folder, number);
            let mut journal = Writer::create(Kind::Journal, journal, number)?;
            watch("a journal more");
            journal.sync()?;
            // Where the snapshot is, its journal is, even if the power fails in between.
            sync_folder(&self.folder)?;
            disk::rename(&unfinished, &path).attempt("name", &path)?;
            Ok(journal)
        })();
        let journal = written.inspect_err(|_| {
            // It does no harm, and is removed when the folder is next opened.
            let _ = fs::remove_file(&unfinished);
        })?;
        (self.number, self.writer) = (number, journal);
        watch("a snapshot");
        sync_folder(&self.folder)?;
        let listing = Listing::read(&self.folder)?;
        for path in listing.others(&self.folder, number) {
            remove(&path)?;
            watch("a file less");
        }
        Ok(())
    }
}

/// The updates since the newest snapshot, from the first on. They are read as they are asked for.
#[derive(Debug)]
pub struct Entries {
    /// None after the last, or an error.
    reader: Option<Reader>,
}

impl Iterator for Entries {
    type Item = Result<Record, JournalError>;

    fn next(&mut self) -> Option<Result<Record, JournalError>> {
        let reader = self.reader.as_mut()?;
        let mut record = Record::default();
        let next = match reader.next(&mut record) {
            Ok(Found::Record) => return Some(Ok(record)),
            Ok(Found::End) => None,
            Ok(Found::Torn | Found::Damage { .. }) => Some(Err(reader.damaged())),
            Err(error) => Some(Err(error)),
        };
        self.reader = None;
        next
    }
}

/// The extension of a snapshot that is being written.
const UNFINISHED: &str = "unfinished";
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

    /// Whether no run has begun here.
    fn is_new(&self) -> bool {
        self.snapshots.is_empty() && self.journals.is_empty()
    }

    /// Whether there is nothing but the first journal, and of that not even the preamble for sure: the
    /// process died, or the power failed, while it was made.
    fn is_barely_made(&self, folder: &Path) -> Result<bool, JournalError> {
        if !self.snapshots.is_empty() || !self.journals.contains(&0) {
            return Ok(false);
        }
        Ok(length(&Kind::Journal.path(folder, 0))? <= record::PREAMBLE)
    }

    /// Fails if a later journal than that of the newest snapshot has records: the snapshot that they
    /// follow was there when they were written. One without records waits for its snapshot.
    fn expect_nothing_after(&self, folder: &Path, number: u64) -> Result<(), JournalError> {
        if !self.is_new() && !self.journals.contains(&number) {
            return Err(JournalError::Missing { file: Kind::Journal.path(folder, number) });
        }
        for later in self.journals.range(number + 1..) {
            if length(&Kind::Journal.path(folder, *later))? > record::PREAMBLE {
                return Err(JournalError::Missing { file: Kind::Snapshot.path(folder, *later) });
            }
        }
        Ok(())
    }

    /// All journals and snapshots but those of this number.
    fn others(&self, folder: &Path, number: u64) -> Vec<PathBuf> {
        let of = |kind: Kind, numbers: &BTreeSet<u64>| -> Vec<PathBuf> {
            let others = numbers.iter().filter(|other| **other != number);
            others.map(|number| kind.path(folder, *number)).collect()
        };
        [of(Kind::Journal, &self.journals), of(Kind::Snapshot, &self.snapshots)].concat()
    }
}

/// Opens a journal whose records are all as they were written, but for the torn end. Where the machine
/// has gone down, the last writes may lack anything.
fn open_journal(folder: &Path, number: u64, may_lack_writes: bool) -> Result<Reader, JournalError> {
    let path = Kind::Journal.path(folder, number);
    let mut reader = Reader::open(Kind::Journal, path, number)?;
    reader.check(may_lack_writes)?;
    Ok(reader)
}

fn length(path: &Path) -> Result<u64, JournalError> {
    Ok(fs::metadata(path).attempt("read", path)?.len())
}

fn read_snapshot(folder: &Path, number: u64) -> Result<Record, JournalError> {
    let path = Kind::Snapshot.path(folder, number);
    let mut reader = Reader::open(Kind::Snapshot, path, number)?;
    let mut snapshot = Record::default();
    let whole = matches!(reader.next(&mut snapshot)?, Found::Record) && reader.is_at_end();
    if whole { Ok(snapshot) } else { Err(reader.damaged()) }
}

fn remove(path: &Path) -> Result<(), JournalError> {
    disk::remove(path).attempt("remove", path)
}

/// Forces the names of its files to the disk.
fn sync_folder(folder: &Path) -> Result<(), JournalError> {
    disk::sync_folder(folder).attempt("write", folder)
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
mod power;
#[cfg(test)]
mod tests;
