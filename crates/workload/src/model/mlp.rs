//! A perceptron: linear layers with rectifiers between them.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear};

use super::Model;

/// Parameters `linear0.weight`, `linear0.bias`, `linear1.weight`, …
pub(super) struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    pub(super) fn new(
        inputs: usize,
        hidden: &[usize],
        classes: usize,
        variables: VarBuilder,
    ) -> Result<Self> {
        let sizes: Vec<usize> = [&[inputs], hidden, &[classes]].concat();
        let layers = sizes
            .windows(2)
            .enumerate()
            .map(|(i, size)| linear(size[0], size[1], variables.pp(format!("linear{i}"))))
            .collect::<Result<_>>()?;
        Ok(Self { layers })
    }
}

impl Model for Mlp {
    fn logits(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut values = inputs.flatten_from(1)?;
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 {
                values = values.relu()?;
            }
            values = layer.forward(&values)?;
        }
        Ok(values)
    }
}
