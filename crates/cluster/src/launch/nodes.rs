//! The launchers of several nodes make one job.
//!
//! The launcher of node 0 listens at the agreed address. Each other launcher connects, proves the
//! job's token (or, if no token was given out, the public one of that port), and *registers* with
//! its number of ranks. When all have come, node 0 numbers the ranks node by node and tells each
//! launcher its *assignment*, the token and the port of the rendezvous among it. The agreed port
//! closes; the connections stay open, so that every launcher learns at once when a rank fails or
//! a node disappears:
//!
//! ```text
//! node k ──► node 0    Register   Exited*   Finished | Over(outcome)
//! node 0 ──► node k    Assigned | Rejected             Over(outcome)
//! ```

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::mpsc::{self, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, mem};

use serde::{Deserialize, Serialize};
use socket2::Socket;
use unisono_net::frame::{self, FrameError, FrameReader, receive};
use unisono_net::keepalive::{Flow, keep_alive};
use unisono_net::{Acceptor, Admission, Connection, Introduction, Purpose, Sender, Token};

use super::output::{MAX_TAIL_LINE, TAIL_LINES};
use super::{Event, Launch, LaunchError, Nodes, Outcome, TOO_MANY};
use crate::place::{MAX_WORLD, join_host_port};
use crate::rendezvous::{RendezvousError, SILENCE, Server, Sought, listen};

/// Connections of launchers to that of node 0.
const LAUNCHER: Purpose = Purpose::new(*b"lnch");

/// A job as this launcher takes part in it.
pub(super) struct JobNode {
    pub place: NodePlace,
    pub links: Links,
    /// On node 0 only.
    host: Option<Host>,
}

/// What the ranks of this node need to know.
#[derive(Clone)]
pub(super) struct NodePlace {
    pub node: u32,
    pub nodes: u32,
    pub first_rank: u32,
    pub world: u32,
    /// Where this node finds the rendezvous.
    pub rendezvous: SocketAddr,
    pub master_port: u16,
    pub token: Token,
    /// Where the coordinator of an elastic job listens.
    pub membership: Option<SocketAddr>,
}

struct Host {
    server: Server,
    /// Keeps the rendezvous open.
    _acceptor: Acceptor,
}

/// What launchers say to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Message {
    Register {
        ranks: u32,
        nodes: u32,
    },
    Assigned {
        first_rank: u32,
        world: u32,
        rendezvous: u16,
        master_port: u16,
        token: Option<[u8; 32]>,
    },
    Rejected {
        reason: String,
    },
    Exited {
        rank: u32,
    },
    Finished,
    Over(Outcome),
}

/// The largest message: an outcome with a rank's last words, of which a byte that is no text
/// becomes three.
const MAX_MESSAGE: usize = TAIL_LINES * (3 * MAX_TAIL_LINE + 16) + 1024;

/// How long a launcher that is connected may take to say or hear one thing.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a launcher looks whether what it said was acknowledged. More often: it wakes up for nothing.
/// Less often: a node that disappears is noticed later.
const LOOK: Duration = Duration::from_secs(1);

/// Brings the launchers of all nodes together.
pub(super) fn assemble(
    launch: &Launch,
    events: &mpsc::Sender<Event>,
) -> Result<JobNode, LaunchError> {
    match &launch.nodes {
        None => alone(launch),
        Some(nodes) if nodes.node == 0 => lead(launch, nodes, events),
        Some(nodes) => follow(launch, nodes, events),
    }
}

impl JobNode {
    /// A rank's process ended; see [`Server::gone`].
    pub fn gone(&self, rank: u32) {
        if let Some(host) = &self.host {
            host.server.gone(rank);
        }
    }

    /// Ends the wait of the ranks that are at the rendezvous.
    pub fn abort(&self, outcome: &Outcome) {
        if let Some(host) = &self.host {
            host.server.abort(outcome.to_string());
        }
    }
}

impl Host {
    /// Opens the rendezvous at `ip`, on any free port, to those who hold the token.
    fn open(ip: IpAddr, world: u32, token: &Token) -> Result<(Host, u16), LaunchError> {
        let address = ip.to_string();
        let (listeners, port) =
            listen(&address, 0).map_err(|cause| LaunchError::Listen { address, cause })?;
        let server = Server::start(world, None)?;
        let acceptor = Acceptor::start(listeners, server.admission(token), server.doorkeeper())?;
        Ok((Host { server, _acceptor: acceptor }, port))
    }
}

