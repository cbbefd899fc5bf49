//! What all optimizers have in common: they follow their formula, and they can be resumed.

use super::*;

const LENGTHS: [usize; 4] = [1, 7, 0, 130];
const STEPS: u64 = 60;

fn specs() -> Vec<OptimizerSpec> {
    let rate = LearningRate::Cosine { peak: 0.05, floor: 0.001, warm_up: 5, steps: 50 };
    let momentum = |nesterov, weight_decay| OptimizerSpec::Momentum {
        learning_rate: rate,
        momentum: 0.9,
        nesterov,
        weight_decay,
    };
    let adagrad =
        |weight_decay| OptimizerSpec::Adagrad { learning_rate: rate, epsilon: 1e-10, weight_decay };
    let adamw = |weight_decay| OptimizerSpec::AdamW {
        learning_rate: rate,
        betas: (0.9, 0.999),
        epsilon: 1e-8,
        weight_decay,
    };
    vec![
        OptimizerSpec::Sgd { learning_rate: rate, weight_decay: 0.0 },
        OptimizerSpec::Sgd { learning_rate: LearningRate::Constant(0.1), weight_decay: 0.1 },
        momentum(false, 0.0),
        momentum(false, 0.1),
        momentum(true, 0.1),
        adagrad(0.0),
        adagrad(0.1),
        adamw(0.0),
        adamw(0.1),
    ]
}

