//! Codecs on any device, against the host's, byte by byte.

use unisono_codec::sender::{Origin, Scratch};
use unisono_codec::spec::Values;
use unisono_codec::{BadEncoding, CodecSpec, Key, Passage, Sender, Spans, sender};
use unisono_cuda::{CodecError, Codecs, Context, DeviceCodec, DeviceMemory, Placement, Stream};

/// A device with memory to encode in.
pub struct Bench {
    codecs: Codecs,
    stream: Stream,
    shift: usize,
}

/// Bytes before and after each buffer that no kernel may touch.
const FENCE: usize = 64;
const MARK: u8 = 0xd7;

/// A buffer on the device, which begins so many bytes after a multiple of 256.
pub struct Buffer {
    memory: DeviceMemory,
    start: usize,
    bytes: usize,
}

impl Bench {
    /// Buffers begin `shift` bytes after a multiple of 16.
    pub fn new(context: &Context, shift: usize) -> Bench {
        let codecs = Codecs::load(context).unwrap();
        Bench { codecs, stream: Stream::new(context, 0).unwrap(), shift }
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let start = FENCE + self.shift;
        let memory = DeviceMemory::new(self.codecs.context(), start + bytes.len() + FENCE).unwrap();
        let mut all = vec![MARK; start + bytes.len() + FENCE];
        all[start..start + bytes.len()].copy_from_slice(bytes);
        // SAFETY: the memory has as many bytes, and the copy is waited for.
        unsafe { self.stream.copy_to_device(memory.pointer(), all.as_ptr(), all.len()).unwrap() };
        self.stream.synchronize().unwrap();
        Buffer { memory, start, bytes: bytes.len() }
    }

    fn floats(&self, values: &[f32]) -> Buffer {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.buffer(&bytes)
    }

    /// What is in a buffer; what is around it must be as it was.
    fn read(&self, buffer: &Buffer) -> Vec<u8> {
        let mut all = vec![0; buffer.start + buffer.bytes + FENCE];
        // SAFETY: the memory has as many bytes, and the copy is waited for.
        unsafe {
            let from = buffer.memory.pointer();
            self.stream.copy_to_host(all.as_mut_ptr(), from, all.len()).unwrap();
        }
        self.stream.synchronize().unwrap();
        let around = all[..buffer.start].iter().chain(&all[buffer.start + buffer.bytes..]);
        assert!(around.into_iter().all(|&byte| byte == MARK), "a kernel wrote beside its buffer");
        all[buffer.start..buffer.start + buffer.bytes].to_vec()
    }

