//! The folder a run leaves behind.
//!
//! | file | what |
//! |---|---|
//! | `run.toml` | what was run: [`RunInfo`] |
//! | `steps.jsonl` | one [`StepRecord`] per line, appended while the run goes on |
//! | `advice.json` | which codec was chosen, and why: [`Advice`]; only if the run did choose |
//! | `membership.jsonl` | what happened to the workers of an elastic run: [`membership::Event`], one per line |
//! | `summary.json` | the run in one object: [`Summary`] |
//! | `trace.json` | the timeline of the last steps: [`crate::trace`] |
//! | `report.html` | the report: [`crate::report`] |
//!
//! Everything but the two that grow by lines is written to a temporary name first and then renamed, so that
//! a full disk never costs an earlier file. A line is one write, so that a run that is killed loses at most
//! the line it was writing; reading tolerates that one, and nothing else.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::advice::Advice;
use crate::breakdown::RunBreakdown;
use crate::log::{Log, last_line, read_lines};
use crate::membership::{self, Timeline};
use crate::record::{Outcome, RunInfo, Scaling, StepRecord, Summary};
use crate::report::Report;
use crate::trace;
use crate::units::counted;

pub(crate) const INFO: &str = "run.toml";
pub(crate) const STEPS: &str = "steps.jsonl";
const ADVICE: &str = "advice.json";
pub(crate) const SUMMARY: &str = "summary.json";
const TRACE: &str = "trace.json";
pub(crate) const REPORT: &str = "report.html";

