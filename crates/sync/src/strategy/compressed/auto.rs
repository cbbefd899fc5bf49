//! Chooses the codec of a run, once, by what is predicted to be fastest.
//!
//! The first steps run without a codec and are observed. Then, between two steps and all together, the
//! ranks agree on what they saw, time a few empty calls, and try how fast each candidate codes. All
//! put the same numbers into the same [prediction](crate::advice), so that all choose the same. From
//! then on the choice is part of the run's state: a resumed run does not choose anew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_codec::{CodecSpec, Rules};
use unisono_collective::{Dtype, Error, Group, Op, Reduction, Request};

use super::calls::Calls;
use super::machine::{cpu_time, processors};
use super::memory::spread;
use super::probe::Sample;
use super::volume::{Assignment, World};
use super::{Compressed, Find, Save};
use crate::advice::{self, Advice, CANDIDATES, Candidate, Cost, Observed, ObservedBucket, Short};
use crate::bucket::Layout;
use crate::error::SyncError;
use crate::times::StepTimes;

/// Steps at the beginning that do not count: they pay for new memory and new connections.
const SKIPPED: usize = 2;

/// Steps that count. More: less noise. Fewer: a run that would profit does so earlier.
const COUNTED: usize = 6;

/// Empty calls that are timed.
const CALLS: usize = 15;

/// Elements of a short call. More: those of a codec are shorter. Fewer: what links let pass at once
/// is not seen.
const SHORT: usize = 4096;

/// How long a link is left alone before a short call: longer than what it may save up takes to pass.
const PAUSE: Duration = Duration::from_millis(5);

/// How many times what the cost model says a byte may have cost. More: waiting for a processor is
/// taken for the price of a byte. Less: the model's errors count.
const BELIEVABLE: f64 = 2.0;

/// Elements for which a byte is priced at least, so that the price is not that of a call.
const LEAST_PRICED: usize = 1 << 20;

/// The name by which the choice is saved: one more than the place among the [`CANDIDATES`], 0 for
/// none, and less than 0 if there is none yet.
const CHOICE: &str = "codec.choice";

/// The choice of a codec.
pub enum Choice {
    /// There is none yet.
    Undecided(Observer),
    /// One of the [`CANDIDATES`], or none.
    Made(Option<usize>),
}

/// Takes note of steps.
#[derive(Default)]
pub struct Observer {
    /// Steps that it has seen.
    observed: u64,
    skipped: usize,
    layout: Option<Arc<Layout>>,
    steps: Vec<Noted>,
    /// Where the counters stood before the first step that counts.
    before: Counters,
}

/// What only ever grows.
#[derive(Clone, Copy, Default)]
struct Counters {
    /// Bytes that this rank has sent.
    sent: u64,
    /// Processor time of this process.
    cpu: Duration,
}

/// A step, in seconds since it began.
struct Noted {
    seconds: f64,
    computed: f64,
    /// Seconds in which weights were updated.
    update: f64,
    folding: f64,
    /// When each bucket was ready, and how long it was under way.
    buckets: Vec<(f64, f64)>,
}

impl Observer {
    /// Takes note of a step; whether these are enough.
    fn note(&mut self, layout: &Arc<Layout>, times: &StepTimes, now: Counters) -> bool {
        self.observed += 1;
        if self.layout.as_ref() != Some(layout) {
            self.layout = Some(layout.clone());
            self.steps.clear();
            self.skipped = 0;
        }
        if self.skipped < SKIPPED {
            self.skipped += 1;
            self.before = now;
            return false;
        }
        self.steps.push(Noted::new(times));
        self.steps.len() == COUNTED
    }

    /// Processors that computed gradients, on average.
    fn busy(&self, cpu: Duration) -> f64 {
        let sum = |of: fn(&Noted) -> f64| self.steps.iter().map(of).sum::<f64>();
        // Updates are made by one thread.
        (cpu.as_secs_f64() - sum(|s| s.update)).max(0.0) / sum(|s| s.computed).max(1e-9)
    }
}

