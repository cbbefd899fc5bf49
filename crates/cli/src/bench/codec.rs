//! `unisono bench codec`: how fast codecs are on one core, and how much they leave of a gradient.
//!
//! All codecs encode and decode the same gradient: one parameter of normally distributed numbers with
//! a heavy tail. They take turns, and a copy of the gradient takes its turn among them, so that whatever
//! disturbs the machine disturbs all alike. Every repetition starts from a fresh gradient, as one does
//! that backward has just written.
//!
//! Beside every rate is what it is of the *limit*: the bytes that must be read and written, at the rate at which the
//! fastest copy reads and writes them in the same run. A residual is read and written, too. Encoding hardly writes and
//! decoding hardly reads, so next to that is what they are of a [pass](passes) that only reads, and of one that only writes.

mod device;
mod passes;
mod products;
mod trip;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;

use unisono_codec::topk::Selection;
use unisono_codec::{BadCodec, Codec, CodecSpec, Key, Rounding, Task, stream};

use super::device::{DeviceArgs, DeviceKind};
use super::{FEWEST, expect_memory, expect_seconds, median, print, sizes};
use crate::exit::Wrong;
use products::Products;
use trip::Trip;

/// What is measured unless the user asks for something else: every codec, as it is meant to be used.
const CODECS: &str = "fp16,bf16,int8,int8:stochastic,int4,qsgd:4,sign,topk:1%,topk:1%,exact,\
                      topk:1%+int8,randk:10%,dgc:0.1%,powersgd:2,powersgd:4";

/// Rows of the parameter. Its columns follow from its size.
const ROWS: usize = 4096;

