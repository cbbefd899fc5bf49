//! The engine's errors as Python exceptions, which `unisono.errors` defines.
//!
//! An exception says in its text, and in fields for programs, which rank raised it (`rank`), in
//! which operation (`operation`), and which other rank is the cause (`peer`), where one is. That
//! of ranks that called different operations has both calls (`calls`), that of a timeout the ranks
//! that have not arrived (`missing`).

use std::fmt::Display;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};
use unisono_collective::{Call, Error, FormError, InvalidCall, Rank};
use unisono_sync::SyncError;

/// What a rank was asked to do.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    /// A collective call, by the engine's name.
    Collective(&'static str),
    /// A message to a rank.
    Send { to: Rank, tag: u32 },
    /// A message from a rank, or from any.
    Receive { from: Option<Rank>, tag: u32 },
}

impl Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Operation::Collective(name) => f.write_str(name),
            Operation::Send { to, tag } => write!(f, "send to rank {to} with tag {tag}"),
            Operation::Receive { from: Some(from), tag } => {
                write!(f, "receive from rank {from} with tag {tag}")
            }
            Operation::Receive { from: None, tag } => {
                write!(f, "receive from any rank with tag {tag}")
            }
        }
    }
}

/// Where an error shows: on which rank, in which operation.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    /// The rank.
    pub rank: Rank,
    /// What it was doing.
    pub operation: Operation,
}

impl Site {
    /// The exception for an operation that failed.
    pub fn failed(&self, py: Python<'_>, error: &Error) -> PyErr {
        self.failed_with(py, error, error)
    }

    /// The exception for a group that could not be made of another: that of the other's failure,
    /// where this is the cause, since the caller can do what is to be done after that.
    pub fn not_formed(&self, py: Python<'_>, error: &FormError) -> PyErr {
        match error {
            FormError::Parent(cause) => self.failed_with(py, cause, error),
            FormError::InvalidCall(_) => self.raise(py, "InvalidCall", None, error),
            FormError::Peer { peer: rank, .. } | FormError::Device { rank, .. } => {
                self.raise(py, "FormError", Some(*rank), error)
            }
            _ => self.raise(py, "FormError", None, error),
        }
    }

    fn failed_with(&self, py: Python<'_>, error: &Error, text: &dyn Display) -> PyErr {
        let (kind, peer) = match error {
            Error::PeerLost { peer, .. } => ("PeerLost", Some(*peer)),
            Error::Aborted { peer, .. } => ("Aborted", Some(*peer)),
            Error::EpochEnded { .. } => ("Aborted", None),
            Error::Mismatch { rank, call, peer, peer_call, .. } => {
                let calls = numbered(py, [(*rank, call), (*peer, peer_call)]);
                return self.raise_with(py, "Mismatch", self.other(*rank, *peer), text, calls);
            }
            Error::Deadlock { waits } => {
                let calls = numbered(py, waits.iter().map(|wait| (wait.rank, &wait.call)));
                return self.raise_with(py, "Mismatch", None, text, calls);
            }
            Error::LengthMismatch { from, to, .. } => ("Mismatch", self.other(*from, *to)),
            Error::TimedOut { missing, .. } => return self.timed_out(py, missing, text),
            Error::InvalidCall(InvalidCall::NoSuchRank { rank, .. }) => {
                ("InvalidCall", Some(Rank(*rank)))
            }
            Error::InvalidCall(_) => ("InvalidCall", None),
            _ => ("Error", None),
        };
        self.raise(py, kind, peer, text)
    }

    /// The exception for a message that the other rank did not take, or send, in time.
    pub fn unanswered(&self, py: Python<'_>, limit: Duration) -> PyErr {
        let missing = match self.operation {
            Operation::Send { to, .. } => vec![to],
            Operation::Receive { from, .. } => from.into_iter().collect(),
            Operation::Collective(_) => Vec::new(),
        };
        let text = format!(
            "did not end within its timeout of {limit:?}, and the group was ended; find out what \
             the other ranks do instead, or allow for more time"
        );
        self.timed_out(py, &missing, &text)
    }

