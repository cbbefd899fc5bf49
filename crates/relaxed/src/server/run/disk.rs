//! What a server writes down, and how it goes on from that.
//!
//! The journal holds every entry with the gradients that were applied, after averaging, decoding and
//! correcting, so that to repeat it is to apply them again. The records of the run are for people; one
//! that a crash left out is made up for from the journal.

use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::checked::CheckedSetup;
use super::{ServeError, ServedRun, State, Unserved};
use crate::Life;
use crate::adaptive_bound::Observation;
use crate::events::{Recorder, Resumed, Update};
use crate::server::core::{Core, Entry, Saved};
use crate::server::journal::{self, Journal};
use crate::server::lives::Lives;
use crate::server::store::Change;
use crate::server::wire::{Measured, Setup};

/// Where a server writes.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// The number of the server.
    pub number: usize,
    /// The folder of its journal, without which a crash loses everything.
    pub journal: Option<PathBuf>,
    /// Whether updates wait until they are on the disk, to survive a crash of the machine.
    pub sync: bool,
    /// Bytes of the journal after which a snapshot is taken; by default 8 times those of the weights
    /// and at least 64 MiB. More: a restart takes longer. Fewer: more is written.
    pub snapshot_after: Option<u64>,
}

/// What a server has before it knows of a run.
#[derive(Default)]
pub struct Waiting {
    /// Where it will be written down.
    pub journal: Option<Journal>,
    /// The lives that workers were given already.
    pub lives: Lives,
    /// What records it.
    pub recorder: Option<Box<dyn Recorder>>,
}

/// What a record of the journal is.
#[derive(Serialize, Deserialize)]
enum Line {
    /// Something was settled; its gradients follow.
    Settled(Written),
    /// A worker was given a life.
    Life { worker: u32, life: Life },
}

/// What is written down with an entry.
#[derive(Clone, Serialize, Deserialize)]
struct Written {
    entry: Entry,
    measured: Vec<Measured>,
    time: f64,
    /// The pieces whose gradients follow.
    pieces: Vec<u32>,
}

/// What is written down with a snapshot.
#[derive(Serialize, Deserialize)]
struct Head {
    setup: Setup,
    saved: Saved,
    lives: Lives,
    versions: Vec<u64>,
    began: f64,
    /// How many seconds after that this was written.
    seconds: f64,
}

impl ServedRun {
    /// A run that begins, with these weights of every piece.
    pub fn new(
        setup: Setup,
        weights: Vec<Vec<f32>>,
        files: &Files,
        waiting: Waiting,
    ) -> Result<ServedRun, ServeError> {
        let Waiting { journal, lives, mut recorder } = waiting;
        let checked = CheckedSetup::new(setup)?;
        let lengths = weights.iter().map(Vec::len);
        if !lengths.eq(checked.pieces().iter().map(|piece| piece.len())) {
            return Err(ServeError::Setup("the weights do not fit the pieces".into()));
        }
        // Before the snapshot, which would make these the records of this run.
        if let Some(recorder) = &recorder {
            recorder.expect_none().map_err(ServeError::Records)?;
        }
        let served = ServedRun::with(checked, weights, files, wall_clock());
        let mut state = served.state.lock().expect("no other thread has it");
        state.lives = lives;
        state.journal = journal;
        // The snapshot first: with it the run has begun, and a restart goes on with the records, where
        // one without it would find records of nothing.
        served.snapshot(&mut state)?;
        if let Some(recorder) = &mut recorder {
            recorder.begin(state.adaptive_bound()).map_err(ServeError::Records)?;
        }
        state.recorder = recorder;
        drop(state);
        Ok(served)
    }

