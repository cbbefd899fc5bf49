//! Worlds on several hosts.

use std::path::PathBuf;
use std::sync::Once;

use unisono_collective::{Algorithm, FormError, Options};
use unisono_cuda::nccl::NcclCosts;
use unisono_cuda::{
    BounceOptions, DeviceEngine, DeviceGroup, DeviceOptions, Driver, NcclOptions, engine,
};

use crate::driver::window;
use crate::fake::{Kind, NCCL, ONE_ROUND, form, library, nccl};

/// Who takes messages from host to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// An NCCL of all ranks.
    Nccl,
    /// An NCCL of the counterparts, since it does not take all.
    Counterparts,
    /// The hosts, since there is no NCCL.
    Hosts,
}

pub const ALL: [Between; 3] = [Between::Nccl, Between::Counterparts, Between::Hosts];

impl Between {
    /// Where NCCL is, for so many hosts.
    pub fn library(self, hosts: u32) -> PathBuf {
        match self {
            Between::Nccl => nccl(NCCL),
            Between::Counterparts => nccl(Kind { most: hosts, ..NCCL }),
            Between::Hosts => "/nowhere/libnccl.so.2".into(),
        }
    }
}

/// Costs by which bytes between hosts count, and those inside do not.
const FAR_BYTES_COUNT: NcclCosts =
    NcclCosts { group: 1e-12, byte: 1.0, gathered: 1.0, folded: 1e-12 };

/// Small memories, so that calls have several segments.
pub fn options(between: Between, hosts: &[u32]) -> DeviceOptions {
    let hosts = hosts.iter().max().map_or(0, |most| most + 1);
    DeviceOptions {
        engine: None,
        window: window(1 << 12, ONE_ROUND),
        nccl: NcclOptions {
            library: Some(between.library(hosts)),
            scratch: 1 << 10,
            costs: Some(FAR_BYTES_COUNT),
        },
        bounce: BounceOptions { chunk: 1 << 12 },
    }
}

/// Ranks on these hosts; what each has formed.
pub fn try_world(
    hosts: &[u32],
    group: &Options,
    options: &DeviceOptions,
) -> Vec<Result<DeviceGroup, FormError>> {
    // All ranks of these tests have one device, which NCCL is told to take.
    static SHARED: Once = Once::new();
    // SAFETY: every test forms its first world here, so no other thread looks at the environment before this is done.
    SHARED.call_once(|| unsafe { std::env::set_var("NCCL_MULTI_RANK_GPU_ENABLE", "1") });
    let driver = library();
    let engine = engine(move || Driver::load_from(driver.as_os_str())?.device(0), options.clone());
    let formed = form(hosts, group, |_| engine.clone());
    formed.into_iter().map(|group| Ok(DeviceGroup::new(group?, 0))).collect()
}

/// Ranks on these hosts, of which every call that can goes through the levels.
pub fn world_on(hosts: &[u32], between: Between) -> Vec<DeviceGroup> {
    let mut group = Options::default();
    group.algorithm = Some(Algorithm::Hierarchical);
    let engine = Some(DeviceEngine::Hierarchical);
    let options = DeviceOptions { engine, ..options(between, hosts) };
    try_world(hosts, &group, &options).into_iter().map(Result::unwrap).collect()
}

/// The same with whatever engine each group chooses.
pub fn world_of_any_engine(hosts: &[u32], between: Between) -> Vec<DeviceGroup> {
    let options = options(between, hosts);
    try_world(hosts, &Options::default(), &options).into_iter().map(Result::unwrap).collect()
}
