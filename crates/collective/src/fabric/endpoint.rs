//! Ranks that are processes: listening sockets, and connections that prove the job's token.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use socket2::{Domain, SockAddr, Socket, Type};

use super::cores::{CoreSet, crowd, shared_cores};
use super::ready::{self, Ready};
use super::staging::{create_region, staging_buffer};
use super::{Connector, Fabric, Plan, STAGING_BUFFERS, system};
use crate::acceptor::Acceptor;
use crate::error::FormError;
use crate::fork;
use crate::handshake::{self, HandshakeError, Introduction, Purpose, Token};
use crate::options::Transport;
use crate::schedule::Topology;
use crate::side::flow::keep_alive;
use crate::window::region::Region;

/// Connections that wait for their group to form. More than a large job needs; fewer would
/// refuse a member that is early.
const MAX_WAITING: usize = 1 << 16;

/// How long a rank that was pushed out at a door waits before it knocks again. Longer: the group
/// forms later. Shorter: a crowded door gets more crowded.
const KNOCK_PAUSE: Duration = Duration::from_millis(5);

/// Which ranks can share memory: equal on ranks of one machine and one network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostId([u8; 16]);

impl HostId {
    /// This host.
    pub fn current() -> HostId {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&boot).update(network.as_os_str().as_encoded_bytes());
        if boot.is_empty() {
            // Without an identity of the machine, nobody is on the same host.
            let mut random = [0; 16];
            if getrandom::fill(&mut random).is_ok() {
                hasher.update(&random);
            }
        }
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        HostId(id)
    }
}

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// Its host.
    pub host: HostId,
    /// Its TCP socket.
    pub tcp: SocketAddr,
    /// Its Unix socket, in the abstract namespace.
    pub unix: String,
    /// The cores it may use.
    pub cores: CoreSet,
}

/// A rank's listening sockets, before it knows the others.
pub struct Endpoint {
    tcp: Socket,
    unix: Socket,
    address: Address,
}

impl Endpoint {
    /// Listens on a free port of `ip`, and on a Unix socket.
    pub fn bind(ip: IpAddr) -> std::io::Result<Endpoint> {
        let tcp = new_socket(Domain::for_address((ip, 0).into()))?;
        tcp.bind(&SocketAddr::from((ip, 0)).into())?;
        tcp.listen(4096)?;
        let bound = tcp.local_addr()?.as_socket();
        let bound =
            bound.ok_or_else(|| std::io::Error::other("a TCP socket without an address"))?;
        let mut nonce = [0; 12];
        getrandom::fill(&mut nonce).map_err(std::io::Error::from)?;
        let name: String = nonce.iter().map(|b| format!("{b:02x}")).collect();
        let name = format!("unisono-{name}");
        let unix = new_socket(Domain::UNIX)?;
        unix.bind(&abstract_address(&name)?)?;
        unix.listen(4096)?;
        let address =
            Address { host: HostId::current(), tcp: bound, unix: name, cores: CoreSet::current() };
        Ok(Endpoint { tcp, unix, address })
    }

    /// Where the others can reach this rank.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Starts to accept members of the job, whose addresses are known now.
    pub fn open(
        self,
        rank: usize,
        token: Token,
        roster: Vec<Address>,
    ) -> std::io::Result<Arc<dyn Connector>> {
        let inbox = Arc::new(Inbox::default());
        let deliver = inbox.clone();
        let on_connection = move |socket, introduction| deliver.put(rank, socket, introduction);
        let acceptor = Acceptor::start(vec![self.tcp, self.unix], token.clone(), on_connection)?;
        Ok(Arc::new(Job { rank, token, roster, inbox, _acceptor: acceptor }))
    }
}

/// A rank that knows all the others.
struct Job {
    rank: usize,
    token: Token,
    roster: Vec<Address>,
    inbox: Arc<Inbox>,
    _acceptor: Acceptor,
}

/// Why a member did not let this rank in.
struct Unanswered {
    reason: String,
    /// Whether it would be the same the next time.
    is_final: bool,
}

impl From<std::io::Error> for Unanswered {
    fn from(error: std::io::Error) -> Unanswered {
        // A queue of connections that is full refuses Unix sockets this way.
        let is_final = error.kind() != std::io::ErrorKind::WouldBlock;
        Unanswered { reason: error.to_string(), is_final }
    }
}

impl From<HandshakeError> for Unanswered {
    fn from(error: HandshakeError) -> Unanswered {
        let is_final = !matches!(error, HandshakeError::Truncated);
        Unanswered { reason: error.to_string(), is_final }
    }
}