impl Noted {
    fn new(times: &StepTimes) -> Noted {
        let since = |instant: Instant| (instant - times.begin).as_secs_f64();
        let bucket = |bucket: &crate::times::BucketTimes| {
            let moving = (bucket.ended - bucket.started).saturating_sub(bucket.folding);
            (since(bucket.submitted), moving.saturating_sub(bucket.coding).as_secs_f64())
        };
        let after = times.end - times.computed;
        Noted {
            seconds: since(times.end),
            computed: since(times.computed),
            update: after.saturating_sub(times.blocked).as_secs_f64(),
            folding: times.buckets.iter().map(|bucket| bucket.folding.as_secs_f64()).sum(),
            buckets: times.buckets.iter().map(bucket).collect(),
        }
    }
}

impl Compressed {
    /// Takes note of a step without a codec; after enough of them, chooses one.
    pub(super) fn observe_dense(
        &mut self,
        step: u64,
        layout: &Arc<Layout>,
        times: &StepTimes,
    ) -> Result<Option<Arc<Advice>>, SyncError> {
        let now = Counters { sent: self.combiner.sent(), cpu: cpu_time() };
        let Choice::Undecided(observer) = &mut self.choice else { return Ok(None) };
        if !observer.note(layout, times, now) {
            return Ok(None);
        }
        let observer = std::mem::take(observer);
        let start = Instant::now();
        let observed = self.agree(step, layout, &observer, now)?;
        let mut advice = self.choose_for(&observed, layout)?;
        advice.cost = self.cost(observer.observed, now.sent, start)?;
        Ok(Some(Arc::new(advice)))
    }

    /// What deciding took since then, as all ranks together see it.
    fn cost(&self, steps: u64, sent: u64, start: Instant) -> Result<Cost, Error> {
        let group = self.combiner.group();
        let mut bytes = [(self.combiner.sent() - sent) as i64];
        let mut seconds = [start.elapsed().as_secs_f64()];
        group.all_reduce(&mut bytes, Reduction::Sum)?;
        group.all_reduce(&mut seconds, Reduction::Max)?;
        Ok(Cost { steps, bytes: bytes[0] as u64, seconds: seconds[0] })
    }

    /// Chooses what suits the observed steps.
    fn choose_for(&mut self, observed: &Observed, layout: &Layout) -> Result<Advice, SyncError> {
        let advice = self.advise(observed, layout)?;
        let place = |chosen: &CodecSpec| candidates().iter().position(|codec| codec == chosen);
        self.decide(advice.chosen.as_ref().and_then(place));
        Ok(advice)
    }

    /// Uses one of the candidates from now on, or none.
    fn decide(&mut self, place: Option<usize>) {
        self.choice = Choice::Made(place);
        if let Some(codec) = place.map(|place| candidates().swap_remove(place)) {
            let exceptions = self.compression.rules.exceptions.clone();
            self.set_rules(Rules { codec: Some(codec), exceptions });
        }
    }

    fn advise(&self, observed: &Observed, layout: &Layout) -> Result<Advice, SyncError> {
        let world = World { shards: self.shards, workers: self.workers() };
        let rules = |codec: Option<CodecSpec>| Rules {
            codec,
            exceptions: self.compression.rules.exceptions.clone(),
        };
        let rules: Vec<(Option<CodecSpec>, Rules)> = std::iter::once(None)
            .chain(candidates().into_iter().map(Some))
            .map(|codec| (codec.clone(), rules(codec)))
            .collect();
        let speeds = match world.workers {
            1 => Vec::new(),
            _ => self.speeds(rules.iter().map(|(_, rules)| rules), world)?,
        };
        let seconds = |codec: &CodecSpec| {
            speeds.iter().find(|(known, _)| known == codec).map_or(0.0, |(_, seconds)| *seconds)
        };
        let calls = Calls::new(self.combiner.group());
        let (mut dense, mut candidates) = (Vec::new(), Vec::new());
        for (codec, rules) in rules {
            let assignment = Assignment::new(&rules, &self.parameters, seconds);
            let volumes = world.volumes(layout, &self.parameters, &assignment, &calls)?;
            match codec {
                None => dense = volumes,
                Some(codec) => {
                    let is_used = assignment.codecs.iter().any(|(used, ..)| *used == codec);
                    if is_used && world.workers > 1 {
                        candidates.push(Candidate { codec, volumes });
                    }
                }
            }
        }
        Ok(advice::advise(observed, &dense, &candidates))
    }

