//! Hosts on one machine, for tests and benchmarks of programs that need several.
//!
//! A [`Lab`] is a switch and `n` [`Host`]s. Each host is a Linux network namespace with its own
//! loopback, its own addresses and one link to the switch; the switch is a bridge in a namespace
//! of its own, so that nothing of a lab shows in, or reaches, the network of the machine. A link
//! carries a fixed rate in each direction and, if asked, delays and loses packets, or gives each
//! TCP connection a rate of its own.
//!
//! ```text
//!   host 0          host 1          host 2
//!   10.77.0.1       10.77.0.2       10.77.0.3
//!     eth0            eth0            eth0      shaped: what the host sends
//!      │               │               │
//!     p0              p1              p2        shaped: what the host receives
//!   ──┴───────────────┴───────────────┴──
//!                  switch
//! ```
//!
//! A lab of several regions ([`Lab::in_regions`]) has such a switch for each, and one more to which those are linked.
//!
//! Faults are injected through the host they strike: [`Host::cut`] and [`Host::heal`] its link,
//! [`Host::kill`] its processes. [`Lab::separate`] splits the network in two. Each verifies its effect and fails when there was none, so a
//! test cannot pass because its fault did nothing.
//!
//! Dropping a lab, also while a panic unwinds, kills what still runs in it and deletes its
//! namespaces. What a process that was itself killed left behind is removed by the next process
//! that builds a lab.
//!
//! A lab needs the programs `ip` and `tc` (iproute2) and the right to create network namespaces; for delay, loss and
//! the rates of connections, which a thread of this process makes, also `/dev/net/tun`.
//! Root has it; elsewhere a user namespace gives it:
//!
//! ```text
//! unshare --map-root-user --net --mount sh -c 'mount -t tmpfs tmpfs /run && cargo test'
//! ```
//!
//! Elsewhere, [`lab_or_skip`] says so and lets a test pass; with `UNISONO_NETLAB=require` it does
//! not. Sockets use the machine's default congestion control.
//!
//! An [`EtcdCluster`] is real etcd, on this machine or with one node on each of some hosts. Where etcd
//! is not installed, [`etcd_or_skip`] does as [`lab_or_skip`] does.
//!
//! # Example
//!
//! ```
//! use std::io::{Read, Write};
//! use std::net::{TcpListener, TcpStream};
//! use unisono_netlab::{Link, Rate, lab_or_skip};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let Some(lab) = lab_or_skip(2, Link::new(Rate::gbit(1))) else { return Ok(()) };
//!
//! // A socket belongs to the host it was made on, wherever it is used afterwards.
//! let listener = lab.host(0).run(|| TcpListener::bind((lab.host(0).address(), 0)))??;
//! let target = listener.local_addr()?;
//! let mut sender = lab.host(1).run(|| TcpStream::connect(target))??;
//! let (mut receiver, from) = listener.accept()?;
//! assert_eq!(from.ip(), lab.host(1).address());
//!
//! sender.write_all(b"hello")?;
//! let mut hello = [0; 5];
//! receiver.read_exact(&mut hello)?;
//!
//! // Programs run on a host as well, and die with it.
//! let mut child = lab.host(1).command("sleep").arg("1000").spawn()?;
//! assert_eq!(lab.host(1).kill()?, 1);
//! assert!(!child.wait()?.success());
//! # Ok(())
//! # }
//! ```

mod error;
mod etcd;
mod flow;
mod host;
mod iproute;
mod lab;
mod link;
mod namespace;
mod owner;
mod relay;
mod wiretap;

pub use error::{Fault, LabError};
pub use etcd::{EtcdCertificates, EtcdCluster, EtcdOptions, etcd_on_or_skip, etcd_or_skip};
pub use host::Host;
pub use lab::{Lab, lab_or_skip, regions_or_skip};
pub use link::{Link, Rate};
pub use wiretap::Wiretap;
