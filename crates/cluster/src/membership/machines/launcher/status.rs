//! What there is to tell people of a job.

use serde::{Deserialize, Serialize};

use super::{Launcher, RECOVERIES, Role};
use crate::membership::FirstStep;
use crate::membership::coordinator::History;
use crate::membership::core::WorkerId;
use crate::membership::machines::record::Machine;

/// What the leader of a job publishes for people: not what the launchers go by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The present epoch.
    pub epoch: u64,
    /// Its members, by rank.
    pub members: Vec<WorkerId>,
    /// The machine whose launcher coordinates.
    pub leader: Machine,
    /// The machines that are connected.
    pub machines: Vec<Machine>,
    /// Workers that wait.
    pub spares: Vec<WorkerId>,
    /// The processes of members and spares, as far as they are known.
    pub processes: Vec<(WorkerId, u32)>,
    /// Into how many shards a batch is cut, if the workers have said so.
    pub shards: Option<u32>,
    /// The first step of the newest epoch that has completed one.
    pub step: Option<FirstStep>,
    /// What has happened under this leader; of the recoveries, the last ones.
    pub history: History,
    /// How many recoveries there were under this leader.
    pub recovered: u64,
    /// Whether the run is over.
    pub is_complete: bool,
    /// When it was published, in seconds since 1970 by the clock of that machine.
    pub at: u64,
}

impl Launcher {
    /// What there is to tell people of a job that this launcher leads.
    pub fn status(&self) -> Option<Status> {
        let Role::Leading(leading) = &self.role else { return None };
        let machines = leading.followers.values().map(|follower| follower.machine.clone());
        let mut machines: Vec<Machine> = machines.chain([self.me.clone()]).collect();
        machines.sort_by_key(|machine| machine.number);
        let spares = leading.coordinator.spares().into_iter();
        let mut history = leading.coordinator.history().clone();
        let recovered = history.recoveries.len();
        history.recoveries.drain(..recovered.saturating_sub(RECOVERIES));
        Some(Status {
            epoch: self.record.epoch,
            members: self.record.members.clone(),
            leader: self.me.clone(),
            machines,
            spares: spares.filter(|id| !self.record.members.contains(id)).collect(),
            processes: leading.coordinator.processes().into_iter().collect(),
            shards: leading.coordinator.shards(),
            step: leading.coordinator.first_step().cloned(),
            history,
            recovered: recovered as u64,
            is_complete: self.record.is_complete,
            at: 0,
        })
    }
}
