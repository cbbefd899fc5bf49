//! One replica's view of a step: takes the gradients of its shards, gives back the mean of all.
//!
//! A step goes like this. For each of its shards, in order, the worker calls
//! [`begin_shard`](Synchronizer::begin_shard), computes the loss, calls
//! [`begin_backward`](Synchronizer::begin_backward), hands over every parameter's
//! [`gradient`](Synchronizer::gradient) as backward produces it, and calls
//! [`end_shard`](Synchronizer::end_shard). Gradients of the last shard complete buckets, which travel
//! while backward goes on. [`finish`](Synchronizer::finish) then hands out the means, bucket by
//! bucket, while later ones are still under way, or, if they are [withheld](Settings::withhold), once
//! all of them are back.
//!
//! A parameter that got no gradient in a shard counts as zero there. One that got none in any shard
//! of any worker is not handed out, so that no optimizer touches it.

mod sums;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use unisono_collective::{AbortHandle, Group};

use crate::accumulate::{Accumulation, Constant, Values};
use crate::advice::Advice;
use crate::bucket::{BucketSizes, Layout, SCALARS, Turns};
use crate::combine;
use crate::error::SyncError;
use crate::shards::Shards;
use crate::slot::{Arena, Slot};
use crate::strategy::{
    self, Compression, Find, Gradients, NoGroup, Queue, Save, StrategySpec, Votes, Weights,
};
use crate::times::{BucketTimes, StepTimes};
use crate::tune::Tuner;

/// A parameter of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, for people.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// A parameter of one dimension.
    pub fn flat(name: impl Into<String>, len: usize) -> Parameter {
        Parameter { name: name.into(), shape: vec![len] }
    }

    /// Its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How replicas are kept in step. Equal on all ranks; none of it changes a bit of the weights but
/// the number of shards, the strategy and the compression.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Shards of the global batch.
    pub shards: usize,
    /// Whether the workers agree in every step, or less often.
    pub strategy: StrategySpec,
    /// Sizes of the buckets; by default they are found while training.
    pub buckets: Option<BucketSizes>,
    /// Whether buckets travel while backward goes on, or all after it.
    pub overlap: bool,
    /// Whether gradients travel in fewer bytes, and how.
    pub compression: Option<Compression>,
    /// Whether [`Synchronizer::finish`] waits for all buckets of a step before it updates the first
    /// parameter: then a step that fails has changed no weight, and can be computed again. Without, the
    /// update of a bucket hides behind the buckets that are still under way.
    pub withhold: bool,
}

impl Settings {
    /// The defaults, for a run with this many shards.
    pub fn new(shards: usize) -> Settings {
        Settings {
            shards,
            strategy: StrategySpec::AllReduce,
            buckets: None,
            overlap: true,
            compression: None,
            withhold: false,
        }
    }
}

/// What is known after a step.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Whether the workers have agreed in this step. If so, the loss and the vote are the same on all
    /// ranks.
    pub agreed: bool,
    /// The mean loss over all shards; over those of this worker, if the workers have not agreed.
    pub loss: f32,
    /// Whether any rank voted to stop and all stop after this step.
    pub stop: bool,
    /// Whether any rank voted for a change of members, and all leave the group after this step.
    pub regroup: bool,
    /// When things happened on this rank.
    pub times: StepTimes,
    /// With a codec, whether it was in force: not in its warm-up, nor before one was chosen.
    pub encoded: Option<bool>,
    /// Whether a codec was chosen after this step, and why.
    pub advice: Option<Arc<Advice>>,
}

/// Keeps one replica in step with the others.
pub struct Synchronizer {
    parameters: Vec<Parameter>,
    settings: Settings,
    step: Mutex<Step>,
}

