//! What a worker does between two epochs, and in one: it forms a group, takes or hands on state, and makes steps.

use std::collections::BTreeMap;

use super::super::WorkerId;
use super::{At, Checked, Process, Sabotage, Up, World, check};
use crate::membership::model::{State, part, update};

/// The members of an epoch, and what they have told each other.
#[derive(Clone, Debug, Hash)]
pub struct Group {
    pub members: Vec<WorkerId>,
    pub has_arrived: Vec<bool>,
    pub left: Vec<Option<Leave>>,
    /// A member was disturbed, so that the group may fail.
    pub is_faulty: bool,
    /// Rank 0 has said that a step is complete.
    pub has_stepped: bool,
    /// After how many steps the first member was asked to let others in.
    pub asked_at: Option<u64>,
    pub steps: Vec<Option<Option<u64>>>,
    pub given: Option<State>,
    /// By step and bucket.
    pub parts: BTreeMap<(u64, usize), Parts>,
}

/// By rank, a sum of gradients and a vote.
pub type Parts = Vec<Option<(u64, bool)>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leave {
    Orderly,
    Failed,
}

impl World {
    /// Whether the training thread of a worker can go on.
    pub fn can_act(&self, index: usize) -> bool {
        let process = &self.processes[index];
        if !process.is_alive || process.is_stopped {
            return false;
        }
        let Some(group) = self.groups.get(&process.epoch) else {
            return process.at == At::Building;
        };
        match process.at {
            At::Building | At::Giving | At::Loading | At::Saving { .. } | At::Handing => true,
            At::Waiting | At::Over | At::Gone => false,
            At::Forming => group.has_arrived.iter().all(|arrived| *arrived),
            At::Sharing { is_in } => !is_in || group.steps.iter().all(Option::is_some),
            At::Receiving { has_begun } => !has_begun || group.given.is_some(),
            At::Bucket { is_in: false, .. } | At::Barrier { is_in: false } => true,
            At::Bucket { bucket, .. } => {
                self.is_complete(group, (process.state.expect("it has state").steps, bucket))
            }
            At::Barrier { .. } => self.is_complete(group, (self.job.steps, 0)),
        }
    }

    fn is_complete(&self, group: &Group, at: (u64, usize)) -> bool {
        let is_in = |part: &&Option<(u64, bool)>| part.is_some();
        group.parts.get(&at).is_some_and(|parts| {
            let missing = parts.len() - parts.iter().filter(is_in).count();
            missing <= usize::from(self.is_sabotaged(Sabotage::CommitEarly))
        })
    }

    /// The training thread of a worker goes on.
    pub fn act(&mut self, index: usize) -> Checked {
        let Process { at, epoch, rank, .. } = self.processes[index];
        match at {
            At::Building => self.say_ready(index, 0, Vec::new()),
            At::Forming => self.processes[index].at = At::Sharing { is_in: false },
            At::Sharing { is_in: false } => {
                let steps = self.processes[index].state.map(|state| state.steps);
                self.group(epoch).steps[rank] = Some(steps);
                self.processes[index].at = At::Sharing { is_in: true };
            }
            At::Sharing { is_in: true } => {
                self.settle_state(index)?;
                self.tidy(epoch);
            }
            At::Giving => {
                self.tally.count("states given");
                self.group(epoch).given = self.processes[index].state;
                self.next_step(index, false);
            }
            At::Receiving { has_begun: false } => {
                let most = self.group(epoch).steps.iter().flatten().flatten().max().copied();
                let half = most.map(|steps| State { steps, weights: 1 });
                self.processes[index].state =
                    half.filter(|_| self.is_sabotaged(Sabotage::HalfReceived));
                self.processes[index].at = At::Receiving { has_begun: true };
            }
            At::Receiving { has_begun: true } => {
                self.processes[index].state = self.group(epoch).given;
                self.next_step(index, false);
                self.tidy(epoch);
            }
            At::Loading => {
                self.tally.count("checkpoints loaded");
                let state = self.checkpoint.unwrap_or(self.reference(0));
                self.processes[index].state = Some(state);
                self.next_step(index, false);
            }
            At::Bucket { bucket, is_in: false, regroup } => {
                let Process { state, is_asked, .. } = self.processes[index];
                let state = state.expect("it has state");
                let part = (self.part(epoch, rank, state, bucket), is_asked && bucket == 0);
                self.contribute(epoch, rank, (state.steps, bucket), part);
                self.processes[index].at = At::Bucket { bucket, is_in: true, regroup };
            }
            At::Bucket { bucket, is_in: true, regroup } => {
                self.check_newest(epoch, "completes a bucket")?;
                let steps = self.processes[index].state.expect("it has state").steps;
                let parts = &self.group(epoch).parts[&(steps, bucket)];
                let regroup = regroup || parts.iter().flatten().any(|(_, vote)| *vote);
                if bucket + 1 < self.job.buckets {
                    let bucket = bucket + 1;
                    self.processes[index].at = At::Bucket { bucket, is_in: false, regroup };
                } else {
                    self.apply(index)?;
                    let steps = steps + 1;
                    if rank == 0 && steps.is_multiple_of(self.job.every) {
                        self.processes[index].at = At::Saving { regroup };
                    } else {
                        self.next_step(index, regroup);
                    }
                }
            }
            At::Saving { regroup } => {
                self.check_newest(epoch, "writes a checkpoint")?;
                self.checkpoint = self.processes[index].state;
                self.next_step(index, regroup);
            }
            At::Barrier { is_in: false } => {
                self.contribute(epoch, rank, (self.job.steps, 0), (0, false));
                self.processes[index].at = At::Barrier { is_in: true };
            }
            At::Barrier { is_in: true } if rank == 0 => self.processes[index].at = At::Handing,
            At::Barrier { is_in: true } => {
                self.group(epoch).left[rank] = Some(Leave::Orderly);
                self.say_ready(index, epoch, Vec::new());
            }
            At::Handing => {
                self.check_newest(epoch, "writes the result")?;
                self.result = self.processes[index].state;
                self.processes[index].at = At::Over;
                self.processes[index].to_coordinator.push_back(Up::Finished { epoch });
            }
            At::Waiting | At::Over | At::Gone => unreachable!("it waits"),
        }
        Ok(())
    }

