//! How near codecs come to the bandwidth of device memory.
//!
//!     cargo run --release -p unisono-cuda --example codec_bandwidth [-- MIB [CODEC]...]
//!
//! For a gradient of 256 MiB, or as many as given: bytes that encoding, encoding with a residual, and decoding
//! read and write at the least, per second; the median of 20, beside the driver's copy in the same run. Bytes that are
//! read twice count once. What was timed is compared with the host, byte by byte.

use std::error::Error;
use std::time::Instant;

use unisono_codec::sender::{Origin, Scratch};
use unisono_codec::{CodecSpec, Key, Sender, sender};
use unisono_cuda::{
    Codecs, Context, DeviceCodec, DeviceMemory, DevicePtr, Driver, Placement, Stream,
};

#[path = "shared/timing.rs"]
mod timing;
use timing::median_seconds;

/// Elements whose encoding is compared with the host's, which takes longer.
const COMPARED: usize = 4 << 20;

const CODECS: [&str; 12] = [
    "fp16",
    "bf16",
    "int8",
    "int8:stochastic",
    "int4",
    "qsgd:4",
    "sign",
    "topk:1%",
    "topk:1%,exact",
    "topk:1%+int8",
    "randk:10%",
    "powersgd:4",
];

type Fallible<T> = Result<T, Box<dyn Error>>;

struct Bench {
    codecs: Codecs,
    stream: Stream,
    copy: f64,
    gradient: DeviceMemory,
    residual: DeviceMemory,
    encoding: DeviceMemory,
    decoded: DeviceMemory,
}

fn main() -> Fallible<()> {
    let mut arguments = std::env::args().skip(1);
    let mib: usize = arguments.next().map_or(Ok(256), |text| text.parse())?;
    let named: Vec<String> = arguments.collect();
    let names: Vec<&str> = match named.is_empty() {
        true => CODECS.to_vec(),
        false => named.iter().map(String::as_str).collect(),
    };
    let driver = Driver::load()?;
    let context = Context::new(&driver.device(0)?)?;
    println!("{}, CUDA {}, {mib} MiB", context.device().name()?, driver.version()?);

    let bytes = (mib << 20).max(COMPARED * 8);
    let bench = Bench::new(&context, bytes)?;
    println!("copy of the driver {:8.1} GB/s", bench.copy / 1e9);
    let mut equal = true;
    for name in names {
        equal &= bench.run(&name.parse()?, mib << 20)?;
    }
    println!("{}", if equal { "PASS" } else { "FAIL" });
    if equal { Ok(()) } else { Err("bytes differ from the host's".into()) }
}

impl Bench {
    fn new(context: &Context, bytes: usize) -> Fallible<Bench> {
        let memory = || DeviceMemory::new(context, bytes + 4096);
        let stream = Stream::new(context, 0)?;
        let (gradient, residual, encoding, decoded) = (memory()?, memory()?, memory()?, memory()?);
        let values: Vec<f32> = (0..bytes / 4).map(element).collect();
        // SAFETY: all have as many bytes, nothing else touches them, and copies are waited for.
        let copy = unsafe {
            stream.copy_to_device(gradient.pointer(), values.as_ptr().cast(), bytes)?;
            stream.fill(residual.pointer(), 0, bytes)?;
            stream.synchronize()?;
            median_seconds(&stream, || {
                Ok(stream.copy_on_device(decoded.pointer(), gradient.pointer(), bytes)?)
            })?
        };
        let (codecs, copy) = (Codecs::load(context)?, 2.0 * bytes as f64 / copy);
        Ok(Bench { codecs, stream, copy, gradient, residual, encoding, decoded })
    }

