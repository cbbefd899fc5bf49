//! Opens links when a schedule first needs them.
//!
//! Before a run, a rank opens the links to all ranks of the schedule that it lacks, many at once. That waits
//! for no call of the others: their acceptors answer. So it ends soon, or with the group: it has no
//! deadline of its own. Links that other ranks have opened for what they are about to send are taken on
//! the way.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, Timespec};
use socket2::Socket;
use unisono_net::keepalive::Flow;

use super::stream::Stream;
use super::{Link, Links, NAP, Run};
use crate::control::Watcher;
use crate::error::Error;
use crate::fabric::{Arrival, Network, Opening, Use};
use crate::state::GroupState;

/// Streams that a rank dials at once. More: it crowds the acceptors of the others. Fewer: many links open
/// later.
const DIALS: usize = 32;

/// Opens the links of a rank.
pub struct Opener {
    rank: usize,
    network: Arc<dyn Network>,
    watcher: Watcher,
    /// Streams that are not in use: lanes of which others have not come, or of which nothing is known yet.
    early: Vec<Arrival>,
}

impl Opener {
    pub fn new(rank: usize, network: Arc<dyn Network>, watcher: Watcher) -> Opener {
        Opener { rank, network, watcher, early: Vec::new() }
    }

    pub fn network(&self) -> &Arc<dyn Network> {
        &self.network
    }
}

impl Links {
    /// Opens the links that a run needs.
    pub(super) fn open_for(&mut self, run: &Run<'_>) -> Result<(), Error> {
        let is_open = |peer: &usize| self.of_peer[*peer].is_open(self.is_wide);
        let mut peers = run.schedule.rounds.iter().flat_map(|round| {
            let sends = round.sends.iter().map(|send| send.to);
            sends.chain(round.recvs.iter().map(|recv| recv.from))
        });
        if peers.clone().all(|peer| is_open(&peer)) {
            return Ok(());
        }
        let lacking: BTreeSet<usize> = peers.by_ref().filter(|peer| !is_open(peer)).collect();
        self.open(lacking.into_iter().collect(), run)
    }

    /// Opens the links to these ranks.
    fn open(&mut self, mut lacking: Vec<usize>, run: &Run<'_>) -> Result<(), Error> {
        let Some(Opener { rank, network, .. }) = &self.opener else {
            unreachable!("a schedule needs links only to other ranks of its group")
        };
        debug_assert!(!lacking.contains(rank), "a rank has no link to itself");
        let network = network.clone();
        let descriptors = lacking.len() * (1 + self.lanes) + DIALS;
        unisono_net::descriptors::ensure_more(descriptors as u64)
            .map_err(|e| Error::System { what: "opening links", reason: e.to_string() })?;
        // Every rank begins with another one, so that they do not all dial the same.
        let lower = lacking.partition_point(|peer| peer < rank);
        lacking.rotate_left(lower);
        self.take_arrivals(run.state)?;
        lacking.retain(|peer| !self.of_peer[*peer].is_open(self.is_wide));
        let mut undialed: VecDeque<(usize, u32)> = lacking
            .iter()
            .flat_map(|peer| self.numbers_lacking(*peer).map(move |number| (*peer, number)))
            .collect();
        let mut openings: Vec<(usize, u32, Opening)> = Vec::new();
        let is_dialed =
            |(.., opening): &&(usize, u32, Opening)| !matches!(opening, Opening::Coming);
        let mut watch = None;
        loop {
            let room = DIALS.saturating_sub(openings.iter().filter(is_dialed).count());
            let next = undialed.drain(..undialed.len().min(room));
            openings.extend(
                next.map(|(peer, number)| (peer, number, network.dial(Use::Data(number), peer))),
            );
            let mut refused = None;
            openings.retain_mut(|(peer, number, opening)| match network.advance(opening) {
                Ok(None) => true,
                Ok(Some(connection)) => {
                    let purpose = Use::Data(*number);
                    let arrival = Arrival { peer: *peer, purpose, connection };
                    self.opener.as_mut().expect("checked above").early.push(arrival);
                    false
                }
                Err(_) => {
                    refused.get_or_insert(*peer);
                    false
                }
            });
            if let Some(peer) = refused {
                return Err(run.state.lost_link(peer, run.call));
            }
            self.take_arrivals(run.state)?;
            lacking.retain(|peer| !self.of_peer[*peer].is_open(self.is_wide));
            // A dial is not broken off because the other rank was quicker: its acceptor would take it for a
            // stranger's.
            let dialed: Vec<usize> =
                openings.iter().filter(is_dialed).map(|(peer, ..)| *peer).collect();
            if lacking.is_empty() && dialed.is_empty() {
                return Ok(());
            }
            if lacking.iter().chain(&dialed).any(|peer| run.state.is_over_for(*peer, run.call)) {
                return Err(run.state.error(Some(*run.call)));
            }
            undialed.retain(|(peer, _)| lacking.contains(peer));
            if !undialed.is_empty() && dialed.len() < DIALS {
                continue;
            }
            let bell = network.links().bell();
            let mut fds = vec![PollFd::new(&**bell, PollFlags::IN)];
            let pauses = openings.iter().filter_map(|(.., opening)| opening.watch(&mut fds)).min();
            let nap = pauses.map_or(NAP, |end| {
                end.saturating_duration_since(std::time::Instant::now()).min(NAP)
            });
            let nap = Timespec { tv_sec: 0, tv_nsec: nap.as_nanos() as i64 };
            // Interrupted or failed: the loop comes round again.
            if rustix::event::poll(&mut fds, Some(&nap)) == Ok(0) {
                let watch = watch.get_or_insert_with(|| run.state.watch(run.call));
                watch.tick(|| lacking.clone());
            }
            network.links().hush();
        }
    }