/// Options of `unisono bench codec`.
#[derive(Args, Clone)]
pub struct CodecArgs {
    /// The codecs, separated by commas.
    #[arg(long, value_name = "LIST", default_value = CODECS)]
    codecs: String,
    /// The size of the gradient, in f32.
    #[arg(long, default_value = "64MiB")]
    size: String,
    /// Seconds to spend on each codec.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Print one JSON object per codec instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// One line of the report. Rates are bytes of f32 per second.
#[derive(Serialize)]
struct Row {
    codec: String,
    bytes: usize,
    encoded_bytes: usize,
    ratio: f64,
    encode_gbs: f64,
    decode_gbs: f64,
    gbs: f64,
    memcpy_gbs: f64,
    of_memcpy: f64,
    /// The faster of memcpy and a copy past the caches.
    copy_gbs: f64,
    /// What must be moved at the rate of that copy, as a share of the time that it took.
    encode_of_limit: f64,
    decode_of_limit: f64,
    /// What a pass that only reads the gradient takes, as a share of the time that encoding took.
    #[serde(skip_serializing_if = "Option::is_none")]
    encode_of_reading: Option<f64>,
    /// What a pass that only writes it takes, as a share of the time that decoding took.
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_of_writing: Option<f64>,
    /// Of encoding with the residual, for codecs that keep one and encode by blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    fed_gbs: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fed_of_limit: Option<f64>,
    /// The length of what is lost in one round trip, as a part of the gradient's.
    error: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    products_gbs: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    of_products: Option<f64>,
    /// Where the codecs ran, if not on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'static str>,
}

/// Measures all codecs.
pub fn run(args: CodecArgs) -> anyhow::Result<ExitCode> {
    let specs = parse_codecs(&args.codecs).context("--codecs").wrong_call()?;
    let bytes = sizes::parse(&args.size).context("--size").wrong_call()?;
    demand!(
        bytes > 0 && bytes.is_multiple_of(4 * ROWS),
        "--size {}: the gradient is a matrix of {ROWS} rows of f32; use a multiple of {}",
        args.size,
        sizes::format(4 * ROWS)
    );
    expect_seconds(args.seconds)?;
    let device = args.device.kind()?;
    let shape = [ROWS, bytes / 4 / ROWS];
    let codecs: Vec<(CodecSpec, Arc<dyn Codec>)> =
        specs.iter().map(|spec| (spec.clone(), spec.build())).collect();
    // The gradient, the copy that is encoded, what is decoded, what is owed, and the momentum of one codec.
    let encodings: usize = codecs.iter().map(|(_, codec)| codec.encoded_bytes(&shape)).sum();
    let needed = bytes.saturating_mul(5).saturating_add(encodings);
    expect_memory("--size: this needs", needed, "a smaller size")?;
    for (spec, codec) in &codecs {
        demand!(
            codec.suits(&shape),
            "{spec} does not make a matrix of {ROWS} × {} smaller; use a larger --size",
            shape[1]
        );
    }

    // Long after any warm-up.
    let task = Task { shape: &shape, parameter: 0, step: 1 << 20, seed: 1 };
    let report = match device {
        Some(DeviceKind::Cuda) => device::run(&specs, &args.codecs, task, args.seconds)?,
        None => {
            let mut entries: Vec<Entry> =
                codecs.iter().map(|(spec, codec)| Entry::new(spec, codec.as_ref(), task)).collect();
            let limits = measure(&mut entries, bytes, args.seconds)?;
            let (memcpy, copy) = (limits.memcpy.median(), limits.copy.median());
            let passes = Some(Passes { read: limits.read.median(), write: limits.write.median() });
            let figures = entries.iter().map(Entry::figures).collect();
            let place = "one core".to_owned();
            Report { figures, memcpy, copy: copy.min(memcpy), passes, place, device: None }
        }
    };
    report.print(bytes, args.json)
}

/// The codecs of a list. Commas also separate the arguments of one codec: what is no codec by itself
/// belongs to the one before.
fn parse_codecs(list: &str) -> Result<Vec<CodecSpec>, BadCodec> {
    let mut texts: Vec<String> = Vec::new();
    for word in list.split(',') {
        let begins = !matches!(word.parse::<CodecSpec>(), Err(BadCodec::Unknown { .. }));
        match texts.last_mut() {
            Some(text) if !begins => *text += &format!(",{word}"),
            _ => texts.push(word.to_owned()),
        }
    }
    texts.iter().map(|text| text.parse()).collect()
}

/// What memory lets a core do with the gradient.
#[derive(Default)]
struct Limits {
    memcpy: Times,
    /// Past the caches.
    copy: Times,
    read: Times,
    write: Times,
}

/// Times all entries and, in between, the limits, which are returned.
fn measure(entries: &mut [Entry], bytes: usize, seconds: f64) -> anyhow::Result<Limits> {
    let gradient = gradient(bytes / 4);
    let (mut values, mut decoded) = (gradient.clone(), vec![0.0; gradient.len()]);
    let mut owed = gradient.clone();
    let mut limits = Limits::default();
    let deadline = Duration::try_from_secs_f64(seconds * entries.len() as f64)?;
    let start = Instant::now();
    while limits.memcpy.0.len() < FEWEST || start.elapsed() < deadline {
        values.copy_from_slice(&gradient);
        limits.memcpy.time(|| std::hint::black_box(&mut decoded).copy_from_slice(&values));
        values.copy_from_slice(&gradient);
        limits.copy.time(|| stream::copy(&values, std::hint::black_box(&mut decoded)));
        values.copy_from_slice(&gradient);
        limits.read.time(|| passes::read(&values));
        limits.write.time(|| passes::write(std::hint::black_box(&mut decoded)));
        for entry in entries.iter_mut() {
            values.copy_from_slice(&gradient);
            entry.encode.time(|| entry.trip.encode(&mut values));
            let outcome = entry.decode.time(|| entry.trip.decode(&mut decoded));
            outcome.with_context(|| format!("{} cannot decode what it encoded", entry.spec))?;
            entry.verify(&gradient, &decoded)?;
            if entry.trip.is_fed() {
                owed.copy_from_slice(&gradient);
                values.copy_from_slice(&gradient);
                entry.fed.time(|| entry.trip.encode_fed(&values, &mut owed));
            }
            if let Some((products, times)) = &mut entry.products {
                times.time(|| products.multiply(&gradient, &mut decoded));
                products.verify(&gradient, &decoded)?;
            }
        }
    }
    Ok(limits)
}

/// What was measured of all codecs.
struct Report {
    figures: Vec<Figures>,
    /// Seconds of a copy of the gradient.
    memcpy: f64,
    /// Of the fastest one.
    copy: f64,
    /// Where they were measured.
    passes: Option<Passes>,
    /// Where, in words.
    place: String,
    device: Option<DeviceKind>,
}

/// Seconds of passes over the gradient that only read, and only write.
struct Passes {
    read: f64,
    write: f64,
}

/// What was measured of one codec, in seconds and bytes.
struct Figures {
    codec: String,
    encoded_bytes: usize,
    encode: f64,
    /// With the residual.
    fed: Option<f64>,
    decode: f64,
    error: f64,
    products: Option<f64>,
}

impl Report {
    fn print(&self, bytes: usize, json: bool) -> anyhow::Result<ExitCode> {
        let memcpy_gbs = bytes as f64 / self.memcpy / 1e9;
        if !json {
            let gbs = |seconds: f64| bytes as f64 / seconds / 1e9;
            let passes = self.passes.as_ref().map_or_else(String::new, |Passes { read, write }| {
                let (read, write) = (gbs(*read), gbs(*write));
                format!(", only reading {read:.2} GB/s, only writing {write:.2} GB/s")
            });
            result_line!(
                "{} of f32 on {}, memcpy {memcpy_gbs:.2} GB/s, the fastest copy {:.2} GB/s{passes}; every result verified",
                sizes::format(bytes),
                self.place,
                gbs(self.copy)
            )?;
            let rest = match self.device {
                None => format!(
                    "{:>15} {:>15} {:>16} {:>12}",
                    "enc. of reading", "dec. of writing", "residual of copy", "of products"
                ),
                Some(_) => String::new(),
            };
            result_line!(
                "{:<18} {:>8} {:>12} {:>12} {:>10} {:>10} {:>9} {:>15} {:>15} {rest}",
                "codec",
                "ratio",
                "encode GB/s",
                "decode GB/s",
                "both GB/s",
                "of memcpy",
                "error",
                // What each reads and writes, beside what a copy does.
                "encode of copy",
                "decode of copy",
            )?;
        }
        for figures in &self.figures {
            let row = self.row(figures, bytes);
            print(&row, json, || self.line(&row))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn row(&self, figures: &Figures, bytes: usize) -> Row {
        let gbs = |seconds: f64| bytes as f64 / seconds / 1e9;
        let Figures { encode, decode, encoded_bytes, .. } = *figures;
        let of_limit = |times: usize, seconds: f64| {
            let moved = (times * bytes + encoded_bytes) as f64 / (2 * bytes) as f64;
            moved * self.copy / seconds
        };
        Row {
            codec: figures.codec.clone(),
            bytes,
            encoded_bytes,
            ratio: bytes as f64 / encoded_bytes as f64,
            encode_gbs: gbs(encode),
            decode_gbs: gbs(decode),
            gbs: gbs(encode + decode),
            memcpy_gbs: gbs(self.memcpy),
            of_memcpy: gbs(encode + decode) / gbs(self.memcpy),
            copy_gbs: gbs(self.copy),
            encode_of_limit: of_limit(1, encode),
            decode_of_limit: of_limit(1, decode),
            encode_of_reading: self.passes.as_ref().map(|passes| passes.read / encode),
            decode_of_writing: self.passes.as_ref().map(|passes| passes.write / decode),
            fed_gbs: figures.fed.map(gbs),
            // The gradient is read, the residual read and written.
            fed_of_limit: figures.fed.map(|seconds| of_limit(3, seconds)),
            error: figures.error,
            products_gbs: figures.products.map(gbs),
            of_products: figures.products.map(|products| products / (encode + decode)),
            device: self.device.map(DeviceKind::name),
        }
    }

    fn line(&self, row: &Row) -> String {
        let Row { codec, ratio, encode_gbs, decode_gbs, gbs, of_memcpy, error, .. } = row;
        let Row { encode_of_limit, decode_of_limit, .. } = row;
        let share = |share: Option<f64>, width: usize| match share {
            Some(share) => format!("{share:>width$.3}"),
            None => format!("{:>width$}", ""),
        };
        let rest = match self.device {
            Some(_) => String::new(),
            None => format!(
                "{} {} {} {}",
                share(row.encode_of_reading, 15),
                share(row.decode_of_writing, 15),
                share(row.fed_of_limit, 16),
                share(row.of_products, 12)
            ),
        };
        format!(
            "{codec:<18} {ratio:>8.2} {encode_gbs:>12.2} {decode_gbs:>12.2} {gbs:>10.2} \
             {of_memcpy:>10.3} {error:>9.6} {encode_of_limit:>15.3} {decode_of_limit:>15.3} {rest}"
        )
    }
}

/// A codec that is measured.
struct Entry<'a> {
    spec: &'a CodecSpec,
    trip: Trip<'a>,
    encode: Times,
    /// With the residual, if there is one.
    fed: Times,
    decode: Times,
    /// The error of the first round trip: some codecs learn from those before.
    error: f64,
    /// The matrix products without which there is no such encoding, for codecs made of them.
    products: Option<(Products, Times)>,
}

impl<'a> Entry<'a> {
    fn new(spec: &'a CodecSpec, codec: &'a dyn Codec, task: Task<'a>) -> Entry<'a> {
        let products = match spec {
            CodecSpec::PowerSgd(rank, _) => {
                Some((Products::new(task.shape[0], task.shape[1], *rank), Times::default()))
            }
            _ => None,
        };
        Entry {
            spec,
            trip: Trip::new(spec, codec, task),
            encode: Times::default(),
            fed: Times::default(),
            decode: Times::default(),
            error: f64::NAN,
            products,
        }
    }

    fn verify(&mut self, gradient: &[f32], decoded: &[f32]) -> anyhow::Result<()> {
        let error = verified_error(self.spec, gradient, decoded)?;
        if self.error.is_nan() {
            self.error = error;
        }
        Ok(())
    }

    fn figures(&self) -> Figures {
        Figures {
            codec: self.spec.to_string(),
            encoded_bytes: self.trip.bytes(),
            encode: self.encode.median(),
            fed: self.trip.is_fed().then(|| self.fed.median()),
            decode: self.decode.median(),
            error: self.error,
            products: self.products.as_ref().map(|(_, times)| times.median()),
        }
    }
}

/// The error of a result; refuses one that the codec cannot have.
fn verified_error(spec: &CodecSpec, gradient: &[f32], decoded: &[f32]) -> anyhow::Result<f64> {
    let error = relative_error(gradient, decoded);
    let bound = largest_error(spec);
    // An error that is no number is above all bounds.
    if !error.is_finite() || error > bound {
        bail!("{spec} decoded with an error of {error}, where {bound} is the limit");
    }
    Ok(error)
}

/// Seconds of every repetition.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(start.elapsed().as_secs_f64());
        result
    }

