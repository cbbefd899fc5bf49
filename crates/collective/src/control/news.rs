//! What a rank tells all others, passed on from neighbour to neighbour.
//!
//! A [`Fact`] is about one thing: why the group failed, which rank left, that one waits in a call. A rank that
//! learns a fact which is new to it acts on it and hands it to all neighbours but the one it has it from;
//! what it knows already stops there. So a fact crosses every connection once, or twice if both ends
//! learn it at the same time, and reaches every rank to which neighbours lead.
//!
//! Facts about the same thing do not add up. That a rank waits in call 7 is passed on once, of whichever
//! rank said it first: the others only compare. If two statements about one call differ, then on
//! the way between the ranks that made them there are two neighbours that passed on different ones, and each
//! of them hears the other's. So calls that differ are found out with as many messages as one fact
//! takes, however many ranks wait.
//!
//! No clock, no sockets: [`News::hear`] takes a fact, [`News::due`] says what a neighbour is to be told.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::reason::Reason;
use crate::call::{self, Call};
use crate::excerpt::{beginning, ending};
use crate::waits::{PLACE, Statement};
use unisono_net::rank::Rank;

/// The largest text that travels with a goodbye.
pub const MAX_TEXT: usize = 512;

/// Bytes of facts that are sent at once. Larger: more memory per neighbour. Smaller: more frames when
/// many ranks leave at once.
pub const MAX_NEWS: usize = 64 << 10;

/// Bytes that a fact has at most, all its texts at their limits.
const MAX_FACT: usize = 4 << 10;

/// Failures that are passed on. The first is the group's; ranks that differ in pairs learn from the others
/// which calls are in question, and tell their lines. More: more messages when everything fails at once.
const FAILURES: usize = 4;

/// Calls whose first statement is remembered. A rank is never so far ahead of another.
const CALLS: usize = 64;

/// Places remembered: each of the two callers of every failure tells of two calls.
const PLACES: usize = 4 * FAILURES;

/// Threads of a rank whose last statement is remembered.
const THREADS: usize = 8;

/// Something all ranks of a group should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fact {
    /// The group has failed.
    Failed(Reason),
    /// A rank has left.
    Left {
        /// Which.
        rank: u32,
        /// The first call without it.
        seq: u32,
        /// Why, if it was not done.
        why: Option<String>,
    },
    /// A rank waits in a call.
    Stuck {
        /// Which.
        rank: u32,
        /// The call.
        #[serde(with = "call::wire")]
        call: Call,
    },
    /// Where in its program a rank made a call, if it knows.
    Place {
        /// Which rank of the job, as in a [`Reason`].
        rank: Rank,
        /// The number of the call.
        number: u32,
        /// The place.
        place: Option<String>,
    },
    /// Others wait for a rank in a call.
    Awaited {
        /// Which rank.
        rank: u32,
        /// The number of the call.
        number: u32,
    },
    /// A thread of a rank waits, and others wait for that rank.
    Waits(Statement),
}

/// What a fact means for the rank that hears it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is new: act on it.
    New(Fact),
    /// Two ranks made different calls in the same place.
    Differ([(usize, Call); 2]),
}

/// A fact that no rank of this group would tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// What one rank knows, and what its neighbours are to be told.
pub struct News {
    members: Vec<Rank>,
    failures: Vec<Reason>,
    /// Per rank, whether it has left and what it said.
    left: Vec<Option<(u32, Option<String>)>>,
    /// The first statement heard or made per call; in the order in which they came.
    stuck: VecDeque<(usize, Call)>,
    /// Calls up to this one are compared and not passed on: their first statements are forgotten.
    forgotten: Option<u32>,
    places: VecDeque<(Rank, u32)>,
    /// Per rank, the last call in which others wait for it.
    awaited: Vec<Option<u32>>,
    /// Rank, thread and order of the last statements of threads.
    waits: VecDeque<(Rank, u64, u64)>,
    neighbours: Vec<Neighbour>,
}