/// Numbers between -1 and 1 that look random and depend on the arguments alone.
fn noise(seed: u64, index: usize) -> f32 {
    let mut bits = (seed << 32 | index as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    for _ in 0..2 {
        bits = (bits ^ bits >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn initial() -> Vec<Vec<f32>> {
    LENGTHS.iter().map(|&length| (0..length).map(|index| noise(0, index)).collect()).collect()
}

fn gradient(parameter: usize, step: u64) -> Vec<f32> {
    let seed = step * LENGTHS.len() as u64 + parameter as u64 + 1;
    (0..LENGTHS[parameter]).map(|index| noise(seed, index)).collect()
}

/// Parameter 3 has no gradient in every seventh step.
fn takes_part(parameter: usize, step: u64) -> bool {
    parameter != 3 || !step.is_multiple_of(7)
}

fn train(
    optimizer: &mut dyn Optimizer,
    weights: &mut [Vec<f32>],
    steps: std::ops::RangeInclusive<u64>,
) {
    for step in steps {
        for (parameter, weights) in weights.iter_mut().enumerate() {
            if takes_part(parameter, step) {
                optimizer.update(parameter, step, weights, &gradient(parameter, step));
            }
        }
    }
}

fn bits(weights: &[Vec<f32>]) -> Vec<u32> {
    weights.iter().flatten().map(|weight| weight.to_bits()).collect()
}

/// The textbook, one weight at a time and in `f64`; independent of the code under test.
fn reference(spec: &OptimizerSpec, parameter: usize, index: usize) -> f64 {
    let mut w = f64::from(noise(0, index));
    let (mut m, mut v) = (0.0, 0.0f64);
    for step in (1..=STEPS).filter(|&step| takes_part(parameter, step)) {
        let g = f64::from(gradient(parameter, step)[index]);
        let lr = spec.learning_rate().at(step);
        match *spec {
            OptimizerSpec::Sgd { weight_decay, .. } => w -= lr * (g + weight_decay * w),
            OptimizerSpec::Momentum { momentum, nesterov, weight_decay, .. } => {
                let g = g + weight_decay * w;
                m = momentum * m + g;
                w -= lr * if nesterov { g + momentum * m } else { m };
            }
            OptimizerSpec::Adagrad { epsilon, weight_decay, .. } => {
                let g = g + weight_decay * w;
                v += g * g;
                w -= lr * g / (v.sqrt() + epsilon);
            }
            OptimizerSpec::AdamW { betas, epsilon, weight_decay, .. } => {
                w -= lr * weight_decay * w;
                m = betas.0 * m + (1.0 - betas.0) * g;
                v = betas.1 * v + (1.0 - betas.1) * g * g;
                let m_hat = m / (1.0 - betas.0.powf(step as f64));
                let v_hat: f64 = v / (1.0 - betas.1.powf(step as f64));
                w -= lr * m_hat / (v_hat.sqrt() + epsilon);
            }
        }
    }
    w
}

#[test]
fn updates_follow_the_formula() {
    for spec in specs() {
        let mut weights = initial();
        train(&mut *spec.build(&LENGTHS).unwrap(), &mut weights, 1..=STEPS);
        for (parameter, weights) in weights.iter().enumerate() {
            for (index, &weight) in weights.iter().enumerate() {
                let expected = reference(&spec, parameter, index);
                let error = (f64::from(weight) - expected).abs();
                assert!(
                    error < 1e-5,
                    "{spec}: {weight} instead of {expected} in {parameter}/{index}"
                );
            }
        }
    }
}

#[test]
fn a_scaled_update_is_one_with_another_learning_rate() {
    // The state must not depend on the rate, so a factor that changes from step to step has to give
    // what a rate that changes likewise does. Powers of two keep both exact.
    let factor = |step: u64| 1.0 / (1 << (step % 3)) as f64;
    for spec in specs() {
        let spec = spec.with_learning_rate(LearningRate::Constant(0.05));
        let (mut scaled, mut weights) = (spec.build(&LENGTHS).unwrap(), initial());
        let mut expected = initial();
        let mut carried = spec.build(&LENGTHS).unwrap();
        for step in 1..=9 {
            let rate = LearningRate::Constant(0.05 * factor(step));
            let mut slower = spec.with_learning_rate(rate).build(&LENGTHS).unwrap();
            for parameter in 0..LENGTHS.len() {
                let gradient = gradient(parameter, step);
                let weights = &mut weights[parameter];
                scaled.update_scaled(parameter, step, factor(step), weights, &gradient);
                slower.restore(parameter, &carried.state(parameter)).unwrap();
                slower.update(parameter, step, &mut expected[parameter], &gradient);
            }
            carried = slower;
        }
        assert_eq!(bits(&weights), bits(&expected), "{spec}");

        let mut unscaled = initial();
        train(&mut *spec.build(&LENGTHS).unwrap(), &mut unscaled, 1..=9);
        assert_ne!(bits(&weights), bits(&unscaled), "{spec}");
    }
}

#[test]
fn every_setting_matters() {
    let results: Vec<Vec<u32>> = specs()
        .iter()
        .map(|spec| {
            let mut weights = initial();
            train(&mut *spec.build(&LENGTHS).unwrap(), &mut weights, 1..=3);
            bits(&weights)
        })
        .collect();
    for (index, result) in results.iter().enumerate() {
        assert!(!results[..index].contains(result), "{}", specs()[index]);
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_an_uninterrupted_one() {
    for spec in specs() {
        let mut expected = initial();
        train(&mut *spec.build(&LENGTHS).unwrap(), &mut expected, 1..=STEPS);
        for interruption in [0, 1, 7, 33, STEPS] {
            let mut weights = initial();
            let mut before = spec.build(&LENGTHS).unwrap();
            train(&mut *before, &mut weights, 1..=interruption);

            let mut after = spec.build(&LENGTHS).unwrap();
            for parameter in 0..LENGTHS.len() {
                after.restore(parameter, &before.state(parameter)).unwrap();
            }
            drop(before);
            train(&mut *after, &mut weights, interruption + 1..=STEPS);
            assert_eq!(bits(&weights), bits(&expected), "{spec}, interrupted at {interruption}");
        }
    }
}

#[test]
fn cutting_a_parameter_elsewhere_does_not_change_its_bits() {
    // A shorter slice, and one that begins elsewhere, makes the compiler's loops treat the same
    // element now in a vector, now alone.
    for spec in specs() {
        let length = LENGTHS[3];
        let mut whole: Vec<f32> = (0..length).map(|index| noise(0, index)).collect();
        let mut pieces = whole.clone();
        let mut of_whole = spec.build(&[length]).unwrap();
        let mut of_pieces = spec.build(&vec![1; length]).unwrap();
        for step in 1..=10 {
            let gradient = gradient(3, step);
            of_whole.update(0, step, &mut whole, &gradient);
            for index in 0..length {
                let element = index..index + 1;
                of_pieces.update(index, step, &mut pieces[element.clone()], &gradient[element]);
            }
        }
        assert_eq!(bits(&[whole]), bits(&[pieces]), "{spec}");
    }
}

#[test]
fn the_state_of_another_model_or_optimizer_is_refused_and_changes_nothing() {
    for spec in specs() {
        let mut optimizer = spec.build(&LENGTHS).unwrap();
        train(&mut *optimizer, &mut initial(), 1..=3);
        let before: Vec<Vec<f32>> = optimizer.state(1).iter().map(|v| v.to_vec()).collect();
        let count = before.len();
        let (right, long) = (vec![0.5; LENGTHS[1]], vec![0.5; LENGTHS[1] + 1]);

        let mut wrong: Vec<Vec<&[f32]>> = vec![vec![&right; count + 1], vec![&long; count + 1]];
        if count > 0 {
            let mut last_is_long = vec![&right[..]; count];
            last_is_long[count - 1] = &long;
            wrong.extend([vec![], last_is_long]);
        }
        for state in wrong {
            let error = optimizer.restore(1, &state).unwrap_err();
            assert_eq!(error.expected, vec![LENGTHS[1]; count]);
            assert_eq!(error.found, state.iter().map(|v| v.len()).collect::<Vec<_>>());
            assert!(error.to_string().contains(spec.name()), "{error}");
        }
        assert_eq!(optimizer.state(1), before);
    }
}

#[test]
#[should_panic(expected = "length of the gradient of parameter 1")]
fn a_gradient_of_another_length_is_a_mistake() {
    let mut optimizer = specs()[0].build(&LENGTHS).unwrap();
    optimizer.update(1, 1, &mut [0.0; LENGTHS[1]], &[0.0; 3]);
}
