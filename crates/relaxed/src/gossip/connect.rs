//! Connections to other workers: dialing, greeting, and closing them all at once.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use socket2::Socket;
use unisono_net::{
    Connection as Stream, Dialer, HandshakeError, Introduction, Purpose, Signal, Target,
    TimedStream,
};

use super::node::Shared;
use super::weights::lock;
use super::wire::{Kind, Message, Shape};

/// Connections of workers that average with each other.
pub const GOSSIP: Purpose = Purpose::new(*b"goss");

/// Every socket of a node. They are kept here as well as with the thread that uses them, because
/// to shut a socket down ends every wait on it.
pub struct Sockets {
    register: Mutex<Register>,
    /// Ends attempts to connect.
    abort: Signal,
}

#[derive(Default)]
struct Register {
    closed: bool,
    entries: u64,
    open: HashMap<End, (u64, Arc<Socket>)>,
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
    pub fn new() -> io::Result<Sockets> {
        Ok(Sockets { register: Mutex::default(), abort: Signal::new()? })
    }

    /// Keeps `socket`, in place of an older one between the same ends, which is shut down. Returns what
    /// to [`forget`](Sockets::forget) it by, and fails once all were closed.
    pub fn keep(&self, end: End, socket: &Arc<Socket>) -> io::Result<u64> {
        let mut register = lock(&self.register);
        if register.closed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        register.entries += 1;
        let entry = register.entries;
        if let Some((_, older)) = register.open.insert(end, (entry, socket.clone())) {
            let _ = older.shutdown(Shutdown::Both);
        }
        Ok(entry)
    }

    /// Lets go of a socket whose thread is done with it, unless another one took its place.
    pub fn forget(&self, end: End, entry: u64) {
        let mut register = lock(&self.register);
        if register.open.get(&end).is_some_and(|(kept, _)| *kept == entry) {
            register.open.remove(&end);
        }
    }

    /// Shuts all sockets down, those to come included.
    pub fn close(&self) {
        self.abort.raise();
        let mut register = lock(&self.register);
        register.closed = true;
        for (_, (_, socket)) in register.open.drain() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A connection this worker dialed and on which both greeted.
pub struct Connection {
    stream: Stream,
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
        match self {
            DialError::Io(_) => false,
            DialError::Handshake(error) => error.is_final(),
            DialError::OtherModel { .. } => true,
        }
    }
}

impl Connection {
    /// Dials `partner` and greets.
    pub fn dial(node: &Shared, partner: u32, deadline: Instant) -> Result<Connection, DialError> {
        if node.is_cut(partner) {
            return Err(io::Error::from(io::ErrorKind::HostUnreachable).into());
        }
        let introduction = Introduction::new(GOSSIP, node.rank, partner);
        let introduction = Introduction { epoch: node.life.0, ..introduction };
        let dialer = Dialer::new(&node.token, deadline)
            .with_silence(node.timeout)
            .with_abort(&node.sockets.abort);
        let target = Target::Tcp(node.addresses[partner as usize]);
        let mut stream = dialer.dial(target, introduction)?;
        // From here on closing the node ends every wait on it.
        let entry = node.sockets.keep(End::To(partner), stream.socket())?;
        match greet(node, &mut stream.until(deadline)) {
            Ok(greeting) => Ok(Connection { stream, partner, greeting }),
            Err(error) => {
                node.sockets.forget(End::To(partner), entry);
                Err(error)
            }
        }
    }

    /// The connection as a stream that ends at `deadline`.
    pub fn until(&mut self, deadline: Instant) -> TimedStream<'_> {
        self.stream.until(deadline)
    }

    /// Whether the other end is still there, as far as is known here: while nothing was asked, it has
    /// nothing to say but goodbye.
    pub fn is_quiet(&mut self) -> bool {
        self.stream.receiver.peek(&mut [0]) == Err(rustix::io::Errno::AGAIN)
    }
}

fn greet(node: &Shared, stream: &mut TimedStream<'_>) -> Result<Message, DialError> {
    node.greeting().send(stream, &[])?;
    let greeting = Message::receive(stream)?;
    match greeting.kind {
        Kind::Greeting { .. } if greeting.shape == node.shape => Ok(greeting),
        Kind::Greeting { joining } => {
            Err(DialError::OtherModel { theirs: greeting.shape, joining })
        }
        _ => Err(io::Error::from(io::ErrorKind::InvalidData).into()),
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The copy kept for closing would hold the connection open.
        let _ = self.stream.socket().shutdown(Shutdown::Both);
    }
}
