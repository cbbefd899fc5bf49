//! Ranks that are processes: listening sockets, and connections that prove the job's token.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket};
use unisono_net::dial::{Door, Refused};
use unisono_net::keepalive::keep_alive;
use unisono_net::{
    Acceptor, Admission, Connection, Dialer, Introduction, Limits, Target, Token, new_socket,
    timespec,
};

use super::cores::{CoreSet, crowd, shared_cores};
use super::ready::{self, Ready};
use super::staging::{create_region, staging_buffer};
use super::{CONTROL, Connector, DATA, Fabric, Plan, STAGING_BUFFERS, system};
use crate::error::FormError;
use crate::options::Transport;
use crate::schedule::Topology;
use crate::window::region::Region;

/// Connections that wait for their group to form. More than a large job needs; fewer would
/// refuse a member that is early.
const MAX_WAITING: usize = 1 << 16;

/// Handshakes that a rank takes part in at once, however large the job. More: more descriptors for
/// strangers. Fewer: members of a larger job are pushed out, and knock again.
const MAX_HALF_DONE: usize = 1024;

/// How much longer than the timeout a rank waits to hear from the others who is missing.
const REPORT_GRACE: Duration = Duration::from_secs(1);

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
        unix.bind(&Target::Unix(name.clone()).address()?)?;
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
        let on_connection = move |connection, who| deliver.put(rank, connection, who);
        // All ranks may knock at the same moment.
        let limits = Limits::default();
        let limits =
            Limits { half_done: roster.len().clamp(limits.half_done, MAX_HALF_DONE), ..limits };
        let admission = Admission::new(token.clone(), &[CONTROL, DATA]).with_limits(limits);
        let acceptor = Acceptor::start(vec![self.tcp, self.unix], admission, on_connection)?;
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

/// Connections that were accepted and wait for their group.
#[derive(Default)]
struct Inbox {
    /// With when they came.
    waiting: Mutex<HashMap<Introduction, (Connection, Instant)>>,
    arrival: Condvar,
}

impl Inbox {
    fn put(&self, rank: usize, connection: Connection, introduction: Introduction) {
        if introduction.to as usize != rank {
            log::warn!("refused a connection meant for rank {}", introduction.to);
            return;
        }
        let mut waiting = self.waiting.lock().expect("no panic while locked");
        if waiting.len() >= MAX_WAITING {
            log::warn!("refused a connection of rank {}: too many wait", introduction.from);
            return;
        }
        waiting.insert(introduction, (connection, Instant::now()));
        self.arrival.notify_all();
    }

    /// Takes connections as they come, those that are for the places of `wanted`, for an attempt to
    /// form a group that began at `start`; the peers whose have not come until the deadline.
    fn take_all(
        &self,
        mut wanted: HashMap<Introduction, Place>,
        start: Instant,
        deadline: Instant,
        mut taken: impl FnMut(Place, Connection),
    ) -> Vec<usize> {
        let mut waiting = self.waiting.lock().expect("no panic while locked");
        // Those that came before this attempt and are closed were meant for earlier ones, of this group
        // or another. Who came since and has given up may have said why.
        waiting.retain(|_, (waiting, came)| *came >= start || !is_closed(waiting.socket()));
        loop {
            wanted.retain(|introduction, place| {
                let here = waiting.remove(introduction);
                let is_missing = here.is_none();
                if let Some((connection, _)) = here {
                    taken(*place, connection);
                }
                is_missing
            });
            let left = deadline.saturating_duration_since(Instant::now());
            if wanted.is_empty() || left.is_zero() {
                return wanted.into_values().map(|place| place.peer).collect();
            }
            waiting = self.arrival.wait_timeout(waiting, left).expect("no panic while locked").0;
        }
    }
}

/// What a connection is for: a channel to a member.
#[derive(Clone, Copy)]
struct Place {
    peer: usize,
    channel: u32,
}

