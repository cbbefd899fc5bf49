//! Calls on device memory through the host's own collectives.
//!
//! For ranks that share neither memory nor NCCL: on several hosts, or where the transport is TCP. A call goes in
//! *chunks* through pinned memory of the host: a chunk is copied down from the device, the [host's
//! engine](HostEngine) runs the operation on it, and its result is copied up. While the host works on one chunk, the next is on its
//! way down and the last on its way up. The elements of a result depend on those of the same place only, and the host folds in the
//! canonical order, so chunks change no bits.
//!
//! Of operations with blocks, a chunk has the same range of elements of every block, packed one after the
//! other. Where blocks have different lengths, those that end before others are filled up: what is in
//! there travels, and is thrown away.
//!
//! The memory is four buffers, each for the chunk of a whole call, however large the call is.

use std::time::Duration;

use unisono_collective::engine::{Buffers, CallPlan, Engine, GroupState, HostEngine, Memory};
use unisono_collective::schedule::{Area, Schedule};
use unisono_collective::{Call, Checked, Error, Explanation, FormError, Op, Request};

use crate::agreement::{self, Reason};
use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::library::DevicePtr;
use crate::memory::HostMemory;
use crate::order::{Order, failed};
use crate::stream::Stream;

/// Chunks in memory, of each direction: one is copied while the host has the other. More: more memory.
const DEPTH: usize = 2;

/// Turns in which a rank that waits for the device looks again at once. More: a busier core. Fewer: it sleeps when the
/// copy would be done in a moment.
const EAGER: u32 = 2000;

/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);

/// The settings of the engine; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BounceOptions {
    /// Bytes of a chunk, over all its blocks. Larger: more pinned memory, and the copies of small calls overlap less.
    /// Smaller: more calls of the host's engine.
    pub chunk: usize,
}

impl Default for BounceOptions {
    fn default() -> BounceOptions {
        BounceOptions { chunk: 4 << 20 }
    }
}

/// Runs calls on the memory of one device through those of the host's engine.
pub(crate) struct Bounce {
    host: HostEngine,
    parts: Parts,
}

/// What the engine is made of beside the host's.
pub(crate) struct Parts {
    down: Stream,
    up: Stream,
    order: Order,
    /// A chunk is on the host, by its place in memory.
    arrived: [Event; DEPTH],
    /// Its result is on the device.
    returned: [Event; DEPTH],
    /// [`DEPTH`] buffers for what comes down, and as many for what goes up.
    memory: HostMemory,
    /// Bytes of a buffer.
    buffer: usize,
    device: u32,
}

/// Prepares this rank. All can, or all get the reason of one that cannot.
pub(crate) fn prepare(
    host: &mut HostEngine,
    context: &Context,
    options: BounceOptions,
) -> Result<Parts, FormError> {
    // Every block has at least a line.
    let buffer = options.chunk.max(64 * host.topology().world()).next_multiple_of(4096);
    let prepared = Parts::new(context, buffer).map_err(Reason::from);
    let (parts, said) = match prepared {
        Ok(parts) => (Some(parts), Ok([])),
        Err(reason) => (None, Err(reason)),
    };
    agreement::tell(host, said)?.map_err(FormError::from)?;
    Ok(parts.expect("all ranks are prepared"))
}

impl Parts {
    fn new(context: &Context, buffer: usize) -> Result<Parts, CudaError> {
        let (_, urgent) = context.priorities()?;
        let stream = || Stream::new(context, urgent);
        let event = || Event::new(context, EventKind::Ordering);
        Ok(Parts {
            down: stream()?,
            up: stream()?,
            order: Order::new(context)?,
            arrived: [event()?, event()?],
            returned: [event()?, event()?],
            memory: HostMemory::new(context, 2 * DEPTH * buffer)?,
            buffer,
            device: context.device().number(),
        })
    }

    fn context(&self) -> &Context {
        self.down.context()
    }

    /// Where a chunk's input is, and where its result.
    fn places(&self, chunk: usize) -> (*mut u8, *mut u8) {
        let at = |buffer| self.memory.as_ptr().wrapping_add(buffer * self.buffer);
        (at(chunk % DEPTH), at(DEPTH + chunk % DEPTH))
    }

    fn settle(&self) -> Result<(), CudaError> {
        self.down.synchronize()?;
        self.up.synchronize()
    }
}

