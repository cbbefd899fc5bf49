//! Numbers for the starts of workers.
//!
//! A later start of a worker, a later *life*, must have a larger number than every earlier one, whatever
//! process started it, on whatever machine, after however many restarts of everything. Neither the clock of a
//! machine nor a count that some launcher keeps is good for that: the one can be set back, the other
//! begins anew with its launcher. What lasts as long as the run does is the state of the servers. So a
//! worker that starts asks the first server for a number, and the server remembers all that it has given
//! out in its journal.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Life;

/// The lives that were given out: the last of every worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lives(BTreeMap<u32, Life>);

impl Lives {
    /// The number of a new life of a worker, of which the life `known` has joined, if one has. The caller may have numbered that one itself.
    pub fn next(&mut self, worker: u32, known: Option<Life>) -> Life {
        let last = self.0.entry(worker).or_default();
        *last = known.unwrap_or_default().max(*last).next();
        *last
    }

    /// Takes over what was given out before a crash.
    pub fn repeat(&mut self, worker: u32, life: Life) {
        let last = self.0.entry(worker).or_default();
        *last = life.max(*last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_life_has_a_larger_number_than_those_before() {
        let mut lives = Lives::default();
        assert_eq!(
            [lives.next(0, None), lives.next(0, None), lives.next(1, None)],
            [1, 2, 1].map(Life)
        );
        assert_eq!(lives.next(0, Some(Life(1))), Life(3), "an earlier one has joined meanwhile");
        assert_eq!(lives.next(1, Some(Life(1_700_000_000_000))), Life(1_700_000_000_001));
        let mut restored = Lives::default();
        restored.repeat(0, Life(2));
        restored.repeat(0, Life(3));
        restored.repeat(1, Life(1_700_000_000_001));
        assert_eq!(restored, lives);
        restored.repeat(0, Life(1));
        assert_eq!(restored.next(0, Some(Life(2))), Life(4));
    }
}