/// Why the folder of a run could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// There is a run in there already. Choose another folder.
    #[error("{} already holds a run; choose another folder, or remove that one", .path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// There is no run in there. Choose another folder.
    #[error("{} is not the folder of a run: it {reason}; name a folder that a run wrote", .path.display())]
    NotARun {
        /// The folder.
        path: PathBuf,
        /// What it is instead, or lacks.
        reason: &'static str,
    },
    /// There is a run in there, but one of its files has gone. Restore it, or do without the run.
    #[error("{} is missing: it held {held}; restore the file, or run again", .path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What was in it.
        held: &'static str,
    },
    /// The system refused to write. Make room or choose another folder.
    #[error("cannot write {}: {source}; {}", .path.display(), remedy(.source))]
    Write {
        /// What could not be written.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refused to read.
    #[error("cannot read {}: {source}; check that it exists and that you may read it", .path.display())]
    Read {
        /// What could not be read.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what a run writes. Restore it, or do without.
    #[error("{}:{line}: {reason}; restore the file, or run again", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
}

/// The folder of a run that is going on.
#[derive(Debug)]
pub struct RunFolder {
    dir: PathBuf,
    info: RunInfo,
    steps: Log<StepRecord>,
}

/// A run read back from its folder.
#[derive(Clone, Debug)]
pub struct Run {
    /// What was run.
    pub info: RunInfo,
    /// Its steps.
    pub steps: Vec<StepRecord>,
    /// Which codec it chose, and why; absent if it had nothing to choose.
    pub advice: Option<Advice>,
    /// What it came to; absent if it did not finish.
    pub summary: Option<Summary>,
    /// What happened to its workers; absent if they could not come and go.
    pub timeline: Option<Timeline>,
    dir: PathBuf,
}

impl RunFolder {
    /// Makes the folder, with its parents, and writes `run.toml`. Refuses a folder with a run in it.
    pub fn create(dir: impl Into<PathBuf>, info: &RunInfo) -> Result<RunFolder, FolderError> {
        let dir = dir.into();
        fs::create_dir_all(&dir).map_err(|source| write_error(&dir, source))?;
        if dir.join(INFO).exists() || dir.join(STEPS).exists() {
            return Err(FolderError::Occupied { path: dir });
        }
        write_info(&dir, info)?;
        let steps = Log::create(dir.join(STEPS))?;
        Ok(RunFolder { dir, info: info.clone(), steps })
    }

    /// Goes on with a folder after so many steps of the run: records of later ones are dropped. Also returns
    /// the last step that is recorded; 0 if none is.
    pub fn reopen(dir: impl Into<PathBuf>, after: u64) -> Result<(RunFolder, u64), FolderError> {
        let dir = dir.into();
        let info = read_info(&dir)?;
        let mut last = 0;
        let steps = Log::reopen_keeping(dir.join(STEPS), |record: &StepRecord| {
            let is_kept = record.step <= after;
            last = if is_kept { record.step } else { last };
            is_kept
        })?;
        Ok((RunFolder { dir, info, steps }, last))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Appends a step. After an error the file ends with the last complete step, and the next one may
    /// be appended once there is room.
    pub fn append(&mut self, step: &StepRecord) -> Result<(), FolderError> {
        self.steps.append(step)
    }

    /// Writes down the choice of a codec, in place of an earlier one.
    pub fn advise(&mut self, advice: &Advice) -> Result<(), FolderError> {
        write_json(&self.dir.join(ADVICE), advice)
    }

    /// Sums up the run, and writes `summary.json`, `trace.json` and `report.html` from what was
    /// appended.
    pub fn finish(self, outcome: Outcome, scaling: Option<Scaling>) -> Result<Run, FolderError> {
        let (run, written) = self.finish_with(Vec::new(), outcome, scaling);
        written.map(|()| run)
    }

    /// Sums up a run whose last steps could not be appended: `unwritten`. Also returns whether its files
    /// could be written; the run is summed up in any case.
    pub fn finish_with(
        self,
        unwritten: Vec<StepRecord>,
        outcome: Outcome,
        scaling: Option<Scaling>,
    ) -> (Run, Result<(), FolderError>) {
        let (mut run, read) = match RunFolder::open(&self.dir) {
            Ok(run) => (run, Ok(())),
            Err(error) => (Run::of(self.info, self.dir), Err(error)),
        };
        run.steps.extend(unwritten);
        let breakdown = RunBreakdown::of(&run.info, &run.steps);
        run.summary = Some(Summary::new(&run.info, &breakdown, outcome, scaling));
        let written = read.and_then(|()| run.write());
        (run, written)
    }

    /// Reads a run, finished or not.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Run, FolderError> {
        let dir = dir.into();
        let info = read_info(&dir)?;
        let steps = read_steps(&dir.join(STEPS), &info)?;
        let advice = read_json(&dir.join(ADVICE), "advice for a codec")?;
        let summary = read_json(&dir.join(SUMMARY), "summary of a run")?;
        let timeline = Timeline::of(&membership::read(&dir)?);
        Ok(Run { info, steps, advice, summary, timeline, dir })
    }
}

impl Run {
    /// A run of which nothing is known but what was run.
    fn of(info: RunInfo, dir: PathBuf) -> Run {
        Run { info, steps: Vec::new(), advice: None, summary: None, timeline: None, dir }
    }

    /// Its report.
    pub fn report(&self) -> Report {
        let (summary, advice) = (self.summary.as_ref(), self.advice.as_ref());
        Report::new(&self.info, &self.steps, summary, advice).with_timeline(self.timeline.as_ref())
    }

    /// The page of its report.
    pub fn report_path(&self) -> PathBuf {
        self.dir.join(REPORT)
    }

    /// Writes all that can be computed: the summary if there is one, the trace and the report. For a
    /// run that was killed this makes up for what it could not write itself.
    pub fn write(&self) -> Result<(), FolderError> {
        if let Some(summary) = &self.summary {
            write_json(&self.dir.join(SUMMARY), summary)?;
        }
        replace(&self.dir.join(TRACE), |to| {
            trace::write(&self.info, &self.steps, trace::DEFAULT_STEPS, to)
        })?;
        self.write_report()
    }

    /// Writes the page of its report alone.
    pub fn write_report(&self) -> Result<(), FolderError> {
        let page = self.report().html();
        replace(&self.report_path(), |to| to.write_all(page.as_bytes()))
    }
}

/// What was run in a folder, and the last step that is recorded there, without reading all the others.
pub fn glance(dir: &Path) -> Result<(RunInfo, Option<StepRecord>), FolderError> {
    let info = read_info(dir)?;
    let last = last_line(&dir.join(STEPS), "record of a step")?;
    Ok((info, last))
}

pub(crate) fn write_info(dir: &Path, info: &RunInfo) -> Result<(), FolderError> {
    replace(&dir.join(INFO), |to| {
        let text = toml::to_string_pretty(info).map_err(io::Error::other)?;
        to.write_all(text.as_bytes())
    })
}

pub(crate) fn read_info(dir: &Path) -> Result<RunInfo, FolderError> {
    let path = dir.join(INFO);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(FolderError::NotARun { path: dir.into(), reason: "is a file" });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let reason = if dir.exists() { "has no run.toml" } else { "does not exist" };
            return Err(FolderError::NotARun { path: dir.into(), reason });
        }
        Err(source) => return Err(FolderError::Read { path, source }),
    };
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
            return Err(FolderError::Malformed { path, line, reason: NOT_TEXT.to_owned() });
        }
    };
    toml::from_str(&text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
        FolderError::Malformed { path, line, reason: one_line(error.message()) }
    })
}

