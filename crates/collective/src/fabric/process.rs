//! Ranks that are processes: connections that prove the job's token.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use unisono_net::dial::{Dials, Door, Refused};
use unisono_net::keepalive::keep_alive;
use unisono_net::memory::{Memory, receive_with};
use unisono_net::{Acceptor, Connection, Dialer, Introduction, Purpose, Target, Token, timespec};

use super::cores::{Cores, shared_cores};
use super::endpoint::{Address, HostId};
use super::forming::form;
use super::inbox::Inbox;
use super::network::{Arrivals, Network, Opening, Use};
use super::{CONTROL, Connector, DATA, Fabric, GroupSetup, MEMORY, MESSAGES, system};
use crate::error::FormError;
use crate::options::Transport;
use crate::schedule::Topology;

/// A deadline that is never reached: a group that has formed has other means to notice that a rank is
/// gone.
const NEVER: Duration = Duration::from_secs(31_536_000);

/// How long a rank that waits for memory sleeps before it looks whether the group still stands.
const NAP: Duration = Duration::from_millis(20);

/// A rank that knows all the others.
pub struct ProcessHub {
    pub(super) rank: usize,
    token: Token,
    roster: Vec<Address>,
    pub(super) inbox: Arc<Inbox>,
    _acceptor: Acceptor,
}

impl ProcessHub {
    /// A rank whose acceptor fills `inbox`.
    pub fn new(
        rank: usize,
        token: Token,
        roster: Vec<Address>,
        inbox: Arc<Inbox>,
        acceptor: Acceptor,
    ) -> ProcessHub {
        ProcessHub { rank, token, roster, inbox, _acceptor: acceptor }
    }

    /// A connection to be opened to a member of a group.
    pub(super) fn door(
        &self,
        setup: &GroupSetup,
        topology: &Topology,
        peer: usize,
        (purpose, group, channel): (Purpose, u64, u32),
    ) -> Door {
        let member = setup.members[peer];
        let address = &self.roster[member.0];
        let target = match topology.together(setup.me, peer) {
            true => Target::Unix(address.unix.clone()),
            false => Target::Tcp(address.tcp),
        };
        let (from, to) = (self.rank as u32, member.0 as u32);
        let introduction = Introduction { purpose, epoch: setup.epoch, group, from, to, channel };
        Door { peer, target, introduction }
    }

    /// How to open connections of a group with this timeout.
    pub(super) fn dialer(&self, timeout: Duration) -> Dialer<'_> {
        Dialer::new(&self.token, Instant::now() + NEVER).with_silence(timeout)
    }

    /// How the ranks of this host share its cores, whatever the transport.
    fn cores(&self, setup: &GroupSetup) -> Cores {
        let own = &self.roster[self.rank];
        let here =
            || setup.members.iter().map(|&m| &self.roster[m.0]).filter(|a| a.host == own.host);
        Cores::of(here().count(), shared_cores(&own.cores, here().map(|address| &address.cores)))
    }

    fn topology(&self, setup: &GroupSetup) -> Result<Topology, FormError> {
        let world = setup.members.len();
        if setup.options.transport == Transport::Tcp {
            return Ok(Topology::all_apart(world));
        }
        let mut known: Vec<HostId> = Vec::new();
        let mut number = |id: HostId| {
            known.iter().position(|host| *host == id).unwrap_or_else(|| {
                known.push(id);
                known.len() - 1
            }) as u32
        };
        let hosts: Vec<u32> =
            setup.members.iter().map(|&m| number(self.roster[m.0].host)).collect();
        let topology = Topology::new(&hosts);
        if setup.options.transport == Transport::Shm && !topology.is_one_host() {
            return Err(FormError::Transport { transport: Transport::Shm });
        }
        Ok(topology)
    }
}

impl Connector for ProcessHub {
    fn connect(self: Arc<Self>, setup: &GroupSetup) -> Result<Fabric, FormError> {
        if setup.options.encrypt != self.token.encrypts() {
            let reason = "the options of the group and the token of the endpoint disagree".into();
            return Err(FormError::System { what: "encryption", reason });
        }
        let topology = self.topology(setup)?;
        let cores = self.cores(setup);
        let (control, regions, network) = form(&self, setup, &topology)?;
        Ok(Fabric { topology, control, regions, cores, network: Arc::new(network) })
    }

    fn is_one_machine(&self, setup: &GroupSetup) -> bool {
        let mut hosts = setup.members.iter().map(|&member| self.roster[member.0].host);
        let first = hosts.next();
        hosts.all(|host| Some(host) == first)
    }

    fn abandon(&self) {
        self.inbox.abandon();
    }
}

/// One instance of a group, as its connections are opened.
pub struct ProcessNetwork {
    hub: Arc<ProcessHub>,
    setup: GroupSetup,
    topology: Topology,
    instance: u64,
    links: Arc<Arrivals>,
    others: Arc<Arrivals>,
}

