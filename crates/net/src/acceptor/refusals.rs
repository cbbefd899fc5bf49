//! What the log says about connections that were turned away.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket};

use crate::handshake::Refusal;

/// Logs refusals, a few in each interval; counts the rest and logs their number at its end.
#[derive(Default)]
pub(super) struct RefusalLog {
    since: Option<Instant>,
    logged: u32,
    silent: u64,
}

impl RefusalLog {
    /// Refusals logged one by one in an interval. More tell more about a scan and less about
    /// everything else in the log.
    const VERBOSE: u32 = 16;
    const INTERVAL: Duration = Duration::from_secs(60);

    pub fn note(&mut self, peer: &Peer, reason: &Reason, now: Instant) {
        if self.admit(now) {
            log::warn!("refused a connection from {peer}: {reason}");
        }
    }

    /// Whether a refusal at `now` is logged by itself.
    pub fn admit(&mut self, now: Instant) -> bool {
        self.summarize(now);
        self.since.get_or_insert(now);
        if self.logged < RefusalLog::VERBOSE {
            self.logged += 1;
            return true;
        }
        self.silent += 1;
        false
    }

    /// Ends the interval if it is over; returns how many refusals it left out.
    pub fn summarize(&mut self, now: Instant) -> u64 {
        if self.since.is_none_or(|since| now.duration_since(since) < RefusalLog::INTERVAL) {
            return 0;
        }
        let silent = std::mem::take(&mut self.silent);
        (self.since, self.logged) = (None, 0);
        if silent > 0 {
            log::warn!("refused {silent} more connections in the last minute");
        }
        silent
    }
}

impl Drop for RefusalLog {
    fn drop(&mut self) {
        if self.silent > 0 {
            log::warn!("refused {} more connections", self.silent);
        }
    }
}

/// Why a connection was closed.
pub(super) enum Reason {
    Refused(Refusal),
    Truncated,
    TooSlow,
    Displaced,
    Failed(io::Error),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Refused(refusal) => write!(f, "{refusal}"),
            Reason::Truncated => f.write_str("closed before the end of the handshake"),
            Reason::TooSlow => f.write_str("did not finish the handshake in time"),
            Reason::Displaced => f.write_str("made room for a newer connection"),
            Reason::Failed(error) => write!(f, "failed: {error}"),
        }
    }
}

/// Who is at the other end, as far as the kernel knows.
pub(super) enum Peer {
    Inet(std::net::SocketAddr),
    Unix { pid: i32, uid: u32 },
    Unknown,
}

impl Peer {
    pub fn of(socket: &Socket, address: &SockAddr) -> Peer {
        if let Some(address) = address.as_socket() {
            return Peer::Inet(address);
        }
        match rustix::net::sockopt::socket_peercred(socket) {
            Ok(credentials) => Peer::Unix {
                pid: credentials.pid.as_raw_nonzero().get(),
                uid: credentials.uid.as_raw(),
            },
            Err(_) => Peer::Unknown,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Inet(address) => write!(f, "{address}"),
            Peer::Unix { pid, uid } => write!(f, "local process {pid} of user {uid}"),
            Peer::Unknown => f.write_str("unknown peer"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_not_flooded() {
        let mut log = RefusalLog::default();
        let start = Instant::now();
        let logged = (0..1000).filter(|_| log.admit(start)).count();
        assert_eq!(logged, RefusalLog::VERBOSE as usize);
        assert_eq!(log.summarize(start + RefusalLog::INTERVAL), 1000 - logged as u64);
        assert!(log.admit(start + RefusalLog::INTERVAL));
    }
}
