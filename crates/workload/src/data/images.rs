use candle_core::{Device, Result, Tensor};

use super::Batch;

/// Labelled images of one size, kept as the bytes they come in: a quarter of their size as floats.
#[derive(Debug)]
pub(super) struct Images {
    /// Channels, height and width of an image.
    pub(super) shape: [usize; 3],
    /// The byte that becomes 1.0.
    pub(super) white: u8,
    /// All images, one after the other.
    pub(super) pixels: Vec<u8>,
    /// One class per image.
    pub(super) labels: Vec<u8>,
}

impl Images {
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }

    /// `inputs` of `[batch, channels, height, width]` in 0..1 and `targets` of `[batch]`.
    pub(super) fn batch(&self, indices: &[usize]) -> Result<Batch> {
        let [channels, height, width] = self.shape;
        let size = channels * height * width;
        let white = f32::from(self.white);
        let pixels: Vec<f32> = indices
            .iter()
            .flat_map(|&index| &self.pixels[index * size..][..size])
            .map(|&pixel| f32::from(pixel) / white)
            .collect();
        let labels: Vec<u32> = indices.iter().map(|&index| self.labels[index].into()).collect();
        Ok(Batch {
            inputs: Tensor::from_vec(
                pixels,
                (indices.len(), channels, height, width),
                &Device::Cpu,
            )?,
            targets: Tensor::from_vec(labels, indices.len(), &Device::Cpu)?,
        })
    }
}
