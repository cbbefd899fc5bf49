//! Ends a group when a call of it takes longer than its timeout.
//!
//! A call that runs on its caller's thread cannot look at a clock. So the caller notes until when the
//! call must have ended, and a thread, started with the first call, sleeps until the earliest of
//! these times. If a call is still noted then, the group ends, and with it every wait in it. In the
//! common case, where nothing is late, a call costs a lock that no other thread wants, and no system
//! call.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use unisono_collective::AbortHandle;

/// How long the thread sleeps at most. Longer: it outlives for longer a group that ended by itself.
/// Shorter: it wakes up more often where no deadline is near.
const LONGEST_SLEEP: Duration = Duration::from_secs(5);

/// What a timeout beyond all reason, or infinite, is taken for: thirty years.
const UNLIMITED: Duration = Duration::from_secs(1 << 30);

/// The calls of a group that run, and when they must have ended.
pub struct Deadlines {
    group: AbortHandle,
    state: Mutex<State>,
    change: Condvar,
    /// The process that has joined the group.
    process: u32,
}

#[derive(Default)]
struct State {
    started: bool,
    closed: bool,
    /// Calls noted so far: the number of the next.
    noted: u64,
    /// When calls must have ended, and how long that gave them.
    ends: BTreeMap<u64, (Instant, Duration)>,
    /// When the thread wakes up next.
    wakes_at: Option<Instant>,
}

/// A call that is noted until this is dropped.
pub struct NotedCall {
    deadlines: Arc<Deadlines>,
    number: u64,
}

impl Deadlines {
    /// For the calls of this group.
    pub fn new(group: AbortHandle) -> Arc<Deadlines> {
        let (state, change) = Default::default();
        Arc::new(Deadlines { group, state, change, process: std::process::id() })
    }

    /// What ends the group.
    pub fn group(&self) -> &AbortHandle {
        &self.group
    }

    /// Whether this process was forked from the one that has joined the group, and makes no calls of it.
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Notes a call that must have ended after `limit`.
    pub fn note(self: &Arc<Self>, limit: Duration) -> NotedCall {
        let end = Instant::now() + limit.min(UNLIMITED);
        let mut state = self.lock();
        let number = state.noted;
        state.noted += 1;
        state.ends.insert(number, (end, limit));
        if !state.started {
            state.started = true;
            self.start();
        } else if state.wakes_at.is_none_or(|wakes_at| wakes_at > end) {
            self.change.notify_all();
        }
        drop(state);
        NotedCall { deadlines: self.clone(), number }
    }

    /// Ends the thread: the group is gone.
    pub fn close(&self) {
        self.lock().closed = true;
        self.change.notify_all();
    }

    fn start(self: &Arc<Self>) {
        let own = Arc::downgrade(self);
        let watching = move || {
            while let Some(deadlines) = own.upgrade() {
                if !deadlines.wait_for_next() {
                    return;
                }
            }
        };
        let name = "unisono-deadlines".into();
        if let Err(error) = std::thread::Builder::new().name(name).spawn(watching) {
            log::error!("cannot watch over timeouts: {error}");
        }
    }

    /// Sleeps until the next deadline; whether to go on.
    fn wait_for_next(&self) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        let now = Instant::now();
        let earliest = state.ends.values().min().copied();
        if let Some((end, limit)) = earliest
            && end <= now
        {
            drop(state);
            self.group.expire(limit);
            return false;
        }
        let next = earliest.map_or(now + LONGEST_SLEEP, |(end, _)| end.min(now + LONGEST_SLEEP));
        state.wakes_at = Some(next);
        drop(self.change.wait_timeout(state, next - now).expect("no panic while locked"));
        !self.group.has_ended()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }
}

impl Drop for NotedCall {
    fn drop(&mut self) {
        self.deadlines.lock().ends.remove(&self.number);
    }
}

/// A timeout as Python gives it: in seconds, perhaps infinite.
pub fn limit(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(UNLIMITED).min(UNLIMITED)
}