/// A step in progress, in one group.
struct Step {
    queue: Queue,
    /// What was sent in groups before this one.
    sent_before: u64,
    /// Whether no strategy that remembers something was left behind since this group formed.
    survives: bool,
    /// The shards whose gradients are summed.
    shards: Shards,
    /// Those of this worker.
    own: Range<usize>,
    /// The same, as leaves of the tree that is summed.
    leaves: Range<usize>,
    /// What bucket lengths are a multiple of.
    align: usize,
    /// The step's number in the run, from 0.
    number: u64,
    accumulation: Accumulation,
    /// Whether the gradients of the shards are kept apart.
    apart: bool,
    /// Whether the worker hands over sums of its gradients.
    outside: bool,
    layout: Arc<Layout>,
    buckets: Vec<Bucket>,
    /// Of which the first slots of the buckets are made.
    arena: Arena,
    turns: Turns,
    sizes: BucketSizes,
    tuner: Option<Tuner>,
    /// Shards of this step that have begun.
    begun: usize,
    /// Whether a shard is being computed, so that gradients belong to it.
    open: bool,
    /// Which parameters have had their gradient in the shard under way.
    seen: Vec<bool>,
    /// What this rank votes for in the next backward pass.
    votes: Votes,
    /// What it has voted for in the step under way.
    cast: Votes,
    last_seconds: f32,
    clock: Clock,
}

/// A bucket's memory, and what it waits for.
#[derive(Default)]
struct Bucket {
    slots: Vec<Slot>,
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
const REGROUP: usize = 3;

impl Synchronizer {
    /// Joins the replicas of a group, all of which must call this with the same parameters and
    /// settings. Without a group, or in a group of one, it waits for no other rank.
    pub fn new(
        group: Option<&Group>,
        parameters: Vec<Parameter>,
        settings: Settings,
    ) -> Result<Synchronizer, SyncError> {
        let (step, _) = Step::new(group, &parameters, &settings, true)?;
        let synchronizer = Synchronizer { parameters, settings, step: Mutex::new(step) };
        synchronizer.go_on_from(0);
        Ok(synchronizer)
    }

    /// Goes on in another group, whose ranks all call this, those that were never in a group too; without
    /// one, alone. What belongs to the step under way is dropped, whether or not the group before has
    /// failed: the step is to be computed again. The number of the next step stays.
    ///
    /// If the strategy of a rank remembers something from step to step, that is lost, and all ranks get
    /// [`SyncError::StateLost`]: the synchronizer belongs to the new group, and is to be
    /// [restored](Synchronizer::restore). After any other error it belongs to no group: steps fail with
    /// [`SyncError::NoGroup`], and this can be called again, with the next one.
    pub fn regroup(&self, group: Option<&Group>) -> Result<(), SyncError> {
        self.regroup_from(group, false)
    }

    /// As [`Synchronizer::regroup`]. A caller that has kept what the strategy remembered when the workers agreed last
    /// loses nothing: it goes back there, and puts back what is [shared](Synchronizer::each_shared).
    pub fn regroup_from(&self, group: Option<&Group>, is_kept: bool) -> Result<(), SyncError> {
        let survives = self.lock().leave() || is_kept;
        // No lock is held while ranks wait for each other.
        let formed = Step::new(group, &self.parameters, &self.settings, survives);
        let mut guard = self.lock();
        let step = &mut *guard;
        let outcome = formed.and_then(|(mut next, all_survive)| {
            (next.number, next.sent_before) = (step.number, step.sent_before);
            // A vote for a change of members has got what it was for.
            next.votes.stop = step.votes.stop;
            next.outside = step.outside;
            *step = next;
            let strategy = step.queue.strategy().name();
            if all_survive { Ok(()) } else { Err(SyncError::StateLost { strategy }) }
        });
        self.lay_out(step);
        step.start_over();
        outcome
    }

    /// The parameters, in order of registration.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The shards whose gradients this worker computes.
    pub fn shards(&self) -> Range<usize> {
        self.lock().own.clone()
    }

    /// The strategy's name.
    pub fn strategy(&self) -> String {
        self.lock().queue.strategy().name()
    }

