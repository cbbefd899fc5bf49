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

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Bytes of a call from which on helpers take part. Larger: calls of some megabytes leave cores idle. Smaller:
/// waking the helpers takes longer than they save.
const LARGE_CALL: usize = 1 << 20;

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

/// Busy turns of the thread of a call that waits for parts which helpers have taken, before it gives its core
/// to others that can run.
const JOIN_SPINS: u32 = 2000;

/// Room for the list of a fold's inputs.
pub type Room = Vec<*const u8>;

/// What a rank and its helpers share. Implemented on real memory, and on a model checker's in the tests.
pub trait Board {
    /// What helpers need to know of a job.
    type Job;
    /// The word: the number of the job, and in the lowest 16 bits how many of its parts nobody has taken.
    fn word(&self) -> u64;
    /// Writes the word; sequentially consistent with [`Board::sleepers`].
    fn set_word(&self, word: u64);
    /// Replaces the word by the next smaller one, if it still is `word`.
    fn take(&self, word: u64) -> bool;
    /// Writes down what helpers need to know; visible with the next word.
    fn set_job(&self, job: Self::Job);
    /// What was written down last.
    fn job(&self) -> Self::Job;
    /// Sets how many parts are unfinished.
    fn set_unfinished(&self, parts: u32);
    /// One part less is unfinished; who sees that sees what the part has written.
    fn finish(&self);
    /// How many parts are unfinished.
    fn unfinished(&self) -> u32;
    /// How many helpers sleep, or are about to.
    fn sleepers(&self) -> u32;
    /// Announces a sleeper and sleeps while `is_idle`, which is looked at after the announcement and before every
    /// sleep; may return early.
    fn sleep(&self, is_idle: impl Fn() -> bool);
    /// Wakes all sleepers.
    fn wake(&self);
    /// Whether the helpers are to end.
    fn is_closed(&self) -> bool;
    /// One turn of a helper's busy wait; `false` when it is time to sleep.
    fn spin(&self, turn: u32) -> bool;
    /// One turn of the wait for the last parts.
    fn linger(&self, turn: u32);
}

/// The bits of the word that count parts.
const PARTS_LEFT: u64 = 0xffff;

/// Does a job of so many parts, with the helpers that come. `work` is called for some of the parts; for the
/// others, a helper does the job that was written down.
pub fn share<B: Board>(board: &B, job: B::Job, parts: u32, mut work: impl FnMut(usize)) {
    assert!(0 < parts && u64::from(parts) <= PARTS_LEFT);
    board.set_job(job);
    board.set_unfinished(parts);
    let number = (board.word() | PARTS_LEFT).wrapping_add(1);
    board.set_word(number | u64::from(parts));
    if board.sleepers() > 0 {
        board.wake();
    }
    // Also if the work panics: helpers use the memory of a job until its last part is finished.
    let _end = End { board };
    while let Some(part) = take_part(board) {
        let _finish = Finish { board };
        work(part);
    }
}

/// Does parts of jobs, by `work`, until the board is closed.
pub fn serve<B: Board>(board: &B, mut work: impl FnMut(B::Job, usize)) {
    let mut turn = 0;
    while !board.is_closed() {
        let word = board.word();
        if word & PARTS_LEFT == 0 {
            if board.spin(turn) {
                turn += 1;
            } else {
                board.sleep(|| board.word() & PARTS_LEFT == 0 && !board.is_closed());
                turn = 0;
            }
            continue;
        }
        turn = 0;
        // The next job is written down only when all parts of this one are finished. So if a part of it can still be taken,
        // what was read is what belongs to it.
        let job = board.job();
        if board.take(word) {
            let _finish = Finish { board };
            work(job, (word & PARTS_LEFT) as usize - 1);
        }
    }
}

fn take_part(board: &impl Board) -> Option<usize> {
    loop {
        let word = board.word();
        let left = word & PARTS_LEFT;
        if left == 0 {
            return None;
        }
        if board.take(word) {
            return Some(left as usize - 1);
        }
    }
}

/// A part is finished, also by a panic.
struct Finish<'a, B: Board> {
    board: &'a B,
}

impl<B: Board> Drop for Finish<'_, B> {
    fn drop(&mut self) {
        self.board.finish();
    }
}

/// The end of a job: nobody takes parts any more, and all that were taken are finished.
struct End<'a, B: Board> {
    board: &'a B,
}

