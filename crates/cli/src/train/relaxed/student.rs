//! A worker's model and data: computes gradients, whoever applies them.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Context;
use candle_core::{DType, Device};
use candle_nn::VarMap;
use unisono::candle::{Parameters, Standalone};
use unisono::relaxed::server::Gradient;
use unisono::sync::Parameter;
use unisono::sync::accumulate::{Accumulation, Constant};
use unisono_workload::data::{Dataset, SampleOrder, Split};
use unisono_workload::init::initialize;
use unisono_workload::model::Model;

use super::super::args::{Plan, Work};
use super::super::trainee::{Judgement, context_of, judge, slow_down};

/// A model that computes gradients of its own shards of every batch.
pub struct Student {
    model: Box<dyn Model>,
    data: Dataset,
    order: SampleOrder,
    weights: Standalone,
    parameters: Vec<Parameter>,
    batch: u64,
    samples: u64,
    own: Range<usize>,
    accumulation: Accumulation,
    /// Whether gradients stay sums of subtrees, or become the mean.
    sums: bool,
    /// The slots of every parameter.
    slots: Vec<Vec<Vec<f32>>>,
    /// Whether a parameter had a gradient in any shard of the last step.
    touched: Vec<bool>,
    computed: Duration,
}

/// What came of a step.
#[derive(Clone, Copy, Debug)]
pub struct Computed {
    /// The mean loss over the worker's samples.
    pub loss: f32,
    /// How many these were.
    pub samples: u64,
    /// How long it took.
    pub seconds: f64,
}

impl Student {
    /// For the worker with these shards. In lock-step gradients stay sums of subtrees of the canonical
    /// tree; else they become the mean over the worker's shards.
    pub fn new(plan: &Plan, own: Range<usize>, lockstep: bool) -> anyhow::Result<Student> {
        let Work::Learn { model, data } = &plan.work else {
            anyhow::bail!("a replayed model has no weights")
        };
        let data = data.load(context_of(model)).context("--data")?;
        let seed = plan.seed;
        let parameters = Parameters::with_initializer(&VarMap::new(), move |name, shape, init| {
            initialize(seed, name, shape, init)
        });
        let builder = parameters.builder(DType::F32, &Device::Cpu);
        let model = model.build(data.kind(), builder).context("--model")?;
        let weights = Standalone::new(&parameters);
        let parameters = weights.parameters();
        plan.expect_rules_fit(parameters.iter().map(|parameter| parameter.name.as_str()))?;
        let accumulation = match lockstep {
            true => Accumulation::new(plan.shards, own.clone()),
            false => Accumulation::new(own.len(), 0..own.len()),
        };
        let slots =
            |parameter: &Parameter| vec![vec![0.0; parameter.elements()]; accumulation.slots()];
        Ok(Student {
            order: SampleOrder::new(plan.seed, data.train_len()),
            slots: parameters.iter().map(slots).collect(),
            touched: vec![false; parameters.len()],
            model,
            data,
            weights,
            parameters,
            batch: plan.batch as u64,
            samples: (plan.batch / plan.shards) as u64,
            own,
            accumulation,
            sums: lockstep,
            computed: Duration::ZERO,
        })
    }

    /// The parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The weights of a parameter.
    pub fn read(&self, parameter: usize) -> Vec<f32> {
        self.weights.read(parameter, <[f32]>::to_vec)
    }

    /// All weights.
    pub fn read_all(&self) -> Vec<Vec<f32>> {
        (0..self.parameters.len()).map(|parameter| self.read(parameter)).collect()
    }

    /// Takes over weights, from an element of a parameter on.
    pub fn write(&self, parameter: usize, start: usize, weights: &[f32]) -> anyhow::Result<()> {
        self.change(parameter, |own| own[start..start + weights.len()].copy_from_slice(weights))
    }

    /// Changes the weights of a parameter.
    pub fn change(&self, parameter: usize, how: impl FnOnce(&mut [f32])) -> anyhow::Result<()> {
        Ok(self.weights.change(parameter, how)?)
    }

    /// Computes the gradient of the worker's part of the batch of a step, counted from 0, and makes it
    /// take `slowness` times as long.
    pub fn compute(&mut self, step: u64, slowness: f64) -> anyhow::Result<Computed> {
        let start = Instant::now();
        slow_down(self.computed, slowness);
        let begun = Instant::now();
        let mut loss = 0.0;
        self.touched.fill(false);
        for (leaf, shard) in self.own.clone().enumerate() {
            let first = step * self.batch + shard as u64 * self.samples;
            let positions = first..first + self.samples;
            let indices: Vec<usize> = positions.map(|at| self.order.sample(at)).collect();
            let shard = self.model.loss(&self.data.batch(Split::Train, &indices)?)?;
            let (slots, accumulation) = (&mut self.slots, &self.accumulation);
            let touched = &mut self.touched;
            let mut missing = vec![true; slots.len()];
            loss += self.weights.backward(&shard, |parameter, gradient| {
                missing[parameter] = false;
                touched[parameter] = true;
                let span = 0..gradient.len();
                accumulation.add(leaf, &mut slots[parameter], span, &gradient);
            })?;
            for parameter in (0..slots.len()).filter(|parameter| missing[*parameter]) {
                let span = 0..self.parameters[parameter].elements();
                accumulation.add(leaf, &mut slots[parameter], span, &Constant(0.0));
            }
        }
        let shards = self.own.len() as f32;
        if !self.sums {
            for slots in &mut self.slots {
                slots[0].iter_mut().for_each(|gradient| *gradient /= shards);
            }
        }
        self.computed = begun.elapsed();
        let samples = self.own.len() as u64 * self.samples;
        Ok(Computed { loss: loss / shards, samples, seconds: start.elapsed().as_secs_f64() })
    }

    /// The gradient that was computed last, as servers take it. A parameter that had none in any shard
    /// is left out, so that no optimizer touches it.
    pub fn gradients<'a>(&'a self) -> Vec<Gradient<'a>> {
        let sums = self.accumulation.sums();
        let vectors = |slots: &'a Vec<Vec<f32>>| slots[..sums].iter().map(Vec::as_slice).collect();
        let all = self.slots.iter().map(vectors).enumerate();
        all.filter(|(parameter, _)| self.touched[*parameter]).collect()
    }

    /// The mean gradient of a parameter, computed last.
    pub fn gradient(&self, parameter: usize) -> &[f32] {
        &self.slots[parameter][0]
    }

    /// How good the model is on held-out data.
    pub fn judge(&self) -> anyhow::Result<Judgement> {
        judge(&*self.model, &self.data)
    }

    /// The hash of the weights.
    pub fn weights_hash(&self) -> String {
        self.weights.weights_hash().to_hex().to_string()
    }
}
