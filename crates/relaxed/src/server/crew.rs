//! Threads of a server that help others with large updates.
//!
//! One core moves only a part of what the memory of a host can. So where cores have nothing to do, the thread that makes
//! a large update *shares* it: it says what is to be done, does it as if it were alone, and helpers that come do some of
//! it. What is to be done must be such that any number of threads may do it at the same time, each taking what no other
//! has taken yet. So the thread never waits for a helper that has not come; it waits for those that have, until they have
//! finished what they took.
//!
//! Helpers start when there is first something for them, sleep in between, and end with the server.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::store::Abandoned;

/// Threads that help.
#[derive(Default)]
pub struct Crew {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    board: Mutex<Board>,
    /// There is a job that wants helpers, or the crew is dismissed.
    posted: Condvar,
    /// No helper is in some job any more.
    left: Condvar,
}

#[derive(Default)]
struct Board {
    jobs: Vec<Job>,
    /// Jobs so far.
    count: u64,
    /// Helpers that there are, or will be as soon as they have started.
    helpers: usize,
    /// Helpers that have not been here yet.
    starting: usize,
    /// Helpers that wait for a job.
    idle: usize,
    is_dismissed: bool,
}

/// What some thread shares.
struct Job {
    number: u64,
    work: Work,
    /// Helpers that may still come.
    wanted: usize,
    /// Helpers that are in it.
    inside: usize,
    panic: Panic,
}

/// What threads unwound with, if they did.
type Panic = Option<Box<dyn Any + Send>>;

/// Work that lives until its job is taken from the board.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn() + Sync));

// SAFETY: what it points to may be called from any thread, for it is `Sync`.
unsafe impl Send for Work {}

impl Crew {
    /// Does some work, together with so many helpers at most; the crew has `most` threads, all jobs together. Returns when
    /// none is at it any more. Unwinds if the work does, on whichever thread.
    pub fn share(&self, helpers: usize, most: usize, work: &(dyn Fn() + Sync)) {
        if helpers == 0 {
            return work();
        }
        let number = self.post(helpers, most, work);
        let own = catch_unwind(AssertUnwindSafe(work));
        let of_helper = self.shared.take_down(number);
        if let Some(panic) = cause(own.err(), of_helper) {
            resume_unwind(panic);
        }
    }

    fn post(&self, wanted: usize, most: usize, work: &(dyn Fn() + Sync)) -> u64 {
        let work: *const (dyn Fn() + Sync + '_) = work;
        // SAFETY: only the lifetime changes. Whoever posts work does not return before it has taken it down, which waits
        // for all helpers that are in it; no other calls it.
        let work = Work(unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(
                work,
            )
        });
        let mut board = self.shared.lock();
        board.count += 1;
        let number = board.count;
        board.jobs.push(Job { number, work, wanted, inside: 0, panic: None });
        let missing = board.missing().min(most.saturating_sub(board.helpers));
        board.helpers += missing;
        board.starting += missing;
        drop(board);
        (0..wanted).for_each(|_| self.shared.posted.notify_one());
        self.enlist(missing);
        number
    }

    /// Starts so many more threads, which the board counts already.
    fn enlist(&self, missing: usize) {
        if missing == 0 {
            return;
        }
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for started in 0..missing {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("unisono-update".into());
            let Ok(thread) = thread.spawn(move || shared.help()) else {
                // Where the system has no more threads, the others do it.
                let mut board = self.shared.lock();
                board.helpers -= missing - started;
                board.starting -= missing - started;
                return;
            };
            threads.push(thread);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().is_dismissed = true;
        self.shared.posted.notify_all();
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = thread.join();
        }
    }
}

impl Board {
    /// Helpers that the jobs want, beyond those that wait or are about to come.
    fn missing(&self) -> usize {
        let wanted: usize = self.jobs.iter().map(|job| job.wanted).sum();
        wanted.saturating_sub(self.idle + self.starting)
    }
}

impl Shared {
    /// What a helper does, until it is dismissed.
    fn help(&self) {
        let mut board = self.lock();
        board.starting -= 1;
        while !board.is_dismissed {
            let Some(job) = board.jobs.iter_mut().find(|job| job.wanted > 0) else {
                board.idle += 1;
                board = self.posted.wait(board).unwrap_or_else(PoisonError::into_inner);
                board.idle -= 1;
                continue;
            };
            job.wanted -= 1;
            job.inside += 1;
            let (number, work) = (job.number, job.work);
            drop(board);
            // SAFETY: the job is on the board, and stays there as long as this thread is inside; so the work lives.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)() }));
            board = self.lock();
            let job = board.jobs.iter_mut().find(|job| job.number == number);
            let job = job.expect("a job stays while a helper is inside");
            job.inside -= 1;
            job.panic = cause(done.err(), job.panic.take());
            if job.inside == 0 {
                self.left.notify_all();
            }
        }
    }

