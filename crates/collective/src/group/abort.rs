//! Ends a group on purpose: because its user gave up, or because a call took too long.
//!
//! It ends as it does when a rank is lost: every pending and later operation fails, and the monitor
//! tells the other ranks why. Other groups of the job go on.

use std::sync::Arc;
use std::time::Duration;

use super::Group;
use crate::state::GroupState;

/// Ends a group from wherever it is needed, also while the group is being dropped.
#[derive(Clone)]
pub struct AbortHandle {
    state: Arc<GroupState>,
}

impl Group {
    /// Ends the group: on every rank, pending and later operations fail with
    /// [`Error::Aborted`](crate::Error::Aborted), which names this rank and the reason. Does nothing if the group has failed before.
    pub fn abort(&self, reason: &str) {
        self.abort_handle().abort(reason);
    }

    /// What ends this group from elsewhere.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { state: self.inner.state.clone() }
    }

    /// Lets calls ask `stop` while they wait, five to ten times a second: if it says so, they abort
    /// the group. It is asked on the thread that waits, so that a caller can look for signals that
    /// only its own thread gets. Only the first `stop` of a group counts.
    pub fn stop_waiting_if(&self, stop: impl Fn() -> bool + Send + Sync + 'static) {
        self.abort_handle().stop_waiting_if(stop);
    }
}

impl AbortHandle {
    /// As [`Group::stop_waiting_if`].
    pub fn stop_waiting_if(&self, stop: impl Fn() -> bool + Send + Sync + 'static) {
        self.state.stop_waiting_if(Box::new(stop));
    }

    /// For a thread that waits for what another does in the group: asks, as a call that waits does,
    /// whether to [stop waiting](Group::stop_waiting_if), and if so, aborts the group.
    pub fn ask_to_stop(&self) {
        self.state.ask_to_stop();
    }

    /// As [`Group::abort`].
    pub fn abort(&self, reason: &str) {
        self.state.abort(reason);
    }

    /// Ends the group because a call did not end within `after`: on this rank with
    /// [`Error::TimedOut`](crate::Error::TimedOut), which names the ranks that have not arrived, on the others
    /// with [`Error::Aborted`](crate::Error::Aborted).
    pub fn expire(&self, after: Duration) {
        self.state.fail(self.state.timed_out(after));
    }

    /// Says why this rank is about to leave the group, where it is not done: the others, if they
    /// still need it, get this text ([`crate::Loss::Failed`]). The first reason counts.
    pub fn leave_because(&self, reason: &str) {
        self.state.leave_because(reason);
    }

    /// Whether the group has ended.
    pub fn has_ended(&self) -> bool {
        self.state.is_over()
    }
}
