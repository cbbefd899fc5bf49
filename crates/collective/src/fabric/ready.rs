//! What members tell each other while a group forms, in the same words twice: first, with which
//! settings they come; at last, that all is well, or what is not. Then members of one host also hand
//! over their staging memory.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::net::{RecvFlags, SendFlags};
use unisono_net::memory::{receive_with, send_with};
use unisono_net::{Connection, keepalive::is_tcp};

use crate::error::FormError;

/// Bytes of an explanation.
const REASON: usize = 216;
const SIZE: usize = 8 + 32 + REASON;

/// What a member says when it has done its part.
pub struct Ready<'a> {
    /// The hash of its settings.
    pub settings: [u8; 32],
    /// What went wrong.
    pub failure: Option<String>,
    /// Its staging memory, for members of the same host.
    pub memory: Option<BorrowedFd<'a>>,
}

impl Ready<'_> {
    /// Tells a peer.
    pub fn send(&self, to: &mut Connection) -> rustix::io::Result<()> {
        let mut bytes = [0; SIZE];
        bytes[8..40].copy_from_slice(&self.settings);
        if let Some(failure) = &self.failure {
            let mut end = failure.len().min(REASON);
            while !failure.is_char_boundary(end) {
                end -= 1;
            }
            bytes[0] = 1;
            bytes[1] = end as u8;
            bytes[40..40 + end].copy_from_slice(&failure.as_bytes()[..end]);
        }
        if !is_tcp(to.socket()) {
            return send_with(to.socket(), &bytes, self.memory);
        }
        // A fresh connection has room for so little.
        match to.sender.send(&bytes, SendFlags::empty())? {
            SIZE => Ok(()),
            _ => Err(rustix::io::Errno::AGAIN),
        }
    }
}

/// What is said of a peer that says nothing itself.
const SILENT: &str = "it did not answer in time";
const VANISHED: &str = "it vanished";

/// How much an outcome of [`receive`] explains why a group does not form; the least is best.
pub fn obscurity(error: &FormError) -> usize {
    match error {
        FormError::Settings { .. } => 0,
        FormError::Peer { reason, .. } if reason == SILENT => 3,
        FormError::Peer { reason, .. } if reason == VANISHED => 2,
        _ => 1,
    }
}

/// The peer, if it said nothing until the deadline.
pub fn silent(error: &FormError) -> Option<usize> {
    match error {
        FormError::Peer { peer, reason } if reason == SILENT => Some(*peer),
        _ => None,
    }
}

/// Hears from a peer; its staging memory, if it is of the same host.
pub fn receive(
    from: &mut Connection,
    peer: usize,
    settings: &[u8; 32],
    deadline: Instant,
) -> Result<Option<OwnedFd>, FormError> {
    let vanished = |reason: String| FormError::Peer { peer, reason };
    let socket = from.socket().clone();
    let mut bytes = [0; SIZE];
    let mut filled = 0;
    let mut memory = None;
    while filled < SIZE {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(vanished(SILENT.into()));
        }
        socket.set_read_timeout(Some(left)).map_err(super::system("setting a time limit"))?;
        let into = &mut bytes[filled..];
        let received = match is_tcp(&socket) {
            true => from.receiver.receive(into, RecvFlags::empty()),
            false => receive_with(&socket, into, &mut memory),
        };
        match received {
            Ok(0) => return Err(vanished(VANISHED.into())),
            Ok(received) => filled += received,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(e) => return Err(vanished(e.to_string())),
        }
    }
    socket.set_read_timeout(None).map_err(super::system("lifting a time limit"))?;
    if bytes[0] != 0 {
        let end = 40 + usize::from(bytes[1]).min(REASON);
        return Err(vanished(String::from_utf8_lossy(&bytes[40..end]).into_owned()));
    }
    if bytes[8..40] != settings[..] {
        return Err(FormError::Settings { peer });
    }
    Ok(memory)
}
