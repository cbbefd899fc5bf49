//! Models to replay: the parameters of a real model and the share of a step that each layer
//! computes, without the computation. A run with them loads a network as the real model would.
//!
//! # Files
//!
//! A file describes any other model. Each layer has a line with its name and the milliseconds of
//! its forward and its backward pass, and below it a line per parameter with name and shape.
//! Layers stand in the order of the forward pass; those that only compute have no parameters.
//!
//! ```text
//! # layer NAME FORWARD_MS BACKWARD_MS, then PARAMETER SHAPE
//! layer conv1 0.42 0.81
//! conv1.weight 64x3x7x7
//! conv1.bias 64
//! layer relu 0.05 0.07   # a comment reaches to the end of its line
//! layer fc 0.11 0.20
//! fc.weight 1000x4096
//! ```

mod bert_large;
mod file;
mod gpt2;
mod layers;
mod resnet50;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A model as the network sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// What it was loaded as.
    pub name: String,
    /// In the order of the forward pass; the backward pass goes the other way.
    pub layers: Vec<Layer>,
    /// The compute time of a step, if it is known: a file states it, a built-in model has none.
    pub compute: Option<Duration>,
}

/// What is computed in one go. When its backward pass ends, the gradients of its parameters are
/// complete.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The name of the module.
    pub name: String,
    /// Its parameters; none if it only computes.
    pub parameters: Vec<Parameter>,
    /// The share of a step's compute time that its forward pass takes. All shares of all layers,
    /// forward and backward, add up to 1.
    pub forward: f64,
    /// The share that its backward pass takes.
    pub backward: f64,
}

/// A tensor that is learnt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its full name, which no other of the model has.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
}

impl Replay {
    /// The built-in model `resnet50`, `bert-large` or `gpt2`, or else the one that the
    /// [file](self#files) at this path describes.
    pub fn load(spec: &str) -> Result<Self, ReplayError> {
        match spec {
            "resnet50" => Ok(resnet50::replay()),
            "bert-large" => Ok(bert_large::replay()),
            "gpt2" => Ok(gpt2::replay()),
            path => file::load(path),
        }
    }

    /// All parameters, in the order of the forward pass.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.layers.iter().flat_map(|layer| &layer.parameters)
    }

    /// The number of values to learn.
    pub fn elements(&self) -> usize {
        self.parameters().map(Parameter::elements).sum()
    }
}

impl Parameter {
    /// The number of its values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Why there is nothing to replay. Name another model, or mend the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The name is no built-in model, and the file cannot be read.
    #[error(
        "cannot read {}: {source}; name resnet50, bert-large, gpt2 or a file that describes a model",
        path.display()
    )]
    Read {
        /// What was named.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },

    /// A line of the file does not follow the format.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it, and what it should be.
        problem: String,
    },

    /// All lines are right, but there is nothing to synchronize or nothing to compute.
    #[error("{} describes no model: it needs at least one {missing}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What is missing.
        missing: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const BUILT_IN: [(&str, usize); 3] =
        [("resnet50", 25_557_032), ("bert-large", 335_141_888), ("gpt2", 124_439_808)];

    #[test]
    fn parameters_are_as_many_as_in_the_published_models() {
        for (name, elements) in BUILT_IN {
            let replay = Replay::load(name).unwrap();
            assert_eq!((replay.name.as_str(), replay.elements()), (name, elements));
            let names: HashSet<_> = replay.parameters().map(|parameter| &parameter.name).collect();
            assert_eq!(names.len(), replay.parameters().count(), "{name} repeats a name");
        }
    }

    #[test]
    fn shares_add_up_to_one_and_backward_takes_twice_as_long() {
        for (name, _) in BUILT_IN {
            let layers = Replay::load(name).unwrap().layers;
            let forward: f64 = layers.iter().map(|layer| layer.forward).sum();
            let backward: f64 = layers.iter().map(|layer| layer.backward).sum();
            assert!((forward + backward - 1.0).abs() < 1e-9, "{name}: {forward} + {backward}");
            assert!((backward - 2.0 * forward).abs() < 1e-9, "{name}: {forward} and {backward}");
            assert!(layers.iter().all(|layer| layer.forward >= 0.0 && layer.backward >= 0.0));
        }
    }
}
