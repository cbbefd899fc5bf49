//! What a run is, checked: all that follows from its [`Setup`] and never changes.

use std::sync::Arc;
use std::time::Duration;

use unisono_codec::sender::{self, Scratch};
use unisono_codec::{Blockwise, Codec, CodecSpec, Task};
use unisono_collective::shards::Shards;
use unisono_collective::tree::Tree;
use unisono_net::descriptors;

use super::ServeError;
use crate::Cause;
use crate::server::core::{PushId, Rules};
use crate::server::layout::Piece;
use crate::server::link::{Bulk, MOST_BULK, numbers};
use crate::server::source::Source;
use crate::server::wire::{Part, Setup};

/// The most workers and shards of the batch: beyond any run, and what is kept for each stays small.
pub const MOST_WORKERS: u32 = 1 << 16;

/// Descriptors of a server beside those for its workers: its journal and records, processes that only
/// ask, and what else the process has open where the server is inside a worker.
const DESCRIPTORS: u64 = 128;

/// What is allowed for the encoding of a piece beyond twice the piece: enough for any head, so that
/// tiny pieces may be encoded too.
pub const SLACK: u64 = 1024;

/// A piece, and its gradient: one vector, or in lock-step one after the other.
pub type Gradient<'a> = (usize, Source<'a>);

/// A setup that makes sense, and what follows from it.
pub struct CheckedSetup {
    pub setup: Setup,
    pub fingerprint: [u8; 32],
    codecs: Vec<Option<Arc<dyn Codec>>>,
    pub rounds: Option<Rounds>,
}

/// How the gradients of a round are added up, in lock-step.
pub struct Rounds {
    /// Shards of the batch that each worker computes.
    pub shards: Vec<usize>,
    /// Subtrees in which each worker sums them.
    pub subtrees: Vec<usize>,
    /// How the subtrees of all workers make the sum of all shards.
    pub tree: Tree,
}

impl CheckedSetup {
    /// Checks a setup, and makes sure that this process may have the connections of all its workers.
    pub fn new(setup: Setup) -> Result<CheckedSetup, ServeError> {
        let checked = CheckedSetup::check(setup).map_err(ServeError::Setup)?;
        // A connection and the file of its memory each, and those of one that takes its place.
        let needed = DESCRIPTORS + 4 * u64::from(checked.setup.workers);
        descriptors::ensure(needed).map_err(|error| ServeError::Setup(error.into()))?;
        Ok(checked)
    }

    fn check(setup: Setup) -> Result<CheckedSetup, Cause> {
        let Setup { level, workers, .. } = setup;
        level.check()?;
        if !level.has_servers() {
            return Err(format!("{level} has no servers").into());
        }
        setup.stale.check()?;
        setup.optimizer.build(&[])?;
        if setup.timeout_ms == 0 {
            return Err("a timeout of 0, in which no worker can be heard".into());
        }
        if workers > MOST_WORKERS || setup.shards > MOST_WORKERS {
            return Err(format!("more than {MOST_WORKERS} workers, or shards of the batch").into());
        }
        let shards = Shards::new(setup.shards as usize, workers as usize)?;
        if total_bytes(&setup.pieces).is_none() {
            return Err("pieces that are too large".into());
        }
        if setup.codecs.len() != setup.pieces.len() {
            return Err("a codec, or none, is missing for some piece".into());
        }
        let mut codecs = Vec::with_capacity(setup.codecs.len());
        for (piece, spec) in setup.pieces.iter().zip(&setup.codecs) {
            spec.as_ref().map_or(Ok(()), CodecSpec::check)?;
            let codec = spec.as_ref().map(CodecSpec::build);
            if codec.as_ref().is_some_and(|codec| !codec.suits(&piece.shape)) {
                return Err(
                    format!("a codec that does not suit the shape {:?}", piece.shape).into()
                );
            }
            codecs.push(codec);
        }
        Ok(CheckedSetup {
            fingerprint: setup.fingerprint(),
            codecs,
            rounds: level.is_lockstep().then(|| Rounds::new(shards, workers as usize)),
            setup,
        })
    }

