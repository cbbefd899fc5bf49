//! The buffers of a measured operation, and whether it did what it should.

mod device;

use std::rc::Rc;

use anyhow::{Context, bail};
use unisono::collective::schedule::Op;
use unisono::{Algorithm, Dtype, Element, Group, Reduction, Registered, Request};

use super::device::Gpu;
use device::DeviceBuffers;

/// The operations that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
}

impl Operation {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Barrier => "barrier",
            _ => self.op().name(),
        }
    }

    fn op(self) -> Op {
        match self {
            Operation::AllReduce | Operation::Barrier => Op::AllReduce,
            Operation::ReduceScatter => Op::ReduceScatter,
            Operation::AllGather => Op::AllGather,
            Operation::Broadcast => Op::Broadcast { root: 0 },
            Operation::Reduce => Op::Reduce { root: 0 },
            Operation::Gather => Op::Gather { root: 0 },
            Operation::Scatter => Op::Scatter { root: 0 },
            Operation::AllToAll => Op::AllToAll,
        }
    }

    /// Whether the buffer has one block per rank.
    fn has_blocks(self) -> bool {
        use Operation::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self, ReduceScatter | AllGather | Gather | Scatter | AllToAll)
    }

    /// Buffers of the whole size that a rank holds, at most.
    pub fn buffers(self) -> usize {
        match self {
            Operation::AllReduce | Operation::Broadcast | Operation::Barrier => 1,
            _ => 2,
        }
    }

    /// Whether ranks can read each other's registered memory in place.
    pub fn can_be_in_place(self) -> bool {
        use Operation::{AllGather, AllReduce, Broadcast, ReduceScatter};
        matches!(self, AllReduce | ReduceScatter | AllGather | Broadcast)
    }

    /// Bytes that cross the busiest link per byte of the buffer, as nccl-tests counts them.
    pub fn bus_factor(self, world: usize) -> f64 {
        let n = world as f64;
        match self {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            Operation::Broadcast | Operation::Reduce | Operation::Barrier => 1.0,
            _ => (n - 1.0) / n,
        }
    }
}

/// An operation with its buffers, on one rank.
pub trait Workload {
    /// Bytes of the whole buffer: a multiple of what the operation needs, near what was asked.
    fn bytes(&self) -> usize;
    /// Puts this rank's pattern into the buffers.
    fn fill(&mut self) -> anyhow::Result<()>;
    /// Does the operation once.
    fn step(&mut self, group: &Group) -> anyhow::Result<()>;
    /// Whether the buffers hold what one step after [`Workload::fill`] must give.
    fn verify(&mut self, group: &Group) -> anyhow::Result<()>;
    /// Steps after which the values must be filled in anew, so that they stay finite.
    fn endurance(&self) -> usize;
    /// The call, to ask what it would cost.
    fn request(&mut self) -> Request<'_>;
}

/// The memory of a workload.
#[derive(Clone, Copy)]
pub enum Kind<'a> {
    /// The process's own.
    Plain,
    /// That other ranks can read.
    Registered,
    /// A device's.
    Device(&'a Rc<Gpu>),
}

/// Makes the workload of an operation on a buffer of about `bytes`.
pub fn make(
    operation: Operation,
    dtype: Dtype,
    bytes: usize,
    group: &Group,
    algorithm: Option<Algorithm>,
    memory: Kind<'_>,
) -> anyhow::Result<Box<dyn Workload>> {
    fn typed<T: Number>(
        operation: Operation,
        bytes: usize,
        group: &Group,
        algorithm: Option<Algorithm>,
        memory: Kind<'_>,
    ) -> anyhow::Result<Box<dyn Workload>> {
        let host = |registered| Buffers::<T>::new(operation, bytes, group, algorithm, registered);
        Ok(match memory {
            Kind::Plain => Box::new(host(false)?),
            Kind::Registered => Box::new(host(true)?),
            Kind::Device(gpu) => {
                Box::new(DeviceBuffers::<T>::new(operation, bytes, group, algorithm, gpu)?)
            }
        })
    }
    let make = match dtype {
        Dtype::F32 => typed::<f32>,
        Dtype::F64 => typed::<f64>,
        Dtype::F16 => typed::<half::f16>,
        Dtype::Bf16 => typed::<half::bf16>,
        Dtype::I8 => typed::<i8>,
        Dtype::U8 => typed::<u8>,
        Dtype::I32 => typed::<i32>,
        Dtype::I64 => typed::<i64>,
    };
    make(operation, bytes, group, algorithm, memory)
}