    /// The number of buckets at present.
    pub fn buckets(&self) -> usize {
        self.lock().buckets.len()
    }

    /// Bytes this rank has sent so far, in all groups.
    pub fn sent(&self) -> u64 {
        self.lock().sent()
    }

    /// What ends its exchanges, for a caller that does not want to wait any longer; `None` if it waits
    /// for no other rank.
    pub fn abort_handle(&self) -> Option<AbortHandle> {
        self.lock().queue.abort_handle()
    }

    /// Begins the next of this worker's shards; which one.
    ///
    /// # Panics
    /// If all have been computed and [`Synchronizer::finish`] was not called, or one is not ended.
    pub fn begin_shard(&self) -> usize {
        let mut step = self.lock();
        assert!(step.begun < step.own.len(), "all shards of this step are computed: finish it");
        assert!(!step.open, "a shard has begun and was not ended");
        step.open = true;
        step.begun += 1;
        step.seen.fill(false);
        let now = Instant::now();
        step.clock.shard = now;
        step.clock.backward = now;
        step.own.start + step.begun - 1
    }

    /// The forward pass of the shard is done; gradients come next.
    pub fn begin_backward(&self, loss: f32) {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.open, "backward begins inside of a shard");
        step.clock.backward = Instant::now();
        let votes = std::mem::take(&mut step.votes);
        step.cast |= votes;
        let mut values = [0.0; SCALARS];
        (values[LOSS], values[SECONDS]) = (loss, step.last_seconds);
        (values[STOP], values[REGROUP]) = (votes.stop.into(), votes.regroup.into());
        let (leaf, span) = (step.begun - 1, step.layout.scalars());
        step.accumulation.add(leaf, &mut step.buckets[0].slots, span, &values.as_slice());
        self.release(step, 0);
    }

    /// Votes that training should stop after the present step. Heard if it is said before the
    /// last backward pass of the step begins, else with the next one.
    pub fn vote_to_stop(&self) {
        self.lock().votes.stop = true;
    }

    /// Votes that the ranks should leave the group after the present step, so that another one takes its
    /// place: a rank wants to join, or this one to leave. Heard as a [vote to
    /// stop](Synchronizer::vote_to_stop) is.
    pub fn vote_to_regroup(&self) {
        self.lock().votes.regroup = true;
    }

    /// Takes a parameter's gradient in the shard under way. `false` if there is no shard under way:
    /// then the gradient is not for us.
    ///
    /// # Panics
    /// If the length is not the parameter's, or it has had its gradient in this shard.
    pub fn gradient(&self, parameter: usize, gradient: &[f32]) -> bool {
        assert_eq!(
            gradient.len(),
            self.parameters[parameter].elements(),
            "the length of a gradient"
        );
        self.gradient_from(parameter, &gradient)
    }

    /// As [`Synchronizer::gradient`], from values that do not lie in order.
    pub fn gradient_from(&self, parameter: usize, gradient: &impl Values) -> bool {
        let mut guard = self.lock();
        let step = &mut *guard;
        if !step.open {
            return false;
        }
        assert!(!step.outside, "the worker hands over sums");
        assert!(!step.seen[parameter], "one gradient per shard");
        self.take(step, parameter, gradient, 1.0);
        true
    }