impl ProcessNetwork {
    /// From now on, connections for this instance are accepted.
    pub fn open(
        hub: &Arc<ProcessHub>,
        setup: &GroupSetup,
        topology: &Topology,
        instance: u64,
    ) -> Result<ProcessNetwork, FormError> {
        let arrivals = || Arrivals::new().map(Arc::new).map_err(system("making an eventfd"));
        let (links, others) = (arrivals()?, arrivals()?);
        hub.inbox.open(instance, setup, &links, &others);
        let (hub, setup, topology) = (hub.clone(), setup.clone(), topology.clone());
        Ok(ProcessNetwork { hub, setup, topology, instance, links, others })
    }

    /// Which instance it is.
    pub fn instance(&self) -> u64 {
        self.instance
    }
}

impl Network for ProcessNetwork {
    fn dial(&self, purpose: Use, peer: usize) -> Opening {
        let (purpose, channel) = match purpose {
            Use::Data(channel) => (DATA, channel),
            Use::Messages => (MESSAGES, 0),
            Use::Control => (CONTROL, 0),
        };
        let what = (purpose, self.instance, channel);
        let dials = || Dials::new(vec![self.hub.door(&self.setup, &self.topology, peer, what)]);
        if purpose != DATA {
            return Opening::Dialing(dials());
        }
        match self.hub.inbox.claim(self.instance, peer, channel) {
            true => Opening::Asking(dials(), None),
            false => Opening::Coming,
        }
    }

    fn advance(&self, opening: &mut Opening) -> Result<Option<Connection>, String> {
        let timeout = self.setup.options.timeout;
        let mut open = None;
        match opening {
            Opening::Open(connection) => open = connection.take(),
            Opening::Dialing(dials) | Opening::Asking(dials, None) => {
                let opened = |_, connection| open = Some(connection);
                let dialed = dials.advance(&self.hub.dialer(timeout), opened);
                dialed.map_err(|Refused { cause, .. }| cause.to_string())?;
            }
            Opening::Asking(..) | Opening::Coming => {}
        }
        if let Opening::Asking(_, asked) = opening {
            *asked = asked.take().or(open.take());
            if let Some(connection) = asked {
                match connection.receiver.receive(&mut [0], RecvFlags::DONTWAIT) {
                    Ok(1..) => open = asked.take(),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    // The other rank opens it, or is gone.
                    Ok(0) | Err(_) => *opening = Opening::Coming,
                }
            }
        }
        if let Some(connection) = &open {
            keep_alive(connection.socket(), timeout).map_err(|error| error.to_string())?;
        }
        Ok(open)
    }

    fn links(&self) -> &Arrivals {
        &self.links
    }

    fn others(&self) -> &Arrivals {
        &self.others
    }

    fn offer(&self, memory: Option<&Arc<Memory>>) {
        match memory {
            Some(memory) => self.hub.inbox.share(self.instance, memory),
            None => self.hub.inbox.keep(self.instance),
        }
    }

    fn take(
        &self,
        peer: usize,
        bytes: usize,
        over: &dyn Fn() -> bool,
    ) -> Result<Arc<Memory>, String> {
        let deadline = self.setup.options.deadline(1);
        let goes_on = || match over() {
            true => Err("the group is over".to_owned()),
            false if Instant::now() > deadline => Err("it did not answer in time".to_owned()),
            false => Ok(()),
        };
        let what = (MEMORY, self.instance, 0);
        let door = self.hub.door(&self.setup, &self.topology, peer, what);
        let mut opening = Opening::Dialing(Dials::new(vec![door]));
        let connection = loop {
            if let Some(connection) = self.advance(&mut opening)? {
                break connection;
            }
            goes_on()?;
            let mut fds = Vec::new();
            let next = opening.watch(&mut fds);
            let left = next.map_or(NAP, |at| at.saturating_duration_since(Instant::now()).min(NAP));
            // Interrupted or failed: the loop comes round again.
            let _ = poll(&mut fds, Some(&timespec(left)));
        };
        connection.socket().set_nonblocking(true).map_err(|error| error.to_string())?;
        loop {
            let mut file = None;
            match (receive_with(connection.socket(), &mut [0], &mut file), file) {
                (Err(Errno::AGAIN | Errno::INTR), _) => goes_on()?,
                (Ok(1), Some(file)) => {
                    let memory = Memory::open(&file, bytes).map_err(|error| error.to_string())?;
                    return Ok(Arc::new(memory));
                }
                _ => return Err("it sent no memory".into()),
            }
            let mut fds = [PollFd::new(&**connection.socket(), PollFlags::IN)];
            // As above.
            let _ = poll(&mut fds, Some(&timespec(NAP)));
        }
    }
}

impl Drop for ProcessNetwork {
    fn drop(&mut self) {
        self.hub.inbox.close(self.instance);
        self.links.close();
        self.others.close();
    }
}