fn alone(launch: &Launch) -> Result<JobNode, LaunchError> {
    let token = launch.token.clone().map_or_else(Token::random, Ok)?;
    let token = token.with_encryption(launch.encrypt);
    let world = launch.ranks;
    let ip = Ipv4Addr::LOCALHOST.into();
    let (host, port) = Host::open(ip, world, &token)?;
    let rendezvous = SocketAddr::new(ip, port);
    let master_port = free_port()?;
    let place = NodePlace {
        node: 0,
        nodes: 1,
        first_rank: 0,
        world,
        rendezvous,
        master_port,
        token,
        membership: None,
    };
    Ok(JobNode { place, links: Links::default(), host: Some(host) })
}

/// A machine of a job whose launchers meet by etcd: its ranks are numbered from `first_rank`.
pub(super) fn shared(
    launch: &Launch,
    ip: IpAddr,
    first_rank: u32,
    token: Token,
) -> Result<JobNode, LaunchError> {
    let world = first_rank.checked_add(launch.ranks).ok_or(TOO_MANY)?;
    let (host, port) = Host::open(ip, world, &token)?;
    let place = NodePlace {
        node: 0,
        nodes: 1,
        first_rank,
        world,
        rendezvous: SocketAddr::new(ip, port),
        master_port: free_port()?,
        token,
        membership: None,
    };
    Ok(JobNode { place, links: Links::default(), host: Some(host) })
}

/// Node 0: waits for the others, then tells them their places.
fn lead(
    launch: &Launch,
    nodes: &Nodes,
    events: &mpsc::Sender<Event>,
) -> Result<JobNode, LaunchError> {
    let (host_name, port) = (&nodes.rendezvous.0, nodes.rendezvous.1);
    let address = join_host_port(host_name, port);
    let (listeners, port) = listen(host_name, port)
        .map_err(|cause| LaunchError::Listen { address: address.clone(), cause })?;
    if launch.token.is_none() {
        log::warn!(
            "UNISONO_TOKEN is not set: this job trusts every process that can reach {address}"
        );
    }
    let key = launch.token.clone().unwrap_or_else(|| public_key(port));
    let key = key.with_encryption(launch.encrypt);
    let (arrivals, inbox) = channel();
    let admission = Admission::new(key, &[LAUNCHER]);
    let acceptor = Acceptor::start(listeners, admission, move |connection, introduction| {
        let _ = arrivals.send((connection, introduction));
    })?;

    let deadline = launch.deadline();
    let mut others: Vec<Option<(Connection, u32)>> = (1..nodes.count).map(|_| None).collect();
    while others.iter().any(Option::is_none) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((mut connection, introduction)) = inbox.recv_timeout(left) else {
            let missing = (1..).zip(&others).filter(|(_, other)| other.is_none());
            let missing = missing.map(|(node, _)| node).collect();
            return Err(LaunchError::NodesMissing { missing });
        };
        match register(&mut connection, &introduction, nodes, &others) {
            Ok((node, ranks)) => others[node as usize - 1] = Some((connection, ranks)),
            Err(reason) => {
                log::warn!("turned away a launcher: {reason}");
                let _ = tell(&mut connection, &Message::Rejected { reason });
            }
        }
    }
    drop(acceptor);

    let others: Vec<(Connection, u32)> = others.into_iter().flatten().collect();
    let world = others
        .iter()
        .try_fold(launch.ranks, |sum, (_, ranks)| sum.checked_add(*ranks))
        .filter(|world| *world <= MAX_WORLD)
        .ok_or(TOO_MANY)?;
    // By what the others call this machine; its own name for itself may be a loopback address.
    let ips = others.iter().map(|(connection, _)| local_ip(connection.socket()));
    let ips = ips.collect::<io::Result<Vec<_>>>()?;
    let ip = match ips.first() {
        Some(ip) => *ip,
        None => host_name.parse().unwrap_or(Ipv4Addr::LOCALHOST.into()),
    };
    let one_interface = ips.iter().all(|other| *other == ip);
    let listen_at = if one_interface { ip } else { Ipv4Addr::UNSPECIFIED.into() };
    let token = launch.token.clone().map_or_else(Token::random, Ok)?;
    let token = token.with_encryption(launch.encrypt);
    let (host, port) = Host::open(listen_at, world, &token)?;
    let rendezvous = SocketAddr::new(ip, port);
    let master_port = free_port()?;
    let mut first_rank = launch.ranks;
    let mut links = Links::default();
    for (node, (mut connection, ranks)) in (1..).zip(others) {
        let assigned = Message::Assigned {
            first_rank,
            world,
            rendezvous: rendezvous.port(),
            master_port,
            // Nodes that were given the token need not hear it again, in the clear.
            token: launch.token.is_none().then(|| *token.as_bytes()),
        };
        tell(&mut connection, &assigned).map_err(|error| lost(node, &error))?;
        links.add(node, connection, events)?;
        first_rank += ranks;
    }
    let nodes = nodes.count;
    let place = NodePlace {
        node: 0,
        nodes,
        first_rank: 0,
        world,
        rendezvous,
        master_port,
        token,
        membership: None,
    };
    Ok(JobNode { place, links, host: Some(host) })
}

