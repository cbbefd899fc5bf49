//! Exchanges buckets while the caller goes on.
//!
//! The buckets are tasks of a group that serves nothing else: its progress thread takes them in order,
//! so that the order of calls is the order of submission, whatever else the ranks say to each other
//! meanwhile.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use unisono_collective::{AbortHandle, Group, Work};

use super::{Find, Gradients, Save, Strategy};
use crate::advice::Advice;
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::times::StepTimes;

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

    /// The ranks, over which nothing else is exchanged.
    fn group(&self) -> &Arc<Group>;

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
    group: Arc<Group>,
    /// The buckets that were not collected.
    pending: VecDeque<Work>,
    outcomes: (Sender<Outcome>, Receiver<Outcome>),
    sent: Arc<AtomicU64>,
}

impl<E: Exchange> Background<E> {
    /// For buckets in any number.
    pub fn new(exchange: E) -> Background<E> {
        let group = exchange.group().clone();
        let sent = Arc::new(AtomicU64::new(group.traffic().total()));
        let (exchange, pending) = (Arc::new(Mutex::new(exchange)), VecDeque::new());
        Background { exchange, group, pending, outcomes: channel(), sent }
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
        let (exchange, sent, to) =
            (self.exchange.clone(), self.sent.clone(), self.outcomes.0.clone());
        self.pending.push_back(self.group.submit_task(move || {
            let mut exchange = lock(&exchange);
            let outcome = exchange_one(&mut *exchange, gradients);
            sent.store(exchange.group().traffic().total(), Ordering::Relaxed);
            to.send(outcome).expect("the receiver waits for its tasks");
        }));
    }

    fn collect(&mut self) -> Result<Gradients, SyncError> {
        let work = self.pending.pop_front().expect("only what was submitted is collected");
        // An exchange that fails has an outcome of its own, and one that panics has none.
        let _ = work.wait();
        self.outcomes.1.try_recv().expect("every bucket is answered")
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        Some(self.group.abort_handle())
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
        self.sent.store(self.group.traffic().total(), Ordering::Relaxed);
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
    /// The other ranks count on what was submitted.
    fn drop(&mut self) {
        self.pending.drain(..).for_each(|work| drop(work.wait()));
    }
}

fn exchange_one(exchange: &mut impl Exchange, mut gradients: Gradients) -> Outcome {
    gradients.started = Instant::now();
    exchange.exchange(&mut gradients)?;
    gradients.ended = Instant::now();
    Ok(gradients)
}

fn lock<E>(exchange: &Mutex<E>) -> MutexGuard<'_, E> {
    exchange.lock().expect("a thread that panicked is not asked again")
}
