//! The connections of a group: made once when it forms, owned by it alone.

mod cores;
mod endpoint;
#[doc(hidden)]
pub mod gathering;
mod local;
mod ready;
mod staging;

use std::sync::Arc;

use unisono_net::{Connection, Purpose};

use crate::error::FormError;
use crate::options::Options;
use crate::schedule::Topology;
use crate::window::region::{MAX_BUFFERS, Region};

pub use cores::CoreSet;
pub use endpoint::{Address, Endpoint, HostId};
pub use local::LocalHub;
#[doc(hidden)]
pub use ready::receive as receive_ready;
pub use staging::available_memory;
pub(crate) use staging::staging_buffer;

/// Connections that carry messages of collectives.
pub const DATA: Purpose = Purpose::new(*b"data");

/// Connections that carry heartbeats, aborts and messages with tags beside the data.
pub const CONTROL: Purpose = Purpose::new(*b"ctrl");

/// What a group is made of.
pub struct Fabric {
    /// Which ranks share memory.
    pub topology: Topology,
    /// The side channel to every other rank.
    pub side: Vec<Option<Connection>>,
    /// The streams to every other rank.
    pub data: Vec<Vec<Connection>>,
    /// The staging memory of the ranks of this host, in rank order, if there is more than one.
    pub regions: Vec<Region>,
    /// Ranks of this host per core that they may use, at least 1: above, they take turns.
    pub crowd: f64,
}

/// A group that is to form.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its number, equal on all members and different from all other groups of the epoch.
    pub id: u64,
    /// The epoch it belongs to.
    pub epoch: u64,
    /// The members' ranks in the job, in the order of their ranks in the group.
    pub members: Vec<usize>,
    /// This rank's place among the members.
    pub me: usize,
    /// The settings, equal on all members.
    pub options: Options,
}

/// Makes the connections of groups.
pub trait Connector: Send + Sync {
    /// Connects this rank to the other members.
    fn connect(self: Arc<Self>, plan: &Plan) -> Result<Fabric, FormError>;
}

/// Staging buffers per rank: with five, a rank may be two segments ahead of another before it
/// waits. Fewer: more waiting. More: more cache.
pub const STAGING_BUFFERS: usize = MAX_BUFFERS;

fn system(what: &'static str) -> impl Fn(std::io::Error) -> FormError {
    move |e| FormError::System { what, reason: e.to_string() }
}
