//! Finding the listener of a job, the host of its rendezvous or the launcher of its node 0: among listeners of
//! other programs, and perhaps before it listens.

use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use unisono_net::{Connection, Dialer, HandshakeError, Introduction, Target, Token};

use super::RendezvousError;

/// After how long a launcher, or the host of a rendezvous, that is out of reach is given up: a machine that
/// loses its power says nothing. Longer: the rest of the job waits longer for its end. Shorter: a network
/// that recovers from a cut by itself is given up.
pub(crate) const SILENCE: Duration = Duration::from_secs(20);

/// A listener of this job, at one of some hosts, on one of some ports.
pub(crate) struct Sought<'a> {
    pub hosts: &'a [&'a str],
    pub ports: &'a [u16],
    pub key: &'a Token,
    pub introduction: Introduction,
}

impl Sought<'_> {
    /// How long one attempt may take: long enough for a slow network, short enough that a port
    /// held by some silent program does not eat the deadline.
    const ATTEMPT: Duration = Duration::from_secs(3);

    /// Sweeps over all addresses until one of them proves to be of this job.
    pub fn find(&self, deadline: Instant) -> Result<Connection, RendezvousError> {
        let mut pause = Duration::from_millis(5);
        let mut last = None;
        loop {
            if let Some(connection) = self.sweep(deadline, &mut last)? {
                return Ok(connection);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let address = describe(self.hosts[0], self.ports);
                let last = last.unwrap_or_else(|| "no attempt was made".to_owned());
                return Err(RendezvousError::Unreachable { address, last });
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Tries all addresses once. `last` is what went wrong last; that an attempt was cut off by the
    /// deadline is no news beside what earlier ones ran into.
    fn sweep(
        &self,
        deadline: Instant,
        last: &mut Option<String>,
    ) -> Result<Option<Connection>, RendezvousError> {
        let only_one = self.hosts.len() == 1 && self.ports.len() == 1;
        let places = self.hosts.iter().flat_map(|&host| self.ports.iter().map(move |&p| (host, p)));
        for place in places {
            let addresses = match place.to_socket_addrs() {
                Ok(addresses) => addresses,
                Err(error) => {
                    *last = Some(error.to_string());
                    continue;
                }
            };
            for address in addresses {
                match self.attempt(address, deadline) {
                    Ok(connection) => return Ok(Some(connection)),
                    // At the only address there is, an answer is final; and so is one about encryption: a
                    // listener is asked about it only after it has proved to be of this job.
                    Err(cause)
                        if only_one && cause.is_final()
                            || matches!(cause, HandshakeError::Encryption { .. }) =>
                    {
                        let address = address.to_string();
                        return Err(RendezvousError::Handshake { address, cause });
                    }
                    Err(_) if last.is_some() && Instant::now() >= deadline => {}
                    // Ports at which nothing listens say less than one that answered.
                    Err(HandshakeError::Io(error))
                        if last.is_some() && error.kind() == ErrorKind::ConnectionRefused => {}
                    Err(error) => *last = Some(format!("{address}: {error}")),
                }
            }
        }
        Ok(None)
    }

    fn attempt(
        &self,
        address: SocketAddr,
        deadline: Instant,
    ) -> Result<Connection, HandshakeError> {
        let until = deadline.min(Instant::now() + Sought::ATTEMPT);
        let dialer = Dialer::new(self.key, until).with_silence(SILENCE);
        dialer.dial(Target::Tcp(address), self.introduction)
    }
}

pub(super) fn describe(host: &str, ports: &[u16]) -> String {
    match ports {
        [first, .., last] => format!("{host}, ports {first} to {last}"),
        [port] => format!("{host}, port {port}"),
        [] => host.to_owned(),
    }
}
