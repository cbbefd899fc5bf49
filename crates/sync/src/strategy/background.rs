//! Exchanges buckets on a thread of its own.
//!
//! The thread has a group of its own and takes the buckets in order, so that the order of calls is
//! the order of submission, whatever else the ranks say to each other meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use unisono_collective::{AbortHandle, Group};

use super::{Find, Gradients, Save, Strategy};
use crate::advice::Advice;
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::times::StepTimes;

/// How often a wait for a bucket asks whether to go on. Longer: Ctrl-C is answered later. Shorter:
/// more of nothing.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// What makes one mean of a bucket of all ranks, one bucket after the other.
pub trait Exchange: Send + 'static {
    /// As [`Strategy::name`].
    fn name(&self) -> String;

    /// As [`Strategy::wants_leaves`].
    fn wants_leaves(&self, step: u64) -> bool {
        let _ = step;
        false
    }

    /// Replaces the first slot by the mean over all shards of all ranks.
    fn exchange(&mut self, gradients: &mut Gradients) -> Result<(), SyncError>;

    /// As [`Strategy::sent`].
    fn sent(&self) -> u64;

    /// As [`Strategy::abort_handle`].
    fn abort_handle(&self) -> AbortHandle;

    /// As [`Strategy::is_settled`].
    fn is_settled(&self) -> bool {
        true
    }

    /// As [`Strategy::observe`].
    fn observe(
        &mut self,
        step: u64,
        layout: &Arc<Layout>,
        times: &StepTimes,
    ) -> Result<Option<Arc<Advice>>, SyncError> {
        let _ = (step, layout, times);
        Ok(None)
    }

    /// As [`Strategy::save`].
    fn save(&self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        let _ = (group, each);
        Ok(())
    }

    /// As [`Strategy::restore`].
    fn restore(&mut self, group: &Group, find: &Find<'_>) -> Result<(), SyncError> {
        let _ = (group, find);
        Ok(())
    }
}

type Outcome = Result<Gradients, SyncError>;

/// An exchange as a strategy.
pub struct Background<E> {
    exchange: Arc<Mutex<E>>,
    to: Option<Sender<Gradients>>,
    from: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
    sent: Arc<AtomicU64>,
    abort: AbortHandle,
}

impl<E: Exchange> Background<E> {
    /// Starts the thread.
    pub fn new(exchange: E) -> Background<E> {
        let (to, requests) = channel();
        let (outcomes, from) = channel();
        let sent = Arc::new(AtomicU64::new(exchange.sent()));
        let abort = exchange.abort_handle();
        let exchange = Arc::new(Mutex::new(exchange));
        let (serving, counter) = (exchange.clone(), sent.clone());
        let serve = move || {
            for gradients in requests {
                let mut exchange = lock(&serving);
                let outcome = serve_one(&mut *exchange, gradients);
                counter.store(exchange.sent(), Ordering::Relaxed);
                drop(exchange);
                if outcomes.send(outcome).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("unisono-sync".to_owned()).spawn(serve);
        let thread = Some(thread.expect("the system can start one more thread"));
        Background { exchange, to: Some(to), from, thread, sent, abort }
    }

    /// The exchange, once it has nothing to do.
    pub fn exchange(&self) -> MutexGuard<'_, E> {
        lock(&self.exchange)
    }
}

impl<E: Exchange> Strategy for Background<E> {
    fn name(&self) -> String {
        self.exchange().name()
    }

    fn wants_leaves(&self, step: u64) -> bool {
        self.exchange().wants_leaves(step)
    }

    fn submit(&mut self, gradients: Gradients) {
        let to = self.to.as_ref().expect("closed only by drop");
        to.send(gradients).expect("the thread serves until it is closed");
    }

    fn collect(&mut self) -> Result<Gradients, SyncError> {
        loop {
            match self.from.recv_timeout(ASK_EVERY) {
                Ok(outcome) => return outcome,
                // The thread that exchanges is not that of the caller, who alone can tell. If the
                // group ends, so does the exchange, and its error comes here.
                Err(RecvTimeoutError::Timeout) => self.abort.ask_to_stop(),
                Err(RecvTimeoutError::Disconnected) => panic!("every bucket is answered"),
            }
        }
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        Some(self.abort.clone())
    }

    fn is_settled(&self) -> bool {
        self.exchange().is_settled()
    }

    fn observe(
        &mut self,
        step: u64,
        layout: &Arc<Layout>,
        times: &StepTimes,
    ) -> Result<Option<Arc<Advice>>, SyncError> {
        let mut exchange = self.exchange();
        let advice = exchange.observe(step, layout, times);
        // What it took to decide was sent in this step.
        self.sent.store(exchange.sent(), Ordering::Relaxed);
        advice
    }

    fn save(&self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        self.exchange().save(group, each)
    }

    fn restore(&mut self, group: &Group, find: &Find<'_>) -> Result<(), SyncError> {
        self.exchange().restore(group, find)
    }
}

impl<E> Drop for Background<E> {
    fn drop(&mut self) {
        self.to = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was already seen by whoever waited for a bucket.
            let _ = thread.join();
        }
    }
}

fn serve_one(exchange: &mut impl Exchange, mut gradients: Gradients) -> Outcome {
    gradients.started = Instant::now();
    exchange.exchange(&mut gradients)?;
    gradients.ended = Instant::now();
    Ok(gradients)
}

fn lock<E>(exchange: &Mutex<E>) -> MutexGuard<'_, E> {
    exchange.lock().expect("a thread that panicked is not asked again")
}