    fn say_ready(&mut self, index: usize, after: u64, silent: Vec<usize>) {
        let process = &mut self.processes[index];
        process.at = At::Waiting;
        process.to_coordinator.push_back(Up::Ready { after, silent });
    }

    /// All know how many steps each has made: what does this rank do?
    fn settle_state(&mut self, index: usize) -> Checked {
        let Process { id, epoch, rank, .. } = self.processes[index];
        let takes_any = self.is_sabotaged(Sabotage::OldDonor);
        let steps = self.group(epoch).steps.iter().map(|steps| steps.flatten());
        let steps: Vec<Option<u64>> = steps.collect();
        let most = match takes_any {
            true => steps.iter().flatten().next().copied(),
            false => steps.iter().flatten().max().copied(),
        };
        let donor = steps.iter().position(|steps| steps.is_some() && *steps == most);
        self.processes[index].at = match donor {
            None => At::Loading,
            Some(_) if steps.iter().all(|steps| *steps == most) => {
                self.next_step(index, false);
                return Ok(());
            }
            Some(donor) if donor == rank => At::Giving,
            Some(_) if steps[rank] == most => {
                self.next_step(index, false);
                return Ok(());
            }
            Some(_) => At::Receiving { has_begun: false },
        };
        check(steps[rank] <= most, || format!("{id:?} is handed an older state"))
    }

    /// Forgets what all members have read.
    fn tidy(&mut self, epoch: u64) {
        let members = self.processes.iter().filter(|process| process.epoch == epoch);
        let count = members.clone().filter(|process| process.at > At::Loading).count();
        let group = self.group(epoch);
        if count == group.members.len() {
            group.steps.fill(None);
            group.given = None;
        }
    }

    fn next_step(&mut self, index: usize, regroup: bool) {
        let leaves_alone = self.is_sabotaged(Sabotage::NoVote) && self.processes[index].is_asked;
        let Process { epoch, rank, state, .. } = self.processes[index];
        let steps = state.expect("it has state").steps;
        if steps >= self.job.steps {
            self.processes[index].at = At::Barrier { is_in: false };
        } else if regroup || leaves_alone {
            self.tally.count("leaves to regroup");
            self.group(epoch).left[rank] = Some(Leave::Orderly);
            self.say_ready(index, epoch, Vec::new());
        } else {
            self.processes[index].at = At::Bucket { bucket: 0, is_in: false, regroup: false };
        }
    }

    fn part(&self, epoch: u64, rank: usize, state: State, bucket: usize) -> u64 {
        part(state, bucket, rank, self.groups[&epoch].members.len())
    }

    fn contribute(&mut self, epoch: u64, rank: usize, at: (u64, usize), part: (u64, bool)) {
        let group = self.group(epoch);
        // A rank contributes to a step after it has completed the last one, and then all have contributed to
        // that: nothing of the one before is read any more.
        group.parts.retain(|(step, _), _| step + 1 >= at.0);
        let world = group.members.len();
        group.parts.entry(at).or_insert_with(|| vec![None; world])[rank] = Some(part);
    }

