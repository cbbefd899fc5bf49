//! Codecs on a device: the same gradient, encoded and decoded in device memory.
//!
//! Times are those of the device, between events around one encoding, one decoding or one copy of the driver;
//! these take turns, as on the host. What the device decodes of its own encoding the first time must be, bit by
//! bit, what the host decodes of its own; every result after that must be within the codec's error.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use unisono_codec::{CodecSpec, Task};
use unisono_cuda::codec::{CodecError, Codecs, DeviceCodec, Placement};
use unisono_cuda::{CudaError, DeviceMemory, Event, EventKind};

use super::trip::Trip;
use super::{CODECS, Figures, Report, Times, gradient, verified_error};
use crate::bench::FEWEST;
use crate::bench::device::{DeviceKind, Gpu};
use crate::exit::Wrong;

/// Encodings and decodings between two looks at the result, which take far longer.
const IN_A_ROW: usize = 5;

/// Measures all codecs that the device has; those of a list that a user made must be among them.
pub fn run(
    specs: &[CodecSpec],
    list: &str,
    task: Task<'_>,
    seconds: f64,
) -> anyhow::Result<Report> {
    let gpu = Gpu::first()?;
    let codecs = Codecs::load(&gpu.context)?;
    let mut entries = Vec::new();
    for spec in specs {
        match Entry::new(&gpu, &codecs, spec, task) {
            Ok(entry) => entries.push(entry),
            Err(error @ CodecError::NotOnDevice { .. }) if list == CODECS => say!("{error}"),
            Err(error @ CodecError::NotOnDevice { .. }) => {
                return Err(error).context("--codecs").wrong_call();
            }
            Err(error) => return Err(error.into()),
        }
    }
    let memcpy = measure(&gpu, &mut entries, task, seconds)?.median();
    let figures = entries.iter().map(|entry| Figures {
        codec: entry.spec.to_string(),
        encoded_bytes: entry.length,
        encode: entry.encode.median(),
        fed: None,
        decode: entry.decode.median(),
        error: entry.error,
        products: None,
    });
    Ok(Report {
        figures: figures.collect(),
        memcpy,
        copy: memcpy,
        passes: None,
        place: gpu.name()?,
        device: Some(DeviceKind::Cuda),
    })
}

/// A codec that is measured.
struct Entry<'a> {
    spec: &'a CodecSpec,
    codec: DeviceCodec,
    encoding: DeviceMemory,
    /// Bytes of the last encoding.
    length: usize,
    encode: Times,
    decode: Times,
    error: f64,
}

impl<'a> Entry<'a> {
    fn new(
        gpu: &Gpu,
        codecs: &Codecs,
        spec: &'a CodecSpec,
        task: Task<'_>,
    ) -> Result<Entry<'a>, CodecError> {
        let codec = DeviceCodec::new(codecs, spec, task.shape)?;
        let encoding = DeviceMemory::new(&gpu.context, codec.most_bytes())?;
        let (encode, decode) = (Times::default(), Times::default());
        Ok(Entry { spec, codec, encoding, length: 0, encode, decode, error: f64::NAN })
    }

    /// One encoding and one decoding.
    fn turn(
        &mut self,
        gpu: &Gpu,
        clock: &Clock,
        task: Task<'_>,
        from: &DeviceMemory,
        into: &DeviceMemory,
    ) -> Result<(), CodecError> {
        let Entry { codec, encoding, length, encode, decode, .. } = self;
        let stream = &gpu.stream;
        let (gradient, bytes, into) = (from.pointer(), encoding.pointer(), into.pointer());
        clock.time(gpu, encode, || {
            // SAFETY: the memory is the gradient's and as large as an encoding, all in the order of a stream.
            unsafe { codec.encode(stream, &task, 0, gradient, None, bytes) }
        })?;
        *length = codec.length(stream)?;
        clock.time(gpu, decode, || {
            // SAFETY: as above, and the encoding has as many bytes.
            unsafe { codec.decode(stream, &task, bytes, *length, into, Placement::Overwrite) }
        })?;
        codec.check(stream)
    }

    fn verify(&mut self, gradient: &[f32], decoded: &[f32], task: Task<'_>) -> anyhow::Result<()> {
        if self.error.is_nan() {
            self.compare_with_host(gradient, decoded, task)?;
        }
        let error = verified_error(self.spec, gradient, decoded)?;
        if self.error.is_nan() {
            self.error = error;
        }
        Ok(())
    }

    fn compare_with_host(
        &self,
        gradient: &[f32],
        decoded: &[f32],
        task: Task<'_>,
    ) -> anyhow::Result<()> {
        let codec = self.spec.build();
        let mut trip = Trip::new(self.spec, codec.as_ref(), task);
        let mut expected = vec![0.0; gradient.len()];
        trip.encode(&mut gradient.to_vec());
        trip.decode(&mut expected)?;
        if trip.bytes() != self.length {
            bail!("{} has {} bytes, {} on the host", self.spec, self.length, trip.bytes());
        }
        let differs = |(found, expected): (&f32, &f32)| found.to_bits() != expected.to_bits();
        match decoded.iter().zip(&expected).position(differs) {
            None => Ok(()),
            Some(at) => bail!(
                "{}: element {at} is {}, {} on the host",
                self.spec,
                decoded[at],
                expected[at]
            ),
        }
    }
}

