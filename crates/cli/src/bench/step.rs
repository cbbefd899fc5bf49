//! `unisono bench step`: what synchronization costs a worker that is alone.
//!
//! Four loops take turns, step by step, on models of their own: one computes losses and gradients and
//! nothing else; one is the loop a candle user writes (sum the gradients of the shards, let candle's
//! AdamW apply them); one does by hand, in flat memory and with our AdamW, what any training must do;
//! and one is the same training through a `Replica`. What the last takes longer than the third is the
//! cost of synchronization where there is no other worker.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use clap::Args;
use serde::Serialize;
use unisono::candle::{Parameters, Replica};
use unisono::optimizer::OptimizerSpec;
use unisono::prelude::Settings;
use unisono::{Group, Options};
use unisono_workload::data::{Batch, DataSpec, Dataset, Split};
use unisono_workload::model::{Model, ModelSpec};

/// What `unisono bench step` takes.
#[derive(Args, Clone)]
pub struct StepArgs {
    /// A text for the transformer, which is left out without one.
    #[arg(long, value_name = "FILE")]
    text: Option<std::path::PathBuf>,
    /// Samples per step.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Shards per step.
    #[arg(long, default_value_t = 8)]
    shards: usize,
    /// Steps of each loop, after a tenth that does not count.
    #[arg(long, default_value_t = 200)]
    steps: usize,
    /// Print one JSON object per model instead of a table.
    #[arg(long)]
    json: bool,
}

/// One line of the report.
#[derive(Serialize)]
struct Row {
    model: String,
    parameters: usize,
    gradients_us: f64,
    candle_us: f64,
    by_hand_us: f64,
    unisono_us: f64,
    over_candle: f64,
    over_by_hand: f64,
}