    fn read_floats(&self, buffer: &Buffer) -> Vec<f32> {
        self.read(buffer).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// Several steps of one parameter, with and without error feedback: encodings, residuals, and what is
    /// decoded are the host's.
    pub fn check(&self, spec: &CodecSpec, shape: &[usize], kind: Kind) {
        for feedback in [false, true] {
            self.check_steps(spec, shape, kind, feedback);
        }
    }

    fn check_steps(&self, spec: &CodecSpec, shape: &[usize], kind: Kind, feedback: bool) {
        let host = spec.build();
        if feedback && !host.is_biased() {
            return;
        }
        let n = unisono_codec::elements(shape);
        let what = format!("{spec} of {shape:?}, {kind:?}, feedback {feedback}");
        let origin =
            Origin { shape: shape.to_vec(), parameter: 3, seed: 42, worker: 1, mean_of: 1 };
        let mut sender = Sender::new(host.clone(), origin.clone(), feedback);
        let mut scratch = Scratch::default();
        let mut codec = DeviceCodec::new(&self.codecs, spec, shape).unwrap();
        let residual = self.floats(&vec![0.0; n]);
        for step in 0..3 {
            // Which NaN is owed is not specified, and what these codecs send shows it.
            let shows_nan = matches!(spec, CodecSpec::Sign | CodecSpec::RandK(..));
            if feedback && shows_nan && sender.owed().iter().any(|owed| owed.is_nan()) {
                break;
            }
            let gradient: Vec<f32> = (0..n).map(|i| kind.element(step, i)).collect();
            let mut expected = Vec::new();
            sender.encode(step, &gradient, &mut scratch, &mut expected);

            let task = origin.task(step);
            let on_device = self.floats(&gradient);
            let encoding = self.buffer(&vec![0xee; codec.most_bytes()]);
            let owed = feedback.then(|| residual.pointer());
            // SAFETY: the buffers have as many elements as the shape, and bytes as an encoding.
            unsafe {
                let (from, into) = (on_device.pointer(), encoding.pointer());
                codec.encode(&self.stream, &task, 1, from, owed, into).unwrap();
            }
            let length = codec.length(&self.stream).unwrap();
            let found = self.read(&encoding);
            assert_eq!(length, expected.len(), "the length of {what}, step {step}");
            let (found, as_expected) = (&found[..length], &expected[..]);
            let [found, as_expected] = [found, as_expected].map(|bytes| with_one_nan(spec, bytes));
            assert_bytes(&found, &as_expected, &format!("{what}, step {step}"));
            assert_floats(&self.read_floats(&on_device), &gradient, &what);
            if feedback {
                let owed = self.read_floats(&residual);
                assert_floats(&owed, sender.owed(), &format!("residual of {what}, step {step}"));
            }

            let mut decoded = vec![0.0; n];
            sender::decode(&*host, &task, &expected, &mut decoded, &mut scratch).unwrap();
            let encoding = self.buffer(&expected);
            for placement in [Placement::Overwrite, Placement::Add] {
                let into = self.floats(&gradient);
                // SAFETY: as above.
                unsafe {
                    let (from, into) = (encoding.pointer(), into.pointer());
                    let length = expected.len();
                    codec.decode(&self.stream, &task, from, length, into, placement).unwrap();
                }
                codec.check(&self.stream).unwrap();
                let mut expected = decoded.clone();
                if placement == Placement::Add {
                    let sums = expected.iter_mut().zip(&gradient);
                    sums.for_each(|(sum, g)| *sum += g);
                }
                let mut found = self.read_floats(&into);
                if placement == Placement::Add && is_sparse(spec) {
                    // What the encoding does not hold is not touched, and may be a negative zero.
                    found.iter_mut().for_each(|value| *value += 0.0);
                    expected.iter_mut().for_each(|value| *value += 0.0);
                }
                assert_floats(&found, &expected, &format!("decoded {placement:?}, {what}"));
            }
        }
    }

    /// A run of blocks from the middle, with a residual whatever the codec: what [`Spans`] does.
    pub fn check_spans(&self, spec: &CodecSpec, spans: &dyn Spans, kind: Kind) {
        let n = 3 * spans.block() + spans.block() / 3;
        let (key, first) = (Key::new(9).with(4), 5 * spans.block());
        let codec = DeviceCodec::new(&self.codecs, spec, &[100 * n]).unwrap();
        let gradient: Vec<f32> = (0..n).map(|i| kind.element(0, i)).collect();
        let mut owed: Vec<f32> = (0..n).map(|i| kind.element(1, i)).collect();
        let (from, residual) = (self.floats(&gradient), self.floats(&owed));
        let encoding = self.buffer(&vec![0xee; spans.bytes(n)]);
        // SAFETY: the buffers have as many elements, and bytes as an encoding.
        unsafe {
            let (from, residual, into) = (from.pointer(), residual.pointer(), encoding.pointer());
            let spans = codec.encode_span(&self.stream, key, first, n, from, Some(residual), into);
            spans.unwrap();
        }
        owed.iter_mut().zip(&gradient).for_each(|(owed, g)| *owed += g);
        let mut bytes = vec![0; spans.bytes(n)];
        spans.encode_owed(key, first, &mut owed, &mut bytes);
        let what = format!("a span of {spec}, {kind:?}");
        assert_bytes(&self.read(&encoding), &bytes, &what);
        assert_floats(&self.read_floats(&residual), &owed, &what);
    }

    /// Damaged bytes: the device finds what the host finds, and touches nothing else.
    pub fn check_damage(&self, spec: &CodecSpec, n: usize, places: &[usize], byte: u8) {
        let host = spec.build();
        let origin = Origin { shape: vec![n], parameter: 0, seed: 1, worker: 0, mean_of: 1 };
        let (mut scratch, mut bytes) = (Scratch::default(), Vec::new());
        let gradient: Vec<f32> = (0..n).map(|i| Kind::Normal.element(0, i)).collect();
        Sender::new(host.clone(), origin.clone(), false).encode(
            0,
            &gradient,
            &mut scratch,
            &mut bytes,
        );
        for &at in places {
            bytes.get_mut(at).into_iter().for_each(|damaged| *damaged = byte);
        }
        let task = origin.task(0);
        let mut into = vec![0.0; n];
        let expected = sender::decode(&*host, &task, &bytes, &mut into, &mut scratch);
        let mut codec = DeviceCodec::new(&self.codecs, spec, &[n]).unwrap();
        let (encoding, decoded) = (self.buffer(&bytes), self.floats(&gradient));
        // SAFETY: the buffers have as many elements, and bytes as an encoding.
        let found = unsafe {
            let (from, into, length) = (encoding.pointer(), decoded.pointer(), bytes.len());
            codec.decode(&self.stream, &task, from, length, into, Placement::Overwrite)
        };
        let found = found.and_then(|()| codec.check(&self.stream));
        let what = format!("{spec} with {byte:#x} at {places:?}");
        assert_eq!(found, expected.map_err(CodecError::Encoding), "{what}");
        self.read(&decoded);
        assert_eq!(codec.check(&self.stream), Ok(()), "a fault is reported once");
        // SAFETY: refused before anything is submitted.
        let short = unsafe {
            let (from, into) = (encoding.pointer(), decoded.pointer());
            codec.decode(&self.stream, &task, from, 3, into, Placement::Overwrite)
        };
        let refused =
            matches!(short, Err(CodecError::Encoding(BadEncoding::Length { found: 3, .. })));
        assert!(refused, "{short:?}");
    }
}

impl Bench {
    /// Many groups of indices, of widths that are all alike, and of such that are not: regular gaps, whole rows,
    /// and gradients that are larger in some places than in others.
    pub fn check_many_groups(&self) {
        type Pattern = fn(usize) -> bool;
        let patterns: [(&str, Pattern); 5] = [
            ("all", |_| true),
            ("every third", |i| i % 3 == 0),
            ("every 64th, and one more", |i| i % 64 == 0 || i == 77_777),
            ("one row of 32", |i| i / 128 % 32 == 5),
            ("the first and the last", |i| i == 0 || i == 399_999),
        ];
        let value = |i: usize| Kind::Normal.element(1, i) + 0.1;
        for (name, pattern) in patterns {
            let gradient: Vec<f32> =
                (0..400_000).map(|i| if pattern(i) { value(i) } else { 0.0 }).collect();
            self.check_decode(&"topk:40%,exact".parse().unwrap(), name, &gradient);
        }
        // The last one has entries for more than one block.
        for (text, n) in [
            ("topk:0.1%", 1_000_001),
            ("topk:1%", 1_000_001),
            ("topk:10%", 1_000_001),
            ("topk:30%,exact", 2_000_001),
        ] {
            let spec = text.parse().unwrap();
            let mut gradient: Vec<f32> = (0..n).map(|i| Kind::Normal.element(0, i)).collect();
            self.check_decode(&spec, "like numbers", &gradient);
            gradient.iter_mut().enumerate().for_each(|(i, value)| {
                *value *= [1.0, 0.6, 3.0, 0.01, 1.5, 0.3][i / 30_000 % 6];
            });
            self.check_decode(&spec, "numbers of several magnitudes", &gradient);
        }
    }

