//! Which engine serves the devices of a group.
//!
//! All ranks have the same one. Each says which device it has, from which all conclude, alike, which engines to try and in which
//! order ([`candidates`]); what remains to be seen is whether they open: whether the driver opens another process's
//! memory, whether there is an NCCL. An engine opens on all ranks or on none, so that all go on to the
//! next one together. The last, through the host's own collectives, needs nothing but a device.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use unisono_collective::engine::{Engine, HostEngine, MakeEngine};
use unisono_collective::schedule::Topology;
use unisono_collective::{BadSetting, FormError, Rank};

use crate::agreement::{self, Reason};
use crate::bounce::{self, Bounce, BounceOptions};
use crate::context::Context;
use crate::device::{Device, Uuid};
use crate::error::CudaError;
use crate::hierarchy::{self, Chances, Hierarchy};
use crate::nccl::{self, NcclEngine, NcclOptions};
use crate::window::{self, DeviceWindow, Place, WindowOptions};

/// Names the engine of calls on device memory.
pub const ENGINE_VARIABLE: &str = "UNISONO_DEVICE_ENGINE";

/// An engine for calls on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DeviceEngine {
    /// Through device memory that all ranks of a host reach.
    Window,
    /// Through device memory that the ranks of each host reach, and between the hosts by NCCL or through the hosts.
    Hierarchical,
    /// Through NCCL, on any hosts.
    Nccl,
    /// Through host memory that all ranks of a host reach.
    HostWindow,
    /// Through the collectives of the host, on any hosts.
    Bounce,
}

impl DeviceEngine {
    /// All of them, the best first where all can be had.
    pub const ALL: [DeviceEngine; 5] = [
        DeviceEngine::Window,
        DeviceEngine::Hierarchical,
        DeviceEngine::Nccl,
        DeviceEngine::HostWindow,
        DeviceEngine::Bounce,
    ];

    /// The name used in settings.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceEngine::Window => "window",
            DeviceEngine::Hierarchical => Hierarchy::NAME,
            DeviceEngine::Nccl => NcclEngine::NAME,
            DeviceEngine::HostWindow => "host",
            DeviceEngine::Bounce => Bounce::NAME,
        }
    }
}

impl fmt::Display for DeviceEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceEngine {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceEngine, String> {
        let names = || DeviceEngine::ALL.map(DeviceEngine::name).join(", ");
        let engine = DeviceEngine::ALL.into_iter().find(|engine| engine.name() == text);
        engine
            .ok_or_else(|| format!("unknown engine {text:?}; expected auto or one of {}", names()))
    }
}

/// The settings of a device's engine. Equal on all ranks of a group.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceOptions {
    /// Which engine; by default the best that all ranks can have. Where this one does not open, no group forms.
    pub engine: Option<DeviceEngine>,
    /// Of windows.
    pub window: WindowOptions,
    /// Of NCCL.
    pub nccl: NcclOptions,
    /// Of calls through the host's collectives.
    pub bounce: BounceOptions,
}

impl DeviceOptions {
    /// The defaults, changed by the environment: `UNISONO_DEVICE_ENGINE` is `auto` or the name of an engine.
    pub fn from_env() -> Result<DeviceOptions, BadSetting> {
        DeviceOptions::from_lookup(|name| std::env::var(name).ok())
    }

