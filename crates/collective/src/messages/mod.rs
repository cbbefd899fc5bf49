//! Messages with tags between two ranks.
//!
//! They have connections of their own, one for each direction, which the sender opens when it first
//! sends. A send and a receive that cross must not wait for each other: the sender announces a message,
//! the receiver clears it once a receive wants it, and only then do its bytes follow, straight into the
//! receiver's buffer. A receive may leave open whose message it wants; [`mailbox`] says which message
//! belongs to which receive.
//!
//! A connection that closes says only that its rank is gone, and not whether it left or was lost: the
//! [monitor](crate::control) learns that from the rank's neighbours.

mod channel;
pub mod frame;
mod mailbox;

use rustix::event::PollFlags;
use socket2::Socket;
use unisono_net::Connection;

use crate::error::{Error, Loss};
use crate::fabric::{Network, Opening, Use};
use crate::state::GroupState;
use crate::work::Work;
use channel::{Channel, Event, Idle};
use mailbox::{Announced, Mailbox, Wanted};

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

// SAFETY: the caller that submits a transfer keeps its memory valid, and away from other threads, until
// its work is done.
unsafe impl Send for Transfer {}

/// The messages of one rank of a group.
pub struct Messages {
    me: usize,
    world: usize,
    /// Those by which this rank sends, and those by which it receives.
    channels: Vec<Channel>,
    mailbox: Mailbox<Receive>,
    /// Ranks whose connections have closed since they were last taken.
    closed: Vec<usize>,
}

/// A receive for which no message was announced.
struct Receive {
    transfer: Transfer,
    idle: Idle,
}

impl Messages {
    /// Rank `me` of `world` has sent and received nothing.
    pub fn new(me: usize, world: usize) -> Messages {
        let (channels, closed) = Default::default();
        Messages { me, world, channels, mailbox: Mailbox::new(), closed }
    }

    /// Starts a send.
    pub fn send(
        &mut self,
        to: usize,
        transfer: Transfer,
        network: &dyn Network,
        state: &GroupState,
    ) {
        if state.has_gone(to) {
            return transfer.work.complete(Err(left(to, state)));
        }
        let known = self.channels.iter().position(|c| c.is_outgoing && c.rank == to);
        let place = known.unwrap_or_else(|| {
            let opening = network.dial(Use::Messages, to);
            self.channels.push(Channel::outgoing(opening, to));
            self.channels.len() - 1
        });
        self.channels[place].submit_send(transfer);
    }

    /// Starts a receive: of a message that is there, or of one that may come.
    pub fn receive(&mut self, from: Option<usize>, transfer: Transfer, state: &GroupState) {
        let tag = transfer.tag;
        let receive = Receive { transfer, idle: Idle::new() };
        if let Some((receive, message)) = self.mailbox.receive(Wanted { from, tag, receive }) {
            self.meet(receive, message, state);
        } else if let Some(from) = from
            && state.has_gone(from)
        {
            self.end_receives(from, state);
        } else if from.is_none() {
            self.end_hopeless(state);
        }
    }

    /// Another rank has opened a connection.
    pub fn accept(&mut self, from: usize, connection: Connection) {
        let known = self.channels.iter().any(|c| !c.is_outgoing && c.rank == from);
        if !known && connection.socket().set_nonblocking(true).is_ok() {
            self.channels.push(Channel::incoming(connection, from));
        }
    }

    /// A rank has left. What it had cleared or begun to send may still be on its way; when that has
    /// come, its connection closes.
    pub fn leave(&mut self, rank: usize, state: &GroupState) {
        let error = left(rank, state);
        for channel in self.channels.iter_mut().filter(|channel| channel.rank == rank) {
            if channel.is_outgoing || channel.is_closed() {
                channel.end(&error);
            }
        }
        self.end_receives(rank, state);
    }

    /// Moves what the sockets allow.
    pub fn exchange(&mut self, network: &dyn Network, state: &GroupState) {
        for place in 0..self.channels.len() {
            let channel = &self.channels[place];
            let rank = channel.rank;
            if channel.ready || channel.has_output() {
                while let Some(event) = self.channels[place].progress(network) {
                    self.act_on(rank, event, state);
                }
            }
        }
    }