    /// What the host encoded is decoded as on the host.
    fn check_decode(&self, spec: &CodecSpec, what: &str, gradient: &[f32]) {
        let (host, n) = (spec.build(), gradient.len());
        let origin = Origin { shape: vec![n], parameter: 0, seed: 1, worker: 0, mean_of: 1 };
        let (mut scratch, mut bytes) = (Scratch::default(), Vec::new());
        Sender::new(host.clone(), origin.clone(), false).encode(
            0,
            gradient,
            &mut scratch,
            &mut bytes,
        );
        let task = origin.task(0);
        let mut expected = vec![0.0; n];
        sender::decode(&*host, &task, &bytes, &mut expected, &mut scratch).unwrap();
        let mut codec = DeviceCodec::new(&self.codecs, spec, &[n]).unwrap();
        let (encoding, decoded) = (self.buffer(&bytes), self.floats(gradient));
        // SAFETY: the buffers have as many elements, and bytes as an encoding.
        unsafe {
            let (from, into, length) = (encoding.pointer(), decoded.pointer(), bytes.len());
            codec.decode(&self.stream, &task, from, length, into, Placement::Overwrite).unwrap();
        }
        codec.check(&self.stream).unwrap();
        assert_floats(&self.read_floats(&decoded), &expected, &format!("{spec} of {what}"));
    }

