//! Runs a [`Rounds`](crate::schedule::Rounds) schedule over the links.

use crate::buffers::Buffers;
use crate::call::{Call, MessageHeader, WireCall};
use crate::dtype::Reduction;
use crate::error::Error;
use crate::helpers::{Helpers, Room};
use crate::schedule::Rounds;
use crate::state::GroupState;

use super::order::{self, Waves};
use super::stream::{Part, Received, Stream};
use super::{Links, Way};

/// A segment in flight.
#[derive(Clone, Debug)]
pub struct Flight {
    segment: usize,
    /// Rounds finished.
    rounds: usize,
    /// Messages, or parts of them, that the current round still waits for.
    awaited: u32,
    /// Messages, or parts of them, that still have to be sent.
    unsent: u32,
}

/// What a run over links is about.
pub struct Run<'a> {
    pub call: &'a Call,
    pub schedule: &'a Rounds,
    pub buffers: &'a Buffers<'a>,
    pub segments: std::ops::Range<usize>,
    pub divisor: u32,
    pub rank: usize,
    pub state: &'a GroupState,
}

impl Links {
    /// Runs the segments of a schedule.
    ///
    /// # Safety
    /// The buffers are valid for the call's layouts and no other thread uses them meanwhile.
    pub unsafe fn run(&mut self, run: &Run<'_>, helpers: &mut Helpers) -> Result<(), Error> {
        let Run { schedule, segments, buffers, .. } = run;
        if schedule.rounds.is_empty() {
            return Ok(());
        }
        self.open_for(run)?;
        let depth = buffers.depth.min(segments.len());
        let mut waves = Waves::new(segments.len(), schedule.rounds.len(), depth);
        self.flights.clear();
        self.streams.iter_mut().for_each(Stream::begin);
        let mut finished = 0;
        let mut idle = 0;
        let mut watch = None;
        loop {
            // SAFETY: passed on from the caller.
            let mut moved =
                unsafe { self.start_rounds(run, &mut waves, &mut finished, depth, helpers) };
            // From one turn to the next there may be helpers, or none.
            let is_pumped = helpers.are_engaged();
            if is_pumped {
                // SAFETY: passed on from the caller.
                unsafe { self.pump(run, helpers, idle == 0) };
            }
            // SAFETY: passed on from the caller.
            moved |= unsafe { self.move_bytes(run, &waves, helpers, is_pumped) }?;
            if finished + self.flights.iter().filter(|f| f.is_done(run)).count() == segments.len() {
                return Ok(());
            }
            if moved {
                idle = 0;
                watch = None;
            } else if idle < self.patience.spins {
                idle += 1;
                std::hint::spin_loop();
            } else if idle < self.patience.spins + self.patience.yields {
                // Also beside threads that compute: with sleeps instead, four ranks on two cores filled their links by a
                // tenth less.
                idle += 1;
                std::thread::yield_now();
            } else {
                watch.get_or_insert_with(|| run.state.watch(run.call));
                self.wait(run.call, run.state, &mut watch)?;
            }
        }
    }

    /// Starts the rounds whose turn it is.
    unsafe fn start_rounds(
        &mut self,
        run: &Run<'_>,
        waves: &mut Waves,
        finished: &mut usize,
        depth: usize,
        helpers: &mut Helpers,
    ) -> bool {
        let mut moved = false;
        while let Some((segment, round)) = waves.peek() {
            if round == 0 {
                if self.flights.len() == depth {
                    // Only the oldest segment makes room, and only once its messages are sent:
                    // they may lie in the scratch cells that the newcomer takes over.
                    if !self.flights[0].is_done(run) {
                        break;
                    }
                    self.flights.remove(0);
                    *finished += 1;
                }
                let segment = run.segments.start + segment;
                self.flights.push(Flight { segment, rounds: 0, awaited: 0, unsent: 0 });
            } else {
                let flight = self.flight(run.segments.start + segment);
                if flight.rounds < round {
                    break;
                }
            }
            // SAFETY: passed on from the caller.
            unsafe { self.start_round(run, run.segments.start + segment, round, helpers) };
            waves.advance();
            moved = true;
        }
        moved
    }

