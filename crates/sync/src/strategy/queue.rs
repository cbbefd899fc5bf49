//! Buckets on their way through a strategy: exchanged while the caller goes on.
//!
//! The buckets are tasks of a group that serves nothing else: its progress thread takes them in order,
//! so that the order of calls is the order of submission, whatever else the ranks say to each other
//! meanwhile. A strategy whose exchange does not wait for other ranks needs no thread: its buckets are
//! exchanged when they are submitted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use unisono_collective::{AbortHandle, Group, Work};

use super::{Gradients, Strategy};
use crate::advice::Advice;
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::times::StepTimes;

type Outcome = Result<Gradients, SyncError>;

/// A strategy, and the buckets that were submitted to it.
pub struct Queue {
    strategy: Arc<Mutex<Box<dyn Strategy>>>,
    runner: Runner,
    /// As it was after the last exchange that has ended, so that asking waits for none.
    sent: Arc<AtomicU64>,
    abort: Option<AbortHandle>,
}

/// What exchanges a bucket.
enum Runner {
    /// The group, after what was submitted before.
    Group {
        group: Arc<Group>,
        /// The buckets that were not collected.
        pending: VecDeque<Work>,
        outcomes: (Sender<Outcome>, Receiver<Outcome>),
    },
    /// The caller, at once. What came of it waits to be collected.
    Caller(VecDeque<Outcome>),
}

impl Queue {
    /// For buckets in any number.
    pub fn new(strategy: Box<dyn Strategy>) -> Queue {
        let sent = Arc::new(AtomicU64::new(strategy.sent()));
        let abort = strategy.abort_handle();
        let runner = match strategy.group().cloned() {
            Some(group) => Runner::Group { group, pending: VecDeque::new(), outcomes: channel() },
            None => Runner::Caller(VecDeque::new()),
        };
        Queue { strategy: Arc::new(Mutex::new(strategy)), runner, sent, abort }
    }

    /// Takes a bucket that is complete on this rank. Returns at once.
    pub fn submit(&mut self, gradients: Gradients) {
        match &mut self.runner {
            Runner::Group { group, pending, outcomes } => {
                let (strategy, sent) = (self.strategy.clone(), self.sent.clone());
                let to = outcomes.0.clone();
                pending.push_back(group.submit_task(move || {
                    let outcome = exchange(&mut **lock(&strategy), &sent, gradients);
                    to.send(outcome).expect("the receiver waits for its tasks");
                }));
            }
            Runner::Caller(outcomes) => {
                outcomes.push_back(exchange(&mut **lock(&self.strategy), &self.sent, gradients));
            }
        }
    }

    /// Waits for the oldest bucket that was submitted and not yet collected.
    pub fn collect(&mut self) -> Outcome {
        match &mut self.runner {
            Runner::Group { pending, outcomes, .. } => {
                let work = pending.pop_front().expect("only what was submitted is collected");
                // An exchange that fails has an outcome of its own, and one that panics has none.
                let _ = work.wait();
                outcomes.1.try_recv().expect("every bucket is answered")
            }
            Runner::Caller(outcomes) => {
                outcomes.pop_front().expect("only what was submitted is collected")
            }
        }
    }

    /// Gives up on all that was submitted and not collected: ends the group if that may still be under way.
    /// Waits only until the exchanges have noticed.
    pub fn abandon(&mut self) {
        match &mut self.runner {
            Runner::Group { pending, outcomes, .. } => {
                if let (Some(abort), false) = (&self.abort, pending.is_empty()) {
                    abort.abort("this rank has given up the step");
                }
                pending.drain(..).for_each(|work| drop(work.wait()));
                while outcomes.1.try_recv().is_ok() {}
            }
            Runner::Caller(outcomes) => outcomes.clear(),
        }
        self.strategy().abandon();
    }

    /// The strategy, once it has nothing to exchange.
    pub fn strategy(&self) -> MutexGuard<'_, Box<dyn Strategy>> {
        lock(&self.strategy)
    }

    /// As [`Strategy::observe`].
    pub fn observe(
        &mut self,
        step: u64,
        layout: &Arc<Layout>,
        times: &StepTimes,
    ) -> Result<Option<Arc<Advice>>, SyncError> {
        let mut strategy = self.strategy();
        let advice = strategy.observe(step, layout, times);
        // What it took to decide was sent in this step.
        self.sent.store(strategy.sent(), Ordering::Relaxed);
        advice
    }

    /// As [`Strategy::sent`], without the exchange under way.
    pub fn sent(&self) -> u64 {
        match self.runner {
            Runner::Group { .. } => self.sent.load(Ordering::Relaxed),
            Runner::Caller(_) => self.strategy().sent(),
        }
    }

    /// As [`Strategy::abort_handle`].
    pub fn abort_handle(&self) -> Option<AbortHandle> {
        self.abort.clone()
    }
}

impl Drop for Queue {
    /// The other ranks count on what was submitted.
    fn drop(&mut self) {
        if let Runner::Group { pending, .. } = &mut self.runner {
            pending.drain(..).for_each(|work| drop(work.wait()));
        }
    }
}

fn exchange(strategy: &mut dyn Strategy, sent: &AtomicU64, mut gradients: Gradients) -> Outcome {
    gradients.started = Instant::now();
    let outcome = strategy.exchange(&mut gradients);
    sent.store(strategy.sent(), Ordering::Relaxed);
    outcome?;
    gradients.ended = Instant::now();
    Ok(gradients)
}

fn lock(strategy: &Mutex<Box<dyn Strategy>>) -> MutexGuard<'_, Box<dyn Strategy>> {
    strategy.lock().expect("a thread that panicked is not asked again")
}