    /// Any damage to a sparse encoding is found, or is none to the host either; what it is called may differ.
    pub fn check_sparse_damage(&self, spec: &CodecSpec, n: usize) {
        let host = spec.build();
        let origin = Origin { shape: vec![n], parameter: 0, seed: 1, worker: 0, mean_of: 1 };
        let (mut scratch, mut good) = (Scratch::default(), Vec::new());
        let gradient: Vec<f32> = (0..n).map(|i| Kind::Normal.element(0, i)).collect();
        Sender::new(host.clone(), origin.clone(), false).encode(
            0,
            &gradient,
            &mut scratch,
            &mut good,
        );
        let task = origin.task(0);
        let mut codec = DeviceCodec::new(&self.codecs, spec, &[n]).unwrap();
        let (mut refused, mut damages) = (0, Vec::new());
        damages.extend((0..good.len().min(40)).map(|at| (at, good.len())));
        damages.extend((40..good.len()).step_by(good.len() / 24).map(|at| (at, good.len())));
        damages.extend([(0, 3), (0, 0), (good.len(), good.len() - 1), (good.len(), 6)]);
        for (at, length) in damages {
            let mut bytes = good.clone();
            bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= 0x55);
            bytes.truncate(length);
            let mut expected = vec![0.0; n];
            let answer = sender::decode(&*host, &task, &bytes, &mut expected, &mut scratch);
            let (encoding, decoded) = (self.buffer(&bytes), self.floats(&gradient));
            // SAFETY: the buffers have as many elements, and bytes as an encoding.
            let found = unsafe {
                let (from, into, length) = (encoding.pointer(), decoded.pointer(), bytes.len());
                codec.decode(&self.stream, &task, from, length, into, Placement::Overwrite)
            };
            let found = found.and_then(|()| codec.check(&self.stream));
            let what = format!("{spec} of {n}, damaged at {at} of {length}");
            assert_eq!(found.is_ok(), answer.is_ok(), "{what}: {found:?}, {answer:?}");
            refused += usize::from(found.is_err());
            let decoded = self.read_floats(&decoded);
            if answer.is_ok() {
                assert_floats(&decoded, &expected, &what);
            }
        }
        assert!(refused > 4, "{spec} of {n}: {refused} refused");
    }
}

impl Buffer {
    fn pointer(&self) -> unisono_cuda::DevicePtr {
        self.memory.pointer().offset(self.start)
    }
}

/// What gradients are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As in training.
    Normal,
    /// Few magnitudes, so that most elements are equal to many others.
    Ties,
    /// Zeros of both signs, subnormals, the largest and the smallest numbers.
    Edges,
    /// As `Edges`, with infinities and NaN here and there.
    Wild,
    /// Any bits.
    Bits,
    Zeros,
}

impl Kind {
    pub const ALL: [Kind; 6] =
        [Kind::Normal, Kind::Ties, Kind::Edges, Kind::Wild, Kind::Bits, Kind::Zeros];