    /// What an element takes with each codec that any of the rules use, on the slowest rank.
    fn speeds<'a>(
        &self,
        rules: impl Iterator<Item = &'a Rules>,
        world: World,
    ) -> Result<Vec<(CodecSpec, f64)>, Error> {
        let mut speeds: Vec<(CodecSpec, f64)> = Vec::new();
        for rules in rules {
            let assigned = Assignment::new(rules, &self.parameters, |_| 0.0);
            for (i, (spec, codec, _)) in assigned.codecs.iter().enumerate() {
                if speeds.iter().any(|(known, _)| known == spec) {
                    continue;
                }
                let sample = Sample::new(&self.parameters, |p| assigned.of[p] == Some(i));
                self.combiner.group().barrier()?;
                let feeds_back = self.feeds_back(&**codec);
                let seconds = sample.seconds_per_element(&**codec, feeds_back, world);
                speeds.push((spec.clone(), seconds));
            }
        }
        let mut slowest: Vec<f64> = speeds.iter().map(|(_, seconds)| *seconds).collect();
        self.combiner.group().all_reduce(&mut slowest, Reduction::Max)?;
        Ok(speeds.into_iter().zip(slowest).map(|((spec, _), slowest)| (spec, slowest)).collect())
    }

    /// What all ranks saw together. A step is as long as that of the slowest rank, a bucket as ready
    /// as on the last. Only the last rank to be ready does not wait for others, and other threads can
    /// only hold a bucket up, so how long it was under way is known from the shortest time.
    fn agree(
        &self,
        step: u64,
        layout: &Layout,
        observer: &Observer,
        now: Counters,
    ) -> Result<Observed, SyncError> {
        let group = self.combiner.group();
        let buckets = layout.buckets().len();
        let (mut slowest, mut quickest) = (Vec::new(), Vec::new());
        for noted in &observer.steps {
            slowest.extend([noted.seconds, noted.computed, noted.update, noted.folding]);
            slowest.extend(noted.buckets.iter().map(|(ready, _)| ready));
            quickest.extend(noted.buckets.iter().map(|(_, moving)| moving));
        }
        group.all_reduce(&mut slowest, Reduction::Max)?;
        group.all_reduce(&mut quickest, Reduction::Min)?;
        let steps = observer.steps.len() as u64;
        let mut sent = [((now.sent - observer.before.sent) / steps) as i64];
        group.all_reduce(&mut sent, Reduction::Sum)?;

        let slowest = |column: usize| median(slowest.iter().skip(column).step_by(4 + buckets));
        let quickest = |column: usize| {
            quickest.iter().skip(column).step_by(buckets).copied().fold(f64::INFINITY, f64::min)
        };
        let update = slowest(2);
        let folded: usize = layout.buckets().iter().map(|bucket| bucket.len).sum();
        let gradients = layout.buckets().iter().map(|bucket| bucket.gradients);
        let elements = gradients.clone().sum::<usize>().max(1) as f64;
        let bucket = |(i, gradients): (usize, usize)| ObservedBucket {
            ready: slowest(4 + i),
            moving: quickest(i),
            update: update * gradients as f64 / elements,
        };
        Ok(Observed {
            step,
            workers: group.size(),
            seconds: slowest(0),
            computed: slowest(1),
            buckets: gradients.enumerate().map(bucket).collect(),
            latency: latency(group, 1, Duration::ZERO)?,
            short: short(group)?,
            dearest_byte: dearest_byte(group, folded)?,
            fold: slowest(3) / folded.max(1) as f64,
            wire_bytes: sent[0] as u64,
            processors: processors(group, observer.busy(now.cpu - observer.before.cpu))?,
        })
    }

    pub(super) fn save_choice(&self, group: &Group, each: &mut Save<'_>) {
        if !self.compression.auto || self.parameters.is_empty() || group.rank() != 0 {
            return;
        }
        let place = match self.choice {
            Choice::Undecided(_) => -1.0,
            Choice::Made(None) => 0.0,
            Choice::Made(Some(place)) => (place + 1) as f32,
        };
        each(CHOICE.to_owned(), 0, &[place]);
    }

    pub(super) fn restore_choice(
        &mut self,
        group: &Group,
        find: &Find<'_>,
    ) -> Result<(), SyncError> {
        if !self.compression.auto || self.parameters.is_empty() {
            return Ok(());
        }
        let saved = spread(group, CHOICE, 1, find)?[0];
        if saved < 0.0 {
            self.choice = Choice::Undecided(Observer::default());
            return Ok(());
        }
        let place = (saved as usize).checked_sub(1);
        if place.is_some_and(|place| place >= CANDIDATES.len()) {
            return Err(SyncError::MissingState { name: CHOICE.to_owned() });
        }
        self.decide(place);
        Ok(())
    }
}

