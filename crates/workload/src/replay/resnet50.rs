//! ResNet-50 with the names and shapes of torchvision, on images of 224 × 224 pixels.

use super::Replay;
use super::layers::Layers;

/// Blocks and inner channels of each stage. A block puts out four times its inner channels.
const STAGES: [(usize, usize); 4] = [(3, 64), (4, 128), (6, 256), (3, 512)];
const EXPANSION: usize = 4;
const CLASSES: usize = 1000;

pub(super) fn replay() -> Replay {
    let mut layers = Layers::new();
    // The first convolution halves the image, the pooling after it does so again.
    convolution(&mut layers, "conv1", "bn1", 3, 64, 7, 112);
    let (mut inputs, mut side) = (64, 56);
    for (stage, (blocks, inner)) in STAGES.into_iter().enumerate() {
        for block in 0..blocks {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let name = format!("layer{}.{block}", stage + 1);
            bottleneck(&mut layers, &name, inputs, inner, side, stride);
            inputs = EXPANSION * inner;
            side /= stride;
        }
    }
    layers.module("fc", 1, &[("weight", &[CLASSES, inputs]), ("bias", &[CLASSES])]);
    layers.finish("resnet50")
}

/// Three convolutions, of which the second takes the stride, beside a shortcut. Where the shapes of
/// input and output differ, the shortcut is a convolution too.
fn bottleneck(
    layers: &mut Layers,
    name: &str,
    inputs: usize,
    inner: usize,
    side: usize,
    stride: usize,
) {
    let (outputs, small) = (EXPANSION * inner, side / stride);
    let mut add = |conv: &str, norm: &str, inputs, outputs, kernel, side| {
        let (conv, norm) = (format!("{name}.{conv}"), format!("{name}.{norm}"));
        convolution(layers, &conv, &norm, inputs, outputs, kernel, side);
    };
    add("conv1", "bn1", inputs, inner, 1, side);
    add("conv2", "bn2", inner, inner, 3, small);
    add("conv3", "bn3", inner, outputs, 1, small);
    if inputs != outputs {
        add("downsample.0", "downsample.1", inputs, outputs, 1, small);
    }
}

/// A convolution without bias and the batch normalization behind it; `side` is that of the output.
fn convolution(
    layers: &mut Layers,
    conv: &str,
    norm: &str,
    inputs: usize,
    outputs: usize,
    kernel: usize,
    side: usize,
) {
    let pixels = side * side;
    layers.module(conv, pixels, &[("weight", &[outputs, inputs, kernel, kernel])]);
    layers.module(norm, pixels, &[("weight", &[outputs]), ("bias", &[outputs])]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_stand_in_forward_order() {
        let replay = replay();
        let names: Vec<&str> = replay.layers.iter().map(|layer| layer.name.as_str()).collect();
        // 53 convolutions, each with its normalization, and one linear layer.
        assert_eq!(names.len(), 2 * 53 + 1);
        let first_block = [
            "conv1",
            "bn1",
            "layer1.0.conv1",
            "layer1.0.bn1",
            "layer1.0.conv2",
            "layer1.0.bn2",
            "layer1.0.conv3",
            "layer1.0.bn3",
            "layer1.0.downsample.0",
            "layer1.0.downsample.1",
            "layer1.1.conv1",
        ];
        assert_eq!(names[..first_block.len()], first_block);
        assert_eq!(names[names.len() - 2..], ["layer4.2.bn3", "fc"]);
    }

    #[test]
    fn shapes_are_those_of_torchvision() {
        let replay = replay();
        let shape = |name| &replay.parameters().find(|p| p.name == name).expect(name).shape[..];
        assert_eq!(shape("conv1.weight"), [64, 3, 7, 7]);
        assert_eq!(shape("layer2.0.conv1.weight"), [128, 256, 1, 1]);
        assert_eq!(shape("layer2.0.downsample.0.weight"), [512, 256, 1, 1]);
        assert_eq!(shape("layer4.2.conv2.weight"), [512, 512, 3, 3]);
        assert_eq!(shape("layer4.2.bn3.bias"), [2048]);
        assert_eq!(shape("fc.weight"), [1000, 2048]);
    }

    /// The published cost of a forward pass is 4.09 billion multiply-adds, to which the first
    /// convolution, 64 × 147 weights at 112 × 112 pixels, contributes 118 million.
    #[test]
    fn time_goes_by_multiply_adds() {
        let first = &replay().layers[0];
        assert!((first.forward * 3.0 - 118.0 / 4090.0).abs() < 0.001, "{}", first.forward * 3.0);
    }
}
