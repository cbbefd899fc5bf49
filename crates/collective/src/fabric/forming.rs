//! Forms a group of processes: opens the control connections to the neighbours, tells them what this rank
//! knows, and shares the memory of the host. [`Gathering`] says what it all means.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use unisono_net::dial::{Dials, Refused};
use unisono_net::frame::{FrameError, FrameReader, append};
use unisono_net::keepalive::keep_alive;
use unisono_net::memory::receive_with;
use unisono_net::{Connection, HandshakeError, timespec};

use super::gathering::{Failure, Gathering, Update, longest_update};
use super::process::{ProcessHub, ProcessNetwork};
use super::staging::HostMemory;
use super::{CONTROL, GroupSetup, MEMORY, system};
use crate::control::frame::Frame;
use crate::control::news::{self, Fact};
use crate::control::overlay;
use crate::control::reason::Reason;
use crate::error::FormError;
use crate::schedule::Topology;
use crate::window::region::Region;
use unisono_net::rank::Rank;

/// How often neighbours hear that one more rank has come, or is ready, in a group of [`SOME`] to [`FEW`]
/// ranks. Longer: the group forms later. Shorter: more messages.
const NOW_AND_THEN: Duration = Duration::from_millis(4);

/// Ranks up to which neighbours hear more often, the fewer ranks the more: little is to be said, and a group
/// that takes the place of one that has failed should form soon.
const SOME: u32 = 16;

/// Ranks from which on neighbours hear less often, the more ranks the less: on a crowded host, each message
/// takes the core from the rank that is awaited.
const FEW: u32 = 64;

/// How long the ranks wait for each other once all have come, in timeouts.
const TIMEOUTS: u32 = 3;

/// How long a rank that gives up tries to tell its neighbours why, and how long ranks whose settings
/// differ hear each other out.
const GRACE: Duration = Duration::from_secs(1);

/// What a group is made of: control connections, regions of the host's memory, and the network.
type Formed = (Vec<(usize, Connection)>, Vec<Region>, ProcessNetwork);

/// Forms a group, together with its other members.
pub fn form(
    hub: &Arc<ProcessHub>,
    setup: &GroupSetup,
    topology: &Topology,
) -> Result<Formed, FormError> {
    let mut attempt = Attempt::begin(hub, setup, topology)?;
    let outcome = attempt.run();
    hub.inbox.end(setup.id);
    if let Err(error) = outcome {
        // Of the end of an epoch, the others learn by themselves.
        if !matches!(error, FormError::EpochEnded { .. }) {
            attempt.tell(&error);
        }
        return Err(error);
    }
    let Attempt { network, memory, neighbours, .. } = attempt;
    let network = network.expect("a group that has formed has an instance");
    let MemoryState::There(regions) = memory else { unreachable!("a ready rank has its memory") };
    hub.inbox.keep(network.instance());
    let control = neighbours.into_iter().map(|n| (n.rank, n.connection)).collect();
    Ok((control, regions, network))
}

/// One attempt of a rank to form a group.
struct Attempt<'a> {
    hub: &'a Arc<ProcessHub>,
    setup: &'a GroupSetup,
    topology: &'a Topology,
    bell: Arc<OwnedFd>,
    gathering: Gathering,
    /// The neighbours that connect to this rank.
    expected: Vec<usize>,
    dials: Dials,
    /// The neighbours to which there is a connection.
    neighbours: Vec<Neighbour>,
    network: Option<ProcessNetwork>,
    memory: MemoryState,
    deadline: Instant,
}

struct Neighbour {
    rank: usize,
    connection: Connection,
    reader: FrameReader,
    output: Vec<u8>,
    closed: bool,
}

/// The memory of this rank's host.
enum MemoryState {
    /// Not begun.
    Later,
    /// Asked for.
    Dialing(Dials),
    /// About to be sent by the rank that made it.
    Coming(Connection),
    /// Mapped; no regions if this rank is alone on its host.
    There(Vec<Region>),
}

