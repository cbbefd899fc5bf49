//! Whether this process was stopped, or had no turn, for so long that workers may have given it up.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::server::serve::SHORTEST_TIMEOUT;

/// When this process had a turn.
pub struct Turns {
    timeout: Duration,
    /// One lock for both: a thread that asks finds that the last turn was long ago, or what the turn
    /// after that has made of it.
    times: Mutex<Times>,
}

struct Times {
    last: Duration,
    /// The last turn before which there was none for long.
    woke: Option<Duration>,
}

impl Turns {
    /// Of a process whose workers give it up after this timeout. Time counts from its first turn.
    pub fn new(timeout: Duration) -> Turns {
        Turns { timeout, times: Mutex::new(Times { last: Duration::ZERO, woke: None }) }
    }

    /// The process has a turn.
    pub fn take(&self, now: Duration) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_long(&times, now) {
            times.woke = Some(now);
        }
        times.last = now;
    }

    /// Whether the process had no turn for long, until less than a timeout ago: workers may have given
    /// their connections up meanwhile, and will come back.
    pub fn has_slept(&self, now: Duration) -> bool {
        let times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let woke_lately = |woke: Duration| now.saturating_sub(woke) < self.timeout;
        self.is_long(&times, now) || times.woke.is_some_and(woke_lately)
    }

    /// Whether the last turn was long ago. Turns are taken no more often than for the shortest timeout.
    fn is_long(&self, times: &Times, now: Duration) -> bool {
        now.saturating_sub(times.last) > self.timeout.max(SHORTEST_TIMEOUT) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_sleep_is_remembered_for_a_timeout() {
        let turns = Turns::new(seconds(8));
        turns.take(seconds(4));
        assert!(!turns.has_slept(seconds(8)));
        assert!(turns.has_slept(seconds(20)), "it has had no turn yet");
        turns.take(seconds(20));
        for now in (22..28).step_by(2) {
            turns.take(seconds(now));
            assert!(turns.has_slept(seconds(now)), "{now}");
        }
        turns.take(seconds(28));
        assert!(!turns.has_slept(seconds(28)));
    }

    /// Turns come no faster than this.
    #[test]
    fn a_short_timeout_is_not_taken_for_sleep() {
        let turns = Turns::new(Duration::from_millis(1));
        turns.take(SHORTEST_TIMEOUT / 4);
        assert!(!turns.has_slept(SHORTEST_TIMEOUT / 2));
    }

    /// The ticker and the threads of all connections wake up at the same moment.
    #[test]
    fn a_sleep_is_seen_by_a_thread_that_asks_while_the_first_turn_is_taken() {
        for sleep in 1..2000 {
            let turns = Turns::new(seconds(8));
            let woke = seconds(100 + sleep);
            std::thread::scope(|scope| {
                let ticker = scope.spawn(|| turns.take(woke));
                while !ticker.is_finished() {
                    assert!(turns.has_slept(woke), "after sleep {sleep}");
                }
            });
        }
    }
}
