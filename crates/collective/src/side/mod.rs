//! The side channel of a group: who is alive, who leaves, and messages with tags.
//!
//! Every pair of ranks has one connection for it, and every rank one thread, the *monitor*, that
//! serves them all. It notices a closed connection at once and a silent peer after the timeout,
//! ends the group, and tells everybody else why. Messages between two ranks also travel here,
//! because a send and a receive that cross must not wait for each other: the sender announces a
//! message, the receiver clears it once somebody wants it, and only then do its bytes follow,
//! straight into the receiver's buffer. A receive may leave open whose message it wants; `mailbox`
//! says which message belongs to which receive.

pub mod frame;
mod mailbox;
mod peer;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use unisono_net::Connection;
use unisono_net::keepalive::Flow;
use zerocopy::IntoBytes;

use crate::call::{Call, WireCall};
use crate::error::{Error, Loss};
use crate::state::GroupState;
use crate::waits::{PLACE, shortened};
use crate::work::{Work, WorkPool};
use frame::Frame;
use mailbox::{Announced, Mailbox, Wanted};
use peer::{Event, Idle, Peer};

/// How long a leaving rank waits for its last words to be taken.
const FAREWELL: Duration = Duration::from_millis(200);

/// Room for commands before their list grows. More: more idle memory. Less: the first burst of
/// transfers allocates.
const ROOM: usize = 16;

/// The side channel, as the group sees it.
pub struct Side {
    shared: Arc<Shared>,
    monitor: Option<JoinHandle<()>>,
    pool: WorkPool,
}

struct Shared {
    commands: Mutex<Vec<Command>>,
    wake: Arc<OwnedFd>,
}

/// A send or a receive, in memory that outlives it.
pub struct Transfer {
    /// The tag both sides name.
    pub tag: u32,
    /// The memory to send or to fill.
    pub address: *mut u8,
    /// Its length in bytes.
    pub length: usize,
    /// Told when it is done.
    pub work: Work,
}

// SAFETY: whoever submits a transfer keeps its memory valid, and away from other threads, until
// its work is done.
unsafe impl Send for Transfer {}

enum Command {
    Send { to: usize, transfer: Transfer },
    Receive { from: Option<usize>, transfer: Transfer },
    Leave { seq: u32 },
}

impl Side {
    /// Starts the monitor over the connections; `connections[peer]` is `None` for this rank itself. It
    /// also watches `flows`, on which data travels to a peer.
    pub fn start(
        connections: Vec<Option<Connection>>,
        flows: Vec<(usize, Flow)>,
        rank: usize,
        timeout: Duration,
        state: Arc<GroupState>,
    ) -> std::io::Result<Side> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let wake = Arc::new(wake);
        state.wake_on_failure(&wake);
        let commands = Mutex::new(Vec::with_capacity(ROOM));
        let shared = Arc::new(Shared { commands, wake });
        let mut peers = Vec::with_capacity(connections.len());
        for (peer, connection) in connections.into_iter().enumerate() {
            peers.push(match connection {
                None => None,
                Some(connection) => {
                    connection.socket().set_nonblocking(true)?;
                    Some(Peer::new(connection, peer, rank))
                }
            });
        }
        let monitor = Monitor {
            fds: Vec::with_capacity(peers.len() + 1),
            commands: Vec::with_capacity(ROOM),
            peers,
            flows,
            mailbox: Mailbox::new(),
            timeout,
            state,
            shared: shared.clone(),
            told: false,
            placed: false,
        };
        let monitor = std::thread::Builder::new()
            .name(format!("unisono-monitor-{rank}"))
            .spawn(move || monitor.run())?;
        Ok(Side { shared, monitor: Some(monitor), pool: WorkPool::default() })
    }

    /// A handle for the next transfer.
    pub fn work(&mut self) -> Work {
        self.pool.take(None)
    }

    /// Submits a send to another rank.
    pub fn send(&self, to: usize, transfer: Transfer) {
        self.shared.command(Command::Send { to, transfer });
    }

    /// Submits a receive from another rank, or from whoever sends first.
    pub fn receive(&self, from: Option<usize>, transfer: Transfer) {
        self.shared.command(Command::Receive { from, transfer });
    }

    /// What is left to do when the group is dropped.
    pub fn leaving(&mut self) -> Leaving {
        Leaving { shared: self.shared.clone(), monitor: self.monitor.take() }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.leaving().leave(0);
    }
}

