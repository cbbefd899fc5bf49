//! Models and data to train, and models to replay.
//!
//! [`data`] holds samples and the [order](data::SampleOrder) in which a seed shows them, [`model`]
//! the networks that learn from them, [`init`] the values their parameters start from, and
//! [`replay`] the shapes and compute times of well-known models for runs that train nothing.
//!
//! Everything here is a function of its arguments: a seed, a name, a file. Nothing depends on how
//! many processes take part or on what ran before, so two processes that ask the same question get
//! the same bits.

pub mod data;
pub mod init;
pub mod model;
mod random;
pub mod replay;
