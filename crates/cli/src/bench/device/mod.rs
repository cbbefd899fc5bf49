//! Measurements on memory of a device.
//!
//! The ranks of a measurement are processes, each with a device of its machine: the rank's number there,
//! modulo the number of devices. So several ranks share a device where there are more of them than devices.

mod limit;

use std::rc::Rc;

use anyhow::Context as _;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use unisono::cluster::place::Place;
use unisono::insight::units::counted;
use unisono::{Group, Job, Options};
use unisono_cuda::{Context, DeviceEngine, DeviceOptions, Driver, Stream, Uuid};

use crate::exit::Wrong;
pub use limit::{Roofline, Way};

/// Which device a measurement is on.
#[derive(Args, Clone, Default)]
pub struct DeviceArgs {
    /// Measure on memory of this kind of device, which the ranks of a machine share out among them.
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
}

/// Which device a collective call is on, and how it reaches the other ranks.
#[derive(Args, Clone, Default)]
pub struct EngineArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
    /// With --device, how its memory reaches the other ranks; by default the best that all ranks can have.
    #[arg(long, requires = "device", value_parser = engines())]
    device_engine: Option<DeviceEngine>,
}

/// Parses the name of an engine, and lists all of them in the help.
fn engines() -> impl TypedValueParser<Value = DeviceEngine> {
    PossibleValuesParser::new(DeviceEngine::ALL.map(DeviceEngine::name))
        .try_map(|name| name.parse::<DeviceEngine>())
}

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// GPUs of NVIDIA.
    Cuda,
}

impl DeviceKind {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cuda => "cuda",
        }
    }
}

impl DeviceArgs {
    /// Whether the user asked for a device.
    pub fn is_wanted(&self) -> bool {
        self.device.is_some()
    }

    /// What the user asked for; an error of the call where this machine has no such device.
    pub fn kind(&self) -> anyhow::Result<Option<DeviceKind>> {
        if self.is_wanted() {
            driver()?;
        }
        Ok(self.device)
    }
}

impl EngineArgs {
    /// Joins the job, with a device if one was asked for.
    pub fn join(&self, options: Options) -> anyhow::Result<(Job, Option<Rc<Gpu>>)> {
        if !self.device.is_wanted() {
            return Ok((Job::join_with(options).context("joining the job")?, None));
        }
        let mut device_options = DeviceOptions::from_env().wrong_call()?;
        device_options.engine = self.device_engine.or(device_options.engine);
        let driver = driver()?;
        let number = Place::from_env()?.local_rank % driver.device_count();
        let gpu = Gpu::new(&driver, number)?;
        let engine = unisono_cuda::engine(move || Driver::load()?.device(number), device_options);
        let job = Job::join_with_engine(options, engine).context("joining the job")?;
        Ok((job, Some(Rc::new(gpu))))
    }

    /// Why calls of a group go by this engine, in words.
    pub fn reason(&self, engine: &str, sharing: Sharing) -> &'static str {
        match engine {
            _ if self.device_engine.is_some() => "it was asked for",
            _ if engine.starts_with("window") && sharing.devices == 1 => "all ranks share a GPU",
            _ if engine.starts_with("window") => "the GPUs of all ranks reach each other's memory",
            _ if engine.starts_with("hierarchical") => {
                "the ranks of each host reach each other's GPUs"
            }
            _ => "no better one opens on all ranks; UNISONO_LOG=info tells of each that was tried",
        }
    }
}

/// What the bytes of a call must pass that an [explanation](unisono::Explanation) says this engine runs.
pub fn way(engine: &str, group: &Group, sharing: Sharing) -> Way {
    let one_host = group.topology().is_one_host();
    if engine == "window" {
        return if sharing.devices == 1 { Way::Memory } else { Way::Peers };
    }
    match engine.starts_with("nccl") {
        // It takes ranks of one device for ranks of as many hosts.
        true if one_host && sharing.crowd == 1 => Way::Peers,
        false if one_host => Way::Host,
        _ => Way::Network,
    }
}

/// The driver of the devices. What it lacks is the user's to mend.
fn driver() -> anyhow::Result<Driver> {
    Driver::load().context("--device cuda").wrong_call()
}

/// The device of this process.
pub struct Gpu {
    pub context: Context,
    /// All work of the measurement itself is in its order.
    pub stream: Stream,
    pub number: u32,
}

impl Gpu {
    /// A device by its number.
    pub fn new(driver: &Driver, number: u32) -> anyhow::Result<Gpu> {
        let context = Context::new(&driver.device(number)?)?;
        let stream = Stream::new(&context, 0)?;
        Ok(Gpu { context, stream, number })
    }

    /// The first device, for a measurement that needs no other.
    pub fn first() -> anyhow::Result<Gpu> {
        Gpu::new(&driver()?, 0)
    }

    /// What its maker calls it.
    pub fn name(&self) -> anyhow::Result<String> {
        Ok(self.context.device().name()?)
    }
}

/// How the ranks of a group share their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    pub ranks: usize,
    pub devices: usize,
    /// Ranks of the device that has most of them.
    pub crowd: usize,
}

impl Sharing {
    /// All ranks tell each other which device they have.
    pub fn of(group: &Group, gpu: &Gpu) -> anyhow::Result<Sharing> {
        let Uuid(own) = gpu.context.device().uuid()?;
        let mut all = vec![0u8; own.len() * group.size()];
        group.all_gather(&own, &mut all)?;
        let all: Vec<&[u8]> = all.chunks(own.len()).collect();
        Ok(Sharing::among(&all))
    }

    fn among(uuids: &[&[u8]]) -> Sharing {
        let mut crowds = std::collections::BTreeMap::new();
        uuids.iter().for_each(|uuid| *crowds.entry(uuid).or_insert(0) += 1);
        let crowd = crowds.values().copied().max().unwrap_or(0);
        Sharing { ranks: uuids.len(), devices: crowds.len(), crowd }
    }

    /// In words, of devices of this name.
    pub fn told(&self, name: &str) -> String {
        format!("{} on {} × {name}", counted(self.ranks, "rank"), self.devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_by_device() {
        let shared = Sharing::among(&[b"a", b"a"]);
        assert_eq!(shared, Sharing { ranks: 2, devices: 1, crowd: 2 });
        assert_eq!(shared.told("H200"), "2 ranks on 1 × H200");
        let uneven = Sharing::among(&[b"a", b"b", b"a"]);
        assert_eq!(uneven, Sharing { ranks: 3, devices: 2, crowd: 2 });
    }
}
