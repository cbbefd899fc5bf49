//! How far each worker is, and what follows from it: the logic of a server, without threads, sockets or
//! a clock of its own.
//!
//! A *member* is a worker in one of its lives. It joins, is told the clock at which it comes in, and
//! enters. From then on it holds the others back: the *slowest* clock is that of the member that is
//! present and has finished the fewest steps. A member that leaves, because its connection closed or
//! because nothing was heard of it for too long, holds no worker back.
//!
//! A **read** at clock `c` is admitted once `c − slowest ≤ S`. Whatever members that are present have
//! pushed for clocks below `c − S` is then applied, so the weights contain it. Nothing else is promised
//! about a read, and nothing is waited for without a bound.
//!
//! A **push** is identified by worker, life and number; numbers of a life are 1, 2, 3… without gaps. One
//! that was settled before is a *duplicate*: it is acknowledged again and not applied again. A push is
//! settled when it is applied, or dropped for being stale. In *lock-step* pushes are collected until
//! every member that is present has pushed for the round; all of them are then one update.
//!
//! What was settled is written down ([`Entry`]) before it is acknowledged. A server that is restarted
//! [repeats](Core::repeat) what is written, and goes on with every member absent, until they join again.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::staleness::StalenessPolicy;
use crate::{Clock, Life};

/// What is fixed for the life of a run.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether every update is one of all members.
    pub lockstep: bool,
    /// What becomes of stale gradients; of no meaning in lock-step.
    pub stale: StalenessPolicy,
    /// How long a member may be silent.
    pub timeout: Duration,
    /// After how many pushes the run is over; in lock-step, after how many rounds.
    pub total: u64,
}

/// A push: which, and of which step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushId {
    /// The worker that pushes.
    pub worker: u32,
    /// In which of its lives.
    pub life: Life,
    /// Its number in that life, from 1.
    pub number: u64,
    /// Steps that the worker had finished before the one of this gradient.
    pub clock: Clock,
}

/// What a worker is told that joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// The clock at which it comes in.
    pub clock: Clock,
    /// Pushes of this life that are settled.
    pub pushes: u64,
}

/// Why a request of a worker is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// A later life of the worker has joined: this one is over.
    #[error("a later start of this worker has taken its place")]
    Superseded,
    /// It has not joined, or has left since: it must join again.
    #[error("the server takes this worker for gone: it must join again")]
    NotPresent,
    /// Pushes before this one are missing.
    #[error("push {expected}, which comes before this one, never came to this server")]
    Gap {
        /// The number that comes next.
        expected: u64,
    },
    /// It reads at another clock than its own, or pushes for a step that it has not come to.
    #[error("the worker is at clock {clock}")]
    OtherClock {
        /// Its clock, as the server knows it.
        clock: Clock,
    },
}

/// What is known of the weights that a gradient was computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Age {
    /// By how many clocks the worker was ahead of the slowest when it read.
    pub lead: u64,
    /// Updates since it read.
    pub delay: u64,
    /// Members that were present when the push arrived.
    pub present: u32,
}

impl Age {
    /// In clocks: how often every member has updated the weights since they were read.
    pub fn staleness(&self) -> f64 {
        self.delay as f64 / f64::from(self.present.max(1))
    }
}

/// What becomes of a push.
#[derive(Clone, Debug, PartialEq)]
pub enum Pushed {
    /// It is settled as this says, once that is written down.
    Settled(Entry),
    /// It waits for the others of its round.
    Collected,
    /// It was settled before.
    Duplicate,
    /// Its round is over: the worker goes on at this clock.
    Late {
        /// The present round.
        clock: Clock,
    },
}

/// What was settled, as it is written down.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Which update it is, from 1; 0 if the push was dropped.
    pub update: u64,
    /// What the learning rate is multiplied by.
    pub factor: f64,
    /// The pushes of which it is made, by worker.
    pub pushes: Vec<(PushId, Age)>,
}

/// An entry that does not follow from those before it, so that something between them is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Broken {
    /// Another update comes next.
    #[error("update {found} follows update {before}")]
    Update {
        /// The last that is there.
        before: u64,
        /// The one after it.
        found: u64,
    },
    /// Another push of this life comes next.
    #[error("push {found} of worker {worker} in life {life} follows push {before}")]
    Push {
        /// The worker.
        worker: u32,
        /// Its life.
        life: Life,
        /// The last that is there.
        before: u64,
        /// The one after it.
        found: u64,
    },
}

