//! What a worker of a gossip can be told.

use std::io;

/// Why a worker cannot take part, or a call was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GossipError {
    /// Two workers train models of different shapes: start them with the same model.
    #[error(
        "worker {rank} trains a model of {elements} weights and worker {partner} one of {theirs} in \
         parameters of other lengths: start all workers with the same model"
    )]
    WrongModel {
        /// This worker.
        rank: u32,
        /// The other one.
        partner: u32,
        /// Weights of this worker's model.
        elements: u64,
        /// Weights of the other's.
        theirs: u64,
    },
    /// The configuration contradicts itself; nothing was started.
    #[error("there is no worker {rank} among {world}: give the addresses of all workers, by rank")]
    Place {
        /// The rank that was asked for.
        rank: u32,
        /// The number of addresses.
        world: u32,
    },
    /// There is no such parameter; nothing was changed.
    #[error("the model has {parameters} parameters, and none with number {parameter}")]
    NoParameter {
        /// The number that was asked for.
        parameter: usize,
        /// Parameters of the model.
        parameters: usize,
    },
    /// The changes of a step are not one for each parameter; nothing was changed.
    #[error("a step needs one change for each of the {parameters} parameters, not {given}")]
    Changes {
        /// Parameters of the model.
        parameters: usize,
        /// The changes that were given.
        given: usize,
    },
    /// A slice does not have the length of its parameter; nothing was changed.
    #[error("parameter {parameter} has {expected} weights, not {given}")]
    Length {
        /// Which parameter.
        parameter: usize,
        /// Its length.
        expected: usize,
        /// The length of the slice.
        given: usize,
    },
    /// The operating system refused a thread or a socket.
    #[error("cannot start the gossip of worker {rank}: {cause}")]
    Start {
        /// This worker.
        rank: u32,
        /// What it said.
        #[source]
        cause: io::Error,
    },
}
