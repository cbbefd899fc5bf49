use super::decode::{decode_add_blocks, decode_blocks};
use super::encode::{encode_blocks, encode_owed_blocks, scale};
use super::*;
use crate::BadEncoding;
use crate::Spans;
use crate::int4::Int4;
use crate::int8::Int8;
use crate::qsgd::Qsgd;
use proptest::prelude::*;

/// What is decoded of what was encoded.
pub fn there_and_back(codec: &dyn Spans, key: Key, values: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; codec.bytes(values.len())];
    codec.encode(key, 0, values, &mut bytes);
    let mut decoded = vec![0.0; values.len()];
    codec.decode(&bytes, &mut decoded).expect("bytes from the encoder");
    decoded
}

/// Asserts that nothing is farther away than some times the distance between the levels of
/// its block.
pub fn assert_near(codec: &dyn Spans, levels: u32, distances: f32, key: Key, values: &[f32]) {
    let decoded = there_and_back(codec, key, values);
    let blocks = values.chunks(codec.block()).zip(decoded.chunks(codec.block()));
    for (values, decoded) in blocks {
        let peak = values.iter().fold(0.0f32, |peak, v| peak.max(v.abs()));
        // The scale is rounded up to 8 bits, and all else to 24.
        let bound = peak / levels as f32 * distances * (1.0 + 1.0 / 128.0) + FLOOR;
        for (value, decoded) in values.iter().zip(decoded) {
            assert!((value - decoded).abs() <= bound, "{value:e} became {decoded:e}");
        }
    }
}

/// Asserts that the mean of what is decoded is what was encoded.
pub fn assert_right_on_average(codec: &dyn Spans) {
    const ROUNDS: u32 = 4000;
    let values: Vec<f32> = (-300..=300).map(|i| i as f32 / 300.0).collect();
    let mut sums = vec![0.0f64; values.len()];
    let mut squares = vec![0.0f64; values.len()];
    for round in 0..ROUNDS {
        let key = Key::new(1).with(u64::from(round));
        let decoded = there_and_back(codec, key, &values);
        for ((value, decoded), (sum, square)) in
            values.iter().zip(decoded).zip(sums.iter_mut().zip(&mut squares))
        {
            let error = f64::from(decoded - value);
            *sum += error;
            *square += error * error;
        }
    }
    let rounds = f64::from(ROUNDS);
    for ((value, sum), square) in values.iter().zip(&sums).zip(&squares) {
        // Of 600 means, none should be six standard deviations away.
        let deviation = (square / rounds / rounds).sqrt();
        let mean = sum / rounds;
        assert!(mean.abs() <= 6.0 * deviation + 1e-6, "{value} has an error of {mean}");
    }
    // Nor their mean: neighbours have dithers of their own.
    let all = sums.iter().sum::<f64>() / rounds / values.len() as f64;
    let deviation = squares.iter().sum::<f64>().sqrt() / rounds / values.len() as f64;
    assert!(all.abs() <= 6.0 * deviation, "the mean error is {all}, {deviation} expected");
}

/// Asserts that the loops for this CPU's instruction sets do what those for any CPU do.
fn assert_alike<Q: Quantizer>(quantizer: Q, dither: Option<Key>, first: usize, values: &[f32]) {
    let mut bytes = vec![0; super::bytes(quantizer, values.len())];
    let mut bytes_anywhere = bytes.clone();
    encode(quantizer, dither, first, values, &mut bytes);
    encode_blocks(quantizer, dither, first, values, &mut bytes_anywhere);
    assert_eq!(bytes, bytes_anywhere);

    let (mut owed, mut owed_anywhere) = (values.to_vec(), values.to_vec());
    encode_owed(quantizer, dither, first, None, &mut owed, &mut bytes);
    encode_owed_blocks(quantizer, dither, first, None, &mut owed_anywhere, &mut bytes_anywhere);
    assert_eq!(bytes, bytes_anywhere);
    let finite = values.iter().all(|value| value.is_finite());
    assert!(owed == owed_anywhere || !finite);

    let (mut decoded, mut decoded_anywhere) = (owed.clone(), owed);
    decode(quantizer, &bytes, &mut decoded).unwrap();
    decode_blocks(quantizer, &bytes, &mut decoded_anywhere).unwrap();
    assert!(decoded == decoded_anywhere || !finite);
    decode_add(quantizer, &bytes, &mut decoded).unwrap();
    decode_add_blocks(quantizer, &bytes, &mut decoded_anywhere).unwrap();
    assert!(decoded == decoded_anywhere || !finite);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_instruction_sets_do_the_same(
        bits in prop::collection::vec(any::<u32>(), 0..1500), seed: u64, bits_of_qsgd in 2..=8u32
    ) {
        let key = Some(Key::new(seed));
        let wild: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        let tame: Vec<f32> = bits.iter().map(|&bits| bits as i32 as f32).collect();
        for values in [&wild, &tame] {
            assert_alike(Int8::default(), None, 0, values);
            assert_alike(Int8::default(), key, 512, values);
            assert_alike(Int4::default(), None, 0, values);
            assert_alike(Int4::default(), key, 512, values);
            assert_alike(Qsgd::new(bits_of_qsgd), key, 512, values);
        }
    }
}

