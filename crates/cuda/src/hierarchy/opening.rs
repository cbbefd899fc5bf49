//! How the ranks of a group come to have a hierarchy.
//!
//! They open a window on each host, connect the flat engine, and find a way between counterparts. Each of these is there on
//! all ranks or on none. Without windows there is no hierarchy; without NCCL there is another way.

use unisono_collective::engine::HostEngine;
use unisono_collective::schedule::{self, Problem};
use unisono_collective::{Algorithm, FormError, Op, Rank};

use super::mirror::Mirror;
use super::price::blocks;
use super::{Between, Flat, Hierarchy, suits};
use crate::agreement::{self, Reason};
use crate::bounce::{self, Bounce};
use crate::choice::{Complete, DeviceOptions};
use crate::context::Context;
use crate::nccl::{self, NcclEngine};
use crate::window::{self, Place};

/// Whom NCCL may take, as far as the ranks know before they ask it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chances {
    /// All ranks in one communicator.
    pub all: bool,
    /// Counterparts in one of their own.
    pub counterparts: bool,
}

/// Opens a hierarchy, on all ranks or on none. The host's engine stays with the caller until then.
pub fn prepare(
    host: &mut HostEngine,
    context: &Context,
    options: &DeviceOptions,
    chances: Chances,
) -> Result<Complete, FormError> {
    let topology = host.topology().clone();
    if !suits(&topology) {
        let reason = "a hierarchy needs several hosts, some with several ranks, and each with ranks that are a part \
                      of the canonical tree, such as a power of two of neighbours"
            .to_owned();
        return Err(FormError::Device { rank: Rank(0), reason });
    }
    let window = window::prepare(host, context, Place::EachHost, &options.window)?;
    let device = || Ok(context.device().clone());
    let counterparts = topology.counterparts(host.rank());
    if chances.all {
        let connected = nccl::connect(host, &device, &options.nccl);
        if let Some(mut connected) = unless_refused("nccl between all ranks", connected)? {
            let costs = nccl::price(host, &mut connected.lane, &options.nccl, &counterparts)?;
            return Ok(Box::new(move |host| {
                let flat = Flat::Nccl(Box::new(NcclEngine::new(host, connected)));
                Box::new(Hierarchy::new(window, Between::Flat(costs), flat))
            }));
        }
    }
    let flat = bounce::prepare(host, context, options.bounce)?;
    let connected = match chances.counterparts {
        true => {
            let connected = nccl::connect_with(host, &device, &options.nccl, &counterparts);
            unless_refused("nccl between hosts", connected)?
        }
        false => None,
    };
    let between = match connected {
        Some(connected) => Between::Nccl(Box::new(connected.lane), connected.costs),
        None => Between::Host(mirror(host, context, options)?),
    };
    Ok(Box::new(move |host| {
        let flat = Flat::Bounce(Box::new(Bounce::new(host, flat)));
        Box::new(Hierarchy::new(window, between, flat))
    }))
}

/// What opened, if it did. All ranks have the reason why it did not.
fn unless_refused<T>(what: &str, opened: Result<T, FormError>) -> Result<Option<T>, FormError> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(FormError::Device { rank, reason }) => {
            log::info!("a hierarchy without {what}, for rank {rank} cannot: {reason}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Makes the mirror of this rank, on all ranks or on none.
fn mirror(
    host: &mut HostEngine,
    context: &Context,
    options: &DeviceOptions,
) -> Result<Mirror, FormError> {
    let world = host.topology().world();
    let ops = [Op::AllReduce, Op::ReduceScatter, Op::AllGather];
    let cells = ops.into_iter().filter_map(|op| {
        let problem = Problem { op, rank: 0, world };
        let schedule = schedule::build(Algorithm::Hierarchical, &problem, host.topology())?;
        Some(Mirror::cells(blocks(&schedule, op, world), schedule.cells as usize))
    });
    // As much pinned memory as calls have that bounce.
    let made = Mirror::new(context, 4 * options.bounce.chunk, cells.max().unwrap_or(1));
    let (mirror, said) = match made.map_err(Reason::from) {
        Ok(mirror) => (Some(mirror), Ok([])),
        Err(reason) => (None, Err(reason)),
    };
    agreement::tell(host, said)?.map_err(FormError::from)?;
    Ok(mirror.expect("all ranks have one"))
}
