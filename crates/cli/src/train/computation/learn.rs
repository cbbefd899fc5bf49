//! A candle model that learns from data.

use std::time::{Duration, Instant};

use anyhow::Context;
use candle_core::{DType, Device};
use candle_nn::VarMap;
use unisono::Group;
use unisono::candle::{ModelWeights, Parameters, Replica, ReplicaError};
use unisono::cluster::checkpoint::{Loaded, Snapshot, Tensor};
use unisono::elastic::Trainee;
use unisono::net::crash;
use unisono::sync::{StepOutcome, Synchronizer};
use unisono::worker::Worker;
use unisono_workload::data::{Dataset, Kind, SampleOrder, Split};
use unisono_workload::init::initialize;
use unisono_workload::model::{Model, ModelSpec, accuracy};

use super::super::args::{ComputationSpec, RunPlan};
use super::{Computation, Judgement, slow_down};

/// Samples judged at once. More: more memory. Fewer: slower.
const JUDGED: usize = 256;

/// The most tokens that are judged, which is plenty to tell two models apart.
const JUDGED_TOKENS: usize = 1 << 16;

/// A model, and the data it learns from.
pub struct Learning {
    model: Box<dyn Model>,
    data: Dataset,
    order: SampleOrder,
    parameters: Parameters,
    batch: u64,
    samples: u64,
}

impl Learning {
    /// Builds the model of a plan, with its initial weights, and loads the data.
    pub fn load(plan: &RunPlan) -> anyhow::Result<Learning> {
        let ComputationSpec::Learn { model, data } = &plan.computation else {
            anyhow::bail!("a replayed model has no weights")
        };
        let data = data.load(context_of(model)).context("--data")?;
        let seed = plan.seed;
        let parameters = Parameters::with_initializer(&VarMap::new(), move |name, shape, init| {
            initialize(seed, name, shape, init)
        });
        let builder = parameters.builder(DType::F32, &Device::Cpu);
        let model = model.build(data.kind(), builder).context("--model")?;
        let learning = Learning {
            model,
            order: SampleOrder::new(plan.seed, data.train_len()),
            data,
            parameters,
            batch: plan.batch as u64,
            samples: (plan.batch / plan.shards) as u64,
        };
        let names = learning.weights().parameters();
        plan.expect_rules_fit(names.iter().map(|parameter| parameter.name.as_str()))?;
        Ok(learning)
    }

    /// The weights of the model.
    pub fn weights(&self) -> ModelWeights {
        ModelWeights::of(&self.parameters)
    }

    /// How good the model is on held-out data.
    pub fn judge(&self) -> anyhow::Result<Judgement> {
        judge(&*self.model, &self.data)
    }

    /// The loss of a shard of a step, counted from 0.
    fn loss(&mut self, step: u64, shard: usize) -> anyhow::Result<candle_core::Tensor> {
        let first = step * self.batch + shard as u64 * self.samples;
        let indices: Vec<usize> =
            (first..first + self.samples).map(|position| self.order.sample(position)).collect();
        Ok(self.model.loss(&self.data.batch(Split::Train, &indices)?)?)
    }
}

/// A worker's copy of a model that learns.
pub struct Learner<'a> {
    learning: Learning,
    pub replica: Replica<'a>,
    /// How long the last shard took to compute.
    computed: Duration,
}

impl<'a> Learner<'a> {
    /// That of a worker that agrees with those of a group.
    pub fn agreeing(plan: &RunPlan, group: &Group) -> anyhow::Result<Learner<'a>> {
        let learning = Learning::load(plan)?;
        let replica = Replica::new(group, &learning.parameters, plan.settings(), plan.optimizer)?;
        Ok(Learner { learning, replica, computed: Duration::ZERO })
    }

    /// That of a worker which is going to agree with those of a group.
    pub fn waiting(plan: &RunPlan) -> anyhow::Result<Learner<'a>> {
        let learning = Learning::load(plan)?;
        let replica = Replica::waiting(&learning.parameters, plan.settings(), &plan.optimizer)?;
        Ok(Learner { learning, replica, computed: Duration::ZERO })
    }

    /// That of a worker that has joined a relaxed run.
    pub fn of(learning: Learning, worker: Worker<'a>) -> anyhow::Result<Learner<'a>> {
        let replica = Replica::of(worker, &learning.parameters)?;
        Ok(Learner { learning, replica, computed: Duration::ZERO })
    }

    /// Leaves the run. The model has the weights that this worker had last.
    pub fn finish(self) -> anyhow::Result<Learning> {
        self.replica.leave()?;
        Ok(self.learning)
    }

    /// Computes the next of this worker's shards of a step; `false` if all are computed.
    pub fn compute(&mut self, step: u64, slowness: f64) -> anyhow::Result<bool> {
        let Some(shard) = self.replica.next_shard() else { return Ok(false) };
        crash::numbered("shard", shard);
        let start = Instant::now();
        slow_down(self.computed, slowness);
        let slept = start.elapsed();
        let loss = self.learning.loss(step, shard)?;
        self.replica.backward(&loss)?;
        self.computed = start.elapsed() - slept;
        Ok(true)
    }
}

