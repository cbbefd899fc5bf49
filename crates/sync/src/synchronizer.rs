//! One replica's view of a step: takes the gradients of its shards, gives back the mean of all.
//!
//! A step goes like this. For each of its shards, in order, the worker calls
//! [`begin_shard`](Synchronizer::begin_shard), computes the loss, calls
//! [`begin_backward`](Synchronizer::begin_backward), hands over every parameter's
//! [`gradient`](Synchronizer::gradient) as backward produces it, and calls
//! [`end_shard`](Synchronizer::end_shard). Gradients of the last shard complete buckets, which travel
//! while backward goes on. [`finish`](Synchronizer::finish) then hands out the means, bucket by
//! bucket, while later ones are still under way.
//!
//! A parameter that got no gradient in a shard counts as zero there. One that got none in any shard
//! of any worker is not handed out, so that no optimizer touches it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use unisono_collective::Group;

use crate::accumulate::{Accumulation, Constant, Values};
use crate::bucket::{BucketSizes, Layout, SCALARS, Turns};
use crate::combine;
use crate::error::SyncError;
use crate::shards::Shards;
use crate::strategy::{AllReduce, Alone, Gradients, Strategy};
use crate::times::{BucketTimes, StepTimes};
use crate::tune::Tuner;

/// A parameter of the model, flat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, for people.
    pub name: String,
    /// Its elements.
    pub len: usize,
}

/// How replicas are kept in step. Equal on all ranks; none of it changes a bit of the weights but
/// the number of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Shards of the global batch.
    pub shards: usize,
    /// Sizes of the buckets; by default they are found while training.
    pub buckets: Option<BucketSizes>,
    /// Whether buckets travel while backward goes on, or all after it.
    pub overlap: bool,
}

impl Settings {
    /// The defaults, for a run with this many shards.
    pub fn new(shards: usize) -> Settings {
        Settings { shards, buckets: None, overlap: true }
    }
}

/// What is known after a step, the same on all ranks but for the times.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// The mean loss over all shards.
    pub loss: f32,
    /// Whether any rank voted to stop after this step.
    pub stop: bool,
    /// When things happened on this rank.
    pub times: StepTimes,
}

/// Keeps one replica in step with the others.
pub struct Synchronizer {
    parameters: Vec<Parameter>,
    shards: Shards,
    own: Range<usize>,
    overlap: bool,
    /// What bucket lengths are a multiple of.
    align: usize,
    step: Mutex<Step>,
}

/// A step in progress.
struct Step {
    strategy: Box<dyn Strategy>,
    accumulation: Accumulation,
    layout: Layout,
    buckets: Vec<Bucket>,
    turns: Turns,
    tuner: Option<Tuner>,
    /// Shards of this step that have begun.
    begun: usize,
    /// Whether a shard is being computed, so that gradients belong to it.
    open: bool,
    /// Which parameters have had their gradient in the shard under way.
    seen: Vec<bool>,
    scalars: [f32; SCALARS],
    last_seconds: f32,
    clock: Clock,
}

/// A bucket's memory, and what it waits for.
#[derive(Default)]
struct Bucket {
    slots: Vec<Vec<f32>>,
    /// Parameters whose last gradient is still to come.
    missing: usize,
}

/// The times of the step under way.
struct Clock {
    begin: Instant,
    shard: Instant,
    backward: Instant,
    computed: Instant,
    compute: Duration,
    last_backward: Duration,
}

/// The numbers that travel with a step.
const LOSS: usize = 0;
const STOP: usize = 1;
const SECONDS: usize = 2;

impl Synchronizer {
    /// Joins the replicas of a group, all of which must call this with the same parameters and
    /// settings. Without a group, or in a group of one, there is nobody to wait for.
    pub fn new(
        group: Option<&Group>,
        parameters: Vec<Parameter>,
        settings: Settings,
    ) -> Result<Synchronizer, SyncError> {
        let (rank, workers) = group.map_or((0, 1), |group| (group.rank(), group.size()));
        let shards = Shards::new(settings.shards, workers)?;
        let strategy: Box<dyn Strategy> = match group {
            Some(group) if workers > 1 => {
                expect_equal_models(group, &parameters)?;
                let own = group.subgroup(&(0..workers).collect::<Vec<_>>())?;
                Box::new(AllReduce::new(own, shards))
            }
            _ => Box::new(Alone::default()),
        };
        let own = shards.of(rank, workers);
        let bytes = parameters.iter().map(|p| p.len).sum::<usize>() * 4;
        let tuner = (workers > 1 && settings.buckets.is_none()).then(|| Tuner::new(bytes));
        let sizes = settings.buckets.unwrap_or_else(|| match &tuner {
            Some(tuner) => tuner.sizes(),
            None => BucketSizes::default(),
        });
        let align = combine::alignment(shards, workers);
        let now = Instant::now();
        let step = Step {
            strategy,
            accumulation: Accumulation::new(shards.count(), own.clone()),
            layout: Layout::new(&[], sizes, align),
            buckets: Vec::new(),
            turns: Turns::new(0),
            tuner,
            begun: 0,
            open: false,
            seen: vec![false; parameters.len()],
            scalars: [0.0; SCALARS],
            last_seconds: 0.0,
            clock: Clock::new(now),
        };
        let overlap = settings.overlap;
        let step = Mutex::new(step);
        let synchronizer = Synchronizer { parameters, shards, own, overlap, align, step };
        synchronizer.lay_out(&mut synchronizer.lock(), sizes);
        Ok(synchronizer)
    }

