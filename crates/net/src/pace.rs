//! How fast TCP sends between processes of one machine.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rustix::net::{getpeername, getsockname, sockopt};

/// The congestion control that every system has and lets every process choose.
const UNPACED: &str = "reno";

/// Lets a TCP connection within one machine send as fast as the other side receives; leaves any other connection to the
/// system's choice.
///
/// Within a machine no packet is lost and there is no rate to find out. Where the system's choice is BBR, TCP measures one
/// all the same, while both sides also compute, and holds packets back by timers to keep to it: with two ranks on two cores,
/// half of the groups then took twice as long for every all-reduce of 1 MiB and more. Where the system refuses, its choice
/// stays.
pub fn send_unpaced_within_machine(socket: impl AsFd) {
    let ends = (getsockname(&socket), getpeername(&socket));
    let (Ok(own), Ok(Some(peer))) = ends else { return };
    let (Ok(own), Ok(peer)) = (SocketAddr::try_from(own), SocketAddr::try_from(peer)) else {
        return;
    };
    if is_within_machine(own.ip(), peer.ip()) {
        let _ = sockopt::set_tcp_congestion(&socket, UNPACED);
    }
}

/// Whether a connection between these addresses stays on this machine.
fn is_within_machine(own: IpAddr, peer: IpAddr) -> bool {
    own == peer || peer.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn addresses_tell_what_stays_on_this_machine() {
        let is_within =
            |own: &str, peer: &str| is_within_machine(own.parse().unwrap(), peer.parse().unwrap());
        assert!(is_within("127.0.0.1", "127.0.0.1"));
        assert!(is_within("127.0.0.1", "127.0.0.2"));
        assert!(is_within("::ffff:127.0.0.1", "::ffff:127.0.0.1"));
        assert!(is_within("::1", "::1"));
        assert!(is_within("10.0.0.1", "10.0.0.1"));
        assert!(!is_within("10.0.0.1", "10.0.0.2"));
        assert!(!is_within("fe80::1", "fe80::2"));
    }

    #[test]
    fn both_ends_of_a_loopback_connection_are_unpaced() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for end in [&dialed, &accepted] {
            send_unpaced_within_machine(end);
            assert_eq!(sockopt::tcp_congestion(end).unwrap(), UNPACED);
        }
    }

    /// They are left alone: a Unix socket, and one without a peer.
    #[test]
    fn other_sockets_are_no_error() {
        send_unpaced_within_machine(std::os::unix::net::UnixStream::pair().unwrap().0);
        send_unpaced_within_machine(TcpListener::bind("127.0.0.1:0").unwrap());
    }
}
