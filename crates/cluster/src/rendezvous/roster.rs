//! Who has come, who is missing, and when the gathering is complete: decisions without I/O.
//!
//! A roster begins *forming*. Ranks join, then offer their blob. It becomes *complete* when the
//! last blob is there, or *aborted* by the first thing that makes completion impossible or
//! unwanted; both are final. A rank that comes afterwards is refused.

use serde::{Deserialize, Serialize};
use unisono_net::rank::{Listed, Rank};

/// The state of one rendezvous.
#[derive(Debug)]
pub struct Roster {
    slots: Vec<Slot>,
    state: State,
}

#[derive(Debug)]
enum Slot {
    /// Has not come yet.
    Absent,
    /// Will not come: its process has ended.
    Gone,
    /// Is connected.
    Joined,
    /// Has brought its blob.
    Offered(Vec<u8>),
}

#[derive(Debug)]
enum State {
    Forming,
    Complete,
    Aborted(Abort),
}

/// Why a rank cannot be put on the roster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum JoinRefusal {
    /// There is no such rank.
    #[error(
        "there is no rank {rank} in a world of {world} ranks; give each process a rank below {world}"
    )]
    RankOutOfRange {
        /// The rank that wanted to join.
        rank: u32,
        /// The number of ranks.
        world: u32,
    },
    /// Another process joined as this rank.
    #[error("another process has joined as rank {rank}; give each process a rank of its own")]
    DuplicateRank {
        /// The rank both claim.
        rank: u32,
    },
    /// The rank was started for a world of another size.
    #[error(
        "rank {rank} was started for a world of {theirs} ranks, the others for one of {ours}; start all for the same"
    )]
    WorldMismatch {
        /// The rank that wanted to join.
        rank: u32,
        /// The world as it knows it.
        theirs: u32,
        /// The world of the roster.
        ours: u32,
    },
    /// The group has formed without this process.
    #[error("rank {rank} came after the group had formed; start the whole job again")]
    Late {
        /// The rank that wanted to join.
        rank: u32,
    },
}

/// Why a rendezvous was called off for all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Abort {
    /// A rank joined, and its connection closed before the roster was complete.
    #[error("rank {rank} left before all ranks had joined; see what it printed")]
    Left {
        /// The rank that left.
        rank: u32,
    },
    /// A rank's process ended before it joined.
    #[error("rank {rank} ended before it joined; see what it printed")]
    Gone {
        /// The rank that ended.
        rank: u32,
    },
    /// A rank's patience ended first.
    #[error("{} did not join in time; check that every rank is started", listed(missing))]
    Missing {
        /// The ranks that had not brought their blob.
        missing: Vec<u32>,
    },
    /// The host of the rendezvous called it off.
    #[error("{reason}")]
    Host {
        /// In its words.
        reason: String,
    },
}

impl Roster {
    /// A roster for ranks `0..world`, all absent.
    pub fn new(world: u32) -> Roster {
        Roster { slots: (0..world).map(|_| Slot::Absent).collect(), state: State::Forming }
    }

    /// Puts `rank` on the roster; `world` is the world as the rank knows it.
    pub fn join(&mut self, rank: u32, world: u32) -> Result<(), JoinRefusal> {
        let ours = self.slots.len() as u32;
        if world != ours {
            return Err(JoinRefusal::WorldMismatch { rank, theirs: world, ours });
        }
        let Some(slot) = self.slots.get_mut(rank as usize) else {
            return Err(JoinRefusal::RankOutOfRange { rank, world });
        };
        match (&self.state, &slot) {
            (State::Complete, _) => Err(JoinRefusal::Late { rank }),
            // A rank that comes to a rendezvous that was called off shall hear why.
            (State::Aborted(_), _) => Ok(()),
            (State::Forming, Slot::Joined | Slot::Offered(_)) => {
                Err(JoinRefusal::DuplicateRank { rank })
            }
            (State::Forming, Slot::Absent | Slot::Gone) => {
                *slot = Slot::Joined;
                self.abort_if_someone_is_gone();
                Ok(())
            }
        }
    }

    /// Takes the blob of a rank that has joined. The first blob counts.
    pub fn offer(&mut self, rank: u32, blob: Vec<u8>) {
        if let Some(slot @ Slot::Joined) = self.slots.get_mut(rank as usize) {
            *slot = Slot::Offered(blob);
        }
        let all = self.slots.iter().all(|slot| slot.blob().is_some());
        if all && matches!(self.state, State::Forming) {
            self.state = State::Complete;
        }
    }

    /// The connection of a rank that had joined closed.
    pub fn left(&mut self, rank: u32) {
        self.abort(Abort::Left { rank });
    }

    /// The process of a rank ended. That matters if it has not joined and another rank waits for it;
    /// a job may as well not want to meet at all.
    pub fn gone(&mut self, rank: u32) {
        if let Some(slot @ Slot::Absent) = self.slots.get_mut(rank as usize) {
            *slot = Slot::Gone;
            self.abort_if_someone_is_gone();
        }
    }

