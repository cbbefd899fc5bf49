//! Several threads for one call.
//!
//! A large call on one thread moves no more bytes than one core can, also where other cores are idle. So a rank may have
//! *helpers*: threads that do nothing but take *parts* of what the thread of the call is about to do by itself: some
//! elements of every block that it copies or folds, or the bytes of one direction of one socket. What it
//! does next, and what it waits for, it decides alone and as if there were no helpers: other ranks see nothing of them, and
//! each rank may have as many as it likes. No element is combined with others than before, nor in another order.
//!
//! [`Board`] is what the threads share: one word with the number of the *job* and how many of its parts nobody has
//! taken, and how many parts are unfinished. The thread of the call writes down a job, takes parts of it like its helpers, and
//! goes on when all are finished. So it never waits for a helper that has not come: one that is late, because
//! it sleeps or its core is taken, finds nothing left to do. It waits for one that has taken a part, which is the copying of some
//! kilobytes, or system calls that do not block: that ends by itself, and cannot be aborted, since the memory is the caller's.
//!
//! A helper that finds nothing looks again for a while and then sleeps. Who writes down a job wakes the helpers only
//! if one sleeps.
//!
//! Some helpers have a core only while the program [rests](Rest): it has said that it waits for calls and computes
//! nothing. Until then they sleep, and are not woken.

mod board;
mod desk;
mod rest;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use desk::{Desk, Job};

pub use board::{Board, serve, share};
pub use rest::Rest;

/// Bytes of a call from which on helpers take part. Larger: calls of some megabytes leave cores idle. Smaller:
/// waking the helpers takes longer than they save.
pub const LARGE_CALL: usize = 1 << 20;

/// Bytes of a part, at least. Larger: fewer helpers find something to do in a segment. Smaller: taking a part costs as much as
/// it saves.
const GRAIN: usize = 16 << 10;

/// Parts for each thread. More: a helper that comes late leaves less to the others. Fewer: less to take.
const PARTS: usize = 2;

/// Threads that a call gets at most unless more are asked for: a few reach what the memory of a host can do.
/// Larger: more cores that spin for little. Smaller: hosts with fast memory are not used.
const MOST: usize = 4;

/// Busy turns of a helper that waits for the next job of a call, each a pause of some dozen nanoseconds: about as
/// long as another rank takes for a segment. Larger: helpers keep cores from others when the rank waits.
/// Smaller: they have to be woken within a call.
const SPINS: u32 = 2000;

/// Room for the list of a fold's inputs.
pub type Room = Vec<*const u8>;

/// Some of the elements of every block.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    part: usize,
    parts: usize,
}

impl Share {
    /// All elements.
    pub const ALL: Share = Share { part: 0, parts: 1 };

    /// Its elements of a block of so many, each of `size` bytes. The shares of all parts are the block, and
    /// begin at multiples of 64 bytes.
    #[inline]
    pub fn of(self, count: usize, size: usize) -> Range<usize> {
        // Small calls would notice the divisions.
        if self.parts == 1 {
            return 0..count;
        }
        let line = 64 / size;
        let cut = |part: usize| match part == self.parts {
            true => count,
            false => (count / line * part / self.parts) * line,
        };
        cut(self.part)..cut(self.part + 1)
    }
}

/// How many threads a rank has for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    /// At any time.
    pub always: usize,
    /// While the program rests.
    pub resting: usize,
}

impl Threads {
    /// As many as were asked for, or what is left of the rank's cores beside those on which its program computes.
    /// Without a word about the program it is taken to compute with all of them, unless it waits for a call.
    pub fn of(asked: Option<usize>, cores: usize, computing: Option<usize>) -> Threads {
        let most = |cores: usize| cores.clamp(1, MOST);
        match (asked, computing) {
            (Some(asked), _) => Threads { always: asked.max(1), resting: asked.max(1) },
            (None, None) => Threads { always: 1, resting: most(cores) },
            (None, Some(computing)) => {
                let always = most(cores.saturating_sub(computing));
                Threads { always, resting: most(cores) }
            }
        }
    }
}

/// The helpers of one rank of a group: threads that start with the first large call, sleep between calls and end
/// with this value.
pub struct Helpers {
    rank: usize,
    wanted: Threads,
    /// Inputs of a fold at most.
    inputs: usize,
    /// Busy turns of a helper.
    spins: u32,
    rest: Arc<Rest>,
    desk: Option<Arc<Desk>>,
    threads: Vec<JoinHandle<()>>,
    /// Whether they take part in the call that runs.
    engaged: bool,
}

