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
    /// Opens a connection. `opened` gets each socket before anything is said on it.
    pub fn dial(self, opened: impl Fn(&Socket) -> Result<(), Fault>) -> Result<Link, Fault> {
        let text = self.options.servers.get(self.server).map_or("", String::as_str);
        let unknown = || io::Error::new(io::ErrorKind::NotFound, "no such address");
        let address = text.to_socket_addrs().and_then(|mut all| all.next().ok_or_else(unknown));
        let address = address.map_err(Fault::Lost)?;
        let is_here = self.options.transport == Transport::Auto && is_here(&address);
        if is_here && let Ok(link) = self.dial_unix(&address, &opened) {
            return Ok(link);
        }
        let socket = self.connect_tcp(&address).map_err(Fault::Lost)?;
        opened(&socket)?;
        self.introduce(&socket, text)?;
        // It may have been started only now.
        if is_here && let Ok(link) = self.dial_unix(&address, &opened) {
            return Ok(link);
        }
        opened(&socket)?;
        Ok(Link::over(socket))
    }

    fn dial_unix(
        self,
        address: &SocketAddr,
        opened: impl Fn(&Socket) -> Result<(), Fault>,
    ) -> Result<Link, Fault> {
        let socket = connect_unix(address).map_err(Fault::Lost)?;
        opened(&socket)?;
        self.introduce(&socket, "a Unix socket")?;
        Link::offer(socket, self.most_bulk).map_err(Fault::Lost)
    }

    fn connect_tcp(self, address: &SocketAddr) -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(*address), Type::STREAM, None)?;
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
        socket.set_tcp_user_timeout(Some(silence))?;
        Ok(socket)
    }

    fn introduce(self, socket: &Socket, address: &str) -> Result<(), Fault> {
        let introduction = Introduction {
            purpose: Purpose::Server,
            epoch: self.options.life.unwrap_or(0),
            group: 0,
            from: self.worker,
            to: self.server as u32,
            channel: 0,
        };
        let deadline = Instant::now() + HANDSHAKE;
        let initiated = initiate(socket, &self.options.token, &introduction, deadline);
        initiated.map(drop).map_err(|cause| match cause {
            // Whoever was killed in the middle may be back soon.
            HandshakeError::Truncated | HandshakeError::TimedOut | HandshakeError::Io(_) => {
                Fault::Lost(io::Error::other(cause.to_string()))
            }
            cause => Fault::Fatal(ServerError::Handshake { address: address.to_owned(), cause }),
        })
    }
}

/// Connects to the shard of this host that listens at an address, or at all.
fn connect_unix(address: &SocketAddr) -> io::Result<Socket> {
    let port = address.port();
    let all = [(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()];
    let mut last = Ok(());
    for address in [*address].iter().chain(&all) {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        last = socket.connect(&unix_address(address)?);
        if last.is_ok() {
            return Ok(socket);
        }
    }
    Err(last.expect_err("none could be connected"))
}

/// Whether an address is one of this host.
fn is_here(address: &SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}
