//! A worker that is a thread, and updates weights that it shares with the other threads without a lock.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use unisono_optimizer::{LearningRate, OptimizerSpec};
use unisono_relaxed::hogwild::{SharedWeights, Step, Thread};
use unisono_relaxed::spec::Level;
use unisono_sync::strategy::Weights;

use super::collector::Collected;
use super::{Relaxed, Stepped, WorkerError};

/// How often a thread that waits for another looks. Longer: it notices later. Shorter: it takes the
/// processor from the other.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What the threads of a run share.
#[derive(Default)]
pub struct SharedModel {
    /// The weights, since thread 0 has brought them.
    weights: OnceLock<SharedWeights>,
    /// Threads that have ended.
    ended: AtomicUsize,
}

impl SharedModel {
    /// The weights, when all threads have ended; `None` if thread 0 has brought none.
    pub fn into_parameters(self) -> Option<Vec<Vec<f32>>> {
        self.weights.into_inner().map(SharedWeights::into_parameters)
    }
}

/// One thread of a run.
pub struct Hogwild<'a> {
    /// Until it has ended.
    part: Option<Part<'a>>,
    model: &'a SharedModel,
    rate: LearningRate,
    threads: usize,
    parameters: usize,
    /// Of the step under way.
    clock: u64,
    is_over: bool,
}

/// A thread that has not ended. When it does, be it by a panic, that is counted.
struct Part<'a> {
    thread: Thread<'a>,
    model: &'a SharedModel,
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        self.model.ended.fetch_add(1, Ordering::Release);
    }
}

impl<'a> Hogwild<'a> {
    /// Takes part. The weights become those of thread 0, for which the others wait.
    pub fn new(
        thread: Thread<'a>,
        model: &'a SharedModel,
        threads: usize,
        optimizer: &OptimizerSpec,
        parameters: usize,
        weights: &dyn Weights,
    ) -> Result<Hogwild<'a>, WorkerError> {
        let part = Part { thread, model };
        let rate = match Level::Hogwild.optimizer(optimizer, threads as u32) {
            OptimizerSpec::Sgd { learning_rate, weight_decay: 0.0 } => learning_rate,
            other => return Err(WorkerError::NotLockFree { optimizer: other.name() }),
        };
        if part.thread.number() == 0 {
            model.weights.get_or_init(|| SharedWeights::new(weights.to_vecs(parameters)));
        }
        while model.weights.get().is_none() && !part.thread.is_over() {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(Hogwild { part: Some(part), model, rate, threads, parameters, clock: 0, is_over: false })
    }

    /// Reads the weights as they are.
    fn read(&mut self, weights: &mut dyn Weights) {
        let Some(shared) = self.model.weights.get() else { return };
        for parameter in 0..self.parameters {
            weights.change(parameter, &mut |own| shared.read(parameter, own));
        }
    }
}

impl Relaxed for Hogwild<'_> {
    fn begin_step(&mut self, weights: &mut dyn Weights) -> Result<Option<u64>, WorkerError> {
        let begun = self.part.as_mut().and_then(|part| part.thread.begin());
        let clock = begun.map(|clock| clock.0);
        self.is_over = clock.is_none();
        if let Some(clock) = clock {
            self.clock = clock;
            self.read(weights);
        }
        Ok(clock)
    }

    fn end_step(
        &mut self,
        collected: &Collected,
        _: &mut dyn Weights,
    ) -> Result<Stepped, WorkerError> {
        let (measured, clock) = (collected.measured(), self.clock);
        let Some(shared) = self.model.weights.get() else { return Err(WorkerError::Ended) };
        let rate = self.rate.at(clock * self.threads as u64 + 1) as f32;
        for (parameter, gradients) in collected.gradients() {
            shared.update(parameter, gradients[0], rate);
        }
        let step =
            Step { loss: measured.loss, samples: measured.samples, compute: measured.compute };
        let part = self.part.as_mut().ok_or(WorkerError::Ended)?;
        self.is_over = !part.thread.end(step);
        Ok(Stepped::by_itself(clock + 1, measured, Duration::ZERO))
    }

    fn sent(&self) -> u64 {
        0
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }

    /// Waits until all threads have ended, and reads the weights.
    fn leave(mut self: Box<Self>, weights: &mut dyn Weights) -> Result<(), WorkerError> {
        drop(self.part.take());
        while self.model.ended.load(Ordering::Acquire) < self.threads {
            std::thread::sleep(LOOK_EVERY);
        }
        self.read(weights);
        Ok(())
    }
}
