//! The control connections of a group: which ranks are alive, which leave, and why it ends.
//!
//! A rank has control connections to its [neighbours](overlay), and one thread, the *monitor*, that serves
//! them and the [messages](crate::messages). It notices a closed connection at once and a silent neighbour
//! after the timeout, ends the group, and tells the others why; what it is told, it passes on ([`news`]).
//!
//! A rank that waits for another relies on that one's neighbours to notice its end. Where ranks have
//! left, those may be gone: then the monitor opens a connection straight to the ranks that it waits for.

pub mod frame;
pub mod news;
pub mod overlay;
mod peer;
pub mod reason;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use unisono_net::Connection;
use unisono_net::keepalive::Flow;

use crate::call::Call;
use crate::error::{Error, Loss};
use crate::excerpt::ending;
use crate::fabric::{Arrival, Network, Opening, Use};
use crate::messages::{Messages, Transfer};
use crate::state::GroupState;
use crate::waits::PLACE;
use crate::work::{Work, WorkPool};
use frame::Frame;
use news::{Fact, MAX_TEXT, News, first_line};
use peer::{Event, Peer};
use reason::Reason;

/// How long a leaving rank waits until its neighbours have taken its last news.
const FAREWELL: Duration = Duration::from_millis(200);

/// Room for commands before their list grows. More: more idle memory. Less: the first burst of
/// transfers allocates.
const ROOM: usize = 16;

/// Ranks that a waiting rank watches itself where others have left. More: more connections. Fewer: a loss
/// is noticed later if the first of them are well.
const WATCHED: usize = 4;

/// The control connections of a rank, as the group sees them.
pub struct Control {
    shared: Arc<Shared>,
    monitor: Option<JoinHandle<()>>,
    pool: WorkPool,
}

struct Shared {
    commands: Mutex<Vec<Command>>,
    /// Wakes the monitor. It is also rung when another rank has opened a connection.
    wake: Arc<OwnedFd>,
}

enum Command {
    Send { to: usize, transfer: Transfer },
    Receive { from: Option<usize>, transfer: Transfer },
    Watch { peer: usize, flow: Flow },
    Leave { seq: u32 },
}

impl Control {
    /// Starts the monitor of a rank over the connections to its neighbours.
    pub fn start(
        neighbours: Vec<(usize, Connection)>,
        network: Arc<dyn Network>,
        rank: usize,
        timeout: Duration,
        state: Arc<GroupState>,
    ) -> std::io::Result<Control> {
        let wake = network.others().bell().clone();
        state.wake_on_failure(&wake);
        let commands = Mutex::new(Vec::with_capacity(ROOM));
        let shared = Arc::new(Shared { commands, wake });
        let world = state.world();
        let mut news = News::new(state.members().to_vec());
        let mut peers = Vec::with_capacity(neighbours.len());
        for (peer, connection) in neighbours {
            connection.socket().set_nonblocking(true)?;
            news.connect(peer);
            peers.push(Peer::new(connection, peer, true));
        }
        let monitor = Monitor {
            rank,
            fds: Vec::with_capacity(peers.len() + ROOM),
            commands: Vec::with_capacity(ROOM),
            peers,
            news,
            messages: Messages::new(rank, world),
            watches: Vec::new(),
            suspects: Vec::new(),
            flows: Vec::new(),
            timeout,
            state,
            network,
            shared: shared.clone(),
            told: false,
            own_places: Vec::new(),
        };
        let monitor = std::thread::Builder::new()
            .name(format!("unisono-monitor-{rank}"))
            .spawn(move || monitor.run())?;
        Ok(Control { shared, monitor: Some(monitor), pool: WorkPool::default() })
    }

    /// A handle for the next transfer.
    pub fn work(&mut self) -> Work {
        self.pool.take(None)
    }

    /// Submits a send to another rank.
    pub fn send(&self, to: usize, transfer: Transfer) {
        self.shared.command(Command::Send { to, transfer });
    }

    /// Submits a receive from another rank, or from the first that sends.
    pub fn receive(&self, from: Option<usize>, transfer: Transfer) {
        self.shared.command(Command::Receive { from, transfer });
    }