impl Job {
    /// Makes these channels to all other members; those that were made, by member and channel, and
    /// whether that is all of them. Between two, the higher rank connects to the lower.
    fn channels(
        &self,
        plan: &Plan,
        topology: &Topology,
        numbers: Range<u32>,
        deadline: Instant,
    ) -> (Vec<Vec<Option<Connection>>>, Result<(), FormError>) {
        let start = Instant::now();
        let mut made: Vec<Vec<Option<Connection>>> =
            plan.members.iter().map(|_| numbers.clone().map(|_| None).collect()).collect();
        let together = |peer| topology.together(plan.me, peer);
        let peers = (0..plan.members.len()).filter(|&peer| peer != plan.me);
        let (lower, higher): (Vec<_>, Vec<_>) =
            peers.partition(|&peer| plan.members[peer] < self.rank);
        let introduction = |channel, from, to| Introduction {
            purpose: if channel == 0 { CONTROL } else { DATA },
            epoch: plan.epoch,
            group: plan.id,
            from: from as u32,
            to: to as u32,
            channel,
        };
        let door = |peer: usize, channel| {
            let member = plan.members[peer];
            let address = &self.roster[member];
            let target = match together(peer) {
                true => Target::Unix(address.unix.clone()),
                false => Target::Tcp(address.tcp),
            };
            Door { peer, target, introduction: introduction(channel, self.rank, member) }
        };
        let all = |peers: Vec<usize>| {
            let numbers = numbers.clone();
            peers
                .into_iter()
                .flat_map(move |peer| numbers.clone().map(move |channel| Place { peer, channel }))
        };
        let mut keep = |Place { peer, channel }, connection| {
            made[peer][(channel - numbers.start) as usize] = Some(connection);
        };
        let doors = all(lower).map(|Place { peer, channel }| door(peer, channel)).collect();
        let opened = |door: Door, connection| {
            keep(Place { peer: door.peer, channel: door.introduction.channel }, connection);
        };
        let mut missing = match Dialer::new(&self.token, deadline).dial_all(doors, opened) {
            Ok(missing) => missing,
            Err(Refused { peer, cause }) => {
                let reason = format!("cannot connect to it: {cause}");
                return (made, Err(FormError::Peer { peer, reason }));
            }
        };
        let guests = all(higher)
            .map(|place| (introduction(place.channel, plan.members[place.peer], self.rank), place));
        missing.extend(self.inbox.take_all(guests.collect(), start, deadline, keep));
        missing.sort_unstable();
        missing.dedup();
        if !missing.is_empty() {
            return (made, Err(FormError::Missing { missing, after: plan.options.timeout }));
        }
        let mut all = made.iter().flatten().flatten();
        let kept = all.try_for_each(|made| keep_alive(made.socket(), plan.options.timeout));
        let kept = kept.map_err(system("asking for keepalive probes"));
        (made, kept)
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
        let settings = plan.options.fingerprint();
        let (side, outcome) = self.channels(plan, &topology, 0..1, deadline);
        let mut side: Vec<Option<Connection>> =
            side.into_iter().map(|mut channel| channel.pop().flatten()).collect();
        if let Err(error) = outcome {
            tell(&mut side, &settings, Some(&error));
            return Err(error);
        }
        let deadline = deadline + REPORT_GRACE;
        compare_settings(&mut side, &settings, plan, deadline)?;
        let mut data: Vec<Vec<Connection>> = Vec::new();
        let mut make_links = || {
            let numbers = 1..plan.options.streams as u32 + 1;
            let (made, outcome) = self.channels(plan, &topology, numbers, deadline);
            data =
                made.into_iter().map(|channels| channels.into_iter().flatten().collect()).collect();
            outcome
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
            // A peer that is gone is noticed below.
            let _ = ready.send(side[peer].as_mut().expect("connected above"));
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let mut memories: HashMap<usize, std::os::fd::OwnedFd> = HashMap::new();
        for peer in peers() {
            let from = side[peer].as_mut().expect("connected above");
            if let Some(memory) = ready::receive(from, peer, &settings, deadline)? {
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
        Ok(Fabric { topology, side, data, regions, crowd: self.crowd(plan) })
    }
}

/// Finds out whether all members are there and have the same settings, before anything depends on
/// them: how many data channels to wait for, for instance. Hears everybody out, so that every member
/// learns of a difference, and who has come in time hears from the others who has not.
fn compare_settings(
    side: &mut [Option<Connection>],
    settings: &[u8; 32],
    plan: &Plan,
    deadline: Instant,
) -> Result<(), FormError> {
    tell(side, settings, None);
    let peers = side.iter_mut().enumerate().filter_map(|(peer, s)| s.as_mut().map(|s| (peer, s)));
    let outcomes = peers.map(|(peer, from)| ready::receive(from, peer, settings, deadline));
    let errors: Vec<FormError> = outcomes.filter_map(Result::err).collect();
    let missing: Vec<usize> = errors.iter().filter_map(ready::silent).collect();
    match errors.into_iter().min_by_key(ready::obscurity) {
        None => Ok(()),
        Some(error) if ready::silent(&error).is_some() => {
            Err(FormError::Missing { missing, after: plan.options.timeout })
        }
        Some(error) => Err(error),
    }
}

/// Tells all members that are connected with which settings this rank comes, or why it does not.
fn tell(side: &mut [Option<Connection>], settings: &[u8; 32], failure: Option<&FormError>) {
    for peer in side.iter_mut().flatten() {
        let failure = failure.map(ToString::to_string);
        // A peer that is gone is noticed by whoever hears from it.
        let _ = Ready { settings: *settings, failure, memory: None }.send(peer);
    }
}

/// Whether the other side has closed a connection, whatever it said before.
fn is_closed(socket: &Socket) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&timespec(Duration::ZERO))).is_ok_and(|ready| ready > 0)
}
