//! A call in progress: what the rounds of a schedule mean on the device.
//!
//! A segment goes through the *rounds* of its schedule: messages, then the folds of what has arrived. Two streams
//! work on it: one *moves* messages, the other *folds*. In step `t` the messages of round `r` of segment
//! `t − 2r` travel, for all `r` at once and in one group of NCCL's, and what they bring is folded while those of step
//! `t + 1` travel. So a fold has a whole step of time before step `t + 2` needs its result, the two
//! directions of the wires and the folds are busy at the same time, and a call of one segment takes
//! no step more than it has rounds with messages.
//!
//! All ranks take the same steps, and in each of them list the messages between two ranks in the same order, by
//! which NCCL matches them. Messages of no bytes are not sent.
//!
//! A segment uses its scratch cells from step `s` to step `s + 2R − 2`, whose folds are over before
//! step `s + 2R`: with `2R` segments in flight none takes the cells of another that is under way.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use unisono_collective::engine::{Buffers, GroupState, HostEngine};
use unisono_collective::schedule::{Fold, Round};
use unisono_collective::{Call, Error, Reduction};

use super::communicator::{Communicator, Gather, Message, Way, own_reduction};
use super::error::NcclError;
use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::fold::{FoldError, Folds};
use crate::library::DevicePtr;
use crate::memory::DeviceMemory;
use crate::order::failed;
use crate::stream::Stream;

/// Steps from one round of a segment to the next: with two, folds have a step of their own.
pub const STRIDE: usize = 2;

/// Turns in which a rank that waits looks again at once. More: a busier core. Fewer: it sleeps when
/// the work would be done in a moment.
const EAGER: u32 = 2000;

/// How long it sleeps after that. Longer: it notices later. Shorter: it keeps a core busy.
const NAP: Duration = Duration::from_micros(50);

/// How often a rank that waits says for whom, at most.
const SAY_EVERY: Duration = Duration::from_millis(20);

/// How long a rank whose messages failed waits to be told which rank is gone. Longer: a failure of
/// the network alone is noticed later. Shorter: the rank that died is not named.
const VERDICT: Duration = Duration::from_millis(500);

/// The streams of a rank, and its way to the others.
pub struct Lane {
    /// `None` for a rank that is alone.
    communicator: Option<Communicator>,
    pub moving: Stream,
    folding: Stream,
    /// What the messages of the last two steps have brought is there.
    moved: [Event; STRIDE],
    /// The folds of the last two steps are done.
    folded: [Event; STRIDE],
    /// The caller's stream has come to the call.
    begun: Event,
    /// The call is done.
    done: Event,
    folds: Folds,
    scratch: Option<DeviceMemory>,
    messages: Vec<Message>,
    /// Inputs of the fold under way; kept to allocate nothing per call.
    inputs: Vec<DevicePtr>,
    /// The ranks of the communicator, as the group numbers them. Messages name them by their places here.
    members: Vec<usize>,
    /// Which of them are on the same host.
    near: Vec<bool>,
    /// This rank, and the number of all ranks of the group.
    rank: usize,
    world: usize,
    state: Arc<GroupState>,
}

/// What a lane is made of before the ranks know each other.
pub struct Parts {
    moving: Stream,
    folding: Stream,
    moved: [Event; STRIDE],
    folded: [Event; STRIDE],
    begun: Event,
    done: Event,
    folds: Folds,
    scratch: Option<DeviceMemory>,
}

impl Parts {
    /// Everything that needs the device of this rank alone, with so many bytes of scratch memory.
    pub fn new(context: &Context, scratch: usize) -> Result<Parts, FoldError> {
        let (_, urgent) = context.priorities()?;
        let event = || Event::new(context, EventKind::Ordering);
        let scratch = if scratch > 0 { Some(DeviceMemory::new(context, scratch)?) } else { None };
        Ok(Parts {
            moving: Stream::new(context, urgent)?,
            folding: Stream::new(context, urgent)?,
            moved: [event()?, event()?],
            folded: [event()?, event()?],
            begun: event()?,
            done: event()?,
            folds: Folds::load(context)?,
            scratch,
        })
    }
}