struct Neighbour {
    rank: usize,
    due: Vec<Fact>,
}

impl News {
    /// Nothing is known yet about a group of these ranks.
    pub fn new(members: Vec<Rank>) -> News {
        let world = members.len();
        News {
            members,
            failures: Vec::new(),
            left: vec![None; world],
            stuck: VecDeque::new(),
            forgotten: None,
            places: VecDeque::new(),
            awaited: vec![None; world],
            waits: VecDeque::new(),
            neighbours: Vec::new(),
        }
    }

    /// There is a connection to a rank. If it is the first, the rank is told what is known of the failure
    /// and of the ranks that left.
    pub fn connect(&mut self, rank: usize) {
        if self.neighbours.iter().any(|neighbour| neighbour.rank == rank) {
            return;
        }
        let failures = self.failures.iter().cloned().map(Fact::Failed);
        let left = self.left.iter().enumerate().filter_map(|(rank, left)| {
            let (seq, why) = left.clone()?;
            Some(Fact::Left { rank: rank as u32, seq, why })
        });
        let due = failures.chain(left).collect();
        self.neighbours.push(Neighbour { rank, due });
    }

    /// The connection to a rank is gone.
    pub fn disconnect(&mut self, rank: usize) {
        self.neighbours.retain(|neighbour| neighbour.rank != rank);
    }

    /// Takes a fact of this rank's own, or one that the neighbour `from` told.
    pub fn hear(&mut self, from: Option<usize>, fact: Fact) -> Result<Option<Event>, Malformed> {
        let fact = self.checked(fact)?;
        if let Fact::Stuck { rank, call } = &fact
            && let Some((other, first)) = self.stuck.iter().find(|(_, first)| first.seq == call.seq)
        {
            let differ = Event::Differ([(*other, *first), (*rank as usize, *call)]);
            return Ok((first != call).then_some(differ));
        }
        if !self.is_new(&fact) {
            return Ok(None);
        }
        for neighbour in self.neighbours.iter_mut().filter(|n| Some(n.rank) != from) {
            neighbour.take(fact.clone());
        }
        Ok(Some(Event::New(fact)))
    }

    /// The first statement about every call, of which this rank may not have made some when it was heard.
    pub fn stuck(&self) -> impl Iterator<Item = (usize, Call)> {
        self.stuck.iter().copied()
    }

    /// What to tell a neighbour now, encoded; `None` if it knows everything.
    pub fn due(&mut self, rank: usize) -> Option<Vec<u8>> {
        let neighbour = self.neighbours.iter_mut().find(|neighbour| neighbour.rank == rank)?;
        if neighbour.due.is_empty() {
            return None;
        }
        let mut bytes = Vec::new();
        let mut told = 0;
        for fact in &neighbour.due {
            if bytes.len() + MAX_FACT > MAX_NEWS {
                break;
            }
            bytes = encode(fact, bytes);
            told += 1;
        }
        neighbour.due.drain(..told);
        Some(bytes)
    }

    /// Notes a fact; whether it was unknown.
    fn is_new(&mut self, fact: &Fact) -> bool {
        match fact {
            Fact::Failed(reason) => {
                let is_new = self.failures.len() < FAILURES && !self.failures.contains(reason);
                if is_new {
                    self.failures.push(reason.clone());
                }
                is_new
            }
            Fact::Left { rank, seq, why } => {
                let left = &mut self.left[*rank as usize];
                let is_new = left.is_none();
                left.get_or_insert_with(|| (*seq, why.clone()));
                is_new
            }
            Fact::Stuck { rank, call } => {
                // A statement that was forgotten may still go round.
                if self.forgotten.is_some_and(|seq| !is_after(call.seq, seq)) {
                    return false;
                }
                if self.stuck.len() == CALLS
                    && let Some((_, oldest)) = self.stuck.pop_front()
                {
                    self.forgotten = Some(oldest.seq);
                }
                self.stuck.push_back((*rank as usize, *call));
                true
            }
            Fact::Place { rank, number, .. } => {
                let key = (*rank, *number);
                let is_new = self.places.len() < PLACES && !self.places.contains(&key);
                if is_new {
                    self.places.push_back(key);
                }
                is_new
            }
            Fact::Awaited { rank, number } => {
                let awaited = &mut self.awaited[*rank as usize];
                let is_new = awaited.is_none_or(|known| is_after(*number << 1, known << 1));
                if is_new {
                    *awaited = Some(*number);
                }
                is_new
            }
            Fact::Waits(statement) => self.is_newer(statement),
        }
    }