/// Times all entries and, in between, a copy of the gradient, of which the times are returned.
fn measure(
    gpu: &Gpu,
    entries: &mut [Entry<'_>],
    task: Task<'_>,
    seconds: f64,
) -> anyhow::Result<Times> {
    let gradient = gradient(task.elements());
    let bytes = size_of_val(&gradient[..]);
    let mut decoded = vec![0.0_f32; gradient.len()];
    let memory = || DeviceMemory::new(&gpu.context, bytes).context("--size: device memory");
    let (from, into) = (memory()?, memory()?);
    // SAFETY: both have as many bytes, and the copy is waited for.
    unsafe { gpu.stream.copy_to_device(from.pointer(), gradient.as_ptr().cast(), bytes)? };
    gpu.stream.synchronize()?;
    let clock = Clock::new(gpu)?;
    let mut memcpy = Times::default();
    let deadline = Duration::try_from_secs_f64(seconds * entries.len() as f64)?;
    let start = Instant::now();
    let mut rounds = 0;
    // The first is not counted.
    while rounds <= FEWEST || start.elapsed() < deadline {
        rounds += 1;
        for _ in 0..IN_A_ROW {
            clock.time(gpu, &mut memcpy, || {
                // SAFETY: both have as many bytes, and nothing else uses them.
                unsafe { gpu.stream.copy_on_device(into.pointer(), from.pointer(), bytes) }
            })?;
        }
        for entry in entries.iter_mut() {
            // The first is on its own, for a codec may learn from it.
            let turns = if entry.error.is_nan() { 1 } else { IN_A_ROW };
            for _ in 0..turns {
                let done = entry.turn(gpu, &clock, task, &from, &into);
                done.with_context(|| entry.spec.to_string())?;
            }
            // SAFETY: both have as many bytes, and the copy is waited for.
            unsafe {
                gpu.stream.copy_to_host(decoded.as_mut_ptr().cast(), into.pointer(), bytes)?;
                // What the next one leaves out shows.
                gpu.stream.fill(into.pointer(), 0x55, bytes)?;
            }
            gpu.stream.synchronize()?;
            entry.verify(&gradient, &decoded, task)?;
        }
    }
    // Whatever came first also loaded code and woke the device.
    for times in entries.iter_mut().flat_map(|entry| [&mut entry.encode, &mut entry.decode]) {
        times.0.remove(0);
    }
    Ok(memcpy)
}

/// The device's own clock.
struct Clock {
    begin: Event,
    end: Event,
}

impl Clock {
    fn new(gpu: &Gpu) -> Result<Clock, CudaError> {
        let event = || Event::new(&gpu.context, EventKind::Timing);
        Ok(Clock { begin: event()?, end: event()? })
    }

    /// Adds the seconds that the device takes for what is submitted.
    fn time<E: From<CudaError>>(
        &self,
        gpu: &Gpu,
        times: &mut Times,
        submit: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        gpu.stream.record(&self.begin)?;
        submit()?;
        gpu.stream.record(&self.end)?;
        self.end.synchronize()?;
        times.0.push(self.end.seconds_since(&self.begin)?);
        Ok(())
    }
}