/// Waits for the device, and for no other rank.
pub(crate) fn wait(event: &Event, call: &Call, state: &GroupState) -> Result<(), Error> {
    let mut turn = 0;
    while !event.query().map_err(failed)? {
        if state.is_over() {
            return Err(state.error(Some(*call)));
        }
        if turn < EAGER {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(NAP);
        }
        turn += 1;
    }
    Ok(())
}

/// The pieces of one call.
struct Pieces<'a> {
    buffers: Buffers<'a>,
    /// Elements of every block's piece in a chunk but the last.
    column: usize,
    /// Elements of the longest block.
    extent: usize,
    /// The blocks that this rank reads and writes.
    input: std::ops::Range<usize>,
    output: std::ops::Range<usize>,
}

impl Pieces<'_> {
    /// Elements of every block in a chunk.
    fn count(&self, chunk: usize) -> usize {
        self.extent.saturating_sub(chunk * self.column).min(self.column)
    }

    /// Calls `piece` with each piece of a chunk in the caller's memory, its place in the packed one, and its bytes.
    fn each(
        &self,
        area: Area,
        chunk: usize,
        mut piece: impl FnMut(*mut u8, usize, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let size = self.buffers.dtype.size();
        let blocks = if area == Area::Input { &self.input } else { &self.output };
        for (place, block) in blocks.clone().enumerate() {
            let (at, count) = self.buffers.block(area, chunk, block as u32, 0);
            if count > 0 {
                piece(at, place * self.count(chunk) * size, count * size)?;
            }
        }
        Ok(())
    }
}

impl Bounce {
    /// What explanations call it.
    pub const NAME: &'static str = "bounce";

    /// The engine of what was prepared.
    pub fn new(host: HostEngine, parts: Parts) -> Bounce {
        Bounce { host, parts }
    }

    /// Elements of every block in a chunk: of nothing that differs between ranks.
    fn column(&self, request: &Request<'_>) -> usize {
        let size = request.dtype().size();
        let blocks = if request.op().has_blocks() { self.host.topology().world() } else { 1 };
        let (line, extent) = (64 / size, request.extent());
        let most = (self.parts.buffer / blocks / 64 * line).max(line);
        most.min(extent.next_multiple_of(line)).clamp(line, u32::MAX as usize)
    }

    /// Which blocks this rank reads and writes.
    fn blocks(&self, op: Op) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (me, world) = (self.host.rank(), self.host.topology().world());
        let (own, all, none) = (me..me + 1, 0..world, 0..0);
        let at_root = |root: usize, blocks: std::ops::Range<usize>| {
            if root == me { blocks } else { none.clone() }
        };
        match op {
            Op::AllReduce => (0..1, 0..1),
            Op::Broadcast { root } => (at_root(root, 0..1), 0..1),
            Op::Reduce { root } => (0..1, at_root(root, 0..1)),
            Op::ReduceScatter => (all, own),
            Op::Scatter { root } => (at_root(root, all), own),
            Op::AllGather => (own, all),
            Op::Gather { root } => (own, at_root(root, all)),
            Op::AllToAll => (all.clone(), all),
        }
    }

    /// Runs the chunks of a call.
    ///
    /// # Safety
    /// The pieces lie in device memory that nothing else uses until stream up has come to where it is when this
    /// returns, and stream down is idle.
    unsafe fn run_chunks(
        &mut self,
        call: &Call,
        pieces: &Pieces<'_>,
        chunks: usize,
    ) -> Result<(), Error> {
        // SAFETY: passed on from the caller.
        unsafe { self.copy_down(pieces, 0)? };
        for chunk in 0..chunks {
            if chunk + 1 < chunks {
                // SAFETY: passed on from the caller. The host has run the call on what was there before.
                unsafe { self.copy_down(pieces, chunk + 1)? };
            }
            let (parts, place) = (&self.parts, chunk % DEPTH);
            wait(&parts.arrived[place], call, self.host.state())?;
            wait(&parts.returned[place], call, self.host.state())?;
            let (input, output) = parts.places(chunk);
            // SAFETY: the buffers have room for a chunk of all blocks, and no copy uses them now.
            let request = unsafe {
                Request::raw(call.op, call.dtype, pieces.count(chunk), input.cast_const(), output)?
            };
            let request = request.with_reduction(call.reduction).with_algorithm(call.algorithm);
            let request = request.check(self.host.rank(), self.host.topology())?;
            let column = self.host.plan(&request)?.column as u32;
            self.host.run(&Call { column, ..*call }, &request)?;
            // SAFETY: passed on from the caller; the result stays until the event has happened.
            unsafe { self.copy_up(pieces, chunk)? };
        }
        Ok(())
    }

    /// # Safety
    /// As of [`Bounce::run_chunks`].
    unsafe fn copy_down(&self, pieces: &Pieces<'_>, chunk: usize) -> Result<(), Error> {
        let (into, down) = (self.parts.places(chunk).0, &self.parts.down);
        let copied = pieces.each(Area::Input, chunk, |from, place, bytes| {
            // SAFETY: the caller's promise; a chunk fits a buffer.
            unsafe { down.copy_to_host(into.wrapping_add(place), DevicePtr(from as u64), bytes) }
        });
        copied.and_then(|()| down.record(&self.parts.arrived[chunk % DEPTH])).map_err(failed)
    }

    /// # Safety
    /// As of [`Bounce::run_chunks`].
    unsafe fn copy_up(&self, pieces: &Pieces<'_>, chunk: usize) -> Result<(), Error> {
        let (from, up) = (self.parts.places(chunk).1, &self.parts.up);
        let copied = pieces.each(Area::Output, chunk, |into, place, bytes| {
            // SAFETY: as above.
            unsafe { up.copy_from_pinned(DevicePtr(into as u64), from.wrapping_add(place), bytes) }
        });
        copied.and_then(|()| up.record(&self.parts.returned[chunk % DEPTH])).map_err(failed)
    }
}

