//! A model that is replayed: its gradients travel, its layers take their time, nothing is learnt.
//!
//! Computing is sleeping, as if an accelerator did it: the processor is free to communicate.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use unisono::Group;
use unisono::candle::ReplicaError;
use unisono::cluster::checkpoint::{Loaded, Snapshot};
use unisono::collective::fabric::available_memory;
use unisono::elastic::Trainee;
use unisono::sync::strategy::Weights;
use unisono::sync::{Parameter, StepOutcome, Synchronizer};
use unisono_workload::replay::Replay;

use super::super::args::RunPlan;
use super::{Computation, Judgement};

/// A replayed model.
pub struct Replayer {
    replay: Replay,
    synchronizer: Synchronizer,
    compute: Duration,
    /// A gradient as long as the longest.
    gradient: Vec<f32>,
    begun: usize,
    steps: u64,
}

impl Replayer {
    pub fn new(
        plan: &RunPlan,
        spec: &str,
        compute_ms: Option<f64>,
        group: &Group,
    ) -> anyhow::Result<Replayer> {
        let replay = Replay::load(spec)?;
        let parameter = |parameter: &unisono_workload::replay::Parameter| Parameter {
            name: parameter.name.clone(),
            shape: parameter.shape.clone(),
        };
        // A gradient, the buckets it is summed in, and what travels.
        let needed = replay.elements().saturating_mul(4 * 4) as u64;
        if let Some(available) = available_memory() {
            ensure!(
                needed <= available,
                "--model: replaying {spec} needs {needed} bytes of memory, where {available} are \
                 available; replay a smaller model"
            );
        }
        let parameters: Vec<Parameter> = replay.parameters().map(parameter).collect();
        let longest = parameters.iter().map(Parameter::elements).max().unwrap_or(0);
        let synchronizer = Synchronizer::new(Some(group), parameters, plan.settings())?;
        let of_file = replay.compute.map(|compute| compute.as_secs_f64() * 1e3);
        let compute = Duration::from_secs_f64(RunPlan::replay_ms(compute_ms, of_file) / 1e3);
        let gradient = gradient(longest);
        Ok(Replayer { replay, synchronizer, compute, gradient, begun: 0, steps: 0 })
    }
}

impl Computation for Replayer {
    fn shard(&mut self, _step: u64, slowness: f64) -> anyhow::Result<bool> {
        if self.begun == self.synchronizer.shards().len() {
            return Ok(false);
        }
        self.begun += 1;
        self.synchronizer.begin_shard();
        // Deadlines instead of pauses, so that handing over gradients takes no time of its own for
        // as long as it is quicker than the layer it comes from.
        let mut due = Instant::now();
        let mut wait = |share: f64| {
            due += self.compute.mul_f64(share * slowness);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        };
        for layer in &self.replay.layers {
            wait(layer.forward);
        }
        self.synchronizer.begin_backward(0.0);
        let mut parameter = self.synchronizer.parameters().len();
        for layer in self.replay.layers.iter().rev() {
            wait(layer.backward);
            for shape in layer.parameters.iter().rev() {
                parameter -= 1;
                self.synchronizer.gradient(parameter, &self.gradient[..shape.elements()]);
            }
        }
        self.synchronizer.end_shard();
        Ok(true)
    }

    fn finish(&mut self) -> anyhow::Result<StepOutcome> {
        self.begun = 0;
        self.steps += 1;
        let mut outcome = self.synchronizer.finish(|_, _| ())?;
        self.synchronizer
            .agree(&mut Pretended::of(&self.synchronizer, &self.gradient), &mut outcome)?;
        Ok(outcome)
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn synchronizer(&self) -> &Synchronizer {
        &self.synchronizer
    }

    fn judge(&self) -> anyhow::Result<Option<Judgement>> {
        Ok(None)
    }

    fn weights_hash(&self) -> String {
        "none: a replayed model has no weights".to_owned()
    }

    fn check(&self, _group: &Group) -> anyhow::Result<()> {
        Ok(())
    }

    fn trainee(&mut self) -> anyhow::Result<&mut dyn Trainee<Error = ReplicaError>> {
        bail!("a replayed model has no weights to hand over")
    }

    fn save(
        &self,
        _group: &Group,
        _write: &mut dyn FnMut(Snapshot<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        Ok(())
    }

    fn restore(&mut self, _group: &Group, _checkpoint: Option<&Loaded>) -> anyhow::Result<()> {
        Ok(())
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        Ok(self.synchronizer.settle(&mut Pretended::of(&self.synchronizer, &self.gradient))?)
    }
}

/// Weights of a model that has none: whatever travels is taken from the gradient, and what comes back
/// changes nothing.
struct Pretended<'a> {
    parameters: &'a [Parameter],
    gradient: &'a [f32],
}

impl<'a> Pretended<'a> {
    fn of(synchronizer: &'a Synchronizer, gradient: &'a [f32]) -> Pretended<'a> {
        Pretended { parameters: synchronizer.parameters(), gradient }
    }
}

impl Weights for Pretended<'_> {
    fn read(&self, parameter: usize, with: &mut dyn FnMut(&[f32])) {
        with(&self.gradient[..self.parameters[parameter].elements()]);
    }

    fn change(&mut self, parameter: usize, with: &mut dyn FnMut(&mut [f32])) {
        with(&mut self.gradient[..self.parameters[parameter].elements()].to_vec());
    }
}

/// Numbers like a gradient's: most are small, some are not, none are equal.
fn gradient(elements: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..elements).map(|_| uniform() * uniform() * uniform() * 0.01).collect()
}
