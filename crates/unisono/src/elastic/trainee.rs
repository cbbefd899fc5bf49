//! What is trained in a job whose workers may come and go, and what was saved of it.

use std::collections::HashMap;

use unisono_cluster::checkpoint::Loaded;
use unisono_collective::{Error, Group};
use unisono_sync::Synchronizer;

use super::{ElasticError, ElasticJob};
use crate::worker::{Find, Keep, Regrouped};

/// A worker's copy of a model, which a [`Session`](super::Session) takes from one group to the next.
pub trait Trainee {
    /// Why it cannot go on.
    type Error: From<Error>;

    /// Steps taken since the run began, by whatever process.
    fn steps(&self) -> u64;

    /// What keeps it in step with the others.
    fn synchronizer(&self) -> Option<&Synchronizer>;

    /// Enters the next epoch of a job, level with its members if it can be; `None` if the run is over.
    fn enter(&mut self, job: &mut ElasticJob) -> Result<Option<Group>, ElasticError>;

    /// Goes on in another group, with the state of those that have the most. All ranks must call it.
    fn regroup(&mut self, group: &Group) -> Result<Regrouped, Self::Error>;

    /// From now on hands the state to workers that join, beside the training.
    fn hand_over(&mut self, job: &ElasticJob);

    /// Calls `each` at rank 0 with the whole state. All ranks must call it.
    fn save(&self, group: &Group, each: &mut Keep<'_>) -> Result<(), Self::Error>;

    /// Goes on from what was saved after so many steps. Only rank 0 needs to know the steps and to find anything.
    /// All ranks must call it.
    fn restore(&mut self, group: &Group, steps: u64, find: &Find<'_>) -> Result<(), Self::Error>;

    /// Begins the run, with the weights that rank 0 has built its model with. All ranks must call it.
    fn begin_anew(&mut self, group: &Group) -> Result<(), Self::Error>;
}

/// A state of the run that was saved.
pub trait Saved {
    /// The steps after which it was saved.
    fn steps(&self) -> u64;

    /// What was saved under a name.
    fn find(&self, name: &str) -> Option<Vec<f32>>;
}

/// A state of the run in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// The steps after which it was saved.
    pub steps: u64,
    /// What was saved, by name.
    pub values: HashMap<String, Vec<f32>>,
}

impl Saved for Checkpoint {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn find(&self, name: &str) -> Option<Vec<f32>> {
        self.values.get(name).cloned()
    }
}

/// A file.
impl Saved for Loaded {
    fn steps(&self) -> u64 {
        self.step()
    }

    fn find(&self, name: &str) -> Option<Vec<f32>> {
        self.tensor(name)?.to_f32()
    }
}
