//! What a shard writes down, and how it goes on from that.
//!
//! The journal holds every entry with the gradients that were applied, after averaging, decoding and
//! correcting, so that to repeat it is to apply them again. The records of the run are for people; one
//! that a crash left out is made up for from the journal.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use unisono_insight::folder::FolderError;
use unisono_insight::relaxed::folder::{Log, MoveLog, RelaxedFolder, UpdateLog};
use unisono_insight::updates::{Move, UpdateRecord};

use super::plan::{Gradient, Plan};
use super::{Job, JobError, State, Unserved};
use crate::bound::{AdaptiveBound, Observation};
use crate::server::core::{Core, Entry, Saved};
use crate::server::journal::{self, Journal};
use crate::server::lives::Lives;
use crate::server::wire::{Measured, Setup};
use crate::spec::Level;

/// Where a shard writes.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// The number of the shard.
    pub number: usize,
    /// The folder of its journal, without which a crash loses everything.
    pub journal: Option<PathBuf>,
    /// Whether updates wait until they are on the disk, to survive a crash of the machine.
    pub sync: bool,
    /// The folder of the run, where it records every push.
    pub run: Option<PathBuf>,
    /// Bytes of the journal after which a snapshot is taken; by default 8 times those of the weights
    /// and at least 64 MiB. More: a restart takes longer. Fewer: more is written.
    pub snapshot_after: Option<u64>,
}

/// What a record of the journal is.
#[derive(Serialize, Deserialize)]
enum Line {
    /// Something was settled; its gradients follow.
    Settled(Written),
    /// A worker was given a life.
    Life { worker: u32, life: u64 },
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

impl Job {
    /// A run that begins, with these weights of every piece. Workers may have been given lives before.
    pub fn new(
        setup: Setup,
        weights: Vec<Vec<f32>>,
        lives: Lives,
        files: &Files,
        journal: Option<Journal>,
    ) -> Result<Job, JobError> {
        let plan = Plan::new(setup)?;
        let lengths = weights.iter().map(Vec::len);
        if !lengths.eq(plan.pieces().iter().map(|piece| piece.len())) {
            return Err(JobError::Setup("the weights do not fit the pieces".into()));
        }
        // Before the snapshot, which would make these the records of this run.
        expect_no_records(files)?;
        let job = Job::with(plan, weights, files, wall_clock());
        let mut state = job.state.lock().expect("nobody else has it");
        state.lives = lives;
        state.journal = journal;
        // The snapshot first: with it the run has begun, and a restart goes on with the records, where
        // one without it would find records of nothing.
        job.snapshot(&mut state)?;
        if let Some(run) = &files.run {
            state.updates = Some(UpdateLog::create(RelaxedFolder::updates(run, files.number))?);
            if job.writes_moves(files) {
                state.moves = Some(MoveLog::create(RelaxedFolder::moves(run))?);
            }
        }
        drop(state);
        Ok(job)
    }

    /// Goes on with what the journal holds. `None` if that is nothing yet; then the journal is for a
    /// run that begins.
    pub fn recover(files: &Files) -> Result<(Option<Job>, Option<Journal>), JobError> {
        let Some(folder) = &files.journal else { return Ok((None, None)) };
        let options = journal::Options { sync: files.sync, ..journal::Options::default() };
        let (journal, recovered) = Journal::open(folder, options)?;
        let Some(snapshot) = recovered.snapshot else { return Ok((None, Some(journal))) };
        let head: Head = parse(&snapshot.header)?;
        let plan = Plan::new(head.setup)?;
        let empty = plan.pieces().iter().map(|piece| vec![0.0; piece.len()]).collect();
        let mut job = Job::with(plan, empty, files, head.began);
        let mut state = job.state.lock().expect("nobody else has it");
        state.core = Core::restore(job.plan.rules(), &head.saved);
        state.lives = head.lives;
        state.versions = head.versions;
        job.restore_pieces(&state.versions, &snapshot.payload)?;
        let mut written = Vec::new();
        for record in recovered.entries {
            let record = record?;
            match parse(&record.header)? {
                Line::Settled(entry) => {
                    job.repeat(&mut state, &entry, &record.payload)?;
                    written.push(entry);
                }
                Line::Life { worker, life } => state.lives.repeat(worker, life),
            }
        }
        drop(state);
        // The clock of the machine may have been set back.
        let last = written.last().map_or(head.seconds, |last| last.time);
        job.awake_at = last.max(wall_clock() - head.began);
        let mut state = job.state.lock().expect("nobody else has it");
        state.journal = Some(journal);
        if let Some(run) = &files.run {
            state.updates = Some(reopen_updates(run, files.number, &state.core, &written)?);
            if job.writes_moves(files) {
                state.moves = Some(job.reopen_moves(run, &state)?);
            }
        }
        // Where nothing is waited for, nobody's place need be kept.
        let bounded = job.plan.level.bound().is_some();
        state.gathers_until = bounded.then(|| job.now() + job.return_time());
        drop(state);
        Ok((Some(job), None))
    }

