//! One worker: its own sum is the sum of all. And a worker whose group is gone, and which has no other yet.

use std::time::Instant;

use super::{Gradients, Strategy};
use crate::error::SyncError;

/// The strategy of a single worker.
pub struct Alone;

impl Strategy for Alone {
    fn name(&self) -> String {
        "none".to_owned()
    }

    fn exchange(&mut self, gradients: &mut Gradients) -> Result<(), SyncError> {
        let started = Instant::now();
        gradients.divide();
        gradients.folding = started.elapsed();
        Ok(())
    }
}

/// The strategy of a worker between two groups: nothing is exchanged.
pub struct NoGroup;

impl Strategy for NoGroup {
    fn name(&self) -> String {
        "none".to_owned()
    }

    fn exchange(&mut self, _: &mut Gradients) -> Result<(), SyncError> {
        Err(SyncError::NoGroup)
    }
}
