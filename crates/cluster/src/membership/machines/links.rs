//! The connections between launchers.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use unisono_net::{
    Acceptor, Admission, Connection, Dialer, HandshakeError, Introduction, Purpose, Receiver,
    Sender, Target, Token, frame,
};

use super::launcher::Message;
use super::record::Machine;
use crate::place::MAX_WORLD;
use crate::rendezvous::listen;

/// Connections of launchers to the one that leads.
const MACHINES: Purpose = Purpose::new(*b"mach");

/// The largest message: where as many workers as a job can have stand.
const MAX_MESSAGE: usize = MAX_WORLD as usize * 1024;

/// How long a launcher may take to accept a message. Longer: one that is stopped, and has a full buffer, keeps
/// all others waiting. Shorter: one on a slow network is cut off.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long opening a connection may take. Longer: it shows later that the leader is out of reach. Shorter: one
/// on a slow network is not reached.
const DIALING: Duration = Duration::from_secs(2);

/// What connections bring.
pub enum FromLink {
    /// Another launcher has connected to this one.
    Arrived(u32, Link),
    /// It said something.
    Said(u32, u64, Message),
    /// Its connection has closed.
    Closed(u32, u64),
    /// The connection to the leader is open.
    Linked(Link),
    /// The attempt with this number has failed.
    Unreachable(u64, bool),
    /// The leader said something.
    LeaderSaid(u64, Message),
    /// The connection to the leader has closed.
    LeaderClosed(u64),
}

/// The half of a connection that sends.
pub struct Link {
    sender: Sender,
    number: u64,
}

type Hear = Arc<dyn Fn(FromLink) + Send + Sync>;

/// The connections of a launcher.
pub struct Links {
    token: Token,
    me: u32,
    hear: Hear,
    followers: HashMap<u32, Link>,
    leader: Option<Link>,
    /// The newest attempt to reach a leader.
    attempt: u64,
    /// Keeps the port open.
    _acceptor: Acceptor,
}

static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Opens the port at which other launchers find this one. Until [`Listener::start`] they wait.
pub struct Listener {
    sockets: Vec<socket2::Socket>,
    address: SocketAddr,
}

