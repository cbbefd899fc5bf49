//! Messages between pairs of ranks, over sockets.
//!
//! A link is one or more stream sockets to a peer, TCP between hosts and Unix sockets inside one.
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
use crate::helpers::Room;
use crate::memory::ScratchMemory;
use crate::options::Options;
use crate::state::GroupState;
use crate::window::Patience;
use open::Opener;
use rounds::Flight;
pub use rounds::Run;
use stream::Stream;

/// How long a wait for sockets lasts before the group's state is looked at again. The group's
/// failure shuts the sockets down, which ends the wait at once; this is for what happens between
/// the look and the wait.
const NAP: Duration = Duration::from_millis(50);

/// Messages shorter than this travel on one stream even if there are several. Smaller: more
/// system calls. Larger: less parallelism for middling messages.
const STRIPE_MIN: usize = 128 << 10;

/// This rank's links to all its peers, and the memory that runs over them need.
pub struct Links {
    streams: Vec<Stream>,
    /// The streams of each peer, as a range of `streams`; empty where there is no link.
    of_peer: Vec<std::ops::Range<usize>>,
    /// Opens links.
    opener: Option<Opener>,
    /// Attempts to make progress before sleeping in poll.
    patience: Patience,
    flights: Vec<Flight>,
    inputs: Room,
    /// Scratch cells of the segments in flight.
    pub scratch: ScratchMemory,
}

// SAFETY: `inputs` is scratch of a call in progress and never read by another thread.
unsafe impl Send for Links {}

impl Links {
    /// Links of rank `rank` of `world`, none of which is open yet.
    pub fn new(
        rank: usize,
        world: usize,
        options: &Options,
        network: Arc<dyn Network>,
        watcher: Watcher,
        patience: Patience,
    ) -> Links {
        let (streams, flights, scratch) = Default::default();
        let opener = Opener::new(rank, options.streams, network, watcher);
        let of_peer = vec![0..0; world];
        let inputs = Vec::with_capacity(world);
        Links { streams, of_peer, opener: Some(opener), patience, flights, inputs, scratch }
    }

    /// Opens the connections of the group.
    pub fn network(&self) -> Option<&Arc<dyn Network>> {
        self.opener.as_ref().map(Opener::network)
    }

    /// The only link of a rank, to another one.
    #[cfg(test)]
    fn to_one(peer: usize, connection: unisono_net::Connection, patience: Patience) -> Links {
        let (mut streams, flights, inputs, scratch): (Vec<Stream>, _, _, _) = Default::default();
        connection.socket().set_nonblocking(true).unwrap();
        streams.push(Stream::new(connection, peer));
        let mut of_peer = vec![0..0; peer + 1];
        of_peer[peer] = 0..1;
        Links { streams, of_peer, opener: None, patience, flights, inputs, scratch }
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

    /// The streams that carry a message of `bytes` to or from `peer`, with the part each
    /// carries.
    fn stripes(
        &self,
        peer: usize,
        bytes: usize,
    ) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + use<> {
        let streams = self.of_peer[peer].clone();
        assert!(!streams.is_empty(), "no link to rank {peer}");
        let n = if bytes < STRIPE_MIN { 1 } else { streams.len() };
        let cut = move |i: usize| if i == n { bytes } else { (bytes * i / n) & !63 };
        (0..n).map(move |i| (streams.start + i, cut(i)..cut(i + 1)))
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
        // Up to a handful of peers the list lives on the stack; beyond, waiting is expensive
        // anyway.
        let ready = match self.streams.len() {
            0..=8 => self.poll::<8>(&nap),
            9..=64 => self.poll::<64>(&nap),
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