/// Which node it is that has connected, and how many ranks it runs; or why it has no place.
fn register(
    connection: &mut Connection,
    introduction: &Introduction,
    nodes: &Nodes,
    others: &[Option<(Connection, u32)>],
) -> Result<(u32, u32), String> {
    let node = introduction.from;
    let mut stream = connection.until(Instant::now() + PATIENCE);
    let message = receive(&mut stream, MAX_MESSAGE).map_err(|error| error.to_string())?;
    match message {
        Message::Register { nodes: theirs, .. } if theirs != nodes.count => {
            Err(format!("node {node} was started for {theirs} nodes, node 0 for {}", nodes.count))
        }
        Message::Register { .. } if node == 0 || node >= nodes.count => {
            Err(format!("there is no place for a node {node} among {} nodes", nodes.count))
        }
        Message::Register { .. } if others[node as usize - 1].is_some() => {
            Err(format!("another launcher has come as node {node}"))
        }
        Message::Register { ranks, .. } => Ok((node, ranks)),
        _ => Err("a launcher that does not register".into()),
    }
}

/// Every other node: finds node 0 and asks for its place.
fn follow(
    launch: &Launch,
    nodes: &Nodes,
    events: &mpsc::Sender<Event>,
) -> Result<JobNode, LaunchError> {
    let (host, port) = (&nodes.rendezvous.0, nodes.rendezvous.1);
    let deadline = launch.deadline();
    let key = launch.token.clone().unwrap_or_else(|| public_key(port));
    let key = key.with_encryption(launch.encrypt);
    let introduction = Introduction::new(LAUNCHER, nodes.node, 0);
    let sought = Sought { hosts: &[host], ports: &[port], key: &key, introduction };
    let mut connection = sought.find(deadline).map_err(|error| match error {
        RendezvousError::Handshake { address, cause } => LaunchError::Handshake { address, cause },
        RendezvousError::Unreachable { last, .. } => {
            LaunchError::Unreachable { address: join_host_port(host, port), last }
        }
        error => LaunchError::Unreachable {
            address: join_host_port(host, port),
            last: error.to_string(),
        },
    })?;
    let register = Message::Register { ranks: launch.ranks, nodes: nodes.count };
    tell(&mut connection, &register).map_err(|error| lost(0, &error))?;
    // Node 0 answers when the last node has come, or says which did not.
    let mut stream = connection.until(deadline + PATIENCE);
    let (first_rank, world, rendezvous, master_port, token) =
        match receive(&mut stream, MAX_MESSAGE).map_err(|error| lost(0, &error))? {
            Message::Assigned { first_rank, world, rendezvous, master_port, token } => {
                let token = launch.token.clone().or(token.map(Token::from_bytes));
                let token = token.ok_or_else(|| lost(0, &FrameError::Malformed))?;
                let token = token.with_encryption(launch.encrypt);
                (first_rank, world, rendezvous, master_port, token)
            }
            Message::Rejected { reason } => return Err(LaunchError::Rejected { reason }),
            _ => return Err(lost(0, &FrameError::Malformed)),
        };
    let ip = peer_ip(connection.socket())?;
    let mut links = Links::default();
    links.add(0, connection, events)?;
    let place = NodePlace {
        node: nodes.node,
        nodes: nodes.count,
        first_rank,
        world,
        rendezvous: SocketAddr::new(ip, rendezvous),
        master_port,
        token,
        membership: None,
    };
    Ok(JobNode { place, links, host: None })
}

