//! A small GPT: the embeddings of token and position are added, go through blocks, and are compared
//! with the embedding of every token to score which comes next.
//!
//! A block adds two things to the values of each token: attention to the tokens up to it, and a
//! perceptron with one hidden layer of four times the width and a GELU. Each sees its input
//! normalized. Scoring with the token embedding makes that a parameter with two uses, of which the
//! gradient is complete only at the very end of the backward pass.
//!
//! Initial values are those of GPT-2: deviation 0.02, and what is added to the values of a token
//! divided by the root of the number of such additions.

use candle_core::{D, Module, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder, ops};

use super::Model;

const STDEV: f64 = 0.02;

/// All dimensions of a transformer.
pub(super) struct Size {
    pub(super) layers: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
    pub(super) context: usize,
    pub(super) vocabulary: usize,
}

/// Parameters `token.weight`, `position.weight`, `block0.norm1.weight`, …, `norm.bias`.
pub(super) struct Transformer {
    token: Tensor,
    position: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
}

impl Transformer {
    pub(super) fn new(size: &Size, variables: VarBuilder) -> Result<Self> {
        let embedding = |name, rows| {
            let init = Init::Randn { mean: 0.0, stdev: STDEV };
            variables.pp(name).get_with_hints((rows, size.width), "weight", init)
        };
        Ok(Self {
            token: embedding("token", size.vocabulary)?,
            position: embedding("position", size.context)?,
            blocks: (0..size.layers)
                .map(|i| Block::new(size, variables.pp(format!("block{i}"))))
                .collect::<Result<_>>()?,
            norm: Norm::new(size.width, variables.pp("norm"))?,
        })
    }
}

impl Model for Transformer {
    fn logits(&self, inputs: &Tensor) -> Result<Tensor> {
        let (batch, length) = inputs.dims2()?;
        let width = self.token.dim(1)?;
        let tokens = self.token.index_select(&inputs.flatten_all()?, 0)?;
        let mut values = tokens
            .reshape((batch, length, width))?
            .broadcast_add(&self.position.narrow(0, 0, length)?)?;
        let mask = causal_mask(length, &values)?;
        for block in &self.blocks {
            values = block.forward(&values, &mask)?;
        }
        Linear::new(self.token.clone(), None).forward(&self.norm.forward(&values)?)
    }
}

/// Minus infinity where a row's token would look at a later one, 0 elsewhere.
fn causal_mask(length: usize, like: &Tensor) -> Result<Tensor> {
    let rows = (0..length).flat_map(|row| {
        (0..length).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 })
    });
    Tensor::from_iter(rows, like.device())?.reshape((length, length))?.to_dtype(like.dtype())
}

struct Block {
    norm1: Norm,
    attention: Attention,
    norm2: Norm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(size: &Size, variables: VarBuilder) -> Result<Self> {
        let (width, additions) = (size.width, 2 * size.layers);
        Ok(Self {
            norm1: Norm::new(width, variables.pp("norm1"))?,
            attention: Attention::new(size, variables.pp("attention"))?,
            norm2: Norm::new(width, variables.pp("norm2"))?,
            expand: linear(width, 4 * width, 1, variables.pp("expand"))?,
            contract: linear(4 * width, width, additions, variables.pp("contract"))?,
        })
    }

    fn forward(&self, values: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let values = (values + self.attention.forward(&self.norm1.forward(values)?, mask)?)?;
        let hidden = self.expand.forward(&self.norm2.forward(&values)?)?.gelu()?;
        &values + self.contract.forward(&hidden)?
    }
}

struct Attention {
    heads: usize,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl Attention {
    fn new(size: &Size, variables: VarBuilder) -> Result<Self> {
        let project =
            |name, additions| linear(size.width, size.width, additions, variables.pp(name));
        Ok(Self {
            heads: size.heads,
            query: project("query", 1)?,
            key: project("key", 1)?,
            value: project("value", 1)?,
            output: project("output", 2 * size.layers)?,
        })
    }

    fn forward(&self, values: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, length, width) = values.dims3()?;
        let head = width / self.heads;
        // [batch, length, width] to [batch, heads, length, head]
        let split = |projection: &Linear| {
            projection
                .forward(values)?
                .reshape((batch, length, self.heads, head))?
                .transpose(1, 2)?
                .contiguous()
        };
        let (query, key, value) = (split(&self.query)?, split(&self.key)?, split(&self.value)?);
        let scores = (query.matmul(&key.t()?)? * (head as f64).powf(-0.5))?;
        // The composed softmax, as the fused one has no gradient.
        let weights = ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)?;
        let mixed = weights.matmul(&value)?.transpose(1, 2)?.reshape((batch, length, width))?;
        self.output.forward(&mixed)
    }
}

/// Layer normalization, composed of operations that have a gradient; candle's fused one has none.
struct Norm {
    weight: Tensor,
    bias: Tensor,
}

impl Norm {
    /// Keeps the division finite for a token of equal values.
    const EPSILON: f64 = 1e-5;

    fn new(width: usize, variables: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: variables.get_with_hints(width, "weight", Init::Const(1.0))?,
            bias: variables.get_with_hints(width, "bias", Init::Const(0.0))?,
        })
    }

    fn forward(&self, values: &Tensor) -> Result<Tensor> {
        let centred = values.broadcast_sub(&values.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        centred
            .broadcast_div(&(variance + Self::EPSILON)?.sqrt()?)?
            .broadcast_mul(&self.weight)?
            .broadcast_add(&self.bias)
    }
}

/// A linear layer whose output is one of so many `additions` to the same values.
fn linear(
    inputs: usize,
    outputs: usize,
    additions: usize,
    variables: VarBuilder,
) -> Result<Linear> {
    let init = Init::Randn { mean: 0.0, stdev: STDEV / (additions as f64).sqrt() };
    let weight = variables.get_with_hints((outputs, inputs), "weight", init)?;
    let bias = variables.get_with_hints(outputs, "bias", Init::Const(0.0))?;
    Ok(Linear::new(weight, Some(bias)))
}