    unsafe fn start_round(
        &mut self,
        run: &Run<'_>,
        segment: usize,
        round: usize,
        helpers: &mut Helpers,
    ) {
        let steps = &run.schedule.rounds[round];
        let wire = WireCall::from(*run.call);
        let mut unsent = 0;
        for (i, send) in steps.sends.iter().enumerate() {
            let index = steps.sends[..i].iter().filter(|s| s.to == send.to).count();
            let bytes = Part::total(run.buffers, send.from, segment, &send.blocks);
            for (stream, bytes) in self.stripes(send.to, Way::Out, bytes) {
                let header = MessageHeader {
                    call: wire,
                    segment: (segment as u32).into(),
                    round: (round as u32).into(),
                    index: (index as u32).into(),
                    length: (bytes.len() as u32).into(),
                };
                let part = Part { segment, place: send.from, blocks: send.blocks.clone(), bytes };
                self.streams[stream].outbound.enqueue(header, part);
                unsent += 1;
            }
        }
        let mut awaited = 0;
        for recv in &steps.recvs {
            let bytes = Part::total(run.buffers, recv.into, segment, &recv.blocks);
            for (stream, _) in self.stripes(recv.from, Way::In, bytes) {
                self.streams[stream].expected += 1;
                awaited += 1;
            }
        }
        let flight = self.flight(segment);
        flight.unsent += unsent;
        flight.awaited = awaited;
        if awaited == 0 {
            // SAFETY: passed on from the caller.
            unsafe { self.finish_round(run, segment, helpers) };
        }
    }

    /// All messages of a segment's round are there: fold them.
    unsafe fn finish_round(&mut self, run: &Run<'_>, segment: usize, helpers: &mut Helpers) {
        let round = self.flight(segment).rounds;
        let divisor = (run.call.reduction == Reduction::Mean).then_some(run.divisor);
        let folds = &run.schedule.rounds[round].folds;
        if !folds.is_empty() {
            run.state.meter().fold(|| {
                // One after the other: a fold may read what the one before has written.
                for fold in folds {
                    let bytes = match helpers.are_engaged() {
                        true => Part::total(run.buffers, fold.into, segment, &fold.blocks),
                        false => 0,
                    };
                    // SAFETY: passed on from the caller; shares do not overlap.
                    unsafe {
                        helpers.share(bytes, &mut self.inputs, &|share, inputs| {
                            run.buffers.fold_share(fold, segment, run.call, divisor, share, inputs);
                        });
                    }
                }
            });
        }
        self.flight(segment).rounds += 1;
    }

    /// Moves what the sockets allow, up to the next decision: each direction of each socket is a part of its own. What
    /// has come of it, [`Links::move_bytes`] finds in the streams. `together`: with the helpers.
    unsafe fn pump(&mut self, run: &Run<'_>, helpers: &mut Helpers, together: bool) {
        self.directions.clear();
        for (number, stream) in self.streams.iter().enumerate() {
            if stream.outbound.has_output() {
                self.directions.push((number, Way::Out));
            }
            if stream.expected > 0 && !stream.inbound.is_parked() {
                self.directions.push((number, Way::In));
            }
        }
        let (directions, streams) = (&self.directions, self.streams.as_mut_ptr());
        let pump = |part: usize, _: &mut Room| {
            let (number, way) = directions[part];
            // SAFETY: there is a stream with this number. A direction is one part's, the halves of a stream are borrowed
            // one by one, and nobody else uses the streams until all parts are finished.
            unsafe {
                let stream = streams.add(number);
                match way {
                    Way::Out => {
                        let outbound = &mut (*stream).outbound;
                        outbound.pump(run.buffers);
                    }
                    Way::In => {
                        let inbound = &mut (*stream).inbound;
                        inbound.pump(run.buffers);
                    }
                }
            }
        };
        if !together {
            return (0..directions.len()).for_each(|part| pump(part, &mut self.inputs));
        }
        // SAFETY: directions of different parts differ.
        unsafe { helpers.each(directions.len(), &mut self.inputs, &pump) };
    }

