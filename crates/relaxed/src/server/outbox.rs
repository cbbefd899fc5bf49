//! What a worker has to do again after its connection to a server was lost.
//!
//! A worker has at most one push under way at a server. It keeps the gradient until the server has said
//! what became of it. If the connection is lost before, the worker joins again, and the server says how
//! many pushes of this life are settled: with that it is clear whether the one under way arrived.

use super::core::{Joined, PushId};
use crate::{Clock, Life};

/// The pushes of one life of a worker to one server.
#[derive(Clone, Debug)]
pub struct Outbox {
    worker: u32,
    life: Life,
    /// The number of the last push that was begun.
    number: u64,
    pending: Option<PushId>,
}

impl Outbox {
    /// Of a life that begins.
    pub fn new(worker: u32, life: Life) -> Outbox {
        Outbox { worker, life, number: 0, pending: None }
    }

    /// The next push, which is now under way.
    ///
    /// # Panics
    /// If another one is.
    pub fn begin(&mut self, clock: Clock) -> PushId {
        assert!(self.pending.is_none(), "one push at a time");
        self.number += 1;
        let push = PushId { worker: self.worker, life: self.life, number: self.number, clock };
        self.pending = Some(push);
        push
    }

    /// Whose pushes these are.
    pub fn worker(&self) -> u32 {
        self.worker
    }

    /// The push under way, if there is one.
    pub fn pending(&self) -> Option<PushId> {
        self.pending
    }

    /// The server has said what became of the push under way.
    pub fn settle(&mut self) {
        self.pending = None;
    }

    /// The worker has joined again: the push that it must send again, if there is one.
    pub fn rejoin(&mut self, joined: Joined) -> Option<PushId> {
        if self.pending.is_some_and(|push| push.number <= joined.pushes) {
            self.pending = None;
        }
        // Another process may have pushed in this life before: a number that was used is never used again.
        self.number = self.number.max(joined.pushes);
        self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_arrived_is_not_sent_again() {
        let mut outbox = Outbox::new(3, Life(7));
        let first = outbox.begin(Clock(0));
        assert_eq!(
            (first.worker, first.life, first.number, first.clock),
            (3, Life(7), 1, Clock(0))
        );
        assert_eq!(outbox.rejoin(Joined { clock: Clock(0), pushes: 0 }), Some(first));
        assert_eq!(outbox.rejoin(Joined { clock: Clock(1), pushes: 1 }), None);
        assert_eq!(outbox.begin(Clock(4)).number, 2);
        outbox.settle();
        assert_eq!(outbox.rejoin(Joined { clock: Clock(0), pushes: 0 }), None);
        assert_eq!(outbox.rejoin(Joined { clock: Clock(9), pushes: 7 }), None);
        assert_eq!(outbox.begin(Clock(9)).number, 8);
    }
}
