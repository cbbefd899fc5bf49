//! What the device could do at best, measured in the same run.
//!
//! Which limit counts depends on what the bytes of a call must pass. Ranks that share a device read and
//! write its memory: the limit is what all of them together must read and write, at the rate of the
//! driver's copy. Ranks with devices of their own send to each other: the limit is the rate at which every
//! rank copies to the device of the next one, while all do so. Calls through the host copy down to it
//! and up again: the limit is what the ranks of the fullest device must copy, at the rates of copies to
//! and from pinned memory, with both directions at once. Where the bytes pass the network, or an engine
//! that takes ranks of one device for hosts of their own, the limit is that of plain TCP.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use unisono::{Group, Reduction};
use unisono_cuda::{Context, CudaError, DeviceMemory, HostMemory};

use super::{Gpu, Sharing};
use crate::bench::limit::link_rate;
use crate::bench::workload::Operation;

/// Bytes of a copy that is timed. Fewer: its start shows. More: memory that the ranks need.
const BYTES: usize = 64 << 20;

/// Time spent on one rate.
const BUDGET: Duration = Duration::from_millis(60);

/// What a call's bytes must pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Memory of a device that all ranks share.
    Memory,
    /// Connections between devices of one machine.
    Peers,
    /// Memory of the host.
    Host,
    /// Connections between hosts.
    Network,
}

/// Rates in bytes per second.
#[derive(Clone, Copy, Debug)]
enum Rates {
    /// Read and written.
    Memory(f64),
    /// From every rank to the next.
    Links(f64),
    Copies {
        down: f64,
        up: f64,
    },
}

/// The limits of the devices of a group.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    sharing: Sharing,
    rates: Rates,
}

impl Roofline {
    /// Measures what calls of a group must pass; all ranks at once.
    pub fn measure(
        group: &Group,
        gpu: &Gpu,
        sharing: Sharing,
        way: Way,
        ip: IpAddr,
    ) -> anyhow::Result<Roofline> {
        // While one rank measures, the others wait.
        let alone = |rate: &dyn Fn() -> Result<f64, CudaError>| -> anyhow::Result<f64> {
            group.barrier()?;
            let mut found = [0.0];
            if group.rank() == 0 {
                found[0] = rate()?;
            }
            group.all_reduce(&mut found, Reduction::Max)?;
            Ok(found[0])
        };
        let rates = match way {
            Way::Memory => Rates::Memory(alone(&|| memory_rate(gpu))?),
            Way::Peers => {
                group.barrier()?;
                let mut rate = [to_next_device(gpu)?];
                group.all_reduce(&mut rate, Reduction::Min)?;
                Rates::Links(rate[0])
            }
            Way::Host => {
                let down = alone(&|| host_rate(gpu, Direction::Down))?;
                Rates::Copies { down, up: alone(&|| host_rate(gpu, Direction::Up))? }
            }
            Way::Network => Rates::Links(link_rate(group, ip)?),
        };
        Ok(Roofline { sharing, rates })
    }

    /// The bus bandwidth, in bytes per second, of an operation that does nothing but move what it must.
    pub fn bus(&self, operation: Operation) -> f64 {
        let factor = operation.bus_factor(self.sharing.ranks);
        match self.rates {
            Rates::Memory(rate) => factor * rate / touched(operation, self.sharing.ranks),
            Rates::Links(rate) => rate,
            Rates::Copies { down, up } => {
                let (bytes_down, bytes_up) = copied(operation, self.sharing);
                factor / (bytes_down / down).max(bytes_up / up)
            }
        }
    }
}

/// Bytes that all ranks together read and write in the memory of the device that they share, per byte of
/// the buffer: staging and collecting read and write each byte, a fold reads every input and writes
/// its result, once more for the others where they need it.
fn touched(operation: Operation, world: usize) -> f64 {
    let n = world as f64;
    match operation {
        Operation::AllReduce => (5.0 * n - 2.0).min(n * (n + 3.0)),
        Operation::Reduce => 5.0 * n - 3.0,
        Operation::ReduceScatter => 3.0 * n - 1.0,
        Operation::AllGather => 2.0 * n + 2.0,
        Operation::AllToAll => 4.0 * n - 2.0,
        Operation::Broadcast => 2.0 * n,
        Operation::Gather | Operation::Scatter => 4.0 - 2.0 / n,
        Operation::Barrier => 0.0,
    }
}

