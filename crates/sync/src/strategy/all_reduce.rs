//! All workers wait for all: the mean of every bucket, the same bits everywhere.

use std::sync::Arc;
use std::time::Instant;

use unisono_collective::Group;

use super::{Gradients, Strategy};
use crate::combine::Combiner;
use crate::error::SyncError;
use crate::shards::Shards;

/// The synchronous strategy.
pub struct AllReduce {
    combiner: Combiner,
}

impl AllReduce {
    /// Over the ranks of a group, which serves nothing else from now on.
    pub fn new(group: Group, shards: Shards) -> AllReduce {
        AllReduce { combiner: Combiner::new(group, shards) }
    }
}

impl Strategy for AllReduce {
    fn name(&self) -> String {
        "all-reduce".to_owned()
    }

    fn exchange(&mut self, gradients: &mut Gradients) -> Result<(), SyncError> {
        let (filled, folding) = (gradients.filled, self.combiner.folding());
        self.combiner.sum(&mut gradients.slots[..filled])?;
        let summed = Instant::now();
        gradients.divide();
        gradients.folding = self.combiner.folding() - folding + summed.elapsed();
        Ok(())
    }

    fn group(&self) -> Option<&Arc<Group>> {
        Some(self.combiner.group())
    }

    fn sent(&self) -> u64 {
        self.combiner.sent()
    }
}
