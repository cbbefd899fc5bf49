//! Handles to operations under way.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Instant;

use crate::error::Error;
use crate::state::{ASK_EVERY, GroupState};

type Outcome = Result<(), Error>;
type Callback = Box<dyn FnOnce(&Outcome) + Send>;

/// An operation that was submitted.
///
/// Dropping the handle does not cancel the operation: other ranks count on it.
#[derive(Clone)]
pub struct Work {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    progress: Mutex<Progress>,
    done: Condvar,
    /// The group whose call it is, if it is one: then a thread that waits for it waits in the group.
    group: Option<Arc<GroupState>>,
    /// The queue in which it waits, if it is a call.
    queue: Option<Weak<dyn RunsCalls>>,
}

/// The queue in which an operation waits.
pub(crate) trait RunsCalls: Send + Sync {
    /// Runs it on this thread if it is the next one and nothing is under way; whether it did.
    fn run_if_next(&self, work: &Work) -> bool;
}

#[derive(Default)]
struct Progress {
    /// The number of the call, if it is one.
    number: Option<u32>,
    outcome: Option<Outcome>,
    /// Whose message was received.
    source: Option<usize>,
    callbacks: Vec<Callback>,
}

impl Work {
    /// Waits until the operation has ended. If it is a call, asks now and then whether to
    /// [stop waiting](crate::Group::stop_waiting_if).
    pub fn wait(&self) -> Outcome {
        self.run_if_next();
        let _waits = self.waits_here();
        loop {
            if let Some(outcome) = self.wait_until(Instant::now() + ASK_EVERY) {
                return outcome;
            }
            if let Some(group) = &self.shared.group {
                group.ask_to_stop();
            }
        }
    }

    /// Runs the operation on this thread, if it is a call that has not begun and is the next of its
    /// group; whether it did. Then this takes as long as the call, like one that blocks. A thread that would only
    /// wait has the result sooner this way than if the progress thread woke up for it.
    pub fn run_if_next(&self) -> bool {
        let queue = self.shared.queue.as_ref().and_then(Weak::upgrade);
        queue.is_some_and(|queue| !self.is_done() && queue.run_if_next(self))
    }

    /// The number of the call in its group, from 1; `None` if it is a message or a task.
    pub fn number(&self) -> Option<u32> {
        self.lock().number
    }

    /// Says that this thread does nothing but wait for the operation, until what this returns is
    /// dropped: for callers that wait in pieces ([`Work::wait_until`]). Ranks that wait for each other
    /// in calls of different groups are found out by it.
    #[must_use]
    pub fn waits_here(&self) -> Option<impl Drop + use<>> {
        let group = self.shared.group.as_ref().filter(|_| !self.is_done());
        group.map(|group| group.wait_here(self))
    }

    /// As [`Group::program_rests`](crate::Group::program_rests), of the group whose call this is.
    #[must_use]
    pub fn program_rests(&self) -> Option<impl Drop + use<>> {
        self.shared.group.as_ref().map(|group| group.rest().begin())
    }

    /// Waits until the operation has ended or the deadline has passed, then `None`.
    pub fn wait_until(&self, deadline: Instant) -> Option<Outcome> {
        let mut progress = self.lock();
        loop {
            if let Some(outcome) = &progress.outcome {
                return Some(outcome.clone());
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            let waited = self.shared.done.wait_timeout(progress, left);
            progress = waited.expect("no panic while locked").0;
        }
    }

    /// Whether the operation has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// The rank whose message was received, if this was a receive and has ended well.
    pub fn source(&self) -> Option<usize> {
        self.lock().source
    }

    /// Calls `callback` when the operation has ended: at once if it has, else on the thread that
    /// ends it, which must not be kept waiting. That may be a thread that [waits](Work::wait) for it, so a callback takes
    /// no lock with which a thread waits; callbacks of different operations may run at the same time. A panic there is
    /// logged and goes no further.
    pub fn on_completion(&self, callback: impl FnOnce(&Result<(), Error>) + Send + 'static) {
        let mut progress = self.lock();
        match progress.outcome.clone() {
            None => progress.callbacks.push(Box::new(callback)),
            Some(outcome) => {
                drop(progress);
                callback(&outcome);
            }
        }
    }

    fn new(group: Option<Arc<GroupState>>, queue: Option<Weak<dyn RunsCalls>>) -> Work {
        Work { shared: Arc::new(Shared { group, queue, ..Shared::default() }) }
    }

    /// Whether both are handles to the same operation.
    pub(crate) fn is(&self, other: &Work) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Ends the operation; later endings are ignored.
    pub(crate) fn complete(&self, outcome: Outcome) {
        self.end(outcome).notify();
    }

    /// Ends a receive well: the message was of this rank.
    pub(crate) fn complete_from(&self, source: usize) {
        self.lock().source = Some(source);
        self.complete(Ok(()));
    }

    /// As [`Work::complete`], but leaves it to the caller when to tell.
    #[must_use]
    pub(crate) fn end(&self, outcome: Outcome) -> Ended<'_> {
        let mut progress = self.lock();
        if progress.outcome.is_none() {
            progress.outcome = Some(outcome.clone());
        }
        Ended { work: self, outcome, callbacks: std::mem::take(&mut progress.callbacks) }
    }

