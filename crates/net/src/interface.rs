//! Which of the machine's addresses the ranks use among themselves.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// An interface that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceError {
    /// No interface has this name or address.
    #[error("UNISONO_INTERFACE={wanted}: no such interface or address; this machine has {known}")]
    Unknown {
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: String,
    },
    /// The system does not tell its interfaces.
    #[error("cannot list the network interfaces: {0}")]
    Unlisted(String),
}

/// The address to listen on: that of the interface which `UNISONO_INTERFACE` names, by name or by
/// address; where it has several, one of the family of `usual` is preferred. `usual` without it.
pub fn own_address(usual: IpAddr) -> Result<IpAddr, InterfaceError> {
    match std::env::var("UNISONO_INTERFACE") {
        Ok(wanted) if !wanted.is_empty() => resolve(&wanted, usual),
        _ => Ok(usual),
    }
}

/// An address on no machine's own network, and on no other: packets to it would take the default route.
pub const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// The address of this machine from which it would reach another. No packet is sent: the system looks up the route.
pub fn address_toward(other: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match other {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((other, 9))?;
    Ok(socket.local_addr()?.ip())
}

fn resolve(wanted: &str, like: IpAddr) -> Result<IpAddr, InterfaceError> {
    let all = if_addrs::get_if_addrs().map_err(|e| InterfaceError::Unlisted(e.to_string()))?;
    let all: Vec<(String, IpAddr)> = all.into_iter().map(|i| (i.name.clone(), i.ip())).collect();
    choose(wanted, like, &all)
}

fn choose(wanted: &str, like: IpAddr, all: &[(String, IpAddr)]) -> Result<IpAddr, InterfaceError> {
    let by_address = wanted.parse::<IpAddr>().ok();
    let mut matching: Vec<IpAddr> = all
        .iter()
        .filter(|(name, ip)| name == wanted || Some(*ip) == by_address)
        .map(|(_, ip)| *ip)
        .collect();
    matching.sort_by_key(|ip| ip.is_ipv4() != like.is_ipv4());
    matching.first().copied().ok_or_else(|| InterfaceError::Unknown {
        wanted: wanted.into(),
        known: all.iter().map(|(name, ip)| format!("{name} ({ip})")).collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_found() {
        let (v4, v6) = (IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST));
        let all = [("lo".to_owned(), v4), ("lo".to_owned(), v6)];
        assert_eq!(choose("lo", v4, &all), Ok(v4));
        assert_eq!(choose("lo", v6, &all), Ok(v6));
        assert_eq!(choose("127.0.0.1", v6, &all), Ok(v4));
        let error = choose("eth7", v4, &all).unwrap_err();
        assert!(error.to_string().contains("lo (127.0.0.1)"), "{error}");
    }
}
