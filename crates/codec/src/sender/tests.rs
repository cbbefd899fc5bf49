use proptest::prelude::*;

use super::*;
use crate::CodecSpec;

/// Every codec with each kind of setting.
const SPECS: &[&str] = &[
    "fp16",
    "bf16",
    "int8",
    "int8:stochastic",
    "int4",
    "int4:stochastic",
    "qsgd:2",
    "qsgd:3",
    "qsgd:8",
    "sign",
    "topk:5%",
    "topk:5%,exact",
    "topk:25%,exact+bf16",
    "topk:5%+int8",
    "topk:50%,exact+int4",
    "randk:10%",
    "randk:50%+fp16",
    "randk:10%+bf16",
    "dgc:2%",
    "dgc:2%,momentum=0.9",
    "dgc:2%,ramp=5+fp16",
    "dgc:50%,momentum=0.5,nesterov,clip=0.1,ramp=8+int4",
    "powersgd:1",
    "powersgd:2",
    "powersgd:4+bf16",
    "powersgd:2+fp16",
];

const SHAPE: [usize; 2] = [40, 70];

fn codec(spec: &str) -> Arc<dyn Codec> {
    spec.parse::<CodecSpec>().unwrap().build()
}

fn origin(shape: &[usize], worker: usize) -> Origin {
    Origin { shape: shape.to_vec(), parameter: 3, seed: 11, worker, mean_of: 1 }
}

/// Values of a few sizes, which all codecs can hold.
fn gradient(step: u64, elements: usize) -> Vec<f32> {
    let key = Key::new(77).with(step);
    let value = |i: u64| (key.at(i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..elements as u64).map(|i| value(i) * [1.0, 0.1, 3.0][i as usize % 3]).collect()
}

fn encode(sender: &mut Sender, step: u64, gradient: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    sender.encode(step, gradient, &mut Scratch::default(), &mut bytes);
    bytes
}

fn decoded(codec: &dyn Codec, task: &Task, bytes: &[u8]) -> Result<Vec<f32>, BadEncoding> {
    let mut into = vec![777.0; task.elements()];
    decode(codec, task, bytes, &mut into, &mut Scratch::default()).map(|()| into)
}

/// What is going to be encoded: the gradient and what is owed.
fn due(sender: &Sender, step: u64, gradient: &[f32]) -> Vec<f32> {
    let mut memory = sender.memory.clone();
    match sender.codec.passage() {
        Passage::Gathered(gathered) => {
            gathered.absorb(&sender.origin.task(step), 1, gradient, &mut memory);
            memory.residual
        }
        _ => gradient.iter().zip(&memory.residual).map(|(g, owed)| owed + g).collect(),
    }
}

#[test]
fn what_is_decoded_and_what_is_owed_is_what_was_due() {
    let mut biased = 0;
    for spec in SPECS {
        let codec = codec(spec);
        let mut sender = Sender::new(codec.clone(), origin(&SHAPE, 2), true);
        for step in 0..12 {
            let gradient = gradient(step, 2800);
            let due = due(&sender, step, &gradient);
            let bytes = encode(&mut sender, step, &gradient);
            let decoded = decoded(&*codec, &sender.origin.task(step), &bytes).unwrap();
            if !codec.is_biased() {
                assert!(sender.owed().is_empty());
                continue;
            }
            biased += 1;
            for (i, due) in due.iter().enumerate() {
                assert_eq!(sender.owed()[i], due - decoded[i], "{spec}, step {step}, element {i}");
            }
        }
    }
    assert!(biased > 0);
}

#[test]
fn gradients_arrive_in_full_up_to_what_is_owed() {
    let steps = 300;
    // Whose momentum, or clipping, makes more or less of gradients.
    let others = |spec: &&&str| !spec.contains("momentum");
    for spec in SPECS.iter().filter(others) {
        let codec = codec(spec);
        let mut sender = Sender::new(codec.clone(), origin(&SHAPE, 0), true);
        let (mut given, mut arrived) = (vec![0f64; 2800], vec![0f64; 2800]);
        let mut squares = 0.0;
        for step in 0..steps {
            // A steady part, which must not get lost, and one that changes.
            let mut gradient = gradient(step, 2800);
            gradient.iter_mut().enumerate().for_each(|(i, g)| *g += (i % 7) as f32 * 0.01);
            let bytes = encode(&mut sender, step, &gradient);
            let decoded = decoded(&*codec, &sender.origin.task(step), &bytes).unwrap();
            given.iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += f64::from(*g));
            let errors = gradient.iter().zip(&decoded).map(|(g, d)| f64::from(g - d));
            squares += errors.map(|error| error * error).sum::<f64>();
            arrived.iter_mut().zip(&decoded).for_each(|(sum, d)| *sum += f64::from(*d));
        }
        if codec.is_biased() {
            for i in 0..2800 {
                let error = given[i] - arrived[i] - f64::from(sender.owed()[i]);
                assert!(error.abs() < 1e-2, "{spec}: element {i} is off by {error}");
            }
        } else {
            // Right on average: errors that cancel out sum up to the root of the sum of their squares.
            let sum: f64 = given.iter().zip(&arrived).map(|(g, a)| g - a).sum();
            assert!(sum.abs() < 5.0 * squares.sqrt(), "{spec}: off by {sum} in all, {squares}");
        }
    }
}

