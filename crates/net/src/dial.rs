//! Opens connections: connects, and proves the job's token.
//!
//! Nothing here blocks but one `poll`, over all sockets of a [`Dialer`] and a [`Signal`]: dialing
//! can be stopped at any time, and goes on with many peers at once, so that one that does not answer holds
//! no other up. Strangers that crowd an acceptor may push this process out before it could introduce
//! itself; [`Dialer::dial_all`] then dials again.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::connection::Connection;
use crate::fork;
use crate::handshake::{
    Encryption, HandshakeError, Initiated, Initiator, Introduction, random_nonce,
};
use crate::keepalive::{SILENCE, keep_alive};
use crate::pace::send_unpaced_within_machine;
use crate::signal::Signal;
use crate::timed::timespec;
use crate::token::Token;

/// How long to wait before a crowded acceptor is dialed again. Longer: connections are made later.
/// Shorter: a crowded acceptor gets more crowded.
const PAUSE: Duration = Duration::from_millis(5);

/// Where a process listens.
#[derive(Clone, Debug)]
pub enum Target {
    /// At a TCP port.
    Tcp(SocketAddr),
    /// At a Unix socket of this name in the abstract namespace.
    Unix(String),
}

impl Target {
    /// The address of the socket.
    pub fn address(&self) -> io::Result<SockAddr> {
        match self {
            Target::Tcp(address) => Ok((*address).into()),
            Target::Unix(name) => SockAddr::unix(format!("\0{name}")),
        }
    }
}

/// How to open connections.
#[derive(Clone)]
pub struct Dialer<'a> {
    token: &'a Token,
    deadline: Instant,
    connect: Option<Duration>,
    silence: Duration,
    abort: Option<&'a Signal>,
}

/// A connection that is to be opened.
pub struct Door {
    /// The peer, as the caller numbers them.
    pub peer: usize,
    /// Where.
    pub target: Target,
    /// Which process opens it, and what for.
    pub introduction: Introduction,
}

/// A door that does not open, now or later.
pub struct Refused {
    /// Whose door.
    pub peer: usize,
    /// What happened there.
    pub cause: HandshakeError,
}

impl<'a> Dialer<'a> {
    /// Proves `token`, and gives up at `deadline`.
    pub fn new(token: &'a Token, deadline: Instant) -> Dialer<'a> {
        Dialer { token, deadline, connect: None, silence: SILENCE, abort: None }
    }

    /// Gives up where nothing answers for so long, before the handshake has begun.
    pub fn connecting_within(self, time: Duration) -> Dialer<'a> {
        Dialer { connect: Some(time), ..self }
    }

    /// Lets connections [break](keep_alive) after so long a silence.
    pub fn with_silence(self, silence: Duration) -> Dialer<'a> {
        Dialer { silence, ..self }
    }

    /// Gives up when this is raised, now or later, by another thread.
    pub fn with_abort(self, abort: &'a Signal) -> Dialer<'a> {
        Dialer { abort: Some(abort), ..self }
    }

    /// Opens a connection, in one attempt, though it waits until there is room in the queue of a Unix
    /// socket.
    pub fn dial(
        &self,
        target: Target,
        introduction: Introduction,
    ) -> Result<Connection, HandshakeError> {
        let door = Door { peer: 0, target, introduction };
        let mut attempts = [Attempt::new(door)];
        loop {
            let [attempt] = &mut attempts;
            if let Some(connection) = attempt.advance(self)? {
                return Ok(connection);
            }
            if attempt.deadline(self) <= Instant::now() {
                return Err(HandshakeError::TimedOut);
            }
            self.wait(&attempts)?;
        }
    }

    /// Opens all doors, in any order; `opened` gets the connections, blocking. Where this process was
    /// pushed out, it dials again. The peers whose doors were not opened until the deadline.
    pub fn dial_all(
        &self,
        doors: Vec<Door>,
        mut opened: impl FnMut(Door, Connection),
    ) -> Result<Vec<usize>, Refused> {
        let mut dials = Dials::new(doors);
        loop {
            dials.advance(self, &mut opened)?;
            if dials.attempts.is_empty() || Instant::now() >= self.deadline {
                return Ok(dials.attempts.into_iter().map(|attempt| attempt.door.peer).collect());
            }
            if let Err(cause) = self.wait(&dials.attempts) {
                return Err(Refused { peer: dials.attempts[0].door.peer, cause });
            }
        }
    }

    /// Waits until something comes back, a pause is over, or a deadline.
    fn wait(&self, attempts: &[Attempt]) -> Result<(), HandshakeError> {
        let mut until = self.deadline;
        let mut fds = Vec::with_capacity(attempts.len() + 1);
        fds.extend(self.abort.map(|abort| PollFd::new(abort, PollFlags::IN)));
        for attempt in attempts {
            until = until.min(attempt.deadline(self)).min(attempt.watch(&mut fds).unwrap_or(until));
        }
        let left = until.saturating_duration_since(Instant::now());
        // Interrupted or failed: the loop comes round again.
        let _ = poll(&mut fds, Some(&timespec(left)));
        match self.abort.is_some() && !fds[0].revents().is_empty() {
            true => Err(HandshakeError::Io(io::ErrorKind::Interrupted.into())),
            false => Ok(()),
        }
    }
}

