//! The calls of a group, in the order in which they were made.
//!
//! A blocking call on an idle group runs on the caller's thread: handing it to another one costs
//! more than a small all-reduce. Everything else is queued for a progress thread, which starts
//! with the first submission.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use super::engine::{Engine, Request};
use crate::error::Error;
use crate::state::{ASK_EVERY, GroupState};
use crate::work::{Work, WorkPool};

/// The queue of one rank of a group.
pub struct Queue {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    rank: usize,
    state: Arc<GroupState>,
}

struct Shared {
    line: Mutex<Line>,
    /// Signals the progress thread and whoever waits for the engine.
    change: Condvar,
    /// Used by whoever has set `Line::busy`.
    engine: Mutex<Engine>,
}

struct Line {
    requests: VecDeque<(Request, Work)>,
    /// Whether a call is running.
    busy: bool,
    closed: bool,
    pool: WorkPool,
}

impl Queue {
    pub fn new(engine: Engine, rank: usize) -> Queue {
        let state = engine.state.clone();
        let requests = VecDeque::with_capacity(64);
        let pool = WorkPool::of(state.clone());
        let line = Line { requests, busy: false, closed: false, pool };
        let shared =
            Shared { line: Mutex::new(line), change: Condvar::new(), engine: Mutex::new(engine) };
        Queue { shared: Arc::new(shared), thread: Mutex::default(), rank, state }
    }

    /// Runs a call after all earlier ones and waits for it.
    ///
    /// # Safety
    /// The request's memory is valid for its layouts, and nobody else uses it meanwhile.
    pub unsafe fn run(&self, request: Request) -> Result<(), Error> {
        self.state.note_caller();
        let mut line = self.shared.lock();
        if line.busy || !line.requests.is_empty() {
            drop(line);
            let work = self.enqueue(request);
            let _waits = self.state.wait_here(&work);
            loop {
                if let Some(outcome) = work.wait_until(Instant::now() + ASK_EVERY) {
                    return outcome;
                }
                self.state.ask_to_stop();
            }
        }
        line.busy = true;
        drop(line);
        // SAFETY: passed on from the caller.
        let outcome = unsafe { self.shared.engine().execute(&request) };
        self.shared.release();
        outcome
    }

    /// Queues a call.
    ///
    /// # Safety
    /// The request's memory is valid for its layouts, and nobody else uses it, until the work is
    /// done.
    pub unsafe fn submit(&self, request: Request) -> Work {
        self.state.note_caller();
        self.enqueue(request)
    }

    fn enqueue(&self, request: Request) -> Work {
        self.start_thread();
        let mut line = self.shared.lock();
        let work = line.pool.take();
        line.requests.push_back((request, work.clone()));
        drop(line);
        self.shared.change.notify_all();
        work
    }

    /// Uses the engine between calls.
    pub fn with_engine<R>(&self, action: impl FnOnce(&mut Engine) -> R) -> R {
        action(&mut self.shared.engine())
    }

    /// What is left to do when the group is dropped.
    pub fn closing(&mut self) -> Closing {
        let thread = self.thread.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        Closing { shared: self.shared.clone(), thread: thread.take() }
    }

    fn start_thread(&self) {
        let mut thread = self.thread.lock().expect("no panic while locked");
        if thread.is_some() {
            return;
        }
        let (shared, state) = (self.shared.clone(), self.state.clone());
        let name = format!("unisono-progress-{}", self.rank);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            state.note_progress();
            shared.serve();
        });
        *thread = Some(spawned.expect("the system can start one more thread"));
    }
}

/// A queue that takes no more calls.
pub struct Closing {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Closing {
    /// Whether this is the progress thread, which cannot wait for its own end.
    pub fn is_on_own_thread(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| t.thread().id() == std::thread::current().id())
    }

    /// Runs what is queued, then ends the progress thread; the number of calls made.
    pub fn finish(self) -> u32 {
        self.shared.lock().closed = true;
        self.shared.change.notify_all();
        if let Some(thread) = self.thread
            && thread.join().is_err()
        {
            log::error!("the progress thread of a group panicked");
        }
        self.shared.engine().seq()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().expect("no panic while locked")
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().expect("calls do not panic")
    }

    /// The engine is free again.
    fn release(&self) {
        let mut line = self.lock();
        line.busy = false;
        if !line.requests.is_empty() {
            self.change.notify_all();
        }
    }

    /// The progress thread.
    fn serve(&self) {
        let mut line = self.lock();
        loop {
            if line.busy || line.requests.is_empty() {
                if line.closed && line.requests.is_empty() {
                    return;
                }
                line = self.change.wait(line).expect("no panic while locked");
                continue;
            }
            let (request, work) = line.requests.pop_front().expect("checked above");
            line.busy = true;
            drop(line);
            // SAFETY: whoever submitted the request keeps its memory valid until the work is
            // done.
            let outcome = unsafe { self.engine().execute(&request) };
            // The end of this call is seen before the group is seen idle, so that no later call
            // ends first; and the group is idle for whoever was woken by the end.
            line = self.lock();
            line.busy = false;
            let ended = work.end(outcome);
            drop(line);
            ended.notify();
            drop(work);
            line = self.lock();
        }
    }
}
