//! Who a worker is that need not meet the other ranks: what its launcher left in the environment.
//!
//! | variable | |
//! |---|---|
//! | `RANK`, `WORLD_SIZE` | this worker, and how many there are; else whatever the [launcher](Place) sets |
//! | `UNISONO_LIFE` | how often this worker was started before |
//! | `UNISONO_SERVERS` | where servers listen, `HOST:PORT,HOST:PORT`, in their order |
//! | `UNISONO_PEERS` | where the workers themselves listen, in their order |
//! | `UNISONO_LISTEN_FD` | the open file at which this process listens |
//! | `UNISONO_TOKEN` | what connections prove to know |

use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use socket2::Socket;
use unisono_net::Token;

use crate::place::{self, Place, PlaceError, Vars};

/// What a worker knows of itself and of those it works with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// This worker among all of them.
    pub rank: u32,
    /// How many workers there are.
    pub world: u32,
    /// How often this launcher has started it, from 1. Servers, which may outlast a launcher, count by
    /// themselves.
    pub starts: u64,
    /// Where servers listen, if a launcher or the user has named some.
    pub servers: Option<Vec<String>>,
    /// Where the workers listen, if a launcher has opened sockets for them.
    pub peers: Option<Vec<SocketAddr>>,
    /// The job's secret, if there is one.
    pub token: Option<Token>,
}

/// Why a worker does not know who it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The place of the process.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// A variable holds something else. Only a launcher should set it.
    #[error("{variable}={value} is not {meaning}; only a launcher should set it")]
    Invalid {
        /// Which.
        variable: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
        meaning: &'static str,
    },
    /// There is no token.
    #[error(
        "UNISONO_TOKEN is not set: give all servers and workers of a job the same 64 hexadecimal digits"
    )]
    NoToken,
}

impl Worker {
    /// This process.
    pub fn from_env() -> Result<Worker, WorkerError> {
        Worker::from_vars(&place::vars())
    }

    /// A process with these variables.
    pub fn from_vars(vars: &Vars) -> Result<Worker, WorkerError> {
        let text = |name: &str| vars.get(name).map(|text| text.trim()).filter(|t| !t.is_empty());
        let number = |name: &str| text(name).and_then(|text| text.parse::<u32>().ok());
        // Workers that were told where servers are need not find each other: these two suffice.
        let (rank, world) = match (number("RANK"), number("WORLD_SIZE")) {
            (Some(rank), Some(world)) if rank < world => (rank, world),
            _ => Place::from_vars(vars).map(|place| (place.rank, place.world))?,
        };
        let before = text("UNISONO_LIFE").and_then(|life| life.parse::<u64>().ok()).unwrap_or(0);
        let address = |text: &str| {
            text.parse().map_err(|_| WorkerError::Invalid {
                variable: "UNISONO_PEERS",
                value: text.to_owned(),
                meaning: "a list of addresses",
            })
        };
        let peers = text("UNISONO_PEERS").map(|peers| peers.split(',').map(address).collect());
        let split =
            |servers: &str| servers.split(',').map(|server| server.trim().to_owned()).collect();
        Ok(Worker {
            rank,
            world,
            starts: before.saturating_add(1),
            servers: text("UNISONO_SERVERS").map(split),
            peers: peers.transpose()?,
            token: place::token_of(vars)?,
        })
    }

    /// The job's secret.
    pub fn token(&self) -> Result<Token, WorkerError> {
        self.token.clone().ok_or(WorkerError::NoToken)
    }
}

/// The socket that a launcher has opened for this process, if it has. It can be taken once.
pub fn inherited_listener() -> Result<Option<Socket>, WorkerError> {
    let variable = "UNISONO_LISTEN_FD";
    let Ok(value) = std::env::var(variable) else { return Ok(None) };
    let meaning = "an open file that listens";
    let invalid = || WorkerError::Invalid { variable, value: value.clone(), meaning };
    let number = value.parse().ok().filter(|number: &RawFd| *number > 2).ok_or_else(invalid)?;
    // SAFETY: the launcher opened it for this process, which takes it once, first thing, before anything
    // else could have been opened under that number. Whether it is open at all, the next call tells.
    let socket = Socket::from(unsafe { OwnedFd::from_raw_fd(number) });
    let usable = socket.is_listener().is_ok_and(|listens| listens)
        && socket.set_cloexec(true).is_ok()
        && socket.set_nonblocking(false).is_ok();
    if usable { Ok(Some(socket)) } else { Err(invalid()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Vars {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_process_by_itself_is_the_only_worker() {
        let worker = Worker::from_vars(&vars(&[])).unwrap();
        assert_eq!((worker.rank, worker.world, worker.starts), (0, 1, 1));
        assert_eq!((worker.servers, worker.peers), (None, None));
        assert_eq!(Worker::from_vars(&vars(&[])).unwrap().token(), Err(WorkerError::NoToken));
    }

    #[test]
    fn workers_of_servers_need_not_know_how_to_meet() {
        let worker = Worker::from_vars(&vars(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "3"),
            ("UNISONO_LIFE", "2"),
            ("UNISONO_SERVERS", "a:1, b:2"),
            ("UNISONO_PEERS", "127.0.0.1:5,[::1]:6"),
        ]))
        .unwrap();
        assert_eq!((worker.rank, worker.world, worker.starts), (1, 3, 3));
        assert_eq!(worker.servers.unwrap(), ["a:1", "b:2"]);
        assert_eq!(worker.peers.unwrap().len(), 2);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (pairs, about) in [
            (vec![("RANK", "x"), ("WORLD_SIZE", "2")], "RANK"),
            (vec![("RANK", "1")], "WORLD_SIZE"),
            (vec![("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")], "MASTER_PORT"),
            (vec![("UNISONO_PEERS", "nowhere")], "UNISONO_PEERS"),
            (vec![("UNISONO_TOKEN", "abc")], "64 hexadecimal"),
        ] {
            let error = Worker::from_vars(&vars(&pairs)).unwrap_err().to_string();
            assert!(error.contains(about), "{error}");
        }
    }
}
