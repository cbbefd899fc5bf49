//! The files of a journal: a preamble, and one record after the other.
//!
//! ```text
//!  0             8          16
//!  ┌─────────────┬──────────┬──────────┬──────────┬┄
//!  │ what it is  │ number   │ record   │ record   │
//!  │             │ u64      │          │          │
//!  └─────────────┴──────────┴──────────┴──────────┴┄
//!
//!  0          4         8         16        24        32
//!  ┌──────────┬─────────┬─────────┬─────────┬─────────┬──────────┬──────────────┐
//!  │ mark     │ header  │ payload │ hash of │ hash of │ header   │ payload      │
//!  │          │ bytes   │ numbers │ both    │ this    │          │ f32 each     │
//!  │          │ u32     │ u64     │ u64     │ u64     │          │              │
//!  └──────────┴─────────┴─────────┴─────────┴─────────┴──────────┴──────────────┘
//! ```
//!
//! Numbers have the byte order of the machine: a journal is read where it was written, and elsewhere
//! its number is wrong. Hashes are XXH3. That of a record's *head* depends on the file's number and the
//! record's place in it, so that bytes which were a record elsewhere, or were sent by a worker that
//! imitates one, are none here.
//!
//! With a hash of its own, a head can be believed before what follows it: a record that is longer than
//! the rest of its file was cut short, not damaged. The mark is another if, before the record was
//! written, all before it was on the disk.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, IoSlice, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::disk::{self, Stream};
use super::{Attempt, JournalError};

/// One update, or one state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// What the caller gave as a header.
    pub header: Vec<u8>,
    /// All numbers that the caller gave, one vector after the other.
    pub payload: Vec<f32>,
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Snapshot,
    Journal,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Snapshot => "snapshot",
            Kind::Journal => "journal",
        }
    }

    pub(super) fn path(self, folder: &Path, number: u64) -> PathBuf {
        folder.join(format!("{}-{number}", self.name()))
    }

    fn preamble(self, number: u64) -> Preamble {
        let what = match self {
            Kind::Snapshot => *b"UNISNAP2",
            Kind::Journal => *b"UNIJOUR2",
        };
        Preamble { what, number }
    }
}

/// Bytes before the first record.
pub(super) const PREAMBLE: u64 = size_of::<Preamble>() as u64;

#[derive(Debug, Default, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Preamble {
    what: [u8; 8],
    number: u64,
}

/// Bytes of a head.
const HEAD: u64 = size_of::<Head>() as u64;

/// The mark of a record, and of one before which all was on the disk.
const MARK: [u8; 4] = *b"rec:";
const MARK_SYNCED: [u8; 4] = *b"syn:";

#[derive(Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    lengths: Lengths,
    hash: u64,
}

#[derive(Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Lengths {
    mark: [u8; 4],
    header: u32,
    payload: u64,
    body: u64,
}

impl Head {
    /// Of a record at a place in the file of this number.
    fn new(number: u64, at: u64, lengths: Lengths) -> Head {
        let hash = lengths.hash(number, at);
        Head { lengths, hash }
    }

    fn is_valid(&self, number: u64, at: u64) -> bool {
        [MARK, MARK_SYNCED].contains(&self.lengths.mark)
            && self.hash == self.lengths.hash(number, at)
    }

    /// Bytes of the record, if there can be so many.
    fn size(&self) -> Option<u64> {
        let payload = self.lengths.payload.checked_mul(4)?;
        payload.checked_add(HEAD + u64::from(self.lengths.header))
    }
}

impl Lengths {
    fn hash(&self, number: u64, at: u64) -> u64 {
        xxh3_64_with_seed(self.as_bytes(), number.rotate_left(40) ^ at)
    }
}

/// Writes records to the end of a file.
#[derive(Debug)]
pub(super) struct Writer {
    file: File,
    path: PathBuf,
    number: u64,
    length: u64,
    /// Whether all of it was forced to the disk.
    is_synced: bool,
    /// Whether something unfinished is at the end that could not be removed.
    is_unfinished: bool,
}

impl Writer {
    /// A new file, in place of what had its name.
    pub(super) fn create(kind: Kind, path: PathBuf, number: u64) -> Result<Writer, JournalError> {
        let file = disk::create(&path).attempt("make", &path)?;
        let mut stream = Stream { file: &file, path: &path, at: 0 };
        stream.write_all(kind.preamble(number).as_bytes()).attempt("write", &path)?;
        let (is_synced, is_unfinished) = (false, false);
        Ok(Writer { file, path, number, length: PREAMBLE, is_synced, is_unfinished })
    }

    /// A file that a [`Reader`] has checked.
    pub(super) fn append(path: PathBuf, number: u64) -> Result<Writer, JournalError> {
        let mut file = File::options().write(true).open(&path).attempt("open", &path)?;
        let length = file.seek(SeekFrom::End(0)).attempt("open", &path)?;
        Ok(Writer { file, path, number, length, is_synced: false, is_unfinished: false })
    }