fn candidates() -> Vec<CodecSpec> {
    let parse = |name: &&str| name.parse().expect("candidates are codecs");
    CANDIDATES.iter().map(parse).collect()
}

/// A short call, and how long it takes on the slowest rank.
fn short(group: &Group) -> Result<Short, Error> {
    let share = 1.0 - 1.0 / group.size() as f64;
    let bytes = 8.0 * SHORT as f64 * share;
    Ok(Short { bytes, seconds: latency(group, SHORT, PAUSE)? })
}

/// What a call of so many elements takes after a pause, on the slowest rank.
fn latency(group: &Group, elements: usize, pause: Duration) -> Result<f64, Error> {
    let mut calls = Vec::with_capacity(CALLS);
    let mut values = vec![0f32; elements];
    for _ in 0..CALLS {
        std::thread::sleep(pause);
        // The rank that slept longest is waited for before the clock starts.
        group.barrier()?;
        let start = Instant::now();
        group.all_reduce(&mut values, Reduction::Sum)?;
        calls.push(start.elapsed().as_secs_f64());
    }
    let mut slowest = [median(calls.iter())];
    group.all_reduce(&mut slowest, Reduction::Max)?;
    Ok(slowest[0])
}

/// What a byte that leaves a rank can cost at most. On one host it takes nothing but copying, of which
/// the cost model knows the price: whatever took longer was other threads in the way, and would be of
/// encoded data, too. Between hosts the link itself may be slower than it was at first.
fn dearest_byte(group: &Group, elements: usize) -> Result<f64, Error> {
    if group.size() == 1 || !group.topology().is_one_host() {
        return Ok(f64::INFINITY);
    }
    let elements = elements.max(LEAST_PRICED);
    let explained = group.explain(Request::sized(Op::AllReduce, Dtype::F32, elements))?;
    let priced = explained.candidates.iter().chain(&explained.others);
    let chosen = priced.into_iter().find(|priced| priced.algorithm == explained.chosen);
    let bytes = 8.0 * elements as f64 * (1.0 - 1.0 / group.size() as f64);
    Ok(chosen.map_or(f64::INFINITY, |chosen| BELIEVABLE * chosen.seconds / bytes))
}

