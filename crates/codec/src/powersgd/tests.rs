//! The codec as a whole: what several shards encode, settle and decode.

use super::*;
use crate::Key;

/// Numbers between −1 and 1.
pub(super) fn noise(seed: u64, count: usize) -> Vec<f32> {
    let key = Key::new(seed);
    (0..count as u64).map(|i| (key.at(i) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn task(shape: &[usize]) -> Task<'_> {
    Task { shape, parameter: 3, step: 0, seed: 7 }
}

/// A matrix that is the product of two random ones of a rank.
fn of_rank(seed: u64, rows: usize, columns: usize, rank: usize) -> Vec<f32> {
    let (left, right) = (noise(seed, rows * rank), noise(seed + 1, columns * rank));
    let mut matrix = vec![0.0; rows * columns];
    matrix::expand(Form { rows, columns, rank }, &left, &right, &mut matrix);
    matrix
}

/// One step of all shards, with means that are rounded as the wire rounds.
fn step(codec: &PowerSgd, task: &Task, shards: &[&[f32]], remembered: &mut Vec<f32>) -> Vec<f32> {
    let mut means: Vec<Vec<f32>> = Vec::new();
    for round in 0..codec.rounds() {
        let given = means.last().unwrap_or(remembered);
        let mut mean = vec![0.0; codec.encoded(task.shape, round)];
        for shard in shards {
            let mut encoding = vec![f32::NAN; mean.len()];
            codec.encode(round, task, shard, given, &mut encoding);
            mean.iter_mut().zip(&encoding).for_each(|(sum, x)| *sum += x / shards.len() as f32);
        }
        for x in &mut mean {
            *x = match codec.wire() {
                Wire::F32 => *x,
                Wire::Fp16 => half::f16::from_f32(*x).to_f32(),
                Wire::Bf16 => half::bf16::from_f32(*x).to_f32(),
            };
        }
        if round + 1 < codec.rounds() {
            codec.settle(round, task, &mut mean);
        }
        means.push(mean);
    }
    let means: Vec<&[f32]> = means.iter().map(Vec::as_slice).collect();
    let mut decoded = vec![f32::NAN; task.elements()];
    codec.decode(task, &means, remembered, &mut decoded);
    decoded
}

/// The length of the difference, as a part of the length of what was expected.
fn error(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 =
        found.iter().zip(expected).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let length: f64 = expected.iter().map(|x| square(f64::from(*x))).sum();
    (difference / length).sqrt()
}

/// The definition, in f64: the part of the gradient that lies in the columns of `M · Q`.
fn reference(matrix: &[f32], rows: usize, columns: usize, rank: usize, q: &[f32]) -> Vec<f32> {
    let m = |i: usize, j: usize| f64::from(matrix[i * columns + j]);
    let mut basis: Vec<Vec<f64>> = Vec::new();
    for k in 0..rank {
        let mut p: Vec<f64> = (0..rows)
            .map(|i| (0..columns).map(|j| m(i, j) * f64::from(q[k * columns + j])).sum())
            .collect();
        for b in &basis {
            let share: f64 = p.iter().zip(b).map(|(x, y)| x * y).sum();
            p.iter_mut().zip(b).for_each(|(x, y)| *x -= share * y);
        }
        let length = p.iter().map(|x| x * x).sum::<f64>().sqrt();
        basis.push(p.iter().map(|x| x / length).collect());
    }
    let mut decoded = vec![0.0; rows * columns];
    for j in 0..columns {
        for b in &basis {
            let share: f64 = (0..rows).map(|i| b[i] * m(i, j)).sum();
            (0..rows).for_each(|i| decoded[i * columns + j] += share * b[i]);
        }
    }
    decoded.into_iter().map(|x| x as f32).collect()
}

#[test]
fn steps_follow_the_definition() {
    for (shape, rank) in [(&[60, 35][..], 1), (&[24, 5, 3, 3], 2), (&[17, 1100], 5)] {
        let (codec, task) = (PowerSgd::new(rank, Wire::F32), task(shape));
        let Form { rows, columns, .. } = codec.form(shape);
        let (a, b) = (noise(1, rows * columns), noise(2, rows * columns));
        let mean: Vec<f32> = a.iter().zip(&b).map(|(a, b)| (a + b) / 2.0).collect();
        let mut remembered = codec.start(&task);
        for _ in 0..3 {
            let expected = reference(&mean, rows, columns, rank, &remembered);
            let decoded = step(&codec, &task, &[&a, &b], &mut remembered);
            assert!(error(&decoded, &expected) < 1e-5, "{}", error(&decoded, &expected));
        }
    }
}

#[test]
fn matrices_of_the_rank_are_reproduced() {
    for (wire, tolerance) in [(Wire::F32, 1e-4), (Wire::Fp16, 2e-3), (Wire::Bf16, 2e-2)] {
        for rank in [1, 2, 4, 8] {
            let (codec, task) = (PowerSgd::new(rank, wire), task(&[50, 300]));
            let matrix = of_rank(3, 50, 300, rank);
            let mut remembered = codec.start(&task);
            step(&codec, &task, &[&matrix], &mut remembered);
            let decoded = step(&codec, &task, &[&matrix], &mut remembered);
            let error = error(&decoded, &matrix);
            assert!(error < tolerance, "{error} with {wire:?} and rank {rank}");
        }
    }
}

#[test]
fn warm_starts_find_the_largest_directions() {
    let (codec, task) = (PowerSgd::new(2, Wire::F32), task(&[40, 60]));
    let mut matrix = of_rank(4, 40, 60, 2);
    matrix.iter_mut().zip(noise(6, 40 * 60)).for_each(|(x, noise)| *x += noise);
    let mut remembered = codec.start(&task);
    let errors: Vec<f64> =
        (0..5).map(|_| error(&step(&codec, &task, &[&matrix], &mut remembered), &matrix)).collect();
    assert!(errors[4] < 0.9 * errors[0], "{errors:?}");
}

#[test]
fn encodings_can_be_summed() {
    let (codec, task) = (PowerSgd::new(3, Wire::F32), task(&[20, 30]));
    let (a, b) = (noise(8, 600), noise(9, 600));
    let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    for round in 0..2 {
        let given = match round {
            0 => codec.start(&task),
            _ => noise(10, codec.encoded(task.shape, 0)),
        };
        let encode = |values: &[f32]| {
            let mut encoding = vec![f32::NAN; codec.encoded(task.shape, round)];
            codec.encode(round, &task, values, &given, &mut encoding);
            encoding
        };
        let summed: Vec<f32> = encode(&a).iter().zip(encode(&b)).map(|(a, b)| a + b).collect();
        assert!(error(&summed, &encode(&sum)) < 1e-6);
    }
}

#[test]
fn what_is_left_out_is_paid_later() {
    let (codec, task) = (PowerSgd::new(2, Wire::F32), task(&[16, 24]));
    let gradient = noise(11, 16 * 24);
    let mut remembered = codec.start(&task);
    let (mut residual, mut total) = (vec![0.0f32; 16 * 24], vec![0.0f32; 16 * 24]);
    let mut errors = Vec::new();
    for steps in 1..=200 {
        residual.iter_mut().zip(&gradient).for_each(|(owed, g)| *owed += g);
        let owed = residual.clone();
        let decoded = step(&codec, &task, &[&residual], &mut remembered);
        codec.pay(&task, &mut residual, &decoded);
        let together: Vec<f32> = residual.iter().zip(&decoded).map(|(r, d)| r + d).collect();
        assert!(error(&together, &owed) < 1e-6);
        total.iter_mut().zip(&decoded).for_each(|(sum, x)| *sum += x);
        let mean: Vec<f32> = total.iter().map(|x| x / steps as f32).collect();
        errors.push(error(&mean, &gradient));
    }
    // One step keeps a small part of a matrix of full rank; all of them together almost all of it.
    assert!(errors[0] > 0.7 && errors[199] < 0.06, "{} {}", errors[0], errors[199]);
}

#[test]
fn scale_does_not_matter() {
    let (codec, task) = (PowerSgd::new(2, Wire::F32), task(&[30, 40]));
    let matrix = noise(12, 30 * 40);
    for scale in [2f32.powi(-80), 2f32.powi(80)] {
        let scaled: Vec<f32> = matrix.iter().map(|x| x * scale).collect();
        let (mut a, mut b) = (codec.start(&task), codec.start(&task));
        for _ in 0..4 {
            let decoded = step(&codec, &task, &[&matrix], &mut a);
            let expected: Vec<f32> = decoded.iter().map(|x| x * scale).collect();
            assert!(step(&codec, &task, &[&scaled], &mut b) == expected);
        }
    }
}

#[test]
fn lost_directions_are_found_again() {
    let (codec, task) = (PowerSgd::new(2, Wire::F32), task(&[30, 40]));
    let matrix = of_rank(13, 30, 40, 2);
    let not_finite = vec![f32::NAN; 30 * 40];
    for spoiler in [vec![0.0; 30 * 40], of_rank(14, 30, 40, 1), not_finite] {
        let mut remembered = codec.start(&task);
        for _ in 0..3 {
            let decoded = step(&codec, &task, &[&spoiler], &mut remembered);
            assert!(spoiler[0] != 0.0 || decoded.iter().all(|x| *x == 0.0));
        }
        assert!(remembered.iter().all(|x| x.is_finite()));
        step(&codec, &task, &[&matrix], &mut remembered);
        let decoded = step(&codec, &task, &[&matrix], &mut remembered);
        assert!(error(&decoded, &matrix) < 1e-4, "{}", error(&decoded, &matrix));
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    for wire in [Wire::F32, Wire::Fp16, Wire::Bf16] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 777, 1199] {
                let (codec, task) = (PowerSgd::new(2, wire), task(&[30, 40]));
                let (good, mut spoiled) = (noise(15, 30 * 40), noise(16, 30 * 40));
                spoiled[place] = bad;
                let mut remembered = codec.start(&task);
                let decoded = step(&codec, &task, &[&good, &spoiled], &mut remembered);
                assert!(decoded.iter().all(|x| !x.is_finite()), "{bad} at {place}");
            }
        }
    }
    // Too large for a sum of 40 in f32.
    let (codec, task) = (PowerSgd::new(2, Wire::F32), task(&[30, 40]));
    let mut remembered = codec.start(&task);
    let decoded = step(&codec, &task, &[&[3e38; 30 * 40]], &mut remembered);
    assert!(error(&decoded, &[3e38; 30 * 40]) < 1e-4 || decoded.iter().all(|x| !x.is_finite()));
}

