//! One worker: its own sum is the sum of all.

use std::collections::VecDeque;
use std::time::Instant;

use super::{Gradients, Strategy};
use crate::error::SyncError;

/// The strategy of a single worker.
#[derive(Default)]
pub struct Alone {
    waiting: VecDeque<Gradients>,
}

impl Strategy for Alone {
    fn name(&self) -> String {
        "none".to_owned()
    }

    fn submit(&mut self, mut gradients: Gradients) {
        gradients.started = Instant::now();
        gradients.divide();
        gradients.ended = Instant::now();
        gradients.folding = gradients.ended - gradients.started;
        self.waiting.push_back(gradients);
    }

    fn collect(&mut self) -> Result<Gradients, SyncError> {
        Ok(self.waiting.pop_front().expect("only what was submitted is collected"))
    }

    fn sent(&self) -> u64 {
        0
    }
}