    /// Whether a thread's statement is later than its last, which it replaces.
    fn is_newer(&mut self, statement: &Statement) -> bool {
        let Statement { rank, thread, order, .. } = *statement;
        let known = self.waits.iter_mut().find(|(r, t, _)| (*r, *t) == (rank, thread));
        if let Some((_, _, known)) = known {
            let is_newer = order > *known;
            *known = order.max(*known);
            return is_newer;
        }
        if self.waits.iter().filter(|(of, ..)| *of == rank).count() == THREADS {
            let oldest = self.waits.iter().position(|(of, ..)| *of == rank);
            self.waits.remove(oldest.expect("counted above"));
        }
        self.waits.push_back((rank, thread, order));
        true
    }

    /// The fact, if it is about ranks of this group, its texts no longer than they may be.
    fn checked(&self, fact: Fact) -> Result<Fact, Malformed> {
        let is_rank = |rank: u32| (rank as usize) < self.left.len();
        Ok(match fact {
            Fact::Failed(reason) if reason.is_of(&self.members) => Fact::Failed(reason.shortened()),
            Fact::Left { rank, seq, why } if is_rank(rank) => {
                Fact::Left { rank, seq, why: why.map(|why| first_line(&why, MAX_TEXT)) }
            }
            Fact::Place { rank, number, place } if self.members.contains(&rank) => {
                Fact::Place { rank, number, place: place.map(|place| ending(&place, PLACE)) }
            }
            Fact::Stuck { rank, .. } | Fact::Awaited { rank, .. } if is_rank(rank) => fact,
            Fact::Waits(statement) => Fact::Waits(statement.shortened()),
            _ => return Err(Malformed),
        })
    }
}

impl Neighbour {
    /// Adds a fact to what it is to be told, in place of one that it outdates.
    fn take(&mut self, fact: Fact) {
        if let Fact::Awaited { rank, number } = fact
            && let Some(Fact::Awaited { number: earlier, .. }) = self
                .due
                .iter_mut()
                .find(|due| matches!(due, Fact::Awaited { rank: r, .. } if *r == rank))
        {
            *earlier = number;
            return;
        }
        self.due.push(fact);
    }
}

/// Adds a fact to what a neighbour is sent.
pub fn encode(fact: &Fact, bytes: Vec<u8>) -> Vec<u8> {
    postcard::to_extend(fact, bytes).expect("plain data always encodes")
}

/// The facts that a neighbour sent.
pub fn decode(mut bytes: &[u8]) -> Result<Vec<Fact>, Malformed> {
    let mut facts = Vec::new();
    while !bytes.is_empty() {
        let (fact, rest) = postcard::take_from_bytes(bytes).map_err(|_| Malformed)?;
        facts.push(fact);
        bytes = rest;
    }
    Ok(facts)
}

/// Whether one number comes after another. They begin again at 0 after the last: of two, the one from
/// which it is less far to the other comes first.
fn is_after(one: u32, other: u32) -> bool {
    one.wrapping_sub(other) as i32 > 0
}

/// The first line of a text, of at most `most` bytes.
pub fn first_line(text: &str, most: usize) -> String {
    beginning(text.lines().next().unwrap_or_default(), most)
}

#[cfg(test)]
mod tests;