    /// What the core goes by.
    pub fn rules(&self) -> Rules {
        Rules {
            lockstep: self.setup.level.is_lockstep(),
            stale: self.setup.stale,
            timeout: self.timeout(),
            total: self.setup.total,
        }
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.setup.timeout_ms)
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.setup.pieces
    }

    /// Whether this worker may take part.
    pub fn admits(&self, worker: u32) -> Result<(), String> {
        let most = if self.rounds.is_some() { self.setup.workers } else { MOST_WORKERS };
        match worker < most {
            true => Ok(()),
            false => Err(format!("worker {worker} of a run that has room for {most}")),
        }
    }

    /// The lengths of the parts of a push, in bytes, if they can be those of this worker. Each piece
    /// comes at most once, and in order, so that no push is larger than the weights allow.
    pub fn lengths(&self, worker: u32, parts: &[Part]) -> Result<Vec<usize>, String> {
        if !parts.is_sorted_by(|a, b| a.piece < b.piece) {
            return Err("the pieces of a push are not in order".into());
        }
        parts.iter().map(|part| self.length(worker, part)).collect()
    }

    fn length(&self, worker: u32, part: &Part) -> Result<usize, String> {
        let Part { piece: number, vectors, bytes, encoded } = *part;
        let piece = self.pieces().get(number as usize);
        let piece = piece.ok_or_else(|| format!("there is no piece {number}"))?;
        let expected = match &self.rounds {
            None => 1,
            Some(rounds) => *rounds.subtrees.get(worker as usize).ok_or("an unknown worker")?,
        };
        if vectors as usize != expected {
            return Err(format!("{vectors} vectors of piece {number} instead of {expected}"));
        }
        let dense = 4 * piece.len() as u64;
        let is_right = match (encoded, &self.codecs[number as usize]) {
            (false, _) => bytes == dense * u64::from(vectors),
            (true, None) => return Err(format!("piece {number} has no codec")),
            (true, Some(_)) => vectors == 1 && bytes <= 2 * dense + SLACK,
        };
        match is_right {
            true => Ok(bytes as usize),
            false => Err(format!("{bytes} bytes of piece {number}, a vector of which has {dense}")),
        }
    }

    /// The gradients of a push, whose parts have their right lengths. Either all are made `whole`; or only those are of which no
    /// part can be made alone, and the others are checked. What lies in common memory is not encoded, and not to be
    /// made whole.
    pub fn decode<'a>(
        &'a self,
        push: PushId,
        parts: &[(Part, Bulk<'a>)],
        whole: bool,
    ) -> Result<Vec<Gradient<'a>>, String> {
        let mut scratch = Scratch::default();
        let mut gradient = |(part, bulk): &(Part, Bulk<'a>)| {
            let piece = part.piece as usize;
            let codec = self.codecs[piece].as_ref().filter(|_| part.encoded);
            let (codec, bytes) = match (codec, *bulk) {
                (None, Bulk::There(place)) => return Ok((piece, Source::There(place))),
                (None, Bulk::Own(bytes)) => {
                    let numbers = numbers(bytes).map_err(|error| error.to_string())?;
                    return Ok((piece, numbers.into()));
                }
                (Some(codec), Bulk::Own(bytes)) => (codec, bytes),
                (Some(_), Bulk::There(_)) => return Err("an encoding in foreign memory".into()),
            };
            let elements = self.pieces()[piece].len();
            if !whole {
                let checked = Blockwise::new(&**codec, bytes, elements);
                if let Some(encoding) = checked.map_err(|error| error.to_string())? {
                    return Ok((piece, Source::Encoded(encoding)));
                }
            }
            let shape = &self.pieces()[piece].shape;
            let task = Task { shape, parameter: piece, step: push.clock.0, seed: self.setup.seed };
            let mut decoded = vec![0.0; elements];
            sender::decode(&**codec, &task, bytes, &mut decoded, &mut scratch)
                .map_err(|error| error.to_string())?;
            Ok((piece, decoded.into()))
        };
        parts.iter().map(&mut gradient).collect()
    }
}

impl Rounds {
    fn new(shards: Shards, workers: usize) -> Rounds {
        Rounds {
            shards: (0..workers).map(|worker| shards.of(worker, workers).len()).collect(),
            subtrees: shards.subtrees(workers).iter().map(Vec::len).collect(),
            tree: shards.tree(workers),
        }
    }
}

/// The bytes of all pieces, unless there are more than can be.
pub fn total_bytes(pieces: &[Piece]) -> Option<u64> {
    let add = |sum: u64, piece: &Piece| sum.checked_add(piece.checked_bytes() as u64);
    pieces.iter().try_fold(0, add).filter(|bytes| *bytes <= MOST_BULK)
}
