//! Sockets that outlive the processes that serve them.
//!
//! The launcher binds them, keeps them open, and hands each to one member of the job as an open file
//! whose number is in `UNISONO_LISTEN_FD`. Their addresses are known before any member runs, and
//! stay the same when the member is started again; who connects in between waits in the socket's
//! queue and is served by the next life.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::LaunchError;

/// The servers of a job: processes beside its ranks, each with a socket to listen at.
///
/// Their sockets are open from [`Servers::bind`] until the last clone is dropped.
#[derive(Clone)]
pub struct Servers {
    commands: Vec<Vec<OsString>>,
    listeners: Listeners,
}

impl Servers {
    /// Opens a socket on this machine for each of these commands (programs with their arguments).
    pub fn bind(commands: Vec<Vec<OsString>>) -> Result<Servers, LaunchError> {
        if commands.is_empty() {
            return Err(LaunchError::Usage("a job with servers has at least one"));
        }
        if commands.iter().any(Vec::is_empty) {
            return Err(LaunchError::Usage("no command to run as a server"));
        }
        let listeners = Listeners::bind(commands.len())?;
        Ok(Servers { commands, listeners })
    }

    /// Where they listen, in their order.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.listeners.addresses
    }

    pub(super) fn commands(&self) -> &[Vec<OsString>] {
        &self.commands
    }

    pub(super) fn listeners(&self) -> &Listeners {
        &self.listeners
    }
}

/// Listening sockets, one for each of several processes.
#[derive(Clone)]
pub(super) struct Listeners {
    sockets: Arc<[TcpListener]>,
    addresses: Vec<SocketAddr>,
}

impl Listeners {
    /// Opens `count` sockets on free ports of this machine.
    pub fn bind(count: usize) -> Result<Listeners, LaunchError> {
        let ip = Ipv4Addr::LOCALHOST;
        let open = |_| TcpListener::bind((ip, 0));
        let sockets: Arc<[TcpListener]> = (0..count)
            .map(open)
            .collect::<Result<_, _>>()
            .map_err(|cause| LaunchError::Listen { address: ip.to_string(), cause })?;
        let addresses = sockets.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?;
        Ok(Listeners { sockets, addresses })
    }

    /// The addresses as a variable holds them: `host:port,host:port`.
    pub fn variable(&self) -> String {
        self.addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
    }

    /// The open file of a socket, which stays open while any clone of this lives.
    pub fn file(&self, index: u32) -> RawFd {
        self.sockets[index as usize].as_raw_fd()
    }
}