    /// The parameters, in order of registration.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The shards whose gradients this worker computes.
    pub fn shards(&self) -> Range<usize> {
        self.own.clone()
    }

    /// The strategy's name.
    pub fn strategy(&self) -> &'static str {
        self.lock().strategy.name()
    }

    /// The number of buckets at present.
    pub fn buckets(&self) -> usize {
        self.lock().buckets.len()
    }

    /// Bytes this rank has sent so far.
    pub fn sent(&self) -> u64 {
        self.lock().strategy.sent()
    }

    /// Begins the next of this worker's shards; which one.
    ///
    /// # Panics
    /// If all have been computed and [`Synchronizer::finish`] was not called, or one is not ended.
    pub fn begin_shard(&self) -> usize {
        let mut step = self.lock();
        assert!(step.begun < self.own.len(), "all shards of this step are computed: finish it");
        assert!(!step.open, "a shard has begun and was not ended");
        step.open = true;
        step.begun += 1;
        step.seen.fill(false);
        let now = Instant::now();
        step.clock.shard = now;
        step.clock.backward = now;
        self.own.start + step.begun - 1
    }

    /// The forward pass of the shard is done; gradients come next.
    pub fn begin_backward(&self, loss: f32) {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.open, "backward begins inside of a shard");
        step.clock.backward = Instant::now();
        let values = [loss, std::mem::take(&mut step.scalars[STOP]), step.last_seconds];
        let (leaf, span) = (step.begun - 1, step.layout.scalars());
        step.accumulation.add(leaf, &mut step.buckets[0].slots, span, &values.as_slice());
        self.release(step, 0);
    }

    /// Votes that training should stop after the present step. Heard if it is said before the
    /// last backward pass of the step begins, else with the next one.
    pub fn vote_to_stop(&self) {
        self.lock().scalars[STOP] = 1.0;
    }

    /// Takes a parameter's gradient in the shard under way. `false` if there is no shard under way:
    /// then the gradient is not for us.
    ///
    /// # Panics
    /// If the length is not the parameter's, or it has had its gradient in this shard.
    pub fn gradient(&self, parameter: usize, gradient: &[f32]) -> bool {
        assert_eq!(gradient.len(), self.parameters[parameter].len, "the length of a gradient");
        self.gradient_from(parameter, &gradient)
    }

    /// As [`Synchronizer::gradient`], from values that do not lie in order.
    pub fn gradient_from(&self, parameter: usize, gradient: &impl Values) -> bool {
        let mut guard = self.lock();
        let step = &mut *guard;
        if !step.open {
            return false;
        }
        assert!(!step.seen[parameter], "one gradient per shard");
        self.take(step, parameter, gradient, 1.0);
        true
    }

    /// Ends the shard under way. Parameters that got no gradient have none in this shard.
    pub fn end_shard(&self) {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.open, "a shard ends that has begun");
        for parameter in (0..self.parameters.len()).rev() {
            if !step.seen[parameter] {
                self.take(step, parameter, &Constant(0.0), 0.0);
            }
        }
        step.open = false;
        let now = Instant::now();
        step.clock.compute += now - step.clock.shard;
        if step.begun == self.own.len() {
            step.clock.computed = now;
            step.clock.last_backward = now - step.clock.backward;
        }
    }

    /// Ends the step: calls `update` with every parameter that had a gradient anywhere, and the
    /// mean of its gradient over all shards.
    ///
    /// # Panics
    /// If not all shards of this worker were computed.
    pub fn finish(&self, mut update: impl FnMut(usize, &[f32])) -> Result<StepOutcome, SyncError> {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.begun == self.own.len() && !step.open, "a step has all its shards");
        if !self.overlap {
            for bucket in 0..step.buckets.len() {
                self.submit(step, bucket);
            }
        }
        let mut blocked = Duration::ZERO;
        let mut buckets = Vec::with_capacity(step.buckets.len());
        let mut scalars = [0.0; SCALARS];
        for bucket in 0..step.buckets.len() {
            let asked = Instant::now();
            let gradients = step.strategy.collect()?;
            blocked += asked.elapsed();
            debug_assert_eq!(gradients.bucket, bucket);
            let mean = &gradients.slots[0];
            if bucket == 0 {
                scalars.copy_from_slice(&mean[step.layout.scalars()]);
            }
            for &parameter in &step.layout.buckets()[bucket].parameters {
                if mean[step.layout.count(parameter)] > 0.0 {
                    update(parameter, &mean[step.layout.span(parameter)]);
                }
            }
            buckets.push(BucketTimes {
                bytes: mean.len() * 4,
                submitted: gradients.submitted,
                started: gradients.started,
                ended: gradients.ended,
                folding: gradients.folding,
            });
            step.buckets[bucket].slots = gradients.slots;
        }
        let end = Instant::now();
        let clock = std::mem::replace(&mut step.clock, Clock::new(end));
        step.last_seconds = (end - clock.begin).as_secs_f32();
        let shards = self.shards.count() as f32;
        let tuned = step.tuner.as_mut().filter(|tuner| !tuner.is_settled());
        // The times of the step before this one, as all ranks saw them together.
        let resize = tuned.and_then(|tuner| {
            tuner.step(f64::from(scalars[SECONDS] / shards)).then(|| tuner.sizes())
        });
        match resize {
            Some(sizes) => self.lay_out(step, sizes),
            None => step.start_over(),
        }
        let times = StepTimes {
            begin: clock.begin,
            computed: clock.computed,
            end,
            compute: clock.compute,
            backward: clock.last_backward,
            blocked,
            buckets,
        };
        Ok(StepOutcome { loss: scalars[LOSS] / shards, stop: scalars[STOP] > 0.0, times })
    }

    /// Says that whatever happened since the last step was not part of the next: it begins now.
    pub fn begin_step(&self) {
        self.lock().clock.begin = Instant::now();
    }

    /// Adds a leaf of a parameter, and lets its bucket go if that was the last it waited for.
    fn take(&self, step: &mut Step, parameter: usize, values: &impl Values, count: f32) {
        step.seen[parameter] = true;
        let (home, at) = (step.layout.home(parameter), step.layout.count(parameter));
        let (leaf, slots) = (step.begun - 1, &mut step.buckets[home].slots);
        step.accumulation.add(leaf, slots, step.layout.span(parameter), values);
        step.accumulation.add(leaf, slots, at..at + 1, &Constant(count));
        self.release(step, home);
    }

    /// Something a bucket waits for has come.
    fn release(&self, step: &mut Step, bucket: usize) {
        if step.begun < self.own.len() {
            return;
        }
        step.buckets[bucket].missing -= 1;
        if step.buckets[bucket].missing > 0 || !self.overlap {
            return;
        }
        for bucket in step.turns.ready(bucket) {
            self.submit(step, bucket);
        }
    }

    fn submit(&self, step: &mut Step, bucket: usize) {
        let now = Instant::now();
        step.strategy.submit(Gradients {
            bucket,
            slots: std::mem::take(&mut step.buckets[bucket].slots),
            subtrees: step.accumulation.sums(),
            gradients: step.layout.buckets()[bucket].gradients,
            shards: self.shards.count(),
            submitted: now,
            started: now,
            ended: now,
            folding: Duration::ZERO,
        });
    }

    /// Cuts the parameters into buckets of other sizes.
    fn lay_out(&self, step: &mut Step, sizes: BucketSizes) {
        let lengths: Vec<usize> = self.parameters.iter().map(|p| p.len).collect();
        step.layout = Layout::new(&lengths, sizes, self.align);
        let slots = step.accumulation.slots();
        let memory = |len: usize| Bucket { slots: vec![vec![0.0; len]; slots], missing: 0 };
        step.buckets = step.layout.buckets().iter().map(|b| memory(b.len)).collect();
        step.turns = Turns::new(step.buckets.len());
        step.start_over();
    }

    fn lock(&self) -> MutexGuard<'_, Step> {
        self.step.lock().expect("no panic while a gradient is taken")
    }
}