/// A type whose small whole numbers are exact.
trait Number: Element + PartialEq + std::fmt::Debug + 'static {
    /// The number; its low bits, where the type has no more.
    fn of(n: u32) -> Self;
}

macro_rules! numbers {
    ($($t:ty => $n:ident $e:expr),* $(,)?) => {$(
        impl Number for $t { fn of($n: u32) -> $t { $e } }
    )*};
}
numbers!(
    f32 => n n as f32, f64 => n f64::from(n), half::f16 => n half::f16::from_f32(n as f32),
    half::bf16 => n half::bf16::from_f32(n as f32), i8 => n n as i8, u8 => n n as u8,
    i32 => n n as i32, i64 => n i64::from(n),
);

/// From more ranks than these, sums of the usual pattern are not exact in every type: bf16 has every
/// whole number up to 256 only.
const MANY: usize = 64;

/// What rank `rank` of `world` puts at `index`: small, so that sums are exact in every type, and
/// different at neighbouring ranks and places.
fn pattern(world: usize, rank: usize, index: usize) -> u32 {
    let number = ((index + 3 * rank) % 5) as u32;
    if world <= MANY { number } else { u32::from(number == 0) }
}

/// Elements in one kind of memory or the other.
enum Numbers<T> {
    Plain(Vec<T>),
    Registered(Registered<T>),
}

impl<T: Number> Numbers<T> {
    fn new(count: usize, group: &Group, registered: bool) -> anyhow::Result<Numbers<T>> {
        let mut numbers = match registered {
            true => Numbers::Registered(group.allocate(count)?),
            false => Numbers::Plain(vec![T::of(1); count]),
        };
        // So that all of it is there.
        numbers.fill(T::of(1));
        Ok(numbers)
    }
}

impl<T: Element> std::ops::Deref for Numbers<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Numbers::Plain(numbers) => numbers,
            Numbers::Registered(numbers) => numbers,
        }
    }
}

impl<T: Element> std::ops::DerefMut for Numbers<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Numbers::Plain(numbers) => numbers,
            Numbers::Registered(numbers) => numbers,
        }
    }
}

struct Buffers<T> {
    operation: Operation,
    algorithm: Option<Algorithm>,
    rank: usize,
    world: usize,
    /// Elements of a block, or of the whole buffer.
    count: usize,
    /// Empty if it is a block of the output.
    input: Numbers<T>,
    /// Empty if the result replaces the input.
    output: Numbers<T>,
}

impl<T: Number> Buffers<T> {
    fn new(
        operation: Operation,
        bytes: usize,
        group: &Group,
        algorithm: Option<Algorithm>,
        registered: bool,
    ) -> anyhow::Result<Self> {
        let (rank, world) = (group.rank(), group.size());
        let whole = if operation == Operation::Barrier { 0 } else { bytes / size_of::<T>() };
        let count = if operation.has_blocks() { whole / world } else { whole };
        let (input, output) = match operation {
            Operation::AllGather if registered => (0, count * world),
            Operation::ReduceScatter => (count * world, count),
            Operation::AllGather | Operation::Gather => (count, count * world),
            Operation::Scatter => (count * world, count),
            Operation::AllToAll => (count * world, count * world),
            Operation::Reduce => (count, count),
            Operation::AllReduce | Operation::Broadcast | Operation::Barrier => (count, 0),
        };
        let input = Numbers::new(input, group, registered)?;
        let output = Numbers::new(output, group, registered)?;
        Ok(Buffers { operation, algorithm, rank, world, count, input, output })
    }

    /// Whether the input of an all-gather is its block of the output.
    fn gathers_in_place(&self) -> bool {
        self.operation == Operation::AllGather && self.input.is_empty()
    }

    fn sum(&self, index: usize) -> T {
        T::of((0..self.world).map(|rank| pattern(self.world, rank, index)).sum())
    }

    /// What must be at `index` of the result.
    fn expected(&self, index: usize) -> T {
        let (block, offset) = (index / self.count.max(1), index % self.count.max(1));
        match self.operation {
            Operation::AllReduce | Operation::Reduce => self.sum(index),
            Operation::ReduceScatter => self.sum(self.rank * self.count + index),
            Operation::AllGather | Operation::Gather => T::of(pattern(self.world, block, offset)),
            Operation::Broadcast => T::of(pattern(self.world, 0, index)),
            Operation::Scatter => T::of(pattern(self.world, 0, self.rank * self.count + index)),
            Operation::AllToAll => {
                T::of(pattern(self.world, block, self.rank * self.count + offset))
            }
            Operation::Barrier => T::of(0),
        }
    }

