//! Where the ranks of a job find each other: each rank brings one small blob and leaves with all of
//! them, in rank order.
//!
//! A [`Server`] (in the launcher, or in rank 0 if another launcher started the job) collects the
//! blobs. A rank calls [`connect`], learns by which of its addresses the others can reach it
//! ([`Session::local_ip`]), and calls [`Session::exchange`]. Either every rank gets the whole
//! roster, or the rendezvous is *aborted*, and all connected ranks learn why: which rank left, never
//! came, or died before it came.
//!
//! The handshake of every connection proves the job's token. Ranks that were given none prove
//! the public token of the job's name instead, and the true one, made by rank 0, travels in the
//! reply; rank 0 then logs that the job trusts every process that can reach its rendezvous.
//!
//! This happens once in the life of a group, with one connection per rank. Blocking sockets with
//! deadlines and one thread with `poll` do it in less code than an asynchronous runtime, start
//! no thread pool inside the process of a user's program, and behave the same under a debugger.

mod compact;
mod listen;
mod roster;
mod seek;
mod server;

pub(crate) use listen::listen;
use listen::listen_for;
pub use roster::{Abort, JoinRefusal, Roster};
pub(crate) use seek::{SILENCE, Sought};
pub use server::Server;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use socket2::Socket;
use unisono_net::frame::{FrameError, receive, send};
use unisono_net::interface::{ELSEWHERE, address_toward};
use unisono_net::{Acceptor, Connection, HandshakeError, Introduction, Purpose, Token};

use self::compact::Compact;
use self::seek::describe;
use crate::place::{Place, Rendezvous};

/// Connections of ranks that look for their peers.
pub const RENDEZVOUS: Purpose = Purpose::new(*b"rdzv");

/// The largest blob a rank may bring. Larger would let a rank say more; the roster that every
/// rank receives has `world` times this size at most.
pub const MAX_BLOB: usize = 4096;

/// What a rank leaves the rendezvous with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// The job's token: what every connection between ranks must prove.
    pub token: Token,
    /// What every rank brought, by rank.
    pub blobs: Vec<Vec<u8>>,
}

/// Why the rendezvous failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// No process of this job answered until the deadline. Is rank 0 (or the launcher) running, and
    /// can this machine reach it?
    #[error(
        "no process of this job answered at {address} in time ({last}); check that rank 0 or the launcher runs there and can be reached"
    )]
    Unreachable {
        /// Where it was looked for.
        address: String,
        /// What the last attempt ran into.
        last: String,
    },
    /// The launcher answered and turned this process away, or could not be trusted.
    #[error("the rendezvous at {address} is not this job's: {cause}")]
    Handshake {
        /// Where.
        address: String,
        /// Why.
        #[source]
        cause: HandshakeError,
    },
    /// Rank 0 could not listen on any of the candidate ports.
    #[error("rank 0 cannot listen at {address}: {cause}")]
    Listen {
        /// Host and ports that were tried.
        address: String,
        /// What the last of them said.
        #[source]
        cause: io::Error,
    },
    /// The roster has no place for this rank: fix how the job was started.
    #[error("the rendezvous refused this rank: {0}")]
    Refused(#[source] JoinRefusal),
    /// The rendezvous was called off for all ranks.
    #[error("the rendezvous was called off: {0}")]
    Aborted(#[source] Abort),
    /// The host of the rendezvous disappeared.
    #[error(
        "the connection to rank 0 or the launcher, which brings the ranks together, was lost: {0}; see what it printed"
    )]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The host of the rendezvous did not answer until the deadline.
    #[error(
        "rank 0 or the launcher, which brings the ranks together, did not answer in time; see whether it still runs"
    )]
    TimedOut,
    /// The blob is too large; the limit is [`MAX_BLOB`].
    #[error("this rank brings {len} bytes to the rendezvous, where {MAX_BLOB} are allowed")]
    BlobTooLarge {
        /// The size of the blob.
        len: usize,
    },
    /// A local resource is missing.
    #[error("the rendezvous could not start: {0}")]
    Io(#[from] io::Error),
}

