//! A worker that averages with changing partners.

use std::time::{Instant, SystemTime};

use unisono_insight::relaxed::UpdateLog;
use unisono_insight::updates::UpdateRecord;
use unisono_optimizer::Optimizer;
use unisono_relaxed::gossip::Gossip;
use unisono_sync::strategy::Weights;

use super::collector::Collected;
use super::{Relaxed, Stepped, WorkerError};

/// Trains a replica of its own, and exchanges after every step.
pub struct Gossiping {
    gossip: Gossip,
    optimizer: Box<dyn Optimizer>,
    /// The step that comes next, from 0, and after how many the run is over.
    step: u64,
    steps: u64,
    parameters: usize,
    log: Option<GossipLog>,
}

/// Where a worker writes down its steps, since there is no server to do it.
pub struct GossipLog {
    log: UpdateLog,
    updates: u64,
    began: SystemTime,
    worker: u32,
    life: u64,
    workers: u32,
    /// Pushes of this life.
    pushes: u64,
    /// Bytes that were moved before the step under way.
    bytes: u64,
}

impl GossipLog {
    /// A file that has so many updates, of a run that began then; of this worker, in this of its lives,
    /// among so many workers.
    pub fn new(
        log: UpdateLog,
        updates: u64,
        began: SystemTime,
        worker: u32,
        life: u64,
        workers: u32,
    ) -> GossipLog {
        GossipLog { log, updates, began, worker, life, workers, pushes: 0, bytes: 0 }
    }
}

impl Gossiping {
    /// A worker that goes on with this step, from 0, until the run has so many.
    pub fn new(
        gossip: Gossip,
        optimizer: Box<dyn Optimizer>,
        parameters: usize,
        step: u64,
        steps: u64,
        log: Option<GossipLog>,
    ) -> Gossiping {
        Gossiping { gossip, optimizer, step, steps, parameters, log }
    }
}

impl Relaxed for Gossiping {
    fn begin_step(&mut self, weights: &mut dyn Weights) -> Result<Option<u64>, WorkerError> {
        if self.step >= self.steps {
            return Ok(None);
        }
        for parameter in 0..self.parameters {
            let mut read = Ok(());
            weights.change(parameter, &mut |own| read = self.gossip.weights(parameter, own));
            read?;
        }
        Ok(Some(self.step))
    }

    fn end_step(
        &mut self,
        collected: &Collected,
        _: &mut dyn Weights,
    ) -> Result<Stepped, WorkerError> {
        let (start, measured) = (Instant::now(), collected.measured());
        self.step += 1;
        let (step, optimizer) = (self.step, &mut self.optimizer);
        self.gossip.step_with(|parameter, weights| {
            if let Some(gradient) = collected.gradient(parameter) {
                optimizer.update(parameter, step, weights, gradient);
            }
        });
        self.gossip.exchange()?;
        let (stats, blocked) = (self.gossip.stats(), start.elapsed());
        if let Some(log) = &mut self.log {
            log.pushes += 1;
            log.updates += 1;
            log.log.append(&UpdateRecord {
                time: SystemTime::now().duration_since(log.began).unwrap_or_default().as_secs_f64(),
                update: log.updates,
                worker: log.worker,
                life: log.life,
                push: log.pushes,
                clock: step - 1,
                lead: stats.lead(),
                delay: 0,
                present: log.workers,
                loss: measured.loss,
                samples: measured.samples,
                compute: measured.compute,
                blocked: blocked.as_secs_f64(),
                bytes: stats.bytes() - log.bytes,
            })?;
            log.bytes = stats.bytes();
        }
        Ok(Stepped::by_itself(step, measured, blocked))
    }

    fn sent(&self) -> u64 {
        self.gossip.stats().bytes()
    }

    fn is_finished(&self) -> bool {
        self.step >= self.steps
    }

    fn exchanges(&self) -> Option<u64> {
        self.gossip.settle();
        Some(self.gossip.stats().done())
    }

    fn leave(self: Box<Self>, weights: &mut dyn Weights) -> Result<(), WorkerError> {
        weights.set_all(&self.gossip.leave());
        Ok(())
    }
}
