//! What the program writes.
//!
//! Results go to stdout, everything else to stderr. A reader who has seen enough closes the pipe, as
//! `head` does; the program then ends without a word, as others do that SIGPIPE kills. It is not killed,
//! for it has ranks to end and files to finish; so a line that cannot be written is an error on the way
//! to `main`, which knows it by its type.

use std::ffi::OsString;
use std::fmt::Arguments;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use console::Term;

/// Writes a line of the result. Returns an [`OutputError`] if that fails.
macro_rules! result_line {
    ($($words:tt)*) => { $crate::output::line(format_args!($($words)*)) };
}

/// Says something to the user. What a closed stderr does not take is dropped.
macro_rules! say {
    ($($words:tt)*) => { $crate::output::note(format_args!($($words)*)) };
}

/// Says something that the user can do without. Not with `--quiet`.
macro_rules! remark {
    ($($words:tt)*) => {
        if !$crate::output::is_quiet() {
            $crate::output::note(format_args!($($words)*));
        }
    };
}

/// Whether only warnings, errors and results are wanted. One for the process, as its stderr is.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on, only warnings, errors and results are wanted.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// The exit code of a program whose reader has gone: a shell's for SIGPIPE.
pub const CLOSED: u8 = 128 + 13;

/// A line of the result could not be written.
#[derive(Debug, thiserror::Error)]
#[error("the output could not be written: {0}")]
pub struct OutputError(#[from] io::Error);

pub fn line(text: Arguments<'_>) -> Result<(), OutputError> {
    text_out(&format!("{text}\n"))
}

/// Writes some lines of the result, all in one piece.
pub fn text_out(text: &str) -> Result<(), OutputError> {
    bytes_out(text.as_bytes())
}

/// Writes a result that need not be text, all in one piece.
pub fn bytes_out(bytes: &[u8]) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

pub fn note(text: Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Whether an error is only that the reader of the results has gone.
pub fn is_closed(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<OutputError>());
    causes.any(|OutputError(cause)| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// By this variable the process that has the terminal tells those that write through it how wide it is.
const COLUMNS: &str = "UNISONO_COLUMNS";

/// The columns of the terminal that shows the results; `usize::MAX` where there is none, and nothing is
/// to be wrapped.
pub fn columns() -> usize {
    let of_terminal = || Term::stdout().size_checked().map(|(_, columns)| columns.into());
    let told = std::env::var(COLUMNS).ok().and_then(|columns| columns.parse().ok());
    told.or_else(of_terminal).unwrap_or(usize::MAX)
}

/// What tells workers that write through this process how wide its terminal is.
pub fn width_for_workers() -> Vec<(OsString, OsString)> {
    match columns() {
        usize::MAX => Vec::new(),
        columns => vec![(COLUMNS.into(), columns.to_string().into())],
    }
}