impl Step {
    /// Ready for the first shard of a step.
    fn start_over(&mut self) {
        self.begun = 0;
        self.turns.reset();
        for (bucket, plan) in self.buckets.iter_mut().zip(self.layout.buckets()) {
            bucket.missing = plan.parameters.len();
        }
        // The first one also waits for the numbers of the step.
        self.buckets[0].missing += 1;
    }
}

impl Clock {
    fn new(now: Instant) -> Clock {
        Clock {
            begin: now,
            shard: now,
            backward: now,
            computed: now,
            compute: Duration::ZERO,
            last_backward: Duration::ZERO,
        }
    }
}

/// Fails on all ranks if one has registered other parameters than rank 0.
fn expect_equal_models(group: &Group, parameters: &[Parameter]) -> Result<(), SyncError> {
    let fingerprint = |parameter: &Parameter| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(parameter.len as u64).to_le_bytes());
        hasher.update(parameter.name.as_bytes());
        let hash = hasher.finalize();
        i64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
    };
    let own: Vec<i64> = parameters.iter().map(fingerprint).collect();
    let mut length = [own.len() as i64];
    group.broadcast(&mut length, 0)?;
    let mut first = own.clone();
    first.resize(length[0] as usize, 0);
    group.broadcast(&mut first, 0)?;
    // Where this rank's list differs, or -1.
    let differs = (0..own.len().max(first.len())).find(|i| own.get(*i) != first.get(*i));
    let mut all = vec![-1; group.size()];
    group.all_gather(&[differs.map_or(-1, |i| i as i64)], &mut all)?;
    match all.iter().position(|differs| *differs >= 0) {
        None => Ok(()),
        Some(rank) => Err(SyncError::DifferentModels { rank, parameter: all[rank] as usize }),
    }
}
