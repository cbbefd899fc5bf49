//! The driver whose device is the host, and worlds that use it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use unisono_collective::engine::MakeEngine;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{Dtype, Epoch, Group, Options};
use unisono_cuda::{DeviceCosts, DeviceGroup, Driver, WindowOptions, engine};

/// The driver's library; compiled once for all tests, and again when a source has changed.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_device");
        std::fs::create_dir_all(&folder).unwrap();
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let kernels = crate_folder.join("tests/without_device/kernels.cpp");
        std::thread::scope(|scope| {
            for dtype in Dtype::ALL {
                let mut format = dtype.name().to_owned();
                format[..1].make_ascii_uppercase();
                let macros = [
                    format!("-DNAME={dtype}"),
                    format!("-DFORMAT={format}"),
                    format!("-DFLOATS={}", u8::from(dtype.is_float())),
                ];
                let library = folder.join(format!("fold_{dtype}.so"));
                let kernels = &kernels;
                scope.spawn(move || compile(kernels, &library, &macros));
            }
        });
        let library = folder.join("libcuda.so");
        let kernels = format!("-DKERNELS=\"{}\"", folder.display());
        compile(&crate_folder.join("tests/window/host_device.cpp"), &library, &[kernels]);
        library
    })
}

fn compile(source: &Path, library: &Path, macros: &[String]) {
    let written = |path: &Path| std::fs::metadata(path).and_then(|it| it.modified()).ok();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let headers = ["fold.cu", "element.cuh", "instructions.cuh"].map(|name| kernels.join(name));
    let newest = headers.iter().map(PathBuf::as_path).chain([source]).filter_map(written).max();
    if written(library) > newest {
        return;
    }
    let made = library.with_extension(format!("{}.made", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread"]);
    compiler.args(macros).arg(source).arg("-o").arg(&made).arg("-ldl");
    let status = compiler.status().expect("a C++ compiler, which the kernels' tests need as well");
    assert!(status.success(), "{} does not compile for the host", source.display());
    std::fs::rename(&made, library).unwrap();
}

/// An engine over it, with staging buffers of so many bytes.
pub fn fake_engine(buffer: usize, costs: DeviceCosts) -> Arc<MakeEngine> {
    let library = library();
    engine(
        move || Driver::load_from(library.as_os_str())?.device(0),
        WindowOptions { buffer, costs: Some(costs) },
    )
}

/// A world of threads.
pub fn world(world: usize, buffer: usize, costs: DeviceCosts) -> Vec<DeviceGroup> {
    let (hub, epoch) = (LocalHub::new(world), Epoch::new(0));
    let make = fake_engine(buffer, costs);
    std::thread::scope(|scope| {
        let form = |rank| {
            let (hub, epoch, make) = (hub.clone(), epoch.clone(), make.clone());
            scope.spawn(move || {
                let options = Options::default();
                let group = Group::with_engine(hub, epoch, rank, world, options, make).unwrap();
                DeviceGroup::new(group, 0)
            })
        };
        let ranks: Vec<_> = (0..world).map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `body` on every rank at once; the results in rank order.
pub fn on_all<R: Send>(groups: &[DeviceGroup], body: impl Fn(&DeviceGroup) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups.iter().map(|g| scope.spawn(move || body(g))).collect();
        ranks.into_iter().map(|r| r.join().expect("no rank panics")).collect()
    })
}
