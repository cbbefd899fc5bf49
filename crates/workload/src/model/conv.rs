//! A convolutional network: every convolution looks at 3 × 3 pixels in steps of two, so it halves
//! the image; what remains of the image goes through two linear layers.
//!
//! The steps of two replace the usual pooling. Besides being cheaper, they have a right gradient:
//! candle's of maximum pooling is too small by the area of a pool, and that of average pooling is
//! wrong where the size is odd.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Linear, VarBuilder, conv2d, linear};

use super::Model;

const KERNEL: usize = 3;
const CONFIG: Conv2dConfig =
    Conv2dConfig { padding: 1, stride: 2, dilation: 1, groups: 1, cudnn_fwd_algo: None };

/// Parameters `conv0.weight`, `conv0.bias`, …, `hidden.weight`, …, `classes.weight`, ….
pub(super) struct Conv {
    convolutions: Vec<Conv2d>,
    hidden: Linear,
    classes: Linear,
}

impl Conv {
    /// For images of `[channels, height, width]`.
    pub(super) fn new(
        image: [usize; 3],
        channels: &[usize],
        hidden: usize,
        classes: usize,
        variables: VarBuilder,
    ) -> Result<Self> {
        let [mut inputs, mut height, mut width] = image;
        let mut convolutions = Vec::new();
        for (i, &outputs) in channels.iter().enumerate() {
            let variables = variables.pp(format!("conv{i}"));
            convolutions.push(conv2d(inputs, outputs, KERNEL, CONFIG, variables)?);
            (inputs, height, width) = (outputs, height.div_ceil(2), width.div_ceil(2));
        }
        Ok(Self {
            convolutions,
            hidden: linear(inputs * height * width, hidden, variables.pp("hidden"))?,
            classes: linear(hidden, classes, variables.pp("classes"))?,
        })
    }
}

impl Model for Conv {
    fn logits(&self, inputs: &Tensor) -> Result<Tensor> {
        let mut image = inputs.clone();
        for convolution in &self.convolutions {
            image = convolution.forward(&image)?.relu()?;
        }
        let hidden = self.hidden.forward(&image.flatten_from(1)?)?.relu()?;
        self.classes.forward(&hidden)
    }
}
