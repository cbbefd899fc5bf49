//! All workers wait for all, and send less: gradients travel encoded.
//!
//! Every shard's gradient of a parameter is encoded by itself, together with what the encodings of
//! that shard have left out before. The shards' encodings then become one mean in the way that suits
//! the codec: [summed](summed), [span by span](spans), or [gathered](gathered). What is encoded, in
//! which order it is decoded and added, and where chance comes in, all depend on the shards and not on
//! who computes them. So the mean, too, has the same bits for any number of workers.
//!
//! Biases and other parameters that are not worth it travel in one exact all-reduce per bucket,
//! together with the counts that say which parameters had a gradient at all. One that had none
//! anywhere is left out of the rest, and its residuals stay as they are.

mod auto;
mod calls;
mod gathered;
mod machine;
mod memory;
mod momentum;
mod probe;
mod spans;
mod summed;
mod volume;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_codec::scale::Scale;
use unisono_codec::{Codec, CodecSpec, Passage, Rules, Task};
use unisono_collective::Group;

use super::{Find, Gradients, Save, Strategy};
use crate::advice::Advice;
use crate::bucket::Layout;
use crate::combine::{Combiner, alignment, fold_leaves};
use crate::error::SyncError;
use crate::shards::Shards;
use crate::slot::Slot;
use crate::synchronizer::Parameter;
use crate::times::StepTimes;
use auto::{Choice, Observer};
use memory::State;
pub use memory::{Remembered, spread};
use momentum::Momentum;

/// What is compressed, and from when on.
#[derive(Clone, Debug, PartialEq)]
pub struct Compression {
    /// Which parameters are compressed, and how.
    pub rules: Rules,
    /// Whether the codec of the rules is chosen after some steps, by what is predicted to be fastest.
    /// The rules have none before. Only where workers agree in every step; elsewhere none is chosen.
    pub auto: bool,
    /// Steps at the beginning in which nothing is.
    pub warm_up: u64,
    /// Whether residuals are kept. Without them, most codecs that are biased do not converge.
    pub error_feedback: bool,
    /// Whether gradients are encoded in units of their usual size, so that small elements do not
    /// drown. By default they are if every block has a scale of its own, which its largest elements
    /// decide about.
    pub relative: Option<bool>,
    /// What chance depends on.
    pub seed: u64,
}

impl Compression {
    /// One codec for all parameters that are worth it, from the first step on.
    pub fn new(codec: CodecSpec) -> Compression {
        Compression { rules: Rules::all(codec), ..Compression::none() }
    }

    /// Nothing is encoded.
    pub fn none() -> Compression {
        Compression {
            rules: Rules::default(),
            auto: false,
            warm_up: 0,
            error_feedback: true,
            relative: None,
            seed: 0,
        }
    }
}

impl Compression {
    /// Whether a codec gets gradients in units of their usual size.
    fn is_relative(&self, codec: &dyn Codec) -> bool {
        match codec.passage() {
            Passage::Spans(_) => self.relative.unwrap_or(true),
            // Floats are relative by nature.
            Passage::Summed(summed) if summed.is_identity() => false,
            _ => self.relative.unwrap_or(false),
        }
    }
}

/// The synchronous strategy with fewer bytes.
pub struct Compressed {
    combiner: Combiner,
    shards: Shards,
    /// Whether there are as many as workers, whose number may change when a run is resumed.
    shards_change: bool,
    /// Those of this worker.
    own: Range<usize>,
    compression: Compression,
    parameters: Vec<Parameter>,
    codecs: Vec<Arc<dyn Codec>>,
    /// The codec of every parameter that has one.
    chosen: Vec<Option<usize>>,
    states: Vec<State>,
    buffers: Buffers,
    coding: Duration,
    /// The choice of a codec.
    choice: Choice,
}

/// Memory that is kept from call to call; its content is not.
#[derive(Default)]
struct Buffers {
    plain: Vec<Vec<f32>>,
    summed: summed::SummedBuffers,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    mine: Vec<u8>,
    all: Vec<u8>,
    /// What every worker gets of all, in place.
    whole: Slot<u8>,
}

impl Compressed {
    /// Over the ranks of a group, which serves nothing else from now on.
    pub fn new(
        group: Group,
        shards: Shards,
        parameters: &[Parameter],
        compression: Compression,
    ) -> Compressed {
        let own = shards.of(group.rank(), group.size());
        let parameters = parameters.to_vec();
        let mut compressed = Compressed {
            combiner: Combiner::new(group, shards),
            shards,
            shards_change: false,
            own,
            compression,
            codecs: Vec::new(),
            chosen: Vec::new(),
            states: Vec::new(),
            parameters,
            buffers: Buffers::default(),
            coding: Duration::ZERO,
            choice: Choice::Undecided(Observer::default()),
        };
        compressed.choose();
        let wants = !compressed.compression.rules.are_none();
        if wants && compressed.codecs.is_empty() && compressed.combiner.group().rank() == 0 {
            log::warn!(
                "nothing is encoded: no parameter fits the rules, has two dimensions and 1024 \
                 elements, and becomes smaller by its codec"
            );
        }
        compressed
    }

