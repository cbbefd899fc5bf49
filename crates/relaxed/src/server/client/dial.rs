//! Opening a connection to a server.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, TcpKeepalive, Type};
use unisono_collective::handshake::{HandshakeError, Introduction, Purpose, initiate};

use super::options::{ClientOptions, ServerError, Transport};
use super::session::Fault;
use crate::server::link::Link;
use crate::server::shard::unix_address;

/// How long one attempt may take to connect. Longer: whoever asks for the end waits longer for it if
/// nothing answers at the address. Shorter: a far server is never reached.
const CONNECT: Duration = Duration::from_secs(2);

/// How long one handshake may take. A server that is being restarted may have its connections queued
/// by the system meanwhile.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long it may take to reach a server by its Unix socket, which it answers at once unless its machine
/// is busy. Longer: whoever else sits at its name holds a worker up for longer. Shorter: on a busy machine
/// there is no common memory.
const UNIX: Duration = Duration::from_secs(2);

/// How long to wait before a full queue is looked at again.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a server may be out of reach before the system says so, at least. Shorter: a network that
/// recovers from a cut by itself is given up.
const SILENCE: Duration = Duration::from_secs(10);

/// Who opens a connection, and to which server.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub options: &'a ClientOptions,
    pub server: usize,
    /// The worker, or [`NOBODY`](super::visit::NOBODY).
    pub worker: u32,
    /// The most bytes of bulk data in one direction at a time.
    pub most_bulk: usize,
    /// How long a worker may be silent.
    pub timeout: Duration,
}

impl Call<'_> {
    /// Opens a connection: over TCP, and where the server is on this host, by a Unix socket instead, for
    /// the sake of common memory. Whoever else sits at the name of that socket can keep nobody from the
    /// server: it has proven the token over TCP before, and TCP is what remains.
    ///
    /// `opened` gets each socket before anything is done with it, so that it can be shut down at any
    /// time.
    pub fn dial(self, opened: impl Fn(&Socket) -> Result<(), Fault>) -> Result<Link, Fault> {
        let text = self.options.servers.get(self.server).map_or("", String::as_str);
        let unknown = || io::Error::new(io::ErrorKind::NotFound, "no such address");
        let address = text.to_socket_addrs().and_then(|mut all| all.next().ok_or_else(unknown));
        let address = address.map_err(Fault::Lost)?;
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None);
        let socket = socket.map_err(Fault::Lost)?;
        opened(&socket)?;
        self.connect_tcp(&socket, &address).map_err(Fault::Lost)?;
        // Who has no patience makes one attempt, which takes its time.
        let deadline = Instant::now() + self.options.patience.clamp(CONNECT, HANDSHAKE);
        self.introduce(&socket, text, deadline)?;
        if self.options.transport == Transport::Auto && is_here(&address) {
            match self.dial_unix(&address, &opened) {
                Ok(link) => return Ok(link),
                Err(Fault::Lost(error)) => log::debug!("no common memory: {error}"),
                Err(_) => {}
            }
            opened(&socket)?;
        }
        Ok(Link::over(socket))
    }

    fn dial_unix(
        self,
        address: &SocketAddr,
        opened: impl Fn(&Socket) -> Result<(), Fault>,
    ) -> Result<Link, Fault> {
        let deadline = Instant::now() + UNIX;
        let socket = loop {
            match self.connect_unix(address, &opened) {
                // Its queue is full. The server empties it soon; somebody else may never.
                Err(Fault::Lost(error))
                    if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
                    std::thread::sleep(PAUSE);
                }
                connected => break connected?,
            }
        };
        self.introduce(&socket, "a Unix socket", deadline)?;
        Link::offer(socket, self.most_bulk).map_err(Fault::Lost)
    }

    /// Connects to the shard of this host that listens at an address, or at all, without waiting.
    fn connect_unix(
        self,
        address: &SocketAddr,
        opened: impl Fn(&Socket) -> Result<(), Fault>,
    ) -> Result<Socket, Fault> {
        let port = address.port();
        let all = [(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()];
        let mut last = io::ErrorKind::NotFound.into();
        for address in [*address].iter().chain(&all) {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(Fault::Lost)?;
            opened(&socket)?;
            let connect = || {
                socket.set_nonblocking(true)?;
                socket.connect(&unix_address(&self.options.token, address)?)?;
                socket.set_nonblocking(false)
            };
            match connect() {
                Ok(()) => return Ok(socket),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Fault::Lost(error));
                }
                Err(error) => last = error,
            }
        }
        Err(Fault::Lost(last))
    }

    fn connect_tcp(self, socket: &Socket, address: &SocketAddr) -> io::Result<()> {
        socket.connect_timeout(&(*address).into(), CONNECT)?;
        // Where nobody listens, the system may connect a socket with itself.
        if socket.local_addr()?.as_socket() == Some(*address) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        socket.set_tcp_nodelay(true)?;
        // A server whose machine is gone never says so.
        let silence = self.timeout.max(SILENCE);
        let probe = TcpKeepalive::new().with_time(silence / 2).with_interval(silence / 10);
        socket.set_tcp_keepalive(&probe.with_retries(5))?;
        socket.set_tcp_user_timeout(Some(silence))
    }

    fn introduce(self, socket: &Socket, address: &str, deadline: Instant) -> Result<(), Fault> {
        let introduction = Introduction {
            purpose: Purpose::Server,
            epoch: self.options.life.unwrap_or(0),
            group: 0,
            from: self.worker,
            to: self.server as u32,
            channel: 0,
        };
        let initiated = initiate(socket, &self.options.token, &introduction, deadline);
        initiated.map(drop).map_err(|cause| match cause {
            // Whoever was killed in the middle may be back soon.
            HandshakeError::Truncated | HandshakeError::TimedOut | HandshakeError::Io(_) => {
                Fault::Lost(io::Error::other(cause))
            }
            cause => Fault::Fatal(ServerError::Handshake { address: address.to_owned(), cause }),
        })
    }
}

