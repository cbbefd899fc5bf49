//! What is pushed and pulled, and the check of what was timed. Every push adds a small integer to every weight,
//! which f32 holds exactly, so that in the end the weights are the number of pushes times that integer: one that was
//! lost or applied twice is noticed. With every pull a worker looks at both ends of each tensor, which must be of the
//! same version. With a codec, what a push adds is what the server decodes, always the same, and the weights are what
//! as many additions of it come to.

use std::collections::HashMap;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use unisono::optimizer::{LearningRate, OptimizerSpec};
use unisono_codec::CodecSpec;
use unisono_codec::sender::{self, Origin, Scratch, Sender};
use unisono_relaxed::server::Run;
use unisono_relaxed::spec::Level;

/// The changes of neighbouring weights take turns from 1 up to here.
const LARGEST_CHANGE: usize = 4;

/// From here on, f32 does not hold every integer.
const LIMIT: f32 = (1 << f32::MANTISSA_DIGITS) as f32;

/// What is pushed and pulled.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Model {
    pub elements: usize,
    pub tensors: usize,
    pub workers: u32,
    pub codec: Option<CodecSpec>,
}

impl Model {
    /// Of a pull, and of what is pushed before it is encoded.
    pub fn bytes(&self) -> usize {
        self.elements.saturating_mul(4 * self.tensors)
    }

    /// Of a push.
    pub fn pushed_bytes(&self) -> usize {
        let encoded = |codec: &CodecSpec| codec.build().encoded_bytes(&[self.elements]);
        self.codec.as_ref().map_or(self.bytes(), |codec| self.tensors * encoded(codec))
    }

    pub fn run(&self) -> Run {
        let optimizer =
            OptimizerSpec::Sgd { learning_rate: LearningRate::Constant(1.0), weight_decay: 0.0 };
        let shapes = vec![vec![self.elements]; self.tensors];
        let (workers, shards) = (self.workers, self.workers);
        let codecs = vec![self.codec.clone(); self.tensors];
        Run { workers, shards, codecs, ..Run::new(shapes, optimizer, Level::Async) }
    }

    /// The gradient of a tensor: with a learning rate of 1, weights become larger by its opposite.
    pub fn gradient(&self) -> Vec<f32> {
        (0..self.elements).map(|element| -Model::change(element)).collect()
    }

    /// Refuses a tensor that is not the sum of so many pushes.
    pub fn verify(&self, weights: &[f32], pushes: u64) -> anyhow::Result<()> {
        match &self.codec {
            None => Model::verify_exactly(weights, pushes),
            Some(codec) => self.verify_decoded(codec, weights, pushes),
        }
    }

    /// Refuses a tensor whose ends are of different versions.
    pub fn verify_ends(weights: &[f32]) -> anyhow::Result<()> {
        let version = |element: usize| weights[element] / Model::change(element);
        let (first, last) = (version(0), version(weights.len() - 1));
        ensure!(first == last, "half an update: version {first} in front, {last} at the end");
        Ok(())
    }

    /// As [`Model::verify`], without a codec.
    fn verify_exactly(weights: &[f32], pushes: u64) -> anyhow::Result<()> {
        for (element, weight) in weights.iter().enumerate() {
            ensure!(
                *weight < LIMIT,
                "a weight became {weight}, where f32 is no longer exact; use fewer --seconds"
            );
            let expected = pushes as f32 * Model::change(element);
            ensure!(
                *weight == expected,
                "weight {element} is {weight} instead of {expected} after {pushes} pushes"
            );
        }
        Ok(())
    }

    /// Refuses a tensor that is not what so many pushes add up to, each rounded as a server's are.
    fn verify_decoded(
        &self,
        codec: &CodecSpec,
        weights: &[f32],
        pushes: u64,
    ) -> anyhow::Result<()> {
        let (codec, mut scratch) = (codec.build(), Scratch::default());
        let shape = vec![self.elements];
        let origin = Origin { shape, parameter: 0, seed: 0, worker: 0, mean_of: 1 };
        let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; self.elements]);
        let mut sender = Sender::new(codec.clone(), origin.clone(), false);
        sender.encode(0, &self.gradient(), &mut scratch, &mut bytes);
        sender::decode(&*codec, &origin.task(0), &bytes, &mut decoded, &mut scratch)?;
        // Most elements are decoded to one of a few numbers.
        let mut sums = HashMap::new();
        for (element, (weight, change)) in weights.iter().zip(decoded).enumerate() {
            let sum = || (0..pushes).fold(0.0f32, |sum, _| sum - change);
            let expected = *sums.entry(change.to_bits()).or_insert_with(sum);
            ensure!(
                *weight == expected,
                "weight {element} is {weight} instead of {expected} after {pushes} pushes"
            );
        }
        Ok(())
    }

    /// What every push adds to a weight.
    fn change(element: usize) -> f32 {
        (element % LARGEST_CHANGE + 1) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_weights_are_noticed() {
        let right = [3.0, 6.0, 9.0, 12.0, 3.0];
        assert!(Model::verify_exactly(&right, 3).is_ok());
        assert!(Model::verify_exactly(&right, 4).is_err());
        assert!(Model::verify_exactly(&[3.0, 6.0, 9.0, 12.0, 4.0], 3).is_err());
        assert!(Model::verify_exactly(&[f32::NAN], 0).is_err());
        assert!(Model::verify_exactly(&[LIMIT], 1 << 24).is_err());
        assert!(Model::verify_ends(&right).is_ok());
        assert!(Model::verify_ends(&[3.0, 6.0, 9.0, 12.0, 2.0]).is_err());
    }

    #[test]
    fn a_push_adds_the_change() {
        let model = Model { elements: 6, tensors: 1, workers: 1, codec: None };
        let weights: Vec<f32> = model.gradient().iter().map(|g| -g * 7.0).collect();
        assert!(model.verify(&weights, 7).is_ok());
        assert_eq!(model.bytes(), 24);
    }
}
