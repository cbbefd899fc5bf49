//! How the ranks of a group come to have a communicator.
//!
//! Every rank prepares what it needs of its own device, loads NCCL, and *offers* what the others must know of it;
//! the first one also offers the name under which NCCL finds the others. Then all form the communicator, and tell
//! each other how that went. A rank that cannot, in either step, says why, and all ranks end with its
//! reason.

use std::ffi::OsStr;
use std::time::Instant;

use unisono_collective::engine::HostEngine;
use unisono_collective::{FormError, Rank};

use super::communicator::Communicator;
use super::error::{NcclError, NcclVersion};
use super::library::{INVALID_USAGE, Nccl, UniqueId};
use super::run::{Lane, Parts};
use crate::agreement::{self, Reason};
use crate::context::Context;
use crate::device::{Device, Uuid};
use crate::error::CudaError;
use crate::order::Order;

/// Bytes of an [`Offer`] as it travels.
const OFFER: usize = 8 + 4 + 16 + 128;

/// Timeouts of the group that NCCL has to form a communicator: it looks for the networks of the host, and
/// connects to all ranks. Longer: a rank whose NCCL failed is told later, if the others' have not noticed. Shorter:
/// a large job may not form.
const PATIENCE: u32 = 6;

impl From<NcclError> for Reason {
    fn from(error: NcclError) -> Reason {
        Reason(error.to_string())
    }
}

/// What a rank tells the others of itself.
#[derive(Clone, Copy)]
struct Offer {
    rank: Rank,
    version: u32,
    device: Uuid,
    id: UniqueId,
}

/// Connects this rank with the other `members` of its communicator, all ranks or some. A rank that has none has no members.
/// Where one of the group cannot take part, all ranks fail.
pub fn open(
    host: &mut HostEngine,
    device: &dyn Fn() -> Result<Device, CudaError>,
    library: Option<&OsStr>,
    scratch: usize,
    members: &[usize],
) -> Result<(Lane, Order), FormError> {
    let rank = host.rank();
    let prepared = prepare(host, device, library, scratch, members);
    let (offer, kept) = match prepared {
        Ok((offer, kept)) => (Ok(offer.to_bytes()), Some(kept)),
        Err(reason) => (Err(reason), None),
    };
    let offers = agreement::tell(host, offer)?.map_err(FormError::from)?;
    let offers: Vec<Offer> = offers.iter().map(Offer::from_bytes).collect();
    let (context, nccl, parts, order) = kept.expect("all ranks have an offer");

    let mut loaded = offers.iter().filter(|offer| offer.version != 0);
    let Some(first) = loaded.next() else {
        return Ok((Lane::new(parts, None, host, members), order));
    };
    if let Some(other) = loaded.find(|offer| offer.version != first.version) {
        let [one, two] = [first, other].map(|offer| NcclVersion::of_code(offer.version as i32));
        let reason = format!("it has NCCL {two}, and rank {} has {one}", first.rank);
        return Err(FormError::Device { rank: other.rank, reason });
    }
    let deadline = host.options().deadline(PATIENCE);
    let seconds = host.options().timeout.saturating_mul(PATIENCE).as_secs();
    let state = host.state().clone();
    let go_on = || {
        let stop = Instant::now() > deadline || state.is_over();
        if stop { Err(NcclError::Slow { seconds }) } else { Ok(()) }
    };
    let form = |nccl: &Nccl| {
        let _entered = context.enter()?;
        let place = members.iter().position(|member| *member == rank);
        let place = place.expect("a rank is a member of its own communicator");
        let offers: Vec<Offer> = members.iter().map(|member| offers[*member]).collect();
        Communicator::form(nccl, offers[0].id, place, members.len(), go_on)
            .map_err(|error| refusal(error, nccl.version(), &offers))
    };
    let (outcome, communicator) = match nccl.as_ref().map(form).transpose() {
        Ok(communicator) => (Ok([0; 0]), communicator),
        Err(reason) => (Err(reason), None),
    };
    agreement::tell(host, outcome)?.map_err(FormError::from)?;
    if let Some(nccl) = nccl {
        log::debug!("rank {rank}: NCCL {} of {}", nccl.version(), nccl.library());
    }
    Ok((Lane::new(parts, communicator, host, members), order))
}