impl<'a> Attempt<'a> {
    fn begin(
        hub: &'a Arc<ProcessHub>,
        setup: &'a GroupSetup,
        topology: &'a Topology,
    ) -> Result<Attempt<'a>, FormError> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(|e| system("making an eventfd")(e.into()))?);
        let world = setup.members.len();
        let all = overlay::neighbours(setup.me, world);
        let instance = (setup.me == 0).then(|| instance(setup)).transpose()?;
        let settings = setup.options.fingerprint();
        let gathering = Gathering::new(setup.me, setup.members.clone(), &all, settings, instance);
        // Between two, the higher rank connects to the lower.
        let (lower, expected): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|&peer| setup.members[peer].0 < hub.rank);
        let door = |peer| hub.door(setup, topology, peer, (CONTROL, setup.id, 0));
        let dials = Dials::new(lower.into_iter().map(door).collect());
        hub.inbox.begin(setup.id, &bell);
        Ok(Attempt {
            hub,
            setup,
            topology,
            bell,
            gathering,
            expected,
            dials,
            neighbours: Vec::new(),
            network: None,
            memory: MemoryState::Later,
            deadline: setup.options.deadline(1),
        })
    }

    fn run(&mut self) -> Result<(), FormError> {
        let last = self.setup.options.deadline(TIMEOUTS);
        let ranks = self.setup.members.len() as u32;
        let interval = NOW_AND_THEN * ranks.div_ceil(FEW) * ranks.min(SOME) / SOME;
        let mut heard_out = None;
        let mut next_news = Instant::now();
        loop {
            if self.hub.inbox.is_abandoned() {
                return Err(FormError::EpochEnded { epoch: self.setup.epoch });
            }
            self.connect()?;
            self.listen();
            self.prepare()?;
            let now = Instant::now();
            let now_and_then = now >= next_news;
            if now_and_then {
                next_news = now + interval;
            }
            self.talk(now_and_then);
            let error = self.gathering.error(self.setup.options.timeout);
            if let Some(error) = error {
                let until = *heard_out.get_or_insert(now + GRACE);
                if self.gathering.has_failed() || now >= until {
                    return Err(error);
                }
            } else if self.gathering.is_formed()
                && self.neighbours.iter().all(|neighbour| !neighbour.has_output())
            {
                return Ok(());
            } else if now >= self.deadline && !self.gathering.are_all_here() {
                let missing = self.gathering.missing().into_iter();
                let missing = missing.map(|rank| self.setup.members[rank]).collect();
                return Err(FormError::Missing { missing, after: self.setup.options.timeout });
            } else if now >= last {
                let peer = self.gathering.unready().first().copied().unwrap_or(self.setup.me);
                return Err(self.peer_failed(peer, "it did not answer in time".into()));
            }
            let mut wake = if self.gathering.are_all_here() { last } else { self.deadline };
            if self.gathering.has_news() {
                wake = wake.min(next_news);
            }
            self.wait(wake.min(heard_out.unwrap_or(wake)));
        }
    }

    /// Opens connections, and takes those that neighbours have opened.
    fn connect(&mut self) -> Result<(), FormError> {
        let timeout = self.setup.options.timeout;
        let mut open = Vec::new();
        let dialed = self.dials.advance(&self.hub.dialer(timeout), |door, connection| {
            open.push((door.peer, connection))
        });
        match dialed {
            Ok(()) => {}
            Err(Refused { peer, cause: HandshakeError::Encryption { theirs } }) => {
                return Err(FormError::Encryption { peer: self.setup.members[peer], theirs });
            }
            Err(Refused { peer, cause }) => {
                return Err(self.peer_failed(peer, format!("cannot connect to it: {cause}")));
            }
        }
        let (members, expected) = (&self.setup.members, &self.expected);
        let wanted = |member| expected.iter().any(|peer| members[*peer] == Rank(member));
        for (member, connection) in self.hub.inbox.take(self.setup.epoch, self.setup.id, wanted) {
            let peer = members.iter().position(|m| m.0 == member).expect("it is wanted");
            open.push((peer, connection));
        }
        for (rank, connection) in open {
            self.expected.retain(|peer| *peer != rank);
            keep_alive(connection.socket(), timeout)
                .and_then(|()| connection.socket().set_nonblocking(true))
                .map_err(system("preparing a connection"))?;
            self.gathering.connect(rank);
            let (reader, output) = Default::default();
            self.neighbours.push(Neighbour { rank, connection, reader, output, closed: false });
        }
        Ok(())
    }

    /// Hears what the neighbours tell.
    fn listen(&mut self) {
        let limit = longest_update(self.setup.members.len());
        for neighbour in self.neighbours.iter_mut().filter(|neighbour| !neighbour.closed) {
            let Neighbour { rank, connection, reader, closed, .. } = neighbour;
            // What follows its last update is for the group.
            while !self.gathering.is_final(*rank) {
                let heard = reader.poll::<Update>(&mut connection.receiver, limit);
                let heard = heard.map(|update| {
                    update.map(|update| self.gathering.hear(*rank, update)).transpose()
                });
                match heard {
                    Ok(Ok(Some(()))) => {}
                    Ok(Ok(None)) => break,
                    Err(FrameError::Closed | FrameError::Io(_)) => {
                        *closed = true;
                        self.gathering.lose(*rank);
                        break;
                    }
                    Ok(Err(_)) | Err(_) => {
                        *closed = true;
                        self.gathering.fail_for(*rank, "it sent an unreadable message");
                        break;
                    }
                }
            }
        }
    }

    /// Once all are here, opens this instance of the group and gets the memory of the host.
    fn prepare(&mut self) -> Result<(), FormError> {
        let Some(instance) = self.gathering.instance() else { return Ok(()) };
        if self.network.is_none() {
            let network = ProcessNetwork::open(self.hub, self.setup, self.topology, instance)?;
            self.network = Some(network);
        }
        if !matches!(self.memory, MemoryState::There(_)) {
            self.get_memory(instance)?;
        }
        if matches!(self.memory, MemoryState::There(_)) && self.gathering.is_connected() {
            self.gathering.set_ready();
        }
        Ok(())
    }

    /// Makes the memory of the host, or gets it from the rank that does.
    fn get_memory(&mut self, instance: u64) -> Result<(), FormError> {
        let host = HostMemory::of(&self.setup.options, self.topology, self.setup.me);
        if let MemoryState::Later = self.memory {
            self.memory = match host.place() {
                _ if host.members.len() < 2 => MemoryState::There(Vec::new()),
                // The first rank of the host makes it.
                0 => {
                    let memory = host.create()?;
                    self.hub.inbox.share(instance, &memory);
                    MemoryState::There(host.regions(&memory))
                }
                _ => {
                    let what = (MEMORY, instance, 0);
                    let door = self.hub.door(self.setup, self.topology, host.members[0], what);
                    MemoryState::Dialing(Dials::new(vec![door]))
                }
            };
        }
        if let MemoryState::Dialing(dials) = &mut self.memory {
            let mut open = None;
            let dialer = self.hub.dialer(self.setup.options.timeout);
            let dialed =
                dials.advance(&dialer, |_, connection: Connection| open = Some(connection));
            if let Err(Refused { peer, cause }) = dialed {
                return Err(self.peer_failed(peer, format!("cannot ask it for memory: {cause}")));
            }
            if let Some(connection) = open {
                let socket = connection.socket();
                socket.set_nonblocking(true).map_err(system("preparing a connection"))?;
                self.memory = MemoryState::Coming(connection);
            }
        }
        if let MemoryState::Coming(connection) = &self.memory {
            let mut file = None;
            let received = receive_with(connection.socket(), &mut [0], &mut file);
            match (received, file) {
                (Err(Errno::AGAIN | Errno::INTR), _) => {}
                (Ok(1), Some(file)) => {
                    self.memory = MemoryState::There(host.regions(&host.open(&file)?));
                }
                // If it failed, it tells why on another connection.
                _ => self.gathering.fail_for(host.members[0], "it sent no staging memory"),
            }
        }
        Ok(())
    }

    fn peer_failed(&self, peer: usize, reason: String) -> FormError {
        FormError::Peer { peer: self.setup.members[peer], reason }
    }

    /// Tells the neighbours what they do not know.
    fn talk(&mut self, now_and_then: bool) {
        for neighbour in self.neighbours.iter_mut().filter(|neighbour| !neighbour.closed) {
            if let Some(update) = self.gathering.due(neighbour.rank, now_and_then) {
                append(&update, &mut neighbour.output).expect("an update is short");
            }
            neighbour.write();
        }
    }

    /// Tells the neighbours why this rank gives up. Those that may have formed the group hear it as members.
    fn tell(&mut self, error: &FormError) {
        let own = self.setup.members[self.setup.me];
        self.gathering.fail(match error {
            FormError::Missing { missing, .. } => Failure::Missing { missing: missing.clone() },
            FormError::Peer { peer, reason } => {
                Failure::Rank { rank: *peer, reason: reason.clone() }
            }
            error => Failure::Rank { rank: own, reason: error.to_string() },
        });
        let parting = parting(error, own);
        for neighbour in self.neighbours.iter_mut().filter(|neighbour| !neighbour.closed) {
            if self.gathering.has_told_all_ready(neighbour.rank) {
                neighbour.output.extend(&parting);
            }
        }
        let deadline = Instant::now() + GRACE;
        self.talk(true);
        while self.neighbours.iter().any(|n| !n.closed && n.has_output())
            && Instant::now() < deadline
        {
            self.wait(deadline);
            self.talk(false);
        }
    }

    /// Waits until something happens.
    fn wait(&self, until: Instant) {
        let mut fds = vec![PollFd::new(&*self.bell, PollFlags::IN)];
        let mut until = until;
        until = self.dials.watch(&mut fds).map_or(until, |end| until.min(end));
        match &self.memory {
            MemoryState::Dialing(dials) => {
                until = dials.watch(&mut fds).map_or(until, |end| until.min(end));
            }
            MemoryState::Coming(connection) => {
                fds.push(PollFd::new(&**connection.socket(), PollFlags::IN));
            }
            MemoryState::Later | MemoryState::There(_) => {}
        }
        for neighbour in self.neighbours.iter().filter(|neighbour| !neighbour.closed) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, !self.gathering.is_final(neighbour.rank));
            flags.set(PollFlags::OUT, neighbour.has_output());
            if !flags.is_empty() {
                fds.push(PollFd::new(&**neighbour.connection.socket(), flags));
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        // Interrupted or failed: the loop comes round again.
        let _ = poll(&mut fds, Some(&timespec(left)));
        // Silences the bell; nothing to read is fine.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }
}