    fn timed_out(&self, py: Python<'_>, missing: &[Rank], text: &dyn Display) -> PyErr {
        let peer = missing.first().copied();
        let missing = PyTuple::new(py, missing.iter().map(|rank| rank.0));
        self.raise_with(py, "TimedOut", peer, text, ("missing", missing))
    }

    /// Which of two ranks is not this one. The rank that noticed that they disagree told all ranks:
    /// this one may be either of the two, or neither.
    fn other(&self, one: Rank, another: Rank) -> Option<Rank> {
        Some(if another == self.rank { one } else { another })
    }

    /// The exception for arguments that make no sense.
    pub fn invalid(&self, py: Python<'_>, text: &str) -> PyErr {
        self.raise(py, "InvalidCall", None, &text)
    }

    /// The exception for a step that failed, where the ranks noticed more than the engine could.
    pub fn not_synchronized(&self, py: Python<'_>, error: &SyncError) -> PyErr {
        match error {
            SyncError::Group(error) => self.failed(py, error),
            SyncError::Form(error) => self.not_formed(py, error),
            SyncError::DifferentModels { rank, .. } => {
                self.raise(py, "InvalidCall", Some(*rank), &error)
            }
            SyncError::Shards(_) | SyncError::Rule(_) | SyncError::MissingState { .. } => {
                self.raise(py, "InvalidCall", None, &error)
            }
            _ => self.raise(py, "Error", None, &error),
        }
    }

    /// The exception for a group that this process cannot use (any more).
    pub fn unusable(&self, py: Python<'_>, text: &str) -> PyErr {
        self.raise(py, "Error", None, &text)
    }

    fn raise(&self, py: Python<'_>, kind: &str, peer: Option<Rank>, text: &dyn Display) -> PyErr {
        self.raise_with(py, kind, peer, text, ("peer", Ok(peer.map(|rank| rank.0))))
    }

    /// The exception, with one more field that only its class has.
    fn raise_with<'py>(
        &self,
        py: Python<'py>,
        kind: &str,
        peer: Option<Rank>,
        text: &dyn Display,
        (field, value): (&str, PyResult<impl IntoPyObject<'py>>),
    ) -> PyErr {
        let text = format!("rank {} in {}: {text}", self.rank, self.operation);
        let fields = || {
            let fields = [("rank", self.rank.0)].into_py_dict(py)?;
            fields.set_item("operation", self.operation.to_string())?;
            fields.set_item("peer", peer.map(|rank| rank.0))?;
            fields.set_item(field, value?)?;
            Ok(fields)
        };
        made(py, kind, text, fields())
    }
}

/// What ranks called, by rank: the number of the call and its text.
fn numbered<'py, 'a>(
    py: Python<'py>,
    calls: impl IntoIterator<Item = (Rank, &'a Call)>,
) -> (&'static str, PyResult<Bound<'py, PyDict>>) {
    let calls = calls.into_iter().map(|(rank, call)| (rank.0, (call.number(), call.to_string())));
    ("calls", calls.into_py_dict(py))
}

/// The exception for a group of all ranks that could not form.
pub fn not_formed(py: Python<'_>, error: &FormError) -> PyErr {
    let kind = match error {
        FormError::InvalidCall(_) => "InvalidCall",
        _ => "FormError",
    };
    made(py, kind, error.to_string(), Ok(PyDict::new(py)))
}

/// The exception for a rank that could not even begin to form a group.
pub fn not_begun(py: Python<'_>, text: String) -> PyErr {
    made(py, "FormError", text, Ok(PyDict::new(py)))
}

/// The exception for arguments that make no sense, outside of any group.
pub fn invalid(py: Python<'_>, text: String) -> PyErr {
    made(py, "InvalidCall", text, Ok(PyDict::new(py)))
}

/// The exception of a class of `unisono.errors`; where it cannot be made, why.
pub fn made(
    py: Python<'_>,
    kind: &str,
    text: String,
    fields: PyResult<Bound<'_, PyDict>>,
) -> PyErr {
    let make = || {
        let class = py.import("unisono.errors")?.getattr(kind)?;
        Ok(PyErr::from_value(class.call((text,), Some(&fields?))?))
    };
    make().unwrap_or_else(|error: PyErr| error)
}
