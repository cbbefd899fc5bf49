//! Connections to other workers: dialing, greeting, and closing them all at once.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::sync::Mutex;
use std::time::Instant;

use rustix::net::RecvFlags;
use socket2::{Domain, Socket, Type};
use unisono_collective::fork;
use unisono_collective::handshake::{HandshakeError, Introduction, Purpose, TimedStream, initiate};

use super::node::Shared;
use super::weights::lock;
use super::wire::{Kind, Message, Shape};

/// Every socket of a node. They are kept here as well as with the thread that uses them, because
/// whoever shuts a socket down ends every wait on it.
#[derive(Default)]
pub struct Sockets(Mutex<Register>);

#[derive(Default)]
struct Register {
    closed: bool,
    entries: u64,
    open: HashMap<End, (u64, Socket)>,
}

/// Which connection it is: there is one in each direction between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The worker of that rank dialed.
    From(u32),
    /// This worker dialed that rank.
    To(u32),
}

impl Sockets {
    /// Keeps `socket`, in place of an older one between the same ends, which is shut down. Returns what
    /// to [`forget`](Sockets::forget) it by, and fails once all were closed.
    pub fn keep(&self, end: End, socket: &Socket) -> io::Result<u64> {
        let copy = fork::duplicate(socket)?;
        let mut register = lock(&self.0);
        if register.closed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        register.entries += 1;
        let entry = register.entries;
        if let Some((_, older)) = register.open.insert(end, (entry, copy)) {
            let _ = older.shutdown(Shutdown::Both);
        }
        Ok(entry)
    }

    /// Lets go of a socket whose thread is done with it, unless another one took its place.
    pub fn forget(&self, end: End, entry: u64) {
        let mut register = lock(&self.0);
        if register.open.get(&end).is_some_and(|(kept, _)| *kept == entry) {
            register.open.remove(&end);
        }
    }

    /// Shuts all sockets down, those to come included.
    pub fn close(&self) {
        let mut register = lock(&self.0);
        register.closed = true;
        for (_, (_, socket)) in register.open.drain() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A connection this worker dialed and on which both greeted.
pub struct Connection {
    socket: Socket,
    /// The worker at the other end.
    pub partner: u32,
    /// What it said about itself.
    pub greeting: Message,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    /// It trains another model, of this shape.
    #[error("it trains another model")]
    OtherModel { theirs: Shape, joining: bool },
}

impl DialError {
    /// Whether trying again will not help, so that the user should hear of it.
    pub fn is_lasting(&self) -> bool {
        use HandshakeError::*;
        match self {
            DialError::Io(_) | DialError::Handshake(TimedOut | Truncated | Io(_)) => false,
            DialError::Handshake(_) | DialError::OtherModel { .. } => true,
        }
    }
}

impl Connection {
    /// Dials `partner` and greets.
    pub fn dial(node: &Shared, partner: u32, deadline: Instant) -> Result<Connection, DialError> {
        if node.is_cut(partner) {
            return Err(io::Error::from(io::ErrorKind::HostUnreachable).into());
        }
        let address = node.addresses[partner as usize];
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        // From here on closing the node ends the attempt.
        let entry = node.sockets.keep(End::To(partner), &socket)?;
        let greeted = Connection::open(node, &socket, partner, deadline);
        match greeted {
            Ok(greeting) => Ok(Connection { socket, partner, greeting }),
            Err(error) => {
                node.sockets.forget(End::To(partner), entry);
                Err(error)
            }
        }
    }

    fn open(
        node: &Shared,
        socket: &Socket,
        partner: u32,
        deadline: Instant,
    ) -> Result<Message, DialError> {
        let address = node.addresses[partner as usize];
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        socket.connect_timeout(&address.into(), left)?;
        // With nobody listening on a port from the ephemeral range, a socket can reach itself.
        if socket.local_addr()?.as_socket() == Some(address) {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        socket.set_tcp_nodelay(true)?;
        let introduction = Introduction {
            purpose: Purpose::Gossip,
            epoch: node.life,
            group: 0,
            from: node.rank,
            to: partner,
            channel: 0,
        };
        initiate(socket, &node.token, &introduction, deadline)?;
        let mut stream = TimedStream::new(socket, deadline);
        node.greeting().send(&mut stream, &[])?;
        let greeting = Message::receive(&mut stream)?;
        match greeting.kind {
            Kind::Greeting { .. } if greeting.shape == node.shape => Ok(greeting),
            Kind::Greeting { joining } => {
                Err(DialError::OtherModel { theirs: greeting.shape, joining })
            }
            _ => Err(io::Error::from(io::ErrorKind::InvalidData).into()),
        }
    }

    /// The connection as a stream that ends at `deadline`.
    pub fn until(&self, deadline: Instant) -> TimedStream<'_> {
        TimedStream::new(&self.socket, deadline)
    }

    /// Whether the other end is still there, as far as is known here: while nothing was asked, it has
    /// nothing to say but goodbye.
    pub fn is_quiet(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&self.socket, &mut [0u8; 1], flags) == Err(rustix::io::Errno::AGAIN)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The copy kept for closing would hold the connection open.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
