//! The calls of a group, in the order in which they were made.
//!
//! A blocking call on an idle group runs on the caller's thread: handing it to another one costs
//! more than a small all-reduce. Everything else is queued for a progress thread, which starts
//! with the first submission; a thread that waits for the next call of the queue runs it itself if
//! the progress thread has not come to it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId};

use super::calls::Calls;
use crate::call::Call;
use crate::error::Error;
use crate::helpers::LARGE_CALL;
use crate::registered::Allocation;
use crate::request::Checked;
use crate::state::GroupState;
use crate::work::{RunsCalls, Work, WorkPool};

/// What the progress thread does between calls.
type Task = Box<dyn FnOnce() + Send>;

/// The queue of one rank of a group.
pub struct Queue {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    line: Mutex<Line>,
    /// Signals the progress thread.
    change: Condvar,
    /// Used by the thread that has set `Line::busy`.
    calls: Mutex<Calls>,
    state: Arc<GroupState>,
}

struct Line {
    entries: VecDeque<(Entry, Work)>,
    /// Whether a call or a task is running.
    busy: bool,
    /// The thread that runs a task, whose calls do not wait in line.
    in_task: Option<ThreadId>,
    closed: bool,
    pool: WorkPool,
}

enum Entry {
    Call(u32, Checked<'static>),
    Task(Task),
}

impl Queue {
    pub fn new(calls: Calls, state: Arc<GroupState>) -> Queue {
        let shared = Arc::new_cyclic(|shared: &Weak<Shared>| {
            let entries = VecDeque::with_capacity(64);
            let pool = WorkPool::of(state.clone(), shared.clone());
            let line = Line { entries, busy: false, in_task: None, closed: false, pool };
            let (line, calls) = (Mutex::new(line), Mutex::new(calls));
            Shared { line, change: Condvar::new(), calls, state }
        });
        Queue { shared, thread: Mutex::default() }
    }

    /// Runs a call after all earlier ones and waits for it; its number.
    pub fn run(&self, mut request: Checked<'_>) -> Result<u32, Error> {
        let mut line = self.shared.lock();
        let number = self.shared.state.number_call();
        let in_task = line.in_task.is_some_and(|thread| thread == std::thread::current().id());
        // The program waits here. What a task waits for, it does not.
        let is_large = request.bytes() >= LARGE_CALL;
        let _resting = (is_large && !in_task).then(|| self.shared.state.rest().begin());
        if !in_task && (line.busy || !line.entries.is_empty()) {
            self.start_thread();
            // SAFETY: the memory is borrowed until the wait is over.
            let request = unsafe { request.outlive() };
            let work = self.shared.push(line, Some(number), Entry::Call(number, request));
            return work.wait().map(|()| number);
        }
        line.busy = true;
        drop(line);
        let outcome = self.shared.use_engine(|calls| calls.make(number, &mut request));
        if !in_task {
            self.shared.release();
        }
        outcome.map(|()| number)
    }

    /// Queues a call.
    pub fn submit(&self, request: Checked<'static>) -> Work {
        self.start_thread();
        let line = self.shared.lock();
        let number = self.shared.state.number_call();
        self.shared.push(line, Some(number), Entry::Call(number, request))
    }

    /// Queues a task.
    pub fn submit_task(&self, task: Task) -> Work {
        self.start_thread();
        self.shared.push(self.shared.lock(), None, Entry::Task(task))
    }

    /// Allocates memory that other ranks read in place, after all earlier calls.
    pub fn allocate(&self, bytes: usize) -> Result<Arc<Allocation>, Error> {
        let mut line = self.shared.lock();
        let numbers = [self.shared.state.number_call(), self.shared.state.number_call()];
        let in_task = line.in_task.is_some_and(|thread| thread == std::thread::current().id());
        if !in_task && (line.busy || !line.entries.is_empty()) {
            let (shared, allocated) = (self.shared.clone(), Arc::new(Mutex::new(None)));
            let result = allocated.clone();
            let task = move || {
                let outcome = shared.use_engine(|calls| calls.allocate(numbers, bytes));
                *result.lock().expect("no panic while locked") = Some(outcome);
            };
            self.start_thread();
            self.shared.push(line, None, Entry::Task(Box::new(task))).wait()?;
            let outcome = allocated.lock().expect("no panic while locked").take();
            return outcome.expect("the task has ended well");
        }
        line.busy = true;
        drop(line);
        let outcome = self.shared.use_engine(|calls| calls.allocate(numbers, bytes));
        if !in_task {
            self.shared.release();
        }
        outcome
    }

