//! How a thread waits before it sleeps: it spins, then it lets other threads have its core; for a clock in shared memory,
//! unless one of them keeps it.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A thread that gave its core away, and gets it back after longer than this, shares it with one that computes: such a thread
/// keeps it for a time slice, 1.4 to 3 ms with Linux's defaults, and what the waiting one waits for has long happened.
/// Longer: that is not noticed. Shorter: two ranks that hand each other a core, each of which moves a segment meanwhile, are taken
/// for one that computes. They would sleep in turns, and the scheduler, which never sees both run, would leave them on that core.
const SLICE: Duration = Duration::from_micros(500);

/// For how long after that waits end in a sleep instead, from which the scheduler wakes a thread at once. Longer: waits sleep
/// when the core is free again. Shorter: more of them cost a time slice.
const CROWDED: Duration = Duration::from_millis(20);

/// How to wait for another rank before sleeping.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Busy turns, each a pause instruction or a few.
    pub spins: u32,
    /// Turns after that which give the core to another thread.
    pub yields: u32,
}

impl Patience {
    /// Spinning pays only if every rank of the host has a core of its own, and even then not for
    /// long: the scheduler may have put two ranks on one core, where the one that spins keeps the
    /// other from arriving. Yielding costs little with a core to oneself and lets the other rank
    /// run at once without.
    pub fn for_crowd(crowd: f64) -> Patience {
        if crowd <= 1.0 {
            Patience { spins: 300, yields: 2000 }
        } else {
            Patience { spins: 0, yields: 40 }
        }
    }

    /// The same for sockets, where an attempt is a system call and worth many busy turns.
    pub fn for_links(&self) -> Patience {
        Patience { spins: self.spins / 4, yields: self.yields.min(40) }
    }
}

/// The [`Patience`] of one thread, and what its waits have shown.
#[derive(Debug)]
pub struct Waiter {
    patience: Patience,
    /// Until when another thread is taken to keep the core.
    crowded: Cell<Option<Instant>>,
}

impl Waiter {
    pub fn new(patience: Patience) -> Waiter {
        Waiter { patience, crowded: Cell::new(None) }
    }

    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// Whether a wait has spun for long enough by this turn.
    pub fn has_spun(&self, turn: u32) -> bool {
        turn >= self.patience.spins
    }

    /// One turn of a wait; whether to look again. Otherwise it is time to sleep.
    pub fn turn(&self, turn: u32) -> bool {
        if !self.has_spun(turn) {
            std::hint::spin_loop();
            return true;
        }
        if turn - self.patience.spins >= self.patience.yields {
            return false;
        }
        let before = Instant::now();
        if self.is_crowded(before) {
            return false;
        }
        std::thread::yield_now();
        self.returned(before, Instant::now())
    }

    fn is_crowded(&self, now: Instant) -> bool {
        self.crowded.get().is_some_and(|until| now < until)
    }

    /// Takes in that the core was given away at one moment and came back at another; whether to look again.
    fn returned(&self, given: Instant, back: Instant) -> bool {
        let is_crowded = back.duration_since(given) > SLICE;
        if is_crowded {
            self.crowded.set(Some(back + CROWDED));
        }
        !is_crowded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_comes_back_late_is_not_given_away_again_soon() {
        let waiter = Waiter::new(Patience { spins: 2, yields: 3 });
        let start = Instant::now();
        assert!(waiter.returned(start, start + SLICE), "two ranks hand each other a core");
        assert!(!waiter.is_crowded(start + SLICE));
        let late = start + Duration::from_millis(3);
        assert!(!waiter.returned(start, late), "a time slice has passed");
        assert!(waiter.is_crowded(late));
        assert!(waiter.is_crowded(late + CROWDED / 2));
        assert!(!waiter.is_crowded(late + CROWDED), "the core may be free again");
    }

    #[test]
    fn a_wait_spins_then_yields_then_sleeps() {
        let waiter = Waiter::new(Patience { spins: 2, yields: 3 });
        let crowded = Instant::now() + Duration::from_secs(600);
        assert!(waiter.turn(0) && waiter.turn(1), "it spins");
        assert!(!waiter.has_spun(1) && waiter.has_spun(2));
        assert!(!waiter.turn(5), "all turns are used up");
        waiter.crowded.set(Some(crowded));
        assert!(waiter.turn(1), "it still spins");
        assert!(!waiter.turn(2), "it sleeps at once");
    }
}
