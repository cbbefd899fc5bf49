//! What a client is told, and why it may fail.

use std::time::Duration;

use unisono_codec::CodecSpec;
use unisono_net::{HandshakeError, Token};
use unisono_sync::optimizer::OptimizerSpec;

use crate::server::layout::{self, Piece};
use crate::server::wire::Setup;
use crate::spec::Level;
use crate::stale::Stale;

/// What a run is. Equal for all workers.
#[derive(Clone, Debug)]
pub struct Run {
    /// The shapes of all parameters.
    pub shapes: Vec<Vec<usize>>,
    /// What makes weights of gradients.
    pub optimizer: OptimizerSpec,
    /// How far workers may drift apart.
    pub level: Level,
    /// What becomes of stale gradients.
    pub stale: Stale,
    /// After how many pushes the run is over; in lock-step, after how many rounds.
    pub total: u64,
    /// How many workers there are.
    pub workers: u32,
    /// Shards of the global batch. Of use in lock-step.
    pub shards: u32,
    /// What the gradient of each parameter is encoded by, if it is.
    pub codecs: Vec<Option<CodecSpec>>,
    /// The seed of the run.
    pub seed: u64,
    /// How long a worker may be silent.
    pub timeout: Duration,
}

impl Run {
    /// A run without codecs.
    pub fn new(shapes: Vec<Vec<usize>>, optimizer: OptimizerSpec, level: Level) -> Run {
        Run {
            codecs: vec![None; shapes.len()],
            shapes,
            optimizer,
            level,
            stale: Stale::Keep,
            total: u64::MAX,
            workers: 1,
            shards: 1,
            seed: 0,
            timeout: Duration::from_secs(10),
        }
    }

    /// What every shard is told.
    pub(super) fn setups(&self, servers: usize) -> Vec<Setup> {
        let setup = |pieces: Vec<Piece>| Setup {
            codecs: pieces.iter().map(|piece| self.codec(piece)).collect(),
            pieces,
            optimizer: self.optimizer,
            level: self.level.to_string(),
            stale: self.stale.to_string(),
            total: self.total,
            workers: self.workers,
            shards: self.shards,
            seed: self.seed,
            timeout_ms: self.timeout.as_millis() as u64,
        };
        layout::spread(&self.shapes, servers).into_iter().map(setup).collect()
    }

    fn codec(&self, piece: &Piece) -> Option<String> {
        let codec = self.codecs.get(piece.parameter)?.as_ref()?;
        codec.build().suits(&piece.shape).then(|| codec.to_string())
    }
}

/// How bulk data travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// In common memory where worker and shard are on one host, else over TCP.
    #[default]
    Auto,
    /// Over TCP.
    Tcp,
}

/// How a worker reaches the servers.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Where they are, HOST:PORT, in order.
    pub servers: Vec<String>,
    /// The token of the job.
    pub token: Token,
    /// The number of this worker.
    pub worker: u32,
    /// Which of its lives this is: later ones have larger numbers. `None`, as it should be but in tests:
    /// the servers number the lives of a worker, whoever starts it.
    pub life: Option<u64>,
    /// How long to try to reach a server that is not there.
    pub patience: Duration,
    /// How bulk data travels.
    pub transport: Transport,
    /// The clock from which on gradients are encoded; those before are sent as they are.
    pub warm_up: u64,
    /// Whether what encodings leave out is sent later.
    pub error_feedback: bool,
}

impl ClientOptions {
    /// That a server cannot be reached, and what was tried last.
    pub(super) fn unreachable(&self, server: usize, last: String) -> ServerError {
        let address = self.servers.get(server).cloned().unwrap_or_default();
        ServerError::Unreachable { server, address, last }
    }
}

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// A server could not be reached for longer than the client's patience.
    #[error("server {server} at {address} cannot be reached: {last}")]
    Unreachable {
        /// Which.
        server: usize,
        /// Where it was looked for.
        address: String,
        /// What the last attempt ran into.
        last: String,
    },
    /// Whoever listens there belongs to another job.
    #[error("whoever listens at {address} does not serve this job: {cause}")]
    Handshake {
        /// Where.
        address: String,
        /// Why.
        cause: HandshakeError,
    },
    /// Whoever listens there is another of the servers.
    #[error(
        "the server at {address} is server {number}, and was named as server {server}: name the servers \
         in the order of their numbers, from 0"
    )]
    OtherServer {
        /// Which was looked for.
        server: usize,
        /// Where.
        address: String,
        /// Which was found.
        number: u32,
    },
    /// It serves another run: other parameters, level or settings.
    #[error(
        "server {server} serves a run with other settings; start it anew, or with another journal"
    )]
    OtherRun {
        /// Which.
        server: usize,
    },
    /// It was restarted without its journal, and has forgotten the weights.
    #[error(
        "server {server} has lost its state; start servers with a journal to survive a restart"
    )]
    Forgotten {
        /// Which.
        server: usize,
    },
    /// A later start of this worker has taken its place.
    #[error("a later start of worker {worker} has taken its place")]
    Superseded {
        /// The worker.
        worker: u32,
    },
    /// Somebody asked for the end.
    #[error("stopped")]
    Stopped,
    /// The two do not understand each other.
    #[error("server {server} and this worker disagree: {what}")]
    Protocol {
        /// Which.
        server: usize,
        /// In what.
        what: String,
    },
}