    /// Lets no more helpers into a job, and waits for those that are in it: what one unwound with.
    fn take_down(&self, number: u64) -> Panic {
        let mut board = self.lock();
        loop {
            let at = board.jobs.iter().position(|job| job.number == number);
            let at = at.expect("only the thread that posted a job takes it down");
            board.jobs[at].wanted = 0;
            if board.jobs[at].inside == 0 {
                return board.jobs.swap_remove(at).panic;
            }
            board = self.left.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nothing that is done under the lock panics half-way.
    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one of two panics that is no consequence of another. The thread that shares must not unwind
/// [silently](Abandoned) with a consequence of what it is the only one to tell.
fn cause(one: Panic, other: Panic) -> Panic {
    let is_consequence = one.as_ref().is_some_and(|panic| panic.is::<Abandoned>());
    if is_consequence { other.or(one) } else { one.or(other) }
}

#[cfg(test)]
impl Crew {
    /// Threads that it has so far.
    pub fn threads(&self) -> usize {
        self.threads.lock().unwrap().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Several threads share work at the same time, and all of it is done once.
    #[test]
    fn all_is_done_once_whoever_comes() {
        let crew = Crew::default();
        std::thread::scope(|scope| {
            for sharer in 0..3usize {
                let crew = &crew;
                scope.spawn(move || {
                    for turn in 0..300 {
                        let done: Vec<AtomicUsize> = (0..20).map(|_| AtomicUsize::new(0)).collect();
                        let next = AtomicUsize::new(0);
                        let work = || {
                            while let Some(part) = done.get(next.fetch_add(1, Ordering::Relaxed)) {
                                part.fetch_add(1, Ordering::Relaxed);
                            }
                        };
                        crew.share((turn + sharer) % 4, 5, &work);
                        assert!(done.iter().all(|part| part.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
        assert!((1..=5).contains(&crew.threads()), "{}", crew.threads());
        assert!(crew.shared.lock().jobs.is_empty());
    }

    /// Even if no helper has come to the first of many jobs before the last is done.
    #[test]
    fn no_more_helpers_start_than_are_wanted() {
        for _ in 0..20 {
            let crew = Crew::default();
            (0..20).for_each(|_| crew.share(2, 9, &|| ()));
            assert_eq!(crew.threads(), 2);
        }
    }

    /// A helper that is in it is waited for, and what it unwinds with is not lost.
    #[test]
    fn a_panic_of_a_helper_is_one_of_the_thread_that_shares() {
        let crew = Crew::default();
        let (me, has_come) = (std::thread::current().id(), AtomicUsize::new(0));
        let work = || {
            if std::thread::current().id() == me {
                while has_come.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
            } else {
                has_come.store(1, Ordering::Release);
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        };
        let shared = catch_unwind(AssertUnwindSafe(|| crew.share(1, 1, &work)));
        assert_eq!(shared.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
        // The helper goes on.
        has_come.store(0, Ordering::Release);
        let came = AtomicUsize::new(0);
        crew.share(1, 1, &|| {
            came.fetch_add(1, Ordering::AcqRel);
            while came.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
        });
    }

    /// Of three threads that share something one panics, before or after what that does to the others.
    #[test]
    fn a_panic_is_not_lost_among_its_consequences() {
        for panics_first in [true, false] {
            let crew = Crew::default();
            let (me, has_come) = (std::thread::current().id(), AtomicUsize::new(0));
            let until = |is_true: &dyn Fn() -> bool| {
                while !is_true() {
                    std::thread::yield_now();
                }
            };
            let other_is_out = || crew.shared.lock().jobs[0].panic.is_some();
            let work = || {
                if std::thread::current().id() == me {
                    until(&|| has_come.load(Ordering::Acquire) == 2);
                    resume_unwind(Box::new(Abandoned));
                }
                let panics = (has_come.fetch_add(1, Ordering::AcqRel) == 0) == panics_first;
                // None that comes first waits for the other, or that might never come.
                if panics != panics_first {
                    until(&other_is_out);
                }
                match panics {
                    true => resume_unwind(Box::new("on purpose")),
                    false => resume_unwind(Box::new(Abandoned)),
                }
            };
            let shared = catch_unwind(AssertUnwindSafe(|| crew.share(2, 2, &work)));
            assert_eq!(shared.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
        }
    }
}