    /// The numbers of the streams that this call needs and a link lacks: the first has 0, and lanes follow.
    fn numbers_lacking(&self, peer: usize) -> impl Iterator<Item = u32> + use<> {
        let Link { first, lanes } = &self.of_peer[peer];
        let first = if first.is_none() { 0..1 } else { 0..0 };
        let lanes = if self.is_wide && lanes.is_empty() { self.lanes } else { 0 };
        first.chain(1..1 + lanes as u32)
    }

    /// Takes what other ranks have opened, and puts to use what is complete.
    fn take_arrivals(&mut self, state: &GroupState) -> Result<(), Error> {
        let Some(opener) = &mut self.opener else { return Ok(()) };
        opener.early.extend(opener.network.links().take());
        let peers: BTreeSet<usize> = opener.early.iter().map(|arrival| arrival.peer).collect();
        for peer in peers {
            if self.of_peer[peer].first.is_none() {
                let first = self.use_streams(peer, 0..1, state)?;
                self.of_peer[peer].first = (!first.is_empty()).then_some(first.start);
            }
            if self.of_peer[peer].lanes.is_empty() {
                self.of_peer[peer].lanes = self.use_streams(peer, 1..1 + self.lanes, state)?;
            }
        }
        Ok(())
    }

    /// Puts the streams with these numbers to use, if all have come.
    fn use_streams(
        &mut self,
        peer: usize,
        numbers: Range<usize>,
        state: &GroupState,
    ) -> Result<Range<usize>, Error> {
        let first = self.streams.len();
        let Some(opener) = &mut self.opener else { return Ok(first..first) };
        let is = |number: usize| {
            move |of: &Arrival| of.peer == peer && of.purpose == Use::Data(number as u32)
        };
        if !numbers.clone().all(|number| opener.early.iter().any(is(number))) {
            return Ok(first..first);
        }
        for number in numbers {
            let place = opener.early.iter().position(is(number)).expect("it is there");
            let Arrival { connection, .. } = opener.early.swap_remove(place);
            let socket = connection.socket().clone();
            socket
                .set_nonblocking(true)
                .map_err(|e| Error::System { what: "preparing a link", reason: e.to_string() })?;
            if let Some(flow) = Flow::new(&socket) {
                opener.watcher.watch(peer, flow);
            }
            shut_down_on_failure(state, Arc::downgrade(&socket));
            self.streams.push(Stream::new(connection, peer));
        }
        Ok(first..self.streams.len())
    }
}

/// Ends waits for a socket when the group fails. Nothing here keeps its descriptor open: a handle that can
/// end a group may outlive it.
fn shut_down_on_failure(state: &GroupState, socket: Weak<Socket>) {
    state.on_failure(move || {
        if let Some(socket) = socket.upgrade() {
            // A socket that is closed already needs no shutdown.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    });
}
