//! The values that parameters start from.
//!
//! candle's CPU backend cannot be seeded, so a layer's [`Init`] is carried out here: a parameter's
//! values follow from the seed of the run and the parameter's name alone. They do not depend on the
//! order in which parameters are made, on the other parameters, or on the machine.

use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;

use crate::random::Random;

const PURPOSE: &str = "unisono initial values";

/// The initial values of the parameter `name`, in row-major order.
pub fn initialize(seed: u64, name: &str, shape: &Shape, init: Init) -> Vec<f32> {
    let mut random = Random::new(PURPOSE, seed, name.as_bytes());
    let mut draw = |distribution: &dyn Fn(&mut Random) -> f64| -> Vec<f32> {
        (0..shape.elem_count()).map(|_| distribution(&mut random) as f32).collect()
    };
    match init {
        Init::Const(value) => vec![value as f32; shape.elem_count()],
        Init::Uniform { lo, up } => draw(&|random| lo + (up - lo) * random.uniform()),
        Init::Randn { mean, stdev } => draw(&|random| mean + stdev * random.normal()),
        Init::Kaiming { dist, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => draw(&|random| stdev * random.normal()),
                NormalOrUniform::Uniform => {
                    let bound = 3_f64.sqrt() * stdev;
                    draw(&|random| bound * (2.0 * random.uniform() - 1.0))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_nn::init::{DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM};

    fn variance(values: &[f32]) -> f64 {
        values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / values.len() as f64
    }

    #[test]
    fn seed_and_name_decide_the_bits() {
        let values = |seed, name| initialize(seed, name, &(8, 4).into(), DEFAULT_KAIMING_NORMAL);
        assert_eq!(values(1, "a.weight"), values(1, "a.weight"));
        assert_ne!(values(1, "a.weight"), values(2, "a.weight"));
        assert_ne!(values(1, "a.weight"), values(1, "b.weight"));
    }

    #[test]
    fn every_distribution_has_its_spread() {
        let shape = Shape::from((200, 100));
        let of = |init| initialize(7, "weight", &shape, init);
        assert!(of(Init::Const(0.25)).iter().all(|&x| x == 0.25));
        let uniform = of(Init::Uniform { lo: 2.0, up: 3.0 });
        assert!(uniform.iter().all(|x| (2.0..=3.0).contains(x)));
        assert!((variance(&of(Init::Randn { mean: 0.0, stdev: 0.5 })) - 0.25).abs() < 0.01);
        // Before a rectifier, the variance is 2 / (number of inputs): here 2 / 100.
        for init in [DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM] {
            assert!((variance(&of(init)) - 0.02).abs() < 0.001, "{init:?}");
        }
    }

    /// A checkpoint of old and a run of today must start from the same weights.
    #[test]
    fn bits_never_change() {
        let bits = |init| {
            let values = initialize(42, "fc.weight", &(2, 2).into(), init);
            values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(bits(DEFAULT_KAIMING_NORMAL), [3215364224, 1058280448, 3213679360, 3215337344]);
        assert_eq!(bits(DEFAULT_KAIMING_UNIFORM), [3217487751, 1059503617, 1070084386, 3211825633]);
    }
}