#[test]
fn without_feedback_every_step_is_on_its_own() {
    for spec in SPECS.iter().filter(|spec| !spec.contains("momentum")) {
        let codec = codec(spec);
        let mut sender = Sender::new(codec.clone(), origin(&SHAPE, 0), false);
        let mut bytes = |step| encode(&mut sender, step, &gradient(step, 2800));
        let first = bytes(20);
        bytes(21);
        let again = bytes(20);
        // The basis of powersgd goes on from step to step; nothing else does.
        assert_eq!(first == again, !spec.starts_with("powersgd"), "{spec}");
        assert!(sender.owed().is_empty());
    }
}

#[test]
fn the_same_gradients_give_the_same_bytes() {
    for spec in SPECS {
        let codec = codec(spec);
        let mut senders =
            [0; 2].map(|worker| Sender::new(codec.clone(), origin(&SHAPE, worker), true));
        // Scratch and bytes of other parameters do not matter.
        let mut scratch = Scratch::default();
        let mut other = Sender::new(codec.clone(), origin(&[9, 300], 1), true);
        for step in 0..5 {
            let gradient = gradient(step, 2800);
            let alone = encode(&mut senders[0], step, &gradient);
            let mut bytes = b"before".to_vec();
            other.encode(step, &vec![0.5; 2700], &mut scratch, &mut Vec::new());
            senders[1].encode(step, &gradient, &mut scratch, &mut bytes);
            assert_eq!(&bytes[..6], b"before");
            assert_eq!(alone, &bytes[6..], "{spec}");

            let task = senders[0].origin.task(step);
            let mut values = vec![777.0; 2800];
            decode(&*codec, &task, &alone, &mut values, &mut scratch).unwrap();
            assert_eq!(values, decoded(&*codec, &task, &alone).unwrap(), "{spec}");
        }
    }
}

#[test]
fn workers_round_by_chances_of_their_own() {
    for (spec, differ) in [("int8:stochastic", true), ("qsgd:3", true), ("int8", false)] {
        let encode = |worker| {
            let mut sender = Sender::new(codec(spec), origin(&SHAPE, worker), true);
            encode(&mut sender, 0, &gradient(0, 2800))
        };
        assert_eq!(encode(0) != encode(1), differ, "{spec}");
    }
}

#[test]
fn encodings_are_as_small_as_the_codec_says() {
    for spec in SPECS.iter().filter(|spec| !spec.contains("ramp")) {
        let codec = codec(spec);
        let mut sender = Sender::new(codec.clone(), origin(&[100, 200], 0), true);
        let bytes = encode(&mut sender, 0, &gradient(0, 20_000)).len() as f64;
        let promised = codec.encoded_bytes(&[100, 200]) as f64;
        match codec.passage() {
            // About as many elements as asked for.
            Passage::Gathered(_) => {
                assert!((0.7..1.4).contains(&(bytes / promised)), "{spec}: {bytes}, {promised}")
            }
            _ => assert_eq!(bytes, promised, "{spec}"),
        }
    }
}

#[test]
fn other_lengths_are_refused() {
    for spec in SPECS {
        let codec = codec(spec);
        let mut sender = Sender::new(codec.clone(), origin(&[8, 12], 0), true);
        let bytes = encode(&mut sender, 0, &gradient(0, 96));
        let task = sender.origin.task(0);
        for length in 0..bytes.len() {
            assert!(decoded(&*codec, &task, &bytes[..length]).is_err(), "{spec}: {length}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(decoded(&*codec, &task, &longer).is_err(), "{spec}");
        assert!(decoded(&*codec, &task, &bytes).is_ok(), "{spec}");
    }
}

#[test]
fn parameters_without_elements_travel() {
    for spec in SPECS {
        for shape in [[0, 5], [5, 0]] {
            let codec = codec(spec);
            let mut sender = Sender::new(codec.clone(), origin(&shape, 0), true);
            let bytes = encode(&mut sender, 0, &[]);
            assert_eq!(decoded(&*codec, &sender.origin.task(0), &bytes), Ok(Vec::new()), "{spec}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_bytes_do_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..2000), rows in 0..40usize, columns in 0..30usize
    ) {
        let shape = [rows, columns];
        for spec in SPECS {
            let codec = codec(spec);
            let mut sender = Sender::new(codec.clone(), origin(&shape, 0), true);
            let mut honest = encode(&mut sender, 1, &gradient(1, rows * columns));
            let task = sender.origin.task(1);
            let _ = decoded(&*codec, &task, &bytes);
            // And where the length is right.
            honest.iter_mut().zip(&bytes).for_each(|(honest, change)| *honest ^= change);
            let _ = decoded(&*codec, &task, &honest);
        }
    }

    #[test]
    fn no_gradient_does_harm(bits in prop::collection::vec(any::<u32>(), 300..301)) {
        let gradient: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        for spec in SPECS {
            let codec = codec(spec);
            let mut sender = Sender::new(codec.clone(), origin(&[20, 15], 0), true);
            for step in 0..3 {
                let bytes = encode(&mut sender, step, &gradient);
                prop_assert!(decoded(&*codec, &sender.origin.task(step), &bytes).is_ok(), "{}", spec);
            }
        }
    }
}
