//! Networks that learn from a [`Dataset`](crate::data::Dataset).
//!
//! A model takes its parameters from the caller's [`VarBuilder`], asks for each of them once, in the
//! order of the forward pass, and keeps no other state: there is no dropout and no statistic over
//! the batch. What it answers for a batch depends on the parameters and that batch alone.
//!
//! Only operations whose gradient candle computes correctly are used; `tests/models.rs` compares
//! every model's gradient with finite differences.

mod conv;
mod mlp;
mod transformer;

use std::fmt;

use candle_core::{D, DType, Result, Tensor};
use candle_nn::VarBuilder;

use crate::data::{Batch, Kind};

/// A network with its parameters.
pub trait Model: Send + Sync {
    /// A score per class, `[batch, classes]`, or per next token, `[batch, context, vocabulary]`.
    fn logits(&self, inputs: &Tensor) -> Result<Tensor>;

    /// The cross entropy, as a scalar: its mean over the batch and, of sequences, over the tokens.
    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let logits = self.logits(&batch.inputs)?;
        let scores = logits.dim(D::Minus1)?;
        candle_nn::loss::cross_entropy(
            &logits.reshape(((), scores))?,
            &batch.targets.flatten_all()?,
        )
    }
}

/// How many answers of the model are right, and how many it gave: one per image or token.
pub fn accuracy(model: &dyn Model, batch: &Batch) -> Result<(usize, usize)> {
    let answers = model.logits(&batch.inputs)?.argmax(D::Minus1)?;
    let hits = answers.eq(&batch.targets)?.to_dtype(DType::U32)?.sum_all()?.to_scalar::<u32>()?;
    Ok((hits as usize, batch.targets.elem_count()))
}

/// The architecture of a model. What goes in and what comes out is up to the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// Linear layers with rectifiers between them, for images.
    Mlp {
        /// Outputs of each layer but the last.
        hidden: Vec<usize>,
    },
    /// Convolutions that halve the image, then two linear layers, for images.
    Conv {
        /// Outputs of each convolution.
        channels: Vec<usize>,
        /// Outputs of the linear layer before the last.
        hidden: usize,
    },
    /// A small GPT, for sequences.
    Transformer {
        /// Number of blocks.
        layers: usize,
        /// Values per token.
        width: usize,
        /// Heads that attention is split into; they divide the width.
        heads: usize,
        /// The most tokens of a sequence.
        context: usize,
    },
}

impl ModelSpec {
    /// A perceptron that reads digits.
    pub fn mlp() -> Self {
        Self::Mlp { hidden: vec![256, 128] }
    }

    /// A convolutional network for Fashion-MNIST.
    pub fn conv() -> Self {
        Self::Conv { channels: vec![16, 32], hidden: 128 }
    }

    /// A transformer that learns the words of a small text.
    pub fn transformer() -> Self {
        Self::Transformer { layers: 2, width: 64, heads: 4, context: 64 }
    }

    /// Makes the model for samples of this kind, with parameters from `variables`.
    pub fn build(
        &self,
        kind: Kind,
        variables: VarBuilder,
    ) -> std::result::Result<Box<dyn Model>, ModelError> {
        self.check()?;
        match (self, kind) {
            (Self::Mlp { hidden }, Kind::Classification { channels, height, width, classes }) => {
                let inputs = channels * height * width;
                Ok(Box::new(mlp::Mlp::new(inputs, hidden, classes, variables)?))
            }
            (
                Self::Conv { channels, hidden },
                Kind::Classification { channels: colours, height, width, classes },
            ) => {
                let image = [colours, height, width];
                Ok(Box::new(conv::Conv::new(image, channels, *hidden, classes, variables)?))
            }
            (
                &Self::Transformer { layers, width, heads, context },
                Kind::Sequence { vocabulary, context: sequence },
            ) => {
                if sequence > context {
                    return Err(ModelError::ContextTooSmall { context, sequence });
                }
                let size = transformer::Size { layers, width, heads, context, vocabulary };
                Ok(Box::new(transformer::Transformer::new(&size, variables)?))
            }
            (Self::Mlp { .. } | Self::Conv { .. }, Kind::Sequence { .. }) => {
                Err(ModelError::ImagesOnly { model: self.name() })
            }
            (Self::Transformer { .. }, Kind::Classification { .. }) => {
                Err(ModelError::SequencesOnly { model: self.name() })
            }
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Mlp { .. } => "mlp",
            Self::Conv { .. } => "conv",
            Self::Transformer { .. } => "transformer",
        }
    }