    /// For replicas of which each is a shard: a run may go on with more or fewer.
    #[must_use]
    pub fn of_replicas(mut self) -> Compressed {
        self.shards_change = true;
        self
    }

    /// Uses other rules from now on. What was remembered for the earlier ones is forgotten.
    pub fn set_rules(&mut self, rules: Rules) {
        self.compression.rules = rules;
        self.choose();
    }

    fn choose(&mut self) {
        let mut specs: Vec<&CodecSpec> = Vec::new();
        self.codecs.clear();
        self.chosen.clear();
        for parameter in &self.parameters {
            let spec = self.compression.rules.codec(&parameter.name, &parameter.shape);
            self.chosen.push(spec.map(|spec| {
                specs.iter().position(|known| *known == spec).unwrap_or_else(|| {
                    specs.push(spec);
                    self.codecs.push(spec.build());
                    specs.len() - 1
                })
            }));
        }
        self.states = (0..self.parameters.len()).map(|parameter| self.state(parameter)).collect();
    }

    /// How a parameter is encoded, if it is: the codec, whether its residuals are kept, and whether it gets
    /// gradients in units of their usual size.
    pub fn encoding(&self, parameter: usize) -> Option<(&CodecSpec, bool, bool)> {
        let codec = &*self.codecs[self.chosen[parameter]?];
        let Parameter { name, shape } = &self.parameters[parameter];
        let spec = self.compression.rules.codec(name, shape)?;
        Some((spec, self.feeds_back(codec), self.compression.is_relative(codec)))
    }

    fn task(&self, parameter: usize, step: u64) -> Task<'_> {
        task(&self.parameters, &self.compression, parameter, step)
    }

    /// Whether the residuals of a codec are kept.
    fn feeds_back(&self, codec: &dyn Codec) -> bool {
        self.compression.error_feedback && codec.is_biased()
    }

    /// Converts what is owed of a parameter from earlier units to new ones.
    fn convert(&mut self, parameter: usize, before: &Scale, after: &Scale) {
        let (first, _) = self.mean_span(parameter);
        let state = &mut self.states[parameter];
        for memory in &mut state.shards {
            for owed in [&mut memory.residual, &mut memory.velocity] {
                before.multiply_from(0, owed);
                after.divide_from(0, owed);
            }
        }
        before.multiply_from(first, &mut state.mean);
        after.divide_from(first, &mut state.mean);
    }

    fn divide_by_scale(&mut self, parameters: &[usize], gradients: &mut Gradients) {
        let layout = &gradients.layout;
        timed(&mut self.coding, || {
            for &parameter in parameters {
                let Some(scale) = &self.states[parameter].scale else { continue };
                for slot in &mut gradients.slots[..gradients.filled] {
                    scale.divide(&mut slot[layout.span(parameter)]);
                }
            }
        });
    }

    fn multiply_by_scale(&mut self, parameters: &[usize], gradients: &mut Gradients) {
        let layout = &gradients.layout;
        timed(&mut self.coding, || {
            for &parameter in parameters {
                let Some(scale) = &self.states[parameter].scale else { continue };
                scale.multiply(&mut gradients.slots[0][layout.span(parameter)]);
            }
        });
    }

    /// Sums what is not compressed, exactly.
    fn exchange_plain(&mut self, gradients: &mut Gradients) -> Result<(), SyncError> {
        let layout = gradients.layout.clone();
        let bucket = &layout.buckets()[gradients.bucket];
        let plain = bucket.parameters.iter().filter(|p| self.chosen[**p].is_none());
        let mut pieces: Vec<Range<usize>> = plain.map(|p| layout.span(*p)).collect();
        let values: usize = pieces.iter().map(Range::len).sum();
        pieces.push(bucket.gradients..bucket.len);
        // Those whose usual size is measured in this step.
        let is_due = |scale: &Scale| scale.is_due(gradients.step);
        let measured = |p: &&usize| self.states[**p].scale.as_ref().is_some_and(is_due);
        let measured: Vec<usize> = bucket.parameters.iter().filter(measured).copied().collect();

        let mut leaves = std::mem::take(&mut self.buffers.plain);
        leaves.resize(gradients.filled, Vec::new());
        for (leaf, slot) in leaves.iter_mut().zip(&gradients.slots) {
            leaf.clear();
            pieces.iter().for_each(|piece| leaf.extend_from_slice(&slot[piece.clone()]));
            for &parameter in &measured {
                let scale = self.states[parameter].scale.as_ref();
                let scale = scale.expect("only those that have one are measured");
                scale.measure(&slot[layout.span(parameter)], leaf);
            }
            let align = alignment(self.shards, self.combiner.group().size());
            leaf.resize(leaf.len().next_multiple_of(align), 0.0);
        }
        let subtrees = fold_leaves(self.shards, self.own.clone(), &mut leaves);
        self.combiner.sum(&mut leaves[..subtrees])?;
        let shards = gradients.shards as f32;
        leaves[0][..values].iter_mut().for_each(|x| *x /= shards);
        let mut rest = &leaves[0][..];
        for piece in pieces {
            let (values, after) = rest.split_at(piece.len());
            gradients.slots[0][piece].copy_from_slice(values);
            rest = after;
        }
        for parameter in measured {
            let scale = self.states[parameter].scale.as_mut();
            let scale = scale.expect("only those that have one are measured");
            let (sums, after) = rest.split_at(scale.len());
            rest = after;
            if gradients.slots[0][layout.count(parameter)] > 0.0 {
                let mean: Vec<f32> = sums.iter().map(|sum| sum / shards).collect();
                let before = scale.clone();
                scale.note(gradients.step, &mean);
                let after = scale.clone();
                self.convert(parameter, &before, &after);
            }
        }
        self.buffers.plain = leaves;
        Ok(())
    }
}