impl Engine for Bounce {
    fn reaches(&self) -> Vec<Memory> {
        vec![Memory::Host, Memory::Device(self.parts.device)]
    }

    fn plan(&mut self, request: &Request<'_>) -> Result<CallPlan, Error> {
        if request.memory() == Memory::Host {
            return self.host.plan(request);
        }
        Order::check(self.parts.context(), request)?;
        let column = self.column(request);
        let chunk = Request::sized(request.op(), request.dtype(), column.min(request.extent()));
        let chunk = chunk.with_reduction(request.reduction()).with_algorithm(request.algorithm());
        Ok(CallPlan { column, ..self.host.plan(&chunk)? })
    }

    fn explain(&mut self, request: &Request<'_>) -> Result<Explanation, Error> {
        if request.memory() == Memory::Host {
            return self.host.explain(request);
        }
        let chosen = self.plan(request)?.algorithm;
        // What the host's engine would take for the whole; the copies hide behind it, or it behind them.
        Ok(Explanation { engine: Bounce::NAME, chosen, ..self.host.explain(request)? })
    }

    fn host(&mut self) -> &mut HostEngine {
        &mut self.host
    }

    fn run(&mut self, call: &Call, request: &Checked<'_>) -> Result<(), Error> {
        if request.memory() == Memory::Host {
            return self.host.run(call, request);
        }
        let context = self.parts.context().clone();
        let _entered = context.enter().map_err(failed)?;
        let caller = Order::caller(&context, request);
        if let Some(begin) = self.parts.order.mark(caller.as_ref()).map_err(failed)? {
            self.parts.down.wait(begin).map_err(failed)?;
            self.parts.up.wait(begin).map_err(failed)?;
        }
        let column = call.column as usize;
        let whole = Schedule { phases: Vec::new(), parts: 1, cells: 0, staging: 0 };
        let (buffers, chunks) = request.cut(&whole, column, 1);
        let (input, output) = self.blocks(call.op);
        let pieces = Pieces { buffers, column, extent: request.extent(), input, output };
        // SAFETY: the request was checked, and its memory stays until the caller's stream has come to the end of
        // the call, or until this returns; after an error, until both streams are idle.
        let outcome = unsafe { self.run_chunks(call, &pieces, chunks) };
        let handed_over = match outcome {
            Ok(()) => self.parts.order.end(caller.as_ref(), &self.parts.up),
            Err(_) => Ok(false),
        };
        let settled = match handed_over {
            Ok(true) => Ok(()),
            Ok(false) => self.parts.settle(),
            Err(error) => Err(error),
        };
        outcome.and(settled.map_err(failed))
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        match self.parts.settle() {
            Ok(()) | Err(CudaError::Forked { .. }) => {}
            Err(error) => log::debug!("device {}: {error}", self.parts.device),
        }
    }
}
