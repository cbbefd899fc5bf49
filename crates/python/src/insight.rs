//! The report of a run, written from what Python measured, and when calls ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use serde_json::Error as JsonError;
use unisono_insight::folder::{FolderError, RunFolder};
use unisono_insight::{Outcome, RunInfo, StepRecord};

use crate::error::invalid;
use crate::work::Work;

/// When an operation ended. The engine's thread writes it down, without the interpreter's lock,
/// which a computing program may hold for long.
#[pyclass(frozen)]
pub struct Stamp {
    /// Nanoseconds of the Unix clock; 0 while it has not ended.
    ended: Arc<AtomicU64>,
}

#[pymethods]
impl Stamp {
    /// Notes when an operation ends, well or not.
    #[new]
    fn new(work: &Work) -> Stamp {
        let ended = Arc::new(AtomicU64::new(0));
        let stamp = Stamp { ended: ended.clone() };
        work.work.on_completion(move |_| {
            let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
            ended.store(now, Ordering::Relaxed);
        });
        stamp
    }

    /// When it ended, in nanoseconds of the Unix clock; None while it has not.
    fn ended(&self) -> Option<u64> {
        Some(self.ended.load(Ordering::Relaxed)).filter(|&instant| instant > 0)
    }
}

/// Makes the folder of a run that has ended. `info` is `run.toml` and `steps` are the lines of
/// `steps.jsonl`, both as JSON. The verdict in one sentence, and the path of the report's page.
#[pyfunction]
pub fn write_report(
    py: Python<'_>,
    dir: &str,
    info: &str,
    steps: Vec<String>,
) -> PyResult<(String, String)> {
    py.detach(|| write(dir, info, &steps)).map_err(|error| match error {
        ReportError::Folder(error @ (FolderError::Write { .. } | FolderError::Read { .. })) => {
            PyOSError::new_err(error.to_string())
        }
        ReportError::Folder(error) => invalid(py, error.to_string()),
        ReportError::Json(what, error) => {
            invalid(py, format!("{what} cannot be read: {error}; hand in what Insight defines"))
        }
    })
}

/// Why there is no report.
enum ReportError {
    Folder(FolderError),
    Json(&'static str, JsonError),
}

fn write(dir: &str, info: &str, steps: &[String]) -> Result<(String, String), ReportError> {
    let info: RunInfo =
        serde_json::from_str(info).map_err(|error| ReportError::Json("what was run", error))?;
    let mut folder = RunFolder::create(dir, &info).map_err(ReportError::Folder)?;
    for step in steps {
        let step: StepRecord =
            serde_json::from_str(step).map_err(|error| ReportError::Json("a step", error))?;
        folder.append(&step).map_err(ReportError::Folder)?;
    }
    let run = folder.finish(Outcome::default(), None).map_err(ReportError::Folder)?;
    Ok((run.report().verdict.headline.clone(), run.report_path().display().to_string()))
}