/// A rank's connection to the rendezvous, before it has brought its blob.
///
/// Dropping it aborts the rendezvous for the others.
#[derive(Debug)]
pub struct Session {
    token: Option<Token>,
    encrypt: bool,
    world: u32,
    deadline: Instant,
    local_ip: IpAddr,
    /// None in a world of one.
    connection: Option<Connection>,
    host: Option<Host>,
}

/// The rendezvous as rank 0 hosts it.
#[derive(Debug)]
struct Host {
    server: Server,
    /// Keeps the port open as long as the server lives.
    _acceptor: Acceptor,
}

/// What a rank says to the server.
#[derive(Serialize, Deserialize)]
enum Request {
    /// Asks for this connection's rank to be put on the roster.
    Join {
        /// The world as the rank knows it.
        world: u32,
        /// After how many milliseconds the rank gives up.
        patience_ms: u64,
    },
    /// What the rank brings.
    Offer(Vec<u8>),
}

/// The one thing the server says to a rank.
#[derive(Serialize, Deserialize)]
enum Reply {
    Gathered { token: Option<[u8; 32]>, blobs: Compact },
    Refused(JoinRefusal),
    Aborted(Abort),
}

/// How much longer than its own patience a rank waits to be told who is missing.
const REPORT_GRACE: Duration = Duration::from_secs(2);

/// Finds the rendezvous of the job, or, as rank 0 of a job without one, starts it. What is said there, and
/// later between the ranks, is encrypted or not as all of them say.
pub fn connect(
    place: &Place,
    encrypt: bool,
    deadline: Instant,
) -> Result<Session, RendezvousError> {
    let session = |local_ip, connection, host| Session {
        token: place.token.clone().map(|token| token.with_encryption(encrypt)),
        encrypt,
        world: place.world,
        deadline,
        local_ip,
        connection,
        host,
    };
    let key = place.token.clone().unwrap_or_else(|| Token::public(&place.job_name));
    let key = key.with_encryption(encrypt);
    let (host, ports, server) = match &place.rendezvous {
        Rendezvous::Alone => return Ok(session(Ipv4Addr::LOCALHOST.into(), None, None)),
        Rendezvous::Launcher { host, port } => (host, vec![*port], None),
        Rendezvous::RankZero { host, ports } if place.rank == 0 => {
            let (server, port) = Host::start(place, host, ports, &key)?;
            (host, vec![port], Some(server))
        }
        Rendezvous::RankZero { host, ports } => (host, ports.clone(), None),
    };
    let introduction = Introduction::new(RENDEZVOUS, place.rank, 0);
    let hosts: &[&str] = match &server {
        // What rank 0's machine is called from outside may lead nowhere from within.
        Some(_) => &[host, "localhost"],
        None => &[host],
    };
    let sought = Sought { hosts, ports: &ports, key: &key, introduction };
    let mut connection = sought.find(deadline)?;
    let local_ip = reachable_ip(connection.socket(), place)?;
    let patience = deadline.saturating_duration_since(Instant::now());
    let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    let join = Request::Join { world: place.world, patience_ms };
    send(&mut connection.until(deadline), &join).map_err(lost)?;
    Ok(session(local_ip, Some(connection), server))
}