    fn apply(&mut self, index: usize) -> Checked {
        let Process { id, epoch, state, .. } = self.processes[index];
        let state = state.expect("it has state");
        let sum = |bucket| {
            let parts = &self.groups[&epoch].parts[&(state.steps, bucket)];
            parts.iter().flatten().map(|(part, _)| *part).fold(0, u64::wrapping_add)
        };
        let weights = update(state.weights, (0..self.job.buckets).map(sum));
        let new = State { steps: state.steps + 1, weights };
        let is_right = new == self.reference(new.steps);
        check(is_right, || format!("wrong weights of {id:?} after {} steps", new.steps))?;
        self.processes[index].state = Some(new);
        self.say_stepped(index);
        let asked_at = self.groups[&epoch].asked_at.unwrap_or(new.steps);
        check(new.steps <= asked_at + 2, || "a spare is not let in".into())
    }

    /// It matters to workers that are to leave, which only the simulator has.
    fn say_stepped(&mut self, index: usize) {
        let Process { epoch, rank, .. } = self.processes[index];
        let is_first = self.job.is_fair && rank == 0 && !self.group(epoch).has_stepped;
        if is_first {
            self.group(epoch).has_stepped = true;
            self.processes[index].to_coordinator.push_back(Up::Stepped { epoch });
        }
    }

    fn check_newest(&self, epoch: u64, what: &str) -> Checked {
        let newest = self.core.epoch();
        check(epoch == newest, || format!("a member of epoch {epoch} {what} in epoch {newest}"))
    }

    /// Whether a worker can find that its group has failed.
    pub fn can_fail(&self, index: usize) -> bool {
        let process = &self.processes[index];
        if !process.is_in_group() || process.is_stopped || process.at >= At::Handing {
            return false;
        }
        let left = &self.groups[&process.epoch].left;
        let has_failed = left.contains(&Some(Leave::Failed));
        has_failed || (left.contains(&Some(Leave::Orderly)) && !self.can_act(index))
    }

    /// Ranks other than its own that a worker cannot hear because they are stopped.
    pub fn stopped_peers(&self, index: usize) -> Vec<(usize, WorkerId)> {
        let process = &self.processes[index];
        if !process.is_in_group() || process.is_stopped || process.at >= At::Handing {
            return Vec::new();
        }
        let is_stopped = |(rank, id): &(usize, &WorkerId)| {
            let peer = self.index(**id);
            *rank != process.rank && peer.is_some_and(|peer| self.processes[peer].is_stopped)
        };
        let group = &self.groups[&process.epoch];
        let members = group.members.iter().enumerate().filter(is_stopped);
        let members = members.filter(|(rank, _)| group.left[*rank].is_none());
        members.map(|(rank, id)| (rank, *id)).collect()
    }

    /// A worker finds that its group has failed.
    pub fn fail(&mut self, index: usize, silent: Vec<usize>) -> Checked {
        let Process { id, epoch, rank, .. } = self.processes[index];
        let group = self.group(epoch);
        check(group.is_faulty, || format!("the group of {id:?} fails without a fault"))?;
        group.left[rank] = Some(Leave::Failed);
        self.tally.count(if silent.is_empty() { "failures" } else { "failures by silence" });
        self.say_ready(index, epoch, silent);
        Ok(())
    }

    /// The worker and a peer at random that it takes to be silent, though it is not.
    pub fn suspect_wrongly(&mut self, index: usize, peer: usize) -> Checked {
        let Process { epoch, rank, .. } = self.processes[index];
        if !self.processes[index].is_in_group() || self.processes[index].at >= At::Handing {
            return Ok(());
        }
        let group = self.group(epoch);
        let peer = peer % group.members.len();
        if peer == rank {
            return Ok(());
        }
        group.is_faulty = true;
        self.tally.count("wrong suspicions");
        self.fail(index, vec![peer])
    }

    /// That peers which left in an orderly way look like lost ones.
    pub fn fail_rudely(&mut self, index: usize) -> Checked {
        let process = &self.processes[index];
        let can = process.is_in_group() && !process.is_stopped && process.at < At::Handing;
        if !can || !self.groups[&process.epoch].left.contains(&Some(Leave::Orderly)) {
            return Ok(());
        }
        let epoch = process.epoch;
        self.group(epoch).is_faulty = true;
        self.tally.count("orderly ends taken for losses");
        self.fail(index, Vec::new())
    }

    /// Whether the next thing that a worker does is seen by no other process, and makes no difference to what it
    /// says if its group fails.
    pub fn acts_unseen(&self, index: usize) -> bool {
        let last = self.job.buckets - 1;
        let is_unseen = match self.processes[index].at {
            At::Forming | At::Sharing { is_in: true } | At::Loading => true,
            At::Bucket { bucket, is_in: true, .. } => bucket < last,
            _ => false,
        };
        is_unseen && self.can_act(index)
    }
}
