use std::env;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::host::Host;
use crate::iproute::iproute;
use crate::link::Link;
use crate::namespace::{Door, Namespace};
use crate::owner::Owner;
use crate::relay::Relay;
use crate::{Fault, LabError};

/// Set to `require`, this variable makes [`lab_or_skip`] panic where it would skip.
const MODE: &str = "UNISONO_NETLAB";

/// Numbers the labs of this process.
static LABS: AtomicU64 = AtomicU64::new(0);

/// Some hosts that reach each other, and nothing else, through a switch, or through one for each region.
#[derive(Debug)]
pub struct Lab {
    hosts: Vec<Host>,
    /// Between the switches of regions, where those delay or lose packets.
    _relays: Vec<Relay>,
    /// Ends after what is linked to it.
    _backbone: Option<Switch>,
}

impl Lab {
    /// Builds a lab of `hosts` hosts with one `link` each and returns once all links are up.
    ///
    /// # Errors
    ///
    /// [`LabError::Unavailable`] if this user on this machine cannot have such a lab.
    pub fn new(hosts: usize, link: Link) -> Result<Lab, LabError> {
        Namespace::sweep();
        Lab::build(hosts, &link).map_err(|error| match error {
            LabError::Unavailable(_) => error,
            other => LabError::Unavailable(other.into()),
        })
    }

    /// Builds a lab of several regions: so many hosts in each, which are numbered one region after the other. The hosts have
    /// one link `inside` each, to the switch of their region. All hosts of a region share one link `between`, over which
    /// its switch reaches those of the others.
    ///
    /// # Errors
    ///
    /// As [`Lab::new`].
    pub fn in_regions(regions: &[usize], inside: Link, between: Link) -> Result<Lab, LabError> {
        Namespace::sweep();
        Lab::build_regions(regions, &inside, &between).map_err(|error| match error {
            LabError::Unavailable(_) => error,
            other => LabError::Unavailable(other.into()),
        })
    }

    /// The `index`-th host.
    ///
    /// # Panics
    ///
    /// If there are no more than `index` hosts.
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }

    /// All hosts, in order.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Splits the network in two: these hosts reach each other, and the rest reach each other, but no packet
    /// passes between the two. As after [`Host::cut`], no process is told. Hosts that were separated
    /// before join these.
    ///
    /// # Errors
    ///
    /// [`LabError::NoEffect`] if one of them is separated already, or still is not afterwards.
    pub fn separate(&self, hosts: &[usize]) -> Result<(), LabError> {
        hosts.iter().try_for_each(|host| self.host(*host).separate())
    }

    /// Makes one network of the two again, and returns once a packet of each host that was separated
    /// has passed.
    ///
    /// # Errors
    ///
    /// [`LabError::NoEffect`] if no host is separated, or if one still is afterwards.
    pub fn reunite(&self) -> Result<(), LabError> {
        let mut separated = Vec::new();
        for host in &self.hosts {
            if host.is_separated()? {
                separated.push(host);
            }
        }
        match (separated.is_empty(), self.hosts.first()) {
            (true, Some(first)) => Err(first.no_effect(Fault::Reunite, "no host is separated")),
            _ => separated.into_iter().try_for_each(Host::reunite),
        }
    }

    fn build(hosts: usize, link: &Link) -> Result<Lab, LabError> {
        let (owner, lab) = next()?;
        let switch = Arc::new(Switch::create(owner.name(lab, "switch"), 0)?);
        let hosts = (0..hosts)
            .map(|index| Host::plug(index, owner.name(lab, index), &switch, link))
            .collect::<Result<Vec<_>, _>>()?;
        Lab { hosts, _relays: Vec::new(), _backbone: None }.checked()
    }

    fn build_regions(regions: &[usize], inside: &Link, between: &Link) -> Result<Lab, LabError> {
        let (owner, lab) = next()?;
        let backbone = Switch::create(owner.name(lab, "backbone"), 0)?;
        let (mut hosts, mut relays) = (Vec::new(), Vec::new());
        for (region, count) in regions.iter().enumerate() {
            let name = owner.name(lab, format!("region{region}"));
            let switch = Arc::new(Switch::create(name, region + 1)?);
            relays.extend(backbone.plug(region, &switch, between)?);
            for _ in 0..*count {
                let index = hosts.len();
                hosts.push(Host::plug(index, owner.name(lab, index), &switch, inside)?);
            }
        }
        Lab { hosts, _relays: relays, _backbone: Some(backbone) }.checked()
    }

    /// The lab, once all links of hosts carry packets.
    fn checked(self) -> Result<Lab, LabError> {
        for host in &self.hosts {
            if !host.reaches_switch()? {
                let reason = format!("the link of host {} carries nothing", host.index());
                return Err(LabError::Unavailable(reason.into()));
            }
        }
        Ok(self)
    }
}

/// Whose the next lab is, and its number.
fn next() -> Result<(Owner, u64), LabError> {
    let owner = Owner::current()
        .map_err(|error| LabError::Unavailable(format!("/proc cannot be read: {error}").into()))?;
    Ok((owner, LABS.fetch_add(1, Ordering::Relaxed)))
}

