//! A job whose workers may come and go: one group after the other.
//!
//! A worker [connects](ElasticJob::join) to the coordinator of its job, builds its model, and
//! [enters](ElasticJob::enter) an epoch, with a group of its own. When a worker is lost, the group fails, and
//! the others enter the next one. So a worker's life is a loop:
//!
//! ```no_run
//! # use unisono::elastic::ElasticJob;
//! # use unisono::{Error, Group, Options};
//! # fn train(group: &Group) -> Result<Vec<u8>, Error> { group.barrier().map(|()| Vec::new()) }
//! let mut job = ElasticJob::join(Options::from_env()?)?.expect("started by an elastic launcher");
//! while let Some(group) = job.enter()? {
//!     match train(&group) {
//!         // Rank 0 has the result. The others wait until it is handed in.
//!         Ok(result) if group.rank() == 0 => return Ok(job.finish(result)?),
//!         Ok(_) => {}
//!         Err(error) => job.note_loss(&error)?,
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Session`] is that loop for a model, a [`Trainee`]: it also takes the model's state from group to group.

mod donor;
mod handover;
mod joiner;
mod kept;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod trainee;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use unisono_cluster::membership::{Client, FirstStep, MembershipError, Next, View};
use unisono_cluster::place::{Place, PlaceError};
use unisono_collective::cost::Costs;
use unisono_collective::fabric::{Address, Endpoint};
use unisono_collective::{Epoch, Error, FormError, Group, Loss, Options};
use unisono_net::crash;
use unisono_net::interface::{InterfaceError, own_address};
use unisono_sync::SyncError;

use crate::job::START_PATIENCE;

pub use donor::{Donor, Means};
use handover::Handover;
pub use joiner::{Follower, Unfit};
use server::StateServer;
pub use session::{GIVES_UP, Session, Source};
pub use trainee::{Checkpoint, Saved, Trainee};

/// How long a joiner may take nothing, at least, where it can take over the state only once all of it has arrived. A
/// joiner that has ended is noticed at once. Longer: a member to which one that is stuck clings serves no other meanwhile;
/// what waits for it is bounded. Shorter: one that loads a large model is taken for lost.
const TAKING_OVER: Duration = Duration::from_secs(60);

/// A worker's membership in a job whose workers may come and go.
pub struct ElasticJob {
    client: Client,
    options: Options,
    ip: std::net::IpAddr,
    /// The epoch that this worker was in last; 0 if in none.
    epoch: u64,
    /// Ranks of that epoch that were lost because they were silent.
    silent: Vec<usize>,
    /// What was measured when the group of that epoch formed.
    costs: Option<Costs>,
    /// Whether it is to say which shard it computes.
    is_careful: bool,
    /// Where workers that join get this one's state, if it has a model.
    server: Option<StateServer>,
}

/// Where the others reach a worker.
#[derive(Debug, Serialize, Deserialize)]
struct Reach {
    /// In a group.
    group: Address,
    /// To get its state, beside the training.
    state: Option<SocketAddr>,
}

/// Why a worker cannot be in a job whose workers may come and go.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElasticError {
    /// The environment does not say where this process belongs. Fix how it is started.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The network interface does not exist. Fix `UNISONO_INTERFACE`.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The coordinator is out of reach.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// No port could be opened.
    #[error("cannot listen on {ip}: {cause}")]
    Listen {
        /// Where.
        ip: std::net::IpAddr,
        /// What the system said.
        #[source]
        cause: std::io::Error,
    },
    /// A worker's address cannot be read: it runs another version.
    #[error("the address of rank {rank} cannot be read; does it run another version of Unisono?")]
    Roster {
        /// Whose.
        rank: usize,
    },
    /// The group of an epoch cannot form, and would not in the next one.
    #[error(transparent)]
    Form(#[from] FormError),
    /// The group failed, and another would fail as well.
    #[error(transparent)]
    Group(#[from] Error),
}

impl ElasticJob {
    /// Connects to the coordinator of the job; `None` if it has none, because its launcher did not make it
    /// elastic.
    pub fn join(options: Options) -> Result<Option<ElasticJob>, ElasticError> {
        let place = Place::from_env()?;
        let deadline = options.deadline(START_PATIENCE);
        let Some(client) = Client::connect(&place, options.encrypt, deadline)? else {
            return Ok(None);
        };
        let ip = own_address(client.ip())?;
        let (silent, costs, is_careful, server) = (Vec::new(), None, false, None);
        Ok(Some(ElasticJob { client, options, ip, epoch: 0, silent, costs, is_careful, server }))
    }

    /// Waits until this worker is in an epoch, and forms its group. `None` when the run is complete.
    pub fn enter(&mut self) -> Result<Option<Group>, ElasticError> {
        self.enter_by(None)
    }

    /// As [`ElasticJob::enter`]. A worker that was in no epoch yet first gets the state of a member, and follows
    /// its steps, while the members go on. `None` also if the model [is gone](Follower::is_gone).
    pub fn enter_with(&mut self, model: &mut dyn Follower) -> Result<Option<Group>, ElasticError> {
        let (ip, timeout) = (self.ip, self.options.timeout);
        if self.server.is_none() {
            let patience = match model.lengths() {
                Some(_) => timeout,
                None => timeout.max(TAKING_OVER),
            };
            let server = StateServer::start(ip, self.client.token().clone(), patience);
            self.server = Some(server.map_err(|cause| ElasticError::Listen { ip, cause })?);
        }
        if self.epoch > 0 {
            return self.enter();
        }
        let place = |address: &[u8]| postcard::from_bytes::<Reach>(address).ok()?.state;
        match Handover::find(&self.client, timeout, model, place)? {
            Some(handover) => self.enter_by(Some((handover, model))),
            None if model.is_gone() => Ok(None),
            None => self.enter(),
        }
    }

    /// Becomes true when the launcher of this machine says that the job is to stop: all members are then to agree
    /// on a step after which they do.
    pub fn stopping(&self) -> Arc<AtomicBool> {
        self.client.stopping()
    }

    /// From now on says that a batch is cut into so many shards: more workers than that wait as spares.
    pub fn set_shards(&mut self, shards: usize) {
        self.client.set_shards(shards);
    }

    /// What gives this worker's state to workers that join, once it has [entered](ElasticJob::enter_with) an
    /// epoch.
    pub fn donor(&self) -> Option<&Arc<Donor>> {
        self.server.as_ref().map(StateServer::donor)
    }

    fn enter_by(
        &mut self,
        mut following: Option<(Handover, &mut dyn Follower)>,
    ) -> Result<Option<Group>, ElasticError> {
        loop {
            let ip = self.ip;
            let listening = |cause| ElasticError::Listen { ip, cause };
            let endpoint = Endpoint::bind(ip).map_err(listening)?;
            let state = self.server.as_ref().map(StateServer::address);
            let reach = Reach { group: endpoint.address().clone(), state };
            let address = postcard::to_stdvec(&reach).expect("an address encodes");
            crash::point("ready");
            let silent = std::mem::take(&mut self.silent);
            if let Some(donor) = self.donor() {
                donor.leave_epoch();
            }
            let enter = || self.client.enter(self.epoch, &silent, address);
            let next = match following.take() {
                Some((handover, model)) => {
                    handover.follow(model, enter, |next| matches!(next, Ok(Next::Epoch(_))))
                }
                None => enter(),
            };
            let view = match next? {
                Next::Epoch(view) => view,
                Next::Over => {
                    if let Some(donor) = self.donor() {
                        donor.retire();
                    }
                    return Ok(None);
                }
            };
            (self.epoch, self.is_careful) = (view.epoch, view.is_careful);
            if let Some(donor) = self.donor() {
                donor.enter_epoch(&view.members);
            }
            crash::point("begun");
            match self.form(endpoint, view) {
                Ok(group) => {
                    self.costs = Some(group.costs());
                    return Ok(Some(group));
                }
                Err(ElasticError::Form(error)) => self.note_unformed(&error)?,
                Err(error) => return Err(error),
            }
        }
    }

    /// The number of the epoch that this worker is in, or was in last.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether a worker waits to be let in, so that the members should agree to leave the epoch.
    pub fn is_asked_to_regroup(&self) -> bool {
        self.client.is_asked_to_regroup(self.epoch)
    }

    /// Takes note of why workers could not be kept in step; `false` if another group would fail as well.
    #[must_use]
    pub fn note_failure(&mut self, error: &SyncError) -> bool {
        match error {
            SyncError::Group(error) => self.note_loss(error).is_ok(),
            SyncError::Form(error) => self.note_unformed(error).is_ok(),
            _ => false,
        }
    }

    /// Takes note of why the group failed, if another can follow; passes other errors on.
    pub fn note_loss(&mut self, error: &Error) -> Result<(), ElasticError> {
        match error {
            Error::PeerLost { peer, loss, .. } => {
                if let Loss::Silent(_) = loss {
                    self.silent = vec![peer.0];
                }
                log::debug!("epoch {}: {error}", self.epoch);
                Ok(())
            }
            Error::EpochEnded { .. } | Error::Aborted { .. } => Ok(()),
            error => Err(error.clone().into()),
        }
    }

    /// Notes which shard this worker begins to compute, or that it has computed all of a step. After several epochs
    /// without a step the launcher is told: it may be that a shard kills its workers.
    pub fn note_shard(&self, shard: Option<usize>) -> Result<(), ElasticError> {
        match self.is_careful {
            true => Ok(self.client.computing(shard)?),
            false => Ok(()),
        }
    }

    /// Tells that the first step of this epoch is complete, as rank 0.
    pub fn stepped(&self, first: FirstStep) -> Result<(), ElasticError> {
        Ok(self.client.stepped(first)?)
    }

    /// Hands in the result of the run, as rank 0.
    pub fn finish(&self, result: Vec<u8>) -> Result<(), ElasticError> {
        Ok(self.client.finish(self.epoch, result)?)
    }

    fn form(&self, endpoint: Endpoint, view: View) -> Result<Group, ElasticError> {
        let View { epoch, rank, addresses, token, .. } = view;
        let mut roster = Vec::with_capacity(addresses.len());
        for (rank, address) in addresses.iter().enumerate() {
            let reach: Result<Reach, _> = postcard::from_bytes(address);
            roster.push(reach.map_err(|_| ElasticError::Roster { rank })?.group);
        }
        let (world, ip) = (roster.len(), self.ip);
        let connector = endpoint
            .open(rank, token, roster)
            .map_err(|cause| ElasticError::Listen { ip, cause })?;
        let epoch = Epoch::new(epoch);
        let (ending, forming) = (Arc::downgrade(&epoch), Arc::downgrade(&connector));
        self.client.when_over(epoch.number(), move || {
            if let Some(connector) = forming.upgrade() {
                connector.abandon();
            }
            if let Some(epoch) = ending.upgrade() {
                epoch.end();
            }
        });
        crash::point("forming");
        let options = self.options.clone();
        let group = Group::world_again(connector, epoch, rank, world, options, self.costs)?;
        log::debug!("rank {rank} of {world} in epoch {}", self.epoch);
        Ok(group)
    }

    /// Takes note of why a group did not form, if another may; passes other errors on.
    pub fn note_unformed(&mut self, error: &FormError) -> Result<(), ElasticError> {
        log::debug!("epoch {}: {error}", self.epoch);
        match error {
            FormError::Missing { missing, .. } => {
                self.silent = missing.iter().map(|rank| rank.0).collect();
                Ok(())
            }
            FormError::Peer { .. } | FormError::EpochEnded { .. } => Ok(()),
            FormError::Parent(error) => self.note_loss(error),
            error => Err(error.clone().into()),
        }
    }
}