impl Strategy for Compressed {
    fn name(&self) -> String {
        "all-reduce".to_owned()
    }

    fn wants_leaves(&self, step: u64) -> bool {
        step >= self.compression.warm_up && !self.codecs.is_empty()
    }

    fn encodes_from(&self) -> Option<u64> {
        Some(if self.codecs.is_empty() { u64::MAX } else { self.compression.warm_up })
    }

    fn exchange(&mut self, gradients: &mut Gradients) -> Result<(), SyncError> {
        let (folding, coding) = (self.combiner.folding(), self.coding);
        let encoded = self.wants_leaves(gradients.step) && !gradients.exact;
        if encoded {
            debug_assert_eq!(gradients.filled, self.own.len(), "one slot per shard");
            self.exchange_plain(gradients)?;
            let layout = gradients.layout.clone();
            for codec in 0..self.codecs.len() {
                let bucket = layout.buckets()[gradients.bucket].parameters.iter().copied();
                let used = |p: &usize| gradients.slots[0][layout.count(*p)] > 0.0;
                let parameters: Vec<usize> =
                    bucket.filter(|p| self.chosen[*p] == Some(codec)).filter(used).collect();
                if parameters.is_empty() {
                    continue;
                }
                let codec = self.codecs[codec].clone();
                let feeds_back = self.feeds_back(&*codec);
                self.hand_over_velocity(&parameters);
                // Spans are scaled on the way.
                let scales_here = !matches!(codec.passage(), Passage::Spans(_));
                if scales_here {
                    self.divide_by_scale(&parameters, gradients);
                }
                match codec.passage() {
                    Passage::Summed(summed) => {
                        self.exchange_summed(summed, feeds_back, &parameters, gradients)?;
                    }
                    Passage::Spans(spans) => {
                        self.exchange_spans(spans, feeds_back, &parameters, gradients)?;
                    }
                    Passage::Gathered(gathered) => {
                        self.exchange_gathered(gathered, feeds_back, &parameters, gradients)?;
                    }
                }
                if scales_here {
                    self.multiply_by_scale(&parameters, gradients);
                }
            }
        } else {
            self.combiner.sum(&mut gradients.slots[..gradients.filled])?;
            gradients.divide();
        }
        if !gradients.exact {
            self.apply_momentum(gradients, encoded);
        }
        gradients.folding = self.combiner.folding() - folding;
        gradients.coding = self.coding - coding;
        Ok(())
    }

    fn group(&self) -> Option<&Arc<Group>> {
        Some(self.combiner.group())
    }

    fn sent(&self) -> u64 {
        self.combiner.sent()
    }

    fn is_settled(&self) -> bool {
        !self.compression.auto || matches!(self.choice, Choice::Made(_))
    }

    fn observe(
        &mut self,
        step: u64,
        layout: &Arc<Layout>,
        times: &StepTimes,
    ) -> Result<Option<Arc<Advice>>, SyncError> {
        match self.is_settled() {
            true => Ok(None),
            false => self.observe_dense(step, layout, times),
        }
    }

    /// Residuals belong to the worker of a shard. A codec without any, and with nothing else that is
    /// carried on, survives; so does any codec before its first encoding.
    fn survives_regroup(&self, step: u64) -> bool {
        let is_fresh = step <= self.compression.warm_up || self.codecs.is_empty();
        let has_momentum = Momentum::of(&self.compression.rules).is_some();
        step == 0
            || !self.compression.auto && !has_momentum && (is_fresh || self.remembers_nothing())
    }

    fn save(&mut self, group: &Group, each: &mut Save<'_>) -> Result<(), SyncError> {
        self.save_choice(group, each);
        self.save_memory(group, each)
    }

    fn restore(&mut self, group: &Group, find: &Find<'_>) -> Result<(), SyncError> {
        // What is remembered depends on it.
        self.restore_choice(group, find)?;
        self.restore_memory(group, find)
    }
}

/// What is encoded of a parameter. A codec counts steps from the end of the warm-up.
fn task<'a>(
    parameters: &'a [Parameter],
    compression: &Compression,
    parameter: usize,
    step: u64,
) -> Task<'a> {
    let step = step.saturating_sub(compression.warm_up);
    Task { shape: &parameters[parameter].shape, parameter, step, seed: compression.seed }
}

/// Adds the time that something took to a total.
fn timed<R>(total: &mut Duration, action: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = action();
    *total += start.elapsed();
    result
}
