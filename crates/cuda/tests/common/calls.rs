//! Calls of every operation, type and reduction on any group, against the host's engine, bit by bit.

use unisono_collective::engine::Memory;
use unisono_collective::{Dtype, Op, Reduction, Request};
use unisono_cuda::{Context, DeviceGroup, DeviceMemory, Driver, Stream};

use crate::common::{element, same};
use crate::fake::{library, on_all};

/// Bytes of a staging buffer: few, so that calls have several segments.
pub const BUFFER: usize = 1 << 10;

/// Numbers of ranks: the smallest, one in which a rank is left over, and one that has both.
pub const WORLDS: [usize; 3] = [2, 3, 5];

/// Elements of a call: none, fewer than some of the worlds have ranks, and several segments.
pub const COUNTS: [usize; 3] = [0, 3, 700];

/// Memory for elements, aligned for all of them.
struct Buffer {
    words: Vec<u64>,
    dtype: Dtype,
    count: usize,
}

impl Buffer {
    fn new(dtype: Dtype, count: usize, mut value: impl FnMut(usize) -> u64) -> Buffer {
        let size = dtype.size();
        let mut buffer = Buffer { words: vec![0; (count * size).div_ceil(8) + 1], dtype, count };
        for i in 0..count {
            let bytes = value(i).to_le_bytes();
            // SAFETY: there is room for as many elements.
            let into = unsafe { buffer.at().add(i * size) };
            // SAFETY: as above.
            unsafe { into.copy_from_nonoverlapping(bytes.as_ptr(), size) };
        }
        buffer
    }

