//! How a rank and its helpers share a job, under thousands of thread schedules.
//!
//! The product's [`share`] and [`serve`] run on a [`Board`] whose every access is a point at which `shuttle` may
//! switch threads. The memory of a job is its name for as long as the job lasts: a helper that works for a job which is
//! over, or takes one for another, finds something else. Sleeping has no time limit, so that a lost wake-up is a
//! deadlock, which shuttle reports.
//!
//! The second half breaks one promise at a time and requires that the exploration notices.

use std::panic::{AssertUnwindSafe, catch_unwind};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner, thread};
use unisono_collective::internals::{Board, serve, share};

/// The promise that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// A part is taken of whatever job and whichever part it is by now.
    TakesAnyJob,
    /// Two threads may take the same part.
    TakesTwice,
    /// The word is written before what it is about.
    WritesJobLate,
    /// The last part counts as finished when it is taken.
    GoesOnEarly,
    /// A sleeper does not look whether there is something to do.
    SleepsBlindly,
    /// The end of the helpers wakes none.
    WakesNobody,
}

struct Model {
    fault: Fault,
    spins: u32,
    word: AtomicU64,
    job: AtomicU64,
    /// A job that is to be written down late.
    late: AtomicU64,
    unfinished: AtomicU32,
    sleepers: AtomicU32,
    asleep: (Mutex<()>, Condvar),
    closed: AtomicBool,
    /// The memory of the job that lasts: its name, and how often each part was done.
    memory: AtomicU64,
    done: Vec<AtomicU32>,
}

impl Board for Model {
    type Job = u64;

    fn word(&self) -> u64 {
        self.word.load(SeqCst)
    }

    fn set_word(&self, word: u64) {
        self.word.store(word, SeqCst);
        if self.fault == Fault::WritesJobLate {
            self.job.store(self.late.load(SeqCst), SeqCst);
        }
    }

    fn take(&self, word: u64) -> bool {
        match self.fault {
            Fault::TakesAnyJob => {
                let now = self.word.load(SeqCst);
                let is_open = now & 0xffff > 0;
                is_open && self.word.compare_exchange(now, now - 1, SeqCst, SeqCst).is_ok()
            }
            Fault::TakesTwice => {
                let is_same = self.word.load(SeqCst) == word;
                if is_same {
                    self.word.store(word - 1, SeqCst);
                }
                is_same
            }
            _ => self.word.compare_exchange(word, word - 1, SeqCst, SeqCst).is_ok(),
        }
    }

    fn set_job(&self, job: u64) {
        match self.fault {
            Fault::WritesJobLate => self.late.store(job, SeqCst),
            _ => self.job.store(job, SeqCst),
        }
    }

    fn job(&self) -> u64 {
        self.job.load(SeqCst)
    }

    fn set_unfinished(&self, parts: u32) {
        let early = u32::from(self.fault == Fault::GoesOnEarly);
        self.unfinished.store(parts - early, SeqCst);
    }

    fn finish(&self) {
        self.unfinished.fetch_sub(1, SeqCst);
    }

    fn unfinished(&self) -> u32 {
        // Beyond nothing is nothing.
        let unfinished = self.unfinished.load(SeqCst);
        if unfinished > u32::MAX / 2 { 0 } else { unfinished }
    }

    fn sleepers(&self) -> u32 {
        self.sleepers.load(SeqCst)
    }