impl Computation for Learner<'_> {
    fn shard(&mut self, step: u64, slowness: f64) -> anyhow::Result<bool> {
        self.compute(step, slowness)
    }

    fn finish(&mut self) -> anyhow::Result<StepOutcome> {
        self.replica.step()?.outcome.context("workers that agree say on what")
    }

    fn steps(&self) -> u64 {
        self.replica.steps()
    }

    fn synchronizer(&self) -> &Synchronizer {
        self.replica.synchronizer().expect("made of workers that agree")
    }

    fn judge(&self) -> anyhow::Result<Option<Judgement>> {
        self.learning.judge().map(Some)
    }

    fn weights_hash(&self) -> String {
        self.replica.weights_hash().to_hex().to_string()
    }

    fn check(&self, group: &Group) -> anyhow::Result<()> {
        Ok(self.replica.check(group)?)
    }

    fn save(
        &self,
        group: &Group,
        write: &mut dyn FnMut(Snapshot<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut tensors = Vec::new();
        self.replica.save(group, |name, shape, values| {
            tensors.push((name, shape.to_vec(), values.to_vec()));
        })?;
        if group.rank() != 0 {
            return Ok(());
        }
        // The loss of a step is known before what the step makes of the weights.
        let is_lost = |values: &[f32]| values.iter().any(|value| !value.is_finite());
        if let Some((name, ..)) = tensors.iter().find(|(.., values)| is_lost(values)) {
            log::warn!("no checkpoint after step {}: {name} is no longer a number", self.steps());
            return Ok(());
        }
        let mut snapshot = Snapshot::new();
        for (name, shape, values) in &tensors {
            snapshot.tensors.push(Tensor::from_f32(name.as_str(), shape.as_slice(), values));
        }
        write(snapshot)
    }

    fn restore(&mut self, group: &Group, checkpoint: Option<&Loaded>) -> anyhow::Result<()> {
        let find = |name: &str| checkpoint?.tensor(name)?.to_f32();
        let step = checkpoint.map_or(0, Loaded::step);
        Ok(self.replica.restore(group, step, find)?)
    }

    fn trainee(&mut self) -> anyhow::Result<&mut dyn Trainee<Error = ReplicaError>> {
        Ok(&mut self.replica)
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        Ok(self.replica.settle()?)
    }
}

/// Tokens that a model looks at; 1 if it has no use for more.
fn context_of(model: &ModelSpec) -> usize {
    match model {
        ModelSpec::Transformer { context, .. } => *context,
        _ => 1,
    }
}

/// How good a model is on held-out data.
fn judge(model: &dyn Model, data: &Dataset) -> anyhow::Result<Judgement> {
    let most = match data.kind() {
        Kind::Classification { .. } => data.test_len(),
        Kind::Sequence { context, .. } => data.test_len().min((JUDGED_TOKENS / context).max(1)),
    };
    // Spread over all of the held-out part.
    let indices: Vec<usize> = (0..most).map(|i| i * data.test_len() / most).collect();
    let (mut right, mut all, mut loss) = (0, 0, 0.0);
    for indices in indices.chunks(JUDGED) {
        let batch = data.batch(Split::Test, indices)?;
        let (hits, answers) = accuracy(model, &batch)?;
        right += hits;
        all += answers;
        loss += f64::from(model.loss(&batch)?.to_scalar::<f32>()?) * answers as f64;
    }
    let all = all as f64;
    Ok(Judgement { accuracy: right as f64 / all, loss: loss / all })
}