    /// Ends the shard under way. Parameters that got no gradient have none in this shard. A worker that [sums
    /// outside](Synchronizer::sum_outside) has ended all sums that have their last shard in this one.
    pub fn end_shard(&self) {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.open, "a shard ends that has begun");
        for parameter in (0..self.parameters.len()).rev() {
            if !step.seen[parameter] && !step.outside {
                self.take(step, parameter, &Constant(0.0), 0.0);
            }
        }
        step.open = false;
        let now = Instant::now();
        step.clock.compute += now - step.clock.shard;
        if step.begun == step.own.len() {
            step.clock.computed = now;
            step.clock.last_backward = now - step.clock.backward;
        }
    }

    /// Ends the step: calls `update` with every parameter that had a gradient anywhere, and the
    /// mean of its gradient over all shards. After an error some may have been updated and others
    /// not; with [`Settings::withhold`], none was.
    ///
    /// # Panics
    /// If not all shards of this worker were computed.
    pub fn finish(&self, mut update: impl FnMut(usize, &[f32])) -> Result<StepOutcome, SyncError> {
        let mut guard = self.lock();
        let step = &mut *guard;
        assert!(step.begun == step.own.len() && !step.open, "a step has all its shards");
        if !self.settings.overlap {
            for bucket in 0..step.buckets.len() {
                self.submit(step, bucket);
            }
        }
        let mut blocked = Duration::ZERO;
        let mut buckets = Vec::with_capacity(step.buckets.len());
        let mut scalars = [0.0; SCALARS];
        for bucket in 0..step.buckets.len() {
            let asked = Instant::now();
            let gradients = step.queue.collect()?;
            blocked += asked.elapsed();
            debug_assert_eq!(gradients.bucket, bucket);
            if bucket == 0 {
                scalars.copy_from_slice(&gradients.slots[0][step.layout.scalars()]);
            }
            buckets.push(BucketTimes::of(&gradients));
            step.buckets[bucket].slots = gradients.slots;
            if !self.settings.withhold {
                step.hand_out(bucket, &mut update);
            }
        }
        let end = Instant::now();
        let clock = std::mem::replace(&mut step.clock, Clock::new(end));
        let mut times = StepTimes {
            begin: clock.begin,
            computed: clock.computed,
            end,
            compute: clock.compute,
            backward: clock.last_backward,
            blocked,
            buckets,
        };
        let encoded = step.queue.strategy().encodes_from().map(|from| step.number >= from);
        let advice = step.queue.observe(step.number, &step.layout, &times)?;
        // What it took to decide is part of no step.
        let mut next = if advice.is_some() { Instant::now() } else { end };
        if self.settings.withhold {
            // From here on nothing fails.
            let all_back = Instant::now();
            (0..step.buckets.len()).for_each(|bucket| step.hand_out(bucket, &mut update));
            let updating = all_back.elapsed();
            (times.end, next) = (end + updating, next + updating);
        }
        step.clock = Clock::new(next);
        step.number += 1;
        step.last_seconds = (times.end - clock.begin).as_secs_f32();
        let shards = step.shards.count() as f32;
        let settled = step.queue.strategy().is_settled();
        let tuned = step.tuner.as_mut().filter(|tuner| settled && !tuner.is_settled());
        // The times of the step before this one, as all ranks saw them together.
        let resize = tuned.and_then(|tuner| {
            tuner.step(f64::from(scalars[SECONDS] / shards)).then(|| tuner.sizes())
        });
        if let Some(sizes) = resize {
            step.sizes = sizes;
        }
        if resize.is_some() || step.apart != step.wants_leaves() {
            self.lay_out(step);
        }
        step.start_over();
        step.cast = Votes::default();
        let agreed = !step.queue.strategy().is_local();
        let (stop, regroup) = (scalars[STOP] > 0.0, scalars[REGROUP] > 0.0);
        let loss = scalars[LOSS] / shards;
        Ok(StepOutcome { agreed, loss, stop, regroup, times, encoded, advice })
    }

    /// The next step is this one of the run, counted from 0.
    pub fn go_on_from(&self, step: u64) {
        let mut guard = self.lock();
        guard.number = step;
        self.lay_out(&mut guard);
        guard.start_over();
    }

    /// Takes the weights, which must be equal on all ranks, as those from which workers with
    /// [local steps](crate::strategy::LocalSteps) set out. Of no interest to other strategies.
    pub fn begin(&self, weights: &dyn Weights) {
        self.lock().queue.strategy().begin(weights);
    }

    /// After [`Synchronizer::finish`] and the update of the weights, lets workers with [local
    /// steps](crate::strategy::LocalSteps) agree, if it is time. Other strategies have agreed already.
    pub fn agree(
        &self,
        weights: &mut dyn Weights,
        outcome: &mut StepOutcome,
    ) -> Result<(), SyncError> {
        let mut guard = self.lock();
        let step = &mut *guard;
        let votes = Votes { stop: outcome.stop, regroup: outcome.regroup };
        let round = step.queue.strategy().agree(step.number, weights, outcome.loss, votes)?;
        let Some(round) = round else { return Ok(()) };
        outcome.times.blocked += round.blocked;
        outcome.times.buckets = round.buckets;
        outcome.agreed = round.agreed.is_some();
        outcome.stop = round.agreed.is_some_and(|agreed| agreed.votes.stop);
        outcome.regroup = round.agreed.is_some_and(|agreed| agreed.votes.regroup);
        if let Some(agreed) = round.agreed {
            outcome.loss = agreed.loss;
        }
        let now = Instant::now();
        outcome.times.end = now;
        step.clock = Clock::new(now);
        Ok(())
    }

    /// Makes the weights of workers with [local steps](crate::strategy::LocalSteps) equal, at the end of training.
    /// All ranks must call it.
    pub fn settle(&self, weights: &mut dyn Weights) -> Result<(), SyncError> {
        let step = self.lock();
        step.queue.strategy().settle(step.number, weights).map(drop)
    }

    /// Whether the workers step by themselves.
    pub fn has_local_steps(&self) -> bool {
        self.lock().queue.strategy().is_local()
    }

    /// Whether workers that agree now and then can go back to where they have agreed last: weights, optimizer state
    /// and what is [shared](Synchronizer::each_shared) are all that is needed for it. Only where updates are
    /// [withheld](Settings::withhold), so that a run that does not want it does not pay for it.
    pub fn has_rounds(&self) -> bool {
        self.settings.withhold && self.lock().queue.strategy().has_rounds()
    }

    /// Calls `each` with what workers have in common besides the weights after they have agreed.
    pub fn each_shared(&self, each: &mut dyn FnMut(&mut [f32])) {
        self.lock().queue.strategy().each_shared(each);
    }

    /// Whether weights and optimizer state are all of a run, because the strategy carries nothing from step to step:
    /// then a worker that gets them from another can go on in its place.
    pub fn remembers_nothing(&self) -> bool {
        self.lock().queue.strategy().survives_regroup(u64::MAX)
    }

    /// Whether the strategy remembers something by now that is lost with this group, so that the workers of the next
    /// get [`SyncError::StateLost`], unless they can go back to their last [round](Synchronizer::has_rounds). The
    /// same on all ranks.
    pub fn would_lose_state(&self) -> bool {
        let has_rounds = self.has_rounds();
        let step = self.lock();
        !has_rounds && !step.queue.strategy().survives_regroup(step.number)
    }

    /// Calls `with` with the weights of a parameter that all workers with [local
    /// steps](crate::strategy::LocalSteps) have agreed on last; `false` if all weights are agreed.
    pub fn agreed(&self, parameter: usize, with: impl FnOnce(&[f32])) -> bool {
        self.lock().queue.strategy().agreed(parameter).map(with).is_some()
    }

    /// As [`Strategy::save`](strategy::Strategy::save).
    pub fn save(&self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        self.lock().queue.strategy().save(group, each)
    }

    /// As [`Strategy::restore`](strategy::Strategy::restore).
    pub fn restore(&self, group: &Group, find: &Find<'_>) -> Result<(), SyncError> {
        self.lock().queue.strategy().restore(group, find)
    }

    /// Says that whatever happened since the last step was not part of the next: it begins now.
    pub fn begin_step(&self) {
        self.lock().clock.begin = Instant::now();
    }

    /// Adds a leaf of a parameter, and lets its bucket go if that was the last it waited for.
    fn take(&self, step: &mut Step, parameter: usize, values: &impl Values, count: f32) {
        step.seen[parameter] = true;
        let (bucket, at) = (step.layout.bucket_of(parameter), step.layout.count(parameter));
        let (leaf, slots) = (step.begun - 1, &mut step.buckets[bucket].slots);
        step.accumulation.add(leaf, slots, step.layout.span(parameter), values);
        step.accumulation.add(leaf, slots, at..at + 1, &Constant(count));
        self.release(step, bucket);
    }

    /// Something a bucket waits for has come.
    fn release(&self, step: &mut Step, bucket: usize) {
        if step.begun < step.own.len() {
            return;
        }
        step.buckets[bucket].missing -= 1;
        if step.buckets[bucket].missing > 0 || !self.settings.overlap {
            return;
        }
        for bucket in step.turns.ready(bucket) {
            self.submit(step, bucket);
        }
    }

    fn submit(&self, step: &mut Step, bucket: usize) {
        let slots = std::mem::take(&mut step.buckets[bucket].slots);
        let (layout, number) = (step.layout.clone(), step.number);
        let (filled, shards) = (step.accumulation.sums(), step.shards.count());
        let gradients = Gradients::new(bucket, layout, number, slots, filled, shards);
        step.queue.submit(gradients);
    }

    /// Cuts the parameters into buckets, with memory for what the strategy wants.
    fn lay_out(&self, step: &mut Step) {
        step.apart = step.wants_leaves();
        step.accumulation = match step.apart {
            true => Accumulation::apart(step.own.len()),
            false => Accumulation::new(step.shards.count(), step.leaves.clone()),
        };
        let lengths: Vec<usize> = self.parameters.iter().map(Parameter::elements).collect();
        step.layout = Arc::new(Layout::new(&lengths, step.sizes, step.align));
        let firsts = step.buckets.drain(..).filter_map(|bucket| bucket.slots.into_iter().next());
        step.arena.join(firsts);
        for (i, bucket) in step.layout.buckets().iter().enumerate() {
            // The numbers of the step, which are in the first bucket, are summed here in any case.
            let count = match step.outside && i > 0 {
                true => step.accumulation.sums(),
                false => step.accumulation.slots(),
            };
            // What is summed over all workers is the first one.
            let others = (1..count).map(|_| vec![0.0; bucket.len].into());
            let slots = std::iter::once(step.arena.cut(bucket.len)).chain(others).collect();
            step.buckets.push(Bucket { slots, missing: 0 });
        }
        step.turns = Turns::new(step.buckets.len());
    }

    fn lock(&self) -> MutexGuard<'_, Step> {
        self.step.lock().expect("no panic while a gradient is taken")
    }
}

