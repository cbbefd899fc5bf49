//! Messages between pairs of ranks, over sockets.
//!
//! A link is one or more stream sockets to a peer, TCP between hosts and Unix sockets inside one: one that every call
//! may use in both directions and, for the long messages of large calls, several *lanes*, each of which has one direction.
//! [`mod@open`] opens the links that a schedule needs, [`rounds`] runs it over them, and [`stream`] moves
//! the bytes of one socket.

mod open;
mod order;
mod rounds;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::call::Call;
use crate::control::Watcher;
use crate::error::Error;
use crate::fabric::Network;
use crate::helpers::{LARGE_CALL, Room};
use crate::memory::ScratchMemory;
use crate::patience::Patience;
use crate::state::GroupState;
use open::Opener;
use rounds::Flight;
pub use rounds::Run;
use stream::Stream;

/// How long a wait for sockets lasts before the group's state is looked at again. The group's
/// failure shuts the sockets down, which ends the wait at once; this is for what happens between
/// the look and the wait.
const NAP: Duration = Duration::from_millis(50);

/// Bytes of a message on one lane at least, where there are several in its direction. Smaller: more
/// system calls. Larger: less parallelism for middling messages.
const STRIPE_MIN: usize = 64 << 10;

/// Bytes of a message that has lanes. The system lets one thread at a time send or receive on a TCP socket, and on two
/// sockets one thread sends while another receives. Smaller: what is received carries no acknowledgement of what is
/// sent, so that small messages need more packets. Larger: less parallelism for middling messages.
const LONG_MESSAGE: usize = 32 << 10;

/// Whether a rank sends a message, or receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

/// This rank's links to all its peers, and the memory that runs over them need.
pub struct Links {
    rank: usize,
    streams: Vec<Stream>,
    /// The link to each peer.
    of_peer: Vec<Link>,
    /// Lanes of a link, or none; and whether the call that runs has them.
    lanes: usize,
    is_wide: bool,
    /// Opens links.
    opener: Option<Opener>,
    /// Attempts to make progress before sleeping in poll.
    patience: Patience,
    flights: Vec<Flight>,
    inputs: Room,
    /// Numbers of streams, each with whether something is to be sent or received on it.
    directions: Vec<(usize, Way)>,
    /// Scratch cells of the segments in flight.
    pub scratch: ScratchMemory,
}

/// Which of the streams belong to a peer.
#[derive(Clone, Debug, Default)]
struct Link {
    /// The one for every call, if it is open.
    first: Option<usize>,
    /// Empty until a large call needs them. The first is for messages to the lower rank, the second for those to the
    /// higher, and so on: so are the first few of them.
    lanes: std::ops::Range<usize>,
}

impl Link {
    fn is_open(&self, is_wide: bool) -> bool {
        self.first.is_some() && (!is_wide || !self.lanes.is_empty())
    }
}

// SAFETY: `inputs` is scratch of a call in progress and never read by another thread.
unsafe impl Send for Links {}

impl Links {
    /// Links of rank `rank` of `world`, none of which is open yet.
    pub fn new(
        rank: usize,
        world: usize,
        network: Arc<dyn Network>,
        watcher: Watcher,
        patience: Patience,
    ) -> Links {
        Links::unopened(rank, world, Some(Opener::new(rank, network, watcher)), patience)
    }

    fn unopened(rank: usize, world: usize, opener: Option<Opener>, patience: Patience) -> Links {
        let (streams, flights, scratch) = Default::default();
        let (of_peer, inputs) = (vec![Link::default(); world], Vec::with_capacity(world));
        let (lanes, is_wide, directions) = Default::default();
        Links {
            rank,
            streams,
            of_peer,
            lanes,
            is_wide,
            opener,
            patience,
            flights,
            inputs,
            directions,
            scratch,
        }
    }

    /// Opens the connections of the group.
    pub fn network(&self) -> Option<&Arc<dyn Network>> {
        self.opener.as_ref().map(Opener::network)
    }

    /// The only link of a rank, to another one.
    #[cfg(test)]
    fn to_one(peer: usize, connection: unisono_net::Connection, patience: Patience) -> Links {
        let mut links = Links::unopened(0, peer + 1, None, patience);
        connection.socket().set_nonblocking(true).unwrap();
        links.streams.push(Stream::new(connection, peer));
        links.of_peer[peer].first = Some(0);
        links
    }

    /// Room for the inputs of a fold between runs.
    pub fn room(&mut self) -> &mut Room {
        &mut self.inputs
    }