    /// Whether no other thread holds this handle, so that it can serve the next operation.
    fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    fn reset(&self, number: Option<u32>) {
        *self.lock() = Progress { number, ..Progress::default() };
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.shared.progress.lock().expect("no panic while locked")
    }
}

/// An operation that has ended, before its waiters and callbacks are told.
pub(crate) struct Ended<'a> {
    work: &'a Work,
    outcome: Outcome,
    callbacks: Vec<Callback>,
}

impl Ended<'_> {
    /// Wakes the threads that wait for it and runs its callbacks.
    pub fn notify(self) {
        self.work.shared.done.notify_all();
        let before = IN_CALLBACK.replace(true);
        for callback in self.callbacks {
            // The thread that ends operations serves all callers: it outlives a broken callback.
            let call = std::panic::AssertUnwindSafe(|| callback(&self.outcome));
            if std::panic::catch_unwind(call).is_err() {
                log::error!("a callback of an operation that ended panicked");
            }
        }
        IN_CALLBACK.set(before);
    }
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread has ended an operation and runs its callbacks.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Handles that are used again, so that submitting allocates nothing once warm.
#[derive(Default)]
pub(crate) struct WorkPool {
    handles: Vec<Work>,
    next: usize,
    /// The group whose calls the handles are of, if they are of calls, and its queue.
    group: Option<Arc<GroupState>>,
    queue: Option<Weak<dyn RunsCalls>>,
}

impl WorkPool {
    /// Handles kept for reuse. Larger: more idle memory. Smaller: a burst of submissions
    /// allocates.
    const KEPT: usize = 256;

    /// Handles made with the first one. The thread that ends an operation holds its handle for a
    /// moment longer than the one that waits for it: with fewer, now and then all would be in use.
    const FIRST: usize = 16;

    /// Handles of a group's calls, which wait in this queue.
    pub fn of(group: Arc<GroupState>, queue: Weak<dyn RunsCalls>) -> WorkPool {
        WorkPool { group: Some(group), queue: Some(queue), ..WorkPool::default() }
    }

    /// A handle that is not in use, for the call with this number.
    pub fn take(&mut self, number: Option<u32>) -> Work {
        let new = || Work::new(self.group.clone(), self.queue.clone());
        if self.handles.is_empty() {
            self.handles.reserve(Self::KEPT);
            self.handles.extend(std::iter::repeat_with(new).take(Self::FIRST));
        }
        // Submissions end in order, so the handle after the last one taken is the one that has
        // been in use for longest.
        for _ in 0..self.handles.len().min(4) {
            self.next = (self.next + 1) % self.handles.len();
            let handle = &self.handles[self.next];
            if handle.is_unshared() {
                handle.reset(number);
                return handle.clone();
            }
        }
        let handle = new();
        handle.reset(number);
        if self.handles.len() < Self::KEPT {
            self.handles.push(handle.clone());
        }
        handle
    }
}

/// An operation that owns its buffer until it has ended.
pub struct Pending<B> {
    work: Work,
    buffer: Option<B>,
}

impl<B> Pending<B> {
    pub(crate) fn new(work: Work, buffer: B) -> Pending<B> {
        Pending { work, buffer: Some(buffer) }
    }

    /// The handle, to ask or to be told when it is done.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Waits until the operation has ended and returns the buffer.
    pub fn wait(mut self) -> Result<B, Error> {
        self.work.wait()?;
        Ok(self.buffer.take().expect("taken only here and in drop"))
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        if self.buffer.is_some() {
            // The operation writes to the buffer until it ends, however it ends.
            let _ = self.work.wait();
        }
    }
}
