//! Sums the gradients of a worker's shards, where no other worker takes part in the sum.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use unisono_relaxed::server::Gradient;
use unisono_relaxed::server::wire::Measured;
use unisono_sync::Parameter;
use unisono_sync::accumulate::{Accumulation, Constant, Values};

/// Takes the gradients of one worker's shards of every step.
pub struct Collector {
    lengths: Vec<usize>,
    own: Range<usize>,
    /// Whether gradients stay sums of subtrees, or become the mean.
    sums: bool,
    /// Samples of a shard.
    samples: u64,
    step: Mutex<Collected>,
}

/// The gradients of a step.
pub struct Collected {
    accumulation: Accumulation,
    /// The slots of every parameter.
    slots: Vec<Vec<Vec<f32>>>,
    /// Whether a parameter had a gradient in any shard.
    touched: Vec<bool>,
    /// Whether it had one in the shard under way.
    seen: Vec<bool>,
    open: bool,
    begun: usize,
    loss: f32,
    since: Instant,
    computed: Duration,
    measured: Measured,
}

impl Collector {
    /// For a worker with these of the shards of a batch. In lock-step gradients stay sums of subtrees of
    /// the canonical tree over all shards; else they become the mean over the worker's own.
    pub fn new(
        parameters: &[Parameter],
        shards: usize,
        own: Range<usize>,
        lockstep: bool,
        samples: u64,
    ) -> Collector {
        let lengths: Vec<usize> = parameters.iter().map(Parameter::elements).collect();
        let accumulation = match lockstep {
            true => Accumulation::new(shards, own.clone()),
            false => Accumulation::new(own.len(), 0..own.len()),
        };
        let slots = |length: &usize| vec![vec![0.0; *length]; accumulation.slots()];
        let step = Mutex::new(Collected {
            slots: lengths.iter().map(slots).collect(),
            touched: vec![false; lengths.len()],
            seen: vec![false; lengths.len()],
            accumulation,
            open: false,
            begun: 0,
            loss: 0.0,
            since: Instant::now(),
            computed: Duration::ZERO,
            measured: Measured::default(),
        });
        Collector { lengths, own, sums: lockstep, samples, step }
    }

    /// The shards whose gradients this worker computes.
    pub fn shards(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Begins the next shard; which one.
    pub fn begin_shard(&self) -> usize {
        let mut step = self.lock();
        assert!(step.begun < self.own.len() && !step.open, "shards come one after the other");
        if step.begun == 0 {
            step.touched.fill(false);
            (step.loss, step.computed) = (0.0, Duration::ZERO);
        }
        step.begun += 1;
        step.open = true;
        step.seen.fill(false);
        step.since = Instant::now();
        self.own.start + step.begun - 1
    }

    /// The forward pass of the shard is done, with this loss.
    pub fn begin_backward(&self, loss: f32) {
        self.lock().loss += loss;
    }

    /// Takes a parameter's gradient in the shard under way; `false` if there is none under way.
    pub fn gradient_from(&self, parameter: usize, gradient: &impl Values) -> bool {
        let mut step = self.lock();
        if step.open {
            assert!(!step.seen[parameter], "one gradient per shard");
            step.seen[parameter] = true;
            step.touched[parameter] = true;
            step.add(parameter, 0..self.lengths[parameter], gradient);
        }
        step.open
    }

    /// Ends the shard. Parameters that got no gradient have none in it.
    pub fn end_shard(&self) {
        let mut step = self.lock();
        assert!(step.open, "a shard ends that has begun");
        for parameter in 0..self.lengths.len() {
            if !step.seen[parameter] {
                step.add(parameter, 0..self.lengths[parameter], &Constant(0.0));
            }
        }
        step.open = false;
        let took = step.since.elapsed();
        step.computed += took;
    }

    /// The gradients of the step, all of whose shards are computed.
    pub fn finish(&self) -> MutexGuard<'_, Collected> {
        let mut step = self.lock();
        assert!(step.begun == self.own.len() && !step.open, "a step has all its shards");
        step.begun = 0;
        let shards = self.own.len() as f32;
        if !self.sums {
            for slots in &mut step.slots {
                slots[0].iter_mut().for_each(|gradient| *gradient /= shards);
            }
        }
        step.measured = Measured {
            loss: step.loss / shards,
            samples: self.own.len() as u64 * self.samples,
            compute: step.computed.as_secs_f64(),
            ..Measured::default()
        };
        step
    }

    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.step.lock().expect("no panic while a gradient is taken")
    }
}

impl Collected {
    /// As servers take them. A parameter that had no gradient in any shard is left out, so that no
    /// optimizer touches it.
    pub fn gradients<'a>(&'a self) -> Vec<Gradient<'a>> {
        let sums = self.accumulation.sums();
        let vectors = |slots: &'a Vec<Vec<f32>>| slots[..sums].iter().map(Vec::as_slice).collect();
        let all = self.slots.iter().map(vectors).enumerate();
        all.filter(|(parameter, _)| self.touched[*parameter]).collect()
    }

    /// The mean gradient of a parameter, if it had one in any shard.
    pub fn gradient(&self, parameter: usize) -> Option<&[f32]> {
        self.touched[parameter].then(|| self.slots[parameter][0].as_slice())
    }

    /// The loss, the samples, and the seconds of computing.
    pub fn measured(&self) -> Measured {
        self.measured
    }

    fn add(&mut self, parameter: usize, span: Range<usize>, values: &impl Values) {
        self.accumulation.add(self.begun - 1, &mut self.slots[parameter], span, values);
    }
}