    /// A rank's deadline has passed.
    pub fn expire(&mut self) {
        self.abort(Abort::Missing { missing: self.missing() });
    }

    /// Calls it off, unless it is over already.
    pub fn abort(&mut self, abort: Abort) {
        if matches!(self.state, State::Forming) {
            self.state = State::Aborted(abort);
        }
    }

    /// The ranks that have not brought their blob.
    pub fn missing(&self) -> Vec<u32> {
        let missing = (0..).zip(&self.slots).filter(|(_, slot)| slot.blob().is_none());
        missing.map(|(rank, _)| rank).collect()
    }

    /// All blobs by rank, once it is complete.
    pub fn complete(&self) -> Option<Vec<&[u8]>> {
        match self.state {
            State::Complete => self.slots.iter().map(Slot::blob).collect(),
            _ => None,
        }
    }

    /// Why it was called off, if it was.
    pub fn aborted(&self) -> Option<&Abort> {
        match &self.state {
            State::Aborted(abort) => Some(abort),
            _ => None,
        }
    }

    fn abort_if_someone_is_gone(&mut self) {
        let waiting = |slot: &Slot| matches!(slot, Slot::Joined | Slot::Offered(_));
        let gone = self.slots.iter().position(|slot| matches!(slot, Slot::Gone));
        if let Some(rank) = gone
            && self.slots.iter().any(waiting)
        {
            self.abort(Abort::Gone { rank: rank as u32 });
        }
    }
}

impl Slot {
    fn blob(&self) -> Option<&[u8]> {
        match self {
            Slot::Offered(blob) => Some(blob),
            _ => None,
        }
    }
}

/// Ranks in a sentence.
fn listed(ranks: &[u32]) -> String {
    let ranks: Vec<Rank> = ranks.iter().map(|rank| Rank(*rank as usize)).collect();
    Listed(&ranks).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refusals_say_what_is_wrong() {
        let mut roster = Roster::new(2);
        roster.join(0, 2).unwrap();
        assert_eq!(roster.join(0, 2), Err(JoinRefusal::DuplicateRank { rank: 0 }));
        assert_eq!(roster.join(2, 2), Err(JoinRefusal::RankOutOfRange { rank: 2, world: 2 }));
        let mismatch = JoinRefusal::WorldMismatch { rank: 1, theirs: 3, ours: 2 };
        assert_eq!(roster.join(1, 3), Err(mismatch));
        roster.join(1, 2).unwrap();
        roster.offer(0, vec![7]);
        assert_eq!(roster.complete(), None);
        assert_eq!(roster.missing(), [1]);
        roster.offer(1, vec![8]);
        assert_eq!(roster.complete(), Some(vec![&[7][..], &[8][..]]));
        assert_eq!(roster.join(0, 2), Err(JoinRefusal::Late { rank: 0 }));
        roster.left(0);
        assert_eq!(roster.aborted(), None);
    }

    #[test]
    fn a_rank_that_ended_is_missed_only_by_those_who_wait() {
        let mut roster = Roster::new(3);
        roster.gone(2);
        assert_eq!(roster.aborted(), None);
        roster.join(0, 3).unwrap();
        assert_eq!(roster.aborted(), Some(&Abort::Gone { rank: 2 }));
    }

    #[test]
    fn missing_ranks_are_named() {
        let mut roster = Roster::new(40);
        roster.join(3, 40).unwrap();
        roster.offer(3, vec![]);
        roster.expire();
        let text = roster.aborted().unwrap().to_string();
        assert!(text.starts_with("ranks 0–2 and 4–39 did not join"), "{text}");
    }

    proptest! {
        /// Whatever happens in whatever order: complete means one blob of each rank, the first
        /// verdict stays, and nothing panics.
        #[test]
        fn any_history_is_consistent(
            world in 1u32..6,
            history in prop::collection::vec((0u8..6, 0u32..7, 0u8..255), 0..40),
        ) {
            let mut roster = Roster::new(world);
            let mut verdict: Option<Option<Abort>> = None;
            for (event, rank, value) in history {
                match event {
                    0 | 1 => drop(roster.join(rank, world)),
                    2 | 3 => roster.offer(rank, vec![value]),
                    4 => roster.gone(rank),
                    _ if value > 200 => roster.expire(),
                    _ => {}
                }
                if let Some(verdict) = &verdict {
                    prop_assert_eq!(roster.aborted(), verdict.as_ref());
                }
                if let Some(blobs) = roster.complete() {
                    prop_assert_eq!(blobs.len(), world as usize);
                    prop_assert!(roster.missing().is_empty());
                    verdict = Some(None);
                } else if let Some(abort) = roster.aborted() {
                    verdict = Some(Some(abort.clone()));
                }
            }
        }
    }
}
