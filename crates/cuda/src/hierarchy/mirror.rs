//! Rounds through the host.
//!
//! What the rounds of a segment read is copied down to pinned memory, where the host's links run them, folds included; what
//! is wanted of the result is copied up. The pinned memory is a *mirror* of the segment: its blocks, once for the input and
//! once for the output, and its scratch cells. In it the segment is cut once more, into *pieces*, of which one is folded while
//! the next is on its way.

use unisono_collective::Call;
use unisono_collective::Error;
use unisono_collective::engine::{Buffers, HostEngine};
use unisono_collective::schedule::{Area, Blocks, Layout, Phase, Rounds, Schedule};

use crate::bounce;
use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, EventKind};
use crate::library::DevicePtr;
use crate::memory::{DeviceMemory, HostMemory};
use crate::order::failed;
use crate::stream::Stream;

/// Bytes of a piece, over all blocks. Larger: less overlap of sending, receiving and folding. Smaller: more messages.
const PIECE: usize = 1 << 20;

/// Pieces of a segment at most. More: smaller messages. Fewer: less overlap.
const PIECES: usize = 8;

/// What pieces may add to a column: each begins at a line.
const SLACK: usize = PIECES * super::LINE;

/// Pinned memory for a segment, and scratch memory on the device.
pub struct Mirror {
    memory: HostMemory,
    scratch: DeviceMemory,
    /// The segment is on the host.
    arrived: Event,
    /// Where its blocks begin; kept to allocate nothing per call.
    offsets: Vec<usize>,
}

/// Blocks that the rounds of a schedule read before they write them, and those that they write for others to read, each with
/// its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    pub down: Vec<(Area, u32)>,
    pub up: Vec<(Area, u32)>,
    /// All blocks of a segment.
    blocks: usize,
}

impl Mirror {
    /// With so many bytes of each memory, or as many as `cells` of one line take.
    pub fn new(context: &Context, bytes: usize, cells: usize) -> Result<Mirror, CudaError> {
        let bytes = bytes.max(cells * (SLACK + super::LINE)).next_multiple_of(4096);
        Ok(Mirror {
            memory: HostMemory::new(context, bytes)?,
            scratch: DeviceMemory::new(context, bytes)?,
            arrived: Event::new(context, EventKind::Ordering)?,
            offsets: Vec::new(),
        })
    }

    pub fn scratch(&self) -> &DeviceMemory {
        &self.scratch
    }

    /// Cells of a segment with so many blocks, and so many of scratch.
    pub fn cells(blocks: usize, scratch: usize) -> usize {
        2 * blocks + scratch
    }

    /// Bytes that a column may have if the mirror has so many cells.
    pub fn column(&self, cells: usize) -> usize {
        (self.memory.bytes() / cells.max(1)).saturating_sub(SLACK)
    }

    /// Elements of a piece and number of pieces, of columns of so many elements.
    pub fn pieces(column: usize, size: usize, blocks: usize) -> (usize, usize) {
        let line = super::LINE / size;
        let wanted = (column * size * blocks).div_ceil(PIECE).clamp(1, PIECES);
        let piece = column.div_ceil(wanted).next_multiple_of(line).max(line);
        (piece, column.div_ceil(piece).max(1))
    }

    /// Runs the rounds of a segment, after what the stream does now. What comes up is in the order of the stream.
    ///
    /// # Safety
    /// The buffers are device memory, and nothing but the stream uses them until it has come to where it is when this
    /// returns.
    #[allow(clippy::too_many_arguments, reason = "they are what a call is")]
    pub unsafe fn run(
        &mut self,
        host: &mut HostEngine,
        call: &Call,
        rounds: &Rounds,
        places: &Places,
        buffers: &Buffers<'_>,
        segment: usize,
        stream: &Stream,
    ) -> Result<(), Error> {
        let (size, column) = (buffers.dtype.size(), buffers.shape.column());
        let blocks = places.blocks;
        let (piece, pieces) = Mirror::pieces(column, size, blocks);
        self.offsets.clear();
        self.offsets.push(0);
        for block in 0..blocks {
            let count = buffers.shape.span(segment, block).len();
            self.offsets.push(self.offsets[block] + count);
        }
        let layout = Layout::unequal(&self.offsets, piece);
        let half = (blocks * column * size).next_multiple_of(super::LINE);
        let at = |offset| self.memory.as_ptr().wrapping_add(offset);
        let mirror = Buffers {
            input: at(0).cast_const(),
            input_layout: layout,
            output: at(half),
            output_layout: layout,
            shape: layout,
            scratch: at(2 * half),
            cells: buffers.cells,
            depth: pieces,
            dtype: buffers.dtype,
        };
        assert!(2 * half + mirror.scratch_bytes() <= self.memory.bytes(), "a segment fits");
        let each = |list: &[(Area, u32)], copy: &dyn Fn(*mut u8, DevicePtr, usize) -> _| {
            for &(area, block) in list {
                let device = buffers.block(area, segment, block, 0).0;
                for number in 0..pieces {
                    let (at, count) = mirror.block(area, number, block, 0);
                    let device = device.wrapping_add(number * piece * size);
                    if count > 0 {
                        copy(at, DevicePtr(device as u64), count * size)?;
                    }
                }
            }
            Ok::<(), CudaError>(())
        };
        // SAFETY: the blocks are as long in the mirror as on the device, and the stream is waited for.
        let copied = each(&places.down, &|at, device, bytes| unsafe {
            stream.copy_to_host(at, device, bytes)
        });
        copied.and_then(|()| stream.record(&self.arrived)).map_err(failed)?;
        // Then what went up from here before has arrived there, too.
        bounce::wait(&self.arrived, call, host.state())?;
        // SAFETY: no copy uses the mirror now.
        unsafe { host.run_rounds(call, rounds, &mirror, pieces)? };
        // SAFETY: as above; the mirror stays as it is until the stream has come so far.
        let copied = each(&places.up, &|at, device, bytes| unsafe {
            stream.copy_to_device(device, at, bytes)
        });
        copied.map_err(failed)
    }
}