/// Bytes that the ranks of the fullest device copy down to the host and up from it, per byte of the
/// buffer.
fn copied(operation: Operation, sharing: Sharing) -> (f64, f64) {
    let (n, k) = (sharing.ranks as f64, sharing.crowd as f64);
    match operation {
        Operation::AllReduce | Operation::AllToAll => (k, k),
        Operation::ReduceScatter => (k, k / n),
        Operation::AllGather => (k / n, k),
        Operation::Reduce => (k, 1.0),
        Operation::Gather => (k / n, 1.0),
        // The root has what it sends.
        Operation::Broadcast => (1.0, if sharing.devices == 1 { k - 1.0 } else { k }),
        Operation::Scatter => (1.0, k / n),
        Operation::Barrier => (0.0, 0.0),
    }
}

/// Bytes read and written per second by a copy of the driver.
pub fn memory_rate(gpu: &Gpu) -> Result<f64, CudaError> {
    let (from, into) = two_buffers(gpu)?;
    let rate = rate(gpu, || {
        // SAFETY: both have as many bytes, and nothing else uses them.
        unsafe { gpu.stream.copy_on_device(into.pointer(), from.pointer(), BYTES) }
    })?;
    Ok(2.0 * rate)
}

/// Between the device and the host.
#[derive(Clone, Copy)]
enum Direction {
    Down,
    Up,
}

fn host_rate(gpu: &Gpu, direction: Direction) -> Result<f64, CudaError> {
    let memory = DeviceMemory::new(&gpu.context, BYTES)?;
    let host = HostMemory::new(&gpu.context, BYTES)?;
    rate(gpu, || {
        // SAFETY: both have as many bytes, and nothing else uses them.
        unsafe {
            match direction {
                Direction::Down => gpu.stream.copy_to_host(host.as_ptr(), memory.pointer(), BYTES),
                Direction::Up => gpu.stream.copy_to_device(memory.pointer(), host.as_ptr(), BYTES),
            }
        }
    })
}

fn to_next_device(gpu: &Gpu) -> Result<f64, CudaError> {
    let driver = gpu.context.device().driver();
    let next = (gpu.number + 1) % driver.device_count();
    let next = Context::new(&driver.device(next)?)?;
    let from = DeviceMemory::new(&gpu.context, BYTES)?;
    let into = DeviceMemory::new(&next, BYTES)?;
    let (from, into) = ((&gpu.context, from.pointer()), (&next, into.pointer()));
    // SAFETY: both have as many bytes, and nothing else uses them.
    rate(gpu, || unsafe { gpu.stream.copy_to_peer(into, from, BYTES) })
}

fn two_buffers(gpu: &Gpu) -> Result<(DeviceMemory, DeviceMemory), CudaError> {
    Ok((DeviceMemory::new(&gpu.context, BYTES)?, DeviceMemory::new(&gpu.context, BYTES)?))
}

/// Bytes per second that a copy of [`BYTES`] moves, at its best.
fn rate(gpu: &Gpu, mut copy: impl FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    const IN_A_ROW: u32 = 4;
    let mut best = Duration::MAX;
    let started = Instant::now();
    // The first one also makes the memory known to the device.
    for round in 0.. {
        if round > 2 && started.elapsed() > BUDGET {
            break;
        }
        let start = Instant::now();
        (0..IN_A_ROW).try_for_each(|_| copy())?;
        gpu.stream.synchronize()?;
        best = best.min(start.elapsed() / IN_A_ROW);
    }
    Ok(BYTES as f64 / best.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared_by(ranks: usize) -> Sharing {
        Sharing { ranks, devices: 1, crowd: ranks }
    }

    /// Seconds of a call on 64 MiB at the rates of the machine that the targets are for.
    fn seconds(rates: Rates, ranks: usize) -> f64 {
        let roofline = Roofline { sharing: shared_by(ranks), rates };
        let factor = Operation::AllReduce.bus_factor(ranks);
        factor * (64 << 20) as f64 / roofline.bus(Operation::AllReduce)
    }

    #[test]
    fn limits_are_those_known_of_one_device() {
        let near = |found: f64, known: f64| (found / known - 1.0).abs() < 0.02;
        assert!(near(seconds(Rates::Memory(4.17e12), 2), 129e-6));
        assert!(near(seconds(Rates::Copies { down: 54e9, up: 54e9 }, 2), 2.49e-3));
        assert!(near(seconds(Rates::Copies { down: 27e9, up: 54e9 }, 2), 4.97e-3));
    }

    #[test]
    fn ranks_with_devices_of_their_own_copy_at_once() {
        let apart = Sharing { ranks: 4, devices: 4, crowd: 1 };
        assert_eq!(copied(Operation::AllReduce, apart), (1.0, 1.0));
        assert_eq!(copied(Operation::AllReduce, shared_by(4)), (4.0, 4.0));
        assert_eq!(copied(Operation::Broadcast, shared_by(4)), (1.0, 3.0));
        assert_eq!(copied(Operation::Broadcast, apart), (1.0, 1.0));
    }
}
