use std::fmt;

/// Why a call of [`Etcd`](super::Etcd) failed. A write that failed may have been done, or may still be
/// done, unless `maybe_written` denies it: read the key to find out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdError {
    /// No node did what was asked in the time given. Try again, or see to etcd and the network.
    #[error(
        "etcd did not answer in time: {}{}; check that etcd runs there, that most of its nodes are \
         up, and that this machine can reach them",
        Listed(attempts),
        if *maybe_written { "; the write may have been done all the same" } else { "" }
    )]
    Unreachable {
        /// What the last attempt at each endpoint ran into. An endpoint that was not tried in the
        /// time given is missing.
        attempts: Vec<Attempted>,
        /// Whether a write may have been done, or may still be done, although no answer came.
        maybe_written: bool,
    },
    /// The caller set its abort flag.
    #[error("the call to etcd was aborted")]
    Aborted {
        /// Whether a write may have been done, or may still be done.
        maybe_written: bool,
    },
    /// etcd, or TLS, refuses this client: change the settings, or the user's permissions in etcd.
    #[error("etcd at {endpoint} refused: {reason}")]
    Refused {
        /// The URL.
        endpoint: String,
        /// Why, and what to change.
        reason: String,
    },
    /// What answered is not etcd, or not as etcd answers: correct the URL.
    #[error("{endpoint} did not answer as etcd does: {reason}; is that a client URL of etcd?")]
    Malformed {
        /// The URL.
        endpoint: String,
        /// What was wrong with the answer.
        reason: String,
    },
    /// An etcd that loses data (3.5.0 to 3.5.2), or that this client does not know: install another.
    #[error("{endpoint} is etcd {version}, {reason}; run 3.4, or 3.5.3 or later")]
    Version {
        /// The URL.
        endpoint: String,
        /// Its version.
        version: String,
        /// Why that will not do.
        reason: &'static str,
    },
    /// A setting cannot be used as it is.
    #[error("{variable}: {reason}")]
    BadSetting {
        /// The variable that it is read from, also where it was set otherwise.
        variable: &'static str,
        /// What to change.
        reason: String,
    },
}

/// What an attempt at one endpoint ran into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempted {
    /// The URL.
    pub endpoint: String,
    /// Why there was no answer, or not a useful one.
    pub reason: String,
}

struct Listed<'a>(&'a [Attempted]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("there was no time for an attempt");
        }
        for (number, Attempted { endpoint, reason }) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{endpoint} ({reason})")?;
        }
        Ok(())
    }
}

impl EtcdError {
    /// The error of a call that writes nothing, whatever became of its requests.
    pub(super) fn of_a_read(mut self) -> EtcdError {
        if let EtcdError::Unreachable { maybe_written, .. } | EtcdError::Aborted { maybe_written } =
            &mut self
        {
            *maybe_written = false;
        }
        self
    }
}