impl Session {
    /// The address of this machine by which it reached the rendezvous, and by which the other
    /// ranks are likely to reach it.
    pub fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    /// Brings `blob`; returns when all ranks have brought theirs.
    pub fn exchange(mut self, blob: &[u8]) -> Result<Gathered, RendezvousError> {
        if blob.len() > MAX_BLOB {
            return Err(RendezvousError::BlobTooLarge { len: blob.len() });
        }
        let Some(connection) = &mut self.connection else {
            let token = self.token.map_or_else(Token::random, Ok)?.with_encryption(self.encrypt);
            return Ok(Gathered { token, blobs: vec![blob.to_vec()] });
        };
        let sent = send(&mut connection.until(self.deadline), &Request::Offer(blob.to_vec()));
        let limit = (self.world as usize).saturating_mul(MAX_BLOB + 64).saturating_add(4096);
        let mut stream = connection.until(self.deadline + REPORT_GRACE);
        // A failed send is no news by itself: the server's last words say why it hung up.
        let reply = match receive::<Reply>(&mut stream, limit) {
            Ok(reply) => reply,
            Err(error) => return Err(sent.map_err(lost).err().unwrap_or_else(|| lost(error))),
        };
        let gathered = match reply {
            Reply::Gathered { token, blobs } => self.check(token, blobs)?,
            Reply::Refused(refusal) => return Err(RendezvousError::Refused(refusal)),
            Reply::Aborted(abort) => return Err(RendezvousError::Aborted(abort)),
        };
        drop(self.connection);
        if let Some(host) = self.host {
            // The others' rosters leave from this process, which may end soon.
            host.server.wait_delivered(self.deadline + REPORT_GRACE);
        }
        Ok(gathered)
    }

    fn check(&self, token: Option<[u8; 32]>, blobs: Compact) -> Result<Gathered, RendezvousError> {
        let blobs = blobs.expand(self.world as usize, MAX_BLOB).ok_or_else(|| {
            RendezvousError::Lost(format!("no roster for a world of {}", self.world).into())
        })?;
        let token =
            self.token.clone().or(token.map(Token::from_bytes)).ok_or_else(|| {
                RendezvousError::Lost("the rendezvous handed out no token".into())
            })?;
        Ok(Gathered { token: token.with_encryption(self.encrypt), blobs })
    }
}

impl Host {
    fn start(
        place: &Place,
        host: &str,
        ports: &[u16],
        key: &Token,
    ) -> Result<(Host, u16), RendezvousError> {
        let listen_error =
            |cause| RendezvousError::Listen { address: describe(host, ports), cause };
        let mut last = io::Error::from(io::ErrorKind::InvalidInput);
        for &port in ports {
            match listen_for(host, port) {
                Ok((listeners, port)) => return Host::serve(place, listeners, port, key),
                Err(error) => last = error,
            }
        }
        Err(listen_error(last))
    }

    fn serve(
        place: &Place,
        listeners: Vec<Socket>,
        port: u16,
        key: &Token,
    ) -> Result<(Host, u16), RendezvousError> {
        let token = if place.token.is_some() {
            None
        } else {
            log::warn!(
                "UNISONO_TOKEN is not set: this job trusts every process that can reach its rendezvous on \
                 port {port}"
            );
            Some(Token::random()?)
        };
        let server = Server::start(place.world, token)?;
        let acceptor = Acceptor::start(listeners, server.admission(key), server.doorkeeper())?;
        Ok((Host { server, _acceptor: acceptor }, port))
    }
}

/// The local address of `socket`, unless it cannot be reached from the job's other machines.
fn reachable_ip(socket: &Socket, place: &Place) -> io::Result<IpAddr> {
    let local = socket.local_addr()?.as_socket().map(|address| address.ip().to_canonical());
    let local = local.unwrap_or(Ipv4Addr::LOCALHOST.into());
    let by_name = matches!(&place.rendezvous, Rendezvous::RankZero { host, .. }
        if host != "localhost" && host.parse::<IpAddr>().is_err());
    if !local.is_loopback() || place.single_node() || !by_name {
        return Ok(local);
    }
    // On its own machine a name often stands for a loopback address. The address of the default
    // route is the best guess.
    let guess = address_toward(ELSEWHERE).unwrap_or(local);
    log::warn!("reached the rendezvous by {local}, which other machines cannot; using {guess}");
    Ok(guess)
}

fn lost(error: FrameError) -> RendezvousError {
    match error {
        FrameError::TimedOut => RendezvousError::TimedOut,
        other => RendezvousError::Lost(other.into()),
    }
}