/// Why a call does not go on.
enum Stop {
    /// The group is over.
    Over,
    Nccl(NcclError),
    Device(FoldError),
}

impl From<NcclError> for Stop {
    fn from(error: NcclError) -> Stop {
        Stop::Nccl(error)
    }
}

impl<E: Into<FoldError>> From<E> for Stop {
    fn from(error: E) -> Stop {
        Stop::Device(error.into())
    }
}

impl Lane {
    pub fn new(
        parts: Parts,
        communicator: Option<Communicator>,
        host: &HostEngine,
        members: &[usize],
    ) -> Lane {
        let Parts { moving, folding, moved, folded, begun, done, folds, scratch } = parts;
        let (rank, topology) = (host.rank(), host.topology());
        let near = members.iter().map(|other| topology.together(rank, *other)).collect();
        let (messages, inputs) = Default::default();
        Lane {
            communicator,
            moving,
            folding,
            moved,
            folded,
            begun,
            done,
            folds,
            scratch,
            messages,
            inputs,
            members: members.to_vec(),
            near,
            rank,
            world: topology.world(),
            state: host.state().clone(),
        }
    }

    pub fn context(&self) -> &Context {
        self.moving.context()
    }

    /// This rank's number in the communicator, 0 if there is none.
    pub fn place(&self) -> usize {
        self.members.iter().position(|member| *member == self.rank).unwrap_or(0)
    }

    /// Bytes of scratch memory.
    pub fn scratch(&self) -> usize {
        self.scratch.as_ref().map_or(0, DeviceMemory::bytes)
    }

    /// Where it is.
    pub fn scratch_pointer(&self) -> DevicePtr {
        self.scratch.as_ref().map_or(DevicePtr::default(), DeviceMemory::pointer)
    }

    /// Runs some segments of a call to their end on the device. Nothing of them is under way when this returns, also with
    /// an error. With `gathers`, messages that are a [gather](Gather) are left to NCCL; to be asked for by all ranks, and
    /// where the ranks' bytes lie alike in the memory of all of them.
    ///
    /// # Safety
    /// The buffers are device memory, valid for the call's layouts, and nothing else uses them meanwhile.
    pub unsafe fn run(
        &mut self,
        call: &Call,
        rounds: &[Round],
        mut buffers: Buffers<'_>,
        segments: Range<usize>,
        gathers: bool,
        state: &GroupState,
    ) -> Result<(), Error> {
        assert!(buffers.scratch_bytes() <= self.scratch(), "cells fit the scratch memory");
        buffers.scratch = self.scratch_pointer().0 as *mut u8;
        // SAFETY: passed on from the caller.
        let submitted = unsafe { self.submit(call, rounds, &buffers, segments, gathers, state) };
        self.conclude(submitted, call, state)
    }

    /// Runs NCCL's own all-reduce, of which only the bytes are in our hands.
    ///
    /// # Safety
    /// As of [`Lane::run`]; both have as many elements as the call says.
    pub unsafe fn run_own(
        &mut self,
        call: &Call,
        from: DevicePtr,
        into: DevicePtr,
        state: &GroupState,
    ) -> Result<(), Error> {
        let kind =
            own_reduction(call.dtype, call.reduction).expect("planned only where there is one");
        let submitted = (|| {
            self.moving.record(&self.begun)?;
            let communicator = self.communicator.as_ref().expect("several ranks have one");
            // SAFETY: passed on from the caller.
            unsafe {
                communicator.all_reduce(from, into, call.count as usize, kind, &self.moving)?
            };
            self.settle_host("ncclAllReduce", state)
        })();
        state.meter().count_sockets(call.count as usize * call.dtype.size());
        self.conclude(submitted, call, state)
    }