#[test]
fn every_form_can_be_encoded() {
    let shapes: [&[usize]; 9] =
        [&[], &[5], &[1, 9], &[9, 1], &[3, 50], &[50, 3], &[0, 5], &[5, 0], &[2, 2, 2]];
    for shape in shapes {
        // The rank is no smaller than the matrix, so nothing is left out.
        let (codec, task) = (PowerSgd::new(4, Wire::F32), task(shape));
        let matrix = noise(17, task.elements());
        let mut remembered = codec.start(&task);
        for _ in 0..3 {
            assert_eq!(remembered.len(), codec.encoded(shape, 1));
            let decoded = step(&codec, &task, &[&matrix], &mut remembered);
            assert!(matrix.is_empty() || error(&decoded, &matrix) < 1e-5, "{shape:?}");
        }
    }
}

#[test]
fn it_suits_matrices_that_become_clearly_smaller() {
    let codec = PowerSgd::new(2, Wire::F32);
    for shape in [&[4096, 4096][..], &[64, 64, 3, 3], &[9, 8], &[1000, 6]] {
        assert!(codec.suits(shape), "{shape:?}");
    }
    for shape in [&[][..], &[4096], &[1, 4096], &[4096, 1], &[7, 8], &[1000, 4], &[0, 0], &[0, 9]] {
        assert!(!codec.suits(shape), "{shape:?}");
    }
    assert_eq!(codec.encoded_bytes(&[4096, 2048]), 2 * (4096 + 2048) * 4);
    assert_eq!(PowerSgd::new(4, Wire::Bf16).encoded_bytes(&[4096, 2048]), 4 * (4096 + 2048) * 2);
}

#[test]
fn start_values_are_random_and_of_length_1() {
    let (codec, task) = (PowerSgd::new(4, Wire::F32), task(&[1000, 1000]));
    let start = codec.start(&task);
    assert_eq!(start, codec.start(&task));
    assert_ne!(start, codec.start(&Task { parameter: 4, ..task }));
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    for (i, a) in start.chunks(1000).enumerate() {
        for (j, b) in start.chunks(1000).enumerate() {
            let tolerance = if i == j { 1e-5 } else { 0.15 };
            assert!((dot(a, b) - f32::from(i == j)).abs() < tolerance, "{i}, {j}");
        }
    }
}