impl Step {
    /// The first step in a group, still without buckets; and whether the state of the strategies of all
    /// its ranks `survives`.
    fn new(
        group: Option<&Group>,
        parameters: &[Parameter],
        settings: &Settings,
        survives: bool,
    ) -> Result<(Step, bool), SyncError> {
        let (rank, workers) = group.map_or((0, 1), |group| (group.rank(), group.size()));
        let shards = Shards::new(settings.shards, workers)?;
        let all_survive = match group {
            Some(group) => agree_on_models(group, parameters, survives)?,
            None => survives,
        };
        let own = shards.of(rank, workers);
        let Settings { strategy, compression, .. } = settings;
        let queue = strategy::build(strategy, group, shards, parameters, compression.clone())?;
        // By itself, a worker steps by the mean of its own shards.
        let (shards, leaves, workers) = match queue.strategy().is_local() {
            true => (Shards::new(own.len(), 1)?, 0..own.len(), 1),
            false => (shards, own.clone(), workers),
        };
        let alone = workers == 1;
        let bytes = parameters.iter().map(|p| p.elements()).sum::<usize>() * 4;
        let tuner = (!alone && settings.buckets.is_none()).then(|| Tuner::new(bytes));
        let sizes = settings.buckets.unwrap_or_else(|| match &tuner {
            Some(tuner) => tuner.sizes(),
            None => BucketSizes::default(),
        });
        let align = if alone { 1 } else { combine::alignment(shards, workers) };
        let group = queue.strategy().group().cloned().filter(|_| !alone && compression.is_none());
        let arena = match group {
            // Behind the gradients of a bucket are a number for each parameter, those of the step, and what aligns it.
            Some(group) => {
                let others = SCALARS + (parameters.len() + 1) * (1 + align);
                Arena::new(&group, bytes / 4 + others)?
            }
            None => Arena::default(),
        };
        let step = Step {
            queue,
            sent_before: 0,
            survives: true,
            number: 0,
            apart: false,
            outside: false,
            accumulation: Accumulation::new(shards.count(), leaves.clone()),
            layout: Arc::new(Layout::new(&[], sizes, align)),
            buckets: Vec::new(),
            arena,
            turns: Turns::new(0),
            sizes,
            tuner,
            begun: 0,
            open: false,
            seen: vec![false; parameters.len()],
            votes: Votes::default(),
            cast: Votes::default(),
            last_seconds: 0.0,
            clock: Clock::new(Instant::now()),
            shards,
            own,
            leaves,
            align,
        };
        Ok((step, all_survive))
    }

