//! Buckets on their way through a strategy: exchanged on a thread of its own.
//!
//! The thread has a group of its own and takes the buckets in order, so that the order of calls is
//! the order of submission, whatever else the ranks say to each other meanwhile. A strategy whose
//! exchange does not wait for other ranks needs no thread: its buckets are exchanged when they are
//! submitted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use unisono_collective::AbortHandle;

use super::{Gradients, Strategy};
use crate::advice::Advice;
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::times::StepTimes;

/// How often a wait for a bucket asks whether to go on. Longer: Ctrl-C is answered later. Shorter:
/// the waiting thread wakes up more often for nothing.
const ASK_EVERY: Duration = Duration::from_millis(100);

type Outcome = Result<Gradients, SyncError>;

/// A strategy, and the buckets that were submitted to it.
pub struct Queue {
    strategy: Arc<Mutex<Box<dyn Strategy>>>,
    runner: Runner,
    /// As it was after the last exchange that has ended, so that asking waits for none.
    sent: Arc<AtomicU64>,
    abort: Option<AbortHandle>,
}

/// Who exchanges a bucket.
enum Runner {
    /// A thread, until it is closed.
    Thread {
        to: Option<Sender<Gradients>>,
        from: Receiver<Outcome>,
        thread: Option<JoinHandle<()>>,
    },
    /// The caller, at once. What came of it waits to be collected.
    Caller(VecDeque<Outcome>),
}

impl Queue {
    /// Starts the thread, if the strategy needs one.
    pub fn new(strategy: Box<dyn Strategy>) -> Queue {
        let sent = Arc::new(AtomicU64::new(strategy.sent()));
        let (abort, is_immediate) = (strategy.abort_handle(), strategy.is_immediate());
        let strategy = Arc::new(Mutex::new(strategy));
        let runner = match is_immediate {
            true => Runner::Caller(VecDeque::new()),
            false => {
                let (to, requests) = channel();
                let (outcomes, from) = channel();
                let (serving, counter) = (strategy.clone(), sent.clone());
                let serve = move || {
                    for gradients in requests {
                        let outcome = exchange(&mut **lock(&serving), &counter, gradients);
                        if outcomes.send(outcome).is_err() {
                            return;
                        }
                    }
                };
                let thread = std::thread::Builder::new().name("unisono-sync".to_owned());
                let thread = thread.spawn(serve).expect("the system can start one more thread");
                Runner::Thread { to: Some(to), from, thread: Some(thread) }
            }
        };
        Queue { strategy, runner, sent, abort }
    }

    /// Takes a bucket that is complete on this rank. Returns at once.
    pub fn submit(&mut self, gradients: Gradients) {
        match &mut self.runner {
            Runner::Thread { to, .. } => {
                let to = to.as_ref().expect("closed only by drop");
                to.send(gradients).expect("the thread serves until it is closed");
            }
            Runner::Caller(outcomes) => {
                outcomes.push_back(exchange(&mut **lock(&self.strategy), &self.sent, gradients));
            }
        }
    }

    /// Waits for the oldest bucket that was submitted and not yet collected.
    pub fn collect(&mut self) -> Outcome {
        let from = match &mut self.runner {
            Runner::Thread { from, .. } => from,
            Runner::Caller(outcomes) => {
                return outcomes.pop_front().expect("only what was submitted is collected");
            }
        };
        loop {
            match from.recv_timeout(ASK_EVERY) {
                Ok(outcome) => return outcome,
                // The thread that exchanges is not that of the caller, who alone can tell. If the
                // group ends, so does the exchange, and its error comes here.
                Err(RecvTimeoutError::Timeout) => {
                    self.abort.iter().for_each(AbortHandle::ask_to_stop);
                }
                Err(RecvTimeoutError::Disconnected) => panic!("every bucket is answered"),
            }
        }
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
            Runner::Thread { .. } => self.sent.load(Ordering::Relaxed),
            Runner::Caller(_) => self.strategy().sent(),
        }
    }

    /// As [`Strategy::abort_handle`].
    pub fn abort_handle(&self) -> Option<AbortHandle> {
        self.abort.clone()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Runner::Thread { to, thread, .. } = &mut self.runner {
            *to = None;
            if let Some(thread) = thread.take() {
                // A panic there was already seen by the caller, who waited for a bucket.
                let _ = thread.join();
            }
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
