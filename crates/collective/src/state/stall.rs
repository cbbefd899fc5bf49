//! Watches over a wait of a call.

use std::time::{Duration, Instant};

use super::{ASK_EVERY, GroupState, Wait};
use crate::call::Call;

/// How long a rank waits in a call before it tells the others which call that is. They compare it
/// with their own, which finds out calls that differ so much that no message of one ever meets a
/// message of the other. Longer: such a mistake is noticed later. Shorter: more messages when
/// ranks are out of step for good reasons.
const ASK_AFTER: Duration = Duration::from_millis(200);

impl GroupState {
    /// Starts to watch a wait of `call`.
    pub fn watch<'a>(&'a self, call: &'a Call) -> StallWatch<'a> {
        let since = Instant::now();
        let (told, stated) = (None, Vec::new());
        StallWatch { state: self, call, since, asked: since, told, stated, reported: false }
    }
}

/// Watches over a wait: remembers for which ranks it waits, says so in the log once if it takes too long,
/// and asks whether to go on.
pub struct StallWatch<'a> {
    state: &'a GroupState,
    call: &'a Call,
    since: Instant,
    /// When it asked whether to go on.
    asked: Instant,
    /// When the other ranks were told.
    told: Option<Instant>,
    /// The threads that wait for the call, as the other ranks were told.
    stated: Vec<u64>,
    reported: bool,
}

impl StallWatch<'_> {
    /// To be called now and then while waiting; `missing` names the ranks that have not
    /// arrived.
    pub fn tick(&mut self, missing: impl FnOnce() -> Vec<usize>) {
        let now = Instant::now();
        let missing = missing();
        if now - self.told.unwrap_or(self.since) >= ASK_AFTER {
            if self.told.is_none() {
                self.state.tell_stuck(self.call);
            }
            self.told = Some(now);
            self.tell_who_waits(&missing);
        }
        let report = || missing.clone();
        let call = self.state.named(*self.call);
        self.reported |= !self.reported && self.state.report_stall(self.since, &call, report);
        *self.state.wait.lock().expect("no panic while locked") =
            Wait { call: Some(*self.call), missing };
        if now - self.asked >= ASK_EVERY {
            self.asked = now;
            self.state.ask_to_stop();
        }
    }

    /// Says for which ranks the call waits, and of each thread that waits for it, once, that it does: one may
    /// begin to wait for a call only when the call has waited for others for a while. A rank for which no
    /// other waits is in no circle, and says nothing of its threads.
    fn tell_who_waits(&mut self, missing: &[usize]) {
        if !self.state.is_counted(self.call) {
            return;
        }
        self.state.await_ranks(self.call, missing);
        if !self.state.is_awaited_anywhere() {
            return;
        }
        for thread in self.state.waiting_threads() {
            if !self.stated.contains(&thread) {
                self.stated.push(thread);
                self.state.state_wait(thread, self.call, missing);
            }
        }
    }
}

impl Drop for StallWatch<'_> {
    fn drop(&mut self) {
        // The failure of a group is often what ends a wait: its cause is looked for afterwards.
        if !self.state.is_over() {
            *self.state.wait.lock().expect("no panic while locked") = Wait::default();
        }
    }
}