    fn result(&self) -> &[T] {
        if self.output.is_empty() { &self.input } else { &self.output }
    }
}

impl<T: Number> Workload for Buffers<T> {
    fn bytes(&self) -> usize {
        let blocks = if self.operation.has_blocks() { self.world } else { 1 };
        self.count * blocks * size_of::<T>()
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        let (rank, world, count) = (self.rank, self.world, self.count);
        self.output.fill(T::of(99));
        let input = match self.gathers_in_place() {
            true => &mut self.output[rank * count..(rank + 1) * count],
            false => &mut self.input[..],
        };
        for (i, value) in input.iter_mut().enumerate() {
            *value = T::of(pattern(world, rank, i));
        }
        Ok(())
    }

    fn step(&mut self, group: &Group) -> anyhow::Result<()> {
        Ok(group.run(self.request()).map(drop)?)
    }

    fn verify(&mut self, group: &Group) -> anyhow::Result<()> {
        use Operation::{Gather, Reduce};
        if matches!(self.operation, Reduce | Gather) && group.rank() != 0 {
            return Ok(());
        }
        for (i, value) in self.result().iter().enumerate() {
            let expected = self.expected(i);
            if *value != expected {
                bail!("rank {}: element {i} is {value:?}, expected {expected:?}", self.rank);
            }
        }
        Ok(())
    }

    fn endurance(&self) -> usize {
        match self.operation {
            // In place, every step multiplies the values by the world: stay below 2^100.
            Operation::AllReduce if T::DTYPE.is_float() && T::DTYPE != Dtype::F16 => {
                100 / (self.world.next_power_of_two().trailing_zeros() as usize).max(1)
            }
            _ => usize::MAX,
        }
    }

    fn request(&mut self) -> Request<'_> {
        let gathers_in_place = self.gathers_in_place();
        let (input, output) = (&mut *self.input, &mut *self.output);
        let (sum, root) = (Reduction::Sum, 0);
        let request = match self.operation {
            Operation::AllReduce => Request::all_reduce(input, sum),
            Operation::ReduceScatter => Request::reduce_scatter(input, output, sum),
            Operation::AllGather if gathers_in_place => Request::all_gather_in_place(output),
            Operation::AllGather => Request::all_gather(input, output),
            Operation::Broadcast => Request::broadcast(input, root),
            Operation::Reduce => Request::reduce(input, Some(output), sum, root),
            Operation::Gather => Request::gather(input, Some(output), root),
            Operation::Scatter => Request::scatter(Some(input), output, root),
            Operation::AllToAll => Request::all_to_all(input, output),
            Operation::Barrier => Request::barrier(),
        };
        request.with_algorithm(self.algorithm)
    }
}

/// Does a step on fresh data and checks every element, on all ranks.
pub fn verify_step(workload: &mut dyn Workload, group: &Group) -> anyhow::Result<()> {
    workload.fill()?;
    workload.step(group).context("the operation failed")?;
    let outcome = workload.verify(group);
    let mut bad = [i32::from(outcome.is_err())];
    group.all_reduce(&mut bad, Reduction::Sum)?;
    outcome?;
    if bad[0] > 0 {
        bail!("{} ranks got a wrong result", bad[0]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What every rank contributes, added one by one in the type, is what is expected: exactly, from
    /// the first rank to the last.
    #[test]
    fn sums_are_right_however_many_ranks_there_are() {
        fn check<T: Number>(add: fn(T, T) -> T) {
            for world in (1..300).chain([500, 1000]) {
                let (operation, algorithm) = (Operation::AllReduce, None);
                let [input, output] = [(); 2].map(|()| Numbers::Plain(Vec::new()));
                let buffers: Buffers<T> =
                    Buffers { operation, algorithm, rank: 0, world, count: 7, input, output };
                for index in 0..7 {
                    let numbers = (0..world).map(|rank| T::of(pattern(world, rank, index)));
                    let sum = numbers.fold(T::of(0), add);
                    assert_eq!(buffers.expected(index), sum, "{world} ranks, element {index}");
                }
            }
        }
        check::<u8>(u8::wrapping_add);
        check::<i8>(i8::wrapping_add);
        check::<i32>(i32::wrapping_add);
        check::<i64>(i64::wrapping_add);
        check::<f32>(|a, b| a + b);
        check::<f64>(|a, b| a + b);
        check::<half::f16>(|a, b| half::f16::from_f32(a.to_f32() + b.to_f32()));
        check::<half::bf16>(|a, b| half::bf16::from_f32(a.to_f32() + b.to_f32()));
    }
}