/// Connections on their way, for a caller that meanwhile waits for other things as well.
#[derive(Default)]
pub struct Dials {
    attempts: Vec<Attempt>,
}

impl Dials {
    /// Nothing happens before it is [advanced](Dials::advance).
    pub fn new(doors: Vec<Door>) -> Dials {
        Dials { attempts: doors.into_iter().map(Attempt::new).collect() }
    }

    /// Whether all connections are open.
    pub fn is_empty(&self) -> bool {
        self.attempts.is_empty()
    }

    /// Does what can be done without waiting; `opened` gets the connections that are open, blocking.
    /// Where this process was pushed out, it dials again. Deadlines are the caller's to keep.
    pub fn advance(
        &mut self,
        dialer: &Dialer<'_>,
        mut opened: impl FnMut(Door, Connection),
    ) -> Result<(), Refused> {
        let mut i = 0;
        while i < self.attempts.len() {
            match self.attempts[i].advance(dialer) {
                Ok(None) | Err(HandshakeError::Truncated) => i += 1,
                Ok(Some(connection)) => opened(self.attempts.swap_remove(i).door, connection),
                Err(cause) => return Err(Refused { peer: self.attempts[i].door.peer, cause }),
            }
        }
        Ok(())
    }

    /// Adds the sockets on which something may come back to those that the caller polls; when to advance
    /// again at the latest.
    pub fn watch<'f>(&'f self, fds: &mut Vec<PollFd<'f>>) -> Option<Instant> {
        self.attempts.iter().filter_map(|attempt| attempt.watch(fds)).min()
    }
}

/// One connection on its way.
struct Attempt {
    door: Door,
    since: Instant,
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

impl Attempt {
    fn new(door: Door) -> Attempt {
        let since = Instant::now();
        Attempt { door, since, state: State::Pausing { until: since } }
    }

    /// When it has taken too long.
    fn deadline(&self, dialer: &Dialer<'_>) -> Instant {
        match (&self.state, dialer.connect) {
            (State::Connecting(_), Some(time)) => dialer.deadline.min(self.since + time),
            _ => dialer.deadline,
        }
    }

    /// Adds its socket to those that are polled; until when it pauses, if it does.
    fn watch<'f>(&'f self, fds: &mut Vec<PollFd<'f>>) -> Option<Instant> {
        match &self.state {
            State::Pausing { until } => return Some(*until),
            State::Connecting(socket) => fds.push(PollFd::new(socket, PollFlags::OUT)),
            State::Talking(socket, _) => fds.push(PollFd::new(socket, PollFlags::IN)),
        }
        None
    }

    /// Does what can be done without waiting; the connection, once it is open.
    fn advance(&mut self, dialer: &Dialer<'_>) -> Result<Option<Connection>, HandshakeError> {
        loop {
            let paused = State::Pausing { until: Instant::now() + PAUSE };
            let step = match std::mem::replace(&mut self.state, paused) {
                State::Pausing { until } if until > Instant::now() => {
                    self.state = State::Pausing { until };
                    return Ok(None);
                }
                State::Pausing { .. } => self.connect(dialer),
                State::Connecting(socket) if !is_connected(&socket)? => {
                    self.state = State::Connecting(socket);
                    return Ok(None);
                }
                State::Connecting(socket) => self.greet(socket, dialer),
                State::Talking(socket, mut initiator) => match talk(&socket, &mut initiator)? {
                    true => return Ok(Some(Connection::new(socket, initiator.take_keys()))),
                    false => {
                        self.state = State::Talking(socket, initiator);
                        return Ok(None);
                    }
                },
            };
            self.state = match step {
                // A queue of connections that is full refuses Unix sockets this way.
                Err(HandshakeError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(None);
                }
                step => step?,
            };
        }
    }

    fn connect(&mut self, dialer: &Dialer<'_>) -> Result<State, HandshakeError> {
        self.since = Instant::now();
        let address = self.door.target.address()?;
        let socket = new_socket(address.domain())?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address) {
            Ok(()) => self.greet(socket, dialer),
            Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
                Ok(State::Connecting(socket))
            }
            Err(error) => Err(HandshakeError::Io(error)),
        }
    }

    fn greet(&self, socket: Socket, dialer: &Dialer<'_>) -> Result<State, HandshakeError> {
        if let Target::Tcp(address) = self.door.target {
            // Where no process listens, the system may connect a socket with itself.
            if socket.local_addr()?.as_socket() == Some(address) {
                return Err(HandshakeError::Io(io::ErrorKind::ConnectionRefused.into()));
            }
            socket.set_tcp_nodelay(true)?;
            send_unpaced_within_machine(&socket);
            keep_alive(&socket, dialer.silence)?;
        }
        let is_local = matches!(self.door.target, Target::Unix(_));
        let encryption = Encryption::of(dialer.token, is_local);
        let introduction = &self.door.introduction;
        let initiator = Initiator::with(dialer.token, introduction, random_nonce()?, encryption);
        say(&socket, &initiator.hello())?;
        Ok(State::Talking(socket, Box::new(initiator)))
    }
}