    fn median(&self) -> f64 {
        median(self.0.iter().copied())
    }
}

/// Numbers like those of a gradient: normally distributed, each with a standard deviation that is
/// itself the exponential of a normally distributed number, so that few are far larger than most.
fn gradient(elements: usize) -> Vec<f32> {
    const DEVIATION: f64 = 0.01;
    const SPREAD: f64 = 0.5;
    let key = Key::new(0x0067_7261_6469_656e);
    let element = |index: u64| {
        let bits = key.at(index);
        // Two evenly distributed numbers, the first above 0, give two normally distributed ones.
        let unit = |bits: u32| f64::from(bits) / (1u64 << 32) as f64;
        let length = (-2.0 * (1.0 - unit(bits as u32)).ln()).sqrt();
        let (sine, cosine) = (unit((bits >> 32) as u32) * std::f64::consts::TAU).sin_cos();
        (DEVIATION * length * sine * (SPREAD * length * cosine).exp()) as f32
    };
    (0..elements as u64).map(element).collect()
}

/// The largest error that one round trip of such a gradient can have, if the codec does what it says.
fn largest_error(spec: &CodecSpec) -> f64 {
    // A block's peak is at most some ten times its root mean square. Rounding to the nearest of so
    // many levels below the peak is off by a third of their distance at most; by chance, by more.
    let quantizer = |levels: u32, rounding| match rounding {
        Rounding::Nearest => 4.0 / f64::from(levels),
        Rounding::Stochastic => 8.0 / f64::from(levels),
    };
    match spec {
        // Half the distance of neighbours, and what is too small for f16.
        CodecSpec::Fp16 => 1.0 / 1024.0,
        CodecSpec::Bf16 => 1.0 / 256.0,
        CodecSpec::Int8(rounding) => quantizer(127, *rounding),
        CodecSpec::Int4(rounding) => quantizer(7, *rounding),
        CodecSpec::Qsgd(bits) => quantizer((1 << (bits - 1)) - 1, Rounding::Stochastic),
        CodecSpec::Sign => 0.9,
        // As many elements, chosen by chance, have this part of the energy.
        CodecSpec::TopK(rate, Selection::Exact, _) => (1.0 - rate).sqrt(),
        CodecSpec::TopK(rate, Selection::Sampled, _) => (1.0 - 0.75 * rate).sqrt(),
        CodecSpec::Dgc(settings, _) => (1.0 - 0.75 * settings.rate).sqrt(),
        CodecSpec::RandK(rate, _) => (1.0 - 0.5 * rate).sqrt(),
        // A projection is no longer than what is projected; of noise it has next to nothing.
        _ => 1.0,
    }
}

/// The length of the difference, as a part of the gradient's; NaN if anything decoded is not finite.
fn relative_error(gradient: &[f32], decoded: &[f32]) -> f64 {
    let (mut lost, mut whole) = (0.0, 0.0);
    for (gradient, decoded) in gradient.iter().zip(decoded) {
        let (gradient, decoded) = (f64::from(*gradient), f64::from(*decoded));
        lost += (gradient - decoded) * (gradient - decoded);
        whole += gradient * gradient;
    }
    if lost.is_finite() { (lost / whole).sqrt() } else { f64::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_codecs_may_have_arguments_with_commas() {
        let names = |list: &str| -> Vec<String> {
            parse_codecs(list).unwrap().iter().map(ToString::to_string).collect()
        };
        assert_eq!(names("topk:1%,exact,int8"), ["topk:1%,exact", "int8"]);
        assert_eq!(names("dgc:0.1%,momentum=0.9,nesterov+int8,sign").len(), 2);
        assert_eq!(names(CODECS).len(), 14);
        for wrong in ["", "zip", "int8,zip", "exact,topk", "topk:1%,,int8:up"] {
            assert!(parse_codecs(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_codec_is_measured_and_verified() {
        let shape = [ROWS, 16];
        let task = Task { shape: &shape, parameter: 0, step: 1 << 20, seed: 1 };
        let list = format!("{CODECS},powersgd:1+fp16,randk:25%+bf16,dgc:1%,momentum=0.5+int4");
        let built: Vec<_> = parse_codecs(&list)
            .unwrap()
            .into_iter()
            .map(|spec| (spec.clone(), spec.build()))
            .collect();
        let mut entries: Vec<Entry> =
            built.iter().map(|(spec, codec)| Entry::new(spec, codec.as_ref(), task)).collect();
        measure(&mut entries, 4 * ROWS * 16, 0.0).unwrap();
        for entry in &entries {
            assert_eq!(entry.encode.0.len(), FEWEST, "{}", entry.spec);
            let expected = entry.spec.build().encoded_bytes(&shape) as f64;
            let found = entry.trip.bytes() as f64;
            assert!((found / expected - 1.0).abs() < 0.4, "{}: {found}, {expected}", entry.spec);
            assert!(entry.error > 0.0, "{} lost nothing", entry.spec);
        }
    }

    #[test]
    fn wrong_results_are_noticed() {
        let shape = [ROWS, 4];
        let task = Task { shape: &shape, parameter: 0, step: 0, seed: 1 };
        for spec in parse_codecs("fp16,int8,int4,sign,topk,randk").unwrap() {
            let codec = spec.build();
            let mut entry = Entry::new(&spec, codec.as_ref(), task);
            let gradient = gradient(ROWS * 4);
            assert!(entry.verify(&gradient, &gradient).is_ok());
            let shifted: Vec<f32> = gradient.iter().skip(1).copied().chain([0.0]).collect();
            assert!(entry.verify(&gradient, &shifted).is_err(), "{spec}");
            assert!(entry.verify(&gradient, &vec![0.0; gradient.len()]).is_err(), "{spec}");
            let mut broken = gradient.clone();
            broken[77] = f32::NAN;
            assert!(entry.verify(&gradient, &broken).is_err(), "{spec}");
        }
    }
}
