//! The connections of a group.
//!
//! A group forms with control connections to its [neighbours](crate::control::overlay) and, among the
//! ranks of a host, one piece of shared memory. All other connections are opened when they are first
//! needed ([`Network`]). [`Endpoint`] is for ranks that are processes, [`LocalHub`] for ranks that are
//! threads of one.

mod cores;
mod endpoint;
mod forming;
#[doc(hidden)]
pub mod gathering;
mod inbox;
mod local;
mod network;
mod process;
mod staging;

use std::sync::Arc;

use unisono_net::{Connection, Purpose};

use crate::error::FormError;
use crate::options::Options;
use crate::schedule::Topology;
use crate::state::Epoch;
use crate::window::region::{MAX_BUFFERS, Region};
use unisono_net::rank::Rank;

pub use cores::{CoreSet, Cores};
pub use endpoint::{Address, Endpoint, HostId};
pub use local::LocalHub;
pub use network::{Arrival, Arrivals, Network, Opening, Use};
pub use staging::available_memory;
pub(crate) use staging::staging_buffer;

/// Connections that carry messages of collectives.
pub const DATA: Purpose = Purpose::new(*b"data");

/// Connections that carry heartbeats and news.
pub const CONTROL: Purpose = Purpose::new(*b"ctrl");

/// Connections that carry messages with tags.
pub const MESSAGES: Purpose = Purpose::new(*b"tags");

/// Connections over which a rank gets the shared memory of its host.
pub const MEMORY: Purpose = Purpose::new(*b"mmry");

/// What a group is made of.
pub struct Fabric {
    /// Which ranks share memory.
    pub topology: Topology,
    /// The control connections to the neighbours.
    pub control: Vec<(usize, Connection)>,
    /// The staging memory of the ranks of this host, in rank order, if there is more than one.
    pub regions: Vec<Region>,
    /// How the ranks of this host share the cores that they may use.
    pub cores: Cores,
    /// Opens all other connections.
    pub network: Arc<dyn Network>,
}

/// A group that is to form.
#[derive(Clone, Debug)]
pub struct GroupSetup {
    /// Its number, equal on all members and different from all other groups of the epoch.
    pub id: u64,
    /// The epoch it belongs to.
    pub epoch: u64,
    /// The members' ranks in the job, in the order of their ranks in the group.
    pub members: Vec<Rank>,
    /// This rank's place among the members.
    pub me: usize,
    /// The settings, equal on all members.
    pub options: Options,
}

impl GroupSetup {
    /// All ranks of a job.
    pub(crate) fn of_world(epoch: &Epoch, me: usize, world: usize, options: Options) -> GroupSetup {
        GroupSetup { id: 0, epoch: epoch.number(), members: Rank::all(world), me, options }
    }
}

/// Makes the connections of groups.
pub trait Connector: Send + Sync {
    /// Connects this rank to the other members.
    fn connect(self: Arc<Self>, setup: &GroupSetup) -> Result<Fabric, FormError>;

    /// Whether all members are known to be on one machine, whatever their transport: then none of them is far from another.
    /// Equal on all of them.
    fn is_one_machine(&self, setup: &GroupSetup) -> bool {
        let _ = setup;
        false
    }

    /// Ends the attempts of this rank to form groups, now and from now on: its epoch is over.
    fn abandon(&self) {}
}

/// Staging buffers per rank: with five, a rank may be two segments ahead of another before it
/// waits. Fewer: more waiting. More: more cache.
pub const STAGING_BUFFERS: usize = MAX_BUFFERS;

fn system(what: &'static str) -> impl Fn(std::io::Error) -> FormError {
    move |e| FormError::System { what, reason: e.to_string() }
}