/// Whether an address is one of this host.
fn is_here(address: &SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{Files, Shard, ShardOptions};
    use std::net::TcpListener;
    use unisono_collective::handshake::Token;

    const TOKEN: Token = Token::from_bytes([9; 32]);

    fn call(options: &ClientOptions) -> Call<'_> {
        let timeout = Duration::from_secs(10);
        Call { options, server: 0, worker: 0, most_bulk: 4096, timeout }
    }

    fn options(address: SocketAddr) -> ClientOptions {
        ClientOptions {
            servers: vec![address.to_string()],
            token: TOKEN,
            worker: 0,
            life: Some(1),
            patience: Duration::from_secs(60),
            transport: Transport::Auto,
            warm_up: 0,
            error_feedback: false,
        }
    }

    /// Somebody at the name of a server's Unix socket who never answers, with so much room for others.
    fn squatter(address: &SocketAddr, room: i32) -> Socket {
        let squatter = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        squatter.bind(&unix_address(&TOKEN, address).unwrap()).unwrap();
        squatter.listen(room).unwrap();
        squatter
    }

    #[test]
    fn whoever_sits_at_the_name_of_a_server_keeps_nobody_from_it() {
        for fills_up in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let squatter = squatter(&address, if fills_up { 0 } else { 16 });
            let mut waiting = Vec::new();
            let mut has_room = fills_up;
            while has_room {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
                socket.set_nonblocking(true).unwrap();
                let connected = socket.connect(&squatter.local_addr().unwrap());
                has_room = connected.is_ok();
                waiting.push(socket);
            }
            let options = options(address);
            let shard = ShardOptions { token: TOKEN, files: Files::default(), recorder: None };
            let _shard = Shard::start(listener.into(), shard).unwrap();
            let link = call(&options).dial(|_| Ok(())).map_err(|_| "lost").unwrap();
            assert!(!link.is_shared());
        }
    }

    #[test]
    fn every_socket_can_be_shut_down_before_anything_is_done_with_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let options = options(listener.local_addr().unwrap());
        // Nobody answers. Whoever has the socket ends the wait.
        let opened = |socket: &Socket| {
            assert!(socket.peer_addr().is_err(), "it is connected already");
            let socket = socket.try_clone().map_err(Fault::Lost)?;
            std::thread::spawn(move || {
                while socket.shutdown(std::net::Shutdown::Both).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            Ok(())
        };
        let ended = call(&options).dial(opened);
        assert!(matches!(ended, Err(Fault::Lost(_))));
    }
}