    /// What lets the monitor watch over links.
    pub fn watcher(&self) -> Watcher {
        Watcher { shared: self.shared.clone() }
    }

    /// What is left to do when the group is dropped.
    pub fn leaving(&mut self) -> Leaving {
        Leaving { shared: self.shared.clone(), monitor: self.monitor.take() }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.leaving().leave(0);
    }
}

/// Lets the monitor watch over links that were opened.
pub struct Watcher {
    shared: Arc<Shared>,
}

impl Watcher {
    /// Watches over a connection on which data travels to a rank.
    pub fn watch(&self, peer: usize, flow: Flow) {
        self.shared.command(Command::Watch { peer, flow });
    }
}

/// Control connections of a rank that takes part in nothing any more.
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
    rank: usize,
    /// Neighbours, and ranks with which there is a connection because one of the two waits for the other.
    peers: Vec<Peer>,
    news: News,
    messages: Messages,
    /// Connections that are being opened to ranks for which this one waits.
    watches: Vec<(usize, Opening)>,
    /// Ranks whose connections closed while they had not said that they leave; since when. They are lost,
    /// unless their neighbours know better.
    suspects: Vec<(usize, Instant)>,
    flows: Vec<(usize, Flow)>,
    timeout: Duration,
    state: Arc<GroupState>,
    network: Arc<dyn Network>,
    shared: Arc<Shared>,
    /// Whether the other ranks have been told that the group failed.
    told: bool,
    /// Calls of this rank's own that differ from another's, whose places the caller waits for.
    own_places: Vec<u32>,
    /// Room for the commands being carried out; kept to allocate nothing per transfer.
    commands: Vec<Command>,
    /// Room for the list to poll; empty but while polling.
    fds: Vec<PollFd<'static>>,
}

