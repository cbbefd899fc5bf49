//! Opening a connection to a server.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use unisono_net::{Dialer, HandshakeError, Introduction, Signal, Target};

use super::options::{ClientOptions, ServerError, Transport};
use super::session::Fault;
use crate::server::link::Link;
use crate::server::serve::unix_target;
use crate::server::wire::SERVER;

/// How long one attempt may take to connect. Longer: a thread that stops the client waits longer for its end if
/// nothing answers at the address. Shorter: a far server is never reached.
const CONNECT: Duration = Duration::from_secs(2);

/// How long one handshake may take. A server that is being restarted may have its connections queued
/// by the system meanwhile.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long it may take to reach a server by its Unix socket, which it answers at once unless its machine
/// is busy. Longer: another process that has taken its name holds a worker up for longer. Shorter: on a busy
/// machine there is no common memory.
const UNIX: Duration = Duration::from_secs(2);

/// How long a server may be out of reach before the system says so, at least. Shorter: a network that
/// recovers from a cut by itself is given up.
const SILENCE: Duration = Duration::from_secs(10);

/// Who opens a connection, and to which server.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub options: &'a ClientOptions,
    pub server: usize,
    /// The worker, or [`NO_WORKER`](super::queries::NO_WORKER).
    pub worker: u32,
    /// The most bytes of bulk data in one direction at a time.
    pub most_bulk: usize,
    /// How long a worker may be silent.
    pub timeout: Duration,
}

impl Call<'_> {
    /// Opens a connection: over TCP, and where the server is on this host, by a Unix socket instead, for
    /// the sake of common memory. Another process that has taken the name of that socket keeps no worker from
    /// the server: that has proven the token over TCP before, and TCP is what remains.
    pub fn dial(self, abort: &Signal) -> Result<Link, Fault> {
        let text = self.options.servers.get(self.server).map_or("", String::as_str);
        let unknown = || io::Error::new(io::ErrorKind::NotFound, "no such address");
        let address = text.to_socket_addrs().and_then(|mut all| all.next().ok_or_else(unknown));
        let address = address.map_err(Fault::Lost)?;
        // A client without patience makes one attempt, which takes its time.
        let time = CONNECT + self.options.patience.clamp(CONNECT, HANDSHAKE);
        let dialer = Dialer::new(&self.options.token, Instant::now() + time)
            .connecting_within(CONNECT)
            .with_silence(self.timeout.max(SILENCE))
            .with_abort(abort);
        let dialed = dialer.dial(Target::Tcp(address), self.introduction());
        let connection = dialed.map_err(|cause| match cause.is_final() {
            true => Fault::Fatal(ServerError::Handshake { address: text.to_owned(), cause }),
            // A server that was killed in the middle may be back soon.
            false => Fault::Lost(io::Error::other(cause.to_string())),
        })?;
        if self.options.transport == Transport::Auto && is_here(&address) {
            match self.dial_unix(&address, abort) {
                Ok(link) => return Ok(link),
                Err(error) => log::debug!("no common memory: {error}"),
            }
        }
        Ok(Link::over(connection))
    }

    /// Connects to the server of this host that listens at an address, or at all.
    fn dial_unix(self, address: &SocketAddr, abort: &Signal) -> Result<Link, HandshakeError> {
        let dialer = Dialer::new(&self.options.token, Instant::now() + UNIX).with_abort(abort);
        let port = address.port();
        let all = [(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()];
        let mut last = HandshakeError::Io(io::ErrorKind::NotFound.into());
        for address in [*address].iter().chain(&all) {
            let target = unix_target(&self.options.token, address);
            match dialer.dial(target, self.introduction()) {
                Ok(connection) => return Ok(Link::offer(connection, self.most_bulk)?),
                Err(HandshakeError::Io(error)) => last = HandshakeError::Io(error),
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn introduction(self) -> Introduction {
        let introduction = Introduction::new(SERVER, self.worker, self.server as u32);
        Introduction { epoch: self.options.life.unwrap_or_default().0, ..introduction }
    }
}

/// Whether an address is one of this host.
fn is_here(address: &SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Life;
    use crate::server::{Files, Server, ServerOptions};
    use socket2::{Domain, Socket, Type};
    use std::net::TcpListener;
    use unisono_net::Token;

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
            life: Some(Life(1)),
            patience: Duration::from_secs(60),
            transport: Transport::Auto,
            warm_up: 0,
            error_feedback: false,
        }
    }

    /// A socket that has taken the name of a server's Unix socket and never answers, with so much room in
    /// its queue.
    fn squatter(address: &SocketAddr, room: i32) -> Socket {
        let squatter = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        squatter.bind(&unix_target(&TOKEN, address).address().unwrap()).unwrap();
        squatter.listen(room).unwrap();
        squatter
    }

    #[test]
    fn a_process_that_has_taken_the_name_of_a_server_keeps_no_worker_from_it() {
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
            let server = ServerOptions { token: TOKEN, files: Files::default(), recorder: None };
            let _server = Server::start(listener.into(), server).unwrap();
            let link = call(&options).dial(&Signal::new().unwrap()).map_err(|_| "lost").unwrap();
            assert!(!link.is_shared());
        }
    }

    #[test]
    fn every_attempt_can_be_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let options = options(listener.local_addr().unwrap());
        // No server answers. The thread with the handle ends the wait, and every later one.
        let abort = Signal::new().unwrap();
        let ends = abort.clone();
        std::thread::spawn(move || {
            listener.accept().unwrap();
            ends.raise();
        });
        let start = Instant::now();
        assert!(matches!(call(&options).dial(&abort), Err(Fault::Lost(_))));
        assert!(matches!(call(&options).dial(&abort), Err(Fault::Lost(_))));
        assert!(start.elapsed() < HANDSHAKE, "it waited for an answer");
    }
}