#[test]
fn scales_are_rounded_up_and_finite_to_the_last_level() {
    for levels in [1, 3, 7, 15, 31, 63, 127] {
        for peak in [FLOOR, 1e-20, 0.3, 1.0, 1e20, 1e38, f32::MAX] {
            let scale = scale(levels, peak);
            let last = scale * f32::from(levels);
            assert!(last.is_finite());
            assert_eq!(scale.to_bits() & 0xffff, 0, "a bf16");
            // Beyond the largest scale, the last level is the nearest to the peak.
            let short = if peak == f32::MAX { scale / 2.0 } else { 0.0 };
            assert!(last >= peak * 0.999_999 - short && last <= peak * 1.01, "{levels} {peak}");
        }
        assert_eq!(scale(levels, FLOOR / 2.0), 0.0);
        assert!(scale(levels, f32::INFINITY).is_nan() && scale(levels, f32::NAN).is_nan());
    }
}

#[test]
fn dithers_are_even() {
    // Over places, blocks and bits alike: a chi-squared test in 64 cells.
    const COUNT: usize = 1 << 16;
    let of_place = |i: usize| dither_at(0x0123_4567_89ab_cdef, i as u32);
    let of_block = |i: usize| dither_at(Key::new(7).at(512 * i as u64), 3);
    for dithers in [&of_place as &dyn Fn(usize) -> f32, &of_block] {
        let mut cells = [0u32; 64];
        for dither in (0..COUNT).map(dithers) {
            assert!((-0.5..=0.5).contains(&dither));
            cells[(((dither + 0.5) * 64.0) as usize).min(63)] += 1;
        }
        let expected = COUNT as f64 / 64.0;
        let chi: f64 = cells.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        // 63 degrees of freedom; more than 140 happens once in ten million times.
        assert!((20.0..140.0).contains(&chi), "{chi}: {cells:?}");
    }
}

#[test]
fn what_no_encoder_writes_is_refused() {
    fn field(result: Result<(), BadEncoding>) -> &'static str {
        match result {
            Err(BadEncoding::Field { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }
    fn check<Q: Quantizer>(quantizer: Q) {
        let mut into = [0.0; 3];
        let mut good = vec![0; bytes(quantizer, 3)];
        encode(quantizer, None, 0, &[1.0, -2.0, 0.5], &mut good);
        assert_eq!(decode(quantizer, &good, &mut into), Ok(()));
        // Negative, infinite, another NaN, larger than any.
        let larger = (largest_scale(quantizer.levels()) >> 16) as u16 + 1;
        for scale in [0x8000, 0x7f80, 0x7fff, larger] {
            let mut bad = good.clone();
            bad[..SCALE].copy_from_slice(&scale.to_le_bytes());
            assert_eq!(field(decode(quantizer, &bad, &mut into)), "scale");
        }
        let mut bad = good;
        bad[SCALE..].fill(0xff);
        assert_eq!(field(decode(quantizer, &bad, &mut into)), "code");
    }
    check(Int8::default());
    check(Int4::default());
    (2..=8).for_each(|bits| check(Qsgd::new(bits)));
}