impl Neighbour {
    /// Whether something is left to be sent.
    fn has_output(&self) -> bool {
        !self.output.is_empty() || !self.connection.sender.is_flushed()
    }

    /// Sends what the socket takes. That it is closed shows when it is read.
    fn write(&mut self) {
        // What does not go now goes with the next attempt.
        let _ = self.connection.sender.flush(SendFlags::DONTWAIT);
        while !self.output.is_empty() {
            match self.connection.sender.send(&self.output, SendFlags::DONTWAIT) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => return self.output.clear(),
            }
        }
    }
}

/// The control frame by which rank `own` tells a neighbour that has formed the group why it has not.
fn parting(error: &FormError, own: Rank) -> Vec<u8> {
    let reason = match error {
        FormError::Peer { peer, reason } if reason.is_empty() => {
            Reason::Lost { peer: *peer, silent_ms: None }
        }
        FormError::Peer { peer, reason } => {
            Reason::Failed { peer: *peer, reason: reason.clone() }.shortened()
        }
        error => Reason::Aborted { peer: own, reason: error.to_string() }.shortened(),
    };
    let facts = news::encode(&Fact::Failed(reason), Vec::new());
    let mut bytes = Frame::News { length: facts.len() }.encode().to_vec();
    bytes.extend(facts);
    bytes
}

