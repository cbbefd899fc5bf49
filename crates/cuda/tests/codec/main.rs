//! Codecs without a device: their kernels, compiled for the host, over a driver whose device is the host.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use unisono_codec::CodecSpec;
use unisono_cuda::{CodecError, Codecs, Context, DeviceCodec, Driver};

#[path = "../common/codecs.rs"]
mod codecs;
#[path = "../common/families.rs"]
mod families;
use codecs::{Bench, Kind, lengths, with_spans};

/// The driver's library; compiled once for all tests, and again when a source has changed.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_codecs");
        families::compile_into(&folder);
        let library = folder.join("libcuda.so");
        let driver = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/window/host_device.cpp");
        let kernels = format!("-DKERNELS=\"{}\"", folder.display());
        families::compile(&driver, std::slice::from_ref(&driver), &library, &kernels);
        library
    })
}

fn context() -> Context {
    let driver = Driver::load_from(library().as_os_str()).unwrap();
    Context::new(&driver.device(0).unwrap()).unwrap()
}

fn spec(text: &str) -> CodecSpec {
    text.parse().unwrap()
}

/// Every kind of gradient, at lengths around everything that kernels cut by.
fn check(texts: &[&str], largest: usize) {
    let context = context();
    for shift in [0, 4] {
        let bench = Bench::new(&context, shift);
        for text in texts {
            let spec = spec(text);
            for length in lengths(largest) {
                let kinds = if length > 300 { &Kind::ALL[..] } else { &[Kind::Normal, Kind::Wild] };
                kinds.iter().for_each(|kind| bench.check(&spec, &[length], *kind));
            }
            with_spans(&spec, |spans| {
                Kind::ALL.into_iter().for_each(|kind| bench.check_spans(&spec, spans, kind));
            });
        }
    }
}

#[test]
fn casts_have_the_bytes_of_the_host() {
    check(&["fp16", "bf16"], 8195);
}

#[test]
fn int8_has_the_bytes_of_the_host() {
    check(&["int8", "int8:stochastic"], 8195);
}

#[test]
fn int4_has_the_bytes_of_the_host() {
    check(&["int4", "int4:stochastic"], 8195);
}

#[test]
fn qsgd_has_the_bytes_of_the_host() {
    check(&["qsgd:2", "qsgd:3", "qsgd:4", "qsgd:8"], 5000);
}

#[test]
fn sign_has_the_bytes_of_the_host() {
    check(&["sign"], 8195);
}

/// Magnitudes that are equal, zero and infinite; which NaN a NaN is, is not specified.
const SPARSE: [Kind; 4] = [Kind::Normal, Kind::Ties, Kind::Edges, Kind::Zeros];

#[test]
fn topk_has_the_bytes_of_the_host() {
    let context = context();
    for (text, shift, large) in [
        ("topk:1%", 0, 70_003),
        // Large enough for a sample.
        ("topk:50%", 4, 8195),
        ("topk:30%,exact", 0, 12_289),
        ("topk:4%,exact", 4, 20_001),
        ("topk:20%+fp16", 0, 5000),
        ("topk:0.5%+bf16", 4, 20_001),
        ("topk:10%+int8", 4, 8195),
        ("topk:50%,exact+int4", 0, 5000),
    ] {
        let bench = Bench::new(&context, shift);
        for length in [0, 1, 3, 129, 4097, large] {
            let kinds = if length > 2000 { &SPARSE[..] } else { &[Kind::Normal, Kind::Ties] };
            kinds.iter().for_each(|kind| bench.check(&spec(text), &[length], *kind));
        }
    }
}

#[test]
fn topk_decodes_many_groups() {
    let context = context();
    for shift in [0, 4, 28] {
        Bench::new(&context, shift).check_many_groups();
    }
}

#[test]
fn randk_has_the_bytes_of_the_host() {
    let context = context();
    for shift in [0, 4] {
        let bench = Bench::new(&context, shift);
        for text in ["randk:10%", "randk:1%+fp16", "randk:50%+bf16"] {
            for length in [0, 1, 2, 9, 255, 256, 257, 1000, 4097, 8195] {
                SPARSE.into_iter().for_each(|kind| bench.check(&spec(text), &[length], kind));
            }
        }
    }
}

#[test]
fn powersgd_has_the_bytes_of_the_host() {
    let context = context();
    let shapes: [&[usize]; 9] = [
        &[0, 3],
        &[1, 1],
        &[4, 5],
        &[7, 300],
        &[33, 3, 5],
        &[9, 1024],
        &[6, 2500],
        &[257, 40],
        &[203, 9],
    ];
    for (text, shift) in [("powersgd:1", 0), ("powersgd:4", 4), ("powersgd:3+fp16", 4)] {
        let bench = Bench::new(&context, shift);
        for shape in shapes {
            for kind in [Kind::Normal, Kind::Ties, Kind::Zeros] {
                bench.check(&spec(text), shape, kind);
            }
        }
    }
    Bench::new(&context, 0).check(&spec("powersgd:15+bf16"), &[20, 130], Kind::Normal);
}

#[test]
fn damage_is_found_as_on_the_host() {
    let bench = Bench::new(&context(), 0);
    for text in ["int8", "int4", "qsgd:4", "qsgd:7", "sign"] {
        for n in [100, 5000] {
            for (places, byte) in [
                (&[1][..], 0x7f),
                (&[1], 0xff),
                (&[0, 1], 0xff),
                (&[3], 0xff),
                (&[40], 0xff),
                (&[60, 1], 0xff),
                (&[520, 521, 522, 523, 780, 781, 782, 783], 0xff),
                (&[0], 0x11),
            ] {
                bench.check_damage(&spec(text), n, places, byte);
            }
        }
    }
}

#[test]
fn damage_to_sparse_encodings_is_found() {
    let bench = Bench::new(&context(), 0);
    for (text, n) in [
        ("topk:10%,exact", 2000),
        ("topk:1%", 20_000),
        ("topk:10%+int8", 3000),
        ("topk:20%+fp16", 60_000),
    ] {
        bench.check_sparse_damage(&spec(text), n);
    }
}

#[test]
fn codecs_without_kernels_are_refused() {
    let codecs = Codecs::load(&context()).unwrap();
    let refused = DeviceCodec::new(&codecs, &spec("dgc:1%"), &[100]).map(|_| ());
    assert_eq!(refused, Err(CodecError::NotOnDevice { codec: "dgc:1%".to_owned() }));
}