impl Monitor {
    fn run(mut self) {
        // Often enough that one lost or late heartbeat does not look like silence.
        let beat = (self.timeout / 8).min(Duration::from_secs(1));
        let mut next_beat = Instant::now();
        let mut last_turn = next_beat;
        loop {
            if let Some(seq) = self.obey() {
                self.farewell(seq);
                return;
            }
            self.accept();
            self.exchange();
            self.messages.exchange(&*self.network, &self.state);
            self.tell_waits();
            let now = Instant::now();
            let away = now.duration_since(last_turn);
            last_turn = now;
            if now >= next_beat || self.state.take_suspicion() {
                next_beat = now + beat;
                self.catch_up(now, away.saturating_sub(beat));
                self.beat(now);
            }
            self.judge(now);
            if self.state.is_over() {
                self.give_up();
            }
            while self.spread() {}
            let verdict = self.suspects.iter().map(|(_, since)| *since + self.state.patience());
            self.sleep(verdict.fold(next_beat, Instant::min));
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
                    self.messages.send(to, transfer, &*self.network, &self.state);
                }
                Command::Receive { from, transfer } => {
                    self.messages.receive(from, transfer, &self.state);
                }
                Command::Watch { peer, flow } => self.flows.push((peer, flow)),
            }
        }
        self.commands = commands;
        leave
    }

    /// Takes the connections that other ranks have opened, and those that this rank has.
    fn accept(&mut self) {
        for Arrival { peer, purpose, connection } in self.network.others().take() {
            match purpose {
                Use::Messages => self.messages.accept(peer, connection),
                Use::Control => self.join(peer, connection),
                Use::Data(_) => {}
            }
        }
        for (rank, mut opening) in std::mem::take(&mut self.watches) {
            match self.network.advance(&mut opening) {
                Ok(None) => self.watches.push((rank, opening)),
                Ok(Some(connection)) => self.join(rank, connection),
                Err(_) => self.suspect(rank),
            }
        }
    }

    /// There is one more control connection.
    fn join(&mut self, rank: usize, connection: Connection) {
        if connection.socket().set_nonblocking(true).is_err() {
            return;
        }
        self.news.connect(rank);
        self.peers.push(Peer::new(connection, rank, false));
    }

    fn is_connected(&self, rank: usize) -> bool {
        self.peers.iter().any(|peer| peer.rank == rank && peer.is_present())
    }

    /// Hears what has arrived, before peers are judged by their silence. While this process was stopped or
    /// had no core, which was for the time `away`, it could hear no peer: that time does not count.
    fn catch_up(&mut self, now: Instant, away: Duration) {
        for peer in &mut self.peers {
            peer.last_heard = now.min(peer.last_heard + away);
            peer.ready = true;
        }
        self.exchange();
    }

    /// Moves what the sockets allow and acts on what arrives.
    fn exchange(&mut self) {
        for place in 0..self.peers.len() {
            // Few of many peers have something to say at a time.
            if !self.peers[place].ready && !self.peers[place].has_output() {
                continue;
            }
            while let Some(event) = self.peers[place].progress() {
                self.act_on(place, event);
            }
        }
    }

    fn act_on(&mut self, place: usize, event: Event) {
        let Peer { rank, is_neighbour, .. } = self.peers[place];
        match event {
            // A rank that leaves may not have taken a connection that was made since the group formed.
            Event::Closed if !is_neighbour => self.suspect(rank),
            Event::Closed => self.lose(rank, Loss::Closed),
            Event::News(bytes) => {
                let facts = news::decode(&bytes);
                let heard = facts.and_then(|facts| {
                    facts.into_iter().try_for_each(|fact| self.hear(Some(rank), fact))
                });
                if heard.is_err() {
                    self.fail_for(rank, "unreadable news");
                }
            }
            Event::BrokeRules => self.fail_for(rank, "an unreadable frame"),
        }
    }

    /// A rank is lost.
    fn lose(&mut self, rank: usize, loss: Loss) {
        self.state.places().miss(self.state.members()[rank]);
        self.state.lose(rank, loss);
    }

    /// A rank broke the rules.
    fn fail_for(&mut self, rank: usize, what: &'static str) {
        self.state.places().miss(self.state.members()[rank]);
        self.state.fail(self.state.bad_message(rank, what));
    }

    /// A connection to a rank closed, or could not be opened. If the rank has left, that is about to be
    /// known.
    fn suspect(&mut self, rank: usize) {
        if !self.suspects.iter().any(|(suspect, _)| *suspect == rank) {
            self.suspects.push((rank, Instant::now()));
        }
    }

    /// Gives up suspects of which nothing was heard.
    fn judge(&mut self, now: Instant) {
        for rank in self.messages.take_closed().collect::<Vec<_>>() {
            self.suspect(rank);
        }
        let (state, patience) = (&self.state, self.state.patience());
        self.suspects.retain(|(rank, _)| !state.has_gone(*rank));
        let lost = self.suspects.iter().find(|(_, since)| now.duration_since(*since) >= patience);
        if let Some((rank, _)) = lost {
            self.lose(*rank, Loss::Closed);
            self.suspects.clear();
        }
    }

    /// Takes a fact of this rank's own, or one that a neighbour told, acts on it and passes it on.
    fn hear(&mut self, from: Option<usize>, fact: Fact) -> Result<(), news::Malformed> {
        match self.news.hear(from, fact)? {
            Some(news::Event::New(fact)) => self.act_on_news(fact),
            Some(news::Event::Differ(made)) => {
                self.state.fail(self.state.mismatch(made));
            }
            None => {}
        }
        Ok(())
    }

    /// Tells all ranks a fact of this rank's own.
    fn tell(&mut self, fact: Fact) {
        let told = self.hear(None, fact);
        debug_assert!(told.is_ok(), "a rank tells what is true");
    }

    fn act_on_news(&mut self, fact: Fact) {
        match fact {
            Fact::Failed(reason) => {
                let error = Error::from(reason);
                self.tell_places(&error);
                let epoch_ended = matches!(error, Error::EpochEnded { .. });
                // The ranks pass it on, so this one need not tell it.
                self.told |= self.state.fail(error);
                if epoch_ended {
                    self.state.end_epoch();
                }
            }
            Fact::Left { rank, seq, why } => {
                let rank = rank as usize;
                if rank == self.rank {
                    return;
                }
                if let Some(why) = why {
                    self.state.note_parting(rank, why);
                }
                self.state.note_left(rank, seq);
                let peers = self.peers.iter_mut().filter(|peer| peer.rank == rank);
                peers.for_each(Peer::let_go);
                self.messages.leave(rank, &self.state);
            }
            Fact::Stuck { rank, call } if rank as usize != self.rank => {
                self.state.compare(rank as usize, &call);
            }
            Fact::Place { rank, number, place } if rank != self.state.job_rank() => {
                self.state.places().tell((rank, number), place);
            }
            Fact::Awaited { rank, number } if rank as usize == self.rank => {
                self.state.note_awaited(number);
            }
            Fact::Waits(statement) => self.state.hear(statement),
            Fact::Stuck { .. } | Fact::Place { .. } | Fact::Awaited { .. } => {}
        }
    }

    /// If this rank's call is one of two that differ, tells all ranks, this one too, where it was made.
    fn tell_places(&mut self, error: &Error) {
        let Error::Mismatch { rank, call, peer, peer_call, .. } = error else { return };
        for (caller, number) in [(*rank, call.number()), (*peer, peer_call.number())] {
            if caller == self.state.job_rank() {
                let place = self.state.places().own(number).map(|place| ending(&place, PLACE));
                self.tell(Fact::Place { rank: caller, number, place });
                self.own_places.push(number);
            }
        }
    }

    /// Tells all ranks in which call this one waits, and for which of them, here or in other groups.
    fn tell_waits(&mut self) {
        if let Some(call) = self.state.take_stuck() {
            self.tell(Fact::Stuck { rank: self.rank as u32, call });
            self.compare_calls();
        }
        for (rank, number) in self.state.take_awaits() {
            self.tell(Fact::Awaited { rank: rank as u32, number });
        }
        for statement in self.state.take_statements() {
            self.tell(Fact::Waits(statement));
        }
    }

    /// Compares this rank's calls with those in which others wait: it may not have made them when it
    /// heard of them.
    fn compare_calls(&mut self) {
        let others: Vec<(usize, Call)> =
            self.news.stuck().filter(|(rank, _)| *rank != self.rank).collect();
        for (rank, call) in others {
            self.state.compare(rank, &call);
        }
    }

    fn beat(&mut self, now: Instant) {
        // A rank that has left owes no sign of life, even if its connection is still open.
        for peer in self.peers.iter_mut().filter(|peer| peer.is_here()) {
            peer.queue(Frame::Heartbeat, &[]);
            let silence = now.saturating_duration_since(peer.last_heard);
            if silence > self.timeout {
                let loss = Loss::Silent(silence);
                self.state.lose(peer.rank, loss);
            }
        }
        self.flows.retain(|(_, flow)| flow.is_open());
        for (peer, flow) in &mut self.flows {
            if let Some(silence) = flow.silence(now).filter(|silence| *silence > self.timeout) {
                let loss = Loss::Silent(silence);
                self.state.lose(*peer, loss);
            }
        }
        for rank in self.peers.extract_if(.., |peer| !peer.is_present()).map(|peer| peer.rank) {
            self.news.disconnect(rank);
        }
        // A rank may have had two.
        for peer in &self.peers {
            self.news.connect(peer.rank);
        }
        self.messages.report_stalls(&self.state);
        self.compare_calls();
        self.watch_awaited();
    }

    /// Where ranks have left, opens control connections to some for which this one waits.
    fn watch_awaited(&mut self) {
        if self.state.is_over() || !(0..self.state.world()).any(|rank| self.state.has_gone(rank)) {
            return;
        }
        let mut awaited = self.state.waits_for().1;
        awaited.extend(self.messages.awaited());
        awaited.retain(|rank| {
            *rank != self.rank
                && !self.state.has_gone(*rank)
                && !self.is_connected(*rank)
                && !self.watches.iter().any(|(watched, _)| watched == rank)
                && !self.suspects.iter().any(|(suspect, _)| suspect == rank)
        });
        let watched = self.peers.iter().filter(|peer| !peer.is_neighbour).count();
        for rank in awaited.into_iter().take(WATCHED.saturating_sub(watched + self.watches.len())) {
            self.watches.push((rank, self.network.dial(Use::Control, rank)));
        }
    }

    /// Tells all ranks why the group failed and ends all transfers.
    fn give_up(&mut self) {
        let error = self.state.error(None);
        if !std::mem::replace(&mut self.told, true) {
            self.tell(Fact::Failed(Reason::of(&error, self.state.job_rank())));
            // Also if the ranks know of so many failures that they do not pass on this one.
            self.tell_places(&error);
        }
        self.messages.end(&error);
        self.watches.clear();
    }

    /// Sends what the neighbours do not know; whether there was anything. A neighbour that takes nothing
    /// gets it later, in one piece.
    fn spread(&mut self) -> bool {
        let mut spread = false;
        for place in 0..self.peers.len() {
            while !self.peers[place].has_output()
                && self.peers[place].is_present()
                && let Some(news) = self.news.due(self.peers[place].rank)
            {
                spread = true;
                self.peers[place].queue(Frame::News { length: news.len() }, &news);
                while let Some(event) = self.peers[place].progress() {
                    self.act_on(place, event);
                }
            }
        }
        // The caller waits for its own place too: when it goes on, and perhaps ends, the others know.
        for number in self.own_places.drain(..) {
            let place = self.state.places().own(number);
            self.state.places().tell((self.state.job_rank(), number), place);
        }
        spread
    }

    fn farewell(&mut self, seq: u32) {
        if self.state.is_over() {
            self.give_up();
        } else {
            let why = self.state.parting().map(|why| first_line(why, MAX_TEXT));
            self.tell(Fact::Left { rank: self.rank as u32, seq, why });
        }
        self.messages.end_here(&self.state);
        let deadline = Instant::now() + FAREWELL;
        loop {
            while self.spread() {}
            let unsaid = self.peers.iter().any(|peer| peer.is_present() && peer.has_output());
            if !unsaid || Instant::now() >= deadline {
                return;
            }
            self.sleep(deadline);
            self.exchange();
        }
    }

    fn sleep(&mut self, until: Instant) {
        let mut until = until;
        // SAFETY: the descriptors belong to `self`, and the list is emptied before this returns.
        let watched = |fd: BorrowedFd<'_>, flags| unsafe {
            PollFd::from_borrowed_fd(BorrowedFd::borrow_raw(fd.as_raw_fd()), flags)
        };
        self.fds.push(watched(self.shared.wake.as_fd(), PollFlags::IN));
        for peer in self.peers.iter().filter(|peer| peer.is_present()) {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, peer.has_output());
            self.fds.push(watched(peer.socket().as_fd(), flags));
        }
        for (socket, flags) in self.messages.watched() {
            self.fds.push(watched(socket.as_fd(), flags));
        }
        let opening = self.watches.iter().map(|(_, opening)| opening);
        let mut dialed = Vec::new();
        for opening in opening.chain(self.messages.openings()) {
            until = opening.watch(&mut dialed).map_or(until, |end| until.min(end));
        }
        // SAFETY: as above.
        let dialed = dialed
            .into_iter()
            .map(|fd| unsafe { std::mem::transmute::<PollFd<'_>, PollFd<'static>>(fd) });
        self.fds.extend(dialed);
        let left = until.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let polled = rustix::event::poll(&mut self.fds, Some(&timeout)).is_ok();
        // Interrupted or failed: each is tried.
        let mut ready = self.fds[1..].iter().map(|fd| !polled || !fd.revents().is_empty());
        for peer in self.peers.iter_mut().filter(|peer| peer.is_present()) {
            peer.ready = ready.next().unwrap_or(true);
        }
        self.messages.note_ready(|| ready.next().unwrap_or(true));
        drop(ready);
        self.fds.clear();
        self.network.others().hush();
    }
}

#[cfg(test)]
mod tests;
