//! Training [candle](candle_core) models on many workers.
//!
//! A model is built as always, by a [`VarBuilder`]; only this one comes from [`Parameters`], which
//! sees every gradient as soon as backward has completed it. A [`Replica`] then keeps the model in
//! step with those of the other workers:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, VarMap};
//! use unisono::candle::{Parameters, Replica};
//! use unisono::prelude::*;
//!
//! let job = Job::join()?;
//! let variables = VarMap::new();
//! let parameters = Parameters::of(&variables);
//! let model = candle_nn::linear(2, 1, parameters.builder(DType::F32, &Device::Cpu))?;
//! let mut replica = Replica::new(job.world(), &parameters, Settings::new(8), "adamw".parse()?)?;
//! for _step in 0..10 {
//!     while let Some(shard) = replica.next_shard() {
//!         let inputs = Tensor::new(&[[1f32, shard as f32]], &Device::Cpu)?;
//!         let loss = model.forward(&inputs)?.sqr()?.mean_all()?;
//!         replica.backward(&loss)?;
//!     }
//!     let outcome = replica.step()?;
//!     assert!(outcome.loss.is_finite());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! That is a replica of workers that agree. [`Replica::join`] makes one at whatever
//! [consistency level](crate::worker) a run has. [`ElasticReplica`] is for workers that may come and go.
//!
//! Parameters are `f32`, on the CPU.
//!
//! [`VarBuilder`]: candle_nn::VarBuilder

mod elastic;
mod gradient;
mod hook;
mod parameters;
mod replica;
mod weights;

pub use crate::elastic::Checkpoint;
pub use elastic::{ElasticReplica, ElasticReplicaError};
pub use parameters::Parameters;
pub use replica::{Replica, ReplicaError};
pub use weights::ModelWeights;