impl Helpers {
    /// Of a rank with so many threads for one call; `spins` where they have cores of their own.
    pub fn new(
        rank: usize,
        wanted: Threads,
        inputs: usize,
        spins: bool,
        rest: Arc<Rest>,
    ) -> Helpers {
        let spins = if spins { SPINS } else { 0 };
        let (desk, threads, engaged) = Default::default();
        Helpers { rank, wanted, inputs, spins, rest, desk, threads, engaged }
    }

    /// None at all.
    #[cfg(test)]
    pub fn none() -> Helpers {
        Helpers::new(0, Threads::of(None, 1, None), 0, false, Arc::default())
    }

    /// Threads that a call has at most.
    fn threads(&self) -> usize {
        self.wanted.always.max(self.wanted.resting)
    }

    /// Threads that a call has, half of it while the program computes and half while it rests.
    pub fn mean_threads(&self) -> f64 {
        let Threads { always, resting } = self.wanted;
        (always + resting.max(always)) as f64 / 2.0
    }

    /// A call of so many bytes begins.
    pub fn engage(&mut self, bytes: usize) {
        self.engaged = self.threads() > 1 && bytes >= LARGE_CALL;
        if self.engaged && self.desk.is_none() {
            self.start();
        }
    }

    /// Whether helpers take part in this call now.
    pub fn are_engaged(&self) -> bool {
        self.engaged && self.active() > 1
    }

    /// Threads that this call has now.
    fn active(&self) -> usize {
        let Threads { always, resting } = self.wanted;
        let wanted = if self.rest.is_on() { resting.max(always) } else { always };
        wanted.min(self.threads.len() + 1)
    }

    /// Does `work` on shares which together are everything: on one or, if it is about many bytes, on several at
    /// the same time.
    ///
    /// # Safety
    /// `work` may be called by several threads at the same time, with different shares.
    pub unsafe fn share(
        &mut self,
        bytes: usize,
        room: &mut Room,
        work: &impl Fn(Share, &mut Room),
    ) {
        let parts = (bytes / GRAIN).min(PARTS * self.active());
        if parts < 2 || !self.are_engaged() {
            return work(Share::ALL, room);
        }
        // SAFETY: passed on from the caller.
        unsafe { self.each(parts, room, &|part, room| work(Share { part, parts }, room)) }
    }

    /// Does `work` for every number below `parts`.
    ///
    /// # Safety
    /// `work` may be called by several threads at the same time, with different numbers.
    pub unsafe fn each<W: Fn(usize, &mut Room)>(
        &mut self,
        parts: usize,
        room: &mut Room,
        work: &W,
    ) {
        let Some(desk) = self.desk.as_ref().filter(|_| self.engaged && parts > 1) else {
            return (0..parts).for_each(|part| work(part, room));
        };
        /// Does a part of a job of this type.
        ///
        /// # Safety
        /// `work` is a `W`, which may be called.
        unsafe fn part_of<W: Fn(usize, &mut Room)>(work: *const (), part: usize, room: &mut Room) {
            // SAFETY: the caller's promise.
            unsafe { (*work.cast::<W>())(part, room) }
        }
        let job = Job { work: std::ptr::from_ref(work).cast(), part: part_of::<W> };
        share(&**desk, job, parts as u32, |part| work(part, room));
        assert!(!desk.panicked.load(Ordering::Relaxed), "a helper panicked");
    }

    fn start(&mut self) {
        let desk = Arc::new(Desk::new(self.spins));
        let always = self.wanted.always;
        for number in 1..self.threads() {
            let (desk, rest, inputs) = (desk.clone(), self.rest.clone(), self.inputs);
            let waits_for_rest = number >= always;
            let name = format!("unisono-helper-{}-{number}", self.rank);
            let helper = std::thread::Builder::new().name(name).spawn(move || {
                let mut room = Room::with_capacity(inputs);
                while !desk.closed.load(Ordering::SeqCst) {
                    if waits_for_rest {
                        rest.wait(&desk.closed);
                    }
                    let is_enough = || waits_for_rest && !rest.is_on();
                    serve(&*desk, is_enough, |job, part| help(&desk, job, part, &mut room));
                }
            });
            match helper {
                Ok(helper) => self.threads.push(helper),
                // The call goes on with those that there are.
                Err(error) => log::warn!("cannot start a helper of rank {}: {error}", self.rank),
            }
        }
        self.desk = Some(desk);
    }
}

