//! Keeps the replicas of a model in step while many workers train it.
//!
//! A process started by `unisono run`, `torchrun`, `mpirun` or `srun` joins its job without
//! being told where it is:
//!
//! ```
//! use unisono::prelude::*;
//!
//! let job = Job::join()?;
//! let mut gradient = vec![job.world().rank() as f32; 1024];
//! job.world().all_reduce(&mut gradient, Reduction::Mean)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "candle")]
pub mod candle;
pub mod elastic;
mod job;
pub mod recording;
pub mod worker;

pub use job::{Job, JoinError};
pub use unisono_cluster as cluster;
pub use unisono_codec as codec;
pub use unisono_collective as collective;
pub use unisono_collective::{
    Algorithm, BadSetting, Call, Dtype, Element, Epoch, Error, Explanation, FormError, Group,
    InvalidCall, Loss, Op, Options, Pending, Rank, Reduction, Registered, Request, Traffic,
    Transport, Work,
};
pub use unisono_insight as insight;
pub use unisono_net as net;
pub use unisono_net::interface::InterfaceError;
pub use unisono_optimizer as optimizer;
pub use unisono_relaxed as relaxed;
pub use unisono_sync as sync;

/// What most programs need.
pub mod prelude {
    pub use crate::sync::strategy::Weights;
    pub use crate::sync::{Parameter, Settings};
    pub use crate::worker::{Consistency, Training, Worker, train};
    pub use crate::{Dtype, Element, Error, Group, Job, Options, Reduction, Work};
}

/// The examples of the documents are tests.
#[cfg(all(doctest, feature = "candle"))]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../../../docs/rust.md")]
struct Documents;
