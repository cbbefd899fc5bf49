//! The clocks of the ranks of a host, in memory that they share.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::thread::futex;

use super::clock::{Interrupted, Words, reached};
use super::region::Region;
use crate::call::Call;
use crate::error::Error;
use crate::patience::{Patience, Waiter};
use crate::state::{GroupState, StallWatch};

/// How long a sleeper sleeps before it looks again whether the group still stands. A failure of the group
/// wakes it; this is for one that falls between the look and the sleep, and for a wake-up call that was missed
/// because its caller died. Shorter costs wake-ups of a waiting rank, longer delays the news.
const NAP: Duration = Duration::from_millis(20);

/// The [clocks](super::clock) of the ranks of one host, beside which each rank shows its last calls.
pub struct Clocks {
    /// One region per member, in the order of `members`.
    pub(super) regions: Vec<Region>,
    /// Group ranks of the members, ascending.
    pub(super) members: Vec<usize>,
    /// This rank's index among the members.
    pub(super) me: usize,
    waiter: Waiter,
    /// Runs so far: the slot in which ranks record what they called.
    runs: usize,
    /// The fingerprint of the call that was entered last.
    entered: u64,
}

impl Clocks {
    pub(super) fn new(
        regions: Vec<Region>,
        members: Vec<usize>,
        me: usize,
        patience: Patience,
    ) -> Clocks {
        Clocks { regions, members, me, waiter: Waiter::new(patience), runs: 0, entered: 0 }
    }

    pub(super) fn for_engine(&self) -> Clocks {
        let regions = self.regions.iter().map(Region::for_engine).collect();
        Clocks::new(regions, self.members.clone(), self.me, self.waiter.patience())
    }

    /// Shows the call that this rank makes now: others see it with the next tick.
    pub fn enter(&mut self, call: &Call) {
        self.entered = call.fingerprint();
        self.regions[self.me].record(self.runs, call);
        self.runs += 1;
    }

    /// The clocks during the call that was entered last.
    pub fn view<'a>(&'a self, call: &'a Call, state: &'a GroupState) -> ClockView<'a> {
        let slot = self.runs.wrapping_sub(1);
        ClockView { clocks: self, slot, state, call }
    }

    /// Shows the others that this rank has left a call in which they may still read its buffer: what they have
    /// read since is worth nothing. After that the group is over.
    pub(super) fn leave(&self) {
        self.regions[self.me].left().store(1, Ordering::SeqCst);
    }

    /// Whether a rank has left a call in which others may still have read its buffer.
    pub(super) fn any_left(&self) -> bool {
        self.regions.iter().any(|region| region.left().load(Ordering::SeqCst) != 0)
    }

    /// Shows the others that this rank uses nothing of theirs any more.
    pub fn close(&self) {
        self.regions[self.me].closed().store(1, Ordering::SeqCst);
    }

    /// Whether all ranks have closed.
    pub fn all_closed(&self) -> bool {
        self.regions.iter().all(|region| region.closed().load(Ordering::SeqCst) != 0)
    }
}

/// [`Clocks`] during a call. Ranks are numbered among those of the host.
pub struct ClockView<'a> {
    clocks: &'a Clocks,
    slot: usize,
    state: &'a GroupState,
    call: &'a Call,
}

impl<'a> ClockView<'a> {
    /// A rank whose call in this place is not this one, by its number in the group, and its call. For
    /// when all have entered.
    pub fn disagreement(&self) -> Option<(usize, Call)> {
        let fingerprint = self.clocks.entered;
        // This rank's own is written with its first tick, for which a device may have to get there.
        let others = self.clocks.regions.iter().enumerate().filter(|(rank, _)| *rank != self.me());
        let mut others = others.filter(|(_, region)| region.fingerprint(self.slot) != fingerprint);
        let (rank, region) = others.next()?;
        let peer_call = region.call(self.slot).unwrap_or(*self.call);
        Some((self.clocks.members[rank], peer_call))
    }

    /// An error if a rank makes another call than this one. For when all have entered.
    pub fn agree(&self) -> Result<(), Error> {
        match self.disagreement() {
            Some(other) => Err(self.state.mismatch([(self.state.rank(), *self.call), other])),
            None => Ok(()),
        }
    }

    /// Watches over a wait that [`ClockView::rest`] makes up.
    pub fn watch(&self) -> StallWatch<'a> {
        self.state.watch(self.call)
    }

    /// Sleeps once, for so long at most, while a clock shows what was `seen`; whether it still does.
    /// `Err` if the wait is to end.
    pub fn rest(
        &self,
        watch: &mut StallWatch<'_>,
        rank: usize,
        (seen, target): (u32, u32),
        longest: Duration,
    ) -> Result<bool, Interrupted> {
        let longest =
            rustix::time::Timespec { tv_sec: 0, tv_nsec: longest.min(NAP).as_nanos() as i64 };
        let clock = self.clocks.regions[rank].clock();
        // Every outcome (woken, value changed, interrupted, timed out) leads to the same
        // question: what does the clock show now?
        let _ = futex::wait(clock, futex::Flags::empty(), seen, Some(&longest));
        if clock.load(Ordering::SeqCst) != seen {
            return Ok(false);
        }
        if self.state.is_over_for(self.clocks.members[rank], self.call) {
            return Err(Interrupted);
        }
        watch.tick(|| {
            let late = |&r: &usize| r != self.clocks.me && !reached(self.clock(r), target);
            (0..self.ranks()).filter(late).map(|r| self.clocks.members[r]).collect()
        });
        Ok(true)
    }
}

impl Words for ClockView<'_> {
    fn ranks(&self) -> usize {
        self.clocks.regions.len()
    }

    fn me(&self) -> usize {
        self.clocks.me
    }

    fn clock(&self, rank: usize) -> u32 {
        self.clocks.regions[rank].clock().load(Ordering::SeqCst)
    }

    fn set_clock(&self, value: u32) {
        self.clocks.regions[self.clocks.me].tick(self.slot, self.clocks.entered, value);
    }

    fn sleepers(&self) -> u32 {
        self.clocks.regions[self.clocks.me].sleepers().load(Ordering::SeqCst)
    }

    fn announce_sleep(&self, rank: usize, sleeping: bool) {
        let sleepers = self.clocks.regions[rank].sleepers();
        if sleeping {
            sleepers.fetch_add(1, Ordering::SeqCst);
        } else {
            sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn sleep(&self, rank: usize, seen: u32, target: u32) -> Result<(), Interrupted> {
        let mut watch = self.watch();
        while self.rest(&mut watch, rank, (seen, target), NAP)? {}
        Ok(())
    }

    fn wake(&self) {
        self.clocks.regions[self.clocks.me].wake();
    }

    fn spin(&self, turn: u32) -> bool {
        let waiter = &self.clocks.waiter;
        // Whoever sleeps notices that the group is over.
        !(waiter.has_spun(turn) && self.state.is_over()) && waiter.turn(turn)
    }
}