/// Whether the connection is there.
fn is_connected(socket: &Socket) -> Result<bool, HandshakeError> {
    let mut fds = [PollFd::new(socket, PollFlags::OUT)];
    match poll(&mut fds, Some(&timespec(Duration::ZERO))) {
        Ok(0) | Err(Errno::INTR) => Ok(false),
        Ok(_) => socket.take_error()?.map_or(Ok(true), |error| Err(HandshakeError::Io(error))),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// Goes on with the handshake; whether it is over.
fn talk(socket: &Socket, initiator: &mut Initiator) -> Result<bool, HandshakeError> {
    loop {
        let mut buffer = [0; 128];
        let wanted = initiator.wanted().min(buffer.len());
        let heard = match rustix::net::recv(socket, &mut buffer[..wanted], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(HandshakeError::Truncated),
            Ok((heard, _)) => heard,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(io::Error::from(error).into()),
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
fn say(socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    match rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)? {
        sent if sent == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// A stream socket that forked children do not hold open.
pub fn new_socket(domain: Domain) -> io::Result<Socket> {
    let no_fork = fork::hold_off();
    let socket = Socket::new(domain, Type::STREAM, None)?;
    no_fork.make_private(&socket);
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::handshake::Purpose;
    use crate::{Acceptor, Admission};

    const TOKEN: Token = Token::from_bytes([3; 32]);
    const PURPOSE: Purpose = Purpose::new(*b"test");
    const INTRODUCTION: Introduction =
        Introduction { purpose: PURPOSE, epoch: 1, group: 2, from: 3, to: 4, channel: 5 };
    const HUNG: Duration = Duration::from_secs(30);

    fn silent() -> (TcpListener, Target) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Target::Tcp(listener.local_addr().unwrap());
        (listener, target)
    }

    #[test]
    fn a_dial_ends_when_it_is_told_to() {
        // Nothing answers, neither here nor anywhere in a network for documentation.
        let (_listener, here) = silent();
        let nowhere = Target::Tcp("192.0.2.1:9".parse().unwrap());
        for target in [here, nowhere] {
            let abort = Signal::new().unwrap();
            let ends = abort.clone();
            let start = Instant::now();
            let ending = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                ends.raise();
            });
            let dialer = Dialer::new(&TOKEN, start + 2 * HUNG).with_abort(&abort);
            assert!(dialer.dial(target.clone(), INTRODUCTION).is_err());
            assert!(start.elapsed() < HUNG);
            ending.join().unwrap();
            // And one that comes later never begins to wait.
            assert!(dialer.dial(target, INTRODUCTION).is_err());
        }
    }

    #[test]
    fn a_dial_ends_at_its_deadline() {
        let (_listener, target) = silent();
        let dialer = Dialer::new(&TOKEN, Instant::now() + Duration::from_millis(20));
        let error = dialer.dial(target, INTRODUCTION).unwrap_err();
        assert!(matches!(error, HandshakeError::TimedOut), "{error}");
    }

    /// A socket that dials its own port from it reaches itself, as the system may make any socket do
    /// whose port is in the range it takes ports from.
    #[test]
    fn a_socket_that_reached_itself_is_refused() {
        let socket = new_socket(Domain::IPV4).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        socket.connect(&address.into()).unwrap();
        let target = Target::Tcp(address);
        let attempt = Attempt::new(Door { peer: 0, target, introduction: INTRODUCTION });
        let dialer = Dialer::new(&TOKEN, Instant::now() + HUNG);
        let Err(HandshakeError::Io(error)) = attempt.greet(socket, &dialer) else {
            panic!("it greets itself");
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    /// While a queue is full, a dial waits; it goes on once there is room.
    #[test]
    fn a_full_queue_of_a_unix_socket_is_waited_for() {
        let name = format!("unisono-dial-test-{}", std::process::id());
        let target = Target::Unix(name);
        let listener = new_socket(Domain::UNIX).unwrap();
        listener.bind(&target.address().unwrap()).unwrap();
        listener.listen(0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let socket = new_socket(Domain::UNIX).unwrap();
            socket.set_nonblocking(true).unwrap();
            if socket.connect(&target.address().unwrap()).is_err() {
                break;
            }
            waiting.push(socket);
        }
        let dialer = Dialer::new(&TOKEN, Instant::now() + Duration::from_millis(30));
        let error = dialer.dial(target.clone(), INTRODUCTION).unwrap_err();
        assert!(matches!(error, HandshakeError::TimedOut), "{error}");
        let admission = Admission::new(TOKEN, &[PURPOSE]);
        let _acceptor = Acceptor::start(vec![listener], admission, |_, _| {}).unwrap();
        let dialer = Dialer::new(&TOKEN, Instant::now() + HUNG);
        dialer.dial(target, INTRODUCTION).unwrap();
    }
}