    /// Uses the engine between calls.
    pub fn with_calls<R>(&self, action: impl FnOnce(&mut Calls) -> R) -> R {
        action(&mut self.shared.calls())
    }

    /// What is left to do when the group is dropped.
    pub fn closing(&mut self) -> Closing {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        Closing { shared: self.shared.clone(), thread: thread.take() }
    }

    fn start_thread(&self) {
        let mut thread = self.thread.lock().expect("no panic while locked");
        if thread.is_some() {
            return;
        }
        let shared = self.shared.clone();
        let name = format!("unisono-progress-{}", shared.state.rank());
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            shared.state.note_progress();
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

    /// Runs what is queued, then ends the progress thread; the place of the first call that was not
    /// made.
    pub fn finish(self) -> u32 {
        self.shared.lock().closed = true;
        self.shared.change.notify_all();
        if let Some(thread) = self.thread
            && thread.join().is_err()
        {
            log::error!("the progress thread of a group panicked");
        }
        let [_, first] = Call::places(Call::after(self.shared.state.calls()));
        first
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().expect("no panic while locked")
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, mut line: MutexGuard<'_, Line>, number: Option<u32>, entry: Entry) -> Work {
        let work = line.pool.take(number);
        line.entries.push_back((entry, work.clone()));
        drop(line);
        self.change.notify_all();
        work
    }

    /// Uses the engine. Should that panic, which is a defect of the engine, the group ends with an error that says so:
    /// the calls after it end like those of any group that has failed, and no thread waits for ever.
    fn use_engine<R>(
        &self,
        action: impl FnOnce(&mut Calls) -> Result<R, Error>,
    ) -> Result<R, Error> {
        // Locked outside, so that the panic does not poison it.
        let mut calls = self.calls();
        catch_unwind(AssertUnwindSafe(|| action(&mut calls))).unwrap_or_else(|_| {
            self.state.fail(Error::System { what: "a call", reason: "it panicked".into() });
            Err(self.state.settled_error(None))
        })
    }

    /// The engine is free again.
    fn release(&self) {
        let mut line = self.lock();
        line.busy = false;
        self.call_progress_thread(&line);
    }

    /// Wakes the progress thread if there is something for it to do, after the line was busy for another thread.
    fn call_progress_thread(&self, line: &Line) {
        if line.closed || !line.entries.is_empty() {
            self.change.notify_all();
        }
    }

    /// The progress thread.
    fn serve(&self) {
        let mut line = self.lock();
        loop {
            if line.busy || line.entries.is_empty() {
                // A waiting thread may run the last call. The rank has not left before that has ended.
                if line.closed && line.entries.is_empty() && !line.busy {
                    return;
                }
                line = self.change.wait(line).expect("no panic while locked");
                continue;
            }
            let (entry, work) = line.entries.pop_front().expect("checked above");
            line.busy = true;
            if let Entry::Task(_) = entry {
                line.in_task = Some(std::thread::current().id());
            }
            drop(line);
            self.perform(entry, work);
            line = self.lock();
        }
    }

    /// Runs what was taken from the line, which is busy for it.
    fn perform(&self, entry: Entry, work: Work) {
        let outcome = match entry {
            Entry::Call(number, mut request) => {
                self.use_engine(|calls| calls.make(number, &mut request))
            }
            Entry::Task(task) => catch_unwind(AssertUnwindSafe(task)).map_err(|_| {
                let reason = "it panicked".into();
                Error::System { what: "a task", reason }
            }),
        };
        // The end of this call is seen before the group is seen idle, so that no later call
        // ends first; and the group is idle for the caller that the end woke.
        let mut line = self.lock();
        (line.busy, line.in_task) = (false, None);
        let ended = work.end(outcome);
        // The progress thread goes on while callbacks run here.
        self.call_progress_thread(&line);
        drop(line);
        ended.notify();
    }
}

impl RunsCalls for Shared {
    fn run_if_next(&self, work: &Work) -> bool {
        let mut line = self.lock();
        let next = line.entries.front();
        let is_next = next.is_some_and(|(entry, next)| {
            matches!(entry, Entry::Call(..)) && next.is(work) && !line.busy
        });
        if !is_next {
            return false;
        }
        let (entry, work) = line.entries.pop_front().expect("checked above");
        line.busy = true;
        drop(line);
        self.perform(entry, work);
        true
    }
}