    /// Sends and receives what the sockets allow; if it is [pumped](Links::pump), does what follows from that.
    unsafe fn move_bytes(
        &mut self,
        run: &Run<'_>,
        waves: &Waves,
        helpers: &mut Helpers,
        is_pumped: bool,
    ) -> Result<bool, Error> {
        let mut moved = false;
        for i in 0..self.streams.len() {
            let lost = |peer| move |_| run.state.lost_link(peer, run.call);
            let Links { streams, flights, .. } = self;
            let Stream { peer, outbound, inbound, .. } = &mut streams[i];
            if is_pumped {
                let (sent, done) = outbound.pumped().map_err(lost(*peer))?;
                done.for_each(|segment| flight(flights, segment).unsent -= 1);
                run.state.meter().count_sockets(sent);
                moved |= sent > 0;
                moved |= inbound.pumped().map_err(lost(*peer))?;
            }
            while !is_pumped && outbound.has_output() {
                // SAFETY: all queued messages belong to this run.
                let (sent, done) = unsafe { outbound.send(run.buffers) }.map_err(lost(*peer))?;
                if let Some(segment) = done {
                    flight(flights, segment).unsent -= 1;
                }
                if sent == 0 {
                    break;
                }
                run.state.meter().count_sockets(sent);
                moved = true;
            }
            while self.streams[i].expected > 0 {
                let Stream { peer, inbound, .. } = &mut self.streams[i];
                let received = match is_pumped {
                    true => inbound.ready(),
                    // SAFETY: an accepted message belongs to this run.
                    false => unsafe { inbound.receive(run.buffers) }.map_err(lost(*peer))?,
                };
                match received {
                    Received::Nothing => break,
                    Received::Some => moved = true,
                    Received::Header(header) => match self.place(run, waves, i, &header)? {
                        Some((part, place)) => {
                            moved |= is_pumped;
                            let inbound = &mut self.streams[i].inbound;
                            inbound.accept(part, place, header.index.get());
                        }
                        None => {
                            self.streams[i].inbound.park(header);
                            break;
                        }
                    },
                    Received::Message { segment } => {
                        moved = true;
                        self.streams[i].expected -= 1;
                        let flight = self.flight(segment);
                        flight.awaited -= 1;
                        if flight.awaited == 0 {
                            // SAFETY: passed on from the caller.
                            unsafe { self.finish_round(run, segment, helpers) };
                        }
                    }
                }
            }
        }
        Ok(moved)
    }

    /// Where the message with this header goes, and its round's place in the order; `None` if its
    /// round has not started yet here.
    fn place(
        &mut self,
        run: &Run<'_>,
        waves: &Waves,
        stream: usize,
        header: &MessageHeader,
    ) -> Result<Option<(Part, order::Turn)>, Error> {
        let peer = self.streams[stream].peer;
        let malformed = |what| run.state.bad_message(peer, what);
        let call = Call::try_from(header.call).map_err(|_| malformed("a malformed header"))?;
        if call != *run.call {
            // A message that was left over from an earlier call belongs beside that one.
            let mine = run.state.history().counterpart(&call).unwrap_or(*run.call);
            return Err(run.state.mismatch([(run.rank, mine), (peer, call)]));
        }
        let segment = header.segment.get() as usize;
        let round = header.round.get() as usize;
        let steps = run.schedule.rounds.get(round).ok_or_else(|| malformed("an unknown round"))?;
        if !run.segments.contains(&segment) {
            return Err(malformed("an unknown segment"));
        }
        let place = waves.place(segment - run.segments.start, round);
        if !self.streams[stream].inbound.is_next(place, header.index.get()) {
            return Err(malformed("a message twice, or out of order"));
        }
        let started = |f: &Flight| f.segment == segment && f.rounds == round && f.awaited > 0;
        if !self.flights.iter().any(started) {
            return Ok(None);
        }
        let mut from_peer = steps.recvs.iter().filter(|r| r.from == peer);
        let recv = from_peer
            .nth(header.index.get() as usize)
            .ok_or_else(|| malformed("an unexpected message"))?;
        let total = Part::total(run.buffers, recv.into, segment, &recv.blocks);
        let (_, bytes) = self
            .stripes(peer, Way::In, total)
            .find(|(s, _)| *s == stream)
            .ok_or_else(|| malformed("a message on the wrong stream"))?;
        if bytes.len() != header.length.get() as usize {
            return Err(malformed("a message of the wrong length"));
        }
        let part = Part { segment, place: recv.into, blocks: recv.blocks.clone(), bytes };
        Ok(Some((part, place)))
    }