    fn at(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    fn values(&mut self) -> Vec<u64> {
        let (size, at) = (self.dtype.size(), self.at());
        let value = |i| {
            let mut bytes = [0; 8];
            // SAFETY: there are as many elements.
            unsafe { at.add(i * size).copy_to_nonoverlapping(bytes.as_mut_ptr(), size) };
            u64::from_le_bytes(bytes)
        };
        (0..self.count).map(value).collect()
    }
}

/// Elements of input and output of a rank; in place, both are of one buffer.
fn lengths(op: Op, rank: usize, world: usize, count: usize) -> (usize, usize) {
    match op {
        Op::AllReduce | Op::Broadcast { .. } => (count, count),
        Op::Reduce { root } => (count, if rank == root { count } else { 0 }),
        Op::ReduceScatter => (count * world, count),
        Op::AllGather => (count, count * world),
        Op::Gather { root } => (count, if rank == root { count * world } else { 0 }),
        Op::Scatter { root } => (if rank == root { count * world } else { 0 }, count),
        Op::AllToAll => (count * world, count * world),
    }
}

/// Runs a call on the host and on the device, out of place and, where that can be, in place.
fn compare(group: &DeviceGroup, op: Op, dtype: Dtype, reduction: Reduction, count: usize) {
    let in_place = matches!(
        op,
        Op::AllReduce
            | Op::Broadcast { .. }
            | Op::Reduce { .. }
            | Op::AllGather
            | Op::ReduceScatter
    );
    compare_at(group, op, dtype, reduction, count, false);
    if in_place {
        compare_at(group, op, dtype, reduction, count, true);
    }
}

fn compare_at(
    group: &DeviceGroup,
    op: Op,
    dtype: Dtype,
    reduction: Reduction,
    count: usize,
    in_place: bool,
) {
    let (rank, world) = (group.group().rank(), group.group().size());
    let (reads, writes) = lengths(op, rank, world, count);
    let value = |i| mask(dtype, element(dtype, rank, i));
    let what = format!(
        "{op:?} of {count} {dtype} by {reduction}, rank {rank} of {world}, in place: {in_place}"
    );
    let own_block = rank * count * dtype.size();
    let mut results = Vec::new();
    for memory in [Memory::Host, Memory::Device(0)] {
        let mut from = Buffer::new(dtype, reads.max(writes), value);
        let mut into = Buffer::new(dtype, writes, |_| 0x55);
        let whole = from.at();
        let (input, output) = match op {
            _ if !in_place => (whole, into.at()),
            Op::AllGather => (whole.wrapping_add(own_block), whole),
            Op::ReduceScatter => (whole, whole.wrapping_add(own_block)),
            _ => (whole, whole),
        };
        // SAFETY: the buffers are as long as the operation needs, and the host's memory is the device's.
        let request = unsafe {
            Request::raw(op, dtype, count, input.cast_const(), output).unwrap().in_memory(memory)
        };
        group.group().run(request.with_reduction(reduction)).expect(&what);
        if !in_place {
            let before: Vec<u64> = (0..reads.max(writes)).map(value).collect();
            assert_eq!(from.values(), before, "input of {what}");
        }
        results.push(if in_place { from.values() } else { into.values() });
    }
    assert_eq!(results[0].len(), results[1].len());
    for (i, (host, device)) in results[0].iter().zip(&results[1]).enumerate() {
        // Of a reduction in place, only the own block is a result.
        let is_result = op != Op::ReduceScatter || !in_place || i / count.max(1) == rank;
        assert!(
            !is_result || same(dtype, *device, *host),
            "element {i} is {device:#x}, not {host:#x}: {what}"
        );
    }
}

fn mask(dtype: Dtype, bits: u64) -> u64 {
    bits & (u64::MAX >> (64 - 8 * dtype.size()))
}

fn operations(world: usize) -> Vec<Op> {
    let root = world - 1;
    vec![
        Op::AllReduce,
        Op::ReduceScatter,
        Op::AllGather,
        Op::Broadcast { root },
        Op::Reduce { root },
        Op::Gather { root },
        Op::Scatter { root },
        Op::AllToAll,
    ]
}

/// Every operation with every type and reduction.
pub fn check(groups: &[DeviceGroup], counts: &[usize]) {
    let ranks = groups.len();
    on_all(groups, |group| {
        for dtype in Dtype::ALL {
            for op in operations(ranks) {
                let reductions: Vec<Reduction> = if op.reduces() {
                    Reduction::ALL.into_iter().filter(|it| it.supports(dtype)).collect()
                } else {
                    vec![Reduction::Sum]
                };
                for reduction in reductions {
                    for &count in counts {
                        compare(group, op, dtype, reduction, count);
                    }
                }
            }
        }
    });
}

/// Calls that are longer than what is staged at a time.
pub fn check_long(groups: &[DeviceGroup]) {
    on_all(groups, |group| {
        for count in [5_001, 20_000] {
            for op in operations(groups.len()) {
                compare(group, op, Dtype::F32, Reduction::Sum, count);
                compare(group, op, Dtype::Bf16, Reduction::Mean, count);
            }
        }
    });
}

/// Calls among other work of a stream.
pub fn follow_streams(groups: &[DeviceGroup]) {
    const COUNT: usize = 3000;
    let context =
        Context::new(&Driver::load_from(library().as_os_str()).unwrap().device(0).unwrap());
    let context = context.unwrap();
    on_all(groups, |group| {
        let stream = Stream::new(&context, 0).unwrap();
        let memory = DeviceMemory::new(&context, 4 * COUNT).unwrap();
        let at = memory.pointer();
        let mut found = vec![0f32; COUNT];
        for round in 1..=20 {
            // SAFETY: the memory has as many elements, and all is in the order of one stream.
            unsafe {
                stream.fill_words(at, (round as f32).to_bits(), COUNT).unwrap();
                group.all_reduce(at, at, COUNT, Dtype::F32, Reduction::Sum, Some(&stream)).unwrap();
                let into = found.as_mut_ptr().cast();
                stream.copy_to_host(into, at, 4 * COUNT).unwrap();
            }
            stream.synchronize().unwrap();
            assert_eq!(found, [(groups.len() * round) as f32; COUNT]);
        }
    });
}

/// An all-to-all of blocks of different lengths.
pub fn exchange_unequal(groups: &[DeviceGroup]) {
    on_all(groups, |group| {
        let (rank, world) = (group.group().rank(), group.group().size());
        let length = |from: usize, to: usize| (from * 3 + to * 5) % 7 * 331;
        let sent: Vec<usize> = (0..world).map(|to| length(rank, to)).collect();
        let received: Vec<usize> = (0..world).map(|from| length(from, rank)).collect();
        let pattern = |from: usize, to: usize| {
            (0..length(from, to)).map(move |i| (from * 89 + to * 41 + i * 7) as u8)
        };
        let input: Vec<u8> = (0..world).flat_map(|to| pattern(rank, to)).collect();
        let expected: Vec<u8> = (0..world).flat_map(|from| pattern(from, rank)).collect();
        let mut output = vec![0u8; expected.len()];
        // SAFETY: the host's memory is the device's, and as long as the blocks together.
        let request = unsafe {
            let (input, output) = (input.as_ptr(), output.as_mut_ptr());
            let request = Request::raw_all_to_all_unequal(input, &sent, output, &received, None);
            request.unwrap().in_memory(Memory::Device(0))
        };
        group.group().run(request).unwrap();
        assert_eq!(output, expected, "rank {rank}");
    });
}
