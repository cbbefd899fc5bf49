//! Listening sockets for a host name and port.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use socket2::{Domain, Socket, Type};

/// Connections that may wait to be accepted: all ranks of a large job come at once.
const BACKLOG: i32 = 1024;

/// Listens at `host`, which must be this machine; port 0 stands for any free one. Returns the port
/// as well.
///
/// An address, or `localhost`, is taken literally. Any other name means all interfaces: on its
/// own machine a name often stands for a loopback address that no other machine can reach.
pub(crate) fn listen(host: &str, port: u16) -> io::Result<(Vec<Socket>, u16)> {
    if !is_here(host)? {
        let problem = "no interface of this machine has this address";
        return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, problem));
    }
    listen_for(host, port)
}

/// As [`listen`], on all interfaces if this machine does not know itself by the name or address that
/// others use for it: a framework that gives out one name for all ranks did not choose it for rank
/// 0 to listen at.
pub(super) fn listen_for(host: &str, port: u16) -> io::Result<(Vec<Socket>, u16)> {
    let literal = match host {
        "localhost" => Some(Ipv4Addr::LOCALHOST.into()),
        other => other.parse::<IpAddr>().ok().filter(|address| !address.is_unspecified()),
    };
    let everywhere = || {
        listen_on(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port).or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Err(error),
            _ => listen_on(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port),
        })
    };
    let listener = match literal {
        Some(address) => match listen_on(address, port) {
            // Behind address translation no interface has the address others use.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => everywhere()?,
            result => result?,
        },
        None => everywhere()?,
    };
    let port = listener.local_addr()?.as_socket().map_or(port, |address| address.port());
    let mut listeners = vec![listener];
    // `localhost` is both loopback addresses, where there are both.
    if host == "localhost"
        && let Ok(v6) = listen_on(Ipv6Addr::LOCALHOST.into(), port)
    {
        listeners.push(v6);
    }
    Ok((listeners, port))
}

/// Whether a name or address stands for an interface of this machine.
fn is_here(host: &str) -> io::Result<bool> {
    let addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, 0)],
        Err(_) => (host, 0).to_socket_addrs()?.collect(),
    };
    Ok(addresses.iter().any(|address| TcpListener::bind(address).is_ok()))
}

fn listen_on(ip: IpAddr, port: u16) -> io::Result<Socket> {
    let address = SocketAddr::new(ip, port);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if ip.is_ipv6() {
        socket.set_only_v6(!ip.is_unspecified())?;
    }
    // Connections of a job that ended a moment ago do not keep the port from its successor.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn a_name_means_every_interface_and_an_address_itself() {
        let (_everywhere, port) = listen_for("some-name-of-this-machine", 0).unwrap();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();

        let (_loopback, port) = listen("127.0.0.2", 0).unwrap();
        TcpStream::connect(("127.0.0.2", port)).unwrap();
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err());

        let (listeners, port) = listen("localhost", 0).unwrap();
        assert!(listen("localhost", port).is_err());
        drop(listeners);
        listen("localhost", port).unwrap();
        listen("0.0.0.0", 0).unwrap();
    }

    /// 192.0.2.0/24 is for documentation: no machine has it.
    #[test]
    fn what_is_elsewhere_is_refused_unless_others_chose_it() {
        assert!(!is_here("192.0.2.7").unwrap());
        let error = listen("192.0.2.7", 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        assert!(listen("no-such-machine.invalid", 0).is_err());
        let (_everywhere, port) = listen_for("192.0.2.7", 0).unwrap();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
