//! Groups inside a group.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::{Group, Pricing};
use crate::engine::MakeEngine;
use crate::error::{FormError, InvalidCall};
use crate::fabric::GroupSetup;

impl Group {
    /// Splits the group: ranks with the same color form a group, ordered by key and then by
    /// rank. `None` joins no group. Every rank must call it.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Group>, FormError> {
        let mine = [color.map_or(-1, i64::from), key];
        let mut all = vec![0i64; 2 * self.size()];
        self.all_gather(&mine, &mut all)?;
        let number = self.inner.children.fetch_add(1, Ordering::SeqCst);
        let Some(color) = color else { return Ok(None) };
        let entries = all.chunks_exact(2).enumerate();
        let mut members: Vec<(i64, usize)> = entries
            .filter(|(_, entry)| entry[0] == i64::from(color))
            .map(|(rank, entry)| (entry[1], rank))
            .collect();
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        let id = self.child_id(number, u64::from(color));
        self.descend(&members, id, self.inner.make_engine.clone()).map(Some)
    }

    /// A group of the ranks in `members`, in this order. Only they call it, all with the same
    /// list.
    pub fn subgroup(&self, members: &[usize]) -> Result<Group, FormError> {
        let world = self.size();
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != members.len() || !sorted.contains(&self.rank()) {
            return Err(InvalidCall::Members.into());
        }
        if let Some(&rank) = sorted.iter().find(|&&m| m >= world) {
            return Err(InvalidCall::NoSuchRank { rank, world }.into());
        }
        self.listed(b"list", members, self.inner.make_engine.clone())
    }

    /// A group of the same ranks over another engine, beside this one. Every rank must call it, with an engine
    /// that is the same on all.
    pub fn beside(&self, make_engine: Arc<MakeEngine>) -> Result<Group, FormError> {
        let all: Vec<usize> = (0..self.size()).collect();
        self.listed(b"beside", &all, make_engine)
    }

    /// The next group of a list of ranks.
    ///
    /// Ranks outside the list do not take part, and of those inside some may have tried before
    /// without the others: there is no number on which all agree. So all groups of a list have
    /// the same id, and this rank makes one after the other. When one has formed, every member
    /// has taken all connections that are meant for it, and those of the next are its own.
    fn listed(
        &self,
        kind: &[u8],
        members: &[usize],
        make_engine: Arc<MakeEngine>,
    ) -> Result<Group, FormError> {
        let list: Vec<u8> = members.iter().flat_map(|m| (*m as u64).to_le_bytes()).collect();
        let id = hash(&[kind, &self.inner.setup.id.to_le_bytes(), &list]);
        let turn =
            self.inner.lists.lock().expect("no panic while locked").entry(id).or_default().clone();
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.descend(members, id, make_engine)
    }

    fn child_id(&self, number: u64, color: u64) -> u64 {
        let id = self.inner.setup.id.to_le_bytes();
        hash(&[b"split", &id, &number.to_le_bytes(), &color.to_le_bytes()])
    }

    fn descend(
        &self,
        members: &[usize],
        id: u64,
        make_engine: Arc<MakeEngine>,
    ) -> Result<Group, FormError> {
        if let Some(failure) = self.failure() {
            return Err(failure.into());
        }
        let inner = &self.inner;
        let me = members.iter().position(|&m| m == self.rank()).expect("checked by the caller");
        let setup = GroupSetup {
            id,
            epoch: inner.setup.epoch,
            members: members.iter().map(|&m| inner.setup.members[m]).collect(),
            me,
            options: inner.setup.options.clone(),
        };
        let (connector, epoch) = (inner.connector.clone(), inner.epoch.clone());
        let region = |&m: &usize| inner.topology.region(inner.topology.host(m)) as u32;
        let pricing = Pricing::Inherited(inner.costs, members.iter().map(region).collect());
        let formed = Group::form(connector, epoch, setup, pricing, make_engine);
        formed.map_err(|error| match error {
            // A rank that is missed here is about to be missed in this group, whose error says more.
            FormError::Peer { .. } | FormError::Missing { .. } => {
                inner.state.verdict().map_or(error, FormError::from)
            }
            error => error,
        })
    }
}

/// A number that different inputs do not share, but for one chance in 2⁶⁴; never the world's 0.
fn hash(parts: &[&[u8]]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let bytes: [u8; 8] = hasher.finalize().as_bytes()[..8].try_into().expect("eight of 32 bytes");
    u64::from_le_bytes(bytes).max(1)
}