    fn flight(&mut self, segment: usize) -> &mut Flight {
        flight(&mut self.flights, segment)
    }
}

fn flight(flights: &mut [Flight], segment: usize) -> &mut Flight {
    let flight = flights.iter_mut().find(|f| f.segment == segment);
    flight.expect("messages name segments in flight")
}

impl Flight {
    fn is_done(&self, run: &Run<'_>) -> bool {
        self.rounds == run.schedule.rounds.len() && self.unsent == 0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use socket2::{Domain, Socket, Type};
    use zerocopy::IntoBytes;

    use super::*;
    use crate::dtype::{Dtype, Unit};
    use crate::patience::Patience;
    use crate::schedule::{Algorithm, Area, Fold, Layout, Op, Recv, Round};
    use crate::tree::Tree;

    /// Rank 0 adds two messages that rank 1 sends in each of two rounds, two segments of them; the sum
    /// of all that arrive if rank 1 sends the messages `sent`, as (segment, round, index).
    fn sum(sent: &[(u32, u32, u32)]) -> Result<[i64; 2], Error> {
        let (here, mut there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let mut links = Links::to_one(1, here.into(), Patience::for_crowd(2.0));
        let call = Call {
            seq: 7,
            op: Op::AllReduce,
            barrier: false,
            dtype: Dtype::I64,
            unit: Unit::default(),
            reduction: Reduction::Sum,
            count: 2,
            shape: 0,
            algorithm: Algorithm::Tree,
            column: 1,
        };
        for &(segment, round, index) in sent {
            let header = MessageHeader {
                call: call.into(),
                segment: segment.into(),
                round: round.into(),
                index: index.into(),
                length: 8.into(),
            };
            there.write_all(header.as_bytes()).unwrap();
            let value = 10i64.pow(2 * round + index);
            there.write_all(&value.to_ne_bytes()).unwrap();
        }
        // Whatever else is awaited does not come.
        there.shutdown(std::net::Shutdown::Write).unwrap();

        let recv = |cell| Recv { from: 1, blocks: 0..1, into: Area::Scratch(cell) };
        let round = || Round {
            sends: vec![],
            recvs: vec![recv(0), recv(1)],
            folds: vec![Fold {
                inputs: vec![Area::Scratch(0), Area::Scratch(1), Area::Output],
                tree: Tree::canonical(3),
                blocks: 0..1,
                into: Area::Output,
                root: false,
            }],
        };
        let schedule = Rounds { rounds: vec![round(), round()] };
        let layout = Layout::tiled(2, 1, 1);
        let mut output = [0i64; 2];
        let mut scratch = [0u64; 64];
        let buffers = Buffers {
            input: output.as_ptr().cast(),
            input_layout: layout,
            output: output.as_mut_ptr().cast(),
            output_layout: layout,
            shape: layout,
            scratch: scratch.as_mut_ptr().cast(),
            cells: 2,
            depth: 2,
            dtype: Dtype::I64,
        };
        let state = GroupState::new(0, 0, crate::Rank::all(2), Duration::MAX);
        let run = Run {
            call: &call,
            schedule: &schedule,
            buffers: &buffers,
            segments: 0..2,
            divisor: 1,
            rank: 0,
            state: &state,
        };
        // SAFETY: the buffers are those of this function.
        unsafe { links.run(&run, &mut Helpers::none()) }?;
        Ok(output)
    }

    /// The messages of two segments in the order in which every rank sends them.
    const ALL: [(u32, u32, u32); 8] =
        [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)];

    #[test]
    fn every_message_counts_once() {
        assert_eq!(sum(&ALL), Ok([1111, 1111]));
    }

    #[test]
    fn a_message_that_comes_twice_is_refused() {
        for (at, message) in ALL.into_iter().enumerate() {
            // In the place of the next, and of any other.
            for instead in at + 1..ALL.len() {
                let mut sent = ALL;
                sent[instead] = message;
                let outcome = sum(&sent);
                assert!(matches!(outcome, Err(Error::BadMessage { .. })), "{sent:?}: {outcome:?}");
            }
        }
    }
}
