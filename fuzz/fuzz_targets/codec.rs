//! Every codec, with bytes that no encoder wrote, and with gradients of any bits.
//!
//! A decoder takes what comes from other ranks: it answers with an error or with numbers, whatever
//! the bytes. An encoder takes what a model computed, which may be anything a float can be, and what
//! it writes is always decoded. The first bytes of the input choose the codec and the shape; the rest
//! is the encoding or the gradient.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use unisono_codec::sender::{self, Origin, Scratch, Sender};
use unisono_codec::{Codec, CodecSpec, Gathered, Memory, Passage, RoundTrip, Spans, Task};

/// Every codec, with all that can be chained to it.
const SPECS: &[&str] = &[
    "fp16",
    "bf16",
    "int8",
    "int8:stochastic",
    "int4",
    "int4:stochastic",
    "qsgd:2",
    "qsgd:3",
    "qsgd:4",
    "qsgd:5",
    "qsgd:6",
    "qsgd:7",
    "qsgd:8",
    "sign",
    "topk:1%",
    "topk:10%,exact",
    "topk:50%+fp16",
    "topk:25%,exact+bf16",
    "topk:10%+int8",
    "topk:50%,exact+int4",
    "randk:10%",
    "randk:50%+fp16",
    "randk:1%+bf16",
    "dgc:1%",
    "dgc:25%,momentum=0.9",
    "dgc:50%,momentum=0.5,nesterov,clip=0.1,ramp=8+fp16",
    "dgc:10%,clip=none+bf16",
    "dgc:10%+int8",
    "dgc:50%+int4",
    "powersgd:1",
    "powersgd:2+fp16",
    "powersgd:4+bf16",
    "powersgd:32",
];

static CODECS: LazyLock<Vec<Arc<dyn Codec>>> = LazyLock::new(|| {
    let build = |text: &&str| text.parse::<CodecSpec>().expect("a codec").build();
    SPECS.iter().map(build).collect()
});

fuzz_target!(|input: &[u8]| {
    let [codec, rows, columns, step, bytes @ ..] = input else { return };
    let codec = &CODECS[usize::from(*codec) % CODECS.len()];
    // Beyond a block of any codec, and empty as well.
    let shape = [usize::from(*rows), usize::from(*columns) % 24];
    let task = Task { shape: &shape, parameter: 1, step: u64::from(*step), seed: 7 };
    decode_sent(&**codec, &task, bytes);
    match codec.passage() {
        Passage::Summed(_) => {}
        Passage::Spans(spans) => decode_spans(spans, task.elements(), bytes),
        Passage::Gathered(gathered) => decode_gathered(gathered, task.elements(), bytes),
    }
    let gradient = floats(bytes, task.elements());
    encode(&**codec, task, &gradient);
    encode_owed(codec, task, &gradient);
});

/// Decodes as one receiver does, as they are and with the length that most codecs expect.
fn decode_sent(codec: &dyn Codec, task: &Task, bytes: &[u8]) {
    let (mut decoded, mut scratch) = (vec![0.0; task.elements()], Scratch::default());
    let _ = sender::decode(codec, task, bytes, &mut decoded, &mut scratch);
    let fitting = fitted(bytes, codec.encoded_bytes(task.shape));
    let _ = sender::decode(codec, task, &fitting, &mut decoded, &mut scratch);
}

/// Decodes as they are, and with the length that is expected, which few inputs have.
fn decode_spans(spans: &dyn Spans, elements: usize, bytes: &[u8]) {
    let mut decoded = vec![0.0; elements];
    let expected = spans.bytes(elements);
    let outcome = spans.decode(bytes, &mut decoded);
    assert!(outcome.is_err() || bytes.len() == expected, "a wrong length was accepted");
    let _ = spans.decode(&fitted(bytes, expected), &mut decoded);
}

/// Decodes as they are, and as an encoding of which nothing but some bytes were changed.
fn decode_gathered(gathered: &dyn Gathered, elements: usize, bytes: &[u8]) {
    let mut decoded = vec![0.0; elements];
    let outcome = gathered.decode(bytes, &mut decoded);
    assert!(
        outcome.is_ok() || decoded.iter().all(|value| *value == 0.0),
        "a bad encoding was taken in part"
    );
    let shape = [elements];
    let task = Task { shape: &shape, parameter: 1, step: 3, seed: 7 };
    let residual = (0..elements).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let mut memory = Memory { residual, velocity: vec![0.0; elements] };
    let mut honest = Vec::new();
    gathered.encode(&task, 0, &mut memory, &mut honest);
    for (byte, change) in honest.iter_mut().zip(bytes) {
        *byte ^= change;
    }
    decoded.fill(0.0);
    let _ = gathered.decode(&honest, &mut decoded);
}

/// Whatever the gradient, there and back again.
fn encode(codec: &dyn Codec, task: Task, gradient: &[f32]) {
    let mut trip = RoundTrip::new(codec, task);
    let mut decoded = vec![0.0; gradient.len()];
    for _ in 0..2 {
        trip.encode(&mut gradient.to_vec());
        trip.decode(&mut decoded).expect("what was encoded can be decoded");
    }
}

/// As training does it: from a residual, and over several steps.
fn encode_owed(codec: &Arc<dyn Codec>, task: Task, gradient: &[f32]) {
    let Task { shape, parameter, seed, .. } = task;
    let origin = Origin { shape: shape.to_vec(), parameter, seed, worker: 1, mean_of: 4 };
    for error_feedback in [true, false] {
        let mut sender = Sender::new(codec.clone(), origin.clone(), error_feedback);
        let (mut scratch, mut decoded) = (Scratch::default(), vec![0.0; gradient.len()]);
        for step in task.step..task.step + 3 {
            let mut bytes = Vec::new();
            sender.encode(step, gradient, &mut scratch, &mut bytes);
            sender::decode(&**codec, &origin.task(step), &bytes, &mut decoded, &mut scratch)
                .expect("what was encoded can be decoded");
        }
    }
}

/// Floats of the input's bits, over and over.
fn floats(bytes: &[u8], elements: usize) -> Vec<f32> {
    let mut words = bytes.chunks(4).cycle();
    let word = |word: Option<&[u8]>| {
        let mut bits = [0; 4];
        let word = word.unwrap_or_default();
        bits[..word.len()].copy_from_slice(word);
        f32::from_le_bytes(bits)
    };
    (0..elements).map(|_| word(words.next())).collect()
}

/// As many bytes as asked for, the input's over and over.
fn fitted(bytes: &[u8], length: usize) -> Vec<u8> {
    if bytes.is_empty() {
        vec![0; length]
    } else {
        bytes.iter().copied().cycle().take(length).collect()
    }
}