    fn writes_moves(&self, files: &Files) -> bool {
        files.number == 0 && self.plan.level == Level::SspAuto
    }

    /// Writes an entry into the journal, then into the records.
    pub(super) fn write_down(
        &self,
        state: &mut State,
        entry: Entry,
        measured: Vec<Measured>,
        gradients: &[Gradient<'_>],
    ) -> Result<(), Unserved> {
        let pieces = gradients.iter().map(|(piece, _)| *piece as u32).collect();
        let written = Written { entry, measured, time: self.seconds(), pieces };
        let appended = append(state, &written, gradients);
        self.or_fail(state, appended)
    }

    /// Writes into the journal that a life was given out, and waits for the disk: even the crash of a
    /// machine must not have it given out again.
    pub(super) fn write_down_life(
        &self,
        state: &mut State,
        worker: u32,
        life: u64,
    ) -> Result<(), Unserved> {
        let written = match &mut state.journal {
            Some(journal) => journal.append_synced(&text(&Line::Life { worker, life })),
            None => Ok(()),
        };
        self.or_fail(state, written.map_err(JobError::Journal))
    }

    /// Takes a snapshot if the journal is long. Not while this thread has anything left to apply.
    pub(super) fn snapshot_if_due(&self, state: &mut State) -> Result<(), Unserved> {
        let long = state.journal.as_ref().is_some_and(|j| j.len_bytes() > self.snapshot_after);
        let taken = if long { self.snapshot(state) } else { Ok(()) };
        self.or_fail(state, taken)
    }

    /// After an error nobody is told anything any more.
    fn or_fail(&self, state: &mut State, result: Result<(), JobError>) -> Result<(), Unserved> {
        result.map_err(|error| {
            state.failed = true;
            self.changed.notify_all();
            Unserved::Failed(error)
        })
    }

    /// Writes down everything, once all that was settled is applied.
    fn snapshot(&self, state: &mut State) -> Result<(), JobError> {
        let Some(journal) = &mut state.journal else { return Ok(()) };
        let head = Head {
            setup: self.plan.setup.clone(),
            saved: state.core.save(),
            lives: state.lives.clone(),
            versions: state.versions.clone(),
            began: self.began,
            seconds: self.seconds(),
        };
        let header = postcard::to_stdvec(&head).expect("a state has a text");
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
    fn restore_pieces(&self, versions: &[u64], payload: &[f32]) -> Result<(), JobError> {
        let short = || JobError::Content("a snapshot of another length".into());
        if versions.len() != self.plan.pieces().len() {
            return Err(short());
        }
        let mut rest = payload;
        for (piece, version) in versions.iter().enumerate() {
            let length = self.plan.pieces()[piece].len();
            let vectors = 1 + self.store.optimizer_vectors(piece);
            let (own, others) = rest.split_at_checked(vectors * length).ok_or_else(short)?;
            rest = others;
            let (weights, optimizer) = own.split_at(length);
            let optimizer: Vec<&[f32]> = match length {
                0 => vec![&[]; vectors - 1],
                _ => optimizer.chunks(length).collect(),
            };
            let restored = self.store.restore(piece, *version, weights, &optimizer);
            restored.map_err(|error| JobError::Content(error.to_string()))?;
        }
        if rest.is_empty() { Ok(()) } else { Err(short()) }
    }

    /// Does again what was written down.
    fn repeat(
        &self,
        state: &mut State,
        written: &Written,
        payload: &[f32],
    ) -> Result<(), JobError> {
        let mut rest = payload;
        let mut gradients: Vec<Gradient<'_>> = Vec::new();
        let mut versions = Vec::new();
        for piece in &written.pieces {
            let piece = *piece as usize;
            let length = self.plan.pieces().get(piece).map(|piece| piece.len());
            let split = length.and_then(|length| rest.split_at_checked(length));
            let wrong = || JobError::Content("an entry that does not fit the pieces".into());
            let (gradient, others) = split.ok_or_else(wrong)?;
            rest = others;
            state.versions[piece] += 1;
            versions.push(state.versions[piece]);
            gradients.push((piece, gradient.into()));
        }
        let repeated = state.core.repeat(&written.entry);
        repeated.map_err(|broken| JobError::Content(format!("{broken}: restore the folder")))?;
        self.apply(written.entry.factor, &versions, &gradients);
        Ok(())
    }

    /// The moves of the bound, which begins anew with the shard.
    fn reopen_moves(&self, run: &Path, state: &State) -> Result<MoveLog, JobError> {
        let mut last = None;
        let mut moves: MoveLog =
            Log::reopen_keeping(RelaxedFolder::moves(run), |change: &Move| {
                last = Some(change.to);
                true
            })?;
        let bound = state.adaptive.as_ref().map(AdaptiveBound::bound);
        if let (Some(from), Some(to)) = (last, bound)
            && from != to
        {
            let reason = "the server was started again, and begins anew".to_owned();
            moves.append(&Move { time: self.seconds(), from, to, reason })?;
        }
        Ok(moves)
    }
}

fn append(
    state: &mut State,
    written: &Written,
    gradients: &[Gradient<'_>],
) -> Result<(), JobError> {
    if let Some(journal) = &mut state.journal {
        let header = text(&Line::Settled(written.clone()));
        let payloads: Vec<&[f32]> = gradients.iter().map(|(_, gradient)| &**gradient).collect();
        journal.append(&header, &payloads)?;
    }
    let records: Vec<UpdateRecord> = records(written).collect();
    if let Some(updates) = &mut state.updates {
        updates.append_all(&records)?;
    }
    for (record, measured) in records.iter().zip(&written.measured) {
        let observation = Observation {
            time: record.time,
            worker: record.worker,
            blocked: measured.held,
            wall: measured.wall,
            loss: record.loss,
        };
        let moved = state.adaptive.as_mut().and_then(|bound| bound.observe(observation));
        if let Some(moved) = moved {
            log::info!("{}", moved.reason);
            if let Some(moves) = &mut state.moves {
                moves.append(&moved)?;
            }
        }
    }
    Ok(())
}

/// The records of the run as far as the journal bears them out, and those of entries that were written
/// down just before the crash.
fn reopen_updates(
    run: &Path,
    number: usize,
    core: &Core,
    written: &[Written],
) -> Result<UpdateLog, JobError> {
    let key = |record: &UpdateRecord| (record.worker, record.life, record.push);
    let mut there = BTreeSet::new();
    let mut updates: UpdateLog =
        Log::reopen_keeping(RelaxedFolder::updates(run, number), |record: &UpdateRecord| {
            record.update <= core.updates() && there.insert(key(record))
        })?;
    let lost = written.iter().flat_map(records).filter(|record| !there.contains(&key(record)));
    updates.append_all(&lost.collect::<Vec<_>>())?;
    Ok(updates)
}

/// What an entry is, for people: a line for every push.
fn records(written: &Written) -> impl Iterator<Item = UpdateRecord> + '_ {
    let pushes = written.entry.pushes.iter().zip(&written.measured);
    pushes.map(|((push, age), measured)| UpdateRecord {
        time: written.time,
        update: written.entry.update,
        worker: push.worker,
        life: push.life,
        push: push.number,
        clock: push.clock,
        lead: age.lead,
        delay: age.delay,
        present: age.present,
        loss: measured.loss,
        samples: measured.samples,
        compute: measured.compute,
        blocked: measured.blocked,
        bytes: measured.bytes,
    })
}

/// Fails if a run is recorded where this one would be.
fn expect_no_records(files: &Files) -> Result<(), JobError> {
    let Some(run) = &files.run else { return Ok(()) };
    match RelaxedFolder::updates(run, files.number).exists() {
        true => Err(FolderError::Occupied { path: run.clone() }.into()),
        false => Ok(()),
    }
}

/// Seconds of the epoch.
fn wall_clock() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn text(line: &Line) -> Vec<u8> {
    postcard::to_stdvec(line).expect("a line has a text")
}

fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, JobError> {
    postcard::from_bytes(text).map_err(|error| JobError::Content(error.to_string()))
}
