//! Opens connections to several members at once, so that who does not answer holds nobody up.
//!
//! A rank that connected to one member after the other would wait at the first that does not answer,
//! and meanwhile be missed by all others. So it *knocks* at all *doors*, and goes on with the handshake
//! wherever something comes back. Strangers who crowd a door may push this rank out before it could
//! introduce itself; then it knocks again.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::fork;
use crate::handshake::{
    HandshakeError, Initiated, Initiator, Introduction, Token, random_nonce, timespec,
};

/// How long a rank that was pushed out at a door waits before it knocks again. Longer: the group
/// forms later. Shorter: a crowded door gets more crowded.
const KNOCK_PAUSE: Duration = Duration::from_millis(5);

/// A connection that is to be opened.
pub struct Door {
    /// To whom, as the caller numbers members.
    pub peer: usize,
    /// Where.
    pub target: Target,
    /// As whom, and what for.
    pub introduction: Introduction,
}

/// Where somebody listens.
#[derive(Clone)]
pub enum Target {
    /// At a TCP port.
    Tcp(SocketAddr),
    /// At a Unix socket in the abstract namespace.
    Unix(String),
}

/// A door that does not open, now or later.
pub struct Refused {
    /// Whose door.
    pub peer: usize,
    /// What happened there.
    pub reason: String,
}

/// Opens all doors, in any order; `opened` gets the connections, blocking. The peers whose doors were
/// not opened until the deadline.
pub fn open_all(
    doors: Vec<Door>,
    token: &Token,
    deadline: Instant,
    mut opened: impl FnMut(Door, Socket),
) -> Result<Vec<usize>, Refused> {
    let now = Instant::now();
    let mut knocks: Vec<Knock> = doors
        .into_iter()
        .map(|door| Knock { door, state: State::Pausing { until: now } })
        .collect();
    loop {
        let mut i = 0;
        while i < knocks.len() {
            let Knock { door, state } = &mut knocks[i];
            match state.advance(door, token) {
                Ok(None) => i += 1,
                Ok(Some(socket)) => opened(knocks.swap_remove(i).door, socket),
                Err(reason) => return Err(Refused { peer: door.peer, reason }),
            }
        }
        if knocks.is_empty() || Instant::now() >= deadline {
            return Ok(knocks.into_iter().map(|knock| knock.door.peer).collect());
        }
        wait(&knocks, deadline);
    }
}

struct Knock {
    door: Door,
    state: State,
}

enum State {
    /// Pushed out, or not begun.
    Pausing { until: Instant },
    /// A TCP connection is being made.
    Connecting(Socket),
    /// The handshake is under way.
    Talking(Socket, Box<Initiator>),
}

impl State {
    /// Does what can be done without waiting; the connection, once it is open.
    fn advance(&mut self, door: &Door, token: &Token) -> Result<Option<Socket>, String> {
        let paused = || State::Pausing { until: Instant::now() + KNOCK_PAUSE };
        loop {
            let was = std::mem::replace(self, paused());
            let step = match was {
                State::Pausing { until } if until > Instant::now() => {
                    *self = was;
                    return Ok(None);
                }
                State::Pausing { .. } => knock(door, token),
                State::Connecting(socket) => match finish_connecting(&socket) {
                    Ok(true) => greet(socket, door, token),
                    Ok(false) => {
                        *self = State::Connecting(socket);
                        return Ok(None);
                    }
                    Err(error) => Err(error.into()),
                },
                State::Talking(socket, mut initiator) => match talk(&socket, &mut initiator) {
                    Ok(true) => return Ok(Some(socket)),
                    Ok(false) => {
                        *self = State::Talking(socket, initiator);
                        return Ok(None);
                    }
                    Err(error) => Err(error),
                },
            };
            match step {
                Ok(state) => *self = state,
                // Pushed out.
                Err(HandshakeError::Truncated) => return Ok(None),
                // A queue of connections that is full refuses Unix sockets this way.
                Err(HandshakeError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(None);
                }
                Err(HandshakeError::Io(error)) => return Err(error.to_string()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

fn knock(door: &Door, token: &Token) -> Result<State, HandshakeError> {
    let (domain, address) = match &door.target {
        Target::Tcp(address) => (Domain::for_address(*address), SockAddr::from(*address)),
        Target::Unix(name) => (Domain::UNIX, abstract_address(name)?),
    };
    let socket = new_socket(domain)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address) {
        Ok(()) => greet(socket, door, token),
        Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
            Ok(State::Connecting(socket))
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the connection is there.
fn finish_connecting(socket: &Socket) -> io::Result<bool> {
    let mut fds = [PollFd::new(socket, PollFlags::OUT)];
    if poll(&mut fds, Some(&timespec(Duration::ZERO)))? == 0 {
        return Ok(false);
    }
    socket.take_error()?.map_or(Ok(true), Err)
}

fn greet(socket: Socket, door: &Door, token: &Token) -> Result<State, HandshakeError> {
    if let Target::Tcp(_) = door.target {
        socket.set_tcp_nodelay(true)?;
    }
    let initiator = Initiator::new(token, &door.introduction, random_nonce()?);
    say(&socket, &initiator.hello())?;
    Ok(State::Talking(socket, Box::new(initiator)))
}

/// Goes on with the handshake; whether it is over.
fn talk(socket: &Socket, initiator: &mut Initiator) -> Result<bool, HandshakeError> {
    loop {
        let mut buffer = [0; 128];
        let wanted = initiator.wanted().min(buffer.len());
        let heard = match rustix::net::recv(socket, &mut buffer[..wanted], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET | Errno::PIPE | Errno::CONNABORTED) => {
                return Err(HandshakeError::Truncated);
            }
            Ok((heard, _)) => heard,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(HandshakeError::Io(error.into())),
        };
        match initiator.feed(&buffer[..heard]).1? {
            Initiated::More => {}
            Initiated::Send(answer) => say(socket, &answer)?,
            Initiated::Done => {
                socket.set_nonblocking(false)?;
                return Ok(true);
            }
        }
    }
}

/// Sends without waiting: the first hundred bytes of a connection fit into its buffer.
fn say(socket: &Socket, bytes: &[u8]) -> Result<(), HandshakeError> {
    match rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(HandshakeError::Io(io::ErrorKind::WriteZero.into())),
        Err(Errno::CONNRESET | Errno::PIPE) => Err(HandshakeError::Truncated),
        Err(error) => Err(HandshakeError::Io(error.into())),
    }
}

/// Waits until something comes back, a pause is over, or the deadline.
fn wait(knocks: &[Knock], deadline: Instant) {
    let mut until = deadline;
    let mut fds = Vec::with_capacity(knocks.len());
    for knock in knocks {
        match &knock.state {
            State::Pausing { until: end } => until = until.min(*end),
            State::Connecting(socket) => fds.push(PollFd::new(socket, PollFlags::OUT)),
            State::Talking(socket, _) => fds.push(PollFd::new(socket, PollFlags::IN)),
        }
    }
    let left = until.saturating_duration_since(Instant::now());
    // Interrupted or failed: the loop comes round again.
    let _ = poll(&mut fds, Some(&timespec(left)));
}

/// A socket that forked children do not hold open.
pub fn new_socket(domain: Domain) -> io::Result<Socket> {
    let no_fork = fork::hold_off();
    let socket = Socket::new(domain, Type::STREAM, None)?;
    no_fork.make_private(&socket);
    Ok(socket)
}

/// The address of a name in the abstract namespace.
pub fn abstract_address(name: &str) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{name}"))
}