/// A number for an instance of a group that no other has.
fn instance(setup: &GroupSetup) -> Result<u64, FormError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|e| system("drawing a number")(e.into()))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&setup.epoch.to_le_bytes()).update(&setup.id.to_le_bytes()).update(&random);
    let bytes = hasher.finalize();
    Ok(u64::from_le_bytes(bytes.as_bytes()[..8].try_into().expect("eight of 32 bytes")).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_that_has_formed_the_group_is_told_by_control_frames_why_another_has_not() {
        let (own, peer) = (Rank(3), Rank(5));
        let lost = FormError::Peer { peer, reason: String::new() };
        let late = FormError::Peer { peer, reason: "it did not answer in time".into() };
        let other = FormError::Missing { missing: vec![peer], after: Duration::from_secs(1) };
        for (error, expected) in [
            (&lost, Reason::Lost { peer, silent_ms: None }),
            (&late, Reason::Failed { peer, reason: "it did not answer in time".into() }),
            (&other, Reason::Aborted { peer: own, reason: other.to_string() }),
        ] {
            let bytes = parting(error, own);
            let (head, facts) = bytes.split_first_chunk().expect("longer than a frame");
            assert_eq!(Frame::decode(head), Ok(Frame::News { length: facts.len() }));
            assert_eq!(news::decode(facts), Ok(vec![Fact::Failed(expected)]));
        }
    }
}