    /// Forces what is there to the disk.
    pub(super) fn sync(&mut self) -> Result<(), JournalError> {
        disk::sync(&self.file, &self.path).attempt("write", &self.path)?;
        self.is_synced = true;
        Ok(())
    }

    /// Bytes of all records.
    pub(super) fn bytes(&self) -> u64 {
        self.length - PREAMBLE
    }

    /// Whether more can be written.
    pub(super) fn check(&self) -> Result<(), JournalError> {
        match self.is_unfinished {
            true => Err(JournalError::Unfinished { file: self.path.clone() }),
            false => Ok(()),
        }
    }

    /// Lets a test have writes fail.
    #[cfg(test)]
    pub(super) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// Writes a record from where its parts lie, or nothing.
    pub(super) fn write(
        &mut self,
        header: &[u8],
        payloads: &[&[f32]],
        sync: bool,
    ) -> Result<(), JournalError> {
        self.check()?;
        let mut body = Xxh3::new();
        body.update(header);
        payloads.iter().for_each(|payload| body.update(payload.as_bytes()));
        let numbers = payloads.iter().map(|payload| payload.len() as u64).sum();
        let head = self.head(header, numbers, &body)?;

        let payloads = payloads.iter().map(|payload| payload.as_bytes());
        let mut written = self.write_parts([head.as_bytes(), header].into_iter().chain(payloads));
        if written.is_ok() && sync {
            written = disk::sync(&self.file, &self.path);
        }
        self.is_synced = sync && written.is_ok();
        if written.is_err() {
            let undone = disk::cut(&self.file, &self.path, self.length);
            let undone = undone.and_then(|()| self.file.seek(SeekFrom::Start(self.length)));
            self.is_unfinished = undone.is_err();
        }
        written.attempt("write", &self.path)?;
        self.length += HEAD + header.len() as u64 + numbers * 4;
        Ok(())
    }

    /// Writes the only record of a file, whose length is known at its end, and forces it to the disk.
    pub(super) fn write_streamed<'a>(
        &mut self,
        header: &[u8],
        vectors: impl IntoIterator<Item = &'a [f32]>,
    ) -> Result<(), JournalError> {
        let (mut body, mut numbers) = (Xxh3::new(), 0);
        let stream = Stream { file: &self.file, path: &self.path, at: self.length };
        let mut file = BufWriter::with_capacity(BUFFER, stream);
        let written = (|| {
            file.write_all(Head::default().as_bytes())?;
            body.update(header);
            file.write_all(header)?;
            for vector in vectors {
                body.update(vector.as_bytes());
                numbers += vector.len() as u64;
                file.write_all(vector.as_bytes())?;
            }
            file.flush()
        })();
        drop(file);
        written.attempt("write", &self.path)?;
        let head = self.head(header, numbers, &body)?;
        let finished = (|| {
            self.file.seek(SeekFrom::Start(self.length))?;
            let mut file = Stream { file: &self.file, path: &self.path, at: self.length };
            file.write_all(head.as_bytes())?;
            disk::sync(&self.file, &self.path)
        })();
        finished.attempt("write", &self.path)
    }

    /// Writes parts one after the other, without collecting them before.
    fn write_parts<'a>(&self, mut parts: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
        let mut at = self.length;
        loop {
            let mut slices = [IoSlice::new(&[]); PARTS];
            let mut filled = 0;
            for (slice, part) in slices.iter_mut().zip(parts.by_ref()) {
                *slice = IoSlice::new(part);
                filled += 1;
            }
            if filled == 0 {
                return Ok(());
            }
            let mut rest = &mut slices[..filled];
            // Empty parts at the front are skipped, so that a write of nothing is never asked for.
            IoSlice::advance_slices(&mut rest, 0);
            while !rest.is_empty() {
                match disk::write(&self.file, &self.path, at, rest) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(written) => {
                        at += written as u64;
                        IoSlice::advance_slices(&mut rest, written);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// The head of the record that comes next.
    fn head(&self, header: &[u8], numbers: u64, body: &Xxh3) -> Result<Head, JournalError> {
        let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "a header of 4 GiB");
        let header = u32::try_from(header.len()).map_err(|_| too_long());
        let header = header.attempt("write", &self.path)?;
        let mark = if self.is_synced { MARK_SYNCED } else { MARK };
        let lengths = Lengths { mark, header, payload: numbers, body: body.digest() };
        Ok(Head::new(self.number, self.length, lengths))
    }
}

/// Bytes that are collected before they are written. More would be more memory for nothing; with fewer,
/// calls of the system show where vectors are small.
const BUFFER: usize = 1 << 16;

/// Parts that one call of the system takes. More is more on the stack; with fewer, updates of many
/// small vectors take several calls.
const PARTS: usize = 64;

/// Reads the records of a file.
#[derive(Debug)]
pub(super) struct Reader {
    file: BufReader<File>,
    path: PathBuf,
    number: u64,
    /// Where the next record begins, and where the last ends.
    at: u64,
    end: u64,
}

/// What comes next in a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Record,
    End,
    /// The beginning of a record, or of its head.
    Torn,
    /// As many bytes as a record has, or a head, and not as they were written. If something was after
    /// it, it can only begin from `resume` on.
    Damage {
        resume: u64,
    },
}