impl Places {
    /// Those of the one phase of rounds.
    pub fn of(schedule: &Schedule, blocks: usize) -> Places {
        let mut places = Places { blocks, ..Places::default() };
        let mut written = Vec::new();
        let mut wanted = Vec::new();
        let list = |area: Area, blocks: &Blocks| {
            let blocks = blocks.clone().enumerate();
            blocks.map(move |(i, block)| (area.skip(i as u32), block)).collect::<Vec<_>>()
        };
        for phase in &schedule.phases {
            let rounds = match phase {
                Phase::Rounds(rounds) => &rounds.rounds[..],
                Phase::Window(window) => {
                    wanted.extend(window.stages.iter().flat_map(|it| list(it.from, &it.blocks)));
                    continue;
                }
            };
            for round in rounds {
                let mut read: Vec<_> =
                    round.sends.iter().flat_map(|send| list(send.from, &send.blocks)).collect();
                places.read(&mut read, &written);
                written.extend(round.recvs.iter().flat_map(|recv| list(recv.into, &recv.blocks)));
                for fold in &round.folds {
                    let inputs = fold.inputs.iter();
                    read.extend(inputs.flat_map(|input| list(*input, &fold.blocks)));
                    places.read(&mut read, &written);
                    written.extend(list(fold.into, &fold.blocks));
                }
            }
        }
        written.retain(|place| place.0 == Area::Output || wanted.contains(place));
        places.up = written;
        places
    }

    fn read(&mut self, read: &mut Vec<(Area, u32)>, written: &[(Area, u32)]) {
        for place in read.drain(..) {
            if !written.contains(&place) && !self.down.contains(&place) {
                self.down.push(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use unisono_collective::schedule::{Problem, Topology, build};
    use unisono_collective::{Algorithm, Op};

    use super::*;

    fn places(op: Op, rank: usize, hosts: &[u32]) -> Places {
        let (topology, world) = (Topology::new(hosts), hosts.len());
        let problem = Problem { op, rank, world };
        let schedule = build(Algorithm::Hierarchical, &problem, &topology).unwrap();
        let blocks = if op.has_blocks() { world } else { schedule.parts as usize };
        Places::of(&schedule, blocks)
    }

    #[test]
    fn a_host_is_left_by_its_partials_and_reached_by_results() {
        // The leader of two blocks has their partials in two cells, and gets the results of both.
        let Places { down, up, .. } = places(Op::AllReduce, 0, &[0, 0, 1, 1]);
        assert_eq!(down, [(Area::Scratch(1), 1), (Area::Scratch(0), 0)]);
        assert_eq!(up, [(Area::Output, 0), (Area::Output, 1)]);
        // A rank that is alone has its input for a partial.
        let Places { down, .. } = places(Op::AllReduce, 2, &[0, 0, 1]);
        assert_eq!(down, [(Area::Input, 0), (Area::Input, 1)]);
    }

    #[test]
    fn results_for_other_owners_come_up_to_be_staged() {
        let Places { up, .. } = places(Op::ReduceScatter, 0, &[0, 0, 1, 1]);
        assert_eq!(up, [(Area::Output, 0)]);
        // One leader for two owners.
        let Places { up, .. } = places(Op::ReduceScatter, 0, &[0, 0, 1]);
        assert_eq!(up.len(), 2);
        assert!(matches!(up[1], (Area::Scratch(_), 1)), "{up:?}");
    }

    #[test]
    fn pieces_cover_a_column() {
        for (column, size, blocks) in [(1, 4, 3), (16, 4, 1), (1 << 20, 4, 4), (777, 8, 9)] {
            let (piece, pieces) = Mirror::pieces(column, size, blocks);
            assert!(piece * pieces >= column && piece * (pieces - 1) < column);
            assert!(pieces <= PIECES && piece * pieces * size <= column * size + SLACK);
        }
    }
}