    /// As [`DeviceOptions::from_env`], from any source of variables.
    pub fn from_lookup(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<DeviceOptions, BadSetting> {
        let mut options = DeviceOptions::default();
        let asked = lookup(ENGINE_VARIABLE).filter(|value| !value.is_empty() && value != "auto");
        if let Some(value) = asked {
            let bad = |reason| BadSetting { name: ENGINE_VARIABLE, value: value.clone(), reason };
            options.engine = Some(value.parse().map_err(bad)?);
        }
        Ok(options)
    }
}

impl From<WindowOptions> for DeviceOptions {
    fn from(window: WindowOptions) -> DeviceOptions {
        DeviceOptions { window, ..DeviceOptions::default() }
    }
}

impl From<DeviceEngine> for DeviceOptions {
    fn from(engine: DeviceEngine) -> DeviceOptions {
        DeviceOptions { engine: Some(engine), ..DeviceOptions::default() }
    }
}

/// An engine for calls on host memory and on memory of a device, which each rank names when the group forms.
/// To be given to [`Group::with_engine`](unisono_collective::Group::with_engine) by all ranks.
///
/// If a rank has no device, or the engine that is asked for does not open, the group does not form: all ranks get
/// [`FormError::Device`].
pub fn engine(
    device: impl Fn() -> Result<Device, CudaError> + Send + Sync + 'static,
    options: impl Into<DeviceOptions>,
) -> Arc<MakeEngine> {
    let options = options.into();
    Arc::new(move |host| open(host, &device, &options))
}

/// What the ranks of a group have in common, as far as they know before they try anything.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ground {
    /// Which ranks can share memory of a host.
    topology: Topology,
    /// The device of every rank.
    devices: Vec<Uuid>,
    /// Whether NCCL was told to take several ranks of one GPU.
    nccl_shares: bool,
}

impl Ground {
    /// Whom NCCL may take: it refuses ranks that share a GPU, unless it was told otherwise.
    fn chances(&self) -> Chances {
        let Ground { topology, devices, nccl_shares } = self;
        let apart = |ranks: &[usize]| {
            let distinct: BTreeSet<&Uuid> = ranks.iter().map(|rank| &devices[*rank]).collect();
            *nccl_shares || distinct.len() == ranks.len()
        };
        let all: Vec<usize> = (0..devices.len()).collect();
        let counterparts = all.iter().all(|rank| apart(&topology.counterparts(*rank)));
        Chances { all: apart(&all), counterparts }
    }
}

/// The engines to try, in this order, and why each is one.
///
/// Memory that is there already is quicker than any library, and asks for nothing; NCCL knows wires that the host's
/// collectives do not. It refuses ranks that share a GPU, unless it was told otherwise, which takes it seconds: it is not asked.
fn candidates(ground: &Ground) -> Vec<(DeviceEngine, &'static str)> {
    let Ground { topology, devices, .. } = ground;
    let distinct: BTreeSet<&Uuid> = devices.iter().collect();
    let mut candidates = Vec::new();
    if topology.is_one_host() {
        let why = match (devices.len(), distinct.len()) {
            (1, _) => "the rank is alone",
            (_, 1) => "all ranks share a GPU",
            _ => "all ranks are on one host, and their GPUs reach each other's memory",
        };
        candidates.push((DeviceEngine::Window, why));
    }
    if hierarchy::suits(topology) {
        let why = "the ranks of each host reach each other's memory";
        candidates.push((DeviceEngine::Hierarchical, why));
    }
    if ground.chances().all {
        candidates
            .push((DeviceEngine::Nccl, "the ranks do not reach each other's GPUs but by NCCL"));
    }
    if topology.is_one_host() {
        let why = "all ranks are on one host, and reach its memory";
        candidates.push((DeviceEngine::HostWindow, why));
    }
    candidates.push((DeviceEngine::Bounce, "nothing else reaches all ranks"));
    candidates
}

/// Whether this process tells NCCL to take several ranks of one GPU: older ones know hosts by this name, newer ones
/// have a switch.
fn nccl_shares() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    is_set("NCCL_HOSTID")
        || std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1")
}

/// Opens the engine that was asked for, or the first that opens.
fn open(
    mut host: HostEngine,
    device: &dyn Fn() -> Result<Device, CudaError>,
    options: &DeviceOptions,
) -> Result<Box<dyn Engine>, FormError> {
    let (context, ground) = find_ground(&mut host, device, options.engine)?;
    let to_try = match options.engine {
        Some(engine) => vec![(engine, "it was asked for")],
        None => candidates(&ground),
    };
    let mut refusal = None;
    for (engine, why) in to_try {
        let error = match prepare(engine, &mut host, &context, options, &ground) {
            Ok(complete) => {
                let (rank, number) = (host.state().job_rank(), context.device().number());
                log::info!("rank {rank}, device {number}: the engine {engine}, for {why}");
                return Ok(complete(host));
            }
            Err(error) => error,
        };
        // All ranks have this one.
        let FormError::Device { rank, reason } = &error else { return Err(error) };
        log::info!("not the engine {engine}, for rank {rank} cannot: {reason}");
        refusal.get_or_insert(error);
    }
    Err(refusal.expect("there is always an engine to try"))
}