impl Reader {
    /// Opens a file and reads its preamble.
    pub(super) fn open(kind: Kind, path: PathBuf, number: u64) -> Result<Reader, JournalError> {
        let file = File::open(&path).attempt("open", &path)?;
        let end = file.metadata().attempt("read", &path)?.len();
        let mut reader =
            Reader { file: BufReader::with_capacity(BUFFER, file), path, number, at: 0, end };
        let mut preamble = Preamble::default();
        if end < PREAMBLE {
            return Err(reader.damaged());
        }
        reader.fill(preamble.as_mut_bytes())?;
        let expected = kind.preamble(number);
        if preamble.what[..7] == expected.what[..7] && preamble.what[7] == b'1' {
            return Err(JournalError::OtherVersion { file: reader.path });
        }
        if preamble != expected {
            return Err(reader.damaged());
        }
        reader.at = PREAMBLE;
        Ok(reader)
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at == self.end
    }

    /// The error that the next record is damaged.
    pub(super) fn damaged(&self) -> JournalError {
        JournalError::Damaged { file: self.path.clone(), offset: self.at }
    }

    /// Reads the next record. After damage, the reader stays before it.
    pub(super) fn next(&mut self, into: &mut Record) -> Result<Found, JournalError> {
        let left = self.end - self.at;
        if left == 0 {
            return Ok(Found::End);
        }
        if left < HEAD {
            return Ok(Found::Torn);
        }
        let mut head = Head::default();
        self.fill(head.as_mut_bytes())?;
        if !head.is_valid(self.number, self.at) {
            return Ok(Found::Damage { resume: self.at + 1 });
        }
        let Some(size) = head.size().filter(|size| *size <= left) else {
            return Ok(Found::Torn);
        };
        // Both are in the file, so they can be held in memory.
        into.header.resize(head.lengths.header as usize, 0);
        into.payload.resize(head.lengths.payload as usize, 0.0);
        self.fill(&mut into.header)?;
        self.fill(into.payload.as_mut_bytes())?;
        let mut body = Xxh3::new();
        body.update(&into.header);
        body.update(into.payload.as_bytes());
        if body.digest() != head.lengths.body {
            return Ok(Found::Damage { resume: self.at + size });
        }
        self.at += size;
        Ok(Found::Record)
    }

    /// Reads all records. The file ends before what is torn from now on; damage is an error. Where the
    /// last writes may be lacking, damage is torn, too, unless a record follows that was written when
    /// the damaged one was on the disk.
    pub(super) fn check(&mut self, may_lack_writes: bool) -> Result<(), JournalError> {
        let mut record = Record::default();
        loop {
            match self.next(&mut record)? {
                Found::Record => {}
                Found::End | Found::Torn => break,
                Found::Damage { resume } if may_lack_writes && !self.has_synced_head(resume)? => {
                    break;
                }
                Found::Damage { .. } => return Err(self.damaged()),
            }
        }
        self.end = self.at;
        Ok(())
    }

    /// Cuts the file where its records end, and returns to the first. Says how many bytes were too many.
    pub(super) fn cut(&mut self) -> Result<u64, JournalError> {
        self.rewind()?;
        let length = self.file.get_ref().metadata().attempt("read", &self.path)?.len();
        let torn = length - self.end;
        if torn > 0 {
            log::warn!("{}: cut off {torn} bytes of an unfinished record", self.path.display());
            let file = File::options().write(true).open(&self.path).attempt("open", &self.path)?;
            disk::cut(&file, &self.path, self.end).attempt("write", &self.path)?;
        }
        Ok(torn)
    }

    /// Whether the head of a record is anywhere from a place on before which all was on the disk.
    fn has_synced_head(&mut self, from: u64) -> Result<bool, JournalError> {
        let mut window = vec![0; 1 << 20];
        let mut start = from;
        while start + HEAD <= self.end {
            let length = (self.end - start).min(window.len() as u64);
            let window = &mut window[..length as usize];
            self.file.seek(SeekFrom::Start(start)).attempt("read", &self.path)?;
            self.fill(window)?;
            for (i, bytes) in window.windows(HEAD as usize).enumerate() {
                if bytes.starts_with(&MARK_SYNCED)
                    && Head::read_from_bytes(bytes)
                        .is_ok_and(|head| head.is_valid(self.number, start + i as u64))
                {
                    return Ok(true);
                }
            }
            // The next window begins with the first place that did not fit into this one.
            start += length - HEAD + 1;
        }
        Ok(false)
    }

    fn rewind(&mut self) -> Result<(), JournalError> {
        self.at = PREAMBLE;
        self.file.seek(SeekFrom::Start(self.at)).attempt("read", &self.path)?;
        Ok(())
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), JournalError> {
        self.file.read_exact(into).attempt("read", &self.path)
    }
}