    /// Goes on with what the journal holds. `None` if that is nothing yet; then the rest is for a run
    /// that begins.
    pub fn recover(
        files: &Files,
        mut recorder: Option<Box<dyn Recorder>>,
    ) -> Result<(Option<ServedRun>, Waiting), ServeError> {
        let waiting = |journal, recorder| Waiting { journal, recorder, ..Waiting::default() };
        let Some(folder) = &files.journal else { return Ok((None, waiting(None, recorder))) };
        let options = journal::Options { sync: files.sync, ..journal::Options::default() };
        let (journal, recovered) = Journal::open(folder, options)?;
        let Some(snapshot) = recovered.snapshot else {
            return Ok((None, waiting(Some(journal), recorder)));
        };
        let head: Head = parse(&snapshot.header)?;
        let checked = CheckedSetup::new(head.setup)?;
        let empty = checked.pieces().iter().map(|piece| vec![0.0; piece.len()]).collect();
        let mut served = ServedRun::with(checked, empty, files, head.began);
        let mut state = served.state.lock().expect("no other thread has it");
        state.core = Core::restore(served.checked.rules(), &head.saved);
        state.lives = head.lives;
        state.versions = head.versions;
        served.restore_pieces(&state.versions, &snapshot.payload)?;
        let (mut journaled, mut last) = (Vec::new(), head.seconds);
        for record in recovered.entries {
            let record = record?;
            match parse(&record.header)? {
                Line::Settled(entry) => {
                    served.repeat(&mut state, &entry, &record.payload)?;
                    last = entry.time;
                    if recorder.is_some() {
                        journaled.extend(updates(&entry));
                    }
                }
                Line::Life { worker, life } => state.lives.repeat(worker, life),
            }
        }
        drop(state);
        // The clock of the machine may have been set back.
        served.awake_at = last.max(wall_clock() - head.began);
        let mut state = served.state.lock().expect("no other thread has it");
        state.journal = Some(journal);
        if let Some(recorder) = &mut recorder {
            let resumed = Resumed {
                updates: state.core.updates(),
                journaled: &journaled,
                bound: state.adaptive_bound(),
                time: served.seconds(),
            };
            recorder.resume(resumed).map_err(ServeError::Records)?;
        }
        state.recorder = recorder;
        // Where nothing is waited for, no worker's place need be kept.
        let bounded = served.checked.setup.level.bound().is_some();
        state.gathers_until = bounded.then(|| served.now() + served.return_time());
        drop(state);
        Ok((Some(served), Waiting::default()))
    }