    /// Leaves the group, so that no rank waits there for this one, and drops what the step under way has
    /// accumulated and submitted; whether another group can go on without what the strategy remembers. What
    /// this rank voted for in the step still counts.
    fn leave(&mut self) -> bool {
        self.queue.abandon();
        self.survives &= self.queue.strategy().survives_regroup(self.number);
        self.sent_before = self.sent();
        self.queue = Queue::new(Box::new(NoGroup));
        self.open = false;
        self.votes |= std::mem::take(&mut self.cast);
        self.survives
    }

    fn sent(&self) -> u64 {
        self.sent_before + self.queue.sent()
    }

    /// Calls `update` with the parameters of a bucket that is back, and their means.
    fn hand_out(&self, bucket: usize, update: &mut impl FnMut(usize, &[f32])) {
        let mean = &self.buckets[bucket].slots[0];
        for &parameter in &self.layout.buckets()[bucket].parameters {
            if mean[self.layout.count(parameter)] > 0.0 {
                update(parameter, &mean[self.layout.span(parameter)]);
            }
        }
    }

    fn wants_leaves(&self) -> bool {
        self.queue.strategy().wants_leaves(self.number)
    }

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

/// Fails on all ranks if one has registered other parameters than rank 0. All ranks must call it.
pub fn expect_equal_models(group: &Group, parameters: &[Parameter]) -> Result<(), SyncError> {
    agree_on_models(group, parameters, true).map(drop)
}

/// The same; and whether the state of the strategy survives on all of them.
fn agree_on_models(
    group: &Group,
    parameters: &[Parameter],
    survives: bool,
) -> Result<bool, SyncError> {
    let fingerprint = |parameter: &Parameter| {
        let mut hasher = blake3::Hasher::new();
        for dimension in &parameter.shape {
            hasher.update(&(*dimension as u64).to_le_bytes());
        }
        hasher.update(b"of");
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
    let mut all = vec![0; 2 * group.size()];
    group.all_gather(&[differs.map_or(-1, |i| i as i64), survives.into()], &mut all)?;
    match all.iter().step_by(2).position(|differs| *differs >= 0) {
        None => Ok(all.iter().skip(1).step_by(2).all(|survives| *survives == 1)),
        Some(differs) => {
            let (rank, first) = (group.members()[differs], group.members()[0]);
            let parameter = all[2 * differs] as usize;
            Err(SyncError::DifferentModels { rank, first, parameter })
        }
    }
}