/// Builds a lab, or says on stderr that the calling test is skipped and why.
///
/// Where a skipped test would go unnoticed, `UNISONO_NETLAB=require` makes it fail instead.
///
/// # Panics
///
/// If the lab is required and cannot be built.
pub fn lab_or_skip(hosts: usize, link: Link) -> Option<Lab> {
    or_skip(Lab::new(hosts, link))
}

/// As [`lab_or_skip`], of [several regions](Lab::in_regions).
///
/// # Panics
///
/// As [`lab_or_skip`].
pub fn regions_or_skip(regions: &[usize], inside: Link, between: Link) -> Option<Lab> {
    or_skip(Lab::in_regions(regions, inside, between))
}

fn or_skip(lab: Result<Lab, LabError>) -> Option<Lab> {
    let error = match lab {
        Ok(lab) => return Some(lab),
        Err(error) => error,
    };
    let advice = "run as root, or in a user namespace as unisono-netlab documents";
    skip(&error.to_string(), advice);
    None
}

/// Says on stderr that the calling test is skipped, or panics if it must not be.
pub(crate) fn skip(problem: &str, advice: &str) {
    if env::var_os(MODE).is_some_and(|mode| mode == "require") {
        panic!("{problem}; {advice}");
    }
    let current = thread::current();
    let test = current.name().unwrap_or("a test");
    // Not `eprintln!`, which the test harness swallows when a test passes. A stderr that is
    // closed is no reason to fail.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {problem}; {advice}");
}

/// The bridge to which all hosts are linked, or all of a region, in a namespace of its own. It has an address so that
/// a host can prove that its link works.
#[derive(Debug)]
pub(crate) struct Switch {
    namespace: Namespace,
    /// Its number in the lab.
    number: u8,
}

impl Switch {
    pub(crate) const DEVICE: &str = "switch";
    /// The bridge of the hosts that are separated from the others, once there were some.
    pub(crate) const ISLAND: &str = "island";
    pub(crate) const NETWORK_V4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 0);
    pub(crate) const PREFIX_V4: u8 = 16;
    pub(crate) const NETWORK_V6: Ipv6Addr =
        Ipv6Addr::new(0xfd75, 0x6e69, 0x736f, 0x6e6f, 0, 0, 0, 0);
    pub(crate) const PREFIX_V6: u8 = 64;

    /// Of the switch of a region: its way to the others.
    const UP: &str = "uplink";

    fn create(name: String, number: usize) -> Result<Switch, LabError> {
        let number = u8::try_from(number).ok().filter(|number| *number < 254);
        let number =
            number.ok_or_else(|| LabError::Unavailable("a lab has at most 253 switches".into()))?;
        let namespace = Namespace::create(name)?;
        let switch = Switch { namespace, number };
        let (name, device) = (switch.namespace(), Switch::DEVICE);
        // A bridge takes over the address of one of its ports unless it is given its own, and hosts
        // would go on to send to the former.
        let mac = format!("02:75:6e:69:73:{number:02x}");
        iproute(&format!("ip -n {name} link add {device} address {mac} type bridge"))?;
        let address = format!("{}/{}", switch.address(), Switch::PREFIX_V4);
        iproute(&format!("ip -n {name} addr add {address} dev {device}"))?;
        iproute(&format!("ip -n {name} link set {device} up"))?;
        Ok(switch)
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 255, 254 - self.number)
    }

    /// Links the switch of a region to this one.
    fn plug(&self, region: usize, other: &Switch, link: &Link) -> Result<Option<Relay>, LabError> {
        let (port, up) = (format!("r{region}"), Switch::UP);
        let (here, there) = (self.namespace(), other.namespace());
        let relay = match link.path() {
            Some(path) => {
                let relay = Relay::start((other.door(), up), (self.door(), &port), path);
                let failed = |source: io::Error| LabError::Unavailable(source.into());
                Some(relay.map_err(failed)?)
            }
            None => {
                iproute(&format!(
                    "ip -n {here} link add {port} type veth peer name {up} netns {there}"
                ))?;
                None
            }
        };
        for (namespace, device) in [(here, port.as_str()), (there, up)] {
            // What comes through a switch is not held back by its sender, so both ends drop what does not fit.
            iproute(&link.shape_switch(namespace, device))?;
            let bridge = Switch::DEVICE;
            iproute(&format!("ip -n {namespace} link set {device} master {bridge} up"))?;
        }
        Ok(relay)
    }

    pub(crate) fn namespace(&self) -> &str {
        self.namespace.name()
    }

    /// Makes the island, unless there is one.
    pub(crate) fn make_island(&self) -> Result<(), LabError> {
        let (name, island) = (self.namespace(), Switch::ISLAND);
        if iproute(&format!("ip -n {name} -o link show type bridge"))?.contains(island) {
            return Ok(());
        }
        iproute(&format!("ip -n {name} link add {island} type bridge"))?;
        iproute(&format!("ip -n {name} link set {island} up")).map(drop)
    }

    pub(crate) fn door(&self) -> &Door {
        self.namespace.door()
    }
}