fn median<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    let mut values: Vec<f64> = values.copied().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::BucketSizes;
    use crate::shards::Shards;
    use crate::strategy::{Compression, Gradients, Strategy};
    use crate::synchronizer::Parameter;
    use unisono_collective::Options;

    const WORKERS: usize = 2;
    const SHARDS: usize = 4;

    fn parameters() -> Vec<Parameter> {
        let matrix = |name: &str| Parameter { name: name.to_owned(), shape: vec![64, 64] };
        vec![matrix("first"), matrix("second"), Parameter::flat("bias", 64)]
    }

    /// What every rank of a group makes of its part of a run that chooses.
    fn on_all_ranks<R: Send>(run: impl Fn(Compressed, Arc<Layout>) -> R + Sync) -> Vec<R> {
        let groups = Group::local(WORKERS, &Options::default()).unwrap();
        let start = |group: Group| {
            let compression = Compression {
                rules: Rules::default(),
                auto: true,
                ..Compression::new(CodecSpec::Sign)
            };
            let shards = Shards::new(SHARDS, WORKERS).unwrap();
            let lengths: Vec<usize> = parameters().iter().map(Parameter::elements).collect();
            let layout = Layout::new(&lengths, BucketSizes { first: 1, others: 1 }, 1);
            run(Compressed::new(group, shards, &parameters(), compression), Arc::new(layout))
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| start(g))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// A step of which the buckets take this long.
    fn step(layout: &Layout, moving: Duration) -> StepTimes {
        let begin = Instant::now();
        let computed = begin + Duration::from_millis(10);
        let bucket = |i: usize| crate::times::BucketTimes {
            bytes: layout.buckets()[i].len * 4,
            submitted: computed,
            started: computed + moving * i as u32,
            ended: computed + moving * (i as u32 + 1),
            folding: Duration::ZERO,
            coding: Duration::ZERO,
        };
        let buckets: Vec<_> = (0..layout.buckets().len()).map(bucket).collect();
        let blocked = moving * buckets.len() as u32;
        let (compute, backward) = (computed - begin, computed - begin);
        StepTimes { begin, computed, end: computed + blocked, compute, backward, blocked, buckets }
    }

    /// The mean of a bucket, of which every shard has other gradients.
    fn exchange(compressed: &mut Compressed, layout: &Arc<Layout>, bucket: usize) -> Vec<u32> {
        assert!(compressed.wants_leaves(9));
        let plan = &layout.buckets()[bucket];
        let leaf = |shard: usize| -> Vec<f32> {
            let value = |i: usize| ((i * 37 + shard * 101) % 59) as f32 - 29.0;
            (0..plan.len).map(|i| if i < plan.gradients { value(i) } else { 1.0 }).collect()
        };
        let slots: Vec<_> = compressed.own.clone().map(|shard| leaf(shard).into()).collect();
        let filled = slots.len();
        let mut gradients = Gradients::new(bucket, layout.clone(), 9, slots, filled, SHARDS);
        compressed.exchange(&mut gradients).unwrap();
        gradients.slots[0].iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn over_a_slow_link_all_ranks_choose_the_same_codec_and_go_on_with_it() {
        let outcomes = on_all_ranks(|mut compressed, layout| {
            let mut observer = Observer::default();
            let now = Counters::default();
            let noted = step(&layout, Duration::from_secs(2));
            let enough = (0..SKIPPED + COUNTED).map(|_| observer.note(&layout, &noted, now));
            assert_eq!(enough.filter(|enough| *enough).count(), 1);
            let observed = compressed.agree(7, &layout, &observer, now).unwrap();
            // As if the ranks were on different hosts.
            let observed = Observed { dearest_byte: f64::INFINITY, ..observed };
            let advice = compressed.choose_for(&observed, &layout).unwrap();
            assert!(compressed.is_settled());
            let means: Vec<_> = (0..layout.buckets().len())
                .map(|b| exchange(&mut compressed, &layout, b))
                .collect();
            let later = compressed.observe(8, &layout, &noted).unwrap();
            assert!(later.is_none(), "it chooses once");
            (advice, means)
        });
        assert!(outcomes[0].0.chosen.is_some(), "{:?}", outcomes[0].0);
        assert!((outcomes[0].0.measured_dense_seconds - 6.01).abs() < 1e-6);
        for outcome in &outcomes {
            assert_eq!(*outcome, outcomes[0]);
        }
    }

    #[test]
    fn one_host_is_not_a_slow_link() {
        let advice = on_all_ranks(|mut compressed, layout| {
            let noted = step(&layout, Duration::from_secs(2));
            let steps = (0..SKIPPED + COUNTED).map(|i| i as u64);
            let advice: Vec<_> =
                steps.filter_map(|i| compressed.observe(i, &layout, &noted).unwrap()).collect();
            assert_eq!(advice.len(), 1);
            assert!(compressed.is_settled() && !compressed.wants_leaves(9));
            advice[0].clone()
        });
        assert_eq!(advice[0].chosen, None, "{:?}", advice[0]);
        assert_eq!(advice[0], advice[1]);
        assert_eq!(advice[0].rows.len(), 1 + CANDIDATES.len());
    }

    #[test]
    fn steps_with_other_buckets_are_not_mixed() {
        on_all_ranks(|_, layout| {
            let mut observer = Observer::default();
            let noted = step(&layout, Duration::ZERO);
            let now = Counters::default();
            (1..SKIPPED + COUNTED).for_each(|_| assert!(!observer.note(&layout, &noted, now)));
            let other = Arc::new(Layout::new(&[64], BucketSizes::default(), 1));
            let noted = step(&other, Duration::ZERO);
            (1..SKIPPED + COUNTED).for_each(|_| assert!(!observer.note(&other, &noted, now)));
            assert!(observer.note(&other, &noted, now));
            assert!(observer.steps.iter().all(|step| step.buckets.len() == 1));
        });
    }
}
