//! Reads and writes the record of a job, on a thread of its own: etcd may not answer for as long as it likes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::launcher::Status;
use super::record::{Machine, Record};

/// Where a record is kept.
pub trait Store: Send + Sync + 'static {
    /// What is kept, with its revision, if anything is. Gives up soon.
    fn read(&self) -> Result<Option<(Vec<u8>, u64)>, StoreError>;

    /// Replaces what has this revision (0: nothing is kept). Gives up soon; whether it was replaced is then not
    /// known, and shows when it is tried again.
    fn replace(&self, revision: u64, value: &[u8]) -> Result<Replaced, StoreError>;

    /// Keeps the status of the job for people to read, unless a newer one is kept.
    fn publish(&self, status: &Status);

    /// Keeps the result of the job, whatever was kept before.
    fn keep_result(&self, result: &[u8]) -> Result<(), StoreError>;
}

/// What came of replacing a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// It has this revision now.
    Done(u64),
    /// Something else is kept.
    Other(Option<(Vec<u8>, u64)>),
}

/// Why a record could not be read or replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It may succeed later.
    #[error("{0}")]
    Unavailable(String),
    /// It will not, before the settings are changed.
    #[error("{0}")]
    Refused(String),
}

/// What the clerk has found.
#[derive(Clone, Debug)]
pub enum Answer {
    /// This is the record, read, or found in the place of the one that was to be replaced.
    Read(Box<Record>, u64),
    /// The record was replaced.
    Written(u64),
    /// The result is kept.
    Kept,
}

enum Request {
    Read,
    Write(Box<Record>, u64),
    Publish(Box<Status>),
    Keep(Vec<u8>),
}

/// The clerk of a launcher.
pub struct Clerk {
    requests: Sender<Request>,
    is_closed: Arc<AtomicBool>,
}

/// How long the clerk pauses before it tries again. Longer: changes wait longer after etcd is back. Shorter: more
/// requests while it is not.
const PAUSE: Duration = Duration::from_millis(100);

impl Clerk {
    /// Begins to work for a launcher that has joined as `me`, by writing this record; what it finds goes to `tell`.
    pub fn start(
        store: Arc<dyn Store>,
        record: Record,
        me: Machine,
        tell: impl Fn(Answer) + Send + 'static,
    ) -> io::Result<Clerk> {
        let (requests, inbox) = channel();
        let is_closed = Arc::new(AtomicBool::new(false));
        let closed = is_closed.clone();
        std::thread::Builder::new()
            .name("unisono-clerk".into())
            .spawn(move || work(&*store, record, &me, &inbox, &closed, &tell))?;
        Ok(Clerk { requests, is_closed })
    }

    /// Reads the record.
    pub fn read(&self) {
        self.ask(Request::Read);
    }

    /// Replaces the record that has this revision.
    pub fn write(&self, record: Box<Record>, revision: u64) {
        self.ask(Request::Write(record, revision));
    }

    /// Publishes the status of the job, if that succeeds at once.
    pub fn publish(&self, status: Status) {
        self.ask(Request::Publish(Box::new(status)));
    }

    /// Keeps the result of the job.
    pub fn keep_result(&self, result: Vec<u8>) {
        self.ask(Request::Keep(result));
    }

    fn ask(&self, request: Request) {
        // A clerk that has ended was closed.
        let _ = self.requests.send(request);
    }
}

impl Drop for Clerk {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

fn work(
    store: &dyn Store,
    mut last: Record,
    me: &Machine,
    inbox: &Receiver<Request>,
    is_closed: &AtomicBool,
    tell: &impl Fn(Answer),
) {
    let mut is_away = false;
    for request in inbox {
        if let Request::Publish(value) = request {
            store.publish(&value);
            continue;
        }
        loop {
            if is_closed.load(Ordering::Relaxed) {
                return;
            }
            match attempt(store, &request) {
                Ok(answer) => {
                    match (&answer, &request) {
                        (Answer::Read(record, _), _)
                        | (Answer::Written(_), Request::Write(record, _)) => {
                            last.clone_from(record);
                        }
                        _ => {}
                    }
                    if std::mem::take(&mut is_away) {
                        log::warn!("etcd can be reached again");
                    }
                    tell(answer);
                    break;
                }
                Err(StoreError::Refused(error)) if matches!(request, Request::Keep(_)) => {
                    log::warn!("the result is only printed, and not kept: {error}");
                    tell(Answer::Kept);
                    break;
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_away, true) {
                        log::warn!(
                            "steps go on, but workers can neither join nor be replaced, and the run cannot end, \
                             as long as this lasts: {error}"
                        );
                    }
                    restore(store, me, &request, &last);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// Writes the record again where it has been deleted, if this launcher leads.
fn restore(store: &dyn Store, me: &Machine, request: &Request, last: &Record) {
    let record = match request {
        Request::Write(record, _) => record,
        _ => last,
    };
    if let Ok(None) = store.read()
        && record.leader == *me
        && let Ok(Replaced::Done(_)) = store.replace(0, &record.to_bytes())
    {
        log::warn!("the record of the job was deleted; this machine, which leads, wrote it again");
    }
}

fn attempt(store: &dyn Store, request: &Request) -> Result<Answer, StoreError> {
    if let Request::Keep(result) = request {
        return store.keep_result(result).map(|()| Answer::Kept);
    }
    let found = match request {
        Request::Write(record, revision) => match store.replace(*revision, &record.to_bytes())? {
            Replaced::Done(revision) => return Ok(Answer::Written(revision)),
            Replaced::Other(found) => found,
        },
        _ => store.read()?,
    };
    let unreadable = || {
        StoreError::Unavailable(
            "the record of the job is gone, or was written by another version of Unisono".into(),
        )
    };
    let (bytes, revision) = found.ok_or_else(unreadable)?;
    let record = Record::parse(&bytes).ok_or_else(unreadable)?;
    Ok(Answer::Read(Box::new(record), revision))
}
