//! Why a worker cannot go on, as Python exceptions.

use std::fmt::Display;

use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use unisono_relaxed::server::ServerError;

use crate::error::made;

/// What a worker was doing with its servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerOperation {
    /// To come in.
    Join,
    /// To push gradients, and to pull the weights after it.
    Step,
    /// To pull weights.
    Pull,
}

impl Display for ServerOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ServerOperation::Join => "joining the parameter server",
            ServerOperation::Step => "a step of the parameter server",
            ServerOperation::Pull => "a pull from the parameter server",
        })
    }
}

/// Where an error shows: at which worker, in which operation.
#[derive(Clone, Copy, Debug)]
pub struct ServerSite {
    /// The worker's rank.
    pub rank: u32,
    /// What it was doing.
    pub operation: ServerOperation,
}

impl ServerSite {
    /// The exception for what a server said, or did not say.
    pub fn failed(&self, py: Python<'_>, error: &ServerError) -> PyErr {
        let joins = self.operation == ServerOperation::Join;
        let (kind, advice) = match error {
            ServerError::Unreachable { .. } if joins => {
                ("FormError", "; start it, or correct its address in `servers` or UNISONO_SERVERS")
            }
            ServerError::Unreachable { .. } => ("PeerLost", "; start the job again"),
            ServerError::Handshake { .. } => {
                ("FormError", "; give servers and workers the same UNISONO_TOKEN")
            }
            ServerError::OtherRun { .. } => (
                "Mismatch",
                ", and give all workers the same model, optimizer, level, codec and steps",
            ),
            ServerError::Forgotten { .. } => ("PeerLost", ""),
            ServerError::NotBegun { .. } => ("FormError", ""),
            ServerError::Superseded { .. } => ("Aborted", "; end this process"),
            ServerError::Stopped => {
                return self.unusable(py, "a wait was interrupted, and the worker has left");
            }
            _ => ("Error", ""),
        };
        self.raise(py, kind, &format_args!("{error}{advice}"))
    }

    /// The exception for arguments that make no sense.
    pub fn invalid(&self, py: Python<'_>, text: &dyn Display) -> PyErr {
        self.raise(py, "InvalidCall", text)
    }

    /// The exception for a client that cannot be used (any more).
    pub fn unusable(&self, py: Python<'_>, why: &str) -> PyErr {
        self.raise(py, "Error", &format_args!("{why}; make another ParameterServer"))
    }

    fn raise(&self, py: Python<'_>, kind: &str, text: &dyn Display) -> PyErr {
        let text = format!("rank {} in {}: {text}", self.rank, self.operation);
        let fields = || {
            let fields = [("rank", self.rank)].into_py_dict(py)?;
            fields.set_item("operation", self.operation.to_string())?;
            Ok(fields)
        };
        made(py, kind, text, fields())
    }
}
