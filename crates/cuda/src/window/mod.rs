//! The device window: collectives through device memory that all ranks of a group can reach.
//!
//! The ranks share a GPU, or have GPUs that reach each other's memory. Each owns *staging* memory on its
//! device, which the others have opened, and the ranks do what the [window
//! schedules](unisono_collective::schedule) of the host say: a rank stages what others will fold, folds its
//! own part straight from the caller's memory and the others' staging, writes the result to the caller's
//! memory and to its staging in one pass, and collects what the others folded. For little data it stages
//! everything and folds everything for itself, which saves a round ([`DeviceCosts`] says when). A call that
//! is larger than the staging goes through it in segments.
//!
//! **Order.** All work of a rank is in one stream, and the [clocks](unisono_collective::engine::clock) of the
//! host's window order the ranks, with one difference: a rank's clock ticks when the device has *done* the
//! work before the tick, not when it was submitted. So the rank records an event of its own with the work,
//! goes on to submit what it may, and publishes the tick when it finds that the event has happened. What a
//! peer has published can be read, by whatever a rank submits then. As the stream keeps its order, a tick
//! also says that everything before it was done: that the rank has finished reading what it read.
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
mod measure;
mod opening;
mod run;

use std::sync::Arc;

use unisono_collective::engine::{Engine, MakeEngine};

use crate::device::Device;
use crate::error::CudaError;

pub use cost::DeviceCosts;

/// Staging buffers of a rank: with four, a rank may be a segment ahead of another before it waits. Fewer do
/// not suffice for the protocol. More: more memory.
const BUFFERS: usize = 4;

/// How the device window works. Equal on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowOptions {
    /// Bytes of each of a rank's four staging buffers, which is what a segment stages. Larger: more device memory.
    /// Smaller: more segments, each with its rounds.
    pub buffer: usize,
    /// By which algorithms are chosen; by default typical ones, with rounds as they are measured when the group
    /// forms.
    pub costs: Option<DeviceCosts>,
}

impl Default for WindowOptions {
    fn default() -> WindowOptions {
        WindowOptions { buffer: 32 << 20, costs: None }
    }
}

/// An engine for calls on host memory and on memory of a device, which each rank names when the group forms.
/// To be given to [`Group::with_engine`](unisono_collective::Group::with_engine) by all ranks.
///
/// If a rank has no device, or its device does not reach the others', the group does not form: all ranks get
/// [`FormError::Device`](unisono_collective::FormError::Device).
pub fn engine(
    device: impl Fn() -> Result<Device, CudaError> + Send + Sync + 'static,
    options: WindowOptions,
) -> Arc<MakeEngine> {
    Arc::new(move |host| {
        let window = engine::DeviceWindow::open(host, &device, options)?;
        Ok(Box::new(window) as Box<dyn Engine>)
    })
}
