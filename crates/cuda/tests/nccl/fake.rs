//! An NCCL for the driver whose device is the host, and worlds that use both.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use unisono_collective::engine::MakeEngine;
use unisono_collective::fabric::LocalHub;
use unisono_collective::{Epoch, FormError, Group, Options};
use unisono_cuda::nccl::NcclCosts;
use unisono_cuda::{DeviceCosts, DeviceGroup, Driver, NcclOptions, nccl_engine};

pub use crate::driver::{ONE_ROUND, TWO_ROUNDS, library, on_all};

/// What an NCCL claims to be, whether it refuses two ranks on one device, and how many ranks it takes.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub version: u32,
    pub refuses: bool,
    pub most: u32,
}

/// The usual one.
pub const NCCL: Kind = Kind { version: 22_809, refuses: false, most: 8 };

/// The library; compiled when it is first asked for, and when its source has changed.
pub fn nccl(kind: Kind) -> PathBuf {
    static COMPILING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = COMPILING.lock().unwrap();
    let driver = library();
    let Kind { version, refuses, most } = kind;
    let name = format!("libnccl-{version}-{}-{most}.so", u8::from(refuses));
    let library = driver.with_file_name(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/host_nccl.cpp");
    let written = |path: &Path| std::fs::metadata(path).and_then(|it| it.modified()).ok();
    if written(&library) > written(&source) {
        return library;
    }
    let made = library.with_extension(format!("{}.made", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread"]);
    compiler.arg(format!("-DVERSION={version}")).arg(format!("-DMOST={most}"));
    compiler.arg(format!("-DDRIVER=\"{}\"", driver.display()));
    compiler.args(refuses.then_some("-DREFUSES"));
    compiler.arg(&source).arg("-o").arg(&made).args(["-ldl", "-lrt"]);
    let status = compiler.status().expect("a C++ compiler, which the kernels' tests need as well");
    assert!(status.success(), "{} does not compile", source.display());
    std::fs::rename(&made, &library).unwrap();
    library
}

/// An engine over it, with so many bytes of scratch memory.
pub fn fake_engine(scratch: usize, costs: Option<NcclCosts>) -> Arc<MakeEngine> {
    let (driver, library) = (library(), Some(nccl(NCCL)));
    nccl_engine(
        move || Driver::load_from(driver.as_os_str())?.device(0),
        NcclOptions { library, scratch, costs },
    )
}

/// A world of threads, as that of the device window: with so many bytes in each of four buffers, and costs that make
/// one group of messages, or bytes, the more expensive.
pub fn world(world: usize, buffer: usize, costs: DeviceCosts) -> Vec<DeviceGroup> {
    let DeviceCosts { device, byte, .. } = costs;
    let costs = NcclCosts { group: device.first, byte, gathered: byte / 2.0, folded: byte };
    let engine = fake_engine(4 * buffer, Some(costs));
    let formed = form(&vec![0; world], &Options::default(), |_| engine.clone());
    formed.into_iter().map(|group| DeviceGroup::new(group.unwrap(), 0)).collect()
}

/// Forms a group of threads on these hosts, each with an engine of its own.
pub fn form(
    hosts: &[u32],
    options: &Options,
    engine: impl Fn(usize) -> Arc<MakeEngine>,
) -> Vec<Result<Group, FormError>> {
    let (hub, epoch) = (LocalHub::on_hosts(hosts), Epoch::new(0));
    std::thread::scope(|scope| {
        let form = |rank| {
            let (hub, epoch, options) = (hub.clone(), epoch.clone(), options.clone());
            let make = engine(rank);
            scope.spawn(move || Group::with_engine(hub, epoch, rank, hosts.len(), options, make))
        };
        let ranks: Vec<_> = (0..hosts.len()).map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
