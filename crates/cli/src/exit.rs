//! What the program exits with.
//!
//! | code | when |
//! |---|---|
//! | 0 | all went well |
//! | 1 | what was asked for failed |
//! | 2 | the call is wrong: flags, variables, a file that it names. Nothing was started, and the same call would fail again |
//! | 126, 127 | `run`: the program cannot be started, or does not exist |
//! | 128 + n | signal n ended it or one of its ranks; 141 if the reader of its output has gone |
//! | any other | `run`: that of the rank that failed |

use std::io;
use std::process::ExitCode;

use unisono::cluster::checkpoint::CheckpointError;
use unisono::cluster::launch::LaunchError;
use unisono::insight::folder::FolderError;

use crate::output;

/// Returns an error of a wrong call unless a condition holds.
macro_rules! demand {
    ($condition:expr, $($words:tt)*) => {
        if !$condition {
            refuse!($($words)*);
        }
    };
}

/// Returns an error of a wrong call.
macro_rules! refuse {
    ($($words:tt)*) => { return Err($crate::exit::WrongCall::new(format!($($words)*)).into()) };
}

/// The exit code of a wrong call, clap's as well.
pub const WRONG_CALL: u8 = 2;

/// An error that the user has to mend in the call, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{line}")]
pub struct WrongCall {
    line: String,
    #[source]
    cause: Option<anyhow::Error>,
}

impl WrongCall {
    pub fn new(line: String) -> WrongCall {
        WrongCall { line, cause: None }
    }
}

/// Says of what failed that the call was wrong.
pub trait Wrong<T> {
    /// Unless it is known to be a matter of circumstances.
    fn wrong_call(self) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> Wrong<T> for Result<T, E> {
    fn wrong_call(self) -> anyhow::Result<T> {
        self.map_err(|error| {
            let error = error.into();
            match is_circumstance(&error) {
                true => error,
                false => WrongCall { line: crate::one_line(&error), cause: Some(error) }.into(),
            }
        })
    }
}

/// Whether the same call, unchanged, may do well another time.
fn is_circumstance(error: &anyhow::Error) -> bool {
    let is_full = |error: &io::Error| {
        matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    };
    error.chain().any(|cause| {
        if let Some(FolderError::Write { source, .. }) = cause.downcast_ref() {
            return is_full(source);
        }
        use CheckpointError::*;
        matches!(
            cause.downcast_ref(),
            Some(InUse { .. } | Full { .. } | System { .. } | Damaged { .. } | NoneGood { .. })
        )
    })
}

/// Tells people of an error, unless it is that they have gone; returns what to exit with.
pub fn with(error: &anyhow::Error) -> ExitCode {
    if output::is_closed(error) {
        return ExitCode::from(output::CLOSED);
    }
    say!("unisono: {}", crate::one_line(error));
    ExitCode::from(code(error))
}

/// The exit code for an error.
pub fn code(error: &anyhow::Error) -> u8 {
    let is_wrong_call = error.chain().any(|cause| {
        cause.is::<WrongCall>()
            || matches!(cause.downcast_ref(), Some(LaunchError::Usage(_)))
            || matches!(
                cause.downcast_ref(),
                Some(FolderError::Occupied { .. } | FolderError::NotARun { .. })
            )
    });
    if is_wrong_call { WRONG_CALL } else { 1 }
}
