//! Worlds of ranks for tests, on every transport, and what their operations must give.
#![allow(dead_code, reason = "every test file uses another part")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use unisono_collective::fabric::{Address, Endpoint};
use unisono_collective::handshake::Token;
use unisono_collective::{Epoch, Group, Options, Transport};

/// How the ranks of a test world are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Threads over socket pairs and shared mappings.
    Local,
    /// Threads that behave as if every two ranks shared a host.
    LocalHosts,
    /// Sealed memory passed over Unix sockets.
    Shm,
    /// TCP over IPv4 loopback.
    Tcp,
    /// TCP over IPv6 loopback.
    Tcp6,
}

impl Kind {
    pub const ALL: [Kind; 5] = [Kind::Local, Kind::LocalHosts, Kind::Shm, Kind::Tcp, Kind::Tcp6];

    /// Forms a world; all ranks live in this process.
    pub fn start(self, world: usize, options: &Options) -> Vec<Group> {
        let mut options = options.clone();
        match self {
            Kind::Local => Group::local(world, &options).expect("a local world forms"),
            Kind::LocalHosts => {
                let hosts: Vec<u32> = (0..world as u32).map(|r| r / 2).collect();
                Group::local_on_hosts(&hosts, &options).expect("a local world forms")
            }
            Kind::Shm => {
                options.transport = Transport::Shm;
                endpoints(world, IpAddr::V4(Ipv4Addr::LOCALHOST), &options)
            }
            Kind::Tcp => {
                options.transport = Transport::Tcp;
                endpoints(world, IpAddr::V4(Ipv4Addr::LOCALHOST), &options)
            }
            Kind::Tcp6 => {
                options.transport = Transport::Tcp;
                endpoints(world, IpAddr::V6(Ipv6Addr::LOCALHOST), &options)
            }
        }
    }
}

/// A world of ranks that meet over real sockets.
fn endpoints(world: usize, ip: IpAddr, options: &Options) -> Vec<Group> {
    let token = Token::random().expect("randomness");
    let endpoints: Vec<Endpoint> =
        (0..world).map(|_| Endpoint::bind(ip).expect("loopback has a free port")).collect();
    let roster: Vec<Address> = endpoints.iter().map(|e| e.address().clone()).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = endpoints
            .into_iter()
            .enumerate()
            .map(|(rank, endpoint)| {
                let (token, roster) = (token.clone(), roster.clone());
                scope.spawn(move || {
                    let connector = endpoint.open(rank, token, roster).expect("an acceptor starts");
                    Group::world(connector, Epoch::new(0), rank, world, options.clone())
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap().expect("the world forms")).collect()
    })
}

/// Runs `body` on every rank at once; the results in rank order.
pub fn on_all<R: Send>(groups: &[Group], body: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups.iter().map(|g| scope.spawn(move || body(g))).collect();
        ranks.into_iter().map(|r| r.join().expect("no rank panics")).collect()
    })
}