/// Connections that were accepted and wait for their group.
#[derive(Default)]
struct Inbox {
    waiting: Mutex<HashMap<Introduction, Socket>>,
    arrival: Condvar,
}

impl Inbox {
    fn put(&self, rank: usize, socket: Socket, introduction: Introduction) {
        if introduction.to as usize != rank {
            log::warn!("refused a connection meant for rank {}", introduction.to);
            return;
        }
        let mut waiting = self.waiting.lock().expect("no panic while locked");
        if waiting.len() >= MAX_WAITING {
            log::warn!("refused a connection of rank {}: too many wait", introduction.from);
            return;
        }
        waiting.insert(introduction, socket);
        self.arrival.notify_all();
    }

    fn take(&self, wanted: &Introduction, deadline: Instant) -> Option<Socket> {
        let mut waiting = self.waiting.lock().expect("no panic while locked");
        loop {
            if let Some(socket) = waiting.remove(wanted) {
                return Some(socket);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            waiting = self.arrival.wait_timeout(waiting, left).expect("no panic while locked").0;
        }
    }
}

impl Job {
    /// Opens a connection to a member. Strangers who crowd its door may push this rank out before
    /// it could introduce itself; then it knocks again.
    fn dial(
        &self,
        peer: usize,
        unix: bool,
        introduction: &Introduction,
        deadline: Instant,
    ) -> Result<Socket, String> {
        loop {
            match self.knock(peer, unix, introduction, deadline) {
                Ok(socket) => return Ok(socket),
                Err(error) if error.is_final || Instant::now() >= deadline => {
                    return Err(error.reason);
                }
                Err(_) => std::thread::sleep(KNOCK_PAUSE),
            }
        }
    }

    fn knock(
        &self,
        peer: usize,
        unix: bool,
        introduction: &Introduction,
        deadline: Instant,
    ) -> Result<Socket, Unanswered> {
        let address = &self.roster[peer];
        let (socket, target) = if unix {
            (new_socket(Domain::UNIX), abstract_address(&address.unix))
        } else {
            (new_socket(Domain::for_address(address.tcp)), Ok(address.tcp.into()))
        };
        let (socket, target) = (socket?, target?);
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if unix {
            socket.connect(&target)?;
        } else {
            socket.connect_timeout(&target, left)?;
            socket.set_tcp_nodelay(true)?;
        }
        handshake::initiate(&socket, &self.token, introduction, deadline)?;
        Ok(socket)
    }

    /// The connection of one channel between this rank and another member: the higher rank
    /// dials.
    fn link(
        &self,
        plan: &Plan,
        peer: usize,
        unix: bool,
        channel: u32,
        deadline: Instant,
    ) -> Result<Socket, FormError> {
        let (mine, theirs) = (self.rank, plan.members[peer]);
        let dials = mine > theirs;
        let (from, to) = if dials { (mine, theirs) } else { (theirs, mine) };
        let introduction = Introduction {
            purpose: if channel == 0 { Purpose::Control } else { Purpose::Data },
            epoch: plan.epoch,
            group: plan.id,
            from: from as u32,
            to: to as u32,
            channel,
        };
        let socket = if dials {
            self.dial(theirs, unix, &introduction, deadline).map_err(|reason| FormError::Peer {
                peer,
                reason: format!("cannot connect to it: {reason}"),
            })?
        } else {
            self.inbox
                .take(&introduction, deadline)
                .ok_or(FormError::Missing { missing: vec![peer], after: plan.options.timeout })?
        };
        if !unix {
            let kept = keep_alive(&socket, plan.options.timeout);
            kept.map_err(system("asking for keepalive probes"))?;
        }
        Ok(socket)
    }

    /// Ranks of this host per core, whatever the transport.
    fn crowd(&self, plan: &Plan) -> f64 {
        let own = &self.roster[self.rank];
        let here = || plan.members.iter().map(|&m| &self.roster[m]).filter(|a| a.host == own.host);
        crowd(here().count(), shared_cores(&own.cores, here().map(|address| &address.cores)))
    }

