//! What every codec of blocks must do, whatever it makes of the values.

use proptest::prelude::*;
use std::ops::Range;
use unisono_codec::bf16::Bf16;
use unisono_codec::fp16::Fp16;
use unisono_codec::int4::Int4;
use unisono_codec::int8::Int8;
use unisono_codec::qsgd::Qsgd;
use unisono_codec::sign::Sign;
use unisono_codec::{BadEncoding, Key, Rounding, Spans};

/// Every codec with each of its settings.
fn codecs() -> Vec<Box<dyn Spans>> {
    let mut codecs: Vec<Box<dyn Spans>> = vec![Box::new(Fp16), Box::new(Bf16), Box::new(Sign)];
    for rounding in [Rounding::Nearest, Rounding::Stochastic] {
        codecs.push(Box::new(Int8::new(rounding)));
        codecs.push(Box::new(Int4::new(rounding)));
    }
    codecs.extend((2..=8).map(|bits| Box::new(Qsgd::new(bits)) as Box<dyn Spans>));
    codecs
}

/// Values of many sizes, which f16 holds, and zeros.
fn values(lengths: Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        4 => -1.0f32..1.0,
        2 => (-14i32..10, -1.0f32..1.0).prop_map(|(e, m)| m * 2.0f32.powi(e)),
        1 => Just(0.0f32),
    ];
    prop::collection::vec(value, lengths)
}

fn encode(codec: &dyn Spans, key: Key, first: usize, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xaa; codec.bytes(values.len())];
    codec.encode(key, first, values, &mut bytes);
    bytes
}