    fn check(&self) -> std::result::Result<(), ModelError> {
        let (sizes, complaint): (&[usize], _) = match self {
            Self::Mlp { hidden } => (hidden, "a hidden layer"),
            Self::Conv { channels, .. } if channels.contains(&0) => (channels, "a convolution"),
            Self::Conv { hidden, .. } => (&[*hidden], "the hidden layer"),
            Self::Transformer { layers, width, heads, context } => {
                if *heads > 0 && width % heads != 0 {
                    return Err(ModelError::Heads { width: *width, heads: *heads });
                }
                (&[*layers, *width, *heads, *context], "a dimension of the transformer")
            }
        };
        match sizes.contains(&0) {
            true => Err(ModelError::Empty { part: complaint }),
            false => Ok(()),
        }
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        f.write_str(self.name())?;
        match self {
            Self::Mlp { hidden } => write!(f, " hidden={}", list(hidden)),
            Self::Conv { channels, hidden } => {
                write!(f, " channels={} hidden={hidden}", list(channels))
            }
            Self::Transformer { layers, width, heads, context } => {
                write!(f, " layers={layers} width={width} heads={heads} context={context}")
            }
        }
    }
}

/// Why a model could not be made. All but the last ask for other settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The data are sequences.
    #[error("the model {model} takes images: use a transformer for text")]
    ImagesOnly {
        /// The model asked for.
        model: &'static str,
    },

    /// The data are images.
    #[error("the model {model} takes text: use an mlp or conv for images")]
    SequencesOnly {
        /// The model asked for.
        model: &'static str,
    },

    /// A size is 0.
    #[error("{part} has size 0: give it at least 1")]
    Empty {
        /// Which.
        part: &'static str,
    },

    /// The heads of attention would be of different sizes.
    #[error("a width of {width} cannot be split into {heads} heads: choose a multiple")]
    Heads {
        /// Values per token.
        width: usize,
        /// Number of heads.
        heads: usize,
    },

    /// The samples are longer than the model can take.
    #[error(
        "the data have {sequence} tokens per sample, the model takes {context}: make them equal"
    )]
    ContextTooSmall {
        /// What the model takes.
        context: usize,
        /// What the data have.
        sequence: usize,
    },

    /// The parameters could not be made.
    #[error("cannot make the parameters: {0}")]
    Parameters(#[from] candle_core::Error),
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const IMAGE: Kind = Kind::Classification { channels: 1, height: 8, width: 8, classes: 10 };
    const SEQUENCE: Kind = Kind::Sequence { vocabulary: 256, context: 64 };

    fn build(spec: &ModelSpec, kind: Kind) -> std::result::Result<Box<dyn Model>, ModelError> {
        spec.build(kind, VarBuilder::zeros(DType::F32, &Device::Cpu))
    }

    #[test]
    fn models_refuse_data_of_the_other_kind() {
        assert!(build(&ModelSpec::mlp(), IMAGE).is_ok());
        assert!(build(&ModelSpec::conv(), IMAGE).is_ok());
        assert!(build(&ModelSpec::transformer(), SEQUENCE).is_ok());
        for spec in [ModelSpec::mlp(), ModelSpec::conv()] {
            assert!(matches!(build(&spec, SEQUENCE), Err(ModelError::ImagesOnly { .. })));
        }
        let error = build(&ModelSpec::transformer(), IMAGE).err().unwrap();
        assert!(matches!(error, ModelError::SequencesOnly { .. }));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let transformer = |layers, width, heads, context| {
            let spec = ModelSpec::Transformer { layers, width, heads, context };
            build(&spec, SEQUENCE).err().unwrap()
        };
        assert!(matches!(transformer(1, 64, 5, 64), ModelError::Heads { .. }));
        assert!(matches!(transformer(1, 64, 4, 63), ModelError::ContextTooSmall { .. }));
        for empty in
            [transformer(0, 64, 4, 64), transformer(1, 0, 4, 64), transformer(1, 64, 0, 64)]
        {
            assert!(matches!(empty, ModelError::Empty { .. }));
        }
        for spec in [
            ModelSpec::Mlp { hidden: vec![8, 0] },
            ModelSpec::Conv { channels: vec![0], hidden: 8 },
            ModelSpec::Conv { channels: vec![8], hidden: 0 },
        ] {
            assert!(matches!(build(&spec, IMAGE), Err(ModelError::Empty { .. })));
        }
    }

    #[test]
    fn specs_are_written_with_all_sizes() {
        assert_eq!(ModelSpec::mlp().to_string(), "mlp hidden=256,128");
        assert_eq!(ModelSpec::conv().to_string(), "conv channels=16,32 hidden=128");
        let transformer = "transformer layers=2 width=64 heads=4 context=64";
        assert_eq!(ModelSpec::transformer().to_string(), transformer);
    }
}