/// What is remembered beyond a crash, besides the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    updates: u64,
    round: Clock,
    ledger: Ledger,
    members: Vec<(u32, Life, Clock, u64)>,
}

/// The pushes that have come, by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Pushes that are part of the weights.
    pub applied: u64,
    /// Pushes that were dropped for being stale.
    pub dropped: u64,
    /// Pushes that had been settled before. Forgotten by a crash.
    pub duplicates: u64,
}

/// The logic of a server.
#[derive(Clone, Debug)]
pub struct Core {
    rules: Rules,
    members: BTreeMap<u32, Member>,
    updates: u64,
    /// In lock-step: rounds that are over, the clock of the present one.
    round: Clock,
    /// In lock-step: who has pushed for the present round.
    collected: BTreeMap<u32, PushId>,
    ledger: Ledger,
}

#[derive(Clone, Debug)]
struct Member {
    life: Life,
    presence: Presence,
    /// Steps it has finished.
    clock: Clock,
    /// Pushes of this life that are settled.
    pushes: u64,
    heard: Duration,
    /// Updates that its last read contained, if that is known, and how far ahead it was.
    read_at: Option<u64>,
    lead: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// It holds no other back, and may do nothing but join.
    Absent,
    /// It has been told its clock.
    Joining,
    /// It counts.
    Present,
}

impl Core {
    /// Before any worker has joined.
    pub fn new(rules: Rules) -> Core {
        Core {
            rules,
            members: BTreeMap::new(),
            updates: 0,
            round: Clock::START,
            collected: BTreeMap::new(),
            ledger: Ledger::default(),
        }
    }

    /// As it was when it was saved, with all members absent.
    pub fn restore(rules: Rules, saved: &Saved) -> Core {
        let mut core = Core::new(rules);
        core.updates = saved.updates;
        core.round = saved.round;
        core.ledger = saved.ledger;
        for &(worker, life, clock, pushes) in &saved.members {
            core.members.insert(worker, Member { clock, pushes, ..Member::new(life) });
        }
        core
    }

    /// What must be remembered beyond a crash.
    pub fn save(&self) -> Saved {
        let members = self.members.iter();
        Saved {
            updates: self.updates,
            round: self.round,
            ledger: Ledger { duplicates: 0, ..self.ledger },
            members: members.map(|(worker, m)| (*worker, m.life, m.clock, m.pushes)).collect(),
        }
    }

    /// Takes over an entry that was written before a crash and after what was saved. One that does not
    /// follow from what is there is refused; then nothing more should be taken over.
    pub fn repeat(&mut self, entry: &Entry) -> Result<(), Broken> {
        if entry.update > 0 {
            let (before, found) = (self.updates, entry.update);
            if found - 1 != before {
                return Err(Broken::Update { before, found });
            }
            self.updates = found;
        }
        for (push, _) in &entry.pushes {
            let member = self.members.entry(push.worker).or_insert_with(|| Member::new(push.life));
            if member.life < push.life {
                *member = Member::new(push.life);
            }
            if member.life == push.life && push.number.checked_sub(1) != Some(member.pushes) {
                let (before, found) = (member.pushes, push.number);
                return Err(Broken::Push { worker: push.worker, life: push.life, before, found });
            }
            member.settle(push);
            if self.rules.lockstep && entry.update > 0 {
                self.round = self.round.max(push.clock.next());
            }
        }
        self.count(entry);
        Ok(())
    }

    /// A worker comes, or comes back after its connection was lost.
    pub fn join(&mut self, worker: u32, life: Life, now: Duration) -> Result<Joined, Refusal> {
        if self.is_superseded(worker, life) {
            return Err(Refusal::Superseded);
        }
        let others = self.slowest_but(Some(worker));
        let furthest = self.members.values().map(|member| member.clock).max();
        let (lockstep, round, updates) = (self.rules.lockstep, self.round, self.updates);
        let member = self.members.entry(worker).or_insert_with(|| Member::new(life));
        if member.life < life {
            *member = Member::new(life);
        }
        member.presence = Presence::Joining;
        member.heard = now;
        // What it read before a crash of this server is as old as can be told.
        member.read_at = member.read_at.or(Some(updates));
        // Where no other is present, it goes on where the furthest has been.
        let slowest = others.or(furthest).unwrap_or_default();
        let clock = if lockstep { round } else { member.clock.max(slowest) };
        Ok(Joined { clock, pushes: member.pushes })
    }