fn decode(codec: &dyn Spans, bytes: &[u8], elements: usize) -> Result<Vec<f32>, BadEncoding> {
    let mut values = vec![777.0; elements];
    codec.decode(bytes, &mut values).map(|()| values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_decoded_and_what_is_owed_is_what_there_was(
        values in values(0..5000), seed: u64, block in 0..1000usize
    ) {
        for codec in codecs() {
            let (key, first) = (Key::new(seed), block * codec.block());
            let bytes = encode(&*codec, key, first, &values);
            let decoded = decode(&*codec, &bytes, values.len()).unwrap();

            let mut owed = values.clone();
            let mut bytes_owed = vec![0x55; bytes.len()];
            codec.encode_owed(key, first, &mut owed, &mut bytes_owed);
            prop_assert_eq!(&bytes, &bytes_owed, "{:?}", codec);
            for ((value, decoded), owed) in values.iter().zip(decoded).zip(owed) {
                prop_assert_eq!(owed, value - decoded, "{:?}", codec);
            }
        }
    }

    /// In one pass or in two.
    #[test]
    fn what_is_fed_is_added_first_and_what_is_decoded_may_be_added(
        fed in values(0..5000), seed: u64, block in 0..1000usize
    ) {
        for codec in codecs() {
            let (key, first) = (Key::new(seed), block * codec.block());
            let mut owed: Vec<f32> = fed.iter().rev().map(|v| v * 0.7 - 0.01).collect();
            let mut expected: Vec<f32> = owed.iter().zip(&fed).map(|(owed, fed)| owed + fed).collect();
            let mut bytes = vec![0xaa; codec.bytes(fed.len())];
            let mut expected_bytes = vec![0x55; bytes.len()];
            codec.encode_fed(key, first, &fed, &mut owed, &mut bytes);
            codec.encode_owed(key, first, &mut expected, &mut expected_bytes);
            prop_assert_eq!(&bytes, &expected_bytes, "{:?}", codec);
            prop_assert_eq!(&owed, &expected, "{:?}", codec);

            let decoded = decode(&*codec, &bytes, fed.len()).unwrap();
            let mut sum = fed.clone();
            codec.decode_add(&bytes, &mut sum).unwrap();
            for ((sum, fed), decoded) in sum.iter().zip(&fed).zip(decoded) {
                prop_assert_eq!(*sum, fed + decoded, "{:?}", codec);
            }
        }
    }

    #[test]
    fn a_run_of_blocks_has_the_same_bytes_alone(
        values in values(1..9000), seed: u64, ends in (0.0f64..1.0, 0.0f64..1.0)
    ) {
        for codec in codecs() {
            let key = Key::new(seed);
            let whole = encode(&*codec, key, 0, &values);
            let blocks = values.len().div_ceil(codec.block());
            let at = |end: f64| (end * (blocks + 1) as f64) as usize * codec.block();
            let from = at(ends.0.min(ends.1)).min(values.len());
            let to = at(ends.0.max(ends.1)).min(values.len());

            let part = encode(&*codec, key, from, &values[from..to]);
            let within = codec.bytes(from)..codec.bytes(to);
            prop_assert_eq!(&part, &whole[within], "{:?}", codec);
            let decoded = decode(&*codec, &part, to - from).unwrap();
            prop_assert_eq!(&decoded, &decode(&*codec, &whole, values.len()).unwrap()[from..to]);
        }
    }

    #[test]
    fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..3000), elements in 0..9000usize) {
        for codec in codecs() {
            let expected = codec.bytes(elements);
            let decoded = decode(&*codec, &bytes, elements);
            prop_assert!(decoded.is_err() || bytes.len() == expected, "{:?}", codec);
            let added = codec.decode_add(&bytes, &mut vec![0.0; elements]);
            prop_assert_eq!(added.is_err(), decoded.is_err(), "{:?}", codec);
            // And of the right length, whether they are refused or not.
            let fitting: Vec<u8> = bytes.iter().chain(&[0x3c]).copied().cycle().take(expected).collect();
            let _ = decode(&*codec, &fitting, elements);
        }
    }

    #[test]
    fn other_lengths_are_refused(values in values(1..3000), cut in 1..5usize) {
        for codec in codecs() {
            let bytes = encode(&*codec, Key::new(0), 0, &values);
            let shorter = &bytes[..bytes.len() - cut.min(bytes.len())];
            let longer = [&bytes[..], &vec![0; cut]].concat();
            for wrong in [shorter, &longer] {
                let error = decode(&*codec, wrong, values.len()).unwrap_err();
                let is_length = matches!(error, BadEncoding::Length { expected, found, .. }
                    if expected == bytes.len() && found == wrong.len());
                prop_assert!(is_length, "{:?}: {:?}", codec, error);
            }
        }
    }
}

/// Long runs are asked for ahead, and what is decoded of them is written past the caches, wherever lines begin.
#[test]
fn long_runs_are_like_their_blocks() {
    const LONG: usize = (16 << 20) / 4 + 3 * 2048 + 77;
    let values: Vec<f32> =
        (0..LONG).map(|i| ((i * 7919 % 10_007) as f32 - 5000.0) * 1e-4).collect();
    let codecs: [&dyn Spans; 3] = [&Int8::default(), &Int4::default(), &Sign];
    for codec in codecs {
        let key = Key::new(5);
        let (mut bytes, mut pieces) = (vec![0; codec.bytes(LONG)], vec![0; codec.bytes(LONG)]);
        let (mut owed, mut owed_pieces) = (values.clone(), values.clone());
        codec.encode_fed(key, 0, &values, &mut owed, &mut bytes);
        for start in (0..LONG).step_by(4096) {
            let at = start..(start + 4096).min(LONG);
            let into = &mut pieces[codec.bytes(at.start)..codec.bytes(at.end)];
            codec.encode_fed(key, start, &values[at.clone()], &mut owed_pieces[at], into);
        }
        assert!(bytes == pieces && owed == owed_pieces, "{codec:?}");
        for offset in [0, 1, 4, 15] {
            let mut memory = vec![777.0; LONG + 32];
            codec.decode(&bytes, &mut memory[offset..offset + LONG]).unwrap();
            for start in (0..LONG).step_by(4096) {
                let at = start..(start + 4096).min(LONG);
                let piece = &bytes[codec.bytes(at.start)..codec.bytes(at.end)];
                let decoded = decode(codec, piece, at.len()).unwrap();
                assert!(memory[offset..][at] == decoded, "{codec:?} from {offset}: {start}");
            }
            let outside = memory[..offset].iter().chain(&memory[offset + LONG..]);
            assert!(outside.copied().all(|value| value == 777.0), "{codec:?} from {offset}");
        }
    }
}