    /// Handles to the sockets, each with its peer.
    #[cfg(test)]
    pub fn handles(&self) -> impl Iterator<Item = (usize, Arc<socket2::Socket>)> {
        self.streams.iter().map(|stream| (stream.peer, stream.socket().clone()))
    }

    /// How many lanes large calls have from now on; with less than two, none. Equal on all ranks, and, but while lanes are
    /// tried, the same from the first large call on.
    pub fn set_lanes(&mut self, lanes: usize) {
        self.lanes = if lanes > 1 { lanes } else { 0 };
    }

    /// A call of so many bytes begins: as many on all ranks. It has lanes where it could have helpers.
    pub fn begin(&mut self, bytes: usize) {
        self.is_wide = self.lanes > 0 && bytes >= LARGE_CALL;
    }

    /// Closes lanes of a link that has more than large calls use. For when no other link was opened since: both sides
    /// do so. None of them can be opened again: others take a number for one that they know.
    pub fn close_lanes(&mut self) {
        let Some(link) = self.of_peer.iter_mut().find(|link| link.lanes.len() > self.lanes) else {
            return;
        };
        if link.lanes.end == self.streams.len() {
            link.lanes.end = link.lanes.start + self.lanes;
            self.streams.truncate(link.lanes.end);
        }
    }

    /// The streams that carry a message of `bytes` to or from `peer`, with the part each
    /// carries.
    fn stripes(
        &self,
        peer: usize,
        way: Way,
        bytes: usize,
    ) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + use<> {
        let link = &self.of_peer[peer];
        let (first, step, count) = if self.is_wide && bytes >= LONG_MESSAGE {
            // While lanes are tried, a link has more than are in use.
            let used = self.lanes.min(link.lanes.len());
            let upwards = (way == Way::Out) == (self.rank < peer);
            let count = if upwards { used / 2 } else { used - used / 2 };
            (link.lanes.start + usize::from(upwards), 2, count)
        } else {
            (link.first.unwrap_or_default(), 1, usize::from(link.first.is_some()))
        };
        assert!(count > 0, "no link to rank {peer}");
        let n = count.min(bytes / STRIPE_MIN).max(1);
        let cut = move |i: usize| if i == n { bytes } else { (bytes * i / n) & !63 };
        (0..n).map(move |i| (first + i * step, cut(i)..cut(i + 1)))
    }

    /// Sleeps until a socket can make progress.
    fn wait(
        &mut self,
        call: &Call,
        state: &GroupState,
        watch: &mut Option<crate::state::StallWatch<'_>>,
    ) -> Result<(), Error> {
        for stream in self.streams.iter().filter(|s| s.expected > 0) {
            if state.is_over_for(stream.peer, call) {
                return Err(state.error(Some(*call)));
            }
        }
        if state.is_over() {
            return Err(state.error(Some(*call)));
        }
        let nap = Timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as i64 };
        // Up to fifteen peers with as many lanes, the list lives on the stack; beyond, waiting is expensive anyway.
        let ready = match self.streams.len() {
            0..=8 => self.poll::<8>(&nap),
            9..=64 => self.poll::<64>(&nap),
            65..=256 => self.poll::<256>(&nap),
            _ => rustix::event::poll(&mut self.waiting().collect::<Vec<_>>(), Some(&nap)),
        };
        match ready {
            Ok(0) => {
                if let Some(watch) = watch {
                    let late = self.streams.iter().filter(|s| s.expected > 0).map(|s| s.peer);
                    watch.tick(|| {
                        let mut late: Vec<usize> = late.collect();
                        late.dedup();
                        late
                    });
                }
                Ok(())
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::System { what: "poll", reason: e.to_string() }),
        }
    }

    fn poll<const N: usize>(&self, nap: &Timespec) -> rustix::io::Result<usize> {
        let mut fds: [std::mem::MaybeUninit<PollFd<'_>>; N] =
            [const { std::mem::MaybeUninit::uninit() }; N];
        let mut used = 0;
        for (slot, fd) in fds.iter_mut().zip(self.waiting()) {
            slot.write(fd);
            used += 1;
        }
        // SAFETY: the first `used` entries were written just above.
        let fds =
            unsafe { std::slice::from_raw_parts_mut(fds.as_mut_ptr().cast::<PollFd<'_>>(), used) };
        rustix::event::poll(fds, Some(nap))
    }

    /// What the running call waits for.
    fn waiting(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.streams.iter().filter_map(|stream| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, stream.expected > 0 && !stream.inbound.is_parked());
            flags.set(PollFlags::OUT, stream.outbound.has_output());
            (!flags.is_empty()).then(|| PollFd::new(&**stream.socket(), flags))
        })
    }
}
