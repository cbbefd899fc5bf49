//! A [`Board`] in the memory of this process.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use super::Room;
use super::board::Board;

/// Busy turns of the thread of a call that waits for parts which helpers have taken, before it gives its core
/// to others that can run.
const JOIN_SPINS: u32 = 2000;

/// A piece of work, and what does a part of it.
#[derive(Clone, Copy)]
pub struct Job {
    pub work: *const (),
    pub part: unsafe fn(*const (), usize, &mut Room),
}

/// A [`Board`] in the memory of this process.
#[repr(align(64))]
pub struct Desk {
    word: AtomicU64,
    work: AtomicPtr<()>,
    part: AtomicPtr<()>,
    sleepers: AtomicU32,
    pub closed: AtomicBool,
    pub panicked: AtomicBool,
    spins: u32,
    unfinished: Line<AtomicU32>,
    asleep: (Mutex<()>, Condvar),
}

/// A line of the cache of its own: the thread of a call looks at it while helpers take parts.
#[repr(align(64))]
struct Line<T>(T);

impl Desk {
    pub fn new(spins: u32) -> Desk {
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
        let part =
            unsafe { std::mem::transmute::<*mut (), unsafe fn(*const (), usize, &mut Room)>(part) };
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
