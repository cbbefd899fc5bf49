//! The windows: collectives through memory that all ranks of a group can reach.
//!
//! The ranks do what the [window schedules](unisono_collective::schedule) of the host say: a rank *stages* what others will
//! fold, folds its own part straight from the caller's memory and the others' staging, writes the result to
//! the caller's memory and to its staging in one pass, and collects what the others folded. For little data it stages
//! everything and folds everything for itself, which saves a round ([`DeviceCosts`] says when). A call that
//! is larger than the staging goes through it in segments.
//!
//! **Staging.** The ranks of a *device window* share a GPU, or have GPUs that reach each other's memory. Each owns
//! staging memory on its device, which the others have opened (`opening.rs`). The ranks of a *host window* need not reach
//! each other's devices: their staging is one piece of host memory, which each maps and registers with its driver
//! (`hosting.rs`), and from which data is folded in one of three [ways](Way). A device window has that too, for
//! small calls: the processor folds those without a kernel, for which processes that share a GPU take turns.
//!
//! **Order.** The [clocks](unisono_collective::engine::clock) of the
//! host's window order the ranks, with one difference: a rank's clock ticks when the device has *done* the
//! work before the tick, not when it was submitted. So the rank records events of its own with the work, one in each
//! of its streams that has some (`lines.rs`),
//! goes on to submit what it may, and publishes the tick when it finds that they have happened. What a
//! peer has published can be read, by whatever a rank submits then. A tick
//! also says that everything submitted before it was done: that the rank has finished reading what it read.
//!
//! **Nothing on the device waits for another process.** No kernel spins, and no stream waits for an event of
//! another process: were that process killed, such a wait would never end, nor anything behind it.
//! All that a rank submits ends by itself, and a killed peer's memory stays as long as it is open here. The
//! waits are those of hosts, which the failure of the group ends.
//!
//! **Streams.** A call [on a stream](unisono_collective::Request::on_stream) begins, on the device, when that
//! stream has come so far, and the stream goes on when the call has ended there. On the host, the call
//! returns when its last work is submitted and its last tick published.

mod cost;
mod engine;
mod hosting;
mod lines;
mod measure;
mod opening;
mod run;
mod steps;
mod way;
mod words;

pub use cost::{DeviceCosts, Rounds};
pub(crate) use engine::{DeviceWindow, Parts, Place, prepare};
pub(crate) use run::Passage;
pub use way::Way;

/// Staging buffers of a rank: with four, a rank may be a segment ahead of another before it waits. Fewer do
/// not suffice for the protocol. More: more memory.
const BUFFERS: usize = 4;

/// The settings of a window; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowOptions {
    /// Bytes of each of a rank's four staging buffers on the device, which is what a segment stages; by default 64
    /// MiB, and less on a device with little memory or many ranks. Larger: more device memory. Smaller: more segments,
    /// each with its rounds.
    pub buffer: Option<usize>,
    /// The same of those on the host. Larger: staging, folding and collecting of a call overlap less. Smaller: more
    /// rounds.
    pub host_buffer: usize,
    /// The way that all calls go, if it is there; by default the one that costs least.
    pub way: Option<Way>,
    /// Whether copies on the device are made by a kernel, not by what the driver has for it.
    pub copies_by_kernel: bool,
    /// By which algorithms and ways are chosen; by default as they are measured when the group forms.
    pub costs: Option<DeviceCosts>,
}

impl Default for WindowOptions {
    fn default() -> WindowOptions {
        let (host_buffer, copies_by_kernel) = (8 << 20, false);
        WindowOptions { buffer: None, host_buffer, way: None, copies_by_kernel, costs: None }
    }
}

impl WindowOptions {
    /// The largest buffer that is taken unless one is asked for: gradients of a bucket, or a few, are one segment.
    const LARGEST_BUFFER: usize = 64 << 20;

    /// The smallest.
    const SMALLEST_BUFFER: usize = 4 << 20;

    /// Bytes of a staging buffer on devices with so much memory, if all ranks shared one of them: their buffers take
    /// a thirty-second of it at most.
    fn usual_buffer(memory: u64, world: usize) -> usize {
        let share = memory / 32 / (world.max(1) * BUFFERS) as u64;
        (share as usize).clamp(Self::SMALLEST_BUFFER, Self::LARGEST_BUFFER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_as_large_as_memory_allows() {
        let buffer = |gib: u64, world| WindowOptions::usual_buffer(gib << 30, world) >> 20;
        assert_eq!(buffer(140, 2), 64);
        assert_eq!(buffer(16, 4), 32);
        assert_eq!(buffer(16, 256), 4);
    }
}