impl<B: Board> Drop for End<'_, B> {
    fn drop(&mut self) {
        // After a panic there are parts left; whoever takes them has nothing to do.
        while take_part(self.board).is_some() {
            self.board.finish();
        }
        let mut turn = 0;
        while self.board.unfinished() > 0 {
            self.board.linger(turn);
            turn = turn.saturating_add(1);
        }
    }
}

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
    pub fn of(self, count: usize, size: usize) -> Range<usize> {
        let line = 64 / size;
        let cut = |part: usize| match part == self.parts {
            true => count,
            false => (count / line * part / self.parts) * line,
        };
        cut(self.part)..cut(self.part + 1)
    }
}

/// How many threads a rank has for one call: as many as were asked for, or what is left of its cores.
///
/// A rank has as many of the host's cores as every other. Without a word about the program it is taken to
/// compute with all of them.
pub fn threads(asked: Option<usize>, cores: usize, computing: Option<usize>) -> usize {
    let left = || cores.saturating_sub(computing.unwrap_or(cores)).clamp(1, MOST);
    asked.unwrap_or_else(left).max(1)
}

/// The helpers of one rank of a group: threads that start with the first large call, sleep between calls and end
/// with this value.
pub struct Helpers {
    rank: usize,
    /// Helpers that the rank may have.
    most: usize,
    /// Inputs of a fold at most.
    inputs: usize,
    /// Busy turns of a helper.
    spins: u32,
    desk: Option<Arc<Desk>>,
    threads: Vec<JoinHandle<()>>,
    /// Whether they take part in the call that runs.
    engaged: bool,
}

impl Helpers {
    /// Of a rank with so many threads for one call; `spins` where they have cores of their own.
    pub fn new(rank: usize, threads: usize, inputs: usize, spins: bool) -> Helpers {
        let (most, spins) = (threads - 1, if spins { SPINS } else { 0 });
        Helpers { rank, most, inputs, spins, desk: None, threads: Vec::new(), engaged: false }
    }

    /// None at all.
    #[cfg(test)]
    pub fn none() -> Helpers {
        Helpers::new(0, 1, 0, false)
    }

    /// A call of so many bytes begins.
    pub fn engage(&mut self, bytes: usize) {
        self.engaged = self.most > 0 && bytes >= LARGE_CALL;
        if self.engaged && self.desk.is_none() {
            self.start();
        }
    }

    /// Whether helpers take part in this call.
    pub fn are_engaged(&self) -> bool {
        self.engaged && !self.threads.is_empty()
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
        let parts = (bytes / GRAIN).min(PARTS * (self.threads.len() + 1));
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
        unsafe fn part_of<W: Fn(usize, &mut Room)>(
            work: *const (),
            part: usize,
            room: &mut Room,
        ) {
            // SAFETY: the caller's promise.
            unsafe { (*work.cast::<W>())(part, room) }
        }
        let job = Job { work: std::ptr::from_ref(work).cast(), part: part_of::<W> };
        share(&**desk, job, parts as u32, |part| work(part, room));
        assert!(!desk.panicked.load(Ordering::Relaxed), "a helper panicked");
    }