    fn topology(&self, plan: &Plan) -> Result<Topology, FormError> {
        let world = plan.members.len();
        if plan.options.transport == Transport::Tcp {
            return Ok(Topology::all_apart(world));
        }
        let hosts: Vec<HostId> = plan.members.iter().map(|&m| self.roster[m].host).collect();
        let number =
            |id: &HostId| hosts.iter().position(|h| h == id).expect("is in the list") as u32;
        let topology = Topology::new(&hosts.iter().map(number).collect::<Vec<_>>());
        if plan.options.transport == Transport::Shm && !topology.is_one_host() {
            return Err(FormError::Transport { transport: Transport::Shm });
        }
        Ok(topology)
    }
}

impl Connector for Job {
    fn connect(self: Arc<Self>, plan: &Plan) -> Result<Fabric, FormError> {
        let world = plan.members.len();
        let deadline = plan.options.deadline(1);
        let topology = self.topology(plan)?;
        let together = |peer: usize| topology.together(plan.me, peer);
        let peers = || (0..world).filter(|&p| p != plan.me);

        // Side channels first: over them every member hears what went wrong elsewhere.
        let mut side: Vec<Option<Socket>> = (0..world).map(|_| None).collect();
        for peer in peers() {
            side[peer] = Some(self.link(plan, peer, together(peer), 0, deadline)?);
        }
        let settings = plan.options.fingerprint();
        compare_settings(&side, &settings, deadline)?;
        let mut data: Vec<Vec<Socket>> = (0..world).map(|_| Vec::new()).collect();
        let mut make_links = || {
            for peer in peers() {
                for channel in 1..=plan.options.streams as u32 {
                    data[peer].push(self.link(plan, peer, together(peer), channel, deadline)?);
                }
            }
            Ok(())
        };
        let members = topology.members(topology.host(plan.me)).to_vec();
        let mut own = None;
        let mut make_memory = || {
            if members.len() > 1 {
                own = Some(create_region(&plan.options)?);
            }
            Ok(())
        };
        let failure: Option<FormError> = make_links().and_then(|()| make_memory()).err();

        for peer in peers() {
            let memory = own.as_ref().filter(|_| together(peer)).and_then(Region::file);
            let ready =
                Ready { settings, failure: failure.as_ref().map(ToString::to_string), memory };
            let socket = side[peer].as_ref().expect("connected above");
            // A peer that is gone is noticed below.
            let _ = ready.send(socket);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let mut memories: HashMap<usize, std::os::fd::OwnedFd> = HashMap::new();
        for peer in peers() {
            let socket = side[peer].as_ref().expect("connected above");
            if let Some(memory) = ready::receive(socket, peer, &settings, deadline)? {
                memories.insert(peer, memory);
            }
        }
        let mut regions = Vec::new();
        if let Some(own) = own {
            let mut own = Some(own);
            for &member in &members {
                regions.push(if member == plan.me {
                    own.take().expect("this rank is one member")
                } else {
                    let memory = memories.remove(&member).ok_or(FormError::Peer {
                        peer: member,
                        reason: "it sent no staging memory".into(),
                    })?;
                    Region::open(memory.as_fd(), STAGING_BUFFERS, staging_buffer(&plan.options))?
                });
            }
        }
        for socket in side.iter().flatten() {
            socket.set_nonblocking(true).map_err(system("making a socket non-blocking"))?;
        }
        Ok(Fabric { topology, side, data, regions, crowd: self.crowd(plan) })
    }
}

/// Finds out whether all members have the same settings, before anything depends on them: how many
/// data channels to wait for, for instance. Hears everybody out, so that every member learns of a
/// difference.
fn compare_settings(
    side: &[Option<Socket>],
    settings: &[u8; 32],
    deadline: Instant,
) -> Result<(), FormError> {
    let peers = || side.iter().enumerate().filter_map(|(peer, s)| s.as_ref().map(|s| (peer, s)));
    for (_, socket) in peers() {
        // A peer that is gone is noticed below.
        let _ = Ready { settings: *settings, failure: None, memory: None }.send(socket);
    }
    let outcomes: Vec<Result<_, FormError>> =
        peers().map(|(peer, socket)| ready::receive(socket, peer, settings, deadline)).collect();
    let is_difference = |outcome: &Result<_, _>| matches!(outcome, Err(FormError::Settings { .. }));
    let (differences, rest): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(is_difference);
    differences.into_iter().chain(rest).try_for_each(|outcome| outcome.map(drop))
}

fn new_socket(domain: Domain) -> std::io::Result<Socket> {
    let no_fork = fork::hold_off();
    let socket = Socket::new(domain, Type::STREAM, None)?;
    no_fork.make_private(&socket);
    Ok(socket)
}

fn abstract_address(name: &str) -> std::io::Result<SockAddr> {
    SockAddr::unix(format!("\0{name}"))
}