/// Makes an engine that has opened on all ranks, of the host's that it needs as well.
pub(crate) type Complete = Box<dyn FnOnce(HostEngine) -> Box<dyn Engine>>;

/// Opens an engine, on all ranks or on none. The host's stays with the caller, for the next if this one does not open.
fn prepare(
    engine: DeviceEngine,
    host: &mut HostEngine,
    context: &Context,
    options: &DeviceOptions,
    ground: &Ground,
) -> Result<Complete, FormError> {
    let window = |host: &mut HostEngine, place| -> Result<Complete, FormError> {
        let parts = window::prepare(host, context, place, &options.window)?;
        Ok(Box::new(move |host| Box::new(DeviceWindow::new(host, parts))))
    };
    match engine {
        DeviceEngine::Window => window(host, Place::Device),
        DeviceEngine::HostWindow => window(host, Place::Host),
        DeviceEngine::Hierarchical => hierarchy::prepare(host, context, options, ground.chances()),
        DeviceEngine::Nccl => {
            let device = || Ok(context.device().clone());
            let connected = nccl::connect(host, &device, &options.nccl)?;
            Ok(Box::new(move |host| Box::new(NcclEngine::new(host, connected))))
        }
        DeviceEngine::Bounce => {
            let parts = bounce::prepare(host, context, options.bounce)?;
            Ok(Box::new(move |host| Box::new(Bounce::new(host, parts))))
        }
    }
}

/// Tells the others which device this rank has, and which engine it was asked for, and hears the same of them.
fn find_ground(
    host: &mut HostEngine,
    device: &dyn Fn() -> Result<Device, CudaError>,
    asked: Option<DeviceEngine>,
) -> Result<(Context, Ground), FormError> {
    let mine = (|| {
        let context = Context::new(&device()?)?;
        let uuid = context.device().uuid()?;
        Ok::<_, Reason>((context, uuid))
    })();
    let (context, said) = match mine {
        Ok((context, device)) => {
            let rank = host.state().job_rank();
            let said = Said { rank, device, asked, nccl_shares: nccl_shares() };
            (Some(context), Ok(said.to_bytes()))
        }
        Err(reason) => (None, Err(reason)),
    };
    let said = agreement::tell(host, said)?.map_err(FormError::from)?;
    let said: Vec<Said> = said.iter().map(Said::from_bytes).collect();
    if let Some(other) = said.iter().find(|other| other.asked != said[0].asked) {
        let [one, two] = [&said[0], other]
            .map(|said| said.asked.map_or("one of its own choice", DeviceEngine::name));
        let reason = format!("it wants the engine {two}, and rank {} {one}", said[0].rank);
        return Err(FormError::Device { rank: other.rank, reason });
    }
    let devices = said.iter().map(|said| said.device).collect();
    let nccl_shares = said.iter().all(|said| said.nccl_shares);
    let ground = Ground { topology: host.topology().clone(), devices, nccl_shares };
    Ok((context.expect("all ranks have a device"), ground))
}

/// What a rank says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    rank: Rank,
    device: Uuid,
    asked: Option<DeviceEngine>,
    nccl_shares: bool,
}

/// Bytes of it as it travels.
const SAID: usize = 8 + 16 + 1 + 1;

impl Said {
    fn to_bytes(self) -> [u8; SAID] {
        let mut bytes = [0; SAID];
        let place = |asked| DeviceEngine::ALL.iter().position(|engine| *engine == asked);
        bytes[..8].copy_from_slice(&(self.rank.0 as u64).to_le_bytes());
        bytes[8..24].copy_from_slice(&self.device.0);
        bytes[24] = self.asked.and_then(place).map_or(0, |place| place as u8 + 1);
        bytes[25] = u8::from(self.nccl_shares);
        bytes
    }

