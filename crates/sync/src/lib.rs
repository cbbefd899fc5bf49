//! Gradients that are equal everywhere.
//!
//! A step of training cuts its global batch into a fixed number of [`shards`]. A worker computes
//! the gradient of each of its shards, one after the other, and hands every parameter's to a
//! [`Synchronizer`], which [sums](accumulate) them, collects them in [`bucket`]s, and gives each
//! bucket to a [`strategy`] as soon as it is complete, while the backward pass goes on. What comes
//! back is the mean over all shards of all workers, for an [`optimizer`] to apply.
//!
//! The sum over shards is one fixed tree, whichever worker computes which part of it. Therefore the weights
//! do not depend on the number of workers, on the buckets, or on how the data travels.

pub mod accumulate;
pub mod advice;
pub mod bucket;
mod combine;
pub mod divergence;
mod elastic;
pub mod error;
pub mod slot;
pub mod strategy;
mod synchronizer;
mod times;
pub mod tune;

pub use elastic::NotElastic;
pub use error::SyncError;
pub use synchronizer::{Parameter, Settings, StepOutcome, Synchronizer, expect_equal_models};
pub use times::{BucketTimes, StepTimes};
pub use unisono_collective::shards;
pub use unisono_optimizer as optimizer;