/// What is encoded of long runs is written past the caches, too, wherever lines begin.
#[test]
fn long_encodings_are_like_their_pieces() {
    const LONG: usize = (16 << 20) + 3 * 2048 + 77;
    let values: Vec<f32> =
        (0..LONG).map(|i| ((i * 7919 % 10_007) as f32 - 5000.0) * 1e-4).collect();
    let (codec, key) = (Int8::default(), Key::new(5));
    let mut pieces = vec![0; codec.bytes(LONG)];
    for start in (0..LONG).step_by(4096) {
        let at = start..(start + 4096).min(LONG);
        let into = &mut pieces[codec.bytes(at.start)..codec.bytes(at.end)];
        codec.encode(key, start, &values[at], into);
    }
    for offset in [0, 13] {
        let mut memory = vec![7; pieces.len() + 32];
        codec.encode(key, 0, &values, &mut memory[offset..offset + pieces.len()]);
        assert!(memory[offset..][..pieces.len()] == pieces, "from {offset}");
        let outside = memory[..offset].iter().chain(&memory[offset + pieces.len()..]);
        assert!(outside.copied().all(|byte| byte == 7), "from {offset}");
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    for codec in codecs() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (length, place) in [(1, 0), (5000, 0), (5000, 2500), (5000, 4999)] {
                let mut values = vec![0.5; length];
                values[place] = bad;
                let bytes = encode(&*codec, Key::new(3), 0, &values);
                let decoded = decode(&*codec, &bytes, length).unwrap();
                assert!(!decoded[place].is_finite(), "{codec:?}: {bad} became {}", decoded[place]);
                // It spoils its own block and no other.
                let block = place / codec.block() * codec.block();
                let others =
                    decoded[..block].iter().chain(decoded.iter().skip(block + codec.block()));
                assert!(others.copied().all(f32::is_finite), "{codec:?}");

                let mut owed = values.clone();
                let mut again = vec![0; bytes.len()];
                codec.encode_owed(Key::new(3), 0, &mut owed, &mut again);
                assert_eq!(bytes, again, "{codec:?}");
                assert!(!owed[place].is_finite(), "{codec:?}");
            }
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for codec in codecs() {
        for length in [0, 1, 7, 8, 9, 4096, 4097] {
            let bytes = encode(&*codec, Key::new(4), 0, &vec![0.0; length]);
            assert_eq!(decode(&*codec, &bytes, length).unwrap(), vec![0.0; length], "{codec:?}");
        }
    }
}

#[test]
fn tiny_and_huge_values_stay_as_finite_as_they_were() {
    let tiny = [f32::from_bits(1), f32::MIN_POSITIVE, 1e-40, 1e-36, 1e-30];
    for codec in codecs() {
        for size in tiny.into_iter().chain([1e30, 1e38, f32::MAX]) {
            // 16-bit floats overflow: f16 early, and bf16 where it rounds the largest number up.
            if codec.bytes(1024) == 2048 && size > 1.0 {
                continue;
            }
            for length in [1, 3, 2048, 2500, 5000] {
                let values: Vec<f32> =
                    (0..length).map(|i| if i % 3 == 0 { -size } else { size }).collect();
                let bytes = encode(&*codec, Key::new(5), 0, &values);
                let decoded = decode(&*codec, &bytes, length).unwrap();
                for (value, decoded) in values.iter().zip(&decoded) {
                    let far = (value - decoded).abs() > size;
                    assert!(decoded.is_finite() && !far, "{codec:?}: {value:e} is {decoded:e}");
                }
            }
        }
    }
}
