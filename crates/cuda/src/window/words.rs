//! The clocks of the ranks, of which this one's ticks when its device has come so far.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

use unisono_collective::engine::clock::{Interrupted, Words};
use unisono_collective::engine::{ClockView, GroupState};

use super::lines::{Set, Submitting, TICKS};

/// How long a rank that has waited for a while sleeps while the device is at work for it. Longer: it is late to
/// tell the others. Shorter: it keeps a core busy.
const NAP: Duration = Duration::from_micros(50);

/// How long it sleeps while the device is not: until another rank's tick, or a failure, wakes it.
const SLEEP: Duration = Duration::from_millis(20);

/// Turns in which a rank that waits for the device alone looks again at once. More: a busier core. Fewer: it
/// sleeps when the work would be done in a moment.
const EAGER: u32 = 2000;

/// Values of this rank's clock whose events have not happened, each with the lines that it waits for.
pub type Waiting = VecDeque<(u32, Set)>;

/// The words of a window whose data is moved by devices.
pub struct DeviceWords<'a> {
    pub view: ClockView<'a>,
    pub device: &'a Submitting<'a>,
    pub waiting: RefCell<Waiting>,
}

impl DeviceWords<'_> {
    /// Publishes the ticks whose events have happened; whether none is left.
    pub fn publish(&self) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(&(value, lines)) = waiting.front() {
            let events = &self.device.lines.marks.ticks[value as usize % TICKS];
            let happened =
                |event: usize| self.device.attempt(|| events[event].query()) == Some(true);
            if !lines.lines().all(|line| happened(line as usize)) {
                return false;
            }
            waiting.pop_front();
            self.view.set_clock(value);
            if self.view.sleepers() > 0 {
                self.view.wake();
            }
        }
        true
    }

    /// Publishes all ticks. The others need them also after this rank's call.
    pub fn flush(&self, state: &GroupState) -> Result<(), Interrupted> {
        self.wait_until(state, || self.publish())
    }

    /// Waits for the device, while ticks are published.
    pub fn wait_until(
        &self,
        state: &GroupState,
        is_done: impl Fn() -> bool,
    ) -> Result<(), Interrupted> {
        let mut turn = 0;
        while !is_done() {
            if self.device.has_failed() || state.is_over() {
                return Err(Interrupted);
            }
            self.publish();
            pause(turn);
            turn += 1;
        }
        Ok(())
    }
}

impl Words for DeviceWords<'_> {
    fn ranks(&self) -> usize {
        self.view.ranks()
    }

    fn me(&self) -> usize {
        self.view.me()
    }

    fn clock(&self, rank: usize) -> u32 {
        self.view.clock(rank)
    }

    /// The clock is to show this when the device has done what was submitted until now.
    fn set_clock(&self, value: u32) {
        let mut turn = 0;
        while self.waiting.borrow().len() == TICKS && !self.device.has_failed() {
            self.publish();
            pause(turn);
            turn += 1;
        }
        let events = &self.device.lines.marks.ticks[value as usize % TICKS];
        let lines = self.device.tick(events);
        if !self.device.has_failed() {
            self.waiting.borrow_mut().push_back((value, lines));
        }
        self.publish();
    }

    /// Those who sleep are woken when the tick is published.
    fn sleepers(&self) -> u32 {
        0
    }

    fn announce_sleep(&self, rank: usize, sleeping: bool) {
        self.view.announce_sleep(rank, sleeping);
    }

    fn sleep(&self, rank: usize, seen: u32, target: u32) -> Result<(), Interrupted> {
        let mut watch = self.view.watch();
        loop {
            let is_idle = self.publish();
            if self.device.has_failed() {
                return Err(Interrupted);
            }
            let longest = if is_idle { SLEEP } else { NAP };
            if !self.view.rest(&mut watch, rank, (seen, target), longest)? {
                return Ok(());
            }
        }
    }

    fn wake(&self) {
        self.view.wake();
    }

    fn spin(&self, turn: u32) -> bool {
        self.publish();
        !self.device.has_failed() && self.view.spin(turn)
    }
}

/// A turn of a wait for the device alone.
pub fn pause(turn: u32) {
    if turn < EAGER {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}
