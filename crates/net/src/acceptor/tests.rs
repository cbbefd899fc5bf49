//! The acceptor among peers and strangers, over real sockets.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, channel};

use socket2::Type;

use super::*;
use crate::handshake::HandshakeError;
use crate::{Dialer, Target};

const TOKEN: Token = Token::from_bytes([3; 32]);
const PURPOSE: Purpose = Purpose::new(*b"test");
const SOON: Duration = Duration::from_secs(20);

fn introduction(from: u32) -> Introduction {
    Introduction { purpose: PURPOSE, epoch: 1, group: 2, from, to: 0, channel: 3 }
}

fn tcp_listener() -> (Socket, SocketAddr) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener.into(), address)
}

fn acceptor(
    limits: Limits,
    listeners: Vec<Socket>,
) -> (Acceptor, Receiver<(Connection, Introduction)>) {
    let (sender, receiver) = channel();
    let admission = Admission::new(TOKEN, &[PURPOSE]).with_limits(limits);
    let acceptor = Acceptor::start(listeners, admission, move |connection, who| {
        sender.send((connection, who)).unwrap();
    });
    (acceptor.unwrap(), receiver)
}

fn join(address: SocketAddr, token: &Token, from: u32) -> Result<Connection, HandshakeError> {
    let dialer = Dialer::new(token, Instant::now() + SOON);
    dialer.dial(Target::Tcp(address), introduction(from))
}

#[test]
fn peers_are_let_in_over_tcp_and_unix() {
    let (tcp, address) = tcp_listener();
    let unix = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let name = Target::Unix(format!("unisono-acceptor-test-{}", std::process::id()));
    unix.bind(&name.address().unwrap()).unwrap();
    unix.listen(8).unwrap();
    let (_acceptor, accepted) = acceptor(Limits::default(), vec![tcp, unix]);

    let mut client = join(address, &TOKEN, 5).unwrap();
    let (mut server, who) = accepted.recv_timeout(SOON).unwrap();
    assert_eq!(who, introduction(5));
    assert!(server.socket().tcp_nodelay().unwrap());
    client.sender.write_all(b"after").unwrap();
    let mut buffer = [0; 5];
    // Blocking again: a non-blocking read could fail here.
    server.receiver.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"after");

    let _local = Dialer::new(&TOKEN, Instant::now() + SOON).dial(name, introduction(6)).unwrap();
    assert_eq!(accepted.recv_timeout(SOON).unwrap().1, introduction(6));
}

#[test]
fn strangers_do_not_hold_up_peers() {
    let (listener, address) = tcp_listener();
    let (_acceptor, accepted) = acceptor(Limits::default(), vec![listener]);
    // More silent, half-spoken and talkative strangers than there are slots.
    let mut strangers: Vec<TcpStream> = Vec::new();
    for index in 0..200u32 {
        let mut stranger = TcpStream::connect(address).unwrap();
        match index % 4 {
            0 => {}
            1 => stranger.write_all(b"Unison").unwrap(),
            2 => drop(stranger.write_all(&[0x42; 4096])),
            _ => stranger.shutdown(Shutdown::Both).unwrap(),
        }
        strangers.push(stranger);
    }
    for from in 0..8 {
        let _client = join(address, &TOKEN, from).unwrap();
        assert_eq!(accepted.recv_timeout(SOON).unwrap().1, introduction(from));
    }
    assert!(accepted.try_recv().is_err());
}

#[test]
fn peers_of_another_job_learn_why() {
    let (listener, address) = tcp_listener();
    let (_acceptor, accepted) = acceptor(Limits::default(), vec![listener]);
    let refused = join(address, &Token::public("other"), 0);
    assert!(matches!(refused, Err(HandshakeError::OtherJob)));
    assert!(accepted.try_recv().is_err());
}

#[test]
fn the_silent_are_dropped_at_their_deadline_and_when_crowded_out() {
    let (listener, address) = tcp_listener();
    let limits = Limits { half_done: 2, patience: Duration::from_secs(3600) };
    let (crowded, _accepted) = acceptor(limits, vec![listener]);
    let mut strangers: Vec<_> = (0..3).map(|_| TcpStream::connect(address).unwrap()).collect();
    strangers[0].set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(strangers[0].read(&mut [0; 1]).unwrap(), 0);
    drop(crowded);

    let (listener, address) = tcp_listener();
    let limits = Limits { half_done: 2, patience: Duration::from_millis(20) };
    let (_impatient, _accepted) = acceptor(limits, vec![listener]);
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(stranger.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn dropping_it_closes_the_port() {
    let (listener, address) = tcp_listener();
    let (acceptor, _accepted) = acceptor(Limits::default(), vec![listener]);
    let _silent = TcpStream::connect(address).unwrap();
    drop(acceptor);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn peers_who_want_something_else_learn_why() {
    let (listener, address) = tcp_listener();
    let (_acceptor, accepted) = acceptor(Limits::default(), vec![listener]);
    let other = Introduction { purpose: Purpose::new(*b"else"), ..introduction(0) };
    let dialer = Dialer::new(&TOKEN, Instant::now() + SOON);
    let refused = dialer.dial(Target::Tcp(address), other);
    assert!(matches!(refused, Err(HandshakeError::OtherPurpose)));
    assert!(accepted.try_recv().is_err());
}

/// What travels over TCP in a job that encrypts shows nothing of what is said; over Unix sockets it
/// does, which stay on their host.
#[test]
fn connections_of_a_job_that_encrypts_show_nothing() {
    let token = TOKEN.with_encryption(true);
    let (tcp, address) = tcp_listener();
    let unix = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let name = Target::Unix(format!("unisono-encrypted-test-{}", std::process::id()));
    unix.bind(&name.address().unwrap()).unwrap();
    unix.listen(8).unwrap();
    let (sender, accepted) = channel();
    let admission = Admission::new(token.clone(), &[PURPOSE]);
    let _acceptor = Acceptor::start(vec![tcp, unix], admission, move |connection, who| {
        sender.send((connection, who)).unwrap();
    });
    let dialer = Dialer::new(&token, Instant::now() + SOON);
    for (target, is_clear) in [(Target::Tcp(address), false), (name, true)] {
        let mut client = dialer.dial(target, introduction(1)).unwrap();
        let (mut server, _) = accepted.recv_timeout(SOON).unwrap();
        client.until(Instant::now() + SOON).write_all(b"a known secret").unwrap();
        // What the wire shows, before the bytes are received.
        let mut shown = [0; 100];
        rustix::net::recv(&**server.socket(), &mut shown, RecvFlags::PEEK).unwrap();
        assert_eq!(shown.windows(8).any(|window| window == b"a known "), is_clear);
        let mut heard = [0; 14];
        server.receiver.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"a known secret");
        // And the other way, in pieces larger than a record.
        let large: Vec<u8> = (0..1_000_000u32).map(|i| (i >> 3) as u8).collect();
        let sent = large.clone();
        let sending = std::thread::spawn(move || server.sender.write_all(&sent).map(|()| server));
        let mut heard = vec![0; large.len()];
        client.until(Instant::now() + SOON).read_exact(&mut heard).unwrap();
        assert!(heard == large);
        sending.join().unwrap().unwrap();
    }
    // Who does not encrypt is refused, and hears why.
    let refused = join(address, &TOKEN, 0);
    assert!(matches!(refused, Err(HandshakeError::Encryption { theirs: true })));
}