/// A side channel that takes no more transfers.
pub struct Leaving {
    shared: Arc<Shared>,
    monitor: Option<JoinHandle<()>>,
}

impl Leaving {
    /// Whether this is the monitor, which cannot wait for its own end.
    pub fn is_on_own_thread(&self) -> bool {
        self.monitor.as_ref().is_some_and(|t| t.thread().id() == std::thread::current().id())
    }

    /// Leaves the group in an orderly way, having taken part in all calls before `seq`.
    pub fn leave(self, seq: u32) {
        let Some(monitor) = self.monitor else { return };
        self.shared.command(Command::Leave { seq });
        if monitor.join().is_err() {
            log::error!("the monitor of a group panicked");
        }
    }
}

impl Shared {
    fn command(&self, command: Command) {
        self.commands.lock().expect("no panic while locked").push(command);
        // The counter of an eventfd can only refuse to overflow, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

struct Monitor {
    peers: Vec<Option<Peer>>,
    flows: Vec<(usize, Flow)>,
    mailbox: Mailbox<Receive>,
    timeout: Duration,
    state: Arc<GroupState>,
    shared: Arc<Shared>,
    /// Whether the other ranks have been told that the group failed.
    told: bool,
    /// Whether they have been told where this rank made the calls that differ.
    placed: bool,
    /// Room for the commands being carried out; kept to allocate nothing per transfer.
    commands: Vec<Command>,
    /// Room for the list to poll; empty but while polling.
    fds: Vec<PollFd<'static>>,
}

/// A receive for which no message was announced.
struct Receive {
    transfer: Transfer,
    idle: Idle,
}

impl Monitor {
    fn run(mut self) {
        // Often enough that one lost or late heartbeat does not look like silence.
        let beat = (self.timeout / 8).min(Duration::from_secs(1));
        let mut next_beat = Instant::now();
        loop {
            if let Some(seq) = self.obey() {
                self.farewell(seq);
                return;
            }
            self.exchange();
            if let Some(call) = self.state.take_stuck() {
                self.tell_stuck(call);
            }
            self.tell_waits();
            let now = Instant::now();
            if now >= next_beat || self.state.take_suspicion() {
                next_beat = now + beat;
                self.beat(now);
            }
            if self.state.is_over() {
                self.give_up();
            }
            self.sleep(next_beat);
        }
    }

    /// Carries out what the group asked for; `Some` when it leaves.
    fn obey(&mut self) -> Option<u32> {
        let Monitor { shared, commands, .. } = self;
        std::mem::swap(&mut *shared.commands.lock().expect("no panic while locked"), commands);
        let mut leave = None;
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            match command {
                Command::Leave { seq } => leave = Some(seq),
                Command::Send { transfer, .. } | Command::Receive { transfer, .. }
                    if self.state.is_over() =>
                {
                    transfer.work.complete(Err(self.state.error(None)));
                }
                Command::Send { to, transfer } => {
                    peer(&mut self.peers, to).submit_send(transfer, &self.state);
                }
                Command::Receive { from, transfer } => self.receive(from, transfer),
            }
        }
        self.commands = commands;
        leave
    }

    /// Starts a receive: of a message that is there, or of one that may come.
    fn receive(&mut self, from: Option<usize>, transfer: Transfer) {
        let tag = transfer.tag;
        let receive = Receive { transfer, idle: Idle::new() };
        if let Some((receive, message)) = self.mailbox.receive(Wanted { from, tag, receive }) {
            meet(&mut self.peers, receive, message, &self.state);
        } else if let Some(from) = from
            && !peer(&mut self.peers, from).is_here()
        {
            self.end_receives(from);
        } else if from.is_none() {
            self.end_hopeless();
        }
    }

    /// Ends the receives of messages of a rank that has left.
    fn end_receives(&mut self, from: usize) {
        self.mailbox.forget(from);
        let error = peer(&mut self.peers, from).left(&self.state);
        for wanted in self.mailbox.take(|wanted| wanted.from == Some(from)) {
            wanted.receive.transfer.work.complete(Err(error.clone()));
        }
        self.end_hopeless();
    }

    /// Ends the receives of messages of anybody once everybody has left.
    fn end_hopeless(&mut self) {
        if self.peers.iter().flatten().any(Peer::is_here) {
            return;
        }
        let Some(peer) = self.peers.iter().flatten().next() else { return };
        let error = peer.left(&self.state);
        for wanted in self.mailbox.take(|wanted| wanted.from.is_none()) {
            wanted.receive.transfer.work.complete(Err(error.clone()));
        }
    }

    /// Moves what the sockets allow and acts on what arrives.
    fn exchange(&mut self) {
        for rank in 0..self.peers.len() {
            // In a large group, few of many peers have something to say at a time.
            let idle = |peer: &Peer| !peer.ready && !peer.has_output();
            if self.peers[rank].as_ref().is_none_or(idle) {
                continue;
            }
            while let Some(event) = self.peers[rank].as_mut().and_then(Peer::progress) {
                self.act_on(rank, event);
            }
        }
    }

    fn act_on(&mut self, rank: usize, event: Event) {
        match event {
            Event::Lost => {
                self.state.places().miss(rank);
                self.state.fail(Error::PeerLost { peer: rank, loss: Loss::Closed, during: None });
            }
            Event::Aborted(error) => {
                let epoch_ended = matches!(error, Error::EpochEnded { .. });
                // Who reports a failure tells everybody, so this rank need not.
                self.told |= self.state.fail(error);
                if epoch_ended {
                    self.state.end_epoch();
                }
            }
            Event::Failed(error) => {
                self.state.places().miss(rank);
                self.state.fail(error);
            }
            Event::Stuck(call) => {
                let known = self.state.compare(rank, &call);
                peer(&mut self.peers, rank).stuck = (!known).then_some(call);
            }
            Event::Announced(message) => match self.mailbox.announce(message) {
                Ok(None) => {}
                Ok(Some((receive, message))) => {
                    meet(&mut self.peers, receive, message, &self.state);
                }
                Err(_) => {
                    let what = "more messages than anybody receives";
                    let event = peer(&mut self.peers, rank).broke_rules(what);
                    self.act_on(rank, event);
                }
            },
            Event::Left { seq, reason } => {
                if let Some(reason) = reason {
                    self.state.note_parting(rank, reason);
                }
                self.state.note_left(rank, seq);
                let peer = peer(&mut self.peers, rank);
                peer.fail_transfers(&peer.left(&self.state));
                self.end_receives(rank);
            }
            Event::Place { number, place } => self.state.places().tell((rank, number), place),
            Event::Waits(statement) => self.state.hear(rank, statement),
        }
    }

    /// Tells everybody that this rank waits in a call, and compares it with where others wait.
    fn tell_stuck(&mut self, call: Call) {
        for peer in self.peers.iter_mut().flatten().filter(|p| p.is_here()) {
            peer.queue(Frame::Stuck, WireCall::from(call).as_bytes().to_vec());
            if let Some(theirs) = peer.stuck
                && self.state.compare(peer.rank, &theirs)
            {
                peer.stuck = None;
            }
        }
    }

    /// Tells everybody what threads of this rank state: that they wait, here or in other groups.
    fn tell_waits(&mut self) {
        for statement in self.state.take_statements() {
            let body = postcard::to_stdvec(&statement).expect("plain data always encodes");
            for peer in self.peers.iter_mut().flatten().filter(|p| p.is_present()) {
                peer.queue(Frame::Waits { length: body.len() }, body.clone());
            }
        }
    }

    /// Tells everybody, this rank too, where it made the calls that differ.
    fn tell_places(&mut self) {
        let Error::Mismatch { rank, call, peer, peer_call, .. } = self.state.error(None) else {
            return;
        };
        let me = self.state.rank();
        for (caller, number) in [(rank, call.number()), (peer, peer_call.number())] {
            let place = self.state.places().own(number);
            let text = place.as_deref().map(|place| shortened(place, PLACE)).unwrap_or_default();
            for peer in self.peers.iter_mut().flatten().filter(|p| p.is_present()) {
                let length = text.len();
                peer.queue(Frame::Place { number, length }, text.clone().into_bytes());
            }
            if caller == me {
                self.state.places().tell((me, number), place);
            }
        }
    }

    fn beat(&mut self, now: Instant) {
        // Who said goodbye owes no sign of life, even if its connection is still open.
        for peer in self.peers.iter_mut().flatten().filter(|p| p.is_here()) {
            peer.queue(Frame::Heartbeat, Vec::new());
            peer.report_stalls(&self.state);
            let silence = now.saturating_duration_since(peer.last_heard);
            if silence > self.timeout {
                let loss = Loss::Silent(silence);
                self.state.fail(Error::PeerLost { peer: peer.rank, loss, during: None });
            }
        }
        for (peer, flow) in &mut self.flows {
            if let Some(silence) = flow.silence(now).filter(|silence| *silence > self.timeout) {
                let loss = Loss::Silent(silence);
                self.state.fail(Error::PeerLost { peer: *peer, loss, during: None });
            }
        }
        let Monitor { peers, mailbox, state, .. } = self;
        let here = || peers.iter().flatten().filter(|p| p.is_here()).map(|p| p.rank).collect();
        for Wanted { from, receive, .. } in mailbox.waiting() {
            let missing = || from.map_or_else(here, |from| vec![from]);
            receive.idle.report("receive", &receive.transfer, state, missing);
        }
    }

    /// Tells everybody why the group failed and ends all transfers.
    fn give_up(&mut self) {
        let error = self.state.error(None);
        let reason = frame::encode_reason(&error);
        for peer in self.peers.iter_mut().flatten() {
            peer.fail_transfers(&error);
            if !self.told && peer.is_here() {
                peer.queue(Frame::Abort { length: reason.len() }, reason.clone());
                // Whatever this brings comes too late to matter, but for what explains the failure.
                while let Some(event) = peer.progress() {
                    match event {
                        Event::Place { number, place } => {
                            self.state.places().tell((peer.rank, number), place);
                        }
                        Event::Lost | Event::Failed(_) => self.state.places().miss(peer.rank),
                        _ => {}
                    }
                }
            }
        }
        self.told = true;
        if !std::mem::replace(&mut self.placed, true) {
            self.tell_places();
        }
        self.end_all_receives(|_| error.clone());
    }

    fn end_all_receives(&mut self, error: impl Fn(Option<usize>) -> Error) {
        for Wanted { from, receive, .. } in self.mailbox.take(|_| true) {
            receive.transfer.work.complete(Err(error(from)));
        }
    }

    fn farewell(&mut self, seq: u32) {
        if self.state.is_over() {
            self.give_up();
        }
        let deadline = Instant::now() + FAREWELL;
        for peer in self.peers.iter_mut().flatten() {
            if !self.state.is_over() {
                let why = self.state.parting().map(|why| first_line(why, frame::MAX_TEXT));
                let why = why.unwrap_or_default();
                peer.queue(Frame::Goodbye { seq, length: why.len() }, why.into_bytes());
            }
            peer.fail_transfers(&peer.left(&self.state));
        }
        let left = |peer| Error::PeerLost { peer, loss: Loss::Left, during: None };
        let anybody = self.peers.iter().flatten().next().map_or(0, |peer| peer.rank);
        self.end_all_receives(|from| left(from.unwrap_or(anybody)));
        loop {
            self.exchange();
            let unsaid = self.peers.iter().flatten().any(|p| p.is_present() && p.has_output());
            if !unsaid || Instant::now() >= deadline {
                return;
            }
            self.sleep(deadline);
        }
    }

    fn sleep(&mut self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        // SAFETY: the descriptors belong to `self`, and the list is emptied before this returns.
        let watched = |fd: BorrowedFd<'_>, flags| unsafe {
            PollFd::from_borrowed_fd(BorrowedFd::borrow_raw(fd.as_raw_fd()), flags)
        };
        self.fds.push(watched(self.shared.wake.as_fd(), PollFlags::IN));
        for peer in self.peers.iter().flatten().filter(|p| p.is_present()) {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, peer.has_output());
            self.fds.push(watched(peer.socket().as_fd(), flags));
        }
        let polled = rustix::event::poll(&mut self.fds, Some(&timeout)).is_ok();
        let watched = self.peers.iter_mut().flatten().filter(|p| p.is_present());
        for (peer, fd) in watched.zip(&self.fds[1..]) {
            // Interrupted or failed: each is tried.
            peer.ready = !polled || !fd.revents().is_empty();
        }
        self.fds.clear();
        let mut count = [0; 8];
        // Empty the counter; nothing to read is fine.
        let _ = rustix::io::read(&self.shared.wake, &mut count);
    }
}