    /// Waits for what was submitted, or gives it up.
    fn conclude(
        &mut self,
        submitted: Result<(), Stop>,
        call: &Call,
        state: &GroupState,
    ) -> Result<(), Error> {
        let Err(stop) = submitted.and_then(|()| self.wait(call, state)) else { return Ok(()) };
        if let Stop::Nccl(_) = stop {
            // The connection to a rank that died breaks before its death is known.
            let deadline = Instant::now() + VERDICT;
            while !state.is_over() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if let Some(communicator) = &mut self.communicator {
            communicator.abort();
        }
        let settled = self.settle();
        match stop {
            _ if state.is_over() => Err(state.error(Some(*call))),
            Stop::Nccl(error) => {
                Err(Error::System { what: "a call through NCCL", reason: error.to_string() })
            }
            Stop::Device(error) => Err(failed(error)),
            Stop::Over => Err(settled.err().map_or_else(|| state.error(Some(*call)), failed)),
        }
    }

    /// Submits all steps of a call.
    ///
    /// # Safety
    /// As of [`Lane::run`].
    unsafe fn submit(
        &mut self,
        call: &Call,
        rounds: &[Round],
        buffers: &Buffers<'_>,
        segments: Range<usize>,
        gathers: bool,
        state: &GroupState,
    ) -> Result<(), Stop> {
        self.moving.record(&self.begun)?;
        let divisor = (call.reduction == Reduction::Mean).then_some(self.world as u32);
        let steps = segments.len() + STRIDE * (rounds.len() - 1);
        for step in 0..steps {
            let slot = step % STRIDE;
            let due = (0..rounds.len()).filter_map(|round| {
                let segment = segments.start + step.checked_sub(STRIDE * round)?;
                (segment < segments.end).then_some((segment, &rounds[round]))
            });
            self.list_messages(due.clone(), buffers, state);
            if !self.messages.is_empty() {
                // What is sent was folded an even number of steps ago, and so were the cells that are filled.
                self.moving.wait(&self.folded[slot])?;
                let communicator = self.communicator.as_ref().expect("several ranks have one");
                let gather = Gather::of(&self.messages, self.place(), self.members.len());
                match gather.filter(|_| gathers) {
                    // SAFETY: as below.
                    Some(gather) => unsafe { communicator.gather(gather, &self.moving)? },
                    // SAFETY: the blocks lie in the caller's memory, or in cells that no other segment uses; the
                    // stream waits for the folds that made what is sent, and for those that read what the cells held.
                    None => unsafe { communicator.exchange(&self.messages, &self.moving)? },
                }
                self.settle_host("ncclGroupEnd", state)?;
            }
            if due.clone().all(|(_, round)| round.folds.is_empty()) {
                continue;
            }
            self.moving.record(&self.moved[slot])?;
            self.folding.wait(&self.moved[slot])?;
            for (segment, round) in due {
                for fold in &round.folds {
                    // SAFETY: the stream waits for the messages; passed on from the caller.
                    unsafe { self.fold(fold, segment, buffers, call, divisor)? };
                }
            }
            self.folding.record(&self.folded[slot])?;
        }
        // In its order, the one stream has then done what both had to do.
        self.folded.iter().try_for_each(|folded| self.moving.wait(folded))?;
        Ok(())
    }

    /// Lists the messages of a step.
    fn list_messages<'r>(
        &mut self,
        due: impl Iterator<Item = (usize, &'r Round)>,
        buffers: &Buffers<'_>,
        state: &GroupState,
    ) {
        self.messages.clear();
        let size = buffers.dtype.size();
        for (segment, round) in due {
            for send in &round.sends {
                for (i, block) in send.blocks.clone().enumerate() {
                    let (at, count) = buffers.block(send.from, segment, block, i as u32);
                    self.list(Way::To, send.to, at, count * size);
                    if self.near[send.to] {
                        state.meter().count_shared(count * size);
                    } else {
                        state.meter().count_sockets(count * size);
                    }
                }
            }
            for recv in &round.recvs {
                for (i, block) in recv.blocks.clone().enumerate() {
                    let (at, count) = buffers.block(recv.into, segment, block, i as u32);
                    self.list(Way::From, recv.from, at, count * size);
                }
            }
        }
    }

    fn list(&mut self, way: Way, peer: usize, at: *mut u8, bytes: usize) {
        debug_assert_ne!(self.members[peer], self.rank, "no rank writes to itself");
        if bytes > 0 {
            self.messages.push(Message { way, peer, at: DevicePtr(at as u64), bytes });
        }
    }

    /// Submits a fold, or the copy that it is if it has one input.
    ///
    /// # Safety
    /// Inputs and result are device memory; nothing else uses the result, or writes the inputs, until
    /// the stream has come so far.
    unsafe fn fold(
        &mut self,
        fold: &Fold,
        segment: usize,
        buffers: &Buffers<'_>,
        call: &Call,
        divisor: Option<u32>,
    ) -> Result<(), FoldError> {
        assert!(fold.tree.is_canonical(), "the device folds in the canonical order");
        for (i, block) in fold.blocks.clone().enumerate() {
            let i = i as u32;
            let (into, count) = buffers.block(fold.into, segment, block, i);
            if count == 0 {
                continue;
            }
            let into = DevicePtr(into as u64);
            let address = |place| DevicePtr(buffers.block(place, segment, block, i).0 as u64);
            self.inputs.clear();
            self.inputs.extend(fold.inputs.iter().map(|place| address(*place)));
            let (dtype, reduction) = (call.dtype, call.reduction);
            let divisor = if fold.root { divisor } else { None };
            // SAFETY: passed on from the caller.
            unsafe {
                match self.inputs[..] {
                    [from] if from == into => {}
                    [from] => self.folding.copy(into, from, count * dtype.size())?,
                    _ => {
                        let Lane { folding, inputs, .. } = &*self;
                        self.folds
                            .fold(folding, dtype, reduction, divisor, inputs, into, None, count)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits until NCCL has submitted what it was asked for.
    fn settle_host(&self, during: &'static str, state: &GroupState) -> Result<(), Stop> {
        let Some(communicator) = &self.communicator else { return Ok(()) };
        let mut turn = 0;
        while !communicator.is_ready(during)? {
            if state.is_over() {
                return Err(Stop::Over);
            }
            pause(turn);
            turn += 1;
        }
        Ok(())
    }

    /// Waits until the device has done the call.
    fn wait(&self, call: &Call, state: &GroupState) -> Result<(), Stop> {
        self.moving.record(&self.done)?;
        let (mut watch, mut said) = (None, Instant::now());
        let mut turn = 0;
        while !self.done.query()? {
            if state.is_over() {
                return Err(Stop::Over);
            }
            if let Some(communicator) = &self.communicator {
                communicator.is_ready("a call")?;
            }
            pause(turn);
            turn += 1;
            if turn > EAGER && said.elapsed() >= SAY_EVERY {
                said = Instant::now();
                // Before, the call waits for what its own caller asked of the device.
                if watch.is_some() || self.begun.query()? {
                    let watch = watch.get_or_insert_with(|| state.watch(call));
                    let others = self.members.iter().copied().filter(|it| *it != self.rank);
                    watch.tick(|| others.collect());
                }
            }
        }
        Ok(())
    }

    /// Waits until the device has done all that was submitted. It needs no other rank for that, unless messages are
    /// under way; if so, for when the communicator is aborted.
    pub fn settle(&self) -> Result<(), CudaError> {
        for stream in [&self.moving, &self.folding] {
            let mut turn = 0;
            while !stream.query()? {
                pause(turn);
                turn += 1;
            }
        }
        Ok(())
    }
}

impl Drop for Lane {
    /// Parts from the other ranks. No call is under way: each has ended on the device before it returned.
    fn drop(&mut self) {
        let context = self.context().clone();
        match context.enter() {
            // The communicator is the parent's, which goes on.
            Err(CudaError::Forked { .. }) => {}
            Err(error) => log::debug!("device {}: {error}", context.device().number()),
            Ok(_entered) => {
                if let Some(communicator) = &mut self.communicator {
                    communicator.leave(|| self.state.is_over());
                }
            }
        }
    }
}

/// A turn of a wait.
fn pause(turn: u32) {
    if turn < EAGER {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}
