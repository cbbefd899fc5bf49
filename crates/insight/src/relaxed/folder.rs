//! The folder a relaxed run leaves behind.
//!
//! | file | what |
//! |---|---|
//! | `run.toml` | what was run: [`RunInfo`] |
//! | `updates-K.jsonl` | one [`UpdateRecord`] per line: of server K, or without servers of worker K |
//! | `moves.jsonl` | one [`Move`] of the bound per line; only for `ssp:auto` |
//! | `diverged.json` | [`Diverged`]; only where a loss was no number any more |
//! | `summary.json` | the run in one object: [`RelaxedSummary`] |
//! | `report.html` | the report: [`RelaxedReport`] |
//!
//! Several processes write to it. The one that began the run makes it and finishes it; each server
//! server has an [`UpdateLog`] of its own. Lines are written as soon as they are appended, so that a
//! process that is killed loses at most the one it was writing; reading tolerates that one, and
//! nothing else.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{Diverged, RelaxedRun, RelaxedSummary};
use crate::folder::{
    FolderError, INFO, REPORT, STEPS, SUMMARY, read_info, read_json, replace, write_error,
    write_info, write_json,
};
pub use crate::log::Log;
use crate::log::read_lines;
use crate::record::{Outcome, RunInfo};
use crate::report::RelaxedReport;
use crate::updates::{Move, UpdateRecord};

const MOVES: &str = "moves.jsonl";
const DIVERGED: &str = "diverged.json";

/// Files of updates that are read. No run has more servers, and a stray name must not cost memory.
const MOST_FILES: usize = 4096;

/// The folder of a relaxed run that is going on.
#[derive(Clone, Debug)]
pub struct RelaxedFolder {
    dir: PathBuf,
}

/// A relaxed run read back from its folder.
#[derive(Clone, Debug)]
pub struct SavedRun {
    /// What was recorded, analysed.
    pub run: RelaxedRun,
    /// What it came to; absent if it did not finish.
    pub summary: Option<RelaxedSummary>,
    dir: PathBuf,
}

/// The updates of a server, or of a worker without one: `updates-K.jsonl`.
pub type UpdateLog = Log<UpdateRecord>;

/// The moves of the bound: `moves.jsonl`.
pub type MoveLog = Log<Move>;

impl RelaxedFolder {
    /// Makes the folder, with its parents, and writes `run.toml`. Refuses a folder with a run in it.
    pub fn create(dir: impl Into<PathBuf>, info: &RunInfo) -> Result<RelaxedFolder, FolderError> {
        let dir = dir.into();
        fs::create_dir_all(&dir).map_err(|source| write_error(&dir, source))?;
        if dir.join(INFO).exists() || dir.join(STEPS).exists() {
            return Err(FolderError::Occupied { path: dir });
        }
        write_info(&dir, &RunInfo { relaxed: true, ..info.clone() })?;
        Ok(RelaxedFolder { dir })
    }

    /// One that was made before.
    pub fn at(dir: impl Into<PathBuf>) -> RelaxedFolder {
        RelaxedFolder { dir: dir.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The updates of server `k`, or without servers of worker `k`.
    pub fn updates(dir: &Path, k: usize) -> PathBuf {
        dir.join(format!("updates-{k}.jsonl"))
    }

    /// The moves of the bound.
    pub fn moves(dir: &Path) -> PathBuf {
        dir.join(MOVES)
    }

    /// Leaves word of a loss that was no number any more, for the report. Of several, one stays.
    pub fn diverge(dir: &Path, diverged: &Diverged) -> Result<(), FolderError> {
        write_json(&dir.join(DIVERGED), diverged)
    }

    /// Whether a folder is one of a relaxed run, and not one of common steps.
    pub fn is_relaxed(dir: &Path) -> bool {
        !dir.join(STEPS).exists()
            && read_info(dir).is_ok_and(|info| {
                // Earlier versions did not write it down.
                info.relaxed || files_of_updates(dir).is_ok_and(|files| files > 0)
            })
    }

    /// Sums up the run, and writes `summary.json` and `report.html` from what was logged. Where
    /// workers average by themselves, `exchanges` says how often two did.
    pub fn finish(self, outcome: Outcome, exchanges: Option<u64>) -> Result<SavedRun, FolderError> {
        let mut saved = RelaxedFolder::open(&self.dir)?;
        saved.summary = Some(RelaxedSummary::new(&saved.run, outcome, exchanges));
        saved.write()?;
        Ok(saved)
    }

    /// Reads a run, finished or not.
    pub fn open(dir: impl Into<PathBuf>) -> Result<SavedRun, FolderError> {
        let dir = dir.into();
        let info = read_info(&dir)?;
        let mut logs = Vec::new();
        for file in 0..files_of_updates(&dir)? {
            logs.push(read_lines(&RelaxedFolder::updates(&dir, file), "record of an update")?);
        }
        let moves = read_lines(&RelaxedFolder::moves(&dir), "move of the bound")?;
        let summary = read_json(&dir.join(SUMMARY), "summary of a relaxed run")?;
        let mut run = RelaxedRun::of(info, logs, moves);
        run.diverged = read_json(&dir.join(DIVERGED), "account of a loss that is no number")?;
        Ok(SavedRun { run, summary, dir })
    }
}

impl SavedRun {
    /// Its report.
    pub fn report(&self) -> RelaxedReport<'_> {
        RelaxedReport::new(&self.run, self.summary.as_ref())
    }

    /// The page of its report.
    pub fn report_path(&self) -> PathBuf {
        self.dir.join(REPORT)
    }

    /// Writes all that can be computed: the summary if there is one, and the report. For a run that
    /// was killed this makes up for what it could not write itself.
    pub fn write(&self) -> Result<(), FolderError> {
        if let Some(summary) = &self.summary {
            write_json(&self.dir.join(SUMMARY), summary)?;
        }
        let page = self.report().html();
        replace(&self.report_path(), |to| to.write_all(page.as_bytes()))
    }
}

/// One more than the largest K for which there is an `updates-K.jsonl`.
fn files_of_updates(dir: &Path) -> Result<usize, FolderError> {
    let read_error = |source| FolderError::Read { path: dir.into(), source };
    let mut files = 0;
    for entry in fs::read_dir(dir).map_err(read_error)? {
        let name = entry.map_err(read_error)?.file_name();
        let number = name.to_str().and_then(|name| {
            name.strip_prefix("updates-")?.strip_suffix(".jsonl")?.parse::<usize>().ok()
        });
        files = files.max(number.filter(|number| *number < MOST_FILES).map_or(0, |k| k + 1));
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