/// Does a part that was taken.
fn help(desk: &Desk, job: Job, part: usize, room: &mut Room) {
    // SAFETY: the part was taken, so the call that wrote down the job waits for it to be finished,
    // and has promised that several threads may work at the same time.
    let work = || unsafe { (job.part)(job.work, part, room) };
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        desk.panicked.store(true, Ordering::Relaxed);
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let Some(desk) = &self.desk else { return };
        desk.closed.store(true, Ordering::SeqCst);
        desk.wake();
        self.rest.wake();
        for helper in self.threads.drain(..) {
            if helper.join().is_err() {
                log::error!("a helper of rank {} panicked", self.rank);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn shares_are_the_block() {
        for (count, size) in [(0, 4), (1, 8), (15, 4), (16, 4), (17, 4), (1000, 2), (65_536, 1)] {
            for parts in 1..10 {
                let mut next = 0;
                for part in 0..parts {
                    let share = Share { part, parts }.of(count, size);
                    assert_eq!(share.start, next, "{count} elements in {parts} parts");
                    assert!((share.start * size).is_multiple_of(64) || share.is_empty());
                    next = share.end;
                }
                assert_eq!(next, count);
            }
        }
    }

    fn helpers(always: usize, resting: usize) -> Helpers {
        Helpers::new(0, Threads { always, resting }, 1, true, Arc::default())
    }

    #[test]
    fn cores_that_are_left_help() {
        let threads = |asked, cores, computing| {
            let Threads { always, resting } = Threads::of(asked, cores, computing);
            (always, resting)
        };
        assert_eq!(threads(Some(3), 1, Some(1)), (3, 3));
        assert_eq!(threads(None, 8, None), (1, 4), "nobody knows what the program computes with");
        assert_eq!(threads(None, 8, Some(4)), (4, 4));
        assert_eq!(threads(None, 4, Some(4)), (1, 4));
        assert_eq!(threads(None, 2, Some(1)), (1, 2));
        assert_eq!(threads(None, 4, Some(16)), (1, 4));
        assert_eq!(threads(None, 1, Some(1)), (1, 1));
        assert_eq!(threads(None, 0, Some(1)), (1, 1), "more ranks than cores");
        assert_eq!(threads(None, 64, Some(1)), (MOST, MOST));
    }

    #[test]
    fn every_part_is_done_once() {
        let mut helpers = helpers(4, 4);
        helpers.engage(LARGE_CALL);
        for parts in [1, 2, 7, 300] {
            for _ in 0..200 {
                let done: Vec<AtomicU32> = (0..parts).map(|_| AtomicU32::new(0)).collect();
                let work = |part: usize, _: &mut Room| {
                    done[part].fetch_add(1, Ordering::Relaxed);
                };
                // SAFETY: it may be called at the same time.
                unsafe { helpers.each(parts, &mut Room::new(), &work) };
                assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_small_call_starts_no_thread() {
        let mut helpers = helpers(4, 4);
        helpers.engage(LARGE_CALL - 1);
        assert!(helpers.threads.is_empty());
        helpers.engage(LARGE_CALL);
        assert_eq!(helpers.threads.len(), 3);
    }

    #[test]
    fn some_help_only_while_the_program_rests() {
        let mut helpers = helpers(1, 2);
        helpers.engage(LARGE_CALL);
        let rest = helpers.rest.clone();
        let caller = std::thread::current().id();
        for round in 0..50 {
            assert!(!helpers.are_engaged());
            let work = |_: Share, _: &mut Room| {
                assert_eq!(std::thread::current().id(), caller);
            };
            // SAFETY: it may be called at the same time.
            unsafe { helpers.share(LARGE_CALL, &mut Room::new(), &work) };

            let resting = rest.begin();
            let again = (round % 2 == 0).then(|| rest.begin());
            assert!(helpers.are_engaged());
            let met = std::sync::Barrier::new(2);
            // One part for each of the two threads, or this hangs.
            // SAFETY: it may be called at the same time.
            unsafe { helpers.each(2, &mut Room::new(), &|_, _| _ = met.wait()) };
            drop(resting);
            assert_eq!(helpers.are_engaged(), again.is_some());
        }
    }

    #[test]
    fn a_panic_of_a_helper_is_one_of_the_call() {
        let mut helpers = helpers(2, 2);
        helpers.engage(LARGE_CALL);
        let caller = std::thread::current().id();
        let met = std::sync::Barrier::new(2);
        let work = |_: usize, _: &mut Room| {
            // One part for each of the two threads.
            met.wait();
            assert_eq!(std::thread::current().id(), caller, "on purpose");
        };
        // SAFETY: it may be called at the same time.
        let call = || unsafe { helpers.each(2, &mut Room::new(), &work) };
        assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
    }
}
