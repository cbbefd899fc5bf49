//! Measurements on a device: without one, what is missing; with a driver whose device is the host, what they say.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Desk, Ended};
use serde_json::Value;

const DRIVER: &str = "UNISONO_CUDA_DRIVER";

/// The drivers of the tests of the crate that uses them.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda/tests");

fn run(desk: &Desk, arguments: &str, driver: &Path) -> Ended {
    desk.start(desk.command(arguments).env(DRIVER, driver)).wait()
}

/// Compiles a source of the tests of `crates/cuda` into a library on the desk.
fn compile(desk: &Desk, compiler: &str, source: &str, library: &str, flags: &[&str]) -> PathBuf {
    let path = desk.path(library);
    let mut command = Command::new(compiler);
    command.args(["-w", "-O1", "-shared", "-fPIC", "-pthread"]).args(flags);
    command.arg(Path::new(SOURCES).join(source)).arg("-o").arg(&path).arg("-ldl");
    let status = command.status().expect("a compiler, which the tests of kernels need as well");
    assert!(status.success(), "{source} does not compile");
    path
}

#[test]
fn what_a_device_lacks_is_said_before_anything_starts() {
    let desk = Desk::new();
    desk.write("text.so", "no library");
    let none = ["-DINIT=0", "-DDEVICES=0"];
    let none = compile(&desk, "cc", "without_device/fake_driver.c", "none.so", &none);
    let hidden = ["-DINIT=100", "-DDEVICES=1"];
    let hidden = compile(&desk, "cc", "without_device/fake_driver.c", "hidden.so", &hidden);
    let install = ["install NVIDIA's driver", DRIVER];
    let drivers: [(PathBuf, &[&str]); 4] = [
        ("libmissing.so".into(), &install),
        (desk.path("text.so"), &install),
        (none, &["shows this process no device"]),
        (hidden, &["shows this process no device"]),
    ];
    for arguments in [
        "bench collective --device cuda --ranks 2 --sizes 1KiB",
        "bench collective --device cuda --json",
        "bench codec --device cuda --size 1MiB",
    ] {
        for (driver, words) in &drivers {
            let ended = run(&desk, arguments, driver);
            assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
            let (complaint, driver) = (ended.complaint(), driver.display().to_string());
            for word in ["--device cuda: ", &driver].iter().chain(*words) {
                assert!(complaint.contains(word), "no {word:?} in {complaint}");
            }
        }
    }
}

/// Memory of the host, in which ranks read each other's buffers in place.
#[test]
fn collectives_in_registered_memory_are_checked_and_say_so() {
    let desk = Desk::new();
    for (op, ranks) in
        [("all-reduce", 2), ("all-gather", 3), ("reduce-scatter", 2), ("broadcast", 3)]
    {
        let call = format!("bench collective --op {op} --ranks {ranks} --sizes 2MiB,4MiB");
        let rows = rows(&desk.run(&format!("{call} --registered --seconds 0.01 --json")));
        assert_eq!(rows.len(), 2, "{call}");
        for row in rows {
            assert_eq!(
                (&row["registered"], &row["verified"]),
                (&true.into(), &true.into()),
                "{row}"
            );
            assert_eq!(row["algorithm"], "window", "{row}");
            assert!(row["limit_gbs"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
}

#[test]
fn a_device_that_is_misnamed_or_has_nothing_to_do_is_refused() {
    let desk = Desk::new();
    for (arguments, word) in [
        ("bench collective --device tpu", "cuda"),
        ("bench codec --device tpu", "cuda"),
        ("bench collective --device cuda --op barrier", "leave --device out"),
        ("bench collective --device-engine window", "--device <DEVICE>"),
        ("bench collective --device cuda --device-engine rocket", "bounce"),
    ] {
        let ended = desk.run(arguments);
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {}", ended.stderr);
        assert!(ended.stderr.contains(word), "no {word:?} in {}", ended.stderr);
    }
}

/// A driver whose device is the host, with the kernels of one type.
fn host_device(desk: &Desk) -> PathBuf {
    let kernels = ["-std=c++17", "-ffp-contract=off", "-DNAME=f32", "-DFORMAT=F32", "-DFLOATS=1"];
    compile(desk, "c++", "without_device/kernels.cpp", "fold_f32.so", &kernels);
    let folder = format!("-DKERNELS=\"{}\"", desk.path("").display());
    compile(desk, "c++", "window/host_device.cpp", "libcuda.so", &["-std=c++17", &folder])
}

fn rows(ended: &Ended) -> Vec<Value> {
    ended.expect_success().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// One test, for the driver takes seconds to compile.
#[test]
fn collectives_on_a_device_are_checked_and_say_where_they_were_and_why() {
    let desk = Desk::new();
    let driver = host_device(&desk);
    for (op, ranks) in [("all-reduce", 2), ("all-reduce", 3), ("reduce-scatter", 2), ("gather", 2)]
    {
        let call = format!("bench collective --op {op} --ranks {ranks} --sizes 1KiB,64KiB");
        let call = format!("{call} --seconds 0.01 --json");
        let on_device = rows(&run(&desk, &format!("{call} --device cuda"), &driver));
        let on_host = rows(&desk.run(&call));
        assert_eq!((on_device.len(), on_host.len()), (2, 2), "{call}");
        for (device, host) in on_device.iter().zip(&on_host) {
            assert_eq!(device["device"], "cuda", "{device}");
            // Perhaps with more words: what the window's data passes is chosen by what was measured.
            assert!(device["transport"].as_str().unwrap().starts_with("window"), "{device}");
            assert_eq!(device["verified"], true, "{device}");
            for field in ["op", "ranks", "dtype", "bytes"] {
                assert_eq!(device[field], host[field], "{device}");
            }
            assert!(device["limit_gbs"].as_f64().unwrap() > 0.0, "{device}");
            // The fields of the host, and one more.
            let names =
                |row: &Value| -> Vec<String> { row.as_object().unwrap().keys().cloned().collect() };
            let mut expected = names(host);
            expected.push("device".to_owned());
            expected.sort();
            assert_eq!(names(device), expected);
        }
    }

    let call = "bench collective --device cuda --ranks 2 --sizes 1KiB --seconds 0.01 --explain";
    let ended = run(&desk, call, &driver);
    let said = ended.expect_success();
    for words in
        ["engine: window", "for all ranks share a GPU", "2 ranks on 1 × the host", "← chosen"]
    {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    let ended = run(&desk, &format!("{call} --json"), &driver);
    assert_eq!(rows(&ended).len(), 1);
    assert!(ended.stderr.contains("engine: window"), "{}", ended.stderr);

    for engine in ["window", "host", "bounce"] {
        let call = format!("{call} --json --device-engine {engine}");
        let ended = run(&desk, &call, &driver);
        let transport = rows(&ended)[0]["transport"].as_str().unwrap().to_owned();
        assert!(transport.starts_with(engine), "{call}: {transport}");
        assert!(ended.stderr.contains("for it was asked for"), "{}", ended.stderr);
    }
}
