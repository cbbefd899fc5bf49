//! How jobs and processes end.

use std::fmt;

use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGPIPE;

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// Every rank exited with code 0.
    Success,
    /// A rank failed, and the others were ended.
    Failed(Failure),
    /// A launcher was told to stop by a signal.
    Interrupted {
        /// The signal.
        signal: i32,
    },
    /// The launcher of a node disappeared.
    NodeLost {
        /// Its number.
        node: u32,
    },
    /// An elastic job had too few workers for too long.
    TooFewWorkers {
        /// How many there were.
        ready: u32,
        /// How many it needs.
        least: u32,
    },
    /// An elastic job lost workers before it completed a step, again and again.
    NoProgress {
        /// How often in a row.
        epochs: u32,
    },
    /// The record of a job of several machines was deleted, and another job has begun under its name.
    Superseded,
    /// A server failed, and all others were ended.
    ServerFailed(ServerFailure),
    /// What the ranks wrote could not be passed on.
    OutputLost {
        /// Whether its reader stopped reading, as `head` does: then nothing went wrong.
        closed: bool,
        /// What the system said.
        reason: String,
    },
}

/// The rank that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Which.
    pub rank: u32,
    /// The node it ran on.
    pub node: u32,
    /// How it ended.
    pub ending: Ending,
    /// The last lines it wrote to stderr.
    pub stderr: Vec<String>,
}

/// The server that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFailure {
    /// Which.
    pub server: u32,
    /// How it ended.
    pub ending: Ending,
    /// The last lines it wrote to stderr.
    pub stderr: Vec<String>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl Outcome {
    /// What the launcher exits with.
    pub fn exit_code(&self) -> u8 {
        match self {
            Outcome::Success => 0,
            Outcome::Failed(failure) => failure.ending.exit_code(),
            Outcome::ServerFailed(failure) => failure.ending.exit_code(),
            Outcome::Interrupted { signal } => Ending::Signal(*signal).exit_code(),
            Outcome::OutputLost { closed: true, .. } => Ending::Signal(SIGPIPE).exit_code(),
            Outcome::OutputLost { closed: false, .. }
            | Outcome::NodeLost { .. }
            | Outcome::TooFewWorkers { .. }
            | Outcome::NoProgress { .. }
            | Outcome::Superseded => 1,
        }
    }

    /// What the process that failed said last.
    pub(super) fn last_words(&self) -> &[String] {
        match self {
            Outcome::Failed(failure) => &failure.stderr,
            Outcome::ServerFailed(failure) => &failure.stderr,
            _ => &[],
        }
    }
}

impl Ending {
    /// The exit code a shell would give: 128 + n for signal n.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Ending::Code(code) => code,
            Ending::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }

    pub(super) fn is_success(self) -> bool {
        self == Ending::Code(0)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Code(code) => write!(f, "exited with code {code}"),
            Ending::Signal(signal) => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("unnamed");
                write!(f, "was killed by signal {signal} ({name})")
            }
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Success => f.write_str("all ranks ended well"),
            Outcome::Failed(Failure { rank, ending, .. }) => write!(f, "rank {rank} {ending}"),
            Outcome::ServerFailed(ServerFailure { server, ending, .. }) => {
                write!(f, "server {server} {ending}")
            }
            Outcome::Interrupted { signal } => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("a signal");
                write!(f, "stopped by {name}")
            }
            Outcome::TooFewWorkers { ready, least } => {
                write!(f, "waited too long for workers: {ready} ready, at least {least} needed")
            }
            Outcome::NoProgress { epochs } => {
                write!(f, "workers were lost {epochs} times in a row before a step was complete")
            }
            Outcome::Superseded => f.write_str(
                "the record of this job in etcd was deleted, and another job has begun under its name; give each \
                 job a name of its own",
            ),
            Outcome::NodeLost { node } => write!(f, "lost the launcher of node {node}"),
            Outcome::OutputLost { closed: true, .. } => {
                f.write_str("the reader of the output is gone")
            }
            Outcome::OutputLost { reason, .. } => {
                write!(f, "the output could not be written: {reason}")
            }
        }
    }
}
