//! Connections that other ranks have opened, sorted by the group that they are for.
//!
//! The acceptor's thread puts them here. Control connections of a group that this rank has not begun to
//! form wait until it does, and so do ranks that ask for memory which is not made yet; whatever is for a
//! group that has formed goes straight there, and what is for a group that this rank has left is closed.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::SendFlags;
use unisono_net::keepalive::{is_over, keep_alive};
use unisono_net::memory::{Memory, send_with};
use unisono_net::{Connection, Introduction};

use super::network::{Arrival, Arrivals, Use};
use super::{CONTROL, DATA, GroupSetup, MEMORY, MESSAGES};
use unisono_net::rank::Rank;

/// Connections that wait for their group to form. More than a large job needs; fewer would
/// refuse a member that is early.
const MAX_WAITING: usize = 1 << 16;

/// The connections that came for one rank of a job.
#[derive(Default)]
pub struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<Introduction, Connection>,
    /// Groups that form, by their ids: what to ring when a connection comes.
    forming: HashMap<u64, Arc<OwnedFd>>,
    /// Groups that have formed or are about to, by their instances.
    formed: HashMap<u64, Formed>,
    is_abandoned: bool,
}

struct Formed {
    /// The members' ranks in the job.
    members: Vec<Rank>,
    links: Arc<Arrivals>,
    others: Arc<Arrivals>,
    /// After how long a connection that carries nothing breaks.
    timeout: Duration,
    /// Streams of links, by rank and number, that this rank opens, and that others have opened.
    claimed: HashSet<(usize, u32)>,
    opened: HashSet<(usize, u32)>,
    /// The memory of this host, if this rank has made it and others may ask for it.
    memory: Option<Arc<Memory>>,
}

impl Inbox {
    /// Takes a connection that was made to `rank`.
    pub fn put(&self, rank: usize, mut connection: Connection, introduction: Introduction) {
        if introduction.to as usize != rank {
            log::warn!("refused a connection meant for rank {}", introduction.to);
            return;
        }
        let mut state = self.lock();
        let Introduction { purpose, group, from, channel, .. } = introduction;
        if let Some(formed) = state.formed.get_mut(&group) {
            let Some(peer) = formed.members.iter().position(|m| m.0 == from as usize) else {
                log::warn!("refused a connection of rank {from}, which is not in the group");
                return;
            };
            if let Err(error) = keep_alive(connection.socket(), formed.timeout) {
                log::warn!("refused a connection of rank {from}: {error}");
                return;
            }
            let (to, purpose) = match purpose {
                DATA => {
                    // If both ranks open it, that of the higher rank counts.
                    let stream = (peer, channel);
                    if (formed.claimed.contains(&stream) && (from as usize) < rank)
                        || !formed.opened.insert(stream)
                    {
                        return;
                    }
                    // The other rank uses it when it has this byte, for which a fresh connection has room.
                    let _ = connection.sender.send(&[1], SendFlags::DONTWAIT);
                    (&formed.links, Use::Data(channel))
                }
                MESSAGES => (&formed.others, Use::Messages),
                CONTROL => (&formed.others, Use::Control),
                _ => {
                    return match &formed.memory {
                        Some(memory) => hand_over(&connection, memory),
                        None => state.wait(introduction, connection),
                    };
                }
            };
            return to.put(Arrival { peer, purpose, connection });
        }
        // The group has not formed here. Data and messages are for one that this rank has left.
        if purpose == CONTROL || purpose == MEMORY {
            state.wait(introduction, connection);
        }
        if let Some(bell) = state.forming.get(&group) {
            ring(bell);
        }
    }

    /// This rank begins to form a group; `bell` is rung when a connection comes for it.
    pub fn begin(&self, group: u64, bell: &Arc<OwnedFd>) {
        let mut state = self.lock();
        // Those that came before and are closed were meant for earlier attempts, at this group or another.
        // Of those that come from now on, one that is given up may have said why.
        state.waiting.retain(|_, waiting| !is_over(waiting.socket()));
        state.forming.insert(group, bell.clone());
    }

    /// Takes the control connections of a group that forms which ranks have opened that are `wanted`. What
    /// others have opened may be for the next group with this id.
    pub fn take(
        &self,
        epoch: u64,
        group: u64,
        wanted: impl Fn(usize) -> bool,
    ) -> Vec<(usize, Connection)> {
        let mut state = self.lock();
        let is_of = |of: &Introduction| {
            (of.purpose, of.epoch, of.group) == (CONTROL, epoch, group) && wanted(of.from as usize)
        };
        let taken = state.waiting.extract_if(|introduction, _| is_of(introduction));
        taken.map(|(introduction, waiting)| (introduction.from as usize, waiting)).collect()
    }

    /// No group forms any more: rings for those that do.
    pub fn abandon(&self) {
        let mut state = self.lock();
        state.is_abandoned = true;
        state.forming.values().for_each(|bell| ring(bell));
    }

    /// Whether no group forms any more.
    pub fn is_abandoned(&self) -> bool {
        self.lock().is_abandoned
    }

    /// The attempt to form a group is over.
    pub fn end(&self, group: u64) {
        self.lock().forming.remove(&group);
    }

    /// From now on, connections for this instance of a group are delivered.
    pub fn open(
        &self,
        instance: u64,
        setup: &GroupSetup,
        links: &Arc<Arrivals>,
        others: &Arc<Arrivals>,
    ) {
        let (links, others) = (links.clone(), others.clone());
        let (claimed, opened) = Default::default();
        let (members, timeout) = (setup.members.clone(), setup.options.timeout);
        let formed = Formed { members, links, others, timeout, claimed, opened, memory: None };
        self.lock().formed.insert(instance, formed);
    }

    /// Whether this rank is to open a stream of a link: not if the other rank has.
    pub fn claim(&self, instance: u64, peer: usize, channel: u32) -> bool {
        let mut state = self.lock();
        let Some(formed) = state.formed.get_mut(&instance) else { return false };
        !formed.opened.contains(&(peer, channel)) && formed.claimed.insert((peer, channel))
    }

    /// Hands the memory of an instance to all ranks that ask for it.
    pub fn share(&self, instance: u64, memory: &Arc<Memory>) {
        let mut state = self.lock();
        let asks = |of: &Introduction| (of.purpose, of.group) == (MEMORY, instance);
        for (_, waiting) in state.waiting.extract_if(|introduction, _| asks(introduction)) {
            hand_over(&waiting, memory);
        }
        if let Some(formed) = state.formed.get_mut(&instance) {
            formed.memory = Some(memory.clone());
        }
    }

    /// All members have the memory.
    pub fn keep(&self, instance: u64) {
        if let Some(formed) = self.lock().formed.get_mut(&instance) {
            formed.memory = None;
        }
    }

    /// This rank has left an instance.
    pub fn close(&self, instance: u64) {
        self.lock().formed.remove(&instance);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }
}

impl State {
    fn wait(&mut self, introduction: Introduction, connection: Connection) {
        if self.waiting.len() >= MAX_WAITING {
            log::warn!("refused a connection of rank {}: too many wait", introduction.from);
            return;
        }
        self.waiting.insert(introduction, connection);
    }
}

/// Sends the descriptor of memory to a rank of this host, which waits for it.
fn hand_over(connection: &Connection, memory: &Memory) {
    // A rank that is gone needs none, and is missed elsewhere.
    let _ = send_with(connection.socket(), &[1], memory.file());
}

/// Rings a bell.
pub fn ring(bell: &OwnedFd) {
    // An eventfd only refuses a write that would overflow, and then it is readable.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