impl Listener {
    pub fn bind(ip: IpAddr) -> io::Result<Listener> {
        let (sockets, port) = listen(&ip.to_string(), 0)?;
        Ok(Listener { sockets, address: SocketAddr::new(ip, port) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets launchers of the job in. What connections bring goes to `hear`, on other threads.
    pub fn start(self, me: u32, token: &Token, hear: Hear) -> io::Result<Links> {
        let admission = Admission::new(token.clone(), &[MACHINES]);
        let arrived = hear.clone();
        let accept = move |connection: Connection, introduction: Introduction| {
            let machine = introduction.from;
            let hear = arrived.clone();
            let taken = split(connection).and_then(|(link, receiver)| {
                let number = link.number;
                hear(FromLink::Arrived(machine, link));
                read_all(receiver, move |message| {
                    hear(match message {
                        Some(message) => FromLink::Said(machine, number, message),
                        None => FromLink::Closed(machine, number),
                    });
                })
            });
            if let Err(error) = taken {
                log::warn!("cannot hear the launcher of machine {machine}: {error}");
            }
        };
        let acceptor = Acceptor::start(self.sockets, admission, accept)?;
        Ok(Links {
            token: token.clone(),
            me,
            hear,
            followers: HashMap::new(),
            leader: None,
            attempt: 0,
            _acceptor: acceptor,
        })
    }
}

impl Links {
    /// Another launcher has connected.
    pub fn arrived(&mut self, machine: u32, link: Link) {
        if let Some(old) = self.followers.insert(machine, link) {
            close(&old);
        }
    }

    /// Whether another launcher is connected.
    pub fn has(&self, machine: u32) -> bool {
        self.followers.contains_key(&machine)
    }

    /// Whether this is the present connection of another launcher.
    pub fn is_of(&self, machine: u32, number: u64) -> bool {
        self.followers.get(&machine).is_some_and(|link| link.number == number)
    }

    /// The connection to the leader is open; whether it is the one that was wanted last.
    pub fn linked(&mut self, link: Link) -> bool {
        if link.number != self.attempt {
            close(&link);
            return false;
        }
        self.leader = Some(link);
        true
    }

    /// Whether this is the present connection to the leader, or the present attempt.
    pub fn is_leader(&self, number: u64) -> bool {
        self.attempt == number
    }

    /// Opens a connection to the leader, on another thread.
    pub fn open(&mut self, leader: &Machine) {
        self.unlink();
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        self.attempt = number;
        let (token, hear, told) = (self.token.clone(), self.hear.clone(), self.hear.clone());
        let introduction = Introduction::new(MACHINES, self.me, leader.number);
        let address = leader.address;
        let dial = move || {
            let dialer = Dialer::new(&token, Instant::now() + DIALING);
            let dialed = dialer.dial(Target::Tcp(address), introduction);
            let taken = dialed.map_err(|error| is_gone(&error)).and_then(|connection| {
                let (link, receiver) = split(connection).map_err(|_| false)?;
                hear(FromLink::Linked(Link { number, ..link }));
                let hear = hear.clone();
                let told = move |message| {
                    hear(match message {
                        Some(message) => FromLink::LeaderSaid(number, message),
                        None => FromLink::LeaderClosed(number),
                    });
                };
                read_all(receiver, told).map_err(|_| false)
            });
            if let Err(is_gone) = taken {
                hear(FromLink::Unreachable(number, is_gone));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("unisono-seek".into()).spawn(dial) {
            log::warn!("cannot connect to the launcher that coordinates: {error}");
            told(FromLink::Unreachable(number, false));
        }
    }

    /// Closes the connection to the leader.
    pub fn unlink(&mut self) {
        self.attempt = 0;
        if let Some(link) = self.leader.take() {
            close(&link);
        }
    }

    /// Closes the connection of another launcher.
    pub fn close(&mut self, machine: u32) {
        if let Some(link) = self.followers.remove(&machine) {
            close(&link);
        }
    }

    pub fn tell_leader(&mut self, message: &Message) {
        if let Some(link) = &mut self.leader {
            tell(link, message);
        }
    }

    pub fn tell_machine(&mut self, machine: u32, message: &Message) {
        if let Some(link) = self.followers.get_mut(&machine) {
            tell(link, message);
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.followers.values().chain(&self.leader).for_each(close);
    }
}

/// Whether the leader does not listen there any more, rather than that it does not answer: it may have too many
/// others to answer, and closes a connection then.
fn is_gone(error: &HandshakeError) -> bool {
    let is_refused = matches!(error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused);
    // Something else may have taken its port.
    is_refused || error.is_final()
}

fn split(connection: Connection) -> io::Result<(Link, Receiver)> {
    let Connection { sender, receiver } = connection;
    sender.socket().set_read_timeout(None)?;
    sender.socket().set_write_timeout(Some(PATIENCE))?;
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    Ok((Link { sender, number }, receiver))
}

/// Reads one message after the other on a thread of its own; `None` is the end.
fn read_all(
    mut receiver: Receiver,
    told: impl Fn(Option<Message>) + Send + 'static,
) -> io::Result<()> {
    let read = move || {
        while let Ok(message) = frame::receive(&mut receiver, MAX_MESSAGE) {
            told(Some(message));
        }
        told(None);
    };
    std::thread::Builder::new().name("unisono-machine".into()).spawn(read).map(drop)
}

/// One that cannot be reached will be noticed by its closed connection.
fn tell(link: &mut Link, message: &Message) {
    if let Err(error) = frame::send(&mut link.sender, message) {
        log::debug!("cannot reach another launcher: {error}");
        close(link);
    }
}

fn close(link: &Link) {
    let _ = link.sender.socket().shutdown(std::net::Shutdown::Both);
}