/// Measures all models.
pub fn run(args: StepArgs) -> anyhow::Result<ExitCode> {
    demand!(
        args.shards > 0 && args.batch > 0 && args.batch.is_multiple_of(args.shards),
        "--batch {} cannot be cut into {} shards; use a multiple",
        args.batch,
        args.shards
    );
    demand!(args.steps > 0, "--steps 0: use at least 1");
    let mut tasks = vec![
        (ModelSpec::mlp(), DataSpec::Digits),
        (ModelSpec::Mlp { hidden: vec![1024, 1024] }, DataSpec::Digits),
        (ModelSpec::conv(), DataSpec::Digits),
    ];
    if let Some(text) = &args.text {
        tasks.push((ModelSpec::transformer(), DataSpec::Text(text.clone())));
    }
    if !args.json {
        result_line!("{:66}µs of a step, one worker     Unisono over", "")?;
        result_line!(
            "{:<34} {:>10} {:>10} {:>9} {:>9} {:>9} {:>7} {:>8}",
            "model",
            "parameters",
            "gradients",
            "candle",
            "by hand",
            "Unisono",
            "candle",
            "by hand"
        )?;
    }
    for (model, data) in tasks {
        let row = measure(&args, &model, &data)?;
        if args.json {
            result_line!("{}", serde_json::to_string(&row)?)?;
            continue;
        }
        result_line!(
            "{:<34} {:>10} {:>10.0} {:>9.0} {:>9.0} {:>9.0} {:>7.3} {:>8.3}",
            row.model,
            row.parameters,
            row.gradients_us,
            row.candle_us,
            row.by_hand_us,
            row.unisono_us,
            row.over_candle,
            row.over_by_hand
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &StepArgs, spec: &ModelSpec, data: &DataSpec) -> anyhow::Result<Row> {
    let context = match spec {
        ModelSpec::Transformer { context, .. } => *context,
        _ => 1,
    };
    let data = data.load(context).context("--text")?;
    let batches = shards(&data, args)?;
    let mut gradients = Bare::new(spec, &data)?;
    let mut candle = Plain::new(spec, &data)?;
    let mut by_hand = ByHand::new(spec, &data)?;
    let mut unisono = Synchronized::new(spec, &data, args.shards)?;
    let mut samples = [const { Vec::new() }; 4];
    for step in 0..args.steps + args.steps / 10 {
        let loops: [&mut dyn Loop; 4] = [&mut gradients, &mut candle, &mut by_hand, &mut unisono];
        for (samples, each) in samples.iter_mut().zip(loops) {
            let start = Instant::now();
            each.step(&batches)?;
            if step >= args.steps / 10 {
                samples.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    let [gradients_us, candle_us, by_hand_us, unisono_us] = samples.map(|mut samples| {
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    });
    Ok(Row {
        model: spec.to_string(),
        parameters: gradients.variables.all_vars().iter().map(|var| var.elem_count()).sum(),
        gradients_us,
        candle_us,
        by_hand_us,
        unisono_us,
        over_candle: unisono_us / candle_us,
        over_by_hand: unisono_us / by_hand_us,
    })
}

/// The shards of one step, which all steps use.
fn shards(data: &Dataset, args: &StepArgs) -> anyhow::Result<Vec<Batch>> {
    let samples = args.batch / args.shards;
    let shard = |shard: usize| {
        let first = shard * samples;
        let indices: Vec<usize> = (first..first + samples).map(|i| i % data.train_len()).collect();
        Ok(data.batch(Split::Train, &indices)?)
    };
    (0..args.shards).map(shard).collect()
}

trait Loop {
    fn step(&mut self, shards: &[Batch]) -> anyhow::Result<()>;
}

/// Losses and gradients, and nothing else.
struct Bare {
    variables: VarMap,
    model: Box<dyn Model>,
}

impl Bare {
    fn new(spec: &ModelSpec, data: &Dataset) -> anyhow::Result<Bare> {
        let variables = VarMap::new();
        let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let model = spec.build(data.kind(), builder)?;
        Ok(Bare { variables, model })
    }

    fn gradients(&self, shard: &Batch) -> anyhow::Result<(f32, GradStore)> {
        let loss = self.model.loss(shard)?;
        Ok((loss.to_scalar()?, loss.backward()?))
    }
}

impl Loop for Bare {
    fn step(&mut self, shards: &[Batch]) -> anyhow::Result<()> {
        for shard in shards {
            std::hint::black_box(self.gradients(shard)?);
        }
        Ok(())
    }
}

/// The loop that candle's users write.
struct Plain {
    bare: Bare,
    optimizer: AdamW,
}

impl Plain {
    fn new(spec: &ModelSpec, data: &Dataset) -> anyhow::Result<Plain> {
        let bare = Bare::new(spec, data)?;
        let optimizer = AdamW::new(bare.variables.all_vars(), ParamsAdamW::default())?;
        Ok(Plain { bare, optimizer })
    }
}

impl Loop for Plain {
    fn step(&mut self, shards: &[Batch]) -> anyhow::Result<()> {
        let mut sum: Option<GradStore> = None;
        for shard in shards {
            let (_, gradients) = self.bare.gradients(shard)?;
            let Some(sum) = &mut sum else {
                sum = Some(gradients);
                continue;
            };
            for variable in self.bare.variables.all_vars() {
                if let (Some(left), Some(right)) = (sum.get(&variable), gradients.get(&variable)) {
                    let both = (left + right)?;
                    sum.insert(&variable, both);
                }
            }
        }
        let mut sum = sum.context("a step has shards")?;
        for variable in self.bare.variables.all_vars() {
            if let Some(gradient) = sum.get(&variable) {
                let mean = (gradient / shards.len() as f64)?;
                sum.insert(&variable, mean);
            }
        }
        Ok(self.optimizer.step(&sum)?)
    }
}

/// What any training must do, and nothing else.
struct ByHand {
    bare: Bare,
    variables: Vec<Var>,
    weights: Vec<Vec<f32>>,
    sums: Vec<Vec<f32>>,
    optimizer: Box<dyn unisono::optimizer::Optimizer>,
    steps: u64,
}

impl ByHand {
    fn new(spec: &ModelSpec, data: &Dataset) -> anyhow::Result<ByHand> {
        let bare = Bare::new(spec, data)?;
        let variables = bare.variables.all_vars();
        let weights: Vec<Vec<f32>> = variables
            .iter()
            .map(|variable| variable.flatten_all()?.to_vec1())
            .collect::<Result<_, candle_core::Error>>()?;
        let lengths: Vec<usize> = weights.iter().map(Vec::len).collect();
        let optimizer = "adamw".parse::<OptimizerSpec>()?.build(&lengths)?;
        Ok(ByHand { bare, variables, sums: weights.clone(), weights, optimizer, steps: 0 })
    }
}

impl Loop for ByHand {
    fn step(&mut self, shards: &[Batch]) -> anyhow::Result<()> {
        self.steps += 1;
        for (i, shard) in shards.iter().enumerate() {
            let (_, gradients) = self.bare.gradients(shard)?;
            for (variable, sum) in self.variables.iter().zip(&mut self.sums) {
                let Some(gradient) = gradients.get(variable) else { continue };
                let gradient = gradient.contiguous()?;
                let (storage, layout) = gradient.storage_and_layout();
                let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) =
                    (&*storage, layout.contiguous_offsets())
                else {
                    anyhow::bail!("gradients are f32 on the CPU")
                };
                match i {
                    0 => sum.copy_from_slice(&values[start..end]),
                    _ => sum.iter_mut().zip(&values[start..end]).for_each(|(s, v)| *s += v),
                }
            }
        }
        for (i, variable) in self.variables.iter().enumerate() {
            let (sum, weights) = (&mut self.sums[i], &mut self.weights[i]);
            sum.iter_mut().for_each(|x| *x /= shards.len() as f32);
            self.optimizer.update(i, self.steps, weights, sum);
            variable.set(&Tensor::from_slice(weights, variable.shape(), &Device::Cpu)?)?;
        }
        Ok(())
    }
}

/// The same, through Unisono.
struct Synchronized {
    model: Box<dyn Model>,
    replica: Replica<'static>,
    /// The world of one.
    _group: Group,
}

impl Synchronized {
    fn new(spec: &ModelSpec, data: &Dataset, shards: usize) -> anyhow::Result<Synchronized> {
        let group = Group::local(1, &Options::default())?.remove(0);
        let parameters = Parameters::of(&VarMap::new());
        let model = spec.build(data.kind(), parameters.builder(DType::F32, &Device::Cpu))?;
        let replica = Replica::new(&group, &parameters, Settings::new(shards), "adamw".parse()?)?;
        Ok(Synchronized { model, replica, _group: group })
    }
}

impl Loop for Synchronized {
    fn step(&mut self, shards: &[Batch]) -> anyhow::Result<()> {
        while let Some(shard) = self.replica.next_shard() {
            let loss = self.model.loss(&shards[shard])?;
            self.replica.backward(&loss)?;
        }
        self.replica.step()?;
        Ok(())
    }
}
