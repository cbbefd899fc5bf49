//! How the ranks of a group come to share device memory.
//!
//! Every rank allocates its staging memory and *offers* it: it tells all others on which device it is, and
//! the handle by which another process opens it. Then each opens what the others offer, and all tell each
//! other how that went. A rank that cannot, in either step, says why, and all ranks end with its reason: none
//! is left with a group that the others do not have.
//!
//! Ranks that are threads of one process have the memory already: the driver opens a handle in other
//! processes only.

use unisono_collective::engine::HostEngine;
use unisono_collective::{Error, Rank, Request};

use crate::agreement::{self, Reason, Refused};
use crate::context::Context;
use crate::device::{Device, Uuid};
use crate::error::CudaError;
use crate::library::DevicePtr;
use crate::memory::{DeviceMemory, ImportedMemory, MemoryHandle};

/// Bytes of an [`Offer`] as it travels.
const OFFER: usize = 8 + 16 + 8 + 8 + 64 + 16;

/// The driver gives away memory in pieces of this size, and handles are of whole pieces.
const PIECE: usize = 2 << 20;

/// The staging memory of all members.
pub struct Shared {
    /// Where the others' is in this process; this rank's own in its place.
    pub addresses: Vec<DevicePtr>,
    /// What was opened. It is closed before the own memory is freed.
    pub opened: Vec<ImportedMemory>,
    own: DeviceMemory,
}

/// What a rank tells the others of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offer {
    rank: Rank,
    process: Process,
    device: Uuid,
    address: DevicePtr,
    handle: MemoryHandle,
}

/// What tells a process from the others of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    /// Its number in its namespace.
    number: u64,
    namespace: [u8; 16],
}

/// Shares `bytes` of staging memory for each rank with the `members` of its window; all ranks of the group have it, or
/// none has.
pub fn share(
    host: &mut HostEngine,
    context: &Context,
    bytes: usize,
    members: &[usize],
) -> Result<Result<Shared, Refused>, Error> {
    let offer = |own: &DeviceMemory| {
        Ok::<_, Reason>(Offer {
            rank: host.state().job_rank(),
            process: Process::current(),
            device: context.device().uuid()?,
            address: own.pointer(),
            // Alone there is no rank to open it, and not every device has handles.
            handle: if members.len() > 1 { own.handle()? } else { MemoryHandle([0; 64]) },
        })
    };
    let own = DeviceMemory::new(context, bytes.next_multiple_of(PIECE)).map_err(Reason::from);
    let (own, offer) = match own.and_then(|own| Ok((offer(&own)?, own))) {
        Ok((offer, own)) => (Some(own), Ok(offer)),
        Err(reason) => (None, Err(reason)),
    };
    let offers = match agreement::tell(host, offer.map(Offer::to_bytes))? {
        Ok(offers) => offers,
        Err(refused) => return Ok(Err(refused)),
    };
    let offers: Vec<Offer> = members.iter().map(|&rank| Offer::from_bytes(&offers[rank])).collect();
    let me = place(host, members);
    let own = own.expect("all ranks have an offer");

    let (addresses, opened, outcome) = open(context, me, &offers);
    match agreement::tell(host, outcome.map(|()| [0; 0]))? {
        Ok(_) => Ok(Ok(Shared { addresses, opened, own })),
        Err(refused) => {
            // No rank frees what another one has open.
            drop(opened);
            host.run_unnumbered(Request::barrier())?;
            drop(own);
            Ok(Err(refused))
        }
    }
}

/// This rank's number among the members of its window.
pub fn place(host: &HostEngine, members: &[usize]) -> usize {
    let place = members.iter().position(|&member| member == host.rank());
    place.expect("a rank is a member of its own window")
}

impl Shared {
    /// Bytes of each rank's.
    pub fn bytes(&self) -> usize {
        self.own.bytes()
    }
}