    /// A worker that has joined begins at this clock, which is that of this server or of one where the
    /// slowest is further.
    pub fn enter(&mut self, worker: u32, life: Life, clock: Clock) -> Result<(), Refusal> {
        let least = if self.rules.lockstep { self.round } else { Clock::START };
        let member = self.member(worker, life)?;
        if member.presence == Presence::Absent {
            return Err(Refusal::NotPresent);
        }
        member.presence = Presence::Present;
        member.clock = member.clock.max(clock).max(least);
        Ok(())
    }

    /// A worker is gone, or this life of it is.
    pub fn leave(&mut self, worker: u32, life: Life) {
        if let Ok(member) = self.member(worker, life) {
            member.presence = Presence::Absent;
        }
    }

    /// Something was heard of a worker.
    pub fn hear(&mut self, worker: u32, life: Life, now: Duration) {
        if let Ok(member) = self.member(worker, life) {
            member.heard = now;
        }
    }

    /// Takes those members for gone of which nothing was heard for too long: which workers these are.
    pub fn expire(&mut self, now: Duration) -> Vec<u32> {
        let timeout = self.rules.timeout;
        let silent = self.members.iter_mut().filter(|(_, member)| {
            member.presence != Presence::Absent && now.saturating_sub(member.heard) > timeout
        });
        let gone = silent.map(|(worker, member)| {
            member.presence = Presence::Absent;
            *worker
        });
        gone.collect()
    }

    /// Whether a worker may read at its clock now; if not, it waits until something changes. `bound` is
    /// by how much it may be ahead.
    pub fn read(
        &mut self,
        worker: u32,
        life: Life,
        clock: Clock,
        bound: Option<u64>,
    ) -> Result<bool, Refusal> {
        let (updates, slowest) = (self.updates, self.slowest());
        let member = self.present(worker, life)?;
        if clock != member.clock {
            return Err(Refusal::OtherClock { clock: member.clock });
        }
        let slowest = slowest.expect("the reader itself is present");
        let lead = clock.lead_over(slowest);
        if bound.is_some_and(|bound| lead > bound) {
            return Ok(false);
        }
        member.read_at = Some(updates);
        member.lead = lead;
        Ok(true)
    }

    /// A push has come.
    pub fn push(&mut self, push: PushId) -> Result<Pushed, Refusal> {
        let (updates, present) = (self.updates, self.present_members());
        let (lockstep, round, stale) = (self.rules.lockstep, self.round, self.rules.stale);
        let member = self.member(push.worker, push.life)?;
        if push.number <= member.pushes {
            self.ledger.duplicates += 1;
            return Ok(Pushed::Duplicate);
        }
        let expected = member.pushes.saturating_add(1);
        let member = self.present(push.worker, push.life)?;
        if push.number > expected {
            return Err(Refusal::Gap { expected });
        }
        if push.clock > member.clock {
            return Err(Refusal::OtherClock { clock: member.clock });
        }
        if lockstep {
            if push.clock != round {
                return Ok(Pushed::Late { clock: round });
            }
            self.collected.insert(push.worker, push);
            return Ok(Pushed::Collected);
        }
        let delay = updates - member.read_at.unwrap_or(updates);
        let age = Age { lead: member.lead, delay, present };
        member.settle(&push);
        let (update, factor) = match stale.factor(age.staleness()) {
            Some(factor) => {
                self.updates += 1;
                (self.updates, factor)
            }
            None => (0, 0.0),
        };
        let entry = Entry { update, factor, pushes: vec![(push, age)] };
        self.count(&entry);
        Ok(Pushed::Settled(entry))
    }

    /// In lock-step: settles a push that was found to be late, by dropping it.
    pub fn drop_late(&mut self, push: PushId) -> Entry {
        let age = Age { present: self.present_members(), ..Age::default() };
        if let Ok(member) = self.member(push.worker, push.life) {
            member.settle(&push);
        }
        let entry = Entry { update: 0, factor: 0.0, pushes: vec![(push, age)] };
        self.count(&entry);
        entry
    }

