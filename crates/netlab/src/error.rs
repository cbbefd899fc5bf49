use std::error::Error;
use std::{fmt, io};

/// Why a lab could not be built, or did not do what it was told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// This machine or user cannot have such a lab: iproute2 is missing, creating namespaces is
    /// not allowed, or the kernel lacks a device or queue. Skip the test, or change the user.
    #[error("cannot build a network lab: {0}")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),

    /// The fault was not injected, or it was and nothing changed. A test that goes on after
    /// this tests nothing.
    #[error("{fault} of host {host} had no effect: {reason}")]
    NoEffect {
        /// What was to happen.
        fault: Fault,
        /// The host it was to happen to.
        host: usize,
        /// What was found instead.
        reason: String,
    },

    /// An iproute2 program failed in a lab that had been built.
    #[error("`{command}` failed: {reason}")]
    Tool {
        /// The command line.
        command: String,
        /// What it wrote to stderr, or why it did not start.
        reason: String,
    },

    /// The operating system refused something else.
    #[error("{attempt} on host {host}: {source}")]
    Os {
        /// What was attempted.
        attempt: &'static str,
        /// The host it concerned.
        host: usize,
        /// The answer.
        source: io::Error,
    },
}

/// What can be done to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Its link was to go down.
    Cut,
    /// Its link was to come up again.
    Heal,
    /// It was to be separated from other hosts.
    Separate,
    /// It was to reach all other hosts again.
    Reunite,
    /// Its processes were to die.
    Kill,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::Cut => "cut",
            Fault::Heal => "heal",
            Fault::Separate => "separation",
            Fault::Reunite => "reunion",
            Fault::Kill => "kill",
        })
    }
}