/// Opens what the others offer; as much as was opened where that fails.
fn open(
    context: &Context,
    me: usize,
    offers: &[Offer],
) -> (Vec<DevicePtr>, Vec<ImportedMemory>, Result<(), Reason>) {
    let (mut addresses, mut opened) = (Vec::new(), Vec::new());
    for (rank, offer) in offers.iter().enumerate() {
        let address = if rank == me {
            Ok(offer.address)
        } else {
            reach(context, &offers[me], offer).and_then(|is_here| {
                if is_here {
                    return Ok(offer.address);
                }
                let memory = ImportedMemory::open(context, offer.handle)?;
                let address = memory.pointer();
                opened.push(memory);
                Ok(address)
            })
        };
        match address {
            Ok(address) => addresses.push(address),
            Err(Reason(reason)) => {
                let reason = Reason(format!("opening the memory of rank {}: {reason}", offer.rank));
                return (addresses, opened, Err(reason));
            }
        }
    }
    (addresses, opened, Ok(()))
}

/// Lets kernels of this rank reach the device of another; whether its memory is this process's own.
fn reach(context: &Context, own: &Offer, other: &Offer) -> Result<bool, Reason> {
    let is_here = own.process == other.process;
    if own.device == other.device {
        return Ok(is_here);
    }
    let driver = context.device().driver();
    let device = (0..driver.device_count())
        .map(|number| driver.device(number))
        .find(|device| has_uuid(device, other.device))
        .ok_or_else(|| {
            Reason(format!("this process does not see its device, {}", other.device))
        })??;
    if !context.device().can_access(&device)? {
        return Err(Reason(format!("device {} cannot reach {}", own.device, other.device)));
    }
    if is_here {
        context.enable_peer(&Context::new(&device)?)?;
    }
    Ok(is_here)
}

fn has_uuid(device: &Result<Device, CudaError>, uuid: Uuid) -> bool {
    device.as_ref().is_ok_and(|device| device.uuid() == Ok(uuid))
}

impl Offer {
    fn to_bytes(self) -> [u8; OFFER] {
        let Offer { rank, process, device, address, handle } = self;
        let mut bytes = [0; OFFER];
        let parts: [&[u8]; 6] = [
            &(rank.0 as u64).to_le_bytes(),
            &device.0,
            &process.number.to_le_bytes(),
            &address.0.to_le_bytes(),
            &handle.0,
            &process.namespace,
        ];
        let mut rest = &mut bytes[..];
        for part in parts {
            let (here, after) = rest.split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = after;
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; OFFER]) -> Offer {
        let mut rest = &bytes[..];
        let mut take = |length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            part
        };
        let number = |part: &[u8]| u64::from_le_bytes(part.try_into().expect("eight bytes"));
        let rank = Rank(number(take(8)) as usize);
        let device = Uuid(take(16).try_into().expect("taken as long"));
        let process = number(take(8));
        let address = DevicePtr(number(take(8)));
        let handle = MemoryHandle(take(64).try_into().expect("taken as long"));
        let namespace = take(16).try_into().expect("taken as long");
        Offer { rank, process: Process { number: process, namespace }, device, address, handle }
    }
}

impl Process {
    /// This process. In different namespaces, different processes have the same number.
    fn current() -> Process {
        let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let mut namespace = [0; 16];
        let digits =
            link.as_os_str().as_encoded_bytes().iter().filter(|byte| byte.is_ascii_digit());
        namespace.iter_mut().zip(digits).for_each(|(into, digit)| *into = *digit);
        Process { number: u64::from(std::process::id()), namespace }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_survives_the_journey() {
        let mut handle = [0; 64];
        handle.iter_mut().zip(1..).for_each(|(byte, i)| *byte = i);
        let offer = Offer {
            rank: Rank(70_000),
            process: Process::current(),
            device: Uuid(*b"0123456789abcdef"),
            address: DevicePtr(0x7f00_1234_5678_9abc),
            handle: MemoryHandle(handle),
        };
        assert_eq!(Offer::from_bytes(&offer.to_bytes()), offer);
    }
}