    /// In lock-step: the update of the round, if every member that is present has pushed. To be asked after
    /// every change, before reads are admitted.
    pub fn commit(&mut self) -> Option<Entry> {
        let slowest = self.slowest()?;
        let is_missing = |(worker, member): (&u32, &Member)| {
            // A member that entered at the clock of another server, which was further, takes no part yet.
            let takes_part = member.presence == Presence::Present && member.clock <= self.round;
            takes_part && !self.collected.contains_key(worker)
        };
        if self.members.iter().any(is_missing) {
            return None;
        }
        if self.collected.is_empty() {
            // No member is left of this round: it stays without an update.
            self.round = self.round.max(slowest);
            return None;
        }
        let present = self.present_members();
        self.round = self.round.next();
        self.updates += 1;
        let collected = std::mem::take(&mut self.collected);
        for push in collected.values() {
            if let Some(member) = self.members.get_mut(&push.worker) {
                member.settle(push);
            }
        }
        let age = Age { lead: 0, delay: 0, present };
        let pushes = collected.into_values().map(|push| (push, age)).collect();
        let entry = Entry { update: self.updates, factor: 1.0, pushes };
        self.count(&entry);
        Some(entry)
    }

    /// Whether a push of this number is settled.
    pub fn is_settled(&self, worker: u32, life: Life, number: u64) -> bool {
        self.members.get(&worker).is_some_and(|m| m.life == life && m.pushes >= number)
    }

    /// Whether a worker may do anything but join.
    pub fn is_present(&self, worker: u32, life: Life) -> bool {
        let present = |m: &Member| m.life == life && m.presence == Presence::Present;
        self.members.get(&worker).is_some_and(present)
    }

    /// The clock of a worker, if this life of it has been here before.
    pub fn clock(&self, worker: u32, life: Life) -> Option<Clock> {
        self.members.get(&worker).filter(|member| member.life == life).map(|member| member.clock)
    }

    /// The latest life of a worker that has been here, if one has.
    pub fn life(&self, worker: u32) -> Option<Life> {
        self.members.get(&worker).map(|member| member.life)
    }

    /// Whether a later life of a worker has joined.
    pub fn is_superseded(&self, worker: u32, life: Life) -> bool {
        self.members.get(&worker).is_some_and(|member| member.life > life)
    }

    /// The clock of the slowest member that is present.
    pub fn slowest(&self) -> Option<Clock> {
        self.slowest_but(None)
    }

    /// Members that are present.
    pub fn present_members(&self) -> u32 {
        self.members.values().filter(|member| member.presence == Presence::Present).count() as u32
    }

    /// Updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// In lock-step: rounds that are over, the clock of the present one.
    pub fn round(&self) -> Clock {
        self.round
    }

    /// What became of all pushes.
    pub fn ledger(&self) -> Ledger {
        self.ledger
    }

    /// Whether as much was pushed as the run wants.
    pub fn is_finished(&self) -> bool {
        let settled = self.ledger.applied + self.ledger.dropped;
        let done = if self.rules.lockstep { self.round.0 } else { settled };
        done >= self.rules.total
    }

    fn count(&mut self, entry: &Entry) {
        let pushes = entry.pushes.len() as u64;
        match entry.update {
            0 => self.ledger.dropped += pushes,
            _ => self.ledger.applied += pushes,
        }
    }

    fn slowest_but(&self, but: Option<u32>) -> Option<Clock> {
        let present = self.members.iter().filter(|(worker, member)| {
            member.presence == Presence::Present && Some(**worker) != but
        });
        present.map(|(_, member)| member.clock).min()
    }

    fn member(&mut self, worker: u32, life: Life) -> Result<&mut Member, Refusal> {
        match self.members.get_mut(&worker) {
            Some(member) if member.life == life => Ok(member),
            Some(member) if member.life > life => Err(Refusal::Superseded),
            _ => Err(Refusal::NotPresent),
        }
    }

    fn present(&mut self, worker: u32, life: Life) -> Result<&mut Member, Refusal> {
        let member = self.member(worker, life)?;
        match member.presence {
            Presence::Present => Ok(member),
            Presence::Absent | Presence::Joining => Err(Refusal::NotPresent),
        }
    }
}

impl Member {
    fn new(life: Life) -> Member {
        Member {
            life,
            presence: Presence::Absent,
            clock: Clock::START,
            pushes: 0,
            heard: Duration::ZERO,
            read_at: None,
            lead: 0,
        }
    }

    /// A push of this worker is settled: perhaps one of an earlier life, which has numbers of its own,
    /// but has finished the step.
    fn settle(&mut self, push: &PushId) {
        if self.life == push.life {
            self.pushes = push.number;
        }
        self.clock = self.clock.max(push.clock.next());
    }
}
