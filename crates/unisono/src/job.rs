//! Joining the job that this process was started for.

use std::sync::Arc;

use unisono_cluster::membership;
use unisono_cluster::place::{Launcher, Place, PlaceError};
use unisono_cluster::rendezvous::{self, RendezvousError};
use unisono_cluster::variables;
use unisono_collective::engine::MakeEngine;
use unisono_collective::fabric::{Address, Endpoint};
use unisono_collective::{BadSetting, Epoch, FormError, Group, Options};
use unisono_net::descriptors;
use unisono_net::interface::{InterfaceError, own_address};

/// How many timeouts a rank waits for the others to be started. Starting a process can take far
/// longer than answering a heartbeat.
pub(crate) const START_PATIENCE: u32 = 6;

/// A process's membership in a job.
pub struct Job {
    place: Place,
    ip: std::net::IpAddr,
    epoch: Arc<Epoch>,
    world: Group,
}

impl Job {
    /// Joins with the settings of the environment.
    pub fn join() -> Result<Job, JoinError> {
        Job::join_with(Options::from_env()?)
    }

    /// Joins with these settings, which must be equal on all ranks.
    pub fn join_with(options: Options) -> Result<Job, JoinError> {
        Job::join_with_engine(options, Arc::new(|host| Ok(Box::new(host) as Box<_>)))
    }

    /// As [`Job::join_with`], with an engine for memory that the host's does not reach, such as that of a
    /// device. All ranks join with the same one.
    pub fn join_with_engine(
        options: Options,
        make_engine: Arc<MakeEngine>,
    ) -> Result<Job, JoinError> {
        if std::env::var_os(membership::VARIABLE).is_some() {
            return Err(JoinError::Elastic);
        }
        let place = Place::from_env()?;
        // One rank of a job says it, and not if its launcher has.
        if place.rank == 0 && place.launcher != Launcher::Unisono {
            variables::complaints().iter().for_each(|complaint| log::warn!("{complaint}"));
        }
        ensure_descriptors(place.world)?;
        let deadline = options.deadline(START_PATIENCE);
        let session = rendezvous::connect(&place, options.encrypt, deadline)?;
        let ip = own_address(session.local_ip())?;
        let listening = |e: std::io::Error| JoinError::Listen { ip, cause: e };
        let endpoint = Endpoint::bind(ip).map_err(listening)?;
        let blob = postcard::to_stdvec(endpoint.address()).expect("an address always encodes");
        let gathered = session.exchange(&blob)?;
        let mut roster = Vec::with_capacity(gathered.blobs.len());
        for (rank, blob) in gathered.blobs.iter().enumerate() {
            let address: Result<Address, _> = postcard::from_bytes(blob);
            roster.push(address.map_err(|_| JoinError::Roster { rank })?);
        }
        let (rank, world) = (place.rank as usize, place.world as usize);
        let connector = endpoint.open(rank, gathered.token, roster).map_err(listening)?;
        let epoch = Epoch::new(0);
        let world =
            Group::with_engine(connector, epoch.clone(), rank, world, options, make_engine)?;
        log::debug!("rank {rank} joined a world of {}", world.size());
        Ok(Job { place, ip, epoch, world })
    }

    /// All ranks of the job.
    pub fn world(&self) -> &Group {
        &self.world
    }

    pub(crate) fn into_world(self) -> Group {
        self.world
    }

    /// Where this process stands.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The address on which this process meets the others.
    pub fn ip(&self) -> std::net::IpAddr {
        self.ip
    }

    /// Ends the epoch: all groups of this process stop working, here and, as their ranks notice,
    /// everywhere.
    pub fn end_epoch(&self) {
        self.epoch.end();
    }
}

/// Makes sure that a rank may have the connections of some groups of a world of this size and, where the
/// system allows it, links to all other ranks.
fn ensure_descriptors(world: u32) -> Result<(), FormError> {
    // What a rank cannot do without; it may still fail later where a program makes many groups.
    let groups = 128 + 32 * u64::from(world.max(1).ilog2());
    let all = groups + 4 * u64::from(world);
    descriptors::ensure(all).or_else(|_| descriptors::ensure(groups)).map_err(|error| {
        FormError::System { what: "raising the limit of open files", reason: error.to_string() }
    })
}

/// Why a process could not join its job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// A setting in the environment makes no sense. Fix it.
    #[error(transparent)]
    Setting(#[from] BadSetting),
    /// The launcher lets ranks come and go, and this program expects all of them all the time. Start it
    /// without `--elastic`, or use `unisono::candle::ElasticReplica` or `unisono::elastic::ElasticJob`.
    #[error(
        "this program does not know elastic jobs: start it without --elastic, or join the job by \
         ElasticReplica or ElasticJob instead of Job::join (UNISONO_MEMBERSHIP is set)"
    )]
    Elastic,
    /// The environment does not say where this process belongs. Fix how it is started.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The network interface does not exist. Fix `UNISONO_INTERFACE`.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The ranks did not find each other. Start the job again.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A rank's address cannot be read: it runs another version.
    #[error("the address of rank {rank} cannot be read; does it run another version of Unisono?")]
    Roster {
        /// Whose.
        rank: usize,
    },
    /// No port could be opened.
    #[error("cannot listen on {ip}: {cause}")]
    Listen {
        /// Where.
        ip: std::net::IpAddr,
        /// What the system said.
        #[source]
        cause: std::io::Error,
    },
    /// The ranks found each other but could not form the world.
    #[error(transparent)]
    Form(#[from] FormError),
}
