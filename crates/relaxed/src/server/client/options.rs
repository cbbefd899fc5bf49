//! What a client is told, and why it may fail.

use std::time::Duration;

use unisono_codec::CodecSpec;
use unisono_net::{HandshakeError, Token};
use unisono_optimizer::OptimizerSpec;

use crate::server::layout::{self, Piece};
use crate::server::wire::Setup;
use crate::spec::Level;
use crate::staleness::StalenessPolicy;
use crate::{Cause, Life};

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
    pub stale: StalenessPolicy,
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
            stale: StalenessPolicy::Keep,
            total: u64::MAX,
            workers: 1,
            shards: 1,
            seed: 0,
            timeout: Duration::from_secs(10),
        }
    }

    /// A run of so many workers, each of which makes so many steps; without limit if that is `None`. The
    /// optimizer is as the caller wrote it, for a step of all workers.
    pub fn of_steps(
        shapes: Vec<Vec<usize>>,
        optimizer: &OptimizerSpec,
        level: Level,
        workers: u32,
        steps: Option<u64>,
    ) -> Run {
        let mut run = Run::new(shapes, level.optimizer(optimizer, workers), level);
        run.total = steps.map_or(u64::MAX, |steps| level.updates(steps, workers));
        run.workers = workers;
        run
    }

    /// What every server is told.
    pub(super) fn setups(&self, servers: usize) -> Vec<Setup> {
        let setup = |pieces: Vec<Piece>| Setup {
            codecs: pieces.iter().map(|piece| self.codec(piece)).collect(),
            pieces,
            optimizer: self.optimizer,
            level: self.level,
            stale: self.stale,
            total: self.total,
            workers: self.workers,
            shards: self.shards,
            seed: self.seed,
            timeout_ms: self.timeout.as_millis() as u64,
        };
        layout::spread(&self.shapes, servers).into_iter().map(setup).collect()
    }

    fn codec(&self, piece: &Piece) -> Option<CodecSpec> {
        let codec = self.codecs.get(piece.parameter)?.as_ref()?;
        codec.build().suits(&piece.shape).then(|| codec.clone())
    }
}

/// How bulk data travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// In common memory where worker and server are on one host, else over TCP.
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
    /// the servers number the lives of a worker, whatever process starts it.
    pub life: Option<Life>,
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
    pub(super) fn unreachable(&self, server: usize, last: impl Into<Cause>) -> ServerError {
        let address = self.servers.get(server).cloned().unwrap_or_default();
        ServerError::Unreachable { server, address, last: last.into() }
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
        #[source]
        last: Cause,
    },
    /// The process that listens there belongs to another job.
    #[error("the process that listens at {address} does not serve this job: {cause}")]
    Handshake {
        /// Where.
        address: String,
        /// Why.
        #[source]
        cause: HandshakeError,
    },
    /// The server that listens there is another one.
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
    /// Worker 0, whose weights a run begins with, has not joined.
    #[error(
        "rank 0, whose weights the run begins with, has not joined within {waited:?}; start it, or be \
         more patient"
    )]
    NotBegun {
        /// How long it was waited for.
        waited: Duration,
    },
    /// A later start of this worker has taken its place.
    #[error("a later start of worker {worker} has taken its place")]
    Superseded {
        /// The worker.
        worker: u32,
    },
    /// The client was [stopped](super::Stopper).
    #[error("stopped")]
    Stopped,
    /// The two do not understand each other.
    #[error("server {server} and this worker disagree: {what}")]
    Protocol {
        /// Which.
        server: usize,
        /// In what.
        #[source]
        what: Cause,
    },
}