    fn act_on(&mut self, rank: usize, event: Event, state: &GroupState) {
        match event {
            Event::Closed if state.has_gone(rank) => self.leave(rank, state),
            Event::Closed => self.closed.push(rank),
            Event::BrokeRules(what) => {
                state.fail(state.bad_message(rank, what));
            }
            Event::Announced(message) => match self.mailbox.announce(message) {
                Ok(None) => {}
                Ok(Some((receive, message))) => self.meet(receive, message, state),
                Err(_) => {
                    let what = "more messages than are received";
                    state.fail(state.bad_message(rank, what));
                }
            },
        }
    }

    /// A receive and a message have met.
    fn meet(&mut self, receive: Receive, message: Announced, state: &GroupState) {
        let Transfer { tag, length, .. } = receive.transfer;
        if message.length != length as u64 {
            let ranks = (message.from, self.me);
            let error = state.length_mismatch(ranks, tag, message.length, length as u64);
            receive.transfer.work.complete(Err(error.clone()));
            state.fail(error);
            return;
        }
        let channel = self.channels.iter_mut().find(|c| !c.is_outgoing && c.rank == message.from);
        let channel = channel.expect("it has announced the message");
        channel.clear(receive.transfer, message);
    }

    /// Ranks whose connections have closed, which have not left as far as is known.
    pub fn take_closed(&mut self) -> impl Iterator<Item = usize> {
        self.closed.drain(..)
    }

    /// Ranks for whose messages this rank waits.
    pub fn awaited(&mut self) -> Vec<usize> {
        self.mailbox.waiting().filter_map(|wanted| wanted.from).collect()
    }

    /// Says in the log which transfers have not moved for too long.
    pub fn report_stalls(&mut self, state: &GroupState) {
        let Messages { me, world, channels, mailbox, .. } = self;
        for channel in channels {
            channel.report_stalls(state);
        }
        let here = || (0..*world).filter(|rank| rank != me && !state.has_gone(*rank)).collect();
        for Wanted { from, receive, .. } in mailbox.waiting() {
            let missing = || from.map_or_else(here, |from| vec![from]);
            receive.idle.report("receive", &receive.transfer, state, missing);
        }
    }

    /// Ends everything with this error.
    pub fn end(&mut self, error: &Error) {
        for channel in &mut self.channels {
            channel.end(error);
        }
        for Wanted { receive, .. } in self.mailbox.take(|_| true) {
            receive.transfer.work.complete(Err(error.clone()));
        }
    }

    /// Ends everything because this rank leaves.
    pub fn end_here(&mut self, state: &GroupState) {
        let lost = |peer| state.lost(peer, Loss::Left);
        for channel in &mut self.channels {
            channel.end(&lost(channel.rank));
        }
        let another = usize::from(self.me == 0);
        for Wanted { from, receive, .. } in self.mailbox.take(|_| true) {
            receive.transfer.work.complete(Err(lost(from.unwrap_or(another))));
        }
    }

    /// The sockets to watch, what for, and where to note that they are ready.
    pub fn watched(&mut self) -> impl Iterator<Item = (&Socket, PollFlags)> {
        self.channels.iter().filter_map(|channel| {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, channel.has_output());
            Some((channel.socket()?, flags))
        })
    }

    /// Notes which of the watched sockets are ready.
    pub fn note_ready(&mut self, mut ready: impl FnMut() -> bool) {
        for channel in &mut self.channels {
            channel.ready = match channel.socket() {
                Some(_) => ready(),
                None => channel.opening().is_some(),
            };
        }
    }

    /// The connections that are being opened.
    pub fn openings(&self) -> impl Iterator<Item = &Opening> {
        self.channels.iter().filter_map(Channel::opening)
    }

    /// Ends the receives of messages of a rank that has left.
    fn end_receives(&mut self, from: usize, state: &GroupState) {
        self.mailbox.forget(from);
        let error = left(from, state);
        for wanted in self.mailbox.take(|wanted| wanted.from == Some(from)) {
            wanted.receive.transfer.work.complete(Err(error.clone()));
        }
        self.end_hopeless(state);
    }

    /// Ends the receives of messages of any rank once all others have left.
    fn end_hopeless(&mut self, state: &GroupState) {
        let mut others = (0..self.world).filter(|rank| *rank != self.me);
        if others.clone().any(|rank| !state.has_gone(rank)) {
            return;
        }
        let Some(first) = others.next() else { return };
        let error = left(first, state);
        for wanted in self.mailbox.take(|wanted| wanted.from.is_none()) {
            wanted.receive.transfer.work.complete(Err(error.clone()));
        }
    }
}

/// The error of a transfer with a rank that has left.
fn left(rank: usize, state: &GroupState) -> Error {
    state.lost(rank, state.parting_of(rank))
}
