//! Ranks that are threads of one process: socket pairs and shared mappings, nothing to connect.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use socket2::{Domain, Socket, Type};
use unisono_net::{Connection, fork};

use super::cores::{available_cores, crowd};
use super::staging::create_region;
use super::{Connector, Fabric, Plan, system};
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

    fn build(&self, plan: &Plan) -> Result<Vec<Option<Fabric>>, FormError> {
        let world = plan.members.len();
        let hosts: Vec<u32> = plan.members.iter().map(|&m| self.hosts[m]).collect();
        let topology = match plan.options.transport {
            Transport::Tcp => Topology::all_apart(world),
            Transport::Auto | Transport::Shm => Topology::new(&hosts),
        };
        let crowd = crowd(world, available_cores());
        let mut fabrics = Vec::with_capacity(world);
        for _ in 0..world {
            fabrics.push(Fabric {
                topology: topology.clone(),
                side: (0..world).map(|_| None).collect(),
                data: (0..world).map(|_| Vec::new()).collect(),
                regions: Vec::new(),
                crowd,
            });
        }
        let pair = || -> Result<(Connection, Connection), FormError> {
            let no_fork = fork::hold_off();
            let pair = Socket::pair(Domain::UNIX, Type::STREAM, None);
            let (here, there) = pair.map_err(system("socketpair"))?;
            no_fork.make_private(&here);
            no_fork.make_private(&there);
            Ok((here.into(), there.into()))
        };
        for a in 0..world {
            for b in a + 1..world {
                let (here, there) = pair()?;
                fabrics[a].side[b] = Some(here);
                fabrics[b].side[a] = Some(there);
                for _ in 0..plan.options.streams {
                    let (here, there) = pair()?;
                    fabrics[a].data[b].push(here);
                    fabrics[b].data[a].push(there);
                }
            }
        }
        for host in 0..topology.hosts() {
            let members = topology.members(host);
            if members.len() < 2 {
                continue;
            }
            for _ in members {
                let region = create_region(&plan.options)?;
                for &member in members {
                    fabrics[member].regions.push(region.duplicate()?);
                }
            }
        }
        Ok(fabrics.into_iter().map(Some).collect())
    }
}

impl Connector for LocalHub {
    fn connect(self: Arc<Self>, plan: &Plan) -> Result<Fabric, FormError> {
        let mut forming = self.forming.lock().expect("no panic while locked");
        let waiting = forming.entry(plan.id).or_default();
        let place = match waiting.iter().position(|fabrics| fabrics[plan.me].is_some()) {
            Some(place) => place,
            None => {
                waiting.push_back(self.build(plan)?);
                waiting.len() - 1
            }
        };
        let fabric = waiting[place][plan.me].take().expect("chosen by this");
        // Members come in the same order to all of them, so that the first is complete first.
        while waiting.front().is_some_and(|fabrics| fabrics.iter().all(Option::is_none)) {
            waiting.pop_front();
        }
        if waiting.is_empty() {
            forming.remove(&plan.id);
        }
        Ok(fabric)
    }
}
