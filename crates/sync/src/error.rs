//! What can go wrong while replicas are kept in step.

use unisono_collective::{Error, FormError, Rank};

use unisono_codec::{BadEncoding, UnusedRule};

use crate::shards::TooFewShards;

/// Why a step could not be synchronized.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The group failed: a rank was lost, or the ranks disagree. Where the update is
    /// [withheld](crate::Settings::withhold), the weights are those before the step, which can be computed
    /// again in a new group. Else buckets that arrived before may have been applied, and the weights
    /// are those of no step: resume from a checkpoint with a new group.
    #[error(transparent)]
    Group(#[from] Error),
    /// The group for the gradients could not be formed.
    #[error(transparent)]
    Form(#[from] FormError),
    /// Use more shards or fewer workers.
    #[error(transparent)]
    Shards(#[from] TooFewShards),
    /// A codec's rule fits no parameter of the model. Write another pattern, or leave the rule out.
    #[error(transparent)]
    Rule(#[from] UnusedRule),
    /// The ranks registered different parameters. Build the same model everywhere.
    #[error(
        "rank {rank} has another model than rank {first}: its parameter {parameter} differs in name or \
         shape; build the same model on all ranks"
    )]
    DifferentModels {
        /// A rank whose model differs from the first rank's.
        rank: Rank,
        /// The first rank of the group.
        first: Rank,
        /// The first parameter, in order of registration, that differs.
        parameter: usize,
    },
    /// A shard's encoding is none that a codec writes: the worker runs other code, or the data was
    /// damaged. The weights are those of no step.
    #[error(
        "the encoded gradient of shard {shard} is damaged: {source}; run one version with the same settings on all ranks"
    )]
    Encoding {
        /// The shard.
        shard: usize,
        /// What is wrong with it.
        source: BadEncoding,
    },
    /// As [`SyncError::Encoding`], of a mean.
    #[error(
        "the encoded mean of rank {rank} is damaged: {source}; run one version with the same settings on all ranks"
    )]
    EncodingOfMean {
        /// The rank that encoded it.
        rank: Rank,
        /// What is wrong with it.
        source: BadEncoding,
    },
    /// The state to go on from lacks something, or has it in another size. Resume with the model, the
    /// shards and the codec that wrote it.
    #[error(
        "the saved state has no {name} of the right size; resume with the settings that wrote it"
    )]
    MissingState {
        /// What is missing.
        name: String,
    },
    /// The worker has left its group, and the next one has not formed. Give it another one.
    #[error("this worker is in no group; the last one could not be formed: give it another one")]
    NoGroup,
    /// The strategy of a rank remembers something from step to step that a new group does not have: the
    /// residuals of a codec, or what workers with local steps have agreed on. All ranks get this. The
    /// synchronizer belongs to the new group; restore it from a checkpoint.
    #[error(
        "what {strategy} remembers from step to step was lost with the group; go on from the last checkpoint"
    )]
    StateLost {
        /// The strategy's name.
        strategy: String,
    },
    /// The replicas are no longer equal. Something changed weights outside of the optimizer, or a
    /// rank's arithmetic differs. Resume from the last checkpoint.
    #[error(
        "at step {step} the weights of rank {rank} differ from the others', first in {parameter}; \
         resume from an earlier checkpoint, and look for what else changes weights there"
    )]
    Diverged {
        /// When it was noticed.
        step: u64,
        /// The rank that is unlike the majority.
        rank: Rank,
        /// The first parameter, in order of registration, that differs.
        parameter: String,
    },
}