    fn sleep(&self, is_idle: impl Fn() -> bool) {
        let (lock, woken) = &self.asleep;
        let mut guard = lock.lock().unwrap();
        self.sleepers.fetch_add(1, SeqCst);
        if self.fault == Fault::SleepsBlindly {
            guard = woken.wait(guard).unwrap();
        }
        while is_idle() {
            guard = woken.wait(guard).unwrap();
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    fn wake(&self) {
        if self.fault == Fault::WakesNobody {
            return;
        }
        drop(self.asleep.0.lock().unwrap());
        self.asleep.1.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    fn spin(&self, turn: u32) -> bool {
        thread::yield_now();
        turn < self.spins
    }

    fn linger(&self, _turn: u32) {
        thread::yield_now();
    }
}

/// Jobs of a rank, by their numbers of parts, and its helpers.
#[derive(Clone, Debug)]
struct Program {
    helpers: usize,
    jobs: Vec<u32>,
    spins: u32,
    fault: Fault,
}

/// What the memory of a job is when it is over.
const OVER: u64 = 0;

/// Does a part: what it works on must be there before and after.
fn work(model: &Model, job: u64, part: usize) {
    assert_eq!(model.memory.load(SeqCst), job, "work on another job");
    model.done[part].fetch_add(1, SeqCst);
    assert_eq!(model.memory.load(SeqCst), job, "the job has ended under a helper");
}

fn execute(program: &Program) {
    let most = program.jobs.iter().copied().max().unwrap_or(0);
    let model = Arc::new(Model {
        fault: program.fault,
        spins: program.spins,
        word: AtomicU64::new(0),
        job: AtomicU64::new(OVER),
        late: AtomicU64::new(OVER),
        unfinished: AtomicU32::new(0),
        sleepers: AtomicU32::new(0),
        asleep: (Mutex::new(()), Condvar::new()),
        closed: AtomicBool::new(false),
        memory: AtomicU64::new(OVER),
        done: (0..most).map(|_| AtomicU32::new(0)).collect(),
    });
    let helpers: Vec<_> = (0..program.helpers)
        .map(|_| {
            let model = model.clone();
            thread::spawn(move || serve(&*model, || false, |job, part| work(&model, job, part)))
        })
        .collect();
    for (number, &parts) in program.jobs.iter().enumerate() {
        let job = number as u64 + 1;
        model.done.iter().for_each(|done| done.store(0, SeqCst));
        model.memory.store(job, SeqCst);
        share(&*model, job, parts, |part| work(&model, job, part));
        for (part, done) in model.done.iter().enumerate() {
            let expected = u32::from(part < parts as usize);
            assert_eq!(done.load(SeqCst), expected, "part {part} of job {job}");
        }
        model.memory.store(OVER, SeqCst);
    }
    model.closed.store(true, SeqCst);
    model.wake();
    for helper in helpers {
        helper.join().unwrap();
    }
    assert_eq!(model.sleepers.load(SeqCst), 0);
}

fn explore(scheduler: impl Scheduler + 'static, program: &Program) {
    let mut config = Config::new();
    config.stack_size = 1 << 17;
    config.max_steps = MaxSteps::FailAfter(1_000_000);
    config.failure_persistence = FailurePersistence::Print;
    let program = program.clone();
    Runner::new(scheduler, config).run(move || execute(&program));
}

/// Seeds are fixed, so that a failure is found again.
fn holds(program: &Program, iterations: usize) {
    explore(RandomScheduler::new_from_seed(7, iterations), program);
    for depth in [2, 4] {
        explore(PctScheduler::new_from_seed(11, depth, iterations / 2), program);
    }
}

fn program(helpers: usize, jobs: &[u32]) -> Program {
    Program { helpers, jobs: jobs.to_vec(), spins: 0, fault: Fault::None }
}

#[test]
fn every_part_is_done_once_while_its_job_lasts() {
    holds(&program(1, &[1, 2, 3, 1, 2]), 4_000);
    holds(&program(2, &[3, 1, 4, 2]), 3_000);
    holds(&program(3, &[4, 4, 2]), 1_500);
}

#[test]
fn busy_waiting_changes_nothing() {
    holds(&Program { spins: 2, ..program(2, &[3, 1, 2]) }, 1_500);
}

#[test]
fn helpers_that_never_work_end() {
    holds(&program(3, &[]), 500);
}

/// Whether the exploration notices what is broken; the message of its panic.
fn notices(program: &Program) -> Option<String> {
    let attempt = catch_unwind(AssertUnwindSafe(|| holds(program, 4_000)));
    attempt.err().map(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default()
    })
}

#[test]
fn lost_wake_ups_are_noticed() {
    for fault in [Fault::SleepsBlindly, Fault::WakesNobody] {
        let message = notices(&Program { fault, ..program(1, &[2, 2]) });
        let message = message.unwrap_or_else(|| panic!("{fault:?} went unnoticed"));
        assert!(message.contains("deadlock"), "{fault:?}: {message}");
    }
}

#[test]
fn work_on_the_wrong_job_is_noticed() {
    for fault in [Fault::TakesAnyJob, Fault::TakesTwice, Fault::WritesJobLate, Fault::GoesOnEarly] {
        let message = notices(&Program { fault, ..program(2, &[2, 2, 2]) });
        let message = message.unwrap_or_else(|| panic!("{fault:?} went unnoticed"));
        assert!(!message.contains("deadlock"), "{fault:?}: {message}");
    }
}
