//! The driver whose device is the host, and worlds that use it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use unisono_collective::engine::MakeEngine;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{Dtype, Epoch, Group, Options};
use unisono_cuda::{
    DeviceCosts, DeviceGroup, DeviceOptions, Driver, Rounds, Way, WindowOptions, engine,
};

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

/// Costs by which every call takes one round, or two where an algorithm has them.
pub const ONE_ROUND: DeviceCosts = costs(1.0, 1e-12);
pub const TWO_ROUNDS: DeviceCosts = costs(1e-12, 1.0);

const fn costs(round: f64, byte: f64) -> DeviceCosts {
    let rounds = Rounds { first: round, second: round, segment: 0.0 };
    let (bus, core) = (byte, byte);
    DeviceCosts { device: rounds, host: rounds, folded: rounds, byte, bus, core }
}

/// A window with staging buffers of so many bytes.
pub fn window(buffer: usize, costs: DeviceCosts) -> WindowOptions {
    let (buffer, host_buffer) = (Some(buffer), buffer);
    WindowOptions { buffer, host_buffer, costs: Some(costs), ..WindowOptions::default() }
}

/// An engine over it.
pub fn fake_engine(options: impl Into<DeviceOptions>) -> Arc<MakeEngine> {
    let library = library();
    engine(move || Driver::load_from(library.as_os_str())?.device(0), options)
}

/// A world of threads that stages on the device, and where it is odd copies by kernels.
pub fn world(world: usize, buffer: usize, costs: DeviceCosts) -> Vec<DeviceGroup> {
    let (way, copies_by_kernel) = (Some(Way::Device), world % 2 == 1);
    world_with(world, WindowOptions { way, copies_by_kernel, ..window(buffer, costs) })
}

/// The same with any engine.
pub fn world_with(world: usize, options: impl Into<DeviceOptions>) -> Vec<DeviceGroup> {
    world_on(&vec![0; world], options)
}

/// The same on several hosts.
pub fn world_on(hosts: &[u32], options: impl Into<DeviceOptions>) -> Vec<DeviceGroup> {
    let (world, hub, epoch) = (hosts.len(), LocalHub::on_hosts(hosts), Epoch::new(0));
    let make = fake_engine(options);
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
