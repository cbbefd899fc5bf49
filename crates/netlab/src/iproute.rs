//! The programs of iproute2.

use std::env;
use std::io;
use std::process::{Command, Stdio};

use crate::LabError;

/// Runs one `ip` or `tc` command line and returns what it printed.
///
/// The line is split at spaces: every word in it is a literal, a number, or a name made here.
pub(crate) fn iproute(line: &str) -> Result<String, LabError> {
    let failed = |reason: String| LabError::Tool { command: line.to_owned(), reason };

    let mut words = line.split_ascii_whitespace();
    let program = words.next().expect("a command line begins with its program");
    let output = Command::new(program)
        .args(words)
        .env("PATH", search_path())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => failed(format!("no program `{program}`, install iproute2")),
            _ => failed(error.to_string()),
        })?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(failed(format!("{} ({})", stderr.trim().replace('\n', "; "), output.status)))
    }
}

/// `PATH`, and where distributions keep `tc` out of the `PATH` of ordinary users.
fn search_path() -> String {
    let path = env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command_and_the_reason() {
        let Err(LabError::Tool { command, reason }) = iproute("unisono-no-such-program link")
        else {
            panic!("a program that does not exist cannot succeed");
        };
        assert_eq!(command, "unisono-no-such-program link");
        assert!(reason.contains("install iproute2"), "{reason}");
    }

    #[test]
    fn an_exit_status_is_a_failure() {
        let result = iproute("sh -c exit");
        assert!(result.is_ok(), "{result:?}");
        let result = iproute("false");
        assert!(matches!(result, Err(LabError::Tool { .. })), "{result:?}");
    }
}