/// The connections to other launchers: on node 0 to all, elsewhere to node 0.
#[derive(Default)]
pub(super) struct Links(Vec<Link>);

struct Link {
    node: u32,
    /// Locked while something is said.
    sender: Mutex<Sender>,
    /// To end the connection.
    socket: Arc<Socket>,
    closed: bool,
}

impl Links {
    fn add(
        &mut self,
        node: u32,
        connection: Connection,
        events: &mpsc::Sender<Event>,
    ) -> io::Result<()> {
        let Connection { sender, mut receiver } = connection;
        let socket = sender.socket().clone();
        keep_alive(&socket, SILENCE)?;
        socket.set_write_timeout(Some(PATIENCE))?;
        // Now and then the reading thread looks whether anything that was sent is acknowledged.
        socket.set_read_timeout(Some(LOOK))?;
        let mut flow = Flow::new(&socket);
        let events = events.clone();
        let listen = move || {
            let mut inbox = FrameReader::default();
            loop {
                match inbox.next(&mut receiver, MAX_MESSAGE) {
                    Ok(Some(message)) => {
                        if events.send(Event::Heard { node, message }).is_err() {
                            return;
                        }
                    }
                    Ok(None) => {
                        let silence = flow.as_mut().and_then(|flow| flow.silence(Instant::now()));
                        if silence.is_some_and(|silence| silence > SILENCE) {
                            break;
                        }
                    }
                    Err(_) => break,
                }
            }
            let _ = events.send(Event::Closed { node });
        };
        std::thread::Builder::new().name("unisono-link".into()).spawn(listen)?;
        let sender = Mutex::new(sender);
        self.0.push(Link { node, sender, socket, closed: false });
        Ok(())
    }

    /// Says something to all of them. Those who cannot be reached will be noticed by their closed
    /// connection.
    pub fn tell(&self, message: &Message) {
        for link in self.0.iter().filter(|link| !link.closed) {
            let mut sender = link.sender.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(error) = frame::send(&mut *sender, message) {
                log::debug!("cannot reach the launcher of node {}: {error}", link.node);
            }
        }
    }

    /// A launcher closed its connection.
    pub fn note_closed(&mut self, node: u32) {
        self.0.iter_mut().filter(|link| link.node == node).for_each(|link| link.closed = true);
    }

    /// Ends the connections; the launchers that are still connected learn the outcome.
    pub fn close(&mut self, outcome: &Outcome) {
        if *outcome == Outcome::Success {
            self.tell(&Message::Over(Outcome::Success));
        }
        for link in mem::take(&mut self.0) {
            // The reading thread holds the same connection: this ends its wait too.
            let _ = link.socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn tell(connection: &mut Connection, message: &Message) -> Result<(), FrameError> {
    frame::send(&mut connection.until(Instant::now() + PATIENCE), message)
}

fn lost(node: u32, error: &FrameError) -> LaunchError {
    LaunchError::Lost { node, reason: error.to_string() }
}

/// What launchers prove to each other where no token was given out: that they look for the same
/// port.
fn public_key(port: u16) -> Token {
    Token::public(&format!("unisono run, port {port}"))
}

fn local_ip(socket: &Socket) -> io::Result<IpAddr> {
    ip_of(socket.local_addr()?)
}

fn peer_ip(socket: &Socket) -> io::Result<IpAddr> {
    ip_of(socket.peer_addr()?)
}

fn ip_of(address: socket2::SockAddr) -> io::Result<IpAddr> {
    let address = address.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
    Ok(address.ip().to_canonical())
}

/// A port for the ranks' own use as `MASTER_PORT`.
///
/// It lies below the range from which Linux takes ports for outgoing connections, so that no
/// passing connection takes it before rank 0 does.
fn free_port() -> io::Result<u16> {
    let mut random = [0; 2];
    for _ in 0..64 {
        getrandom::fill(&mut random).map_err(io::Error::from)?;
        let port = 20_000 + u16::from_le_bytes(random) % 12_000;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return Ok(port);
        }
    }
    // A machine so full of servers: take what the kernel has.
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}
