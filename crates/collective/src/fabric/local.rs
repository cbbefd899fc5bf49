//! Ranks that are threads of one process: socket pairs and a shared mapping, nothing to dial.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};

use socket2::{Domain, Socket, Type};
use unisono_net::memory::Memory;
use unisono_net::{Connection, descriptors, fork};

use super::cores::{Cores, available_cores};
use super::network::{Arrival, Arrivals, Network, Opening, Use};
use super::staging::HostMemory;
use super::{Connector, Fabric, GroupSetup, system};
use crate::control::overlay;
use crate::error::FormError;
use crate::options::Transport;
use crate::schedule::Topology;

/// Where the threads of a process meet to form groups.
pub struct LocalHub {
    /// The host each rank pretends to be on.
    hosts: Vec<u32>,
    /// For each group, fabrics made by the first member to come, waiting for the others. A member
    /// may be at the next group of the same id while others have not come to this one.
    forming: Mutex<HashMap<u64, VecDeque<Vec<Option<Fabric>>>>>,
}

impl LocalHub {
    /// A meeting place for ranks that share one host.
    pub fn new(world: usize) -> Arc<LocalHub> {
        LocalHub::on_hosts(&vec![0; world])
    }

    /// A meeting place for ranks that behave as if ranks with different numbers were on
    /// different hosts: they share no memory.
    pub fn on_hosts(hosts: &[u32]) -> Arc<LocalHub> {
        Arc::new(LocalHub { hosts: hosts.to_vec(), forming: Mutex::default() })
    }

    fn build(&self, setup: &GroupSetup) -> Result<Vec<Option<Fabric>>, FormError> {
        let world = setup.members.len();
        let hosts: Vec<u32> = setup.members.iter().map(|&m| self.hosts[m.0]).collect();
        let topology = match setup.options.transport {
            Transport::Tcp => Topology::all_apart(world),
            Transport::Auto | Transport::Shm => Topology::new(&hosts),
        };
        let cores = Cores::of(world, available_cores());
        // As far as the system allows: with too few, there is an error below.
        let _ = descriptors::ensure(256 + 128 * world as u64);
        let members: Result<Vec<Member>, _> = (0..world).map(|_| Member::new()).collect();
        let members: Arc<[Member]> = members.map_err(system("making an eventfd"))?.into();
        let mut fabrics: Vec<Fabric> = (0..world)
            .map(|me| Fabric {
                topology: topology.clone(),
                control: Vec::new(),
                regions: Vec::new(),
                cores,
                network: Arc::new(LocalNetwork { me, members: members.clone() }),
            })
            .collect();
        for a in 0..world {
            for b in overlay::neighbours(a, world).into_iter().filter(|b| *b > a) {
                let (here, there) = pair().map_err(system("socketpair"))?;
                fabrics[a].control.push((b, here));
                fabrics[b].control.push((a, there));
            }
        }
        for host in (0..topology.hosts()).filter(|host| topology.members(*host).len() > 1) {
            let first = topology.members(host)[0];
            let host = HostMemory::of(&setup.options, &topology, first);
            let memory = host.create()?;
            for &member in host.members {
                fabrics[member].regions = host.regions(&memory);
            }
        }
        Ok(fabrics.into_iter().map(Some).collect())
    }
}

impl Connector for LocalHub {
    fn connect(self: Arc<Self>, setup: &GroupSetup) -> Result<Fabric, FormError> {
        let mut forming = self.forming.lock().expect("no panic while locked");
        let waiting = forming.entry(setup.id).or_default();
        let place = match waiting.iter().position(|fabrics| fabrics[setup.me].is_some()) {
            Some(place) => place,
            None => {
                waiting.push_back(self.build(setup)?);
                waiting.len() - 1
            }
        };
        let fabric = waiting[place][setup.me].take().expect("chosen by this");
        // Members come in the same order to all of them, so that the first is complete first.
        while waiting.front().is_some_and(|fabrics| fabrics.iter().all(Option::is_none)) {
            waiting.pop_front();
        }
        if waiting.is_empty() {
            forming.remove(&setup.id);
        }
        Ok(fabric)
    }

    fn is_one_machine(&self, _: &GroupSetup) -> bool {
        true
    }
}

/// What the other ranks have opened to one.
struct Member {
    links: Arrivals,
    others: Arrivals,
    /// Streams of links to higher ranks, by rank and number, that either has opened.
    opened: Mutex<HashSet<(usize, u32)>>,
    /// Memory that it offers.
    offered: Mutex<Option<Arc<Memory>>>,
}

impl Member {
    fn new() -> io::Result<Member> {
        let (links, others) = (Arrivals::new()?, Arrivals::new()?);
        let (opened, offered) = Default::default();
        Ok(Member { links, others, opened, offered })
    }
}

/// One rank of a group of threads.
struct LocalNetwork {
    me: usize,
    members: Arc<[Member]>,
}

impl Network for LocalNetwork {
    fn dial(&self, purpose: Use, peer: usize) -> Opening {
        if let Use::Data(channel) = purpose {
            let (lower, higher) = (self.me.min(peer), self.me.max(peer));
            let mut opened = self.members[lower].opened.lock().expect("no panic while locked");
            if !opened.insert((higher, channel)) {
                return Opening::Coming;
            }
        }
        // Without descriptors, it is as if the peer could not be reached.
        let Ok((here, there)) = pair() else { return Opening::Open(None) };
        let Member { links, others, .. } = &self.members[peer];
        let to = if matches!(purpose, Use::Data(_)) { links } else { others };
        to.put(Arrival { peer: self.me, purpose, connection: there });
        Opening::Open(Some(here))
    }

    fn advance(&self, opening: &mut Opening) -> Result<Option<Connection>, String> {
        match opening {
            Opening::Open(connection @ Some(_)) => Ok(connection.take()),
            Opening::Coming => Ok(None),
            _ => Err("no descriptors are left".into()),
        }
    }

    fn links(&self) -> &Arrivals {
        &self.members[self.me].links
    }

    fn others(&self) -> &Arrivals {
        &self.members[self.me].others
    }

    fn offer(&self, memory: Option<&Arc<Memory>>) {
        let mut offered = self.members[self.me].offered.lock().expect("no panic while locked");
        *offered = memory.cloned();
    }

    fn take(
        &self,
        peer: usize,
        bytes: usize,
        _over: &dyn Fn() -> bool,
    ) -> Result<Arc<Memory>, String> {
        let offered = self.members[peer].offered.lock().expect("no panic while locked");
        let file = offered.as_ref().and_then(|memory| memory.file());
        let file = file.ok_or("it offers no memory")?;
        // Mapped again, as in another process: what a rank does to its mapping is no other's affair.
        Memory::open(file, bytes).map(Arc::new).map_err(|error| error.to_string())
    }
}

impl Drop for LocalNetwork {
    fn drop(&mut self) {
        self.links().close();
        self.others().close();
    }
}

/// Two ends of a connection inside this process.
fn pair() -> io::Result<(Connection, Connection)> {
    let no_fork = fork::hold_off();
    let (here, there) = Socket::pair(Domain::UNIX, Type::STREAM, None)?;
    no_fork.make_private(&here);
    no_fork.make_private(&there);
    Ok((here.into(), there.into()))
}