/// The first line of a text, of at most `most` bytes.
fn first_line(text: &str, most: usize) -> String {
    let line = text.lines().next().unwrap_or_default();
    let cut = (0..=most.min(line.len())).rev().find(|at| line.is_char_boundary(*at));
    line[..cut.unwrap_or(0)].into()
}

/// A receive and a message have met.
fn meet(peers: &mut [Option<Peer>], receive: Receive, message: Announced, state: &GroupState) {
    if let Err(error) = peer(peers, message.from).clear(receive.transfer, message) {
        state.fail(error);
    }
}

/// Another rank, which is not this one.
fn peer(peers: &mut [Option<Peer>], rank: usize) -> &mut Peer {
    peers[rank].as_mut().expect("the group checks that transfers are with another rank")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use socket2::{Domain, Socket, Type};

    use super::*;

    /// After this long, what has not happened never will.
    const HUNG: Duration = Duration::from_secs(30);

    fn wait_until(what: &str, done: impl Fn() -> bool) {
        let deadline = Instant::now() + HUNG;
        while !done() {
            assert!(Instant::now() < deadline, "waited too long until {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A rank whose peers are at the command of a test.
    fn monitored(timeout: Duration) -> (Side, Arc<GroupState>, [Socket; 2]) {
        let pair = || Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let ((one, first), (two, second)) = (pair(), pair());
        let state = GroupState::new(0, 0, vec![0, 1, 2], Duration::MAX);
        let connections = vec![None, Some(one.into()), Some(two.into())];
        let side = Side::start(connections, Vec::new(), 0, timeout, state.clone()).unwrap();
        (side, state, [first, second])
    }

    /// A peer that has left owes no sign of life: not even if its connection stays open, because
    /// somebody else holds it.
    #[test]
    fn a_peer_that_has_left_is_never_silent() {
        let (_side, state, [mut left, mut silent]) = monitored(Duration::from_millis(100));
        left.write_all(&Frame::Goodbye { seq: 5, length: 0 }.encode()).unwrap();
        wait_until("the goodbye was heard", || state.has_left(1, 5));
        // Heard from later than the one that left.
        silent.write_all(&Frame::Heartbeat.encode()).unwrap();
        wait_until("somebody is given up", || state.is_over());
        let error = state.error(None);
        let Error::PeerLost { peer: 2, loss: Loss::Silent(_), .. } = error else {
            panic!("{error:?}")
        };
    }
}