    /// Writes an entry into the journal, then into the records.
    pub(super) fn write_down(
        &self,
        state: &mut State,
        entry: Entry,
        measured: Vec<Measured>,
        changes: &[Change<'_>],
    ) -> Result<(), Unserved> {
        let pieces = changes.iter().map(|change| change.piece as u32).collect();
        let written = Written { entry, measured, time: self.seconds(), pieces };
        let appended = append(state, &written, changes);
        self.or_fail(state, appended)
    }

    /// Writes into the journal that a life was given out, and waits for the disk: even the crash of a
    /// machine must not have it given out again.
    pub(super) fn write_down_life(
        &self,
        state: &mut State,
        worker: u32,
        life: Life,
    ) -> Result<(), Unserved> {
        let written = match &mut state.journal {
            Some(journal) => journal.append_synced(&text(&Line::Life { worker, life })),
            None => Ok(()),
        };
        self.or_fail(state, written.map_err(ServeError::Journal))
    }

    /// Takes a snapshot if the journal is long. Not while this thread has anything left to apply.
    pub(super) fn snapshot_if_due(&self, state: &mut State) -> Result<(), Unserved> {
        let long = state.journal.as_ref().is_some_and(|j| j.len_bytes() > self.snapshot_after);
        let taken = if long { self.snapshot(state) } else { Ok(()) };
        self.or_fail(state, taken)
    }

    /// After an error no worker is told anything any more.
    fn or_fail(&self, state: &mut State, result: Result<(), ServeError>) -> Result<(), Unserved> {
        result.map_err(|error| {
            state.failed = true;
            self.changed.notify_all();
            Unserved::Failed(error)
        })
    }

    /// Writes down everything, once all that was settled is applied.
    fn snapshot(&self, state: &mut State) -> Result<(), ServeError> {
        let Some(journal) = &mut state.journal else { return Ok(()) };
        let head = Head {
            setup: self.checked.setup.clone(),
            saved: state.core.save(),
            lives: state.lives.clone(),
            versions: state.versions.clone(),
            began: self.began,
            seconds: self.seconds(),
        };
        let header = postcard::to_stdvec(&head).expect("a state can be encoded");
        let mut vectors: Vec<Vec<f32>> = Vec::new();
        for (piece, version) in state.versions.iter().enumerate() {
            self.store.read(piece, *version);
            self.store.inspect(piece, |_, weights, optimizer| {
                vectors.push(weights.to_vec());
                vectors.extend(optimizer.iter().map(|vector| vector.to_vec()));
            });
        }
        journal.snapshot(&header, vectors.iter().map(Vec::as_slice))?;
        Ok(())
    }

    /// Puts back the weights and the optimizer's state of a snapshot.
    fn restore_pieces(&self, versions: &[u64], payload: &[f32]) -> Result<(), ServeError> {
        let short = || ServeError::Content("a snapshot of another length".into());
        if versions.len() != self.checked.pieces().len() {
            return Err(short());
        }
        let mut rest = payload;
        for (piece, version) in versions.iter().enumerate() {
            let length = self.checked.pieces()[piece].len();
            let vectors = 1 + self.store.optimizer_vectors(piece);
            let (own, others) = rest.split_at_checked(vectors * length).ok_or_else(short)?;
            rest = others;
            let (weights, optimizer) = own.split_at(length);
            let optimizer: Vec<&[f32]> = match length {
                0 => vec![&[]; vectors - 1],
                _ => optimizer.chunks(length).collect(),
            };
            let restored = self.store.restore(piece, *version, weights, &optimizer);
            restored.map_err(|error| ServeError::Content(error.into()))?;
        }
        if rest.is_empty() { Ok(()) } else { Err(short()) }
    }

    /// Does again what was written down.
    fn repeat(
        &self,
        state: &mut State,
        written: &Written,
        payload: &[f32],
    ) -> Result<(), ServeError> {
        let mut rest = payload;
        let mut changes = Vec::new();
        for piece in &written.pieces {
            let piece = *piece as usize;
            let length = self.checked.pieces().get(piece).map(|piece| piece.len());
            let split = length.and_then(|length| rest.split_at_checked(length));
            let wrong = || ServeError::Content("an entry that does not fit the pieces".into());
            let (gradient, others) = split.ok_or_else(wrong)?;
            rest = others;
            state.versions[piece] += 1;
            let version = state.versions[piece];
            changes.push(Change { piece, version, source: gradient.into(), by: None });
        }
        let repeated = state.core.repeat(&written.entry);
        repeated.map_err(|broken| ServeError::Content(broken.into()))?;
        // No worker is served yet, so that none counts as busy.
        self.apply(written.entry.factor, &changes, 0);
        Ok(())
    }
}

fn append(state: &mut State, written: &Written, changes: &[Change<'_>]) -> Result<(), ServeError> {
    if let Some(journal) = &mut state.journal {
        let header = text(&Line::Settled(written.clone()));
        let whole = "gradients are made whole where there is a journal";
        let payloads: Vec<&[f32]> =
            changes.iter().map(|change| change.source.values().expect(whole)).collect();
        journal.append(&header, &payloads)?;
    }
    if let Some(recorder) = &mut state.recorder {
        let updates: Vec<Update> = updates(written).collect();
        recorder.updates(&updates).map_err(ServeError::Records)?;
    }
    let Some(adaptive) = &mut state.adaptive else { return Ok(()) };
    for ((push, _), measured) in written.entry.pushes.iter().zip(&written.measured) {
        let moved = adaptive.observe(Observation {
            time: written.time,
            worker: push.worker,
            blocked: measured.held,
            wall: measured.wall,
            loss: measured.loss,
        });
        if let Some(moved) = moved {
            log::info!("{}", moved.reason);
            if let Some(recorder) = &mut state.recorder {
                recorder.moved(&moved).map_err(ServeError::Records)?;
            }
        }
    }
    Ok(())
}

/// What is told of an entry.
fn updates(written: &Written) -> impl Iterator<Item = Update> + '_ {
    let pushes = written.entry.pushes.iter().zip(&written.measured);
    pushes.map(|((push, age), measured)| Update {
        time: written.time,
        update: written.entry.update,
        push: *push,
        age: *age,
        measured: *measured,
    })
}

/// Seconds of the epoch.
fn wall_clock() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn text(line: &Line) -> Vec<u8> {
    postcard::to_stdvec(line).expect("a line can be encoded")
}

fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, ServeError> {
    postcard::from_bytes(text).map_err(|error| ServeError::Content(error.into()))
}