fn read_steps(path: &Path, info: &RunInfo) -> Result<Vec<StepRecord>, FolderError> {
    if !path.exists() {
        return Err(FolderError::Missing { path: path.into(), held: "the records of its steps" });
    }
    let steps: Vec<StepRecord> = read_lines(path, "record of a step")?;
    for (number, step) in steps.iter().enumerate() {
        let previous = number.checked_sub(1).map(|previous| steps[previous].step);
        let reason = if step.ranks.len() != info.workers && !info.elastic {
            let ranks = counted(step.ranks.len(), "rank");
            format!("a step of {ranks} in a run of {}", info.workers)
        } else if let Some(previous) = previous.filter(|previous| *previous >= step.step) {
            format!("step {} after step {previous}", step.step)
        } else {
            continue;
        };
        return Err(FolderError::Malformed { path: path.into(), line: number + 1, reason });
    }
    Ok(steps)
}

/// What is wrong with a file of bytes.
const NOT_TEXT: &str = "it is not text; something else is in place of the file";

/// Whether a line is the beginning of an object whose writer was stopped. Anything else without an end
/// was never written by a run.
pub(crate) fn is_unfinished(line: &[u8]) -> bool {
    !line.ends_with(b"\n") && (line.is_empty() || line.starts_with(b"{"))
}

/// What is wrong with text that is not the `what` it should be.
pub(crate) fn not_a(text: &[u8], what: &str, error: &serde_json::Error) -> String {
    let is_text = match std::str::from_utf8(text) {
        Ok(text) => !text.contains('\0'),
        // A letter that was cut in the middle is text.
        Err(error) => error.error_len().is_none(),
    };
    if is_text { format!("not the {what}: {error}") } else { NOT_TEXT.to_owned() }
}

/// Reads what may be absent. `what` says what it is, for errors.
pub(crate) fn read_json<T: DeserializeOwned>(
    path: &Path,
    what: &str,
) -> Result<Option<T>, FolderError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(FolderError::Read { path: path.into(), source }),
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| FolderError::Malformed {
        path: path.into(),
        line: error.line(),
        reason: not_a(&text, what, &error),
    })
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FolderError> {
    replace(path, |to| {
        serde_json::to_writer_pretty(&mut *to, value)?;
        to.write_all(b"\n")
    })
}

/// Writes a file under a temporary name and gives it its name when it is complete. The temporary name is
/// this process's own: workers of one run may write a file at the same time, and one of them stays.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), FolderError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.partial", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = || -> io::Result<()> {
        let mut to = BufWriter::new(File::create(&temporary)?);
        write(&mut to)?;
        to.into_inner()?.sync_all()?;
        fs::rename(&temporary, path)
    };
    written().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        write_error(path, source)
    })
}

pub(crate) fn write_error(path: &Path, source: io::Error) -> FolderError {
    FolderError::Write { path: path.into(), source }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space, or choose a folder on another disk"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "a file is where a folder should be; choose another folder"
        }
        _ => "choose a folder that you may write to",
    }
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