    fn start(&mut self) {
        let desk = Arc::new(Desk::new(self.spins));
        for number in 0..self.most {
            let (desk, inputs) = (desk.clone(), self.inputs);
            let name = format!("unisono-helper-{}-{number}", self.rank);
            let helper = std::thread::Builder::new().name(name).spawn(move || {
                let mut room = Room::with_capacity(inputs);
                serve(&*desk, |job, part| {
                    // SAFETY: the part was taken, so the call that wrote down the job waits for it to be finished,
                    // and has promised that several threads may work at the same time.
                    let work = || unsafe { (job.part)(job.work, part, &mut room) };
                    if catch_unwind(AssertUnwindSafe(work)).is_err() {
                        desk.panicked.store(true, Ordering::Relaxed);
                    }
                });
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

impl Drop for Helpers {
    fn drop(&mut self) {
        let Some(desk) = &self.desk else { return };
        desk.closed.store(true, Ordering::SeqCst);
        desk.wake();
        for helper in self.threads.drain(..) {
            if helper.join().is_err() {
                log::error!("a helper of rank {} panicked", self.rank);
            }
        }
    }
}

/// A piece of work, and what does a part of it.
#[derive(Clone, Copy)]
struct Job {
    work: *const (),
    part: unsafe fn(*const (), usize, &mut Room),
}

/// A [`Board`] in the memory of this process.
#[repr(align(64))]
struct Desk {
    word: AtomicU64,
    work: AtomicPtr<()>,
    part: AtomicPtr<()>,
    sleepers: AtomicU32,
    closed: AtomicBool,
    panicked: AtomicBool,
    spins: u32,
    unfinished: Line<AtomicU32>,
    asleep: (Mutex<()>, Condvar),
}

/// A line of the cache of its own: the thread of a call looks at it while helpers take parts.
#[repr(align(64))]
struct Line<T>(T);

impl Desk {
    fn new(spins: u32) -> Desk {
        // Never called: the word says that there is no part to take.
        unsafe fn nothing(_: *const (), _: usize, _: &mut Room) {}
        let nothing: unsafe fn(*const (), usize, &mut Room) = nothing;
        Desk {
            word: AtomicU64::new(0),
            work: AtomicPtr::default(),
            part: AtomicPtr::new(nothing as *mut ()),
            sleepers: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            spins,
            unfinished: Line(AtomicU32::new(0)),
            asleep: Default::default(),
        }
    }
}

impl Board for Desk {
    type Job = Job;

    fn word(&self) -> u64 {
        self.word.load(Ordering::SeqCst)
    }

    fn set_word(&self, word: u64) {
        self.word.store(word, Ordering::SeqCst);
    }

    fn take(&self, word: u64) -> bool {
        let (taken, failed) = (Ordering::SeqCst, Ordering::Relaxed);
        self.word.compare_exchange(word, word - 1, taken, failed).is_ok()
    }

    fn set_job(&self, job: Job) {
        self.work.store(job.work.cast_mut(), Ordering::Release);
        self.part.store(job.part as *mut (), Ordering::Release);
    }

    fn job(&self) -> Job {
        let work = self.work.load(Ordering::Acquire).cast_const();
        let part = self.part.load(Ordering::Acquire);
        // SAFETY: only pointers to functions of this type are stored.
        let part = unsafe {
            std::mem::transmute::<*mut (), unsafe fn(*const (), usize, &mut Room)>(part)
        };
        Job { work, part }
    }

    fn set_unfinished(&self, parts: u32) {
        self.unfinished.0.store(parts, Ordering::Release);
    }

    fn finish(&self) {
        self.unfinished.0.fetch_sub(1, Ordering::Release);
    }

    fn unfinished(&self) -> u32 {
        self.unfinished.0.load(Ordering::Acquire)
    }

    fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::SeqCst)
    }

    fn sleep(&self, is_idle: impl Fn() -> bool) {
        let (lock, woken) = &self.asleep;
        let mut guard = lock.lock().expect("no panic while locked");
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while is_idle() {
            guard = woken.wait(guard).expect("no panic while locked");
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        let (lock, woken) = &self.asleep;
        // A sleeper that has looked is asleep when the lock is free.
        drop(lock.lock().expect("no panic while locked"));
        woken.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn spin(&self, turn: u32) -> bool {
        std::hint::spin_loop();
        turn < self.spins
    }

    fn linger(&self, turn: u32) {
        if turn < JOIN_SPINS && self.spins > 0 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_the_block() {
        for (count, size) in [(0, 4), (1, 8), (15, 4), (16, 4), (17, 4), (1000, 2), (65_536, 1)] {
            for parts in 1..10 {
                let mut next = 0;
                for part in 0..parts {
                    let share = Share { part, parts }.of(count, size);
                    assert_eq!(share.start, next, "{count} elements in {parts} parts");
                    assert!(share.start * size % 64 == 0 || share.is_empty());
                    next = share.end;
                }
                assert_eq!(next, count);
            }
        }
    }

    #[test]
    fn cores_that_are_left_help() {
        assert_eq!(threads(Some(3), 1, None), 3);
        assert_eq!(threads(None, 8, None), 1, "nobody knows what the program computes with");
        assert_eq!(threads(None, 8, Some(4)), 4);
        assert_eq!(threads(None, 8, Some(7)), 1);
        assert_eq!(threads(None, 4, Some(16)), 1);
        assert_eq!(threads(None, 64, Some(1)), MOST);
    }

    #[test]
    fn every_part_is_done_once() {
        let mut helpers = Helpers::new(0, 4, 1, true);
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
        let mut helpers = Helpers::new(0, 4, 1, true);
        helpers.engage(LARGE_CALL - 1);
        assert!(helpers.threads.is_empty());
        helpers.engage(LARGE_CALL);
        assert_eq!(helpers.threads.len(), 3);
    }

    #[test]
    fn a_panic_of_a_helper_is_one_of_the_call() {
        let mut helpers = Helpers::new(0, 2, 1, true);
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
