//! Messages between pairs of ranks, over sockets.
//!
//! A link is one or more stream sockets to a peer, TCP between hosts and Unix sockets inside one.
//! [`rounds`] runs a schedule over the links; [`stream`] moves the bytes of one socket.

mod order;
mod rounds;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use socket2::Socket;
use unisono_net::Connection;

use crate::call::Call;
use crate::error::Error;
use crate::memory::Scratch;
use crate::state::GroupState;
use crate::window::Patience;
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
    /// The streams of each peer, as a range of `streams`; empty for this rank itself.
    of_peer: Vec<std::ops::Range<usize>>,
    /// Attempts to make progress before sleeping in poll.
    patience: Patience,
    flights: Vec<Flight>,
    inputs: Vec<*const u8>,
    /// Scratch cells of the segments in flight.
    pub scratch: Scratch,
}

// SAFETY: `inputs` is scratch of a call in progress and never read by another thread.
unsafe impl Send for Links {}

impl Links {
    /// Takes over connections: `connections[peer]` lists the streams to that peer.
    pub fn new(connections: Vec<Vec<Connection>>, patience: Patience) -> std::io::Result<Links> {
        let mut streams = Vec::new();
        let mut of_peer = Vec::with_capacity(connections.len());
        for (peer, connections) in connections.into_iter().enumerate() {
            let first = streams.len();
            for connection in connections {
                connection.socket().set_nonblocking(true)?;
                streams.push(Stream::new(connection, peer));
            }
            of_peer.push(first..streams.len());
        }
        let inputs = Vec::with_capacity(of_peer.len());
        let scratch = Scratch::default();
        Ok(Links { streams, of_peer, patience, flights: Vec::new(), inputs, scratch })
    }

    /// Room for the inputs of a fold, for whoever folds between runs.
    pub fn room(&mut self) -> &mut Vec<*const u8> {
        &mut self.inputs
    }

    /// Handles to the sockets, each with its peer: to watch, and to shut down when the group fails.
    pub fn handles(&self) -> impl Iterator<Item = (usize, Arc<Socket>)> {
        self.streams.iter().map(|s| (s.peer, s.socket().clone()))
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
            _ => self.poll::<1024>(&nap),
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
        let waiting =
            self.streams.iter().filter(|s| s.expected > 0 && !s.is_parked() || s.has_output());
        for (slot, stream) in fds.iter_mut().zip(waiting) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, stream.expected > 0 && !stream.is_parked());
            flags.set(PollFlags::OUT, stream.has_output());
            slot.write(PollFd::new(stream.socket(), flags));
            used += 1;
        }
        // SAFETY: the first `used` entries were written just above.
        let fds =
            unsafe { std::slice::from_raw_parts_mut(fds.as_mut_ptr().cast::<PollFd<'_>>(), used) };
        rustix::event::poll(fds, Some(nap))
    }
}
