//! Trains a candle model on any number of workers:
//!
//!     unisono run -n 2 -- train_candle
//!
//! and prints the same hash of the weights whatever that number is, and whatever happens to them:
//!
//!     unisono run --elastic 1:4 -n 3 -- train_candle 1000
//!
//! The number, if there is one, is that of the steps.

use std::error::Error;
use std::process::ExitCode;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use unisono::candle::{ElasticReplica, ElasticReplicaError, Parameters};
use unisono::prelude::*;
use unisono::worker::Stepped;

/// Samples per shard.
const SAMPLES: usize = 16;

fn main() -> ExitCode {
    let steps = std::env::args().nth(1).map_or(Ok(200), |steps| steps.parse());
    match steps.map_err(Into::into).and_then(train) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(exit_code(&*error))
        }
    }
}

/// Tells the launcher whether it should start this process again.
pub fn exit_code(error: &(dyn Error + 'static)) -> u8 {
    error.downcast_ref().map_or(1, ElasticReplicaError::exit_code)
}

/// Makes so many steps.
pub fn train(steps: u64) -> std::result::Result<(), Box<dyn Error>> {
    let variables = VarMap::new();
    let parameters = Parameters::with_initializer(&variables, |name, shape, _| {
        // The same values in every run, so that the hash at the end can be compared.
        (0..shape.elem_count()).map(|i| wave(i + 100 * name.len()) * 0.5).collect()
    });
    let model = Model::new(parameters.builder(DType::F32, &Device::Cpu))?;
    let mut replica = ElasticReplica::join(&parameters, Settings::new(8), "adamw".parse()?)?;

    while let Some(step) = replica.next_step(steps)? {
        while let Some(shard) = replica.next_shard() {
            let (inputs, targets) = samples(step + 1, shard)?;
            let loss = (model.forward(&inputs)? - targets)?.sqr()?.mean_all()?;
            replica.backward(&loss)?;
        }
        if let Some(Stepped { step, loss, .. }) = replica.step()?
            && replica.rank() == 0
            && step.is_multiple_of(50)
        {
            println!("step {step:3}: loss {loss:.5}");
        }
    }
    replica.finish(|replica| {
        format!("{} workers: weights {}\n", replica.workers(), replica.weights_hash().to_hex())
    })?;
    Ok(())
}

struct Model {
    hidden: Linear,
    output: Linear,
}

impl Model {
    fn new(builder: VarBuilder<'_>) -> Result<Model> {
        let hidden = candle_nn::linear(2, 32, builder.pp("hidden"))?;
        let output = candle_nn::linear(32, 1, builder.pp("output"))?;
        Ok(Model { hidden, output })
    }

    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.hidden.forward(inputs)?.tanh()?)
    }
}

/// The samples of a shard depend on nothing but their numbers: not on who computes them.
fn samples(step: u64, shard: usize) -> Result<(Tensor, Tensor)> {
    let first = (step as usize * 8 + shard) * SAMPLES;
    let inputs: Vec<f32> = (2 * first..2 * (first + SAMPLES)).map(wave).collect();
    let targets: Vec<f32> = inputs.chunks(2).map(|pair| pair[0] * pair[1]).collect();
    let inputs = Tensor::from_vec(inputs, (SAMPLES, 2), &Device::Cpu)?;
    Ok((inputs, Tensor::from_vec(targets, (SAMPLES, 1), &Device::Cpu)?))
}

/// A number that looks random, in −1..1.
fn wave(i: usize) -> f32 {
    let mixed = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (mixed ^ (mixed >> 15)).wrapping_mul(2_246_822_519) as f32 / (1u64 << 31) as f32 - 1.0
}