    /// Times a codec, and says whether its bytes are the host's.
    fn run(&self, spec: &CodecSpec, bytes: usize) -> Fallible<bool> {
        let (stream, n) = (&self.stream, bytes / 4);
        let shape = shape(n);
        let mut codec = DeviceCodec::new(&self.codecs, spec, &shape)?;
        let origin = Origin { shape, parameter: 0, seed: 1, worker: 0, mean_of: 1 };
        let task = origin.task(1);
        let (from, residual) = (self.gradient.pointer(), self.residual.pointer());
        let (encoding, into) = (self.encoding.pointer(), self.decoded.pointer());
        // SAFETY: all have at least as many bytes, and nothing else touches them.
        unsafe {
            let plain = median_seconds(stream, || {
                Ok(codec.encode(stream, &task, 0, from, None, encoding)?)
            })?;
            let length = codec.length(stream)?;
            let decoded = median_seconds(stream, || {
                Ok(codec.decode(stream, &task, encoding, length, into, Placement::Overwrite)?)
            })?;
            codec.check(stream)?;
            stream.fill(residual, 0, bytes)?;
            let owed = median_seconds(stream, || {
                Ok(codec.encode(stream, &task, 0, from, Some(residual), encoding)?)
            })?;
            let rate = |moved: usize, seconds: f64| {
                let rate = moved as f64 / seconds;
                format!("{:7.1} GB/s {:5.1} %", rate / 1e9, 100.0 * rate / self.copy)
            };
            let equal = self.compare(spec)?;
            println!(
                "{:<16} encode {} | with residual {} | decode {} | 1/{:<6.1} bytes {}",
                spec.to_string(),
                rate(bytes + length, plain),
                rate(3 * bytes + length, owed),
                rate(bytes + length, decoded),
                bytes as f64 / length as f64,
                if equal { "equal" } else { "DIFFER" }
            );
            Ok(equal)
        }
    }

    /// Three steps with a residual, of fewer elements: encodings and what is decoded are the host's.
    fn compare(&self, spec: &CodecSpec) -> Fallible<bool> {
        let (stream, n, host) = (&self.stream, COMPARED, spec.build());
        // Blocks and tiles that are not full; a matrix with columns that are no power of two.
        let shape = match spec {
            CodecSpec::PowerSgd(..) => vec![n / 1500, 1500],
            _ => vec![n + 1001],
        };
        let n = shape.iter().product::<usize>();
        let mut codec = DeviceCodec::new(&self.codecs, spec, &shape)?;
        let origin = Origin { shape, parameter: 0, seed: 1, worker: 0, mean_of: 1 };
        let feedback = host.is_biased();
        let mut sender = Sender::new(host.clone(), origin.clone(), feedback);
        let gradient: Vec<f32> = (0..n).map(element).collect();
        let (from, encoding) = (self.gradient.pointer(), self.encoding.pointer());
        let (residual, into) = (self.residual.pointer(), self.decoded.pointer());
        let (mut scratch, mut equal) = (Scratch::default(), true);
        // SAFETY: all have at least as many bytes, nothing else touches them, and copies are waited for.
        unsafe {
            stream.fill(residual, 0, n * 4)?;
            let started = Instant::now();
            for step in 0..3 {
                let mut expected = Vec::new();
                sender.encode(step, &gradient, &mut scratch, &mut expected);
                let task = origin.task(step);
                let owed = feedback.then_some(residual);
                codec.encode(stream, &task, 0, from, owed, encoding)?;
                let length = codec.length(stream)?;
                let found: Vec<u8> = read(stream, encoding, length)?;
                equal &= found == expected;

                codec.decode(stream, &task, encoding, length, into, Placement::Overwrite)?;
                codec.check(stream)?;
                let mut decoded = vec![0.0_f32; n];
                sender::decode(&*host, &task, &expected, &mut decoded, &mut scratch)?;
                let found: Vec<f32> = read(stream, into, n)?;
                let mut pairs = found.iter().zip(&decoded);
                equal &= pairs.all(|(a, b)| a.to_bits() == b.to_bits());
                if started.elapsed().as_secs() > 5 {
                    break;
                }
            }
            if feedback {
                let found: Vec<f32> = read(stream, residual, n)?;
                let mut pairs = found.iter().zip(sender.owed());
                equal &= pairs.all(|(a, b)| a.to_bits() == b.to_bits());
            }
        }
        Ok(equal)
    }
}

/// A matrix, for codecs that want one.
fn shape(elements: usize) -> Vec<usize> {
    let columns = 4096.min(elements);
    match elements % columns {
        0 => vec![elements / columns, columns],
        _ => vec![elements],
    }
}

/// Numbers as in a gradient: small ones more often than large ones.
fn element(i: usize) -> f32 {
    let bits = Key::new(7).at(i as u64);
    let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xffff).sum();
    (sum as f32 - 131_070.0) * 1e-8
}

/// What is at an address of the device.
///
/// # Safety
/// It is valid for so many elements, for which any bits do.
unsafe fn read<T: Copy + Default>(
    stream: &Stream,
    from: DevicePtr,
    count: usize,
) -> Fallible<Vec<T>> {
    let mut read = vec![T::default(); count];
    // SAFETY: the vector has as many bytes, and the copy is waited for.
    unsafe { stream.copy_to_host(read.as_mut_ptr().cast(), from, count * size_of::<T>())? };
    stream.synchronize()?;
    Ok(read)
}
