//! Connections of a group that has formed, opened when they are first needed.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use unisono_net::Connection;
use unisono_net::dial::Dials;
use unisono_net::memory::Memory;

/// What a connection between two ranks of a group is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Messages of collectives: one of the streams of a link, by its number.
    Data(u32),
    /// Messages with tags, from the rank that opens it.
    Messages,
    /// Control, beside the connections to the neighbours.
    Control,
}

/// Opens connections to the other ranks of a group, and takes those that they open. Dropping it closes
/// those that were not taken.
///
/// Between two ranks there is one connection for each stream of their link: whichever needs it first
/// opens it, without waiting for a call of the other. If both do at once, that of the higher rank counts.
pub trait Network: Send + Sync {
    /// Begins to open a connection to a rank.
    fn dial(&self, purpose: Use, peer: usize) -> Opening;

    /// Goes on opening it; the connection, once it is open. A stream of a link may come from the other rank
    /// instead, and is then among those that have arrived. An error if the rank cannot be reached.
    fn advance(&self, opening: &mut Opening) -> Result<Option<Connection>, String>;

    /// Streams of links that other ranks have opened.
    fn links(&self) -> &Arrivals;

    /// All other connections that they have opened.
    fn others(&self) -> &Arrivals;

    /// Hands memory to the ranks of this host that [take](Network::take) it, until it offers something else, or
    /// nothing.
    fn offer(&self, _memory: Option<&Arc<Memory>>) {}

    /// So many bytes of what a rank of this host offers now, mapped. An error if it cannot be had, or if the wait
    /// for it is `over`.
    fn take(
        &self,
        _peer: usize,
        _bytes: usize,
        _over: &dyn Fn() -> bool,
    ) -> Result<Arc<Memory>, String> {
        Err("the ranks share no memory".into())
    }
}

/// A connection on its way.
pub enum Opening {
    /// Open, and taken at the next look.
    Open(Option<Connection>),
    /// Being dialed.
    Dialing(Dials),
    /// A stream of a link that is dialed; the other rank is asked whether it opens it as well.
    Asking(Dials, Option<Connection>),
    /// The other rank opens it.
    Coming,
}

impl Opening {
    /// Adds the sockets on which something may come back to those that the caller polls; when to go on at
    /// the latest.
    pub fn watch<'f>(&'f self, fds: &mut Vec<PollFd<'f>>) -> Option<Instant> {
        match self {
            Opening::Open(_) => Some(Instant::now()),
            Opening::Dialing(dials) | Opening::Asking(dials, None) => dials.watch(fds),
            Opening::Asking(_, Some(connection)) => {
                fds.push(PollFd::new(&**connection.socket(), PollFlags::IN));
                None
            }
            Opening::Coming => None,
        }
    }
}

/// A connection that another rank has opened.
pub struct Arrival {
    /// Which rank.
    pub peer: usize,
    /// What it is for.
    pub purpose: Use,
    /// The connection.
    pub connection: Connection,
}

/// Connections that have come and were not taken yet.
pub struct Arrivals {
    /// `None` once nothing is taken any more.
    queue: Mutex<Option<Vec<Arrival>>>,
    bell: Arc<OwnedFd>,
}

impl Arrivals {
    /// Nothing has come.
    pub fn new() -> io::Result<Arrivals> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arrivals { queue: Mutex::new(Some(Vec::new())), bell: Arc::new(bell) })
    }

    /// A connection has come. It is closed if nothing is taken any more.
    pub fn put(&self, arrival: Arrival) {
        if let Some(queue) = &mut *self.queue.lock().expect("no panic while locked") {
            queue.push(arrival);
            // An eventfd only refuses a write that would overflow, and then it is readable.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Takes what has come.
    pub fn take(&self) -> Vec<Arrival> {
        let mut queue = self.queue.lock().expect("no panic while locked");
        queue.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes nothing any more.
    pub fn close(&self) {
        *self.queue.lock().expect("no panic while locked") = None;
    }

    /// Readable when something may have come.
    pub fn bell(&self) -> &Arc<OwnedFd> {
        &self.bell
    }

    /// Makes the bell silent until something comes.
    pub fn hush(&self) {
        // Nothing to read is fine.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }
}
