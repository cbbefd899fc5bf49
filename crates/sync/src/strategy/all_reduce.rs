//! All workers wait for all: the mean of every bucket, the same bits everywhere.
//!
//! A thread with a group of its own takes the buckets in order, so that the order of calls is the
//! order of submission, whatever else the ranks say to each other meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use unisono_collective::Group;

use super::{Gradients, Strategy};
use crate::combine::Combiner;
use crate::error::SyncError;
use crate::shards::Shards;

type Outcome = Result<Gradients, SyncError>;

/// The synchronous strategy.
pub struct AllReduce {
    to: Option<Sender<Gradients>>,
    from: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
    sent: Arc<AtomicU64>,
}

impl AllReduce {
    /// Over the ranks of a group, which nobody else uses from now on.
    pub fn new(group: Group, shards: Shards) -> AllReduce {
        let (to, requests) = channel();
        let (outcomes, from) = channel();
        let sent = Arc::new(AtomicU64::new(0));
        let name = format!("unisono-sync-{}", group.rank());
        let mut combiner = Combiner::new(group, shards);
        let counter = sent.clone();
        let serve = move || {
            for gradients in requests {
                let outcome = reduce(&mut combiner, gradients);
                counter.store(combiner.sent(), Ordering::Relaxed);
                if outcomes.send(outcome).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(serve);
        let thread = Some(thread.expect("the system can start one more thread"));
        AllReduce { to: Some(to), from, thread, sent }
    }
}

impl Strategy for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn submit(&mut self, gradients: Gradients) {
        let to = self.to.as_ref().expect("closed only by drop");
        to.send(gradients).expect("the thread serves until it is closed");
    }

    fn collect(&mut self) -> Result<Gradients, SyncError> {
        self.from.recv().expect("every bucket is answered")
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Drop for AllReduce {
    fn drop(&mut self) {
        self.to = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was already seen by whoever waited for a bucket.
            let _ = thread.join();
        }
    }
}

fn reduce(combiner: &mut Combiner, mut gradients: Gradients) -> Outcome {
    gradients.started = Instant::now();
    let (subtrees, folding) = (gradients.subtrees, combiner.folding());
    combiner.sum(&mut gradients.slots[..subtrees])?;
    let summed = Instant::now();
    gradients.divide();
    gradients.ended = Instant::now();
    gradients.folding = combiner.folding() - folding + (gradients.ended - summed);
    Ok(gradients)
}
