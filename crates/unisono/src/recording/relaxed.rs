//! What a relaxed run tells, written into its folder.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::insight::RunInfo;
use crate::insight::folder::FolderError;
use crate::insight::relaxed::folder::{Log, MoveLog, RelaxedFolder, UpdateLog};
use crate::insight::updates::{self, UpdateRecord};
use crate::optimizer::OptimizerSpec;
use crate::relaxed::Cause;
use crate::relaxed::events::{Move, Recorder, Resumed, Update};
use crate::relaxed::spec::Level;
use crate::relaxed::staleness::StalenessPolicy;

/// Records what happens at one server: every push in `updates-K.jsonl`, and at the first
/// server every move of the bound in `moves.jsonl`.
#[derive(Debug)]
pub struct ServerRecorder {
    dir: PathBuf,
    number: usize,
    updates: Option<UpdateLog>,
    moves: Option<MoveLog>,
}

impl ServerRecorder {
    /// For the server of this number, in the folder of the run. Writes nothing before a run begins.
    pub fn new(dir: impl Into<PathBuf>, number: usize) -> ServerRecorder {
        ServerRecorder { dir: dir.into(), number, updates: None, moves: None }
    }

    /// The records of the run as far as the journal bears them out, and those of pushes that it holds
    /// and a crash left out.
    fn reopen_updates(&self, resumed: &Resumed<'_>) -> Result<UpdateLog, FolderError> {
        let key = |record: &UpdateRecord| (record.worker, record.life, record.push);
        let mut there = BTreeSet::new();
        let path = RelaxedFolder::updates(&self.dir, self.number);
        let mut updates: UpdateLog = Log::reopen_keeping(path, |record: &UpdateRecord| {
            record.update <= resumed.updates && there.insert(key(record))
        })?;
        let journaled = resumed.journaled.iter().map(record);
        updates.append_all(&journaled.filter(|r| !there.contains(&key(r))).collect::<Vec<_>>())?;
        Ok(updates)
    }

    /// The moves of the bound, which begins anew with the server.
    fn reopen_moves(&self, time: f64, bound: u64) -> Result<MoveLog, FolderError> {
        let mut last = bound;
        let path = RelaxedFolder::moves(&self.dir);
        let mut moves: MoveLog = Log::reopen_keeping(path, |change: &updates::Move| {
            last = change.to;
            true
        })?;
        if last != bound {
            let reason = "the server was started again, and begins anew".to_owned();
            moves.append(&updates::Move { time, from: last, to: bound, reason })?;
        }
        Ok(moves)
    }
}

impl Recorder for ServerRecorder {
    fn expect_none(&self) -> Result<(), Cause> {
        match RelaxedFolder::updates(&self.dir, self.number).exists() {
            true => Err(FolderError::Occupied { path: self.dir.clone() }.into()),
            false => Ok(()),
        }
    }

    fn begin(&mut self, bound: Option<u64>) -> Result<(), Cause> {
        self.updates = Some(UpdateLog::create(RelaxedFolder::updates(&self.dir, self.number))?);
        if self.number == 0 && bound.is_some() {
            self.moves = Some(MoveLog::create(RelaxedFolder::moves(&self.dir))?);
        }
        Ok(())
    }

    fn resume(&mut self, resumed: Resumed<'_>) -> Result<(), Cause> {
        self.updates = Some(self.reopen_updates(&resumed)?);
        if let Some(bound) = resumed.bound.filter(|_| self.number == 0) {
            self.moves = Some(self.reopen_moves(resumed.time, bound)?);
        }
        Ok(())
    }

    fn updates(&mut self, updates: &[Update]) -> Result<(), Cause> {
        let Some(log) = &mut self.updates else { return Ok(()) };
        Ok(log.append_all(&updates.iter().map(record).collect::<Vec<_>>())?)
    }

    fn moved(&mut self, change: &Move) -> Result<(), Cause> {
        let Some(log) = &mut self.moves else { return Ok(()) };
        let Move { time, from, to, reason } = change.clone();
        Ok(log.append(&updates::Move { time, from, to, reason })?)
    }
}

/// What is recorded of a push.
pub fn record(update: &Update) -> UpdateRecord {
    let Update { time, update, push, age, measured } = update;
    UpdateRecord {
        time: *time,
        update: *update,
        worker: push.worker,
        life: push.life.0,
        push: push.number,
        clock: push.clock.0,
        lead: age.lead,
        delay: age.delay,
        present: age.present,
        loss: measured.loss,
        samples: measured.samples,
        compute: measured.compute,
        blocked: measured.blocked,
        bytes: measured.bytes,
    }
}

/// What a level and its settings say about a run, for its report. The rest is up to the caller.
pub fn run_info(
    level: Level,
    optimizer: &OptimizerSpec,
    stale: StalenessPolicy,
    servers: &str,
    workers: usize,
    tcp: bool,
) -> RunInfo {
    let mut settings = toml::Table::new();
    settings.insert("optimizer".to_owned(), optimizer.to_string().into());
    settings.insert("stale".to_owned(), stale.to_string().into());
    if level.has_servers() {
        settings.insert("servers".to_owned(), servers.into());
    }
    let transport = match level {
        Level::Hogwild => "shared weights",
        Level::Gossip => "tcp",
        _ if tcp => "tcp",
        _ => "shm where possible",
    };
    RunInfo {
        strategy: level.to_string(),
        transport: transport.to_owned(),
        algorithm: if level.has_servers() { "server" } else { "none" }.to_owned(),
        workers,
        hosts: vec![String::new(); workers],
        settings,
        ..RunInfo::default()
    }
}