    fn from_bytes(bytes: &[u8; SAID]) -> Said {
        let (rank, rest) = bytes.split_first_chunk().expect("eight bytes");
        let (device, rest) = rest.split_first_chunk().expect("sixteen bytes");
        let nccl_shares = rest[1] != 0;
        let asked = usize::from(rest[0]).checked_sub(1);
        let asked = asked.and_then(|place| DeviceEngine::ALL.get(place).copied());
        let rank = Rank(u64::from_le_bytes(*rank) as usize);
        Said { rank, device: Uuid(*device), asked, nccl_shares }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ground(hosts: &[u32], devices: &[u8], nccl_shares: bool) -> Ground {
        let devices = devices.iter().map(|number| Uuid([*number; 16])).collect();
        Ground { topology: Topology::new(hosts), devices, nccl_shares }
    }

    fn engines(hosts: &[u32], devices: &[u8], nccl_shares: bool) -> Vec<DeviceEngine> {
        let ground = ground(hosts, devices, nccl_shares);
        candidates(&ground).into_iter().map(|(engine, _)| engine).collect()
    }

    #[test]
    fn what_ranks_share_decides() {
        use DeviceEngine::{Bounce, Hierarchical, HostWindow, Nccl, Window};
        assert_eq!(engines(&[0], &[1], false), [Window, Nccl, HostWindow, Bounce]);
        assert_eq!(engines(&[0; 3], &[1, 1, 1], false), [Window, HostWindow, Bounce]);
        assert_eq!(engines(&[0; 2], &[1, 2], false), [Window, Nccl, HostWindow, Bounce]);
        assert_eq!(engines(&[0; 3], &[1, 2, 1], false), [Window, HostWindow, Bounce]);
        assert_eq!(engines(&[0; 2], &[1, 1], true), [Window, Nccl, HostWindow, Bounce]);
        assert_eq!(engines(&[0, 1], &[1, 2], false), [Nccl, Bounce]);
        assert_eq!(engines(&[0, 1], &[1, 1], false), [Bounce]);
        assert_eq!(engines(&[0, 1], &[1, 1], true), [Nccl, Bounce]);
        let two_by_two = &[0, 0, 1, 1];
        assert_eq!(engines(two_by_two, &[1, 2, 3, 4], false), [Hierarchical, Nccl, Bounce]);
        assert_eq!(engines(two_by_two, &[1, 1, 2, 2], false), [Hierarchical, Bounce]);
        assert_eq!(engines(&[0, 0, 0, 1], &[1, 2, 3, 4], false), [Nccl, Bounce]);
    }

    #[test]
    fn counterparts_may_have_nccl_where_all_ranks_have_not() {
        let chances = |hosts, devices, shares| {
            let Chances { all, counterparts } = ground(hosts, devices, shares).chances();
            (all, counterparts)
        };
        assert_eq!(chances(&[0, 0, 1, 1], &[1, 2, 3, 4], false), (true, true));
        assert_eq!(chances(&[0, 0, 1, 1], &[1, 1, 2, 2], false), (false, true));
        assert_eq!(chances(&[0, 0, 1, 1], &[1, 1, 1, 1], false), (false, false));
        assert_eq!(chances(&[0, 0, 1, 1], &[1, 1, 1, 1], true), (true, true));
    }

    #[test]
    fn what_a_rank_says_survives_the_journey() {
        for asked in DeviceEngine::ALL.map(Some).into_iter().chain([None]) {
            let (rank, device) = (Rank(70_000), Uuid(*b"0123456789abcdef"));
            let said = Said { rank, device, asked, nccl_shares: asked.is_none() };
            assert_eq!(Said::from_bytes(&said.to_bytes()), said);
        }
    }

    #[test]
    fn the_environment_names_an_engine() {
        let with = |value: &str| DeviceOptions::from_lookup(|_| Some(value.to_owned()));
        for engine in DeviceEngine::ALL {
            assert_eq!(with(engine.name()).unwrap().engine, Some(engine));
        }
        assert_eq!(with("auto").unwrap().engine, None);
        assert_eq!(with("").unwrap().engine, None);
        let error = with("windows").unwrap_err().to_string();
        assert!(error.starts_with("UNISONO_DEVICE_ENGINE=windows: unknown engine"), "{error}");
    }
}
