//! A candle model that learns from data.

use std::time::{Duration, Instant};

use anyhow::Context;
use candle_core::{DType, Device};
use candle_nn::VarMap;
use unisono::Group;
use unisono::candle::{Parameters, Replica};
use unisono::cluster::checkpoint::{Loaded, Snapshot, Tensor};
use unisono::sync::{StepOutcome, Synchronizer};
use unisono_workload::data::{DataSpec, Dataset, Kind, SampleOrder, Split};
use unisono_workload::init::initialize;
use unisono_workload::model::{Model, ModelSpec, accuracy};

use super::super::args::Plan;
use super::{Judgement, Trainee, slow_down};

/// Samples judged at once. More: more memory. Fewer: slower.
const JUDGED: usize = 256;

/// The most tokens that are judged, which is plenty to tell two models apart.
const JUDGED_TOKENS: usize = 1 << 16;

/// A model, its data, and its place in both.
pub struct Learner {
    model: Box<dyn Model>,
    data: Dataset,
    order: SampleOrder,
    replica: Replica,
    batch: u64,
    samples: u64,
    /// How long the last shard took to compute.
    computed: Duration,
}

impl Learner {
    pub fn new(
        plan: &Plan,
        model: &ModelSpec,
        data: &DataSpec,
        group: &Group,
    ) -> anyhow::Result<Learner> {
        let data = data.load(context_of(model)).context("--data")?;
        let seed = plan.seed;
        let parameters = Parameters::with_initializer(&VarMap::new(), move |name, shape, init| {
            initialize(seed, name, shape, init)
        });
        let builder = parameters.builder(DType::F32, &Device::Cpu);
        let model = model.build(data.kind(), builder).context("--model")?;
        let replica = Replica::new(group, &parameters, plan.settings(), plan.optimizer)?;
        Ok(Learner {
            model,
            order: SampleOrder::new(plan.seed, data.train_len()),
            data,
            replica,
            batch: plan.batch as u64,
            samples: (plan.batch / plan.shards) as u64,
            computed: Duration::ZERO,
        })
    }
}

impl Trainee for Learner {
    fn shard(&mut self, step: u64, slowness: f64) -> anyhow::Result<bool> {
        let Some(shard) = self.replica.next_shard() else { return Ok(false) };
        let start = Instant::now();
        slow_down(self.computed, slowness);
        let slept = start.elapsed();
        let first = step * self.batch + shard as u64 * self.samples;
        let indices: Vec<usize> =
            (first..first + self.samples).map(|position| self.order.sample(position)).collect();
        let loss = self.model.loss(&self.data.batch(Split::Train, &indices)?)?;
        self.replica.backward(&loss)?;
        self.computed = start.elapsed() - slept;
        Ok(true)
    }

    fn finish(&mut self) -> anyhow::Result<StepOutcome> {
        Ok(self.replica.step()?)
    }

    fn steps(&self) -> u64 {
        self.replica.steps()
    }

    fn synchronizer(&self) -> &Synchronizer {
        self.replica.synchronizer()
    }

    fn judge(&self) -> anyhow::Result<Option<Judgement>> {
        judge(&*self.model, &self.data).map(Some)
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

    fn settle(&mut self) -> anyhow::Result<()> {
        Ok(self.replica.settle()?)
    }
}

/// Tokens that a model looks at; 1 if it has no use for more.
pub fn context_of(model: &ModelSpec) -> usize {
    match model {
        ModelSpec::Transformer { context, .. } => *context,
        _ => 1,
    }
}

/// How good a model is on held-out data.
pub fn judge(model: &dyn Model, data: &Dataset) -> anyhow::Result<Judgement> {
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