    pub fn element(self, step: u64, i: usize) -> f32 {
        let bits = Key::new(step).at(i as u64);
        let unit = |bits: u64| (bits & 0xff_ffff) as f32 / 16_777_216.0;
        let sign = if bits >> 63 == 0 { 1.0 } else { -1.0 };
        let edges = [
            0.0,
            f32::from_bits(1),
            f32::from_bits(0x007f_ffff),
            f32::MIN_POSITIVE,
            f32::MAX,
            1e-30,
            6e-8,
            65504.0,
            65520.0,
            1.0,
            2.5,
        ];
        match self {
            // The sum of four even ones, with magnitudes that differ from place to place.
            Kind::Normal => {
                let sum: f32 = (0..4).map(|part| unit(bits >> (10 * part))).sum();
                (sum - 2.0) * 1e-3 * (1.0 + (i / 1000 % 7) as f32)
            }
            Kind::Ties => sign * ((bits >> 8) % 5) as f32 * 0.25,
            // Blocks of either kind: one with the largest number hides all others.
            Kind::Edges => match i / 512 % 3 {
                0 => sign * edges[(bits >> 8) as usize % edges.len()],
                1 => sign * f32::from_bits((bits >> 8) as u32 & 0x007f_ffff),
                _ => sign * unit(bits >> 8) * 1e-3,
            },
            Kind::Wild => match (i / 700 % 2, (bits >> 8) % 400) {
                (1, 0) => f32::INFINITY * sign,
                (1, 1) => f32::from_bits(0x7f80_0001 | (bits >> 20) as u32),
                _ => Kind::Edges.element(step, i),
            },
            Kind::Bits => f32::from_bits(bits as u32),
            Kind::Zeros => sign * 0.0,
        }
    }
}

fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("byte {at} is {:#x} instead of {:#x}: {what}", found[at], expected[at]);
    }
    assert_eq!(found.len(), expected.len(), "bytes of {what}");
}

/// An encoding with one NaN in place of all: which one a NaN is, is not specified.
///
/// Numbers become NaN by `topk` with values of 16 bits and a residual: one that is too large for those is sent
/// as an infinity, so that the opposite one is owed; that is sent next, and what is left of it is a NaN.
fn with_one_nan(spec: &CodecSpec, encoding: &[u8]) -> Vec<u8> {
    let mut bytes = encoding.to_vec();
    let infinity = match spec {
        CodecSpec::TopK(_, _, Values::Fp16) => 0x7c00,
        CodecSpec::TopK(_, _, Values::Bf16) => 0x7f80,
        _ => return bytes,
    };
    let Some(count) = bytes.first_chunk() else { return bytes };
    let values = bytes.len().saturating_sub(2 * u32::from_le_bytes(*count) as usize).max(4);
    for value in bytes[values..].as_chunks_mut().0 {
        if u16::from_le_bytes(*value) & 0x7fff > infinity {
            *value = 0x7fff_u16.to_le_bytes();
        }
    }
    bytes
}

/// The same bits; but which NaN a NaN is, is not specified.
fn assert_floats(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    if let Some(at) = found.iter().zip(expected).position(differ) {
        panic!("element {at} is {:e} instead of {:e}: {what}", found[at], expected[at]);
    }
}

/// Lengths around everything that kernels cut by.
pub fn lengths(largest: usize) -> impl Iterator<Item = usize> {
    let edges = [
        0, 1, 2, 3, 5, 8, 9, 31, 64, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1000, 2047,
        2048, 2049, 4095, 4096, 4097, 5000, 8192, 8195, 16384, 20001, 70003,
    ];
    edges.into_iter().filter(move |&length| length <= largest)
}

fn is_sparse(spec: &CodecSpec) -> bool {
    matches!(spec, CodecSpec::TopK(..) | CodecSpec::RandK(..))
}

/// The codec's spans, if it goes by them.
pub fn with_spans(spec: &CodecSpec, then: impl FnOnce(&dyn Spans)) {
    if let Passage::Spans(spans) = spec.build().passage() {
        then(spans);
    }
}