type Kept = (Context, Option<Nccl>, Parts, Order);

/// What a rank does by itself. One that is alone needs no NCCL.
fn prepare(
    host: &HostEngine,
    device: &dyn Fn() -> Result<Device, CudaError>,
    library: Option<&OsStr>,
    scratch: usize,
    members: &[usize],
) -> Result<(Offer, Kept), Reason> {
    let context = Context::new(&device()?)?;
    let nccl = if members.len() > 1 { Some(Nccl::load(library)?) } else { None };
    let parts = Parts::new(&context, if host.topology().world() > 1 { scratch } else { 0 })?;
    let order = Order::new(&context)?;
    let id = match &nccl {
        Some(nccl) if host.rank() == members[0] => {
            let _entered = context.enter()?;
            Communicator::unique_id(nccl)?
        }
        _ => UniqueId([0; 128]),
    };
    let offer = Offer {
        rank: host.state().job_rank(),
        version: nccl.as_ref().map_or(0, |nccl| nccl.version().code()),
        device: context.device().uuid()?,
        id,
    };
    Ok((offer, (context, nccl, parts, order)))
}

/// Why NCCL does not form a communicator, with what to do about the commonest reason.
fn refusal(error: NcclError, version: NcclVersion, offers: &[Offer]) -> Reason {
    let shared = offers.iter().enumerate().find_map(|(i, offer)| {
        let twin = offers[..i].iter().find(|other| other.device == offer.device)?;
        Some((twin.rank, offer.rank, offer.device))
    });
    let NcclError::Call { code: INVALID_USAGE, .. } = error else { return error.into() };
    let Some((one, two, device)) = shared else { return error.into() };
    let remedy = if version < (NcclVersion { major: 2, minor: 30, patch: 0 }) {
        "give each rank an NCCL_HOSTID of its own"
    } else {
        "set NCCL_MULTI_RANK_GPU_ENABLE=1"
    };
    Reason(format!(
        "NCCL {version} refuses several ranks on one GPU, and ranks {one} and {two} have {device}; {remedy} before \
         the group forms, or use another engine; {error}"
    ))
}

impl Offer {
    fn to_bytes(self) -> [u8; OFFER] {
        let mut bytes = [0; OFFER];
        let (rank, rest) = bytes.split_at_mut(8);
        let (version, rest) = rest.split_at_mut(4);
        let (device, id) = rest.split_at_mut(16);
        rank.copy_from_slice(&(self.rank.0 as u64).to_le_bytes());
        version.copy_from_slice(&self.version.to_le_bytes());
        device.copy_from_slice(&self.device.0);
        id.copy_from_slice(&self.id.0);
        bytes
    }

    fn from_bytes(bytes: &[u8; OFFER]) -> Offer {
        let (rank, rest) = bytes.split_at(8);
        let (version, rest) = rest.split_at(4);
        let (device, id) = rest.split_at(16);
        Offer {
            rank: Rank(u64::from_le_bytes(rank.try_into().expect("eight bytes")) as usize),
            version: u32::from_le_bytes(version.try_into().expect("four bytes")),
            device: Uuid(device.try_into().expect("sixteen bytes")),
            id: UniqueId(id.try_into().expect("what is left")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_survives_the_journey() {
        let mut id = [0; 128];
        id.iter_mut().zip(1..).for_each(|(byte, i)| *byte = i);
        let (rank, device) = (Rank(70_000), Uuid(*b"0123456789abcdef"));
        let offer = Offer { rank, version: 22_809, device, id: UniqueId(id) };
        let found = Offer::from_bytes(&offer.to_bytes());
        assert_eq!((found.rank, found.version, found.device), (rank, 22_809, device));
        assert_eq!(found.id.0, id);
    }
}
