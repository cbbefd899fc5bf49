//! An elastic job of several machines, whose launchers come and go, and meet by etcd.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use unisono_net::interface::{ELSEWHERE, InterfaceError, address_toward, own_address};

use crate::etcd::{Endpoints, Etcd, EtcdError, Settings, Until};
use crate::membership::machines::{EtcdRecord, Store};

/// An elastic job of several machines.
#[derive(Clone)]
pub struct SharedJob {
    /// Where its record is kept.
    pub store: Arc<dyn Store>,
    /// The address at which other machines can reach this one.
    pub ip: IpAddr,
    /// The name of this machine, for people.
    pub host: String,
    /// Settings that must be equal on all machines, as text.
    pub equal: String,
}

/// Why a job cannot be shared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// It cannot be called so.
    #[error(
        "--job {name}: use a name of letters, digits, '-', '_' and '.', of at most {LONGEST_NAME} characters"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// None of the hosts of etcd has an address.
    #[error("--etcd {endpoints}: no address is known for any of these hosts")]
    NoAddress {
        /// Where etcd should be.
        endpoints: String,
    },
    /// The interface of `UNISONO_INTERFACE` does not exist.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// etcd does not answer, or not as it should.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// The longest name of a job.
const LONGEST_NAME: usize = 128;

impl SharedJob {
    /// The job of this name in etcd.
    pub fn in_etcd(
        endpoints: &Endpoints,
        settings: &Settings,
        name: &str,
        equal: String,
        patience: Duration,
    ) -> Result<SharedJob, ShareError> {
        let ip = own_address(toward(endpoints)?)?;
        let store = Arc::new(record_in_etcd(endpoints, settings, name, patience)?);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(SharedJob { store, ip, host, equal })
    }
}

/// The record of the job of this name in etcd.
pub fn record_in_etcd(
    endpoints: &Endpoints,
    settings: &Settings,
    name: &str,
    patience: Duration,
) -> Result<EtcdRecord, ShareError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(is_allowed) {
        return Err(ShareError::Name { name: name.to_owned() });
    }
    let etcd = Etcd::connect(endpoints, settings, Until::within(patience))?;
    Ok(EtcdRecord::new(etcd, name))
}

/// The address of this machine from which it reaches etcd: others that reach etcd as well can reach it there. On the
/// machine on which etcd runs, its name often stands for a loopback address, at which no other machine would find
/// this one.
fn toward(endpoints: &Endpoints) -> Result<IpAddr, ShareError> {
    let addresses = endpoints.hosts().filter_map(|host| host.to_socket_addrs().ok()).flatten();
    let own = addresses.filter_map(|address: SocketAddr| address_toward(address.ip()).ok());
    let own: Vec<IpAddr> = own.collect();
    let mut hosts = endpoints.hosts();
    let is_named = hosts.any(|(host, _)| host != "localhost" && host.parse::<IpAddr>().is_err());
    let outward = is_named.then(|| address_toward(ELSEWHERE).ok()).flatten();
    best(&own, outward).ok_or_else(|| ShareError::NoAddress { endpoints: endpoints.to_string() })
}

/// Of addresses of this machine, one that others can reach; `outward` is that of its default route.
fn best(own: &[IpAddr], outward: Option<IpAddr>) -> Option<IpAddr> {
    let reachable = own.iter().copied().find(|ip| !ip.is_loopback());
    reachable.or(outward).or(own.first().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_other_machines_can_reach_is_preferred() {
        let [local, one, other]: [IpAddr; 3] =
            ["127.0.0.1", "10.0.0.7", "192.168.0.7"].map(|ip| ip.parse().unwrap());
        assert_eq!(best(&[local, one], Some(other)), Some(one));
        assert_eq!(best(&[local], Some(other)), Some(other));
        assert_eq!(best(&[local], None), Some(local));
        assert_eq!(best(&[], None), None);
    }
}
