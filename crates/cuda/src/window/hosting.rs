//! Staging in host memory: one piece that all ranks of the host map, and that each registers with its driver.
//!
//! The first rank makes it, the others take it as they took the memory of the host's own window: its descriptor
//! travels over a Unix socket, and it is sealed, so that no access can fail. Each rank then registers it,
//! from when on its device copies from and to it at the speed of the bus, and its kernels reach it.

use std::sync::Arc;

use unisono_collective::Error;
use unisono_collective::engine::{HostEngine, SharedMemory};

use super::BUFFERS;
use crate::agreement::{self, Reason, Refused};
use crate::context::Context;
use crate::library::DevicePtr;
use crate::memory::{DeviceMemory, RegisteredMemory};

/// Fetched segments that the device holds at a time: one is folded while the next is fetched. More: more device
/// memory. Fewer: fetching waits for folding.
pub const SLOTS: usize = 2;

/// The staging memory of all ranks, on the host.
pub struct HostStaging {
    /// Where each rank's is for the device.
    pub addresses: Vec<DevicePtr>,
    /// Where each rank's is for the processor.
    pub pointers: Vec<*mut u8>,
    /// Bytes of a staging buffer.
    pub buffer: usize,
    /// Room on the device for [`SLOTS`] segments that are folded there.
    pub fetched: DeviceMemory,
    /// Dropped before what it registers.
    _registered: RegisteredMemory,
    _memory: Arc<SharedMemory>,
}

// SAFETY: the pointers are of shared memory that it owns, whose accesses the clocks order.
unsafe impl Send for HostStaging {}

/// Shares staging buffers of so many bytes for each rank; all ranks have them, or none has.
pub fn share(
    host: &mut HostEngine,
    context: &Context,
    buffer: usize,
) -> Result<Result<HostStaging, Refused>, Error> {
    let (me, world) = (host.rank(), host.topology().world());
    let (each, first) = (BUFFERS * buffer, 0);
    let bytes = each * world;
    let made = (me == first).then(|| host.offer_memory(bytes).map_err(Reason)).transpose();
    let (made, outcome) = match made {
        Ok(made) => (made, Ok([])),
        Err(reason) => (None, Err(reason)),
    };
    if let Err(refused) = agreement::tell(host, outcome)? {
        return Ok(Err(refused));
    }
    let opened = match made {
        Some(memory) => Ok(memory),
        None => host.take_memory(first, bytes).map_err(Reason),
    };
    let opened = opened.and_then(|memory| open(context, memory, world, buffer));
    let (opened, outcome) = match opened {
        Ok(opened) => (Some(opened), Ok([])),
        Err(reason) => (None, Err(reason)),
    };
    let agreed = agreement::tell(host, outcome)?;
    host.withdraw_memory();
    Ok(agreed.map(|_| opened.expect("all ranks have opened it")))
}

/// Registers the memory and finds each rank's part.
fn open(
    context: &Context,
    memory: Arc<SharedMemory>,
    world: usize,
    buffer: usize,
) -> Result<HostStaging, Reason> {
    let each = BUFFERS * buffer;
    // SAFETY: the mapping lives as long as the registration, which is dropped first.
    let registered = unsafe { RegisteredMemory::new(context, memory.as_ptr(), each * world)? };
    let start = registered.device_pointer()?;
    let addresses = (0..world).map(|rank| start.offset(rank * each)).collect();
    let pointers = (0..world).map(|rank| memory.as_ptr().wrapping_add(rank * each)).collect();
    let fetched = DeviceMemory::new(context, SLOTS * buffer)?;
    let (_registered, _memory) = (registered, memory);
    Ok(HostStaging { addresses, pointers, buffer, fetched, _registered, _memory })
}
